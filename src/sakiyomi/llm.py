"""The object that users hold: a target with its tokenizer and a default drafter."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from sakiyomi import core, drafters, models, targets
from sakiyomi.engine import Chunk, Engine, FinishReason
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Drafter, Exactness, Target
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Stats
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.text import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]
DTYPES = ("auto", "bf16", "fp32")
NUM_SPECULATIVE_TOKENS = 7
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


def load(
    model: str | os.PathLike[str],
    *,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    weights: Literal["auto", "int8"] = "auto",
    kernels: str = "auto",
    drafter: str | Drafter | None = "ngram",
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS,
    context_length: int | None = None,
    progress: bool = True,
) -> LLM:
    """Load a model: a known name, a folder in Hugging Face layout, a hub id, or a .gguf file.

    ``dtype="auto"`` is bf16 wherever that is faster, else fp32. ``weights="int8"`` halves what is read of the weights,
    at some cost in quality (``sakiyomi bench --weights int8`` measures it). ``kernels``: an instruction path of the
    compiled core (see ``sakiyomi.core.available()``) or "torch"; "auto" is the fastest, or what SAKIYOMI_KERNELS says.
    ``context_length`` lowers the model's own. ``progress`` shows a bar on standard error while something is fetched or
    converted. Warns once where the compiled core isn't there. Raises ModelError or OptionError.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    targets.resolve(kernels, weights)
    drafters.resolve(drafter)  # what is wrong here should not cost the time of loading
    _check_draft_length(num_speculative_tokens)
    folder = models.resolve(model, progress=progress)
    config = DecoderConfig.from_huggingface(models.read_config(folder))
    if context_length is not None and not 2 <= context_length <= config.context_length:
        raise OptionError(f"context_length={context_length}: must be in 2..{config.context_length} for this model")
    tokenizer = Tokenizer.from_folder(folder)
    if kernels == "auto" and not core.available() and os.environ.get("SAKIYOMI_KERNELS") != "torch":
        warnings.warn(
            "the compiled core isn't there, so that torch's kernels run, which are slower; "
            "install sakiyomi again with a C++ compiler at hand, or choose kernels='torch'",
            RuntimeWarning,
            stacklevel=2,
        )
    target = targets.load_decoder(
        config,
        models.open_weights(folder),
        dtype=dtype,
        weights=weights,
        kernels=kernels,
        context_length=context_length,
    )
    return LLM(target, tokenizer, drafter=drafter, num_speculative_tokens=num_speculative_tokens)


class LLM:
    """A target that answers prompts, reading ahead with a drafter.

    ``drafter`` and ``num_speculative_tokens`` are defaults that each call may override. They change speed only:
    the tokens are those of plain decoding (see ``exactness``). Not to be called from several threads at once.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        *,
        drafter: str | Drafter | None = "ngram",
        num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS,
    ) -> None:
        _check_draft_length(num_speculative_tokens)
        self.target = target
        self.tokenizer = tokenizer
        self.engine = Engine(target, tokenizer)
        self.drafter = drafters.resolve(drafter)
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

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | None = None,
    ) -> Iterator[Chunk]:
        """Yield the answer round by round. Closing the iterator cancels it.

        Raises PromptError or OptionError at once where the request can't be run.
        """
        return self._run(self.encode(prompt), params, drafter, num_speculative_tokens)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = _DEFAULT,
        num_speculative_tokens: int | None = None,
    ) -> Generation:
        """Return the whole answer with its statistics. Raises PromptError or OptionError."""
        began = time.perf_counter()
        ids = self.encode(prompt)
        chunks: list[Chunk] = []
        first = 0.0
        for chunk in self._run(ids, params, drafter, num_speculative_tokens):
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

    def _run(
        self,
        ids: list[int],
        params: SamplingParams | None,
        drafter: str | Drafter | None,
        num_speculative_tokens: int | None,
    ) -> Iterator[Chunk]:
        chosen = self.drafter if drafter == _DEFAULT else drafters.resolve(drafter)
        k = self.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        return self.engine.run(self.engine.request(ids, params or SamplingParams(), chosen, k))


def _check_draft_length(num_speculative_tokens: int) -> None:
    if num_speculative_tokens < 0:
        raise OptionError(f"num_speculative_tokens={num_speculative_tokens}: must be 0 (plain decoding) or more")
