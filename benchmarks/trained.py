"""What each trained drafter adds, and what trees add: paired and interleaved, against plain decoding.

    python benchmarks/trained.py --workload FILE... [--per-category 10] [-d suffix -d suffix+table -d auto] [-t 0.7]

``-d NAME`` measures drafters as everywhere; ``-d "NAME, chains"`` the same without branches. Two workloads' categories
are told apart by the name of the file. --json FILE keeps everything.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sakiyomi import LLM, SamplingParams, load
from sakiyomi.bench import Candidate, as_dict, load_workload, machine_facts, run_benchmark, select
from sakiyomi.drafting import first_path
from sakiyomi.interfaces import Draft, Drafter, DraftSession, GoOn, always
from sakiyomi.llm import Speculation

CHAINS = ", chains"


class Chained:
    """A drafter whose drafts are the first paths of another's."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = copy.copy(drafter)
        if hasattr(drafter, "width"):
            self.drafter.width = 1  # what isn't looked at shouldn't be computed
        self.name, self.costs, self.samples = drafter.name, drafter.costs, drafter.samples
        self.hidden_layers = getattr(drafter, "hidden_layers", ())

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> DraftSession:
        """Begin a sequence."""
        session = self.drafter.session(prompt, params, sampled)
        return _ChainedSession(session)


class _ChainedSession:
    def __init__(self, session: DraftSession) -> None:
        self._session = session
        self.observe = session.observe
        if hasattr(session, "read"):
            self.read = session.read

    @property
    def unread(self) -> int:
        return self._session.unread

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        return first_path(self._session.propose(budget, go_on))


class Settings:
    """An LLM that knows settings without branches: what the benchmark runner calls."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.generate = llm, llm.generate

    def speculation(self, drafter: str, k: int | None, verification: str = "coupled") -> Speculation:
        """Return a fresh setting."""
        made = self.llm.speculation(drafter.removesuffix(CHAINS), k, verification)
        if drafter.endswith(CHAINS):
            made = replace(made, drafters=tuple(Chained(each) for each in made.drafters))
        return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trained", type=Path, nargs="*", default=[])
    parser.add_argument("--workload", type=Path, nargs="+", required=True)
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("-d", "--drafter", action="append", default=None)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("-t", "--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    prompts = []
    for path in args.workload:
        read = select(load_workload(path), per_category=args.per_category)
        prompts += [replace(each, category=f"{path.stem}: {each.category}") for each in read]
    llm = load(args.model, trained=args.trained, progress=False)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    candidates = [Candidate(each) for each in args.drafter or ["suffix", "suffix+table", "auto", f"auto{CHAINS}"]]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        result = run_benchmark(
            Settings(llm),
            prompts,
            candidates,
            params,
            repeats=args.repeats,
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )
    table = Table(title=f"{len(result.differences)} outputs unlike plain")
    for column in ("category", "case", "speed-up", "total time", "tokens per target call", "drafted per round"):
        table.add_column(column, justify="left" if column in ("category", "case") else "right")
    for each in result.summaries:
        if (speed := each.speedup) is None:
            continue
        table.add_row(
            f"{each.category or 'all'} ({each.prompts})",
            each.case,
            f"{speed.median:.2f} ({speed.low:.2f}-{speed.high:.2f})",
            f"{each.total_time_ratio:.2f}",
            f"{each.tokens_per_target_call:.2f}",
            f"{each.mean_drafted:.1f}",
        )
    Console(width=150).print(table)
    if args.json:
        facts = machine_facts(
            model=args.model,
            dtype=str(llm.target.dtype).removeprefix("torch."),
            weights=llm.target.weight_format,
            kernels=llm.target.kernels,
            exactness=llm.exactness,
        )
        args.json.write_text(json.dumps(as_dict(result, facts)), encoding="utf-8")


if __name__ == "__main__":
    main()
