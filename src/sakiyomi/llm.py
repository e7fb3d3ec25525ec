"""The object that users hold: a target with its tokenizer and a default drafter."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal

import torch

import sakiyomi
from sakiyomi import core, drafters, models, pairs, targets
from sakiyomi.costs import ModelCosts, measure, measured
from sakiyomi.cpus import cpu_name
from sakiyomi.engine import Chunk, Engine, FinishReason
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Drafter, Exactness, Target
from sakiyomi.policy import AdaptivePolicy, FixedPolicy, Policy
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Stats
from sakiyomi.targets.compiled import CompiledTarget
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.targets.pytorch import TorchTarget
from sakiyomi.text import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]
DTYPES = ("auto", "bf16", "fp32")
_DEFAULT: Literal["default"] = "default"


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished output. ``text`` ends before a stop string; ``token_ids`` include the token that ended it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    exactness: Exactness
    stats: Stats


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafters and the policy that says how far to read ahead, with all that they have learned."""

    drafters: tuple[Drafter, ...]
    policy: Policy


def load(
    model: str | os.PathLike[str],
    *,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    weights: Literal["auto", "int8"] = "auto",
    kernels: str = "auto",
    drafter: str | Drafter | None = drafters.AUTO,
    num_speculative_tokens: int | None = None,
    draft_model: str | os.PathLike[str] | None = None,
    context_length: int | None = None,
    progress: bool = True,
) -> LLM:
    """Load a model: a known name, a folder in Hugging Face layout, a hub id, or a .gguf file.

    ``dtype="auto"`` is bf16 wherever that is faster, else fp32. ``weights="int8"`` halves what is read of the weights,
    at some cost in quality (``sakiyomi bench --weights int8`` measures it). ``kernels``: an instruction path of the
    compiled core (see ``sakiyomi.core.available()``) or "torch"; "auto" is the fastest, or what SAKIYOMI_KERNELS says.
    ``drafter``: a name, or several joined with +; "auto" is the suffix drafter, and the draft model where one is given.
    ``num_speculative_tokens``: tokens to draft in a round; None drafts as many as pay, for which the costs of the
    model are measured once, in about a second. ``draft_model``: a smaller model to draft with, named as ``model`` is;
    its tokenizer may be another, and its weights are int8 where the core runs. ``context_length`` lowers the model's
    own. ``progress`` shows a bar on standard error while something is fetched or converted. Warns once where the
    compiled core isn't there. Raises ModelError or OptionError.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    targets.resolve(kernels, weights)
    # What is wrong here should not cost the time of loading.
    if isinstance(drafter, str):
        drafters.parse(drafter, draft_model=draft_model is not None)
    _check_draft_length(num_speculative_tokens)
    if kernels == "auto" and not core.available() and os.environ.get("SAKIYOMI_KERNELS") != "torch":
        warnings.warn(
            "the compiled core isn't there, so that torch's kernels run, which are slower; "
            "install sakiyomi again with a C++ compiler at hand, or choose kernels='torch'",
            RuntimeWarning,
            stacklevel=2,
        )
    adaptive = num_speculative_tokens is None and drafter is not None
    loaded = _Model.load(model, dtype, weights, kernels, context_length, progress)
    costs = loaded.costs() if adaptive else None
    drafting = None
    if draft_model is not None:
        small = _Model.load(draft_model, dtype, draft_weights(kernels), kernels, None, progress)
        drafting = pairs.draft_model(
            small.target,
            small.tokenizer,
            loaded.tokenizer,
            loaded.target.vocab_size,
            costs=small.costs(),
        )
    return LLM(
        loaded.target,
        loaded.tokenizer,
        drafter=drafter,
        num_speculative_tokens=num_speculative_tokens,
        draft_model=drafting,
        costs=costs,
    )


def draft_weights(kernels: str) -> Literal["auto", "int8"]:
    """Return the weights that draft models are loaded with: what they lose in quality can't reach the text."""
    return "int8" if targets.resolve(kernels, "auto") else "auto"


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as it was found and loaded."""

    folder: Path
    target: CompiledTarget | TorchTarget
    tokenizer: Tokenizer

    @classmethod
    def load(
        cls,
        name: str | os.PathLike[str],
        dtype: Literal["auto", "bf16", "fp32"],
        weights: Literal["auto", "int8"],
        kernels: str,
        context_length: int | None,
        progress: bool,
    ) -> _Model:
        """Load what a name stands for."""
        folder = models.resolve(name, progress=progress)
        config = DecoderConfig.from_huggingface(models.read_config(folder))
        if context_length is not None and not 2 <= context_length <= config.context_length:
            raise OptionError(f"context_length={context_length}: must be in 2..{config.context_length} for this model")
        tokenizer = Tokenizer.from_folder(folder)
        target = targets.load_decoder(
            config,
            models.open_weights(folder),
            dtype=dtype,
            weights=weights,
            kernels=kernels,
            context_length=context_length,
        )
        return cls(folder, target, tokenizer)

    def costs(self) -> ModelCosts:
        """Return the costs of the model, as the cache has them for this machine."""
        facts = {
            "model": str(self.folder.resolve()),
            "dtype": str(self.target.dtype),
            "weights": self.target.weight_format,
            "kernels": self.target.kernels,
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "processor": cpu_name(),
            "version": sakiyomi.__version__,
        }
        return ModelCosts(measured(self.target, models.cache_dir() / "costs", facts))


class LLM:
    """A target that answers prompts, reading ahead with drafters.

    ``drafter`` and ``num_speculative_tokens`` are defaults that each call may override. They change speed only:
    the tokens are those of plain decoding (see ``exactness``). ``draft_model``: the drafter that goes by "model".
    ``costs``: of the target; measured when first needed where they aren't given. What drafters remember, and what was
    learned about when they pay, stays from call to call. Not to be called from several threads at once.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        *,
        drafter: str | Drafter | None = drafters.AUTO,
        num_speculative_tokens: int | None = None,
        draft_model: Drafter | None = None,
        costs: ModelCosts | None = None,
    ) -> None:
        _check_draft_length(num_speculative_tokens)
        self.target = target
        self.tokenizer = tokenizer
        self.engine = Engine(target, tokenizer)
        self._costs = costs
        self._drafters: dict[str, Drafter] = {} if draft_model is None else {drafters.MODEL: draft_model}
        self._policy: AdaptivePolicy | None = None
        self._names(drafter)
        self.drafter = drafter
        self.num_speculative_tokens = num_speculative_tokens

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
        if len(prompt) and all(isinstance(token, Integral) for token in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        return self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]

    def speculation(
        self, drafter: str | Drafter | None = _DEFAULT, num_speculative_tokens: int | None = None
    ) -> Speculation | None:
        """Return a setting to give to calls in place of the LLM's own: it has learned nothing yet, and learns apart.

        None is plain decoding. Raises OptionError.
        """
        _check_draft_length(num_speculative_tokens)
        chosen = tuple(
            self._drafters[name] if name == drafters.MODEL else drafters.DRAFTERS[name]()
            for name in self._names(self.drafter if drafter == _DEFAULT else drafter)
        )
        if drafter is not None and not isinstance(drafter, str):
            chosen = (drafter,)
        if not chosen or num_speculative_tokens == 0:
            return None
        if num_speculative_tokens is not None:
            return Speculation(chosen, FixedPolicy(num_speculative_tokens))
        return Speculation(chosen, AdaptivePolicy(ModelCosts(self._measured_costs().table)))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        speculation: Speculation | None = None,
    ) -> Iterator[Chunk]:
        """Yield the answer round by round. Closing the iterator cancels it.

        Raises PromptError or OptionError at once where the request can't be run.
        """
        setting = speculation or self._setting(drafter, num_speculative_tokens)
        return self._run(self.encode(prompt), params, setting)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | Literal["default"] | None = _DEFAULT,
        speculation: Speculation | None = None,
    ) -> Generation:
        """Return the whole answer with its statistics. Raises PromptError or OptionError."""
        setting = speculation or self._setting(drafter, num_speculative_tokens)
        began = time.perf_counter()
        ids = self.encode(prompt)
        chunks: list[Chunk] = []
        first = 0.0
        for chunk in self._run(ids, params, setting):
            chunks.append(chunk)
            first = first or time.perf_counter() - began
        finish_reason = chunks[-1].finish_reason
        assert finish_reason is not None
        return Generation(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token.id for chunk in chunks for token in chunk.tokens),
            finish_reason=finish_reason,
            prompt_token_ids=tuple(ids),
            exactness=self.exactness,
            stats=Stats(tuple(chunk.record for chunk in chunks), first, time.perf_counter() - began),
        )

    def _run(self, ids: list[int], params: SamplingParams | None, setting: Speculation | None) -> Iterator[Chunk]:
        params = params or SamplingParams()
        if setting is None:
            return self.engine.run(self.engine.request(ids, params))
        return self.engine.run(self.engine.request(ids, params, setting.drafters, setting.policy))

    def _setting(
        self, drafter: str | Drafter | None, num_speculative_tokens: int | Literal["default"] | None
    ) -> Speculation | None:
        """Return the drafters that this LLM keeps, with its policy."""
        if drafter == _DEFAULT:
            drafter = self.drafter
        k = self.num_speculative_tokens if num_speculative_tokens == _DEFAULT else num_speculative_tokens
        assert not isinstance(k, str)
        _check_draft_length(k)
        if drafter is not None and not isinstance(drafter, str):
            chosen: tuple[Drafter, ...] = (drafter,)
        else:
            names = self._names(drafter)
            for name in names:
                if name not in self._drafters:
                    self._drafters[name] = drafters.DRAFTERS[name]()
            chosen = tuple(self._drafters[name] for name in names)
        if not chosen or k == 0:
            return None
        if k is not None:
            return Speculation(chosen, FixedPolicy(k))
        if self._policy is None:
            self._policy = AdaptivePolicy(self._measured_costs())
        return Speculation(chosen, self._policy)

    def _names(self, drafter: str | Drafter | None) -> tuple[str, ...]:
        if not isinstance(drafter, str):
            return ()
        return drafters.parse(drafter, draft_model=drafters.MODEL in self._drafters)

    def _measured_costs(self) -> ModelCosts:
        if self._costs is None:
            self._costs = ModelCosts(measure(self.target))
        return self._costs


def _check_draft_length(num_speculative_tokens: int | None) -> None:
    if num_speculative_tokens is not None and num_speculative_tokens < 0:
        raise OptionError(
            f"num_speculative_tokens={num_speculative_tokens}: must be 0 (plain decoding) or more, or None (as many as "
            "pay)"
        )
