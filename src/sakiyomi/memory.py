"""Amounts of memory: as people write them, as they read them, and what this machine has."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sakiyomi.errors import OptionError

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# Where Linux tells a container how much it may use: control groups of version 2, and of version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def parse_memory(text: str) -> int:
    """Return the bytes of an amount like 24GB or 1.5GiB. Raises OptionError."""
    pattern = r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]{2,3})"
    match = re.fullmatch(pattern, text.strip(), re.ASCII | re.IGNORECASE) if isinstance(text, str) else None
    if match is None or (unit := _UNITS.get(match[2].upper())) is None or not (found := int(float(match[1]) * unit)):
        raise OptionError(f"memory={text!r}: must be an amount with a unit, as 24GB, 512MB, 1.5TB or 16GiB")
    return found


def machine_memory() -> int:
    """Return the bytes of memory that this machine has in all, used or not; in a container, no more than its limit.

    Raises OptionError if the machine doesn't say.
    """
    try:
        if os.name == "nt":
            return _windows_memory()
        return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits()])
    except (AttributeError, ValueError, OSError):
        raise OptionError("memory: this machine doesn't say how much it has; name an amount, as 24GB") from None


def _limits() -> list[int]:
    """Return the limits that are numbers: where there is none, the file says "max" or isn't there."""
    found = []
    for path in _LIMITS:
        try:
            found.append(int(path.read_text("ascii")))
        except (OSError, ValueError):
            continue
    return found


def _windows_memory() -> int:
    import ctypes

    buffer = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX: its size and the load share the first; then the total
    ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(buffer)
    windows: Any = ctypes
    if not windows.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(buffer)):
        raise OSError
    return int(buffer[1])


def in_words(count: int) -> str:
    """Return a number of bytes as people read it, in powers of ten."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 100 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"
