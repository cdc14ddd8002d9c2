"""One layer's decode attention, alone: this backend's kernels beside PyTorch's own attention on the 16-bit cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from specache_fx.bench.timing import memory_bandwidth, time_in_turn
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.kernels import DecodeInputs, choose_kernel
from specache_fx.runtime.quant import make_quantizer


@dataclass(frozen=True)
class AttentionShape:
    """One layer.

    Attributes:
        batch: Sequences.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Channels.
        kv_len: Tokens in the cache.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_len: int


def decode_inputs(
    shape: AttentionShape,
    bits: int,
    quantizer_name: str,
    lanes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """What a kernel gets for a cache of random numbers, and the bytes that it has to read.

    Returns:
        The `DecodeInputs`, and the bytes of codes, scales, window and staged pairs.
    """
    config = SpecacheConfig(bits=bits, quantizer=quantizer_name)
    quantizer, quantized = make_quantizer(config), config.num_quantized(shape.kv_len)
    generator = torch.Generator(device=device).manual_seed(0)

    def random(heads: int, tokens: int, *front: int) -> torch.Tensor:
        size = (*front, shape.batch, heads, tokens, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    key, value = random(shape.num_kv_heads, shape.kv_len), random(shape.num_kv_heads, shape.kv_len)
    planes = quantizer.quantize_key(key[:, :, :quantized]), quantizer.quantize_value(value[:, :, :quantized])
    heads = (shape.batch, shape.num_kv_heads)
    chosen = (
        torch.rand(*heads, quantized, generator=generator, device=device)
        .topk(min(config.top_k, quantized))
        .indices
    )
    rows = torch.cat([key, value], dim=3).gather(2, chosen[..., None].expand(-1, -1, -1, 2 * shape.head_dim))
    inputs = DecodeInputs(
        query=random(shape.num_heads, 1, lanes),
        key=random(shape.num_kv_heads, 1, lanes),
        value=random(shape.num_kv_heads, 1, lanes),
        quantizer=quantizer,
        key_planes=planes[0],
        value_planes=planes[1],
        num_quantized=quantized,
        window_rows=(key[:, :, quantized:].contiguous(), value[:, :, quantized:].contiguous()),
        window_len=shape.kv_len - quantized,
        staged_rows=rows,
        staged_indices=chosen.to(torch.int32),
        key_mask=None,
        scale=shape.head_dim**-0.5,
        independent_lanes=False,
        scored_lanes=1,
    )
    read = [*planes[0], *planes[1], inputs.window_key, inputs.window_value, rows]
    return inputs, sum(tensor.nbytes for tensor in read)


def peers(shape: AttentionShape, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """PyTorch's attention over the whole cache, one query a head: a call, and the bytes that it has to read."""
    made: dict[str, tuple[Callable[[], object], int]] = {}
    groups = shape.num_heads // shape.num_kv_heads
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        query = torch.randn(shape.batch, shape.num_heads, 1, shape.head_dim, device=device).to(dtype)
        size = (shape.batch, shape.num_kv_heads, shape.kv_len, shape.head_dim)
        key, value = (torch.randn(size, device=device).to(dtype) for _ in range(2))

        def sdpa(q: torch.Tensor = query, k: torch.Tensor = key, v: torch.Tensor = value) -> object:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1)

        def grouped(q: torch.Tensor = query, k: torch.Tensor = key, v: torch.Tensor = value) -> object:
            q = q.view(shape.batch, shape.num_kv_heads, groups, shape.head_dim)
            weights = (q @ k.transpose(2, 3) * shape.head_dim**-0.5).softmax(-1)
            return weights @ v

        nbytes = key.nbytes + value.nbytes
        made[f"sdpa {name}"] = sdpa, nbytes
        made[f"grouped matmul {name}"] = grouped, nbytes
    return made


@torch.inference_mode()
def bench_attention(
    shape: AttentionShape,
    widths: Sequence[int],
    quantizers: Sequence[str],
    lanes: int,
    dtype: torch.dtype,
    kernel: str,
    rounds: int,
    device: torch.device,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Time all of them in turn.

    Args:
        shape: The layer.
        widths: Values of `bits`.
        quantizers: Names, see `SpecacheConfig`; the first one's rows don't say it.
        lanes: Queries a head that our kernel answers at once: 2 in SpeCache. The peers answer one.
        dtype: The model's.
        kernel: As in `SpecacheConfig`.
        rounds: Calls of each.
        device: Where.
        on_round: Called after each round.

    Returns:
        `{"shape", "lanes", "dtype", "kernel", "bandwidth_gb_s", "rows"}`; a row has `name`, `bytes` (that have to be
        read), `floor_ms` (at that bandwidth), `median_ms`, `p10_ms`, `p90_ms` and `calls`.
    """
    chosen = choose_kernel(kernel, device)
    made = peers(shape, device)
    for quantizer in quantizers:
        for bits in widths:
            inputs, nbytes = decode_inputs(shape, bits, quantizer, lanes, dtype, device)
            name = f"specache {bits}-bit" + (f", {quantizer}" if quantizer != quantizers[0] else "")
            made[name] = partial(chosen.attention, inputs), nbytes
    functions = {name: function for name, (function, _) in made.items()}
    time_in_turn(functions, 2, device)  # builds, allocations
    bandwidth = memory_bandwidth(device)
    timings = time_in_turn(functions, rounds, device, on_round=on_round)
    rows = [
        {"name": name, "bytes": nbytes, "floor_ms": 1e3 * nbytes / bandwidth, **asdict(timings[name])}
        for name, (_, nbytes) in made.items()
    ]
    return {
        "shape": asdict(shape),
        "lanes": lanes,
        "quantizers": list(quantizers),
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": chosen.name,
        "bandwidth_gb_s": bandwidth / 1e9,
        "rows": rows,
    }
