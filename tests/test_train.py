"""Training: what it is trained on, that it trains what drafts, that it can be interrupted."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from safetensors import safe_open
from typer.testing import CliRunner

import sakiyomi
from conftest import VOCAB, byte_tokenizer, make_reference, make_target
from sakiyomi import cli, progress
from sakiyomi.bench.workload import Prompt
from sakiyomi.drafters.trained import TargetParts, load_drafter
from sakiyomi.errors import OptionError, UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Draft, TargetOutput, Work
from sakiyomi.llm import LLM
from sakiyomi.sampling import SamplingParams
from sakiyomi.train import command, trainer
from sakiyomi.train.data import (
    Response,
    cut_loops,
    draft_vocabulary,
    generate_responses,
    loop_start,
    read_responses,
    split,
)
from sakiyomi.train.features import BATCH_ROWS, Batch, Example, collect, make_batch, plan
from sakiyomi.train.networks import DraftLoss, Eagle3
from sakiyomi.train.run import KINDS, DrafterOptions, _replay, check_output, make_network, train_drafter
from sakiyomi.train.target import Teacher, fingerprint
from sakiyomi.train.trainer import Tally, TrainOptions, interruptions, train

EXACT = TrainOptions(dtype=torch.float32, steps=12, batch=200, evaluations=3, learning_rate=3e-3)
SMALL = DrafterOptions(draft_vocabulary=200, inner=32, rank=8, block_size=4)


def response(prompt: Sequence[int], tokens: Sequence[int], **changes: Any) -> Response:
    return replace(Response("a", "all", 0.0, 0, tuple(prompt), tuple(tokens), "length"), **changes)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    reference = make_reference("llama")
    with torch.no_grad():  # what is next depends on the last token, and is nearly certain: there is something to learn
        for name, parameter in reference.named_parameters():
            if name == "lm_head.weight":
                parameter *= 4
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter *= 0.1
    target = make_target(reference, kernels="auto")
    weights = reference.state_dict()
    parts = TargetParts(
        vocab_size=VOCAB,
        hidden_size=64,
        layers=3,
        context_length=1024,
        embedding=weights["model.embed_tokens.weight"],
        head=weights["lm_head.weight"],
        norm=weights["model.norm.weight"],
        tokenizer="bytes",
    )
    return Teacher.of(target, parts, reference.config.to_dict(), weights, "org/tiny")


@pytest.fixture(scope="module")
def llm(teacher: Teacher) -> LLM:
    return LLM(teacher.target, byte_tokenizer(), drafter="none")


@pytest.fixture(scope="module")
def responses(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[Response]:
    """Responses of the tiny target; it is random, and repeats itself soon."""
    path = tmp_path_factory.mktemp("responses") / "responses.jsonl"
    prompts = [Prompt(str(i), f"c{i % 2}", text=f"prompt number {i * 37 % 101}") for i in range(60)]
    return generate_responses(llm, prompts, path, max_new_tokens=20, batch=16)


# --- data


def test_a_text_that_repeats_itself_to_its_end_is_cut_after_the_first_time() -> None:
    text = list(range(50))
    assert loop_start(text) is None
    assert loop_start([*text, *([7, 8, 9] * 10)]) == 53
    assert loop_start([*text, *([7] * 40)]) == 51
    assert loop_start([*text, *([7] * 10)]) is None  # a line of dashes
    assert loop_start([*text, *([7, 8, 9] * 10), 1]) is None  # it found out
    assert loop_start([*range(30)] * 4) == 30
    (kept,), cut = cut_loops([response([1], [*text, *([7, 8, 9] * 10)])])
    assert kept.tokens == (*text, 7, 8, 9)
    assert (kept.finish, cut) == ("loop", 1)


def test_prompts_are_held_out_with_all_of_their_responses() -> None:
    answers = [response([i], [1, 2, 3], id=str(i), temperature=float(j), seed=j) for i in range(600) for j in range(3)]
    found = split(answers, seed=1)
    train, held = ({each.prompt for each in part} for part in (found.train, found.held_out))
    assert len(held) == 30
    assert not train & held
    assert len(found.held_out) == 90
    assert len(found.train) + len(found.held_out) == len(answers)
    assert split(answers, seed=1) == found
    assert {each.prompt for each in split(answers[::-1], seed=1).held_out} == held
    assert {each.prompt for each in split(answers[::3], seed=1).held_out} == held
    assert {each.prompt for each in split(answers[: 3 * 500], seed=1).held_out if each.prompt[0] < 500} >= {
        prompt for prompt in held if prompt[0] < 500
    }
    assert {each.prompt for each in split(answers, seed=2).held_out} != held
    assert len({each.prompt for each in split(answers[:240]).held_out}) == 20  # at least
    with pytest.raises(OptionError, match=r"39 different prompts; at least 40 are needed"):
        split(answers[: 39 * 3])


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    found = draft_vocabulary([response([9, 9], [5, 5, 5, 3, 3, 200])], 4, 300)
    assert found.ids.tolist() == [3, 5, 9, 200]
    assert found.coverage == 1.0
    assert found.to_draft[[3, 5, 9, 200, 0]].tolist() == [0, 1, 2, 3, -1]
    assert (found.to_draft >= 0).sum() == 4
    assert draft_vocabulary([response([9], [5, 5, 3])], 1, 300).coverage == pytest.approx(2 / 3)
    assert len(draft_vocabulary([response([9], [5])], 1000, 300)) == 300


def some_prompts(count: int = 44, text: str = "prompt") -> list[Prompt]:
    return [Prompt(str(i), "all", text=f"{text} {i}") for i in range(count)]


def test_responses_are_half_greedy_and_collection_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    prompts = some_prompts(80)
    options: Any = {"max_new_tokens": 8, "responses_per_prompt": 2}

    class Stop(Exception):
        pass

    def interrupt(done: int, total: int, what: str) -> None:
        if done == 30:
            raise Stop

    with pytest.raises(Stop):
        generate_responses(llm, prompts, path, batch=3, progress=interrupt, **options)
    first = path.read_text()
    assert len(read_responses(path)) == 30
    path.write_text(first + '{"id": "cut o')  # as a power cut leaves it
    found = generate_responses(llm, prompts, path, batch=16, **options)
    assert path.read_text().startswith(first)
    assert set(read_responses(path)) == set(found)
    assert found == generate_responses(llm, prompts, tmp_path / "whole.jsonl", batch=80, **options)
    parts = split(found)
    assert all(each.temperature == 0 for each in parts.held_out)
    assert found[:20] == list(parts.held_out), "first, or a run with little time would have none"
    assert len(parts.held_out) == 20
    assert len(parts.train) == 2 * 60
    greedy = [each.id for each in parts.train if each.temperature == 0]
    assert len(set(greedy)) == len(greedy) == 60, "the same answer twice teaches nothing"
    for each in found[::8]:
        params = SamplingParams(max_new_tokens=8, temperature=each.temperature, seed=each.seed)
        assert llm.generate(each.prompt, params).token_ids == each.tokens


def test_half_of_single_responses_are_greedy_whatever_other_prompts_there_are(llm: LLM, tmp_path: Path) -> None:
    few, many = (
        generate_responses(llm, some_prompts(n), tmp_path / f"{n}", max_new_tokens=8, batch=90) for n in (60, 90)
    )
    assert 10 <= sum(each.temperature == 0 for each in split(few).train) <= 30
    shared = {each.prompt for each in split(few).train} & {each.prompt for each in split(many).train}
    assert len(shared) > 20
    assert {each for each in few if each.prompt in shared} == {each for each in many if each.prompt in shared}


def test_responses_of_other_prompts_models_or_lengths_are_not_taken(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    options: Any = {"model": "one", "max_new_tokens": 8, "batch": 44}
    first = generate_responses(llm, some_prompts(), path, **options)
    others = generate_responses(llm, some_prompts(text="other"), path, **options)
    assert [each.prompt for each in others] == [tuple(llm.encode(f"other {each.id}")) for each in others]
    assert len(read_responses(path)) == 88
    assert generate_responses(llm, some_prompts(), path, **options) == first
    assert {each.seed for each in generate_responses(llm, some_prompts(), path, **options, seed=1)} & {
        each.seed for each in first
    } == set()
    with pytest.raises(OptionError, match=r"is of another model; name another folder with --work, or delete"):
        generate_responses(llm, some_prompts(), path, **{**options, "model": "two"})
    with pytest.raises(OptionError, match=r"is of another max_new_tokens"):
        generate_responses(llm, some_prompts(), path, **{**options, "max_new_tokens": 9})
    path.with_suffix(".json").unlink()
    with pytest.raises(OptionError, match=r"responses.json beside it doesn't say .*--responses"):
        generate_responses(llm, some_prompts(), path, **options)


def test_a_time_limit_that_was_reached_is_remembered(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("sakiyomi.train.data.time.monotonic", lambda: clock[0])
    path = tmp_path / "responses.jsonl"

    def passes(done: int, total: int, what: str) -> None:
        clock[0] += 1

    def run(minutes: float) -> list[Response]:
        return generate_responses(
            llm, some_prompts(), path, max_new_tokens=8, batch=2, minutes=minutes, progress=passes
        )

    some = run(0.5)
    assert 25 < len(some) < 35
    assert run(0.5) == some
    assert len(run(0.6)) in range(len(some) + 3, len(some) + 10), "of six seconds more"
    assert len(run(9)) == 44


def test_one_answer_that_fails_is_left_out_and_all_that_fail_are_an_error(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, failing = llm.stream_batch, {3}

    def broken(prompts: Any, *rest: Any, **options: Any) -> Iterator[Any]:
        for index in failing:
            yield index, RuntimeError("broken")
        yield from (each for each in stream(prompts, *rest, **options) if each[0] not in failing)

    monkeypatch.setattr(llm, "stream_batch", broken)
    path = tmp_path / "responses.jsonl"
    with pytest.warns(RuntimeWarning, match=r"1 of 44 answers failed and are left out; the first: broken"):
        assert len(generate_responses(llm, some_prompts(), path, max_new_tokens=8, batch=44)) == 43
    failing.update(range(44))
    with pytest.raises(RuntimeError, match="broken"):
        generate_responses(llm, some_prompts(), path, max_new_tokens=8, batch=44)


def test_prompts_that_are_too_long_are_left_out_with_a_warning(llm: LLM, tmp_path: Path) -> None:
    prompts = [*some_prompts(), Prompt("long", "all", text="a" * 1020)]
    with pytest.warns(RuntimeWarning, match="1 of 45 prompts are left out: with 8 tokens of a response they are too l"):
        assert len(generate_responses(llm, prompts, tmp_path / "r.jsonl", max_new_tokens=8, batch=44)) == 44


def test_a_full_disk_ends_responses_with_one_line(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: str) -> None:
            raise OSError(28, "No space left on device")

    path = tmp_path / "responses.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "open", lambda self, mode="r", **o: (Full if mode == "a" else lambda f: f)(opened(self, mode, **o))
        )
        with pytest.raises(OptionError, match=r"No space left on device\); what is there is kept: make room"):
            generate_responses(llm, some_prompts(), path, max_new_tokens=8, batch=44)
    assert len(generate_responses(llm, some_prompts(), path, max_new_tokens=8, batch=44)) == 44


def test_a_file_of_responses_that_is_wrong_says_where(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    good = '{"id": "a", "category": "b", "temperature": 0, "seed": 1, "prompt": [1], "tokens": [2], "finish": "eos"}\n'
    path.write_text(good + '{"id": "a"}\n')
    with pytest.raises(OptionError, match=r"line 2: must be an object with id, category.*'category'"):
        read_responses(path)


# --- states


def test_states_are_those_of_the_texts(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    layers = (1, 2, HEAD_INPUT)
    long = response(range(300), range(40))
    features = collect(teacher.target, [*responses[:6], long], layers, 64, tmp_path / "s.bin", max_bytes=1e9, key="k")
    assert features.left_out == 0
    for example, each in zip(features.examples, [*responses[:6], long], strict=True):
        text = [*each.prompt, *each.tokens]
        (output,) = teacher.target.forward(
            [Work(teacher.target.new_sequence(), text[:-1], None, 0)], hidden_layers=layers
        )
        expected = torch.stack(output.hidden, 1).bfloat16()[max(0, len(each.prompt) - 256) :]
        assert torch.equal(features.states(example), expected)
        assert example.tokens == tuple(text[max(0, len(each.prompt) - 256) :])
        assert example.tokens[example.start] == each.tokens[0]


def test_states_that_do_not_fit_are_left_out_and_a_file_is_gone_on_with(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    path = tmp_path / "s.bin"
    arguments: Any = (teacher.target, responses, (1, HEAD_INPUT), 64, path)
    whole = collect(*arguments, max_bytes=1e9, key="k")
    values = whole.values.clone()
    half = collect(*arguments, max_bytes=path.stat().st_size / 2, key="k")
    assert 0 < half.left_out < len(responses)
    assert path.stat().st_size == len(values) * 256  # what is there stays
    with path.open("r+b") as file:
        file.truncate(20_001)
    asked = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(teacher.target, name)

        def forward(self, work: Sequence[Work], **options: Any) -> Any:
            asked.append(len(work))
            return teacher.target.forward(work, **options)

    again = collect(Counting(), *arguments[1:], max_bytes=1e9, key="k")  # type: ignore[arg-type]
    assert torch.equal(again.values, values)
    assert 0 < sum(asked) < len(responses)
    asked.clear()
    collect(Counting(), *arguments[1:], max_bytes=1e9, key="another target")  # type: ignore[arg-type]
    assert sum(asked) == len(responses)
    with pytest.raises(OptionError, match="not even one response fits; give more"):
        collect(*arguments, max_bytes=100, key="k")


def test_a_full_disk_says_what_to_do_and_keeps_what_is_there(
    teacher: Teacher, responses: list[Response], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match=r"can't be written \(No such file"):
        collect(teacher.target, responses, (1,), 64, tmp_path / "nowhere" / "s.bin", max_bytes=1e9, key="k")
    path = tmp_path / "s.bin"
    opened = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            if self.file.tell() > 20_000:
                raise OSError(28, "No space left on device")
            self.file.write(data)

    arguments: Any = (teacher.target, responses, (1, HEAD_INPUT), 64, path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode="r", **o: Full(opened(self, mode, **o)))
        with pytest.raises(OptionError, match=r"No space left on device\); what is there is kept.*--disk"):
            collect(*arguments, max_bytes=1e9, key="k")
    assert path.stat().st_size > 20_000
    assert collect(*arguments, max_bytes=20_000, key="k").examples


def test_batches_have_every_example_once(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    features = collect(teacher.target, responses, (HEAD_INPUT,), 64, tmp_path / "s.bin", max_bytes=1e9, key="k")
    groups = plan(features.examples, 60, 3)
    assert sorted(e.row for group in groups for e in group) == [e.row for e in features.examples]
    assert all(sum(e.positions for e in group) <= 60 for group in groups)
    assert groups == plan(features.examples, 60, 3) != plan(features.examples, 60, 4)


def test_batches_of_long_prompts_and_short_responses_are_small() -> None:
    examples = [Example((0,) * (250 + i % 40), 240, 290 * i, "all") for i in range(300)]
    groups = plan(examples, 100_000, 0)
    assert sorted(e.row for group in groups for e in group) == [e.row for e in examples]
    rows = [len(group) * max(len(e.tokens) for e in group) for group in groups]
    assert max(rows) <= BATCH_ROWS < sum(rows) / 3
    assert min(len(group) for group in groups) > 5


# --- networks


def whole_batch(teacher: Teacher, responses: list[Response], layers: tuple[int, ...], path: Path) -> Any:
    features = collect(teacher.target, responses, layers, 64, path, max_bytes=1e9, key="k")
    return features, make_batch(features, features.examples, torch.device("cpu"))


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class PlainEagle:
    """EAGLE-3 as it drafts: a row at a time, with a cache."""

    def __init__(self, network: Eagle3) -> None:
        self.weights = {name: p.detach() for name, p in network.named_parameters()}
        self.network, self.shape = network, network.shape
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def row(self, token: int, h: torch.Tensor) -> torch.Tensor:
        w, shape = self.weights, self.shape
        layer, position = "layers.0.", len(self.keys)
        normed = rms(h, w[layer + "hidden_norm.weight"])
        x = torch.cat([rms(self.network.embedding[token], w[layer + "input_layernorm.weight"]), normed])
        q, k, v = ((w[f"{layer}self_attn.{name}_proj.weight"] @ x).view(-1, shape.head_dim) for name in ("q", "k", "v"))
        self.keys.append(rotated(k, position, shape.frequencies))
        self.values.append(v)
        q = rotated(q, position, shape.frequencies)
        attended = []
        for head in range(shape.heads):
            of = head // (shape.heads // shape.kv_heads)
            keys, values = (torch.stack([each[of] for each in kept]) for kept in (self.keys, self.values))
            attended.append((keys @ q[head] / math.sqrt(shape.head_dim)).softmax(0) @ values)
        out = (normed if self.network.norm_before_residual else h) + w[layer + "self_attn.o_proj.weight"] @ torch.cat(
            attended
        )
        x = rms(out, w[layer + "post_attention_layernorm.weight"])
        gate, up = w[layer + "mlp.gate_proj.weight"] @ x, w[layer + "mlp.up_proj.weight"] @ x
        return out + w[layer + "mlp.down_proj.weight"] @ (F.silu(gate) * up)


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_eagle_is_trained_as_it_drafts(
    teacher: Teacher, responses: list[Response], tmp_path: Path, norm_before_residual: bool
) -> None:
    layers = (1, 2, 3, HEAD_INPUT)
    features, batch = whole_batch(teacher, responses[:3], layers, tmp_path / "s.bin")
    vocabulary = draft_vocabulary(responses, 150, VOCAB)
    options = replace(SMALL, norm_before_residual=norm_before_residual)
    network: Any = make_network("eagle3", teacher, vocabulary, layers, options, EXACT, 5.0)
    for parameter in network.parameters():  # norms of one would hide a missing weight
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    most, steps = int(batch.count.max()), 4
    seen: dict[tuple[int, int, int], torch.Tensor] = {}
    for index, step in enumerate(network.unroll(batch, steps)):
        for row, hidden in zip(step.rows.tolist(), step.frozen, strict=True):
            seen[row // most, row % most, index] = hidden
    checked = 0
    for i, example in enumerate(features.examples):
        states = features.states(example)[:, :-1].flatten(1).float()
        for position in range(example.positions):
            plain = PlainEagle(network)
            for at in range(example.start + position):  # rows that the target's states are known of
                out = plain.row(example.tokens[at + 1], plain.weights["fc.weight"] @ states[at])
            for index in range(steps):
                if (i, position, index) not in seen:
                    break
                found = seen[i, position, index]
                torch.testing.assert_close(found, rms(out, plain.weights["norm.weight"]), rtol=1e-4, atol=1e-4)
                checked += 1
                at = example.start + position + index + 1
                if at >= len(example.tokens):
                    break
                out = plain.row(example.tokens[at], out)
    assert checked == len(seen) > 100


def test_rows_end_where_the_text_or_the_vocabulary_does(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    layers = (1, HEAD_INPUT)
    features, batch = whole_batch(teacher, responses[:5], layers, tmp_path / "s.bin")
    vocabulary = draft_vocabulary(responses[:5], 30, VOCAB)
    most = int(batch.count.max())
    for kind in ("eagle3", "block"):
        network = make_network(kind, teacher, vocabulary, layers, SMALL, EXACT)
        found = {
            (row // most, row % most, index): (label, target)
            for index, step in enumerate(network.unroll(batch, 3))
            for row, label, target in zip(step.rows.tolist(), step.label.tolist(), step.target.tolist(), strict=True)
        }
        expected = {}
        for i, example in enumerate(features.examples):
            for position in range(example.positions):
                for index in range(3):
                    at = example.start + position + 1 + index
                    if at >= len(example.tokens):
                        break
                    label = int(vocabulary.to_draft[example.tokens[at]])
                    expected[i, position, index] = (label, i * (most + network.steps) + position + index)
                    if label < 0:
                        break
        assert found == expected


def test_the_loss_and_its_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    frozen, head = torch.randn(600, 8, requires_grad=True), torch.randn(30, 8)
    trained, own = torch.randn(600, 5, requires_grad=True), torch.randn(30, 5, requires_grad=True)
    targets, index = (2 * torch.randn(700, 30)).softmax(1), torch.randint(700, (600,))
    weight, label = torch.rand(600), torch.randint(-1, 30, (600,))
    total, overlap, hit = DraftLoss.apply(frozen, head, trained, own, targets, index, weight, label)
    (3 * total).backward()
    found = [x.grad.clone() for x in (frozen, trained, own)]
    logits = frozen @ head.t() + trained @ own.t()
    p, log_q = targets[index], logits.log_softmax(1)
    accepted = torch.minimum(p, log_q.exp()).sum(1)
    share = (-3 * accepted.detach()).exp()
    expected = ((share * -(p * log_q).sum(1) + (1 - share) * (1 - accepted)) * weight).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(overlap, accepted)
    assert torch.equal(hit, logits.argmax(1) == label)
    for x in (frozen, trained, own):
        x.grad = None
    (3 * expected).backward()
    for gradient, x in zip(found, (frozen, trained, own), strict=True):
        torch.testing.assert_close(gradient, x.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "eagle3", "block"])
def test_what_is_saved_drafts_as_it_was_trained(
    kind: str, teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    options = replace(EXACT, steps=12, depth=4)
    card = train_drafter(kind, teacher, responses, tmp_path, options, SMALL, command="the command")
    assert card.ended == "time is up"
    assert card.history[-1]["hit"] > card.history[0]["hit"] / 2
    told = json.loads((tmp_path / "card.json").read_text())
    assert told["command"] == "the command"
    assert told["score"]["conditional"] == list(card.score.conditional)
    assert "the command" in (tmp_path / "README.md").read_text()

    # A text that goes on as the saved drafter drafts must be one in which the network hits everything.
    made: Any = load_drafter(tmp_path, teacher.parts, weights="fp32", kernels="torch")
    made.width = 1
    network: Any = trained_network(kind, teacher, responses, tmp_path)
    total = hit = 0
    for each in responses[:8]:
        text = [*each.prompt, *each.tokens]
        work = Work(teacher.target.new_sequence(), text, None, 0)
        (output,) = teacher.target.forward([work], hidden_layers=made.hidden_layers)
        wanted = (*output.hidden, output.hidden[0]) if kind != "mlp" else output.hidden
        for at in range(len(each.prompt) + 1, len(text), 3):
            session = made.session(text[:at], SamplingParams(max_new_tokens=9), False)
            session.read([h[: at - 1] for h in output.hidden])
            draft = session.propose(4)
            tokens = torch.tensor([[*text[:at], *draft.tokens]])
            states = torch.zeros(1, tokens.shape[1] - 1, len(wanted), 64)
            states[0, : at - 1] = torch.stack([h[: at - 1] for h in wanted], 1)
            count = torch.tensor([len(draft)])
            hits, _ = network.replay(Batch(tokens, states, torch.tensor([at - 2]), count, ()), 4)
            total, hit = total + len(draft), hit + int(hits[0, 0].sum())
    assert total > 100
    assert hit > 0.97 * total  # near ties


def trained_network(kind: str, teacher: Teacher, responses: list[Response], folder: Path) -> Any:
    """Return a network with the weights that a training left, rounded as they are saved."""
    vocabulary = draft_vocabulary(cut_loops(split(responses).train)[0], SMALL.draft_vocabulary, VOCAB)
    layers = (HEAD_INPUT,) if kind == "mlp" else (*teacher.default_layers(), HEAD_INPUT)
    network = make_network(kind, teacher, vocabulary, layers, SMALL, EXACT)
    with safe_open(folder / "training" / f"{kind}.safetensors", framework="pt") as file, torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(file.get_tensor(f"best.{name}").bfloat16())
    if kind == "mlp":
        network.others = network.others.bfloat16().float()
    return network


# --- the loop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mlp", "eagle3", "block"])
def test_the_loss_goes_down(
    kind: str, dtype: torch.dtype, teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    options = replace(EXACT, steps=40, batch=200, dtype=dtype)
    network, features, held_out = ready(kind, teacher, responses, tmp_path, options)
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(features, features.examples, torch.device("cpu"))
    before = network.loss(batch, generator)
    train(network, features, held_out, options, tmp_path / "state.safetensors")
    after = network.loss(batch, generator.manual_seed(0))
    assert after.hit > before.hit + 0.05
    assert after.value < before.value


def ready(
    kind: str, teacher: Teacher, responses: list[Response], folder: Path, options: TrainOptions = EXACT
) -> tuple[Any, Any, Any]:
    vocabulary = draft_vocabulary(responses, SMALL.draft_vocabulary, VOCAB)
    layers = (HEAD_INPUT,) if kind == "mlp" else (1, 2, HEAD_INPUT)
    greedy = [each for each in responses if each.temperature == 0]
    network = make_network(kind, teacher, vocabulary, layers, SMALL, options)
    parts = (responses[:30], "s"), (greedy[-8:], "h")
    features, held_out = (
        collect(teacher.target, part, layers, 64, folder / f"{name}.bin", max_bytes=1e9, key="k")
        for part, name in parts
    )
    return network, features, held_out


def test_a_step_has_as_many_positions_as_batch_says(
    teacher: Teacher, responses: list[Response], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "MICRO_BATCH", 100)
    network, features, held_out = ready("mlp", teacher, responses, tmp_path)
    loss, computed = network.loss, []

    def counted(batch: Any, generator: Any) -> Any:
        computed.append(batch.positions)
        return loss(batch, generator)

    network.loss = counted
    done: list[int] = []
    options = replace(EXACT, batch=250, steps=2)
    train(network, features, held_out, options, tmp_path / "state", progress=lambda *_: done.append(sum(computed)))
    first, both = done[:2]
    assert max(computed) <= 100
    assert 250 - 100 < first <= 250
    assert 250 - 100 < both - first <= 250


def test_a_training_that_was_interrupted_goes_on_as_if_it_had_not_been(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    def run(name: str, stop: int | None = None) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        network, features, held_out = ready("eagle3", teacher, responses, tmp_path / name)

        def press(done: int, total: int, what: str) -> None:
            if stop is not None and done == 1000 * stop // 12:
                signal.raise_signal(signal.SIGINT)

        state = tmp_path / name / "state.safetensors"
        with interruptions() as interrupted:
            outcome = train(network, features, held_out, EXACT, state, key="k", interrupted=interrupted, progress=press)
        return outcome, {name: p.detach().clone() for name, p in network.named_parameters()}

    outcome, expected = run("whole")
    assert outcome.progressed.step == 12
    assert run("parts", stop=5)[0].why == "interrupted"
    assert run("parts", stop=8)[0].progressed.step == 8
    again, found = run("parts")
    assert again.why == "time is up"
    assert again.score == outcome.score
    assert again.progressed.step == 12
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_a_state_of_another_training_is_not_gone_on_with(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    network, features, held_out = ready("mlp", teacher, responses, tmp_path)
    state = tmp_path / "state.safetensors"
    assert train(network, features, held_out, EXACT, state, key="one").progressed.step == 12
    assert train(network, features, held_out, EXACT, state, key="one").progressed.step == 12
    with pytest.warns(RuntimeWarning, match="begins anew"):
        other = train(network, features, held_out, replace(EXACT, steps=3), state, key="two")
    assert other.progressed.step == 3


def test_a_state_that_is_cut_or_of_another_version_begins_anew(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    network, features, held_out = ready("mlp", teacher, responses, tmp_path)
    begun = {name: p.detach().clone() for name, p in network.named_parameters()}
    state = tmp_path / "state.safetensors"
    train(network, features, held_out, EXACT, state, key="one")
    whole = state.read_bytes()
    for broken in (
        whole[: len(whole) // 2],
        whole.replace(b'\\"epoch\\"', b'\\"epich\\"'),
        whole.replace(b"average.", b"avaraga."),
    ):
        assert broken != whole
        state.write_bytes(broken)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(begun[name])
        with pytest.warns(RuntimeWarning, match="cut off, or of another version: training begins anew"):
            again = train(network, features, held_out, EXACT, state, key="one")
        assert len(again.progressed.history) == 3
        assert state.read_bytes() == whole or again.progressed.step == 12


def test_ctrl_c_at_the_end_still_saves_and_measures(
    teacher: Teacher, responses: list[Response], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(done: int, total: int, what: str) -> None:
        if what == "measuring":
            assert (tmp_path / "config.json").exists(), "the drafter is there before it is measured"
            assert json.loads((tmp_path / "card.json").read_text())["ended"] == "not yet"
            signal.raise_signal(signal.SIGINT)

    card = train_drafter("mlp", teacher, responses, tmp_path, EXACT, SMALL, progress=press)
    assert card.ended == "time is up"
    assert json.loads((tmp_path / "card.json").read_text())["ended"] == card.ended
    assert "the same command goes on from here" in capsys.readouterr().err


def test_a_loss_that_is_not_a_number_ends_with_the_last_good_state(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    network, features, held_out = ready("eagle3", teacher, responses, tmp_path)
    loss, calls = network.loss, []

    def broken(batch: Any, generator: Any) -> Any:
        calls.append(1)
        found = loss(batch, generator)
        return replace(found, value=found.value * math.nan) if len(calls) == 10 else found

    network.loss = broken
    with pytest.warns(RuntimeWarning, match="step 10 is not a number: training ends here, with the best parameters"):
        outcome = train(network, features, held_out, EXACT, tmp_path / "state.safetensors")
    assert "step 10 is not a number" in outcome.why
    assert outcome.progressed.step == 9
    assert all(parameter.isfinite().all() for parameter in network.parameters())


def test_training_ends_early_where_it_gets_no_better(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    network, features, held_out = ready("mlp", teacher, responses, tmp_path)
    options = replace(EXACT, steps=1000, evaluations=500, patience=3, learning_rate=0.0)
    outcome = train(network, features, held_out, options, tmp_path / "state.safetensors")
    assert outcome.why == "no better"
    assert len(outcome.progressed.history) <= 5


def test_a_state_that_can_not_be_written_says_so(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    network, features, held_out = ready("mlp", teacher, responses, tmp_path)
    with pytest.warns(RuntimeWarning, match=r"can't be written .*free some of the disk"):
        outcome = train(
            network, features, held_out, replace(EXACT, steps=3), tmp_path / "nowhere" / "state.safetensors"
        )
    assert outcome.progressed.step == 3


def test_a_tally_walks_as_a_text_is_written() -> None:
    tally = Tally(3)
    tally.add("a", [2, 0, 0, 1, 1, 0])  # from 0: two stand, to 3; from 3: one, to 5; from 5: none
    score = tally.score()
    assert score.tokens_per_call == (6 / 4, 6 / 3, 6 / 3)  # with k = 1: to 2, 3, 5, 6
    assert score.conditional == (3 / 6, 1 / 3, 0 / 1)
    assert score.by_category == {"a": score.tokens_per_call}
    tally = Tally(2)
    tally.add("a", [2, 1])  # all stands up to the end: of three tokens the target wrote none
    assert tally.score().tokens_per_call == (2 / 1, 2 / 1)


def test_a_table_is_counted_and_replayed(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    card = train_drafter("table", teacher, responses, tmp_path, EXACT, SMALL)
    drafter = load_drafter(tmp_path, teacher.parts)
    assert drafter.name == "table"
    assert card.score.positions > 100
    assert 1.0 <= card.score.tokens_per_call[0] <= card.score.tokens_per_call[-1]
    assert not (tmp_path / "training").exists()


def test_a_table_is_measured_as_a_chain() -> None:
    class Tree:
        def session(self, *_: Any) -> Tree:
            return self

        def propose(self, budget: int) -> Draft:
            return Draft((5, 6, 7, 8, 9), (-1, -1, 0, 1, 3), (0.6, 0.4, 0.9, 0.9, 0.9), "table")

        def observe(self, tokens: Sequence[int]) -> None:
            pass

    drafter: Any = Tree()
    assert _replay(drafter, response([1], [0, 5, 7, 6, 8, 9]), 3) == [2, 0, 0, 0, 0]


def test_options_that_can_not_work_are_refused(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kind='x': must be one of table, mlp, eagle3, block"):
        train_drafter("x", teacher, responses, tmp_path, EXACT)
    with pytest.raises(OptionError, match=r"--layers 1,9: must be different numbers in 0\.\.3"):
        train_drafter("eagle3", teacher, responses, tmp_path, EXACT, replace(SMALL, layers=(1, 9)))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OptionError, match="can't be made"):
        train_drafter("eagle3", teacher, responses, file / "folder", EXACT)
    short = [replace(each, tokens=each.tokens[:2]) for each in responses]
    with pytest.raises(OptionError, match="0 responses to learn from and 0 greedy ones"):
        train_drafter("eagle3", teacher, short, tmp_path / "short", EXACT)


def test_a_folder_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    output = tmp_path / "output"
    check_output(output, "eagle3")
    (output / "training").mkdir(parents=True)
    (output / "work").mkdir()
    check_output(output, "eagle3", work=output / "work")
    with pytest.raises(OptionError, match="is there, and is no drafter's folder; name a new one"):
        check_output(output, "eagle3")
    (output / "config.json").write_text("{}")
    with pytest.raises(OptionError, match="is there, and is no drafter's folder"):
        check_output(output, "eagle3", work=output / "work")
    (output / "card.json").write_text('{"kind": "eagle3"}')
    check_output(output, "eagle3")
    with pytest.raises(OptionError, match="holds a drafter of kind eagle3; name another folder"):
        check_output(output, "table")
    with pytest.raises(OptionError, match=r"--work .*: is the folder of --output"):
        check_output(output, "eagle3", work=output)
    with pytest.raises(OptionError, match="is the model itself"):
        check_output(output, "eagle3", model=tmp_path / "work" / ".." / "output")
    with pytest.raises(OptionError, match="is there, and is no drafter's folder"):
        check_output(output / "config.json", "eagle3")


def test_the_card_tells_what_was_used(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"kind": "mlp"}')
    (tmp_path / "table.safetensors").write_bytes(b"of another drafter")
    learned = len(cut_loops(split(responses).train)[0])
    with pytest.warns(RuntimeWarning, match=f"of {learned} responses don't fit into --disk 0.00015 and are left out"):
        card = train_drafter("mlp", teacher, responses, tmp_path, EXACT, SMALL, disk_gb=0.00015)
    data = card.data
    assert 5 < data["responses"] == learned - data["left_out_for_disk"] < learned
    assert data["prompts"] == data["responses"]
    assert 0 < data["held_out"]["responses"] == data["held_out"]["greedy"] < 15
    assert f"of {data['responses']} responses to {data['prompts']} prompts" in card.markdown()
    assert f"the best of {len(card.history)} evaluations on the held-out texts" in card.markdown()
    assert card.megabytes == (tmp_path / "model.safetensors").stat().st_size / 1e6


def test_the_drafter_names_the_architecture_of_its_model(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    told = replace(teacher, architectures=("TinyForCausalLM",))
    train_drafter("eagle3", told, responses, tmp_path, replace(EXACT, steps=1), SMALL)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/tiny",
        "architectures": ["TinyForCausalLM"],
    }


# --- the target


def test_a_target_whose_logits_are_not_its_head_times_its_states_is_refused(teacher: Teacher) -> None:
    class Changed:
        def __init__(self, change: Any) -> None:
            self.change = change

        def __getattr__(self, name: str) -> Any:
            return getattr(teacher.target, name)

        def forward(self, work: Sequence[Work], **options: Any) -> list[TargetOutput]:
            found = teacher.target.forward(work, **options)
            return [TargetOutput(self.change(each.logits), each.hidden) for each in found]

    torch.manual_seed(0)
    bias = 3 * torch.randn(VOCAB)
    config = make_reference("llama").config.to_dict()
    for change in (lambda x: x + bias, lambda x: (x / 5).tanh() * 5, lambda x: x * 0.3, lambda x: x * math.nan):
        changed: Any = Changed(change)
        with pytest.raises(UnsupportedModelError, match=r"org/tiny: its logits are not its head times .*--kind table"):
            Teacher.of(changed, teacher.parts, config, {}, "org/tiny")
        assert Teacher.of(changed, teacher.parts, {"model_type": "x"}, {}, "org/tiny", by_states=False)
    same: Any = Changed(lambda x: (x + 7).bfloat16())
    assert Teacher.of(same, teacher.parts, {"model_type": "x"}, {}, "org/tiny")


@pytest.mark.parametrize(("family", "copied"), [("qwen2", False), ("qwen3", False), ("llama", True)])
def test_attention_that_has_norms_or_biases_is_no_start(family: str, copied: bool, teacher: Teacher) -> None:
    reference = make_reference(family)
    config = reference.config.to_dict()
    made = Teacher.of(teacher.target, teacher.parts, config, reference.state_dict(), "a", by_states=False)
    assert {f"self_attn.{name}_proj.weight" in made.layer for name in "qk"} == {copied}
    assert "self_attn.v_proj.weight" in made.layer


def test_a_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = {fingerprint(tmp_path, "bf16"), fingerprint(tmp_path, "fp32")}
    (tmp_path / "model.safetensors").write_bytes(b"weighty")
    found.add(fingerprint(tmp_path, "bf16"))
    (tmp_path / "config.json").write_text('{"a": 1}')
    found.add(fingerprint(tmp_path, "bf16"))
    assert len(found) == 4


def test_states_and_trainings_of_other_weights_are_not_gone_on_with(
    teacher: Teacher, responses: list[Response], tmp_path: Path
) -> None:
    arguments: Any = (responses, tmp_path, replace(EXACT, steps=2), SMALL)
    train_drafter("mlp", replace(teacher, fingerprint="one"), *arguments)
    before = json.loads((tmp_path / "training" / "states-head.json").read_text())
    with pytest.warns(RuntimeWarning, match="of a training with other data or options: training begins anew"):
        train_drafter("mlp", replace(teacher, fingerprint="two"), *arguments)
    assert json.loads((tmp_path / "training" / "states-head.json").read_text()) != before


# --- the command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    reference: Any = make_reference("llama", num_hidden_layers=2)
    reference.save_pretrained(folder)
    byte_tokenizer().fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    app = typer.Typer()
    app.command()(command.train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAKIYOMI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield lambda *arguments, **options: CliRunner().invoke(app, list(map(str, arguments)), **options)


def prompts_file(folder: Path, count: int = 44) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt number {i * 37 % 101}"}) + "\n" for i in range(count)))
    return path


def test_the_command_trains_and_goes_on(model: Path, run: Any, tmp_path: Path) -> None:
    prompts, output = prompts_file(tmp_path), tmp_path / "drafter"
    options = (model, "--prompts", prompts, "--output", output, "-n", 12, "--vocabulary", 100, "--minutes", 0.02)
    result = run(*options, "--json")
    assert result.exit_code == 0, result.output + str(result.exception)
    assert result.stderr.startswith("responses (0%)\nstates (0%)\n")
    card = json.loads(result.stdout)
    assert (card["kind"], card["model"]) == ("eagle3", model.name)
    assert card["data"]["held_out"]["prompts"] == 20
    assert card["score"]["positions"] > 20
    assert card["projection"]["speed_up"] >= 1
    assert (output / "README.md").exists()
    responses = (output / "training" / "responses.jsonl").read_text()
    again = run(*options[:-1], 0.03)
    assert again.exit_code == 0, again.output + str(again.exception)
    assert "tokens per target call" in again.output
    assert (output / "training" / "responses.jsonl").read_text() == responses
    assert json.loads((output / "card.json").read_text())["steps"] > card["steps"]
    loaded = sakiyomi.load(model, trained=output, drafter="eagle3", num_speculative_tokens=3)
    assert loaded.generate("prompt", SamplingParams(max_new_tokens=8)).token_ids

    table = tmp_path / "table"
    given = ("--responses", output / "training" / "responses.jsonl", "--kind", "table")
    made = run(model, *given, "--output", table)
    assert made.exit_code == 0, made.output + str(made.exception)
    assert sorted(each.name for each in table.iterdir()) == [
        "README.md",
        "card.json",
        "config.json",
        "table.safetensors",
    ]
    for taken, message in ((output, "holds a drafter of kind eagle3"), (model, "is the model itself")):
        with pytest.raises(OptionError, match=message):
            run(model, *given, "--output", taken, catch_exceptions=False)
    with command._alone(output / "training"), pytest.raises(OptionError, match="another run uses it; wait for its end"):
        run(*options, catch_exceptions=False)
    with command._alone(output / "training"):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "medusa"], "--kind medusa: must be one of table, mlp, eagle3, block"),
        ([], "--prompts, --responses: give one of them"),
        (["--minutes", "0"], "--minutes 0: must be above 0"),
        (["--minutes", "nan"], "--minutes nan: must be above 0"),
        (["--disk", "-1"], "--disk -1: must be above 0"),
        (["--vocabulary", "1"], "--vocabulary 1: must be at least 2"),
        (["--layers", "2;3"], "--layers 2;3: must be numbers with commas"),
        (["--layers", "2,9"], "--layers 2,9: must be different numbers in 0..2"),
        (["--seed", "-1"], "--seed -1: must be in 0..2147483647"),
        (["--kind", "table", "--order", "9"], "--order 9: must be in 2..8"),
        (["--kind", "table", "--minutes", "60"], "--minutes 60.0: does nothing for --kind table; leave it out"),
        (["--kind", "mlp", "--layers", "1"], "--layers 1: does nothing for --kind mlp; leave it out"),
        (["--order", "3"], "--order 3: does nothing for --kind eagle3; leave it out"),
        (["--kind", "table", "--megabytes", "0"], "--megabytes 0: must be above 0"),
        (["--responses", "x", "-n", "9"], "--max-new-tokens 9: does nothing with --responses, which are written"),
        (["--dtype", "fp8"], "--dtype fp8: must be one of auto, bf16, fp32"),
        (["--device", "abacus"], "device='abacus': torch has no such device here"),
    ],
)
def test_options_of_the_command_that_can_not_work(
    options: list[str], message: str, model: Path, run: Any, tmp_path: Path
) -> None:
    without = message.startswith("--prompts") or "--responses" in options
    given = [] if without else ["--prompts", prompts_file(tmp_path)]
    result = run(model, "--output", tmp_path / "drafter", *given, *options)
    assert isinstance(result.exception, OptionError)
    assert message in str(result.exception)
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ""}\n', "line 2: prompt: must be a non-empty text"),
        ('{"prompt": "a"}\nprompt\n', r"line 2: not JSON .*each line must be like"),
        ("", "has no prompts"),
    ],
)
def test_a_file_of_prompts_that_is_wrong_says_where(
    text: str, message: str, model: Path, run: Any, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    result = run(model, "--output", tmp_path / "drafter", "--prompts", path)
    assert isinstance(result.exception, OptionError)
    assert re.search(message, str(result.exception))


def test_too_few_prompts_say_how_many(model: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.loading.LoadedModel.load", None)  # which would take time
    result = run(model, "--output", tmp_path / "drafter", "--prompts", prompts_file(tmp_path, 8), "-n", 8)
    assert "8 different prompts; at least 40 are needed" in str(result.exception)


def test_ctrl_c_before_training_says_that_the_command_goes_on(
    model: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sakiyomi.train.data.generate_responses", pressed)
    result = run(model, "--output", tmp_path / "drafter", "--prompts", prompts_file(tmp_path))
    assert result.exit_code == 130
    assert result.stderr == "sakiyomi: interrupted; the same command goes on from here\n"


def test_the_command_is_one_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    told = CliRunner().invoke(cli.app, ["train", "--help"])
    assert told.exit_code == 0
    assert "Example: sakiyomi train smollm2-135m --prompts prompts.jsonl" in " ".join(told.stdout.split())
    assert {"table", *command._NETWORKS} == set(KINDS)
    monkeypatch.setattr("sys.argv", ["sakiyomi", "train", "m", "--output", "x", "--kind", "y"])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 2
    assert capsys.readouterr().err == "sakiyomi: --kind y: must be one of table, mlp, eagle3, block\n"


def test_the_command_line_is_there_without_the_heavy_imports() -> None:
    code = (
        "import sys, sakiyomi.cli; print([name for name in ('torch', 'numpy', 'rich.progress') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_on_a_card_does_not_name_folders_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["train", "org/model", "--prompts", str(tmp_path / "a" / "p.jsonl"), "--output=/elsewhere/far/drafter"]
    assert command._command(given) == "sakiyomi train org/model --prompts a/p.jsonl --output=drafter"


def test_progress_is_a_line_for_each_stage_and_minute_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.show_progress(lines=True) as show:
        for done in range(100):
            show(done, 100, "responses")
            clock[0] += 1
        show(0, 1000, "training: loss 3")
    assert capsys.readouterr().err == "responses (0%)\nresponses (60%)\ntraining: loss 3 (0%)\n"
