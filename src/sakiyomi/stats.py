"""Round records and times -> metrics: the one place for every formula.

What a metric can't say (nothing was drafted, no token came after the first chunk) is None, never zero.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import OptionError
from sakiyomi.interfaces import RoundRecord


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient, or None where either part is unknown or the denominator is zero."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


@dataclass(frozen=True, slots=True)
class Stats:
    """What one request did, or several merged into one. Times are seconds of wall clock.

    ``ttft_s`` runs from the start of the request to its first chunk: the tokens of the first round that
    emitted any, prefill included. ``total_s`` runs to the last token. Of merged requests, both are means.
    ``starts`` holds the index of every request's first record; leave it alone unless you merge.

    A round that a stop cut short emits fewer tokens than accepted + 1. All its draft tokens count as drafted,
    so that the acceptance rate errs on the low side; ``tokens`` are only those that became output; and
    per-position acceptance says nothing about positions after the stop.
    """

    records: tuple[RoundRecord, ...]
    ttft_s: float
    total_s: float
    starts: tuple[int, ...] = (0,)

    @classmethod
    def merge(cls, many: Iterable[Stats]) -> Stats:
        """Pool requests that ran one after another, so that each ratio is a ratio of sums.

        Not for requests that shared rounds: their times would be counted once for each. Raises ValueError if
        there are none.
        """
        parts = tuple(many)
        requests = sum(part.requests for part in parts)
        if not requests:
            raise ValueError("no stats to merge: needs at least one request")
        records: list[RoundRecord] = []
        starts: list[int] = []
        for part in parts:
            starts.extend(len(records) + start for start in part.starts)
            records.extend(part.records)
        return cls(
            records=tuple(records),
            ttft_s=sum(part.ttft_s * part.requests for part in parts) / requests,
            total_s=sum(part.total_s * part.requests for part in parts) / requests,
            starts=tuple(starts),
        )

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.starts)

    @property
    def tokens(self) -> int:
        """Tokens that became output."""
        return sum(record.emitted for record in self.records)

    @property
    def target_calls(self) -> int:
        """Target calls: one for every round."""
        return len(self.records)

    @property
    def drafted(self) -> int:
        """Draft tokens that were checked; of a tree, those of every branch."""
        return sum(record.drafted for record in self.records)

    @property
    def accepted(self) -> int:
        """Draft tokens that stood."""
        return sum(record.accepted for record in self.records)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted. A tree drafts more than one path can accept, so that its rate stays below 1."""
        return ratio(self.accepted, self.drafted)

    @property
    def _positions(self) -> tuple[Counter[int], Counter[int]]:
        """For each position 1, 2, ...: how many rounds reached it, and in how many a draft token stood there.

        A round reaches i if its longest drafted path has i tokens or more and the i - 1 before were accepted.
        """
        reached: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for record in self.records:
            # Where a stop cut the round, the tokens after it were not put to the test.
            tested = record.emitted if record.emitted <= record.accepted else record.accepted + 1
            reached.update(range(1, min(record.depth, tested) + 1))
            accepted.update(range(1, min(record.accepted, tested) + 1))
        return reached, accepted

    @property
    def per_position_acceptance(self) -> tuple[float, ...]:
        """Accepted at i / reached i, for i = 1, 2, ... up to the deepest position that was ever reached."""
        reached, accepted = self._positions
        return tuple(accepted[i] / reached[i] for i in sorted(reached))

    @property
    def per_position_reached(self) -> tuple[int, ...]:
        """In how many rounds a draft reached i, for i = 1, 2, ...: how much its acceptance says."""
        reached, _ = self._positions
        return tuple(reached[i] for i in sorted(reached))

    @property
    def alpha(self) -> float | None:
        """Accepted at any position / reached: how likely a draft token stands whose predecessors stood.

        It is the alpha of ``Expected``: unlike the acceptance rate, it leaves out the tokens after a rejection. A
        position of a tree counts once, as accepted if any branch stood.
        """
        reached, accepted = self._positions
        return ratio(sum(accepted.values()), sum(reached.values()))

    @property
    def tokens_per_target_call(self) -> float | None:
        """Emitted / target calls, the target token included: plain decoding is 1.00."""
        return ratio(self.tokens, self.target_calls)

    @property
    def mean_drafted(self) -> float | None:
        """Draft tokens per round, rounds without a draft included."""
        return ratio(self.drafted, len(self.records))

    @property
    def mean_draft_length(self) -> float | None:
        """Draft tokens per round that checked any; of a tree, those of every branch."""
        return ratio(self.drafted, sum(record.drafted > 0 for record in self.records))

    @property
    def rounds_without_draft(self) -> float | None:
        """Share of rounds that checked no draft token."""
        return ratio(sum(record.drafted == 0 for record in self.records), len(self.records))

    @property
    def by_drafter(self) -> dict[str, dict[str, int]]:
        """For each drafter whose drafts were checked: in how many ``rounds``, tokens ``drafted`` and ``accepted``."""
        shares: dict[str, dict[str, int]] = {}
        for record in self.records:
            if record.drafted:
                share = shares.setdefault(record.drafter, {"rounds": 0, "drafted": 0, "accepted": 0})
                share["rounds"] += 1
                share["drafted"] += record.drafted
                share["accepted"] += record.accepted
        return shares

    @property
    def errors(self) -> tuple[str, ...]:
        """What drafters failed of, in the order of the rounds."""
        return tuple(error for record in self.records for error in record.errors)

    @property
    def decode_s(self) -> float:
        """Seconds after the first chunk, summed over the requests."""
        return (self.total_s - self.ttft_s) * self.requests

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first chunk, summed over the requests."""
        first = 0
        for start, end in zip(self.starts, (*self.starts[1:], len(self.records)), strict=True):
            first += next((record.emitted for record in self.records[start:end] if record.emitted), 0)
        return self.tokens - first

    @property
    def tpot_s(self) -> float | None:
        """Time per output token (TPOT): seconds after the first chunk / tokens after it; None without any."""
        return ratio(self.decode_s, self.decode_tokens)

    @property
    def rounds_s(self) -> float:
        """Seconds in rounds."""
        return sum(record.total_s for record in self.records)

    @property
    def draft_s(self) -> float:
        """Seconds in the drafter."""
        return sum(record.draft_s for record in self.records)

    @property
    def target_s(self) -> float:
        """Seconds in the target's forward passes."""
        return sum(record.target_s for record in self.records)

    @property
    def verify_s(self) -> float:
        """Seconds in verification."""
        return sum(record.verify_s for record in self.records)

    @property
    def rest_s(self) -> float:
        """Seconds of rounds that were neither draft, target nor verification."""
        # Sums of floats that should cancel may leave a speck below zero.
        return max(0.0, self.rounds_s - self.draft_s - self.target_s - self.verify_s)

    @property
    def time_split(self) -> dict[str, float | None]:
        """Fractions of the rounds' time (prefill included, as target) in draft, target, verify and rest."""
        return {
            "draft": ratio(self.draft_s, self.rounds_s),
            "target": ratio(self.target_s, self.rounds_s),
            "verify": ratio(self.verify_s, self.rounds_s),
            "rest": ratio(self.rest_s, self.rounds_s),
        }

    @property
    def overhead(self) -> float | None:
        """Fraction of the rounds' time that went to neither the target nor the drafter."""
        return ratio(self.verify_s + self.rest_s, self.rounds_s)

    def as_dict(self) -> dict[str, object]:
        """Return the metrics, ready for JSON; seconds where a name ends in ``_s``."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "target_calls": self.target_calls,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "per_position_acceptance": list(self.per_position_acceptance),
            "alpha": self.alpha,
            "tokens_per_target_call": self.tokens_per_target_call,
            "mean_drafted": self.mean_drafted,
            "mean_draft_length": self.mean_draft_length,
            "rounds_without_draft": self.rounds_without_draft,
            "by_drafter": self.by_drafter,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "total_s": self.total_s,
            "draft_s": self.draft_s,
            "target_s": self.target_s,
            "verify_s": self.verify_s,
            "rest_s": self.rest_s,
            "time_split": self.time_split,
            "overhead": self.overhead,
            "errors": list(self.errors),
        }


def speedup(plain: Stats, speculative: Stats) -> float | None:
    """Plain TPOT / speculative TPOT: above 1 is faster; None where either is unknown."""
    return ratio(plain.tpot_s, speculative.tpot_s)


@dataclass(frozen=True, slots=True)
class Expected:
    """The speed to expect of rounds that each draft a chain of ``num_speculative_tokens`` (k).

    Every draft token stands with probability ``alpha`` if those before it stood, whatever the position and the text.
    Seconds: ``plain_s`` of a target call over one row, T(1); ``draft_s`` of the drafter for all k tokens, T_draft(k);
    ``target_s`` of a target call over k + 1 rows, T(k + 1); ``overhead_s`` of the rest of a round, verification among
    it. What isn't known is None, and so is what needs it.

    Raises OptionError unless alpha is from 0 to 1, k at least 0, ``plain_s`` and ``target_s`` above 0, ``draft_s`` and
    ``overhead_s`` at least 0, all finite.
    """

    alpha: float
    num_speculative_tokens: int
    _: KW_ONLY
    plain_s: float | None = None
    draft_s: float | None = None
    target_s: float | None = None
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise OptionError(f"{name}={getattr(self, name)!r}: must be {want}")

        check(0 <= self.alpha <= 1, "alpha", "from 0 to 1")
        check(self.num_speculative_tokens >= 0, "num_speculative_tokens", "at least 0")
        check(self.plain_s is None or 0 < self.plain_s < math.inf, "plain_s", "above 0 and finite")
        check(self.draft_s is None or 0 <= self.draft_s < math.inf, "draft_s", "at least 0 and finite")
        check(self.target_s is None or 0 < self.target_s < math.inf, "target_s", "above 0 and finite")
        check(0 <= self.overhead_s < math.inf, "overhead_s", "at least 0 and finite")

    @property
    def tokens_per_target_call(self) -> float:
        """(1 - alpha^(k + 1)) / (1 - alpha), k + 1 where alpha is 1: Leviathan et al. (2211.17192), equation 1."""
        # The sum that the quotient stands for: nothing cancels near alpha = 1.
        return math.fsum(self.alpha**i for i in range(self.num_speculative_tokens + 1))

    @property
    def improvement(self) -> float | None:
        """Tokens per target call / (k c + 1), c being ``draft_s`` / k / ``plain_s``: Leviathan et al., theorem 3.8.

        The theorem takes a target call over k + 1 rows to cost as much as one over a single row, and the rest of a
        round nothing. Without draft tokens, 1: plain decoding.
        """
        if not self.num_speculative_tokens:
            return 1.0
        if self.plain_s is None or self.draft_s is None:
            return None
        return self.tokens_per_target_call / (self.draft_s / self.plain_s + 1)

    @property
    def speedup(self) -> float | None:
        """Tokens per target call * T(1) / (T_draft(k) + T(k + 1) + overhead): the seconds of plain tokens / a round's.

        Without draft tokens, 1: plain decoding.
        """
        if not self.num_speculative_tokens:
            return 1.0
        if self.plain_s is None or self.draft_s is None or self.target_s is None:
            return None
        return self.tokens_per_target_call * self.plain_s / (self.draft_s + self.target_s + self.overhead_s)

    def as_dict(self) -> dict[str, object]:
        """Return what was given and what follows from it, ready for JSON; seconds where a name ends in ``_s``."""
        return {
            **asdict(self),
            "tokens_per_target_call": self.tokens_per_target_call,
            "improvement": self.improvement,
            "speedup": self.speedup,
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of ``count`` values, and how far they lie apart.

    ``low`` and ``high`` are the quartiles; of fewer than four values, the smallest and the largest.
    """

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the median and spread of the values that are known, None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    low, high = known[0], known[-1]
    if len(known) >= 4:
        low, _, high = statistics.quantiles(known, n=4, method="inclusive")
    return Spread(statistics.median(known), low, high, len(known))


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure of several prompts, and how well it is known: ``low`` to ``high`` holds it with 95 % confidence.

    Both are None where there is one prompt only, which says nothing of others.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> Literal["faster", "slower", "unclear"]:
        """What it says of a speed-up; ``unclear`` where it includes 1, or nothing is known of it."""
        if self.low is not None and self.low > 1:
            return "faster"
        if self.high is not None and self.high < 1:
            return "slower"
        return "unclear"


def speedup_interval(pairs: Sequence[tuple[Stats, Stats]], seed: int = 0) -> Interval | None:
    """Return plain TPOT / speculative TPOT over (plain, speculative) of several prompts; None without a token."""
    return ratio_interval(
        [(p.decode_s, p.decode_tokens, s.decode_s, s.decode_tokens) for p, s in pairs],
        seed,
    )


def ratio_interval(rows: Sequence[tuple[float, float, float, float]], seed: int = 0) -> Interval | None:
    """Return (sum a / sum b) / (sum c / sum d) over rows (a, b, c, d), with its bootstrap interval over the rows.

    Percentiles of 2,000 samples with replacement (Efron 1979): as likely as not too narrow for fewer than ten rows.
    None where the ratio has no value.
    """
    table = np.array([row for row in rows if row[1] > 0 and row[3] > 0], float)  # others have nothing to compare
    if not len(table) or (whole := _ratio(table.sum(axis=0))) is None:
        return None
    if len(table) == 1:
        return Interval(whole, None, None)
    chosen = np.random.default_rng(seed).integers(0, len(table), (_SAMPLES, len(table)))
    sums = np.stack([column[chosen].sum(axis=1) for column in table.T], axis=1)
    samples = [each for row in sums if (each := _ratio(row)) is not None]
    low, high = np.quantile(samples, (0.025, 0.975)) if samples else (whole, whole)
    return Interval(whole, float(low), float(high))


def _ratio(sums: npt.NDArray[np.float64]) -> float | None:
    a, b, c, d = sums.tolist()
    return ratio(ratio(a, b), ratio(c, d))


_SAMPLES = 2000
