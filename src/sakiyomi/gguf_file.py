"""Reading GGUF files: metadata and raw tensors, with every length checked against the file.

The reader of the ``gguf`` package builds an array object per string, which takes seconds for a vocabulary,
and trusts the lengths that it reads. Constants and dequantisation still come from that package.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from sakiyomi.errors import CorruptModelError, UnsupportedModelError

_VERSIONS = (2, 3)
_SCALARS = {  # GGUF value type: struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: ``shape`` as in numpy (rows first), ``data`` its raw bytes, [rows, bytes per row]."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GGUFFile:
    """The metadata and the tensors (mapped, not loaded) of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a metadata integer; CorruptModelError where it is no integer, or absent without default."""
        return int(self._scalar(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a metadata number, as the shortest decimal with the same float32 value."""
        return float(str(np.float32(self._scalar(key, (int, float), default))))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a metadata string; CorruptModelError where it is no string, or absent without default."""
        return str(self._scalar(key, str, default))

    def array(self, key: str, kind: type) -> list[Any]:
        """Return a metadata array of ``kind``; CorruptModelError where it is absent or holds others."""
        values = self.metadata.get(key)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise CorruptModelError(f"{self.path} has no array of {kind.__name__} in its metadata {key!r}")
        return values

    def _scalar(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self.metadata.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # one value per layer, all the same
            value = value[0]
        elif isinstance(value, list):
            raise UnsupportedModelError(
                f"{self.path} has a different {key!r} in each layer; only models whose layers are alike run"
            )
        if value is None:
            raise CorruptModelError(f"{self.path} lacks the metadata {key!r}")
        if not isinstance(value, kind):
            raise CorruptModelError(f"{self.path} has the metadata {key!r} = {value!r}, of the wrong type")
        return value


class _Cursor:
    """Takes values from the front of a buffer and refuses to run past its end."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path, self.buffer, self.position = path, data.data, 0

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.buffer):
            raise CorruptModelError(
                f"{self.path} is truncated or damaged: its header wants byte {end:,} of {len(self.buffer):,}"
            )
        taken = self.buffer[self.position : end]
        self.position = end
        return taken

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        # the size is checked before a format string of that length is built
        taken = self.take(count * struct.calcsize(f"<{code}"))
        return struct.unpack(f"<{count}{code}", taken)

    def scalar(self, code: str) -> Any:
        return self.scalars(code)[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element == _STRING:
                return [self.string() for _ in range(count)]
            if element in _SCALARS:
                return list(self.scalars(_SCALARS[element], count))
            kind = element
        raise CorruptModelError(f"{self.path} has metadata of the unknown type {kind}")


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's header and map its tensors.

    Raises CorruptModelError for a file that isn't GGUF, is truncated or inconsistent, and
    UnsupportedModelError for a version, byte order or tensor type that we don't know.
    """
    if not path.stat().st_size:
        raise CorruptModelError(f"{path} is empty; fetch it again")
    data = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    cursor = _Cursor(path, data)
    if bytes(data[:4]) != b"GGUF":
        raise CorruptModelError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        order = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
        raise UnsupportedModelError(f"{path} is {order}; little-endian GGUF versions 2 and 3 work")
    tensor_count, value_count = cursor.scalars("Q", 2)
    try:
        metadata = {}
        for _ in range(value_count):
            key = cursor.string()
            metadata[key] = cursor.value()
        entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    except UnicodeDecodeError as error:
        raise CorruptModelError(f"{path} is damaged: its header has a string that is not UTF-8") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CorruptModelError(f"{path} has the metadata 'general.alignment' = {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {entry[0]: _tensor(path, data, start, *entry) for entry in entries}
    if len(tensors) != tensor_count:
        raise CorruptModelError(f"{path} has two tensors of the same name")
    return GGUFFile(path, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape (rows first), type number and offset of the next entry in the tensor table."""
    name = cursor.string()
    dimensions = cursor.scalars("Q", cursor.scalar("I"))
    return name, tuple(reversed(dimensions)), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(
    path: Path,
    data: npt.NDArray[np.uint8],
    start: int,
    name: str,
    shape: tuple[int, ...],
    number: int,
    offset: int,
) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise UnsupportedModelError(f"{path}: tensor {name!r} has the unknown quantisation {number}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or not all(shape) or shape[-1] % block:
        raise CorruptModelError(f"{path}: tensor {name!r} of type {kind.name} has the shape {shape}")
    row_bytes = shape[-1] // block * block_bytes
    rows = 1
    for size in shape[:-1]:
        rows *= size
    end = start + offset + rows * row_bytes
    if end > len(data):
        raise CorruptModelError(
            f"{path} is truncated: tensor {name!r} ends at byte {end:,} of {len(data):,}; fetch it again"
        )
    return GGUFTensor(name, shape, kind, data[start + offset : end].reshape(rows, row_bytes))
