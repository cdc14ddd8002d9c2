"""Files that `load` and a prefix store find: damaged, crafted, or of somebody else."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.cases import nightly_unless
from support.open_sessions import all_end
from support.process import start
from support.zoo import SMALL, build
from torch import Tensor

import specache_fx
from specache_fx import PrefixStore, SavedCacheError
from specache_fx._log import forget_warnings
from specache_fx.saved.saving import FILE, content, write_to
from specache_fx.saved.tensor_file import PARTIAL

DOCUMENT = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(1))
LONGER = torch.cat([DOCUMENT, DOCUMENT[:, :5]], 1)
KEY = "0123456789abcdef" * 2  # a name as entries have it


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch._dynamo.reset()
    yield specache_fx.compile(build("plain", 1), **SMALL, bits=1, sink_tokens=2)
    torch._dynamo.reset()


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Any:
    return model(ids, use_cache=True).past_key_values


@pytest.fixture
def store(model: Any, tmp_path: Path) -> PrefixStore:
    """With an entry of half of the document."""
    store = PrefixStore(tmp_path, 1 << 30)
    store.put(DOCUMENT[:, :20], read(model, DOCUMENT[:, :20]))
    return store


def damaged(entry: Path, model: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Save the whole document with another header, and with its tokens."""
    with content(read(model, DOCUMENT), DOCUMENT) as (about, tensors):
        changed = copy.deepcopy(about)
        change(changed)
        write_to(entry, changed, {**tensors, "input_ids": DOCUMENT})


# Headers --------------------------------------------------------------------------------------------------------------

OTHERS: list[Any] = [
    None, True, 0, -1, 7, 1 << 31, 1 << 80, 1.5, math.nan, math.inf, "", "x", [], [None], [[]], {}, {"x": 1},
    {"tensor": 0}, {"tensor": -1}, {"list": 3}, {"dtype": "save"}, {"object": ["os", "system"], "state": {}},
    {"object": ["transformers.cache_utils", "DynamicCache"]}, {"class": 5}, {"dict": [[1]]},
]  # fmt: skip


def places(told: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All parts of a header; of mappings of names that are alike, the first."""
    yield path
    items = (
        list(told.items())
        if isinstance(told, dict)
        else list(enumerate(told))
        if isinstance(told, list)
        else []
    )
    for key, item in items[:1] if path[-1:] in (("weights",), ("values",)) else items:
        yield from places(item, (*path, key))


def replaced(about: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    at: Any = about
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


def removed(about: dict[str, Any], path: tuple[Any, ...]) -> None:
    at: Any = about
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]


def cases(about: dict[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    return [(path, other) for path in list(places(about))[1:] for other in (removed, *OTHERS)]


@pytest.mark.parametrize("part", nightly_unless(lambda part: part == 0, list(range(16))))
def test_whatever_a_header_says_the_error_is_ours_and_others_are_found(
    part: int, model: Any, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(DOCUMENT, read(model, DOCUMENT))
    entry = max(store.folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    plain = build("plain", 1)
    with content(read(model, DOCUMENT), DOCUMENT) as (told, held):
        tensors = {name: tensor.clone() for name, tensor in held.items()} | {"input_ids": DOCUMENT}
        about = json.loads(json.dumps(told))
    counts, folder = Counter[str](), store.folder / "folder"
    with all_end():
        for path, other in cases(about)[part::16]:
            changed = copy.deepcopy(about)
            removed(changed, path) if other is removed else replaced(changed, path, other)
            write_to(folder / FILE, changed, tensors)
            for each in (model, plain):  # with the options of the model, and with those of the file
                try:
                    specache_fx.load(each, folder)
                    counts["loaded"] += 1
                except SavedCacheError as error:
                    counts["refused" if str(folder) in str(error) else "not named"] += 1
            os.replace(folder / FILE, entry)
            assert store.get(model, LONGER)[1] in (20, 40)
    assert counts["refused"] > 2 * counts["loaded"] > 0 == counts["not named"]
    assert sum("removes" in record.message for record in caplog.records) > 20


def test_the_part_of_a_header_is_named(model: Any, tmp_path: Path) -> None:
    for path, other, said in (
        (("sessions", 0, "kv_len"), "40", r"sessions\[0\]\.kv_len is '40': expected a whole number"),
        (("sessions", 0, "kv_len"), 1 << 30, r"sessions\[0\] tells of more tokens than the file holds"),
        (("sessions", 0, "batch"), -1, r"sessions\[0\]\.batch is -1: expected a whole number of 0"),
        (("sessions", 0, "dtype"), "save", r"sessions\[0\]\.dtype is 'save': expected one of 'bfloat16'"),
        (("sessions", 0, "shapes"), [], r"sessions\[0\] has no layers"),
        (("sessions", 0, "places"), [0, 0], r"places names a tensor twice"),
        (("sessions",), {}, r"sessions is a dict: expected a list"),
        (("cache", "state"), 5, r"cache is no object that can be made"),
    ):
        damaged(tmp_path / FILE, model, lambda about, path=path, other=other: replaced(about, path, other))  # type: ignore[misc]
        with pytest.raises(SavedCacheError, match=said) as caught:
            specache_fx.load(model, tmp_path)
        assert str(tmp_path / FILE) in str(caught.value)
    damaged(tmp_path / FILE, model, lambda about: removed(about, ("sessions", 0, "staged")))
    with pytest.raises(SavedCacheError, match=r"sessions\[0\] is a dict: expected the entries \['config'"):
        specache_fx.load(model, tmp_path)


def _of_other_entries(header: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in header.items() if name != "__metadata__")


RAW: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown dtype": lambda header: _of_other_entries(header).update(dtype="Q3"),
    "negative size": lambda header: _of_other_entries(header).update(shape=[-1]),
    "terabytes": lambda header: _of_other_entries(header).update(shape=[1 << 40, 1 << 20]),
    "beyond the file": lambda header: _of_other_entries(header).update(data_offsets=[0, 1 << 50]),
    "overlapping": lambda header: [
        entry.update(data_offsets=[0, 8]) for entry in header.values() if "shape" in entry
    ],
    "no metadata": lambda header: header.pop("__metadata__"),
    "metadata is a list": lambda header: header.update(__metadata__=[]),
}
TEXTS = {
    "deep": b"[" * 100_000,
    "twice": b"{%b,%b}" % (2 * (b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',)),
    "not a number": b'{"a":NaN}',
    "empty": b"",
    "no JSON": b"\xff" * 64,
}


@pytest.mark.parametrize("kind", [*RAW, *TEXTS, "long"])
def test_a_header_of_the_format_that_is_damaged_is_named(kind: str, model: Any, tmp_path: Path) -> None:
    specache_fx.save(read(model, DOCUMENT), tmp_path)
    data = (tmp_path / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    if kind == "long":
        changed = (1 << 62).to_bytes(8, "little") + data[8:]
    else:
        text = TEXTS.get(kind)
        if text is None:
            header = json.loads(data[8 : 8 + length])
            RAW[kind](header)
            text = json.dumps(header).encode()
        changed = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (tmp_path / FILE).write_bytes(changed)
    with pytest.raises(SavedCacheError, match=str(tmp_path / FILE)):
        specache_fx.load(model, tmp_path)


INNER: dict[str, bytes] = {
    "deep": b'{"about": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "twice": b'{"about": {}, "about": {}, "digests": {}, "tensors": {}}',
    "a list": b"[]",
    "no digests": b'{"about": {}}',
    "digests are numbers": b'{"about": {}, "digests": {"a": 1}, "tensors": {}}',
    "empty": b"",
}


@pytest.mark.parametrize("kind", INNER)
def test_the_metadata_is_checked(kind: str, model: Any, tmp_path: Path) -> None:
    text = INNER[kind].decode()
    told = {"specache_fx": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    save_file({"a": torch.zeros(3)}, tmp_path / FILE, told)
    with pytest.raises(SavedCacheError, match=rf"{tmp_path / FILE} can't be read, .*(header|about|digests)"):
        specache_fx.load(model, tmp_path)


# What is no file of ours ----------------------------------------------------------------------------------------------


def _symlink(path: Path, target: str) -> None:
    path.symlink_to(target)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its address would be too long
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


STRANGE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "loop": lambda path: _symlink(path, path.name),
    "device": lambda path: _symlink(path, "/dev/zero"),
    "folder": lambda path: (path.mkdir(), (path / "kept").write_bytes(b"kept")),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", [f"{KEY}.safetensors", "other.safetensors"])
def test_a_strange_file_among_entries_stops_nobody(
    name: str, kind: str, model: Any, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    path = store.folder / name
    STRANGE[kind](path)
    for _ in range(2):
        assert store.get(model, LONGER)[1] == 20
    store.put(DOCUMENT, read(model, DOCUMENT))
    assert store.get(model, LONGER)[1] == 40
    full = PrefixStore(store.folder, sum(each.st_size for each in store._entries().values()))
    full.put(DOCUMENT[:, 1:], read(model, DOCUMENT[:, 1:]))  # what is ours makes room
    assert full.get(model, LONGER[:, 1:])[1] == 39
    (warning,) = [record.message for record in caplog.records if str(path) in record.message]
    assert warning.startswith(f"specache passes over {path} in its store: ") and os.path.lexists(path)
    assert kind != "folder" or (path / "kept").exists()


@pytest.mark.parametrize("kind", STRANGE)
def test_load_names_what_is_no_file(kind: str, model: Any, tmp_path: Path) -> None:
    STRANGE[kind](tmp_path / FILE)
    with pytest.raises(SavedCacheError, match=f"{tmp_path / FILE} can't be read"):
        specache_fx.load(model, tmp_path)


def test_files_of_others_beside_entries_stay(model: Any, store: PrefixStore) -> None:
    others = {
        name: store.folder / name for name in ("model.safetensors", "notes.npy", f"{KEY}.npy", f"{KEY}.txt")
    }
    for path in others.values():
        path.write_bytes(b"of somebody else")
    store.get(model, LONGER)
    store.put(DOCUMENT, read(model, DOCUMENT))
    full = PrefixStore(store.folder, sum(each.st_size for each in store._entries().values()))
    full.put(DOCUMENT[:, 1:], read(model, DOCUMENT[:, 1:]))
    assert store.get(model, LONGER[:, 1:])[1] == 39
    assert all(path.read_bytes() == b"of somebody else" for path in others.values())


# Partial files --------------------------------------------------------------------------------------------------------


def test_what_a_killed_save_left_goes_with_the_next_one_and_no_other(model: Any, tmp_path: Path) -> None:
    def partials() -> set[Path]:
        return set(tmp_path.glob(f"{PARTIAL}*"))

    program = """
        import sys, time
        from pathlib import Path
        from specache_fx.saved.tensor_file import replacing
        with replacing(Path(sys.argv[1])) as file:
            file.write(b"half")
            file.flush()
            print("writes", flush=True)
            time.sleep(600)
    """
    (tmp_path / f"{PARTIAL}folder").mkdir()
    kept = partials()
    writers = [start(program, str(tmp_path / FILE), PYTHONUNBUFFERED="1") for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "writes\n"
    assert len(partials() - kept) == 2
    try:
        specache_fx.save(read(model, DOCUMENT), tmp_path)
        assert len(partials() - kept) == 2  # both are alive
        writers[0].kill()
        writers[0].wait()
        specache_fx.save(read(model, DOCUMENT), tmp_path)
        assert len(partials() - kept) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    specache_fx.save(read(model, DOCUMENT), tmp_path)
    assert partials() == kept and specache_fx.load(model, tmp_path) is not None
