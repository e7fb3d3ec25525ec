"""A benchmark's result for the screen, for a README and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sakiyomi.bench.quality import Quality
from sakiyomi.bench.runner import BenchResult, Summary, plain_case
from sakiyomi.bench.weights import WeightsFacts
from sakiyomi.cpus import cpu_name
from sakiyomi.interfaces import Exactness
from sakiyomi.stats import Spread

if TYPE_CHECKING:
    from sakiyomi.llm import LLM

Facts = Mapping[str, str | int]
OfWeights = Mapping[str, WeightsFacts]
"""Facts of each of several weights, by name."""

# A loss is as loud as a win, and the word says it where there is no colour.
_STYLES = {"faster": "bold green", "slower": "bold red", "unclear": "bold yellow"}


def machine_facts(
    *, model: str, dtype: str, weights: str, kernels: str, exactness: Exactness, device: str = "cpu"
) -> dict[str, str | int]:
    """Return what a reader needs to judge the figures: machine, versions, model, exactness and date (UTC).

    ``weights``: the format that they are kept in. ``kernels``: the compiled core's instruction path, or torch.
    """
    try:
        own_version = version("sakiyomi")
    except PackageNotFoundError:  # a checkout that is not installed
        own_version = "unknown"
    facts: dict[str, str | int] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "dtype": dtype,
        "weights": weights,
        "kernels": kernels,
        "exactness": exactness,
        "device": device,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sakiyomi": own_version,
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def model_facts(llm: LLM, model: str, draft_model: str | None, others: Sequence[LLM] = ()) -> dict[str, str | int]:
    """Return the facts of the machine and of a loaded model; ``model`` and ``draft_model`` are the user's names.

    ``others``: the same model with other weights; facts that differ are joined with a slash.
    """
    dtype = str(getattr(llm.target, "dtype", "unknown")).removeprefix("torch.")
    facts = machine_facts(
        model=model,
        dtype=dtype,
        weights=getattr(llm.target, "weight_format", dtype),
        kernels=getattr(llm.target, "kernels", "torch"),
        exactness=llm.exactness,
        device=str(getattr(llm.target, "device", "cpu")),
    )
    if draft_model:
        facts["draft model"] = draft_model
    more = [model_facts(each, model, draft_model) for each in others]
    for name in ("dtype", "weights", "kernels", "exactness"):
        facts[name] = "/".join(dict.fromkeys(str(each[name]) for each in (facts, *more)))
    return facts


def render(
    result: BenchResult, facts: Facts | None = None, quality: Quality | None = None, weights: OfWeights | None = None
) -> Group:
    """Return what ``rich.print`` shows: one table with a group of rows per category, then what to note.

    ``weights``: of each of several weights; makes a second table, of what they cost and gain.
    """
    # Cells fold where the screen is narrow: a cut figure is worse than an ugly one.
    table = Table(title=_headline(result), title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("case", overflow="fold", min_width=14)
    table.add_column("speed-up\nspread", justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for header in (
        "TPOT\nms",
        "TTFT\nms",
        "tokens\n/call",
        "accep-\ntance",
        "drafted\n/round",
        "no\ndraft",
    ):
        table.add_column(header, justify="right", overflow="fold")
    differing = any(each.identical < each.compared for each in result.summaries)
    if differing:  # else a note says it
        table.add_column("iden-\ntical", justify="right", overflow="fold")
    for category, summaries in _groups(result):
        table.add_section()
        table.add_row(Text(f"{category} ({summaries[0].prompts})", style="bold"))
        for each in summaries:
            table.add_row(*_row(each)[: len(table.columns)])
    parts: list[Table | Text] = [table] if result.summaries else [Text(_headline(result))]
    if weights and result.summaries:
        parts.append(_weights_table(result, weights))
    notes = _notes(result, facts, quality, weights)
    parts.extend(Text(note, style="bold red" if loud else "") for loud, note in notes)
    return Group(*parts)


def markdown(
    result: BenchResult, facts: Facts | None = None, quality: Quality | None = None, weights: OfWeights | None = None
) -> str:
    """Return a Markdown table, a second one where there are several weights, and notes, for a README."""
    lines = [
        "| category | case | speed-up, spread | verdict | TPOT ms | tokens per target call "
        "| acceptance rate | drafted per round | per draft | rounds without draft | overhead | identical |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for category, summaries in _groups(result):
        for each in summaries:
            cells = (
                category,
                each.case,
                "1.00" if each.is_plain else _spread(each.speedup),
                "" if each.is_plain else each.verdict,
                _milliseconds(each.tpot_s, 1),
                _number(each.tokens_per_target_call, 2),
                _percent(each.acceptance_rate),
                "" if each.is_plain else _number(each.mean_drafted, 1),
                "" if each.is_plain else _number(each.mean_draft_length, 1),
                "" if each.is_plain else _percent(each.rounds_without_draft),
                _percent(each.overhead),
                f"{each.identical}/{each.compared}" if each.compared else "-",
            )
            lines.append("| " + " | ".join(_escape(cell) for cell in cells) + " |")
    if weights and result.summaries:
        lines += ["", "| " + " | ".join(_WEIGHTS_COLUMNS) + " |", "|---" * len(_WEIGHTS_COLUMNS) + "|"]
        lines += ["| " + " | ".join(map(_escape, row)) + " |" for row in _weights_rows(result, weights)]
    notes = [_headline(result), *(note for _, note in _notes(result, facts, quality, weights))]
    return "\n".join(lines) + "\n\n" + "\n".join(f"- {_escape(note)}" for note in notes) + "\n"


def as_dict(
    result: BenchResult, facts: Facts | None = None, quality: Quality | None = None, weights: OfWeights | None = None
) -> dict[str, object]:
    """Return the result ready for JSON: settings, summaries, differences, and every generation's metrics.

    Of several weights also ``weights``, with what is read of them and their quality; summaries have the speed of each
    against the first.
    """
    params = {field.name: getattr(result.params, field.name) for field in fields(result.params)}
    params["logit_bias"] = dict(result.params.logit_bias)
    params["processors"] = len(result.params.processors)  # functions have no JSON
    left_out = () if result.weights != ("",) else ("weights", "reference_")  # of one, they would say nothing new
    found: dict[str, object] = {
        "machine": dict(facts or {}),
        "quality": asdict(quality) if quality else None,
        "params": params,
        "repeats": result.repeats,
        "seed": result.seed,
        "partial": result.partial,
        "candidates": [
            {name: value for name, value in asdict(each).items() if "weights" not in name or value}
            for each in result.candidates
        ],
        "summaries": [
            {
                **{name: value for name, value in asdict(each).items() if not name.startswith(left_out)},
                "verdict": each.verdict,
            }
            for each in result.summaries
        ],
        "differences": [asdict(each) for each in result.differences],
        "skipped": [asdict(each) for each in result.skipped],
        "measurements": [
            {
                "prompt_id": each.prompt_id,
                "category": each.category,
                "case": each.case,
                "repeat": each.repeat,
                **each.stats.as_dict(),
            }
            for each in result.measurements
        ],
    }
    if weights:
        found["weights"] = [{"name": name, **asdict(each)} for name, each in weights.items()]
    return found


def _groups(result: BenchResult) -> Iterator[tuple[str, list[Summary]]]:
    """Yield each category and its summaries; where there is only one category, all prompts say it twice."""
    categories = dict.fromkeys(each.category for each in result.summaries)
    for category in categories:
        if category is None or len(categories) > 2:
            name = "all prompts" if category is None else category
            yield name, [each for each in result.summaries if each.category == category]


def _row(summary: Summary) -> list[Text]:
    plain = summary.is_plain
    style = "" if plain else _STYLES[summary.verdict]
    return [
        Text(summary.case),
        Text("1.00" if plain else _spread(summary.speedup), style=style),
        Text("" if plain else summary.verdict, style=style),
        Text(_milliseconds(summary.tpot_s, 1)),
        Text(_milliseconds(summary.ttft_s, 0)),
        Text(_number(summary.tokens_per_target_call, 2)),
        Text(_percent(summary.acceptance_rate)),
        Text("" if plain else _number(summary.mean_drafted, 1)),
        Text("" if plain else _percent(summary.rounds_without_draft)),
        Text(
            f"{summary.identical}/{summary.compared}" if summary.compared else "-",
            style="bold red" if summary.identical < summary.compared else "",
        ),
    ]


def _headline(result: BenchResult) -> str:
    prompts = len({each.prompt_id for each in result.measurements})
    return (
        f"{prompts} prompts, {result.repeats} {'repeat' if result.repeats == 1 else 'repeats'}, "
        f"at most {result.params.max_new_tokens} new tokens, temperature {result.params.temperature:g}"
    )


_WEIGHTS_COLUMNS = (
    "weights",
    "MB per token",
    "perplexity",
    "same token",
    "same text",
    "case",
    "speed, spread",
    "total time",
    "identical",
)


def _weights_rows(result: BenchResult, weights: OfWeights) -> Iterator[tuple[str, ...]]:
    """Yield a row of _WEIGHTS_COLUMNS for every case: all prompts, against plain decoding with the first weights."""
    for each in result.summaries:
        if each.category is not None:
            continue
        cells = [""] * 5
        if each.is_plain:
            found = weights[each.weights]
            size = "-" if found.bytes_per_token is None else f"{found.bytes_per_token / 1e6:.0f}"
            quality = found.quality
            lost = (f"{quality.ratio:.4f}", f"{quality.agreement:.1%}") if quality else ("1", "")
            same = f"{each.reference_identical}/{each.compared}" if each.weights != result.weights[0] else ""
            cells = [each.weights, size, *lost, same]
        yield (
            *cells,
            each.case.removeprefix(f"{each.weights} "),
            "1.00" if each.case == plain_case(result.weights[0]) else _spread(each.reference_speedup),
            _number(each.reference_total_time_ratio, 2),
            f"{each.identical}/{each.compared}" if each.compared else "-",
        )


def _weights_table(result: BenchResult, weights: OfWeights) -> Table:
    title = f"All prompts against {plain_case(result.weights[0])}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for header in _WEIGHTS_COLUMNS:
        left = header in ("weights", "case")
        # A word each line: numbers are shorter than what they are called.
        table.add_column(header.replace(" ", "\n"), justify="left" if left else "right", overflow="fold")
    for row in _weights_rows(result, weights):
        if row[0]:
            table.add_section()
        table.add_row(*(Text(cell) for cell in row))
    return table


def _weights_notes(result: BenchResult, weights: OfWeights) -> Iterator[str]:
    """Yield what the figures of several weights mean."""
    first = plain_case(result.weights[0])
    yield (
        f"Weights: speed = TPOT of {first} / TPOT, and total time likewise, though other weights may write shorter or "
        f"longer answers. Same text: prompts that plain decoding answers as {first} does. Identical: to plain decoding "
        "with the same weights. MB per token: what a row reads of weights, about."
    )
    if quality := next((each.quality for each in weights.values() if each.quality), None):
        yield (
            f"Perplexity: as multiples of {quality.reference_perplexity:.4f}, that of {result.weights[0]}; same token: "
            f"where it finds the same one likeliest, of {quality.tokens} tokens. Text: {quality.text}."
        )


def _notes(
    result: BenchResult, facts: Facts | None, quality: Quality | None, weights: OfWeights | None
) -> Iterator[tuple[bool, str]]:
    """Yield notes in reading order, and whether each is bad news."""
    if result.partial:
        measured = any(each.category is None for each in result.summaries)
        rest = "only prompts that every case answered are in the table" if measured else "nothing to compare yet"
        yield True, f"PARTIAL: the run was interrupted; {rest}."
    for skipped in result.skipped:
        yield True, f"SKIPPED: prompt {skipped.prompt_id}: {skipped.reason}"
    for each in result.differences:
        tokens = " and ".join(
            f"{name} {'ended' if token is None else f'has {token}'}"
            for name, token in (("plain", each.plain_token), ("this", each.token))
        )
        yield (
            True,
            f"DIFFERENT: {each.case}, prompt {each.prompt_id}, repeat {each.repeat + 1}: "
            f"first at token {each.position}, where {tokens}.",
        )
    for case, (count, errors) in _failures(result).items():
        yield True, f"FAILED: {case}, in {count} answers, which went on without it: {'; '.join(errors)}"
    compared = sum(each.compared for each in result.summaries if each.category is None and not each.is_plain)
    own = " with the same weights" if len(result.weights) > 1 else ""
    if compared and not result.differences:
        yield (
            False,
            f"Same output: every candidate's tokens are identical to plain{own} ({compared} of {compared}).",
        )
    if any(not each.keeps_tokens(result.params) for each in result.candidates):
        yield False, "Sampled with rejection or block, texts differ and have the same distribution: not compared."
    if result.summaries:
        yield (
            False,
            f"Speed-up = plain TPOT{own} / speculative TPOT: the median over paired prompts, and the quartiles "
            "(fewer than 4 prompts: lowest and highest). Unclear: that spread includes 1, or fewer than 3 prompts.",
        )
    for summary in result.summaries:
        if summary.category is None and not summary.is_plain:
            plain = plain_case(summary.weights)
            yield (
                False,
                f"Total time of {plain} / {summary.case}: {_number(summary.total_time_ratio, 2)} over all prompts; "
                f"the worst prompt {_number(summary.worst_total_time_ratio, 2)}.",
            )
    if quality:
        yield (
            False,
            f"Quality: perplexity {quality.perplexity:.4f}, with weights=auto {quality.reference_perplexity:.4f} "
            f"(ratio {quality.ratio:.4f}); the same likeliest token at {quality.agreement:.1%} of {quality.tokens} "
            f"tokens. Text: {quality.text}.",
        )
    if weights and result.summaries:
        for note in _weights_notes(result, weights):
            yield False, note
    if facts:
        yield False, ", ".join(f"{name}: {value}" for name, value in facts.items())


def _failures(result: BenchResult) -> dict[str, tuple[int, list[str]]]:
    """Return for each case in which drafters failed in how many answers, and of what."""
    failures: dict[str, tuple[int, list[str]]] = {}
    for each in result.measurements:
        if errors := each.stats.errors:
            count, known = failures.get(each.case, (0, []))
            failures[each.case] = count + 1, list(dict.fromkeys((*known, *errors)))
    return failures


def _spread(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{value.median:.2f}" + (f" {value.low:.2f}-{value.high:.2f}" if value.count > 1 else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: Spread | None, digits: int) -> str:
    return f"{seconds.median * 1000:.{digits}f}" if seconds else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _escape(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
