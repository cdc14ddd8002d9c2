"""SpeCache over each quantiser, with its real bits for each value. Paper: SpeCache §3.4; KVQuant in its reviews."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specache_fx.eval.bench import Method
from specache_fx.experiments import papers, style
from specache_fx.experiments.base import Experiment, Results, Scale, Table
from specache_fx.experiments.cell import Cell
from specache_fx.experiments.grid import Line, average_text, grid, number
from specache_fx.experiments.methods import FULL, kivi, specache
from specache_fx.runtime.quant import QUANTIZERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS = (2, 1)


def names(bits: int) -> list[str]:
    """Quantisers with codes of that width; Table 5 has KIVI's original formula, the real models have TurboQuant's."""
    apart = ("identity", "kivi-original", "turboquant")
    return [name for name, made in QUANTIZERS.items() if bits in made.valid_bits and name not in apart]


def method(bits: int, quantizer: str, with_specache: bool) -> Method:
    """`specache` has KIVI's codes unless told otherwise: for cells equal to those of others."""
    more: dict[str, Any] = {} if quantizer == "kivi" else {"quantizer": quantizer}
    return specache(bits, **more) if with_specache else kivi(bits, **more)


def cells(scale: Scale) -> list[Cell]:
    """Each quantiser at each width, with and without SpeCache, and the full cache."""
    runs = [method(bits, name, both) for bits in BITS for name in names(bits) for both in (False, True)]
    return scale.everywhere([FULL, *runs])


def tables(scale: Scale, results: Results) -> list[Table]:
    """A line a quantiser: SpeCache's scores, and that of the copy alone."""
    lines = [Line(("16", "full cache"), FULL, extra=("16.00", "-", "-"))]
    for bits in BITS:
        for name in names(bits):
            run = method(bits, name, True)
            average, alone = results.over(scale, run), results.over(scale, method(bits, name, False))
            real = number(average and average.stat("bits_per_value"))
            hits = number(average and average.stat("topk_hit_rate"))
            lines.append(Line((str(bits), name), run, extra=(real, average_text(alone), hits)))
    extra = ("real bits a value", "copy alone", "top-k prefetched")
    ours = grid("SpeCache over each quantiser, g = 64", ("bits", "quantiser"), lines, scale, results, extra)
    return [ours, papers.KVQUANT]


def draw(scale: Scale, results: Results, figure: Figure) -> None:
    """One panel a width, a group of bars for each quantiser."""
    panels = figure.subplots(1, len(BITS), sharey=True)
    full = results.over(scale, FULL)
    for axes, bits in zip(panels, BITS, strict=True):
        series = {}
        for name, colour, both in (("copy alone", style.ORANGE, False), ("SpeCache", style.BLUE, True)):
            averages = [results.over(scale, method(bits, quantizer, both)) for quantizer in names(bits)]
            series[name] = (colour, [average and average.score for average in averages])
        labels = []
        for name in names(bits):
            average = results.over(scale, method(bits, name, True))
            real = average and average.stat("bits_per_value")
            labels.append(name if real is None else f"{name}\n{real:.2f} bits")
        style.bars(axes, labels, series)
        style.score_axis(axes)
        axes.tick_params(axis="x", labelsize=7)
        if full is not None:
            axes.axhline(full.score, color=style.BLACK, linestyle="--", linewidth=1, label="full cache")
        axes.set_title(f"{bits}-bit codes, by quantiser and real bits a value")
    panels[1].set_ylabel("")
    style.legend_below(figure, 3)


EXPERIMENT = Experiment(
    "quantizers",
    "The low-bit copy made by each quantiser, with SpeCache and alone (128 residual tokens). Real bits a value count"
    " scales, zeros and tables, mean of keys and values.",
    cells,
    tables,
    draw,
)
