"""A copy of a cache is a value: it goes on as if nobody else lived, whatever is done with the others meanwhile.

Each test runs a random program on some caches: copy, drop, step, extend, crop, move rows, save and load. Then it runs
what was done with each cache once more, alone and without copies. The logits are the same.
"""

from __future__ import annotations

import copy
import gc
import random
import tempfile
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.cases import examples, nightly_unless
from support.zoo import SMALL, build, left_padded
from torch import Tensor

import specache_fx

PROMPT = left_padded((33, 21, 30))
BATCHES = 2, 3  # each compiles a step
OPTIONS: dict[str, dict[str, Any]] = {
    "2-bit": {"bits": 2},
    "1-bit, sinks, disk": {"bits": 1, "sink_tokens": 3, "host": "disk"},
    "keep": {"bits": 1, "on_miss": "keep", "quantizer": "kivi"},
    "refetch": {"bits": 1, "on_miss": "refetch"},
    "query": {"bits": 1, "lookahead": "query"},
    "same step": {"bits": 1, "lookahead": "none"},
    "kivi": {"policy": "kivi", "bits": 1, "sink_tokens": 2},
    "kcache": {"policy": "kcache"},
    "exact": {"bits": 16, "accept_guesses": True},
}
Act = tuple[str, Any]


@dataclass
class Branch:
    """A cache, what was done to it since the prompt, and what that gave."""

    past: Any
    mask: Tensor
    done: list[Act] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return len(self.mask)


class Program:
    """Caches of one prompt, and a model that goes on with them."""

    def __init__(self, model: Any, seed: int, *, crops: bool, saves: bool = True) -> None:
        self.model, self.random = model, random.Random(seed)
        kinds = ["copy", "drop", "step", "step", "step", "step", "extend", "rows", "keep_rows"]
        self.kinds = kinds + ["crop"] * crops + ["save"] * saves
        self.branches = [self.prompt()]
        self.ended: list[Branch] = []

    @torch.no_grad()
    def prompt(self) -> Branch:
        mask = PROMPT["attention_mask"]
        out = self.model(**PROMPT, position_ids=positions(mask, 33), use_cache=True)
        return Branch(out.past_key_values, mask)

    def run(self, acts: int) -> None:
        for _ in range(acts):
            branch, kind = self.random.choice(self.branches), self.random.choice(self.kinds)
            if kind == "copy":
                self.branches.append(
                    Branch(copy.deepcopy(branch.past), branch.mask, [*branch.done], [*branch.logits])
                )
            elif kind == "drop" and len(self.branches) > 1:
                branch.past = None
                self.branches.remove(branch)
                self.ended.append(branch)
                gc.collect()
            elif kind == "save":
                with tempfile.TemporaryDirectory() as folder:
                    specache_fx.save(branch.past, folder)
                    branch.past = specache_fx.load(self.model, folder)
            elif kind != "drop":
                self.act(branch, (kind, self.argument(branch, kind)))

    def argument(self, branch: Branch, kind: str) -> Any:
        draw, batch = self.random, branch.batch
        if kind in ("step", "extend"):
            count = 1 if kind == "step" else draw.randint(2, 12)
            return [[draw.randint(3, 9) for _ in range(count)] for _ in range(batch)]
        if kind == "rows":
            return [draw.randrange(batch) for _ in range(batch)]
        if kind == "keep_rows":
            return [draw.randrange(batch) for _ in range(draw.choice(BATCHES))]
        return draw.randint(1, 7)

    @torch.no_grad()
    def act(self, branch: Branch, act: Act) -> None:
        kind, given = act
        branch.done.append(act)
        if kind == "crop":
            branch.past.crop(-given)
            branch.mask = branch.mask[:, :-given]
        elif kind == "rows":
            branch.past.reorder_cache(torch.tensor(given))
            branch.mask = branch.mask[given]
        elif kind == "keep_rows":
            branch.past.batch_select_indices(torch.tensor(given))
            branch.mask = branch.mask[given]
        else:
            tokens = torch.tensor(given)
            branch.mask = torch.cat([branch.mask, torch.ones_like(tokens)], 1)
            out = self.model(
                tokens,
                attention_mask=branch.mask,
                position_ids=positions(branch.mask, tokens.shape[1]),
                past_key_values=branch.past,
                use_cache=True,
            )
            branch.past = out.past_key_values
            branch.logits.append(out.logits[:, -1].clone())

    def check(self, tolerance: float) -> None:
        every, self.branches, self.ended = self.ended + self.branches, [], []
        for branch in every:
            branch.past = None
        for branch in every:
            alone = self.prompt()
            for act in branch.done:
                self.act(alone, act)
            for i, (seen, expected) in enumerate(zip(branch.logits, alone.logits, strict=True)):
                difference = float((seen - expected).abs().max())
                assert difference <= tolerance, (i, difference, branch.done)


def positions(mask: Tensor, count: int) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]


def compiled(name: str, options: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    model = build(name)
    model.compile(backend="specache", options={**SMALL, "top_k": 4, **options})
    return model


@pytest.mark.parametrize("bits", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_copy_keeps_the_lookahead(bits: int) -> None:
    """Held original, dropped one, one that goes on first, and rows that move back: all go on as the cache alone."""
    model = compiled("plain", {"bits": bits})
    program = Program(model, 0, crops=False)

    def steps(branch: Branch, first: int, last: int) -> Branch:
        for token in range(first, last):
            program.act(branch, ("step", [[token % 5 + 3]] * branch.batch))
        return branch

    def copied(branch: Branch) -> Branch:
        return Branch(copy.deepcopy(branch.past), branch.mask, [*branch.done], [*branch.logits])

    alone = steps(program.prompt(), 0, 12).logits
    held = steps(program.prompt(), 0, 6)
    copies = [copied(held) for _ in range(3)]
    program.act(copies[1], ("rows", [2, 0, 1]))
    program.act(copies[1], ("rows", [1, 2, 0]))
    found = [steps(copies[0], 6, 12), steps(held, 6, 12), steps(copies[1], 6, 12)]
    held.past = None
    found.append(steps(copies[2], 6, 12))
    for branch in found:
        torch.testing.assert_close(torch.stack(branch.logits), torch.stack(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", nightly_unless("2-bit".__eq__, list(OPTIONS)), ids=str)
def test_a_copy_goes_on_as_if_nobody_else_lived(case: str) -> None:
    model = compiled("plain", OPTIONS[case])
    for seed in range(examples(1)):
        program = Program(model, seed, crops=True)
        program.run(30)
        program.check(tolerance=2e-4)


@pytest.mark.parametrize(
    "name", nightly_unless("plain-windows".__eq__, ["plain-windows", "plain-window", "gpt_oss"]), ids=str
)
def test_a_copy_of_a_cache_with_windows_is_a_cache_of_its_own(name: str) -> None:
    """Windows that are full can't go back, so nothing is cropped."""
    model = compiled(name, {"bits": 2})
    for seed in range(examples(1)):
        program = Program(model, seed, crops=False)
        program.run(30)
        program.check(tolerance=2e-4)
