"""`Session`: one KV cache in all its tiers, and what the ops of a rewritten graph do to it.

A session lives from a prefill until the last of its handles dies. Its layers hold the pairs, the copy engine brings
a few of them back for each step, and the graph's ops (`runtime/ops.py`) call the methods below in graph order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError
from specache_fx.runtime.copy_engine import CopyEngine
from specache_fx.runtime.handle import MAX_SESSION
from specache_fx.runtime.host_cache import HostCache, resolve_host
from specache_fx.runtime.kernels import DecodeInputs, choose_kernel
from specache_fx.runtime.key_mask import KeyMask
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.metrics import Metrics
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.select import make_selector

_numbers = itertools.count(1)


@dataclass(frozen=True)
class LayerShape:
    """What a layer's KV pairs look like, whatever the batch and the length."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class Session:
    """The KV cache of one batch of sequences.

    Args:
        config: The options it was made with.
        shapes: One per rewritten attention, in graph order.
        dtype: Of keys and values.
        device: Where the model runs.

    Raises:
        KernelUnavailableError: If `config.kernel` names a kernel that can't run on `device`.
    """

    def __init__(
        self, config: SpecacheConfig, shapes: tuple[LayerShape, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.number = next(_numbers) % MAX_SESSION
        self.config = config
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.state = torch.tensor([self.number])
        self.batch: int | None = None
        self.kv_len = 0
        self.key_mask = KeyMask()
        self.closed = False
        self.predecoding = False
        self.speculative_token: torch.Tensor | None = None  # what lane 1 decodes next
        self.guessed_token: torch.Tensor | None = (
            None  # what it decoded last: a guess at the next output token
        )
        self.staged_for: int | None = None  # the length at which the staged pairs are those of the next token
        self.metrics = Metrics()
        self.layers: list[LayerCache] = []
        self.host: HostCache | None = None
        self.engine: CopyEngine | None = None
        self._kernel = choose_kernel(config.kernel, device)
        self._select_pairs = make_selector(config)
        self._scores: dict[int, tuple[torch.Tensor, int]] = {}
        # Rows and indices of the layers that have waited in this step: from the wait to the prefetch that overwrites
        # them, and no longer.
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _open(self, batch: int, tokens: int) -> None:
        """Make the tiers, once the batch and the length of the first prompt are known."""
        self.batch = batch
        if self.config.placement.offload:
            rows = [(shape.num_kv_heads, shape.key_dim, shape.value_dim) for shape in self.shapes]
            nbytes = HostCache.first_bytes(batch, rows, self.dtype, self.config.num_quantized(tokens))
            host = resolve_host(self.config.host, self.device, nbytes, self.config.host_dir)
            self.host = HostCache(batch, rows, self.dtype, host, self.config.host_dir)
        if self.host is not None and self.config.placement.prefetch:
            self.engine = CopyEngine(self.host, self.config.top_k, self.device)
            for layer in range(len(self.shapes)):
                self.engine.wait(
                    layer
                )  # allocates the staging: a session's device bytes are there from the start
        quantizer = make_quantizer(self.config)
        self.layers = [LayerCache(self.config, quantizer, self.host, i) for i in range(len(self.shapes))]

    # Prefill and extend -------------------------------------------------------------------------------------------

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Take a layer's new pairs, right after its attention.

        Args:
            layer: Index of the layer.
            key: `[batch, num_kv_heads, q_len, key_dim]`.
            value: `[batch, num_kv_heads, q_len, value_dim]`.
            mask: The attention mask's last row, `[kv_len]` or `[batch or 1, ..., kv_len]`: bool, or float that is
                added to scores. It tells the padding.

        Raises:
            HostMemoryError: If the host tier can't take them.
            UnsupportedGraphError: If the mask is neither "attend" nor "don't" somewhere.
        """
        if self.batch is None:
            self._open(key.shape[0], key.shape[2])
        self.layers[layer].append(key, value)
        if layer == 0:
            self.key_mask.read(mask, key.shape[0])

    def load(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's whole history at 16 bits, for an exact extend."""
        return self.layers[layer].history()

    # Decode ---------------------------------------------------------------------------------------------------------

    def wait_prefetch(self, layer: int) -> None:
        """Return when the pairs that were prefetched for this layer's next attention have arrived."""
        if self.engine is not None and not self.predecoding:
            self._staged[layer] = self.engine.wait(layer)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        staged: bool,
    ) -> torch.Tensor:
        """Attend with every lane and keep the selection scores until `select`.

        Args:
            layer: Index of the layer.
            query: `[lanes, batch, num_heads, 1, key_dim]`.
            key: `[lanes, batch, num_kv_heads, 1, key_dim]`.
            value: `[lanes, batch, num_kv_heads, 1, value_dim]`.
            scale: Factor on the scores.
            staged: Replace low-bit pairs by those that were prefetched (never in pre-decode).

        Returns:
            `[lanes, batch, num_heads, 1, value_dim]`.
        """
        cache = self.layers[layer]
        rows = indices = None
        if staged and self.engine is not None and not self.predecoding:
            rows, indices = self._staged[layer]
        window_key, window_value = cache.window()
        out, scores = self._kernel.attention(
            DecodeInputs(
                query=query,
                key=key,
                value=value,
                quantizer=cache.quantizer,
                key_planes=cache.key_planes.view(),
                value_planes=cache.value_planes.view(),
                num_quantized=cache.num_quantized,
                window_key=window_key,
                window_value=window_value,
                staged_rows=rows,
                staged_indices=indices,
                key_mask=self.key_mask.grow(cache.kv_len),
                scale=scale,
                independent_lanes=self.predecoding,
            )
        )
        self._scores[layer] = (scores, cache.num_quantized)
        return out

    def select(self, layer: int) -> torch.Tensor:
        """The pairs to prefetch: the top-k of the last lane's scores, int32 `[batch, num_kv_heads, top_k]`, -1 fills.

        Chosen among the tokens that are quantised now: after this step's append, so that a group that it has just
        pushed out of the window can be fetched for the very next step.
        """
        scores, quantized_before = self._scores.pop(layer)
        chosen = self._select_pairs(scores[-1][..., : self.layers[layer].num_quantized], self.config.top_k)
        ahead = self.config.lookahead != "none" and not self.predecoding
        if self.config.track_hit_rates and ahead and self.engine is not None and quantized_before:
            needed = scores[0][..., :quantized_before]
            self.metrics.count_topk(needed, self.config.top_k, self._staged[layer][1])
        return chosen

    def prefetch(self, layer: int, indices: torch.Tensor) -> None:
        """Start bringing the 16-bit pairs of `indices` to the device, beside what the device computes next."""
        assert self.engine is not None
        self._staged.pop(layer, None)
        self.engine.prefetch(layer, indices)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the output token's own pair, `[batch, num_kv_heads, 1, dim]` each. Pre-decode keeps nothing."""
        if not self.predecoding:
            self.layers[layer].append(key, value)

    # Length ---------------------------------------------------------------------------------------------------------

    def rewind(self, kv_len: int) -> None:
        """Go back to the first `kv_len` tokens, where the cache was cropped or a step failed midway."""
        if kv_len == self.kv_len and all(layer.kv_len == kv_len for layer in self.layers):
            return
        if kv_len > self.kv_len:
            raise CacheHandleError(
                f"The past KV cache claims {kv_len} tokens, but its session holds {self.kv_len}. A cache that is left"
                " over from a step that failed, or was padded by hand, can't be continued: start from the prompt."
            )
        for i, layer in enumerate(self.layers):
            if self.engine is not None:
                self.engine.reset(i)
            layer.truncate(kv_len)
        self.key_mask.crop(kv_len)
        self._scores.clear()
        self._staged.clear()
        self.kv_len = kv_len
        self.forget_lookahead()

    def forget_lookahead(self) -> None:
        """What was speculated is void: the tokens to come are others (extend, crop, a new run of decode steps)."""
        self.staged_for = self.speculative_token = self.guessed_token = None

    def advance(self, num_tokens: int, decoded: bool) -> None:
        """A forward pass of `num_tokens` went through; after a decode step the staged pairs fit the next one."""
        self.kv_len += num_tokens
        self.staged_for = self.kv_len if decoded else None
        self.metrics.steps += decoded

    # Size -----------------------------------------------------------------------------------------------------------

    @property
    def device_bytes(self) -> int:
        """Bytes that the cache takes on the device, counted on its tensors."""
        staged = 0 if self.engine is None else self.engine.device_bytes
        return sum(layer.device_bytes for layer in self.layers) + staged + self.key_mask.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes reserved on the host."""
        return 0 if self.host is None else self.host.nbytes

    @property
    def full_bytes(self) -> int:
        """Bytes that the whole cache would take on the device in the model's dtype."""
        per_token = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in self.shapes)
        return (self.batch or 0) * self.kv_len * per_token * self.dtype.itemsize

    def settle(self) -> None:
        """Wait for the copies under way, so that what was counted is final."""
        for layer in range(len(self.layers)):
            self.wait_prefetch(layer)

    def close(self) -> None:
        """Free every tier; twice is fine."""
        self.closed = True
        if self.engine is not None:
            self.engine.close()
        if self.host is not None:
            self.host.close()
        self.layers, self.host, self.engine = [], None, None
        self._scores.clear()
        self._staged.clear()
