"""`specache`: the backend of this package, its options those of `SpecacheConfig`. Paper: SpeCache §4.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

import specache_fx
from specache_fx.compiled import uncompile
from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError, ConfigError
from specache_fx.eval.methods.base import CacheMethod, Footprint
from specache_fx.eval.reading import kv_tensors
from specache_fx.runtime import registry


class Specache(CacheMethod):
    """A compiled model that takes the prompt's cache over at its first decode step.

    Without `lowering`, graphs run as they are (`"eager"`): a short run would spend its time compiling.
    """

    policy: ClassVar[str] = "specache"
    defaults: ClassVar[Mapping[str, Any]] = {"lowering": "eager"}

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """`SpecacheConfig` says what is valid."""
        if "policy" in options:
            raise ConfigError(f"Method {name!r} is a policy already: leave the option 'policy' out.")
        filled = {**cls.defaults, **options, "policy": cls.policy}
        SpecacheConfig.from_options(filled)
        return filled

    def prepare(self, model: PreTrainedModel) -> None:
        """Compile it; graphs of another method are dropped first."""
        torch._dynamo.reset()
        specache_fx.compile(model, **self.options)

    def restore(self, model: PreTrainedModel) -> None:
        """Undo `specache_fx.compile(model)`."""
        uncompile(model)

    def begin(self, model: PreTrainedModel, cache: Any) -> Any:
        """The prompt's cache as it is: a cache of plain tensors is quantised and offloaded at its first call."""
        return cache

    def told(self, cache: Any, prompt: torch.Tensor) -> None:
        """Put them into the session's history, of which n-grams are looked up (`on_miss="recover"`)."""
        for session in {registry.find(tensor) for tensor in kv_tensors(cache)}:
            if session is not None and session.tokens is not None:
                session.tokens.learn(prompt)

    def measure(self, cache: Any) -> Footprint:
        """What `specache_fx.stats` says.

        Raises:
            ConfigError: If the model was left as it is, and so has no cache of ours.
        """
        try:
            stats = specache_fx.stats(cache)
        except CacheHandleError as error:
            raise ConfigError(
                f"Method {self.name!r} leaves this model's attention as it is: specache_fx.explain() says why."
            ) from error
        rows = cache.layers[0].keys.shape[0]
        return Footprint(
            stats.device_bytes,
            stats.host_bytes,
            {
                "exact_hit_rate": stats.exact_hit_rate,
                "topk_hit_rate": stats.topk_hit_rate,
                "attention_hit_rate": stats.attention_hit_rate,
                "topk_hit_rate_if_right": stats.topk_hit_rate_if_right,
                "topk_hit_rate_if_wrong": stats.topk_hit_rate_if_wrong,
                "attention_hit_rate_if_right": stats.attention_hit_rate_if_right,
                "attention_hit_rate_if_wrong": stats.attention_hit_rate_if_wrong,
                "longest_miss_run": stats.longest_miss_run,
                "refetched_steps": stats.refetched_steps,
                "prefetched_bytes": stats.prefetched_bytes / rows,
                "prefetched_rows": stats.prefetched_rows / rows,
                "reused_rows": stats.reused_rows / rows,
                "steps": stats.steps,
                "accepted_steps": stats.accepted_steps,
            },
        )
