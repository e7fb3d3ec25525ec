"""The settings file: how to read ahead with a model, as ``sakiyomi tune`` found it, and ``load`` takes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.errors import OptionError
from sakiyomi.files import replace_file
from sakiyomi.interfaces import Verification
from sakiyomi.models import KNOWN_MODELS

_VERSION = 1
_KEYS = ("model", "drafter", "num_speculative_tokens", "verification", "draft_model", "trained")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to read ahead: options of ``load``, by their names there.

    ``model``: what it was tuned for, as the user named it. ``drafter``: "none" is plain decoding. ``trained``: folders.
    """

    model: str
    drafter: str
    num_speculative_tokens: int | None = None
    verification: Verification = "coupled"
    draft_model: str | None = None
    trained: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Settings:
        """Read a file. Raises OptionError that names the file, the key and what would work."""
        from sakiyomi.verification import method

        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib

        def wrong(what: str) -> OptionError:
            return OptionError(f"settings {os.fspath(path)}: {what}")

        try:
            found: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise wrong(f"can't be read ({error.strerror}); must be a file that sakiyomi tune wrote") from None
        except ValueError as error:  # of encoding, or of the format
            raise wrong(f"is no TOML ({error}); must be a file that sakiyomi tune wrote") from None
        found.pop("measured", None)
        if (version := found.pop("version", None)) != _VERSION:
            raise wrong(f"version = {version!r}: must be {_VERSION}")
        if unknown := sorted(found.keys() - set(_KEYS)):
            raise wrong(f"{unknown[0]}: no such key; there are {', '.join(_KEYS)}")
        for name in ("model", "drafter", *(each for each in ("draft_model",) if each in found)):
            if not isinstance(found.get(name), str) or not found[name]:
                raise wrong(f"{name} = {found.get(name)!r}: must be a text")
        k = found.pop("num_speculative_tokens", "auto")
        if k != "auto" and (type(k) is not int or k < 0):
            raise wrong(f'num_speculative_tokens = {k!r}: must be a number, or "auto" (as many as pay)')
        trained = found.pop("trained", [])
        if not isinstance(trained, list) or not all(isinstance(each, str) and each for each in trained):
            raise wrong(f"trained = {trained!r}: must be a list of folders")
        try:
            way = method(found.pop("verification", "coupled"))
        except OptionError as error:
            raise wrong(str(error)) from None
        return cls(**found, num_speculative_tokens=None if k == "auto" else k, verification=way, trained=tuple(trained))

    def save(self, path: str | os.PathLike[str], measured: Mapping[str, Any]) -> None:
        """Write a file, whole or not at all. ``measured``: what to tell readers; texts, numbers, and mappings of them.

        Raises OptionError.
        """
        import tomli_w

        content: dict[str, Any] = {"version": _VERSION, "model": self.model, "drafter": self.drafter}
        content["num_speculative_tokens"] = (
            "auto" if self.num_speculative_tokens is None else self.num_speculative_tokens
        )
        content["verification"] = self.verification
        if self.draft_model is not None:
            content["draft_model"] = self.draft_model
        if self.trained:
            content["trained"] = list(self.trained)
        text = (
            "# How to read ahead with this model, found by sakiyomi tune.\n"
            f'# sakiyomi generate --settings {Path(path).name} "..."; sakiyomi.load(model, settings=...)\n'
            + tomli_w.dumps({**content, "measured": _known(measured)})
        )
        replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def same_model(one: str, other: str) -> bool:
    """Return whether two names, or paths, are of one model."""
    return one == other or absolute(one) == absolute(other)


def absolute(model: str) -> str:
    """Return what names a model from any folder: the whole path of one that lies in a folder or a file."""
    path = Path(model).expanduser()
    return model if model in KNOWN_MODELS or not path.exists() else str(path.resolve())


def _known(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping without what isn't known, for which TOML has no word."""
    return {
        name: _known(each) if isinstance(each, Mapping) else each for name, each in value.items() if each is not None
    }
