"""The training loop: bounded in time, resumable, with evaluation by replay as it goes."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sakiyomi.errors import OptionError
from sakiyomi.files import replace_file
from sakiyomi.train.data import Progress, silent
from sakiyomi.train.features import Example, Features, make_batch, plan
from sakiyomi.train.networks import DraftNetwork

STATE_SECONDS = 120.0
MICRO_BATCH = 2048  # positions computed at a time; more take more memory and no less time


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    ``minutes``: for how long; ``steps``: how many steps of the optimiser, in place of that. ``batch``: the most
    positions of a step. ``learning_rate``: the highest, after the share ``warm_up`` of the time; from there it falls
    along a cosine. ``average``: the decay of the moving average of parameters, which is what is evaluated and saved; 0
    for none. ``evaluations``: how many times the held-out texts are replayed; after ``patience`` of them without gain
    it ends. ``depth``: of the drafts that are replayed. ``held_out_positions``: that are replayed as training goes.
    """

    minutes: float = 30.0
    steps: int | None = None
    batch: int = 1024
    learning_rate: float = 1e-3
    warm_up: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    average: float = 0.998
    evaluations: int = 20
    patience: int = 6
    depth: int = 5
    held_out_positions: int = 12_000
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"


@dataclass(frozen=True)
class Score:
    """What a drafter does on held-out text, by replay.

    ``conditional``: of the positions where the draft stood so far, the share where token d stands too. For drafts of 1,
    2, ... tokens, ``tokens_per_call``: tokens per target call; ``by_category``: the same.
    """

    conditional: tuple[float, ...]
    tokens_per_call: tuple[float, ...]
    by_category: Mapping[str, tuple[float, ...]]
    positions: int

    @property
    def best(self) -> float:
        """Tokens per target call with the longest drafts."""
        return self.tokens_per_call[-1]


@dataclass
class Progressed:
    """How far training is. ``epoch``, ``group``: where in the examples; ``evaluated``: evaluations due until now."""

    step: int = 0
    epoch: int = 0
    group: int = 0
    seconds: float = 0.0
    positions: int = 0
    best: float = 0.0
    worse: int = 0
    evaluated: int = 0
    checked: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How training ended. ``why``: "time is up", "no better", "interrupted", or what went wrong."""

    score: Score
    why: str
    progressed: Progressed


class Tally:
    """Counts which draft tokens stood, text by text, into a :class:`Score`. ``depth``: of the drafts."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._reached, self._stood = [0] * depth, [0] * depth
        self._calls: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}

    def add(self, category: str, accepted: Sequence[int]) -> None:
        """Count a text; ``accepted``: how many draft tokens in a row stand from each of its positions on."""
        count = len(accepted)
        calls = self._calls.setdefault(category, [0] * self._depth)
        tokens = self._tokens.setdefault(category, [0] * self._depth)
        for position, stood in enumerate(accepted):
            for d in range(min(self._depth, count - position)):
                if stood < d:
                    break
                self._reached[d] += 1
                self._stood[d] += stood > d
        for k in range(1, self._depth + 1):
            at = 0
            while at < count:
                calls[k - 1] += 1
                at += min(accepted[at], k) + 1
            tokens[k - 1] += min(at, count)  # where all stands up to the end, the target adds nothing

    def score(self) -> Score:
        """Return what was counted."""

        def ratio(names: Sequence[str]) -> tuple[float, ...]:
            return tuple(
                sum(self._tokens[n][k] for n in names) / max(1, sum(self._calls[n][k] for n in names))
                for k in range(self._depth)
            )

        return Score(
            tuple(s / r if r else 0.0 for s, r in zip(self._stood, self._reached, strict=True)),
            ratio(list(self._calls)),
            {name: ratio([name]) for name in sorted(self._calls)},
            self._reached[0],
        )


def evaluate(network: DraftNetwork, features: Features, examples: Sequence[Example], options: TrainOptions) -> Score:
    """Replay a drafter along texts: how many of its draft tokens would have stood, from every position."""
    tally = Tally(options.depth)
    for group in plan(examples, MICRO_BATCH, None):
        batch = make_batch(features, group, torch.device(options.device))
        with torch.no_grad(), _autocast(options):
            hits, _ = network.replay(batch, options.depth)
        accepted = hits.to(torch.int8).cumprod(2).sum(2).tolist()
        for example, row in zip(group, accepted, strict=True):
            tally.add(example.category, row[: example.positions])
    return tally.score()


def train(
    network: DraftNetwork,
    features: Features,
    held_out: Features,
    options: TrainOptions,
    state: Path,
    *,
    key: str = "",
    interrupted: Callable[[], bool] = lambda: False,
    keep: Callable[[], None] = lambda: None,
    progress: Progress = silent,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Outcome:
    """Train a network until the time is over, it gets no better, or is ``interrupted``, which is asked after each step.

    It has its best parameters then: ``keep`` is called before these are replayed along all held-out texts, which takes
    its time. ``state``: a file that is written about every two minutes and in the end, and gone on with where ``key``
    is the same. ``report`` is given each evaluation. Warns of a loss that isn't a number, where it ends too, and of a
    state that can't be read or written.
    """
    training = _Training(network, features, held_out, options, state, key, interrupted, progress, report)
    why = training.run()
    keep()
    progress(0, 1, "measuring")
    score = evaluate(network, held_out, held_out.examples, options)
    return Outcome(score, why, training.progressed)


class _Training:
    def __init__(
        self,
        network: DraftNetwork,
        features: Features,
        held_out: Features,
        options: TrainOptions,
        state: Path,
        key: str,
        interrupted: Callable[[], bool],
        progress: Progress,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._network, self._features, self._held, self._options = network, features, held_out, options
        self._state, self._key = state, key
        self._interrupted, self._progress, self._report = interrupted, progress, report
        self._parameters = dict(network.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._best = {name: p.detach().clone() for name, p in self._parameters.items()}
        matrices = [p for p in self._parameters.values() if p.dim() > 1]
        vectors = [p for p in self._parameters.values() if p.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(
            groups,
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.progressed = Progressed()
        self._last: dict[str, float] = {}
        self._warned = False
        self._examples = [example for example in features.examples if example.positions]

    def run(self) -> str:
        """Train and return why it ended; the network has its best parameters then."""
        self._load()
        why = "time is up"
        saved = clock = time.monotonic()
        for groups in self._groups():
            if not self._step(groups):
                why = f"the loss of step {self.progressed.step + 1} is not a number"
                warnings.warn(
                    f"{why}: training ends here, with the best parameters before; a lower learning rate may help",
                    RuntimeWarning,
                    stacklevel=3,
                )
                break
            done = self._share()
            if due := done * self._options.evaluations >= self.progressed.evaluated + 1:
                self._evaluate()
                self.progressed.evaluated = int(done * self._options.evaluations)
            self.progressed.seconds += time.monotonic() - clock
            clock = time.monotonic()
            self._show()
            if self._interrupted():
                why = "interrupted"
                break
            if due and self.progressed.worse >= self._options.patience:
                why = "no better"
                break
            if clock - saved > STATE_SECONDS:
                self._save()
                saved = clock
        self._save()
        if self.progressed.checked < self.progressed.step:
            self._evaluate()
            self._save()
        self._put(self._best)
        return why

    def _share(self) -> float:
        """Return how much of the time or the steps is used."""
        if self._options.steps is not None:
            return self.progressed.step / self._options.steps
        return self.progressed.seconds / (60 * self._options.minutes)

    def _groups(self) -> Iterator[list[list[Example]]]:
        """Yield the examples of each step, as groups that are computed at a time, from where training is."""
        options, at = self._options, self.progressed
        size = options.batch // -(-options.batch // MICRO_BATCH)
        while True:
            groups = plan(self._examples, size, options.seed * 7919 + at.epoch)
            while at.group < len(groups):
                if self._share() >= 1:
                    return
                step: list[list[Example]] = []
                held = 0
                while at.group < len(groups):
                    held += sum(example.positions for example in groups[at.group])
                    if step and held > options.batch:
                        break
                    step.append(groups[at.group])
                    at.group += 1
                yield step
            at.epoch += 1
            at.group = 0

    def _step(self, groups: list[list[Example]]) -> bool:
        """Take a step; False where the loss isn't a number: then nothing was changed."""
        options, at = self._options, self.progressed
        positions = sum(example.positions for group in groups for example in group)
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + at.step)
        total = hit = 0.0
        for group in groups:
            batch = make_batch(self._features, group, torch.device(options.device))
            with _autocast(options):
                loss = self._network.loss(batch, generator)
            share = batch.positions / positions
            (loss.value * share).backward()  # type: ignore[no-untyped-call]
            total += float(loss.value.detach()) * share
            hit += loss.hit * share
        norm = float(torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), options.clip))
        if not math.isfinite(total) or not math.isfinite(norm):
            self._optimiser.zero_grad(set_to_none=True)
            return False
        done = min(1.0, self._share())
        warm = min(1.0, (done + 1e-3) / options.warm_up) if options.warm_up else 1.0
        for each in self._optimiser.param_groups:
            each["lr"] = options.learning_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        at.step += 1
        at.positions += positions
        decay = min(options.average, at.step / (10 + at.step))  # at first there is little to remember
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.values()), list(self._parameters.values()), 1 - decay)
        self._last = {"loss": total, "hit": hit}
        return True

    def _show(self) -> None:
        what = f"training: loss {self._last['loss']:.2f}, first token {self._last['hit']:.0%}"
        if self.progressed.history:
            what += f", held out {self.progressed.history[-1]['tokens_per_call']:.3f} tokens per call"
        self._progress(int(1000 * min(1.0, self._share())), 1000, what)

    def _evaluate(self) -> None:
        """Replay held-out texts with the average, and keep it where it is the best so far."""
        at = self.progressed
        at.checked = at.step
        now = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._put(self._average)
        examples, positions = [], 0
        for example in self._held.examples:
            if positions < self._options.held_out_positions:
                examples.append(example)
                positions += example.positions
        score = evaluate(self._network, self._held, examples, self._options)
        self._put(now)
        if score.best > at.best:
            at.best, at.worse = score.best, 0
            self._best = {name: tensor.clone() for name, tensor in self._average.items()}
        else:
            at.worse += 1
        record = {
            "step": at.step,
            "epoch": at.epoch,
            "minutes": at.seconds / 60,
            "positions": at.positions,
            **self._last,
            "tokens_per_call": score.best,
            "conditional": list(score.conditional),
        }
        at.history.append(record)
        self._report(record)

    @torch.no_grad()
    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def _save(self) -> None:
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[f"now.{name}"] = parameter.detach()
            tensors[f"average.{name}"] = self._average[name]
            tensors[f"best.{name}"] = self._best[name]
            for key, value in self._optimiser.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        facts = {"progress": json.dumps(asdict(self.progressed)), "key": self._key}
        try:
            replace_file(self._state, lambda temporary: save_file(tensors, temporary, facts))
        except OptionError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{error}; training goes on, but would begin anew after an interruption; free some of the disk",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _load(self) -> None:
        """Go on where the state file is, if it is of the same training."""
        from safetensors import SafetensorError, safe_open

        if not self._state.exists():
            return
        why = "of a training with other data or options"
        try:
            with safe_open(self._state, framework="pt", device=self._options.device) as file:
                facts = file.metadata() or {}
                if facts.get("key") == self._key:
                    progressed = Progressed(**json.loads(facts["progress"]))
                    self._take({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
                    self.progressed, why = progressed, ""
                    # The budget may be another one now.
                    due = int(self._share() * self._options.evaluations)
                    self.progressed.evaluated = min(self.progressed.evaluated, due)
        except (OSError, SafetensorError, ValueError, TypeError, KeyError):
            why = "cut off, or of another version"
        if why:
            warnings.warn(f"{self._state} is {why}: training begins anew", RuntimeWarning, stacklevel=4)

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with these parameters, averages and state of the optimiser. Raises KeyError before it changes any."""
        now, average, best = (
            {name: tensors[f"{part}.{name}"] for name in self._parameters} for part in ("now", "average", "best")
        )
        optimiser: dict[torch.Tensor, Any] = {
            parameter: {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for name, parameter in self._parameters.items()
            if f"exp_avg.{name}" in tensors
        }
        self._put(now)
        self._average, self._best = average, best
        self._optimiser.state.update(optimiser)


def _autocast(options: TrainOptions) -> torch.autocast:
    return torch.autocast(torch.device(options.device).type, torch.bfloat16, options.dtype is torch.bfloat16)


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed, so that what is begun can be finished.

    Standard error says so; a second one ends at once.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def press(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        print(
            "sakiyomi: ending; the best drafter so far is saved and measured, and the same command goes on from here. "
            "Ctrl-C again ends at once",
            file=sys.stderr,
        )

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
