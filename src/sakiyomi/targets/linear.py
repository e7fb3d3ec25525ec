"""Linear layers whose rows don't influence each other's bits.

An ordinary matrix product picks its algorithm by the number of rows, so the same row gets slightly different sums
in calls of different sizes. Two things prevent that here: weights are packed once for oneDNN, whose packed kernels
add in one order over a range of row counts, and a call with more rows than that range is split. Where the range
ends depends on the processor (128 rows and more with AVX-512, 32 with AMX), so it is measured, not assumed:
:func:`set_row_limits`.

The packed operators are the ones that torch's own compiler emits. They aren't public, so only this file knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

_PACKING_ROWS = 8  # the number of rows that the packed layout is chosen for
MAX_ROWS = 128  # no call is larger: beyond it kernels change on every processor that was measured
_MIN_ROWS = 8  # a smaller range would be of no use


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Tell whether packed kernels exist for this dtype here, by running one."""
    try:
        x, weight = torch.ones(2, 32, dtype=dtype), torch.ones(32, 32, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS)
        y = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
        return bool((y == 32).all())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def native_bf16() -> bool:
    """Tell whether the processor multiplies bfloat16 itself; emulation would be slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class Linear:
    """y = x Wᵀ + b for few rows.

    ``weight``: [out_features, in_features], ``bias``: [out_features]; x: [rows, in_features], contiguous; all of one
    dtype. The weight itself isn't kept if it can be packed. ``row_limit`` is the most rows in one kernel call.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.row_limit = MAX_ROWS
        self.has_bias = bias is not None
        self._bias = bias
        self._packed = can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b: [rows, out_features]."""
        rows = x.shape[0]
        if 2 <= rows <= self.row_limit:
            return self.run(x)
        if rows == 1:  # one row alone takes a kernel of its own, with other bits
            return self.run(x.repeat(2, 1))[:1]
        return torch.cat([self.run(part) for part in x.tensor_split(-(-rows // self.row_limit))])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b in one kernel call, whatever the number of rows."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return y


def set_row_limits(linears: Sequence[Linear], dtype: torch.dtype) -> bool:
    """Give each linear the largest row limit under which a row's bits are always the same; tell if all have one.

    One linear of every shape is run with many row counts, and rows at several places are compared.
    """
    limits: dict[tuple[int, int, bool], int] = {}
    for linear in linears:
        shape = (linear.out_features, linear.in_features, linear.has_bias)
        if shape not in limits:
            limits[shape] = _invariant_rows(linear, dtype)
        linear.row_limit = limits[shape] or MAX_ROWS
    return all(limits.values())


def _invariant_rows(linear: Linear, dtype: torch.dtype) -> int:
    """Return the largest power of two up to 128 that can be the row limit, or 0."""
    # Wide outputs, of a vocabulary, would take much memory; and more rows of them are hardly ever wanted at once.
    limit = MAX_ROWS if linear.out_features < 1 << 15 else MAX_ROWS // 4
    x = torch.randn(limit, linear.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    while limit >= _MIN_ROWS:
        if _is_invariant(linear, x[:limit]):
            return limit
        limit //= 2
    return 0


def _is_invariant(linear: Linear, x: torch.Tensor) -> bool:
    rows = x.shape[0]
    counts = [n for n in (2, 3, 5, 9, 16, 31, 33, 65, 127) if n < rows]
    whole = linear.run(x)
    if not all(torch.equal(linear.run(x[:n]), whole[:n]) for n in counts):
        return False
    return all(torch.equal(linear.run(x[-n:]), whole[-n:]) for n in counts[:4])
