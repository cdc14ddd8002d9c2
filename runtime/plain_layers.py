"""Layers whose decode step is C++ alone, on the CPU: those whose step differs from the last in its length alone.

What Python does between two products of weights is slow: they have read so much that its own memory is cold. So C++ is
told of all layers before the graph runs, and asked afterwards which of them have run. In between `specache::layer_step`
attends, selects, appends and starts the next copy; it has none to wait for. The two steps around a group that fills,
and all that is out of the ordinary, go by the operators one by one. The answers are the same bits, but
for the last one of selection scores that both lanes have a share in (`DecodeStep.shares`).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Self

import torch

from specache_fx.runtime import native
from specache_fx.runtime.copy_engine import CopyEngine
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.kernels.cpu.abi import InputsC, StepC
from specache_fx.runtime.kernels.cpu.prepared import Prepared
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.native import copies, graph_ops
from specache_fx.runtime.session import Session

_MEMORY = "plain"  # in `LayerCache.kernel_memory`, which ends with what `Prepared` is of


class PlainLayer:
    """A layer's arguments, kept from step to step.

    Args:
        kernel: The session's.
        prepared: What it has kept of the layer; steady.
        engine: The session's.
        layer: Its index.
        functions: `native.addresses()`.
    """

    def __init__(
        self,
        kernel: CpuKernel,
        prepared: Prepared,
        engine: CopyEngine,
        layer: int,
        functions: tuple[int, int],
    ) -> None:
        self.prepared = prepared
        wanted = engine.wanted(layer)
        self._rest = StepC(wanted.shape[2], wanted.data_ptr(), functions[0], None, functions[1])
        (lanes, batch, num_heads, _, key_dim), (_, _, num_kv_heads, _, _), (*_, value_dim) = prepared.shapes
        inputs = prepared.arguments
        names = {"query": "query", "key": "own_key", "value": "own_value", "sinks": "sinks", "out": "out"}
        fields = {
            name: ctypes.addressof(inputs) + getattr(InputsC, field).offset for name, field in names.items()
        }
        self.c = graph_ops.LayerC(
            *(0, lanes, batch, num_heads, num_kv_heads, key_dim, value_dim, inputs.dtype),
            *(prepared.scale, prepared.softcap or 0.0),
            **fields,
            step=kernel.step_address,
            inputs=ctypes.addressof(inputs),
            rest=ctypes.addressof(self._rest),
            stage=copies.address(),
        )
        self.address = ctypes.addressof(self.c)
        self._scores = batch * num_kv_heads

    def num_scores(self, kv_len: int, all_lanes: bool) -> int:
        """How many numbers a step's selection scores are."""
        return (self.c.lanes if all_lanes else 1) * self._scores * (kv_len + 1)

    def get_ready(
        self,
        wanted_rows: copies.StageArguments,
        window_len: int,
        threads: int,
        scores: int,
        counts: int | None,
        shares: int | None,
    ) -> None:
        """Fill in what differs from step to step.

        Args:
            wanted_rows: What brings the pairs that the step chooses.
            window_len: Tokens in the window; there is room for one more.
            threads: Of PyTorch.
            scores: Address of memory to work in: float32, `num_scores` of them or more.
            counts: Address of `Metrics.step_counts`; None for not to count.
            shares: Address of `DecodeStep.shares`; None for none.
        """
        inputs = self.prepared.arguments
        inputs.window_len, inputs.independent_lanes = window_len, False
        inputs.scores, inputs.shares = scores, shares
        inputs.scored_lanes = 1 if counts is None and shares is None else self.c.lanes
        inputs.threads = threads
        self._rest.counts = counts
        self.c.wanted_rows = ctypes.addressof(wanted_rows.c)
        self.c.has_run = 0


_told = threading.local()  # what C++ was told in this thread, which must stay until it is told otherwise


def forget() -> None:
    """Have C++ run no layer that it was told of in this thread: also what an interrupted step has left."""
    if (told := getattr(_told, "memory", None)) is not None:
        told[-1].specache_get_ready(None)
        _told.memory = None


class PlainLayers:
    """Those of a session, from before the graph runs until after.

    Attributes:
        num_run: How many C++ has run.
    """

    @classmethod
    def get_ready(cls, session: Session, shares: torch.Tensor | None) -> Self | None:
        """Tell C++ of the layers that it may run next on this thread; None where there are none.

        Args:
            session: Whose.
            shares: See `DecodeStep`; they stay until `end`.

        Raises:
            Exception: What a layer's last copy failed with.
        """
        engine, kernel = session.engine, session.kernel
        if engine is None or not isinstance(kernel, CpuKernel):
            return None
        functions, library = native.addresses(), graph_ops.load()
        if functions is None or library is None:
            return None
        layers = {
            i: plain
            for i, cache in enumerate(session.layers)
            if isinstance(cache, LayerCache)
            and (plain := _plain(kernel, cache, engine, i, functions)) is not None
        }
        return cls(session, layers, library, shares) if layers else None

    def __init__(
        self,
        session: Session,
        layers: dict[int, PlainLayer],
        library: ctypes.CDLL,
        shares: torch.Tensor | None,
    ) -> None:
        self.num_run = 0
        self._session, self._layers = session, layers
        engine = session.engine
        assert engine is not None
        counts = None
        if session.config.track_hit_rates:
            assert session.batch is not None
            counts = session.metrics.step_counts(session.batch).data_ptr()
        # One after the other: they share the memory.
        kv_len = max(session.layers[i].kv_len for i in layers)
        size = max(
            plain.num_scores(kv_len, counts is not None or shares is not None) for plain in layers.values()
        )
        self._scores = session.score_buffers.take_flat(size)
        threads, scores = torch.get_num_threads(), self._scores.data_ptr()
        pointers = (ctypes.c_void_p * len(session.layers))()
        for i, plain in layers.items():
            cache = session.layers[i]
            wanted_rows = engine.in_memory(i)
            assert isinstance(cache, LayerCache) and wanted_rows is not None
            plain.get_ready(
                wanted_rows,
                cache.window_len,
                threads,
                scores,
                counts,
                None if shares is None else shares.data_ptr(),
            )
            pointers[i] = plain.address
        told = graph_ops.LayersC(session.number, len(pointers), ctypes.addressof(pointers))
        _told.memory = told, pointers, layers, library
        library.specache_get_ready(ctypes.addressof(told))

    def end(self) -> None:
        """Tell the session what has been done, also where the graph failed midway."""
        forget()
        session, engine = self._session, self._session.engine
        session.score_buffers.give_back(self._scores)
        for i, plain in self._layers.items():
            if not plain.c.has_run:
                continue
            self.num_run += 1
            cache = session.layers[i]
            assert isinstance(cache, LayerCache) and engine is not None
            cache.was_appended()
            engine.was_copied(i, plain.c.failed)


def _plain(
    kernel: CpuKernel, cache: LayerCache, engine: CopyEngine, layer: int, functions: tuple[int, int]
) -> PlainLayer | None:
    """A layer whose next step may be plain; None where it may not."""
    prepared = cache.kernel_memory.get(CpuKernel.name)
    if not isinstance(prepared, Prepared) or not prepared.is_steady or not cache.has_room:
        return None
    if engine.in_memory(layer) is None:  # a thread's copies are not C++'s to start, nor to wait for
        return None
    if engine.wait(layer)[0] is not prepared.staged_rows:
        return None
    plain = cache.kernel_memory.get(_MEMORY)
    if not isinstance(plain, PlainLayer) or plain.prepared is not prepared:
        plain = cache.kernel_memory[_MEMORY] = PlainLayer(kernel, prepared, engine, layer, functions)
    return plain
