"""The memory of models that run as transformers has them: a model with it computes what it computes without one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from conftest import VOCAB

transformers = pytest.importorskip("transformers")

from sakiyomi.targets.cache import BLOCK  # noqa: E402
from sakiyomi.targets.module_cache import ModuleCache, run_rows  # noqa: E402

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 7}),
    "hybrid": ("gemma3_text", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "learned": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}
IDS = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=[(k, a) for k in KINDS for a in ("sdpa", "eager")], ids=str)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    kind, attention = request.param
    name, options = KINDS[kind]
    layers = {"num_hidden_layers": 4} if kind == "hybrid" else {}
    common = COMMON if name != "gpt2" else {k: v for k, v in COMMON.items() if "token_id" in k or k == "vocab_size"}
    config = transformers.AutoConfig.for_model(name, **{**common, **options, **layers})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@torch.inference_mode()
def alone(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of all rows, computed without a cache."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


class Run:
    """A model and the cache of one sequence."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.cache, self.calls = model, ModuleCache(), []

    @torch.inference_mode()
    def call(self, tokens: Sequence[int]) -> torch.Tensor:
        self.calls.append(len(tokens))
        return self.model(torch.tensor([list(tokens)]), cache=self.cache, use_cache=True).logits[0]

    def __call__(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> torch.Tensor:
        return run_rows(self.cache, tokens, parents, self.call)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_pieces_are_the_whole(model):
    run, found = Run(model), []
    for size in (1, 5, 1, 1, 12, 3, 30, 7):
        found.append(run(IDS[run.cache.length :][:size]))
    assert run.cache.length == len(IDS)
    close(torch.cat(found), alone(model, IDS))


def test_rolling_back_leaves_no_trace(model):
    run = Run(model)
    run(IDS[:30])
    run([5] * 11)
    run.cache.truncate(25)
    close(run(IDS[25:50]), alone(model, IDS[:50])[25:])
    for wrong in (-1, 51):
        with pytest.raises(ValueError, match="must be between 0 and 50"):
            run.cache.truncate(wrong)


TREE = [-1, 0, 1, 0, 1, 3, -1, 6, 5]  # paths 0 1 2, 0 1 4, 0 3 5 8, 6 7


def test_rows_of_a_tree_are_the_rows_of_its_paths(model):
    run, held = Run(model), IDS[:12]
    run(held)
    tokens = IDS[20:29]
    run.calls.clear()
    found = run(tokens, TREE)
    assert sum(run.calls) == len(tokens), "each row once"
    for row in range(len(tokens)):
        path, at = [], row
        while at >= 0:
            path.insert(0, tokens[at])
            at = TREE[at]
        close(found[row], alone(model, [*held, *path])[-1])


@pytest.mark.parametrize("kept", [[0, 3, 5, 8], [0, 1], [0, 1, 4], [6], []])
def test_what_is_kept_of_a_tree(model, kept):
    run, held = Run(model), IDS[:12]
    run(held)
    tokens = IDS[20:29]
    run(tokens, TREE)
    run.cache.keep(len(held), kept)
    text = [*held, *(tokens[row] for row in kept)]
    assert run.cache.length == len(text)
    close(run(IDS[40:45]), alone(model, [*text, *IDS[40:45]])[len(text) :])


def test_memory_grows_in_blocks_and_views_are_no_copies(model):
    run = Run(model)
    text = [IDS[i % 60] for i in range(2 * BLOCK + 5)] if model.config.model_type != "gpt2" else IDS
    for start in range(0, len(text), 50):
        run(text[start : start + 50])
    close(run(IDS[:3])[:1], alone(model, [*text, IDS[0]])[-1:])
    assert run.cache.capacity % BLOCK == 0
    assert run.cache.nbytes > 0
    before = [layer.keys.data_ptr() for layer in run.cache.layers]
    run.cache.truncate(len(text))
    run(IDS[:3])
    assert [layer.keys.data_ptr() for layer in run.cache.layers] == before
    keys, values = run.cache.layers[0].update(*(torch.zeros_like(each) for each in run.cache.read([0])[0]))
    assert keys.data_ptr() == run.cache.layers[0].keys.data_ptr()
    assert keys.shape[2] == values.shape[2] == run.cache.length + 1


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_a_call_that_fails_leaves_the_sequence_as_it_was(model, parents):
    run = Run(model)
    run(IDS[:12])
    calls = iter([True, False] if parents else [False])

    def fail(tokens: Sequence[int]) -> torch.Tensor:
        computed = run.call(tokens)
        if not next(calls):
            raise MemoryError
        return computed

    with pytest.raises(MemoryError):
        run_rows(run.cache, [9] * 9, parents, fail)
    assert run.cache.length == 12
    close(run(IDS[12:20]), alone(model, IDS[:20])[12:])


def test_one_sequence_only():
    with pytest.raises(ValueError, match="a batch of 2 sequences"):
        ModuleCache().update(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), 0)


def test_keys_and_values_may_differ_in_size():
    cache = ModuleCache()
    keys, values = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 6), 1)
    assert (keys.shape, values.shape) == ((1, 2, 3, 4), (1, 2, 3, 6))
    assert cache.nbytes == 2 * BLOCK * 10 * 4
    assert cache.get_max_length() == cache.layers[1].get_max_length() == -1
