"""Tuning by replay: which drafters, and how far to read ahead, on these prompts; "not at all" among the answers.

Each prompt is answered once by plain decoding. Along these answers every candidate is replayed, which tells exactly
what of its drafts would stand, and with the measured costs of the target about how fast it would be. The best few are
then measured live against plain decoding, paired and interleaved: only what was measured is recommended.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sakiyomi import drafters
from sakiyomi.bench.journal import Journal
from sakiyomi.bench.replay import ChainReplay, PolicyReplay, Recording, Timing, in_chains, needed_layers, record
from sakiyomi.bench.runner import PLAIN, BenchResult, Candidate, Progress, Skipped, limited, run_benchmark
from sakiyomi.bench.workload import Prompt
from sakiyomi.costs import CostTable, ModelCosts, measure
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Verification
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Stats, ratio, speedup_interval

if TYPE_CHECKING:
    from sakiyomi.llm import LLM, Speculation

LIMIT = 0.1  # an error of a prediction beyond which it is said, and more is measured
LENGTHS = (*range(1, 17), None)
LEAST_PROMPTS = 3  # to say anything of a workload that has more
_COSTLY_LENGTHS = 8  # drafters with a model, each token of which takes time, are replayed up to here unless named
_RECORDING, _LIVE, _BATCHES = 0.45, 0.95, 0.8  # when to go on to the next: shares of the time
_ONE = 0.1  # share of the time after which a candidate, or the lengths of one, is replayed no further
_AS_FAST = 0.99
_PLAIN_ROUNDS = 4  # of an answer that is known, so that it is seen what they take
_BATCHED_PROMPTS = 64
_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What to tune over, and for how long.

    ``drafters``: candidates, named as elsewhere; none for all that there are for the model. ``lengths``: numbers of
    draft tokens, None among them for as many as pay. ``verifications``: methods; others than coupled are measured
    where the target samples. ``seconds``: about how long all may take. ``confirm``: how many candidates are measured
    live. ``batch_sizes``: answers at a time at which the best is measured too. ``contexts``: tokens of context at which
    a new row of the speed-up by context begins. ``seed``: of orders and intervals. Raises OptionError.
    """

    drafters: tuple[str, ...] = ()
    lengths: tuple[int | None, ...] = LENGTHS
    verifications: tuple[Verification, ...] = ("coupled",)
    seconds: float = 180.0
    confirm: int = 2
    batch_sizes: tuple[int, ...] = ()
    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "confirm", operator.index(self.confirm))
        if not self.lengths or any(each is not None and each < 1 for each in self.lengths):
            raise OptionError(f"lengths={list(self.lengths)}: must be numbers from 1 on, or None (as many as pay)")
        if not 0 < self.seconds < math.inf:
            raise OptionError(f"seconds={self.seconds}: must be above 0 and finite")
        if self.confirm < 1:
            raise OptionError(f"confirm={self.confirm}: must be at least 1; only what was measured is recommended")
        if any(low >= high for low, high in itertools.pairwise((0, *self.contexts))):
            raise OptionError(f"contexts={list(self.contexts)}: must be tokens from 1 on, ascending")
        if any(each < 2 for each in self.batch_sizes):
            raise OptionError(f"batch_sizes={list(self.batch_sizes)}: must be from 2 on; single answers are a must")


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and its answer. ``expected``: it had a recorded response; ``matches``: the target gave just that."""

    prompt: Prompt
    prompt_tokens: int
    token_ids: tuple[int, ...]
    expected: bool
    matches: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What groups of ``batch_size`` answers took together, plain and with the candidate.

    ``groups``: of each, (seconds, tokens) after the first ones of its answers, plain and then with the candidate.
    """

    batch_size: int
    case: str
    groups: tuple[tuple[float, int, float, int], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer of a candidate: the text of each token, and the drafter of those that were drafted."""

    prompt: Prompt
    case: str
    tokens: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Tuning:
    """What a tuning found.

    ``answered``: prompts that were replayed. ``predicted``: of each candidate by name, and of plain decoding, the
    replayed rounds by prompt id, with predicted times; fewer prompts where replaying took long. ``live``: what was
    measured. ``costs``: of the target as measured at first, of which ``speed`` times the seconds pass now. ``seconds``:
    that each part took. ``left_out``: prompts that there was no time to answer. ``failed``: candidates of which a
    drafter failed in the replay, and of what.
    """

    prompts: tuple[Prompt, ...]
    answered: tuple[Answered, ...]
    skipped: tuple[Skipped, ...]
    left_out: int
    candidates: tuple[Candidate, ...]
    predicted: Mapping[str, Mapping[str, Stats]]
    live: BenchResult | None
    batches: tuple[Batch, ...]
    samples: tuple[Sample, ...]
    costs: CostTable
    speed: float
    seconds: Mapping[str, float]
    params: SamplingParams
    options: Options
    resumed: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)

    def predicted_speedup(self, case: str, ids: Sequence[str] | None = None) -> float | None:
        """Return plain TPOT / TPOT as predicted, over these prompts (None: all)."""
        by_id = self.predicted.get(case, {})
        chosen = [each for each in (by_id if ids is None else ids) if each in by_id]
        plain = [self.predicted[PLAIN][each] for each in chosen]
        return ratio(_tpot_s(plain), _tpot_s([by_id[each] for each in chosen]))

    def best(self, spec: str) -> Candidate | None:
        """Return the candidate of these drafters that is predicted to be fastest, None where nothing is known."""
        speeds = {each: self.predicted_speedup(each.name) for each in self.candidates if each.drafter == spec}
        known = {each: speed for each, speed in speeds.items() if speed is not None}
        return max(known, key=lambda each: known[each], default=None)


def _tpot_s(many: Sequence[Stats]) -> float | None:
    return ratio(sum(each.decode_s for each in many), sum(each.decode_tokens for each in many))


def specs(llm: LLM) -> tuple[str, ...]:
    """Return the drafters to consider for a model: each alone, all that "auto" joins, and these without one."""
    auto = drafters.parse(drafters.AUTO, llm.given)
    without = itertools.combinations(auto, len(auto) - 1) if len(auto) > 2 else ()
    others = (name for name in drafters.DRAFTERS if name != "suffix" or name in auto)  # it needs the compiled core
    alone = ((name,) for name in dict.fromkeys((*auto, *others)))
    return tuple(dict.fromkeys("+".join(names) for names in (auto, *without, *alone)))


def tune(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    options: Options | None = None,
    *,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Find the setting that is fastest on these prompts.

    Prompts of all categories come in turns, so that each has its share where time is short. An interrupt (Ctrl-C) is
    raised; what was found by then is in the ``journal``, and a call with the same goes on from there. Raises
    OptionError for options that can't work, PromptError if no prompt can be answered.
    """
    options, params, journal = options or Options(), params or SamplingParams(), journal or Journal(None, {})
    return _Tuner(llm, prompts, params, options, journal, progress or (lambda done, total, what: None)).run()


class _Tuner:
    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: Options,
        journal: Journal,
        progress: Progress,
    ) -> None:
        if not prompts:
            raise OptionError("prompts=(): must be at least one prompt")
        progress(0, 1, "measuring the model")
        self._llm, self._params, self._options = llm, params, options
        self._prompts = _in_turns(prompts)
        self._journal, self._report = journal, progress
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._turns: dict[str, tuple[str, int]] = {}  # of follow-ups: the first prompt's id, and which turn it is
        self._recordings: dict[str, Recording] = {}  # without states
        self._replays = _Replays(llm, options, ModelCosts(measure(llm.target)), self._is_over)
        self._skipped: list[Skipped] = []
        self._left_out = 0

    def run(self) -> Tuning:
        resumed, replays = self._journal.resumed, self._replays
        answered = self._answer()
        tuning = Tuning(
            prompts=tuple(self._prompts),
            answered=tuple(answered),
            skipped=tuple(self._skipped),
            left_out=self._left_out,
            candidates=replays.candidates,
            predicted=replays.found,
            live=None,
            batches=(),
            samples=(),
            costs=replays.costs.table,
            speed=replays.costs.seconds(1, 0) / ModelCosts(replays.costs.table).seconds(1, 0),
            seconds=self._seconds,
            params=self._params,
            options=self._options,
            resumed=resumed,
            failed=replays.failed,
        )
        chosen = self._finalists(tuning)
        live = self._confirm(tuning, chosen)
        tuning = replace(tuning, live=live)
        best = fastest(live, self._options.seed)
        if best is not None:
            tuning = replace(tuning, batches=self._batches(tuning, best), samples=self._samples(tuning, best))
        return tuning

    def _is_over(self, share: float) -> bool:
        return time.perf_counter() - self._began > share * self._options.seconds

    def _answer(self) -> list[Answered]:
        """Answer prompt after prompt, and replay all candidates along each answer."""
        waiting = deque(self._prompts)
        answered: list[Answered] = []
        known = self._journal.answers
        total = len(waiting)
        while waiting:
            prompt = waiting.popleft()
            self._report(total - len(waiting) - 1, total, f"answering and replaying {prompt.id}")
            began = time.perf_counter()
            try:
                recording, matches = self._recorded(prompt)
            except PromptError as error:
                self._skipped.append(Skipped(prompt.id, str(error)))
                continue
            if prompt.id not in known:
                self._journal.answer(prompt.id, recording.tokens)
            replayed = time.perf_counter()
            self._replays.add(prompt.id, recording)
            self._took("plain", replayed - began)
            self._took("replay", time.perf_counter() - replayed)
            answered.append(
                Answered(prompt, len(recording.prompt), recording.tokens, prompt.response is not None, matches)
            )
            self._recordings[prompt.id] = replace(recording, states={})
            del recording  # its states may be large
            if prompt.follow_ups:
                waiting.appendleft(self._follow_up(prompt, answered[-1]))
                total += 1
            if self._is_over(_RECORDING):
                break
        self._left_out = sum(each in self._prompts for each in waiting)
        if not answered:
            raise PromptError(f"no prompt can be answered; the first: {self._skipped[0].reason}")
        return answered

    def _recorded(self, prompt: Prompt) -> tuple[Recording, bool]:
        known = self._journal.answers.get(prompt.id)
        recorded = None
        if prompt.response is not None:
            recorded = tuple(self._llm.tokenizer.encode(prompt.response, special=False))
        params = limited(self._params, prompt)
        expected = (known or recorded or ())[:-_PLAIN_ROUNDS]
        recording = record(self._llm, prompt.input, params, layers=self._replays.layers, expected=expected)
        return recording, recorded is not None and _is_given(recorded, recording)

    def _follow_up(self, prompt: Prompt, answered: Answered) -> Prompt:
        """Return what the user says next, after an answer."""
        first, turn = self._turns.get(prompt.id, (prompt.id, 1))
        name = f"{first}, turn {turn + 1}"
        while any(each.id == name for each in self._prompts):
            name += "'"
        self._turns[name] = first, turn + 1
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        answer = {"role": "assistant", "content": self._llm.tokenizer.decode(answered.token_ids)}
        said = (*messages, answer, {"role": "user", "content": prompt.follow_ups[0]})
        return replace(prompt, id=name, messages=said, text="", response=None, follow_ups=prompt.follow_ups[1:])

    def _took(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def _finalists(self, tuning: Tuning) -> list[Candidate]:
        """Return the candidates to measure: the best of each of the best drafters, and of these other verifications."""
        names = dict.fromkeys(each.drafter for each in tuning.candidates)
        found = [each for spec in names if (each := tuning.best(spec))]
        found.sort(key=lambda each: tuning.predicted_speedup(each.name) or 0.0, reverse=True)
        chosen = found[: self._options.confirm]
        if self._params.temperature > 0:
            # Where they write other texts there is nothing to replay.
            made = {each: self._llm.speculation(each.drafter, 1).drafters for each in found}
            sampling = [each for each in found if any(drafter.samples for drafter in made[each])]
            for way in self._options.verifications:
                chosen += [replace(each, verification=way) for each in sampling[:1] if way != "coupled"]
        return chosen

    def _confirm(self, tuning: Tuning, chosen: Sequence[Candidate]) -> BenchResult | None:
        """Measure candidates live; again where predictions were far off, if there is time."""
        prompts = [each.prompt for each in tuning.answered]
        until = _BATCHES if self._options.batch_sizes else _LIVE
        began = time.perf_counter()
        names = {PLAIN, *(each.name for each in chosen)}
        blocks = {
            (block[0].prompt_id, block[0].repeat): block
            for block in self._journal.blocks
            if {each.case for each in block} == names and block[0].prompt_id in self._recordings
        }
        known = [each for block in blocks.values() for each in block]
        result: BenchResult | None = None
        for repeats in (1, 2):
            result = run_benchmark(
                self._llm,
                prompts,
                chosen,
                self._params,
                repeats=repeats,
                seed=self._options.seed,
                progress=lambda done, total, what: self._report(done, total, f"measuring {what}"),
                known=result.measurements if result else known,
                learn=self._learn,
                save=self._journal.measured,
                enough=lambda: self._is_over(until),
            )
            if result.partial:
                raise KeyboardInterrupt
            worst = max((abs(each) for each in prediction_errors(tuning, result).values()), default=0.0)
            if worst <= LIMIT or self._is_over(until):
                break
        self._took("live", time.perf_counter() - began)
        return result

    def _learn(self, setting: Speculation, prompt_id: str) -> None:
        """Have drafters and policy learn from an answer what they would have learned live; states are gone by now."""
        without = [each for each in setting.drafters if not getattr(each, "hidden_layers", ())]
        PolicyReplay(without, setting.policy, self._replays.timing).add(self._recordings[prompt_id])

    def _batches(self, tuning: Tuning, best: Candidate) -> tuple[Batch, ...]:
        """Measure the best candidate with several answers at a time."""
        prompts = [each.prompt for each in tuning.answered][:_BATCHED_PROMPTS]
        found = []
        began = time.perf_counter()
        for size in self._options.batch_sizes:
            setting = self._llm.speculation(best.drafter, best.num_speculative_tokens, best.verification)
            groups: list[tuple[float, int, float, int]] = []
            pieces = [prompts[i : i + size] for i in range(0, len(prompts) - size + 1, size)]
            for number, piece in enumerate(pieces):
                self._report(number, len(pieces), f"measuring {size} answers at a time")
                sides: dict[bool, tuple[float, int]] = {}
                for drafted in (True, False) if number % 2 else (False, True):
                    outputs = self._llm.generate(
                        [each.input for each in piece],
                        [limited(self._params, each) for each in piece],
                        **({"speculation": setting} if drafted else {"drafter": None}),
                        batch_size=size,
                    )
                    stats = [each.stats for each in outputs]  # of answers that began together
                    seconds = max(each.total_s for each in stats) - max(each.ttft_s for each in stats)
                    sides[drafted] = seconds, sum(each.decode_tokens for each in stats)
                groups.append((*sides[False], *sides[True]))
                if self._is_over(_LIVE) and number:
                    break
            if groups:
                found.append(Batch(size, best.name, tuple(groups)))
        self._took("batches", time.perf_counter() - began)
        return tuple(found)

    def _samples(self, tuning: Tuning, best: Candidate) -> tuple[Sample, ...]:
        """Answer the first prompt of some categories again, to show which tokens were drafted."""
        setting = self._llm.speculation(best.drafter, best.num_speculative_tokens, best.verification)
        first = {each.prompt.category: each.prompt for each in reversed(tuning.answered)}
        samples = []
        for prompt in list(first.values())[-_SAMPLES:]:
            chunks = self._llm.stream(prompt.input, limited(self._params, prompt), speculation=setting)
            tokens = [(token.text, token.drafter) for chunk in chunks for token in chunk.tokens]
            samples.append(Sample(prompt, best.name, tuple(tokens)))
        return tuple(reversed(samples))


def _is_given(recorded: Sequence[int], recording: Recording) -> bool:
    """Return whether a recorded response is what the target gives, as far as it may write; its end has no text."""
    tokens = recording.tokens if recording.finish_reason != "eos" else recording.tokens[:-1]
    whole = tuple(recorded) in (tokens, recording.tokens)
    return whole or (recording.finish_reason == "length" and tuple(recorded[: len(tokens)]) == tokens)


def prediction_errors(tuning: Tuning, live: BenchResult) -> dict[str, float]:
    """Return predicted / measured speed-up - 1 of every candidate that was measured, on the same prompts."""
    errors = {}
    for case, pairs in paired(live).items():
        both = [each for each in pairs if each in tuning.predicted.get(case, {})]
        measured = ratio(_tpot_s([pairs[each][0] for each in both]), _tpot_s([pairs[each][1] for each in both]))
        predicted = tuning.predicted_speedup(case, both)
        if measured and predicted:
            errors[case] = predicted / measured - 1
    return errors


def paired(live: BenchResult) -> dict[str, dict[str, tuple[Stats, Stats]]]:
    """Return for every candidate, by prompt id, (plain, candidate): of several repeats all, where each is complete."""
    cases = [each.name for each in live.candidates]
    blocks: dict[int, dict[str, dict[str, Stats]]] = {}
    for each in live.measurements:
        blocks.setdefault(each.repeat, {}).setdefault(each.prompt_id, {})[each.case] = each.stats
    repeats = [
        {prompt_id: block for prompt_id, block in repeat.items() if len(block) == len(cases) + 1}
        for repeat in blocks.values()
    ]
    # A repeat of some prompts would give them more weight than others.
    repeats = [each for each in repeats if len(each) == len(repeats[0])]
    return {
        case: {
            prompt_id: (
                Stats.merge(each[prompt_id][PLAIN] for each in repeats),
                Stats.merge(each[prompt_id][case] for each in repeats),
            )
            for prompt_id in (repeats[0] if repeats else ())
        }
        for case in cases
    }


def fastest(live: BenchResult | None, seed: int) -> Candidate | None:
    """Return the candidate with the highest speed-up as measured, None where nothing could be compared.

    Of those that are as fast, to within 1 %, the one with the fewest drafters.
    """
    if live is None:
        return None
    found = paired(live)
    known = {
        each: interval.value
        for each in live.candidates
        if (interval := speedup_interval(list(found[each.name].values()), seed))
    }
    as_fast = [each for each in known if known[each] >= _AS_FAST * max(known.values())]
    return min(as_fast, key=lambda each: (each.drafter.count("+"), -known[each]), default=None)


@dataclass
class _Item:
    """What is replayed together. ``later``: where time is short, after others. ``seconds``: that it took so far."""

    replay: ChainReplay | PolicyReplay
    candidates: Sequence[Candidate]
    later: bool
    seconds: float = 0.0


class _Replays:
    """All candidates, each with what it remembers, along answer after answer."""

    def __init__(self, llm: LLM, options: Options, costs: ModelCosts, is_over: Callable[[float], bool]) -> None:
        self.costs = costs
        self.timing = Timing(costs)
        self._most_s = _ONE * options.seconds
        self._rest_s, self._rest_tokens = 0.0, 0  # of plain rounds as they really were, besides target and drafter
        self._own_s, self._own_rounds = 0.0, 0  # of replayed ones
        self.found: dict[str, dict[str, Stats]] = {PLAIN: {}}
        self.failed: dict[str, str] = {}
        self._is_over = is_over
        self._items: list[_Item] = []
        layers: frozenset[int] = frozenset()
        given = (drafters.parse(spec, llm.given) for spec in options.drafters)
        for spec in dict.fromkeys(["+".join(names) for names in given] or specs(llm)):
            made = llm.speculation(spec, 1).drafters
            layers |= needed_layers(made)
            costly = any(each.costs is not None for each in made)
            lengths = [each for each in options.lengths if each is not None]
            if costly and options.lengths == LENGTHS:
                lengths = [each for each in lengths if each <= _COSTLY_LENGTHS]
            if lengths and in_chains(made):
                self._items.append(
                    _Item(ChainReplay(made, lengths), [Candidate(spec, each) for each in lengths], costly)
                )
                lengths = []
            for length in [*lengths, *([None] if None in options.lengths else [])]:
                setting = llm.speculation(spec, length)
                replay = PolicyReplay(setting.drafters, setting.policy)
                self._items.append(_Item(replay, [Candidate(spec, length)], costly and length is not None))
        if not self._items:
            raise OptionError("drafters: there is nothing to tune; name a drafter")
        by_spec = [candidate for item in self._items for candidate in item.candidates]
        order = list(dict.fromkeys(each.drafter for each in by_spec))
        self.candidates = tuple(
            sorted(by_spec, key=lambda each: (order.index(each.drafter), each.num_speculative_tokens or math.inf))
        )
        # Where time is short, first what costs little and what is likely to be best.
        self._items.sort(key=lambda each: each.later)
        self.layers = layers
        for each in self.candidates:
            self.found[each.name] = {}

    def add(self, prompt_id: str, recording: Recording) -> None:
        """Replay all along an answer; where time is short, what there is time for."""
        self._calibrate(recording)
        plain = PolicyReplay([], None, self.timing)
        self.found[PLAIN][prompt_id] = plain.add(recording)
        for item in self._items:
            if self._is_over(_RECORDING) and not item.seconds and item.later:
                continue
            if item.seconds > self._most_s:
                continue
            item.replay.timing = self.timing
            began = time.perf_counter()
            found = item.replay.add(recording)
            item.seconds += time.perf_counter() - began
            for candidate in item.candidates:
                stats = found if isinstance(found, Stats) else found[candidate.num_speculative_tokens or 0]
                self._take(candidate, prompt_id, stats)

    def _take(self, candidate: Candidate, prompt_id: str, stats: Stats) -> None:
        self.found[candidate.name][prompt_id] = stats
        for error in stats.errors:
            self.failed.setdefault(candidate.name, error)

    def _calibrate(self, recording: Recording) -> None:
        """Learn from the rounds that wrote an answer how fast the machine is now, and what a round takes besides."""
        for each in recording.stats.records[1:]:  # the first one reads the prompt
            if not each.drafted:
                self.costs.observe(each.rows, each.context, each.target_s)
                self._rest_s += each.total_s - each.target_s - each.draft_s
                self._rest_tokens += each.emitted
        replayed = PolicyReplay([], None).add(recording)
        self._own_s += sum(each.total_s - each.target_s - each.draft_s for each in replayed.records)
        self._own_rounds += len(replayed.records)
        round_s = self._own_s / self._own_rounds
        token_s = max(0.0, self._rest_s / self._rest_tokens - round_s) if self._rest_tokens else 0.0
        self.timing = Timing(self.costs, round_s, token_s)


def _in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts so that categories come in turns."""
    groups: dict[str, list[Prompt]] = {}
    for each in prompts:
        groups.setdefault(each.category, []).append(each)
    turns: Iterator[tuple[Prompt | None, ...]] = itertools.zip_longest(*groups.values())
    return [each for turn in turns for each in turn if each is not None]
