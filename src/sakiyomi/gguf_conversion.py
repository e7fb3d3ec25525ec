"""A model folder in Hugging Face layout from a GGUF file, written once and read many times.

Tensors go from the mapped file to the new one in slices of rows, so that memory stays small whatever the
model's size. Quantised tensors become bfloat16; float32, float16 and bfloat16 ones are copied as they are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sakiyomi.errors import CorruptModelError, UnsupportedModelError
from sakiyomi.gguf_file import GGUFFile, GGUFTensor, read_gguf
from sakiyomi.gguf_tokenizer import SpecialIds, write_tokenizer
from sakiyomi.progress import byte_progress

_SLICE = 1 << 18  # elements dequantised at a time: what fits a core's cache
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_STORED = {  # tensors copied without a change: safetensors' name of the type, bytes per element
    GGMLQuantizationType.F32: ("F32", 4),
    GGMLQuantizationType.F16: ("F16", 2),
    GGMLQuantizationType.BF16: ("BF16", 2),
}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Output:
    """One tensor to write. ``heads`` is nonzero where the rows of that many heads have to be put in order."""

    name: str
    tensor: GGUFTensor
    heads: int = 0

    @property
    def dtype(self) -> str:
        return _STORED.get(self.tensor.kind, ("BF16", 2))[0]

    @property
    def n_bytes(self) -> int:
        size = _STORED.get(self.tensor.kind, ("BF16", 2))[1]
        return size * math.prod(self.tensor.shape)


def convert(gguf: Path, folder: Path, *, progress: bool = True) -> None:
    """Write the model of a GGUF file to ``folder``, which exists and is empty, in Hugging Face layout.

    Raises CorruptModelError for a truncated or inconsistent file, UnsupportedModelError for an architecture,
    quantisation or tokenizer that we don't know.
    """
    file = read_gguf(gguf)
    config, outputs = _plan(file)
    ids = write_tokenizer(file, folder)
    if len(file.metadata["tokenizer.ggml.tokens"]) > config["vocab_size"]:
        raise CorruptModelError(f"{gguf} has more tokens than the {config['vocab_size']} rows of its embedding")
    _write_json(folder / "config.json", {**config, **_named_ids(ids, ids.eos)})
    _write_json(folder / "generation_config.json", _named_ids(ids, list(ids.ends) or None))
    total = sum(output.n_bytes for output in outputs)
    label = f"converting {gguf.name} ({total / 1e6:,.0f} MB), once"
    with (
        byte_progress(label, total, show=progress) as report,
        (folder / "model.safetensors").open("wb") as out,
    ):
        out.write(_safetensors_header(outputs))
        done = 0
        for output in outputs:
            for block in _rows(gguf, output):
                out.write(block.data)
                done += block.nbytes
                report(done)
        out.flush()
        os.fsync(out.fileno())  # the folder is renamed next: a power cut must not leave it with empty weights


def _plan(file: GGUFFile) -> tuple[dict[str, Any], list[_Output]]:
    """Return the config, without token ids, and the tensors to write in the order of the new file.

    Every tensor that the architecture needs has to be there in its shape, and no other: a tensor that we
    don't know would change what the model computes.
    """
    architecture = file.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has the architecture {architecture!r}; as GGUF these work: "
            f"{', '.join(_ARCHITECTURES)} (others work from a folder in Hugging Face layout)"
        )
    if file.integer("split.count", 1) > 1:
        raise UnsupportedModelError(f"{file.path} is one part of several; join them with llama-gguf-split --merge")
    if file.integer(f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(f"{file.path} is a mixture of experts; as GGUF only dense models work")
    config = _config(file, architecture)
    outputs = []
    left = dict(file.tensors)
    for name, hf_name, shape, heads in _expected(config):
        tensor = left.pop(name, None)
        if tensor is None:
            raise CorruptModelError(f"{file.path} lacks the tensor {name!r}")
        if tensor.shape != shape:
            raise CorruptModelError(f"{file.path}: tensor {name!r} has the shape {tensor.shape}, not {shape}")
        if len(shape) == 1 and tensor.kind not in _STORED:
            raise UnsupportedModelError(f"{file.path}: the vector {name!r} is quantised, to {tensor.kind.name}")
        outputs.append(_Output(hf_name, tensor, heads))
    if (divisors := left.pop(_ROPE_DIVISORS, None)) is not None:
        scaling = _llama3_scaling(divisors, config)
        if scaling is None:  # no config can say it: the tensor itself tells
            outputs.append(_Output(_ROPE_DIVISORS, divisors))
        else:
            config["rope_parameters"].update(scaling)
    if left:
        raise UnsupportedModelError(
            f"{file.path} has the tensor {next(iter(left))!r}, which a plain {architecture} model hasn't"
        )
    for kind, tensor in {output.tensor.kind: output.tensor for output in outputs}.items():
        _check_kind(file.path, tensor.name, kind)
    outputs.sort(key=lambda output: output.dtype != "F32")  # four-byte types first: every offset stays aligned
    embedding = next(output for output in outputs if output.name == "model.embed_tokens.weight")
    return {**config, "dtype": _DTYPES[embedding.dtype]}, outputs


def _config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    def key(name: str) -> str:
        return f"{architecture}.{name}"

    hidden = file.integer(key("embedding_length"))
    heads = file.integer(key("attention.head_count"))
    if not heads or hidden % heads:
        raise CorruptModelError(f"{file.path} has {heads} heads for a hidden size of {hidden}")
    kv_heads = file.integer(key("attention.head_count_kv"), heads)
    if not kv_heads or heads % kv_heads:
        raise CorruptModelError(f"{file.path} has {heads} heads for {kv_heads} key/value heads")
    head_dim = file.integer(key("attention.key_length"), hidden // heads)
    if not head_dim or head_dim % 2:
        raise CorruptModelError(f"{file.path} has heads of size {head_dim}; rope needs an even size")
    for other in ("attention.value_length", "rope.dimension_count"):
        if (found := file.integer(key(other), head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"{file.path} has {key(other)} = {found}; only {head_dim}, the size of a head, works"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptModelError(f"{file.path} lacks the tensor 'token_embd.weight'")
    theta = file.number(key("rope.freq_base"), 10000.0)
    rope = {"rope_type": "default", "rope_theta": theta, **_rope_scaling(file, key("rope.scaling"))}
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.integer(key("feed_forward_length")),
        "num_hidden_layers": file.integer(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.integer(key("context_length")),
        "rms_norm_eps": file.number(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return config


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """Return the scaling that the metadata under ``prefix`` asks for, in the words of a config."""
    kind = file.text(f"{prefix}.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{file.path} scales its rope by {kind!r}; linear and yarn work")
    factor = file.number(f"{prefix}.factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.integer(f"{prefix}.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if f"{prefix}.yarn_{name}" in file.metadata:
                scaling[name] = file.number(f"{prefix}.yarn_{name}")
        if (attention := file.number(f"{prefix}.attn_factor", 1.0)) != 1.0:
            # in GGUF a factor on yarn's own temperature, in a config the whole
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(divisors: GGUFTensor, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the llama3 rope parameters whose divisors these are; None where there are none.

    Llama 3.1, 3.2 and 3.3 differ in the factor only. Files hold the divisors and not the parameters.
    """
    dim = config["head_dim"]
    if divisors.shape != (dim // 2,) or divisors.kind != GGMLQuantizationType.F32:
        return None
    found = divisors.data.view(np.float32).reshape(-1).astype(np.float64)
    factor, low, high, original = round(float(found.max()), 3), 1.0, 4.0, 8192
    frequencies = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    turns = original * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / (keep + (1 - keep) / factor), found, rtol=1e-4, atol=0.0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _expected(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield for each tensor of the model: GGUF name, Hugging Face name, shape, heads to reorder."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, kv, kind = heads * dim, kv_heads * dim, config["model_type"]
    # GGUF files of llama models pair the elements of a rotation side by side, Hugging Face half a head apart.
    interleaved = kind == "llama"
    linears = {
        "attn_q": ("self_attn.q_proj", q, hidden, heads * interleaved),
        "attn_k": ("self_attn.k_proj", kv, hidden, kv_heads * interleaved),
        "attn_v": ("self_attn.v_proj", kv, hidden, 0),
        "attn_output": ("self_attn.o_proj", hidden, q, 0),
        "ffn_gate": ("mlp.gate_proj", inner, hidden, 0),
        "ffn_up": ("mlp.up_proj", inner, hidden, 0),
        "ffn_down": ("mlp.down_proj", hidden, inner, 0),
    }
    vectors = {"attn_norm": ("input_layernorm", hidden), "ffn_norm": ("post_attention_layernorm", hidden)}
    if kind == "qwen3":
        vectors |= {"attn_q_norm": ("self_attn.q_norm", dim), "attn_k_norm": ("self_attn.k_norm", dim)}
    biased: tuple[str, ...] = ()
    if kind == "qwen2":
        biased = ("attn_q", "attn_k", "attn_v")
    if config.get("attention_bias"):
        biased += ("attn_q", "attn_k", "attn_v", "attn_output")
    if config.get("mlp_bias"):
        biased += ("ffn_gate", "ffn_up", "ffn_down")

    yield "token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden), 0
    yield "output_norm.weight", "model.norm.weight", (hidden,), 0
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (config["vocab_size"], hidden), 0
    for layer in range(config["num_hidden_layers"]):
        block, ours = f"blk.{layer}", f"model.layers.{layer}"
        for name, (module, rows, columns, permuted) in linears.items():
            yield f"{block}.{name}.weight", f"{ours}.{module}.weight", (rows, columns), permuted
            if name in biased:
                yield f"{block}.{name}.bias", f"{ours}.{module}.bias", (rows,), permuted
        for name, (module, size) in vectors.items():
            yield f"{block}.{name}.weight", f"{ours}.{module}.weight", (size,), 0


def _check_kind(path: Path, name: str, kind: GGMLQuantizationType) -> None:
    if kind in _STORED:
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)  # one block, to see if it can
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} has the type {kind.name}, which can't be read; F32, F16, BF16, "
            "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K and IQ types work"
        ) from None


def _rows(path: Path, output: _Output) -> Iterator[npt.NDArray[Any]]:
    """Yield the tensor's rows, in the order and type in which they are written, a slice at a time."""
    data = output.tensor.data
    kind = output.tensor.kind
    if len(output.tensor.shape) == 1 and kind in _STORED:
        data = data.reshape(output.tensor.shape[0], -1)  # a bias that is reordered has one element per row
    order = _row_order(len(data), output.heads)
    step = max(1, _SLICE // output.tensor.shape[-1])
    for start in range(0, len(data), step):
        rows = data[start : start + step] if order is None else data[order[start : start + step]]
        if kind in _STORED:
            yield np.ascontiguousarray(rows)
            continue
        with np.errstate(all="ignore"):  # damaged scales: see the next check
            values = dequantize(rows, kind)
        if not np.isfinite(values).all():
            raise CorruptModelError(f"{path} is damaged: tensor {output.tensor.name!r} has infinities or NaN")
        yield _bfloat16(values)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of finite values rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _row_order(rows: int, heads: int) -> npt.NDArray[np.int64] | None:
    """Return for each row of a Hugging Face tensor its row in the GGUF tensor; None for the same order."""
    if not heads:
        return None
    pairs = np.arange(rows, dtype=np.int64).reshape(heads, rows // heads // 2, 2)
    order: npt.NDArray[np.int64] = pairs.swapaxes(1, 2).flatten()
    return order


def _safetensors_header(outputs: list[_Output]) -> bytes:
    """Return the bytes before the first tensor: the header's length, and the header as JSON."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in outputs:
        end = offset + output.n_bytes
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _named_ids(ids: SpecialIds, eos: int | list[int] | None) -> dict[str, Any]:
    named = {"bos_token_id": ids.bos, "eos_token_id": eos, "pad_token_id": ids.pad}
    return {name: value for name, value in named.items() if value is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
