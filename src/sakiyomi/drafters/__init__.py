"""Drafters. A new one is a file and a line in :data:`DRAFTERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Drafter

DRAFTERS: Mapping[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
}


def resolve(drafter: str | Drafter | None) -> Drafter | None:
    """Return the drafter of that name, or the one given; None (or "none") is plain decoding.

    Raises OptionError for an unknown name.
    """
    if drafter is None or drafter == "none":
        return None
    if not isinstance(drafter, str):
        return drafter
    if drafter not in DRAFTERS:
        raise OptionError(f"drafter={drafter!r}: must be one of {', '.join(DRAFTERS)}, none")
    return DRAFTERS[drafter]()


__all__ = ["DRAFTERS", "NgramDrafter", "resolve"]
