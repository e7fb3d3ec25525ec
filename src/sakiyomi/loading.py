"""From a name to a target and its tokenizer: which target runs a model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import sakiyomi
from sakiyomi import models, targets
from sakiyomi.costs import ModelCosts, measured
from sakiyomi.cpus import cpu_name
from sakiyomi.drafters import TRAINED
from sakiyomi.drafters.trained import TargetParts, kind
from sakiyomi.errors import OptionError, UnsupportedModelError
from sakiyomi.targets.decoder import DecoderConfig, Reader
from sakiyomi.text import Tokenizer

if TYPE_CHECKING:
    from sakiyomi.targets.compiled import CompiledTarget
    from sakiyomi.targets.huggingface import HuggingFaceTarget
    from sakiyomi.targets.pytorch import TorchTarget

DTYPES = ("auto", "bf16", "fp32")
_TRAINED = Path(__file__).parent / "trained"  # drafters that come with the package, by known model and kind
DeviceMap = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as it was found and loaded."""

    folder: Path
    target: CompiledTarget | TorchTarget | HuggingFaceTarget
    tokenizer: Tokenizer

    @classmethod
    def load(
        cls,
        name: str | os.PathLike[str],
        *,
        dtype: Literal["auto", "bf16", "fp32"] = "auto",
        weights: Literal["auto", "int8"] | None = "auto",
        kernels: str = "auto",
        context_length: int | None = None,
        device: str | None = None,
        device_map: DeviceMap | None = None,
        progress: bool = True,
    ) -> LoadedModel:
        """Load what a name stands for. Raises ModelError or OptionError.

        On a processor the Llama family runs on the compiled core, or on torch's kernels; other architectures, quantised
        weights and other devices through their transformers module. ``weights=None`` is for draft models, whose losses
        in quality can't reach the text: int8 where the core runs.
        """
        folder = models.resolve(name, progress=progress)
        config = models.read_config(folder)
        if config.get("is_encoder_decoder"):
            raise UnsupportedModelError(
                f"{folder} is an encoder-decoder model: load it with transformers, then sakiyomi.accelerate(model) "
                "makes its generate() read ahead"
            )
        tokenizer = Tokenizer.from_folder(folder)
        on_processor = device_map is None and (device is None or torch.device(device).type == "cpu")
        decoder = _native(config) if on_processor else None
        if decoder is not None:
            _check_context(context_length, decoder.context_length)
            native = targets.load_decoder(
                decoder,
                models.open_weights(folder),
                dtype=dtype,
                weights=weights or default_draft_weights(kernels),
                kernels=kernels,
                context_length=context_length,
            )
            return cls(folder, native, tokenizer)
        if weights not in ("auto", None):
            raise OptionError(
                f"weights={weights!r}: this model runs through its transformers module; 'auto' is what it has"
            )
        if kernels not in ("auto", "torch"):
            raise OptionError(f"kernels={kernels!r}: this model runs through its transformers module; 'auto' is that")
        from sakiyomi.targets.huggingface import HuggingFaceTarget, load_module

        module = load_module(folder, dtype, device, device_map)
        return cls(folder, HuggingFaceTarget(module, context_length), tokenizer)

    @property
    def parts(self) -> TargetParts:
        """What drafters trained for the model may use of it; read from its files each time.

        ``head`` is the weights alone: of a model whose logits aren't head * h (they have a bias, a scale or a soft cap,
        as in phi, cohere, granite or gemma2), drafters need a head of their own. Raises UnsupportedModelError,
        CorruptModelError.
        """
        from sakiyomi.targets.huggingface import HuggingFaceTarget

        target = self.target
        common: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "context_length": target.context_length,
            "tokenizer": self.tokenizer.fingerprint,
            "eos_ids": self.tokenizer.eos_ids,
        }
        weights = models.open_weights(self.folder)
        read = Reader(weights, target.dtype)
        if isinstance(target, HuggingFaceTarget):
            embedding = target.embedding[: target.vocab_size]
            head = next((name for name in ("lm_head.weight", "embed_out.weight") if name in weights), None)
            size = (target.vocab_size, embedding.shape[1])
            return TargetParts(
                **common,
                hidden_size=size[1],
                layers=target.layers,
                embedding=embedding,
                head=read.table(head, *size) if head else embedding,
            )
        config = target.config
        size = (config.vocab_size, config.hidden_size)
        embedding = read.table("model.embed_tokens.weight", *size)
        return TargetParts(
            **common,
            hidden_size=size[1],
            layers=config.layers,
            embedding=embedding,
            head=embedding if config.tied else read.table("lm_head.weight", *size),
            norm=read.norm("model.norm.weight", size[1]),
            norm_eps=config.norm_eps,
        )

    def costs(self) -> ModelCosts:
        """Return the costs of the model, as the cache has them for this machine."""
        target = self.target
        device = getattr(target, "device", None)
        facts = {
            "model": str(self.folder.resolve()),
            "dtype": str(target.dtype),
            "weights": target.weight_format,
            "kernels": target.kernels,
            "device": "cpu" if device is None or device.type == "cpu" else torch.cuda.get_device_name(device),
            "context": target.context_length,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processor": cpu_name(),
            "version": sakiyomi.__version__,
        }
        return ModelCosts(measured(target, models.cache_dir() / "costs", facts))


def trained_for(
    model: str | os.PathLike[str], given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
) -> dict[str, Path]:
    """Return the folders of the drafters that there are for a model, by name: those given, then those of the package.

    Raises ModelError or OptionError for what is no drafter.
    """
    found = by_name(given)
    ours = _TRAINED / model if isinstance(model, str) and model in models.KNOWN_MODELS else None
    for folder in sorted(ours.iterdir()) if ours and ours.is_dir() else ():
        if folder.name in TRAINED and folder.is_dir():
            found.setdefault(folder.name, folder)
    return found


def by_name(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Return the folders of trained drafters by the names that they go by. Raises ModelError or OptionError."""
    try:
        folders = [Path(each) for each in ([given] if isinstance(given, str | os.PathLike) else given)]
    except TypeError:
        raise OptionError(f"trained={given!r}: must be the folder of a drafter, or several") from None
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise OptionError(f"trained={str(folder)!r}: there is no such folder; name that of a drafter")
        name = kind(folder)
        if name in found:
            raise OptionError(
                f"trained={str(folder)!r}: is a {name} drafter, and so is {found[name]}; give one of them"
            )
        found[name] = folder
    return found


def default_draft_weights(kernels: str) -> Literal["auto", "int8"]:
    """Return the weights that draft models of the Llama family are loaded with."""
    return "int8" if targets.resolve(kernels, "auto") else "auto"


def _native(config: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the configuration of a model that our own targets run; None for one that transformers may know.

    Raises UnsupportedModelError where transformers isn't installed.
    """
    try:
        return DecoderConfig.from_huggingface(config)
    except UnsupportedModelError as error:
        if importlib.util.find_spec("transformers") is None:
            hint = "transformers may run it: pip install 'sakiyomi[huggingface]'"
            raise UnsupportedModelError(f"{error}; {hint}") from None
        return None


def _check_context(asked: int | None, limit: int) -> None:
    if asked is not None and not 2 <= asked <= limit:
        raise OptionError(f"context_length={asked}: must be in 2..{limit} for this model")


def check_device(device: str | None, device_map: DeviceMap | None) -> None:
    """Raise OptionError for a device that there isn't."""
    if device is None:
        return
    if device_map is not None:
        raise OptionError(f"device={device!r}: device_map says where the model goes; give one of the two")
    try:
        if torch.empty(1, device=torch.device(device)).is_meta:
            raise RuntimeError
    except (RuntimeError, AssertionError, NotImplementedError):  # unknown, not built for, or not there
        raise OptionError(f"device={device!r}: torch has no such device here; 'cpu' is always there") from None
