"""Whole decode steps of a model with random weights: this backend beside transformers' own caches."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache

from specache_fx.api import stats
from specache_fx.bench.cpu_peers import CpuPeer
from specache_fx.bench.overlap import hidden_share, operator_calls, parts_of, record_steps
from specache_fx.bench.timing import Turn, memory_bandwidth, seconds_of, take_turns
from specache_fx.chrome_trace import write_trace
from specache_fx.config import SpecacheConfig

_WARM_UP_STEPS = 4
_UNKNOWN = dict.fromkeys(("host_bytes", "moved_bytes_per_step", "copy_ms", "hidden_share"))


@dataclass(frozen=True)
class ModelSize:
    """A Llama with random weights.

    Attributes:
        layers: Decoder layers.
        hidden: Hidden size.
        intermediate: Of the MLP.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Channels.
        vocab: Words.
        int8: Weights of its linear layers are in int8, by torchao.
    """

    layers: int = 4
    hidden: int = 1024
    intermediate: int = 2816
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 4096
    int8: bool = False

    def build(self, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
        """The model, the same weights each time."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=1 << 20,
        )
        with torch.device(device):
            model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
        if self.int8:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig())
        return model


class Decoder:
    """One method at work: a model, its cache, and the token that comes next.

    Args:
        model: Compiled or not.
        cache: Holds the context.
        batch: Sequences.
    """

    def __init__(self, model: LlamaForCausalLM, cache: Cache, batch: int) -> None:
        self.model, self.cache = model, cache
        self.token = torch.full((batch, 1), 7, device=model.device)

    def step(self) -> None:
        """Decode one token, greedily."""
        out = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        self.token = out.logits[:, -1:].argmax(-1)


class Method(NamedTuple):
    """A way of decoding.

    Attributes:
        kind: "eager" or "compiled", both of transformers' own cache; "quantized", of its `QuantizedCache`; "specache".
        options: Of a `QuantizedCache` or of `SpecacheConfig`.
    """

    kind: str
    options: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As reports have it."""
        return {"kind": self.kind, **self.options}


def methods(widths: Sequence[int], lowering: str = "inductor") -> dict[str, Method]:
    """What can be run here, by name."""
    known = {"transformers": Method("eager", {}), "transformers, compiled": Method("compiled", {})}
    if find_spec("optimum") and find_spec("optimum.quanto"):
        known["QuantizedCache 2-bit"] = Method("quantized", {"nbits": 2})
    own: dict[str, dict[str, Any]] = {
        "kivi 2-bit": {"policy": "kivi", "bits": 2},
        "kcache": {"policy": "kcache", "top_k": 128, "resident_layers": 1},
        **{f"specache {bits}-bit": {"bits": bits} for bits in widths},
    }
    return known | {
        name: Method("specache", {**options, "lowering": lowering}) for name, options in own.items()
    }


def context(size: ModelSize, batch: int, kv_len: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Random keys and values of each layer: a prompt that nobody had to read."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (batch, size.num_kv_heads, kv_len, size.head_dim)
    return [
        tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        for _ in range(size.layers)
    ]


def open_decoder(model: LlamaForCausalLM, method: Method, pairs: list[Any]) -> Decoder:
    """A method with its own copy of the context, before its first step."""
    kind, options = method
    model = copy.copy(model)  # the weights are shared, what is compiled is not
    if kind == "specache":
        model.compile(backend="specache", options=options)
    elif kind == "compiled":
        model.compile()
    cache: Cache = DynamicCache()
    if kind == "quantized":
        cache = QuantizedCache("quanto", model.config, **options)
    for layer, (key, value) in enumerate(pairs):
        cache.update(key.clone(), value.clone(), layer)
    return Decoder(model, cache, pairs[0][0].shape[0])


def cache_bytes(decoder: Decoder, method: Method) -> dict[str, Any]:
    """What the cache takes and moved; None where a method has no such thing."""
    if method.kind != "specache":
        return {"device_bytes": sum(map(_layer_bytes, decoder.cache.layers)), **_UNKNOWN}
    seen = stats(decoder.cache)
    return {
        "device_bytes": seen.device_bytes,
        "host_bytes": seen.host_bytes,
        "moved_bytes_per_step": seen.prefetched_bytes / max(seen.steps, 1),
        "copy_ms": 1e3 * seen.prefetch_seconds / max(seen.steps, 1),
        "hidden_share": seen.hidden_share,
    }


def _layer_bytes(layer: Any) -> int:
    """Bytes of a layer of a transformers cache."""
    return sum(tensor_bytes(value) for value in vars(layer).values() if isinstance(value, torch.Tensor))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of one that is made of others (quantised ones are), theirs."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(tensor_bytes(getattr(tensor, name)) for name in names)


@torch.inference_mode()
def bench_decode(
    size: ModelSize,
    batch: int,
    kv_len: int,
    chosen: dict[str, Method],
    dtype: torch.dtype,
    rounds: int,
    steps: int,
    device: torch.device,
    on_method: Callable[[str], object] = lambda name: None,
    trace: Path | None = None,
    peers: Sequence[str] = (),
) -> dict[str, Any]:
    """Time decode steps of all methods in turn, on the same weights and the same context.

    Args:
        size: The model.
        batch: Sequences.
        kv_len: Tokens of context before the first step.
        chosen: From `methods`.
        dtype: Of weights and cache.
        rounds: Turns of each method.
        steps: Steps of each in a turn.
        device: Where.
        on_method: Told what is compiled, and of every round.
        trace: Where to write some steps of the first SpeCache method that is chosen, see `specache_fx.trace`.
        peers: Names in `cpu_peers.PEERS`.

    Returns:
        `{"size", "batch", "kv_len", "dtype", "bandwidth_gb_s", "weight_bytes", "peers", "rows"}`. `peers` are their
        versions. A row has `name`, `compile_s` (what its first steps took beyond the others; of a peer its start, with
        the context), times of a step in ms, `tokens_per_s`, `floor_ms`
        (weights and cache at the memory's bandwidth), `device_bytes`, `host_bytes`, `moved_bytes_per_step`,
        `copy_ms` (of copies in a step), `hidden_share` (of copy time, the share that overlapped compute, as counted in
        all steps), `hidden_in_trace` (the same, read off the trace of some steps), `operator_calls` a step, and
        `parts_ms` (see `parts_of`). A peer leaves the last seven None.

    Raises:
        ConfigError: If options contradict each other, or the peers' environment is missing.
        WorkerError: If a peer fails.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    torch.compiler.reset()  # graphs of another batch or model would count against the limits of compiling
    model = size.build(dtype, device)
    pairs = context(size, batch, kv_len, dtype, device)
    decoders, compile_s = {}, {}
    for name, method in chosen.items():
        on_method(name)
        decoders[name] = open_decoder(model, method, pairs)
        start = time.perf_counter()
        for _ in range(_WARM_UP_STEPS):
            decoders[name].step()
        compile_s[name] = time.perf_counter() - start
    del pairs
    bandwidth = memory_bandwidth(device)
    turns: dict[str, Turn] = {
        name: partial(seconds_of, decoder.step, device) for name, decoder in decoders.items()
    }
    with contextlib.ExitStack() as stack:
        others: dict[str, CpuPeer] = {}
        if peers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model.save_pretrained(folder)
        for name in peers:
            on_method(name)
            start = time.perf_counter()
            room = _WARM_UP_STEPS + rounds * steps
            others[name] = CpuPeer(name, folder, dtype_name, batch, kv_len, room, torch.get_num_threads())
            stack.callback(others[name].close)
            others[name].steps(_WARM_UP_STEPS)
            compile_s[name] = time.perf_counter() - start
            turns[name] = others[name].steps
        timings = take_turns(turns, rounds, steps, on_round=lambda: on_method("measuring"))
    weights = sum(map(tensor_bytes, model.parameters())) - model.get_input_embeddings().weight.nbytes
    rows = []
    for name, timing in timings.items():
        if name in others:
            taken, spans, calls = {"device_bytes": others[name].device_bytes, **_UNKNOWN}, [], None
        else:
            method, step = chosen[name], decoders[name].step
            taken = cache_bytes(decoders[name], method)
            spans = record_steps(step) if method.kind == "specache" else []
            calls = operator_calls(step)
            if trace is not None and method.options.get("policy", "specache") == "specache" and spans:
                write_trace(trace, spans)
                trace = None
        rows.append(
            {
                "name": name,
                "compile_s": max(0.0, compile_s[name] - _WARM_UP_STEPS * timing.median_ms / 1e3),
                **asdict(timing),
                "tokens_per_s": 1e3 * batch / timing.median_ms,
                "floor_ms": 1e3 * (weights + taken["device_bytes"]) / bandwidth,
                **taken,
                "hidden_in_trace": hidden_share(spans),
                "operator_calls": calls,
                "parts_ms": parts_of(spans),
            }
        )
    return {
        "size": asdict(size),
        "batch": batch,
        "kv_len": kv_len,
        "dtype": dtype_name,
        "bandwidth_gb_s": bandwidth / 1e9,
        "weight_bytes": weights,
        "peers": {name: peer.started["versions"] for name, peer in others.items()},
        "rows": rows,
    }


def check_options(chosen: dict[str, Method]) -> None:
    """Refuse bad options before anything is built.

    Raises:
        ConfigError: As `SpecacheConfig`.
    """
    for method in chosen.values():
        if method.kind == "specache":
            SpecacheConfig.from_options(method.options)
