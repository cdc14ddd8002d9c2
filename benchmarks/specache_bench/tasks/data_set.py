"""Data sets in kvpress' format: a parquet or CSV file, and what an evaluation of one leaves.

Columns: `context`, `question`, `answer` (one text or a list), `answer_prefix`, `max_new_tokens`, `task`, and for
classification `all_classes`. Files: `predictions.csv`, `metrics.json`, `config.yaml`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specache_bench.tasks.building import Sample, Writer
from specache_fx.errors import ConfigError

_COLUMNS = ("context", "question", "answer", "max_new_tokens", "task")


def read_samples(
    file: str, num_prompts: int, length: int, seed: int, writer: Writer, only: str | None = None
) -> list[Sample]:
    """Rows of a file whose prompt has at most `length` tokens, in the file's order.

    Raises:
        ConfigError: If the file can't be read, lacks a column, or has too few rows.
    """
    import pandas

    try:
        rows = (pandas.read_parquet if file.endswith(".parquet") else pandas.read_csv)(file)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{file} can't be read as parquet or CSV ({error}).") from error
    if missing := [name for name in _COLUMNS if name not in rows]:
        raise ConfigError(
            f"{file} has no column {', '.join(missing)}; it has {', '.join(map(str, rows.columns))}."
        )
    if only is not None:
        rows = rows[rows["task"] == only]
    found = [made for row in rows.to_dict("records") if (made := _sample(row, writer, length)) is not None]
    if num_prompts > len(found):
        of = "" if only is None else f" of task {only!r}"
        raise ConfigError(
            f"{file} has {len(found)} prompts{of} of up to {length:,} tokens: ask for fewer than {num_prompts}, or for"
            " a greater length."
        )
    return [found[i] for i in sorted(random.Random(seed).sample(range(len(found)), num_prompts))]


def _sample(row: Mapping[Any, Any], writer: Writer, length: int) -> Sample | None:
    prefix = row.get("answer_prefix") or ""
    context, question = str(row["context"]), f"{row['question']}{prefix}"
    if writer.chat is not None:
        # The template is parted where the context ends.
        whole, mark = writer.chat(f"{context}\x00{row['question']}"), "\x00"
        context, _, rest = whole.partition(mark)
        question = rest + str(prefix)
    if len(writer.encode(context + question)) + int(row["max_new_tokens"]) > length:
        return None
    classes = () if row.get("all_classes") is None else row["all_classes"]
    answers = [row["answer"]] if isinstance(row["answer"], str) else list(row["answer"])
    if not answers:
        raise ConfigError(f"A row of task {row['task']!r} has no answer.")
    return Sample(
        context + question,
        tuple(map(str, answers)),
        int(row["max_new_tokens"]),
        f"row:{row['task']}",
        classes=tuple(map(str, classes)),
        context=context,
        question=question,
    )


def write_results(root: Path, job: Any, record: Any, lab: Any, command: str) -> Path:
    """Write kvpress' three files of a job on a data set; `metrics.json` has each task's mean score in percent."""
    import pandas
    import yaml

    mode = "question_agnostic" if job.workload.agnostic else "question_aware"
    parts = (Path(job.workload.data).stem, Path(lab.name).name, str(job.method).replace(" ", ","), mode)
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
        for sample, said, score in zip(
            job.workload.samples(lab), record.predictions, record.scores, strict=True
        )
    ]
    table = pandas.DataFrame(rows)
    table.to_csv(folder / "predictions.csv", index=False)
    means = (100 * table.groupby("task")["score"].mean()).round(2).to_dict()
    (folder / "metrics.json").write_text(json.dumps(means, indent=2) + "\n")
    config = job.to_json() | {"model": lab.name, "dtype": lab.dtype, "command": command}
    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False))
    return folder
