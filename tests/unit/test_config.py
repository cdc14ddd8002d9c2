"""Options that are refused, each with its remedy. The options of a quantiser and of a pass are with their tests."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from specache_fx import ConfigError
from specache_fx.config import SpecacheConfig

KCACHE = {"policy": "kcache"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, "bits=3 is not valid: choose one of 1, 2, 4, 8, 16"),
        ({"bits": {}}, "bits={} is not valid: choose one of"),
        ({"bits": np.int64(2)}, "bits=np.int64(2) is not valid: choose one of"),
        ({"bits": torch.tensor([1, 2])}, "bits=tensor([1, 2]) is not valid: choose one of"),
        ({"bits": float("nan")}, "bits=nan is not valid: choose one of"),
        ({"lowering": np.array([1, 2])}, "lowering=array([1, 2]) is not valid: choose one of"),
        ({"track_hit_rates": np.array([1, 2])}, "track_hit_rates=array([1, 2]): give True"),
        ({"top_k": np.int64(3)}, "top_k=np.int64(3) is not valid: give a whole number >= 1"),
        ({"top_k": "3"}, "top_k='3' is not valid: give a whole number >= 1"),
        ({"top_k": 10**30}, f"top_k={10**30} is not valid: give a whole number of at most 281,474,976,710,656"),
        ({"reserve": 10**30}, f"reserve={10**30} is not valid: give a whole number of at most"),
        ({"on_miss": "retry"}, "on_miss='retry' is not valid: choose one of 'recover', 'keep', 'refetch'"),
        ({"aggregation": "sum"}, "aggregation='sum' is not valid: choose one of 'mean', 'max'"),
        ({"resident_layers": -1}, "resident_layers=-1 is not valid: give a whole number >= 0"),
        ({"sink_tokens": -1}, "sink_tokens=-1 is not valid: give a whole number >= 0"),
        ({"top_k": 0}, "top_k=0 is not valid: give a whole number >= 1"),
        ({"track_hit_rates": "step"}, "track_hit_rates='step': give True, False or \"steps\""),
        ({"track_hit_rates": 1}, "track_hit_rates=1: give True"),
        ({"replay": "auto"}, "replay='auto': give True or False"),
        ({"compile_prefill": 1}, "compile_prefill=1: give True or False"),
        ({"compile_prefill": True, "lowering": "eager"}, "compile_prefill=True contradicts"),
        (
            {"on_miss": "refetch", "lookahead": "query"},
            "lookahead='query' speculates on no token, so none is missed: leave on_miss out",
        ),
        ({"on_miss": "refetch", "lookahead": "none"}, "lookahead='none' speculates on no token"),
        ({"on_miss": "refetch", "policy": "kivi"}, "policy='kivi' speculates on no token"),
        ({"accept_guesses": True, "on_miss": "keep"}, "accept_guesses=True needs a speculative token"),
        ({"accept_guesses": True, "lookahead": "query"}, "accept_guesses=True needs a speculative token"),
        ({"accept_guesses": True, "policy": "kivi"}, "accept_guesses=True needs a speculative token"),
        (KCACHE | {"bits": 2}, "bits=2 contradicts policy='kcache', which has 16 alone: leave bits out"),
        (KCACHE | {"bits": 3}, "bits=3 is not valid: choose one of 1, 2, 4, 8, 16"),
        (KCACHE | {"lookahead": "token"}, "lookahead='token' contradicts policy='kcache', which has 'none' alone"),
        (KCACHE | {"sink_tokens": 4}, "sink_tokens=4 contradicts policy='kcache': its keys are exact"),
        ({"cuda_graphs": False}, "Did you mean 'replay'"),  # its name in an earlier version
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_valid_is_refused_with_what_is(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        SpecacheConfig.from_options(options)


def test_a_policy_has_bits_and_a_lookahead_of_its_own() -> None:
    config = SpecacheConfig(policy="kcache")
    assert (config.bits, config.lookahead, config.num_lanes) == (16, "none", 1)
    same = (SpecacheConfig(**asdict(config)), SpecacheConfig(policy="kcache", bits=16, lookahead="none"))
    assert same == (config, config)
    assert (SpecacheConfig().bits, SpecacheConfig().lookahead) == (2, "token")
