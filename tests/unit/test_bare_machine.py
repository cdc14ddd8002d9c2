"""What the GPU machine has: torch, transformers, Triton and their needs. Nothing else may be imported on the way."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support.process import python

ROOT = Path(__file__).resolve().parents[2]
# Dependencies of tests, evaluation and development.
ABSENT = [
    "datasets",
    "gguf",
    "lm_eval",
    "matplotlib",
    "pandas",
    "peft",
    "torchao",
    "hqq",
    "kvpress",
    "xdist",
    "ruff",
    "mypy",
    "setuptools_scm",
]


def run(code: str, **environment: str) -> str:
    """Run it in a process that lacks what the machine lacks; what it printed."""
    # Torch takes optree where it is installed: it goes before we come.
    blocked = f"""
        import sys
        sys.modules.update(dict.fromkeys({ABSENT!r}))
        import torch._dynamo, transformers
        sys.modules["optree"] = None
    """
    return python("-c", textwrap.dedent(blocked) + textwrap.dedent(code), **environment)


GENERATION = """
    import torch, transformers, specache_fx
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    ids, asked = torch.arange(40)[None], {{"max_new_tokens": 6, "do_sample": False}}
    with torch.inference_mode({inference}):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        expected = model.generate(ids, **asked)
        specache_fx.compile(model, bits=16, group_size=8, residual_length=8, top_k=8)
        found = model.generate(ids, **asked, return_dict_in_generate=True)
        print(torch.equal(found.sequences, expected))
"""


def test_package_and_gpu_script_need_nothing_that_the_gpu_machine_lacks(tmp_path):
    """Without a compiler, the model runs operator by operator; without optree, a cache is found in a container."""
    program = """
    import logging, runpy
    import specache_fx.api, specache_fx.backend, specache_fx.report.explanation, specache_fx.cli.plan
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    """
    program += GENERATION.format(inference=False)
    program += """
    print(specache_fx.stats({"nested": [found.past_key_values]}).kv_len)
    specache_fx.release(found.past_key_values)
    sys.argv = ["gpu", "--help"]
    sys.path.insert(0, "benchmarks")
    try:
        runpy.run_module("specache_bench.gpu", run_name="__main__")
    except SystemExit as end:
        assert not end.code
    """
    printed = run(program, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    lines = printed.splitlines()
    assert lines.index("True") < lines.index("45") < next(i for i, x in enumerate(lines) if "Usage" in x)
    assert "Inductor finds no C++ compiler" in printed and 'lowering="eager"' in printed


@pytest.mark.nightly
def test_weights_made_in_inference_mode_are_compiled():
    assert run(GENERATION.format(inference=True)).split() == ["True"]
