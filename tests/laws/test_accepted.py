"""`accept_guesses`: a token that lane 1 has decoded is answered without a step, and as a step would have."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import strategies
from support.cases import examples, nightly_unless
from support.compiled import EXACT, compiled, forced_tokens
from support.models import Generated, TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from support.oracle import OracleDecoder
from support.triton_mode import needs_triton
from support.zoo import SMALL, build
from torch import Tensor

import specache_fx
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.session import registry

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ACCEPTS = {"lookahead": "token", "on_miss": "recover", "accept_guesses": True}
IDS = torch.tensor([[5, 9, 17, 5, 9, 33, 5, 9, 17, 40, 2, 5, 9]])


def run(prompt: strategies.Prompt, config: SpecacheConfig, tokens: int, forced: Tensor) -> Generated:
    """Feed `forced`. Masks grow from the first call on: else its step has a graph of its own."""
    forward = compiled(prompt.model, config)

    def growing(ids: Tensor, attention_mask: Tensor, past: Any = None) -> Any:
        if past is not None:
            torch._dynamo.mark_dynamic(attention_mask, 1)
        return forward(ids, past=past, attention_mask=attention_mask)

    return generate(growing, prompt.input_ids, tokens, prompt.attention_mask, forced)


def follow_guesses(prompt: strategies.Prompt, config: SpecacheConfig, tokens: int, data: Any) -> Any:
    """The oracle's run, in which some steps go on with what had been speculated."""
    forced = forced_tokens(prompt, tokens, data.draw(strategies.seeds))
    share = data.draw(st.sampled_from((0.5, 0.9, 1.0)))
    # All rows or none: a batch is accepted as a whole.
    drawn = torch.rand(forced.shape[1], generator=torch.Generator().manual_seed(data.draw(strategies.seeds)))
    whole = (drawn < share).expand(forced.shape)
    return OracleDecoder(prompt.model, config).generate(
        prompt.input_ids, tokens, prompt.attention_mask, forced, whole
    )


@settings(max_examples=examples(4))
@given(st.data())
def test_accepted_steps_equal_the_dense_oracle(data: st.DataObject) -> None:
    prompt = data.draw(strategies.prompts(min_len=5))
    config = data.draw(strategies.configs(bits=data.draw(strategies.low_bits), **ACCEPTS))
    tokens = 20
    truth = follow_guesses(prompt, config, tokens, data)
    ours = run(prompt, config, tokens, torch.stack([step.token for step in truth.steps], dim=1))
    torch.testing.assert_close(ours.logits, truth.logits, **EXACT)
    stats = specache_fx.stats(ours.past)
    assert stats.accepted_steps == sum(step.accepted for step in truth.steps)
    assert stats.exact_hit_rate == truth.exact_hits.rate
    assert stats.steps == tokens - 1


@pytest.mark.parametrize(
    ("kernel", "form"),
    [
        ("cpu", "windows"),
        ("reference", "resident and sinks"),
        *nightly_unless(
            lambda _: False,
            [
                ("cpu", "plain"),
                ("cpu", "resident and sinks"),
                ("reference", "plain"),
                ("reference", "windows"),
            ],
        ),
        *(
            pytest.param("triton", form, marks=[needs_triton, pytest.mark.nightly])
            for form in ("plain", "resident and sinks", "windows")
        ),
    ],
)
def test_every_kernel_writes_the_pairs_that_are_accepted(kernel: str, form: str) -> None:
    windows: dict[str, Any] = {"window": 20, "window_layers": (0,)} if form == "windows" else {}
    model = TinyDecoder(TinyConfig(num_layers=2, head_dim=16, **windows))
    more = {"resident_layers": 1, "sink_tokens": 2} if form == "resident and sinks" else {}
    config = SpecacheConfig(
        bits=2, group_size=8, residual_length=8, top_k=4, kernel=kernel, **ACCEPTS, **more
    )  # type: ignore[arg-type]
    ids = torch.randint(61, (1, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    forced, guessed = torch.zeros(1, 25, dtype=torch.long), torch.ones(1, 25, dtype=torch.bool)
    guessed[:, 9] = False
    truth = OracleDecoder(model, config).generate(ids, 26, mask, forced, guessed)
    ours = run(
        strategies.Prompt(model, ids, mask), config, 26, torch.stack([s.token for s in truth.steps], 1)
    )
    torch.testing.assert_close(ours.logits, truth.logits, **EXACT)
    assert specache_fx.stats(ours.past).accepted_steps == sum(step.accepted for step in truth.steps) > 5
    session = session_of(ours.past[1:])
    whole = None if kernel == "reference" or "sinks" in form else kernel
    assert (None if session.steps is None else session.steps.kernel) == whole


def greedy(model: Any, inputs: dict[str, Tensor], **more: Any) -> Any:
    options = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False, "output_logits": True}
    return model.generate(**inputs, **options, return_dict_in_generate=True, **more)


@pytest.mark.parametrize(
    ("kind", "lowering"),
    nightly_unless(
        ("padded", "eager").__eq__,
        itertools.product(["plain", "plain-window", "padded", "beams"], ["eager", "inductor"]),
    ),
)
def test_generate_equals_eager_and_accepts(kind: str, lowering: str) -> None:
    model = build("plain-window") if kind == "plain-window" else build("plain", 1)
    more = {"num_beams": 2} if kind == "beams" else {}
    inputs = {"input_ids": IDS}
    if kind == "padded":  # the same prompt twice: both rows are right at once
        mask = (torch.arange(16) >= 3).long().expand(2, -1)
        inputs = {"input_ids": F.pad(IDS, (3, 0)).expand(2, -1), "attention_mask": mask}
    plain = greedy(copy.deepcopy(model), inputs, **more)
    specache_fx.compile(model, **{**SMALL, "bits": 16, "accept_guesses": True, "lowering": lowering})
    ours = greedy(model, inputs, **more)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), **EXACT)
    stats = specache_fx.stats(ours.past_key_values)
    assert stats.steps == 59
    assert stats.accepted_steps > 1 or kind == "beams"  # beams are seldom right at once


# A call that is another than the one that was foreseen ---------------------------------------------------------------


class Flipped(TinyDecoder):
    """A decoder with a switch: its two graphs have the same inputs."""

    flip = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, past = super().forward(*args, **kwargs)
        return (-logits if self.flip else logits), past


class Loop:
    """A tiny decoder that is fed what it guesses; each call can be made another."""

    def __init__(self, **form: Any) -> None:
        self.model = Flipped(TinyConfig(**{"num_layers": 1, **form}))
        self.twin = copy.deepcopy(self.model)
        config = SpecacheConfig(bits=16, group_size=16, residual_length=16, top_k=4, **ACCEPTS)  # type: ignore[arg-type]
        self.forward: Callable[..., Any] = compiled(self.model, config)
        self.begin()

    def begin(self) -> None:
        """A prompt, and a step that foresees the next one."""
        self.mask = torch.ones_like(IDS, dtype=torch.bool)
        _, self.past = self.forward(IDS, attention_mask=self.mask)
        _, self.plain = self.twin(IDS, attention_mask=self.mask)
        self.step(7)

    @property
    def session(self) -> Any:
        return registry.find(self.past[0][0])

    @property
    def accepted(self) -> int:
        return int(self.session.metrics.accepted_steps)

    def guess(self) -> int:
        return int(self.session.guessed_token)

    def step(self, token: int, hidden: int | None = None, shift: int = 0) -> None:
        """One token; `hidden`: a key that the mask hides from now on; `shift`: added to its position."""
        ids = torch.tensor([[token]])
        self.mask = torch.cat((self.mask, torch.ones(1, 1, dtype=torch.bool)), 1)
        if hidden is not None:
            self.mask[:, hidden] = False
        position = torch.tensor([[self.mask.shape[1] - 1 + shift]])
        more = {"attention_mask": self.mask, "position_ids": position}
        logits, self.past = self.forward(ids, past=self.past, **more)
        plain, self.plain = self.twin(ids, past=self.plain, **more)
        torch.testing.assert_close(logits, plain, **EXACT)


@torch.no_grad()
def test_what_was_guessed_is_accepted_and_nothing_else() -> None:
    loop = Loop()
    loop.step(loop.guess())
    assert loop.accepted == 1
    loop.step(3)  # behind an accepted step: nothing has been decoded for it
    loop.step((loop.guess() + 1) % 61)
    assert loop.accepted == 1
    loop.step(loop.guess())
    assert loop.accepted == 2


@torch.no_grad()
def test_a_call_with_other_inputs_is_computed() -> None:
    loop = Loop()
    loop.step(loop.guess(), shift=2)
    assert loop.accepted == 0, "position"
    loop.begin()
    loop.step(loop.guess(), hidden=3)
    assert loop.accepted == 0, "mask"
    for name in ("weight in place", "weight elsewhere", "graph"):
        loop.begin()
        token = loop.guess()
        for model in (loop.model, loop.twin):
            if name == "weight in place":
                model.head.weight.mul_(-1)
            elif name == "weight elsewhere":
                model.head.weight.data = -model.head.weight
            else:
                model.flip = True
        loop.step(token)
        assert loop.accepted == 0, name


@torch.no_grad()
@pytest.mark.parametrize("change", ["mask of a window", "weight of an expansion"])
def test_a_call_with_another_mask_of_a_window_or_expansion_is_computed(change: str) -> None:
    if "mask" in change:
        loop = Loop(num_layers=2, window=40, window_layers=(0,), only_windows_padded=True)
        loop.step(loop.guess(), hidden=3)
    else:
        loop = Loop(num_kv_heads=1, head_dim=32, latent_dim=16)
        token = loop.guess()
        for model in (loop.model, loop.twin):
            model.blocks[0].kv_up_proj.weight.mul_(-1)
        loop.step(token)
    assert loop.accepted == 0


def test_a_model_of_inference_tensors_is_computed_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode():
        model = build("plain", 1)
    specache_fx.compile(model, **{**SMALL, "bits": 16, "accept_guesses": True, "lowering": "eager"})
    ours = greedy(model, {"input_ids": IDS})
    assert specache_fx.stats(ours.past_key_values).accepted_steps == 0
    assert "accept_guesses=True returns nothing here: its weights are inference tensors" in caplog.text


def accepting(name: str = "plain") -> Any:
    return specache_fx.compile(build(name, 1), **SMALL, bits=16, accept_guesses=True)


@torch.no_grad()
def foreseen(model: Any) -> tuple[Any, Any]:
    """A cache that has an answer ready, and its session."""
    cache = model(IDS, use_cache=True).past_key_values
    model(torch.tensor([[7]]), past_key_values=cache)
    session = session_of(cache)
    assert session.next_answer is not None and session.guessed_token is not None
    return cache, session


@torch.no_grad()
def test_a_call_for_other_outputs_is_computed() -> None:
    model = accepting("llama")
    cache, session = foreseen(model)
    guess = session.guessed_token
    ours = model(guess, past_key_values=cache, output_hidden_states=True).hidden_states
    assert session.metrics.accepted_steps == 0
    ids = torch.cat([IDS, torch.tensor([[7]]), guess], 1)
    theirs = build("llama", 1)(ids, output_hidden_states=True).hidden_states
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain[:, -1:], **EXACT)


# What happens to a cache in between ----------------------------------------------------------------------------------


@torch.no_grad()
def test_a_cache_that_is_cropped_copied_or_saved_forgets_what_was_foreseen(tmp_path: Any) -> None:
    plain, model = build("plain", 1), accepting()
    cache, session = foreseen(model)
    guess = session.guessed_token
    twin = copy.deepcopy(cache)
    expected = plain(torch.cat([IDS, torch.tensor([[7]]), guess], 1)).logits[:, -1:]
    torch.testing.assert_close(model(guess, past_key_values=twin).logits, expected, **EXACT)
    assert session.next_answer is None and session.metrics.accepted_steps == 0
    specache_fx.save(cache, tmp_path)
    assert session.next_answer is None
    torch.testing.assert_close(model(guess, past_key_values=cache).logits, expected, **EXACT)
    cache.crop(-1)
    torch.testing.assert_close(model(guess, past_key_values=cache).logits, expected, **EXACT)
    assert session.next_answer is not None
    cache.crop(-1)
    model(guess, past_key_values=cache)
    assert session.metrics.accepted_steps == 0
    loaded = specache_fx.load(model, tmp_path)
    torch.testing.assert_close(model(guess, past_key_values=loaded).logits, expected, **EXACT)
    for one in (twin, loaded):
        assert specache_fx.stats(one).accepted_steps == 0
    specache_fx.release(cache)
    assert session.next_answer is None


@torch.no_grad()
def test_rows_that_are_reordered_forget_what_was_foreseen() -> None:
    plain, model = build("plain", 1), accepting()
    ids = torch.tensor([[7, 9, 1, 2, 3, 4, 5, 6], [10, 11, 7, 9, 13, 14, 15, 16]])
    caches = [each(ids, use_cache=True).past_key_values for each in (model, plain)]
    swapped = torch.tensor([1, 0])
    for token in (20, 7):  # 7 was not expected: what followed it before is guessed, for both rows
        for each, cache in zip((model, plain), caches, strict=True):
            each(torch.full((2, 1), token), past_key_values=cache)
            cache.reorder_cache(swapped)  # each time, so that one graph serves all calls
            gc.collect()  # else what compiled still holds the handles, and the next call is a fork's
    session = session_of(caches[0])
    assert session.next_answer is not None and session.guessed_token is not None
    assert session.guessed_token.flatten().tolist() == [9, 9]
    ours, theirs = (
        each(torch.full((2, 1), 9), past_key_values=cache).logits
        for each, cache in zip((model, plain), caches, strict=True)
    )
    torch.testing.assert_close(ours, theirs, **EXACT)


@torch.no_grad()
def test_an_answer_keeps_no_model_alive() -> None:
    model = accepting()
    cache = foreseen(model)[0]  # noqa: F841  it stays
    weight = weakref.ref(model.lm_head.weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("kernel", nightly_unless("auto".__eq__, ["auto", "reference"]))
@torch.no_grad()
def test_a_window_can_go_back_by_a_token_in_every_step(kernel: Any) -> None:
    model = TinyDecoder(TinyConfig(num_layers=2, head_dim=16, window=20, window_layers=(0,)))
    config = SpecacheConfig(bits=16, group_size=16, residual_length=16, kernel=kernel, **ACCEPTS)  # type: ignore[arg-type]
    forward = compiled(model, config)
    mask = torch.ones(1, 13, dtype=torch.bool)
    _, past = forward(IDS, attention_mask=mask)
    for _ in range(40):
        mask = F.pad(mask, (0, 1), value=True)
        _, past = forward(torch.tensor([[7]]), past=past, attention_mask=mask)
        session = session_of(past[1:])
        for layer in session.layers:
            layer.check_truncate(session.kv_len - 1)


@torch.no_grad()
def test_reserved_memory_has_room_for_the_pair_behind() -> None:
    model = build("plain", 1)
    options = {**SMALL, "resident_layers": 1, "reserve": 43, "accept_guesses": True, "lowering": "eager"}
    specache_fx.compile(model, **options)
    cache = model(IDS, use_cache=True).past_key_values
    sizes = []
    while cache.get_seq_length() < 43:
        model(torch.tensor([[7]]), past_key_values=cache)
        sizes.append(specache_fx.stats(cache).device_bytes)
    assert len(set(sizes)) == 1


class WithConstant(TinyDecoder):
    """Returns what no token changes, too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, past = super().forward(*args, **kwargs)
        return (logits, self.head.weight[0] * 2), past


@torch.no_grad()
def test_outputs_are_the_callers_own() -> None:
    plain = WithConstant(TinyConfig(num_layers=2, head_dim=16)).eval()
    options = {"bits": 16, "group_size": 16, "residual_length": 16, "top_k": 4, **ACCEPTS}
    forward = torch.compile(
        copy.deepcopy(plain), backend="specache", options={**options, "lowering": "eager"}
    )
    mask = torch.ones_like(IDS, dtype=torch.bool)
    token = torch.tensor([[7]])
    _, cache = forward(IDS, attention_mask=mask)
    _, past = plain(IDS, attention_mask=mask)
    for _ in range(4):
        mask = F.pad(mask, (0, 1), value=True)
        (_, expected), past = plain(token, past=past, attention_mask=mask)
        (logits, found), cache = forward(token, past=cache, attention_mask=mask)
        assert torch.equal(found, expected)
        assert logits.untyped_storage().nbytes() == logits.nbytes
        found.zero_()  # a later call must not see it
        session = session_of(cache)
        token = token if session.guessed_token is None else session.guessed_token.clone()
    assert int(session.metrics.accepted_steps) > 0
