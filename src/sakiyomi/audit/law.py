"""Whether sampled texts keep the target's distribution where their tokens aren't those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sakiyomi.audit.chance import ChiSquare, Counts
from sakiyomi.drafters.model import ModelDrafter, ModelSession
from sakiyomi.drafting import Source
from sakiyomi.engine import Engine
from sakiyomi.interfaces import Draft, Drafter, Verification, Work
from sakiyomi.policy import Checked, FixedPolicy
from sakiyomi.sampling import SamplingParams

POSITIONS = 5  # tokens of a run
DRAFTED = 3  # of them at a time
CONTEXT = 32  # the last tokens of a prompt, after which texts begin: a long one would take its time in every run
OTHER_TEMPERATURE = 1.5


class Itself(ModelDrafter):
    """The target as its own draft model, at another temperature, so that some of what it drafts is rejected."""

    name = "itself"

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> ModelSession:
        """Begin a sequence with these token ids."""
        return super().session(prompt, replace(params, temperature=OTHER_TEMPERATURE * params.temperature), sampled)


class AllOfIt:
    """A policy that checks all that the first drafter proposes, branches too."""

    def session(self, sources: Sequence[Source]) -> AllOfIt:
        """Begin a sequence: it keeps nothing but the drafter."""
        made = AllOfIt()
        made._source = sources[0]
        return made

    _source: Source

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        """Return what the drafter proposes."""
        return self._source.propose(min(left, DRAFTED)) if left > 0 else Draft()

    def observe(self, checked: Checked) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class LawCheck:
    """Sampled runs against the target's own distribution.

    ``drafter``: what drafted. ``runs``: each with a seed of its own. ``positions``: the test at each token of a run,
    over all prompts; ``accepted`` of ``drafted`` tokens stood.
    """

    verification: Verification
    drafter: str
    runs: int
    positions: tuple[ChiSquare, ...]
    drafted: int
    accepted: int

    @property
    def tested(self) -> bool:
        """Whether there was anything to test: drafts, and tokens that the target leaves to chance."""
        return self.drafted > 0 and self.together.freedom > 0

    @property
    def together(self) -> ChiSquare:
        """The test of all positions."""
        return sum(self.positions, start=ChiSquare(0.0, 0, 0))


def check_law(
    engine: Engine,
    drafter: Drafter,
    verification: Verification,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    runs: int,
    step: Callable[[str], None],
) -> LawCheck:
    """Run the engine with many seeds, and test each token against the target's distribution at its place.

    Each text begins after the end of a prompt.

    ``params``: must sample. Every other run checks drafts with branches. The distributions come from forwards of their
    own, over the finished text.
    """
    counts = [[Counts() for _ in range(POSITIONS)] for _ in prompts]
    drafted = accepted = 0
    prompts = [prompt[-CONTEXT:] for prompt in prompts]
    references = [_Reference(engine, prompt, params) for prompt in prompts]
    for run in range(runs):
        which = run % len(prompts)
        seeded = replace(params, seed=(params.seed + run) % 2**63, max_new_tokens=POSITIONS, min_new_tokens=0)
        policy = AllOfIt() if run // len(prompts) % 2 else FixedPolicy(DRAFTED)
        request = engine.request(prompts[which], seeded, [drafter], policy, verification)
        text: list[int] = []
        for chunk in engine.run(request):
            text.extend(chunk.token_ids)
            drafted += chunk.record.drafted
            accepted += chunk.record.accepted
        references[which].count(text, counts[which])
        step(f"{verification}, seed {seeded.seed}")
    positions = tuple(
        sum((of_prompt[i].test() for of_prompt in counts), start=ChiSquare(0.0, 0, 0)) for i in range(POSITIONS)
    )
    return LawCheck(verification, drafter.name, runs, positions, drafted, accepted)


class _Reference:
    """The target's own distributions after a prompt."""

    def __init__(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> None:
        self._target = engine.target
        self._chooser = engine.request(prompt, params).chooser
        self._sequence = engine.target.new_sequence()
        self._last = prompt[-1]
        self._length = len(prompt) - 1
        for start in range(0, self._length, self._target.max_rows):
            rows = prompt[start : min(start + self._target.max_rows, self._length)]
            self._target.forward([Work(self._sequence, rows, None, 0)])

    def count(self, text: Sequence[int], counts: Sequence[Counts]) -> None:
        """Count the tokens of a text, each at its place."""
        (output,) = self._target.forward([Work(self._sequence, [self._last, *text[:-1]], None, len(text))])
        self._sequence.truncate(self._length)
        for token, row, place in zip(text, output.logits.float().numpy(), counts, strict=False):
            place.add(token, self._chooser.distribution(row))
            self._chooser.take(token)
        self._chooser.forget(len(text))
