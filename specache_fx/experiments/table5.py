"""The original 1-bit formula and the improved one. Paper: SpeCache Table 5, eq. 2 and 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specache_fx.eval.bench import Method
from specache_fx.experiments import papers, style
from specache_fx.experiments.base import Experiment, Results, Scale, Table
from specache_fx.experiments.cell import Cell
from specache_fx.experiments.grid import Line, grid
from specache_fx.experiments.methods import FULL, kivi, specache

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMULAS = (("original (eq. 2)", "kivi-original"), ("improved (eq. 3)", "kivi"))


def method(quantizer: str, with_specache: bool) -> Method:
    """1 bit, groups of 64. `specache` has KIVI's codes unless told otherwise: for cells equal to those of others."""
    named: dict[str, Any] = {} if quantizer == "kivi" else {"quantizer": quantizer}
    return specache(1, **named) if with_specache else kivi(1, **named)


def lines() -> list[Line]:
    """Top to bottom as in the paper, then the full cache."""
    found = [
        Line(
            (formula, "SpeCache" if with_specache else "KIVI"),
            method(quantizer, with_specache),
            extra=papers.TABLE5[quantizer == "kivi", with_specache],
        )
        for formula, quantizer in FORMULAS
        for with_specache in (False, True)
    ]
    return [*found, Line(("-", "full cache"), FULL, extra=("44.3", "37.0", "51.4"))]


def cells(scale: Scale) -> list[Cell]:
    """Both formulas, with and without SpeCache."""
    return scale.everywhere(line.method for line in lines())


def tables(scale: Scale, results: Results) -> list[Table]:
    """Ours with the paper's three tasks beside it."""
    extra = ("paper: Qasper", "2WikiMQA", "RB-P")
    return [grid("1-bit formulas, g = 64", ("formula", "method"), lines(), scale, results, extra)]


def draw(scale: Scale, results: Results, figure: Figure) -> None:
    """Two groups of bars."""
    axes = figure.subplots()
    series = {}
    for name, colour, with_specache in (("KIVI", style.ORANGE, False), ("SpeCache", style.BLUE, True)):
        averages = [results.over(scale, method(quantizer, with_specache)) for _, quantizer in FORMULAS]
        series[name] = (colour, [None if average is None else average.score for average in averages])
    style.bars(axes, [formula for formula, _ in FORMULAS], series)
    style.score_axis(axes)
    if (full := results.over(scale, FULL)) is not None:
        axes.axhline(full.score, color=style.BLACK, linestyle="--", linewidth=1, label="full cache")
    axes.set_title("1-bit codes by KIVI's formula and by SpeCache's")
    style.legend_below(figure, 3)


EXPERIMENT = Experiment(
    "table5",
    "At 1 bit KIVI's formula keeps only a group's smallest and largest value; the improved one keeps the midpoints of"
    " the two halves.",
    cells,
    tables,
    draw,
)
