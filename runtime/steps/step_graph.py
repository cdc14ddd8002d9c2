"""`StepGraph`: the decode step of one session, captured once and replayed.

    step 1 of a form   runs: kernels compile and are tuned, memory is allocated
    step 2             is captured, and replayed
    step 3 ...         inputs are copied to where the graph reads them; it is replayed

On a GPU it is a CUDA graph, of plain steps (`DeviceSteps.is_plain`). All others run as they are, on the same tensors,
and leave the captured one valid: a group fills, pre-decode, refetch, masks that move, tracing. On the CPU it is a list
of C++ calls, of any step: they read what is to be done from `state` (`CpuRecorder`).

A capture is void when a tensor that it reads has moved: a weight, on a GPU also an arena that grows, or a table. The
second call of an unrecorded form captures that form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from specache_fx._log import warn_once
from specache_fx.errors import first_line
from specache_fx.runtime.native import cuda_streams
from specache_fx.runtime.steps.fused_steps import FusedSteps

_log = logging.getLogger(__name__)

GraphFunction = Callable[..., Sequence[Any]]
Run = Callable[[], Sequence[Any]]
Replay = Callable[[], None]


class NotCapturedError(Exception):
    """A step can't be captured, and nothing of it has run; the message says why."""


class Recorder(Protocol):
    """Records a step's launches."""

    def record(self, run: Run, compiled: GraphFunction) -> tuple[Sequence[Any], Replay | None]:
        """Have `run`'s launches take place once, and note them.

        Args:
            run: Runs a step. The caller keeps all that it reads, where it is.
            compiled: Its graph, which `run` calls.

        Returns:
            Its results, which each replay writes anew, and its replay; None where nothing can replay it.

        Raises:
            NotCapturedError: See there.
        """


class CudaRecorder:
    """Captures CUDA graphs; those of one session share a pool of memory.

    Args:
        device: Where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = cuda_streams.lend(self, device, cuda_streams.COMPUTES)
        # It holds the pool until the next one does: torch takes no pool twice that no graph holds.
        self._newest: torch.cuda.CUDAGraph | None = None
        self._pool: Any = None

    def record(self, run: Run, compiled: GraphFunction) -> tuple[Sequence[Any], Replay]:
        """See `Recorder`."""
        try:
            results = self._if_it_fits(run)
            if results is None:  # the allocator gives a capture nothing of what it keeps
                cuda_streams.empty_cache(self._device)
                results = self._captured(run)
        except Exception as error:
            raise NotCapturedError(first_line(error)) from error
        assert self._newest is not None
        self._newest.replay()
        return results, self._newest.replay

    def _if_it_fits(self, run: Run) -> Sequence[Any] | None:
        """As `_captured`; None where memory ran out. No traceback holds a tensor then."""
        try:
            return self._captured(run)
        except torch.OutOfMemoryError:
            return None

    def _captured(self, run: Run) -> Sequence[Any]:
        graph = torch.cuda.CUDAGraph()
        if self._newest is None:
            self._pool = torch.cuda.graph_pool_handle()
        results = cuda_streams.capture(graph, self._stream, self._pool, run)
        self._newest = graph
        return results


def recorder_of(device: torch.device) -> Recorder | None:
    """The capture of plain steps on `device`; None off the GPU, where `CpuRecorder` notes steps in C++ alone."""
    return CudaRecorder(device) if device.type == "cuda" else None


class StepGraph:
    """The captured step of one session.

    Args:
        recorder: Notes it.

    Attributes:
        replays: Steps that were replayed.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.replays = 0
        self._recorder: Recorder | None = recorder
        self._key: tuple[Any, ...] | None = None  # of the captured step
        self._ran: tuple[Any, ...] | None = None  # of the last step that ran without a graph
        self._inputs: list[torch.Tensor] = []
        self._results: Sequence[Any] = ()
        self._replay: Replay | None = None

    @property
    def records(self) -> bool:
        """Whether steps are captured: no capture has failed."""
        return self._recorder is not None

    def run(
        self,
        compiled: GraphFunction,
        inputs: Sequence[torch.Tensor],
        moving: Sequence[int],
        state: torch.Tensor,
        steps: FusedSteps,
    ) -> Sequence[Any]:
        """Run a step, of which `steps` was told.

        Args:
            compiled: The decode graph; of two steps it is the same object where shapes are.
            inputs: Its inputs, without `state`.
            moving: Which of them may lie elsewhere in each step; the others are weights.
            state: The session's.
            steps: The session's.

        Returns:
            The graph's results. The next run may overwrite them.
        """
        if self._recorder is None or any(inputs[i].device != steps.device for i in moving):
            return compiled(*inputs, state)
        still = list(map(torch.Tensor.data_ptr, inputs))  # hundreds: the loop is C
        for i in moving:
            still[i] = 0
        key = (compiled, steps.form, tuple(still))
        if key != self._key:
            if key == self._ran and not any(_is_expanded(inputs[i]) for i in moving):
                self._drop()
                return self._capture(key, compiled, inputs, moving, state, steps)
            self._ran = key
            return compiled(*inputs, state)
        for kept, i in zip(self._inputs, moving, strict=True):
            kept.copy_(inputs[i])
        assert self._replay is not None
        self._replay()
        self.replays += 1
        steps.replayed()
        return self._results

    def _capture(
        self,
        key: tuple[Any, ...],
        compiled: GraphFunction,
        inputs: Sequence[torch.Tensor],
        moving: Sequence[int],
        state: torch.Tensor,
        steps: FusedSteps,
    ) -> Sequence[Any]:
        assert self._recorder is not None
        kept = list(inputs)
        for i in moving:
            kept[i] = torch.empty_strided(
                inputs[i].shape, inputs[i].stride(), dtype=inputs[i].dtype, device=inputs[i].device
            ).copy_(inputs[i])  # where it is compiled for gaps, it wants them

        def run() -> Sequence[Any]:
            steps.restart()  # an attempt may have failed
            results = compiled(*kept, state)
            steps.join()  # a captured graph ends on the stream where it began
            return results

        try:
            results, replay = self._recorder.record(run, compiled)
        except NotCapturedError as error:
            self._recorder = None
            warn_once(
                _log,
                f"This model's decode step can't be captured as a CUDA graph, and runs launch by launch: {error}."
                " replay=False captures none, and says nothing.",
            )
            steps.restart()
            return compiled(*inputs, state)
        if replay is None:
            self._recorder = None
            return results
        self._key, self._inputs = key, [kept[i] for i in moving]
        self._results, self._replay = results, replay
        self.replays += 1
        return results

    def _drop(self) -> None:
        self._key, self._replay, self._inputs, self._results = None, None, [], ()

    def close(self) -> None:
        """Give the memory of captures back."""
        self._drop()
        self._recorder = self._ran = None


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one in memory: such a tensor can't be written to."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
