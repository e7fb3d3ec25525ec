"""Names of drafters, and what goes for all of them."""

from __future__ import annotations

import pytest

from sakiyomi import core, drafters
from sakiyomi.drafters import DRAFTERS, parse
from sakiyomi.drafting import depth
from sakiyomi.engine import Engine
from sakiyomi.errors import OptionError
from sakiyomi.policy import FixedPolicy
from sakiyomi.sampling import SamplingParams

PROMPT = [7, 8, 9, 7, 8, 9, 40, 41, 7, 8]
needs_core = pytest.mark.skipif(not core.available(), reason="needs the compiled core")


def test_names_stand_for_drafters():
    assert parse("none") == ()
    assert parse("ngram") == ("ngram",)
    assert parse("suffix+ngram") == ("suffix", "ngram")
    assert parse("model", draft_model=True) == ("model",)
    assert parse("model+suffix", draft_model=True) == ("model", "suffix")


def test_auto_is_what_there_is(monkeypatch):
    monkeypatch.setattr(drafters.core, "available", lambda: ("plain",))
    assert parse("auto") == ("suffix",)
    assert parse("auto", draft_model=True) == ("suffix", "model")
    monkeypatch.setattr(drafters.core, "available", lambda: ())
    assert parse("auto") == ("ngram",)
    assert parse("auto", draft_model=True) == ("ngram", "model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ngramm", r"drafter='ngramm': must be one of auto, suffix, ngram, model, none, or several joined with \+"),
        ("", "drafter='': must be one of"),
        ("ngram+", r"drafter='ngram\+': must be one of"),
        ("ngram+none", r"drafter='ngram\+none': must be one of"),
        ("ngram+ngram", r"drafter='ngram\+ngram': names a drafter twice"),
        ("model", "drafter='model': needs a draft model; name one with draft_model"),
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
