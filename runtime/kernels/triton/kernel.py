"""The Triton kernel: split-KV attention over packed codes, one read of the codes for all lanes of a group.

Launches: the parts (`triton_decode`), their sum (`triton_merge`), the selection scores (`triton_scores`); before them
the rotation of the queries, where codes are of rotated pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specache_fx.runtime.kernels.base import DecodeInputs, Kernel, LayerForm, listed
from specache_fx.runtime.kernels.triton.arguments import (
    arguments_of,
    bias_of,
    merge_arguments,
    norms_of,
    parts_of,
    taken_by,
    tile_widths,
)
from specache_fx.runtime.kernels.triton.correction import margins, with_large_shares
from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.native.launches import Launch, launch

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Of a tile: wider keys would not fit into registers. Exact products of float32 take more of them.
_MOST_CHANNELS = 256
_MOST_CHANNELS_FLOAT32 = 128
_MOST_LANES = 8


class TritonKernel(Kernel):
    """Runs on NVIDIA GPUs, and on the CPU in Triton's interpreter.

    Cases for others: quantisers but KIVI's and TurboQuant's (`bits=16` too), aggregation "max", expansions, keys or
    values of more than 256 channels (128 of float32), dtypes that differ or are wider than float32.
    """

    name = "triton"

    def unavailable_reason(self, device: torch.device) -> str | None:
        """The missing requirement, or None."""
        return triton_ops.unavailable_reason(device)

    def misfit(self, form: LayerForm) -> str | None:
        """The form that these kernels have no code for, or None."""
        if len(form.dtypes) != 1 or not form.dtypes <= _DTYPES:
            return f"it is for one of float32, bfloat16 and float16, and this has {listed(form.dtypes)}"
        if form.expands:
            return (
                "keys and values are computed from what is cached: latent attention, or KV heads that are repeated in"
                " another order than by repeat_interleave(groups, dim=1)"
            )
        if form.cpu_reads:
            return "it reads whole pairs from page-locked memory: not with value_share, nor from a file (key_share)"
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

    def _attend(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Paper: SpeCache eq. 1, Algorithm 3."""
        if inputs.originals is not None and inputs.num_quantized:
            _, shares = self._run(replace(inputs, scored_lanes=None), margins(inputs))
            inputs = with_large_shares(inputs, shares[0])
        return self._run(inputs, inputs.bias)

    def _run(
        self, inputs: DecodeInputs, bias_of_scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_attend`, by codes and staged pairs. The selection scores have a bias of their own."""
        arguments = arguments_of(inputs)
        query, splits, value_dim = (arguments[name] for name in ("query", "splits", "VALUE_DIM"))
        lanes, batch, num_heads = query.shape[:3]
        out, norm = query.new_empty((lanes, batch, num_heads, 1, value_dim)), norms_of(query)
        scores = norm.new_empty((lanes, batch, arguments["num_kv_heads"], arguments["score_stride"]))
        arguments |= parts_of(query, splits, value_dim) | merge_arguments(inputs, arguments)
        arguments |= {"out": out, "norm": norm}
        with triton_ops.on(query.device):
            for one in attention_launches(arguments):
                one()
            if inputs.num_scored:
                launch_scores(arguments | bias_of(bias_of_scores, query) | {"out": scores})
        return out, scores[lanes - inputs.num_scored :]


def attention_launches(arguments: dict[str, Any]) -> tuple[Launch, ...]:
    """The launches that the model waits for: a rotation where codes are centred, parts, their sum."""
    from specache_fx.runtime.kernels.triton.decode import partial_attention
    from specache_fx.runtime.kernels.triton.merge import merge_parts, rotate_queries

    queries = arguments["LANES"] * arguments["batch"] * arguments["num_heads"]
    grid = (arguments["batch"] * arguments["num_kv_heads"], arguments["splits"], arguments["TILES"])
    rotation = taken_by(rotate_queries, arguments) | {"out": arguments["code_query"]}
    return (
        *([Launch(rotate_queries, (queries,), rotation)] if arguments["CENTRED"] else []),
        Launch(partial_attention, grid, taken_by(partial_attention, arguments)),
        Launch(merge_parts, (queries,), taken_by(merge_parts, arguments)),
    )


def launch_scores(arguments: dict[str, Any]) -> None:
    """Launch the kernel of selection scores, behind attention."""
    from specache_fx.runtime.kernels.triton.scores import selection_scores

    grid = (arguments["batch"] * arguments["num_kv_heads"], arguments["splits"])
    launch(selection_scores, grid, **taken_by(selection_scores, arguments))
