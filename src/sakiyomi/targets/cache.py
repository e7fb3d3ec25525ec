"""The target's memory of one sequence: keys and values that grow in blocks and roll back by a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 256  # tokens; capacities are multiples of it, or of the block given


class KeyValues:
    """Keys and values of one sequence: ``memory`` is [layers, 2, kv_heads, capacity, head_dim].

    A forward attends to slots beyond ``length`` too, with a weight of zero, which not a number survives: a draft whose
    row overflows would spoil what follows when it's long rolled back. So :meth:`reserve`, with which each forward
    begins, clears what was left there by rows rolled back or by a forward that failed. Rows of one forward aren't kept
    apart in that way: one that isn't finite spoils those before it, and beside it in a tree, in that forward.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block: int = BLOCK,
        device: torch.device | None = None,
    ) -> None:
        self.length = 0
        self._written = 0  # slots from here on hold zeros
        self._block = block
        self.memory = torch.zeros(layers, 2, kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.memory.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self.memory.nbytes

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room to write up to ``length`` tokens; what was left behind beyond them is cleared.

        A quarter is added at least, so that copies stay rare.
        """
        length = max(length, self.length)
        left, self._written = self._written, length
        if length <= self.capacity:
            if left > length:
                self.memory.narrow(3, length, left - length).zero_()
            return
        layers, two, kv_heads, capacity, head_dim = self.memory.shape
        capacity = -(-max(length, capacity * 5 // 4) // self._block) * self._block
        memory = self.memory.new_zeros(layers, two, kv_heads, capacity, head_dim)
        memory[:, :, :, : self.length] = self.memory[:, :, :, : self.length]
        self.memory = memory

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on. Costs nothing."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}: must be between 0 and {self.length}")
        self.length = length

    @torch.inference_mode()
    def keep(self, length: int, rows: Sequence[int]) -> None:
        """Of the slots from ``length`` on keep those at these offsets (ascending), moved together."""
        if list(rows) != list(range(len(rows))):
            source = torch.tensor(rows, device=self.memory.device) + length
            self.memory[:, :, :, length : length + len(rows)] = self.memory.index_select(3, source)
        self.truncate(length + len(rows))
