"""From a folder to the target that runs it: our own where it can, transformers' module for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import sakiyomi
import test_mlp
from conftest import byte_tokenizer, make_reference
from sakiyomi import OptionError, SamplingParams, UnsupportedModelError, core, loading
from sakiyomi import llm as llm_module
from sakiyomi.drafters.mlp import MlpConfig, save_mlp
from sakiyomi.drafters.table import build_table
from sakiyomi.loading import LoadedModel
from sakiyomi.targets.compiled import CompiledTarget
from sakiyomi.targets.huggingface import HuggingFaceTarget
from sakiyomi.targets.pytorch import TorchTarget

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAKIYOMI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_reference("llama", num_hidden_layers=1), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    return save(transformers.GPT2LMHeadModel(config).eval(), tmp_path_factory.mktemp("gpt2"))


def test_the_llama_family_runs_on_our_own(llama):
    llm = sakiyomi.load(llama, drafter="none")
    assert isinstance(llm.target, CompiledTarget if core.available() else TorchTarget)
    assert isinstance(sakiyomi.load(llama, drafter="none", device="cpu").target, type(llm.target))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_other_decoders_run_through_their_module(gpt2, dtype):
    llm = sakiyomi.load(gpt2, dtype=dtype, num_speculative_tokens=3)
    assert isinstance(llm.target, HuggingFaceTarget)
    assert llm.target.dtype is {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    prompts = ["abcabcabcab", "xyz", [1, 2, 3] * 10]
    plain = [llm.generate(each, PARAMS, drafter="none") for each in prompts]
    if llm.exactness == "bit-exact":
        assert [each.token_ids for each in llm.generate(prompts, PARAMS)] == [each.token_ids for each in plain]
    assert all(len(each.token_ids) == 24 for each in plain)


def test_llama_with_what_ours_lack_runs_through_its_module(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}
    folder = save(make_reference("llama", num_hidden_layers=1, rope_parameters=rope), tmp_path)
    llm = sakiyomi.load(folder, dtype="fp32", num_speculative_tokens=2)
    assert isinstance(llm.target, HuggingFaceTarget)
    assert llm.target.context_length == 512  # beyond, all positions would change
    assert llm.generate("abcabc", PARAMS).token_ids == llm.generate("abcabc", PARAMS, drafter="none").token_ids


def test_any_architecture_drafts_for_any(llama, gpt2):
    for target, small in ((llama, gpt2), (gpt2, llama)):
        llm = sakiyomi.load(target, dtype="fp32", drafter="model", draft_model=small, num_speculative_tokens=3)
        plain = llm.generate("abcabc", PARAMS, drafter="none")
        assert llm.generate("abcabc", PARAMS).token_ids == plain.token_ids
        assert llm.generate("abcabc", PARAMS).stats.drafted > 0


def test_what_doesnt_go_together_is_told(gpt2, llama, tmp_path):
    if core.available():
        with pytest.raises(OptionError, match="weights='int8': this model runs through its transformers module"):
            sakiyomi.load(gpt2, weights="int8")
        with pytest.raises(OptionError, match="kernels='plain': this model runs through"):
            sakiyomi.load(gpt2, kernels="plain")
    with pytest.raises(OptionError, match="device='nowhere': torch has no such device here"):
        sakiyomi.load(gpt2, device="nowhere")
    with pytest.raises(OptionError, match="device='cpu': device_map says where"):
        sakiyomi.load(gpt2, device="cpu", device_map="auto")
    with pytest.raises(OptionError, match="context_length=300"):
        sakiyomi.load(gpt2, context_length=300)


def test_encoder_decoders_and_recurrent_models_are_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(UnsupportedModelError, match=r"sakiyomi\.accelerate\(model\)"):
        sakiyomi.load(tmp_path)
    config = transformers.MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1, state_size=4)
    folder = save(transformers.MambaForCausalLM(config), tmp_path / "mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        sakiyomi.load(folder)


def test_without_transformers_the_message_says_what_to_install(gpt2, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'gpt2' is not supported.*pip install 'sakiyomi\[huggingface\]'"
    ):
        sakiyomi.load(gpt2)


def test_quantised_checkpoints_go_to_transformers(llama, tmp_path):
    """What it lacks for them is one line."""
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as raised:
        sakiyomi.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert any(word in str(raised.value).lower() for word in ("gptq", "optimum", "install"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two drafters for the tiny llama."""
    folder = tmp_path_factory.mktemp("heads")
    config = MlpConfig(64, 16, 320, 2, tie_weights=True)
    save_mlp(folder / "mlp", config, test_mlp.tensors(config))
    build_table([[1, 2, 3, 1, 2, 3]], vocab_size=320).save(write(folder / "table") / "table.safetensors")
    return {"mlp": folder / "mlp", "table": folder / "table"}


def write(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "sakiyomi-table"}))
    return folder


def test_trained_drafters_are_loaded_when_they_are_wanted(llama, heads, monkeypatch):
    """Those of the default at once, what they share of the target once; none where nothing is drafted."""
    loaded: list[str] = []
    read: list[int] = []
    parts = LoadedModel.parts.fget
    monkeypatch.setattr(LoadedModel, "parts", property(lambda model: read.append(1) or parts(model)))
    load_drafter = llm_module.load_drafter
    monkeypatch.setattr(
        llm_module,
        "load_drafter",
        lambda folder, *given, **options: loaded.append(folder.name) or load_drafter(folder, *given, **options),
    )
    options = {"trained": list(heads.values()), "num_speculative_tokens": 2}
    assert sakiyomi.load(llama, drafter="none", **options).given == ("mlp", "table")
    sakiyomi.load(llama, trained=heads["mlp"], num_speculative_tokens=0).generate("abc", PARAMS)
    assert (loaded, read) == ([], [])
    llm = sakiyomi.load(llama, drafter="mlp+table", **options)
    assert (loaded, read) == (["mlp", "table"], [1])
    plain = llm.generate("abcabc", PARAMS, num_speculative_tokens=0)
    assert llm.generate("abcabc", PARAMS).token_ids == plain.token_ids
    assert loaded == ["mlp", "table"]
    other = sakiyomi.load(llama, drafter="none", **options)
    other.generate("abc", PARAMS, drafter="mlp", num_speculative_tokens=0)
    other.speculation("mlp", 0)
    assert loaded == ["mlp", "table"]
    assert other.generate("abcabc", PARAMS, drafter="mlp").token_ids == plain.token_ids
    assert loaded == ["mlp", "table", "mlp"]


def test_what_is_given_in_vain_is_told(llama, heads, tmp_path, monkeypatch):
    for wrong in (5, None, [5]):
        with pytest.raises(OptionError, match=r"trained=\[?(5|None)\]?: must be the folder of a drafter, or several"):
            sakiyomi.load(llama, trained=wrong)
    with pytest.raises(OptionError, match=r"trained='.*nowhere': there is no such folder; name that of a drafter"):
        sakiyomi.load(llama, trained=llama.parent / "nowhere")
    with pytest.raises(OptionError, match=r"trained='.*mlp': drafter='ngram' goes without; add \+mlp to it"):
        sakiyomi.load(llama, trained=heads["mlp"], drafter="ngram")
    ours = tmp_path / "smollm2-135m"
    for name in ("eagle3", "unknown"):
        (ours / name).mkdir(parents=True)
    (ours / "mlp").write_text("a file")
    monkeypatch.setattr(loading, "_TRAINED", tmp_path)
    assert list(loading.trained_for("smollm2-135m")) == ["eagle3"]
