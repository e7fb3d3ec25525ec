"""Training: what it is trained on, that it trains what drafts, that it can be interrupted."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from conftest import VOCAB, byte_tokenizer, make_reference, make_target
from sakiyomi.bench.workload import Prompt
from sakiyomi.drafters.trained import TargetParts, load_drafter
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import HEAD_INPUT, Work
from sakiyomi.llm import LLM
from sakiyomi.sampling import SamplingParams
from sakiyomi.train.data import (
    Response,
    cut_loops,
    draft_vocabulary,
    generate_responses,
    loop_start,
    read_responses,
    split,
)
from sakiyomi.train.features import Batch, collect, make_batch, plan
from sakiyomi.train.networks import DraftLoss, Eagle3
from sakiyomi.train.run import DrafterOptions, make_network, train_drafter
from sakiyomi.train.target import Teacher
from sakiyomi.train.trainer import Tally, TrainOptions, train

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
    assert len({each.prompt for each in split(answers[:240]).held_out}) == 20  # at least
    with pytest.raises(OptionError, match=r"39 different prompts .* at least 40 are needed"):
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
    features, batch = whole_batch(teacher, responses[:4], layers, tmp_path / "s.bin")
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
    vocabulary = draft_vocabulary(split(cut_loops(responses)[0]).train, SMALL.draft_vocabulary, VOCAB)
    layers = (HEAD_INPUT,) if kind == "mlp" else (*teacher.default_layers(), HEAD_INPUT)
    network = make_network(kind, teacher, vocabulary, layers, SMALL, EXACT)
    with safe_open(folder / "training" / f"{kind}.safetensors", framework="pt") as file, torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(file.get_tensor(f"best.{name}").bfloat16())
    for name in ("target_head", "others"):
        if hasattr(network, name):
            setattr(network, name, getattr(network, name).bfloat16().float())
    return network


# --- the loop


@pytest.mark.parametrize("kind", ["mlp", "eagle3", "block"])
def test_the_loss_goes_down(kind: str, teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    network, features, held_out = ready(kind, teacher, responses, tmp_path)
    options = replace(EXACT, steps=60, batch=2000)
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(features, features.examples, torch.device("cpu"))
    before = network.loss(batch, generator)
    train(network, features, held_out, options, tmp_path / "state.safetensors")
    after = network.loss(batch, generator.manual_seed(0))
    assert after.hit > before.hit + 0.05
    assert after.value < before.value


def ready(kind: str, teacher: Teacher, responses: list[Response], folder: Path) -> tuple[Any, Any, Any]:
    vocabulary = draft_vocabulary(responses, SMALL.draft_vocabulary, VOCAB)
    layers = (HEAD_INPUT,) if kind == "mlp" else (1, 2, HEAD_INPUT)
    greedy = [each for each in responses if each.temperature == 0]
    network = make_network(kind, teacher, vocabulary, layers, SMALL, EXACT)
    parts = (responses[:30], "s"), (greedy[-8:], "h")
    features, held_out = (
        collect(teacher.target, part, layers, 64, folder / f"{name}.bin", max_bytes=1e9, key="k")
        for part, name in parts
    )
    return network, features, held_out


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
        outcome = train(network, features, held_out, EXACT, state, key="k", progress=press)
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
    with pytest.raises(OptionError, match=r"can't be written .*free some of the disk"):
        train(network, features, held_out, replace(EXACT, steps=1), tmp_path / "nowhere" / "state.safetensors")


def test_a_tally_walks_as_a_text_is_written() -> None:
    tally = Tally(3)
    tally.add("a", [2, 0, 0, 1, 1, 0])  # from 0: two stand, to 3; from 3: one, to 5; from 5: none
    score = tally.score()
    assert score.tokens_per_call == (6 / 4, 6 / 3, 6 / 3)  # with k = 1: to 2, 3, 5, 6
    assert score.conditional == (3 / 6, 1 / 3, 0 / 1)
    assert score.by_category == {"a": score.tokens_per_call}


def test_a_table_is_counted_and_replayed(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    card = train_drafter("table", teacher, responses, tmp_path, EXACT, SMALL)
    drafter = load_drafter(tmp_path, teacher.parts)
    assert drafter.name == "table"
    assert card.score.positions > 100
    assert 1.0 <= card.score.tokens_per_call[0] <= card.score.tokens_per_call[-1]
    assert not (tmp_path / "training").exists()


def test_options_that_can_not_work_are_refused(teacher: Teacher, responses: list[Response], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kind='x': must be one of table, mlp, eagle3, block"):
        train_drafter("x", teacher, responses, tmp_path, EXACT)
    with pytest.raises(OptionError, match=r"layers=1,9: must be different numbers in 0\.\.3"):
        train_drafter("eagle3", teacher, responses, tmp_path, EXACT, replace(SMALL, layers=(1, 9)))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OptionError, match="can't be made"):
        train_drafter("eagle3", teacher, responses, file, EXACT)
