"""A dense model whose layers read, by mask, the exact pair or its codes: each rule is a few lines there."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.real.rules import Rule
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.quant.base import Planes
from specache_fx.runtime.token_history import TokenHistory

_NAME = "simulated"  # of an `attn_implementation`


@dataclass
class Layer:
    """One layer's pairs, `[num_kv_heads, kv_len, head_dim]` each, exact and as codes stand for them."""

    key: torch.Tensor
    value: torch.Tensor
    low_key: torch.Tensor
    low_value: torch.Tensor
    planes: Planes = ()
    num_quantized: int = 0
    staged: torch.Tensor | None = None  # bool [num_kv_heads, num_quantized at most]
    scores: torch.Tensor | None = None  # of the steps before
    chosen_by: torch.Tensor | None = None  # the queries that chose, [num_kv_heads, heads, head_dim]


@dataclass
class Counts:
    """Sums over steps, layers and kv heads."""

    steps: int = 0
    more_passes: int = 0
    right: int = 0
    captured: float = 0.0
    wanted: float = 0.0
    fetched_in_step: int = 0
    heads_again: int = 0
    heads: int = 0
    kls: list[float] = field(default_factory=list)


class Simulated:
    """A model whose layers without a window read pairs by a rule.

    Args:
        model: Of transformers.
        config: Width, group size, window and `top_k`.
        rule: The rule; None for the full cache.
    """

    def __init__(self, model: Any, config: SpecacheConfig, rule: Rule | None) -> None:
        ALL_ATTENTION_FUNCTIONS[_NAME] = self._attention
        ALL_MASK_ATTENTION_FUNCTIONS[_NAME] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        model.set_attn_implementation(_NAME)
        self._model, self._config, self._rule = model, config, rule
        self._quantizer = make_quantizer(config)
        self.layers: dict[int, Layer] = {}
        self.counts = Counts()
        self._missed = False
        self._guesses: list[int] = []
        self._guessed_by: torch.Tensor | None = None  # the logits that `_guesses` are of
        self._sure = 0.0
        self._expected: int | None = None
        self._kv_len = self._place = 0
        self._history = TokenHistory(torch.device("cpu"))

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> None:
        """Read a prompt, `[1, prompt_len]`."""
        self._forward(ids, 0)
        self._history.append(ids, 0)
        self._kv_len = ids.shape[1]

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        """Decode a token; logits of the next, float32 `[vocab]`."""
        place, self._kv_len = self._kv_len, self._kv_len + 1
        self._history.append(torch.tensor([[token]]), place)
        rule = self._rule
        guesses: list[int] = []
        if rule is not None and rule.lanes > 1:
            self._missed = self._expected is not None and self._expected != token
            self.counts.right += self._expected == token
            if self._expected is None or (self._missed and rule.refetch):
                self._predecode(token, place, rule.lanes - 1)
            guesses = self._guesses
            if self._missed and rule.ngrams:
                following, found = self._history.following()
                if found:
                    guesses[0] = int(following)
            assert self._guessed_by is not None
            self._sure = float(self._guessed_by.softmax(-1)[guesses[0]])
        logits = self._forward(torch.tensor([[token, *guesses]]), place).float()
        self.counts.steps += 1
        if guesses:
            self._expected = guesses[0]
            self._guess(logits[1], len(guesses))
        return logits[0]

    def _guess(self, logits: torch.Tensor, count: int) -> None:
        self._guessed_by, self._guesses = logits, logits.topk(count).indices.tolist()

    def _predecode(self, token: int, place: int, count: int) -> None:
        """Algorithm 2: the token alone chooses the pairs, and what it says next is the guess; no pair is kept."""
        self.counts.more_passes += self._missed
        before = {number: copy.copy(layer) for number, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.staged = None
        logits = self._forward(torch.tensor([[token]]), place).float()
        for number, layer in before.items():
            layer.staged, layer.chosen_by = self.layers[number].staged, self.layers[number].chosen_by
        self.layers = before
        self._guess(logits[0], count)

    def fork(self, rule: Rule) -> Simulated:
        """The same prompt, read once, under another rule. Decode one after the other."""
        twin = Simulated(self._model, self._config, rule)
        twin.layers = {number: copy.copy(layer) for number, layer in self.layers.items()}
        twin._history, twin._kv_len = copy.deepcopy(self._history), self._kv_len
        return twin

    def _forward(self, ids: torch.Tensor, place: int) -> torch.Tensor:
        ALL_ATTENTION_FUNCTIONS[_NAME] = self._attention  # of several, the one that runs
        lanes = ids.shape[1] - 1 if place else 0
        positions = torch.arange(place, place + ids.shape[1])
        if place:
            positions[1:] = place + 1
        self._place = place
        out = self._model(ids, position_ids=positions[None], use_cache=False, logits_to_keep=lanes + 1)
        return out.logits[0]

    def _attention(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls for each layer, with `[1, heads, q_len, head_dim]`."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = self._attend(module, query, key, value, attention_mask, scale)
        return out.transpose(1, 2).contiguous(), None

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scale: float,
    ) -> torch.Tensor:
        number, window = module.layer_idx, getattr(module, "sliding_window", None)
        heads = key.shape[1]
        if not self._place:
            self._begin(number, key[0], value[0], window)
            return scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, is_causal=mask is None, enable_gqa=True
            )
        layer = self.layers[number]
        old = layer.key.shape[1] if window is None else min(layer.key.shape[1], window - 1)
        queries = query[0].unflatten(0, (heads, -1)).float()  # [heads, group, lanes, dim]
        own_key, own_value = key[0].float(), value[0].float()
        sees = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril_()
        if len(sees) == 3:
            sees[2, 1] = False  # guesses at the same place don't see each other
        keys, values = layer.key[:, -old:].float(), layer.value[:, -old:].float()
        if self._rule is not None and window is None:
            out = self._read(layer, queries, own_key, own_value, sees, scale)
        else:
            out = _attention(queries, keys, values, own_key, own_value, sees, scale)[0]
        self._append(layer, key[0, :, :1], value[0, :, :1], window)
        return out.flatten(0, 1)[None].to(query.dtype)

    def _read(
        self, layer: Layer, queries: torch.Tensor, own_key: Any, own_value: Any, sees: Any, scale: float
    ) -> torch.Tensor:
        rule, n = self._rule, layer.num_quantized
        assert rule is not None

        def read(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Of what `exact` [heads, group or 1, lanes or 1, n] says at 16 bits, the rest as codes."""
            pairs = [(layer.low_key, layer.key), (layer.low_value, layer.value)]
            return _mixed_attention(queries, pairs, exact, n, own_key, own_value, sees, scale)

        none = torch.zeros(queries.shape[0], 1, 1, n, dtype=torch.bool)
        staged = none if layer.staged is None else layer.staged[:, None, None]
        if staged.shape[-1] < n:  # a group has left the window
            staged = torch.nn.functional.pad(staged, (0, n - staged.shape[-1]))
        if rule.same_step:
            staged = _top(read(none)[1][:, :, 0].mean(1), n, self._config.top_k)[:, None, None]
        if rule.cosine is not None and layer.chosen_by is not None:
            alike = torch.cosine_similarity(queries[:, :, 0], layer.chosen_by, dim=-1).mean(1)
            again = alike < rule.cosine
            fresh = _top(read(none)[1][:, :, 0].mean(1), n, self._config.top_k)[:, None, None]
            self.counts.heads_again += int(again.sum())
            self.counts.fetched_in_step += int((fresh & ~staged)[again].sum())
            staged = torch.where(again[:, None, None, None], fresh, staged)
        out, probs = read(staged)
        if rule.above is not None:
            heavy = (probs[..., :n] > rule.above) & ~staged
            self.counts.fetched_in_step += int(heavy[:, :, 0].any(1).sum())
            out, probs = read(staged | heavy)
        self._choose(layer, queries, probs, staged.expand(-1, 1, 1, -1)[:, 0, 0], n)
        return out

    def _choose(self, layer: Layer, queries: Any, probs: torch.Tensor, staged: torch.Tensor, n: int) -> None:
        rule, counts = self._rule, self.counts
        assert rule is not None
        by_lane = probs.mean(1)[..., :n]  # [heads, lanes, n]
        wanted = _top(by_lane[:, 0], n, self._config.top_k)
        if counts.steps and by_lane.shape[1] == rule.lanes:
            counts.captured += float((by_lane[:, 0] * staged).sum())
            counts.wanted += float((by_lane[:, 0] * wanted).sum())
            counts.heads += len(by_lane)
        share = rule.shares(self._missed, self._sure) if by_lane.shape[1] > 1 else 0.0
        scores = share * by_lane[:, 1:].mean(1) + (1 - share) * by_lane[:, 0] if share else by_lane[:, 0]
        if rule.decay and layer.scores is not None:
            before = torch.nn.functional.pad(layer.scores, (0, n - layer.scores.shape[1]))
            scores = (1 - rule.decay) * scores + rule.decay * before
        layer.scores, layer.staged = scores, _top(scores, n, self._config.top_k)
        layer.chosen_by = queries[:, :, -1 if share > 0.5 else 0]

    def _begin(self, number: int, key: torch.Tensor, value: torch.Tensor, window: int | None) -> None:
        layer = Layer(key.clone(), value.clone(), key.clone(), value.clone())
        self.layers[number] = layer
        if window is None and self._rule is not None:
            self._quantize(layer)

    def _append(self, layer: Layer, key: torch.Tensor, value: torch.Tensor, window: int | None) -> None:
        layer.key, layer.value = torch.cat([layer.key, key], 1), torch.cat([layer.value, value], 1)
        if window is None and self._rule is not None:
            layer.low_key = torch.cat([layer.low_key, key], 1)
            layer.low_value = torch.cat([layer.low_value, value], 1)
            self._quantize(layer)

    def _quantize(self, layer: Layer) -> None:
        start, stop = layer.num_quantized, self._config.num_quantized(layer.key.shape[1])
        if start == stop:
            return
        keys, values = layer.key[None, :, start:stop], layer.value[None, :, start:stop]
        codes = self._quantizer.quantize_more_keys(keys, layer.planes)
        layer.planes = layer.planes or codes
        dim, dtype = keys.shape[3], keys.dtype
        layer.low_key[:, start:stop] = self._quantizer.dequantize_key(codes, dim, dtype)[0]
        low = self._quantizer.dequantize_value(self._quantizer.quantize_value(values), values.shape[3], dtype)
        layer.low_value[:, start:stop] = low[0]
        layer.num_quantized = stop


def _top(scores: torch.Tensor, n: int, top_k: int) -> torch.Tensor:
    """The best of `[heads, n]` as a mask."""
    chosen = scores[:, :n].topk(min(top_k, n), -1).indices
    return torch.zeros(len(scores), n, dtype=torch.bool).scatter_(1, chosen, True)


def _attention(
    queries: Any, keys: Any, values: Any, own_key: Any, own_value: Any, sees: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    stored = torch.einsum("hgld,hnd->hgln", queries, keys)
    own = torch.einsum("hgld,hmd->hglm", queries, own_key).masked_fill(~sees, -torch.inf)
    probs = (torch.cat([stored, own], -1) * scale).softmax(-1)
    seen, mine = probs.split([keys.shape[1], own.shape[-1]], -1)
    return torch.einsum("hgln,hnd->hgld", seen, values) + mine @ own_value[:, None], seen


def _mixed_attention(
    queries: Any, pairs: Any, exact: Any, n: int, own_key: Any, own_value: Any, sees: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query reads each quantised pair exactly or by its codes: `exact` says which."""
    (low_key, key), (low_value, value) = (tuple(side.float() for side in both) for both in pairs)
    exact = torch.nn.functional.pad(exact, (0, key.shape[1] - n), value=True)
    scores = torch.where(exact, *(torch.einsum("hgld,hnd->hgln", queries, keys) for keys in (key, low_key)))
    own = torch.einsum("hgld,hmd->hglm", queries, own_key).masked_fill(~sees, -torch.inf)
    probs = (torch.cat([scores, own], -1) * scale).softmax(-1)
    seen, mine = probs.split([key.shape[1], own.shape[-1]], -1)
    out = mine @ own_value[:, None]
    for share, values in ((seen * exact, value), (seen * ~exact, low_value)):
        out = out + torch.einsum("hgln,hnd->hgld", share, values)
    return out, seen
