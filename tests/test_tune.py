"""The tuner: what it measures, what it says of it, and that nothing is lost when it is interrupted."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sakiyomi
from conftest import VOCAB, byte_tokenizer
from sakiyomi import cli, core, drafters, tune_command
from sakiyomi.bench import findings, tuner
from sakiyomi.bench.findings import as_dict
from sakiyomi.bench.journal import Journal
from sakiyomi.bench.runner import PLAIN, BenchResult, Candidate, Measurement, run_benchmark
from sakiyomi.bench.tuner import Answered, Options, Tuning, specs, tune
from sakiyomi.bench.workload import Prompt
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.table import TableDrafter, build_table
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import RoundRecord
from sakiyomi.llm import LLM
from sakiyomi.sampling import SamplingParams
from sakiyomi.settings import Settings
from sakiyomi.stats import Interval, Stats, ratio_interval, speedup_interval

PARAMS = SamplingParams(max_new_tokens=20)
COSTS = CostTable((1, 2, 8, 33), (1e-3, 1.05e-3, 1.2e-3, 2e-3))
FACTS = {"exactness": "bit-exact", "date": "today", "cpu": "some", "threads": 1, "sakiyomi": "0"}
needs_core = pytest.mark.skipif(not core.available(), reason="needs the compiled core")


@pytest.fixture(autouse=True)
def costs_told(monkeypatch) -> None:
    """Tiny targets have no costs worth a second's measurement."""
    monkeypatch.setattr(tuner, "measure", lambda target: COSTS)


@pytest.fixture(scope="module")
def llm(llama) -> LLM:
    table = TableDrafter(build_table([[7, 8, 9] * 9], vocab_size=VOCAB, max_bytes=10**6))
    return LLM(
        llama,
        byte_tokenizer(),
        drafter="none",
        draft_model=ModelDrafter(llama, VOCAB, costs=ModelCosts(COSTS)),
        trained={"table": lambda: table},
        costs=lambda: ModelCosts(COSTS),
    )


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt(f"p{i}", "ab"[i % 2], text="spam and eggs, " * (1 + i)) for i in range(count)]


def quick(**changes: Any) -> Options:
    return Options(**{"seconds": 600.0, "lengths": (1, 3, None), "drafters": ("ngram", "model"), **changes})


def told(tuning: Tuning) -> dict[str, Any]:
    found = as_dict(tuning, workload="some prompts", command="sakiyomi tune", facts=FACTS)
    json.dumps(found, allow_nan=False)  # what is no JSON raises
    return found


def test_all_there_is_for_a_model_is_considered(llm, monkeypatch):
    monkeypatch.setattr(core, "available", lambda: ("plain",))
    together = ("suffix+table+model", "suffix+table", "suffix+model", "table+model")
    assert specs(llm) == (*together, "suffix", "table", "model", "ngram")
    bare = LLM(llm.target, llm.tokenizer)
    assert specs(bare) == ("suffix", "ngram")
    monkeypatch.setattr(core, "available", lambda: ())
    assert specs(bare) == ("ngram",)


def test_replayed_acceptance_is_measured_acceptance(llm):
    """Of every candidate with a fixed number of draft tokens, whatever it remembers from prompt to prompt."""
    given = prompts()
    names = ("ngram", "model", "table", *(["suffix"] if core.available() else []))
    for way in (PARAMS, replace(PARAMS, temperature=0.5, seed=4)):
        for k in (1, 3):
            tuning = tune(llm, given, way, quick(drafters=names, lengths=(k,), confirm=9))
            assert {each.name for each in tuning.live.candidates} == {f"{name} k={k}" for name in names}
            assert not tuning.live.differences
            for each in told(tuning)["candidates"]:
                for figure in ("tokens_per_target_call", "acceptance_rate", "mean_drafted", "per_position_acceptance"):
                    assert each["measured"][figure] == each["predicted"][figure]


def test_a_tuning_end_to_end(llm):
    seen: list[tuple[int, int, str]] = []
    tuning = tune(llm, prompts(), PARAMS, quick(), progress=lambda *each: seen.append(each))
    assert [each.prompt.id for each in tuning.answered] == ["p0", "p1", "p2", "p3"]
    plain = [llm.generate(each.input, PARAMS, drafter=None).token_ids for each in prompts()]
    assert [each.token_ids for each in tuning.answered] == plain
    names = ["ngram k=1", "ngram k=3", "ngram adaptive", "model k=1", "model k=3", "model adaptive"]
    assert [each.name for each in tuning.candidates] == names
    assert all(set(tuning.predicted[name]) == {"p0", "p1", "p2", "p3"} for name in [PLAIN, *names])
    assert {each.drafter for each in tuning.live.candidates} == {"ngram", "model"}
    found = told(tuning)
    measured = {each["case"]: each["measured"]["speedup"] for each in found["candidates"] if each["measured"]}
    assert len(measured) == 2
    assert measured[found["recommendation"]["measured"]] >= 0.99 * max(measured.values())
    assert found["exactness"]["compared"] == found["exactness"]["identical"] == 8
    assert found["workload"]["categories"] == {"a": 2, "b": 2}
    assert [each["category"] for each in found["categories"]] == ["a", "b"]
    assert {each["id"] for each in found["samples"]} == {"p0", "p1"}
    assert len(found["prompts"]) == len(found["plain"]["tpot_s"]) == 4
    assert not found["partial"]
    assert [row[0] for row in seen if "answering" in row[2]] == [0, 1, 2, 3]


def test_a_sample_says_which_tokens_were_drafted(llm):
    tuning = tune(llm, prompts(2), PARAMS, quick(drafters=("model",), lengths=(3,)))
    for sample in tuning.samples:
        whole = llm.generate(sample.prompt.input, PARAMS, drafter=None)
        assert "".join(text for text, _ in sample.tokens) == whole.text
        assert {drafter for _, drafter in sample.tokens} == {None, "model"}


def test_speed_by_context_is_of_all_rounds_but_the_first(llm):
    tuning = tune(llm, prompts(2), PARAMS, quick(drafters=("ngram",), lengths=(2,), contexts=(25, 30)))
    (candidate,) = told(tuning)["candidates"]
    rows = candidate["measured"]["by_context"]
    assert [(each["from"], each["to"]) for each in rows] == [(0, 25), (25, 30), (30, None)]
    live = [each.stats for each in tuning.live.measurements if each.case != PLAIN]
    assert sum(each["tokens"] for each in rows) == sum(each.tokens - each.records[0].emitted for each in live)


def test_batches_are_measured_where_asked(llm):
    tuning = tune(llm, prompts(5), PARAMS, quick(batch_sizes=(2, 9)))
    (batch,) = tuning.batches  # nine prompts there aren't
    assert batch.batch_size == 2
    assert [plain for _, plain, _, _ in batch.groups] == [38, 38]
    assert all(seconds > 0 for group in batch.groups for seconds in group[::2])
    found = told(tuning)["batches"]
    assert [each["batch_size"] for each in found] == [1, 2, 4, 8, 16, 32, 2]
    assert [each["measured"] for each in found] == [False] * 6 + [True]


def test_other_verifications_are_measured_and_not_predicted(llm):
    sampled = replace(PARAMS, temperature=1.0)
    tuning = tune(llm, prompts(), sampled, quick(verifications=("coupled", "rejection")))
    found = {each["case"]: each for each in told(tuning)["candidates"]}
    (name,) = (name for name in found if "rejection" in name)
    assert found[name]["predicted"] is None
    assert found[name]["measured"]["prediction_error"] is None
    assert name.startswith("model")  # ngram doesn't sample


class Stop(Exception):
    pass


def stopping(at: int) -> Callable[[int, int, str], None]:
    """Return a progress function that ends the run at its so-many-th call, as Ctrl-C may."""
    calls = iter(range(at))

    def progress(done: int, total: int, what: str) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_run_goes_on(llm, tmp_path, monkeypatch):
    """Wherever it was interrupted: what was answered is not written again, what was measured not measured again."""
    path, run = tmp_path / "journal", {"of": "this run"}
    calls = 0
    forward = type(llm.target).forward

    def counted(self, work, **options):
        nonlocal calls
        calls += 1
        return forward(self, work, **options)

    monkeypatch.setattr(type(llm.target), "forward", counted)
    whole = tune(llm, prompts(), PARAMS, quick(lengths=(3,)))
    all_calls, calls = calls, 0
    for at in (3, 8, 12):
        with pytest.raises(KeyboardInterrupt):
            tune(llm, prompts(), PARAMS, quick(lengths=(3,)), journal=Journal(path, run), progress=stopping(at))
    before = Journal(path, run)
    assert set(before.answers) == {"p0", "p1", "p2", "p3"}
    calls, rounds, record = 0, [], tuner.record

    def seen(*args: Any, **options: Any) -> Any:
        recording = record(*args, **options)
        rounds.append(recording.stats.target_calls)
        return recording

    monkeypatch.setattr(tuner, "record", seen)
    tuning = tune(llm, prompts(), PARAMS, quick(lengths=(3,)), journal=before)
    assert max(rounds) <= 6 < len(tuning.answered[0].token_ids)  # what is known at once, then a few plain rounds
    assert calls <= all_calls - 70  # four answers of 20 tokens are computed in a call or two each
    assert tuning.resumed
    assert tuning.speed == pytest.approx(whole.speed, rel=0.9)  # seen again, though little was decoded
    assert [each.token_ids for each in tuning.answered] == [each.token_ids for each in whole.answered]
    for case in ("ngram k=3", "model k=3"):
        for one, other in zip(tuning.predicted[case].values(), whole.predicted[case].values(), strict=True):
            assert [each.accepted for each in one.records] == [each.accepted for each in other.records]
    assert told(tuning)["exactness"]["compared"] == 8
    assert "The run went on from an interrupted one." in told(tuning)["notes"]


def test_a_journal_of_another_run_is_dropped_and_a_cut_line_too(tmp_path):
    path = tmp_path / "sub" / "journal"
    journal = Journal(path, {"a": 1})
    stats = Stats((RoundRecord("x", 2, 2, 1, 2, 3, 4, 0.1, 0.2, 0.3, 0.6, ("oops",)),), 0.5, 0.6)
    measurement = Measurement("p", "c", PLAIN, 0, (1, 2), stats)
    journal.answer("p", [1, 2])
    journal.measured([measurement])
    again = Journal(path, {"a": 1})
    assert (again.answers, again.blocks, again.resumed) == ({"p": (1, 2)}, [[measurement]], True)
    with path.open("a") as file:
        file.write('{"answer": "q", "tok')
    for line in ('{"measured": ["x"]}', '{"measured": [{}]}', "[]", '{"answer": 3}'):
        (tmp_path / "other").write_text(f"{path.read_text().splitlines()[0]}\n{line}\n")
        assert not Journal(tmp_path / "other", {"a": 1}).blocks
    cut = Journal(path, {"a": 1})
    assert (cut.answers, cut.blocks) == ({"p": (1, 2)}, [[measurement]])
    cut.answer("r", [3])
    assert Journal(path, {"a": 1}).answers == {"p": (1, 2), "r": (3,)}
    assert not Journal(path, {"a": 2}).resumed
    journal.close()
    assert not path.exists()
    assert not Journal(None, {}).resumed
    (tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match="name another folder"):
        Journal(tmp_path / "file" / "journal", {})


def test_too_little_time_is_said_and_no_verdict_given(llm):
    """One prompt is always answered and measured: it is said how little that is."""
    found = told(tune(llm, prompts(), PARAMS, quick(seconds=1e-6)))
    recommendation = found["recommendation"]
    assert recommendation["verdict"] == "unclear"
    assert recommendation["sentence"].startswith("No verdict: ")
    assert "on 1 prompt; give it more time (--minutes)." in recommendation["sentence"]
    assert (recommendation["low"], recommendation["high"]) == (None, None)
    assert found["partial"]
    assert found["workload"]["left_out"] == 3
    assert any("3 prompts of 4 left out" in note for note in found["notes"])


def test_a_workload_of_one_prompt_works(llm):
    found = told(tune(llm, prompts(1), PARAMS, quick()))
    assert found["recommendation"]["verdict"] == "unclear"
    assert "give more prompts" in found["recommendation"]["sentence"]
    assert not found["partial"]


def test_recorded_responses_are_taken_where_the_target_gives_them(llm, monkeypatch):
    params = replace(PARAMS, max_new_tokens=12)
    plain = [llm.generate(each.input, params, drafter=None) for each in prompts(3)]
    encode = type(llm.tokenizer).encode
    right = replace(prompts(1)[0], response="as it was")  # random bytes are seldom a text
    monkeypatch.setattr(
        type(llm.tokenizer),
        "encode",
        lambda self, text, **options: (
            list(plain[0].token_ids) if text == right.response else encode(self, text, **options)
        ),
    )
    given = [right, replace(prompts(2)[1], response="something else"), prompts(3)[2]]
    tuning = tune(llm, given, params, quick())
    assert [(each.expected, each.matches) for each in tuning.answered] == [(True, True), (True, False), (False, False)]
    half = replace(right, response="half of it")
    for told_of, matches in ((list(plain[0].token_ids)[:6], False), ([*plain[0].token_ids, 5, 6], True)):
        monkeypatch.setattr(
            type(llm.tokenizer),
            "encode",
            lambda self, text, told_of=told_of, **options: (
                told_of if text == half.response else encode(self, text, **options)
            ),
        )  # the answer is cut by the number of tokens, so that a longer response may be right
        assert tune(llm, [half], params, quick()).answered[0].matches == matches
    assert [each.token_ids for each in tuning.answered] == [each.token_ids for each in plain]
    found = told(tuning)
    assert (found["workload"]["recorded"], found["workload"]["matching"]) == (2, 1)
    assert any("1 of 2 recorded responses" in note for note in found["notes"])


def test_a_conversation_goes_on_with_the_models_own_answers(llama):
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
    chat = LLM(llama, byte_tokenizer(template=template), drafter="none", costs=lambda: ModelCosts(COSTS))
    given = [Prompt("t", "a", messages=({"role": "user", "content": "one"},), follow_ups=("two", "three"))]
    answered = tune(chat, given, PARAMS, quick(drafters=("ngram",))).answered
    assert [each.prompt.id for each in answered] == ["t", "t, turn 2", "t, turn 3"]
    first = chat.tokenizer.decode(answered[0].token_ids)
    assert answered[1].prompt.messages == (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    )
    assert [message["role"] for message in answered[2].prompt.messages] == ["user", "assistant"] * 2 + ["user"]


def test_prompts_that_do_not_fit_are_skipped_and_counted(llm):
    long = Prompt("long", "a", text="x" * llm.target.context_length)
    found = told(tune(llm, [long, *prompts(3)], PARAMS, quick()))
    assert found["workload"]["prompts"] == 3
    assert [each["id"] for each in found["workload"]["skipped"]] == ["long"]
    assert any(note.startswith("1 prompt skipped; the first: long: ") for note in found["notes"])
    with pytest.raises(PromptError, match="no prompt can be answered"):
        tune(llm, [long], PARAMS, quick())


def test_a_prompts_own_limit_of_tokens_holds(llm):
    given = [replace(prompts(1)[0], max_tokens=5), *prompts(3)[1:]]
    tuning = tune(llm, given, PARAMS, quick())
    assert [len(each.token_ids) for each in tuning.answered] == [5, 20, 20]
    assert {len(each.token_ids) for each in tuning.live.measurements if each.prompt_id == "p0"} == {5}


def test_what_was_learned_before_an_interruption_is_known_after_it(llm, tmp_path):
    """A drafter that remembers earlier answers is measured as if the run had never stopped."""
    given = [Prompt(f"p{i}", "a", text="spam and eggs, ham and spam; ") for i in range(6)]  # one answer, six times
    options = quick(drafters=("suffix",) if core.available() else ("ngram",), lengths=(4,))
    whole = tune(llm, given, PARAMS, options)
    path, run = tmp_path / "journal", {}
    with pytest.raises(KeyboardInterrupt):
        tune(llm, given, PARAMS, options, journal=Journal(path, run), progress=stopping(6 + 2 + 2 * 3))
    before = Journal(path, run)
    assert 1 <= len(before.blocks) <= 4
    resumed = tune(llm, given, PARAMS, options, journal=before)

    def accepted(tuning: Tuning) -> list[int]:
        (case,) = (each.name for each in tuning.live.candidates)
        return [each.stats.accepted for each in tuning.live.measurements if (each.case, each.repeat) == (case, 0)]

    assert accepted(resumed) == accepted(whole)
    assert accepted(whole)[-1] > accepted(whole)[0] or not core.available()


def test_a_run_goes_on_with_less_time(llm, tmp_path):
    """Measurements of prompts that it doesn't come to any more are left out."""
    path, run = tmp_path / "journal", {}
    with pytest.raises(KeyboardInterrupt):
        tune(llm, prompts(), PARAMS, quick(lengths=(3,)), journal=Journal(path, run), progress=stopping(15))
    assert len(Journal(path, run).blocks) > 1
    tuning = tune(llm, prompts(), PARAMS, quick(lengths=(3,), seconds=1e-6), journal=Journal(path, run))
    assert len(tuning.answered) == 1
    assert {each.prompt_id for each in tuning.live.measurements} == {"p0"}


def test_a_repeat_of_some_prompts_gives_them_no_more_weight():
    tuning = made([("a", 2.0, 1.0)] * 3)
    again = replace(tuning.live.measurements[0], repeat=1), replace(tuning.live.measurements[1], repeat=1)
    live = replace(tuning.live, measurements=(*tuning.live.measurements, *again))
    assert tuner.paired(live) == tuner.paired(tuning.live)
    twice = [replace(each, repeat=1) for each in tuning.live.measurements]
    both = tuner.paired(replace(tuning.live, measurements=(*tuning.live.measurements, *twice)))
    assert {plain.requests for plain, _ in both["d k=2"].values()} == {2}


def test_names_of_turns_are_nobody_elses(llama):
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
    chat = LLM(llama, byte_tokenizer(template=template), drafter="none", costs=lambda: ModelCosts(COSTS))
    message = ({"role": "user", "content": "x"},)
    given = [
        Prompt("doc/turn left", "a", messages=message, follow_ups=("y",)),
        Prompt("doc/turn left, turn 2", "a", messages=message),
    ]
    answered = tune(chat, given, replace(PARAMS, max_new_tokens=3), quick(drafters=("ngram",))).answered
    assert [each.prompt.id for each in answered] == ["doc/turn left", "doc/turn left, turn 2'", "doc/turn left, turn 2"]


def test_auto_is_what_it_stands_for(llm):
    tuning = tune(llm, prompts(1), PARAMS, quick(drafters=("auto", "ngram"), lengths=(2,)))
    auto = "+".join(drafters.parse("auto", ["table", "model"]))
    assert [each.drafter for each in tuning.candidates] == [auto, "ngram"]


def test_slow_candidates_do_not_take_all_the_time(llm, monkeypatch):
    """Past its share of the time a candidate is replayed no further, and that is said."""
    add = tuner.ChainReplay.add

    def slow(self, recording):
        time.sleep(0.3)
        return add(self, recording)

    monkeypatch.setattr(tuner.ChainReplay, "add", slow)
    found = tune(llm, prompts(6), replace(PARAMS, max_new_tokens=3), quick(drafters=("ngram",), seconds=4.0))
    counts = {case: len(by_id) for case, by_id in found.predicted.items()}
    assert counts["ngram adaptive"] == counts[PLAIN] == len(found.answered) == 6
    assert counts["ngram k=1"] == counts["ngram k=3"] == 2
    assert any("fewer prompts" in note and "ngram k=1" in note for note in told(found)["notes"])


def test_answers_of_one_token_say_nothing(llm):
    found = told(tune(llm, prompts(4), replace(PARAMS, max_new_tokens=1), quick()))
    assert found["recommendation"]["sentence"].startswith("No verdict: the answers have no tokens after the first")


def test_a_drafter_that_fails_is_said(llm):
    class Failing:
        name, costs, samples, prefixes = "table", None, False, True

        def session(self, prompt, params, sampled):
            raise RuntimeError("no luck")

    other = LLM(llm.target, llm.tokenizer, drafter="none", trained={"table": Failing}, costs=lambda: ModelCosts(COSTS))
    with pytest.warns(RuntimeWarning, match="no luck"):
        found = told(tune(other, prompts(3), PARAMS, quick(drafters=("table",), lengths=(2,))))
    assert any("FAILED: table k=2" in note and "no luck" in note for note in found["notes"])
    assert found["candidates"][0]["failed"] == "table: RuntimeError: no luck"


def test_verifications_that_change_nothing_are_said(llm):
    sampled = replace(PARAMS, temperature=1.0)
    found = told(tune(llm, prompts(1), sampled, quick(drafters=("ngram",), verifications=("coupled", "block"))))
    assert "block: not measured, since none of the drafters samples; all is as with coupled." in found["notes"]


def test_categories_come_in_turns(llm):
    given = [Prompt(f"{category}{i}", category, text="x") for category in "abc" for i in range(3)]
    tuning = tune(llm, given, replace(PARAMS, max_new_tokens=2), quick(drafters=("ngram",)))
    assert [each.prompt.id for each in tuning.answered][:5] == ["a0", "b0", "c0", "a1", "b1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths="),
        ({"lengths": (0,)}, "lengths="),
        ({"seconds": 0}, "seconds=0: must be above 0"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"confirm": 0}, "confirm=0: must be at least 1"),
        ({"batch_sizes": (1,)}, "batch_sizes="),
        ({"contexts": (5, 5)}, r"contexts=\[5, 5\]: must be tokens from 1 on, ascending"),
        ({"contexts": (0, 5)}, "contexts="),
    ],
)
def test_wrong_options(changes, message):
    with pytest.raises(OptionError, match=message):
        Options(**changes)


def test_without_prompts_there_is_nothing_to_tune(llm):
    with pytest.raises(OptionError, match="at least one prompt"):
        tune(llm, [], PARAMS, quick())


# What is said of figures.


def stats(seconds: float, tokens: int, *, accepted: int = 0, drafted: int = 0) -> Stats:
    """Rounds after a first one; ``seconds`` and ``tokens`` are of these."""
    first = RoundRecord("", 0, 0, 0, 1, 5, 0, 0, 1.0, 0, 1.0)
    rounds = max(1, tokens - accepted)
    each = RoundRecord("d", drafted, drafted, accepted // rounds, tokens // rounds, 1, 9, 0, 0, 0, seconds / rounds)
    return Stats((first, *[each] * rounds), 1.0, 1.0 + seconds)


def made(
    pairs: Sequence[tuple[str, float, float]], *, predicted: float = 2.0, tokens: int = 40, **changes: Any
) -> Tuning:
    """Return a tuning in which ``d k=2`` took so long on prompts of these categories: (category, plain, drafted)."""
    candidate = Candidate("d", 2)
    answered, measurements = [], []
    for i, (category, plain, drafted) in enumerate(pairs):
        answered.append(Answered(Prompt(f"p{i}", category, text="x"), 9, (1,) * (tokens + 1), False, False))
        for case, seconds in ((PLAIN, plain), (candidate.name, drafted)):
            own = stats(seconds, tokens, accepted=0 if case == PLAIN else tokens // 2, drafted=2)
            measurements.append(Measurement(f"p{i}", category, case, 0, (1,), own))
    live = BenchResult(("",), (candidate,), PARAMS, 1, 0, False, tuple(measurements), (), (), ())
    known = [each.prompt for each in answered]
    return Tuning(
        **{
            "prompts": tuple(known),
            "answered": tuple(answered),
            "skipped": (),
            "left_out": 0,
            "candidates": (candidate,),
            "predicted": {
                PLAIN: {each.id: stats(1.0, tokens) for each in known},
                candidate.name: {
                    each.id: stats(1.0 / predicted, tokens, accepted=tokens // 2, drafted=2) for each in known
                },
            },
            "live": live,
            "batches": (),
            "samples": (),
            "costs": COSTS,
            "speed": 1.0,
            "seconds": {},
            "params": PARAMS,
            "options": Options(),
            **changes,
        }
    )


def test_what_pays_is_recommended_and_where_it_does_not_is_said():
    given = [*[("code", 2.0, 1.0 + i / 100) for i in range(5)], *[("poetry", 1.0, 1.05 + i / 100) for i in range(4)]]
    found = told(made(given, predicted=1.6))
    recommendation = found["recommendation"]
    assert recommendation["verdict"] == "faster"
    assert (recommendation["case"], recommendation["drafter"], recommendation["num_speculative_tokens"]) == (
        "d k=2",
        "d",
        2,
    )
    assert recommendation["speedup"] == pytest.approx(sum(p for _, p, _ in given) / sum(d for _, _, d in given))
    assert recommendation["low"] < recommendation["speedup"] < recommendation["high"]
    assert recommendation["sentence"].startswith("d, k = 2: 1.")
    assert recommendation["sentence"].endswith("; off for poetry (0.94x).")
    verdicts = {each["category"]: each["verdict"] for each in found["categories"]}
    assert verdicts == {"code": "faster", "poetry": "slower"}
    assert [each["id"] for each in found["prompts"] if each["lost"]] == ["p5", "p6", "p7", "p8"]
    assert all(bool(each["why"]) == each["lost"] for each in found["prompts"])


def test_of_two_that_are_as_fast_the_simpler_one_is_recommended():
    def best(**seconds: float) -> str:
        tuning = made([("a", 2.0, 1.0)] * 4)
        others = [Candidate(name.replace("_", "+"), 2) for name in seconds]
        rows = [
            replace(each, case=f"{name.replace('_', '+')} k=2", stats=stats(took, 40))
            for name, took in seconds.items()
            for each in tuning.live.measurements
            if each.case == PLAIN
        ]
        plain = [each for each in tuning.live.measurements if each.case == PLAIN]
        return tuner.fastest(replace(tuning.live, candidates=tuple(others), measurements=(*plain, *rows)), 0).drafter

    assert best(a_b_c=1.0, a_b=1.005, d=1.2) == "a+b"
    assert best(a_b_c=1.0, a_b=1.05, d=1.2) == "a+b+c"
    assert best(a=1.005, b=1.0) == "b"


def test_off_is_an_answer():
    given = [*[("code", 1.0, 0.8 - i / 100) for i in range(3)], *[("chat", 1.0, 1.4 + i / 100) for i in range(9)]]
    recommendation = told(made(given))["recommendation"]
    assert (recommendation["verdict"], recommendation["case"], recommendation["drafter"]) == ("off", PLAIN, "none")
    assert recommendation["sentence"].startswith("Off: reading ahead doesn't pay here. The best, d, k = 2, had 0.7")
    assert recommendation["sentence"].endswith("But it pays for code (1.27x).")


@pytest.mark.parametrize("count", [1, 2, 6])
def test_what_is_not_known_is_not_recommended(count):
    """Few prompts, or an interval that includes 1."""
    recommendation = told(made([("a", 1.0, (0.5, 1.45)[i % 2]) for i in range(count)]))["recommendation"]
    assert recommendation["verdict"] == "unclear"
    assert recommendation["sentence"].startswith("No verdict: ")


def test_without_any_measurement_there_is_no_verdict():
    found = told(replace(made([("a", 1.0, 0.5)] * 5), live=None))
    assert found["recommendation"]["verdict"] == "unclear"
    assert found["recommendation"]["speedup"] is None
    assert "no time to measure" in found["recommendation"]["sentence"]
    assert found["categories"] == []


def test_a_prediction_that_is_off_is_said():
    right = told(made([("a", 2.0, 1.0)] * 4, predicted=2.1))["prediction"]
    assert (right["warning"], right["checked"]) == ("", 1)
    assert right["worst"] == pytest.approx(0.05)
    wrong = told(made([("a", 2.0, 1.0)] * 4, predicted=1.5))
    assert wrong["prediction"]["warning"].startswith("The prediction for d k=2 is -25% off what was measured")
    assert wrong["candidates"][0]["measured"]["prediction_error"] == pytest.approx(-0.25)


def test_more_is_measured_where_a_prediction_is_off(llm, monkeypatch):
    """A second time, and not a third; with predictions that hold, once."""
    for error, repeats in ((0.3, 2), (-0.3, 2), (0.05, 1)):
        monkeypatch.setattr(tuner, "prediction_errors", lambda tuning, live, error=error: {"x": error})
        tuning = tune(llm, prompts(), PARAMS, quick(lengths=(3,)))
        assert {each.repeat for each in tuning.live.measurements} == set(range(repeats))


def test_why_a_prompt_lost():
    def why(plain: Stats, drafted: Stats, tokens: int = 40) -> str:
        return findings._why(Answered(Prompt("p", "c", text="x"), 3, (1,) * tokens, False, False), plain, drafted)

    plain = stats(1.0, 40)
    assert why(plain, stats(1.2, 40), tokens=9).startswith("The answer has only 9 tokens")
    assert why(plain, stats(1.2, 40)).startswith("Nothing was drafted")
    assert "Hardly any draft stood (0 of 80 draft tokens stood), and a round took 1.2" in why(
        plain, stats(1.2, 40, drafted=2)
    )
    assert "A round brought 1.95 tokens" in why(plain, stats(1.2, 40, accepted=20, drafted=2))


def test_the_interval_of_a_ratio():
    rows = [(2.0, 10, 1.0, 10), (3.0, 10, 1.0, 10), (1.0, 10, 1.0, 10), (2.5, 10, 1.2, 10)]
    interval = ratio_interval(rows)
    assert interval.value == pytest.approx(8.5 / 4.2)
    assert 1 <= interval.low < interval.value < interval.high <= 3
    assert ratio_interval(rows) == interval, "the same every time"
    assert ratio_interval(rows * 25).high - ratio_interval(rows * 25).low < (interval.high - interval.low) / 2
    assert ratio_interval(rows[:1]) == Interval(2.0, None, None)
    assert ratio_interval([]) is None
    assert ratio_interval([(1.0, 0, 1.0, 0)]) is None
    assert ratio_interval([*rows, (9.0, 0, 9.0, 0)]) == ratio_interval(rows), (
        "without a token there is nothing to compare"
    )
    same = speedup_interval([(stats(1.0, 10), stats(0.5, 10))] * 5)
    assert (same.value, same.low, same.high, same.verdict) == (2.0, 2.0, 2.0, "faster")
    assert Interval(0.9, 0.8, 0.99).verdict == "slower"
    assert Interval(1.1, 0.9, 1.2).verdict == "unclear"


def test_the_interval_holds_the_truth_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    held = 0
    for i in range(200):
        noise = torch.randn(2, 30, generator=generator).mul(0.3).exp().tolist()
        interval = ratio_interval([(2 * a, 1, b, 1) for a, b in zip(*noise, strict=True)], seed=i)
        held += interval.low < 2 < interval.high
    assert 176 <= held <= 199  # of 200, with 95 %: about 190; intervals of few rows are somewhat too narrow


# A benchmark that can go on, and that ends when it has enough.


def test_a_benchmark_goes_on_where_it_was(llm):
    saved: list[list[Measurement]] = []
    candidates = [Candidate("ngram", 2)]
    first = run_benchmark(
        llm, prompts(), candidates, PARAMS, save=lambda each: saved.append(list(each)), enough=lambda: len(saved) == 2
    )
    assert [{each.case for each in block} for block in saved] == [{PLAIN, "ngram k=2"}] * 2
    assert len(first.measurements) == 4
    assert not first.partial
    whole = run_benchmark(llm, prompts(), candidates, PARAMS, known=first.measurements)
    assert whole.measurements[:4] == first.measurements
    assert {each.prompt_id for each in whole.measurements} == {"p0", "p1", "p2", "p3"}
    assert len(whole.measurements) == 8


# Settings.


@pytest.mark.parametrize(
    "settings",
    [
        Settings("smollm2-135m", "suffix+table"),
        Settings("some/model", "none", 0),
        Settings('a "model"\n', "model+ngram", 7, "block", "draft\\er", ("/a/b", "c d")),
    ],
)
def test_settings_are_read_as_they_were_written(settings, tmp_path):
    path = tmp_path / "settings.toml"
    settings.save(path, {"reason": 'it "pays"', "speedup": 2.5, "low": None, "categories": {"a b": {"high": None}}})
    assert Settings.load(path) == settings
    assert "low" not in path.read_text(encoding="utf-8").split("[measured]")[1]


GOOD = 'version = 1\nmodel = "m"\ndrafter = "ngram"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "version = None: must be 1"),
        ("version = 2\n", "version = 2: must be 1"),
        ("version", "is no TOML"),
        (GOOD + "colour = 1", "colour: no such key; there are model, drafter"),
        ('version = 1\nmodel = "m"', "drafter = None: must be a text"),
        ('version = 1\nmodel = 3\ndrafter = "ngram"', "model = 3: must be a text"),
        (GOOD + "num_speculative_tokens = -1", "num_speculative_tokens = -1: must be a number, or"),
        (GOOD + "num_speculative_tokens = true", "num_speculative_tokens = True"),
        (GOOD + 'num_speculative_tokens = "many"', "num_speculative_tokens = 'many'"),
        (GOOD + 'verification = "none"', "verification='none': must be one of coupled"),
        (GOOD + "trained = 3", "trained = 3: must be a list of folders"),
        (GOOD + 'draft_model = ""', "draft_model = '': must be a text"),
    ],
)
def test_wrong_settings(text, message, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=r"settings .*settings\.toml: ") as error:
        Settings.load(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_that_are_not_there(tmp_path):
    with pytest.raises(OptionError, match=r"nothing\.toml: can't be read \(No such file"):
        Settings.load(tmp_path / "nothing.toml")
    (tmp_path / "junk.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="is no TOML"):
        Settings.load(tmp_path / "junk.toml")


def test_settings_and_what_they_say_is_one_too_many(tmp_path):
    path = tmp_path / "settings.toml"
    Settings("smollm2-135m", "ngram").save(path, {})
    for option in (
        {"drafter": "suffix"},
        {"num_speculative_tokens": 3},
        {"verification": "block"},
        {"draft_model": "x"},
        {"trained": "x"},
    ):
        with pytest.raises(OptionError, match=r"says drafter, .*; leave these out"):
            sakiyomi.load("smollm2-135m", settings=path, **option)
    for option in ("-d suffix", "-k 3", "--verification block", "--draft-model x", "--trained x"):
        result = CliRunner().invoke(cli.app, ["generate", "x", "--settings", str(path), *option.split()])
        assert isinstance(result.exception, OptionError)
        assert "too; leave one of them out" in str(result.exception)


@pytest.mark.model
def test_settings_are_used(tmp_path):
    path = tmp_path / "settings.toml"
    Settings("smollm2-135m", "suffix+table" if core.available() else "ngram", 3).save(path, {"reason": "a test"})
    llm = sakiyomi.load("smollm2-135m", settings=path)
    assert (llm.drafter, llm.num_speculative_tokens) == (Settings.load(path).drafter, 3)
    records = llm.generate("one two three one two three one two", SamplingParams(max_new_tokens=12)).stats.records
    assert 0 < max(each.depth for each in records) <= 3
    replace(Settings.load(path), model="another", drafter="none").save(path, {})
    with pytest.warns(RuntimeWarning, match="were tuned for another, not for smollm2-135m"):
        assert sakiyomi.load("smollm2-135m", settings=path).drafter == "none"


# The command.


@pytest.fixture
def run(llm, monkeypatch, tmp_path) -> Iterator[Callable[..., Any]]:
    """Run the command with the tiny model, in a folder of its own."""
    monkeypatch.setattr(tune_command, "load_llm", lambda *args, **options: llm)
    monkeypatch.setattr(tune_command, "drafter_names", lambda *args: ())
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": each.text, "category": each.category}) + "\n" for each in prompts())
    )

    def invoke(line: str = "", **options: Any) -> Any:
        arguments = ["tune", "m", "--workload", "prompts.jsonl", "-n", "12", "-d", "ngram", "-k", "1-3", "-k", "auto"]
        return CliRunner().invoke(cli.app, [*arguments, *line.split()], **options)

    return invoke


def found_in(folder: str) -> list[str]:
    return sorted(each.name for each in Path(folder).iterdir())


def test_the_command(run):
    """Files, screen and JSON say the same; with a verdict there are settings, and the journal is gone."""
    result = run("--no-report")
    assert result.exit_code == 0, result.output
    whole = json.loads(Path("sakiyomi-tune/result.json").read_text())
    assert whole["recommendation"]["sentence"].split(":")[0] in " ".join(result.stdout.split())
    clear = whole["recommendation"]["verdict"] != "unclear"
    assert found_in("sakiyomi-tune") == ["result.json", *(["settings.toml"] if clear else [])]
    assert [each["num_speculative_tokens"] for each in whole["candidates"]] == [1, 2, 3, None]
    as_json = run("--no-report --json")
    assert json.loads(as_json.stdout)["workload"]["prompts"] == 4


@pytest.mark.parametrize(("verdict", "drafter"), [("faster", "ngram"), ("off", "none"), ("unclear", None)])
def test_settings_are_written_where_there_is_a_verdict(run, monkeypatch, verdict, drafter):
    """And where there is none those of an earlier run don't stay."""

    def recommended(*args: Any) -> dict[str, Any]:
        name = drafter or "ngram"
        return {
            "case": "x", "drafter": name, "num_speculative_tokens": 3, "verification": "coupled", "verdict": verdict,
            "sentence": "So it is.", "measured": "x", "speedup": 2.0, "low": 1.5, "high": 2.5,
        }  # fmt: skip

    monkeypatch.setattr(findings, "_recommendation", recommended)
    Path("sakiyomi-tune").mkdir()
    Path("sakiyomi-tune/settings.toml").write_text("old")
    assert run("--no-report").exit_code == 0
    if drafter is None:
        assert not Path("sakiyomi-tune/settings.toml").exists()
    else:
        assert Settings.load("sakiyomi-tune/settings.toml") == Settings("m", drafter, 3)
        assert 'reason = "So it is."' in Path("sakiyomi-tune/settings.toml").read_text()


def test_ctrl_c_keeps_what_there_is(run, monkeypatch):
    calls = 0
    record = tuner.record

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return record(*args, **options)

    monkeypatch.setattr(tuner, "record", interrupted)
    result = run("--no-report")
    assert result.exit_code == 130
    assert "interrupted; the same command goes on from here" in result.stderr
    assert found_in("sakiyomi-tune") == ["unfinished.jsonl"]
    again = run("--no-report")
    assert again.exit_code == 0
    assert "going on from what sakiyomi-tune has of this run" in again.stderr
    assert "unfinished.jsonl" not in found_in("sakiyomi-tune")
    assert "going on" not in run("--no-report").stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--minutes 0", "--minutes 0: must be above 0"),
        ("--minutes nan", "--minutes nan: must be above 0"),
        ("-k 0", "--num-speculative-tokens 0: must be in 1..64"),
        ("-k 5-2", "--num-speculative-tokens 5-2: must be in 1..64, the lower first"),
        ("-k 1-auto", "--num-speculative-tokens 1-auto: must be like 1-16"),
        ("-k 1-99", "--num-speculative-tokens 1-99: must be in 1..64"),
        ("-k many", "--num-speculative-tokens many: must be a number"),
        ("-d none", "--drafter none: plain decoding is always considered"),
        ("--verification block", "--verification block: is the same as coupled at --temperature 0"),
        ("--verification some -t 1", "verification='some': must be one of"),
        ("--confirm 0", "confirm=0: must be at least 1"),
        ("--batch-size 1", "batch_sizes=[1]: must be from 2 on"),
        ("--context 1,x", "--context 1,x: must be numbers with commas, like 256,1024"),
        ("--context 9,3", "contexts=[9, 3]: must be tokens from 1 on, ascending"),
        ("--output prompts.jsonl", "--output prompts.jsonl: can't be written"),
        ("--category none", "category 'none': not in this workload"),
        ("-n 0", "max_new_tokens=0"),
    ],
)
def test_wrong_options_of_the_command(run, line, message):
    result = run(f"--no-report {line}")
    assert isinstance(result.exception, OptionError)
    assert message in str(result.exception)
    assert not [each for each in Path().iterdir() if each.is_dir()], "no folder is left behind"


def test_bad_lines_stop_it_or_are_left_out(run):
    with Path("prompts.jsonl").open("a") as file:
        file.write("junk\n")
    result = run("--no-report")
    assert isinstance(result.exception, OptionError)
    assert "line 5" in str(result.exception)
    found = json.loads(run("--no-report --skip-bad --json").stdout)
    assert len(found["workload"]["bad"]) == 1
    assert any("1 bad lines" in note for note in found["notes"])


def test_the_report_needs_its_package_before_the_work(run, monkeypatch):
    from sakiyomi.bench import page

    def missing() -> None:
        raise OptionError("report: needs vl-convert-python; pip install 'sakiyomi[tune]'")

    monkeypatch.setattr(page, "require_charts", missing)
    monkeypatch.setattr(tune_command, "load_llm", lambda *args, **options: pytest.fail("loaded"))
    assert "sakiyomi[tune]" in str(run().exception)


def test_report_and_plots_are_written(run):
    pytest.importorskip("vl_convert")
    result = run("--plots plots")
    assert result.exit_code == 0, result.output
    page = Path("sakiyomi-tune/report.html").read_text(encoding="utf-8")
    embedded = page.split('id="result">')[1].split("</script>")[0]
    assert (
        json.loads(embedded)["recommendation"]
        == json.loads(Path("sakiyomi-tune/result.json").read_text())["recommendation"]
    )
    assert {each.suffix for each in Path("plots").iterdir()} == {".svg", ".png"}


@pytest.mark.model
def test_the_snippets_of_the_documentation_run(capsys, tmp_path):
    text = (Path(__file__).parent.parent / "docs" / "tuning.md").read_text(encoding="utf-8")
    load, evaluate = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(evaluate, "tuning.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 8
    path = tmp_path / "settings.toml"
    Settings("smollm2-135m", "ngram").save(path, {})
    names = {"my-model": "smollm2-135m", "sakiyomi-tune/settings.toml": str(path)}
    for name, other in names.items():
        assert name in load
        load = load.replace(name, other)
    exec(compile("import sakiyomi\n" + load, "tuning.md", "exec"), found := {})
    assert found["llm"].drafter == "ngram"


@pytest.mark.model
@needs_core
def test_the_default_model_is_replayed_as_it_is_live():
    """All that comes with it, in one: what is remembered, looked up, and drafted from states."""
    llm = sakiyomi.load("smollm2-135m", drafter="none")
    texts = ("Write a limerick about a cat.", "Say it twice: the red fox saw the moon over the river.")
    given = [Prompt(str(i), "all", messages=({"role": "user", "content": text},)) for i, text in enumerate(texts)]
    for params in (SamplingParams(max_new_tokens=32), SamplingParams(max_new_tokens=32, temperature=0.8, seed=1)):
        options = quick(drafters=("eagle3", "suffix+table"), lengths=(4,))
        tuning = tune(llm, given, params, options)
        assert not tuning.live.differences
        live = {(each.case, each.prompt_id): each.stats for each in tuning.live.measurements if each.repeat == 0}
        for case in ("eagle3 k=4", "suffix+table k=4"):
            for prompt_id, replayed in tuning.predicted[case].items():
                measured = live[case, prompt_id].records
                assert [(r.drafted, r.accepted, r.emitted, r.rows) for r in replayed.records] == [
                    (r.drafted, r.accepted, r.emitted, r.rows) for r in measured
                ]
            assert sum(each.accepted for each in tuning.predicted[case].values()) > 10
