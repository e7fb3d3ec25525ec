"""Names of drafters, and what goes for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

import test_block
import test_eagle
import test_medusa
import test_mlp
from conftest import VOCAB, byte_tokenizer, make_reference
from sakiyomi import core, drafters
from sakiyomi.audit.chance import Counts, by_place
from sakiyomi.distribution import Distribution
from sakiyomi.drafters import DRAFTERS, parse
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.retokenised import CommonDrafter, TextDrafter
from sakiyomi.drafters.table import TableDrafter, build_table
from sakiyomi.drafting import Source, depth, first_path
from sakiyomi.engine import Engine
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, Drafter, Target, Work
from sakiyomi.policy import FixedPolicy
from sakiyomi.sampling import SamplingParams

PROMPT = [7, 8, 9, 7, 8, 9, 40, 41, 7, 8]
needs_core = pytest.mark.skipif(not core.available(), reason="needs the compiled core")


def test_names_stand_for_drafters():
    assert parse("none") == ()
    assert parse("ngram") == ("ngram",)
    assert parse("suffix+ngram") == ("suffix", "ngram")
    assert parse("model", ["model"]) == ("model",)
    assert parse("model+suffix", ["model"]) == ("model", "suffix")


def test_auto_is_what_there_is(monkeypatch):
    monkeypatch.setattr(drafters.core, "available", lambda: ("plain",))
    assert parse("auto") == ("suffix",)
    assert parse("auto", ["model"]) == ("suffix", "model")
    assert parse("auto", ["model", "eagle3", "table"]) == ("suffix", "table", "eagle3", "model")
    monkeypatch.setattr(drafters.core, "available", lambda: ())
    assert parse("auto") == ("ngram",)
    assert parse("auto", ["model"]) == ("ngram", "model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ngramm", r"drafter='ngramm': must be one of auto, suffix, ngram, table, .*, none, or several joined with \+"),
        ("", "drafter='': must be one of"),
        ("ngram+", r"drafter='ngram\+': must be one of"),
        ("ngram+none", r"drafter='ngram\+none': must be one of"),
        ("ngram+ngram", r"drafter='ngram\+ngram': names a drafter twice"),
        ("model", "drafter='model': needs a draft model; name one with draft_model"),
        ("suffix+table", "needs a drafter of kind table, trained for this model; name its folder with trained"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(OptionError, match=message):
        parse(name)


@needs_core
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_new_tokens=60), SamplingParams(max_new_tokens=60, temperature=0.3, seed=2)],
    ids=["greedy", "sampled"],
)
def test_every_drafter_keeps_to_the_rules(llama, name, params):
    """Tokens as without it, sessions that don't touch each other, and proposals from what was observed only."""
    engine = Engine(llama)

    def run(many) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in many]
        while running := [i for i, each in enumerate(many) if each.finish_reason is None]:
            for i, chunk in zip(running, engine.round([many[i] for i in running]), strict=True):
                found[i].extend(chunk.token_ids)
        return found

    prompts = [PROMPT, [3, 4] * 20, [5]]
    plain = run([engine.request(prompt, params) for prompt in prompts])
    for k in (1, 4, 9):
        drafter = DRAFTERS[name]()
        assert drafter.name == name
        requests = [engine.request(prompt, params, [drafter], FixedPolicy(k)) for prompt in prompts]
        assert run(requests) == plain
        one, other = drafter.session(PROMPT, params), drafter.session([1, 2, 3], params)
        before = other.propose(5)
        one.propose(5)
        one.observe([7, 8, 9])
        assert other.propose(5) == before
        assert depth(one.propose(1)) <= 1


def with_models(target: Target) -> dict[str, Drafter]:
    """Return a drafter of each kind: those of the registry, and each way to draft with a model."""
    texts = byte_tokenizer()
    return {
        **{name: make() for name, make in DRAFTERS.items()},
        "table": TableDrafter(build_table([PROMPT * 4], vocab_size=VOCAB, max_bytes=10**6)),
        **trained(),
        "model": ModelDrafter(target, VOCAB, branches=3),
        "model, common tokens": CommonDrafter(target, texts, texts, VOCAB, branches=3),
        "model, text": TextDrafter(target, texts, texts, VOCAB),
    }


TRAINED = ("mlp", "medusa", "eagle", "block")


def trained() -> dict[str, Drafter]:
    """Return drafters with random weights that read the target's states."""
    parts = test_eagle.parts_of(make_reference("llama", num_hidden_layers=2))
    block = test_block.Made("full", parts)
    block.hidden_layers = (1, 2)
    config = test_mlp.CONFIGS["plain"]
    return {
        "mlp": test_mlp.drafter(config, test_mlp.tensors(config)),
        "medusa": test_medusa.drafter(test_medusa.random_heads()),
        "eagle": test_eagle.Made("first", parts).drafter(),
        "block": block.drafter(),
    }


def begun(drafter: Drafter, target: Target, params: SamplingParams, sampled: bool) -> Source:
    """Return a drafter at work on PROMPT, with what it reads of it."""
    source = Source(drafter, PROMPT, params, VOCAB, sampled, lambda: target.hidden_layers)
    layers = source.hidden_layers
    if layers:
        (output,) = target.forward([Work(target.new_sequence(), PROMPT[:-1])], hidden_layers=layers)
        source.read(dict(zip(layers, output.hidden, strict=True)))
    return source


def drawn(drafter: Drafter, target: Target, said: Callable[[Draft], Draft] = lambda draft: draft) -> dict[str, Counts]:
    """Return what a drafter draws with many seeds against what it says, by place; nothing for one that says nothing."""
    places: dict[str, Counts] = defaultdict(lambda: Counts(by_place))
    for seed in range(400):
        params = SamplingParams(temperature=1.2, top_k=12, seed=seed)
        source = begun(drafter, target, params, True)
        draft = source.propose(2)
        assert source.error is None
        assert (draft.distributions is not None) == (source.sampled and len(draft) > 0)
        if draft.distributions is None:
            continue
        main, draft = first_path(draft), said(draft)
        for i, (token, distribution) in enumerate(zip(draft.tokens, draft.distributions or (), strict=True)):
            parent = i - 1 if draft.parents is None else draft.parents[i]
            depth_ = "first" if parent < 0 else "second"
            places[depth_ if distribution in main.distributions else f"{depth_} sibling"].add(token, distribution)
    return places


@needs_core
@pytest.mark.parametrize("name", ["mlp", "medusa", "eagle", "block", "model", "model, common tokens", "model, text"])
def test_noise_is_the_drafters_own_where_something_is_sampled(llama, name):
    """Else what it draws, and how sure it is of that, would tell a policy what the target will choose."""
    drafter = with_models(llama)[name]
    ours, own = (
        [begun(drafter, llama, SamplingParams(temperature=1.2, seed=seed), sampled).propose(2) for seed in range(9)]
        for sampled in (False, True)
    )
    assert all(ours)
    assert all(own)
    same = sum(one.tokens[:1] == other.tokens[:1] for one, other in zip(ours, own, strict=True))
    assert same < 7


@needs_core
@pytest.mark.parametrize("name", [*DRAFTERS, "table", *TRAINED, "model", "model, common tokens", "model, text"])
def test_every_drafter_draws_from_what_it_says(llama, name):
    """Rejection and block rest on it: a distribution that isn't the one that was drawn from changes the text."""
    drafter = with_models(llama)[name]
    places = drawn(drafter, llama)
    assert set(places) == ({"first", "second", "first sibling", "second sibling"} if name in SAMPLING else set())
    for place, counts in places.items():
        test = counts.test()
        assert test.freedom >= 3, place
        assert test.p_value > 1e-3, place


SAMPLING = ("model", "model, common tokens")


def sharper(draft: Draft) -> Draft:
    return replace(draft, distributions=tuple(Distribution(q.ids, q.weights**1.5) for q in draft.distributions))


def likeliest(draft: Draft) -> Draft:
    return replace(draft, tokens=tuple(int(q.probabilities(VOCAB).argmax()) for q in draft.distributions))


def surest(draft: Draft) -> Draft:
    kept = draft.confidences[0] > 0.12
    return replace(draft, tokens=draft.tokens if kept else (), distributions=draft.distributions if kept else ())


@pytest.mark.parametrize("lie", [sharper, likeliest, surest])
def test_a_drafter_that_draws_from_something_else_is_caught(llama, lie):
    """The control of the test above: another temperature, the argmax as a sample, unsure drafts withheld."""
    places = drawn(with_models(llama)["model"], llama, lie)
    assert min(counts.test().p_value for counts in places.values()) < 1e-6
