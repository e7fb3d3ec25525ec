"""Drafting from a table: what most often follows the last few tokens, counted in the target's own outputs.

The counts are smoothed into probabilities by interpolated modified Kneser-Ney (Chen & Goodman 1998, "An empirical study
of smoothing techniques for language modeling", TR-10-98). Nothing of that is left to do when drafting: a table has, for
each context that tells more than the one a token shorter does, its likeliest continuations with their probabilities.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, GoOn, always
from sakiyomi.sampling import SamplingParams

_FORMAT, _FORMAT_VERSION = "sakiyomi-table", "1"
_STEPS = 48.0  # probabilities are exp(-i / _STEPS), i in 0..255: to within 1 %, the least is 0.005
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF
_REMEMBERED = 2**15  # contexts whose continuations a drafter keeps at hand

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Table:
    """The likeliest continuations of contexts of 1 to ``order - 1`` tokens.

    ``keys``: uint32 [contexts], ascending: a hash of each context. A context that isn't there is taken for one that is
    about once in 2**32 / contexts times, which costs a wrong guess. ``sizes``: uint8 [contexts], how many continuations
    each has. ``tokens``: uint16 (uint32 for more than 2**16 token ids), those of one context after those of another,
    the likeliest first. ``levels``: uint8, one per token: its probability is exp(-level / 48).
    """

    order: int
    vocab_size: int
    keys: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.unsignedinteger[Any]]
    levels: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        ends = np.cumsum(self.sizes, dtype=np.int64)
        # Scalars of a memoryview cost much less than those of an array.
        for name, array in (("_keys", self.keys), ("_ends", ends), ("_tokens", self.tokens), ("_levels", self.levels)):
            object.__setattr__(self, name, memoryview(np.ascontiguousarray(array)))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that a file holds."""
        return self.keys.nbytes + self.sizes.nbytes + self.tokens.nbytes + self.levels.nbytes

    def continuations(self, context: Sequence[int]) -> list[tuple[int, float]]:
        """Return (token, probability) of what may follow, the likeliest first: for as many of the last tokens as known.

        Nothing where not even the last token is known.
        """
        keys: memoryview = self._keys  # type: ignore[attr-defined]
        hashes, state = [], 0
        for token in context[: -self.order : -1]:
            state = (state + token + 1) * _MULTIPLIER & _MASK
            state ^= state >> 32
            hashes.append(state & 0xFFFFFFFF)
        for key in reversed(hashes):
            index = bisect_left(keys, key)
            if index < len(keys) and keys[index] == key:
                end: int = self._ends[index]  # type: ignore[attr-defined]
                start = end - int(self.sizes[index])
                tokens = self._tokens[start:end]  # type: ignore[attr-defined]
                levels = self._levels[start:end]  # type: ignore[attr-defined]
                return [(token, _PROBABILITIES[level]) for token, level in zip(tokens, levels, strict=True)]
        return []


_PROBABILITIES = [math.exp(-level / _STEPS) for level in range(256)]


def build_table(
    texts: Iterable[Sequence[int]],
    starts: Iterable[int] | None = None,
    *,
    vocab_size: int,
    order: int = 5,
    continuations: int = 8,
    min_probability: float = 0.02,
    min_gain: float = 0.0,
    max_bytes: int | None = None,
    smoothing: str = "mkn",
    cap: int | None = None,
) -> Table:
    boundary = vocab_size
    pieces, counted = [], []
    length = 0
    for text, start in zip(texts, starts if starts is not None else iter(lambda: 0, 1)):
        pieces.append(np.full(order - 1, boundary)); pieces.append(np.asarray(text, dtype=np.int64))
        length += order - 1
        counted.append(np.arange(length + start, length + len(text)))
        length += len(text)
    ids = np.concatenate(pieces)
    at = np.concatenate(counted)
    follows = ids[at]
    radix = vocab_size + 1
    # Counts
    L = []
    contexts = np.zeros(len(at), np.int64)
    inverse_before = None
    for m in range(order):
        if m:
            _, first, contexts_new = np.unique(contexts * radix + ids[at - m], return_index=True, return_inverse=True)
            parent = contexts[first]
            contexts = contexts_new
        else:
            first = np.zeros(1, np.int64); parent = None
        n_ctx = len(first)
        key, f, inv, cnt = np.unique(contexts * radix + follows, return_index=True, return_inverse=True, return_counts=True)
        L.append(dict(first=first, parent=parent, n=n_ctx, context=key // radix, token=key % radix, counts=cnt, raw=np.bincount(contexts, minlength=n_ctx),
                      up=inverse_before[f] if m else None))
        inverse_before = inv
    if smoothing in ("mkn", "kn"):
        for m in range(order - 1):
            L[m]["counts"] = np.bincount(L[m + 1]["up"], minlength=len(L[m]["token"]))
    rows = None
    out = []
    p_low = None
    for m in range(order):
        l = L[m]
        c = l["counts"]; ctx = l["context"]
        total = np.bincount(ctx, c, minlength=l["n"])
        if smoothing == "wb":
            types = np.bincount(ctx, minlength=l["n"])
            gamma = types / (types + total)
            own = c / (total + types)[ctx]
        else:
            n = [np.count_nonzero(c == k) for k in range(1, 5)]
            if smoothing in ("mkn", "mabs") and min(n) > 0:
                Y = n[0] / (n[0] + 2 * n[1])
                D = np.array([0, 1 - 2*Y*n[1]/n[0], 2-3*Y*n[2]/n[1], 3-4*Y*n[3]/n[2]])
            else:
                Y = n[0] / (n[0] + 2 * n[1]) if n[0] and n[1] else .5
                D = np.array([0, Y, Y, Y])
            d = D[np.minimum(c, 3)]
            gamma = np.bincount(ctx, d, minlength=l["n"]) / total
            own = (c - d) / total[ctx]
        low = p_low[l["up"]] if m else np.full(len(c), 1 / vocab_size)
        p = own + gamma[ctx] * low
        p_low = p
        # gain
        g = np.bincount(ctx, p * np.log(p / low), minlength=l["n"])
        left = 1 - np.bincount(ctx, low, minlength=l["n"])
        g += np.where(gamma > 0, gamma * np.log(np.maximum(gamma, 1e-300)) * np.maximum(left, 0), 0)
        gain = l["raw"] * g
        # rows
        if m:
            rc, rt, rp, rs = rows  # ctx, token, p sorted; starts
            size = rs[1:] - rs[:-1]
            reps = size[l["parent"]]
            e_ctx = np.repeat(np.arange(l["n"]), reps)
            idx = np.arange(reps.sum()) - np.repeat(np.cumsum(reps) - reps, reps) + rs[:-1][l["parent"]][e_ctx]
            e_p = gamma[e_ctx] * rp[idx]
            k = e_p >= min_probability
            e_ctx, e_tok, e_p = e_ctx[k], rt[idx][k], e_p[k]
            k = p >= min_probability
            a = np.concatenate([ctx[k], e_ctx]); t = np.concatenate([l["token"][k], e_tok]); q = np.concatenate([p[k], e_p])
            _, f = np.unique(a * radix + t, return_index=True)
            # own types that fell below min_probability can't be among the others: theirs is less
            a, t, q = a[f], t[f], q[f]
        else:
            k = p >= min_probability
            a, t, q = ctx[k], l["token"][k], p[k]
        o = np.lexsort((t, -q, a))
        a, t, q = a[o], t[o], q[o]
        size = np.bincount(a, minlength=l["n"]); st = np.cumsum(size) - size
        k = np.arange(len(a)) - st[a] < continuations
        a, t, q = a[k], t[k], q[k]
        size = np.bincount(a, minlength=l["n"])
        rows = a, t, q, np.concatenate([[0], np.cumsum(size)])
        if m:
            state = np.zeros(l["n"], np.uint64)
            ok = size > 0
            for j in range(1, m + 1):
                tok = ids[at[l["first"]] - j]
                ok &= tok != boundary
                state = (state + tok.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
                state ^= state >> np.uint64(32)
            out.append((state.astype(np.uint32), size, gain, ok, t, q))
    keys = np.concatenate([x[0] for x in out]); size = np.concatenate([x[1] for x in out]); gain = np.concatenate([x[2] for x in out])
    ok = np.concatenate([x[3] for x in out]); t = np.concatenate([x[4] for x in out]); q = np.concatenate([x[5] for x in out])
    ok &= gain >= min_gain
    st = np.cumsum(size) - size
    if max_bytes is not None:
        cost = 5 + 3 * size
        o = np.argsort(-np.where(ok, gain / cost, -1), kind="stable")
        o = o[ok[o]]
        o = o[np.cumsum(cost[o]) <= max_bytes]
        ok[:] = False; ok[o] = True
    sel = np.flatnonzero(ok)
    _, f = np.unique(keys[sel], return_index=True)
    sel = sel[f]
    s = size[sel]
    idx = np.arange(s.sum()) - np.repeat(np.cumsum(s) - s, s) + np.repeat(st[sel], s)
    return Table(order, vocab_size, keys[sel], s.astype(np.uint8), t[idx].astype(np.uint16 if vocab_size <= 2**16 else np.uint32),
                 np.clip(np.rint(-np.log(q[idx]) * _STEPS), 0, 255).astype(np.uint8))
