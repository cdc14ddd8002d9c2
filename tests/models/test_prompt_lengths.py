"""Prompts of several lengths: the second makes the length dynamic, and what is computed from it a symbol."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import fixed_modules
from support.cases import nightly_unless
from support.conversations import Setting, World
from support.fixed_modules import FixedDecoder
from support.flex_modules import Alibi, Causal, Documents, Softcap, Window, decoder
from support.hooked import VOCABULARY, Hooked
from support.own_modules import CONTAINERS, OwnConfig, OwnDecoder, greedy
from torch import Tensor
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.nn.attention import flex_attention as flex

import specache_fx
from specache_fx.dynamo import dynamo_hooks
from specache_fx.runtime.session import registry

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OPTIONS: dict[str, Any] = {
    "group_size": 8, "residual_length": 8, "top_k": 8, "lowering": "eager", "bits": 16, "strict": True,
}  # fmt: skip
LENGTHS = 13, 21, 17, 13
Flags = Callable[[Tensor, Tensor, Tensor], Tensor]
SDPA = F.scaled_dot_product_attention
ALIKE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}  # of logits of 5 to 30


class Flagged(Hooked):
    """The causal mask is SDPA's own. Two layers, in a loop, where Dynamo skips the frame at a break."""

    num_layers = 2
    flags: Flags

    def run_layer(self, layer: int, x: Tensor, hide: Tensor, past: Any) -> Any:
        sides = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (side.unflatten(-1, (2, 16)).transpose(1, 2) for side in sides)
        if past is not None:
            k, v = self.append(past[0], k), self.append(past[1], v)
        return x + self.flags(q, k, v).transpose(1, 2).flatten(2), (k, v)


def flagged(flags: Flags) -> Flagged:
    kind = type("Flagged", (Flagged,), {"flags": staticmethod(flags)})
    return kind()


FLAGS: dict[str, Flags] = {
    "keyword": lambda q, k, v: SDPA(q, k, v, is_causal=q.shape[-2] > 1),
    "positional": lambda q, k, v: SDPA(q, k, v, None, 0.0, q.shape[-2] > 1),
    "and": lambda q, k, v, mask=None: SDPA(q, k, v, attn_mask=mask, is_causal=mask is None and q.size(2) > 1),
    "as many keys": lambda q, k, v: SDPA(q, k, v, is_causal=q.shape[-2] == k.shape[-2]),
    "of bools": lambda q, k, v: SDPA(q, k, v, is_causal=(q.size(2) != 1) & (q.size(2) == k.size(2))),
    "bool()": lambda q, k, v: SDPA(q, k, v, is_causal=bool(q.shape[-2] > 1)),
    "conditional": lambda q, k, v: SDPA(q, k, v, is_causal=True if q.shape[-2] > 1 else False),  # noqa: SIM210
    "enable_gqa": lambda q, k, v: SDPA(q, k, v, is_causal=q.size(2) > 1, enable_gqa=k.size(2) > 0),
    "scale": lambda q, k, v: SDPA(q, k, v, is_causal=q.size(2) > 1, scale=q.shape[-1] ** -0.5),
}
CASES = [(name, dynamic) for name in FLAGS for dynamic in (None, True, False)]
BY_DAY = {
    ("keyword", None),
    ("keyword", True),
    ("keyword", False),
    ("positional", None),
    ("enable_gqa", None),
}


@torch.no_grad()
def turns(model: Any, steps: int = 3) -> list[tuple[Tensor, Any]]:
    """Logits, and the last cache, of a prompt of each length and some steps."""
    found = []
    for length in LENGTHS:
        ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
        logits, past = model(ids)
        rows = [logits[:, -1]]
        for _ in range(steps):
            logits, past = model(rows[-1].argmax(-1, keepdim=True), past)
            rows.append(logits[:, -1])
        found.append((torch.stack(rows), past))
    return found


@pytest.mark.parametrize(("name", "dynamic"), nightly_unless(BY_DAY.__contains__, CASES))
def test_a_flag_that_is_computed_from_sizes_is_a_bool_at_each_length(name: str, dynamic: bool | None) -> None:
    plain = turns(flagged(FLAGS[name]))
    ours = turns(torch.compile(flagged(FLAGS[name]), backend="specache", options=OPTIONS, dynamic=dynamic))
    for (expected, _), (found, past) in zip(plain, ours, strict=True):
        torch.testing.assert_close(found, expected, **ALIKE)
        assert specache_fx.stats(past).steps == 3


def test_another_backend_gets_the_whole_graph_too() -> None:
    compiled = torch.compile(flagged(FLAGS["keyword"]), backend="eager", fullgraph=True)
    for (expected, _), (found, _) in zip(turns(flagged(FLAGS["keyword"])), turns(compiled), strict=True):
        assert torch.equal(found, expected)


def test_the_hooks_are_put_in_once_and_only_where_they_fit() -> None:
    dynamo_hooks.install()  # the backend may not be imported yet
    handlers = dict(TorchInGraphFunctionVariable._get_handlers())
    translate = torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break
    dynamo_hooks.install()
    assert TorchInGraphFunctionVariable._get_handlers() == handlers
    assert torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break is translate

    class Other:
        def __call__(self, code: Any) -> None: ...

    class Decorated:
        @functools.wraps(translate)
        def log_graph_break(self, code_options: Any, reason: str, exc: Exception) -> None: ...

    decorated = Decorated.log_graph_break
    del decorated.__dict__["_is_of_specache"]
    assert dynamo_hooks.BREAKS._replace(owner=Decorated).put()
    assert Decorated.log_graph_break is not decorated
    before = Other.__call__
    assert not dynamo_hooks.evaluates_flags(None)
    assert not any(hook._replace(owner=Other).put() for hook in (dynamo_hooks.FRAMES, dynamo_hooks.BREAKS))
    assert Other.__call__ is before
    table = {F.scaled_dot_product_attention: "a handler of torch's own"}
    assert dynamo_hooks.evaluates_flags(table)
    assert table[F.scaled_dot_product_attention] == "a handler of torch's own"


OWN = [OwnConfig("llama", container) for container in CONTAINERS]
OWN += [OwnConfig("llama", layout=layout) for layout in ("tokens first", "heads merged")]
OWN += [OwnConfig("llama", "lists", "tokens first", repeat_kv=way) for way in ("interleave", "expand")]
OWN += [OwnConfig("gpt", num_kv_heads=4), OwnConfig("gpt", "flat", "heads merged", num_kv_heads=4)]


@pytest.mark.parametrize("config", nightly_unless(lambda config: config in (OWN[0], OWN[7], OWN[-2]), OWN))
def test_own_modules(config: OwnConfig) -> None:
    model, plain = OwnDecoder(config), OwnDecoder(config)
    compiled = torch.compile(model, backend="specache", options=OPTIONS)
    for length in LENGTHS:
        expected, found = (
            greedy(each, padded=False, num_tokens=4, prompt=length) for each in (plain, compiled)
        )
        torch.testing.assert_close(found.logits, expected.logits, **ALIKE)
        assert specache_fx.stats(found.cache).steps == 3


WITHOUT_MASKS = "sliced_to_the_end", "repeated_before_swapped", "sliced_of_rows"
FIXED = [
    (name, True) for name in {**fixed_modules.BY_TENSOR, **fixed_modules.BY_NUMBER, **fixed_modules.OF_ROWS}
]
FIXED += [(name, False) for name in WITHOUT_MASKS]


@pytest.mark.parametrize(
    ("spelling", "masked"),
    nightly_unless(lambda case: not case[1] or case[0] in ("index_copy", "sliced"), FIXED),
)
def test_modules_with_buffers(spelling: str, masked: bool) -> None:
    model, plain = (FixedDecoder(spelling, num_layers=2, masked=masked) for _ in range(2))
    compiled = torch.compile(model, backend="specache", options=OPTIONS)
    for length in LENGTHS:
        ids = torch.randint(
            fixed_modules.VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(length)
        )
        _, expected = fixed_modules.generate(plain, ids, 4, plain.by_number)
        _, found = fixed_modules.generate(compiled, ids, 4, plain.by_number)
        torch.testing.assert_close(found, expected, **ALIKE)
        assert registry.find(model.layers[0].keys) is not None


@pytest.mark.parametrize(
    "kind",
    nightly_unless(lambda kind: kind is Causal, [Causal, Window, Documents, Softcap, Alibi]),
)
def test_modules_with_flex_attention(kind: type[Causal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    plain, compiled = decoder(kind), torch.compile(decoder(kind), backend="specache", options=OPTIONS)
    for length in LENGTHS:
        expected, found = (
            greedy(each, padded=False, num_tokens=4, prompt=length) for each in (plain, compiled)
        )
        torch.testing.assert_close(found.logits, expected.logits, **ALIKE)
        assert specache_fx.stats(found.cache).steps == 3


def test_inductor_knows_a_size_by_the_symbol_that_dynamo_found_it_to_be() -> None:
    """A cache's count of tokens and its length are one symbol by the third prompt: a mask's size is of that one."""
    options = {"policy": "kcache", "top_k": 512, "lowering": "inductor", "replay": False}
    world = World(Setting("gemma3_text", options, {}, torch.float16), 0)
    with torch._inductor.config.patch(force_disable_caches=True):
        for lengths, pieces in (([40], [12]), ([27, 40], [12]), ([30], [7, 9])):
            world.prompt(lengths, "left", pieces, seed=0)
            world.check()
