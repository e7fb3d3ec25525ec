"""Block drafters against the equations, computed slowly; the format; the text stays the target's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conftest import KERNELS, VOCAB, make_reference, make_target
from sakiyomi import core
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters.block import BlockDrafter, BlockModel, make_model
from sakiyomi.drafters.model import ALTERNATIVE
from sakiyomi.drafters.trained import TargetParts, load_drafter, save_block
from sakiyomi.errors import CorruptModelError, OptionError, UnsupportedModelError
from sakiyomi.interfaces import Draft
from sakiyomi.policy import AdaptivePolicy, FixedPolicy
from sakiyomi.sampling import SamplingParams, gumbel_noise
from test_eagle import (
    COSTS,
    DRAFT_VOCAB,
    GREEDY,
    HIDDEN,
    LAYER,
    PROMPT,
    SAMPLED,
    begun,
    decoder_layer,
    main_path,
    parts_of,
    paths,
    states_of,
    texts,
)

SIZE, RANK = 6, 8


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return make_reference("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(reference):
    return make_target(reference, kernels="auto")


@pytest.fixture(scope="module")
def parts(reference) -> TargetParts:
    return parts_of(reference)


KINDS = ("full", "bare", "no-confidence", "no-markov", "qwen3")


class Made:
    """A drafter's config and tensors, and the equations on them: whole sequences, nothing remembered."""

    def __init__(self, kind: str, parts: TargetParts, seed: int = 0) -> None:
        self.kind, self.parts = kind, parts
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

        def norm(size: int = HIDDEN) -> torch.Tensor:
            return 1 + 0.2 * torch.randn(size, generator=generator)

        self.layer = {**LAYER, "model_type": "qwen3" if kind == "qwen3" else "llama"}
        self.ids = sorted(torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].tolist())
        self.hidden_layers = (1, 4)
        self.tensors = {
            "fc.weight": normal(HIDDEN, 2 * HIDDEN),
            "hidden_norm.weight": norm(),
            "mask_embedding": norm() - 1,
            "norm.weight": norm(),
            "lm_head.weight": 2 * normal(DRAFT_VOCAB, HIDDEN),
            "layers.0.self_attn.q_proj.weight": normal(64, HIDDEN),
            "layers.0.self_attn.k_proj.weight": normal(32, HIDDEN),
            "layers.0.self_attn.v_proj.weight": normal(32, HIDDEN),
            "layers.0.self_attn.o_proj.weight": normal(HIDDEN, 64),
            "layers.0.mlp.gate_proj.weight": normal(96, HIDDEN),
            "layers.0.mlp.up_proj.weight": normal(96, HIDDEN),
            "layers.0.mlp.down_proj.weight": normal(HIDDEN, 96),
            "layers.0.input_layernorm.weight": norm(),
            "layers.0.post_attention_layernorm.weight": norm(),
        }
        if kind == "qwen3":
            self.tensors["layers.0.self_attn.q_norm.weight"] = norm(16)
            self.tensors["layers.0.self_attn.k_norm.weight"] = norm(16)
        if kind not in ("bare", "no-markov"):
            self.tensors["markov.w1"] = 4 * normal(VOCAB, RANK)
            self.tensors["markov.w2"] = 4 * normal(RANK, DRAFT_VOCAB)
        if kind not in ("bare", "no-confidence"):
            rank = 0 if kind == "no-markov" else RANK
            self.tensors["confidence.weight"] = 2 * normal(HIDDEN + rank)
            self.tensors["confidence.bias"] = torch.tensor([0.3])
        self.temperatures = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]

    def save(self, folder: Path) -> Path:
        save_block(
            folder,
            self.tensors,
            layer_config=self.layer,
            verifier="org/name",
            hidden_layers=self.hidden_layers,
            block_size=SIZE,
            draft_ids=self.ids,
            confidence_temperatures=self.temperatures,
        )
        return folder

    def drafter(self, weights: str = "fp32", kernels: str = "auto", **options) -> BlockDrafter:
        config = {
            "version": 1,
            "transformer_layer_config": self.layer,
            "draft_vocab_size": DRAFT_VOCAB,
            "hidden_layers": list(self.hidden_layers),
            "block_size": SIZE,
            "confidence_temperatures": self.temperatures,
        }
        tensors = {**self.tensors, "d2t": torch.tensor(self.ids) - torch.arange(DRAFT_VOCAB)}
        model = make_model(Path("here"), config, tensors, self.parts, weights=weights, kernels=kernels)
        return BlockDrafter(model, costs=COSTS, **options)

    def after(
        self, ids: Sequence[int], states: Sequence[torch.Tensor], path: Sequence[int]
    ) -> tuple[torch.Tensor, float | None]:
        """Float64 logits of what follows ``path`` in a draft after ``ids``, and the confidence in the likeliest."""
        w = {name: tensor.double() for name, tensor in self.tensors.items()}
        rms = lambda x, weight: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight  # noqa: E731
        h = torch.cat([state[: len(ids) - 1].double() for state in states], 1)
        context = rms(h @ w["fc.weight"].T, w["hidden_norm.weight"])
        block = w["mask_embedding"].repeat(SIZE, 1)
        block[0] = self.parts.embedding[ids[-1]].double()
        inputs = torch.cat([torch.zeros_like(context), block])
        attention = torch.cat([context, rms(block, w["layers.0.input_layernorm.weight"])])
        x = decoder_layer(w, "layers.0.", inputs, attention)[len(context) + len(path)]
        x = rms(x, w["norm.weight"])
        logits, both = x @ w["lm_head.weight"].T, x
        if "markov.w1" in w:
            previous = w["markov.w1"][[*ids, *path][-1]]
            logits, both = logits + previous @ w["markov.w2"], torch.cat([x, previous])
        if "confidence.weight" not in w:
            return logits, None
        score = both @ w["confidence.weight"] + w["confidence.bias"]
        return logits, float((score / self.temperatures[len(path)]).sigmoid())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_the_equations_say(kind, kernels, target, parts):
    made = Made(kind, parts)
    drafter = made.drafter(kernels=kernels)
    assert (drafter.name, drafter.hidden_layers, drafter.samples) == ("block", (1, 4), False)
    draft = begun(drafter, target, PROMPT).propose(5)
    main = main_path(draft)
    assert len(main) == 5
    assert len(draft) > 5
    states = states_of(target, PROMPT, made.hidden_layers)
    parents = draft.parents or tuple(range(-1, len(draft) - 1))
    for i, path in enumerate(paths(draft)):
        logits, confidence = made.after(PROMPT, states, path[:-1])
        probabilities = logits.softmax(0)
        probability = float(probabilities[made.ids.index(path[-1])])
        likeliest = float(probabilities.max())
        if confidence is None:
            expected = probability
        elif probability == likeliest:
            expected = confidence
        else:
            expected = probability * (1 - confidence) / (1 - likeliest)
        assert draft.confidences[i] == pytest.approx(expected, rel=2e-3)
        if i == parents.index(parents[i]) and i in main:
            assert probability == likeliest


def test_alternatives_go_on(target, parts):
    """The Markov head sees what stands before: paths through another token go on in another way."""
    following: dict[tuple[int, ...], list[int]] = {}
    for seed in range(5):
        draft = begun(Made("full", parts, seed).drafter(), target, PROMPT).propose(5)
        main = main_path(draft)
        for i, parent in enumerate(draft.parents or ()):
            if parent >= 0 and parent not in main:
                following.setdefault((seed, parent), []).append(draft.tokens[i])
    assert len(following) > 3


@pytest.mark.skipif(core.resolve() is None, reason="needs the compiled core")
@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_other_formats_are_near(weights, target, parts):
    made = Made("full", parts)
    exact, near = (begun(made.drafter(w), target, PROMPT).propose(1) for w in ("fp32", weights))
    assert exact.tokens[0] == near.tokens[0]
    assert near.confidences[0] == pytest.approx(exact.confidences[0], rel=0.1)
    assert near.confidences != exact.confidences


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_whatever_happened_before_drafts_are_those_of_a_fresh_session(kernels, target, parts):
    made = Made("full", parts)
    drafter = made.drafter(kernels=kernels)
    ids = [(i * i) % VOCAB for i in range(300)]
    states = states_of(target, ids, made.hidden_layers)
    session = drafter.session(ids[:5], GREEDY)
    for known, budget in ((5, 3), (6, 0), (7, 5), (150, 4), (151, 1), (300, 6)):
        length = session._held + session._states.count
        session.read([state[length : known - 1] for state in states])
        if known > 5:
            session.observe(ids[len(session._ids) : known])
        assert session.unread == known - 1 - session._held
        draft = session.propose(budget)
        if not budget:
            assert not draft
            continue
        assert session.unread == 0
        again = session.propose(budget)
        fresh = drafter.session(ids[:known], GREEDY)
        fresh.read([state[: known - 1] for state in states])
        for expected in (again, fresh.propose(budget)):
            assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
            assert draft.confidences == pytest.approx(expected.confidences, rel=1e-4)


def test_one_forward_for_a_draft(target, parts, monkeypatch):
    drafter = Made("full", parts).drafter()
    rows: list[tuple[int, int]] = []
    forward = drafter.model.layers.forward

    def noting(sequence, inputs, attention_inputs, parents, logit_rows):
        rows.append((len(inputs), logit_rows))
        return forward(sequence, inputs, attention_inputs, parents, logit_rows)

    monkeypatch.setattr(drafter.model.layers, "forward", noting)
    session = begun(drafter, target, PROMPT)
    assert len(main_path(session.propose(4))) == 4
    assert len(main_path(session.propose(20))) == SIZE
    assert rows == [(9 + 4, 4), (SIZE, SIZE)]
    rows.clear()
    begun(drafter, target, [i % VOCAB for i in range(300)]).propose(2)
    assert rows == [(128, 0), (128, 0), (43 + 2, 2)]


def test_nobody_is_asked_what_is_computed_anyway(target, parts):
    """One forward drafts them all, and says so: the policy prices it as one."""
    made = Made("full", parts)
    heard: list[float] = []
    draft = begun(made.drafter(), target, PROMPT).propose(6, lambda confidence: bool(heard.append(confidence)))
    assert not heard
    assert len(main_path(draft)) == 6
    assert (made.drafter().at_once, made.drafter(max_nodes=4).at_once) == (SIZE, 4)


def test_what_is_measured_is_a_whole_draft(parts, monkeypatch):
    """Rows beyond a block are of the context; choosing goes along the block, for a level at each position."""
    drafter = Made("full", parts).drafter()
    chosen: list[int] = []
    following = drafter.model.following
    monkeypatch.setattr(
        BlockModel, "following", lambda model, logits, tokens: chosen.append(len(tokens)) or following(logits, tokens)
    )
    for rows, expected in ((1, [1]), (3, [1, 4, 4]), (64, [1] + [4] * (SIZE - 1))):
        chosen.clear()
        drafter._run(rows)
        assert chosen == expected


def test_it_stops_where_it_is_told_to(target, parts):
    made = Made("full", parts)
    draft = begun(made.drafter(), target, PROMPT).propose(6)
    first = draft.tokens[0]
    assert len(main_path(begun(made.drafter(eos_ids=frozenset([first])), target, PROMPT).propose(6))) == 1
    assert len(begun(made.drafter(max_nodes=2), target, PROMPT).propose(6)) == 2
    assert begun(made.drafter(width=1), target, PROMPT).propose(6).parents is None


def test_sampled_tokens_are_drawn_with_the_targets_noise(target, parts):
    made = Made("full", parts)
    params = SamplingParams(temperature=1.3, seed=9)
    states = states_of(target, PROMPT, made.hidden_layers)
    draft = begun(made.drafter(), target, PROMPT, params).propose(4)
    main = [draft.tokens[i] for i in main_path(draft)]
    for i, token in enumerate(main):
        z = (made.after(PROMPT, states, main[:i])[0] / 1.3).log_softmax(0)
        noise = gumbel_noise(9, len(PROMPT) + i, np.array(made.ids))
        assert made.ids.index(token) == int((z.numpy() + noise).argmax())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["full", "bare"])
def test_the_text_is_the_targets(kind, params, target, parts):
    plain, _, _ = texts(target, (), params, None)
    for weights in ("auto", "fp32"):
        drafter = Made(kind, parts).drafter(weights)
        for k in (1, 3, 8):
            found, drafted, _ = texts(target, [drafter], params, FixedPolicy(k))
            assert found == plain
            assert max(drafted) == min(k, SIZE)
            assert drafted[0] == 0
        policy = AdaptivePolicy(ModelCosts(CostTable((1, 8), (1.0, 1.1))))
        found, drafted, _ = texts(target, [drafter], params, policy)
        assert found == plain
        assert any(drafted)


def test_a_drafter_that_knows_the_target_is_always_right():
    """The target's layers add nothing; the Markov head says what follows a token, and nothing else says anything."""
    reference = make_reference("llama", num_hidden_layers=2)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
    target, parts = make_target(reference, kernels="auto"), parts_of(reference)
    made = Made("full", parts)
    made.hidden_layers = (1, 2)
    made.ids = list(range(VOCAB))
    embedding, weight = parts.embedding, parts.norm
    normed = embedding / (embedding.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    made.tensors["markov.w1"] = normed.clone()
    made.tensors["markov.w2"] = parts.head.T.contiguous()
    made.tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    del made.tensors["confidence.weight"]
    config = {
        "version": 1,
        "transformer_layer_config": made.layer,
        "hidden_layers": [1, 2],
        "block_size": SIZE,
    }
    model = make_model(Path("here"), config, made.tensors, parts, weights="fp32")
    plain, _, _ = texts(target, (), GREEDY, None)
    found, _, records = texts(target, [BlockDrafter(model, costs=COSTS)], GREEDY, FixedPolicy(4))
    assert found == plain
    assert all(record.accepted == record.drafted == 4 for record in records[1:-1])
    assert len(records) == 1 + math.ceil(23 / 5)


def test_nothing_is_drafted_without_states(target, parts):
    drafter = Made("full", parts).drafter()
    session = drafter.session(PROMPT, GREEDY)
    assert session.unread == len(PROMPT) - 1
    assert session.propose(4) == Draft(drafter="block")
    single = drafter.session([5], GREEDY)
    assert (single.unread, len(single.propose(3))) == (0, 0)
    assert texts(target, [drafter], GREEDY, FixedPolicy(3), [5])[0] == texts(target, (), GREEDY, None, [5])[0]


def test_the_end_of_the_context(target, parts):
    made = Made("full", parts)
    made.layer["max_position_embeddings"] = 16
    drafter = made.drafter()
    ids = [i % VOCAB for i in range(20)]
    assert len(main_path(begun(drafter, target, ids[:14]).propose(20))) == 3
    assert len(main_path(begun(drafter, target, ids[:16]).propose(20))) == 1
    session = begun(drafter, target, ids[:17])  # full: it begins anew with the last half
    assert session.unread == 8
    last = begun(drafter, target, ids[:16])
    last.read([state[15:16] for state in states_of(target, ids[:17], drafter.hidden_layers)])
    last.observe(ids[16:17])
    assert last.unread == 8
    assert session.propose(5) == last.propose(5)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", ["fc.weight", "markov.w2", "confidence.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers_draft_nothing(name, kernels, target, parts):
    plain, _, _ = texts(target, (), GREEDY, None)
    made = Made("full", parts)
    made.tensors[name][3] = torch.nan
    found, drafted, _ = texts(target, [made.drafter("fp32", kernels)], GREEDY, FixedPolicy(3))
    assert found == plain
    assert not any(drafted)


def test_an_error_in_a_draft_leaves_the_session_usable(target, parts, monkeypatch):
    drafter = Made("full", parts).drafter()
    ids = [i % VOCAB for i in range(200)]
    expected = begun(drafter, target, ids).propose(4)
    layers, calls = drafter.model.layers, []
    forward = layers.forward

    def failing(*arguments):
        calls.append(1)
        if len(calls) in (1, 3):
            raise MemoryError("no room")
        return forward(*arguments)

    monkeypatch.setattr(layers, "forward", failing)
    session = begun(drafter, target, ids)
    for _ in range(2):
        with pytest.raises(MemoryError):
            session.propose(4)
    assert session.propose(4) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_saved_drafters_are_loaded(kind, target, parts, tmp_path):
    made = Made(kind, parts)
    loaded = load_drafter(made.save(tmp_path / "d"), parts, weights="fp32")
    assert begun(loaded, target, PROMPT).propose(5) == begun(made.drafter(), target, PROMPT).propose(5)
    assert loaded.costs.seconds(1, 10) > 0


def test_what_doesnt_fit_is_named(parts, tmp_path):
    def refused(error: type[Exception], match: str, **values) -> None:
        made = Made("full", parts)
        folder = made.save(tmp_path / "d")
        config = json.loads((folder / "config.json").read_text())
        tensors = {key: value for key, value in values.items() if key in made.tensors}
        save_file({**made.tensors, "d2t": torch.arange(DRAFT_VOCAB)} | tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {k: v for k, v in values.items() if k not in tensors}))
        with pytest.raises(error, match=match) as caught:
            load_drafter(folder, parts)
        assert "\n" not in str(caught.value)

    refused(UnsupportedModelError, "version 2 of block drafters", version=2)
    refused(CorruptModelError, "transformer_layer_config must be", transformer_layer_config=None)
    refused(CorruptModelError, "block_size 0", block_size=0)
    for wrong in ([1.0], 5, "123456", [], [1, 1, 1, 1, 1, "1"], [1, 1, 1, 1, 1, math.inf]):
        refused(CorruptModelError, "confidence_temperatures must be 6 numbers", confidence_temperatures=wrong)
    refused(CorruptModelError, "block_size 'six' must be a whole number", block_size="six")
    refused(CorruptModelError, r"model_type \['sakiyomi-block'\] must be a text", model_type=["sakiyomi-block"])
    refused(CorruptModelError, "makes no sense", transformer_layer_config={**LAYER, "rope_scaling": 5})
    refused(CorruptModelError, "don't fit together", transformer_layer_config={**LAYER, "num_attention_heads": 0})
    refused(CorruptModelError, r"'markov.w1' has shape \[\]", **{"markov.w1": torch.tensor(1.0)})
    refused(CorruptModelError, r"'markov.w1' has shape \[320\]", **{"markov.w1": torch.zeros(VOCAB)})
    refused(UnsupportedModelError, "2 layers", transformer_layer_config={**LAYER, "num_hidden_layers": 2})
    refused(OptionError, "of vocab_size 300", transformer_layer_config={**LAYER, "vocab_size": 300})
    refused(OptionError, "of hidden_size 32", transformer_layer_config={**LAYER, "hidden_size": 32})
    refused(OptionError, r"layers \[9\]", hidden_layers=[9])
    refused(CorruptModelError, r"'fc.weight' has shape \[64, 128\], config.json says \[64, 64\]", hidden_layers=[1])
    refused(CorruptModelError, "'markov.w2' has shape", **{"markov.w2": torch.zeros(RANK + 1, DRAFT_VOCAB)})
    refused(CorruptModelError, "'confidence.weight' has shape", **{"confidence.weight": torch.zeros(HIDDEN)})
    with pytest.raises(OptionError, match="width=0"):
        Made("full", parts).drafter(width=0)


def test_alternatives_share_what_the_choice_leaves(target, parts):
    made = Made("full", parts)
    made.tensors["confidence.bias"] += 50
    sure = begun(made.drafter(), target, PROMPT).propose(5)
    assert sure.parents is None
    made.tensors["confidence.bias"] -= 100
    unsure = begun(made.drafter(), target, PROMPT).propose(5)
    assert all(unsure.confidences[i] < ALTERNATIVE for i in main_path(unsure))
