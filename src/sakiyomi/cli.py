"""The command line: parse, call, print. Heavy imports wait until a command runs."""

from __future__ import annotations

import gc
import io
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sakiyomi.bench import Evaluation, Quality
    from sakiyomi.engine import Token
    from sakiyomi.llm import LLM, Prompt
    from sakiyomi.stats import Stats

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding that is exact: reads ahead, never changes the text.",
)

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A known name (smollm2-135m), a Hugging Face folder, a hub id, or a .gguf file."
    ),
]
Dtype = Annotated[str, typer.Option(help="auto (bf16 wherever that is faster, else fp32), bf16, or fp32.")]
Weights = Annotated[
    str, typer.Option(help="auto (as --dtype), or int8: half the bytes, at some cost that bench measures.")
]
Kernels = Annotated[
    str,
    typer.Option(
        help="An instruction path of the compiled core (amx, avx2, ...), or torch. "
        "auto: what the environment variable SAKIYOMI_KERNELS says, else the fastest."
    ),
]
ContextLength = Annotated[int | None, typer.Option(help="Lower the model's own context length.")]
Threads = Annotated[
    int | None,
    typer.Option(help="Processor threads. One is fastest where other work keeps the cores busy. Default: all cores."),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Choose among this many of the likeliest tokens.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest tokens that hold this much probability.")]
MinP = Annotated[float, typer.Option(help="Choose among tokens with this fraction of the top probability.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text, with any drafter.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def main() -> None:
    """Run the command line, and turn the errors that we know into one line and an exit status."""
    from sakiyomi.errors import OptionError, PromptError, SakiyomiError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        app()
    except SakiyomiError as error:
        print(f"sakiyomi: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, OptionError | PromptError) else 1)


def _version(wanted: bool) -> None:
    if wanted:
        from sakiyomi import __version__

        print(f"sakiyomi {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command(
    epilog='Example: [bold]sakiyomi generate "Name three rivers." --show-drafts --stats[/bold]',
)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: Model = "smollm2-135m",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="ngram, or none for plain decoding.")] = "ngram",
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", help="Tokens to draft in a round.")
    ] = 7,
    reference: Annotated[
        Path | None, typer.Option(help="A text file that the ngram drafter looks things up in too.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before become less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken from the logit of tokens written before.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time it was written.")] = 0.0,
    min_new_tokens: Annotated[int, typer.Option(help="Hold back the model's own end until then.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Can be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.")] = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    kernels: Kernels = "auto",
    context_length: ContextLength = None,
    threads: Threads = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour the accepted draft tokens.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show what was measured, on standard error.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, streaming, reading ahead."""
    from sakiyomi.errors import OptionError, PromptError
    from sakiyomi.sampling import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_new_tokens=min_new_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        seed=seed,
    )
    text = _read_stdin() if prompt == "-" else prompt
    if not text:  # as a message it would be answered
        raise PromptError("prompt: is empty; give at least one character")
    looked_up = None if reference is None else _read_reference(reference, drafter)
    llm = _load(model, dtype, weights, kernels, context_length, threads, drafter, num_speculative_tokens)
    if looked_up is not None:
        from sakiyomi.drafters import NgramDrafter

        llm.drafter = NgramDrafter(reference=llm.tokenizer.encode(looked_up, special=False))
    given: Prompt = text
    if not raw and llm.tokenizer.chat_template is not None:
        given = [{"role": "system", "content": system}] if system else []
        given = [*given, {"role": "user", "content": text}]
    elif system:
        raise OptionError(
            f"--system {system!r}: needs the chat template, which {'--raw' if raw else model} goes without"
        )
    if as_json:
        generation = llm.generate(given, params)
        print(json.dumps(_generation_dict(generation)))  # ASCII: valid in any encoding
        return
    measured = _stream(llm, given, params, show_drafts)
    if stats:
        _print_stats(measured, llm.exactness)


def _stream(llm: LLM, prompt: Prompt, params: Any, show_drafts: bool) -> Stats:
    """Print an answer as it comes and return what was measured."""
    import time

    from rich.console import Console

    from sakiyomi.stats import Stats

    console = Console()  # to be asked only: printing, it would change the text
    colour = console.color_system not in (None, "windows") and not console.no_color
    began, first, records = time.perf_counter(), 0.0, []
    chunks = llm.stream(prompt, params)
    try:
        for chunk in chunks:
            records.append(chunk.record)
            first = first or time.perf_counter() - began
            text = "".join(_marked(token, colour) for token in chunk.tokens) if show_drafts else chunk.text
            print(text, end="", flush=True)
    finally:
        print(flush=True)
    return Stats(tuple(records), first, time.perf_counter() - began)


def _marked(token: Token, colour: bool) -> str:
    """Return a token's text, marked if it was drafted."""
    if token.drafter is None or not token.text:
        return token.text
    return typer.style(token.text, fg="green") if colour else f"«{token.text}»"


def _print_stats(stats: Stats, exactness: str) -> None:
    from rich.console import Console
    from rich.table import Table

    def show(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    split = stats.time_split
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = [
        ("tokens", f"{stats.tokens} in {stats.target_calls} target calls"),
        ("tokens per target call", show(stats.tokens_per_target_call, ".2f")),
        ("acceptance rate", f"{show(stats.acceptance_rate, '.0%')} of {stats.drafted} drafted"),
        ("acceptance by position", " ".join(f"{a:.0%}" for a in stats.per_position_acceptance) or "–"),
        ("time to first token", f"{stats.ttft_s * 1e3:.0f} ms"),
        ("time per output token", "–" if stats.tpot_s is None else f"{stats.tpot_s * 1e3:.1f} ms"),
        ("time in rounds", ", ".join(f"{name} {show(part, '.1%')}" for name, part in split.items())),
        ("exactness", exactness),
    ]
    for row in rows:
        table.add_row(*row)
    Console(stderr=True, highlight=False).print(table)


def _generation_dict(generation: Any) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt_token_ids),
        "exactness": generation.exactness,
        "stats": generation.stats.as_dict(),
    }


@app.command(
    epilog="Example: [bold]sakiyomi bench --workload prompts.jsonl -d ngram -k 3 -k 7 --repeats 3[/bold]",
)
def bench(
    model: Model = "smollm2-135m",
    workload: Annotated[
        Path | None,
        typer.Option(help='JSON lines, each {"messages": [...]} or {"prompt": "..."}. Default: 24 built-in prompts.'),
    ] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only this category. Can be repeated.")] = None,
    per_category: Annotated[int | None, typer.Option(help="At most this many prompts of each category.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="A drafter to measure. Can be repeated.")
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option("--num-speculative-tokens", "-k", help="Tokens to draft in a round. Can be repeated."),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(help="How many times each prompt is answered by each case.")] = 1,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    kernels: Kernels = "auto",
    context_length: ContextLength = None,
    threads: Threads = None,
    quality_text: Annotated[
        Path | None,
        typer.Option(help="A text file to measure the quality of int8 weights on. Default: Python's own reference."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure plain decoding against drafters on a workload: interleaved, paired, output compared.

    With --weights int8 also what they cost: perplexity, and how often the likeliest token stays the same.
    """
    from rich.console import Console

    from sakiyomi import drafters, targets
    from sakiyomi.bench import report
    from sakiyomi.bench.runner import Candidate, run_benchmark
    from sakiyomi.bench.workload import builtin_workload, load_workload, select
    from sakiyomi.sampling import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    prompts = select(load_workload(workload) if workload else builtin_workload(), category, per_category)
    candidates = [Candidate(d, k) for d in drafter or ["ngram"] for k in num_speculative_tokens or [3, 5, 7]]
    for candidate in candidates:
        drafters.resolve(candidate.drafter)  # a wrong name should not cost the time of loading
    targets.resolve(kernels, weights)
    text = _quality_text(quality_text, weights)

    def load(weights: str) -> LLM:
        return _load(model, dtype, weights, kernels, context_length, threads, "none", 0)

    llm, quality = (load(weights), None) if text is None else _load_and_compare(load, weights, *text)
    with _progress() as progress:
        result = run_benchmark(llm, prompts, candidates, params, repeats=repeats, seed=seed, progress=progress)
    dtype_name = str(getattr(llm.target, "dtype", "unknown")).removeprefix("torch.")
    facts = report.machine_facts(
        model=model,
        dtype=dtype_name,
        weights=getattr(llm.target, "weight_format", dtype_name),
        kernels=getattr(llm.target, "kernels", "torch"),
        exactness=llm.exactness,
    )
    if as_json:
        print(json.dumps(report.as_dict(result, facts, quality)))
    elif markdown:
        print(report.markdown(result, facts, quality))
    else:
        Console().print(report.render(result, facts, quality))
    if result.partial:
        sys.exit(130)
    if result.differences:
        sys.exit(1)


@app.command()
def models() -> None:
    """List the model names that need no path, and where converted models are kept."""
    from sakiyomi.models import KNOWN_MODELS, cache_dir

    for name, known in KNOWN_MODELS.items():
        print(f"{name:16} {known.description}")
    print(f"cache: {cache_dir()}")


def _load(
    model: str,
    dtype: str,
    weights: str,
    kernels: str,
    context_length: int | None,
    threads: int | None,
    drafter: str,
    num_speculative_tokens: int,
) -> LLM:
    from sakiyomi.errors import OptionError

    if threads is not None and threads < 1:
        raise OptionError(f"--threads {threads}: must be at least 1")

    import torch

    from sakiyomi.llm import load

    if threads is not None:
        torch.set_num_threads(threads)

    with _warnings_in_one_line():
        return load(
            model,
            dtype=dtype,  # type: ignore[arg-type]  # load checks it
            weights=weights,  # type: ignore[arg-type]
            kernels=kernels,
            context_length=context_length,
            drafter=drafter,
            num_speculative_tokens=num_speculative_tokens,
        )


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show a RuntimeWarning as a line on standard error, without the file and line that raised it."""
    with warnings.catch_warnings():
        show_otherwise = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, RuntimeWarning):
                print(f"sakiyomi: {' '.join(str(message).split())}", file=sys.stderr)
            else:
                show_otherwise(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _load_and_compare(load: Callable[[str], LLM], weights: str, text: str, name: str) -> tuple[LLM, Quality]:
    """Return the model with these weights, and how it compares on a text with the model with its own."""
    from sakiyomi.bench.quality import compare

    reference = _evaluate(load("auto"), text, "auto")  # kept by no name: two models at once may not fit in memory
    gc.collect()
    llm = load(weights)
    return llm, compare(reference, _evaluate(llm, text, weights), text=name)


def _evaluate(llm: LLM, text: str, weights: str) -> Evaluation:
    from sakiyomi.bench.quality import evaluate

    with _progress() as progress:
        return evaluate(
            llm.target,
            llm.tokenizer.encode(text),
            progress=lambda done, total: progress(done, total, f"quality, weights {weights}"),
        )


def _read_stdin() -> str:
    from sakiyomi.errors import PromptError

    try:
        return sys.stdin.read()
    except (AttributeError, OSError, ValueError) as error:  # closed, or not text
        raise PromptError(f"prompt -: standard input can't be read as text: {error}") from None


def _read_reference(path: Path, drafter: str) -> str:
    from sakiyomi.errors import OptionError

    if drafter != "ngram":
        raise OptionError(f"--reference {path}: only the ngram drafter uses it; add --drafter ngram")
    return _read_text(path, "--reference")


def _quality_text(path: Path | None, weights: str) -> tuple[str, str] | None:
    """Return the text to measure quality on, and which it is; None where there is nothing to measure."""
    from sakiyomi.bench.quality import KILOBYTES, plain_text
    from sakiyomi.errors import OptionError

    if weights == "auto":
        if path is not None:
            raise OptionError(f"--quality-text {path}: only smaller weights are measured on it; add --weights int8")
        return None
    if path is None:
        return plain_text(), f"the first {KILOBYTES} KB of Python {platform.python_version()}'s language reference"
    text = _read_text(path, "--quality-text")
    if not text:
        raise OptionError(f"--quality-text {path}: is empty; give some pages of text")
    return text, str(path)


def _read_text(path: Path, option: str) -> str:
    from sakiyomi.errors import OptionError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{option} {path}: can't be read as UTF-8 text: {error}") from None


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that shows how far a benchmark is, on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


if __name__ == "__main__":
    main()
