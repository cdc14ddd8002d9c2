"""C++ sources of this package as shared libraries.

A wheel may hold them (`make wheel`). Else the system's compiler builds them at first use, and a cache keeps them. The
libraries have a plain C interface and include no header of torch, or those of its stable ABI alone: they build in
seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specache_fx.runtime.native.library_cache import building, is_whole, kept_folder, seal

_log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`Dtype` of vec.h."""

SOURCES = Path(__file__).parents[1] / "csrc"
PREBUILT = Path(__file__).parents[1] / "prebuilt"
"""Libraries of a wheel, `<name>_<instruction set>_<digest of its sources and flags>.so`."""

LIBRARIES = {"attention": False, "graph_ops": True}
"""This package's, and whether each includes headers of torch."""

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp-simd", "-pthread", "-fwrapv", "-Wno-psabi")
_TIMEOUT_S = 300
_STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # of torch 2.11, the oldest that we support


class BuildError(Exception):
    """A library can't be built or loaded here; the message says why."""


class CompilerError(BuildError):
    """The compiler does not take the sources or the flags."""


@dataclass(frozen=True)
class InstructionSet:
    """A variant of the sources.

    Attributes:
        name: Of the libraries.
        flags: For the compiler.
        cpu_flags: Features that the processor must have, in the words of Linux.
    """

    name: str
    flags: tuple[str, ...] = ()
    cpu_flags: frozenset[str] = frozenset()


_AVX512 = ("-DSPECACHE_AVX512", "-march=skylake-avx512", "-mavx512vnni")
_AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})

# The best first.
INSTRUCTION_SETS = {
    isa.name: isa
    for isa in (
        InstructionSet(
            "avx512_bf16",  # whether there are tiles too, the code asks for itself
            (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
            _AVX512_FLAGS | {"avx512_bf16"},
        ),
        InstructionSet("avx512", _AVX512, _AVX512_FLAGS),
        InstructionSet("avx2", ("-DSPECACHE_AVX2", "-march=haswell"), frozenset({"avx2", "fma", "bmi2"})),
        InstructionSet("portable"),
    )
}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The processor's features; empty where the system doesn't list them (not Linux, or not x86)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def usable_instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that this processor has, the best first."""
    return tuple(isa.name for isa in INSTRUCTION_SETS.values() if isa.cpu_flags <= cpu_flags())


def find_compiler() -> str | None:
    """The C++ compiler: the one that `CXX` names, else g++ or clang++; None where there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)


@functools.cache
def load_library(name: str, sources: Path, instruction_set: str, *, with_torch: bool = False) -> ctypes.CDLL:
    """Load a library of the wheel's or of the cache, or build it.

    Args:
        name: Of the source with the entry points, `<name>.cpp` in `sources`.
        sources: Folder of that source and its headers.
        instruction_set: A name in `INSTRUCTION_SETS`.
        with_torch: The source includes headers of torch's stable ABI, and the library registers operators.

    Raises:
        BuildError: If there is no compiler, it fails, or the result can't be loaded.
    """
    if (library := _prebuilt(name, sources, instruction_set, with_torch)) is not None:
        return library
    build = _Build.of(name, sources, instruction_set, with_torch)
    kept = kept_folder(build.file)
    if kept is not None:
        return build.load(kept)
    try:
        # Libraries that were loaded from it stay loaded.
        with tempfile.TemporaryDirectory(prefix="specache-fx-", ignore_cleanup_errors=True) as folder:
            return build.load(Path(folder))
    except OSError as error:
        raise BuildError(f"there is no folder to build in ({error}); set TMPDIR to one") from error


def _prebuilt(name: str, sources: Path, instruction_set: str, with_torch: bool) -> ctypes.CDLL | None:
    """The wheel's library; None where it has none of these sources, or this system can't load it."""
    library = PREBUILT / prebuilt_name(name, sources, instruction_set, with_torch)
    try:
        return ctypes.CDLL(str(library)) if library.exists() else None
    except OSError as error:
        _log.info("%s is built anew: %s", library.name, error)
        return None


def prebuilt_name(name: str, sources: Path, instruction_set: str, with_torch: bool) -> str:
    """File of a library in `PREBUILT`. That of an older version has another name."""
    return f"{name}_{instruction_set}_{_digest(sources, _all_flags(instruction_set, with_torch))}.so"


def prebuild(folder: Path) -> None:
    """Build the `LIBRARIES` for all `INSTRUCTION_SETS` into a folder.

    Raises:
        BuildError: If there is no compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, with_torch in LIBRARIES.items():
        for isa in INSTRUCTION_SETS:
            build = _Build.of(name, SOURCES, isa, with_torch)
            build.compile(folder / prebuilt_name(name, SOURCES, isa, with_torch))


def load_best(name: str) -> ctypes.CDLL:
    """One of `LIBRARIES`, for the best instruction set that the compiler knows, too.

    Raises:
        BuildError: As `load_library`, of the best one.
    """
    errors = []
    for instruction_set in usable_instruction_sets():
        try:
            return load_library(name, SOURCES, instruction_set, with_torch=LIBRARIES[name])
        except CompilerError as error:
            _log.info("%s for %s: %s", name, instruction_set, error)
            errors.append(error)
    raise errors[0]


@functools.cache
def load_ahead() -> None:
    """Start to load the `LIBRARIES`, and to build those that are not there, before a first call needs them.

    Once a process, a thread for each. A failure is left to whoever loads the library.
    """
    for name in LIBRARIES:
        threading.Thread(target=_try_load, args=(name,), name=f"load {name}", daemon=True).start()


def _try_load(name: str) -> None:
    with contextlib.suppress(BuildError):
        load_best(name)


@dataclass(frozen=True)
class _Build:
    """The build of one library.

    Attributes:
        name: See `load_library`.
        file: Its name in the cache, which changes with all that it depends on.
        command: The compiler's, but for the output.
    """

    name: str
    file: str
    command: tuple[str, ...]

    @classmethod
    def of(cls, name: str, sources: Path, instruction_set: str, with_torch: bool) -> _Build:
        """Raises `BuildError` if there is no compiler."""
        compiler = find_compiler()
        if compiler is None:
            named = os.environ.get("CXX")
            reason = f"CXX={named!r} is not a program" if named else "there is no g++ or clang++"
            raise BuildError(f"{reason}; install a C++ compiler, or name one by CXX")
        flags = _all_flags(instruction_set, with_torch)
        key = _key(sources, (compiler, *flags, *((torch.__version__,) if with_torch else ())))
        more = _torch_flags() if with_torch else ()
        command = (compiler, *flags, str(sources / f"{name}.cpp"), *more)
        return cls(name, f"{name}_{instruction_set}_{key}.so", command)

    def load(self, folder: Path) -> ctypes.CDLL:
        """The library that `folder` has, or is given."""
        self.ensure(folder)
        library = folder / self.file
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise BuildError(
                f"{library} can't be loaded ({error}); set CXX to another C++ compiler, or XDG_CACHE_HOME to a folder"
                " that programs may be run from"
            ) from error

    def ensure(self, folder: Path) -> None:
        """Build it into a file of its own and rename that: nobody ever loads half a library."""
        library = folder / self.file
        if is_whole(library):
            return
        try:
            with building(folder, self.name) as place:
                if is_whole(library):
                    return  # another thread or process has built it meanwhile
                _log.info("building %s (a few seconds, once)", library)
                built = place / self.file
                self.compile(built)
                seal(built, library)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{library} can't be built ({error})") from error

    def compile(self, out: Path) -> None:
        """Raises `CompilerError` with the first line that names an error."""
        command = [*self.command, "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
            raise CompilerError(f"{command[0]} failed: {first.strip()}; set CXX to another C++ compiler")


def _all_flags(instruction_set: str, with_torch: bool) -> tuple[str, ...]:
    stable = (_STABLE_ABI,) if with_torch else ()
    return (*_FLAGS, *INSTRUCTION_SETS[instruction_set].flags, *stable)


def _key(sources: Path, command: Sequence[str]) -> str:
    """Changes with all that a library in the cache depends on. Paths are left out but for the compiler's."""
    compiler = Path(command[0]).stat()
    return _digest(sources, (*command, str(compiler.st_size), str(compiler.st_mtime_ns)))


def _digest(sources: Path, words: Sequence[str]) -> str:
    """Changes with the sources, the words and the machine."""
    digest = hashlib.sha256(repr((tuple(words), platform.machine())).encode())
    for path in sorted((*sources.glob("*.h"), *sources.glob("*.cpp"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _torch_flags() -> tuple[str, ...]:
    """The folders of torch's headers and its library. `torch.utils.cpp_extension` knows too, and needs setuptools."""
    home = Path(torch.__file__).parent
    return f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu"


if __name__ == "__main__":
    prebuild(PREBUILT)
