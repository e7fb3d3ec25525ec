"""What drafters are trained on: the target's own responses to prompts."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.errors import OptionError, PromptError
from sakiyomi.sampling import SamplingParams

if TYPE_CHECKING:
    from sakiyomi.bench.workload import Prompt
    from sakiyomi.llm import LLM

TEMPERATURES = (0.5, 0.7, 1.0)  # of the sampled half
HELD_OUT, LEAST_HELD_OUT = 0.05, 20
_PERIOD, _TIMES = 64, 4  # a loop: up to so many tokens, so many times in a row
_LOOP_TOKENS = 24  # and at least so many tokens in all, or "----" would be one

Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response of the target as token ids; ``id`` is that of its prompt."""

    id: str
    category: str
    temperature: float
    seed: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True, slots=True)
class Split:
    """Responses to train on, and those to prompts that training never sees."""

    train: tuple[Response, ...]
    held_out: tuple[Response, ...]


def read_responses(path: str | os.PathLike[str]) -> list[Response]:
    """Return the responses of a file of JSON lines; a last line that was cut off is left out.

    Raises OptionError with the line and what was expected.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise OptionError(f"responses {path}: can't be read ({error.strerror})") from error
    found = []
    for number, line in enumerate(lines[:-1], start=1):  # what comes after the last newline is cut off, or nothing
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            found.append(
                Response(
                    str(value["id"]),
                    str(value["category"]),
                    float(value["temperature"]),
                    int(value["seed"]),
                    tuple(int(t) for t in value["prompt"]),
                    tuple(int(t) for t in value["tokens"]),
                    str(value["finish"]),
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise OptionError(
                f"responses {path}, line {number}: must be an object with id, category, temperature, seed, prompt, "
                f"tokens and finish ({type(error).__name__}: {error})"
            ) from None
    return found


def generate_responses(
    llm: LLM,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    max_new_tokens: int = 160,
    responses_per_prompt: int = 1,
    batch: int = 64,
    seed: int = 0,
    minutes: float | None = None,
    progress: Progress = silent,
) -> list[Response]:
    """Have the target answer the prompts, and return its responses with those that the file has already.

    About half of the prompts are answered greedily, the others at one of several temperatures. Each response is
    appended to the file as it ends, so that an interrupted run goes on where it was: which prompts, temperatures and
    seeds there are depends on the arguments alone. Prompts that are too long for the target are left out. ``minutes``:
    stop then.
    """
    import time

    jobs = _jobs(llm, prompts, max_new_tokens, responses_per_prompt, seed)
    found = read_responses(path) if path.exists() else []
    _drop_cut_line(path)
    done = {(each.id, each.seed) for each in found}
    left = [job for job in jobs if (job.id, job.seed) not in done]
    if not left:
        return found
    params = [SamplingParams(max_new_tokens=max_new_tokens, temperature=j.temperature, seed=j.seed) for j in left]
    gathered: dict[int, list[int]] = {}
    end = None if minutes is None else time.monotonic() + 60 * minutes
    chunks = llm.stream_batch(
        [job.prompt for job in left], params, drafter="none", num_speculative_tokens=0, batch_size=batch
    )
    with path.open("a", encoding="utf-8") as file:
        progress(len(found), len(jobs), "responses")
        for index, chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            tokens = gathered.setdefault(index, [])
            tokens.extend(token.id for token in chunk.tokens)
            if chunk.finish_reason:
                response = replace(left[index], tokens=tuple(gathered.pop(index)), finish=chunk.finish_reason)
                file.write(json.dumps(asdict(response)) + "\n")
                file.flush()
                found.append(response)
                progress(len(found), len(jobs), "responses")
            if end is not None and time.monotonic() > end:
                break
    return found


def _jobs(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int, each: int, seed: int) -> list[Response]:
    """Return the responses that are wanted, still empty, in a random order: of a part of them all categories are."""
    rng = random.Random(seed)
    jobs = []
    for prompt in prompts:
        for _ in range(each):
            temperature = 0.0 if rng.random() < 0.5 else rng.choice(TEMPERATURES)
            own = rng.randrange(2**31)
            try:
                ids = llm.encode(prompt.input)
            except PromptError as error:
                raise PromptError(f"prompt {prompt.id}: {error}") from None
            if len(ids) + max_new_tokens <= llm.target.context_length:
                jobs.append(Response(prompt.id, prompt.category, temperature, own, tuple(ids), (), ""))
    if not jobs:
        raise OptionError(
            f"--prompts: none is short enough for a context of {llm.target.context_length} tokens with "
            f"{max_new_tokens} of a response; lower --max-new-tokens or give shorter prompts"
        )
    rng.shuffle(jobs)
    return jobs


def _drop_cut_line(path: Path) -> None:
    """Shorten a file to its last complete line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return where a text begins to repeat itself for good up to its end, after the first time; None where it doesn't.

    What a model writes in a loop is easy to draft and says nothing about its other text.
    """
    n = len(tokens)
    for period in range(1, min(_PERIOD, n // _TIMES) + 1):
        same = n
        while same > period and tokens[same - 1] == tokens[same - 1 - period]:
            same -= 1
        if n - same >= max((_TIMES - 1) * period, _LOOP_TOKENS):
            return same
    return None


def cut_loops(responses: Iterable[Response]) -> tuple[list[Response], int]:
    """Return the responses without what they repeat at their ends, and how many were cut."""
    kept, cut = [], 0
    for response in responses:
        start = loop_start(response.tokens)
        if start is not None:
            response = replace(response, tokens=response.tokens[:start], finish="loop")
            cut += 1
        if len(response.tokens) > 2:
            kept.append(response)
    return kept, cut


def split(responses: Sequence[Response], seed: int = 0) -> Split:
    """Hold out a twentieth of the prompts, at least 20, with all of their responses. Raises OptionError for too few.

    By prompt: a response to a prompt of which another was trained on flatters. Prompts of the same text are one.
    """
    prompts = list(dict.fromkeys(response.prompt for response in responses))
    wanted = max(LEAST_HELD_OUT, round(HELD_OUT * len(prompts)))
    if len(prompts) < 2 * wanted:
        raise OptionError(
            f"--prompts: {len(prompts)} different prompts with a response; at least {2 * wanted} are needed, of which "
            f"{wanted} are held out"
        )
    random.Random(seed).shuffle(prompts)
    held = set(prompts[:wanted])
    if not any(each.prompt in held and each.temperature == 0 for each in responses):
        raise OptionError("--prompts: none of those held out has a greedy response; give more prompts")
    return Split(
        tuple(each for each in responses if each.prompt not in held),
        tuple(each for each in responses if each.prompt in held),
    )


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a drafter can propose.

    ``ids``: int64 [size], ascending, of the target; ``to_draft``: int64 [vocab_size], -1 for those that aren't there.
    ``coverage``: the share of the tokens of responses that are.
    """

    ids: torch.Tensor
    to_draft: torch.Tensor
    coverage: float

    def __len__(self) -> int:
        return len(self.ids)


def draft_vocabulary(responses: Sequence[Response], size: int, vocab_size: int) -> DraftVocabulary:
    """Return the most frequent tokens of the responses, filled up with those of the prompts, then with low ids."""
    size = min(size, vocab_size)
    counts = Counter(token for response in responses for token in response.tokens)
    of_prompts = Counter(token for response in responses for token in response.prompt)
    order = dict.fromkeys(token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    order |= dict.fromkeys(token for token, _ in sorted(of_prompts.items(), key=lambda item: (-item[1], item[0])))
    order |= dict.fromkeys(range(vocab_size))
    chosen = torch.tensor(sorted(list(order)[:size]))
    to_draft = torch.full((vocab_size,), -1)
    to_draft[chosen] = torch.arange(size)
    covered = sum(counts[token] for token in chosen.tolist())
    return DraftVocabulary(chosen, to_draft, covered / max(1, counts.total()))


def describe(responses: Sequence[Response]) -> dict[str, Any]:
    """Return how much there is of what."""
    return {
        "responses": len(responses),
        "prompts": len({response.prompt for response in responses}),
        "tokens": sum(len(response.tokens) for response in responses),
        "greedy": sum(response.temperature == 0 for response in responses),
        "categories": dict(Counter(response.category for response in responses).most_common()),
    }
