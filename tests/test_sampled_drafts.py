"""Drafts that are samples, in rounds of the engine with tiny real models: drawn as said, checked whole, rolled back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import VOCAB, byte_tokenizer, make_reference, make_target
from sakiyomi import drafting
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.distribution import Distribution
from sakiyomi.drafters import NgramDrafter, SuffixDrafter
from sakiyomi.drafters.layers import Kernels
from sakiyomi.drafters.medusa import MedusaDrafter, MedusaHead, MedusaHeads
from sakiyomi.drafters.mlp import MlpConfig, MlpDrafter, MlpSpeculator
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.retokenised import CommonDrafter, TextDrafter
from sakiyomi.engine import Chunk, Engine
from sakiyomi.errors import PolicyError
from sakiyomi.interfaces import HEAD_INPUT, Draft, Target, TargetOutput, Work, always
from sakiyomi.policy import AdaptivePolicy, FixedPolicy
from sakiyomi.sampling import Chooser, SamplingParams, derived_seed, uniform
from test_engine import PENALISED, PROMPT, SAMPLED, Scripted, Whole, branching, chain, ids, oracle, wrong_drafter
from test_verification import surprise

COSTS = ModelCosts(CostTable((1, 8), (1e-5, 2e-5)))
METHODS = ("coupled", "rejection", "block")
SAMPLING = ("rejection", "block")
GREEDY = SamplingParams(max_new_tokens=41)
FEW = SamplingParams(temperature=1.0, top_k=3, max_new_tokens=4)  # with few outcomes
SHORT = [7, 8, 9]

sampling = pytest.mark.parametrize("verification", SAMPLING)


@pytest.fixture(scope="module")
def weak() -> Target:
    """A draft model: half of the target."""
    return make_target(make_reference("llama", num_hidden_layers=1), kernels="auto")


@pytest.fixture(scope="module")
def engine(llama: Target) -> Engine:
    return Engine(llama)


class Other:
    """A drafter whose sessions have other parameters; ``said``: what its drafts become before they are proposed."""

    costs = None
    samples = True

    def __init__(self, drafter, said: Callable[[Draft], Draft] = lambda draft: draft, name="model", **changes) -> None:
        self.drafter, self.said, self.name, self.changes = drafter, said, name, changes

    def session(self, prompt, params, sampled):
        session = self.drafter.session(prompt, replace(params, **self.changes), sampled)
        propose = session.propose
        session.propose = lambda *asked: self.said(replace(propose(*asked), drafter=self.name))
        return session


class Sampler:
    """A drafter whose samples a function of (ids so far, budget, go_on) makes."""

    costs = None
    samples = True

    def __init__(self, propose, name: str = "sampler") -> None:
        self.function, self.name = propose, name

    def session(self, prompt, params, sampled):
        known = list(prompt)
        return SimpleNamespace(
            unread=0,
            sampled=sampled,
            propose=lambda budget, go_on=always: self.function(known, budget, go_on),
            observe=known.extend,
        )


def near(model: Target, branches: int = 1, **options) -> Other:
    """A draft model that is nearly right: the target at another temperature."""
    return Other(ModelDrafter(model, VOCAB, branches=branches), **{"temperature": 0.5, **options})


def flatter(draft: Draft) -> Draft:
    """What a drafter says that has its own temperature wrong."""
    said = tuple(Distribution(q.ids, q.weights.astype(float) ** 0.1) for q in draft.distributions or ())
    return replace(draft, distributions=said)


def run(engine: Engine, params, drafters, policy, verification, prompt=PROMPT) -> list[Chunk]:
    return list(engine.run(engine.request(prompt, params, drafters, policy, verification)))


class NoCosts:
    """A forward takes a second, whatever its rows; nothing is learned."""

    branch_s = 0.0

    def seconds(self, rows: int, context: int, sequences: int = 1) -> float:
        return 1.0

    def further(self, rows: int, context: int, most: int) -> list[float]:
        return [0.0] * (most + 1)

    def observe(self, rows: int, context: int, seconds: float) -> None:
        pass


@pytest.fixture
def adaptive(monkeypatch) -> Callable[[], AdaptivePolicy]:
    """Makes adaptive policies that decide alike in every run: they see a clock of their own."""
    ticks = iter(range(10**9))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-4)
    for module in ("drafting", "engine", "policy"):
        monkeypatch.setattr(f"sakiyomi.{module}.time", clock)
    return lambda: AdaptivePolicy(NoCosts())


# Tokens that are those of plain decoding


@pytest.mark.parametrize("verification", METHODS)
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_greedy_is_plain_decoding(llama, weak, verification, k):
    """Protects greedy: no method draws anything there, with stops inside drafts, penalties and biases."""
    plain = ids(run(Engine(llama), GREEDY, [], None, "coupled"))
    eos = byte_tokenizer()
    eos.eos_ids = frozenset([plain[16]])
    biased = replace(GREEDY, logit_bias={plain[0]: -5.0, 5: 3.0, plain[3]: -torch.inf})
    cases = [
        (Engine(llama), GREEDY),
        (Engine(llama), replace(PENALISED, temperature=0.0)),
        (Engine(llama), biased),
        (Engine(llama), replace(GREEDY, stop_token_ids=(plain[11],))),
        (Engine(llama, eos), GREEDY),
        (Engine(llama, eos), replace(GREEDY, min_new_tokens=25)),
    ]
    answers = []
    for engine, params in cases:
        answer = ids(run(engine, params, [], None, verification))
        answers.append(answer)
        for model, branches, policy in [(llama, 1, FixedPolicy), (weak, 2, Whole), (llama, 2, Whole)]:
            chunks = run(
                engine, params, [ModelDrafter(model, VOCAB, branches=branches)], policy(k) if k else None, verification
            )
            assert ids(chunks) == answer
            assert sum(chunk.record.accepted for chunk in chunks) > 0 or model is weak or not k
        chunks = run(engine, params, [branching(answer)], Whole(k), verification)
        assert ids(chunks) == answer
    assert len({tuple(answer) for answer in answers}) == len(cases), "the cases differ"


@pytest.mark.parametrize("verification", METHODS)
@pytest.mark.parametrize("params", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_drafts_that_are_no_samples_change_nothing(engine, llama, verification, params):
    """Protects one-hot drafts: verified as coupled, token by token those of plain decoding, whatever they claim."""
    plain = ids(run(engine, params, [], None, verification))
    assert plain != ids(run(engine, replace(params, seed=99), [], None, verification))
    uniform_law = Distribution(None, np.ones(VOCAB))

    def claiming(known: list[int], budget: int) -> Draft:
        return replace(chain([known[-1]] * budget), distributions=(uniform_law,) * budget)

    suffix = SuffixDrafter()
    text = TextDrafter(llama, byte_tokenizer(), byte_tokenizer(), VOCAB)
    assert not text.samples
    drafters = [NgramDrafter(min_ngram=1), suffix, wrong_drafter(), oracle(plain, 0.7), branching(plain), text]
    for drafter in [*drafters, Scripted(claiming)]:
        for policy in (FixedPolicy(1), FixedPolicy(4), Whole(5)):
            assert ids(run(engine, params, [drafter], policy, verification)) == plain, drafter.name
    for policy in (None, FixedPolicy(3)):  # no rounds with drafts
        never = Sampler(lambda known, budget, go_on: Draft(drafter="sampler"))
        assert ids(run(engine, params, [never], policy, verification)) == plain


# The target's distribution


def joint(target: Target, params: SamplingParams, length: int, drawn: Sequence[int] = ()) -> dict:
    """Return the target's own probability of each continuation of SHORT and what was drawn."""
    if len(drawn) == length:
        return {tuple(drawn): 1.0}
    (output,) = target.forward([Work(target.new_sequence(), [*SHORT, *drawn])])
    chooser = Chooser(params, SHORT, VOCAB, ())
    for token in drawn:
        chooser.take(token)
    law = chooser.distribution(output.logits[-1].float().numpy()).probabilities(VOCAB)
    return {
        text: float(law[token]) * p
        for token in law.nonzero()[0].tolist()
        for text, p in joint(target, params, length, [*drawn, token]).items()
    }


@sampling
@pytest.mark.parametrize("way", ["chain", "tree", "adaptive", "weak", "two"])
def test_the_answers_have_the_targets_distribution(engine, llama, weak, verification, way, adaptive):
    """Protects the whole way from draft to answer: chi-square of three tokens, and one that must fail."""
    law = joint(llama, FEW, 3)

    def sampled_by(drafters, policy, seeds: int) -> tuple[float, int]:
        counts: dict[tuple[int, ...], int] = defaultdict(int)
        accepted = 0
        for seed in range(seeds):
            chunks = run(engine, replace(FEW, seed=seed), drafters, policy, verification, SHORT)
            counts[tuple(ids(chunks)[:3])] += 1
            accepted += sum(chunk.record.accepted for chunk in chunks)
        return surprise(counts, law), accepted

    makers = {
        "chain": lambda: FixedPolicy(2),
        "tree": lambda: Whole(3),
        "adaptive": adaptive,
        "weak": lambda: Whole(2),
        "two": lambda: FixedPolicy(3),
    }
    branches = 2 if way in ("tree", "weak") else 1
    drafters = [ModelDrafter(weak, VOCAB, branches=branches)] if way == "weak" else [near(llama, branches)]
    if way == "two":
        drafters = [NgramDrafter(min_ngram=1), near(llama, name="other")]
    found, accepted = sampled_by(drafters, makers[way](), 700)
    assert found < 3.5
    assert accepted > (20 if way == "weak" else 300)
    if way in ("chain", "tree", "adaptive"):
        lying, _ = sampled_by([near(llama, branches, said=flatter)], makers[way](), 400)
        assert lying > 6, "a control"


@sampling
@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_a_trained_drafter_does_not_tell_a_policy_what_comes_next(engine, llama, verification, kind):
    """Protects the choice between its draft and a sample, which may depend on how sure it is of what it drew."""
    law = joint(llama, FEW, 2)
    first = max(joint(llama, FEW, 1).items(), key=lambda each: each[1])[0]
    (output,) = llama.forward([Work(llama.new_sequence(), [*SHORT, *first], None, 1)], hidden_layers=(HEAD_INPUT,))
    logits, state = output.logits[-1].float(), output.hidden[0][len(SHORT) - 1].float()
    likeliest = logits.topk(3).values.softmax(0)[:2]
    how = Kernels.find("fp32", "torch")
    if kind == "medusa":
        head = MedusaHead((), logits[:, None] * (state / state.square().sum()))
        drafter = MedusaDrafter(MedusaHeads([head], None, how), costs=COSTS)
    else:
        weights = {name: torch.ones(VOCAB if name[0] in "eh" else 1, 1) for name in ("emb.0.weight", "head.0.weight")}
        weights |= {"proj.0.weight": torch.zeros(1, len(state)), "ln.0.weight": torch.zeros(1)}
        weights["ln.0.bias"] = torch.ones(1)
        weights["head.0.weight"] = logits[:, None] / torch.nn.functional.gelu(torch.ones(()))
        drafter = MlpDrafter(MlpSpeculator(MlpConfig(len(state), 1, VOCAB, 1), weights, how), costs=COSTS)

    class Choosy(Whole):
        def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
            trained, sampler = self.sources
            if left < 1 or not context:  # there are no states yet
                return Draft()
            draft = drafting.first_path(trained.propose(1))
            chosen.append(draft.confidences[0] > float(likeliest.mean()))
            return draft if chosen[-1] else sampler.propose(1)

    def sampled(made) -> float:
        counts: dict[tuple[int, ...], int] = defaultdict(int)
        for seed in range(700):
            params = replace(FEW, seed=seed, max_new_tokens=3)  # room for a draft of the second: two are compared
            chunks = run(engine, params, [made, near(llama)], Choosy(1), verification, SHORT)
            counts[tuple(ids(chunks)[:2])] += 1
        return surprise(counts, law)

    chosen: list[bool] = []
    assert sampled(drafter) < 3.5
    assert sum(chosen) > 100
    assert sampled(Coupled(drafter)) > 6, "a control"


class Coupled:
    """A drafter that draws with the target's noise whatever it is told."""

    samples = False

    def __init__(self, drafter) -> None:
        self.name, self.costs, self.hidden_layers = drafter.name, drafter.costs, drafter.hidden_layers
        self.session = lambda prompt, params, sampled: drafter.session(prompt, params, False)


@sampling
def test_runs_repeat(engine, llama, verification):
    """Protects reproducibility: the seed says all, drafts included, and it is another text than the plain one."""
    answers = []
    for seed in range(5):
        params = SamplingParams(temperature=1.0, max_new_tokens=30, seed=seed)
        twice = [run(engine, params, [near(llama, 2)], policy, verification) for policy in (Whole(3), Whole(3))]
        assert ids(twice[0]) == ids(twice[1])
        assert [c.record.accepted for c in twice[0]] == [c.record.accepted for c in twice[1]]
        answers.extend([ids(twice[0]), ids(run(engine, params, [], None, verification))])
    assert len({tuple(answer) for answer in answers}) == len(answers)


# What is drawn is checked


def uniform_sample(known: list[int], budget: int, go_on=always, seed: int = 0) -> Draft:
    """A chain of samples from all tokens alike."""
    law = Distribution(None, np.ones(VOCAB, np.float32))
    tokens = tuple(law.draw(uniform(derived_seed(seed, len(known), i))) for i in range(budget))
    return Draft(tokens, None, (1 / VOCAB,) * budget, "sampler", (law,) * budget)


class Spoiling(Whole):
    """A policy that does something to the drafts that it got."""

    def __init__(self, spoil: Callable[[list[Draft]], Draft]) -> None:
        super().__init__(3)
        self.spoil = spoil

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        return self.spoil([source.propose(min(left, self.k)) for source in self.sources]) if left > 0 else Draft()


SPOILS = {
    "dropped": lambda drafts: Draft(),
    "swapped": lambda drafts: drafts[1],
    "changed": lambda drafts: replace(drafts[0], tokens=drafts[0].tokens[::-1]),
    "cut": lambda drafts: drafting._part(drafts[0], [0]),
    "claims dropped": lambda drafts: replace(drafts[0], distributions=None),
}


@sampling
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_policy_that_leaves_out_samples_ends_its_request_only(engine, llama, verification, spoil):
    """Protects the enforcement: no policy can spoil the distribution, and others in the round don't notice."""
    params = replace(FEW, max_new_tokens=20)
    alone = ids(run(engine, params, [near(llama)], FixedPolicy(2), verification))
    function = SPOILS[spoil]
    bad = engine.request(PROMPT, params, [Sampler(uniform_sample), oracle([1, 2, 3])], Spoiling(function), verification)
    good = engine.request(PROMPT, params, [near(llama)], FixedPolicy(2), verification)
    failure, first = engine.round([bad, good])
    assert type(failure) is PolicyError
    assert "sampler" in str(failure)
    assert (bad.finish_reason, bad.generated) == ("error", 0)
    assert isinstance(first, Chunk)
    assert ids([first, *engine.run(good)]) == alone
    plain = ids(run(engine, params, [], None, "coupled"))  # where nothing is drawn, policies may do as they like
    drafters = [Sampler(uniform_sample), oracle([1, 2, 3])]
    assert ids(run(engine, params, drafters, Spoiling(function), "coupled")) == plain


def test_the_first_path_of_a_sample_is_one():
    """Protects ``first_path``: what is cut from a sample is cut without a look at it."""
    law = Distribution(None, np.ones(VOCAB))
    tree = Draft((1, 2, 3, 4), (-1, -1, 0, 2), (1.0,) * 4, "sampler", (law, law.without(1), law, law))
    path = drafting.first_path(tree)
    assert (path.tokens, path.parents, path.distributions) == ((1, 3, 4), None, (law, law, law))


@sampling
def test_our_policies_check_all_that_is_drawn(engine, llama, weak, verification, adaptive):
    """Protects FixedPolicy and AdaptivePolicy: with several drafters, samples or not, none is drawn in vain."""
    suffix = SuffixDrafter()
    for drafters in (
        [NgramDrafter(min_ngram=1), near(llama, 2)],
        [suffix, near(weak, 3)],
        [near(weak, name="weak"), near(llama, 2, name="other")],
        [Sampler(uniform_sample), near(llama, 2), NgramDrafter()],
    ):
        for policy in (FixedPolicy(1), FixedPolicy(4), adaptive()):
            drafted: set[str] = set()
            for seed in range(6):
                params = SamplingParams(temperature=0.8, top_k=20, max_new_tokens=30, seed=seed)
                chunks = run(engine, params, drafters, policy, verification, [1, 2, 3, 4] * 3)
                assert len(ids(chunks)) == 30
                drafted |= {chunk.record.drafter for chunk in chunks}
            assert drafted & {"sampler", "model", "weak", "other"}


def dense(count: int, vocab: int = VOCAB) -> tuple[Distribution, ...]:
    return (Distribution(None, np.ones(vocab)),) * count


LIARS = {
    "no distributions": (lambda k, go_on: chain([1] * k), "0 distributions for 3 sampled"),
    "too few": (lambda k, go_on: replace(chain([1] * k), distributions=dense(k - 1)), "2 distributions for 3 sampled"),
    "too many": (lambda k, go_on: replace(chain([1] * k), distributions=dense(k + 1)), "4 distributions for 3 sampled"),
    "another size": (lambda k, go_on: replace(chain([1] * k), distributions=dense(k, 7)), "can't have drawn token 1"),
    "impossible": (
        lambda k, go_on: replace(chain([1] * k), distributions=(dense(1)[0].without(1),) * k),
        "can't have drawn token 1",
    ),
    "not among its ids": (
        lambda k, go_on: replace(chain([1] * k), distributions=(Distribution(np.array([0, 2]), np.ones(2)),) * k),
        "can't have drawn token 1",
    ),
    "ids beyond": (
        lambda k, go_on: replace(chain([1] * k), distributions=(Distribution(np.array([1, VOCAB]), np.ones(2)),) * k),
        "can't have drawn token 1",
    ),
    "nothing": (
        lambda k, go_on: replace(chain([1] * k), distributions=(Distribution(None, np.zeros(VOCAB)),) * k),
        "can't have drawn token 1",
    ),
    "not numbers": (
        lambda k, go_on: replace(chain([1] * k), distributions=(Distribution(None, np.full(VOCAB, np.nan)),) * k),
        "can't have drawn token 1",
    ),
    "not distributions": (lambda k, go_on: replace(chain([1] * k), distributions=(0.5,) * k), "AttributeError"),
    "dropped after a look": (
        lambda k, go_on: (go_on(0.9), go_on(0.1)) and replace(chain([1]), distributions=dense(1)),
        "asked whether to go on after 2 tokens, and kept 1 of them",
    ),
    "dropped all": (lambda k, go_on: go_on(0.1) and Draft(drafter="sampler"), "after 1 tokens, and kept 0"),
}


@sampling
@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("beside", [False, True])
def test_drafters_that_cannot_have_drawn_that_are_left_out(engine, llama, verification, liar, beside):
    """Protects the checks of samples: the answer goes on, as a plain one or with the other drafter."""
    propose, message = LIARS[liar]
    liars = Sampler(lambda known, budget, go_on: propose(budget, go_on))
    params = replace(FEW, max_new_tokens=12)
    others = [near(llama)] if beside else []
    with pytest.warns(RuntimeWarning, match="a drafter failed, the answer goes on without it: sampler") as warned:
        chunks = run(engine, params, [liars, *others], FixedPolicy(3), verification)
    assert len(warned) == 1
    assert message in chunks[0].record.errors[0]
    assert not any(chunk.record.errors for chunk in chunks[1:])
    assert {chunk.record.drafter for chunk in chunks} - {""} == ({"model"} if beside else set())
    assert ids(chunks) == ids(run(engine, params, others, FixedPolicy(3), verification))


# Memory


@sampling
@pytest.mark.parametrize(
    ("length", "context", "k"), [(10, 1024, 3), (300, 1024, 4), (10, 24, 5), (3, 1024, 0), (140, 150, 7)]
)
def test_the_targets_memory_is_that_of_its_text(verification, length, context, k):
    """Protects the roll-back after each round: what follows is what a fresh sequence gives, up to the context's end."""
    target = make_target(make_reference("llama", num_hidden_layers=2), context_length=context, kernels="auto")
    other = make_target(make_reference("llama", num_hidden_layers=2), kernels="auto")
    engine = Engine(target)
    prompt = [i * 7 % VOCAB for i in range(length)]
    params = SamplingParams(temperature=1.0, top_k=5, max_new_tokens=60, seed=3)
    stood = refused = 0
    for branches, policy in [(1, FixedPolicy), (2, Whole), (3, Whole)]:
        drafter = near(other, branches)
        request = engine.request(prompt, params, [drafter], policy(k) if k else None, verification)
        while request.finish_reason is None:
            (chunk,) = engine.round([request])
            stood += chunk.record.accepted
            refused += chunk.record.drafted - chunk.record.accepted
            assert request.ids[len(prompt) :][-len(chunk.tokens) :] == list(chunk.token_ids)
            assert request.sequence.length == len(request.ids) - 1 or request.finish_reason
            assert request.chooser.position == len(request.ids) or request.finish_reason
            if request.finish_reason is None and request.generated % 3 == 0:
                held = request.sequence.length
                (again,) = target.forward([Work(request.sequence, request.ids[held:])])
                request.sequence.truncate(held)
                fresh = target.new_sequence()
                for at in range(0, len(request.ids), target.max_rows):
                    (whole,) = target.forward([Work(fresh, request.ids[at : at + target.max_rows])])
                assert torch.allclose(again.logits, whole.logits, rtol=1e-4, atol=1e-4)
                if target.exactness == "bit-exact":
                    assert torch.equal(again.logits, whole.logits)
        ended = ("context", context) if context < length + 60 else ("length", length + 60)
        assert (request.finish_reason, len(request.ids)) == ended
    assert min(stood, refused) > 0 or k == 0


# The draft model's samples


def pure(known: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.cos(torch.arange(logits.numel()) * 2.0 + sum(known))


THROUGH = {
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {40: 3.0, 7: -torch.inf}},
    "limits": {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "min_new_tokens": {"min_new_tokens": 4, "stop_token_ids": (41,)},
    "processors": {"processors": (pure,)},
}
THROUGH["all"] = {name: value for each in THROUGH.values() for name, value in each.items()}


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("way", ["same", "common"])
def test_samples_go_through_all_that_the_targets_do(weak, through, way):
    """Protects the draft's own prefix: each reported distribution is a Chooser's, fed by hand with the path before."""
    bias = {
        **(dict.fromkeys(range(94, 256), -torch.inf) if way == "common" else {}),
        **THROUGH[through].get("logit_bias", {}),
    }
    params = SamplingParams(temperature=0.9, seed=5, **{**THROUGH[through], "logit_bias": bias})
    tokenizer = byte_tokenizer()
    eos = tuple(tokenizer.eos_ids)
    if way == "same":
        drafter = ModelDrafter(weak, VOCAB, eos_ids=eos)
    else:
        drafter = CommonDrafter(weak, tokenizer, tokenizer, VOCAB)
    session = drafter.session(PROMPT, params, True)
    assert drafter.samples
    written = list(PROMPT)
    differs = siblings = 0
    for _ in range(8):
        draft = session.propose(4)
        assert session._chooser.position == len(written)
        parents = draft.parents or range(-1, len(draft) - 1)
        paths: dict[int, list[int]] = {-1: []}
        before: dict[int, list[int]] = defaultdict(list)
        for i, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
            (output,) = weak.forward([Work(weak.new_sequence(), [*written, *paths[parent]])])
            row = output.logits[-1].float().numpy()
            chooser = Chooser(params, PROMPT, VOCAB, eos)
            for each in (*written[len(PROMPT) :], *paths[parent]):
                chooser.take(each)
            expected = whole = chooser.distribution(row)
            for sibling in before[parent]:
                expected = expected.without(sibling)
                siblings += 1
            found = draft.distributions[i].probabilities(VOCAB)
            assert np.allclose(found, expected.probabilities(VOCAB), rtol=1e-3, atol=1e-9)
            assert math.isclose(draft.confidences[i], whole.probability(token), rel_tol=1e-3)
            bare = Chooser(SamplingParams(temperature=0.9), PROMPT, VOCAB, ()).distribution(row)
            differs += np.abs(bare.probabilities(VOCAB) - whole.probabilities(VOCAB)).sum() > 1e-3
            before[parent].append(token)
            paths[i] = [*paths[parent], token]
        gained = [*paths[len(draft) - 1][:1], 40]
        session.observe(gained)
        written += gained
    assert differs > 2, "it goes through something"
    assert siblings > 3


def test_a_draft_that_fails_leaves_its_session_as_it_was(weak):
    """Protects the roll-back of the chooser where the model or ``go_on`` raises, and what was drawn till then."""
    params = SamplingParams(temperature=0.9, seed=5, **THROUGH["all"])

    class Failing:
        after = 10**9

        def __getattr__(self, name):
            return getattr(weak, name)

        def forward(self, work, **options):
            self.after -= 1
            if self.after < 0:
                raise MemoryError
            return weak.forward(work, **options)

    model = Failing()
    drafter = ModelDrafter(model, VOCAB)
    session, written = drafter.session(PROMPT, params, True), list(PROMPT)
    for turn in range(6):
        fresh = drafter.session(PROMPT, params, True)
        fresh.observe(written[len(PROMPT) :])
        whole = fresh.propose(4)
        model.after = 0
        with pytest.raises(MemoryError):
            session.propose(4)
        model.after = 1 + turn % 3
        part = session.propose(4)
        assert 0 < len(part) < len(whole)
        assert part.tokens == whole.tokens[: len(part)]
        model.after = 10**9
        answers = iter([True] * (turn % 3))
        with pytest.raises(StopIteration):
            session.propose(4, lambda confidence, answers=answers: next(answers))
        fresh = drafter.session(PROMPT, params, True)
        fresh.observe(written[len(PROMPT) :])
        draft, expected = session.propose(4), fresh.propose(4)
        assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
        for found, q in zip(draft.distributions, expected.distributions, strict=True):
            assert np.array_equal(found.probabilities(VOCAB), q.probabilities(VOCAB))
        session.observe([draft.tokens[0], 3])
        written += [draft.tokens[0], 3]


def excess(drafts: Sequence[tuple[int, Distribution]]) -> float:
    """Return the largest excess of a token's count over the sum of its probabilities, in standard deviations."""
    counts, means, variances = np.zeros(VOCAB), np.zeros(VOCAB), np.zeros(VOCAB)
    for token, distribution in drafts:
        q = distribution.probabilities(VOCAB)
        counts[token] += 1
        means += q
        variances += q * (1 - q)
    tested = variances > 4
    assert tested.sum() > 3
    return float(np.abs(counts - means)[tested].__truediv__(np.sqrt(variances[tested])).max())


def by_place(model: Target, params: SamplingParams, way: str, said: Callable[[Draft], Draft] = lambda draft: draft):
    """Return (token, distribution) of drafts with many seeds: of first tokens, their siblings, and second tokens."""
    tokenizer = byte_tokenizer()
    if way == "same":
        drafter = ModelDrafter(model, VOCAB, branches=3)
    else:
        drafter = CommonDrafter(model, tokenizer, tokenizer, VOCAB, branches=3)
    places: dict[str, list[tuple[int, Distribution]]] = defaultdict(list)
    for seed in range(1200):
        draft = said(drafter.session(SHORT, replace(params, seed=seed), True).propose(2))
        parents = draft.parents or range(-1, len(draft) - 1)
        met: set[int] = set()
        for i, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
            name = "first" if parent < 0 else "second"
            places[name + (" sibling" if parent in met else "")].append((token, draft.distributions[i]))
            met.add(parent)
    return places


@pytest.mark.parametrize("way", ["same", "common"])
def test_samples_are_drawn_from_what_they_are_said_to(weak, way):
    """Protects the draft model's draws: counts are what the distributions sum to, siblings' too; lies are seen."""
    params = SamplingParams(temperature=1.2, top_k=12)
    places = by_place(weak, params, way)
    assert set(places) == {"first", "first sibling", "second", "second sibling"}
    for name, drafts in places.items():
        assert len(drafts) > 300
        assert excess(drafts) < 4.5, name

    def likeliest(draft: Draft) -> Draft:
        tokens = tuple(int(q.probabilities(VOCAB).argmax()) for q in draft.distributions)
        return replace(draft, tokens=tokens)

    for lie in (flatter, likeliest):
        for name, drafts in by_place(weak, params, way, lie).items():
            assert excess(drafts) > 6, (name, "a control")
    for name, drafts in places.items():
        kept = [(token, q) for token, q in drafts if q.probability(token) > 0.15]
        assert excess(kept) > 6, (name, "a control")


class Table:
    """A target with the same distribution everywhere."""

    max_rows, exactness = 64, "bit-exact"

    def __init__(self, p, context=99):
        self.logits, self.vocab_size, self.context_length = torch.log(torch.tensor(p)), len(p), context

    class Memory:
        length = 0

        def truncate(self, n):
            self.length = n

        def keep(self, n, rows):
            self.length = n + len(rows)

    def new_sequence(self):
        return self.Memory()

    def forward(self, work, **options):
        for w in work:
            w.sequence.length += len(w.tokens)
        return [TargetOutput(self.logits.repeat(w.logit_rows, 1)) for w in work]


def counts(target, drafter, policy, verification, place=0, seeds=1500, **params):
    found = defaultdict(int)
    for seed in range(seeds):
        request = Engine(target).request(
            [0], SamplingParams(temperature=1.0, seed=seed, **params), [drafter], policy(), verification
        )
        found[(ids(list(Engine(target).run(request)))[place],)] += 1
    return found


def law(p):
    return {(i,): x for i, x in enumerate(p)}


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize(
    ("policy", "context", "place"), [(lambda: Whole(1), 3, 0), (lambda: AdaptivePolicy(NoCosts()), 4, 1)]
)
def test_siblings_at_the_end_of_the_context(verification, policy, context, place):
    """What the context has no room for is left out for its place, not for what was drawn: 0.18 of total variation."""
    p, q = [0.05, 0.5, 0.45], [0.90, 0.06, 0.04]
    found = counts(
        Table(p, context), ModelDrafter(Table(q), 3, branches=3), policy, verification, place, max_new_tokens=9
    )
    assert surprise(found, law(p)) < 4


def grammar(known, logits):
    """After a first token 1, only token 3, which the draft model lacks."""
    if known[-1] == 1 and len(known) == 2:
        allowed = torch.full_like(logits, -torch.inf)
        allowed[3] = 0
        return logits + allowed
    return logits


@pytest.mark.filterwarnings("ignore:a drafter failed")
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_draft_is_not_dropped_because_of_what_it_led_to(verification):
    """A position where the draft model has nothing to offer ends the draft, and keeps what was drawn before it."""
    p, q = [0.2, 0.5, 0.2, 0.1], [0.25, 0.5, 0.25]
    found = counts(
        Table(p),
        ModelDrafter(Table(q), 4, branches=1),
        lambda: FixedPolicy(2),
        verification,
        max_new_tokens=3,
        processors=(grammar,),
    )
    assert surprise(found, law(p)) < 4


@pytest.mark.parametrize("way", ["same", "common"])
def test_where_nothing_can_be_drafted_the_drafter_goes_on_later(way):
    """A mask, or a token that a processor writes in, must not end the drafter for the rest of the answer."""

    def forced(known, logits):
        logits = torch.full_like(logits, -torch.inf) if len(known) == 13 else logits
        if len(known) == 13:
            logits[300] = 0.0
        return logits

    target, small = Table([1 / 320] * 320), Table([1 / 200] * 200)
    tokenizer = byte_tokenizer()
    drafter = ModelDrafter(small, 320) if way == "same" else CommonDrafter(small, tokenizer, tokenizer, 320)
    masked = (lambda known, logits: logits + forced(known, torch.zeros_like(logits))) if way == "same" else forced
    params = SamplingParams(temperature=1.0, max_new_tokens=20, processors=(masked,))
    request = Engine(target).request([1] * 10, params, [drafter], FixedPolicy(2), "rejection")
    records = [chunk.record for chunk in Engine(target).run(request)]  # warns, which is an error here
    assert all(record.drafted for record in records[-4:-2])


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_policy_that_draws_twice_and_checks_the_shorter(verification):
    """Two samples in one round are a choice between them."""

    class Twice(Whole):
        def draft(self, left, context, rows, sequences):
            (source,) = self.sources
            if left < 2:
                return Draft()
            draft = source.propose(2)
            return source.propose(1) if draft.tokens[1] == 0 else draft

    p, q = [0.5, 0.5], [0.5, 0.5]
    with pytest.raises(PolicyError):
        counts(Table(p), ModelDrafter(Table(q), 2, branches=1), lambda: Twice(2), verification, 1, 50, max_new_tokens=3)


def test_what_is_no_distribution_is_told_apart():
    good = Distribution(np.array([1, 4]), np.array([0.5, 0.0]))
    assert good.fits(5)
    assert Distribution(None, np.ones(5, np.float32)).fits(5)
    for ids_, weights in (
        ([1, 4], [0.5, -0.1]),
        ([4, 1], [0.5, 0.5]),
        ([1, 1], [0.5, 0.5]),
        ([1.0, 4.0], [0.5, 0.5]),
        ([1, 5], [0.5, 0.5]),
        ([-1, 4], [0.5, 0.5]),
        ([1, 4], [0.5]),
        ([1, 4], [0.0, 0.0]),
        ([1, 4], [np.nan, 0.5]),
        ([1, 4], [np.inf, 0.5]),
        (None, [0.5] * 4),
    ):
        assert not Distribution(None if ids_ is None else np.array(ids_), np.array(weights)).fits(5), (ids_, weights)


@pytest.mark.parametrize("verification", METHODS)
def test_a_grammar_with_nothing_after_its_end_is_no_error(engine, llama, verification):
    """Block looks ahead, but never at what follows the last token of a text."""

    def grammar(known: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(logits, -torch.inf)
        if 5 not in known[3:]:
            allowed[3:10] = 0.2 * logits[3:10]
        return allowed

    for seed in range(20):
        params = SamplingParams(temperature=1.0, stop_token_ids=(5,), processors=(grammar,), seed=seed)
        chunks = run(engine, params, [ModelDrafter(llama, VOCAB)], FixedPolicy(3), verification, [1, 2, 4])
        assert chunks[-1].finish_reason == "stop"


def test_processors_see_drafts_only_where_samples_need_them(llama, weak):
    """Coupled, a request's processors are called once for each token of the output, and with nothing else."""
    for verification, once in (("coupled", True), ("rejection", False)):
        seen: list[tuple[int, ...]] = []

        def note(known: Sequence[int], logits: torch.Tensor, seen: list = seen) -> torch.Tensor:
            seen.append(tuple(known))
            return logits

        params = SamplingParams(temperature=1.0, max_new_tokens=20, processors=(note,), seed=2)
        run(Engine(llama), params, [ModelDrafter(weak, VOCAB)], FixedPolicy(3), verification)
        assert (list(map(len, seen)) == list(range(len(PROMPT), len(PROMPT) + 20))) == once


def test_drafters_take_noise_of_their_own_only_beside_one_that_samples(engine, llama, weak):
    """With the target's own, texts stand more often; beside a sampler they would tell a policy what comes next."""
    texts = byte_tokenizer()
    params = replace(FEW, max_new_tokens=30)
    asked: list[bool] = []

    class Text(TextDrafter):
        def session(self, prompt, params, sampled=False):
            asked.append(sampled)
            return super().session(prompt, params, sampled)

    text = Text(llama, texts, texts, VOCAB)
    for drafters, verification in (
        ([text], "rejection"),
        ([text], "coupled"),
        ([text, ModelDrafter(weak, VOCAB)], "coupled"),
        ([text, ModelDrafter(weak, VOCAB)], "rejection"),
    ):
        run(engine, params, drafters, FixedPolicy(2), verification)
    assert asked == [False, False, False, True]
    ours, own = (
        [text.session(PROMPT, replace(params, seed=seed), sampled).propose(3).tokens for seed in range(30)]
        for sampled in (False, True)
    )
    assert ours != own
    assert [tokens[0] for tokens in ours] == [
        ids(run(engine, replace(params, seed=seed, max_new_tokens=1), [], None, "coupled"))[0] for seed in range(30)
    ]


def test_no_sample_is_no_reason_to_leave_out_other_drafts(engine, llama):
    """An empty draft of a drafter that samples is none: the adaptive policy takes the other one."""
    plain = ids(run(engine, SAMPLED, [], None, "rejection"))
    silent = Sampler(lambda known, budget, go_on: Draft((), None, (), "sampler", ()))
    for policy in (AdaptivePolicy(NoCosts()), FixedPolicy(3)):
        chunks = run(engine, SAMPLED, [silent, oracle(plain)], policy, "rejection")
        assert ids(chunks) == plain
        assert sum(chunk.record.accepted for chunk in chunks) > 10


def test_a_policy_that_fails_at_observing_ends_its_request_only(engine):
    class Fails(Whole):
        def observe(self, tested) -> None:
            raise ZeroDivisionError

    plain = ids(run(engine, SAMPLED, [], None, "coupled"))
    requests = [engine.request(PROMPT, SAMPLED, [oracle(plain)], policy) for policy in (Fails(2), Whole(2))]
    failed, first = engine.round(requests)
    assert isinstance(failed, ZeroDivisionError)
    assert requests[0].finish_reason == "error"
    assert [*first.token_ids, *ids(list(engine.run(requests[1])))] == plain
