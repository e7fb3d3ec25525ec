"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from sakiyomi.errors import OptionError


def write_text(path: Path, text: str) -> None:
    """Write a file under another name and rename it. Raises OptionError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OptionError(f"{path}: can't be written ({error.strerror})") from None
