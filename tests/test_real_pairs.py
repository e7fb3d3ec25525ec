"""Two real models of one family, the smaller drafting for the larger. Slow: pytest -m slow, with the folders or files
named in SAKIYOMI_TEST_TARGET and SAKIYOMI_TEST_DRAFT_MODEL."""

from __future__ import annotations

import os

import pytest

from sakiyomi import LLM, SamplingParams, load
from sakiyomi.bench import builtin_workload, select

TARGET, DRAFT_MODEL = (os.environ.get(f"SAKIYOMI_TEST_{name}") for name in ("TARGET", "DRAFT_MODEL"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TARGET or not DRAFT_MODEL, reason="no models named"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load(TARGET, draft_model=DRAFT_MODEL, progress=False)


@pytest.mark.parametrize("prompt", select(builtin_workload(), ["code", "code-edit"], 1), ids=lambda prompt: prompt.id)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=96, ignore_eos=True),
        SamplingParams(max_new_tokens=64, temperature=0.9, seed=4, ignore_eos=True),
    ],
    ids=["greedy", "sampled"],
)
def test_the_text_is_the_targets(llm, prompt, params):
    plain = llm.generate(prompt.input, params, drafter=None)
    for drafter, k in (("model", 1), ("model", 5), ("model", None), ("suffix+model", 4), ("auto", None)):
        found = llm.generate(prompt.input, params, drafter=drafter, num_speculative_tokens=k)
        assert found.token_ids == plain.token_ids, (drafter, k)
        assert found.stats.accepted > 0
        assert not found.stats.errors
