"""Decoders of the Llama family in torch: the reference, and what runs where the compiled core doesn't.

A forward appends rows to sequences. What makes it exact, that is, makes a row's result independent of the rows
beside it:

- linears add in one order for every number of rows (:mod:`sakiyomi.targets.linear`);
- attention is computed in tiles of four rows of a sequence, padded, against keys padded to blocks, so that its
  kernels always add in one order;
- everything else works on each row alone.

Whether that holds on this machine is tested when a model is loaded (:attr:`TorchTarget.exactness`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from sakiyomi.interfaces import Exactness, TargetOutput, Work
from sakiyomi.rope import RopeTable
from sakiyomi.targets.cache import BLOCK, KeyValues
from sakiyomi.targets.decoder import DecoderConfig, LayerNames, Reader, Stack, check_capacity, rows_are_invariant
from sakiyomi.targets.linear import MAX_ROWS, Linear, padded_rows, set_row_limit

TILE = 4  # rows of a sequence that attention takes together
KEY_BLOCKS = (32, 128, 512)  # keys are padded to a multiple of one of these: the first that changes no bits
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
        parts = [_Part(w, config, self.dtype, self._key_block) for w in work]
        rows = sum(part.rows for part in parts)
        ids = [token for part in parts for token in part.tokens]
        positions = [position for part in parts for position in part.positions]
        padded = padded_rows(rows, self._row_limit)
        ids += ids[-1:] * (padded - rows)
        positions += positions[-1:] * (padded - rows)
        cos, sin = self._rope.at(positions)
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
        outputs = self._outputs(parts, x, [hidden[i] for i in hidden_layers])
        for part in parts:  # last: whatever fails before leaves every sequence as it was
            part.sequence.length += part.rows
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


def _silu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(x) for [rows, features], with the same bits for a row whatever the number of rows.

    Large tensors are split over threads anywhere in a row, and elements at the split take scalar instructions, whose
    float32 exponential differs from the vector one's. So float32 is computed in pieces that are too small to be split.
    """
    if x.dtype is not torch.float32 or x.numel() < _SERIAL:
        return F.silu(x)
    rows = max(1, (_SERIAL - 1) // x.shape[1])
    return torch.cat([F.silu(part) for part in x.tensor_split(-(-x.shape[0] // rows))])


def _invariant_key_block(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the smallest of KEY_BLOCKS such that attention doesn't depend on how many masked keys follow; or 0."""
    groups, most = config.heads // config.kv_heads, 2 * KEY_BLOCKS[-1]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, config.kv_heads, TILE * groups, config.head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, config.kv_heads, most, config.head_dim, generator=generator).to(dtype)

    def attend(visible: int, shown: int) -> torch.Tensor:
        mask = torch.zeros(1, 1, TILE * groups, shown, dtype=dtype)
        mask[..., visible:] = -torch.inf
        return F.scaled_dot_product_attention(query, keys[:, :, :shown], values[:, :, :shown], attn_mask=mask)

    def is_invariant(block: int) -> bool:
        for visible in range(29, most, 61):
            counts = range(-(-visible // block) * block, most + 1, block)
            expected = attend(visible, most)
            if not all(torch.equal(attend(visible, count), expected) for count in counts):
                return False
        return True

    return next((block for block in KEY_BLOCKS if is_invariant(block)), 0)


def _attend(parts: list[_Part], layer: int, qkv: torch.Tensor) -> torch.Tensor:
    """Return [padded rows, heads * head_dim] from rotated ``qkv``: [padded rows, (heads + 2 kv_heads) * head_dim]."""
    if len(parts) == 1:
        attended = parts[0].attend(layer, qkv)
    else:
        split = qkv.tensor_split(list(accumulate(part.rows for part in parts)))
        attended = torch.cat([part.attend(layer, rows)[: part.rows] for part, rows in zip(parts, split, strict=False)])
    missing = qkv.shape[0] - attended.shape[0]
    return attended[: qkv.shape[0]] if missing <= 0 else F.pad(attended, (0, 0, 0, missing))


class _Part:
    """One sequence's rows in a forward: their positions, their paths, and attention over their own keys."""

    def __init__(self, work: Work, config: DecoderConfig, dtype: torch.dtype, key_block: int) -> None:
        sequence = work.sequence
        assert isinstance(sequence, KeyValues)
        self.sequence, self.tokens, self.logit_rows = sequence, work.tokens, work.logit_rows
        self.rows, start = len(work.tokens), sequence.length
        assert 0 <= work.logit_rows <= self.rows > 0
        sequence.reserve(start + self.rows)
        chains = [(0, list(range(self.rows)))] if work.parents is None else _chains(work.parents)
        self._paths = [_Path(sequence, known, path, config, dtype, key_block) for known, path in chains]
        self.positions = [0] * self.rows
        order = []
        for known, path in chains:
            order += path[known:]
            for depth, row in enumerate(path[known:], known):
                self.positions[row] = start + depth
        # Where each row stands in what the paths return, if it isn't its own place.
        self._order = None if order == sorted(order) else torch.tensor(order).argsort()
        # Places for the new keys and values: per layer [rows, 2, kv_heads, head_dim].
        self._new = sequence.memory.narrow(3, start, self.rows).permute(0, 3, 1, 2, 4).unbind(0)
        self._queries, self._heads = config.heads * config.head_dim, config.heads

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Store keys and values and attend: [rows, heads * head_dim], a single chain padded to whole tiles.

        ``qkv``: [rows, (heads + 2 * kv_heads) * head_dim]; rows beyond the part's own are left alone.
        """
        new = self._new[layer]
        qkv = qkv[: self.rows]
        new.copy_(qkv[:, self._queries :].view(new.shape))
        queries = qkv[:, : self._queries]
        if len(self._paths) == 1:
            return self._paths[0].attend(layer, queries)
        attended = torch.cat([path.attend(layer, queries)[: path.rows] for path in self._paths])
        return attended if self._order is None else attended.index_select(0, self._order)


def _chains(parents: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Cover a tree with paths from its root: (number of rows that earlier paths cover, the path's rows)."""
    inner = set(parents)
    covered: set[int] = set()
    chains = []
    for leaf in (row for row in range(len(parents)) if row not in inner):
        path, row = [], leaf
        while row >= 0:
            path.append(row)
            row = parents[row]
        path.reverse()
        known = sum(row in covered for row in path)
        covered.update(path)
        chains.append((known, path))
    return chains


class _Path:
    """Rows that follow one another, attending to the sequence and to the path before them.

    Their keys have to lie as they would in a chain: sums are made in the order of the keys' places. So where other
    rows of a tree lie between, the path's keys and values are gathered. The first path of a tree needs no gathering.
    """

    def __init__(
        self,
        sequence: KeyValues,
        known: int,
        path: list[int],
        config: DecoderConfig,
        dtype: torch.dtype,
        key_block: int,
    ) -> None:
        start, length = sequence.length, sequence.length + len(path)
        self.rows = len(path) - known
        self._tiles = -(-self.rows // TILE)
        self._keys = -(-length // key_block) * key_block
        self._groups = config.heads // config.kv_heads
        # Which of the part's queries are the path's, if not all: those of the rows that no earlier path covers.
        self._own = torch.tensor(path[known:]) if known or len(path) < path[-1] + 1 else None
        self._gather: torch.Tensor | None = None
        if path != list(range(len(path))):
            places = [*range(start), *(start + row for row in path), *[0] * (self._keys - length)]
            self._gather = torch.tensor(places)
        self._memory = sequence.memory
        # Views for every layer are made here at once: made one by one they would cost more than what they show.
        shown = sequence.memory.narrow(3, 0, self._keys)[:, :, None].expand(-1, -1, self._tiles, -1, -1, -1)
        self._shown = shown.flatten(0, 1).unbind(0)
        masks = {window: self._mask(start + known, window, dtype) for window in set(config.windows)}
        self._masks = [masks[window] for window in config.windows]
        shape = (config.kv_heads, self._groups, config.head_dim)
        tiled = torch.zeros(self._tiles, config.kv_heads, TILE, *shape[1:], dtype=dtype)
        self._queries = tiled.view(self._tiles, config.kv_heads, TILE * self._groups, config.head_dim)
        full, rest = divmod(self.rows, TILE)
        # Where rows of queries go in the tiles: (rows, [tiles, TILE, ...] or [rows, ...] place) one or two times.
        self._places: list[tuple[slice, torch.Tensor]] = []
        if full:
            self._places.append((slice(0, full * TILE), tiled[:full].transpose(1, 2)))
        if rest:
            self._places.append((slice(full * TILE, self.rows), tiled[full, :, :rest].transpose(0, 1)))

    def _mask(self, position: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores of rows from ``position`` on: [tiles, 1, TILE * groups, keys], 0 or -inf.

        Rows that only fill the last tile go on in the same way, so that every row sees a key.
        """
        mask = torch.full((self._tiles * TILE, self._keys), -torch.inf, dtype=dtype).triu_(position + 1)
        if window is not None:
            newest = torch.arange(position, position + self._tiles * TILE).clamp_(max=position + self.rows - 1)
            mask.masked_fill_(torch.arange(self._keys) <= newest[:, None] - window, -torch.inf)
        tiled = mask.view(self._tiles, 1, TILE, 1, self._keys)
        return tiled.expand(-1, -1, -1, self._groups, -1).reshape(self._tiles, 1, TILE * self._groups, self._keys)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return [rows padded to tiles, heads * head_dim] for the part's queries [rows, heads * head_dim].

        The heads come out in the order that attention stores them in: by their place in the group, then by group.
        """
        if self._own is not None:
            queries = queries.index_select(0, self._own)
        for rows, place in self._places:
            place.copy_(queries[rows].view(place.shape))
        if self._gather is None:
            keys, values = self._shown[2 * layer], self._shown[2 * layer + 1]
        else:
            keys, values = (
                self._memory[layer].index_select(2, self._gather)[:, None].expand(-1, self._tiles, -1, -1, -1)
            )
        attended = F.scaled_dot_product_attention(self._queries, keys, values, attn_mask=self._masks[layer])
        return attended.transpose(1, 2).reshape(self._tiles * TILE, -1)


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
