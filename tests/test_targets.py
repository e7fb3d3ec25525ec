"""Decoders compute what transformers computes, on every kind of kernels, and every row has bits of its own."""

from __future__ import annotations

import pytest
import torch

from conftest import COMMON, VOCAB, make_reference, make_target
from sakiyomi.errors import CorruptModelError, UnsupportedModelError
from sakiyomi.interfaces import Work
from sakiyomi.targets import load_decoder, pytorch
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.targets.linear import Linear, can_pack, padded_rows, set_row_limit
from sakiyomi.targets.pytorch import TorchTarget, _invariant_key_block


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def extend(target: TorchTarget, sequence, tokens, parents=None, logit_rows=None) -> torch.Tensor:
    rows = len(tokens) if logit_rows is None else logit_rows
    return target.forward([Work(sequence, tokens, parents, rows)])[0].logits


def in_pieces(target: TorchTarget, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    sequence, found, start = target.new_sequence(), [], 0
    while start < len(tokens):
        size = sizes[len(found) % len(sizes)]
        found.append(extend(target, sequence, tokens[start : start + size]))
        start += size
    return torch.cat(found)


def test_logits_are_those_of_transformers(reference, target):
    text = ids(200)
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
    found = in_pieces(target, text, [128])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_bf16_is_as_precise_as_in_transformers(family, kernels):
    text = ids(64)
    exact = in_pieces(make_target(make_reference(family)), text, [64])
    theirs = make_reference(family).to(torch.bfloat16)
    with torch.inference_mode():
        their_error = (theirs(torch.tensor([text])).logits[0].float() - exact).abs().mean()
    found = in_pieces(make_target(theirs, torch.bfloat16, kernels=kernels), text, [64]).float()
    assert 0 < float((found - exact).abs().mean()) < 1.15 * float(their_error)


def test_hidden_states_are_those_of_transformers(reference, target):
    text, layers = ids(40), [0, 1, 2, 3]
    with torch.inference_mode():
        body = reference.model(torch.tensor([text]), output_hidden_states=True)
    output = target.forward([Work(target.new_sequence(), text)], hidden_layers=layers)[0]
    assert len(output.hidden) == len(layers)
    for layer in layers[:-1]:  # transformers gives the last one after the final norm
        torch.testing.assert_close(output.hidden[layer], body.hidden_states[layer][0], rtol=1e-3, atol=1e-3)
    last = reference.model.norm(output.hidden[3])
    torch.testing.assert_close(last, body.hidden_states[3][0], rtol=1e-4, atol=1e-3)


def test_only_the_rows_asked_for_get_logits(target):
    text = ids(9)
    everything = extend(target, target.new_sequence(), text)
    for rows in (0, 1, 4):
        found = extend(target, target.new_sequence(), text, logit_rows=rows)
        assert torch.equal(found, everything[len(text) - rows :])


def test_target_is_bit_exact(target, kernels):
    if kernels == "torch" and not can_pack(target.dtype):
        pytest.skip("no packed kernels on this processor")
    assert target.exactness == "bit-exact"


def test_exactness_is_claimed_for_the_threads_that_were_tested():
    """Of torch's kernels: the compiled core has the same bits with any number of threads."""
    target = make_target(make_reference("llama", num_hidden_layers=1))
    if not can_pack(target.dtype):
        pytest.skip("no packed kernels on this processor")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert target.exactness == "numerics"
    finally:
        torch.set_num_threads(threads)
    assert target.exactness == "bit-exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_keys_change_no_bit(dtype, kernels):
    """Kernels change their ways with the number of keys: in fp32 where one call has 256 and more."""
    target = make_target(make_reference("llama"), dtype, kernels=kernels)
    text = ids(700)
    expected = in_pieces(target, text, [128])
    assert torch.equal(in_pieces(target, text, [128, 100, *[7] * 40]), expected)
    assert torch.equal(in_pieces(target, text, [128, 128, 90, *[1] * 180, 30]), expected)


def test_key_blocks_that_change_bits_are_not_used(monkeypatch):
    """Negative control: attention that looks at masked keys leaves no block, and no claim."""
    reference = make_reference("llama", num_hidden_layers=1)
    attention = torch.nn.functional.scaled_dot_product_attention

    def leaky(q, k, v, attn_mask):
        return attention(q, k, v, attn_mask=attn_mask) * (1 + 1e-6 * k.shape[2])

    assert _invariant_key_block(DecoderConfig.from_huggingface(reference.config.to_dict()), torch.float32) > 0
    monkeypatch.setattr(pytorch.F, "scaled_dot_product_attention", leaky)
    assert _invariant_key_block(DecoderConfig.from_huggingface(reference.config.to_dict()), torch.float32) == 0
    assert make_target(reference).exactness == "numerics"


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_the_default_wherever_it_is_faster(kernels, native, monkeypatch):
    monkeypatch.setattr("sakiyomi.targets.linear.native_bf16", lambda: native)
    reference = make_reference("llama", num_hidden_layers=1)
    config = DecoderConfig.from_huggingface(reference.config.to_dict())
    expected = torch.bfloat16 if native or kernels != "torch" else torch.float32
    assert load_decoder(config, reference.state_dict(), kernels=kernels).dtype is expected


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_silu_has_the_same_bits_for_any_number_of_rows(threads):
    before = torch.get_num_threads()
    x = torch.randn(128, 2 * 4864, generator=torch.Generator().manual_seed(0))[:, :4864]
    try:
        torch.set_num_threads(threads)
        whole = pytorch._silu(x)
        assert all(torch.equal(pytorch._silu(x[:n]), whole[:n]) for n in (1, 2, 7, 12, 16, 64, 96))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(whole, torch.nn.functional.silu(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[1, 1, 2, 1, 30], [5, 1, 7, 64], [31, 33]], ids=str)
def test_chunking_changes_no_bit(reference, dtype, sizes, kernels):
    target = make_target(reference, dtype, kernels=kernels)
    text = ids(150)
    assert torch.equal(in_pieces(target, text, sizes), in_pieces(target, text, [128]))


def test_rollback_leaves_no_trace(target):
    text, wrong = ids(60), ids(60, seed=1)
    expected = in_pieces(target, text, [60])
    sequence = target.new_sequence()
    extend(target, sequence, text[:20])
    extend(target, sequence, wrong[:30])  # also across what comes later
    sequence.truncate(20)
    found = [extend(target, sequence, text[20:25])]
    extend(target, sequence, wrong[30:37])
    sequence.truncate(25)
    found.append(extend(target, sequence, text[25:]))
    assert torch.equal(torch.cat(found), expected[20:])
    with pytest.raises(ValueError, match="length=61"):
        sequence.truncate(61)


def test_tree_rows_are_the_chains_they_stand_for(target):
    prefix, tokens = ids(130), ids(7, seed=2)
    parents = [-1, 0, 0, 1, 2, -1, 5]  # paths: 0 1 3 | 0 2 4 | 5 6
    tree = target.new_sequence()
    extend(target, tree, prefix)
    found = extend(target, tree, tokens, parents)
    for path in ([0, 1, 3], [0, 2, 4], [5, 6]):
        chain = target.new_sequence()
        extend(target, chain, prefix)
        expected = extend(target, chain, [tokens[row] for row in path])
        assert torch.equal(found[path], expected)


def test_the_kept_path_of_a_tree_is_the_chain(target):
    prefix, tokens, rest = ids(30), ids(7, seed=2), ids(12, seed=3)
    tree, chain = target.new_sequence(), target.new_sequence()
    extend(target, tree, prefix)
    extend(target, tree, tokens, [-1, 0, 0, 1, 2, -1, 5])
    tree.keep(30, [0, 2, 4])
    extend(target, chain, prefix)
    extend(target, chain, [tokens[row] for row in (0, 2, 4)])
    assert tree.length == chain.length == 33
    assert torch.equal(extend(target, tree, rest), extend(target, chain, rest))


def test_sequences_in_one_forward_dont_meet(target):
    texts = [ids(3, 1), ids(141, 2), ids(50, 3)]
    sequences = [target.new_sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        extend(target, sequence, text[:-2])
    trees = [None, [-1, -1], None]
    together = target.forward([Work(s, t[-2:], tree, 2) for s, t, tree in zip(sequences, texts, trees, strict=True)])
    for text, tree, output in zip(texts, trees, together, strict=True):
        alone = target.new_sequence()
        extend(target, alone, text[:-2])
        assert torch.equal(output.logits, extend(target, alone, text[-2:], tree))


def test_growing_keeps_what_is_there(target):
    text = ids(600)  # beyond the first block of memory
    sequence = target.new_sequence()
    extend(target, sequence, text[:10])
    small = sequence.capacity
    extend(target, sequence, text[10:])
    assert sequence.capacity > small
    assert torch.equal(in_pieces(target, text, [10, 590])[10:], in_pieces(target, text, [64])[10:])


def test_failed_forward_changes_no_sequence(target):
    sequence = target.new_sequence()
    text = ids(20)
    extend(target, sequence, text[:10])
    with pytest.raises(IndexError):
        extend(target, sequence, [VOCAB + 5])
    assert sequence.length == 10
    assert torch.equal(extend(target, sequence, text[10:]), in_pieces(target, text, [20])[10:])


def test_self_test_sees_rows_that_influence_each_other(monkeypatch):
    """Negative control: bits that depend on the number of rows must not pass as exact."""
    reference = make_reference("llama", num_hidden_layers=1)
    attention = torch.nn.functional.scaled_dot_product_attention

    def leaky(q, k, v, attn_mask):
        return attention(q, k, v, attn_mask=attn_mask) * (1 + 1e-6 * q.shape[0])

    monkeypatch.setattr(pytorch.F, "scaled_dot_product_attention", leaky)
    assert make_target(reference).exactness == "numerics"


@pytest.mark.parametrize(("breaks_above", "limit"), [(128, 128), (127, 96), (40, 32), (8, 8), (7, 0)])
def test_row_limit_is_where_the_kernel_changes(monkeypatch, breaks_above, limit):
    def kernel(self: Linear, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] + (1e-3 * x.shape[0] if x.shape[0] > breaks_above else 0.0)

    monkeypatch.setattr(Linear, "run", kernel)
    linear = Linear(torch.ones(4, 4))
    assert set_row_limit([linear], torch.float32) == limit
    assert linear.row_limit == (limit or 128)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [2, 6, 32, 64, 256])
def test_linear_for_any_number_of_rows(monkeypatch, packed, rows):
    if packed and not can_pack(torch.float32):
        pytest.skip("no packed kernels here")
    if not packed:
        monkeypatch.setattr("sakiyomi.targets.linear.can_pack", lambda dtype: False)
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 40), torch.randn(24)
    x = torch.randn(rows, 40)
    linear = Linear(weight, bias)
    linear.row_limit = 32
    y = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear(x), y, rtol=1e-4, atol=1e-4)


def test_linear_sees_rows_that_move(monkeypatch):
    """Negative control: a row whose bits depend on its place must not pass."""
    monkeypatch.setattr(Linear, "run", lambda self, x: x + torch.arange(x.shape[0])[:, None])
    assert set_row_limit([Linear(torch.ones(4, 4))], torch.float32) == 0


def test_padded_rows():
    assert [padded_rows(n, 128) for n in (1, 2, 3, 5, 9, 33, 128, 129)] == [2, 2, 4, 6, 12, 48, 128, 256]
    assert [padded_rows(n, 32) for n in (1, 31, 32, 33, 65)] == [2, 32, 32, 64, 96]


def config(**changes: object) -> dict[str, object]:
    return {"model_type": "llama", **COMMON, **changes}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "qwen2", "sliding_window": 9}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            (None, 9, 9),
        ),
        ({"model_type": "llama", "sliding_window": 9}, (None, None, None)),
    ],
    ids=str,
)
def test_sliding_windows_are_where_transformers_has_them(changes, windows):
    import transformers

    found = DecoderConfig.from_huggingface(config(**changes)).windows
    assert found == windows
    if changes["model_type"] == "qwen2":
        theirs = transformers.Qwen2Config(**{**COMMON, **changes}).layer_types
        assert [kind == "sliding_attention" for kind in theirs] == [window is not None for window in windows]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported: llama, mistral, qwen2, qwen3 are"),
        ({"model_type": None}, "architecture None"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported: silu is"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised weights .* GGUF files are"),
    ],
)
def test_what_decoders_do_not_run(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderConfig.from_huggingface(config(**changes))


def test_unknown_rope_type_is_named():
    reference = make_reference("llama", num_hidden_layers=1)
    wrong = reference.config.to_dict() | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic' is not supported: default, linear"):
        TorchTarget(DecoderConfig.from_huggingface(wrong), reference.state_dict(), torch.float32)


def test_inconsistent_models_are_named():
    reference = make_reference("llama", num_hidden_layers=1)
    good = DecoderConfig.from_huggingface(reference.config.to_dict())
    weights = dict(reference.state_dict())
    lacking = {k: v for k, v in weights.items() if k != "model.layers.0.mlp.up_proj.weight"}
    with pytest.raises(CorruptModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        TorchTarget(good, lacking, torch.float32)
    quantised = weights | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.weight' is torch\.int8"):
        TorchTarget(good, quantised, torch.float32)
    misshapen = weights | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(CorruptModelError, match=r"'model.norm.weight' has shape \[3\], config.json says \[64\]"):
        TorchTarget(good, misshapen, torch.float32)
    with pytest.raises(CorruptModelError, match="lacks 'hidden_size'"):
        DecoderConfig.from_huggingface({k: v for k, v in config().items() if k != "hidden_size"})
    for changes in (
        {"num_attention_heads": None},
        {"hidden_size": "x"},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]},
    ):
        with pytest.raises(CorruptModelError, match=r"config\.json"):
            DecoderConfig.from_huggingface(config(**changes))


@pytest.mark.parametrize(("family", "lost"), [("qwen2", "q_proj.bias"), ("qwen3", "k_norm.weight")])
def test_what_an_architecture_calls_for_must_be_there(family, lost):
    reference = make_reference(family, num_hidden_layers=1)
    weights = {k: v for k, v in reference.state_dict().items() if not k.endswith(lost)}
    with pytest.raises(CorruptModelError, match=lost):
        TorchTarget(DecoderConfig.from_huggingface(reference.config.to_dict()), weights, torch.float32)
