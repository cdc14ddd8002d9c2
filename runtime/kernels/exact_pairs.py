"""The kernel of caches that keep keys as they are (`bits=16`, `policy="kcache"`): it reads them where they lie."""

from __future__ import annotations

import torch

from specache_fx.runtime.kernels.base import DecodeInputs, Kernel, LayerForm
from specache_fx.runtime.kernels.reference import ReferenceKernel, probabilities, selection_scores
from specache_fx.runtime.quant.identity import IdentityQuantizer
from specache_fx.runtime.quant.keys_only import KeysOnlyQuantizer

_WIDE = frozenset({torch.float32, torch.float64})


class ExactPairsKernel(Kernel):
    """The reference's answer without its copies: no plane is joined with the window, and no value that is 0 is read.

    The reference kernel gets the other cases: codes, latent attention, and narrow dtypes, whose products
    would be rounded. Runs on every device.
    """

    name = "exact_pairs"
    _others = ReferenceKernel()

    def misfit(self, form: LayerForm) -> str | None:
        """Name the case that it leaves to the reference kernel, or None."""
        if not isinstance(form.quantizer, IdentityQuantizer) or form.expands:
            return "it is for pairs that are kept as they are"
        if len(form.dtypes) != 1 or not form.dtypes <= _WIDE:
            return "it is for float32 and float64"
        return None

    def _attend(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Paper: KCache §3.1, where values are fetched."""
        lanes, batch, num_heads, _, key_dim = inputs.query.shape
        num_kv_heads, value_dim = inputs.key.shape[2], inputs.value.shape[4]
        own_key, own_value = inputs.key.squeeze(3), inputs.value.squeeze(3)
        query = inputs.query.reshape(lanes, batch, num_kv_heads, -1, key_dim) * inputs.scale
        rows = query.permute(1, 2, 0, 3, 4).flatten(
            2, 3
        )  # [batch, num_kv_heads, lanes * num_kv_groups, key_dim]
        sides = inputs.key_planes[0], inputs.window_key
        stored = torch.cat([rows @ side.transpose(2, 3) for side in sides], dim=-1)
        stored = stored.unflatten(2, (lanes, -1)).permute(2, 0, 1, 3, 4)
        probs = probabilities(inputs, stored, torch.einsum("lbhgd,mbhd->lbhgm", query, own_key))

        low, window, own = probs.split([inputs.num_quantized, inputs.window_len, lanes], dim=-1)
        out = torch.einsum("lbhgn,bhnd->lbhgd", window, inputs.window_value)
        out = out + torch.einsum("lbhgm,mbhd->lbhgd", own, own_value)
        if not isinstance(inputs.quantizer, KeysOnlyQuantizer):
            out = out + torch.einsum("lbhgn,bhnd->lbhgd", low, inputs.value_planes[0])
        elif inputs.staged_rows is not None and inputs.staged_indices is not None:
            places = inputs.staged_indices[None, :, :, None].to(torch.int64)
            chosen = low.gather(-1, places.clamp(min=0).expand(*low.shape[:-1], -1))
            chosen = chosen.masked_fill(places < 0, 0.0)
            values = inputs.staged_rows[..., -value_dim:].masked_fill(places[0, :, :, 0, :, None] < 0, 0.0)
            out = out + torch.einsum("lbhgk,bhkd->lbhgd", chosen, values)
        return out.reshape(lanes, batch, num_heads, 1, value_dim).contiguous(), selection_scores(
            inputs, probs
        )
