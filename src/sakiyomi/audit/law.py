"""Whether sampled texts keep the target's distribution where their tokens aren't those of plain decoding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from sakiyomi.audit.chance import ChiSquare, Counts, by_id, by_place
from sakiyomi.distribution import Distribution
from sakiyomi.drafters.model import ModelDrafter, ModelSession
from sakiyomi.drafting import Source
from sakiyomi.engine import Engine
from sakiyomi.interfaces import Draft, Verification, Work
from sakiyomi.llm import Speculation
from sakiyomi.policy import Checked
from sakiyomi.sampling import SamplingParams, host

DRAFTED = 3  # tokens in a row, where the audit itself says how many
CONTEXT = 32  # the last tokens of a prompt, after which texts begin: a long one would take its time in every run
_OTHER = 1.5  # times the temperature
_HOTTEST = 1e6


class Itself(ModelDrafter):
    """The target as its own draft model, at another temperature, so that some of what it drafts is rejected."""

    name = "itself"

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> ModelSession:
        """Begin a sequence with these token ids."""
        return super().session(prompt, replace(params, temperature=min(_OTHER * params.temperature, _HOTTEST)), sampled)


class AllOfIt:
    """A policy that checks all that the first drafter proposes, branches too."""

    def session(self, sources: Sequence[Source]) -> AllOfItSession:
        """Begin a sequence with these drafters."""
        return AllOfItSession(sources[0])


class AllOfItSession:
    """The policy on one sequence."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        """Return what the drafter proposes."""
        return self._source.propose(min(left, DRAFTED)) if left > 0 else Draft()

    def observe(self, checked: Checked) -> None:
        """Learn nothing."""


class LawCheck:
    """Sampled runs against the target's own distribution, as far as they have come.

    ``drafter``: what drafts. ``tokens``: of a run. ``runs``: each had a seed of its own. ``accepted`` of ``drafted``
    tokens stood. ``errors``: of drafters that failed.
    """

    def __init__(self, verification: Verification, drafter: str, tokens: int) -> None:
        self.verification, self.drafter, self.tokens = verification, drafter, tokens
        self.runs = self.drafted = self.accepted = 0
        self.errors: list[str] = []
        self._places: dict[tuple[int, int], Counts] = {}  # by prompt and position
        self._all, self._ids = Counts(by_place), Counts(by_id)

    @property
    def tests(self) -> dict[str, ChiSquare]:
        """Tests of the same draws: each position of each prompt apart, all by likeliness, all by id."""
        return {
            "positions": sum((each.test() for each in self._places.values()), start=ChiSquare()),
            "likeliness": self._all.test(),
            "ids": self._ids.test(),
        }

    def p_value(self) -> float:
        """Return the lowest p-value of the tests."""
        return min(each.p_value for each in self.tests.values())

    def visible(self, significance: float) -> float | None:
        """Return the shift between likelier and less likely tokens that would be found; see ChiSquare.visible.

        None where there is nothing to see: no drafts, or a target that leaves too little to chance.
        """
        return self._all.test().visible(significance) if self.drafted else None

    def run(
        self,
        engine: Engine,
        settings: Sequence[Speculation],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        runs: int,
        step: Callable[[str], None],
    ) -> None:
        """Run the engine with many seeds, and count each token against the target's distribution at its place.

        ``params``: must sample. Runs take the settings in turn, and begin after the ends of the prompts in turn. The
        distributions come from forwards of their own, over the finished text.
        """
        params = replace(params, max_new_tokens=self.tokens, min_new_tokens=min(params.min_new_tokens, self.tokens))
        room = engine.target.context_length - self.tokens
        prompts = [prompt[-max(1, min(CONTEXT, room)) :] for prompt in prompts]
        references = [Reference(engine, prompt, params) for prompt in prompts]
        for run in range(runs):
            which, setting = run % len(prompts), settings[run // len(prompts) % len(settings)]
            # Not that of the outputs that were compared: a drafter may remember them.
            seeded = replace(params, seed=(params.seed + 1 + run) % 2**63)
            request = engine.request(prompts[which], seeded, setting.drafters, setting.policy, self.verification)
            text: list[int] = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the records have them
                for chunk in engine.run(request):
                    text.extend(chunk.token_ids)
                    self.drafted += chunk.record.drafted
                    self.accepted += chunk.record.accepted
                    self.errors.extend(chunk.record.errors)
            for position, (token, distribution) in enumerate(references[which].distributions(text)):
                place = self._places.setdefault((which, position), Counts(by_place))
                for counts in (place, self._all, self._ids):
                    counts.add(token, distribution)
            self.runs += 1
            step(f"{self.verification}, seed {seeded.seed}")


class Reference:
    """The target's own distributions after a prompt."""

    def __init__(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> None:
        self._target = engine.target
        self._chooser = engine.chooser(prompt, params)
        self._sequence = engine.target.new_sequence()
        self._last = prompt[-1]
        self._length = len(prompt) - 1
        for start in range(0, self._length, self._target.max_rows):
            rows = prompt[start : min(start + self._target.max_rows, self._length)]
            self._target.forward([Work(self._sequence, rows, None, 0)])

    def distributions(self, text: Sequence[int]) -> list[tuple[int, Distribution]]:
        """Return the tokens of a text, each with the distribution that it should have been drawn from."""
        (output,) = self._target.forward([Work(self._sequence, [self._last, *text[:-1]], None, len(text))])
        self._sequence.truncate(self._length)
        found = []
        for token, row in zip(text, host(output.logits), strict=True):
            found.append((token, self._chooser.distribution(row)))
            self._chooser.take(token)
        self._chooser.forget(len(text))
        return found
