"""What computes for the drop-in: a target made of a transformers model, and what drafts for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from sakiyomi import core, pairs, targets
from sakiyomi.costs import ModelCosts, measure
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.preceded import Preceded
from sakiyomi.dropin.call import Call, NotHere
from sakiyomi.errors import ModelError, OptionError
from sakiyomi.interfaces import Drafter, Target, Work
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.targets.huggingface import HuggingFaceTarget, same_logits
from sakiyomi.text import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sakiyomi.targets.seq2seq import Conditioned

Where = Literal["auto", "core", "module"]
WHERE: tuple[Where, ...] = ("auto", "core", "module")


class DecoderModel:
    """A decoder-only model: one target for all rows of all calls.

    ``weights``: of the compiled core, see :func:`sakiyomi.targets.load_decoder`. Raises OptionError where the core was
    asked for and can't compute it, UnsupportedModelError.
    """

    def __init__(self, model: PreTrainedModel, where: Where, weights: Literal["auto", "int8"] = "auto") -> None:
        reason = None if where == "module" else _not_for_core(model)
        if where == "core" and reason is not None:
            raise OptionError(f"target='core': {reason}; 'module' runs the model's own module")
        own = None if where == "module" or reason is not None else _on_core(model, weights)
        if own is None and where == "core":
            raise OptionError("target='core': the core doesn't compute what this model's module does; use 'module'")
        self.target: Target = own or HuggingFaceTarget(model)
        self.context_length = self.target.context_length
        self._costs: ModelCosts | None = None

    def costs(self, target: Target | None = None) -> ModelCosts:
        """Return what forwards cost, measured when first asked."""
        if self._costs is None:
            self._costs = ModelCosts(measure(target or self.target))
        return self._costs

    def targets(self, call: Call) -> Sequence[Target]:
        """Return the target of each row of a call."""
        return [self.target] * call.rows

    def looking_up(self, drafter: Drafter, call: Call, row: int) -> Drafter:
        """Return a drafter that knows all that a row has to look things up in."""
        return drafter

    def assistant(self, vocab_size: int, call: Call, row: int) -> Drafter:
        """Return a drafter that drafts with this model for another one, whose tokenizer is the same."""
        return ModelDrafter(self.target, vocab_size, costs=self.costs(), eos_ids=call.eos_ids)

    def retokenising(self, own: Any, target_tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> Drafter:
        """Return a drafter that drafts with this model for another one, by what their tokenizers have in common.

        Both tokenizers are transformers' own. Raises OptionError for a pair that can't work.
        """
        theirs = _tokenizer(target_tokenizer, "tokenizer", eos_ids)
        ours = _tokenizer(own, "assistant_tokenizer", [own.eos_token_id] if own.eos_token_id is not None else [])
        return pairs.draft_model(self.target, ours, theirs, vocab_size, costs=self.costs())


class EncoderDecoderModel:
    """An encoder-decoder model: each row of a call has a target of its own, with its input."""

    def __init__(self, model: PreTrainedModel) -> None:
        from sakiyomi.targets.seq2seq import Seq2SeqTarget

        self._target = Seq2SeqTarget(model)
        self._input = model.main_input_name
        self.context_length = self._target.context_length
        self._costs: ModelCosts | None = None

    def costs(self, target: Target) -> ModelCosts:
        """Return what forwards of the decoder cost, measured with the first input."""
        if self._costs is None:
            self._costs = ModelCosts(measure(target))
        return self._costs

    def targets(self, call: Call) -> Sequence[Target]:
        """Return the target of each row of a call, whose encoder has run."""
        states = call.model_kwargs["encoder_outputs"][0]
        mask = call.model_kwargs.get("attention_mask")
        return [
            self._target.given(
                encoder_outputs=states[row : row + 1],
                attention_mask=None if mask is None else mask[row : row + 1],
            )
            for row in range(call.rows)
        ]

    def looking_up(self, drafter: Drafter, call: Call, row: int) -> Drafter:
        """Return a drafter that looks things up in the row's input too, where that is text."""
        ids = call.input_of(row)
        if ids is None or ids.is_floating_point():
            return drafter
        mask = call.model_kwargs.get("attention_mask")
        seen = ids[0] if mask is None else ids[0][mask[row].bool()]  # without padding
        return Preceded(drafter, seen.tolist())

    def assistant(self, vocab_size: int, call: Call, row: int) -> Drafter:
        """Return a drafter that drafts with this model for another one, for the input of a row."""
        given = call.input_of(row)
        if given is None:
            raise NotHere("assistant_model= reads the input itself, of which only the encoder's output was given")
        inputs: dict[str, Any] = {self._input: given}
        mask = call.model_kwargs.get("attention_mask")
        if mask is not None and not given.is_floating_point():
            inputs["attention_mask"] = mask[row : row + 1]
        conditioned: Conditioned = self._target.given(**inputs)
        return ModelDrafter(conditioned, vocab_size, costs=self.costs(conditioned), eos_ids=call.eos_ids)


def stamp(model: torch.nn.Module) -> object:
    """Return what changes when a model does: modules, hooks, and weights in the processor's memory.

    Of each weight: where it is, how often it was written to, and one of its numbers, since ``.data`` isn't counted.
    """
    modules = tuple((id(each), len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules())
    weights = tuple(
        (each.data_ptr(), 0 if each.is_inference() else each._version, float(each.data.view(-1)[each.numel() // 2]))
        for each in model.parameters()
        if each.device.type == "cpu" and type(each.data) is torch.Tensor and each.is_contiguous() and each.numel()
    )
    return modules, weights


def _on_core(model: PreTrainedModel, weights: Literal["auto", "int8"]) -> Target | None:
    """Return a target on the compiled core; None where it doesn't compute what the module does."""
    dtype: Literal["bf16", "fp32"] = "bf16" if model.dtype is torch.bfloat16 else "fp32"
    try:
        config = DecoderConfig.from_huggingface(model.config.to_dict())
        target = targets.load_decoder(config, model.state_dict(), dtype=dtype, weights=weights)
    except ModelError:  # layers of somebody's own in it
        return None
    # Hooks, other activations, another head than the config says: a module may compute anything.
    ids = torch.randint(config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits[0]
        (output,) = target.forward([Work(target.new_sequence(), ids[0].tolist(), None, ids.shape[1])])
    exact = dtype == "fp32" and weights == "auto"
    return target if same_logits(output.logits, expected, exact) else None


def _not_for_core(model: PreTrainedModel) -> str | None:
    """Return why the compiled core can't compute a model; None where it can."""
    if not core.available():
        return "the compiled core isn't installed"
    if not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} isn't a class of transformers, so what it computes isn't known"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "the model has adapters"
    kinds = {(each.device.type, each.dtype) for each in model.parameters()}
    if len(kinds) > 1 or not kinds <= {("cpu", torch.bfloat16), ("cpu", torch.float32)}:
        return "its weights aren't all bf16, or all fp32, in the processor's memory"
    try:
        DecoderConfig.from_huggingface(model.config.to_dict())
    except ModelError as error:
        return str(error)
    return None


def _tokenizer(tokenizer: Any, name: str, eos_ids: Sequence[int]) -> Tokenizer:
    from tokenizers import Tokenizer as FastTokenizer

    fast = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(fast, FastTokenizer):
        raise OptionError(f"{name}: a {type(tokenizer).__name__} isn't a fast tokenizer, which is needed here")
    fast = FastTokenizer.from_str(fast.to_str())
    fast.no_truncation()
    fast.no_padding()
    return Tokenizer(fast, {}, list(eos_ids), None)
