"""The benchmark: workloads, pairing, interleaving, identity and what is shown. A scripted LLM, no clock."""

from __future__ import annotations

import functools
import json
import re
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conftest import byte_tokenizer, make_reference, make_target
from sakiyomi import core, drafters
from sakiyomi.bench import (
    BenchResult,
    Candidate,
    Prompt,
    Quality,
    Summary,
    WeightsFacts,
    as_dict,
    builtin_workload,
    bytes_per_token,
    load_workload,
    machine_facts,
    markdown,
    render,
    run_benchmark,
    select,
)
from sakiyomi.bench.report import model_facts
from sakiyomi.bench.weights import NamedWeights, parse
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Draft, GoOn, RoundRecord, always
from sakiyomi.llm import LLM
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Spread, Stats


@dataclass(frozen=True)
class FakeGeneration:
    token_ids: tuple[int, ...]
    stats: Stats


def generation(
    tpot_s: float = 1.0, *, tokens: Sequence[int] = (1, 2, 3), accepted: int = 0, errors: tuple[str, ...] = ()
) -> FakeGeneration:
    """Two rounds: a first chunk of one token after a second, then ``accepted`` + 1 tokens of 4 drafted."""
    drafted = 4 if accepted else 0
    rounds = [(0, 0), (drafted, accepted)]
    records = tuple(
        RoundRecord("ngram", d, d, a, a + 1, d + 1, 0, 0.0, 0.75, 0.25, total_s=1, errors=errors if i else ())
        for i, (d, a) in enumerate(rounds)
    )
    return FakeGeneration(tuple(tokens), Stats(records, ttft_s=1.0, total_s=1.0 + tpot_s * (accepted + 1)))


@dataclass(eq=False)
class Setting:
    """A setting that remembers what it was used for."""

    drafter: str
    k: int | None
    calls: list[Call]


@dataclass
class Call:
    prompt: str
    params: SamplingParams
    setting: Setting | None

    @property
    def drafter(self) -> str | None:
        return self.setting.drafter if self.setting else None

    @property
    def k(self) -> int | None:
        return self.setting.k if self.setting else None


class FakeLLM:
    """Answers by ``script(call, number of earlier measured calls like it)`` and remembers its calls."""

    def __init__(self, script: Callable[[Call, int], FakeGeneration] = lambda call, nth: generation()) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.settings: list[Setting] = []

    def speculation(self, drafter: str, num_speculative_tokens: int | None, verification: str) -> Setting:
        self.settings.append(Setting(drafter, num_speculative_tokens, []))
        return self.settings[-1]

    def generate(
        self, prompt: str | list[dict[str, str]], params: SamplingParams, *, drafter: None, speculation: Setting | None
    ) -> FakeGeneration:
        assert drafter is None, "without a setting, plain decoding"
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        call = Call(text, params, speculation)
        same = [c for c in self.calls if (c.prompt, c.drafter, c.k) == (text, call.drafter, call.k)]
        earlier = [c for c in same if c.params == params]
        self.calls.append(call)
        if speculation:
            speculation.calls.append(call)
        return self.script(call, len(earlier))

    def measured(self, params: SamplingParams) -> list[Call]:
        return [call for call in self.calls if call.params == params]


PARAMS = SamplingParams(max_new_tokens=64)
NGRAM = Candidate("ngram", 5)
SUFFIX = Candidate("suffix", 3)
BOTH = Candidate("suffix+ngram")


def prompts(count: int, category: str = "all") -> list[Prompt]:
    return [Prompt(f"{category}-{i}", category, text=f"{category}-{i}") for i in range(count)]


def row(result: BenchResult, case: str, category: str | None = None) -> Summary:
    (found,) = [each for each in result.summaries if (each.case, each.category) == (case, category)]
    return found


def shown(result: BenchResult, width: int = 100) -> str:
    console = Console(width=width, color_system=None, record=True, file=None, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(render(result))
    return capture.get()


# ---------------------------------------------------------------- workload


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_builtin_workload_is_as_documented() -> None:
    workload = builtin_workload()
    assert Counter(prompt.category for prompt in workload) == dict.fromkeys(
        ("chat", "qa", "summarising", "code", "code-edit", "extraction"), 4
    )
    for prompt in workload:
        words = sum(len(message["content"].split()) for message in prompt.messages)
        assert 40 <= words <= 300, f"{prompt.id}: {words} words"
        assert prompt.messages[-1]["role"] == "user"
    for prompt in select(workload, ["summarising"]):
        passage = prompt.messages[0]["content"].partition("Text:\n")[2]
        assert 150 <= len(passage.split()) <= 250, prompt.id
    for prompt in select(workload, ["code-edit"]):
        code = prompt.messages[0]["content"].partition("```python\n")[2].partition("\n```")[0]
        assert 20 <= len(code.splitlines()) <= 40, prompt.id
        compile(code, prompt.id, "exec")


def test_a_workload_file_may_have_messages_or_prompts_defaults_and_unknown_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.jsonl",
        '{"id": "a", "category": "chat", "messages": [{"role": "user", "content": "hi", "name": "x"}], "turns": 2}',
        "",
        '{"prompt": "Once upon"}',
        '{"id": 7, "prompt": "先読み"}',
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n")
    first, second, third = load_workload(path)
    assert first == Prompt("a", "chat", ({"role": "user", "content": "hi"},))
    assert first.input == [{"role": "user", "content": "hi"}]
    assert second == Prompt("3", "all", text="Once upon")
    assert second.input == "Once upon", "a plain text stays one: no chat template"
    assert third == Prompt("7", "all", text="先読み")


GOOD = '{"id": "a", "prompt": "text"}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{broken", r"not JSON \(Expecting property name.*\); each line must be like"),
        ("[" * 100_000, r"not JSON \(.*recursion"),
        ("3", "not a JSON object; each line must be like"),
        ('{"id": "b"}', "has neither messages nor prompt; each line must be like"),
        ('{"prompt": ""}', "prompt: must be a non-empty text"),
        ('{"prompt": "\\ud800"}', "prompt: has half a .* escape pair; write the character itself"),
        ('{"messages": []}', "messages: must be a list with at least one message"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]: must be an object with role and content"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"messages\[0\]\.content: must be a non-empty text"),
        ('{"prompt": "x", "category": 5}', "category 5: must be a text"),
        (GOOD, "the id 'a' is there twice; every id must be different"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong_and_what_works(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "w.jsonl", GOOD, line)
    with pytest.raises(OptionError, match=rf"^workload .*w\.jsonl, line 2: {problem}") as caught:
        load_workload(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + '{"prompt": "Zürich"}'.encode("latin-1"))
    with pytest.raises(OptionError, match=r"line 2: not UTF-8 \(byte 14\); save the file as UTF-8"):
        load_workload(path)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"absent\.jsonl: can't be read \(No such file.*must be a file of JSON"):
        load_workload(tmp_path / "absent.jsonl")
    with pytest.raises(OptionError, match=r"can't be read"):
        load_workload(tmp_path)
    with pytest.raises(OptionError, match=r"w\.jsonl: has no prompts; each line must be like"):
        load_workload(write(tmp_path / "w.jsonl", "", " "))


def test_select_keeps_the_order_and_limits_each_category() -> None:
    workload = [*prompts(3, "a"), *prompts(3, "b"), *prompts(3, "c")]
    chosen = select(workload, ["c", "a"], per_category=2)
    assert [prompt.id for prompt in chosen] == ["a-0", "a-1", "c-0", "c-1"]
    assert select(workload) == tuple(workload)
    with pytest.raises(OptionError, match="category 'd': not in this workload; there are a, b, c"):
        select(workload, ["d"])
    with pytest.raises(OptionError, match="per_category=0: must be at least 1"):
        select(workload, per_category=0)


# ---------------------------------------------------------------- runner


def test_every_case_is_asked_as_named_after_one_brief_warm_up() -> None:
    llm = FakeLLM()
    run_benchmark(llm, prompts(2), [NGRAM, SUFFIX, BOTH], PARAMS)
    assert {(c.drafter, c.k) for c in llm.calls} == {(None, None), ("ngram", 5), ("suffix", 3), ("suffix+ngram", None)}
    warm_up, measured = llm.calls[:4], llm.calls[4:]
    assert {c.drafter for c in warm_up} == {None, "ngram", "suffix", "suffix+ngram"}
    assert all(c.params.max_new_tokens == 16 and c.prompt == "all-0" for c in warm_up)
    assert all(c.params == PARAMS for c in measured)
    assert len(measured) == 8


def test_a_candidate_has_a_name() -> None:
    assert [each.name for each in (NGRAM, BOTH, Candidate("auto"))] == [
        "ngram k=5",
        "suffix+ngram adaptive",
        "auto adaptive",
    ]


def test_what_a_setting_learns_it_keeps_within_a_repeat_only() -> None:
    llm = FakeLLM()
    run_benchmark(llm, prompts(3), [NGRAM, BOTH], PARAMS, repeats=2)
    warm_up, measured = llm.settings[:2], llm.settings[2:]
    assert [[call.params.max_new_tokens for call in each.calls] for each in warm_up] == [[16]] * 2, "thrown away"
    assert [each.drafter for each in measured] == ["ngram", "suffix+ngram"] * 2
    for each in measured:
        assert [call.prompt for call in each.calls] == ["all-0", "all-1", "all-2"]


def test_a_prompt_skipped_at_first_changes_no_setting_of_a_later_repeat() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        if call.prompt == "all-0":
            raise PromptError("prompt: too long")
        return generation()

    llm = FakeLLM(script)
    run_benchmark(llm, prompts(2), [NGRAM], PARAMS, repeats=2)
    assert [[call.prompt for call in each.calls if call.params == PARAMS][-1] for each in llm.settings[1:]] == [
        "all-1",
        "all-1",
    ]
    assert len(llm.settings) == 3


class Parrot:
    """A drafter that says again what it heard after these tokens in an earlier request, and nothing else."""

    name = "parrot"
    costs = None
    samples = False

    def __init__(self) -> None:
        self.heard: dict[tuple[int, ...], list[int]] = {}

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> ParrotSession:
        known = self.heard.get(tuple(prompt), [])
        self.heard[tuple(prompt)] = []
        return ParrotSession(list(known), self.heard[tuple(prompt)])


class ParrotSession:
    unread = 0

    def __init__(self, known: list[int], heard: list[int]) -> None:
        self.known, self.heard = known, heard

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        start = len(self.heard)
        return Draft(tuple(self.known[start : start + budget]))

    def observe(self, tokens: Sequence[int]) -> None:
        self.heard.extend(tokens)


@pytest.mark.parametrize("k", [4, None])
def test_no_answer_is_remembered_from_one_repeat_to_the_next(monkeypatch, llama, k) -> None:
    monkeypatch.setattr(drafters, "DRAFTERS", {"parrot": Parrot})
    llm = LLM(llama, byte_tokenizer(), drafter="none")
    workload = [
        Prompt("a", "x", text="the cat"),
        Prompt("b", "x", text="the dog"),
        Prompt("a again", "x", text="the cat"),
    ]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    result = run_benchmark(llm, workload, [Candidate("parrot", k)], params, repeats=2)
    assert result.differences == ()
    for repeat in (0, 1):
        accepted = {
            each.prompt_id: each.stats.accepted
            for each in result.measurements
            if each.repeat == repeat and each.case != "plain"
        }
        assert accepted["a"] == accepted["b"] == 0, "neither from warm-up, nor from the repeat before"
        if k:
            assert accepted["a again"] > 10, "but from the prompts before"
    # Negative control: one setting for both repeats would know the answers.
    monkeypatch.setattr(llm, "speculation", functools.cache(llm.speculation))
    result = run_benchmark(llm, workload[:1], [Candidate("parrot", 4)], params, repeats=2)
    assert [each.stats.accepted > 10 for each in result.measurements if each.case != "plain"][-1]


def test_warm_up_leaves_params_valid() -> None:
    params = SamplingParams(max_new_tokens=64, min_new_tokens=32)
    assert run_benchmark(FakeLLM(), prompts(1), [NGRAM], params).summaries
    short = SamplingParams(max_new_tokens=2)
    llm = FakeLLM()
    run_benchmark(llm, prompts(1), [], short)
    assert all(call.params.max_new_tokens == 2 for call in llm.calls)


def test_cases_are_interleaved_and_take_every_place_equally_often() -> None:
    llm = FakeLLM()
    run_benchmark(llm, prompts(6), [NGRAM, SUFFIX], PARAMS, repeats=2)
    calls = llm.measured(PARAMS)
    assert len(calls) == 6 * 2 * 3
    blocks = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [block[0].prompt for block in blocks] == [f"all-{i}" for i in range(6)] * 2, "repeats go round"
    for block in blocks:
        assert len({call.prompt for call in block}) == 1, "all cases of a prompt before the next prompt"
    places = Counter((block.index(call), call.drafter) for block in blocks for call in block)
    assert set(places.values()) == {4}, "12 blocks of 3 places: 4 each"


def test_the_order_depends_on_the_seed_only() -> None:
    def order(seed: int) -> list[str | None]:
        llm = FakeLLM()
        run_benchmark(llm, prompts(9), [NGRAM, SUFFIX], PARAMS, seed=seed)
        return [call.drafter for call in llm.calls]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_speedup_is_paired_by_prompt() -> None:
    # Prompts of very different speed, each twice as fast: unpaired medians would not give 2 with no spread.
    plain = {"all-0": 1.0, "all-1": 10.0, "all-2": 100.0, "all-3": 3.0}

    def script(call: Call, nth: int) -> FakeGeneration:
        return generation(plain[call.prompt] / (2 if call.drafter else 1), accepted=3 if call.drafter else 0)

    result = run_benchmark(FakeLLM(script), prompts(4), [NGRAM], PARAMS)
    ngram = row(result, "ngram k=5")
    assert ngram.speedup == Spread(median=2.0, low=2.0, high=2.0, count=4)
    assert ngram.verdict == "faster"
    assert ngram.acceptance_rate == 0.75
    assert ngram.tokens_per_target_call == 2.5
    assert ngram.mean_drafted == 2.0
    assert ngram.mean_draft_length == 4.0
    assert ngram.rounds_without_draft == 0.5
    assert ngram.overhead == 0.25
    assert row(result, "plain").speedup == Spread(1.0, 1.0, 1.0, 4)
    assert row(result, "plain").tokens_per_target_call == 1.0
    assert row(result, "plain").mean_draft_length is None


def test_the_worst_prompt_is_told_beside_the_total() -> None:
    # Totals: 2, 3 and 4 s of plain; 1.5, 6 and 2 s of the candidate.
    plain, own = [1.0, 2.0, 3.0], [0.5, 5.0, 1.0]

    def script(call: Call, nth: int) -> FakeGeneration:
        return generation((own if call.drafter else plain)[int(call.prompt[-1])])

    result = run_benchmark(FakeLLM(script), prompts(3), [NGRAM], PARAMS)
    summary = row(result, "ngram k=5")
    assert summary.total_time_ratio == pytest.approx(9 / 9.5)
    assert summary.worst_total_time_ratio == 0.5
    assert row(result, "plain").worst_total_time_ratio == 1.0
    note = "Total time of plain / ngram k=5: 0.95 over all prompts; the worst prompt 0.50."
    assert note in " ".join(shown(result).split())
    assert f"- {note}" in markdown(result).splitlines()
    assert "plain / plain" not in shown(result)
    assert as_dict(result)["summaries"][-1]["worst_total_time_ratio"] == 0.5


def test_a_drafter_that_failed_is_told_loudly() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        if call.drafter == "suffix":
            return generation(
                errors=("suffix: ValueError: no",) if call.prompt != "all-0" else ("suffix: KeyError: 3",)
            )
        return generation()

    result = run_benchmark(FakeLLM(script), prompts(3), [NGRAM, SUFFIX], PARAMS, repeats=2)
    note = "FAILED: suffix k=3, in 6 answers, which went on without it: suffix: KeyError: 3; suffix: ValueError: no"
    for text in (shown(result), markdown(result)):
        assert note in " ".join(text.split())
        assert text.count("FAILED") == 1
    failed = [each["errors"] for each in as_dict(result)["measurements"] if each["case"] == "suffix k=3"]
    assert failed == [["suffix: KeyError: 3"], *[["suffix: ValueError: no"]] * 2] * 2
    assert "FAILED" not in shown(run_benchmark(FakeLLM(), prompts(3), [NGRAM, SUFFIX], PARAMS))


def test_times_are_the_median_over_repeats_before_they_are_paired() -> None:
    # One disturbed repeat of each case: mean would follow it, the median must not.
    plain, ngram = [4.0, 400.0, 4.0], [2.0, 2.0, 0.002]

    def script(call: Call, nth: int) -> FakeGeneration:
        return generation((ngram if call.drafter else plain)[nth])

    result = run_benchmark(FakeLLM(script), prompts(1), [NGRAM], PARAMS, repeats=3)
    summary = row(result, "ngram k=5")
    assert summary.speedup is not None
    assert summary.speedup.median == pytest.approx(2.0)
    assert summary.speedup.count == 1, "a prompt counts once, not once for each repeat"
    assert summary.total_time_ratio == pytest.approx(5.0 / 3.0)
    assert summary.ttft_s == Spread(1.0, 1.0, 1.0, 1)


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((2, 2, 2), "faster"),
        ((0.5, 0.5, 0.5), "slower"),
        ((0.5, 2, 2), "unclear"),
        ((0.5, 0.5, 2), "unclear"),
        ((1, 1, 1), "unclear"),
        ((2, 2), "unclear"),
    ],
)
def test_the_verdict_says_faster_or_slower_only_where_the_spread_agrees(
    factors: tuple[float, ...], verdict: str
) -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        return generation(1 / factors[int(call.prompt[-1])] if call.drafter else 1.0)

    result = run_benchmark(FakeLLM(script), prompts(len(factors)), [NGRAM], PARAMS)
    assert row(result, "ngram k=5").verdict == verdict
    assert verdict in shown(result)


def test_categories_are_summed_up_apart_and_together() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        fast = call.drafter and call.prompt.startswith("code")
        return generation(0.5 if fast else 1.0, accepted=4 if fast else 0)

    result = run_benchmark(FakeLLM(script), [*prompts(1, "chat"), *prompts(3, "code")], [NGRAM], PARAMS)
    assert [(each.category, each.case, each.prompts) for each in result.summaries] == [
        ("chat", "plain", 1),
        ("chat", "ngram k=5", 1),
        ("code", "plain", 3),
        ("code", "ngram k=5", 3),
        (None, "plain", 4),
        (None, "ngram k=5", 4),
    ]
    assert row(result, "ngram k=5", "chat").acceptance_rate is None
    assert row(result, "ngram k=5", "code").acceptance_rate == 1.0


def test_a_prompt_without_a_tpot_is_in_no_speedup() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        if call.prompt == "all-0" and call.drafter:
            whole = generation().stats
            return FakeGeneration((1, 2, 3), Stats(whole.records[:1], ttft_s=1.0, total_s=1.0))
        return generation()

    summary = row(run_benchmark(FakeLLM(script), prompts(3), [NGRAM], PARAMS), "ngram k=5")
    assert summary.prompts == 3
    assert summary.speedup is not None
    assert summary.speedup.count == 2


def test_a_different_token_is_never_hidden() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        if call.drafter == "ngram" and call.prompt == "all-1" and nth == 1:
            return generation(tokens=(1, 9, 3))
        if call.drafter == "suffix" and call.prompt == "all-2":
            return generation(tokens=(1, 2))
        return generation()

    result = run_benchmark(FakeLLM(script), prompts(3), [NGRAM, SUFFIX], PARAMS, repeats=2)
    found = {(d.prompt_id, d.case, d.repeat, d.position, d.plain_token, d.token) for d in result.differences}
    assert found == {
        ("all-1", "ngram k=5", 1, 1, 2, 9),
        ("all-2", "suffix k=3", 0, 2, 3, None),
        ("all-2", "suffix k=3", 1, 2, 3, None),
    }
    assert (row(result, "ngram k=5").identical, row(result, "ngram k=5").compared) == (2, 3)
    assert (row(result, "plain").identical, row(result, "plain").compared) == (3, 3)
    for text in (shown(result), markdown(result)):
        flat = " ".join(text.split())
        assert "DIFFERENT: ngram k=5, prompt all-1, repeat 2: first at token 1, where plain has 2" in flat
        assert "Same output" not in flat
        assert "2/3" in flat, "the table has a column for it now"


def test_plain_that_differs_from_itself_is_reported_too() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        return generation(tokens=(5, nth)) if call.drafter is None else generation(tokens=(5, 0))

    result = run_benchmark(FakeLLM(script), prompts(1), [NGRAM], PARAMS, repeats=2)
    assert [(each.case, each.repeat) for each in result.differences] == [("plain", 1)]


def test_identical_output_is_said_with_its_count() -> None:
    result = run_benchmark(FakeLLM(), prompts(3), [NGRAM, SUFFIX], PARAMS)
    assert result.differences == ()
    assert "identical to plain (6 of 6)" in shown(result)
    assert "3/3" not in shown(result), "the note says it"
    assert "3/3" in markdown(result)


def test_an_interrupt_keeps_what_was_measured_and_compares_only_whole_blocks() -> None:
    llm = FakeLLM()

    def script(call: Call, nth: int) -> FakeGeneration:
        if len(llm.measured(PARAMS)) == 2 * 3 + 2:  # in the middle of the third prompt
            raise KeyboardInterrupt
        return generation()

    llm.script = script
    result = run_benchmark(llm, prompts(5), [NGRAM, SUFFIX], PARAMS)
    assert result.partial
    assert len(result.measurements) == 7
    assert {each.prompts for each in result.summaries} == {2}
    assert "PARTIAL: the run was interrupted" in shown(result)
    assert as_dict(result)["partial"] is True


def test_a_difference_in_the_interrupted_block_is_reported() -> None:
    llm = FakeLLM()

    def script(call: Call, nth: int) -> FakeGeneration:
        if len(llm.measured(PARAMS)) == 3:
            raise KeyboardInterrupt
        return generation(tokens=(1,) if call.drafter else (2,))

    llm.script = script
    # With this seed, plain is among the first two of the three cases.
    seed = next(s for s in range(9) if None in first_two(s))
    result = run_benchmark(llm, prompts(1), [NGRAM, SUFFIX], PARAMS, seed=seed)
    assert result.summaries == ()
    assert len(result.differences) == 1
    assert "DIFFERENT" in shown(result)


def first_two(seed: int) -> list[str | None]:
    llm = FakeLLM()
    run_benchmark(llm, prompts(1), [NGRAM, SUFFIX], PARAMS, seed=seed)
    return [call.drafter for call in llm.measured(PARAMS)[:2]]


def test_an_interrupt_during_warm_up_gives_an_empty_partial_result() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        raise KeyboardInterrupt

    result = run_benchmark(FakeLLM(script), prompts(2), [NGRAM], PARAMS)
    assert result.partial
    assert result.summaries == ()
    assert "nothing to compare yet" in shown(result)
    assert "nothing to compare yet" in markdown(result)


def test_a_prompt_that_cannot_be_answered_is_skipped_and_reported() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        if call.prompt == "all-0":
            raise PromptError("prompt: 9000 tokens leave no room; shorten it")
        return generation()

    llm = FakeLLM(script)
    result = run_benchmark(llm, prompts(3), [NGRAM], PARAMS, repeats=2)
    assert [each.prompt_id for each in result.skipped] == ["all-0"]
    assert len([call for call in llm.measured(PARAMS) if call.prompt == "all-0"]) == 1, "not asked again"
    assert row(result, "plain").prompts == 2
    assert "SKIPPED: prompt all-0: prompt: 9000 tokens" in shown(result)


def test_an_error_that_every_prompt_has_is_raised() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        raise PromptError("messages: this model has no chat template; give text")

    with pytest.raises(PromptError, match=r"no prompt can be answered.*no chat template"):
        run_benchmark(FakeLLM(script), prompts(3), [NGRAM], PARAMS)


def test_progress_counts_every_generation_to_the_end() -> None:
    seen: list[tuple[int, int, str]] = []
    run_benchmark(FakeLLM(), prompts(2), [NGRAM], PARAMS, repeats=2, progress=lambda *step: seen.append(step))
    assert seen[0] == (0, 8, "warm-up")
    assert [done for done, _, _ in seen] == list(range(9))
    assert {what for _, _, what in seen[1:]} == {
        f"{prompt}, {case}" for prompt in ("all-0", "all-1") for case in ("plain", "ngram k=5")
    }


def test_options_that_cannot_work_are_errors_before_anything_runs() -> None:
    llm = FakeLLM()
    with pytest.raises(OptionError, match="repeats=0: must be at least 1"):
        run_benchmark(llm, prompts(1), [NGRAM], PARAMS, repeats=0)
    with pytest.raises(OptionError, match="at least one prompt"):
        run_benchmark(llm, [], [NGRAM], PARAMS)
    with pytest.raises(OptionError, match="every id must be different"):
        run_benchmark(llm, prompts(1) * 2, [NGRAM], PARAMS)
    with pytest.raises(OptionError, match=r"ngram k=5.*must all be different"):
        run_benchmark(llm, prompts(1), [NGRAM, NGRAM], PARAMS)
    with pytest.raises(OptionError, match="num_speculative_tokens=0: must be at least 1"):
        Candidate("ngram", 0)
    with pytest.raises(OptionError, match=r"suffix\+ngram adaptive.*must all be different"):
        run_benchmark(llm, prompts(1), [BOTH, BOTH], PARAMS)
    with pytest.raises(OptionError, match="plain decoding is always measured"):
        Candidate("plain", 3)
    assert llm.calls == []


# ---------------------------------------------------------------- several weights


OF_BOTH = [Candidate("ngram", 5, weights="bf16"), Candidate("ngram", 5, weights="int8")]


def both(
    script: Callable[[str, Call, int], FakeGeneration] = lambda weights, call, nth: generation(),
) -> dict[tuple[str, str], FakeLLM]:
    """Return LLMs with bf16 and int8 weights that answer by ``script(weights, call, nth)``."""
    return {
        (weights, ""): FakeLLM(functools.partial(lambda weights, call, nth: script(weights, call, nth), weights))
        for weights in ("bf16", "int8")
    }


def of_speeds(weights: str, call: Call, nth: int) -> FakeGeneration:
    """Prompts of very different speed; int8 takes half of bf16's time, drafts a third; int8 writes other tokens."""
    tpot_s = {"all-0": 6.0, "all-1": 60.0, "all-2": 600.0}[call.prompt]
    tpot_s /= (2 if weights == "int8" else 1) * (3 if call.drafter else 1)
    return generation(tpot_s, tokens=(4, 5) if weights == "int8" and call.prompt != "all-1" else (1, 2, 3))


def test_speed_is_paired_with_plain_decoding_of_the_same_weights_and_of_the_first() -> None:
    result = run_benchmark(both(of_speeds), prompts(3), OF_BOTH, PARAMS)
    assert result.weights == ("bf16", "int8")
    assert [(each.case, each.weights, each.is_plain) for each in result.summaries if each.category is None] == [
        ("bf16 plain", "bf16", True),
        ("bf16 ngram k=5", "bf16", False),
        ("int8 plain", "int8", True),
        ("int8 ngram k=5", "int8", False),
    ]

    def speeds(case: str) -> list[Spread | None]:
        return [row(result, case).speedup, row(result, case).reference_speedup]

    one, two, three, six = (Spread(n, n, n, 3) for n in (1.0, 2.0, 3.0, 6.0))
    assert speeds("bf16 plain") == [one, one]
    assert speeds("bf16 ngram k=5") == [three, three]
    assert speeds("int8 plain") == [one, two]
    assert speeds("int8 ngram k=5") == [three, six]
    # Each answer takes a second and a TPOT.
    assert row(result, "int8 ngram k=5").total_time_ratio == pytest.approx((3 + 333) / (3 + 111))
    assert row(result, "int8 ngram k=5").reference_total_time_ratio == pytest.approx((3 + 666) / (3 + 111))


def test_another_text_of_other_weights_is_shown_and_no_difference() -> None:
    result = run_benchmark(both(of_speeds), prompts(3), OF_BOTH, PARAMS, repeats=2)
    assert result.differences == ()
    for case, same in {"bf16 plain": 3, "bf16 ngram k=5": 3, "int8 plain": 1, "int8 ngram k=5": 1}.items():
        found = row(result, case)
        assert (found.identical, found.compared, found.reference_identical) == (3, 3, same), case


@pytest.mark.parametrize("wrong", ["bf16", "int8"])
def test_a_difference_is_found_in_the_weights_that_have_it(wrong: str) -> None:
    """Here int8 with drafts writes what bf16 does: to compare with that would find nothing, and nothing of plain."""

    def script(weights: str, call: Call, nth: int) -> FakeGeneration:
        drafted_wrong = weights == wrong and call.drafter and call.prompt == "all-1"
        return generation(tokens={"bf16": (1, 2, 3), "int8": (1, 5, 3)}[weights if not drafted_wrong else other])

    other = {"bf16": "int8", "int8": "bf16"}[wrong]
    result = run_benchmark(both(script), prompts(3), OF_BOTH, PARAMS)
    tokens = {"bf16": (2, 5), "int8": (5, 2)}[wrong]
    assert [
        (each.prompt_id, each.case, each.position, each.plain_token, each.token) for each in result.differences
    ] == [("all-1", f"{wrong} ngram k=5", 1, *tokens)]
    for weights in ("bf16", "int8"):
        assert row(result, f"{weights} ngram k=5").identical == (2 if weights == wrong else 3)
        assert row(result, f"{weights} plain").identical == 3


def test_cases_of_all_weights_are_interleaved() -> None:
    order: list[tuple[str, str | None, str]] = []

    def script(weights: str, call: Call, nth: int) -> FakeGeneration:
        if call.params == PARAMS:
            order.append((weights, call.drafter, call.prompt))
        return generation()

    run_benchmark(both(script), prompts(4), OF_BOTH, PARAMS, repeats=2)
    blocks = [order[i : i + 4] for i in range(0, len(order), 4)]
    assert [{prompt for _, _, prompt in block} for block in blocks] == [{f"all-{i}"} for i in range(4)] * 2
    assert all(len(set(block)) == 4 for block in blocks), "each case once for each prompt"
    places = Counter((block.index(call), call[:2]) for block in blocks for call in block)
    assert set(places.values()) == {2}, "8 blocks of 4 places: 2 each"
    assert len({tuple(call[:2] for call in block) for block in blocks}) > 4


def test_draft_weights_choose_the_llm_of_a_candidate_and_plain_runs_once() -> None:
    llms = {("", each): FakeLLM() for each in ("", "int8", "bf16")}
    candidates = [Candidate("model", 3, draft_weights=each) for each in ("int8", "bf16")]
    assert [each.name for each in candidates] == ["model k=3, draft int8", "model k=3, draft bf16"]
    result = run_benchmark(llms, prompts(2), candidates, PARAMS)
    assert {each: [call.drafter for call in llm.measured(PARAMS)] for (_, each), llm in llms.items()} == {
        "": [None, None],
        "int8": ["model", "model"],
        "bf16": ["model", "model"],
    }
    assert result.weights == ("",)
    assert row(result, "plain").is_plain
    assert row(result, "model k=3, draft bf16").compared == 2


def test_weights_that_no_llm_has_are_an_error_before_anything_runs() -> None:
    llms = both()
    for candidate in (NGRAM, Candidate("ngram", 5, weights="int4"), Candidate("model", 5, "coupled", "int8", "int8")):
        with pytest.raises(OptionError, match=f"llms=.*must have one for .*; lacks that of {candidate.name}"):
            run_benchmark(llms, prompts(1), [*OF_BOTH, candidate], PARAMS)
    lacks_plain = {("bf16", "int8"): FakeLLM()}
    with pytest.raises(OptionError, match="of each weights one whose draft weights have no name"):
        run_benchmark(lacks_plain, prompts(1), [Candidate("model", 3, "coupled", "bf16", "int8")], PARAMS)
    assert not any(llm.calls for llm in (*llms.values(), *lacks_plain.values()))


OF_WEIGHTS = {
    "bf16": WeightsFacts(269_000_000, None),
    "int8": WeightsFacts(None, Quality(12.0, 12.1, 1.00812, 0.9431, 4321, "a.txt")),
}


def test_a_second_table_says_what_weights_cost_and_gain() -> None:
    result = run_benchmark(both(of_speeds), prompts(3), OF_BOTH, PARAMS)
    lines = markdown(result, weights=OF_WEIGHTS).splitlines()
    first = lines.index(next(line for line in lines if line.startswith("| weights |")))
    assert lines[first - 1] == ""
    assert lines[first + 1 : first + 7] == [
        "|---|---|---|---|---|---|---|---|---|",
        "| bf16 | 269 | 1 |  |  | plain | 1.00 | 1.00 | 3/3 |",
        "|  |  |  |  |  | ngram k=5 | 3.00 3.00-3.00 | 2.97 | 3/3 |",
        "| int8 | - | 1.0081 | 94.3% | 1/3 | plain | 2.00 2.00-2.00 | 1.99 | 3/3 |",
        "|  |  |  |  |  | ngram k=5 | 6.00 6.00-6.00 | 5.87 | 3/3 |",
        "",
    ]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(render(result, weights=OF_WEIGHTS))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "All prompts against bf16 plain" in text
    assert re.search(r"int8  *-  *1.0081  *94.3%  *1/3 plain  *2.00 2.00-2.00  *1.99  *3/3", text)
    for notes in (" ".join(text.split()), " ".join(lines)):
        for note in (
            "identical to plain with the same weights (6 of 6)",
            "Total time of int8 plain / int8 ngram k=5: 2.95 over all prompts",
            "Weights: speed = TPOT of bf16 plain / TPOT",
            "as multiples of 12.0000, that of bf16",
            "of 4321 tokens. Text: a.txt.",
        ):
            assert note in notes


def test_json_has_the_weights_where_there_are_several() -> None:
    result = run_benchmark(both(of_speeds), prompts(3), OF_BOTH, PARAMS)
    data = json.loads(json.dumps(as_dict(result, weights=OF_WEIGHTS), allow_nan=False))
    assert [(each["name"], each["bytes_per_token"]) for each in data["weights"]] == [
        ("bf16", 269_000_000),
        ("int8", None),
    ]
    assert data["weights"][0]["quality"] is None
    assert data["weights"][1]["quality"]["ratio"] == 1.00812
    assert [each["weights"] for each in data["candidates"]] == ["bf16", "int8"]
    last = data["summaries"][-1]
    assert (last["case"], last["weights"], last["reference_identical"]) == ("int8 ngram k=5", "int8", 1)
    assert last["reference_speedup"]["median"] == 6.0

    alone = as_dict(run_benchmark(FakeLLM(), prompts(1), [NGRAM], PARAMS))
    assert "weights" not in alone
    assert not any(name.startswith(("weights", "reference")) for each in alone["summaries"] for name in each)


def test_an_interrupted_run_of_several_weights_has_a_result() -> None:
    def script(weights: str, call: Call, nth: int) -> FakeGeneration:
        raise KeyboardInterrupt

    result = run_benchmark(both(script), prompts(2), OF_BOTH, PARAMS)
    assert result.weights == ("bf16", "int8")
    assert "nothing to compare yet" in markdown(result, weights=OF_WEIGHTS)
    assert "| weights |" not in markdown(result, weights=OF_WEIGHTS)


def test_weights_are_named_by_words_and_paths(tmp_path: Path) -> None:
    folder, comma, file = tmp_path / "tuned", tmp_path / "a,b", tmp_path / "small.gguf"
    for each in (folder, comma):
        each.mkdir()
    file.touch()
    assert parse(["bf16,fp32", "int8", "auto"], "--weights") == (
        NamedWeights("bf16", dtype="bf16"),
        NamedWeights("fp32", dtype="fp32"),
        NamedWeights("int8", weights="int8"),
        NamedWeights("auto"),
    )
    named = parse([str(comma), f"int8,{folder},{file}"], "--weights")
    assert [(each.name, each.model) for each in named] == [
        ("a,b", str(comma)),
        ("int8", None),
        ("tuned", str(folder)),
        ("small.gguf", str(file)),
    ]
    assert [each.are_others for each in named] == [True] * 4
    assert [each.are_others for each in parse(["auto,bf16,fp32"], "--weights")] == [False] * 3
    alike = tmp_path / "other" / "tuned"
    alike.mkdir(parents=True)
    assert [each.name for each in parse([f"{folder},{alike}"], "--weights")] == [str(folder), str(alike)]


@pytest.mark.parametrize(
    ("text", "paths", "problem"),
    [
        ("int4", True, "--weights int4: must be one of auto, bf16, fp32, int8, or the path of a model folder or .gguf"),
        ("", True, "--weights : must be one of auto"),
        ("bf16,", True, "--weights : must be one of auto"),
        ("int8,bf16,int8", True, "--weights int8,bf16,int8: names int8 twice"),
        ("no/such.gguf", True, "--weights no/such.gguf: must be one of auto"),
        (__file__, True, "test_bench.py: must be one of auto"),
        (str(Path(__file__).parent), False, r": must be one of auto, bf16, fp32, int8$"),
    ],
)
def test_weights_that_there_are_not_are_errors(text: str, paths: bool, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse([text], "--weights", paths=paths)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_per_token_are_those_of_the_matrices_that_a_row_meets(tied: bool) -> None:
    reference = make_reference("llama", tie_word_embeddings=tied)
    sizes = {name: each.numel() for name, each in reference.named_parameters() if each.dim() == 2}
    expected = sum(sizes.values()) - (0 if tied else sizes["model.embed_tokens.weight"])
    target = make_target(reference, kernels="torch")
    assert bytes_per_token(target) == 4 * expected
    if core.available():
        small = make_target(reference, kernels="auto")
        small.weight_format = "int8"
        assert bytes_per_token(small) == expected
    assert bytes_per_token(object()) is None  # type: ignore[arg-type]


# ---------------------------------------------------------------- report


@pytest.fixture
def mixed() -> BenchResult:
    """A win, a loss, and names that could be taken for markup."""

    def script(call: Call, nth: int) -> FakeGeneration:
        if call.drafter == "ngram":
            return generation(0.5, accepted=4)
        return generation(12.5 if call.drafter else 1.0, accepted=1 if call.drafter else 0)

    workload = [*prompts(120, "[red]x|y"), *prompts(4, "code-edit")]
    return run_benchmark(FakeLLM(script), workload, [NGRAM, Candidate("draft-model", 16)], PARAMS)


def test_the_table_fits_100_columns_uncut_and_shows_losses_like_wins(mixed: BenchResult) -> None:
    text = shown(mixed)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "[red]x|y (120)" in text, "a category is text, not markup"
    assert "all prompts (124)" in text
    assert text.count("2.00 2.00-2.00") == text.count("faster") == 3
    assert text.count("0.08 0.08-0.08") == text.count("slower") == 3
    assert text.count(" 4.0 ") == 0, "of rounds"
    assert text.count(" 2.0   50%") == 6

    narrow = "".join(shown(mixed, width=78).split())
    assert "…" not in narrow
    assert "12500.0" in narrow, "folded, not cut"


def test_the_table_fits_80_columns_unfolded() -> None:
    def script(call: Call, nth: int) -> FakeGeneration:
        return generation(0.0123 if call.drafter else 0.0234, accepted=3 if call.drafter else 0)

    result = run_benchmark(FakeLLM(script), prompts(4), [Candidate("ngram"), Candidate("auto", 7)], PARAMS)
    lines = shown(result, width=80).splitlines()
    assert any(
        re.search(r"ngram adaptive  *1.90 1.90-1.90 faster  12.3 1000   2.50    75%  *2.0   50%", each)
        for each in lines
    )
    assert max(map(len, lines)) <= 80


def test_one_prompt_has_no_spread() -> None:
    text = shown(run_benchmark(FakeLLM(), prompts(1), [NGRAM], PARAMS))
    assert "2.00-2.00" not in text


def test_one_category_alone_is_not_shown_twice() -> None:
    text = shown(run_benchmark(FakeLLM(), prompts(2), [NGRAM], PARAMS))
    assert "all prompts (2)" in text
    assert "all (2)" not in text
    assert "1 repeat," in text


def test_markdown_is_one_sound_table(mixed: BenchResult) -> None:
    text = markdown(mixed, {"cpu": "Some | CPU"})
    table = text.partition("\n\n")[0].splitlines()
    assert len(table) == 2 + 3 * 3
    assert {line.replace("\\|", "").count("|") for line in table} == {13}
    assert (
        "| all prompts | draft-model k=16 | 0.08 0.08-0.08 | slower | 12500.0 | 1.50 | 25% | 2.0 | 4.0 | 50% | 25% "
        "| 124/124 |" in text
    )
    assert "- cpu: Some \\| CPU" in text


def test_json_holds_summaries_settings_facts_and_every_generation(mixed: BenchResult) -> None:
    facts = machine_facts(model="tiny", dtype="fp32", weights="int8", kernels="avx2", exactness="bit-exact")
    data = json.loads(json.dumps(as_dict(mixed, facts), allow_nan=False))
    assert {"date", "model", "dtype", "exactness", "cpu", "threads", "torch"} <= data["machine"].keys()
    assert [data["machine"][name] for name in ("exactness", "weights", "kernels")] == ["bit-exact", "int8", "avx2"]
    assert data["quality"] is None, "not measured"
    assert data["params"]["max_new_tokens"] == 64
    assert len(data["measurements"]) == 124 * 3
    assert data["measurements"][0]["tokens_per_target_call"] >= 1.0
    last = data["summaries"][-1]
    assert (last["category"], last["case"], last["verdict"]) == (None, "draft-model k=16", "slower")
    assert last["speedup"] == {"median": 0.08, "low": 0.08, "high": 0.08, "count": 124}
    assert [last[name] for name in ("mean_drafted", "mean_draft_length", "rounds_without_draft")] == [2.0, 4.0, 0.5]
    assert data["candidates"][0] == {"drafter": "ngram", "num_speculative_tokens": 5, "verification": "coupled"}
    adaptive = as_dict(run_benchmark(FakeLLM(), prompts(1), [BOTH], PARAMS))
    assert adaptive["candidates"] == [
        {"drafter": "suffix+ngram", "num_speculative_tokens": None, "verification": "coupled"}
    ]


def test_quality_is_shown_in_every_form(mixed: BenchResult) -> None:
    quality = Quality(12.3456, 12.5, 1.01251, 0.9876, 4321, "some|file.txt")
    note = (
        "Quality: perplexity 12.5000, with weights=auto 12.3456 (ratio 1.0125); "
        "the same likeliest token at 98.8% of 4321 tokens. Text: some|file.txt."
    )
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render(mixed, quality=quality))
    assert note in " ".join(capture.get().split())
    assert "- " + note.replace("|", "\\|") in markdown(mixed, quality=quality).splitlines()
    data = json.loads(json.dumps(as_dict(mixed, quality=quality)))
    assert data["quality"] == {
        "reference_perplexity": 12.3456,
        "perplexity": 12.5,
        "ratio": 1.01251,
        "agreement": 0.9876,
        "tokens": 4321,
        "text": "some|file.txt",
    }
    assert "Quality" not in shown(mixed) + markdown(mixed)


def test_json_takes_params_that_have_no_json_of_their_own() -> None:
    params = SamplingParams(processors=(lambda ids, logits: logits,), logit_bias={3: -1.0})
    data = json.loads(json.dumps(as_dict(run_benchmark(FakeLLM(), prompts(1), [], params))))
    assert data["params"]["processors"] == 1
    assert data["params"]["logit_bias"] == {"3": -1.0}


def test_facts_name_the_device_of_the_model():
    target = types.SimpleNamespace(device=torch.device("meta"), dtype=torch.float16, kernels="module")
    llm = types.SimpleNamespace(target=target, exactness="numerics")
    assert model_facts(llm, "name", None)["device"] == "meta"
    del target.device
    assert model_facts(llm, "name", None)["device"] == "cpu"
