"""Accuracy against device bytes, for every method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specache_bench.experiments import style
from specache_bench.experiments.base import Average, Experiment, Line, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "*osDPXv^<>d"


class Pareto(Experiment):
    """Lines from few bytes to many; a curve for each family, which is a line's first label."""

    def averages(self, results: Results) -> list[tuple[Line, Average | None]]:
        """By bytes."""
        return sorted(super().averages(results), key=lambda pair: 9.0 if pair[1] is None else pair[1].ratio)

    def draw(self, results: Results, figure: Figure) -> None:
        """Device bytes on a logarithmic axis."""
        figure.set_size_inches(7.5, 5.5)
        axes = figure.subplots()
        families: dict[str, list[Average]] = {line.labels[0]: [] for line in self.lines(results.scale)}
        for line, average in self.averages(results):
            families[line.labels[0]] += [] if average is None else [average]
        for number, (name, averages) in enumerate(each for each in families.items() if each[1]):
            axes.errorbar(
                [average.ratio for average in averages],
                [average.score for average in averages],
                [average.error for average in averages],
                color=style.COLOURS[number % len(style.COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                linestyle="--" if number >= len(style.COLOURS) else "-",
                elinewidth=0.7,
                label=name,
            )
        least = 0.9 * min((one.ratio for averages in families.values() for one in averages), default=0.1)
        axes.set_xscale("log")
        axes.set_xlim(least, 1.1)
        shown = [tick for tick in (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0) if tick >= least]
        axes.set_xticks(shown, [f"{tick:g}x" for tick in shown])
        axes.minorticks_off()
        axes.set_xlabel("KV bytes on the device, as a share of the full cache's")
        axes.set_ylabel("score (%)")
        axes.set_ylim(0, 108)  # from 0, so that nothing looks larger than it is
        axes.set_yticks(range(0, 101, 20))
        axes.set_title("Accuracy against device bytes")
        if any(families.values()):
            figure.legend(loc="outside lower center", ncols=4)
