"""Replay: what it says of rounds is what rounds really are, for every drafter, length and policy."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
import torch

import test_eagle
from conftest import VOCAB, byte_tokenizer, make_reference
from sakiyomi import core
from sakiyomi.bench.replay import ChainReplay, PolicyReplay, Recording, Timing, needed_layers, record
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters import NgramDrafter, SuffixDrafter
from sakiyomi.drafting import Source
from sakiyomi.engine import Engine
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, Drafter, RoundRecord
from sakiyomi.llm import LLM
from sakiyomi.policy import AdaptivePolicy, FixedPolicy, Policy
from sakiyomi.sampling import SamplingParams
from sakiyomi.stats import Stats
from test_drafters import with_models

LENGTHS = (1, 3, 8, 16)
PROMPTS = ([7, 8, 9, 7, 8, 9, 40, 41, 7, 8], [3, 4] * 20, [5], list(range(70)) * 2)
NAMES = (
    "ngram",
    "suffix",
    "table",
    "mlp",
    "medusa",
    "eagle",
    "block",
    "model",
    "model, common tokens",
    "model, text",
)
ANYWHERE = NAMES[:6] + NAMES[7:9]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=24),
    "sampled": SamplingParams(max_new_tokens=24, temperature=0.3, seed=2),
    "stopped": SamplingParams(max_new_tokens=24, stop_token_ids=(60, 61, 62, 63, 64, 65, 66)),
}
needs_core = pytest.mark.skipif(not core.available(), reason="needs the compiled core")
pytestmark = pytest.mark.filterwarnings("ignore:a drafter failed")


@pytest.fixture(scope="module")
def llm(llama) -> LLM:
    return LLM(llama, byte_tokenizer(), drafter="none")


@functools.cache
def made(target) -> dict[str, Drafter]:
    return with_models(target)


def fresh(target, names: str) -> list[Drafter]:
    """Return drafters that remember nothing."""
    return [SuffixDrafter() if name == "suffix" else made(target)[name] for name in names.split("+")]


def what_happened(stats: Stats | Sequence[RoundRecord]) -> list[tuple[object, ...]]:
    records = stats.records if isinstance(stats, Stats) else stats
    return [(r.drafter, r.drafted, r.depth, r.accepted, r.emitted, r.rows, r.context) for r in records]


def live(target, drafters: Sequence[Drafter], policy: Policy, params: SamplingParams) -> list[list[RoundRecord]]:
    """Return the records of answers to all prompts, one after another."""
    engine = Engine(target)
    return [[c.record for c in engine.run(engine.request(p, params, drafters, policy))] for p in PROMPTS]


def recorded(llm: LLM, drafters: Sequence[Drafter], params: SamplingParams) -> list[Recording]:
    return [record(llm, prompt, params, layers=needed_layers(drafters)) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("names", "way"),
    [
        *((names, "greedy") for names in (*(each for each in NAMES if each in ANYWHERE), "ngram+table", "ngram+mlp")),
        *((names, "sampled") for names in ("ngram", "table", "eagle", "table+suffix+model")),
        *((names, "stopped") for names in ("suffix", "eagle", "model")),
    ],
)
def test_chains_are_those_of_live_rounds(llm, names, way):
    """Every round of every length, also of drafters that remember from answer to answer and that read states."""
    drafters, params = fresh(llm.target, names), PARAMS[way]
    recordings = recorded(llm, drafters, params)
    replay = ChainReplay(drafters, LENGTHS)
    replayed = [replay.add(each) for each in recordings]
    for k in LENGTHS:
        expected = live(llm.target, fresh(llm.target, names), FixedPolicy(k), params)
        assert [what_happened(each[k]) for each in replayed] == [what_happened(each) for each in expected]
    if "model" in names:  # the target itself
        assert any(stats.accepted > 3 for each in replayed for stats in each.values())


@pytest.mark.parametrize(
    ("names", "way"), [*((names, "greedy") for names in NAMES), ("block", "sampled"), ("model, text", "stopped")]
)
def test_a_policy_is_replayed_as_it_would_be_live(llm, names, way):
    params, k = PARAMS[way], 4
    drafters = fresh(llm.target, names)
    recordings = recorded(llm, drafters, params)
    replay = PolicyReplay(drafters, FixedPolicy(k))
    replayed = [what_happened(replay.add(each)) for each in recordings]
    expected = live(llm.target, fresh(llm.target, names), FixedPolicy(k), params)
    assert replayed == [what_happened(each) for each in expected]


class Eager:
    """A policy that checks whole trees, and time has no part in it."""

    def session(self, sources):
        self.sources = sources
        return self

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        return next((draft for each in self.sources if (draft := each.propose(min(left, 6)))), Draft())

    def observe(self, checked) -> None:
        pass


@pytest.mark.parametrize("names", ["suffix", "table", "eagle", "suffix+eagle", "model"])
def test_trees_are_replayed(llm, names):
    """The states that a drafter reads after a tree are those of the path that stood."""
    drafters, params = fresh(llm.target, names), PARAMS["greedy"]
    recordings = recorded(llm, drafters, params)
    replay = PolicyReplay(drafters, Eager())
    replayed = [what_happened(replay.add(each)) for each in recordings]
    assert replayed == [what_happened(each) for each in live(llm.target, fresh(llm.target, names), Eager(), params)]
    assert any(drafted > depth for rounds in replayed for _, drafted, depth, *_ in rounds)


def test_time_is_the_targets_as_told_and_the_drafters_as_it_passes(llm):
    costs = ModelCosts(CostTable((1, 2, 8), (1.0, 1.5, 2.0)))
    timing = Timing(costs, round_s=0.25, token_s=0.125)
    recording = record(llm, PROMPTS[0], SamplingParams(max_new_tokens=30))
    plain = PolicyReplay([], None, timing).add(recording)
    assert plain.target_calls == 30
    assert plain.tpot_s == pytest.approx(1.125, abs=0.05)  # the engine's own time is real
    chains = ChainReplay([*fresh(llm.target, "ngram")], [2], timing).add(recording)[2]
    for each in chains.records[1:]:
        assert each.target_s == costs.seconds(each.rows, each.context)
        assert each.total_s == pytest.approx(each.draft_s + each.target_s + 0.25 + 0.125 * each.emitted)
    assert 0 < chains.draft_s < 0.5
    rounds = PolicyReplay(fresh(llm.target, "ngram"), FixedPolicy(2), timing).add(recording)
    assert rounds.target_s == pytest.approx(chains.target_s, abs=0.05)


def test_an_adaptive_policy_goes_by_the_clock_of_the_replay(llm):
    """It drafts where the told costs make drafts free, and not where they make them dear."""
    params = SamplingParams(max_new_tokens=60)
    recording = record(llm, PROMPTS[1], params)
    drafted = {}
    for name, seconds in {"free": (1.0, 1.001), "dear": (1.0, 90.0)}.items():
        table = CostTable((1, 33), seconds)
        replay = PolicyReplay(fresh(llm.target, "ngram"), AdaptivePolicy(ModelCosts(table)), Timing(ModelCosts(table)))
        drafted[name] = replay.add(recording).drafted
    assert drafted["free"] > 20 > drafted["dear"]


def test_what_is_expected_is_computed_at_once_and_changes_nothing(llm):
    """A recorded answer saves target calls as far as it is right; where it is wrong the target has its way."""
    for params in (PARAMS["greedy"], PARAMS["sampled"]):
        own = record(llm, PROMPTS[0], params, layers=(1, 2))
        assert own.stats.target_calls == len(own.tokens)
        again = record(llm, PROMPTS[0], params, layers=(1, 2), expected=own.tokens)
        assert (again.tokens, again.finish_reason) == (own.tokens, own.finish_reason)
        assert again.stats.target_calls == 1 < own.stats.target_calls
        wrong = [*own.tokens[:9], (own.tokens[9] + 1) % VOCAB, *own.tokens[10:]]
        half = record(llm, PROMPTS[0], params, layers=(1, 2), expected=wrong)
        assert half.tokens == own.tokens
        assert half.stats.target_calls == 1 + len(own.tokens) - 10
        for layer in (1, 2):
            assert len(own.states[layer]) == len(PROMPTS[0]) + len(own.tokens) - 1
            for other in (again, half):
                torch.testing.assert_close(other.states[layer], own.states[layer])


def test_states_are_those_of_every_token_but_the_last(llm):
    """Prompts longer than a forward too."""
    recording = record(llm, PROMPTS[3], PARAMS["greedy"], layers=(1,))
    assert len(PROMPTS[3]) > llm.target.max_rows
    assert len(recording.states[1]) == len(PROMPTS[3]) + len(recording.tokens) - 1


def test_a_replay_needs_nothing_but_tokens():
    """So that an author of a drafter can try it on answers from anywhere."""
    recording = Recording(
        (1, 2, 3), (1, 2, 3, 1, 2), SamplingParams(max_new_tokens=5), 9, 64, 16, Stats((), 0, 0), "length"
    )
    stats = ChainReplay([NgramDrafter()], [3]).add(recording)[3]
    assert what_happened(stats) == [("", 0, 0, 0, 1, 3, 0), ("ngram", 3, 3, 3, 4, 4, 3)]
    assert stats.tokens_per_target_call == 2.5


class Failing:
    name, costs, samples, prefixes = "failing", None, False, True

    def session(self, prompt, params, sampled):
        raise RuntimeError("no luck")


def test_a_drafter_that_fails_is_told(llm):
    recording = record(llm, PROMPTS[0], PARAMS["greedy"])
    with pytest.warns(RuntimeWarning, match="no luck"):
        stats = PolicyReplay([Failing()], FixedPolicy(2)).add(recording)
    assert stats.errors == ("failing: RuntimeError: no luck",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChainReplay([], [1]), "needs at least one drafter"),
        (lambda: ChainReplay([NgramDrafter()], [0]), "lengths from 1 on"),
        (lambda: ChainReplay([NgramDrafter()], []), "lengths"),
    ],
)
def test_wrong_options(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_what_can_not_be_asked_anywhere_says_so(llm):
    for name, drafter in made(llm.target).items():
        assert (getattr(drafter, "prefixes", None) is not None) == (name in ANYWHERE), name
    block = made(llm.target)["block"]
    with pytest.raises(OptionError, match=r"block: can't be asked at any place .*; replay them with PolicyReplay"):
        ChainReplay([block], [1])
    with pytest.raises(OptionError, match=r"ngram\+eagle: can't be asked at any place"):
        ChainReplay(fresh(llm.target, "ngram+eagle"), [1])


@pytest.mark.parametrize("context", [20, 33, 64])
def test_a_drafter_whose_context_is_full_is_replayed(llm, context, monkeypatch):
    """It begins anew at the same tokens, whatever rounds they came in: drafts are compared, since few stand."""
    drafter = test_eagle.Made("first", test_eagle.parts_of(make_reference("llama", num_hidden_layers=2))).drafter()
    monkeypatch.setattr(drafter, "context_length", context)
    recording = record(llm, PROMPTS[2], SamplingParams(max_new_tokens=150), layers=needed_layers([drafter]))
    tokens = (*recording.prompt, *recording.tokens)

    def drafts(every: int) -> dict[int, Draft]:
        source = Source(drafter, tokens[:1], recording.params, VOCAB, available=lambda: recording.states)
        found, read = {}, 0
        for length in range(1, len(tokens), every):
            source.read({layer: recording.states[layer][read : length - 1] for layer in source.hidden_layers})
            read = length - 1
            found[length] = source.propose(3)
            source.observe(tokens[length : length + every])
        return found

    each, third = drafts(1), drafts(3)
    assert sum(map(bool, third.values())) > 40
    assert all(each[length] == draft for length, draft in third.items())


@needs_core
@pytest.mark.parametrize(("vocabulary", "noise"), [(2, 0.4), (4, 0.2)])
def test_lengths_of_a_drafter_with_many_guesses(vocabulary, noise):
    """Texts in which matches compete and trees are cut: what a larger budget gives says little of a smaller one."""
    rng = random.Random(1)
    replay = ChainReplay([SuffixDrafter()], range(1, 17))
    alone = {k: PolicyReplay([SuffixDrafter()], FixedPolicy(k)) for k in range(1, 17)}
    for _ in range(12):
        phrase = [rng.randrange(vocabulary) for _ in range(3)]
        text = [token if rng.random() > noise else rng.randrange(vocabulary) for token in phrase * 43]
        params = SamplingParams(max_new_tokens=len(text))
        recording = Recording((1, 2), tuple(text), params, vocabulary, 4096, 16, Stats((), 0, 0), "length")
        found = replay.add(recording)
        for k, rounds in alone.items():
            assert what_happened(found[k]) == what_happened(rounds.add(recording)), k


def test_a_drafter_that_fails_is_told_in_chains_too(llm):
    recording = record(llm, PROMPTS[0], PARAMS["greedy"])
    for stats in ChainReplay([Failing(), *fresh(llm.target, "ngram")], [1, 3]).add(recording).values():
        assert stats.errors == ("failing: RuntimeError: no luck",)


def test_an_answer_without_tokens_has_no_rounds():
    empty = Recording((1, 2), (), SamplingParams(), 9, 64, 16, Stats((), 0, 0), "length")
    assert PolicyReplay([], None).add(empty).records == ()
    assert ChainReplay([NgramDrafter()], [2]).add(empty)[2].records == ()
