"""The engine: speculation changes speed and nothing else, and stops where plain decoding stops."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from conftest import VOCAB, byte_tokenizer, make_reference, make_target
from sakiyomi import core
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters import NgramDrafter
from sakiyomi.engine import Chunk, Engine, Request
from sakiyomi.errors import OptionError, PromptError
from sakiyomi.interfaces import Draft, Target, TargetOutput, always
from sakiyomi.policy import AdaptivePolicy, FixedPolicy, Policy
from sakiyomi.sampling import SamplingParams
from sakiyomi.targets.linear import can_pack

PROMPT = [7, 8, 9, 7, 8, 9, 40, 41, 7, 8]
GREEDY = SamplingParams(max_new_tokens=60)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.95, seed=11)
PENALISED = SamplingParams(
    max_new_tokens=40, temperature=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, seed=5
)

# Every k is run for these, and longer texts; others differ in details, and run some.
EVERY_K = ("llama", "mistral-window")


class Scripted:
    """A drafter whose proposals a function of (ids so far, budget) decides."""

    name = "scripted"
    costs = None
    samples = False

    def __init__(self, propose) -> None:
        self.function = propose

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False):
        return ScriptedSession(self.function, list(prompt))


class ScriptedSession:
    unread = 0

    def __init__(self, propose, ids: list[int]) -> None:
        self.function, self.ids = propose, ids

    def propose(self, budget: int, go_on=always) -> Draft:
        draft = self.function(self.ids, budget)
        assert len(self.ids) > 0
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)


def chain(tokens) -> Draft:
    return Draft(tuple(tokens), None, (0.5,) * len(tokens), "scripted")


def wrong_drafter(seed: int = 0) -> Scripted:
    """Random tokens, random lengths: never right but by luck."""
    source = random.Random(seed)
    return Scripted(lambda ids, budget: chain([source.randrange(VOCAB) for _ in range(source.randint(0, budget))]))


def oracle(answer: Sequence[int], right: float = 1.0, seed: int = 0) -> Scripted:
    """Proposes what will come, each token with some probability of being wrong."""
    whole, source = [*PROMPT, *answer], random.Random(seed)

    def propose(ids: list[int], budget: int) -> Draft:
        tokens = whole[len(ids) : len(ids) + budget]
        return chain([t if source.random() < right else (t + 1) % VOCAB for t in tokens])

    return Scripted(propose)


def branching(answer: Sequence[int], seed: int = 0) -> Scripted:
    """A random tree with the right tokens hidden in random branches, siblings between them."""
    whole, source = [*PROMPT, *answer], random.Random(seed)

    def propose(ids: list[int], budget: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        while len(tokens) < min(2 * budget, 12):
            parent = source.randrange(-1, len(tokens))
            depth = 0 if parent < 0 else depths[parent] + 1
            if depth >= budget:
                continue
            at = len(ids) + depth
            known = whole[at] if at < len(whole) else 0
            tokens.append(known if source.random() < 0.7 else source.randrange(VOCAB))
            parents.append(parent)
            depths.append(depth)
        return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens), "branching")

    return Scripted(propose)


class Whole:
    """A policy that checks all that the first drafter with a guess proposes, branches too."""

    def __init__(self, k: int) -> None:
        self.k = k

    def session(self, sources):
        self.sources = sources
        return self

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        if left < 1:
            return Draft()
        drafts = (source.propose(min(left, self.k)) for source in self.sources)
        return next((draft for draft in drafts if draft), Draft())

    def observe(self, tested) -> None:
        pass


def eager_policy() -> AdaptivePolicy:
    """Rows cost nothing, so that it drafts much."""
    return AdaptivePolicy(ModelCosts(CostTable((1, 2), (1.0, 1.0))))


def request(engine: Engine, prompt, params: SamplingParams, drafter=None, k: int = 0) -> Request:
    return engine.request(prompt, params, [drafter] if drafter else [], FixedPolicy(k) if k else None)


def run(engine: Engine, params: SamplingParams, drafter=None, k: int = 0, prompt=PROMPT) -> list[Chunk]:
    return list(engine.run(request(engine, prompt, params, drafter, k)))


def run_with(engine: Engine, params: SamplingParams, drafters, policy: Policy) -> list[Chunk]:
    return list(engine.run(engine.request(PROMPT, params, drafters, policy)))


def ids(chunks: list[Chunk]) -> list[int]:
    return [token.id for chunk in chunks for token in chunk.tokens]


@pytest.fixture(scope="session")
def engine(llama: Target) -> Engine:
    return Engine(llama, byte_tokenizer())


@pytest.fixture(scope="session", params=["torch", "auto"])
def either_kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=[torch.float32, torch.bfloat16], ids=str)
def family_engine(
    request: pytest.FixtureRequest, family: str, reference: torch.nn.Module, either_kernels: str
) -> Engine:
    if request.param is torch.bfloat16 and "-" in family and family != "mistral-window":
        pytest.skip("bf16 is run for one model of each family")
    target = make_target(reference, request.param, kernels=either_kernels)
    if either_kernels == "auto" or can_pack(request.param):
        assert target.exactness == "bit-exact"
    return Engine(target)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_tokens_are_the_same_with_any_drafter_and_any_k(family_engine, family, params):
    if family not in EVERY_K:
        params = replace(params, max_new_tokens=40)
    plain = ids(run(family_engine, params))
    assert len(plain) == params.max_new_tokens
    # A negative control of the comparison: another seed or prompt does change the text.
    other = ids(run(family_engine, replace(params, max_new_tokens=20), prompt=PROMPT[:-1]))
    assert plain[:20] != other
    drafters = [
        NgramDrafter(max_ngram=3, min_ngram=1),
        wrong_drafter(),
        oracle(plain),
        oracle(plain, right=0.7),
        branching(plain),
    ]
    accepted = 0
    for k in range(9) if family in EVERY_K else (0, 1, 2, 5, 8):
        for drafter in drafters[k % 2 :: 2] if k else drafters[:1]:  # with k = 0 no drafter is asked
            chunks = run(family_engine, params, drafter, k)
            assert ids(chunks) == plain, (drafter.name, k)
            assert all(len(chunk.tokens) <= k + 1 for chunk in chunks)
            accepted += sum(chunk.record.accepted for chunk in chunks)
    assert accepted > params.max_new_tokens
    for policy in (Whole(2), Whole(7)):
        chunks = run_with(family_engine, params, [branching(plain)], policy)
        assert ids(chunks) == plain
        assert any(chunk.record.drafted > chunk.record.depth for chunk in chunks), "no branches were checked"
    adaptive = eager_policy()  # keeps what it learns from one drafter to the next
    for drafter in drafters:
        chunks = run_with(family_engine, params, [drafter], adaptive)
        assert ids(chunks) == plain, drafter.name
    chunks = run_with(family_engine, params, [drafters[0], drafters[2]], eager_policy())
    assert ids(chunks) == plain
    assert any(chunk.record.drafted for chunk in chunks)


def test_seeds_differ_and_repeat(engine):
    texts = [ids(run(engine, SamplingParams(max_new_tokens=20, temperature=1.0, seed=s))) for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_zero_draft_tokens_is_plain_decoding(engine):
    chunks = run(engine, GREEDY, NgramDrafter(), 0)
    assert all(len(chunk.tokens) == 1 and chunk.record.drafted == 0 and chunk.record.drafter == "" for chunk in chunks)


def test_a_right_draft_is_accepted_and_named(engine):
    plain = ids(run(engine, GREEDY))
    chunks = run(engine, GREEDY, oracle(plain), 5)
    assert [len(chunk.tokens) for chunk in chunks] == [6] * 10
    for chunk in chunks:
        assert [token.drafter for token in chunk.tokens] == ["scripted"] * 5 + [None]
        assert chunk.record.accepted == chunk.record.drafted == chunk.record.depth == 5
        assert chunk.record.emitted == 6


def test_wrong_drafts_change_nothing_but_the_work(engine):
    never = Scripted(lambda ids, budget: chain([VOCAB - 1] * budget))
    params = SamplingParams(max_new_tokens=60, logit_bias={VOCAB - 1: -torch.inf})
    plain, drafted = run(engine, params), run(engine, params, never, 4)
    assert ids(plain) == ids(drafted)
    assert len(drafted) == len(plain)
    assert all(chunk.record.accepted == 0 for chunk in drafted)
    assert sum(chunk.record.rows for chunk in drafted) > sum(chunk.record.rows for chunk in plain)


def test_drafts_never_outrun_the_limit(engine):
    budgets = []

    def propose(ids: list[int], budget: int) -> Draft:
        budgets.append(budget)
        return chain([0] * budget)

    chunks = run(engine, SamplingParams(max_new_tokens=4, temperature=1.0), Scripted(propose), 8)
    assert len(ids(chunks)) == 4
    assert budgets[0] == 3
    assert all(budget >= 1 for budget in budgets)


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_stops_inside_a_block_as_plain_decoding_does(engine, k):
    plain = ids(run(engine, GREEDY))
    drafter = oracle(plain)
    for place in range(0, 24, 5):
        stop_id = plain[place]
        first = plain.index(stop_id)
        params = SamplingParams(max_new_tokens=60, stop_token_ids=(stop_id,))
        chunks = run(engine, params, drafter, k)
        assert ids(chunks) == plain[: first + 1]
        assert chunks[-1].finish_reason == "stop"
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize("k", [0, 4])
def test_eos_ends_and_can_be_ignored_or_held_back(llama, k):
    plain = ids(run(Engine(llama), GREEDY))
    eos = plain[10]
    first = plain.index(eos)
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = frozenset([eos])
    engine = Engine(llama, tokenizer)
    ended = run(engine, GREEDY, oracle(plain), k)
    assert (ids(ended), ended[-1].finish_reason) == (plain[: first + 1], "eos")
    ignored = run(engine, SamplingParams(max_new_tokens=60, ignore_eos=True), oracle(plain), k)
    assert (ids(ignored), ignored[-1].finish_reason) == (plain, "length")
    held = SamplingParams(max_new_tokens=60, min_new_tokens=first + 3)
    assert ids(run(engine, held)) == ids(run(engine, held, oracle(plain), k))
    assert eos not in ids(run(engine, held, oracle(plain), k))[: first + 3]


@pytest.mark.parametrize("k", [0, 2, 7])
def test_stop_strings_across_tokens(engine, k):
    """Every token is a byte here, so a stop string of three characters spans three tokens of a block."""
    params = SamplingParams(max_new_tokens=60, logit_bias=dict.fromkeys(range(256, VOCAB), -torch.inf))
    whole = run(engine, params)
    plain, text = ids(whole), "".join(chunk.text for chunk in whole)
    drafter = oracle(plain)
    for place in range(3, 30, 4):
        stop = text[place : place + 3]
        if len(stop.encode()) != 3:
            continue
        at = text.index(stop)
        limited = SamplingParams(max_new_tokens=60, logit_bias=params.logit_bias, stop=(stop, "never there"))
        chunks = run(engine, limited, drafter, k)
        assert "".join(chunk.text for chunk in chunks) == text[:at]
        assert ids(chunks) == plain[: len(ids(chunks))]
        assert chunks[-1].finish_reason == "stop"
        assert ids(chunks) == ids(run(engine, limited)), "the same last token as plain decoding"


@pytest.mark.parametrize("k", [0, 3, 8])
def test_context_limit(llama, k):
    target = make_target(make_reference("llama", num_hidden_layers=2), context_length=32)
    engine = Engine(target)
    chunks = run(engine, GREEDY, wrong_drafter(), k)
    assert len(PROMPT) + len(ids(chunks)) == 32
    assert chunks[-1].finish_reason == "context"
    plain = ids(run(Engine(llama), GREEDY))[:22]
    assert ids(chunks) == plain
    if k:  # more rows in a tree than there is room for, though not in a row
        chunks = run_with(engine, GREEDY, [branching(plain)], Whole(k))
        assert (ids(chunks), chunks[-1].finish_reason) == (plain, "context")
        chunks = run_with(engine, GREEDY, [branching(plain)], eager_policy())
        assert (ids(chunks), chunks[-1].finish_reason) == (plain, "context")


def test_three_sequences_in_a_round_are_three_alone(family_engine):
    cases = [
        (PROMPT, GREEDY, NgramDrafter(min_ngram=1), 3),
        ([3] * 150, SamplingParams(max_new_tokens=25, temperature=0.8, seed=3), wrong_drafter(), 7),
        ([5, 6], SamplingParams(max_new_tokens=40, temperature=1.0, top_k=30, seed=4), None, 0),
    ]
    alone = [ids(run(family_engine, params, drafter, k, prompt)) for prompt, params, drafter, k in cases]
    cases[1] = (*cases[1][:2], wrong_drafter(), 7)
    requests = [request(family_engine, prompt, params, drafter, k) for prompt, params, drafter, k in cases]
    found: list[list[int]] = [[], [], []]
    while any(each.finish_reason is None for each in requests):
        running = [i for i, each in enumerate(requests) if each.finish_reason is None]
        for i, chunk in zip(running, family_engine.round([requests[i] for i in running]), strict=True):
            found[i].extend(token.id for token in chunk.tokens)
    assert found == alone


def test_long_prompts_are_computed_in_bounded_calls(llama):
    calls = []

    class Counting:
        def __getattr__(self, name):
            return getattr(llama, name)

        def forward(self, work, **options):
            calls.append([len(w.tokens) for w in work])
            return llama.forward(work, **options)

    prompt = [i % VOCAB for i in range(300)]
    engine = Engine(Counting())
    requests = [engine.request(prompt, GREEDY), engine.request(prompt[:200], GREEDY)]
    engine.round(requests)
    assert calls == [[128, 128], [128], [44, 72]]
    engine.round(requests)
    assert calls[-1] == [1, 1]


def test_a_cancelled_stream_leaves_the_engine_usable(engine):
    plain = ids(run(engine, GREEDY))
    stream = engine.run(request(engine, PROMPT, GREEDY, oracle(plain), 3))
    next(stream)
    stream.close()
    assert ids(run(engine, GREEDY, oracle(plain), 3)) == plain


def test_one_failing_request_leaves_the_others_alone(engine):
    def explode(ids, logits):
        if len(ids) > len(PROMPT) + 2:
            raise RuntimeError("grammar")
        return logits

    plain = ids(run(engine, GREEDY))
    requests = [
        request(engine, PROMPT, GREEDY, oracle(plain), 2),
        request(engine, PROMPT, SamplingParams(processors=(explode,)), oracle(plain), 4),
    ]
    good, processor = engine.round(requests)
    assert isinstance(good, Chunk)
    assert isinstance(processor, RuntimeError)
    assert requests[1].finish_reason == "error"
    rest = list(engine.run(requests[0]))
    assert ids([good, *rest]) == plain


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (chain([VOCAB]), r"token ids must be ints in 0\.\.319"),
        (chain([-1]), r"token ids must be ints in 0\.\.319"),
        (chain([1.5]), r"token ids must be ints in 0\.\.319"),
        (chain([1] * 4), "4 tokens in a row: at most 3 were asked for"),
        (Draft((1, 2), (-1,), (1.0, 1.0), "scripted"), "gave 1 parents for 2 tokens"),
        (Draft((1, 2), (-1, 1), (1.0, 1.0), "scripted"), "each must be -1 or the index of a token before"),
        (Draft((1, 2), (-2, 0), (1.0, 1.0), "scripted"), "each must be -1 or the index of a token before"),
        (Draft((1, 2), None, (1.0, 0.0), "scripted"), r"must be one in \(0, 1\] for each of 2 tokens"),
        (Draft((1, 2), None, (0.5,), "scripted"), r"must be one in \(0, 1\] for each of 2 tokens"),
    ],
)
def test_what_cannot_be_a_draft_ends_its_drafter_only(engine, draft, message):
    plain = ids(run(engine, GREEDY))
    bad = request(engine, PROMPT, GREEDY, Scripted(lambda ids, budget: draft), 3)
    good = request(engine, PROMPT, GREEDY, oracle(plain), 3)
    first_bad, first = engine.round([bad, good])
    assert re.search(message, first_bad.record.errors[0])
    rest = list(engine.run(bad))
    assert ids([first_bad, *rest]) == plain
    assert not any(chunk.record.errors or chunk.record.drafted for chunk in rest)
    assert ids([first, *engine.run(good)]) == plain


@pytest.mark.parametrize("where", ["session", "propose", "observe"])
def test_a_drafter_that_raises_is_left_out(engine, where):
    """With another one beside it, which goes on; the tokens of the round in which it failed are not lost."""
    plain = ids(run(engine, GREEDY))
    broken = oracle(plain)
    broken.name = "broken"
    make = broken.session

    def fail(*anything):
        raise ZeroDivisionError("a mistake")

    def session(prompt, params, sampled):
        made = make(prompt, params)
        if where != "session":
            calls_that_work = iter([True, True])
            works = getattr(made, where)
            setattr(made, where, lambda *rest: works(*rest) if next(calls_that_work, False) else fail())
        return made

    broken.session = fail if where == "session" else session
    for policy in (FixedPolicy(3), eager_policy()):
        with pytest.warns(RuntimeWarning, match="a drafter failed, the answer goes on without it: broken: ") as warned:
            chunks = run_with(engine, GREEDY, [broken, oracle(plain)], policy)
        assert len(warned) == 1
        assert ids(chunks) == plain
        assert [e for chunk in chunks for e in chunk.record.errors] == ["broken: ZeroDivisionError: a mistake"]
        assert any(chunk.record.drafter == "scripted" for chunk in chunks)


def test_a_drafter_whose_reading_fails_is_left_out(engine):
    class Broken(Scripted):
        samples = False
        name, costs = "broken", ModelCosts(CostTable((1, 2), (0.1, 0.1)))

        def session(self, prompt, params, sampled=False):
            return self

        @property
        def unread(self):
            raise ZeroDivisionError("a mistake")

        def observe(self, tokens):
            pass

    plain = ids(run(engine, GREEDY))
    with pytest.warns(RuntimeWarning, match="broken: ZeroDivisionError"):
        chunks = run_with(engine, GREEDY, [Broken(None)], eager_policy())
    assert ids(chunks) == plain


def test_warnings_as_errors_lose_no_tokens(engine):
    plain = ids(run(engine, GREEDY))
    stream = engine.run(request(engine, PROMPT, GREEDY, Scripted(lambda ids, budget: 1 / 0), 3))
    first = next(stream)
    with pytest.raises(RuntimeWarning, match="a drafter failed"):  # as pytest has it here
        next(stream)
    assert list(first.token_ids) == plain[:1]


@pytest.mark.parametrize("kernels", sorted({"torch", *core.available()[:1]}))
def test_an_error_of_the_target_leaves_requests_as_they_were(kernels, monkeypatch):
    """Whatever fails last: keys and values of the rows have been written by then."""

    def fail(x):
        raise MemoryError

    target = make_target(make_reference("llama", num_hidden_layers=2), kernels=kernels)
    last = (target, "_head") if kernels == "torch" else (core.library, "check")
    engine = Engine(target)
    plain = ids(run(engine, GREEDY))
    for k in (0, 3):
        requests = [request(engine, PROMPT, GREEDY, oracle(plain, 0.7), k) for _ in range(2)]
        first = engine.round(requests)
        with monkeypatch.context() as patch:
            patch.setattr(*last, fail)
            with pytest.raises(MemoryError):
                engine.round(requests)
        for each, chunk in zip(requests, first, strict=True):
            assert ids([chunk, *engine.run(each)]) == plain


def test_a_round_of_nothing(engine):
    assert engine.round([]) == []


def test_broken_logits_end_their_request(llama, monkeypatch):
    """Greedy too: the largest of numbers that are none would be token 0."""
    engine = Engine(llama)
    request = engine.request(PROMPT, GREEDY)
    forward = llama.forward
    with monkeypatch.context() as patch:
        patch.setattr(
            llama, "forward", lambda work, **_: [TargetOutput(out.logits * torch.nan) for out in forward(work)]
        )
        (error,) = engine.round([request])
    assert isinstance(error, OptionError)
    assert "the model's own logits are broken" in str(error)


def test_a_processor_that_adds_tokens_is_named(engine):
    params = SamplingParams(processors=(lambda ids, logits: torch.cat([logits, logits]),))
    (error,) = engine.round([engine.request(PROMPT, params)])
    assert isinstance(error, OptionError)
    assert "one returned (640,), must be (320,)" in str(error)


def test_an_end_outside_the_vocabulary_is_no_end(llama):
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = frozenset([10**9])
    chunks = run(Engine(llama, tokenizer), SamplingParams(max_new_tokens=5, min_new_tokens=2))
    assert len(ids(chunks)) == 5


def test_processors_are_not_called_beyond_the_end(engine):
    plain = ids(run(engine, GREEDY))
    stop_id = plain[5]
    first = plain.index(stop_id)
    seen = []

    def watch(ids, logits):
        seen.append(len(ids) - len(PROMPT))
        return logits

    params = SamplingParams(max_new_tokens=60, stop_token_ids=(stop_id,), processors=(watch,))
    run(engine, params, oracle(plain), 8)
    assert seen == list(range(first + 1))


def test_records_add_up(engine):
    plain = ids(run(engine, GREEDY))
    chunks = run(engine, GREEDY, oracle(plain, right=0.6), 4)
    emitted = 0
    for chunk in chunks:
        record = chunk.record
        assert record.context == (len(PROMPT) + emitted - 1 if emitted else 0)
        emitted += record.emitted
        assert record.emitted == len(chunk.tokens) == record.accepted + 1
        assert record.total_s >= record.draft_s + record.target_s + record.verify_s - 1e-6
        assert min(record.draft_s, record.target_s, record.verify_s) >= 0
    assert emitted == 60


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], PromptError, "prompt: has no tokens"),
        ([1] * 1024, PromptError, "1024 tokens leave no room in the context of 1024"),
        ([VOCAB], PromptError, r"token ids must be in 0\.\.319"),
        ([1.0], PromptError, "token ids must be integers"),
        ([-1], PromptError, r"token ids must be in 0\.\.319"),
    ],
)
def test_requests_that_cannot_run(engine, prompt, error, message):
    with pytest.raises(error, match=message):
        engine.request(prompt, GREEDY, [NgramDrafter()], FixedPolicy(1))


def test_stop_strings_need_a_tokenizer(llama):
    with pytest.raises(OptionError, match="use stop_token_ids"):
        Engine(llama).request(PROMPT, SamplingParams(stop=("x",)))


def test_a_drafter_of_layers_that_the_target_lacks_fails_alone(llama):
    """Before any forward: the round goes on, with the other drafters and the other requests in it."""
    engine = Engine(llama)
    plain = ids(list(engine.run(engine.request(PROMPT, SAMPLED))))
    reader, blind = oracle(plain), oracle(plain)
    reader.hidden_layers, reader.name = (0, 9), "reader"
    requests = [
        engine.request(PROMPT, SAMPLED, [reader, blind], FixedPolicy(3)),
        engine.request(PROMPT, SAMPLED, [blind], FixedPolicy(3)),
    ]
    assert requests[0].hidden_layers == frozenset()
    first = engine.round(requests)
    assert first[0].record.errors == (
        "reader: DrafterError: it reads the states of layers [9], which this target doesn't give",
    )
    assert first[1].record.errors == ()
    for request, chunk in zip(requests, first, strict=True):
        assert [*chunk.token_ids, *ids(list(engine.run(request)))] == plain
        assert chunk.record.accepted
