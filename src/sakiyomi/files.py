"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from sakiyomi.errors import OptionError


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Have ``write`` write a file under another name, and rename it when it is whole. Raises OptionError.

    Whatever is raised meanwhile leaves what was there before, and nothing beside it.
    """
    from safetensors import SafetensorError

    place = Path(path)
    if not place.name:  # "", "." or "/"
        raise OptionError(f"{os.fspath(path)!r}: can't be written (not the name of a file)")
    temporary = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        try:
            write(temporary)
            os.replace(temporary, place)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise OptionError(f"{place}: can't be written ({reason})") from None
