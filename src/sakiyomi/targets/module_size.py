"""What :class:`~sakiyomi.targets.huggingface.HuggingFaceTarget` takes of memory, told without loading a model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from sakiyomi.errors import UnsupportedModelError
from sakiyomi.targets.attention import KEY_BLOCKS, invariant_key_block, kernel
from sakiyomi.targets.cache import BLOCK
from sakiyomi.targets.huggingface import _UNKNOWN_CONTEXT, _configs, _context_limit, _one_line, _refuse
from sakiyomi.targets.linear import can_pack, native_bf16


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """The memory and the dimensions of a decoder that runs through its transformers module.

    ``growing_bytes_per_token``: of its keys and values, those that are copied to larger memory at once.
    ``embedding``, ``head``: the tables, without data.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    growing_bytes_per_token: int
    kv_block: int
    context_length: int
    vocab_size: int
    layers: int
    embedding: torch.Tensor
    head: torch.Tensor


def module_size(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: str) -> ModuleSize:
    """Return the size of a model of transformers, whose module is made here without data.

    ``config``: its config.json; ``tensors``: its weights, without data too. Raises UnsupportedModelError.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    quantised = config.get("quantization_config") is not None
    try:
        own: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        usual = (own.dtype or torch.float16) if quantised else torch.bfloat16 if native_bf16() else torch.float32
        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(dtype, usual)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: Any = auto.from_config(own, dtype=kind).eval()
    except Exception as error:  # transformers raises what it likes for what it doesn't know
        raise UnsupportedModelError(f"{folder}: {_one_line(error)}") from None
    _refuse(module)
    text = own.get_text_config()
    table, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    if quantised:
        total = sum(tensor.nbytes for tensor in tensors.values())
    else:
        total = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        total += table.nbytes if head.weight is table and can_pack(table.dtype) else 0  # packed, it is a copy
    per_token, growing, block = _kept(folder, module, text.num_hidden_layers)
    return ModuleSize(
        weights_bytes=total,
        kv_bytes_per_token=per_token,
        growing_bytes_per_token=growing,
        kv_block=block,
        context_length=_context_limit(text)[0] or _UNKNOWN_CONTEXT,
        vocab_size=text.vocab_size,
        layers=text.num_hidden_layers,
        embedding=table,
        head=next((tensors[each] for each in ("lm_head.weight", "embed_out.weight") if each in tensors), table),
    )


def _kept(folder: Path, module: Any, layers: int) -> tuple[int, int, int]:
    """Return a token's bytes of keys and values, those of them that grow at once, and the tokens of a block.

    The module says: it runs two tokens, without data. Windows change nothing: all keys are kept. Where its attention
    goes past transformers' interface, it is what it gives to a cache (what runs one by one).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from sakiyomi.targets.module_cache import ModuleCache

    seen: list[tuple[Any, ...]] = []  # by layer: heads, kv_heads, head_dim, dtype; what chooses its kernel

    def note(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **kwargs: Any) -> Any:
        sinks, scale = kwargs.get("s_aux") is not None, kwargs.get("scaling") or key.shape[3] ** -0.5
        shape = (query.shape[1], key.shape[1], max(key.shape[3], value.shape[3]), key.dtype)
        seen.append((*shape, float(scale), kwargs.get("softcap"), sinks))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    interface, masks = cast("Any", AttentionInterface), cast("Any", AttentionMaskInterface)
    interface.register("sakiyomi_plan", note)
    masks.register("sakiyomi_plan", lambda *_, **__: None)
    configs = [(each, each._attn_implementation) for each in _configs(module)]
    for ours in (True, False):
        cache = ModuleCache()
        for each, others in configs:
            each._attn_implementation = "sakiyomi_plan" if ours else others
        try:
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), past_key_values=cache)
        except Exception:  # a module may be anything
            continue
        if ours and len(seen) == layers:
            blocks = [
                invariant_key_block(
                    kernel(dim, scale, cap, torch.zeros(heads) if sinks else None), heads, kv, dim, kind
                )
                for heads, kv, dim, kind, scale, cap, sinks in set(seen)
            ]
            groups: Counter[tuple[Any, ...]] = Counter()  # layers that are alike lie together, and grow together
            for heads, kv_heads, dim, kind, *_ in seen:
                groups[heads, kv_heads, dim, kind] += 2 * kv_heads * dim * kind.itemsize
            block = max(BLOCK, *(found or KEY_BLOCKS[0] for found in blocks))
            return groups.total(), max(groups.values()), block
        if not ours and len(cache.layers):  # whose layers grow one by one
            largest = max(layer.nbytes for layer in cache.layers)
            return cache.nbytes // cache.capacity, largest // cache.capacity, BLOCK
    raise UnsupportedModelError(f"{folder}: what it keeps of each token can't be told without loading it")
