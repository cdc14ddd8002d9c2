"""`torch._inductor.config.cpp_wrapper`: Inductor's step is C++ that calls our operators, and gives the same tokens."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from support.process import python

from specache_fx.runtime import ops  # noqa: F401  (defines the operators)

# What the wrapper passes without Python: `CppWrapperCpu._compatible_with_stableivalue`.
_TYPES = (torch.TensorType, torch.IntType, torch.FloatType, torch.BoolType)


def test_operators_of_graphs_have_only_arguments_and_results_that_the_wrapper_passes() -> None:
    seen = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "specache":
            continue
        packet = getattr(torch.ops.specache, name)
        if torch.Tag.cudagraph_unsafe not in getattr(packet, schema.overload_name or "default").tags:
            continue  # no graph holds it
        for each in chain(schema.arguments, schema.returns):
            held = each.type.getElementType() if isinstance(each.type, torch.OptionalType) else each.type
            assert isinstance(held, _TYPES), f"{schema}: {each.name}"
        seen.add(name)
    assert {"products", "layer_step", "quantized_attention", "load"} <= seen


@pytest.mark.slow
@pytest.mark.nightly
def test_tokens_are_those_of_the_python_wrapper() -> None:
    program = """
import copy, torch, specache_fx
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)).eval()
prompt = torch.randint(97, (1, 40))
few = {"lowering": "inductor", "residual_length": 8, "group_size": 8, "top_k": 64}
# One operator a layer, all of a layer's operators, and the prompt's.
for options in ({"bits": 2}, {"bits": 16}, {"bits": 2, "kernel": "reference", "compile_prefill": True}):
    tokens = []
    for cpp_wrapper in (False, True):
        torch._dynamo.reset()
        ours = copy.deepcopy(model)
        ours.forward = torch.compile(ours.forward, backend="specache", options={**few, **options})
        with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
            tokens.append(ours.generate(prompt, max_new_tokens=12, do_sample=False))
    assert torch.equal(*tokens), options
"""
    python("-c", program)
