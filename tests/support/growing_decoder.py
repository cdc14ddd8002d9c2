"""A `TinyDecoder` on a cache of transformers, whose prompts and turns need no trace. It is called as the decoder is."""

from __future__ import annotations

from typing import Any

from support.models import KVPairs, TinyDecoder
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import specache_fx


class OnGrowingCache(nn.Module):
    """The decoder, as transformers' models take and return a cache."""

    def __init__(self, decoder: TinyDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, past_key_values: DynamicCache, **given: Any) -> tuple[Tensor, Any]:
        logits, _ = self.decoder(input_ids, past_key_values, **given)
        return logits, past_key_values


class Growing:
    """A compiled decoder, called as `TinyDecoder` is: pairs go in and come out."""

    def __init__(self, decoder: TinyDecoder, **options: Any) -> None:
        self.module: Any = OnGrowingCache(decoder)
        self.module.config = type("Config", (), {"use_cache": True})
        self.decoder = decoder
        specache_fx.compile(self.module, **options)

    def __call__(
        self, input_ids: Tensor, past: KVPairs | None = None, **given: Any
    ) -> tuple[Tensor, KVPairs]:
        cache = self.cache_of(
            past, 0 if past is None else given["attention_mask"].shape[1] - input_ids.shape[1]
        )
        logits, cache = self.module(input_ids, cache, **given)
        return logits, [(layer.keys, layer.values) for layer in cache.layers]

    def cache_of(self, past: KVPairs | None, past_len: int) -> DynamicCache:
        """A cache with these pairs of `past_len` tokens."""
        cache = DynamicCache()
        for layer_idx in range(self.decoder.config.num_layers):
            window = self.decoder.config.window_of(layer_idx)
            layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
            cache.layers.append(layer)
            if past is not None:
                layer.keys, layer.values = past[layer_idx]
                layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = past_len
        return cache
