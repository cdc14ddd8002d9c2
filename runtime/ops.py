"""The `specache::` operators of rewritten graphs.

Every op that touches a session takes `state`, an int64 CPU tensor that begins with the session's number (`StepTable`),
and says that it mutates it. That orders them all: no compiler may drop, reorder or duplicate one. Their results are
fresh tensors of static shape. The session keeps all that grows with the context: `staged` and `scores` are tickets,
int64 `[1]` tensors that carry the data edge and nothing else. So no decode graph knows `kv_len`.

    capture   scaled_dot_product_attention
    prefill   store, prompt_attention
    extend    load, prompt_attention, store
    decode    wait_prefetch -> quantized_attention -> append -> topk -> prefetch
              or all as one: layer_step (the CPU's kernel), device_step (`DeviceSteps`)

`products` touches no session: a few rows times weights, an overload for each number of these. On the CPU it and
`layer_step` are C++, once `runtime/native/graph_ops.py` has loaded that; `layer_step` is nothing else.

`attention` is a marker: a pass puts it where an attention was, `torch.vmap` gives it a dimension of lanes, and a later
pass replaces it. It never runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_fx.runtime.graph import prompt_masks
from specache_fx.runtime.native.products import MAX_WEIGHTS, by_blas
from specache_fx.runtime.session import decode_step, registry
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.steps.device_steps import DeviceSteps
from specache_fx.runtime.tracing import span

_SIDES = "Tensor query, Tensor key, Tensor value"
# Arguments of an attention besides scale, see `capture/program.py`.
_FORM = "float? softcap=None, Tensor? sinks=None"

# `Library.define` and `impl` cost 3 us a call where `custom_op` costs 13 to 16; a decode step makes up to five a layer.
_library = torch.library.Library("specache", "DEF")


def _define(schema: str, real: Callable[..., Any] | None, fake: Callable[..., Any]) -> None:
    name = schema.split("(", maxsplit=1)[0]
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    if real is not None:
        _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specache::{name}", fake, lib=_library)


def _ticket(*_: Any) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _nothing(*_: Any) -> None:
    return None


def _store(key: Tensor, value: Tensor, mask: Tensor | None, state: Tensor, layer: int) -> None:
    registry.by_state(state).store(layer, key, value, mask)


def _prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, verdict: Tensor, real: Tensor, state: Tensor, *rule: Any
) -> Tensor:
    masks = registry.by_state(state).prompt_masks
    assert masks is not None
    return prompt_masks.attend(masks, query, key, value, verdict, real, *rule)


def _prompt_attention_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return prompt_masks.empty_output(query, value)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's, its result laid out as the graph was traced with."""
    out = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(-3, -2).contiguous().transpose(-3, -2) if out.dim() > 3 else out.contiguous()


def _sdpa_autocast(device: str, *sides: Any) -> Tensor:
    """Autocast casts the inputs of SDPA, mask included."""
    dtype = torch.get_autocast_dtype(device.lower())

    def cast(side: Any) -> Any:
        is_float = isinstance(side, Tensor) and side.is_floating_point() and side.dtype != torch.float64
        return side.to(dtype) if is_float else side

    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return torch.ops.specache.scaled_dot_product_attention(*map(cast, sides))


def _sdpa_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    size = (*query.shape[:-1], value.shape[-1])
    if len(size) < 4:
        return query.new_empty(size)
    return query.new_empty((*size[:-3], size[-2], size[-3], size[-1])).transpose(-3, -2)


def _load(
    past_key: Tensor,
    past_value: Tensor,
    new_key: Tensor | None,
    new_value: Tensor | None,
    state: Tensor,
    layer: int,
) -> tuple[Tensor, Tensor]:
    new = None if new_key is None or new_value is None else (new_key, new_value)
    return registry.by_state(state).load(layer, new=new)


def _load_fake(
    past_key: Tensor, past_value: Tensor, new_key: Tensor | None, new_value: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    def side(past: Tensor, new: Tensor | None) -> Tensor:
        batch, num_kv_heads, kv_len, dim = past.shape
        return past.new_empty((batch, num_kv_heads, kv_len if new is None else kv_len + new.shape[2], dim))

    return side(past_key, new_key), side(past_value, new_value)


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], value_dim or value.shape[-1]))


def _marker(*_: Any) -> Tensor:
    raise AssertionError("a specache marker op was run: no pass replaced it")


def _traced(name: str, step: DecodeStep, layer: int) -> AbstractContextManager[None]:
    return span(name, device=step.session.device, layer=layer)


def _wait_prefetch(state: Tensor, layer: int) -> Tensor:
    step = decode_step.by_state(state)
    with _traced("wait for prefetch", step, layer):
        step.wait_prefetch(layer)
    return _ticket()


def _quantized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    staged: Tensor | None,
    state: Tensor,
    layer: int,
    scale: float,
    *form: Any,
) -> tuple[Tensor, Tensor]:
    step = decode_step.by_state(state)
    with _traced("attention", step, layer):
        out = step.attend(layer, query, key, value, scale, staged is not None, *form[:3])
    return out, _ticket()


def _quantized_attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    staged: Tensor | None,
    state: Tensor,
    layer: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    expansion: int | None = None,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _attention_fake(query, key, value, scale, softcap, sinks, value_dim), _ticket()


def _topk(scores: Tensor, state: Tensor, layer: int, batch: int, num_kv_heads: int, top_k: int) -> Tensor:
    step = decode_step.by_state(state)
    with _traced("select", step, layer):
        return step.select(layer)


def _topk_fake(
    scores: Tensor, state: Tensor, layer: int, batch: int, num_kv_heads: int, top_k: int
) -> Tensor:
    return scores.new_empty((batch, num_kv_heads, top_k), dtype=torch.int32)


def _prefetch(indices: Tensor, state: Tensor, layer: int) -> None:
    step = decode_step.by_state(state)
    with _traced("start prefetch", step, layer):
        step.prefetch(layer, indices)


def _append(key: Tensor, value: Tensor, state: Tensor, layer: int) -> None:
    step = decode_step.by_state(state)
    with _traced("append", step, layer):
        step.append(layer, key, value)


def _device_step(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, layer: int, scale: float, *form: Any
) -> Tensor:
    step = decode_step.by_state(state)
    steps = step.session.steps
    assert isinstance(steps, DeviceSteps)
    run = step.by_operators if steps.plain_alone and not steps.is_plain else steps.launch
    return run(layer, query, key, value, scale, *form)


def _layer_step_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _products(rows: Tensor, *weights: Tensor) -> Any:
    results = by_blas(rows, weights)
    return tuple(results) if len(results) > 1 else results[0]


def _products_fake(rows: Tensor, *weights: Tensor) -> Any:
    results = [rows.new_empty((*rows.shape[:-1], weight.shape[0])) for weight in weights]
    return tuple(results) if len(results) > 1 else results[0]


_define("store(Tensor key, Tensor value, Tensor? mask, Tensor(a!) state, int layer) -> ()", _store, _nothing)
_define(
    "load(Tensor past_key, Tensor past_value, Tensor? new_key, Tensor? new_value, Tensor(a!) state, int layer)"
    " -> (Tensor, Tensor)",
    _load,
    _load_fake,
)
_define(
    f"scaled_dot_product_attention({_SIDES}, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False,"
    " float? scale=None, bool enable_gqa=False) -> Tensor",
    _sdpa,
    _sdpa_fake,
)
SDPA = torch.ops.specache.scaled_dot_product_attention.default
for _device in ("CPU", "CUDA"):
    _library.impl(
        "scaled_dot_product_attention", functools.partial(_sdpa_autocast, _device), f"Autocast{_device}"
    )
_define(
    f"prompt_attention({_SIDES}, Tensor verdict, Tensor real, Tensor(a!) state, int number, float scale,"
    " int? window=None) -> Tensor",
    _prompt_attention,
    _prompt_attention_fake,
)
_define(f"attention({_SIDES}, float scale, {_FORM}, int? value_dim=None) -> Tensor", _marker, _attention_fake)
_define("wait_prefetch(Tensor(a!) state, int layer) -> Tensor", _wait_prefetch, _ticket)
_define(
    f"quantized_attention({_SIDES}, Tensor? staged, Tensor(a!) state, int layer, float scale, {_FORM},"
    " int? expansion=None, int? value_dim=None)"
    " -> (Tensor, Tensor)",
    _quantized_attention,
    _quantized_attention_fake,
)
_define(
    "topk(Tensor scores, Tensor(a!) state, int layer, int batch, int num_kv_heads, int top_k) -> Tensor",
    _topk,
    _topk_fake,
)
_define("prefetch(Tensor indices, Tensor(a!) state, int layer) -> ()", _prefetch, _nothing)
_define("append(Tensor key, Tensor value, Tensor(a!) state, int layer) -> ()", _append, _nothing)
for _name, _real in (("layer_step", None), ("device_step", _device_step)):
    _define(
        f"{_name}({_SIDES}, Tensor(a!) state, int layer, float scale, {_FORM}) -> Tensor",
        _real,
        _layer_step_fake,
    )
for _count in range(1, MAX_WEIGHTS + 1):
    _weights, _results = ", ".join(f"Tensor weight{i}" for i in range(_count)), ", ".join(["Tensor"] * _count)
    # An overload for each number of weights: Inductor's C++ wrapper takes no list of results.
    _define(f"products.of{_count}(Tensor rows, {_weights}) -> ({_results})", _products, _products_fake)


def _lanes(
    info: Any,
    in_dims: tuple[int | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *form: Any,
) -> tuple[Tensor, int]:
    """Batching rule: the lanes go to the front, one op for all of them. They share the sinks, which are parameters."""
    if any(dim is not None for dim in in_dims[3:]):
        raise NotImplementedError("attention sinks that differ from token to token")
    sides = []
    for side, dim in zip((query, key, value), in_dims[:3], strict=True):
        lanes = side.unsqueeze(0).expand(info.batch_size, *side.shape) if dim is None else side
        sides.append(lanes.movedim(dim, 0) if dim else lanes)
    return torch.ops.specache.attention(*sides, scale, *form), 0


torch.library.register_vmap("specache::attention", _lanes, lib=_library)
