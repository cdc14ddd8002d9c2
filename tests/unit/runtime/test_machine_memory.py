"""Limits of containers, and file systems that are memory: what `host="auto"` and `host="disk"` make of them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specache_fx import _log
from specache_fx.errors import ConfigError, HostMemoryError
from specache_fx.runtime.host.host_blocks import check_host_dir, resolve_host
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.host.machine_memory import (
    available_bytes,
    control_group_bytes,
    disk_folder,
    memory_file_system,
)

CPU = torch.device("cpu")
MIB = 1 << 20
MUCH = 1 << 50  # bytes, more than any machine has

has_tmpfs = pytest.mark.skipif(
    memory_file_system("/dev/shm") != "tmpfs" or not os.access("/dev/shm", os.W_OK),
    reason="needs a tmpfs at /dev/shm",
)


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    _log.forget_warnings()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def group(folder: Path, **files: str | int) -> None:
    """A control group as the kernel shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def of(tmp_path: Path, *lines: str) -> int | None:
    (tmp_path / "cgroup").write_text("\n".join(lines) + "\n")
    return control_group_bytes(tmp_path / "cgroup", tmp_path / "fs")


def test_limit_of_a_container_counts_in_version_2(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {10 * MIB}\nactive_file 7"
    group(tmp_path / "fs", max=100 * MIB, high="max", current=30 * MIB, stat=stat)
    assert of(tmp_path, "0::/") == 80 * MIB  # the page cache that nobody reads can be had


def test_smallest_of_all_groups_that_a_process_is_in_counts(tmp_path: Path) -> None:
    fs = tmp_path / "fs"
    group(fs / "a.slice" / "b.scope", max="max", high="max", current=10 * MIB, stat="inactive_file 0")
    group(fs / "a.slice", max=200 * MIB, high=64 * MIB, current=20 * MIB, stat="inactive_file 0")
    assert of(tmp_path, "0::/a.slice/b.scope") == 44 * MIB
    group(fs / "a.slice" / "b.scope", max=8 * MIB)
    assert of(tmp_path, "0::/a.slice/b.scope") == 0


def test_limit_of_a_container_counts_in_version_1(tmp_path: Path) -> None:
    # Its own group is at the top, where the container sees it; the path is the machine's.
    stat = f"inactive_file 1\ntotal_inactive_file {4 * MIB}"
    group(tmp_path / "fs" / "memory", limit_in_bytes=50 * MIB, usage_in_bytes=20 * MIB, stat=stat)
    assert of(tmp_path, "5:cpu:/x", "4:hugetlb,memory:/docker/0123", "0::/") == 34 * MIB


@pytest.mark.parametrize("lines", [[], ["0::/no/such/group"], ["a line of another kind"]])
def test_without_a_limit_none_is_told(tmp_path: Path, lines: list[str]) -> None:
    group(tmp_path / "fs", current=30 * MIB, stat="inactive_file 0")  # the root has no limit
    assert of(tmp_path, *lines) is None


def test_available_bytes_are_within_this_process_own_groups() -> None:
    own = control_group_bytes()
    assert 0 < available_bytes() < MUCH
    assert own is None or available_bytes() <= own + 2048 * MIB  # others allocate meanwhile


@pytest.fixture
def in_memory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


@has_tmpfs
def test_auto_takes_no_tmpfs_for_a_disk(in_memory: str) -> None:
    with pytest.raises(
        HostMemoryError, match=rf"'{in_memory}' is a tmpfs, which is memory too. Give host_dir= a folder on a"
    ):
        resolve_host("auto", CPU, MUCH, in_memory)


@has_tmpfs
def test_temporary_folder_in_memory_is_passed_over(in_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", in_memory)
    other_is_disk = memory_file_system("/var/tmp") is None
    assert disk_folder(None) == ("/var/tmp" if other_is_disk else in_memory)
    assert disk_folder(in_memory) == in_memory  # as asked for


@has_tmpfs
@pytest.mark.parametrize("host", ["auto", "disk"])
def test_folder_in_memory_is_said_once(host: str, in_memory: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        check_host_dir(host, in_memory)
    assert warnings_of(caplog) == [
        f"16-bit KV pairs that go to a file would go to {in_memory!r}, but that is a tmpfs: memory, and no disk. Give"
        ' host_dir= a folder on a disk, or use host="memory", which is faster.'
    ]


@has_tmpfs
def test_file_in_memory_is_refused_where_memory_lacks(in_memory: str) -> None:
    """The kernel would promise it, and end a process when it is written to."""
    cache = HostCache(1, [(1, 64, 64)], torch.float16, "disk", in_memory)
    k = torch.zeros(1, 1, 64, 64).half()
    cache.append(0, k, k)
    many = k[:, :, :1].expand(-1, -1, 10**12, -1)
    with pytest.raises(HostMemoryError, match=r"got: it is in memory, of which [\d,]+ bytes are available"):
        cache.append(0, many, many)
    assert torch.equal(cache.read(0, 0, 64)[0], k)
    cache.close()


def test_folder_on_a_disk_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    candidates = (str(tmp_path), "/var/tmp", str(Path(__file__).parent))
    check_host_dir("disk", next(folder for folder in candidates if memory_file_system(folder) is None))
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("folder", ["a\0b", "\ud800", ""])
def test_a_path_that_none_can_be_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"can't keep a file under .* Give host_dir= a folder that exists"):
        check_host_dir("disk", folder)
