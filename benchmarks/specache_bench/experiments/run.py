"""Experiments from names to files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specache_bench.experiments import EXPERIMENTS
from specache_bench.experiments.base import Scale, write
from specache_bench.lab import Lab
from specache_bench.records import Job, Record, Store
from specache_bench.runner import conditions, measure_on, ordered, run_jobs
from specache_fx.errors import ConfigError

TASKS = ("multikey", "multiquery", "tracking", "copying")


def wanted(names: Sequence[str]) -> list[str]:
    """The experiments of a command line; a `ConfigError` on a name that is none."""
    if unknown := [name for name in names if name not in (*EXPERIMENTS, "all")]:
        named = ", ".join(map(repr, unknown))
        raise ConfigError(f"There is no experiment {named}: choose from {', '.join(EXPERIMENTS)}, or all.")
    return [*EXPERIMENTS] if "all" in names else [*dict.fromkeys(names)]


def run_experiments(
    names: Sequence[str],
    scale: Scale,
    lab: Lab,
    origin: Mapping[str, Any],
    peers: Mapping[str, str] | None,
    out: Path,
    say: Callable[[str], object],
    on_job: Callable[[Job | int], object],
) -> dict[str, Record]:
    """Run the jobs of experiments, each once, and write an experiment's files when its last job is done.

    Args:
        names: In `EXPERIMENTS`.
        scale: How much.
        lab: The model.
        origin: Of `provenance`.
        peers: Versions of kvpress and its needs.
        out: Folder of the files, and of records.jsonl, by which a run goes on where it was.
        say: Told what is there already, which jobs can't be run, and which files were written.
        on_job: Called with the number of jobs first, then after each job.
    """
    needed = {name: {job.key for job in EXPERIMENTS[name].jobs(scale)} for name in names}
    jobs = ordered([job for name in names for job in EXPERIMENTS[name].jobs(scale)], lab.capacity)
    given, records = conditions(lab, peers), dict[str, Record]()
    store, reasons = Store(out / "records.jsonl", given), set[str]()
    if kept := sum(store.get(job) is not None for job in jobs):
        say(f"{kept} of {len(jobs)} jobs are there already.")
    if other := store.made_otherwise(jobs):
        differ = ", ".join(f"{name} ({count})" for name, count in other.items())
        say(f"Jobs made under other conditions are run anew; these differ: {differ}.")
    on_job(len(jobs))
    whole = given | {name: origin[name] for name in ("command", "commit")}
    whole |= {"seed": scale.seed, "date": time.strftime("%Y-%m-%d")}

    def done(job: Job, record: Record) -> None:
        on_job(job)
        records[job.key] = record
        if record.missing and record.missing not in reasons:
            reasons.add(record.missing)
            say(f"not run: {job}: {record.missing}")
        for name, keys in needed.items():
            if job.key in keys:
                keys.discard(job.key)
                if not keys:
                    write(EXPERIMENTS[name], scale, records, whole, out)
                    say(f"{name}: see {out / name}.md and .png")

    return run_jobs(jobs, store, measure_on(lab, origin), done)
