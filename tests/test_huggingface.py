"""Modules of transformers as targets: each architecture computes what its own forward computes, whatever the pieces."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.utils import prune

from sakiyomi.errors import CapacityError, CorruptModelError, OptionError, UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Work
from sakiyomi.targets import huggingface
from sakiyomi.targets.attention import Reach
from sakiyomi.targets.cache import BLOCK, KeyValues
from sakiyomi.targets.huggingface import HuggingFaceTarget, load_module
from sakiyomi.targets.linear import can_pack

TABLE = Path(__file__).parent.parent / "docs" / "architectures.md"
VOCAB, CONTEXT, WINDOW = 96, 128, 16
WIDE = 5504  # of an intermediate layer: fifths of its tensors don't end where vectors do
COMMON: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GATED = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
GATED_MOE = {**GATED, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
GPT2 = {k: v for k, v in COMMON.items() if k != "max_position_embeddings"} | {"n_positions": CONTEXT}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONG_ROPE = {**PLAIN_ROPE, "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32} | {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
WINDOWED = {"sliding_window": WINDOW}
HYBRID = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10}
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", GATED),
    "mistral": ("mistral", {**GATED, "sliding_window": None}),
    "mistral, window": ("mistral", {**GATED, **WINDOWED}),
    "ministral": ("ministral", {**GATED, **HYBRID}),
    "mixtral": ("mixtral", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", GATED),
    "qwen2, window": ("qwen2", {**GATED, **HYBRID, "use_sliding_window": True}),
    "qwen3": ("qwen3", GATED),
    "qwen3_moe": ("qwen3_moe", {**GATED_MOE, "num_experts": 4}),
    "gemma": ("gemma", GATED),
    "gemma2": (
        "gemma2",
        {**GATED, **HYBRID, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "initializer_range": 0.05},
    ),
    "gemma3": ("gemma3_text", {**GATED, **HYBRID, "query_pre_attn_scalar": 16}),
    "phi": ("phi", {**COMMON, "intermediate_size": 48}),
    "phi3": ("phi3", {**GATED, **WINDOWED}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {**COMMON, "intermediate_size": 48}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "codegen": ("codegen", {**GPT2, "rotary_dim": 4}),
    "opt": ("opt", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "biogpt": ("biogpt", {**COMMON, "intermediate_size": 48, "pad_token_id": 1}),
    "xglm": (
        "xglm",
        {**COMMON, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "pad_token_id": 1},
    ),
    "falcon": ("falcon", {**COMMON, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo": ("olmo", GATED),
    "olmo2": ("olmo2", GATED),
    "starcoder2": ("starcoder2", {**GATED, **WINDOWED}),
    "stablelm": ("stablelm", GATED),
    "granite": ("granite", GATED),
    "cohere": ("cohere", GATED),
    "cohere2": ("cohere2", {**GATED, **HYBRID}),
    "smollm3": ("smollm3", {**GATED, "no_rope_layers": [1, 0]}),
    "glm": ("glm", GATED),
    "nemotron": ("nemotron", GATED),
    "exaone4": ("exaone4", {**GATED, **HYBRID}),
    "llama4": (
        "llama4_text",
        {
            **GATED,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": WINDOW,
            "floor_scale": 8,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**GATED, **HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": PLAIN_ROPE},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**GATED_MOE, **MLA, "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 4, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "bloom": ("bloom", {**COMMON, "n_layer": 2, "n_head": 4}),
    "falcon, alibi": ("falcon", {**COMMON, "alibi": True}),
    "mpt": ("mpt", {**COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT}),
    "gpt_neo": ("gpt_neo", {**COMMON, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW}),
}


def make_module(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> transformers.PreTrainedModel:
    """Return a model with random weights, norms and biases included."""
    kind, options = ARCHITECTURES[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **{**options, **changes}), dtype=torch.float32
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 1.0 if "norm" in key or "ln" in key else 0.0
                parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def extend(target, sequence, tokens, parents=None, logit_rows=None) -> torch.Tensor:
    rows = len(tokens) if logit_rows is None else logit_rows
    return target.forward([Work(sequence, tokens, parents, rows)])[0].logits


def in_pieces(target, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    sequence, found, start = target.new_sequence(), [], 0
    while start < len(tokens):
        size = sizes[len(found) % len(sizes)]
        found.append(extend(target, sequence, tokens[start : start + size]))
        start += size
    return torch.cat(found)


def own_logits(module: torch.nn.Module, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.tensor([text]), use_cache=False).logits[0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


TEXT = ids(70)  # more than four windows
TREE, PARENTS = ids(7, seed=2), [-1, 0, 0, 1, 2, -1, 5]  # paths: 0 1 3 | 0 2 4 | 5 6
PATHS = ([0, 1, 3], [0, 2, 4], [5, 6])
TOLERANCE = 2e-5
ONE_BY_ONE = {"xglm", "falcon", "falcon, alibi", "bloom", "mpt", "gpt_neo"}


@dataclass(frozen=True)
class Subject:
    """A module, its target, and what the module was before the target was made."""

    module: transformers.PreTrainedModel
    target: HuggingFaceTarget
    expected: torch.Tensor
    config: dict[str, object]
    kinds: list[type]


@cache
def subject(name: str) -> Subject:
    module = make_module(name)
    expected, config = own_logits(module, TEXT), module.config.to_dict()
    kinds = [type(each) for each in module.modules()]
    target = HuggingFaceTarget(module)
    # What goes wrong when it's loaded ends in the slower way, which would pass the tests of results.
    assert target.mode == ("one by one" if name in ONE_BY_ONE else "packed")
    return Subject(module, target, expected, config, kinds)


@cache
def chain_error(name: str) -> float:
    """How far pieces are from the module's own forward, the windows being much shorter than the text."""
    it = subject(name)
    found = in_pieces(it.target, TEXT, [1, 2, 7, 30])
    if it.target.exactness == "bit-exact":
        assert torch.equal(found, in_pieces(it.target, TEXT, [70]))
        assert torch.equal(found, in_pieces(it.target, TEXT, [33, 1, 1, 1, 16, 18]))
    return error(found, it.expected)


@cache
def tree_error(name: str) -> float:
    """How far rows of a tree are from the module's own forward of their paths, also where a path is kept."""
    module, target = subject(name).module, subject(name).target
    prefix, worst = TEXT[:30], 0.0
    for path in PATHS:
        tree = target.new_sequence()
        extend(target, tree, prefix)
        found = extend(target, tree, TREE, PARENTS)
        tree.keep(30, path)
        assert tree.length == 30 + len(path)
        after = extend(target, tree, TEXT[40:43])
        text = [*prefix, *(TREE[row] for row in path), *TEXT[40:43]]
        expected = own_logits(module, text)[30:]
        worst = max(worst, error(torch.cat([found[path], after]), expected))
        if target.exactness == "bit-exact":
            chain = target.new_sequence()
            extend(target, chain, prefix)
            assert torch.equal(extend(target, chain, text[30:-3]), found[path])
            assert torch.equal(extend(target, chain, text[-3:]), after)
    return worst


@cache
def batch_error(name: str) -> float:
    """How far sequences in one forward, two of them with trees, are from the module's own forward of each path."""
    module, target = subject(name).module, subject(name).target
    texts = [TEXT[:5], TEXT[3:44], TEXT[7:27]]
    parents = [None, PARENTS, [-1, -1]]
    tokens = [TREE[:3], TREE, TREE[:2]]
    sequences = [target.new_sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        extend(target, sequence, text, logit_rows=0)
    work = [Work(s, t, p, len(t) - 1) for s, t, p in zip(sequences, tokens, parents, strict=True)]
    outputs, worst = target.forward(work), 0.0
    for text, new, tree, output, sequence in zip(texts, tokens, parents, outputs, sequences, strict=True):
        assert output.logits.shape == (len(new) - 1, VOCAB)
        assert sequence.length == len(text) + len(new)
        for path in [list(range(len(new)))] if tree is None else PATHS if tree is PARENTS else ([0], [1]):
            expected = own_logits(module, text + [new[row] for row in path])[len(text) :]
            for row, logits in zip(path, expected, strict=True):
                if row:
                    worst = max(worst, error(output.logits[row - 1], logits))
        if target.exactness == "bit-exact":
            alone = target.new_sequence()
            extend(target, alone, text)
            assert torch.equal(extend(target, alone, new, tree)[1:], output.logits)
    return worst


every_architecture = pytest.mark.parametrize("name", list(ARCHITECTURES))


@every_architecture
def test_a_chain_in_pieces_is_the_modules_own_forward(name):
    assert chain_error(name) < TOLERANCE


@every_architecture
def test_a_tree_is_the_paths_that_it_stands_for(name):
    assert tree_error(name) < TOLERANCE


@every_architecture
def test_sequences_in_one_forward_dont_meet(name):
    assert batch_error(name) < TOLERANCE


@pytest.mark.parametrize("size", [8, 12, 20])
def test_values_may_have_another_size_than_keys(size):
    module = make_module("deepseek_v3", v_head_dim=size)
    target = HuggingFaceTarget(module)
    assert target.mode == "packed"
    assert error(in_pieces(target, TEXT, [30, 1]), own_logits(module, TEXT)) < TOLERANCE


@every_architecture
def test_rollback_leaves_no_trace(name):
    it, wrong = subject(name), ids(40, seed=1)
    sequence = it.target.new_sequence()
    extend(it.target, sequence, TEXT[:25])
    extend(it.target, sequence, wrong)
    sequence.truncate(25)
    found = [extend(it.target, sequence, TEXT[25:28])]
    extend(it.target, sequence, wrong[:9], logit_rows=0)
    extend(it.target, sequence, TREE, PARENTS)
    sequence.truncate(28)
    found.append(extend(it.target, sequence, TEXT[28:]))
    assert error(torch.cat(found), it.expected[25:]) < TOLERANCE
    with pytest.raises(ValueError, match="length=71"):
        sequence.truncate(71)


@every_architecture
def test_the_module_is_left_as_it_was(name):
    it = subject(name)
    extend(it.target, it.target.new_sequence(), TEXT[:9])
    assert torch.equal(own_logits(it.module, TEXT), it.expected)
    assert it.module.config.to_dict() == it.config
    assert it.module.config._attn_implementation != "sakiyomi"
    assert [type(each) for each in it.module.modules()] == it.kinds
    assert not any("sakiyomi" in key for each in it.module.modules() for key in vars(each))


@every_architecture
def test_hidden_states_are_those_of_the_module(name):
    it = subject(name)
    with torch.inference_mode():
        expected = it.module(torch.tensor([TEXT[:9]]), output_hidden_states=True, use_cache=False).hidden_states
    sequence = it.target.new_sequence()
    found = [it.target.forward([Work(sequence, part, None, 1)], hidden_layers=[1, 0]) for part in (TEXT[:4], TEXT[4:9])]
    for place, layer in enumerate((1, 0)):
        states = torch.cat([outputs[0].hidden[place] for outputs in found])
        torch.testing.assert_close(states, expected[layer][0], rtol=1e-4, atol=1e-4)
    with pytest.raises(OptionError, match=r"hidden_layers=\(3,\): this model has no \[3\]: \[-1, 0, 1, 2\]"):
        it.target.forward([Work(sequence, TEXT[:1])], hidden_layers=[3])


@every_architecture
def test_what_the_head_reads_can_be_had(name):
    """Of all rows, though logits are computed of the last; whatever the model calls of what is below its head."""
    it = subject(name)
    assert it.target.hidden_layers == {HEAD_INPUT, 0, 1, 2}
    read: list[torch.Tensor] = []
    hook = it.module.get_output_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with torch.inference_mode():
        it.module(torch.tensor([TEXT[:9]]), use_cache=False)
    hook.remove()
    sequence = it.target.new_sequence()
    found = [it.target.forward([Work(sequence, part)], hidden_layers=[HEAD_INPUT]) for part in (TEXT[:4], TEXT[4:9])]
    states = torch.cat([outputs[0].hidden[0] for outputs in found])
    torch.testing.assert_close(states, read[-1].reshape(9, -1), rtol=1e-4, atol=1e-4)


def test_what_a_model_has_no_place_for_cannot_be_had(monkeypatch):
    """Here the head reads what no module of the model gives as it is: a drafter is told so, a forward isn't tried."""
    model = make_module("opt")
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    target = HuggingFaceTarget(model)
    assert target.hidden_layers == {0, 1, 2}
    with pytest.raises(OptionError, match=r"hidden_layers=\(-1,\): this model has no \[-1\]: \[0, 1, 2\]"):
        target.forward([Work(target.new_sequence(), TEXT[:1])], hidden_layers=[HEAD_INPUT])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_failed_forward_changes_no_sequence(name):
    target = subject(name).target
    good, bad = target.new_sequence(), target.new_sequence()
    for sequence in (good, bad):
        extend(target, sequence, TEXT[:10])
    with pytest.raises(IndexError):
        target.forward([Work(good, TEXT[10:14], None, 1), Work(bad, [VOCAB + 5], None, 1)])
    with pytest.raises(CapacityError, match="a sequence of 129 tokens: the context holds 128"):
        target.forward([Work(good, TEXT[10:14], None, 1), Work(bad, [5] * 119, None, 1)])
    assert good.length == bad.length == 10
    assert error(extend(target, good, TEXT[10:20]), subject(name).expected[10:20]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "gpt_oss", "deepseek_v3", "llama4"])
def test_on_other_devices_trees_are_masks(name, monkeypatch):
    """What runs there runs here too, if the target doesn't know that it is on a CPU."""
    it = subject(name)
    monkeypatch.setattr(huggingface, "_is_on_cpu", lambda model: False)
    target = HuggingFaceTarget(it.module)
    assert (target.mode, target.exactness) == ("packed", "numerics")
    assert error(in_pieces(target, TEXT, [30, 7, 1]), it.expected) < TOLERANCE
    sequences = [target.new_sequence() for _ in range(2)]
    for sequence in sequences:
        extend(target, sequence, TEXT[:30])
    outputs = target.forward([Work(sequences[0], TREE[:2], None, 2), Work(sequences[1], TREE, PARENTS, 7)])
    for path in PATHS:
        expected = own_logits(it.module, TEXT[:30] + [TREE[row] for row in path])[30:]
        assert error(outputs[1].logits[path], expected) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "phi3"])
def test_bf16(name):
    """As far from float32 as the module itself, and no row depends on another where it's claimed."""
    module = make_module(name, torch.bfloat16)
    target = HuggingFaceTarget(module)
    exact = subject(name).expected
    theirs = (own_logits(module, TEXT).float() - exact).abs().mean()
    found = in_pieces(target, TEXT, [70])
    assert float((found.float() - exact).abs().mean()) < 1.3 * float(theirs)
    if target.exactness == "bit-exact":
        assert torch.equal(in_pieces(target, TEXT, [1, 5, 2, 40]), found)


def test_ordinary_architectures_are_bit_exact():
    if not can_pack(torch.float32):
        pytest.skip("no packed kernels on this processor")
    assert all(subject(name).target.exactness == "bit-exact" for name in ("llama", "gpt2", "phi3", "cohere2"))


def test_experts_make_no_claim():
    """Their matrix products are of torch's choice, even where a test of a few rows sees no difference."""
    target = subject("deepseek_v3").target
    assert target.exactness == "numerics"
    assert not target._runner.can_be_exact


def test_exactness_is_claimed_for_the_threads_that_were_tested():
    target = subject("llama").target
    claimed, threads = target.exactness, torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert target.exactness == "numerics"
    finally:
        torch.set_num_threads(threads)
    assert target.exactness == claimed


def test_self_test_sees_rows_that_influence_each_other(monkeypatch):
    """Negative control: bits that depend on the number of rows must not pass as exact."""
    module = make_module("llama")
    attend = huggingface._Layer.attend

    def leaky(self, query, key, value):
        return attend(self, query, key, value) * (1 + 1e-6 * query.shape[2])

    monkeypatch.setattr(huggingface._Layer, "attend", leaky)
    target = HuggingFaceTarget(module)
    assert (target.mode, target.exactness) == ("packed", "numerics")


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("where", ["everywhere", "after the first piece"])
def test_wrong_attention_is_found_when_a_model_is_loaded(monkeypatch, dtype, where):
    """Negative control: a clone that gives other logits isn't used."""
    module, attend = make_module("llama", dtype), huggingface._Layer.attend

    def wrong(self, query, key, value):
        start = self.parts[0].start
        return attend(self, query, key.flip(2) if start or where == "everywhere" else key, value)

    monkeypatch.setattr(huggingface._Layer, "attend", wrong)
    target = HuggingFaceTarget(module)
    assert target.mode == "one by one"
    tolerance = TOLERANCE if dtype is torch.float32 else 0.1
    assert error(in_pieces(target, TEXT, [30]), own_logits(module, TEXT)) < tolerance


@dtypes
def test_positions_that_are_not_those_given_are_found_when_a_model_is_loaded(monkeypatch, dtype):
    """Negative control: only rows that follow others are wrong, a third of those compared."""
    module = make_module("llama", dtype)
    forward = type(module.model.rotary_emb).forward

    def from_zero(self, x, position_ids):
        return forward(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(type(module.model.rotary_emb), "forward", from_zero)
    with pytest.raises(UnsupportedModelError, match="in pieces it gives other logits than in one call"):
        HuggingFaceTarget(module)


class Einsum(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Convolution(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x.transpose(1, 2), self.weight[:, :, None]).transpose(1, 2)


@torch.library.custom_op("sakiyomi_tests::multiply", mutates_args=())
def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


class Custom(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.weight)


@dtypes
@pytest.mark.parametrize("kind", [Einsum, Convolution, Custom])
def test_nothing_is_claimed_where_rows_are_multiplied_in_other_ways(kind, dtype):
    module = make_module("llama", dtype)
    other = kind(32, 48, bias=False, dtype=dtype)
    other.weight = module.model.layers[1].mlp.up_proj.weight
    module.model.layers[1].mlp.up_proj = other
    target = HuggingFaceTarget(module)
    assert (target.mode, target.exactness, target._runner.can_be_exact) == ("packed", "numerics", False)


@pytest.mark.parametrize("which", ["einsum", "scaled_dot_product_attention"])
def test_nothing_is_claimed_where_activations_are_multiplied(which):
    def product(module, args, output):
        if which == "einsum":
            return output + 0 * torch.einsum("bri,bsi->br", output, output)[..., None]
        return output + 0 * torch.nn.functional.scaled_dot_product_attention(output, output, output)

    module = make_module("llama")
    module.model.layers[0].mlp.register_forward_hook(product)
    assert not HuggingFaceTarget(module)._runner.can_be_exact


def test_weights_that_are_left_are_found():
    module = make_module("gptj")
    assert huggingface._weights_left(module)
    huggingface._swap(module)
    assert not huggingface._weights_left(module), "tables of positions are no weights"
    module.register_buffer("quantised", torch.zeros(4, 4, dtype=torch.int8))
    assert huggingface._weights_left(module)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bloom"])
@pytest.mark.parametrize("back", ["truncate", "keep", "failure"])
def test_rows_that_overflow_leave_no_trace(name, back):
    module = make_module(name, tie_word_embeddings=False)
    target = HuggingFaceTarget(module)
    bad = next(token for token in range(VOCAB) if token not in TEXT)
    with torch.no_grad():
        module.get_input_embeddings().weight[bad] = torch.inf
    fresh, sequence = target.new_sequence(), target.new_sequence()
    for each in (fresh, sequence):
        extend(target, each, TEXT[:30])
    if back == "failure":
        hook = target._runner.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            extend(target, sequence, [bad] * 9)
        hook.remove()
    else:
        assert not extend(target, sequence, [TEXT[30], *[bad] * 9]).isfinite().all()
        sequence.truncate(30) if back == "truncate" else sequence.keep(30, [])
    for part in (TEXT[30:31], TEXT[31:35]):
        found = extend(target, sequence, part)
        assert found.isfinite().all()
        assert torch.equal(found, extend(target, fresh, part))


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize("parents", [None, PARENTS], ids=["chain", "tree"])
def test_a_failure_in_a_later_layer_changes_no_sequence(name, parents):
    """Keys and values of the layers before it have been written."""
    it = subject(name)
    sequences = [it.target.new_sequence() for _ in range(2)]
    for sequence in sequences:
        extend(it.target, sequence, TEXT[:10])
    hook = it.target._runner.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        it.target.forward([Work(sequences[0], TREE, parents, 7), Work(sequences[1], TREE[:3], None, 1)])
    hook.remove()
    for sequence in sequences:
        assert sequence.length == 10
        assert error(extend(it.target, sequence, TEXT[10:20]), it.expected[10:20]) < TOLERANCE


def test_a_sequence_may_be_in_a_forward_once():
    target = subject("llama").target
    sequence = target.new_sequence()
    with pytest.raises(AssertionError):
        target.forward([Work(sequence, TEXT[:3]), Work(sequence, TEXT[3:5])])
    assert sequence.length == 0


@torch.inference_mode()
def test_only_what_was_rolled_back_is_cleared():
    memory = KeyValues(1, 1, 2, torch.float32)
    memory.reserve(10)
    memory.memory.fill_(torch.nan)
    memory.length = 10
    memory.keep(4, [1, 3])
    memory.reserve(7)
    assert memory.memory[0, 0, 0, :, 0].isnan().nonzero().flatten().tolist() == [*range(7), *range(10, BLOCK)]


def test_a_head_may_have_more_rows_than_the_embedding():
    module = make_module("llama")
    module.lm_head = torch.nn.Linear(32, VOCAB + 400, bias=False)
    target = HuggingFaceTarget(module)
    assert target.vocab_size == VOCAB + 400
    assert error(in_pieces(target, TEXT, [30]), own_logits(module, TEXT)) < TOLERANCE


def test_a_model_that_cannot_be_copied_says_so():
    module = make_module("llama")
    prune.l1_unstructured(module.model.layers[0].mlp.up_proj, "weight", amount=0.3)
    with pytest.raises(UnsupportedModelError, match="'llama': copied and run as it is, it fails: Only Tensors"):
        HuggingFaceTarget(module)


def test_weights_that_are_offloaded_are_shared():
    accelerate = pytest.importorskip("accelerate")
    module = make_module("llama")
    expected = own_logits(module, TEXT)
    accelerate.cpu_offload(module.model.layers[0], execution_device=torch.device("cpu"))
    target = HuggingFaceTarget(module)
    linears = [each.model.layers[0].mlp.up_proj for each in (module, target._runner.clone)]
    assert linears[0].weight.device.type == "meta"
    assert linears[0]._hf_hook is not linears[1]._hf_hook
    assert linears[0]._hf_hook.weights_map is linears[1]._hf_hook.weights_map
    assert error(in_pieces(target, TEXT, [30, 7]), expected) < TOLERANCE
    accelerate.cpu_offload(module.model.embed_tokens, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="'llama': its embedding is offloaded"):
        HuggingFaceTarget(module)


class Watcher:
    """What a user hangs on a module, with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def see(self, module, args, output) -> None:
        self.calls += 1

    def see_before(self, module, args) -> None:
        self.calls += 1


def test_hooks_run_on_their_own_objects():
    module, watcher = make_module("llama"), Watcher()
    module.model.layers[0].register_forward_hook(watcher.see)
    module.model.layers[0].register_forward_pre_hook(watcher.see_before)
    target = HuggingFaceTarget(module)
    watcher.calls = 0
    extend(target, target.new_sequence(), TEXT[:5])
    assert watcher.calls == 2


def test_wide_activations_are_computed_in_pieces():
    """Threads share a wide tensor out anywhere in a row, and what stands at the end of a share has other bits."""
    x, threads = torch.randn(24, WIDE, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        target = HuggingFaceTarget(make_module("llama", intermediate_size=WIDE))
        activation = target._runner.clone.model.layers[0].mlp.act_fn
        found, whole = activation(x), torch.nn.functional.silu(x)
        alone = torch.cat([torch.nn.functional.silu(row) for row in x])
    finally:
        torch.set_num_threads(threads)
    if not can_pack(torch.float32) or torch.equal(whole.view(-1), alone):
        pytest.skip("no such difference on this processor")
    assert torch.equal(found.view(-1), alone)


def test_modules_that_take_no_packed_linears_keep_their_own(monkeypatch):
    it = subject("llama")

    def refuse(self, x):
        raise AttributeError("no such weight")

    monkeypatch.setattr(huggingface._PackedLinear, "forward", refuse)
    target = HuggingFaceTarget(it.module)
    assert (target.mode, target.exactness) == ("packed", "numerics")
    assert error(in_pieces(target, TEXT, [30]), it.expected) < TOLERANCE


class InTorchaosWay(torch.Tensor):
    """A weight of a linear that stays a torch.nn.Linear, and isn't an ordinary tensor."""


class InBitsandbytesWay(torch.nn.Linear):
    """A linear of another class, with kernels of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.round(decimals=1).T


def test_quantised_linears_keep_their_kernels_and_nothing_is_claimed():
    module = make_module("llama")
    first, second = (layer.mlp for layer in module.model.layers)
    own = InBitsandbytesWay(32, 48, bias=False)
    own.weight = first.up_proj.weight
    first.up_proj = own
    second.up_proj.weight = torch.nn.Parameter(
        torch.Tensor._make_subclass(InTorchaosWay, second.up_proj.weight.data), requires_grad=False
    )
    module.config.quantization_config = {"quant_method": "ours"}
    target = HuggingFaceTarget(module)
    found = target._runner.clone.model.layers
    assert type(found[0].mlp.up_proj) is InBitsandbytesWay
    assert type(found[1].mlp.up_proj) is torch.nn.Linear
    assert type(found[1].mlp.down_proj) is not torch.nn.Linear
    assert (target.weight_format, target.exactness) == ("ours", "numerics")
    text = ids(40)
    assert error(in_pieces(target, text, [13, 1, 5]), own_logits(module, text)) < TOLERANCE


def test_weights_are_shared_or_packed_and_not_held_twice():
    module = make_module("llama")
    clone = HuggingFaceTarget(module)._runner.clone
    own = {parameter.data_ptr() for parameter in module.parameters()}
    assert all(parameter.data_ptr() in own for parameter in clone.parameters())
    assert len(list(clone.parameters())) < len(own)


def test_masks_that_are_known():
    masks = transformers.masking_utils
    reach, zero = huggingface._reach, torch.zeros(1, dtype=torch.long)
    assert reach(masks.causal_mask_function, None) == Reach()
    for size in (1, 2, 3, 16, 4096):
        assert reach(masks.sliding_window_causal_mask_function(size), size) == Reach(window=size)
        if size > 1:
            assert reach(masks.chunked_causal_mask_function(size, zero), size) == Reach(chunk=size)
    assert reach(masks.sliding_window_causal_mask_function(5), 6) is None
    assert reach(masks.bidirectional_mask_function, None) is None
    assert reach(masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k < 3), None) is None


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, CONTEXT),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 40}, 40),
        (LONG_ROPE, 32),
        (PLAIN_ROPE, CONTEXT),
    ],
    ids=str,
)
def test_positions_that_depend_on_the_length_are_never_reached(rope, limit):
    module = make_module("llama", rope_parameters=rope)
    target = HuggingFaceTarget(module)
    assert target.context_length == limit
    assert error(in_pieces(target, TEXT[:limit], [20]), own_logits(module, TEXT[:limit])) < TOLERANCE
    assert HuggingFaceTarget(module, 24).context_length == 24
    with pytest.raises(OptionError, match=f"context_length=129: must be in 2..{limit} for this model") as raised:
        HuggingFaceTarget(module, 129)
    assert ("a longer text would change the positions of all of it" in str(raised.value)) == (rope != PLAIN_ROPE)


def test_buffers_that_a_module_writes_to_are_its_own():
    module = make_module("llama", rope_parameters=LONG_ROPE)
    own_logits(module, TEXT)  # a long text: it leaves long factors
    before = [buffer.clone() for buffer in module.buffers()]
    target = HuggingFaceTarget(module)
    extend(target, target.new_sequence(), TEXT[:20])
    assert before
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))


RECURRENT = {**GATED, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mamba", {"num_hidden_layers": 1}, "it keeps a state that can't be rolled back"),
        ("rwkv", {"attention_hidden_size": 32}, "it keeps a state that can't be rolled back"),
        ("recurrent_gemma", {"lru_width": 32}, "it keeps a state that can't be rolled back"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}, "it keeps a state"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of the kind conv, which keep more than keys"),
        ("bert", {}, "its rows see the tokens that follow them, as in an encoder"),
        ("openai-gpt", GPT2, "computed in pieces it gives other logits than in one call"),
    ],
)
@dtypes
def test_what_is_not_run_says_why(kind, options, message, dtype):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**RECURRENT, **options})
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with pytest.raises(UnsupportedModelError, match=f"architecture '{kind}' is not supported: .*{message}"):
        HuggingFaceTarget(module)


def test_encoder_decoders_and_headless_models_are_not_run():
    config = transformers.AutoConfig.for_model("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="'t5' is not supported: it has an encoder"):
        HuggingFaceTarget(transformers.AutoModelForSeq2SeqLM.from_config(config))
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no language model head"):
        HuggingFaceTarget(make_module("llama").model)


def test_modules_are_loaded_from_safetensors_alone(tmp_path):
    module = make_module("gpt2", tie_word_embeddings=False)
    module.save_pretrained(tmp_path)
    loaded = load_module(tmp_path, "fp32")
    assert loaded.dtype is torch.float32
    assert torch.equal(own_logits(loaded, TEXT), own_logits(module, TEXT))
    assert load_module(str(tmp_path), "bf16", "cpu").dtype is torch.bfloat16
    weights = tmp_path / "model.safetensors"
    save_file({k: v for k, v in module.state_dict().items() if k != "transformer.ln_f.bias"}, weights, {"format": "pt"})
    with pytest.raises(CorruptModelError, match=r"the weights lack 'transformer\.ln_f\.bias'"):
        load_module(tmp_path)
    module.save_pretrained(tmp_path)
    unfit = module.state_dict() | {"transformer.ln_f.bias": torch.zeros(7)}
    save_file(unfit, weights, {"format": "pt"})
    with pytest.raises(CorruptModelError, match=r"'transformer\.ln_f\.bias' has shape \[7\], config.json says \[32\]"):
        load_module(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptModelError):
        load_module(tmp_path)
    weights.unlink()
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"no \.safetensors file"):
        load_module(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nonsense"}, "nonsense"),
        ({"model_type": "nonsense", "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}}, "custom code"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "(?i)gptq|optimum"),
        ({"quantization_config": {"quant_method": "nonsense"}}, "nonsense"),
        ({"vocab_size": "many"}, "field 'vocab_size': .*many"),
        ({"hidden_act": "nonsense"}, "KeyError: .*nonsense"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_says_why_in_one_line(tmp_path, changes, message):
    make_module("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    kind = CorruptModelError if "vocab_size" in changes else UnsupportedModelError
    with pytest.raises(kind, match=message) as raised:
        load_module(tmp_path)
    assert "\n" not in str(raised.value)


def test_weights_that_have_no_place_are_a_warning(tmp_path):
    make_module("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    with pytest.warns(UserWarning, match=r"has no place for \d+ of the weights, as 'model\.layers\.1"):
        load_module(tmp_path)


def test_a_device_that_is_not_there_is_the_callers_mistake(tmp_path):
    make_module("llama").save_pretrained(tmp_path)
    with pytest.raises(OptionError, match="device='nonsense'"):
        load_module(tmp_path, device="nonsense")


def test_without_transformers_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'sakiyomi\[huggingface\]'"):
        load_module(tmp_path)


ABOUT_THE_TABLE = """# Architectures of transformers

What `HuggingFaceTarget` does with tiny random models of each architecture; `tests/test_huggingface.py` measures it and
writes this file (`SAKIYOMI_WRITE_TABLES=1 pytest tests/test_huggingface.py -k table`).

- **chain**: a text in pieces has the logits of the module's own forward, beyond sliding windows too.
- **tree**, **ragged batch**: so have the paths of a tree, and sequences of different lengths in one forward. Where it
  says *one by one*, every path and every sequence is a call of the module: nothing is gained by having them together.
- **bit-exact**: a row's bits don't depend on the rows beside it, by the test that runs when a model is loaded. That
  depends on the processor and on the model's dimensions: what stands below is of one x86-64 processor with AMX. Of
  models with experts it is never claimed: their matrix products are torch's own.

Recurrent models and those with convolutions (mamba, rwkv, jamba, recurrent_gemma, lfm2, qwen3_next, ...) are refused:
their state can't be rolled back. So are encoders.

| architecture | chain | tree | ragged batch | bit-exact |
|---|---|---|---|---|
"""


def table_row(name: str) -> list[str]:
    together = "one call" if subject(name).target.mode == "packed" else "one by one"
    errors = (chain_error(name), tree_error(name), batch_error(name))
    return [name, *("no" if e > TOLERANCE else w for e, w in zip(errors, ("yes", together, together), strict=True))]


def test_the_table_of_architectures_is_true():
    """All of it but the last column, which depends on the machine."""
    rows = [table_row(name) for name in ARCHITECTURES]
    if os.environ.get("SAKIYOMI_WRITE_TABLES"):
        lines = []
        for row in rows:
            targets = [subject(row[0]).target, HuggingFaceTarget(make_module(row[0], torch.bfloat16))]
            exact = [target.weight_format for target in targets if target.exactness == "bit-exact"]
            lines.append(f"| {' | '.join([*row, ', '.join(exact) or '–'])} |\n")
        TABLE.write_text(ABOUT_THE_TABLE + "".join(lines))
    about, _, table = TABLE.read_text().partition("|---|---|---|---|---|\n")
    assert about == ABOUT_THE_TABLE.partition("|---|---|---|---|---|\n")[0]
    assert [[cell.strip() for cell in line.split("|")[1:5]] for line in table.splitlines()] == rows
