"""Tiny random models of each family, a byte-level tokenizer, and the default model."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is there: threads that spin while they wait take fifteen times as long where the machine is busy. How
# they wait changes nothing of what they compute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from sakiyomi import core
from sakiyomi.targets import load_decoder
from sakiyomi.targets.compiled import CompiledTarget
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.targets.pytorch import TorchTarget
from sakiyomi.text import Tokenizer

# The same examples in every run, without a clock, and without files.
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("same")
set_hypothesis_home_dir(os.devnull)

VOCAB = 320
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 40}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
}


def make_reference(family: str, **changes: object) -> torch.nn.Module:
    """Return a transformers model of this family with random weights, norms and biases included."""
    import transformers

    kind, options = FAMILIES[family]
    # "eager": transformers' own sdpa path ignores the sliding window of short models in some versions
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **options, **changes}, attn_implementation="eager")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 1.0 if "norm" in name else 0.0
                parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    return model


KERNELS = ("torch", *core.available())
if not core.available():  # or every load would warn, and warnings are errors here
    os.environ.setdefault("SAKIYOMI_KERNELS", "torch")


def make_target(
    reference: torch.nn.Module,
    dtype: torch.dtype = torch.float32,
    context_length: int | None = None,
    kernels: str = "torch",
) -> TorchTarget | CompiledTarget:
    config = DecoderConfig.from_huggingface(reference.config.to_dict())
    name = "bf16" if dtype is torch.bfloat16 else "fp32"
    return load_decoder(config, reference.state_dict(), dtype=name, kernels=kernels, context_length=context_length)


@pytest.fixture(scope="session", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def reference(family: str) -> torch.nn.Module:
    return make_reference(family)


@pytest.fixture(scope="session")
def target(reference: torch.nn.Module, kernels: str) -> TorchTarget | CompiledTarget:
    return make_target(reference, kernels=kernels)


@pytest.fixture(scope="session")
def llama() -> TorchTarget | CompiledTarget:
    """One tiny target for tests of what stands above it."""
    return make_target(make_reference("llama", num_hidden_layers=2), kernels="auto")


def byte_tokenizer(eos: str | None = "<eos>", template: str | None = None) -> Tokenizer:
    """Return a tokenizer of single bytes: id = byte in GPT-2's order, 256 is <eos>, and fillers up to VOCAB."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    fast.add_tokens([f"<filler{i}>" for i in range(VOCAB - 257)])
    eos_ids = [] if eos is None else [fast.token_to_id(eos)]
    return Tokenizer(fast, {"eos_token": eos}, eos_ids, template)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    yield
    torch.set_num_threads(before)
