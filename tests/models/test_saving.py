"""A cache that is saved and loaded is the cache that it was: in another process, to the token and to the byte."""

from __future__ import annotations

import copy
import functools
import gc
import json
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.cases import nightly_unless
from support.open_sessions import all_end, session_of
from support.process import python
from support.saved_cases import (
    CASES,
    DAILY,
    NEW_TOKENS,
    OWN,
    OWN_PROMPT,
    PADDED,
    Case,
    go_on,
    make,
    make_own,
    read,
    run_own,
)
from support.zoo import SMALL, TWO_LANES, build
from torch import nn

import specache_fx
from specache_fx import CacheHandleError, ConfigError, HostMemoryError, SavedCacheError
from specache_fx.runtime.native import graph_ops
from specache_fx.saved import saving
from specache_fx.saved.fingerprint import digest, weight_digest
from specache_fx.saved.saving import FILE, FORMAT, content, write_to

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def stayed_and_loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[Told, Told]]:
    """What the caches that stayed in this process say, and what those say that another one loaded."""

    @functools.cache
    def told(daily: bool) -> tuple[Told, Told]:
        folder, stayed = tmp_path_factory.mktemp("saved"), {}
        names = [name for name in (*CASES, *OWN) if (name in DAILY) == daily]
        for name in names:
            torch._dynamo.reset()
            if name in CASES:
                model, case = make(CASES[name]), CASES[name]
                past, ids, mask = read(model, case)
                specache_fx.save(past, folder / name, input_ids=ids[:, :-1])
                torch.save({"ids": ids, "mask": mask}, folder / name / "input.pt")
                nbytes, tokens = specache_fx.stats(past).device_bytes, go_on(model, past, ids, mask)
            else:
                model = make_own(name)
                _, past, ids = run_own(model, OWN_PROMPT, (), 7)
                specache_fx.save(past, folder / name)
                torch.save({"ids": ids}, folder / name / "input.pt")
                nbytes, tokens = (
                    specache_fx.stats(past).device_bytes,
                    run_own(model, ids, past, NEW_TOKENS)[0],
                )
            stayed[name] = {"device_bytes": nbytes, "tokens": tokens}
        torch._dynamo.reset()
        return stayed, json.loads(python("-m", "support.saved_cases", str(folder), *names).splitlines()[-1])

    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_unless(lambda name: name in DAILY, [*CASES, *OWN]))
def test_another_process_goes_on_as_the_cache_that_stayed(
    name: str, stayed_and_loaded: Callable[[bool], tuple[Told, Told]]
) -> None:
    stayed, loaded = stayed_and_loaded(name in DAILY)
    assert loaded[name] == stayed[name]


# In this process ------------------------------------------------------------------------------------------------------

CASE = Case(options={"bits": 1, "sink_tokens": 2})


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch._dynamo.reset()
    yield make(CASE)
    torch._dynamo.reset()


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    past, ids, _ = read(model, CASE)
    specache_fx.save(past, tmp_path / "cache", input_ids=ids[:, :-1])
    return tmp_path / "cache"


def held_by(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / FILE, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_loaded_cache_holds_the_same_to_the_bit(model: Any, saved: Path, tmp_path: Path) -> None:
    specache_fx.save(specache_fx.load(model, saved), tmp_path / "again")
    assert same(held_by(tmp_path / "again"), held_by(saved))


def test_the_next_logits_are_the_same_to_the_bit(model: Any, tmp_path: Path) -> None:
    past, ids, mask = read(model, CASE)
    specache_fx.save(past, tmp_path)
    for _ in range(3):
        logits = []
        for cache in (past, loaded := specache_fx.load(model, tmp_path)):
            with torch.no_grad():
                out = model(ids[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True)
            logits.append(out.logits)
        assert torch.equal(*logits)
        specache_fx.save(loaded, tmp_path)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        ids = logits[0].argmax(-1)


def test_a_cropped_copy_is_saved_at_its_length(model: Any, tmp_path: Path) -> None:
    past, ids, mask = read(model, CASE)
    kept = copy.deepcopy(past)
    kept.crop(-7)
    specache_fx.save(kept, tmp_path, input_ids=ids[:, :-8])
    loaded = specache_fx.load(model, tmp_path)
    assert specache_fx.stats(loaded).kv_len == specache_fx.stats(past).kv_len - 7
    assert go_on(model, loaded, ids[:, :-7], mask[:, :-7]) == go_on(model, kept, ids[:, :-7], mask[:, :-7])


def test_a_cache_of_full_windows_alone_goes_on_where_nothing_is_compiled_yet(tmp_path: Path) -> None:
    """The first graph is of a step: no width of a mask is known to grow."""
    case = CASES["all-windows"]
    model = make(case)
    past, ids, mask = read(model, case)
    specache_fx.save(past, tmp_path)
    stayed = go_on(model, past, ids, mask)
    torch._dynamo.reset()
    again = make(case)
    loaded = specache_fx.load(again, tmp_path)
    assert go_on(again, loaded, ids, mask) == stayed
    assert specache_fx.stats(loaded).steps == NEW_TOKENS


@pytest.mark.parametrize("held", [False, True], ids=["moved", "forked"])
def test_rows_of_a_reordered_cache_are_saved_in_their_order(held: bool, model: Any, tmp_path: Path) -> None:
    past, ids, mask = read(model, CASE)
    originals = [layer.keys for layer in past.layers if held]
    rows = torch.tensor([2, 0, 2])
    past.reorder_cache(rows)
    gc.collect()
    specache_fx.save(past, tmp_path)
    loaded = specache_fx.load(model, tmp_path)
    stayed = go_on(model, past, ids[rows], mask[rows])
    assert go_on(model, loaded, ids[rows], mask[rows]) == stayed and stayed[0] == stayed[2]
    assert bool(originals) == held


def test_saving_leaves_the_cache_as_it_was(model: Any, tmp_path: Path) -> None:
    past, ids, mask = read(model, CASE)
    specache_fx.save(past, tmp_path)
    other, *_ = read(model, CASE)
    assert go_on(model, past, ids, mask) == go_on(model, other, ids, mask)


def test_options_that_decide_nothing_of_what_is_held_are_the_models(tmp_path: Path) -> None:
    model, saved = specache_fx.compile(build("plain"), **TWO_LANES, **CASE.options), tmp_path / "cache"
    specache_fx.save(read(model, CASE)[0], saved)
    past = specache_fx.load(model, saved)
    session = session_of(past)
    assert session.speculative_token is not None
    options = {**TWO_LANES, **CASE.options, "top_k": 4, "host": "disk"}
    past = specache_fx.load(specache_fx.compile(build("plain"), **options), saved)
    session = session_of(past)
    assert session.speculative_token is None
    assert session.config.top_k == 4 and session.config.host == "disk"


# What is refused ------------------------------------------------------------------------------------------------------


def fine_tuned() -> Any:
    model = build("plain")
    with torch.no_grad():
        model.layers[1].up_proj.weight[3, 5] += 1e-3  # type: ignore[union-attr, operator, index]
    return model


def with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(build("plain"), LoraConfig(target_modules=["q_proj"]))


def with_another_epsilon() -> Any:
    return build("plain", rms_norm_eps=1e-5)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (fine_tuned, r"other numbers in '.*layers\.1\.up_proj\.weight'"),
        (with_adapters, r"has no weight '.*q_proj\.weight'"),
        (with_another_epsilon, "a model with another config"),
        (lambda: build("plain").bfloat16(), r"saved in float32, the model is in torch\.bfloat16"),
        (lambda: build("qwen2"), "a model with another config"),
    ],
)
def test_another_model_is_refused(other: Any, said: str, saved: Path) -> None:
    with all_end(), pytest.raises(SavedCacheError, match=said):
        specache_fx.load(specache_fx.compile(other(), **SMALL, **CASE.options), saved)


def test_weights_that_are_written_behind_their_version_are_noticed(model: Any, saved: Path) -> None:
    written = model.layers[1].up_proj.weight
    assert specache_fx.load(model, saved) is not None
    kept = written.detach().clone()
    try:
        written.data.add_(0.01)
        with pytest.raises(SavedCacheError, match=r"other numbers in '.*up_proj\.weight'"):
            specache_fx.load(model, saved)
    finally:
        written.data.copy_(kept)
    assert specache_fx.load(model, saved) is not None


def test_a_merged_adapter_is_another_weight() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build("plain"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    weight = adapted.get_parameter("base_model.model.layers.0.q_proj.base_layer.weight")
    before = weight_digest(weight)
    adapted.merge_adapter()
    assert weight_digest(weight) != before


@pytest.mark.parametrize(
    ("name", "value"),
    [("bits", 2), ("group_size", 16), ("residual_length", 16), ("sink_tokens", 0), ("quantizer", "kivi")],
)
def test_options_that_decide_what_is_held_are_compared(name: str, value: Any, saved: Path) -> None:
    other = specache_fx.compile(build("plain"), **{**SMALL, **CASE.options, name: value})
    with pytest.raises(SavedCacheError, match=f"it has {name}=.*, the model {value!r}"):
        specache_fx.load(other, saved)


def test_other_tokens_are_refused(model: Any, saved: Path) -> None:
    _, ids, _ = read(model, CASE)
    assert specache_fx.load(model, saved, input_ids=ids) is not None
    ids[1, -3] += 1
    with pytest.raises(SavedCacheError, match="are not the first of input_ids"):
        specache_fx.load(model, saved, input_ids=ids)
    with pytest.raises(SavedCacheError, match=r"input_ids are \(3, 50\), but the cache is of \(3, 49\)"):
        specache_fx.save(read(model, CASE)[0], saved, input_ids=ids)
    with pytest.raises(ConfigError, match="input_ids are a list"):
        specache_fx.save(read(model, CASE)[0], saved, input_ids=ids.tolist())
    with pytest.raises(SavedCacheError, match="are not the tokens of this cache: token 47 is another"):
        specache_fx.save(read(model, CASE)[0], saved, input_ids=ids[:, :-1])


def test_a_model_that_is_not_compiled_is_warned_of(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="specache_fx"):
        specache_fx.load(build("plain"), saved)
    assert "specache_fx.compile(model, ...)" in caplog.text


def test_what_is_no_whole_cache_is_not_saved(model: Any, tmp_path: Path) -> None:
    past, *_ = read(model, CASE)
    with pytest.raises(CacheHandleError, match="come from several caches"):
        specache_fx.save([past.layers[0].keys, past.layers[0].values], tmp_path)
    with pytest.raises(CacheHandleError, match=r"argument of save\(\) has no KV cache of specache"):
        specache_fx.save([torch.zeros(1, 2, 3, 16)], tmp_path)
    with pytest.raises(SavedCacheError, match="A set in this cache can't be saved"):
        specache_fx.save({"past": past, "seen": {1, 2}}, tmp_path)
    specache_fx.release(past)
    with pytest.raises(CacheHandleError, match="was released"):
        specache_fx.save(past, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_whose_model_is_gone_is_not_saved(tmp_path: Path) -> None:
    model = make(CASE)
    past, *_ = read(model, CASE)
    model.lm_head = nn.Linear(64, 128, bias=False)
    with pytest.raises(SavedCacheError, match=r"model of this cache is gone \(its weight 'lm_head.weight'\)"):
        specache_fx.save(past, tmp_path)
    torch._dynamo.reset()


def test_host_folder_that_is_gone_leaves_nothing_half_loaded(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    options = {**SMALL, **CASE.options, "host": "disk", "host_dir": tmp_path / "host"}
    model = specache_fx.compile(build("plain"), **options)
    (tmp_path / "host").rmdir()
    with all_end() as made, pytest.raises(HostMemoryError, match="host"):
        specache_fx.load(model, saved)
    assert made


# The file -------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_short_is_refused(model: Any, saved: Path) -> None:
    whole = (saved / FILE).read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        (saved / FILE).write_bytes(whole[:length])
        with pytest.raises(SavedCacheError, match="cut short"):
            specache_fx.load(model, saved)


def test_no_changed_byte_makes_another_cache(model: Any, saved: Path) -> None:
    """It is an error, or the byte meant nothing."""
    whole, before = (saved / FILE).read_bytes(), held_by(saved)
    start = 8 + int.from_bytes(whole[:8], "little")
    draw = torch.Generator().manual_seed(0)
    places = [*torch.randint(start, len(whole), (40,), generator=draw).tolist(), start, len(whole) - 1]
    places += torch.randint(0, start, (40,), generator=draw).tolist()
    refused = 0
    with all_end() as made:
        for place in places:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << (place % 7)
            (saved / FILE).write_bytes(damaged)
            try:
                past = specache_fx.load(model, saved)
            except SavedCacheError:
                refused += 1
                continue
            specache_fx.save(past, saved)
            assert place < start and same(held_by(saved), before)
            del past
    assert refused > 60 and made


def test_nothing_to_load_is_named(model: Any, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SavedCacheError, match="There is no saved cache in"):
            specache_fx.load(model, folder)
    torch.save({}, tmp_path / FILE)  # a pickle is not read
    with pytest.raises(SavedCacheError, match="is no such file"):
        specache_fx.load(model, tmp_path)
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(SavedCacheError, match="can't be saved in"):
        specache_fx.save(read(model, CASE)[0], file)
    assert file.read_text() == "not a folder"


def test_a_full_disk_leaves_the_older_cache(model: Any, saved: Path) -> None:
    before, (_, hard) = held_by(saved), resource.getrlimit(resource.RLIMIT_FSIZE)
    past, *_ = read(model, CASE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(
            SavedCacheError, match=r"can't be saved in .* on a disk with room for [\d,]+ bytes"
        ):
            specache_fx.save(past, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [path.name for path in saved.iterdir()] == [FILE]
    assert same(held_by(saved), before)


def test_a_file_of_another_format_is_refused(
    model: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(saving, "FORMAT", 999)
        specache_fx.save(read(model, CASE)[0], saved)
    with pytest.raises(SavedCacheError, match=f"its format is 999, this version reads {FORMAT}"):
        specache_fx.load(model, saved)


@pytest.mark.parametrize("in_cpp", [True, False])
def test_digests_are_the_same_in_every_version(in_cpp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_cpp:
        monkeypatch.setattr(graph_ops, "load", lambda: None)
    words = torch.arange(5000, dtype=torch.int64)
    assert digest(words) == "5ab1f8512b20bbea3487631e9c0ecc65"
    assert digest(words.to(torch.bfloat16)[3:]) == "cd2023367f355ac92d5844c0e449584c"


def rewritten(
    past: Any, path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
) -> None:
    """Save a cache as another version might."""
    with content(past, None) as (about, tensors):
        change(about, tensors)
        write_to(path, about, tensors)


def test_an_option_that_this_version_lacks_is_named(model: Any, tmp_path: Path) -> None:
    past, *_ = read(model, CASE)
    rewritten(past, tmp_path / FILE, lambda about, _: about["sessions"][0]["config"].update(stripes=3))
    with pytest.raises(SavedCacheError, match=r"its options are another version's: .*stripes"):
        specache_fx.load(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("0.0.sizes", [0, 64, 32, 17]),
        ("0.0.sizes", [6, 64, -32, 81]),
        ("0.0.sizes", [6, 64, 44, 5]),
        ("0.0.sizes", [6, 3, 32, 17]),
        ("0.0.sizes", [1 << 40, 64, 32, 17]),
        ("0.0.sizes", [6, 1 << 40, 32, 17]),
        ("0.tokens", [[1, 2, 3]]),
        ("0.mask", [[True]]),
    ],
)
def test_what_no_such_session_can_have_is_refused(
    name: str, value: list[Any], model: Any, tmp_path: Path
) -> None:
    past, *_ = read(model, CASE)

    def change(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.tensor(value, dtype=tensors[name].dtype)

    rewritten(past, tmp_path / FILE, change)
    with all_end() as made, pytest.raises(SavedCacheError, match="lacks a part that a cache of this version"):
        specache_fx.load(model, tmp_path)
    assert made


def test_rows_of_the_host_are_put_together_in_their_order_or_not_at_all(model: Any, tmp_path: Path) -> None:
    past, ids, mask = read(model, CASE)

    def pieces(numbers: list[int]) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
        def change(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
            rows = torch.cat(
                [tensors.pop(name) for name in sorted(tensors) if name.startswith("0.0.host.")], 2
            )
            for number, piece in zip(numbers, rows.tensor_split(len(numbers), 2), strict=True):
                tensors[f"0.0.host.{number}"] = piece

        return change

    rewritten(past, tmp_path / FILE, pieces(list(range(12))))
    loaded = specache_fx.load(model, tmp_path)
    specache_fx.save(past, tmp_path / "whole")
    specache_fx.save(loaded, tmp_path / "again")
    assert same(held_by(tmp_path / "again"), held_by(tmp_path / "whole"))
    for numbers in ([0, 2], [0, 40], [1], [3, 4]):
        rewritten(past, tmp_path / FILE, pieces(numbers))
        with pytest.raises(SavedCacheError, match=r"lacks a part that a cache .* 'host\.\d+'"):
            specache_fx.load(model, tmp_path)
    assert go_on(model, loaded, ids, mask) == go_on(model, past, ids, mask)


def test_token_ids_without_a_batch_are_named(model: Any, saved: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"input_ids are torch.int64 \(50,\): give integers \[batch, tokens\]"
    ):
        specache_fx.load(model, saved, input_ids=torch.zeros(50, dtype=torch.int64))


# At the same time -----------------------------------------------------------------------------------------------------


def test_saving_waits_for_a_step_in_another_thread(model: Any, tmp_path: Path) -> None:
    past, *_ = read(model, CASE)
    session = session_of(past)
    thread = threading.Thread(target=specache_fx.save, args=(past, tmp_path))
    with session.lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not list(tmp_path.iterdir())
    thread.join(60)
    assert (tmp_path / FILE).is_file()


def test_other_caches_go_on_while_one_is_saved(model: Any) -> None:
    past, ids, mask = read(model, CASE)
    other, *_ = read(model, CASE)
    session = session_of(past)
    said: list[Any] = []
    waiting = threading.Thread(target=lambda: said.append(go_on(model, past, ids, mask)))
    going = threading.Thread(target=lambda: said.append(go_on(model, other, ids, mask)))
    with session.lock:  # as `save` holds it
        waiting.start()
        waiting.join(0.5)
        going.start()
        going.join(30)
        went_on = not going.is_alive()
        assert waiting.is_alive()
    for thread in (waiting, going):
        thread.join(60)
    assert went_on and len(said) == 2 and said[0] == said[1]


@pytest.mark.nightly
def test_two_processes_that_save_at_once_leave_one_whole_cache(model: Any, saved: Path) -> None:
    code = f"""
import sys, specache_fx
from support.saved_cases import *
case = Case(options={CASE.options!r}, decoded=int(sys.argv[2]))
past, ids, _ = read(make(case), case)
for _ in range(60):
    specache_fx.save(past, sys.argv[1])
"""
    writers = [
        threading.Thread(target=python, args=("-c", code, str(saved), str(decoded))) for decoded in (3, 21)
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(specache_fx.stats(specache_fx.load(model, saved)).kv_len)
    prompt = PADDED["input_ids"].shape[1]
    assert {prompt + 3, prompt + 21} <= seen <= {prompt + 3, prompt + 19, prompt + 21}
    assert [path.name for path in saved.iterdir()] == [FILE]


def test_a_prompt_of_embeddings_is_saved_with_its_tokens(tmp_path: Path) -> None:
    decoder = specache_fx.compile(build("plain"), **SMALL)
    ids = torch.randint(3, 128, (2, 20))
    with torch.no_grad():
        past = decoder(inputs_embeds=decoder.embed_tokens(ids), use_cache=True).past_key_values
    specache_fx.save(past, tmp_path, input_ids=ids)  # nobody saw the tokens: there is nothing to compare
    assert specache_fx.load(decoder, tmp_path, input_ids=ids) is not None
