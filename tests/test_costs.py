"""Measured costs: what a table says between its points, what rounds correct, and what the cache keeps."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from sakiyomi import costs
from sakiyomi.costs import CostTable, ModelCosts, measure, measured
from sakiyomi.interfaces import TargetOutput

TABLE = CostTable((1, 4, 8, 33), (1.0, 1.3, 1.5, 4.0), per_token=0.001, per_row_token=0.0001, branch_s=0.2)


class Clocked:
    """A target whose forwards take a known time: 1 + rows / 10 + context / 1000 + rows x context / 10,000."""

    vocab_size, max_rows = 50, 16

    def __init__(self, monkeypatch, context_length: int = 2000, branch_s: float = 0.5, noise: float = 0.0) -> None:
        self.context_length, self.branch_s, self.noise = context_length, branch_s, noise
        self.now, self.calls, self.source = 0.0, [], random.Random(0)
        monkeypatch.setattr(costs, "time", self)

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def new_sequence(self):
        class Held:
            length = 0

            def truncate(self, length):
                self.length = length

        return Held()

    def forward(self, work):
        (item,) = work
        rows, context = len(item.tokens), item.sequence.length
        assert rows <= self.max_rows
        assert context + rows <= self.context_length
        assert all(0 <= token < self.vocab_size for token in item.tokens)
        self.calls.append(rows)
        seconds = 1 + rows / 10 + context / 1000 + rows * context / 10_000
        if item.parents is not None:
            seconds += self.branch_s
        self.now += 0.01 * seconds * (1 + self.noise * self.source.random())
        item.sequence.length += rows
        return [TargetOutput(torch.zeros(item.logit_rows, self.vocab_size))]


def test_between_points_are_straight_lines():
    table = ModelCosts(TABLE)
    assert [table.seconds(rows, 0) for rows in (1, 2, 3, 4, 6, 8, 33)] == pytest.approx(
        [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 4.0]
    )
    slope = (4.0 - 1.5) / 25
    assert table.seconds(40, 0) == pytest.approx(4.0 + 7 * slope)
    assert table.seconds(128, 0) == pytest.approx(4.0 + 95 * slope)
    assert table.seconds(500, 0) == pytest.approx(4.0 + 467 * slope)
    assert table.seconds(4, 100) == pytest.approx(1.3 + 0.1 + 0.04)


def test_more_rows_never_cost_less():
    table = ModelCosts(CostTable((1, 2, 4, 8), (1.0, 1.4, 1.2, 1.5)))
    seconds = [table.seconds(rows, 0) for rows in range(1, 200)]
    assert seconds == sorted(seconds)


def test_one_row_is_a_table():
    table = ModelCosts(CostTable((1,), (2.0,)))
    assert table.seconds(1, 7) == 2.0
    assert table.seconds(2, 7) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("rows", "seconds", "more"),
    [
        ((), (), {}),
        ((2, 4), (1.0, 2.0), {}),
        ((1, 4, 4), (1.0, 2.0, 3.0), {}),
        ((1, 4), (1.0,), {}),
        ((1, 4), (1.0, 0.0), {}),
        ((1, 4), (1.0, math.inf), {}),
        ((1, 4), (1.0, math.nan), {}),
        ((1, 4), (1.0, 2.0), {"per_token": -0.1}),
        ((1, 4), (1.0, 2.0), {"branch_s": math.nan}),
    ],
)
def test_what_cannot_be_a_table(rows, seconds, more):
    with pytest.raises(ValueError, match="must"):
        CostTable(rows, seconds, **more)


def test_measuring_finds_what_is_there(monkeypatch):
    target = Clocked(monkeypatch)
    found = ModelCosts(measure(target))
    for rows in (1, 2, 3, 5, 8, 16):
        for context in (0, 100, 1000):
            expected = 0.01 * (1 + rows / 10 + context / 1000 + rows * context / 10_000)
            assert found.seconds(rows, context) == pytest.approx(expected, rel=0.02)
    assert found.branch_s == pytest.approx(0.005, rel=0.01)


def test_measuring_takes_about_a_second(monkeypatch):
    target = Clocked(monkeypatch, noise=0.5)
    measure(target)
    assert 0.5 < target.now < 1.6
    short = Clocked(monkeypatch)
    measure(short, seconds=0.2)
    assert short.now < 1.0


def test_disturbances_do_not_count(monkeypatch):
    found = ModelCosts(measure(Clocked(monkeypatch, noise=1.0), seconds=3.0))
    assert found.seconds(16, 0) / found.seconds(1, 0) == pytest.approx(2.6 / 1.1, rel=0.15)


@pytest.mark.parametrize("context_length", [2, 3, 8, 40, 200])
def test_short_contexts_are_measured_too(monkeypatch, context_length):
    table = measure(Clocked(monkeypatch, context_length=context_length))
    assert table.rows[0] == 1
    assert table.seconds[0] == pytest.approx(0.011, rel=0.1)


def test_a_real_target_is_measured(llama):
    table = measure(llama, seconds=0.05)
    assert table.rows == (1, 2, 3, 4, 6, 8, 12, 16, 24, 33)
    assert 0 < table.seconds[0] < 1


def test_the_machine_getting_slower_moves_everything():
    table = ModelCosts(TABLE)
    for _ in range(20):
        table.observe(1, 100, 2 * 1.1001)
    assert table.seconds(1, 100) == pytest.approx(2 * 1.1001, rel=0.02)
    assert table.seconds(8, 0) == pytest.approx(3.0, rel=0.02)
    assert table.branch_s == pytest.approx(0.4, rel=0.02)


def test_a_change_is_followed_after_long_quiet():
    table = ModelCosts(TABLE)
    for _ in range(1000):
        table.observe(1, 0, 1.0)
    for _ in range(20):
        table.observe(1, 0, 2.0)
    assert table.seconds(1, 0) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_table_from_another_hour_is_put_right_at_once(factor):
    """Also where there are only forwards of many rows: their price by that of one is trusted more than the speed."""
    table = ModelCosts(TABLE)
    for _ in range(3):
        table.observe(33, 0, factor * 4.0)
    assert table.seconds(33, 0) == pytest.approx(factor * 4.0, rel=0.05)
    assert table.seconds(1, 0) == pytest.approx(factor, rel=0.15)


def test_rounds_tell_what_rows_cost():
    """A further row costs so much more than the table says, of every number of rows."""
    table = ModelCosts(TABLE)
    for _ in range(200):
        table.observe(1, 0, 1.0)
        table.observe(8, 0, 1.5 + 7 * 0.05)
    assert table.seconds(1, 0) == pytest.approx(1.0, rel=0.05)
    assert table.seconds(8, 0) == pytest.approx(1.85, rel=0.05)
    assert table.seconds(4, 0) == pytest.approx(1.45, rel=0.05)
    for _ in range(300):
        table.observe(1, 0, 1.0)
        table.observe(8, 0, 1.5)
    assert table.seconds(8, 0) == pytest.approx(1.5, rel=0.05)
    for _ in range(300):
        table.observe(1, 0, 1.0)
        table.observe(4, 0, 0.5)
    assert table.seconds(4, 0) >= 0.99 * table.seconds(1, 0), "rows don't save time"


def test_what_further_rows_add():
    table = ModelCosts(TABLE)
    table.observe(8, 50, 3.0)
    for rows, most in ((1, 32), (3, 8), (100, 40), (126, 1)):
        added = table.further(rows, 70, most)
        assert added[0] == 0
        assert added == sorted(added)
        expected = [table.seconds(rows + more, 70) - table.seconds(rows, 70) for more in range(most + 1)]
        assert added == pytest.approx(expected, abs=1e-9)


def test_one_hiccup_counts_for_little():
    table = ModelCosts(TABLE)
    for _ in range(20):
        table.observe(1, 0, 1.0)
    table.observe(1, 0, 1000.0)
    table.observe(8, 0, 0.0)
    assert table.seconds(1, 0) < 1.3
    assert table.seconds(8, 0) > 1.2


def test_a_table_is_kept_for_what_it_depends_on(monkeypatch, tmp_path):
    target = Clocked(monkeypatch)
    first = measured(target, tmp_path / "costs", {"model": "a", "threads": 2})
    calls = len(target.calls)
    assert measured(target, tmp_path / "costs", {"threads": 2, "model": "a"}) == first
    assert len(target.calls) == calls, "it was measured again"
    measured(target, tmp_path / "costs", {"model": "a", "threads": 1})
    assert len(target.calls) > calls
    assert len(list((tmp_path / "costs").iterdir())) == 2


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "{}", '{"table": {"rows": [1]}}', '{"table": 3}', "bad number", "more"]
)
def test_a_damaged_file_is_measured_again(monkeypatch, tmp_path, damage):
    target = Clocked(monkeypatch)
    first = measured(target, tmp_path, {"model": "a"})
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    if damage == "bad number":
        kept["table"]["seconds"][0] = "x"
        damage = json.dumps(kept)
    elif damage == "more":
        damage = json.dumps({"table": {**kept["table"], "what": 1}})
    path.write_text(damage)
    calls = len(target.calls)
    assert measured(target, tmp_path, {"model": "a"}).rows == first.rows
    assert len(target.calls) > calls
    assert json.loads(path.read_text())["table"]["rows"] == list(first.rows)


def test_where_nothing_can_be_kept_it_is_measured(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert measured(Clocked(monkeypatch), tmp_path / "file" / "costs", {}).rows


def test_each_sequence_of_a_batch_reads_its_own_context():
    costs = ModelCosts(TABLE)
    alone, together = costs.seconds(8, 1000), costs.seconds(8, 1000, 8)
    assert together - alone == pytest.approx(7 * 1000 * TABLE.per_token)
    assert costs.seconds(8, 0, 8) == costs.seconds(8, 0)
