"""Proves what attention that is spelt out computes: it runs on random numbers, in float64.

    scale, softcap    the slope of the scores at 0, and their bound, both by runs
    sinks             the vector `[num_heads]` of parameters with which the proof holds
    proof             the output is the normal form (`dense`), with the mask that will be bound

Two sets of numbers have to agree: a number that the graph computes would pass for a constant in one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from specache_fx.capture.attention.random_numbers import PLAIN_SEEDS, Numbers, dense
from specache_fx.capture.graph.graph_slices import ancestors, constant_of, extract
from specache_fx.capture.graph.graph_utils import (
    is_float,
    is_integer,
    is_static_input,
    largest_number,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import UnknownFormError
from specache_fx.errors import first_line

_aten = torch.ops.aten
_HIDDEN = -1e4  # a key with this on its score, or less, has probability 0
_FAR = 2.0**30  # a product at which each softcap is reached
_MOST_SOFTCAP = 1e6
_EXACT, _ROUGH = 1e-8, 1e-6  # relative, in float64: of the proof, and of a number read
_SEEDS, _RUNS = 16, 4  # tried until so many show something; each second one has more keys
_SIZES = (1e-3, 1.0, 30.0, 1e3, _FAR)  # of products
_FEW_KEYS, _SOME_KEYS, _MOST_KEYS = 6, 67, 8192


@dataclass(frozen=True)
class SpeltOut:
    """An attention that is spelt out.

    Attributes:
        gm: The graph.
        softmax: Its softmax.
        path: From the product of queries and keys to the softmax's input.
        swapped: Those of the path that are `[batch, q_len, num_heads, kv_len]`.
        cone: That product, and what is computed from it up to the output.
        sides: Query, key and value.
        num_heads: Heads of the scores.
        factors: Nodes that multiply by a number which is computed in the graph.
        mask: What will be bound; None where nothing is added.
    """

    gm: GraphModule
    softmax: Node
    path: list[Node]
    swapped: set[Node]
    cone: list[Node]
    sides: list[Node]
    num_heads: int
    factors: list[Node]
    mask: Node | None


class Form(NamedTuple):
    """See `AttentionCore`."""

    scale: float
    softcap: float | None = None
    sinks: Node | None = None


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
        factors: What each of `SpeltOut.factors` multiplies by.
    """

    def __init__(self, of: SpeltOut, seed: int) -> None:
        self._of = of
        read = {arg for each in of.cone[1:] for arg in each.all_input_nodes} - set(of.cone)
        self._leaves = [node for node in of.gm.graph.nodes if node in read]
        try:
            self._draw(seed, from_conditions=True)
        except (RuntimeError, IndexError):  # lengths of masks that have symbols of their own
            self._draw(seed, from_conditions=False)
        numbers = (float(self._compute(node.args[1])[0]) for node in of.factors)
        self.factors = {
            node: number if target_name(node) == "mul" else 1 / number
            for node, number in zip(of.factors, numbers, strict=True)
        }

    def _draw(self, seed: int, *, from_conditions: bool) -> None:
        """Give numbers to sides, parameters and masks: to what masks are computed from, or to masks themselves."""
        gm, cone, sides = self._of.gm, self._of.cone, set(self._of.sides)
        vectors = {node for node in gm.graph.nodes if _is_vector(node, self._of.num_heads)}
        sizes = set(filter(is_integer, gm.graph.nodes))
        masks = _sources(self._leaves, sides | vectors, sizes, from_conditions=from_conditions)
        ends = {*sides, *masks, *vectors, *sizes}
        read = [cone[-1], *self._leaves, *([] if self._of.mask is None else [self._of.mask])]
        between = ancestors(read, ends)
        starts = [
            each for each in gm.graph.nodes if each in between and (each in ends or each.op == "placeholder")
        ]
        if not sides <= {*starts}:
            raise UnknownFormError(cone[-1], "is of parts that can't be told from each other")
        self.vectors = [node for node in starts if node in vectors]
        numbers = Numbers(cone[-1], seed)
        numbers.assign(value_of(cone[0]).shape[2], _keys_of(cone) if seed % 2 else _FEW_KEYS)
        self._values = {
            node: _wide(numbers.value(node, 1.0 if node in sides or node in vectors else None))
            for node in starts
        }
        self._graphs: dict[Any, GraphModule] = {}
        shown = self._run_leaves()
        if seed < PLAIN_SEEDS:  # negate conditions until as many keys show as can be: some show, others hide
            conditions = [node for node, value in self._values.items() if _is_bool(node) and value.dim()]
            for node in conditions * 2:  # alone, one of two that hide all shows none
                self._values[node] = ~self._values[node]
                if (now := self._run_leaves()) < shown:
                    self._values[node] = ~self._values[node]
                shown = max(shown, now)
            self._run_leaves()

    def _run_leaves(self) -> int:
        """Compute what scores are computed from; returns the number of keys that are shown."""
        self._products, *self._operands = self._compute(self._of.cone[0], *self._leaves)
        self._shown = self._shown_at(self._of.softmax.all_input_nodes[0])
        return int(self._shown.sum())

    def _compute(self, *nodes: Any, values: dict[Node, Any] | None = None) -> Sequence[torch.Tensor]:
        """What nodes are, with other numbers for what they are computed from if these are given."""
        if nodes not in self._graphs:
            self._graphs[nodes] = extract(self._of.gm, [*nodes], [*self._values])
        found: Sequence[torch.Tensor] = _Wide(self._graphs[nodes]).run(*(values or self._values).values())
        return found

    def _scores(self, node: Node, products: torch.Tensor) -> torch.Tensor:
        """What a node between the product and the softmax is with other products: `[batch, num_heads, q_len, columns]`.

        Columns are keys, and a sink behind them.
        """
        if (node, None) not in self._graphs:
            self._graphs[node, None] = extract(self._of.gm, [node], [self._of.cone[0], *self._leaves])
        (out,) = _Wide(self._graphs[node, None]).run(products, *self._operands)
        return self._by_heads(out.transpose(1, 2) if node in self._of.swapped else out)

    def _by_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of queries, in whichever dimensions, as `[batch, num_heads, q_len, dim]`."""
        batch = self._values[self._of.sides[1]].shape[0]
        return rows.reshape(batch, self._of.num_heads, -1, rows.shape[-1])

    def _shown_at(self, node: Node) -> torch.Tensor:
        """Which keys show at a node of the scores, where the row reads a product."""
        plain = self._scores(node, 0 * self._products)
        # Less a maximum, a row that hides all keys seems to show them. It adds no product to what hides.
        reads = (self._scores(node, self._products) != plain).any(-1, keepdim=True)
        wrong = bool((plain > -_HIDDEN).any())  # numbers that hide are added with the other sign
        return (plain > _HIDDEN) & reads & (not wrong)

    def hides(self, node: Node) -> bool:
        """Whether a node of the scores shows no two keys to any query: there is no form to read."""
        shown = self._shown_at(node)
        return bool((shown.sum(-1) < min(2, shown.shape[-1])).all())

    def form_of(self, node: Node, factors: Sequence[Node]) -> Form | None:
        """Scale and softcap of a node of the scores; None where it has none.

        Args:
            node: The node.
            factors: Of `SpeltOut.factors` those that lead to it. They are no part of the scale.
        """
        plain = self._scores(node, 0 * self._products)
        # A statistic; or a prompt of one token, whose probability is 1 at each scale.
        if plain.shape[-1] == 1 or plain.numel() < self._products.numel():
            return Form(1.0)
        keys = self._products.shape[-1]
        products, more = self._by_heads(self._products), plain.shape[-1] - keys
        if plain.shape[:-1] != products.shape[:-1] or more < 0:
            return None
        products = torch.nn.functional.pad(products, (0, more))  # one key and a sink are two columns
        shown = self._shown[..., : keys + more] & (plain > _HIDDEN)
        pairs = (shown.sum(-1) > 1).nonzero()
        if not len(pairs):
            return None
        batch, head, query = pairs[0].tolist()
        i, j = shown[batch, head, query].nonzero()[:2, 0].tolist()

        def slope(product: float) -> float:
            """What a product adds to its score, beside another key's: a softmax sees no more."""
            tilt = torch.zeros_like(self._products)
            tilt[..., i] = product
            found = (self._scores(node, tilt) - plain)[batch, head, query]
            return float(found[i] - found[j])

        one, far = slope(1.0), slope(_FAR)
        form = Form(one)
        if 0 < abs(far) < _MOST_SOFTCAP:
            half = abs(far / one) / 2 if one else 1.0
            ratio = torch.tensor(slope(half) / far, dtype=torch.float64)
            form = Form(far * float(ratio.atanh()) / half, abs(far))
        first = shown.int().argmax(-1, keepdim=True)
        for size in _SIZES:  # a bound may be far out, in some heads or at some keys
            want = products * size * form.scale
            want = want if form.softcap is None else form.softcap * torch.tanh(want / form.softcap)
            rest = self._scores(node, size * self._products) - plain - want
            rest = (rest - rest.gather(-1, first))[shown]
            if not float(rest.abs().max()) <= _ROUGH * float(want.abs().max()):
                return None
        return form._replace(scale=form.scale / math.prod(self.factors[each] for each in factors))

    def distance(self, form: Form) -> float:
        """From the normal form: of products of size 1, and of such that leave most probabilities small."""
        return max(self._distance(form, size) for size in (1.0, 30.0))

    def _distance(self, form: Form, size: float) -> float:
        query, key, value = self._of.sides
        values = self._values | {query: self._values[query] * size}
        named = [node for node in (self._of.cone[-1], self._of.mask, form.sinks) if node is not None]
        out, *found = self._compute(*named, values=values)
        sinks = None if form.sinks is None else found.pop()
        row = found.pop() if found else None
        q, k, v = (values[node] for node in (query, key, value))
        scale = form.scale * math.prod(self.factors.values())
        want = dense(self._by_heads(q), k, v, row, sinks, scale=scale, softcap=form.softcap)
        out = self._by_heads(out)
        live = torch.ones(want.shape[:3], dtype=torch.bool, device=out.device)
        live = live if row is None else live & (row > _HIDDEN).any(-1)
        return float((out - want)[live].abs().max() / want[live].abs().max())

    def changes(self, node: Node) -> bool:
        """Whether a node behind the softmax has other probabilities."""
        keys = self._products.shape[-1]
        want, found = (each[..., :keys] for each in self._compute(self._of.softmax, node))
        return not torch.allclose(found.reshape(want.shape), want, rtol=0, atol=_EXACT, equal_nan=True)


def _sources(
    leaves: Sequence[Node], inner: set[Node], sizes: set[Node], *, from_conditions: bool
) -> set[Node]:
    """What of masks and biases gets random numbers.

    Args:
        leaves: What is added to the scores, hides or multiplies.
        inner: Nodes that are random themselves. What is computed from them is computed.
        sizes: Integers.
        from_conditions: The conditions that they are computed from, where these are all. Several may be of one.
    """
    found = set[Node]()
    for leaf in leaves:
        behind = ancestors([leaf], {*inner, *sizes})
        if not behind.isdisjoint(inner):
            continue
        conditions = {node for node in behind if from_conditions and _is_bool(node)}
        conditions -= {node for node in conditions if len(conditions & ancestors([node], sizes)) > 1}
        more = (node for node in ancestors([leaf], {*conditions, *sizes}) - conditions - sizes)
        found |= {leaf} if any(node.op == "placeholder" for node in more) else conditions
    return found


def _is_bool(node: Node) -> bool:
    """Whether it is a tensor of conditions; a single one is a constant, or none of keys."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() > 0


def _keys_of(cone: Sequence[Node]) -> int:
    """A number of keys behind all numbers in the operators, where these may begin to do something else."""
    most = largest_number(cone)
    if most > _MOST_KEYS:
        raise UnknownFormError(
            cone[0], f"may be read in another way from {most} keys on, too many to prove it"
        )
    return max(_SOME_KEYS, most + _SOME_KEYS)


def prove(attention: SpeltOut) -> Form:
    """Scale, softcap and sinks with which an attention is the normal form.

    Raises:
        UnknownFormError: If there are none: names the operation that has no place in it.
    """
    try:
        with torch.no_grad():
            return _proved(attention)
    except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        reason = f"can't be computed on small tensors ({first_line(error)})"
        raise UnknownFormError(attention.softmax, reason) from error


def _proved(of: SpeltOut) -> Form:
    softmax, runs, hiding, failed = of.softmax, list[_Run](), list[_Run](), None
    for seed in range(_SEEDS):
        try:
            run = _Run(of, seed)
            (hiding if run.hides(softmax.all_input_nodes[0]) else runs).append(run)
        except (RuntimeError, IndexError) as error:  # lengths that the graph's guards exclude
            failed = error
        if len(runs) == _RUNS:
            break
    if len(runs) < 2:
        if failed is not None and not hiding:
            raise failed
        first = (node for node in of.path[1:] if all(run.hides(node) for run in hiding))
        raise UnknownFormError(next(first, softmax), "hides all keys, or makes scores that read no product")
    common, distance = _common_form(runs, softmax.all_input_nodes[0], of.factors), torch.inf
    forms = [] if common is None else [common._replace(sinks=each) for each in (None, *runs[0].vectors)]
    for form in forms:
        found = max(run.distance(form) for run in runs)
        if found < _EXACT:
            return form
        distance = min(distance, found)
    raise _refusal(of, runs, distance)


def _common_form(runs: Sequence[_Run], node: Node, factors: Sequence[Node]) -> Form | None:
    """The form of a node of the scores in all runs; None where it has none."""
    forms = [form for run in runs if (form := run.form_of(node, factors)) is not None]
    numbers = ([form.scale for form in forms], [form.softcap or 0.0 for form in forms])
    same = all(max(each) - min(each) <= _ROUGH * abs(each[0]) for each in numbers if each)
    return forms[0] if same and len(forms) == len(runs) else None


def _refusal(of: SpeltOut, runs: list[_Run], distance: float) -> UnknownFormError:
    """Names the first operation that breaks the form."""
    softmax, cone = of.softmax, of.cone
    after = cone[cone.index(softmax) + 1 :]
    columns = [(shape_of(node) or (0,))[-1:] for node in (cone[0], softmax)]
    factors = list[Node]()
    for node in of.path[1:]:
        if shape_of(node) is None:  # several results
            continue
        factors += [node] if node in of.factors else []
        with contextlib.suppress(RuntimeError, IndexError):
            if _common_form(runs, node, factors) is None:
                numbers = [each for each in node.all_input_nodes if shape_of(each) == ()]
                moving = next((each.name for each in numbers if constant_of(of.gm, each) is None), None)
                why = "makes other scores of the products than scale, softcap and masks do"
                more = "" if moving is None else f", and `{moving}` may change: give the number itself"
                return UnknownFormError(node, why + more)
    for node in itertools.takewhile(lambda node: target_name(node) != "bmm", after):
        of_keys = is_float(node, 5) and same_sizes((shape_of(node) or (0,))[-1:], columns[0])
        if of_keys and any(run.changes(node) for run in runs):
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
