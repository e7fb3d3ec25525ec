"""What the same text with the same seed costs: how many draft tokens stand, on the same positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sakiyomi.audit.law import Reference
from sakiyomi.distribution import Distribution
from sakiyomi.drafting import Source
from sakiyomi.engine import Engine
from sakiyomi.interfaces import Drafter
from sakiyomi.sampling import SamplingParams, draw

TOKENS = 64  # of a text that are looked at
_DRAWS = 8  # of both sides' tokens, at each position


@dataclass(frozen=True, slots=True)
class Price:
    """The probability that a drafter's next token stands, as a mean over ``positions`` of plain decoding's texts.

    ``coupled``: drawn with the target's noise, and the target's own choice. ``rejection``: sum min(p, q), the most that
    any way to verify can accept of one token. ``apart``: if both were drawn with noise of their own.
    """

    drafter: str
    positions: int = 0
    coupled: float = 0.0
    rejection: float = 0.0
    apart: float = 0.0

    def __add__(self, other: Price) -> Price:
        """Return the means over the positions of both."""
        positions = self.positions + other.positions

        def mean(one: float, two: float) -> float:
            return (self.positions * one + other.positions * two) / positions if positions else 0.0

        return Price(
            self.drafter,
            positions,
            mean(self.coupled, other.coupled),
            mean(self.rejection, other.rejection),
            mean(self.apart, other.apart),
        )


def measure_price(
    engine: Engine, drafter: Drafter, prompt: Sequence[int], params: SamplingParams, text: Sequence[int]
) -> Price:
    """Return what a drafter that samples would have stood along a text, which followed the prompt."""
    text = text[:TOKENS]
    vocab_size = engine.target.vocab_size
    source = Source(drafter, prompt, params, vocab_size, True)  # guarded: one that fails is told of elsewhere
    found = Price(drafter.name)
    for position, (token, target) in enumerate(Reference(engine, prompt, params).distributions(text), len(prompt)):
        source.propose(1)
        draft = source.take_drawn()
        source.observe([token])
        if draft is None or draft.distributions is None:
            continue
        drafted = draft.distributions[0]
        p, q = target.probabilities(vocab_size), drafted.probabilities(vocab_size)
        same = sum(_choice(target, seed, position) == _choice(drafted, seed, position) for seed in range(_DRAWS))
        found += Price(drafter.name, 1, same / _DRAWS, float(np.minimum(p, q).sum()), float(p @ q))
    return found


def _choice(distribution: Distribution, seed: int, position: int) -> int:
    """Return the token that is drawn with the noise of a position."""
    with np.errstate(divide="ignore"):
        z = np.log(distribution.weights / distribution.weights.max()).astype(np.float32)
    place = draw(z, distribution.ids, seed, position)
    return place if distribution.ids is None else int(distribution.ids[place])
