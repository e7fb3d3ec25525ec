"""Prompts to measure with: the built-in ones, or a file of one's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from sakiyomi.errors import OptionError

_WANTED = 'each line must be like {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a workload: chat ``messages``, or where these are empty the plain ``text``."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...] = ()
    text: str = ""

    @property
    def input(self) -> str | list[dict[str, str]]:
        """What to give to ``LLM.generate``."""
        return list(self.messages) or self.text


def load_workload(path: str | PathLike[str]) -> tuple[Prompt, ...]:
    """Return the prompts of a JSON-lines file (UTF-8).

    A line has ``messages`` or ``prompt``; ``id`` (default: the line number) and ``category`` (default: all)
    are optional, other keys are ignored. Raises OptionError with the file, the line and what would work.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"workload {path}: can't be read ({error.strerror}); must be a file of JSON lines") from error
    return _parse(data, str(path))


def builtin_workload() -> tuple[Prompt, ...]:
    """Return the 24 built-in prompts: four of each of six categories, from open chat to near copies."""
    return _parse(files("sakiyomi.bench").joinpath("builtin.jsonl").read_bytes(), "builtin.jsonl")


def select(
    prompts: Sequence[Prompt], categories: Sequence[str] | None = None, per_category: int | None = None
) -> tuple[Prompt, ...]:
    """Return the prompts of these categories, the first ``per_category`` of each, in their order.

    None is no limit. Raises OptionError for a category that no prompt has, and for a limit below 1.
    """
    if per_category is not None and per_category < 1:
        raise OptionError(f"per_category={per_category}: must be at least 1, or None for no limit")
    known = dict.fromkeys(prompt.category for prompt in prompts)
    for category in categories or ():
        if category not in known:
            raise OptionError(f"category {category!r}: not in this workload; there are {', '.join(known)}")
    wanted = known if categories is None else categories
    taken: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        if prompt.category in wanted and (per_category is None or taken[prompt.category] < per_category):
            taken[prompt.category] += 1
            chosen.append(prompt)
    return tuple(chosen)


def _parse(data: bytes, name: str) -> tuple[Prompt, ...]:
    prompts: dict[str, Prompt] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            prompt = _parse_line(raw, number)
            if prompt.id in prompts:
                raise ValueError(f"the id {prompt.id!r} is there twice; every id must be different")
        except ValueError as error:
            raise OptionError(f"workload {name}, line {number}: {error}") from error
        prompts[prompt.id] = prompt
    if not prompts:
        raise OptionError(f"workload {name}: has no prompts; {_WANTED}")
    return tuple(prompts.values())


def _parse_line(raw: bytes, number: int) -> Prompt:
    """Return the prompt of one line; ValueError says what is wrong and what would work."""
    try:
        line: Any = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"not JSON ({reason}); {_WANTED}") from error
    if not isinstance(line, dict):
        raise ValueError(f"not a JSON object; {_WANTED}")

    name, category = line.get("id", number), line.get("category", "all")
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ValueError(f"id {name!r}: must be a text or a number")
    if not isinstance(category, str) or not category:
        raise ValueError(f"category {category!r}: must be a text")
    if "messages" in line:
        return Prompt(_text(str(name), "id"), _text(category, "category"), _messages(line["messages"]))
    if "prompt" in line:
        text = _text(line["prompt"], "prompt")
        return Prompt(_text(str(name), "id"), _text(category, "category"), text=text)
    raise ValueError(f"has neither messages nor prompt; {_WANTED}")


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages: must be a list with at least one message; {_WANTED}")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages[{i}]: must be an object with role and content; {_WANTED}")
        messages.append({key: _text(message[key], f"messages[{i}].{key}") for key in ("role", "content")})
    return tuple(messages)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what}: must be a non-empty text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no tokenizer can take
        raise ValueError(f"{what}: has half a \\u escape pair; write the character itself") from error
    return value
