"""The Triton kernel: split-KV attention over packed codes, one read of the codes for all lanes of a group.

Launches: the parts (`triton_decode`), their sum (`triton_merge`), the selection scores (`triton_scores`); before them
the rotation of the queries, where codes are of rotated pairs.
"""

from __future__ import annotations

import torch

from specache_fx.runtime import triton_ops
from specache_fx.runtime.kernels.base import DecodeInputs, Kernel, LayerForm, hand_over, listed
from specache_fx.runtime.kernels.triton_arguments import (
    arguments_of,
    cut_keys,
    length_class,
    merge_arguments,
    parts_of,
    taken_by,
    tile_widths,
    tokens_told,
)

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Of a tile: wider keys would not fit into registers. Exact products of float32 take more of them.
_MOST_CHANNELS = 256
_MOST_CHANNELS_FLOAT32 = 128
_MOST_LANES = 8


class TritonKernel:
    """Runs on NVIDIA GPUs, and on the CPU in Triton's interpreter.

    Args:
        others: Computes the other cases: quantisers but KIVI's and TurboQuant's (`bits=16` too), aggregation
            "max", expansions, keys or values of more than 256 channels (128 of float32), dtypes that differ or are
            wider than float32. None: an error.
    """

    name = "triton"

    def __init__(self, others: Kernel | None = None) -> None:
        self._others = others

    def unavailable_reason(self, device: torch.device) -> str | None:
        """The missing requirement, or None."""
        return triton_ops.unavailable_reason(device)

    def misfit(self, form: LayerForm) -> str | None:
        """The form that these kernels have no code for, or None."""
        if len(form.dtypes) != 1 or not form.dtypes <= _DTYPES:
            return f"it is for one of float32, bfloat16 and float16, and this has {listed(form.dtypes)}"
        if form.expands:
            return "keys and values are computed from a cached latent (latent attention)"
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
    from specache_fx.runtime.kernels.triton_decode import partial_attention
    from specache_fx.runtime.kernels.triton_merge import merge_parts, rotate_queries
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

    arguments |= parts_of(query, splits, value_dim) | tokens_told(None, query, kv_len)
    arguments |= merge_arguments(inputs, arguments)
    out = query.new_empty((lanes, batch, num_heads, 1, value_dim))
    norm = arguments["part_max"].new_empty((batch, lanes, num_heads))
    scores = norm.new_empty((lanes, batch, num_kv_heads, kv_len + 1))
    with triton_ops.on(query.device):
        if arguments["CENTRED"]:
            rotate_queries[(lanes * batch * num_heads,)](
                out=arguments["code_query"], **taken_by(rotate_queries, arguments)
            )
        partial_attention[(tiles, splits, arguments["TILES"])](**taken_by(partial_attention, arguments))
        merge_parts[(batch * lanes * num_heads,)](out=out, norm=norm, **taken_by(merge_parts, arguments))
        if inputs.num_scored:
            selection_scores[(tiles, splits)](out=scores, norm=norm, **taken_by(selection_scores, arguments))
    return out, scores[lanes - inputs.num_scored :]
