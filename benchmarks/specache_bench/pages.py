"""Tables of the pages, from results/: `specache-bench page`.

Text between `<!-- NAME: begin -->` and `<!-- NAME: end -->` is written anew. All else is prose, which stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specache_bench import real_models, speed_page
from specache_bench.experiments import EXPERIMENTS
from specache_bench.experiments.base import read
from specache_fx.errors import ConfigError


def renew_all(root: Path) -> None:
    """Renew README.md, docs/results.md, docs/real_models.md and docs/performance.md of a folder, from its results/."""
    results, page = root / "results", root / "docs" / "results.md"
    trained = real_models.tables(real_models.read(results))
    blocks = {
        page: {name: block(page, results, name) for name in EXPERIMENTS},
        root / "README.md": {"real": trained.pop("real"), **speed_page.readme_tables(results)},
        root / "docs" / "real_models.md": trained,
        root / "docs" / "performance.md": speed_page.tables(results),
    }
    for file, content in blocks.items():
        file.write_text(renew(file.read_text(encoding="utf-8"), content), encoding="utf-8")


def block(page: Path, results: Path, name: str) -> str:
    """The part of a page that an experiment's JSON gives; links to pictures are relative to the page's folder."""
    file = results / f"{name}.json"
    if not file.is_file():
        return f"Not run yet: `specache-bench experiment {name}`."
    experiment, (records, saved) = EXPERIMENTS[name], read(file)
    picture = Path(os.path.relpath(results / f"{name}.png", page.parent)).as_posix()
    table = experiment.table(records)
    parts = [f"![{experiment.summary}]({picture})", f"{table.title}:", table.markdown()]
    parts += [_not_run(saved), _provenance(saved)]
    return "\n\n".join(part for part in parts if part)


def _provenance(saved: Mapping[str, Any]) -> str:
    device = saved["device"]
    machine = device["name"]
    if "threads" in device:  # a CPU's
        machine += f" ({device['threads']} of {device['cores']} cores)"
    versions = ", ".join(f"{name} {number}" for name, number in saved["versions"].items())
    pressed = any(cell["cell"]["method"]["name"].startswith("press:") for cell in saved["cells"])
    if pressed and saved.get("peers"):
        versions += "; presses: " + ", ".join(f"{name} {number}" for name, number in saved["peers"].items())
    return (
        f"`{saved['command']}`: model {saved['model']} ({saved['model_fingerprint']}), {saved['dtype']}, seed"
        f" {saved['seed']}, {machine}, {saved['seconds'] / 60:.0f} minutes,"
        f" commit {(saved['commit'] or 'unknown')[:12]}, {saved['date']}; {versions}."
        f"{' A quick run: few prompts, not for conclusions.' if saved['scale']['quick'] else ''}"
    )


def _not_run(saved: Mapping[str, Any]) -> str:
    """Jobs without numbers, with the reason: one line for each method."""
    reasons: dict[str, str] = {}
    for cell in saved["cells"]:
        if cell["missing"]:
            method = cell["cell"]["method"]
            options = " ".join(f"{name}={value}" for name, value in method["options"])
            reasons[f"{method['name']} {options}".strip()] = cell["missing"]
    lines = [f"- {method}: {reason}" for method, reason in reasons.items()]
    return "Not run:\n\n" + "\n".join(lines) if lines else ""


def renew(text: str, blocks: Mapping[str, str]) -> str:
    """Put blocks between their markers.

    Raises:
        ConfigError: If a block has no markers, or twice.
    """
    for name, content in blocks.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if text.count(begin) != 1 or text.count(end) != 1 or not pattern.search(text):
            raise ConfigError(f"The page needs {begin!r} and {end!r} behind it, once each, for {name!r}.")
        whole = f"{begin}\n\n{content}\n\n{end}"
        text = pattern.sub(lambda match, whole=whole: whole, text)  # type: ignore[misc]
    return text
