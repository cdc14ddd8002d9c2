"""What functions of torch give on fake tensors, computed once for arguments of the same form.

A function of fake tensors with symbolic sizes takes a millisecond, most of it for the arithmetic of sizes and strides.
A model's layers call the same ones on tensors of the same form. A copy of an earlier result takes a hundredth.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unknown(Exception):
    """Arguments that can't be compared."""


class FakeResults:
    """The results so far.

    Args:
        copies: Whether each result is a tensor of its own, as what tells tensors by their identity needs it.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self._forms: dict[Hashable, int] = {}
        # By a tensor's identity, which no other has while the tensor is kept.
        self._form_of: dict[int, tuple[int, torch.Tensor]] = {}
        self._results: dict[Hashable, Any] = {}

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mode: Hashable = None,
        *,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Any:
        """The result of a function.

        Args:
            function: The function.
            args: Its arguments: fake tensors, symbols, constants, and containers.
            kwargs: Those by name.
            mode: What else the result depends on, such as an autocast.
            context: Makes what the function runs in.
        """
        try:
            key = function, mode, self._described(args), self._described(kwargs)
            known = self._results.get(key)
        except (Unknown, TypeError):
            with context():
                return function(*args, **kwargs)
        if known is not None:
            return self._copied(known) if self._copies else known
        with context():
            result = function(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        # What is an argument may have been written to. Sizes that numbers decide are others each time.
        if (
            tensors
            and all(isinstance(each, FakeTensor) and each.constant is None for each in tensors)
            and given.isdisjoint(map(id, tensors))
            and not free_unbacked_symbols(tensors)
        ):
            self._results[key] = result
        return result

    def _described(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._form_of:
                self._form_of[id(value)] = self._forms.setdefault(_form(value), len(self._forms)), value
            return "tensor", self._form_of[id(value)][0]
        if isinstance(value, _SYMBOLS):
            return "symbol", value.node.expr
        if isinstance(value, slice):
            return "slice", *map(self._described, (value.start, value.stop, value.step))
        if isinstance(value, (list, tuple)):
            return "sequence", *map(self._described, value)
        if isinstance(value, Mapping):
            return tuple((name, self._described(each)) for name, each in value.items())
        return type(value), value

    def _copied(self, known: Any) -> Any:
        """A result of the same form."""
        if not isinstance(known, FakeTensor):
            return pytree.tree_map_only(FakeTensor, self._copied, known)
        with in_kernel_invocation_manager(known.fake_mode):
            meta = torch.Tensor._make_subclass(torch.Tensor, known)
        copy = FakeTensor(known.fake_mode, meta, known.fake_device)
        if id(known) in self._form_of:
            self._form_of[id(copy)] = self._form_of[id(known)][0], copy
        return copy


def results_of(mode: FakeTensorMode) -> FakeResults:
    """The results of operators on a mode's tensors, as long as there are any."""
    found: FakeResults = vars(mode).setdefault("specache_results", FakeResults(copies=False))
    return found


def _form(tensor: torch.Tensor) -> Hashable:
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
        raise Unknown
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (
        tensor.dtype,
        tensor.device,
        *(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes),
    )
