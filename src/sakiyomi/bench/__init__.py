"""Measure plain decoding against drafters on a workload, and what smaller weights cost in quality and gain in speed."""

from sakiyomi.bench.quality import Evaluation, Quality, compare, evaluate, plain_text
from sakiyomi.bench.report import as_dict, machine_facts, markdown, render
from sakiyomi.bench.runner import (
    BenchResult,
    Candidate,
    Difference,
    Measurement,
    Skipped,
    Summary,
    run_benchmark,
)
from sakiyomi.bench.weights import WeightsFacts, bytes_per_token
from sakiyomi.bench.workload import Prompt, builtin_workload, load_workload, select

__all__ = [
    "BenchResult",
    "Candidate",
    "Difference",
    "Evaluation",
    "Measurement",
    "Prompt",
    "Quality",
    "Skipped",
    "Summary",
    "WeightsFacts",
    "as_dict",
    "builtin_workload",
    "bytes_per_token",
    "compare",
    "evaluate",
    "load_workload",
    "machine_facts",
    "markdown",
    "plain_text",
    "render",
    "run_benchmark",
    "select",
]
