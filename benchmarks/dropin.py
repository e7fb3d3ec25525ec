"""The drop-in against transformers' own generate, assisted generation and prompt lookup: the same calls, interleaved.

python benchmarks/dropin.py [--model FOLDER] [--assistant FOLDER] [--workload FILE] [--per-category N] [--tokens N]
                            [--dtype bf16|fp32] [--target auto|core|module] [--markdown|--json]

Folders are in Hugging Face layout. With --assistant, draft models are compared; without, prompt lookup. Every prompt is
answered by transformers without assistance, by transformers with it, and by the drop-in with and without the same
arguments, one after another, in an order that changes. Times are of whole calls. Tokens are compared with those of the
drop-in without drafts, which must be the same, and with transformers' own, which in bf16 may part at near ties.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import sakiyomi
from sakiyomi.bench.workload import builtin_workload, load_workload, select
from sakiyomi.models import resolve

CASES = ("transformers", "transformers assisted", "plain", "assisted")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--assistant")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--category", action="append")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--lookup", type=int, default=10, help="prompt_lookup_num_tokens")
    parser.add_argument("--sample", action="store_true", help="do_sample, temperature 0.7, top_p 0.9")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = resolve(options.model)
    model, tokenizer = _load(folder, options.dtype), transformers.AutoTokenizer.from_pretrained(folder)
    assisted: dict[str, Any] = {"prompt_lookup_num_tokens": options.lookup}
    if options.assistant:
        assisted = {"assistant_model": _load(resolve(options.assistant), options.dtype)}
    own = model.generate
    sakiyomi.accelerate(model, target=options.target)
    ours = model.generate
    call: dict[str, Any] = {"max_new_tokens": options.tokens, "do_sample": options.sample}
    if options.sample:
        call |= {"temperature": 0.7, "top_p": 0.9}
    if tokenizer.pad_token_id is None:
        call["pad_token_id"] = tokenizer.eos_token_id
    calls = {
        "transformers": (own, {}),
        "transformers assisted": (own, assisted),
        "plain": (ours, {"num_assistant_tokens": 0}),
        "assisted": (ours, assisted),
    }

    def run(case: str, ids: torch.Tensor) -> tuple[float, list[int]]:
        generate, more = calls[case]
        torch.manual_seed(1)
        began = time.perf_counter()
        found = generate(ids, attention_mask=torch.ones_like(ids), **call, **more)
        return time.perf_counter() - began, found[0, ids.shape[1] :].tolist()

    workload = load_workload(options.workload) if options.workload else builtin_workload()
    prompts = select(workload, options.category, options.per_category)
    order, results = random.Random(0), []
    for i, prompt in enumerate(prompts):
        text = prompt.input
        if isinstance(text, str):
            ids = tokenizer(text, return_tensors="pt").input_ids
        else:
            ids = tokenizer.apply_chat_template(
                text, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        if i == 0:  # not with one of the prompts, whose answers drafters would remember
            for case in CASES:
                run(case, tokenizer("The first call of each is in no figure.", return_tensors="pt").input_ids)
        found = {case: run(case, ids) for case in order.sample(CASES, len(CASES))}
        results.append((prompt.category, prompt.id, found))

    rows = [_summary(None, results)]
    rows += [_summary(each, results) for each in dict.fromkeys(category for category, _, _ in results)]
    if options.json:
        print(
            json.dumps({"model": options.model, "assistant": options.assistant, "dtype": options.dtype, "rows": rows})
        )
        return
    what = "draft model" if options.assistant else "prompt lookup"
    print(
        f"\n{options.model}, {options.dtype}, {what}, {options.tokens} tokens, target {options.target}: time of others "
        "by that of the drop-in with the same arguments, total (lowest prompt)"
    )
    print("| category | prompts | transformers, same arguments | transformers, plain | drop-in, plain | s per call |"
          " tokens: as drop-in plain | as transformers plain |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['category'] or 'all'} | {row['prompts']} | {row['assisted']:.2f} ({row['assisted_worst']:.2f}) | "
            f"{row['plain']:.2f} | {row['own_plain']:.2f} | {row['seconds']:.2f} | {row['identical']} | "
            f"{row['as_transformers']} |"
        )


def _load(folder: Path, dtype: str) -> Any:
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()


def _summary(category: str | None, results: list[Any]) -> dict[str, Any]:
    chosen = [found for each, _, found in results if category in (None, each)]

    def total(case: str) -> float:
        return sum(found[case][0] for found in chosen)

    ratios = [found["transformers assisted"][0] / found["assisted"][0] for found in chosen]
    return {
        "category": category,
        "prompts": len(chosen),
        "assisted": total("transformers assisted") / total("assisted"),
        "assisted_worst": min(ratios),
        "plain": total("transformers") / total("assisted"),
        "own_plain": total("plain") / total("assisted"),
        "seconds": statistics.median(found["assisted"][0] for found in chosen),
        "identical": sum(found["assisted"][1] == found["plain"][1] for found in chosen),
        "as_transformers": sum(found["assisted"][1] == found["transformers"][1] for found in chosen),
    }


if __name__ == "__main__":
    main()
