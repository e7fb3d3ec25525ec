"""Drafters at work on one sequence: what they propose is checked, what they raise ends only them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sakiyomi.errors import DrafterError
from sakiyomi.interfaces import Costs, Draft, Drafter, DraftSession, GoOn, always
from sakiyomi.sampling import SamplingParams


class Source:
    """A drafter's session, guarded. A drafter that fails is left out of the rest of the sequence.

    ``seconds``: what the last proposal took. ``error``: what the drafter failed of, None while it works.
    """

    def __init__(self, drafter: Drafter, prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
        self.name = drafter.name
        self.costs: Costs | None = drafter.costs
        self.seconds = 0.0
        self.error: str | None = None
        self._vocab_size = vocab_size
        self._session: DraftSession | None = None
        try:
            self._session = drafter.session(prompt, params)
        except Exception as error:
            self._fail(error)

    @property
    def alive(self) -> bool:
        """Whether the drafter still works."""
        return self._session is not None

    @property
    def unread(self) -> int:
        """Tokens that its model must compute before it can draft."""
        try:
            return self._session.unread if self._session else 0
        except Exception as error:
            self._fail(error)
            return 0

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return a proposal that the target can compute, each token with a confidence; empty where there is none."""
        if self._session is None:
            return Draft(drafter=self.name)
        began = time.perf_counter()
        try:
            draft = _checked(self._session.propose(budget, go_on), budget, self._vocab_size, self.name)
        except Exception as error:
            self._fail(error)
            draft = Draft(drafter=self.name)
        self.seconds = time.perf_counter() - began
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell the drafter what the sequence gained."""
        if self._session is None:
            return
        try:
            self._session.observe(tokens)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._session = None
        self.error = f"{type(error).__name__}: {error}"


def _checked(draft: Draft, budget: int, vocab_size: int, name: str) -> Draft:
    """Return a draft with all that is optional filled in. Raises DrafterError for what the target can't compute."""
    count = len(draft)
    if any(type(token) is not int or not 0 <= token < vocab_size for token in draft.tokens):
        raise DrafterError(f"it proposed {draft.tokens}: token ids must be ints in 0..{vocab_size - 1}")
    if draft.parents is not None:
        if len(draft.parents) != count:
            raise DrafterError(f"it gave {len(draft.parents)} parents for {count} tokens")
        if any(not -1 <= parent < i for i, parent in enumerate(draft.parents)):
            raise DrafterError(f"it gave parents {draft.parents}: each must be -1 or the index of a token before")
    confidences = draft.confidences or (1.0,) * count
    if len(confidences) != count or not all(0 < each <= 1 for each in confidences):
        raise DrafterError(f"it gave confidences {confidences}: must be one in (0, 1] for each of {count} tokens")
    if (deepest := depth(draft)) > budget:
        raise DrafterError(f"it proposed {deepest} tokens in a row: at most {budget} were asked for")
    chain = draft.parents is None or all(parent == i - 1 for i, parent in enumerate(draft.parents))
    return Draft(draft.tokens, None if chain else draft.parents, confidences, name)


def depth(draft: Draft) -> int:
    """Return the length of the longest path in a draft."""
    if draft.parents is None:
        return len(draft)
    depths = [0] * (len(draft) + 1)
    for index, parent in enumerate(draft.parents):
        depths[index] = depths[parent] + 1  # the last entry stays 0: it is the parent -1
    return max(depths)


def chosen(draft: Draft, indices: Sequence[int]) -> Draft:
    """Return the part of a draft at these indices, ascending, of which every token's parent is a part too."""
    count = len(indices)
    if count == len(draft):
        return draft
    tokens = tuple(draft.tokens[i] for i in indices)
    confidences = tuple(draft.confidences[i] for i in indices)
    parents: tuple[int, ...] | None = None
    if draft.parents is not None:
        places = {-1: -1, **{index: place for place, index in enumerate(indices)}}
        parents = tuple(places[draft.parents[i]] for i in indices)
        if parents == tuple(range(-1, count - 1)):
            parents = None
    return Draft(tokens, parents, confidences, draft.drafter)


def first_path(draft: Draft) -> Draft:
    """Return the chain of first children of a draft."""
    if draft.parents is None:
        return draft
    path: list[int] = []
    for index, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path.append(index)
    return chosen(draft, path)
