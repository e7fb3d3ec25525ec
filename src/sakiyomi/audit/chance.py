"""Chi-square tests of drawn tokens against the distributions they should have, and what such a test can see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sakiyomi.distribution import Distribution

_EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128)  # where cells end, in the order of the likeliest tokens
_CELLS = len(_EDGES) + 1
_LEAST_VARIANCE = 5.0  # of a cell's count: the normal approximation behind chi-square needs some
POWER = 0.9


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A test of counts: ``statistic`` has a chi-square distribution of ``freedom`` degrees if all is right.

    ``draws``: how many were counted; 0 where they leave nothing to test.
    """

    statistic: float
    freedom: int
    draws: int

    @property
    def p_value(self) -> float:
        """The probability of a statistic as large as this if all is right."""
        return tail(self.statistic, self.freedom)

    def visible(self, significance: float) -> float | None:
        """Return the error, in total variation over the cells, that would be found with a probability of POWER.

        Of an error that is the same in all draws, and spread in the way that is hardest to see: a total variation of d
        moves the statistic by at least 4 d^2 for each draw (Cauchy-Schwarz). None where it can't be seen at all.
        """
        if not self.freedom:
            return None
        error = math.sqrt(noncentrality(self.freedom, significance, POWER) / (4 * self.draws))
        return error if error < 1 else None

    def __add__(self, other: ChiSquare) -> ChiSquare:
        return ChiSquare(self.statistic + other.statistic, self.freedom + other.freedom, self.draws + other.draws)


class Counts:
    """Draws, each from a distribution of its own that may depend on the draws before it.

    A cell is a place in the order of a distribution's tokens, likeliest first, or a stretch of such places. The excess
    of what was drawn over what was expected is a martingale, whose covariance is the sum of the draws' own.
    """

    def __init__(self) -> None:
        self._draws = 0
        self._excess, self._covariance = np.zeros(_CELLS), np.zeros((_CELLS, _CELLS))

    def add(self, token: int, distribution: Distribution) -> None:
        """Count a token that should have been drawn from a distribution."""
        weights = distribution.weights
        likeliest = np.arange(weights.size)
        if weights.size > _EDGES[-1]:
            likeliest = np.sort(np.argpartition(weights, -_EDGES[-1])[-_EDGES[-1] :])
        likeliest = likeliest[np.argsort(-weights[likeliest], kind="stable")]
        ids = likeliest if distribution.ids is None else distribution.ids[likeliest]
        cell = np.searchsorted(_EDGES, np.arange(likeliest.size), side="right")
        probabilities = np.bincount(cell, weights[likeliest] / distribution.total, _CELLS)
        probabilities[-1] = max(0.0, 1 - probabilities[:-1].sum())
        drawn = np.flatnonzero(ids == token)
        self._draws += 1
        self._excess -= probabilities
        self._excess[cell[drawn[0]] if drawn.size else -1] += 1
        self._covariance += np.diag(probabilities) - np.outer(probabilities, probabilities)

    def test(self) -> ChiSquare:
        """Return the test of all that was counted. Cells that vary too little are pooled with the last."""
        kept = np.flatnonzero(self._covariance.diagonal()[:-1] >= _LEAST_VARIANCE)
        if not kept.size:
            return ChiSquare(0.0, 0, 0)
        # Cells whose probabilities always add up to 1 are one too many.
        values, vectors = np.linalg.eigh(self._covariance[np.ix_(kept, kept)])
        sure = values > 0.01 * values.max()
        scaled = (vectors[:, sure].T @ self._excess[kept]) ** 2 / values[sure]
        return ChiSquare(float(scaled.sum()), int(sure.sum()), self._draws)


def tail(statistic: float, freedom: int) -> float:
    """Return the probability that a chi-square of so many degrees of freedom is at least ``statistic``."""
    if not freedom:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def noncentrality(freedom: int, significance: float, power: float) -> float:
    """Return by how much the mean must move for a test at this significance to find it with this probability."""
    critical = _bisect(lambda x: tail(x, freedom) > significance)
    return _bisect(lambda moved: _noncentral_tail(critical, freedom, moved) < power)


def _noncentral_tail(statistic: float, freedom: int, moved: float) -> float:
    """Return the tail of a noncentral chi-square: a Poisson mixture of central ones."""
    count = torch.arange(math.ceil(moved / 2 + 12 * math.sqrt(moved / 2 + 1)) + 1, dtype=torch.float64)
    mean = torch.tensor(moved / 2, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(count, mean) - mean - torch.lgamma(count + 1))
    tails = torch.special.gammaincc(count + freedom / 2, torch.full_like(count, statistic / 2))
    return float((weights * tails).sum())


def _bisect(below: Callable[[float], bool]) -> float:
    """Return where a condition that holds from 0 on ends."""
    low, high = 0.0, 1.0
    while below(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
