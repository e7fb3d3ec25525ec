"""Prompts to measure with: the built-in ones, or one's own, in the formats that files of prompts come in."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from errno import EBADF, ENOENT
from functools import partial
from importlib.resources import files
from os import PathLike
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NoReturn

from sakiyomi.errors import OptionError

_SOURCES = "must be a file of JSON lines, a folder of .txt and .md files, or - for standard input"
_FORMATS = (
    'must be like {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}, '
    "or as in Spec-Bench, ShareGPT or an OpenAI batch"
)
_SPEAKERS = {"human": "user", "user": "user", "system": "system"}  # what ShareGPT calls the roles
_SPEAKERS |= dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant")
_Entries = Iterable[tuple[object, Callable[[], "Prompt"]]]  # what to call each in messages, and how to read it


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a workload: chat ``messages``, or where these are empty the plain ``text``.

    ``response``: the recorded one; ``max_tokens``: the most tokens to answer with; ``follow_ups``: what the user says
    next, each after the answer to the one before.
    """

    id: str
    category: str
    messages: tuple[dict[str, str], ...] = ()
    text: str = ""
    response: str | None = None
    max_tokens: int | None = None
    follow_ups: tuple[str, ...] = ()

    @property
    def input(self) -> str | list[dict[str, str]]:
        """What to give to ``LLM.generate``."""
        return list(self.messages) or self.text


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of a source, and of each that was left out where it is, what is wrong and what was expected."""

    name: str
    prompts: tuple[Prompt, ...]
    bad: tuple[str, ...] = ()


def read_workload(source: str | PathLike[str], *, skip_bad: bool = False) -> Workload:
    """Return the prompts of a file of JSON lines or of one JSON array, of a folder, or of standard input (``-``).

    All are UTF-8. In a folder every .txt and .md file, at any depth, is one plain prompt; the folder that it lies in
    is its category. Names that begin with a dot are passed over; a link to a folder is an error, as it isn't followed.
    A line is one of these objects, whose other keys are ignored, as are keys with null:

    - ``messages`` or ``prompt``, with ``response`` and ``max_tokens`` or without
    - ``turns``, as in Spec-Bench: the first is the prompt, the others are its follow-ups
    - ``conversations``, as in ShareGPT: what the assistant says before the user does is dropped, since there long
      conversations are in pieces
    - ``body``, a request of an OpenAI batch without tools; a ``response`` and ``max_tokens`` may be in it or beside it

    Where the assistant's message is the last it is the recorded response, and no part of the prompt. ``id``, else
    ``question_id`` or ``custom_id`` (default: the line number), and ``category`` (default: all) are optional.

    ``skip_bad`` leaves out bad lines, entries and files, and the later of two that have the same id. Raises OptionError
    with where it is, what is wrong and what would work; also for a source that can't be read or has no prompts.
    """
    path = os.fspath(source)
    name = "standard input" if path == "-" else path
    try:
        if path == "-":
            if sys.stdin is None or sys.stdin.closed:
                raise OSError(EBADF, "it is closed")
            data = sys.stdin.buffer.read()
        elif os.path.isdir(path):
            return _gather(name, "file", _folder(Path(path)), skip_bad)
        else:
            data = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"workload {name}: can't be read ({error.strerror or error}); {_SOURCES}") from error
    return _parse(name, data, skip_bad)


def load_workload(path: str | PathLike[str], *, skip_bad: bool = False) -> tuple[Prompt, ...]:
    """Return only the prompts that :func:`read_workload` finds. Raises what it raises."""
    return read_workload(path, skip_bad=skip_bad).prompts


def builtin_workload() -> tuple[Prompt, ...]:
    """Return the 24 built-in prompts: four of each of six categories, from open chat to near copies."""
    return _parse("builtin.jsonl", files("sakiyomi.bench").joinpath("builtin.jsonl").read_bytes()).prompts


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


class _FormatError(ValueError):
    """An entry of no known format: its message goes on with what they are."""


def _gather(name: str, unit: str, entries: _Entries, skip_bad: bool) -> Workload:
    """Read all entries, each of which is a ``unit``: a line, an entry or a file."""
    prompts: dict[str, Prompt] = {}
    places: dict[str, str] = {}
    bad = []
    for label, read in entries:
        place = f"{unit} {label}"
        try:
            prompt = read()
            if first := places.get(prompt.id):
                numbered = prompt.id == str(label) or first == f"{unit} {prompt.id}"
                why = f" (a {unit} without an id has its number)" if numbered else ""
                twice = f"the id {prompt.id!r} is there twice{why}"
                raise ValueError(f"{twice}; every id must be different, and {first} has it")
        except ValueError as error:
            wanted = f"; each {unit} {_FORMATS}" if isinstance(error, _FormatError) else ""
            if not skip_bad:
                raise OptionError(f"workload {name}, {place}: {error}{wanted}") from error
            bad.append(f"{place}: {error}{wanted}")
        else:
            prompts[prompt.id], places[prompt.id] = prompt, place
    if not prompts:
        why = f"the first of {len(bad)} bad ones is {bad[0]}" if bad else f"each {unit} {_FORMATS}"
        raise OptionError(f"workload {name}: has no prompts; {why}")
    return Workload(name, tuple(prompts.values()), tuple(bad))


def _folder(root: Path) -> _Entries:
    def fail(error: OSError) -> NoReturn:  # else a folder that can't be read counts as empty
        raise OSError(error.errno, f"{error.filename}: {error.strerror}")

    found: dict[str, Path] = {}
    for folder, inner, names in os.walk(root, onerror=fail):
        inner[:] = [name for name in inner if not name.startswith(".")]  # those that are gone through
        links = [name for name in inner if os.path.islink(os.path.join(folder, name))]
        texts = [name for name in names if not name.startswith(".") and name.lower().endswith((".txt", ".md"))]
        for name in (*links, *texts):
            path = Path(folder, name)
            found[path.relative_to(root).as_posix()] = path
    if not found:
        raise OSError(ENOENT, "a folder without .txt and .md files")
    for name in sorted(found):
        category = found[name].parent.name if "/" in name else "all"
        yield repr(name), partial(_text_file, found[name], name, category)


def _text_file(path: Path, name: str, category: str) -> Prompt:
    if path.is_dir():
        raise ValueError("is a link to a folder, and not followed; put the folder itself there, or name it alone")
    try:
        text = _decoded(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        name.encode("utf-8")
    except OSError as error:
        raise ValueError(f"can't be read ({error.strerror}); must be a text file") from error
    except UnicodeEncodeError as error:
        raise ValueError("its name is not UTF-8; rename it") from error
    if not text.strip():
        raise ValueError("is empty; must have the text of one prompt")
    return Prompt(name, category, text=text)


def _parse(name: str, data: bytes, skip_bad: bool = False) -> Workload:
    """Return the prompts of JSON lines, or of one JSON array of what could be lines."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.lstrip().startswith(b"["):
        lines = ((number, raw) for number, raw in enumerate(data.split(b"\n"), start=1) if raw.strip())
        entries: _Entries = ((number, partial(_entry, raw, number)) for number, raw in lines)
        return _gather(name, "line", entries, skip_bad)
    try:
        values = _loaded(data)
    except ValueError as error:
        raise OptionError(f"workload {name}: begins with [, so must be one JSON array, but is {error}") from error
    entries = ((number, partial(_entry, value, number)) for number, value in enumerate(values, start=1))
    return _gather(name, "entry", entries, skip_bad)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error


def _loaded(data: bytes) -> Any:
    text = _decoded(data)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f", line {error.lineno}" if b"\n" in data else ""
        raise _FormatError(f"not JSON ({error.msg}{where})") from error
    except (ValueError, RecursionError) as error:  # a number too long, or nested too deep
        raise _FormatError(f"not JSON ({error})") from error


def _entry(entry: Any, number: int) -> Prompt:
    """Return the prompt of a line, or of a JSON value; ValueError says what is wrong and what would work."""
    if isinstance(entry, bytes):
        entry = _loaded(entry)
    if not isinstance(entry, dict):
        raise _FormatError("not a JSON object")
    entry = _given(entry)
    key = next((key for key in ("id", "question_id", "custom_id") if key in entry), "id")
    name, category = entry.get(key, number), entry.get("category", "all")
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ValueError(f"{key} {shortened(name)}: must be a text or a number")
    if not isinstance(category, str) or not category:
        raise ValueError(f"category {shortened(category)}: must be a text")

    sources = [(entry, "")]  # of the prompt, its response and its limit, with the place for messages
    if "body" in entry and entry.keys().isdisjoint(_READERS):  # an OpenAI batch
        body = _given(entry["body"]) if isinstance(entry["body"], dict) else {}
        if body.keys().isdisjoint(_READERS):
            raise ValueError("body: must be an object with messages or prompt")
        if tools := next((tools for tools in ("tools", "functions") if body.get(tools)), None):
            raise ValueError(f"body.{tools}: must be left out; a prompt is what system, user and assistant say")
        sources.insert(0, (body, "body."))
    source, where = sources[0]
    form = next((form for form in _READERS if form in source), None)
    if form is None:
        raise _FormatError("has neither messages nor prompt")
    fields = _READERS[form](source[form], where + form)
    response = _first(sources, "response")
    if response is not None:
        if "response" in fields:
            raise ValueError(f"response: {form} ends with one, the assistant's; leave out one of them")
        fields["response"] = _text(*response)
    limit = _first(sources, "max_completion_tokens", "max_tokens")  # OpenAI's new name, which wins, and its old one
    if limit is not None:
        fields["max_tokens"] = _count(*limit)
    return Prompt(_text(str(name), key), _text(category, "category"), **fields)


def _given(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what an object says: in files of columns, what isn't there is null."""
    return {key: value for key, value in entry.items() if value is not None}


def _first(sources: Sequence[tuple[dict[str, Any], str]], *keys: str) -> tuple[Any, str] | None:
    """Return the value of the first of these keys in the first source that has one, and its place for messages."""
    found = ((source[key], where + key) for source, where in sources for key in keys if key in source)
    return next(found, None)


def _spec_bench(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: must be a list with at least one text")
    first, *others = (_said(turn, f"{where}[{i}]") for i, turn in enumerate(value))
    return {"messages": ({"role": "user", "content": first},), "follow_ups": tuple(others)}


def _chat(
    value: Any, where: str, speaker: str = "role", said: str = "content", *, piece: bool = False
) -> dict[str, Any]:
    """Return the messages, and as the response the assistant's where that is the last: no prompt ends with it.

    ``piece``: drop what the assistant says before the user does.
    """
    if not isinstance(value, list) or not value:
        raise _FormatError(f"{where}: must be a list with at least one message")
    messages = []
    for i, message in enumerate(value):
        here = f"{where}[{i}]"
        if not isinstance(message, dict) or not {speaker, said} <= message.keys():
            raise _FormatError(f"{here}: must be an object with {speaker} and {said}")
        role = _text(message[speaker], f"{here}.{speaker}")
        if speaker == "from":
            if role not in _SPEAKERS:
                raise ValueError(f"{here}.{speaker} {shortened(role)}: must be one of {', '.join(_SPEAKERS)}")
            role = _SPEAKERS[role]
        elif role in ("tool", "function"):
            raise ValueError(f"{here}.{speaker} {role!r}: must be system, user or assistant")
        if calls := next((calls for calls in ("tool_calls", "function_call") if message.get(calls)), None):
            raise ValueError(f"{here}.{calls}: must be left out; a message is what system, user or assistant say")
        content = _content(message[said], f"{here}.{said}")
        messages.append({"role": role, "content": _said(content, f"{here}.{said}") if role == "user" else content})
    if piece:
        asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        messages = [each for i, each in enumerate(messages) if i >= asked or each["role"] != "assistant"]
    if messages[-1]["role"] != "assistant":
        return {"messages": tuple(messages)}
    *before, last = messages
    if not before or before[-1]["role"] == "assistant":
        raise ValueError(f"{where}: must have a message of the user before the assistant's last")
    return {"messages": tuple(before), "response": last["content"]}


def _conversation(value: Any, where: str) -> dict[str, Any]:
    """Return ShareGPT's messages, whose keys are from and value, or role and content."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict) and "role" in first:
        return _chat(value, where, piece=True)
    return _chat(value, where, "from", "value", piece=True)


def _content(value: Any, where: str) -> str:
    """Return the text of a message, which OpenAI also has in parts."""
    if not isinstance(value, list):
        return _text(value, where)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f'{where}[{i}]: type {shortened(kind)}; must be {{"type": "text", "text": "..."}}')
        texts.append(_text(part.get("text"), f"{where}[{i}].text"))
    return _text("".join(texts), where)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what}: must be a non-empty text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no tokenizer can take
        raise ValueError(f"{what}: has half a \\u escape pair; write the character itself") from error
    return value


def _said(value: Any, what: str) -> str:
    """Return what a user says, which is more than white space."""
    if not _text(value, what).strip():
        raise ValueError(f"{what}: is white space alone; must have the text of one prompt")
    return str(value)


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} {shortened(value)}: must be a whole number from 1 on")
    return value


# By the key that tells a format: what returns the fields of a prompt. The first of them that an object has counts.
_READERS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "messages": _chat,
    "prompt": lambda value, where: {"text": _said(value, where)},
    "turns": _spec_bench,
    "conversations": _conversation,
}
