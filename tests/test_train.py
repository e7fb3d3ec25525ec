"""Training: what it is trained on, that it trains what drafts, that it can be interrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, byte_tokenizer, make_reference, make_target

from sakiyomi.bench.workload import Prompt
from sakiyomi.drafters.trained import TargetParts, load_drafter
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import HEAD_INPUT, Work
from sakiyomi.llm import LLM
from sakiyomi.sampling import SamplingParams
from sakiyomi.train import trainer
from sakiyomi.train.data import (
    Response,
    cut_loops,
    draft_vocabulary,
    generate_responses,
    loop_start,
    read_responses,
    split,
)
from sakiyomi.train.features import collect, make_batch, plan
from sakiyomi.train.networks import Block, DraftLoss, Eagle3, Mlp
from sakiyomi.train.run import DrafterOptions, make_network, train_drafter
from sakiyomi.train.target import Teacher
from sakiyomi.train.trainer import Tally, TrainOptions, evaluate, train

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
    answers = [
        response([i], [1, 2, 3], id=str(i), temperature=float(j), seed=j) for i in range(600) for j in range(3)
    ]
    found = split(answers, seed=1)
    train, held = ({each.prompt for each in part} for part in (found.train, found.held_out))
    assert len(held) == 30
    assert not train & held
    assert len(found.held_out) == 90
    assert len(found.train) + len(found.held_out) == len(answers)
    assert split(answers, seed=1) == found
    assert len({each.prompt for each in split(answers[:240]).held_out}) == 20  # at least
    with pytest.raises(OptionError, match="39 different prompts .* at least 40 are needed"):
        split(answers[: 39 * 3])


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    found = draft_vocabulary([response([9, 9], [5, 5, 5, 3, 3, 200])], 4, 300)
    assert found.ids.tolist() == [3, 5, 9, 200]
    assert found.coverage == 1.0
    assert found.to_draft[[3, 5, 9, 200, 0]].tolist() == [0, 1, 2, 3, -1]
    assert (found.to_draft >= 0).sum() == 4
    assert draft_vocabulary([response([9], [5, 5, 3])], 1, 300).coverage == pytest.approx(2 / 3)
    assert len(draft_vocabulary([response([9], [5])], 1000, 300)) == 300


def test_responses_are_half_greedy_and_collection_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    prompts = [Prompt(str(i), "all", text=f"prompt {i}") for i in range(12)]

    class Stop(Exception):
        pass

    def interrupt(done: int, total: int, what: str) -> None:
        if done == 5:
            raise Stop

    with pytest.raises(Stop):
        generate_responses(llm, prompts, path, max_new_tokens=8, batch=3, progress=interrupt)
    first = path.read_text()
    assert len(read_responses(path)) == 5
    path.write_text(first + '{"id": "cut o')  # as a power cut leaves it
    found = generate_responses(llm, prompts, path, max_new_tokens=8, batch=3)
    assert path.read_text().startswith(first)
    assert sorted(each.id for each in found) == sorted(prompt.id for prompt in prompts)
    assert read_responses(path) == found
    whole = generate_responses(llm, prompts, tmp_path / "whole.jsonl", max_new_tokens=8, batch=12)
    assert set(whole) == set(found)
    assert 2 <= sum(each.temperature == 0 for each in found) <= 10
    for each in found:
        params = SamplingParams(max_new_tokens=8, temperature=each.temperature, seed=each.seed)
        assert llm.generate(each.prompt, params).token_ids == each.tokens


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
    features = collect(
        teacher.target, [*responses[:6], long], layers, 64, tmp_path / "s.bin", max_bytes=1e9, key="k"
    )
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
        q, k, v = (
            (w[f"{layer}self_attn.{name}_proj.weight"] @ x).view(-1, shape.head_dim) for name in ("q", "k", "v")
        )
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
    features, batch = whole_batch(teacher, responses[:5], layers, tmp_path / "s.bin")
    vocabulary = draft_vocabulary(responses, 150, VOCAB)
    options = replace(SMALL, norm_before_residual=norm_before_residual)
    network: Any = make_network("eagle3", teacher, vocabulary, layers, options, EXACT)
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
    assert checked == len(seen) > 150


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
    # The same few texts behind slightly different prompts: a random target has nothing else to learn.
    responses = [replace(r, prompt=(i, *r.prompt)) for r in responses if not r.temperature for i in range(40, 45)][:75]
    options = replace(EXACT, steps=80, depth=4)
    card = train_drafter(kind, teacher, responses, tmp_path / kind, options, SMALL, command="the command")
    first, last = card.history[0], card.history[-1]
    print(card.history, card.score)
    assert last["hit"] > first["hit"]
    assert card.score.positions > 100
    made: Any = load_drafter(tmp_path / kind, teacher.parts, weights="fp32", kernels="torch")
    held = [r for r in split(cut_loops(responses)[0]).held_out if r.temperature == 0]
    tally = Tally(4)
    made.width = 1
    for each in held:
        text = [*each.prompt, *each.tokens]
        layers = made.hidden_layers
        (output,) = teacher.target.forward(
            [Work(teacher.target.new_sequence(), text, None, 0)], hidden_layers=layers
        )
        accepted = []
        for at in range(len(each.prompt) + 1, len(text)):
            session = made.session(text[:at], SamplingParams(max_new_tokens=9), False)
            session.read([h[: at - 1].bfloat16().float() for h in output.hidden])
            draft = session.propose(4)
            stood = 0
            while stood < len(draft) and at + stood < len(text) and draft.tokens[stood] == text[at + stood]:
                stood += 1
            accepted.append(stood)
        tally.add(each.category, accepted)
    # Weights were rounded to bfloat16, so that a few near ties fall otherwise.
    assert tally.score().positions == card.score.positions
    assert tally.score().tokens_per_call[-1] == pytest.approx(card.score.tokens_per_call[-1], rel=0.03)
    assert card.score.tokens_per_call[-1] > 1.1
    told = json.loads((tmp_path / kind / "card.json").read_text())
    assert told["command"] == "the command"
    assert "the command" in (tmp_path / kind / "README.md").read_text()
