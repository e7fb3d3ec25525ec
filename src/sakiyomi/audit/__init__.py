"""An audit of speculation on one's own model and prompts: is the text what it would be without?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sakiyomi.audit.identity import Difference, describe
from sakiyomi.audit.law import DRAFTED, POSITIONS, Itself, LawCheck, check_law
from sakiyomi.audit.rows import RowsCheck, check_rows, checks_per_context
from sakiyomi.bench.runner import Candidate, Progress
from sakiyomi.bench.workload import Prompt
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Drafter, Exactness, Verification
from sakiyomi.llm import LLM, Generation, Speculation
from sakiyomi.policy import FixedPolicy
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Expected, Stats

SIGNIFICANCE = 0.001  # the chance that an audit of a right engine fails in its tests of distributions
MOST_PROMPTS = 4  # whose distributions are tested: the shortest
LEAST_RUNS = 100  # for each of them


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """What stood of the drafts of one setting, sampled, over all prompts.

    ``expected``: what its acceptance makes to expect where the
    number is fixed and a model drafts, so that there is a draft in every round.
    """

    candidate: Candidate
    stats: Stats
    expected: Expected | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that couldn't be answered, and why."""

    prompt_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Audit:
    """What was tested and what was found. ``partial``: it was interrupted before all was tested.

    ``outputs``, of ``tokens`` in all, were compared with plain decoding's, ``greedy`` of them greedy. ``errors``: of
    drafters that failed and were left out.
    """

    exactness: Exactness
    partial: bool
    params: SamplingParams
    prompts: int
    outputs: int
    greedy: int
    tokens: int
    differences: tuple[Difference, ...]
    rows: tuple[RowsCheck, ...]
    laws: tuple[LawCheck, ...]
    acceptance: tuple[AcceptanceRow, ...]
    errors: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    @property
    def threshold(self) -> float:
        """The p-value below which one test of a distribution fails: SIGNIFICANCE, shared by all of them."""
        return SIGNIFICANCE / max(1, len(self.laws) * (POSITIONS + 1))

    @property
    def failures(self) -> tuple[str, ...]:
        """What was found wrong, a line each."""
        found = []
        if self.differences:
            found.append(f"{len(self.differences)} of {self.outputs} outputs differ from plain decoding")
        wrong = [each for each in self.rows if each.different]
        if wrong and self.exactness == "bit-exact":
            found.append(
                f"rows differ in bits in {len(wrong)} of {len(self.rows)} forwards of a model that is bit-exact"
            )
        for law in self.laws:
            lowest = min(each.p_value for each in (*law.positions, law.together))
            if lowest < self.threshold:
                found.append(f"{law.verification} changed the distribution of the text (p = {lowest:.1g})")
        found.extend(f"a drafter failed: {error}" for error in self.errors)
        return tuple(found)

    @property
    def verdict(self) -> Literal["passed", "failed", "interrupted"]:
        """``passed``: all was tested, and nothing found."""
        if self.failures:
            return "failed"
        return "interrupted" if self.partial else "passed"


@dataclass(slots=True)
class _Case:
    """A setting to audit, once for greedy and once for sampled outputs: what one remembers is the other's answer.

    ``keeps_tokens``: its sampled outputs too must be those of plain decoding.
    """

    candidate: Candidate
    greedy: Speculation
    setting: Speculation
    keeps_tokens: bool
    sampled: list[Stats] = field(default_factory=list)


@dataclass(slots=True)
class _Findings:
    outputs: int = 0
    greedy: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    rows: list[RowsCheck] = field(default_factory=list)
    laws: list[LawCheck] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def run_audit(
    llm: LLM,
    prompts: Sequence[Prompt],
    candidates: Sequence[Candidate],
    params: SamplingParams,
    *,
    runs: int = 400,
    progress: Progress | None = None,
) -> Audit:
    """Audit an LLM on prompts.

    ``params``: of the sampled texts; the greedy ones have its other settings. ``candidates``: what to compare with
    plain decoding. ``runs``: for each test of a distribution; 0: none. Where no candidate samples its drafts, the
    target drafts for itself at another temperature, so that rejection and block are tested all the same. An interrupt
    (Ctrl-C) ends the audit with what was found so far. Raises OptionError for options that can't work, PromptError if
    no prompt can be answered.
    """
    if not params.temperature:
        raise OptionError("temperature=0: must be above 0 here; greedy outputs are always compared")
    if 0 != runs < LEAST_RUNS:
        raise OptionError(f"runs={runs}: must be at least {LEAST_RUNS}, or 0 (no test of distributions)")
    if not prompts or not candidates:
        raise OptionError(f"{'prompts' if candidates else 'candidates'}=(): must be at least one")
    found = _Findings()
    encoded = dict(_encoded(llm, prompts, found))
    if not encoded:
        raise PromptError(f"no prompt can be answered; the first: {found.skipped[0].reason}")
    cases = [_case(llm, each) for each in candidates]
    samplers = {each.name: each for case in cases for each in case.setting.drafters if _samples(each)}
    if not samplers:
        itself = Itself(llm.target, llm.target.vocab_size, costs=llm.costs(), eos_ids=llm.tokenizer.eos_ids)
        samplers = {itself.name: itself}
        ways: tuple[Verification, ...] = ("coupled", "rejection", "block")
        cases += [_of_itself(itself, way) for way in ways]
    laws = [(way, drafter) for drafter in samplers.values() for way in _SAMPLING] if runs else []
    by_length = sorted(encoded.values(), key=len)
    shortest = by_length[: min(MOST_PROMPTS, max(1, runs // LEAST_RUNS))]
    contexts = by_length[:1] + by_length[1:][-1:]
    total = 2 * len(encoded) * (1 + len(cases)) + len(contexts) * checks_per_context() + len(laws) * runs
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total, what)

    partial = False
    try:
        for prompt in contexts:
            for check in check_rows(llm.target, prompt):
                found.rows.append(check)
                step(f"{check.rows} rows after {check.context} tokens")
        for prompt_id, ids in encoded.items():
            _compare(llm, prompt_id, ids, cases, params, found, step)
        for way, drafter in laws:
            found.laws.append(check_law(llm.engine, drafter, way, shortest, params, runs, step))
    except KeyboardInterrupt:
        partial = True
    return Audit(
        exactness=llm.exactness,
        partial=partial,
        params=params,
        prompts=len(encoded),
        outputs=found.outputs,
        greedy=found.greedy,
        tokens=found.tokens,
        differences=tuple(found.differences),
        rows=tuple(found.rows),
        laws=tuple(found.laws),
        acceptance=tuple(_acceptance(llm, case) for case in cases if case.sampled),
        errors=tuple(dict.fromkeys(found.errors)),
        skipped=tuple(found.skipped),
    )


_SAMPLING: tuple[Verification, ...] = ("rejection", "block")


def _encoded(llm: LLM, prompts: Sequence[Prompt], found: _Findings) -> Iterator[tuple[str, list[int]]]:
    """Yield the token ids of the prompts that can be answered."""
    for prompt in prompts:
        try:
            ids = llm.encode(prompt.input)
            llm.engine.request(ids, SamplingParams())
        except PromptError as error:
            found.skipped.append(Skipped(prompt.id, str(error)))
        else:
            yield prompt.id, ids


def _samples(drafter: Drafter) -> bool:
    """Return whether a drafter's drafts are samples where samples are wanted."""
    return drafter.session([0], SamplingParams(temperature=1.0), True).sampled


def _case(llm: LLM, candidate: Candidate) -> _Case:
    options = (candidate.drafter, candidate.num_speculative_tokens, candidate.verification)
    greedy, setting = llm.speculation(*options), llm.speculation(*options)
    keeps_tokens = candidate.verification == "coupled" or not any(map(_samples, setting.drafters))
    return _Case(candidate, greedy, setting, keeps_tokens)


def _of_itself(itself: Itself, way: Verification) -> _Case:
    candidate = Candidate(itself.name, DRAFTED, way)
    setting = Speculation((itself,), FixedPolicy(DRAFTED), way)
    return _Case(candidate, setting, setting, way == "coupled")


def _compare(
    llm: LLM,
    prompt_id: str,
    ids: list[int],
    cases: Sequence[_Case],
    params: SamplingParams,
    found: _Findings,
    step: Callable[[str], None],
) -> None:
    """Answer a prompt by plain decoding and in every case, greedy and sampled, and compare."""
    for wanted in (replace(params, temperature=0.0), params):
        plain = llm.generate(ids, wanted, drafter=None)
        step(f"{prompt_id}, plain")
        for case in cases:
            greedy = wanted.temperature == 0
            generation = _generate(llm, ids, wanted, case.greedy if greedy else case.setting, found.errors)
            if not greedy:
                case.sampled.append(generation.stats)
            if greedy or case.keeps_tokens:
                found.outputs += 1
                found.greedy += greedy
                found.tokens += len(generation.token_ids)
                name = f"{case.candidate.name}, {'greedy' if greedy else 'sampled'}"
                difference = describe(
                    llm.engine, llm.tokenizer, ids, wanted, plain.token_ids, generation.token_ids, prompt_id, name
                )
                if difference:
                    found.differences.append(difference)
            step(f"{prompt_id}, {case.candidate.name}")


def _generate(llm: LLM, ids: list[int], params: SamplingParams, setting: Speculation, errors: list[str]) -> Generation:
    """Return an answer, and take note of drafters that fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the statistics have them
        generation = llm.generate(ids, params, speculation=setting)
    errors.extend(generation.stats.errors)
    return generation


def _acceptance(llm: LLM, case: _Case) -> AcceptanceRow:
    stats, k = Stats.merge(case.sampled), case.candidate.num_speculative_tokens
    expected = None
    costs = case.setting.drafters[0].costs if len(case.setting.drafters) == 1 else None
    if k is not None and costs is not None and stats.alpha is not None:
        context, ours = sum(record.context for record in stats.records) // len(stats.records), llm.costs()
        expected = Expected(
            stats.alpha,
            k,
            plain_s=ours.seconds(1, context),
            draft_s=k * costs.seconds(1, context),
            target_s=ours.seconds(k + 1, context),
            overhead_s=stats.verify_s / stats.target_calls,
        )
    return AcceptanceRow(case.candidate, stats, expected)


__all__ = ["AcceptanceRow", "Audit", "Difference", "LawCheck", "RowsCheck", "run_audit"]
