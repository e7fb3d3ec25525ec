"""The round and the loop.

One round, for several sequences together: the policy has drafters propose and says how much of that to check, the
target computes all drafts in one forward, verification says which tokens stand, and what stands is committed. Zero
draft tokens is plain decoding, in the same round. Between rounds every sequence's memory holds all of its tokens but
the last, whose row opens the next round.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from sakiyomi.drafting import Source, depth, first_path, fitting
from sakiyomi.errors import OptionError, PolicyError, PromptError
from sakiyomi.interfaces import Draft, Drafter, RoundRecord, Target, TargetSequence, Verification, Work
from sakiyomi.policy import Checked, Policy
from sakiyomi.sampling import Chooser, SamplingParams
from sakiyomi.text import TextStream, Tokenizer
from sakiyomi.verification import TokenChooser, method, verify

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


class Ending(Protocol):
    """Follows one output: which token is its last, and what text is certain by now."""

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Take a token; return the text that it releases, and the reason if the output ends with it."""

    def finish(self) -> str:
        """Return what text is still held back, when the output ends for another reason."""


class TextEnding:
    """Ends at the model's own end, at stop ids and strings, and at a number of tokens."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], tokenizer: Tokenizer | None, eos_ids: frozenset[int]
    ) -> None:
        self._params, self._eos_ids = params, eos_ids
        self._text = TextStream(tokenizer, prompt, params.stop) if tokenizer else None
        self._count = 0

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Take a token; see :class:`Ending`."""
        self._count += 1
        text = self._text.push(token) if self._text else ""
        reason: FinishReason | None = None
        if token in self._eos_ids:
            reason = "eos"
        elif token in self._params.stop_token_ids or (self._text and self._text.stopped):
            reason = "stop"
        elif self._count == self._params.max_new_tokens:
            reason = "length"
        return text + (self.finish() if reason else ""), reason

    def finish(self) -> str:
        """Return what text is still held back."""
        return self._text.finish() if self._text else ""


class Request:
    """One sequence on its way through rounds. Made by :meth:`Engine.request`, or with parts of one's own.

    ``sequence``: the target's memory, empty. ``chooser`` stands after the prompt. ``sources`` draft for it as
    ``policy`` says; None: plain decoding. ``max_new_tokens``: as ``ending`` has it, so that nothing is drafted beyond.
    """

    def __init__(
        self,
        sequence: TargetSequence,
        prompt: Sequence[int],
        chooser: TokenChooser,
        ending: Ending,
        *,
        max_new_tokens: int,
        context_length: int,
        sources: Sequence[Source] = (),
        policy: Policy | None = None,
        verification: Verification = "coupled",
    ) -> None:
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.finish_reason: FinishReason | None = None
        self.sequence = sequence
        self.chooser = chooser
        self.verification = verification
        self.sources = list(sources) if policy else []
        self.policy = policy.session(self.sources) if policy and self.sources else None
        self._ending = ending
        self._max_new_tokens, self._context_length = max_new_tokens, context_length
        self._reported: set[str] = set()

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return len(self.ids) - self.prompt_length

    @property
    def hidden_layers(self) -> frozenset[int]:
        """The layers whose states its drafters read."""
        return frozenset(layer for source in self.sources if source.alive for layer in source.hidden_layers)

    def read(self, layers: Sequence[int], hidden: Sequence[torch.Tensor], rows: Sequence[int] | None = None) -> None:
        """Give the drafters the states of tokens that the target computed for good: of these rows, None for all."""
        for source in self.sources:
            if source.alive and source.hidden_layers:
                source.read({layer: hidden[layers.index(layer)] for layer in source.hidden_layers}, rows)

    def draft(self, rows: int, sequences: int) -> Draft:
        """Return what to check, no longer than what could still become output besides the target token.

        ``rows``: rows of the coming forward that are there anyway, of so many sequences. Raises PolicyError where the
        policy leaves out what was sampled.
        """
        if self.policy is None:
            return Draft()
        room = self._context_length - len(self.ids)
        left = min(self._max_new_tokens - self.generated, room) - 1
        draft = self.policy.draft(left, self.sequence.length, rows, sequences)
        drawn = [each for source in self.sources if (each := source.take_drawn())]
        if any(draft not in (each, first_path(each)) for each in drawn):
            names = " and ".join(each.drafter for each in drawn)
            raise PolicyError(
                f"policy: {type(self.policy).__name__} left out some of what {names} sampled; with "
                f"verification={self.verification!r} what is drawn must be checked, so ask for less"
            )
        return fitting(draft, room)

    def new_errors(self) -> tuple[str, ...]:
        """Return what drafters failed of since this was last asked."""
        new = {each.name: each.error for each in self.sources if each.error and each.name not in self._reported}
        self._reported.update(new)
        return tuple(f"{name}: {error}" for name, error in new.items())

    def commit(self, token: int, drafter: str | None) -> Token:
        """Append a token to the output and decide whether it is the last."""
        self.ids.append(token)
        text, self.finish_reason = self._ending.push(token)
        if self.finish_reason is None and len(self.ids) == self._context_length:
            self.finish_reason = "context"
            text += self._ending.finish()
        return Token(token, text, drafter)


class Engine:
    """Runs rounds of requests on one target. Holds no state of its own between rounds.

    ``clock``: what seconds are read from; a replay, whose target takes no time, has one of its own.
    """

    def __init__(
        self, target: Target, tokenizer: Tokenizer | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.target = target
        self._tokenizer = tokenizer
        self._clock = clock

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        drafters: Sequence[Drafter] = (),
        policy: Policy | None = None,
        verification: Verification = "coupled",
    ) -> Request:
        """Return a request ready for rounds; without drafters or a policy, of plain decoding.

        ``verification``: which draft tokens stand, see :mod:`sakiyomi.verification`.

        Raises PromptError or OptionError where it can't be run.
        """
        prompt = self.check(prompt, params)
        vocab_size = self.target.vocab_size
        way = method(verification)
        # Where nothing is sampled the target's own noise decides, and drafters may use it.
        sampled = way != "coupled" and params.temperature > 0 and any(each.samples for each in drafters)
        return Request(
            self.target.new_sequence(),
            prompt,
            self.chooser(prompt, params),
            TextEnding(params, prompt, self._tokenizer, self._eos_ids(params)),
            max_new_tokens=params.max_new_tokens,
            context_length=self.target.context_length,
            sources=[
                Source(each, prompt, params, vocab_size, sampled, lambda: self.target.hidden_layers)
                for each in (drafters if policy else ())
            ],
            policy=policy,
            verification=way,
        )

    def check(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Return the token ids of a prompt that can be run. Raises PromptError or OptionError."""
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
        return prompt

    def chooser(self, prompt: Sequence[int], params: SamplingParams) -> Chooser:
        """Return what chooses the tokens after a prompt. Raises OptionError."""
        return Chooser(params, prompt, self.target.vocab_size, self._eos_ids(params))

    def _eos_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos or self._tokenizer is None else self._tokenizer.eos_ids

    def run(self, request: Request) -> Iterator[Chunk]:
        """Yield one request's chunks until it is finished. Warns of a drafter that fails, once."""
        while request.finish_reason is None:
            (chunk,) = self.round([request])
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
            _warn(chunk)

    def run_together(self, requests: Iterable[Request], at_once: int) -> Iterator[tuple[int, Chunk | Exception]]:
        """Yield (index of the request, its chunk) until all are finished, with ``at_once`` of them in every round.

        A request that ends leaves, the next one joins; one that fails yields its error, and the others go on. Requests
        are taken when there is room for them. Warns of a drafter that fails, once for each request.
        """
        waiting = enumerate(requests)
        running: dict[int, Request] = {}
        while True:
            while len(running) < at_once and (following := next(waiting, None)) is not None:
                running[following[0]] = following[1]
            if not running:
                return
            chunks = list(zip(running, self.round(list(running.values())), strict=True))
            running = {index: request for index, request in running.items() if request.finish_reason is None}
            for index, chunk in chunks:
                yield index, chunk
                if isinstance(chunk, Chunk):
                    _warn(chunk)

    def round(self, requests: Sequence[Request]) -> list[Chunk | Exception]:
        """Run one round of unfinished requests together and return what each gained.

        Where a request fails (a processor or its policy raises), its entry is the error, it is finished, and the others
        go on. A drafter that fails ends no request. An error of the target itself is raised and leaves every request as
        it was.
        """
        if not requests:
            return []
        assert len(set(requests)) == len(requests)
        assert all(request.finish_reason is None for request in requests)
        began = self._clock()
        target_s = self._prefill(requests)
        prefilled = self._clock()
        contexts = [request.sequence.length for request in requests]
        rows = sum(len(request.ids) - context for request, context in zip(requests, contexts, strict=True))
        drafts: list[Draft] = []
        failures: dict[int, Exception] = {}
        for i, request in enumerate(requests):
            try:
                drafts.append(request.draft(rows, len(requests)))
            except Exception as error:
                failures[i] = error
                drafts.append(Draft())
            rows += len(drafts[-1])
        work = [_work(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        called = self._clock()
        layers = _layers(requests)
        outputs = self.target.forward(work, hidden_layers=layers)
        computed = self._clock()
        forward_s = computed - called
        committed: list[_Committed] = []
        for i, (request, draft, output) in enumerate(zip(requests, drafts, outputs, strict=True)):
            done = _Committed((), ())
            try:
                if i not in failures:
                    done = _commit(request, draft, output.logits, contexts[i])
            except Exception as error:
                failures[i] = error
            committed.append(done)
        verified = self._clock()
        for i, (request, draft, done) in enumerate(zip(requests, drafts, committed, strict=True)):
            if request.policy is None or i in failures:
                continue
            tokens = tuple(token.id for token in done.tokens)
            if layers and request.finish_reason is None:
                missing = len(work[i].tokens) - len(draft)
                request.read(layers, outputs[i].hidden, [*range(missing), *(missing + j for j in done.accepted)])
            for source in request.sources:
                source.observe(tokens)
            checked = Checked(
                draft=draft,
                accepted=done.accepted,
                tokens=tokens,
                rows=len(work[i].tokens),
                context=contexts[i],
                seconds=forward_s if len(requests) == 1 else None,
            )
            try:
                request.policy.observe(checked)
            except Exception as error:
                failures[i] = error
        ended = self._clock()
        results: list[Chunk | Exception] = []
        for i, (request, draft, done) in enumerate(zip(requests, drafts, committed, strict=True)):
            if i in failures:
                request.finish_reason = "error"
                results.append(failures[i])
                continue
            record = RoundRecord(
                drafter=draft.drafter,
                drafted=len(draft),
                depth=depth(draft),
                accepted=len(done.accepted),
                emitted=len(done.tokens),
                rows=len(work[i].tokens),
                context=contexts[i],
                draft_s=(called - prefilled) + (ended - verified),
                target_s=target_s + forward_s,
                verify_s=verified - computed,
                total_s=ended - began,
                errors=request.new_errors(),
            )
            results.append(Chunk(done.tokens, request.finish_reason, record))
        return results

    def _prefill(self, requests: Sequence[Request]) -> float:
        """Compute all but the last rows of long prompts, in calls of bounded size; return the target's seconds."""
        seconds = 0.0
        while True:
            work, of = [], []
            for request in requests:
                missing = request.ids[request.sequence.length :]
                if len(missing) > self.target.max_rows:
                    work.append(Work(request.sequence, missing[: self.target.max_rows], None, 0))
                    of.append(request)
            if not work:
                return seconds
            layers = _layers(of)
            called = self._clock()
            outputs = self.target.forward(work, hidden_layers=layers)
            seconds += self._clock() - called
            for request, output in zip(of, outputs, strict=True):
                request.read(layers, output.hidden)


@dataclass(frozen=True, slots=True)
class _Committed:
    """What one round added to a sequence: its tokens, and which draft tokens are among them."""

    tokens: tuple[Token, ...]
    accepted: tuple[int, ...]


def _warn(chunk: Chunk) -> None:
    for error in chunk.record.errors:
        warnings.warn(f"a drafter failed, the answer goes on without it: {error}", RuntimeWarning, stacklevel=3)


def _layers(requests: Sequence[Request]) -> list[int]:
    """Return the layers whose states these requests' drafters read."""
    return sorted({layer for request in requests if request.sources for layer in request.hidden_layers})


def _work(request: Request, draft: Draft) -> Work:
    """Return the rows of a round: the tokens that the sequence's memory lacks, then the draft."""
    missing = request.ids[request.sequence.length :]
    parents: list[int] | None = None
    if draft.parents is not None:
        last = len(missing) - 1
        parents = [*range(-1, last), *(last if p < 0 else len(missing) + p for p in draft.parents)]
    return Work(request.sequence, [*missing, *draft.tokens], parents, 1 + len(draft))


def _commit(request: Request, draft: Draft, logits: torch.Tensor, context: int) -> _Committed:
    """Verify a draft, append what stands to the request, and roll its memory back to that."""
    missing = len(request.ids) - context
    accepted: list[int] = []
    tokens: list[Token] = []
    for token, index in verify(request.verification, draft, logits, request.chooser):
        tokens.append(request.commit(token, None if index is None else draft.drafter))
        if index is not None:
            accepted.append(index)
        if request.finish_reason:
            break
    request.sequence.keep(context, [*range(missing), *(missing + index for index in accepted)])
    return _Committed(tuple(tokens), tuple(accepted))
