"""Tiny GGUF files for tests, written with the gguf package's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

ALPHABET = sorted(ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "a b"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<tool>", "[PAD]"]
TYPES = [3] * len(SPECIALS) + [1] * (len(ALPHABET) + len(MERGES)) + [4, 5]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def byte_level_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer; changes are keys after ``tokenizer.ggml.``, None removes one."""
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
        "add_bos_token": False,
        **changes,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
    return {**named, "tokenizer.chat_template": CHAT_TEMPLATE}


def model_metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """Metadata of a model with two layers, four heads of size 8 and two key/value heads."""
    metadata: dict[str, Any] = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **changes,
    }
    return {f"{arch}.{key}": value for key, value in metadata.items() if value is not None}


def tensors(
    *, layers: int = 2, hidden: int = 32, inner: int = 48, q: int = 32, kv: int = 16, vocab: int = len(TOKENS)
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of a plain llama model, by GGUF name."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for i in range(layers):
        block = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}


def write(
    path: Path,
    *,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    weights: Mapping[str, npt.NDArray[Any]] | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Path:
    """Write a GGUF file; ``kinds`` gives the type of those weights that are raw bytes."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        **(model_metadata(arch) if metadata is None else metadata),
        **(byte_level_metadata() if tokenizer is None else tokenizer),
    }.items():
        _add(writer, key, value)
    for name, data in (tensors() if weights is None else weights).items():
        writer.add_tensor(name, data, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
