"""The target's states over its own texts, kept in a file that is mapped, and batches of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sakiyomi.errors import OptionError
from sakiyomi.files import replace_file
from sakiyomi.interfaces import Target, Work
from sakiyomi.train.data import Progress, Response, silent

CHUNK = 128  # rows of a text in one forward
TOGETHER = 4  # texts in one forward
PAD = 32  # lengths are rounded up to this, so that few of them differ: each costs a kernel to compile
BATCH_ROWS = 16_384  # of a batch, with padding: its states and keys take memory, however few positions there are
PROMPT_ROWS = 256  # the last tokens of a prompt whose states are kept: what a drafter's attention sees of it


@dataclass(frozen=True, slots=True)
class Example:
    """One text whose states are kept: the end of its prompt, then its response.

    ``tokens``: all that are kept. ``start``: where the response begins. ``row``: that of its first token in the file;
    the last token has no states, since nothing is drafted after it.
    """

    tokens: tuple[int, ...]
    start: int
    row: int
    category: str

    @property
    def rows(self) -> int:
        """Tokens with states."""
        return len(self.tokens) - 1

    @property
    def positions(self) -> int:
        """Positions to draft from: the token at hand is one of the response, and the next is too."""
        return max(0, len(self.tokens) - 1 - self.start)


@dataclass(frozen=True)
class Features:
    """States of examples: ``values`` is bfloat16 [rows, layers, hidden], mapped from a file."""

    examples: tuple[Example, ...]
    values: torch.Tensor
    left_out: int = 0

    def states(self, example: Example) -> torch.Tensor:
        """Return [rows, layers, hidden] of an example."""
        return self.values[example.row : example.row + example.rows]


def collect(
    target: Target,
    responses: Sequence[Response],
    layers: Sequence[int],
    hidden: int,
    path: Path,
    *,
    max_bytes: float,
    key: str,
    progress: Progress = silent,
) -> Features:
    """Compute the states of these layers over texts, into a file that is at most so large.

    What doesn't fit is left out, from the end of ``responses`` on. A file that an interrupted run left is gone on with,
    if ``key`` says that its target was the same. Raises OptionError where the disk is full.
    """
    layers = tuple(layers)
    row_bytes = 2 * len(layers) * hidden
    examples, row = [], 0
    for response in responses:
        prompt = response.prompt[-PROMPT_ROWS:]
        rows = len(prompt) + len(response.tokens) - 1
        if (row + rows) * row_bytes > max_bytes:
            break
        examples.append(Example(prompt + response.tokens, len(prompt), row, response.category))
        row += rows
    if not examples:
        raise OptionError(f"--disk {max_bytes / 1e9:g}: not even one response fits; give more")
    try:
        _begin_file(path, {"key": key, "layers": layers, "texts": digest(responses)})
        held = path.stat().st_size // row_bytes
        first = next((i for i, each in enumerate(examples) if each.row + each.rows > held), len(examples))
        if first < len(examples):
            os.truncate(path, examples[first].row * row_bytes)
        with path.open("ab") as file:
            for at in range(first, len(examples), TOGETHER):
                progress(at, len(examples), "states")
                for states in _states(target, responses[at : min(at + TOGETHER, len(examples))], layers):
                    file.write(states.view(torch.int16).numpy().tobytes())
    except OSError as error:
        raise OptionError(
            f"{path}: can't be written ({error.strerror}); what is there is kept: make room for "
            f"{row * row_bytes / 1e9:.1f} GB in all and start again, or start again with a lower --disk"
        ) from error
    progress(len(examples), len(examples), "states")
    values = torch.from_file(str(path), shared=False, size=row * len(layers) * hidden, dtype=torch.bfloat16)
    left = len(responses) - len(examples)
    return Features(tuple(examples), values.view(row, len(layers), hidden), left)


def _states(target: Target, responses: Sequence[Response], layers: tuple[int, ...]) -> list[torch.Tensor]:
    """Return [rows, layers, hidden] in bfloat16 for each text, of the rows that are kept."""
    texts = [(response.prompt + response.tokens)[:-1] for response in responses]
    sequences = [target.new_sequence() for _ in texts]
    pieces: list[list[torch.Tensor]] = [[] for _ in texts]
    for at in range(0, max(map(len, texts)), CHUNK):
        there = [i for i, text in enumerate(texts) if len(text) > at]
        work = [Work(sequences[i], texts[i][at : at + CHUNK], None, 0) for i in there]
        for i, output in zip(there, target.forward(work, hidden_layers=layers), strict=True):
            pieces[i].append(torch.stack([h.to("cpu", torch.bfloat16) for h in output.hidden], 1))
    return [
        torch.cat(piece)[max(0, len(response.prompt) - PROMPT_ROWS) :].contiguous()
        for piece, response in zip(pieces, responses, strict=True)
    ]


def _begin_file(path: Path, facts: dict[str, Any]) -> None:
    """Keep the file if it is about the same texts and target, else begin it again."""
    about = path.with_suffix(".json")
    text = json.dumps(facts)
    if not (path.exists() and about.exists() and about.read_text("utf-8") == text):
        path.write_bytes(b"")
        replace_file(about, lambda temporary: temporary.write_text(text, "utf-8"))


def digest(responses: Sequence[Response]) -> str:
    """Return a text that tells these responses from others."""
    found = hashlib.sha256()
    for response in responses:
        found.update(np.array((*response.prompt, -1, *response.tokens, -2), np.int64).tobytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """Examples side by side, padded at their ends.

    ``tokens``: int64 [examples, length]; ``states``: bfloat16 [examples, length - 1, layers, hidden]. ``first``,
    ``count``: int64 [examples], the rows to draft from: those whose next token is the first of the response, and on.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    examples: tuple[Example, ...]

    @property
    def positions(self) -> int:
        """Rows to draft from, all examples together."""
        return sum(example.positions for example in self.examples)


def make_batch(features: Features, examples: Sequence[Example], device: torch.device) -> Batch:
    """Return the examples as a batch on a device."""
    length = _padded(max(len(example.tokens) for example in examples)) + 1
    tokens = torch.zeros(len(examples), length, dtype=torch.int64)
    states = torch.zeros(len(examples), length - 1, *features.values.shape[1:], dtype=features.values.dtype)
    for i, example in enumerate(examples):
        tokens[i, : len(example.tokens)] = torch.tensor(example.tokens)
        states[i, : example.rows] = features.states(example)
    first = torch.tensor([example.start - 1 for example in examples])
    count = torch.tensor([example.positions for example in examples])
    return Batch(tokens.to(device), states.to(device), first.to(device), count.to(device), tuple(examples))


def plan(examples: Sequence[Example], positions: int, seed: int | None) -> list[list[Example]]:
    """Return the examples in groups of like length; None keeps their order by length.

    A group has at most so many positions, and at most BATCH_ROWS rows as a batch, unless it is a single example.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    noise = np.zeros(len(examples)) if rng is None else rng.uniform(0, 24, len(examples))
    order = sorted(range(len(examples)), key=lambda i: examples[i].rows + noise[i])
    groups: list[list[Example]] = []
    held = longest = 0
    for i in order:
        held, longest = held + examples[i].positions, max(longest, _padded(examples[i].rows + 1))
        if not groups or held > positions or (len(groups[-1]) + 1) * longest > BATCH_ROWS:
            groups.append([])
            held, longest = examples[i].positions, _padded(examples[i].rows + 1)
        groups[-1].append(examples[i])
    if rng is not None:
        rng.shuffle(groups)
    return groups


def _padded(length: int) -> int:
    return -(-length // PAD) * PAD
