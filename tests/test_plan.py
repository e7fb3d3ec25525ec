"""What is planned is what is allocated: weights, keys and values of every kind of target and drafter."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import sakiyomi
import test_block
import test_eagle
import test_medusa
import test_mlp
from conftest import KERNELS, byte_tokenizer, make_reference
from sakiyomi import cli, core, models
from sakiyomi.drafters.mlp import MlpConfig, save_mlp
from sakiyomi.drafters.table import build_table
from sakiyomi.drafters.trained import load_drafter
from sakiyomi.errors import CorruptModelError, DownloadError, OptionError, UnsupportedModelError
from sakiyomi.interfaces import Work
from sakiyomi.loading import LoadedModel
from sakiyomi.memory import machine_memory, parse_memory
from sakiyomi.plan import Part, Plan, make_plan
from sakiyomi.targets.huggingface import HuggingFaceTarget
from sakiyomi.targets.linear import Linear

run = CliRunner().invoke


def near(value: float) -> object:
    """Return what is within 5 % of a measured number of bytes."""
    return pytest.approx(value, rel=0.05)


class Held:
    """The bytes of all linears that are made, as the core and oneDNN tell them, and of tables."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        held = self

        class Counted(core.Linear):
            def __init__(self, weights, biases=None, **options) -> None:
                super().__init__(weights, biases, **options)
                vectors = (self.format == "int8") + (biases is not None)
                held.bytes += self.nbytes + 4 * vectors * self.out_features

        original = Linear.__init__

        def counted(self: Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            original(self, weight, bias)
            packed = torch.ops.mkldnn._nbytes(self._weight) if self._packed else self._weight.nbytes
            held.bytes += packed + (0 if bias is None else bias.nbytes)

        patch.setattr(core, "Linear", Counted)
        patch.setattr(Linear, "__init__", counted)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def save(model: torch.nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model.to(dtype).save_pretrained(folder)
    byte_tokenizer().fast.save(str(folder / "tokenizer.json"))
    return folder


def fill(target, tokens: int) -> int:
    """Return the bytes of a sequence of so many tokens that was really computed."""
    sequence = target.new_sequence()
    for start in range(0, tokens, 128):
        target.forward([Work(sequence, [1] * min(128, tokens - start), None, 0)])
    assert sequence.length == tokens
    return sequence.nbytes


SIZES = {"intermediate_size": 192, "num_hidden_layers": 2}


@pytest.mark.parametrize("kernels", KERNELS[:2])
@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp32"}, {"weights": "int8"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-bias", "qwen2-tied", "qwen3", "mistral-window"])
def test_our_decoders(family, options, kernels, held, tmp_path):
    """Every format on every way to run, with tables that are kept, or are the head's own rows."""
    if kernels == "torch" and "weights" in options:
        pytest.skip("torch has no int8")
    folder = save(make_reference(family, **SIZES), tmp_path, torch.bfloat16)
    part = make_plan(folder, drafter="none", kernels=kernels, **options).parts[0]
    target = LoadedModel.load(folder, kernels=kernels, **options).target
    table = target._decoder._embedding if kernels != "torch" else target._embedding
    assert part.mapped_bytes == (0 if table is None else table.nbytes)
    assert part.weights_bytes == near(held.bytes + part.mapped_bytes)
    for tokens in (1, 256, 300, 1000):
        assert part.kv_bytes(tokens) == fill(target, tokens)
    assert part.kv_bytes(512) == 512 * part.kv_bytes_per_token
    growing = (1024 - part.kv_block) * part.kv_bytes_per_token if kernels == "torch" else 0
    assert part.growing_bytes(1024) == growing


def test_head_dims_are_filled_up(tmp_path):
    """The core's pages have whole blocks of 32 features; torch's don't."""
    folder = save(make_reference("llama", head_dim=40, **SIZES), tmp_path)
    for kernels in KERNELS[:2]:
        part = make_plan(folder, drafter="none", kernels=kernels).parts[0]
        assert part.kv_bytes(300) == fill(LoadedModel.load(folder, kernels=kernels).target, 300)


MODULES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gemma2": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 32, "max_position_embeddings": 512},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 512},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 512},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_transformers(kind, dtype, held, tmp_path):
    """Other architectures, with heads tied and not, windows, and one that runs path by path (bloom)."""
    torch.manual_seed(0)
    names = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, vocab_size=320, **names, **MODULES[kind])
    folder = save(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    plan = make_plan(folder, drafter="none", dtype=dtype)
    part = plan.parts[0]
    target = LoadedModel.load(folder, dtype=dtype).target
    assert isinstance(target, HuggingFaceTarget)
    assert plan.context_length == part.context_length == target.context_length
    clone = target._runner.clone
    measured = sum(parameter.nbytes for parameter in clone.parameters()) + held.bytes
    assert part.weights_bytes == near(measured)
    for tokens in (1, 256, 300, 500):
        assert part.kv_bytes(tokens) == fill(target, tokens)
    sequence = target.new_sequence()
    target.forward([Work(sequence, [1, 2], None, 0)])
    together = sequence.groups if target.mode == "packed" else sequence.layers
    assert (kind == "bloom") == (target.mode == "one by one")
    assert part.growing_bytes_per_token * sequence.capacity == max(each.nbytes for each in together)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save(make_reference("llama", num_hidden_layers=4), tmp_path_factory.mktemp("tiny"))
    return LoadedModel.load(folder, dtype="fp32")


def made(name: str, loaded: LoadedModel, folder: Path) -> Path:
    parts = test_eagle.parts_of(make_reference("llama", num_hidden_layers=4))
    if name == "block":
        return test_block.Made("full", parts).save(folder)
    if name.startswith(("eagle3", "eagle")):
        kind = {"eagle3": "speculators", "eagle3-embedded": "fc-norm", "eagle": "first", "eagle-deep": "first-deep"}
        return test_eagle.Made(kind[name], parts).save(folder)
    if name in ("mlp", "mlp-tied"):
        config = MlpConfig(64, 64, 320, 3, tie_weights=name == "mlp-tied")
        save_mlp(folder, config, test_mlp.tensors(config))
        return folder
    if name in ("medusa", "medusa-reduced"):
        heads = test_medusa.of_paper(test_medusa.random_heads(4, 2))
        if name == "medusa-reduced":  # of whose outputs a part is kept
            heads["token_map"] = torch.arange(64)
        test_medusa.loaded(folder, test_medusa.CONFIG, heads)
        return folder
    build_table([[1, 2, 3, 1, 2, 3] * 50], vocab_size=320, max_bytes=10**6).save(folder / "table.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "sakiyomi-table"}))
    return folder


@pytest.mark.skipif(not core.available(), reason="counts what the core packs")
@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3-embedded", "eagle", "eagle-deep", "block", "mlp", "mlp-tied", "medusa", "medusa-reduced"]
)
def test_trained_drafters(name, tiny, held, tmp_path):
    """Linears of each published format, tables apart: those that the target's file already has aren't counted twice."""
    folder = made(name, tiny, tmp_path)
    held.bytes = 0
    kind = name.split("-")[0]
    plan = make_plan(tiny.folder, drafter=kind, trained=folder, dtype="fp32")
    part = plan.parts[1]
    drafter = load_drafter(folder, tiny.parts)
    vectors = 4096  # norms and names of draft tokens
    assert part.weights_bytes - part.mapped_bytes == pytest.approx(held.bytes, rel=0.05, abs=vectors)
    tables = {"eagle3-embedded": 1, "eagle-deep": 1, "mlp": 3, "mlp-tied": 1}
    rank = 4 * 320 * test_block.RANK if name == "block" else 0
    assert part.mapped_bytes == tables.get(name, 0) * 320 * 64 * 4 + rank
    if kind in ("mlp", "medusa"):
        assert part.kv_bytes(100) == 0
        return
    memory, model = drafter.new_memory(), drafter.model
    features = torch.zeros(100, model.hidden_norm.shape[0] if kind == "block" else model.hidden_size)
    for _ in range(3):
        if kind == "block":
            model.forward(memory, features, 0, 0)
        else:
            model.forward(memory, [1] * 100, features, None, 1)
    assert part.kv_bytes(300) == memory.nbytes
    assert part.context_length == drafter.context_length


@pytest.mark.skipif(not core.available(), reason="torch's target has a table of its own")
def test_drafters_share_the_targets_table(tiny, tmp_path):
    """Where the target needs none, the first drafter's counts; a head that EAGLE-1 doesn't read isn't counted."""
    tied = save(make_reference("llama-tied", num_hidden_layers=4), tmp_path / "tied")
    folders = []
    for name in ("eagle", "block"):
        (tmp_path / name).mkdir()
        folders.append(made(name, tiny, tmp_path / name))
    before = make_plan(tied, trained=folders, dtype="fp32").parts
    table, markov = 4 * 320 * 64, 4 * 320 * test_block.RANK
    assert [part.mapped_bytes for part in before if part.weights_bytes] == [0, table, markov]
    alone = make_plan(tied, trained=folders[1], dtype="fp32").parts[-1]
    assert alone.mapped_bytes == table + markov
    tensors = {**load_file(folders[0] / "model.safetensors"), "lm_head.weight": torch.zeros(320, 64)}
    save_file(tensors, folders[0] / "model.safetensors")
    assert make_plan(tied, trained=folders, dtype="fp32").parts == before


@pytest.mark.skipif(not core.available(), reason="the core takes no fp16")
@pytest.mark.parametrize("name", ["eagle3", "eagle3-embedded"])
def test_fp16_embeddings_of_eagle3_become_bf16(name, held, tmp_path):
    """A copy that is as large as what it is of, and no pages of a file."""
    half = save(make_reference("llama", num_hidden_layers=4), tmp_path / "target", torch.float16)
    target = LoadedModel.load(half)
    (tmp_path / "drafter").mkdir()
    folder = made(name, target, tmp_path / "drafter")
    full = make_plan(half, drafter="eagle3", trained=folder).parts[1]
    if name == "eagle3-embedded":
        assert full.mapped_bytes == 4 * 320 * 64
        tensors = load_file(folder / "model.safetensors")
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].half()
        save_file(tensors, folder / "model.safetensors")
    part = make_plan(half, drafter="eagle3", trained=folder).parts[1]
    held.bytes = 0
    table = load_drafter(folder, target.parts).model.layers._decoder._embedding
    assert (table.dtype, part.mapped_bytes) == (torch.bfloat16, 0)
    assert part.weights_bytes == pytest.approx(held.bytes + table.nbytes, abs=4096)


def test_a_table_and_a_draft_model(tiny, held, tmp_path):
    small = save(make_reference("llama", num_hidden_layers=1, max_position_embeddings=512), tmp_path / "small")
    (tmp_path / "table").mkdir()
    folder = made("table", tiny, tmp_path / "table")
    plan = make_plan(tiny.folder, draft_model=small, trained=folder)
    assert [part.name for part in plan.parts][2:] == ["table", "model"]
    table, draft = plan.parts[2:]
    loaded = load_drafter(folder, tiny.parts).table
    assert table.weights_bytes == pytest.approx(loaded.nbytes + 8 * len(loaded.keys), abs=600)
    held.bytes = 0
    target = LoadedModel.load(small, weights=None).target
    assert draft.weights_bytes == near(held.bytes + draft.mapped_bytes)
    assert draft.kv_bytes(512) == draft.kv_bytes(1024) == fill(target, 512), "beyond its context nothing is kept"


def test_torch_grows_by_a_quarter():
    """A long sequence has more room than it needs, as much as what fills it token by token has."""
    from sakiyomi.targets.cache import KeyValues

    part = Part("target", kv_bytes_per_token=2 * 4, growing_bytes_per_token=2 * 4)
    memory = KeyValues(1, 1, 1, torch.float32)
    for tokens in range(1, 9000):
        memory.reserve(tokens)
        memory.length = tokens
        assert part.kv_bytes(tokens) == memory.nbytes
    assert memory.nbytes > 8 * 9216


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process's peak")
def test_memory_that_grows_is_there_twice_for_a_moment():
    """By what the operating system says: of two sequences only one is copied at a time."""
    script = """
import torch
from sakiyomi.targets.cache import KeyValues
def told(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
before = told("VmRSS")
sequences = [KeyValues(16, 8, 128, torch.float32) for _ in range(2)]
for tokens in range(128, 1025, 128):
    for each in sequences:
        each.reserve(tokens)
        each.length = tokens
print(told("VmHWM") - before, told("VmRSS") - before)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    peak, after = map(int, run.stdout.split())
    size = 2 * 16 * 8 * 128 * 4
    part = Part("target", kv_bytes_per_token=size, growing_bytes_per_token=size, context_length=1024)
    plan = Plan("it", (part, Part("suffix")), 10**9, 0, 1024, batch_size=2)
    assert plan.total_bytes(1024) == near(peak)
    assert 2 * part.kv_bytes(1024) == near(after)
    assert plan.as_dict()["at_context"]["growing_bytes"] == 768 * size
    tight = Plan("it", (part,), peak - 20 * 2**20, 0, 1024, batch_size=2)
    assert tight.longest() == 768, "what is there for a moment has to fit too"


def plan_of(memory: int, *, batch_size: int = 1, context_length: int = 10_000) -> Plan:
    target = Part("target", 1000, kv_bytes_per_token=10, kv_block=10, context_length=context_length)
    drafter = Part("eagle3", 500, kv_bytes_per_token=5, kv_block=10, context_length=400)
    return Plan("it", (target, drafter), memory, 100, context_length, batch_size)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("memory", [0, 1199, 1200, 2000, 5000, 5600, 9999, 40_000, 10**6])
def test_the_longest_context_is_the_longest_that_fits(memory, batch_size):
    plan = plan_of(memory, batch_size=batch_size)
    for speculating in (True, False):
        found = plan.longest(speculating=speculating)
        fits = [n for n in range(1, 10_001) if plan.total_bytes(n, speculating=speculating) <= memory]
        assert found == max(fits, default=0)
    facts = plan.as_dict()
    assert facts["tokens_fewer"] == facts["longest_context_without_drafters"] - facts["longest_context"] >= 0


def test_what_speculating_costs():
    plain, facts = plan_of(5600).longest(speculating=False), plan_of(5600).as_dict()
    assert (plain, facts["longest_context"], facts["tokens_fewer"]) == (450, 260, 190)
    enough = plan_of(10**6).as_dict()
    assert (enough["longest_context"], enough["tokens_fewer"]) == (10_000, 0), "the model's own context is what limits"
    assert enough["at_context"]["kv_bytes"] == {"target": 100_000, "eagle3": 2000}


def test_amounts():
    assert [parse_memory(each) for each in ("24GB", "1.5 GiB", "512mb", "2TB", "1MiB")] == [
        24 * 10**9,
        3 * 2**29,
        512 * 10**6,
        2 * 10**12,
        2**20,
    ]
    for wrong in ("24", "24G", "GB", "-1GB", "0GB", "1e9GB", "24 parsecs", ""):
        with pytest.raises(OptionError, match="must be an amount with a unit, as 24GB") as caught:
            parse_memory(wrong)
        assert f"memory={wrong!r}" in str(caught.value)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="where Linux says it")
def test_the_machines_memory(monkeypatch, tmp_path):
    """All that there is, or in a container what it may use."""
    (total,) = (line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = tmp_path / name
        monkeypatch.setattr("sakiyomi.memory._LIMITS", (tmp_path / "missing", limit))
        for text, expected in (
            ("max\n", int(total) * 1024),
            (f"{2**63 - 4096}\n", int(total) * 1024),
            ("9999\n", 9999),
        ):
            limit.write_text(text)
            assert machine_memory() == expected


def test_what_cannot_work_is_told_in_one_line(tiny, tmp_path):
    def told(message: str, *arguments: str) -> None:
        result = run(cli.app, ["plan", *arguments])
        assert isinstance(result.exception, sakiyomi.errors.SakiyomiError), result
        assert message in str(result.exception)
        assert "\n" not in str(result.exception)

    folder = str(tiny.folder)
    told("memory='300MB': 300 MB are too little for", folder, "--memory", "300MB")
    needed = make_plan(folder, drafter="none").total_bytes(1)
    enough = f"{-(-needed // 10**6)}MB"
    told(f"{enough} would do", folder, "--memory", "300MB")
    assert make_plan(folder, memory=enough).longest(speculating=False) > 0, "what it says would do does"
    told("context=1025: must be a whole number in 1..1024", folder, "--context", "1025")
    told("context=0: must be a whole number in 1..1024", folder, "--context", "0")
    told("batch_size=0: must be", folder, "--batch-size", "0")
    told("memory='1 potato'", folder, "--memory", "1 potato")
    told("dtype='fp8': must be one of", folder, "--dtype", "fp8")
    told("drafter='eagle'", folder, "--drafter", "eagle")
    told("goes without", folder, "--draft-model", folder, "--drafter", "ngram")
    head = made("mlp", tiny, tmp_path)
    for options, message in (
        ({"trained": head, "drafter": "ngram"}, "trained='.*': drafter='ngram' goes without; add .mlp to it"),
        ({"draft_model": folder, "drafter": "ngram"}, "draft_model='.*': drafter='ngram' goes without; add .model"),
        ({"memory": 5}, "memory=5: must be an amount with a unit"),
        ({"batch_size": "x"}, "batch_size='x': must be a whole number from 1 on"),
        ({"batch_size": True}, "batch_size=True: must be a whole number from 1 on"),
        ({"context": 1.5}, r"context=1\.5: must be a whole number in 1\.\.1024"),
        ({"context": True}, r"context=True: must be a whole number in 1\.\.1024"),
    ):
        with pytest.raises(OptionError, match=message) as caught:
            make_plan(tiny.folder, **options)
        assert "\n" not in str(caught.value)
    assert make_plan(tiny.folder, trained=head, drafter="none").parts[1:] == (), "as load takes it"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        make_plan(tmp_path)


@pytest.mark.parametrize("name", ["max_position_embeddings", "intermediate_size", "vocab_size", "hidden_size"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_model_without_size_is_corrupt(name, size, tmp_path):
    """Of such a one no memory would do."""
    save(make_reference("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: size}))
    with pytest.raises(CorruptModelError, match=f"makes no sense: {name} {size} must be at least 1"):
        make_plan(tmp_path, memory="400MB")


def test_the_command(tiny):
    result = run(cli.app, ["plan", str(tiny.folder), "--memory", "1GB", "--context", "300", "--drafter", "ngram"])
    assert result.exit_code == 0, result.exception
    for shown in ("target", "ngram", "K/V of 300 tokens", "1.0 GB", "1,024 tokens, as many as without drafters"):
        assert shown in result.stdout
    assert ("of that for a moment" in result.stdout) == (not core.available())
    result = run(cli.app, ["plan", str(tiny.folder), "--context", "700", "--kernels", "torch", "-d", "none"])
    assert "of that for a moment, while K/V are copied to grow" in result.stdout
    result = run(cli.app, ["plan", str(tiny.folder), "--batch-size", "2", "--context", "300", "--json", "-d", "none"])
    facts = json.loads(result.stdout)
    part = Part(**facts["parts"][0])
    assert facts["memory_bytes"] == machine_memory()
    assert facts["at_context"]["total_bytes"] == facts["base_bytes"] + part.weights_bytes + 2 * part.kv_bytes(300)


def test_no_weights_are_read(tmp_path):
    """A model larger than any memory here is planned in no time: its file is a header, and a hole."""
    config = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    size, header = 2 * 128256 * 8192, {}
    for i, name in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        header[name] = {"dtype": "BF16", "shape": [128256, 8192], "data_offsets": [i * size, (i + 1) * size]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 2 * size)
    plan = make_plan(tmp_path, drafter="none", memory="160GB", dtype="bf16")
    assert plan.parts[0].weights_bytes == near(141.1e9), "70.6 billion weights"
    assert plan.parts[0].kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert 0 < plan.longest() == (160 * 10**9 - plan.total_bytes(0)) // (256 * 327680) * 256


def test_hub_models_arent_downloaded(tmp_path, monkeypatch):
    import huggingface_hub as hub
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    folder = save(make_reference("llama-tied"), tmp_path)
    weights = models.open_weights(folder)
    infos = {name: TensorInfo(dtype="F32", shape=list(weights[name].shape), data_offsets=(0, 0)) for name in weights}
    files = {"model.safetensors": SafetensorsFileMetadata(metadata={}, tensors=infos)}
    found = SafetensorsRepoMetadata(metadata=None, sharded=False, weight_map={}, files_metadata=files)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub, "hf_hub_download", lambda name, file: str(folder / file))
    monkeypatch.setattr(hub, "get_safetensors_metadata", lambda name: found)
    assert make_plan("org/name").parts == make_plan(folder).parts

    def offline(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(hub, "get_safetensors_metadata", offline)
    with pytest.raises(DownloadError, match=r"the configuration of 'org/name' from the hub: no network; check"):
        make_plan("org/name")


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return LoadedModel.load("smollm2-135m", progress=False)


@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"dtype": "fp32"}], ids=str)
@pytest.mark.skipif(not core.available() or sys.platform != "linux", reason="Linux tells a process's memory")
def test_the_default_models_memory_of_the_process(options):
    """By what the operating system says that the process gained, files' pages apart."""
    script = """
import ctypes, gc, json, sys
from sakiyomi import models, targets
from sakiyomi.targets.decoder import DecoderConfig
def anonymous():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))
folder = models.resolve("smollm2-135m", progress=False)
config, weights = DecoderConfig.from_huggingface(models.read_config(folder)), models.open_weights(folder)
gc.collect(); before = anonymous()
target = targets.load_decoder(config, weights, **json.loads(sys.argv[1])); gc.collect()
trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # what glibc keeps of memory that was freed isn't held
if trim: trim(0)
print(anonymous() - before)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, json.dumps(options)]
    gained = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    part = make_plan("smollm2-135m", drafter="none", **options).parts[0]
    assert part.weights_bytes - part.mapped_bytes == near(gained)


@pytest.mark.model
def test_the_default_model_and_its_drafters(default, held):
    plan = make_plan("smollm2-135m")
    by_name = {part.name: part for part in plan.parts}
    assert plan.context_length == default.target.context_length
    assert by_name["target"].kv_bytes(600) == fill(default.target, 600)
    trained = Path(sakiyomi.__file__).parent / "trained" / "smollm2-135m"
    table = load_drafter(trained / "table", default.parts).table
    assert by_name["table"].weights_bytes == near(table.nbytes + 8 * len(table.keys))
    if not core.available():
        return
    eagle = load_drafter(trained / "eagle3", default.parts)
    assert by_name["eagle3"].weights_bytes - by_name["eagle3"].mapped_bytes == near(held.bytes)
    assert by_name["eagle3"].mapped_bytes == default.parts.embedding.nbytes
    llm = sakiyomi.load("smollm2-135m", progress=False, drafter="eagle3", num_speculative_tokens=3)
    setting = llm.speculation()
    request = llm.engine.request(
        [5] * 300, sakiyomi.SamplingParams(max_new_tokens=100), setting.drafters, setting.policy
    )
    list(llm.engine.run(request))
    tokens = request.sequence.length
    assert by_name["target"].kv_bytes(tokens) == request.sequence.nbytes
    memory = eagle.new_memory()
    for _ in range(3):
        eagle.model.forward(memory, [1] * 128, torch.zeros(128, 576), None, 1)
    assert by_name["eagle3"].kv_bytes(384) == memory.nbytes == math.ceil(384 / 256) * 256 * 768
