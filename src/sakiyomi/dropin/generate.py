"""What stands in for a model's ``generate``: its arguments, what it learns from call to call, and the way back.

A call goes through transformers' own preparation, with all its defaults, processors and criteria; only the decoding
loop is ours (:mod:`sakiyomi.dropin.call`). What that can't take goes to the model's own ``generate``, with a warning.
"""

from __future__ import annotations

import copy
import inspect
import operator
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi import drafters
from sakiyomi.drafting import Source
from sakiyomi.dropin.call import Call, GeneratedRow, Noise, NotHere
from sakiyomi.dropin.models import WHERE, DecoderModel, EncoderDecoderModel, Where, stamp
from sakiyomi.engine import Engine, Request
from sakiyomi.errors import ModelError, OptionError
from sakiyomi.interfaces import Drafter, Target
from sakiyomi.llm import draft_length
from sakiyomi.loading import default_draft_weights
from sakiyomi.policy import AdaptivePolicy, AtMost, FixedPolicy, Policy
from sakiyomi.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Arguments that say how to read ahead: they are ours, and transformers never sees them.
_SPECULATION = ("assistant_model", "assistant_tokenizer", "prompt_lookup_num_tokens", "num_assistant_tokens")
# Arguments with which only the model's own generate can do what is asked.
_ELSEWHERE = (
    "cache",
    "past_key_values",
    "inputs_embeds",
    "position_ids",
    "custom_generate",
    "negative_prompt_ids",
    "synced_gpus",
)


def accelerate(
    model: PreTrainedModel,
    drafter: str | Drafter | None = drafters.AUTO,
    *,
    num_speculative_tokens: int | None = None,
    target: Where = "auto",
) -> PreTrainedModel:
    """Make ``model.generate(...)`` read ahead, and return the model; :func:`restore` undoes it.

    The arguments of ``generate`` and what it returns stay as they are. ``assistant_model=`` (with ``tokenizer=`` and
    ``assistant_tokenizer=`` where its tokenizer is another) drafts beside ``drafter``; with
    ``prompt_lookup_num_tokens=n`` only drafters that look things up do, at most n tokens in a row;
    ``num_assistant_tokens=n``: at most n. ``num_speculative_tokens`` as for :func:`sakiyomi.load`: None drafts as many
    as pay, for which the model's costs are measured now, in about a second.

    ``target``: what computes. "core": the compiled core, with a packed copy of the weights, where the model is of a
    family that it has, in bf16 or fp32, on a processor. "module": the model's own module, wherever it is; on a
    processor with packed linears. "auto": the core where it can, else the module. Weights that have changed since are
    noticed by the next call. Not to be called from several threads at once.
    Raises OptionError, and UnsupportedModelError for an architecture that can't read ahead.
    """
    if not isinstance(model, torch.nn.Module) or not callable(getattr(model, "generate", None)):
        raise OptionError(f"model: a {type(model).__name__} has no generate(); give a transformers model")
    if target not in WHERE:
        raise OptionError(f"target={target!r}: must be one of {', '.join(WHERE)}")
    lookups, count = _lookups(drafter), draft_length(num_speculative_tokens)
    current = vars(model).get("generate")
    restore(model)
    try:
        vars(model)["generate"] = Generate(model, lookups, count, target)
    except BaseException:
        if current is not None:
            vars(model)["generate"] = current
        raise
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model its own ``generate`` back, and return it. One that has it is left as it is."""
    current = vars(model).get("generate")
    if isinstance(current, Generate):
        current.undo()
    return model


@dataclass(frozen=True, slots=True)
class _Assistant:
    """The draft model of the last call that had one, made ready. ``key``: what it was made of.

    ``drafter``: the one for every row, if its tokenizer is another.
    """

    key: tuple[Any, ...]
    model: DecoderModel | EncoderDecoderModel
    drafter: Drafter | None


class Generate:
    """Takes the place of ``model.generate``."""

    def __init__(self, model: Any, lookups: Sequence[Drafter], count: int | None, where: Where) -> None:
        if model.training:
            raise OptionError(f"model: the {type(model).__name__} is in training mode; call model.eval() first")
        self._replaced = vars(model).get("generate")  # what somebody else put there, if so
        self.__wrapped__: Callable[..., Any] = model.generate
        self.__doc__ = self.__wrapped__.__doc__
        self._model = model
        self._lookups, self._count, self._where = lookups, count, where
        self._last_assistant: _Assistant | None = None
        self._warned: set[str] = set()
        self._prepare()

    def _prepare(self) -> None:
        """Make a target of the model as it is now."""
        now = stamp(self._model)
        self._computes = _ready(self._model, self._where)
        self._adaptive: AdaptivePolicy | None = None
        if isinstance(self._computes, DecoderModel) and self._count is None and self._lookups:
            self._computes.costs()  # now, not in the first call
        self._stamp = now

    def undo(self) -> None:
        """Put back what was there."""
        del vars(self._model)["generate"]
        if self._replaced is not None:
            vars(self._model)["generate"] = self._replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the copied model's own generate: what was packed is the original's."""
        function, model = getattr(self.__wrapped__, "__func__", None), memo.get(id(self._model))
        return self.__wrapped__ if function is None or model is None else types.MethodType(function, model)

    def __reduce__(self) -> Any:
        """Pickle as the model's own generate."""
        return getattr, (self._model, "generate")  # of its class, while this isn't in its place yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, reading ahead, with the arguments and the result of the model's own ``generate``."""
        names = list(inspect.signature(self.__wrapped__).parameters)[: len(args)]
        if len(names) < len(args) or set(names) & set(kwargs):
            return self.__wrapped__(*args, **kwargs)  # which says what is wrong
        given: dict[str, Any] = dict(zip(names, args, strict=True)) | kwargs
        speculation = self._take_speculation(given)
        try:
            return self._generate(dict(given), speculation)
        except NotHere as reason:
            if str(reason) not in self._warned:
                self._warned.add(str(reason))
                warnings.warn(
                    f"sakiyomi: the model's own generate runs, without reading ahead: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        # Nor with transformers' assistants: the text is the same without, and they can't take some of these cases.
        return self.__wrapped__(**given)

    def _take_speculation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Take what says how to read ahead out of the arguments: given itself, in a config, or in the model's own."""
        speculation = {name: given.pop(name) for name in _SPECULATION if name in given}
        config, default = given.get("generation_config"), self._model.generation_config
        assistants = getattr(speculation.get("assistant_model"), "generation_config", None)
        for name, configs in (
            ("num_assistant_tokens", (config, assistants, default)),
            ("prompt_lookup_num_tokens", (config, default)),
        ):
            values = [getattr(each, name) for each in configs if each is not None]
            if found := [value for value in values if value is not None]:
                speculation.setdefault(name, found[0])
        if config is not None and config.prompt_lookup_num_tokens is not None:
            given["generation_config"] = copy.copy(config)
            given["generation_config"].prompt_lookup_num_tokens = None
        if default.prompt_lookup_num_tokens is not None:
            given["prompt_lookup_num_tokens"] = None
        return speculation

    def _generate(self, given: dict[str, Any], speculation: Mapping[str, Any]) -> Any:
        if self._model.training:
            raise NotHere("the model is in training mode")
        for name in _ELSEWHERE:
            if given.get(name) is not None and given[name] is not False:
                raise NotHere(f"{name}= was given")
        streamer, tokenizer = given.pop("streamer", None), given.get("tokenizer")
        config, default = given.get("generation_config"), self._model.generation_config
        for name in ("stop_strings", "token_healing"):
            if getattr(default, name):
                raise NotHere(f"{name} is in the model's own generation config")
        if given.get("token_healing") or getattr(config, "token_healing", None):
            raise NotHere("token_healing= was given")
        stop_strings = given.get("stop_strings") or (config and config.stop_strings)
        if stop_strings and tokenizer is not None:
            # transformers gives a decoding loop from outside no tokenizer, so that the criterion is made here.
            from transformers import StoppingCriteriaList, StopStringCriteria

            criteria = [*(given.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stop_strings)]
            given["stopping_criteria"] = StoppingCriteriaList(criteria)
            given.pop("stop_strings", None)
            if config is not None and config.stop_strings:
                given["generation_config"] = copy.copy(config)
                given["generation_config"].stop_strings = None

        def decode(
            model: PreTrainedModel,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: GenerationConfig,
            inputs_tensor: torch.Tensor | None = None,  # transformers looks for this name
            **model_kwargs: Any,
        ) -> Any:
            encoder_decoder = bool(model.config.is_encoder_decoder)
            call = Call(
                input_ids=input_ids,
                processors=logits_processor,
                criteria=stopping_criteria,
                config=generation_config,
                model_kwargs=model_kwargs,
                streamer=streamer,
                inputs=inputs_tensor if encoder_decoder else None,
                encoder_decoder=encoder_decoder,
            )
            return self._decode(call, speculation, tokenizer)

        return self.__wrapped__(**given, custom_generate=decode)

    def _decode(self, call: Call, speculation: Mapping[str, Any], tokenizer: Any) -> Any:
        """Return the result of a call, computed here."""
        if stamp(self._model) != self._stamp:
            self._prepare()
        call.check(self._computes.context_length)
        prompts, row_targets = call.prompts(), self._computes.targets(call)
        lookup = _number("prompt_lookup_num_tokens", speculation)
        most = [each for each in (lookup, _number("num_assistant_tokens", speculation)) if each is not None]
        lookups = self._lookups or ([drafters.NgramDrafter()] if lookup else [])
        model, assistant = speculation.get("assistant_model"), None
        if model is not None and lookup is None:
            assistant = self._assistant(model, speculation.get("assistant_tokenizer"), tokenizer, call)
        drafts = self._count != 0 and 0 not in most and (lookups or assistant)
        policy = self._policy(row_targets[0], most) if drafts else None
        noise = Noise(call.rows, call.input_ids.device) if call.config.do_sample else None
        rows = [GeneratedRow(call, index, prompt, noise) for index, prompt in enumerate(prompts)]
        params = SamplingParams(max_new_tokens=call.limit, stop_token_ids=call.eos_ids)
        requests = []
        for row, target in zip(rows, row_targets, strict=True):
            drafting = [self._computes.looking_up(each, call, row.index) for each in lookups]
            if assistant:
                drafting.append(assistant.drafter or assistant.model.assistant(target.vocab_size, call, row.index))
            requests.append(
                Request(
                    target.new_sequence(),
                    row.prompt,
                    row,
                    row,
                    max_new_tokens=call.limit,
                    context_length=target.context_length,
                    sources=[
                        Source(each, row.prompt, params, target.vocab_size, False, partial(_hidden_layers, target))
                        for each in drafting
                    ],
                    policy=policy,
                )
            )
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())
        for _, chunk in Engine(row_targets[0]).run_together(requests, len(requests)):
            if isinstance(chunk, Exception):
                raise chunk
        if call.streamer is not None:
            call.streamer.end()
        return call.result(rows)

    def _policy(self, target: Target, most: Sequence[int]) -> Policy:
        """Return how far to read ahead; what was learned of the drafters stays from call to call."""
        policy: Policy
        if self._count is not None:
            policy = FixedPolicy(self._count)
        else:
            if self._adaptive is None:
                self._adaptive = AdaptivePolicy(self._computes.costs(target))
            policy = self._adaptive
        return AtMost(policy, min(most)) if most else policy

    def _assistant(self, model: Any, own_tokenizer: Any, tokenizer: Any, call: Call) -> _Assistant:
        """Return a draft model, made ready in an earlier call or now. Raises NotHere for one that can't draft here."""
        if not hasattr(model, "config") or not callable(getattr(model, "forward", None)):
            raise OptionError(f"assistant_model: a {type(model).__name__}; give a transformers model")
        tokenizers = (own_tokenizer, tokenizer) if own_tokenizer is not None and tokenizer is not None else ()
        key = (model, stamp(model), *tokenizers, call.eos_ids)
        if self._last_assistant and self._last_assistant.key == key:
            return self._last_assistant
        if bool(model.config.is_encoder_decoder) != call.encoder_decoder:
            raise NotHere(f"assistant_model= is a {type(model).__name__}, which can't draft for this kind of model")
        try:
            ready = _ready(model, "auto", assistant=True)
        except (ModelError, OptionError) as error:
            raise NotHere(f"assistant_model=: {error}") from None
        drafter = None
        if tokenizers and isinstance(ready, DecoderModel) and isinstance(self._computes, DecoderModel):
            drafter = ready.retokenising(*tokenizers, self._computes.target.vocab_size, call.eos_ids)
        self._last_assistant = _Assistant(key, ready, drafter)
        return self._last_assistant


def _ready(model: Any, where: Where, *, assistant: bool = False) -> DecoderModel | EncoderDecoderModel:
    """Return what computes a model; of an assistant, whose tokens are checked, smaller weights do."""
    if not model.config.is_encoder_decoder:
        return DecoderModel(model, where, default_draft_weights("auto") if assistant else "auto")
    if where == "core":
        raise OptionError("target='core': has no encoder-decoder models; 'module' runs the model's own module")
    return EncoderDecoderModel(model)


def _lookups(drafter: str | Drafter | None) -> list[Drafter]:
    """Return the drafters of an option that need no model: each call brings its own."""
    if drafter is None:
        return []
    if not isinstance(drafter, str):
        drafters.check(drafter)
        return [drafter]
    names = drafters.parse(drafter, [drafters.MODEL])
    return [drafters.DRAFTERS[name]() for name in names if name != drafters.MODEL]


def _hidden_layers(target: Target) -> Collection[int]:
    return target.hidden_layers


def _number(name: str, speculation: Mapping[str, Any]) -> int | None:
    """Return a number of draft tokens that a call names. Raises OptionError."""
    value = speculation.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or (number := operator.index(value)) < 0:
            raise TypeError
    except TypeError:
        raise OptionError(f"{name}={value!r}: must be a whole number from 0 on, the most tokens to draft") from None
    return number
