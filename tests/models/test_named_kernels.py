"""A kernel that is asked for by name computes every layer, or the model doesn't compile; "auto" says what is slow."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from support.models import TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from torch._dynamo.exc import BackendCompilerFailed

from specache_fx import _log
from specache_fx.errors import KernelUnavailableError
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.native import cpp_build

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(cpp_build.find_compiler() is None, reason="no C++ compiler"),
]

PLAIN = TinyConfig(num_layers=1)
LATENT = TinyConfig(num_layers=1, num_heads=4, num_kv_heads=1, head_dim=16, value_dim=12, latent_dim=20)
WINDOWS = replace(PLAIN, num_layers=2, window=8, window_layers=(0,))
PROMPT = torch.arange(20).view(1, 20)


def run(model: TinyDecoder, steps: int = 3, **options: object) -> object:
    small = {"group_size": 8, "residual_length": 4, "top_k": 4, "lowering": "eager"}
    compiled = torch.compile(model, backend="specache", options={**small, **options})
    return generate(compiled, PROMPT, steps).past


@pytest.mark.parametrize(
    ("config", "dtype", "options", "reason"),
    [
        (PLAIN, torch.float32, {"quantizer": "nuq"}, "not what quantizer='nuq', bits=2, group_size="),
        (PLAIN, torch.float32, {"bits": 16}, "not what bits=16 makes"),
        (PLAIN, torch.float32, {"policy": "kcache"}, "not what policy='kcache' makes"),
        (WINDOWS, torch.float32, {"quantizer": "nuq"}, "not what quantizer='nuq'"),
        (LATENT, torch.float32, {}, "latent attention"),
        (PLAIN, torch.float64, {}, "this has float64"),
    ],
)
def test_named_kernel_that_cannot_compute_a_model_is_an_error_before_the_prompt_runs(
    config: TinyConfig, dtype: torch.dtype, options: dict[str, object], reason: str
) -> None:
    model = TinyDecoder(config).to(dtype)
    options = {"kernel": "cpu", "lowering": "eager", **options}
    compiled = torch.compile(model, backend="specache", options=options)
    with pytest.raises(
        BackendCompilerFailed, match=rf"can't compute .*{reason}.*Use kernel='auto'"
    ) as caught:
        compiled(PROMPT, None)
    assert isinstance(caught.value.inner_exception, KernelUnavailableError)


@pytest.mark.parametrize("options", [{}, {"resident_layers": 1, "quantizer": "nuq"}])
def test_named_kernel_computes_what_it_can(options: dict[str, object]) -> None:
    past = run(TinyDecoder(PLAIN), kernel="cpu", **options)
    session = session_of(past)
    assert isinstance(session.kernel, CpuKernel)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantizer": "nuq"}, 1),
        ({"bits": 16}, 0),  # read where they lie
    ],
)
def test_auto_says_once_that_another_kernel_is_slower(
    options: dict[str, object], said: int, caplog: pytest.LogCaptureFixture
) -> None:
    _log.forget_warnings()
    run(TinyDecoder(TinyConfig()), **options)
    slow = [r.message for r in caplog.records if r.levelno == logging.WARNING and "slow" in r.message]
    assert len(slow) == said
    assert all(
        message.startswith(
            "Attention will be slow: kernel='cpu' can't compute a layer of this model (it reads KIVI's"
        )
        for message in slow
    )
