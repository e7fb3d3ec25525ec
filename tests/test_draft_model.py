"""Draft models: in step with the sequence, coupled to the target's choice, and paid for row by row."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from conftest import VOCAB, byte_tokenizer, make_reference, make_target
from sakiyomi.drafters.model import ALTERNATIVE, ModelDrafter, likely
from sakiyomi.drafters.retokenised import _CHARACTERS, CommonDrafter, Retold, TextDrafter, common_tokens
from sakiyomi.engine import Engine
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, Drafter, DraftSession, Target, TargetOutput, Work
from sakiyomi.policy import FixedPolicy
from sakiyomi.sampling import Chooser, SamplingParams, gumbel_noise
from sakiyomi.text import Tokenizer

PROMPT = [7, 8, 9, 7, 8, 9, 40, 41, 7, 8]
GREEDY = SamplingParams()
SAMPLED = [
    SamplingParams(temperature=0.7, top_p=0.95, seed=11),
    SamplingParams(temperature=1.5, top_k=40, seed=2),
    SamplingParams(temperature=1.0, min_p=0.01, seed=3),
    SamplingParams(temperature=1.2, seed=4),
]
EVERY = [GREEDY, *SAMPLED]


class Counting:
    """A target that notes (rows, logit rows) of each forward, and fails where it is told to."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.calls: list[tuple[int, int]] = []
        self.sequences = 0
        self.fail: Callable[[Sequence[Work]], bool] = lambda work: False
        self.fail_late = False

    def __getattr__(self, name: str):
        return getattr(self.target, name)

    def new_sequence(self):
        self.sequences += 1
        return self.target.new_sequence()

    def forward(self, work: Sequence[Work], **options) -> list[TargetOutput]:
        self.calls.append((len(work[0].tokens), work[0].logit_rows))
        if self.fail(work):
            if self.fail_late:
                self.target.forward(work, **options)
            raise MemoryError("no room")
        return self.target.forward(work, **options)

    def taken(self) -> list[tuple[int, int]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def counting(llama: Target) -> Counting:
    return Counting(llama)


def continuation(target: Target, prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """What the target alone writes."""
    sequence, chooser = target.new_sequence(), Chooser(params, prompt, target.vocab_size, ())
    ids, new = [], list(prompt)
    for _ in range(count):
        (output,) = target.forward([Work(sequence, new)])
        new = [chooser.choose(output.logits[-1].float().numpy())]
        ids += new
    return ids


def well_formed(draft: Draft, budget: int, vocab_size: int) -> list[int]:
    """Check a draft, and return the indices of its main path: the first child of each token."""
    parents = draft.parents or range(-1, len(draft) - 1)
    assert draft.parents is None or list(draft.parents) != list(range(-1, len(draft) - 1))
    assert len(parents) == len(draft.tokens) == len(draft.confidences)
    assert all(-1 <= parent < i for i, parent in enumerate(parents))
    assert all(type(token) is int and 0 <= token < vocab_size for token in draft.tokens)
    assert all(type(each) is float and 0 < each <= 1 for each in draft.confidences)
    main: list[int] = []
    while children := [i for i, parent in enumerate(parents) if parent == (main[-1] if main else -1)]:
        assert len({draft.tokens[i] for i in children}) == len(children)
        for i in children[1:]:
            assert i not in parents, "alternatives are leaves"
            assert draft.confidences[i] >= ALTERNATIVE
        main.append(children[0])
    assert len(main) <= budget
    return main


def accepted(draft: Draft, following: Sequence[int]) -> int:
    """How many of the target's tokens the draft has, along any path."""
    parents = list(draft.parents or range(-1, len(draft) - 1))
    node, count = -1, 0
    for token in following:
        found = [i for i, parent in enumerate(parents) if parent == node and draft.tokens[i] == token]
        if not found:
            break
        node, count = found[0], count + 1
    return count


def along(session: DraftSession, following: Sequence[int], k: int, vocab_size: int = VOCAB) -> tuple[int, int]:
    """Draft along the target's tokens; return how many tokens of main paths were drafted, and how many stood."""
    at = drafted = stood = 0
    while at < len(following):
        budget = min(k, len(following) - at - 1)
        draft = session.propose(budget)
        drafted += len(well_formed(draft, budget, vocab_size))
        count = accepted(draft, following[at:])
        stood += count
        session.observe(following[at : at + count + 1])
        at += count + 1
    return drafted, stood


@pytest.mark.parametrize("params", EVERY)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_draft_model_that_is_the_target_is_always_right(llama, params, k):
    following = continuation(llama, PROMPT, params, 40)
    drafted, stood = along(ModelDrafter(llama, VOCAB).session(PROMPT, params), following, k)
    assert drafted == stood >= 40 * k // (k + 1) - 1


def test_another_seed_is_another_text(llama):
    """The negative control of the coupling."""
    params = SAMPLED[1]
    following = continuation(llama, PROMPT, params, 40)
    other = SamplingParams(temperature=1.5, top_k=40, seed=3)
    drafted, stood = along(ModelDrafter(llama, VOCAB, branches=1).session(PROMPT, other), following, 5)
    assert stood < drafted / 2


@pytest.mark.parametrize("params", [GREEDY, SAMPLED[0]])
def test_whatever_happened_before_drafts_are_those_of_a_fresh_session(llama, params):
    """Rejected, partly and fully accepted drafts, no drafts, several in a row, budgets of 0, 1 and more."""
    source = random.Random(0)
    drafter = ModelDrafter(llama, VOCAB)
    ids = list(PROMPT)
    session = drafter.session(ids, params)
    for _ in range(40):
        budget = source.choice([0, 1, 1, 2, 5])
        patience = source.randint(1, 5)
        answers = iter([True] * (patience - 1) + [False] * 9)
        draft = session.propose(budget, lambda confidence, answers=answers: next(answers))
        main = well_formed(draft, budget, VOCAB)
        assert len(main) == min(budget, patience)
        answers = iter([True] * (patience - 1) + [False] * 9)
        assert draft == drafter.session(ids, params).propose(budget, lambda _, answers=answers: next(answers))
        if source.random() < 0.2:
            continue
        stands = source.randint(0, len(main))
        gained = [*(draft.tokens[i] for i in main[:stands]), source.randrange(VOCAB)]
        if source.random() < 0.2:
            gained = [draft.tokens[-1]] if len(draft) else []
        session.observe(gained)
        ids += gained


def test_rows_are_computed_once(counting):
    session = ModelDrafter(counting, VOCAB).session(PROMPT, GREEDY)
    assert session.unread == 10
    assert counting.calls == []
    draft = session.propose(3)
    main = [draft.tokens[i] for i in well_formed(draft, 3, VOCAB)]
    assert counting.taken() == [(10, 1), (1, 1), (1, 1)]
    session.observe([*main, 5])  # all stand: the last was drafted, not computed
    assert session.unread == 2
    draft = session.propose(3)
    main = [draft.tokens[i] for i in well_formed(draft, 3, VOCAB)]
    assert counting.taken() == [(2, 1), (1, 1), (1, 1)]
    session.observe([main[0], 6 if main[1] != 6 else 7])  # one stands
    assert session.unread == 1
    session.propose(1)
    assert counting.taken() == [(1, 1)]
    assert session.unread == 1  # the last row again: its logits are not kept
    session.propose(0)
    assert counting.taken() == []
    session.observe([1, 2, 3, 4])
    assert session.unread == 4


def test_long_texts_are_read_in_pieces(counting):
    prompt = [i % VOCAB for i in range(300)]
    session = ModelDrafter(counting, VOCAB).session(prompt, GREEDY)
    draft = session.propose(2)
    assert counting.taken() == [(128, 0), (128, 0), (44, 1), (1, 1)]
    assert [draft.tokens[i] for i in well_formed(draft, 2, VOCAB)] == continuation(counting, prompt, GREEDY, 2)


def test_it_stops_where_it_is_told_to(counting):
    heard: list[float] = []

    def go_on(confidence: float) -> bool:
        heard.append(confidence)
        return len(heard) < 3

    session = ModelDrafter(counting, VOCAB).session(PROMPT, SAMPLED[0])
    draft = session.propose(8, go_on)
    main = well_formed(draft, 8, VOCAB)
    assert heard == [draft.confidences[i] for i in main]
    assert len(main) == len(counting.calls) == 3


@pytest.mark.parametrize("params", EVERY)
@pytest.mark.parametrize("branches", [1, 2, 4])
def test_choices_are_the_largest_sums(params, branches):
    """Against the definition: probabilities, noise added, all sorted."""
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=50).astype(np.float32) * 3
        logits[7] = -np.inf
        names = np.sort(np.random.default_rng(seed + 100).permutation(1000)[:50]).astype(np.int64)
        found = likely(logits, names, params, params.seed, seed, branches)
        z = logits.astype(np.float64)
        if params.temperature:
            z = (z - z.max()) / params.temperature
            if params.top_k is not None:
                z[z < np.sort(z)[-params.top_k]] = -np.inf
            if params.top_p < 1:
                order = np.argsort(-z)
                mass = np.cumsum(np.exp(z[order]) / np.exp(z).sum())
                z[order[np.searchsorted(mass, params.top_p) + 1 :]] = -np.inf
            if params.min_p:
                z[z < np.log(params.min_p)] = -np.inf
        probabilities = np.exp(z - z.max())
        probabilities /= probabilities.sum()
        sums = z + gumbel_noise(params.seed, seed, names) if params.temperature else z
        order = [int(i) for i in np.argsort(-sums)[:branches] if probabilities[i] > 0]
        expected = order[:1]
        for i in order[1:]:
            if probabilities[i] < ALTERNATIVE:
                break
            expected.append(i)
        assert [index for index, _ in found] == expected
        assert np.allclose([p for _, p in found], probabilities[expected], rtol=1e-4)


def test_logits_are_left_as_they_are():
    logits = np.array([1.0, 2.0, 1.9], dtype=np.float32)
    assert len(likely(logits, None, GREEDY, 0, 0, 3)) == 3
    assert logits.tolist() == [1.0, 2.0, np.float32(1.9)]


def test_alternatives_are_beside_the_main_path(llama):
    following = continuation(llama, PROMPT, SAMPLED[3], 30)
    for params in EVERY:
        chain = ModelDrafter(llama, VOCAB, branches=1).session(PROMPT, params).propose(6)
        assert chain.parents is None
        tree = ModelDrafter(llama, VOCAB, branches=3).session(PROMPT, params).propose(6)
        main = well_formed(tree, 6, VOCAB)
        assert tuple(tree.tokens[i] for i in main) == chain.tokens
        assert tuple(tree.confidences[i] for i in main) == chain.confidences
    other = SamplingParams(temperature=1.2, top_k=3, seed=9)
    stood = [along(ModelDrafter(llama, VOCAB, branches=b).session(PROMPT, other), following, 4)[1] for b in (1, 3)]
    assert stood[0] < stood[1], "alternatives stand where the main path doesn't"
    with pytest.raises(OptionError, match="branches=0"):
        ModelDrafter(llama, VOCAB, branches=0)


@pytest.mark.parametrize("draft_size", [300, 340])
def test_vocabularies_that_differ_by_padding(llama, draft_size):
    draft = make_target(make_reference("llama", num_hidden_layers=2, vocab_size=draft_size), kernels="auto")
    session = ModelDrafter(draft, VOCAB).session([*PROMPT, 319], SAMPLED[3])
    same = ModelDrafter(draft, VOCAB).session([*PROMPT, 319 if draft_size == 340 else 0], SAMPLED[3])
    assert session.propose(6) == same.propose(6)
    for params in EVERY:
        along(ModelDrafter(draft, VOCAB).session(PROMPT, params), continuation(llama, PROMPT, params, 20), 5)


def test_tokens_that_the_target_lacks_are_never_drafted(llama):
    session = ModelDrafter(llama, 10).session([1, 2, 3], SAMPLED[3])
    assert all(token < 10 for token in session.propose(20).tokens)


def test_the_end_of_the_context(llama):
    short = Counting(make_target(make_reference("llama", num_hidden_layers=2), context_length=16, kernels="auto"))
    drafter = ModelDrafter(short, VOCAB, branches=1)
    session = drafter.session(PROMPT, GREEDY)
    assert len(session.propose(20)) == 7  # 10 + 6 rows computed, and one token more drafted
    session.observe([1] * 6)
    assert session.unread == 6 + 1 - 1
    assert len(session.propose(20)) == 1  # the context is full
    session.observe([1])
    short.taken()
    assert session.unread == 0
    with pytest.warns(RuntimeWarning, match="17 tokens has outgrown the draft model's context of 16"):
        assert session.propose(5) == Draft(drafter="model")
    session.observe([1])
    assert short.sequences == 2, "the memory of the sequence is let go"
    assert (session.propose(5), session.unread, short.calls) == (Draft(drafter="model"), 0, [])
    other = drafter.session([1] * 40, GREEDY)  # and no second warning, which would be an error here
    assert len(other.propose(5)) == 0
    assert len(drafter.session(PROMPT, GREEDY).propose(2)) == 2


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_the_draft_model_leaves_the_session_usable(counting, late):
    prompt = [i % VOCAB for i in range(300)]
    counting.fail_late = late
    for failing in range(6):
        session = ModelDrafter(counting, VOCAB).session(prompt, GREEDY)
        counting.taken()
        counting.fail = lambda work, failing=failing: len(counting.calls) == failing + 1
        with pytest.raises(MemoryError):
            session.propose(4)
        counting.fail = lambda work: False
        session.observe([5, 6])
        assert session.unread == 302 - min(128 * failing, 256) if failing < 2 else session.unread <= 46
        expected = ModelDrafter(counting, VOCAB).session([*prompt, 5, 6], GREEDY).propose(4)
        assert session.propose(4) == expected


def test_broken_logits_are_no_draft(llama):
    class Broken(Counting):
        def forward(self, work, **options):
            return [TargetOutput(output.logits * torch.nan) for output in self.target.forward(work)]

    for params in EVERY:
        assert ModelDrafter(Broken(llama), VOCAB).session(PROMPT, params).propose(4) == Draft(drafter="model")


def test_bfloat16_logits(llama):
    class Half(Counting):
        def forward(self, work, **options):
            return [TargetOutput(output.logits.bfloat16()) for output in self.target.forward(work)]

    assert len(ModelDrafter(Half(llama), VOCAB, branches=1).session(PROMPT, SAMPLED[0]).propose(4)) == 4


def test_nothing_is_drafted_after_an_end(counting):
    end = continuation(counting, PROMPT, GREEDY, 3)[2]
    counting.taken()
    for options, params, count in [
        ({"eos_ids": [end]}, GREEDY, 3),
        ({}, SamplingParams(stop_token_ids=(end,)), 3),
        ({"eos_ids": [end]}, SamplingParams(ignore_eos=True), 6),
    ]:
        session = ModelDrafter(counting, VOCAB, branches=1, **options).session(PROMPT, params)
        assert len(session.propose(6)) == count
        assert len(counting.taken()) == count


# Other tokenizers


def bpe(words: Sequence[str], special: Sequence[str] = (), first: int = 0) -> Tokenizer:
    """Byte-level BPE that has these words (and their beginnings) as tokens; the bytes have the first ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: (i + first) % 256 for i, c in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in words:
        spelled = split.pre_tokenize_str(word)[0][0]
        for length in range(2, len(spelled) + 1):
            if spelled[:length] not in vocab:
                merges.append((spelled[: length - 1], spelled[length - 1]))
                vocab[spelled[:length]] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(each, special=True) for each in special])
    eos = [fast.token_to_id(special[-1])] if special else []
    return Tokenizer(fast, {}, eos, None)


TEXT = (
    "The dog said: hello, hello world! 日本語と한국어 🙂👩‍👩‍👧 naïve café\n\n  if x == 10:\n    return 'hello 🙂🙂'\n"
)
ONE = bpe(["hello", " world", " the", "日本", "    ", "🙂", "é"])
OTHER = bpe(["hell", " wor", "lo", "The", "本語", "  ", " 🙂", "return"], first=7)


class Parrot:
    """A model that goes on with a text as its tokenizer splits what follows, as long as what it reads is that text."""

    context_length, max_rows, exactness = 4096, 64, "bit-exact"

    def __init__(self, tokenizer: Tokenizer, text: str, surely: float = 12.0) -> None:
        self.tokenizer, self.text, self.surely = tokenizer, text.encode(), surely
        self.vocab_size = len(tokenizer.fast.get_vocab())

    class Memory:
        def __init__(self) -> None:
            self.ids: list[int] = []

        @property
        def length(self) -> int:
            return len(self.ids)

        def truncate(self, length: int) -> None:
            assert 0 <= length <= len(self.ids)
            del self.ids[length:]

        def keep(self, length, rows) -> None:
            raise NotImplementedError

    def new_sequence(self):
        return self.Memory()

    def forward(self, work: Sequence[Work], **options) -> list[TargetOutput]:
        (item,) = work
        item.sequence.ids.extend(item.tokens)
        logits = torch.zeros(item.logit_rows, self.vocab_size)
        if item.logit_rows and (token := self._next(item.sequence.ids)) is not None:
            logits[-1, token] = self.surely
        return [TargetOutput(logits)]

    def _next(self, ids: Sequence[int]) -> int | None:
        added = {token.content for token in self.tokenizer.fast.get_added_tokens_decoder().values()}
        held = b""
        for token in map(self.tokenizer.fast.id_to_token, ids):
            held += token.encode() if token in added else bytes(_CHARACTERS.index(c) for c in token)
        rest = self.text[len(held) :]
        if not rest or not self.text.startswith(held):
            return None
        try:
            return self.tokenizer.encode(rest.decode(), special=False)[0]
        except UnicodeDecodeError:  # in the middle of a character
            return self.tokenizer.fast.token_to_id(_CHARACTERS[rest[0]])


HOW = ("as its tokenizer does", "characters", "bytes")


def split(tokenizer: Tokenizer, text: str, how: str) -> list[int]:
    """What a target may have written of a text."""
    if how == "bytes":
        return [tokenizer.fast.token_to_id(_CHARACTERS[byte]) for byte in text.encode()]
    return [i for part in ([text] if how != "characters" else text) for i in tokenizer.encode(part)]


@settings(max_examples=60)
@given(
    text=st.lists(st.sampled_from([*TEXT, "hello", " world", "日本語", "🙂", "    ", "<|end|>"]), max_size=60).map(
        "".join
    ),
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    how=st.sampled_from(HOW),
)
def test_text_is_retold_as_it_is(text, pieces, how):
    """In whatever pieces it comes, and for a target that doesn't split it as its tokenizer would."""
    target, draft = bpe(["hello", " world", "日本", "    ", "🙂"], ["<|end|>"]), OTHER
    ids = split(target, text, how)
    first = min(pieces[0], len(ids))
    retold, at, turn = Retold(target, draft, ids[:first]), first, 0
    while at < len(ids):
        count = pieces[turn % len(pieces)]
        retold.push(ids[at : at + count])
        at, turn = at + count, turn + 1
        so_far = target.decode(ids[:at], special=True).rstrip("\ufffd")
        known = draft.decode(retold.ids, special=True)
        assert so_far.startswith(known)
        assert len(so_far) - len(known) <= max(len(target.decode([each], special=True)) for each in ids)
        assert ids[:at][-len(retold.recent + retold.pending) :] == retold.recent + retold.pending
    assert retold.pending == []
    assert draft.decode(retold.ids, special=True) == text
    assert retold.ids == draft.encode(text, special=False)


@settings(max_examples=100)
@given(
    before=st.lists(st.sampled_from([*TEXT, "hello", "<|end|>"]), max_size=40).map("".join),
    after=st.lists(st.sampled_from([*TEXT, "hello", " world", "lo wor"]), min_size=1, max_size=20).map("".join),
    cut=st.integers(0, 3),
    how=st.sampled_from(HOW),
)
def test_nothing_is_lost_on_the_way_back(before, after, cut, how):
    """What the target has written and the tokens proposed make the text: nothing twice, nothing left out."""
    target = bpe(["hello", " world", "日本", "    "], ["<|end|>"])
    ids = split(target, before, how)
    ids = ids[: len(ids) - cut]
    retold = Retold(target, OTHER, ids)
    assert [*retold.recent, *retold.pending] == ids[len(ids) - len(retold.recent) - len(retold.pending) :]
    missing = before[len(target.decode([*ids[: len(ids) - len(retold.pending)]], special=True)) :]
    context, tokens = retold.in_target(missing + after)
    assert ids[len(ids) - len(context) :] == context
    if tokens or not retold.pending:
        assert target.decode([*ids, *tokens], special=True) == before + after


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize(("target", "draft"), [(ONE, OTHER), (OTHER, ONE), (ONE, ONE)])
def test_a_text_drafter_that_knows_the_text_is_right(target, draft, k):
    """But for last tokens, which the text that isn't drafted yet makes longer."""
    whole = target.encode(TEXT * 3)
    for params in (GREEDY, SamplingParams(temperature=0.1, seed=1)):
        session = TextDrafter(Parrot(draft, TEXT * 3), draft, target, VOCAB).session(whole[:5], params)
        at, calls = 5, 0
        while at < len(whole):
            budget = min(k, len(whole) - at - 1)
            proposed = session.propose(budget)
            main = well_formed(proposed, budget, VOCAB)
            count = accepted(proposed, whole[at:])
            assert count >= len(main) - 2, (
                "merges can reach back: '    ' is two and two, or three and one before a word"
            )
            assert all(each > 0.9 for each in proposed.confidences[:-1])
            if count < len(main):
                assert proposed.confidences[-1] < 0.9
            session.observe(whole[at : at + count + 1])
            at, calls = at + count + 1, calls + 1
        assert (len(whole) - 5) / calls > 1 + 0.35 * k, "it proposes as much as it may, mostly"


def test_text_in_the_middle_of_words_and_characters():
    """The target has written what its tokenizer would have joined with what follows."""
    for pieces in (["h", "e", "l"], ["hello", " wo"], ["h", "é"], ["日"]):
        text = "".join(pieces)
        ids = [i for piece in pieces for i in ONE.encode(piece)]
        parrot = Parrot(OTHER, text + "lo wörld 🙂 and on")
        draft = TextDrafter(parrot, OTHER, ONE, VOCAB).session(ids, GREEDY).propose(8)
        assert len(draft) == 8
        written = ONE.decode([*ids, *draft.tokens]).rstrip("\ufffd")
        assert parrot.text.decode().startswith(written)
        assert len(written) >= len(text) + 6
    smile = ONE.encode("a ☃")[2:]
    assert len(smile) == 3
    for cut in (1, 2):
        ids = [*ONE.encode("a "), *smile[:cut]]
        session = TextDrafter(Parrot(OTHER, "a ☃ and on"), OTHER, ONE, VOCAB).session(ids, GREEDY)
        assert session.propose(4).tokens[: 3 - cut] == tuple(smile[cut:])


def test_nothing_is_proposed_inside_a_character_that_the_tokenizer_would_not_split():
    retold = Retold(bpe(["日"]), OTHER, split(bpe([]), "a日", "bytes")[:-1])
    assert len(retold.pending) == 2
    assert retold.in_target("日 and on") == ([], [])


def test_special_tokens_are_text_to_others():
    target = bpe(["hello"], ["<|start|>", "<|end|>"])
    prompt = target.encode("<|start|>user\nhello<|end|>\n<|start|>")
    same = bpe(["hell"], ["<|end|>", "<|start|>"], first=3)
    retold = Retold(target, same, prompt)
    assert retold.ids == same.encode("<|start|>user\nhello<|end|>\n<|start|>")
    other = bpe(["hell"], ["</s>"], first=3)
    assert other.decode(Retold(target, other, prompt).ids, special=True) == "<|start|>user\nhello<|end|>\n<|start|>"
    # A special token that both have can be drafted, and ends a draft that it ends for the target.
    text = "<|start|>user\nhello<|end|>hello"
    session = TextDrafter(Parrot(same, text), same, target, VOCAB).session(target.encode("<|start|>user\n"), GREEDY)
    assert list(session.propose(9).tokens) == target.encode("hello<|end|>")
    # One that only the draft model has ends its draft, and is no text.
    known = TextDrafter(Parrot(other, "user hello</s>"), other, target, VOCAB)
    draft = known.session(target.encode("user "), GREEDY).propose(9)
    assert list(draft.tokens) == target.encode("hello")
    assert draft.confidences[-1] > 0.9, "nothing follows that could make it longer"


def test_what_a_tokenizer_puts_before_a_text_is_no_text():
    from tokenizers.processors import TemplateProcessing

    target = bpe(["hello"], ["<s>"])
    target.fast.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", target.fast.token_to_id("<s>"))]
    )
    assert Retold(target, OTHER, target.encode("hello")).ids == OTHER.encode("hello")
    assert Retold(OTHER, target, OTHER.encode("hello")).ids == target.encode("hello")


def ascii_tokenizer(order: Sequence[int]) -> Tokenizer:
    """128 single bytes; ``order[byte]`` is a byte's id."""
    vocab = {_CHARACTERS[byte]: id for byte, id in enumerate(order)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(fast, {}, [], None)


@pytest.fixture(scope="module")
def shuffled() -> tuple[Target, Tokenizer, Target, Tokenizer]:
    """A target of 128 tokens, and the same model with its tokens in another order."""
    order = random.Random(1).sample(range(128), 128)
    plain = make_target(make_reference("llama", num_hidden_layers=2, vocab_size=128), kernels="auto")
    reference = make_reference("llama", num_hidden_layers=2, vocab_size=128)
    with torch.no_grad():
        for weight in (reference.model.embed_tokens.weight, reference.lm_head.weight):
            weight.copy_(weight[torch.tensor(order).argsort()])
    return plain, ascii_tokenizer(range(128)), make_target(reference, kernels="auto"), ascii_tokenizer(order)


@pytest.mark.parametrize("params", EVERY)
@pytest.mark.parametrize("way", [CommonDrafter, TextDrafter])
def test_noise_is_that_of_the_targets_tokens(shuffled, params, way):
    target, tokenizer, model, other = shuffled
    assert len(common_tokens(tokenizer, other)[0]) == 128
    following = continuation(target, PROMPT, params, 40)
    drafted, stood = along(way(model, other, tokenizer, 128).session(PROMPT, params), following, 4, 128)
    assert drafted == stood == 32


def test_confidences_of_text_are_those_of_its_tokens(shuffled):
    _, tokenizer, model, other = shuffled
    for params in EVERY:
        text = TextDrafter(model, other, tokenizer, 128).session(PROMPT, params).propose(6)
        token = CommonDrafter(model, other, tokenizer, 128, branches=1).session(PROMPT, params).propose(6)
        assert text.tokens == token.tokens
        assert text.confidences[:-1] == pytest.approx(token.confidences[:-1])
        assert text.confidences[-1] < token.confidences[-1]


def test_as_much_text_is_drafted_as_the_budget_wants():
    target = bpe(["ab"])
    drafter = TextDrafter(Parrot(bpe([]), "ab" * 9), bpe([]), target, VOCAB)
    draft = drafter.session(target.encode("ab"), GREEDY).propose(3)
    assert list(draft.tokens) == target.encode("ababa")
    assert draft.confidences[0] == pytest.approx((np.exp(12) / (np.exp(12) + 255)) ** 2, rel=1e-5)


def test_a_tokenizer_that_puts_a_space_before_texts():
    """Draft tokens are settled only where the rest is encoded alike."""
    draft = bpe(["hello", " world", " a"])
    draft.fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    text = "hello world, a\nworld of hello, ahello! " * 6
    retold = Retold(ONE, draft, [])
    for token in ONE.encode(text):
        retold.push([token])
    assert retold.ids == draft.encode(text)


def test_rows_of_another_tokenizer_are_computed_once(shuffled):
    _, tokenizer, model, other = shuffled
    for way in (CommonDrafter, TextDrafter):
        counting = Counting(model)
        session = way(counting, other, tokenizer, 128).session(PROMPT, GREEDY)
        assert session.unread == 10
        draft = session.propose(3)
        main = [draft.tokens[i] for i in well_formed(draft, 3, 128)]
        assert counting.taken() == [(10, 1), (1, 1), (1, 1)]
        session.observe([*main, 5])
        assert session.unread == 2
        draft = session.propose(8, lambda confidence: False)
        assert len(well_formed(draft, 8, 128)) == 1
        assert counting.taken() == [(2, 1)]
        assert len(session.propose(0)) == 0
        assert counting.taken() == []


def test_common_tokens_only():
    ours, theirs = common_tokens(ONE, OTHER)
    spelled = {i: t for t, i in OTHER.fast.get_vocab().items()}
    assert ours.tolist() == sorted(ours.tolist())
    assert [ONE.fast.get_vocab()[spelled[i]] for i in theirs] == ours.tolist()
    assert len(ours) >= 256
    session = CommonDrafter(Parrot(OTHER, "hello hello", 3.0), OTHER, ONE, VOCAB).session(ONE.encode("hello "), GREEDY)
    (first, *_), (confidence, *_) = (d := session.propose(1)).tokens, d.confidences
    assert ONE.fast.id_to_token(first) == "hell"
    assert confidence == pytest.approx(np.exp(3) / (np.exp(3) + OTHER.fast.get_vocab_size() - 1), rel=1e-3)
    nothing = bpe([])
    nothing.fast.model = models.BPE(vocab={"☃": 0}, merges=[])
    with pytest.raises(OptionError, match="no tokens in common"):
        CommonDrafter(Parrot(OTHER, "x"), OTHER, nothing, VOCAB)


def test_common_tokens_of_sentencepiece():
    fast = FastTokenizer(
        models.BPE(vocab={"<s>": 0, "<0xE2>": 1, "▁": 2, "h": 3, "▁h": 4, "é": 5}, merges=[("▁", "h")])
    )
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens(["<s>"])
    piece = Tokenizer(fast, {}, [], None)
    level = bpe([" h", "é"])
    ours, theirs = common_tokens(level, piece)
    assert {level.fast.id_to_token(i): int(j) for i, j in zip(ours, theirs, strict=True)} == {
        "â": 1, "Ġ": 2, "h": 3, "Ġh": 4, "Ã©": 5,
    }  # fmt: skip


def test_half_a_character_is_read_in_common_tokens():
    """The draft model reads the bytes that the target has written of a character."""
    ids = [*ONE.encode("a "), *ONE.encode("☃")[:2]]
    drafter = CommonDrafter(Parrot(OTHER, "a ☃b"), OTHER, ONE, VOCAB, branches=1)
    assert drafter.session(ids, GREEDY).propose(2).tokens == tuple(ONE.encode("☃b")[2:])


def test_an_outgrown_context_with_another_tokenizer():
    parrot = Parrot(OTHER, TEXT)
    parrot.context_length = 20
    for way in (CommonDrafter, TextDrafter):
        session = way(parrot, OTHER, ONE, VOCAB).session(ONE.encode(TEXT), GREEDY)
        with pytest.warns(RuntimeWarning, match="context of 20"):
            assert len(session.propose(3)) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(session.propose(3)) == 0
        assert session.unread == 0


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED[3], SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=5)]
)
def test_the_text_is_the_targets_whatever_drafts(llama, params):
    """In rounds of the engine: draft models that are right, nearly right and wrong; chains and trees."""
    params, penalised = replace(params, max_new_tokens=40), params.repetition_penalty != 1
    weak = make_target(make_reference("llama", num_hidden_layers=1), kernels="auto")
    tokenizer = byte_tokenizer()
    engine = Engine(llama, tokenizer)

    def run(drafter: Drafter | None, k: int) -> list[list[int]]:
        request = engine.request(PROMPT, params, [drafter] if drafter else [], FixedPolicy(k) if k else None)
        return [[token.id for token in chunk.tokens] for chunk in engine.run(request)]

    plain = [token for tokens in run(None, 0) for token in tokens]
    for k in (1, 4):
        for drafter in (
            *(ModelDrafter(model, VOCAB, branches=branches) for model in (llama, weak) for branches in (1, 2)),
            CommonDrafter(llama, tokenizer, tokenizer, VOCAB),
            TextDrafter(llama, tokenizer, tokenizer, VOCAB),
        ):
            rounds = run(drafter, k)
            assert [token for tokens in rounds for token in tokens] == plain
            if type(drafter) is ModelDrafter and drafter.model is llama and drafter.branches == 1 and not penalised:
                assert len(rounds) == 40 // (k + 1)
