"""The processor's name, and how many this process may use: its affinity, and the quota of its container."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path


@cache
def usable_cpus() -> int:
    """Return the number of processors that this process may keep busy, at least 1. Read once."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        count = os.cpu_count() or 1
    quota = cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, count if quota is None else min(count, int(quota + 0.5)))


def cgroup_quota(root: Path, membership: Path) -> float | None:
    """Return the processors that a Linux control group allows, of version 2 or 1; None where it sets no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root if not controllers else next((root / n for n in ("cpu", controllers) if (root / n).is_dir()), root)
        # In a container the group's own path may not be visible below the root: then the root is the group.
        group = base / path.lstrip("/")
        while True:
            if (quota := _read_quota(group)) is not None:
                found.append(quota)
            if group in (base, group.parent):
                break
            group = group.parent
    return min(found, default=None)


@cache
def cpu_name() -> str:
    """Return the processor's own name where the system tells it."""
    try:
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.SubprocessError):
        pass  # the name is a courtesy
    return platform.processor() or platform.machine()


def _read_quota(group: Path) -> float | None:
    try:
        if (path := group / "cpu.max").is_file():
            quota, period = path.read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None
