"""From a target and its responses to a drafter in a folder."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sakiyomi.costs import ModelCosts
from sakiyomi.drafters import mlp, table
from sakiyomi.drafters.trained import load_drafter, save_block, save_eagle3
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import HEAD_INPUT, Costs
from sakiyomi.sampling import SamplingParams
from sakiyomi.train.card import Card, Projection
from sakiyomi.train.data import (
    DraftVocabulary,
    Progress,
    Response,
    cut_loops,
    describe,
    draft_vocabulary,
    silent,
    split,
)
from sakiyomi.train.features import Features, collect, digest, make_batch, plan
from sakiyomi.train.files import write_text
from sakiyomi.train.networks import Block, DraftNetwork, Eagle3, Mlp
from sakiyomi.train.target import Teacher
from sakiyomi.train.trainer import MICRO_BATCH, Score, Tally, TrainOptions, train

KINDS = ("table", "mlp", "eagle3", "block")
CONTEXT = 256  # tokens that a sequence holds where its speed-up is projected


@dataclass(frozen=True)
class DrafterOptions:
    """What to train. Each kind has its own: what doesn't concern it is not looked at.

    ``draft_vocabulary``: how many tokens it can propose. ``layers``: whose states it reads; None is EAGLE-3's choice.
    ``unroll``: steps of a draft that are trained; ``decay``: how much less each counts than the one before it;
    ``stray``: the share of drafts that are gone on with after a miss. ``inner``: the width of an MLP speculator,
    ``n_predict``: its steps. ``block_size``: tokens of a block, ``rank``: of its Markov head. ``order``: of a table's
    n-grams.
    """

    draft_vocabulary: int = 8192
    layers: tuple[int, ...] | None = None
    norm_before_residual: bool = True
    unroll: int = 4
    decay: float = 0.8
    stray: float = 0.15
    inner: int = 768
    n_predict: int = 4
    block_size: int = 6
    rank: int = 64
    order: int = 5


def train_drafter(
    kind: str,
    teacher: Teacher,
    responses: Sequence[Response],
    folder: Path,
    options: TrainOptions,
    drafter: DrafterOptions = DrafterOptions(),
    *,
    work: Path | None = None,
    disk_gb: float = 20.0,
    costs: ModelCosts | None = None,
    command: str = "",
    progress: Progress = silent,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Card:
    """Train a drafter on a target's responses, write it to a folder with its card, and return the card.

    ``work``: where states of the target and of the training are kept, so that an interrupted run goes on; by default
    the folder's ``training``, which may be deleted then. ``disk_gb``: the most that the target's states may take there.
    ``costs``: the target's, for a projected speed-up. Raises OptionError.
    """
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    work = work or folder / "training"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if kind != "table":
            work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{error.filename}: can't be made ({error.strerror}); name another folder") from None
    began = time.monotonic()
    kept, cut = cut_loops(responses)
    parts = split(kept, options.seed)
    data = {**describe(parts.train), "cut_as_loops": cut, "held_out": describe(parts.held_out)}
    facts: dict[str, Any] = {}
    if kind == "table":
        score = _count(teacher, parts.train, parts.held_out, folder, drafter, options.depth)
        why, steps, history = "counted", 0, []
    else:
        vocabulary = draft_vocabulary(parts.train, drafter.draft_vocabulary, teacher.parts.vocab_size)
        layers = _layers(kind, teacher, drafter)
        network = make_network(kind, teacher, vocabulary, layers, drafter, options)
        key = _key(kind, teacher, layers, drafter, options)
        features, held_out = _collect(teacher, parts.train, parts.held_out, layers, work, disk_gb, progress)
        outcome = train(
            network,
            features,
            held_out,
            options,
            work / f"{kind}.safetensors",
            key=f"{key} {digest(parts.train)}",
            progress=progress,
            report=report,
        )
        temperatures = calibrate(network, held_out, options) if isinstance(network, Block) else None
        _save(kind, teacher, network, vocabulary, layers, folder, drafter, temperatures)
        score, why = outcome.score, outcome.why
        steps, history = outcome.progressed.step, outcome.progressed.history
        data["left_out_for_disk"] = features.left_out
        facts = {
            "draft_vocabulary": len(vocabulary),
            "coverage": vocabulary.coverage,
            "layers": [layer for layer in layers if layer != HEAD_INPUT],
            "parameters": sum(p.numel() for p in network.parameters()),
            "minutes": outcome.progressed.seconds / 60,
            "positions": outcome.progressed.positions,
        }
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    card = Card(
        kind=kind,
        model=teacher.name,
        ended=why,
        seconds=time.monotonic() - began,
        steps=steps,
        megabytes=size / 1e6,
        data=data,
        facts=facts,
        score=score,
        projection=None if costs is None else project(kind, score, costs, _draft_costs(folder, teacher)),
        command=command,
        history=history,
    )
    card.write(folder)
    return card


def make_network(
    kind: str,
    teacher: Teacher,
    vocabulary: DraftVocabulary,
    layers: tuple[int, ...],
    drafter: DrafterOptions,
    options: TrainOptions,
) -> DraftNetwork:
    """Return a network of a kind, begun from what the target has."""
    parts = teacher.parts
    generator = torch.Generator().manual_seed(options.seed)
    common: dict[str, Any] = {
        "embedding": parts.embedding.detach().to("cpu", options.dtype),
        "target_head": parts.head[vocabulary.ids.to(parts.head.device)].detach().to("cpu", options.dtype),
        "to_draft": vocabulary.to_draft,
        "decay": drafter.decay,
        "stray": drafter.stray,
    }
    states = len(layers) - 1
    norm = None if parts.norm is None else parts.norm.detach().float().cpu()
    network: DraftNetwork
    if kind == "eagle3":
        network = Eagle3(
            teacher.shape(),
            states,
            norm_before_residual=drafter.norm_before_residual,
            steps=drafter.unroll,
            **common,
        )
        network.start(teacher.layer, norm, generator)
    elif kind == "mlp":
        network = Mlp(parts.hidden_size, drafter.inner, drafter.n_predict, steps=drafter.n_predict, **common)
        network.start(generator)
    else:
        block_size = drafter.block_size
        network = Block(teacher.shape(), states, block_size=block_size, rank=drafter.rank, steps=block_size, **common)
        network.start(teacher.layer, norm, generator)
    return network.to(options.device)


def _layers(kind: str, teacher: Teacher, drafter: DrafterOptions) -> tuple[int, ...]:
    """Return the layers whose states are collected; the last ones say what the target's own distribution is."""
    if kind == "mlp":
        return (HEAD_INPUT,)
    layers = drafter.layers or teacher.default_layers()
    count = teacher.parts.layers
    if any(not 0 <= layer <= count for layer in layers) or len(set(layers)) < len(layers):
        raise OptionError(f"layers={','.join(map(str, layers))}: must be different numbers in 0..{count}")
    return (*layers, HEAD_INPUT)


def _collect(
    teacher: Teacher,
    train: Sequence[Response],
    held_out: Sequence[Response],
    layers: tuple[int, ...],
    work: Path,
    disk_gb: float,
    progress: Progress,
) -> tuple[Features, Features]:
    """Return the states to train on and those to replay: of greedy responses, at most a tenth of the room."""
    name = "-".join("head" if layer == HEAD_INPUT else str(layer) for layer in layers)
    key = f"{teacher.name} {teacher.parts.tokenizer}"
    hidden = teacher.parts.hidden_size
    greedy = [response for response in held_out if response.temperature == 0]
    features = []
    for part, responses, share in (("held-out", greedy, 0.1), ("states", train, 0.9)):
        features.append(
            collect(
                teacher.target,
                responses,
                layers,
                hidden,
                work / f"{part}-{name}.bin",
                max_bytes=share * disk_gb * 1e9,
                key=key,
                progress=progress,
            )
        )
    if features[1].left_out:
        warnings.warn(
            f"the states of {features[1].left_out} of {len(train)} responses don't fit into --disk {disk_gb:g} and are "
            "left out",
            RuntimeWarning,
            stacklevel=3,
        )
    return features[1], features[0]


def calibrate(network: Block, features: Features, options: TrainOptions) -> list[float]:
    """Return the temperature for each position of a block by which its confidences come true on held-out text."""
    scores: list[list[torch.Tensor]] = [[] for _ in range(network.block_size)]
    hits: list[list[torch.Tensor]] = [[] for _ in range(network.block_size)]
    examples = [example for example in features.examples if example.positions]
    for group in plan(examples, MICRO_BATCH, None):
        batch = make_batch(features, group, torch.device(options.device))
        hit, score = (x.cpu() for x in network.replay(batch, network.block_size))
        before = torch.cat([torch.ones_like(hit[:, :, :1]), hit[:, :, :-1]], 2).cumprod(2).bool()
        row = torch.arange(hit.shape[1])[None, :, None] + torch.arange(network.block_size)
        reached = before & (row < batch.count.cpu()[:, None, None])
        for d in range(network.block_size):
            scores[d].append(score[:, :, d][reached[:, :, d]])
            hits[d].append(hit[:, :, d][reached[:, :, d]])
    grid = torch.tensor([0.5 * 1.1**i for i in range(24)])
    found: list[float] = []
    for of_scores, of_hits in zip(scores, hits, strict=True):
        score, hit = torch.cat(of_scores), torch.cat(of_hits).float()
        if len(hit) < 30:  # too few to say anything: like the position before it
            found.append(found[-1] if found else 1.0)
            continue
        losses = [torch.nn.functional.binary_cross_entropy_with_logits(score / t, hit) for t in grid]
        found.append(float(grid[int(torch.stack(losses).argmin())]))
    return found


def _save(
    kind: str,
    teacher: Teacher,
    network: DraftNetwork,
    vocabulary: DraftVocabulary,
    layers: tuple[int, ...],
    folder: Path,
    drafter: DrafterOptions,
    temperatures: list[float] | None,
) -> None:
    """Write the drafter in its format, in bfloat16."""
    states = [layer for layer in layers if layer != HEAD_INPUT]
    if isinstance(network, Mlp):
        config = mlp.MlpConfig(network.hidden, network.inner, teacher.parts.vocab_size, network.n_predict, True)
        d2t = vocabulary.ids - torch.arange(len(vocabulary))
        facts = {"base_model_name_or_path": teacher.name}
        mlp.save_mlp(folder, config, _stored(network.tensors()), d2t=d2t, facts=facts)
    elif isinstance(network, Block):
        save_block(
            folder,
            _stored(network.tensors()),
            layer_config=teacher.layer_config,
            verifier=teacher.name,
            hidden_layers=states,
            block_size=network.block_size,
            draft_ids=vocabulary.ids.tolist(),
            confidence_temperatures=temperatures,
        )
    else:
        tensors = {**network.state_dict(), "lm_head.weight": network.target_head}
        save_eagle3(
            folder,
            _stored(tensors),
            layer_config=teacher.layer_config,
            verifier=teacher.name,
            hidden_layers=states,
            draft_ids=vocabulary.ids.tolist(),
            norm_before_residual=drafter.norm_before_residual,
        )


def _stored(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _count(
    teacher: Teacher,
    train: Sequence[Response],
    held_out: Sequence[Response],
    folder: Path,
    drafter: DrafterOptions,
    depth: int,
) -> Score:
    """Write a table counted from the responses; return what it does on those held out."""
    built = table.build_table(
        [response.prompt + response.tokens for response in train],
        [len(response.prompt) for response in train],
        vocab_size=teacher.parts.vocab_size,
        order=drafter.order,
    )
    built.save(folder / "table.safetensors", teacher.parts.tokenizer)
    config = {"model_type": "sakiyomi-table", "verifier": teacher.name}
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
    made = table.TableDrafter(built)
    tally = Tally(depth)
    for response in held_out:
        if response.temperature == 0:
            tally.add(response.category, _replay(made, response, depth))
    return tally.score()


def _replay(drafter: table.TableDrafter, response: Response, depth: int) -> list[int]:
    """Return how many draft tokens in a row stand after each token of a response but the last."""
    session = drafter.session([*response.prompt, response.tokens[0]], SamplingParams())
    found = []
    for at in range(1, len(response.tokens)):
        draft = session.propose(depth)
        stood, parent = 0, -1
        parents = draft.parents or range(-1, len(draft) - 1)
        for token in response.tokens[at : at + depth]:
            child = next((i for i, p in enumerate(parents) if p == parent and draft.tokens[i] == token), None)
            if child is None:
                break
            stood, parent = stood + 1, child
        found.append(stood)
        session.observe([response.tokens[at]])
    return found


def _draft_costs(folder: Path, teacher: Teacher) -> Costs | None:
    """Return what the drafter in a folder costs here, as it will run."""
    return load_drafter(folder, teacher.parts).costs


def project(kind: str, score: Score, costs: ModelCosts, draft: Costs | None) -> Projection:
    """Return how fast drafts of the best length are, from what forwards cost: tokens * T(1) / (T(k + 1) + draft(k))."""
    alone = costs.seconds(1, CONTEXT)
    best = Projection(0, 1.0, alone * 1e3, 0.0)
    for k, tokens in enumerate(score.tokens_per_call, start=1):
        if draft is None:
            spent = 0.0
        elif kind == "block":
            spent = draft.seconds(k, CONTEXT)
        else:
            spent = k * draft.seconds(1, CONTEXT)
        speed_up = tokens * alone / (costs.seconds(k + 1, CONTEXT) + spent)
        if speed_up > best.speed_up:
            best = Projection(k, speed_up, alone * 1e3, spent * 1e3)
    return best


def _key(kind: str, teacher: Teacher, layers: tuple[int, ...], drafter: DrafterOptions, options: TrainOptions) -> str:
    """Return what has to be the same for a training to go on: all but for how long."""
    told = {
        "drafter": asdict(drafter),
        "options": {**asdict(options), "dtype": str(options.dtype)},
        "layer": dict(teacher.layer_config),
    }
    for name in ("minutes", "steps", "device", "evaluations", "patience", "held_out_positions", "depth"):
        del told["options"][name]
    text = json.dumps([kind, teacher.name, list(layers), told], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
