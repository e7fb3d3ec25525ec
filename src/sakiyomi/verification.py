"""Which draft tokens stand: pure functions from a draft and the target's logits to tokens.

*coupled*: the target chooses its own token at each position, with noise keyed by the position; a draft token stands if
it is that token. The tokens are those of plain decoding, whatever was drafted.

*rejection* and *block* take drafts that were drawn from a distribution, and keep as much of them as leaves the
distribution of the text what it is without drafts. The tokens are other ones than those of plain decoding with the same
seed. A draft that wasn't drawn is one-hot: to accept its token with the target's probability, or else to draw another
one, is what the coupled rule does, on chains and on trees. So such drafts are verified by that rule, and so are all
where the target is greedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from sakiyomi.distribution import Distribution
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, Verification
from sakiyomi.sampling import ACCEPT, DRAW, Chooser, Row, check_chosen, derived_seed, host, uniform

METHODS: tuple[Verification, ...] = ("coupled", "rejection", "block")


def method(name: object) -> Verification:
    """Return the method that goes by a name. Raises OptionError."""
    for each in METHODS:
        if name == each:
            return each
    raise OptionError(f"verification={name!r}: must be one of {', '.join(METHODS)}")


class TokenChooser(Protocol):
    """The target's own choice of token after token."""

    @property
    def greedy(self) -> bool:
        """Whether the choice is the largest logit, the first of several, whatever came before."""

    def choose(self, logits: Row) -> int:
        """Return the token that follows, for float32 [vocab_size] logits, and take it."""

    def take(self, token: int) -> None:
        """Go on to the position after a token."""


def verify(
    verification: Verification, draft: Draft, logits: torch.Tensor, chooser: TokenChooser
) -> Iterator[tuple[int, int | None]]:
    """Yield the tokens of a round: those that were drafted with their index in the draft, then the target's, with None.

    ``logits``: [1 + len(draft), vocab_size], row 0 for the position before the draft, row i + 1 after draft token i.
    ``chooser`` stands at the position before the draft; it takes the tokens, the last of them included.
    """
    if verification == "coupled" or draft.distributions is None:
        return coupled(draft, logits, chooser)
    assert isinstance(chooser, Chooser), "only this one can tell distributions"
    if chooser.params.temperature == 0:
        return coupled(draft, logits, chooser)
    rows = list(host(logits))
    dice = KeyedDice(chooser.params.seed, chooser.position)
    return (rejection if verification == "rejection" else block)(draft, rows, chooser, dice)


def coupled(draft: Draft, logits: torch.Tensor, chooser: TokenChooser) -> Iterator[tuple[int, int | None]]:
    """Yield the tokens that the target chooses itself, as far as they were drafted, and one more; see :func:`verify`.

    Rows are looked at only as far as the iterator is drawn: most rows of a tree need no choice, and processors never
    see a position that isn't reached.
    """
    rows = host(logits)
    children = _by_token(draft)
    row = 0
    while True:
        if chooser.greedy:
            token = int(rows[row].argmax())
            check_chosen(rows[row, token])
            chooser.take(token)
        else:
            token = chooser.choose(rows[row])
        index = children.get((row - 1, token))
        yield token, index
        if index is None:
            return
        row = index + 1


class Dice(Protocol):
    """What decides where verification leaves something to chance. Each is thrown once in a round."""

    def accepts(self, probability: float, node: int) -> bool:
        """Return True with this probability (surely if above 1); for the draft token ``node``, -1: before them all."""

    def draw(self, distribution: Distribution) -> int:
        """Return a token: the target's own, one in a round."""


class KeyedDice:
    """Dice of which each throw is a pure function of (seed, position of the round, draft token).

    Not of the seed and the token's own position: a position that wasn't reached is drafted again in the next round,
    after decisions that depended on what was thrown for it.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._accepts = derived_seed(seed, position, ACCEPT)
        self._draw = derived_seed(seed, position, DRAW)

    def accepts(self, probability: float, node: int) -> bool:
        """Throw for a draft token."""
        return uniform(derived_seed(self._accepts, node + 1)) < probability

    def draw(self, distribution: Distribution) -> int:
        """Draw the target's token."""
        return distribution.draw(uniform(self._draw))


def rejection(draft: Draft, rows: Sequence[Row], chooser: Chooser, dice: Dice) -> Iterator[tuple[int, int | None]]:
    """Yield the tokens of a round after Leviathan et al. (2211.17192, algorithm 1); see :func:`verify`.

    Accepts a token x, drawn from q, with probability min(1, p(x) / q(x)); after a rejection the target's distribution p
    becomes what is left of it, [p - q]+, for the token's next sibling (SpecInfer, 2305.09781) or, without one, for the
    target's own token. Siblings may be drawn with replacement, from the same q, or without, from q given that it isn't
    one of those before (Sequoia, 2402.12374): what counts is that each has the distribution that it was drawn from.
    Rows are looked at only as far as the iterator is drawn.
    """
    assert draft.distributions is not None
    children = _children(draft)
    node = -1
    while True:
        left = chooser.distribution(rows[node + 1])
        for child in children[node]:
            token, drawn_from = draft.tokens[child], draft.distributions[child]
            if dice.accepts(left.probability(token) / drawn_from.probability(token), child):
                break
            rest = left.less(drawn_from)
            left = rest if rest.total else left  # nothing is left only by rounding
        else:
            token = dice.draw(left)
            chooser.take(token)
            yield token, None
            return
        chooser.take(token)
        yield token, child
        node = child


class _Step:
    """A draft token on the path that is looked at, and what is left to decide there.

    ``reach``: the probability with which the output must get here or further, given the path and what was rejected.
    ``left``: the distribution of the token that follows, given the same. It's asked for while ``chooser`` stands here,
    if at all: after a token that ends the text there may be none.
    """

    def __init__(self, node: int, reach: float, row: Row, chooser: Chooser, children: Sequence[int]) -> None:
        self.node, self.reach = node, reach
        self.children = iter(children)
        self._row, self._chooser = row, chooser
        self._left: Distribution | None = None

    @property
    def left(self) -> Distribution:
        if self._left is None:
            self._left = self._chooser.distribution(self._row)
        return self._left

    def reject(self, drawn_from: Distribution) -> None:
        """Take note that a child, and all after it, is rejected."""
        rest = self.left.less(drawn_from, self.reach)
        if rest.total:
            self._left, self.reach = rest, rest.total / (rest.total + (1.0 - self.reach))
        elif self.reach < 1:
            self.reach = 0.0


def block(draft: Draft, rows: Sequence[Row], chooser: Chooser, dice: Dice) -> Iterator[tuple[int, int | None]]:
    """Yield the tokens of a round after Sun et al. (2403.10444, algorithm 2); see :func:`verify`.

    Decides on a path as a whole, from its end: a token may make up for one before it that was less likely than drafted,
    so that more tokens stand than by :func:`rejection`. On trees this is traversal verification (2505.12398): leaves
    first, then their siblings, then the parent. Rows of tokens that don't stand are looked at too.
    """
    assert draft.distributions is not None
    children = _children(draft)
    path = [_Step(-1, 1.0, rows[0], chooser, children[-1])]
    while True:
        step = path[-1]
        child = next(step.children, None)
        if child is not None:
            token, drawn_from = draft.tokens[child], draft.distributions[child]
            reach = min(1.0, step.reach * step.left.probability(token) / drawn_from.probability(token))
            if reach:
                chooser.take(token)
                path.append(_Step(child, reach, rows[child + 1], chooser, children[child]))
            else:
                step.reject(drawn_from)
        elif dice.accepts(step.reach, step.node):
            break
        else:
            path.pop()
            chooser.forget(1)
            path[-1].reject(draft.distributions[step.node])
    for each in path[1:]:
        yield draft.tokens[each.node], each.node
    token = dice.draw(path[-1].left)
    chooser.take(token)
    yield token, None


def _parents(draft: Draft) -> Sequence[int]:
    return range(-1, len(draft) - 1) if draft.parents is None else draft.parents


def _by_token(draft: Draft) -> dict[tuple[int, int], int]:
    """Map (parent's index, token) to the index of the draft token, the first of equal ones."""
    children: dict[tuple[int, int], int] = {}
    for index, (parent, token) in enumerate(zip(_parents(draft), draft.tokens, strict=True)):
        children.setdefault((parent, token), index)
    return children


def _children(draft: Draft) -> dict[int, list[int]]:
    """Map each index, and -1, to the indices of the children, in the order in which they were drawn."""
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(draft))}
    for index, parent in enumerate(_parents(draft)):
        children[parent].append(index)
    return children
