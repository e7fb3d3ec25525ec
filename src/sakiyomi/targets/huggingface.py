"""Decoders of any architecture, run by the modules that transformers has for them.

The module that is given is never changed. A structural clone, which shares its weights, is made to run the rows of
many sequences, chains and trees, in one call: they lie beside each other as if they were one text, with positions of
their own, and an attention function of ours has each row see what its sequence holds. Which keys a layer sees is asked
of the model itself, once, when it is loaded: its mask is compared with those that we know.

On a CPU what makes rows exact is put into the clone too, as in :mod:`sakiyomi.targets.pytorch`: packed linears,
attention in tiles, activations in pieces.

A model that this doesn't suit, as with attention biased by position, runs sequence by sequence, path by path, with
masks of its own.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sakiyomi.errors import CorruptModelError, OptionError, UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Exactness, TargetOutput, TargetSequence, Work
from sakiyomi.targets.attention import (
    KEY_BLOCKS,
    TILE,
    Kernel,
    Layout,
    Part,
    Reach,
    invariant_key_block,
    kernel,
    positions,
)
from sakiyomi.targets.cache import BLOCK, KeyValues
from sakiyomi.targets.decoder import check_capacity, rows_are_invariant
from sakiyomi.targets.linear import MAX_ROWS, Linear, native_bf16, padded_rows, set_row_limit
from sakiyomi.targets.pytorch import in_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sakiyomi.targets.module_cache import ModuleCache

_OURS, _PROBE = "sakiyomi", "sakiyomi_probe"  # names of attention functions in transformers
_LAYER = "_sakiyomi_layer"  # the attribute of an attention module that says where it is
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")  # layers with keys and values
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_CHECKED = 24  # tokens of the comparison at load
_UNKNOWN_CONTEXT = 2048  # for a model that doesn't say; more may be asked for
_ACCELERATOR_ROWS = 512
_LONGEST = 400  # characters of an error that is not ours
_SMALL = 1 << 16  # elements of a buffer that is copied and not shared
_KEY_ALIGNMENT = 16  # keys are padded to a multiple of it where tiles aren't used: fused kernels want aligned masks

_padded_rows = cache(padded_rows)


class HuggingFaceTarget:
    """A decoder of transformers as a target.

    ``model``: any decoder-only ``PreTrainedModel`` with a language model head, on any device or devices. It isn't
    changed, and may be used beside the target. On a CPU the weights of its linears are in memory a second time, packed;
    if nobody else holds the module, they are held once. ``context_length`` may lower the model's own.

    The module's weights must not change while the target is in use: packed linears are copies, which nobody would
    bring up to date. Its hooks run as they are. A target serves one thread at a time.

    Raises UnsupportedModelError for what can't be rolled back or isn't a decoder, and for a model whose rows can't be
    computed in pieces; OptionError for a context that the model doesn't have.
    """

    kernels = "module"

    def __init__(self, model: PreTrainedModel, context_length: int | None = None) -> None:
        self.architecture = str(model.config.model_type)
        _refuse(model)
        limit, reason = _context_limit(model.config.get_text_config())
        if context_length is not None and not 2 <= context_length <= (limit or context_length):
            raise OptionError(f"context_length={context_length}: must be in 2..{limit or 'any'} for this model{reason}")
        self.context_length = context_length or limit or _UNKNOWN_CONTEXT
        self.dtype = model.dtype
        self.weight_format = weight_format(model)
        embedding = cast("nn.Embedding", model.get_input_embeddings())
        self.device, self._embeddings = embedding.weight.device, embedding.weight.shape[0]
        if self.device.type == "meta":
            raise UnsupportedModelError(
                f"architecture {self.architecture!r}: its embedding is offloaded, and has to be on a device"
            )
        self._threads = torch.get_num_threads()
        with torch.inference_mode():
            self._runner = self._find_runner(model)
            # Kernels of quantised weights are others', and what rows they choose by isn't known.
            known = getattr(model.config, "quantization_config", None) is None
            self._exact = known and self._runner.can_be_exact and self._runner.rows_are_invariant(self)

    def _find_runner(self, model: PreTrainedModel) -> _Runner:
        """Return the first way of running the model that gives what the model gives."""
        count = min(_CHECKED, self.context_length)
        ids = torch.randint(self._embeddings, (1, count), generator=torch.Generator().manual_seed(0))
        try:
            clone = _structural_clone(model)
            expected = clone(ids.to(self.device), use_cache=False).logits[0]
            shorter = clone(ids[:, : count // 2].to(self.device), use_cache=False).logits[0]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a module may be anything; one that was pruned, say, can't be copied
            raise UnsupportedModelError(
                f"architecture {self.architecture!r}: copied and run as it is, it fails: {_one_line(error)}"
            ) from error
        self.vocab_size = int(expected.shape[-1])
        precise = self.dtype is torch.float32
        reason = "its rows see the tokens that follow them, as in an encoder"
        linears: list[Linear] = []
        # One by one too packed linears are used, which few rows are faster with though they make nothing exact.
        # Where it isn't like that, modules that don't take to packed linears are left with their own.
        for swap in (True, False) if same_logits(shorter, expected[: count // 2], precise) else ():
            if not swap and not linears:
                break
            clone = _structural_clone(model)
            names = [(config, config._attn_implementation) for config in _configs(clone)]
            linears = _swap(clone) if swap and _is_on_cpu(clone) else []
            for kind in (_Packed, _OneByOne):
                for config, name in names:
                    config._attn_implementation = name
                try:
                    runner = kind(clone, linears, self.device)
                    if self._is_right(runner, ids[0].tolist(), expected):
                        return runner
                    reason = "computed in pieces it gives other logits than in one call"
                except (MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # whatever a module of unknown make finds wrong
                    reason = _one_line(error)
        raise UnsupportedModelError(f"architecture {self.architecture!r} is not supported: {reason}")

    def _is_right(self, runner: _Runner, ids: list[int], expected: torch.Tensor) -> bool:
        """Tell whether a text in two pieces, with rows rolled back between them, has the logits of one call.

        Each piece has to: in 16 bits errors of a few rows are overlooked, and it's the second that shows whether
        positions, and the keys of rows before, are right.
        """
        sequence, cut = runner.new_sequence(), len(ids) * 5 // 8
        for start, end in ((0, cut), (cut, len(ids))):
            (output,) = runner.forward([Work(sequence, ids[start:end], None, end - start)], ())
            if not same_logits(output.logits, expected[start:end], self.dtype is torch.float32):
                return False
            if end == cut:
                runner.forward([Work(sequence, ids[: len(ids) - cut][:2], None, 0)], ())
                sequence.truncate(cut)
        return True

    @property
    def layers(self) -> int:
        """How many layers there are whose hidden states can be had."""
        return len(self._runner.layers)

    @property
    def embedding(self) -> torch.Tensor:
        """The embeddings of the vocabulary: [vocab_size or more, hidden_size], the module's own."""
        weight: torch.Tensor = self._runner.clone.get_input_embeddings().weight
        return weight.detach()

    @property
    def mode(self) -> Literal["packed", "one by one"]:
        """``packed`` if the rows of all sequences are computed in one call, ``one by one`` if path after path is."""
        return self._runner.mode

    @property
    def exactness(self) -> Exactness:
        """``bit-exact`` if rows were found to be invariant at load, with as many threads as torch uses now."""
        return "bit-exact" if self._exact and self._threads == torch.get_num_threads() else "numerics"

    @property
    def max_rows(self) -> int:
        """Most rows per sequence that one forward should be given."""
        return MAX_ROWS if self.device.type == "cpu" else _ACCELERATOR_ROWS

    @property
    @torch.inference_mode()
    def hidden_layers(self) -> frozenset[int]:
        """The layers whose states a forward can give, found by a look at one when this is first asked."""
        return frozenset(self._runner.givers)

    def new_sequence(self) -> TargetSequence:
        """Return an empty sequence."""
        return cast("TargetSequence", self._runner.new_sequence())

    @torch.inference_mode()
    def forward(self, work: Sequence[Work], *, hidden_layers: Sequence[int] = ()) -> list[TargetOutput]:
        """Append the rows of every work to its sequence and compute them, in one pass if the model allows it.

        See :class:`~sakiyomi.interfaces.TargetOutput` for what comes back, in the dtype that the module gives.
        Raises CapacityError where a sequence would outgrow the context. Whatever fails leaves every sequence as it was.
        """
        check_capacity(work, self.context_length)
        if hidden_layers and (wrong := set(hidden_layers).difference(self.hidden_layers)):
            raise OptionError(
                f"hidden_layers={tuple(hidden_layers)}: this model has no {sorted(wrong)}: {sorted(self.hidden_layers)}"
            )
        return self._runner.forward(work, hidden_layers)


def load_module(
    folder: str | Path,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    device: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a causal language model of transformers from a folder, without running code from it.

    ``dtype="auto"`` on a CPU is bf16, or fp32 where the processor doesn't multiply bfloat16 itself; on other devices,
    and of quantised weights, what the folder says. ``device_map`` is for transformers, which needs accelerate for it.
    Raises UnsupportedModelError where transformers doesn't know the architecture or a package is missing,
    CorruptModelError where the files make no model, OptionError for a ``device`` that isn't there. Weights that the
    model has no place for are a warning: some files hold what is for training, or of a draft head.
    """
    try:
        import transformers
    except ImportError:
        raise UnsupportedModelError(
            "architectures beyond the Llama family need transformers: pip install 'sakiyomi[huggingface]'"
        ) from None
    try:
        torch.empty(0, device=device or "cpu")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(f"device={device!r}: {_one_line(error)}") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        quantised = getattr(config, "quantization_config", None) is not None
        on_cpu = device_map is None and torch.device(device or "cpu").type == "cpu"
        kind: torch.dtype | str = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(dtype, "auto")
        if dtype == "auto" and on_cpu and not quantised:
            kind = torch.bfloat16 if native_bf16() else torch.float32
        if quantised and device is not None and device_map is None:
            device_map = {"": device}  # quantised weights can't be moved afterwards
        options: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
        with _without_progress_bars():
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=kind,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are told below
                **options,
            )
        model, found = loaded
        if device is not None and device_map is None:
            model = model.to(device)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise UnsupportedModelError(f"{folder}: {_one_line(error)}") from None
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{folder}: {_one_line(error)}") from None
    except OSError as error:
        if Path(folder).is_dir() and not any(Path(folder).glob("*.safetensors")):
            raise UnsupportedModelError(f"{folder}: no .safetensors file, the only format that is loaded") from None
        raise CorruptModelError(f"{folder}: {_one_line(error)}") from None
    except Exception as error:  # of safetensors, and shapes that don't fit
        raise CorruptModelError(f"{folder}: {_one_line(error)}") from None
    # What is missing or of another shape transformers makes up.
    for name, shape, wanted in sorted(found["mismatched_keys"]):
        raise CorruptModelError(f"{folder}: {name!r} has shape {list(shape)}, config.json says {list(wanted)}")
    for name in sorted(found["missing_keys"]):
        raise CorruptModelError(f"{folder}: the weights lack {name!r}, which config.json calls for")
    if unused := sorted(found["unexpected_keys"]):
        message = f"{folder}: the model has no place for {len(unused)} of the weights, as {unused[0]!r}"
        warnings.warn(message, stacklevel=2)
    if quantised and getattr(model, "hf_quantizer", None) is None:
        raise UnsupportedModelError(f"{folder}: weights quantised by {weight_format(model)!r} are not supported")
    return cast("PreTrainedModel", model.eval())


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers import utils

    logging: Any = utils.logging
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "..."
    # Of a KeyError the text is only the key.
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not text else text


def _refuse(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for what is known to be no decoder, or to have no memory that rolls back."""
    config, kind = model.config, model.config.model_type
    head: Callable[[], object] = model.get_output_embeddings

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModelError(f"architecture {kind!r} is not supported: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it has an encoder, and this is for decoders alone")
    if getattr(model, "_is_stateful", False):
        refuse("it keeps a state that can't be rolled back, in place of keys and values")
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    if others := sorted(set(kinds) - set(_KINDS)):
        refuse(f"it has layers of the kind {', '.join(others)}, which keep more than keys and values")
    if not model.can_generate() or head() is None:
        refuse(f"{type(model).__name__} has no language model head")


def _context_limit(config: Any) -> tuple[int | None, str]:
    """Return the number of positions, None if the config doesn't say, and why it can't be more if it isn't plain.

    With some kinds of rotary embedding all positions change when a sequence outgrows a length: it never does here.
    """
    known = (getattr(config, name, None) for name in _CONTEXTS)
    limit = next((value for value in known if isinstance(value, int) and value > 0), None)
    reason = ""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *parameters.values()]:
        if isinstance(rope, Mapping) and rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or limit
            limit = original if limit is None or original is None else min(limit, int(original))
            reason = (
                f": with {rope['rope_type']} rotary embeddings a longer text would change the positions of all of it"
            )
    return limit, reason


def weight_format(model: PreTrainedModel) -> str:
    """Return what the weights are stored as: ``fp32``, ``bf16``, or the name of a way of quantising."""
    quantisation = getattr(model.config, "quantization_config", None)
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation.quant_method
        return str(getattr(method, "value", method))
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
    return names.get(model.dtype, str(model.dtype).removeprefix("torch."))


def same_logits(found: torch.Tensor, expected: torch.Tensor, precise: bool) -> bool:
    """Tell whether logits, [rows, vocab_size], are the same but for rounding, in float32 (``precise``) or less."""
    found, expected = found.float().cpu(), expected.float().cpu()
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-20)
    if not bool(torch.isfinite(errors).all()):
        return False
    # In 16 bits an expert or two may be chosen otherwise, but not in most rows.
    return bool(errors.max() < 1e-3) if precise else bool(errors.median() < 0.1)


def _structural_clone(model: PreTrainedModel) -> Any:
    """Return modules and configs of their own around the same parameters, in evaluation mode.

    Small buffers are copied: rotary embeddings write to theirs. Hooks are shared, and what they hold, but for those
    that are methods of the model's own modules; so are the weights that accelerate keeps elsewhere.
    """
    buffers = (buffer for buffer in model.buffers() if buffer.numel() > _SMALL)
    shared: list[Any] = [*model.parameters(), *buffers]
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        shared += (hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), nn.Module))
        offloading = getattr(module, "_hf_hook", None)
        for each in (offloading, *getattr(offloading, "hooks", ())):
            shared += [weights] if (weights := getattr(each, "weights_map", None)) is not None else []
    clone: Any = copy.deepcopy(model, {id(each): each for each in shared})
    return clone.eval()


def _configs(model: nn.Module) -> list[Any]:
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if hasattr(config, "_attn_implementation")]


def _is_on_cpu(model: nn.Module) -> bool:
    """Tell whether the weights are on the CPU and used there."""
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not offloaded and all(parameter.device.type == "cpu" for parameter in model.parameters())


class _PackedLinear(nn.Module):
    """A linear in place of the module's own, for any number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.linear = Linear(weight.detach(), None if bias is None else bias.detach())
        self.out_features, self.in_features = weight.shape
        self.weight = weight.detach().new_empty(0)  # for those who ask for its dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        x = x.reshape(-1, self.in_features)
        if not (rows := x.shape[0]):
            return x.new_empty(shape)
        padded = _padded_rows(rows, self.linear.row_limit)
        if padded == rows:
            return self.linear(x.contiguous()).view(shape)
        return self.linear(F.pad(x, (0, 0, 0, padded - rows)))[:rows].view(shape)


class _InPieces(nn.Module):
    """An activation with the same bits for a row whatever the number of rows."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self._whole_in_16_bits = isinstance(activation, nn.SiLU) or "SiLU" in type(activation).__name__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._whole_in_16_bits and x.dtype is not torch.float32:
            return cast("torch.Tensor", self.activation(x))
        return in_pieces(self.activation, x.reshape(-1, x.shape[-1])).view(x.shape)


def _swap(model: nn.Module) -> list[Linear]:
    """Put packed linears and activations in pieces in place of the module's own, and return the linears."""
    from transformers.pytorch_utils import Conv1D

    swapped: dict[int, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in swapped:
                if type(child) is nn.Linear and type(child.weight.data) is torch.Tensor:  # or quantised
                    swapped[id(child)] = _PackedLinear(child.weight, child.bias)
                elif type(child) is Conv1D:  # GPT-2's, with its weight the other way round
                    swapped[id(child)] = _PackedLinear(child.weight.T.contiguous(), child.bias)
                elif type(child) in (nn.SiLU, nn.GELU) or type(child).__module__ == "transformers.activations":
                    swapped[id(child)] = _InPieces(child)
                else:
                    continue
            setattr(parent, name, swapped[id(child)])
    return [module.linear for module in swapped.values() if isinstance(module, _PackedLinear)]


class _Memory:
    """What a target remembers of one sequence: keys and values of layers that are alike, together."""

    def __init__(self, groups: Sequence[KeyValues]) -> None:
        self.groups = groups

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self.groups[0].length

    @length.setter
    def length(self, length: int) -> None:
        for group in self.groups:
            group.length = length

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return min(group.capacity for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(group.nbytes for group in self.groups)

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on. Costs nothing."""
        for group in self.groups:
            group.truncate(length)

    def keep(self, length: int, rows: Sequence[int]) -> None:
        """Of the tokens from ``length`` on keep those at these offsets (ascending), moved together."""
        for group in self.groups:
            group.keep(length, rows)


class _Group(NamedTuple):
    """What layers have in common whose keys and values lie together."""

    heads: int
    kv_heads: int
    head_dim: int  # the larger of keys' and values', which the smaller are padded to
    dtype: torch.dtype
    device: torch.device


class _Rows(Part):
    """One sequence's rows in a forward, in the layers of one group."""

    def __init__(self, work: Work, memory: KeyValues, *shape: Any) -> None:
        super().__init__(work, memory, *shape)
        # Places for the new keys and values, by turns: [kv_heads, rows, head_dim].
        self.new = memory.memory.narrow(3, self.start, self.rows).flatten(0, 1).unbind(0)


class _Layer:
    """Attention of one layer of the clone: what it sees, and where its keys and values are in a sequence's memory."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach, kwargs: Mapping[str, Any]
    ) -> None:
        self.key_dim, self.value_dim = key.shape[3], value.shape[3]
        dim = max(self.key_dim, self.value_dim)
        self.group = _Group(query.shape[1], key.shape[1], dim, key.dtype, key.device)
        self.reach = reach
        scale = kwargs.get("scaling")
        scale = self.key_dim**-0.5 if scale is None else float(scale)
        self.attends_as = (scale, kwargs.get("softcap"), kwargs.get("s_aux") is not None)
        self.kernel: Kernel = kernel(dim, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
        self.index = 0  # among the layers of its group
        self.parts: list[_Rows] = []  # of the forward that runs now

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return [1, rows, heads, head_dim] for what a module gives: [1, heads or kv_heads, rows, head_dim] each."""
        q, k, v = query[0], key[0], value[0]
        rows, parts = q.shape[1], self.parts
        if len(parts) == 1:
            attended = self._attend(parts[0], q, k, v)
        else:
            ends = list(accumulate(part.rows for part in parts))
            split = (each.tensor_split(ends, 1) for each in (q, k, v))
            pieces = zip(parts, *split, strict=False)
            attended = torch.cat([self._attend(part, *piece)[: part.rows] for part, *piece in pieces])
        missing = rows - attended.shape[0]
        attended = attended[:rows] if missing <= 0 else F.pad(attended, (0, 0, 0, missing))
        attended = attended.view(1, rows, self.group.heads, self.group.head_dim)
        return attended if self.value_dim == self.group.head_dim else attended[..., : self.value_dim]

    def _attend(self, part: _Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, dim = part.rows, self.group.head_dim
        new_k, new_v = part.new[2 * self.index], part.new[2 * self.index + 1]
        if self.key_dim != self.value_dim:
            new_k, new_v = new_k[..., : self.key_dim], new_v[..., : self.value_dim]
            if self.key_dim < dim:
                q = F.pad(q, (0, dim - self.key_dim))
        new_k.copy_(k[:, :rows])
        new_v.copy_(v[:, :rows])
        return part.attend(self.index, q[:, :rows].transpose(0, 1), self.kernel)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do, for a module of a clone."""
    return getattr(module, _LAYER).attend(query, key, value), None


class _Finder:
    """Takes note of what attention modules of a clone ask for."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, _Layer] = {}

    def add(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Take note of one. Raises UnsupportedModelError for what :class:`_Layer` doesn't do."""
        reach = Reach() if mask is None else mask.reach if isinstance(mask, _KnownMask) else None
        biased = any(kwargs.get(name) is not None for name in ("position_bias", "head_mask", "alibi"))
        causal = kwargs.get("is_causal") in (None, True) and getattr(module, "is_causal", True)
        if module in self.layers or reach is None or biased or not causal:
            raise UnsupportedModelError("its attention is of a kind that isn't known")
        if len({query.dtype, key.dtype, value.dtype}) > 1 or query.shape[0] != 1:
            raise UnsupportedModelError("its queries, keys and values aren't of one kind")
        self.layers[module] = _Layer(query, key, value, reach, kwargs)


def _attention_probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to nothing, and have the clone's finder take note."""
    getattr(module, _LAYER).add(module, query, key, value, attention_mask, kwargs)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _mask_probe(*, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any) -> Any:
    """Return, in place of a mask, what it shows; None for a mask that we don't know."""
    return _KnownMask(_reach(mask_function, local_size))


class _KnownMask(NamedTuple):
    reach: Reach | None


def _reach(mask_function: Callable[..., Any], size: int | None) -> Reach | None:
    """Ask transformers' function whether row q sees key k, around every place where masks that we know differ."""
    zero = torch.zeros((), dtype=torch.long)
    length = 2 * (size or 8) + 4
    edges = {0, 1, length // 4, *(n * (size or 8) + i for n in (1, 2) for i in (-1, 0, 1, 2)), length - 1}
    rows = torch.tensor(sorted(edges & set(range(length))))[:, None]
    keys = torch.arange(length)[None]
    seen = mask_function(zero, zero, rows, keys)
    candidates = [Reach(), Reach(window=size), Reach(chunk=size)] if size else [Reach()]
    for reach in candidates:
        first = rows - rows % reach.chunk if reach.chunk else rows - (reach.window or length) + 1
        if torch.equal(seen.expand(len(rows), length), (keys <= rows) & (keys >= first)):
            return reach
    return None


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether activations are summed up by a matrix product of their own, with bits of torch's choice.

    What is multiplied by weights isn't for this to find, since it knows operators by name: see :func:`_weights_left`.
    """

    _PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "mv", "addmv", "dot", "vdot", "inner", "matmul")
    _OTHERS = ("bilinear", "einsum", "tensordot", "convolution", "conv1d", "conv2d", "conv3d")  # that sum over inputs
    _PARTS = ("grouped_mm", "scaled_mm", "scaled_grouped_mm", "scaled_dot_product")  # of names

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self._PRODUCTS:
            left = args[1] if name in ("addmm", "baddbmm", "addbmm", "addmv") else args[0]
            self.found = self.found or left.shape[-1] > 1  # products of one term, as of rotary angles, sum nothing
        elif name in self._OTHERS or any(part in name for part in self._PARTS):
            self.found = True
        return func(*args, **(kwargs or {}))


def _weights_left(clone: nn.Module) -> bool:
    """Tell whether a clone has weights that rows may be multiplied by in any other way than by a packed linear.

    Tables that rows are looked up in aren't multiplied by; nor are those that a module computes and no file holds.
    """
    for module in clone.modules():
        if isinstance(module, (nn.Embedding, _PackedLinear)):
            continue
        tables = module._non_persistent_buffers_set
        buffers = (buffer for name, buffer in module._buffers.items() if name not in tables)
        if any(each is not None and each.dim() >= 2 for each in (*module._parameters.values(), *buffers)):
            return True
    return False


class _Positions:
    """Stands for a cache where a module asks it for positions instead of taking those that it is given (Llama 4)."""

    def __init__(self, places: torch.Tensor) -> None:
        self._offsets = places[0] - torch.arange(places.shape[1], device=places.device)

    def get_seq_length(self, layer: int = 0) -> torch.Tensor:
        """Return what has to be added to a row's number to get its position."""
        return self._offsets

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return keys and values as they are: attention remembers them."""
        return key, value


class _Runner:
    """A way to run a clone."""

    mode: Literal["packed", "one by one"]
    can_be_exact = False

    def __init__(self, clone: Any, linears: Sequence[Linear], device: torch.device) -> None:
        self.clone, self.device = clone, device
        parameters = inspect.signature(clone.forward).parameters
        self.selects_rows = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        depth = getattr(clone.config.get_text_config(), "num_hidden_layers", 0)
        self.stacks = [list(m) for m in clone.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        self.layers: list[nn.Module] = self.stacks[0] if self.stacks else []
        # Linears of one dtype at a time: they may differ, and so may what they can do.
        dtypes = {linear.dtype for linear in linears}
        limits = [set_row_limit([each for each in linears if each.dtype is dtype], dtype) for dtype in dtypes]
        self.row_limit = min((limit or MAX_ROWS for limit in limits), default=0)
        self.linears_are_exact = bool(limits) and all(limits)

    def new_sequence(self) -> Any:
        raise NotImplementedError

    def forward(self, work: Sequence[Work], hidden_layers: Sequence[int]) -> list[TargetOutput]:
        raise NotImplementedError

    def rows_are_invariant(self, target: HuggingFaceTarget) -> bool:
        raise NotImplementedError

    @contextmanager
    def hidden(self, wanted: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Give a dict in which a call leaves the hidden states of these layers: [rows, hidden_size] each."""
        with self._listening({layer: self.givers[layer] for layer in wanted}) as found:
            yield found

    @cached_property
    def givers(self) -> dict[int, nn.Module]:
        """The modules whose output is hidden states, of layer 0 whose input is; by layer.

        Only those that a call was seen to use: what is below the head may be there for its parts alone (OPT).
        """
        modules = {layer: self.layers[max(0, layer - 1)] for layer in range(len(self.layers) + 1 if self.layers else 0)}
        below = dict.fromkeys([self.clone.base_model, *self.clone.children(), *self.clone.base_model.children()])
        below.pop(self.clone, None)
        modules |= {HEAD_INPUT - i: module for i, module in enumerate(below)}
        read: list[torch.Tensor] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            read.append((args[0] if args else next(iter(kwargs.values()))).flatten(0, -2))

        hook = self.clone.get_output_embeddings().register_forward_pre_hook(note, with_kwargs=True)
        try:
            with self._listening(modules) as found:
                self.forward([Work(self.new_sequence(), [0, 0], None, 2)], ())
        finally:
            hook.remove()
        givers = {layer: modules[layer] for layer in found if layer >= 0}
        for layer, states in found.items():
            alike = layer < 0 and read and states.dim() == 2 and states.dtype == read[-1].dtype
            if alike and torch.equal(states[:2].cpu(), read[-1][:2].cpu()):
                givers.setdefault(HEAD_INPUT, modules[layer])
        return givers

    @contextmanager
    def _listening(self, modules: Mapping[int, nn.Module]) -> Iterator[dict[int, torch.Tensor]]:
        """Give a dict in which a call leaves the hidden states that these modules give."""
        found: dict[int, torch.Tensor] = {}

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            found[0] = (args[0] if args else kwargs["hidden_states"])[0]

        def after(layer: int, module: nn.Module, args: Any, output: Any) -> None:
            states = output if isinstance(output, torch.Tensor) else output[0] if output else None
            if isinstance(states, torch.Tensor) and states.dim():
                found[layer] = states[0]

        hooks = [
            module.register_forward_hook(partial(after, layer))
            if layer
            else module.register_forward_pre_hook(before, with_kwargs=True)
            for layer, module in modules.items()
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, rows: Sequence[int], ids: Sequence[int], **kwargs: Any) -> torch.Tensor:
        """Run the clone on a text and return logits of these of its rows: [rows, vocab_size]."""
        index = torch.tensor(rows, dtype=torch.long)  # not on a device: hidden states may be on another one
        if self.selects_rows:
            kwargs["logits_to_keep"] = index
        text = torch.tensor([ids], device=self.device)
        logits: torch.Tensor = self.clone(input_ids=text, return_dict=True, **kwargs).logits[0]
        return logits if self.selects_rows else logits.index_select(0, index.to(logits.device))


class _Packed(_Runner):
    """The rows of all sequences in one call, side by side, with an attention function that tells them apart."""

    mode = "packed"

    def __init__(self, clone: Any, linears: Sequence[Linear], device: torch.device) -> None:
        super().__init__(clone, linears, device)
        if not self.takes_positions:
            raise UnsupportedModelError("its rows can't be given positions")
        self._tile = TILE if linears else 0
        self._asks_cache = any(getattr(module, "attn_temperature_tuning", False) for module in clone.modules())
        products = _Products()
        self._layers = self._find_layers(products)
        self._groups: dict[_Group, list[_Layer]] = {}
        for layer in self._layers:
            layers = self._groups.setdefault(layer.group, [])
            layer.index = len(layers)
            layers.append(layer)
        self._reaches = [[layer.reach for layer in layers] for layers in self._groups.values()]
        blocks = [_KEY_ALIGNMENT]
        if self._tile:
            ways = {(layer.group, *layer.attends_as): layer for layer in self._layers}.values()
            blocks = [invariant_key_block(each.kernel, *each.group[:4]) for each in ways]
        self._key_block = max(block or KEY_BLOCKS[0] for block in blocks)
        by_rows = not products.found and not _weights_left(self.clone)
        self.can_be_exact = self.linears_are_exact and all(blocks) and by_rows

    def _find_layers(self, products: _Products) -> list[_Layer]:
        """Run the clone with attention that only takes note of what it is asked for."""
        from transformers import AttentionInterface, AttentionMaskInterface

        finder = _Finder()
        AttentionInterface.register(_OURS, _attention)
        AttentionInterface.register(_PROBE, _attention_probe)
        AttentionMaskInterface.register(_PROBE, _mask_probe)
        for module in self.clone.modules():
            setattr(module, _LAYER, finder)
        self._attend_with(_PROBE)
        with products:
            self.logits([0, 1], [1] * 8, position_ids=torch.arange(8, device=self.device)[None], use_cache=False)
        layers = finder.layers
        for module in list(layers)[:1]:  # what has as many layers may be an encoder of images
            self.layers = next((stack for stack in self.stacks if module in stack[0].modules()), self.layers)
        if len(layers) != len(self.layers):
            raise UnsupportedModelError(f"{len(layers)} of its {len(self.layers)} layers have attention that is known")
        self._attend_with(_OURS)
        for module in self.clone.modules():
            setattr(module, _LAYER, layers.get(module))
        return list(layers.values())

    def _attend_with(self, name: str) -> None:
        for config in _configs(self.clone):
            config._attn_implementation = name

    def new_sequence(self) -> _Memory:
        block = max(BLOCK, self._key_block)
        return _Memory(
            [
                KeyValues(len(layers), group.kv_heads, group.head_dim, group.dtype, block, group.device)
                for group, layers in self._groups.items()
            ]
        )

    def forward(self, work: Sequence[Work], hidden_layers: Sequence[int]) -> list[TargetOutput]:
        sizes = [len(item.tokens) for item in work]
        ends = list(accumulate(sizes))
        wanted = [row for item, end in zip(work, ends, strict=True) for row in range(end - item.logit_rows, end)]
        ids = [token for item in work for token in item.tokens]
        places = [position for item in work for position in positions(item)]
        padded, chosen = ends[-1], len(wanted)
        if self.row_limit:
            padded = _padded_rows(padded, self.row_limit)
            chosen = _padded_rows(chosen, self.row_limit) if chosen else 0
        ids += ids[-1:] * (padded - len(ids))
        places += places[-1:] * (padded - len(places))
        rows = wanted + wanted[-1:] * (chosen - len(wanted))
        position_ids = torch.tensor([places], device=self.device)
        kwargs: dict[str, Any] = {"position_ids": position_ids, "use_cache": False}
        if self._asks_cache:
            kwargs[self.cache_name] = _Positions(position_ids)
        sequences = [cast("_Memory", item.sequence) for item in work]
        assert len({id(sequence) for sequence in sequences}) == len(work), "rows of a sequence are one work"
        layouts = [Layout(item, self._key_block, self._tile) for item in work]
        try:
            for i, (group, layers) in enumerate(self._groups.items()):
                shape = (group.heads, self._reaches[i], self._key_block, False)
                laid_out = zip(work, sequences, layouts, strict=True)
                parts = [_Rows(item, each.groups[i], *shape, layout) for item, each, layout in laid_out]
                for layer in layers:
                    layer.parts = parts
            with self.hidden(hidden_layers) as hidden:
                logits = self.logits(rows, ids, **kwargs)
        finally:
            for layer in self._layers:
                layer.parts = []
        outputs, taken = [], 0
        for item, end, size in zip(work, ends, sizes, strict=True):
            states = tuple(hidden[layer][end - size : end] for layer in hidden_layers)
            outputs.append(TargetOutput(logits[taken : taken + item.logit_rows], states))
            taken += item.logit_rows
        for sequence, size in zip(sequences, sizes, strict=True):
            # Last: whatever fails before leaves every sequence as it was.
            sequence.length += size
        return outputs

    def rows_are_invariant(self, target: HuggingFaceTarget) -> bool:
        # As in TorchTarget: into a further block of keys, and from one step of the attention kernel (512 keys) to two.
        prefix = next((p for p in (504, 116) if p + 20 <= target.context_length), 0)
        sequence = self.new_sequence()
        for group in sequence.groups:
            group.reserve(prefix + 20)
            group.memory[:, :, :, :prefix].normal_(generator=torch.Generator().manual_seed(0))
        sequence.length = prefix
        return rows_are_invariant(target, sequence, min(target.vocab_size, target._embeddings))


class _OneByOne(_Runner):
    """A call for every sequence, and for every path of a tree, with the model's own attention and masks."""

    mode = "one by one"

    def new_sequence(self) -> ModuleCache:
        from sakiyomi.targets.module_cache import ModuleCache

        return ModuleCache()

    def forward(self, work: Sequence[Work], hidden_layers: Sequence[int]) -> list[TargetOutput]:
        lengths = [item.sequence.length for item in work]
        try:
            return [self._forward(item, hidden_layers) for item in work]
        except BaseException:
            for item, length in zip(work, lengths, strict=True):
                item.sequence.truncate(length)
            raise

    def _forward(self, work: Work, hidden_layers: Sequence[int]) -> TargetOutput:
        from sakiyomi.targets.module_cache import run_rows

        memory = cast("ModuleCache", work.sequence)
        chain = work.parents is None
        logits: list[torch.Tensor] = []
        hidden: list[tuple[torch.Tensor, ...]] = []

        def call(tokens: Sequence[int]) -> torch.Tensor:
            rows = range(len(tokens) - work.logit_rows, len(tokens)) if chain else range(len(tokens))
            with self.hidden(hidden_layers) as found:
                logits.append(self.logits(rows, tokens, use_cache=True, **{self.cache_name: memory}))
            hidden.append(tuple(found[layer] for layer in hidden_layers))
            before = sum(computed)
            computed.append(len(tokens))
            return torch.arange(before, before + len(tokens))[:, None]

        computed: list[int] = []
        order = run_rows(memory, work.tokens, work.parents, call)[:, 0].to(self.device)
        all_logits = torch.cat(logits)
        if not chain:
            all_logits = all_logits.index_select(0, order[len(order) - work.logit_rows :].to(all_logits.device))
        states = (torch.cat(layer) for layer in zip(*hidden, strict=True))
        return TargetOutput(all_logits, tuple(state.index_select(0, order.to(state.device)) for state in states))

    def rows_are_invariant(self, target: HuggingFaceTarget) -> bool:
        return False  # the model's own attention adds as it likes
