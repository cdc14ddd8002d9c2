"""`Handle`: the tensor class of handles. Outside of a graph one can be looked at, moved and copied, and no more.

The session is found by a handle's elements (`handle.py`). A module that is not compiled would read its NaNs as keys and
values, and what is written into it would be lost. So every other operation on one is an error at the place where it is
called. Dynamo traces `__torch_function__` with the model: within a graph a handle is a plain tensor, and what becomes
of it there is the passes' to know.

A copy of a handle, or a view, is one too. All of a session hold one `Lease`: the session ends with the last of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.multiprocessing.reductions import StorageWeakRef

from specache_fx.errors import CacheHandleError

bare = torch._C.DisableTorchFunctionSubclass
"""Within it, on this thread, handles are plain tensors: for code that knows them."""


ZEROED = -1
_FEW_COPIES = 64


class _Counted(Protocol):
    """A `Session`."""

    kv_len: int


class Lease:
    """Held by the handles of a session, their views and copies.

    Attributes:
        session: The `Session`, which knows its lease weakly.
    """

    def __init__(self, session: _Counted) -> None:
        self.session = session
        self._copies: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage: views of a copy keep it
        self._swept = 0  # those that lived when the others were forgotten last

    def note_copy(self, copied: torch.Tensor) -> None:
        """A copy with memory of its own was made."""
        storage = copied.untyped_storage()
        self._copies[storage._cdata] = StorageWeakRef(storage), self.session.kv_len
        if len(self._copies) > 2 * self._swept + _FEW_COPIES:  # a beam search notes a copy a tensor and step
            self._swept = len(self.copies())

    def copies(self) -> dict[int, int]:
        """Tokens that the session had when each copy that lives was made, by the address of the copy's storage."""
        for key, (storage, _) in list(self._copies.items()):
            if storage.expired():
                self._copies.pop(key, None)  # another thread may have forgotten it
        return {key: kv_len for key, (_, kv_len) in list(self._copies.items())}


# Names of functions, of methods and of `torch`. These tell about a tensor, or make one like it.
_LOOKING = (
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size get_device untyped_storage"
    " data_ptr dim_order __len__ __hash__ __format__ __dir__ record_stream"
    " new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like"
)
# These leave elements what they are. Which ones were taken is for `claims.py` to see.
_MOVING = (
    "detach clone contiguous to cpu cuda pin_memory __getitem__ narrow select index_select take_along_dim"
    " repeat_interleave repeat expand expand_as view view_as reshape transpose permute swapaxes movedim unsqueeze"
    " squeeze flatten unflatten split chunk unbind flip roll cat concat concatenate stack type"
    " float half bfloat16 double"
)
_LOOKS, _MOVES = frozenset(_LOOKING.split()), frozenset(_MOVING.split())
# A compiled frame asks every handle for these at each step. A look-up by name takes twice as long.
_GUARDED = frozenset((torch.Tensor.size, torch.Tensor.storage_offset))
# The graphs of positions and masks read sizes of the past. Before torch 2.12 such a call comes here too.
_SIZES = frozenset((torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default))
_as_plain = torch._C._disabled_torch_function_impl
_JOINS = frozenset(("cat", "concat", "concatenate", "stack"))


class Handle(torch.Tensor):
    """A placeholder for keys or values of a session; see the module's docstring.

    Attributes:
        lease: Keeps the session.
        kv_len: Tokens that the session had when the model returned it, or what it is a copy of. None where that is not
            known: of a buffer of the model's.
        version: Of a buffer of the model's (`fixed_buffers.py`): its `_version` when it became a handle, None where it
            has none, or `ZEROED`. Other handles lack it.
    """

    lease: Lease
    kv_len: int | None
    version: int | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the functions that a handle allows outside of a graph, and refuse all others."""
        if torch.compiler.is_dynamo_compiling():
            # Modes too: under one (`torch.set_default_device`) Dynamo would come back here without end.
            with torch._C.DisableTorchFunction():
                if func is torch.Tensor.view:  # of the strides of a real cache, which a handle doesn't have
                    return torch.Tensor.reshape(*args, **(kwargs or {}))
                return func(*args, **(kwargs or {}))
        if func in _GUARDED:
            return _as_plain(func, types, args, kwargs or {})
        return _outside(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with bare():
            return f"Handle(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __copy__(self) -> Self:
        return _copy_of(self, plain(self))  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            with bare():
                memo[id(self)] = _copy_of(self, copy.deepcopy(plain(self), memo))
            self.lease.note_copy(memo[id(self)])
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A process that loads it has no session to keep: its elements tell whose it was.
        with bare():
            return plain(self).__reduce_ex__(protocol)


# A frame of its own is never compiled, nor what it calls: between two graphs of a model it runs as it is.
_code = Handle.__torch_function__.__code__
set_code_exec_strategy(_code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def mark(tensor: torch.Tensor, lease: Lease, kv_len: int | None = None) -> Handle:
    """Make a plain tensor a handle; it is the same object."""
    tensor.__class__ = Handle
    assert isinstance(tensor, Handle)
    tensor.lease, tensor.kv_len = lease, kv_len
    return tensor


def _copy_of(handle: Handle, tensor: torch.Tensor) -> Handle:
    marked = mark(tensor, handle.lease, handle.kv_len)
    _keep_version(handle, marked)
    return marked


def _keep_version(handle: Handle, copied: Handle) -> None:
    if hasattr(handle, "version"):  # but for a reset, a copy's elements tell what was done to it
        copied.version = ZEROED if handle.version == ZEROED else None


def unmark(handle: Handle) -> None:
    """Make a handle a plain tensor; it is the same object, and keeps no session."""
    del handle.lease, handle.kv_len, handle.version
    handle.__class__ = torch.Tensor  # type: ignore[assignment]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor over a handle's memory; any other tensor is returned as it is."""
    if not isinstance(tensor, Handle):
        return tensor
    with bare():
        return tensor.as_subclass(torch.Tensor)


def _outside(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name in _LOOKS or func in _SIZES or name.startswith("is_") or _is_compiling():
        with bare():
            return func(*args, **kwargs)
    moves = name in _MOVES or name == "__get__"  # a property
    first: Any = args[0] if args else None
    zeros = name == "zero_" or (name == "fill_" and args[1:] == (0,))
    if zeros and hasattr(first, "version"):  # a cache is reset: a prompt is to follow
        first.version = ZEROED
        return first
    sources = list(first) if name in _JOINS and isinstance(first, (list, tuple)) else [first]
    sources = [source for source in sources if not _is_nothing(source)]
    if not moves or not all(isinstance(source, Handle) for source in sources):
        raise CacheHandleError(_refusal(name))
    with bare():
        moved = func(*args, **kwargs)
        results = moved if isinstance(moved, (list, tuple)) else [moved]
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        if any(tensor.dtype != sources[0].dtype for tensor in tensors):
            raise CacheHandleError(_refusal(f"{name} (to another dtype)"))
        kv_len = sources[0].kv_len if len({source.kv_len for source in sources}) == 1 else None
        for tensor in tensors:
            if not isinstance(tensor, Handle):
                marked = mark(tensor, sources[0].lease, kv_len)
                if tensor.shape[1:] == sources[0].shape[1:]:
                    _keep_version(sources[0], marked)
            if tensor.untyped_storage()._cdata != sources[0].untyped_storage()._cdata:
                sources[0].lease.note_copy(tensor)
    return moved


def _is_compiling() -> bool:
    """Whether Dynamo looks at a handle, for a guard."""
    return torch._guards.CompileContext.try_get() is not None


def _is_nothing(source: Any) -> bool:
    """Whether it is an empty list of numbers: transformers joins the first keys of a layer to one."""
    return isinstance(source, torch.Tensor) and source.dim() == 1 and not source.numel()


def _refusal(name: str) -> str:
    return (
        f"`{name}` was called on a tensor of a KV cache of specache, outside of a graph that specache compiled. The"
        " cache holds placeholders; only the compiled model can read it. If you called it: you may choose and copy"
        " batch rows and cut off the newest tokens. To read or edit keys and values, make the cache with the model"
        " uncompiled. If a model called it, that model's forward ran uncompiled."
        ' A graph break in its loop over layers does that; TORCH_LOGS="graph_breaks" shows it. generate() of a wrapper'
        " (PEFT, torch.compile(model)) calls the module inside: compile with specache_fx.compile(model), which finds"
        " that one."
        ' Dynamo also runs a model uncompiled under torch.compiler.set_stance("force_eager"),'
        " torch._dynamo.config.suppress_errors or disable."
    )
