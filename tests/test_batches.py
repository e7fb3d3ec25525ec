"""Several sequences in one round: each is what it would be alone, comes and goes when it is time, and fails alone."""

from __future__ import annotations

import random
import threading

import pytest

from conftest import VOCAB, byte_tokenizer, make_reference, make_target
from sakiyomi import LLM, OptionError, PromptError, SamplingParams
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine import Chunk, Engine

TABLE = CostTable((1, 2, 4, 8, 16, 33), (1e-3, 1.02e-3, 1.05e-3, 1.1e-3, 1.2e-3, 1.5e-3))
PROMPTS = [[7, 8, 9, 7, 8, 9, 40, 41, 7, 8], [300], list(range(1, 200)), [5, 6] * 20, [9, 9, 9], [50, 60, 70, 50, 60]]
PARAMS = [
    SamplingParams(max_new_tokens=40),
    SamplingParams(max_new_tokens=3, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=25, temperature=0.8, top_p=0.9, seed=4),
    SamplingParams(max_new_tokens=60, temperature=1.2, min_p=0.02, repetition_penalty=1.2, seed=5),
    SamplingParams(max_new_tokens=50, stop_token_ids=tuple(range(0, 120, 3))),
    SamplingParams(max_new_tokens=30, temperature=0.9, seed=6, stop=("e", "t"), min_new_tokens=4),
]


@pytest.fixture(scope="module")
def llm(llama) -> LLM:
    small = make_target(make_reference("llama", num_hidden_layers=1), kernels="auto")
    drafter = ModelDrafter(small, VOCAB, costs=ModelCosts(TABLE))
    return LLM(llama, byte_tokenizer(), draft_model=drafter, costs=lambda: ModelCosts(TABLE))


@pytest.fixture(scope="module")
def alone(llm):
    found = [llm.generate(ids, each, drafter=None) for ids, each in zip(PROMPTS, PARAMS, strict=True)]
    assert len({each.finish_reason for each in found}) > 1  # they end apart, and for several reasons
    return found


@pytest.mark.parametrize("drafter", [None, "suffix", "ngram", "auto", "model"])
@pytest.mark.parametrize("k", [1, 5, None])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
def test_a_row_is_what_it_would_be_alone(llm, alone, drafter, k, batch_size):
    found = llm.generate(PROMPTS, PARAMS, drafter=drafter, num_speculative_tokens=k, batch_size=batch_size)
    for ours, expected in zip(found, alone, strict=True):
        assert ours.token_ids == expected.token_ids
        assert ours.text == expected.text
        assert ours.finish_reason == expected.finish_reason
        assert ours.stats.tokens == len(ours.token_ids)
        assert ours.error is None


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_samples_in_batches_are_those_of_one_row_alone(llm, verification):
    """Their noise is keyed by each row's own seed and positions, so that neighbours change nothing."""
    options = {"drafter": "model", "num_speculative_tokens": 3, "verification": verification}
    alone = [llm.generate(ids, each, **options) for ids, each in zip(PROMPTS, PARAMS, strict=True)]
    together = llm.generate(PROMPTS, PARAMS, **options)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_a_sequence_that_ends_leaves_and_one_that_waits_joins(llm, llama, monkeypatch):
    sizes: list[int] = []
    forward = llama.forward
    monkeypatch.setattr(llama, "forward", lambda work, **options: sizes.append(len(work)) or forward(work, **options))
    params = [SamplingParams(max_new_tokens=count) for count in (2, 6, 3, 1, 2)]
    order: list[tuple[int, int]] = []
    for index, chunk in llm.stream_batch([[n + 1] for n in range(5)], params, drafter=None, batch_size=2):
        assert isinstance(chunk, Chunk)
        order.append((index, len(chunk.tokens)))
    # Rounds of two: 0 ends after two, 2 joins, then 3, then 4; 1 goes on all the while.
    assert [index for index, _ in order] == [0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 1, 3, 4, 4]
    assert sizes == [2, 2, 2, 2, 2, 2, 1, 1]


def test_requests_are_made_when_there_is_room(llama):
    """A thousand prompts don't take the memory of a thousand sequences."""
    engine, made = Engine(llama, byte_tokenizer()), []

    def requests():
        for n in range(6):
            made.append(n)
            yield engine.request([n + 1], SamplingParams(max_new_tokens=2 + n))

    running = engine.run_together(requests(), 2)
    next(running)
    assert made == [0, 1]
    assert len(list(running)) == sum(range(2, 8)) - 1
    assert made == list(range(6))


def test_a_row_that_fails_takes_no_other_with_it(llm, alone):
    def fails(ids, logits):
        if len(ids) > len(PROMPTS[0]) + 5:
            raise RuntimeError("a processor failed")
        return logits

    params = [SamplingParams(max_new_tokens=40, processors=(fails,)), *PARAMS[1:]]
    found = llm.generate(PROMPTS, params, drafter="suffix", num_speculative_tokens=2, batch_size=3)
    assert str(found[0].error) == "a processor failed"
    assert found[0].finish_reason == "error"
    assert 0 < len(found[0].token_ids) <= 6
    assert found[0].token_ids == alone[0].token_ids[: len(found[0].token_ids)]
    assert [each.token_ids for each in found[1:]] == [each.token_ids for each in alone[1:]]


def test_one_set_of_parameters_for_all(llm):
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=8)
    twins = llm.generate([PROMPTS[0], PROMPTS[3], PROMPTS[0]], params)
    assert twins[0].token_ids == twins[2].token_ids == llm.generate(PROMPTS[0], params).token_ids
    assert twins[0].token_ids != twins[1].token_ids


def test_texts_and_ids_mix(llm):
    found = llm.generate(["abc", [1, 2, 3], "x"], SamplingParams(max_new_tokens=4))
    assert [each.prompt_token_ids for each in found] == [
        tuple(llm.encode("abc")),
        (1, 2, 3),
        tuple(llm.encode("x")),
    ]


def test_bad_prompts_are_told_before_anything_runs(llm, llama, monkeypatch):
    monkeypatch.setattr(llama, "forward", lambda *args, **options: pytest.fail("nothing should run"))
    with pytest.raises(PromptError, match=f"prompt 1: prompt: token ids must be in 0..{VOCAB - 1}"):
        llm.generate([[1], [VOCAB]])
    with pytest.raises(PromptError, match="is empty"):
        llm.generate(["a", ""])
    with pytest.raises(OptionError, match="params: 2 of them for 3 prompts"):
        llm.generate([[1], [2], [3]], PARAMS[:2])
    with pytest.raises(OptionError, match="params: 2 of them for one prompt"):
        llm.generate([1, 2, 3], PARAMS[:2])
    with pytest.raises(OptionError, match="batch_size=0"):
        llm.generate([[1]], batch_size=0)


def test_random_comings_and_goings(llm):
    """Many short and long rows, of which a few fit at a time, with everything different between them."""
    source = random.Random(1)
    prompts = [[source.randrange(VOCAB) for _ in range(source.choice([1, 2, 30, 140]))] for _ in range(14)]
    params = [
        SamplingParams(max_new_tokens=source.randint(1, 30), temperature=source.choice([0, 0.7, 1.5]), seed=n)
        for n in range(14)
    ]
    expected = [llm.generate(ids, each, drafter=None).token_ids for ids, each in zip(prompts, params, strict=True)]
    for batch_size in (3, 5):
        found = llm.generate(prompts, params, drafter="suffix+ngram", batch_size=batch_size)
        assert [each.token_ids for each in found] == expected


def test_closing_a_batch_ends_it(llm):
    before = threading.active_count()
    running = llm.stream_batch(PROMPTS, PARAMS, batch_size=4)
    next(running)
    running.close()
    assert threading.active_count() == before
    assert llm.generate(PROMPTS[0], PARAMS[0]).token_ids
