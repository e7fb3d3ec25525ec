"""Text: what is streamed is what decoding gives, stop strings are found in time, templates can't do harm."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from conftest import byte_tokenizer
from sakiyomi.errors import CorruptModelError, PromptError, UnsupportedModelError
from sakiyomi.models import DEFAULT_MODEL, resolve
from sakiyomi.text import TextStream, Tokenizer

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
GPT2_CHARACTER = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}
BYTE_ID = {byte: sorted(GPT2_CHARACTER.values()).index(char) for byte, char in GPT2_CHARACTER.items()}

CHARACTERS = [
    *"ab z\n.",
    "é",
    "ß",
    "日",
    "本",
    "語",
    "が",
    "か\u3099",
    "e\u0301",
    "ก",
    "🎉",
    "👩\u200d💻",
    "🏳️\u200d🌈",
    "\ufffd",
]
BAD = [b"\xff", b"\xc3", b"\xe6\x97", b"\xf0\x9f\x8e", b"\x97", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"]


def byte_ids(data: bytes) -> list[int]:
    """Return the ids of ``byte_tokenizer`` for any bytes, valid UTF-8 or not."""
    return [BYTE_ID[byte] for byte in data]


def piece_tokenizer(*pieces: bytes) -> Tokenizer:
    """Return a tokenizer whose token i stands for these bytes, as in GPT-2's vocabulary."""
    names = ["".join(GPT2_CHARACTER[byte] for byte in piece) for piece in pieces]
    fast = FastTokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(fast, {}, [], None)


def fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer as Llama 2 has it: ▁ for a space, one token per byte for what isn't in the vocabulary."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁a": 257, "b": 258, "é": 259}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    return Tokenizer(fast, {}, [], None)


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(CHARACTERS, k=length))


def random_bytes(rng: random.Random, length: int) -> bytes:
    """Return text, broken text and noise, mixed."""
    parts = []
    for _ in range(length):
        kind = rng.random()
        if kind < 0.5:
            parts.append(rng.choice(CHARACTERS).encode())
        elif kind < 0.8:
            parts.append(rng.choice(BAD))
        else:
            parts.append(rng.randbytes(1))
    return b"".join(parts)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> str:
    stream = TextStream(tokenizer, prompt or [])
    return "".join([stream.push(token) for token in ids]) + stream.finish()


def run(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], prompt: list[int] | None = None
) -> tuple[str, int | None]:
    """Return the text and the number of tokens at which a stop string was complete, if one was."""
    stream = TextStream(tokenizer, prompt or [], stop)
    text = ""
    for count, token in enumerate(ids, start=1):
        text += stream.push(token)
        if stream.stopped:
            return text + stream.finish(), count
    return text + stream.finish(), None


def naive_run(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], prompt: list[int] | None = None
) -> tuple[str, int | None]:
    """Decode everything anew after each token, and search all of it."""
    prompt = prompt or []
    skip = len(tokenizer.decode(prompt))
    text = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(prompt + ids[:count])[skip:]
        found = [text.index(each) for each in stop if each in text]
        if found:
            return text[: min(found)], count
    return text, None


def test_the_byte_ids_of_these_tests_are_those_of_the_tokenizer(tokenizer):
    text = "".join(CHARACTERS)
    assert byte_ids(text.encode()) == tokenizer.encode(text)


@pytest.mark.parametrize("make", [random_text, random_bytes])
def test_streamed_text_is_the_decoded_text(tokenizer, make):
    """Characters are split over as many tokens as they have bytes."""
    rng = random.Random(1)
    broken = 0
    for _ in range(200):
        data = make(rng, rng.randrange(1, 60))
        ids = byte_ids(data if isinstance(data, bytes) else data.encode())
        expected = tokenizer.decode(ids)
        assert streamed(tokenizer, ids) == expected
        assert make is random_bytes or expected == data
        broken += make is random_bytes and expected.encode() != data
    assert broken > 100 or make is random_text  # the invalid ones were invalid


@pytest.mark.parametrize("make", [random_text, random_bytes])
def test_released_text_never_changes_and_is_released_as_soon_as_it_cannot(tokenizer, make):
    rng = random.Random(2)
    for _ in range(100):
        data = make(rng, 30)
        ids = byte_ids(data if isinstance(data, bytes) else data.encode())
        final = tokenizer.decode(ids)
        stream, released = TextStream(tokenizer, []), ""
        for count, token in enumerate(ids, start=1):
            released += stream.push(token)
            assert final.startswith(released)
            so_far = tokenizer.decode(ids[:count])
            assert len(released) >= len(so_far.rstrip("\ufffd"))
            assert len(released) >= len(so_far) - 16  # a model that writes only noise is seen to do so
            if not so_far.endswith("\ufffd"):
                assert released == so_far


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff\xf0\x9f\x8e\x89", "\ufffd🎉"),  # an invalid byte must not use up the patience with the next character
        (b"\xff\xff\xff\xff\xe6\x97\xa5", "\ufffd\ufffd\ufffd\ufffd日"),
        (b"\xf0\x9f\x8ea", "\ufffda"),
        (b"a\xf0\x9f\x8e", "a\ufffd"),
        (b"\xff" * 100 + b"a", "\ufffd" * 100 + "a"),
    ],
)
def test_invalid_bytes_end_up_as_decoding_gives_them(tokenizer, data, text):
    assert streamed(tokenizer, byte_ids(data)) == text


def test_an_unfinished_character_comes_with_finish(tokenizer):
    stream = TextStream(tokenizer, [])
    assert [stream.push(token) for token in byte_ids("a日".encode()[:-1])] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_give_no_text_and_break_none(tokenizer):
    eos = next(iter(tokenizer.eos_ids))
    ids = byte_ids("日".encode())
    assert streamed(tokenizer, [eos, ids[0], eos, ids[1], ids[2], eos, *byte_ids(b"b")]) == "日b"


def test_text_after_a_prompt(tokenizer):
    rng = random.Random(3)
    for _ in range(100):
        prompt, text = random_text(rng, rng.randrange(30)), random_text(rng, rng.randrange(1, 60))
        assert streamed(tokenizer, byte_ids(text.encode()), byte_ids(prompt.encode())) == text


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_character_that_the_prompt_began_comes_whole(tokenizer, split):
    """So it is when an answer that was cut by its length is continued."""
    ids = byte_ids("🎉!".encode())
    assert streamed(tokenizer, ids[split:], byte_ids(b"ab") + ids[:split]) == "🎉!"
    invalid = byte_ids(b"ab\xf0\x9f")
    assert streamed(tokenizer, byte_ids(b"c"), invalid) == "c"  # what stays invalid is the prompt's


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer):
    lengths: list[int] = []

    class Counting(Tokenizer):
        def decode(self, ids, *, special=False):
            lengths.append(len(ids))
            return super().decode(ids, special=special)

    counting = Counting(tokenizer.fast, {}, [], None)
    text = "日本語 and so on. " * 100
    assert streamed(counting, byte_ids(text.encode()), byte_ids(b"x" * 3000)) == text
    assert max(lengths[1:]) < 50  # the first is the prompt, once


class TestByteFallback:
    """Decoders like Llama 2's turn a whole run of byte tokens into U+FFFD while one character of it is unfinished."""

    def test_streamed_text_is_the_decoded_text(self):
        """Long runs too: the window of tokens that is decoded must not begin inside a character."""
        tokenizer, rng = fallback_tokenizer(), random.Random(4)
        prompts = [[], [257, 258], [257, *"本日".encode()], list("日本語の文章が長く続く".encode())]
        for _ in range(200):
            prompt = rng.choice(prompts)
            ids = []
            for _ in range(rng.randrange(1, 40)):
                ids += rng.choice([[256], [257], [258], [259], *[list(each.encode()) for each in CHARACTERS[6:]]])
            before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
            assert after.startswith(before)
            assert streamed(tokenizer, ids, prompt) == after[len(before) :]

    def test_every_character_is_released_when_its_last_byte_comes(self):
        stream = TextStream(fallback_tokenizer(), [257])
        released = [stream.push(byte) for byte in "日é🎉".encode()]
        assert released == ["", "", "日", "", "é", "", "", "", "🎉"]

    def test_the_first_space_after_a_prompt_stays(self):
        """Decoding alone takes the space from the first token; after a prompt it is part of the answer."""
        assert fallback_tokenizer().decode([257]) == "a"
        assert streamed(fallback_tokenizer(), [257, 257], [258]) == " a a"
        assert streamed(fallback_tokenizer(), [257, 257]) == "a a"

    def test_invalid_bytes_raise_nothing_and_harm_no_text_around_them(self):
        tokenizer, rng = fallback_tokenizer(), random.Random(5)
        for _ in range(200):
            assert streamed(tokenizer, list(random_bytes(rng, 20)))
        found = streamed(tokenizer, [*"x日".encode(), 255, 257, *"日".encode(), 258])
        assert found.startswith("x日")
        assert found.endswith(" a日b")


PIECES = (b"a", b"b", b"ab", b"aab", b"ba", b" ", b"aab ", "é".encode(), b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xff")
STOPS = ["a", "b", "aab", "ab", "aaab", "bab", "é", "aé", "éb", "b ", "aaaaa", "ba b"]


def test_stop_strings_against_searching_everything():
    """Over tokens of several characters and of parts of one, with one to three stop strings that overlap."""
    tokenizer, rng = piece_tokenizer(*PIECES), random.Random(6)
    found = 0
    for _ in range(3000):
        ids = rng.choices(range(len(PIECES)), k=rng.randrange(1, 14))
        prompt = rng.choices(range(6), k=rng.randrange(4))
        stop = rng.sample(STOPS, rng.randrange(1, 4))
        expected = naive_run(tokenizer, ids, stop, prompt)
        assert run(tokenizer, ids, stop, prompt) == expected, (prompt, ids, stop)
        found += expected[1] is not None
    assert 500 < found < 2900  # both outcomes were met often


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "at"),
    [
        (["one st", "op two"], ["stop"], "one ", 2),  # over a border
        (["one ", "st", "o", "p"], ["stop"], "one ", 4),
        (["one stop two", "x"], ["stop"], "one ", 1),  # inside a token
        (["a", "a", "a", "b"], ["aab"], "a", 4),  # the held-back beginning begins again
        (["stop"], ["stop"], "", 1),  # all of the output
        (["st", "op"], ["stop"], "", 2),
        (["st", "ill"], ["stop"], "still", None),  # held back, then released
        (["one st"], ["stop"], "one st", None),  # held back to the end
        (["a", "b", "c"], ["xyz", "bc", "c"], "a", 3),  # several: the one that begins first
        (["a", "b", "c"], ["abcd", "b"], "a", 2),  # several: the one that is complete first
        (["日", "本", "語"], ["本語"], "日", 3),
        (["a\n", "\nb"], ["\n\n"], "a", 2),
    ],
)
def test_stop_string(pieces, stop, text, at):
    tokenizer = piece_tokenizer(*[piece.encode() for piece in dict.fromkeys(pieces)])
    ids = [list(dict.fromkeys(pieces)).index(piece) for piece in pieces]
    assert run(tokenizer, ids, stop) == (text, at)


def test_a_stop_string_is_found_where_a_character_begins_in_the_same_token():
    assert run(piece_tokenizer(b"x STOP\xf0\x9f", b"\x8e\x89"), [0, 1], ["STOP"]) == ("x ", 1)


def test_only_what_may_begin_a_stop_string_is_held_back():
    stream = TextStream(piece_tokenizer(b"one s", b"t", b"r", b"st"), [], ["stop"])
    assert [stream.push(token) for token in (0, 1, 2, 3)] == ["one ", "", "str", ""]
    assert stream.finish() == "st"
    assert not stream.stopped


def test_a_stop_string_in_the_prompt_is_none_in_the_output():
    assert run(piece_tokenizer(b"st", b"op"), [1], ["stop"], [0]) == ("op", None)


def test_nothing_follows_a_stop_string():
    stream = TextStream(piece_tokenizer(b"a stop b"), [], ["stop"])
    assert stream.push(0) == "a "
    assert stream.stopped
    assert stream.finish() == ""


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_folder(resolve(DEFAULT_MODEL, progress=False))


@pytest.mark.model
def test_real_tokenizer_streams_what_it_decodes(real):
    rng = random.Random(7)
    for _ in range(200):
        prompt, text = random_text(rng, rng.randrange(20)), random_text(rng, rng.randrange(1, 40))
        assert streamed(real, real.encode(text), real.encode(prompt)) == text
        ids = [rng.randrange(49152) for _ in range(rng.randrange(1, 60))]
        assert streamed(real, ids) == real.decode(ids)


@pytest.mark.model
def test_real_tokenizer_finds_stop_strings(real):
    rng = random.Random(8)
    for _ in range(300):
        ids = real.encode(random_text(rng, 12))
        stop = [random_text(rng, rng.randrange(1, 3)).replace("\ufffd", "a") for _ in range(2)]
        assert run(real, ids, stop) == naive_run(real, ids, stop), (ids, stop)
    party = real.encode(" 🎉")
    assert real.decode(party[:1]) == " \ufffd"
    assert run(real, party, [" "]) == ("", 1)


def rendered(template: str, messages: object = None, **settings: str) -> str:
    """Return what a template makes of messages."""
    tokenizer = byte_tokenizer(template=template)
    tokenizer._settings = settings
    return tokenizer.decode(tokenizer.encode_chat(messages or [{"role": "user", "content": "Hi"}]))


CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本の川を三つ。 🎉"}],
    [
        {"role": "user", "content": "  Two spaces,\n\na blank line\n"},
        {"role": "assistant", "content": "Yes. <b>&amp;</b> {{ x }}"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "<|im_end|> is a token."},
        {"role": "user", "content": "Go on"},
    ],
    [{"role": "assistant", "content": "I begin."}],
]


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_chat_is_encoded_as_transformers_does(real, messages):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(resolve(DEFAULT_MODEL, progress=False))
    assert real.encode_chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n    {% if loop.first %}\n 1{% endif %}\n[{{ m['content'] }}]\n{% endfor %}\n",
        "{{ bos_token }}{% if add_generation_prompt %}A:{% endif %}{{ eos_token }}",
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ {'b': '日<', 'a': 1} | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}",
        "{% for i in 'abcd' %}{% if i == 'a' %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}",
        "{% macro show(m) %}<{{ m.content | trim | upper }}>{% endmacro %}{{ show(messages[0]) }}",
        "{{ tools is none }} {{ documents is none }} {{ something is defined }}",
        "{%- if tools -%} tools {%- else -%} none {%- endif -%}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_a_template_is_rendered_as_transformers_does(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in CONVERSATIONS[1:3]:
        named = {"bos_token": "<s>", "eos_token": "</s>"}
        (expected,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **named)
        assert rendered(template, messages, **named) == expected


def test_special_tokens_of_a_template_come_from_the_settings():
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    assert rendered("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", **settings) == "<s>||"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template):
    with pytest.raises(PromptError, match="chat template refuses"):
        rendered(template)


def test_a_template_can_refuse_messages():
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}ok"
    assert rendered(template) == "ok"
    with pytest.raises(PromptError, match="chat template refuses them: must begin with user"):
        rendered(template, [{"role": "system", "content": "x"}])


@pytest.mark.parametrize("content", [None, 3, ["a"], {"type": "text"}])
def test_content_that_a_template_cannot_use_is_a_prompt_error(content):
    with pytest.raises(PromptError, match="chat template refuses them: "):
        rendered("{{ '<' + messages[0].content + '>' }}", [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ messages", "{% nonsense %}", "{{ x | nonsense }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30],
)
def test_a_template_that_does_not_compile_is_an_unsupported_model(template):
    with pytest.raises(UnsupportedModelError, match="chat template can't be compiled: "):
        rendered(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: the list is empty"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\]: must be like"),
        ([{"content": "a"}], r"messages\[0\]: must be like"),
        (["Hi"], r"messages\[0\]: must be like"),
        ({"role": "user", "content": "a"}, r"messages\[0\]: must be like"),
        ([{"role": "user", "content": "half a pair: \ud83d"}], "prompt: isn't valid Unicode"),
    ],
)
def test_messages_that_cannot_work_are_named(messages, message):
    tokenizer = byte_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(PromptError, match=message):
        tokenizer.encode_chat(messages)


def test_without_a_template_there_is_no_chat(tokenizer):
    with pytest.raises(PromptError, match="no chat template; give the prompt as text"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_text_that_is_not_unicode_is_a_prompt_error(tokenizer):
    with pytest.raises(PromptError, match="prompt: isn't valid Unicode"):
        tokenizer.encode("arguments that aren't UTF-8 look like this: \udcff")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer.json and nothing else."""
    byte_tokenizer().fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def test_a_tokenizer_alone_is_enough(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("日本")) == "日本"
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"generation_config": {"eos_token_id": [7, 9]}}, {7, 9}),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 8}}, {0}),
        ({"generation_config": {}, "config": {"eos_token_id": 8}}, {8}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [8, 9]}}, {8, 9}),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, {256}),
        ({"tokenizer_config": {"eos_token": {"content": "<eos>"}}, "config": {"eos_token_id": 8}}, {8, 256}),
        ({"tokenizer_config": {"eos_token": "no such token"}}, set()),
        ({"tokenizer_config": {"eos_token": None}}, set()),
    ],
)
def test_where_the_ends_of_an_answer_come_from(folder, files, eos_ids):
    write(folder, **files)
    assert Tokenizer.from_folder(folder).eos_ids == eos_ids


def test_where_the_chat_template_comes_from(folder):
    write(folder, tokenizer_config={"chat_template": "settings"})
    assert Tokenizer.from_folder(folder).chat_template == "settings"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    write(folder, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_template == "named"
    write(folder, tokenizer_config={"chat_template": named[:1]})
    assert Tokenizer.from_folder(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("日本の file", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "日本の file"


def test_settings_of_the_tokenizer_do_not_shorten_or_fill_up(folder):
    """tokenizer.json may hold the truncation and padding of somebody's training."""
    fast = byte_tokenizer().fast
    fast.enable_truncation(3)
    fast.enable_padding(length=50)
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("ten bytes.")) == 10


def test_what_a_model_puts_around_a_text_can_be_left_out(folder):
    from tokenizers import processors

    fast = byte_tokenizer().fast
    fast.post_processor = processors.TemplateProcessing(single="<eos> $0", special_tokens=[("<eos>", 256)])
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    text = byte_ids(b"ab")
    assert tokenizer.encode("ab") == [256, *text]
    assert tokenizer.encode("ab", special=False) == text
    assert tokenizer.decode([256, *text]) == "ab"
    assert tokenizer.decode([256, *text], special=True) == "<eos>ab"
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == text  # a template brings its own


def test_no_tokenizer_is_an_unsupported_model(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"version": "1.0", "model": '),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"eos_token": '),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"eos_token": "\xff"}'),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}, 5]}'.replace(b'"}', b'", "template": 5}')),
        ("generation_config.json", b'{"eos_token_id": "</s>"}'),
        ("config.json", b'{"eos_token_id": [2, "</s>"]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_garbled_file_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(CorruptModelError) as raised:
        Tokenizer.from_folder(folder)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_alphabet_is_the_one_of_the_library():
    assert sorted(GPT2_CHARACTER.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
