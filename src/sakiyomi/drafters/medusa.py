"""Medusa: heads on the target's last state that each say what stands so many tokens further on (Cai et al. 2401.10774).

Head i looks i + 1 tokens beyond the one that the target's own head makes of the state, without regard to the tokens in
between: logits = W (b_n(.. b_1(x))) with blocks b(x) = x + SiLU(V x + c). The target has chosen its token by the time
that a draft is wanted, so head 0 says what comes next, and a draft is a tree of what the heads hold likely.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sakiyomi.distribution import Ids
from sakiyomi.drafters.layers import Apply, Kernels
from sakiyomi.drafters.trained import (
    DraftWeights,
    LastStateDrafter,
    LastStateSession,
    TargetParts,
    check_fit,
    draft_names,
    whole,
)
from sakiyomi.drafters.tree import Choices, Choosing
from sakiyomi.interfaces import Costs
from sakiyomi.models import open_weights
from sakiyomi.sampling import SamplingParams
from sakiyomi.targets.decoder import Reader

_PREFIXES = ("", "medusa_head.", "medusa_heads.", "heads.")


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """The tensors of a head: each block's weight [hidden_size, hidden_size] and bias [hidden_size], or None.

    ``output``: [D, hidden_size].
    """

    blocks: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    output: torch.Tensor


class MedusaHeads:
    """Heads, ready to run. Several may have one output, the very tensor.

    ``names``: the target's tokens that a reduced draft vocabulary is of, int64 [D]; None where it has the target's own.
    """

    def __init__(self, heads: Sequence[MedusaHead], names: Ids | None, kernels: Kernels) -> None:
        self.names = names
        self.hidden_size = heads[0].output.shape[1]
        self.device = kernels.device
        outputs: dict[int, Apply] = {}
        for head in heads:
            if id(head.output) not in outputs:
                outputs[id(head.output)] = kernels.linear(head.output)
        self._heads = [([kernels.linear(*block) for block in head.blocks], outputs[id(head.output)]) for head in heads]

    def __len__(self) -> int:
        return len(self._heads)

    def logits(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """Return a head's logits: float32 [rows, hidden_size], of what the target's head reads, -> [rows, D]."""
        blocks, output = self._heads[head]
        x = states.to(self.device)
        for block in blocks:
            x = x + F.silu(block(x))
        return output(x)


class MedusaDrafter(LastStateDrafter):
    """Drafts with Medusa heads, as a tree; see :class:`~sakiyomi.drafters.trained.TreeDrafter`.

    ``costs``: what a head costs, measured if None. Raises OptionError.
    """

    def __init__(
        self,
        model: MedusaHeads,
        *,
        costs: Costs | None = None,
        width: int = 4,
        max_nodes: int = 24,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.model = model
        super().__init__(
            "medusa",
            model.names,
            width=width,
            max_nodes=max_nodes,
            eos_ids=eos_ids,
            deepest=len(model),
            costs=costs,
        )

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> MedusaSession:
        """Begin a sequence with these token ids."""
        return MedusaSession(self, prompt, params, sampled)

    @torch.inference_mode()
    def _run(self, rows: int) -> None:
        logits = self.model.logits(0, torch.zeros(rows, self.model.hidden_size))
        Choosing(self.names, SamplingParams(), False, self.width)(logits, 0, 0)


class MedusaSession(LastStateSession):
    """Medusa heads beside one sequence."""

    def __init__(self, drafter: MedusaDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        super().__init__(drafter, prompt, params, sampled)
        self._model = drafter.model

    def _begin(self, state: torch.Tensor) -> _Expand:
        return _Expand(self._model, self._choose, state, len(self._ids))


class _Expand:
    """Runs a head for each level of one draft: only those that are wanted, since no two share the input of an output,
    where nearly all of the time goes.
    """

    def __init__(self, model: MedusaHeads, choose: Choosing, state: torch.Tensor, length: int) -> None:
        self._model, self._choose, self._state = model, choose, state
        self._length, self._head = length, 0

    def __call__(self, level: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[Choices]:
        logits = self._model.logits(self._head, self._state)
        (choices,) = self._choose(logits, self._length + self._head, self._length)
        self._head += 1
        return [choices] * len(level)


def read_heads(
    folder: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], parts: TargetParts
) -> tuple[list[MedusaHead], Ids | None]:
    """Return the heads in a Medusa checkpoint as they are stored, and the target's tokens of their draft vocabulary.

    Two layouts are known. The paper's own, whose names may follow ``medusa_head.``, ``medusa_heads.`` or ``heads.``:
    block l of head h is ``h.l.linear.weight`` and ``h.l.linear.bias``, the output ``h.n.weight`` after n blocks.
    vLLM's: ``blocks.h.layers.l.weight``, with biases or without, and ``lm_heads.h.weight``, or one ``lm_head.weight``
    for all heads where config.json says ``original_lm_head``. A reduced draft vocabulary is vLLM's ``token_map``, the
    target's ids, or ``d2t``: the draft's token i is the target's i + d2t[i].

    Raises OptionError for heads of another target; CorruptModelError or UnsupportedModelError.
    """
    count = whole(folder, config, "medusa_num_heads", "num_heads")
    depth = whole(folder, config, "medusa_num_layers", "num_hidden_layers", default=1, least=0)
    for what, size in (("hidden_size", parts.hidden_size), ("vocab_size", parts.vocab_size)):
        check_fit(folder, what, whole(folder, config, what, default=size), size)
    reader = Reader(weights, torch.float32)
    hidden, vocab = parts.hidden_size, parts.vocab_size
    of_vllm = any("lm_head" in name for name in weights)

    def output_name(prefix: str, head: int) -> str:
        if not of_vllm:
            return f"{prefix}{head}.{depth}.weight"
        names = [f"{prefix}lm_heads.{head}.weight"]
        if config.get("original_lm_head"):
            names += [f"{prefix}lm_head.weight", f"{prefix}lm_heads.0.weight"]
        return next((name for name in names if name in weights), names[0])

    prefix = next((each for each in _PREFIXES if output_name(each, 0) in weights), "")
    while not of_vllm and output_name(prefix, count) in weights:
        count += 1  # the config.json of the paper's own heads names fewer than there are

    ids = None
    for name in (prefix + "token_map", "token_map", prefix + "d2t", "d2t"):
        if name in weights:
            ids = draft_names(f"{folder}: {name!r}", weights[name], vocab, offsets=name.endswith("d2t"))
            break

    outputs: dict[str, torch.Tensor] = {}

    def output(name: str) -> torch.Tensor:
        if name not in outputs:
            stored = weights.get(name)
            if stored is not None and stored.dim() == 2:
                check_fit(folder, "hidden_size", stored.shape[1], hidden)
            if ids is not None and stored is not None and len(stored) == vocab:
                outputs[name] = reader.table(name, vocab, hidden)[torch.from_numpy(ids)]
            else:
                outputs[name] = reader.table(name, vocab if ids is None else len(ids), hidden)
        return outputs[name]

    heads = []
    for head in range(count):
        matrix = output(output_name(prefix, head))
        blocks = []
        for layer in range(depth):
            block = f"{prefix}blocks.{head}.layers.{layer}" if of_vllm else f"{prefix}{head}.{layer}.linear"
            weight = reader.table(f"{block}.weight", hidden, hidden)
            bias = reader.table(f"{block}.bias", hidden) if f"{block}.bias" in reader else None
            blocks.append((weight, bias))
        heads.append(MedusaHead(tuple(blocks), matrix))
    return heads, ids


def load(
    folder: Path,
    config: Mapping[str, Any],
    parts: TargetParts,
    *,
    weights: DraftWeights = "auto",
    kernels: str = "auto",
    device: torch.device | str | None = None,
    costs: Costs | None = None,
    width: int = 4,
    max_nodes: int = 24,
) -> MedusaDrafter:
    """Load Medusa heads for a target; the layouts are those of :func:`read_heads`.

    ``config``: the folder's config.json. ``weights``, ``kernels``, ``device``: see
    :class:`~sakiyomi.drafters.layers.Kernels`; the rest: :class:`MedusaDrafter`. Raises OptionError where they were
    made for another target, ModelError.
    """
    with torch.inference_mode():
        heads, names = read_heads(folder, open_weights(folder), config, parts)
        model = MedusaHeads(heads, names, Kernels.find(weights, kernels, device))
    return MedusaDrafter(model, costs=costs, width=width, max_nodes=max_nodes, eos_ids=parts.eos_ids)
