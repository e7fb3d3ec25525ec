"""Medusa: heads on the target's last state that each say what stands so many tokens further on (Cai et al. 2401.10774).

Head i looks i + 1 tokens beyond the one that the target's own head makes of the state, without regard to the tokens in
between: logits = W (b_n(.. b_1(x))) with blocks b(x) = x + SiLU(V x + c). The target has chosen its token by the time
that a draft is wanted, so head 0 says what comes next, and a draft is a tree of what the heads hold likely.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sakiyomi.costs import ModelCosts, measure_rows
from sakiyomi.distribution import Ids
from sakiyomi.drafters.layers import Apply, Kernels
from sakiyomi.drafters.mlp import (
    STEP_ROWS,
    LastState,
    Node,
    as_draft,
    check_fit,
    check_size,
    draft_ids,
    whole,
)
from sakiyomi.drafters.model import ALTERNATIVE, likely
from sakiyomi.drafters.trained import DraftWeights, TargetParts
from sakiyomi.interfaces import HEAD_INPUT, Costs, Draft, GoOn, always
from sakiyomi.models import open_weights
from sakiyomi.sampling import SamplingParams, host
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

    ``ids``: the target's ids of a reduced draft vocabulary, int64 [D]; None where it has the target's own.
    """

    def __init__(self, heads: Sequence[MedusaHead], ids: Ids | None, kernels: Kernels) -> None:
        self.ids = ids
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


class MedusaDrafter:
    """Drafts with Medusa heads.

    ``width``: how many tokens a head may hold likely; 1 drafts chains. ``max_nodes``: most tokens of a draft. Nothing
    is drafted after ``eos_ids`` and a request's ``stop_token_ids``. ``costs``: what a head costs, measured if None.
    Raises OptionError.
    """

    name = "medusa"
    samples = False
    hidden_layers = (HEAD_INPUT,)

    def __init__(
        self,
        model: MedusaHeads,
        *,
        costs: Costs | None = None,
        width: int = 4,
        max_nodes: int = 24,
        eos_ids: Collection[int] = (),
    ) -> None:
        check_size(width, max_nodes)
        self.model = model
        self.width, self.max_nodes = width, max_nodes
        self.eos_ids = frozenset(eos_ids)
        self.costs: Costs | None = costs or ModelCosts(measure_rows(self._step, STEP_ROWS, seconds=0.03))

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> MedusaSession:
        """Begin a sequence with these token ids."""
        return MedusaSession(self, prompt, params)

    def _step(self, rows: int) -> None:
        """Run a head as a draft does; of as many sequences as there are rows."""
        logits = self.model.logits(0, torch.zeros(rows, self.model.hidden_size, device=self.model.device))
        for row in host(logits):
            likely(row, self.model.ids, SamplingParams(), 0, 0, self.width)


class MedusaSession(LastState):
    """Medusa heads beside one sequence."""

    def __init__(self, drafter: MedusaDrafter, prompt: Sequence[int], params: SamplingParams) -> None:
        super().__init__(prompt, params, drafter.eos_ids)
        self._drafter = drafter

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return a tree of what the heads hold likely, at most ``budget`` tokens deep; nothing without the last state.

        Nearly all of a head's time goes into its output, which no other head shares the input of. So heads are run one
        by one, and only while they are wanted: ``go_on`` is asked after each, with the confidence of its likeliest.
        """
        drafter, model, params = self._drafter, self._drafter.model, self.params
        levels: list[list[tuple[int, float]]] = []
        if (state := self.state) is None:
            return Draft(drafter=drafter.name)
        for head in range(min(budget, len(model), drafter.max_nodes)):
            (logits,) = host(model.logits(head, state))
            found = likely(logits, model.ids, params, params.seed, len(self.ids) + head, drafter.width)
            if not found:  # its logits aren't numbers
                break
            levels.append([(index if model.ids is None else int(model.ids[index]), each) for index, each in found])
            if not go_on(max(each for _, each in found)) or levels[-1][0][0] in self.ends:
                break
        return as_draft(_tree(levels, drafter.max_nodes, self.ends), drafter.name)


def _tree(levels: Sequence[Sequence[tuple[int, float]]], most: int, ends: Collection[int]) -> list[Node]:
    """Return up to ``most`` nodes: the path of each level's first (token, confidence), then the likeliest others."""
    nodes: list[Node] = []
    waiting: list[tuple[float, int, int, int, int]] = []  # (-path, age, parent, level, which of the level's tokens)

    def wait(parent: int, level: int, which: int) -> None:
        if level < len(levels) and which < len(levels[level]):
            path = (nodes[parent].path if parent >= 0 else 1.0) * levels[level][which][1]
            if path >= ALTERNATIVE:
                heapq.heappush(waiting, (-path, len(nodes) * len(levels) + level, parent, level, which))

    for level, ((token, confidence), *_) in enumerate(levels):
        nodes.append(Node(token, level - 1, confidence, confidence * (nodes[-1].path if nodes else 1.0)))
    for level in range(len(levels)):
        wait(level - 1, level, 1)
    while waiting and len(nodes) < most:
        negative, _, parent, level, which = heapq.heappop(waiting)
        token, confidence = levels[level][which]
        nodes.append(Node(token, parent, confidence, -negative))
        wait(parent, level, which + 1)  # after its elder, so that a node's first child is the head's choice
        if token not in ends:
            wait(len(nodes) - 1, level + 1, 0)
    return nodes


def read_heads(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], parts: TargetParts
) -> tuple[list[MedusaHead], Ids | None]:
    """Return the heads in a Medusa checkpoint as they are stored, and the target's ids of their draft vocabulary.

    Two layouts are known. The paper's own, whose names may follow ``medusa_head.``, ``medusa_heads.`` or ``heads.``:
    block l of head h is ``h.l.linear.weight`` and ``h.l.linear.bias``, the output ``h.n.weight`` after n blocks.
    vLLM's: ``blocks.h.layers.l.weight``, with biases or without, and ``lm_heads.h.weight``, or one ``lm_head.weight``
    for all heads where config.json says ``original_lm_head``. A reduced draft vocabulary is vLLM's ``token_map``, the
    target's ids, or ``d2t``: the draft's token i is the target's i + d2t[i].

    Raises OptionError for heads of another target; CorruptModelError or UnsupportedModelError.
    """
    count = whole(config, "medusa_num_heads", "num_heads")
    depth = whole(config, "medusa_num_layers", "num_hidden_layers", default=1, least=0)
    check_fit("hidden size", whole(config, "hidden_size", default=parts.hidden_size), parts.hidden_size)
    check_fit("vocabulary size", whole(config, "vocab_size", default=parts.vocab_size), parts.vocab_size)
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
            given = weights[name]
            if name.endswith("token_map") and given.dim() == 1:
                given = given - torch.arange(len(given), dtype=given.dtype, device=given.device)
            ids = draft_ids(given, vocab, name=name)
            break

    outputs: dict[str, torch.Tensor] = {}

    def output(name: str) -> torch.Tensor:
        if name not in outputs:
            stored = weights.get(name)
            if stored is not None and stored.dim() == 2:
                check_fit("hidden size", stored.shape[1], hidden)
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
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    parts: TargetParts,
    *,
    weights: DraftWeights = "auto",
    kernels: str = "auto",
    costs: Costs | None = None,
    width: int = 4,
    max_nodes: int = 24,
) -> MedusaDrafter:
    """Load Medusa heads for a target; the layouts are those of :func:`read_heads`.

    ``config``: the folder's config.json. ``weights``, ``kernels``: see :class:`~sakiyomi.drafters.layers.Kernels`; the
    rest: :class:`MedusaDrafter`. Raises OptionError where they were made for another target, ModelError.
    """
    check_size(width, max_nodes)
    heads, ids = read_heads(open_weights(folder), config, parts)
    model = MedusaHeads(heads, ids, Kernels.find(weights, kernels, parts.head.device))
    return MedusaDrafter(model, costs=costs, width=width, max_nodes=max_nodes, eos_ids=parts.eos_ids)
