"""Is the adaptive policy never slower, and as good as the best fixed number of draft tokens? Paired and interleaved.

    python benchmarks/policy.py sweep --workload FILE... [--per-category 10] [-d suffix] [-k 3 -k 7 -k 12]
    python benchmarks/policy.py hostile [--workload FILE...] [--per-category 2]

``sweep`` answers prompts plainly, with the adaptive policy and with fixed numbers of draft tokens, and says for every
category how the policy compares with plain decoding and with the best fixed number: time of the other / its time, so
that above 1 it is faster. ``hostile`` does so where reading ahead can't pay: a drafter without a guess (which shows
what is noise), prompts of random tokens, temperature 1.5, a drafter that is always wrong and sure of itself, and one
as slow as the target that is always right. Every figure is a ratio within one interleaved run; --json FILE keeps all.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sakiyomi import LLM, SamplingParams, load
from sakiyomi.bench import BenchResult, Candidate, Prompt, as_dict, load_workload, machine_facts, run_benchmark, select
from sakiyomi.bench.workload import builtin_workload
from sakiyomi.interfaces import Draft, always
from sakiyomi.llm import Speculation

NOISE = "token ids: "  # before the prompts that are no text


class WrongDrafter:
    """Sure of random tokens."""

    name, costs, unread = "wrong", None, 0
    samples = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.source = vocab_size, random.Random(0)

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> WrongDrafter:
        """Return itself: it holds nothing of a sequence."""
        return self

    def propose(self, budget: int, go_on: object = always) -> Draft:
        """Propose anything."""
        tokens = tuple(self.source.randrange(self.vocab_size) for _ in range(budget))
        return Draft(tokens, None, (0.99,) * budget, self.name)

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""


class SilentDrafter:
    """Never has a guess: what differs from plain decoding is the policy's own time, and the machine's noise."""

    name, costs, unread = "silent", None, 0
    samples = False

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> SilentDrafter:
        """Return itself: it holds nothing of a sequence."""
        return self

    def propose(self, budget: int, go_on: object = always) -> Draft:
        """Propose nothing."""
        return Draft(drafter=self.name)

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""


class SlowDrafter:
    """Knows the answer, and takes as long for each token as the target does."""

    name, costs, unread = "slow", None, 0
    samples = False

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], token_s: float) -> None:
        self.answers, self.token_s = answers, token_s
        self.left: list[int] = []

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> SlowDrafter:
        """Begin with the answer to this prompt."""
        made = SlowDrafter(self.answers, self.token_s)
        made.left = list(self.answers.get(tuple(prompt), ()))
        return made

    def propose(self, budget: int, go_on: object = always) -> Draft:
        """Propose what comes next, slowly."""
        tokens: list[int] = []
        for token in self.left[:budget]:
            time.sleep(self.token_s)
            tokens.append(token)
            if not go_on(0.99):
                break
        return Draft(tuple(tokens), None, (0.99,) * len(tokens), self.name)

    def observe(self, tokens: Sequence[int]) -> None:
        """Take off what was written."""
        del self.left[: len(tokens)]


class Drafters:
    """An LLM whose settings may have drafters of this file: what the benchmark runner calls."""

    def __init__(self, llm: LLM, special: dict[str, object]) -> None:
        self.llm, self.special = llm, special

    def speculation(self, drafter: str, k: int | None) -> Speculation | None:
        """Return a fresh setting."""
        if drafter not in self.special:
            return self.llm.speculation(drafter, k)
        made = self.llm.speculation("ngram", k)
        return made and replace(made, drafters=(self.special[drafter],))

    def generate(self, prompt, params, **options):
        """Answer a prompt, given as the workload has it, or as token ids in a text (see NOISE)."""
        if isinstance(prompt, str) and prompt.startswith(NOISE):
            prompt = [int(each) for each in prompt[len(NOISE) :].split()]
        return self.llm.generate(prompt, params, **options)


def summary(result: BenchResult, adaptive: str) -> Table:
    """Return how the adaptive policy compares with plain decoding and the best fixed number, by category."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for header in ("category", "total\ntime", "worst\nprompt", "speed-up (TPOT)", "best fixed", "adaptive\n/ best"):
        table.add_column(header, justify="left" if header == "category" else "right")
    categories = dict.fromkeys(each.category for each in result.summaries)
    for category in categories:
        rows = {each.case: each for each in result.summaries if each.category == category}
        found = rows[adaptive]
        fixed = {name: each for name, each in rows.items() if name.split()[-1].startswith("k=")}
        cells = ["-", "-"]
        if fixed:
            best = max(fixed, key=lambda name: fixed[name].total_time_ratio or 0)
            ratio = (found.total_time_ratio or 0) / (fixed[best].total_time_ratio or 1)
            cells = [f"{best}: {fixed[best].total_time_ratio:.2f}", f"{ratio:.3f}"]
        speed = found.speedup
        table.add_row(
            f"{category or 'all'} ({found.prompts})",
            f"{found.total_time_ratio:.3f}",
            f"{found.worst_total_time_ratio:.3f}",
            f"{speed.median:.2f} {speed.low:.2f}-{speed.high:.2f}" if speed else "-",
            *cells,
        )
    return table


def run(llm, prompts: Sequence[Prompt], candidates: Sequence[Candidate], params: SamplingParams, repeats: int):
    """Run a benchmark with progress on standard error."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        return run_benchmark(
            llm,
            prompts,
            candidates,
            params,
            repeats=repeats,
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sweep", "hostile"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--workload", type=Path, nargs="*", default=[])
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("-d", "--drafter", default="auto")
    parser.add_argument("-k", type=int, action="append", default=None)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    prompts: list[Prompt] = []
    for path in args.workload:
        # Two workloads may name a category alike.
        read = select(load_workload(path), per_category=args.per_category)
        prompts += [replace(each, category=f"{path.stem}: {each.category}") for each in read]
    prompts = prompts or list(select(builtin_workload(), per_category=args.per_category))
    llm = load(args.model, kernels=args.kernels, draft_model=args.draft_model, progress=False)
    facts = machine_facts(
        model=Path(args.model).name,
        dtype=str(llm.target.dtype).removeprefix("torch."),
        weights=llm.target.weight_format,
        kernels=llm.target.kernels,
        exactness=llm.exactness,
    )
    if args.draft_model:
        facts["draft model"] = Path(args.draft_model).name
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    console, kept = Console(), {}

    def measure(name: str, prompts, drafter: str, params: SamplingParams, ks: Sequence[int], special=None) -> None:
        candidates = [Candidate(drafter, None), *(Candidate(drafter, k) for k in ks)]
        result = run(Drafters(llm, special or {}), prompts, candidates, params, args.repeats)
        console.print(f"[bold]{name}[/bold], {len(result.differences)} outputs unlike plain")
        console.print(summary(result, candidates[0].name))
        kept[name] = as_dict(result, facts)
        if args.json:
            args.json.write_text(json.dumps(kept), encoding="utf-8")

    if args.what == "sweep":
        measure(f"{args.drafter} against fixed numbers", prompts, args.drafter, params, args.k or [3, 7, 12])
        return
    source, size = random.Random(0), llm.target.vocab_size
    noise = [
        Prompt(
            f"noise {i}",
            "random tokens",
            text=NOISE + " ".join(str(source.randrange(size)) for _ in range(64)),
        )
        for i in range(12)
    ]
    measure("nothing to propose", prompts, "silent", params, [], {"silent": SilentDrafter()})
    measure("random tokens", noise, args.drafter, replace(params, ignore_eos=True), [])
    measure("temperature 1.5", prompts, args.drafter, replace(params, temperature=1.5), [])
    measure(
        "random tokens at temperature 1.5", noise, args.drafter, replace(params, temperature=1.5, ignore_eos=True), []
    )
    measure("always wrong", prompts, "wrong", params, [], {"wrong": WrongDrafter(llm.target.vocab_size)})
    answers = {}
    for prompt in prompts:
        answer = llm.generate(prompt.input, params, drafter=None)
        answers[answer.prompt_token_ids] = answer.token_ids
    token_s = answer.stats.tpot_s
    measure("as slow as the target", prompts, "slow", params, [], {"slow": SlowDrafter(answers, token_s)})


if __name__ == "__main__":
    main()
