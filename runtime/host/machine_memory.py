"""Memory available to the host tier: the machine's, within the limits of this process and of its container."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from pathlib import Path

import psutil

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
# Of each version of control groups: the limit, the use, and the part of it that the kernel can take back at once.
_FILES_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_FILES_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")


def available_bytes() -> int:
    """Memory that this process can still get: the machine's, within the limits that it runs under."""
    available = int(psutil.virtual_memory().available)
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit != resource.RLIM_INFINITY:
        available = min(available, max(limit - psutil.Process().memory_info().data, 0))
    of_groups = control_group_bytes()
    return available if of_groups is None else min(available, of_groups)


def control_group_bytes(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Memory that the control groups of this process (a container's, say) leave it; None where they set no limit.

    Args:
        groups: Where the kernel says which ones they are.
        mounted: Where they are mounted: version 2 itself, or version 1 by controller.
    """
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, files = (mounted / "memory", _FILES_V1) if controllers else (mounted, _FILES_V2)
            group = top / path.lstrip("/")
            # Each group limits all that are in it. A container sees its own at the top, whatever its path.
            found += [left for each in (group, *group.parents) if (left := _left(each, *files)) is not None]
    return min(found, default=None)


def _left(group: Path, limits: tuple[str, ...], usage: str, reclaimable: str) -> int | None:
    """Bytes that one control group leaves; None where it sets no limit, or is none."""
    try:
        words = [(group / name).read_text().strip() for name in limits]
        least = min(int(word) for word in words if word != "max")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / usage).read_text()) - int(stat.get(reclaimable, 0))
    except (OSError, ValueError):
        return None
    return max(least - used, 0)


def disk_folder(host_dir: str | None) -> str:
    """The folder for a file of the host tier: that of the option, else the system's temporary folder.

    Where that is in memory, `/var/tmp` is taken.
    """
    if host_dir is not None:
        return host_dir
    folders = tempfile.gettempdir(), "/var/tmp"
    return next((x for x in folders if os.access(x, os.W_OK) and memory_file_system(x) is None), folders[0])


def memory_file_system(folder: str) -> str | None:
    """Name of the file system that keeps a folder's files in memory (tmpfs); None where they are on a disk."""
    with contextlib.suppress(OSError, ValueError):
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number and (kind := source.split()[0]) in _IN_MEMORY:
                return kind
    return None
