"""GGUF files become the same model in Hugging Face layout, or a clear error."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

import tiny_gguf
from sakiyomi import models
from sakiyomi.errors import CorruptModelError, ModelError, UnsupportedModelError
from sakiyomi.gguf_conversion import convert
from sakiyomi.gguf_file import read_gguf

TEXTS = [
    "hello hello 12 ab",
    "Tabs\tand\r\nnew lines\n\n\n   and  runs of   spaces ",
    "naïve café, Größe, 東京, Ελλάδα, emoji 🎉👩‍👩‍👧, ½ ① ٣٤",
    "def f(x):\n    return x[1:] != {'a': 0x1F}  # it's ok, they'll see\n",
    "<|im_start|>hello<tool>hello<|im_end|>",
    "\x00\x7f\u200b\u2028",
]


def converted(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir()
    convert(path, folder, progress=False)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tokenizer_of(tmp_path: Path, **tokenizer: Any) -> Tokenizer:
    path = tiny_gguf.write(tmp_path / "m.gguf", tokenizer=tiny_gguf.byte_level_metadata(**tokenizer))
    return Tokenizer.from_file(str(converted(path) / "tokenizer.json"))


# --- the model ---


def huggingface_model(arch: str, tied: bool) -> Any:
    import transformers

    config_class = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[arch]
    config = config_class(
        vocab_size=len(tiny_gguf.TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that start at 0 and 1 would hide a mix-up
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gguf_weights(model: Any, arch: str) -> dict[str, np.ndarray]:
    """The model's weights under GGUF names; llama's q and k rows interleaved, as llama.cpp's converter does."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, kind = name.rsplit(".", 1)
        block = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            block = f"blk.{layer}."
        array = tensor.numpy()
        if arch == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 4 if module == "self_attn.q_proj" else 2
            array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        weights[f"{block}{names[module]}.{kind}"] = array.copy()
    return weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_computes_the_logits_of_the_model_it_came_from(tmp_path: Path, arch: str, tied: bool) -> None:
    import transformers

    original = huggingface_model(arch, tied)
    metadata = tiny_gguf.model_metadata(arch, **{"attention.key_length": 8, "attention.value_length": 8})
    weights = gguf_weights(original, arch)
    path = tiny_gguf.write(tmp_path / "m.gguf", arch=arch, metadata=metadata, weights=weights)
    folder = converted(path)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())  # no missing, unexpected or mismatched tensors
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, original(ids).logits)
    assert again.config.architectures == [type(original).__name__]
    assert again.config.tie_word_embeddings is tied
    assert again.generation_config.eos_token_id == [2]


def test_llama_biases_are_carried_and_reordered_like_their_weights(tmp_path: Path) -> None:
    weights = tiny_gguf.tensors(layers=1)
    sizes = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32}
    weights |= {f"blk.0.{name}.bias": np.arange(size, dtype=np.float32) for name, size in sizes.items()}
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata=tiny_gguf.model_metadata(block_count=1), weights=weights)
    folder = converted(path)
    stored = load_file(folder / "model.safetensors")
    assert config_of(folder)["attention_bias"] is True
    assert stored["model.layers.0.self_attn.v_proj.bias"].tolist() == list(range(16))
    assert stored["model.layers.0.self_attn.k_proj.bias"].tolist() == [
        *(0, 2, 4, 6, 1, 3, 5, 7),
        *(8, 10, 12, 14, 9, 11, 13, 15),
    ]


KINDS = [
    *(Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_quantisation_gives_the_values_of_the_gguf_package(tmp_path: Path, kind: Kind) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    weights: dict[str, np.ndarray] = tiny_gguf.tensors(layers=1, hidden=256, inner=256, q=256, kv=256)
    raw = {}
    for name, value in weights.items():
        if value.ndim == 2:
            rows, columns = value.shape
            # bytes below 0x3c: whatever fields a block has, its float16 scales are finite
            raw[name] = rng.integers(0, 0x3C, (rows, columns // block * block_bytes), dtype=np.uint8)
    dtype = {Kind.F32: np.float32, Kind.F16: np.float16}.get(kind, np.uint8)
    weights |= {name: data.view(dtype) for name, data in raw.items()}
    path = tiny_gguf.write(
        tmp_path / "m.gguf",
        metadata=tiny_gguf.model_metadata(block_count=1, embedding_length=256, feed_forward_length=256)
        | {"llama.attention.head_count_kv": 4},
        weights=weights,
        kinds=dict.fromkeys(raw, kind),
    )
    stored = load_file(converted(path) / "model.safetensors")

    expected = torch.from_numpy(dequantize(raw["blk.0.ffn_up.weight"], kind))
    kept = {Kind.F32: torch.float32, Kind.F16: torch.float16}.get(kind, torch.bfloat16)
    found = stored["model.layers.0.mlp.up_proj.weight"]
    assert found.dtype == kept
    assert torch.equal(found, expected.to(kept))
    embedding = torch.from_numpy(dequantize(raw["token_embd.weight"], kind)).to(kept)
    assert torch.equal(stored["model.embed_tokens.weight"], embedding)
    heads = dequantize(raw["blk.0.attn_q.weight"], kind).reshape(4, 32, 2, 256)
    q = torch.from_numpy(heads.swapaxes(1, 2).reshape(256, 256)).to(kept)
    assert torch.equal(stored["model.layers.0.self_attn.q_proj.weight"], q)
    assert stored["model.norm.weight"].dtype == torch.float32


def test_norms_of_a_quantised_model_stay_float32_and_its_dtype_is_bfloat16(tmp_path: Path) -> None:
    folder = converted(quantised(tmp_path, Kind.Q8_0))
    stored = load_file(folder / "model.safetensors")
    assert config_of(folder)["dtype"] == "bfloat16"
    assert stored["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def quantised(tmp_path: Path, kind: Kind, fill: int = 1) -> Path:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    weights: dict[str, np.ndarray] = tiny_gguf.tensors(layers=1, hidden=block, inner=block, q=block, kv=block // 2)
    raw = {
        name: np.full((len(value), value.shape[1] // block * block_bytes), fill, np.uint8)
        for name, value in weights.items()
        if value.ndim == 2 and value.shape[1] % block == 0
    }
    changes = {"block_count": 1, "embedding_length": block, "feed_forward_length": block}
    return tiny_gguf.write(
        tmp_path / "m.gguf",
        metadata=tiny_gguf.model_metadata(**changes),
        weights={**weights, **raw},
        kinds=dict.fromkeys(raw, kind),
    )


# --- rope ---


def test_metadata_of_linear_scaling_reaches_the_config(tmp_path: Path) -> None:
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata=tiny_gguf.model_metadata(**extra))
    config = config_of(converted(path))
    assert config["rope_theta"] == 10000.0
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}


def test_metadata_of_yarn_scaling_reaches_the_config(tmp_path: Path) -> None:
    extra = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 30.0, "attn_factor": 0.5}
    metadata = tiny_gguf.model_metadata(**{f"rope.scaling.{key}": value for key, value in extra.items()})
    config = config_of(converted(tiny_gguf.write(tmp_path / "m.gguf", metadata=metadata)))
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 30.0,
        "attention_factor": pytest.approx(0.5 * (0.1 * math.log(4) + 1)),
    }


def rope_weights(divisors: np.ndarray) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = tiny_gguf.tensors(q=128, kv=64)
    return {**weights, "rope_freqs.weight": divisors.astype(np.float32)}


def test_divisors_of_llama3_become_its_rope_parameters(tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    reference = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")
    plain = 500000.0 ** (-np.arange(0, 32, 2) / 32)
    changes = {"rope.freq_base": 500000.0, "attention.key_length": 32, "attention.value_length": 32}
    path = tiny_gguf.write(
        tmp_path / "m.gguf",
        metadata=tiny_gguf.model_metadata(**changes),
        weights=rope_weights(plain / scaled.numpy()),
    )
    folder = converted(path)
    assert config_of(folder)["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    assert "rope_freqs.weight" not in load_file(folder / "model.safetensors")


def test_divisors_that_no_config_can_express_stay_a_tensor(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, 16)
    changes = {"attention.key_length": 32, "attention.value_length": 32}
    path = tiny_gguf.write(
        tmp_path / "m.gguf", metadata=tiny_gguf.model_metadata(**changes), weights=rope_weights(divisors)
    )
    folder = converted(path)
    assert config_of(folder)["rope_parameters"]["rope_type"] == "default"
    stored = load_file(folder / "model.safetensors")["rope_freqs.weight"]
    assert torch.equal(stored, torch.from_numpy(divisors.astype(np.float32)))


# --- reading ---


def test_our_reader_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata={**tiny_gguf.model_metadata(), "x.flags": [True, False]})
    ours, theirs = read_gguf(path), GGUFReader(path)
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names
    assert all(ours.metadata[name] == theirs.fields[name].contents() for name in names)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.tensors[tensor.name].data.tobytes() == tensor.data.tobytes()


def test_a_file_cut_anywhere_is_called_corrupt(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(64), *range(64, len(whole), 997), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptModelError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_damage_in_a_header_gives_a_typed_error_or_a_model(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "m.gguf", weights=tiny_gguf.tensors(layers=2)).read_bytes()
    header = whole.index(b"token_embd.weight") + 1000
    rng = random.Random(0)
    damaged, folder = tmp_path / "damaged.gguf", tmp_path / "out"
    folder.mkdir()
    messages = []
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 4])):
            data[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        damaged.write_bytes(data)
        try:
            convert(damaged, folder, progress=False)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not any("\n" in message for message in messages)


# --- what is refused ---


REFUSED_METADATA: list[tuple[dict[str, Any], type[ModelError], str]] = [
    ({"expert_count": 8}, UnsupportedModelError, "mixture of experts"),
    ({"rope.scaling.type": "longrope"}, UnsupportedModelError, "'longrope'; linear and yarn work"),
    ({"rope.dimension_count": 4}, UnsupportedModelError, "rope.dimension_count = 4"),
    ({"attention.head_count_kv": [1, 2]}, UnsupportedModelError, "each layer"),
    ({"attention.head_count_kv": 3}, CorruptModelError, "4 heads for 3 key/value heads"),
    ({"attention.head_count": 5}, CorruptModelError, "5 heads for a hidden size of 32"),
    ({"attention.key_length": 7, "attention.value_length": 7}, CorruptModelError, "heads of size 7"),
    ({"block_count": None}, CorruptModelError, "lacks the metadata 'llama.block_count'"),
    ({"block_count": "two"}, CorruptModelError, "'llama.block_count' = 'two'"),
    ({"block_count": 3}, CorruptModelError, r"lacks the tensor 'blk\.2\."),
    ({"block_count": 2**32 - 1}, CorruptModelError, r"lacks the tensor 'blk\.2\."),
    ({"block_count": 1}, UnsupportedModelError, r"has the tensor 'blk\.1\."),
    ({"feed_forward_length": 64}, CorruptModelError, r"has the shape \(48, 32\), not \(64, 32\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED_METADATA)
def test_metadata_that_we_cannot_follow_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata=tiny_gguf.model_metadata(**changes))
    with pytest.raises(error, match=message):
        converted(path)


def test_an_unknown_architecture_is_named_with_those_that_work(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", arch="mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba'; as GGUF these work: llama, qwen2, qwen3"):
        converted(path)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata={**tiny_gguf.model_metadata(), "split.count": 3})
    with pytest.raises(UnsupportedModelError, match="one part of several"):
        converted(path)


def test_a_quantisation_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"the type Q8_K, which can't be read"):
        converted(quantised(tmp_path, Kind.Q8_K))


def test_a_quantisation_number_from_the_future_is_named(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    kind_at = data.index(name) + len(name) + 4 + 2 * 8
    data[kind_at] = 200
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ffn_up\.weight' has the unknown quantisation 200"):
        read_gguf(path)


def test_weights_that_are_no_numbers_are_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="infinities or NaN"):
        converted(quantised(tmp_path, Kind.Q8_0, fill=0xFF))


def test_an_old_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    with pytest.raises(UnsupportedModelError, match="version 1; little-endian GGUF versions 2 and 3 work"):
        read_gguf(path)


# --- the byte-level tokenizer ---


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-coder"])
def test_text_survives_encoding_and_decoding(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


PIECES = {  # how each pre-tokenizer cuts "it's IT'S 12345½ <a>\n\n x", its pieces here between spaces
    "smollm": "it 's ĠIT ' S Ġ 1 2 3 4 5 ½ Ġ< a > ĊĊ Ġx",
    "gpt-2": "it 's ĠIT ' S Ġ12345½ Ġ< a > ĊĊ Ġx",
    "llama-bpe": "it 's ĠIT 'S Ġ 123 45½ Ġ< a >ĊĊ Ġx",
    "qwen2": "it 's ĠIT 'S Ġ 1 2 3 4 5 ½ Ġ< a >ĊĊ Ġx",
    "tekken": "it 's ĠIT 'S Ġ 1 2 3 4 5 ½ Ġ< a >ĊĊ Ġx",
    "deepseek-coder": "it ' s ĠIT ' S Ġ 1 2 3 4 5 ½ Ġ< a > Ċ Ċ Ġx",
}


@pytest.mark.parametrize("pre", PIECES)
def test_each_pre_tokenizer_cuts_as_its_models_were_trained(tmp_path: Path, pre: str) -> None:
    pre_tokenizer = tokenizer_of(tmp_path, pre=pre).pre_tokenizer
    cut = [piece for piece, _ in pre_tokenizer.pre_tokenize_str("it's IT'S 12345½ <a>\n\n x")]
    assert " ".join(cut).replace("Â½", "½") == PIECES[pre]


def test_qwen_composes_characters_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pre="qwen2")
    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "\u00e9"


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'bloom'; these work: .*qwen2"):
        tokenizer_of(tmp_path, pre="bloom")


def test_an_unknown_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'bert'; gpt2 and llama work"):
        tokenizer_of(tmp_path, model="bert")


def test_merges_and_special_tokens_keep_the_ids_of_the_file(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    encoded = tokenizer.encode("<|im_start|>hello hello<tool><|im_end|>[PAD]")
    assert encoded.tokens[:5] == ["<|im_start|>", "hello", "Ġhello", "<tool>", "<|im_end|>"]
    assert encoded.ids[:5] == [tiny_gguf.TOKENS.index(token) for token in encoded.tokens[:5]]
    assert encoded.tokens[5:] == list("[PAD]")  # an unused entry stands for no text
    assert tokenizer.decode(encoded.ids) == "hello hello<tool>[PAD]"  # user-defined tokens are text


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_text_begins_with_bos_where_the_file_or_its_family_says_so(
    tmp_path: Path, pre: str, add_bos: bool | None, begins: bool
) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre, add_bos_token=add_bos)
    assert (tokenizer.encode("a").ids[0] == 1) is begins
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_a_text_ends_with_eos_where_the_file_says_so(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, add_eos_token=True).encode("a").ids[-1] == 2


def test_a_file_without_merges_or_with_foreign_ones_is_called_corrupt(tmp_path: Path) -> None:
    for name, merges in (("none", None), ("foreign", ["x y"])):
        folder = tmp_path / name
        folder.mkdir()
        with pytest.raises(CorruptModelError, match=r"merges|disagree"):
            tokenizer_of(folder, merges=merges)


def test_a_token_id_outside_the_vocabulary_is_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="eos_token_id = 9999"):
        tokenizer_of(tmp_path, eos_token_id=9999)


def test_more_tokens_than_embedding_rows_are_called_corrupt(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", weights=tiny_gguf.tensors(vocab=10))
    with pytest.raises(CorruptModelError, match="more tokens than the 10 rows of its embedding"):
        converted(path)


def test_the_chat_template_and_special_tokens_reach_the_tokenizer_config(tmp_path: Path) -> None:
    folder = converted(tiny_gguf.write(tmp_path / "m.gguf"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == tiny_gguf.CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_an_end_of_turn_token_ends_an_answer_even_if_eos_is_another(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", tokenizer=tiny_gguf.byte_level_metadata(eos_token_id=0))
    folder = converted(path)
    assert config_of(folder)["eos_token_id"] == 0
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, tiny_gguf.TOKENS.index("<|im_end|>")]


def test_transformers_loads_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    import transformers

    folder = converted(tiny_gguf.write(tmp_path / "m.gguf"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text).ids
    chat = theirs.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>hello<|im_end|>"


# --- the sentencepiece tokenizer ---


def sentencepiece(tmp_path: Path, **changes: Any) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = {
        "▁": -9.0,
        "a": -10.0,
        "b": -11.0,
        "c": -12.0,
        "ab": -2.0,
        "bc": -1.0,
        "▁a": -3.0,
        "▁abc": -0.5,
        "▁▁": -4.0,
    }
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    metadata = {
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "scores": [0.0] * 259 + list(pieces.values()),
        "merges": None,
        "unknown_token_id": 0,
        "add_bos_token": None,
        **changes,
    }
    return tokenizer_of(tmp_path, **metadata)


def test_sentencepiece_merges_follow_the_scores(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokenizer.encode("abc").tokens == ["<s>", "▁abc"]  # bc, then ▁a, then both
    # bc (-1) is made before ab (-2), although ab comes first
    assert tokenizer.encode("aabc", add_special_tokens=False).tokens == ["▁a", "a", "bc"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["▁", "ab"]


def test_sentencepiece_text_survives_with_bytes_for_unknown_characters(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode([0]) == ""  # what stands for nothing isn't shown
    for text in [*TEXTS, " a", "  a  b ", "a\n b"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_sentencepiece_leaves_the_first_space_out_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False)
    assert tokenizer.encode("ab a", add_special_tokens=False).tokens == ["ab", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" ab a").ids) == " ab a"


# --- the default model ---


@pytest.mark.model
def test_the_default_model_answers_a_question() -> None:
    import transformers

    folder = models.resolve(models.DEFAULT_MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
def test_the_default_tokenizer_is_the_published_one() -> None:
    tokenizer = Tokenizer.from_file(str(models.resolve(models.DEFAULT_MODEL) / "tokenizer.json"))
    # ids of the published tokenizer, digits one by one
    assert tokenizer.encode("<|im_start|>user\nIn 2024, it's Hello World!").tokens == [
        *("<|im_start|>", "user", "Ċ", "In", "Ġ", "2", "0", "2", "4", ",", "Ġit", "'s", "ĠHello", "ĠWorld", "!"),
    ]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
