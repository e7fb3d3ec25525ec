"""Between text and token ids: the tokenizer, the chat template, streaming text and stop strings."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

from sakiyomi.errors import CorruptModelError, PromptError, UnsupportedModelError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class Tokenizer:
    """A model folder's tokenizer.json with the settings around it.

    ``eos_ids``: every id that ends an answer. ``chat_template`` is None where the model has none.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        settings: Mapping[str, Any],
        eos_ids: Sequence[int],
        chat_template: str | None,
    ) -> None:
        self._fast = fast
        self._settings = settings
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self._compiled: jinja2.Template | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read a folder in Hugging Face layout. Raises UnsupportedModelError or CorruptModelError."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise UnsupportedModelError(
                f"{folder} has no tokenizer.json: save the model's tokenizer in the fast format"
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CorruptModelError(f"{path} can't be read: {error}") from None
        fast.no_truncation()
        fast.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {t["name"]: t["template"] for t in template}.get("default")
        separate = folder / "chat_template.jinja"
        if separate.exists():
            template = separate.read_text(encoding="utf-8")
        return cls(fast, settings, _eos_ids(folder, fast, settings), template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids; ``special`` adds what the model puts around a text, such as a first token."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids; ``special`` shows special tokens too."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=not special)
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat, ready for the assistant's answer. Raises PromptError."""
        if self.chat_template is None:
            raise PromptError("messages: this model has no chat template; give the prompt as text")
        if not messages:
            raise PromptError("messages: the list is empty; give at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise PromptError(f'messages[{i}]: must be like {{"role": "user", "content": "..."}}')
        if self._compiled is None:
            self._compiled = _compile(self.chat_template)
        named = {k: _token_text(self._settings.get(k)) for k in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            text = self._compiled.render(messages=messages, add_generation_prompt=True, tools=None, **named)
        except jinja2.TemplateError as error:
            raise PromptError(f"messages: the model's chat template refuses them: {error}") from None
        return self.encode(text, special=False)


class TextStream:
    """Turns token ids into text as they come, and watches for stop strings.

    Text is released as soon as it can't change any more: bytes of an unfinished character and text that may be the
    beginning of a stop string are held back.
    """

    _CONTEXT = 4  # earlier tokens decoded along: some decoders treat the first token of a text differently
    _CHARACTER = 4  # tokens that one character can take; what is still invalid then stays invalid

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt[-self._CONTEXT :])
        self._read = len(self._ids)  # tokens before this one are in the text
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token and return the text it releases. Sets ``stopped`` when a stop string is complete."""
        self._ids.append(token)
        text = self._decode()
        if text.endswith("\ufffd") and len(self._ids) - self._read < self._CHARACTER:
            return ""
        return self._release(text)

    def finish(self) -> str:
        """Return what is still held back, when no token follows."""
        text = "" if self.stopped else self._held + self._decode()
        self._held, self._read = "", len(self._ids)
        return text

    def _decode(self) -> str:
        start = max(0, self._read - self._CONTEXT)
        before = self._tokenizer.decode(self._ids[start : self._read])
        return self._tokenizer.decode(self._ids[start:])[len(before) :]

    def _release(self, text: str) -> str:
        self._read = len(self._ids)
        text = self._held + text
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptModelError(f"{path} can't be read: {error}") from None
    if not isinstance(data, dict):
        raise CorruptModelError(f"{path} must hold a JSON object")
    return data


def _token_text(token: Any) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token or ""


def _eos_ids(folder: Path, fast: FastTokenizer, settings: Mapping[str, Any]) -> list[int]:
    ids: set[int] = set()
    for source in ("generation_config.json", "config.json"):
        value = _read_json(folder / source).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break
    eos = fast.token_to_id(_token_text(settings.get("eos_token")))
    if eos is not None:
        ids.add(eos)
    return sorted(ids)


def _compile(template: str) -> jinja2.Template:
    """Compile a chat template, sandboxed, with the functions and filters that templates count on."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UnsupportedModelError(f"the model's chat template can't be compiled: {error}") from None
