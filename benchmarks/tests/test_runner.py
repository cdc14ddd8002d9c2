"""Each job runs once, in an order that reads and compiles least, and none that was made otherwise is taken."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.invented import invented

from specache_bench import runner, workers
from specache_bench.lab import Lab
from specache_bench.records import Job, Method, Record, Store
from specache_bench.runner import matched, ordered, run_jobs
from specache_bench.workloads import Prompts

CONDITIONS = {"model_fingerprint": "a1", "versions": {"torch": "2.13"}, "batch_size": 2}
METHODS = tuple(Method.of("kivi", bits=bits) for bits in (1, 2, 4))
PROMPTS = tuple(Prompts("copying", length, 2, 0) for length in (100, 200, 300, 400))
JOB = Job(METHODS[0], PROMPTS[0])
PRESS = Job(Method.of("press:h2o"), PROMPTS[0], METHODS[1])

cells = st.lists(
    st.builds(Job, st.sampled_from(METHODS), st.sampled_from(PROMPTS), st.none() | st.sampled_from(METHODS))
)


@given(cells, st.integers(1, 2500))
def test_order_has_each_cell_once_and_what_it_needs_before_it(asked: list[Job], capacity: int) -> None:
    order = ordered(asked, capacity)
    assert len({cell.key for cell in order}) == len(order)
    assert {cell.key for cell in asked} <= {cell.key for cell in order}
    for place, cell in enumerate(order):
        if (other := matched(cell)) is not None:
            assert other in order[:place]


@given(cells, st.integers(1, 2500))
def test_order_reads_each_prompt_in_one_stage_that_fits(asked: list[Job], capacity: int) -> None:
    order = ordered(asked, capacity)
    # Where a method comes up again, a new stage has begun: its prompts are others.
    seen: list[set[Prompts]] = [set()]
    methods: set[tuple[object, object]] = set()
    for method, group in groupby(order, key=lambda cell: (cell.method, cell.match)):
        if method in methods:
            seen.append(set())
            methods = set()
        methods.add(method)
        seen[-1] |= {cell.workload for cell in group}
    if sum(one.length * one.number for one in {cell.workload for cell in order}) <= capacity:
        assert len(seen) == 1


def test_order_puts_methods_outside_and_prompts_inside() -> None:
    asked = [Job(method, prompts) for prompts in PROMPTS for method in METHODS]
    order = ordered(asked, 10_000)
    assert [cell.method for cell in order] == [method for method in METHODS for _ in PROMPTS]
    stages = ordered(asked, 2 * (100 + 200 + 300))
    assert [cell.workload.length for cell in stages[-3:]] == [400] * 3


def run(order: list[Job], store: Store) -> tuple[dict[str, Record], list[str]]:
    measured: list[str] = []
    found: dict[str, Record] = {}

    def measure(job: Job, budget: Record | None) -> Record:
        assert (budget is None) == (job.match is None)
        measured.append(job.key)
        return invented(job)

    found.update(run_jobs(order, store, measure))
    return found, measured


def test_second_run_measures_nothing(tmp_path: Path) -> None:
    order = ordered([JOB, PRESS], 1000)
    first, measured = run(order, Store(tmp_path / "records.jsonl", CONDITIONS))
    assert len(measured) == 3
    again, measured = run(order, Store(tmp_path / "records.jsonl", CONDITIONS))
    assert measured == []
    assert again == first


@pytest.mark.parametrize(
    ("name", "value"), [("model_fingerprint", "b2"), ("versions", {"torch": "2.14"}), ("batch_size", 1)]
)
def test_cell_made_otherwise_is_made_anew(tmp_path: Path, name: str, value: object) -> None:
    file = tmp_path / "records.jsonl"
    run([JOB], Store(file, CONDITIONS))
    store = Store(file, {**CONDITIONS, name: value})
    assert store.get(JOB) is None
    _, measured = run([JOB], store)
    assert measured == [JOB.key]
    assert Store(file, CONDITIONS).get(JOB) is not None  # and the one from before is still there


def test_half_a_line_is_dropped_and_what_follows_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    Store(file, CONDITIONS).put(JOB, invented(JOB))
    file.write_bytes(file.read_bytes() + b'{"cell": "{\\"metho')
    other = Job(METHODS[2], PROMPTS[3])
    Store(file, CONDITIONS).put(other, invented(other))
    again = Store(file, CONDITIONS)
    for job in (JOB, other):
        kept = again.get(job)
        assert kept is not None and kept.result == invented(job).result


def test_presses_depend_on_what_is_in_their_environment(suite: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.Environment, "versions", lambda self, *names: dict.fromkeys(names, "1"))
    found = [runner.conditions(suite, jobs)["peers"] for jobs in ([JOB, PRESS], [JOB])]
    assert found == [{"kvpress": "1", "torch": "1", "transformers": "1"}, None]


def test_modules_that_decide_no_record_are_named() -> None:
    """A new module is one of either."""
    there = {path.stem for path in Path(runner.__file__).parent.iterdir() if path.suffix != ".toml"}
    deciding = {"decode", "kvpress_worker", "lab", "methods", "metrics", "records", "runner", "tasks"}
    deciding |= {"__init__", "worker_loop", "workers", "workloads"}
    assert there - {"__pycache__"} == deciding | set(runner._APART) and not deciding & set(runner._APART)


def test_missing_cell_is_not_kept_and_takes_its_matches_along(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    records = run_jobs(
        ordered([PRESS], 1000),
        Store(file, CONDITIONS),
        lambda job, budget: Record(missing="no such policy here"),
    )
    assert not file.exists()
    assert records[PRESS.key].missing == "kivi bits=2 was not run: no such policy here"
