"""Encoder-decoder models: the tokens are transformers' own, with any drafter, for any input, however many at once.

T5 (relative positions) and BART (learned ones) are trained on copying with a few tokens replaced, so that what is
accepted says something; Marian and Whisper have random weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import sakiyomi
from conftest import byte_tokenizer
from sakiyomi import core
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters import NgramDrafter, SuffixDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.preceded import Preceded
from sakiyomi.engine import Chunk, Engine, Request
from sakiyomi.errors import CapacityError, OptionError, PromptError, UnsupportedModelError
from sakiyomi.interfaces import Draft, Drafter, Target, Work, always
from sakiyomi.policy import AdaptivePolicy, FixedPolicy, Policy
from sakiyomi.sampling import SamplingParams

transformers = pytest.importorskip("transformers")

from sakiyomi.targets import seq2seq  # noqa: E402
from sakiyomi.targets.seq2seq import CONTEXT_LENGTH, Conditioned, Seq2SeqTarget  # noqa: E402

VOCAB, START, EOS = 68, 0, 1
SPECIAL = {"pad_token_id": 0, "eos_token_id": EOS, "decoder_start_token_id": START, "forced_eos_token_id": None}
GREEDY = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.8, seed=5)
HOT = SamplingParams(max_new_tokens=30, temperature=1.5, top_p=0.98, seed=6, ignore_eos=True)


def bart_sizes(width: int, layers: int) -> dict[str, object]:
    sides = {"layers": layers, "attention_heads": 4, "ffn_dim": 2 * width}
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    return {"vocab_size": VOCAB, "d_model": width, "dropout": 0.0, "init_std": 0.1, **both, **SPECIAL}


def make_model(kind: str, *, width: int = 64, layers: int = 2, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = bart_sizes(width, layers)
    if kind == "t5":
        sizes = {"vocab_size": VOCAB, "d_model": width, "d_kv": 16, "d_ff": 2 * width, "num_layers": layers}
        options = {"num_heads": 4, "dropout_rate": 0.0, "tie_word_embeddings": False, **sizes, **SPECIAL, **changes}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**options))
    elif kind == "bart":
        config = transformers.BartConfig(**{**sizes, "bos_token_id": 2, "max_position_embeddings": 64, **changes})
        model = transformers.BartForConditionalGeneration(config)
    elif kind == "marian":
        model = transformers.MarianMTModel(
            transformers.MarianConfig(**{**sizes, "max_position_embeddings": 64, **changes})
        )
    else:
        audio = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 48, "bos_token_id": 2}
        model = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**{**sizes, **audio, **changes})
        )
    return model.eval()


def examples(source: torch.Generator, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and answers, [count, length + 1]: at every place one of three tokens, to copy; some are replaced.

    Every place has tokens of its own, so that a small model soon knows where it is.
    """
    place, choice = torch.arange(length), torch.randint(3, (count, length), generator=source)
    tokens = 4 + 3 * place + choice
    answers = torch.where((choice == 2) & (place % 4 == 0), tokens - 1, tokens)
    eos = torch.full((count, 1), EOS)
    return torch.cat([tokens, eos], 1), torch.cat([answers, eos], 1)


def trained(kind: str, steps: int, **sizes: int) -> torch.nn.Module:
    model, source = make_model(kind, **sizes).train(), torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        length = int(torch.randint(14, 21, (1,), generator=source))
        inputs, answers = examples(source, 32, length)
        model(input_ids=inputs, labels=answers).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
    return model.eval()


@pytest.fixture(scope="session")
def t5() -> Seq2SeqTarget:
    return Seq2SeqTarget(trained("t5", 180))


@pytest.fixture(scope="session")
def bart() -> Seq2SeqTarget:
    return Seq2SeqTarget(trained("bart", 110))


@pytest.fixture(scope="session")
def sibling() -> Seq2SeqTarget:
    """A smaller model for the same task."""
    return Seq2SeqTarget(trained("bart", 120, width=32, layers=1))


@pytest.fixture(scope="session")
def marian() -> Seq2SeqTarget:
    return Seq2SeqTarget(make_model("marian"))


@pytest.fixture(scope="session")
def whisper() -> Seq2SeqTarget:
    return Seq2SeqTarget(make_model("whisper"))


@pytest.fixture(params=["t5", "bart"])
def copier(request: pytest.FixtureRequest) -> Seq2SeqTarget:
    return request.getfixturevalue(request.param)


KINDS = ["t5", "bart", "marian", "whisper"]


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest) -> Seq2SeqTarget:
    return request.getfixturevalue(request.param)


SOURCES, ANSWERS = (each.tolist() for each in examples(torch.Generator().manual_seed(9), 3, 15))


def inputs_of(target: Seq2SeqTarget, index: int = 0) -> dict[str, torch.Tensor]:
    if target.model.config.model_type == "whisper":
        generator = torch.Generator().manual_seed(index)
        return {"input_features": 3 * torch.randn(1, 8, 40, generator=generator)}
    return {"input_ids": torch.tensor([SOURCES[index]])}


def given(target: Seq2SeqTarget, index: int = 0) -> Conditioned:
    return target.given(**inputs_of(target, index))


@torch.inference_mode()
def alone(target: Seq2SeqTarget, index: int, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of all of a decoder's rows, computed by the module, encoder included, without a cache."""
    inputs = inputs_of(target, index)
    return target.model(**inputs, decoder_input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def engine_of(target: Target) -> Engine:
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = frozenset([EOS])
    return Engine(target, tokenizer)


def request(target: Target, params: SamplingParams, drafters: Sequence[Drafter] = (), policy=None) -> Request:
    return engine_of(target).request([START], params, drafters, policy)


def run(target: Target, params: SamplingParams, drafters: Sequence[Drafter] = (), policy=None) -> list[Chunk]:
    return list(engine_of(target).run(request(target, params, drafters, policy)))


def ids(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def free() -> AdaptivePolicy:
    """A policy to which rows cost nothing, so that it drafts much."""
    return AdaptivePolicy(ModelCosts(CostTable((1, 2), (1.0, 1.0))))


class Scripted:
    """A drafter whose proposals a function of (ids so far, budget) decides."""

    name, costs, samples, unread = "scripted", None, False, 0

    def __init__(self, propose: Callable[[list[int], int], Draft]) -> None:
        self.function, self.ids = propose, []

    def session(self, prompt, params, sampled=False):
        made = Scripted(self.function)
        made.ids = list(prompt)
        return made

    def propose(self, budget, go_on=always):
        return self.function(self.ids, budget)

    def observe(self, tokens):
        self.ids.extend(tokens)


class Whole:
    """A policy that checks all that its drafter proposes, branches too."""

    def session(self, sources):
        self.source = sources[0]
        return self

    def draft(self, left, context, rows, sequences):
        return self.source.propose(min(left, 4)) if left > 0 else Draft()

    def observe(self, checked):
        pass


def branching(answer: Sequence[int]) -> Scripted:
    """Proposes trees: the right tokens between wrong siblings, which go on as the right ones do."""

    def propose(held: list[int], budget: int) -> Draft:
        done = len(held) - 1
        tokens, parents, right = [], [], -1
        for depth, token in enumerate(answer[done : done + budget], 1):
            wrong = len(tokens)
            tokens += [(token + 3) % VOCAB, token]
            parents += [right, right]
            right = wrong + 1
            if depth < budget:
                tokens.append((token + 6) % VOCAB)
                parents.append(wrong)
        return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens), "scripted")

    return Scripted(propose)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# The target


def test_what_a_target_says_of_itself(target):
    conditioned = given(target)
    limits = {"t5": CONTEXT_LENGTH, "bart": 64, "marian": 64, "whisper": 48}
    assert conditioned.context_length == limits[target.model.config.model_type]
    assert (conditioned.vocab_size, conditioned.max_rows) == (VOCAB, 128)
    assert (conditioned.dtype, conditioned.device) == (torch.float32, torch.device("cpu"))
    assert (conditioned.kernels, conditioned.weight_format) == ("transformers", "fp32")
    assert conditioned.decoder_start == target.decoder_start == (START,)


def test_pieces_are_the_whole_at_any_offset(target):
    text = [START, *ANSWERS[1], *ANSWERS[2], *ANSWERS[0]][:40]
    conditioned = given(target)
    sequence, found = conditioned.new_sequence(), []
    for size in (1, 1, 7, 1, 12, 3, 15):
        rows = text[sequence.length :][:size]
        found.append(conditioned.forward([Work(sequence, rows, None, len(rows))])[0].logits)
    assert sequence.length == 40
    close(torch.cat(found), alone(target, 0, text))


def test_only_the_logits_asked_for(target):
    conditioned = given(target)
    sequence = conditioned.new_sequence()
    assert conditioned.forward([Work(sequence, [START, 5, 6], None, 0)])[0].logits.shape == (0, VOCAB)
    (two,) = conditioned.forward([Work(sequence, [7, 8, 9], None, 2)])
    close(two.logits, alone(target, 0, [START, 5, 6, 7, 8, 9])[-2:])


def test_rolling_back_leaves_no_trace(target):
    conditioned = given(target)
    sequence = conditioned.new_sequence()
    conditioned.forward([Work(sequence, [START, *ANSWERS[0][:10]])])
    conditioned.forward([Work(sequence, [9] * 8)])
    sequence.truncate(6)
    text = [START, *ANSWERS[0][:5], *ANSWERS[1][5:15]]
    (found,) = conditioned.forward([Work(sequence, text[6:], None, 10)])
    close(found.logits, alone(target, 0, text)[6:])


@pytest.mark.parametrize("kept", [[0, 2, 4], [0, 1], [5], []])
def test_a_tree_and_what_is_kept_of_it(target, kept):
    parents = [-1, 0, 0, 1, 2, -1, 5]  # paths 0 1 3, 0 2 4, 5 6
    conditioned = given(target)
    sequence = conditioned.new_sequence()
    held, tokens = [START, *ANSWERS[0][:6]], [10, 20, 30, 40, 50, 60, 11]
    conditioned.forward([Work(sequence, held)])
    (found,) = conditioned.forward([Work(sequence, tokens, parents, 7)])
    assert sequence.length == len(held) + 7
    for row in range(7):
        path, at = [], row
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        close(found.logits[row], alone(target, 0, [*held, *path])[-1])
    sequence.keep(len(held), kept)
    text = [*held, *(tokens[row] for row in kept), 13, 14]
    (found,) = conditioned.forward([Work(sequence, [13, 14], None, 2)])
    close(found.logits, alone(target, 0, text)[-2:])


def test_inputs_in_one_forward_stay_apart(target):
    conditioned = [given(target, i) for i in range(3)]
    sequences = [each.new_sequence() for each in conditioned]
    texts = [[START, *ANSWERS[i]][: 6 + i] for i in (2, 0, 1)]
    first = conditioned[0].forward([Work(s, text[:4]) for s, text in zip(sequences, texts, strict=True)])
    rest = [Work(s, text[4:], None, len(text) - 4) for s, text in zip(sequences, texts, strict=True)]
    for i, (one, other) in enumerate(zip(first, conditioned[2].forward(rest), strict=True)):
        close(torch.cat([one.logits, other.logits]), alone(target, i, texts[i])[3:])
    assert not torch.allclose(alone(target, 0, texts[0]), alone(target, 1, texts[0]), atol=1e-3), "inputs do matter"


def test_the_encoder_and_cross_attention_run_once(bart, monkeypatch):
    calls = []
    model = bart.model
    watched = {"encoder": model.model.encoder, "cross": model.model.decoder.layers[0].encoder_attn.k_proj}
    hooks = [module.register_forward_hook(lambda *_, name=name: calls.append(name)) for name, module in watched.items()]
    conditioned = given(bart)
    run(conditioned, GREEDY, [NgramDrafter()], FixedPolicy(3))
    run(conditioned, GREEDY)
    for hook in hooks:
        hook.remove()
    assert calls == ["encoder", "cross"]


def test_ways_to_give_an_input(bart):
    text = [START, 5, 9]
    expected = alone(bart, 0, text)

    def logits(conditioned: Conditioned) -> torch.Tensor:
        return conditioned.forward([Work(conditioned.new_sequence(), text, None, 3)])[0].logits

    close(logits(bart.given(input_ids=SOURCES[0])), expected)
    close(logits(bart.given(input_ids=SOURCES[0], attention_mask=[1] * 16)), expected)
    padded = {"input_ids": [*SOURCES[0], 0, 0, 0], "attention_mask": [1] * 16 + [0] * 3}
    close(logits(bart.given(**padded)), expected)
    with torch.no_grad():
        outputs = bart.model.get_encoder()(**{name: torch.tensor([value]) for name, value in padded.items()})
    mask = torch.tensor([padded["attention_mask"]])
    for ready in (outputs, outputs.to_tuple(), outputs.last_hidden_state):
        close(logits(bart.given(encoder_outputs=ready, attention_mask=mask)), expected)
        assert not torch.allclose(logits(bart.given(encoder_outputs=ready)), expected, atol=1e-3), "the mask matters"


def test_speech_in_a_lower_precision():
    target = Seq2SeqTarget(make_model("whisper").to(torch.bfloat16))
    assert (target.dtype, target.weight_format) == (torch.bfloat16, "bf16")
    assert ids(run(given(target), GREEDY))


def test_the_module_is_never_changed(t5):
    before = {name: tensor.clone() for name, tensor in t5.model.state_dict().items()}
    modules = list(t5.model.modules())
    run(given(t5), SAMPLED, [NgramDrafter()], FixedPolicy(4))
    assert list(t5.model.modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in t5.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in t5.model.parameters())


def test_exactness_is_what_was_tested(t5, monkeypatch):
    compute = Seq2SeqTarget.compute
    with monkeypatch.context() as leaky:  # negative control: bits that depend on the number of rows
        leaky.setattr(Seq2SeqTarget, "compute", lambda *args: (x := compute(*args)) * (1 + 1e-5 * x.shape[0]))
        assert given(Seq2SeqTarget(t5.model)).exactness == "numerics"
    monkeypatch.setattr(seq2seq, "rows_are_invariant", lambda conditioned, sequence: sequence.length < 100)
    assert given(Seq2SeqTarget(t5.model)).exactness == "numerics"
    monkeypatch.setattr(seq2seq, "rows_are_invariant", lambda conditioned, sequence: True)
    exact = Seq2SeqTarget(t5.model)
    assert given(exact).exactness == "bit-exact"
    monkeypatch.setattr(exact, "_threads", torch.get_num_threads() + 1)
    assert given(exact).exactness == "numerics"


# Text


def reference(target: Seq2SeqTarget, index: int, count: int) -> list[int]:
    """Return what greedy decoding by hand says, all of it computed anew for every token."""
    text = [START]
    while len(text) <= count and text[-1] != EOS:
        text.append(int(alone(target, index, text)[-1].argmax()))
    return text[1:]


@pytest.mark.parametrize("index", [0, 1])
def test_greedy_tokens_are_those_of_transformers(target, index):
    found = ids(run(given(target, index), GREEDY))
    assert found == reference(target, index, GREEDY.max_new_tokens)
    if target.model.config.model_type != "whisper":  # its generate() adds rules of its own
        inputs = inputs_of(target, index)
        generated = target.model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=30)
        assert found == generated[0, 1:].tolist()


def test_the_models_have_learned_their_task(copier):
    for index, answer in enumerate(ANSWERS):
        chunks = run(given(copier, index), GREEDY)
        assert ids(chunks) == answer
        assert chunks[-1].finish_reason == "eos"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, HOT], ids=["greedy", "sampled", "hot"])
def test_tokens_are_the_same_with_any_drafter(target, sibling, params):
    conditioned = given(target)
    plain = ids(run(conditioned, params))
    assert len(plain) > 3
    found = []
    drafters: list[Drafter] = [NgramDrafter(), branching(plain)]
    if target.model.config.model_type != "whisper":
        drafters += [Preceded(NgramDrafter(), SOURCES[0]), ModelDrafter(given(sibling), VOCAB)]
    if core.available():
        drafters += [SuffixDrafter(), Preceded(SuffixDrafter(), SOURCES[0])]
    for drafter in drafters:
        policies: list[Policy] = [FixedPolicy(1), FixedPolicy(4), free()]
        if isinstance(drafter, Scripted):
            policies.append(Whole())
        for policy in policies:
            chunks = run(conditioned, params, [drafter], policy)
            assert ids(chunks) == plain, (drafter.name, policy)
            found.append(sum(chunk.record.accepted for chunk in chunks))
    assert sum(found) > 0
    if params is not GREEDY:
        assert plain != ids(run(conditioned, SamplingParams(max_new_tokens=30, temperature=1.5, seed=8)))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_input_is_where_the_answer_is(copier, sibling, params):
    """Lookups that see the input draft what is copied; those that don't find nothing. A smaller model drafts too."""

    def per_call(make: Callable[[int], Drafter]) -> float:
        tokens = calls = 0
        for index in range(3):
            chunks = run(given(copier, index), params, [make(index)], FixedPolicy(4))
            tokens, calls = tokens + len(ids(chunks)), calls + len(chunks)
        return tokens / calls

    assert per_call(lambda index: NgramDrafter()) < 1.2
    assert per_call(lambda index: Preceded(NgramDrafter(), SOURCES[index])) > 1.5
    if core.available():
        assert per_call(lambda index: Preceded(SuffixDrafter(), SOURCES[index])) > 1.5
    assert per_call(lambda index: ModelDrafter(given(sibling, index), VOCAB)) > 1.25
    assert per_call(lambda index: ModelDrafter(given(copier, index), VOCAB)) > 3.5


def test_requests_of_several_inputs_in_a_round_are_each_alone(copier):
    cases = [(0, GREEDY, 4), (1, SAMPLED, 1), (2, HOT, 0), (0, HOT, 4)]

    def make(index: int, params: SamplingParams, k: int) -> Request:
        drafter = Preceded(NgramDrafter(), SOURCES[index])
        return request(given(copier, index), params, [drafter] if k else (), FixedPolicy(k) if k else None)

    alone_ = [ids(run(given(copier, index), params)) for index, params, _ in cases]
    requests = [make(*case) for case in cases]
    engine, found = engine_of(given(copier)), [[] for _ in cases]
    while running := [i for i, each in enumerate(requests) if each.finish_reason is None]:
        for i, chunk in zip(running, engine.round([requests[i] for i in running]), strict=True):
            found[i] += chunk.token_ids
    assert found == alone_


@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_end_inside_a_block(copier, k):
    """Drafts that run on beyond the end: nothing comes after it."""
    answer = ANSWERS[0]
    eager = Scripted(lambda held, budget: Draft(tuple([*answer, 9, 9, 9, 9][len(held) - 1 :][:budget])))
    chunks = run(given(copier), GREEDY, [eager], FixedPolicy(k))
    assert ids(chunks) == answer
    assert chunks[-1].finish_reason == "eos"


@pytest.mark.parametrize("k", [0, 1, 8])
def test_the_context_ends_the_text(target, k):
    whole = given(target)
    plain = ids(run(whole, SamplingParams(max_new_tokens=30, ignore_eos=True)))
    short = given(Seq2SeqTarget(target.model, context_length=12))
    drafter = branching(plain)
    policy = {0: None, 1: FixedPolicy(1), 8: Whole()}[k]
    chunks = run(short, SamplingParams(max_new_tokens=30, ignore_eos=True), [drafter] if k else (), policy)
    assert ids(chunks) == plain[:11]
    assert chunks[-1].finish_reason == "context"


@pytest.mark.parametrize("kind", KINDS[1:])
def test_to_the_last_position_of_the_model(request, kind):
    target = request.getfixturevalue(kind)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    chunks = run(given(target), params)
    assert 1 + len(ids(chunks)) == target.context_length
    assert ids(run(given(target), params, [branching(ids(chunks))], Whole())) == ids(chunks)


# What can go wrong


def test_nothing_is_computed_beyond_the_context(target):
    conditioned = given(Seq2SeqTarget(target.model, context_length=8))
    sequence = conditioned.new_sequence()
    conditioned.forward([Work(sequence, [START] * 6)])
    with pytest.raises(CapacityError, match="a sequence of 9 tokens: the context holds 8"):
        conditioned.forward([Work(sequence, [5, 6, 7])])
    assert sequence.length == 6
    with pytest.raises(PromptError, match="8 tokens leave no room in the context of 8"):
        Engine(conditioned).request([START] * 8, GREEDY)


@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1]], ids=["chain", "tree"])
def test_a_forward_that_fails_leaves_sequences_as_they_were(target, parents, monkeypatch):
    """Whichever sequence it fails for, before cross-attention's keys are there and after."""
    for warm in (False, True):
        conditioned = [given(target, i) for i in range(2)]
        sequences = [each.new_sequence() for each in conditioned]
        held = [START, 5, 6] if warm else []
        if warm:
            conditioned[0].forward([Work(sequence, held) for sequence in sequences])
        work = [Work(sequence, [7, 8, 9, 10], parents, 4) for sequence in sequences]
        per_sequence = 1 if parents is None else 2
        head = target.model.get_output_embeddings()
        for after in range(2 * per_sequence):
            calls = []

            def fail(*anything, calls=calls, after=after):
                calls.append(1)
                if len(calls) > after:
                    raise MemoryError

            hook = head.register_forward_hook(fail)
            with pytest.raises(MemoryError):
                conditioned[0].forward(work)
            hook.remove()
            assert [sequence.length for sequence in sequences] == [len(held)] * 2
        found = conditioned[0].forward([Work(sequence, [7, 8], None, 2) for sequence in sequences])
        for i in range(2):
            close(found[i].logits, alone(target, i, [*held, 7, 8])[len(held) :])


def test_a_half_filled_cross_attention_is_filled_anew(bart, monkeypatch):
    def run_out(layer, keys, values, *anything, **more):
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        raise MemoryError

    conditioned = given(bart)
    work = [Work(conditioned.new_sequence(), [START, 5], None, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(transformers.cache_utils.DynamicLayer, "update", run_out)
        with pytest.raises(MemoryError):
            conditioned.forward(work)
    close(conditioned.forward(work)[0].logits, alone(bart, 0, [START, 5]))


def test_models_that_are_something_else():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no encoder: an encoder-decoder model"):
        Seq2SeqTarget(transformers.GPT2LMHeadModel(config).eval())
    with pytest.raises(UnsupportedModelError, match="T5Model has no language-model head"):
        Seq2SeqTarget(transformers.T5Model(make_model("t5").config).eval())
    with pytest.raises(OptionError, match=r"is in training mode.*call model\.eval\(\)"):
        Seq2SeqTarget(make_model("t5").train())


def test_models_that_work_in_another_way(monkeypatch):
    """Those that can't read several rows after a cache, and those that would read them wrongly."""
    width = {"hidden_size": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCAB}
    layers = {f"num_{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.ProphetNetConfig(**width, **layers, max_position_embeddings=64)
    with pytest.raises(UnsupportedModelError, match="can't be run with a cache: AssertionError: At the moment"):
        Seq2SeqTarget(transformers.ProphetNetForConditionalGeneration(config).eval())
    model = make_model("bart")
    positions = model.model.decoder.embed_positions
    forward = positions.forward
    monkeypatch.setattr(positions, "forward", lambda ids, length=0, position_ids=None: forward(ids, 0))
    with pytest.raises(UnsupportedModelError, match="other logits with a cache than without"):
        Seq2SeqTarget(model)


def test_what_the_encoder_does_not_take(bart, whisper):
    with pytest.raises(OptionError, match="input_features: BartEncoder takes input_ids, attention_mask, "):
        bart.given(input_features=torch.zeros(1, 8, 40))
    with pytest.raises(OptionError, match="input_ids: WhisperEncoder takes input_features"):
        whisper.given(input_ids=[1, 2])
    with pytest.raises(OptionError, match="no input: BartEncoder takes"):
        bart.given(attention_mask=[1, 1])
    with pytest.raises(OptionError, match="input_ids: 2 inputs; give them one by one"):
        bart.given(input_ids=torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(OptionError, match="input_ids: not beside encoder_outputs"):
        bart.given(input_ids=[1], encoder_outputs=torch.zeros(1, 3, 64))
    conditioned = given(bart)
    work = [Work(conditioned.new_sequence(), [START])]
    with pytest.raises(OptionError, match=r"hidden_layers=\(1,\): encoder-decoder models give logits only"):
        conditioned.forward(work, hidden_layers=[1])


@pytest.mark.parametrize("length", [0, 1, 65])
def test_contexts_that_the_model_does_not_have(length):
    with pytest.raises(OptionError, match=rf"context_length={length}: must be in 2..64 for BartForConditional"):
        Seq2SeqTarget(make_model("bart"), context_length=length)
    assert Seq2SeqTarget(make_model("t5"), context_length=10_000).context_length == 10_000


def test_what_the_decoder_begins_with():
    model = make_model("bart")
    model.generation_config.forced_bos_token_id = 7  # a language, say
    assert Seq2SeqTarget(model).decoder_start == (START, 7)
    model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = None
    model.generation_config.forced_bos_token_id = None
    assert Seq2SeqTarget(model).decoder_start == (2,), "the bos token"


# Drafters that see what stands before


def test_preceded_is_its_drafter_with_more_to_see():
    class Noted(Scripted):
        costs, samples, name = ModelCosts(CostTable((1,), (1.0,))), True, "noted"

        def session(self, prompt, params, sampled=False):
            self.seen = (prompt, params, sampled)
            return self

    noted = Noted(None)
    drafter = Preceded(noted, torch.tensor([3, 4]))
    assert (drafter.name, drafter.costs, drafter.samples) == ("noted", noted.costs, True)
    assert drafter.session((5, 6), GREEDY, True) is noted
    assert noted.seen == ([3, 4, 5, 6], GREEDY, True)
    drafter.session([7], SAMPLED)
    assert noted.seen == ([3, 4, 7], SAMPLED, False)


# Real speech


@dataclass(frozen=True)
class Speech:
    target: Seq2SeqTarget
    conditioned: Conditioned
    engine: Engine
    prompt: list[int]
    features: torch.Tensor


@pytest.fixture(scope="module")
def speech() -> Speech:
    """Whisper tiny.en, in the folder SAKIYOMI_TEST_WHISPER, and the recording in the file SAKIYOMI_TEST_AUDIO."""
    folder = Path(os.environ.get("SAKIYOMI_TEST_WHISPER", "~/.cache/sakiyomi-test-models/whisper-tiny.en")).expanduser()
    if not (folder / "model.safetensors").is_file():
        pytest.skip("needs Whisper tiny.en: name its folder with SAKIYOMI_TEST_WHISPER")
    if not (audio := os.environ.get("SAKIYOMI_TEST_AUDIO")):
        pytest.skip("needs a recording: name a file with SAKIYOMI_TEST_AUDIO")
    soundfile = pytest.importorskip("soundfile")
    from tokenizers import Tokenizer as FastTokenizer

    from sakiyomi.text import Tokenizer

    sound, rate = soundfile.read(audio, dtype="float32", always_2d=True)
    sound = sound.mean(1)
    count = len(sound) * 16_000 // rate
    spectrum = np.fft.rfft(sound)[: count // 2 + 1]
    sound = np.fft.irfft(spectrum, count) * (count / len(sound))
    features = transformers.WhisperFeatureExtractor.from_pretrained(folder)(
        sound, sampling_rate=16_000, return_tensors="pt"
    )
    target = Seq2SeqTarget(transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval())
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(fast, {}, [target.model.config.eos_token_id], None)
    conditioned = target.given(input_features=features["input_features"])
    prompt = [*target.decoder_start, fast.token_to_id("<|notimestamps|>")]
    return Speech(target, conditioned, Engine(conditioned, tokenizer), prompt, features["input_features"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_new_tokens=100), SamplingParams(max_new_tokens=100, temperature=0.8, seed=3)],
    ids=["greedy", "sampled"],
)
def test_speech_is_the_same_text_with_any_drafter(speech, params, capsys):
    def hear(drafters: Sequence[Drafter] = (), k: int = 0) -> list[Chunk]:
        policy = FixedPolicy(k) if k else None
        return list(speech.engine.run(speech.engine.request(speech.prompt, params, drafters, policy)))

    plain = hear()
    if params.temperature == 0:
        generated = speech.target.model.generate(
            encoder_outputs=speech.conditioned.encoder_outputs,
            decoder_input_ids=torch.tensor([speech.prompt]),
            do_sample=False,
            max_new_tokens=100,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
        assert [token for token in generated[0].tolist() if token < 50256] == ids(plain)[:-1]

    def seconds(chunks: Sequence[Chunk]) -> float:
        return sum(chunk.record.total_s for chunk in chunks)

    heard = "".join(chunk.text for chunk in plain)
    lines = [f"{speech.conditioned.exactness}: {heard!r}, {len(ids(plain))} tokens, {seconds(plain):.2f} s"]
    size = speech.conditioned.vocab_size
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        **({"suffix": SuffixDrafter} if core.available() else {}),
        "itself": lambda: ModelDrafter(speech.conditioned, size),
    }
    for name, make in makers.items():
        for k in (1, 4):
            chunks = hear([make()], k)
            assert ids(chunks) == ids(plain), (name, k)
            assert "".join(chunk.text for chunk in chunks) == heard
            lines.append(
                f"{name}, k={k}: {len(ids(chunks)) / len(chunks):.2f} tokens per target call, {seconds(chunks):.2f} s"
            )
            if name == "itself":
                assert len(chunks) <= len(ids(plain)) // (k + 1) + 2, "nearly all of it stands"
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.6}], ids=["greedy", "sampled"])
def test_generate_hears_the_same_with_the_drop_in(speech, options):
    """Whisper's own generate, which suppresses tokens and cuts long audio, over our loop."""
    model = speech.target.model

    def hear(**assisted) -> list[int]:
        torch.manual_seed(3)
        return model.generate(speech.features, max_new_tokens=60, **options, **assisted).flatten().tolist()

    plain = hear()
    sakiyomi.accelerate(model, num_speculative_tokens=4)
    try:
        for assisted in ({}, {"assistant_model": model}, {"prompt_lookup_num_tokens": 5}):
            assert hear(**assisted) == plain
    finally:
        sakiyomi.restore(model)
    assert len(plain) > 20
