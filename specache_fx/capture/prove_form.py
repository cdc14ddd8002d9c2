"""Proves what attention that is spelt out computes: it runs on random numbers, in float64.

    scale, softcap    the slope of the scores at 0, and their bound, both by runs
    sinks             the vector `[num_heads]` of parameters with which the proof holds
    proof             the output is the normal form (`dense`), with the mask that will be bound

Two sets of numbers have to agree: a number that the graph computes would pass for a constant in one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from specache_fx.capture.graph_slices import ancestors, constant_of, extract
from specache_fx.capture.graph_utils import (
    is_float,
    is_integer,
    is_static_input,
    same_sizes,
    shape_of,
    target_name,
)
from specache_fx.capture.mask_rows import UnknownFormError
from specache_fx.capture.random_numbers import Numbers, dense
from specache_fx.errors import first_line

_aten = torch.ops.aten
_HIDDEN = -1e4  # a key with this on its score, or less, has probability 0
_FAR = 1e9  # a product at which each softcap is reached
_MOST_SOFTCAP = 1e6
_EXACT, _ROUGH = 1e-8, 1e-6  # relative, in float64: of the proof, and of a number read
_SEEDS = 16  # tried until random masks show something


@dataclass(frozen=True)
class SpeltOut:
    """An attention that is spelt out.

    Attributes:
        gm: The graph.
        softmax: Its softmax.
        path: From the product of queries and keys to the softmax's input.
        cone: That product, and what is computed from it up to the output.
        sides: Query, key and value.
        num_heads: Heads of the scores.
        factors: Nodes that multiply by a number which is computed in the graph.
        mask: What will be bound; None where nothing is added.
        newest: Only the newest query counts.
    """

    gm: GraphModule
    softmax: Node
    path: list[Node]
    cone: list[Node]
    sides: list[Node]
    num_heads: Any
    factors: list[Node]
    mask: Node | None
    newest: bool


class Form(NamedTuple):
    """See `AttentionCore`."""

    scale: float
    softcap: float | None = None
    sinks: Node | None = None


class _HidesAll(Exception):
    """Random masks show no two keys to any query."""


class _Wide(Interpreter):
    """Runs a graph in float64, casts between floating dtypes left out."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        dtype = kwargs.get("dtype") or torch.float32
        if target is _aten._to_copy.default and args[0].is_floating_point() and dtype.is_floating_point:
            return args[0]
        args = pytree.tree_map_only(torch.Tensor, _wide, args)
        args = (*args[:2], False) if target is _aten._softmax.default else args  # no cast to float32
        return super().call_function(target, args, kwargs)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _Run:
    """An attention on one set of random numbers.

    Attributes:
        vectors: What may be sinks.
        products: Of queries and keys.
        factor: What `SpeltOut.factors` multiply by.
    """

    def __init__(self, of: SpeltOut, seed: int) -> None:
        self._of, gm, cone, sides = of, of.gm, of.cone, of.sides
        self._queries = slice(-1 if of.newest else None, None)
        read = {arg for each in cone[1:] for arg in each.all_input_nodes} - set(cone)
        self._leaves = [node for node in gm.graph.nodes if node in read]
        # Sinks are computed from their parameter; all else that is added or hides is random itself.
        vectors = {node for node in gm.graph.nodes if _is_vector(node, of.num_heads)}
        masks = (leaf for leaf in self._leaves if ancestors([leaf]).isdisjoint({*sides, *vectors}))
        ends = {*sides, *masks, *vectors, *filter(is_integer, gm.graph.nodes)}
        between = ancestors([cone[-1], *self._leaves, *([] if of.mask is None else [of.mask])], ends)
        starts = [
            each for each in gm.graph.nodes if each in between and (each in ends or each.op == "placeholder")
        ]
        if not {*sides} <= {*starts}:
            raise UnknownFormError(cone[-1], "is of parts that can't be told from each other")
        self.vectors = [node for node in starts if node in vectors]
        numbers = Numbers(cone[-1], seed)
        self._values = {
            node: _wide(numbers.value(node, 1.0 if node in sides or node in vectors else None))
            for node in starts
        }
        self.products, *self._operands = self.compute(cone[0], *self._leaves)
        self._graphs: dict[Node, GraphModule] = {}
        self.factor = 1.0
        for node in of.factors:
            factor = float(self.compute(node.args[1])[0])
            self.factor *= factor if target_name(node) == "mul" else 1 / factor

    def compute(self, *nodes: Any) -> Sequence[torch.Tensor]:
        """What nodes are."""
        graph = extract(self._of.gm, [*nodes], [*self._values])
        found: Sequence[torch.Tensor] = _Wide(graph).run(*self._values.values())
        return found

    def _scores(self, node: Node, products: torch.Tensor) -> torch.Tensor:
        """What a node between the product and the softmax is with other products: `[heads, q_len, kv_len]`."""
        if node not in self._graphs:
            self._graphs[node] = extract(self._of.gm, [node], [self._of.cone[0], *self._leaves])
        (out,) = _Wide(self._graphs[node]).run(products, *self._operands)
        scores: torch.Tensor = out.flatten(0, -3)[..., : products.shape[-1]]
        return scores

    def form_of(self, node: Node, *, proves: bool) -> Form | None:
        """Scale (by `factor`, too) and softcap of a node of the scores; None where it has none.

        Args:
            node: The node.
            proves: Compare it with these on the random products.

        Raises:
            _HidesAll: If no row shows two keys.
        """
        plain = self._scores(node, torch.zeros_like(self.products))
        shown = plain > _HIDDEN
        pairs = (shown[:, self._queries].sum(-1) > 1).nonzero().tolist()
        if not pairs:
            raise _HidesAll
        head, query = pairs[0]
        i, j = shown[head, self._queries][query].nonzero()[:2, 0].tolist()

        def slope(product: float) -> float:
            """What a product adds to its score, beside another key's: a softmax sees no more."""
            tilt = torch.zeros_like(self.products)
            tilt[..., i] = product
            found = (self._scores(node, tilt) - plain)[head, self._queries][query]
            return float(found[i] - found[j])

        one, far = slope(1.0), slope(_FAR)
        form = Form(one)
        if 0 < abs(far) < _MOST_SOFTCAP:
            half = abs(far / one) / 2 if one else 1.0
            ratio = torch.tensor(slope(half) / far, dtype=torch.float64)
            form = Form(far * float(ratio.atanh()) / half, abs(far))
        elif not abs(far - _FAR * one) <= _ROUGH * abs(far):
            return None
        if not abs(far + slope(-_FAR)) <= _ROUGH * abs(far):
            return None  # bounded on one side
        if proves:
            want = self.products.reshape(plain.shape) * form.scale
            want = want if form.softcap is None else form.softcap * torch.tanh(want / form.softcap)
            rest = self._scores(node, self.products) - plain - want
            rest = rest - rest.gather(-1, shown.int().argmax(-1, keepdim=True))
            if not float((rest * shown).abs().max()) <= _ROUGH * float(want.abs().max()):
                return None
        return form

    def distance(self, form: Form) -> float:
        """From the normal form."""
        mask = self._of.mask
        named = [node for node in (mask, form.sinks) if node is not None]
        out, *found = self.compute(self._of.cone[-1], *named)
        values = dict[Node | None, torch.Tensor](zip(named, found, strict=True))
        row, sinks = values.get(mask), values.get(form.sinks)
        query, key, value = (self._values[node] for node in self._of.sides)
        query = query.reshape(key.shape[0], self._of.num_heads, -1, query.shape[-1])[:, :, self._queries]
        want = dense(query, key, value, row, sinks, scale=form.scale, softcap=form.softcap)
        out = out.reshape(*want.shape[:2], -1, want.shape[-1])[:, :, self._queries]
        live = torch.ones(want.shape[:3], dtype=torch.bool, device=out.device)
        live = live if row is None else live & (row > _HIDDEN).any(-1)
        return float((out - want)[live].abs().max() / want[live].abs().max())

    def changes(self, softmax: Node, node: Node) -> bool:
        """Whether a node behind the softmax has other probabilities."""
        want, found = (each[..., : self.products.shape[-1]] for each in self.compute(softmax, node))
        return not torch.allclose(found.reshape(want.shape), want, rtol=0, atol=_EXACT, equal_nan=True)


def prove(attention: SpeltOut) -> Form:
    """Scale, softcap and sinks with which an attention is the normal form.

    Raises:
        UnknownFormError: If there are none: names the operation that has no place in it.
    """
    try:
        with torch.no_grad():
            return _proved(attention)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = f"can't be computed on small tensors ({first_line(error)})"
        raise UnknownFormError(attention.softmax, reason) from error


def _proved(of: SpeltOut) -> Form:
    softmax = of.softmax
    scores, runs, forms = softmax.all_input_nodes[0], list[_Run](), list[Form | None]()
    for seed in range(_SEEDS):
        run = _Run(of, seed)
        with contextlib.suppress(_HidesAll):
            forms.append(run.form_of(scores, proves=False))
            runs.append(run)
        if len(runs) == 2:
            break
    else:
        raise UnknownFormError(softmax, "was taken for an attention, but its masks hide all")
    known = [form for form in forms if form is not None]
    distance = torch.inf
    for sinks in (None, *runs[0].vectors) if len(known) == len(runs) else ():
        forms_with = [form._replace(sinks=sinks) for form in known]
        found = [run.distance(form) for run, form in zip(runs, forms_with, strict=True)]
        if max(found) < _EXACT:
            scales = [form.scale / run.factor for run, form in zip(runs, known, strict=True)]
            if abs(scales[0] - scales[1]) <= _ROUGH * abs(scales[0]):
                return forms_with[0]._replace(scale=scales[0])
        distance = min(distance, max(found))
    raise _refusal(of, runs, distance)


def _refusal(of: SpeltOut, runs: list[_Run], distance: float) -> UnknownFormError:
    """Names the first operation that breaks the form."""
    softmax, cone = of.softmax, of.cone
    after = cone[cone.index(softmax) + 1 :]
    columns = [(shape_of(node) or (0,))[-1:] for node in (cone[0], softmax)]
    for node in of.path[1:]:
        with contextlib.suppress(_HidesAll, RuntimeError, IndexError):
            if any(run.form_of(node, proves=True) is None for run in runs):
                numbers = [each for each in node.all_input_nodes if shape_of(each) == ()]
                moving = next((each.name for each in numbers if constant_of(of.gm, each) is None), None)
                why = "makes other scores of the products than scale, softcap and masks do"
                more = "" if moving is None else f", and `{moving}` may change: give the number itself"
                return UnknownFormError(node, why + more)
    for node in itertools.takewhile(lambda node: target_name(node) != "bmm", after):
        of_keys = same_sizes((shape_of(node) or (0,))[-1:], columns[0])
        if of_keys and any(run.changes(softmax, node) for run in runs):
            return UnknownFormError(node, "changes its probabilities")
    if not same_sizes(*columns):
        return UnknownFormError(softmax, "is over columns that are neither keys nor one sink a head")
    parts = "scale, softcap, masks, sinks and softmax"
    reason = f"was taken for an attention, but on random numbers it differs from {parts} by {distance:.2g}"
    return UnknownFormError(softmax, reason)


def _is_vector(node: Node, num_heads: Any) -> bool:
    """Whether a node has a number for each head, computed from parameters alone."""
    if not is_float(node, 1) or not same_sizes(shape_of(node), (num_heads,)):
        return False
    read = [each for each in ancestors([node]) if each.op == "placeholder" and shape_of(each) is not None]
    return bool(read) and all(map(is_static_input, read))
