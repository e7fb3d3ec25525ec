"""Quality: the evaluation against one over all logits at once, windows, comparisons, and the built-in text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from conftest import make_reference
from sakiyomi import core
from sakiyomi.bench import Evaluation, compare, evaluate, plain_text
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Target, TargetOutput, Work
from sakiyomi.targets.compiled import CompiledTarget
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.targets.pytorch import TorchTarget


def text_of(length: int, vocab: int = 320) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def directly(target: Target, ids: list[int], window: int) -> tuple[float, list[int]]:
    """Return the nll and the likeliest tokens, by float64 log-softmax over each window's logits at once."""
    nll, top = 0.0, []
    for start in range(0, len(ids) - 1, window):
        inputs, wanted = ids[start : start + window], ids[start + 1 : start + window + 1]
        inputs = inputs[: len(wanted)]
        (output,) = target.forward([Work(target.new_sequence(), inputs, None, len(inputs))])
        log_p = torch.log_softmax(output.logits.double(), dim=-1)
        nll -= float(log_p[range(len(wanted)), wanted].sum())
        top += log_p.argmax(dim=-1).tolist()
    return nll, top


class Script:
    """A target that finds the token after the last one likeliest, and remembers what it was given."""

    vocab_size, context_length, max_rows, exactness = 10, 8, 3, "bit-exact"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.calls: list[tuple[int, list[int], int]] = []  # sequence, tokens, logit rows
        self.sequences = 0
        self.dtype = dtype

    def new_sequence(self) -> int:
        self.sequences += 1
        return self.sequences - 1

    def forward(self, work: Sequence[Work], *, hidden_layers: Sequence[int] = ()) -> list[TargetOutput]:
        (item,) = work
        self.calls.append((item.sequence, list(item.tokens), item.logit_rows))
        logits = torch.zeros(len(item.tokens), self.vocab_size, dtype=self.dtype)
        logits[range(len(item.tokens)), [(token + 1) % self.vocab_size for token in item.tokens]] = 2.0
        return [TargetOutput(logits)]


@pytest.mark.parametrize("window", [1, 20, 64, 150, 1024])
@pytest.mark.parametrize("length", [2, 150])
def test_it_is_what_all_logits_at_once_give(llama: Target, length: int, window: int) -> None:
    ids = text_of(length)
    nll, top = directly(llama, ids, window)
    found = evaluate(llama, ids, window)
    assert found.tokens == length - 1
    assert found.nll == pytest.approx(nll, rel=1e-6)
    assert found.top.dtype == np.int32
    assert found.top.tolist() == top


def test_every_token_but_the_first_is_predicted_once_in_windows_of_their_own() -> None:
    target = Script()
    found = evaluate(target, list(range(10)), 4)
    # windows of 4 rows, in calls of at most 3; the last row of a window predicts the first token of the next
    assert target.calls == [(0, [0, 1, 2], 3), (0, [3], 1), (1, [4, 5, 6], 3), (1, [7], 1), (2, [8], 1)]
    assert found.top.tolist() == list(range(1, 10))
    assert found.nll == pytest.approx(9 * (np.log(np.exp(2) + 9) - 2))


def test_a_window_is_no_longer_than_the_context() -> None:
    target = Script()
    evaluate(target, [1] * 21, 1024)
    assert [sum(len(tokens) for s, tokens, _ in target.calls if s == i) for i in range(3)] == [8, 8, 4]


def test_logits_may_be_in_the_dtype_of_the_target() -> None:
    assert evaluate(Script(torch.bfloat16), [1, 2, 3]).nll == evaluate(Script(), [1, 2, 3]).nll


def test_extreme_logits_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Script, work: Sequence[Work]) -> list[TargetOutput]:
        return [TargetOutput(torch.tensor([[1e4, -1e4, 1e4, float("-inf")]] * len(work[0].tokens)))]

    monkeypatch.setattr(Script, "forward", forward)
    found = evaluate(Script(), [3, 0, 1])
    assert found.nll == pytest.approx(np.log(2) + np.log(2) + 2e4)
    assert found.top.tolist() == [0, 0], "of equals the lowest"


def test_progress_counts_tokens_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    evaluate(Script(), list(range(10)), 4, progress=lambda *step: seen.append(step))
    assert seen == [(3, 9), (4, 9), (7, 9), (8, 9), (9, 9)]


@pytest.mark.parametrize("ids", [[], [5]])
def test_a_text_without_a_token_to_predict_is_an_error(ids: list[int]) -> None:
    target = Script()
    with pytest.raises(OptionError, match=f"text: is {len(ids)} tokens long; must be at least 2"):
        evaluate(target, ids)
    with pytest.raises(OptionError, match="window=0: must be at least 1"):
        evaluate(target, [1, 2], 0)
    assert target.calls == []


def test_a_target_against_itself_loses_nothing(llama: Target) -> None:
    ids = text_of(100)
    quality = compare(evaluate(llama, ids), evaluate(llama, ids), text="a text")
    assert (quality.ratio, quality.agreement, quality.tokens, quality.text) == (1.0, 1.0, 99, "a text")
    assert quality.perplexity == quality.reference_perplexity > 1


def test_a_comparison_is_of_means() -> None:
    top = np.array([1, 2, 3, 4], np.int32)
    other = np.array([1, 2, 3, 5], np.int32)
    quality = compare(Evaluation(4 * np.log(10), 4, top), Evaluation(4 * np.log(11), 4, other))
    assert quality.reference_perplexity == pytest.approx(10)
    assert quality.perplexity == pytest.approx(11)
    assert quality.ratio == pytest.approx(1.1)
    assert quality.agreement == 0.75
    with pytest.raises(OptionError, match="evaluations of 4 and 3 tokens: must be of the same text"):
        compare(Evaluation(1.0, 4, top), Evaluation(1.0, 3, top[:3]))


@pytest.mark.skipif(not core.available(), reason="needs the compiled core")
def test_int8_weights_cost_a_little() -> None:
    reference = make_reference("llama", num_hidden_layers=2)
    config, ids = DecoderConfig.from_huggingface(reference.config.to_dict()), text_of(200)

    def evaluation(weight_format: core.Format) -> Evaluation:
        weights = reference.state_dict()
        return evaluate(CompiledTarget(config, weights, torch.float32, weight_format=weight_format), ids, 64)

    torch_target = TorchTarget(config, reference.state_dict(), torch.float32)
    same = compare(evaluate(torch_target, ids, 64), evaluation("fp32"))
    assert same.ratio == pytest.approx(1, abs=1e-3)
    assert same.agreement > 0.98
    quality = compare(evaluation("fp32"), evaluation("int8"))
    assert quality.ratio == pytest.approx(1, abs=0.1)
    assert quality.ratio != 1
    assert quality.agreement > 0.7


def test_the_built_in_text_is_english_of_the_size_asked_for() -> None:
    text = plain_text()
    assert 49_990 < len(text.encode()) <= 50_000
    assert text == plain_text(), "the same each time"
    assert plain_text(10) == text[: len(plain_text(10))]
    words = text.lower().split()
    assert sum(word in {"the", "a", "of", "is", "to", "and", "in"} for word in words) / len(words) > 0.15


def test_a_python_without_the_built_in_text_is_told_to_name_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(OptionError, match=r"this Python lacks pydoc_data\.topics.*name a file with --quality-text"):
        plain_text()
