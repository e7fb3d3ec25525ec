"""What smaller weights cost: how well a model predicts a text, and how often it agrees with its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Target, Work
from sakiyomi.sampling import host

WINDOW = 1024
KILOBYTES = 50
_SCORED_ROWS = 16  # rows of logits that are worked on at once: memory, and what fits the cache

Progress = Callable[[int, int], None]
"""Called with the tokens predicted so far, and their number."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """How a target predicts the tokens of a text, each from those before it in its window.

    ``nll``: the sum of -log p(token), in nats. ``tokens``: how many were predicted. ``top``: int32 [tokens], the token
    that was likeliest at each place; of equals the lowest.
    """

    nll: float
    tokens: int
    top: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Quality:
    """A candidate against its reference, on the same tokens of the same text.

    Perplexity is exp(nll / tokens); ``ratio`` = ``perplexity`` / ``reference_perplexity``, above 1 where the candidate
    is worse. ``agreement`` is the fraction of places where both find the same token likeliest. ``text`` names the text.
    """

    reference_perplexity: float
    perplexity: float
    ratio: float
    agreement: float
    tokens: int
    text: str = ""


def evaluate(
    target: Target, ids: Sequence[int], window: int = WINDOW, *, progress: Progress | None = None
) -> Evaluation:
    """Predict every token of a text but the first.

    The text is cut into windows of at most ``window`` tokens, and of the context length. Each is a sequence of its own,
    and its last row predicts the first token of the next window. Only the logits of one forward are held at a time.
    Raises OptionError for fewer than two tokens, and for a window below 1.
    """
    total = len(ids) - 1
    if total < 1:
        raise OptionError(
            f"text: is {len(ids)} tokens long; must be at least 2, as each is predicted from those before"
        )
    if window < 1:
        raise OptionError(f"window={window}: must be at least 1")
    window = min(window, target.context_length)
    nll, top = 0.0, np.empty(total, np.int32)
    for start in range(0, total, window):
        sequence, end = target.new_sequence(), min(start + window, total)
        for first in range(start, end, target.max_rows):
            last = min(first + target.max_rows, end)
            (output,) = target.forward([Work(sequence, ids[first:last], None, last - first)])
            nll += _score(host(output.logits), ids[first + 1 : last + 1], top[first:last])
            if progress:
                progress(last, total)
    return Evaluation(nll, total, top)


def compare(reference: Evaluation, candidate: Evaluation, *, text: str = "") -> Quality:
    """Return what the candidate's evaluation differs in. Raises OptionError where they aren't of the same text."""
    if reference.tokens != candidate.tokens:
        raise OptionError(
            f"evaluations of {reference.tokens} and {candidate.tokens} tokens: must be of the same text, cut alike"
        )
    tokens = reference.tokens
    return Quality(
        reference_perplexity=math.exp(reference.nll / tokens),
        perplexity=math.exp(candidate.nll / tokens),
        ratio=math.exp((candidate.nll - reference.nll) / tokens),
        agreement=float(np.mean(reference.top == candidate.top)),
        tokens=tokens,
        text=text,
    )


def plain_text(kilobytes: int = KILOBYTES) -> str:
    """Return the beginning of Python's language reference: English, with some code, that every CPython brings.

    It changes a little from version to version. A kilobyte is 1,000 bytes of UTF-8.
    Raises OptionError where this Python goes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise OptionError(
            "quality text: this Python lacks pydoc_data.topics, the built-in one; name a file with --quality-text"
        ) from None
    text = "\n".join(topics[name] for name in sorted(topics))
    return text.encode("utf-8")[: kilobytes * 1000].decode("utf-8", errors="ignore")  # the cut may split a character


def _score(logits: NDArray[np.float32], ids: Sequence[int], top: NDArray[np.int32]) -> float:
    """Return the nll of these tokens, summed, and write the likeliest ones to ``top``.

    Exponentials are float32, sums and logarithms float64: log p is right to about 1e-6.
    """
    nll = 0.0
    wanted = np.asarray(ids)
    for first in range(0, len(logits), _SCORED_ROWS):
        part = logits[first : first + _SCORED_ROWS]
        rows = np.arange(len(part))
        likeliest = part.argmax(axis=1)
        shifted = part - part[rows, likeliest][:, None]
        found = shifted[rows, wanted[first : first + _SCORED_ROWS]].astype(np.float64)
        nll += float(np.sum(np.log(np.exp(shifted, out=shifted).sum(axis=1, dtype=np.float64)) - found))
        top[first : first + _SCORED_ROWS] = likeliest
    return nll
