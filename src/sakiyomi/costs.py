"""What a forward of a model costs on this machine: measured once, kept in a file, corrected by every round."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from sakiyomi.interfaces import Target, Work

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 33)
_COARSE_ROWS = (1, 2, 4, 8, 16, 33)
_SLOW_S = 0.05  # a forward of one row beyond which the coarse rows do
_LONGEST_CONTEXT = 512
_LARGEST = 128  # rows up to which seconds are looked up; beyond, the last slope goes on


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a forward, the choice of each row's likeliest token included, as measured.

    ``seconds``: for each of ``rows``, with no context. Each token of context adds ``per_token`` and, for every row,
    ``per_row_token``. ``branch_s``: what a draft with branches costs more than a chain of as many rows.
    Raises ValueError for what can't be a table.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_token: float = 0.0
    per_row_token: float = 0.0
    branch_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*self.seconds, self.per_token, self.per_row_token, self.branch_s)
        ascending = all(a < b for a, b in pairwise(self.rows))
        if not all(type(each) is int for each in self.rows):
            raise ValueError("rows must be whole numbers")
        if not ascending or self.rows[:1] != (1,) or len(self.rows) != len(self.seconds):
            raise ValueError("rows must ascend from 1, each with its seconds")
        if not all(math.isfinite(each) and each >= 0 for each in numbers) or min(self.seconds) <= 0:
            raise ValueError("seconds must be positive numbers")


class ModelCosts:
    """Seconds of a model's forwards: a table, and what was seen since.

    The table holds how costs compare with each other. Corrections follow what rounds take: one factor on everything
    (other work on the machine, its clock), and one for each number of rows, which goes back to 1 where it isn't
    confirmed.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._speed = 1.0
        self._seconds = _spread_out(table.rows, table.seconds)
        self._corrections = [1.0] * len(self._seconds)

    def seconds(self, rows: int, context: int) -> float:
        """Return the seconds of a forward of so many rows of a sequence that holds ``context`` tokens."""
        if rows <= _LARGEST:
            base, correction = self._seconds[rows], self._corrections[rows]
        else:
            base = self._seconds[-1] + (rows - _LARGEST) * (self._seconds[-1] - self._seconds[-2])
            correction = self._corrections[-1]
        table = self.table
        return self._speed * correction * (base + context * (table.per_token + rows * table.per_row_token))

    @property
    def branch_s(self) -> float:
        """Seconds that a draft with branches costs more than a chain."""
        return self._speed * self.table.branch_s

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Take note of what a forward took."""
        factor = min(max(seconds / self.seconds(rows, context), 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)
        if rows == 1:
            self._speed *= factor**_RATE
            return
        self._speed *= factor ** (_RATE / 4)  # forwards of one row tell it better
        at = min(rows, _LARGEST)
        for i in range(max(2, at - at // 4), min(_LARGEST, at + at // 4) + 1):  # neighbours cost alike
            correction = (self._corrections[i] * factor**_RATE) ** _FADE
            self._corrections[i] = min(max(correction, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)


_RATE = 0.1
_FADE = 0.995
_LARGEST_FACTOR = 2.0  # one hiccup should not count for much
_LARGEST_CORRECTION = 3.0


def _spread_out(rows: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return seconds for 0 .. _LARGEST rows: straight lines between what was measured, never falling."""
    rising = [max(seconds[: i + 1]) for i in range(len(seconds))]
    spread = [rising[0], rising[0]]
    for (low_rows, high_rows), (low, high) in zip(pairwise(rows), pairwise(rising), strict=True):
        slope = (high - low) / (high_rows - low_rows)
        spread.extend(low + slope * i for i in range(1, high_rows - low_rows + 1))
    half = rows[max(0, min(len(rows) // 2, len(rows) - 2))]  # what was measured there tells how it goes on
    slope = (spread[rows[-1]] - spread[half]) / max(1, rows[-1] - half)
    spread.extend(rising[-1] + slope * i for i in range(1, _LARGEST - rows[-1] + 1))
    return spread


def measure(target: Target, *, seconds: float = 1.0) -> CostTable:
    """Measure a target in about so many seconds; more where a few forwards take longer.

    Sizes are measured in turns; of each the fastest counts, since other work on the machine only slows.
    """
    sequence = target.new_sequence()

    def run(rows: int, parents: Sequence[int] | None = None) -> float:
        held = sequence.length
        tokens = [i % target.vocab_size for i in range(rows)]
        began = time.perf_counter()
        (output,) = target.forward([Work(sequence, tokens, parents, rows)])
        output.logits.float().numpy().argmax(axis=1)
        took = time.perf_counter() - began
        sequence.truncate(held)
        return took

    def fastest(sizes: Sequence[int], share: float) -> dict[int, float]:
        best = dict.fromkeys(sizes, math.inf)
        end = time.perf_counter() + share * seconds
        for turn in range(7):
            if turn >= 2 and time.perf_counter() > end:
                break
            for rows in sizes:
                best[rows] = min(best[rows], run(rows))
        return best

    def fill(length: int) -> None:
        while (missing := length - sequence.length) > 0:
            rows = min(missing, target.max_rows)
            target.forward([Work(sequence, [i % target.vocab_size for i in range(rows)], None, 0)])

    most = min(target.max_rows, target.context_length // 2)
    near = min(16, target.context_length - most)
    fill(near)
    run(1)  # with it comes what only a first call does
    one = min(run(1), run(1))
    sizes = [rows for rows in (_COARSE_ROWS if one > _SLOW_S else _ROWS) if rows <= most]
    at_near = fastest(sizes, 0.5)
    some = min(8, sizes[-1])
    branch_s = 0.0
    if some >= 3:
        chains, trees = zip(*((run(some), run(some, [-1, *range(some - 2), 0])) for _ in range(3)), strict=True)
        branch_s = max(0.0, min(trees) - min(chains))
    # As much context as a fifth of the time fills: it adds little, but grows.
    affordable = near + int(0.2 * seconds / at_near[sizes[-1]] * sizes[-1])
    far = min(_LONGEST_CONTEXT, target.context_length - sizes[-1], affordable)
    per_token = per_row_token = 0.0
    if far >= near + 64:
        fill(far)
        ends = fastest([1, sizes[-1]], 0.3)
        low, high = (max(0.0, ends[rows] - at_near[rows]) / (far - near) for rows in (1, sizes[-1]))
        if sizes[-1] > 1:
            per_row_token = max(0.0, high - low) / (sizes[-1] - 1)
        per_token = max(0.0, low - per_row_token)
    bare = (at_near[rows] - near * (per_token + rows * per_row_token) for rows in sizes)
    return CostTable(tuple(sizes), tuple(max(each, 1e-9) for each in bare), per_token, per_row_token, branch_s)


def measured(target: Target, folder: Path, facts: Mapping[str, object]) -> CostTable:
    """Return the table that ``folder`` keeps for these facts; measure it, and keep it, where there is none.

    ``facts`` are what costs depend on: model, dtype, device, threads, processor, versions. A file that can't be read
    or written is no error: what it holds can be measured again.
    """
    name = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = folder / f"{name}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["table"]
        rows, seconds = (tuple(kept.pop(name)) for name in ("rows", "seconds"))
        return CostTable(rows, seconds, **kept)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        table = measure(target)
    text = json.dumps({"facts": facts, "table": asdict(table)}, default=str, indent=1)
    partial = path.with_name(f".{name}-{os.getpid()}.json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return table
