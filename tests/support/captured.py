"""Graphs of a few models, which the tests of passes share: each model is traced once a process, and never edited."""

from __future__ import annotations

from functools import cache

from support import graphs
from support.graphs import Captured
from support.own_modules import OwnConfig, OwnDecoder

from specache_fx.capture.program import Phase

MODELS = ("tiny", "unpadded", "eager", "sinks", "tokens first", "llama")


@cache
def captured(model: str) -> dict[Phase, Captured]:
    """A model's graph of each phase; "tiny" has two layers, the others one."""
    if model in ("llama", "eager"):
        llama = graphs.tiny_llama("eager" if model == "eager" else "sdpa")
        return graphs.by_phase(graphs.capture(llama, graphs.drive_transformers))
    if model == "tokens first":
        own = OwnDecoder(OwnConfig(layout="tokens first", num_layers=1, repeat_kv="expand"))
        return graphs.by_phase(graphs.capture(own, graphs.drive_own))
    if model == "sinks":
        every = graphs.tiny_decoder(softcap=2.0, sinks=True, alibi=True)
        return graphs.by_phase(graphs.capture(every, graphs.drive_tiny))
    if model == "unpadded":
        expanded = graphs.tiny_decoder(repeat_kv="expand")
        return graphs.by_phase(graphs.capture(expanded, lambda f: graphs.drive_tiny(f, padded=False)))
    return graphs.by_phase(graphs.capture(graphs.tiny_decoder(num_layers=2), graphs.drive_tiny))
