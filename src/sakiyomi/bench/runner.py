"""Plain decoding against every candidate: paired on the same prompts, interleaved in one run."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

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

    ``verification``: which of them stand. Raises OptionError where they can't work.
    """

    drafter: str
    num_speculative_tokens: int | None = None
    verification: Verification = "coupled"

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
        """The name in results, like ``ngram k=5`` or ``suffix+ngram adaptive``."""
        k = self.num_speculative_tokens
        way = "" if self.verification == "coupled" else f" {self.verification}"
        return f"{self.drafter} {'adaptive' if k is None else f'k={k}'}{way}"

    def keeps_tokens(self, params: SamplingParams) -> bool:
        """Return whether the tokens must be those of plain decoding; else it is their distribution that is."""
        return self.verification == "coupled" or params.temperature == 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One generation: ``case`` is ``plain`` or the name of a candidate."""

    prompt_id: str
    category: str
    case: str
    repeat: int
    token_ids: tuple[int, ...]
    stats: Stats


@dataclass(frozen=True, slots=True)
class Difference:
    """Output unlike the first plain output of its prompt. A token is None where that output had ended."""

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
    prompt. For these ratios, above 1 is faster than plain.
    ``identical`` of ``compared`` prompts gave the plain output in every repeat; none is compared where the case keeps
    only the distribution.
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
    """What a run measured. ``partial``: it was interrupted, and only complete comparisons are summarised."""

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
    llm: BenchLLM[Setting],
    prompts: Sequence[Prompt],
    candidates: Sequence[Candidate],
    params: SamplingParams | None = None,
    *,
    repeats: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure plain decoding and every candidate on every prompt, and compare their output.

    Each prompt is answered by all cases one after another, in an order that changes (by ``seed``) from prompt
    to prompt, so that a machine that drifts is unfair to none. What a candidate learns it keeps from prompt to
    prompt, as in real use, but not from one repeat to the next, where it would remember the very answers.
    An interrupt (Ctrl-C) ends the run with what is measured so far. A prompt that can't be answered is skipped
    and reported. Raises OptionError for options that can't work, PromptError if no prompt at all can be answered.
    """
    cases: dict[str, Candidate | None] = {PLAIN: None, **{each.name: each for each in candidates}}
    if repeats < 1:
        raise OptionError(f"repeats={repeats}: must be at least 1")
    if not prompts:
        raise OptionError("prompts=(): must be at least one prompt")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise OptionError("prompts: every id must be different")
    if len(cases) < len(candidates) + 1:
        raise OptionError(f"candidates={[each.name for each in candidates]}: must all be different")
    params = params or SamplingParams()

    measurements: list[Measurement] = []
    skipped: dict[str, Skipped] = {}
    partial = False
    report = progress or (lambda done, total, what: None)
    total = repeats * len(prompts) * len(cases)
    orders = _orders(list(cases), seed)
    try:
        report(0, total, "warm-up")
        _warm_up(llm, prompts, _settings(llm, cases), params)
        for block, (repeat, prompt) in enumerate(itertools.product(range(repeats), prompts)):
            if block % len(prompts) == 0:
                settings = _settings(llm, cases)
            if prompt.id in skipped:
                continue
            for i, case in enumerate(next(orders)):
                try:
                    generation = llm.generate(prompt.input, params, drafter=None, speculation=settings[case])
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
    except KeyboardInterrupt:
        partial = True
    if len(skipped) == len(prompts):
        raise PromptError(f"no prompt can be answered; the first: {next(iter(skipped.values())).reason}")

    comparable = {case for case, candidate in cases.items() if candidate is None or candidate.keeps_tokens(params)}
    differences = _differences([each for each in measurements if each.case in comparable])
    return BenchResult(
        candidates=tuple(candidates),
        params=params,
        repeats=repeats,
        seed=seed,
        partial=partial,
        measurements=tuple(measurements),
        summaries=_summaries(measurements, list(cases), comparable, differences),
        differences=differences,
        skipped=tuple(skipped.values()),
    )


def _settings(llm: BenchLLM[Setting], cases: dict[str, Candidate | None]) -> dict[str, Setting | None]:
    """Return a setting for each case that has learned nothing, None for plain decoding."""
    settings: dict[str, Setting | None] = {}
    for case, candidate in cases.items():
        settings[case] = None
        if candidate:
            settings[case] = llm.speculation(
                candidate.drafter, candidate.num_speculative_tokens, candidate.verification
            )
            assert settings[case] is not None, "a candidate drafts"
    return settings


def _warm_up(
    llm: BenchLLM[Setting], prompts: Sequence[Prompt], settings: dict[str, Setting | None], params: SamplingParams
) -> None:
    """Answer one prompt briefly in every case, so that loading and first calls are in no measurement."""
    tokens = min(params.max_new_tokens, WARM_UP_TOKENS)
    brief = replace(params, max_new_tokens=tokens, min_new_tokens=min(params.min_new_tokens, tokens))
    for prompt in prompts:
        try:
            for setting in settings.values():
                llm.generate(prompt.input, brief, drafter=None, speculation=setting)
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


def _differences(measurements: Sequence[Measurement]) -> tuple[Difference, ...]:
    """Compare every output, later plain ones too, with the first plain output of its prompt."""
    references: dict[str, tuple[int, ...]] = {}
    for each in measurements:
        if each.case == PLAIN:
            references.setdefault(each.prompt_id, each.token_ids)
    differences = []
    for each in measurements:
        reference = references.get(each.prompt_id, each.token_ids)
        pairs = itertools.zip_longest(reference, each.token_ids)
        for position, (plain_token, token) in enumerate(pairs):
            if plain_token != token:
                differences.append(Difference(each.prompt_id, each.case, each.repeat, position, plain_token, token))
                break
    return tuple(differences)


def _summaries(
    measurements: Sequence[Measurement], cases: list[str], comparable: set[str], differences: Sequence[Difference]
) -> tuple[Summary, ...]:
    """Summarise every case by category, then over all prompts."""
    blocks: dict[tuple[str, int], list[Measurement]] = {}
    for each in measurements:
        blocks.setdefault((each.prompt_id, each.repeat), []).append(each)
    # A block that was cut short would give some cases a prompt that others lack.
    complete = [each for block in blocks.values() if len(block) == len(cases) for each in block]
    different = {(each.prompt_id, each.case) for each in differences}
    summaries = []
    for category in (*dict.fromkeys(each.category for each in complete), None):
        rows = [each for each in complete if category in (None, each.category)]
        times = {case: _times(rows, case) for case in cases}
        for case in cases:
            if rows:
                summary = _summary(category, case, rows, times[case], times[PLAIN], different)
                summaries.append(summary if case in comparable else replace(summary, identical=0, compared=0))
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
    rows: Sequence[Measurement],
    times: dict[str, _Times],
    plain: dict[str, _Times],
    different: set[tuple[str, str]],
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
        speedup=spread(ratio(plain[prompt_id].tpot_s, each.tpot_s) for prompt_id, each in times.items()),
        total_time_ratio=ratio(
            sum(each.total_s for each in plain.values()), sum(each.total_s for each in times.values())
        ),
        worst_total_time_ratio=min((each for each in total_ratios if each is not None), default=None),
        identical=sum((prompt_id, case) not in different for prompt_id in times),
        compared=len(times),
    )
