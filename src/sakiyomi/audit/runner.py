"""All tests of an audit, one after another, and what they found so far."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sakiyomi.audit.identity import Difference, describe
from sakiyomi.audit.law import DRAFTED, AllOfIt, Itself, LawCheck
from sakiyomi.audit.price import Price, measure_price
from sakiyomi.audit.rows import RowsCheck, check_rows, checks_per_context
from sakiyomi.bench.runner import Candidate, Progress, Skipped
from sakiyomi.bench.workload import Prompt
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Drafter, Exactness, Verification
from sakiyomi.llm import LLM, Speculation
from sakiyomi.policy import FixedPolicy
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Expected, Stats

SIGNIFICANCE = 0.001  # the chance that an audit of a right engine fails in its tests of distributions, or a little more
MOST_PROMPTS = 4  # whose distributions are tested: the shortest
LEAST_RUNS = 100  # for each of them
_FEWEST_TOKENS, _MOST_TOKENS = 5, 12  # of a run
_SAMPLING: tuple[Verification, ...] = ("rejection", "block")


@dataclass(slots=True)
class Case:
    """A setting that is audited, once for greedy and once for sampled outputs, since one remembers the other's answer.

    ``keeps_tokens``: its sampled outputs too must be those of plain decoding. ``num_speculative_tokens``: None for as
    many as pay, or where it isn't one number. ``greedy_stats``, ``stats``: what its outputs said.
    """

    name: str
    verification: Verification
    num_speculative_tokens: int | None
    greedy: Speculation
    sampled: Speculation
    keeps_tokens: bool
    greedy_stats: list[Stats] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        """Draft tokens that were checked, greedy and sampled."""
        return sum(each.drafted for each in (*self.greedy_stats, *self.stats))

    def acceptance(self) -> Stats:
        """Return the statistics of the sampled outputs."""
        return Stats.merge(self.stats)

    def expected(self, llm: LLM) -> Expected | None:
        """Return the speed to expect of its acceptance; None but for a model that drafts a fixed number alone."""
        stats, k = self.acceptance(), self.num_speculative_tokens
        costs = self.sampled.drafters[0].costs if len(self.sampled.drafters) == 1 else None
        if k is None or costs is None or stats.alpha is None:
            return None
        context, ours = sum(record.context for record in stats.records) // len(stats.records), llm.costs()
        return Expected(
            stats.alpha,
            k,
            plain_s=ours.seconds(1, context),
            draft_s=k * costs.seconds(1, context),
            target_s=ours.seconds(k + 1, context),
            overhead_s=stats.verify_s / stats.target_calls,
        )


@dataclass(slots=True)
class Audit:
    """What was tested and found so far. ``partial``: it was interrupted before all was tested.

    ``outputs``, of ``tokens`` in all, were compared with plain decoding's, ``greedy`` of them greedy; ``drafted`` and
    ``accepted`` draft tokens were in them. ``prices``: of the drafters that sample, by name. ``expected``: of each case
    the speed to expect. ``errors``: of drafters that failed and were left out.
    """

    exactness: Exactness
    params: SamplingParams
    partial: bool = False
    prompts: int = 0
    outputs: int = 0
    greedy: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    differences: list[Difference] = field(default_factory=list)
    rows: list[RowsCheck] = field(default_factory=list)
    laws: list[LawCheck] = field(default_factory=list)
    prices: dict[str, Price] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    expected: dict[str, Expected] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """The p-value below which one test of a distribution fails: SIGNIFICANCE, shared by all of them."""
        return SIGNIFICANCE / max(1, sum(len(law.tests) for law in self.laws))

    @property
    def failures(self) -> tuple[str, ...]:
        """What was found wrong, a line each."""
        found = []
        if self.differences:
            widest = max(each.gap for each in self.differences)
            found.append(
                f"{len(self.differences)} of {self.outputs} outputs differ from plain decoding, where the target's "
                f"first choice was ahead of its second by up to {widest:.2g}; the model is {self.exactness}"
            )
        wrong = [each for each in self.rows if each.different]
        if wrong and self.exactness == "bit-exact":
            found.append(f"rows differ in bits in {len(wrong)} of {len(self.rows)} forwards of a bit-exact model")
        for law in self.laws:
            if (p := law.p_value()) < self.threshold:
                found.append(
                    f"{law.verification} with {law.drafter} changed the distribution of the text (p = {p:.1g}; where "
                    "that is near, other and more seeds settle it)"
                )
        errors = dict.fromkeys((*self.errors, *(error for law in self.laws for error in law.errors)))
        found.extend(f"a drafter failed: {error}" for error in errors)
        return tuple(found)

    @property
    def verdict(self) -> Literal["passed", "failed", "interrupted"]:
        """``passed``: all was tested, and nothing found."""
        if self.failures:
            return "failed"
        return "interrupted" if self.partial else "passed"


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

    ``params``: of the sampled texts; the greedy ones have its other settings. ``candidates``: drafters and numbers of
    draft tokens; their way to verify is not looked at, since those that sample are audited with each. ``runs``: for
    each test of a distribution; 0: none. The target drafts for itself too, at another temperature, so that rejection
    and block are tested whatever the candidates are. An interrupt (Ctrl-C) ends the audit with what was found so far.
    Raises OptionError for options that can't work, PromptError if no prompt can be answered.
    """
    if not params.temperature:
        raise OptionError("temperature=0: must be above 0 here; greedy outputs are always compared")
    if 0 != runs < LEAST_RUNS:
        raise OptionError(f"runs={runs}: must be at least {LEAST_RUNS}, or 0 (no test of distributions)")
    if not prompts or not candidates:
        raise OptionError(f"{'prompts' if candidates else 'candidates'}=(): must be at least one")
    if len(set(candidates)) < len(candidates):
        raise OptionError(f"candidates={[each.name for each in candidates]}: must all be different")
    audit = Audit(llm.exactness, params)
    encoded = _encoded(llm, prompts, audit)
    itself = Itself(llm.target, llm.target.vocab_size, costs=llm.costs(), eos_ids=llm.tokenizer.eos_ids)
    audit.cases = _cases(llm, candidates, itself)
    laws = _laws(audit.cases, itself) if runs else []
    samplers = {each.name: each for case in audit.cases for each in case.sampled.drafters if each.samples}
    by_length = sorted(encoded.values(), key=len)
    shortest = by_length[: min(MOST_PROMPTS, max(1, runs // LEAST_RUNS))]
    contexts = by_length[:1] + by_length[1:][-1:]
    total = (
        len(encoded) * (2 * (1 + len(audit.cases)) + len(samplers))
        + len(contexts) * checks_per_context()
        + len(laws) * runs
    )
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total, what)

    try:
        for prompt in contexts:
            for check in check_rows(llm.target, prompt):
                audit.rows.append(check)
                step(f"{check.rows} rows after {check.context} tokens")
        for prompt_id, ids in encoded.items():
            text = _compare(llm, prompt_id, ids, audit, step)
            for name, drafter in samplers.items():
                price = measure_price(llm.engine, drafter, ids, params, text)
                audit.prices[name] = audit.prices.get(name, Price(name)) + price
                step(f"{prompt_id}, {name} along the text")
        for law, settings in laws:
            audit.laws.append(law)
            law.run(llm.engine, settings, shortest, params, runs, step)
    except KeyboardInterrupt:
        audit.partial = True
    for case in audit.cases:
        if case.stats and (expected := case.expected(llm)):
            audit.expected[case.name] = expected
    return audit


def _encoded(llm: LLM, prompts: Sequence[Prompt], audit: Audit) -> dict[str, list[int]]:
    """Return the token ids of the prompts that can be answered."""
    encoded = {}
    for prompt in prompts:
        try:
            ids = llm.encode(prompt.input)
            llm.engine.request(ids, SamplingParams())
        except PromptError as error:
            audit.skipped.append(Skipped(prompt.id, str(error)))
        else:
            encoded[prompt.id] = ids
    if not encoded:
        raise PromptError(f"no prompt can be answered; the first: {audit.skipped[0].reason}")
    audit.prompts = len(encoded)
    return encoded


def _cases(llm: LLM, candidates: Sequence[Candidate], itself: Itself) -> list[Case]:
    """Return what to compare with plain decoding.

    Where nothing is sampled the three ways to verify are one. Branches are audited with a policy of their own, since
    the others may never check any.
    """
    cases = []
    sampler: Drafter | None = None
    for candidate in candidates:
        drafter, k = candidate.drafter, candidate.num_speculative_tokens
        samplers = [each for each in llm.speculation(drafter, k).drafters if each.samples]
        sampler = sampler or next(iter(samplers), None)
        for way in ("coupled", *(_SAMPLING if samplers else ())):
            settings = llm.speculation(drafter, k, way), llm.speculation(drafter, k, way)
            name = replace(candidate, verification=way).name
            cases.append(Case(name, way, k, *settings, keeps_tokens=way == "coupled"))
    if sampler is None:
        for way in ("coupled", *_SAMPLING):
            setting = Speculation((itself,), FixedPolicy(DRAFTED), way)
            name = Candidate(itself.name, DRAFTED, way).name
            cases.append(Case(name, way, DRAFTED, setting, setting, keeps_tokens=way == "coupled"))
    branching = sampler or itself
    setting = Speculation((branching,), AllOfIt(), "coupled")
    cases.append(Case(f"{branching.name} with branches", "coupled", None, setting, setting, keeps_tokens=True))
    return cases


def _laws(cases: Sequence[Case], itself: Itself) -> list[tuple[LawCheck, list[Speculation]]]:
    """Return the tests of distributions: of the settings that sample, and of the target as its own draft model."""
    laws = []
    for way in _SAMPLING:
        own = [case for case in cases if case.verification == way and itself not in case.sampled.drafters]
        longest = max((case.num_speculative_tokens or 0 for case in own), default=0)
        tokens = min(max(_FEWEST_TOKENS, longest + 2), _MOST_TOKENS)
        if own:
            names = " and ".join(case.name.removesuffix(f" {way}") for case in own)
            laws.append((LawCheck(way, names, tokens), [case.sampled for case in own]))
        policies = FixedPolicy(DRAFTED), AllOfIt()
        settings = [Speculation((itself,), policy, way) for policy in policies]
        laws.append((LawCheck(way, itself.name, _FEWEST_TOKENS), settings))
    return laws


def _compare(llm: LLM, prompt_id: str, ids: list[int], audit: Audit, step: Callable[[str], None]) -> tuple[int, ...]:
    """Answer a prompt by plain decoding and in every case, greedy and sampled, and compare.

    Returns the text of plain decoding, sampled.
    """
    for params in (replace(audit.params, temperature=0.0), audit.params):
        greedy = params.temperature == 0
        plain = llm.generate(ids, params, drafter=None)
        step(f"{prompt_id}, plain")
        for case in audit.cases:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the statistics have them
                generation = llm.generate(ids, params, speculation=case.greedy if greedy else case.sampled)
            stats, tokens = generation.stats, generation.token_ids
            audit.errors.extend(stats.errors)
            (case.greedy_stats if greedy else case.stats).append(stats)
            if greedy or case.keeps_tokens:
                audit.outputs += 1
                audit.greedy += greedy
                audit.tokens += len(tokens)
                audit.drafted += stats.drafted
                audit.accepted += stats.accepted
                name = f"{case.name}, {'greedy' if greedy else 'sampled'}"
                found = describe(llm.engine, llm.tokenizer, ids, params, plain.token_ids, tokens, prompt_id, name)
                audit.differences.extend([found] if found else [])
            step(f"{prompt_id}, {case.name}")
    return plain.token_ids
