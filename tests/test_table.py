"""The n-gram table: its probabilities are those of the published formula, its drafts the likeliest paths."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from sakiyomi.drafters.table import Table, TableDrafter, build_table, coupled
from sakiyomi.drafting import Source
from sakiyomi.engine import Engine
from sakiyomi.errors import OptionError
from sakiyomi.policy import FixedPolicy
from sakiyomi.sampling import SamplingParams, candidates, derived_seed, draw, gumbel_noise

PARAMS = SamplingParams()
ALL = {"min_probability": 0.005, "continuations": 255, "max_bytes": 2**30}
STEP = 1 / 48  # of the logarithm of a probability


class KneserNey:
    """Interpolated modified Kneser-Ney, word by word (Chen & Goodman 1998), with -1 before the beginning of a text."""

    def __init__(self, texts: Sequence[Sequence[int]], starts: Sequence[int], order: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        occurrences: list[tuple[int, ...]] = []
        for text, start in zip(texts, starts, strict=True):
            padded = [-1] * (order - 1) + list(text)
            occurrences += [tuple(padded[i : i + order]) for i in range(start, len(text))]
        self.counts: dict[tuple[int, ...], int] = dict(Counter(occurrences))
        for size in range(order - 1, 0, -1):  # how many tokens come before it
            longer = {each[-size - 1 :] for each in occurrences}
            self.counts |= Counter(each[1:] for each in longer)
        self.times = Counter(each[i:-1] for each in occurrences for i in range(order))
        self.after: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for ngram, count in self.counts.items():
            self.after[ngram[:-1]].append(count)
        self.discounts = {}
        for size in range(1, order + 1):
            n = [sum(c == count for ngram, c in self.counts.items() if len(ngram) == size) for count in range(5)]
            if all(n[1:]):
                y = n[1] / (n[1] + 2 * n[2])
                found = [0.0] + [min(max(k - (k + 1) * y * n[k + 1] / n[k], 0), k) for k in (1, 2, 3)]
            else:
                found = [0, 0.5, 1, 1.5]
            self.discounts[size] = found

    def probability(self, context: tuple[int, ...], token: int) -> float:
        counts = self.after.get(context)
        shorter = self.probability(context[1:], token) if context else 1 / self.vocab_size
        if counts is None:
            return shorter
        discounts = self.discounts[len(context) + 1]
        count = self.counts.get((*context, token), 0)
        rest = sum(discounts[min(each, 3)] for each in counts)
        return (count - discounts[min(count, 3)] + rest * shorter) / sum(counts)

    def gain(self, context: tuple[int, ...]) -> float:
        """Return what a context brings over the one a token shorter, in nats, in all its places."""
        p = [self.probability(context, token) for token in range(self.vocab_size)]
        q = [self.probability(context[1:], token) for token in range(self.vocab_size)]
        return self.times[context] * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def example(seed: int, vocab_size: int = 6, size: int = 150) -> tuple[list[list[int]], list[int]]:
    """Return texts whose tokens depend on the two before, and where their outputs begin."""
    rng = random.Random(seed)
    texts = []
    for _ in range(rng.randrange(1, 6)):
        text: list[int] = []
        for _ in range(rng.randrange(size)):
            rng_ = random.Random(f"{seed} {text[-2:]}")
            text.append(rng_.randrange(vocab_size) if rng.random() < 0.6 else rng.randrange(vocab_size))
        texts.append(text)
    return texts, [rng.randrange(len(text) + 1) for text in texts]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("order", [2, 3, 4])
def test_probabilities_are_those_of_the_published_formula(seed, order):
    texts, starts = example(seed)
    table = build_table(texts, starts, vocab_size=6, order=order, **ALL)
    naive = KneserNey(texts, starts, order, 6)
    known = 0
    for size in range(1, order):
        for context in itertools.product(range(6), repeat=size):
            if not any(context[i:] in naive.after for i in range(size)):
                assert table.continuations(context) == []
                continue
            known += 1
            found = table.continuations(context)
            expected = {token: naive.probability(context, token) for token in range(6)}
            assert sum(expected.values()) == pytest.approx(1)
            counted = {ngram[-1] for ngram in naive.counts}
            assert {token for token, _ in found} >= {token for token in counted if expected[token] > 0.0052}
            assert {token for token, _ in found} <= counted
            for token, p in found:
                assert abs(math.log(p / expected[token])) < 0.51 * STEP
            falling = [expected[token] for token, _ in found]
            assert falling == pytest.approx(sorted(falling, reverse=True))
    assert known > 3 or not any(len(text) - start for text, start in zip(texts, starts, strict=True))


def test_the_formula_is_used_with_discounts_of_its_own():
    """The control of the test above: among its examples are some with the discounts of the counts."""
    fitted = [KneserNey(*example(seed), 3, 6).discounts[3] != [0, 0.5, 1, 1.5] for seed in range(8)]
    assert True in fitted
    assert False in fitted


def test_only_the_likeliest_are_kept():
    texts, starts = example(2, 30, 400)
    whole = build_table(texts, starts, vocab_size=30, order=3, **ALL)
    for count, least in ((1, 0.02), (3, 0.02), (8, 0.1), (255, 0.3)):
        table = build_table(
            texts, starts, vocab_size=30, order=3, continuations=count, min_probability=least, max_bytes=2**30
        )
        compared = 0
        for context in itertools.product(range(30), repeat=2):
            found = table.continuations(context)
            expected = [(token, p) for token, p in whole.continuations(context) if p >= least * math.exp(STEP)]
            if found and expected:
                compared += 1
                assert len(found) <= count
                assert min(p for _, p in found) >= least * math.exp(-STEP)
        assert compared > 5
        if least == 0.02:
            for context in itertools.product(range(30), repeat=2):
                assert table.continuations(context) == whole.continuations(context)[: len(table.continuations(context))]


def test_a_context_that_is_not_known_is_as_its_longest_end_that_is():
    table = build_table([[1, 2, 3, 1, 2, 3, 4, 2, 5, 4, 2, 5]], vocab_size=9, order=4, **ALL)
    assert [token for token, _ in table.continuations([1, 2])][:1] == [3]
    assert [token for token, _ in table.continuations([4, 2])][:1] == [5]
    assert table.continuations([7, 1, 2]) == table.continuations([1, 2])
    assert table.continuations([8, 8, 8, 8, 8, 4, 2]) == table.continuations([8, 4, 2]) == table.continuations([4, 2])
    assert table.continuations([1, 2, 7]) == table.continuations([]) == []


def test_what_is_longer_than_the_order_does_not_matter():
    table = build_table([[0, 1, 2, 3] * 5, [4, 1, 2, 5] * 5], vocab_size=9, order=3, **ALL)
    assert table.continuations([0, 1, 2]) == table.continuations([4, 1, 2]) == table.continuations([1, 2])


def test_a_prompt_is_context_only():
    table = build_table([[1, 2, 3, 4, 5]], [3], vocab_size=9, order=4, **ALL)
    assert table.continuations([1, 2]) == table.continuations([2]) == []
    assert table.continuations([1, 2, 3])[0][0] == table.continuations([3])[0][0] == 4
    assert table.continuations([4])[0][0] == 5


def test_texts_do_not_run_into_each_other():
    table = build_table([[1, 2], [3, 4]], vocab_size=9, order=3, **ALL)
    assert table.continuations([2]) == table.continuations([4]) == []
    assert table.continuations([2, 3]) == table.continuations([3])
    assert table.continuations([9]) == []  # what stands before a text isn't a context, whatever its id


def test_contexts_are_kept_by_what_their_bytes_bring():
    texts, starts = example(4, 12, 600)
    naive = KneserNey(texts, starts, 3, 12)
    options = {"vocab_size": 12, "order": 3, "continuations": 4}
    whole = build_table(texts, starts, **options, max_bytes=2**30)
    contexts = {
        int(build_key(context)): context
        for size in (1, 2)
        for context in itertools.product(range(12), repeat=size)
        if context in naive.after
    }
    assert whole.nbytes == 5 * len(whole.keys) + 3 * len(whole.tokens)
    sizes = dict(zip(whole.keys.tolist(), whole.sizes.tolist(), strict=True))
    before: set[int] = set()
    for max_bytes in (0, 4, 50, 300, 900, whole.nbytes - 1, whole.nbytes):
        table = build_table(texts, starts, **options, max_bytes=max_bytes)
        kept = set(table.keys.tolist())
        assert table.nbytes <= max_bytes
        assert table.nbytes > max_bytes - 5 - 3 * 4
        assert before <= kept <= contexts.keys()
        worth = {key: naive.gain(contexts[key]) / (5 + 3 * sizes[key]) for key in sizes}
        assert min((worth[key] for key in kept), default=9) >= max(
            (worth[key] for key in sizes.keys() - kept), default=0
        ) * (1 - 1e-9)
        before = kept
    assert kept == set(whole.keys.tolist())


def build_key(context: Sequence[int]) -> int:
    """Return the key of a context as the file's description has it."""
    h = 0
    for token in reversed(context):
        h = (h + token + 1) * 0x9E3779B97F4A7C15 % 2**64
        h ^= h >> 32
    return h % 2**32


def test_the_same_texts_give_the_same_table():
    """Whatever they are: lists, tuples, arrays, an iterator; and a new run of Python."""
    texts, starts = example(5)
    one = build_table(texts, starts, vocab_size=6)
    other = build_table((np.array(text, np.uint16) for text in texts), iter(starts), vocab_size=6)
    assert same(one, other)
    assert same(build_table([[1, 2] * 9], vocab_size=9), build_table([(1, 2) * 9], [0], vocab_size=9))
    # By hand: 3 and 4 follow [1, 2] with 0.25 + 0.5 * (0.25 + 0.5 * 0.2), 1 and 2 with 0.5 * 0.5 * 0.3 and 0.2.
    table = build_table([[1, 2, 3, 1, 2, 4]], vocab_size=5, order=3, max_bytes=10**4)
    assert build_key([1, 2]) in table.keys
    expected = [(3, 0.425), (4, 0.425), (1, 0.075), (2, 0.05)]
    assert table.continuations([1, 2]) == [(token, math.exp(round(48 * math.log(p)) / 48)) for token, p in expected]


def same(one: Table, other: Table) -> bool:
    arrays = ("keys", "sizes", "tokens", "levels")
    return (one.order, one.vocab_size) == (other.order, other.vocab_size) and all(
        getattr(one, name).dtype == getattr(other, name).dtype
        and getattr(one, name).tolist() == getattr(other, name).tolist()
        for name in arrays
    )


@pytest.mark.parametrize(
    ("texts", "starts", "options", "message"),
    [
        ([[1]], None, {"order": 1}, "order=1: must be a whole number in 2..8"),
        ([[1]], None, {"order": 9}, "order=9: must be a whole number in 2..8"),
        ([[1]], None, {"vocab_size": 0}, "vocab_size=0: must be"),
        ([[1]], None, {"continuations": 256}, "continuations=256: must be a whole number in 1..255"),
        ([[1]], None, {"min_probability": 0.001}, "min_probability=0.001: must be in 0.005..1"),
        ([[1]], None, {"min_probability": "1"}, "min_probability='1': must be in 0.005..1"),
        ([[1]], None, {"max_bytes": -1}, "max_bytes=-1: must be"),
        ([[1], [2, 9]], None, {}, r"texts: number 1 isn't a row of token ids in 0..8"),
        ([[-1]], None, {}, "texts: number 0 isn't"),
        ([[1.0]], None, {}, "texts: number 0 isn't"),
        (["ab"], None, {}, "texts: number 0 isn't"),
        ([[[1]]], None, {}, "texts: number 0 isn't"),
        ([[1]], [0, 0], {}, "starts: there are 2 for 1 texts"),
        ([[1]], [2], {}, "starts: 2 is no place in text number 0, which has 1 tokens"),
        ([[1]], [-1], {}, "starts: -1 is no place"),
    ],
)
def test_what_cannot_be_counted_is_named(texts, starts, options, message):
    with pytest.raises(OptionError, match=message):
        build_table(texts, starts, **{"vocab_size": 9, **options})


# -- files


def test_a_loaded_table_is_the_saved_one(tmp_path):
    path = tmp_path / "table"
    for vocab_size, dtype in ((6, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32), (2**31 - 1, np.uint32)):
        texts, starts = example(1)
        texts.append([vocab_size - 1, 3, vocab_size - 2] * 3)
        table = build_table(texts, [*starts, 0], vocab_size=vocab_size, order=4, **ALL)
        assert table.tokens.dtype == dtype
        assert table.continuations([vocab_size - 1, 3])[0][0] == vocab_size - 2
        table.save(path)
        assert same(Table.load(path), table)
        assert Table.load(path).continuations([1]) == table.continuations([1])
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OptionError, match="can't be written"):
        table.save(tmp_path / "none" / "table")


def test_a_file_says_whose_tokens_it_counted(tmp_path):
    path = tmp_path / "table"
    table = build_table([[1, 2] * 9], vocab_size=9)
    table.save(path, "abc")
    for tokenizer in ("abc", None):
        assert same(Table.load(path, tokenizer), table)
    with pytest.raises(OptionError, match="was counted in what another tokenizer's model wrote; use another file"):
        Table.load(path, "abd")
    table.save(path)
    assert same(Table.load(path, "abd"), table)
    for refused_ in (lambda: table.save(path, 1), lambda: Table.load(path, 1)):
        with pytest.raises(OptionError, match="tokenizer=1: must be a text"):
            refused_()


GOOD = {
    "keys": np.array([build_key([2]), build_key([1])], np.uint32),
    "sizes": np.array([2, 1], np.uint8),
    "tokens": np.array([3, 4, 5], np.uint16),
    "levels": np.array([10, 50, 0], np.uint8),
}
METADATA = {"format": "sakiyomi-table", "version": "1", "order": "3", "vocab_size": "9"}


def test_the_file_that_the_next_test_spoils_is_good(tmp_path):
    assert GOOD["keys"].tolist() == sorted(GOOD["keys"].tolist())
    save_file(GOOD, tmp_path / "file", METADATA)
    table = Table.load(tmp_path / "file")
    assert table.continuations([2]) == [(3, math.exp(-10 / 48)), (4, math.exp(-50 / 48))]
    assert table.continuations([1]) == [(5, 1.0)]
    table.save(tmp_path / "again")
    again = load_file(tmp_path / "again")
    assert all(np.array_equal(again[name], GOOD[name]) for name in GOOD)


@pytest.mark.parametrize(
    ("changes", "metadata", "wrong"),
    [
        ({}, {"format": "sakiyomi-suffix"}, "its format is 'sakiyomi-suffix', not 'sakiyomi-table'"),
        ({}, None, "its format is None"),
        ({}, {"version": "2"}, "its version is '2'"),
        ({}, {"order": "1"}, "its order is '1', not in 2..8"),
        ({}, {"order": "-3"}, "its order is '-3'"),
        ({}, {"order": "3.0"}, "its order is '3.0'"),
        ({}, {"order": "٣"}, "its order is '٣'"),
        ({}, {"order": ""}, "its order is ''"),
        ({}, {"vocab_size": "0"}, "its vocab_size is '0', not in 1..2147483647"),
        ({}, {"vocab_size": "9" * 5000}, "its vocab_size is '9999"),
        ({}, {"vocab_size": "5"}, "it has tokens beyond its 5"),
        ({"keys": None}, {}, "it has the tensors levels, sizes, tokens, not"),
        ({"more": np.zeros(1)}, {}, "it has the tensors keys, levels, more, sizes, tokens, not"),
        ({"keys": GOOD["keys"].astype(np.int64)}, {}, r"keys is I64 \[2\], not one row of U32"),
        ({"tokens": GOOD["tokens"].astype(np.int32)}, {}, r"tokens is I32 \[3\], not one row of U16 or U32"),
        ({"sizes": GOOD["sizes"].reshape(1, 2)}, {}, r"sizes is U8 \[1, 2\], not one row of U8"),
        ({"levels": np.array(3, np.uint8)}, {}, r"levels is U8 \[\], not one row of U8"),
        ({"keys": GOOD["keys"][::-1].copy()}, {}, "its keys don't ascend"),
        ({"keys": GOOD["keys"][[0, 0]]}, {}, "its keys don't ascend"),
        ({"keys": GOOD["keys"][:1]}, {}, "there are 1 keys and 2 sizes"),
        ({"sizes": np.array([3, 0], np.uint8)}, {}, "its sizes don't add up to its 3 tokens and 3 levels"),
        ({"sizes": np.array([2, 2], np.uint8)}, {}, "its sizes don't add up to its 3 tokens and 3 levels"),
        ({"levels": GOOD["levels"][:2]}, {}, "its sizes don't add up to its 3 tokens and 2 levels"),
        ({"tokens": np.array([3, 4, 9], np.uint16)}, {}, "it has tokens beyond its 9"),
    ],
)
def test_a_file_that_was_altered_is_refused(tmp_path, changes, metadata, wrong):
    path = tmp_path / "file"
    tensors = {name: tensor for name, tensor in {**GOOD, **changes}.items() if tensor is not None}
    save_file(tensors, path, None if metadata is None else {**METADATA, **metadata})
    refused(path, wrong)


def refused(path, wrong: str) -> None:
    with pytest.raises(OptionError, match=wrong) as error:
        Table.load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert message.endswith("; must be a file that Table.save wrote")
    assert "\n" not in message


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "file"
    build_table([[1, 2, 3] * 3], vocab_size=9).save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        refused(path, "can't be read")
    path.write_bytes(whole + b"x")
    refused(path, "can't be read")
    refused(tmp_path, "not a file")
    refused(tmp_path / "none", "no such file")


# -- drafts


@functools.cache
def small(seed: int) -> Table:
    texts, starts = example(seed)
    return build_table(texts, starts, vocab_size=6, order=3, continuations=4)


def likely_paths(
    table: Table, ids: list[int], budget: int, max_nodes: int, min_survival: float, coupling: float, seed: int
) -> list[tuple]:
    """Return (survival, path) of the likeliest continuations, found by trying all."""

    def chances(path: tuple[int, ...], survival: float) -> list[tuple[int, float]]:
        found = table.continuations([*ids, *path])
        key = derived_seed(seed, len(ids) + len(path))
        return coupled(found, coupling, key, min_survival / survival / 3) if coupling else found

    found: list[tuple[float, tuple[int, ...]]] = []

    def extend(path: tuple[int, ...], survival: float) -> None:
        for token, p in chances(path, survival) if len(path) < budget else ():
            if survival * p >= min_survival:
                found.append((survival * p, (*path, token)))
                extend(*reversed(found[-1]))

    extend((), 1.0)
    return sorted(found, key=lambda each: -each[0])[:max_nodes]


@given(
    st.integers(0, 20),
    st.lists(st.integers(0, 7), max_size=6),
    st.integers(0, 5),
    st.integers(1, 12),
    st.sampled_from([0.003, 0.03, 0.2]),
    st.sampled_from([0.0, 0.8]),
    st.booleans(),
)
def test_a_draft_is_the_tree_of_the_likeliest_paths(seed, ids, budget, max_nodes, min_survival, temperature, sampled):
    table = small(seed)
    drafter = TableDrafter(table, max_nodes=max_nodes, min_survival=min_survival)
    draft = drafter.session(ids, SamplingParams(temperature=temperature, seed=seed), sampled).propose(budget)
    count = len(draft)
    assert draft.drafter == "table"
    assert draft.distributions is None
    assert count <= max_nodes
    assert len(draft.confidences) == count
    parents = list(range(-1, count - 1)) if draft.parents is None else list(draft.parents)
    assert draft.parents is None or parents != list(range(-1, count - 1))
    paths: list[tuple[int, ...]] = []
    survivals: list[float] = []
    for i, (token, parent, confidence) in enumerate(zip(draft.tokens, parents, draft.confidences, strict=True)):
        assert -1 <= parent < i
        assert type(token) is int
        assert 0 < confidence <= 1
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        survivals.append((survivals[parent] if parent >= 0 else 1.0) * confidence)
        assert survivals[-1] >= min_survival
    assert len(set(paths)) == count
    assert max(map(len, paths), default=0) <= budget
    assert survivals == sorted(survivals, reverse=True)  # so the first child of a node is the likeliest
    coupling = 0.0 if sampled else 0.5 * temperature
    expected = likely_paths(table, ids, budget, max_nodes, min_survival, coupling, seed)
    assert survivals == pytest.approx([survival for survival, _ in expected])
    assert {path for survival, path in expected if survival > 1.0001 * min(survivals, default=0)} <= set(paths)


def taught() -> TableDrafter:
    return TableDrafter(build_table([[1, 2, 3, 1, 2, 4, 1, 2, 3, 5]], vocab_size=9, order=4, **ALL), vocab_size=9)


def test_nothing_is_drafted_without_a_budget_or_a_guess():
    drafter = taught()
    assert len(drafter.session([1], PARAMS).propose(0)) == 0
    one = drafter.session([1], PARAMS).propose(1)
    assert one.tokens[0] == 2
    assert set(one.parents or (-1,)) == {-1}
    for ids in ([], [8], [1, 8], [-1], [2**40], [1, 2**70]):
        assert len(drafter.session(ids, PARAMS).propose(5)) == 0


@pytest.mark.parametrize("texts", [[], [[]], [[1]], [[7, 7]]])
def test_a_table_of_nothing_drafts_nothing(texts, tmp_path):
    build_table(texts, [len(text) for text in texts], vocab_size=9).save(tmp_path / "table")
    table = Table.load(tmp_path / "table")
    assert table.nbytes == 0
    for temperature in (0, 1):
        session = TableDrafter(table).session([1, 2], SamplingParams(temperature=temperature))
        session.observe([3])
        assert len(session.propose(5)) == 0


def test_tokens_that_the_table_does_not_know_are_only_passed_over():
    drafter = taught()
    session = drafter.session([1, 10**9, -5], PARAMS)
    assert len(session.propose(3)) == 0
    session.observe([1, 2])
    assert session.propose(3) == drafter.session([8, 1, 2], PARAMS).propose(3)
    assert session.propose(3).tokens[0] == 3


def test_a_session_that_learns_piece_by_piece_is_as_one_that_saw_all():
    drafter = taught()
    ids = [1, 2, 3, 1, 2, 4, 1, 2]
    for params in (PARAMS, SamplingParams(temperature=1, seed=3)):
        for cut in range(len(ids) + 1):
            for step in (1, 3, 9):
                session = drafter.session(ids[:cut], params)
                for i in range(cut, len(ids), step):
                    session.propose(4)
                    session.observe(ids[i : i + step])
                session.observe([])
                assert session.propose(4) == drafter.session(ids, params).propose(4)
    assert drafter.session(np.array(ids), PARAMS).propose(4) == drafter.session(ids, PARAMS).propose(4)


def test_only_so_many_contexts_are_kept_at_hand(monkeypatch):
    monkeypatch.setattr("sakiyomi.drafters.table._REMEMBERED", 3)
    drafter, fresh = taught(), taught()
    for ids in itertools.product(range(1, 5), repeat=3):
        assert drafter.session(ids, PARAMS).propose(4) == taught().session(ids, PARAMS).propose(4)
        assert len(drafter._remembered) <= 3
    assert not fresh._remembered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_nodes": 0}, "max_nodes=0: must be a whole number in 1..65536"),
        ({"max_nodes": 2.0}, "max_nodes=2.0: must be"),
        ({"min_survival": 0}, "min_survival=0: must be above 0 and at most 1"),
        ({"min_survival": 1.5}, "min_survival=1.5: must be above 0 and at most 1"),
        ({"min_survival": "1"}, "min_survival='1': must be above 0 and at most 1"),
        ({"vocab_size": 8}, "table: counted with 9 token ids; the target has 8"),
    ],
)
def test_options_that_cannot_work_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        TableDrafter(taught().table, **options)


# -- the target's noise


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.85]), st.data())
def test_chances_are_those_that_are_described(seed, position, coupling, data):
    tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6, unique=True))
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=len(tokens), max_size=len(tokens)))
    total = sum(weights) + data.draw(st.sampled_from([0.0, 0.5]))
    found = sorted(((t, w / total) for t, w in zip(tokens, weights, strict=True)), key=lambda each: -each[1])
    least = data.draw(st.sampled_from([0.0, 0.2]))
    result = coupled(found, coupling, derived_seed(seed, position), least)
    found = [(token, p) for token, p in found if p >= least]
    q = np.array([p for _, p in found])
    raised = q * np.exp(coupling * gumbel_noise(seed, position, np.array([token for token, _ in found], np.int64)))
    chances = raised / (raised.sum() + max(0, 1 - q.sum()) * math.gamma(1 - coupling))
    assert [p for _, p in result] == pytest.approx(sorted(chances, reverse=True))
    assert dict(result) == pytest.approx({token: c for (token, _), c in zip(found, chances, strict=True)})
    assert all(0 < p <= 1 for _, p in result)


def standing(table: Table, law: np.ndarray, temperature: float, *, known: bool) -> float:
    """Return how often the first drafted token is the choice of a target, whose logits after each token are ``law``."""
    stood = 0
    rng = random.Random(1)
    for seed in range(1500):
        params = SamplingParams(temperature=temperature, seed=seed)
        ids = [rng.randrange(len(law)) for _ in range(rng.randrange(1, 9))]
        kept, z = candidates(law[ids[-1]], params)
        draft = TableDrafter(table).session(ids, params, sampled=not known).propose(1)
        stood += draft.tokens[0] == draw(z, kept, seed, len(ids))
    return stood / 1500


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_with_the_noise_more_tokens_stand(temperature):
    """The position of the noise is that of the target's own choice, or nothing would be gained."""
    rng = np.random.default_rng(2)
    law = rng.normal(size=(12, 12)).astype(np.float32) * 1.5
    p = np.exp(law / temperature)
    p /= p.sum(axis=1, keepdims=True)
    text = [0]
    for _ in range(4000):
        text.append(int(rng.choice(12, p=p[text[-1]])))
    table = build_table([text], vocab_size=12, order=2, max_bytes=10**6)
    with_noise, without = (standing(table, law, temperature, known=known) for known in (True, False))
    assert without == pytest.approx(p.max(axis=1).mean(), abs=0.05)
    assert with_noise > without + 0.05


# -- in the engine


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=40, temperature=0.3, seed=2)],
    ids=["greedy", "sampled"],
)
def test_the_text_is_the_same_and_drafts_stand(llama, params):
    engine = Engine(llama)
    prompt = [7, 8, 9, 40]

    def run(*drafting) -> tuple[list[int], int]:
        request = engine.request(prompt, params, *drafting)
        found, rounds = [], 0
        while request.finish_reason is None:
            found.extend(engine.round([request])[0].token_ids)
            rounds += 1
        return found, rounds

    plain, without = run()
    table = build_table([[*prompt, *plain]], [len(prompt)], vocab_size=llama.vocab_size)
    for k in (1, 4, 9):
        text, rounds = run([TableDrafter(table, vocab_size=llama.vocab_size)], FixedPolicy(k))
        assert text == plain
        assert rounds < without
    source = Source(TableDrafter(table), prompt, replace(params, temperature=1.0), llama.vocab_size, True)
    assert len(source.propose(3)) > 0
    assert source.error is None
