"""What drafters are trained on: the target's own responses to prompts."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.errors import OptionError, PromptError
from sakiyomi.files import replace_file
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
    model: str = "",
    max_new_tokens: int = 160,
    responses_per_prompt: int = 1,
    batch: int = 64,
    seed: int = 0,
    minutes: float | None = None,
    progress: Progress = silent,
) -> list[Response]:
    """Have the target answer the prompts, and return its responses, in an order that depends on the arguments alone.

    Prompts that :func:`split` holds out are answered first, greedily; of the others about half greedily, the rest at
    one of several temperatures. Prompts that are too long for the target are left out, and answers that fail, both
    with a warning. Each response is appended to the file as it ends: an interrupted run goes on where it was, and what
    is asked for again is taken from the file. ``minutes``: stop when so much time was spent on this, over all runs.
    ``model``: tells the model from others; beside the file is noted what it is of. Raises OptionError, also for a file
    of another model, or where nothing can be written.
    """
    jobs = _jobs(llm, prompts, max_new_tokens, responses_per_prompt, seed)
    facts = {"model": model, "tokenizer": llm.tokenizer.fingerprint, "max_new_tokens": max_new_tokens}
    try:
        seconds = _begin(path, facts)
        found = {_asked(each): each for each in read_responses(path)}
        this = _hash(*(_asked(job) for job in jobs))
        left = [job for job in jobs if _asked(job) not in found]
        budget = None if minutes is None else 60 * minutes - seconds.get(str(this), 0.0)
        if left and (budget is None or budget > 0):
            began = time.monotonic()
            try:
                for response in _answers(llm, left, path, max_new_tokens, batch, budget, len(jobs), progress):
                    found[_asked(response)] = response
            finally:
                seconds[str(this)] = seconds.get(str(this), 0.0) + time.monotonic() - began
                _note(path, {**facts, "seconds": seconds})
    except OSError as error:
        raise OptionError(
            f"{path}: can't be written ({error.strerror}); what is there is kept: make room and start again"
        ) from error
    return [replace(found[_asked(job)], category=job.category) for job in jobs if _asked(job) in found]


def _answers(
    llm: LLM,
    jobs: Sequence[Response],
    path: Path,
    max_new_tokens: int,
    batch: int,
    seconds: float | None,
    total: int,
    progress: Progress,
) -> Iterator[Response]:
    """Append the answers to a file as they end, and yield them. Raises what the first failed with if all do."""
    params = [SamplingParams(max_new_tokens=max_new_tokens, temperature=j.temperature, seed=j.seed) for j in jobs]
    chunks = llm.stream_batch(
        [job.prompt for job in jobs], params, drafter="none", num_speculative_tokens=0, batch_size=batch
    )
    gathered: dict[int, list[int]] = {}
    failed: list[Exception] = []
    done, end = 0, None if seconds is None else time.monotonic() + seconds
    with path.open("a", encoding="utf-8") as file:
        progress(total - len(jobs), total, "responses")
        for index, chunk in chunks:
            if isinstance(chunk, Exception):
                failed.append(chunk)
                gathered.pop(index, None)
                continue
            tokens = gathered.setdefault(index, [])
            tokens.extend(token.id for token in chunk.tokens)
            if chunk.finish_reason:
                response = replace(jobs[index], tokens=tuple(gathered.pop(index)), finish=chunk.finish_reason)
                file.write(json.dumps(asdict(response)) + "\n")
                file.flush()
                yield response
                done += 1
                progress(total - len(jobs) + done, total, "responses")
            if end is not None and time.monotonic() > end:
                break
    if failed and not done:
        raise failed[0]
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(jobs)} answers failed and are left out; the first: {failed[0]}",
            RuntimeWarning,
            stacklevel=3,
        )


def _jobs(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int, each: int, seed: int) -> list[Response]:
    """Return the responses that are wanted, still empty, in a random order: of a part of them all categories are.

    What is asked for of one prompt doesn't depend on the others, save for whether it is held out.
    """
    short = []
    for prompt in prompts:
        try:
            ids = tuple(llm.encode(prompt.input))
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id}: {error}") from None
        if len(ids) + max_new_tokens <= llm.target.context_length:
            short.append((prompt, ids))
    if len(short) < len(prompts):
        warnings.warn(
            f"{len(prompts) - len(short)} of {len(prompts)} prompts are left out: with {max_new_tokens} tokens of a "
            f"response they are too long for a context of {llm.target.context_length}",
            RuntimeWarning,
            stacklevel=3,
        )
    held = held_out((ids for _, ids in short), seed)
    jobs: dict[Response, tuple[bool, int]] = {}
    for prompt, ids in short:
        greedy = 0 if ids in held else _hash(seed, prompt.id, "greedy") % 2  # of several responses at most one
        for number in range(1 if ids in held else each):
            drawn = _hash(seed, prompt.id, number)
            temperature = 0.0 if number == greedy else TEMPERATURES[drawn % len(TEMPERATURES)]
            job = Response(prompt.id, prompt.category, temperature, drawn >> 33, ids, (), "")
            jobs[job] = ids not in held, drawn  # those held out first: there are some however little time there is
    return sorted(jobs, key=jobs.__getitem__)


def _asked(response: Response) -> tuple[str, tuple[int, ...], float, int]:
    """Return what a response is the answer to."""
    return response.id, response.prompt, response.temperature, response.seed


def _hash(*facts: object) -> int:
    """Return a number of 64 bits that is a pure function of these."""
    return int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:8], "big")


def _begin(path: Path, facts: dict[str, Any]) -> dict[str, float]:
    """Begin a file of responses, or go on with one; return the seconds that were spent on each run of it.

    Raises OptionError where it is of another model.
    """
    about = path.with_suffix(".json")
    if not path.exists() or not path.stat().st_size:
        path.touch()
        _note(path, {**facts, "seconds": {}})
        return {}
    _drop_cut_line(path)
    try:
        noted = json.loads(about.read_text("utf-8"))
        seconds = {str(run): float(spent) for run, spent in noted["seconds"].items()}
        others = [name for name, value in facts.items() if noted[name] != value]
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        raise OptionError(
            f"{path}: {about.name} beside it doesn't say of which model it is; give it as --responses, or name another "
            "folder with --work"
        ) from None
    if others:
        raise OptionError(
            f"{path}: is of another {' and '.join(others)}; name another folder with --work, or delete the file"
        )
    return seconds


def _note(path: Path, facts: dict[str, Any]) -> None:
    text = json.dumps(facts) + "\n"
    replace_file(path.with_suffix(".json"), lambda temporary: temporary.write_text(text, encoding="utf-8"))


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


def count_held_out(prompts: int) -> int:
    """Return how many of so many different prompts are held out: a twentieth, at least 20.

    Raises OptionError for too few.
    """
    wanted = max(LEAST_HELD_OUT, round(HELD_OUT * prompts))
    if prompts < 2 * wanted:
        raise OptionError(
            f"--prompts: {prompts} different prompts; at least {2 * wanted} are needed, of which {wanted} are held out"
        )
    return wanted


def held_out(prompts: Iterable[tuple[int, ...]], seed: int) -> set[tuple[int, ...]]:
    """Return those prompts that are held out. Raises OptionError for too few.

    By their hashes: neither their order nor how many responses there are changes it, and more prompts add to it.
    """
    different = set(prompts)
    return set(sorted(different, key=lambda prompt: (_hash(seed, prompt), prompt))[: count_held_out(len(different))])


def split(responses: Sequence[Response], seed: int = 0) -> Split:
    """Hold out a twentieth of the prompts, at least 20, with all of their responses. Raises OptionError for too few.

    By prompt: a response to a prompt of which another was trained on flatters. Prompts of the same text are one.
    """
    held = held_out((response.prompt for response in responses), seed)
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
