"""Several kinds of weights of one model, beside each other: how they are named, and what is read of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sakiyomi.bench.quality import Quality
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Target
from sakiyomi.pairs import row_weights
from sakiyomi.targets.decoder import DecoderConfig

_WORDS = ("auto", "bf16", "fp32", "int8")


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """Weights of a model, and what ``load`` is to be given for them.

    ``name``: what results call them. ``model``: where they are, None for the model itself. ``dtype`` and ``weights``
    are options of ``load``; a dtype of None is the user's, weights of None are those of a draft model.
    """

    name: str
    model: str | None = None
    dtype: str | None = None
    weights: str | None = "auto"

    @property
    def are_others(self) -> bool:
        """Whether they aren't the model's own in floating point, so that they may cost quality."""
        return self.model is not None or self.weights != "auto"


@dataclass(frozen=True, slots=True)
class WeightsFacts:
    """What weights take, and what they cost.

    ``bytes_per_token``: see :func:`bytes_per_token`. ``quality``: against the reference; None of the reference itself.
    """

    bytes_per_token: int | None
    quality: Quality | None


def parse(texts: Sequence[str], option: str, *, paths: bool = True) -> tuple[NamedWeights, ...]:
    """Return the weights that an option names, several joined with commas: words, and paths where ``paths`` says so.

    Raises OptionError for what is neither, and for what is named twice.
    """
    names = [name for text in texts for name in ([text] if Path(text).exists() else text.split(","))]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise OptionError(f"{option} {','.join(texts)}: names {twice[0]} twice")
    # Paths are long: in tables their last part will do, if it says which is meant.
    short = {name: name if name in _WORDS else Path(name).expanduser().name for name in names}
    labels = short if len(set(short.values())) == len(names) else {name: name for name in names}
    return tuple(_parse(name, labels[name], option, paths) for name in names)


def _parse(name: str, label: str, option: str, paths: bool) -> NamedWeights:
    if name in ("bf16", "fp32"):
        return NamedWeights(label, dtype=name)
    if name in _WORDS:
        return NamedWeights(label, weights=name)
    path = Path(name).expanduser()
    if paths and name and (path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")):
        return NamedWeights(label, model=str(path))
    or_path = ", or the path of a model folder or .gguf file" if paths else ""
    raise OptionError(f"{option} {name}: must be one of {', '.join(_WORDS)}{or_path}")


def bytes_per_token(target: Target) -> int | None:
    """Return about how many bytes of weights a forward of one row reads, None where that isn't known.

    Those of the layers and of the head: of the table of embeddings it reads a row.
    """
    config, dtype = getattr(target, "config", None), getattr(target, "dtype", None)
    if not isinstance(config, DecoderConfig) or not isinstance(dtype, torch.dtype):
        return None
    return row_weights(config) * (1 if getattr(target, "weight_format", None) == "int8" else dtype.itemsize)
