"""A memory of one sequence for models that run as transformers has them: it rolls back by a number.

Imports transformers, which is optional: import this module where a model of transformers is at hand anyway.

transformers' own caches concatenate all keys and values at every step, and lose what a sliding window has passed, which
makes rolling back a matter of luck. Here keys and values lie in preallocated memory, whole in every layer: the model's
own masks apply the windows. The length is one number, which the caller moves on when a forward has succeeded; until
then the rows just written lie beyond the end, so that a forward that fails leaves the sequence as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from sakiyomi.targets.attention import chains
from sakiyomi.targets.cache import BLOCK


class ModuleCache(Cache):
    """The cache of one sequence (batch size 1), for the ``cache`` argument of a model's forward.

    ``length``: tokens held. A forward writes its rows after them; to make them count, set ``length``, as
    :func:`run_rows` does. Layers come into being as they are written, with the shapes, dtype and device that come.
    """

    layers: list[Any]  # of _Layer

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens that there is room for in every layer written so far."""
        return min((layer.capacity for layer in self.layers if layer.is_initialized), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(int(layer.nbytes) for layer in self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows after what is held; return views of all keys and values, the new ones at the end.

        ``key_states``, ``value_states``: [1, kv_heads, rows, head_dim].
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(_Layer(self))
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens held, in a layer that isn't there yet too."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of a forward's first row."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many keys a forward of so many rows attends to, and the position of the first of them."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: memory grows."""
        return -1

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on. Costs nothing."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}: must be between 0 and {self.length}")
        self.length = length

    def keep(self, length: int, rows: Sequence[int]) -> None:
        """Of the tokens from ``length`` on keep those at these offsets (ascending), moved together."""
        if list(rows) != list(range(len(rows))):
            self.write(length, self.read([length + row for row in rows]))
        self.truncate(length + len(rows))

    @torch.inference_mode()
    def read(self, slots: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of keys and values at these places, by layer: [1, kv_heads, slots, head_dim] each."""
        return [layer.read(slots) for layer in self.layers if layer.is_initialized]

    @torch.inference_mode()
    def write(self, start: int, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put what :meth:`read` returned at the places from ``start`` on. The length stays."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        for layer, (keys, values) in zip(layers, rows, strict=True):
            layer.write(start, keys, values)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, [1, kv_heads, capacity, head_dim] each; their head_dim may differ."""

    def __init__(self, cache: ModuleCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.keys, self.values) if each is not None)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[0] != 1:
            raise ValueError(f"a batch of {key_states.shape[0]} sequences: a ModuleCache holds one")
        self.keys = key_states.new_zeros(*key_states.shape[:2], 0, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], 0, value_states.shape[3])
        self.is_initialized = True

    @torch.inference_mode()
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self._cache.length
        self.write(start, key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = start + key_states.shape[2]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def read(self, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        index = torch.tensor(slots, device=self.keys.device, dtype=torch.long)
        return self.keys.index_select(2, index), self.values.index_select(2, index)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = start + keys.shape[2]
        self.keys, self.values = self._room(self.keys, end), self._room(self.values, end)
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values

    def _room(self, memory: torch.Tensor | None, length: int) -> torch.Tensor:
        """Return memory with room for ``length`` tokens; a quarter is added at least, so that copies stay rare."""
        assert memory is not None
        batch, heads, capacity, head_dim = memory.shape
        if length <= capacity:
            return memory
        capacity = -(-max(length, capacity * 5 // 4) // BLOCK) * BLOCK
        larger = memory.new_zeros(batch, heads, capacity, head_dim)
        larger[:, :, : memory.shape[2]] = memory
        return larger

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._cache.length = 0


def run_rows(
    cache: ModuleCache,
    tokens: Sequence[int],
    parents: Sequence[int] | None,
    call: Callable[[Sequence[int]], torch.Tensor],
) -> torch.Tensor:
    """Append rows to a sequence and return what ``call`` computes of each: [rows, features], in the rows' order.

    ``call`` runs the model on tokens that follow what ``cache`` holds, and returns [tokens, features]. Where
    ``parents`` make a tree (see :class:`~sakiyomi.interfaces.Work`), it is called for path after path, each row once:
    the keys and values of rows that a path shares with earlier ones are put back before it. In the end row i lies at
    the i-th place after what was held, as in every target. An error leaves the sequence as it was.
    """
    start, rows = cache.length, len(tokens)
    if parents is None or list(parents) == list(range(-1, rows - 1)):
        computed = call(tokens)
        cache.length = start + rows
        return computed
    try:
        return _run_tree(cache, tokens, parents, call)
    except BaseException:
        cache.length = start
        raise


def _run_tree(
    cache: ModuleCache,
    tokens: Sequence[int],
    parents: Sequence[int],
    call: Callable[[Sequence[int]], torch.Tensor],
) -> torch.Tensor:
    start, rows = cache.length, len(tokens)
    held: Sequence[int] = []  # the rows whose keys and values lie after what the sequence held, in order
    saved: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by row: its keys and values
    results: dict[int, torch.Tensor] = {}

    def place(wanted: Sequence[int]) -> None:
        for i, row in enumerate(wanted):
            if i >= len(held) or held[i] != row:
                cache.write(start + i, saved[row])

    for known, path in chains(parents):
        place(path[:known])
        cache.length = start + known
        computed = call([tokens[row] for row in path[known:]])
        for i, row in enumerate(path[known:]):
            saved[row] = cache.read([start + known + i])
            results[row] = computed[i]
        held = path
    place(range(rows))
    cache.length = start + rows
    return torch.stack([results[row] for row in range(rows)])
