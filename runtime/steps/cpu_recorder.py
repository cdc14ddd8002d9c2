"""`CpuRecorder`: the decode step on the CPU as a list of C++ calls, noted once and made again without Python between.

Inductor writes Python functions that allocate memory, launch its kernels and call operators. In a decode step that
Python takes as long as the smaller products: weights evict the interpreter from the processor's caches. The functions
run once while this watches them. Their kernels and our operators go to a tape (`csrc/tape.h`), which `specache::replay`
plays.

One tape serves every step of a session: `specache::layer_step` reads lengths and instructions from `state`.
Intermediate tensors lie in one arena, and share addresses where they are not alive at the same time. A function that
does anything else is not recorded: another operator, an argument that is no tensor or integer, unknown code.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.native.products import MAX_ROWS, is_products

T = TypeVar("T")
_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_ALLOCATES = "empty_strided_cpu"
# Globals that launch nothing. What `torch` calls, `Observed` sees as operators.
_HARMLESS = frozenset({"assert_size_stride", "assert_alignment", "reinterpret_tensor", "torch"})
_one_at_a_time = threading.RLock()  # functions are observed by other globals, which all threads see
# A forked process gets the functions as they are.
os.register_at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)


class NotKnownError(Exception):
    """A function calls something that can't be recorded; the message names it."""


class CpuRecorder:
    """See the module's docstring, and `step_graph.Recorder`."""

    def record(
        self, run: Callable[[], Sequence[Any]], compiled: Callable[..., Any]
    ) -> tuple[Sequence[Any], Callable[[], None] | None]:
        """Run a step, and record its calls.

        Args:
            run: Runs it.
            compiled: What Inductor made of its graph, which `run` calls.

        Returns:
            Its results, which each replay writes anew; and what replays it, None where nothing does.
        """
        with _one_at_a_time:
            observed = _or_none(lambda: Observed(generated(compiled)))
            with contextlib.nullcontext() if observed is None else observed:
                results = run()
        return results, None if observed is None else _or_none(lambda: observed.tape(results))


def _or_none(make: Callable[[], T]) -> T | None:
    """The result of `make`; None and a line in the log where it fails. The step is right without it."""
    try:
        return make()
    except NotKnownError as error:
        _log.info("Decode steps run by Inductor's own code: %s can't be recorded.", error)
    except Exception:
        _log.warning("Decode steps run by Inductor's own code: recording failed.", exc_info=True)
    return None


def generated(compiled: Callable[..., Any]) -> list[FunctionType]:
    """The functions that Inductor wrote for a graph, or for its parts: torch wraps some more around each.

    Raises:
        NotKnownError: If there is none for one of them, or more than one.
    """
    return [_generated(part) for part in getattr(compiled, "parts", (compiled,))]


def _generated(compiled: Callable[..., Any]) -> FunctionType:
    from torch._inductor.output_code import CompiledFxGraph  # imported late: it loads all of Inductor

    waiting: list[Any] = [compiled]
    seen, found = set(), []
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, CompiledFxGraph):
            found.append(at.current_callable)
        elif isinstance(at, FunctionType):
            waiting += [*_cells(at), *vars(at).values()]
        elif isinstance(at, MethodType):
            waiting += [at.__func__, at.__self__]
        elif type(at).__module__.startswith("torch._functorch"):
            waiting += getattr(at, "__dict__", {}).values()
    functions = [getattr(each, "__func__", each) for each in found]
    if len(functions) != 1 or not isinstance(functions[0], FunctionType):
        raise NotKnownError("a graph without one function of Inductor's")
    return functions[0]


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue


class Observed(TorchDispatchMode):
    """While it is entered, it records the calls of Inductor's functions, in this thread.

    Args:
        functions: Of Inductor's.

    Raises:
        NotKnownError: If one calls what can't be noted.

    Attributes:
        missed: The first thing that can't be noted; None where all can.
    """

    def __init__(self, functions: Sequence[FunctionType]) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._made: list[torch.Tensor] = []  # in the step; alive, so that no two lie at one address
        # Of each function's globals, those that others take the place of, and these.
        self._watched = [(function.__globals__, *self._watch(function)) for function in functions]
        self._kernels = {
            id(x) for _, kept, _ in self._watched for name, x in kept.items() if name != _ALLOCATES
        }
        self._launched: set[int] = set()
        self.missed: str | None = None

    def _watch(self, function: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
        kept: dict[str, Any] = {}
        watched: dict[str, Any] = {}
        code, names = function.__code__, function.__globals__
        if any(hasattr(part, "co_code") for part in code.co_consts):
            raise NotKnownError("nested functions")
        for name in code.co_names:
            value: Any = names.get(name)
            if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel":
                kept[name], watched[name] = value, self._launching(value)
            elif name == _ALLOCATES:
                kept[name], watched[name] = value, self._allocating(value)
            elif isinstance(value, torch.Tensor) or name in _HARMLESS:  # a constant of the graph
                continue
            elif name in names or name == "partitions":
                raise NotKnownError(f"`{name}`")
        return kept, watched

    def __enter__(self) -> Observed:
        super().__enter__()
        for names, _, watched in self._watched:
            names.update(watched)
        return self

    def __exit__(self, *raised: Any) -> None:
        for names, kept, watched in self._watched:
            names.update(kept)
            watched.clear()  # they hold this, and so all that it noted
        super().__exit__(*raised)

    def _miss(self, what: str) -> None:
        self.missed = self.missed or what

    def _launching(self, kernel: Any) -> Callable[..., Any]:
        address = _address_of(kernel)

        def launch(*args: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._launched.add(id(kernel))
                if not all(isinstance(x, (torch.Tensor, int)) for x in args):
                    self._miss("a kernel that takes a float")
                self._calls.append((_note_kernel, (address, *args)))
            return kernel(*args)

        return launch

    def _allocating(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any) -> torch.Tensor:
            made = allocate(*args)
            if threading.get_ident() == self._thread:
                self._made.append(made)
            return made

        return empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it."""
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        ours = torch.ops.specache
        if is_products(func) and _are_few(args[0]):
            rows, *weights = args
            made = list(results) if len(weights) > 1 else [results]
            self._calls.append((ours.note_products, (rows, weights, made)))
            self._made += made
        elif func is ours.layer_step.default:
            form = [kwargs.get(name) for name in ("softcap", "sinks")]
            self._calls.append((ours.note_layer_step, (results, *args, *form[len(args) - 6 :])))
            self._made.append(results)
        elif not func.is_view:
            self._miss(str(func))
        return results

    def tape(self, results: Sequence[Any]) -> Callable[[], None]:
        """A function that makes the calls again.

        Args:
            results: Of the step, at the addresses where each replay writes them.

        Raises:
            NotKnownError: If they can't all be noted, or the function did not run.
        """
        if not self._kernels or self._launched != self._kernels:
            self._miss("a kernel that did not run")
        if self.missed is not None:
            raise NotKnownError(self.missed)
        kept = {_storage(x) for x in results if isinstance(x, torch.Tensor)}
        sizes = {_storage(x): x.untyped_storage().nbytes() for x in self._made}
        lives: dict[int, list[int]] = {}
        for i, (_, args) in enumerate(self._calls):
            for storage in {_storage(x) for x in tree_iter(args) if isinstance(x, torch.Tensor)}:
                if storage in sizes and storage not in kept:
                    lives.setdefault(storage, [i, i])[1] = i
        offsets, nbytes = share_addresses([(first, last, sizes[at]) for at, (first, last) in lives.items()])
        arena = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        starts = dict(zip(lives, offsets, strict=True))

        def moved(x: torch.Tensor) -> torch.Tensor:
            start = starts.get(_storage(x))
            if start is None:
                return x
            at = start // x.itemsize + x.storage_offset()
            return torch.empty(0, dtype=x.dtype, device="cpu").set_(arena, at, x.shape, x.stride())

        tape = Tape(arena, results)
        for note, args in self._calls:
            if note(tape.address, *tree_map_only(torch.Tensor, moved, args)) is False:
                raise NotKnownError("a kernel with more than 96 arguments")  # kMostArguments of tape.h
        return tape.replay


class Tape:
    """`Tape` of tape.h.

    Args:
        memory: Kept as long as this is: kernels have addresses in there.

    Attributes:
        address: Where it is.
    """

    def __init__(self, *memory: object) -> None:
        library = graph_ops.load()
        assert library is not None
        self.address: int = library.specache_tape_new()
        self._memory = memory
        weakref.finalize(self, library.specache_tape_delete, self.address).atexit = False

    def replay(self) -> None:
        """Make the calls."""
        torch.ops.specache.replay(self.address)


def share_addresses(lives: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """The places of pieces of memory that need not all be there at once.

    Args:
        lives: Of each piece the first and the last step that it is needed in, and its bytes.

    Returns:
        Where each begins, in bytes, and where all end.
    """
    offsets, end = [0] * len(lives), 0
    placed: list[int] = []
    for i in sorted(range(len(lives)), key=lambda i: -lives[i][2]):
        first, last, nbytes = lives[i]
        beside = sorted(
            (offsets[j], offsets[j] + lives[j][2])
            for j in placed
            if lives[j][0] <= last and first <= lives[j][1]
        )
        at = 0
        for begin, stop in beside:
            if at + nbytes <= begin:
                break
            at = max(at, -(-stop // _ALIGNMENT) * _ALIGNMENT)
        offsets[i] = at
        placed.append(i)
        end = max(end, at + nbytes)
    return offsets, end


def _are_few(rows: torch.Tensor) -> bool:
    return rows.is_contiguous() and rows.numel() <= MAX_ROWS * rows.shape[-1]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _address_of(kernel: Any) -> int:
    """Of the C function that a kernel of Inductor's calls."""
    function = ctypes.CDLL(kernel.__self__.__file__).kernel
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _note_kernel(tape: int, address: int, *args: torch.Tensor | int) -> bool:
    library = graph_ops.load()
    assert library is not None
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
    noted: bool = library.specache_tape_kernel(
        tape, address, (ctypes.c_int64 * len(values))(*values), len(values)
    )
    return noted
