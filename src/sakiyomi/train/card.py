"""What is told of a trained drafter: how it was made, and what it does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sakiyomi.files import replace_file
from sakiyomi.train.trainer import Score


@dataclass(frozen=True)
class Projection:
    """How much faster than plain decoding drafts of ``k`` tokens should be here; k = 0: not at all.

    Of what the target's forward of one row and a draft take, milliseconds.
    """

    k: int
    speed_up: float
    target_ms: float
    draft_ms: float


@dataclass(frozen=True)
class Card:
    """The card of a drafter; see :meth:`write`. ``facts``: of its network. ``history``: evaluations as it was
    trained."""

    kind: str
    model: str
    ended: str
    seconds: float
    steps: int
    megabytes: float
    data: dict[str, Any]
    facts: dict[str, Any]
    score: Score
    projection: Projection | None
    command: str
    history: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return the card as it is written to card.json."""
        told = asdict(self)
        told["score"]["by_category"] = {name: list(k) for name, k in self.score.by_category.items()}
        return told

    def write(self, folder: Path) -> None:
        """Write card.json and README.md. Raises OptionError."""
        write_text(folder / "card.json", json.dumps(self.as_dict(), indent=1) + "\n")
        write_text(folder / "README.md", self.markdown())

    def rows(self) -> list[tuple[str, str]]:
        """Return what is worth reading first, as names and values."""
        score = self.score
        lengths = ", ".join(f"{tokens:.2f}" for tokens in score.tokens_per_call)
        rows = [
            ("drafter", f"{self.kind} for {self.model}, {self.megabytes:.1f} MB"),
            (
                "trained on",
                f"{self.data['tokens']:,} tokens of {self.data['responses']:,} responses to "
                f"{self.data['prompts']:,} prompts",
            ),
            (
                "held out",
                f"{self.data['held_out']['prompts']} other prompts; {score.positions:,} tokens of greedy responses",
            ),
            ("acceptance by position", " ".join(f"{share:.0%}" for share in score.conditional)),
            (f"tokens per target call, k = 1..{len(score.tokens_per_call)}", lengths),
        ]
        for name, tokens in score.by_category.items():
            rows.append((f"  {name}, k = {len(tokens)}", f"{tokens[-1]:.2f}"))
        if self.projection is not None:
            p = self.projection
            what = f"{p.speed_up:.2f}x with k = {p.k}" if p.k else "none: plain decoding is faster here"
            rows.append(
                (
                    "projected speed-up alone",
                    f"{what} (target {p.target_ms:.1f} ms a row, drafts {p.draft_ms:.1f} ms)",
                )
            )
        if "minutes" in self.facts:
            rows.append(("training", f"{self.facts['minutes']:.0f} min, {self.steps:,} steps; ended: {self.ended}"))
        return rows

    def markdown(self) -> str:
        """Return the card to read."""
        lines = [f"# {self.kind} drafter for {self.model}", ""]
        lines += ["| | |", "|---|---|", *(f"| {name.strip()} | {value} |" for name, value in self.rows()), ""]
        if "coverage" in self.facts:
            lines += [
                f"It can propose {self.facts['draft_vocabulary']:,} tokens, {self.facts['coverage']:.1%} of what the "
                "responses are made of."
                + (f" It reads the states of layers {_list(self.facts['layers'])}." if self.facts["layers"] else ""),
                "",
            ]
        categories = ", ".join(f"{name} {count}" for name, count in self.data["categories"].items())
        lines += [
            f"Responses by category: {categories}; {self.data['cut_as_loops']} were cut where they began to loop. "
            "Held-out prompts were never trained on. The figures are of the likeliest token at each position, not of "
            "trees. Text does not depend on a drafter: they are about speed.",
            "",
        ]
        if self.history:
            lines += [
                f"The parameters are the best of {len(self.history)} evaluations on the held-out texts: the figures "
                "flatter them a little.",
                "",
            ]
        if self.command:
            lines += ["Made by:", "", f"    {self.command}", ""]
        return "\n".join(lines)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises OptionError."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _list(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
