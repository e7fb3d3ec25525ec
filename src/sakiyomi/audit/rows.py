"""Whether the target's rows have the same bits whatever rows are computed beside them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sakiyomi.interfaces import Target, Work

ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 33)  # of one forward
TREES = (4, 9, 16)


@dataclass(frozen=True, slots=True)
class RowsCheck:
    """One forward of several rows against the same rows one by one.

    ``context``: tokens before them. ``shape``: chain or tree. ``different``: rows whose logits differ in any bit;
    ``largest``: the largest difference of a logit.
    """

    context: int
    shape: str
    rows: int
    different: int
    largest: float


def checks_per_context() -> int:
    """Return how many checks :func:`check_rows` yields for each context."""
    return len(ROWS) + len(TREES)


def check_rows(target: Target, prompt: Sequence[int]) -> Iterator[RowsCheck]:
    """Yield checks of forwards that follow a prompt, of random tokens; of as many rows as the context has room for."""
    source = random.Random(0)
    sequence = target.new_sequence()
    context = max(0, min(len(prompt), target.context_length - max(*ROWS, *TREES)))
    room = target.context_length - context
    for start in range(0, context, target.max_rows):
        target.forward([Work(sequence, prompt[start : min(start + target.max_rows, context)], None, 0)])

    def forward(tokens: Sequence[int], parents: Sequence[int] | None = None) -> torch.Tensor:
        (output,) = target.forward([Work(sequence, tokens, parents, len(tokens))])
        return output.logits

    def one_by_one(tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.cat([forward([token]) for token in tokens])
        sequence.truncate(context)
        return logits

    def compare(shape: str, found: torch.Tensor, expected: torch.Tensor) -> RowsCheck:
        sequence.truncate(context)
        apart = found != expected
        largest = (found.double() - expected.double())[apart].abs().max().item() if apart.any() else 0.0
        return RowsCheck(context, shape, len(found), int(apart.any(dim=1).sum()), largest)

    tokens = [source.randrange(target.vocab_size) for _ in range(min(max(ROWS), room))]
    expected = one_by_one(tokens)
    for rows in (each for each in ROWS if each <= room):
        yield compare("chain", forward(tokens[:rows]), expected[:rows])
    for rows in (each for each in TREES if each <= room):
        parents = [source.randrange(-1, i) for i in range(rows)]
        found = forward(tokens[:rows], parents)
        sequence.truncate(context)
        paths = list(map(_path(parents), range(rows)))
        yield compare("tree", found, torch.stack([one_by_one([tokens[i] for i in path])[-1] for path in paths]))


def _path(parents: Sequence[int]) -> Callable[[int], list[int]]:
    def path(index: int) -> list[int]:
        return [*path(parents[index]), index] if index >= 0 else []

    return path
