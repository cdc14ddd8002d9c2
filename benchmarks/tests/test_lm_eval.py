"""lm-eval's tasks through the model `specache-hf`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.mark.usefixtures("fresh_dynamo")
def test_lm_eval_measures_by_decoding(english_folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    import specache_bench.lm_eval_model  # noqa: F401  registers it

    given = {"pretrained": str(english_folder), "device": "cpu", "dtype": "float32", "batch_size": 1}
    pairs = [("The stone is red. " * 9, "It is."), ("A", "b")]
    found = {}
    ours = {"lowering": "eager", "group_size": 16, "residual_length": 16}
    for name, more in {
        "hf": {},
        "specache-hf": {"bits": 16, **ours},
        "low": {"bits": 1, "lookahead": "token", **ours},
    }.items():
        made = (get_model("specache-hf") if more else HFLM)(**given, **more)
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        found[name] = made.loglikelihood(asked, disable_tqdm=True)
        if name != "low":
            told = (pairs[0][0], {"until": [], "max_gen_toks": 6, "do_sample": False})
            text = [Instance("generate_until", {}, told, 0)]
            found[name].append(made.generate_until(text, disable_tqdm=True)[0])
        torch._dynamo.reset()
    for exact, plain in zip(found["specache-hf"][:2], found["hf"][:2], strict=True):
        assert exact[0] == pytest.approx(plain[0], abs=1e-3) and exact[1] == plain[1]
    assert found["specache-hf"][2] == found["hf"][2]
    assert found["low"][0][0] != pytest.approx(found["hf"][0][0], abs=1e-4)  # its codes were read
