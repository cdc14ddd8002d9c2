"""What passes share: the phase of a graph, what was found in it, and the shape of a pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch.fx import GraphModule, Node

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.expansion import Expansion
from specache_fx.runtime.prompt_masks import PromptMask
from specache_fx.runtime.sources import Prelude, Sources
from specache_fx.runtime.window_masks import WindowMasks


class Phase(Enum):
    """What a graph does with the KV cache; decided once, by `match_attention`."""

    NO_CACHE = "no cache"
    PREFILL = "prefill"
    EXTEND = "extend"
    DECODE = "decode"


@dataclass(frozen=True)
class Refusal:
    """An attention that is left as it is.

    Attributes:
        node: Name of the graph's node.
        source: The model's line that made it, "file:line: code", or "" where it is not known.
        reason: What stands in the way.
        remedy: What the user can do.
    """

    node: str
    source: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"attention `{self.node}`{where} is left alone: {self.reason}. {self.remedy}"


def alike(refusals: Sequence[Refusal]) -> list[str]:
    """What to say of refusals: layers that differ in the names of their nodes alone are one message."""
    groups: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.source, re.sub("`[^`]*`", "``", refusal.reason)), []).append(refusal)
    return [
        f"{first}{f' {len(others)} more like it.' if others else ''}" for first, *others in groups.values()
    ]


@dataclass(frozen=True)
class AttentionCore:
    """One attention in normal form, whatever it is made of: `normalize_attention` finds them.

        s = softcap * tanh(scale * q @ k^T / softcap) + mask        softmax over s and the head's sink        w @ v

    Attributes:
        node: Its output, `[batch, num_heads, q_len, value_dim]`, or with batch and heads in one dimension.
        query: `[batch, num_heads, q_len, key_dim]`.
        key: `[batch, num_heads or fewer, kv_len, key_dim]`: what repeat_kv made, or what it is made of.
        value: `[batch, num_heads or fewer, kv_len, value_dim]`.
        mask: bool (True where a key is seen) or float that is added, up to
            `[batch or 1, num_heads or 1, q_len or 1, kv_len]`; its last row is the newest query's. None where nothing
            is hidden or added.
        scale: Factor on the products.
        softcap: Bound of the scaled products; None where there is none.
        sinks: `[num_heads]`: what a column without a value scores; None where there is none.
        inner: The nodes from query, key, value, masks and sinks to `node`, that included.
        problem: Reason and remedy where it can't be rewritten whatever its cache; None where it can.
    """

    node: Node
    query: Node
    key: Node
    value: Node
    mask: Node | None
    scale: float
    softcap: float | None = None
    sinks: Node | None = None
    inner: frozenset[Node] = frozenset()
    problem: tuple[str, str] | None = None


@dataclass(frozen=True)
class AttentionSite:
    """One attention that will be rewritten. Nodes are those of the graph that `match_attention` saw.

    Attributes:
        layer: Index of its cache, in graph order.
        node: Its output: a `scaled_dot_product_attention` call, or a product with the values.
        query: `[batch, num_heads, q_len, key_dim]`.
        new_key: This call's keys, `[batch, num_kv_heads, q_len, key_dim]`, before repeat_kv.
        new_value: This call's values.
        past_key: Placeholder of the past keys; None in prefill.
        past_value: Placeholder of the past values.
        key_root: The keys that attention reads, past and new.
        value_root: The values.
        key_output: What the model returns as its cache: the root, or its newest `window - 1` tokens.
        value_output: The same of the values.
        mask: The mask node, if there is one.
        scale: Factor on the scores.
        softcap: Bound of the scaled scores; None where there is none.
        sinks: `[num_heads]`; None where there are none.
        num_kv_heads: KV heads of the cache.
        key_dim: Elements of a cached key.
        value_dim: Elements of a cached value.
        source: The model's line.
        window: Tokens that a query reaches, its own included, where the cache keeps no more (a sliding window or a
            chunk); None where it keeps all.
        shared: It reads the cache of an earlier attention, `layer`, and keeps no pairs of its own.
        expansion: How its keys and values are computed from what is cached (MLA); None where they are what is cached.
    """

    layer: int
    node: Node
    query: Node
    new_key: Node
    new_value: Node
    past_key: Node | None
    past_value: Node | None
    key_root: Node
    value_root: Node
    key_output: Node
    value_output: Node
    mask: Node | None
    scale: float
    softcap: float | None
    sinks: Node | None
    num_kv_heads: int
    key_dim: int
    value_dim: int
    source: str
    window: int | None = None
    shared: bool = False
    expansion: Expansion | None = None


@dataclass
class OutputPlan:
    """How the outputs of Dynamo's graph are put together again.

    Attributes:
        total: Number of outputs that Dynamo expects.
        handles: Output index to slot (2 * layer, + 1 for values).
        kept: Output indices that the rewritten graph still computes, in its order.
        lengths: Output indices that are integers, or tensors that grow with the context and are computed from
            positions alone: computed apart from the decode graph.
        length_graph: Computes them from `length_inputs`.
        length_inputs: Positions of its inputs among Dynamo's.
        constants: Output indices that are plain values.
    """

    total: int
    handles: dict[int, int] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    length_graph: GraphModule | None = None
    length_inputs: list[int] = field(default_factory=list)
    constants: dict[int, object] = field(default_factory=dict)


@dataclass
class PassState:
    """What the passes of one graph tell each other. Earlier passes fill in what later ones read.

    It is complete, and written to no more, when the graph's runner is made.

    Attributes:
        config: The options.
        phase: Set by `match_attention`.
        positions: Positions of inputs that say where tokens are written into buffers of fixed length.
        cores: The attentions in normal form; None until `normalize_attention` has run.
        unknown: Softmaxes around which no attention in normal form was found, and why.
        sites: The attentions that are rewritten.
        refusals: Those that are not, and why.
        inputs: Names of Dynamo's placeholders, in order.
        weights: Positions of parameters and buffers among Dynamo's inputs, each with its name in the module.
        swapped_inputs: Positions of the inputs whose dimensions 1 and 2 `heads_first` swapped, caches that have tokens
            first.
        swapped_outputs: Positions of such outputs.
        outputs: Set by `bind_cache`.
        past_inputs: Positions of the past KV inputs among Dynamo's, keys and values in turn.
        other_kv_inputs: Positions of inputs that could be KV tensors too, and stay as they are.
        token: Position of the token ids among Dynamo's inputs; None where there are none.
        sources: Token, lengths, positions and masks among the inputs (decode).
        fixed_sizes: Position to dimension of inputs that grow with the context, where Dynamo took the size for a
            constant (decode).
        prelude: What depends on positions and lengths alone (decode).
        window_masks: The masks of attentions over a window (decode); None where there are none.
        prompt_masks: The masks that are tested before they are made (prefill and extend).
        logits: Position of the logits among the kept outputs; None where there are none.
        mutated: Name of an input that the decode graph writes to, or of a call that is there for its effect, if there
            is one.
        random: Name of an operation of the decode graph that draws random numbers, if there is one.
        carried: Name of a state that the decode graph takes and gives back changed, if there is one.
        kept_cache: Name of a cache that is left alone and so goes on growing in the decode graph, if there is one.
        left_alone: Why the graph is left alone whatever is in it, if it is: a whole message.
    """

    config: SpecacheConfig
    phase: Phase = Phase.NO_CACHE
    positions: frozenset[int] = frozenset()
    cores: list[AttentionCore] | None = None
    unknown: dict[Node, str] = field(default_factory=dict)
    sites: list[AttentionSite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    swapped_inputs: list[int] = field(default_factory=list)
    swapped_outputs: list[int] = field(default_factory=list)
    outputs: OutputPlan | None = None
    past_inputs: list[int] = field(default_factory=list)
    other_kv_inputs: list[int] = field(default_factory=list)
    token: int | None = None
    sources: Sources | None = None
    fixed_sizes: dict[int, int] = field(default_factory=dict)
    prelude: Prelude | None = None
    window_masks: WindowMasks | None = None
    prompt_masks: list[PromptMask] = field(default_factory=list)
    logits: int | None = None
    mutated: str | None = None
    random: str | None = None
    carried: str | None = None
    kept_cache: str | None = None
    left_alone: str | None = None

    @property
    def owners(self) -> list[AttentionSite]:
        """The attentions that have a cache of their own: one a layer."""
        return [site for site in self.sites if not site.shared]

    @property
    def window_layers(self) -> set[int]:
        """The layers whose cache is a window."""
        return {site.layer for site in self.sites if site.window is not None}

    @property
    def exact_layers(self) -> set[int]:
        """The layers whose cache is on the device at 16 bits: windows, and the first `resident_layers` of the others.

        Nothing of them is selected, fetched or waited for.
        """
        others = [site.layer for site in self.owners if site.window is None]
        return self.window_layers | set(others[: self.config.resident_layers])


@dataclass(frozen=True)
class Pass:
    """A named step: valid graph in, valid graph out. It may edit the graph that it gets, never Dynamo's own.

    Attributes:
        name: As in logs and `explain`.
        run: `(graph module, state) -> graph module`.
    """

    name: str
    run: Callable[[GraphModule, PassState], GraphModule]


class LeaveAlone(Exception):
    """The attentions of a graph are to be left as they are; `reason` and `remedy` are those of their `Refusal`s."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy)
        self.reason, self.remedy = reason, remedy


def leave_alone(state: PassState, reason: str, remedy: str) -> None:
    """Give a decode graph up after it was matched: what its prompt stored is given back (`LeftAlone`)."""
    state.refusals += [Refusal(site.node.name, site.source, reason, remedy) for site in state.sites]
    state.sites, state.past_inputs, state.sources, state.phase = [], [], None, Phase.NO_CACHE
