"""One target forward of 1 to 8 rows, and plain decoding, against transformers on the same weights.

    python benchmarks/forward.py [--model smollm2-135m] [--dtype auto] [--context 256] [--repeats 40] [--json]

Both sides take turns call by call, so that a machine that drifts is unfair to neither. A ratio below 1 means that
sakiyomi is faster; what is quoted is the median of the ratios of neighbours, with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from sakiyomi import SamplingParams, load
from sakiyomi.interfaces import Work
from sakiyomi.models import resolve

TEXT = "The lighthouse keeper wrote down the height of every wave that passed the rock on that long winter night. "


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def summary(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return medians in ms, and the median and quartiles of the ratios of neighbours."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {
        "ours_ms": statistics.median(ours) * 1e3,
        "theirs_ms": statistics.median(theirs) * 1e3,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--context", type=int, default=256, help="tokens before the measured rows")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of plain decoding")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()

    llm = load(args.model, dtype=args.dtype, drafter=None)
    target = llm.target
    theirs = transformers.AutoModelForCausalLM.from_pretrained(resolve(args.model), dtype=target.dtype).eval()
    ids = llm.tokenizer.encode(TEXT * (args.context // 16 + 2))
    context, ahead = ids[: args.context], ids[args.context : args.context + 8]

    sequence = target.new_sequence()
    for start in range(0, args.context, target.max_rows):
        target.forward([Work(sequence, context[start : start + target.max_rows])])
    with torch.inference_mode():
        cache = theirs(torch.tensor([context]), use_cache=True).cache

    def our_forward(rows: int) -> None:
        target.forward([Work(sequence, ahead[:rows], None, rows)])
        sequence.truncate(args.context)

    def their_forward(rows: int) -> None:
        with torch.inference_mode():
            theirs(torch.tensor([ahead[:rows]]), cache=cache, use_cache=True)
        cache.crop(-rows)

    found: dict[str, dict[str, float]] = {}
    rows = range(1, 9)
    for n in rows:  # compile what is compiled at the first call
        our_forward(n)
        their_forward(n)
    times: dict[int, tuple[list[float], list[float]]] = {n: ([], []) for n in rows}
    for _ in range(args.repeats):
        for n in rows:
            times[n][0].append(timed(lambda n=n: our_forward(n)))
            times[n][1].append(timed(lambda n=n: their_forward(n)))
    for n in rows:
        found[f"forward, {n} rows"] = summary(*times[n])
    growth = statistics.median(b / a for a, b in zip(times[1][0], times[5][0], strict=True))

    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    prompt = torch.tensor([context])

    def our_decode() -> float:
        return llm.generate(context, params).stats.tpot_s or 0.0

    def their_decode() -> float:
        """Return seconds per token after the first, as our own figure is counted."""
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
        first = timed(lambda: theirs.generate(prompt, max_new_tokens=1, min_new_tokens=1, **options))
        whole = timed(
            lambda: theirs.generate(prompt, max_new_tokens=args.tokens, min_new_tokens=args.tokens, **options)
        )
        return (whole - first) / (args.tokens - 1)

    pairs = [(our_decode(), their_decode()) for _ in range(max(3, args.repeats // 5) + 1)][1:]
    found["plain decoding, per token"] = summary(*map(list, zip(*pairs, strict=True)))

    facts = {
        "model": args.model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "exactness": llm.exactness,
        "context": args.context,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if args.json:
        print(json.dumps({"facts": facts, "measured": found, "T(5)/T(1)": growth}))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'':28}{'sakiyomi':>10}{'transformers':>14}{'ratio':>8}   quartiles")
    for name, row in found.items():
        print(
            f"{name:28}{row['ours_ms']:7.1f} ms{row['theirs_ms']:11.1f} ms{row['ratio']:8.3f}"
            f"   {row['ratio_low']:.3f} .. {row['ratio_high']:.3f}"
        )
    print(f"T(5) / T(1) of sakiyomi: {growth:.3f}")


if __name__ == "__main__":
    main()
