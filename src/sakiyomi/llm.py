"""The object that users hold: a target with its tokenizer and a default drafter."""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast, overload

from sakiyomi import core, drafters, pairs, targets
from sakiyomi.costs import ModelCosts, measure
from sakiyomi.drafters.trained import TargetParts, load_drafter
from sakiyomi.engine import Chunk, Engine, FinishReason, Request
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Drafter, Exactness, Target, Verification
from sakiyomi.loading import DTYPES, DeviceMap, LoadedModel, by_name, check_device, trained_for
from sakiyomi.policy import AdaptivePolicy, FixedPolicy, Policy
from sakiyomi.sampling import SamplingParams
from sakiyomi.settings import Settings, same_model
from sakiyomi.stats import Stats
from sakiyomi.text import Message, Tokenizer
from sakiyomi.verification import method

Prompt = str | Sequence[int] | Sequence[Message]
BATCH_SIZE = 16
_DEFAULT: Literal["default"] = "default"
_AUTO = drafters.AUTO


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished output. ``text`` ends before a stop string; ``token_ids`` include the token that ended it.

    ``error``: what it failed of, where ``finish_reason`` is "error"; only in a batch, whose other outputs go on.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    exactness: Exactness
    stats: Stats
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafters and the policy that says how far to read ahead, with all that they have learned.

    Without drafters it is plain decoding. ``verification``: which draft tokens stand.
    """

    drafters: tuple[Drafter, ...] = ()
    policy: Policy | None = None
    verification: Verification = "coupled"


def load(
    model: str | os.PathLike[str],
    *,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    weights: Literal["auto", "int8"] | None = "auto",
    kernels: str = "auto",
    drafter: str | Drafter | None = _AUTO,
    num_speculative_tokens: int | None = None,
    verification: Verification = "coupled",
    draft_model: str | os.PathLike[str] | None = None,
    draft_weights: Literal["auto", "int8"] | None = None,
    trained: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    settings: str | os.PathLike[str] | None = None,
    context_length: int | None = None,
    device: str | None = None,
    device_map: DeviceMap | None = None,
    progress: bool = True,
) -> LLM:
    """Load a model: a known name, a folder in Hugging Face layout, a hub id, or a .gguf file.

    ``dtype="auto"`` is bf16 wherever that is faster, else fp32. ``weights="int8"`` halves what is read of the weights,
    at some cost in quality (``sakiyomi bench --weights int8`` measures it); None is int8 where the core runs.
    ``kernels``: an instruction path of the compiled core (see ``sakiyomi.core.available()``) or "torch"; "auto" is the
    fastest, or what SAKIYOMI_KERNELS says.
    ``drafter``: a name, or several joined with +; "auto" is the suffix drafter, those trained for the model, and the
    draft model where one is given.
    ``num_speculative_tokens``: tokens to draft in a round; None drafts as many as pay, for which the costs of the
    model are measured once, in about a second. ``verification``: see :class:`LLM`. ``draft_model``: a smaller model to
    draft with, named as ``model`` is; its tokenizer may be another. ``draft_weights``: its ``weights``. ``trained``:
    the folder of a drafter trained for this model, or several; those that come with sakiyomi need no mention. What
    ``drafter`` names of them is loaded now, others where a call first names them. ``settings``: a file that
    ``sakiyomi tune`` wrote, which says all five of these.
    ``context_length`` lowers the model's own. ``device`` ("cuda", "mps", ...) and ``device_map`` (as for transformers'
    ``from_pretrained``) say where it runs: elsewhere than on the processor through its transformers module, like
    architectures beyond the Llama family and quantised weights, for which sakiyomi[huggingface] must be installed.
    ``progress`` shows a bar on standard error while something is fetched or converted. Warns where the compiled core
    isn't there, and of a draft model that is too slow to pay. Raises ModelError or OptionError.
    """
    if settings is not None:
        if trained or (drafter, num_speculative_tokens, verification, draft_model) != (_AUTO, None, "coupled", None):
            raise OptionError(
                f"settings={os.fspath(settings)!r}: says drafter, num_speculative_tokens, verification, draft_model "
                "and trained; leave these out"
            )
        tuned = Settings.load(settings)
        if not same_model(os.fspath(model), tuned.model):
            warnings.warn(
                f"settings={os.fspath(settings)!r}: were tuned for {tuned.model}, not for {os.fspath(model)}",
                RuntimeWarning,
                stacklevel=2,
            )
        drafter, num_speculative_tokens, verification = tuned.drafter, tuned.num_speculative_tokens, tuned.verification
        draft_model, trained = tuned.draft_model, tuned.trained
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    targets.resolve(kernels, weights)
    check_device(device, device_map)
    # What is wrong here should not cost the time of loading.
    heads = trained_for(model, trained)
    if isinstance(drafter, str):
        names = drafters.parse(drafter, [*heads, *([drafters.MODEL] if draft_model is not None else [])])
        for name, folder in by_name(trained).items():
            if names and name not in names:
                raise OptionError(f"trained={str(folder)!r}: drafter={drafter!r} goes without; add +{name} to it")
    draft_length(num_speculative_tokens)
    method(verification)
    if draft_weights is not None:
        if draft_model is None:
            raise OptionError(f"draft_weights={draft_weights!r}: needs a draft model; name one with draft_model")
        targets.resolve(kernels, draft_weights, "draft_weights")
    if kernels == "auto" and not core.available() and os.environ.get("SAKIYOMI_KERNELS") != "torch":
        warnings.warn(
            "the compiled core isn't there, so that torch's kernels run, which are slower; "
            "install sakiyomi again with a C++ compiler at hand, or choose kernels='torch'",
            RuntimeWarning,
            stacklevel=2,
        )
    where: dict[str, Any] = {"dtype": dtype, "device": device, "device_map": device_map, "progress": progress}
    loaded = LoadedModel.load(model, weights=weights, kernels=kernels, context_length=context_length, **where)

    @cache
    def parts() -> TargetParts:  # the same for all trained drafters; where none is loaded nobody needs it
        return loaded.parts

    def load_trained(folder: Path) -> Drafter:
        return load_drafter(folder, parts(), kernels=kernels, device=device)

    drafting = costs = None
    if draft_model is not None:
        small = LoadedModel.load(draft_model, weights=draft_weights, kernels=kernels, **where)
        costs = small.costs()
        drafting = pairs.draft_model(
            small.target, small.tokenizer, loaded.tokenizer, loaded.target.vocab_size, costs=costs
        )
    llm = LLM(
        loaded.target,
        loaded.tokenizer,
        drafter=drafter,
        num_speculative_tokens=num_speculative_tokens,
        verification=verification,
        draft_model=drafting,
        trained={name: partial(load_trained, folder) for name, folder in heads.items()},
        costs=loaded.costs,
    )
    if num_speculative_tokens != 0:
        llm.prepare()  # now, not in the first answer
    if drafter not in (None, "none") and num_speculative_tokens is None:
        ours = llm.costs()
        if costs is not None and (ratio := costs.seconds(1, 0) / ours.seconds(1, 0)) > pairs.PAYS:
            warnings.warn(
                f"a row of the draft model takes {ratio:.2f} of the time of the target's: it will hardly be asked; "
                "use a model several times smaller",
                RuntimeWarning,
                stacklevel=2,
            )
    return llm


class LLM:
    """A target that answers prompts, reading ahead with drafters.

    ``drafter`` and ``num_speculative_tokens`` are defaults that each call may override. They change speed only:
    the tokens are those of plain decoding (see ``exactness``). ``verification`` is another: "coupled" keeps that
    promise; with "rejection" or "block" tokens that a draft model sampled are other ones than those of plain decoding,
    of the same distribution, and more of them stand. Greedy, and with drafters that don't sample, all three are the
    same. That distribution is the one over seeds: beside drafters that remember, like "suffix", take a new one for each
    answer, or what it drew before says what is drawn. ``draft_model``: the drafter that goes by "model". ``trained``:
    drafters trained for the target, by name; each is loaded when it is first used.
    ``costs``: returns those of the target, and is called when they are first needed; by default they are measured then.
    What drafters remember, and what was learned about when they pay, stays from call to call. Not to be called from
    several threads at once. Raises OptionError.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        *,
        drafter: str | Drafter | None = _AUTO,
        num_speculative_tokens: int | None = None,
        verification: Verification = "coupled",
        draft_model: Drafter | None = None,
        trained: Mapping[str, Callable[[], Drafter]] | None = None,
        costs: Callable[[], ModelCosts] | None = None,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.engine = Engine(target, tokenizer)
        self._measure = costs or (lambda: ModelCosts(measure(target)))
        self._costs: ModelCosts | None = None
        self._policy: AdaptivePolicy | None = None
        self._kept: dict[str, Drafter] = {} if draft_model is None else {drafters.MODEL: draft_model}
        self.trained = dict(trained or {})
        self.drafter = drafter
        self.num_speculative_tokens = draft_length(num_speculative_tokens)
        self.verification = method(verification)
        self._chosen(drafter)

    def prepare(self) -> None:
        """Load the drafters that answers have by default, which otherwise happens in the first one."""
        self._chosen(self.drafter, self._kept)

    def costs(self) -> ModelCosts:
        """Return what the target's forwards cost, as far as is known by now."""
        if self._costs is None:
            self._costs = self._measure()
        return self._costs

    @property
    def given(self) -> tuple[str, ...]:
        """The names of drafters that there are for this model only: trained ones, and the draft model."""
        return (*self.trained, *([drafters.MODEL] if drafters.MODEL in self._kept else []))

    @property
    def exactness(self) -> Exactness:
        """``bit-exact``, or ``numerics``: lossless up to ties in floating point.

        Found by a test when the model was loaded; on torch's kernels it holds for as many threads as torch had then.
        """
        return self.target.exactness

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: text, chat messages, or ids as they are. Raises PromptError."""
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("prompt: is empty; give at least one character")
            return self.tokenizer.encode(prompt)
        prompt = _listed(prompt)
        if not len(prompt):
            raise PromptError("prompt: is empty; give at least one token or message")
        if len(prompt) and all(isinstance(token, Integral) for token in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        return self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]

    def speculation(
        self,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        verification: Verification | Literal["default"] = _DEFAULT,
    ) -> Speculation:
        """Return a setting to give to calls in place of the LLM's own: it has learned nothing yet, and learns apart.

        The draft model is the same, and so are trained drafters, and one that is given as an object.
        Raises OptionError.
        """
        k, way = self._length(num_speculative_tokens), self._verification(verification)
        found = self._chosen(drafter, None if k == 0 else {})
        if k == 0 or not found:
            return Speculation()
        if k is None:
            return Speculation(found, AdaptivePolicy(ModelCosts(self.costs().table)), way)
        return Speculation(found, FixedPolicy(k), way)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        verification: Verification | Literal["default"] = _DEFAULT,
        speculation: Speculation | None = None,
    ) -> Iterator[Chunk]:
        """Yield the answer round by round. Closing the iterator cancels it.

        ``speculation``: a setting of :meth:`speculation`, in place of the other options.
        Raises PromptError or OptionError at once where the request can't be run.
        """
        setting = speculation or self._setting(drafter, num_speculative_tokens, verification)
        return self._run(self.encode(prompt), params, setting)

    def stream_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        verification: Verification | Literal["default"] = _DEFAULT,
        speculation: Speculation | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[tuple[int, Chunk | Exception]]:
        """Yield (index of the prompt, what its answer gained), round by round, ``batch_size`` answers at a time.

        An answer that ends makes room for the next. One that fails yields its error, and the others go on.
        ``params``: one for all, or one for each prompt. Each answer is what it would be alone: prompts that are the
        same, with the same seed, have the same answer. The other options are those of :meth:`stream`.
        Raises PromptError or OptionError at once where one of the prompts can't be run.
        """
        if isinstance(prompts, str):
            raise PromptError("prompts: is one text; give a list of prompts")
        setting = speculation or self._setting(drafter, num_speculative_tokens, verification)
        return self._run_batch([self.encode(prompt) for prompt in prompts], params, setting, batch_size)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        verification: Verification | Literal["default"] = _DEFAULT,
        speculation: Speculation | None = None,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        verification: Verification | Literal["default"] = _DEFAULT,
        speculation: Speculation | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        verification: Verification | Literal["default"] = _DEFAULT,
        speculation: Speculation | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Generation | list[Generation]:
        """Return the whole answer with its statistics; of a list of prompts a list, in their order.

        Options are those of :meth:`stream` and, for a list, of :meth:`stream_batch`; so are errors, save that an answer
        of a list that fails has its error in ``Generation.error``. Times are counted from the call on.
        """
        setting = speculation or self._setting(drafter, num_speculative_tokens, verification)
        began = time.perf_counter()
        prompt = _listed(prompt)
        if not _is_batch(prompt):
            if params is not None and not isinstance(params, SamplingParams):
                raise OptionError(f"params: {len(params)} of them for one prompt; give one, or a list of prompts")
            ids = self.encode(cast("Prompt", prompt))
            folded = _Folded(ids, began)
            for chunk in self._run(ids, params, setting):
                folded.add(chunk)
            return folded.generation(self.exactness)
        many = [self.encode(each) for each in cast("Sequence[Prompt]", prompt)]
        outputs = [_Folded(ids, began) for ids in many]
        for index, gained in self._run_batch(many, params, setting, batch_size):
            outputs[index].add(gained)
        return [each.generation(self.exactness) for each in outputs]

    def _run(self, ids: list[int], params: SamplingParams | None, setting: Speculation) -> Iterator[Chunk]:
        return self.engine.run(self._request(ids, params or SamplingParams(), setting))

    def _request(self, ids: list[int], params: SamplingParams, setting: Speculation) -> Request:
        return self.engine.request(ids, params, setting.drafters, setting.policy, setting.verification)

    def _run_batch(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        setting: Speculation,
        batch_size: int,
    ) -> Iterator[tuple[int, Chunk | Exception]]:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError(f"batch_size={batch_size!r}: must be a number from 1 on, the most answers in a round")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise OptionError(f"params: {len(params)} of them for {len(prompts)} prompts; give one, or one for each")
        for index, (ids, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                self.engine.chooser(self.engine.check(ids, each), each)
            except PromptError as error:
                raise PromptError(f"prompt {index}: {error}") from None
        requests = (self._request(ids, each, setting) for ids, each in zip(prompts, params, strict=True))
        return self.engine.run_together(requests, batch_size)

    def _setting(
        self,
        drafter: str | Drafter | None,
        num_speculative_tokens: int | Literal["default"] | None,
        verification: Verification | Literal["default"],
    ) -> Speculation:
        """Return the drafters that this LLM keeps, with its policy."""
        k, way = self._length(num_speculative_tokens), self._verification(verification)
        found = self._chosen(drafter, None if k == 0 else self._kept)
        if k == 0 or not found:
            return Speculation()
        if k is not None:
            return Speculation(found, FixedPolicy(k), way)
        if self._policy is None:
            self._policy = AdaptivePolicy(self.costs())
        return Speculation(found, self._policy, way)

    def _length(self, num_speculative_tokens: int | Literal["default"] | None) -> int | None:
        if isinstance(num_speculative_tokens, str) and num_speculative_tokens == _DEFAULT:
            return self.num_speculative_tokens
        return draft_length(num_speculative_tokens)

    def _verification(self, verification: Verification | Literal["default"]) -> Verification:
        return self.verification if verification == _DEFAULT else method(verification)

    def _chosen(self, drafter: str | Drafter | None, kept: dict[str, Drafter] | None = None) -> tuple[Drafter, ...]:
        """Return the drafters of an option; those that it names come from ``kept``, or are made and kept there.

        Without ``kept`` nothing is made. Raises OptionError.
        """
        if isinstance(drafter, str) and drafter == _DEFAULT:
            drafter = self.drafter
        if drafter is None:
            return ()
        if not isinstance(drafter, str):
            drafters.check(drafter)
            return (drafter,)
        names = drafters.parse(drafter, self.given)
        if kept is None:
            return ()
        for name in names:
            if name in self.trained and name not in self._kept:
                self._kept[name] = self.trained[name]()
            if name not in kept:
                kept[name] = self._kept[name] if name in self.given else drafters.DRAFTERS[name]()
        return tuple(kept[name] for name in names)


def _listed(prompt: Any) -> Any:
    """Return a prompt, or several, whose token ids come as an array or a tensor, as lists."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def _is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Return whether these are several prompts: a list of texts, of lists of ids, or of lists of messages."""
    if isinstance(prompt, str) or not len(prompt):
        return False
    return not isinstance(prompt[0], Integral | Mapping)


class _Folded:
    """The chunks of one answer so far."""

    def __init__(self, prompt: list[int], began: float) -> None:
        self._prompt, self._began = prompt, began
        self._chunks: list[Chunk] = []
        self._first = self._last = 0.0
        self._error: Exception | None = None

    def add(self, gained: Chunk | Exception) -> None:
        self._last = time.perf_counter() - self._began
        if isinstance(gained, Exception):
            self._error = gained
            return
        self._chunks.append(gained)
        self._first = self._first or self._last

    def generation(self, exactness: Exactness) -> Generation:
        finish_reason = "error" if self._error else self._chunks[-1].finish_reason
        assert finish_reason is not None
        return Generation(
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(token.id for chunk in self._chunks for token in chunk.tokens),
            finish_reason=finish_reason,
            prompt_token_ids=tuple(self._prompt),
            exactness=exactness,
            stats=Stats(tuple(chunk.record for chunk in self._chunks), self._first, self._last),
            error=self._error,
        )


def draft_length(num_speculative_tokens: Any) -> int | None:
    """Return a number of draft tokens, None for as many as pay. Raises OptionError."""
    if num_speculative_tokens is None:
        return None
    try:
        if isinstance(num_speculative_tokens, bool) or (length := operator.index(num_speculative_tokens)) < 0:
            raise TypeError
    except TypeError:
        raise OptionError(
            f"num_speculative_tokens={num_speculative_tokens!r}: must be 0 (plain decoding), a number, or None "
            "(as many as pay)"
        ) from None
    return length
