"""Verification is lossless: whatever is drafted, the text has the target's own distribution. Worked out, not sampled.

Every outcome of the drafter's draws and of the verification's dice is followed, with its probability in float64, on
vocabularies of a few tokens; the sum over them is the distribution of the output. Each trap that is known to break it
is a negative control, which must show an error of the size that it is known to have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sakiyomi.distribution import Distribution
from sakiyomi.interfaces import Draft
from sakiyomi.sampling import Chooser, SamplingParams
from sakiyomi.verification import block, rejection

RULES = {"rejection": rejection, "block": block}
PROMPT = (0,)
EXACT = 1e-12


class Script:
    """Chances that are followed one way at a time: each run takes the next combination of outcomes."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, list[float]]] = []  # (outcome, probabilities) of each chance, in order
        self.at = 0

    def chance(self, probabilities: Sequence[float]) -> int:
        """Return the outcome of a chance in this run; outcomes that can't be are never taken."""
        if self.at == len(self.taken):
            self.taken.append((next(i for i, p in enumerate(probabilities) if p > 0), list(probabilities)))
        outcome, known = self.taken[self.at]
        assert known == list(probabilities)
        self.at += 1
        return outcome

    def runs(self):
        """Yield once for each combination; what is asked for in between decides which there are."""
        while True:
            self.at = 0
            yield
            assert self.at == len(self.taken)
            while self.taken:
                outcome, probabilities = self.taken.pop()
                rest = [i for i in range(outcome + 1, len(probabilities)) if probabilities[i] > 0]
                if rest:
                    self.taken.append((rest[0], probabilities))
                    break
            if not self.taken:
                return

    @property
    def probability(self) -> float:
        return float(np.prod([probabilities[outcome] for outcome, probabilities in self.taken]))


class ScriptedDice:
    """Dice that leave what falls to a script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def accepts(self, probability: float, node: int) -> bool:
        probability = min(1.0, float(probability))
        return self.script.chance([1 - probability, probability]) == 1

    def draw(self, distribution: Distribution) -> int:
        weights = distribution.weights.astype(np.float64) / distribution.total
        place = self.script.chance(weights.tolist())
        return place if distribution.ids is None else int(distribution.ids[place])


class Language:
    """A random conditional distribution: float32 logits for every prefix, which both sides may be given."""

    def __init__(self, vocab: int, seed: int, scale: float = 1.5) -> None:
        self.vocab, self.seed, self.scale = vocab, seed, scale

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        noise = np.random.default_rng([self.seed, len(prefix), *prefix]).standard_normal(self.vocab)
        return (noise * self.scale).astype(np.float32)


def law(language: Language, params: SamplingParams, prefix: Sequence[int]) -> np.ndarray:
    """Return the distribution of the token after ``prefix``, which begins with the prompt."""
    chooser = Chooser(params, PROMPT, language.vocab, ())
    for token in prefix[len(PROMPT) :]:
        chooser.take(token)
    return chooser.distribution(language.logits(prefix)).probabilities(language.vocab)


def joint(language: Language, params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of this length."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        laws = {
            (*text, token): probability * p
            for text, probability in laws.items()
            for token, p in enumerate(law(language, params, (*PROMPT, *text)))
            if p > 0
        }
    return laws


def distance(a: dict, b: dict) -> float:
    """Return the total variation between two distributions."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2


Drafting = Callable[[Script, Callable[[Sequence[int]], Distribution]], Draft]


def output_law(
    rule, drafting: Drafting, target: Language, drafter: Language, params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """Return the distribution of the first ``length`` tokens: one round, then plain decoding where it was short."""
    script = Script()
    laws: dict[tuple[int, ...], float] = defaultdict(float)

    def drafts_from(prefix: Sequence[int]) -> Distribution:
        return Distribution(None, law(drafter, params, (*PROMPT, *prefix)))

    for _ in script.runs():
        draft = drafting(script, drafts_from)
        rows = [target.logits(PROMPT)]
        paths: list[tuple[int, ...]] = []
        for i, token in enumerate(draft.tokens):
            parent = i - 1 if draft.parents is None else draft.parents[i]
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            rows.append(target.logits((*PROMPT, *paths[-1])))
        chooser = Chooser(params, PROMPT, target.vocab, ())
        text = [token for token, _ in rule(draft, rows, chooser, ScriptedDice(script))]
        assert chooser._ids == [*PROMPT, *text]
        laws[tuple(text)] += script.probability
    assert abs(sum(laws.values()) - 1) < EXACT
    whole: dict[tuple[int, ...], float] = defaultdict(float)
    for text, probability in laws.items():
        rest = {(): 1.0}
        for _ in range(length - len(text)):
            rest = {
                (*more, token): q * p
                for more, q in rest.items()
                for token, p in enumerate(law(target, params, (*PROMPT, *text, *more)))
                if p > 0
            }
        for more, q in rest.items():
            whole[(*text, *more)[:length]] += probability * q
    return whole


def error(rule, drafting: Drafting, vocab: int, length: int, seed: int, **params) -> float:
    """Return the total variation between the output and the target's own text."""
    settings = SamplingParams(**{"temperature": 1.0, **params})
    target, drafter = Language(vocab, seed), Language(vocab, seed + 1000)
    found = output_law(rule, drafting, target, drafter, settings, length)
    return distance(found, joint(target, settings, length))


def sampled_chain(k: int, stop: Callable[[float], bool] = lambda confidence: False) -> Drafting:
    """Draw up to k tokens; ``stop`` is asked after each has been kept."""

    def drafting(script: Script, drafts_from) -> Draft:
        tokens: list[int] = []
        distributions: list[Distribution] = []
        for _ in range(k):
            q = drafts_from(tokens)
            tokens.append(script.chance(q.probabilities(q.weights.size).tolist()))
            distributions.append(q)
            if stop(q.probability(tokens[-1])):
                break
        return Draft(tuple(tokens), None, (1.0,) * len(tokens), "", tuple(distributions))

    return drafting


def sampled_tree(shape: Sequence[int], *, replacement: bool) -> Drafting:
    """Draw a tree whose nodes at depth i have ``shape[i]`` children each."""

    def drafting(script: Script, drafts_from) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        distributions: list[Distribution] = []
        level: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
        for count in shape:
            following = []
            for node, path in level:
                q = drafts_from(path)
                for _ in range(count):
                    token = script.chance(q.probabilities(q.weights.size).tolist())
                    following.append((len(tokens), (*path, token)))
                    tokens.append(token)
                    parents.append(node)
                    distributions.append(q)
                    if not replacement:
                        q = q.without(token)
                        if not q.total:
                            break
            level = following
        return Draft(tuple(tokens), tuple(parents), (1.0,) * len(tokens), "", tuple(distributions))

    return drafting


def certain(*tokens: int, parents: tuple[int, ...] | None = None) -> Drafting:
    """Propose these tokens, whatever the distribution."""
    one_hots = tuple(Distribution(np.array([token]), np.ones(1)) for token in tokens)
    return lambda script, drafts_from: Draft(tokens, parents, (1.0,) * len(tokens), "", one_hots)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("vocab", "length", "drafting"),
    [
        (3, 2, certain()),
        (5, 2, sampled_chain(1)),
        (4, 3, sampled_chain(2)),
        (3, 4, sampled_chain(3)),
        (3, 4, sampled_chain(3, stop=lambda confidence: confidence < 0.4)),
        (3, 4, sampled_chain(3, stop=lambda confidence: confidence > 0.4)),
        (4, 4, certain(1, 2, 0)),
        (3, 3, certain(0, 1, 2, 2, 0, parents=(-1, -1, 0, 1, 1))),
        (5, 2, sampled_tree((2,), replacement=True)),
        (5, 2, sampled_tree((3,), replacement=False)),
        (3, 2, sampled_tree((3,), replacement=False)),
        (3, 3, sampled_tree((2, 1), replacement=True)),
        (3, 3, sampled_tree((2, 1), replacement=False)),
        (3, 3, sampled_tree((1, 2), replacement=True)),
        (3, 3, sampled_tree((1, 3), replacement=False)),
        (3, 3, sampled_tree((2, 2), replacement=False)),
    ],
    ids=str,
)
def test_the_text_has_the_targets_distribution(rule, vocab, length, drafting):
    for seed in range(4):
        assert error(rule, drafting, vocab, length, seed) < EXACT
