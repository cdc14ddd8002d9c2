"""The papers' experiments, as data: a new one is a section of `papers.toml`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specache_bench.experiments.base import DATA, Experiment, Scale, write
from specache_bench.experiments.needles import Needles
from specache_bench.experiments.pareto import Pareto
from specache_bench.lab import Lab
from specache_bench.records import Job, Record
from specache_bench.runner import measure_on, planned, run_jobs
from specache_fx.errors import ConfigError

__all__ = ["EXPERIMENTS", "TASKS", "Scale", "run_experiments", "wanted"]

TASKS = ("multikey", "multiquery", "tracking", "copying")
_KINDS: dict[str, type[Experiment]] = {"table": Experiment, "needles": Needles, "pareto": Pareto}
EXPERIMENTS: dict[str, Experiment] = {
    name: _KINDS[section.get("kind", "table")].read(name, section)
    for name, section in DATA.items()
    if name != "settings"
}


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
    out: Path,
    say: Callable[[str], object],
    on_job: Callable[[Job | int], object],
) -> dict[str, Record]:
    """Run the jobs of experiments, each once, and write an experiment's files when its last job is done.

    Args:
        names: In `EXPERIMENTS`.
        scale: How much.
        lab: The model.
        out: Folder of the files, and of records.jsonl, by which a run goes on where it was.
        say: Told what is there already, which jobs can't be run, and which files were written.
        on_job: Called with the number of jobs first, then after each job.
    """
    needed = {name: {job.key for job in EXPERIMENTS[name].jobs(scale)} for name in names}
    asked = [job for name in names for job in EXPERIMENTS[name].jobs(scale)]
    jobs, store, origin = planned(asked, lab, out / "records.jsonl")
    origin |= {"seed": scale.seed, "date": time.strftime("%Y-%m-%d")}
    records, reasons = dict[str, Record](), set[str]()
    if kept := sum(store.get(job) is not None for job in jobs):
        say(f"{kept} of {len(jobs)} jobs are there already.")
    on_job(len(jobs))

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
                    table = write(EXPERIMENTS[name], scale, records, origin, out)
                    say(f"{name}: see {out / name}.json and .png. {table.title}:\n\n{table.markdown()}\n")

    return run_jobs(jobs, store, measure_on(lab, origin), done)
