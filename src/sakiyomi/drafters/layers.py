"""Decoder layers on inputs of their own, with keys and values of their own: what trained drafters are made of.

Two implementations of one protocol: the compiled core, with weights of any of its formats, and torch, on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F

from sakiyomi import core
from sakiyomi.core import library
from sakiyomi.drafters.model import log_total
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import TargetSequence, Work
from sakiyomi.rope import RopeTable, inverse_frequencies
from sakiyomi.sampling import host
from sakiyomi.targets.cache import KeyValues
from sakiyomi.targets.decoder import DecoderConfig, Reader

CHUNK = 128  # rows computed at a time when much is to be read
Apply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a drafter computes: with an instruction path of the core, or with torch (``path`` None) on ``device``.

    ``weights``: the format of linears; losses in quality can't reach the text.
    """

    path: str | None
    weights: core.Format
    device: torch.device

    @classmethod
    def find(
        cls, weights: str = "auto", kernels: str = "auto", device: torch.device | str | None = None, head_dim: int = 2
    ) -> Kernels:
        """Return what options stand for: by default int8 on the core where it runs, else float32 (bf16 on a GPU).

        Raises OptionError.
        """
        if weights not in ("auto", "int8", "bf16", "fp32"):
            raise OptionError(f"weights={weights!r}: must be one of auto, int8, bf16, fp32")
        place = torch.device(device or "cpu")
        fits = place.type == "cpu" and head_dim <= 512 and head_dim % 2 == 0
        path = core.resolve(kernels) if fits else None
        if path is None and weights == "int8":
            raise OptionError("weights='int8': a drafter's int8 weights need the compiled core, on a processor")
        if weights == "auto":
            weights = "int8" if path else "fp32" if place.type == "cpu" else "bf16"
        return cls(path, cast("core.Format", weights), place)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of torch's linears, keys and values."""
        return torch.bfloat16 if self.weights == "bf16" else torch.float32

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Apply:
        """Return x -> x Wᵀ + b, float32 [rows, in_features] -> float32 [rows, out_features]."""
        if self.path is not None:
            return core.Linear([weight], None if bias is None else [bias], format=self.weights, kernels=self.path)
        weight = weight.to(self.device, self.dtype)
        bias = None if bias is None else bias.to(self.device, self.dtype)
        return lambda x: F.linear(x.to(weight.dtype), weight, bias).float()


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer, in any dtype. A norm or bias may be None.

    ``qkv``: queries, keys and values, [size, inputs] each; ``gate_up``: [intermediate, hidden] each.
    """

    attention_norm: torch.Tensor | None
    qkv: list[torch.Tensor]
    qkv_bias: list[torch.Tensor] | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: list[torch.Tensor]
    gate_up_bias: list[torch.Tensor] | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None

    @classmethod
    def read(
        cls, read: Reader, config: DecoderConfig, prefix: str, *, inputs: int | None = None, first_norm: bool = True
    ) -> LayerWeights:
        """Read the layer whose tensors' names begin with ``prefix``.

        ``inputs``: in_features of queries, keys and values, where they aren't hidden_size. ``first_norm``: whether the
        layer has a norm of its own before attention. Raises CorruptModelError for what is missing or has another shape.
        """
        hidden, wide = config.hidden_size, config.intermediate_size
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def weights(names: tuple[str, ...], sizes: tuple[int, ...], width: int) -> list[torch.Tensor]:
            return [read.table(f"{prefix}{n}.weight", s, width) for n, s in zip(names, sizes, strict=True)]

        def biases(names: tuple[str, ...], sizes: tuple[int, ...]) -> list[torch.Tensor] | None:
            if f"{prefix}{names[0]}.bias" not in read:
                return None
            return [read.table(f"{prefix}{n}.bias", s) for n, s in zip(names, sizes, strict=True)]

        def norm(name: str, size: int, there: bool = True) -> torch.Tensor | None:
            return read.norm(f"{prefix}{name}.weight", size) if there else None

        qkv, sizes = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv)
        gate_up, output, down = ("mlp.gate_proj", "mlp.up_proj"), ("self_attn.o_proj",), ("mlp.down_proj",)
        normed = config.architecture == "qwen3"
        output_bias, down_bias = biases(output, (hidden,)), biases(down, (hidden,))
        return cls(
            attention_norm=norm("input_layernorm", hidden, first_norm),
            qkv=weights(qkv, sizes, inputs or hidden),
            qkv_bias=biases(qkv, sizes),
            output=weights(output, (hidden,), q)[0],
            output_bias=output_bias[0] if output_bias else None,
            mlp_norm=read.norm(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=weights(gate_up, (wide, wide), hidden),
            gate_up_bias=biases(gate_up, (wide, wide)),
            down=weights(down, (hidden,), wide)[0],
            down_bias=down_bias[0] if down_bias else None,
            query_norm=norm("self_attn.q_norm", config.head_dim, normed),
            key_norm=norm("self_attn.k_norm", config.head_dim, normed),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """How EAGLE-3's tokens come in: attention sees [norm of the token's embedding; norm of the inputs].

    ``embedding``: [vocab_size, hidden], of any dtype; ``token_norm``, ``input_norm``: float32 [hidden];
    ``norm_residual``: whether the residual stream begins with the norm of the inputs.
    """

    embedding: torch.Tensor
    token_norm: torch.Tensor
    input_norm: torch.Tensor
    norm_residual: bool

    def rows(self) -> torch.Tensor:
        """Return the embeddings as the core takes them, row after row: bf16 or float32. Of fp16, a copy in bf16."""
        table = self.embedding
        return (table.to(torch.bfloat16) if table.dtype is torch.float16 else table).contiguous()


class Layers(Protocol):
    """Decoder layers, with a norm and a head behind them."""

    def new_sequence(self) -> TargetSequence:
        """Return an empty memory of keys and values."""

    def forward(
        self,
        sequence: TargetSequence,
        inputs: torch.Tensor,
        attention_inputs: torch.Tensor | None,
        parents: Sequence[int] | None,
        logit_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows to a sequence; a row's position is the number of rows before it on its path.

        ``inputs``: float32 [rows, hidden], the residual stream. ``attention_inputs``: float32 [rows, in_features], what
        the first layer's queries, keys and values are made of; None for its norm of the inputs, or the inputs where it
        has none. ``parents``: as in :class:`~sakiyomi.interfaces.Work`.
        Returns the logits of the last ``logit_rows`` rows, float32 [logit_rows, head's rows], and the residual stream
        after the layers, float32 [rows, hidden].
        """

    def forward_tokens(
        self,
        sequence: TargetSequence,
        tokens: Sequence[int],
        inputs: torch.Tensor,
        parents: Sequence[int] | None,
        logit_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows that have a token each beside the inputs, where the layers have a :class:`Beside`."""


def make_layers(
    kernels: Kernels,
    config: DecoderConfig,
    layers: Sequence[LayerWeights],
    norm: torch.Tensor | None,
    head: torch.Tensor,
    beside: Beside | None = None,
) -> Layers:
    """Return layers. ``config`` gives their dimensions, their rope and their windows; ``head``: [rows, hidden]."""
    made = CoreLayers if kernels.path is not None else TorchLayers
    return made(kernels, config, layers, norm, head, beside)


class CoreLayers:
    """Layers on the compiled core."""

    def __init__(
        self,
        kernels: Kernels,
        config: DecoderConfig,
        layers: Sequence[LayerWeights],
        norm: torch.Tensor | None,
        head: torch.Tensor,
        beside: Beside | None = None,
    ) -> None:
        assert kernels.path is not None
        path, format = kernels.path, kernels.weights

        def one(weight: torch.Tensor, bias: torch.Tensor | None) -> core.Linear:
            return core.Linear([weight], None if bias is None else [bias], format=format, kernels=path)

        frequencies, factor = inverse_frequencies(config.rope, config.head_dim, config.context_length)
        self._decoder = core.Decoder(
            [
                core.DecoderLayer(
                    attention_norm=layer.attention_norm,
                    qkv=core.Linear(layer.qkv, layer.qkv_bias, format=format, kernels=path),
                    output=one(layer.output, layer.output_bias),
                    mlp_norm=layer.mlp_norm,
                    gate_up=core.Linear(layer.gate_up, layer.gate_up_bias, format=format, gated=True, kernels=path),
                    down=one(layer.down, layer.down_bias),
                    query_norm=layer.query_norm,
                    key_norm=layer.key_norm,
                    window=window,
                )
                for layer, window in zip(layers, config.windows, strict=True)
            ],
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            frequencies=frequencies,
            rope_factor=factor,
            cache="fp32" if format == "fp32" else "bf16",
            norm=norm,
            head=one(head, None),
            embedding=None if beside is None else beside.rows(),
            token_norm=None if beside is None else beside.token_norm,
            input_norm=None if beside is None else beside.input_norm,
            norm_residual=beside is not None and beside.norm_residual,
            kernels=path,
        )
        self._after = (len(layers),)

    def new_sequence(self) -> core.Sequence:
        """Return an empty memory of keys and values."""
        return self._decoder.new_sequence()

    def forward(
        self,
        sequence: TargetSequence,
        inputs: torch.Tensor,
        attention_inputs: torch.Tensor | None,
        parents: Sequence[int] | None,
        logit_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows; see :class:`Layers`."""
        return self._forward(Work(sequence, [0] * inputs.shape[0], parents, logit_rows), inputs, attention_inputs)

    def forward_tokens(
        self,
        sequence: TargetSequence,
        tokens: Sequence[int],
        inputs: torch.Tensor,
        parents: Sequence[int] | None,
        logit_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows; see :class:`Layers`."""
        return self._forward(Work(sequence, tokens, parents, logit_rows), inputs, None)

    def _forward(
        self, work: Work, inputs: torch.Tensor, attention_inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, (hidden,) = self._decoder.forward(
            [work], inputs=inputs, attention_inputs=attention_inputs, hidden_layers=self._after
        )
        assert logits is not None
        return logits, hidden


class TorchLayers:
    """Layers in torch, on any device: simple rather than fast."""

    def __init__(
        self,
        kernels: Kernels,
        config: DecoderConfig,
        layers: Sequence[LayerWeights],
        norm: torch.Tensor | None,
        head: torch.Tensor,
        beside: Beside | None = None,
    ) -> None:
        self._kernels, self._config = kernels, config

        def stacked(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> Apply:
            return kernels.linear(torch.cat(list(weights)), None if biases is None else torch.cat(list(biases)))

        def vector(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else weight.to(kernels.device, torch.float32)

        self._layers = [
            (
                vector(layer.attention_norm),
                stacked(layer.qkv, layer.qkv_bias),
                vector(layer.query_norm),
                vector(layer.key_norm),
                kernels.linear(layer.output, layer.output_bias),
                vector(layer.mlp_norm),
                stacked(layer.gate_up, layer.gate_up_bias),
                kernels.linear(layer.down, layer.down_bias),
            )
            for layer in layers
        ]
        self._norm, self._head = vector(norm), kernels.linear(head)
        self._beside = beside
        frequencies, factor = inverse_frequencies(config.rope, config.head_dim, config.context_length)
        self._rope = RopeTable(frequencies, factor, torch.float32)

    def new_sequence(self) -> KeyValues:
        """Return an empty memory of keys and values."""
        config, kernels = self._config, self._kernels
        return KeyValues(len(self._layers), config.kv_heads, config.head_dim, kernels.dtype, device=kernels.device)

    def forward(
        self,
        sequence: TargetSequence,
        inputs: torch.Tensor,
        attention_inputs: torch.Tensor | None,
        parents: Sequence[int] | None,
        logit_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows; see :class:`Layers`."""
        assert isinstance(sequence, KeyValues)
        config, start, rows = self._config, sequence.length, inputs.shape[0]
        end = start + rows
        sequence.reserve(end)
        depths, above = _paths(parents if parents is not None else range(-1, rows - 1))
        device = inputs.device
        cos, sin = (each.to(device) for each in self._rope.at([start + depth for depth in depths]))
        # How far back each key is: a row of this forward counts as its position, where it's on the path.
        position = torch.tensor(depths, device=device) + start
        distance = position[:, None] - torch.arange(end, device=device)
        distance[:, start:] = (position[:, None] - position).masked_fill(~above.to(device), -1)
        groups = config.heads // config.kv_heads
        x = inputs
        for i, (attention_norm, qkv, query_norm, key_norm, output, mlp_norm, gate_up, down) in enumerate(self._layers):
            normed = attention_inputs if i == 0 and attention_inputs is not None else self.rms(x, attention_norm)
            heads = qkv(normed).view(rows, -1, config.head_dim)
            q, k, v = heads.tensor_split([config.heads, config.heads + config.kv_heads], 1)
            q, k = (_rotated(self.rms(y, weight), cos, sin) for y, weight in ((q, query_norm), (k, key_norm)))
            memory = sequence.memory[i]
            memory[:, :, start:end] = torch.stack([k, v]).transpose(1, 2)
            keys, values = memory[:, :, :end].repeat_interleave(groups, 1).to(q.dtype)
            scores = (q.transpose(0, 1) @ keys.transpose(1, 2)) / math.sqrt(config.head_dim)
            window = config.windows[i] or end
            scores.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
            attended = (scores.softmax(-1) @ values).transpose(0, 1)
            x = x + output(attended.reshape(rows, -1))
            gate, up = gate_up(self.rms(x, mlp_norm)).chunk(2, 1)
            x = x + down(F.silu(gate) * up)
        sequence.length = end
        return self._head(self.rms(x[rows - logit_rows :], self._norm)), x

    def forward_tokens(
        self,
        sequence: TargetSequence,
        tokens: Sequence[int],
        inputs: torch.Tensor,
        parents: Sequence[int] | None,
        logit_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows; see :class:`Layers`."""
        assert self._beside is not None
        given = self._beside
        embedded = given.embedding.index_select(0, torch.tensor(tokens, device=given.embedding.device)).float()
        normed = self.rms(inputs, given.input_norm)
        seen = torch.cat([self.rms(embedded, given.token_norm), normed], 1)
        return self.forward(sequence, normed if given.norm_residual else inputs, seen, parents, logit_rows)

    def rms(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return x / rms(x) * weight over the last dimension; x without a weight."""
        return x if weight is None else F.rms_norm(x, weight.shape, weight, self._config.norm_eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Give [rows, heads, head_dim] their positions."""
    halves = x.view(x.shape[0], x.shape[1], 2, -1)
    return (halves * cos + halves.flip(2) * sin).view(x.shape)


def _paths(parents: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """Return each row's depth, and bool [rows, rows]: whether a row is on another's path, itself included."""
    depths: list[int] = []
    above = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            above[row] |= above[parent]
    return depths, above


def likeliest(logits: torch.Tensor, count: int) -> list[tuple[list[float], list[int], float]]:
    """Return of each row of float32 [rows, columns] its ``count`` largest, where they are, and log sum(exp(row)).

    The largest come first. The last number is none where a logit is none.
    """
    rows, size = logits.shape
    on_host = logits.device.type == "cpu"
    path = core.resolve("auto") if on_host and logits.dtype is torch.float32 and logits.stride(1) == 1 else None
    if path is None:
        values, places = logits.topk(count)
        sums = log_total(host(logits)) if on_host else logits.logsumexp(1).tolist()
        return list(zip(values.tolist(), places.tolist(), sums, strict=True))
    best, where, totals = (c_float * (rows * count))(), (c_int64 * (rows * count))(), (c_float * rows)()
    stride = logits.stride(0) if rows > 1 else size
    code = library.library().saki_top(
        path.encode(), logits.data_ptr(), rows, size, stride, count, best, where, totals, library.threads()
    )
    library.check(code)
    return [
        (best[first : first + count], where[first : first + count], totals[first // count])
        for first in range(0, rows * count, count)
    ]
