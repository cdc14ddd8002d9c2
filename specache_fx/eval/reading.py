"""Prompts are read once, by the plain model, and every method decodes from a copy of the cache that this leaves."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from specache_fx.compiled import uncompiled
from specache_fx.eval.decode import last_logits_only

DEFAULT_LIMIT = 2 << 30


@dataclass(frozen=True)
class Read:
    """What a batch of prompts left.

    Attributes:
        cache: 16-bit (the model's dtype), whole.
        logits: Of the last token, `[batch, vocab]`.
        prompt_len: Tokens of each prompt.
    """

    cache: DynamicCache
    logits: torch.Tensor
    prompt_len: int

    def copy(self) -> DynamicCache:
        """A cache of its own for a method to use up."""
        return copy.deepcopy(self.cache)

    def full_bytes(self, kv_len: int) -> int:
        """What the cache takes once it holds `kv_len` tokens, for all rows. Layers with a window don't grow past it."""
        total = 0
        for layer in self.cache.layers:
            if (keys := getattr(layer, "keys", None)) is None:
                continue  # a recurrent state, which no method here changes
            held, length = keys.nbytes + layer.values.nbytes, keys.shape[-2]
            window = getattr(layer, "sliding_window", None)
            grown = kv_len if window is None else max(length, min(kv_len, window - 1))
            total += held * grown // length
        return total

    @property
    def nbytes(self) -> int:
        """Bytes that keeping this takes."""
        return self.full_bytes(self.prompt_len) + self.logits.nbytes


def kv_tensors(cache: Any) -> list[torch.Tensor]:
    """Keys and values of all layers that have some."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


class Reader:
    """Reads batches of prompts and remembers the newest up to a number of bytes."""

    def __init__(self, model: PreTrainedModel, limit: int = DEFAULT_LIMIT) -> None:
        self._model, self._limit = model, limit
        self._kept: OrderedDict[tuple[tuple[int, ...], bytes], Read] = OrderedDict()

    @torch.inference_mode()
    def read(self, input_ids: torch.Tensor) -> Read:
        """Prefill with the plain model, or remember it: what it gives is the same for every method.

        Args:
            input_ids: int64 `[batch, prompt_len]`.
        """
        key = (tuple(input_ids.shape), input_ids.cpu().numpy().tobytes())
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        with uncompiled(self._model):
            out = self._model(
                input_ids=input_ids.to(self._model.device),
                past_key_values=DynamicCache(config=self._model.config),
                use_cache=True,
                **last_logits_only(self._model),
            )
        read = Read(out.past_key_values, out.logits[:, -1].clone(), input_ids.shape[1])
        self._kept[key] = read
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        return read
