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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from sakiyomi import drafters, loading, models, targets
from sakiyomi.drafters.layers import Kernels
from sakiyomi.drafters.mlp import MlpConfig
from sakiyomi.drafters.trained import TargetParts, layer_config
from sakiyomi.errors import CorruptModelError, OptionError, UnsupportedModelError
from sakiyomi.memory import in_words, machine_memory, parse_memory
from sakiyomi.targets.attention import KEY_BLOCKS, invariant_key_block, kernel
from sakiyomi.targets.cache import BLOCK
from sakiyomi.targets.decoder import DecoderConfig, LayerNames, Reader, Stack
from sakiyomi.targets.linear import native_bf16

if TYPE_CHECKING:
    from rich.console import RenderableType

BASE_BYTES = 300_000_000  # measured on Linux with the default model: Python, torch, tokenizer and working memory
MODULE_BASE_BYTES = 450_000_000  # the same with transformers
Tensors = Mapping[str, torch.Tensor]  # without data: on torch's device "meta"
_COLUMNS, _DEPTH = 32, 64  # the core packs so many outputs and inputs together (csrc/kernels.h: BLOCK, DEPTH)
_WIDTHS = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Part:
    """The target, or a drafter. ``weights_bytes``: memory of its weights, ``mapped_bytes`` of them in a file's pages.

    ``kv_bytes_per_token``: of keys and values of one sequence; there is room for whole blocks of ``kv_block`` tokens.
    ``growing_bytes_per_token``: of these, how many are copied at once to memory that is a quarter larger; 0 on the
    core, which adds pages. ``context_length``: most tokens that it keeps them of.
    """

    name: str
    weights_bytes: int = 0
    mapped_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_block: int = BLOCK
    growing_bytes_per_token: int = 0
    context_length: int | None = None

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes allocated for keys and values of one sequence of so many tokens."""
        return self._capacities(tokens)[1] * self.kv_bytes_per_token

    def growing_bytes(self, tokens: int) -> int:
        """Return the most bytes that one sequence takes besides, for a moment: what was copied isn't freed yet."""
        return self._capacities(tokens)[0] * self.growing_bytes_per_token

    def _capacities(self, tokens: int) -> tuple[int, int]:
        """Return the tokens that there was room for before memory last grew, and those that there is room for."""
        tokens = min(tokens, self.context_length or tokens)
        if not self.growing_bytes_per_token:
            return 0, _up(tokens, self.kv_block)
        before = capacity = 0
        while capacity < tokens:  # as in targets.cache, which gets a few tokens at a time
            before, capacity = capacity, _up(max(capacity + 1, capacity * 5 // 4), self.kv_block)
        return before, capacity


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
        """Return the most that ``batch_size`` sequences of so many tokens take in all, with drafters or without."""
        parts = self.parts if speculating else self.parts[:1]
        kv = sum(part.kv_bytes(tokens) for part in parts)
        growing = max(part.growing_bytes(tokens) for part in parts)  # one sequence after the other
        return self.base_bytes + sum(part.weights_bytes for part in parts) + self.batch_size * kv + growing

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
                "growing_bytes": max(part.growing_bytes(shown) for part in self.parts),
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

    ``memory``: see :func:`~sakiyomi.memory.parse_memory`; None for all of this machine's. ``context``: a length of
    sequences, in tokens, to tell the memory of. A known model or a GGUF file is fetched or converted as for any other
    command; of a hub model that isn't in the hub's cache the configuration and the weights' headers are fetched alone.
    Left out are tables of rotary angles, and what loading takes for a while: a module of transformers that is packed
    holds its own weights until that is done.
    Raises ModelError; OptionError also for memory that the weights don't fit into.
    """
    if dtype not in loading.DTYPES:
        raise OptionError(f"dtype={dtype!r}: must be one of {', '.join(loading.DTYPES)}")
    targets.resolve(kernels, weights)
    available = machine_memory() if memory is None else parse_memory(memory)
    if type(batch_size) is not int or batch_size < 1:
        raise OptionError(f"batch_size={batch_size!r}: must be a whole number from 1 on, the sequences at a time")
    heads = loading.trained_for(model, trained)
    names = drafters.parse(drafter, [*heads, *([drafters.MODEL] if draft_model is not None else [])])
    for name, folder in loading.by_name(trained).items():
        if names and name not in names:
            raise OptionError(f"trained={str(folder)!r}: drafter={drafter!r} goes without; add +{name} to it")
    if draft_model is not None and drafters.MODEL not in names:
        raise OptionError(
            f"draft_model={os.fspath(draft_model)!r}: drafter={drafter!r} goes without; add +{drafters.MODEL} to it"
        )
    target, parts, of_module = _model("target", model, dtype, weights, kernels, progress)
    limit = parts.context_length
    if context is not None and (type(context) is not int or not 1 <= context <= limit):
        raise OptionError(f"context={context!r}: must be a whole number in 1..{limit}, the model's own context length")
    found = [target]
    # The target's embeddings, where it doesn't need its file's: those of a module are in memory with it.
    shared = 0 if of_module or target.mapped_bytes else parts.embedding.nbytes
    for name in names:
        if name == drafters.MODEL and draft_model is not None:
            small = loading.default_draft_weights(kernels)
            part, _, also_module = _model(name, draft_model, dtype, small, kernels, progress, draft=True)
            of_module = of_module or also_module
        elif name in heads:
            part, used = _trained(name, heads[name], parts, kernels, shared)
            shared = 0 if used else shared  # the file's pages are in memory once
        else:
            part = Part(name)
        found.append(part)
    base = MODULE_BASE_BYTES if of_module else BASE_BYTES
    plan = Plan(os.fspath(model), tuple(found), available, base, limit, batch_size, context, memory is None)
    if not plan.longest(speculating=False):
        given = "memory: this machine's" if memory is None else f"memory={memory!r}:"
        needed = _up(plan.total_bytes(1, speculating=False), 10**6) // 10**6
        raise OptionError(
            f"{given} {in_words(available)} are too little for {plan.model}, whose weights take "
            f"{in_words(target.weights_bytes)}: {needed}MB would do"
        )
    return plan


def _model(
    name: str,
    model: str | os.PathLike[str],
    dtype: str,
    weights: str,
    kernels: str,
    progress: bool,
    *,
    draft: bool = False,
) -> tuple[Part, TargetParts, bool]:
    """Return a model as a part, what drafters trained for it may use, and whether it runs through transformers.

    As LoadedModel.load does.
    """
    folder, tensors = models.resolve_headers(model, progress=progress)
    config = models.read_config(folder)
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{folder} is an encoder-decoder model; plan knows of decoders alone")
    if (decoder := loading._native(config)) is not None:
        return *_decoder(name, decoder, tensors, dtype, weights, targets.resolve(kernels, weights)), False
    known = ("auto", weights if draft else "auto")  # a draft model's weights are whatever goes
    for option, value, allowed in (("weights", weights, known), ("kernels", kernels, ("auto", "torch"))):
        if value not in allowed:
            raise OptionError(f"{option}={value!r}: this model runs through its transformers module; 'auto' is that")
    from sakiyomi.targets.module_size import module_size

    size = module_size(folder, config, tensors, dtype)
    part = Part(
        name,
        size.weights_bytes,
        kv_bytes_per_token=size.kv_bytes_per_token,
        kv_block=size.kv_block,
        growing_bytes_per_token=size.growing_bytes_per_token,
        context_length=size.context_length,
    )
    width, limit = size.embedding.shape[1], size.context_length
    return part, TargetParts(size.vocab_size, width, size.layers, limit, size.embedding, size.head), True


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
    kv = _kv(config, plain, path)
    growing = kv if path is None else 0
    part = Part(name, total + mapped, mapped, kv, block, growing, config.context_length)
    head = table if config.tied else read.table("lm_head.weight", *size)
    return part, TargetParts(*size, config.layers, config.context_length, table, head)


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
    config, tensors = models.read_config(folder), models.headers(folder)
    decoder = None
    if name in ("eagle", "eagle3", "block"):
        decoder = layer_config(folder, config.get("transformer_layer_config", config), parts)
    how = Kernels.find("auto", kernels, None, decoder.head_dim if decoder else 2)
    mlp = MlpConfig.from_json(folder, config) if name == "mlp" else None
    names = next((each for key, each in tensors.items() if key.split(".")[-1] in ("d2t", "token_map")), None)
    draft_size = parts.vocab_size if names is None else len(names)
    total, mapped = 8 * draft_size if names is not None else 0, 0
    embeddings = tensors.get("embed_tokens.weight", parts.embedding)
    # The core reads EAGLE-3's token embeddings itself, and no fp16: these become bf16 in memory.
    copied = name == "eagle3" and how.path is not None and embeddings.dtype is torch.float16
    for key, tensor in tensors.items():
        shape, step = tensor.shape, re.search(r"(emb|proj|ln|head)\.(\d+)\.", key)
        if mlp and step and mlp.stored(step[1], int(step[2])) != int(step[2]):
            continue  # of tied weights, another step's copy
        if key.split(".")[-1] in ("t2d", "d2t", "token_map") or (name == "eagle" and key.startswith("lm_head")):
            continue
        if re.search(r"(^|\.)(embed_tokens|emb\.\d+|markov)\.(weight|w1)$", key):
            mapped += 0 if copied else tensor.nbytes
        elif len(shape) == 2:
            out, inputs = reversed(shape) if key == "markov.w2" else shape
            total += _linear(draft_size if out == parts.vocab_size else out, inputs, how.weights, how.path)
        else:
            total += 4 * tensor.numel()
    if decoder is None:
        return Part(name, total + mapped, mapped), False
    if name == "eagle" or "lm_head.weight" not in tensors:
        total += _linear(draft_size, decoder.hidden_size, how.weights, how.path)
    used = "embed_tokens.weight" not in tensors and not copied
    total += 2 * embeddings.numel() if copied else 0
    mapped += shared if used else 0
    kv = _kv(decoder, "fp32" if how.weights == "fp32" else "bf16", how.path)
    growing = kv if how.path is None else 0
    return Part(name, total + mapped, mapped, kv, BLOCK, growing, decoder.context_length), used


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
        "growing": f"{in_words(at['growing_bytes'])} of that for a moment, while K/V are copied to grow",
        "memory": f"{in_words(plan.memory_bytes)}{own}{'' if at['fits'] else ': too little for that'}",
        "longest context": f"{longest:,} tokens, {fewer}; {why}",
    }
    if not at["growing_bytes"]:
        del rows["growing"]
    if mapped := sum(part.mapped_bytes for part in plan.parts):
        rows["mapped"] = f"{in_words(mapped)} of the weights are pages of files, which the system may take back"
    below = Table.grid(padding=(0, 2))
    below.add_column(style="bold")
    below.add_column(overflow="fold")
    for name, value in rows.items():
        below.add_row(name, value)
    return Group(table, "", below)
