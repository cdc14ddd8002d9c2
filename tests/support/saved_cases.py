"""Caches to save, and how to go on with them; `python -m support.saved_cases FOLDER` does in a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.own_modules import OwnConfig, OwnDecoder
from support.zoo import SMALL, build, left_padded
from torch import Tensor, nn

import specache_fx

NEW_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """A model of the zoo and options.

    Attributes:
        model: Its name.
        options: Besides `SMALL`.
        decoded: Tokens that are decoded before the cache is saved.
        dtype: Of the model.
    """

    model: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    decoded: int = 19
    dtype: torch.dtype = torch.float32


CASES = {
    "1-bit": Case(options={"bits": 1}),
    "2-bit, sinks, disk, window": Case(
        "plain-window", {"bits": 2, "sink_tokens": 3, "host": "disk"}, dtype=torch.bfloat16
    ),
    "prompt-alone": Case(options={"bits": 1}, decoded=0),
    "exact": Case(options={"bits": 16}, decoded=16),
    "resident": Case(options={"bits": 1, "resident_layers": 1}),
    "kivi": Case(options={"policy": "kivi", "bits": 1}),
    "kcache": Case(options={"policy": "kcache"}),
    "query": Case(options={"bits": 1, "lookahead": "query"}),
    "same-step": Case(options={"bits": 1, "lookahead": "none"}),
    "paper": Case(options={"bits": 1, "quantizer": "kivi", "on_miss": "keep"}),
    "refetch": Case(options={"bits": 1, "on_miss": "refetch"}),
    "window": Case("plain-window", {"bits": 1}),
    "window-not-full": Case("plain-window", {"bits": 1}, decoded=1),
    "all-windows": Case("plain-windows", {"bits": 1}),
    "shared-kv": Case("gemma3n_text", {"bits": 1}),
    "latent": Case("deepseek_v3", {"bits": 1}),
    "state": Case("lfm2", {"bits": 1}),
    "alibi": Case("bloom", {"bits": 1}),
}
PADDED = left_padded((17, 30, 22))


def make(case: Case) -> Any:
    return specache_fx.compile(build(case.model).to(case.dtype), **SMALL, **case.options)


def read(model: Any, case: Case) -> tuple[Any, Tensor, Tensor]:
    """A cache, the tokens so far (one more than it holds) and their attention mask."""
    out = model.generate(
        **PADDED, max_new_tokens=case.decoded + 1, do_sample=False, return_dict_in_generate=True
    )
    mask = torch.nn.functional.pad(PADDED["attention_mask"], (0, case.decoded + 1), value=1)
    return out.past_key_values, out.sequences, mask


def go_on(model: Any, past: Any, ids: Tensor, mask: Tensor) -> list[list[int]]:
    tokens = model.generate(
        ids, attention_mask=mask, past_key_values=past, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return tokens[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


class BreakAfter(nn.Module):
    """A graph break behind a module: a session of its own for each part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        torch._dynamo.graph_break()
        return y


OWN = {
    "lists": OwnConfig(container="lists"),
    "dicts": OwnConfig("gpt", container="dicts", num_kv_heads=4),
    "tokens-first": OwnConfig(layout="tokens first", num_layers=1),
    "graph-breaks": OwnConfig(),
}
# What one test run can wait for; the others are for the night.
DAILY = ("2-bit, sinks, disk, window", "tokens-first")
OWN_PROMPT = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(5))


def make_own(name: str) -> Any:
    """A module that is no transformers', compiled."""
    model = OwnDecoder(OWN[name])
    if name == "graph-breaks":
        model.mlps = nn.ModuleList(BreakAfter(mlp) for mlp in model.mlps)
    return torch.compile(model, backend="specache", options={**SMALL, "bits": 1})


@torch.no_grad()
def run_own(model: Any, ids: Tensor, past: Any, tokens: int) -> tuple[list[list[int]], Any, Tensor]:
    """Greedy tokens, the cache, and the token that it doesn't hold yet."""
    said = []
    for _ in range(tokens):
        logits, *past = model(ids, None, *past)
        ids = logits[:, -1:].argmax(-1)
        said.append(ids)
    return torch.cat(said, 1).tolist(), past, ids


def main(folder: Path, names: list[str]) -> None:
    """Load what the parent has saved in `folder`, go on, and print what came."""
    found: dict[str, Any] = {}
    for name in names:
        torch._dynamo.reset()
        kept = torch.load(folder / name / "input.pt")
        if name in CASES:
            model = make(CASES[name])
            past = specache_fx.load(model, folder / name, input_ids=kept["ids"])
        else:
            model = make_own(name)
            past = specache_fx.load(model, folder / name)
        nbytes = specache_fx.stats(past).device_bytes
        if name in CASES:
            tokens = go_on(model, past, kept["ids"], kept["mask"])
        else:
            tokens, *_ = run_own(model, kept["ids"], past, NEW_TOKENS)
        found[name] = {"device_bytes": nbytes, "tokens": tokens}
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
