"""`DecodeStep`: the effects of a decode graph's ops on a session, in graph order.

    wait_prefetch -> attend -> append -> select -> prefetch        once a layer, or as one (`FusedSteps`)

It lasts for one run of the graph. It holds the values that ops hand on to each other, and this token's masks. The
session holds everything that outlasts the token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from specache_fx.runtime.kernels import Expand
from specache_fx.runtime.layers.layer_state import LayerCall
from specache_fx.runtime.layers.masks import WindowMask
from specache_fx.runtime.select import AGGREGATIONS, select_topk
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.steps.fused_steps import StepFacts

_running: dict[int, DecodeStep] = {}  # by the address of its session's `state`, which runs one at a time


@dataclass
class DecodeStep:
    """One token of a session, or its first one twice (pre-decode, Algorithm 2).

    Attributes:
        session: Whose.
        fused_layers: Layers whose operators the graph calls as one (`fuse_layer_steps`, `FusedSteps`).
        predecoding: Nothing is kept of the token, and no pairs have been prefetched for it.
        biases: By layer that keeps all tokens, the model's bias on its scores: see `DecodeInputs.bias`.
        seen: By layer that keeps all tokens, the keys that each lane sees where the step reads masks: bool `[lanes,
            batch, kv_len + lanes]`, in place of the session's `key_mask`.
        window_masks: By layer that keeps a window, its masks, one a lane, where the model has masks there; None for a
            lane whose mask is unknown: its selection is void.
        expansions: By attention, where keys and values are computed from a latent: see `DecodeInputs.expand`.
        missed: Batch rows that choose pairs, bool `[batch]`; the others keep those that are staged. None for all rows.
        shares: Weight of the speculative token's scores in the selection, float32 `[batch]` from 0 to 1; the output
            token's weigh the rest. None: they are all of it (Algorithm 3).
        lanes: Lanes of its graph.
        writes_next: Lane 1's pairs are written behind lane 0's, and don't count yet (`NextAnswer`). No group fills.
    """

    session: Session
    predecoding: bool = False
    fused_layers: tuple[int, ...] = ()
    biases: dict[int, torch.Tensor] = field(default_factory=dict)
    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    window_masks: dict[int, tuple[WindowMask | None, ...]] = field(default_factory=dict)
    expansions: dict[int, Expand] = field(default_factory=dict)
    missed: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    lanes: int = 1
    writes_next: bool = False
    _scores: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict, init=False)
    # Rows and indices of the layers that have waited: until the prefetch that overwrites them, and no longer.
    _staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)
    # Scores of the output token's own, and the tokens that were staged for it: counted when the next copy is under way.
    _uncounted: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the graph runs: its ops find the step by the session's `state`."""
        session = self.session
        run: list[int] = []
        late = False
        if self.fused_layers:
            self._write_facts()
        _running[session.state.data_ptr()] = self
        try:
            yield
        except RuntimeError as error:
            if session.steps is not None:
                session.steps.check(error)
            raise
        finally:
            _running.pop(session.state.data_ptr(), None)
            if self.fused_layers:
                run, late = self._collect()
        if late:
            self._fill(run)

    def _write_facts(self) -> None:
        """Prepare for the layers that are run as one operator."""
        session, layers = self.session, {i: self.session.layers[i] for i in self.fused_layers}
        assert session.steps is not None and session.batch is not None
        if session.transfer is not None:
            session.transfer.join()  # work beside the step before reads memory that is written now
        for cache in layers.values():
            cache.make_room(1 + self.writes_next)
        first = next(iter(session.tiered.values()))  # they have one length
        kv_len, num_quantized = first.kv_len, first.num_quantized
        selects = session.transfer is not None and num_quantized > 0
        ahead = session.config.lookahead != "none" and not self.predecoding
        counted = session.config.track_hit_rates and ahead and selects
        first_layers, visible, biases = self._first_layers()
        facts = StepFacts(
            kv_len=kv_len,
            num_quantized=num_quantized,
            num_selectable=num_quantized if self.predecoding else first.num_quantized_at(kv_len + 1),
            predecodes=self.predecoding,
            written=0 if self.predecoding else 1 + self.writes_next,
            scored_lanes=2 if self._scores_both else 1,
            key_mask=session.key_mask,
            biases=self.biases | biases,
            first_layers=first_layers,
            visible=visible,
            shares=self.shares,
            missed=self.missed,
            counts=session.metrics.step_counts(session.batch) if counted else None,
        )
        session.steps.write_facts(layers, facts)

    def _first_layers(self) -> tuple[dict[int, int], dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """See `StepFacts.first_layers` and `visible`; and the biases of windows."""
        first_layers: dict[int, int] = {}
        firsts: dict[tuple[Any, ...], int] = {}
        visible: dict[int, torch.Tensor] = {}
        biases: dict[int, torch.Tensor] = {}
        for layer in self.fused_layers:
            cache, window = self.session.layers[layer], self.session.shapes[layer].window
            masks = self.window_masks.get(layer, (None,) * self.lanes)
            seen = self.seen.get(layer)
            form = map(id, (seen,) if window is None else masks)
            first = first_layers[layer] = firsts.setdefault((cache.is_exact, window, *form), layer)
            if first == layer:
                rows, bias = (seen, None) if window is None else cache.masked_rows(masks, self.predecoding)
                visible |= {} if rows is None else {layer: rows}
                biases |= {} if bias is None else {layer: bias}
            elif first in biases:
                biases[layer] = biases[first]
        return first_layers, visible, biases

    def _collect(self) -> tuple[list[int], bool]:
        """Record the layers that ran, also where the graph failed midway; see `FusedSteps.end`."""
        session = self.session
        assert session.steps is not None
        run, late = session.steps.end()
        if not self.predecoding:
            for layer in run:
                session.layers[layer].was_appended()
        return run, late

    def _fill(self, layers: list[int]) -> None:
        """Quantise the group that the step has pushed out of the windows; its rows can be brought from then on."""
        session, transfer = self.session, self.session.transfer
        if transfer is not None:
            transfer.join()
        for layer in filter(session.tiered.__contains__, layers):
            session.tiered[layer].quantize_overflow()
            if transfer is not None and session.config.lookahead != "none":
                transfer.prefetch_wanted(layer)

    @property
    def windows_known(self) -> bool:
        """Whether each lane sees the window keys that its token will see."""
        return all(mask is not None for masks in self.window_masks.values() for mask in masks)

    @property
    def _scores_both(self) -> bool:
        """Whether the first lane's scores are wanted: it has a share, or hit rates need them."""
        return self.session.config.track_hit_rates is not False or self.shares is not None

    def by_operators(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        *form: Any,
    ) -> torch.Tensor:
        """A layer's step, operator by operator: the answer that a whole step has to give. See `attend`."""
        selects = self.session.transfer is not None and layer in self.session.tiered
        first = selects and self.session.config.lookahead == "none"
        if first:
            self.attend(layer, query, key, value, scale, False, *form)
            self.prefetch(layer, self.select(layer))
        if selects:
            self.wait_prefetch(layer)
        out = self.attend(layer, query, key, value, scale, selects, *form)
        self.append(layer, key[0], value[0])
        if selects and not first:
            self.prefetch(layer, self.select(layer))
        return out

    def wait_prefetch(self, layer: int) -> None:
        """Return when the pairs that were prefetched for this layer's attention have arrived."""
        if self.session.transfer is not None and not self.predecoding:
            self._staged[layer] = self.session.transfer.wait(layer)

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
            expansion: Index in `expansions` for latent attention; None for none.

        Returns:
            `[lanes, batch, num_heads, 1, value_dim]`.
        """
        session = self.session
        cache = session.layers[layer]
        if self.writes_next:
            cache.make_room(2)
            cache.write_next(key[1], value[1])
        selects, seen = session.transfer is not None and not cache.is_exact, self.seen.get(layer)
        call = LayerCall(
            query=query,
            key=key,
            value=value,
            scale=scale,
            independent_lanes=self.predecoding,
            softcap=softcap,
            sinks=sinks,
            expand=None if expansion is None else self.expansions[expansion],
            staged=self._staged[layer] if staged and selects and not self.predecoding else None,
            key_mask=session.key_mask.grow(cache.kv_len) if seen is None else None,
            visible=seen,
            bias=self.biases.get(layer),
            # Of the last lane, which selects.
            scored_lanes=0 if not selects else query.shape[0] if self._scores_both else 1,
            window_masks=self.window_masks.get(layer, (None,) * query.shape[0]),
        )
        inputs = cache.inputs(call)
        out, scores = session.kernel.attention(inputs)
        if not selects:
            return out
        if layer in self._scores:  # attentions that share a layer choose together
            joined = AGGREGATIONS[session.config.aggregation].of_attentions
            scores = joined(self._scores[layer][0], scores)
        self._scores[layer] = (scores, session.tiered[layer].num_quantized)
        return out

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the output token's own pair, `[batch, num_kv_heads, 1, dim]` each. Pre-decode keeps nothing."""
        if not self.predecoding:
            self.session.layers[layer].append(key, value)

    def select(self, layer: int) -> torch.Tensor:
        """The pairs to prefetch: the top-k by the lanes' scores (see `shares`).

        Int32 `[batch, num_kv_heads, top_k]`, -1 fills.

        They are chosen among the tokens that are quantised now, after this step's append. So a group that it has just
        pushed out of the window can be fetched for the next step.
        """
        session, config = self.session, self.session.config
        scores, quantized_before = self._scores.pop(layer)
        cache = session.tiered[layer]
        if cache.sinks is not None:
            scores = cache.sinks.hide(scores)
        chooses = scores[-1]
        if self.shares is not None:
            chooses = torch.lerp(scores[0], chooses, self.shares[:, None, None])
        chosen = select_topk(chooses[..., : cache.num_quantized], config.top_k)
        ahead = config.lookahead != "none" and not self.predecoding
        if config.track_hit_rates and ahead and session.transfer is not None and quantized_before:
            # The copy overwrites which tokens are staged.
            self._uncounted[layer] = scores[0][..., :quantized_before], self._staged[layer][1].clone()
        if self.missed is not None and session.transfer is not None:
            chosen = torch.where(self.missed[:, None, None], chosen, session.transfer.wait(layer)[1])
        return chosen

    def prefetch(self, layer: int, indices: torch.Tensor) -> None:
        """Start bringing the 16-bit pairs of `indices` to the device, beside its next computation."""
        assert self.session.transfer is not None
        self._staged.pop(layer, None)
        self.session.transfer.prefetch(layer, indices)
        if (uncounted := self._uncounted.pop(layer, None)) is not None:
            needed, staged = uncounted
            self.session.metrics.count_topk(needed, self.session.config.top_k, staged)


def by_state(state: torch.Tensor) -> DecodeStep:
    """The step that an op's `state` names."""
    return _running[state.data_ptr()]
