"""Which draft tokens stand: pure functions from a draft and the target's logits to tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sakiyomi.interfaces import Draft
from sakiyomi.sampling import Chooser, check_chosen


def coupled(draft: Draft, logits: torch.Tensor, chooser: Chooser) -> Iterator[tuple[int, int | None]]:
    """Yield the tokens of a round: those that were drafted with their index in the draft, then the target's, with None.

    ``logits``: [1 + len(draft), vocab_size], row 0 for the position before the draft, row i + 1 after draft token i.
    The target chooses its own token at each position; a draft token stands if it is that token. So what comes out is
    what the target would have written, whatever was drafted. Rows are looked at only as far as the iterator is drawn:
    processors never see a position that isn't reached.
    """
    rows = logits.float().numpy()
    greedy = rows.argmax(axis=1) if chooser.greedy else None
    children = _children(draft)
    row = 0
    while True:
        if greedy is None:
            token = chooser.choose(rows[row])
        else:
            token = int(greedy[row])
            check_chosen(rows[row, token])
            chooser.take(token)
        index = children.get((row - 1, token))
        yield token, index
        if index is None:
            return
        row = index + 1


def _children(draft: Draft) -> dict[tuple[int, int], int]:
    """Map (parent's index, token) to the index of the draft token, the first of equal ones."""
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    children: dict[tuple[int, int], int] = {}
    for index, (parent, token) in enumerate(zip(parents, draft.tokens, strict=True)):
        children.setdefault((parent, token), index)
    return children
