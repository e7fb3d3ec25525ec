"""Decoders of the Llama family in torch: the reference, and what runs where the compiled core doesn't.

A forward appends rows to sequences. What makes it exact, that is, makes a row's result independent of the rows
beside it:

- linears add in one order for every number of rows (:mod:`sakiyomi.targets.linear`);
- attention is computed in tiles of rows, padded, against keys padded to blocks, so that its kernels always add in one
  order (:mod:`sakiyomi.targets.attention`);
- everything else works on each row alone.

Whether that holds on this machine is tested when a model is loaded (:attr:`TorchTarget.exactness`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from sakiyomi.interfaces import HEAD_INPUT, Exactness, TargetOutput, Work
from sakiyomi.rope import RopeTable
from sakiyomi.targets.attention import KEY_BLOCKS, Part, Reach, invariant_key_block, kernel, positions
from sakiyomi.targets.cache import BLOCK, KeyValues
from sakiyomi.targets.decoder import DecoderConfig, LayerNames, Reader, Stack, check_capacity, rows_are_invariant
from sakiyomi.targets.linear import MAX_ROWS, Linear, padded_rows, set_row_limit

_SERIAL = 1 << 15  # from this number of elements on, torch splits an elementwise operation over threads


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class TorchTarget:
    """A decoder of the Llama family, in torch.

    ``weights`` maps Hugging Face names to tensors; each is read once. ``context_length`` may lower the model's own.
    Raises UnsupportedModelError or CorruptModelError where config and weights don't make a model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        context_length: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kernels, self.weight_format = "torch", "bf16" if dtype is torch.bfloat16 else "fp32"
        self.context_length = context_length or config.context_length
        with torch.inference_mode():
            read = Reader(weights, dtype)
            # The head first: while the largest weight is packed it is in memory twice.
            head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
            self._head = Linear(read(head, config.vocab_size, config.hidden_size))
            self._embedding = read.table("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
            self._layers = [_read_layer(read, config, i) for i in range(config.layers)]
            self._norm = read.norm("model.norm.weight", config.hidden_size)
            self._eps = torch.tensor(config.norm_eps)
            self._rope = RopeTable(*read.frequencies(config), dtype)
        self._reaches = [Reach(window) for window in config.windows]
        linears = [linear for layer in self._layers for linear in layer.linears()] + [self._head]
        with torch.inference_mode():
            limit, key_block = set_row_limit(linears, dtype), _invariant_key_block(config, dtype)
            self._row_limit, self._key_block = limit or MAX_ROWS, key_block or KEY_BLOCKS[0]
            self._threads = torch.get_num_threads()
            self._exact = bool(limit and key_block) and self._rows_are_invariant()

    @property
    def exactness(self) -> Exactness:
        """``bit-exact`` if rows were found to be invariant at load, with as many threads as torch uses now."""
        return "bit-exact" if self._exact and self._threads == torch.get_num_threads() else "numerics"

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""
        return self.config.vocab_size

    @property
    def max_rows(self) -> int:
        """Most rows per sequence that one forward should be given."""
        return MAX_ROWS

    @property
    def hidden_layers(self) -> range:
        """The layers whose states a forward can give."""
        return range(HEAD_INPUT, self.config.layers + 1)

    def new_sequence(self) -> KeyValues:
        """Return an empty sequence."""
        config = self.config
        return KeyValues(config.layers, config.kv_heads, config.head_dim, self.dtype, max(BLOCK, self._key_block))

    @torch.inference_mode()
    def forward(self, work: Sequence[Work], *, hidden_layers: Sequence[int] = ()) -> list[TargetOutput]:
        """Append the rows of every work to its sequence and compute them in one pass.

        See :class:`~sakiyomi.interfaces.TargetOutput` for what comes back. The linears run on all rows together,
        attention on each sequence's own.
        """
        check_capacity(work, self.context_length)
        config = self.config
        parts = [_Part(w, config, self._reaches, self._key_block) for w in work]
        rows = sum(part.rows for part in parts)
        ids = [token for item in work for token in item.tokens]
        places = [position for item in work for position in positions(item)]
        padded = padded_rows(rows, self._row_limit)
        ids += ids[-1:] * (padded - rows)
        places += places[-1:] * (padded - rows)
        cos, sin = self._rope.at(places)
        x = self._embedding.index_select(0, torch.tensor(ids)).to(self.dtype)
        hidden = {0: x} if 0 in hidden_layers else {}
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._rms_norm(x, layer.attention_norm))
            self._rotate(qkv, cos, sin, layer)
            x = layer.output(_attend(parts, i, qkv)).add_(x)
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, 1)
            x = layer.down(_silu(gate).mul_(up)).add_(x)
            if i + 1 in hidden_layers:
                hidden[i + 1] = x
        if HEAD_INPUT in hidden_layers:
            hidden[HEAD_INPUT] = self._rms_norm(x, self._norm)
        outputs = self._outputs(parts, x, [hidden[i] for i in hidden_layers])
        for part in parts:  # last: whatever fails before leaves every sequence as it was
            part.memory.length += part.rows
        return outputs

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x / rms(x) * weight over the last dimension, in float32 inside (``weight`` is float32)."""
        y = x.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return y.mul_(scale).mul_(weight).to(self.dtype)

    def _rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: _Layer) -> None:
        """Give queries and keys their positions, in place. ``qkv``: [rows, (heads + 2 kv_heads) * head_dim]."""
        config = self.config
        heads = config.heads + config.kv_heads
        qk = qkv[:, : heads * config.head_dim].view(-1, heads, 2, config.head_dim // 2)
        x = qk
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = qk.view(-1, heads, config.head_dim).tensor_split([config.heads], 1)
            x = torch.cat([self._rms_norm(q, layer.query_norm), self._rms_norm(k, layer.key_norm)], 1).view(qk.shape)
        torch.addcmul(x * cos, x.flip(2), sin, out=qk)

    def _outputs(self, parts: list[_Part], x: torch.Tensor, hidden: list[torch.Tensor]) -> list[TargetOutput]:
        ends = list(accumulate(part.rows for part in parts))
        wanted = [r for part, end in zip(parts, ends, strict=True) for r in range(end - part.logit_rows, end)]
        if wanted:
            if len(wanted) < ends[-1]:
                chosen = wanted + wanted[-1:] * (padded_rows(len(wanted), self._row_limit) - len(wanted))
                x = x.index_select(0, torch.tensor(chosen))
            logits = self._head(self._rms_norm(x, self._norm))
        else:
            logits = x.new_empty(0, self.vocab_size)
        outputs, taken = [], 0
        for part, end in zip(parts, ends, strict=True):
            rows = slice(taken, taken + part.logit_rows)
            outputs.append(TargetOutput(logits[rows], tuple(h[end - part.rows : end] for h in hidden)))
            taken += part.logit_rows
        return outputs

    def _rows_are_invariant(self) -> bool:
        # The rows cross into a further block of keys, and from one step of the attention kernel (512 keys) to two.
        # To compute such a prefix would take long; any keys and values do.
        prefix = next((p for p in (504, 116) if p + 20 <= self.context_length), 0)
        sequence = self.new_sequence()
        sequence.reserve(prefix + 20)
        sequence.memory[:, :, :, :prefix].normal_(generator=torch.Generator().manual_seed(0))
        sequence.length = prefix
        return rows_are_invariant(self, sequence)


def in_pieces(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return activation(x) for [rows, features], with the same bits for a row whatever the number of rows.

    Large tensors are split over threads anywhere in a row, and elements at the split take scalar instructions, whose
    float32 exponential differs from the vector one's. So it is computed in pieces that are too small to be split.
    """
    if x.numel() < _SERIAL:
        return activation(x)
    rows = max(1, (_SERIAL - 1) // x.shape[1])
    return torch.cat([activation(part) for part in x.tensor_split(-(-x.shape[0] // rows))])


def _silu(x: torch.Tensor) -> torch.Tensor:
    return in_pieces(F.silu, x) if x.dtype is torch.float32 else F.silu(x)


def _invariant_key_block(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the number of keys to pad to a multiple of, so that attention doesn't depend on how many; or 0."""
    return invariant_key_block(kernel(config.head_dim), config.heads, config.kv_heads, config.head_dim, dtype)


def _attend(parts: list[_Part], layer: int, qkv: torch.Tensor) -> torch.Tensor:
    """Return [padded rows, heads * head_dim] from rotated ``qkv``: [padded rows, (heads + 2 kv_heads) * head_dim]."""
    if len(parts) == 1:
        attended = parts[0].attend_to(layer, qkv)
    else:
        split = qkv.tensor_split(list(accumulate(part.rows for part in parts)))
        attended = torch.cat(
            [part.attend_to(layer, rows)[: part.rows] for part, rows in zip(parts, split, strict=False)]
        )
    missing = qkv.shape[0] - attended.shape[0]
    return attended[: qkv.shape[0]] if missing <= 0 else F.pad(attended, (0, 0, 0, missing))


class _Part(Part):
    """One sequence's rows in a forward, with keys and values of all layers alike."""

    def __init__(self, work: Work, config: DecoderConfig, reaches: Sequence[Reach], key_block: int) -> None:
        assert isinstance(work.sequence, KeyValues)
        super().__init__(work, work.sequence, config.heads, reaches, key_block, by_group=True)
        self.logit_rows = work.logit_rows
        self._queries, self._kernel = config.heads * config.head_dim, kernel(config.head_dim)
        # Places for the new keys and values: per layer [rows, 2, kv_heads, head_dim].
        self._new = self.memory.memory.narrow(3, self.start, self.rows).permute(0, 3, 1, 2, 4).unbind(0)

    def attend_to(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Store keys and values and attend: [rows, heads * head_dim], a single chain padded to whole tiles.

        ``qkv``: [rows, (heads + 2 * kv_heads) * head_dim]; rows beyond the part's own are left alone.
        """
        new = self._new[layer]
        qkv = qkv[: self.rows]
        new.copy_(qkv[:, self._queries :].view(new.shape))
        return self.attend(layer, qkv[:, : self._queries], self._kernel)


def _linear(read: Reader, stack: Stack) -> Linear:
    biases = read.biases(stack)
    return Linear(torch.cat(read.weights(stack)), None if biases is None else torch.cat(biases))


def _output_linear(read: Reader, stack: Stack, config: DecoderConfig) -> Linear:
    """Return the linear after attention, its inputs in the order in which attention leaves the heads."""
    groups = config.heads // config.kv_heads
    (weight,), biases = read.weights(stack), read.biases(stack)
    ordered = weight.view(-1, config.kv_heads, groups, config.head_dim).transpose(1, 2).reshape(weight.shape)
    return Linear(ordered, None if biases is None else biases[0])


def _read_layer(read: Reader, config: DecoderConfig, index: int) -> _Layer:
    names = LayerNames.of(config, index)
    return _Layer(
        attention_norm=read.norm(names.attention_norm, config.hidden_size),
        qkv=_linear(read, names.qkv),
        query_norm=read.norm(names.query_norm, config.head_dim) if names.query_norm else None,
        key_norm=read.norm(names.key_norm, config.head_dim) if names.key_norm else None,
        output=_output_linear(read, names.output, config),
        mlp_norm=read.norm(names.mlp_norm, config.hidden_size),
        gate_up=_linear(read, names.gate_up),
        down=_linear(read, names.down),
    )
