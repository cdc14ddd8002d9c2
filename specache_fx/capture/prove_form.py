"""Proof of what was read from attention that is spelt out: both are computed on random numbers and compared.

The operations from query, key, value, masks and sinks to the output are taken out of the graph and run once, on small
random tensors that hide some keys; the normal form (`dense`) is computed from the same numbers. Sizes that Dynamo left
open are given small values. A form that is read wrongly (heads in another order, a scale on the wrong side of a
mask) shows as a difference far above rounding.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_slices import constant_of, extract, float_of
from specache_fx.capture.graph_utils import placeholders, shape_of, symbols_of, value_of
from specache_fx.capture.program import AttentionCore
from specache_fx.errors import first_line
from specache_fx.runtime.masks import hides

# Scores of a prompt's proof, at most; a decode step's is always made. The form of a longer prompt is only read: its
# attention stays the model's.
MOST_SCORES = 2**20
MOST_REPLACED = 2**23  # the same, where a prompt's operations are replaced
_SEEDS = 16  # tried until random masks show something
# Sizes that are open get these, one after another: no two alike, none a power of 2.
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
        self._next_size = itertools.cycle(_SIZES)
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def integer(self, size: Any) -> int:
        """A size, open ones given a value."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        for symbol in sorted(symbols_of(size), key=str):
            if symbol not in self.sizes:
                self.sizes |= dict.fromkeys(_equal_to(symbol, size.node.shape_env), next(self._next_size))
        return int(size.node.expr.xreplace(self.sizes))

    def value(self, node: Node, spread: float | None) -> Any:
        """A value for a node: random numbers, its own where it is a constant.

        Args:
            node: The node.
            spread: Standard deviation; None for what masks: a third of it hides.
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
        hidden = torch.rand(shape, generator=self.generator, device="cpu") < 1 / 3
        if fake.dtype == torch.bool:
            random = hidden
        elif not fake.is_floating_point():
            random = (random * 4).round()
        elif spread is not None:
            random = random * spread
        elif len(shape) > 1:
            random = random.masked_fill(hidden, torch.finfo(fake.dtype).min)
        return random.to(device=fake.device, dtype=fake.dtype)


def is_proved(core: AttentionCore, most: int) -> bool:
    """Whether a proof is made: of each decode step, and of prompts with that many scores at most."""
    numbers = Numbers(core.node)
    batch, heads, q_len, _ = (numbers.integer(size) for size in shape_of(core.query) or ())
    kv_len = numbers.integer((shape_of(core.key) or ())[2])
    return q_len == 1 or batch * heads * q_len * kv_len <= most


def differs(gm: GraphModule, core: AttentionCore, *, newest: bool) -> str | None:
    """Compute a core as the graph does and as the normal form does.

    Args:
        gm: The graph.
        core: It.
        newest: Compare the newest query alone: the core's mask is its row.

    Returns:
        The difference; None where they agree.
    """
    read = {arg for node in core.inner for arg in node.all_input_nodes} - core.inner
    leaves = [node for node in gm.graph.nodes if node in read]  # in order: the same numbers every time
    results = [core.node, core.query, *([core.mask] if core.mask is not None else [])]
    graph = extract(gm, results, leaves)
    if len(placeholders(graph.graph)) > len(leaves):
        return "its queries or masks can't be told from what they are computed from"
    # Of size 1 after scaling, and of the softcap's size, where it acts. In float16 a cap above 1,023 is tried with
    # smaller numbers, which it hardly bends.
    most = torch.finfo(value_of(core.query).dtype).max / 64
    for size in (1.0, min(core.softcap, most)) if core.softcap is not None else (1.0,):
        for seed in range(_SEEDS):
            try:
                distance, bound = _distance(graph, core, leaves, Numbers(core.node, seed), size, newest)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                return f"it can't be computed on small tensors ({first_line(error)})"
            if distance is not None:
                break
        else:
            return "its masks hide all"
        if not distance <= bound:
            return f"on random numbers it differs from scale, softcap, masks, sinks and softmax by {distance:.2g}"
    return None


def _distance(
    graph: GraphModule, core: AttentionCore, leaves: list[Node], numbers: Numbers, size: float, newest: bool
) -> tuple[float | None, float]:
    """The distance of a core from the normal form, and the distance that rounding allows.

    `graph` computes output, query and mask from `leaves`; the scaled products are of a size. The distance is None where
    the numbers hide every key from every query: they prove nothing.
    """
    rows = slice(-1 if newest else None, None)
    key_dim = (shape_of(core.key) or ())[3]
    query_spread = size / (abs(core.scale) * key_dim**0.5)
    spreads = {
        core.key: 1.0,
        core.value: 1.0,
        core.sinks: 1.0,
        core.query: query_spread,
        **dict.fromkeys(core.query.all_input_nodes, query_spread),
    }
    values = {leaf: numbers.value(leaf, spreads.get(leaf)) for leaf in leaves}
    with torch.no_grad(), exact_products():
        out, query, *masks = graph.forward(  # not graph(...), which prints the code where it raises
            *(v.clone() if isinstance(v, torch.Tensor) else v for v in values.values())
        )
        wide = torch.promote_types(query.dtype, torch.float32)
        expected = dense(
            query[:, :, rows].to(wide),
            values[core.key].to(wide),
            values[core.value].to(wide),
            masks[0].to(wide) if masks else None,
            values[core.sinks].to(wide) if core.sinks is not None else None,
            scale=core.scale,
            softcap=core.softcap,
        )
        out = out.to(wide).reshape(*query.shape[:3], -1)[:, :, rows]
        seen = torch.ones(expected.shape[:3], dtype=torch.bool, device=out.device)
        if masks:
            seen = seen & ~hides(masks[0]).all(-1)
        if not bool(seen.any()):
            return None, 0.0
    epsilon = max(torch.finfo(value_of(v).dtype).eps for v in (core.node, core.query, core.key, core.value))
    bound = (8 * epsilon + 1e-5) * size * float(expected[seen].abs().max())
    return float((out - expected)[seen].abs().max()), bound
