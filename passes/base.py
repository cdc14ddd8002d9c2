"""What passes share: the phase of a graph, what was found in it, and the shape of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch.fx import GraphModule, Node

from specache_fx.config import SpecacheConfig
from specache_fx.passes.sources import Prelude, Sources


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


@dataclass(frozen=True)
class AttentionSite:
    """One attention that will be rewritten. Nodes are those of the graph that `match_attention` saw.

    Attributes:
        layer: Its index among the rewritten ones, in graph order.
        node: The `scaled_dot_product_attention` call.
        query: `[batch, num_heads, q_len, key_dim]`.
        new_key: This call's keys, `[batch, num_kv_heads, q_len, key_dim]`, before repeat_kv.
        new_value: This call's values.
        past_key: Placeholder of the past keys; None in prefill.
        past_value: Placeholder of the past values.
        key_root: The whole keys, past and new: a graph output.
        value_root: The whole values: a graph output.
        mask: The mask node, if there is one.
        scale: Factor on the scores.
        num_kv_heads: KV heads.
        key_dim: Elements of a key.
        value_dim: Elements of a value.
        source: The model's line.
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
    mask: Node | None
    scale: float
    num_kv_heads: int
    key_dim: int
    value_dim: int
    source: str


@dataclass
class OutputPlan:
    """How the outputs of Dynamo's graph are put together again.

    Attributes:
        total: Number of outputs that Dynamo expects.
        handles: Output index to slot (2 * layer, + 1 for values).
        kept: Output indices that the rewritten graph still computes, in its order.
        lengths: Output indices that are integers, computed apart from the decode graph.
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
        sites: The attentions that are rewritten.
        refusals: Those that are not, and why.
        inputs: Names of Dynamo's placeholders, in order.
        outputs: Set by `bind_cache`.
        past_inputs: Positions of the past KV inputs among Dynamo's, keys and values in turn.
        other_kv_inputs: Positions of inputs that could be KV tensors too, and stay as they are.
        sources: Token, lengths, positions and masks among the inputs (decode).
        prelude: What depends on positions and lengths alone (decode).
        logits: Position of the logits among the kept outputs; None where there are none.
        mutated: Name of an input that the decode graph writes to, if there is one.
    """

    config: SpecacheConfig
    phase: Phase = Phase.NO_CACHE
    sites: list[AttentionSite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: OutputPlan | None = None
    past_inputs: list[int] = field(default_factory=list)
    other_kv_inputs: list[int] = field(default_factory=list)
    sources: Sources | None = None
    prelude: Prelude | None = None
    logits: int | None = None
    mutated: str | None = None


@dataclass(frozen=True)
class Pass:
    """A named step: valid graph in, valid graph out. It may edit the graph that it gets, never Dynamo's own.

    Attributes:
        name: As in logs and `explain`.
        run: `(graph module, state) -> graph module`.
    """

    name: str
    run: Callable[[GraphModule, PassState], GraphModule]
