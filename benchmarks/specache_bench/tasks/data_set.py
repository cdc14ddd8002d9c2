"""Data sets in kvpress' format: a parquet or CSV file, and what an evaluation of one leaves.

Columns: `context`, `question`, `answer` or `answers` (one text or a list), `max_new_tokens`, `task`; where a task has
them, `answer_prefix` and `all_classes`. Files: `predictions.csv`, `metrics.json`, `config.yaml`.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specache_bench.tasks.building import Sample, Writer
from specache_fx.errors import ConfigError

_COLUMNS = ("context", "question", "answer", "max_new_tokens", "task")


def read_samples(
    number: int, length: int, seed: int, writer: Writer, file: str, only: str | None = None
) -> list[Sample]:
    """Rows of a file, or of its task `only`, whose prompt and answer take at most `length` tokens, in its order.

    Raises:
        ConfigError: If the file can't be read, lacks a column, or has too few rows.
    """
    try:
        import pandas

        if file.endswith(".parquet"):
            rows = pandas.read_parquet(file)
        else:
            listed = dict.fromkeys(("answer", "answers", "all_classes"), _cell)
            rows = pandas.read_csv(file, keep_default_na=False, converters=listed)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"{file} can't be read as parquet or CSV ({error}). Give such a file; specache-bench[eval] reads it."
        ) from error
    if "answer" not in rows:
        rows = rows.rename(columns={"answers": "answer"})
    if missing := [name for name in _COLUMNS if name not in rows]:
        raise ConfigError(
            f"{file} has no column {', '.join(missing)}; it has {', '.join(map(str, rows.columns))}."
        )
    if only is not None:
        rows = rows[rows["task"] == only]
    found = [made for row in rows.to_dict("records") if (made := _sample(row, writer, length)) is not None]
    if number > len(found):
        of = "" if only is None else f" of task {only!r}"
        raise ConfigError(
            f"{file} has {len(found)} prompts{of} of up to {length:,} tokens: ask for fewer than {number}, or for a"
            " greater length."
        )
    return [found[i] for i in sorted(random.Random(seed).sample(range(len(found)), number))]


def _cell(text: str) -> Any:
    """A list as CSV has it, or one text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return found if isinstance(found, list) else text


def _sample(row: Mapping[Any, Any], writer: Writer, length: int) -> Sample | None:
    # A cell without a text is None or NaN.
    question, prefix = (
        text if isinstance(text := row.get(name), str) else "" for name in ("question", "answer_prefix")
    )
    apart = "\n" if writer.chat is None else ""  # as kvpress' pipeline; a template has its own
    context, question = writer.parts(str(row["context"]), question + apart, prefix)
    if len(writer.encode(context + question)) + int(row["max_new_tokens"]) > length:
        return None
    answers, classes = _texts(row["answer"]), _texts(row.get("all_classes"))
    if not answers:
        raise ConfigError(f"A row of task {row['task']!r} has no answer.")
    kind = f"row:{row['task']}"
    return Sample(
        context + question, answers, int(row["max_new_tokens"]), kind, (), context, question, classes
    )


def _texts(cell: Any) -> tuple[str, ...]:
    if isinstance(cell, str):
        return (cell,) if cell else ()
    return tuple(map(str, cell)) if hasattr(cell, "__len__") else ()


def write_results(root: Path, job: Any, record: Any, lab: Any, command: str) -> None:
    """Write kvpress' three files of a job on a data set; `metrics.json` has each task's mean score in percent."""
    import pandas
    import yaml

    work = job.workload
    options = dict(work.knobs)
    data = [Path(options.pop("file")).stem, *options.values(), work.length, *["chat"] * work.chat]
    mode = "question_agnostic" if work.agnostic else "question_aware"
    parts = (*map(str, data), Path(lab.name).name, str(job.method).replace(" ", ","), mode)
    folder = root / "__".join(parts)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "task": sample.metric.removeprefix("row:"),
            "question": sample.question,
            "answer": list(sample.answers),
            "max_new_tokens": sample.max_new_tokens,
            "predicted_answer": said,
            "score": score,
        }
        for sample, said, score in zip(work.samples(lab), record.predictions, record.scores, strict=True)
    ]
    table = pandas.DataFrame(rows)
    table.to_csv(folder / "predictions.csv", index=False)
    means = (100 * table.groupby("task")["score"].mean()).round(2).to_dict()
    (folder / "metrics.json").write_text(json.dumps(means, indent=2) + "\n")
    config = job.to_json() | {"model": lab.name, "dtype": lab.dtype, "command": command}
    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False))
