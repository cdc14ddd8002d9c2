"""SpeCache Figure 4: needles by length and depth."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from specache_bench.experiments.base import Experiment, Results, Scale
from specache_bench.records import Job, Method
from specache_bench.report import DASH, Table
from specache_bench.workloads import Prompts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HAYSTACKS = {"one needle": 1, "32 needles": 32}
# Tasks of our own model and those in English call the number of needles differently.
_KNOBS = {"suite": "num_keys"}


class Needles(Experiment):
    """Every method on every length and depth, with one needle and with 32."""

    def jobs(self, scale: Scale) -> list[Job]:
        """All places."""
        return [
            job
            for haystack in _HAYSTACKS
            for line in self.every_line
            for row in _places(scale, line.method, haystack)
            for job in row
        ]

    def table(self, results: Results) -> Table:
        """Means over depths by length; the picture has the places."""
        (lengths, depths), rows = _axes(results.scale), []
        for haystack in _HAYSTACKS:
            for line in self.every_line:
                found = _found(results, line.method, haystack)
                by_length = [fmean(column) for column in zip(*found, strict=True)]
                shown = [f"{score:.1f}" for score in [*by_length, fmean(by_length)]] if found else []
                rows.append((haystack, *line.labels, *(shown or [DASH] * (len(lengths) + 1))))
        each = _number(results.scale)
        title = f"{self.title}, means over {len(depths)} depths with {each} prompts each"
        return Table(title, ("haystack", "method", *(f"{n:,}" for n in lengths), "all"), tuple(rows))

    def draw(self, results: Results, figure: Figure) -> None:
        """A heat map for each method and haystack."""
        (lengths, depths), image = _axes(results.scale), None
        figure.set_size_inches(11.0, 6.0)
        panels = figure.subplots(len(_HAYSTACKS), len(self.every_line), sharex=True, sharey=True)
        for row, haystack in zip(panels, _HAYSTACKS, strict=True):
            for axes, line in zip(row, self.every_line, strict=True):
                axes.grid(visible=False)
                axes.set_title(f"{line.labels[0]}, {haystack}")
                axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
                axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
                if not (found := _found(results, line.method, haystack)):
                    axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center")
                    continue
                image = axes.imshow(found, vmin=0, vmax=100, cmap="cividis", aspect="auto")
                for y, scores in enumerate(found):
                    for x, score in enumerate(scores):
                        colour = "white" if score < 55 else "black"
                        axes.text(x, y, f"{score:.0f}", ha="center", va="center", color=colour)
            row[0].set_ylabel("depth of the needle")
        for axes in panels[-1]:
            axes.set_xlabel("context (tokens)")
        if image is not None:
            figure.colorbar(image, ax=panels, label="found (%)", shrink=0.8)


def _axes(scale: Scale) -> tuple[list[int], list[float]]:
    """Lengths and depths."""
    shares = (0.5, 1) if scale.quick else (0.125, 0.25, 0.5, 0.75, 1)
    depths = [0.0, 1.0] if scale.quick else [0.0, 0.25, 0.5, 0.75, 1.0]
    return [int(scale.length * share) for share in shares], depths


def _number(scale: Scale) -> int:
    """Fewer prompts than elsewhere, since there are many places."""
    return max(2, scale.prompts // 3)


def _places(scale: Scale, method: Method, haystack: str) -> list[list[Job]]:
    """By depth, then length."""
    (lengths, depths), needles = _axes(scale), _HAYSTACKS[haystack]
    task, knobs = (
        ("single", ()) if needles == 1 else ("multikey", ((_KNOBS.get(scale.model, "records"), needles),))
    )
    given = (_number(scale), scale.seed)
    return [
        [Job(method, Prompts(task, length, *given, depth, knobs)) for length in lengths] for depth in depths
    ]


def _found(results: Results, method: Method, haystack: str) -> list[list[float]]:
    """Percent by depth, then length; nothing where something is missing."""
    rows = [[results[job] for job in row] for row in _places(results.scale, method, haystack)]
    if any(record.missing for row in rows for record in row):
        return []
    return [[record.score for record in row] for row in rows]
