"""Real memory: what prefill has alive at once, what a failing host does, what is freed and when."""

from __future__ import annotations

import gc
import resource
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.models import TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from support.process import python
from support.zoo import SMALL, TWO_LANES, build
from torch._dynamo.exc import BackendCompilerFailed

import specache_fx
from specache_fx.errors import HostMemoryError
from specache_fx.runtime.session import registry

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS = TWO_LANES | {"bits": 1, "top_k": 4}
WIDE = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 8, "head_dim": 32, "max_positions": 4096}


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator had handed out at once during `run`, above what it had before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = peak = 0
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    ("lowering", "most"), nightly_unless(lambda case: case[0] == "inductor", [("eager", 8), ("inductor", 4)])
)
def test_prefill_keeps_one_layers_pairs_alive(lowering: str, most: int) -> None:
    tokens, peaks, copies = 1024, {}, {}
    layer_bytes = 2 * tokens * WIDE["num_kv_heads"] * WIDE["head_dim"] * 4
    input_ids = torch.randint(61, (1, tokens), generator=torch.Generator().manual_seed(0))
    for layers in (2, most):
        model = TinyDecoder(TinyConfig(num_layers=layers, **WIDE))
        # On disk: the host tier's memory-mapped blocks are not the allocator's.
        options = {**OPTIONS, "group_size": 32, "lowering": lowering, "host": "disk"}
        compiled = torch.compile(model, backend="specache", options=options)
        with torch.no_grad():
            compiled(input_ids)  # compiles
            gc.collect()
            registry.sweep()  # what the first call left must not be freed, and so counted, within the second
            peaks["plain", layers] = peak_bytes(lambda m=model: m(input_ids))
            kept: list[Any] = []
            peaks["ours", layers] = peak_bytes(lambda c=compiled, kept=kept: kept.append(c(input_ids)))
            copies[layers] = specache_fx.stats(kept).device_bytes
        torch._dynamo.reset()
    plain_growth = peaks["plain", most] - peaks["plain", 2]
    growth = peaks["ours", most] - peaks["ours", 2]
    assert plain_growth >= (most - 2.1) * layer_bytes  # the plain model keeps all of its layers
    # Ours keeps as many more low-bit copies. One more layer's 16-bit pairs alive at the peak would show.
    assert growth - (copies[most] - copies[2]) < 0.5 * layer_bytes


@pytest.mark.nightly  # `unit/passes/test_prompt_masks.py` has the operator that needs no mask
@pytest.mark.parametrize(("window", "padding"), [(None, 0), (96, 9)])
def test_prompt_has_no_mask_of_all_its_queries_and_keys(window: int | None, padding: int) -> None:
    layers = () if window is None else (0,)
    model = TinyDecoder(TinyConfig(num_layers=2, window=window, window_layers=layers, max_positions=4096))
    options = {**OPTIONS, "group_size": 32, "lowering": "inductor"}
    compiled = torch.compile(model, backend="specache", options=options, dynamic=True)
    lengths, plain, ours = (2048, 4096), [], []
    for tokens in lengths:
        input_ids = torch.randint(61, (1, tokens), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(1, tokens, dtype=torch.bool)
        mask[:, :padding] = False
        with torch.no_grad():
            logits = compiled(input_ids, attention_mask=mask)[0]  # compiles
            expected = model(input_ids, attention_mask=mask)[0]
            torch.testing.assert_close(logits[:, padding:], expected[:, padding:], atol=1e-4, rtol=1e-4)
            gc.collect()
            registry.sweep()
            plain.append(peak_bytes(lambda: model(input_ids, attention_mask=mask)))  # noqa: B023
            ours.append(peak_bytes(lambda: compiled(input_ids, attention_mask=mask)))  # noqa: B023
    # What grows with the square of the length; a bool mask has half a byte of it for each query and key.
    squared = [peaks[1] - 2 * peaks[0] for peaks in (plain, ours)]
    assert squared[0] > lengths[1] ** 2
    assert squared[1] < lengths[1] ** 2 / 4


def _prompt(model: TinyDecoder, tokens: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (2, tokens), generator=generator)


@pytest.mark.parametrize("kind", nightly_unless("missing".__eq__, ["missing", "file"]))
def test_bad_host_dir_is_named_when_the_model_is_compiled_and_the_model_stays_usable(
    tmp_path: Path, kind: str
) -> None:
    folder, model = tmp_path / "kv", TinyDecoder(TinyConfig(num_layers=1))
    if kind == "file":
        folder.write_text("")
    options = {**OPTIONS, "host": "disk", "host_dir": str(folder)}
    reason = {"missing": "No such file or directory", "file": "Not a directory"}[kind]
    message = rf"can't keep a file under '{folder}': {reason}\. Give host_dir="
    with pytest.raises(specache_fx.ConfigError, match=message):
        specache_fx.compile(model, **options)
    compiled = torch.compile(model, backend="specache", options=options)
    with pytest.raises(BackendCompilerFailed, match=message) as raised:
        generate(compiled, _prompt(model), 4)
    assert isinstance(raised.value.inner_exception, specache_fx.ConfigError)
    folder.unlink(missing_ok=True)
    folder.mkdir()
    assert generate(compiled, _prompt(model), 4).tokens.shape == (2, 4)
    assert list(folder.iterdir()) == []


def test_host_dir_is_no_matter_where_nothing_is_offloaded(tmp_path: Path) -> None:
    options = {**OPTIONS, "policy": "kivi", "host": "disk", "host_dir": str(tmp_path / "missing")}
    model = TinyDecoder(TinyConfig(num_layers=1))
    assert generate(specache_fx.compile(model, **options), _prompt(model), 4).tokens.shape == (2, 4)


def test_host_dir_that_goes_away_is_named_and_the_model_stays_usable(tmp_path: Path) -> None:
    folder, model = tmp_path / "kv", TinyDecoder(TinyConfig(num_layers=1))
    folder.mkdir()
    specache_fx.compile(model, **OPTIONS, host="disk", host_dir=folder)
    generate(model, _prompt(model), 4)
    folder.rmdir()
    with pytest.raises(specache_fx.HostMemoryError, match="kv"):
        generate(model, _prompt(model), 4)
    folder.mkdir()
    assert generate(model, _prompt(model), 4).tokens.shape == (2, 4)
    assert list(folder.iterdir()) == []


_DISK_FULL = """
    import resource, torch
    from support.models import TinyConfig, TinyDecoder, generate
    import specache_fx
    model = TinyDecoder(TinyConfig(max_positions=8192))
    plain = generate(model, torch.arange(40)[None] % 61, 4)
    options = {"bits": 16, "group_size": 8, "residual_length": 8, "top_k": 4, "lowering": "eager", "host": "disk"}
    compiled = torch.compile(model, backend="specache", options=options)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        generate(compiled, torch.arange(4000)[None] % 61, 4)
    except specache_fx.HostMemoryError as error:
        print("refused:", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    again = generate(compiled, torch.arange(40)[None] % 61, 4)
    print("usable:", torch.equal(again.tokens, plain.tokens))
"""


@pytest.mark.nightly  # `test_host_cache.py` has full disks by day
def test_disk_full_in_prefill_names_the_bytes_and_the_model_stays_usable() -> None:
    said = python("-c", textwrap.dedent(_DISK_FULL))
    assert "usable: True" in said
    refused = next(line for line in said.splitlines() if line.startswith("refused:"))
    assert "bytes" in refused and "host" in refused


@pytest.fixture
def few_file_bytes() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_full_in_decode_loses_no_token(few_file_bytes: Callable[[int], None]) -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    ids = _prompt(model, 60)  # the host's first block has room for 64 tokens
    plain = generate(model, ids, 40)
    compiled = torch.compile(model, backend="specache", options={**OPTIONS, "bits": 16, "host": "disk"})
    ours = generate(compiled, ids, 4)
    session = session_of(ours.past)
    mask, past, token = ours.attention_mask, ours.past, ours.tokens[:, -1:]
    few_file_bytes(session.host_bytes)
    tokens, failures = [], 0
    for _ in range(36):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        try:
            with torch.no_grad():
                logits, past = compiled(token, past=past, attention_mask=mask)
        except specache_fx.HostMemoryError:
            failures += 1
            few_file_bytes(1 << 30)  # the user makes room, and the same call goes through
            with torch.no_grad():
                logits, past = compiled(token, past=past, attention_mask=mask)
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
    assert torch.equal(torch.cat(tokens, dim=1), plain.tokens[:, 4:])
    assert failures


def test_more_than_there_is_room_for_is_said_by_name(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    ids = torch.ones(1, 12, dtype=torch.long)
    with torch.no_grad():
        with caplog.at_level("WARNING", logger="specache_fx"):
            specache_fx.compile(build("plain"), **TWO_LANES | {"top_k": 200_000})(ids, use_cache=True)
        assert "top_k=200000 keeps room for" in caplog.text
        torch._dynamo.reset()
        decoder = specache_fx.compile(build("plain"), **SMALL | {"reserve": 10**14, "policy": "kivi"})
        with pytest.raises(HostMemoryError, match="ask for less by reserve="):
            decoder(ids, use_cache=True)
