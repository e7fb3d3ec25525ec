"""Options that several commands have, and what they mean. Heavy imports wait until a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sakiyomi.progress import warnings_in_one_line

if TYPE_CHECKING:
    from sakiyomi.llm import LLM

DRAFTERS = ("suffix", "ngram")  # of the registry, which would import torch; a test compares
ALL_DRAFTERS = f"{', '.join(DRAFTERS)}, model (--draft-model), table, eagle3, ... (trained for the model)"
AUTO = "auto"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A known name (smollm2-135m), a Hugging Face folder, a hub id, or a .gguf file."
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FOLDER|-",
        help="Your prompts: JSON lines with messages, prompt or turns (an OpenAI batch file or a chat export will do), "
        "a folder of text files, or - for standard input. Default: 24 built-in prompts.",
    ),
]
Category = Annotated[list[str] | None, typer.Option(help="Only this category. Can be repeated.")]
PerCategory = Annotated[int | None, typer.Option(help="At most this many prompts of each category.")]
DraftModel = Annotated[
    str | None,
    typer.Option(help="A smaller model to draft with, named as --model is; its tokenizer may be another."),
]
Trained = Annotated[
    list[Path] | None,
    typer.Option(help="The folder of a drafter that was trained for the model. Can be repeated."),
]
Verification = Annotated[
    str,
    typer.Option(
        help="Which draft tokens stand. coupled: the target's own, so that the text is that of plain decoding. "
        "rejection, block: where a draft model samples, a few more, in another text of the same distribution."
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
Device = Annotated[
    str | None, typer.Option(help="Where it runs: cpu, cuda, mps, ... Elsewhere than on the cpu through transformers.")
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


def draft_length(text: str) -> int | None:
    """Return the number of tokens to draft, None for as many as pay."""
    from sakiyomi.errors import OptionError

    if text == AUTO:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 9:
        return int(text)
    raise OptionError(
        f"--num-speculative-tokens {text}: must be a number (0: plain decoding), or auto (as many as pay)"
    )


def drafter_names(
    specs: Sequence[str], model: str, draft_model: str | None, trained: Sequence[Path] | None
) -> tuple[str, ...]:
    """Return the drafters that these options name; what is wrong here should not cost the time of loading."""
    from sakiyomi import drafters
    from sakiyomi.errors import OptionError
    from sakiyomi.loading import by_name, trained_for

    given = [*trained_for(model, trained or ()), *([drafters.MODEL] if draft_model is not None else [])]
    names = [name for spec in specs for name in drafters.parse(spec, given)]
    if draft_model is not None and drafters.MODEL not in names:
        raise OptionError(f"--draft-model {draft_model}: --drafter {', '.join(specs)} goes without; add +model to it")
    for name, folder in by_name(trained or ()).items():
        if name not in names:
            raise OptionError(f"--trained {folder}: --drafter {', '.join(specs)} goes without; add +{name} to it")
    return tuple(dict.fromkeys(names))


def load_llm(
    model: str,
    dtype: str,
    weights: str | None,
    kernels: str,
    context_length: int | None,
    threads: int | None,
    drafter: str,
    num_speculative_tokens: int | None,
    draft_model: str | None,
    verification: str = "coupled",
    device: str | None = None,
    trained: Sequence[Path] | None = None,
) -> LLM:
    """Load a model as options say. Raises ModelError or OptionError."""
    from sakiyomi.errors import OptionError

    if threads is not None and threads < 1:
        raise OptionError(f"--threads {threads}: must be at least 1")

    import torch

    from sakiyomi.llm import load

    if threads is not None:
        torch.set_num_threads(threads)

    with warnings_in_one_line():
        return load(
            model,
            dtype=dtype,  # type: ignore[arg-type]  # load checks it
            weights=weights,  # type: ignore[arg-type]
            kernels=kernels,
            context_length=context_length,
            drafter=drafter,
            num_speculative_tokens=num_speculative_tokens,
            verification=verification,  # type: ignore[arg-type]
            draft_model=draft_model,
            trained=trained or (),
            device=device,
        )
