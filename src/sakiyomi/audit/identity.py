"""Whether outputs are those of plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sakiyomi.engine import Engine
from sakiyomi.interfaces import Work
from sakiyomi.sampling import SamplingParams, candidates, gumbel_noise, host
from sakiyomi.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output first differs from plain decoding; a text is None where that output had ended.

    ``before``: the end of what they have in common. ``gap``: by how much the target preferred its choice there to its
    second one: in logits where greedy, in log-probability with noise where sampled. A gap at the level of rounding
    (1e-5 or less in float32, 1e-2 in bf16) is a tie that arithmetic broke; a wide one is a fault.
    """

    prompt_id: str
    case: str
    position: int
    before: str
    plain: str | None
    other: str | None
    gap: float


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two outputs differ, None where they are the same."""
    for position, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return position
    return None if len(plain) == len(other) else min(len(plain), len(other))


def describe(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    params: SamplingParams,
    plain: Sequence[int],
    other: Sequence[int],
    prompt_id: str,
    case: str,
) -> Difference | None:
    """Return where an output first differs from plain decoding, None where it doesn't."""
    position = first_difference(plain, other)
    if position is None:
        return None

    def text(tokens: Sequence[int]) -> str | None:
        return tokenizer.decode([tokens[position]], special=True) if position < len(tokens) else None

    return Difference(
        prompt_id=prompt_id,
        case=case,
        position=position,
        before=tokenizer.decode([*prompt, *plain[:position]][-24:], special=True),
        plain=text(plain),
        other=text(other),
        gap=_gap(engine, prompt, params, plain[:position]),
    )


def _gap(engine: Engine, prompt: Sequence[int], params: SamplingParams, text: Sequence[int]) -> float:
    """Return how far the target's first choice after a text is ahead of its second one."""
    chooser = engine.chooser(prompt, params)
    for token in text:
        chooser.take(token)
    ids, sequence = [*prompt, *text], engine.target.new_sequence()
    for start in range(0, len(ids), engine.target.max_rows):
        rows = ids[start : start + engine.target.max_rows]
        (output,) = engine.target.forward([Work(sequence, rows, None, 1)])
    sums = chooser.processed(host(output.logits)[0]).astype(np.float64)
    if params.temperature:
        kept, z = candidates(sums.astype(np.float32), params)
        sums = z + gumbel_noise(params.seed, len(ids), np.arange(z.size) if kept is None else kept)
    first, second = np.sort(sums)[-2:][::-1] if sums.size > 1 else (np.inf, 0.0)
    return float(first - second)
