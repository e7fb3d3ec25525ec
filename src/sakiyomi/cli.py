"""The command line: parse, call, print. Heavy imports wait until a command runs."""

from __future__ import annotations

import gc
import io
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakiyomi.options import (
    ALL_DRAFTERS,
    AUTO,
    AsJson,
    Category,
    ContextLength,
    Device,
    DraftModel,
    Dtype,
    Kernels,
    MaxNewTokens,
    MinP,
    Model,
    PerCategory,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Trained,
    Verification,
    Weights,
    Workload,
    draft_length,
    drafter_names,
    load_llm,
)
from sakiyomi.progress import show_progress, warnings_in_one_line
from sakiyomi.train.command import EPILOG as TRAIN_EPILOG
from sakiyomi.train.command import train
from sakiyomi.tune_command import EPILOG as TUNE_EPILOG
from sakiyomi.tune_command import tune

if TYPE_CHECKING:
    from sakiyomi.bench import Evaluation, Quality, WeightsFacts
    from sakiyomi.bench.weights import NamedWeights
    from sakiyomi.drafters.suffix import SuffixDrafter
    from sakiyomi.engine import Token
    from sakiyomi.llm import LLM, Prompt, Speculation
    from sakiyomi.settings import Settings
    from sakiyomi.stats import Stats

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding that is exact: reads ahead, never changes the text.",
)


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
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: Model = "smollm2-135m",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            "-d",
            help=f"{ALL_DRAFTERS}, several joined with +, or none: plain decoding. "
            "auto: suffix (without the compiled core: ngram), those trained for the model, and model where there is "
            "one.",
        ),
    ] = AUTO,
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="NUMBER|auto",
            help="Tokens to draft in a round, 0: plain decoding. auto: as many as pay.",
        ),
    ] = AUTO,
    verification: Verification = "coupled",
    draft_model: DraftModel = None,
    trained: Trained = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="A file that tune wrote: it names the model, and says all of the last six options."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A text file that the drafters suffix and ngram look things up in too.")
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(help="A file in which the drafter suffix keeps what it remembers, from answer to answer."),
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
    device: Device = None,
    context_length: ContextLength = None,
    threads: Threads = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour the accepted draft tokens.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show what was measured, on standard error.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, streaming, reading ahead."""
    from sakiyomi.errors import OptionError, PromptError
    from sakiyomi.sampling import SamplingParams
    from sakiyomi.settings import same_model

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
    if settings is not None:
        tuned = _tuned(context, settings)
        if _is_default(context, "model"):
            model = tuned.model
        elif not same_model(model, tuned.model):
            print(f"sakiyomi: --settings {settings}: were tuned for {tuned.model}, not for {model}", file=sys.stderr)
        drafter, verification, draft_model = tuned.drafter, tuned.verification, tuned.draft_model
        num_speculative_tokens = AUTO if tuned.num_speculative_tokens is None else str(tuned.num_speculative_tokens)
        trained = [Path(each) for each in tuned.trained]
    k = draft_length(num_speculative_tokens)
    names = drafter_names([drafter], model, draft_model, trained)
    if k == 0 and (reference or memory):
        raise OptionError("--num-speculative-tokens 0: plain decoding uses neither --reference nor --memory")
    looked_up = None if reference is None else _read_reference(reference, names, drafter)
    if memory is not None:
        _check_memory(memory, names, drafter)
    llm = load_llm(
        model, dtype, weights, kernels, context_length, threads, drafter, k, draft_model, verification, device, trained
    )
    setting, suffix = _speculation(llm, drafter, k, looked_up, memory)
    given: Prompt = text
    if not raw and llm.tokenizer.chat_template is not None:
        given = [{"role": "system", "content": system}] if system else []
        given = [*given, {"role": "user", "content": text}]
    elif system:
        raise OptionError(
            f"--system {system!r}: needs the chat template, which {'--raw' if raw else model} goes without"
        )
    with warnings_in_one_line(later=True), _kept(suffix, memory, llm.tokenizer.fingerprint):
        if as_json:
            generation = llm.generate(given, params, speculation=setting)
            print(json.dumps(_generation_dict(generation)))  # ASCII: valid in any encoding
            return
        measured = _stream(llm, given, params, show_drafts, setting)
    if stats:
        _print_stats(measured, llm.exactness)


def _tuned(context: typer.Context, path: Path) -> Settings:
    """Read a settings file. Raises OptionError where options say the same."""
    from sakiyomi.errors import OptionError
    from sakiyomi.settings import Settings

    for name in ("drafter", "num_speculative_tokens", "verification", "draft_model", "trained"):
        if not _is_default(context, name):
            raise OptionError(f"--settings {path}: says --{name.replace('_', '-')} too; leave one of them out")
    try:
        return Settings.load(path)
    except OptionError as error:
        raise OptionError(f"--{error}") from None


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _speculation(
    llm: LLM, drafter: str, k: int | None, looked_up: str | None, memory: Path | None
) -> tuple[Speculation | None, SuffixDrafter | None]:
    """Return a setting whose drafters have the reference and the memory, and the one that remembers.

    None where there is neither: the model's own setting is as good.
    """
    from dataclasses import replace

    from sakiyomi.drafters import NgramDrafter

    if looked_up is None and memory is None:
        return None, None
    setting = llm.speculation(drafter, k)
    ids = () if looked_up is None else llm.tokenizer.encode(looked_up, special=False)
    made = {each.name: each for each in setting.drafters}
    suffix = _suffix_drafter(memory, ids, llm.tokenizer.fingerprint) if "suffix" in made else None
    if suffix:
        made["suffix"] = suffix
    if "ngram" in made:
        made["ngram"] = NgramDrafter(reference=ids)
    return replace(setting, drafters=tuple(made.values())), suffix


def _suffix_drafter(memory: Path | None, reference: Sequence[int], tokenizer: str | None) -> SuffixDrafter:
    """Return a drafter that remembers what a file holds, if there is one."""
    from sakiyomi.drafters.suffix import SuffixDrafter
    from sakiyomi.errors import OptionError

    if memory is None or not memory.exists():
        return SuffixDrafter(reference=reference)
    try:
        return SuffixDrafter.load(memory, tokenizer, reference=reference)
    except OptionError as error:
        raise OptionError(f"--memory {error}") from None


@contextmanager
def _kept(drafter: SuffixDrafter | None, memory: Path | None, tokenizer: str) -> Iterator[None]:
    """Save what a drafter remembers in the end, also where the end is Ctrl-C."""
    from sakiyomi.errors import OptionError

    try:
        yield
    finally:
        if drafter is not None and memory is not None:
            try:
                drafter.save(memory, tokenizer)
            except OptionError as error:
                raise OptionError(f"--memory {error}") from None


def _stream(llm: LLM, prompt: Prompt, params: Any, show_drafts: bool, setting: Speculation | None) -> Stats:
    """Print an answer as it comes and return what was measured."""
    import time

    from rich.console import Console

    from sakiyomi.stats import Stats

    console = Console()  # to be asked only: printing, it would change the text
    colour = console.color_system not in (None, "windows") and not console.no_color
    began, first, records = time.perf_counter(), 0.0, []
    chunks = llm.stream(prompt, params, speculation=setting)
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
        (
            "draft tokens per round",
            f"{show(stats.mean_drafted, '.1f')} ({show(stats.mean_draft_length, '.1f')} where drafted; "
            f"none in {show(stats.rounds_without_draft, '.0%')} of rounds)",
        ),
        *_drafter_rows(stats),
        ("time to first token", f"{stats.ttft_s * 1e3:.0f} ms"),
        ("time per output token", "–" if stats.tpot_s is None else f"{stats.tpot_s * 1e3:.1f} ms"),
        ("time in rounds", ", ".join(f"{name} {show(part, '.1%')}" for name, part in split.items())),
        ("exactness", exactness),
    ]
    for row in rows:
        table.add_row(*row)
    Console(stderr=True, highlight=False).print(table)


def _drafter_rows(stats: Stats) -> Iterator[tuple[str, str]]:
    """Yield who drafted what, where several did, and what drafters failed of."""
    if len(stats.by_drafter) > 1:
        for name, share in stats.by_drafter.items():
            yield name, f"{share['accepted']} of {share['drafted']} drafted accepted, in {share['rounds']} rounds"
    for error in stats.errors:
        yield "FAILED", error


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
    epilog="Examples: [bold]sakiyomi bench --workload prompts.jsonl -d suffix+ngram -k 7 -k auto --repeats 3[/bold], "
    "[bold]sakiyomi bench --weights bf16,int8 -k auto[/bold]",
)
def bench(
    model: Model = "smollm2-135m",
    workload: Workload = None,
    category: Category = None,
    per_category: PerCategory = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help=f"To measure: auto, {ALL_DRAFTERS}, or several joined with +. Can be repeated. Default: auto.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="NUMBER|auto",
            help="Tokens to draft in a round; auto: as many as pay. Can be repeated. Default: 3, 7 and auto.",
        ),
    ] = None,
    verification: Annotated[
        list[str] | None,
        typer.Option(help="coupled, rejection or block, as for generate. Can be repeated. Default: coupled."),
    ] = None,
    draft_model: DraftModel = None,
    trained: Trained = None,
    draft_weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WEIGHTS,...",
            help="Of --draft-model: int8, bf16, fp32 or auto; several with commas. Default: int8 where the core runs.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(help="How many times each prompt is answered by each case.")] = 1,
    dtype: Dtype = "auto",
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WEIGHTS,...",
            help="auto (as --dtype), bf16, fp32, int8, or the path of a model folder or .gguf file: other weights of "
            "the same model. Several with commas are measured in one run against the first; all stay in memory.",
        ),
    ] = None,
    kernels: Kernels = "auto",
    device: Device = None,
    context_length: ContextLength = None,
    threads: Threads = None,
    quality_text: Annotated[
        Path | None,
        typer.Option(help="A text file to measure the quality of weights on. Default: Python's own reference."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure plain decoding against drafters on a workload: interleaved, paired, output compared.

    With --weights int8 also what they cost: perplexity, and how often the likeliest token stays the same. With
    --weights bf16,int8 what each of them costs and gains, with drafts and without.
    """
    from rich.console import Console

    from sakiyomi import drafters, targets
    from sakiyomi.bench import report
    from sakiyomi.bench.runner import Candidate, run_benchmark
    from sakiyomi.bench.weights import NamedWeights, parse
    from sakiyomi.bench.workload import builtin_workload, load_workload, select
    from sakiyomi.errors import OptionError
    from sakiyomi.sampling import SamplingParams
    from sakiyomi.verification import method

    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    prompts = select(load_workload(workload) if workload else builtin_workload(), category, per_category)
    lengths = [draft_length(each) for each in num_speculative_tokens or ["3", "7", AUTO]]
    ways = [method(each) for each in verification or ["coupled"]]
    specs = drafter or [AUTO]
    chosen = parse(weights or [AUTO], "--weights")
    drafting = parse(draft_weights or [], "--draft-weights", paths=False)
    if drafting and draft_model is None:
        raise OptionError(f"--draft-weights {drafting[0].name}: needs a draft model; name one with --draft-model")

    def draft_names(spec: str) -> list[str]:
        uses_model = drafters.MODEL in spec.split("+") or (spec == AUTO and draft_model is not None)
        return [each.name for each in drafting] if uses_model and drafting else [""]

    candidates = [
        Candidate(spec, k, way, name, draft)
        for name in ([each.name for each in chosen] if len(chosen) > 1 else [""])
        for spec in specs
        for k in lengths
        for way in ways
        for draft in draft_names(spec)
    ]
    drafter_names(specs, model, draft_model, trained)
    for each in chosen:
        targets.resolve(kernels, each.weights)
        if each.dtype is not None and dtype not in (AUTO, each.dtype):
            raise OptionError(f"--dtype {dtype}: contradicts --weights {each.name}; leave one of them out")
    for each in drafting:
        targets.resolve(kernels, each.weights, "draft_weights")
    text = _quality_text(quality_text, chosen)

    def load(weights: NamedWeights, draft_model: str | None = None, small: str | None = None) -> LLM:
        longest = None if small else context_length
        return load_llm(
            weights.model or small or model,
            weights.dtype or dtype,
            weights.weights,
            kernels,
            longest,
            threads,
            "none",
            None,
            draft_model,
            device=device,
            trained=None if small else trained,
        )

    # Alone it is loaded with its draft model; of several that draft for several, each is loaded once.
    together = draft_model if len(chosen) == 1 and not drafting else None
    quality, facts_of_weights = None, None
    if text is None:
        loaded = {"": load(chosen[0], together)}
    elif len(chosen) == 1:
        llm, quality = _load_and_compare(load, lambda: load(chosen[0], together), chosen[0], *text)
        loaded = {"": llm}
    else:
        loaded, facts_of_weights = _load_several(load, chosen, *text)
    llms = {(name, ""): llm for name, llm in loaded.items()}
    if draft_model is not None and together is None:
        for each in drafting or [NamedWeights("", weights=None)]:
            small = load(each, small=draft_model)
            llms.update({(name, each.name): _drafted_by(small, llm) for name, llm in loaded.items()})
    with warnings_in_one_line(), show_progress() as progress:
        result = run_benchmark(llms, prompts, candidates, params, repeats=repeats, seed=seed, progress=progress)
    first, *others = loaded.values()
    facts = report.model_facts(first, model, draft_model, others)
    if drafting:
        facts["draft weights"] = "/".join(each.name for each in drafting)
    if as_json:
        print(json.dumps(report.as_dict(result, facts, quality, facts_of_weights)))
    elif markdown:
        print(report.markdown(result, facts, quality, facts_of_weights))
    else:
        Console().print(report.render(result, facts, quality, facts_of_weights))
    if result.partial:
        sys.exit(130)
    if result.differences:
        sys.exit(1)


@app.command(
    epilog="Example: [bold]sakiyomi verify --workload prompts.jsonl --per-category 1 -n 32 --seeds 100[/bold]",
)
def verify(
    model: Model = "smollm2-135m",
    workload: Workload = None,
    category: Category = None,
    per_category: PerCategory = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help=f"To audit: auto, {ALL_DRAFTERS}, or several joined with +. Can be repeated. Default: auto.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="NUMBER|auto",
            help="Tokens to draft in a round; auto: as many as pay. Can be repeated. Default: 4 and auto.",
        ),
    ] = None,
    draft_model: DraftModel = None,
    trained: Trained = None,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Of the sampled outputs; greedy ones are always compared too.")
    ] = 1.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    seeds: Annotated[
        int, typer.Option(help="Runs for each test of a distribution; more see smaller errors. 0: none.")
    ] = 400,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    kernels: Kernels = "auto",
    device: Device = None,
    context_length: ContextLength = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Audit speculation on your model, drafters and prompts: is the text what it would be without?

    Compares outputs with plain decoding token by token, greedy and sampled; tests the distribution of what rejection
    and block write, with many seeds; compares the bits of rows computed together and alone; and shows what each way to
    verify accepts. Takes minutes: fewer prompts, tokens and seeds are faster. Exit status 1 where anything is wrong.
    """
    from rich.console import Console

    from sakiyomi import targets
    from sakiyomi.audit import LEAST_RUNS, run_audit
    from sakiyomi.audit.report import as_dict, render
    from sakiyomi.bench import report
    from sakiyomi.bench.runner import Candidate
    from sakiyomi.bench.workload import builtin_workload, load_workload, select
    from sakiyomi.errors import OptionError
    from sakiyomi.sampling import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    if not temperature:
        raise OptionError("--temperature 0: must be above 0; greedy outputs are always compared too")
    if 0 != seeds < LEAST_RUNS:
        raise OptionError(f"--seeds {seeds}: must be at least {LEAST_RUNS}, or 0 (no test of distributions)")
    prompts = select(load_workload(workload) if workload else builtin_workload(), category, per_category)
    lengths = [draft_length(each) for each in num_speculative_tokens or ["4", AUTO]]
    if 0 in lengths:
        raise OptionError(
            "--num-speculative-tokens 0: must be at least 1, or auto; plain decoding is what all is compared with"
        )
    candidates = [Candidate(spec, k) for spec in drafter or [AUTO] for k in lengths]
    if len(set(candidates)) < len(candidates):
        raise OptionError("--drafter, --num-speculative-tokens: name a setting twice")
    drafter_names(drafter or [AUTO], model, draft_model, trained)
    targets.resolve(kernels, weights)
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
    with warnings_in_one_line(), show_progress() as progress:
        audit = run_audit(llm, prompts, candidates, params, runs=seeds, progress=progress)
    facts = report.model_facts(llm, model, draft_model)
    if as_json:
        print(json.dumps(as_dict(audit, facts), allow_nan=False))
    else:
        Console(highlight=False).print(render(audit, facts))
    if audit.failures:
        sys.exit(1)
    if audit.partial:
        sys.exit(130)


@app.command(
    epilog="Example: [bold]sakiyomi check big.gguf small.gguf[/bold]",
)
def check(
    target: Annotated[str, typer.Argument(help="The model whose text is wanted, named as --model is elsewhere.")],
    draft_model: Annotated[str, typer.Argument(help="The model that might draft for it.")],
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    kernels: Kernels = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a model can draft for another, how, and what its drafts cost.

    Loads one after the other and measures them, for about a second each. Exit status 1 where it can't work.
    """
    from rich.console import Console

    from sakiyomi import targets
    from sakiyomi.pairs import Side, compare, render

    targets.resolve(kernels, weights)

    def measured(name: str, weights: str | None) -> Side:
        from sakiyomi.costs import ModelCosts, measure

        gc.collect()  # two models at once may not fit in memory
        llm = load_llm(name, dtype, weights, kernels, None, threads, "none", 0, None, device=device)
        with show_progress() as progress:
            progress(0, 1, f"measuring {name}")
            costs = ModelCosts(measure(llm.target))
        return Side.of(llm.target, llm.tokenizer, costs)

    pair = compare(measured(target, weights), measured(draft_model, None))
    if as_json:
        print(json.dumps({"target": target, "draft_model": draft_model, **pair.as_dict()}))
    else:
        Console(highlight=False).print(render(pair))
    if pair.problems:
        sys.exit(1)


app.command(epilog=TRAIN_EPILOG)(train)
app.command(epilog=TUNE_EPILOG)(tune)


@app.command(
    epilog="Example: [bold]sakiyomi plan --memory 24GB --context 8192[/bold]",
)
def plan(
    model: Annotated[
        str, typer.Argument(help="A known name, a Hugging Face folder, a hub id, or a .gguf file.")
    ] = "smollm2-135m",
    drafter: Annotated[
        str,
        typer.Option("--drafter", "-d", help=f"auto, {ALL_DRAFTERS}, several joined with +, or none: plain decoding."),
    ] = AUTO,
    draft_model: DraftModel = None,
    trained: Trained = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="AMOUNT", help="What there is: 24GB, 16GiB, 512MB, ... Default: all of this machine's."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tell what sequences of this many tokens take. Default: the longest.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    kernels: Kernels = "auto",
    as_json: AsJson = False,
) -> None:
    """Tell what a model and its drafters take of memory, and how long the context can be.

    For the processor. From the configurations: no weights are read.
    """
    from rich.console import Console

    from sakiyomi.plan import make_plan, render

    drafter_names([drafter], model, draft_model, trained)
    with warnings_in_one_line():
        found = make_plan(
            model,
            drafter=drafter,
            draft_model=draft_model,
            trained=trained or (),
            dtype=dtype,  # type: ignore[arg-type]  # it is checked there
            weights=weights,  # type: ignore[arg-type]
            kernels=kernels,
            memory=memory,
            context=context,
            batch_size=batch_size,
        )
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        Console(highlight=False).print(render(found))


@app.command()
def models() -> None:
    """List the model names that need no path, and where converted models are kept."""
    from sakiyomi.models import KNOWN_MODELS, cache_dir

    for name, known in KNOWN_MODELS.items():
        print(f"{name:16} {known.description}")
    print(f"cache: {cache_dir()}")


def _load_and_compare(
    load: Callable[[NamedWeights], LLM], load_all: Callable[[], LLM], weights: NamedWeights, text: str, name: str
) -> tuple[LLM, Quality]:
    """Return the model to measure, with these weights, and how it compares on a text with the model with its own."""
    from sakiyomi.bench.quality import compare
    from sakiyomi.bench.weights import NamedWeights

    own = load(NamedWeights("auto"))
    reference, fingerprint = _evaluate(own, text, "auto"), own.tokenizer.fingerprint
    del own  # two models at once may not fit in memory
    gc.collect()
    llm = load_all()
    _require_tokenizer(fingerprint, llm, weights)
    return llm, compare(reference, _evaluate(llm, text, weights.name), text=name)


def _load_several(
    load: Callable[[NamedWeights], LLM], chosen: Sequence[NamedWeights], text: str, name: str
) -> tuple[dict[str, LLM], dict[str, WeightsFacts]]:
    """Return the model with each of these weights, and how they compare on a text with the first."""
    from sakiyomi.bench import WeightsFacts, bytes_per_token, compare
    from sakiyomi.llm import LLM

    llms: dict[str, LLM] = {}
    for each in chosen:
        llm = load(each)
        tokenizer = next(iter(llms.values()), llm).tokenizer
        _require_tokenizer(tokenizer.fingerprint, llm, each)
        # With the first one's tokenizer, so that a prompt is the same tokens for all, and ends are too.
        llms[each.name] = LLM(llm.target, tokenizer, drafter="none", trained=llm.trained, costs=llm.costs)
    facts: dict[str, WeightsFacts] = {}
    reference = None
    for weights, llm in llms.items():
        found = _evaluate(llm, text, weights)
        quality = compare(reference, found, text=name) if reference else None
        reference = reference or found
        facts[weights] = WeightsFacts(bytes_per_token(llm.target), quality)
    return llms, facts


def _require_tokenizer(fingerprint: str, llm: LLM, weights: NamedWeights) -> None:
    from sakiyomi.errors import OptionError

    if llm.tokenizer.fingerprint != fingerprint:
        raise OptionError(
            f"--weights {weights.name}: their tokenizer is another, so that they can't be compared; "
            "name weights of the same model"
        )


def _drafted_by(small: LLM, llm: LLM) -> LLM:
    """Return an LLM of the same target that another model drafts for."""
    from sakiyomi import pairs
    from sakiyomi.llm import LLM

    drafter = pairs.draft_model(
        small.target, small.tokenizer, llm.tokenizer, llm.target.vocab_size, costs=small.costs()
    )
    return LLM(llm.target, llm.tokenizer, drafter="none", draft_model=drafter, trained=llm.trained, costs=llm.costs)


def _evaluate(llm: LLM, text: str, weights: str) -> Evaluation:
    from sakiyomi.bench.quality import evaluate

    with show_progress() as progress:
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


def _read_reference(path: Path, names: Sequence[str], drafter: str) -> str:
    from sakiyomi.errors import OptionError

    if not {"suffix", "ngram"} & set(names):
        raise OptionError(f"--reference {path}: --drafter {drafter} doesn't use it; add suffix or ngram to it")
    return _read_text(path, "--reference")


def _check_memory(path: Path, names: Sequence[str], drafter: str) -> None:
    """Find what is wrong with a memory before the model is loaded."""
    from sakiyomi.errors import OptionError

    if "suffix" not in names:
        raise OptionError(f"--memory {path}: --drafter {drafter} remembers nothing; add suffix to it")
    if path.exists():
        _suffix_drafter(path, (), None)
    elif not path.parent.is_dir():
        raise OptionError(f"--memory {path}: the folder {path.parent} isn't there; make it first")


def _quality_text(path: Path | None, weights: Sequence[NamedWeights]) -> tuple[str, str] | None:
    """Return the text to measure quality on, and which it is; None where there is nothing to measure."""
    from sakiyomi.bench.quality import KILOBYTES, plain_text
    from sakiyomi.errors import OptionError

    if len(weights) == 1 and not weights[0].are_others:
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


if __name__ == "__main__":
    main()
