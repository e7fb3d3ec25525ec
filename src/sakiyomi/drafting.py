"""Drafters at work on one sequence: what they propose is checked, what they raise ends only them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from sakiyomi.errors import DrafterError, PolicyError
from sakiyomi.interfaces import Costs, Draft, Drafter, DraftSession, FeatureSession, GoOn, always
from sakiyomi.sampling import SamplingParams

if TYPE_CHECKING:
    import torch


class Source:
    """A drafter's session, guarded. A drafter that fails is left out of the rest of the sequence.

    ``sampled``: whether its drafts are samples, which once drawn must be checked, and whole. ``hidden_layers``: whose
    states it reads, of those that ``available`` says. ``at_once``: the tokens in a row that a forward of its model
    drafts. ``seconds``: what the last proposal took. ``error``: what the drafter failed of, None while it works.
    """

    def __init__(
        self,
        drafter: Drafter,
        prompt: Sequence[int],
        params: SamplingParams,
        vocab_size: int,
        sampled: bool = False,
        available: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.name = drafter.name
        self.costs: Costs | None = drafter.costs
        self.sampled = sampled and drafter.samples
        self.hidden_layers: tuple[int, ...] = tuple(getattr(drafter, "hidden_layers", ()))
        self.at_once: int = getattr(drafter, "at_once", 1)
        self.seconds = 0.0
        self.error: str | None = None
        self._vocab_size = vocab_size
        self._session: DraftSession | None = None
        self._drawn: Draft | None = None
        try:
            if self.hidden_layers and (missing := set(self.hidden_layers).difference(available())):
                raise DrafterError(f"it reads the states of layers {sorted(missing)}, which this target doesn't give")
            self._session = drafter.session(prompt, params, sampled)
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
        """Return a proposal that the target can compute, each token with a confidence; empty where there is none.

        Raises PolicyError for another proposal where there is a sample already: one can't choose between them.
        """
        if self._session is None:
            self.seconds = 0.0
            return Draft(drafter=self.name)
        if self._drawn is not None:
            raise PolicyError(
                f"policy: asked {self.name} for another sample in one round; what is drawn must be checked"
            )
        asked = 0

        def ask(confidence: float) -> bool:
            nonlocal asked
            asked += 1
            return go_on(confidence)

        began = time.perf_counter()
        try:
            draft = _checked(self._session.propose(budget, ask), budget, self._vocab_size, self.name, self.sampled)
            if self.sampled and asked > len(draft):
                raise DrafterError(f"it asked whether to go on after {asked} tokens, and kept {len(draft)} of them")
        except Exception as error:
            self._fail(error)
            draft = Draft(drafter=self.name)
        self.seconds = time.perf_counter() - began
        if self.sampled and draft:
            self._drawn = draft
        return draft

    def take_drawn(self) -> Draft | None:
        """Return the sample that was drawn since this was last called, None where there was none."""
        drawn, self._drawn = self._drawn, None
        return drawn

    def read(self, hidden: Mapping[int, torch.Tensor], rows: Sequence[int] | None = None) -> None:
        """Give the drafter the target's states of the tokens computed since, by layer, if it reads any.

        ``rows``: which of the states they are, ascending; None for all.
        """
        if self._session is None or not self.hidden_layers:
            return
        try:
            cast("FeatureSession", self._session).read([_of_rows(hidden[layer], rows) for layer in self.hidden_layers])
        except Exception as error:
            self._fail(error)

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


def _of_rows(hidden: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
    """Return these rows of [rows, hidden_size], ascending; a view where they are the first."""
    if rows is None:
        return hidden
    count = len(rows)
    if not count or rows[-1] == count - 1:
        return hidden[:count]
    import torch

    if hidden.device.type == "cpu" and hidden.dtype is torch.float32:
        return torch.from_numpy(hidden.detach().numpy()[rows])  # a fraction of what an index tensor takes
    return hidden[torch.tensor(rows, device=hidden.device)]


_INT = {int}


def _checked(draft: Draft, budget: int, vocab_size: int, name: str, sampled: bool) -> Draft:
    """Return a draft with all that is optional filled in. Raises DrafterError for what the target can't compute."""
    count = len(draft.tokens)
    if not count:
        return draft if draft.drafter == name and draft.distributions is None else Draft(drafter=name)
    if set(map(type, draft.tokens)) != _INT or min(draft.tokens) < 0 or max(draft.tokens) >= vocab_size:
        raise DrafterError(f"it proposed {draft.tokens}: token ids must be ints in 0..{vocab_size - 1}")
    if draft.parents is not None:
        if len(draft.parents) != count:
            raise DrafterError(f"it gave {len(draft.parents)} parents for {count} tokens")
        if any(not -1 <= parent < i for i, parent in enumerate(draft.parents)):
            raise DrafterError(f"it gave parents {draft.parents}: each must be -1 or the index of a token before")
    confidences = draft.confidences or (1.0,) * count
    # A sum tells what is no number, which compares as it likes.
    if len(confidences) != count or not (min(confidences) > 0 and max(confidences) <= 1 and sum(confidences) > 0):
        raise DrafterError(f"it gave confidences {confidences}: must be one in (0, 1] for each of {count} tokens")
    if count > budget and (deepest := depth(draft)) > budget:
        raise DrafterError(f"it proposed {deepest} tokens in a row: at most {budget} were asked for")
    distributions = draft.distributions if sampled else None
    if sampled:
        if distributions is None or len(distributions) != count:
            raise DrafterError(f"it gave {len(distributions or ())} distributions for {count} sampled tokens")
        for token, distribution in zip(draft.tokens, distributions, strict=True):
            if not distribution.fits(vocab_size) or distribution.probability(token) <= 0:
                raise DrafterError(f"it can't have drawn token {token} from the distribution that it gave")
    parents = None if draft.parents == tuple(range(-1, count - 1)) else draft.parents
    same = (parents, confidences, name) == (draft.parents, draft.confidences, draft.drafter)
    if same and distributions is draft.distributions:
        return draft
    return Draft(draft.tokens, parents, confidences, name, distributions)


def depth(draft: Draft) -> int:
    """Return the length of the longest path in a draft."""
    if draft.parents is None:
        return len(draft)
    depths = [0] * (len(draft) + 1)
    for index, parent in enumerate(draft.parents):
        depths[index] = depths[parent] + 1  # the last entry stays 0: it is the parent -1
    return max(depths)


def first_path(draft: Draft) -> Draft:
    """Return the chain of first children of a draft. Of a sample too: it takes no token for what it is."""
    return draft if draft.parents is None else _part(draft, _first_path(draft))


def _first_path(draft: Draft) -> list[int]:
    if draft.parents is None:
        return list(range(len(draft)))
    path: list[int] = []
    for index, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path.append(index)
    return path


def fitting(draft: Draft, room: int) -> Draft:
    """Return what there is room for: the first path, which must fit, then other tokens in their order.

    Whether a token is kept depends on those before it and on the first path, not on itself: a sample stays one.
    """
    if len(draft) <= room:
        return draft
    kept = set(_first_path(draft))
    for index, parent in enumerate(draft.parents or ()):
        if len(kept) < room and (parent < 0 or parent in kept):
            kept.add(index)
    return _part(draft, sorted(kept))


def _part(draft: Draft, indices: Sequence[int]) -> Draft:
    if len(indices) == len(draft):
        return draft
    tokens = tuple(draft.tokens[i] for i in indices)
    confidences = tuple(draft.confidences[i] for i in indices)
    distributions = draft.distributions and tuple(draft.distributions[i] for i in indices)
    parents = None if draft.parents is None else renumbered(draft.parents, indices)
    return Draft(tokens, parents, confidences, draft.drafter, distributions)


def renumbered(parents: Sequence[int], kept: Sequence[int]) -> tuple[int, ...] | None:
    """Return the parents of those tokens of a draft that are kept, ascending, as they are numbered then.

    None where that is a chain. What is kept must have its parents kept.
    """
    places = {-1: -1, **{index: place for place, index in enumerate(kept)}}
    found = tuple(places[parents[index]] for index in kept)
    return None if found == tuple(range(-1, len(kept) - 1)) else found
