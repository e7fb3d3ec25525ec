"""Drafters trained on a target's own states: what they take from the target, and how they are loaded and saved."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sakiyomi import models
from sakiyomi.costs import ModelCosts, measure_rows
from sakiyomi.distribution import Ids
from sakiyomi.drafters.layers import Layers
from sakiyomi.drafters.model import ends
from sakiyomi.drafters.tree import Choosing, Expand, grow
from sakiyomi.errors import CorruptModelError, OptionError
from sakiyomi.files import replace_file
from sakiyomi.interfaces import HEAD_INPUT, Costs, Draft, Drafter, GoOn, TargetSequence, always
from sakiyomi.sampling import SamplingParams
from sakiyomi.targets.decoder import DecoderConfig, Reader

DraftWeights = Literal["auto", "int8", "bf16", "fp32"]
_ROOM = 64  # tokens, at first, whose states have room
_READ = 256  # tokens that a drafter with layers of its own reads at once: what is further back changes few drafts
_WAITING = _READ + 64  # beyond, it begins anew with the last ones


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a trained drafter may use of its target, and has to fit.

    ``embedding``, ``head``: [vocab_size, hidden_size]; ``norm``: [hidden_size], the weight of the RMS norm before the
    head, None where it isn't known. ``layers``: how many decoder layers there are. ``tokenizer``: a text that tells its
    tokenizer from others. ``eos_ids``: tokens after which nothing is worth drafting.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    context_length: int
    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor | None = None
    norm_eps: float = 1e-5
    tokenizer: str | None = None
    eos_ids: frozenset[int] = frozenset()


def load_drafter(
    folder: str | os.PathLike[str],
    parts: TargetParts,
    *,
    weights: DraftWeights = "auto",
    kernels: str = "auto",
    device: torch.device | str | None = None,
) -> Drafter:
    """Load a drafter that was trained for a target, whatever its kind: config.json says.

    Known are EAGLE-3 (plain, and as speculators saves it), EAGLE-1/2, MLP speculators and Medusa heads in their
    published formats, and sakiyomi's own block drafters and tables. ``weights``: the format of linears, "auto" (int8
    where the compiled core runs), "int8", "bf16" or "fp32". ``kernels``: an instruction path, "auto" or "torch".
    ``device``: where it runs; None for where the target's embedding is.

    Raises ModelNotFoundError, CorruptModelError, UnsupportedModelError, also for pickles, or OptionError, also for a
    drafter that was made for another target.
    """
    folder = Path(folder)
    name, config = kind(folder), models.read_config(folder)
    if name == "table":
        from sakiyomi.drafters.table import Table, TableDrafter

        return TableDrafter(Table.load(folder / "table.safetensors", parts.tokenizer), vocab_size=parts.vocab_size)
    place = torch.device(device) if device is not None else parts.embedding.device
    if name == "mlp":
        from sakiyomi.drafters import mlp

        return mlp.load(folder, config, parts, weights=weights, kernels=kernels, device=place)
    if name == "medusa":
        from sakiyomi.drafters import medusa

        return medusa.load(folder, config, parts, weights=weights, kernels=kernels, device=place)
    if name == "block":
        from sakiyomi.drafters import block

        return block.load(folder, config, parts, weights=weights, kernels=kernels, device=place)
    from sakiyomi.drafters import eagle

    return eagle.load(folder, config, parts, weights=weights, kernels=kernels, device=place)


def kind(folder: str | os.PathLike[str]) -> str:
    """Return the name of the drafter in a folder, of those that :func:`load_drafter` loads.

    Raises ModelNotFoundError, CorruptModelError or UnsupportedModelError.
    """
    folder = Path(folder)
    config = models.read_config(folder)
    found = config.get("model_type")
    if not isinstance(found, str | None):
        raise CorruptModelError(f"{folder}: model_type {found!r} must be a text")
    if found in _OWN:
        return _OWN[found]
    if "medusa_num_heads" in config:
        return "medusa"
    from sakiyomi.drafters import eagle

    return "eagle3" if eagle.is_third(folder, config, models.open_weights(folder)) else "eagle"


_OWN = {"sakiyomi-table": "table", "sakiyomi-block": "block", "mlp_speculator": "mlp", "medusa": "medusa"}


def layer_config(folder: Path, config: Mapping[str, Any], parts: TargetParts) -> DecoderConfig:
    """Return the dimensions of a drafter's layers from a configuration in Hugging Face layout.

    What it leaves out is as in a llama, as long and with as many tokens as the target. Raises UnsupportedModelError,
    CorruptModelError, or OptionError where the target has another vocabulary.
    """
    given = {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-6, **config}
    for name, value in (
        ("max_position_embeddings", parts.context_length),
        ("vocab_size", parts.vocab_size),
        ("hidden_size", parts.hidden_size),
    ):
        if given.get(name) is None:
            given[name] = value
    found = DecoderConfig.from_huggingface(given)
    check_fit(folder, "vocab_size", found.vocab_size, parts.vocab_size)
    return found


def whole(folder: Path, config: Mapping[str, Any], *names: str, default: int | None = None, least: int = 1) -> int:
    """Return the number that a drafter's config.json has under one of these names. Raises CorruptModelError."""
    for name in names:
        if (value := config.get(name)) is not None:
            if type(value) is not int or value < least:
                raise CorruptModelError(f"{folder}: {name} {value!r} must be a whole number of at least {least}")
            return value
    if default is None:
        raise CorruptModelError(f"{folder}: config.json lacks {names[0]!r}")
    return default


def check_fit(folder: Path, what: str, drafter: object, target: int) -> None:
    """Raise OptionError where a drafter was made for another ``what`` than the target has.

    CorruptModelError where what it was made for is no number.
    """
    if type(drafter) is not int:
        raise CorruptModelError(f"{folder}: {what} {drafter!r} must be a whole number")
    if drafter != target:
        raise OptionError(f"{folder}: the drafter was made for a target of {what} {drafter}, this one has {target}")


def hidden_layer_ids(folder: Path, given: object, parts: TargetParts) -> tuple[int, ...]:
    """Return the target's layers whose states a drafter reads: those given, or EAGLE-3's usual three.

    Raises CorruptModelError for what are no layer ids, OptionError for layers that the target lacks.
    """
    count = parts.layers
    layers = (2, count // 2, count - 3) if given is None else given
    if not isinstance(layers, list | tuple) or not layers or not all(type(each) is int for each in layers):
        raise CorruptModelError(f"{folder}: layers {layers!r} to read states of must be a list of whole numbers")
    if not all(0 <= each <= count for each in layers):
        raise OptionError(
            f"{folder}: the drafter was made for a target with layers {list(layers)}, this one has 0..{count}"
        )
    return tuple(layers)


def draft_vocabulary(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], vocab_size: int
) -> tuple[int, Ids | None]:
    """Return how many tokens a drafter can name, and which: int64, None for all of the target's.

    Target id = i + ``d2t[i]``. Raises CorruptModelError.
    """
    size = config.get("draft_vocab_size")
    size = vocab_size if size is None else size
    if type(size) is not int or not 1 <= size <= vocab_size:
        raise CorruptModelError(f"{folder}: draft_vocab_size {size!r} must be in 1..{vocab_size}")
    if "d2t" not in weights:
        if size != vocab_size:
            raise CorruptModelError(f"{folder}: the weights lack 'd2t', which a reduced draft vocabulary needs")
        return size, None
    names = draft_names(f"{folder}: 'd2t'", weights["d2t"], vocab_size, size)
    return size, None if size == vocab_size and (names == np.arange(size)).all() else names


def draft_names(
    what: str, given: torch.Tensor, vocab_size: int, size: int | None = None, *, offsets: bool = True
) -> Ids:
    """Return the target's tokens that a drafter's are: int64 [size], i + given[i], or given[i] without ``offsets``.

    ``size``: how many there must be, None for any number. ``what`` they are is for messages. Raises CorruptModelError.
    """
    integral = given.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if given.dim() != 1 or not integral or not len(given) or size not in (None, len(given)):
        raise CorruptModelError(
            f"{what} is {given.dtype} {list(given.shape)}, must be whole numbers [{size or 'any number'}]"
        )
    names: Ids = given.to("cpu", torch.int64).numpy()
    if offsets:
        names = names + np.arange(len(given))
    if names.min() < 0 or names.max() >= vocab_size or np.unique(names).size < len(names):
        raise CorruptModelError(f"{what} must lead to different tokens in 0..{vocab_size - 1}")
    return names


def head(folder: Path, read: Reader, size: int, names: Ids | None, hidden: int, parts: TargetParts) -> torch.Tensor:
    """Return a drafter's head [size, hidden]: its own, or where it has none, those rows of the target's.

    Raises CorruptModelError.
    """
    if "lm_head.weight" in read:
        return read.table("lm_head.weight", size, hidden)
    if hidden != parts.hidden_size:
        raise CorruptModelError(f"{folder}: the weights lack 'lm_head.weight', and the target's head doesn't fit")
    return parts.head if names is None else parts.head[torch.from_numpy(names)]


class Embedding:
    """Token embeddings: float32 [tokens, hidden_size] on a device."""

    def __init__(self, table: torch.Tensor, device: torch.device) -> None:
        self._table = table.detach().to(device)
        self.size = table.shape[1]

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the embeddings of tokens."""
        return self._table.index_select(0, torch.tensor(tokens, device=self._table.device)).float()


class States:
    """The target's states of tokens that a drafter hasn't computed yet, the layers' side by side.

    Copied into one place that grows: what is given may be a view of all rows of a forward, and small pieces of memory
    that are kept from round to round take 2 % of the target's speed, whose own then find no place of their size.
    """

    def __init__(self) -> None:
        self._held: torch.Tensor | None = None  # [room, layers * hidden_size]
        self._array: npt.NDArray[np.float32] | None = None  # the same, where numpy can write it
        self._first = 0
        self.count = 0

    def add(self, hidden: Sequence[torch.Tensor]) -> None:
        """Take the states of the tokens that follow: one [tokens, hidden_size] for each layer."""
        count = hidden[0].shape[0]
        if not count:
            return
        held = self._held
        if held is None or self._first + self.count + count > held.shape[0]:
            width = sum(each.shape[1] for each in hidden)
            with torch.inference_mode(False):  # it is written inside and outside of that mode
                first = hidden[0]  # layers may be on several devices
                more = torch.empty(max(_ROOM, 2 * (self.count + count)), width, dtype=first.dtype, device=first.device)
            if held is not None and self.count:
                more[: self.count] = held[self._first : self._first + self.count]
            self._held, self._first, held = more, 0, more
            plain = all(each.device.type == "cpu" and each.dtype is torch.float32 for each in hidden)
            self._array = more.numpy() if plain else None
        start, column = self._first + self.count, 0
        end = start + count
        for each in hidden:
            width = each.shape[1]
            if self._array is not None:  # a fraction of the time of torch's slices and copies
                self._array[start:end, column : column + width] = each.numpy()
            else:
                held[start:end, column : column + width] = each
            column += width
        self.count += count

    def first(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the first states, float32 [count, layers * hidden_size]; they stay, and may be where others come."""
        assert self._held is not None
        return self._held[self._first : self._first + count].to(device, torch.float32)

    def drop(self, count: int) -> None:
        """Forget the first states."""
        self.count -= count
        self._first = self._first + count if self.count else 0
        if not self.count and self._held is not None and self._held.shape[0] > 4 * _ROOM:
            self._held = self._array = None  # what a prompt took


class StateModel(Protocol):
    """A model with layers that read a target's states. ``names``: the head's tokens, None for all of the target's."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose states it reads."""

    @property
    def context_length(self) -> int:
        """Most rows that it computes drafts from."""

    @property
    def layers(self) -> Layers:
        """Its layers."""

    @property
    def names(self) -> Ids | None:
        """The target's tokens that its head's rows stand for, None for all."""


class TreeDrafter:
    """What drafters have in common that draft trees from a target's states.

    ``names``: the target's tokens that a head's rows stand for, None for all. ``width``: how many tokens of each level
    of a draft go on, and how many may follow each. ``max_nodes``: tokens in a draft; ``deepest``: in a row. Nothing is
    drafted after ``eos_ids`` and a request's ``stop_token_ids``. Raises OptionError.
    """

    samples = False
    prefixes: bool | None = True

    def __init__(
        self,
        name: str,
        hidden_layers: tuple[int, ...],
        names: Ids | None,
        *,
        width: int,
        max_nodes: int,
        eos_ids: Collection[int],
        deepest: int | None = None,
    ) -> None:
        for option, value in (("width", width), ("max_nodes", max_nodes)):
            if type(value) is not int or value < 1:
                raise OptionError(f"{option}={value!r}: must be a whole number of at least 1")
        self.name, self.hidden_layers, self.names = name, hidden_layers, names
        self.width, self.max_nodes, self.eos_ids = width, max_nodes, frozenset(eos_ids)
        self.deepest = min(max_nodes, deepest or max_nodes)


class TreeSession:
    """Such a drafter beside one sequence."""

    def __init__(self, drafter: TreeDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        self._ids = list(prompt)
        self._ends = ends(params, drafter.eos_ids)
        self._choose = Choosing(drafter.names, params, sampled, drafter.width)
        self._grow = partial(grow, drafter.name, width=drafter.width, max_nodes=drafter.max_nodes, ends=self._ends)

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained."""
        self._ids.extend(tokens)


class LastStateDrafter(TreeDrafter):
    """What drafters have in common that read only what the target's head read last.

    ``costs``: of a level of a draft; measured here if left out.
    """

    def __init__(
        self,
        name: str,
        names: Ids | None,
        *,
        width: int,
        max_nodes: int,
        eos_ids: Collection[int],
        deepest: int,
        costs: Costs | None,
    ) -> None:
        super().__init__(name, (HEAD_INPUT,), names, width=width, max_nodes=max_nodes, eos_ids=eos_ids, deepest=deepest)
        self.costs: Costs = costs or ModelCosts(measure_rows(self._run, (1, 2, 4, 8), seconds=0.03))

    def _run(self, rows: int) -> None:
        """Compute a level of so many rows, and choose."""
        raise NotImplementedError


class LastStateSession(TreeSession):
    """Such a drafter beside one sequence: a state, and how many came before it."""

    unread = 0  # there is nothing to catch up with

    def __init__(self, drafter: LastStateDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        super().__init__(drafter, prompt, params, sampled)
        self._drafter = drafter
        self._last: torch.Tensor | None = None  # float32 [1, hidden_size]
        self._count = 0

    def read(self, hidden: Sequence[torch.Tensor]) -> None:
        """Take the states of the tokens that follow: one tensor, [tokens, hidden_size]."""
        (states,) = hidden
        self._count += len(states)
        if len(states):
            self._last = states[-1:].to(torch.float32, copy=True)  # a view would keep all of them in memory

    @torch.inference_mode()
    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return a tree of what may follow; nothing where the state of the last token but one isn't known."""
        drafter = self._drafter
        if self._last is None or self._count != len(self._ids) - 1 or budget < 1:
            return Draft(drafter=drafter.name)
        return self._grow(self._begin(self._last), budget=min(budget, drafter.deepest), go_on=go_on)

    def _begin(self, state: torch.Tensor) -> Expand:
        """Return what a draft grows by."""
        raise NotImplementedError


class StateDrafter(TreeDrafter):
    """What drafters have in common whose layers keep keys and values of the target's states.

    ``costs``: of its forwards; measured here if left out.
    """

    def __init__(
        self,
        name: str,
        model: StateModel,
        *,
        width: int,
        max_nodes: int,
        eos_ids: Collection[int],
        costs: Costs | None,
        deepest: int | None = None,
    ) -> None:
        super().__init__(
            name,
            model.hidden_layers,
            model.names,
            width=width,
            max_nodes=max_nodes,
            eos_ids=eos_ids,
            deepest=deepest,
        )
        self.context_length = model.context_length
        self.new_memory = model.layers.new_sequence
        self.costs: Costs = costs or ModelCosts(measure_rows(self._run))

    def _run(self, rows: int) -> None:
        """Compute so many rows, and choose as for one level of a draft."""
        raise NotImplementedError


class StateSession(TreeSession):
    """Such a drafter beside one sequence: keys and values of rows made of the target's own states.

    It begins anew where its context is full, at multiples of its length; but where many states aren't read yet (a long
    prompt, many rounds in which no draft was wanted) with the last of these.
    """

    def __init__(self, drafter: StateDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        super().__init__(drafter, prompt, params, sampled)
        self._drafter = drafter
        self._states = States()
        self._memory = drafter.new_memory()
        self._held = 0  # tokens that are read for good
        self._skipped = 0  # of these, the first ones, which aren't in memory
        self._few = max(1, min(_READ, drafter.context_length // 2))
        self._most = max(1, min(_WAITING, drafter.context_length - 1))

    @property
    def unread(self) -> int:
        """Rows to compute before the next draft; 0 where nothing will be drafted."""
        return min(len(self._ids) - 1 - self._held, self._most)

    def read(self, hidden: Sequence[torch.Tensor]) -> None:
        """Take the states of the tokens that follow; they are computed when the next draft begins."""
        states, count = self._states, hidden[0].shape[0]
        waiting = states.count + count
        total, room = self._held + waiting, self._drafter.context_length
        full = total - self._skipped >= room  # there is a token after the last state
        if waiting > self._most or full:
            if waiting >= self._few:
                begin = total - self._few
            else:  # at the same places, whatever pieces the states come in
                every = max(1, room - 1)
                begin = max((total - 1) // every * every, self._held)
            kept = total - begin
            states.drop(states.count - max(0, kept - count))
            hidden = [each[max(0, count - kept) :] for each in hidden]
            self._held = self._skipped = begin
            self._memory.truncate(0)
        states.add(hidden)

    @torch.inference_mode()
    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return a tree of what may follow; nothing before the target's states are there."""
        drafter, length = self._drafter, len(self._ids)
        room = drafter.context_length - (length - self._skipped)
        if budget < 1 or length < 2 or room < 0 or self._held + self._states.count < length - 1:
            return Draft(drafter=drafter.name)
        budget = min(budget, drafter.deepest, room + 1)
        try:
            return self._grow(self._begin(self._memory, budget), budget=budget, go_on=go_on)
        finally:
            self._memory.truncate(self._held - self._skipped)

    def _begin(self, memory: TargetSequence, budget: int) -> Expand:
        """Compute what is missing of the rows that stay, and return what a draft of ``budget`` in a row grows by."""
        raise NotImplementedError


def save_eagle3(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    layer_config: Mapping[str, Any],
    verifier: str,
    verifier_architectures: Sequence[str] = ("LlamaForCausalLM",),
    hidden_layers: Sequence[int],
    draft_ids: Sequence[int] | None = None,
    norm_before_residual: bool = True,
    num_speculative_tokens: int = 3,
) -> None:
    """Write an EAGLE-3 drafter in the format of speculators 0.9, which vLLM loads too.

    ``tensors``: fc.weight [H, layers * H]; layers.0.* (input_layernorm, hidden_norm, post_attention_layernorm,
    self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj); norm.weight; lm_head.weight [D, H]; perhaps embed_tokens.weight.
    Without lm_head.weight the head is the target's own; vLLM can't load that.
    ``layer_config``: a complete llama or qwen3 configuration, with the target's vocab_size. ``verifier``: the target's
    hub id; vLLM takes no local path. ``draft_ids``: the D target tokens that the head's rows stand for, ascending; None
    for all, in their order. Raises OptionError for what doesn't fit or can't be written.
    """
    vocab_size = layer_config["vocab_size"]
    contents = _with_vocabulary(tensors, draft_ids, vocab_size)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(verifier_architectures)},
        },
        "transformer_layer_config": dict(layer_config),
        "draft_vocab_size": vocab_size if draft_ids is None else len(draft_ids),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(hidden_layers),
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    write_folder(Path(folder), config, contents)


def save_block(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    layer_config: Mapping[str, Any],
    verifier: str,
    hidden_layers: Sequence[int],
    block_size: int,
    draft_ids: Sequence[int] | None = None,
    confidence_temperatures: Sequence[float] | None = None,
) -> None:
    """Write a block drafter; see :mod:`sakiyomi.drafters.block` for ``tensors``.

    ``layer_config``: a complete llama or qwen3 configuration, with the target's vocab_size. ``verifier``: the target's
    name. ``block_size``: the most tokens in a draft. ``draft_ids``: the D target tokens that the head's rows stand for,
    ascending; None for all, in their order. ``confidence_temperatures``: for each position of the block.
    Raises OptionError for what doesn't fit or can't be written.
    """
    vocab_size = layer_config["vocab_size"]
    contents = _with_vocabulary(tensors, draft_ids, vocab_size)
    config = {
        "model_type": "sakiyomi-block",
        "version": 1,
        "verifier": verifier,
        "transformer_layer_config": dict(layer_config),
        "draft_vocab_size": vocab_size if draft_ids is None else len(draft_ids),
        "hidden_layers": list(hidden_layers),
        "block_size": block_size,
        "confidence_temperatures": None if confidence_temperatures is None else list(confidence_temperatures),
    }
    write_folder(Path(folder), config, contents)


def _with_vocabulary(
    tensors: Mapping[str, torch.Tensor], draft_ids: Sequence[int] | None, vocab_size: int
) -> dict[str, torch.Tensor]:
    """Return tensors with d2t, int64 [D], and t2d, bool [vocab_size], where the vocabulary is reduced."""
    contents = dict(tensors)
    size = vocab_size if draft_ids is None else len(draft_ids)
    if "lm_head.weight" in tensors and (rows := tensors["lm_head.weight"].shape[0]) != size:
        raise OptionError(f"draft_ids: {size} tokens for a head of {rows} rows; name the token of each row")
    if draft_ids is None:
        return contents
    ids = torch.as_tensor(draft_ids, dtype=torch.int64)
    if (ids[1:] <= ids[:-1]).any() or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise OptionError(f"draft_ids: must be different tokens in 0..{vocab_size - 1}, ascending")
    contents["d2t"] = ids - torch.arange(size)
    contents["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return contents


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write model.safetensors, then config.json, each whole or not at all. Raises OptionError."""
    from safetensors.torch import save_file

    contents = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(config, indent=1) + "\n"

    def write_weights(path: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(contents, path, metadata={"format": "pt"})
        (folder / "config.json").unlink(missing_ok=True)  # which is of other weights, should this be the end

    replace_file(folder / "model.safetensors", write_weights)
    replace_file(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))
