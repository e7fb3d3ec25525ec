"""The command ``sakiyomi tune``: parse, call, print."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakiyomi.options import (
    ALL_DRAFTERS,
    AsJson,
    Category,
    ContextLength,
    Device,
    DraftModel,
    Dtype,
    Kernels,
    MaxNewTokens,
    MinP,
    PerCategory,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Trained,
    Weights,
    Workload,
    draft_length,
    drafter_names,
    load_llm,
)
from sakiyomi.progress import show_progress, warnings_in_one_line

if TYPE_CHECKING:
    from rich.console import Group

    from sakiyomi.settings import Settings

EPILOG = (
    "Examples: [bold]sakiyomi tune --workload prompts.jsonl --minutes 10[/bold], then "
    '[bold]sakiyomi generate --settings sakiyomi-tune/settings.toml "..."[/bold]'
)
_LONGEST = 64  # draft tokens in a row


def tune(
    model: Annotated[str, typer.Argument(help="The model, named as --model is elsewhere.")] = "smollm2-135m",
    workload: Workload = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that can't be used.")] = False,
    category: Category = None,
    per_category: PerCategory = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help=f"To consider: auto, {ALL_DRAFTERS}, or several joined with +. Can be repeated. Default: all that "
            "there are for the model, alone and together. Plain decoding is always considered.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="NUMBER|FROM-TO|auto",
            help="Tokens to draft in a round, to consider; auto: as many as pay, as trees. Can be repeated. "
            "Default: 1-16 and auto.",
        ),
    ] = None,
    verification: Annotated[
        list[str] | None,
        typer.Option(help="coupled, rejection or block, as for generate. Can be repeated. Default: coupled."),
    ] = None,
    draft_model: DraftModel = None,
    trained: Trained = None,
    minutes: Annotated[float, typer.Option(help="About how long it may take. More time measures more prompts.")] = 3.0,
    confirm: Annotated[int, typer.Option(help="How many of the best are measured live.")] = 2,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Measure the best with so many answers at a time too. Can be repeated."),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...",
            help="Where rows of the speed-up by context begin. Default: 256,512,1024,... 16384.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    kernels: Kernels = "auto",
    device: Device = None,
    context_length: ContextLength = None,
    threads: Threads = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="A folder for settings.toml, report.html and result.json, and for what an interrupted run goes on "
            "from; made if it isn't there.",
        ),
    ] = Path("sakiyomi-tune"),
    plots: Annotated[
        Path | None, typer.Option(help="A folder to write the report's charts to, as SVG and PNG.")
    ] = None,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write no report, which needs sakiyomi[tune].")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find out whether reading ahead pays on your prompts, and with what setting.

    Answers each prompt once, replays every drafter at every draft length along the answers, and measures the best few
    live against plain decoding. Recommends a setting, "off" included, and writes it to a file that generate and load
    take. Press Ctrl-C to stop; the same command goes on from there.
    """
    from rich.console import Console

    from sakiyomi import targets
    from sakiyomi.bench.findings import as_dict
    from sakiyomi.bench.journal import Journal
    from sakiyomi.bench.page import require_charts, write_page, write_plots
    from sakiyomi.bench.report import model_facts
    from sakiyomi.bench.tuner import Options
    from sakiyomi.bench.tuner import tune as find
    from sakiyomi.bench.workload import builtin_workload, read_workload, select
    from sakiyomi.errors import OptionError
    from sakiyomi.files import replace_file
    from sakiyomi.sampling import SamplingParams
    from sakiyomi.verification import method

    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    if not 0 < minutes < float("inf"):
        raise OptionError(f"--minutes {minutes:g}: must be above 0")
    ways = tuple(method(each) for each in verification or ["coupled"])
    if temperature == 0 and any(each != "coupled" for each in ways):
        raise OptionError(f"--verification {ways[-1]}: is the same as coupled at --temperature 0; leave it out")
    options = Options(
        drafters=tuple(dict.fromkeys(drafter or ())),
        lengths=_lengths(num_speculative_tokens or ["1-16", "auto"]),
        verifications=ways,
        seconds=60 * minutes,
        confirm=confirm,
        batch_sizes=tuple(dict.fromkeys(batch_size or ())),
        seed=seed,
        **({} if context is None else {"contexts": _contexts(context)}),
    )
    if "none" in options.drafters:
        raise OptionError("--drafter none: plain decoding is always considered; leave it out")
    drafter_names(drafter or ["auto"], model, draft_model, trained)
    targets.resolve(kernels, weights)
    if not no_report or plots is not None:
        require_charts()
    bad: tuple[str, ...] = ()
    if workload is None:
        name, prompts = "the built-in prompts", builtin_workload()
    else:
        found = read_workload(workload, skip_bad=skip_bad)
        name, prompts, bad = found.name, found.prompts, found.bad
    prompts = select(prompts, category, per_category)
    _check_folder(output)

    llm = load_llm(
        model,
        dtype,
        weights,
        kernels,
        context_length,
        threads,
        "none",
        None,
        draft_model,
        device=device,
        trained=trained,
    )
    facts = model_facts(llm, model, draft_model)
    depends_on = {
        "facts": {name: value for name, value in facts.items() if name != "date"},
        "prompts": prompts,
        "params": params,
        "options": {"drafters": options.drafters, "lengths": options.lengths, "confirm": confirm, "ways": ways},
        "trained": [_contents(folder) for folder in trained or ()],
    }
    journal = Journal(output / "unfinished.jsonl", depends_on)
    if journal.resumed:
        print(f"sakiyomi: going on from what {output} has of this run", file=sys.stderr)
    try:
        with warnings_in_one_line(), show_progress(lines=True) as progress:
            tuning = find(llm, prompts, params, options, journal=journal, progress=progress)
    except KeyboardInterrupt:
        print("sakiyomi: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    command = shlex.join(["sakiyomi", *sys.argv[1:]])
    result = as_dict(tuning, workload=name, command=command, facts=facts, bad=bad)
    text = json.dumps(result, allow_nan=False)
    replace_file(output / "result.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    written = [output / "result.json"]
    settings = _settings(result["recommendation"], model, draft_model, trained or [])
    if settings is None:
        with _named(output):
            (output / "settings.toml").unlink(missing_ok=True)  # of an earlier run, which found more
    else:
        settings.save(output / "settings.toml", _measured(result))
        written.append(output / "settings.toml")
    if not no_report:
        write_page(result, output / "report.html")
        written.append(output / "report.html")
    if plots is not None:
        written += write_plots(result, plots)[:1]
    journal.close()
    if as_json:
        print(text)
    else:
        Console(highlight=False).print(_render(result, written))


def _lengths(texts: Sequence[str]) -> tuple[int | None, ...]:
    """Return numbers of draft tokens, None for as many as pay. Raises OptionError."""
    from sakiyomi.errors import OptionError

    found: dict[int | None, None] = {}
    for text in texts:
        first, dash, last = text.partition("-")
        low = draft_length(first)
        high = draft_length(last) if dash else low
        if low is None or high is None:
            if dash:
                raise OptionError(f"--num-speculative-tokens {text}: must be like 1-16")
            found[None] = None
        elif not 1 <= low <= high <= _LONGEST:
            raise OptionError(
                f"--num-speculative-tokens {text}: must be in 1..{_LONGEST}, the lower first; plain decoding is always "
                "considered"
            )
        else:
            found.update(dict.fromkeys(range(low, high + 1)))
    return tuple(found)


def _contexts(text: str) -> tuple[int, ...]:
    """Return bounds of contexts. Raises OptionError."""
    from sakiyomi.errors import OptionError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--context {text}: must be numbers with commas, like 256,1024") from None


def _contents(folder: Path) -> list[tuple[str, int, int]]:
    """Return what tells that a folder is as it was: names, sizes and times of its files."""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return [(str(each), (found := each.stat()).st_size, found.st_mtime_ns) for each in files]


def _check_folder(folder: Path) -> None:
    """Find out now that the folder can't be made: that should not cost the time of tuning. Raises OptionError.

    One that is made for it is removed again: what else is wrong, a model that isn't there, should leave nothing.
    """
    with _named(folder):
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.rmdir()


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    from sakiyomi.errors import OptionError

    try:
        yield
    except OSError as error:
        raise OptionError(f"--output {folder}: can't be written ({error.strerror}); name another folder") from None


def _settings(
    recommendation: Mapping[str, Any], model: str, draft_model: str | None, trained: Sequence[Path]
) -> Settings | None:
    """Return what to use; None where nothing is known."""
    from sakiyomi.loading import by_name
    from sakiyomi.settings import Settings, absolute

    if recommendation["verdict"] == "unclear":
        return None
    names = recommendation["drafter"].split("+")
    given = {name: str(folder.resolve()) for name, folder in by_name(trained).items() if name in names}
    small = absolute(draft_model) if draft_model is not None and "model" in names else None
    return Settings(
        model=absolute(model),
        drafter=recommendation["drafter"],
        num_speculative_tokens=recommendation["num_speculative_tokens"],
        verification=recommendation["verification"],
        draft_model=small,
        trained=tuple(given.values()),
    )


def _measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the settings file tells of where it comes from."""
    recommendation = result["recommendation"]
    return {
        "reason": recommendation["sentence"],
        **{name: recommendation[name] for name in ("speedup", "low", "high")},
        "workload": result["workload"]["name"],
        **{name: result["machine"][name] for name in ("date", "cpu", "threads", "sakiyomi")},
        "categories": {
            each["category"]: {name: each[name] for name in ("speedup", "low", "high")} for each in result["categories"]
        },
    }


def _render(result: Mapping[str, Any], written: Sequence[Path]) -> Group:
    """Return what ``rich.print`` shows: the recommendation, the best candidates, categories, notes."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    styles = {"faster": "bold green", "off": "bold red", "slower": "bold red", "unclear": "bold yellow"}

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    def times(figures: Mapping[str, Any]) -> str:
        if figures["speedup"] is None:
            return "–"
        known = "" if figures["low"] is None else f" ({figures['low']:.2f} to {figures['high']:.2f})"
        return f"{figures['speedup']:.2f}{known}"

    recommendation = result["recommendation"]
    candidates = Table(title="Best candidates", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("setting", "speed-up\nmeasured, 95 %", "predicted", "off by", "tokens\n/call", "acceptance"):
        candidates.add_column(header, justify="left" if header == "setting" else "right", overflow="fold")
    for each in _best(result["candidates"]):
        predicted, measured = each["predicted"], each["measured"]
        error = measured["prediction_error"] if measured else None
        shown = measured or predicted
        rate = shown["acceptance_rate"]
        candidates.add_row(
            each["case"],
            times(measured) if measured else "",
            number(predicted["speedup"]) if predicted else "",
            "" if error is None else f"{error:+.0%}",
            number(shown["tokens_per_target_call"]),
            "–" if rate is None else f"{rate:.0%}",
        )
    parts: list[Table | Text] = [Text(recommendation["sentence"], style=styles[recommendation["verdict"]]), candidates]
    if len(result["categories"]) > 1:
        table = Table(
            title=f"By category: {recommendation['measured']}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for header in ("category", "prompts", "speed-up, 95 %", "tokens/call", "verdict"):
            table.add_column(header, justify="left" if header in ("category", "verdict") else "right")
        for each in result["categories"]:
            table.add_row(
                each["category"],
                str(each["prompts"]),
                times(each),
                number(each["tokens_per_target_call"]),
                Text(each["verdict"], style=styles[each["verdict"]]),
            )
        parts.append(table)
    exact = result["exactness"]
    lines = list(result["notes"])
    if result["prediction"]["warning"]:
        lines.insert(0, result["prediction"]["warning"])
    if exact["differences"]:
        lines.insert(0, f"DIFFERENT: {len(exact['differences'])} outputs weren't those of plain decoding.")
    elif exact["compared"]:
        lines.append(f"Same output: {exact['identical']} of {exact['compared']} answers are those of plain decoding.")
    parts.extend(Text(line) for line in lines)
    parts.append(Text("Written: " + ", ".join(map(str, written))))
    return Group(*parts)


def _best(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what was measured, then of each other drafter the best that was predicted."""
    measured = [each for each in candidates if each["measured"]]
    others: dict[str, Mapping[str, Any]] = {}
    for each in candidates:
        if each["predicted"] and each["drafter"] not in {one["drafter"] for one in measured}:
            best = others.get(each["drafter"])
            if best is None or (each["predicted"]["speedup"] or 0) > (best["predicted"]["speedup"] or 0):
                others[each["drafter"]] = each
    key = "speedup"
    return [
        *sorted(measured, key=lambda each: -(each["measured"][key] or 0)),
        *sorted(others.values(), key=lambda each: -(each["predicted"][key] or 0)),
    ]
