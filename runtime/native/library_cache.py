"""The folder that keeps built libraries from process to process, and the check before one is loaded.

Loading a library runs it. So the folder has to be this user's alone, and a file has to end with its own checksum: a
file that was cut short loads without a complaint, and ends the process by SIGBUS when it is first called.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specache_fx._log import warn_once

_log = logging.getLogger(__name__)

_BUILD = "build-"  # prefix of the folders in which libraries are built


def user_folder() -> Path:
    """`specache_fx` below `$XDG_CACHE_HOME` or `~/.cache`; the specification says to ignore a relative path.

    Raises:
        RuntimeError: If there is no home folder, or its path is relative.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not named.is_absolute():
        if not (home := Path.home()).is_absolute():
            raise RuntimeError(f"HOME={str(home)!r} is no absolute path")
        named = home / ".cache"
    return named / "specache_fx"


def kept_folder(file: str) -> Path | None:
    """The folder to load library `file` from, and to build it in where it isn't there.

    Returns:
        The folder, made if need be; None, with a warning, where there is none that can be trusted or written to.
    """
    try:
        folder = user_folder()
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        problem = _distrust(folder)
        if problem is None and not os.access(folder, os.W_OK) and not is_whole(folder / file):
            problem = f"{folder} can't be written to"
    except (OSError, RuntimeError) as error:  # `Path.home()` raises the latter
        problem = f"they can't be kept ({error})"
    if problem is None:
        return folder
    warn_once(
        _log,
        f"specache builds its C++ libraries anew in each process, which takes some seconds: {problem}. Set"
        " XDG_CACHE_HOME to a folder that is yours alone.",
    )
    return None


def is_whole(library: Path) -> bool:
    """Whether a file is as `seal` left it, and nobody else can have written to it."""
    try:
        content = library.read_bytes()
        return _sum(content[:-32]) == content[-32:] and _distrust(library) is None
    except OSError:
        return False


def seal(built: Path, library: Path) -> None:
    """Put a library in its place. Its checksum is appended (loaders read no further than the headers say), so that
    one renaming brings both.
    """
    with built.open("ab") as file:
        file.write(_sum(built.read_bytes()))
    built.chmod(0o755)
    os.replace(built, library)


@contextlib.contextmanager
def building(folder: Path, name: str) -> Iterator[Path]:
    """One thread builds a library; other threads and processes wait. Where files can't be locked, all of them build.

    Args:
        folder: The cache.
        name: Of the library; others are built meanwhile.

    Yields:
        A folder to build in, within `folder`. Those that killed processes have left there are removed.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context((folder / f"lock-{name}").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(f"{_BUILD}{name}-*"):
                shutil.rmtree(left, ignore_errors=True)
        place = tempfile.TemporaryDirectory(prefix=f"{_BUILD}{name}-", dir=folder, ignore_cleanup_errors=True)
        yield Path(stack.enter_context(place))


def _distrust(path: Path) -> str | None:
    """Reason not to load anything of `path`, or None. As for ssh, root's files are as good as one's own."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {path} (chmod go-w would mend that)"
    return None


def _sum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
