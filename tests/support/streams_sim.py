"""CUDA's streams, events, captures and allocator, simulated on the CPU: the GPU's transfers run in the interpreter.

Each stream has a vector clock, and so has each thread of the host. Operators and launches run at once, in program
order, and note which bytes they read and write. Work that no event orders may run the other way round on a GPU. `World`
finds:

    race       two streams touch the same bytes, one of them writes, and nothing orders them
    lifetime   memory goes back while a stream other than its own, or for pages of the host any, may still use it
    stale      a stream waits for an event that only a capture knows
    foreign    a thread launches onto a stream that another thread captures

A capture follows CUDA's rules: nothing runs, and each replay runs all of it on the same memory. What CUDA refuses is
refused with its words:

    isolation  a captured stream waits for work that was not captured
    unjoined   a stream was drawn into the capture, and the capture's own did not wait for it
    sync       a wait for the device, by any thread, or a copy to the host
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tape import _SYNCS, _caller
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specache_fx.runtime.host import host_blocks, host_cache
from specache_fx.runtime.native import cuda_streams, cudart
from specache_fx.runtime.session import metrics as metrics_of
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.transfer import Staging, worker

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
CUDA = torch.device("cuda", 0)
Clock = dict[int, int]

# What each kernel writes; all its other tensors are read.
WRITES = {
    "partial_attention": ("part_max", "part_sum", "part_out"),
    "rotate_queries": ("out",),
    "merge_parts": ("out", "norm", "kept_query", "kept_key", "window_key", "window_value"),
    "selection_scores": ("out",),
    "_best_of_blocks": ("out",),
    "_count_overlap": ("counts",),
    "plan_slots": ("missing", "source", "counters"),
    "copy_rows": ("rows", "staged"),
    "tell_lengths": ("lengths",),
    "pack_keys": ("codes", "scale", "zero"),
    "pack_values": ("codes", "scale", "zero"),
}
_GIVES_NO_VALUES = ("aten::empty", "aten::new_empty", "aten::detach", "aten::resize_")


def later(clock: Clock, other: Clock) -> None:
    """Have what comes next in `clock` be behind all that `other` knows."""
    for key, tick in other.items():
        clock[key] = max(clock.get(key, 0), tick)


class Stream:
    """`torch.cuda.Stream`."""

    made = 0

    def __init__(self, world: World, name: str, device: torch.device = CUDA, priority: int = 0) -> None:
        Stream.made += 1
        self.world, self.name, self.id = world, name, Stream.made
        self.clock: Clock = {self.id: 0}
        self.graph: Graph | None = None  # that captures it
        self.device, self.priority, self.cuda_stream = device, priority, self

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.world)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        if self.graph is not None:
            self.world.refuse("sync: a stream that is captured is waited for")
        later(self.world.host, self.clock)


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: Clock | None = None
        self.graph: Graph | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.world.current
        later(stream.clock, self.world.host)
        self.clock, self.graph = dict(stream.clock), stream.graph
        if stream.graph is not None:
            stream.graph.calls.append(("record", stream, self))

    def wait(self, stream: Stream) -> None:
        if self.clock is None:
            return
        if stream.graph is not None and self.graph is not stream.graph:
            self.world.refuse(f"isolation: {stream.name} is captured and waits for work that is not")
        if stream.graph is None and self.graph is not None:
            if self.graph is not self.world.capture:
                self.world.note(f"stale: {stream.name} waits for an event that only a capture knows")
                return
            self.graph.draw(stream)
        later(stream.clock, self.clock)
        if stream.graph is not None:
            stream.graph.calls.append(("wait", stream, self))

    def synchronize(self) -> None:
        if self.graph is not None:
            self.world.refuse("sync: an event of a capture is waited for")
        later(self.world.host, self.clock or {})


class Graph:
    """`torch.cuda.CUDAGraph`, with the allocator's notes of captures (`World.recording`, `World.pools`)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[tuple[Any, ...]] = []
        self.streams: list[Stream] = []  # the first is where it began
        self.joined: Clock = {}
        self.thread = 0
        self.invalid = ""
        self.ended = False
        self.pool: Any = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        world = self.world
        assert world.current is not world.main, "captures run on a stream of their own"
        assert world.current.device.index == world.device
        assert capture_error_mode == "thread_local"
        if pool in world.pools and not world.pools[pool]:
            raise RuntimeError(
                "it->second->use_count > 0 INTERNAL ASSERT FAILED"
            )  # of a pool that was given back
        world.recording.append(pool)
        world.pools[pool] += 1
        self.pool, self.thread = pool, threading.get_ident()
        self.begin(world.current)

    def begin(self, stream: Stream) -> None:
        """As `cudaStreamBeginCapture`."""
        assert self.world.capture is None, "two captures at once"
        self.world.capture, self.invalid = self, ""
        self.calls, self.streams = [], []
        self.draw(stream)

    def draw(self, stream: Stream) -> None:
        """Have the capture take what is launched on `stream` from now on."""
        stream.graph = self
        self.streams.append(stream)

    def capture_end(self) -> None:
        world, origin = self.world, self.world.current
        if origin.graph is not self:
            raise RuntimeError("CUDA error: operation not permitted in this state")
        late = [other for other in self.streams if origin.clock.get(other.id, 0) < other.clock[other.id]]
        if late and not self.invalid:
            self.invalid = f"unjoined: {late[0].name} at the end of the capture"
        for stream in self.streams:
            stream.graph = None
        world.capture = None
        if self.invalid:  # torch goes no further
            world.failed = self
            raise RuntimeError(f"CUDA error: {self.invalid}")
        world.recording.remove(self.pool)
        self.ended = True

    def reset(self) -> None:
        if self.ended:
            self.world.pools[self.pool] -= 1
        self.calls, self.ended = [], False

    def __del__(self) -> None:
        self.reset()

    def replay(self) -> None:
        assert self.ended
        world = self.world
        world.replays += 1
        runs: dict[int, Stream] = {self.streams[0].id: world.current}
        clocks: dict[int, Clock] = {}
        for kind, stream, *call in self.calls:
            if stream.id not in runs:
                runs[stream.id] = Stream(world, f"{stream.name} in replay {world.replays}")
                world.streams.append(runs[stream.id])
            at = runs[stream.id]
            if kind == "record":
                clocks[id(call[0])] = dict(at.clock)
            elif kind == "wait":
                later(at.clock, clocks.get(id(call[0]), {}))
            else:
                with world.on(at):
                    (world.run_launch if kind == "launch" else world.run_again)(*call)


@dataclass
class Access:
    """Bytes `lo` to `hi` of a storage, touched on a stream when its clock was at `tick`."""

    lo: int
    hi: int
    stream: Stream
    tick: int
    writes: bool
    where: str


@dataclass
class Known:
    """A storage, the stream that it was allocated on, and who touched it.

    Attributes:
        of_host: Pages of the host, which go at once when they are freed.
        recorded: Streams that `record_stream` named.
    """

    ref: StorageWeakRef
    stream: Stream
    nbytes: int
    address: int
    of_host: bool = False
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class World(TorchDispatchMode):
    """One device and its host; all work in its block is seen.

    Attributes:
        main: The model's stream.
        found: The mistakes, each once.
        recording: Pools that the allocator takes for being captured into.
        pools: How many graphs hold each pool.
        replays: How many there were.
        launches: How many by the name of the stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()
        self._hosts: dict[int, Clock] = {}
        self.main = Stream(self, "main")
        self.streams = [self.main]
        self.capture: Graph | None = None
        self.failed = Graph(self)  # whose capture CUDA has ended last, and torch has not
        self.found: set[str] = set()
        self.recording: list[Any] = []
        self.pools: Counter[Any] = Counter()
        self.replays = 0
        self.launches: Counter[str] = Counter()
        self.threads: list[LateThread] = []
        self._known: dict[int, Known] = {}
        self._ignored: set[int] = set()
        self._launch: Any = None

    # Streams and threads ------------------------------------------------------------------------------------------

    @property
    def _stack(self) -> list[Stream]:
        if not hasattr(self._here, "stack"):
            self._here.stack = [self.main]
        stack: list[Stream] = self._here.stack
        return stack

    @property
    def current(self) -> Stream:
        """The thread's current stream."""
        return self._stack[-1]

    @property
    def host(self) -> Clock:
        """What the thread knows to be over."""
        return self._hosts.setdefault(getattr(self._here, "job", threading.get_ident()), {})

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def at(self, device: torch.device) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, self._here.device = self.device, device.index or 0
        try:
            yield
        finally:
            self._here.device = before

    @property
    def device(self) -> int:
        """The thread's current device."""
        return getattr(self._here, "device", 0)

    @contextlib.contextmanager
    def thread(self, number: int, knows: Clock) -> Iterator[Clock]:
        """Another thread's part, which knows what its starter knew; it gets what the thread knows."""
        later(self._hosts.setdefault(number, {}), knows)
        before, self._here.stack = self._stack, [self.main]
        job = getattr(self._here, "job", threading.get_ident())
        self._here.job = number
        try:
            with self:
                yield self._hosts[number]
        finally:
            self._here.stack, self._here.job = before, job

    def new_stream(self, device: torch.device = CUDA, priority: int = 0) -> Stream:
        """`torch.cuda.Stream`."""
        device = CUDA if device.index is None else device
        self.streams.append(Stream(self, f"side{len(self.streams)}", device, priority))
        return self.streams[-1]

    def synchronize(self, *_: Any) -> None:
        """`torch.cuda.synchronize`."""
        if self.capture is not None:
            self.capture.invalid = "sync: the device was waited for"
            raise RuntimeError(f"CUDA error: {self.capture.invalid}, at {_caller()}")
        for stream in self.streams:
            later(self.host, stream.clock)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`."""
        if self.recording:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.sweep()

    def finish(self) -> None:
        """Collect garbage, let the threads end, and look at what is freed."""
        gc.collect()
        self.sweep()
        for thread in self.threads:
            thread.shutdown()
        self.threads.clear()
        self.sweep()

    def begin_again(self, stream: Stream) -> None:
        """Begin to capture for a graph that torch has not ended."""
        self.failed.begin(stream)

    def note(self, mistake: str) -> None:
        """Keep a mistake, with the place."""
        self.found.add(f"{mistake}, at {_caller()}")

    def refuse(self, why: str) -> None:
        """End the capture, as CUDA does."""
        assert self.capture is not None
        self.capture.invalid = why
        raise RuntimeError(f"CUDA error: {why}, at {_caller()}")

    # Memory -------------------------------------------------------------------------------------------------------

    def _of(self, tensor: torch.Tensor) -> Known:
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known.ref.expired():
            made = Known(StorageWeakRef(storage), self.current, storage.nbytes(), storage.data_ptr())
            known = self._known[storage._cdata] = made
        return known

    def of_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor is pages of the host, which a device reads and writes."""
        self._of(tensor).of_host = True
        return tensor

    def ignore(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor is the host's alone."""
        self._ignored.add(tensor.untyped_storage()._cdata)
        self._kept = [*getattr(self, "_kept", ()), tensor]  # so that no other gets its number
        return tensor

    def sweep(self) -> None:
        """Look at what was freed since."""
        for key, known in [(key, known) for key, known in self._known.items() if known.ref.expired()]:
            after = dict(self.host)  # who takes the memory next comes behind it
            later(after, {} if known.of_host else known.stream.clock)
            for a in known.accesses:
                own = a.stream is known.stream and not known.of_host
                if not own and after.get(a.stream.id, 0) < a.tick and a.stream.id not in known.recorded:
                    of = "the host" if known.of_host else known.stream.name
                    self.found.add(
                        f"lifetime: memory of {of} is freed while {a.stream.name} may use it: {a.where}"
                    )
            del self._known[key]

    def touch(self, tensor: torch.Tensor, writes: bool, place: str) -> None:
        """Note that the current stream reads or writes a tensor."""
        if not tensor.numel() or tensor.device.type == "meta":
            return
        if tensor.untyped_storage()._cdata in self._ignored:
            return
        size = tensor.element_size()
        lo = tensor.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._touch(self._of(tensor), lo, lo + (last + 1) * size, writes, place)

    def _touch(self, known: Known, lo: int, hi: int, writes: bool, place: str) -> None:
        stream, kept = self.current, []
        for a in known.accesses:
            before = stream.clock.get(a.stream.id, 0) >= a.tick
            if a.lo < hi and lo < a.hi and not before and (writes or a.writes):
                kinds = ["write" if each else "read" for each in (a.writes, writes)]
                one, two = f"{kinds[0]} on {a.stream.name} [{a.where}]", f"{kinds[1]} on {stream.name}"
                self.found.add(f"race: {one} and {two} [{place}]")
            if not (before and lo <= a.lo and a.hi <= hi and (writes or not a.writes)):
                kept.append(a)
        kept.append(Access(lo, hi, stream, stream.clock[stream.id], writes, place))
        known.accesses = kept

    def touch_rows(self, table: torch.Tensor, place: str) -> None:
        """Note that the current stream reads the blocks that a `HostCache.table` names."""
        by_address = {known.address: known for known in self._known.values() if known.of_host}
        for address in table[2 : 2 + 2 * int(table[0]) : 2].tolist():
            known = by_address[address]
            self._touch(known, 0, known.nbytes, False, place)

    def host_reads(self, tensors: list[torch.Tensor], place: str) -> None:
        """Note that the thread reads tensors by itself."""
        thread = Stream(self, "the host")
        thread.clock = dict(self.host) | thread.clock
        self.tick(thread)
        with self.on(thread):
            for tensor in tensors:
                self.touch(tensor, False, place)
        later(self.host, thread.clock)

    # Work ---------------------------------------------------------------------------------------------------------

    def tick(self, stream: Stream) -> None:
        """Begin a piece of work on a stream: behind all that its thread knows to be over."""
        self.sweep()
        later(stream.clock, self.host)
        stream.clock[stream.id] += 1
        self.launches[stream.name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if not name.startswith(("aten::", "prims::")):
            with self:
                return func.redispatch(_CPU, *args, **kwargs)
        stream = self.current
        if name in _SYNCS:
            if stream.graph is not None:
                self.refuse(f"sync: {name}")
            stream.synchronize()
        if stream.graph is None:
            out = func(*args, **kwargs)
            self.account(func, args, kwargs, out)
            return out
        self._check_thread(stream, name)
        written = _written(func, args, kwargs)
        before = [each.clone() for each in written]
        out = func(*args, **kwargs)
        for tensor, value in zip(written, before, strict=True):  # nothing runs in a capture
            tensor.copy_(value)
        stream.clock[stream.id] += 1
        if not _is_view(args, kwargs, out, written):
            stream.graph.calls.append(("op", stream, func, args, kwargs, out))
        return out

    def _check_thread(self, stream: Stream, name: str) -> None:
        assert stream.graph is not None
        if stream.graph.thread != threading.get_ident():
            self.note(f"foreign: {name} is launched onto {stream.name}, which another thread captures")

    def run_again(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Replay an operator: what it gives goes where it went."""
        with _disable_current_modes():
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)
        self.account(func, args, kwargs, out)

    def account(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what an operator touched on the current stream."""
        name, written = func._schema.name, _written(func, args, kwargs)
        self.tick(self.current)
        place = f"{name} {_caller()}"
        for tensor in written:
            self.touch(tensor, True, place)
        for tensor in _tensors(out):
            self._of(tensor)
        if _is_view(args, kwargs, out, written) or name.startswith(_GIVES_NO_VALUES):
            return
        ids = {id(tensor) for tensor in written}
        for tensor in _tensors((args, kwargs)):
            if id(tensor) not in ids:
                self.touch(tensor, False, place)
        if not written:
            for tensor in _tensors(out):
                self.touch(tensor, True, place)

    def launch(self, kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
        """Launch a kernel on the current stream, or capture the launch."""
        stream = self.current
        if stream.graph is None:
            self.run_launch(kernel, grid, args, kwargs)
            return
        self._check_thread(stream, kernel.fn.__name__)
        stream.clock[stream.id] += 1
        stream.graph.calls.append(("launch", stream, kernel, grid, args, kwargs))

    def run_launch(self, kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
        """Run a kernel in the interpreter, and note what it touched."""
        self.tick(self.current)
        name = kernel.fn.__name__
        place, writes = f"{name} {_caller()}", WRITES[name]
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        tensors = {key: x for key, x in named.items() if isinstance(x, torch.Tensor)}
        with _disable_current_modes():
            declared = {tensors[key].data_ptr() for key in writes if key in tensors}
            read = {key: x for key, x in tensors.items() if key not in writes}
            before = {key: x.clone() for key, x in read.items() if x.data_ptr() not in declared}
            self._launch(kernel, *args, grid=grid, warmup=False, **kwargs)
            for key, x in before.items():
                same = x.view(torch.uint8) == read[key].view(torch.uint8) if x.dim() else x == read[key]
                assert bool(same.all()), f"{name} writes {key}: add it to `WRITES`"
            if "table" in tensors:
                self.touch_rows(tensors["table"], place)
        for key, x in tensors.items():
            if key in writes and not self._is_left(key, named):
                self.touch(x, True, place)
            elif key not in writes and not (x is tensors.get("query") and key != "query"):  # a stand-in
                self.touch(x, False, place)

    @staticmethod
    def _is_left(key: str, named: dict[str, Any]) -> bool:
        """Whether a kernel that may write a tensor was told to leave it."""
        kept = key in ("kept_query", "kept_key") and not named.get("KEEPS")
        return kept or (key in ("window_key", "window_value") and not named.get("WRITTEN"))


def _tensors(of: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(of) if isinstance(x, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments)]
    return [
        tensor
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    ]


def _is_view(args: Any, kwargs: Any, out: Any, written: list[torch.Tensor]) -> bool:
    """Whether an operator gave views of what it got, and touched nothing."""
    given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
    results = _tensors(out)
    return bool(results) and not written and all(x.untyped_storage()._cdata in given for x in results)


class LateThread:
    """A thread pool of one thread, whose jobs run as late as can be: when somebody waits for them."""

    started = 0

    def __init__(self, world: World) -> None:
        LateThread.started += 1
        self._world, self._number = world, -LateThread.started
        self._jobs: list[tuple[Future[Any], Callable[[], Any], Clock]] = []
        world.threads.append(self)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        job: Future[Any] = Future()
        self._jobs.append((job, work, dict(self._world.host)))
        usual = job.result

        def result(timeout: float | None = None) -> Any:
            self.run(job)
            return usual(timeout)

        job.result = result  # type: ignore[method-assign]
        return job

    def run(self, last: Future[Any] | None = None) -> None:
        """Run the jobs that wait, up to `last`, and have the caller wait for them."""
        while self._jobs and not (last is not None and last.done()):
            job, work, knew = self._jobs.pop(0)
            with self._world.thread(self._number, knew) as knows:
                job.set_result(work())
            later(self._world.host, knows)

    def shutdown(self, **_: Any) -> None:
        self.run()


def _copied_to_host(world: World, usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        if world.current.graph is not None:
            world.refuse("sync: a copy to the host")
        copied = tensor.clone()
        world.current.synchronize()
        return world.ignore(usual(copied))

    return cpu


def _patch_torch(world: World, patch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        Event=lambda **_: Event(world),
        CUDAGraph=lambda: Graph(world),
        current_stream=lambda device=None: world.current,
        current_device=lambda: world.device,
        device=world.at,
        stream=world.on,
        is_current_stream_capturing=lambda: world.current.graph is not None,
        synchronize=world.synchronize,
        empty_cache=world.empty_cache,
        graph_pool_handle=object,
        device_count=lambda: 2,
    )
    for name, value in vars(cuda).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(cuda_streams, "_made", world.new_stream)
    patch.setattr(cuda_streams, "_idle", defaultdict(list))
    patch.setattr(cudart, "begin_capture", world.begin_again)
    patch.setattr(torch.Tensor, "record_stream", lambda x, stream: world._of(x).recorded.add(stream.id))
    patch.setattr(torch.Tensor, "cpu", _copied_to_host(world, torch.Tensor.cpu))
    patch.setattr(torch.Tensor, "pin_memory", lambda x: world.ignore(x.clone()))


def _patch_runtime(world: World, patch: pytest.MonkeyPatch) -> None:
    allocate, append = host_blocks.BlockStore.allocate, host_cache.HostCache.append
    gather, empty = host_cache.HostCache.gather_rows, Staging.empty.__func__  # type: ignore[attr-defined]
    counts = metrics_of.Metrics.__init__

    def appended(self: Any, *given: Any) -> None:
        append(self, *given)
        self._note_written(CUDA)

    def gathered(self: Any, layer: int, *given: Any) -> torch.Tensor:
        rows = gather(self, layer, *given)
        world.host_reads(self._layers[layer].blocks, "HostCache.gather_rows")
        return world.ignore(rows)

    def staging(kind: Any, *given: Any) -> Staging:
        made: Staging = empty(kind, *given)
        made.slots = world.ignore(made.slots.clone())
        return made

    def counting(self: Any, device: torch.device, **options: Any) -> None:
        counts(self, device, **options)
        self._stream = cuda_streams.lend(self, CUDA)

    patch.setattr(host_blocks.BlockStore, "allocate", lambda self, *x: world.of_host(allocate(self, *x)))
    patch.setattr(host_cache.HostCache, "append", appended)
    patch.setattr(host_cache.HostCache, "gather_rows", gathered)
    patch.setattr(Staging, "empty", classmethod(staging))
    patch.setattr(metrics_of.Metrics, "__init__", counting)
    patch.setattr(worker, "_thread", lambda: LateThread(world))
    patch.setattr(worker.futures, "wait", lambda jobs: [job.result() for job in jobs])


@contextlib.contextmanager
def simulated(patch: pytest.MonkeyPatch, steps_alone: bool = False) -> Iterator[World]:
    """Have the runtime's CUDA code run in a world of its own, which sees all operators and launches of the block.

    Args:
        patch: Its patches are undone behind the block.
        steps_alone: See decode steps alone: Dynamo compiles nothing in a mode of operators.
    """
    from triton.runtime.interpreter import InterpretedFunction

    world = World()
    world._launch = usual = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        world.launch(kernel, grid, args, kwargs)

    with patch.context() as inner:
        _patch_torch(world, inner)
        _patch_runtime(world, inner)
        inner.setattr(InterpretedFunction, "run", run)
        running = DecodeStep.running

        @contextlib.contextmanager
        def seen(step: DecodeStep) -> Iterator[None]:
            with world, running(step):
                yield

        if steps_alone:
            inner.setattr(DecodeStep, "running", seen)
        with contextlib.nullcontext() if steps_alone else world:
            yield world
            world.finish()  # while all is patched
    assert InterpretedFunction.run is usual
