"""From a target and its responses to a drafter in a folder."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sakiyomi.costs import ModelCosts
from sakiyomi.drafters import mlp, table
from sakiyomi.drafters.trained import load_drafter, save_block, save_eagle3
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import HEAD_INPUT, Costs
from sakiyomi.sampling import SamplingParams
from sakiyomi.train.card import Card, Projection, write_text
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
from sakiyomi.train.networks import Block, DraftNetwork, Eagle3, Mlp
from sakiyomi.train.target import Teacher
from sakiyomi.train.trainer import MICRO_BATCH, Score, Tally, TrainOptions, interruptions, train

KINDS = ("table", "mlp", "eagle3", "block")
CONTEXT = 256  # tokens that a sequence holds where its speed-up is projected


@dataclass(frozen=True)
class DrafterOptions:
    """What to train; of these each kind has its own.

    ``draft_vocabulary``: how many tokens it can propose. ``layers``: whose states it reads; None is EAGLE-3's choice.
    ``unroll``: steps of a draft that are trained; ``decay``: how much less each counts than the one before it;
    ``stray``: the share of drafts that are gone on with after a miss. ``inner``: the width of an MLP speculator,
    ``n_predict``: its steps. ``block_size``: tokens of a block, ``rank``: of its Markov head. ``order``: of a table's
    n-grams; ``megabytes``: its most, None for 8 bytes for each token of a response. ``own_head``: write the head too,
    which is the target's: larger, and what vLLM needs.
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
    own_head: bool = False
    order: int = 5
    megabytes: float | None = None


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
    check_output(folder, kind, work=work)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if kind != "table":
            work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{error.filename}: can't be made ({error.strerror}); name another folder") from None
    began = time.monotonic()
    parts = split(responses, options.seed)
    learned, cut = cut_loops(parts.train)
    replayed, _ = cut_loops(each for each in parts.held_out if each.temperature == 0)
    if not learned or not replayed:
        raise OptionError(
            f"--prompts: {len(learned)} responses to learn from and {len(replayed)} greedy ones to measure with; "
            "those of one or two tokens don't count; give more prompts"
        )
    states = None
    if kind != "table":
        layers = layers_read(kind, teacher, drafter)
        states, held_out = _collect(teacher, learned, replayed, layers, work, disk_gb, progress)
        learned, replayed = learned[: len(states.examples)], replayed[: len(held_out.examples)]
    data = {**describe(learned), "cut_as_loops": cut, "held_out": describe(replayed)}
    facts: dict[str, Any] = {}
    with interruptions() as interrupted:
        if states is None:
            score = _count(teacher, learned, replayed, folder, drafter, options.depth)
            why, steps, history = "counted", 0, []
        else:
            data["left_out_for_disk"] = states.left_out
            vocabulary = draft_vocabulary(learned, drafter.draft_vocabulary, teacher.parts.vocab_size)
            network = make_network(
                kind, teacher, vocabulary, layers, drafter, options, _scale(states) if len(layers) > 1 else 1.0
            )
            options = replace(options, depth=min(options.depth, network.deepest))

            def keep() -> None:
                temperatures = calibrate(network, held_out, options) if isinstance(network, Block) else None
                _begin_card(folder, kind, teacher)
                _save(teacher, network, vocabulary, layers, folder, drafter, temperatures)

            outcome = train(
                network,
                states,
                held_out,
                options,
                work / f"{kind}.safetensors",
                key=f"{_key(kind, teacher, layers, drafter, options)} {digest(learned)}",
                interrupted=interrupted,
                keep=keep,
                progress=progress,
                report=report,
            )
            score, why = outcome.score, outcome.why
            steps, history = outcome.progressed.step, outcome.progressed.history
            facts = {
                "draft_vocabulary": len(vocabulary),
                "coverage": vocabulary.coverage,
                "layers": [layer for layer in layers if layer != HEAD_INPUT],
                "parameters": sum(p.numel() for p in network.parameters()),
                "minutes": outcome.progressed.seconds / 60,
                "positions": outcome.progressed.positions,
            }
        weights = folder / ("table.safetensors" if kind == "table" else "model.safetensors")
        card = Card(
            kind=kind,
            model=teacher.name,
            ended=why,
            seconds=time.monotonic() - began,
            steps=steps,
            megabytes=weights.stat().st_size / 1e6,
            data=data,
            facts=facts,
            score=score,
            projection=None if costs is None else project(kind, score, costs, _draft_costs(folder, teacher)),
            command=command,
            history=history,
        )
        card.write(folder)
    return card


def check_output(folder: Path, kind: str, *, model: Path | None = None, work: Path | None = None) -> None:
    """Raise OptionError where a folder holds something else than a drafter of this kind: it would be overwritten.

    ``model``: the target's folder; ``work``: where states are kept, which may be in the folder.
    """
    if model is not None and folder.resolve() == model.resolve():
        raise OptionError(f"--output {folder}: is the model itself; name another folder")
    if work is not None and folder.resolve() == work.resolve():
        raise OptionError(f"--work {work}: is the folder of --output; name another one")
    if not folder.exists():
        return
    try:
        found = json.loads((folder / "card.json").read_text("utf-8"))["kind"]
    except (OSError, ValueError, TypeError, KeyError):
        own = {(folder / "training").resolve(), work and work.resolve()}
        if not folder.is_dir() or any(each.resolve() not in own for each in folder.iterdir()):
            raise OptionError(f"--output {folder}: is there, and is no drafter's folder; name a new one") from None
        return
    if found != kind:
        raise OptionError(f"--output {folder}: holds a drafter of kind {found}; name another folder for this one")


def _begin_card(folder: Path, kind: str, teacher: Teacher) -> None:
    """Say what the folder is before there are weights: an older card would be of others."""
    write_text(folder / "card.json", json.dumps({"kind": kind, "model": teacher.name, "ended": "not yet"}) + "\n")


def make_network(
    kind: str,
    teacher: Teacher,
    vocabulary: DraftVocabulary,
    layers: tuple[int, ...],
    drafter: DrafterOptions,
    options: TrainOptions,
    scale: float = 1.0,
) -> DraftNetwork:
    """Return a network of a kind, begun from what the target has. ``scale``: how large the last states read are."""
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
        network.start(teacher.layer, norm, generator, scale)
    elif kind == "mlp":
        network = Mlp(parts.hidden_size, drafter.inner, drafter.n_predict, steps=drafter.n_predict, **common)
        network.start(generator)
    else:
        block_size = drafter.block_size
        network = Block(teacher.shape(), states, block_size=block_size, rank=drafter.rank, steps=block_size, **common)
        network.start(teacher.layer, norm, generator)
    return network.to(options.device)


def _scale(features: Features) -> float:
    """Return the root mean square of the last states read, in most tokens: in a few it is a hundred times as large."""
    some = features.values[:4096, -2].float()
    return float(some.square().mean(1).sqrt().median())


def layers_read(kind: str, teacher: Teacher, drafter: DrafterOptions) -> tuple[int, ...]:
    """Return the layers whose states are collected; the last ones say what the target's own distribution is.

    Raises OptionError for layers that the target lacks.
    """
    if kind == "mlp":
        return (HEAD_INPUT,)
    layers = drafter.layers or teacher.default_layers()
    count = teacher.parts.layers
    if any(not 0 <= layer <= count for layer in layers) or len(set(layers)) < len(layers):
        raise OptionError(f"--layers {','.join(map(str, layers))}: must be different numbers in 0..{count}")
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
    """Return the states to train on and those to replay, which get a tenth of the room."""
    name = "-".join("head" if layer == HEAD_INPUT else str(layer) for layer in layers)
    key = f"{teacher.name} {teacher.fingerprint} {teacher.parts.tokenizer}"
    hidden = teacher.parts.hidden_size
    features = []
    for part, responses, share in (("held-out", held_out, 0.1), ("states", train, 0.9)):
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
    for group in plan(features.examples, MICRO_BATCH, None):
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
        tensors = network.tensors()
        if drafter.own_head:
            tensors["lm_head.weight"] = network.target_head
        save_block(
            folder,
            _stored(tensors),
            layer_config=teacher.layer_config,
            verifier=teacher.name,
            hidden_layers=states,
            block_size=network.block_size,
            draft_ids=vocabulary.ids.tolist(),
            confidence_temperatures=temperatures,
        )
    else:
        tensors = network.state_dict()
        if drafter.own_head:
            tensors["lm_head.weight"] = network.target_head
        save_eagle3(
            folder,
            _stored(tensors),
            layer_config=teacher.layer_config,
            verifier=teacher.name,
            verifier_architectures=teacher.architectures,
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
    """Write a table counted from the responses; return what it does on those held out, which are greedy."""
    built = table.build_table(
        [response.prompt + response.tokens for response in train],
        [len(response.prompt) for response in train],
        vocab_size=teacher.parts.vocab_size,
        order=drafter.order,
        max_bytes=None if drafter.megabytes is None else int(1e6 * drafter.megabytes),
    )
    _begin_card(folder, "table", teacher)
    built.save(folder / "table.safetensors", teacher.parts.tokenizer)
    config = {"model_type": "sakiyomi-table", "verifier": teacher.name}
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
    made = table.TableDrafter(built)
    tally = Tally(depth)
    for response in held_out:
        tally.add(response.category, _replay(made, response, depth))
    return tally.score()


def _replay(drafter: table.TableDrafter, response: Response, depth: int) -> list[int]:
    """Return how many draft tokens in a row stand after each token of a response but the last.

    Of a tree only the likeliest token behind each counts: the other kinds are measured with such chains, and the
    projected speed-up is of their rows.
    """
    session = drafter.session([*response.prompt, response.tokens[0]], SamplingParams())
    found = []
    for at in range(1, len(response.tokens)):
        draft = session.propose(depth)
        stood, parent = 0, -1
        parents = draft.parents or range(-1, len(draft) - 1)
        for token in response.tokens[at : at + depth]:
            child = next((i for i, p in enumerate(parents) if p == parent), None)  # the likeliest comes first
            if child is None or draft.tokens[child] != token:
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
    told: dict[str, Any] = {
        "drafter": asdict(drafter),
        "options": {**asdict(options), "dtype": str(options.dtype)},
        "layer": dict(teacher.layer_config),
        "target": teacher.fingerprint,
    }
    for name in ("minutes", "steps", "device", "evaluations", "patience", "held_out_positions", "depth"):
        del told["options"][name]
    text = json.dumps([kind, teacher.name, list(layers), told], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
