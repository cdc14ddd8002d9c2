"""Random numbers on which parts of a graph are run, and the normal form of attention that they are compared with.

Sizes that Dynamo left open are given small values.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from specache_fx.capture.graph.graph_slices import constant_of, float_of
from specache_fx.capture.graph.graph_utils import shape_of, symbols_of, value_of

# Sizes that are open get these, one after another: no two the same, none a power of 2.
PLAIN_SEEDS = 2  # the first ones, which hide nothing
_SIZES = (5, 3, 7, 6, 9, 10, 11, 12, 13, 14, 15)


def repeated(side: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values for each query head: `[batch, num_heads, kv_len, head_dim]`."""
    groups = num_heads // side.shape[1]
    return side if groups == 1 else side[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """The normal form, of shapes as `AttentionCore` has them; the mask is a float one.

    The softmax is in float32 at least, as models spell it.
    """
    key, value = (repeated(side, query.shape[1]) for side in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)
    weights = weights if sinks is None else weights[..., :-1]
    return weights.to(query.dtype) @ value


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """No TF32 (nor bfloat16 on the CPU) in float32 products: its rounding would pass for a wrong form.

    The user may have set the precision by either of torch's two interfaces; that of backends puts both back.
    """
    backends: Any = torch.backends
    each = (backends.cuda.matmul, backends.mkldnn.matmul)
    kept = [backend.fp32_precision for backend in each]
    try:
        for backend in each:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(each, kept, strict=True):
            backend.fp32_precision = precision


def _equal_to(symbol: Any, shape_env: Any) -> set[Any]:
    """A symbol and those that equal it. Dynamo does not always solve a guard `q_len + a == q_len + b` for `a`."""
    pairs = []
    for guard in shape_env.guards:
        if guard.expr.is_Equality and len(guard.expr.free_symbols) > 1:
            difference = guard.expr.lhs - guard.expr.rhs
            one, *others = difference.free_symbols
            if len(others) == 1 and difference in (one - others[0], others[0] - one):
                pairs.append({one, others[0]})
    equal, before = {symbol}, 0
    while len(equal) > before:
        before = len(equal)
        equal.update(*(pair for pair in pairs if pair & equal))
    return equal


class Numbers:
    """Random values for the nodes that a proof about `reader` starts from."""

    def __init__(self, reader: Node, seed: int = 0) -> None:
        self.reader = reader
        self.sizes: dict[Any, int] = {}
        self._next_size = itertools.cycle((*_SIZES[seed % 3 :], *_SIZES[: seed % 3]))
        self.generator = torch.Generator("cpu").manual_seed(seed)
        # Conditions show keys or hide them, and numbers that hide are added or subtracted: seeds try each. In the first
        # ones conditions are all the same, and no number hides.
        self._chance = 0.0 if seed < PLAIN_SEEDS else 1 / 3
        self._is_true = seed // 2 % 2 == 0
        self._hides = -1 if seed // 4 % 2 == 0 else 1

    def assign(self, size: Any, wanted: int) -> None:
        """Give an open size, of one symbol, the wanted value, or less where guards are."""
        expr = size.node.expr if isinstance(size, torch.SymInt) else None
        if expr is None or len(expr.free_symbols) != 1:
            return
        (symbol,), env = expr.free_symbols, size.node.shape_env
        difference = expr - symbol
        if difference.is_Integer:
            values = (wanted, wanted // 2, wanted // 4, wanted // 8)
            self._choose(symbol, env, [value - int(difference) for value in values])

    def _choose(self, symbol: Any, env: Any, values: Sequence[int]) -> bool:
        """Give a symbol, and those that equal it, the first of some values that guards allow."""
        equal = _equal_to(symbol, env)
        for value in values:
            sizes = dict.fromkeys(equal, value)
            within = all(each not in env.var_to_range or value in env.var_to_range[each] for each in equal)
            if within and not any(guard.expr.xreplace(sizes) == False for guard in env.guards):  # noqa: E712
                self.sizes |= sizes
                return True
        return False

    def integer(self, size: Any) -> int:
        """A size, open ones given a value."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        for symbol in sorted(symbols_of(size), key=str):
            if symbol not in self.sizes:
                env, value = size.node.shape_env, next(self._next_size)
                if not self._choose(symbol, env, [value, 2]):
                    self.sizes |= dict.fromkeys(_equal_to(symbol, env), value)
        return int(size.node.expr.xreplace(self.sizes))

    def value(self, node: Node, spread: float | None) -> Any:
        """A value for a node: random numbers, its own where it is a constant.

        Args:
            node: The node.
            spread: Standard deviation; None for masks, which hide a third but for the first seeds.
        """
        fake = value_of(node)
        if isinstance(fake, torch.SymFloat):
            number = float_of(fake)
            return fake if number is None else number
        if not isinstance(fake, torch.Tensor):
            return self.integer(fake) if isinstance(fake, (int, torch.SymInt)) else fake
        number = constant_of(self.reader.graph.owning_module, node)  # type: ignore[arg-type]
        shape = [self.integer(size) for size in shape_of(node) or ()]
        if number is not None:
            return torch.full(shape, number, dtype=fake.dtype, device=fake.device)
        random = torch.randn(shape, generator=self.generator, device="cpu")
        random = random if shape else 1 + random.abs()  # a factor, which may divide
        hidden = torch.rand(shape, generator=self.generator, device="cpu") < self._chance
        if fake.dtype == torch.bool:
            random = hidden ^ self._is_true
        elif not fake.is_floating_point():
            random = (random * 4).round()
        elif spread is not None:
            random = random * spread
        elif len(shape) > 1:
            random = random.masked_fill(hidden, self._hides * torch.finfo(fake.dtype).max)
        return random.to(device=fake.device, dtype=fake.dtype)
