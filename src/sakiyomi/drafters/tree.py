"""Growing a draft as a tree: level by level, the likeliest tokens go on (EAGLE-2, Li et al. 2406.16858)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

from sakiyomi.distribution import Ids
from sakiyomi.drafters.layers import likeliest
from sakiyomi.drafters.model import ALTERNATIVE, LEAST, likely
from sakiyomi.drafting import renumbered
from sakiyomi.interfaces import Draft, GoOn
from sakiyomi.sampling import SamplingParams, draft_seed, host

LEAST_SURVIVAL = 0.02  # a token beside the main path that is less likely to stand, with all before it, isn't drafted

Choices = list[tuple[int, float]]
"""What may follow a token: (target token, confidence), the choice first."""

Expand = Callable[[Sequence[int], Sequence[int], Sequence[int]], list[Choices]]
"""Called with indices of draft tokens, all of one level ([-1] at first), and the tokens and parents of the draft so
far: returns what may follow each of them."""


def grow(
    name: str, expand: Expand, *, budget: int, go_on: GoOn, width: int, max_nodes: int, ends: Collection[int] = ()
) -> Draft:
    """Return a tree of at most ``max_nodes`` tokens, ``budget`` of them in a row at most.

    The main path is that of the choices. In each level it goes on, and so do as many others as make up ``width``, those
    that are likeliest to stand with all before them. ``go_on`` is asked after each token of the main path. Nothing
    follows a token of ``ends``. Of more tokens than ``max_nodes``, those that are likeliest to stand are kept.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    survivals: list[float] = []
    path: list[int] = []
    level = [-1]
    for _ in range(min(budget, max_nodes)):
        main = path[-1] if path else -1
        first = len(tokens)
        for node, choices in zip(level, expand(level, tokens, parents), strict=True):
            survival = survivals[node] if node >= 0 else 1.0
            for i, (token, confidence) in enumerate(choices):
                chosen = node == main and i == 0
                if not chosen and survival * confidence < LEAST_SURVIVAL:
                    continue
                if chosen:
                    path.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                confidences.append(confidence)
                survivals.append(survival * confidence)
        if not path or path[-1] == main:  # the main path has no guess
            break
        main = path[-1]
        if not go_on(confidences[main]) or tokens[main] in ends:
            break
        others = [i for i in range(first, len(tokens)) if i != main and tokens[i] not in ends]
        others.sort(key=lambda i: -survivals[i])
        level = sorted([main, *others[: width - 1]])
    kept = set(path)
    for i in sorted(range(len(tokens)), key=lambda i: -survivals[i]):  # among equals parents come before children
        if len(kept) >= max_nodes:
            break
        kept.add(i)
    order = sorted(kept)
    return Draft(
        tuple(tokens[i] for i in order),
        renumbered(parents, order),
        tuple(confidences[i] for i in order),
        name,
    )


class Choosing:
    """Chooses for one request what may follow, from logits: as the target would, were they its own.

    ``names``: int64 [columns], the target's tokens that the logits are of; None: 0, 1, 2, ... At a temperature tokens
    are drawn with the target's noise, which is keyed by its own tokens and positions; with noise of the drafter's own
    where ``sampled``. Penalties, biases and processors are left to the target.
    """

    def __init__(self, names: Ids | None, params: SamplingParams, sampled: bool, count: int) -> None:
        self._names, self._params, self._sampled, self._count = names, params, sampled, count

    def __call__(self, logits: torch.Tensor, position: int, start: int) -> list[Choices]:
        """Return up to ``count`` choices for each row of [rows, columns] logits; none for what isn't numbers.

        ``position``: of the token chosen, in the round that begins at ``start``.
        """
        params, names = self._params, self._names
        if params.temperature == 0:
            found = _likeliest(logits, self._count)
        else:
            seed = draft_seed(params.seed, start) if self._sampled else params.seed
            found = [likely(row, names, params, seed, position, self._count) for row in host(logits)]
        if names is None:
            return found
        return [[(int(names[index]), confidence) for index, confidence in choices] for choices in found]


def _likeliest(logits: torch.Tensor, count: int) -> list[Choices]:
    """Return the ``count`` likeliest of each row with their probabilities; after the first, those worth a row."""
    found: list[Choices] = []
    for row, indices, total in likeliest(logits, min(count, logits.shape[1])):
        if not math.isfinite(total):
            found.append([])
            continue
        sure = [min(1.0, max(math.exp(each - total), LEAST)) for each in row]
        choices = [(indices[0], sure[0])]
        choices.extend((i, p) for i, p in zip(indices[1:], sure[1:], strict=True) if p >= ALTERNATIVE)
        found.append(choices)
    return found
