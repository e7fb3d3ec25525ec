"""The drafters that come with the package: they fit their model, and the text doesn't depend on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sakiyomi
from sakiyomi import core
from sakiyomi.drafters import TRAINED
from sakiyomi.loading import trained_for

FOLDER = Path(sakiyomi.__file__).parent / "trained"
PROMPT = [{"role": "user", "content": "Write a Python function that adds up a list of numbers, with a docstring."}]


def test_they_are_small_and_say_how_they_were_made():
    drafters = [path for model in FOLDER.iterdir() for path in model.iterdir()]
    assert drafters
    for path in drafters:
        assert path.name in TRAINED
        card = json.loads((path / "card.json").read_text("utf-8"))
        assert card["kind"] == path.name
        assert card["command"].startswith("sakiyomi train ")
        assert card["score"]["tokens_per_call"][-1] > 1.3
    for model in FOLDER.iterdir():
        assert sum(path.stat().st_size for path in model.rglob("*") if path.is_file()) <= 16e6


@pytest.mark.model
def test_the_default_model_has_a_table_and_a_head():
    assert set(trained_for("smollm2-135m")) == {"table", "eagle3"}
    llm = sakiyomi.load("smollm2-135m", progress=False)
    lookup = "suffix" if core.available() else "ngram"
    assert [each.name for each in llm.speculation("auto").drafters] == [lookup, "table", "eagle3"]
    for params in (
        sakiyomi.SamplingParams(max_new_tokens=48),
        sakiyomi.SamplingParams(max_new_tokens=24, temperature=0.7, seed=3),
    ):
        plain = llm.generate(PROMPT, params, drafter=None)
        for drafter, k in (("auto", None), ("eagle3", 4), ("table", 3), ("table+eagle3", None)):
            found = llm.generate(PROMPT, params, drafter=drafter, num_speculative_tokens=k)
            assert found.token_ids == plain.token_ids, (drafter, k, params.temperature)
            assert not found.stats.errors
            if k and params.temperature == 0:
                assert found.stats.tokens_per_target_call > 1.3, "a drafter for another model would be near 1"
