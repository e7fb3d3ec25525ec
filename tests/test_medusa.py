"""Medusa heads: what they say, their trees, their formats, and that they can't change a text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conftest import KERNELS, VOCAB, byte_tokenizer
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters.layers import Kernels
from sakiyomi.drafters.medusa import MedusaDrafter, MedusaHead, MedusaHeads, load
from sakiyomi.drafters.model import likely
from sakiyomi.drafters.trained import TargetParts
from sakiyomi.drafters.tree import LEAST_SURVIVAL
from sakiyomi.engine import Engine
from sakiyomi.errors import CorruptModelError, ModelError, OptionError
from sakiyomi.interfaces import HEAD_INPUT, Draft, Drafter, Target, Work
from sakiyomi.models import read_config
from sakiyomi.policy import AdaptivePolicy, FixedPolicy, Policy
from sakiyomi.sampling import Chooser, SamplingParams

HIDDEN, DRAFT = 64, 150
PROMPT = [7, 8, 9, 7, 8, 9, 40, 41, 7, 8]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_new_tokens=40)
COSTS = ModelCosts(CostTable((1, 8), (1e-5, 2e-5)))
STATE = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))


def parts(vocab_size: int = VOCAB, hidden_size: int = HIDDEN) -> TargetParts:
    table = torch.zeros(vocab_size, hidden_size)
    return TargetParts(vocab_size, hidden_size, 2, 1024, table, table)


def random_heads(count: int = 4, depth: int = 1, size: int = VOCAB, biases: bool = True) -> list[MedusaHead]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        MedusaHead(
            tuple((random(HIDDEN, HIDDEN) / 8, random(HIDDEN) if biases else None) for _ in range(depth)),
            random(size, HIDDEN) * 0.2,
        )
        for _ in range(count)
    ]


def slow(head: MedusaHead, state: torch.Tensor) -> np.ndarray:
    """The published equations in float64."""
    x = state.double().numpy()
    for weight, bias in head.blocks:
        y = weight.double().numpy() @ x + (0 if bias is None else bias.double().numpy())
        x = x + y / (1 + np.exp(-y))
    return head.output.double().numpy() @ x


def drafter(heads: Sequence[MedusaHead], ids: np.ndarray | None = None, **options) -> MedusaDrafter:
    how = Kernels.find(options.pop("weights", "fp32"), options.pop("kernels", "auto"))
    return MedusaDrafter(MedusaHeads(heads, ids, how), **{"costs": COSTS, **options})


def ready(made: Drafter, params: SamplingParams = GREEDY, state: torch.Tensor = STATE):
    """A session that has read the states of all of PROMPT but its last token."""
    session = made.session(PROMPT, params, False)
    session.read([torch.cat([torch.zeros(8, HIDDEN), state[None]])])
    return session


def paths(draft: Draft) -> list[list[int]]:
    """Each token's path, as indices."""
    parents = draft.parents if draft.parents is not None else range(-1, len(draft) - 1)
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        assert -1 <= parent < i
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


def main_path(draft: Draft) -> list[int]:
    main: list[int] = []
    for path in paths(draft):
        if path[:-1] == main:
            main = path
    return main


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("biases", [False, True])
def test_heads_are_the_published_equations(kernels, depth, biases):
    heads = random_heads(2, depth, biases=biases)
    model = MedusaHeads(heads, None, Kernels.find("fp32", kernels))
    assert len(model) == 2
    for i, head in enumerate(heads):
        logits = model.logits(i, torch.stack([STATE, -STATE]))
        assert logits.dtype == torch.float32
        np.testing.assert_allclose(logits[0].numpy(), slow(head, STATE), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(logits[1].numpy(), slow(head, -STATE), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("format", ["auto", "bf16"])
def test_formats_agree(kernels, format):
    (head,) = random_heads(1)
    logits = MedusaHeads([head], None, Kernels.find(format, kernels)).logits(0, STATE[None])
    expected = slow(head, STATE)
    assert np.abs(logits[0].numpy() - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=5, temperature=1.5)])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("most", [5, 24])
def test_the_tree_is_the_likeliest_paths(params, reduced, most):
    """Level by level, those that are likeliest go on; of all that is found the likeliest are kept."""
    ids = np.arange(DRAFT) * 2 if reduced else np.arange(VOCAB)
    heads = random_heads(size=len(ids))
    draft = ready(drafter(heads, ids if reduced else None, width=3, max_nodes=most), params).propose(4)
    levels = []
    for i, head in enumerate(heads):
        found = likely(slow(head, STATE).astype(np.float32), ids, params, params.seed, len(PROMPT) + i, 3)
        levels.append([(int(ids[index]), confidence) for index, confidence in found])
    main = tuple(level[0][0] for level in levels)
    every: dict[tuple[int, ...], float] = {}
    going: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for depth, level in enumerate(levels):
        found = {(*path, token): stands * p for path, stands in going for token, p in level}
        found = {path: p for path, p in found.items() if p >= LEAST_SURVIVAL or path == main[: depth + 1]}
        every |= found
        first, *others = sorted(found.items(), key=lambda each: (each[0] != main[: depth + 1], -each[1]))
        going = [first, *others[:2]]
    got = [tuple(draft.tokens[j] for j in path) for path in paths(draft)]
    others = sorted((path for path in every if path != main[: len(path)]), key=lambda path: -every[path])
    assert set(got) == {*(main[:depth] for depth in range(1, 5)), *others[: most - 4]}
    assert len(set(got)) == len(got) <= most
    for path, confidence in zip(got, draft.confidences, strict=True):
        assert confidence == pytest.approx(dict(levels[len(path) - 1])[path[-1]], rel=1e-3)
    if params is GREEDY:
        assert others, "a test of trees needs some"


def test_width_one_is_a_chain():
    heads = random_heads()
    tree, chain = (ready(drafter(heads, width=width)).propose(9) for width in (4, 1))
    assert chain.parents is None
    assert tree.parents is not None
    assert chain.tokens == tuple(tree.tokens[i] for i in main_path(tree))


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
@pytest.mark.parametrize("most", [1, 3, 24])
def test_only_the_heads_that_are_wanted_run(budget, most):
    made = drafter(random_heads(), max_nodes=most)
    ran: list[int] = []
    logits = made.model.logits
    made.model.logits = lambda head, states: ran.append(head) or logits(head, states)  # type: ignore[method-assign]
    session = ready(made)
    asked: list[float] = []
    draft = session.propose(budget, lambda confidence: asked.append(confidence) or True)
    deepest = max(map(len, paths(draft)), default=0)
    assert deepest == len(main_path(draft)) == len(asked) == min(budget, most, 4)
    assert ran == list(range(deepest))
    assert asked == [draft.confidences[i] for i in main_path(draft)]
    assert len(main_path(session.propose(budget, lambda confidence: False))) == min(budget, 1)


def test_states_must_be_those_of_all_tokens_but_the_last():
    made = drafter(random_heads())
    session = made.session(PROMPT, GREEDY)
    assert session.unread == 0
    assert made.hidden_layers == (HEAD_INPUT,)
    assert len(session.propose(4)) == 0
    session.read([torch.zeros(8, HIDDEN)])
    assert len(session.propose(4)) == 0
    session.read([STATE[None]])
    assert session.propose(4) == ready(made).propose(4)
    session.observe([5])
    assert len(session.propose(4)) == 0
    session.read([-STATE[None]])
    assert session.propose(4) == ready(made, state=-STATE).propose(4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_no_number_is_no_draft(kernels):
    heads = random_heads()
    assert len(ready(drafter(heads, kernels=kernels), state=STATE * math.nan).propose(4)) == 0
    heads[2] = MedusaHead(heads[2].blocks, heads[2].output * math.nan)
    assert len(main_path(ready(drafter(heads, kernels=kernels)).propose(4))) == 2


def test_nothing_is_drafted_after_an_end():
    heads = random_heads()
    whole = ready(drafter(heads)).propose(4)
    second = whole.tokens[main_path(whole)[1]]
    for made, params in (
        (drafter(heads), replace(GREEDY, stop_token_ids=(second,))),
        (drafter(heads, eos_ids=[second]), GREEDY),
    ):
        draft = ready(made, params).propose(4)
        assert [draft.tokens[i] for i in main_path(draft)] == [whole.tokens[i] for i in main_path(whole)[:2]]
    # An end among the alternatives ends only the paths that it is on.
    other = next(whole.tokens[path[0]] for path in paths(whole) if len(path) == 1 and path[0] > 0)
    draft = ready(drafter(heads, eos_ids=[other])).propose(4)
    assert other in draft.tokens
    assert len(main_path(draft)) == 4
    assert all(draft.tokens[j] != other for path in paths(draft) for j in path[:-1])
    assert ready(drafter(heads, eos_ids=[second]), replace(GREEDY, ignore_eos=True)).propose(4) == whole


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


def by_heart(target: Target, params: SamplingParams) -> list[MedusaHead]:
    """Heads that know what a target writes: head i makes of the state at t the logits at t + 1 + i."""
    _, states, logits = written(target, params)
    heads = []
    for i in range(4):
        wanted = logits[1 + i :].double()
        known = states[: len(wanted)].double()
        heads.append(MedusaHead((), torch.linalg.lstsq(known, wanted, driver="gelsd").solution.T.float()))
    return heads


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_what_is_learned_by_heart_is_drafted(llama, params):
    """Each head is about the token that the paper says: all drafts stand, in rounds of the engine."""
    made = drafter(by_heart(llama, params))
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
    engine = Engine(llama, byte_tokenizer())
    makes = [drafter(by_heart(llama, GREEDY)), drafter(random_heads(), weights="auto")]
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


# The formats.

CONFIG = {"medusa_num_heads": 4, "medusa_num_layers": 2, "base_model_name_or_path": "org/model"}
OF_VLLM = {"model_type": "medusa", "num_heads": 4, "num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB}


def of_paper(heads: Sequence[MedusaHead], prefix: str = "") -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for h, head in enumerate(heads):
        for n, (weight, bias) in enumerate(head.blocks):
            named[f"{prefix}{h}.{n}.linear.weight"] = weight
            if bias is not None:
                named[f"{prefix}{h}.{n}.linear.bias"] = bias
        named[f"{prefix}{h}.{len(head.blocks)}.weight"] = head.output
    return named


def of_vllm(heads: Sequence[MedusaHead], prefix: str = "") -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for h, head in enumerate(heads):
        for n, (weight, bias) in enumerate(head.blocks):
            named[f"{prefix}blocks.{h}.layers.{n}.weight"] = weight
            if bias is not None:
                named[f"{prefix}blocks.{h}.layers.{n}.bias"] = bias
        named[f"{prefix}lm_heads.{h}.weight"] = head.output
    return named


def loaded(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor], /, **options) -> MedusaDrafter:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
    return load(folder, read_config(folder), parts(), **{"weights": "fp32", "costs": COSTS, **options})


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads.", "heads."])
@pytest.mark.parametrize(("layout", "config"), [(of_paper, CONFIG), (of_vllm, OF_VLLM)])
def test_checkpoints(tmp_path, layout, config, prefix, biases):
    heads = random_heads(4, 2, biases=biases)
    made = loaded(tmp_path, config, layout(heads, prefix))
    assert ready(made).propose(9) == ready(drafter(heads)).propose(9)
    assert made.names is None


def test_more_heads_than_the_configuration_knows_of(tmp_path):
    made = loaded(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, of_paper(random_heads(5)))
    assert len(made.model) == 5
    made = loaded(tmp_path, {"medusa_num_heads": 2}, of_paper(random_heads(2)))
    assert len(made.model) == 2


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_output_for_all_heads(tmp_path, name):
    heads = [replace(head, output=random_heads()[0].output) for head in random_heads(4, 2)]
    named = {key: value for key, value in of_vllm(heads).items() if "lm_heads" not in key}
    made = loaded(tmp_path, {**OF_VLLM, "original_lm_head": True}, {**named, name: heads[0].output})
    assert len({id(output) for _, output in made.model._heads}) == 1
    assert ready(made).propose(9) == ready(drafter(heads)).propose(9)
    with pytest.raises(CorruptModelError, match=r"lm_heads\.[01]\.weight"):
        loaded(tmp_path, OF_VLLM, {**named, name: heads[0].output})


@pytest.mark.parametrize("whole", [False, True])
def test_reduced_vocabularies(tmp_path, whole):
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT]
    heads = random_heads(4, 2)
    few = [replace(head, output=head.output[ids]) for head in heads]
    expected = ready(drafter(few, ids.numpy())).propose(9)
    stored = heads if whole else few
    config = {**OF_VLLM, "truncated_vocab_size": DRAFT}
    made = loaded(tmp_path, config, {**of_vllm(stored), "token_map": ids})
    assert ready(made).propose(9) == expected
    made = loaded(tmp_path, CONFIG, {**of_paper(stored, "medusa_head."), "d2t": ids - torch.arange(DRAFT)})
    assert ready(made).propose(9) == expected
    with pytest.raises(CorruptModelError, match="token_map"):
        loaded(tmp_path, config, {**of_vllm(stored), "token_map": torch.zeros(DRAFT, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"medusa_num_heads": None}, CorruptModelError, "lacks 'medusa_num_heads'"),
        ({"medusa_num_heads": "two"}, CorruptModelError, "medusa_num_heads 'two' must be"),
        ({"medusa_num_heads": 5}, CorruptModelError, r"lack '4\.2\.weight'"),
        ({"medusa_num_layers": 3}, CorruptModelError, r"lack '0\.3\.weight'"),
        ({"hidden_size": 4096}, OptionError, "hidden_size 4096, this one has 64"),
        ({"vocab_size": 32000}, OptionError, "vocab_size 32000, this one has 320"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path, change, error, says):
    with pytest.raises(error, match=says) as caught:
        loaded(tmp_path, {**CONFIG, **change}, of_paper(random_heads(4, 2)))
    assert "\n" not in str(caught.value)


def test_other_bad_input(tmp_path):
    weights = of_paper(random_heads(4, 2))
    with pytest.raises(CorruptModelError, match=r"1\.0\.linear\.weight"):
        loaded(tmp_path, CONFIG, {name: each for name, each in weights.items() if name != "1.0.linear.weight"})
    with pytest.raises(CorruptModelError, match=r"1\.0\.linear\.bias.*shape"):
        loaded(tmp_path, CONFIG, {**weights, "1.0.linear.bias": torch.zeros(3)})
    with pytest.raises(OptionError, match="hidden_size 32, this one has 64"):
        loaded(tmp_path, CONFIG, {**weights, "0.2.weight": torch.zeros(VOCAB, 32)})
    with pytest.raises(CorruptModelError, match=r"0\.2\.weight.*shape"):
        loaded(tmp_path, CONFIG, {**weights, "0.2.weight": torch.zeros(VOCAB - 1, HIDDEN)})
    for options in ({"width": 0}, {"max_nodes": 0}, {"weights": "int4"}, {"kernels": "abacus"}):
        with pytest.raises(OptionError, match=str(next(iter(options)))):
            loaded(tmp_path, CONFIG, weights, **options)
    for wrong in (torch.zeros(()), torch.zeros(DRAFT), torch.zeros(DRAFT, dtype=torch.bool)):
        with pytest.raises(CorruptModelError, match="'token_map' is"):
            loaded(tmp_path, CONFIG, {**weights, "token_map": wrong})
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="pickles"):
        load(tmp_path, CONFIG, parts())


def test_costs_are_measured():
    costs = drafter(random_heads(), costs=None).costs
    assert isinstance(costs, ModelCosts)
    assert 0 < costs.seconds(1, 100) < 1
