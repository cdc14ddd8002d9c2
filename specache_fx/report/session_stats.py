"""`SessionStats`: the result of `specache_fx.stats`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from specache_fx.runtime.session.metrics import SplitHits, Step
from specache_fx.runtime.session.session import Session


@dataclass(frozen=True)
class StepHits:
    """The hit rates of one decode step, as those of `SessionStats`.

    Attributes:
        kv_len: Tokens in the cache after the step.
        refetched: The speculative token was wrong, and the pairs were chosen anew for the right one.
        exact_hit_rate: Share of the batch rows whose speculative token was right; None where none had been made: in the
            first step after a prompt, and behind a step that was accepted.
        topk_hit_rate: None where nothing was quantised yet, and in a step that was accepted.
        attention_hit_rate: As `topk_hit_rate`.
    """

    kv_len: int
    refetched: bool
    exact_hit_rate: float | None
    topk_hit_rate: float | None
    attention_hit_rate: float | None


@dataclass(frozen=True)
class SessionStats:
    """Bytes, steps and hit rates of one KV cache.

    The two rates of pairs compare the pairs that a step had staged with the output token's own top-k: the `top_k`
    quantised positions with its largest selection scores in that very step (lane 0's, over the low-bit copy with the
    staged pairs in place). Pairs of pre-decode or of a refetch count as staged too. Sums over batch rows, kv heads,
    layers and steps are divided, not rates averaged. Padding is never needed. A copy that goes on by itself counts from
    its first step on; steps that were cropped off stay counted.

    Attributes:
        device_bytes: Bytes on the device: codes, scales, window, staged pairs, padding mask; counted on the tensors.
        host_bytes: Bytes reserved on the host, with room for tokens to come: a quarter of a layer's tokens, or 1,024
            tokens where that is less. A crop gives nothing back.
        host_used_bytes: Bytes of `host_bytes` that hold pairs.
        full_bytes: Bytes that the whole cache would take on the device in the model's dtype.
        kv_len: Tokens held.
        steps: Decode steps so far.
        replayed_steps: Replays of a captured step (`replay`), of pre-decode and refetches too; of several sessions
            the fewest.
        refetched_steps: Steps whose pairs were chosen anew, which costs a forward pass each (`on_miss="refetch"`).
        accepted_steps: Steps whose answer lane 1 computed a step earlier: it guessed their token (`accept_guesses`).
        prefetched_bytes: Bytes brought to the device by prefetching, over all steps.
        prefetched_rows: KV pairs brought.
        reused_bytes: Bytes of the pairs that were wanted again and still there, and so not moved.
        reused_rows: These pairs.
        prefetch_seconds: Time of the copies on the thread that made them. On CUDA this is only the time to issue them.
        waited_seconds: Time that decode steps waited for copies, their own copies included.
        read_keys: Keys that attention read from the host where they lie (`key_share`), over all steps.
        read_values: Values that it read so.
        exact_hit_rate: Share of speculative tokens that were the next output token; None without lookahead "token".
        topk_hit_rate: Share of the top-k pairs of the output token that had been prefetched; None where it was not
            measured (`track_hit_rates=False`, lookahead "none", or nothing quantised yet).
        attention_hit_rate: The output token's attention on prefetched pairs, divided by its attention on its
            own top-k: 1.0 where no other pairs would have had more. Attention is the selection score: the softmax
            probability, made one over the query heads of a group as `aggregation` says. None as `topk_hit_rate`.
        topk_hit_rate_if_right: The same in steps whose speculative token was right, by batch row; None where there was
            none, or nothing was measured.
        topk_hit_rate_if_wrong: The same where it was wrong.
        attention_hit_rate_if_right: As `topk_hit_rate_if_right`.
        attention_hit_rate_if_wrong: As `topk_hit_rate_if_wrong`.
        longest_miss_run: The most steps in a row in which the speculative token of one batch row was wrong; steps
            without one, as the first after a prompt, are left out.
        hit_series: The rates of each step, in the order in which they ran; empty unless `track_hit_rates="steps"`.
    """

    device_bytes: int
    host_bytes: int
    host_used_bytes: int
    full_bytes: int
    kv_len: int
    steps: int
    refetched_steps: int
    prefetched_bytes: int
    prefetched_rows: int
    reused_bytes: int
    reused_rows: int
    prefetch_seconds: float
    waited_seconds: float
    exact_hit_rate: float | None
    topk_hit_rate: float | None
    attention_hit_rate: float | None
    topk_hit_rate_if_right: float | None = None
    topk_hit_rate_if_wrong: float | None = None
    attention_hit_rate_if_right: float | None = None
    attention_hit_rate_if_wrong: float | None = None
    longest_miss_run: int = 0
    replayed_steps: int = 0
    accepted_steps: int = 0
    read_keys: int = 0
    read_values: int = 0
    hit_series: tuple[StepHits, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes on device and host. On a CPU they are one memory, and more than `full_bytes`."""
        return self.device_bytes + self.host_bytes

    @property
    def device_ratio(self) -> float:
        """`device_bytes / full_bytes`: the paper's "KV Cache Size"."""
        return self.device_bytes / self.full_bytes if self.full_bytes else 0.0

    @property
    def hidden_share(self) -> float | None:
        """The share of copy time that overlapped compute; None where nothing was prefetched."""
        if not self.prefetch_seconds:
            return None
        return max(0.0, 1 - self.waited_seconds / self.prefetch_seconds)


def summarise(sessions: Sequence[Session]) -> SessionStats:
    """Add up the sessions of one generation; waits for their copies and for the device."""
    for session in sessions:
        session.settle()
    copies = [session.transfer.metrics for session in sessions if session.transfer is not None]
    metrics = [session.metrics for session in sessions]
    hosts = [session.host for session in sessions if session.host is not None]
    hits = reduce(SplitHits.plus, [counted.split() for counted in metrics])
    read_keys, read_values = map(sum, zip((0, 0), *(host.count_read() for host in hosts), strict=True))
    return SessionStats(
        device_bytes=sum(session.device_bytes for session in sessions),
        host_bytes=sum(session.host_bytes for session in sessions),
        host_used_bytes=sum(session.host_used_bytes for session in sessions),
        full_bytes=sum(session.full_bytes for session in sessions),
        kv_len=sessions[0].kv_len,
        steps=metrics[0].steps,
        refetched_steps=max(counted.refetched_steps for counted in metrics),
        prefetched_bytes=sum(copy.fetched_bytes for copy in copies),
        prefetched_rows=sum(copy.fetched_rows for copy in copies),
        reused_bytes=sum(copy.reused_bytes for copy in copies),
        reused_rows=sum(copy.reused_rows for copy in copies),
        prefetch_seconds=sum(copy.copy_seconds for copy in copies),
        waited_seconds=sum(copy.waited_seconds for copy in copies),
        read_keys=read_keys,
        read_values=read_values,
        exact_hit_rate=hits.all.exact_rate,
        topk_hit_rate=hits.all.topk_rate,
        attention_hit_rate=hits.all.attention_rate,
        topk_hit_rate_if_right=hits.right.topk_rate,
        topk_hit_rate_if_wrong=hits.wrong.topk_rate,
        attention_hit_rate_if_right=hits.right.attention_rate,
        attention_hit_rate_if_wrong=hits.wrong.attention_rate,
        longest_miss_run=hits.longest_miss_run,
        accepted_steps=min(counted.accepted_steps for counted in metrics),
        replayed_steps=min(0 if session.graph is None else session.graph.replays for session in sessions),
        hit_series=_series([counted.series() for counted in metrics]),
    )


def _series(of_sessions: Sequence[list[Step]]) -> tuple[StepHits, ...]:
    """Add up the steps of several sessions, matched by their length: a step that failed may have run in some alone."""
    merged: dict[tuple[int, int], Step] = {}
    for steps in of_sessions:
        times: Counter[int] = Counter()
        for step in steps:
            key = step.kv_len, times[step.kv_len]
            times[step.kv_len] += 1
            held = merged.get(key)
            merged[key] = (
                step
                if held is None
                else Step(step.kv_len, held.refetched or step.refetched, held.hits.plus(step.hits))
            )
    return tuple(
        StepHits(
            step.kv_len, step.refetched, step.hits.exact_rate, step.hits.topk_rate, step.hits.attention_rate
        )
        for step in merged.values()
    )
