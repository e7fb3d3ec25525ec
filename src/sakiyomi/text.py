"""Between text and token ids: the tokenizer, the chat template, streaming text and stop strings."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

from sakiyomi.errors import CorruptModelError, PromptError, UnsupportedModelError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class Tokenizer:
    """A model folder's tokenizer.json with the settings around it.

    ``fast``: the tokenizer itself, of the tokenizers package. ``eos_ids``: every id that ends an answer.
    ``chat_template`` is None where the model has none.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        settings: Mapping[str, Any],
        eos_ids: Sequence[int],
        chat_template: str | None,
    ) -> None:
        self.fast = fast
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
        return cls(fast, settings, _eos_ids(folder, fast, settings), _chat_template(folder, settings))

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens and how texts become them: the same for tokenizers that encode alike."""
        return hashlib.sha256(self.fast.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids; ``special`` adds what the model puts around a text, such as a first token.

        Raises PromptError for text that isn't valid Unicode.
        """
        try:
            ids: list[int] = self.fast.encode(text, add_special_tokens=special).ids
        except TypeError:  # what the library makes of half a surrogate pair: JSON escapes and arguments can hold one
            raise PromptError("prompt: isn't valid Unicode text; encode it as UTF-8") from None
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids; ``special`` shows special tokens too."""
        text: str = self.fast.decode(list(ids), skip_special_tokens=not special)
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
            text = self._compiled.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **named
            )
        except Exception as error:  # a template is a program: "a" + None raises TypeError, and so on
            raise PromptError(f"messages: the model's chat template refuses them: {error}") from None
        return self.encode(text, special=False)


class TextStream:
    """Turns token ids into text as they come, and watches for stop strings.

    Text is released as soon as it can't change any more: an unfinished character and text that may be the beginning
    of a stop string are held back. Together it is what decoding all ids at once gives, but for tokenizers that decode
    a run of byte tokens to something else once an invalid byte follows.
    """

    _WINDOW = 32  # tokens that are decoded again with every new one; more while no character is complete
    _CONTEXT = 16  # of these, the ones that stay: some decoders treat the first token of a text differently
    _UNFINISHED = 3  # most bytes, so most tokens, of an unfinished character
    _PATIENCE = 16  # most U+FFFD at the end that may become something else

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._begin_after(list(prompt), tokenizer.decode(prompt))
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token and return the text it releases. Sets ``stopped`` when a stop string is complete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        final = text[: max(len(text.rstrip("\ufffd")), len(text) - self._PATIENCE)]
        if final != text and not final.startswith(self._seen):
            return ""  # bytes that change what the bytes before them decode to, until a character is complete
        released = self._release(final)
        if final == text and len(self._ids) > self._WINDOW:
            self._begin_after(self._ids, text)
        return released

    def finish(self) -> str:
        """Return what is still held back, when no token follows."""
        text = "" if self.stopped else self._release(self._tokenizer.decode(self._ids)) + self._held
        self._held = ""
        return text

    def _begin_after(self, ids: list[int], text: str) -> None:
        """Take these ids, whose text this is, as seen; keep the last ones, not beginning inside a character."""
        for count in range(self._CONTEXT, self._CONTEXT + self._UNFINISHED + 1):
            self._ids = ids[-count:]
            self._seen = self._tokenizer.decode(self._ids)
            if self._seen and text.endswith(self._seen):
                return

    def _release(self, seen: str) -> str:
        """Return what can be released when the text of the window is final so far."""
        text = self._held + seen[_same(self._seen, seen) :]
        self._seen = seen
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _same(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


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
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} can't be read: {error}") from None
    if not isinstance(data, dict):
        raise CorruptModelError(f"{path} must hold a JSON object")
    return data


def _token_text(token: Any) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        try:
            return separate.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CorruptModelError(f"{separate} can't be read: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each {"name": ..., "template": ...}
        named = [each for each in template if isinstance(each, Mapping) and each.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CorruptModelError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text or named texts")
    return template


def _eos_ids(folder: Path, fast: FastTokenizer, settings: Mapping[str, Any]) -> list[int]:
    ids: set[int] = set()
    for source in ("generation_config.json", "config.json"):
        value = _read_json(folder / source).get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(each, int) for each in values):
                raise CorruptModelError(f"{folder / source}: eos_token_id={value!r} must be an id or a list of ids")
            ids.update(values)
            break
    eos = fast.token_to_id(_token_text(settings.get("eos_token")))
    if eos is not None:
        ids.add(eos)
    return sorted(ids)


def _compile(template: str) -> jinja2.Template:
    """Compile a chat template, sandboxed, with the functions and filters that templates count on."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except Exception as error:  # not only jinja's: too deep a nesting is Python's SyntaxError
        raise UnsupportedModelError(f"the model's chat template can't be compiled: {error}") from None


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, with which templates mark what a model is trained to write; here just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements up to ``{% endgeneration %}``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
