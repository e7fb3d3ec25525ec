"""The round and the loop.

One round, for several sequences together: every drafter proposes, the target computes all proposals in one forward,
verification says which tokens stand, and what stands is committed. Zero draft tokens is plain decoding, in the same
round. Between rounds every sequence's memory holds all of its tokens but the last, whose row opens the next round.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sakiyomi.errors import DrafterError, OptionError, PromptError
from sakiyomi.interfaces import Draft, Drafter, RoundRecord, Target, Work
from sakiyomi.sampling import Chooser, SamplingParams
from sakiyomi.text import TextStream, Tokenizer
from sakiyomi.verification import coupled, depth

FinishReason = Literal["eos", "stop", "length", "context", "error"]


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the output: its id, the text it released, and the drafter if it was an accepted draft token."""

    id: int
    text: str
    drafter: str | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to one sequence's output. ``finish_reason`` is set on the last chunk."""

    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None
    record: RoundRecord

    @property
    def text(self) -> str:
        """The text that these tokens released."""
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of these tokens."""
        return tuple(token.id for token in self.tokens)


class Request:
    """One sequence on its way through rounds. Made by :meth:`Engine.request`."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        params: SamplingParams,
        drafter: Drafter | None,
        num_speculative_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.params = params
        self.finish_reason: FinishReason | None = None
        self.sequence = target.new_sequence()
        self.session = drafter.session(prompt) if drafter and num_speculative_tokens else None
        self._limit = num_speculative_tokens
        self._context_length = target.context_length
        self._vocab_size = target.vocab_size
        self._eos_ids = frozenset() if params.ignore_eos or tokenizer is None else tokenizer.eos_ids
        self.chooser = Chooser(params, prompt, target.vocab_size, self._eos_ids)
        self._text = TextStream(tokenizer, prompt, params.stop) if tokenizer else None

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return len(self.ids) - self.prompt_length

    def draft(self) -> Draft:
        """Return the drafter's proposal, no longer than what could still become output besides the target token.

        Raises DrafterError for what can't be a draft.
        """
        left = min(self.params.max_new_tokens - self.generated, self._context_length - len(self.ids)) - 1
        budget = min(self._limit, left)
        if self.session is None or budget < 1:
            return Draft()
        draft = self.session.propose(budget)
        _check(draft, budget, self._vocab_size)
        return draft

    def commit(self, token: int, drafter: str | None) -> Token:
        """Append a token to the output and decide whether it is the last."""
        self.ids.append(token)
        text = self._text.push(token) if self._text else ""
        if token in self._eos_ids:
            self.finish_reason = "eos"
        elif token in self.params.stop_token_ids or (self._text and self._text.stopped):
            self.finish_reason = "stop"
        elif self.generated == self.params.max_new_tokens:
            self.finish_reason = "length"
        elif len(self.ids) == self._context_length:
            self.finish_reason = "context"
        if self.finish_reason and self._text:
            text += self._text.finish()
        return Token(token, text, drafter)


class Engine:
    """Runs rounds of requests on one target. Holds no state of its own between rounds."""

    def __init__(self, target: Target, tokenizer: Tokenizer | None = None) -> None:
        self.target = target
        self._tokenizer = tokenizer

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
    ) -> Request:
        """Return a request ready for rounds. Raises PromptError or OptionError where it can't be run."""
        if num_speculative_tokens < 0:
            raise OptionError(f"num_speculative_tokens={num_speculative_tokens}: must be 0 (plain decoding) or more")
        if params.stop and self._tokenizer is None:
            raise OptionError(f"stop={params.stop!r}: needs a tokenizer; use stop_token_ids")
        if not prompt:
            raise PromptError("prompt: has no tokens; give at least one")
        if len(prompt) >= self.target.context_length:
            raise PromptError(
                f"prompt: {len(prompt)} tokens leave no room in the context of {self.target.context_length}; shorten it"
            )
        vocab_size = self.target.vocab_size
        try:
            prompt = [int(operator.index(token)) for token in prompt]
        except TypeError:
            raise PromptError("prompt: token ids must be integers") from None
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise PromptError(f"prompt: token ids must be in 0..{vocab_size - 1}")
        return Request(self.target, prompt, params, drafter, num_speculative_tokens, self._tokenizer)

    def run(self, request: Request) -> Iterator[Chunk]:
        """Yield one request's chunks until it is finished."""
        while request.finish_reason is None:
            (chunk,) = self.round([request])
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def round(self, requests: Sequence[Request]) -> list[Chunk | Exception]:
        """Run one round of unfinished requests together and return what each gained.

        Where a request fails (a processor or a drafter raises), its entry is the error, it is finished, and the others
        go on. An error of the target itself is raised and leaves every request as it was.
        """
        if not requests:
            return []
        assert len(set(requests)) == len(requests)
        assert all(request.finish_reason is None for request in requests)
        began = time.perf_counter()
        failures: dict[int, Exception] = {}
        drafts: list[Draft] = []
        for i, request in enumerate(requests):
            try:
                drafts.append(request.draft())
            except Exception as error:
                failures[i] = error
                drafts.append(Draft())
        drafted = time.perf_counter()
        target_s = self._prefill(requests)
        contexts = [request.sequence.length for request in requests]
        work = [_work(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        called = time.perf_counter()
        outputs = self.target.forward(work)
        computed = time.perf_counter()
        target_s += computed - called
        committed: list[tuple[Token, ...]] = []
        for i, (request, draft, output) in enumerate(zip(requests, drafts, outputs, strict=True)):
            try:
                committed.append(_commit(request, draft, output.logits, contexts[i]) if i not in failures else ())
            except Exception as error:
                failures[i] = error
                committed.append(())
        verified = time.perf_counter()
        for i, (request, tokens) in enumerate(zip(requests, committed, strict=True)):
            if request.session is None or i in failures or request.finish_reason:
                continue
            try:
                request.session.observe([token.id for token in tokens])
            except Exception as error:
                failures[i] = error
        observed = time.perf_counter()
        depths = [depth(draft) for draft in drafts]
        ended = time.perf_counter()
        results: list[Chunk | Exception] = []
        for i, (request, draft, tokens) in enumerate(zip(requests, drafts, committed, strict=True)):
            if i in failures:
                request.finish_reason = "error"
                results.append(failures[i])
                continue
            record = RoundRecord(
                drafter=draft.drafter,
                drafted=len(draft),
                depth=depths[i],
                accepted=sum(token.drafter is not None for token in tokens),
                emitted=len(tokens),
                rows=len(work[i].tokens),
                context=contexts[i],
                draft_s=(drafted - began) + (observed - verified),
                target_s=target_s,
                verify_s=verified - computed,
                total_s=ended - began,
            )
            results.append(Chunk(tokens, request.finish_reason, record))
        return results

    def _prefill(self, requests: Sequence[Request]) -> float:
        """Compute all but the last rows of long prompts, in calls of bounded size; return the target's seconds."""
        seconds = 0.0
        while True:
            work = []
            for request in requests:
                missing = request.ids[request.sequence.length :]
                if len(missing) > self.target.max_rows:
                    work.append(Work(request.sequence, missing[: self.target.max_rows], None, 0))
            if not work:
                return seconds
            called = time.perf_counter()
            self.target.forward(work)
            seconds += time.perf_counter() - called


def _check(draft: Draft, budget: int, vocab_size: int) -> None:
    """Raise DrafterError unless the target can compute this draft."""

    def refuse(what: str) -> None:
        raise DrafterError(f"drafter {draft.drafter!r} {what}")

    if any(type(token) is not int or not 0 <= token < vocab_size for token in draft.tokens):
        refuse(f"proposed {draft.tokens}: token ids must be ints in 0..{vocab_size - 1}")
    if draft.parents is not None:
        if len(draft.parents) != len(draft):
            refuse(f"gave {len(draft.parents)} parents for {len(draft)} tokens")
        if any(not -1 <= parent < i for i, parent in enumerate(draft.parents)):
            refuse(f"gave parents {draft.parents}: each must be -1 or the index of a token before")
    if depth(draft) > budget:
        refuse(f"proposed {depth(draft)} tokens in a row: at most {budget} were asked for")


def _work(request: Request, draft: Draft) -> Work:
    """Return the rows of a round: the tokens that the sequence's memory lacks, then the draft."""
    missing = request.ids[request.sequence.length :]
    parents: list[int] | None = None
    if draft.parents is not None:
        last = len(missing) - 1
        parents = [*range(-1, last), *(last if p < 0 else len(missing) + p for p in draft.parents)]
    return Work(request.sequence, [*missing, *draft.tokens], parents, 1 + len(draft))


def _commit(request: Request, draft: Draft, logits: torch.Tensor, context: int) -> tuple[Token, ...]:
    """Verify a draft, append what stands to the request, and roll its memory back to that."""
    missing = len(request.ids) - context
    kept = list(range(missing))
    tokens: list[Token] = []
    for token, index in coupled(draft, logits, request.chooser):
        tokens.append(request.commit(token, None if index is None else draft.drafter))
        if index is not None:
            kept.append(missing + index)
        if request.finish_reason:
            break
    request.sequence.keep(context, kept)
    return tuple(tokens)
