"""A worker in the environment of `make peers`: runs kvpress presses on request. It has no specache_fx.

    python kvpress_worker.py MODEL_FOLDER DTYPE DEVICE THREADS

A request (see `worker_loop`):

    {"press": "SnapKVPress", "options": {}, "attention": "sdpa", "ids": [[...], ...], "tail": [...],
     "max_new_tokens": 8, "stop_ids": [2], "forced": null or [[...], ...], "ratio": null or 0.8,
     "full": null or a file of `torch.save`, "device_bytes": null or 374000}

Its answer has "ids", "losses", "kl", "same_top", "device_bytes", "full_bytes", "kept", "ratio", "step_ms". All prompts
of a request have the same length; bytes are of the whole batch. The press sees `ids`; `tail` is read after it, whole.
`full` has the full cache's log-probabilities of forced tokens, see `Forced`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

# Before torch and transformers, which take seconds to load.
if importlib.util.find_spec("kvpress") is None:
    print(json.dumps({"error": f"{sys.executable} has no kvpress: `make peers` makes one that has"}))  # noqa: T201
    sys.exit()

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specache_bench.decode import Decoder, Forced, Greedy, decode
from specache_bench.worker_loop import serve


class Worker:
    """One model, kept from request to request."""

    def __init__(self, folder: str, dtype: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = self.model.eval().to(device)

    @torch.inference_mode()
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read the prompts under the press, then decode greedily or feed the given tokens."""
        ids = torch.tensor(request["ids"], device=self.model.device)
        tail = torch.tensor([request["tail"]] * len(ids), dtype=ids.dtype, device=ids.device)
        forced = request["forced"] and torch.tensor(request["forced"])
        self.model.set_attn_implementation(request["attention"])
        steps = (request["max_new_tokens"] if forced is None else forced.shape[1]) - 1
        cache, logits, ratio = self.read(ids, request, steps + tail.shape[1])
        kept = num_bytes(cache)
        self.model.set_attn_implementation("sdpa")
        # Positions are given: the cache is shorter than the text is.
        decoder = Decoder(self.model, cache, logits, position=ids.shape[1])
        if tail.shape[1]:
            decoder.feed(tail)
        stop_ids = frozenset(request["stop_ids"])
        full = request["full"] and torch.load(request["full"])
        chooser = Greedy(request["max_new_tokens"], stop_ids) if forced is None else Forced(forced, full)
        decode(decoder, chooser)
        per_token = self.full_bytes / ids.shape[1]
        found = {name: getattr(chooser, name, lambda: None)() for name in ("losses", "kl", "same_top")}
        return {
            "ids": chooser.ids(),
            **{name: value if value is None else value.tolist() for name, value in found.items()},
            "device_bytes": num_bytes(decoder.cache),
            "full_bytes": round(per_token * (ids.shape[1] + decoder.num_fed)),
            "kept": kept / per_token,
            "ratio": ratio,
            "step_ms": decoder.step_ms,
        }

    def read(self, ids: torch.Tensor, request: dict[str, Any], more: int) -> tuple[Any, torch.Tensor, float]:
        """Prefill under the press; with a byte budget the ratio is small enough that the budget is filled."""
        import kvpress

        length, budget, ratio = ids.shape[1], request["device_bytes"], request["ratio"]
        one = transformers.DynamicCache()
        self.model(input_ids=ids[:, :1], past_key_values=one, use_cache=True)
        self.full_bytes = num_bytes(one) * length
        if ratio is None:
            # A cache that holds `kept` tokens now holds `kept + more` at the end, when its bytes are counted.
            kept = min(length, max(1, math.ceil(budget * length / self.full_bytes) - more))
            # Half a token over: presses round down.
            ratio = max(0.0, 1 - (kept + 0.5) / length)
        while True:
            press = getattr(kvpress, request["press"])(compression_ratio=ratio, **request["options"])
            cache = transformers.DynamicCache()
            with press(self.model):
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            at_end = num_bytes(cache) + more * self.full_bytes / length
            if budget is None or ratio == 0 or at_end >= budget:
                return cache, out.logits[:, -1].float(), ratio
            ratio = max(0.0, ratio - max(1 / length, (budget - at_end) / self.full_bytes))


def num_bytes(cache: Any) -> int:
    """Of all keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


if __name__ == "__main__":
    model, dtype, device, threads = sys.argv[1:]
    serve(
        lambda: (Worker(model, dtype, device, int(threads)).answer, {}), ("kvpress", "transformers", "torch")
    )
