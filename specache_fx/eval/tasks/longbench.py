"""LongBench's data, prompts, lengths and metrics. Paper: LongBench (Bai et al., ACL 2024); SpeCache Tables 1 and 2.

`longbench.json` has the benchmark's own prompt, number of new tokens and metric of each English and code task. The
Chinese ones need a word segmenter for their metrics and are not there. A record has `input`, `context`, `answers` and
`all_classes`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError
from specache_fx.eval.sample import Sample
from specache_fx.eval.tasks.building import Writer
from specache_fx.eval.tasks.records import Record, check_folder, choose, read_hub, read_jsonl, texts

_FIELDS = ("input", "context", "answers", "all_classes")
KINDS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("longbench.json").read_text(encoding="utf-8")
)
NAMES = tuple(f"longbench/{kind}" for kind in KINDS)


def load(
    task: str, data: str | Path, num_prompts: int, length: int, seed: int, writer: Writer, tokenizer: Any
) -> list[Sample]:
    """Records of one task; prompts longer than `length` tokens lose their middle, as in the benchmark's own script.

    Raises:
        ConfigError: If there is no such file, or too few records.
    """
    kind = task.removeprefix("longbench/")
    spec = KINDS[kind]
    records, where = _records(kind, data)
    samples = []
    for record in choose(records, num_prompts, seed, where):
        text = cut_middle(spec["prompt"].format(**record), length, writer, tokenizer)
        if writer.chat is not None and spec["chat"]:
            text = writer.chat(text)
        answers, classes = texts(record, "answers", where), tuple(record["all_classes"] or ())
        samples.append(Sample(text, answers, spec["max_new_tokens"], task, length, classes=classes))
    return samples


def cut_middle(text: str, length: int, writer: Writer, tokenizer: Any) -> str:
    """The text, or its first and last `length // 2` tokens where it has more than `length`."""
    ids = writer.encode(text)
    if len(ids) <= length:
        return text
    half = length // 2
    ends = (ids[:half], ids[-half:])
    return "".join(tokenizer.decode(end, skip_special_tokens=True) for end in ends)


def _records(kind: str, data: str | Path) -> tuple[list[Record], str]:
    folder = Path(data)
    if not check_folder(data):
        return read_hub(str(data), kind, _FIELDS), f"{data}, {kind}"
    for file in (folder / f"{kind}.jsonl", folder / "data" / f"{kind}.jsonl"):
        if file.is_file():
            return read_jsonl(file, _FIELDS), str(file)
    here = sorted({path.stem for pattern in ("*.jsonl", "data/*.jsonl") for path in folder.glob(pattern)})
    raise ConfigError(
        f"{folder} has no {kind}.jsonl (it has {', '.join(here) or 'no jsonl file'}). Give --data the folder of"
        " LongBench's data.zip, unpacked."
    )
