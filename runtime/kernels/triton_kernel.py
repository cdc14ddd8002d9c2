"""The Triton kernel: split-KV attention over packed codes, one read of the codes for all lanes of a group.

Three launches: the parts (`triton_decode`), their sum (`triton_merge`), the selection scores (`triton_scores`).
"""

from __future__ import annotations

from typing import Any

import torch

from specache_fx.runtime import triton_ops
from specache_fx.runtime.kernels.base import DecodeInputs, Kernel, LayerForm, hand_over, listed
from specache_fx.runtime.kernels.triton_arguments import arguments_of, cut_keys, tile_widths
from specache_fx.runtime.quant.hadamard import rotation

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Of a tile: wider keys would not fit into registers. Exact products of float32 take more of them.
_MOST_CHANNELS = 256
_MOST_CHANNELS_FLOAT32 = 128
_MOST_LANES = 8


class TritonKernel:
    """Runs on NVIDIA GPUs, and on the CPU in Triton's interpreter.

    Args:
        others: Computes what it has no code for: quantisers but KIVI's and TurboQuant's (`bits=16` too), aggregation
            "max", expansions, keys or values of more than 256 channels (128 of float32), dtypes that differ or are
            wider than float32. None: an error.
    """

    name = "triton"

    def __init__(self, others: Kernel | None = None) -> None:
        self._others = others

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Say what is missing, or None."""
        return triton_ops.unavailable_reason(device)

    def misfit(self, form: LayerForm) -> str | None:
        """Say what these kernels have no code for, or None."""
        if len(form.dtypes) != 1 or not form.dtypes <= _DTYPES:
            return f"it is for one of float32, bfloat16 and float16, and this has {listed(form.dtypes)}"
        if form.expands:
            return "keys and values are computed from what is cached (latent attention)"
        if form.aggregation != "mean":
            return f"it has no aggregation={form.aggregation!r}"
        quantizer, most = form.quantizer, _MOST_CHANNELS
        if quantizer is not None and quantizer.code_form is None:
            return f"it reads KIVI's and TurboQuant's codes, not what {quantizer.asked_by} makes"
        if torch.float32 in form.dtypes:
            most = _MOST_CHANNELS_FLOAT32
        bits = 8 if quantizer is None else quantizer.bits
        if max(tile_widths(bits, (form.key_dim, form.value_dim))) > most or form.lanes > _MOST_LANES:
            return f"it takes {most} channels of this dtype and {_MOST_LANES} lanes at most"
        return None

    def or_else(self, others: Kernel) -> Kernel:
        """See `Kernel.or_else`."""
        return TritonKernel(others)

    def attention(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with every lane; see `Kernel.attention`. Paper: SpeCache eq. 1, Algorithm 3."""
        if (reason := self.misfit(inputs.form)) is not None:
            return hand_over(self.name, self._others, inputs, reason)
        return _launch(inputs)


def _launch(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    from specache_fx.runtime.kernels.triton_configs import length_class
    from specache_fx.runtime.kernels.triton_decode import partial_attention
    from specache_fx.runtime.kernels.triton_merge import merge_parts
    from specache_fx.runtime.kernels.triton_scores import selection_scores

    arguments = arguments_of(inputs)
    query = arguments["query"]
    lanes, batch, num_heads = query.shape[:3]
    num_kv_heads, value_dim = arguments["num_kv_heads"], arguments["VALUE_DIM"]
    kv_len = inputs.num_quantized + arguments["window_len"]
    tiles = batch * num_kv_heads
    arguments |= cut_keys(
        inputs.num_quantized, arguments["top_k"] + arguments["window_len"] + lanes, tiles, query.device
    )
    splits = arguments["splits"]
    arguments["length_class"] = length_class(arguments["code_tokens"])

    part_max = query.new_empty((batch, lanes, num_heads, splits), dtype=torch.float32)
    arguments |= {
        "part_max": part_max,
        "part_sum": torch.empty_like(part_max),
        "part_out": part_max.new_empty((*part_max.shape, value_dim)),
        "norm": part_max.new_empty((batch, lanes, num_heads)),
    }
    centred = arguments["CENTRED"]
    shape = (lanes, batch, num_heads, 1, value_dim)
    out = query.new_empty(shape, dtype=torch.float32 if centred else query.dtype)
    code_out = torch.empty_like(out) if centred else out
    scores = part_max.new_empty((lanes, batch, num_kv_heads, kv_len + 1))
    with triton_ops.on(query.device):
        partial_attention[(tiles, splits, arguments["TILES"])](**_of(partial_attention, arguments))
        merge_parts[(batch * lanes * num_heads,)](
            out=out,
            code_out=code_out,
            sinks=triton_ops.pointer_or(inputs.sinks, query),
            num_heads=num_heads,
            HAS_SINKS=inputs.sinks is not None,
            BLOCK_S=16,
            **_of(merge_parts, arguments | {"VALUE_PAD": triton_ops.power_of_two(value_dim)}),
        )
        if inputs.num_scored:
            selection_scores[(tiles, splits)](out=scores, **_of(selection_scores, arguments))
    if centred:  # both were rotated by the same matrix, and the pairs at 16 bits were not
        out = torch.addmm(
            out.view(-1, value_dim), code_out.view(-1, value_dim), rotation(value_dim, out.device)[1]
        )
        out = out.view(shape).to(query.dtype)
    return out, scores[lanes - inputs.num_scored :]


def _of(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that a kernel takes."""
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}
