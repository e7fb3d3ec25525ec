"""Speculative decoding that is exact: reads ahead, never changes the text.

import sakiyomi

llm = sakiyomi.load("smollm2-135m")
for chunk in llm.stream([{"role": "user", "content": "Name three rivers."}]):
    print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sakiyomi.drafters import NgramDrafter, SuffixDrafter
    from sakiyomi.dropin import accelerate, restore
    from sakiyomi.engine import Chunk, Token
    from sakiyomi.errors import (
        CapacityError,
        CorruptModelError,
        DownloadError,
        DrafterError,
        ModelError,
        ModelNotFoundError,
        OptionError,
        PolicyError,
        PromptError,
        SakiyomiError,
        UnsupportedModelError,
    )
    from sakiyomi.llm import LLM, Generation, load
    from sakiyomi.sampling import SamplingParams
    from sakiyomi.stats import Stats

__version__ = "0.1.0"

# Imported when first used: the command line's help should not wait for torch.
_HOMES = {
    "sakiyomi.drafters": ("NgramDrafter", "SuffixDrafter"),
    "sakiyomi.dropin": ("accelerate", "restore"),
    "sakiyomi.engine": ("Chunk", "Token"),
    "sakiyomi.errors": (
        "CapacityError",
        "CorruptModelError",
        "DownloadError",
        "DrafterError",
        "ModelError",
        "ModelNotFoundError",
        "OptionError",
        "PolicyError",
        "PromptError",
        "SakiyomiError",
        "UnsupportedModelError",
    ),
    "sakiyomi.llm": ("LLM", "Generation", "load"),
    "sakiyomi.sampling": ("SamplingParams",),
    "sakiyomi.stats": ("Stats",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "CapacityError",
    "Chunk",
    "CorruptModelError",
    "DownloadError",
    "DrafterError",
    "Generation",
    "ModelError",
    "ModelNotFoundError",
    "NgramDrafter",
    "OptionError",
    "PolicyError",
    "PromptError",
    "SakiyomiError",
    "SamplingParams",
    "Stats",
    "SuffixDrafter",
    "Token",
    "UnsupportedModelError",
    "__version__",
    "accelerate",
    "load",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sakiyomi' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
