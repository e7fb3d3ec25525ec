"""What running a transformers module as a target costs, over the module's bare forward and beside its own cache.

    python benchmarks/module.py [--model smollm2-135m] [--dtype bf16] [--contexts 256 1024 4096] [--json]

First, forwards of q rows of an empty sequence: HuggingFaceTarget with everything that makes rows exact, against the
bare call of the module that it was made from, without a cache. Then forwards of q rows after a context, with memory,
against DynamicCache of transformers. All take turns call by call; figures are medians, ratios medians of ratios of
neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from sakiyomi.interfaces import Work
from sakiyomi.models import resolve
from sakiyomi.targets.huggingface import HuggingFaceTarget, load_module

ROWS = (1, 2, 4, 8, 16, 64)
FEW = (1, 5)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(calls: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds that each call reports, after one turn for warming up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            seconds = call()
            if turn:
                found[name].append(seconds)
    return found


def figures(found: dict[str, list[float]], base: str) -> dict[str, float]:
    """Return medians in ms, and the ratio of ours to the base."""
    ratios = [a / b for a, b in zip(found["target"], found[base], strict=True)]
    return {f"{name} ms": statistics.median(times) * 1e3 for name, times in found.items()} | {
        "ratio": statistics.median(ratios)
    }


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--device")
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    module = load_module(resolve(args.model), args.dtype, args.device)
    began = time.perf_counter()
    target = HuggingFaceTarget(module)
    facts = {
        "model": args.model,
        "dtype": target.weight_format,
        "device": str(target.device),
        "mode": target.mode,
        "exactness": target.exactness,
        "made in s": round(time.perf_counter() - began, 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (max(args.contexts, default=0) + max(ROWS),), generator=generator).tolist()
    device, synchronise = target.device, torch.cuda.synchronize if target.device.type == "cuda" else lambda: None

    def forward_of(sequence: object, rows: list[int]) -> Callable[[], float]:
        def call() -> float:
            length = sequence.length
            seconds = timed(lambda: (target.forward([Work(sequence, rows, None, len(rows))]), synchronise()))
            sequence.truncate(length)
            return seconds

        return call

    def bare(rows: list[int]) -> Callable[[], float]:
        text = torch.tensor([rows], device=device)
        return lambda: timed(lambda: (module(text, use_cache=False), synchronise()))

    def cached(cache: transformers.DynamicCache, rows: list[int]) -> Callable[[], float]:
        text = torch.tensor([rows], device=device)

        def call() -> float:
            seconds = timed(lambda: (module(text, cache=cache, use_cache=True), synchronise()))
            cache.crop(-len(rows))
            return seconds

        return call

    alone = {
        rows: figures(
            in_turns({"target": forward_of(target.new_sequence(), ids[:rows]), "bare": bare(ids[:rows])}, args.repeats),
            "bare",
        )
        for rows in ROWS
    }
    after = {}
    for context in args.contexts:
        sequence = target.new_sequence()
        for start in range(0, context, target.max_rows):
            target.forward([Work(sequence, ids[start : min(context, start + target.max_rows)], None, 0)])
        cache = module(torch.tensor([ids[:context]], device=device), use_cache=True, logits_to_keep=1).cache
        for rows in FEW:
            new = ids[context : context + rows]
            calls = {"target": forward_of(sequence, new), "DynamicCache": cached(cache, new)}
            after[f"{context}+{rows}"] = figures(in_turns(calls, args.repeats), "DynamicCache")

    if args.json:
        print(json.dumps({"facts": facts, "alone": alone, "after": after}))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for title, table in (("rows, no context", alone), ("context + rows", after)):
        print(f"\n{title:18}" + "".join(f"{name:>18}" for name in next(iter(table.values()), {})))
        for row, each in table.items():
            print(f"{row!s:18}" + "".join(f"{value:18.3f}" for value in each.values()))


if __name__ == "__main__":
    main()
