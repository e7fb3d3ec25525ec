"""Pairs of models: what is found out about them, what is refused, and which way is chosen."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from conftest import VOCAB, byte_tokenizer, make_reference, make_target
from sakiyomi import core
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.retokenised import CommonDrafter, TextDrafter
from sakiyomi.errors import OptionError, SakiyomiError
from sakiyomi.interfaces import Target
from sakiyomi.pairs import Pair, Side, compare, draft_model, render
from sakiyomi.sampling import SamplingParams
from sakiyomi.text import Tokenizer


class Seconds:
    def __init__(self, each: float) -> None:
        self.each = each

    def seconds(self, rows: int, context: int) -> float:
        return self.each * rows


def joined(count: int, *, first: int = 0, eos: str = "<eos>", special: tuple[str, ...] = ()) -> Tokenizer:
    """All bytes, ``count`` tokens of two letters, and special tokens."""
    vocab = {c: (i + first) % 256 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(a, b) for a in letters for b in letters][:count]
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(each, special=True) for each in (*special, eos)])
    return Tokenizer(fast, {}, [fast.token_to_id(eos)], None)


def lossy() -> Tokenizer:
    """Letters only, all of them small: no text comes back as it was."""
    fast = FastTokenizer(models.WordLevel(vocab={"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    fast.normalizer = normalizers.Lowercase()
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(fast, {}, [], None)


def pair(one: Tokenizer, other: Tokenizer, *, contexts: tuple[int, int] = (1024, 1024), target=(), draft=()) -> Pair:
    return compare(
        Side(one, VOCAB, contexts[0], **dict(target)),
        Side(other, VOCAB, contexts[1], **dict(draft)),
    )


def test_the_same_tokenizer():
    found = pair(byte_tokenizer(), byte_tokenizer())
    assert (found.way, found.same_tokenizer, found.overlap, found.common_tokens) == ("same", True, 1.0, VOCAB)
    assert (found.problems, found.warnings) == ((), ())


def test_filling_makes_no_other_tokenizer():
    target, draft = joined(600), joined(600)
    draft.fast.add_tokens(["[PAD1]", "[PAD2]"])
    assert pair(target, draft).way == pair(draft, target).way == "same"


@pytest.mark.parametrize(
    ("draft", "way"),
    [
        (joined(600, first=1), "common"),  # the same tokens under other ids
        (joined(580), "common"),
        (joined(100), "text"),
    ],
)
def test_other_tokenizers(draft, way):
    found = pair(joined(600), draft)
    assert not found.same_tokenizer
    assert found.way == way
    assert found.problems == ()


def test_the_same_tokens_merged_otherwise_are_another_tokenizer():
    draft = joined(600)
    merges = [(a, b) for b in "zyxwvutsrqponmlkjihgfedcba" for a in "abcdefghijklmnopqrstuvw"]
    vocab = {t: i for t, i in draft.fast.get_vocab().items() if t != "<eos>"}
    draft.fast.model = models.BPE(vocab=vocab, merges=[m for m in merges if m[0] + m[1] in vocab])
    found = pair(joined(600), draft)
    assert (found.way, found.overlap) == ("common", 1.0)


def test_two_tokens_that_changed_places_make_another_tokenizer():
    draft = joined(600)
    vocab = {t: i for t, i in draft.fast.get_vocab().items() if t != "<eos>"}
    merges = [(t[0], t[1]) for t in vocab if vocab[t] >= 256]
    vocab["qj"], vocab["qk"] = vocab["qk"], vocab["qj"]
    draft.fast.model = models.BPE(vocab=vocab, merges=sorted(merges))
    assert pair(joined(600), draft).way == "common"


def test_tokens_that_one_lacks_make_another_tokenizer():
    draft = joined(600)
    vocab = {t: i for t, i in draft.fast.get_vocab().items() if i < 840}
    merges = sorted((t[0], t[1]) for t, i in vocab.items() if i >= 256)
    draft.fast.model = models.BPE(vocab=vocab, merges=merges)
    found = pair(joined(600), draft)
    assert (found.way, found.common_tokens) == ("common", 841)


def test_contexts():
    shorter = pair(byte_tokenizer(), byte_tokenizer(), contexts=(1024, 100))
    assert "100 tokens is shorter than the target's of 1024" in shorter.warnings[0]
    assert pair(byte_tokenizer(), byte_tokenizer(), contexts=(100, 1024)).warnings == ()
    short = pair(byte_tokenizer(), byte_tokenizer(), contexts=(1024, 31))
    assert "context of 31 tokens is too short" in short.problems[0]
    assert pair(byte_tokenizer(), byte_tokenizer(), contexts=(1024, 32)).problems == ()


def test_costs():
    fast = pair(byte_tokenizer(), byte_tokenizer(), target={"costs": Seconds(4.0)}, draft={"costs": Seconds(1.0)})
    assert (fast.cost_ratio, fast.warnings) == (0.25, ())
    slow = pair(byte_tokenizer(), byte_tokenizer(), target={"costs": Seconds(1.0)}, draft={"costs": Seconds(1.0)})
    assert "takes 1.00 of the time of the target's: that can't pay" in slow.warnings[0]
    large = pair(byte_tokenizer(), byte_tokenizer(), target={"weight_bytes": 10}, draft={"weight_bytes": 20})
    assert "reads 2.00 of the weights" in large.warnings[0]
    assert large.cost_ratio is None
    small = pair(byte_tokenizer(), byte_tokenizer(), target={"weight_bytes": 20}, draft={"weight_bytes": 10})
    assert small.warnings == ()
    one = pair(byte_tokenizer(), byte_tokenizer(), draft={"weight_bytes": 10})
    assert one.warnings == ()


def test_special_tokens_and_ends():
    chat = joined(600, eos="<|im_end|>", special=("<|im_start|>",))
    found = pair(chat, joined(600, eos="<|im_end|>", special=("<tool>",)))
    assert found.way == "same"
    assert len(found.warnings) == 1
    assert "special tokens differ, such as '<|im_start|>'" in found.warnings[0]
    found = pair(chat, joined(600, eos="</s>", special=("<|im_start|>",)))
    assert any("ends a text with <|im_end|>, the draft model with </s>" in each for each in found.warnings)
    assert pair(chat, joined(100, eos="<|im_end|>")).warnings == ()


def test_a_tokenizer_that_loses_text():
    assert "doesn't give back any text" in pair(joined(600), lossy()).problems[0]
    letters = joined(100)
    letters.fast.normalizer = normalizers.Lowercase()
    found = pair(joined(600), letters)
    assert found.problems == ()
    assert 'changes some texts, such as "The quick' in found.warnings[0]


@pytest.mark.parametrize("kernels", sorted({"torch", *core.available()[:1]}))
def test_what_a_loaded_model_tells(kernels):
    reference = make_reference("llama", num_hidden_layers=2)
    side = Side.of(make_target(reference, kernels=kernels), byte_tokenizer())
    assert (side.vocab_size, side.context_length) == (VOCAB, 1024)
    matrices = sum(p.numel() for p in reference.parameters() if p.dim() == 2)
    assert side.weight_bytes == 4 * matrices

    class Unknown:
        vocab_size, context_length = 10, 20

    assert Side.of(Unknown(), byte_tokenizer()).weight_bytes is None


def test_a_pair_as_json_and_as_a_table():
    found = pair(joined(600), joined(100, eos="</s>"), contexts=(1024, 16), draft={"weight_bytes": 3_000_000})
    assert json.loads(json.dumps(found.as_dict()))["way"] == "text"
    out = io.StringIO()
    Console(file=out, width=200).print(render(found))
    for part in (
        "as text",
        "draft model 3 MB",
        "not measured",
        "can't work: the draft model's context of 16",
        "note: the",
    ):
        assert part in out.getvalue()


def test_the_drafter_that_suits(llama: Target):
    def drafter(draft: Tokenizer, way: str = "auto", **options):
        return draft_model(llama, draft, byte_tokenizer(), VOCAB, way=way, **options)

    same, costs = byte_tokenizer(), Seconds(1.0)
    other = byte_tokenizer()
    other.fast.model = models.BPE(vocab={c: 255 - i for c, i in other.fast.get_vocab().items() if i < 256}, merges=[])
    assert type(drafter(same, costs=costs)) is ModelDrafter
    assert drafter(same, costs=costs).costs is costs
    assert type(drafter(same, "common")) is CommonDrafter
    assert type(drafter(same, "text")) is TextDrafter
    assert type(drafter(other)) is CommonDrafter
    assert type(drafter(other, "text", costs=costs)) is TextDrafter
    assert drafter(same, branches=1).branches == 1
    for way in ("auto", "common", "text"):
        drafting = drafter(other, way)
        assert drafting.name == "model"
        assert len(drafting.session([1, 2, 3], SamplingParams()).propose(3)) > 0
    # An end of the target's text ends drafts, whichever way.
    assert drafter(same).ends(SamplingParams()) == drafter(other, "text").ends(SamplingParams()) == {256}


def test_what_cannot_draft_is_refused(llama: Target):
    def refused(message: str, tokenizer: Tokenizer, way: str = "auto", model: Target = llama) -> None:
        with pytest.raises(OptionError, match=message) as caught:
            draft_model(model, tokenizer, byte_tokenizer(), VOCAB, way=way)
        assert isinstance(caught.value, SakiyomiError)
        assert "draft_model" in str(caught.value)
        assert "\n" not in str(caught.value)

    refused(r"way='best': must be one of auto, same, common, text", byte_tokenizer(), "best")
    refused(r"way='same' can't work: .*'text' would", joined(60), "same")
    refused("doesn't give back any text", lossy())
    short = make_target(make_reference("llama", num_hidden_layers=1), context_length=20, kernels="auto")
    refused("context of 20 tokens is too short", byte_tokenizer(), model=short)
