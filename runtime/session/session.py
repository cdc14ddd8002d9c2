"""`Session`: one KV cache in all its tiers.

A session lives from a prefill until the last of its handles dies. Its layers hold the pairs, the transfer brings
a few of them back for each decode step (`runtime/session/decode_step.py`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Sequence

import torch

from specache_fx._log import warn_once
from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError, UnsupportedGraphError
from specache_fx.runtime.graph.prompt_masks import PromptMasks
from specache_fx.runtime.handles.handle import MAX_SESSION, Newest
from specache_fx.runtime.handles.handle_form import HEADS_FIRST
from specache_fx.runtime.handles.handle_tensor import Lease
from specache_fx.runtime.host.host_blocks import resolve_host
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.kernels import choose_kernel
from specache_fx.runtime.kernels.triton.kernel import TritonKernel
from specache_fx.runtime.layers.key_mask import KeyMask
from specache_fx.runtime.layers.layer_cache import LayerCache
from specache_fx.runtime.layers.layer_state import LayerState
from specache_fx.runtime.layers.layout import Arena, LayerShape
from specache_fx.runtime.layers.window_cache import WindowCache
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.session.metrics import Metrics
from specache_fx.runtime.session.next_answer import NextAnswer
from specache_fx.runtime.session.origin import Origin
from specache_fx.runtime.session.token_history import TokenHistory
from specache_fx.runtime.steps.aten_steps import AtenSteps
from specache_fx.runtime.steps.cpu_recorder import CpuRecorder
from specache_fx.runtime.steps.fused_steps import FusedSteps
from specache_fx.runtime.steps.step_graph import StepGraph, recorder_of
from specache_fx.runtime.steps.step_table import StepTable
from specache_fx.runtime.steps.triton_steps import TritonSteps
from specache_fx.runtime.transfer import Transfer, choose_transfer

_log = logging.getLogger(__name__)
_MUCH_STAGED = 32 << 20  # bytes below which nobody minds
_numbers = itertools.count(1)

# The weight of the speculative token's scores in the selection; the output token's have the rest. Chosen among the
# shares of results/real_candidates.json, a dense simulation.
SHARE_AFTER_HIT, SHARE_AFTER_MISS = 0.8, 0.4


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
        self.table = StepTable(self.number, len(shapes))
        self.steps: FusedSteps | None = None  # the one-operator steps, where they exist
        config = config.for_device(device.type)
        self.config, self.shapes, self.dtype, self.device = config, shapes, dtype, device
        self.batch: int | None = None
        self.kv_len = 0
        self.forms = [HEADS_FIRST] * (2 * len(shapes))  # of the handles outside of the graph, by slot
        self.key_mask = KeyMask()
        self.masks_move = False  # the model's masks hide more than the padding, now or soon
        self.prompt_masks: PromptMasks | None = None  # while several tokens run
        self.metrics = Metrics(device, keep_steps=config.track_hit_rates == "steps")
        # The tiers; a layer's codes are on the device, in the layer.
        self.layers: list[LayerState] = []
        self.tiered: dict[int, LayerCache] = {}  # those whose pairs are selected, by index
        self.host: HostCache | None = None
        self.transfer: Transfer | None = None
        self.quantizer = make_quantizer(config)
        self.kernel = choose_kernel(config.kernel, device)
        self._unwindowed = [i for i, shape in enumerate(shapes) if shape.window is None]
        # Of these, the ones whose older tokens leave the device: the first `resident_layers` keep all there.
        self._tiered_layers = self._unwindowed[config.resident_layers :]
        self.graph: StepGraph | None = None  # replays steps; None where none is captured or noted
        # Lookahead.
        self.speculative_token: torch.Tensor | None = None  # lane 1's next input
        # Lane 1's newest token: a guess at the next output token. None behind a guess that was accepted: no lane ran.
        self.guessed_token: torch.Tensor | None = None
        self.tokens = TokenHistory(device)
        self.next_answer: NextAnswer | None = None
        self.staged_for: int | None = None  # the length at which the staged pairs are those of the next token
        self.origin = Origin()
        # Who uses it.
        self.closed = False
        self.lease: weakref.ref[Lease] | None = None  # of its handles; it ends with that
        self.lock = threading.RLock()  # held while a step runs: a fork in another thread waits for its end
        # The handles that the last call returned.
        self.newest: Newest | None = None

    def _open(self, batch: int, tokens: int) -> None:
        """Make the tiers, once the batch and the length of the first prompt are known."""
        self.batch = batch
        if self.config.placement.offload:
            dims = self.config.placement.host_dims
            rows = [(shape.num_kv_heads, *dims(shape.key_dim, shape.value_dim)) for shape in self.shapes]
            kept = [rows[i] for i in self._tiered_layers]
            reserve = self.config.num_quantized(self.config.reserve)
            first = max(self.config.num_quantized(tokens), reserve)
            nbytes = HostCache.first_bytes(batch, kept, self.dtype, first)
            host = resolve_host(self.config.host, self.device, nbytes, self.config.host_dir)
            self.host = HostCache(
                batch, rows, self.dtype, host, self.config.host_dir, reserve=reserve, device=self.device
            )
            if self.config.num_quantized(tokens) == 0 < reserve:  # this prompt appends nothing
                for layer in self._tiered_layers:
                    self.host.reserve(layer)
        if self.host is not None and self.config.stages:
            interpreted = isinstance(self.kernel, TritonKernel) and self.device.type == "cpu"
            self.transfer = choose_transfer(
                self.host, self.config.top_k, self.device, interpreted=interpreted
            )
            for layer in self._tiered_layers:
                self.transfer.staging(layer)  # a session's device bytes are there from the start
            if self.transfer.device_bytes > max(_MUCH_STAGED, self._bytes_of(tokens)):
                warn_once(
                    _log,
                    f"specache: top_k={self.config.top_k} keeps room for {self.transfer.device_bytes:,} bytes of"
                    f" prefetched pairs on the device, more than the whole cache of these {tokens} tokens takes. Give a"
                    " top_k below the context.",
                )
        self.layers = [self._make_layer(i, batch) for i in range(len(self.shapes))]
        if self._tiered_layers:
            self._choose_steps()

    def _choose_steps(self) -> None:
        """Choose the implementation of one-operator steps."""
        config, kernel, transfer = self.config, self.kernel, self.transfer
        selects_first = config.stages and config.lookahead == "none"
        # Where pairs are staged, one operator reads the slots alone: no sinks beside them.
        if not config.stages or not config.sink_tokens:
            self.table.open(kernel, self.quantizer, transfer, self.host, config.aggregation, selects_first)
            if self.table.serves:
                self.steps = self.table
            elif not selects_first:
                self.steps = TritonSteps.of(config, kernel, self.quantizer, transfer, self.device)
        if not config.replay:
            return
        if self.steps is self.table:
            self.graph = StepGraph(CpuRecorder())
        elif (recorder := recorder_of(self.device)) is not None:
            if self.steps is None:  # `AtenSteps` serve captured steps alone
                self.steps = AtenSteps.of(config, kernel, transfer, self.device)
            self.graph = None if self.steps is None else StepGraph(recorder)

    def _make_layer(self, layer: int, batch: int) -> LayerState:
        shape, exact = self.shapes[layer], layer not in self._tiered_layers
        sinks = 0 if exact else self.config.sink_tokens
        arena = Arena(self.quantizer, shape, batch, self.dtype, self.device, sinks)
        if shape.window is not None:
            return WindowCache(arena, shape.window)
        cache = LayerCache(self.config, arena, self.host, layer, self.key_mask, exact)
        if not exact:
            self.tiered[layer] = cache
        return cache

    # Prefill and extend -------------------------------------------------------------------------------------------

    def store(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kv_len: int | None = None,
        hold: bool = False,
    ) -> None:
        """Take a layer's new pairs, right after its attention.

        Args:
            layer: Index of the layer.
            key: `[batch, num_kv_heads, q_len, key_dim]`.
            value: `[batch, num_kv_heads, q_len, value_dim]`.
            mask: The attention mask's last row, `[kv_len]` or `[batch or 1, ..., kv_len]`: bool, or float that is
                added to scores. It tells the padding.
            kv_len: Tokens that the layer has had, where these are what is left of them: of a cache that is taken over,
                and `key_mask` knows its padding already.
            hold: See `LayerState.append`.

        Raises:
            HostMemoryError: If the host tier can't take them.
            UnsupportedGraphError: If the mask hides keys from some heads only, or adds numbers that are not finite.
        """
        if self.batch is None:
            self._open(key.shape[0], key.shape[2])
        if kv_len is None and layer in self._unwindowed:
            take = self.key_mask.read if layer == self._unwindowed[0] else self.key_mask.widen
            take(mask, key.shape[0])
        self.layers[layer].append(key, value, hold, kv_len)

    def load(
        self, layer: int, kv_len: int | None = None, new: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's history at 16 bits; see `LayerState.history`.

        Raises:
            CacheHandleError: If a window has dropped pairs that it would need.
        """
        return self.layers[layer].history(kv_len, new)

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
            layer.check_truncate(kv_len)
        for i, layer in enumerate(self.layers):
            if self.transfer is not None and i in self._tiered_layers:
                self.transfer.reset(i)
            layer.truncate(kv_len)
        self.key_mask.crop(kv_len)
        self.tokens.crop(kv_len)
        self.kv_len = kv_len
        self.forget_lookahead()

    def reorder(self, rows: Sequence[int]) -> None:
        """Set batch row i to the former row `rows[i]` (beam search): as many rows as before."""
        index = torch.tensor(rows, device=self.device)
        self.next_answer = None
        if self.transfer is not None:
            self.transfer.reorder(index)
        for layer in self.layers:
            layer.reorder(index)
        self.key_mask.reorder(index)
        self.tokens.reorder(index)
        for name in ("speculative_token", "guessed_token"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.index_select(0, index))

    def requantize(self) -> None:
        """Make all codes anew: keys that were padding are shown, which their groups' statistics have left out."""
        if self.config.bits == 16 or not self._tiered_layers:
            return
        if self.host is None:
            warn_once(
                _log,
                f"specache: a mask shows keys that it hid before. policy={self.config.policy!r} has no 16-bit pairs to"
                " quantise them anew, so their codes are less exact. Take policy='specache' for masks that move.",
            )
            return
        try:
            for i, layer in self.tiered.items():
                if self.transfer is not None:
                    self.transfer.reset(i)
                layer.requantize()
        except BaseException:
            self.close()  # a layer has lost its pairs
            raise

    def forget_lookahead(self) -> None:
        """Drop the guess and the staged pairs: other tokens come (extend, crop, a new run of decode steps)."""
        self.staged_for = self.speculative_token = self.guessed_token = self.next_answer = None

    def remember(self, tokens: torch.Tensor | None) -> None:
        """Note the tokens that go through next, integers `[batch, q_len]`; None where the graph takes none.

        The layers have read the padding of several tokens by now.
        """
        if tokens is not None:
            self.tokens.append(tokens, self.kv_len)
            kv_len = self.kv_len + tokens.shape[1]
            if tokens.shape[1] > 1 and (real := self.key_mask.at(kv_len)) is not None:
                self.tokens.hide(real)

    def recover(self, token: torch.Tensor, missed: torch.Tensor) -> torch.Tensor:
        """Go on where some rows' tokens were not the speculated ones; nothing waits for the device.

        The speculative token of such a row is a guess at what follows another token. Where the newest tokens stood
        before in the sequence, what followed there is the better guess.

        Args:
            token: The output token, `[batch, 1]` or of as many elements; it is remembered.
            missed: bool, of its shape.

        Returns:
            `DecodeStep.shares`.
        """
        assert self.speculative_token is not None
        if missed.is_cuda or bool(missed.any()):
            following, found = self.tokens.following()
            guess = following.reshape(token.shape).to(token.dtype)
            self.speculative_token = torch.where(
                missed & found.reshape(token.shape), guess, self.speculative_token
            )
        shares = torch.full(missed.shape, SHARE_AFTER_HIT, dtype=torch.float32, device=missed.device)
        return shares.masked_fill_(missed, SHARE_AFTER_MISS).reshape(-1)

    def advance(self, num_tokens: int, decoded: bool) -> None:
        """A forward pass of `num_tokens` went through; after a decode step the staged pairs fit the next one.

        Args:
            num_tokens: How many they were.
            decoded: Whether it was a decode step.
        """
        self.kv_len += num_tokens
        self.staged_for = self.kv_len if decoded else None
        if decoded:
            self.metrics.end_step(self.kv_len)

    @property
    def state(self) -> torch.Tensor:
        """The session's identity in the ops of a graph."""
        return self.table.state

    # Size -----------------------------------------------------------------------------------------------------------

    @property
    def has_tiered_layers(self) -> bool:
        """Whether a layer is neither a window nor resident: only there is something quantised and selected."""
        return bool(self._tiered_layers)

    def handle_lengths(self) -> list[int]:
        """Tokens that each handle has, keys and values in turn, layer by layer."""
        return [shape.tokens(self.kv_len) for shape in self.shapes for _ in range(2)]

    @property
    def device_bytes(self) -> int:
        """Bytes that the cache takes on the device, counted on its tensors."""
        staged = 0 if self.transfer is None else self.transfer.device_bytes
        steps = 0 if self.steps is None else self.steps.device_bytes
        return sum(layer.device_bytes for layer in self.layers) + staged + steps + self.key_mask.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes reserved on the host."""
        return 0 if self.host is None else self.host.nbytes

    @property
    def host_used_bytes(self) -> int:
        """Bytes of these that hold pairs."""
        return 0 if self.host is None else self.host.used_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes that the whole cache would take on the device in the model's dtype."""
        return self._bytes_of(self.kv_len)

    def _bytes_of(self, tokens: int) -> int:
        """Of so many tokens, in the model's dtype."""
        elements = sum(
            shape.tokens(tokens) * shape.num_kv_heads * (shape.key_dim + shape.value_dim)
            for shape in self.shapes
        )
        return (self.batch or 0) * elements * self.dtype.itemsize

    def settle(self) -> None:
        """Wait for the copies under way, so that the counts are final."""
        if self.transfer is not None:
            for layer in self._tiered_layers:
                self.transfer.wait(layer)

    def close(self) -> None:
        """Free every tier; twice is fine."""
        self.closed = True
        self.forget_lookahead()
        if self.transfer is not None:
            self.transfer.close()
        if self.host is not None:
            self.host.close()
        self.layers, self.tiered, self.host, self.transfer = [], {}, None, None
        for part in (self.steps, self.graph):
            if part is not None:
                part.close()
        self.steps = None
        self.key_mask = KeyMask()
