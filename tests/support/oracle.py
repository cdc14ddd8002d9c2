"""Algorithms 1-3 of the SpeCache paper, dense, slow and plain: what kernels, passes and sessions must equal.

Nothing here imports the runtime or the passes. The full 16-bit cache is kept in memory, the low-bit copy is
recomputed from it, attention is one product and one softmax over all keys, selection is Python's `sorted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from support.models import TinyDecoder, attention_mask_4d, positions_from_mask, within_window
from support.oracle_cache import OracleCache, ScoreForm
from support.oracle_quant import Indices, select
from support.oracle_records import NOTHING, DecodeStep, HitCount, OracleRun, mass_of, overlap
from torch import Tensor

if TYPE_CHECKING:
    from specache_fx.config import SpecacheConfig

# What lane 1's scores weigh in the selection where `on_miss="recover"`.
SHARE_AFTER_HIT, SHARE_AFTER_MISS = 0.8, 0.4


class OracleDecoder:
    """Runs a `TinyDecoder` by `docs/laws.md`; one generation at a time.

    Args:
        model: Its weights and everything but its attention.
        config: policy, lookahead, on_miss, aggregation, bits, group_size, quantizer, residual_length, top_k,
            key_share, value_share.
        compute_dtype: Of the decode attention.
    """

    def __init__(
        self, model: TinyDecoder, config: SpecacheConfig, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.config, self.compute_dtype = model, config.for_device("cpu"), compute_dtype
        self.form = ScoreForm(model.config.softcap, model.slopes, model.sinks)
        self.caches: list[OracleCache] = []
        self.tokens: list[list[int | None]] = []  # by batch row; None where padding is
        self._forget_lookahead()

    @property
    def two_lanes(self) -> bool:
        return self.looks_ahead and self.config.lookahead == "token"

    @property
    def looks_ahead(self) -> bool:
        selects = any(not cache.is_exact for cache in self.caches)
        return selects and self.config.policy == "specache" and self.config.lookahead != "none"

    @property
    def kv_len(self) -> int:
        return self.caches[0].kv_len if self.caches else 0

    def _forget_lookahead(self) -> None:
        self.lookahead_ready = False
        self.speculative: Tensor | None = None  # T'_{t+1}, for the next step's lane 1
        self.expected: Tensor | None = None  # what the last step's lane 1 took the next token to be
        self.next_staged: list[Indices] = []
        self.known: _Known | None = None

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Algorithm 1: exact. Returns logits [batch, q_len, vocab_size]."""
        self.caches, self.tokens = [], [[] for _ in input_ids]
        return self.extend(input_ids, attention_mask)

    @torch.no_grad()
    def extend(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """More tokens at once, on 16-bit history (policy "kivi": low-bit history, since it has no other).

        Args:
            input_ids: int64 [batch, q_len].
            attention_mask: [batch, q_len], of the new tokens alone; all real by default.
        """
        self._forget_lookahead()
        batch, q_len = input_ids.shape
        new_mask = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
        key_mask = torch.cat((self.caches[0].key_mask, new_mask), dim=1) if self.caches else new_mask
        mask = attention_mask_4d(key_mask, batch, q_len, key_mask.shape[1], input_ids.device)
        first, new_caches = not self.caches, []

        def attention(layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            new_caches.append((k, v))
            if not first:
                cache = self.caches[layer_idx]
                past_k, past_v = cache.device_pairs() if self.config.policy == "kivi" else (cache.k, cache.v)
                k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
            k, v = self.model.blocks[layer_idx].expand(k, v)
            window = self.model.config.window_of(layer_idx)
            return self.model.sdpa(q, k, v, mask if window is None else within_window(mask, window))

        logits = self.model.run(input_ids, positions_from_mask(key_mask, q_len), attention)
        for row, new, shown in zip(self.tokens, input_ids.tolist(), key_mask.tolist(), strict=True):
            row[:] = [token if real else None for token, real in zip([*row, *new], shown, strict=True)]
        if first:
            self.caches = [
                OracleCache(
                    self.config,
                    k,
                    v,
                    new_mask,
                    self.compute_dtype,
                    self.model.config.window_of(i),
                    self.model.blocks[i].expand,
                    self._is_resident(i),
                )
                for i, (k, v) in enumerate(new_caches)
            ]
        else:
            for cache, (k, v) in zip(self.caches, new_caches, strict=True):
                cache.append(k, v, new_mask)
        return logits

    def _is_resident(self, layer_idx: int) -> bool:
        """Whether it is one of the first `resident_layers` layers that keep all tokens."""
        earlier = [self.model.config.window_of(i) for i in range(layer_idx)]
        return earlier.count(None) < self.config.resident_layers

    def crop(self, kv_len: int) -> None:
        """Roll back to the oldest `kv_len` tokens; to the present length it changes nothing."""
        if kv_len == self.kv_len:
            return
        for cache in self.caches:
            cache.crop(kv_len)
        self.tokens = [row[:kv_len] for row in self.tokens]
        self._forget_lookahead()

    def _step(
        self, tokens: list[Tensor], staged: list[Indices] | None, shares: Tensor | None = None
    ) -> _Pass:
        """One forward pass of one or two lanes over the caches as they are; appends nothing.

        Selection goes by the last lane's scores, or by those of both lanes: `shares` [batch] is what lane 1's weigh.
        """
        lanes, key_mask = len(tokens), self.caches[0].key_mask
        position = key_mask.sum(-1, keepdim=True)
        scores: list[Tensor] = []
        own_scores: list[Tensor] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        next_pairs: list[tuple[Tensor, Tensor]] = []
        used: list[Indices] = []

        def attention(layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            cache = self.caches[layer_idx]
            q, k, v = (x.unflatten(0, (lanes, -1)) for x in (q, k, v))
            layer_staged = staged[layer_idx] if staged else None
            same_step = self.config.policy != "kivi" and self.config.lookahead == "none"
            if same_step and self.config.key_share is None and not cache.is_exact:
                _, alone = cache.attend(q, k, v, None, scale, self.form)
                layer_staged = select(alone[0], cache.selectable, self.config.top_k)
                out, probabilities = cache.attend(q, k, v, layer_staged, scale, self.form, whole=True)
                scores.append(alone[0])
            else:
                out, probabilities = cache.attend(q, k, v, layer_staged, scale, self.form, whole=True)
                last = probabilities[-1]
                if shares is not None:
                    weights = shares[:, None, None]
                    last = weights * last + (1 - weights) * probabilities[0]
                scores.append(last)
            own_scores.append(probabilities[0, ..., : cache.num_quantized])
            pairs.append((k[0], v[0]))
            next_pairs.append((k[-1], v[-1]))
            used.append(layer_staged or [])
            return out.flatten(0, 1)

        position_ids = torch.cat([position + lane for lane in range(lanes)])
        logits = self.model.run(torch.cat(tokens)[:, None], position_ids, attention)[:, -1]
        return _Pass(list(logits.unflatten(0, (lanes, -1))), scores, own_scores, pairs, used, next_pairs)

    def _select(self, scores: list[Tensor], count: int) -> list[Indices]:
        return [
            select(layer[..., : 0 if cache.is_exact else count], cache.selectable, self.config.top_k)
            for layer, cache in zip(scores, self.caches, strict=True)
        ]

    @property
    def num_quantized(self) -> int:
        return max(cache.num_quantized for cache in self.caches)

    def predecode(self, token: Tensor) -> None:
        """Algorithm 2: `token` int64 [batch] against C' alone gives T'_2 and K_1; keeps nothing of it."""
        done = self._step([token], None)
        self.next_staged = self._select(done.scores, self.num_quantized)
        self.speculative = done.logits[0].argmax(-1) if self.two_lanes else None
        self.lookahead_ready = True

    def refetch(self, token: Tensor) -> Tensor | None:
        """Algorithm 2 again for the rows whose `token` was not speculated, if any: bool [batch], or None."""
        if self.config.on_miss != "refetch" or self.expected is None or torch.equal(self.expected, token):
            return None
        kept, spoken, missed = self.next_staged, self.speculative, self.expected != token
        self.predecode(token)
        for layer, before in zip(self.next_staged, kept, strict=True):
            for row in range(len(token)):
                if not missed[row]:
                    layer[row] = before[row]
        if self.speculative is not None and spoken is not None:
            self.speculative = torch.where(missed, self.speculative, spoken)
        return missed

    def recover(self, token: Tensor) -> Tensor | None:
        """After a miss: speculate on what followed the newest tokens before. Returns `_step`'s shares, or None."""
        if self.config.on_miss != "recover" or self.speculative is None:
            return None
        shares, speculative = [], self.speculative.tolist()
        # Behind a step that was accepted no guess was made.
        expected = [None] * len(token) if self.expected is None else self.expected.tolist()
        for row, (came, guess) in enumerate(zip(token.tolist(), expected, strict=True)):
            missed = came != guess
            shares.append(SHARE_AFTER_MISS if missed else SHARE_AFTER_HIT)
            if missed and (found := following(self.tokens[row])) is not None:
                speculative[row] = found
        self.speculative = torch.tensor(speculative)
        return torch.tensor(shares)

    @torch.no_grad()
    def decode(self, token: Tensor) -> DecodeStep:
        """Algorithm 3, after Algorithm 2 where it is due. `token` is T_t, int64 [batch]."""
        known, self.known = self.known, None
        # The step that fills a window has a graph of its own.
        at_an_edge = self._fills_group() or any(cache.window == self.kv_len + 1 for cache in self.caches)
        if known is not None and torch.equal(token, known.token) and not at_an_edge:
            return self._accept(known)
        predecoded = self.looks_ahead and not self.lookahead_ready
        if predecoded:
            self.predecode(token)
        refetched = None if predecoded else self.refetch(token)
        for row, new in zip(self.tokens, token.tolist(), strict=True):
            row.append(new)
        shares = None if predecoded else self.recover(token)
        lane1_token = self.speculative
        tokens = [token] if lane1_token is None else [token, lane1_token]
        before = self.num_quantized
        done = self._step(tokens, self.next_staged if self.looks_ahead else None, shares)

        exact_hits = topk_hits = mass = NOTHING
        if self.expected is not None:
            exact_hits = HitCount(int((self.expected == token).sum()), len(token))
        if self.config.policy == "specache" and (self.looks_ahead or self.config.key_share is None):
            wanted = self._select(done.own_scores, before)
            for cache, guessed, needed, own in zip(
                self.caches, done.used, wanted, done.own_scores, strict=True
            ):
                if not cache.is_exact:
                    topk_hits += overlap(guessed, needed)
                    mass += HitCount(mass_of(guessed, own), mass_of(needed, own))

        fills = self._fills_group()
        for cache, (k, v) in zip(self.caches, done.pairs, strict=True):
            cache.append(k, v)
        selected = done.used
        if self.looks_ahead:
            # What T_t pushed out of the window is low-bit in the next step, so it can be chosen for that.
            selected = self._select(done.scores, self.num_quantized)
            self.next_staged = selected
        if lane1_token is not None:
            self.expected, self.speculative = lane1_token, done.logits[1].argmax(-1)
            if self.config.accept_guesses and not fills and self.form.slopes is None:
                self.known = _Known(lane1_token, done.logits[1], done.next_pairs)
            # The step that fills a window doesn't know lane 1's mask: lookahead starts over (step_masks.py).
            if any(cache.window == cache.kv_len for cache in self.caches):
                self._forget_lookahead()
        return DecodeStep(
            token=token,
            logits=done.logits[0],
            lane1_token=lane1_token,
            lane1_logits=done.logits[1] if lane1_token is not None else None,
            speculative=self.speculative,
            staged=done.used,
            selected=selected,
            scores=[layer[..., :before] for layer in done.scores],
            predecoded=predecoded,
            exact_hits=exact_hits,
            topk_hits=topk_hits,
            mass=mass,
            refetched=refetched,
        )

    def _fills_group(self) -> bool:
        """Whether the next token fills a group: its step is run, and what follows it is not known by then."""
        return not (self.kv_len + 1 - self.config.residual_length) % self.config.group_size

    def _accept(self, known: _Known) -> DecodeStep:
        """The step of a token that lane 1 has decoded: its logits, and its pairs."""
        for row, new in zip(self.tokens, known.token.tolist(), strict=True):
            row.append(new)
        for cache, (k, v) in zip(self.caches, known.pairs, strict=True):
            cache.append(k, v)
        self.expected, self.speculative = None, known.logits.argmax(-1)
        hits = HitCount(len(known.token), len(known.token))
        return DecodeStep(known.token, known.logits, exact_hits=hits, accepted=True)

    def generate(
        self,
        input_ids: Tensor,
        num_tokens: int,
        attention_mask: Tensor | None = None,
        forced: Tensor | None = None,
        guessed: Tensor | None = None,
    ) -> OracleRun:
        """Prefill and `num_tokens - 1` steps, greedy or fed with `forced` int64 [batch, num_tokens - 1].

        Where `guessed`, bool [batch, num_tokens - 1], is True, with what was speculated, if anything was.
        """
        prefill_logits = self.prefill(input_ids, attention_mask)
        all_logits, steps = [prefill_logits[:, -1]], []
        for step in range(num_tokens - 1):
            token = all_logits[-1].argmax(-1) if forced is None else forced[:, step]
            if guessed is not None and self.expected is not None:
                token = torch.where(guessed[:, step], self.expected, token)
            steps.append(self.decode(token))
            all_logits.append(steps[-1].logits)
        logits = torch.stack(all_logits, dim=1)
        return OracleRun(prefill_logits, logits.argmax(-1), logits, steps)


def following(tokens: Sequence[int | None]) -> int | None:
    """What followed the longest run of 1 to 4 newest tokens where it stood last before; None where it never did.

    A token of None, which is padding, equals no token and is no answer.
    """
    for length in (4, 3, 2, 1):
        for start in range(len(tokens) - length - 1, -1, -1):
            run, after = tokens[start : start + length], tokens[start + length]
            if None not in run and after is not None and run == tokens[-length:]:
                return after
    return None


class _Known(NamedTuple):
    """What lane 1 has computed for the token after its step's: its token, logits, and its k and v of each layer."""

    token: Tensor
    logits: Tensor
    pairs: list[tuple[Tensor, Tensor]]


class _Pass(NamedTuple):
    """What `OracleDecoder._step` returns, by lane or by layer.

    Attributes:
        logits: Of each lane, [batch, vocab_size].
        scores: What selection goes by, of each layer: [batch, num_kv_heads, num_quantized or more].
        own_scores: Lane 0's, with what it staged, of each layer: [batch, num_kv_heads, num_quantized].
        pairs: Lane 0's own k and v, of each layer.
        used: K_t of each layer.
        next_pairs: The last lane's k and v, of each layer.
    """

    logits: list[Tensor]
    scores: list[Tensor]
    own_scores: list[Tensor]
    pairs: list[tuple[Tensor, Tensor]]
    used: list[Indices]
    next_pairs: list[tuple[Tensor, Tensor]]
