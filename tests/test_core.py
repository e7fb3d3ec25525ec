"""The compiled core: right sums, in an order of their own, on every instruction path that runs here.

``make check`` runs this file once more with a build that finds misuse of memory.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

from sakiyomi import core
from sakiyomi.core import library
from sakiyomi.errors import CapacityError, OptionError, UnsupportedModelError
from sakiyomi.interfaces import Work
from sakiyomi.targets.compiled import CompiledTarget
from sakiyomi.targets.decoder import DecoderConfig

PATHS = core.available()
FORMATS = ("fp32", "bf16", "int8")
pytestmark = pytest.mark.skipif(not PATHS, reason="the compiled core isn't there")
each_path = pytest.mark.parametrize("path", PATHS)
each_format = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture
def use_threads(monkeypatch):
    """Return a function that sets the number of threads, also beyond what this machine has."""
    return lambda count: monkeypatch.setattr(library, "threads", lambda: count)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, format: str) -> torch.Tensor:
    return x.bfloat16().float() if format == "bf16" else x


def test_this_machine_runs_what_its_processor_has():
    """A path that is lost by a mistake in detection or in the build would go unnoticed."""
    has = torch.cpu.get_capabilities()
    expected = {
        "amx": has.get("amx_bf16") and has.get("amx_int8") and sys.platform == "linux",
        "avx512_bf16": has.get("avx512_bf16"),
        "avx512": has.get("avx512_f") and has.get("avx512_bw"),
        "avx2": has.get("avx2") and has.get("fma3"),
        "plain": True,
    }
    assert tuple(name for name, there in expected.items() if there) == PATHS


# -- linears


@each_path
@each_format
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 65), (24, 40), (96, 576), (130, 1000)])
def test_linear_is_the_product(path, format, out_features, in_features):
    weight, bias = rounded(random(out_features, in_features), format), random(out_features, seed=1)
    x = rounded(random(19, in_features, seed=2), format)
    found = core.Linear([weight], [bias], format=format, kernels=path)(x)
    if format == "int8":
        weight, x = in_steps(weight), torch.cat([in_steps(part) for part in x.split(64, 1)], 1)
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * in_features**0.5)


def in_steps(rows: torch.Tensor) -> torch.Tensor:
    """Round every row to multiples of its largest value / 127."""
    largest = rows.abs().amax(1, keepdim=True)
    return (rows * (127 / largest)).round() * (largest / 127)


@each_path
@each_format
def test_rows_dont_meet(path, format, use_threads):
    linear = core.Linear([random(70, 200)], format=format, kernels=path)
    x = random(130, 200, seed=1)
    expected = linear(x)
    for threads, rows in itertools.product((1, 2, 3, 4), (1, 2, 5, 14, 15, 17, 33, 64, 129)):
        use_threads(threads)
        for start in (0, 130 - rows):
            assert torch.equal(linear(x[start : start + rows]), expected[start : start + rows])


@each_path
@each_format
def test_stacked_weights_are_one_linear(path, format):
    parts = [random(n, 64, seed=n) for n in (5, 40, 19)]
    biases = [random(n, seed=n + 1) for n in (5, 40, 19)]
    x = random(3, 64)
    together = core.Linear(parts, biases, format=format, kernels=path)(x)
    apart = [core.Linear([w], [b], format=format, kernels=path)(x) for w, b in zip(parts, biases, strict=True)]
    assert torch.equal(together, torch.cat(apart, 1))


@each_path
def test_weights_of_any_dtype_and_stride(path):
    weight = random(40, 64).bfloat16()
    x = random(2, 64)
    expected = core.Linear([weight], format="bf16", kernels=path)(x)
    for same in (weight.float(), weight.double(), weight.T.contiguous().T, torch.cat([weight, weight], 1)[:, :64]):
        assert torch.equal(core.Linear([same], format="bf16", kernels=path)(x), expected)


@each_path
@each_format
@pytest.mark.parametrize("intermediate", [16, 50, 96])
def test_gated_mlp(path, format, intermediate):
    hidden = 72
    gate, up = rounded(random(2, intermediate, hidden) / 4, format)
    down, norm = rounded(random(hidden, intermediate), format), 1 + random(hidden, seed=3) / 4
    x = random(5, hidden, seed=4)
    mlp = core.GatedMlp(gate, up, down, format=format, kernels=path)
    found = mlp(x, norm=norm, eps=1e-5)
    y = torch.nn.functional.rms_norm(x, (hidden,), norm, 1e-5)
    expected = (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    tolerance = {"fp32": 1e-4, "bf16": 3e-2, "int8": 6e-2}[format] * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert torch.equal(torch.cat([mlp(row[None], norm=norm, eps=1e-5) for row in x]), found)


@each_path
def test_top_is_ordered_and_the_lowest_of_equals_comes_first(path):
    rows = torch.tensor([[1.0, 5.0, 5.0, 2.0, 5.0], [9.0, -1.0, 3.0, 4.0, 4.0]])
    head = core.Linear([rows.T.contiguous()], format="fp32", kernels=path)
    values, places = head.top(torch.eye(2), 4)
    assert values.tolist() == [[5, 5, 5, 2], [9, 4, 4, 3]]
    assert places.tolist() == [[1, 2, 4, 3], [0, 3, 4, 2]]
    bad = torch.tensor([[1.0, 2.0, float("nan"), 5.0]]).T.contiguous()
    assert core.Linear([bad], format="fp32", kernels=path).top(torch.ones(1, 1), 2)[1].tolist() == [[2, 3]]
    logits = core.Linear([random(1000, 64)], kernels=path)
    x = random(7, 64, seed=1)
    assert torch.equal(logits.top(x, 1)[1][:, 0], logits(x).argmax(1))
    with pytest.raises(OptionError, match=r"k=6: must be in 1\.\.5"):
        head.top(torch.eye(2), 6)


@each_path
@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_and_column(path, format, bad):
    weight, x = random(40, 64), random(6, 64, seed=1)
    expected = core.Linear([weight], format=format, kernels=path)(x)
    x[2, 5] = bad
    found = core.Linear([weight], format=format, kernels=path)(x)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])
    weight[7, 3] = bad
    found = core.Linear([weight], format=format, kernels=path)(x)
    assert not found[:, 7].isfinite().any()
    assert torch.equal(found[0, :7], expected[0, :7])


def test_shapes_that_dont_fit_are_named():
    linear = core.Linear([random(4, 8)])
    with pytest.raises(ValueError, match=r"x has shape \[2, 9\]: must be \[rows, 8\]"):
        linear(random(2, 9))
    with pytest.raises(ValueError, match=r"a norm or bias of shape \[9\]: must be \[8\]"):
        linear(random(2, 8), norm=random(9))


# -- decoders

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 75,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def small_weights(config: DecoderConfig) -> dict[str, torch.Tensor]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    seed = itertools.count()
    weights = {
        "model.embed_tokens.weight": random(config.vocab_size, hidden, seed=next(seed)),
        "lm_head.weight": random(config.vocab_size, hidden, seed=next(seed)),
        "model.norm.weight": torch.ones(hidden),
    }
    for i in range(config.layers):
        shapes = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{i}.{name}.weight"] = random(*shape, seed=next(seed)) / shape[1] ** 0.5 * 2
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", config.head_dim),
            ("self_attn.k_norm", config.head_dim),
        ):
            weights[f"model.layers.{i}.{name}.weight"] = 1 + random(size, seed=next(seed)) / 4
    return weights


def small_target(
    path: str, dtype: torch.dtype = torch.bfloat16, weight_format=None, bad_token: int | None = None, **changes: object
) -> CompiledTarget:
    config = DecoderConfig.from_huggingface({**SMALL, **changes})
    weights = small_weights(config)
    if bad_token is not None:
        weights["model.embed_tokens.weight"][bad_token] = float("nan")
    return CompiledTarget(config, weights, dtype, weight_format=weight_format, kernels=path)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(70, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def extend(target: CompiledTarget, sequence, tokens, parents=None) -> torch.Tensor:
    return target.forward([Work(sequence, tokens, parents, len(tokens))])[0].logits


VARIANTS = {
    "bf16": {},
    "fp32": {"dtype": torch.float32},
    "int8": {"weight_format": "int8"},
    "window": {"model_type": "mistral", "sliding_window": 45, "head_dim": 64},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@each_path
@each_variant
def test_any_cut_gives_the_same_bits(path, variant, use_threads):
    target, text = small_target(path, **VARIANTS[variant]), ids(300)
    expected = extend(target, target.new_sequence(), text)
    assert expected.isfinite().all()
    assert target.exactness == "bit-exact"
    for threads, sizes in ((1, [1]), (2, [130, 1, 7]), (3, [64, 5]), (4, [128, 33, 2])):
        use_threads(threads)
        sequence, found = target.new_sequence(), []
        for size in itertools.cycle(sizes):
            if sequence.length == len(text):
                break
            found.append(extend(target, sequence, text[sequence.length :][:size]))
        assert torch.equal(torch.cat(found), expected)


@each_path
@each_variant
@pytest.mark.parametrize("prefix", [0, 30, 254])
def test_tree_rows_are_the_chains_they_stand_for(path, variant, prefix, use_threads):
    target, context, tokens = small_target(path, **VARIANTS[variant]), ids(prefix), ids(9, seed=2)
    parents = [-1, 0, 0, 1, 2, -1, 5, 4, 3]
    chains = [[0, 1, 3, 8], [0, 2, 4, 7], [5, 6]]

    def begin():
        sequence = target.new_sequence()
        if prefix:
            extend(target, sequence, context)
        return sequence

    tree = begin()
    found = extend(target, tree, tokens, parents)
    rest = ids(5, seed=3)
    for chain in chains:
        use_threads(2)
        sequence = begin()
        assert torch.equal(found[chain], extend(target, sequence, [tokens[row] for row in chain]))
        again = begin()  # and the path that is kept is the chain
        extend(target, again, tokens, parents)
        again.keep(prefix, chain)
        assert again.length == sequence.length
        assert torch.equal(extend(target, again, rest), extend(target, sequence, rest))


TREE_VARIANTS = {
    "groups of three": {},
    "no groups": {"num_attention_heads": 2},
    "one row to a tile": {"num_attention_heads": 66, "head_dim": 4},
    "window": {"model_type": "mistral", "sliding_window": 45},
    "window shorter than trees": {"model_type": "mistral", "sliding_window": 5},
    "fp32": {"dtype": torch.float32},
}


@each_path
@pytest.mark.parametrize("variant", TREE_VARIANTS)
def test_random_trees(path, variant, use_threads):
    """Many shapes of trees, several in a forward: wide, deep, of one row, across borders of blocks, pages and tiles.

    Every path from a root to a leaf is the chain that it stands for, a token that is no number on another or not.
    """
    target = small_target(path, bad_token=74, **TREE_VARIANTS[variant])
    generator = np.random.default_rng(0)
    prefixes = iter([0, 250, 31, 32, 64, 256, 255, 224, *generator.integers(0, 300, 100).tolist()])
    for round_ in range(6):
        works, contexts = [], []
        for _ in range(int(generator.integers(1, 4))):
            prefix, rows, likely = next(prefixes), int(generator.integers(1, 60)), generator.choice([0.0, 0.7, 0.95])
            parents = [i - 1 if generator.random() < likely else int(generator.integers(-1, i)) for i in range(rows)]
            context, tokens = ids(prefix, 2 * round_), ids(rows, 2 * round_ + 1)
            if rows > 20:
                tokens[rows // 2] = 74
            sequence = target.new_sequence()
            if prefix:
                extend(target, sequence, context)
            works.append(Work(sequence, tokens, parents, rows))
            contexts.append(context)
        use_threads(1 + round_ % 4)
        for work, context, output in zip(works, contexts, target.forward(works), strict=True):
            for leaf in set(range(len(work.tokens))).difference(work.parents):
                row, found = leaf, []
                while row >= 0:
                    found.insert(0, row)
                    row = work.parents[row]
                chain, tokens = target.new_sequence(), [work.tokens[i] for i in found]
                if context:
                    extend(target, chain, context)
                expected = extend(target, chain, tokens)
                assert torch.equal(output.logits[found].nan_to_num(77), expected.nan_to_num(77))
                assert 74 in tokens or expected.isfinite().all()


@each_path
def test_sequences_in_one_forward_dont_meet(path):
    target = small_target(path)
    texts = [ids(3, 1), ids(270, 2), ids(50, 3)]
    sequences = [target.new_sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        extend(target, sequence, text[:-2])
    trees = [None, [-1, -1], None]
    work = [Work(s, t[-2:], tree, n) for s, t, tree, n in zip(sequences, texts, trees, (2, 1, 0), strict=True)]
    together = target.forward(work, hidden_layers=(0, 2))
    for text, tree, output, rows in zip(texts, trees, together, (2, 1, 0), strict=True):
        alone = target.new_sequence()
        extend(target, alone, text[:-2])
        (expected,) = target.forward([Work(alone, text[-2:], tree, rows)], hidden_layers=(0, 2))
        assert output.logits.shape == (rows, 75)
        assert torch.equal(output.logits, expected.logits)
        assert all(torch.equal(a, b) for a, b in zip(output.hidden, expected.hidden, strict=True))


@each_path
def test_rollback_is_as_if_nothing_had_been(path):
    target, text, wrong = small_target(path), ids(290), ids(290, seed=9)
    expected = extend(target, target.new_sequence(), text)
    sequence = target.new_sequence()
    extend(target, sequence, text[:250])
    extend(target, sequence, wrong[:37])
    sequence.truncate(250)
    assert torch.equal(extend(target, sequence, text[250:]), expected[250:])


@each_path
def test_a_draft_that_is_no_number_spoils_nothing(path):
    """Masked is absent: zero times a value that is no number would not be zero."""
    target, text = small_target(path, bad_token=74), ids(40)
    expected = extend(target, target.new_sequence(), text)
    sequence = target.new_sequence()
    extend(target, sequence, text[:30])
    found = extend(target, sequence, [text[30], text[31], 74, 3])
    assert torch.equal(found[:2], expected[30:32])
    assert not found[2:].isfinite().any()
    sequence.truncate(32)
    assert torch.equal(extend(target, sequence, text[32:]), expected[32:])


@each_path
def test_weights_that_are_no_numbers_come_through(path):
    config = DecoderConfig.from_huggingface(SMALL)
    weights = small_weights(config)
    weights["model.layers.1.self_attn.v_proj.weight"][3, 4] = float("nan")
    target = CompiledTarget(config, weights, torch.bfloat16, kernels=path)
    assert not extend(target, target.new_sequence(), ids(5)).isfinite().any()


@each_path
def test_settings_of_the_caller_dont_matter(path):
    """Subnormal numbers are zero on every thread, whatever the calling thread is set to."""
    tiny = core.Linear([torch.full((3, 1), 1e-20)], format="fp32", kernels=path)
    assert (tiny(torch.full((2, 1), 1e-20)) == 0).all()
    target, text = small_target(path, torch.float32), ids(20)
    expected = extend(target, target.new_sequence(), text)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such setting")
    try:
        assert torch.equal(extend(target, target.new_sequence(), text), expected)
        assert float(torch.tensor([1e-39]) * 0.5) == 0.0  # and the caller's settings are as they were
    finally:
        torch.set_flush_denormal(False)
    extend(target, target.new_sequence(), text)
    assert float(torch.tensor([1e-39]) * 0.5) != 0.0


def test_beyond_the_context_nothing_is_written():
    target, text = small_target(PATHS[0], max_position_embeddings=64), ids(80)
    sequence, other = target.new_sequence(), target.new_sequence()
    extend(target, sequence, text[:60])
    with pytest.raises(CapacityError, match="a sequence of 65 tokens: the context holds 64"):
        target.forward([Work(other, text[:3]), Work(sequence, text[60:65])])
    with pytest.raises(IndexError, match=r"token ids must be in 0\.\.74"):
        extend(target, sequence, [75])
    assert (sequence.length, other.length) == (60, 0)
    expected = extend(target, target.new_sequence(), text[:64])
    assert torch.equal(extend(target, sequence, text[60:64]), expected[60:])


def test_memory_grows_by_pages():
    target = small_target(PATHS[0])
    sequence = target.new_sequence()
    assert sequence.capacity == 0
    extend(target, sequence, ids(256))
    assert sequence.capacity == 256
    extend(target, sequence, ids(1))
    assert sequence.capacity == 512
    with pytest.raises(ValueError, match="length=258: must be between 0 and 257"):
        sequence.truncate(258)


def test_dimensions_without_room_are_refused():
    with pytest.raises(UnsupportedModelError, match="head_dim 514"):
        small_target(PATHS[0], head_dim=514)


@each_path
def test_one_layer_on_inputs_of_its_own(path):
    """As drafters use it: no tokens, attention fed with something wider than the residual stream, no first norm."""
    hidden, heads, dim = 48, 4, 16
    qkv = rounded(random(3 * heads * dim, 2 * hidden) / 8, "bf16")
    output, (gate, up) = rounded(random(hidden, heads * dim) / 8, "bf16"), rounded(random(2, 64, hidden) / 8, "bf16")
    down = rounded(random(hidden, 64) / 8, "bf16")

    def linear(*weights, gated=False):
        return core.Linear(weights, gated=gated, kernels=path)

    layer = core.DecoderLayer(None, linear(qkv), linear(output), None, linear(gate, up, gated=True), linear(down))
    decoder = core.Decoder(
        [layer], heads=heads, kv_heads=heads, head_dim=dim, eps=1e-5, frequencies=torch.zeros(dim // 2), kernels=path
    )
    residual, inputs, sequence = random(6, hidden, seed=5), random(6, 2 * hidden, seed=6), decoder.new_sequence()
    logits, (found,) = decoder.forward(
        [Work(sequence, [0] * 6)], inputs=residual, attention_inputs=inputs, hidden_layers=(1,)
    )
    assert logits is None
    assert sequence.length == 6
    q, k, v = (inputs @ qkv.T).view(6, 3, heads, dim).permute(1, 2, 0, 3)  # angles of zero: nothing is turned
    attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    x = residual + attended.transpose(0, 1).reshape(6, -1) @ output.T
    expected = x + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    again = decoder.new_sequence()
    for i in range(6):
        _, (row,) = decoder.forward(
            [Work(again, [0])], inputs=residual[i : i + 1], attention_inputs=inputs[i : i + 1], hidden_layers=(1,)
        )
        assert torch.equal(row, found[i : i + 1])


@each_path
@pytest.mark.parametrize("embedding", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_residual", [False, True])
def test_one_layer_on_tokens_and_inputs(path, embedding, norm_residual):
    """As EAGLE-3 is: the same as if attention's inputs had been worked out beforehand; a row alone as among others."""
    hidden, heads, dim, rows = 40, 4, 16, 21  # more rows than scratch is made for at first
    shapes = {"qkv": (3 * heads * dim, 2 * hidden), "output": (hidden, heads * dim), "down": (hidden, 64)}
    qkv, output, down = (core.Linear([random(*shape) / 8], kernels=path) for shape in shapes.values())
    gate_up = core.Linear(list(random(2, 64, hidden) / 8), gated=True, kernels=path)
    table, token_norm, input_norm = random(50, hidden).to(embedding), random(hidden, seed=1), random(hidden, seed=2)
    parts = {"heads": heads, "kv_heads": heads, "head_dim": dim, "eps": 1e-5, "frequencies": torch.zeros(dim // 2)}
    layers = [core.DecoderLayer(None, qkv, output, random(hidden, seed=3), gate_up, down)]
    both = core.Decoder(
        layers,
        embedding=table,
        token_norm=token_norm,
        input_norm=input_norm,
        norm_residual=norm_residual,
        kernels=path,
        **parts,
    )
    tokens, inputs = [i % 50 for i in range(7, 7 + 3 * rows, 3)], random(rows, hidden, seed=4)
    _, (found,) = both.forward([Work(both.new_sequence(), tokens)], inputs=inputs, hidden_layers=(1,))
    _, (begun,) = both.forward([Work(both.new_sequence(), tokens)], inputs=inputs, hidden_layers=(0,))
    normed = torch.nn.functional.rms_norm(inputs, (hidden,), input_norm, 1e-5)
    seen = torch.cat([torch.nn.functional.rms_norm(table[tokens].float(), (hidden,), token_norm, 1e-5), normed], 1)
    residual = normed if norm_residual else inputs
    torch.testing.assert_close(begun, residual, rtol=1e-5, atol=1e-5)
    plain = core.Decoder(layers, kernels=path, **parts)
    _, (expected,) = plain.forward(
        [Work(plain.new_sequence(), tokens)], inputs=residual, attention_inputs=seen, hidden_layers=(1,)
    )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    alone = both.new_sequence()
    for i in range(rows):
        _, (row,) = both.forward([Work(alone, tokens[i : i + 1])], inputs=inputs[i : i + 1], hidden_layers=(1,))
        assert torch.equal(row, found[i : i + 1])
    with pytest.raises(IndexError):
        both.forward([Work(both.new_sequence(), [50])], inputs=inputs[:1])
    for wrong in ({}, {"inputs": inputs[:1], "attention_inputs": seen[:1]}):
        with pytest.raises(ValueError, match="tokens and inputs"):
            both.forward([Work(both.new_sequence(), [1])], **wrong)
    with pytest.raises(ValueError, match="or neither"):
        core.Decoder(layers, embedding=table, token_norm=token_norm, kernels=path, **parts)
    with pytest.raises(ValueError, match=r"must be torch\.float32"):
        core.Decoder(layers, embedding=table.half(), kernels=path, **parts)


def test_inputs_of_attention_may_come_later(use_threads):
    """Memory that the first forward had no use for must be there for the second."""
    hidden, dim = 32, 16
    qkv, output, down = random(3 * dim, hidden), random(hidden, dim), random(hidden, 48)
    layer = core.DecoderLayer(
        None,
        core.Linear([qkv]),
        core.Linear([output]),
        None,
        core.Linear(list(random(2, 48, hidden)), gated=True),
        core.Linear([down]),
    )
    decoder = core.Decoder([layer], heads=1, kv_heads=1, head_dim=dim, eps=1e-5, frequencies=torch.zeros(dim // 2))
    x, sequence = random(2, hidden), decoder.new_sequence()
    _, (first,) = decoder.forward([Work(sequence, [0, 0])], inputs=x, hidden_layers=(1,))
    _, (second,) = decoder.forward(
        [Work(decoder.new_sequence(), [0, 0])], inputs=x, attention_inputs=x, hidden_layers=(1,)
    )
    assert torch.equal(first, second)  # without a norm both are the same


def test_parts_that_dont_fit_are_named():
    """Never in C: a wrong size there is a wrong address."""
    hidden, dim = 32, 16

    def linear(out_features: int, in_features: int, gated: bool = False) -> core.Linear:
        parts = [random(out_features // 2, in_features)] * 2 if gated else [random(out_features, in_features)]
        return core.Linear(parts, gated=gated)

    def decoder(heads: int = 1, kv_heads: int = 1, head_dim: int = dim, norm: int = hidden, **parts: core.Linear):
        fitting = {
            "qkv": linear(3 * dim, hidden),
            "output": linear(hidden, dim),
            "gate_up": linear(96, hidden, gated=True),
            "down": linear(hidden, 48),
        }
        layer = core.DecoderLayer(attention_norm=torch.ones(norm), mlp_norm=None, **(fitting | parts))
        frequencies = torch.zeros(head_dim // 2)
        return core.Decoder(
            [layer], heads=heads, kv_heads=kv_heads, head_dim=head_dim, eps=1e-5, frequencies=frequencies
        )

    for changes, message in (
        ({"qkv": linear(40, hidden)}, "qkv must give queries, keys and values"),
        ({"output": linear(hidden, 20)}, "output must take what the heads give"),
        ({"output": linear(30, dim)}, "gate_up must take the hidden size"),
        ({"down": linear(hidden, 50)}, "down must take half of what gate_up gives"),
        ({"gate_up": linear(96, hidden)}, "gate_up must be gated"),
        ({"heads": 3, "kv_heads": 2}, "heads must be a multiple of key heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"norm": 31}, r"shape \[31\]: must be \[32\]"),
    ):
        if "output" in changes and changes["output"].out_features != hidden:
            changes["norm"] = 30
        with pytest.raises(ValueError, match=message):
            decoder(**changes)
    good, rows = decoder(), random(2, hidden)
    wide = decoder(qkv=linear(3 * dim, 2 * hidden))
    sequence, other = good.new_sequence(), small_target(PATHS[0]).new_sequence()
    for target, work, inputs, message in (
        (good, [Work(sequence, [0, 0])], rows[:1], r"inputs of shape \[1, 32\]: must be \[2, 32\]"),
        (good, [Work(sequence, [0]), Work(sequence, [0])], rows, "a sequence is there twice"),
        (good, [Work(other, [0, 0])], rows, "a sequence is another decoder's"),
        (good, [Work(sequence, [0, 0], [0, -1])], rows, "a parent must come before its row"),
        (good, [Work(sequence, [0, 0], [-1])], rows, "1 parents for 2 rows"),
        (wide, [Work(wide.new_sequence(), [0, 0])], rows, "attention needs inputs of its own width"),
    ):
        with pytest.raises(ValueError, match=message):
            target.forward(work, inputs=inputs)
    with pytest.raises(ValueError, match="there is no such layer"):
        good.forward([Work(sequence, [0, 0])], inputs=rows, hidden_layers=(2,))
    assert sequence.length == 0
    with pytest.raises(ValueError, match="must have as many each"):
        core.Linear([random(2, 3), random(2, 4)])
    with pytest.raises(ValueError, match="must be two of one size"):
        core.Linear([random(2, 3), random(4, 3)], gated=True)
    with pytest.raises(ValueError, match="a gated linear goes before another"):
        linear(96, hidden, gated=True)(rows)


@pytest.mark.parametrize("rows", [[0, 0], [1, 0], [-1], [0, 5]])
def test_only_rows_that_are_there_can_be_kept(rows):
    target = small_target(PATHS[0])
    sequence = target.new_sequence()
    extend(target, sequence, ids(10))
    with pytest.raises(ValueError, match="must ascend within the 10 tokens held"):
        sequence.keep(5, rows)
    assert sequence.length == 10


# -- threads


def test_two_threads_on_one_target(use_threads):
    """Their sequences grow past what is known of positions, each at its own time."""
    use_threads(2)
    target = small_target(PATHS[0], max_position_embeddings=4096)
    texts = [ids(2100, seed) for seed in range(3)]
    expected = [extend(target, target.new_sequence(), text) for text in texts]
    target = small_target(PATHS[0], max_position_embeddings=4096)
    found: list[list[torch.Tensor]] = [[] for _ in texts]

    def work(i: int) -> None:
        sequence = target.new_sequence()
        while sequence.length < 2100:
            found[i].append(extend(target, sequence, texts[i][sequence.length :][: 90 + i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(torch.cat(f), e) for f, e in zip(found, expected, strict=True))


def test_engines_share_the_pool(use_threads):
    use_threads(3)
    targets = [small_target(PATHS[0]), small_target(PATHS[-1])]
    texts = [ids(40, seed) for seed in range(4)]
    expected = [extend(targets[i % 2], targets[i % 2].new_sequence(), text) for i, text in enumerate(texts)]
    wrong, rounds = [], [0] * 4

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(extend(targets[i % 2], targets[i % 2].new_sequence(), texts[i]), expected[i]):
                wrong.append(i)
            rounds[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert rounds == [20] * 4


def test_idle_threads_sleep(use_threads):
    use_threads(3)
    extend((target := small_target(PATHS[0])), target.new_sequence(), ids(8))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2  # two threads that spin would take 0.8


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_has_threads_of_its_own():
    script = """
        import os, sys, threading
        sys.path.insert(0, "tests")
        from test_core import PATHS, extend, ids, library, small_target
        import torch
        library.threads = lambda: 3
        target = small_target(PATHS[0])
        expected = extend(target, target.new_sequence(), ids(20))
        child = os.fork()
        if child == 0:
            same = torch.equal(extend(target, target.new_sequence(), ids(20)), expected)
            os._exit(0 if same else 1)
        statuses = [os.waitpid(child, 0)[1]]
        running = True
        def loop():
            while running:
                extend(target, target.new_sequence(), ids(20))
        thread = threading.Thread(target=loop)
        thread.start()
        for _ in range(5):  # while a forward is on its way
            child = os.fork()
            if child == 0:
                same = torch.equal(extend(target, target.new_sequence(), ids(20)), expected)
                os._exit(0 if same else 1)
            statuses.append(os.waitpid(child, 0)[1])
        running = False
        thread.join()
        assert torch.equal(extend(target, target.new_sequence(), ids(20)), expected)
        print("children", statuses)
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.stdout == f"children {[0] * 6}\n", run.stderr


# -- which kernels run


def test_the_environment_names_a_path(monkeypatch):
    monkeypatch.delenv("SAKIYOMI_KERNELS", raising=False)
    assert core.resolve() == PATHS[0]
    for path in PATHS:
        monkeypatch.setenv("SAKIYOMI_KERNELS", path)
        assert core.resolve() == path
        assert small_target("auto").kernels == path
    assert core.resolve("plain") == "plain"  # what is asked for in the call goes first
    monkeypatch.setenv("SAKIYOMI_KERNELS", "torch")
    assert core.resolve() is None
    monkeypatch.setenv("SAKIYOMI_KERNELS", "sse9")
    with pytest.raises(
        OptionError, match=r"SAKIYOMI_KERNELS=sse9: must be one of auto, .*plain, torch on this machine"
    ):
        core.resolve()
    with pytest.raises(OptionError, match="kernels='neon'"):
        core.resolve("neon")


def test_threads_follow_torch_and_the_quota(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(library, "usable_cpus", lambda: 8)
        assert core.threads() == 3
        monkeypatch.setattr(library, "usable_cpus", lambda: 2)
        assert core.threads() == 2
    finally:
        torch.set_num_threads(before)
