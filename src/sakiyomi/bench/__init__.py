"""Measure plain decoding against drafters on a workload."""

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
from sakiyomi.bench.workload import Prompt, builtin_workload, load_workload, select

__all__ = [
    "BenchResult",
    "Candidate",
    "Difference",
    "Measurement",
    "Prompt",
    "Skipped",
    "Summary",
    "as_dict",
    "builtin_workload",
    "load_workload",
    "machine_facts",
    "markdown",
    "render",
    "run_benchmark",
    "select",
]
