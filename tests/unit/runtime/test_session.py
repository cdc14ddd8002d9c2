"""A session against the oracle's caches: append, prefetch, wait, crop, sessions interleaved, copies late."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support import strategies
from support.late_transfer import late_transfer
from support.oracle_cache import OracleCache, ScoreForm
from support.oracle_quant import Indices, select

from specache_fx.config import Aggregation, SpecacheConfig
from specache_fx.errors import CacheHandleError
from specache_fx.runtime import ops  # noqa: F401  (defines the operators)
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.session import session as session_module
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.transfer import CpuTransfer, WorkerTransfer

CPU = torch.device("cpu")
LAYERS = 2
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

SMALL: dict[str, Any] = {"bits": 2, "group_size": 4, "residual_length": 4, "top_k": 4, "lookahead": "token"}


class _Pair:
    """A session and the oracle's caches of the same tokens."""

    def __init__(
        self,
        config: SpecacheConfig,
        shape: strategies.AttentionShape,
        generator: torch.Generator,
        forms: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        self.config, self.shape, self.generator = config, shape, generator
        shapes = (LayerShape(shape.num_kv_heads, shape.head_dim, shape.value_dim),) * LAYERS
        self.session = Session(config, shapes, torch.float32, CPU)
        self.oracles: list[OracleCache] = []
        self.staged: list[Indices | None] = [None] * LAYERS
        softcap, slopes, sinks = forms
        self.form = ScoreForm(
            2.0 if softcap else None,
            self.random(shape.num_heads).abs() if slopes else None,
            self.random(shape.num_heads) if sinks else None,
        )

    def biases(self, lanes: int) -> dict[int, torch.Tensor]:
        """The form's slopes as a runner hands them to the session: minus the distance to each stored and own key."""
        if self.form.slopes is None:
            return {}
        kv_len = self.session.kv_len
        keys = torch.arange(kv_len + lanes)
        query = kv_len + torch.arange(lanes)
        return dict.fromkeys(
            range(LAYERS), (keys - query[:, None])[:, None, None] * self.form.slopes[:, None]
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def pairs(self, tokens: int, *lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads = (*lanes, self.shape.batch, self.shape.num_kv_heads, tokens)
        return self.random(*heads, self.shape.head_dim), self.random(*heads, self.shape.value_dim)

    def extend(self, tokens: int, new_mask: torch.Tensor) -> None:
        old = self.oracles[0].key_mask if self.oracles else new_mask[:, :0]
        row = torch.cat([old, new_mask], dim=1)
        for layer in range(LAYERS):
            key, value = self.pairs(tokens)
            if self.session.kv_len:
                history = self.session.load(layer)
                if self.config.placement.offload:
                    assert torch.equal(history[0], self.oracles[layer].k)
                    assert torch.equal(history[1], self.oracles[layer].v)
            self.session.store(layer, key, value, row[:, None])
            if len(self.oracles) <= layer:
                resident = layer < self.config.resident_layers
                self.oracles.append(OracleCache(self.config, key, value, new_mask, resident=resident))
            else:
                self.oracles[layer].append(key, value, new_mask)
        self.session.forget_lookahead()
        self.session.advance(tokens, decoded=False)
        self.staged = [None] * LAYERS

    def step(self, lanes: int, predecode: bool, whole: bool = False) -> None:
        """One decode step, layer by layer, as a graph's ops make it; `whole`: as one op a layer does."""
        session = self.session
        if predecode:
            self.staged = [None] * LAYERS
            lanes = 1
        told = tuple(range(LAYERS)) if whole and session.table.serves else ()
        run = DecodeStep(session, predecode, told, self.biases(lanes))
        with run.running():
            for layer, oracle in enumerate(self.oracles):
                self.step_layer(run, layer, oracle, lanes, whole)
        if not predecode:
            session.advance(1, decoded=True)

    def step_layer(self, run: DecodeStep, layer: int, oracle: OracleCache, lanes: int, whole: bool) -> None:
        session, config, form = self.session, self.config, self.form
        query = self.random(lanes, self.shape.batch, self.shape.num_heads, 1, self.shape.head_dim)
        key, value = self.pairs(1, lanes)
        selects = config.stages and not oracle.is_exact
        whole &= layer in run.fused_layers
        if whole:
            out = torch.ops.specache.layer_step.default(
                query, key, value, session.state, layer, 0.3, form.softcap, form.sinks
            )
        else:
            run.wait_prefetch(layer)
            out = run.attend(layer, query, key, value, 0.3, True, form.softcap, form.sinks)
        expected, scores = oracle.attend(query, key, value, self.staged[layer], 0.3, form, whole=True)
        torch.testing.assert_close(out, expected, **CLOSE)
        if not whole:
            run.append(layer, key[0], value[0])
        if not run.predecoding:
            oracle.append(key[0], value[0])
        if not selects:
            return
        if whole:
            assert session.transfer is not None
            chosen = session.transfer.staging(layer).wanted
        else:
            chosen = run.select(layer)
            run.prefetch(layer, chosen)
        ours = [[[i for i in head if i >= 0] for head in row] for row in chosen.tolist()]
        count = oracle.num_quantized
        wanted = select(scores[-1][..., :count], oracle.selectable[:, :count], config.top_k)
        # The same scores up to rounding: where two are that close, either may be chosen.
        for b, row in enumerate(wanted):
            for h, positions in enumerate(row):
                assert len(ours[b][h]) == len(positions) == len(set(ours[b][h]))
                probabilities = scores[-1][b, h]
                torch.testing.assert_close(probabilities[ours[b][h]], probabilities[positions], **CLOSE)
        self.staged[layer] = ours


class SessionMachine(RuleBasedStateMachine):
    """Two sessions with options and shapes of their own, stepped in any order, copies late at random."""

    @initialize(data=st.data())
    def open(self, data: st.DataObject) -> None:
        seed = data.draw(strategies.seeds)
        delays = random.Random(seed)
        synchronous = data.draw(st.booleans())
        self.patch = pytest.MonkeyPatch()

        def late(host: HostCache, top_k: int, device: torch.device, *, interpreted: bool) -> WorkerTransfer:
            transfer = late_transfer(host, top_k, device, lambda: time.sleep(delays.random() * 2e-3))
            transfer.synchronous = synchronous
            return transfer

        self.at_once = data.draw(st.booleans()) and graph_ops.load() is not None
        if not self.at_once:
            self.patch.setattr(session_module, "choose_transfer", late)
        self.pairs = []
        for number in range(2):
            policy = data.draw(st.sampled_from(("specache", "specache", "kivi", "kcache")))
            config = data.draw(
                strategies.configs(
                    policy=policy,
                    host=data.draw(st.sampled_from(("memory", "disk"))),
                    track_hit_rates=data.draw(st.booleans()),
                )
            )
            shape = data.draw(strategies.attention_shapes())
            forms = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
            self.pairs.append(_Pair(config, shape, torch.Generator().manual_seed(seed + number), forms))

    @rule(data=st.data(), which=st.integers(0, 1), tokens=st.integers(1, 30))
    def extend(self, data: st.DataObject, which: int, tokens: int) -> None:
        pair = self.pairs[which]
        if pair.config.policy == "kivi" and pair.oracles and pair.session.layers[-1].num_quantized:
            return  # its history is low-bit: another answer than the oracle's 16-bit one
        pair.extend(tokens, data.draw(strategies.key_masks(pair.shape.batch, tokens)))

    @precondition(lambda self: any(pair.oracles for pair in self.pairs))
    @rule(which=st.integers(0, 1), lanes=st.integers(1, 2), steps=st.integers(1, 10), whole=st.booleans())
    def decode(self, which: int, lanes: int, steps: int, whole: bool) -> None:
        pair = self.pairs[which] if self.pairs[which].oracles else self.pairs[1 - which]
        if pair.session.staged_for != pair.session.kv_len:
            pair.step(lanes, predecode=True)
        for _ in range(steps):
            pair.step(lanes, predecode=False, whole=whole)

    @precondition(lambda self: any(pair.oracles for pair in self.pairs))
    @rule(which=st.integers(0, 1), share=st.floats(0.01, 1))
    def crop(self, which: int, share: float) -> None:
        pair = self.pairs[which] if self.pairs[which].oracles else self.pairs[1 - which]
        kv_len = max(int(pair.session.kv_len * share), 1)
        if (
            pair.config.policy == "kivi"
            and pair.config.num_quantized(kv_len) < pair.session.layers[-1].num_quantized
        ):
            return
        if kv_len < pair.session.kv_len:
            pair.staged = [None] * LAYERS
        pair.session.rewind(kv_len)
        for oracle in pair.oracles:
            oracle.crop(kv_len)

    @precondition(lambda self: any(pair.oracles for pair in self.pairs))
    @rule(which=st.integers(0, 1))
    def a_longer_cache_than_there_is_is_refused(self, which: int) -> None:
        pair = self.pairs[which] if self.pairs[which].oracles else self.pairs[1 - which]
        with pytest.raises(CacheHandleError, match="claims"):
            pair.session.rewind(pair.session.kv_len + 1)

    def teardown(self) -> None:
        for pair in getattr(self, "pairs", []):
            pair.session.close()
        if hasattr(self, "patch"):
            self.patch.undo()


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=30, stateful_step_count=12)


def test_a_failed_step_leaves_a_session_that_can_go_on() -> None:
    config = SpecacheConfig(**SMALL)
    shape = strategies.AttentionShape(2, 4, 2, 8, 8)
    pair = _Pair(config, shape, torch.Generator().manual_seed(0))
    pair.extend(21, torch.ones(2, 21, dtype=torch.bool))
    key, value = pair.pairs(1)
    for _ in range(3):  # layer 0 is some tokens ahead of layer 1, past the overflow of its window
        pair.session.layers[0].append(key, value)
    pair.session.rewind(21)
    assert [layer.kv_len for layer in pair.session.layers] == [21, 21]
    assert torch.equal(pair.session.load(0)[0], pair.oracles[0].k)
    pair.step(2, predecode=True)
    pair.step(2, predecode=False)


@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_attentions_that_share_a_layer_choose_together(aggregation: Aggregation) -> None:
    config = SpecacheConfig(**{**SMALL, "top_k": 3, "aggregation": aggregation})
    pair = _Pair(config, strategies.AttentionShape(2, 4, 2, 8, 8), torch.Generator().manual_seed(1))
    padded = torch.arange(33)[None, :] >= torch.tensor([[5], [0]])
    pair.extend(33, padded)
    key, value = pair.pairs(1, 2)
    run, scores = DecodeStep(pair.session), []
    run.wait_prefetch(0)
    for _ in range(2):  # of each, the second lane chooses
        query = 3 * pair.random(2, 2, 4, 1, 8)
        run.attend(0, query, key, value, 0.3, staged=True)
        scores.append(pair.oracles[0].attend(query, key, value, None, 0.3)[1][-1])
    chosen = run.select(0)
    together = scores[0] + scores[1] if aggregation == "mean" else torch.maximum(*scores)
    assert chosen.tolist() == select(together, padded, 3)
    others = torch.maximum(*scores) if aggregation == "mean" else scores[0] + scores[1]
    assert chosen.tolist() != select(others, padded, 3)  # else this test would tell nothing
    assert chosen.tolist() != select(scores[1], padded, 3)


def test_a_closed_session_has_no_tensors() -> None:
    config = SpecacheConfig(**SMALL)
    pair = _Pair(config, strategies.AttentionShape(2, 4, 2, 8, 8), torch.Generator())
    pair.extend(21, torch.ones(2, 21, dtype=torch.bool))
    assert pair.session.device_bytes > 0 and pair.session.host_bytes > 0
    pair.session.close()
    pair.session.close()
    assert pair.session.device_bytes == pair.session.host_bytes == 0


def test_a_step_waits_once_a_layer_and_reads_nothing_that_a_prefetch_may_overwrite() -> None:
    config = SpecacheConfig(**SMALL)
    pair = _Pair(config, strategies.AttentionShape(2, 4, 2, 8, 8), torch.Generator().manual_seed(0))
    pair.extend(21, torch.ones(2, 21, dtype=torch.bool))
    pair.step(2, predecode=True)
    waits = []
    with pytest.MonkeyPatch.context() as patch:
        wait = CpuTransfer.wait
        patch.setattr(CpuTransfer, "wait", lambda own, layer: (waits.append(layer), wait(own, layer))[1])
        for _ in range(3):
            pair.step(2, predecode=False)
    assert waits == [0, 1] * 3
    # After a layer's prefetch its slots may change at any moment: nobody reads them without waiting again.
    query, (key, value) = pair.random(2, 2, 4, 1, 8), pair.pairs(1, 2)
    run = DecodeStep(pair.session)
    run.wait_prefetch(0)
    run.attend(0, query, key, value, 0.3, staged=True)
    run.prefetch(0, run.select(0))
    with pytest.raises(KeyError):
        run.attend(0, query, key, value, 0.3, staged=True)
    pair.session.close()
