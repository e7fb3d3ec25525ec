"""From logits to a token: parameters, processors, and noise that is keyed by position.

The target draws its own token at every position: the largest of log-probability plus Gumbel noise, where the noise is a
pure function of (seed, position, token). So the text is decided by the target, the prompt, the parameters and the seed,
whatever was drafted and however positions were grouped into forwards. Greedy is the case without noise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sakiyomi.distribution import Distribution
from sakiyomi.errors import OptionError

Row = npt.NDArray[np.float32]  # the logits of one position: [vocab_size]
_TEMPERATURES = (1e-4, 1e6)  # beyond them, logits would leave the range of float32
_LARGEST_BIAS = 1e6
LogitsProcessor = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


def host(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Return logits, of any dtype on any device, as float32 in the processor's memory."""
    rows: npt.NDArray[np.float32] = logits.float().cpu().numpy()
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target chooses its tokens, and when it stops.

    The order is: penalties, ``logit_bias``, ``min_new_tokens``, ``processors``, then temperature, ``top_k``, ``top_p``,
    ``min_p``. ``temperature=0`` is greedy. ``processors`` are called as ``f(ids, logits) -> logits`` with the ids so
    far (prompt included) and a float32 [vocab_size] tensor, and are called once for each token of the output; where
    verification is ``"rejection"`` or ``"block"``, also for tokens that may not become output, so that what they return
    must depend on nothing but their arguments.
    ``min_new_tokens`` holds back ids that end the output, not stop strings. The text ends before a stop string, but
    includes the token of ``stop_token_ids`` that ended it. Raises OptionError for values that can't work.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise OptionError(f"{name}={getattr(self, name)!r}: must be {want}")

        def convert(name: str, into: Callable[[Any], object], want: str) -> None:
            try:
                object.__setattr__(self, name, into(getattr(self, name)))
            except (TypeError, ValueError):
                check(False, name, want)

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("max_new_tokens", "min_new_tokens", "seed", *(["top_k"] if self.top_k is not None else [])):
            convert(name, operator.index, "a whole number")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            convert(name, float, "a number")
        convert("stop", tuple, "a text or several")
        convert("stop_token_ids", lambda ids: tuple(operator.index(each) for each in ids), "token ids")
        convert(
            "logit_bias", lambda bias: {operator.index(k): float(v) for k, v in bias.items()}, "numbers by token id"
        )
        convert("processors", tuple, "a list of functions")
        check(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        low, high = _TEMPERATURES
        check(
            self.temperature == 0 or low <= self.temperature <= high,
            "temperature",
            f"0 (greedy) or between {low:g} and {high:g}",
        )
        check(self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or None for no limit")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 = no limit; for greedy use temperature=0)")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(0 < self.repetition_penalty < math.inf, "repetition_penalty", "a positive number (1 = none)")
        check(math.isfinite(self.presence_penalty), "presence_penalty", "a finite number")
        check(math.isfinite(self.frequency_penalty), "frequency_penalty", "a finite number")
        check(
            all(bias == -math.inf or abs(bias) <= _LARGEST_BIAS for bias in self.logit_bias.values()),
            "logit_bias",
            f"numbers up to {_LARGEST_BIAS:g}, or -inf to forbid a token",
        )
        check(0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", "between 0 and max_new_tokens")
        check(all(isinstance(each, str) and each for each in self.stop), "stop", "non-empty texts")
        check(0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")


_FEW = 1024  # the noise of so few tokens costs less than finding those that can win
_SAMPLED = 128  # one token of so many is in the sample that guesses where a nucleus ends


def _mix64(x: int) -> int:
    """Return 64 well-mixed bits of a 64-bit number (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


DRAFT, ACCEPT, DRAW = 1, 2, 3  # what is left to chance in a round, besides the target's own noise


def draft_seed(seed: int, position: int) -> int:
    """Return the seed of a draft of its own noise, for a round that begins at a position."""
    return derived_seed(seed, position, DRAFT)


def derived_seed(seed: int, *keys: int) -> int:
    """Return a seed of 64 bits for a stream of its own, a pure function of a seed and whole numbers >= 0."""
    for key in keys:
        seed = _mix64(_mix64(seed) ^ key)
    return seed


def uniform(seed: int) -> float:
    """Return a number in 0 <= x < 1, of 53 bits, that is a pure function of the seed."""
    return (_mix64(seed) >> 11) * 2.0**-53


def gumbel_noise(seed: int, position: int, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return standard Gumbel noise for tokens at a position: a pure function of (seed, position, token).

    Adding it to log-probabilities and taking the maximum draws from them (Gumbel 1954).
    """
    return _gumbel(_hash(seed, position, tokens))


_MULTIPLIERS = tuple(map(np.uint32, (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x2C1B3C6D)))
_INVERSES = tuple(np.uint32(pow(int(each), -1, 2**32)) for each in _MULTIPLIERS)


def _keys(seed: int, position: int) -> tuple[np.uint32, np.uint32]:
    key = _mix64(_mix64(seed) ^ position)
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)


def _hash(seed: int, position: int, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """Return 32 bits per token: a mixer (after MurmurHash3's) with two keys from (seed, position) fed in between."""
    first, second = _keys(seed, position)
    h = tokens.astype(np.uint32)
    h *= _MULTIPLIERS[0]
    h += first
    h ^= h >> np.uint32(16)
    h *= _MULTIPLIERS[1]
    h ^= h >> np.uint32(13)
    h += second
    h *= _MULTIPLIERS[2]
    h ^= h >> np.uint32(15)
    h *= _MULTIPLIERS[3]
    h ^= h >> np.uint32(16)
    return h


def _unhash(seed: int, position: int, h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the tokens whose 32 bits are ``h``: each step of ``_hash`` can be undone, the last one first."""
    first, second = _keys(seed, position)
    x: npt.NDArray[np.uint32] = h ^ (h >> np.uint32(16))
    x *= _INVERSES[3]
    x ^= (x >> np.uint32(15)) ^ (x >> np.uint32(30))
    x *= _INVERSES[2]
    x -= second
    x ^= (x >> np.uint32(13)) ^ (x >> np.uint32(26))
    x *= _INVERSES[1]
    x ^= x >> np.uint32(16)
    x -= first
    x *= _INVERSES[0]
    return x


def _gumbel(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    noise: npt.NDArray[np.float64] = -np.log(-np.log((h.astype(np.float64) + 0.5) * 2.0**-32))
    return noise


def candidates(logits: Row, params: SamplingParams) -> tuple[npt.NDArray[np.int64] | None, Row]:
    """Return the token ids that temperature, top_k, top_p and min_p leave (ascending; None: all) and their logits.

    Each limit keeps every token that ties with the last one inside, so that the result doesn't depend on an order.
    """
    z = logits - logits.max()  # the likeliest is at 0
    z *= np.float32(1.0 / params.temperature)
    ids = None
    if params.top_k is not None and params.top_k < z.size:
        inside = _largest(z, params.top_k)
        if inside.size < z.size:
            ids, z = inside, z[inside]
    if params.top_p < 1:
        inside = _nucleus(z, params.top_p)
        ids, z = inside if ids is None else ids[inside], z[inside]
    if params.min_p > 0:
        inside = np.flatnonzero(z >= math.log(params.min_p))
        ids, z = inside if ids is None else ids[inside], z[inside]
    return ids, z


def _largest(z: Row, k: int) -> npt.NDArray[np.int64]:
    """Return where the k largest are in a row of more than k, ascending.

    The row is cut into groups, and the largest of each group is found. The k-th largest of these is reached by at least
    k tokens, and by few others where there are many groups: only these are compared.
    """
    groups = max(1024, 16 * k)
    floor = np.float32(-np.inf)
    if z.size >= 4 * groups:  # else a group is too small for its largest token to be worth finding
        each = z[: z.size // groups * groups].reshape(-1, groups).max(axis=0)
        floor = np.partition(each, -k)[-k]
    likely = np.flatnonzero(z >= floor)
    z = z[likely]
    return likely[np.flatnonzero(z >= np.partition(z, -k)[-k])]


def _nucleus(z: Row, top_p: float) -> npt.NDArray[np.int64]:
    """Return where the smallest set of likeliest tokens is whose probability reaches ``top_p``, ascending.

    Only tokens above a floor are sorted. It's guessed from a sample: what is below shall hold half of the probability
    that can be left out. Where what is above holds too little after all, more is sorted, then everything.
    """
    weights = np.exp(z)
    total = float(weights.sum(dtype=np.float64))
    mass = top_p * total
    sample = np.sort(weights[::_SAMPLED])
    below = np.cumsum(sample, dtype=np.float64) * _SAMPLED
    guess = sample[min(int(np.searchsorted(below, (total - mass) / 2)), sample.size - 1)]
    for floor in (guess, guess / 256, 0):
        likely = np.flatnonzero(weights >= floor)
        inside = weights[likely]
        falling = np.sort(inside)[::-1]
        reached = np.cumsum(falling.astype(np.float64))
        if reached[-1] >= mass:
            last = falling[np.searchsorted(reached, mass)]
            break
    else:  # only by rounding: all that is possible is needed
        last = falling[falling > 0][-1]
    z = z[likely]
    return likely[np.flatnonzero(z >= z[np.flatnonzero(inside >= last)].min())]


class Chooser:
    """The target's own choice of token after token for one sequence, given its logits.

    The state is what the tokens so far say about the next: the ids, and counts of them where penalties need them.
    ``prompt``: ids before the first choice. ``eos_ids``: what ``min_new_tokens`` holds back besides the stop ids.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.params = params
        self._ids = list(prompt)
        self._prompt_length = len(prompt)
        self._vocab_size = vocab_size
        if any(not 0 <= each < vocab_size for each in params.stop_token_ids):
            raise OptionError(f"stop_token_ids={params.stop_token_ids!r}: must be in 0..{vocab_size - 1}")
        self._held_back = [*params.stop_token_ids, *(each for each in eos_ids if 0 <= each < vocab_size)]
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        if self._bias_ids.size and not 0 <= self._bias_ids.min() <= self._bias_ids.max() < vocab_size:
            raise OptionError(f"logit_bias={dict(params.logit_bias)!r}: token ids must be in 0..{vocab_size - 1}")
        self._penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        if self._penalised:
            self._prompt_has = np.zeros(vocab_size, dtype=bool)
            self._prompt_has[self._ids] = True
            self._counts = np.zeros(vocab_size, dtype=np.float32)  # of the output
        self.greedy = (
            params.temperature == 0
            and not self._penalised
            and not params.logit_bias
            and not params.processors
            and params.min_new_tokens == 0
        )

    @property
    def position(self) -> int:
        """The number of tokens before the next choice."""
        return len(self._ids)

    def choose(self, logits: Row) -> int:
        """Return the token that follows, for float32 [vocab_size] logits, and take it.

        Raises OptionError when no token is possible, or processors return what can't be logits.
        """
        params = self.params
        logits = self.processed(logits)
        if params.temperature == 0:
            token = int(logits.argmax())
        else:
            ids, z = candidates(logits, params)
            index = draw(z, ids, params.seed, self.position)
            token = index if ids is None else int(ids[index])
        self.take(token)
        return token

    def distribution(self, logits: Row) -> Distribution:
        """Return the distribution of the token that follows, for float32 [vocab_size] logits; not where greedy.

        Raises OptionError as :meth:`choose` does.
        """
        ids, z = candidates(self.processed(logits), self.params)
        return Distribution(ids, np.exp(z))

    def take(self, token: int) -> None:
        """Go on to the position after a token."""
        self._ids.append(token)
        if self._penalised:
            self._counts[token] += 1

    def forget(self, count: int) -> None:
        """Go back by so many tokens that were taken."""
        if count < 1:
            return
        assert count <= len(self._ids) - self._prompt_length
        if self._penalised:
            for token in self._ids[-count:]:
                self._counts[token] -= 1
        del self._ids[-count:]

    def processed(self, logits: Row) -> Row:
        """Return the logits after penalties, biases and processors. Raises OptionError where no token is possible."""
        params = self.params
        generated = len(self._ids) - self._prompt_length
        if self._penalised or self._bias_ids.size or generated < params.min_new_tokens or params.processors:
            logits = logits.copy()  # the target's own are left alone
        if self._penalised:
            met = self._prompt_has | (self._counts > 0)
            seen = logits[met]
            logits[met] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
            logits -= self._counts * np.float32(params.frequency_penalty)
            logits -= (self._counts > 0) * np.float32(params.presence_penalty)
        if self._bias_ids.size:
            logits[self._bias_ids] += self._bias
        if generated < params.min_new_tokens:
            logits[self._held_back] = -np.inf
        for processor in params.processors:
            logits = processor(self._ids, torch.from_numpy(logits)).float().numpy()
            if logits.shape != (self._vocab_size,):
                raise OptionError(f"processors: one returned {logits.shape}, must be ({self._vocab_size},)")
        check_chosen(logits.max())
        return logits


def check_chosen(logit: np.float32) -> None:
    """Raise OptionError unless the largest logit of a position is a finite number."""
    if not -np.inf < logit < np.inf:
        raise OptionError(
            f"no token can be chosen, the largest logit is {logit}: processors and logit_bias leave none possible, "
            "or the model's own logits are broken"
        )


def draw(z: Row, ids: npt.NDArray[np.int64] | None, seed: int, position: int) -> int:
    """Return the index of the largest ``z + noise``; the lowest index where several tie.

    ``z``: float32 logits of the tokens ``ids`` (None: of 0, 1, 2, ...). In a long row, logarithms are taken only for
    tokens that can win: those near the top, then of those below a ceiling the few whose hash is large enough to beat
    the best from there. The tokens far from the top, most of a row, need hashes so large that it's less work to list
    these and find the tokens that have them than to hash the tokens.
    """
    if z.size <= _FEW:
        return int((z + gumbel_noise(seed, position, np.arange(z.size) if ids is None else ids)).argmax())

    top = z.max()
    high = top - np.float32(4)
    near = np.flatnonzero(z >= high)
    h = _hash(seed, position, near if ids is None else ids[near])
    luckiest = int(h.argmax())  # in a flat row few others are worth a logarithm
    index = int(near[luckiest])
    best = float(z[index]) + float(_gumbel(h[luckiest : luckiest + 1])[0])

    def consider(indices: npt.NDArray[np.int64], h: npt.NDArray[np.uint32], ceiling: np.float32) -> None:
        nonlocal best, index
        able = np.flatnonzero(h >= least_hash(ceiling))
        if able.size:
            indices = indices[able]
            sums = z[indices] + _gumbel(h[able])
            largest = float(sums.max())
            lowest = int(indices[sums == largest].min())
            if largest > best or (largest == best and lowest < index):
                best, index = largest, lowest

    def least_hash(ceiling: np.float32) -> int:  # with a margin of half a hash for rounding
        return max(0, math.ceil(2.0**32 * math.exp(-math.exp(float(ceiling) - best)) - 1))

    consider(near, h, top)

    low = min(high, np.float32(best - 13))
    if low < high:
        middle = np.flatnonzero(z >= low)  # near ones too: to leave them out costs more
        consider(middle, _hash(seed, position, middle if ids is None else ids[middle]), high)

    least = least_hash(low)
    if ids is None and 2**32 - least < z.size:
        h = np.arange(least, 2**32, dtype=np.uint32)
        tokens = _unhash(seed, position, h)
        real = np.flatnonzero(tokens < z.size)
        consider(tokens[real].astype(np.int64), h[real], low)
    else:
        far = np.flatnonzero(z < low)
        consider(far, _hash(seed, position, far if ids is None else ids[far]), low)
    return index
