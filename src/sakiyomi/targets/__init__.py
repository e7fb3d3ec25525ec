"""Targets: the models whose text is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from sakiyomi.errors import OptionError

if TYPE_CHECKING:
    import torch

    from sakiyomi.targets.compiled import CompiledTarget
    from sakiyomi.targets.decoder import DecoderConfig
    from sakiyomi.targets.pytorch import TorchTarget


WEIGHTS = ("auto", "int8")


def resolve(kernels: str, weights: str | None, option: str = "weights") -> str | None:
    """Return the instruction path to use, None for torch's own kernels.

    Raises OptionError for kernels or weights that there are not, or that don't go together. ``weights=None`` are
    whatever goes; ``option``: what the weights' option is called.
    """
    from sakiyomi import core

    if weights not in (*WEIGHTS, None):
        raise OptionError(f"{option}={weights!r}: must be one of {', '.join(WEIGHTS)}")
    path = core.resolve(kernels)
    if path is None and weights == "int8":
        raise OptionError(f"{option}='int8': needs the compiled core; without it, bf16 and fp32 weights run")
    return path


def load_decoder(
    config: DecoderConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    weights: Literal["auto", "int8"] = "auto",
    kernels: str = "auto",
    context_length: int | None = None,
) -> CompiledTarget | TorchTarget:
    """Return a decoder of the Llama family on the fastest kernels that run here, or on those that are named.

    ``dtype="auto"`` is bf16, save where fp32 is faster: in torch, on a processor that doesn't multiply bfloat16 itself.
    Raises OptionError, UnsupportedModelError or CorruptModelError.
    """
    import torch

    from sakiyomi.targets.compiled import CompiledTarget
    from sakiyomi.targets.linear import native_bf16
    from sakiyomi.targets.pytorch import TorchTarget

    path = resolve(kernels, weights)
    if dtype == "auto":
        dtype = "bf16" if path is not None or native_bf16() else "fp32"
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    if path is None:
        return TorchTarget(config, tensors, torch_dtype, context_length)
    weight_format = None if weights == "auto" else weights
    return CompiledTarget(config, tensors, torch_dtype, context_length, weight_format=weight_format, kernels=path)
