"""Plain decoding against every candidate, with one kind of weights or several: paired and interleaved in one run."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar

from sakiyomi.bench.workload import Prompt
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Verification
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Spread, Stats, ratio, spread

PLAIN = "plain"
WARM_UP_TOKENS = 16

Progress = Callable[[int, int, str], None]
"""Called with the generations done, their number, and what was done last."""


class BenchGeneration(Protocol):
    """What the benchmark reads of a ``Generation``."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output."""

    @property
    def stats(self) -> Stats:
        """Its rounds and times."""


Setting = TypeVar("Setting")
"""A ``Speculation``: drafters and a policy, with all that they have learned."""


class BenchLLM(Protocol[Setting]):
    """What the benchmark calls of an ``LLM``."""

    def speculation(
        self, drafter: str, num_speculative_tokens: int | None, verification: Verification, /
    ) -> Setting | None:
        """Return a setting that has learned nothing; None is plain decoding."""

    def generate(
        self,
        prompt: str | list[dict[str, str]],
        params: SamplingParams,
        /,
        *,
        drafter: None,
        speculation: Setting | None,
    ) -> BenchGeneration:
        """Answer one prompt; without a setting, by plain decoding."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What to measure: a drafter, or several joined with +, and the tokens to draft in a round; None: as many as pay.

    ``verification``: which of them stand. ``weights`` and ``draft_weights``: which of several are measured, those of
    the target and those of its draft model. Raises OptionError where they can't work.
    """

    drafter: str
    num_speculative_tokens: int | None = None
    verification: Verification = "coupled"
    weights: str = ""
    draft_weights: str = ""

    def __post_init__(self) -> None:
        if self.drafter in ("", "none", PLAIN):
            raise OptionError(f"drafter={self.drafter!r}: must name a drafter; plain decoding is always measured")
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise OptionError(
                f"num_speculative_tokens={self.num_speculative_tokens}: must be at least 1, or None (as many as pay); "
                "plain decoding is always measured"
            )

    @property
    def name(self) -> str:
        """The name in results, like ``ngram k=5`` or ``bf16 model adaptive, draft int8``."""
        k = self.num_speculative_tokens
        way = "" if self.verification == "coupled" else f" {self.verification}"
        draft = f", draft {self.draft_weights}" if self.draft_weights else ""
        return _with(self.weights, f"{self.drafter} {'adaptive' if k is None else f'k={k}'}{way}{draft}")

    def keeps_tokens(self, params: SamplingParams) -> bool:
        """Return whether the tokens must be those of plain decoding; else it is their distribution that is."""
        return self.verification == "coupled" or params.temperature == 0


def plain_case(weights: str = "") -> str:
    """Return the name in results of plain decoding with these weights, like ``plain`` or ``bf16 plain``."""
    return _with(weights, PLAIN)


def _with(weights: str, name: str) -> str:
    return f"{weights} {name}" if weights else name


@dataclass(frozen=True, slots=True)
class Measurement:
    """One generation: ``case`` is the name of plain decoding or of a candidate."""

    prompt_id: str
    category: str
    case: str
    repeat: int
    token_ids: tuple[int, ...]
    stats: Stats


@dataclass(frozen=True, slots=True)
class Difference:
    """Output unlike the first plain one of its prompt and weights. A token is None where that output had ended."""

    prompt_id: str
    case: str
    repeat: int
    position: int
    plain_token: int | None
    token: int | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that couldn't be answered, and why."""

    prompt_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One case over the prompts of one category; ``category`` is None for all prompts.

    Counts are pooled. Times are first, for each prompt, the median over repeats: ``tpot_s`` and ``ttft_s``
    spread these over prompts, ``speedup`` spreads plain TPOT / TPOT over prompts, ``total_time_ratio`` is the
    sum of plain total times / the sum of total times, ``worst_total_time_ratio`` the lowest that this is of one
    prompt. For these ratios, above 1 is faster than plain, which is plain decoding with the case's own ``weights``.
    ``identical`` of ``compared`` prompts gave the plain output in every repeat; none is compared where the case keeps
    only the distribution.
    ``reference_...`` are the same against plain decoding with the weights that were named first. Other weights write
    other texts, so that ``reference_identical`` is a finding and not a test.
    """

    category: str | None
    case: str
    prompts: int
    acceptance_rate: float | None
    per_position_acceptance: tuple[float, ...]
    tokens_per_target_call: float | None
    mean_drafted: float | None
    mean_draft_length: float | None
    rounds_without_draft: float | None
    overhead: float | None
    tpot_s: Spread | None
    ttft_s: Spread | None
    speedup: Spread | None
    total_time_ratio: float | None
    worst_total_time_ratio: float | None
    identical: int
    compared: int
    weights: str
    reference_speedup: Spread | None
    reference_total_time_ratio: float | None
    reference_identical: int

    @property
    def is_plain(self) -> bool:
        """Whether this is plain decoding."""
        return self.case == plain_case(self.weights)

    @property
    def verdict(self) -> Literal["faster", "slower", "unclear"]:
        """``unclear`` where the spread of the speed-up includes 1, or comes from fewer than three prompts."""
        if self.speedup and self.speedup.count >= 3:
            if self.speedup.low > 1:
                return "faster"
            if self.speedup.high < 1:
                return "slower"
        return "unclear"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a run measured. ``partial``: it was interrupted, and only complete comparisons are summarised.

    ``weights``: their names, the reference first; one without a name where there was nothing to tell apart.
    """

    weights: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    params: SamplingParams
    repeats: int
    seed: int
    partial: bool
    measurements: tuple[Measurement, ...]
    summaries: tuple[Summary, ...]
    differences: tuple[Difference, ...]
    skipped: tuple[Skipped, ...]


def run_benchmark(
    llms: BenchLLM[Setting] | Mapping[tuple[str, str], BenchLLM[Setting]],
    prompts: Sequence[Prompt],
    candidates: Sequence[Candidate],
    params: SamplingParams | None = None,
    *,
    repeats: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    known: Sequence[Measurement] = (),
    learn: Callable[[Setting, str], None] | None = None,
    save: Callable[[Sequence[Measurement]], None] | None = None,
    enough: Callable[[], bool] | None = None,
) -> BenchResult:
    """Measure plain decoding and every candidate on every prompt, and compare their output.

    ``llms``: one, or several by the names of their weights and of their draft model's: ("int8", "") is the one that a
    candidate with weights int8 runs on. With each of the weights plain decoding is measured too, on the LLM whose draft
    weights have no name. The first weights are the reference: speed is compared with theirs, and with plain decoding
    of the same weights; the output has to be the same only with the same weights.

    Each prompt is answered by all cases one after another, in an order that changes (by ``seed``) from prompt
    to prompt, so that a machine that drifts is unfair to none. What a candidate learns it keeps from prompt to
    prompt, as in real use, but not from one repeat to the next, where it would remember the very answers.
    A prompt's own ``max_tokens`` is a limit too. An interrupt (Ctrl-C) ends the run with what is measured so far. A
    prompt that can't be answered is skipped and reported.
    ``known``: what an earlier run of the same measured, which isn't measured again; ``learn`` is called in its place,
    with the setting of a candidate and the prompt's id, so that it knows what it would. ``save`` is called with all
    measurements of a prompt, after each. ``enough``, called after each too, ends the run where it returns True.
    Raises OptionError for options that can't work, PromptError if no prompt at all can be answered.
    """
    if not isinstance(llms, Mapping):
        llms = {("", ""): llms}
    cases = _cases(llms, candidates)
    if repeats < 1:
        raise OptionError(f"repeats={repeats}: must be at least 1")
    if not prompts:
        raise OptionError("prompts=(): must be at least one prompt")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise OptionError("prompts: every id must be different")
    params = params or SamplingParams()

    measurements = list(known)
    done = {(each.prompt_id, each.repeat) for each in known}
    skipped: dict[str, Skipped] = {}
    partial = False
    report = progress or (lambda done, total, what: None)
    total = repeats * len(prompts) * len(cases)
    orders = _orders(list(cases), seed)
    try:
        report(0, total, "warm-up")
        settings = _settings(cases)
        _warm_up(cases, prompts, settings, params)
        for block, (repeat, prompt) in enumerate(itertools.product(range(repeats), prompts)):
            if block % len(prompts) == 0:
                settings = _settings(cases)
            if prompt.id in skipped:
                continue
            if (prompt.id, repeat) in done:
                for setting in settings.values():
                    if learn and setting is not None:
                        learn(setting, prompt.id)
                continue
            own = limited(params, prompt)
            begun = len(measurements)
            for i, case in enumerate(next(orders)):
                try:
                    generation = cases[case].llm.generate(prompt.input, own, drafter=None, speculation=settings[case])
                except PromptError as error:
                    skipped[prompt.id] = Skipped(prompt.id, str(error))
                    break
                measurements.append(
                    Measurement(
                        prompt.id,
                        prompt.category,
                        case,
                        repeat,
                        tuple(generation.token_ids),
                        generation.stats,
                    )
                )
                report(block * len(cases) + i + 1, total, f"{prompt.id}, {case}")
            if save and prompt.id not in skipped:
                save(measurements[begun:])
            if enough and enough():
                break
    except KeyboardInterrupt:
        partial = True
    if len(skipped) == len(prompts):
        raise PromptError(f"no prompt can be answered; the first: {next(iter(skipped.values())).reason}")

    comparable = {name for name, case in cases.items() if not case.candidate or case.candidate.keeps_tokens(params)}
    compared = [each for each in measurements if each.case in comparable]
    differences = _differences(compared, {name: plain_case(case.weights) for name, case in cases.items()})
    weights = tuple(dict.fromkeys(case.weights for case in cases.values()))
    other_texts = _differences(compared, dict.fromkeys(cases, plain_case(weights[0])))
    return BenchResult(
        weights=weights,
        candidates=tuple(candidates),
        params=params,
        repeats=repeats,
        seed=seed,
        partial=partial,
        measurements=tuple(measurements),
        summaries=_summaries(measurements, cases, comparable, differences, other_texts),
        differences=differences,
        skipped=tuple(skipped.values()),
    )


def limited(params: SamplingParams, prompt: Prompt) -> SamplingParams:
    """Return the parameters of one prompt, whose own limit of tokens may be lower."""
    most = min(params.max_new_tokens, prompt.max_tokens or params.max_new_tokens)
    return replace(params, max_new_tokens=most, min_new_tokens=min(params.min_new_tokens, most))


@dataclass(frozen=True, slots=True)
class _Case(Generic[Setting]):
    """A candidate, or None for plain decoding, with the LLM that it runs on."""

    weights: str
    llm: BenchLLM[Setting]
    candidate: Candidate | None = None


def _cases(
    llms: Mapping[tuple[str, str], BenchLLM[Setting]], candidates: Sequence[Candidate]
) -> dict[str, _Case[Setting]]:
    """Return all cases by name: those of the reference first, and plain decoding first of each weights."""
    unknown = [each.name for each in candidates if (each.weights, each.draft_weights) not in llms]
    plain = dict.fromkeys(weights for weights, _ in llms)
    if unknown or any((weights, "") not in llms for weights in plain):
        raise OptionError(
            f"llms={list(llms)}: must have one for the weights of every candidate, and of each weights one whose draft "
            f"weights have no name{f'; lacks that of {unknown[0]}' if unknown else ''}"
        )
    cases: dict[str, _Case[Setting]] = {}
    for weights in plain:
        cases[plain_case(weights)] = _Case(weights, llms[weights, ""])
        for each in candidates:
            if each.weights == weights:
                cases[each.name] = _Case(weights, llms[weights, each.draft_weights], each)
    if len(cases) < len(candidates) + len(plain):
        raise OptionError(f"candidates={[each.name for each in candidates]}: must all be different")
    return cases


def _settings(cases: Mapping[str, _Case[Setting]]) -> dict[str, Setting | None]:
    """Return a setting for each case that has learned nothing, None for plain decoding."""
    settings: dict[str, Setting | None] = {}
    for name, case in cases.items():
        settings[name] = None
        if candidate := case.candidate:
            settings[name] = case.llm.speculation(
                candidate.drafter, candidate.num_speculative_tokens, candidate.verification
            )
            assert settings[name] is not None, "a candidate drafts"
    return settings


def _warm_up(
    cases: Mapping[str, _Case[Setting]],
    prompts: Sequence[Prompt],
    settings: Mapping[str, Setting | None],
    params: SamplingParams,
) -> None:
    """Answer one prompt briefly in every case, so that loading and first calls are in no measurement."""
    tokens = min(params.max_new_tokens, WARM_UP_TOKENS)
    brief = replace(params, max_new_tokens=tokens, min_new_tokens=min(params.min_new_tokens, tokens))
    for prompt in prompts:
        try:
            for name, case in cases.items():
                case.llm.generate(prompt.input, brief, drafter=None, speculation=settings[name])
        except PromptError:  # reported when its turn comes
            continue
        return


def _orders(cases: list[str], seed: int) -> Iterator[list[str]]:
    """Yield orders without end: every case comes equally often at every place, after changing neighbours."""
    rng = random.Random(seed)
    while True:
        rng.shuffle(cases)
        for i in range(len(cases)):
            yield cases[i:] + cases[:i]


def _differences(measurements: Sequence[Measurement], plain: Mapping[str, str]) -> tuple[Difference, ...]:
    """Compare every output with the first one of its prompt by the case that ``plain`` names for its own."""
    first: dict[tuple[str, str], tuple[int, ...]] = {}
    for each in measurements:
        first.setdefault((each.prompt_id, each.case), each.token_ids)
    differences = []
    for each in measurements:
        reference = first.get((each.prompt_id, plain[each.case]), each.token_ids)
        pairs = itertools.zip_longest(reference, each.token_ids)
        for position, (plain_token, token) in enumerate(pairs):
            if plain_token != token:
                differences.append(Difference(each.prompt_id, each.case, each.repeat, position, plain_token, token))
                break
    return tuple(differences)


def _summaries(
    measurements: Sequence[Measurement],
    cases: Mapping[str, _Case[Setting]],
    comparable: set[str],
    differences: Sequence[Difference],
    other_texts: Sequence[Difference],
) -> tuple[Summary, ...]:
    """Summarise every case by category, then over all prompts."""
    blocks: dict[tuple[str, int], list[Measurement]] = {}
    for each in measurements:
        blocks.setdefault((each.prompt_id, each.repeat), []).append(each)
    # A block that was cut short would give some cases a prompt that others lack.
    complete = [each for block in blocks.values() if len(block) == len(cases) for each in block]
    different = {(each.prompt_id, each.case) for each in differences}
    other = {(each.prompt_id, each.case) for each in other_texts}
    summaries = []
    for category in (*dict.fromkeys(each.category for each in complete), None):
        rows = [each for each in complete if category in (None, each.category)]
        times = {name: _times(rows, name) for name in cases}
        reference = next(iter(times.values()))
        for name, case in cases.items():
            if rows:
                plain = times[plain_case(case.weights)]
                summary = _summary(category, name, case.weights, rows, times[name], plain, reference, different, other)
                if name not in comparable:
                    summary = replace(summary, identical=0, compared=0, reference_identical=0)
                summaries.append(summary)
    return tuple(summaries)


@dataclass(frozen=True, slots=True)
class _Times:
    """The medians over the repeats of one prompt and case, in seconds."""

    tpot_s: float | None
    ttft_s: float
    total_s: float


def _times(rows: Sequence[Measurement], case: str) -> dict[str, _Times]:
    by_prompt: dict[str, list[Stats]] = {}
    for each in rows:
        if each.case == case:
            by_prompt.setdefault(each.prompt_id, []).append(each.stats)
    times = {}
    for prompt_id, many in by_prompt.items():
        tpot = spread(stats.tpot_s for stats in many)
        times[prompt_id] = _Times(
            tpot_s=tpot.median if tpot else None,
            ttft_s=statistics.median(stats.ttft_s for stats in many),
            total_s=statistics.median(stats.total_s for stats in many),
        )
    return times


def _summary(
    category: str | None,
    case: str,
    weights: str,
    rows: Sequence[Measurement],
    times: dict[str, _Times],
    plain: dict[str, _Times],
    reference: dict[str, _Times],
    different: set[tuple[str, str]],
    other: set[tuple[str, str]],
) -> Summary:
    pooled = Stats.merge(each.stats for each in rows if each.case == case)
    total_ratios = [ratio(plain[prompt_id].total_s, each.total_s) for prompt_id, each in times.items()]
    return Summary(
        category=category,
        case=case,
        prompts=len(times),
        acceptance_rate=pooled.acceptance_rate,
        per_position_acceptance=pooled.per_position_acceptance,
        tokens_per_target_call=pooled.tokens_per_target_call,
        mean_drafted=pooled.mean_drafted,
        mean_draft_length=pooled.mean_draft_length,
        rounds_without_draft=pooled.rounds_without_draft,
        overhead=pooled.overhead,
        tpot_s=spread(each.tpot_s for each in times.values()),
        ttft_s=spread(each.ttft_s for each in times.values()),
        speedup=_speedup(plain, times),
        total_time_ratio=_total_time_ratio(plain, times),
        worst_total_time_ratio=min((each for each in total_ratios if each is not None), default=None),
        identical=sum((prompt_id, case) not in different for prompt_id in times),
        compared=len(times),
        weights=weights,
        reference_speedup=_speedup(reference, times),
        reference_total_time_ratio=_total_time_ratio(reference, times),
        reference_identical=sum((prompt_id, case) not in other for prompt_id in times),
    )


def _speedup(than: dict[str, _Times], times: dict[str, _Times]) -> Spread | None:
    return spread(ratio(than[prompt_id].tpot_s, each.tpot_s) for prompt_id, each in times.items())


def _total_time_ratio(than: dict[str, _Times], times: dict[str, _Times]) -> float | None:
    return ratio(sum(each.total_s for each in than.values()), sum(each.total_s for each in times.values()))
