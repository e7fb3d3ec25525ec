"""Block drafters: one forward of a small network drafts a whole block (DFlash, 2026; DSpark, 2026).

The states of a few of the target's layers, side by side, make a context feature of each token,
H_ctx = RMSNorm(fc [h_1; ..; h_m]), whose keys and values one draft layer attends to. The block behind it has one row
per draft token: the embedding of the last token (the anchor, whose own row says what follows it), then the same learned
embedding for every position further on. Final norm and head give the base logits of each position.

Positions don't see each other's choices, so a Markov head adds to the logits of a position what the token chosen
before it says, bias = W1[token] W2, left to right: this costs no forward, and goes along any path of a tree. A
confidence head estimates how likely a position's choice is to stand, sigmoid((w [h; W1[token]] + b) / temperature),
where h is the normed row that the head reads and the temperature is the position's own.

Rows of the block see those before them and all of the context, not those behind them. DFlash's rows see the whole
block, which with one layer tells nothing: a row's input behind the anchor is the same constant in every draft.

The format is our own, config.json {"model_type": "sakiyomi-block"}, with tensors (H hidden_size, V vocab_size, D
draft_vocab_size, m layers read, r any rank):

    fc.weight [H, m * target's hidden_size], hidden_norm.weight [H]: the context feature
    mask_embedding [H]
    layers.0.*: a llama or qwen3 layer; input_layernorm for rows of the block only
    norm.weight [H], lm_head.weight [D, H] (the target's if left out); d2t int64 [D]: target id = i + d2t[i], if D < V
    markov.w1 [V, r], markov.w2 [r, D]: optional
    confidence.weight [H + r], confidence.bias [1]: optional
    embed_tokens.weight [V, H]: optional, else the target's
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sakiyomi import models
from sakiyomi.distribution import Ids
from sakiyomi.drafters.layers import CHUNK, Apply, Kernels, Layers, LayerWeights, make_layers
from sakiyomi.drafters.model import ALTERNATIVE, LEAST
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
    whole,
)
from sakiyomi.drafters.tree import Choices, Choosing
from sakiyomi.errors import CorruptModelError, UnsupportedModelError
from sakiyomi.interfaces import Costs, Draft, GoOn, TargetSequence, always
from sakiyomi.sampling import SamplingParams
from sakiyomi.targets.decoder import Reader


@dataclass(frozen=True, slots=True, eq=False)
class BlockModel:
    """What a block drafter computes with. Vectors are float32, on ``device``.

    ``markov``: W1, a table by token, and W2; ``confidence``: the weights of h and of W1[token], and the bias, with a
    temperature for each position. ``names``: the head's tokens, None for all of the target's.
    """

    hidden_layers: tuple[int, ...]
    block_size: int
    context_length: int
    eps: float
    embed: Embedding
    fc: Apply
    hidden_norm: torch.Tensor
    mask: torch.Tensor
    input_norm: torch.Tensor
    layers: Layers
    norm: torch.Tensor
    names: Ids | None
    device: torch.device
    markov: tuple[Embedding, Apply] | None = None
    confidence: tuple[torch.Tensor, torch.Tensor | None, float] | None = None
    temperatures: tuple[float, ...] = ()

    def context(self, states: torch.Tensor) -> torch.Tensor:
        """Return H_ctx of the target's states: float32 [rows, layers * hidden_size] -> [rows, hidden_size]."""
        return self._rms(self.fc(states), self.hidden_norm)

    def forward(
        self, memory: TargetSequence, context: torch.Tensor | None, anchor: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows of the context, then a block of ``count`` rows.

        Returns of the block the base logits [count, draft tokens] and the normed rows [count, hidden_size].
        """
        block = self.mask.repeat(count, 1)
        if count:
            block[0] = self.embed([anchor])[0]
        inputs, attention_inputs = block, self._rms(block, self.input_norm)
        if context is not None:  # of these rows nothing but keys and values matters
            inputs = torch.cat([torch.zeros_like(context), block])
            attention_inputs = torch.cat([context, attention_inputs])
        logits, after = self.layers.forward(memory, inputs, attention_inputs, None, count)
        return logits, self._rms(after[after.shape[0] - count :], self.norm)

    def following(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of one position after each of ``tokens``, and W1 of them, where there is a Markov head.

        ``logits``: the position's base logits [draft tokens] -> [tokens, draft tokens].
        """
        if self.markov is None:
            return logits[None].expand(len(tokens), -1), None
        of_tokens, bias = self.markov
        previous = of_tokens(tokens)
        return logits + bias(previous), previous

    def confidences(self, row: torch.Tensor, previous: torch.Tensor | None, position: int, count: int) -> list[float]:
        """Return how likely the choice at a position of the block is to stand, after each of ``count`` tokens.

        ``row``: the position's normed row [hidden_size]; ``previous``: W1 of the tokens before it [count, r].
        """
        assert self.confidence is not None
        of_row, of_previous, bias = self.confidence
        score = (row @ of_row + bias).expand(count)
        if previous is not None and of_previous is not None:
            score = score + previous @ of_previous
        found: list[float] = (score / self.temperatures[position]).sigmoid().tolist()
        return found

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


class BlockDrafter(StateDrafter):
    """Drafts with a block model, as a tree; see :class:`~sakiyomi.drafters.trained.StateDrafter`."""

    prefixes = None  # what is drafted depends on how much is

    def __init__(
        self,
        model: BlockModel,
        *,
        width: int = 4,
        max_nodes: int = 24,
        eos_ids: frozenset[int] = frozenset(),
        costs: Costs | None = None,
    ) -> None:
        self.model = model
        super().__init__(
            "block",
            model,
            width=width,
            max_nodes=max_nodes,
            eos_ids=eos_ids,
            costs=costs,
            deepest=model.block_size,
        )

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> BlockSession:
        """Begin a sequence with these token ids."""
        return BlockSession(self, prompt, params, sampled)

    @property
    def at_once(self) -> int:
        """Tokens in a row that one forward drafts."""
        return self.deepest

    @torch.inference_mode()
    def _run(self, rows: int) -> None:
        model, count = self.model, min(rows, self.deepest)
        context = torch.zeros(rows - count, model.mask.shape[0], device=model.device) if rows > count else None
        logits, states = model.forward(self.new_memory(), context, 0, count)
        choose = Choosing(self.names, SamplingParams(), False, self.width)
        expand = _Expand(model, choose, logits, states, 0, 0)
        for position in range(count):  # choosing along the block is part of what a draft takes
            expand([0] * self.width if position else [-1], [0], [-1])


class BlockSession(StateSession):
    """A block model beside one sequence: the rows that stay are those of the context."""

    def __init__(self, drafter: BlockDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        super().__init__(drafter, prompt, params, sampled)
        self._model = drafter.model

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return a tree of what may follow.

        Nobody is asked whether to go on: all has been computed with the first token, and costs nothing more.
        """
        return super().propose(budget)

    def _begin(self, memory: TargetSequence, budget: int) -> _Expand:
        model, length = self._model, len(self._ids)
        while True:
            missing = min(length - 1 - self._held, CHUNK)
            last = self._held + missing == length - 1
            context = model.context(self._states.first(missing, model.device)) if missing else None
            logits, rows = model.forward(memory, context, self._ids[-1], budget if last else 0)
            self._states.drop(missing)
            self._held += missing
            if last:  # with it the block was computed
                return _Expand(model, self._choose, logits, rows, self._ids[-1], length)


class _Expand:
    """Chooses along the paths of one draft, from the logits of its block."""

    def __init__(
        self,
        model: BlockModel,
        choose: Choosing,
        logits: torch.Tensor,
        rows: torch.Tensor,
        anchor: int,
        length: int,
    ) -> None:
        self._model, self._choose, self._logits, self._rows = model, choose, logits, rows
        self._anchor, self._length, self._position = anchor, length, 0

    def __call__(self, level: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[Choices]:
        model, position = self._model, self._position
        self._position += 1
        before = [tokens[node] if node >= 0 else self._anchor for node in level]
        logits, previous = model.following(self._logits[position], before)
        found = self._choose(logits, self._length + position, self._length)
        if model.confidence is None:
            return found
        confidences = model.confidences(self._rows[position], previous, position, len(level))
        return [_sure(choices, confidence) for choices, confidence in zip(found, confidences, strict=True)]


def _sure(choices: Choices, confidence: float) -> Choices:
    """Return choices, the first as sure as the confidence head has it; the others share what that leaves."""
    if not choices or not 0 <= confidence <= 1:  # not a number
        return []
    (first, probability), *others = choices
    share = (1 - confidence) / max(1 - probability, LEAST)
    changed = [(first, max(confidence, LEAST))]
    changed.extend((token, min(p * share, 1.0)) for token, p in others if p * share >= ALTERNATIVE)
    return changed


def load(
    folder: Path,
    config: Mapping[str, Any],
    parts: TargetParts,
    *,
    weights: str = "auto",
    kernels: str = "auto",
    device: torch.device | str | None = None,
) -> BlockDrafter:
    """Load a block drafter. Raises ModelError or OptionError."""
    model = make_model(
        folder, config, models.open_weights(folder), parts, weights=weights, kernels=kernels, device=device
    )
    return BlockDrafter(model, eos_ids=parts.eos_ids)


def make_model(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    parts: TargetParts,
    *,
    weights: str = "auto",
    kernels: str = "auto",
    device: torch.device | str | None = None,
) -> BlockModel:
    """Return the model of a configuration and tensors; ``folder`` is for messages.

    Raises CorruptModelError, UnsupportedModelError or OptionError.
    """
    if config.get("version") != 1:
        raise UnsupportedModelError(f"{folder}: version {config.get('version')!r} of block drafters; 1 is supported")
    given, block_size = config.get("transformer_layer_config"), whole(folder, config, "block_size")
    if not isinstance(given, Mapping):
        raise CorruptModelError(f"{folder}: transformer_layer_config must be an object")
    decoder = layer_config(folder, given, parts)
    if decoder.layers != 1:
        raise UnsupportedModelError(f"{folder}: a block drafter of {decoder.layers} layers; one is supported")
    hidden_layers = hidden_layer_ids(folder, config.get("hidden_layers"), parts)
    size, names = draft_vocabulary(folder, config, tensors, parts.vocab_size)
    temperatures = config.get("confidence_temperatures")
    temperatures = [1.0] * block_size if temperatures is None else temperatures
    numbers = isinstance(temperatures, list) and all(isinstance(t, int | float) for t in temperatures)
    if not numbers or len(temperatures) != block_size or not all(0 < t < math.inf for t in temperatures):
        raise CorruptModelError(f"{folder}: confidence_temperatures must be {block_size} numbers above 0")
    how = Kernels.find(weights, kernels, device, decoder.head_dim)
    hidden = decoder.hidden_size
    if hidden != parts.hidden_size and "embed_tokens.weight" not in tensors:
        check_fit(folder, "hidden_size", hidden, parts.hidden_size)
    read = Reader(tensors, torch.float32)

    def vector(name: str, width: int) -> torch.Tensor:
        return read.norm(name, width).to(how.device)

    with torch.inference_mode():
        layer = LayerWeights.read(read, decoder, "layers.0.")
        own = "embed_tokens.weight" in read
        embedding = read.table("embed_tokens.weight", parts.vocab_size, hidden) if own else parts.embedding
        norm = vector("norm.weight", hidden)
        markov, rank = None, 0
        if "markov.w1" in read:
            rank = math.prod(tensors["markov.w1"].shape[1:])
            table = read.table("markov.w1", parts.vocab_size, rank)
            markov = Embedding(table, how.device), how.linear(read.table("markov.w2", rank, size).T.contiguous())
        confidence = None
        if "confidence.weight" in read:
            weight, bias = vector("confidence.weight", hidden + rank), vector("confidence.bias", 1)
            confidence = weight[:hidden], weight[hidden:] if rank else None, float(bias)
        return BlockModel(
            hidden_layers=hidden_layers,
            block_size=block_size,
            context_length=decoder.context_length,
            eps=decoder.norm_eps,
            embed=Embedding(embedding, how.device),
            fc=how.linear(read.table("fc.weight", hidden, len(hidden_layers) * parts.hidden_size)),
            hidden_norm=vector("hidden_norm.weight", hidden),
            mask=vector("mask_embedding", hidden),
            input_norm=vector("layers.0.input_layernorm.weight", hidden),
            layers=make_layers(how, decoder, [layer], norm, head(folder, read, size, names, hidden, parts)),
            norm=norm,
            names=names,
            device=how.device,
            markov=markov,
            confidence=confidence,
            temperatures=tuple(map(float, temperatures)),
        )
