"""Chi-square tests of drawn tokens against the distributions they should have, and what such a test can see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sakiyomi.distribution import Distribution

POWER = 0.9
_LEAST_VARIANCE = 10.0  # of a cell's count: with less, p-values near 0 come too often
_PLACES = np.array((1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128))  # where cells end, in the order of likeliness
_RANGES = np.array((256, 2048, 16384))  # and of ids, which grow as tokens become rarer

Cells = Callable[[int, Distribution], tuple[int, npt.NDArray[np.float64]]]
"""Returns the cell of a token, and the probability of every cell."""


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A test of counts: ``statistic`` has a chi-square distribution of ``freedom`` degrees if all is right.

    ``draws``: how many were counted; 0 where they leave nothing to test.
    """

    statistic: float = 0.0
    freedom: int = 0
    draws: int = 0

    @property
    def p_value(self) -> float:
        """The probability of a statistic as large as this if all is right."""
        return tail(self.statistic, self.freedom)

    def visible(self, significance: float) -> float | None:
        """Return the error, in total variation over the cells, that would be found with a probability of POWER.

        Of an error that is the same in all draws, and spread over the cells in the way that is hardest to see: a total
        variation of d moves the statistic by at least 4 d^2 for each draw (Cauchy-Schwarz). An error within cells isn't
        seen at all. None where none can be seen.
        """
        if not self.freedom:
            return None
        error = math.sqrt(noncentrality(self.freedom, significance, POWER) / (4 * self.draws))
        return error if error < 1 else None

    def __add__(self, other: ChiSquare) -> ChiSquare:
        """Return the test of both, which are independent if all is right."""
        return ChiSquare(self.statistic + other.statistic, self.freedom + other.freedom, self.draws + other.draws)


def by_place(token: int, distribution: Distribution) -> tuple[int, npt.NDArray[np.float64]]:
    """Tell tokens apart by their place in the order of likeliness: the first eight, then stretches of places."""
    weights = distribution.weights
    likeliest = np.arange(weights.size)
    if weights.size > _PLACES[-1]:
        likeliest = np.sort(np.argpartition(weights, -_PLACES[-1])[-_PLACES[-1] :])
    likeliest = likeliest[np.argsort(-weights[likeliest], kind="stable")]
    ids = likeliest if distribution.ids is None else distribution.ids[likeliest]
    cells = np.searchsorted(_PLACES, np.arange(likeliest.size), side="right")
    probabilities = np.bincount(cells, weights[likeliest] / distribution.total, _PLACES.size + 1).astype(np.float64)
    probabilities[-1] = max(0.0, 1 - probabilities[:-1].sum())
    (place,) = np.nonzero(ids == token)
    return int(cells[place[0]]) if place.size else _PLACES.size, probabilities


def by_id(token: int, distribution: Distribution) -> tuple[int, npt.NDArray[np.float64]]:
    """Tell tokens apart by their id: its range, and what is left of it when divided by four."""
    ids = np.arange(distribution.weights.size) if distribution.ids is None else distribution.ids
    cells = 4 * np.searchsorted(_RANGES, ids, side="right") + ids % 4
    probabilities = np.bincount(cells, distribution.weights, 4 * _RANGES.size + 4).astype(np.float64)
    probabilities /= distribution.total
    return 4 * int(np.searchsorted(_RANGES, token, side="right")) + token % 4, probabilities


class Counts:
    """Draws, each from a distribution of its own that may depend on the draws before it.

    The excess of what was drawn over what was expected is a martingale, whose covariance is the sum of the draws' own.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._draws = 0
        self._excess, self._covariance = np.zeros(1), np.zeros((1, 1))

    def add(self, token: int, distribution: Distribution) -> None:
        """Count a token that should have been drawn from a distribution."""
        cell, probabilities = self._cells(token, distribution)
        if not self._draws:
            self._excess, self._covariance = np.zeros(probabilities.size), np.zeros((probabilities.size,) * 2)
        self._draws += 1
        self._excess -= probabilities
        self._excess[cell] += 1
        self._covariance += np.diag(probabilities) - np.outer(probabilities, probabilities)

    def test(self) -> ChiSquare:
        """Return the test of all that was counted. Neighbouring cells are pooled until each varies enough."""
        groups = self._groups()
        covariance = groups @ self._covariance @ groups.T
        # What is left over is the last group, or varies too little; of groups that add up to 1 one is too many.
        enough = covariance.diagonal() >= _LEAST_VARIANCE
        if not enough.any():
            return ChiSquare()
        values, vectors = np.linalg.eigh(covariance[np.ix_(enough, enough)])
        sure = values > 0.01 * values.max()
        scaled = (vectors[:, sure].T @ (groups @ self._excess)[enough]) ** 2 / values[sure]
        return ChiSquare(float(scaled.sum()), int(sure.sum()), self._draws)

    def _groups(self) -> npt.NDArray[np.float64]:
        """Return which cells are pooled: [groups, cells], 0 or 1."""
        groups: list[npt.NDArray[np.float64]] = []
        group = np.zeros(self._excess.size)
        for cell in range(self._excess.size):
            group[cell] = 1
            if group @ self._covariance @ group >= _LEAST_VARIANCE:
                groups.append(group)
                group = np.zeros(self._excess.size)
        return np.array([*groups, group])


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
