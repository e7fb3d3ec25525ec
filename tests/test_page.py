"""The page of a tuning and its charts: what they hold, how texts are escaped, and how a browser shows them."""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import math
import random
import re
import shutil
import statistics
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from sakiyomi.bench.charts import COLOURS, DARK, LIGHT, charts
from sakiyomi.bench.page import require_charts, write_page, write_plots
from sakiyomi.errors import OptionError

CHARTS = [
    "acceptance-by-position",
    "tokens-against-k",
    "speedup-against-k",
    "tpot",
    "costs",
    "speedup-by-context",
    "speedup-by-batch",
    "predicted-against-measured",
]
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- \u2028 & \" ' {{ 7 * 7 }}"
)
DRAFTERS = {"suffix": 0.71, "ngram": 0.55, "table": 0.62, "eagle3": 0.78, "suffix+table": 0.76}
DRAFT_COST = {"suffix": 0.002, "ngram": 0.001, "table": 0.004, "eagle3": 0.09, "suffix+table": 0.006}
CATEGORIES = {"chat": 12, "code": 14, "extraction": 10, "rewriting": 12, "summaries": 12}


def make_result(seed: int = 0) -> dict[str, Any]:
    """What a tuning may give: five drafters with k = 1..16 and adaptive, six settings measured, sixty prompts."""
    rng = random.Random(seed)
    names = [(f"{category}-{i:02}", category) for category, count in CATEGORIES.items() for i in range(count)]
    plain = [0.0213 * rng.lognormvariate(0, 0.05) for _ in names]

    def predicted(drafter: str, k: int | None) -> dict[str, Any]:
        rate, depth = DRAFTERS[drafter], k or 9
        positions = [min(0.97, rate * (1 - 0.4 / (i + 1)) + 0.002 * i) for i in range(depth)]
        survival = [math.prod(positions[: i + 1]) for i in range(depth)]
        tokens = 1 + sum(survival)
        speedup = tokens / (1 + 0.055 * depth + DRAFT_COST[drafter] * depth) * (1.06 if k is None else 1)
        figures = {"speedup": speedup, "tokens_per_target_call": tokens, "acceptance_rate": sum(survival) / depth}
        by_category = {
            name: {each: value * (0.8 + 0.1 * i) for each, value in figures.items()}
            for i, name in enumerate(CATEGORIES)
        }
        more = {"mean_drafted": depth * 0.9, "draft_s": 0.021 * DRAFT_COST[drafter], "categories": by_category}
        return {**figures, "per_position_acceptance": positions, **more}

    def measured(drafter: str, k: int | None) -> dict[str, Any]:
        told = predicted(drafter, k)
        error = rng.uniform(-0.06, 0.09)
        speedup = told["speedup"] / (1 + error)
        parts = [(0, 256), (256, 512), (512, 1024), (1024, 2048)]
        return {
            "prompts": len(names), "speedup": speedup, "low": speedup * 0.93, "high": speedup * 1.08,
            "tokens_per_target_call": told["tokens_per_target_call"] * 0.98, "acceptance_rate": 0.4,
            "per_position_acceptance": told["per_position_acceptance"], "mean_drafted": told["mean_drafted"],
            "tpot_s": [each / speedup * rng.lognormvariate(0, 0.25) for each in plain],
            "prediction_error": error,
            "categories": {
                name: {"prompts": count, "speedup": speedup, "low": speedup * 0.9, "high": speedup * 1.1,
                       "tokens_per_target_call": told["tokens_per_target_call"]}
                for name, count in CATEGORIES.items()
            },
            "by_context": [
                {"from": start, "to": end, "tokens": 4000, "speedup": speedup * by, "low": speedup * by * 0.9,
                 "high": speedup * by * 1.12}
                for (start, end), by in zip(parts, (1.08, 1.0, 0.95, 0.83), strict=True)
            ],
        }  # fmt: skip

    live = {("suffix", 7), ("suffix+table", None), ("suffix+table", 8), ("eagle3", 4), ("ngram", 4), ("table", None)}
    candidates = []
    for drafter in DRAFTERS:
        for k in (None, *range(1, 17)):
            candidates.append(
                {
                    "case": f"{drafter} {'adaptive' if k is None else f'k={k}'}",
                    "drafter": drafter,
                    "num_speculative_tokens": k,
                    "verification": "coupled",
                    "predicted": predicted(drafter, k),
                    "measured": measured(drafter, k) if (drafter, k) in live else None,
                }
            )
    best = next(each for each in candidates if each["case"] == "suffix+table adaptive")
    case, figures = best["case"], best["measured"]
    interval = {name: figures[name] for name in ("speedup", "low", "high")}
    prompts = []
    for (name, category), base, now in zip(names, plain, figures["tpot_s"], strict=True):
        ratio = base / now * (0.55 if category == "chat" else 1)
        why = "" if ratio >= 1 else f"the acceptance rate of {ratio / 3:.0%} did not pay for the drafts"
        prompts.append(
            {"id": name, "category": category, "prompt_tokens": 190, "tokens": 128, "plain_tpot_s": base,
             "tpot_s": base / ratio, "speedup": ratio, "tokens_per_target_call": ratio * 1.3,
             "acceptance_rate": min(ratio / 3, 1), "lost": ratio < 1, "why": why}
        )  # fmt: skip
    code = "def area(radius):\n    return 3.14159 * radius ** 2\n\n"
    pieces = re.findall(r"\s*\S+|\s+", (code + "\tThe red fox crossed the river, and it saw the moon.\n") * 3)
    drafted = (None, "suffix", "table", "eagle3", None)
    rows, contexts, verdicts = (1, 2, 4, 8, 16, 32), (0, 256, 1024), ("slower", "faster", "faster", "faster", "unclear")
    return {
        "version": 1,
        "command": "sakiyomi tune smollm2-135m --workload prompts.jsonl",
        "machine": {
            "date": "2026-11-30T12:00:00+00:00", "model": "smollm2-135m", "dtype": "float32", "weights": "int8",
            "kernels": "avx512-vnni", "exactness": "bit-exact", "device": "cpu", "cpu": "An x86-64 processor",
            "threads": 2, "cores": 2, "system": "Linux x86_64", "python": "3.11.7", "torch": "2.13.0",
            "sakiyomi": "0.1.0",
        },
        "params": {"max_new_tokens": 128, "temperature": 0.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "seed": 0},
        "partial": False,
        "seconds": {"plain": 161.2, "replay": 38.4, "live": 180.7},
        "workload": {
            "name": "prompts.jsonl", "prompts": len(names), "categories": dict(CATEGORIES),
            "skipped": [{"id": "chat-99", "reason": "too long for the context"}], "recorded": 60, "matching": 58,
        },
        "recommendation": {
            "case": case, "drafter": "suffix+table", "num_speculative_tokens": None, "verification": "coupled",
            "verdict": "faster", **interval,
            "sentence": "Draft with suffix+table, adaptive: it writes your prompts' responses "
            f"{figures['speedup']:.2f} times as fast as plain decoding.",
        },
        "categories": [
            {"category": name, "prompts": count, "case": case, "verdict": verdict, "speedup": speedup,
             "low": speedup * 0.93, "high": speedup * 1.06, "tokens_per_target_call": speedup * 1.3, "sentence": ""}
            for (name, count), speedup, verdict in zip(
                CATEGORIES.items(), (0.88, 2.9, 2.2, 3.1, 1.02), verdicts, strict=True
            )
        ],
        "candidates": candidates,
        "plain": {"tpot_s": plain, "ttft_s": [each * 9 for each in plain], "prompts": [name for name, _ in names]},
        "costs": {
            "rows": list(rows),
            "contexts": list(contexts),
            "seconds": [[0.020 + 0.0011 * each + 4e-6 * context for each in rows] for context in contexts],
        },
        "batches": [
            {"batch_size": size, "case": each, "speedup": value / (1 + 0.18 * math.log2(size)), "low": None,
             "high": None, "measured": False}
            for each, value in (("suffix+table adaptive", 2.5), ("suffix k=7", 2.2)) for size in (1, 2, 4, 8, 16)
        ] + [
            {"batch_size": size, "case": case, "speedup": value, "low": value * 0.92, "high": value * 1.07,
             "measured": True}
            for size, value in ((1, 2.45), (4, 1.9), (8, 1.52))
        ],
        "prompts": prompts,
        "samples": [
            {"id": "code-03", "category": "code", "prompt": "Write a function.\n\n    Keep  the spaces.", "case": case,
             "tokens": [[piece, drafted[i % 5 if i % 11 else 0]] for i, piece in enumerate(pieces)]},
            {"id": "chat-01", "category": "chat", "prompt": "Say <b>hello</b>.", "case": case,
             "tokens": [["<b>", None], ["hello", "suffix"], ["</b>", "suffix"], ["\n", None]]},
        ],
        "exactness": {"machine": "bit-exact", "compared": 360, "identical": 360, "differences": []},
        "prediction": {"worst": 0.08, "limit": 0.1, "checked": 6, "warning": ""},
        "notes": ["Six settings were confirmed live.", "Batches of 16 were not measured."],
    }  # fmt: skip


def build(tmp_path: Path, result: Mapping[str, Any]) -> str:
    write_page(result, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return make_result()


@pytest.fixture(scope="module")
def html(result: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("page"), result)


class Reader(HTMLParser):
    """Collects the text of every element that has an id, the rows of tables, tags, and what would be loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.text: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.tags: Counter[str] = Counter()
        self.loads: list[str] = []
        self.outputs: list[str] = []
        self.marks: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        self.loads += [
            f"{tag} {name}" for name in given if name in ("src", "href", "srcset", "action", "poster", "data")
        ]
        self.loads += [f"{tag} {name}" for name in given if name.startswith("on")]
        if tag not in ("meta", "br", "img", "link"):
            self.open.append((tag, given.get("id")))
        if given.get("class") == "output":
            self.outputs.append("")
        if tag == "mark":
            self.marks.append((given.get("title") or "", ""))
        table = next((name for tag, name in reversed(self.open) if tag == "table"), None)
        if table and tag == "tr":
            self.rows.setdefault(table, []).append([])
        if table and tag in ("td", "th"):
            self.rows[table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, name in self.open:
            if name:
                self.text[name] = self.text.get(name, "") + data
        tags = [tag for tag, _ in self.open]
        table = next((name for tag, name in reversed(self.open) if tag == "table"), None)
        if table and ("td" in tags or "th" in tags):
            self.rows[table][-1][-1] += data
        if "pre" in tags and self.outputs and "article" in tags and "div" not in tags:
            self.outputs[-1] += data
        if "mark" in tags and self.marks:
            self.marks[-1] = (self.marks[-1][0], self.marks[-1][1] + data)


def x(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def to(row: Mapping[str, Any]) -> str:
    return "–" if row.get("low") is None else f"({row['low']:.2f} to {row['high']:.2f})"


def expected_tables(result: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """What the cells of the tables say, from the figures."""
    words = {"faster": "▲ faster", "slower": "▼ slower", "unclear": "◆ unclear"}
    categories = [
        [each["category"], str(each["prompts"]), each["case"], x(each["speedup"]), to(each),
         f"{each['tokens_per_target_call']:.2f}", words[each["verdict"]]]
        for each in result["categories"]
    ]  # fmt: skip
    candidates = []
    for each in result["candidates"]:
        told, seen = each["predicted"], each["measured"]
        rate = (seen or told)["acceptance_rate"]
        candidates.append(
            [each["case"], x(told["speedup"]), x(seen["speedup"]) if seen else "–",
             to(seen) if seen else "–", f"{seen['prediction_error']:+.1%}" if seen else "–",
             f"{told['tokens_per_target_call']:.2f}", f"{seen['tokens_per_target_call']:.2f}" if seen else "–",
             f"{rate:.0%}", str(seen["prompts"]) if seen else "–", each["verification"]]
        )  # fmt: skip
    lost = [
        [each["id"], each["category"], str(each["tokens"]), f"{1000 * each['plain_tpot_s']:.1f} ms",
         f"{1000 * each['tpot_s']:.1f} ms", x(each["speedup"]), f"{each['acceptance_rate']:.0%}", each["why"]]
        for each in result["prompts"] if each["lost"]
    ]  # fmt: skip
    seconds = [[name, f"{value:.1f} s"] for name, value in result["seconds"].items()]
    return {"categories": categories, "candidates": candidates, "lost": lost, "seconds": seconds}


def test_the_page_says_what_the_result_says(result: dict[str, Any], html: str) -> None:
    read = Reader(html)
    assert json.loads(read.text["result"]) == result
    assert list(json.loads(read.text["result"])) == list(result)
    best = result["recommendation"]
    assert read.text["recommendation"] == best["sentence"]
    assert x(best["speedup"]) in read.text["speedup"]
    assert f"{to(best)} 95 % interval" in read.text["speedup"]
    assert "▲ faster" in read.text["speedup"]
    assert "360 of 360" in read.text["exactness"]
    assert "✓ identical" in read.text["exactness"]
    assert 'sakiyomi generate --settings settings.toml "..."' in read.text["settings"]
    assert 'sakiyomi.load("smollm2-135m", settings="settings.toml")' in html
    for name, rows in expected_tables(result).items():
        assert [row for row in read.rows[name] if row[0] not in ("category", "setting", "prompt")] == rows
    assert [name for name in CHARTS if f"spec-{name}" in read.text] == CHARTS
    assert read.rows["machine"] == [[name, str(value)] for name, value in result["machine"].items()]
    assert ["top_k", "–"] in read.rows["params"]
    assert "58 of these" in read.text["workload"]
    assert "chat-99: too long for the context" in html
    order = ["recommendation", "settings", "categories", *CHARTS, "candidates", "lost", "sample-outputs", "notes"]
    order += ["machine", "params", "seconds"]
    places = [html.index(f'id="{name}"') for name in order]
    assert places == sorted(places)


def test_headings_and_tables_can_be_heard(html: str) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])", html)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    elements = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    tables = re.findall(r"<table.*?</table>", elements, re.DOTALL)
    assert len(tables) == 6
    for table in tables:
        assert "<caption" in table
        assert 'scope="row"' in table
    ids = re.findall(r'\bid="([^"]+)"', elements)
    assert len(set(ids)) == len(ids)
    assert all(f'id="{name}" role="img" aria-label="' in html for name in CHARTS)


def test_the_page_loads_nothing_and_runs_its_own_scripts_only(html: str) -> None:
    read = Reader(html)
    assert not read.loads
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(read.tags)
    assert "@import" not in html.split("</style>")[0]
    assert "url(" not in html.split("</style>")[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    assert re.findall(r"'sha256-([^']*)'", policy[1]) == hashes
    assert len(hashes) == 2
    assert "<!--" not in scripts[0]
    assert "var(" not in json.dumps(LIGHT | DARK)


def hostile(value: Any, key: str = "") -> Any:
    """Put the hostile text into every text that a user, a model or a file may have written."""
    if isinstance(value, dict):
        return {(f"{k}{HOSTILE}" if key in ("machine", "params", "seconds", "categories") else k): hostile(v, k)
                for k, v in value.items()}  # fmt: skip
    if isinstance(value, list):
        return [hostile(each, key if key == "tokens" else "") for each in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


def test_texts_are_escaped_wherever_they_stand(result: dict[str, Any], tmp_path: Path) -> None:
    result = {**result, "prediction": {**result["prediction"], "warning": "Beware."}}
    result["candidates"] = [{**each, "failed": "table: no luck"} for each in result["candidates"]]
    evil = hostile(result)
    evil["recommendation"]["verdict"] = "faster"
    plain, found = Reader(build(tmp_path, result)), build(tmp_path, evil)
    read = Reader(found)
    assert read.tags == plain.tags
    assert not read.loads
    assert json.loads(read.text["result"]) == evil
    assert read.text["recommendation"] == evil["recommendation"]["sentence"]
    assert not re.search(r"<script>window.hacked|<img src=x|<!--", found)
    assert "\u2028" not in read.text["result"]  # in the source, only as an escape


def test_a_sample_keeps_every_character_and_names_the_drafter(result: dict[str, Any], html: str) -> None:
    read = Reader(html)
    for shown, sample in zip(read.outputs, result["samples"], strict=True):
        assert shown == "\n" + "".join(text for text, _ in sample["tokens"])  # HTML drops the first newline of a <pre>
    drafted = [(drafter, text) for each in result["samples"] for text, drafter in each["tokens"] if drafter]
    assert [mark for mark in read.marks if mark[0]] == drafted
    style = html.split("</style>")[0]
    ways = re.findall(r"\.d\d \{ text-decoration-style: (\w+); text-decoration-thickness: (\w+);", style)
    assert len(set(ways)) == 3  # told apart without colour


def test_lost_prompts_are_listed_up_to_fifty(result: dict[str, Any], tmp_path: Path) -> None:
    each = next(each for each in result["prompts"] if each["lost"])
    read = Reader(build(tmp_path, {"prompts": [each] * 53}))
    assert len(read.rows["lost"]) == 1 + 50
    assert read.text["more-lost"] == "And 3 more."
    assert "On none of 2 prompts." in build(tmp_path, {"prompts": [{**each, "lost": False}] * 2})


@pytest.mark.parametrize("empty", [{}, None], ids=["absent", "null or empty"])
def test_a_page_without_figures_has_no_empty_box(empty: object, result: dict[str, Any], tmp_path: Path) -> None:
    nothing: dict[str, Any] = {}
    if empty is None:
        nothing = {name: type(value)() if isinstance(value, dict | list) else None for name, value in result.items()}
        nothing["exactness"] = {"machine": "numerics", "compared": 0, "identical": 0, "differences": []}
        nothing["recommendation"] = dict.fromkeys(result["recommendation"]) | {"case": "plain", "verdict": "off"}
        nothing["partial"] = True
    read = Reader(build(tmp_path, nothing))
    assert not read.tags["figure"]
    assert not read.tags["table"]
    assert read.tags["script"] == 1  # the result alone
    assert "–" in read.text["speedup"]
    assert "Not compared" in read.text["exactness"]
    assert ("partial" in read.text) == (empty is None)
    assert charts(nothing) == []
    assert write_plots(nothing, tmp_path / "plots") == []


def without(value: Any, drop: Callable[[str], bool]) -> Any:
    """Set numbers to null, by the name they stand under."""
    if isinstance(value, dict):
        return {k: None if drop(k) and isinstance(v, int | float) else without(v, drop) for k, v in value.items()}
    return [without(each, drop) for each in value] if isinstance(value, list) else value


OPTIONAL = ("speedup", "low", "high", "tokens_per_target_call", "acceptance_rate", "prediction_error", "mean_drafted",
            "plain_tpot_s", "tpot_s", "num_speculative_tokens", "worst", "limit")  # fmt: skip


@pytest.mark.parametrize("name", [*OPTIONAL, "all"])
def test_what_is_missing_is_a_dash(name: str, result: dict[str, Any], tmp_path: Path) -> None:
    partial = without(result, lambda key: key in OPTIONAL if name == "all" else key == name)
    read = Reader(build(tmp_path, partial))
    assert "None" not in "".join(text for key, text in read.text.items() if not key.startswith(("spec-", "result")))
    assert "nan" not in read.text["candidates"]
    if name == "speedup":
        assert read.rows["categories"][1][3] == "–"
        assert "speedup-against-k" not in read.text
    if name == "all":
        assert [each.name for each in charts(partial)] == ["acceptance-by-position", "tpot", "costs"]


def test_nan_and_half_characters_become_what_json_and_utf8_can_hold(tmp_path: Path) -> None:
    text = build(tmp_path, {"seconds": {"plain": math.nan, "live": math.inf}, "notes": ["half \ud83d"]})
    assert json.loads(Reader(text).text["result"]) == {"seconds": {"plain": None, "live": None}, "notes": ["half ?"]}
    assert Reader(text).rows["seconds"] == [["plain", "–"], ["live", "–"]]


@pytest.mark.parametrize("verdict", ["faster", "off", "unclear", "slower", None])
def test_how_to_use_a_setting_is_told_where_there_is_one(verdict: str | None, tmp_path: Path) -> None:
    """Without a verdict no settings are written, and the command would end in an error."""
    told = "settings" in Reader(build(tmp_path, {"recommendation": {"verdict": verdict}})).text
    assert told == (verdict in ("faster", "off"))
    assert "settings" not in Reader(build(tmp_path, {})).text


def test_nulls_where_nobody_expects_them_are_no_end(result: dict[str, Any], tmp_path: Path) -> None:
    """A page is drawn of what there is: a tuning took its time."""
    holes = copy.deepcopy(result)
    for each in holes["candidates"]:
        each["case"] = None
        each["predicted"]["per_position_reached"] = [20, 20, None]
        if each["measured"]:
            each["measured"]["by_context"][0]["from"] = None
            each["measured"]["by_context"][1]["to"] = None
            del each["measured"]["by_context"][2]["to"]
    for i, each in enumerate(holes["batches"]):
        each["batch_size" if i % 2 else "case"] = None
    holes["recommendation"]["case"] = None
    holes["samples"][0] |= {"tokens": None, "case": None}
    holes["exactness"]["identical"] = None
    holes["plain"]["ttft_s"][0] = None
    read = Reader(build(tmp_path, holes))
    assert [name for name in CHARTS if f"spec-{name}" in read.text] == CHARTS
    assert "Not compared" in read.text["exactness"]
    assert {row[0] for row in read.rows["candidates"][1:]} == {"–"}
    assert read.outputs[0] == "\n"
    assert "None" not in "".join(text for key, text in read.text.items() if not key.startswith("result"))
    write_plots(holes, tmp_path / "plots")


def test_what_a_candidate_failed_of_is_in_its_row(result: dict[str, Any], tmp_path: Path) -> None:
    first, second, *_ = result["candidates"]
    candidates = [{**first, "failed": "table: RuntimeError: no luck"}, {**second, "failed": None}]
    rows = Reader(build(tmp_path, {"candidates": candidates})).rows["candidates"]
    assert [row[0] for row in rows[1:]] == [f"{first['case']}table: RuntimeError: no luck", second["case"]]


def test_off_names_the_setting_that_the_figure_is_of(result: dict[str, Any], tmp_path: Path) -> None:
    off = {"case": "plain", "drafter": "none", "verdict": "off", "sentence": "Off.", "measured": "ngram k=4"}
    read = Reader(build(tmp_path, {"recommendation": {**off, "speedup": 0.93, "low": 0.9, "high": 0.97}}))
    assert "".join(read.text["speedup"].split()) == "Speed-up0.93x■off(0.90to0.97)95%intervaloverpromptsngramk=4"


def test_differences_are_shown(result: dict[str, Any], tmp_path: Path) -> None:
    difference = {"prompt_id": "chat-01", "case": "suffix k=7", "position": 17, "plain_token": 5, "token": None}
    exactness = {"machine": "numerics", "compared": 360, "identical": 359, "differences": [difference]}
    read = Reader(build(tmp_path, {**result, "exactness": exactness}))
    assert "✗ 1 not identical" in read.text["exactness"]
    assert "up to floating-point ties" in read.text["exactness"]
    assert read.rows["differences"][1] == ["chat-01", "suffix k=7", "17", "5", "–"]


def test_a_drafter_has_one_colour_in_every_chart_and_shapes_tell_settings_apart(result: dict[str, Any]) -> None:
    colours: dict[str, set[str]] = {}
    for chart in charts(result):
        for layer in chart.layers:
            for channel in ("color", "shape"):
                scale = (layer["encoding"].get(channel) or {}).get("scale")
                if not scale or chart.name == "costs":
                    continue
                if channel == "shape":
                    assert len(set(scale["range"])) == len(scale["range"]), chart.name
                for name, colour in zip(scale["domain"], scale["range"], strict=True):
                    if channel == "color":
                        colours.setdefault(name.split()[0], set()).add(colour)
    assert set(colours) == set(DRAFTERS)
    assert all(len(each) == 1 for each in colours.values())


def test_a_line_by_batch_size_is_a_drafters_whose_k_may_fall(result: dict[str, Any]) -> None:
    def series(batches: list[dict[str, Any]]) -> list[str]:
        drawn = charts({"candidates": result["candidates"], "batches": batches})
        (chart,) = [each for each in drawn if each.name == "speedup-by-batch"]
        return [row["series"] for row in chart.layers[0]["data"]["values"]]

    falling = [
        {"batch_size": size, "case": f"suffix k={k}", "speedup": 2.0, "measured": False} for size, k in ((1, 8), (2, 5))
    ]
    assert series(falling) == ["suffix", "suffix"]
    assert series([*falling, {**falling[0], "case": "suffix k=1"}]) == ["suffix k=8", "suffix k=5", "suffix k=1"]
    assert series([*falling, {**falling[0], "case": "another"}]) == ["suffix k=8", "suffix k=5", "another"]


def test_acceptance_by_position_is_of_the_largest_k_of_each_drafter() -> None:
    def candidate(drafter: str, k: int | None, rates: list[float | None]) -> dict[str, Any]:
        found = {"per_position_acceptance": rates}
        return {"case": f"{drafter} {k}", "drafter": drafter, "num_speculative_tokens": k, "predicted": found}

    given = [candidate("a", None, [0.9] * 9), candidate("a", 1, [0.5]), candidate("a", 3, [0.5, None, 0.4])]
    (chart,) = charts({"candidates": [*given, candidate("b", None, [0.7])]})
    rows = [(row["series"], row["x"], row["y"]) for row in chart.layers[0]["data"]["values"]]
    assert rows == [("a", 1, 0.5), ("a", 3, 0.4), ("b", 1, 0.7)]


def test_positions_end_where_few_rounds_reached_one() -> None:
    """What is further on would stand in its place: positions are counted."""
    found = {"per_position_acceptance": [0.9, 0.8, 0.7, 0.6], "per_position_reached": [50, 20, 9, 12]}
    (chart,) = charts({"candidates": [{"case": "a", "drafter": "a", "predicted": found}]})
    assert [(row["x"], row["y"]) for row in chart.layers[0]["data"]["values"]] == [(1, 0.9), (2, 0.8)]


def test_more_drafters_than_colours_are_told_apart(result: dict[str, Any], tmp_path: Path) -> None:
    """And a legend has them all: without a limit of its own, Vega leaves out what comes after thirty."""
    one = result["candidates"][1]
    many = [{**one, "case": f"d{i}", "drafter": f"d{i}"} for i in range(40)]
    for each in charts({"candidates": many}):
        encoding = each.layers[-1]["encoding"] if each.name == "acceptance-by-position" else each.layers[1]["encoding"]
        looks = list(zip(encoding["color"]["scale"]["range"], encoding["shape"]["scale"]["range"], strict=True))
        assert len(set(looks)) == 40, each.name
        assert each.spec("container")["config"]["legend"]["symbolLimit"] == 0
    sample = {"id": "x", "tokens": [[f"t{i}", f"d{i}"] for i in range(20)]}
    style = build(tmp_path, {"samples": [sample]}).split("</style>")[0]
    marks = re.findall(r"\.d\d+ \{ (text-decoration-style: .*?\));", style)
    assert len(set(marks)) == len(marks) == 20


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
SERIES = [f"c{i}" for i in range(COLOURS)]


@THEMES
def test_contrast_is_enough_for_texts_and_for_marks(theme: dict[str, str]) -> None:
    def luminance(name: str) -> float:
        return float(linear(theme[name]) @ (0.2126, 0.7152, 0.0722))

    for ground in ("page", "card"):
        for name in ("ink", "muted", "good", "bad", "unsure", *SERIES):
            low, high = sorted((luminance(name), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= (3 if name in SERIES else 4.5), (name, ground)


@THEMES
def test_colours_of_drafters_stay_apart_for_every_kind_of_colour_vision(theme: dict[str, str]) -> None:
    # Dichromats as Machado et al. (2009) simulate them; distances in OKLab, where 0.02 can just be seen.
    sights = {
        "all cones": np.eye(3),
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    cones = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
    lab = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])
    for sight, matrix in sights.items():
        seen = {name: lab @ np.cbrt(cones @ np.clip(matrix @ linear(theme[name]), 0, 1)) for name in SERIES}
        for one, other in itertools.combinations(SERIES, 2):
            assert np.linalg.norm(seen[one] - seen[other]) > 0.1, (sight, one, other)


def test_every_chart_is_written_as_svg_and_png(result: dict[str, Any], tmp_path: Path) -> None:
    written = write_plots(result, tmp_path / "a" / "plots")
    assert written == [tmp_path / "a" / "plots" / f"{name}{end}" for name in CHARTS for end in (".svg", ".png")]
    assert sorted(each.name for each in (tmp_path / "a" / "plots").iterdir()) == sorted(each.name for each in written)
    for path in written:
        data = path.read_bytes()
        if path.suffix == ".png":
            assert data.startswith(b"\x89PNG\r\n\x1a\n")
            assert struct.unpack(">I", data[16:20])[0] > 1000  # pixels wide
        else:
            assert ElementTree.fromstring(data).tag.endswith("svg")
            assert b"var(--" not in data
            assert data.count(b"<path") > 10


def test_a_missing_package_is_named(result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (
        require_charts,
        lambda: write_page(result, tmp_path / "p"),
        lambda: write_plots(result, tmp_path / "d"),
    ):
        with pytest.raises(OptionError, match=r"pip install 'sakiyomi\[tune\]'"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="file"):
        write_plots(result, tmp_path / "file" / "plots")
    with pytest.raises(OptionError, match=r"page\.html: can't be written"):
        write_page(result, tmp_path / "file" / "page.html")


# --- in a browser ------------------------------------------------------------------------------------------------

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
READY = "Promise.all(Object.values(window.charts)).then(() => true)"
Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"needs a browser on the path: none of {', '.join(names)}")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'sakiyomi[dev]'")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    """Open a page; at the end there must have been no request but its file, and nothing on the console."""
    contexts, problems, requests = [], [], []
    path = tmp_path / "page.html"

    def opened(text: str, **options: Any) -> Any:
        path.write_text(text, encoding="utf-8", newline="\n")
        contexts.append(browser.new_context(**options))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        assert tab.evaluate(READY)
        return tab

    yield opened
    for each in contexts:
        each.close()
    assert problems == []
    assert set(requests) == {path.as_uri()}


def data(tab: Any, chart: str, name: str) -> list[dict[str, Any]]:
    rows = tab.evaluate("([chart, name]) => window.charts[chart].then(each => each.view.data(name))", [chart, name])
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def test_a_browser_shows_the_figures_of_the_result(html: str, show: Opened) -> None:
    tab = show(html)
    shown = json.loads(tab.text_content("#result"))  # what a reader of the page has, not what the test gave
    assert tab.inner_text("#recommendation") == shown["recommendation"]["sentence"]
    assert x(shown["recommendation"]["speedup"]) in tab.inner_text("#speedup")
    assert to(shown["recommendation"]) in tab.inner_text("#speedup")
    for name, rows in expected_tables(shown).items():
        cells = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        assert tab.eval_on_selector_all(f"#{name} tbody tr", cells) == rows, name
    assert tab.eval_on_selector_all(".chart svg", "all => all.map(each => each.closest('.chart').id)") == CHARTS
    for name in CHARTS:
        assert tab.locator(f"#{name} svg [role='graphics-symbol']").count() >= 3, name
        assert tab.locator(f"#{name} svg").bounding_box()["width"] > 600, name

    candidates = shown["candidates"]
    measured = {each["case"]: each["measured"] for each in candidates if each["measured"]}
    for chart, key in (("speedup-against-k", "speedup"), ("tokens-against-k", "tokens_per_target_call")):
        points = {row["case"]: row["y"] for row in data(tab, chart, "measured")}
        assert points == {case: figures[key] for case, figures in measured.items()}
        points = {
            row["case"]: row["y"] for row in data(tab, chart, "predicted") + data(tab, chart, "predicted-adaptive")
        }
        assert points == {each["case"]: each["predicted"][key] for each in candidates}
    bars = {row["case"]: (row["low"], row["high"]) for row in data(tab, "speedup-against-k", "measured-intervals")}
    assert bars == {case: (figures["low"], figures["high"]) for case, figures in measured.items()}
    for case, figures in measured.items():  # and they are drawn
        label = f"{case}, measured: {x(figures['speedup'])} {to(figures)}"
        assert tab.locator(f'#speedup-against-k svg path[aria-label="{label}"]').count() == 1

    positions = {(row["series"], row["x"]): row["y"] for row in data(tab, "acceptance-by-position", "acceptance")}
    longest = {each["drafter"]: each for each in candidates if each["num_speculative_tokens"] == 16}
    assert positions == {
        (name, i): rate
        for name, each in longest.items()
        for i, rate in enumerate(each["predicted"]["per_position_acceptance"], 1)
    }
    times = {"plain": shown["plain"]["tpot_s"], **{case: figures["tpot_s"] for case, figures in measured.items()}}
    strips = data(tab, "tpot", "tpot")
    medians = {row["case"]: row["x"] for row in data(tab, "tpot", "median")}
    for case, seconds in times.items():
        assert [row["x"] for row in strips if row["case"] == case] == [1000 * each for each in seconds]
        assert medians[case] == pytest.approx(1000 * statistics.median(seconds))
    assert [row["y"] for row in data(tab, "costs", "costs")] == [
        1000 * s for curve in shown["costs"]["seconds"] for s in curve
    ]
    parts = [(row["series"], row["y"], row["low"], row["high"]) for row in data(tab, "speedup-by-context", "context")]
    assert parts == [
        (case, part["speedup"], part["low"], part["high"])
        for case, each in measured.items()
        for part in each["by_context"]
    ]
    for name, seen in (("predicted", False), ("measured", True)):
        batches = [(row["case"], row["x"], row["y"]) for row in data(tab, "speedup-by-batch", name)]
        assert batches == [
            (each["case"], each["batch_size"], each["speedup"]) for each in shown["batches"] if each["measured"] is seen
        ]
    errors = {row["series"]: row["x"] / row["y"] - 1 for row in data(tab, "predicted-against-measured", "measured")}
    assert errors == {case: pytest.approx(each["prediction_error"]) for case, each in measured.items()}


def test_a_browser_follows_the_colour_scheme_without_drawing_again(html: str, show: Opened) -> None:
    tab = show(html, color_scheme="dark")
    colour = """([place, what]) => {
      const numbers = getComputedStyle(document.querySelector(place))[what].match(/\\d+/g).slice(0, 3);
      return numbers.map(each => (+each).toString(16).padStart(2, 0)).join("");
    }"""
    seen = {
        "body": ("backgroundColor", "page"),
        "h1": ("color", "ink"),
        "#costs .role-axis-label text": ("fill", "muted"),
    }
    seen["#costs .mark-line path"] = ("stroke", "c0")
    for media, theme in (({}, DARK), ({"color_scheme": "light"}, LIGHT), ({"media": "print"}, LIGHT)):
        tab.emulate_media(**media)
        for place, (what, name) in seen.items():
            assert "#" + tab.evaluate(colour, [place, what]) == theme[name], place
        tab.emulate_media(color_scheme="dark", media="screen")


def test_a_browser_of_a_phone_scrolls_down_only(html: str, show: Opened) -> None:
    tab = show(html, viewport={"width": 360, "height": 800}, has_touch=True, is_mobile=True)
    assert tab.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    assert tab.evaluate("document.getElementById('candidates').closest('.scroll').scrollWidth") > 360
    for name in CHARTS:
        chart, card = tab.locator(f"#{name} svg").bounding_box(), tab.locator(f"#{name}").bounding_box()
        assert chart["x"] >= card["x"], name
        assert chart["x"] + chart["width"] <= card["x"] + card["width"] + 1, name
        texts = (
            "all => all.map(each => each.getBoundingClientRect()).filter(box => box.right > innerWidth || box.left < 0)"
        )
        assert tab.eval_on_selector_all(f"#{name} svg text", texts) == [], name


def test_a_browser_runs_nothing_that_texts_hold(result: dict[str, Any], show: Opened, tmp_path: Path) -> None:
    evil = hostile(result)
    evil["recommendation"]["verdict"] = "faster"
    long = "w" * 300  # a word that can't be broken between words
    for each, name in zip(evil["samples"] + evil["categories"], ("id", "case", "category"), strict=False):
        each[name] = long
    evil["samples"][1]["category"] = evil["prompts"][0]["id"] = evil["candidates"][0]["failed"] = long
    tab = show(build(tmp_path, evil), viewport={"width": 360, "height": 800})
    assert tab.evaluate("window.hacked") is None
    assert tab.locator(".chart svg").count() == len(CHARTS)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    assert json.loads(tab.text_content("#result")) == evil
    drawn = tab.locator("#speedup-against-k svg path[aria-label]").first
    drawn.hover(force=True)
    assert tab.locator("#vg-tooltip-element.visible").count() == 1
    assert tab.locator("#vg-tooltip-element img").count() == 0


def test_a_browser_would_not_run_a_script_that_got_in(html: str, browser: Any, tmp_path: Path) -> None:
    text = html.replace("</main>", "<script>window.hacked = 1</script></main>")
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    for page_text, hacked in ((text, None), (policy.sub("", text), 1)):
        (tmp_path / "page.html").write_text(page_text, encoding="utf-8")
        tab = browser.new_page()
        tab.goto((tmp_path / "page.html").as_uri())
        assert tab.evaluate("window.hacked") == hacked
        tab.close()


def test_a_browser_shows_a_page_with_one_figure(show: Opened, tmp_path: Path) -> None:
    tab = show(build(tmp_path, {"costs": {"rows": [1], "contexts": [0], "seconds": [[0.02]]}}))
    assert tab.locator(".chart svg").count() == 1
    assert tab.locator("#costs svg [aria-label='1 rows, 0 tokens of context: 20.0 ms']").count() == 1


def test_a_browser_shows_the_charts_of_one_prompt(result: dict[str, Any], show: Opened, tmp_path: Path) -> None:
    one = copy.deepcopy(result)
    one["plain"] = {name: each[:1] for name, each in one["plain"].items()}
    for each in one["candidates"]:
        if each["measured"]:
            each["measured"] |= {"prompts": 1, "low": None, "high": None, "tpot_s": each["measured"]["tpot_s"][:1]}
            each["measured"]["by_context"] = [{"from": 0, "to": None, "tokens": 9, "speedup": 1.5}]
    one["prompts"] = one["prompts"][:1]
    assert [each.name for each in charts(one)] == CHARTS
    tab = show(build(tmp_path, one))
    assert tab.locator(".chart svg").count() == len(CHARTS)
    assert data(tab, "tpot", "tpot")[0]["x"] == data(tab, "tpot", "median")[0]["x"]
    assert "0+" in tab.locator("#speedup-by-context svg").text_content()
