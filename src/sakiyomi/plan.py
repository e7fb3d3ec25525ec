"""What a model and its drafters take of memory, from configurations: nothing of the weights is read.

Of weights files only the headers are looked at: names, dtypes and shapes. Bytes are those that really get allocated:
packed weights are filled up to whole blocks, keys and values grow by pages or blocks. Tables of embeddings that stay in
their file are counted, though the system may take their pages back. What isn't counted by itself is in a fixed share:
Python, torch, tokenizers, the memory between the layers of a forward, and what the drafter suffix remembers.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from sakiyomi import drafters, loading, models, targets
from sakiyomi.drafters.layers import Kernels
from sakiyomi.drafters.mlp import MlpConfig
from sakiyomi.drafters.trained import TargetParts, layer_config
from sakiyomi.errors import CorruptModelError, DownloadError, OptionError, UnsupportedModelError
from sakiyomi.targets.attention import KEY_BLOCKS, invariant_key_block, kernel
from sakiyomi.targets.cache import BLOCK
from sakiyomi.targets.decoder import DecoderConfig, LayerNames, Reader, Stack
from sakiyomi.targets.linear import can_pack, native_bf16

if TYPE_CHECKING:
    from rich.console import RenderableType

BASE_BYTES = 300_000_000  # measured on Linux with the default model: Python, torch, tokenizer and working memory
MODULE_BASE_BYTES = 450_000_000  # the same with transformers
Tensors = Mapping[str, torch.Tensor]  # without data: on torch's device "meta"
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_COLUMNS, _DEPTH = 32, 64  # the core packs so many outputs and inputs together (csrc/kernels.h: BLOCK, DEPTH)
_WIDTHS = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Part:
    """The target, or a drafter. ``weights_bytes``: memory of its weights, ``mapped_bytes`` of them in a file's pages.

    ``kv_bytes_per_token``: of keys and values of one sequence; there is room for whole blocks of ``kv_block`` tokens,
    with a quarter more each time where it ``grows`` by copying. ``context_length``: most tokens that it keeps them of.
    """

    name: str
    weights_bytes: int = 0
    mapped_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_block: int = BLOCK
    grows: bool = False
    context_length: int | None = None

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes allocated for keys and values of one sequence of so many tokens."""
        tokens = min(tokens, self.context_length or tokens)
        capacity = 0 if self.grows else _up(tokens, self.kv_block)
        while capacity < tokens:  # as in targets.cache, which gets a few tokens at a time
            capacity = _up(max(capacity + 1, capacity * 5 // 4), self.kv_block)
        return capacity * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a setting, in bytes. ``parts``: the target first, then drafters.

    ``memory_bytes``: what there is, all of the machine's if ``of_machine``. ``context_length``: the model's own, in
    tokens. ``context``: the length asked for.
    """

    model: str
    parts: tuple[Part, ...]
    memory_bytes: int
    base_bytes: int
    context_length: int
    batch_size: int = 1
    context: int | None = None
    of_machine: bool = False

    def total_bytes(self, tokens: int, *, speculating: bool = True) -> int:
        """Return what ``batch_size`` sequences of so many tokens take in all, with drafters or without."""
        parts = self.parts if speculating else self.parts[:1]
        kv = sum(part.kv_bytes(tokens) for part in parts)
        return self.base_bytes + sum(part.weights_bytes for part in parts) + self.batch_size * kv

    def longest(self, *, speculating: bool = True) -> int:
        """Return the most tokens for which there is room, up to the model's own context length; 0: for none."""
        low, high = 0, self.context_length
        while low < high:
            middle = (low + high + 1) // 2
            if self.total_bytes(middle, speculating=speculating) <= self.memory_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and what follows from them, ready for JSON."""
        plain, longest = self.longest(speculating=False), self.longest()
        shown = self.context or longest or plain
        total = self.total_bytes(shown)
        return {
            **dataclasses.asdict(self),
            "longest_context": longest,
            "longest_context_without_drafters": plain,
            "tokens_fewer": plain - longest,
            "at_context": {
                "tokens": shown,
                "total_bytes": total,
                "total_bytes_without_drafters": self.total_bytes(shown, speculating=False),
                "kv_bytes": {part.name: self.batch_size * part.kv_bytes(shown) for part in self.parts},
                "fits": total <= self.memory_bytes,
            },
        }


def make_plan(
    model: str | os.PathLike[str],
    *,
    drafter: str = drafters.AUTO,
    draft_model: str | os.PathLike[str] | None = None,
    trained: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    weights: Literal["auto", "int8"] = "auto",
    kernels: str = "auto",
    memory: str | None = None,
    context: int | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> Plan:
    """Return the memory of a setting on a processor; the options are those of :func:`sakiyomi.load`.

    ``memory``: see :func:`parse_memory`; None for all of this machine's. ``context``: a length of sequences, in tokens,
    to tell the memory of. A known model or a GGUF file is fetched or converted as for any other command; of a hub model
    that isn't in the hub's cache the configuration and the weights' headers are fetched alone.
    Raises ModelError; OptionError also for memory that the weights don't fit into.
    """
    if dtype not in loading.DTYPES:
        raise OptionError(f"dtype={dtype!r}: must be one of {', '.join(loading.DTYPES)}")
    targets.resolve(kernels, weights)
    available = machine_memory() if memory is None else parse_memory(memory)
    if batch_size < 1:
        raise OptionError(f"batch_size={batch_size}: must be a number from 1 on, the sequences at a time")
    heads = loading.trained_for(model, trained)
    names = drafters.parse(drafter, [*heads, *([drafters.MODEL] if draft_model is not None else [])])
    target, parts, base = _model("target", model, dtype, weights, kernels, progress)
    limit = target.context_length
    assert limit is not None
    if context is not None and not 1 <= context <= limit:
        raise OptionError(f"context={context}: must be in 1..{limit}, the model's own context length")
    found = [target]
    shared = parts.embedding.nbytes if base == BASE_BYTES and not target.mapped_bytes else 0
    for name in names:
        if name == drafters.MODEL and draft_model is not None:
            small = loading.default_draft_weights(kernels)
            part, _, own = _model(name, draft_model, dtype, small, kernels, progress, draft=True)
            base = max(base, own)
        elif name in heads:
            part, used = _trained(name, heads[name], parts, kernels, shared)
            shared = 0 if used else shared  # the file's pages are in memory once
        else:
            part = Part(name)
        found.append(part)
    plan = Plan(os.fspath(model), tuple(found), available, base, limit, batch_size, context, memory is None)
    if not plan.longest(speculating=False):
        given = "memory: this machine's" if memory is None else f"memory={memory!r}:"
        needed = _up(plan.total_bytes(1, speculating=False), 10**6) // 10**6
        raise OptionError(
            f"{given} {in_words(available)} are too little for {plan.model}, whose weights take "
            f"{in_words(target.weights_bytes)}: {needed}MB would do"
        )
    return plan


def parse_memory(text: str) -> int:
    """Return the bytes of an amount like 24GB or 1.5GiB. Raises OptionError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]{2,3})", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None or (unit := _UNITS.get(match[2].upper())) is None or not (found := int(float(match[1]) * unit)):
        raise OptionError(f"memory={text!r}: must be an amount with a unit, as 24GB, 512MB, 1.5TB or 16GiB")
    return found


def machine_memory() -> int:
    """Return the bytes of memory that this machine has in all, used or not. Raises OptionError if it doesn't say."""
    try:
        if os.name == "nt":
            return _windows_memory()
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise OptionError("memory: this machine doesn't say how much it has; name an amount, as 24GB") from None


def _windows_memory() -> int:
    import ctypes

    buffer = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX: its size and the load share the first; then the total
    ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(buffer)
    windows: Any = ctypes
    if not windows.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(buffer)):
        raise OSError
    return int(buffer[1])


def _model(
    name: str,
    model: str | os.PathLike[str],
    dtype: str,
    weights: str,
    kernels: str,
    progress: bool,
    *,
    draft: bool = False,
) -> tuple[Part, TargetParts, int]:
    """Return a model as a part, what drafters trained for it may use, and the fixed share. As LoadedModel.load does."""
    folder, tensors = _find(model, progress)
    config = models.read_config(folder)
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{folder} is an encoder-decoder model; plan knows of decoders alone")
    if (decoder := loading._native(config)) is not None:
        part, parts = _decoder(name, decoder, tensors, dtype, weights, targets.resolve(kernels, weights))
        return part, parts, BASE_BYTES
    known = ("auto", weights if draft else "auto")  # a draft model's weights are whatever goes
    for option, value, allowed in (("weights", weights, known), ("kernels", kernels, ("auto", "torch"))):
        if value not in allowed:
            raise OptionError(f"{option}={value!r}: this model runs through its transformers module; 'auto' is that")
    return *_module(name, folder, config, tensors, dtype), MODULE_BASE_BYTES


def _find(model: str | os.PathLike[str], progress: bool) -> tuple[Path, Tensors]:
    """Return a folder with a model's config.json, and its weights without their data."""
    name, path = os.fspath(model), Path(model).expanduser()
    on_hub = models._HUB_ID.fullmatch(name) and name not in models.KNOWN_MODELS and path.suffix.lower() != ".gguf"
    if not isinstance(model, str) or not on_hub or path.exists():
        folder = models.resolve(model, progress=progress)
        return folder, _headers(folder)
    from huggingface_hub import get_safetensors_metadata, hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str) and any(Path(cached).parent.glob("*.safetensors")):
            return Path(cached).parent, _headers(Path(cached).parent)
        config = Path(hf_hub_download(name, "config.json"))
        files = get_safetensors_metadata(name).files_metadata.values()
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


def _headers(folder: Path) -> Tensors:
    """Return the weights of a folder without their data: mapping a tensor reads none of it."""
    weights = models.open_weights(folder)
    return {name: weights[name].to("meta") for name in weights}


def _decoder(
    name: str, config: DecoderConfig, tensors: Tensors, dtype: str, weights: str, path: str | None
) -> tuple[Part, TargetParts]:
    """Return a decoder of the Llama family, as CompiledTarget (``path``: of the core) or TorchTarget holds it."""
    plain = dtype if dtype != "auto" else "bf16" if path is not None or native_bf16() else "fp32"
    kind = torch.bfloat16 if plain == "bf16" else torch.float32
    form = "int8" if weights == "int8" else plain
    read, size = Reader(tensors, kind), (config.vocab_size, config.hidden_size)

    def stack(linears: Stack) -> int:
        bias = linears.needs_bias or f"{linears.names[0]}.bias" in tensors
        return _linear(sum(linears.sizes), linears.in_features, form, path, bias)

    layers = [LayerNames.of(config, index) for index in range(config.layers)]
    total = sum(stack(each) for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    norms = 2 * config.hidden_size + (2 * config.head_dim if config.architecture == "qwen3" else 0)
    total += 4 * (config.layers * norms + config.hidden_size) + _linear(*size, form, path)
    table = read.table("model.embed_tokens.weight", *size)
    mapped = table.nbytes
    if path is not None and config.tied and form != "int8":
        mapped = 0  # the head's rows are the embeddings
    elif path is not None and table.dtype is torch.float16:
        total, mapped = total + table.numel() * kind.itemsize, 0
    block = BLOCK
    if path is None:
        attend = kernel(config.head_dim)
        found = invariant_key_block(attend, config.heads, config.kv_heads, config.head_dim, kind)
        block = max(BLOCK, found or KEY_BLOCKS[0])
    part = Part(name, total + mapped, mapped, _kv(config, plain, path), block, path is None, config.context_length)
    head = table if config.tied else read.table("lm_head.weight", *size)
    return part, TargetParts(*size, config.layers, config.context_length, table, head)


def _module(
    name: str, folder: Path, config: Mapping[str, Any], tensors: Tensors, dtype: str
) -> tuple[Part, TargetParts]:
    """Return a decoder that runs through its transformers module, which is made here without data."""
    import transformers

    from sakiyomi.targets import huggingface

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
        raise UnsupportedModelError(f"{folder}: {huggingface._one_line(error)}") from None
    huggingface._refuse(module)
    text = own.get_text_config()
    limit = huggingface._context_limit(text)[0] or huggingface._UNKNOWN_CONTEXT
    table, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    if quantised:
        total = sum(tensor.nbytes for tensor in tensors.values())
    else:
        total = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        total += table.nbytes if head.weight is table and can_pack(table.dtype) else 0  # packed, it is a copy
    given = next((tensors[each] for each in ("lm_head.weight", "embed_out.weight") if each in tensors), table)
    part = Part(name, total, 0, *_kept(folder, module, text.num_hidden_layers), True, limit)
    return part, TargetParts(text.vocab_size, table.shape[1], text.num_hidden_layers, limit, table, given)


def _kept(folder: Path, module: Any, layers: int) -> tuple[int, int]:
    """Return a token's bytes of keys and values, and the tokens of a block, as HuggingFaceTarget keeps them.

    The module says: it runs two tokens, without data. Windows change nothing: all keys are kept. Where its attention
    goes past transformers' interface, it is what it gives to a cache (what runs one by one).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from sakiyomi.targets import huggingface
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
    configs = [(each, each._attn_implementation) for each in huggingface._configs(module)]
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
            per_token = sum(2 * kv_heads * dim * kind.itemsize for _, kv_heads, dim, kind, *_ in seen)
            return per_token, max(BLOCK, *(found or KEY_BLOCKS[0] for found in blocks))
        if not ours and len(cache.layers):
            return cache.nbytes // cache.capacity, BLOCK
    raise UnsupportedModelError(f"{folder}: what it keeps of each token can't be told without loading it")


def _trained(name: str, folder: Path, parts: TargetParts, kernels: str, shared: int) -> tuple[Part, bool]:
    """Return a drafter that was trained for a target, and whether it keeps the target's embeddings.

    ``shared``: the bytes that these add, where the target itself doesn't have them.
    """
    if name == "table":
        from safetensors import safe_open

        path = folder / "table.safetensors"
        try:
            with safe_open(path, framework="numpy") as file:
                ends = 8 * file.get_slice("keys").get_shape()[0]  # where the continuations of each context end
        except Exception as error:  # safetensors has errors of its own
            raise CorruptModelError(f"{path} can't be read: {error}") from None
        return Part(name, path.stat().st_size + ends, path.stat().st_size), False
    config, tensors = models.read_config(folder), _headers(folder)
    decoder = None
    if name in ("eagle", "eagle3", "block"):
        decoder = layer_config(folder, config.get("transformer_layer_config", config), parts)
    how = Kernels.find("auto", kernels, None, decoder.head_dim if decoder else 2)
    mlp = MlpConfig.from_json(folder, config) if name == "mlp" else None
    names = next((each for key, each in tensors.items() if key.split(".")[-1] in ("d2t", "token_map")), None)
    draft_size = parts.vocab_size if names is None else len(names)
    total, mapped = 8 * draft_size if names is not None else 0, 0
    for key, tensor in tensors.items():
        shape, step = tensor.shape, re.search(r"(emb|proj|ln|head)\.(\d+)\.", key)
        if mlp and step and mlp.stored(step[1], int(step[2])) != int(step[2]):
            continue  # of tied weights, another step's copy
        if key.split(".")[-1] in ("t2d", "d2t", "token_map") or (name == "eagle" and key.startswith("lm_head")):
            continue
        if re.search(r"(^|\.)(embed_tokens|emb\.\d+|markov)\.(weight|w1)$", key):
            mapped += tensor.nbytes
        elif len(shape) == 2:
            out, inputs = reversed(shape) if key == "markov.w2" else shape
            total += _linear(draft_size if out == parts.vocab_size else out, inputs, how.weights, how.path)
        else:
            total += 4 * tensor.numel()
    if decoder is None:
        return Part(name, total + mapped, mapped), False
    if name == "eagle" or "lm_head.weight" not in tensors:
        total += _linear(draft_size, decoder.hidden_size, how.weights, how.path)
    if used := "embed_tokens.weight" not in tensors:
        mapped += shared
    kv = _kv(decoder, "fp32" if how.weights == "fp32" else "bf16", how.path)
    return Part(name, total + mapped, mapped, kv, BLOCK, how.path is None, decoder.context_length), used


def _linear(outputs: int, inputs: int, form: str, path: str | None, bias: bool = False) -> int:
    """Return the bytes of a linear's weights, packed by the core where it has a ``path``."""
    if path is None:
        return (outputs * inputs + bias * outputs) * _WIDTHS[form]
    columns = _up(outputs, _COLUMNS)
    vectors = (form == "int8") + bias  # float32: the scales, the bias
    return columns * (_up(inputs, _DEPTH) * _WIDTHS[form] + 4 * vectors)


def _kv(config: DecoderConfig, form: str, path: str | None) -> int:
    """Return the bytes of a token's keys and values; the core fills up their features to whole blocks."""
    dim = config.head_dim if path is None else _up(config.head_dim, _COLUMNS)
    return 2 * config.layers * config.kv_heads * dim * _WIDTHS[form]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def render(plan: Plan) -> RenderableType:
    """Return a table for a terminal, with what it comes to below."""
    from rich.console import Group
    from rich.table import Table

    facts = plan.as_dict()
    at, longest, plain = facts["at_context"], facts["longest_context"], facts["longest_context_without_drafters"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "weights", "K/V of a token", f"K/V of {at['tokens']:,} tokens"):
        table.add_column(title, justify="right" if title else "left")
    for part in plan.parts:
        kept = (part.weights_bytes, part.kv_bytes_per_token, at["kv_bytes"][part.name])
        table.add_row(part.name, *(in_words(count) if count else "–" for count in kept))
    table.add_row("Python, torch", in_words(plan.base_bytes))
    together = f", {plan.batch_size} sequences at a time" if plan.batch_size > 1 else ""
    why = "the model's own" if longest == plan.context_length else f"the model's own is {plan.context_length:,}"
    fewer = f"{plain - longest:,} fewer than without drafters" if plain > longest else "as many as without drafters"
    own = ", all of this machine" if plan.of_machine else ""
    rows = {
        "in all": f"{in_words(at['total_bytes'])} with {at['tokens']:,} tokens{together}; "
        f"{in_words(at['total_bytes_without_drafters'])} without drafters",
        "memory": f"{in_words(plan.memory_bytes)}{own}{'' if at['fits'] else ': too little for that'}",
        "longest context": f"{longest:,} tokens, {fewer}; {why}",
    }
    if mapped := sum(part.mapped_bytes for part in plan.parts):
        rows["mapped"] = f"{in_words(mapped)} of the weights are pages of files, which the system may take back"
    below = Table.grid(padding=(0, 2))
    below.add_column(style="bold")
    below.add_column(overflow="fold")
    for name, value in rows.items():
        below.add_row(name, value)
    return Group(table, "", below)


def in_words(count: int) -> str:
    """Return a number of bytes as people read it, in powers of ten."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 100 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"
