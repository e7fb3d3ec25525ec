"""Measure plain decoding against drafters on a workload, and what smaller weights cost in quality and gain in speed."""

from sakiyomi.bench.quality import Evaluation, Quality, compare, evaluate, plain_text
from sakiyomi.bench.replay import ChainReplay, PolicyReplay, Recording, Timing, needed_layers, record
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
from sakiyomi.bench.workload import Prompt, Workload, builtin_workload, load_workload, read_workload, select

__all__ = [
    "BenchResult",
    "Candidate",
    "ChainReplay",
    "Difference",
    "Evaluation",
    "Measurement",
    "PolicyReplay",
    "Prompt",
    "Quality",
    "Recording",
    "Skipped",
    "Summary",
    "Timing",
    "WeightsFacts",
    "Workload",
    "as_dict",
    "builtin_workload",
    "bytes_per_token",
    "compare",
    "evaluate",
    "load_workload",
    "machine_facts",
    "markdown",
    "needed_layers",
    "plain_text",
    "read_workload",
    "record",
    "render",
    "run_benchmark",
    "select",
]
