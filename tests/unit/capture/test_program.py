"""Messages of refusals: layers that have the same reason share one."""

from __future__ import annotations

from specache_fx.capture.program import Refusal, merged_messages


def refusal(node: str, source: str = "", reason: str = "`k` is no cache") -> Refusal:
    return Refusal(node, source, reason, "Do this.")


def test_a_message_has_node_line_reason_and_remedy() -> None:
    assert str(refusal("a")) == "attention `a` is left alone: `k` is no cache. Do this."
    assert str(refusal("a", "m.py:3: f(x)")).startswith("attention `a` (m.py:3: f(x)) is left alone: ")


def test_layers_that_differ_in_names_alone_are_one() -> None:
    layers = [refusal(f"a_{i}", "m.py:3: f(x)", f"`k_{i}` is no cache") for i in range(3)]
    assert merged_messages(layers) == [f"{layers[0]} 2 more like it."]


def test_another_line_or_reason_is_another_message() -> None:
    all_of_them = [
        refusal("a"),
        refusal("b", "m.py:4: g(x)"),
        refusal("c", reason="it has no heads"),
        refusal("d"),
    ]
    assert merged_messages(all_of_them) == [f"{all_of_them[0]} 1 more like it.", *map(str, all_of_them[1:3])]
