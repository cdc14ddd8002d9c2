"""Operations that draw random numbers, and dropouts that are off."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from specache_fx.passes.graph_utils import target_name

_RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
    "normal", "poisson", "binomial", "gumbel_softmax", "uniform_", "normal_", "bernoulli_", "exponential_", "random_",
    "geometric_", "cauchy_", "log_normal_", "fractional_max_pool2d", "fractional_max_pool3d",
}  # fmt: skip
_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
}  # fmt: skip


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def is_off_dropout(node: Node) -> bool:
    """Whether a node is a dropout that changes nothing."""
    if target_name(node).rstrip("_") not in _DROPOUTS:
        return False
    return bool(_argument(node, 1, "p", 0.5) == 0 or _argument(node, 2, "training", True) is False)


def draws_random_numbers(node: Node) -> bool:
    """Whether a node's result is another one each time."""
    if node.op not in ("call_function", "call_method") or is_off_dropout(node):
        return False
    name = target_name(node)
    if name.startswith("rrelu"):
        return bool(_argument(node, 3, "training", False))
    if name == "scaled_dot_product_attention":
        return bool(_argument(node, 4, "dropout_p", 0.0))
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return tagged or name in _RANDOM or name.rstrip("_") in _DROPOUTS
