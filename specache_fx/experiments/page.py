"""docs/results.md from results/*.json: `python -m specache_fx.experiments.page docs/results.md`.

What stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->` is written anew: tables, picture, caption and
provenance of the experiment NAME. All else is prose, which stays.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from specache_fx.errors import ConfigError
from specache_fx.experiments import EXPERIMENTS, report
from specache_fx.experiments.base import Scale


def block(page: Path, results: Path, name: str) -> str:
    """What the page says of an experiment by itself.

    Args:
        page: The page; links to pictures are relative to its folder.
        results: Folder with what experiments wrote.
        name: In `EXPERIMENTS`.
    """
    file = results / f"{name}.json"
    if not file.is_file():
        return f"Not run yet: `specache-fx experiment {name}`."
    experiment, scale, records, saved = report.read(file)
    picture = os.path.relpath(results / f"{name}.png", page.parent)
    parts = [experiment.caption, f"![{EXPERIMENTS[name]}]({Path(picture).as_posix()})"]
    parts += [f"{table.title}:\n\n{table.markdown()}" for table in experiment.tables(scale, records)]
    parts += [_not_run(saved), _provenance(scale, saved)]
    return "\n\n".join(part for part in parts if part)


def _provenance(scale: Scale, saved: dict[str, Any]) -> str:
    device = saved["device"]
    machine = f"{device['name']} ({device['threads']} of {device['cores']} cores)"
    versions = ", ".join(f"{name} {number}" for name, number in saved["versions"].items())
    peers = saved.get("peers") if any(_is_press(cell) for cell in saved["cells"]) else None
    if peers:
        versions += "; presses: " + ", ".join(f"{name} {number}" for name, number in peers.items())
    return (
        f"`{saved['command']}`: model {saved['model']} ({saved['model_fingerprint']}), {saved['dtype']}, seed"
        f" {saved['seed']}, {machine}, {saved['seconds'] / 60:.0f} minutes,"
        f" commit {(saved['commit'] or 'unknown')[:12]}, {saved['date']}; {versions}."
        f"{' A quick run: few prompts, not for conclusions.' if scale.quick else ''}"
    )


def _is_press(cell: dict[str, Any]) -> bool:
    return bool(cell["cell"]["method"]["name"].startswith("press:"))


def _not_run(saved: dict[str, Any]) -> str:
    """Cells without numbers, with the reason: one line for each method."""
    reasons: dict[str, str] = {}
    for cell in saved["cells"]:
        if cell["missing"]:
            method = cell["cell"]["method"]
            options = " ".join(f"{name}={value}" for name, value in method["options"])
            reasons[f"{method['name']} {options}".strip()] = cell["missing"]
    lines = [f"- {method}: {reason}" for method, reason in reasons.items()]
    return "Not run:\n\n" + "\n".join(lines) if lines else ""


def renew(text: str, blocks: dict[str, str]) -> str:
    """Put blocks between their markers.

    Raises:
        ConfigError: If an experiment has no markers, or twice.
    """
    for name, content in blocks.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if text.count(begin) != 1 or text.count(end) != 1 or not pattern.search(text):
            raise ConfigError(
                f"The page needs {begin!r} and {end!r} behind it, once each, for experiment {name!r}."
            )
        whole = f"{begin}\n\n{content}\n\n{end}"
        text = pattern.sub(lambda match, whole=whole: whole, text)  # type: ignore[misc]
    return text


def main(
    page: Annotated[Path, typer.Argument(help="The page, such as docs/results.md.")],
    results: Annotated[Path, typer.Option(help="Folder of what experiments wrote.")] = Path("results"),
) -> None:
    """Renew the tables and captions of a page of results; prose stays."""
    try:
        renewed = renew(
            page.read_text(encoding="utf-8"), {name: block(page, results, name) for name in EXPERIMENTS}
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    page.write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
