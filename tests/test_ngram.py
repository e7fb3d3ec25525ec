"""Prompt lookup: the longest match, the latest of several, at a cost that doesn't grow with the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sakiyomi.drafters import NgramDrafter
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft
from sakiyomi.sampling import SamplingParams

GREEDY = SamplingParams()


def draft(ids: Sequence[int] | str, budget: int = 3, **options) -> list[int]:
    """Return the tokens that a new session proposes after these ids (letters stand for their code points)."""
    reference = [ord(c) if isinstance(c, str) else c for c in options.pop("reference", ())]
    ids = [ord(c) if isinstance(c, str) else c for c in ids]
    options.setdefault("min_ngram", 2)
    return list(NgramDrafter(reference=reference, **options).session(ids, GREEDY).propose(budget).tokens)


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def last_after(text: list[int], ngram: list[int]) -> int | None:
    """Return where the text goes on after the last occurrence of an n-gram that something follows."""
    size = len(ngram)
    starts = [i for i in range(len(text) - size) if text[i : i + size] == ngram]
    return starts[-1] + size if starts else None


def naive(ids: list[int], reference: list[int], budget: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Scan everything, the longest n-gram first; a draft from the text itself is read on into the draft."""
    for size in range(max_ngram, min_ngram - 1, -1):
        if size > len(ids):
            continue
        at = last_after(ids, ids[-size:])
        if at is not None:
            text = list(ids)
            for i in range(at, at + budget):
                text.append(text[i])
            return text[len(ids) :]
        at = last_after(reference, ids[-size:])
        if at is not None:
            return reference[at : at + budget]
    return []


def test_proposals_are_those_of_scanning_everything():
    """Over tiny alphabets, where everything repeats; the session learns piece by piece."""
    rng = random.Random(1)
    kinds = {"own": 0, "none": 0, "reference": 0}
    for _ in range(400):
        alphabet = range(rng.randrange(2, 7))
        text = rng.choices(alphabet, k=rng.randrange(1, 60))
        reference = rng.choices(alphabet, k=rng.choice([0, 0, 20]))
        min_ngram = rng.randrange(1, 4)
        max_ngram = rng.randrange(min_ngram, 6)
        drafter = NgramDrafter(max_ngram=max_ngram, min_ngram=min_ngram, reference=reference)
        known = rng.randrange(len(text))
        session = drafter.session(text[:known], GREEDY)
        while known < len(text):
            step = min(rng.randrange(1, 6), len(text) - known)
            session.observe(text[known : known + step])
            known += step
            budget = rng.randrange(1, 12)
            ids = text[:known]
            found = session.propose(budget)
            expected = naive(ids, reference, budget, max_ngram, min_ngram)
            assert list(found.tokens) == expected, (ids, reference, budget, max_ngram, min_ngram)
            assert drafter.session(ids, GREEDY).propose(budget) == found, "a session that saw the text at once differs"
            without = naive(ids, [], budget, max_ngram, min_ngram)
            kinds["none" if not expected else "own" if expected == without else "reference"] += 1
    assert min(kinds.values()) > 100


def test_the_longest_match_comes_first():
    assert letters(draft("bcX abcY bcZ abc", 1)) == "Y"  # " abc", though "bc" occurred later


def test_of_several_matches_the_latest_is_taken():
    assert letters(draft("abX abY ab", 1)) == "Y"


def test_the_end_of_the_text_is_no_match_for_itself():
    assert draft("abcd") == []
    assert draft("ab", 3, min_ngram=1) == []
    assert letters(draft("aa", 2, min_ngram=1)) == "aa"  # the first a, which an a follows


def test_shorter_than_min_ngram_is_no_match():
    assert draft("aXYa") == []
    assert letters(draft("aXYa", min_ngram=1)) == "XYa"


def test_text_shorter_than_the_ngrams_is_no_match():
    assert draft("") == []
    assert draft("a", reference="aab") == []
    assert letters(draft("aa", reference="aab")) == "b"


@pytest.mark.parametrize("budget", [1, 2, 5, 30])
def test_no_more_is_proposed_than_the_budget(budget):
    assert letters(draft("abcdefgh ab", budget)) == "cdefgh abcdefgh abcdefgh abcdefgh"[:budget]


def test_no_budget_no_draft():
    assert draft("ababab", 0) == []
    assert draft("ab", 0, reference="abc") == []


def test_periodic_text_continues_itself():
    assert letters(draft("abcabcab", 7)) == "cabcabc"
    assert letters(draft("aaaa", 9)) == "a" * 9


def test_the_reference_is_used_where_the_text_has_no_match_of_that_size():
    assert letters(draft("abcd", reference="xabcdefgh")) == "efg"
    assert letters(draft("abX ab", 1, reference="abY")) == "X"  # same size: the text itself
    assert letters(draft("bcX abc", 1, reference="abcY")) == "Y"  # longer: the reference


def test_the_reference_ends_where_it_ends():
    assert letters(draft("ab", 9, reference="abcd")) == "cd"
    assert draft("cd", 9, reference="abcd") == []


def test_of_several_matches_in_the_reference_the_last_is_taken():
    assert letters(draft("ab", 1, reference="abXabY")) == "Y"


def test_a_match_does_not_reach_from_the_reference_into_the_text():
    assert draft("bcbx", 1, reference="a", min_ngram=2) == []
    assert draft("bc", 1, reference="ab", min_ngram=2) == []


def test_a_draft_says_how_sure_it_is():
    """The longer the match the surer; the engine's rules need (0, 1]."""
    drafter = NgramDrafter(max_ngram=5, min_ngram=1)
    confidences = []
    for size in range(1, 6):
        common = list(range(size))
        found = drafter.session([9, *common, 50, 51, 52, 8, *common], GREEDY).propose(3)
        assert found.tokens == (50, 51, 52)
        assert found.drafter == "ngram"
        assert found.parents is None
        assert len(found.confidences) == 3
        confidences.append(found.confidences[0])
    assert confidences == sorted(set(confidences))
    assert 0 < confidences[0] < confidences[-1] <= 1
    assert drafter.session([1, 2], GREEDY).propose(3) == Draft(drafter="ngram")


def test_sessions_know_nothing_of_each_other():
    drafter = NgramDrafter(reference=[5, 6, 7])
    first, second = drafter.session([1, 2, 3], GREEDY), drafter.session([4], GREEDY)
    first.observe([1, 2])
    second.observe([1, 2])
    assert first.propose(1).tokens == (3,)
    assert second.propose(1).tokens == ()
    second.observe([5, 6])
    assert second.propose(1).tokens == (7,)
    assert drafter.session([1, 2], GREEDY).propose(1).tokens == ()


def test_what_the_caller_does_with_its_lists_changes_nothing():
    prompt, reference = [1, 2, 3, 1, 2], [7, 8, 9]
    session = NgramDrafter(reference=reference).session(prompt, GREEDY)
    prompt.clear()
    reference.clear()
    assert session.propose(1).tokens == (3,)
    session.observe([7, 8])
    assert session.propose(1).tokens == (9,)


class Watched(list):
    """A list that counts what is read of it and refuses to be searched."""

    read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def _refuse(self, *_):
        raise AssertionError("a lookup must not go through the text")

    __iter__ = __contains__ = __eq__ = index = count = copy = _refuse  # type: ignore[assignment]
    __hash__ = None


class Counted(dict):
    """A dict that counts lookups."""

    lookups = 0

    def get(self, key, default=None):
        self.lookups += 1
        return super().get(key, default)


@pytest.mark.parametrize("length", [100, 20_000])
def test_a_lookup_costs_the_same_whatever_the_length(length):
    rng = random.Random(2)
    ids = [rng.randrange(10**6) for _ in range(length)]
    reference = [10**6 + i for i in range(length)]
    session = NgramDrafter(reference=reference).session(ids, GREEDY)
    indexes = (session._own, session._reference)
    for index in indexes:
        index.ids, index._follows = Watched(index.ids), Counted(index._follows)
    assert session.propose(5).tokens == ()  # the dearest case: nothing matches
    session.observe([*ids[50:52]])
    assert session.propose(5).tokens == tuple(ids[52:57])
    assert sum(index._follows.lookups for index in indexes) <= 2 * 2 * 4  # two proposals, two indexes, four sizes
    assert sum(index.ids.read for index in indexes) < 60


@pytest.mark.parametrize(("low", "high"), [(0, 4), (-1, 4), (3, 2), (1, 0)])
def test_options_that_cannot_work_are_named(low, high):
    with pytest.raises(OptionError, match=f"min_ngram={low}, max_ngram={high}: must be 1 <= min_ngram <= max_ngram"):
        NgramDrafter(min_ngram=low, max_ngram=high)


def test_one_size_is_enough():
    assert letters(draft("abcXbcYabc", 1, min_ngram=3, max_ngram=3)) == "X"
