"""SpeCache Figure 4: needles by length and depth."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from specache_bench.experiments import style
from specache_bench.experiments.base import FULL, NEEDLES, Results, Scale, kivi, specache
from specache_bench.experiments.style import DASH, Table
from specache_bench.records import Job
from specache_bench.workloads import Prompts

METHODS = {"full cache": FULL, "KIVI 1-bit": kivi(1, 32), "SpeCache 1-bit": specache(1, 32)}
HAYSTACKS = {"one needle": 1, "32 needles": 32}


class Needles:
    """Every method on every length and depth, with one needle and with 32; see `Experiment`."""

    name = "figure4"
    summary = "SpeCache Figure 4: needle in a haystack, length by depth."
    caption = (
        "The share of prompts whose needle is found, by the length of the context and the needle's depth. The paper's"
        " figure has one needle; with 32 alike and one asked for, a blurred cache can't tell them apart."
    )

    def jobs(self, scale: Scale) -> list[Job]:
        """All places."""
        lengths, depths = _axes(scale)
        return [
            _place(scale, method, haystack, length, depth)
            for haystack in HAYSTACKS
            for method in METHODS
            for length in lengths
            for depth in depths
        ]

    def tables(self, results: Results) -> list[Table]:
        """Means over depths by length; the picture has the places."""
        (lengths, depths), rows = _axes(results.scale), []
        for haystack in HAYSTACKS:
            for method in METHODS:
                found = _found(results, method, haystack)
                by_length = [] if found is None else [fmean(column) for column in zip(*found, strict=True)]
                shown = [f"{score:.1f}" for score in [*by_length, fmean(by_length)]] if by_length else []
                rows.append((haystack, method, *(shown or [DASH] * (len(lengths) + 1))))
        title = (
            f"Needle found (%), means over {len(depths)} depths with {_number(results.scale)} prompts each"
        )
        return [Table(title, ("haystack", "method", *(f"{n:,}" for n in lengths), "all"), tuple(rows))]

    def picture(self, results: Results, file: Path) -> None:
        """A heat map for each method and haystack."""
        (lengths, depths), image = _axes(results.scale), None
        with style.figure(11.0, 6.0) as figure:
            panels = figure.subplots(len(HAYSTACKS), len(METHODS), sharex=True, sharey=True)
            for row, haystack in zip(panels, HAYSTACKS, strict=True):
                for axes, method in zip(row, METHODS, strict=True):
                    axes.grid(visible=False)
                    axes.set_title(f"{method}, {haystack}")
                    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
                    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
                    if (found := _found(results, method, haystack)) is None:
                        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center")
                        continue
                    image = axes.imshow(found, vmin=0, vmax=100, cmap="cividis", aspect="auto")
                    for y, line in enumerate(found):
                        for x, score in enumerate(line):
                            colour = "white" if score < 55 else "black"
                            axes.text(x, y, f"{score:.0f}", ha="center", va="center", color=colour)
                row[0].set_ylabel("depth of the needle")
            for axes in panels[-1]:
                axes.set_xlabel("context (tokens)")
            if image is not None:
                figure.colorbar(image, ax=panels, label="found (%)", shrink=0.8)
            figure.savefig(file, metadata={"Software": None})


def _axes(scale: Scale) -> tuple[list[int], tuple[float, ...]]:
    """Lengths and depths."""
    shares = (0.5, 1) if scale.quick else (0.125, 0.25, 0.5, 0.75, 1)
    return [int(scale.length * share) for share in shares], (0.0, 1.0) if scale.quick else (
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
    )


def _number(scale: Scale) -> int:
    """Fewer prompts than elsewhere, since there are many places."""
    return max(2, scale.prompts // 3)


def _place(scale: Scale, method: str, haystack: str, length: int, depth: float) -> Job:
    needles = HAYSTACKS[haystack]
    knobs = () if needles == 1 else ((NEEDLES.get(scale.model, NEEDLES["english"]), needles),)
    task = "single" if needles == 1 else "multikey"
    return Job(METHODS[method], Prompts(task, length, _number(scale), scale.seed, depth, knobs))


def _found(results: Results, method: str, haystack: str) -> list[list[float]] | None:
    """Percent by depth, then length; None where something is missing."""
    lengths, depths = _axes(results.scale)
    rows = [
        [results[_place(results.scale, method, haystack, length, depth)] for length in lengths]
        for depth in depths
    ]
    missing = any(record.missing for row in rows for record in row)
    return None if missing else [[record.score for record in row] for row in rows]
