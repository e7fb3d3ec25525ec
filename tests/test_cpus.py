"""How many processors may be used, from what a container's control group says."""

from __future__ import annotations

import pytest

from sakiyomi.cpus import cgroup_quota, usable_cpus


def test_there_is_one_at_least():
    assert usable_cpus() >= 1


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/pod/box\n", {"pod/box/cpu.max": "400000 100000", "pod/cpu.max": "200000 100000"}, 2.0),
        ("0::/not/visible\n", {"cpu.max": "300000 100000"}, 3.0),
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {"cpu.max": "garbled"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_quota_of_a_control_group(tmp_path, membership, files, expected):
    root = tmp_path / "cgroup"
    root.mkdir()
    (tmp_path / "membership").write_text(membership)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    assert cgroup_quota(root, tmp_path / "membership") == expected


def test_no_control_groups(tmp_path):
    assert cgroup_quota(tmp_path, tmp_path / "missing") is None
