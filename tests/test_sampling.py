"""Sampling: the noise is noise, the limits are those that users know, and choices depend on nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.errors import OptionError
from sakiyomi.sampling import Chooser, SamplingParams, _hash, _unhash, candidates, draw, gumbel_noise

VOCAB = 500


def logits_row(seed: int = 0, scale: float = 3.0, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def chooser(prompt=(1, 2, 3), **params) -> Chooser:
    return Chooser(SamplingParams(**params), prompt, VOCAB, [0])


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the chi-square statistic in standard deviations above its mean, cells under 5 pooled."""
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = observed.size - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def draws(z: np.ndarray, count: int, by: str) -> np.ndarray:
    drawn = [draw(z, None, *((7, i) if by == "position" else (i, 7))) for i in range(count)]
    return np.bincount(drawn, minlength=z.size)


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_softmax(by):
    """20,000 draws; a right sampler is beyond 5 deviations less than once in 10^5 runs, and here never: it's fixed."""
    z = logits_row(size=60, scale=1.5)
    p = np.exp(z.astype(np.float64))
    p /= p.sum()
    counts = draws(z, 20_000, by)
    assert chi_square(counts, p) < 5
    wrong = p.copy()  # negative control: 3 % of the mass moved between two common tokens
    first, second = np.argsort(p)[-2:]
    wrong[first] += 0.03
    wrong[second] -= 0.03
    assert chi_square(counts, wrong) > 5


def test_noise_is_standard_gumbel_and_uncorrelated():
    noise = np.stack([gumbel_noise(3, position, np.arange(2000)) for position in range(50)])
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    across_positions = np.corrcoef(noise)[np.triu_indices(50, 1)]
    across_tokens = np.corrcoef(noise[:, :200].T)[np.triu_indices(200, 1)]
    assert abs(across_positions).max() < 0.12  # 1/sqrt(2000) = 0.022
    assert abs(across_tokens.mean()) < 0.01
    other_seed = np.stack([gumbel_noise(4, position, np.arange(2000)) for position in range(50)])
    assert abs(np.corrcoef(noise.ravel(), other_seed.ravel())[0, 1]) < 0.02


def test_noise_depends_on_the_token_not_on_its_company():
    everything = gumbel_noise(5, 9, np.arange(1000))
    some = np.array([3, 999, 500])
    assert np.array_equal(gumbel_noise(5, 9, some), everything[some])


@pytest.mark.parametrize("scale", [0.1, 2.0, 6.0])
def test_pruned_draw_is_the_draw_over_everything(scale):
    """Logarithms are skipped for tokens that can't win; a token that could must never be skipped."""
    for seed in range(300):
        z = logits_row(seed, scale, size=3000)
        full = z + gumbel_noise(seed, 11, np.arange(z.size))
        assert draw(z, None, seed, 11) == int(full.argmax())
    ids = np.arange(0, 3000, 7)
    full = z[ids] + gumbel_noise(1, 2, ids)
    assert draw(z[ids], ids, 1, 2) == int(full.argmax())


LONG = 20_000


def long_row(kind: str, seed: int = 0, size: int = LONG) -> np.ndarray:
    """Return logits of a shape that narrowing could get wrong, with the largest at 0."""
    rng = np.random.default_rng(seed)
    if kind == "constant":
        return np.zeros(size, np.float32)
    z = (rng.standard_normal(size) * (0.1 if kind == "flat" else 3)).astype(np.float32)
    if kind == "ties":
        z = np.round(z)
    elif kind == "sorted":
        z.sort()
    elif kind == "far":  # one likely token, and very many that are unlikely each
        z = z / 3 - 11
        z[rng.integers(size)] = 0
    elif kind == "few possible":
        z[rng.permutation(size)[20:]] = -np.inf
    elif kind == "mostly impossible":
        z[rng.random(size) < 0.9] = -np.inf
    elif kind == "heavy, unsampled tokens":  # a guess from regular samples sees none of them
        z = z / 3 - 9
        z[1 : size // 2 : 500] = 0
    return (z - z.max()).astype(np.float32)


KINDS = (
    "constant",
    "flat",
    "wide",
    "ties",
    "sorted",
    "far",
    "few possible",
    "mostly impossible",
    "heavy, unsampled tokens",
)


@pytest.mark.parametrize("kind", KINDS)
def test_draw_from_a_long_row_is_the_draw_over_everything(kind):
    some = np.random.default_rng(1).permutation(2 * LONG)[:LONG]  # ids in any order
    for seed in range(100):
        z = long_row(kind, seed)
        for ids in (None, some):
            full = z + gumbel_noise(seed, 11, np.arange(LONG) if ids is None else ids)
            assert draw(z, ids, seed, 11) == int(full.argmax())


def test_the_best_of_many_unlikely_tokens_is_found():
    """Without ids, they are found from their hashes."""
    size, won = 150_000, [0, 0]
    some = np.random.default_rng(1).permutation(size)
    for seed in range(100):
        z = long_row("far", seed, size) - np.float32(2)
        z[seed] = 0
        for i, ids in enumerate((None, some)):
            full = z + gumbel_noise(seed, 11, np.arange(size) if ids is None else ids)
            assert draw(z, ids, seed, 11) == int(full.argmax())
            won[i] += int(z[full.argmax()] < -12)
    assert min(won) >= 10


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_tokens_are_found_from_their_hashes(seed, position, tokens):
    assert list(_unhash(seed, position, _hash(seed, position, np.array(tokens)))) == tokens


def naive_limits(z: np.ndarray, top_k: int | None = None, top_p: float = 1.0) -> np.ndarray:
    """Return what the limits leave, by sorting all of the row."""
    threshold = -np.inf
    if top_k is not None:
        threshold = np.sort(z)[::-1][top_k - 1]
    weights = np.where(z >= threshold, np.exp(z), 0)
    if top_p < 1:
        falling = np.sort(weights)[::-1]
        reached = np.cumsum(falling, dtype=np.float64)
        last = falling[np.searchsorted(reached, top_p * weights.sum(dtype=np.float64))]
        threshold = z[weights >= last].min()
    return np.flatnonzero(z >= threshold)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 200},
        {"top_k": LONG - 1},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"top_k": 100, "top_p": 0.9},
    ],
    ids=str,
)
def test_limits_of_long_rows_are_those_of_sorting_everything(kind, limits):
    for seed in range(5):
        z = long_row(kind, seed)
        ids, kept = candidates(z, SamplingParams(temperature=1.0, **limits))
        found = np.arange(z.size) if ids is None else ids
        assert np.array_equal(found, naive_limits(z, **limits))
        assert np.array_equal(kept, z[found])


@given(st.data())
def test_limits_of_any_row_are_those_of_sorting_everything(data):
    size = data.draw(st.sampled_from([1, 2, 127, 129, 1023, 4095, 4096, 4097, 5000]))
    levels = np.array([0, *data.draw(st.lists(st.floats(-30, 0, width=32) | st.just(-np.inf), max_size=5))], np.float32)
    z = levels[np.random.default_rng(data.draw(st.integers(0, 99))).integers(levels.size, size=size)]
    z[data.draw(st.integers(0, size - 1))] = 0
    limits = {"top_k": data.draw(st.integers(1, size)), "top_p": data.draw(st.floats(0.01, 0.999))}
    ids, _ = candidates(z, SamplingParams(temperature=1.0, **limits))
    assert np.array_equal(np.arange(size) if ids is None else ids, naive_limits(z, **limits))


def test_top_p_that_rounding_puts_out_of_reach_leaves_all_that_is_possible():
    for seed in range(20):
        z = long_row("mostly impossible", seed) * np.float32(2)
        ids, kept = candidates(z, SamplingParams(temperature=1.0, top_p=1 - 2**-53))
        assert ids is not None
        possible = z[z > -np.inf]
        assert kept.min() > -np.inf
        kept_weight = np.exp(kept.astype(np.float64)).sum()
        assert kept_weight == pytest.approx(np.exp(possible.astype(np.float64)).sum(), rel=1e-12)


def test_equal_sums_go_to_the_lowest_id():
    assert draw(np.array([-np.inf, 0.0, -np.inf], np.float32), None, 0, 0) == 1
    assert chooser().choose(np.zeros(VOCAB, np.float32)) == 0


def warped(z: np.ndarray, **params) -> np.ndarray:
    """Return what transformers leaves of the logits: the tokens that are not -inf."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = LogitsProcessorList([TemperatureLogitsWarper(params["temperature"])])
    if params.get("top_k"):
        steps.append(TopKLogitsWarper(params["top_k"]))
    if params.get("top_p", 1) < 1:
        steps.append(TopPLogitsWarper(params["top_p"]))
    if params.get("min_p"):
        steps.append(MinPLogitsWarper(params["min_p"]))
    return np.flatnonzero(np.isfinite(steps(None, torch.from_numpy(z)[None])[0].numpy()))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.02},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 100, "top_p": 0.8, "min_p": 0.02},
        {"top_k": 5000},
    ],
    ids=str,
)
def test_limits_leave_the_tokens_that_transformers_leaves(temperature, limits):
    for seed in range(20):
        z = logits_row(seed)
        ids, kept = candidates(z, SamplingParams(temperature=temperature, **limits))
        found = np.arange(VOCAB) if ids is None else ids
        assert np.array_equal(found, warped(z, temperature=temperature, **limits))
        np.testing.assert_allclose(kept, (z[found] - z.max()) / np.float32(temperature), rtol=1e-6)


def test_top_p_keeps_all_that_tie_at_the_border():
    z = np.array([1.0, 0.0, 0.0, 0.0, -5.0], np.float32)
    ids, _ = candidates(z, SamplingParams(temperature=1.0, top_p=0.6))
    assert ids is not None
    assert list(ids) == [0, 1, 2, 3]


def test_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, z = [5, 9, 9, 480], logits_row(3)
    found = chooser(prompt, repetition_penalty=1.7).processed(z)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt]), torch.from_numpy(z)[None].clone())[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_presence_and_frequency_count_the_output_only():
    subject = chooser([5, 9], presence_penalty=0.5, frequency_penalty=0.25)
    for token in (9, 7, 7):
        subject.take(token)
    z = np.zeros(VOCAB, np.float32)
    found = subject.processed(z)
    assert found[5] == 0
    assert found[9] == -0.75
    assert found[7] == -1.0
    assert not z.any()  # the caller's logits are left alone


def test_bias_and_min_new_tokens():
    z = np.zeros(VOCAB, np.float32)
    z[0] = 9.0  # the end of sequence
    subject = chooser(logit_bias={4: 3.0, 6: -np.inf}, min_new_tokens=2)
    assert [subject.choose(z) for _ in range(3)] == [4, 4, 0]


def test_processors_see_ids_and_logits_in_order():
    seen = []

    def first(ids, logits):
        seen.append(list(ids))
        logits[0] = 50
        assert logits.shape == (VOCAB,)
        assert logits.dtype == torch.float32
        return logits.masked_fill(torch.arange(VOCAB) < 100, -torch.inf)

    def second(ids, logits):
        assert bool(logits[:100].isinf().all())
        logits[123] += 100
        return logits

    z = logits_row()
    before = z.copy()
    subject = chooser([1], processors=(first, second))
    assert [subject.choose(z), subject.choose(z)] == [123, 123]
    assert seen == [[1], [1, 123]]
    assert np.array_equal(z, before), "a processor that writes in place must not reach the target's logits"
    whole = SamplingParams(seed=np.int64(5), top_k=np.int64(3), temperature=1)
    assert (type(whole.seed), type(whole.top_k)) == (int, int)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_left_is_an_error(temperature):
    subject = chooser(processors=(lambda ids, logits: logits * 0 - torch.inf,), temperature=temperature)
    with pytest.raises(OptionError, match="no token can be chosen"):
        subject.choose(logits_row())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_p": 0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"temperature": -1}, "temperature=-1.0: must be 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": 1e-6}, "temperature=1e-06: must be 0"),
        ({"temperature": 1e9}, "temperature=1000000000.0: must be 0"),
        ({"temperature": None}, "temperature=None: must be a number"),
        ({"logit_bias": {1: math.inf}}, "logit_bias="),
        ({"logit_bias": {1.9: 1.0}}, "logit_bias=.*must be numbers by token id"),
        ({"logit_bias": {1: 1e30}}, "logit_bias="),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: must be a whole number"),
        ({"seed": 1.5}, "seed=1.5: must be a whole number"),
        ({"top_k": 5.0}, "top_k=5.0: must be a whole number"),
        ({"stop_token_ids": "</s>"}, "stop_token_ids='</s>': must be token ids"),
        ({"stop": None}, "stop=None"),
        ({"stop": (1,)}, "stop="),
        ({"processors": len}, "processors="),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"min_p": 2}, "min_p=2.0: must be between 0 and 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_new_tokens": 300}, "min_new_tokens=300: must be between 0 and max_new_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty=0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"stop": [""]}, "stop="),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_values_that_cannot_work_are_named(params, message):
    with pytest.raises(OptionError, match=message):
        SamplingParams(**params)


def test_bias_outside_the_vocabulary_is_named():
    with pytest.raises(OptionError, match=r"logit_bias=.*0\.\.499"):
        chooser(logit_bias={500: 1.0})


def test_stop_ids_outside_the_vocabulary_are_named():
    with pytest.raises(OptionError, match=r"stop_token_ids=\(500,\): must be in 0\.\.499"):
        Chooser(SamplingParams(stop_token_ids=(500,)), [1], VOCAB, [500])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(temperature):
    with pytest.raises(OptionError, match="no token can be chosen"):
        chooser(temperature=temperature, min_new_tokens=1).choose(logits_row() * np.nan)


def test_extreme_temperatures():
    z = logits_row()
    assert chooser(temperature=1e-4).choose(z) == int(z.argmax())
    assert 0 <= chooser(temperature=1e6).choose(z) < VOCAB


def test_unknown_parameter_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
