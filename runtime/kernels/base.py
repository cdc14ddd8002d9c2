"""`Kernel`: the interface of attention kernels, with inputs and results."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

from specache_fx._log import warn_once
from specache_fx.errors import KernelUnavailableError
from specache_fx.runtime.quant import Planes, Quantizer

_log = logging.getLogger(__name__)

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Originals:
    """The 16-bit pairs of a layer's quantised tokens, for attention that reads some in the step that needs them.

    Attributes:
        table: `HostCache.table`, on the attention's device; None where that can't read the host's rows.
        length: Tokens that the host holds, at least the quantised ones.
        read: Copies tokens `start` to `stop` out: keys and values, `[batch, num_kv_heads, tokens, dim]` each.
        key_share: See `SpecacheConfig`.
        value_share: See `SpecacheConfig`.
        num_read: int64 `[2]`: keys and values that were read are added to it. On the CPU, or beside `table`.
    """

    table: torch.Tensor | None
    length: int
    read: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    key_share: float
    value_share: float
    num_read: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Form of a layer's decode attention, of a step or of a graph that hasn't run: a kernel accepts or refuses it.

    Attributes:
        dtypes: Of all numbers that it reads, but codes.
        quantizer: Reads the low-bit tokens; None where there are none.
        key_dim: Elements of a query.
        value_dim: Elements of a cached value.
        lanes: Lanes.
        num_queries: Queries of all lanes that share a kv head.
        expands: Keys and values are computed from a latent (`DecodeInputs.expand`).
        aggregation: See `DecodeInputs`.
        cpu_reads: Only the CPU can read the pairs that the step needs (`DecodeInputs.originals`): values are chosen
            apart from keys, or the device can't read the host's rows.
    """

    dtypes: frozenset[torch.dtype]
    quantizer: Quantizer | None
    key_dim: int
    value_dim: int
    lanes: int
    num_queries: int
    expands: bool
    aggregation: str
    cpu_reads: bool = False


@dataclass(slots=True, kw_only=True)
class LaneInputs:
    """The graph's inputs of one attention of a step: `lanes` queries a batch row, and their own pairs.

    Attributes:
        query: `[lanes, batch, num_heads, 1, key_dim]`.
        key: The lanes' own keys, `[lanes, batch, num_kv_heads, 1, key_dim]`.
        value: The lanes' own values, `[lanes, batch, num_kv_heads, 1, value_dim]`.
        scale: Factor on the products of query and keys.
        independent_lanes: Each lane sees its own pair only (pre-decode). Else lane 1 also sees lane 0's (Alg. 3).
        softcap: Scaled products s become `softcap * tanh(s / softcap)`; None where they stay as they are.
        sinks: `[num_heads]`, one more score in the softmax that has no value; None where there are none.
        expand: Of cached keys and values `[batch, num_kv_heads, tokens, dim]`, the keys and values that attention
            reads, with as many heads as it likes: multi-head latent attention. `key_dim` and `value_dim` of key and
            value are then those of the cache; query and output have their own. None where the cache is read as it is.
        key_mask: bool `[batch, num_quantized + window_len]`, True where a token is real; None where all are.
        visible: bool `[lanes, batch, num_quantized + window_len + lanes]`: which stored tokens and which lanes' own
            pairs each lane sees, in place of `key_mask` and the lanes' rule: of a window, which moves from lane to
            lane, and of steps that read the model's masks. None elsewhere.
        bias: Added to the scores, `[lanes, batch or 1, num_heads or 1, num_quantized + window_len + lanes]`: the
            stored tokens' and each lane's own; None where there is none.
        scored_lanes: Of how many of the last lanes the selection scores are wanted; None for all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    independent_lanes: bool
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    expand: Expand | None = None
    key_mask: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scored_lanes: int | None = None

    def lane_inputs(self) -> dict[str, Any]:
        """These attributes alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(LaneInputs)}


@dataclass(slots=True, kw_only=True)
class DecodeInputs(LaneInputs):
    """One layer's decode attention: queries against the cache in its three tiers.

    Attributes:
        quantizer: Reads the planes.
        key_planes: The low-bit keys of the `num_quantized` oldest tokens.
        value_planes: The low-bit values.
        num_quantized: Tokens in the planes.
        window_rows: 16-bit keys and values of the newest tokens, `[batch, num_kv_heads, room, dim]` each: of these the
            first `window_len` rows.
        window_len: How many they are.
        staged_rows: 16-bit pairs that replace low-bit ones, key and value side by side: prefetched ones, then sinks,
            `[batch, num_kv_heads, top_k + sink_tokens, key_dim + value_dim]`, or values alone, `[..., value_dim]`,
            where the planes hold keys exactly; None where nothing is staged.
        staged_indices: Their token indices, int32 `[batch, num_kv_heads, top_k + sink_tokens]`, -1 where a slot is
            empty, no token twice.
        aggregation: How the selection scores of the query heads that share a kv head become one: a name in
            `specache_fx.runtime.select.AGGREGATIONS`.
        originals: Pairs with a large share of lane 0's attention are read from there; None where none are.
    """

    quantizer: Quantizer
    key_planes: Planes
    value_planes: Planes
    num_quantized: int
    window_rows: tuple[torch.Tensor, torch.Tensor]
    window_len: int
    staged_rows: torch.Tensor | None = None
    staged_indices: torch.Tensor | None = None
    aggregation: str = "mean"
    originals: Originals | None = None

    @property
    def window_key(self) -> torch.Tensor:
        """The newest keys, `[batch, num_kv_heads, window_len, key_dim]`; a view."""
        return self.window_rows[0].narrow(2, 0, self.window_len)

    @property
    def window_value(self) -> torch.Tensor:
        """The newest values, `[batch, num_kv_heads, window_len, value_dim]`; a view."""
        return self.window_rows[1].narrow(2, 0, self.window_len)

    @property
    def form(self) -> LayerForm:
        """Of this step."""
        numbers = [self.query, self.key, self.value, *self.window_rows]
        numbers += [] if self.staged_rows is None else [self.staged_rows]
        numbers += [*self.key_planes, *self.value_planes] if self.num_quantized else []
        lanes, _, num_heads, _, key_dim = self.query.shape
        return LayerForm(
            dtypes=frozenset(x.dtype for x in numbers if x.is_floating_point()),
            quantizer=self.quantizer if self.num_quantized else None,
            key_dim=key_dim,
            value_dim=self.value.shape[4],
            lanes=lanes,
            num_queries=lanes * num_heads // self.key.shape[2],
            expands=self.expand is not None,
            aggregation=self.aggregation,
            cpu_reads=self.originals is not None
            and (self.originals.value_share > 0 or self.originals.table is None),
        )

    @property
    def num_scored(self) -> int:
        """Lanes whose selection scores are wanted."""
        return self.query.shape[0] if self.scored_lanes is None else self.scored_lanes


class Kernel(ABC):
    """A way of computing decode attention. `reference` defines the answer; every other one must agree with it."""

    name: ClassVar[str]
    _others: Kernel | None = None

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Say why this kernel can't run on `device`, or None if it can: as ATen does, by default."""
        return None

    def misfit(self, form: LayerForm) -> str | None:
        """Say why this kernel can't compute a layer of that form, or None if it can: by default each."""
        return None

    def or_else(self, others: Kernel) -> Self:
        """The kernel "auto": this one, and `others` for the layers that it can't compute. By itself it refuses them."""
        both = copy.copy(self)
        both._others = others
        return both

    def attention(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with every lane. If others compute a layer in its place, and that is slow, a warning says so once.

        Raises:
            HostMemoryError: If there is no memory to work in.
            KernelUnavailableError: If it can't compute this layer, and nobody else is to.

        Returns:
            The output, `[lanes, batch, num_heads, 1, value_dim]` of the query's dtype, and the selection scores,
            float32 `[num_scored, batch, num_kv_heads, num_quantized + window_len + 1]`: softmax probabilities of the
            stored tokens and of lane 0's own, made one over the query heads of the group as `aggregation` says, -1
            where a token is padding or not `visible`. Tokens of the window count: appending lane 0's pair may push them
            out of it.
        """
        form = inputs.form
        if (reason := self.misfit(form)) is None:
            return self._attend(inputs)
        if self._others is None:
            raise refuse(self.name, reason)
        if self._others.misfit(form) is not None:
            warn_once(
                _log,
                f"Attention will be slow: kernel={self.name!r} can't compute a layer of this model ({reason}), so"
                " kernel='reference' takes its place.",
            )
        return self._others.attention(inputs)

    @abstractmethod
    def _attend(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attention`, of a layer that it can compute."""


def listed(dtypes: frozenset[torch.dtype]) -> str:
    """Names of dtypes, for a message."""
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def refuse(name: str, reason: str) -> KernelUnavailableError:
    """The error of a kernel that was asked for by name and can't compute a layer, for `reason`."""
    return KernelUnavailableError(
        f"kernel={name!r} can't compute a layer of this model: {reason}. Use kernel='auto'."
    )
