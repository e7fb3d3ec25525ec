"""The workload reader: every format that prompts come in, what it says of bad ones, and that none is lost unseen."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sakiyomi.bench.workload import Prompt, Workload, builtin_workload, load_workload, read_workload
from sakiyomi.errors import OptionError

GOOD = {"id": "a", "prompt": "text"}
HI = {"role": "user", "content": "hi"}


def write(path: Path, *entries: Any) -> Path:
    """A file of JSON lines; text and bytes are lines as they are."""
    lines = [each if isinstance(each, str | bytes) else json.dumps(each) for each in entries]
    path.write_bytes(b"\n".join(each.encode() if isinstance(each, str) else each for each in lines) + b"\n")
    return path


def one(tmp_path: Path, entry: Any) -> Prompt:
    (prompt,) = load_workload(write(tmp_path / "w.jsonl", entry))
    return prompt


def user(*texts: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": "user", "content": text} for text in texts)


# ---------------------------------------------------------------- formats


def test_a_prompt_alone_has_nothing_recorded_no_limit_and_no_follow_ups(tmp_path):
    """What users of the reader count on for files that are older than these fields."""
    assert one(tmp_path, {"prompt": "x"}) == Prompt("1", "all", (), "x", None, None, ())
    assert one(tmp_path, {"messages": [HI]}) == Prompt("1", "all", user("hi"))
    assert all(each.response is each.max_tokens is None and not each.follow_ups for each in builtin_workload())


@pytest.mark.parametrize("entry", [{"prompt": "x"}, {"messages": [HI]}, {"turns": ["x"]}])
def test_a_response_and_a_limit_are_read_and_null_is_none(tmp_path, entry):
    found = one(tmp_path, {**entry, "response": "yes", "max_tokens": 7})
    assert (found.response, found.max_tokens) == ("yes", 7)
    found = one(tmp_path, {**entry, "response": None, "max_tokens": None})
    assert (found.response, found.max_tokens) == (None, None)


def test_spec_bench_asks_the_first_turn_and_keeps_the_others_in_order(tmp_path):
    line = {"question_id": 81, "category": "writing", "turns": ["one", "two", "three"], "reference": ["x"]}
    assert one(tmp_path, line) == Prompt("81", "writing", user("one"), follow_ups=("two", "three"))
    assert one(tmp_path, {"turns": ["one"]}) == Prompt("1", "all", user("one"))


@pytest.mark.parametrize("other", [{"turns": ["t"]}, {"turns": 2}, {"conversations": []}, {"body": "some text"}])
def test_messages_and_prompts_win_over_keys_of_other_formats(tmp_path, other):
    """Files of prompts have columns of any name, which were ignored before these formats were read."""
    assert one(tmp_path, {**other, "prompt": "x"}) == Prompt("1", "all", text="x")
    assert one(tmp_path, {**other, "messages": [HI]}) == Prompt("1", "all", user("hi"))
    assert one(tmp_path, {**other, "prompt": "x", "messages": [HI]}) == Prompt("1", "all", user("hi"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [HI], "max_tokens": 100}, Prompt("r1", "all", user("hi"), max_tokens=100)),
        ({"messages": [HI], "max_completion_tokens": 50}, Prompt("r1", "all", user("hi"), max_tokens=50)),
        (
            {"messages": [HI], "max_tokens": 9, "max_completion_tokens": 5},
            Prompt("r1", "all", user("hi"), max_tokens=5),
        ),
        ({"messages": [HI], "max_tokens": None}, Prompt("r1", "all", user("hi"))),
        ({"prompt": "Once", "max_tokens": 3}, Prompt("r1", "all", text="Once", max_tokens=3)),
    ],
)
def test_an_openai_batch_is_read_as_its_requests(tmp_path, body, expected):
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **body}}
    assert one(tmp_path, line) == expected


def test_a_response_and_a_limit_may_be_in_a_request_or_beside_it(tmp_path):
    """A measurement of recorded traffic would be without them, and nobody would see it."""
    beside = {"response": "outer", "max_tokens": 9}
    found = one(tmp_path, {"body": {"prompt": "x"}, **beside})
    assert (found.response, found.max_tokens) == ("outer", 9)
    found = one(tmp_path, {"body": {"prompt": "x", "response": "inner", "max_tokens": 5}, **beside})
    assert (found.response, found.max_tokens) == ("inner", 5)
    found = one(tmp_path, {"body": {"prompt": "x", "response": None, "max_completion_tokens": 4}, **beside})
    assert (found.response, found.max_tokens) == ("outer", 4)


@pytest.mark.parametrize(
    "nulls",
    [
        {"messages": None},
        {"id": None},
        {"question_id": None},
        {"category": None},
        {"turns": None, "conversations": None, "body": None},
    ],
    ids=str,
)
def test_a_null_is_like_a_key_that_isnt_there(tmp_path, nulls):
    """Files that were made from columns have every key in every line."""
    assert one(tmp_path, {**nulls, "prompt": "x"}) == Prompt("1", "all", text="x")
    assert one(tmp_path, {**nulls, "custom_id": "c", "prompt": "x"}).id == "c"
    assert one(tmp_path, {"prompt": None, "body": {"messages": None, "prompt": "x"}}) == Prompt("1", "all", text="x")


def test_a_conversation_that_ends_with_the_assistant_is_a_prompt_and_its_response(tmp_path):
    """Else the model would be asked to go on after an answer: what a fine-tuning export has isn't meant so."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "A."},
        {"role": "user", "content": "b?"},
    ]
    answered = {"messages": [*messages, {"role": "assistant", "content": "B."}]}
    expected = Prompt("1", "all", tuple(messages), response="B.")
    assert one(tmp_path, answered) == expected
    assert one(tmp_path, {"body": answered}) == expected
    assert one(tmp_path, {"messages": messages}) == Prompt("1", "all", tuple(messages))


@pytest.mark.parametrize("human", ["human", "user"])
@pytest.mark.parametrize("gpt", ["gpt", "assistant", "chatgpt", "model"])
def test_sharegpt_speakers_become_roles(tmp_path, human, gpt):
    said = [("system", "s"), (human, "a"), (gpt, "A"), (human, "b"), (gpt, "B")]
    line = {"id": "x_0", "conversations": [{"from": speaker, "value": text} for speaker, text in said]}
    roles = ["system", "user", "assistant", "user"]
    messages = tuple({"role": role, "content": text} for role, (_, text) in zip(roles, said, strict=False))
    assert one(tmp_path, line) == Prompt("x_0", "all", messages, response="B")


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_a_piece_of_a_conversation_begins_where_the_user_speaks(tmp_path, keys):
    """Chat templates refuse an assistant that speaks first, and half of ShareGPT is pieces that begin so."""
    said = [("system", "s"), ("assistant", "A"), ("user", "b"), ("assistant", "B"), ("user", "c"), ("assistant", "C")]
    line = {"conversations": [dict(zip(keys, each, strict=True)) for each in said]}
    kept = ({"role": role, "content": text} for role, text in (said[0], *said[2:5]))
    assert one(tmp_path, line) == Prompt("1", "all", tuple(kept), response="C")
    assert one(tmp_path, {"conversations": line["conversations"][2:3]}) == Prompt("1", "all", user("b"))


def test_tools_that_nobody_uses_are_no_matter(tmp_path):
    """Exports have the keys in every line."""
    messages = [HI, {"role": "assistant", "content": "x", "tool_calls": [], "function_call": None}]
    assert one(tmp_path, {"body": {"messages": messages, "tools": []}}).response == "x"


def test_content_in_parts_is_joined(tmp_path):
    parts = [{"type": "text", "text": "Read "}, {"type": "text", "text": "this."}]
    found = one(tmp_path, {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]})
    assert found == Prompt("1", "all", user("Read this."), response="Read this.")


def test_roles_that_some_chat_templates_have_stay_as_they_are(tmp_path):
    messages = ({"role": "developer", "content": "x"}, HI)
    assert one(tmp_path, {"messages": messages}).messages == messages


# ---------------------------------------------------------------- ids


def test_ids_are_taken_from_the_first_key_that_has_one(tmp_path):
    """Results are matched with lines by them: an id that changes with the key's order would break that."""
    ids = {"custom_id": "c", "question_id": 81, "id": 0}
    assert one(tmp_path, {**ids, "prompt": "x"}).id == "0"
    del ids["id"]
    assert one(tmp_path, {**ids, "prompt": "x"}).id == "81"
    del ids["question_id"]
    assert one(tmp_path, {**ids, "prompt": "x"}).id == "c"


def test_without_an_id_the_number_of_the_line_counts_blank_ones(tmp_path):
    path = write(tmp_path / "w.jsonl", "", {"prompt": "x"}, " ", {"prompt": "y"})
    assert [prompt.id for prompt in load_workload(path)] == ["2", "4"]


def test_an_id_that_is_there_twice_names_both_lines(tmp_path):
    path = write(tmp_path / "w.jsonl", {"id": 3, "prompt": "x"}, {"prompt": "y"}, {"prompt": "z"})
    numbered = "the id '3' is there twice (a line without an id has its number); every id must be different, and line 1"
    with pytest.raises(OptionError, match=rf"w\.jsonl, line 3: {re.escape(numbered)} has it$"):
        read_workload(path)
    found = read_workload(path, skip_bad=True)
    assert [(prompt.id, prompt.text) for prompt in found.prompts] == [("3", "x"), ("2", "y")]
    assert found.bad == (f"line 3: {numbered} has it",)
    path = write(tmp_path / "w.jsonl", {"prompt": "x"}, {"id": 1, "prompt": "y"})
    with pytest.raises(OptionError, match=r"the id '1' is there twice \(a line without an id has its number\); "):
        read_workload(path)
    path = write(tmp_path / "w.jsonl", GOOD, GOOD)
    with pytest.raises(OptionError, match="line 2: the id 'a' is there twice; every id must be different, and line 1"):
        read_workload(path)


# ---------------------------------------------------------------- sources


def test_a_workload_has_the_name_of_its_source(tmp_path):
    path = write(tmp_path / "w.jsonl", GOOD)
    assert read_workload(str(path)) == Workload(str(path), (Prompt("a", "all", text="text"),), ())
    assert read_workload(path).prompts == load_workload(path)


def test_a_json_array_is_read_entry_by_entry(tmp_path):
    path = tmp_path / "w.json"
    entries = [{"prompt": "x"}, {"turns": ["y"], "id": "b"}, 3, {"id": "c"}]
    path.write_bytes(b"\xef\xbb\xbf\r\n " + json.dumps(entries[:2], indent=2).encode())
    assert load_workload(path) == (Prompt("1", "all", text="x"), Prompt("b", "all", user("y")))
    path.write_text(json.dumps(entries))
    with pytest.raises(OptionError, match=r"w\.json, entry 3: not a JSON object; each entry must be like"):
        load_workload(path)
    found = read_workload(path, skip_bad=True)
    assert len(found.prompts) == 2
    assert [each.partition(":")[0] for each in found.bad] == ["entry 3", "entry 4"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'[\n{"prompt": "x"},\n{"prompt" "y"}]', r"must be one JSON array, but is not JSON \(.*, line 3\)"),
        (b'["x"]\n{"prompt": "y"}', r"must be one JSON array, but is not JSON \(Extra data, line 2\)"),
        (b"[" * 100_000, r"must be one JSON array, but is not JSON \(.*recursion"),
        (b'["\xff"]', r"must be one JSON array, but is not UTF-8 \(byte 3\)"),
        (b" [] ", "has no prompts; each entry must be like"),
    ],
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_broken_array_is_no_workload_even_where_bad_entries_are_skipped(tmp_path, data, problem, skip_bad):
    path = tmp_path / "w.json"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=rf"^workload .*w\.json: .*{problem}"):
        read_workload(path, skip_bad=skip_bad)


def folder(root: Path) -> Path:
    texts = {"b.txt": "B\r\n", "a.md": "# A", "chat/x.txt": "先読み", "chat/deep/y.TXT": "Y", "notes.json": "{}"}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def test_a_folder_has_a_plain_prompt_for_each_text_file_in_the_order_of_their_names(tmp_path):
    """The text to the byte, since what is measured depends on it."""
    (folder(tmp_path) / "a.md").write_bytes(b"\xef\xbb\xbf# A")
    assert load_workload(tmp_path) == (
        Prompt("a.md", "all", text="# A"),
        Prompt("b.txt", "all", text="B\r\n"),
        Prompt("chat/deep/y.TXT", "deep", text="Y"),
        Prompt("chat/x.txt", "chat", text="先読み"),
    )


def test_names_that_begin_with_a_dot_are_no_prompts(tmp_path):
    """Notes of editors and of git would be measured."""
    folder(tmp_path)
    for name in (".hidden.txt", ".git/x.md", "chat/.deep/y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no prompt")
    assert [each.id for each in load_workload(tmp_path)] == ["a.md", "b.txt", "chat/deep/y.TXT", "chat/x.txt"]


def test_a_link_to_a_folder_is_not_left_out_unseen(tmp_path):
    inner = folder(tmp_path / "in")
    (tmp_path / "out").mkdir()
    try:
        (inner / "chat" / "more").symlink_to(tmp_path / "out", target_is_directory=True)
        (inner / ".hidden").symlink_to(tmp_path / "out", target_is_directory=True)
        (inner / "z.txt").symlink_to(inner / "b.txt")
    except OSError:
        pytest.skip("no links here")
    with pytest.raises(OptionError, match="file 'chat/more': is a link to a folder, and not followed; put the folder"):
        load_workload(inner)
    found = read_workload(inner, skip_bad=True)
    assert [each.id for each in found.prompts] == ["a.md", "b.txt", "chat/deep/y.TXT", "chat/x.txt", "z.txt"]
    assert len(found.bad) == 1


def test_bad_files_of_a_folder_are_named(tmp_path):
    folder(tmp_path)
    (tmp_path / "c.txt").write_bytes("Zürich".encode("latin-1"))
    with pytest.raises(OptionError, match=r"file 'c\.txt': not UTF-8 \(byte 2\); save the file as UTF-8"):
        load_workload(tmp_path)
    (tmp_path / "chat" / "empty.md").write_bytes(b"\xef\xbb\xbf \n")
    found = read_workload(tmp_path, skip_bad=True)
    assert len(found.prompts) == 4
    assert found.bad == (
        "file 'c.txt': not UTF-8 (byte 2); save the file as UTF-8",
        "file 'chat/empty.md': is empty; must have the text of one prompt",
    )


def test_a_link_to_nowhere_is_not_left_out_unseen(tmp_path):
    try:
        (folder(tmp_path) / "z.txt").symlink_to("nowhere")
    except OSError:
        pytest.skip("no links here")
    with pytest.raises(OptionError, match=r"file 'z\.txt': can't be read \(No such file.*must be a text file"):
        load_workload(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux only")
def test_a_file_whose_name_is_not_utf8_is_named(tmp_path):
    """Archives from elsewhere have such; as an id it could neither be printed nor written."""
    with open(os.fsencode(tmp_path) + b"/\xff\n.txt", "wb") as file:
        file.write(b"x")
    with pytest.raises(OptionError, match="its name is not UTF-8; rename it") as caught:
        load_workload(tmp_path)
    assert str(caught.value).encode("utf-8").count(b"\n") == 0


def test_a_folder_inside_that_cant_be_read_is_not_left_out_unseen(tmp_path, monkeypatch):
    """Files of it would be missing from the measurement. As root nothing is refused, hence the stand-in."""
    denied = folder(tmp_path) / "chat"
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) == denied:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OptionError, match=rf"can't be read \({re.escape(str(denied))}: Permission denied\)"):
        load_workload(tmp_path)


def test_a_folder_without_text_files_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(
        OptionError, match=r"can't be read \(a folder without \.txt and \.md files\); must be a file of"
    ):
        load_workload(tmp_path)


def stdin(monkeypatch: pytest.MonkeyPatch, *entries: Any) -> None:
    data = "\n".join(json.dumps(each) for each in entries).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), closed=False))


def test_a_dash_is_standard_input(monkeypatch, tmp_path):
    """Its bytes: as text it would be in the terminal's encoding."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "-", GOOD, GOOD)
    stdin(monkeypatch, {"prompt": "先読み"})
    assert read_workload("-") == Workload("standard input", (Prompt("1", "all", text="先読み"),))
    stdin(monkeypatch, GOOD, {"prompt": ""})
    with pytest.raises(OptionError, match=r"^workload standard input, line 2: prompt: must be a non-empty text"):
        read_workload(Path("-"))


@pytest.mark.parametrize("closed", [None, SimpleNamespace(closed=True)])
def test_standard_input_that_is_closed_is_named(monkeypatch, closed):
    monkeypatch.setattr(sys, "stdin", closed)
    with pytest.raises(OptionError, match=r"standard input: can't be read \(it is closed\); .*- for standard input"):
        load_workload("-")


# ---------------------------------------------------------------- bad input


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\x00\x01\x02", r"not JSON \(.*\); each line must be like .*Spec-Bench, ShareGPT or an OpenAI batch"),
        (b"\x89PNG\r\x1a", r"not UTF-8 \(byte 1\); save the file as UTF-8"),
        ("{", r"not JSON \([^,]*\); each line must be like"),  # an object over many lines
        ('{"prompt": "x", "id": ' + "9" * 5000 + "}", r"not JSON \(Exceeds the limit"),
        ({"prompt": "x", "id": float("nan")}, "id nan: must be a text or a number"),
        ({"prompt": "x", "id": 1.5}, r"id 1\.5: must be a text or a number"),
        ({"prompt": "x", "id": True}, "id True: must be a text or a number"),
        ({"prompt": "x", "id": ""}, "id '': must be a text or a number"),
        ({"prompt": "x", "question_id": [1]}, r"question_id \[1\]: must be a text or a number"),
        ({"prompt": "x", "custom_id": "\ud800"}, "custom_id: has half a .* escape pair"),
        ({"prompt": "x", "category": ""}, "category '': must be a text"),
        ({"prompt": "x", "category": "\udfff"}, "category: has half a .* escape pair"),
        ({"prompt": "x", "response": ""}, "response: must be a non-empty text"),
        ({"prompt": "x", "response": {"body": {}}}, "response: must be a non-empty text"),
        ({"prompt": "x", "response": "\ud800"}, "response: has half a .* escape pair"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens 0: must be a whole number from 1 on"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens True: must be a whole number"),
        ({"prompt": "x", "max_tokens": 2.0}, r"max_tokens 2\.0: must be a whole number"),
        ({"prompt": "x", "max_tokens": float("nan")}, "max_tokens nan: must be a whole number"),
        ({"prompt": "x", "max_tokens": "9"}, "max_tokens '9': must be a whole number"),
        ({"prompt": ["x"]}, "prompt: must be a non-empty text"),
        ({"turns": []}, "turns: must be a list with at least one text"),
        ({"turns": "one"}, "turns: must be a list with at least one text"),
        ({"turns": ["one", None]}, r"turns\[1\]: must be a non-empty text"),
        ({"turns": ["one", "\ud800"]}, r"turns\[1\]: has half a .* escape pair"),
        ({"body": "text"}, "body: must be an object with messages or prompt"),
        ({"body": {"input": "text"}}, "body: must be an object with messages or prompt"),
        ({"body": {"body": {"prompt": "x"}}}, "body: must be an object with messages or prompt"),
        ({"body": {"prompt": ""}}, r"body\.prompt: must be a non-empty text"),
        ({"body": {"messages": []}}, r"body\.messages: must be a list with at least one message; each line must be"),
        ({"body": {"prompt": "x", "max_tokens": 0}}, r"body\.max_tokens 0: must be a whole number"),
        ({"body": {"prompt": "x", "max_completion_tokens": 0}}, r"body\.max_completion_tokens 0: must be a whole"),
        ({"conversations": {}}, "conversations: must be a list with at least one message; each line must be like"),
        ({"conversations": ["hi"]}, r"conversations\[0\]: must be an object with from and value"),
        ({"conversations": [{"role": "user", "value": "x"}]}, r"\[0\]: must be an object with role and content"),
        ({"prompt": None}, "has neither messages nor prompt; each line must be like"),
        ({"prompt": " \n"}, "prompt: is white space alone; must have the text of one prompt"),
        ({"turns": ["x", "\t"]}, r"turns\[1\]: is white space alone"),
        (chat({"role": "user", "content": " "}), r"messages\[0\]\.content: is white space alone"),
        ({"body": {"prompt": "x"}, "max_tokens": 0}, r"(?<=: )max_tokens 0: must be a whole number"),
        ({"body": {"prompt": "x"}, "response": ""}, r"(?<=: )response: must be a non-empty text"),
        ({"body": {**chat(HI), "tools": [{}]}}, r"body\.tools: must be left out; a prompt is what system, user and"),
        ({"body": {**chat(HI), "functions": [{}]}}, r"body\.functions: must be left out; a prompt is"),
        (
            chat(HI, {"role": "assistant", "content": None, "tool_calls": [{}]}),
            r"messages\[1\]\.tool_calls: must be left out; a message is what system, user or assistant say",
        ),
        (chat(HI, {"role": "assistant", "content": "x", "function_call": {}, "tool_calls": [1]}), "tool_calls: must"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, r"\[0\]\.from 'tool': must be one of human, user, .*gpt"),
        ({"conversations": [{"from": None, "value": "x"}]}, r"conversations\[0\]\.from: must be a non-empty text"),
        ({"conversations": [{"from": "human", "value": ""}]}, r"conversations\[0\]\.value: must be a non-empty text"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "conversations: must have a message of the user before"),
        (chat("hi"), r"messages\[0\]: must be an object with role and content"),
        (chat({"from": "human", "value": "x"}), r"messages\[0\]: must be an object with role and content"),
        (chat({"role": "assistant", "content": "x"}), "messages: must have a message of the user before the assistant"),
        (chat(HI, *[{"role": "assistant", "content": "x"}] * 2), "messages: must have a message of the user before"),
        (chat(HI, {"role": "tool", "content": "x"}), r"messages\[1\]\.role 'tool': must be system, user or assistant"),
        (chat(HI, {"role": "function", "content": "x"}), r"messages\[1\]\.role 'function': must be system, user or"),
        (chat(HI, {"role": "assistant", "content": None}), r"messages\[1\]\.content: must be a non-empty text"),
        (chat({"role": ["user"], "content": "x"}), r"messages\[0\]\.role: must be a non-empty text"),
        (chat({"role": "user", "content": []}), r"messages\[0\]\.content: must be a non-empty text"),
        (chat({"role": "user", "content": ["text"]}), r"content\[0\]: type None; must be .*\"text\": \"\.\.\.\""),
        (
            chat({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}),
            r"messages\[0\]\.content\[1\]: type 'image_url'; must be \{\"type\": \"text\"",
        ),
        (chat({"role": "user", "content": [{"type": "text"}]}), r"content\[0\]\.text: must be a non-empty text"),
        (chat({"role": "user", "content": [{"type": "text", "text": "\ud800"}]}), r"content\[0\]\.text: has half a"),
        (
            {**chat(HI, {"role": "assistant", "content": "x"}), "response": "y"},
            "response: messages ends with one, the assistant's; leave out one of them",
        ),
    ],
)
def test_a_bad_line_says_what_was_expected_and_is_left_out_where_asked(tmp_path, line, problem):
    path = write(tmp_path / "w.jsonl", GOOD, line, {"prompt": "after"})
    with pytest.raises(OptionError, match=rf"^workload .*w\.jsonl, line 2: .*({problem})") as caught:
        read_workload(path)
    message = str(caught.value)
    assert "\n" not in message
    message.encode("utf-8")
    found = read_workload(path, skip_bad=True)
    assert [prompt.id for prompt in found.prompts] == ["a", "3"]
    assert found.bad == (message.removeprefix(f"workload {path}, "),)
    assert load_workload(path, skip_bad=True) == found.prompts


def test_a_huge_value_makes_no_huge_message(tmp_path):
    deep = "[" * 200 + "]" * 200
    wide = json.dumps("x" * 100_000)
    for value in (deep, f"[{wide}]"):
        path = write(tmp_path / "w.jsonl", f'{{"prompt": "x", "id": {value}}}')
        with pytest.raises(OptionError, match="must be a text or a number") as caught:
            load_workload(path)
        assert len(str(caught.value)) < 300 + len(str(path))


def test_nothing_but_bad_lines_is_no_workload(tmp_path):
    """A run over no prompts would look like one that found nothing wrong."""
    path = write(tmp_path / "w.jsonl", "", "3", "4")
    with pytest.raises(
        OptionError, match=r"has no prompts; the first of 2 bad ones is line 2: not a JSON object; each"
    ):
        read_workload(path, skip_bad=True)
    with pytest.raises(OptionError, match=r"w\.jsonl: has no prompts; each line must be like"):
        read_workload(write(tmp_path / "w.jsonl", ""), skip_bad=True)
