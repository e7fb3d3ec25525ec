"""Linear layers whose rows don't influence each other's bits.

An ordinary matrix product picks its algorithm by the number of rows, so the same row gets slightly different sums in
calls of different sizes. Here weights are packed once for oneDNN, whose packed kernels add in one order over a range
of row counts, and calls are made with a few row counts only, all within that range: fewer rows are padded, more are
split. Where the range ends depends on the processor (128 rows and more with AVX-512, 32 with AMX), so it is measured
for every row count in use, not assumed: :func:`set_row_limit`.

The packed operators are the ones that torch's own compiler emits. They aren't public, so only this file knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

_PACKING_ROWS = 8  # the number of rows that the packed layout is chosen for
ROW_COUNTS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # what kernels are called with
MAX_ROWS = ROW_COUNTS[-1]
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


def padded_rows(rows: int, limit: int) -> int:
    """Return the number of rows to compute for ``rows``: the next row count, or whole calls of ``limit`` rows."""
    if rows > limit:
        return -(-rows // limit) * limit
    return next(count for count in ROW_COUNTS if count >= rows)


class Linear:
    """y = x Wᵀ + b for few rows.

    ``weight``: [out_features, in_features], ``bias``: [out_features]; x: [rows, in_features], contiguous, its rows
    padded (:func:`padded_rows`); all of one dtype. The weight itself isn't kept if it can be packed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.has_bias, self.dtype = bias is not None, weight.dtype
        self.row_limit = MAX_ROWS
        self._bias = bias
        self._packed = can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b: [rows, out_features]."""
        if x.shape[0] <= self.row_limit:
            return self.run(x)
        return torch.cat([self.run(part) for part in x.tensor_split(x.shape[0] // self.row_limit)])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b in one kernel call, whatever the number of rows."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return y


def set_row_limit(linears: Sequence[Linear], dtype: torch.dtype) -> int:
    """Give all linears the largest row limit under which a row's bits are always the same, and return it.

    One linear of every shape is run with every row count. Returns 0 where no limit makes rows invariant.
    """
    shapes = {(linear.out_features, linear.in_features, linear.has_bias): linear for linear in linears}
    limit = min(_invariant_rows(linear, dtype) for linear in shapes.values())
    for linear in linears:
        linear.row_limit = limit or MAX_ROWS
    return limit


def _invariant_rows(linear: Linear, dtype: torch.dtype) -> int:
    """Return the largest row count up to which every count gives a row the same bits, wherever it stands; or 0."""
    x = torch.randn(MAX_ROWS, linear.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    limit, known = 0, linear.run(x[: ROW_COUNTS[0]])
    for count in ROW_COUNTS:
        found = linear.run(x[:count])
        turned = linear.run(x[:count].roll(1, 0))
        if not torch.equal(found[: known.shape[0]], known) or not torch.equal(turned.roll(-1, 0), found):
            break
        limit, known = count, found
    return limit if limit >= _MIN_ROWS else 0
