"""A state machine uses caches in any way: the answer is the uncompiled model's, or that of another way to the same.

By day it draws from a few settings. By night, and with `make fuzz`, it draws from some of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch._inductor.config
from hypothesis import note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.cases import NIGHTLY
from support.conversations import WINDOWS_ALONE, Setting, World
from support.strategies import seeds
from support.zoo import WINDOW

from specache_fx import SpecacheConfig

Known = Callable[[World, str, dict[str, Any]], bool]
# Faults that are known, and the uses that are left out until each is mended. Delete an entry with its fault.
KNOWN: dict[str, Known] = {}


def any_setting(number: int) -> Setting:
    """One of all: a model, a dtype, options, and others that change no answer. Numbers in turn meet each model."""
    random = Random(number)
    pick: Any = random.choice
    kind = KINDS[number % len(KINDS)]
    is_exact = random.random() < 0.4
    options = pick(EXACT if is_exact else LOW)
    if kind in LATENT and options.get("policy") == "kcache":
        options = {"bits": 16}
    other = pick(SAME)
    if "prompts" in other and (kind in LATENT or options.get("policy") == "kivi"):
        other = {"kernel": "reference"}  # a latent's session begins at another step, with other guesses
    if "host" in other and SpecacheConfig(**options).lookahead == "auto":
        options = {**options, "lookahead": "token"}  # a disk is a bus
    if random.random() < 0.15:
        options, other = {**options, "lowering": "inductor"}, pick(({"replay": False}, {"lowering": "eager"}))
    if is_exact and "prompts" not in other and random.random() < 0.3:
        # Below 16 bits, the uncompiled model's tokens until the graph is there are others.
        options = {**options, "warm": "background"}
    dtypes = [torch.float32, torch.float32, torch.bfloat16]
    # In float16 a score over 1e6 is a subnormal number: the model's own scores are off by 0.06, and it is refused.
    dtypes += [torch.float16] if kind != "high-softcap" else []
    if options.get("lowering") == "inductor" and not is_exact:
        # In 16 bits, each of Inductor's graphs of a step rounds otherwise. Two ways to the same may take two of them.
        dtypes = [torch.float32]
    return Setting(kind, options, other, pick(dtypes))


KINDS = (
    *(
        "plain",
        "plain-window",
        "plain-windows",
        "llama",
        "gpt2",
        "qwen3",
        "deepseek_v3",
        "gemma2",
        "high-softcap",
    ),
    *("mistral-window", "gemma3_text", "gpt_oss", "gpt_oss-window", "bloom", "mpt", "falcon"),
)
# Keys and values that are computed from what is cached are refused under policy "kcache".
LATENT = ("deepseek_v3",)
EXACT: tuple[dict[str, Any], ...] = (
    {"bits": 16},
    {"bits": 16, "lookahead": "token"},
    {"bits": 16, "accept_guesses": True},
    {"bits": 1, "lookahead": "token", "top_k": 512, "resident_layers": 1, "sink_tokens": 3},
    {"bits": 2, "residual_length": 512},
    {"policy": "kcache", "top_k": 512},
    {"bits": 1, "lookahead": "none", "key_share": 0.0},
)
LOW: tuple[dict[str, Any], ...] = (
    {"bits": 2},
    {"bits": 2, "lookahead": "token"},
    {"bits": 1, "lookahead": "token"},
    {"bits": 1, "quantizer": "kivi", "on_miss": "keep", "sink_tokens": 3},
    {"bits": 2, "quantizer": "kivi", "on_miss": "refetch"},
    {"bits": 2, "on_miss": "refetch", "residual_length": 3},
    {"bits": 1, "lookahead": "query", "resident_layers": 1},
    {"bits": 2, "lookahead": "none", "sink_tokens": 2, "aggregation": "max"},
    {"bits": 2, "accept_guesses": True},
    {"bits": 2, "policy": "kivi"},
    {"bits": 1, "sink_tokens": 3, "resident_layers": 1},
    {"bits": 1, "lookahead": "token", "quantizer": "kivi", "key_share": 0.05, "value_share": 0.1},
    {"policy": "kcache"},
)
SAME: tuple[dict[str, Any], ...] = (
    {"kernel": "reference"},
    {"host": "disk"},
    {"reserve": 300, "track_hit_rates": "steps"},
    {"track_hit_rates": False},
    {"prompts": "traced"},
)
# Each new number of rows, mask or option is a second of compiling.
BY_DAY = (
    Setting("plain-window", {"bits": 2, "lookahead": "token"}, masked=True),
    Setting("plain-window", {"bits": 2}, {"prompts": "traced"}, masked=True),
)
# One number gives the settings and all that is drawn of them.
SEED = int(os.environ.get("FUZZ_SEED", "0"))
SETTINGS = [any_setting(2 * SEED), any_setting(2 * SEED + 1)] if SEED else [*BY_DAY]

lengths = st.lists(st.integers(1, 40), min_size=1 if SEED else 2, max_size=3 if SEED else 2)
sides = st.sampled_from(("left", "right", "middle"))
pieces = st.lists(st.integers(1, 30), max_size=3)
whiches = st.integers(0, 3)
steps = st.integers(1, 20)
some = precondition(lambda self: self.world is not None and self.world.talks)
several = precondition(lambda self: self.world is not None and len(self.world.talks) > 1)


@pytest.fixture(autouse=True)
def all_graphs_round_alike() -> Iterator[None]:
    """Inductor keeps what it fuses in float32, and fuses a graph with a static size otherwise than one without."""
    with torch._inductor.config.patch(emulate_precision_casts=True):
        yield


class AnyUse(RuleBasedStateMachine):
    """What users do with caches of one compiled model."""

    def __init__(self) -> None:
        super().__init__()
        self.world: Any = None
        self.program: list[tuple[str, dict[str, Any]]] = []

    @initialize(setting=st.sampled_from(SETTINGS), lengths=lengths, side=sides, pieces=pieces, seed=seeds)
    def open(self, setting: Setting, **how: Any) -> None:
        note(f"FUZZ_SEED={SEED}")
        self.setting, self.world = setting, World(setting, how["seed"] % 4)
        self.do("prompt", **how)

    def do(self, use: str, **how: Any) -> None:
        """Do it; what fails has to fail with other weights too, for a rounding that turns a code is no fault."""
        if not self.world.talks and use != "prompt":
            return  # a rounding ended them
        if any(known(self.world, use, how) for known in KNOWN.values()):
            return
        self.program.append((use, how))
        try:
            run(self.world, use, how)
        except AssertionError:
            found_again = all(fails(World(self.setting, numbers), self.program) for numbers in (101, 102))
            self.program.clear()
            self.world = World(self.setting, 0)
            if found_again:
                raise
            note("A rounding turned a code.")
        except Exception:
            self.world.talks.clear()
            raise

    @rule(lengths=lengths, side=sides, pieces=pieces, seed=seeds)
    def prompt(self, **how: Any) -> None:
        if len(self.world.talks) < 4:
            self.do("prompt", **how)

    @precondition(lambda self: self.world is not None and self.setting.exact)
    @rule(lengths=lengths, seed=seeds)
    def take_a_cache_of_the_uncompiled_model_over(self, **how: Any) -> None:
        # A cache of windows alone that are full does not tell its length: it is refused.
        is_refused = self.setting.kind in WINDOWS_ALONE and max(how["lengths"]) >= WINDOW - 1
        if len(self.world.talks) < 4 and not is_refused:
            self.do("prompt", **how, side="left", pieces=[], by_plain=True)

    @some
    @rule(
        which=whiches,
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
        side=sides,
        pieces=pieces,
        seed=seeds,
    )
    def next_turn(self, **how: Any) -> None:
        self.do("next_turn", **how)

    @some
    @rule(which=whiches, steps=steps, greedy=st.booleans(), seed=seeds)
    def decode(self, **how: Any) -> None:
        self.do("decode", **how)

    @several
    @rule(steps=steps, greedy=st.booleans(), seed=seeds)
    def decode_in_threads(self, **how: Any) -> None:
        self.do("decode_in_threads", **how)

    @some
    @rule(which=whiches, count=st.integers(1, 40))
    def crop(self, **how: Any) -> None:
        self.do("crop", **how)

    @some
    @rule(which=whiches, keep=st.booleans(), seed=seeds)
    def fork(self, **how: Any) -> None:
        if len(self.world.talks) < 4:
            self.do("fork", **how)

    @some
    @rule(
        which=whiches,
        how=st.sampled_from(("reorder", "select", "repeat")),
        rows=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    )
    def move_rows(self, **how: Any) -> None:
        self.do("move_rows", **how)

    @some
    @rule(which=whiches)
    def save_and_load(self, **how: Any) -> None:
        self.do("save_and_load", **how)

    @several
    @rule(which=whiches)
    def drop(self, **how: Any) -> None:
        self.do("drop", **how)

    @some
    @rule(
        which=whiches,
        row=st.none() | st.integers(0, 3) if SEED else st.none(),
        whole=st.booleans(),
        other_ids=st.booleans(),
        columns=st.sampled_from((0, -40, 8, 21)),
        other=st.booleans(),
    )
    def tell_again(self, **how: Any) -> None:
        self.do("tell_again", **how)

    @precondition(lambda self: self.world is not None and self.setting.has_beams)
    @rule(lengths=lengths, beams=st.integers(2, 3), steps=steps, seed=seeds)
    def beam_search(self, **how: Any) -> None:
        self.do("beam_search", **how)

    def teardown(self) -> None:
        """Each conversation goes on, and is told again: as it was, with other padding, and in all other ways."""
        talks = range(len(self.world.talks) if self.world else 0)
        for which in talks:
            self.do("decode", which=which, steps=3, greedy=True, seed=which)
        for which in talks:
            for how in (
                {},
                {"other_ids": True, "columns": 13},
                {"row": which if SEED else None, "whole": True, "columns": -40, "other": True},
            ):
                self.do("tell_again", which=which, **how)


def run(world: World, use: str, how: dict[str, Any]) -> None:
    getattr(world, use)(**how)
    world.check()


def fails(world: World, program: list[tuple[str, dict[str, Any]]]) -> bool:
    try:
        for use, how in program:
            run(world, use, how)
    except AssertionError:
        return True
    return False


if SEED:
    AnyUse = seed(SEED)(AnyUse)
TestAnyUse = pytest.mark.slow(AnyUse.TestCase)
TestAnyUse.settings = settings(
    max_examples=60 if SEED else 200 if NIGHTLY else 10, stateful_step_count=15, print_blob=True
)
