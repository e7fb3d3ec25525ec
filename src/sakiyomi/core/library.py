"""Bindings of ``csrc/core.h``. ctypes lets other Python threads run during a call."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from sakiyomi.cpus import usable_cpus
from sakiyomi.errors import OptionError

Format = Literal["fp32", "bf16", "int8"]
FORMATS: dict[Format, int] = {"fp32": 0, "bf16": 1, "int8": 2}
_VERSION = 4
_BLOCK = 32  # outputs are padded to a multiple of this
_NAMES = {"darwin": "libsakiyomi_core.dylib", "win32": "sakiyomi_core.dll"}


class Shape(ctypes.Structure):
    """``saki_shape``: the dimensions of a decoder."""

    _fields_ = (
        ("layers", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("hidden", c_int64),
        ("cache_format", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
    )


class Layer(ctypes.Structure):
    """``saki_layer``: pointers to norms, and handles of linears."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("window", c_int64),
    )


class Part(ctypes.Structure):
    """``saki_part``: rows to append to one sequence."""

    _fields_ = (
        ("sequence", c_void_p),
        ("length", c_int64),
        ("rows", c_int64),
        ("parents", c_void_p),
        ("logit_rows", c_int64),
    )


class Batch(ctypes.Structure):
    """``saki_batch``: what one forward computes."""

    _fields_ = (
        ("parts", POINTER(Part)),
        ("part_count", c_int64),
        ("tokens", c_void_p),
        ("inputs", c_void_p),
        ("attention_inputs", c_void_p),
        ("rope", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("hidden_count", c_int32),
        ("hidden_layers", c_void_p),
        ("hidden", c_void_p),
    )


class DraftOptions(ctypes.Structure):
    """``saki_draft``: how a suffix trie drafts."""

    _fields_ = (
        ("budget", c_int64),
        ("min_survival", c_double),
        ("tree", c_int32),
        ("max_tokens", c_int64),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "saki_version": (c_int32, ()),
    "saki_error": (c_char_p, ()),
    "saki_paths": (c_char_p, ()),
    "saki_linear_new": (c_int32, (c_int32, c_int64, c_int64, c_int32, POINTER(c_void_p))),
    "saki_linear_free": (None, (c_void_p,)),
    "saki_linear_bytes": (c_int64, (c_void_p,)),
    "saki_linear_fill": (c_int32, (c_void_p, c_int64, c_int64, c_void_p, c_int32, c_int64)),
    "saki_linear_fill_bias": (c_int32, (c_void_p, c_int64, c_int64, c_void_p)),
    "saki_linear_run": (
        c_int32,
        (c_char_p, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_void_p, c_int64, c_int32),
    ),
    "saki_top": (
        c_int32,
        (c_char_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
    ),
    "saki_decoder_new": (
        c_int32,
        (
            c_char_p,
            POINTER(Shape),
            POINTER(Layer),
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
            c_int32,
            POINTER(c_void_p),
        ),
    ),
    "saki_decoder_free": (None, (c_void_p,)),
    "saki_sequence_new": (c_int32, (c_void_p, POINTER(c_void_p))),
    "saki_sequence_free": (None, (c_void_p,)),
    "saki_sequence_capacity": (c_int64, (c_void_p,)),
    "saki_sequence_bytes": (c_int64, (c_void_p,)),
    "saki_sequence_keep": (None, (c_void_p, c_int64, c_void_p, c_int64)),
    "saki_forward": (c_int32, (c_void_p, POINTER(Batch), c_int32)),
    "saki_trie_new": (c_int32, (c_int64, c_int64, POINTER(c_void_p))),
    "saki_trie_free": (None, (c_void_p,)),
    "saki_trie_size": (c_int64, (c_void_p,)),
    "saki_trie_nodes": (c_int64, (c_void_p,)),
    "saki_trie_bytes": (c_int64, (c_void_p,)),
    "saki_trie_begin": (c_int32, (c_void_p, c_int32, POINTER(c_int64))),
    "saki_trie_append": (c_int32, (c_void_p, c_int64, c_void_p, c_int64)),
    "saki_trie_end": (c_int32, (c_void_p, c_int64)),
    "saki_trie_count": (c_int64, (c_void_p, c_void_p, c_int64)),
    "saki_trie_following": (
        c_int32,
        (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, POINTER(c_int64)),
    ),
    "saki_trie_ends": (c_int32, (c_void_p, c_int64, c_void_p, POINTER(c_int64))),
    "saki_trie_read": (c_int32, (c_void_p, c_int64, c_void_p, c_void_p, POINTER(c_int64))),
    "saki_trie_draft": (
        c_int32,
        (
            c_void_p,
            c_int64,
            c_void_p,
            c_int64,
            POINTER(DraftOptions),
            c_void_p,
            c_void_p,
            c_void_p,
            POINTER(c_int64),
        ),
    ),
}


def _candidates() -> list[Path]:
    if given := os.environ.get("SAKIYOMI_CORE_LIBRARY"):
        return [Path(given)]
    import sakiyomi

    name = _NAMES.get(sys.platform, "libsakiyomi_core.so")
    return [Path(folder) / name for folder in sakiyomi.__path__]


@cache
def _load() -> ctypes.CDLL | None:
    """Return the library, or None where there is none: no compiler at installation, or another version's."""
    for path in _candidates():
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            if library.saki_version() != _VERSION:
                continue
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError):
            continue
        return library
    return None


def available() -> tuple[str, ...]:
    """Return the instruction paths that run here, fastest first; empty without the compiled core."""
    library = _load()
    return tuple(library.saki_paths().decode().split(",")) if library else ()


def resolve(kernels: str = "auto") -> str | None:
    """Return the instruction path to use; None for torch's own kernels.

    "auto" is what the environment variable SAKIYOMI_KERNELS says, else the fastest path. Raises OptionError.
    """
    source = f"kernels={kernels!r}"
    if kernels == "auto" and (given := os.environ.get("SAKIYOMI_KERNELS")):
        kernels, source = given, f"SAKIYOMI_KERNELS={given}"
    paths = available()
    if kernels == "auto":
        return paths[0] if paths else None
    if kernels != "torch" and kernels not in paths:
        raise OptionError(f"{source}: must be one of {', '.join(('auto', *paths, 'torch'))} on this machine")
    return None if kernels == "torch" else kernels


def threads() -> int:
    """Return the number of threads to compute with: torch's, but no more than this process has processors."""
    return min(torch.get_num_threads(), usable_cpus())


def library() -> ctypes.CDLL:
    """Return the library. Raises RuntimeError where there is none: ask :func:`available` first."""
    found = _load()
    if found is None:
        raise RuntimeError("the compiled core isn't there")
    return found


def path_of(kernels: str) -> str:
    """Return the instruction path to use. Raises OptionError, also where torch's kernels are asked for."""
    path = resolve(kernels)
    if path is None:
        there = "SAKIYOMI_KERNELS=torch" if available() else "it isn't installed"
        raise OptionError(f"kernels={kernels!r}: this needs the compiled core ({there})")
    return path


def check(code: int) -> None:
    """Raise what a return code stands for: MemoryError, or ValueError for a mistake of the caller's."""
    if code:
        message = library().saki_error().decode()
        raise MemoryError(message) if code == 1 else ValueError(message)


def make(name: str, *arguments: object) -> int:
    """Call a function that makes something, and return the handle. Raises MemoryError or ValueError."""
    made = c_void_p()
    check(getattr(library(), name)(*arguments, ctypes.byref(made)))
    assert made.value is not None
    return made.value


def padded(size: int) -> int:
    """Return the number of columns that a result of ``size`` features takes."""
    return -(-size // _BLOCK) * _BLOCK


def pointer(tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Return the address of a contiguous tensor of a dtype on the CPU. Raises ValueError for any other."""
    if tensor is None:
        return None
    if tensor.dtype is not dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a {tensor.dtype} tensor on {tensor.device}: must be {dtype}, contiguous, on the CPU")
    return tensor.data_ptr()


def vector(tensor: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """Return a norm's weight or a bias as the library takes it: float32 [size]. Raises ValueError."""
    if tensor is None:
        return None
    if tuple(tensor.shape) != (size,):
        raise ValueError(f"a norm or bias of shape {list(tensor.shape)}: must be [{size}]")
    return tensor.detach().float().contiguous()
