"""EAGLE: a decoder layer on the target's own states reads ahead (Li et al. 2401.15077, 2406.16858, 2503.01840).

Where the target has computed tokens 0 .. p, the layer's row p is made of the embedding of token p + 1 and of the state
h(p), and says what token p + 2 may be. Further ahead the layer's own output stands in for the state.

- EAGLE-3: h = fc of the states of three of the target's layers; attention sees [norm(embedding); norm(h)], twice as
  wide; the residual stream is h, or its norm; a final norm and a head over a draft vocabulary of its own.
- EAGLE-1 and 2: the state is what the target's head reads; the layer's input is fc [embedding; state], without a first
  norm; the head is the target's, without a norm before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sakiyomi import models
from sakiyomi.distribution import Ids
from sakiyomi.drafters.layers import CHUNK, Apply, Beside, Kernels, Layers, LayerWeights, make_layers
from sakiyomi.drafters.trained import (
    Embedding,
    StateDrafter,
    StateSession,
    TargetParts,
    check_fit,
    draft_vocabulary,
    head,
    hidden_layer_ids,
    layer_config,
)
from sakiyomi.drafters.tree import Choices, Choosing
from sakiyomi.errors import CorruptModelError, UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Costs, TargetSequence
from sakiyomi.sampling import SamplingParams
from sakiyomi.targets.decoder import DecoderConfig, Reader


@dataclass(frozen=True, slots=True, eq=False)
class EagleModel:
    """What an EAGLE drafter computes with. Norms are float32, on ``device``.

    ``embed``: tokens' embeddings in EAGLE-1; None in EAGLE-3, where layers take tokens. ``state_norms``: of the layers'
    states before ``fc``, one for each or one for all side by side. ``feedback_norm``: of the output, where it stands in
    for a state; None for none. ``names``: the head's tokens.
    """

    name: str
    hidden_layers: tuple[int, ...]
    context_length: int
    eps: float
    hidden_size: int
    embed: Embedding | None
    fc: Apply
    layers: Layers
    names: Ids | None
    device: torch.device
    state_norms: tuple[torch.Tensor, ...] = ()
    feedback_norm: torch.Tensor | None = None

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Return h of the target's states: float32 [rows, layers * hidden_size] -> [rows, hidden_size]."""
        if self.embed is not None:
            return states
        if self.state_norms:
            widths = [norm.shape[0] for norm in self.state_norms]
            parts = zip(torch.split(states, widths, 1), self.state_norms, strict=True)
            states = torch.cat([self._rms(part, norm) for part, norm in parts], 1)
        return self.fc(states)

    def forward(
        self,
        memory: TargetSequence,
        tokens: Sequence[int],
        features: torch.Tensor,
        parents: Sequence[int] | None,
        logit_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows; return the logits of the last ``logit_rows``, and each row's own feature [rows, hidden_size]."""
        if self.embed is not None:
            inputs = self.fc(torch.cat([self.embed(tokens), features], 1)).contiguous()
            return self.layers.forward(memory, inputs, None, parents, logit_rows)
        logits, after = self.layers.forward_tokens(memory, tokens, features.contiguous(), parents, logit_rows)
        return logits, after if self.feedback_norm is None else self._rms(after, self.feedback_norm)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


class EagleDrafter(StateDrafter):
    """Drafts with an EAGLE model, as a tree; see :class:`~sakiyomi.drafters.trained.StateDrafter`."""

    def __init__(
        self,
        model: EagleModel,
        *,
        width: int = 4,
        max_nodes: int = 24,
        eos_ids: frozenset[int] = frozenset(),
        costs: Costs | None = None,
    ) -> None:
        self.model = model
        super().__init__(model.name, model, width=width, max_nodes=max_nodes, eos_ids=eos_ids, costs=costs)

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> EagleSession:
        """Begin a sequence with these token ids."""
        return EagleSession(self, prompt, params, sampled)

    @torch.inference_mode()
    def _run(self, rows: int) -> None:
        memory = self.new_memory()
        features = torch.zeros(rows, self.model.hidden_size, device=self.model.device)
        logits, _ = self.model.forward(memory, [0] * rows, features, None, min(rows, self.width))
        Choosing(self.names, SamplingParams(), False, self.width)(logits, 0, 0)


class EagleSession(StateSession):
    """An EAGLE model beside one sequence."""

    def __init__(self, drafter: EagleDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        super().__init__(drafter, prompt, params, sampled)
        self._model = drafter.model
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # logits and feature of the last row that stays

    def _begin(self, memory: TargetSequence, budget: int) -> _Expand:
        model = self._model
        while (missing := len(self._ids) - 1 - self._held) > 0:
            rows = min(missing, CHUNK)
            tokens = self._ids[self._held + 1 : self._held + 1 + rows]
            features = model.features(self._states.first(rows, model.device))
            logits, after = model.forward(memory, tokens, features, None, int(rows == missing))
            self._states.drop(rows)
            self._held += rows
            self._last = logits, after[-1:]
        assert self._last is not None
        return _Expand(model, memory, self._choose, *self._last, len(self._ids))


class _Expand:
    """Computes the levels of one draft. What all tokens of a level descend from stays in memory; the rest of their
    paths is computed again with them, since only rows of one forward can have parents among each other.
    """

    def __init__(
        self,
        model: EagleModel,
        memory: TargetSequence,
        choose: Choosing,
        logits: torch.Tensor,
        feature: torch.Tensor,
        length: int,
    ) -> None:
        self._model, self._memory, self._choose = model, memory, choose
        self._logits, self._length = logits, length
        self._features = {-1: feature[0]}  # of draft tokens that were computed
        self._start = memory.length
        self._common: list[int] = []  # draft tokens in memory, from the first on
        self._rows: list[int] = []  # draft tokens of the last forward, behind those

    def __call__(self, level: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[Choices]:
        if level[0] < 0:
            return self._choose(self._logits, self._length, self._length)
        paths = [_path(node, parents) for node in level]
        held = len(self._common)
        self._common = _shared([path[:-1] for path in paths])
        kept = [self._rows.index(node) for node in self._common[held:]]
        self._memory.keep(self._start + held, kept)
        self._rows = sorted(set().union(*paths).difference(self._common))
        places = {node: place for place, node in enumerate(self._rows)}
        above = [places.get(parents[node], -1) for node in self._rows]
        chain = above == list(range(-1, len(above) - 1))
        features = torch.stack([self._features[parents[node]] for node in self._rows])
        logits, after = self._model.forward(
            self._memory,
            [tokens[node] for node in self._rows],
            features,
            None if chain else above,
            len(level),
        )
        self._features.update(zip(self._rows, after.unbind(0), strict=True))
        return self._choose(logits, self._length + len(paths[0]), self._length)


def _shared(paths: Sequence[list[int]]) -> list[int]:
    """Return what all paths begin with."""
    low, high = min(paths), max(paths)
    count = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:count]


def _path(node: int, parents: Sequence[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def load(
    folder: Path,
    config: Mapping[str, Any],
    parts: TargetParts,
    *,
    weights: str = "auto",
    kernels: str = "auto",
    device: torch.device | str | None = None,
) -> EagleDrafter:
    """Load an EAGLE drafter of any version. Raises ModelError or OptionError."""
    model = make_model(
        folder, config, models.open_weights(folder), parts, weights=weights, kernels=kernels, device=device
    )
    return EagleDrafter(model, eos_ids=parts.eos_ids)


def is_third(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a folder's EAGLE drafter is one of version 3. Raises UnsupportedModelError where there is none."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UnsupportedModelError(f"{folder}: speculators_model_type {kind!r} is not supported: 'eagle3' is")
    architectures = str(config.get("architectures"))
    if kind == "eagle3" or "eagle3" in architectures.lower() or "midlayer.hidden_norm.weight" in tensors:
        return True
    if "fc.weight" not in tensors or "layers.0.self_attn.q_proj.weight" not in tensors:
        raise UnsupportedModelError(
            f"{folder} is no drafter that is known here: EAGLE-1, 2 and 3, MLP speculators, Medusa heads, and "
            "sakiyomi's own are; a model that is to draft as it is goes to draft_model"
        )
    return False


def make_model(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    parts: TargetParts,
    *,
    weights: str = "auto",
    kernels: str = "auto",
    device: torch.device | str | None = None,
) -> EagleModel:
    """Return the model of a configuration and tensors in one of the published formats; ``folder`` is for messages.

    Raises CorruptModelError, UnsupportedModelError or OptionError.
    """
    third = is_third(folder, config, tensors)
    given = config.get("transformer_layer_config", config)
    if not isinstance(given, Mapping):
        raise CorruptModelError(f"{folder}: transformer_layer_config must be an object")
    decoder = layer_config(folder, given, parts)
    how = Kernels.find(weights, kernels, device, decoder.head_dim)
    with torch.inference_mode():
        make = _third if third else _first
        return make(folder, config, tensors, parts, decoder, how)


def _third(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    parts: TargetParts,
    decoder: DecoderConfig,
    how: Kernels,
) -> EagleModel:
    nested = config.get("eagle_config")  # where some trainers put what is about EAGLE
    options = {**config, **(nested if isinstance(nested, Mapping) else {})}
    if decoder.layers != 1:
        raise UnsupportedModelError(f"{folder}: an EAGLE-3 drafter of {decoder.layers} layers; one is supported")
    hidden, source = decoder.hidden_size, options.get("target_hidden_size")
    source = hidden if source is None else source
    check_fit(folder, "hidden_size", source, parts.hidden_size)
    layers = hidden_layer_ids(folder, options.get("eagle_aux_hidden_state_layer_ids"), parts)
    size, names = draft_vocabulary(folder, options, tensors, parts.vocab_size)
    read = Reader(tensors, torch.float32)
    prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else "layers.0."
    weights = LayerWeights.read(read, decoder, prefix, inputs=2 * hidden)

    def vector(name: str, width: int) -> torch.Tensor:
        return read.norm(f"{name}.weight", width).to(how.device)

    state_norms: tuple[torch.Tensor, ...] = ()
    if options.get("norm_before_fc"):
        state_norms = (vector("input_norm", len(layers) * source),)
    elif options.get("fc_norm"):
        state_norms = tuple(vector(f"fc_norm.{i}", source) for i in range(len(layers)))
    norm = read.norm("norm.weight", hidden)
    beside = Beside(
        embedding=_embedding(folder, read, decoder, parts).detach().to(how.device),
        token_norm=vector(prefix + "input_layernorm", hidden),
        input_norm=vector(prefix + "hidden_norm", hidden),
        norm_residual=bool(options.get("norm_before_residual", "speculators_model_type" in config)),
    )
    return EagleModel(
        name="eagle3",
        hidden_layers=layers,
        context_length=decoder.context_length,
        eps=decoder.norm_eps,
        hidden_size=hidden,
        embed=None,
        fc=_fc(read, hidden, len(layers) * source, how),
        layers=make_layers(how, decoder, [weights], norm, head(folder, read, size, names, hidden, parts), beside),
        names=names,
        device=how.device,
        state_norms=state_norms,
        feedback_norm=norm.to(how.device) if options.get("norm_output") else None,
    )


def _first(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    parts: TargetParts,
    decoder: DecoderConfig,
    how: Kernels,
) -> EagleModel:
    hidden = decoder.hidden_size
    check_fit(folder, "hidden_size", hidden, parts.hidden_size)
    read = Reader(tensors, torch.float32)
    weights = [LayerWeights.read(read, decoder, f"layers.{i}.", first_norm=i > 0) for i in range(decoder.layers)]
    return EagleModel(
        name="eagle",
        hidden_layers=(HEAD_INPUT,),
        context_length=decoder.context_length,
        eps=decoder.norm_eps,
        hidden_size=hidden,
        embed=Embedding(_embedding(folder, read, decoder, parts), how.device),
        fc=_fc(read, hidden, 2 * hidden, how),
        layers=make_layers(how, decoder, weights, None, parts.head),
        names=None,
        device=how.device,
    )


def _embedding(folder: Path, read: Reader, decoder: DecoderConfig, parts: TargetParts) -> torch.Tensor:
    if "embed_tokens.weight" in read:
        return read.table("embed_tokens.weight", decoder.vocab_size, decoder.hidden_size)
    if decoder.hidden_size != parts.hidden_size:
        raise CorruptModelError(
            f"{folder}: the weights lack 'embed_tokens.weight'; the target's, of hidden_size {parts.hidden_size}, "
            f"don't fit one of {decoder.hidden_size}"
        )
    return parts.embedding


def _fc(read: Reader, hidden: int, width: int, how: Kernels) -> Apply:
    bias = read.table("fc.bias", hidden) if "fc.bias" in read else None
    return how.linear(read.table("fc.weight", hidden, width), bias)
