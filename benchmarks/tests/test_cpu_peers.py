"""OpenVINO and llama.cpp beside us: the same weights give the same tokens, and a missing environment is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from specache_bench.cpu_worker import repeated
from specache_bench.decode import Decoder
from specache_bench.methods import CpuPeer
from specache_bench.speed import DecodeSteps, ModelSize, speed_methods
from specache_bench.workers import CPU_PEERS, WorkerError
from specache_fx.errors import ConfigError

SIZE = ModelSize(layers=2, hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=32, vocab=64)
CPU = torch.device("cpu")


def _is_missing() -> bool:
    try:
        CPU_PEERS.python()
    except ConfigError:
        return True
    return False


with_peers = pytest.mark.skipif(_is_missing(), reason="`make peers-cpu` was not run")


def tokens_of(decoder: Decoder, count: int) -> list[list[int]]:
    tokens = []
    decoder.step(torch.full((2, 1), 7))
    for _ in range(count):
        assert decoder.logits is not None
        tokens.append(decoder.logits.argmax(-1).tolist())
        decoder.greedy()
    return tokens


def check(
    kind: str, kv: str, folder: Path, model: Any, cache: DynamicCache, kv_len: int, dtype: str = "float32"
) -> None:
    """The peer says the tokens of transformers."""
    model.save_pretrained(folder)
    peer = CpuPeer(kind, {"kv": kv}).start(folder, dtype, batch=2, kv_len=kv_len, room=20)
    try:
        assert peer.ask({"steps": 12})["tokens"] == tokens_of(Decoder(model, cache), 12)
    finally:
        peer.close()


@with_peers
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "kv", "dtype"),
    [
        ("openvino", "u8", "float32"),
        ("openvino", "u8", "bfloat16"),
        ("llama.cpp", "f16", "float32"),
        ("llama.cpp", "f16", "bfloat16"),
        ("llama.cpp", "q8_0", "float32"),
    ],
)
def test_peer_decodes_the_tokens_of_transformers(kind: str, kv: str, dtype: str, tmp_path: Path) -> None:
    check(kind, kv, tmp_path, SIZE.build(getattr(torch, dtype), CPU), DynamicCache(), 0, dtype)


@with_peers
@pytest.mark.nightly
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_llama_cpp_holds_its_prompt_again_and_again(kv: str, tmp_path: Path) -> None:
    model = SIZE.build(torch.float32, CPU)
    prompt = torch.from_numpy(np.random.default_rng(0).integers(0, SIZE.vocab, 64))
    cache = DynamicCache()
    model(input_ids=prompt.expand(2, -1), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.repeat(1, 1, 3, 1)[:, :, :150]
        layer.values = layer.values.repeat(1, 1, 3, 1)[:, :, :150]
    check("llama.cpp", kv, tmp_path, model, cache, 150)


def test_state_of_llama_cpp_is_repeated_by_token_and_by_channel() -> None:
    def state(kv_len: int, keys: bytes, values: bytes, by_channel: bool = True) -> bytes:
        cells = b"".join(struct.pack("=iIi", i, 1, 0) for i in range(kv_len))
        head = struct.pack("=IIII", 5, 6, 2, kv_len) + cells + struct.pack("=II", by_channel, 1)
        of_values = struct.pack("=iII", 1, 1, 2) if by_channel else struct.pack("=iQ", 1, 2)
        return head + struct.pack("=iQ", 1, 2) + keys + of_values + values + struct.pack("=I", 0)

    assert repeated(state(2, b"aabb", b"xXyY", False), 3) == state(3, b"aabbaa", b"xXyYxX", False)
    assert repeated(state(2, b"aabb", b"xyXY"), 3) == state(3, b"aabbaa", b"xyxXYX")
    with pytest.raises(RuntimeError, match="longer than is known"):
        repeated(state(2, b"aabb", b"xyXY") + b"more", 3)


@with_peers
@pytest.mark.nightly
def test_openvino_reads_its_context_in_u4(tmp_path: Path) -> None:
    model = SIZE.build(torch.float32, CPU)
    words = torch.from_numpy(np.random.default_rng(0).integers(0, SIZE.vocab, (2, 600)))
    cache = DynamicCache()
    model(input_ids=words, past_key_values=cache, use_cache=True)
    check("openvino", "u4", tmp_path, model, cache, 600)


@with_peers
@pytest.mark.nightly
def test_peers_take_their_turns_beside_us() -> None:
    more = ["openvino,kv=u4", "llama.cpp,kv=q8_0"]
    made = speed_methods([2], more, peers=True)
    chosen = {name: method for name, method in made.items() if "KV" in name or name == "specache 2-bit"}
    found = DecodeSteps(SIZE, 2, 200, "float32", 2, 3).run(chosen, CPU)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == list(chosen) and set(found["peers"]) == {name for name in chosen if "KV" in name}
    assert all(row["calls"] == 6 and row["median_ms"] > 0 for row in rows.values())
    pairs = 2 * 2 * 200 * SIZE.layers * SIZE.num_kv_heads * SIZE.head_dim  # keys and values of both sequences
    assert rows["llama.cpp, f16 KV"]["device_bytes"] == 2 * pairs
    assert rows["llama.cpp, q8_0 KV"]["device_bytes"] == 1.0625 * pairs
    assert rows["OpenVINO, u4 KV"]["device_bytes"] < pairs
    assert pairs < rows["OpenVINO, u8 KV"]["device_bytes"] < 2 * pairs


def test_missing_environment_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECACHE_PEERS_CPU", "/nowhere")
    with pytest.raises(ConfigError, match=r"--peers.*/nowhere is no file\. Make it with `make peers-cpu`"):
        CPU_PEERS.python()


def test_worker_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no Python here >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("SPECACHE_PEERS_CPU", str(python))
    with pytest.raises(WorkerError, match=r"ended \(no Python here\)\. `make peers-cpu` makes"):
        CpuPeer("openvino", {}).start(tmp_path, "float32", 1, 8, 8)
