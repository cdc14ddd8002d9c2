"""RULER's data, as its own scripts write it. Paper: RULER (Hsieh et al., COLM 2024).

A record has `input` (the whole prompt), `outputs` (what must be found), `length` (in tokens), and in newer versions
`answer_prefix` (what the prompt ends with).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError
from specache_fx.eval.sample import Sample
from specache_fx.eval.tasks.building import Writer
from specache_fx.eval.tasks.records import Record, check_folder, choose, read_hub, read_jsonl, texts

_FIELDS = ("input", "outputs")


@dataclass(frozen=True)
class Kind:
    """Tokens to generate and the metric, as RULER's constants say."""

    max_new_tokens: int
    metric: str = "string_match_all"


_NEEDLE, _QA = Kind(128), Kind(32, "string_match_part")
KINDS: dict[str, Kind] = {
    "niah_single_1": _NEEDLE,
    "niah_single_2": _NEEDLE,
    "niah_single_3": _NEEDLE,
    "niah_multikey_1": _NEEDLE,
    "niah_multikey_2": _NEEDLE,
    "niah_multikey_3": _NEEDLE,
    "niah_multivalue": _NEEDLE,
    "niah_multiquery": _NEEDLE,
    "vt": Kind(30),
    "cwe": Kind(120),
    "fwe": Kind(50),
    "qa_1": _QA,
    "qa_2": _QA,
}
NAMES = tuple(f"ruler/{kind}" for kind in KINDS)


def load(
    task: str, data: str | Path, num_prompts: int, length: int, seed: int, writer: Writer, tokenizer: Any
) -> list[Sample]:
    """Records of one task and one length.

    Raises:
        ConfigError: If there are none of that length.
    """
    kind = task.removeprefix("ruler/")
    records, where = _records(kind, data, length)
    samples = []
    for record in choose(records, num_prompts, seed, where):
        text, prefix = record["input"], record.get("answer_prefix") or ""
        prompt = text + prefix if writer.chat is None else writer.chat(text) + prefix.lstrip()
        answers = texts(record, "outputs", where)
        samples.append(Sample(prompt, answers, KINDS[kind].max_new_tokens, task, length))
    return samples


def _records(kind: str, data: str | Path, length: int) -> tuple[list[Record], str]:
    folder = Path(data)
    if not check_folder(data):
        return _of_length(
            read_hub(str(data), str(length), (*_FIELDS, "task")), kind, f"{data}, {length}"
        ), str(data)
    inside = (f"{kind}/validation.jsonl", f"{kind}/test.jsonl", f"{kind}.jsonl")
    own = [f"{length}/{middle}{name}" for middle in ("data/", "") for name in inside]
    for name in own:
        if (folder / name).is_file():
            return read_jsonl(folder / name, _FIELDS), str(folder / name)
    for name in (f"{middle}{name}" for middle in ("data/", "") for name in inside):
        file = folder / name
        if file.is_file():
            records = read_jsonl(file, (*_FIELDS, "length"))
            longest = max(int(record["length"]) for record in records)
            # RULER fills a prompt up to its length: what is asked for is the next length up.
            if not length // 2 < longest <= length:
                raise ConfigError(
                    f"{file} holds prompts of up to {longest:,} tokens, not of length {length:,}."
                )
            return records, str(file)
    lengths = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    held = f"lengths there: {', '.join(map(str, lengths))}" if lengths else "there are no lengths in it"
    raise ConfigError(
        f"{folder} has no {own[0]} ({held}). Give --data the folder that RULER's scripts"
        " wrote the lengths to: ROOT/MODEL/synthetic."
    )


def _of_length(records: list[Record], kind: str, where: str) -> list[Record]:
    found = [record for record in records if record["task"] == kind]
    if not found:
        raise ConfigError(
            f"{where}: no record of {kind!r}; tasks: {', '.join(sorted({r['task'] for r in records}))}."
        )
    return found
