"""Decode steps: latency at a long context, throughput by batch, CUDA graphs."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.caches import METHODS, ROOM, make_cache
from benchmarks.gpu.decoder import Decoder, time_steps
from benchmarks.gpu.model import generated
from benchmarks.gpu.run import Run
from benchmarks.gpu.shapes import SHAPES, ModelShape


def latency(run: Run, found: dict[str, Any]) -> None:
    """Milliseconds of a step at batch 1 and 64k tokens, by method; steps in which a group fills apart."""
    shape, tokens = _shape(run, 32), 200 if run.quick else 65536
    found |= {"model": shape.name, "layers": shape.num_layers, "batch": 1, "context": tokens}
    decoder = Decoder(shape, run.device, run.dtype)
    for method in METHODS:
        _attempt(run, found, decoder, method, 1, tokens)


def graphs(run: Run, found: dict[str, Any]) -> None:
    """A step captured in a CUDA graph, and not."""
    shape, tokens = _shape(run, 32), 200 if run.quick else 8192
    found |= {"model": shape.name, "layers": shape.num_layers, "batch": 1, "context": tokens}
    for on in (False, True):
        entry: dict[str, Any] = {}
        found["on" if on else "off"] = entry
        options = {"bits": 2, "replay": on}
        run.attempt(entry, lambda options=options, entry=entry: generated(run, shape, options, tokens, entry))  # type: ignore[misc]


def batches(run: Run, found: dict[str, Any]) -> None:
    """Tokens a second by batch and context; and what prefetching costs (the paper's Table 4)."""
    shape = _shape(run, 8)
    found |= {"model": shape.name, "layers": shape.num_layers}
    decoder = Decoder(shape, run.device, run.dtype)
    for tokens in (100, 200) if run.quick else (8192, 32768):
        for batch in (1, 2) if run.quick else (1, 4, 8):
            row: dict[str, Any] = {}
            found[f"{tokens} x {batch}"] = row
            for method in ("full", "kivi-2", "specache-2"):
                _attempt(run, row, decoder, method, batch, tokens)
            _attempt(run, row, decoder, "specache-2", batch, tokens, synchronous=True)


def _shape(run: Run, layers: int) -> ModelShape:
    return SHAPES["tiny" if run.quick else "llama-3.1-8b"].cut(layers)


def _attempt(
    run: Run,
    found: dict[str, Any],
    decoder: Decoder,
    method: str,
    batch: int,
    tokens: int,
    synchronous: bool = False,
) -> None:
    entry: dict[str, Any] = {}
    found[f"{method}, synchronous" if synchronous else method] = entry
    run.attempt(entry, lambda: _measure(run, decoder, method, batch, tokens, entry, synchronous))


def _measure(
    run: Run,
    decoder: Decoder,
    method: str,
    batch: int,
    tokens: int,
    entry: dict[str, Any],
    synchronous: bool = False,
) -> None:
    """Fill a cache, decode, and write down the milliseconds, the bytes and the rate."""
    cache = make_cache(method, decoder.shape, batch, tokens, run.device, run.dtype, synchronous)
    try:
        run.free()
        run.reset_peak()
        # A group fills once in 64 steps.
        warm_up, steps = (1, 2) if run.quick else (6, 72)
        found = time_steps(decoder, cache, batch, warm_up, steps)
        entry |= {name: round(value, 3) for name, value in found.items()}
        entry |= {"batch": batch, "tokens_per_s": round(1000 * batch / found["ms_median"], 2)}
        entry |= {"peak_bytes": run.peak(), "reserved_bytes": run.reserved()}
        session = getattr(cache, "session", None)
        if session is not None:
            entry |= {"device_bytes": session.device_bytes, "host_bytes": session.host_bytes}
            if session.transfer is not None:
                session.settle()
                entry["prefetched_bytes_per_step"] = session.transfer.metrics.fetched_bytes // (
                    warm_up + steps
                )
        else:
            entry["device_bytes"] = decoder.shape.kv_bytes(tokens + ROOM, run.dtype.itemsize) * batch
    finally:
        cache.close()
