"""From a folder to the target that runs it: our own where it can, transformers' module for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import sakiyomi
from conftest import byte_tokenizer, make_reference
from sakiyomi import OptionError, SamplingParams, UnsupportedModelError, core
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
