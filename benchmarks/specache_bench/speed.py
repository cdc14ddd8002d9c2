"""Speed: whole decode steps of a model with random weights, and one layer's attention, of all methods in turn.

Weights and caches are random: a step's cost does not depend on the numbers. Random keys want hardly a staged row twice,
so that transfers are the largest there can be.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import specache_fx
from specache_bench import timing
from specache_bench.decode import Decoder
from specache_bench.methods import OURS, CacheMethod, CpuPeer, make_method, plain_tensors
from specache_bench.records import Method, check_options, read_spelling
from specache_bench.timing import Timing, Turn, busy_processes, memory_bandwidth, seconds_of, take_turns
from specache_bench.workers import CPU_PEERS
from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.report.chrome_trace import write_trace
from specache_fx.runtime.kernels import DecodeInputs, choose_kernel
from specache_fx.runtime.kernels.reference import ReferenceKernel
from specache_fx.runtime.quant import make_quantizer

WARM_UP_STEPS = 4
PEERS = (Method.of("openvino"), Method.of("llama.cpp"))
_LANES = 2  # queries a head: the output token and the speculative one
_OURS_ALONE = ("host_bytes", "moved_bytes_per_step", "copy_ms", "hidden_share", "parts_ms")


@dataclass(frozen=True)
class _Heads:
    """A size with heads is spelled by its numbers, and checked."""

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if type(number) is int and number < 1:
                raise ConfigError(f"{name}={number}: give a whole number >= 1.")
        heads, kv_heads = (getattr(self, name) for name in ("num_heads", "num_kv_heads"))
        if heads % kv_heads:
            raise ConfigError(f"num_heads={heads} is no multiple of num_kv_heads={kv_heads}.")

    def having(self, options: Mapping[str, Any]) -> Any:
        """With other numbers; a `ConfigError` if one is none of its own, or no number."""
        check_options("The shape", options, asdict(self))
        return replace(self, **options)


@dataclass(frozen=True)
class ModelSize(_Heads):
    """A Llama with random weights; `int8` has the weights of its linear layers in int8, by torchao."""

    layers: int = 4
    hidden: int = 1024
    intermediate: int = 2816
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 4096
    int8: bool = False

    @staticmethod
    def read(text: str) -> ModelSize:
        """From "smollm2" or "small,layers=2,int8=True": one of `SIZES`, with other numbers."""
        name, options = read_spelling(text)
        if name not in SIZES:
            raise ConfigError(f"There is no size {name!r}: choose one of {', '.join(SIZES)}.")
        made: ModelSize = SIZES[name].having(options)
        return made

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
        before = torch.get_default_dtype()
        if device.type == "cuda":  # a large one has no room for float32
            torch.set_default_dtype(dtype)
        try:
            with device:
                model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(before)
        if self.int8:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig())
        return model


SIZES = {
    "small": ModelSize(),
    "smollm2": ModelSize(30, 576, 1536, 9, 3, 64, 49152),
    "1b": ModelSize(16, 2048, 8192, 32, 8, 64, 32000),
    "8b": ModelSize(32, 4096, 14336, 32, 8, 128, 128256),
}


def speed_methods(
    widths: Sequence[int], more: Sequence[str] = (), peers: bool = False, lowering: str = "inductor"
) -> dict[str, Method]:
    """The methods that are timed, by the names of the tables.

    Args:
        widths: Of SpeCache.
        more: Methods as a command line spells them.
        peers: Whether OpenVINO and llama.cpp are, each in its own default format.
        lowering: Of our methods, where `more` doesn't say otherwise.
    """
    known = {"transformers": Method.of("full"), "transformers, compiled": Method.of("compiled")}
    if find_spec("optimum") and find_spec("optimum.quanto"):
        known["QuantizedCache 2-bit"] = Method.of("quantized", backend="quanto", bits=2)
    known["kivi 2-bit"] = Method.of("kivi", bits=2, residual_length=64, lowering=lowering)
    known["kcache"] = Method.of("kcache", top_k=128, resident_layers=1, lowering=lowering)
    for bits in widths:
        known[f"specache {bits}-bit"] = Method.of("specache", bits=bits, lowering=lowering)
        known[f"specache {bits}-bit, token"] = Method.of(
            "specache", bits=bits, lowering=lowering, lookahead="token"
        )
    for method in (*(PEERS if peers else ()), *map(Method.read, more)):
        make_method(method)
        kv = CpuPeer.formats.get(method.name)
        title = {"openvino": "OpenVINO"}.get(method.name, method.name)
        name = f"{title}, {dict(method.options).get('kv', kv[0])} KV" if kv else str(method)
        own = {"lowering": lowering} if method.name in OURS else {}
        known[name] = Method.of(method.name, **{**own, **dict(method.options)})
    return known


def check_methods(methods: Mapping[str, Method], device: torch.device, dtype: str, size: ModelSize) -> None:
    """Say before the work what can't be timed, as a `ConfigError`: int8 without torchao, peers where they don't run."""
    if size.int8 and find_spec("torchao") is None:
        raise ConfigError("int8=True needs torchao. Install it with `pip install torchao`.")
    if not any(method.name in CpuPeer.formats for method in methods.values()):
        return
    if device.type != "cpu":
        raise ConfigError(f"Peers run on the CPU, and --device is {device.type}: leave one of them out.")
    if dtype == "float16":
        raise ConfigError("Peers run in float32 or bfloat16, and --dtype is float16.")
    if size.int8:
        raise ConfigError("int8=True has no peers: their weights would be others. Leave one of them out.")
    CPU_PEERS.python()


@dataclass(frozen=True)
class DecodeSteps:
    """Decode steps of a model behind a random context of `kv_len` tokens; `rounds` turns of `steps` for each method.

    Results by method: `compile_s` (the first steps' time beyond the others'; of a peer its start, with the context),
    `median_ms`, `p10_ms`, `p90_ms`, `calls`, `tokens_per_s`, `floor_ms` (weights and cache at the memory's bandwidth),
    `device_bytes`, and of our own methods `host_bytes`, `moved_bytes_per_step`, `copy_ms` (of copies in a step),
    `hidden_share` (of copy time, the share that overlapped compute), `parts_ms` (see `parts_of`). `busy` has the times
    beside other processes that compute all the time, by their number.
    """

    size: ModelSize = field(default_factory=ModelSize)
    batch: int = 1
    kv_len: int = 4096
    dtype: str = "float32"
    rounds: int = 8
    steps: int = 8
    busy: tuple[int, ...] = ()

    @torch.inference_mode()
    def run(
        self,
        methods: Mapping[str, Method],
        device: torch.device,
        on_method: Callable[[str], object] = lambda name: None,
        trace: Path | None = None,
    ) -> dict[str, Any]:
        """Time all methods on the same weights and the same context, in turn; on a GPU one after another.

        Args:
            methods: By name.
            device: Where.
            on_method: Told what is compiled, and of every round.
            trace: Where to write some steps of the first SpeCache method, see `specache_fx.trace`.

        Returns:
            `{"size", "batch", "kv_len", "dtype", "bandwidth_gb_s", "weight_bytes", "peers", "rows"}`; `peers` are
            their versions.
        """
        torch.compiler.reset()  # graphs of another batch or model would count against the limits of compiling
        model = self.size.build(getattr(torch, self.dtype), device)
        weights = sum(x.nbytes for x in plain_tensors(list(model.parameters())))
        weights -= model.get_input_embeddings().weight.nbytes
        bandwidth = memory_bandwidth(device)
        alone = device.type == "cuda"
        rows, versions = [], {}
        for group in [{name: methods[name]} for name in methods] if alone else [dict(methods)]:
            with self.opened(group, model, on_method) as opened:
                turns = {name: one.turn for name, one in opened.items()}
                timings = take_turns(turns, self.rounds, self.steps, lambda: on_method("measuring"))
                beside = {}
                for count in self.busy:
                    with busy_processes(count):
                        on_round = partial(on_method, f"beside {count} busy processes")
                        beside[count] = take_turns(turns, self.rounds, self.steps, on_round)
                for name, one in opened.items():
                    row = one.row(timings[name], None if trace is None or trace.exists() else trace)
                    row["busy"] = {count: asdict(times[name]) for count, times in beside.items()}
                    row["tokens_per_s"] = 1e3 * self.batch / timings[name].median_ms
                    row["floor_ms"] = 1e3 * (weights + row["device_bytes"]) / bandwidth
                    rows.append({"name": name, **row})
                    if one.worker is not None:
                        versions[name] = one.worker.started["versions"]
        shape = {"size": asdict(self.size), "batch": self.batch, "kv_len": self.kv_len, "dtype": self.dtype}
        machine = {"bandwidth_gb_s": bandwidth / 1e9, "weight_bytes": weights, "peers": versions}
        return {**shape, **machine, "rows": rows}

    @contextlib.contextmanager
    def opened(
        self,
        methods: Mapping[str, Method],
        model: Any,
        on_method: Callable[[str], object] = lambda name: None,
    ) -> Iterator[dict[str, Opened]]:
        """Methods at work and warm, each with its own copy of the context: keys and values that nobody had to read."""
        generator = torch.Generator(device=model.device).manual_seed(0)
        shape = (self.batch, self.size.num_kv_heads, self.kv_len, self.size.head_dim)
        random = partial(torch.randn, shape, generator=generator, device=model.device)
        pairs = [(random().to(model.dtype), random().to(model.dtype)) for _ in range(self.size.layers)]
        with contextlib.ExitStack() as stack:
            found = {}
            for name, method in methods.items():
                on_method(name)
                start = time.perf_counter()
                found[name] = self._open(make_method(method), model, pairs, stack)
                found[name].turn(WARM_UP_STEPS)
                found[name].open_s = time.perf_counter() - start
            del pairs
            yield found

    def _open(self, method: CacheMethod, model: Any, pairs: Any, stack: contextlib.ExitStack) -> Opened:
        if isinstance(method, CpuPeer):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model.save_pretrained(folder)
            room = WARM_UP_STEPS + (1 + len(self.busy)) * self.rounds * self.steps
            worker = method.start(folder, self.dtype, self.batch, self.kv_len, room)
            stack.callback(worker.close)
            return Opened(method, lambda count: worker.ask({"steps": count})["seconds"], worker=worker)
        model = copy.copy(model)  # the weights are shared, what is compiled is not
        method.prepare(model)
        cache = DynamicCache()
        for layer, (key, value) in enumerate(pairs):
            cache.update(key.clone(), value.clone(), layer)
        first = torch.full((self.batch, 1), 7, device=model.device)
        decoder = Decoder(model, method.begin(model, cache), first=first)
        return Opened(method, partial(seconds_of, decoder.greedy, model.device), decoder)


@dataclass
class Opened:
    """A method at work: its turns, its decoder or its worker, and the seconds until it was warm."""

    method: CacheMethod
    turn: Turn
    decoder: Decoder | None = None
    worker: Any = None
    open_s: float = 0.0

    def row(self, timed: Timing, trace: Path | None) -> dict[str, Any]:
        """See `DecodeSteps`."""
        row: dict[str, Any] = dict.fromkeys(_OURS_ALONE)
        row |= {"compile_s": max(0.0, self.open_s - WARM_UP_STEPS * timed.median_ms / 1e3), **asdict(timed)}
        if self.decoder is None:
            return row | {"device_bytes": self.worker.started["device_bytes"]}
        cache = self.decoder.cache
        row["device_bytes"] = self.method.measure(cache).device_bytes
        if self.method.name in OURS:
            seen = specache_fx.stats(cache)
            steps = max(seen.steps, 1)
            row |= {"host_bytes": seen.host_bytes, "hidden_share": seen.hidden_share}
            row["moved_bytes_per_step"] = seen.prefetched_bytes / steps
            row["copy_ms"] = 1e3 * seen.prefetch_seconds / steps
            spans = timing.record_steps(self.decoder.greedy)
            row["parts_ms"] = timing.parts_of(spans)
            if trace is not None and self.method.name == "specache":
                write_trace(trace, spans)
        return row


@dataclass(frozen=True)
class Attention(_Heads):
    """One layer's decode attention over a random cache: our kernels beside PyTorch's own attention.

    Results by name: `bytes` (that have to be read), `floor_ms` (at the memory's bandwidth), `median_ms`, `p10_ms`,
    `p90_ms`, `calls`. Our kernel answers two queries a head at once, PyTorch's attention one.
    """

    batch: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_len: int = 32768

    def inputs(self, config: SpecacheConfig, dtype: torch.dtype, device: torch.device) -> Any:
        """A kernel's inputs for a cache of random numbers, and the bytes of codes, scales, window and staged pairs."""
        quantizer, quantized = make_quantizer(config), config.num_quantized(self.kv_len)
        generator = torch.Generator(device=device).manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, self.head_dim, generator=generator, device=device).to(dtype)

        key, value = (random(self.batch, self.num_kv_heads, self.kv_len) for _ in range(2))
        key_planes = quantizer.quantize_key(key[:, :, :quantized])
        value_planes = quantizer.quantize_value(value[:, :, :quantized])
        order = torch.rand(self.batch, self.num_kv_heads, quantized, generator=generator, device=device)
        chosen = order.topk(min(config.top_k, quantized)).indices
        where = chosen[..., None].expand(-1, -1, -1, 2 * self.head_dim)
        staged = torch.cat([key, value], dim=3).gather(2, where)
        inputs = DecodeInputs(
            query=random(_LANES, self.batch, self.num_heads, 1),
            key=random(_LANES, self.batch, self.num_kv_heads, 1),
            value=random(_LANES, self.batch, self.num_kv_heads, 1),
            quantizer=quantizer,
            key_planes=key_planes,
            value_planes=value_planes,
            num_quantized=quantized,
            window_rows=(key[:, :, quantized:].contiguous(), value[:, :, quantized:].contiguous()),
            window_len=self.kv_len - quantized,
            staged_rows=staged,
            staged_indices=chosen.to(torch.int32),
            key_mask=None,
            scale=self.head_dim**-0.5,
            independent_lanes=False,
            scored_lanes=1,
        )
        read = [*key_planes, *value_planes, inputs.window_key, inputs.window_value, staged]
        return inputs, sum(tensor.nbytes for tensor in read)

    def peers(self, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
        """PyTorch's attention over the whole cache, one query a head: a call, and the bytes that it has to read."""
        made: dict[str, tuple[Callable[[], object], int]] = {}
        groups = self.num_heads // self.num_kv_heads

        def grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            query = query.view(self.batch, self.num_kv_heads, groups, self.head_dim)
            return (query @ key.transpose(2, 3) * self.head_dim**-0.5).softmax(-1) @ value

        for dtype in (torch.float32, torch.bfloat16):
            lengths = ((self.num_heads, 1), *2 * [(self.num_kv_heads, self.kv_len)])
            sizes = ((self.batch, *heads, self.head_dim) for heads in lengths)
            query, key, value = (torch.randn(size, device=device).to(dtype) for size in sizes)
            sdpa = partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=groups > 1)
            name, nbytes = str(dtype).removeprefix("torch."), key.nbytes + value.nbytes
            made[f"sdpa {name}"] = sdpa, nbytes
            made[f"grouped matmul {name}"] = partial(grouped, query, key, value), nbytes
        return made

    @torch.inference_mode()
    def run(
        self,
        widths: Sequence[int],
        quantizers: Sequence[str],
        device: torch.device,
        dtype: str = "bfloat16",
        rounds: int = 30,
        on_round: Callable[[], object] = lambda: None,
        kernel_name: str = "auto",
    ) -> dict[str, Any]:
        """Time all of them in turn; the rows of the first quantiser don't say it.

        Returns:
            `{"shape", "lanes", "quantizers", "dtype", "kernel", "bandwidth_gb_s", "rows"}`.
        """
        kernel, made = choose_kernel(kernel_name, device), self.peers(device)
        for quantizer in quantizers:
            for bits in widths:
                config = SpecacheConfig(bits=bits, quantizer=quantizer)
                inputs, nbytes = self.inputs(config, getattr(torch, dtype), device)
                name = f"specache {bits}-bit" + (f", {quantizer}" if quantizer != quantizers[0] else "")
                made[name] = partial(kernel.attention, inputs), nbytes
        turns: dict[str, Turn] = {name: partial(seconds_of, call, device) for name, (call, _) in made.items()}
        take_turns(turns, 2, 1)  # builds, allocations
        bandwidth = memory_bandwidth(device)
        timings = take_turns(turns, rounds, 1, on_round)
        rows = [
            {"name": name, "bytes": nbytes, "floor_ms": 1e3 * nbytes / bandwidth, **asdict(timings[name])}
            for name, (_, nbytes) in made.items()
        ]
        settings = {"lanes": _LANES, "quantizers": quantizers, "dtype": dtype, "kernel": kernel.name}
        return {"shape": asdict(self), **settings, "bandwidth_gb_s": bandwidth / 1e9, "rows": rows}

    @torch.inference_mode()
    def error(self, config: SpecacheConfig, dtype: torch.dtype, device: torch.device) -> list[float]:
        """The kernel's largest errors against the reference, of outputs and scores, relative to the largest."""
        inputs, _ = self.inputs(config, dtype, device)
        found, wanted = (
            each.attention(inputs) for each in (choose_kernel(config.kernel, device), ReferenceKernel())
        )
        pairs = ((a.float(), b.float()) for a, b in zip(found, wanted, strict=True))
        return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
