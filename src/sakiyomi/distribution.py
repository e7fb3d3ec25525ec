"""Distributions over tokens, and what is left of one when another had its chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.floating[Any]]


class Distribution:
    """Weights of tokens, in proportion to their probabilities.

    ``weights``: [count], none below 0 and some above. ``ids``: int64 [count], the tokens, ascending; None: 0, 1, 2, ...
    ``total``: the sum of the weights, in float64. Not to be changed once made.
    """

    __slots__ = ("ids", "total", "weights")

    def __init__(self, ids: Ids | None, weights: Weights) -> None:
        self.ids, self.weights = ids, weights
        self.total = float(weights.sum(dtype=np.float64))

    def fits(self, vocab_size: int) -> bool:
        """Return whether it is a distribution over tokens of a vocabulary of this size."""
        if not 0 < self.total < np.inf or self.weights.min() < 0:
            return False
        if self.ids is None:
            return self.weights.size == vocab_size
        ascending = self.ids.dtype.kind == "i" and self.ids.size == self.weights.size and (np.diff(self.ids) > 0).all()
        return bool(ascending) and 0 <= self.ids[0] <= self.ids[-1] < vocab_size

    def probability(self, token: int) -> float:
        """Return the probability of a token."""
        place = self._place(token)
        return 0.0 if place is None else float(self.weights[place]) / self.total

    def probabilities(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """Return the probability of every token, float64 [vocab_size]."""
        dense = np.zeros(vocab_size)
        dense[slice(self.weights.size) if self.ids is None else self.ids] = self._normalised(1.0)
        return dense

    def draw(self, uniform: float) -> int:
        """Return the token at a place in 0 <= ``uniform`` < 1 of the cumulative probabilities."""
        sums = self.weights.cumsum(dtype=np.float64)
        place = int(sums.searchsorted(uniform * sums[-1], side="right"))  # never one without weight
        if place == sums.size:  # the product was rounded up
            place = int(self.weights.nonzero()[0][-1])
        return place if self.ids is None else int(self.ids[place])

    def without(self, token: int) -> Distribution:
        """Return the distribution given that it isn't this token."""
        weights = self.weights.copy()
        place = self._place(token)
        if place is not None:
            weights[place] = 0
        return Distribution(self.ids, weights)

    def less(self, other: Distribution, share: float = 1.0) -> Distribution:
        """Return [share * self - other]+, in probabilities, whose ``total`` may be 0."""
        weights, taken = self._normalised(share), other._normalised(1.0)
        if self.ids is not None:
            weights -= other._spread(taken, self.ids)
        elif other.ids is not None:
            weights[other.ids] -= taken
        else:
            weights -= taken
        np.maximum(weights, 0, out=weights)
        return Distribution(self.ids, weights)

    def _normalised(self, share: float) -> npt.NDArray[np.float64]:
        weights = self.weights.astype(np.float64)
        weights *= share / self.total
        return weights

    def _place(self, token: int) -> int | None:
        if self.ids is None:
            return token if token < self.weights.size else None
        place = int(self.ids.searchsorted(token))
        return place if place < self.ids.size and self.ids[place] == token else None

    def _spread(self, values: Weights, ids: Ids) -> Weights:
        """Return what belongs to other ids, given values of ours."""
        if self.ids is None:
            return values[ids]
        places = self.ids.searchsorted(ids)
        places[places == self.ids.size] = 0
        return np.where(self.ids[places] == ids, values[places], 0.0)
