"""`press:NAME`: methods that evict KV pairs after reading the prompt, as kvpress implements them.

They get at least as many bytes on the device as the method that they are compared with: `bytes` says how many at the
end of generation, and what is kept is rounded up. The press sees the whole prompt, question included, which is the best
case for those that go by the last queries. Nothing is evicted while decoding. kvpress offers no Quest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specache_fx.errors import ConfigError
from specache_fx.eval.decode import Sampling, until
from specache_fx.eval.methods.base import Footprint, Generated, Loaded, Running, Watch, refuse_unknown


@dataclass(frozen=True)
class Press:
    """A class of kvpress, its paper, the attention it needs, and its arguments besides the ratio."""

    name: str
    paper: str
    attention: str = "sdpa"
    options: tuple[tuple[str, Any], ...] = ()


PRESSES: dict[str, Press] = {
    "press:snapkv": Press("SnapKVPress", "SnapKV (Li et al., NeurIPS 2024)"),
    "press:h2o": Press("ObservedAttentionPress", "H2O (Zhang et al., NeurIPS 2023)", "eager"),
    "press:streaming": Press("StreamingLLMPress", "StreamingLLM (Xiao et al., ICLR 2024)"),
    "press:tova": Press("TOVAPress", "TOVA (Oren et al., EMNLP 2024)"),
    "press:knorm": Press("KnormPress", "L2 norm of keys (Devoto et al., EMNLP 2024)"),
    "press:expected": Press("ExpectedAttentionPress", "Expected attention (Devoto et al., 2025)"),
    "press:pyramidkv": Press("PyramidKVPress", "PyramidKV (Cai et al., 2024)"),
    "press:keydiff": Press("KeyDiffPress", "KeyDiff (Park et al., 2025)"),
    "press:lagkv": Press("LagKVPress", "LagKV (Liang et al., 2025)"),
    "press:random": Press("RandomPress", "none: pairs drawn by chance, to be beaten", options=(("seed", 0),)),
}
_OPTIONS: Mapping[str, Any] = {"bytes": None, "ratio": None}


class Evicting:
    """A press in the worker.

    Args:
        name: In `PRESSES`.
        options: Either `bytes`, on the device for one sequence at the end of generation, or `ratio`, the share that is
            evicted.
        loaded: What it runs on.

    Raises:
        ConfigError: On other options, or without the peers' environment.
    """

    def __init__(self, name: str, options: Mapping[str, Any], loaded: Loaded) -> None:
        given = self.check(name, options)
        self._press, self._bytes, self._ratio = PRESSES[name], given["bytes"], given["ratio"]
        self._peers = loaded.peers()

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with None for what is not given."""
        refuse_unknown(name, options, _OPTIONS)
        given = {**_OPTIONS, **options}
        if (given["bytes"] is None) == (given["ratio"] is None):
            raise ConfigError(
                f"Method {name!r} needs either bytes (of one sequence on the device) or ratio (the share evicted)."
            )
        if given["ratio"] is not None and not 0 <= given["ratio"] < 1:
            raise ConfigError(f"Method {name!r}: ratio={given['ratio']}: give a number from 0 to below 1.")
        if given["bytes"] is not None and given["bytes"] < 1:
            raise ConfigError(f"Method {name!r}: bytes={given['bytes']}: give a number of bytes above 0.")
        return given

    @classmethod
    def open(cls, name: str, options: Mapping[str, Any], loaded: Loaded) -> Running:
        """Make it ready on a model."""
        return cls(name, options, loaded)

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        watch: Watch | None,
        sampling: Sampling | None = None,
    ) -> Generated:
        """Decode greedily; see `Running`.

        Raises:
            ConfigError: On a watch or sampling: the worker's steps are out of reach from here.
        """
        if sampling is not None:
            raise ConfigError(f"{self._press.name} decodes greedily alone: leave --temperature out.")
        if watch is not None:
            raise ConfigError(
                f"The steps of {self._press.name} can't be watched: it runs in another process."
            )
        return self._ask(input_ids, None, max_new_tokens, stop_ids)

    def converse(
        self, prompt: list[int], turns: Sequence[list[int]], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> Generated:
        """Not to be had.

        Raises:
            ConfigError: Always: the worker's caches can't be gone on with from here.
        """
        raise ConfigError(
            f"{self._press.name} answers one question a prompt: leave it out for tasks of turns."
        )

    def score(self, input_ids: torch.Tensor, forced: torch.Tensor) -> Generated:
        """Feed given tokens; see `Running`."""
        return self._ask(input_ids, forced.tolist(), 0, frozenset())

    def close(self) -> None:
        """Nothing: the worker stays for the next press."""

    def _ask(
        self, input_ids: torch.Tensor, forced: Any, max_new_tokens: int, stop_ids: frozenset[int]
    ) -> Generated:
        rows = len(input_ids)
        answer = self._peers.ask(
            {
                "press": self._press.name,
                "options": dict(self._press.options),
                "attention": self._press.attention,
                "ids": input_ids.tolist(),
                "forced": forced,
                "max_new_tokens": max_new_tokens,
                "stop_ids": sorted(stop_ids),
                "ratio": self._ratio,
                "device_bytes": None if self._bytes is None else self._bytes * rows,
            }
        )
        ids = [until(row, stop_ids) for row in answer["ids"]]
        losses = None if answer["losses"] is None else torch.tensor(answer["losses"])
        stats = {"compression_ratio": answer["ratio"], "kept_tokens": answer["kept"]}
        footprint = Footprint(answer["device_bytes"], 0, stats)
        return Generated(ids, losses, footprint, answer["full_bytes"], answer["step_ms"][1:])
