"""What a forward of a model costs on this machine: measured once, kept in a file, corrected by every round."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from sakiyomi.interfaces import Target, Work
from sakiyomi.sampling import host

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 33)
_COARSE_ROWS = (1, 2, 4, 8, 16, 33)
_BETWEEN_S = 0.0005  # of other work, as in a round: threads that wait for the next forward go to sleep meanwhile
_OTHER_BYTES = 2**24  # more than the caches of a core hold
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

    Two numbers are corrected with every forward: the machine's speed now (other work, its clock), as a factor on
    everything, and what a further row costs more than the table says. A forward of one row shows the first alone, one
    of more rows both; a Kalman filter shares out the surprise. The speed may change at any time, and is trusted little
    at first; the shape of the table changes slowly.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._seconds = _spread_out(table.rows, table.seconds)
        self._slope = self._seconds[-1] - self._seconds[-2]
        self._log_speed, self._speed = 0.0, 1.0
        self._per_row = 0.0  # seconds at the table's speed
        self._variances = 0.25, 0.0, 0.01**2  # of log speed; of both; of per_row by the seconds of one row

    def seconds(self, rows: int, context: int, sequences: int = 1) -> float:
        """Return the seconds of a forward of so many rows of a sequence that holds ``context`` tokens.

        Of several sequences: of so many rows in all, where each holds about so many tokens.
        """
        table = self.table
        base = self._seconds[rows] if rows <= _LARGEST else self._seconds[-1] + (rows - _LARGEST) * self._slope
        per_context = sequences * table.per_token + rows * table.per_row_token
        return self._speed * (base + (rows - 1) * self._per_row + context * per_context)

    def further(self, rows: int, context: int, most: int) -> list[float]:
        """Return the seconds that 0, 1, .. ``most`` rows more add to a forward of ``rows``, never falling."""
        if rows + most > _LARGEST:
            first = self.seconds(rows, context)
            return [max(0.0, self.seconds(rows + more, context) - first) for more in range(most + 1)]
        first, each = self._seconds[rows], self._per_row + context * self.table.per_row_token
        added, last = [0.0], 0.0
        for more, base in enumerate(self._seconds[rows + 1 : rows + most + 1], start=1):
            seconds = base - first + more * each
            last = seconds if seconds > last else last
            added.append(self._speed * last)
        return added

    @property
    def branch_s(self) -> float:
        """Seconds that a draft with branches costs more than a chain."""
        return self._speed * self.table.branch_s

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Take note of what a forward took."""
        expected = self.seconds(rows, context)
        one = self._seconds[1]
        weight = (rows - 1) * one * self._speed / expected  # d log(expected) / d (per_row / one)
        surprise = math.log(max(seconds, 1e-9) / expected)
        surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)  # one hiccup should not count for much
        a, b, c = self._variances
        a, c = a + _SPEED_DRIFT, c + _PER_ROW_DRIFT
        of_speed, of_row = a + weight * b, b + weight * c
        total = of_speed + weight * of_row + _NOISE
        self._log_speed += of_speed / total * surprise
        self._speed = math.exp(self._log_speed)
        per_row = self._per_row + of_row / total * surprise * one
        least = (one - self._seconds[min(rows, _LARGEST)]) / max(1, rows - 1)  # rows don't save time
        self._per_row = max(per_row, least)
        self._variances = (
            a - of_speed * of_speed / total,
            b - of_speed * of_row / total,
            c - of_row * of_row / total,
        )


# Variances: what may change from one forward to the next, and what the logarithm of a single one is off by.
_SPEED_DRIFT, _PER_ROW_DRIFT, _NOISE = 0.03**2, 0.001**2, 0.1**2
_LARGEST_SURPRISE = math.log(2)


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
        ready = time.perf_counter() + _BETWEEN_S
        while time.perf_counter() < ready:
            pass
        began = time.perf_counter()
        (output,) = target.forward([Work(sequence, tokens, parents, rows)])
        host(output.logits).argmax(axis=1)
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
    some = min(8, sizes[-1])
    branch_s = 0.0
    if some >= 3:
        chains, trees = zip(*((run(some), run(some, [-1, *range(some - 2), 0])) for _ in range(6)), strict=True)
        branch_s = max(0.0, min(trees) - min(chains))
    bare = (at_near[rows] - near * (per_token + rows * per_row_token) for rows in sizes)
    return CostTable(tuple(sizes), tuple(max(each, 1e-9) for each in bare), per_token, per_row_token, branch_s)


def measure_rows(
    run: Callable[[int], object], rows: Sequence[int] = (1, 2, 4, 8, 16, 64), *, seconds: float = 0.05
) -> CostTable:
    """Measure what ``run(rows)`` takes, in about so many seconds: each size twice at least, the fastest counts.

    Before each, other memory is read, as by the target before a draft: what was at hand is further away then.
    """
    other = np.ones(_OTHER_BYTES, np.uint8)  # zeros would all be one page
    run(rows[0])  # with it comes what only a first call does
    best = dict.fromkeys(rows, math.inf)
    end = time.perf_counter() + seconds
    for turn in range(7):
        if turn >= 2 and time.perf_counter() > end:
            break
        for size in rows:
            other.max()
            began = time.perf_counter()
            run(size)
            best[size] = min(best[size], time.perf_counter() - began)
    return CostTable(tuple(rows), tuple(max(each, 1e-9) for each in best.values()))


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
