"""Attention of a sequence's new rows over its own keys, with bits that don't depend on the rows beside them.

Kernels pick their algorithm by the number of rows and keys. So on a CPU rows are taken in tiles of four, padded, and
keys are padded to a block: the smallest that changes no bits, which is looked for, not assumed
(:func:`invariant_key_block`). Rows of a tree attend path by path, each to keys that lie as they would in a chain.

Elsewhere all rows of a sequence are one tile, and a tree is a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sakiyomi.interfaces import Work
from sakiyomi.targets.cache import KeyValues

TILE = 4  # rows of a sequence that attention takes together on a CPU
KEY_BLOCKS = (32, 128, 512)  # keys are padded to a multiple of one of these: the first that changes no bits

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention itself: queries [tiles, kv_heads, tile * groups, head_dim], keys and values [tiles, kv_heads, keys,
head_dim] and what is added to the scores [tiles, 1, tile * groups, keys], to what the queries' shape says."""


class Reach(NamedTuple):
    """Which of the keys up to its own a row sees: the last ``window``, those of its ``chunk``, or all (None)."""

    window: int | None = None
    chunk: int | None = None


def kernel(
    head_dim: int, scale: float | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> Kernel:
    """Return the kernel for scores times ``scale``, kept below ``softcap``, with a ``sinks`` score per head: [heads].

    A sink takes its part of the attention and gives nothing.
    """
    usual = head_dim**-0.5
    if softcap is None and sinks is None:
        return _fused if scale is None or scale == usual else partial(_fused_scaled, scale)
    return partial(_composed, usual if scale is None else scale, softcap, sinks)


def _fused(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _fused_scaled(
    scale: float, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def _composed(
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    scores = (queries @ keys.transpose(2, 3)).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.add_(mask)
    if sinks is None:
        return scores.softmax(-1).to(values.dtype) @ values
    tiles, kv_heads, rows, keys_shown = scores.shape
    sinks = sinks.to(scores).view(1, kv_heads, 1, -1)
    sinks = sinks.expand(tiles, -1, rows // sinks.shape[3], -1).reshape(tiles, kv_heads, rows, 1)
    scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :keys_shown]
    return scores.to(values.dtype) @ values


def invariant_key_block(attend: Kernel, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the smallest of KEY_BLOCKS such that attention doesn't depend on how many masked keys follow; or 0."""
    groups, most = heads // kv_heads, 2 * KEY_BLOCKS[-1]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, kv_heads, TILE * groups, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, kv_heads, most, head_dim, generator=generator).to(dtype)

    def shown(visible: int, count: int) -> torch.Tensor:
        mask = torch.zeros(1, 1, TILE * groups, count, dtype=dtype)
        mask[..., visible:] = -torch.inf
        return attend(query, keys[:, :, :count], values[:, :, :count], mask)

    def is_invariant(block: int) -> bool:
        for visible in range(29, most, 61):
            counts = range(-(-visible // block) * block, most + 1, block)
            expected = shown(visible, most)
            if not all(torch.equal(shown(visible, count), expected) for count in counts):
                return False
        return True

    return next((block for block in KEY_BLOCKS if is_invariant(block)), 0)


def positions(work: Work) -> list[int]:
    """Return each row's position in its sequence."""
    start = work.sequence.length
    if work.parents is None:
        return list(range(start, start + len(work.tokens)))
    found: list[int] = []
    for parent in work.parents:
        found.append(start if parent < 0 else found[parent] + 1)
    return found


class Layout:
    """How the rows of a work lie among the keys of its sequence: the same for all layers, made once in a forward.

    ``tile``: rows that attention takes together; 0 for all, whose tree is then a mask and not paths.
    """

    def __init__(self, work: Work, key_block: int, tile: int = TILE) -> None:
        self.tile, self.rows, self.start = tile, len(work.tokens), work.sequence.length
        self._key_block = key_block
        assert 0 <= work.logit_rows <= self.rows > 0
        parents = None if work.parents is None or list(work.parents) == list(range(-1, self.rows - 1)) else work.parents
        self.tree = None if tile or parents is None else _Tree(work, parents)
        # Paths by (number of rows that earlier ones cover, rows), and where their keys lie if not at the end in a row.
        covers = [(0, list(range(self.rows)))] if parents is None or not tile else chains(parents)
        self.paths = [(known, path, self._gathered(path)) for known, path in covers]
        order = [row for known, path in covers for row in path[known:]]
        # Where each row stands in what the paths return, if it isn't its own place.
        self.order = None if order == sorted(order) else torch.tensor(order).argsort()

    def keys(self, path: Sequence[int]) -> int:
        """Return how many keys a path attends to: the sequence's and its own, padded to a block."""
        return -(-(self.start + len(path)) // self._key_block) * self._key_block

    def _gathered(self, path: Sequence[int]) -> torch.Tensor | None:
        if list(path) == list(range(len(path))):
            return None
        rest = torch.zeros(self.keys(path) - self.start - len(path), dtype=torch.long)
        return torch.cat([torch.arange(self.start), torch.tensor(path) + self.start, rest])


class Part:
    """One sequence's rows in a forward, and attention over their own keys.

    On an accelerator a row of a tree sees the keys of other branches with a weight of zero: if one of them isn't
    finite, neither are the rows beside it. Of a chain that is so everywhere, for the rows before it.

    ``reaches``: what each layer of ``memory`` sees. ``heads``: of the queries. ``by_group``: the heads come out in the
    order that attention stores them in, which is by their place in the group, then by group, and spares a copy.
    ``layout``: made of the same ``work`` and ``key_block``, if there is one already.
    """

    def __init__(
        self,
        work: Work,
        memory: KeyValues,
        heads: int,
        reaches: Sequence[Reach],
        key_block: int,
        by_group: bool = False,
        layout: Layout | None = None,
    ) -> None:
        layout = layout or Layout(work, key_block)
        self.memory, self.rows, self.start = memory, layout.rows, layout.start
        memory.reserve(self.start + self.rows)
        self._paths = [_Path(memory, layout, *path, reaches, heads, by_group) for path in layout.paths]
        self._order = layout.order

    def attend(self, layer: int, queries: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """Attend to what memory holds and to the rows' own keys, which must be in it: [rows, heads * head_dim].

        A single chain comes back padded to whole tiles. ``queries``: [rows, heads, head_dim] or [rows, heads *
        head_dim].
        """
        if len(self._paths) == 1:
            return self._paths[0].attend(layer, queries, kernel)
        attended = torch.cat([path.attend(layer, queries, kernel)[: path.rows] for path in self._paths])
        return attended if self._order is None else attended.index_select(0, self._order)


def chains(parents: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Cover a tree with paths from its root: (number of rows that earlier paths cover, the path's rows)."""
    inner = set(parents)
    covered: set[int] = set()
    found = []
    for leaf in (row for row in range(len(parents)) if row not in inner):
        path, row = [], leaf
        while row >= 0:
            path.append(row)
            row = parents[row]
        path.reverse()
        known = sum(row in covered for row in path)
        covered.update(path)
        found.append((known, path))
    return found


class _Tree:
    """Where a tree's rows stand, and which rows each of them follows: [rows, rows], itself included."""

    def __init__(self, work: Work, parents: Sequence[int]) -> None:
        self.positions = torch.tensor(positions(work))
        self.follows = torch.eye(len(parents), dtype=torch.bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                self.follows[row] |= self.follows[parent]


class _Path:
    """Rows that follow one another, attending to the sequence and to the path before them; or a tree's, by a mask.

    Their keys have to lie as they would in a chain: sums are made in the order of the keys' places. So where other
    rows of a tree lie between, the path's keys and values are gathered. The first path of a tree needs no gathering.
    """

    def __init__(
        self,
        memory: KeyValues,
        layout: Layout,
        known: int,
        path: list[int],
        gathered: torch.Tensor | None,
        reaches: Sequence[Reach],
        heads: int,
        by_group: bool,
    ) -> None:
        start, tree = layout.start, layout.tree
        _, _, kv_heads, _, head_dim = memory.memory.shape
        self.rows = len(path) - known
        self._tile = layout.tile or self.rows
        self._tiles = -(-self.rows // self._tile)
        self._keys = layout.keys(path)
        self._groups = heads // kv_heads
        # Which of the part's queries are the path's, if not all: those of the rows that no earlier path covers.
        self._own = torch.tensor(path[known:]) if known or len(path) < path[-1] + 1 else None
        self._gather = gathered
        self._memory = memory.memory
        # Views for every layer are made here at once: made one by one they would cost more than what they show.
        shown = memory.memory.narrow(3, 0, self._keys)[:, :, None].expand(-1, -1, self._tiles, -1, -1, -1)
        self._shown = shown.flatten(0, 1).unbind(0)
        masks = {
            reach: self._mask(start + known, reach) if tree is None else self._tree_mask(start, tree, reach)
            for reach in set(reaches)
        }
        self._masks = [masks[reach] for reach in reaches]
        split = (self._tiles, kv_heads, self._tile, self._groups, head_dim)
        tiled = torch.zeros(split, dtype=memory.memory.dtype, device=memory.memory.device)
        self._queries = tiled.view(self._tiles, kv_heads, self._tile * self._groups, head_dim)
        self._split = None if by_group or self._groups == 1 else split
        full, rest = divmod(self.rows, self._tile)
        # Where rows of queries go in the tiles: (rows, [tiles, tile, ...] or [rows, ...] place) one or two times.
        self._places: list[tuple[slice, torch.Tensor]] = []
        if full:
            self._places.append((slice(0, full * self._tile), tiled[:full].transpose(1, 2)))
        if rest:
            self._places.append((slice(full * self._tile, self.rows), tiled[full, :, :rest].transpose(0, 1)))

    def _mask(self, position: int, reach: Reach) -> torch.Tensor:
        """Return what is added to the scores of rows from ``position`` on: [tiles, 1, tile * groups, keys], 0 or -inf.

        Rows that only fill the last tile go on in the same way, so that every row sees a key.
        """
        memory, rows = self._memory, self._tiles * self._tile
        mask = memory.new_full((rows, self._keys), -torch.inf).triu_(position + 1)
        if reach.window is not None or reach.chunk is not None:
            newest = torch.arange(position, position + rows, device=memory.device).clamp_(max=position + self.rows - 1)
            keys = torch.arange(self._keys, device=memory.device)
            mask.masked_fill_(keys < _first(newest, reach)[:, None], -torch.inf)
        return self._tiled(mask)

    def _tree_mask(self, start: int, tree: _Tree, reach: Reach) -> torch.Tensor:
        """Return the same for all rows of a tree, which lie at their own numbers after ``start``."""
        # Only what the tree itself says is made elsewhere and brought to the device: [rows] and [rows, rows].
        memory = self._memory
        positions, follows = tree.positions.to(memory.device), tree.follows.to(memory.device)
        own = slice(start, start + self.rows)
        mask = memory.new_full((self.rows, self._keys), -torch.inf)
        mask[:, :start] = 0
        mask[:, own].masked_fill_(follows, 0)
        if reach.window is not None or reach.chunk is not None:
            keys = torch.arange(self._keys, device=memory.device)
            keys[own] = positions
            mask.masked_fill_(keys < _first(positions, reach)[:, None], -torch.inf)
        return self._tiled(mask)

    def _tiled(self, mask: torch.Tensor) -> torch.Tensor:
        tiled = mask.view(self._tiles, 1, self._tile, 1, self._keys).expand(-1, -1, -1, self._groups, -1)
        return tiled.reshape(self._tiles, 1, self._tile * self._groups, self._keys)

    def attend(self, layer: int, queries: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """Return [rows padded to tiles, heads * head_dim] for the part's queries."""
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
        attended = kernel(self._queries, keys, values, self._masks[layer])
        if self._split is None:
            return attended.transpose(1, 2).reshape(self._tiles * self._tile, -1)
        return attended.view(self._split).transpose(1, 2).reshape(self._tiles * self._tile, -1)


def _first(rows: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Return the position of the first key that rows at these positions see."""
    if reach.chunk is not None:
        return rows - rows % reach.chunk
    return rows * 0 if reach.window is None else rows - (reach.window - 1)
