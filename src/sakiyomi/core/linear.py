"""Linears and gated MLPs of few rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sakiyomi.core import library
from sakiyomi.core.library import Format
from sakiyomi.errors import OptionError


class Linear:
    """y = x Wᵀ + b for few rows, its weights packed.

    ``weights``: [size, in_features] each, stacked in order; ``biases`` likewise [size], or None. ``gated``: two
    weights, gates and ups, for :class:`GatedMlp`. int8 has one scale per output feature; x is rounded too,
    every 64 features of a row to 255 steps of their own. Raises MemoryError.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None = None,
        *,
        format: Format = "bf16",
        gated: bool = False,
        kernels: str = "auto",
    ) -> None:
        self.format: Format = format
        self.out_features, self.in_features = sum(w.shape[0] for w in weights), weights[0].shape[1]
        if any(weight.shape[1] != self.in_features for weight in weights):
            raise ValueError(f"weights with {[w.shape[1] for w in weights]} in_features: must have as many each")
        if gated and [w.shape[0] for w in weights] != [self.out_features // 2] * 2:
            raise ValueError(f"gated weights with {[w.shape[0] for w in weights]} rows: must be two of one size")
        self._path = library.path_of(kernels).encode()
        self._library = library.library()
        self.handle = library.make(
            "saki_linear_new", library.FORMATS[format], self.out_features, self.in_features, int(gated)
        )
        first = 0
        for i, weight in enumerate(weights):
            weight, rows = _rows_in_order(weight), weight.shape[0]
            source = library.FORMATS["bf16" if weight.dtype is torch.bfloat16 else "fp32"]
            library.check(
                self._library.saki_linear_fill(self.handle, first, rows, weight.data_ptr(), source, weight.stride(0))
            )
            if biases is not None:
                bias = library.vector(biases[i], rows)
                library.check(self._library.saki_linear_fill_bias(self.handle, first, rows, library.pointer(bias)))
            first += rows

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.saki_linear_free(self.handle)

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weights take."""
        return int(self._library.saki_linear_bytes(self.handle))

    def __call__(self, x: torch.Tensor, *, norm: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
        """Return the linear of x, or of x / rms(x) * norm: float32 [rows, in_features] -> [rows, out_features]."""
        return _run(self, None, x, norm, eps)

    def top(
        self, x: torch.Tensor, k: int, *, norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's k largest outputs and where they are: float32 and int64 [rows, k], largest first.

        As a head: its logits and tokens; of equal ones the lowest token comes first. k=1 is argmax.
        """
        if not 1 <= k <= self.out_features:
            raise OptionError(f"k={k}: must be in 1..{self.out_features}")
        y = self(x, norm=norm, eps=eps)
        rows, size, stride = x.shape[0], self.out_features, y.stride(0)
        values, places = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        code = self._library.saki_top(
            self._path,
            y.data_ptr(),
            rows,
            size,
            stride,
            k,
            values.data_ptr(),
            places.data_ptr(),
            None,
            library.threads(),
        )
        library.check(code)
        return values, places


class GatedMlp:
    """down(silu(gate(x)) * up(x)) for few rows, in one call.

    ``gate``, ``up``: [intermediate, hidden]; ``down``: [hidden, intermediate].
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        *,
        format: Format = "bf16",
        kernels: str = "auto",
    ) -> None:
        self._gate_up = Linear([gate, up], format=format, gated=True, kernels=kernels)
        self._down = Linear([down], format=format, kernels=kernels)

    def __call__(self, x: torch.Tensor, *, norm: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
        """Return the MLP of x, or of x / rms(x) * norm: float32 [rows, hidden] -> [rows, hidden]."""
        return _run(self._down, self._gate_up, x, norm, eps)


def _rows_in_order(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in a dtype that is packed as it is, each row's values side by side."""
    weight = weight.detach().cpu()
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _run(
    linear: Linear, gate_up: Linear | None, x: torch.Tensor, norm: torch.Tensor | None, eps: float
) -> torch.Tensor:
    width = (gate_up or linear).in_features
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"x has shape {list(x.shape)}: must be [rows, {width}]")
    x, rows = x.detach().float().contiguous(), x.shape[0]
    norm = library.vector(norm, width)
    y = torch.empty(rows, library.padded(linear.out_features))
    library.check(
        linear._library.saki_linear_run(
            linear._path,
            linear.handle,
            gate_up.handle if gate_up else None,
            library.pointer(norm),
            eps,
            library.pointer(x),
            rows,
            library.pointer(y),
            y.shape[1],
            library.threads(),
        )
    )
    return y[:, : linear.out_features]
