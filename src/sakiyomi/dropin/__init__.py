"""The drop-in: ``model.generate(...)`` of a transformers model, reading ahead."""

from __future__ import annotations

from sakiyomi.dropin.generate import accelerate, restore

__all__ = ["accelerate", "restore"]
