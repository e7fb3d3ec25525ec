"""Drafting from what stands before the text: the input of an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Sequence

from sakiyomi.interfaces import Costs, Drafter, DraftSession
from sakiyomi.sampling import SamplingParams


class Preceded:
    """A drafter whose sessions begin with ``ids`` (token ids) before the prompt.

    An encoder-decoder model's sequences hold the decoder's tokens alone, while what it says is often in its input: what
    is translated, corrected or summed up. With the input's ids before the text, ngram and suffix find it there. The
    vocabulary must be one for both. For drafters that look things up; a draft model has an encoder of its own, and its
    noise goes by the place in the text.
    """

    def __init__(self, drafter: Drafter, ids: Sequence[int]) -> None:
        self._drafter = drafter
        self._ids = [int(token) for token in ids]

    @property
    def name(self) -> str:
        """The drafter's own name."""
        return self._drafter.name

    @property
    def costs(self) -> Costs | None:
        """The drafter's own costs."""
        return self._drafter.costs

    @property
    def samples(self) -> bool:
        """Whether the drafter's drafts are samples."""
        return self._drafter.samples

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> DraftSession:
        """Begin a sequence with these token ids, after those that precede it."""
        return self._drafter.session([*self._ids, *prompt], params, sampled)
