"""From a drafter's confidence to how often such tokens stand: learned from tokens that were really tested."""

from __future__ import annotations

from bisect import bisect_right

_CONFIDENCES = (0.1, 0.25, 0.4, 0.58, 0.7, 0.78, 0.85, 0.9, 0.95)  # bounds of the bins
_BELIEVED = (0.05, 0.17, 0.33, 0.5, 0.65, 0.75, 0.82, 0.88, 0.93, 0.97)  # of each, before there are tests
_POSITIONS = (0, 0, 1, 2, 2, 3, 3, 3, 3)  # bin of each position (from 1); 4 beyond
_BEYOND, _ALTERNATIVE = 4, 5
_UNKNOWN = 0.7  # of a drafter of which nothing is known
_PRIOR = 3.0  # what is believed weighs as much as so many tests
_PRIOR_OF_ANY = 10.0  # more, where a first bad luck would keep a costly drafter from being asked again
_MEMORY = 200.0  # tests after which older ones fade
_NARROW = 0.005  # no token is certain


class Acceptance:
    """How often a drafter's tokens stood, by confidence and position, over all sequences.

    The position of a token is its place on its path, from 1; a second child of the same parent is an alternative, with
    statistics of its own. Before there are tests, confidences are believed: less so of a first token, since nothing has
    shown yet that the drafter is on the track, and of a later one no less than the tokens before it showed.
    """

    def __init__(self) -> None:
        self._bins = [_Bin(each * each, each, _PRIOR) for each in _BELIEVED]
        self._any = _Bin(_UNKNOWN, _UNKNOWN, _PRIOR_OF_ANY)

    def rate(self, cell: tuple[int, int]) -> float:
        """Return the probability that a token of a :func:`cell` stands if those before it on its path do."""
        confidence, place = cell
        return self._bins[confidence].rates()[place]

    def average(self, position: int) -> float:
        """Return the probability that a token at this position stands, its confidence not known yet."""
        return self._any.rates()[_place(position)]

    def learn(self, cell: tuple[int, int], stood: bool) -> None:
        """Take note of a test of one of its tokens."""
        confidence, place = cell
        self._bins[confidence].add(place, stood)
        if place != _ALTERNATIVE:
            self._any.add(place, stood)


def cell(confidence: float, position: int, alternative: bool) -> tuple[int, int]:
    """Return what a token's statistics are kept under: the bin of its confidence, and of its place."""
    return bisect_right(_CONFIDENCES, confidence), _ALTERNATIVE if alternative else _place(position)


class Odds:
    """By what factor the odds in one sequence differ from those of all: a few surprises are enough to see it.

    Sums of what stood and what was expected to, older ones fading, compared with ``_DOUBT`` in favour of no difference.
    """

    def __init__(self) -> None:
        self._stood = self._expected = self._fell = self._feared = 0.0
        self._factor = 1.0

    def apply(self, rate: float) -> float:
        """Return a probability with this sequence's odds."""
        odds = rate * self._factor
        return odds / (odds + 1.0 - rate)

    def learn(self, rate: float, stood: bool) -> None:
        """Take note of a test, whose probability over all sequences was ``rate``."""
        self._stood = self._stood * _FADE + stood
        self._expected = self._expected * _FADE + rate
        self._fell = self._fell * _FADE + (not stood)
        self._feared = self._feared * _FADE + 1.0 - rate
        self._factor = (self._stood + _DOUBT) / (self._expected + _DOUBT)
        self._factor *= (self._feared + _DOUBT) / (self._fell + _DOUBT)


_DOUBT = 2.0
_FADE = 0.97


class _Bin:
    """Tests of one confidence, by place: the bins of positions, and alternatives."""

    def __init__(self, first: float, later: float, prior: float) -> None:
        self._first, self._later, self._prior = first, later, prior
        self._stood, self._tested = [0.0] * 6, [0.0] * 6
        self._rates: list[float] = []

    def add(self, place: int, stood: bool) -> None:
        if self._tested[place] >= _MEMORY:
            self._stood[place] *= 0.5
            self._tested[place] *= 0.5
        self._tested[place] += 1
        self._stood[place] += stood
        self._rates = []

    def rates(self) -> list[float]:
        """Return for each place how often tokens stand; worked out when it is asked for after a test."""
        if not self._rates:
            believed = self._first
            for place in range(6):
                if place == _ALTERNATIVE:
                    believed = self._later / 2
                rate = (self._stood[place] + self._prior * believed) / (self._tested[place] + self._prior)
                self._rates.append(min(max(rate, _NARROW), 1.0 - _NARROW))
                believed = max(rate, self._later)
        return self._rates


def _place(position: int) -> int:
    return _POSITIONS[position] if position < len(_POSITIONS) else _BEYOND
