"""T(q): one target forward of q rows, prefill and plain decoding, beside transformers and llama.cpp, interleaved.

    python benchmarks/forward.py [--model smollm2-135m] [--context 256] [--repeats 20] [--json]
        [--contenders auto auto:int8 avx2 torch transformers]
        [--llama-python VENV/bin/python --gguf smollm2-135m-bf16.gguf --gguf smollm2-135m-q4_0.gguf]

A contender is an instruction path of the compiled core (auto: the fastest), with weights after a colon (int8, fp32);
"torch", our own fallback; or "transformers". llama.cpp runs in a process of its own (see llama_cpp.py).
All take turns call by call, so that a machine that drifts is unfair to none; between turns is a pause, in which
the threads of other runtimes stop spinning. In the same turns the machine's read bandwidth is measured, by torch's sum
of a large block: a forward can't take much less time than reading the weights once. Figures are medians; ratios are
medians of ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import transformers

from llama_cpp import LlamaCpp
from sakiyomi import LLM, SamplingParams, load
from sakiyomi.interfaces import Work
from sakiyomi.models import open_weights, resolve

TEXT = "The lighthouse keeper wrote down the height of every wave that passed the rock on that long winter night. "
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 14, 16)
PREFILL = 512  # tokens
PAUSE = 0.02  # seconds
READ_BYTES = 256 << 20


class Contender(Protocol):
    """Something that computes forwards. Each method returns seconds."""

    def forward(self, rows: list[int]) -> float:
        """Time the forward of these tokens after the context, with logits for all."""

    def prefill(self, ids: list[int]) -> float:
        """Time the forward of a prompt on its own, with logits for its last token."""

    def decode(self, ids: list[int], tokens: int) -> float:
        """Time plain greedy decoding: seconds per token after the first."""


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Ours:
    """Sakiyomi, on some kernels."""

    def __init__(self, llm: LLM, context: list[int]) -> None:
        self.llm, self.target = llm, llm.target
        self.sequence = self.target.new_sequence()
        self._fill(self.sequence, context)

    def _fill(self, sequence: object, ids: list[int]) -> None:
        most = self.target.max_rows
        for start in range(0, len(ids), most):
            part = ids[start : start + most]
            self.target.forward([Work(sequence, part, None, int(start + most >= len(ids)))])

    def forward(self, rows: list[int]) -> float:  # noqa: D102
        length = self.sequence.length
        seconds = timed(lambda: self.target.forward([Work(self.sequence, rows, None, len(rows))]))
        self.sequence.truncate(length)
        return seconds

    def prefill(self, ids: list[int]) -> float:  # noqa: D102
        sequence = self.target.new_sequence()
        return timed(lambda: self._fill(sequence, ids))

    def decode(self, ids: list[int], tokens: int) -> float:  # noqa: D102
        return self.llm.generate(ids, SamplingParams(max_new_tokens=tokens, ignore_eos=True)).stats.tpot_s or 0.0


class Transformers:
    """The same model in transformers."""

    def __init__(self, model: str, dtype: torch.dtype, context: list[int]) -> None:
        transformers.utils.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(resolve(model), dtype=dtype).eval()
        with torch.inference_mode():
            self.cache = self.model(torch.tensor([context]), use_cache=True, logits_to_keep=1).cache

    def forward(self, rows: list[int]) -> float:  # noqa: D102
        with torch.inference_mode():
            seconds = timed(lambda: self.model(torch.tensor([rows]), cache=self.cache, use_cache=True))
        self.cache.crop(-len(rows))
        return seconds

    def prefill(self, ids: list[int]) -> float:  # noqa: D102
        with torch.inference_mode():
            return timed(lambda: self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1))

    def decode(self, ids: list[int], tokens: int) -> float:  # noqa: D102
        prompt = torch.tensor([ids])
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}

        def generate(count: int) -> float:
            return timed(lambda: self.model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **options))

        first = generate(1)
        return (generate(tokens) - first) / (tokens - 1)


class Llama:
    """The same model in llama.cpp."""

    def __init__(self, process: LlamaCpp, context: list[int]) -> None:
        self.process, self.context, self.filled = process, context, False

    def forward(self, rows: list[int]) -> float:  # noqa: D102
        if not self.filled:
            self.process.prefill(self.context)
            self.filled = True
        return self.process.forward(rows, warm=1)[0]

    def prefill(self, ids: list[int]) -> float:  # noqa: D102
        self.filled = False
        return self.process.prefill(ids)[0]

    def decode(self, ids: list[int], tokens: int) -> float:  # noqa: D102
        self.filled = False
        return self.process.decode(ids, tokens)[0]


class Bandwidth:
    """The machine's memory: all threads read a block, on large pages where there are any."""

    def __init__(self) -> None:
        block = mmap.mmap(-1, READ_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        self.values = torch.frombuffer(block, dtype=torch.float32)
        self.values.fill_(1.0)

    def read(self) -> float:
        """Return the seconds that reading takes, per byte."""
        return timed(self.values.sum) / READ_BYTES


def contender(name: str, model: str, dtype: str, context: list[int]) -> Ours | Transformers:
    """Return the contender of a name."""
    if name == "transformers":
        return Transformers(model, torch.float32 if dtype == "fp32" else torch.bfloat16, context)
    kernels, _, weights = name.partition(":")
    if weights == "fp32":
        dtype, weights = "fp32", ""
    return Ours(load(model, dtype=dtype, kernels=kernels, weights=weights or "auto", drafter=None), context)


def measure(
    contenders: dict[str, Contender], ids: list[int], context: int, rows: tuple[int, ...], repeats: int
) -> tuple[dict[str, dict[int, list[float]]], list[float]]:
    """Return the seconds of every contender's forwards, by number of rows, and of reading a byte."""
    bandwidth = Bandwidth()
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in rows} for name in contenders}
    read = []
    for turn in range(-1, repeats):  # the first is for warming up
        for n in rows:
            for name, each in contenders.items():
                time.sleep(PAUSE)
                seconds = each.forward(ids[context : context + n])
                if turn >= 0:
                    times[name][n].append(seconds)
        time.sleep(PAUSE)
        if (seconds := bandwidth.read()) and turn >= 0:
            read.append(seconds)
    return times, read


def spread(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of the ratios of neighbours."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {"ratio": middle, "low": low, "high": high}


def in_turns(contenders: dict[str, Contender], call: Callable[[Contender], float], repeats: int) -> dict[str, list]:
    """Return the seconds of a call by contender, after one turn for warming up."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, each in contenders.items():
            time.sleep(PAUSE)
            seconds = call(each)
            if turn:
                found[name].append(seconds)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--contenders", nargs="*", default=["auto", "auto:int8", "torch", "transformers"])
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--gguf", action="append", default=[], type=Path)
    parser.add_argument("--context", type=int, default=256, help="tokens before the measured rows")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of plain decoding; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = tuple(args.rows)

    tokenizer_of = load(args.model, drafter=None)
    ids = tokenizer_of.tokenizer.encode(TEXT * ((args.context + PREFILL) // 16 + 2))
    del tokenizer_of
    context = ids[: args.context]
    contenders: dict[str, Contender] = {
        name: contender(name, args.model, args.dtype, context) for name in args.contenders
    }
    threads = torch.get_num_threads()
    processes = [
        LlamaCpp(args.llama_python, path, n_ctx=args.context + PREFILL + 64, threads=threads, pause=0.0)
        for path in args.gguf
    ]
    contenders |= {
        f"llama.cpp {path.stem}": Llama(process, context) for path, process in zip(args.gguf, processes, strict=True)
    }
    first = next(iter(contenders))
    folder = open_weights(resolve(args.model))
    table = "model.embed_tokens.weight"  # read whole only where it is the head too
    read_names = [name for name in folder if name != table or "lm_head.weight" not in folder]
    weights = sum(folder[name].numel() for name in read_names) * (4 if args.dtype == "fp32" else 2)

    times, read = measure(contenders, ids, args.context, rows, args.repeats)
    few = max(3, args.repeats // 4)
    prefills = in_turns(contenders, lambda each: each.prefill(ids[:PREFILL]), few)
    decodes = in_turns(contenders, lambda each: each.decode(context, args.tokens), few) if args.tokens else {}
    for process in processes:
        process.close()

    read_once = statistics.median(read) * weights
    facts = {
        "model": args.model,
        "weights MB": round(weights / 1e6),
        "context": args.context,
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "read GB/s": round(1e-9 / statistics.median(read), 1),
        "read once ms": round(read_once * 1e3, 2),
    }
    found = {
        name: {
            "forward_ms": {n: statistics.median(times[name][n]) * 1e3 for n in rows},
            "against_first": {n: spread(times[first][n], times[name][n]) for n in rows},
            "prefill_ms": statistics.median(prefills[name]) * 1e3,
            "first_prefill_against": spread(prefills[first], prefills[name]),
            **(
                {
                    "token_ms": statistics.median(decodes[name]) * 1e3,
                    "first_token_against": spread(decodes[first], decodes[name]),
                }
                if decodes
                else {}
            ),
        }
        for name in contenders
    }
    if args.json:
        print(json.dumps({"facts": facts, "measured": found}))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    width = max(len(name) for name in contenders) + 2
    print(f"\n{'ms':{width}}" + "".join(f"{n:8}" for n in rows) + f"{f'prefill {PREFILL}':>13}{'per token':>11}")
    for name, each in found.items():
        print(
            f"{name:{width}}"
            + "".join(f"{ms:8.2f}" for ms in each["forward_ms"].values())
            + f"{each['prefill_ms']:13.1f}"
            + (f"{each['token_ms']:11.2f}" if decodes else "")
        )
    print(f"\n{f'{first} / ...':{width}}" + "".join(f"{n:8}" for n in rows) + f"{'prefill':>13}{'per token':>11}")
    print(f"{'read once':{width}}" + "".join(f"{found[first]['forward_ms'][n] / read_once / 1e3:8.2f}" for n in rows))
    for name, each in list(found.items())[1:]:
        print(
            f"{name:{width}}"
            + "".join(f"{each['against_first'][n]['ratio']:8.3f}" for n in rows)
            + f"{each['first_prefill_against']['ratio']:13.3f}"
            + (f"{each['first_token_against']['ratio']:11.3f}" if decodes else "")
        )
        quartiles = [each["against_first"][n] for n in rows] + [each["first_prefill_against"]]
        print(f"{'  quartiles, lower':{width}}" + "".join(f"{q['low']:8.3f}" for q in quartiles))
        print(f"{'  and upper':{width}}" + "".join(f"{q['high']:8.3f}" for q in quartiles))
    print()
    for name in contenders:
        one = times[name][rows[0]]
        growth = {n: statistics.median(b / a for a, b in zip(one, times[name][n], strict=True)) for n in rows}
        print(f"T(q)/T({rows[0]}) {name:{width}}" + "".join(f"{growth[n]:8.2f}" for n in rows))


if __name__ == "__main__":
    main()
