"""The audit: it passes what is right, and finds each kind of wrong that it looks for."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import VOCAB, byte_tokenizer
from sakiyomi.audit import Audit, identity, law, price, rows, run_audit
from sakiyomi.audit.chance import POWER, ChiSquare, Counts, by_id, by_place, noncentrality, tail
from sakiyomi.audit.report import as_dict, render, verdict
from sakiyomi.bench.runner import Candidate
from sakiyomi.bench.workload import Prompt
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.distribution import Distribution
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Draft, Target, TargetOutput, Work
from sakiyomi.llm import LLM, Speculation
from sakiyomi.policy import FixedPolicy
from sakiyomi.sampling import SamplingParams

PROMPTS = (Prompt("one", "x", text="the cat sat on the mat, the cat sat"), Prompt("two", "y", text="abcabcabcab"))
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=6, seed=3)
CANDIDATES = [Candidate("ngram", 3), Candidate("ngram")]


def costs() -> ModelCosts:
    return ModelCosts(CostTable((1, 33), (0.01, 0.012)))


@pytest.fixture(scope="module")
def llm(llama: Target) -> LLM:
    return LLM(llama, byte_tokenizer(), costs=costs)


def text(audit: Audit) -> str:
    from rich.console import Console

    console = Console(width=120, file=io.StringIO())
    console.print(render(audit))
    return " ".join(console.file.getvalue().split())


# What a chi-square can say


def test_tails_are_those_of_the_tables():
    assert tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert tail(29.588, 10) == pytest.approx(0.001, abs=1e-5)
    assert tail(5.0, 0) == 1.0
    assert noncentrality(1, 0.05, 0.8) == pytest.approx(7.849, abs=1e-3)  # Cohen's tables
    assert noncentrality(10, 0.05, 0.9) == pytest.approx(20.53, abs=1e-2)


def counted(draws: int, source: np.random.Generator, wrong=lambda token, ids, weights: token, cells=by_place):
    """Return the test of draws from distributions that change, of which ``wrong`` makes something else."""
    counts = Counts(cells)
    for i in range(draws):
        weights = np.exp(source.standard_normal(300) * (2.5 if i % 3 else 0.5))
        ids = np.arange(300) if i % 2 else np.sort(source.permutation(20000)[:300])
        distribution = Distribution(None if i % 2 else ids, weights)
        counts.add(wrong(distribution.draw(source.random()), ids, weights), distribution)
    return counts.test()


@pytest.mark.parametrize("cells", [by_place, by_id])
def test_p_values_are_uniform_where_all_is_right(cells):
    source = np.random.default_rng(0)
    values = np.array([counted(150, source, cells=cells).p_value for _ in range(150)])
    for share in (0.05, 0.25, 0.5, 0.75):
        assert abs((values < share).mean() - share) < 4 * np.sqrt(share * (1 - share) / 150)


def test_each_way_to_tell_tokens_apart_sees_its_errors():
    def likeliest(token, ids, weights):
        return int(ids[weights.argmax()]) if token % 3 == 0 else token

    def even(token, ids, weights):
        evens = ids[ids % 2 == 0]
        return token if token % 2 == 0 else int(evens[np.searchsorted(evens, token) % evens.size])

    for wrong, cells in ((likeliest, by_place), (even, by_id)):
        assert counted(400, np.random.default_rng(0), wrong, cells).p_value < 1e-6


def test_an_error_of_the_size_that_is_stated_is_found_as_often_as_is_stated():
    """Two tokens of a half each: the hardest to see of all errors of a size, and it is seen as often as is stated."""
    source = np.random.default_rng(1)
    fair = Distribution(None, np.array([0.5001, 0.4999]))
    error = ChiSquare(0, 1, 400).visible(0.01)
    assert error == pytest.approx(0.0964, abs=1e-3)
    found = 0
    for _ in range(300):
        counts = Counts(by_place)
        for token in source.random(400) > 0.5 + error:
            counts.add(int(token), fair)
        found += counts.test().p_value < 0.01
    assert abs(found / 300 - POWER) < 0.06


def test_without_chance_there_is_nothing_to_test():
    counts = Counts(by_place)
    assert counts.test() == ChiSquare()
    for _ in range(500):
        counts.add(3, Distribution(np.array([3]), np.ones(1)))
    assert counts.test() == ChiSquare()
    assert (counts.test().p_value, counts.test().visible(0.001)) == (1.0, None)
    assert ChiSquare(1.0, 2, 3).visible(0.001) is None, "three draws show nothing"


# Its parts


def test_first_differences():
    assert identity.first_difference([1, 2], [1, 2]) is None
    assert [identity.first_difference(a, b) for a, b in (([1, 2], [1, 3]), ([1], [1, 2]), ([1, 2], []))] == [1, 1, 0]


@pytest.mark.parametrize("params", [replace(SAMPLED, temperature=0), SAMPLED], ids=["greedy", "sampled"])
def test_a_difference_is_told_in_text_with_the_gap_of_the_choice(llm, params):
    ids = llm.encode(PROMPTS[0].text)
    plain = llm.generate(ids, params, drafter=None).token_ids
    other = (*plain[:5], (plain[5] + 1) % 256, *plain[6:])
    found = identity.describe(llm.engine, llm.tokenizer, ids, params, plain, other, "one", "a case")
    assert (found.position, found.plain, found.other) == (5, *map(llm.tokenizer.decode, ([plain[5]], [other[5]])))
    assert found.before.endswith(llm.tokenizer.decode(plain[:5]))
    row = llm.target.forward([Work(llm.target.new_sequence(), [*ids, *plain[:5]], None, 1)])[0].logits[0].double()
    if params.temperature == 0:
        first, second = row.topk(2).values.tolist()
        assert found.gap == pytest.approx(first - second, rel=1e-5)
    assert found.gap > 0
    ended = identity.describe(llm.engine, llm.tokenizer, ids, params, plain, plain[:3], "one", "a case")
    assert (ended.position, ended.other) == (3, None)


class Uneven:
    """A target whose rows depend on how many there are, by one bit of one logit in the last of them."""

    def __init__(self, target: Target, from_rows: int, trees_only: bool = False) -> None:
        self._target, self._from_rows, self._trees_only = target, from_rows, trees_only

    def __getattr__(self, name: str):
        return getattr(self._target, name)

    def forward(self, work: Sequence[Work], *, hidden_layers=()) -> list[TargetOutput]:
        outputs = self._target.forward(work, hidden_layers=hidden_layers)
        if (
            not work[0].logit_rows
            or len(work[0].tokens) < self._from_rows
            or (self._trees_only and work[0].parents is None)
        ):
            return outputs
        logits = outputs[0].logits.clone()
        logits[-1, 7] = torch.nextafter(logits[-1, 7], torch.tensor(9.0))
        return [TargetOutput(logits)]


def test_rows_are_compared_bit_by_bit(llm):
    prompt = llm.encode(PROMPTS[0].text)
    right = list(rows.check_rows(llm.target, prompt))
    assert len(right) == rows.checks_per_context()
    assert {each.shape for each in right} == {"chain", "tree"}
    assert not any(each.different for each in right)
    wrong = [each for each in rows.check_rows(Uneven(llm.target, 9), prompt) if each.different]
    assert {each.rows for each in wrong} == {r for r in (*rows.ROWS, *rows.TREES) if r >= 9}
    assert all((each.different, 0 < each.largest < 1e-5) == (1, True) for each in wrong)
    wrong = [each for each in rows.check_rows(Uneven(llm.target, 9, trees_only=True), prompt) if each.different]
    assert {(each.shape, each.rows) for each in wrong} == {("tree", 9), ("tree", 16)}


@pytest.mark.parametrize("length", [1, 10, 100, 4000])
def test_rows_are_tested_as_far_as_the_context_has_room(llama, length):
    class Short:
        context_length = 24

        def __getattr__(self, name):
            return getattr(llama, name)

    found = list(rows.check_rows(Short(), [1] * length))
    assert found
    assert all(each.context + each.rows <= 24 for each in found)


class Liar(law.Itself):
    """Says that its drafts come from sharper distributions than they do."""

    def session(self, prompt, params, sampled=False):
        session = super().session(prompt, params, sampled)
        honest = session.propose

        def propose(budget, go_on):
            draft = honest(budget, go_on)
            said = draft.distributions and tuple(Distribution(q.ids, q.weights**4) for q in draft.distributions)
            return Draft(draft.tokens, draft.parents, draft.confidences, draft.drafter, said)

        session.propose = propose
        return session


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_the_distribution_of_the_text_is_tested(llm, way):
    prompts = [llm.encode(prompt.text) for prompt in PROMPTS]
    for drafter, right in ((law.Itself, True), (Liar, False)):
        check = law.LawCheck(way, "it", 5)
        settings = [
            Speculation((drafter(llm.target, VOCAB),), policy, way) for policy in (FixedPolicy(3), law.AllOfIt())
        ]
        check.run(llm.engine, settings, prompts, SAMPLED, 300, lambda what: None)
        assert check.drafted > check.accepted > 0
        assert (check.p_value() > 1e-3) == right
        assert check.tests["likeliness"].draws > 1200
        assert check.tests["positions"].freedom > check.tests["likeliness"].freedom > 3
        assert 0.03 < check.visible(1e-4) < 0.1


def test_the_limits_of_a_text_are_tested_with_it(llm):
    """An end that is held back is held back in the distribution that the text is compared with, too."""
    ending = replace(SAMPLED, logit_bias={256: 9.0}, min_new_tokens=3, top_k=None)
    check = law.LawCheck("block", "it", 5)
    setting = Speculation((law.Itself(llm.target, VOCAB),), FixedPolicy(3), "block")
    check.run(llm.engine, [setting], [[1, 2, 3]], ending, 100, lambda what: None)
    assert check.p_value() > 1e-3
    assert check.tests["likeliness"].freedom > 0


def test_the_price_is_that_of_the_distributions(llm):
    """Against both distributions worked out by hand, on every position of a text."""
    ids = llm.encode(PROMPTS[0].text)
    plain = llm.generate(ids, SAMPLED, drafter=None).token_ids
    found = price.measure_price(llm.engine, law.Itself(llm.target, VOCAB), ids, SAMPLED, plain)
    assert found.positions == len(plain)
    most, apart = [], []
    (output,) = llm.target.forward([Work(llm.target.new_sequence(), [*ids, *plain], None, len(plain) + 1)])
    for row in output.logits.numpy()[:-1]:
        laws = []
        for temperature in (SAMPLED.temperature, 1.5 * SAMPLED.temperature):
            kept = np.where(row >= np.sort(row)[-SAMPLED.top_k], np.exp((row - row.max()) / temperature), 0.0)
            laws.append(kept / kept.sum())
        most.append(np.minimum(*laws).sum())
        apart.append(laws[0] @ laws[1])
    assert found.rejection == pytest.approx(np.mean(most), rel=1e-4)
    assert found.apart == pytest.approx(np.mean(apart), rel=1e-4)
    assert found.apart < found.coupled < found.rejection + 0.1
    both = found + price.Price("itself", 3 * found.positions)
    assert (both.positions, both.rejection) == (4 * found.positions, pytest.approx(found.rejection / 4))
    assert (price.Price("x") + price.Price("x")).positions == 0


# All of it


def test_an_audit_of_what_is_right_passes_and_says_what_it_tested(llm):
    steps: list[tuple[int, int, str]] = []
    audit = run_audit(llm, PROMPTS, CANDIDATES, SAMPLED, runs=200, progress=lambda *step: steps.append(step))
    assert (audit.verdict, audit.failures, audit.differences, audit.partial) == ("passed", (), [], False)
    assert [done for done, _, _ in steps] == list(range(1, steps[-1][1] + 1))
    names = ["ngram k=3", "ngram adaptive", "itself k=3", "itself k=3 rejection", "itself k=3 block"]
    assert [case.name for case in audit.cases] == [*names, "itself with branches"]
    # All are compared greedy, and sampled but for the two that keep only the distribution.
    assert (audit.outputs, audit.greedy, audit.prompts) == (2 * (6 + 4), 2 * 6, 2)
    assert 150 < audit.tokens <= 12 * audit.outputs
    assert 0 < audit.accepted < audit.drafted
    assert [(each.verification, each.drafter, each.runs) for each in audit.laws] == [
        ("rejection", "itself", 200),
        ("block", "itself", 200),
    ]
    assert list(audit.prices) == ["itself"]
    assert 12 < audit.prices["itself"].positions <= 24
    assert set(audit.expected) == {"itself k=3", "itself k=3 rejection", "itself k=3 block"}
    shown = text(audit)
    for part in (
        "20 of 20 outputs",
        "the same bits",
        "each of 200 seeds",
        "PASSED: all 20",
        "itself k=3 block",
        "price",
    ):
        assert part in shown
    data = json.loads(json.dumps(as_dict(audit), allow_nan=False))
    assert (data["verdict"], data["identity"]["outputs"], len(data["distribution"]["tests"])) == ("passed", 20, 2)


def test_settings_that_sample_are_audited_as_they_are(llm):
    """With a draft model: each way to verify, branches, and its distribution under its own policies."""
    own = LLM(llm.target, llm.tokenizer, costs=costs, draft_model=ModelDrafter(llm.target, VOCAB, costs=costs()))
    candidates = [Candidate("model", 6), Candidate("ngram+model"), Candidate("ngram", 2)]
    audit = run_audit(own, PROMPTS[:1], candidates, SAMPLED, runs=100)
    names = [f"{name}{way}" for name in ("model k=6", "ngram+model adaptive") for way in ("", " rejection", " block")]
    assert [case.name for case in audit.cases] == [*names, "ngram k=2", "model with branches"]
    assert [(each.verification, each.drafter, each.tokens) for each in audit.laws] == [
        ("rejection", "model k=6 and ngram+model adaptive", 8),
        ("rejection", "itself", 5),
        ("block", "model k=6 and ngram+model adaptive", 8),
        ("block", "itself", 5),
    ]
    assert audit.verdict == "passed"


def test_what_was_not_tested_is_not_claimed(llm):
    audit = run_audit(llm, PROMPTS[:1], CANDIDATES[:1], replace(SAMPLED, top_k=1), runs=100)
    assert audit.verdict == "passed"
    assert "Nothing to test" in text(audit)
    assert "block with itself could not be tested" in verdict(audit)
    without = run_audit(llm, PROMPTS[:1], CANDIDATES[:1], SAMPLED, runs=0)
    assert (without.laws, "distribution" in verdict(without)) == ([], False)
    short = run_audit(llm, [Prompt("short", "x", text="q")], CANDIDATES[:1], replace(SAMPLED, max_new_tokens=2), runs=0)
    assert "NOT tested, since nothing was drafted: ngram k=3" in verdict(short)


class Meddling(LLM):
    """An LLM whose speculation changes the tokens."""

    def generate(self, prompt, params=None, **options):
        generation = super().generate(prompt, params, **options)
        if options.get("speculation") is None:
            return generation
        ids = generation.token_ids
        return replace(generation, token_ids=(*ids[:4], (ids[4] + 1) % 256, *ids[5:]))


def test_other_tokens_fail_and_are_shown(llm):
    audit = run_audit(Meddling(llm.target, llm.tokenizer, costs=costs), PROMPTS[:1], CANDIDATES[:1], SAMPLED, runs=0)
    assert (audit.verdict, len(audit.differences), audit.outputs) == ("failed", 8, 8)
    assert verdict(audit).startswith(
        "FAILED: 8 of 8 outputs differ from plain decoding, where the target's first choice"
    )
    assert re.search(r"DIFFERENT: ngram k=3, greedy, prompt one, token 4: after .* plain decoding wrote ", text(audit))
    assert "And 3 more" in text(audit)


def test_a_kernel_that_breaks_its_word_fails_and_one_that_promised_less_does_not(llm):
    for exactness, rows_from, failed in (("bit-exact", 33, True), ("numerics", 33, False), ("bit-exact", 40, False)):
        uneven = Uneven(llm.target, rows_from)
        uneven.exactness = exactness
        audit = run_audit(LLM(uneven, llm.tokenizer, costs=costs), PROMPTS[1:], CANDIDATES[:1], SAMPLED, runs=0)
        assert any("rows differ" in each for each in audit.failures) == failed
        assert ("other bits than when computed alone" in text(audit)) == (rows_from == 33)


def test_a_drafter_that_lies_fails(llm):
    lying = LLM(llm.target, llm.tokenizer, costs=costs, draft_model=Liar(llm.target, VOCAB))
    audit = run_audit(lying, PROMPTS, [Candidate("model", 3)], SAMPLED, runs=300)
    assert audit.verdict == "failed"
    assert re.search(r"rejection with model k=3 changed the distribution of the text \(p = \d", verdict(audit))
    assert not audit.differences, "its greedy outputs are right, its sampled ones are not compared"


def test_a_drafter_that_fails_fails(llm):
    class Broken(law.Itself):
        def session(self, prompt, params, sampled=False):
            session = super().session(prompt, params, sampled)
            session.propose = lambda budget, go_on: 1 / 0
            return session

    broken = LLM(llm.target, llm.tokenizer, costs=costs, draft_model=Broken(llm.target, VOCAB))
    audit = run_audit(broken, PROMPTS[:1], [Candidate("model", 3)], SAMPLED, runs=0)
    assert audit.failures == ("a drafter failed: itself: ZeroDivisionError: division by zero",)


def test_an_interrupt_keeps_what_was_found(llm):
    for stop_at in (5, 40, 80):

        def progress(done: int, total: int, what: str, stop_at: int = stop_at) -> None:
            if done == stop_at:
                raise KeyboardInterrupt

        audit = run_audit(llm, PROMPTS, CANDIDATES, SAMPLED, runs=100, progress=progress)
        assert (audit.partial, audit.verdict) == (True, "interrupted")
        assert len(audit.rows) == min(stop_at, 2 * rows.checks_per_context())
        assert (audit.outputs > 0) == (stop_at > 34)
        assert [law.runs for law in audit.laws] == ([18] if stop_at == 80 else [])
        assert "INTERRUPTED" in text(audit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": replace(SAMPLED, temperature=0)}, "temperature=0: must be above 0"),
        ({"runs": 50}, "runs=50: must be at least 100, or 0"),
        ({"runs": -1}, "runs=-1"),
        ({"prompts": ()}, "prompts=()"),
        ({"candidates": ()}, "candidates=()"),
        ({"candidates": CANDIDATES[:1] * 2}, "must all be different"),
    ],
)
def test_options_that_cannot_work(llm, changes, message):
    options = {"prompts": PROMPTS, "candidates": CANDIDATES, "params": SAMPLED, "runs": 0, **changes}
    with pytest.raises(OptionError, match=re.escape(message)):
        run_audit(llm, options.pop("prompts"), options.pop("candidates"), options.pop("params"), **options)


def test_prompts_that_cannot_be_answered_are_skipped(llm):
    long = Prompt("long", "x", text="a" * 2000)
    audit = run_audit(llm, [long, PROMPTS[1]], CANDIDATES[:1], SAMPLED, runs=0)
    assert (audit.prompts, [each.prompt_id for each in audit.skipped]) == (1, ["long"])
    assert "SKIPPED: prompt long" in text(audit)
    with pytest.raises(PromptError, match="no prompt can be answered"):
        run_audit(llm, [long], CANDIDATES[:1], SAMPLED, runs=0)
