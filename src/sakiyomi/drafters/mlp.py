"""The MLP speculator: a small recurrent network on the target's last state (Wertheimer et al. 2404.19124).

From what the target's head read last, and the token that followed, one step says what comes next; the next step goes on
from there with the token that was chosen. Step i, with the state s of the step before and that step's token:

    s = GELU(ln_i(proj_i s + (ew / sw) emb_i[token]))        logits = head_i s
    sw = 0.5^(0.5 / n_predict)        ew = sqrt((1 - sw^2) inner_dim / 2)        ln(x) = x / rms(x) * weight + bias

A draft is a tree where the steps leave more than one token likely: the likeliest paths of each level are gone on with
together, as rows of one step (as in EAGLE-2, Li et al. 2406.16858).

This file also has what the drafters that read only the target's last state share.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from sakiyomi.costs import ModelCosts, measure_rows
from sakiyomi.distribution import Ids
from sakiyomi.drafters.layers import Kernels
from sakiyomi.drafters.model import ALTERNATIVE, likely
from sakiyomi.drafters.trained import DraftWeights, TargetParts
from sakiyomi.errors import CorruptModelError, OptionError, UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Costs, Draft, GoOn, always
from sakiyomi.models import open_weights
from sakiyomi.sampling import SamplingParams, host
from sakiyomi.targets.decoder import Reader

_T = TypeVar("_T")
_PREFIX = "speculator."
_EPS = 1e-6
STEP_ROWS = (1, 2, 4, 8)  # of what is measured


def whole(config: Mapping[str, Any], *names: str, default: int | None = None, least: int = 1) -> int:
    """Return the number that a drafter's config.json has under one of these names. Raises CorruptModelError."""
    for name in names:
        if (value := config.get(name)) is not None:
            if type(value) is not int or value < least:
                raise CorruptModelError(
                    f"the drafter's config.json has {name}={value!r}: must be a whole number of at least {least}"
                )
            return value
    if default is None:
        raise CorruptModelError(f"the drafter's config.json lacks {names[0]!r}")
    return default


def check_fit(what: str, drafter: int, target: int) -> None:
    """Raise OptionError where a drafter was made for another ``what`` than the target has."""
    if drafter != target:
        raise OptionError(f"the drafter was made for a target of {what} {drafter}, this one has {target}")


def draft_ids(tensor: torch.Tensor, vocab_size: int, *, name: str = "d2t") -> Ids:
    """Return the target's ids of a reduced draft vocabulary: int64 [D], i + d2t[i]. Raises CorruptModelError."""
    if tensor.dim() != 1 or tensor.is_floating_point() or not len(tensor):
        raise CorruptModelError(f"{name!r} is {tensor.dtype} {list(tensor.shape)}: must be whole numbers, one a token")
    ids: Ids = tensor.cpu().numpy().astype(np.int64) + np.arange(len(tensor))
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < len(ids):
        raise CorruptModelError(f"{name!r} gives token ids that aren't all different and in 0..{vocab_size - 1}")
    return ids


@dataclass(frozen=True, slots=True)
class Node:
    """A drafted token: its parent (-1: none), its confidence, and that of its path: the product up to here.

    ``row``: which row of its level's step it comes from.
    """

    token: int
    parent: int
    confidence: float
    path: float
    row: int = 0


def as_draft(nodes: Sequence[Node], drafter: str) -> Draft:
    """Return nodes as a draft. The first child of a node is the drafter's choice."""
    parents = tuple(node.parent for node in nodes)
    chain = parents == tuple(range(-1, len(nodes) - 1))
    return Draft(
        tuple(node.token for node in nodes),
        None if chain else parents,
        tuple(node.confidence for node in nodes),
        drafter,
    )


class LastState:
    """What a drafter knows of a sequence that reads only what the target's head read last.

    ``ends``: tokens after which nothing is drafted.
    """

    unread = 0  # there is nothing to catch up with

    def __init__(self, prompt: Sequence[int], params: SamplingParams, eos_ids: Collection[int]) -> None:
        self.params = params
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self.ids = list(prompt)
        self._last: torch.Tensor | None = None
        self._count = 0

    def read(self, hidden: Sequence[torch.Tensor]) -> None:
        """Take the states of the tokens that follow: one tensor, [tokens, hidden_size]."""
        (states,) = hidden
        self._count += len(states)
        if len(states):
            self._last = states[-1:].to(torch.float32, copy=True)  # a view would keep all of them in memory

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained."""
        self.ids.extend(tokens)

    @property
    def state(self) -> torch.Tensor | None:
        """The state of the last token but one, float32 [1, hidden_size]; None where it isn't known."""
        return self._last if self._count == len(self.ids) - 1 else None


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
    def from_json(cls, config: Mapping[str, Any]) -> MlpConfig:
        """Read a config.json of IBM's format. Raises CorruptModelError or UnsupportedModelError."""
        if (method := config.get("method", "sum_rnn")) != "sum_rnn":
            raise UnsupportedModelError(
                f"the drafter's method {method!r} is not supported: MLP speculators are sum_rnn"
            )
        hidden_size = whole(config, "emb_dim", "hidden_size")
        return cls(
            hidden_size=hidden_size,
            inner_dim=whole(config, "inner_dim", default=0, least=0) or hidden_size,
            vocab_size=whole(config, "vocab_size"),
            n_predict=whole(config, "n_predict"),
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
                size = len(draft_ids(found["d2t"], self.vocab_size))
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

    ``ids``: the target's ids of a reduced draft vocabulary, int64 [D]; None where it has the target's own.
    """

    def __init__(self, config: MlpConfig, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self.config = config
        self.device = kernels.device
        tensors = config.tensors(weights)
        self.ids = draft_ids(tensors["d2t"], config.vocab_size) if "d2t" in tensors else None

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


class MlpDrafter:
    """Drafts with an MLP speculator.

    ``width``: how many paths go on at a time; 1 drafts chains. ``max_nodes``: most tokens of a draft. Nothing is
    drafted after ``eos_ids`` and a request's ``stop_token_ids``. ``costs``: what a step costs, measured if None.
    Raises OptionError.
    """

    name = "mlp"
    samples = False
    hidden_layers = (HEAD_INPUT,)

    def __init__(
        self,
        model: MlpSpeculator,
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

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> MlpSession:
        """Begin a sequence with these token ids."""
        return MlpSession(self, prompt, params)

    def _step(self, rows: int) -> None:
        """Run a step as a draft does."""
        model, params = self.model, SamplingParams()
        states = model.first(torch.zeros(rows, model.config.hidden_size, device=model.device))
        _, logits = model.step(0, states, [0] * rows)
        for row in host(logits):
            likely(row, model.ids, params, 0, 0, self.width)


def check_size(width: int, max_nodes: int) -> None:
    """Raise OptionError where no draft has such a size."""
    if width < 1:
        raise OptionError(f"width={width}: must be at least 1 (chains)")
    if max_nodes < 1:
        raise OptionError(f"max_nodes={max_nodes}: must be at least 1")


class MlpSession(LastState):
    """An MLP speculator beside one sequence."""

    def __init__(self, drafter: MlpDrafter, prompt: Sequence[int], params: SamplingParams) -> None:
        super().__init__(prompt, params, drafter.eos_ids)
        self._drafter = drafter

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return a tree of what is likely to follow, at most ``budget`` tokens deep; nothing without the last state.

        Its main path, of each step's choices, is as deep as any. ``go_on`` is asked after each step, with the
        confidence of the likeliest path's last token.
        """
        drafter, model, params = self._drafter, self._drafter.model, self.params
        nodes: list[Node] = []
        if (state := self.state) is None:
            return Draft(drafter=drafter.name)
        states, parents, tokens = model.first(state), [-1], self.ids[-1:]
        steps = min(budget, model.config.n_predict, drafter.max_nodes)
        for step in range(steps):
            states, logits = model.step(step, states, tokens)
            found: list[Node] = []
            for row, (parent, each) in enumerate(zip(parents, host(logits), strict=True)):
                path = nodes[parent].path if parent >= 0 else 1.0
                for index, confidence in likely(
                    each, model.ids, params, params.seed, len(self.ids) + step, drafter.width
                ):
                    token = index if model.ids is None else int(model.ids[index])
                    found.append(Node(token, parent, confidence, path * confidence, row))
            if not found or found[0].row:  # the main path can't go on: its logits aren't numbers
                break
            room = drafter.max_nodes - len(nodes) - (steps - step - 1)  # each step to come needs one
            kept = _kept(found, min(drafter.width, room))
            going = [len(nodes) + i for i, node in enumerate(kept) if node.token not in self.ends]
            nodes.extend(kept)
            if not go_on(max(kept, key=lambda node: node.path).confidence) or kept[0].token in self.ends:
                break
            states = states[[nodes[i].row for i in going]]
            parents, tokens = going, [nodes[i].token for i in going]
        return as_draft(nodes, drafter.name)


def _kept(found: Sequence[Node], count: int) -> list[Node]:
    """Return the first node, which goes on with the main path, and the likeliest others, in the order given."""
    others = [i for i in range(1, len(found)) if found[i].path >= ALTERNATIVE]
    others = sorted(others, key=lambda i: -found[i].path)[: count - 1]
    return [found[i] for i in (0, *sorted(others))]


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
) -> MlpDrafter:
    """Load an MLP speculator in IBM's format for a target.

    ``config``: the folder's config.json. ``weights``, ``kernels``: see :class:`~sakiyomi.drafters.layers.Kernels`; the
    rest: :class:`MlpDrafter`. Raises OptionError where it was made for another kind of target, ModelError.
    """
    dimensions = MlpConfig.from_json(config)
    check_fit("hidden size", dimensions.hidden_size, parts.hidden_size)
    check_fit("vocabulary size", dimensions.vocab_size, parts.vocab_size)
    check_size(width, max_nodes)
    model = MlpSpeculator(dimensions, open_weights(folder), Kernels.find(weights, kernels, parts.head.device))
    return MlpDrafter(model, costs=costs, width=width, max_nodes=max_nodes, eos_ids=parts.eos_ids)


def save_mlp(
    folder: str | os.PathLike[str],
    config: MlpConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    d2t: torch.Tensor | None = None,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write an MLP speculator in IBM's format: model.safetensors, then config.json, each renamed when it is whole.

    ``tensors``: as :class:`MlpSpeculator` reads them, without a prefix; others are left out. ``d2t``: the reduced
    draft vocabulary, if there is one; our extension, which other engines don't know. ``facts``: what else config.json
    shall tell, such as ``base_model_name_or_path``. Raises CorruptModelError where tensors are missing or misshapen.
    """
    from safetensors.torch import save_file

    given = config.tensors(dict(tensors) if d2t is None else {**tensors, "d2t": d2t})
    if d2t is None and config.tie_weights:  # vLLM wants the head by the name of each step
        given.update({f"head.{step}.weight": given["head.0.weight"] for step in range(1, config.n_predict)})
    written = {
        _PREFIX + name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in given.items()
    }
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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{os.getpid()}.partial"
    try:
        save_file(written, partial, metadata={"format": "pt"})
        (folder / "config.json").unlink(missing_ok=True)  # not of other weights, should this be the end
        partial.replace(folder / "model.safetensors")
        partial.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / "config.json")
    finally:
        partial.unlink(missing_ok=True)
