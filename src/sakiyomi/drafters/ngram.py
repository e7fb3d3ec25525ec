"""Prompt lookup: what followed the last few tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, GoOn, always
from sakiyomi.sampling import SamplingParams


class NgramDrafter:
    """Proposes the continuation of the longest earlier occurrence of the last tokens, the most recent of several.

    Looks for the last ``max_ngram`` tokens, then fewer, down to ``min_ngram``; in the sequence itself first, then in
    ``reference`` (token ids of any text: a document, earlier answers). No model, no training; a lookup takes
    microseconds whatever the context. After Saxena 2023 (prompt lookup decoding).
    Raises OptionError unless 1 <= min_ngram <= max_ngram.
    """

    name = "ngram"
    costs = None
    samples = False
    prefixes = True

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 1, reference: Sequence[int] = ()) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise OptionError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: must be 1 <= min_ngram <= max_ngram")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._reference = NgramIndex(self._sizes)
        self._reference.extend(reference)

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> NgramSession:
        """Begin a sequence with these token ids."""
        own = NgramIndex(self._sizes)
        own.extend(prompt)
        return NgramSession(self.name, own, self._reference)


class NgramSession:
    """The lookup state of one sequence."""

    unread = 0

    def __init__(self, name: str, own: NgramIndex, reference: NgramIndex) -> None:
        self._name, self._own, self._reference = name, own, reference

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained."""
        self._own.extend(tokens)

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return the continuation of the longest match: at most ``budget`` tokens, none without a match."""
        ids = self._own.ids
        for size in self._own.sizes:
            if size > len(ids):
                continue
            last = tuple(ids[-size:])
            tokens = self._own.continuation(last, budget)
            if tokens:
                # The end of the sequence is where the draft goes on, so the draft continues itself.
                tokens = [tokens[i % len(tokens)] for i in range(budget)]
            else:
                tokens = self._reference.continuation(last, budget)
            if tokens:
                # A rough guess: longer matches hold more often, and a draft that stood so far is a longer match.
                confidences = tuple((size + i) / (size + i + 1) for i in range(len(tokens)))
                return Draft(tuple(tokens), None, confidences, self._name)
        return Draft(drafter=self._name)


class NgramIndex:
    """Where each n-gram last occurred, kept up to date token by token."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.sizes = sizes
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram (of any size) -> index of the token after it

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once something follows it, so that a lookup never finds itself."""
        for token in tokens:
            end = len(self.ids)
            for size in self.sizes:
                if size <= end:
                    self._follows[tuple(self.ids[end - size : end])] = end
            self.ids.append(token)

    def continuation(self, ngram: tuple[int, ...], count: int) -> list[int]:
        """Return up to ``count`` tokens that followed the most recent occurrence; none if it never occurred."""
        start = self._follows.get(ngram)
        return [] if start is None else self.ids[start : start + count]
