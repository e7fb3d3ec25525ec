"""The MLP speculator: its steps, its trees, its format, and that it can't change a text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from conftest import KERNELS, VOCAB, byte_tokenizer
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters.layers import Kernels
from sakiyomi.drafters.mlp import (
    MlpConfig,
    MlpDrafter,
    MlpSpeculator,
    load,
    save_mlp,
)
from sakiyomi.drafters.model import likely
from sakiyomi.drafters.trained import TargetParts, draft_names
from sakiyomi.drafters.tree import LEAST_SURVIVAL
from sakiyomi.engine import Engine
from sakiyomi.errors import CorruptModelError, ModelError, OptionError, UnsupportedModelError
from sakiyomi.files import replace_file
from sakiyomi.interfaces import HEAD_INPUT, Draft, Drafter, Target, Work
from sakiyomi.models import read_config
from sakiyomi.policy import AdaptivePolicy, FixedPolicy, Policy
from sakiyomi.sampling import Chooser, SamplingParams

HIDDEN, INNER, DRAFT = 64, 48, 150
PROMPT = [7, 8, 9, 7, 8, 9, 40, 41, 7, 8]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_new_tokens=40)
COSTS = ModelCosts(CostTable((1, 8), (1e-5, 2e-5)))
Make = Callable[..., MlpDrafter]


def parts(vocab_size: int = VOCAB, hidden_size: int = HIDDEN) -> TargetParts:
    table = torch.zeros(vocab_size, hidden_size)
    return TargetParts(vocab_size, hidden_size, 2, 1024, table, table)


def tensors(config: MlpConfig, size: int = VOCAB, scale: float = 0.45) -> dict[str, torch.Tensor]:
    """Random weights of what a config stores."""
    generator = torch.Generator().manual_seed(3)
    made: dict[str, torch.Tensor] = {}
    for step in range(config.n_predict):
        width = config.hidden_size if step == 0 else config.inner_dim
        for kind, shape in (
            ("emb", (config.vocab_size, config.inner_dim)),
            ("proj", (config.inner_dim, width)),
            ("head", (size, config.inner_dim)),
        ):
            if config.stored(kind, step) == step:
                factor = scale if kind == "head" else shape[1] ** -0.5
                made[f"{kind}.{step}.weight"] = torch.randn(*shape, generator=generator) * factor
        if config.stored("ln", step) == step:
            made[f"ln.{step}.weight"] = 1 + 0.3 * torch.randn(config.inner_dim, generator=generator)
            made[f"ln.{step}.bias"] = 0.3 * torch.randn(config.inner_dim, generator=generator)
    return made


def slow(
    config: MlpConfig, weights: dict[str, torch.Tensor], state: np.ndarray, tokens: Sequence[int]
) -> list[np.ndarray]:
    """The published equations in float64, one token at a time: the logits after each of ``tokens``."""
    sw = 0.5 ** (0.5 / config.n_predict)
    ew = math.sqrt((1 - sw**2) * config.inner_dim / 2)

    def of(name: str, step: int, what: str = "weight") -> np.ndarray:
        shared = config.tie_weights and not (name == "proj" and step == 0)
        number = (1 if name == "proj" else 0) if shared else step
        return weights[f"{name}.{number}.{what}"].double().numpy()

    s = state.astype(np.float64)
    if config.scale_input:
        s = s / np.sqrt((s**2).mean() + 1e-6) / math.sqrt(2)
    found = []
    for step, token in enumerate(tokens):
        x = of("proj", step) @ s + ew / sw * of("emb", step)[token]
        x = x / np.sqrt((x**2).mean() + 1e-6) * of("ln", step) + of("ln", step, "bias")
        s = np.array([0.5 * each * (1 + math.erf(each / math.sqrt(2))) for each in x])
        found.append(of("head", step) @ s)
    return found


CONFIGS = {
    "plain": MlpConfig(HIDDEN, INNER, VOCAB, 4),
    "tied": MlpConfig(HIDDEN, INNER, VOCAB, 4, tie_weights=True),
    "scaled": MlpConfig(HIDDEN, INNER, VOCAB, 3, scale_input=True),
    "tied and scaled": MlpConfig(HIDDEN, HIDDEN, VOCAB, 3, tie_weights=True, scale_input=True),
    "one step": MlpConfig(HIDDEN, INNER, VOCAB, 1, tie_weights=True),
}
STATE = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5)) * 3


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> MlpConfig:
    return CONFIGS[request.param]


def drafter(config: MlpConfig, weights: dict[str, torch.Tensor], /, **options) -> MlpDrafter:
    how = Kernels.find(options.pop("weights", "fp32"), options.pop("kernels", "auto"))
    return MlpDrafter(MlpSpeculator(config, weights, how), **{"costs": COSTS, **options})


def ready(made: Drafter, params: SamplingParams = GREEDY, state: torch.Tensor = STATE):
    """A session that has read the states of all of PROMPT but its last token."""
    session = made.session(PROMPT, params, False)
    session.read([torch.zeros(4, HIDDEN)])
    session.read([torch.cat([torch.zeros(4, HIDDEN), state[None]])])
    return session


def paths(draft: Draft) -> Iterator[tuple[int, list[int]]]:
    """Each token's index, and the indices of its path."""
    parents = draft.parents if draft.parents is not None else range(-1, len(draft) - 1)
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        assert -1 <= parent < i
        found.append([*(found[parent] if parent >= 0 else []), i])
        yield i, found[i]


@pytest.mark.parametrize("kernels", KERNELS)
def test_steps_are_the_published_equations(config, kernels):
    weights = tensors(config)
    model = MlpSpeculator(config, weights, Kernels.find("fp32", kernels))
    tokens = [3, 99, 5, 260][: config.n_predict]
    expected = slow(config, weights, STATE.numpy(), tokens)
    states = model.first(torch.stack([STATE, STATE * 0.5]))
    for step, token in enumerate(tokens):
        states, logits = model.step(step, states, [token, 7])
        assert logits.dtype == states.dtype == torch.float32
        assert logits.shape == (2, VOCAB)
        np.testing.assert_allclose(logits[0].numpy(), expected[step], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("format", ["auto", "int8", "bf16"])
def test_formats_agree(kernels, format):
    config = CONFIGS["scaled"]
    weights = tensors(config)
    if kernels == "torch" and format == "int8":
        with pytest.raises(OptionError, match="int8"):
            drafter(config, weights, weights=format, kernels=kernels)
        return
    exact = MlpSpeculator(config, weights, Kernels.find("fp32", "torch"))
    model = MlpSpeculator(config, weights, Kernels.find(format, kernels))
    x = torch.stack([STATE, STATE.flip(0)])
    _, expected = exact.step(0, exact.first(x), [1, 2])
    _, logits = model.step(0, model.first(x), [1, 2])
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=5, temperature=1.5)])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_tree_is_the_chains_it_stands_for(config, params, reduced):
    ids = torch.arange(0, 2 * DRAFT, 2) if reduced else torch.arange(VOCAB)
    weights = tensors(config, len(ids))
    given = {**weights, "d2t": ids - torch.arange(len(ids))} if reduced else weights
    draft = ready(drafter(config, given, width=3), params).propose(9)
    assert draft.drafter == "mlp"
    assert draft.distributions is None
    children: dict[int, list[int]] = {}
    deepest = 0
    for i, path in paths(draft):
        before = [draft.tokens[j] for j in path[:-1]]
        logits = slow(config, weights, STATE.numpy(), [PROMPT[-1], *before])[-1].astype(np.float32)
        found = likely(logits, ids.numpy(), params, params.seed, len(PROMPT) + len(before), 3)
        rank = [int(ids[index]) for index, _ in found].index(draft.tokens[i])
        assert draft.confidences[i] == pytest.approx(found[rank][1], rel=1e-3)
        siblings = children.setdefault(path[-2] if before else -1, [])
        assert rank > 0 or not siblings, "a choice comes before its alternatives"
        siblings.append(draft.tokens[i])
        assert len(set(siblings)) == len(siblings)
        deepest = max(deepest, len(path))
        if any(j not in _main(draft) for j in path):
            assert math.prod(draft.confidences[j] for j in path) >= LEAST_SURVIVAL
    assert deepest == len(_main(draft)) == config.n_predict
    levels = [{path[-2] for _, path in paths(draft) if len(path) == depth} for depth in range(2, deepest + 1)]
    assert all(len(level) <= 3 for level in levels), "the paths of a level that go on"
    if config.n_predict > 1 and params is GREEDY:
        assert len(draft) > deepest, "a test of trees needs some"


def _main(draft: Draft) -> list[int]:
    parents = draft.parents if draft.parents is not None else range(-1, len(draft) - 1)
    main: list[int] = []
    for i, parent in enumerate(parents):
        if parent == (main[-1] if main else -1):
            main.append(i)
    return main


def test_width_one_is_the_main_path():
    config = CONFIGS["plain"]
    weights = tensors(config)
    tree = ready(drafter(config, weights)).propose(9)
    chain = ready(drafter(config, weights, width=1)).propose(9)
    assert chain.parents is None
    assert tree.parents is not None
    assert chain.tokens == tuple(tree.tokens[i] for i in _main(tree))
    assert chain.confidences == pytest.approx([tree.confidences[i] for i in _main(tree)], rel=1e-5)


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
@pytest.mark.parametrize("most", [1, 3, 5, 24])
def test_budgets(budget, most):
    config = CONFIGS["plain"]
    session = ready(drafter(config, tensors(config), max_nodes=most))
    asked: list[float] = []
    draft = session.propose(budget, lambda confidence: asked.append(confidence) or True)
    assert len(draft) <= most
    assert len(_main(draft)) == max((len(path) for _, path in paths(draft)), default=0) == min(budget, most, 4)
    assert len(asked) == len(_main(draft)), "asked after each step"
    stopped = session.propose(budget, lambda confidence: False)
    assert len(_main(stopped)) == min(budget, 1)
    if budget:
        assert asked == [draft.confidences[i] for i in _main(draft)]


def test_states_must_be_those_of_all_tokens_but_the_last():
    config = CONFIGS["plain"]
    made = drafter(config, tensors(config))
    session = made.session(PROMPT, GREEDY)
    assert session.unread == 0
    assert made.hidden_layers == (HEAD_INPUT,)
    assert len(session.propose(4)) == 0
    session.read([torch.zeros(len(PROMPT) - 2, HIDDEN)])
    assert len(session.propose(4)) == 0
    session.read([torch.zeros(0, HIDDEN)])
    with torch.inference_mode():
        states = torch.cat([STATE[None] * 9, STATE[None]])
    session.read([states[1:].to(torch.bfloat16).float()])
    assert len(session.propose(4)) > 0
    session.observe([5, 6])
    assert len(session.propose(4)) == 0
    session.read([states[:2]])
    first = session.propose(4)
    assert first.tokens == session.propose(4).tokens != ready(made).propose(4).tokens


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("format", ["auto", "fp32"])
def test_what_is_no_number_is_no_draft(kernels, format):
    config = CONFIGS["plain"]
    weights = tensors(config)
    made = drafter(config, weights, weights=format, kernels=kernels)
    if format == "fp32":
        assert len(ready(made, state=STATE * math.nan).propose(4)) == 0
    weights["head.1.weight"] = weights["head.1.weight"] * math.nan
    broken = drafter(config, weights, weights="fp32", kernels=kernels)
    assert len(_main(ready(broken).propose(4))) == 1
    weights["head.0.weight"] = weights["head.0.weight"] * math.nan
    assert len(ready(drafter(config, weights, weights="fp32", kernels=kernels)).propose(4)) == 0


def test_nothing_is_drafted_after_an_end():
    config = CONFIGS["plain"]
    weights = tensors(config)
    whole = ready(drafter(config, weights)).propose(4)
    second = whole.tokens[_main(whole)[1]]
    for made, params in (
        (drafter(config, weights), replace(GREEDY, stop_token_ids=(second,))),
        (drafter(config, weights, eos_ids=[second]), GREEDY),
    ):
        draft = ready(made, params).propose(4)
        assert [draft.tokens[i] for i in _main(draft)] == [whole.tokens[i] for i in _main(whole)[:2]]
        assert all(draft.tokens[j] != second for _, path in paths(draft) for j in path[:-1])
    ignoring = ready(drafter(config, weights, eos_ids=[second]), replace(GREEDY, ignore_eos=True)).propose(4)
    assert ignoring.tokens == whole.tokens


# What a target writes, and a speculator that has learned it by heart.


def written(target: Target, params: SamplingParams) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """The ids of a prompt and of what follows it; the states and the logits of all but the last."""
    sequence, chooser = target.new_sequence(), Chooser(params, PROMPT, target.vocab_size, ())
    ids, new, states, logits = list(PROMPT), list(PROMPT), [], []
    for _ in range(params.max_new_tokens):
        (output,) = target.forward([Work(sequence, new, None, len(new))], hidden_layers=(HEAD_INPUT,))
        states.append(output.hidden[0].float().clone())
        logits.append(output.logits.float().clone())
        new = [chooser.choose(output.logits[-1].float().numpy())]
        ids += new
    return ids, torch.cat(states), torch.cat(logits)


def solved(features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A head that makes these logits of these features: [rows, VOCAB], [rows, width] -> [VOCAB, width]."""
    return torch.linalg.lstsq(features.double(), logits.double(), driver="gelsd").solution.T.float()


def by_heart(target: Target, params: SamplingParams) -> dict[str, torch.Tensor]:
    config = replace(CONFIGS["plain"], inner_dim=HIDDEN)
    weights = tensors(config)
    model = MlpSpeculator(config, weights, Kernels.find("fp32", "torch"))
    ids, hidden, logits = written(target, params)
    states = model.first(hidden)
    for step in range(config.n_predict):
        count = len(ids) - 2 - step  # of states whose step there is an answer to
        states, _ = model.step(step, states[:count], ids[1 + step : 1 + step + count])
        weights[f"head.{step}.weight"] = solved(states, logits[1 + step :])
    return weights


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_what_is_learned_by_heart_is_drafted(llama, params):
    """The steps meet the tokens they are about: all drafts stand, in rounds of the engine."""
    config = replace(CONFIGS["plain"], inner_dim=HIDDEN)
    made = drafter(config, by_heart(llama, params))
    engine = Engine(llama)
    for k in (1, 4):
        chunks = list(engine.run(engine.request(PROMPT, params, [made], FixedPolicy(k))))
        assert [token for chunk in chunks for token in chunk.token_ids] == written(llama, params)[0][len(PROMPT) :]
        assert [chunk.record.accepted for chunk in chunks] == [chunk.record.drafted for chunk in chunks]
        assert len(chunks) == 1 + math.ceil(39 / (k + 1))
        assert chunks[0].record.drafted == 0


def policies() -> list[Policy | None]:
    adaptive = AdaptivePolicy(ModelCosts(CostTable((1, 33), (0.01, 0.011))))
    return [None, FixedPolicy(1), FixedPolicy(4), adaptive]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, repetition_penalty=1.3)])
def test_the_text_is_the_targets_whatever_is_drafted(llama, params):
    config = replace(CONFIGS["plain"], inner_dim=HIDDEN)
    engine = Engine(llama, byte_tokenizer())
    makes = [drafter(config, by_heart(llama, GREEDY)), drafter(config, tensors(config), weights="auto")]
    plain = [token for chunk in engine.run(engine.request(PROMPT, params)) for token in chunk.token_ids]
    assert len(plain) > 10
    for made in makes:
        for policy in policies():
            request = engine.request(PROMPT, params, [made], policy)
            chunks = list(engine.run(request))
            assert [token for chunk in chunks for token in chunk.token_ids] == plain
            assert all(source.alive for source in request.sources)
            if params is GREEDY and made is makes[0] and policy is not None:
                assert sum(chunk.record.accepted for chunk in chunks) > 10


# The format.


def write(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def described(config: MlpConfig) -> dict[str, object]:
    return {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": config.hidden_size,
        "inner_dim": 0 if config.inner_dim == config.hidden_size else config.inner_dim,
        "vocab_size": config.vocab_size,
        "n_predict": config.n_predict,
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
    }


def loaded(folder: Path, **options) -> MlpDrafter:
    return load(folder, read_config(folder), parts(), **{"weights": "fp32", "costs": COSTS, **options})


@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_checkpoints(tmp_path, config, prefix):
    weights = tensors(config)
    write(tmp_path, described(config), {prefix + name: tensor for name, tensor in weights.items()})
    made = loaded(tmp_path)
    assert made.model.config == config
    expected = ready(drafter(config, weights)).propose(9)
    found = ready(made).propose(9)
    assert (found.tokens, found.parents, found.confidences) == (
        expected.tokens,
        expected.parents,
        expected.confidences,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
def test_what_is_saved_is_what_is_loaded(tmp_path, config, dtype, reduced):
    d2t = torch.arange(DRAFT) * 1 if reduced else None
    weights = {name: tensor.to(dtype) for name, tensor in tensors(config, DRAFT if reduced else VOCAB).items()}
    for _ in range(2):  # the second time over the first
        save_mlp(tmp_path, config, {**weights, "other": torch.zeros(1)}, d2t=d2t, facts={"base": "org/model"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    told = read_config(tmp_path)
    assert told["base"] == "org/model"
    assert told["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert told.get("draft_vocab_size") == (DRAFT if reduced else None)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(name.startswith("speculator.") for name in stored)
    assert torch.equal(stored["speculator.emb.0.weight"], weights["emb.0.weight"])
    if not reduced:  # vLLM takes each step's head by its own name
        assert all(f"speculator.head.{step}.weight" in stored for step in range(config.n_predict))
    made = loaded(tmp_path)
    assert made.model.config == config
    assert (made.names is not None) == reduced
    given = weights if d2t is None else {**weights, "d2t": d2t}
    assert ready(made).propose(9).tokens == ready(drafter(config, given)).propose(9).tokens


def test_nothing_is_written_of_what_does_not_fit(tmp_path):
    config = CONFIGS["plain"]
    weights = tensors(config)
    del weights["ln.2.bias"]
    with pytest.raises(CorruptModelError, match=r"ln\.2\.bias"):
        save_mlp(tmp_path / "new", config, weights)
    assert not (tmp_path / "new").exists()


def test_what_cant_be_written_is_one_line_and_leaves_no_mixture(tmp_path, monkeypatch):
    """Weights without a config are no drafter: better than those of one with the config of another."""
    config = CONFIGS["plain"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"file/model\.safetensors: can't be written"):
        save_mlp(tmp_path / "file", config, tensors(config))
    save_mlp(tmp_path / "d", config, tensors(config))

    def fails(path: Path, *given, **options) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(OptionError, match=r"config\.json: can't be written \(No space left on device\)"):
        save_mlp(tmp_path / "d", config, tensors(config))
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["model.safetensors"]


def test_safetensors_errors_are_ours(tmp_path):
    """And whatever is raised, nothing stays beside what was there."""
    (tmp_path / "kept").write_text("as it was")
    for error, raised in ((SafetensorError("two\nlines"), OptionError), (KeyboardInterrupt(), KeyboardInterrupt)):

        def write(path: Path, error: BaseException = error) -> None:
            path.write_text("half")
            raise error

        with pytest.raises(raised, match="can't be written .two lines" if raised is OptionError else None):
            replace_file(tmp_path / "kept", write)
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        assert (tmp_path / "kept").read_text() == "as it was"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"emb_dim": 32}, OptionError, "hidden_size 32, this one has 64"),
        ({"vocab_size": 400}, OptionError, "vocab_size 400, this one has 320"),
        ({"n_predict": None}, CorruptModelError, "lacks 'n_predict'"),
        ({"n_predict": 0}, CorruptModelError, "n_predict 0 must be"),
        ({"emb_dim": "64.32"}, CorruptModelError, "emb_dim '64.32' must be"),
        ({"inner_dim": 40}, CorruptModelError, r"emb\.0\.weight.*shape"),
        ({"n_predict": 5}, CorruptModelError, r"lack 'speculator\.emb\.4\.weight'"),
        ({"method": "sum_lstm"}, UnsupportedModelError, "sum_lstm"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path, change, error, says):
    config = CONFIGS["plain"]
    weights = {f"speculator.{name}": tensor for name, tensor in tensors(config).items()}
    write(tmp_path, {**described(config), **change}, weights)
    with pytest.raises(error, match=says) as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["emb.3.weight", "proj.0.weight", "ln.1.weight", "ln.1.bias", "head.2.weight"])
def test_missing_tensors_are_named(tmp_path, missing):
    config = CONFIGS["plain"]
    weights = {f"speculator.{name}": tensor for name, tensor in tensors(config).items() if name != missing}
    with pytest.raises(CorruptModelError, match=missing.replace(".", r"\.")):
        loaded(write(tmp_path, described(config), weights))


def test_other_bad_input(tmp_path):
    config = CONFIGS["plain"]
    weights = tensors(config)
    for options in ({"width": 0}, {"max_nodes": 0}, {"weights": "int4"}, {"kernels": "abacus"}):
        with pytest.raises(OptionError, match=str(next(iter(options)))):
            loaded(write(tmp_path, described(config), weights), **options)
    for d2t in (
        torch.tensor([0, -1]),
        torch.tensor([VOCAB]),
        torch.tensor([-1]),
        torch.zeros(2),
        torch.zeros(1, 1).int(),
        torch.zeros(1, dtype=torch.bool),
        torch.zeros(0, dtype=torch.int64),
    ):
        with pytest.raises(CorruptModelError, match="d2t"):
            draft_names("'d2t'", d2t, VOCAB)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickles"):
        loaded(tmp_path)


def test_costs_are_measured():
    config = CONFIGS["plain"]
    costs = drafter(config, tensors(config), costs=None).costs
    assert isinstance(costs, ModelCosts)
    assert 0 < costs.seconds(1, 100) < 1
