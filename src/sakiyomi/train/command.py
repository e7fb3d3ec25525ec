"""The command ``sakiyomi train``: parse, call, print."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sakiyomi.train.card import Card

EPILOG = (
    "Example: [bold]sakiyomi train smollm2-135m --prompts prompts.jsonl --kind eagle3 --minutes 60 --output drafter"
    "[/bold], then [bold]sakiyomi generate --trained drafter ...[/bold]"
)


def train(
    model: Annotated[str, typer.Argument(help="The model to draft for, named as --model is elsewhere.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the drafter; made if it isn't there.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Prompts like those to come: JSON lines, each {"messages": [...]} or {"prompt": "..."}. '
            "The model answers them first, and is learned from: hundreds at least, better thousands."
        ),
    ] = None,
    responses: Annotated[
        Path | None, typer.Option(help="A file of responses that an earlier run made, in place of --prompts.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="table: n-grams counted in the responses, in seconds. eagle3, mlp, block: networks that read the "
            "model's states."
        ),
    ] = "eagle3",
    minutes: Annotated[float, typer.Option(help="How long to train; responses and states come on top.")] = 30.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens of a response.")] = 160,
    per_prompt: Annotated[int, typer.Option(help="Responses to each prompt.")] = 1,
    generate_batch: Annotated[int, typer.Option(help="Responses that are written at a time.")] = 64,
    generate_minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes of responses, with those that there are.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="A folder for responses, states and what an interrupted run goes on from; may serve several drafters. "
            "Default: OUTPUT/training, which you can delete then."
        ),
    ] = None,
    disk: Annotated[
        float, typer.Option(help="GB that the model's states may take; what doesn't fit is left out.")
    ] = 20.0,
    vocabulary: Annotated[int, typer.Option(help="How many tokens the drafter can propose: the most frequent.")] = 8192,
    layers: Annotated[
        str | None, typer.Option(help="Layers whose states eagle3 and block read, like 2,15,27. Default: as EAGLE-3.")
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="Width of the MLP in eagle3 and block. Default: that of the model.")
    ] = None,
    inner: Annotated[int, typer.Option(help="Width of kind mlp.")] = 768,
    block_size: Annotated[int, typer.Option(help="Tokens of a draft of kind block.")] = 6,
    order: Annotated[int, typer.Option(help="Length of the n-grams of kind table.")] = 5,
    batch: Annotated[int, typer.Option(help="Positions in one step of the optimiser.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="The highest; it rises first and falls then.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of responses, of what is held out, and of training.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="To compute in: bf16, fp32, or auto (as the model runs). Parameters are float32.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="Where the drafter is trained, and the model runs: cpu, cuda, ...")
    ] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Processor threads. Default: all cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as one JSON object.")] = False,
) -> None:
    """Train a drafter for a model on its own answers to your prompts.

    Prompts are split: one in twenty is held out, and the figures are of those. Press Ctrl-C to end early: the best so
    far is saved, and the same command goes on from there. The text that the model writes doesn't depend on its drafter.
    """
    from sakiyomi.errors import OptionError
    from sakiyomi.train.run import KINDS, DrafterOptions
    from sakiyomi.train.trainer import TrainOptions

    if kind not in KINDS:
        raise OptionError(f"--kind {kind}: must be one of {', '.join(KINDS)}")
    if (prompts is None) == (responses is None):
        raise OptionError("--prompts, --responses: give one of them")
    for option, value, least in (
        ("--max-new-tokens", max_new_tokens, 8),
        ("--per-prompt", per_prompt, 1),
        ("--generate-batch", generate_batch, 1),
        ("--vocabulary", vocabulary, 2),
        ("--inner", inner, 2),
        ("--intermediate", intermediate, 2),
        ("--block-size", block_size, 1),
        ("--batch", batch, 1),
        ("--threads", threads, 1),
    ):
        if value is not None and value < least:
            raise OptionError(f"{option} {value}: must be at least {least}")
    for name, number in (
        ("--minutes", minutes),
        ("--generate-minutes", generate_minutes),
        ("--disk", disk),
        ("--learning-rate", learning_rate),
    ):
        if number is not None and not 0 < number < float("inf"):
            raise OptionError(f"{name} {number:g}: must be above 0")

    import torch

    from sakiyomi.bench.workload import load_workload
    from sakiyomi.llm import LLM
    from sakiyomi.loading import DTYPES, LoadedModel, check_device
    from sakiyomi.models import open_weights, read_config
    from sakiyomi.train.data import generate_responses, read_responses
    from sakiyomi.train.run import train_drafter
    from sakiyomi.train.target import Teacher

    if dtype not in DTYPES:
        raise OptionError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    check_device(device, None)
    chosen = _layers(layers)
    loaded_prompts = load_workload(prompts) if prompts else ()
    found = read_responses(responses) if responses else []
    if threads is not None:
        torch.set_num_threads(threads)
    folder = work or output / "training"
    with _warnings_in_one_line(), _progress() as progress:
        loaded = LoadedModel.load(model, dtype=dtype, device=None if device == "cpu" else device)  # type: ignore[arg-type]
        llm = LLM(loaded.target, loaded.tokenizer, drafter="none", costs=loaded.costs)
        if prompts:
            _make(folder)
            found = generate_responses(
                llm,
                loaded_prompts,
                folder / "responses.jsonl",
                max_new_tokens=max_new_tokens,
                responses_per_prompt=per_prompt,
                batch=generate_batch,
                seed=seed,
                minutes=generate_minutes,
                progress=progress,
            )
        _check(found, loaded.target.vocab_size, responses)
        teacher = Teacher.of(
            loaded.target,
            loaded.parts,
            read_config(loaded.folder),
            open_weights(loaded.folder),
            model,
            intermediate,
        )
        computed = torch.bfloat16 if loaded.target.dtype is torch.bfloat16 else torch.float32
        options = TrainOptions(
            minutes=minutes, batch=batch, learning_rate=learning_rate, seed=seed, dtype=computed, device=device
        )
        drafter = DrafterOptions(
            draft_vocabulary=vocabulary, layers=chosen, inner=inner, block_size=block_size, order=order
        )
        card = train_drafter(
            kind,
            teacher,
            found,
            output,
            options,
            drafter,
            work=folder,
            disk_gb=disk,
            costs=llm.costs(),
            command=_command(),
            progress=progress,
        )
    _print(card, output, as_json)
    if card.ended == "interrupted":
        sys.exit(130)


def _command() -> str:
    """Return the command line that this run was started with."""
    import shlex

    return shlex.join(["sakiyomi", *sys.argv[1:]])


def _layers(text: str | None) -> tuple[int, ...] | None:
    from sakiyomi.errors import OptionError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--layers {text}: must be numbers with commas, like 2,15,27") from None


def _make(folder: Path) -> None:
    from sakiyomi.errors import OptionError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {folder}: can't be made ({error.strerror}); name another folder") from None


def _check(responses: list[Any], vocab_size: int, path: Path | None) -> None:
    """Raise OptionError for responses of a model with more tokens."""
    from sakiyomi.errors import OptionError

    for response in responses:
        if not all(0 <= token < vocab_size for part in (response.prompt, response.tokens) for token in part):
            raise OptionError(
                f"--responses {path}: prompt {response.id} has token ids that aren't in 0..{vocab_size - 1}; "
                "give responses of the same model"
            )


def _print(card: Card, output: Path, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    if as_json:
        print(json.dumps(card.as_dict()))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in card.rows():
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"written to {output}; to use it: --trained {output}", soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that shows how far the run is, on standard error, with the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        stage = [""]

        def show(done: int, total: int, what: str) -> None:
            if what.split(":")[0] != stage[0]:  # what comes next has a pace of its own
                stage[0] = what.split(":")[0]
                bar.reset(task)
            bar.update(task, completed=done, total=total, description=what)

        yield show


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show a RuntimeWarning as a line on standard error, without the file and line that raised it."""
    with warnings.catch_warnings():
        otherwise = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, RuntimeWarning):
                print(f"sakiyomi: {' '.join(str(message).split())}", file=sys.stderr)
            else:
                otherwise(message, category, *where, **more)

        warnings.showwarning = show
        yield
