"""Drafting from a table: what most often follows the last few tokens, counted in the target's own outputs.

Counts become probabilities by interpolated modified Kneser-Ney smoothing (Chen & Goodman 1998, "An empirical study of
smoothing techniques for language modeling", TR-10-98, section 3), and contexts that tell little more than the one a
token shorter are left out (after Stolcke 1998, "Entropy-based pruning of backoff language models"). Nothing of that is
left to do when drafting: a table holds, for each context, its likeliest continuations with their final probabilities.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import exp, gamma, log
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.drafters.suffix import _check, _check_tokenizer
from sakiyomi.errors import OptionError
from sakiyomi.files import read_arrays, replace_file
from sakiyomi.interfaces import Draft, GoOn, always
from sakiyomi.sampling import SamplingParams, derived_seed

_FORMAT, _FORMAT_VERSION = "sakiyomi-table", "1"
_DTYPES = {"keys": ("U32",), "sizes": ("U8",), "tokens": ("U16", "U32"), "levels": ("U8",)}  # as safetensors calls them
_MULTIPLIER = 0x9E3779B97F4A7C15  # of the hash of a context
_STEPS = 48  # a probability is exp(-level / _STEPS): to within about 1 %, and the least is 0.005
_PROBABILITIES = [exp(-level / _STEPS) for level in range(256)]
_FALLBACK = (0.0, 0.5, 1.0, 1.5)  # discounts where there are too few counts to estimate them (KenLM's)
_BYTES_PER_TOKEN = 8  # of a table, for each token counted, unless max_bytes says otherwise
_ORDERS, _CONTINUATIONS, _VOCABULARIES = (2, 8), (1, 255), (1, 2**31 - 1)
_REMEMBERED = 2**14  # contexts whose continuations a drafter keeps at hand
_LUCK = 3.0  # a continuation that the noise would have to make likelier than so many times isn't considered
_COUPLING = 0.5  # how far a temperature of 1 makes the target's noise decide between continuations

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Row = list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class Table:
    """The likeliest continuations of contexts of 1 to ``order - 1`` tokens; :func:`build_table` makes one.

    ``keys``: uint32 [contexts], ascending, a hash of each. Nothing else is kept of a context, so that one that isn't
    there is mistaken for another about contexts / 2**32 of the time; it costs a wrong guess. ``sizes``: uint8
    [contexts], how many continuations each has. ``tokens``: uint16 (uint32 for more than 2**16 token ids), context
    after context, the likeliest first. ``levels``: uint8, one per token, whose probability is exp(-level / 48).
    """

    order: int
    vocab_size: int
    keys: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.unsignedinteger[Any]]
    levels: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.keys.nbytes + self.sizes.nbytes + self.tokens.nbytes + self.levels.nbytes

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        """Keys, where the continuations of each end, tokens, levels; a scalar of an array would cost much more."""
        ends = np.cumsum(self.sizes, dtype=np.int64)
        keys, tokens, levels = (np.ascontiguousarray(each) for each in (self.keys, self.tokens, self.levels))
        return keys.data, ends.data, tokens.data, levels.data

    def continuations(self, context: Sequence[int]) -> Row:
        """Return (token, probability) of what may follow, the likeliest first, by the longest end that is known.

        Nothing where not even the last token is known.
        """
        keys, ends, tokens, levels = self._views
        for key in reversed(_hashes(map(int, context[: -self.order : -1]))):
            index = bisect_left(keys, key)
            if index < len(keys) and keys[index] == key:
                start, end = ends[index - 1] if index else 0, ends[index]
                probabilities = map(_PROBABILITIES.__getitem__, levels[start:end])
                return list(zip(tokens[start:end], probabilities, strict=True))
        return []

    def save(self, path: str | os.PathLike[str], tokenizer: str | None = None) -> None:
        """Write a file, for :meth:`load`. Raises OptionError where it can't be written.

        ``tokenizer``: any text that tells the tokenizer of these token ids from others, like a hash of it.

        A safetensors file with the four arrays. Metadata: ``format``, ``version``, ``order``, ``vocab_size``, and
        ``tokenizer`` if given. The hash of a context starts from 0 and takes its tokens, the last one first:
        ``h = (h + token + 1) * 0x9E3779B97F4A7C15``, then ``h ^= h >> 32``, in 64 bits; the key is the lower 32.
        """
        _check_tokenizer(tokenizer)
        from safetensors.numpy import save

        metadata = {"format": _FORMAT, "version": _FORMAT_VERSION}
        metadata |= {"order": str(self.order), "vocab_size": str(self.vocab_size)}
        if tokenizer is not None:
            metadata["tokenizer"] = tokenizer
        content = save({name: np.ascontiguousarray(getattr(self, name)) for name in _DTYPES}, metadata)
        replace_file(path, lambda temporary: temporary.write_bytes(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: str | None = None) -> Table:
        """Return the table that :meth:`save` wrote.

        Raises OptionError where the file can't be used, or was saved with another ``tokenizer`` than is given here:
        token ids mean nothing with another one. Where only one of the two is known, they aren't compared.
        """
        _check_tokenizer(tokenizer)
        table, written_with = _read(Path(path))
        if tokenizer is not None and written_with is not None and written_with != tokenizer:
            raise OptionError(f"{path}: was counted in what another tokenizer's model wrote; use another file")
        return table


def build_table(
    texts: Iterable[Sequence[int]],
    starts: Iterable[int] | None = None,
    *,
    vocab_size: int,
    order: int = 5,
    continuations: int = 8,
    min_probability: float = 0.02,
    max_bytes: int | None = None,
) -> Table:
    """Count what follows what in texts of token ids. The same texts always give the same table.

    ``starts``: where in each text the target's own output begins (None: at 0). Tokens from there on are counted; those
    before, a prompt's, are only context. ``order``: the length of the longest n-grams, a context and what follows it.
    A context has up to ``continuations`` tokens, of those that were counted, with at least ``min_probability``.
    ``max_bytes``: how large the arrays may be (None: 8 bytes for each token counted); contexts are kept by what their
    bytes bring, which is how much better they foresee the texts than the contexts a token shorter do. Takes a second
    and 300 MB for 200,000 tokens or so.
    Raises OptionError.
    """
    _check("order", order, *_ORDERS)
    _check("vocab_size", vocab_size, *_VOCABULARIES)
    _check("continuations", continuations, *_CONTINUATIONS)
    if not isinstance(min_probability, (int, float)) or not _PROBABILITIES[255] <= min_probability <= 1:
        raise OptionError(f"min_probability={min_probability!r}: must be in 0.005..1")
    if max_bytes is not None:
        _check("max_bytes", max_bytes, 0, 2**40)
    ids, counted = _joined(texts, starts, vocab_size, order)
    levels = _count(ids, counted, vocab_size, order)
    found: list[_Contexts] = []
    probability = np.zeros(0)
    rows: _Rows | None = None
    for length, ngrams in enumerate(levels):
        shorter = probability[ngrams.shorter] if length else np.full(len(ngrams.token), 1 / vocab_size)
        probability, rest = _smoothed(ngrams, shorter)
        own = _Rows(ngrams.context, ngrams.token, probability).at_least(min_probability)
        rows = own if rows is None else own.joined(rows.inherited(ngrams.parent, rest).at_least(min_probability))
        rows = rows.likeliest(continuations)
        if length:
            keys, known = _keys(ids, ngrams.first, length, vocab_size)
            found.append(_Contexts(keys, np.where(known, _gain(ngrams, probability, shorter, rest), -1), rows))
    if max_bytes is None:
        max_bytes = _BYTES_PER_TOKEN * len(counted)
    return _chosen(found, max_bytes, order, vocab_size)


def _hashes(backwards: Iterable[int]) -> list[int]:
    """Return the keys of the contexts that end a text, the shortest first; its tokens come the last one first."""
    found, state = [], 0
    for token in backwards:
        state = (state + token + 1) * _MULTIPLIER & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
        found.append(state & 0xFFFFFFFF)
    return found


@dataclass(frozen=True)
class _Ngrams:
    """All n-grams of one length. Their contexts, a token shorter, are numbered as they sort.

    Of each context: ``first``, where in the texts something follows it first; ``parent``, the number of the context a
    token shorter; ``times``, how often it is followed by something. Of each n-gram: its ``context`` and ``token``, its
    ``count``, and ``shorter``, the index of the n-gram without the first token.
    """

    first: Ints
    parent: Ints
    times: Ints
    context: Ints
    token: Ints
    count: Ints
    shorter: Ints


@dataclass(frozen=True)
class _Rows:
    """Continuations of contexts: of each its context's number, its token and its probability."""

    context: Ints
    token: Ints
    probability: Floats

    def __getitem__(self, which: npt.NDArray[Any]) -> _Rows:
        return _Rows(self.context[which], self.token[which], self.probability[which])

    def sizes(self, contexts: int) -> Ints:
        """Return how many each of so many contexts has."""
        return np.bincount(self.context, minlength=contexts)

    def inherited(self, parent: Ints, rest: Floats) -> _Rows:
        """Return those that longer contexts have from their parents, to which they leave a ``rest`` of probability."""
        sizes = self.sizes(int(parent.max(initial=-1)) + 1)
        context, index = _spread(sizes[parent], (np.cumsum(sizes) - sizes)[parent])
        return _Rows(context, self.token[index], self.probability[index] * rest[context])

    def at_least(self, probability: float) -> _Rows:
        """Return those with this probability or more."""
        return self[np.flatnonzero(self.probability >= probability)]

    def joined(self, others: _Rows) -> _Rows:
        """Return these, and those of the others that these don't have."""
        context, token = (np.concatenate(each) for each in ((self.context, others.context), (self.token, others.token)))
        both = _Rows(context, token, np.concatenate([self.probability, others.probability]))
        radix = int(token.max(initial=0)) + 1
        return both[np.unique(context * radix + token, return_index=True)[1]]

    def likeliest(self, count: int) -> _Rows:
        """Return up to ``count`` of each context, by context and falling probability, the lower token id first."""
        rows = self[np.lexsort((self.token, -self.probability, self.context))]
        sizes = rows.sizes(0)
        place = np.arange(len(rows.token)) - (np.cumsum(sizes) - sizes)[rows.context]
        return rows[np.flatnonzero(place < count)]


@dataclass(frozen=True)
class _Contexts:
    """Contexts of one length that a table may hold: their keys, what each brings, their continuations in order."""

    keys: npt.NDArray[np.uint32]
    gain: Floats
    rows: _Rows


def _spread(sizes: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Return for runs of these sizes and starts, one after the other, the number of the run and each index in it."""
    run = np.repeat(np.arange(len(sizes)), sizes)
    return run, np.arange(len(run)) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)


def _joined(
    texts: Iterable[Sequence[int]], starts: Iterable[int] | None, vocab_size: int, order: int
) -> tuple[Ints, Ints]:
    """Return all tokens, ``order - 1`` times the id ``vocab_size`` before each text, and where those to count are."""
    arrays = [np.asarray(text) for text in texts]
    starts = [0] * len(arrays) if starts is None else list(starts)
    if len(starts) != len(arrays):
        raise OptionError(f"starts: there are {len(starts)} for {len(arrays)} texts")
    ids, counted = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    length = 0
    for number, (text, start) in enumerate(zip(arrays, starts, strict=True)):
        if text.ndim != 1 or (
            text.size and (text.dtype.kind not in "iu" or not 0 <= text.min() <= text.max() < vocab_size)
        ):
            raise OptionError(f"texts: number {number} isn't a row of token ids in 0..{vocab_size - 1}")
        if not 0 <= start <= len(text):
            raise OptionError(f"starts: {start!r} is no place in text number {number}, which has {len(text)} tokens")
        ids += [np.full(order - 1, vocab_size), text.astype(np.int64)]
        length += order - 1
        counted.append(np.arange(length + start, length + len(text)))
        length += len(text)
    return np.concatenate(ids), np.concatenate(counted)


def _count(ids: Ints, counted: Ints, vocab_size: int, order: int) -> list[_Ngrams]:
    """Return the n-grams of 1 to ``order`` tokens that end at the places ``counted``, with the counts to smooth.

    These are how often the longest occur, and of the others, how many different tokens come before them.
    """
    radix = vocab_size + 1
    follows = ids[counted]
    contexts = ngrams = np.zeros(len(counted), np.int64)  # their numbers at each place
    found: list[_Ngrams] = []
    for length in range(order):
        parents, shorter = contexts, ngrams
        before = ids[counted - length] if length else np.zeros_like(counted)
        _, first, contexts = np.unique(parents * radix + before, return_index=True, return_inverse=True)
        key, first_ngram, ngrams = np.unique(contexts * radix + follows, return_index=True, return_inverse=True)
        if found:
            found[-1] = replace(found[-1], count=np.bincount(shorter[first_ngram]))
        found.append(
            _Ngrams(
                counted[first],
                parents[first],
                np.bincount(contexts),
                key // radix,
                key % radix,
                np.bincount(ngrams),
                shorter[first_ngram],
            )
        )
    return found


def _discounts(counts: Ints) -> Floats:
    """Return what is taken off a count of 0, 1, 2, and 3 or more (Chen & Goodman 1998)."""
    one, two, three, four = (np.count_nonzero(counts == count) for count in (1, 2, 3, 4))
    if not (one and two and three and four):
        return np.array(_FALLBACK)
    y = one / (one + 2 * two)
    found = np.array([0, 1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three])
    limited: Floats = np.minimum(np.maximum(found, 0), np.arange(4))
    return limited


def _smoothed(ngrams: _Ngrams, shorter: Floats) -> tuple[Floats, Floats]:
    """Return the probability of each n-gram's token, and what each context leaves to the context a token shorter.

    ``shorter``: of each n-gram, the probability of its token after the context a token shorter.
    """
    total = np.bincount(ngrams.context, ngrams.count)
    discount = _discounts(ngrams.count)[np.minimum(ngrams.count, 3)]
    rest = np.bincount(ngrams.context, discount) / total
    own = (ngrams.count - discount) / total[ngrams.context]
    return own + rest[ngrams.context] * shorter, rest


def _gain(ngrams: _Ngrams, probability: Floats, shorter: Floats, rest: Floats) -> Floats:
    """Return how many nats each context brings in all the places where it is, if its probabilities are true.

    This is its relative entropy to the context a token shorter, times how often it occurs (Stolcke 1998).
    Tokens that didn't follow the context have ``rest`` times the probability that they have after the shorter one.
    """
    contexts = len(rest)
    seen = np.bincount(ngrams.context, probability * np.log(probability / shorter), contexts)
    unseen = np.maximum(1 - np.bincount(ngrams.context, shorter, contexts), 0)
    return ngrams.times * (seen + unseen * rest * np.log(rest, out=np.zeros(contexts), where=rest > 0))


def _keys(ids: Ints, first: Ints, length: int, vocab_size: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return the key of each context, and whether all of it is within a text."""
    state, within = np.zeros(len(first), np.uint64), np.ones(len(first), np.bool_)
    for back in range(1, length + 1):
        token = ids[first - back]
        within &= token < vocab_size
        state = (state + token.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
        state ^= state >> np.uint64(32)
    return state.astype(np.uint32), within


def _chosen(found: list[_Contexts], max_bytes: int, order: int, vocab_size: int) -> Table:
    """Return a table of those contexts that bring the most for their bytes."""
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    keys, gain = (np.concatenate(each) for each in zip(*((each.keys, each.gain) for each in found), strict=True))
    sizes = np.concatenate([each.rows.sizes(len(each.keys)) for each in found])
    cost = 5 + (1 + dtype.itemsize) * sizes
    worth = np.where(sizes > 0, gain / cost, 0)
    best = np.argsort(-worth, kind="stable")[: np.count_nonzero(worth > 0)]
    kept = best[np.cumsum(cost[best]) <= max_bytes]
    kept = kept[np.unique(keys[kept], return_index=True)[1]]  # by key; of two with the same the better one
    _, index = _spread(sizes[kept], (np.cumsum(sizes) - sizes)[kept])
    token, probability = (
        np.concatenate(each)[index]
        for each in zip(*((each.rows.token, each.rows.probability) for each in found), strict=True)
    )
    levels = np.clip(np.rint(-np.log(probability) * _STEPS), 0, 255).astype(np.uint8)
    return Table(order, vocab_size, keys[kept], sizes[kept].astype(np.uint8), token.astype(dtype), levels)


class TableDrafter:
    """Proposes a tree of the likeliest continuations by a table of n-grams (:func:`build_table`).

    The tokens that are likeliest to stand, if all before them do, are taken first: at most ``max_nodes``, and none
    whose product of confidences is less than ``min_survival``. ``vocab_size``: the target's, where it is known.

    No model; needs no compiled core; a draft takes microseconds whatever the text. At a temperature the target's own
    noise, which is known beforehand, has a say in which continuations are likely. Sessions may be used from several
    threads, each session from one at a time. Raises OptionError.
    """

    name = "table"
    costs = None
    samples = False
    prefixes = True

    def __init__(
        self, table: Table, *, max_nodes: int = 16, min_survival: float = 0.03, vocab_size: int | None = None
    ) -> None:
        _check("max_nodes", max_nodes, 1, 2**16)
        if not isinstance(min_survival, (int, float)) or not 0 < min_survival <= 1:
            raise OptionError(f"min_survival={min_survival!r}: must be above 0 and at most 1")
        if vocab_size is not None and table.vocab_size > vocab_size:
            raise OptionError(f"table: counted with {table.vocab_size} token ids; the target has {vocab_size}")
        self.table = table
        self.max_nodes, self.min_survival = max_nodes, min_survival
        self._remembered: dict[tuple[int, ...], Row] = {}

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> TableSession:
        """Begin a sequence with these token ids."""
        return TableSession(self, prompt, params, sampled)

    def continuations(self, context: tuple[int, ...]) -> Row:
        """Return what the table says of a context of at most ``order - 1`` tokens."""
        found = self._remembered.get(context)
        if found is None:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            found = self._remembered[context] = self.table.continuations(context)
        return found


class TableSession:
    """The state of one sequence: its last tokens, and how many there are."""

    unread = 0

    def __init__(self, drafter: TableDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        self._drafter = drafter
        self._width = drafter.table.order - 1
        self._last = tuple(map(int, prompt[-self._width :]))
        self._length = len(prompt)
        self._seed = params.seed
        # Where drafts are checked by rejection, the target's noise decides nothing.
        self._coupling = 0.0 if sampled else min(_COUPLING * params.temperature, 0.9)

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained."""
        self._length += len(tokens)
        self._last = (*self._last, *map(int, tokens[-self._width :]))[-self._width :]

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return a tree of likely continuations: at most ``budget`` tokens in a row, where nothing is known none."""
        drafter, width, min_survival = self._drafter, self._width, self._drafter.min_survival
        tokens: list[int] = []
        parents: list[int] = []
        confidences: list[float] = []
        # Candidates: minus survival, a serial number so that equals come in order, parent, token, confidence, the
        # number of tokens before it in the draft, and the context that it follows.
        open_: list[tuple[float, int, int, int, float, int, tuple[int, ...]]] = []
        noise: list[int] = []  # keys of the target's, at each depth
        node, depth, survival, context = -1, 0, 1.0, self._last
        serial = 0
        while True:
            if depth < budget:
                found = drafter.continuations(context)
                if found and self._coupling:
                    if depth == len(noise):
                        noise.append(derived_seed(self._seed, self._length + depth))
                    found = coupled(found, self._coupling, noise[depth], min_survival / survival / _LUCK)
                for token, confidence in found:
                    stands = survival * confidence
                    if stands < min_survival:
                        break
                    heappush(open_, (-stands, serial, node, token, confidence, depth, context))
                    serial += 1
            if not open_:
                break
            stands, _, node, token, confidence, depth, context = heappop(open_)
            parents.append(node)
            node = len(tokens)
            tokens.append(token)
            confidences.append(confidence)
            if node + 1 == drafter.max_nodes:
                break
            survival, depth = -stands, depth + 1
            context = (*context, token)[-width:]
        chain = parents == list(range(-1, len(parents) - 1))
        return Draft(tuple(tokens), None if chain else tuple(parents), tuple(confidences), drafter.name)


def coupled(found: Row, coupling: float, key: int, least: float = 0.0) -> Row:
    """Return continuations with the probability that each is the target's choice, given its noise, the likeliest first.

    The target takes the largest log p + noise. Were p the table's q, its choice would be certain; were p all on one
    token, the noise would mean nothing, and the chance of each would be q. In between the chance is taken to be
    proportional to q * exp(coupling * noise), 0 <= coupling < 1. The tokens that aren't here have the mean of it, where
    exp(coupling * noise) is gamma(1 - coupling). Those whose q is less than ``least`` are left out, to save time.
    ``key``: ``derived_seed(seed, position)``.
    """
    first, second = key & 0xFFFFFFFF, key >> 32
    weights: list[tuple[float, int]] = []
    total, rest = 0.0, 1.0
    for token, probability in found:
        if probability < least:
            break
        # The hash of sampling.gumbel_noise; its array calls would take ten times as long for so few tokens.
        h = (token * 0x9E3779B1 + first) & 0xFFFFFFFF
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = ((h ^ h >> 13) + second) * 0xC2B2AE35 & 0xFFFFFFFF
        h = (h ^ h >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
        # The noise is -log(-log(u)).
        weight = probability * (-log(((h ^ h >> 16) + 0.5) * 2.0**-32)) ** -coupling
        weights.append((weight, token))
        total += weight
        rest -= probability
    total += max(0.0, rest) * gamma(1 - coupling)
    weights.sort(key=itemgetter(0), reverse=True)
    return [(token, weight / total) for weight, token in weights]


def _read(path: Path) -> tuple[Table, str | None]:
    """Return the table of a file and the tokenizer it was saved with. Raises OptionError unless all is right."""

    def wrong(what: str) -> OptionError:
        return OptionError(f"{path}: {what}; must be a file that Table.save wrote")

    arrays, metadata = read_arrays(path, _FORMAT, _FORMAT_VERSION, _DTYPES, wrong)
    read: dict[str, Any] = dict(arrays)
    for name, (low, high) in {"order": _ORDERS, "vocab_size": _VOCABULARIES}.items():
        text = metadata.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
            raise wrong(f"its {name} is {metadata.get(name)!r}, not in {low}..{high}")
        read[name] = int(text)
    table = Table(**read)
    if len(table.keys) != len(table.sizes):
        raise wrong(f"there are {len(table.keys)} keys and {len(table.sizes)} sizes")
    if (table.keys[1:] <= table.keys[:-1]).any():
        raise wrong("its keys don't ascend")
    if (table.sizes < 1).any() or not table.sizes.sum(dtype=np.int64) == len(table.tokens) == len(table.levels):
        raise wrong(f"its sizes don't add up to its {len(table.tokens)} tokens and {len(table.levels)} levels")
    if (table.tokens >= table.vocab_size).any():
        raise wrong(f"it has tokens beyond its {table.vocab_size}")
    return table, metadata.get("tokenizer")
