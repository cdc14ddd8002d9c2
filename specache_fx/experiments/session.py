"""Measures cells on one model: prompts made once, a bench for methods, probes for what no method shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specache_fx.config import SpecacheConfig
from specache_fx.errors import SpecacheError
from specache_fx.eval.bench import Bench, Method
from specache_fx.eval.sample import Sample
from specache_fx.eval.tasks import make_samples
from specache_fx.experiments import attention_hits, hit_series
from specache_fx.experiments.cell import Cell, Prompts, Record
from specache_fx.experiments.provenance import model_fingerprint
from specache_fx.provenance import git_commit
from specache_fx.runtime.quant import make_quantizer

BATCH_SIZE = 8
# Of prompts' caches, so that the methods of a stage need not read them again.
READ_LIMIT = 4 << 30

Probe = Callable[[Bench, list[Sample], Mapping[str, Any]], dict[str, Any]]
PROBES: dict[str, Probe] = {
    "probe:attention": attention_hits.probe,
    "probe:hits": hit_series.probe,
}


class Session:
    """One model that cells are measured on.

    Args:
        model: Folder, name on the hub, "needle" or "suite".
        device: "auto", "cpu" or "cuda".
        dtype: The model's.
        threads: CPU threads.
        peers_python: Python of the environment with kvpress.
    """

    def __init__(self, model: str, *, device: str, dtype: str, threads: int | None, peers_python: str | None):
        self.bench = Bench(
            model,
            device=device,
            dtype=dtype,
            threads=threads,
            peers_python=peers_python,
            read_limit=READ_LIMIT,
        )
        self._samples: dict[Prompts, list[Sample]] = {}
        self._commit = git_commit()

    @property
    def fingerprint(self) -> str:
        """Of the model's files."""
        folder = Path(self.bench.folder)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(str(self.bench.folder), local_files_only=True))
        return model_fingerprint(folder)

    @property
    def capacity(self) -> int:
        """Tokens of prompts whose caches are kept."""
        config = self.bench.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = self._head_dim * heads * config.num_hidden_layers * 2 * self.bench.model.dtype.itemsize
        return int(READ_LIMIT // size)

    @property
    def _head_dim(self) -> int:
        config = self.bench.model.config.get_text_config(decoder=True)
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def measure(
        self, cell: Cell, budget: Record | None, on_prompts: Callable[[int], None] = lambda number: None
    ) -> Record:
        """Run a cell.

        Args:
            cell: What to run.
            budget: What the method took that the cell is matched to.
            on_prompts: Called with the number of prompts of each batch.

        Returns:
            Its record; where the method or the task can't be had here, one that says why.
        """
        began = time.perf_counter()
        try:
            samples = self._samples_of(cell.prompts)
            if cell.is_probe:
                # A probe compiles, or looks into the model by itself: no method may hold it.
                self.bench.close()
                found = PROBES[cell.method.name](self.bench, samples, dict(cell.method.options))
                return Record(stats=found, seconds=time.perf_counter() - began, made=self._made())
            method = cell.method if budget is None else _with_budget(cell.method, budget)
            outcome = self.bench.run(method, samples, batch_size=BATCH_SIZE, progress=on_prompts)
        except SpecacheError as error:
            return Record(missing=str(error))
        return Record(
            scores=outcome.scores,
            predictions=outcome.predictions,
            device_bytes=outcome.device_bytes,
            full_bytes=outcome.full_bytes,
            host_bytes=outcome.host_bytes,
            decode_ms=0.0 if math.isnan(outcome.decode_ms) else outcome.decode_ms,
            seconds=outcome.seconds,
            stats={**outcome.stats, **self._code_size(cell.method)},
            made=self._made(),
        )

    def _samples_of(self, prompts: Prompts) -> list[Sample]:
        if prompts not in self._samples:
            self._samples[prompts] = make_samples(
                prompts.task,
                self.bench,
                num_prompts=prompts.number,
                length=prompts.length,
                seed=prompts.seed,
                depth=prompts.depth,
                **dict(prompts.knobs),
            )
        return self._samples[prompts]

    def _made(self) -> dict[str, Any]:
        return {"commit": self._commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}

    def _code_size(self, method: Method) -> dict[str, float]:
        """Real bits for each value of the low-bit copy: codes, scales, zeros and tables."""
        if method.name not in ("specache", "kivi"):
            return {}
        options = {
            name: value for name, value in method.options if name in ("bits", "group_size", "quantizer")
        }
        quantizer = make_quantizer(SpecacheConfig.from_options(options))
        return {"bits_per_value": quantizer.bits_per_value(self._head_dim, self.bench.model.dtype)}

    def close(self) -> None:
        """End the bench."""
        self.bench.close()


def _with_budget(method: Method, budget: Record) -> Method:
    return Method(method.name, (*method.options, ("bytes", budget.device_bytes)))
