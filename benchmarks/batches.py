"""Throughput of batches: plain decoding against reading ahead, interleaved, for several batch sizes.

python benchmarks/batches.py [--model NAME] [--workload FILE] [--tokens N] [--sizes 1,2,4,8,16] [--repeats N] [--json]

Each batch size answers the same prompts, so many at a time. Ratios are of neighbours in one run; what drafters learn
they forget from repeat to repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import sakiyomi
from sakiyomi.bench.workload import builtin_workload, load_workload


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sizes", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    llm = sakiyomi.load(options.model)
    workload = load_workload(options.workload) if options.workload else builtin_workload()
    step = max(1, len(workload) // options.prompts)
    prompts = [each.input for each in workload[::step]][: options.prompts]
    params = sakiyomi.SamplingParams(max_new_tokens=options.tokens, temperature=options.temperature, seed=1)
    sizes = [int(each) for each in options.sizes.split(",")]
    texts: dict[int, tuple[int, ...]] = {}
    unlike = 0
    times: dict[tuple[int, str], list[float]] = {}
    tokens: dict[tuple[int, str], list[float]] = {}
    llm.generate(prompts[0], params)
    for repeat in range(options.repeats):
        for size in sizes:
            for case in ("plain", "speculative") if repeat % 2 else ("speculative", "plain"):
                setting = llm.speculation("none" if case == "plain" else "auto")
                began = time.perf_counter()
                done = llm.generate(prompts, params, speculation=setting, batch_size=size)
                seconds = time.perf_counter() - began
                times.setdefault((size, case), []).append(seconds)
                rounds = sum(each.stats.target_calls for each in done)
                count = sum(len(each.token_ids) for each in done)
                tokens.setdefault((size, case), []).append(count / rounds)
                for i, each in enumerate(done):
                    unlike += texts.setdefault(i, each.token_ids) != each.token_ids
    count = sum(map(len, texts.values()))
    rows = []
    for size in sizes:
        plain, ahead = times[size, "plain"], times[size, "speculative"]
        gains = [a / b for a, b in zip(plain, ahead, strict=True)]
        against_one = [a / b for a, b in zip(times[sizes[0], "plain"], plain, strict=True)]
        rows.append(
            {
                "batch": size,
                "plain_tokens_per_s": count / statistics.median(plain),
                "throughput_of_first": statistics.median(against_one),
                "speedup": statistics.median(gains),
                "speedup_range": [min(gains), max(gains)],
                "tokens_per_row": statistics.median(tokens[size, "speculative"]),
            }
        )
    if options.json:
        print(json.dumps({"model": options.model, "tokens": count, "unlike": unlike, "rows": rows}))
        return
    print(f"{options.model}: {len(prompts)} prompts, {count} tokens, outputs unlike the first: {unlike}")
    print(
        "batch | plain tokens/s | x of the first size | reading ahead against plain (range) | tokens per call and row"
    )
    for row in rows:
        low, high = row["speedup_range"]
        print(
            f"{row['batch']:5} | {row['plain_tokens_per_s']:14.0f} | {row['throughput_of_first']:19.2f} | "
            f"{row['speedup']:.2f} ({low:.2f} to {high:.2f}) | {row['tokens_per_row']:.2f}"
        )


if __name__ == "__main__":
    main()
