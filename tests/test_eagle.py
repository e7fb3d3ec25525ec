"""EAGLE drafters against the published equations, computed slowly; formats; the text stays the target's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import KERNELS, VOCAB, make_reference, make_target
from sakiyomi import core
from sakiyomi.costs import CostTable, ModelCosts, measure_rows
from sakiyomi.drafters import trained
from sakiyomi.drafters.eagle import EagleDrafter, make_model
from sakiyomi.drafters.layers import likeliest
from sakiyomi.drafters.trained import TargetParts, load_drafter, save_eagle3
from sakiyomi.drafters.trained import kind as kind_of
from sakiyomi.drafters.tree import LEAST_SURVIVAL, grow
from sakiyomi.engine import Engine
from sakiyomi.errors import CorruptModelError, ModelNotFoundError, OptionError, UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Draft, Work
from sakiyomi.policy import AdaptivePolicy, FixedPolicy
from sakiyomi.sampling import SamplingParams, gumbel_noise

HIDDEN, DRAFT_VOCAB = 64, 48
PROMPT = [7, 8, 9, 7, 8, 9, 40, 41, 7, 8]
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=5)
COSTS = ModelCosts(CostTable((1, 2), (1e-4, 1e-4)))
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
KINDS = {
    "plain": {},
    "speculators": {},
    "qwen3": {"model_type": "qwen3"},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "window": {"model_type": "mistral", "sliding_window": 6},
    "rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "normed": {},
    "fc-norm": {},
    "norm-before-fc": {},
    "first": {},
    "first-deep": {"num_hidden_layers": 2},
}


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return make_reference("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(reference):
    return make_target(reference, kernels="auto")


@pytest.fixture(scope="module")
def parts(reference) -> TargetParts:
    return parts_of(reference)


def parts_of(reference: torch.nn.Module) -> TargetParts:
    weights = reference.state_dict()
    return TargetParts(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=reference.config.num_hidden_layers,
        context_length=1024,
        embedding=weights["model.embed_tokens.weight"],
        head=weights["lm_head.weight"],
        norm=weights["model.norm.weight"],
    )


class Made:
    """A drafter's config and tensors, and the published equations on them: whole sequences, nothing remembered."""

    def __init__(self, kind: str, parts: TargetParts, seed: int = 0, scale: float = 1.0) -> None:
        self.kind, self.parts = kind, parts
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * scale / math.sqrt(shape[-1])

        def norm(size: int = HIDDEN) -> torch.Tensor:
            return 1 + 0.2 * torch.randn(size, generator=generator)

        self.layer = {**LAYER, **KINDS[kind]}
        self.first = kind.startswith("first")
        width = HIDDEN if self.first else 2 * HIDDEN
        self.tensors: dict[str, torch.Tensor] = {}
        for i in range(self.layer["num_hidden_layers"]):
            prefix = "midlayer." if kind == "plain" else f"layers.{i}."
            shapes = {
                "self_attn.q_proj": (64, width),
                "self_attn.k_proj": (32, width),
                "self_attn.v_proj": (32, width),
                "self_attn.o_proj": (HIDDEN, 64),
                "mlp.gate_proj": (96, HIDDEN),
                "mlp.up_proj": (96, HIDDEN),
                "mlp.down_proj": (HIDDEN, 96),
            }
            for name, shape in shapes.items():
                self.tensors[f"{prefix}{name}.weight"] = normal(*shape)
                if kind == "bias":
                    self.tensors[f"{prefix}{name}.bias"] = 2 * normal(shape[0])
            norms = ["post_attention_layernorm"]
            if not self.first:
                norms += ["input_layernorm", "hidden_norm"]
            elif i:
                norms += ["input_layernorm"]
            for name in norms:
                self.tensors[f"{prefix}{name}.weight"] = norm()
            if kind == "qwen3":
                self.tensors[f"{prefix}self_attn.q_norm.weight"] = norm(16)
                self.tensors[f"{prefix}self_attn.k_norm.weight"] = norm(16)
        self.prefix = "midlayer." if kind == "plain" else "layers.0."
        if self.first:
            self.tensors["fc.weight"] = normal(HIDDEN, 2 * HIDDEN)
            if kind == "first-deep":
                self.tensors["fc.bias"] = normal(HIDDEN)
                self.tensors["embed_tokens.weight"] = normal(VOCAB, HIDDEN) * 8
            self.config = {"architectures": ["LlamaForCausalLM"], **self.layer}
            self.ids = list(range(VOCAB))
            self.hidden_layers: tuple[int, ...] = (HEAD_INPUT,)
            return
        self.tensors |= {"fc.weight": normal(HIDDEN, 3 * HIDDEN), "norm.weight": norm()}
        self.tensors["lm_head.weight"] = 3 * normal(DRAFT_VOCAB, HIDDEN)
        self.ids = sorted(torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].tolist())
        self.tensors["d2t"] = torch.tensor(self.ids) - torch.arange(DRAFT_VOCAB)
        self.hidden_layers = (2, 2, 1)
        self.options = {"norm_before_residual": kind in ("speculators", "qwen3")}
        if kind in ("normed", "fc-norm", "norm-before-fc"):
            self.options["norm_output"] = True
        if kind == "fc-norm":
            self.options["fc_norm"] = True
            self.tensors |= {f"fc_norm.{i}.weight": norm() for i in range(3)}
        if kind == "norm-before-fc":
            self.options["norm_before_fc"] = True
            self.tensors["input_norm.weight"] = norm(3 * HIDDEN)
        if kind in ("plain", "rope", "bias", "window"):
            self.config = {
                "architectures": ["LlamaForCausalLMEagle3"],
                **self.layer,
                "draft_vocab_size": DRAFT_VOCAB,
            }
        else:
            self.config = {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": self.layer,
                "draft_vocab_size": DRAFT_VOCAB,
                "eagle_aux_hidden_state_layer_ids": [3, 0, 4],
                **self.options,
            }
            self.hidden_layers = (3, 0, 4)
            if kind == "speculators":  # what isn't there means true in this format
                del self.config["norm_before_residual"]
        if kind == "fc-norm":
            self.tensors["embed_tokens.weight"] = 8 * normal(VOCAB, HIDDEN)

    def save(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        save_file(self.tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    def drafter(self, weights: str = "fp32", kernels: str = "auto", **options) -> EagleDrafter:
        model = make_model(Path("here"), self.config, self.tensors, self.parts, weights=weights, kernels=kernels)
        return EagleDrafter(model, costs=COSTS, **options)

    # The equations.

    def logits(self, ids: Sequence[int], states: Sequence[torch.Tensor], path: Sequence[int]) -> torch.Tensor:
        """What follows ``ids`` and then ``path``, which was drafted: float64 [draft vocabulary]."""
        w = {name: tensor.double() for name, tensor in self.tensors.items() if name != "d2t"}
        embedding = w.get("embed_tokens.weight", self.parts.embedding.double())
        known = len(ids) - 1
        h = [state[:known].double() for state in states]
        if self.first:
            (features,) = h
        else:
            if self.kind == "fc-norm":
                h = [self.rms(state, w[f"fc_norm.{i}.weight"]) for i, state in enumerate(h)]
            joined = torch.cat(h, 1)
            if self.kind == "norm-before-fc":
                joined = self.rms(joined, w["input_norm.weight"])
            features = joined @ w["fc.weight"].T
        tokens = [*ids[1:], *path]
        while True:
            e = embedding[tokens[: len(features)]]
            if self.first:
                x = torch.cat([e, features], 1) @ w["fc.weight"].T + w.get("fc.bias", 0)
                for i in range(self.layer["num_hidden_layers"]):
                    norm = w.get(f"layers.{i}.input_layernorm.weight")
                    x = self.decoder_layer(w, f"layers.{i}.", x, x if norm is None else self.rms(x, norm))
                after, logits = x, x @ self.parts.head.double().T
            else:
                normed = self.rms(features, w[self.prefix + "hidden_norm.weight"])
                attention = torch.cat([self.rms(e, w[self.prefix + "input_layernorm.weight"]), normed], 1)
                residual = normed if self.options["norm_before_residual"] else features
                x = self.decoder_layer(w, self.prefix, residual, attention)
                final = self.rms(x, w["norm.weight"])
                logits = final @ w["lm_head.weight"].T
                after = final if self.options.get("norm_output") else x
            if len(features) == len(tokens):
                return logits[-1]
            features = torch.cat([features, after[-1:]])

    def rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def decoder_layer(self, w: Mapping[str, torch.Tensor], prefix: str, x: torch.Tensor, y: torch.Tensor):
        window = self.layer.get("sliding_window", 10**6)
        return decoder_layer(w, prefix, x, y, rope_factor=2.0 if self.kind == "rope" else 1.0, window=window)


def decoder_layer(
    w: Mapping[str, torch.Tensor],
    prefix: str,
    x: torch.Tensor,
    y: torch.Tensor,
    rope_factor: float = 1.0,
    window: int = 10**6,
) -> torch.Tensor:
    """A layer of 4 heads, 2 of keys, of 16 features, on the residual stream x, attention reading y."""

    def linear(z: torch.Tensor, name: str) -> torch.Tensor:
        return z @ w[f"{prefix}{name}_proj.weight"].T + w.get(f"{prefix}{name}_proj.bias", 0)

    def rms(z: torch.Tensor, name: str) -> torch.Tensor:
        return z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{prefix}{name}.weight"]

    rows = len(x)
    q, k, v = (linear(y, f"self_attn.{name}").view(rows, -1, 16).transpose(0, 1) for name in "qkv")
    if f"{prefix}self_attn.q_norm.weight" in w:
        q, k = rms(q, "self_attn.q_norm"), rms(k, "self_attn.k_norm")
    angles = torch.arange(rows).double()[:, None] / rope_factor / 10000 ** (torch.arange(0, 16, 2).double() / 16)
    cos, sin = angles.cos(), angles.sin()
    q, k = (torch.cat([z[..., :8] * cos - z[..., 8:] * sin, z[..., 8:] * cos + z[..., :8] * sin], -1) for z in (q, k))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    scores = (q @ k.transpose(1, 2) / 4).masked_fill((distance < 0) | (distance >= window), -torch.inf)
    x = x + linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(rows, -1), "self_attn.o")
    z = rms(x, "post_attention_layernorm")
    return x + linear(torch.nn.functional.silu(linear(z, "mlp.gate")) * linear(z, "mlp.up"), "mlp.down")


def states_of(target, ids: Sequence[int], layers: Sequence[int]) -> tuple[torch.Tensor, ...]:
    sequence, parts = target.new_sequence(), []
    for start in range(0, len(ids), 128):
        (output,) = target.forward([Work(sequence, list(ids[start : start + 128]))], hidden_layers=layers)
        parts.append(output.hidden)
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def paths(draft: Draft) -> list[list[int]]:
    """The tokens on the path to each draft token, itself included."""
    found: list[list[int]] = []
    for i, token in enumerate(draft.tokens):
        parent = i - 1 if draft.parents is None else draft.parents[i]
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def main_path(draft: Draft) -> list[int]:
    path: list[int] = []
    for i, parent in enumerate(draft.parents or range(-1, len(draft) - 1)):
        if parent == (path[-1] if path else -1):
            path.append(i)
    return path


def begun(drafter: EagleDrafter, target, ids: Sequence[int], params: SamplingParams = GREEDY):
    session = drafter.session(ids, params)
    session.read([state[:-1] for state in states_of(target, ids, drafter.hidden_layers)])
    return session


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_the_equations_say(kind, kernels, target, parts):
    """Trees are the chains they stand for; each confidence is the probability; the first child is the likeliest."""
    made = Made(kind, parts)
    drafter = made.drafter(kernels=kernels, width=3)
    assert drafter.hidden_layers == made.hidden_layers
    assert drafter.name == ("eagle" if kind.startswith("first") else "eagle3")
    draft = begun(drafter, target, PROMPT).propose(5)
    assert draft.parents is not None
    assert len(main_path(draft)) == 5
    states = states_of(target, PROMPT, made.hidden_layers)
    for i, path in enumerate(paths(draft)):
        probabilities = made.logits(PROMPT, states, path[:-1]).softmax(0)
        place = made.ids.index(path[-1])
        assert draft.confidences[i] == pytest.approx(float(probabilities[place]), rel=2e-3)
        if i in main_path(draft):
            assert place == int(probabilities.argmax())


@pytest.mark.skipif(core.resolve() is None, reason="needs the compiled core")
@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_other_formats_are_near(weights, target, parts):
    made = Made("speculators", parts, scale=0.7)
    exact, near = (begun(made.drafter(w, width=1), target, PROMPT).propose(1) for w in ("fp32", weights))
    assert exact.tokens == near.tokens
    assert near.confidences == pytest.approx(exact.confidences, rel=0.1)
    assert near.confidences != exact.confidences


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", ["speculators", "first-deep"])
def test_whatever_happened_before_drafts_are_those_of_a_fresh_session(kind, kernels, target, parts):
    """Reading in pieces is reading as a whole; what was drafted leaves nothing behind; no two drafts differ."""
    made = Made(kind, parts)
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
        assert session.propose(budget) == draft
        fresh = drafter.session(ids[:known], GREEDY)
        fresh.read([state[: known - 1] for state in states])
        expected = fresh.propose(budget)
        assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
        assert draft.confidences == pytest.approx(expected.confidences, rel=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_growing_is_the_rule(kernels, target, parts):
    """In each level the main path goes on, and so do the likeliest others; each goes on to its likeliest tokens."""
    made = Made("plain", parts, seed=3)
    made.tensors["lm_head.weight"] *= 1.5
    width = 3
    draft = begun(made.drafter(kernels=kernels, width=width, max_nodes=200), target, PROMPT).propose(4)
    states = states_of(target, PROMPT, made.hidden_layers)
    level: list[tuple[list[int], float]] = [([], 1.0)]
    expected = set()
    for _ in range(4):
        following = []
        for path, survival in level:
            probabilities = made.logits(PROMPT, states, path).softmax(0)
            best = probabilities.topk(width)
            for rank, (p, i) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                main = rank == 0 and path == level[0][0]
                if main or ((p >= 0.05 or rank == 0) and survival * p >= LEAST_SURVIVAL):
                    following.append(([*path, made.ids[i]], survival * p))
        expected |= {tuple(path) for path, _ in following}
        level = [following[0], *sorted(following[1:], key=lambda each: -each[1])[: width - 1]]
    assert {tuple(path) for path in paths(draft)} == expected
    assert len(expected) > 12


def test_what_is_dropped_is_the_least_likely(target, parts):
    made = Made("plain", parts, seed=3, scale=0.5)
    whole = begun(made.drafter(max_nodes=200), target, PROMPT).propose(6)
    for most in (1, 3, 10):
        draft = begun(made.drafter(max_nodes=most), target, PROMPT).propose(6)
        assert len(draft) == most
        assert len(main_path(draft)) == min(most, 6)
        assert set(map(tuple, paths(draft))) <= set(map(tuple, paths(whole)))
    chain = begun(made.drafter(width=1), target, PROMPT).propose(6)
    assert chain.parents is None
    assert [whole.tokens[i] for i in main_path(whole)] == list(chain.tokens)


def test_it_stops_where_it_is_told_to(target, parts):
    made = Made("plain", parts, scale=0.5)
    heard: list[float] = []

    def go_on(confidence: float) -> bool:
        heard.append(confidence)
        return len(heard) < 3

    draft = begun(made.drafter(), target, PROMPT).propose(8, go_on)
    assert heard == [draft.confidences[i] for i in main_path(draft)]
    assert len(heard) == 3
    first = begun(made.drafter(), target, PROMPT).propose(1).tokens[0]
    stopping = SamplingParams(stop_token_ids=(first,))
    assert len(main_path(begun(made.drafter(), target, PROMPT, stopping).propose(8))) == 1
    assert len(main_path(begun(made.drafter(eos_ids=frozenset([first])), target, PROMPT).propose(8))) == 1


def test_sampled_tokens_are_drawn_with_the_targets_noise(target, parts):
    made = Made("plain", parts, scale=0.5)
    params = SamplingParams(temperature=1.3, seed=9)
    states = states_of(target, PROMPT, made.hidden_layers)
    draft = begun(made.drafter(), target, PROMPT, params).propose(4)
    main = [draft.tokens[i] for i in main_path(draft)]
    for i, token in enumerate(main):
        z = (made.logits(PROMPT, states, main[:i]) / 1.3).log_softmax(0)
        noise = gumbel_noise(9, len(PROMPT) + i, np.array(made.ids))
        assert made.ids.index(token) == int((z.numpy() + noise).argmax())
        assert draft.confidences[main_path(draft)[i]] == pytest.approx(float(z.exp()[made.ids.index(token)]), rel=2e-3)
    own = made.drafter().session(PROMPT, params, True)  # of verification that has noise of its own
    own.read([state[:-1] for state in states])
    assert own.propose(4).tokens != draft.tokens
    assert own.propose(4).distributions is None


def texts(target, drafters, params, policy, prompt=PROMPT) -> tuple[list[int], list[int], list]:
    request = Engine(target).request(prompt, params, drafters, policy)
    records = [chunk.record for chunk in Engine(target).run(request)]
    assert not any(record.errors for record in records)
    return request.ids, [record.drafted for record in records], records


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["plain", "speculators", "first"])
def test_the_text_is_the_targets(kind, params, target, parts):
    plain, _, _ = texts(target, (), params, None)
    for weights in ("auto", "fp32"):
        drafter = Made(kind, parts).drafter(weights)
        for k in (1, 3, 8):
            found, drafted, _ = texts(target, [drafter], params, FixedPolicy(k))
            assert found == plain
            assert max(drafted) == k
            assert drafted[0] == 0
        policy = AdaptivePolicy(ModelCosts(CostTable((1, 8), (1.0, 1.1))))
        found, drafted, _ = texts(target, [drafter], params, policy)
        assert found == plain
        assert any(drafted)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_several_sequences_together(params, target, parts):
    drafters = [Made("speculators", parts).drafter(), Made("first", parts).drafter()]
    prompts = [PROMPT, [1, 2], [(i * 7) % VOCAB for i in range(140)]]
    plain = [texts(target, (), params, None, prompt)[0] for prompt in prompts]
    for policy in (FixedPolicy(3), AdaptivePolicy(ModelCosts(CostTable((1, 8), (1.0, 1.1))))):
        engine = Engine(target)
        requests = [engine.request(prompt, params, drafters, policy) for prompt in prompts]
        drafted = [chunk.record.drafted for _, chunk in engine.run_together(requests, 2)]
        assert [request.ids for request in requests] == plain
        assert any(drafted)


@pytest.mark.parametrize("stop", [1, 5, 12])
def test_texts_that_end(stop, target, parts):
    plain, _, _ = texts(target, (), GREEDY, None)
    ending = SamplingParams(max_new_tokens=24, stop_token_ids=(plain[len(PROMPT) + stop],))
    expected, _, _ = texts(target, (), ending, None)
    assert len(expected) <= len(PROMPT) + stop + 1
    for kind in ("plain", "first"):
        assert texts(target, [Made(kind, parts).drafter()], ending, FixedPolicy(6))[0] == expected


def test_long_prompts_are_read_as_they_are_computed(target, parts):
    prompt = [(i * 7) % VOCAB for i in range(400)]
    drafter = Made("speculators", parts).drafter()
    plain, _, _ = texts(target, (), GREEDY, None, prompt)
    found, drafted, _ = texts(target, [drafter], GREEDY, FixedPolicy(4), prompt)
    assert found == plain
    assert any(drafted)


def test_a_drafter_that_knows_the_target_is_always_right():
    """The target's layers add nothing, and so do the drafter's: both say what follows a token's embedding."""
    reference = make_reference("llama", num_hidden_layers=2)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        reference.model.norm.weight.fill_(1)
    target, made = make_target(reference, kernels="auto"), Made("first", parts_of(reference))
    for name, tensor in made.tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    made.tensors["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    plain, _, _ = texts(target, (), GREEDY, None)
    for policy in (FixedPolicy(4), AdaptivePolicy(ModelCosts(CostTable((1, 8), (1.0, 1.001))))):
        found, _, records = texts(target, [made.drafter()], GREEDY, policy)
        assert found == plain
        tested = [record for record in records if record.drafted]
        assert tested
        assert all(record.accepted == record.depth for record in tested)
    assert len(records) < 10


def test_nothing_is_drafted_without_states(target, parts):
    drafter = Made("plain", parts).drafter()
    session = drafter.session(PROMPT, GREEDY)
    assert session.unread == len(PROMPT) - 1
    assert session.propose(4) == Draft(drafter="eagle3")
    states = states_of(target, PROMPT, drafter.hidden_layers)
    session.read([state[:4] for state in states])
    assert not session.propose(4)
    session.read([state[4:-1] for state in states])
    assert session.propose(4)
    single = drafter.session([5], GREEDY)  # not even a pair
    assert (single.unread, len(single.propose(3))) == (0, 0)
    assert texts(target, [drafter], GREEDY, FixedPolicy(3), [5])[0] == texts(target, (), GREEDY, None, [5])[0]


def test_the_end_of_the_context(target, parts):
    made = Made("plain", parts)
    made.config["max_position_embeddings"] = 16
    drafter = made.drafter(width=1)
    ids = [i % VOCAB for i in range(20)]
    states = states_of(target, ids, made.hidden_layers)
    session = drafter.session(ids[:10], GREEDY)
    session.read([state[:9] for state in states])
    assert len(session.propose(20)) == 7
    session.read([state[9:15] for state in states])
    session.observe(ids[10:16])
    assert len(session.propose(20)) == 1
    session.read([state[15:16] for state in states])  # full: it begins anew with what it hasn't read
    session.observe(ids[16:17])
    fresh = drafter.session(ids[15:17], GREEDY)
    fresh.read([state[15:16] for state in states])
    assert session.unread == fresh.unread == 1
    assert session.propose(20) == fresh.propose(20)
    assert len(session.propose(20)) == 15


@pytest.mark.parametrize("context", [2, 3, 16, 128, 256, 257, 280, 300, 321, 1000])
@pytest.mark.parametrize("asked", [False, True])
def test_no_sequence_is_too_long(context, asked, target, parts):
    """Whatever its context, prompts in pieces or whole, asked before the prompt is read or in every round or not."""
    made = Made("plain", parts)
    made.config["max_position_embeddings"] = context
    drafter = made.drafter(width=1)
    for length in (250, 290, 330, 400):
        session = drafter.session([i % VOCAB for i in range(length)], GREEDY)
        if asked:
            assert not session.propose(3)
        known = 1
        for count in (128, 128, length, *[3] * 40):
            count = min(count, length - known) if known < length else count
            if count < 1:
                continue
            session.read([torch.ones(count, HIDDEN)] * len(drafter.hidden_layers))
            known += count
            if known > length:
                session.observe([1] * count)
            if known >= length:
                assert 0 < session.unread <= min(320, context - 1)
                if asked:
                    assert session.propose(3)
                    assert session.unread == 0
        assert session.propose(3)
        assert session._states.count == 0 or session._states._held.shape[0] < 1000


def test_the_end_of_the_targets_context(reference, parts):
    short = make_target(reference, kernels="auto", context_length=24)
    drafter = Made("plain", parts).drafter()
    plain, _, _ = texts(short, (), GREEDY, None)
    assert len(plain) == 24
    for policy in (FixedPolicy(8), AdaptivePolicy(ModelCosts(CostTable((1, 8), (1.0, 1.1))))):
        assert texts(short, [drafter], GREEDY, policy)[0] == plain


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_weights_that_are_no_numbers_draft_nothing(params, kernels, target, parts):
    plain, _, _ = texts(target, (), params, None)
    for name in ("fc.weight", "lm_head.weight", "midlayer.mlp.down_proj.weight"):
        made = Made("plain", parts)
        made.tensors[name][3] = torch.nan
        found, drafted, _ = texts(target, [made.drafter("fp32", kernels)], params, FixedPolicy(3))
        assert found == plain
        assert not any(drafted)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_likeliest_of_logits(rows):
    """With the core and without: the largest, their places, and what makes probabilities of them."""
    logits = torch.randn(rows, 1003, generator=torch.Generator().manual_seed(rows))
    for given in (logits, torch.nn.functional.pad(logits, (0, 5))[:, :-5], logits.T.contiguous().T):
        found = likeliest(given, 3)
        values, places = logits.topk(3)
        assert [each[0] for each in found] == values.tolist()
        assert [each[1] for each in found] == places.tolist()
        assert [each[2] for each in found] == pytest.approx(logits.logsumexp(1).tolist(), abs=1e-5)
    for bad in (math.nan, math.inf):
        logits[0, 1000] = bad
        assert not math.isfinite(likeliest(logits, 2)[0][2])
    assert not math.isfinite(likeliest(torch.full((1, 70), -math.inf), 2)[0][2])


def test_an_error_in_a_draft_leaves_the_session_usable(target, parts, monkeypatch):
    made = Made("plain", parts)
    drafter = made.drafter()
    layers, calls = drafter.model.layers, []
    forward = layers.forward_tokens

    def failing(*arguments):
        calls.append(1)
        if len(calls) in (1, 4):
            raise MemoryError("no room")
        return forward(*arguments)

    expected = begun(drafter, target, PROMPT).propose(4)
    monkeypatch.setattr(layers, "forward_tokens", failing)
    session = begun(drafter, target, PROMPT)
    for _ in range(2):
        with pytest.raises(MemoryError):
            session.propose(4)
    assert session.propose(4) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_published_formats_are_loaded(kind, target, parts, tmp_path):
    made = Made(kind, parts)
    loaded = load_drafter(made.save(tmp_path / "d"), parts, weights="fp32")
    assert kind_of(tmp_path / "d") == loaded.name
    assert loaded.hidden_layers == made.hidden_layers
    expected = begun(made.drafter(), target, PROMPT).propose(4)
    assert begun(loaded, target, PROMPT).propose(4) == expected
    assert loaded.costs.seconds(1, 10) > 0
    assert loaded.samples is False


def test_options_in_a_part_of_their_own(parts, tmp_path):
    made = Made("rope", parts)
    made.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    assert made.drafter().hidden_layers == (1, 2, 3)


def test_a_target_of_another_width(parts, target):
    """The draft is narrower than the target's states; it has embeddings and a head of its own."""
    wide = TargetParts(VOCAB, 2 * HIDDEN, 4, 1024, torch.zeros(VOCAB, 2 * HIDDEN), torch.zeros(VOCAB, 2 * HIDDEN))
    made = Made("fc-norm", wide)
    made.tensors["fc.weight"] = torch.randn(HIDDEN, 6 * HIDDEN) / 8
    made.tensors |= {f"fc_norm.{i}.weight": torch.rand(2 * HIDDEN) for i in range(3)}
    made.config["target_hidden_size"] = 2 * HIDDEN
    session = made.drafter().session(PROMPT, GREEDY)
    states = [torch.randn(9, 2 * HIDDEN) for _ in range(3)]
    session.read(states)
    draft = session.propose(3)
    probabilities = made.logits(PROMPT, states, []).softmax(0)
    assert draft.confidences[0] == pytest.approx(float(probabilities.max()), rel=2e-3)
    del made.tensors["embed_tokens.weight"]
    with pytest.raises(CorruptModelError, match=r"lack 'embed_tokens.weight'; the target's, of hidden_size 128"):
        made.drafter()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True])
def test_saved_drafters_are_loaded(whole, dtype, target, parts, tmp_path):
    made = Made("speculators", parts)
    made.tensors.pop("d2t")
    if whole:
        made.tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    tensors = {name: tensor.to(dtype) for name, tensor in made.tensors.items()}
    ids = None if whole else made.ids
    arguments = {"layer_config": LAYER, "verifier": "org/name", "hidden_layers": (3, 0, 4), "draft_ids": ids}
    save_eagle3(tmp_path / "a" / "d", tensors, **arguments)
    save_eagle3(tmp_path / "a" / "d", tensors, **arguments)  # over what is there
    assert sorted(path.name for path in (tmp_path / "a" / "d").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "a" / "d" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/name",
        "architectures": ["LlamaForCausalLM"],
    }
    stored = load_file(tmp_path / "a" / "d" / "model.safetensors")
    if not whole:
        assert stored["d2t"].dtype is torch.int64
        assert stored["t2d"].dtype is torch.bool
        assert (torch.arange(DRAFT_VOCAB) + stored["d2t"]).tolist() == stored["t2d"].nonzero().flatten().tolist()
    loaded = load_drafter(tmp_path / "a" / "d", parts, weights="fp32")
    made.tensors = {name: tensor.to(dtype).float() for name, tensor in made.tensors.items()} | (
        {} if whole else {"d2t": stored["d2t"]}
    )
    made.config["draft_vocab_size"] = VOCAB if whole else DRAFT_VOCAB
    assert begun(loaded, target, PROMPT).propose(4) == begun(made.drafter(), target, PROMPT).propose(4)


@pytest.mark.parametrize("whole", [False, True])
def test_a_head_that_isnt_stored_is_the_targets(parts, target, tmp_path, whole):
    made = Made("speculators", parts)
    ids = list(range(VOCAB)) if whole else made.ids
    tensors = {name: made.tensors[name] for name in made.tensors if name not in ("d2t", "t2d", "lm_head.weight")}
    arguments = {"layer_config": LAYER, "verifier": "org/name", "hidden_layers": (3, 0, 4), "draft_ids": ids}
    save_eagle3(tmp_path / "without", tensors, **arguments)
    save_eagle3(tmp_path / "with", {**tensors, "lm_head.weight": parts.head[torch.tensor(ids)]}, **arguments)
    without, with_ = (load_drafter(tmp_path / name, parts) for name in ("without", "with"))
    assert "lm_head.weight" not in load_file(tmp_path / "without" / "model.safetensors")
    draft = begun(without, target, PROMPT).propose(4)
    assert draft
    assert draft == begun(with_, target, PROMPT).propose(4)


def test_what_cant_be_saved_is_refused(parts, tmp_path):
    made = Made("speculators", parts)
    arguments = {"layer_config": LAYER, "verifier": "org/name", "hidden_layers": (3, 0, 4)}
    with pytest.raises(OptionError, match=r"draft_ids: 320 tokens for a head of 48 rows"):
        save_eagle3(tmp_path / "d", made.tensors, **arguments)
    with pytest.raises(OptionError, match=r"draft_ids: must be different tokens in 0\.\.319, ascending"):
        save_eagle3(tmp_path / "d", made.tensors, **arguments, draft_ids=made.ids[::-1])
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="can't be written"):
        save_eagle3(tmp_path / "file", made.tensors, **arguments, draft_ids=made.ids)


def test_what_doesnt_fit_is_named(parts, tmp_path):
    def refused(error: type[Exception], match: str, change, kind: str = "plain") -> None:
        made = Made(kind, parts)
        change(made)
        with pytest.raises(error, match=match) as caught:
            load_drafter(made.save(tmp_path / "d"), parts)
        assert "\n" not in str(caught.value)

    def setting(**values):
        return lambda made: made.config.update(values)

    def tensor(name: str, value: torch.Tensor | None):
        def change(made: Made) -> None:
            if value is None:
                del made.tensors[name]
            else:
                made.tensors[name] = value

        return change

    refused(OptionError, "a target of vocab_size 300, this one has 320", setting(vocab_size=300))
    refused(OptionError, "a target of hidden_size 128, this one has 64", setting(target_hidden_size=128))
    for wrong in ([], "64", 64.0, False):
        refused(CorruptModelError, "hidden_size .* must be a whole number", setting(target_hidden_size=wrong))
    refused(CorruptModelError, r"model_type \[\] must be a text", setting(model_type=[]))
    refused(OptionError, r"layers \[1, 2, 9\], this one has 0..4", setting(eagle_aux_hidden_state_layer_ids=[1, 2, 9]))
    refused(CorruptModelError, "layers 7 to read", setting(eagle_aux_hidden_state_layer_ids=7))
    refused(CorruptModelError, "draft_vocab_size 0", setting(draft_vocab_size=0))
    refused(UnsupportedModelError, "2 layers; one", setting(num_hidden_layers=2))
    refused(UnsupportedModelError, "architecture 'gpt2'", setting(model_type="gpt2"))
    refused(UnsupportedModelError, "speculators_model_type 'dflash'", setting(speculators_model_type="dflash"))
    refused(CorruptModelError, "transformer_layer_config must be", setting(transformer_layer_config=3))
    refused(CorruptModelError, "lack 'd2t'", tensor("d2t", None))
    refused(CorruptModelError, r"'d2t' is torch.int64 \[3\]", tensor("d2t", torch.zeros(3, dtype=torch.int64)))
    refused(CorruptModelError, "different tokens in 0..319", tensor("d2t", torch.full((48,), 300)))
    refused(CorruptModelError, r"lack 'fc.weight'", tensor("fc.weight", None))
    refused(CorruptModelError, r"'fc.weight' has shape \[64, 64\]", tensor("fc.weight", torch.zeros(64, 64)))
    refused(CorruptModelError, "lack 'midlayer.mlp.up_proj.weight'", tensor("midlayer.mlp.up_proj.weight", None))
    refused(
        CorruptModelError,
        r"'embed_tokens.weight' has shape \[300, 64\]",
        tensor("embed_tokens.weight", torch.zeros(300, 64)),
    )
    refused(OptionError, "of hidden_size 32, this one has 64", setting(hidden_size=32), "first")
    refused(UnsupportedModelError, "no drafter that is known", tensor("fc.weight", None), "first")
    made = Made("first", parts)
    made.config["architectures"] = 5
    assert load_drafter(made.save(tmp_path / "number"), parts).name == "eagle"


def test_folders_that_cant_be_loaded(parts, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config.json"):
        load_drafter(tmp_path, parts)
    (tmp_path / "config.json").write_text(json.dumps(Made("plain", parts).config))
    with pytest.raises(ModelNotFoundError, match=r"no model.safetensors"):
        load_drafter(tmp_path, parts)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="pickles are never loaded"):
        load_drafter(tmp_path, parts)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CorruptModelError, match="truncated or garbled"):
        load_drafter(tmp_path, parts)


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("mlp", {"model_type": "mlp_speculator"}),
        ("medusa", {"model_type": "medusa"}),
        ("medusa", {"medusa_num_heads": 2}),
    ],
)
def test_others_are_loaded_by_their_own(module, config, parts, tmp_path, monkeypatch):
    calls = []
    place = parts.embedding.device
    monkeypatch.setattr(f"sakiyomi.drafters.{module}.load", lambda *given, **options: calls.append((given, options)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_of(tmp_path) == module
    load_drafter(tmp_path, parts, weights="fp32", kernels="torch")
    load_drafter(tmp_path, parts, weights="fp32", kernels="torch", device="meta")
    options = {"weights": "fp32", "kernels": "torch"}
    assert calls == [
        ((tmp_path, config, parts), {**options, "device": device}) for device in (place, torch.device("meta"))
    ]


def test_tables_are_loaded(parts, tmp_path):
    from sakiyomi.drafters.table import TableDrafter, build_table

    build_table([[1, 2, 3, 1, 2, 3]], vocab_size=VOCAB).save(tmp_path / "table.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sakiyomi-table"}))
    assert kind_of(tmp_path) == "table"
    assert isinstance(load_drafter(tmp_path, parts), TableDrafter)


@pytest.mark.parametrize("pieces", [[60], [10, 50], [5] * 12, [58, 1, 1], [21, 39], [20, 5, 5, 5, 25]])
def test_what_is_far_back_is_not_read(pieces, target, parts, monkeypatch):
    """A long prompt, or many rounds without a draft: the session begins anew with the last states, as a fresh one."""
    monkeypatch.setattr(trained, "_READ", 8)
    monkeypatch.setattr(trained, "_WAITING", 20)
    drafter = Made("plain", parts).drafter()
    ids = [(i * i) % VOCAB for i in range(100)]
    states = states_of(target, ids, drafter.hidden_layers)
    session, known = drafter.session(ids[:1], GREEDY), 1
    for piece in pieces:
        session.read([state[known - 1 : known - 1 + piece] for state in states])
        session.observe(ids[known : known + piece])
        known += piece
        assert session.unread <= 20
    left = session.unread
    assert 0 < left <= 20
    fresh = drafter.session(ids[known - 1 - left : known], GREEDY)
    fresh.read([state[known - 1 - left : known - 1] for state in states])
    for _ in range(3):
        assert session.propose(4) == fresh.propose(4)  # and then they go on alike
        for each in (session, fresh):
            each.read([state[known - 1 : known + 2] for state in states])
            each.observe(ids[known : known + 3])
        known += 3
        assert session.unread == fresh.unread == 3
    for unread in (10, 17, 8):  # what was in memory is forgotten too where many rounds go by
        session.read([state[known - 1 : known + 6] for state in states])
        session.observe(ids[known : known + 7])
        known += 7
        assert session.unread == unread
    last = drafter.session(ids[known - 9 : known], GREEDY)
    last.read([state[known - 9 : known - 1] for state in states])
    assert session.propose(4) == last.propose(4)


def test_options_are_checked(parts):
    made = Made("plain", parts)
    for options in ({"width": 0}, {"max_nodes": 0}, {"width": 1.5}):
        (name,) = options
        with pytest.raises(OptionError, match=f"{name}="):
            made.drafter(**options)
    with pytest.raises(OptionError, match="weights='int4'"):
        made.drafter("int4")
    with pytest.raises(OptionError, match="weights='int8'"):
        made.drafter("int8", "torch")
    with pytest.raises(OptionError, match="kernels='quick'"):
        made.drafter(kernels="quick")


def test_growing_without_a_model():
    """A level is expanded at once; the main path goes on however unlikely it is."""
    asked: list[list[int]] = []

    def expand(level, tokens, parents):
        asked.append(list(level))
        return [[(10 * len(asked), 0.5), (10 * len(asked) + 1, 0.4)] for _ in level]

    draft = grow("x", expand, budget=3, go_on=lambda confidence: True, width=2, max_nodes=99)
    assert asked == [[-1], [0, 1], [2, 3]]
    assert draft.tokens[:2] == (10, 11)
    assert len(draft) == 2 + 4 + 4
    assert grow("x", lambda *_: [[]], budget=3, go_on=lambda confidence: True, width=2, max_nodes=9) == Draft(
        drafter="x"
    )


def test_rows_are_measured():
    sizes: list[int] = []
    table = measure_rows(sizes.append, (1, 2, 4), seconds=0.0)
    assert table.rows == (1, 2, 4)
    assert sizes == [1, *[1, 2, 4] * 2]
