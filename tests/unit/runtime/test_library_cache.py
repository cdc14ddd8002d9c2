"""Built libraries: only whole ones of our own are loaded, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.process import start

from specache_fx import _log
from specache_fx.runtime.native import cpp_build, library_cache

Load = Callable[[Path], int]
pytestmark = pytest.mark.skipif(cpp_build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small library: what is tested is how it is kept."""
    folder = tmp_path / "sources"
    folder.mkdir()
    write(folder, 42)
    return folder


def write(folder: Path, answer: int) -> None:
    (folder / "tiny.cpp").write_text(f'extern "C" int answer() {{ return {answer}; }}\n')


@pytest.fixture
def load(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """What the library answers that is loaded from a cache in a folder, or built there."""
    _log.forget_warnings()

    def load(cache: Path) -> int:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        answer: int = cpp_build.load_library.__wrapped__("tiny", sources, "portable").answer()
        return answer

    return load


def kept(cache: Path) -> Path:
    (library,) = (cache / "specache_fx").glob("tiny_portable_*.so")
    return library


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("damage", ["none left", "half", "last byte", "one bit"])
def test_library_that_is_damaged_is_built_anew(load: Load, tmp_path: Path, damage: str) -> None:
    load(tmp_path / "a")
    whole = kept(tmp_path / "a").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damaged = {
        "none left": b"",
        "half": whole[: len(whole) // 2],
        "last byte": whole[:-1],
        "one bit": flipped,
    }
    # In another folder: a library of the same path is not loaded twice.
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    kept(tmp_path / "b").write_bytes(damaged[damage])
    assert load(tmp_path / "b") == 42
    assert library_cache.is_whole(kept(tmp_path / "b"))


def test_library_that_is_whole_is_not_built_again(load: Load, tmp_path: Path) -> None:
    load(tmp_path)
    before = kept(tmp_path).stat()
    assert load(tmp_path) == 42
    assert kept(tmp_path).stat() == before


def test_folder_that_others_may_write_to_is_not_loaded_from(
    load: Load, sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path / "a")
    name = kept(tmp_path / "a").name
    write(sources, 666)
    load(tmp_path / "b")
    write(sources, 42)
    shared = tmp_path / "shared" / "specache_fx"
    shared.mkdir(parents=True)
    kept(tmp_path / "b").rename(shared / name)
    assert load(tmp_path / "shared") == 666  # a planted one would run
    other = tmp_path / "other"
    shared.parent.rename(other)
    shared = other / "specache_fx"
    shared.chmod(0o777)
    content = {path: path.read_bytes() for path in shared.iterdir()}
    for _ in range(2):
        assert load(other) == 42
    assert {path: path.read_bytes() for path in shared.iterdir()} == content
    assert warnings_of(caplog) == [
        "specache builds its C++ libraries anew in each process, which takes some seconds: others may write to"
        f" {shared} (chmod go-w would mend that). Set XDG_CACHE_HOME to a folder that is yours alone."
    ]


def test_library_that_others_may_write_to_is_built_anew(load: Load, tmp_path: Path) -> None:
    load(tmp_path)
    kept(tmp_path).chmod(0o775)
    assert load(tmp_path) == 42
    assert stat.S_IMODE(kept(tmp_path).stat().st_mode) == 0o755


def test_relative_home_is_no_place_to_keep_libraries(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "relative")
    assert load(Path("relative")) == 42
    assert "HOME='relative' is no absolute path" in warnings_of(caplog)[0]
    assert not (tmp_path / "relative").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_folder_of_another_user_is_not_loaded_from(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "specache_fx"
    folder.mkdir()
    os.chown(folder, 54321, 54321)
    assert load(tmp_path) == 42
    assert not list(folder.iterdir())
    assert f"{folder} belongs to another user" in warnings_of(caplog)[0]


def test_cache_that_cannot_be_made_is_named_and_done_without(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert load(tmp_path / "file") == 42
    assert f"Not a directory: '{tmp_path / 'file' / 'specache_fx'}'" in warnings_of(caplog)[0]


def test_relative_cache_home_is_ignored(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load(Path("relative")) == 42
    assert not list((tmp_path / "here").iterdir())
    assert kept(tmp_path / "home" / ".cache").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user that the system doesn't know")
def test_user_without_a_home_builds_in_a_folder_that_does_not_stay(sources: Path) -> None:
    code = """
        import fcntl, os, sys, tempfile, pathlib
        from specache_fx.runtime.native import cpp_build
        os.environ.pop("HOME", None), os.environ.pop("XDG_CACHE_HOME", None)
        os.setgid(54321), os.setuid(54321)
        print(cpp_build.load_library("tiny", pathlib.Path(sys.argv[1]), "portable").answer())
    """
    with tempfile.TemporaryDirectory() as folder:  # where another user can come to
        os.chmod(folder, 0o777)
        shutil.copytree(sources, Path(folder) / "sources")
        (Path(folder) / "tmp").mkdir()
        (Path(folder) / "tmp").chmod(0o777)
        out, err = start(code, f"{folder}/sources", TMPDIR=f"{folder}/tmp").communicate(timeout=120)
        assert not list((Path(folder) / "tmp").iterdir())
    assert out.strip() == "42", err
    assert "Could not determine home directory" in err  # said, and no error


def test_two_processes_that_build_at_once_share_one_library(sources: Path, tmp_path: Path) -> None:
    code = """
        import pathlib, sys
        from specache_fx.runtime.native import cpp_build
        print(cpp_build.load_library("tiny", pathlib.Path(sys.argv[1]), "portable").answer())
    """
    running = [start(code, str(sources), XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == ["42", "42"]
    assert {path.suffix for path in (tmp_path / "specache_fx").iterdir()} == {"", ".so"}
    assert kept(tmp_path)


def test_looking_the_backend_up_builds_and_loads_what_its_first_call_needs(
    sources: Path, tmp_path: Path
) -> None:
    code = """
        import logging, pathlib, sys, threading
        import torch
        from specache_fx.runtime.native import cpp_build
        logging.basicConfig(level=logging.INFO)
        cpp_build.SOURCES, cpp_build.LIBRARIES = pathlib.Path(sys.argv[1]), {"tiny": False}
        torch._dynamo.lookup_backend("specache")
        for thread in threading.enumerate():
            if thread.name == "load tiny":
                thread.join()
        print(cpp_build.load_library.cache_info().currsize, "loaded")
    """
    out, err = start(code, str(sources), XDG_CACHE_HOME=str(tmp_path)).communicate(timeout=120)
    assert out.strip() == "1 loaded", err
    best = cpp_build.usable_instruction_sets()[0]
    (library,) = (tmp_path / "specache_fx").glob(f"tiny_{best}_*.so")
    assert library_cache.is_whole(library)


@pytest.mark.parametrize("compiler", ["false", "not-a-compiler"])
def test_compiler_that_fails_is_left_to_the_first_call(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    raised: list[object] = []
    started: list[threading.Thread] = []
    usual = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda own: (started.append(own), usual(own))[1])
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(cpp_build, "SOURCES", sources)
    monkeypatch.setattr(cpp_build, "LIBRARIES", {"tiny": False})
    cpp_build.load_ahead.__wrapped__()
    assert [thread.name for thread in started] == ["load tiny"]
    for thread in started:
        thread.join()
    assert not raised and not list(tmp_path.glob("specache_fx/*.so"))


def test_build_that_was_killed_is_cleared_away_by_the_next_one(
    load: Load, sources: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    code = """
        import pathlib, sys
        from specache_fx.runtime.native import cpp_build
        cpp_build.load_library("tiny", pathlib.Path(sys.argv[1]), "portable")
    """
    cache = tmp_path / "specache_fx"
    process = start(code, str(sources), XDG_CACHE_HOME=str(tmp_path), CXX=str(slow))
    while not (left := [path for path in cache.glob("*") if path.is_dir()]):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert left[0].is_dir()
    assert load(tmp_path) == 42
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_library_of_the_wheel_needs_no_compiler(
    load: Load, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(cpp_build, "SOURCES", sources)
    monkeypatch.setattr(cpp_build, "LIBRARIES", {"tiny": False})
    cpp_build.prebuild(tmp_path / "prebuilt")
    assert len(list((tmp_path / "prebuilt").iterdir())) == len(cpp_build.INSTRUCTION_SETS)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load(tmp_path / "cache") == 42
    assert not (tmp_path / "cache").exists()
    # Of other sources it is not taken.
    write(sources, 43)
    with pytest.raises(cpp_build.BuildError, match="no-such-compiler"):
        load(tmp_path / "cache")


def test_library_of_the_wheel_that_this_system_cannot_load_is_built(
    load: Load, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_build, "PREBUILT", tmp_path)
    (tmp_path / cpp_build.prebuilt_name("tiny", sources, "portable", False)).write_bytes(
        b"for another system"
    )
    assert load(tmp_path / "cache") == 42
    assert kept(tmp_path / "cache").exists()
