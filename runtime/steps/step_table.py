"""`StepTable`: addresses and lengths of a session's layers for C++, in the tensor that graphs have as `state`.

`specache::layer_step` (`csrc/layer_step.h`) does all of a layer's decode step on the CPU. No Python runs between two
products of weights, for these evict the interpreter from the processor's caches. The table says where a layer's tensors
are, once for each arena, and how long they are, once a step. The operator reads it and nothing else.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping
from typing import ClassVar

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.kernels import Kernel
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.kernels.cpu.abi import Addresses, InputsC
from specache_fx.runtime.kernels.cpu.arguments import describe_bias, describe_cache, describe_originals
from specache_fx.runtime.layers.layer_state import LayerState
from specache_fx.runtime.layers.layout import LayerTensors
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.quant import Quantizer
from specache_fx.runtime.steps.fused_steps import FusedSteps, StepFacts
from specache_fx.runtime.tracing import add_span, is_recording
from specache_fx.runtime.transfer import CpuTransfer, Transfer

_i64, _f64, _address = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
# Of a layer's step, in the order of its `times`: names and tracks of spans.
_PARTS = (("attention", "compute"), ("select", "compute"), ("append", "compute"), ("prefetch", "copies"))
_PARTS_SELECTED_FIRST = (
    *(("attention", "compute"), ("select", "compute")),
    *(("prefetch", "copies"), ("attention", "compute")),
)
# Counters of C++, in the order of `CpuTransfer.count_copies`.
_COUNTS = ("fetched_rows", "fetched_bytes", "kept_rows", "kept_bytes", "copy_seconds")
_WORD_BYTES = 8
_NOT_TO_RUN, _TO_RUN, _HAS_RUN = range(3)  # `Status` of layer_step.h


class SessionC(ctypes.Structure):
    """`SpecacheSession` of layer_step.h."""

    _fields_ = (
        *((name, _i64) for name in ("number", "num_selectable", "scored_lanes", "threads")),
        *((name, _i64) for name in ("predecodes", "written", "stages", "is_timed", "selects_first")),
        *((name, _address) for name in ("scores", "key_mask", "shares", "missed", "counts", "attention")),
        *((name, _i64) for name in ("failed", "fetched_rows", "fetched_bytes", "kept_rows", "kept_bytes")),
        ("copy_seconds", _f64),
    )


class LayerC(ctypes.Structure):
    """`SpecacheLayer` of layer_step.h."""

    _fields_ = (
        *((name, _i64) for name in ("status", "selects", "num_quantized", "window_len")),
        ("times", _f64 * (len(_PARTS) + 1)),
        ("inputs", InputsC),
        ("wanted", _address),
    )


def empty_state(num_layers: int) -> torch.Tensor:
    """The `state` of a session with so many layers, int64, of which nothing is known yet."""
    nbytes = ctypes.sizeof(SessionC) + num_layers * ctypes.sizeof(LayerC)
    return torch.zeros(nbytes // _WORD_BYTES, dtype=torch.int64, device="cpu")


class StepTable(FusedSteps):
    """The table of one session.

    Args:
        number: Of the session: the first element, by which operators in Python find it.
        num_layers: Layers of the session.

    Attributes:
        state: int64 on the CPU.
        serves: Whether C++ runs layers' steps; known once `open` was called.
    """

    kernel = "cpu"
    reads_masks: ClassVar[bool] = False
    device = torch.device("cpu")
    form = ()  # C++ reads all that a step differs by from `state`

    def __init__(self, number: int, num_layers: int) -> None:
        self.state = empty_state(num_layers)
        address = self.state.data_ptr()
        self._session = SessionC.from_address(address)
        self._layers = (LayerC * num_layers).from_address(address + ctypes.sizeof(SessionC))
        self._by_layer = [
            (layer, layer.inputs) for layer in self._layers
        ]  # ctypes makes an object at each look
        self._session.number = number
        self.serves = False
        self._transfer: CpuTransfer | None = None
        self._host: HostCache | None = None
        self._rows: dict[int, torch.Tensor] = {}  # by layer, the host's table
        # By layer, the tensors that its addresses are of. They are the layer's: a table keeps no memory of others.
        self._described: dict[int, weakref.ref[LayerTensors]] = {}
        self._scores = torch.empty(0, device="cpu")
        self._kept: tuple[object, ...] = ()  # tensors that the step under way reads by address

    def open(
        self,
        kernel: Kernel,
        quantizer: Quantizer,
        transfer: Transfer | None,
        host: HostCache | None,
        aggregation: str,
        selects_first: bool,
    ) -> None:
        """Find the operator and the attention that it calls; where one is missing, `serves` stays False.

        Args:
            kernel: The session's.
            quantizer: The session's.
            transfer: The session's; None where nothing is staged.
            host: The session's; None where the codes are all there is.
            aggregation: See `DecodeInputs`.
            selects_first: A step's own scores choose its pairs: lookahead "none".
        """
        if not isinstance(kernel, CpuKernel) or quantizer.code_form is None:
            return
        if transfer is not None and not isinstance(transfer, CpuTransfer):
            return
        library = graph_ops.load()
        if library is None:
            return
        assert library.specache_session_size() == ctypes.sizeof(SessionC)
        assert library.specache_layer_size() == ctypes.sizeof(LayerC)
        self._session.attention, self._session.selects_first = kernel.address, selects_first
        self._transfer, self._host, self._quantizer, self._aggregation = (
            transfer,
            host,
            quantizer,
            aggregation,
        )
        self.serves = True

    def write_facts(self, layers: Mapping[int, LayerState], facts: StepFacts) -> None:
        """See `FusedSteps`."""
        session, host, at = self._session, self._host, Addresses()
        for i, cache in layers.items():
            described, (layer, inputs) = self._described.get(i), self._by_layer[i]
            if described is None or described() is not cache.tensors:
                self._describe(i, cache)
            layer.num_quantized, layer.window_len = cache.num_quantized, cache.window_len
            inputs.visible = at.of(facts.visible.get(facts.first_layers[i]))
            describe_bias(inputs, at, facts.biases.get(i))
            if host is not None and inputs.host and inputs.host_length != host.length(i):
                self._describe_host(i, host)
        kv_len = facts.kv_len
        session.num_selectable = facts.num_selectable
        # The rows of a group that this step pushes out of the window are not on the host yet.
        session.stages = facts.num_selectable == facts.num_quantized
        session.predecodes, session.written = facts.predecodes, facts.written
        session.scored_lanes = facts.scored_lanes
        session.threads, session.is_timed, session.failed = torch.get_num_threads(), is_recording(), 0
        session.key_mask, session.shares, session.missed = map(
            at.of, (facts.key_mask.grow(kv_len), facts.shares, facts.missed)
        )
        session.counts = Addresses(in_place=True).of(facts.counts)  # is written to; the metrics keep it
        most = max(math.prod(cache.tensors.window[0].shape[:2]) for cache in layers.values())
        session.scores = self._room_for_scores(facts.scored_lanes * most * (kv_len + 1))
        self._kept = (at,)
        for i in layers:
            self._by_layer[i][0].status = _TO_RUN

    def _describe(self, index: int, cache: LayerState) -> None:
        """Say where a layer's tensors are."""
        layer, transfer, host, staged = self._layers[index], self._transfer, self._host, None
        # The arena's, the host's and the transfer's tensors outlive the table's use.
        at = Addresses(in_place=True)
        layer.selects = transfer is not None and not cache.is_exact
        if transfer is not None and not cache.is_exact:
            staging = transfer.staging(index)
            layer.wanted, staged = staging.wanted.data_ptr(), (staging.rows, staging.indices)
        elif cache.sinks is not None:
            staged = cache.sinks.rows, cache.sinks.indices
        describe_originals(layer.inputs, at, cache.originals)
        if host is not None and not cache.is_exact:
            self._describe_host(index, host)
        describe_cache(
            layer.inputs,
            at,
            None if cache.is_exact else self._quantizer,
            (cache.tensors.key_planes, cache.tensors.value_planes),
            cache.tensors.window,
            staged,
            self._aggregation,
        )
        self._described[index] = weakref.ref(cache.tensors)

    def _describe_host(self, index: int, host: HostCache) -> None:
        """Say where a layer's rows are."""
        inputs, rows = self._layers[index].inputs, host.table(index)
        inputs.host, inputs.host_length = rows.data_ptr(), host.length(index)
        self._rows[index] = rows

    def _room_for_scores(self, size: int) -> int:
        if self._scores.numel() < size:
            # The system gives pieces of a megabyte anew each time, and page faults take time.
            self._scores = torch.empty(size + size // 8, dtype=torch.float32, device="cpu")
        return self._scores.data_ptr()

    def end(self) -> tuple[list[int], bool]:
        """See `FusedSteps`."""
        session, run = self._session, []
        self._kept = ()
        for i, (layer, _) in enumerate(self._by_layer):
            if layer.status == _HAS_RUN:
                run.append(i)
            layer.status = _NOT_TO_RUN
        counts = [getattr(session, name) for name in _COUNTS]
        if self._transfer is not None:
            self._transfer.count_copies(*counts)
        for name in _COUNTS:
            setattr(session, name, 0)
        for i in run if session.is_timed else ():
            layer, parts, absent = self._layers[i], _PARTS, set() if session.stages else {"prefetch"}
            if not layer.selects:
                absent = {"select", "prefetch"}
            elif session.selects_first:
                parts, absent = _PARTS_SELECTED_FIRST, set()
            for at, (name, track) in enumerate(parts):
                if name not in absent:
                    add_span(name, track, layer.times[at], layer.times[at + 1], layer=i)
        return run, not session.stages

    def check(self, error: RuntimeError) -> None:
        """See `FusedSteps`."""
        if self._session.failed == graph_ops.Failure.NO_MEMORY:
            raise HostMemoryError(
                "There is no memory for a layer's decode step: free some, or shorten the context."
            ) from error

    def close(self) -> None:
        """Keep no memory; nothing runs any more."""
        ctypes.memset(ctypes.addressof(self._layers), 0, ctypes.sizeof(self._layers))
        self._transfer, self._host, self.serves = None, None, False
        self._rows.clear()
        self._described.clear()
        self._scores = torch.empty(0, device="cpu")
