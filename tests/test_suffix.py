"""Suffix decoding: counts, matches and drafts are those of counting everything anew.

``make check`` runs this file once more with a build that finds misuse of memory.
"""

from __future__ import annotations

import gc
import os
import random
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int32, c_int64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from sakiyomi import core
from sakiyomi.core.trie import SuffixDrafts, SuffixTrie
from sakiyomi.drafters.suffix import SuffixDrafter, SuffixSession
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft
from sakiyomi.sampling import SamplingParams

SANITIZED = "SAKIYOMI_CORE_LIBRARY" in os.environ  # slow, and it wants a lot of address space
PARAMS = SamplingParams()
pytestmark = pytest.mark.skipif(not core.available(), reason="the compiled core isn't there")


class Naive:
    """A suffix trie that counts everything anew. Times are those of tokens, in all texts; kept ones come last."""

    def __init__(self, depth: int, max_tokens: int | None = None) -> None:
        self.depth, self.max_tokens = depth, max_tokens
        self.texts: list[list[tuple[int, int]]] = []
        self.kept: set[int] = set()
        self._order: list[int] = []
        self._now = 0
        self._counted: tuple[dict, dict, dict] | None = None

    def begin(self, *, kept: bool = False) -> int:
        self.texts.append([])
        if kept:
            self.kept.add(len(self.texts) - 1)
        return len(self.texts) - 1

    def append(self, text: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.texts[text].append((token, self._now + 10**9 * (text in self.kept)))
            self._now += 1
            if text not in self.kept:
                self._order.append(text)
            if self.max_tokens and len(self._order) > self.max_tokens:
                del self.texts[self._order.pop(0)][0]
        self._counted = None

    def tokens(self, text: int) -> tuple[int, ...]:
        return tuple(token for token, _ in self.texts[text])

    def _all(self) -> tuple[dict, dict, dict]:
        """Return for each run how often it occurs, when the latest occurrence began, and the runs one longer."""
        if self._counted is None:
            counts: dict[tuple[int, ...], int] = {}
            began: dict[tuple[int, ...], int] = {}
            longer: dict[tuple[int, ...], list] = {}
            for text in self.texts:
                for start, (_, time) in enumerate(text):
                    for end in range(start + 1, min(start + self.depth, len(text)) + 1):
                        run = tuple(token for token, _ in text[start:end])
                        counts[run] = counts.get(run, 0) + 1
                        began[run] = max(began.get(run, -1), time)
            for run in counts:
                longer.setdefault(run[:-1], []).append(run)
            for runs in longer.values():
                runs.sort(key=lambda run: (-counts[run], -began[run]))
            self._counted = counts, began, longer
        return self._counted

    @property
    def counts(self) -> dict[tuple[int, ...], int]:
        return self._all()[0]

    def began(self, run: tuple[int, ...]) -> int:
        return self._all()[1][run]

    def longer(self, run: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the runs that are a token longer, the best first."""
        return self._all()[2].get(run, [])

    def after(self, run: tuple[int, ...]) -> tuple[int, ...]:
        """Return what follows a run where it occurred last, as far as that text goes."""
        for text in self.texts:
            for start, (_, time) in enumerate(text):
                if time == self.began(run):
                    return tuple(token for token, _ in text[start + len(run) :])
        raise AssertionError

    def nodes(self) -> int:
        """Return how many runs end somewhere or go on in more than one way."""
        return sum([self.counts[longer] for longer in self.longer(run)] != [n] for run, n in self.counts.items())

    def following(self, run: tuple[int, ...]) -> list[tuple[int, int]]:
        return [(longer[-1], self.counts[longer]) for longer in self.longer(run)]

    def ends(self, text: int) -> list[int]:
        tokens = self.tokens(text)
        return [self.counts[tokens[-size:]] for size in range(1, min(self.depth - 1, len(tokens)) + 1)]


class NaiveDrafts:
    """The rule of drafting, word by word. ``own`` has one text; ``output``: the number of its end in ``shared``."""

    def __init__(
        self, own: Naive, shared: Naive, output: int, budget: int, min_survival: float, tree: bool, max_nodes: int
    ) -> None:
        self.own, self.shared, self.output, self.tree = own, shared, output, tree
        self.budget = min(budget, max_nodes) if tree else budget
        self.min_survival, self.max_nodes = min_survival, max_nodes
        self.looped = self.copied = False

    def seen(self, trie: Naive, match: tuple) -> int:
        """Return how often a match occurs other than at the end of the text itself."""
        return trie.counts[match] - (len(match) <= len(trie.texts[0 if trie is self.own else self.output]))

    def next(self, trie: Naive, run: tuple, path: tuple, loop: int) -> Iterator[tuple[tuple, int, float, int, int]]:
        """Yield what may come after a draft: run, token, share, when it began, and how far back the draft repeats."""
        deep, copied = run[: trie.depth], len(run) - trie.depth
        if not loop and copied >= 0 and copied < len(after := trie.after(deep)):
            yield (*run, after[copied]), after[copied], 1.0, 0, 0
        elif not loop and (runs := trie.longer(run)):
            of = trie.counts[run] if path else self.seen(trie, run) + 1
            for longer in runs:
                yield longer, longer[-1], trie.counts[longer] / of, trie.began(longer), 0
        elif loop or (trie is self.own and path):
            loop = loop or len(path)
            yield run, path[len(path) - loop], 1.0, 0, loop

    def chain(self, trie: Naive, end: tuple[int, ...]) -> float:
        run, path, loop, survival, score = end, (), 0, 1.0, 0.0
        while len(path) < self.budget:
            step = next(self.next(trie, run, path, loop), None)
            if step is None:
                break
            size = len(end) + len(path)
            run, token, share, _, loop = step
            survival *= share * size / (size + 1)
            if survival < self.min_survival:
                break
            score += survival
            path += (token,)
        return score

    def draft(self, text: tuple[int, ...]) -> tuple[tuple, tuple | None, tuple]:
        best: tuple[float, Naive | None, tuple] = (0.0, None, ())
        for size in range(min(len(text), self.own.depth - 1), 0, -1):
            for trie in (self.own, self.shared):
                if text[-size:] in trie.counts and (score := self.chain(trie, text[-size:])) > best[0]:
                    best = score, trie, text[-size:]
        _, trie, end = best
        if trie is None:
            return (), None, ()
        tokens, parents, confidences = [], [], []
        open_: list[tuple] = []

        def offer(parent: int, run: tuple, path: tuple, loop: int, survival: float) -> None:
            size = len(end) + len(path)
            for place, (longer, token, share, began, back) in enumerate(self.next(trie, run, path, loop)):
                confidence = share * size / (size + 1)
                stands = survival * confidence
                if len(path) < self.budget and stands >= self.min_survival and (self.tree or place == 0):
                    open_.append(((-stands, parent, -began), confidence, longer, (*path, token), back))

        offer(-1, end, (), 0, 1.0)
        while open_ and (not self.tree or len(tokens) < self.max_nodes):
            found = min(open_, key=lambda candidate: candidate[0])
            open_.remove(found)
            (survival, parent, _), confidence, run, path, loop = found
            self.looped |= loop > 0
            self.copied |= len(run) > trie.depth
            tokens.append(path[-1])
            parents.append(parent)
            confidences.append(confidence)
            offer(len(tokens) - 1, run, path, loop, -survival)
        is_chain = parents == list(range(-1, len(parents) - 1))
        return tuple(tokens), None if is_chain else tuple(parents), tuple(confidences)


pieces = st.integers(0, 3).flatmap(
    lambda kind: st.tuples(st.integers(0, 3), st.lists(st.integers(0, (1, 2, 3, 11)[kind]), max_size=12))
)
growth = st.lists(pieces, max_size=30)


def compare(trie: SuffixTrie, naive: Naive, numbers: dict[int, int]) -> None:
    assert len(trie) == sum(len(text) for i, text in enumerate(naive.texts) if i not in naive.kept)
    assert trie.count([]) == sum(map(len, naive.texts))
    assert {run: trie.count(run) for run in naive.counts} == naive.counts
    for run in [(), *naive.counts]:
        expected = naive.following(run)
        assert trie.following(run, 99) == expected, run
        assert trie.following(run, 2) == expected[:2], run
    assert trie.nodes == naive.nodes()
    for number, text in numbers.items():
        assert trie.ends(number) == naive.ends(text)


# -- the trie


@settings(max_examples=40 if SANITIZED else 200)
@given(
    growth,
    st.integers(2, 9),
    st.one_of(st.none(), st.integers(1, 40)),
    st.sets(st.integers(0, 30)),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_a_trie_counts_as_if_everything_were_counted_anew(steps, depth, max_tokens, ends, kept):
    """Texts that grow in turns, of which some end and others begin; the oldest tokens are forgotten, or kept."""
    trie, naive = SuffixTrie(depth, max_tokens), Naive(depth, max_tokens)
    numbers: dict[int, int] = {}
    slots: dict[int, int] = {}
    for i, (slot, tokens) in enumerate(steps):
        if slot not in slots:
            slots[slot] = trie.begin(kept=slot in kept)
            numbers[slots[slot]] = naive.begin(kept=slot in kept)
        trie.append(slots[slot], tokens)
        naive.append(numbers[slots[slot]], tokens)
        if i in ends:
            trie.end(slots[slot])
            del numbers[slots.pop(slot)]
        if i % 4 == 0:
            compare(trie, naive, numbers)
    compare(trie, naive, numbers)


@pytest.mark.parametrize("alphabet", [1, 2, 40])
def test_long_texts_are_counted_too(alphabet):
    """Nodes with many children, blocks and tables that grow and shrink, texts whose beginning is thrown away."""
    rng = random.Random(alphabet)
    trie, naive = SuffixTrie(5, 300), Naive(5, 300)
    numbers = {trie.begin(): naive.begin() for _ in range(3)}
    for _ in range(20 if SANITIZED else 60):
        number = rng.choice(list(numbers))
        # Now and then few tokens, so that nodes lose children.
        tokens = rng.choices(range(rng.choice([1, alphabet])), k=rng.randrange(60))
        trie.append(number, tokens)
        naive.append(numbers[number], tokens)
        compare(trie, naive, numbers)


def test_a_run_that_never_occurred_or_is_too_long_counts_nothing():
    trie = SuffixTrie(3)
    text = trie.begin()
    trie.append(text, [1, 2, 3, 4])
    assert trie.count([1, 2, 3]) == 1
    assert trie.count([]) == 4
    assert trie.count([1, 3]) == trie.count([5]) == trie.count([1, 2, 3, 4]) == 0
    assert trie.following([2, 3]) == [(4, 1)]
    assert trie.following([1, 2, 3]) == trie.following([4]) == trie.following([9]) == []
    assert trie.following([2, 3], 0) == []


def test_of_equally_frequent_tokens_the_latest_comes_first():
    trie = SuffixTrie(4)
    text = trie.begin()
    trie.append(text, [1, 5, 1, 6, 1, 7, 0])
    assert trie.following([1]) == [(7, 1), (6, 1), (5, 1)]
    trie.append(text, [1, 5, 0])
    assert trie.following([1]) == [(5, 2), (7, 1), (6, 1)]
    trie.append(text, [1, 6, 0])
    assert trie.following([1]) == [(6, 2), (5, 2), (7, 1)]


def test_a_run_does_not_reach_from_one_text_into_another():
    trie = SuffixTrie(4)
    first, second = trie.begin(), trie.begin()
    trie.append(first, [1, 2])
    trie.append(second, [3, 4])
    trie.append(first, [5])
    assert trie.count([2, 5]) == trie.count([3, 4]) == 1
    assert trie.count([2, 3]) == trie.count([4, 5]) == 0


TEXTS = {
    "random": lambda rng, n: rng.choices(range(10**6), k=n),
    "two": lambda rng, n: rng.choices(range(2), k=n),
    "one": lambda rng, n: [7] * n,
    "a passage again and again": lambda rng, n: (rng.choices(range(500), k=150) * (n // 150 + 1))[:n],
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize(("length", "ends"), [(20_000, True), (200, True), (3, True), (1, True), (20_000, False)])
def test_memory_is_bounded(kind, length, ends):
    """As many tokens again and again: in a few long texts, in many short ones, in one that doesn't end.

    About 100 bytes for each token and 200 for each text.
    """
    limit = 4096
    trie, rng = SuffixTrie(32, limit), random.Random(3)
    text = trie.begin()

    def fill(total: int) -> int:
        nonlocal text
        for _ in range(total // length):
            trie.append(text, TEXTS[kind](rng, length))
            if ends:
                trie.end(text)
                text = trie.begin()
        return trie.nbytes

    first = fill(60_000 if length >= 200 else 10_000)
    assert len(trie) == limit
    assert trie.nodes <= 2 * limit
    assert first <= (110 if length >= 200 else 100 + 200 / length) * limit
    assert fill(100_000 if length >= 200 else 20_000) <= 1.1 * first


def test_nothing_is_left_of_texts_that_are_forgotten():
    trie = SuffixTrie(8, 50)
    for i in range(2000):
        text = trie.begin()
        trie.append(text, [i % 7, i % 5, i % 3])
        trie.end(text)
    size = trie.nbytes
    for _ in range(3000):
        trie.end(trie.begin())
    assert trie.nbytes == size
    assert len(trie) == 50


def test_what_is_no_token_or_no_open_text_is_refused():
    trie = SuffixTrie(4)
    text = trie.begin()
    for tokens in ([1, -1], [2**31], [1.0], ["a"], "ab", [None], [-(2**40)]):
        with pytest.raises(ValueError, match="token"):
            trie.append(text, tokens)
    assert len(trie) == 0
    trie.append(text, (2**31 - 1, np.int64(5)))
    trie.append(text, b"\5\6")  # a sequence of ints, and not memory
    assert trie.read()[0].tolist() == [2**31 - 1, 5, 5, 6]
    trie.end(text)
    for number in (text, 7, -1, 2**62):
        for refused in (lambda n=number: trie.append(n, [1]), lambda n=number: trie.end(n)):
            with pytest.raises(ValueError, match=f"no text {number} that is open"):
                refused()


def test_a_text_that_ended_is_not_taken_for_another():
    trie = SuffixTrie(4)
    old = trie.begin()
    trie.end(old)
    new = trie.begin()
    assert old != new
    with pytest.raises(ValueError, match="that is open"):
        trie.append(old, [1])


@pytest.mark.parametrize(("depth", "max_tokens"), [(1, None), (1025, None), (32, 0), (32, -1), (32, 2**31)])
def test_a_trie_that_cannot_be_is_refused(depth, max_tokens):
    with pytest.raises(ValueError, match="must be"):
        SuffixTrie(depth, max_tokens)


def test_what_was_read_is_in_the_order_in_which_it_came():
    trie = SuffixTrie(4, 6)
    a, b = trie.begin(), trie.begin()
    trie.append(a, [1, 2, 3])
    trie.append(b, [4])
    trie.append(a, [5])
    trie.append(b, [6, 7])
    tokens, texts = trie.read()
    assert tokens.tolist() == [2, 3, 4, 5, 6, 7]
    assert [texts[0], texts[1], texts[3]] == [texts[0]] * 3
    assert [texts[2], texts[4], texts[5]] == [texts[2]] * 3
    assert texts[0] != texts[2]


def test_what_there_is_no_room_for_is_not_read():
    trie = SuffixTrie(4)
    trie.append(trie.begin(), [1, 2, 3])
    for room, expected in ((0, [0] * 4), (2, [0] * 4), (3, [1, 2, 3, 0]), (4, [1, 2, 3, 0])):
        tokens, texts, found = (c_int32 * 4)(), (c_int64 * 4)(7, 7, 7, 7), c_int64()
        assert trie._library.saki_trie_read(trie.handle, room, tokens, texts, byref(found)) == 0
        assert found.value == 3
        assert tokens[:] == expected
        assert texts[:] == ([0, 0, 0, 7] if room >= 3 else [7] * 4)


def test_a_trie_that_grows_while_it_is_read_is_read_as_it_is_then(monkeypatch):
    trie = SuffixTrie(4)
    text = trie.begin()
    trie.append(text, [1, 2, 3])

    def size_then_more(self: SuffixTrie) -> int:
        size = int(self._library.saki_trie_size(self.handle))
        trie.append(text, range(10 * size))
        return size

    monkeypatch.setattr(SuffixTrie, "__len__", size_then_more)
    tokens, texts = trie.read()
    assert tokens.tolist() == [1, 2, 3, *range(30)]
    assert len(texts) == 33


def test_what_is_kept_is_not_forgotten_nor_read():
    trie = SuffixTrie(4, 3)
    kept, text = trie.begin(kept=True), trie.begin()
    trie.append(kept, [1, 2, 3, 4, 5])
    trie.append(text, [1, 2, 6, 1, 2, 6])
    assert len(trie) == 3
    assert trie.read()[0].tolist() == [1, 2, 6]
    assert trie.count([1, 2]) == 2
    assert trie.following([1, 2]) == [(3, 1), (6, 1)]  # as frequent: the one that is kept
    trie.end(kept)
    trie.append(text, [7] * 50)
    assert trie.read()[0].tolist() == [7] * 3
    assert trie.count([1, 2, 3, 4]) == trie.count([5]) == 1


@pytest.mark.skipif(SANITIZED or sys.platform != "linux", reason="limits the address space")
def test_a_trie_is_of_use_after_memory_ran_out():
    code = """
        import random, resource
        from sakiyomi.core import SuffixTrie
        trie = SuffixTrie(32)
        a, b = trie.begin(), trie.begin()
        tokens = random.Random(0).choices(range(1000), k=200_000)
        trie.append(a, tokens[:1000])
        trie.append(trie.begin(kept=True), tokens[:100])
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
        failed = 0
        for _ in range(3):
            try:
                trie.append(b, tokens)
            except MemoryError:
                failed += 1
                assert len(trie) == trie.nodes == 0
                assert trie.following([]) == []
                assert trie.ends(a) == trie.ends(b) == []
        assert failed
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        trie.append(a, [1, 2, 1, 2, 3])
        trie.append(b, [1, 2])
        assert trie.count([1, 2]) == 3
        assert trie.count([]) == 7
        assert trie.following([1, 2]) == [(3, 1), (1, 1)]
        print("went on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout == "went on\n", done.stderr


# -- drafts


def naive_of(drafter_texts: Sequence[Sequence[int]], depth: int, max_tokens: int | None = None) -> Naive:
    naive = Naive(depth, max_tokens)
    for tokens in drafter_texts:
        naive.append(naive.begin(), tokens)
    return naive


SEEN: dict[str, int] = dict.fromkeys(("none", "chain", "tree", "looped", "copied", "own", "shared"), 0)


@settings(max_examples=80 if SANITIZED else 400)
@given(st.data())
def test_a_draft_is_what_the_rule_says(data):
    """Other requests before and meanwhile; a prompt, then output, piece by piece."""
    alphabet = data.draw(st.sampled_from([2, 2, 3, 4, 9]))
    text_of = st.lists(st.integers(0, alphabet - 1), max_size=24)
    depth = data.draw(st.integers(2, 12))
    max_tokens = data.draw(st.sampled_from([5, 30, 1000]))
    tree, max_nodes = data.draw(st.booleans()), data.draw(st.integers(1, 20))
    min_survival = data.draw(st.sampled_from([0.01, 0.1, 0.3]))
    reference = data.draw(text_of)
    drafter = SuffixDrafter(
        depth=depth,
        max_tokens=max_tokens,
        tree=tree,
        max_nodes=max_nodes,
        min_survival=min_survival,
        reference=reference,
    )
    shared = Naive(depth, max_tokens)
    shared.append(shared.begin(kept=True), reference)
    prompt = data.draw(text_of)
    other, session = drafter.session([], PARAMS), drafter.session(prompt, PARAMS)
    other_text, output = shared.begin(), shared.begin()
    text = list(prompt)
    for _ in range(data.draw(st.integers(1, 4))):
        elsewhere, gained = data.draw(text_of), data.draw(st.lists(st.integers(0, alphabet - 1), max_size=6))
        other.observe(elsewhere)
        shared.append(other_text, elsewhere)
        session.observe(gained)
        shared.append(output, gained)
        text += gained
        budget = data.draw(st.integers(0, 20))
        own = naive_of([text], depth)
        rule = NaiveDrafts(own, shared, output, budget, min_survival, tree, max_nodes)
        expected = rule.draft(tuple(text))
        found = session.propose(budget)
        assert (found.tokens, found.parents, found.confidences) == expected
        well_formed(found, budget, max_nodes if tree else None, min_survival)
        SEEN["none" if not found else "tree" if found.parents else "chain"] += 1
        SEEN["looped"] += rule.looped
        SEEN["copied"] += rule.copied
        alone = NaiveDrafts(own, Naive(depth), 0, budget, min_survival, tree, max_nodes).draft(tuple(text))
        SEEN["own" if alone == expected else "shared"] += 1


def test_the_drafts_that_were_compared_were_of_all_kinds():
    """After the test above, of course; alone it has nothing to look at."""
    if any(SEEN.values()) and not SANITIZED:
        assert min(SEEN.values()) > 50, SEEN


def well_formed(draft: Draft, budget: int, max_nodes: int | None, min_survival: float) -> None:
    parents = draft.parents if draft.parents is not None else tuple(range(-1, len(draft) - 1))
    assert len(parents) == len(draft.tokens) == len(draft.confidences)
    assert draft.drafter == "suffix"
    assert max_nodes is None or len(draft) <= max_nodes
    assert len(set(zip(parents, draft.tokens, strict=True))) == len(draft)
    depths, survivals = [], []
    for i, (parent, confidence) in enumerate(zip(parents, draft.confidences, strict=True)):
        assert -1 <= parent < i
        assert 0 < confidence <= 1
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
        survivals.append(confidence * (survivals[parent] if parent >= 0 else 1))
        first = parents.index(parent)  # a parent's first child is its likeliest
        assert confidence <= draft.confidences[first]
        assert survivals[i] >= min_survival
        assert depths[i] <= budget
    assert survivals == sorted(survivals, reverse=True)


def drafted(ids: str, budget: int = 8, **options) -> str:
    """Return the tokens proposed after a prompt; letters stand for their code points."""
    options = {"tree": False, **options}
    if "reference" in options:
        options["reference"] = list(map(ord, options["reference"]))
    session = SuffixDrafter(**options).session(list(map(ord, ids)), PARAMS)
    return "".join(map(chr, session.propose(budget).tokens))


def test_the_most_frequent_continuation_is_followed():
    assert drafted("abXY abXZ abV ab", 2)[0] == "X"
    assert drafted("abX abX abY ab", 1) == "X"
    assert drafted("abX abY ab", 1) == "Y"  # as frequent: the latest


def test_of_equal_scores_the_longer_match_wins_then_the_own_text():
    """Scores of a single token: share * n / (n + 1) after a match of n."""
    longer = drafted("cYabc", 1, reference="abcXabcZ")
    assert longer == "Z"  # 1/3 * 3/4 after abc elsewhere; Y has 1/2 * 1/2 after c here
    assert drafted("cYcYabc", 1, reference="abcXabcZ") == "Y"  # 2/3 * 1/2
    assert drafted("cYc", 1, reference="cX") == "Y"  # 1/2 * 1/2 here and elsewhere


def test_the_first_confidence_is_the_same_wherever_the_match_is():
    """One more than was seen: also where the text is counted and where it is only partly."""
    for times in (1, 2, 5):
        for prompt in range(5):
            drafter = SuffixDrafter(reference=[1, 2, 3, 4, 5] * times, tree=False)
            session = drafter.session([0, 1, 2, 3][:prompt], PARAMS)
            session.observe([0, 1, 2, 3][prompt:])
            draft = session.propose(2)
            assert draft.tokens == (4, 5)
            assert draft.confidences == (times / (times + 1) * 3 / 4, 4 / 5)
        own = SuffixDrafter(tree=False).session([1, 2, 3, 4, 5] * times + [0, 1, 2, 3], PARAMS).propose(2)
        assert own.tokens == (4, 5)
        assert own.confidences == (times / (times + 1) * 3 / 4, 4 / 5)


def test_one_witness_of_a_token_elsewhere_is_less_than_one_of_three_tokens_here():
    assert drafted("abcX abc", 1, reference="cY") == "X"


def test_the_end_of_the_text_is_no_match_for_itself():
    assert drafted("abcd") == ""
    assert drafted("") == ""
    drafter = SuffixDrafter()
    session = drafter.session([], PARAMS)
    session.observe([1, 2, 3])
    assert session.propose(5) == Draft(drafter="suffix")
    assert drafter.session([1, 2, 3], PARAMS).propose(5) == Draft(drafter="suffix")
    assert drafter.session([1, 2], PARAMS).propose(5).tokens == (3,)


def test_a_text_that_repeats_itself_goes_on():
    """Beyond its own end; the shorter the match, the sooner the survival is too low."""
    assert drafted("xyzxyzxy", 9, min_survival=0.01) == "zxyzxyzxy"
    assert drafted("aa", 4, min_survival=0.01) == "aaaa"
    assert drafted("xy", 9, reference="xyzxyz", min_survival=0.01) == "zxyz"  # another's end is an end


def test_the_draft_is_the_longer_the_longer_the_match_is():
    """By the confidences alone: after a half for what was seen once, a survival of 0.1 is four times the match away."""
    text = [*range(100, 200)]
    lengths = []
    for size in (1, 2, 3, 8):
        drafter = SuffixDrafter(depth=128, tree=False, min_survival=0.1, reference=text)
        session = drafter.session(text[20 - size : 20], PARAMS)
        draft = session.propose(100)
        assert draft.tokens == tuple(text[20 : 20 + len(draft)])
        assert draft.confidences[:2] == (size / (size + 1) / 2, (size + 1) / (size + 2))
        lengths.append(len(draft))
    assert [4 * size - length in (0, 1) for size, length in zip((1, 2, 3, 8), lengths, strict=True)] == [True] * 4


@pytest.mark.parametrize("tree", [False, True])
def test_a_long_copy_goes_on_beyond_the_depth(tree):
    """In the text of the last occurrence of the longest match, to its end."""
    passage = [*range(1000, 1300)]
    options = {"depth": 32, "tree": tree, "max_nodes": 1000}
    draft = SuffixDrafter(reference=passage, **options).session(passage[:100], PARAMS).propose(500)
    assert draft.tokens == tuple(passage[100:])
    assert draft.parents is None
    assert draft.confidences == (31 / 32 / 2, *((31 + i) / (32 + i) for i in range(1, 200)))
    assert len(SuffixDrafter(reference=passage, **options).session(passage[:100], PARAMS).propose(150)) == 150
    # The text itself goes on as it began, and the last of several occurrences is followed.
    draft = SuffixDrafter(**options).session(passage[:60] * 2 + passage[:40], PARAMS).propose(200)
    assert draft.tokens == tuple((passage[:60] * 5)[40:][: len(draft)])
    assert len(draft) == 200
    shared = SuffixDrafter(reference=[*passage[:80], 1, 2, 3, *passage[:80], 4, 5, 6], **options)
    assert shared.session(passage[:45], PARAMS).propose(200).tokens == (*passage[45:80], 4, 5, 6)


def test_a_copy_counts_as_far_as_it_goes():
    """Sums of 1.78 here, 1.14 of it before the end of the text, and 1.65 after c elsewhere."""
    assert drafted("abcdabc", 8, reference="cXYZWVUTS" * 9, depth=4) == "dabcdabc"
    assert drafted("abcdabc", 4, reference="cXYZWVUTS" * 9, depth=4) == "XYZW"  # 1.14 and 1.16


def test_a_copy_is_of_what_is_remembered():
    """The oldest tokens are forgotten, and their memory is used again, while there are drafts from what is left."""
    rng = random.Random(5)
    passages = [rng.choices(range(30), k=60) for _ in range(3)]
    drafter, shared = SuffixDrafter(depth=6, max_tokens=150, max_nodes=200), Naive(6, 150)
    copied = 0
    for _ in range(6):
        prompt = rng.choice(passages)[:20]
        session, output, text = drafter.session(prompt, PARAMS), shared.begin(), list(prompt)
        passage = rng.choice(passages)
        for start in range(0, 60, 12):
            gained = passage[start : start + 12]
            session.observe(gained)
            shared.append(output, gained)
            text += gained
            found = session.propose(40)
            rule = NaiveDrafts(naive_of([text], 6), shared, output, 40, 0.05, True, 200)
            assert (found.tokens, found.parents, found.confidences) == rule.draft(tuple(text))
            copied += rule.copied
    assert copied > 10


def test_no_more_is_proposed_than_the_budget_in_a_row():
    for budget in (0, 1, 3):
        session = SuffixDrafter().session([1, 2, 3, 4, 5, 1, 2, 3], PARAMS)
        assert session.propose(budget).tokens == (4, 5, 1)[:budget]


def test_a_tree_has_the_likeliest_tokens_first():
    prompt = [1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2]
    draft = SuffixDrafter(min_survival=0.01).session(prompt, PARAMS).propose(2)
    assert draft.parents is not None
    tops = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent == -1]
    assert tops == [3, 4]
    under = [t for t, p in zip(draft.tokens, draft.parents, strict=True) if p == draft.tokens.index(3)]
    assert under == [6, 5]  # as frequent, so the latest first
    few = SuffixDrafter(min_survival=0.01, max_nodes=2).session(prompt, PARAMS).propose(2)
    assert few.tokens == draft.tokens[:2]


def test_a_tree_without_branches_is_a_chain():
    session = SuffixDrafter().session([1, 2, 3, 4, 1, 2], PARAMS)
    assert session.propose(4).parents is None
    assert session.propose(4) == SuffixDrafter(tree=False).session([1, 2, 3, 4, 1, 2], PARAMS).propose(4)


def test_what_one_request_wrote_is_drafted_in_another():
    drafter = SuffixDrafter()
    first = drafter.session([9, 9], PARAMS)
    first.observe([1, 2, 3, 4, 5])
    second = drafter.session([7, 2], PARAMS)
    assert second.propose(3).tokens == (3, 4, 5)  # while the first goes on
    del first
    second.observe([3])
    assert second.propose(3).tokens == (4, 5)  # and after it
    assert drafter.session([9], PARAMS).propose(3).tokens == ()  # outputs only, not prompts


def test_a_match_may_reach_from_the_output_into_the_prompt():
    drafter = SuffixDrafter(reference=[1, 2, 3, 4, 8, 0, 3, 4, 9, 0, 3, 4, 9], tree=False)
    session = drafter.session([1, 2, 3], PARAMS)
    session.observe([4])
    assert session.propose(1).tokens == (8,)  # [1, 2, 3, 4], and not [3, 4] alone
    assert SuffixDrafter(reference=[3, 4, 8, 0, 3, 4, 9], tree=False).session([3, 4], PARAMS).propose(1).tokens == (9,)


def test_sessions_know_their_own_prompt_only():
    drafter = SuffixDrafter()
    first, second = drafter.session([1, 2, 3, 1, 2], PARAMS), drafter.session([1, 2], PARAMS)
    assert first.propose(1).tokens == (3,)
    assert second.propose(1).tokens == ()
    assert drafter.session([1], PARAMS).propose(1).tokens == ()


def test_what_the_caller_does_with_its_lists_changes_nothing():
    prompt, reference = [1, 2, 3, 1, 2], [7, 8, 9]
    session = SuffixDrafter(reference=reference).session(prompt, PARAMS)
    prompt.clear()
    reference.clear()
    draft = session.propose(1)
    assert draft.tokens == (3,)
    session.observe([7, 8])
    assert session.propose(1).tokens == (9,)
    assert draft.tokens == (3,)


SOME_DRAFTS = """
import random
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.sampling import SamplingParams
rng = random.Random(1)
drafter = SuffixDrafter(max_tokens=500, reference=rng.choices(range(9), k=800))
session = drafter.session(rng.choices(range(9), k=50), SamplingParams())
for _ in range(20):
    session.observe(rng.choices(range(9), k=5))
    print(session.propose(8))
"""


def test_drafts_are_the_same_in_every_process(capsys):
    exec(SOME_DRAFTS, {})
    here = capsys.readouterr().out
    assert here.count("Draft(") == 20
    arguments = [sys.executable, "-c", SOME_DRAFTS]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    assert subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout == here


def test_a_session_ends_with_its_last_reference_whatever_is_deleted_first():
    drafter = SuffixDrafter(max_tokens=10)
    for _ in range(100):
        drafter.session([1, 2], PARAMS).observe([1, 2, 3])
    size = drafter._shared.nbytes
    for _ in range(1000):
        drafter.session([1, 2], PARAMS).observe([1, 2, 3])
    assert drafter._shared.nbytes == size
    for reverse in (False, True):  # in a cycle, they are deleted in any order
        kept: list[object] = [SuffixDrafter(), None]
        kept[1] = kept[0].session([1], PARAMS)
        if reverse:
            kept.reverse()
        kept.append(kept)
        del kept
        gc.collect()
    trie = SuffixTrie()
    text = trie.begin()
    trie.__del__()
    trie.end(text)


def test_a_draft_needs_open_texts_of_two_tries():
    trie, other = SuffixTrie(4), SuffixTrie(4)
    texts = trie.begin(), other.begin()
    options = {"min_survival": 0.1, "tree": True, "max_nodes": 8}
    with pytest.raises(ValueError, match="two tries"):
        SuffixDrafts(trie, texts[0], trie, texts[0], **options).draft(3)
    drafts = SuffixDrafts(trie, texts[0], other, texts[1], **options)
    assert drafts.draft(3) == ((), None, ())
    other.end(texts[1])
    with pytest.raises(ValueError, match="that is open"):
        drafts.draft(3)


@pytest.mark.parametrize("min_survival", [0, -0.5, 1.5, float("nan")])
def test_a_draft_without_an_end_is_refused(min_survival):
    trie, other = SuffixTrie(4), SuffixTrie(4)
    texts = trie.begin(), other.begin()
    trie.append(texts[0], [1, 1, 1])
    with pytest.raises(ValueError, match=r"min_survival.*: must be more than 0, at most 1"):
        SuffixDrafts(trie, texts[0], other, texts[1], min_survival=min_survival, tree=False, max_nodes=8)
    drafts = SuffixDrafts(trie, texts[0], other, texts[1], min_survival=1e-3, tree=True, max_nodes=8)
    drafts._options.min_survival = min_survival
    with pytest.raises(ValueError, match=r"min_survival.*: must be more than 0, at most 1"):
        drafts.draft(2**62)
    drafts._options.min_survival = 1e-300
    assert drafts.draft(2**62)[0] == (1,) * 8  # at once: there is room for no more


def test_two_tries_may_draft_from_each_other_at_a_time():
    one, other = SuffixTrie(4), SuffixTrie(4)
    texts = one.begin(), other.begin()
    one.append(texts[0], [1, 2, 1])
    other.append(texts[1], [1, 3, 1])
    options = {"min_survival": 0.01, "tree": True, "max_nodes": 8}
    both = (
        SuffixDrafts(one, texts[0], other, texts[1], **options),
        SuffixDrafts(other, texts[1], one, texts[0], **options),
    )

    def draft(drafts: SuffixDrafts) -> None:
        for _ in range(20_000):
            drafts.draft(4)

    threads = [threading.Thread(target=draft, args=[drafts], daemon=True) for drafts in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# -- options


@pytest.mark.parametrize(
    ("option", "value", "works"),
    [
        ("depth", 1, "a whole number in 2..1024"),
        ("depth", 2000, "a whole number in 2..1024"),
        ("depth", 8.0, "a whole number in 2..1024"),
        ("max_tokens", 0, "a whole number in 1..2147483647"),
        ("max_tokens", None, "a whole number in 1..2147483647"),
        ("max_nodes", 0, "a whole number in 1..65536"),
        ("max_nodes", True, "a whole number in 1..65536"),
        ("min_survival", 0, "in 0.01..1"),
        ("min_survival", 1.5, "in 0.01..1"),
        ("min_survival", float("nan"), "in 0.01..1"),
        ("min_survival", "0.1", "in 0.01..1"),
        ("tree", "yes", "True or False"),
    ],
)
def test_options_that_cannot_work_are_named(option, value, works):
    with pytest.raises(OptionError) as error:
        SuffixDrafter(**{option: value})
    assert str(error.value) == f"{option}={value!r}: must be {works}"


def test_a_reference_that_is_not_tokens_is_refused():
    for reference in ([1, -2], [1.5], [2**31], "text"):
        with pytest.raises(OptionError, match="reference: token"):
            SuffixDrafter(reference=reference)


@pytest.mark.parametrize("reference", [None, 5, iter([1, 2])])
def test_a_reference_that_is_no_sequence_is_refused(reference, tmp_path):
    with pytest.raises(OptionError, match=r"^reference=.*: must be a sequence of token ids$"):
        SuffixDrafter(reference=reference)
    taught()[0].save(tmp_path / "learned")
    with pytest.raises(OptionError, match=r"^reference=.*: must be a sequence of token ids$"):
        SuffixDrafter.load(tmp_path / "learned", reference=reference)


def test_it_says_that_it_needs_the_compiled_core(monkeypatch):
    monkeypatch.setattr(core, "available", lambda: ())
    with pytest.raises(OptionError, match=r"drafter='suffix': needs the compiled core, .*; use 'ngram'"):
        SuffixDrafter()


def test_a_session_refuses_what_is_no_token():
    session = SuffixDrafter().session([1, 2, 3, 1], PARAMS)
    with pytest.raises(ValueError, match="token"):
        session.observe([5, -1])
    assert session.propose(2).tokens == (2, 3)
    with pytest.raises(ValueError, match="token"):
        SuffixDrafter().session([2**31], PARAMS)


def test_the_extremes_of_the_options_work():
    for options in ({"min_survival": 0.01}, {"min_survival": 1}, {"depth": 2}, {"depth": 1024}, {"max_nodes": 65536}):
        for tree in (False, True):
            session = SuffixDrafter(tree=tree, **options).session([5] * 300, PARAMS)
            draft = session.propose(10**9)
            assert set(draft.tokens) <= {5}
            assert draft.parents is None
    assert len(SuffixDrafter(depth=200, tree=False, min_survival=0.01).session([5] * 150, PARAMS).propose(10**9)) > 1000


# -- files


def taught(seed: int = 0, **options) -> tuple[SuffixDrafter, list[SuffixSession]]:
    """Return a drafter that has learned from requests that came one after another, and meanwhile."""
    rng = random.Random(seed)
    drafter = SuffixDrafter(depth=6, max_tokens=60, **options)
    sessions = []
    for _ in range(5):
        sessions.append(drafter.session(rng.choices(range(3), k=10), PARAMS))
        for _ in range(4):
            rng.choice(sessions).observe(rng.choices(range(3), k=rng.randrange(6)))
    return drafter, sessions


def same_drafts(one: SuffixDrafter, other: SuffixDrafter) -> None:
    rng = random.Random(9)
    for _ in range(60):
        prompt, gained = rng.choices(range(3), k=rng.randrange(8)), rng.choices(range(3), k=3)
        a, b = one.session(prompt, PARAMS), other.session(prompt, PARAMS)
        assert a.propose(9) == b.propose(9)
        a.observe(gained)  # also forgets, in the same order
        b.observe(gained)
        assert a.propose(9) == b.propose(9)


def contents(path) -> tuple[dict, dict]:
    """Return metadata, and the tensors as dtypes and lists."""
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        return file.metadata(), {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_reference", [False, True])
def test_a_loaded_drafter_drafts_as_the_saved_one(tmp_path, seed, with_reference):
    options = {"reference": random.Random(seed).choices(range(3), k=20)} if with_reference else {}
    drafter, sessions = taught(seed, **options)
    path = tmp_path / "learned.safetensors"
    drafter.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = SuffixDrafter.load(path, depth=6, max_tokens=60, **options)
    again = tmp_path / "again"
    loaded.save(again)
    assert contents(again) == contents(path)
    del sessions
    same_drafts(drafter, loaded)


def test_a_reference_is_not_forgotten_nor_saved(tmp_path):
    path, reference = tmp_path / "learned", [50, 51, 52, 53]
    drafter = SuffixDrafter(reference=reference, max_tokens=3)
    for _ in range(3):
        drafter.session([], PARAMS).observe([1, 2, 3, 4])
        assert drafter.session([50, 51], PARAMS).propose(2).tokens == (52, 53)
        assert drafter.session([2], PARAMS).propose(2).tokens == (3, 4)
        drafter.save(path)
        assert contents(path)[1]["tokens"][1] == [2, 3, 4]
        assert SuffixDrafter.load(path).session([50, 51], PARAMS).propose(2).tokens == ()
        drafter = SuffixDrafter.load(path, reference=reference, max_tokens=3)
        assert drafter._shared.count(reference) == 1
    with pytest.raises(OptionError, match="reference: token"):
        SuffixDrafter.load(path, reference=[2**70])


def test_a_file_says_whose_tokens_it_holds(tmp_path):
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    drafter = taught()[0]
    drafter.save(known, tokenizer="a: 先")
    drafter.save(unknown)
    assert contents(known)[0]["tokenizer"] == "a: 先"
    for path, tokenizer in ((known, "a: 先"), (known, None), (unknown, None), (unknown, "b")):
        assert SuffixDrafter.load(path, tokenizer=tokenizer)._shared.read()[0] == drafter._shared.read()[0]
    for other in ("b", ""):
        with pytest.raises(OptionError) as error:
            SuffixDrafter.load(known, tokenizer=other)
        assert str(error.value) == f"{known}: holds what another tokenizer's model wrote; use another file"
    for wrong in (lambda: drafter.save(known, tokenizer=5), lambda: SuffixDrafter.load(known, tokenizer=5)):
        with pytest.raises(OptionError, match="tokenizer=5: must be a text"):
            wrong()


def test_sequences_may_go_on_while_they_are_saved(tmp_path):
    """Two threads serve requests, each of which writes consecutive tokens; a file has them as at one moment."""
    drafter, path = SuffixDrafter(depth=8), tmp_path / "learned"
    done = threading.Event()
    failed = []

    def serve(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not done.is_set():
                session, token = drafter.session([1, 2, 3], PARAMS), rng.randrange(10**6)
                for _ in range(20):
                    gained = rng.randrange(1, 9)
                    session.observe(range(token, token + gained))
                    session.propose(4)
                    token += gained
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=serve, args=[seed]) for seed in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        sizes = []
        for _ in range(15):
            drafter.save(path)
            tensors = contents(path)[1]
            tokens, lengths, texts = (tensors[name][1] for name in ("tokens", "lengths", "texts"))
            written: dict[int, list[int]] = {}
            for text, length, end in zip(texts, lengths, np.cumsum(lengths), strict=True):
                written.setdefault(text, []).extend(tokens[end - length : end])
            assert all(set(np.diff(run).tolist()) <= {1} for run in written.values())
            sizes.append(len(tokens))
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failed
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_no_more_texts_are_open_at_a_time_than_were(tmp_path, monkeypatch):
    """An open text takes memory for each end of it that may grow."""
    path = tmp_path / "file"
    texts = np.array([0, 1, 0, 2, 3, 2, 4], dtype=np.int64)
    save_file({"tokens": np.arange(7, dtype=np.int32), "lengths": np.ones_like(texts), "texts": texts}, path, METADATA)
    changes = []
    begin, end = SuffixTrie.begin, SuffixTrie.end
    monkeypatch.setattr(SuffixTrie, "begin", lambda self: changes.append(1) or begin(self))
    monkeypatch.setattr(SuffixTrie, "end", lambda self, text: changes.append(-1) or end(self, text))
    loaded = SuffixDrafter.load(path)
    open_ = np.cumsum(changes).tolist()
    assert (max(open_), open_[-1]) == (2, 0)
    again = tmp_path / "again"
    loaded.save(again)
    assert contents(again) == contents(path)


def test_sequences_are_a_piece_each_oldest_first(tmp_path):
    drafter, path = SuffixDrafter(max_tokens=9), tmp_path / "learned"
    for output in ([1, 2, 3, 4], [5], [6, 7, 8, 9, 10]):
        drafter.session([99], PARAMS).observe(output)
    drafter.save(path)
    metadata, tensors = contents(path)
    assert metadata == {"format": "sakiyomi-suffix", "version": "1"}
    assert tensors == {
        "tokens": ("int32", [2, 3, 4, 5, 6, 7, 8, 9, 10]),
        "lengths": ("int64", [3, 1, 5]),
        "texts": ("int64", [0, 1, 2]),
    }
    loaded = SuffixDrafter.load(path, max_tokens=3)
    assert loaded._shared.read()[0].tolist() == [8, 9, 10]


def test_a_drafter_that_knows_nothing_is_saved_too(tmp_path):
    path = tmp_path / "nothing"
    SuffixDrafter().save(path)
    assert SuffixDrafter.load(path).session([1, 2], PARAMS).propose(3).tokens == ()


def test_saving_replaces_a_file_or_leaves_it(tmp_path, monkeypatch):
    drafter, path = taught()[0], tmp_path / "learned"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OptionError, match=r"learned: can't be written \(No space left on device\)"):
            drafter.save(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    drafter.save(path)
    SuffixDrafter.load(path)
    for impossible in (tmp_path, tmp_path / "none" / "file", path / "file"):
        with pytest.raises(OptionError, match="can't be written") as error:
            drafter.save(impossible)
        assert str(error.value).startswith(f"{impossible}: ")
    for name in ("", ".", "/"):
        with pytest.raises(OptionError) as error:
            drafter.save(name)
        assert str(error.value) == f"{name!r}: can't be written (not the name of a file)"
    assert list(tmp_path.iterdir()) == [path]


GOOD = {
    "tokens": np.array([1, 2, 3, 4, 5], dtype=np.int32),
    "lengths": np.array([2, 3], dtype=np.int64),
    "texts": np.array([0, 1], dtype=np.int64),
}
METADATA = {"format": "sakiyomi-suffix", "version": "1"}


def test_the_file_that_the_next_test_spoils_is_good(tmp_path):
    save_file(GOOD, tmp_path / "file", METADATA)
    assert SuffixDrafter.load(tmp_path / "file").session([1], PARAMS).propose(3).tokens == (2,)


@pytest.mark.parametrize(
    ("changes", "metadata", "wrong"),
    [
        ({}, {"format": "pt"}, "its format is 'pt'"),
        ({}, None, "its format is None"),
        ({}, {"version": "2"}, "its version is '2'"),
        ({"tokens": None}, {}, "it has the tensors lengths, texts, not"),
        ({"more": np.zeros(1)}, {}, "it has the tensors lengths, more, texts, tokens, not"),
        ({"tokens": GOOD["tokens"].astype(np.int64)}, {}, r"tokens is I64 \[5\], not one row of I32"),
        ({"tokens": GOOD["tokens"].astype(np.float32)}, {}, r"tokens is F32 \[5\], not one row of I32"),
        ({"lengths": GOOD["lengths"].astype(np.int32)}, {}, r"lengths is I32 \[2\], not one row of I64"),
        ({"texts": GOOD["texts"].reshape(1, 2)}, {}, r"texts is I64 \[1, 2\], not one row of I64"),
        ({"tokens": np.array(3, dtype=np.int32)}, {}, r"tokens is I32 \[\], not one row of I32"),
        ({"tokens": np.array([1, 2, -3, 4, 5], dtype=np.int32)}, {}, "it has negative tokens"),
        ({"lengths": np.array([2, 4])}, {}, "its lengths don't add up to its 5 tokens"),
        ({"lengths": np.array([2, 2])}, {}, "its lengths don't add up to its 5 tokens"),
        ({"lengths": np.array([5, 0])}, {}, "its lengths don't add up to its 5 tokens"),
        ({"lengths": np.array([6, -1])}, {}, "its lengths don't add up to its 5 tokens"),
        ({"lengths": np.array([2**63 - 1, -(2**63) + 6])}, {}, "its lengths don't add up to its 5 tokens"),
        ({"lengths": np.array([], dtype=np.int64), "texts": np.array([], dtype=np.int64)}, {}, "its lengths don't add"),
        ({"lengths": np.array([5])}, {}, "there are 1 lengths and 2 texts"),
        ({"texts": np.array([1, 0])}, {}, "its texts aren't numbered as they appear"),
        ({"texts": np.array([0, 2])}, {}, "its texts aren't numbered as they appear"),
        ({"texts": np.array([0, -1])}, {}, "its texts aren't numbered as they appear"),
    ],
)
def test_a_file_that_was_altered_is_refused(tmp_path, changes, metadata, wrong):
    path = tmp_path / "file"
    tensors = {name: tensor for name, tensor in {**GOOD, **changes}.items() if tensor is not None}
    save_file(tensors, path, None if metadata is None else {**METADATA, **metadata})
    refused(path, wrong)


def refused(path, wrong: str) -> None:
    with pytest.raises(OptionError, match=wrong) as error:
        SuffixDrafter.load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert message.endswith("; must be a file that SuffixDrafter.save wrote")
    assert "\n" not in message


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "file"
    taught()[0].save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        refused(path, "can't be read")
    path.write_bytes(whole + b"x")
    refused(path, "can't be read")
    path.write_bytes(b"{}" * 100)
    refused(path, "can't be read")


def test_what_is_no_file_is_refused(tmp_path):
    refused(tmp_path, "not a file")
    refused(tmp_path / "none", "no such file")
    path = tmp_path / "file"
    taught()[0].save(path)
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    path.chmod(0)
    if not os.access(path, os.R_OK):
        refused(path, "can't be read")
    path.chmod(stat.S_IRUSR)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
