"""Options that are refused, each with its remedy. The options of a quantiser and of a pass are with their tests."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from specache_fx import ConfigError
from specache_fx.config import SHARES, SpecacheConfig

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
        ({"key_share": 1}, "key_share=1 is not valid: give a share of attention, from 0 to 1"),
        ({"key_share": "0.1"}, "key_share='0.1' is not valid: give a share"),
        ({"value_share": 0.1}, "value_share=0.1 is a share of the pairs that key_share chooses: give key_share too"),
        ({"key_share": 0.1, "policy": "kivi"}, "key_share=0.1 contradicts policy='kivi', which has no 16-bit pairs"),
        (KCACHE | {"key_share": 0.1}, "key_share=0.1 contradicts policy='kcache'"),
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
    assert (SpecacheConfig().bits, SpecacheConfig().lookahead) == (2, "auto")


def test_lookahead_hides_a_bus_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    auto = SpecacheConfig(bits=1, lookahead="auto")
    assert auto.for_device("cuda") == SpecacheConfig(bits=1, lookahead="token")
    key_share, value_share = SHARES[1]
    same_step = SpecacheConfig(bits=1, lookahead="none", key_share=key_share, value_share=value_share)
    assert auto.for_device("cpu") == same_step and not same_step.stages and same_step.num_lanes == 1
    exact = SpecacheConfig(bits=16, lookahead="auto").for_device("cpu")
    assert (exact.lookahead, exact.stages, exact.corrects) == ("none", False, False)
    given = SpecacheConfig(lookahead="auto", key_share=0.1).for_device("cpu")
    assert given == SpecacheConfig(lookahead="none", key_share=0.1)
    on_gpu = SpecacheConfig(key_share=0.1, lookahead="query").for_device("cuda")  # a bus brings whole rows
    assert on_gpu == SpecacheConfig(key_share=0.1, value_share=0.0, lookahead="query")
    # The disk is a bus, and these speak of a speculative token.
    for options in ({"host": "disk"}, {"on_miss": "keep"}, {"accept_guesses": True}, {"lookahead": "token"}):
        assert SpecacheConfig(**{"lookahead": "auto", **options}).for_device("cpu").lookahead == "token"
    assert not caplog.messages
    SpecacheConfig(lookahead="auto", top_k=128).for_device("cpu")
    assert "top_k=128 says nothing here" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"lookahead": "auto"},
            "those that may have 0.002 of the attention, read in the same step (values: 0.002)",
        ),
        ({"lookahead": "token"}, "64 a kv head, prefetched for a speculative token"),
        ({"lookahead": "query", "top_k": 3}, "3 a kv head, prefetched by the scores of the token before"),
        ({"lookahead": "none"}, "64 a kv head, fetched in the same step"),
        (
            {"lookahead": "token", "key_share": 0.1},
            "64 a kv head, prefetched for a speculative token; and those that",
        ),
        ({"policy": "kivi"}, "none"),
        ({"bits": 16}, "all"),
    ],
    ids=str,
)
def test_the_selection_is_a_sentence(options: dict[str, Any], words: str) -> None:
    assert SpecacheConfig(**options).for_device("cpu").selection.startswith(words)
