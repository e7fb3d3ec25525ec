"""Drafters. A new one is a file and a line in :data:`DRAFTERS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sakiyomi import core
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Drafter

DRAFTERS: Mapping[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "ngram": NgramDrafter,
}
TRAINED = ("table", "mlp", "medusa", "eagle", "eagle3", "block")
AUTO, MODEL = "auto", "model"


def parse(drafter: str, given: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the drafters that an option stands for: one, or several joined with +; none for "none".

    ``given``: which of the trained drafters there are for the target, and MODEL where there is a draft model. "auto" is
    the suffix drafter (without the compiled core: ngram) and all of these.
    Raises OptionError for an unknown name, or one that isn't there.
    """
    if drafter == "none":
        return ()
    if drafter == AUTO:
        return ("suffix" if core.available() else "ngram", *(name for name in (*TRAINED, MODEL) if name in given))
    names = tuple(drafter.split("+"))
    for name in names:
        if name in DRAFTERS or name in given:
            continue
        if name == MODEL:
            raise OptionError(f"drafter={drafter!r}: needs a draft model; name one with draft_model")
        if name in TRAINED:
            raise OptionError(
                f"drafter={drafter!r}: needs a drafter of kind {name}, trained for this model; name its "
                "folder with trained"
            )
        known = ", ".join((AUTO, *DRAFTERS, *TRAINED, MODEL, "none"))
        raise OptionError(f"drafter={drafter!r}: must be one of {known}, or several joined with +")
    if len(set(names)) < len(names):
        raise OptionError(f"drafter={drafter!r}: names a drafter twice")
    return names


def check(drafter: object) -> None:
    """Raise OptionError for what is no drafter."""
    if not all(hasattr(drafter, name) for name in ("name", "costs", "samples", "session")):
        raise OptionError(f"drafter={drafter!r}: must be a name or a drafter")


__all__ = ["AUTO", "DRAFTERS", "MODEL", "TRAINED", "NgramDrafter", "SuffixDrafter", "check", "parse"]
