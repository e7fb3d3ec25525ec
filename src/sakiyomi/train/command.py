"""The command ``sakiyomi train``: parse, call, print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakiyomi.progress import show_progress, warnings_in_one_line

if TYPE_CHECKING:
    from sakiyomi.train.card import Card
    from sakiyomi.train.data import Response

EPILOG = (
    "Example: [bold]sakiyomi train smollm2-135m --prompts prompts.jsonl --kind eagle3 --minutes 60 --output drafter"
    "[/bold], then [bold]sakiyomi generate --trained drafter ...[/bold]"
)

_NETWORKS = ("mlp", "eagle3", "block")  # of run.KINDS, which would import torch; a test compares
_LAYERED = ("eagle3", "block")
# What other options than these concern a kind, or mean something only where responses are written.
_OF_KINDS = {
    "minutes": _NETWORKS,
    "disk": _NETWORKS,
    "vocabulary": _NETWORKS,
    "batch": _NETWORKS,
    "learning_rate": _NETWORKS,
    "layers": _LAYERED,
    "intermediate": _LAYERED,
    "own_head": _LAYERED,
    "inner": ("mlp",),
    "block_size": ("block",),
    "order": ("table",),
    "megabytes": ("table",),
}
_OF_PROMPTS = ("max_new_tokens", "per_prompt", "generate_batch", "generate_minutes")


def train(
    context: typer.Context,
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
        float | None, typer.Option(help="Stop after so many minutes of responses, of all runs together.")
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
    model_name: Annotated[
        str | None,
        typer.Option(
            help="What the drafter's files call the model; vLLM wants its hub id. Default: MODEL, or its folder."
        ),
    ] = None,
    own_head: Annotated[
        bool, typer.Option("--own-head", help="Write the head too, which is the model's: larger, and what vLLM needs.")
    ] = False,
    order: Annotated[int, typer.Option(help="Length of the n-grams of kind table, 2 to 8.")] = 5,
    megabytes: Annotated[
        float | None, typer.Option(help="The most that kind table may take. Default: 8 bytes for each token.")
    ] = None,
    batch: Annotated[int, typer.Option(help="The most positions in one step of the optimiser.")] = 1024,
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
    _check_options(context, {name: value for name, value in locals().items() if name != "context"})

    import torch

    from sakiyomi.bench.workload import load_workload
    from sakiyomi.errors import OptionError
    from sakiyomi.llm import LLM
    from sakiyomi.loading import DTYPES, LoadedModel, check_device
    from sakiyomi.models import open_weights, read_config
    from sakiyomi.train.data import count_held_out, generate_responses, read_responses
    from sakiyomi.train.run import DrafterOptions, check_output, layers_read, train_drafter
    from sakiyomi.train.target import Teacher, fingerprint
    from sakiyomi.train.trainer import TrainOptions

    if dtype not in DTYPES:
        raise OptionError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    check_device(device, None)
    drafter = DrafterOptions(
        draft_vocabulary=vocabulary,
        layers=_layers(layers),
        inner=inner,
        block_size=block_size,
        order=order,
        megabytes=megabytes,
        own_head=own_head,
    )
    folder = work or output / "training"
    check_output(output, kind, model=Path(model) if Path(model).exists() else None, work=work)
    to_answer = load_workload(prompts) if prompts else ()
    found = read_responses(responses) if responses else []
    count_held_out(len({json.dumps(each.input) for each in to_answer} if prompts else {each.prompt for each in found}))
    if threads is not None:
        torch.set_num_threads(threads)
    with _resumable(), warnings_in_one_line(), show_progress(lines=True) as progress:
        loaded = LoadedModel.load(model, dtype=dtype, device=None if device == "cpu" else device)  # type: ignore[arg-type]
        check_output(output, kind, model=loaded.folder, work=work)
        llm = LLM(loaded.target, loaded.tokenizer, drafter="none", costs=loaded.costs)
        own = fingerprint(loaded.folder, f"{loaded.target.dtype} {loaded.target.weight_format}")
        teacher = Teacher.of(
            loaded.target,
            loaded.parts,
            read_config(loaded.folder),
            open_weights(loaded.folder),
            model_name or (Path(model).resolve().name if Path(model).exists() else model),
            intermediate,
            fingerprint=own,
            by_states=kind != "table",
        )
        if kind != "table":
            layers_read(kind, teacher, drafter)  # which raises now, and not after hours of responses
        with _alone(folder) if prompts or kind != "table" else nullcontext():
            if prompts:
                found = generate_responses(
                    llm,
                    to_answer,
                    folder / "responses.jsonl",
                    model=own,
                    max_new_tokens=max_new_tokens,
                    responses_per_prompt=per_prompt,
                    batch=generate_batch,
                    seed=seed,
                    minutes=generate_minutes,
                    progress=progress,
                )
            else:
                _check_tokens(found, loaded.target.vocab_size, responses)
            computed = torch.bfloat16 if loaded.target.dtype is torch.bfloat16 else torch.float32
            card = train_drafter(
                kind,
                teacher,
                found,
                output,
                TrainOptions(
                    minutes=minutes, batch=batch, learning_rate=learning_rate, seed=seed, dtype=computed, device=device
                ),
                drafter,
                work=folder,
                disk_gb=disk,
                costs=llm.costs(),
                command=_command(sys.argv[1:]),
                progress=progress,
            )
    _print(card, output, as_json)
    if card.ended == "interrupted":
        sys.exit(130)


def _check_options(context: typer.Context, given: dict[str, Any]) -> None:
    """Find what is wrong with options before anything is loaded. Raises OptionError."""
    from sakiyomi.errors import OptionError

    kind = given["kind"]
    if kind not in ("table", *_NETWORKS):
        raise OptionError(f"--kind {kind}: must be one of table, {', '.join(_NETWORKS)}")
    if (given["prompts"] is None) == (given["responses"] is None):
        raise OptionError("--prompts, --responses: give one of them")
    for name, value in given.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = f"--{name.replace('_', '-')}"
        if kind not in _OF_KINDS.get(name, (kind,)):
            raise OptionError(f"{option} {value}: does nothing for --kind {kind}; leave it out")
        if name in _OF_PROMPTS and given["prompts"] is None:
            raise OptionError(f"{option} {value}: does nothing with --responses, which are written already")
    for name, least, most in (
        ("max_new_tokens", 8, None),
        ("per_prompt", 1, None),
        ("generate_batch", 1, None),
        ("vocabulary", 2, None),
        ("inner", 2, None),
        ("intermediate", 2, None),
        ("block_size", 1, None),
        ("order", 2, 8),
        ("batch", 1, None),
        ("seed", 0, 2**31 - 1),
        ("threads", 1, None),
    ):
        value = given[name]
        if value is not None and not least <= value <= (value if most is None else most):
            limits = f"at least {least}" if most is None else f"in {least}..{most}"
            raise OptionError(f"--{name.replace('_', '-')} {value}: must be {limits}")
    for name in ("minutes", "generate_minutes", "disk", "learning_rate", "megabytes"):
        value = given[name]
        if value is not None and not 0 < value < float("inf"):
            raise OptionError(f"--{name.replace('_', '-')} {value:g}: must be above 0")


@contextmanager
def _resumable() -> Iterator[None]:
    """Where Ctrl-C ends a run at once, say what may be done about it."""
    try:
        yield
    except KeyboardInterrupt:
        print("sakiyomi: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _command(arguments: list[str]) -> str:
    """Return a command line to show to others: without the folders that are above this one."""
    import shlex

    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
        if os.path.isabs(value):
            path = os.path.relpath(value)
            value = os.path.basename(path) if path.startswith(os.pardir) else path
        shown.append(option + equals + value)
    return shlex.join(["sakiyomi", *shown])


def _layers(text: str | None) -> tuple[int, ...] | None:
    from sakiyomi.errors import OptionError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--layers {text}: must be numbers with commas, like 2,15,27") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make a folder and hold it: two runs would write over each other's files. Raises OptionError."""
    from sakiyomi.errors import OptionError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        raise OptionError(f"--work {folder}: can't be written to ({error.strerror}); name another folder") from None
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows, where nobody looks
            pass
        except OSError:
            raise OptionError(
                f"--work {folder}: another run uses it; wait for its end, or name another folder"
            ) from None
        yield


def _check_tokens(responses: list[Response], vocab_size: int, path: Path | None) -> None:
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
