"""The formulas of stats.py, against values worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sakiyomi.errors import OptionError
from sakiyomi.interfaces import RoundRecord
from sakiyomi.stats import Expected, Spread, Stats, ratio, speedup, spread


def record(
    drafted: int = 0,
    accepted: int = 0,
    emitted: int | None = None,
    *,
    depth: int | None = None,
    draft_s: float = 0.0,
    target_s: float = 0.0,
    verify_s: float = 0.0,
    total_s: float = 0.0,
    drafter: str = "ngram",
    errors: tuple[str, ...] = (),
) -> RoundRecord:
    return RoundRecord(
        drafter=drafter,
        drafted=drafted,
        depth=drafted if depth is None else depth,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        rows=drafted + 1,
        context=10,
        draft_s=draft_s,
        target_s=target_s,
        verify_s=verify_s,
        total_s=total_s,
        errors=errors,
    )


def test_plain_decoding_is_one_token_per_target_call_and_has_no_acceptance() -> None:
    stats = Stats((record(), record(), record()), ttft_s=1.0, total_s=2.0)
    assert stats.tokens_per_target_call == 1.0
    assert stats.acceptance_rate is None, "nothing was drafted: unknown, not zero"
    assert stats.per_position_acceptance == ()
    assert stats.mean_drafted == 0
    assert stats.mean_draft_length is None
    assert stats.by_drafter == {}
    assert stats.rounds_without_draft == 1.0


def test_counts_and_their_ratios() -> None:
    stats = Stats((record(4, 1), record(5, 5), record(), record(1, 0)), ttft_s=1.0, total_s=5.0)
    assert (stats.tokens, stats.target_calls, stats.drafted, stats.accepted) == (10, 4, 10, 6)
    assert stats.acceptance_rate == 0.6
    assert stats.tokens_per_target_call == 2.5, "the target token counts"
    assert stats.mean_drafted == 2.5, "the round without a draft counts"
    assert stats.mean_draft_length == pytest.approx(10 / 3), "it doesn't"
    assert stats.rounds_without_draft == 0.25


def test_each_drafter_has_its_share() -> None:
    rounds = (record(4, 1, drafter="suffix"), record(2, 2), record(drafter=""), record(3, 0, drafter="suffix"))
    stats = Stats(rounds, ttft_s=1.0, total_s=5.0)
    assert stats.by_drafter == {
        "suffix": {"rounds": 2, "drafted": 7, "accepted": 1},
        "ngram": {"rounds": 1, "drafted": 2, "accepted": 2},
    }
    assert "" not in stats.by_drafter, "a round without a draft is nobody's"
    for name in ("drafted", "accepted"):
        assert sum(share[name] for share in stats.by_drafter.values()) == getattr(stats, name)


def test_errors_are_those_of_every_round_in_order() -> None:
    rounds = (record(errors=("a: x", "b: y")), record(), record(errors=("c: z",)))
    stats = Stats(rounds, ttft_s=1.0, total_s=5.0)
    assert stats.errors == ("a: x", "b: y", "c: z")
    assert Stats.merge([stats, stats]).errors == stats.errors * 2
    assert Stats((record(),), ttft_s=1.0, total_s=1.0).errors == ()


def test_per_position_acceptance_is_conditional_on_reaching_the_position() -> None:
    # Position 1: reached by three rounds, accepted in two. Position 2: reached by those two, accepted in one.
    # Position 3: reached by that one, which drafted no deeper than 2 -> nothing reached it.
    stats = Stats((record(3, 0), record(3, 1), record(2, 2)), ttft_s=0.0, total_s=1.0)
    assert stats.per_position_acceptance == (2 / 3, 1 / 2)
    assert stats.per_position_reached == (3, 2)


def test_a_tree_reaches_as_deep_as_its_longest_path() -> None:
    stats = Stats((record(6, 2, depth=2), record(6, 1, depth=2)), ttft_s=0.0, total_s=1.0)
    assert stats.per_position_acceptance == (1.0, 0.5)
    assert stats.acceptance_rate == 0.25, "tokens on every branch were drafted"


def test_a_stop_cuts_tokens_but_is_no_rejection() -> None:
    # The second of four draft tokens ended the output: the third was not rejected.
    cut = record(4, 2, emitted=2)
    assert Stats((cut,), 0.0, 1.0).per_position_acceptance == (1.0, 1.0)
    assert Stats((cut,), 0.0, 1.0).tokens == 2
    # The same where verification has counted beyond the stop.
    beyond = record(4, 3, emitted=2)
    assert Stats((beyond,), 0.0, 1.0).per_position_acceptance == (1.0, 1.0)
    assert Stats((beyond,), 0.0, 1.0).acceptance_rate == 0.75
    assert Stats((beyond, record(4, 2)), 0.0, 1.0).per_position_acceptance == (1.0, 1.0, 0.0)
    # Negative control: a full round of the same size does say that the third was rejected.
    assert Stats((record(4, 2),), 0.0, 1.0).per_position_acceptance == (1.0, 1.0, 0.0)


def test_alpha_is_of_the_tokens_that_were_reached() -> None:
    # Reached and accepted: 2 and 1, 5 and 5, none and none, 1 and 0, and of the cut round 2 and 2: the third token
    # came after the stop. Of the tree, with its longest path of 2, 2 and 1.
    rounds = (record(4, 1), record(5, 5), record(), record(1, 0), record(4, 3, emitted=2), record(6, 1, depth=2))
    stats = Stats(rounds, ttft_s=1.0, total_s=5.0)
    assert stats.alpha == 9 / 12
    assert stats.acceptance_rate == 10 / 20, "tokens after a rejection or a stop count here, and every branch"
    assert Stats((record(), record()), 0.0, 1.0).alpha is None, "none was reached: unknown, not zero"
    assert Stats((record(3, 0),), 0.0, 1.0).alpha == 0.0


def test_tpot_leaves_out_the_first_chunk_and_its_time() -> None:
    stats = Stats((record(3, 3), record(3, 1), record()), ttft_s=2.0, total_s=5.0)
    assert stats.decode_tokens == 3
    assert stats.tpot_s == 1.0


def test_tpot_takes_the_first_round_that_emitted_as_the_first_chunk() -> None:
    stats = Stats((record(emitted=0), record(3, 3), record()), ttft_s=2.0, total_s=5.0)
    assert stats.tpot_s == 3.0


def test_tpot_is_unknown_where_all_tokens_came_in_the_first_chunk() -> None:
    assert Stats((record(3, 3),), ttft_s=2.0, total_s=2.0).tpot_s is None


def test_time_split_and_overhead() -> None:
    rounds = (
        record(draft_s=1.0, target_s=4.0, verify_s=1.0, total_s=8.0),
        record(draft_s=1.0, target_s=4.0, verify_s=1.0, total_s=8.0),
    )
    stats = Stats(rounds, ttft_s=8.0, total_s=20.0)
    assert stats.time_split == {"draft": 0.125, "target": 0.5, "verify": 0.125, "rest": 0.25}
    assert stats.overhead == 0.375, "verification and rest"


def test_rounding_never_shows_a_rest_below_zero() -> None:
    stats = Stats((record(draft_s=0.1, target_s=0.2, total_s=0.3),), ttft_s=0.3, total_s=0.3)
    assert 0.3 - 0.1 - 0.2 < 0, "the floats that this test needs"
    assert stats.rest_s == 0.0


def test_merge_gives_ratios_of_sums_not_means_of_ratios() -> None:
    short = Stats((record(4, 4), record()), ttft_s=1.0, total_s=2.0)  # TPOT 1 / 1
    long = Stats((record(), *[record(1, 0)] * 4), ttft_s=3.0, total_s=5.0)  # TPOT 2 / 4
    merged = Stats.merge([short, long])
    assert merged.requests == 2
    assert merged.tpot_s == pytest.approx(3 / 5)
    assert merged.acceptance_rate == 4 / 8
    assert merged.tokens_per_target_call == 11 / 7
    assert (merged.ttft_s, merged.total_s) == (2.0, 3.5), "means per request"


def test_merging_merged_stats_is_merging_their_parts() -> None:
    parts = [Stats((record(i, i), record()), ttft_s=float(i), total_s=2.0 * i) for i in (1, 2, 3)]
    nested = Stats.merge([Stats.merge(parts[:2]), parts[2]])
    assert nested == Stats.merge(parts)


def test_merging_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        Stats.merge([])


def test_speedup_is_plain_tpot_over_speculative_tpot() -> None:
    plain = Stats((record(), record()), ttft_s=1.0, total_s=4.0)
    fast = Stats((record(), record(2, 2)), ttft_s=1.0, total_s=4.0)
    assert speedup(plain, fast) == pytest.approx(3.0)
    assert speedup(fast, plain) == pytest.approx(1 / 3)
    assert speedup(plain, Stats((record(),), 1.0, 1.0)) is None


def test_ratio_of_the_unknown_is_unknown() -> None:
    assert ratio(1, 4) == 0.25
    assert ratio(0, 4) == 0.0, "zero is known"
    assert ratio(None, 4) is None
    assert ratio(1, None) is None
    assert ratio(1, 0) is None


def test_spread_has_quartiles_from_four_values_on() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0, count=5)
    assert spread([3.0, None, 1.0]) == Spread(median=2.0, low=1.0, high=3.0, count=2)
    assert spread([None]) is None


def test_as_dict_is_json_and_has_every_metric() -> None:
    failed = record(drafter="", errors=("suffix: ValueError: no",))
    stats = Stats((record(4, 2, target_s=1.0, total_s=2.0), failed), ttft_s=1.0, total_s=2.5)
    data = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    for name, value in data.items():
        have = getattr(stats, name)
        assert value == (list(have) if isinstance(have, tuple) else have), name
    assert data["tokens_per_target_call"] == 2.0
    assert data["tpot_s"] == 1.5
    assert data["by_drafter"] == {"ngram": {"rounds": 1, "drafted": 4, "accepted": 2}}
    assert data["errors"] == ["suffix: ValueError: no"]


def test_nothing_done_has_no_metrics_and_no_errors() -> None:
    data = Stats((), ttft_s=0.0, total_s=0.0).as_dict()
    for name in (
        "acceptance_rate",
        "alpha",
        "tokens_per_target_call",
        "mean_drafted",
        "mean_draft_length",
        "tpot_s",
        "overhead",
    ):
        assert data[name] is None, name


@pytest.mark.parametrize(
    ("k", "alpha", "predicted", "measured"),
    [(7, 0.75, 3.2, 3.4), (7, 0.62, 2.3, 2.6), (5, 0.65, 2.4, 3.1), (5, 0.53, 1.9, 2.3)],
)
def test_expected_speed_of_t5_small_drafting_for_t5_xxl(
    k: int, alpha: float, predicted: float, measured: float
) -> None:
    """Leviathan et al. (2211.17192), translation and summarisation, each at temperature 0 and 1.

    ``k``, ``alpha`` and ``measured`` (the speed-up on a TPU v4) are the paper's measurements. ``predicted`` is none:
    it is theorem 3.8 with c = 0.02, worked out by hand.
    """
    expected = Expected(alpha, k, plain_s=1.0, draft_s=0.02 * k)
    assert expected.improvement is not None
    assert round(expected.improvement, 1) == predicted
    assert expected.improvement == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 2), (0.6, 4), (0.75, 7), (0.95, 12), (0.5, 1)])
def test_expected_speed_is_that_of_simulated_rounds(alpha: float, k: int) -> None:
    rounds, plain_s, draft_s, target_s, overhead_s = 50_000, 0.010, 0.003, 0.014, 0.0005
    stood = np.random.default_rng(k).random((rounds, k)) < alpha
    accepted = np.logical_and.accumulate(stood, axis=1).sum(axis=1)
    emitted = accepted + 1
    margin = 5 * emitted.std() / rounds**0.5  # 5 standard errors
    expected = Expected(alpha, k, plain_s=plain_s, draft_s=draft_s, target_s=target_s, overhead_s=overhead_s)
    assert expected.tokens_per_target_call == pytest.approx(emitted.mean(), abs=margin)

    plain_clock = emitted.sum() * plain_s
    clock = rounds * draft_s + rounds * target_s + rounds * overhead_s
    assert expected.speedup == pytest.approx(plain_clock / clock, rel=margin / emitted.mean())

    # Back from the records of rounds to alpha.
    some = accepted[:1000]
    reached = np.minimum(some + 1, k).sum()
    stats = Stats(tuple(record(k, int(n)) for n in some), ttft_s=0.0, total_s=1.0)
    assert stats.alpha == pytest.approx(alpha, abs=5 * (alpha * (1 - alpha) / reached) ** 0.5)


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [
        (0.0, 5, 1.0),
        (0.5, 0, 1.0),
        (1.0, 0, 1.0),
        (0.0, 0, 1.0),
        (0.5, 2, 1.75),
        (1.0, 5, 6.0),
        (1 - 1e-12, 7, 8 - 28e-12),  # 8 - (1 + ... + 7) * 1e-12
        (1 - 2**-53, 7, 8.0),
    ],
)
def test_limits_of_the_expected_speed(alpha: float, k: int, tokens: float) -> None:
    expected = Expected(alpha, k, plain_s=0.01, draft_s=0.002 * k, target_s=0.01)
    assert expected.tokens_per_target_call == pytest.approx(tokens, rel=1e-14)
    assert expected.improvement == pytest.approx(tokens / (1 + 0.2 * k))
    assert expected.speedup == pytest.approx(expected.improvement), "k + 1 rows as cheap as one, no overhead"


def test_no_draft_tokens_is_plain_decoding_whatever_a_round_would_cost() -> None:
    expected = Expected(0.5, 0, plain_s=0.01, draft_s=0.02, target_s=0.03, overhead_s=0.04)
    assert (expected.tokens_per_target_call, expected.improvement, expected.speedup) == (1.0, 1.0, 1.0)


def test_expected_speed_as_dict_leaves_open_what_is_not_known() -> None:
    data = json.loads(json.dumps(Expected(0.5, 1, plain_s=0.5, draft_s=0.25).as_dict(), allow_nan=False))
    assert data == {
        "alpha": 0.5,
        "num_speculative_tokens": 1,
        "plain_s": 0.5,
        "draft_s": 0.25,
        "target_s": None,
        "overhead_s": 0.0,
        "tokens_per_target_call": 1.5,
        "improvement": 1.0,
        "speedup": None,
    }
    assert Expected(0.5, 1).improvement is None
    assert Expected(0.5, 1, plain_s=0.5, target_s=0.5).speedup is None


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("alpha", -0.1, "from 0 to 1"),
        ("alpha", 1.1, "from 0 to 1"),
        ("alpha", float("nan"), "from 0 to 1"),
        ("num_speculative_tokens", -1, "at least 0"),
        ("plain_s", 0.0, "above 0"),
        ("plain_s", float("inf"), "above 0"),
        ("draft_s", -0.1, "at least 0"),
        ("draft_s", float("inf"), "at least 0"),
        ("target_s", 0.0, "above 0"),
        ("target_s", float("inf"), "above 0"),
        ("overhead_s", -0.1, "at least 0"),
        ("overhead_s", float("inf"), "at least 0"),
    ],
)
def test_expected_speed_of_the_impossible_is_an_error(name: str, value: float, want: str) -> None:
    good = {"alpha": 0.5, "num_speculative_tokens": 2, "plain_s": 1.0, "draft_s": 0.0, "target_s": 1.0}
    Expected(**good)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=f"^{name}={value!r}: must be {want}"):
        Expected(**{**good, name: value})  # type: ignore[arg-type]
