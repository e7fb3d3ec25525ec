"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.errors import OptionError

if TYPE_CHECKING:
    import numpy.typing as npt


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


def read_arrays(
    path: Path,
    kind: str,
    version: str,
    dtypes: Mapping[str, Collection[str]],
    wrong: Callable[[str], OptionError],
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Return the arrays and the metadata of one of our safetensors files. Raises what ``wrong`` makes of a reason.

    ``kind`` and ``version`` are its ``format`` and ``version`` in the metadata. ``dtypes``: of each array, all of one
    dimension, the types that it may have, as safetensors calls them.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():
            raise wrong("not a file" if path.exists() else "no such file")
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            for name, expected in (("format", kind), ("version", version)):
                if metadata.get(name) != expected:
                    raise wrong(f"its {name} is {metadata.get(name)!r}, not {expected!r}")
            if set(file.keys()) != set(dtypes):
                raise wrong(f"it has the tensors {', '.join(sorted(file.keys()))}, not {', '.join(dtypes)}")
            for name, allowed in dtypes.items():
                found, shape = file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()
                if found not in allowed or len(shape) != 1:
                    raise wrong(f"{name} is {found} {shape}, not one row of {' or '.join(allowed)}")
            return {name: file.get_tensor(name) for name in dtypes}, metadata
    except (SafetensorError, OSError) as error:
        raise wrong(f"can't be read ({' '.join(str(error).split())})") from None
