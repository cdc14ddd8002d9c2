"""`Program`: the findings on one graph, which passes and runners read. Nothing changes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch._ops import OpOverload
from torch.fx import Node

from specache_fx.capture.graph.graph_utils import source_of
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.graph.expansion import Expansion
from specache_fx.runtime.graph.graph_part import Part
from specache_fx.runtime.graph.sources import PositionalPart, Sources
from specache_fx.runtime.layers.layout import LayerShape


class Phase(Enum):
    """A graph's use of the KV cache."""

    NO_CACHE = "no cache"
    PREFILL = "prefill"
    EXTEND = "extend"
    DECODE = "decode"


class CacheForm(NamedTuple):
    """How Dynamo has a cache that the graph takes with heads first (`heads_first`).

    Attributes:
        form: See `runtime/handles/handle_form.py`.
        num_kv_heads: KV heads.
        values: Position of the values among the graph's inputs or outputs, where Dynamo has both in one tensor.
    """

    form: str
    num_kv_heads: int
    values: int | None = None


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

    @property
    def message(self) -> str:
        """The attention that is left alone, and the reason."""
        where = f" ({self.source})" if self.source else ""
        return f"attention `{self.node}`{where} is left alone: {self.reason}"

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}"


def merged_messages(refusals: Sequence[Refusal]) -> list[str]:
    """The messages of refusals: layers that differ in the names of their nodes alone are one."""
    groups: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.source, re.sub("`[^`]*`", "``", refusal.reason)), []).append(refusal)
    return [
        f"{first}{f' {len(others)} more like it.' if others else ''}" for first, *others in groups.values()
    ]


@dataclass(frozen=True)
class AttentionCore:
    """One attention in normal form, whatever it is made of: `attention_cores` finds them.

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
        is_turned: Heads of `node` are `[groups, num_kv_heads]`, those of all else `[num_kv_heads, groups]`.
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
    is_turned: bool = False
    inner: frozenset[Node] = frozenset()
    problem: tuple[str, str] | None = None


@dataclass(frozen=True)
class Side:
    """Keys or values that a model caches.

    Attributes:
        root: Past and new, `[batch, num_kv_heads, kv_len, head_dim]`.
        new: This call's part.
        past: The placeholder of the past; None in prefill.
        output: What is returned: the root, or its newest `window - 1` tokens.
        window: Tokens that a query reaches, its own included, where the cache keeps no more (a sliding window or a
            chunk); None where all are kept.
    """

    root: Node
    new: Node
    past: Node | None
    output: Node
    window: int | None


@dataclass(frozen=True)
class AttentionSite:
    """One attention that will be rewritten. Nodes are those of the graph that `match_attention` saw.

    Attributes:
        layer: Index of its cache, in graph order.
        core: What it computes.
        keys: What is cached of its keys, before repeat_kv. A `window` is that of its values, too.
        values: What is cached of its values.
        shape: Form of what is cached.
        shared: It reads the cache of an earlier attention, `layer`, and keeps no pairs of its own.
        expansion: How its keys and values are computed from what is cached (MLA); None where they are what is cached.
    """

    layer: int
    core: AttentionCore
    keys: Side
    values: Side
    shape: LayerShape
    shared: bool = False
    expansion: Expansion | None = None

    @property
    def source(self) -> str:
        """The model's line."""
        return source_of(self.core.node)


@dataclass(frozen=True)
class OutputPlan:
    """The assembly of Dynamo's outputs.

    Attributes:
        handles: Output index to slot (2 * layer, + 1 for values).
        kept: Output indices that the rewritten graph still computes, in its order.
        lengths: Output indices that are integers, or tensors that grow with the context and are computed from
            positions alone: computed apart from the decode graph.
        length_part: Computes them.
        constants: Output indices that are plain values.
    """

    handles: dict[int, int]
    kept: tuple[int, ...]
    lengths: tuple[int, ...]
    length_part: Part
    constants: dict[int, object]


@dataclass(frozen=True)
class Decoding:
    """Findings on a decode graph alone.

    Attributes:
        sources: Lengths, positions and masks among the inputs.
        masks: The newest query's rows of the masks of attentions to all tokens.
        window_masks: Those of attentions over a window.
        prelude: Computes what the rest of the graph reads of positions and lengths.
        boundary: The nodes that it computes.
        asserts: Assertions that no data goes into, which the prelude makes for the output token alone.
        logits: Position of the logits among the kept outputs; None where there are none.
        single_lane: Why it computes one token at a time; None where it can compute two.
        fixed_lengths: Lengths of the cache that a constant of the graph equals. It may be a count of tokens: lane 1 may
            have a wrong position there.
        is_pure: It writes to no input, does nothing besides and draws no random numbers: two runs give the same.
    """

    sources: Sources
    masks: PositionalPart
    window_masks: PositionalPart
    prelude: PositionalPart
    boundary: tuple[Node, ...]
    asserts: tuple[Node, ...]
    logits: int | None
    single_lane: str | None
    is_pure: bool
    fixed_lengths: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Program:
    """One graph in normal form, understood. `analyse` makes it.

    Attributes:
        config: The options.
        phase: What the graph does with the KV cache.
        sites: The attentions that are rewritten.
        refusals: Those that are not, and why.
        weights: Positions of parameters and buffers among Dynamo's inputs, each with its name in the module.
        values: Python values of modules that are constants of the graph (`specache_fx/direct/traced_values.py`). None
            where they can't be read.
        floats: Positions of inputs that are floats of modules: module and attribute.
        past_inputs: Positions of the past KV inputs among Dynamo's, keys and values in turn.
        other_kv_inputs: Positions of inputs that could be KV tensors too, and stay as they are.
        input_forms: Caches that Dynamo has in another form, by position.
        output_forms: The same of outputs.
        newest_inputs: Further inputs behind Dynamo's (`newest_tokens`): the position of the ids of a whole sequence,
            and how many of the newest of them.
        fixed_sizes: Position to dimension of inputs that grow with the context, where Dynamo took the size for a
            constant (decode).
        kv_lens: Tokens of the past KV inputs that grow, in the call that is traced (decode).
        token: Position of the token ids among Dynamo's inputs: of a decode graph `[batch, 1]`; None where there are
            none.
        outputs: How Dynamo's outputs are made; None where nothing is rewritten.
        prompt_masks: The masks that are tested before they are made (prefill and extend).
        rules: Output of an attention to the place of its mask in `prompt_masks`.
        decoding: What is known of a decode graph; None for others.
        fused: Layers whose decode step one operator computes, each with it (`lowering.fused_layers`).
        left_alone: Message that says why the whole graph is skipped, or None.
    """

    config: SpecacheConfig
    phase: Phase = Phase.NO_CACHE
    sites: tuple[AttentionSite, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    weights: dict[int, str] = field(default_factory=dict)
    values: dict[str, dict[str, str]] | None = field(default_factory=dict)
    floats: dict[int, tuple[str, str]] = field(default_factory=dict)
    past_inputs: tuple[int, ...] = ()
    other_kv_inputs: tuple[int, ...] = ()
    input_forms: dict[int, CacheForm] = field(default_factory=dict)
    output_forms: dict[int, CacheForm] = field(default_factory=dict)
    newest_inputs: tuple[tuple[int, int], ...] = ()
    fixed_sizes: dict[int, int] = field(default_factory=dict)
    kv_lens: frozenset[int] = frozenset()
    token: int | None = None
    outputs: OutputPlan | None = None
    prompt_masks: tuple[Part, ...] = ()
    rules: dict[Node, int] = field(default_factory=dict)
    decoding: Decoding | None = None
    fused: dict[int, OpOverload] = field(default_factory=dict)
    left_alone: str | None = None

    @property
    def owners(self) -> list[AttentionSite]:
        """The attentions that have a cache of their own: one a layer."""
        return [site for site in self.sites if not site.shared]

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Forms of the pairs of each layer, in graph order."""
        return tuple(site.shape for site in self.owners)

    @property
    def window_layers(self) -> set[int]:
        """The layers whose cache is a window."""
        return {site.layer for site in self.sites if site.keys.window is not None}

    @property
    def exact_layers(self) -> set[int]:
        """The layers whose cache is on the device at 16 bits: windows, and the first `resident_layers` of the others.

        Nothing of them is selected, fetched or waited for.
        """
        others = [site.layer for site in self.owners if site.keys.window is None]
        return self.window_layers | set(others[: self.config.resident_layers])
