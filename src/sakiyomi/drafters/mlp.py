"""The MLP speculator: a small recurrent network on the target's last state (Wertheimer et al. 2404.19124).

From what the target's head read last, and the token that followed, one step says what comes next; the next step goes on
from there with the token that was chosen. Step i, with the state s of the step before and that step's token:

    s = GELU(ln_i(proj_i s + (ew / sw) emb_i[token]))        logits = head_i s
    sw = 0.5^(0.5 / n_predict)        ew = sqrt((1 - sw^2) inner_dim / 2)        ln(x) = x / rms(x) * weight + bias

The paths of a draft that go on from one level to the next do so together, as rows of one step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from sakiyomi.drafters.layers import Kernels
from sakiyomi.drafters.trained import (
    DraftWeights,
    LastStateDrafter,
    LastStateSession,
    TargetParts,
    check_fit,
    draft_names,
    whole,
    write_folder,
)
from sakiyomi.drafters.tree import Choices, Choosing
from sakiyomi.errors import UnsupportedModelError
from sakiyomi.interfaces import Costs
from sakiyomi.models import open_weights
from sakiyomi.sampling import SamplingParams
from sakiyomi.targets.decoder import Reader

_T = TypeVar("_T")
_PREFIX = "speculator."
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """The dimensions and options of an MLP speculator."""

    hidden_size: int  # the target's: "emb_dim" in config.json
    inner_dim: int
    vocab_size: int
    n_predict: int
    tie_weights: bool = False
    scale_input: bool = False

    @classmethod
    def from_json(cls, folder: Path, config: Mapping[str, Any]) -> MlpConfig:
        """Read a folder's config.json of IBM's format. Raises CorruptModelError or UnsupportedModelError."""
        if (method := config.get("method", "sum_rnn")) != "sum_rnn":
            raise UnsupportedModelError(f"{folder}: method {method!r} is not supported: MLP speculators are sum_rnn")
        hidden_size = whole(folder, config, "emb_dim", "hidden_size")
        return cls(
            hidden_size=hidden_size,
            inner_dim=whole(folder, config, "inner_dim", default=0, least=0) or hidden_size,
            vocab_size=whole(folder, config, "vocab_size"),
            n_predict=whole(folder, config, "n_predict"),
            tie_weights=bool(config.get("tie_weights", False)),
            scale_input=bool(config.get("scale_input", False)),
        )

    def stored(self, kind: str, step: int) -> int:
        """Return the step under whose number a step's ``emb``, ``proj``, ``ln`` or ``head`` is stored.

        With tied weights all steps share one of each; only the first projection is its own, since it reads the target's
        state.
        """
        if not self.tie_weights:
            return step
        return min(step, 1) if kind == "proj" else 0

    def tensors(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is stored of a speculator, as it is stored, by name without a prefix.

        ``weights``: with or without the prefix ``speculator.``, ``emb.i.weight`` [vocab_size, inner_dim],
        ``proj.i.weight`` [inner_dim, hidden_size if i = 0 else inner_dim], ``ln.i.weight`` and ``ln.i.bias``
        [inner_dim], ``head.i.weight`` [D, inner_dim]. D is vocab_size, or the length of ``d2t`` (int64 [D]): then the
        draft's token i is the target's i + d2t[i]. Raises CorruptModelError or UnsupportedModelError for what doesn't
        fit.
        """
        prefix = _PREFIX if any(name.startswith(_PREFIX) for name in weights) else ""
        reader = Reader(weights, torch.float32)
        found: dict[str, torch.Tensor] = {}
        size = self.vocab_size
        for name in (prefix + "d2t", "d2t"):
            if name in weights:
                found["d2t"] = weights[name]
                size = len(draft_names("'d2t'", found["d2t"], self.vocab_size))
                break
        for step in range(self.n_predict):
            for name, shape in (
                (f"emb.{self.stored('emb', step)}.weight", (self.vocab_size, self.inner_dim)),
                (f"proj.{self.stored('proj', step)}.weight", (self.inner_dim, self._width(step))),
                (f"ln.{self.stored('ln', step)}.weight", (self.inner_dim,)),
                (f"ln.{self.stored('ln', step)}.bias", (self.inner_dim,)),
                (f"head.{self.stored('head', step)}.weight", (size, self.inner_dim)),
            ):
                if name not in found:
                    found[name] = reader.table(prefix + name, *shape).detach()
        return found

    def _width(self, step: int) -> int:
        """Return the number of features that a step's projection reads."""
        return self.inner_dim if step else self.hidden_size


class MlpSpeculator:
    """The network, ready to run. ``weights``: see :meth:`MlpConfig.tensors`, which raises.

    ``names``: the target's tokens that a reduced draft vocabulary is of, int64 [D]; None where it has the target's own.
    """

    def __init__(self, config: MlpConfig, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self.config = config
        self.device = kernels.device
        tensors = config.tensors(weights)
        self.names = draft_names("'d2t'", tensors["d2t"], config.vocab_size) if "d2t" in tensors else None

        def per_step(kind: str, make: Callable[[int], _T]) -> list[_T]:
            stored = [config.stored(kind, step) for step in range(config.n_predict)]
            made = {step: make(step) for step in sorted(set(stored))}
            return [made[step] for step in stored]

        def norm(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight, bias = tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"]
            return weight.to(self.device, torch.float32), bias.to(self.device, torch.float32)

        # Of embeddings only the rows that are looked up are read: on a processor they stay where they are stored.
        self._emb = per_step("emb", lambda i: tensors[f"emb.{i}.weight"].to(self.device))
        self._proj = per_step("proj", lambda i: kernels.linear(tensors[f"proj.{i}.weight"]))
        self._ln = per_step("ln", norm)
        self._head = per_step("head", lambda i: kernels.linear(tensors[f"head.{i}.weight"]))
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self._emb_weight = math.sqrt((1 - state_weight**2) * config.inner_dim / 2) / state_weight

    def first(self, state: torch.Tensor) -> torch.Tensor:
        """Return what the first step goes on from: float32 [rows, hidden_size], of what the target's head reads."""
        state = state.to(self.device)
        return _normalised(state) * 0.5**0.5 if self.config.scale_input else state

    def step(self, step: int, states: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states after a step, and logits of what follows: float32 [rows, inner_dim] and [rows, D].

        ``states``: those after the step before (step 0: from :meth:`first`), one row for each of ``tokens``, the
        target's ids of the tokens that follow what the states were made of.
        """
        weight, bias = self._ln[step]
        emb = self._emb[step]
        x = self._proj[step](states)
        x = x + self._emb_weight * emb.index_select(0, torch.tensor(tokens, device=emb.device)).float()
        x = F.gelu(_normalised(x) * weight + bias)
        return x, self._head[step](x)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)


class MlpDrafter(LastStateDrafter):
    """Drafts with an MLP speculator, as a tree; see :class:`~sakiyomi.drafters.trained.TreeDrafter`.

    ``costs``: what a step costs, measured if None. Raises OptionError.
    """

    def __init__(
        self,
        model: MlpSpeculator,
        *,
        costs: Costs | None = None,
        width: int = 4,
        max_nodes: int = 24,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.model = model
        super().__init__(
            "mlp",
            model.names,
            width=width,
            max_nodes=max_nodes,
            eos_ids=eos_ids,
            deepest=model.config.n_predict,
            costs=costs,
        )

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> MlpSession:
        """Begin a sequence with these token ids."""
        return MlpSession(self, prompt, params, sampled)

    @torch.inference_mode()
    def _run(self, rows: int) -> None:
        model = self.model
        states = model.first(torch.zeros(rows, model.config.hidden_size))
        _, logits = model.step(0, states, [0] * rows)
        Choosing(self.names, SamplingParams(), False, self.width)(logits, 0, 0)


class MlpSession(LastStateSession):
    """An MLP speculator beside one sequence."""

    def __init__(self, drafter: MlpDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        super().__init__(drafter, prompt, params, sampled)
        self._model = drafter.model

    def _begin(self, state: torch.Tensor) -> _Expand:
        return _Expand(self._model, self._choose, state, self._ids[-1], len(self._ids))


class _Expand:
    """Runs the steps of one draft, each on all paths of a level together."""

    def __init__(self, model: MlpSpeculator, choose: Choosing, state: torch.Tensor, last: int, length: int) -> None:
        self._model, self._choose, self._state = model, choose, model.first(state)
        self._last, self._length, self._step = last, length, 0
        self._states: dict[int, torch.Tensor] = {}  # after the step of each node of the level before

    def __call__(self, level: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[Choices]:
        step, states, before = self._step, self._state, [self._last]
        if step:
            states = torch.stack([self._states[parents[node]] for node in level])
            before = [tokens[node] for node in level]
        states, logits = self._model.step(step, states, before)
        self._states = dict(zip(level, states.unbind(0), strict=True))
        self._step += 1
        return self._choose(logits, self._length + step, self._length)


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
) -> MlpDrafter:
    """Load an MLP speculator in IBM's format for a target.

    ``config``: the folder's config.json. ``weights``, ``kernels``, ``device``: see
    :class:`~sakiyomi.drafters.layers.Kernels`; the rest: :class:`MlpDrafter`. Raises OptionError where it was made for
    another kind of target, ModelError.
    """
    dimensions = MlpConfig.from_json(folder, config)
    check_fit(folder, "hidden_size", dimensions.hidden_size, parts.hidden_size)
    check_fit(folder, "vocab_size", dimensions.vocab_size, parts.vocab_size)
    with torch.inference_mode():
        model = MlpSpeculator(dimensions, open_weights(folder), Kernels.find(weights, kernels, device))
    return MlpDrafter(model, costs=costs, width=width, max_nodes=max_nodes, eos_ids=parts.eos_ids)


def save_mlp(
    folder: str | os.PathLike[str],
    config: MlpConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    d2t: torch.Tensor | None = None,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write an MLP speculator in IBM's format; see :func:`~sakiyomi.drafters.trained.write_folder`.

    ``tensors``: as :class:`MlpSpeculator` reads them, without a prefix; others are left out. ``d2t``: the reduced
    draft vocabulary, if there is one; our extension, which other engines don't know. ``facts``: what else config.json
    shall tell, such as ``base_model_name_or_path``. Raises CorruptModelError where tensors are missing or misshapen,
    OptionError where nothing can be written.
    """
    given = config.tensors(dict(tensors) if d2t is None else {**tensors, "d2t": d2t})
    if d2t is None and config.tie_weights:  # vLLM wants the head by the name of each step
        given.update({f"head.{step}.weight": given["head.0.weight"] for step in range(1, config.n_predict)})
    told: dict[str, object] = {
        **(facts or {}),
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_dim,
        "vocab_size": config.vocab_size,
        "n_predict": config.n_predict,
        "n_candidates": config.n_predict,
        "top_k_tokens_per_head": [1] * config.n_predict,  # vLLM: one for each step
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
        "torch_dtype": str(given["head.0.weight"].dtype).removeprefix("torch."),
    }
    if d2t is not None:
        told["draft_vocab_size"] = len(d2t)
    write_folder(Path(folder), told, {_PREFIX + name: tensor for name, tensor in given.items()})
