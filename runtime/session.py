"""`Session`: one KV cache in all its tiers, and what the ops of a rewritten graph do to it.

A session lives from a prefill until the last of its handles dies. Its layers hold the pairs, the copy engine brings
a few of them back for each step, and the graph's ops (`runtime/ops.py`) call the methods below in graph order.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError, UnsupportedGraphError
from specache_fx.runtime.copy_engine import CopyEngine
from specache_fx.runtime.decode_inputs import Lanes, layer_inputs, window_inputs
from specache_fx.runtime.handle import MAX_SESSION
from specache_fx.runtime.host_cache import HostCache, resolve_host
from specache_fx.runtime.kernels import Expand, choose_kernel
from specache_fx.runtime.key_mask import KeyMask
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.metrics import Metrics
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.select import make_selector
from specache_fx.runtime.window_cache import WindowCache, WindowMask

_numbers = itertools.count(1)


@dataclass(frozen=True)
class LayerShape:
    """What a layer's KV pairs look like, whatever the batch."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # tokens that a query reaches, where the layer keeps no more

    def tokens(self, kv_len: int) -> int:
        """Tokens that the layer keeps of `kv_len`."""
        return kv_len if self.window is None else min(kv_len, self.window - 1)


class Session:
    """The KV cache of one batch of sequences.

    Args:
        config: The options it was made with.
        shapes: One per layer, in graph order.
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
        self.masks_move = False  # the model's masks hide more than the padding, now or soon
        self.closed = False
        self.thread: int | None = None  # that ran it last
        self.used_at = 0.0  # `time.monotonic()` then
        self.lock = threading.RLock()  # held while a step runs: a fork in another thread waits for its end
        self.predecoding = False
        self.speculative_token: torch.Tensor | None = None  # what lane 1 decodes next
        self.guessed_token: torch.Tensor | None = (
            None  # what it decoded last: a guess at the next output token
        )
        self.biases: dict[int, torch.Tensor] = {}  # see `begin_step`
        self.staged_for: int | None = None  # the length at which the staged pairs are those of the next token
        self.newest: weakref.ref[torch.Tensor] | None = (
            None  # the first of the handles that were returned last
        )
        self.metrics = Metrics()
        self.layers: list[LayerCache | WindowCache] = []
        self.window_masks: dict[int, tuple[WindowMask | None, ...]] = {}  # of this step's lanes, by layer
        self._expansions: dict[int, Expand] = {}
        self._global = [i for i, shape in enumerate(shapes) if shape.window is None]
        self._quantizer = make_quantizer(config)
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
            kept = [rows[i] for i in self._global]
            nbytes = HostCache.first_bytes(batch, kept, self.dtype, self.config.num_quantized(tokens))
            host = resolve_host(self.config.host, self.device, nbytes, self.config.host_dir)
            self.host = HostCache(batch, rows, self.dtype, host, self.config.host_dir)
        if self.host is not None and self.config.placement.prefetch:
            self.engine = CopyEngine(self.host, self.config.top_k, self.device)
            for layer in self._global:
                self.engine.wait(
                    layer
                )  # allocates the staging: a session's device bytes are there from the start
        self.layers = [
            LayerCache(self.config, self._quantizer, self.host, i)
            if shape.window is None
            else WindowCache(shape.window)
            for i, shape in enumerate(self.shapes)
        ]

    # Prefill and extend -------------------------------------------------------------------------------------------

    def store(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kv_len: int | None = None,
    ) -> None:
        """Take a layer's new pairs, right after its attention.

        Args:
            layer: Index of the layer.
            key: `[batch, num_kv_heads, q_len, key_dim]`.
            value: `[batch, num_kv_heads, q_len, value_dim]`.
            mask: The attention mask's last row, `[kv_len]` or `[batch or 1, ..., kv_len]`: bool, or float that is
                added to scores. It tells the padding.
            kv_len: Tokens that the layer has had, where these are what is left of them (the full window of a cache
                that is taken over).

        Raises:
            HostMemoryError: If the host tier can't take them.
            UnsupportedGraphError: If the mask hides keys from some heads only, or adds what is not finite.
        """
        if self.batch is None:
            self._open(key.shape[0], key.shape[2])
        cache = self.layers[layer]
        cache.append(key, value)
        if kv_len is not None and isinstance(cache, WindowCache):
            cache.kv_len = kv_len
        if layer in self._global[:1]:
            self.key_mask.read(mask, key.shape[0])
        elif layer in self._global:
            self.key_mask.widen(mask, key.shape[0])

    def load(self, layer: int, kv_len: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's history at 16 bits, or what it was at an earlier length: fresh tensors.

        Raises:
            CacheHandleError: If a window has dropped what it would need.
        """
        return self.layers[layer].history(kv_len)

    def stored_length(self) -> int:
        """Tokens that every layer has after a prompt or an extend.

        Raises:
            UnsupportedGraphError: If they have different ones.
        """
        lengths = {layer.kv_len for layer in self.layers}
        if len(lengths) > 1:
            raise UnsupportedGraphError(
                f"The KV caches of this graph hold different numbers of tokens ({sorted(lengths)}): specache keeps one"
                ' length for all. Compile this model with backend="inductor".'
            )
        return lengths.pop()

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
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        expansion: int | None = None,
    ) -> torch.Tensor:
        """Attend with every lane and keep the selection scores until `select`.

        Args:
            layer: Index of the layer.
            query: `[lanes, batch, num_heads, 1, key_dim]`.
            key: `[lanes, batch, num_kv_heads, 1, key_dim]`.
            value: `[lanes, batch, num_kv_heads, 1, value_dim]`.
            scale: Factor on the scores.
            staged: Replace low-bit pairs by those that were prefetched (never in pre-decode).
            softcap: See `DecodeInputs`.
            sinks: See `DecodeInputs`.
            expansion: Which of the step's expansions makes keys and values of what is cached; None for none.

        Returns:
            `[lanes, batch, num_heads, 1, value_dim]`.
        """
        cache = self.layers[layer]
        expand = None if expansion is None else self._expansions[expansion]
        lanes = Lanes(query, key, value, scale, self.predecoding, softcap, sinks, expand)
        if isinstance(cache, WindowCache):
            masks = self.window_masks.get(layer, (None,) * query.shape[0])
            return self._kernel.attention(window_inputs(lanes, cache, masks, self._quantizer))[0]
        rows = self._staged[layer] if staged and self.engine is not None and not self.predecoding else None
        key_mask = self.key_mask.grow(cache.kv_len)
        out, scores = self._kernel.attention(
            layer_inputs(lanes, cache, rows, key_mask, self.biases.get(layer))
        )
        if layer in self._scores:  # attentions that share a layer choose together
            scores = self._scores[layer][0] + scores
        self._scores[layer] = (scores, cache.num_quantized)
        return out

    def begin_step(
        self,
        biases: dict[int, torch.Tensor],
        window_masks: dict[int, tuple[WindowMask | None, ...]],
        expansions: dict[int, Expand] | None = None,
    ) -> None:
        """Before the graph of a decode step runs.

        Args:
            biases: What the model adds to the scores of layers that keep all tokens; see `DecodeInputs.bias`.
            window_masks: The masks of the layers that keep a window, one a lane, where the model has masks there; None
                for a lane whose mask can't be told: what it selects is void.
            expansions: By attention, where keys and values are computed from what is cached: see `DecodeInputs.expand`.
        """
        self._scores.clear()
        self.biases, self.window_masks, self._expansions = biases, window_masks, expansions or {}

    @property
    def windows_told(self) -> bool:
        """Whether each lane of this step saw of the windows what its token will see."""
        return all(mask is not None for masks in self.window_masks.values() for mask in masks)

    def select(self, layer: int) -> torch.Tensor:
        """The pairs to prefetch: the top-k of the last lane's scores, int32 `[batch, num_kv_heads, top_k]`, -1 fills.

        Chosen among the tokens that are quantised now: after this step's append, so that a group that it has just
        pushed out of the window can be fetched for the very next step.
        """
        scores, quantized_before = self._scores.pop(layer)
        cache = self.layers[layer]
        assert isinstance(cache, LayerCache)
        chosen = self._select_pairs(scores[-1][..., : cache.num_quantized], self.config.top_k)
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
        for layer in self.layers:  # all can go back, or none does
            if isinstance(layer, WindowCache):
                layer.check_truncate(kv_len)
        for i, layer in enumerate(self.layers):
            if self.engine is not None and i in self._global:
                self.engine.reset(i)
            layer.truncate(kv_len)
        self.key_mask.crop(kv_len)
        self._scores.clear()
        self._staged.clear()
        self.kv_len = kv_len
        self.forget_lookahead()

    def reorder(self, rows: Sequence[int]) -> None:
        """Make batch row i what row `rows[i]` was (beam search): as many rows as before."""
        index = torch.tensor(rows, device=self.device)
        self._staged.clear()
        if self.engine is not None:
            self.engine.reorder(index)
        for layer in self.layers:
            _take(layer, layer, index)
        self._take_rows(self, index)

    def fork(self, rows: Sequence[int]) -> Session:
        """A session of its own that holds what this one does, of batch rows `rows` in that order.

        Raises:
            HostMemoryError: If the host tier can't take a copy. This session is as it was.
        """
        twin = Session(self.config, self.shapes, self.dtype, self.device)
        index = torch.tensor(rows, device=self.device)
        try:
            twin._open(len(rows), self.kv_len)
            for mine, theirs in zip(twin.layers, self.layers, strict=True):
                _take(mine, theirs, index)
        except BaseException:
            twin.close()
            raise
        twin.kv_len = self.kv_len
        twin._take_rows(self, index)
        twin.forget_lookahead()  # its staged pairs are not copied
        return twin

    def _take_rows(self, source: Session, index: torch.Tensor) -> None:
        self.key_mask.take(source.key_mask, index)
        for name in ("speculative_token", "guessed_token"):
            value = getattr(source, name)
            setattr(self, name, None if value is None else value.index_select(0, index))

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
    def has_global_layers(self) -> bool:
        """Whether a layer keeps all tokens: only there is something quantised, offloaded and selected."""
        return bool(self._global)

    def handle_lengths(self) -> list[int]:
        """Tokens that each handle has, keys and values in turn, layer by layer."""
        return [shape.tokens(self.kv_len) for shape in self.shapes for _ in range(2)]

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
        elements = sum(
            shape.tokens(self.kv_len) * shape.num_kv_heads * (shape.key_dim + shape.value_dim)
            for shape in self.shapes
        )
        return (self.batch or 0) * elements * self.dtype.itemsize

    def settle(self) -> None:
        """Wait for the copies under way, so that what was counted is final."""
        for layer in self._global if self.layers else ():
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


def _take(mine: LayerCache | WindowCache, theirs: LayerCache | WindowCache, rows: torch.Tensor) -> None:
    """Let a layer hold what the same layer of another session (or it itself) does, of batch rows `rows`."""
    if isinstance(mine, WindowCache):
        assert isinstance(theirs, WindowCache)
        mine.take(theirs, rows)
    else:
        assert isinstance(theirs, LayerCache)
        mine.take(theirs, rows)
