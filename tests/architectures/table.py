"""The table: `docs/architectures.json`, `docs/architectures.md`, and what it means for a row to get worse."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures.configs import recipe
from architectures.measure import CASES, NEW_TOKENS, PADDING, PROMPT_LEN, TOLERANCE, largest

ROOT = Path(__file__).parents[2]
JSON = ROOT / "docs" / "architectures.json"
MARKDOWN = ROOT / "docs" / "architectures.md"

# From best to worst.
VERDICTS: dict[str, str] = {
    "rewritten": "every attention over the KV cache is rewritten; logits equal eager's",
    "partly": "some are, the others are left alone; logits equal eager's",
    "left alone": "none is; logits equal eager's",
    "not built": "no small model of it generates text from tokens here",
    "lane wrong": "logits equal eager's, those of the speculative token differ",
    "error": "an error is raised",
    "NaN": "the logits are not finite",
    "WRONG": "the logits are finite and others than eager's",
}
NO_REASON = "no reason was named"
# Those that no release may have: silent, or loud where plain PyTorch would run.
BAD = ("lane wrong", "error", "NaN", "WRONG")


@cache
def _code() -> bytes:
    paths = {
        path for folder in ("specache_fx", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")
    }
    paths.add(ROOT / "tests" / "architectures" / "measure.py")
    return b"".join(path.relative_to(ROOT).as_posix().encode() + path.read_bytes() for path in sorted(paths))


def version(model_type: str) -> str:
    """Which code, torch, transformers and config a row was made with."""
    digest = hashlib.sha256(_code() + recipe(model_type).encode())
    torch_version = torch.__version__.partition("+")[0]
    return f"{digest.hexdigest()[:12]}, torch {torch_version}, transformers {transformers.__version__}"


def load() -> dict[str, dict[str, Any]]:
    """The committed rows by type; none if there is no table yet."""
    rows: dict[str, dict[str, Any]] = json.loads(JSON.read_text())["types"] if JSON.exists() else {}
    return rows


def made_with() -> str:
    """The transformers version of the committed table."""
    return str(json.loads(JSON.read_text())["transformers"]) if JSON.exists() else ""


def save(rows: dict[str, dict[str, Any]]) -> None:
    """Write both files; a reader sees the old ones or the new ones, never half of one."""
    ordered = {name: rows[name] for name in sorted(rows)}
    _write(JSON, json.dumps({"transformers": transformers.__version__, "types": ordered}, indent=1) + "\n")
    _write(MARKDOWN, markdown(ordered))


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text)
    os.replace(new, path)


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table to read."""
    counts = Counter(row["verdict"] for row in rows.values())
    lines = [
        "# Architectures",
        "",
        f"Every causal-LM type of transformers {transformers.__version__}: a small random model of each, batch 2,"
        f" prompts of {PROMPT_LEN} tokens ({PADDING} of the first row's are padding), {NEW_TOKENS} greedy tokens,"
        f" float32, CPU. Compared with the plain model: {'; '.join(CASES)} (bits 1 with every pair prefetched). Equal"
        f" means within {TOLERANCE:g} of the largest logit at every step. The second lane is given the true next token"
        " and compared as well. `make architectures` makes this file; see CONTRIBUTING.md.",
        "",
        "| verdict | types | |",
        "|---|---|---|",
        *(f"| {name} | {counts[name]} | {meaning} |" for name, meaning in VERDICTS.items()),
        "",
        "Layers: attentions rewritten / layers with a KV cache. Difference, lane 1: the largest of all cases, as a"
        " share of the largest logit. Graphs: the most that Dynamo compiled in one case.",
        "",
        "| type | verdict | layers | lanes | difference | lane 1 | graphs | left alone because |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(name, row) for name, row in rows.items()),
        "",
        *_with_eager_attention(rows),
        "",
    ]
    return "\n".join(lines)


def _with_eager_attention(rows: dict[str, dict[str, Any]]) -> list[str]:
    """How the types fare whose own choice is another attention."""
    found = {name: row["eager attention"] for name, row in rows.items() if "eager attention" in row}
    counts = Counter(row["verdict"] for row in found.values())
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    others = [
        f"- {name}: {row['verdict']}: {_cell(reasons({**row, 'cases': {'': row['case']}, 'kv_layers': 1}))}"
        for name, row in found.items()
        if row["verdict"] != "rewritten"
    ]
    return [
        f'With `attn_implementation="eager"` ({len(found)} types whose own choice is another, a padded batch at 16'
        f" bits): {told}.",
        "",
        *others,
    ]


def _line(name: str, row: dict[str, Any]) -> str:
    cases = list(row.get("cases", {}).values())
    if not cases:
        return f"| {name} | {row['verdict']} | | | | | | {_cell(row['reason'])} |"
    return " | ".join(
        [
            f"| {name}",
            row["verdict"],
            f"{min(case['rewritten'] for case in cases)} / {row['kv_layers']}",
            str(min(case["lanes"] for case in cases) or ""),
            _largest(case.get("difference") for case in cases),
            _largest(case["lane_difference"] for case in cases),
            str(max(case["graphs"] for case in cases)),
            f"{_cell(reasons(row))} |",
        ]
    )


def reasons(row: dict[str, Any]) -> str:
    """Why a type is not all rewritten with two lanes."""
    found: list[str] = []
    for case in row.get("cases", {}).values():
        found += [case["error"]] if "error" in case else []
        found += case["refusals"]
        found += [f"one lane: {case['fallback']}"] if case["fallback"] else []
    if not found and row["verdict"] == "left alone":
        found = [NO_REASON if row["kv_layers"] else "it has no KV cache"]
    return "; ".join(dict.fromkeys(found)) or row.get("reason", "")


def _largest(values: Any) -> str:
    value = largest(values)
    return "" if value is None else f"{value:.0e}"


def _cell(text: str, limit: int = 300) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def worse(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """In what a row is worse than the committed one."""
    order = list(VERDICTS)
    found = []
    if order.index(new["verdict"]) > order.index(old["verdict"]):
        found.append(f"verdict {old['verdict']!r} became {new['verdict']!r}: {reasons(new)}")
    eager = [row.get("eager attention", {}).get("verdict") for row in (new, old)]
    if None not in eager and order.index(eager[0]) > order.index(eager[1]):
        found.append(f"with eager attention {eager[1]!r} became {eager[0]!r}")
    for name, before in old.get("cases", {}).items():
        after = new.get("cases", {}).get(name)
        if after is None:
            continue
        for key in ("rewritten", "lanes"):
            if after[key] < before[key]:
                found.append(f"{name}: {key} {before[key]} became {after[key]}: {reasons(new)}")
    return found
