"""Replay: what a drafter would have brought along answers that are known.

The output doesn't depend on the drafter, so what any drafter's drafts would have come to at any length can be told from
an answer alone: the drafter reads it round by round, as it would have been written. The target computes nothing. Its
seconds come from its costs, and are added to a clock by which the drafters' own seconds pass as they really do.

    recordings = [record(llm, prompt) for prompt in prompts]
    replay = ChainReplay([MyDrafter()], range(1, 9))
    for recording in recordings:
        by_length = replay.add(recording)  # Stats for each number of draft tokens
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from sakiyomi.costs import ModelCosts
from sakiyomi.drafters.trained import StateDrafter
from sakiyomi.drafting import Source, first_path
from sakiyomi.engine import Engine, FinishReason, Request
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import (
    Draft,
    Drafter,
    GoOn,
    RoundRecord,
    Target,
    TargetOutput,
    Work,
    always,
)
from sakiyomi.policy import FixedPolicy, Policy
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Stats


@dataclass(frozen=True, slots=True)
class Recording:
    """An answer that the target really gave, and what drafters may read of it.

    ``prompt``, ``tokens``: ids. ``states``: of each layer that was asked for, [tokens, hidden_size] of every token but
    the last; see :class:`TargetOutput`. ``vocab_size``, ``context_length``, ``max_rows``: the target's. ``stats``: of
    the rounds that wrote it. ``finish_reason``: why it ended.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    vocab_size: int
    context_length: int
    max_rows: int
    stats: Stats
    finish_reason: FinishReason
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)


class RecordingLLM(Protocol):
    """What recording needs of an ``LLM``."""

    @property
    def engine(self) -> Engine:
        """Runs its rounds."""

    def encode(self, prompt: Any, /) -> list[int]:
        """Return the token ids of a prompt."""


def record(
    llm: RecordingLLM,
    prompt: str | Sequence[int] | list[dict[str, str]],
    params: SamplingParams | None = None,
    *,
    layers: Collection[int] = (),
    expected: Sequence[int] = (),
) -> Recording:
    """Answer a prompt by plain decoding, and keep what a replay needs.

    ``layers``: whose states to keep; those of ``needed_layers``. ``expected``: token ids that the answer is thought to
    have, from an earlier time: as far as the target really gives them they are computed many at a time. The answer is
    the target's, whatever is expected. Raises PromptError, OptionError.
    """
    params = params or SamplingParams()
    ids = llm.encode(prompt)
    recorder = _Recorder(tuple(layers), tuple(expected))
    target = llm.engine.target
    began = time.perf_counter()
    request = llm.engine.request(ids, params, [recorder], FixedPolicy(min(_AT_ONCE, target.max_rows - 1) or 1))
    chunks, first = [], 0.0
    for chunk in llm.engine.run(request):
        chunks.append(chunk)
        first = first or time.perf_counter() - began
    assert request.finish_reason is not None
    tokens = tuple(request.ids[len(ids) :])
    total_s = time.perf_counter() - began
    if layers:
        _read_rest(target, request, recorder)
    return Recording(
        tuple(ids),
        tokens,
        params,
        target.vocab_size,
        target.context_length,
        target.max_rows,
        Stats(tuple(chunk.record for chunk in chunks), first, total_s),
        request.finish_reason,
        recorder.states(),
    )


def needed_layers(drafters: Sequence[Drafter]) -> frozenset[int]:
    """Return the layers whose states these drafters read."""
    return frozenset(layer for each in drafters for layer in getattr(each, "hidden_layers", ()))


_AT_ONCE = 64  # expected tokens in a round


def _read_rest(target: Target, request: Request, recorder: _Recorder) -> None:
    """Compute the states that nobody was given any more, since the answer was complete."""
    sequence, rest = request.sequence, request.ids[recorder.count : -1]
    sequence.truncate(recorder.count)
    for begin in range(0, len(rest), target.max_rows):
        work = Work(sequence, rest[begin : begin + target.max_rows], None, 0)
        (output,) = target.forward([work], hidden_layers=recorder.hidden_layers)
        recorder.read(output.hidden)


class _Recorder:
    """Stands where a drafter does: proposes what is expected, and keeps the states."""

    name = "expected"
    costs = None
    samples = False

    def __init__(self, hidden_layers: tuple[int, ...], expected: tuple[int, ...]) -> None:
        self.hidden_layers = hidden_layers
        self._expected = expected
        self._place = 0
        self.count = 0  # states that it has
        self._pieces: list[list[torch.Tensor]] = []

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> _Recorder:
        return self

    unread = 0

    def observe(self, tokens: Sequence[int]) -> None:
        end = self._place + len(tokens)
        if self._expected[self._place : end] != tuple(tokens):
            self._expected = ()
        self._place = end

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        return Draft(self._expected[self._place : self._place + budget], drafter=self.name)

    def read(self, hidden: Sequence[torch.Tensor]) -> None:
        self.count += len(hidden[0])
        self._pieces.append([each.clone() for each in hidden])  # may be a view of what the next forward overwrites

    def states(self) -> dict[int, torch.Tensor]:
        pieces = list(zip(*self._pieces, strict=True))
        return {layer: torch.cat(each) for layer, each in zip(self.hidden_layers, pieces, strict=False)}


@dataclass(frozen=True, slots=True)
class Timing:
    """What a replay's clock adds to the seconds of drafters.

    ``costs``: of the target's forwards. ``round_s``: the rest of a round. ``token_s``: of each token of the output,
    what an answer's text takes.
    """

    costs: ModelCosts
    round_s: float = 0.0
    token_s: float = 0.0

    def forward_s(self, rows: int, context: int, branches: bool) -> float:
        """Return the seconds of a forward of one sequence."""
        return self.costs.seconds(rows, context) + (self.costs.branch_s if branches else 0.0)


class ChainReplay:
    """Chains of several lengths along answers, in one pass; the lengths don't know of each other.

    As with the policy ``FixedPolicy``, for each of ``lengths``, and coupled verification. What ``drafters`` remember
    they keep from answer to answer. Each must be one whose drafts depend on the tokens so far and the budget alone, not
    on how rounds came, and say so with an attribute ``prefixes``: True where a smaller budget gives the first tokens of
    the same path, False where it may give another. For others, and as :func:`in_chains` says, there is
    :class:`PolicyReplay`. Without ``timing`` the target takes no time. Raises OptionError.
    """

    def __init__(self, drafters: Sequence[Drafter], lengths: Sequence[int], timing: Timing | None = None) -> None:
        if not in_chains(drafters):
            names = "+".join(each.name for each in drafters)
            raise OptionError(
                f"drafters {names}: can't be asked at any place (prefixes); replay them with PolicyReplay"
            )
        if not drafters or not lengths or min(lengths) < 1:
            raise OptionError(f"drafters, lengths={list(lengths)}: needs at least one drafter, and lengths from 1 on")
        self._drafters = list(drafters)
        self._lengths = sorted(set(lengths))
        self.timing = timing

    def add(self, recording: Recording) -> dict[int, Stats]:
        """Return what rounds along one answer come to, for each length."""
        prompt, tokens, params = recording.prompt, recording.tokens, recording.params
        asked = [
            _Asked(
                Source(each, prompt, params, recording.vocab_size, available=lambda: recording.states),
                bool(each.prefixes),  # type: ignore[attr-defined]
            )
            for each in self._drafters
        ]
        walks = [_Walk(length, FixedPolicy(length).session(asked)) for length in self._lengths]  # type: ignore[arg-type]
        read = _Reader(recording, [each.source for each in asked])
        first = (len(prompt) - 1) // recording.max_rows * recording.max_rows  # rows computed before the first round
        for begin in range(0, first, recording.max_rows):
            read(begin, begin + recording.max_rows)
        room = min(params.max_new_tokens, recording.context_length - len(prompt))
        context = first
        for place, token in enumerate(tokens):
            left = room - place - 1
            due = [walk for walk in walks if walk.place == place]
            if due:
                for each in asked:
                    each.forget(min(due[-1].length, left))
                rows = len(prompt) + place - context
                for walk in due:
                    walk.round(asked, tokens, left, context, rows, self.timing)
            read(context, len(prompt) + place)
            context = len(prompt) + place
            for each in asked:
                each.source.observe((token,))
        return {walk.length: walk.stats() for walk in walks}


def in_chains(drafters: Sequence[Drafter]) -> bool:
    """Return whether :class:`ChainReplay` is for these drafters.

    One that reads states and keeps what it makes of them begins anew where it wasn't asked for long. Beside others,
    which are asked first, when that is depends on how rounds came.
    """
    if any(getattr(each, "prefixes", None) is None for each in drafters):
        return False
    return len(drafters) == 1 or not any(isinstance(each, StateDrafter) for each in drafters)


class _Asked:
    """A source at one place: what it was asked is not asked again."""

    sampled = False

    def __init__(self, source: Source, prefixes: bool) -> None:
        self.source = source
        self._prefixes = prefixes
        self.costs = source.costs
        self.spent = 0.0  # seconds of drafts since it was last set
        self._longest = 0
        self._path: Draft | None = None  # the first path of the longest draft
        self._whole = False  # it has no branches
        self._seconds = 0.0

    def forget(self, longest: int) -> None:
        """Go on to another place, where drafts of up to ``longest`` tokens are wanted."""
        self._longest, self._path = longest, None

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return the first path of what the drafter proposes."""
        path = self._path
        if path is None:
            draft = self.source.propose(self._longest)
            path = self._path = first_path(draft)
            self._seconds = self.source.seconds
            self._whole = draft.parents is None
        # Of a tree with more tokens than a draft may have some were left out, perhaps of a longer path that a smaller
        # budget has room for.
        if budget >= self._longest or (self._prefixes and (budget <= len(path.tokens) or self._whole)):
            # A model takes a step for each token; others look things up in about one.
            share = min(1.0, budget / len(path.tokens)) if self.costs is not None and path.tokens else 1.0
            self.spent += self._seconds * share
            if budget >= len(path.tokens):
                return path
            return Draft(path.tokens[:budget], None, path.confidences[:budget], path.drafter)
        found = first_path(self.source.propose(budget))
        self.spent += self.source.seconds
        return found


class _Walk:
    """Rounds of one length along an answer."""

    def __init__(self, length: int, session: Any) -> None:
        self.length, self.place = length, 0
        self._session = session
        self._records: list[RoundRecord] = []
        self._failed: set[str] = set()

    def round(
        self, asked: Sequence[_Asked], tokens: Sequence[int], left: int, context: int, rows: int, timing: Timing | None
    ) -> None:
        draft = self._session.draft(left, context, rows, 1)
        drafted, count = draft.tokens, len(draft.tokens)
        place, most = self.place, min(count, len(tokens) - self.place)
        accepted = 0
        while accepted < most and drafted[accepted] == tokens[place + accepted]:
            accepted += 1
        emitted = min(accepted + 1, len(tokens) - place)
        self.place = place + emitted
        draft_s = 0.0
        errors: tuple[str, ...] = ()
        for each in asked:
            draft_s += each.spent
            each.spent = 0.0
            if each.source.error and each.source.name not in self._failed:
                self._failed.add(each.source.name)
                errors += (f"{each.source.name}: {each.source.error}",)
        target_s = timing.forward_s(rows + count, context, False) if timing else 0.0
        rest_s = timing.round_s + emitted * timing.token_s if timing else 0.0
        self._records.append(
            RoundRecord(
                drafter=draft.drafter,
                drafted=count,
                depth=count,
                accepted=accepted,
                emitted=emitted,
                rows=rows + count,
                context=context,
                draft_s=draft_s,
                target_s=target_s,
                verify_s=0.0,
                total_s=draft_s + target_s + rest_s,
                errors=errors,
            )
        )

    def stats(self) -> Stats:
        records = tuple(self._records)
        return Stats(records, records[0].total_s if records else 0.0, sum(each.total_s for each in records))


class _Reader:
    """Gives sources the states of tokens, as the target's forwards would."""

    def __init__(self, recording: Recording, sources: Sequence[Source]) -> None:
        self._states = recording.states
        self._sources = [each for each in sources if each.hidden_layers]

    def __call__(self, begin: int, end: int) -> None:
        if end > begin:
            for source in self._sources:
                source.read({layer: self._states[layer][begin:end] for layer in source.hidden_layers if source.alive})


class PolicyReplay:
    """Rounds as a policy has them, chains or trees, along answers: the engine's own, with a target that remembers.

    What ``drafters`` and the policy learn they keep from answer to answer. A policy that goes by time goes by the
    clock's. Verification is coupled: other ways write other texts. Without ``timing`` the target takes no time.
    """

    def __init__(self, drafters: Sequence[Drafter], policy: Policy | None, timing: Timing | None = None) -> None:
        self._drafters, self._policy = list(drafters), policy
        self.timing = timing

    def add(self, recording: Recording) -> Stats:
        """Return what rounds along one answer come to. Without a policy they are of plain decoding."""
        if not recording.tokens:
            return Stats((), 0.0, 0.0)
        clock = _Clock()
        target = _Remembering(recording, self.timing, clock)
        request = Request(
            target.new_sequence(),
            recording.prompt,
            _Chosen(recording.tokens),
            _Ending(recording, clock, self.timing.token_s if self.timing else 0.0),
            max_new_tokens=recording.params.max_new_tokens,
            context_length=recording.context_length,
            sources=[
                Source(
                    each, recording.prompt, recording.params, recording.vocab_size, available=lambda: recording.states
                )
                for each in (self._drafters if self._policy else ())
            ],
            policy=self._policy,
        )
        began = clock()
        chunks, first = [], 0.0
        for chunk in Engine(target, clock=clock).run(request):
            chunks.append(chunk)
            first = first or clock() - began
        return Stats(tuple(chunk.record for chunk in chunks), first, clock() - began)


class _Clock:
    """Real time, and what is added to it."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.added


class _Place:
    """A sequence of which only the length is known."""

    def __init__(self) -> None:
        self.length = 0

    def truncate(self, length: int) -> None:
        self.length = length

    def keep(self, length: int, rows: Sequence[int]) -> None:
        self.length = length + len(rows)


class _Remembering:
    """A target that computes nothing: it has the states of what was written, and no logits."""

    def __init__(self, recording: Recording, timing: Timing | None, clock: _Clock) -> None:
        self.vocab_size, self.context_length = recording.vocab_size, recording.context_length
        self.max_rows = recording.max_rows
        self.exactness: Literal["bit-exact", "numerics"] = "bit-exact"
        self.hidden_layers: Collection[int] = recording.states.keys()
        self._states, self._timing, self._clock = recording.states, timing, clock

    def new_sequence(self) -> _Place:
        return _Place()

    def forward(self, work: Sequence[Work], *, hidden_layers: Sequence[int] = ()) -> list[TargetOutput]:
        (each,) = work
        context, rows = each.sequence.length, len(each.tokens)
        hidden: tuple[torch.Tensor, ...] = ()
        if hidden_layers:
            # Only the states of rows that stand are read: those are of what was written.
            places = [context + place for place in _depths(each)]
            last = next(iter(self._states.values())).shape[0] - 1
            index = torch.tensor([min(place, last) for place in places])
            hidden = tuple(self._states[layer].index_select(0, index) for layer in hidden_layers)
        each.sequence.length = context + rows  # type: ignore[misc]
        if self._timing:
            self._clock.added += self._timing.forward_s(rows, context, each.parents is not None)
        return [TargetOutput(torch.zeros(each.logit_rows, 1), hidden)]


def _depths(work: Work) -> Sequence[int]:
    """Return how many rows come before each row on its path."""
    if work.parents is None:
        return range(len(work.tokens))
    depths: list[int] = []
    for parent in work.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


class _Chosen:
    """Chooses what was written."""

    greedy = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._place = tokens, 0

    def choose(self, logits: Any) -> int:
        token = self._tokens[self._place]
        self._place += 1
        return token

    def take(self, token: int) -> None:
        self._place += 1


class _Ending:
    """Ends where the answer ended."""

    def __init__(self, recording: Recording, clock: _Clock, token_s: float) -> None:
        self._left, self._reason = len(recording.tokens), recording.finish_reason
        self._clock, self._token_s = clock, token_s

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        self._clock.added += self._token_s
        self._left -= 1
        return "", None if self._left else self._reason

    def finish(self) -> str:
        return ""
