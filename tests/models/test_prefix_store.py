"""A prefix store gives the longest saved beginning of a prompt, exactly, and keeps within its bytes."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from support.cases import nightly_unless
from support.open_sessions import session_of
from support.process import python
from support.zoo import SMALL, build
from torch import Tensor

import specache_fx
from specache_fx import ConfigError, PrefixStore, SavedCacheError
from specache_fx.saved import prefix_store
from specache_fx.saved.saving import content, write_to

OPTIONS: dict[str, Any] = {**SMALL, "bits": 1, "sink_tokens": 2}
DOCUMENT = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch._dynamo.reset()
    yield specache_fx.compile(build("plain", 1), **OPTIONS)
    torch._dynamo.reset()


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    return PrefixStore(tmp_path, 1 << 30)


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Any:
    return model(ids, use_cache=True).past_key_values


def answer(model: Any, ids: Tensor, past: Any = None) -> list[int]:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=past, max_new_tokens=16, do_sample=False
    )
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def asked(*questions: int) -> Tensor:
    return torch.cat([DOCUMENT, torch.tensor([questions])], 1)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_other_tokens_and_a_disk_that_fails_leave_nothing(
    model: Any, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SavedCacheError, match="token 0 is another"):
        store.put(DOCUMENT + 1, read(model, DOCUMENT))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_store, "write_to", fail)
    with pytest.raises(SavedCacheError, match="No space left on device"):
        store.put(DOCUMENT, read(model, DOCUMENT))
    assert not [path for path in store.folder.iterdir() if path.name != ".lock"]


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def put(store: PrefixStore, model: Any, ids: Tensor) -> None:
    """And count the entry as older than any that comes later."""
    store.put(ids, read(model, ids))
    for i, path in enumerate(
        sorted(store.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    ):
        os.utime(path, (1000 + i, 1000 + i))


def test_the_longest_saved_prefix_answers_as_if_all_was_read(model: Any, store: PrefixStore) -> None:
    assert store.get(model, DOCUMENT) == (None, 0)
    for length in (20, 60, 40):
        put(store, model, DOCUMENT[:, :length])
    for question in ((5, 6, 7), (8,)):
        ids = asked(*question)
        past, num_tokens = store.get(model, ids)
        assert num_tokens == 60 and specache_fx.stats(past).kv_len == 60
        stayed = read(model, DOCUMENT)
        assert answer(model, ids, past) == answer(model, ids, stayed)


def test_the_prompts_last_token_is_left_to_be_read(model: Any, store: PrefixStore) -> None:
    put(store, model, DOCUMENT)
    past, num_tokens = store.get(model, DOCUMENT)
    assert num_tokens == 59
    assert answer(model, DOCUMENT, past) == answer(model, DOCUMENT, read(model, DOCUMENT[:, :59]))
    assert store.get(model, DOCUMENT[:, :1]) == (None, 0)


@given(common=st.integers(1, 59), new=st.integers(1, 12))
def test_what_agrees_of_a_saved_cache_is_as_if_no_more_had_been_read(
    common: int, new: int, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "common"
    store = PrefixStore(folder, 1 << 30)
    if not files(folder):
        put(store, model, DOCUMENT)
    other = torch.where(DOCUMENT == 127, 3, DOCUMENT + 1)[:, common : common + new]
    ids = torch.cat([DOCUMENT[:, :common], other], 1)
    past, num_tokens = store.get(model, ids)
    assert num_tokens == min(common, ids.shape[1] - 1)
    if num_tokens:
        assert answer(model, ids, past) == answer(model, ids, read(model, ids[:, :num_tokens]))


@pytest.mark.parametrize(
    ("name", "options"),
    nightly_unless(
        lambda case: case[0] == "plain", [("plain", {"policy": "kivi"}), ("gemma3_text", {}), ("lfm2", {})]
    ),
)
def test_what_cannot_be_cut_exactly_is_found_whole_alone(
    name: str, options: dict[str, Any], store: PrefixStore
) -> None:
    other = specache_fx.compile(build(name, 1 if name == "plain" else None), **SMALL, **options)
    put(store, other, DOCUMENT)
    assert store.get(other, DOCUMENT) == (None, 0) and len(files(store.folder)) == 1
    past, num_tokens = store.get(other, asked(5, 6))
    assert num_tokens == 60 and answer(other, asked(5, 6), past) == answer(
        other, asked(5, 6), read(other, DOCUMENT)
    )


def test_a_cache_with_tensors_of_the_models_own_is_not_cut(model: Any, store: PrefixStore) -> None:
    """A layer that is left alone: its tensors would stay as long as they were."""
    own = torch.randn(1, 2, 60, 16)
    store.put(DOCUMENT, (read(model, DOCUMENT), (own, own + 1)))
    assert store.get(model, DOCUMENT[:, :40]) == (None, 0)
    (_, (key, value)), num_tokens = store.get(model, asked(5, 6))
    assert num_tokens == 60 and torch.equal(key, own) and torch.equal(value, own + 1)


def test_all_sequences_of_a_batch_have_to_agree(model: Any, tmp_path: Path) -> None:
    store, pair = PrefixStore(tmp_path, 1 << 30), torch.cat([DOCUMENT, DOCUMENT.flip(1)])
    put(store, model, pair)
    assert store.get(model, asked(5, 6))[1] == 0
    longer = torch.cat([pair, pair[:, :2]], 1)
    assert store.get(model, longer)[1] == 60
    longer[1, 30] = 0
    assert store.get(model, longer)[1] == 30


def test_padding_has_to_agree(model: Any, tmp_path: Path) -> None:
    store, pair = PrefixStore(tmp_path, 1 << 30), torch.cat([DOCUMENT, DOCUMENT.flip(1)])
    mask = torch.ones_like(pair)
    mask[1, :9] = 0
    with torch.no_grad():
        store.put(pair, model(pair, attention_mask=mask, use_cache=True).past_key_values)
    longer = torch.cat([pair, pair[:, :2]], 1)
    padded = torch.nn.functional.pad(mask, (0, 2), value=1)
    assert store.get(model, longer) == (None, 0)
    assert store.get(model, longer, padded.roll(1, 1)) == (None, 0)
    assert store.get(model, longer, padded)[1] == 60
    assert store.get(model, longer[:, :40], padded[:, :40])[1] == 39
    store.put(pair, read(model, pair))
    assert len(files(tmp_path)) == 2
    past, num_tokens = store.get(model, longer)
    assert num_tokens == 60 and answer(model, longer, past) == answer(model, longer, read(model, pair))
    with pytest.raises(ConfigError, match=r"attention_mask is \(2, 60\), input_ids are \(2, 62\)"):
        store.get(model, longer, mask)


def test_entries_of_other_models_and_options_are_passed_over(model: Any, store: PrefixStore) -> None:
    other = specache_fx.compile(build("plain", 1), **{**OPTIONS, "bits": 2})
    tuned: Any = specache_fx.compile(build("plain", 1), **OPTIONS)
    with torch.no_grad():
        tuned.lm_head.weight[0] += 1
    put(store, other, DOCUMENT)
    put(store, tuned, DOCUMENT[:, :50])
    assert store.get(model, asked(5, 6)) == (None, 0) and len(files(store.folder)) == 2
    put(store, model, DOCUMENT[:, :40])
    assert store.get(model, asked(5, 6))[1] == 40
    assert store.get(other, asked(5, 6))[1] == 60


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_the_bytes_stay_within(model: Any, tmp_path: Path) -> None:
    put(PrefixStore(tmp_path / "one", 1 << 30), model, DOCUMENT)
    one = held(tmp_path / "one")
    store = PrefixStore(tmp_path / "store", 3 * one + one // 2)
    documents = [(DOCUMENT + i) % 125 + 3 for i in range(4)]
    for document in documents[:3]:
        put(store, model, document)
    question = torch.tensor([[5, 6]])
    prompts = [torch.cat([document, question], 1) for document in documents]
    assert store.get(model, prompts[0])[1] == 60  # the oldest one is used
    put(store, model, documents[3])
    assert held(store.folder) <= store.max_bytes
    assert [store.get(model, prompt)[1] for prompt in prompts] == [60, 0, 60, 60]
    smaller = PrefixStore(store.folder, one // 2)
    with pytest.raises(
        SavedCacheError, match=r"This cache takes [\d,]+ bytes, and the store in .* larger max_bytes"
    ):
        smaller.put(documents[1], read(model, documents[1]))
    assert len(files(store.folder)) == 3


def test_the_same_cache_is_kept_once(model: Any, store: PrefixStore) -> None:
    put(store, model, DOCUMENT)
    (path,) = files(store.folder)
    store.put(DOCUMENT, read(model, DOCUMENT))
    assert files(store.folder) == [path] and path.stat().st_mtime > 2000


def test_a_damaged_entry_is_put_anew(model: Any, store: PrefixStore) -> None:
    cache = read(model, DOCUMENT)
    store.put(DOCUMENT, cache)
    (entry,) = store.folder.glob("*.safetensors")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:100])
    store.put(DOCUMENT, cache)
    assert entry.stat().st_size == len(whole)
    assert PrefixStore(store.folder / "exact", max_bytes=len(whole)).put(DOCUMENT, cache) is None
    with pytest.raises(SavedCacheError, match=f"takes {len(whole):,} bytes"):
        PrefixStore(store.folder / "small", max_bytes=len(whole) - 1).put(DOCUMENT, cache)


def test_bad_arguments_are_named(model: Any, tmp_path: Path) -> None:
    for wrong in (0, 1.5, True, "1GB"):
        with pytest.raises(ConfigError, match="max_bytes="):
            PrefixStore(tmp_path, wrong)  # type: ignore[arg-type]
    store = PrefixStore(tmp_path / "file", 1 << 30)
    with pytest.raises(ConfigError, match=r"give integers \[batch, tokens\]"):
        store.get(model, DOCUMENT[0])
    ids, mask = DOCUMENT.tolist(), torch.ones_like(DOCUMENT)
    for call in (lambda: store.put(ids, None), lambda: store.get(model, ids, mask)):
        with pytest.raises(ConfigError, match="input_ids are a list: give a tensor of integers"):
            call()
    with pytest.raises(SavedCacheError, match="but the cache is of"):
        store.put(asked(5), read(model, DOCUMENT))
    store = PrefixStore(tmp_path / "no folder", 1 << 30)
    store.folder.write_text("a file")
    with pytest.raises(SavedCacheError, match="can't be written to"):
        store.put(DOCUMENT, read(model, DOCUMENT))


def test_an_entry_with_options_of_another_version_is_passed_over(model: Any, store: PrefixStore) -> None:
    put(store, model, DOCUMENT[:, :30])
    put(store, model, DOCUMENT)
    longest = max(files(store.folder), key=lambda path: path.stat().st_mtime)
    with content(read(model, DOCUMENT), DOCUMENT) as (about, tensors):
        about["sessions"][0]["config"]["stripes"] = 3
        write_to(longest, about, {**tensors, "input_ids": DOCUMENT})
    assert store.get(model, asked(5, 6))[1] == 30 and len(files(store.folder)) == 2


# What others do -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["input_ids", "0.0.host.0"])
@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_broken_entry_is_removed_with_a_warning(
    tensor: str, how: str, model: Any, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, model, DOCUMENT[:, :30])
    put(store, model, DOCUMENT)
    longest = max(files(store.folder), key=lambda path: path.stat().st_mtime)
    data = bytearray(longest.read_bytes())
    header = int.from_bytes(data[:8], "little")
    end = 8 + header + json.loads(data[8 : 8 + header])[tensor]["data_offsets"][1]
    data[end - 1] ^= 1
    longest.write_bytes(data if how == "changed" else data[: end - 1])
    with caplog.at_level("WARNING", logger="specache_fx"):
        assert store.get(model, asked(5, 6))[1] == 30
    (warning,) = [record.message for record in caplog.records if record.name.startswith("specache_fx")]
    assert warning.startswith(f"specache removes {longest} from its store")
    assert len(files(store.folder)) == 1


@pytest.mark.parametrize("ids", [torch.ones(1, 60), torch.arange(60), torch.zeros(0, 60), None], ids=str)
def test_tokens_of_another_form_are_no_entrys(ids: Tensor | None, model: Any, store: PrefixStore) -> None:
    with content(read(model, DOCUMENT), DOCUMENT) as (about, tensors):
        more = {} if ids is None else {"input_ids": ids}
        write_to(store.folder / f"{0:032x}.safetensors", about, {**tensors, **more})
    assert store.get(model, asked(5, 6)) == (None, 0)
    put(store, model, DOCUMENT)
    assert store.get(model, asked(5, 6))[1] == 60


def test_a_damaged_entry_is_removed_by_the_holder_of_the_lock(model: Any, store: PrefixStore) -> None:
    put(store, model, DOCUMENT)
    (path,) = files(store.folder)
    path.write_bytes(path.read_bytes()[:-100])
    thread = threading.Thread(target=store.get, args=(model, asked(5, 6)))
    with FileLock(store.folder / ".lock"):
        thread.start()
        thread.join(1)
        assert thread.is_alive() and path.exists()
        # Who holds the lock puts it anew: that one is not removed.
        put(PrefixStore(store.folder / "other", 1 << 30), model, DOCUMENT)
        os.replace(store.folder / "other" / path.name, path)
    thread.join(60)
    assert store.get(model, asked(5, 6))[1] == 60


def test_a_cache_goes_on_while_its_put_waits_for_another_process(model: Any, tmp_path: Path) -> None:
    store, past = PrefixStore(tmp_path, 1 << 30), read(model, DOCUMENT)
    session = session_of(past)
    thread = threading.Thread(target=store.put, args=(DOCUMENT, past))
    with FileLock(tmp_path / ".lock"):
        thread.start()
        thread.join(1)
        assert thread.is_alive() and session.lock.acquire(timeout=1)
        session.lock.release()
    thread.join(60)
    assert len(files(tmp_path)) == 1


def test_an_error_of_the_callers_process_removes_nothing(
    model: Any, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, model, DOCUMENT)

    def alarm(*_: Any) -> None:
        raise TimeoutError("of a signal's handler")

    monkeypatch.setattr(prefix_store, "fitting", alarm)
    with pytest.raises(TimeoutError):
        store.get(model, asked(5, 6))
    monkeypatch.undo()
    assert store.get(model, asked(5, 6))[1] == 60


def test_an_entry_of_a_user_who_lets_nobody_read_it_is_passed_over(model: Any) -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:
        store = PrefixStore(folder, 1 << 30)
        put(store, model, DOCUMENT[:, :30])
        put(store, model, DOCUMENT)
        longest = max(files(store.folder), key=lambda path: path.stat().st_mtime)
        for path in (store.folder, *store.folder.iterdir()):
            path.chmod(0o777)
        longest.chmod(0)
        user = os.geteuid()
        os.seteuid(user or nobody)  # root reads everything
        try:
            assert store.get(model, asked(5, 6))[1] == 30
        finally:
            os.seteuid(user)
        assert len(files(store.folder)) == 2


def test_an_entry_that_is_just_gone_is_no_damaged_one(model: Any, store: PrefixStore) -> None:
    put(store, model, DOCUMENT)
    (path,) = files(store.folder)
    path.unlink()
    path.symlink_to(path.with_name("gone"))  # listed, and not there
    assert store.get(model, asked(5)) == (None, 0)
    assert path.is_symlink()


def test_what_killed_processes_left_is_removed(model: Any, store: PrefixStore) -> None:
    (store.folder / ".partial-abc").write_bytes(b"half")
    put(store, model, DOCUMENT)
    assert len(files(store.folder)) == 1 and len(list(store.folder.iterdir())) == 2  # cache, lock


@pytest.mark.nightly
def test_processes_that_put_and_get_at_once_find_whole_caches(model: Any, tmp_path: Path) -> None:
    put(PrefixStore(tmp_path / "one", 1 << 30), model, DOCUMENT)
    store = PrefixStore(tmp_path / "store", 3 * held(tmp_path / "one"))
    code = f"""
import sys
from test_prefix_store import *
model = specache_fx.compile(build("plain", 1), **OPTIONS)
store = PrefixStore({str(store.folder)!r}, {store.max_bytes})
for i in range(60):
    ids = (DOCUMENT + i % 4 + int(sys.argv[1])) % 125 + 3
    store.put(ids, read(model, ids))
    prompt = torch.cat([ids, ids[:, :3]], 1)
    past, num_tokens = store.get(model, prompt)
    assert num_tokens in (0, 60)
    if num_tokens and not i % 10:
        assert answer(model, prompt, past) == answer(model, prompt, read(model, ids))
"""
    others = [threading.Thread(target=python, args=("-c", code, str(i))) for i in (0, 2)]
    failed: list[Any] = []
    before, threading.excepthook = threading.excepthook, failed.append
    try:
        for other in others:
            other.start()
        for other in others:
            other.join()
    finally:
        threading.excepthook = before
    assert not failed, str(failed[0].exc_value)
    assert 0 < held(store.folder) <= store.max_bytes
