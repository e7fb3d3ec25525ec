"""The target's memory of one sequence: keys and values that grow in blocks and roll back by a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 256  # tokens; capacities are multiples of it


class KeyValues:
    """Keys and values of one sequence: per layer [2, kv_heads, capacity, head_dim].

    Slots from ``length`` on hold zeros or what was rolled back: always finite, always masked.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.length = 0
        self.layers = [torch.zeros(2, kv_heads, 0, head_dim, dtype=dtype) for _ in range(layers)]

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.layers[0].shape[2]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens; a quarter is added at least, so that copies stay rare."""
        if length <= self.capacity:
            return
        capacity = -(-max(length, self.capacity * 5 // 4) // BLOCK) * BLOCK
        for i, old in enumerate(self.layers):  # one layer at a time: the peak is one layer above the new size
            new = old.new_zeros(2, old.shape[1], capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            self.layers[i] = new

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on. Costs nothing."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}: must be between 0 and {self.length}")
        self.length = length

    @torch.inference_mode()
    def keep(self, length: int, rows: Sequence[int]) -> None:
        """Of the slots from ``length`` on keep those at these offsets (ascending), moved together."""
        if list(rows) != list(range(len(rows))):
            source = torch.tensor(rows) + length
            for layer in self.layers:
                layer[:, :, length : length + len(rows)] = layer.index_select(2, source)
        self.truncate(length + len(rows))
