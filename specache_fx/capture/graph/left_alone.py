"""What is left as it is: the one way out of an analysis, and remedies that its messages share."""

from __future__ import annotations

from torch.fx import Node

from specache_fx.capture.graph.graph_utils import described, source_of

LEAVE = 'backend="inductor" compiles this model as it is'
BREAKS = f'TORCH_LOGS="graph_breaks" shows where graphs break. {LEAVE}.'
GROW = "let the cache grow, cat([past, new], dim=-2) (with transformers a DynamicCache)"
GROWING = f"{GROW[0].upper()}{GROW[1:]}. {LEAVE}."


def sdpa_instead(node: Node) -> str:
    """The remedy for attention that is spelt out in another form."""
    if "/transformers/" in source_of(node):
        return f'Load it with attn_implementation="sdpa" if it can be. {LEAVE}.'
    return f"Use torch.nn.functional.scaled_dot_product_attention there if it can be. {LEAVE}."


class LeaveAlone(Exception):
    """Not a rewritable attention; `remedy` is "" where no user would expect one (no cache was asked for)."""

    def __init__(self, reason: str, remedy: str = f"{LEAVE}.") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


class UnknownFormError(LeaveAlone):
    """An operation of an attention that has no place in the normal form.

    Args:
        node: The operation.
        why: What is wrong with it, where the name alone doesn't say.
    """

    def __init__(self, node: Node, why: str = "") -> None:
        reason = f"its form is not one that specache knows: {described(node)}{f' {why}' if why else ''}"
        super().__init__(reason, sdpa_instead(node))
