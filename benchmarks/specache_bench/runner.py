"""The runner: jobs to records, each once, in the order that reads and compiles least."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import specache_bench
from specache_bench.lab import Lab, digest_of
from specache_bench.records import Job, Method, Record, Store
from specache_bench.workers import KVPRESS
from specache_fx.cli.provenance import provenance
from specache_fx.config import SpecacheConfig
from specache_fx.errors import SpecacheError

# Modules of the laboratory whose source doesn't decide a record's numbers.
_APART = (
    *(
        "chat",
        "cli",
        "cpu_worker",
        "experiments",
        "fetch",
        "gpu",
        "gpu_checks",
        "lm_eval_model",
        "pages",
        "real_models",
    ),
    *("prompts", "report", "speed", "speed_page", "starts", "timing"),
)


def matched(job: Job) -> Job | None:
    """The job whose device bytes a job is given as its budget."""
    return None if job.match is None else Job(job.match, job.workload)


def ordered(jobs: Iterable[Job], capacity: int) -> list[Job]:
    """Each job once, those that others are matched to among them and before them.

    Prompts are read once and kept while they fit; a method stays compiled until the next one. So workloads are taken in
    stages that fit, and within a stage each method runs on all of them.

    Args:
        jobs: Of all experiments.
        capacity: Tokens of prompts that are kept.
    """
    every: dict[str, Job] = {}
    for job in jobs:
        for one in (matched(job), job):
            if one is not None:
                every.setdefault(one.key, one)
    stages: dict[Any, int] = {}
    stage = held = 0
    for workload in dict.fromkeys(job.workload for job in every.values()):
        if held and held + workload.tokens > capacity:
            stage, held = stage + 1, 0
        stages[workload], held = stage, held + workload.tokens
    methods: dict[tuple[object, object], int] = {}
    # A method may stand in the list before the one that it is matched to: the latter comes first all the same.
    for job in sorted(every.values(), key=lambda one: one.match is not None):
        methods.setdefault((job.method, job.match), len(methods))
    return sorted(every.values(), key=lambda one: (stages[one.workload], methods[one.method, one.match]))


def planned(jobs: Iterable[Job], lab: Lab, file: Path | None) -> tuple[list[Job], Store, dict[str, Any]]:
    """Jobs in order, the records in a file that hold for them today, and their `conditions`."""
    order = ordered(jobs, lab.capacity)
    origin = conditions(lab, order)
    return order, Store(file, origin), origin


def run_jobs(
    jobs: Sequence[Job],
    store: Store,
    measure: Callable[[Job, Record | None], Record],
    done: Callable[[Job, Record], object] = lambda job, record: None,
) -> dict[str, Record]:
    """Run what the store doesn't hold, and put it there one by one; records by `Job.key`.

    Args:
        jobs: As `ordered` gives them.
        store: Where finished jobs are.
        measure: Runs one; its second argument is the record of the method that `Job.match` names.
        done: Called after each, also for those that were there.
    """
    records: dict[str, Record] = {}
    for job in jobs:
        record = store.get(job)
        if record is None:
            other = matched(job)
            budget = None if other is None else records[other.key]
            if budget is not None and budget.missing:
                record = Record(missing=f"{job.match} was not run: {budget.missing}")
            else:
                record = measure(job, budget)
            if record.missing is None:  # what is missing today may be there tomorrow
                record = store.put(job, record)
        records[job.key] = record
        done(job, record)
    return records


def measure_on(
    lab: Lab, origin: Mapping[str, Any], progress: Callable[[int], object] = lambda done: None
) -> Any:
    """A `measure` for `run_jobs` on one model; where a method or a workload can't be had here, its record says why."""

    def measure(job: Job, budget: Record | None) -> Record:
        method = job.method
        if budget is not None:
            method = replace(method, options=(*method.options, ("bytes", budget.device_bytes)))
        try:
            result = job.workload.run(lab, method, progress)
        except SpecacheError as error:
            return Record(missing=str(error))
        result["stats"] |= _code_size(lab, method)
        made = {"commit": origin["commit"], "date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        return Record(result, None, made | {"command": origin["command"]})

    return measure


def conditions(lab: Lab, jobs: Iterable[Job]) -> dict[str, Any]:
    """All that numbers of jobs depend on beside them (see `records.CONDITIONS`), and the command and commit."""
    pressed = any(job.method.name.startswith("press:") for job in jobs)
    return {
        **provenance(lab.model.device, program="specache-bench"),
        "model": lab.name,
        "model_fingerprint": lab.fingerprint,
        "dtype": lab.dtype,
        "batch_size": lab.batch_size,
        "code": code_fingerprint(),
        "peers": KVPRESS.versions("kvpress", "torch", "transformers") if pressed else None,
    }


def code_fingerprint() -> str:
    """A hash of the source files that decide a record's numbers."""
    parts = []
    for package in ("specache_fx", "specache_fx.passes", "specache_fx.runtime", "specache_fx.examples"):
        root = Path(import_module(package).__path__[0])
        # The last three are mapped into the first: there they may be links, or not be at all.
        paths = root.glob("*.py") if package == "specache_fx" else root.rglob("*")
        parts += [path for path in paths if path.suffix in (".py", ".cpp", ".h") and path.is_file()]
    own = Path(specache_bench.__path__[0])
    parts += [
        path for path in own.rglob("*.py") if path.relative_to(own).parts[0].removesuffix(".py") not in _APART
    ]
    return digest_of([path.resolve() for path in parts], Path("/"))


def _code_size(lab: Lab, method: Method) -> dict[str, float]:
    """Real bits for each value of the low-bit copy: codes, scales, zeros and tables."""
    from specache_fx.runtime.quant import make_quantizer

    if method.name not in ("specache", "kivi"):
        return {}
    options = {name: value for name, value in method.options if name in ("bits", "group_size", "quantizer")}
    quantizer = make_quantizer(SpecacheConfig.from_options(options))
    return {"bits_per_value": quantizer.bits_per_value(lab.head_dim, lab.model.dtype)}
