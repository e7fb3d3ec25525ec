"""Rotary position embeddings: the frequencies of each scaling method, and a table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sakiyomi.errors import UnsupportedModelError

BLOCK = 1024  # positions computed at a time: one shape, so that a position has the same bits always
SUPPORTED = ("default", "linear", "llama3", "yarn")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope settings of a Hugging Face config, whichever of its three spellings it uses."""
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    settings.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    settings["rope_type"] = settings.get("rope_type") or settings.pop("type", None) or "default"
    settings.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    return settings


def inverse_frequencies(settings: Mapping[str, Any], head_dim: int, context_length: int) -> tuple[torch.Tensor, float]:
    """Return the float32 [head_dim / 2] angles per position and the factor on cosines and sines.

    ``linear``: positions divided by a factor. ``llama3``: low frequencies divided, high ones kept, a ramp between.
    ``yarn``: Peng et al. 2023 (arXiv 2309.00071), section 3. Raises UnsupportedModelError for other types.
    """
    kind = settings["rope_type"]
    theta = float(settings["rope_theta"])
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (theta**exponents)
    if kind == "default":
        return base, 1.0
    if kind not in SUPPORTED:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported: {', '.join(SUPPORTED)} are")
    factor = float(settings["factor"])
    if kind == "linear":
        return base / factor, 1.0
    original = float(settings.get("original_max_position_embeddings") or context_length)
    if kind == "llama3":
        low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
        turns = original * base / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return base * keep + base / factor * (1 - keep), 1.0

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(float(settings.get("beta_fast") or 32))
    last = dimension(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)
    return base * (1 - ramp) + base / factor * ramp, _yarn_attention_factor(settings, factor)


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(float(mscale)) / scale(float(mscale_all_dim))
    return scale(1.0)


def cosines_and_sines(start: int, frequencies: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of ``BLOCK`` positions from ``start`` on: two float32 [BLOCK, head_dim / 2]."""
    angles = torch.arange(start, start + BLOCK).float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


class RopeTable:
    """Cosines and sines by position, computed as positions come up.

    Each is [positions, 1, 2, head_dim / 2]; the sines' first half is negated, so that the rotation is
    ``x * cos + swap_halves(x) * sin``.
    """

    def __init__(self, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> None:
        self._frequencies, self._factor, self._dtype = frequencies, factor, dtype
        nothing = torch.empty(0, 1, 2, frequencies.numel(), dtype=dtype)
        self._table = (nothing, nothing)

    def at(self, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines at these positions: two [rows, 1, 2, head_dim / 2]."""
        cos, sin = self._table
        while cos.shape[0] <= max(positions):
            start = cos.shape[0]
            c, s = cosines_and_sines(start, self._frequencies, self._factor)
            cos = torch.cat([cos, torch.stack([c, c], 1)[:, None].to(self._dtype)])
            sin = torch.cat([sin, torch.stack([-s, s], 1)[:, None].to(self._dtype)])
            self._table = (cos, sin)  # both at once: an interrupt must not leave them unequal
        index = torch.tensor(positions)
        return cos.index_select(0, index), sin.index_select(0, index)
