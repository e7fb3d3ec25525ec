"""Drafting with a model: a smaller one reads ahead, token by token (Leviathan et al. 2211.17192).

A session keeps the draft model's own keys and values in step with the sequence: what the target refused is rolled back,
what it added is computed together with the next draft's first row. Tokens are drawn as the target draws its own, with
the same parameters and the same noise, so that a draft model that agrees with the target proposes the very token that
the target will choose (Gumbel coupling, 2408.07978). Where a sample is wanted, they are drawn with noise of their own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sakiyomi.distribution import Distribution, Ids
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Costs, Draft, GoOn, Target, Work, always
from sakiyomi.sampling import Chooser, Row, SamplingParams, candidates, derived_seed, draft_seed, draw, host, uniform

ALTERNATIVE = 0.05  # an alternative less likely than this isn't worth a row of the target
LEAST = 1e-6  # of confidences, which are above 0


class DraftModel:
    """A target that drafts: what the sessions of one drafter share.

    ``costs``: what its forwards cost, if known. ``eos_ids``: the target's tokens that end a text.
    """

    name = "model"
    samples = True

    def __init__(self, model: Target, costs: Costs | None = None, eos_ids: Collection[int] = ()) -> None:
        self.model = model
        self.costs = costs
        self._eos_ids = frozenset(eos_ids)
        self._warned = False

    def ends(self, params: SamplingParams) -> frozenset[int]:
        """Return the target's tokens after which nothing is worth drafting."""
        return ends(params, self._eos_ids)

    def outgrown(self, length: int) -> None:
        """Warn, once, that a sequence of so many tokens doesn't fit: its draft session proposes nothing from now on."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a sequence of {length} tokens has outgrown the draft model's context of {self.model.context_length}: "
                "nothing is drafted beyond it",
                RuntimeWarning,
                stacklevel=2,
            )


def ends(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens after which nothing is worth drafting."""
    return (frozenset() if params.ignore_eos else eos_ids).union(params.stop_token_ids)


class Reader:
    """The draft model's keys and values for one sequence, in step with a list of its token ids."""

    def __init__(self, shared: DraftModel) -> None:
        self._shared, self._model = shared, shared.model
        self._sequence = shared.model.new_sequence()
        self._held: list[int] = []  # the ids whose keys and values are held; after a failed forward there may be more
        self._ended = False

    def unread(self, ids: Sequence[int]) -> int:
        """Return the number of rows to compute for the logits after ``ids``; 0 where nothing will be drafted."""
        if self._ended or not 0 < len(ids) <= self._model.context_length:
            return 0
        return len(ids) - self._agreed(ids)

    def room(self, ids: Sequence[int]) -> int:
        """Return how many tokens can be drafted after ``ids``: none, for good, once they outgrow the context."""
        room = self._model.context_length - len(ids) + 1  # the last token that is drafted isn't computed
        if room < 1 and not self._ended:
            self._ended = True
            self._held, self._sequence = [], self._model.new_sequence()
            self._shared.outgrown(len(ids))
        return 0 if self._ended or not ids else room

    def read(self, ids: Sequence[int]) -> Row:
        """Return the float32 [vocab_size] logits after ``ids``, computing only what isn't held."""
        agreed = self._agreed(ids)
        self._sequence.truncate(agreed)
        del self._held[agreed:]
        while len(ids) - len(self._held) > self._model.max_rows:
            self._forward(ids[len(self._held) :][: self._model.max_rows], 0)
        return self._forward(ids[len(self._held) :], 1)

    def append(self, token: int) -> Row:
        """Return the logits after one token more."""
        return self._forward([token], 1)

    def _agreed(self, ids: Sequence[int]) -> int:
        """Return how many of ``ids`` are held; never all of them, since the last one's row gives the logits."""
        low, high = 0, min(len(self._held), len(ids) - 1)
        while low < high:  # by halves, so that almost all is compared as slices
            middle = (low + high + 1) // 2
            if self._held[low:middle] == ids[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def _forward(self, tokens: Sequence[int], logit_rows: int) -> Row:
        known = [token if token < self._model.vocab_size else 0 for token in tokens]
        (output,) = self._model.forward([Work(self._sequence, known, None, logit_rows)])
        self._held.extend(tokens)
        return host(output.logits).reshape(-1)


def log_total(logits: npt.NDArray[np.float32]) -> list[float]:
    """Return the log of the sum of the exponentials of each row; no number where there is one that is none.

    In numpy, which has no threads: torch's, on a busy machine, may wait for one another longer than a draft may take.
    """
    largest = logits.max(axis=1)
    with np.errstate(invalid="ignore"):
        sums = np.exp(logits - largest[:, None]).sum(axis=1)
    return [float(each) + math.log(total) for each, total in zip(largest, sums.tolist(), strict=True)]


def likely(
    logits: Row, names: Ids | None, params: SamplingParams, seed: int, position: int, count: int = 1
) -> list[tuple[int, float]]:
    """Return up to ``count`` (index, probability) of what ``params`` would choose from ``logits``, the choice first.

    ``logits``: float32, of the tokens ``names`` (None: of 0, 1, 2, ...), which key the noise of ``seed`` and
    ``position``. The runners-up follow, if they are at least ALTERNATIVE. The probabilities are those after
    temperature, top_k, top_p and min_p, at most 1 and above 0. Nothing for logits that aren't numbers.
    """
    if not np.isfinite(logits.max()):
        return []
    greedy = params.temperature == 0
    kept, z = (None, logits) if greedy else candidates(logits, params)
    if kept is not None:
        names = kept if names is None else names[kept]
    total = log_total(z[None])[0]
    found: list[tuple[int, float]] = []
    left = 1.0
    while True:
        # Two passes of argmax are many times faster than a partition; a runner-up is rarely likely enough for one.
        index = int(z.argmax()) if greedy else draw(z, names, seed, position)
        probability = math.exp(float(z[index]) - total)
        if found and probability < ALTERNATIVE:
            return found
        found.append((index if kept is None else int(kept[index]), min(1.0, max(probability, LEAST))))
        left -= probability
        if len(found) == count or left < ALTERNATIVE:
            return found
        z = z.copy()
        z[index] = -np.inf


@dataclass(frozen=True, slots=True)
class _Choice:
    """A token that may stand at a position, and what it was drawn from, if it is a sample."""

    token: int
    confidence: float
    distribution: Distribution | None = None


class ModelDrafter(DraftModel):
    """Drafts with a model that has the target's tokenizer.

    ``vocab_size``: the target's. Vocabularies may differ by padding: what only the draft model has is never drafted;
    what only the target has (no text holds it) the draft model reads as id 0. Nothing is drafted after ``eos_ids`` and
    a request's ``stop_token_ids``. ``branches``: how many tokens to propose at a position at most; all but the first
    are leaves, and proposed only where they are likely enough. Drafts are drawn after all that the target's logits go
    through too, each on its own prefix, save that a request's processors are called for samples only.
    Raises OptionError unless branches >= 1.
    """

    way = "same"
    prefixes = True

    def __init__(
        self,
        model: Target,
        vocab_size: int,
        *,
        costs: Costs | None = None,
        branches: int = 2,
        eos_ids: Collection[int] = (),
    ) -> None:
        if branches < 1:
            raise OptionError(f"branches={branches}: must be at least 1 (no alternatives)")
        super().__init__(model, costs, eos_ids)
        self.vocab_size = vocab_size
        self.branches = branches

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> ModelSession:
        """Begin a sequence with these token ids."""
        return ModelSession(self, prompt, params, sampled)


class ModelSession:
    """A draft model beside one sequence."""

    def __init__(self, drafter: ModelDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        self._drafter = drafter
        self._sampled = sampled and params.temperature > 0
        self._reader = Reader(drafter)
        self._ends = drafter.ends(params)
        own = params if self._sampled else replace(params, processors=())
        self._chooser = Chooser(own, prompt, drafter.vocab_size, self._ends)
        self._ids = list(prompt)  # the sequence, as the draft model reads it

    @property
    def unread(self) -> int:
        """Rows that the draft model must compute before it can draft."""
        return self._reader.unread(self._ids)

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained. They are computed when the next draft begins."""
        for token in tokens:
            self._chooser.take(token)
        self._ids.extend(tokens)

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return what the draft model would write, at most ``budget`` tokens in a row, with alternatives as leaves.

        ``go_on`` is asked after each token of the main path. An error of the model leaves the session as it was, and is
        raised, but for one after the first token of a sample, which ends the draft.
        """
        start = self._chooser.position
        try:
            return self._propose(budget, go_on, start)
        finally:
            self._chooser.forget(self._chooser.position - start)

    def _propose(self, budget: int, go_on: GoOn, start: int) -> Draft:
        found: list[_Choice] = []
        parents: list[int] = []
        main = following = -1  # where the main path ends: its index in the draft, its id in the draft model
        for depth in range(min(budget, self._reader.room(self._ids))):
            try:
                logits = self._reader.append(following) if depth else self._reader.read(self._ids)
                choices = self._choices(logits, start, len(found)) if np.isfinite(logits.max()) else []
            except OptionError:  # the draft model has none of what is possible here
                choices = []
            except Exception:
                if not (found and self._sampled):
                    raise
                choices = []  # what was drawn is kept; if the error persists, the next draft meets it at once
            if not choices:
                break
            parents.extend([main] * len(choices))
            main = len(found)
            found.extend(choices)
            token = choices[0].token
            next_id = self._in_draft(token)
            self._chooser.take(token)
            if not go_on(choices[0].confidence) or token in self._ends or next_id is None:
                break
            following = next_id
        chain = parents == list(range(-1, len(found) - 1))
        return Draft(
            tuple(each.token for each in found),
            None if chain else tuple(parents),
            tuple(each.confidence for each in found),
            self._drafter.name,
            tuple(each.distribution for each in found if each.distribution) if self._sampled else None,
        )

    def _choices(self, logits: Row, start: int, node: int) -> list[_Choice]:
        """Return what may stand next, in the round that began at ``start``, as draft tokens from ``node`` on."""
        row, share = self._in_target(logits)
        params, count = self._chooser.params, self._drafter.branches
        if self._sampled:
            return _sample(self._chooser.distribution(row), draft_seed(params.seed, start), node, count, share)
        found = likely(self._chooser.processed(row), None, params, params.seed, self._chooser.position, count)
        return [_Choice(token, max(share * confidence, LEAST)) for token, confidence in found]

    def _in_target(self, logits: Row) -> tuple[Row, float]:
        """Return the logits of the target's tokens, and the probability that the draft model gives to all of them."""
        size = self._drafter.vocab_size
        if logits.size < size:
            logits = np.concatenate([logits, np.full(size - logits.size, -np.inf, np.float32)])
        return logits[:size], 1.0

    def _in_draft(self, token: int) -> int | None:
        """Return the draft model's id of a drafted token, None where it has none."""
        return token


def _sample(distribution: Distribution, seed: int, node: int, count: int, share: float) -> list[_Choice]:
    """Return up to ``count`` tokens drawn without replacement (Sequoia, 2402.12374), with what each was drawn from.

    Whether another one is drawn depends on those before it, never on itself.
    """
    choices: list[_Choice] = []
    whole = distribution.total
    while True:
        token = distribution.draw(uniform(derived_seed(seed, node + len(choices))))
        confidence = share * distribution.probability(token) * distribution.total / whole
        choices.append(_Choice(token, min(1.0, max(confidence, LEAST)), distribution))
        if len(choices) == count:
            return choices
        distribution = distribution.without(token)
        if distribution.weights.max() < ALTERNATIVE * whole:
            return choices
