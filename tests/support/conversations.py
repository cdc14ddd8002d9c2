"""Conversations of a compiled model that a user takes any way, and the same ones told again in another.

A `Conversation` holds the cache as the user has it: forked, moved, cropped, saved and loaded, beside others. Its tale
has each call with its logits. Rows move in the tale as in the cache; copies, files and neighbours don't show there. So
the tale that is told again from its first call gives what the cache should have given.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from support.threads import at_once
from support.zoo import COMMON, SMALL, VOCAB_SIZE, build
from torch import Tensor, nn

import specache_fx

# All experts take part: a rounding that chooses another one is no fault.
_NO_CHOICE = {"num_experts_per_tok": 4}
_CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", _NO_CHOICE),
    "gpt_oss-window": ("gpt_oss-window", _NO_CHOICE),
    "deepseek_v3": ("deepseek_v3", {**_NO_CHOICE, "qk_rope_head_dim": 16}),
    "high-softcap": ("gemma2", {"attn_logit_softcapping": 1e6}),
}
EXPERTS = ("gpt_oss", "gpt_oss-window", "deepseek_v3")
WINDOWS_ALONE = ("mistral-window", "plain-windows")
WINDOWED = ("mistral-window", "plain-windows", "plain-window", "gpt_oss-window", "gemma3_text")
GROUP = SMALL["group_size"]
HEAD_DIM = COMMON["head_dim"]


@dataclass(frozen=True)
class Setting:
    """What is compiled: once for a process.

    Attributes:
        kind: A model of the zoo.
        options: Besides `SMALL`.
        other: Further options, which give the same answer.
        dtype: Of the model.
        masked: Give a mask where nothing is padded too: half as many graphs.
    """

    kind: str
    options: dict[str, Any]
    other: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    masked: bool = False

    @property
    def all_options(self) -> dict[str, Any]:
        return {**SMALL, "strict": True, **self.options}

    @property
    def exact(self) -> bool:
        """Whether logits are the uncompiled model's."""
        options = self.all_options
        return bool(
            (options.get("bits") == 16 and options.get("policy") != "kcache")
            or max(options["top_k"], options["residual_length"]) >= 512
            or options.get("key_share") == 0
        )

    @property
    def rounds(self) -> bool:
        """Whether another order of sums changes codes: in 16 bits nearly always, in float32 once in many runs."""
        return self.dtype != torch.float32

    @property
    def has_beams(self) -> bool:
        """Whether it can search by beams, and has something to compare them with."""
        return not self.rounds and (self.exact or bool(self.other))

    def __hash__(self) -> int:
        return hash(repr(self))


@cache
def model_of(setting: Setting, which: str) -> Any:
    """The model "compiled", compiled with the "other" options, "plain", or plain in float32: the "truth"."""
    kind, overrides = _CHANGED.get(setting.kind, (setting.kind, {}))
    model = build(kind, **overrides)
    if which == "truth":
        return model
    model = model.to(setting.dtype)
    if which != "plain":
        other = setting.other if which == "other" else {}
        specache_fx.compile(model, **{**setting.all_options, **other})
    return model


@torch.no_grad()
def give_numbers(setting: Setting, seed: int) -> None:
    """Other weights, the same ones for all models of a setting. Nothing compiles anew."""
    plain = model_of(setting, "plain")
    generator = torch.Generator().manual_seed(seed)
    for weight in plain.parameters():
        if weight.dim() >= 2:
            weight.normal_(std=0.15, generator=generator)
    for which in ("compiled", "truth", *(["other"] if setting.other else [])):
        for weight, new in zip(model_of(setting, which).parameters(), plain.parameters(), strict=True):
            weight.copy_(new)


@torch.no_grad()
def call(model: nn.Module, ids: Tensor, mask: Tensor, past: Any, masked: bool = True) -> tuple[Tensor, Any]:
    """Logits of new tokens `ids`, and the cache; `mask` is of all tokens, bool [batch, kv_len]."""
    given: dict[str, Any] = {}
    if masked or not mask.all():
        given["attention_mask"] = mask.long()
        if "position_ids" in inspect.signature(type(model).forward).parameters:
            given["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    out = model(ids, past_key_values=past, use_cache=True, **given)
    return out.logits, out.past_key_values


@dataclass(frozen=True)
class Call:
    """New tokens [batch, q_len], which of them are no padding, and the logits that came [batch, q_len, vocab_size]."""

    ids: Tensor
    real: Tensor
    logits: Tensor

    def rows(self, index: Tensor) -> Call:
        return Call(self.ids[index], self.real[index], self.logits[index])


@dataclass(frozen=True)
class Crop:
    """The newest tokens, cut off."""

    count: int

    def rows(self, index: Tensor) -> Crop:
        return self


Tale = list[Call | Crop]


def tokens_of(tale: Tale) -> Call:
    """The tokens that are left after all calls and crops."""
    parts = [torch.empty(0)] * 3
    for each in tale:
        if isinstance(each, Crop):
            parts = [part[:, : -each.count] for part in parts]
        else:
            new = (each.ids, each.real, each.logits)
            parts = (
                [torch.cat([old, late], 1) for old, late in zip(parts, new, strict=True)]
                if len(parts[0])
                else [*new]
            )
    return Call(*parts)


def told_by(model: nn.Module, tale: Tale, masked: bool) -> Tale:
    """The same calls and crops from the beginning on, with the logits that `model` gives."""
    past, again = None, Tale()
    for each in tale:
        if isinstance(each, Crop):
            past.crop(-each.count)
            again.append(each)
        else:
            before = [tokens_of(again).real] if again else []
            logits, past = call(model, each.ids, torch.cat([*before, each.real], 1), past, masked)
            again.append(Call(each.ids, each.real, logits))
    return again


def in_one_piece(tale: Tale) -> Tale:
    """Calls of several tokens that follow each other, as one."""
    whole = Tale()
    for each in tale:
        last = whole[-1] if whole else None
        if (
            isinstance(each, Call)
            and isinstance(last, Call)
            and min(each.ids.shape[1], last.ids.shape[1]) > 1
        ):
            whole[-1] = tokens_of([last, each])
        else:
            whole.append(each)
    return whole


def with_other_padding(tale: Tale) -> Tale:
    return [
        replace(each, ids=torch.where(each.real, each.ids, (each.ids * 5 + 11) % VOCAB_SIZE))
        if isinstance(each, Call)
        else each
        for each in tale
    ]


def with_columns_of_padding(tale: Tale, count: int, group: int) -> Tale:
    """Further columns of padding at the beginning, in whole groups, or fewer: no more than all rows have there."""
    first = tale[0]
    assert isinstance(first, Call)
    padding = int(first.real.any(0).long().argmax()) if first.real.any() else 0
    shortest = min(tokens_of(tale[: calls + 1]).ids.shape[1] for calls in range(len(tale)))
    count = max(count, -padding, 1 - shortest)  # crops leave a token
    count = -(-count // group * group)
    ids, real = (F.pad(part, (count, 0)) for part in (first.ids, first.real))
    return [Call(ids, real, F.pad(first.logits, (0, 0, count, 0))), *tale[1:]]


def assert_same(found: Tale, expected: Tale, **close: float) -> None:
    """The logits of all real tokens."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(one, Call) and isinstance(other, Call):
            torch.testing.assert_close(
                one.logits[one.real].float(),
                other.logits[other.real].float(),
                msg=lambda text, number=number: f"call {number} of the tale: {text}",  # type: ignore[misc]
                **close,
            )


@dataclass
class Conversation:
    """A cache in use.

    Attributes:
        past: The cache.
        tale: Of its tokens.
        rows: Of the cache as the last call returned it, if they were moved since.
    """

    past: Any
    tale: Tale
    rows: Tensor | None = None


class World:
    """Conversations with one compiled model; each method is what a user does."""

    def __init__(self, setting: Setting, numbers: int) -> None:
        self.setting, self.model = setting, model_of(setting, "compiled")
        give_numbers(setting, numbers)
        self.talks: list[Conversation] = []

    def talk(self, which: int) -> Conversation:
        return self.talks[which % len(self.talks)]

    # Tokens -----------------------------------------------------------------------------------------------------------

    def prompt(
        self, lengths: Sequence[int], side: str, pieces: Sequence[int], seed: int, by_plain: bool = False
    ) -> None:
        """A new conversation: a batch of prompts of these lengths, in pieces."""
        talk = Conversation(None, [])
        self._read(
            talk, lengths, side, pieces, seed, model_of(self.setting, "plain") if by_plain else self.model
        )
        if by_plain:
            self._decode(talk, 1, False, seed)  # it is taken over by then
        self.talks.append(talk)

    def next_turn(
        self, which: int, lengths: Sequence[int], side: str, pieces: Sequence[int], seed: int
    ) -> None:
        talk = self.talk(which)
        batch = len(tokens_of(talk.tale).ids)
        self._read(
            talk, [lengths[row % len(lengths)] for row in range(batch)], side, pieces, seed, self.model
        )

    def decode(self, which: int, steps: int, greedy: bool, seed: int) -> None:
        self._decode(self.talk(which), steps, greedy, seed)

    def decode_in_threads(self, steps: int, greedy: bool, seed: int) -> None:
        at_once([partial(self._decode, talk, steps, greedy, seed + i) for i, talk in enumerate(self.talks)])

    # The cache --------------------------------------------------------------------------------------------------------

    def crop(self, which: int, count: int) -> None:
        talk = self.talk(which)
        count = min(count, tokens_of(talk.tale).ids.shape[1] - 1)
        if count and self.setting.kind not in WINDOWED:
            if talk.rows is not None:
                self._step_before_a_limit(talk, talk.rows, count)
            talk.past.crop(-count)
            talk.tale = [*talk.tale, Crop(count)]

    def fork(self, which: int, keep: bool, seed: int) -> None:
        """A copy; without `keep` the original is dropped."""
        talk = self.talk(which)
        twin = replace(talk, past=copy.deepcopy(talk.past))
        if keep:
            self.talks.append(twin)
            if self.setting.kind in WINDOWED:  # a full window can't go back, so the copy goes on first
                self._decode(twin, 1, False, seed)
        else:
            talk.past = twin.past

    def move_rows(self, which: int, how: str, rows: Sequence[int]) -> None:
        talk, options = self.talk(which), self.setting.all_options
        if options.get("accept_guesses") and not self.setting.exact:
            return  # a guess is accepted where that of all rows is right
        batch = len(tokens_of(talk.tale).ids)
        index = torch.tensor([row % batch for row in rows])
        times = 2 if batch <= 2 else 1
        if how == "reorder":
            index = index[torch.arange(batch) % len(index)]
        elif how == "repeat":
            index = torch.arange(batch).repeat_interleave(times)
        self._step_before_a_limit(talk, index if talk.rows is None else talk.rows[index])
        match how:
            case "reorder":
                talk.past.reorder_cache(index)
            case "select":
                talk.past.batch_select_indices(index)
            case _:
                talk.past.batch_repeat_interleave(times)
        talk.rows = index if talk.rows is None else talk.rows[index]
        talk.tale = [each.rows(index) for each in talk.tale]

    def save_and_load(self, which: int) -> None:
        talk = self.talk(which)
        with tempfile.TemporaryDirectory() as folder:
            specache_fx.save(talk.past, folder, input_ids=tokens_of(talk.tale).ids)
            talk.past, talk.rows = specache_fx.load(self.model, folder), None

    def drop(self, which: int) -> None:
        self.talks.remove(self.talk(which))

    # Comparisons ------------------------------------------------------------------------------------------------------

    def beam_search(self, lengths: Sequence[int], beams: int, steps: int, seed: int) -> None:
        expected = "plain" if self.setting.exact else "other"
        ids, real = batch_of(lengths, "left", seed)
        given = {
            "attention_mask": real.long(),
            "max_new_tokens": steps,
            "num_beams": beams,
            "do_sample": False,
        }
        found, wanted = (
            model_of(self.setting, which).generate(ids, **given) for which in ("compiled", expected)
        )
        assert torch.equal(found, wanted), f"beams: {found.tolist()} and {wanted.tolist()}"

    def tell_again(
        self,
        which: int,
        row: int | None = None,
        whole: bool = False,
        other_ids: bool = False,
        columns: int = 0,
        other: bool = False,
    ) -> None:
        """All calls from the beginning on, in another way.

        Args:
            which: The conversation.
            row: One of its rows alone.
            whole: Chunks as one.
            other_ids: Other ids of padding.
            columns: More padding, or less.
            other: Other options.
        """
        tale, options = self.talk(which).tale, self.setting.all_options
        if self.setting.exact and self.setting.rounds:
            return  # `check` compares
        other = other and bool(self.setting.other)
        if self.setting.rounds:
            row, whole, columns = None, False, 0
            other = other and not {"kernel", "lowering"} & {*self.setting.other}
            # In Inductor's experts a row's rounding depends on all rows' tokens, without specache too: float16, 0.004.
            other_ids = other_ids and (self.setting.kind not in EXPERTS or options.get("lowering") == "eager")
        if options.get("on_miss") == "keep" and self.setting.kind in WINDOWED:
            columns = (
                0  # lookahead starts over when a window fills, padding included; this lane never forgets when
            )
        whole = whole and options.get("policy") != "kivi"  # whose later pieces read codes
        group = 1 if self.setting.exact else GROUP  # whose tokens stay together
        if row is not None and not options.get("accept_guesses"):
            row %= len(tokens_of(tale).ids)
            tale = [each.rows(torch.tensor([row])) for each in tale]
        for change, wanted in {
            in_one_piece: whole,
            with_other_padding: other_ids,
            partial(with_columns_of_padding, count=columns, group=group): columns != 0,
        }.items():
            tale = change(tale) if wanted else tale
        assert_same(
            told_by(model_of(self.setting, "other" if other else "compiled"), tale, self.setting.masked),
            tale,
            atol=1e-3,
            rtol=1e-3,
        )

    def check(self) -> None:
        """Lengths, and at exact settings the uncompiled model's logits."""
        for talk in self.talks:
            tokens = tokens_of(talk.tale)
            assert talk.past.get_seq_length() == tokens.ids.shape[1]
            if not self.setting.exact or not tokens.real.any():  # a crop may leave padding alone
                continue
            logits, _ = call(model_of(self.setting, "plain"), tokens.ids, tokens.real, None)
            if self.setting.dtype == torch.float32:
                assert_same([tokens], [replace(tokens, logits=logits)], atol=1e-3, rtol=1e-3)
                continue
            truth, _ = call(model_of(self.setting, "truth"), tokens.ids, tokens.real, None)
            budget = float((logits - truth)[tokens.real].abs().max())
            assert_same([tokens], [replace(tokens, logits=truth)], atol=3 * budget + 1e-2, rtol=0)

    # ------------------------------------------------------------------------------------------------------------------

    def _say(self, talk: Conversation, ids: Tensor, real: Tensor, model: Any = None) -> None:
        before = [tokens_of(talk.tale).real] if talk.tale else []
        mask = torch.cat([*before, real], 1)
        logits, talk.past = call(model or self.model, ids, mask, talk.past, self.setting.masked)
        talk.tale = [*talk.tale, Call(ids, real, logits)]
        talk.rows = None

    def _step_before_a_limit(self, talk: Conversation, rows: Tensor, count: int = 0) -> None:
        """Without the first of them, rows that are cropped so far look like others."""
        crops = takewhile(lambda each: isinstance(each, Crop), reversed(talk.tale))
        if 0 not in rows and count + sum(each.count for each in crops) >= HEAD_DIM:
            self._decode(talk, 1, False, 0)

    def _read(
        self,
        talk: Conversation,
        lengths: Sequence[int],
        side: str,
        pieces: Sequence[int],
        seed: int,
        model: Any,
    ) -> None:
        ids, real = batch_of(lengths, side, seed)
        width = ids.shape[1]
        # A later piece of one token would be a decode step.
        cuts: list[int] = []
        for cut in sorted(pieces):
            if (not cuts or cut - cuts[-1] > 1) and width - cut > 1:
                cuts.append(cut)
        for start, stop in zip([0, *cuts], [*cuts, width], strict=True):
            self._say(talk, ids[:, start:stop], real[:, start:stop], model)

    def _decode(self, talk: Conversation, steps: int, greedy: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            last = talk.tale[-1]
            batch = len(tokens_of(talk.tale).ids)
            ids = torch.randint(3, VOCAB_SIZE, (batch, 1), generator=generator)
            if greedy and isinstance(last, Call):
                ids = last.logits[:, -1:].argmax(-1)
            self._say(talk, ids, torch.ones(batch, 1, dtype=torch.bool))


def batch_of(lengths: Sequence[int], side: str, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens [batch, width] with repeats, and which are real: the padding is on the left, on the right or anywhere."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, 3 + 10 ** (1 + seed % 2), (len(lengths), width), generator=generator)
    place: Callable[[int], Tensor] = {
        "left": lambda length: torch.arange(width) >= width - length,
        "right": lambda length: torch.arange(width) < length,
        "middle": lambda length: torch.randperm(width, generator=generator) < length,
    }[side]
    real = torch.stack([place(length) for length in lengths])
    return torch.where(real, ids, 0), real
