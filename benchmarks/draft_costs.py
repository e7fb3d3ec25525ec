"""What a draft token of each trained drafter costs, beside the target's forward of one row. Interleaved.

    python benchmarks/draft_costs.py [--model smollm2-135m] [--trained FOLDER ...] [--context 256]

For every drafter: the time of a whole draft of so many tokens in a row (with all their branches), by the number of
tokens in a row, as a share of a forward of one row in the same turns. Medians with quartiles. For a table also by token
of the draft, branches included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sakiyomi import SamplingParams, load
from sakiyomi.drafting import depth
from sakiyomi.interfaces import Work

TEXT = "The river rises in the hills north of the town, and the old mill by the bridge has ground corn for years. "


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trained", type=Path, nargs="*", default=[])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()

    llm = load(args.model, trained=args.trained, drafter="none", num_speculative_tokens=0)
    target, params = llm.target, SamplingParams()
    ids = llm.tokenizer.encode(TEXT * (args.context // 8))[: args.context + args.turns + 1]
    names = [name for name in llm.given if name != "model"]
    drafters = {name: llm.speculation(name, 4).drafters[0] for name in names}
    layers = sorted({layer for each in drafters.values() for layer in getattr(each, "hidden_layers", ())})
    sequence, sessions = target.new_sequence(), {}
    prompt = ids[: args.context]
    for name, drafter in drafters.items():
        sessions[name] = drafter.session(prompt, params, False)
    told = 0
    one: list[float] = []
    taken: dict[tuple[str, int], list[float]] = {}
    by_token: dict[str, list[float]] = {}
    for turn in range(args.turns):
        end = args.context - 1 + turn
        while sequence.length < end - 1:
            rows = ids[sequence.length : end - 1][: target.max_rows]
            _read(target, sequence, rows, layers, drafters, sessions)
        began = time.perf_counter()
        _read(target, sequence, [ids[end - 1]], layers, drafters, sessions)
        one.append(time.perf_counter() - began)
        for name, session in sessions.items():
            session.observe(ids[args.context + told : end + 1])
            session.propose(1)  # what was read since is computed here
            for k in (1, 2, 3, 4, 6):
                began = time.perf_counter()
                draft = session.propose(k)
                seconds = time.perf_counter() - began
                if depth(draft) == k:
                    taken.setdefault((name, k), []).append(seconds)
                if draft:
                    by_token.setdefault(name, []).append(seconds / len(draft))
        told = max(told, end + 1 - args.context)
    forward = statistics.median(one)
    table = Table(title=f"forward of one row: {forward * 1e3:.2f} ms; drafts in % of it")
    for column in ("drafter", "tokens in a row", "draft", "per token in a row"):
        table.add_column(column)
    for (name, k), seconds in taken.items():
        low, middle, high = (100 * each / forward for each in statistics.quantiles([*seconds, *seconds], n=4))
        table.add_row(name, str(k), f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{middle / k:.2f}")
    for name, seconds in by_token.items():
        table.add_row(name, "any", "", f"{100 * statistics.median(seconds) / forward:.3f} per token, branches included")
    Console().print(table)


def _read(target, sequence, rows, layers, drafters, sessions) -> None:
    (output,) = target.forward([Work(sequence, rows, None, 1)], hidden_layers=layers)
    states = dict(zip(layers, output.hidden, strict=True))
    for name, drafter in drafters.items():
        if wanted := getattr(drafter, "hidden_layers", ()):
            sessions[name].read([states[layer] for layer in wanted])


if __name__ == "__main__":
    main()
