"""What to do about a speculative token that was wrong: keep the low-bit copy, or fetch and attend again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specache_fx.eval.bench import Method
from specache_fx.experiments import style
from specache_fx.experiments.base import Experiment, Results, Scale, Table
from specache_fx.experiments.cell import Cell
from specache_fx.experiments.grid import Line, grid, number
from specache_fx.experiments.methods import FULL, kivi, specache
from specache_fx.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS = (2, 1)
WAYS = {"KIVI": "nothing is fetched", "keep": "keep (the paper)", "refetch": "refetch"}


def method(bits: int, way: str) -> Method:
    """`specache` keeps unless told otherwise; its cells are those of the other experiments."""
    if way == "KIVI":
        return kivi(bits)
    named: dict[str, Any] = {} if way == "keep" else {"on_miss": way}
    return specache(bits, **named)


def cells(scale: Scale) -> list[Cell]:
    """Both ways at both widths, KIVI and the full cache."""
    return scale.everywhere([FULL, *(method(bits, way) for bits in BITS for way in WAYS)])


def tables(scale: Scale, results: Results) -> list[Table]:
    """Scores, how often the guess was right, and what the second fetch costs."""
    lines = [Line(("16", "full cache"), FULL, extra=("-",) * 6)]
    for bits in BITS:
        for way, what in WAYS.items():
            average = results.over(scale, method(bits, way))
            stat = (lambda name: None) if average is None else average.stat
            moved, steps, again = stat("prefetched_bytes"), stat("steps"), stat("refetched_steps")
            extra = (
                number(stat("exact_hit_rate")),
                number(stat("topk_hit_rate")),
                number(stat("attention_hit_rate"), ".3f"),
                number(again / steps if steps and again is not None else None),
                format_size(moved / steps) if steps and moved else "-",
                number(average and average.decode_ms, ".1f"),
            )
            lines.append(Line((str(bits), what), method(bits, way), extra=extra))
    extra = (
        "token right",
        "top-k prefetched",
        "attention mass",
        "steps run twice",
        "fetched a step",
        "ms a step",
    )
    return [grid("When the speculative token was wrong", ("bits", "then"), lines, scale, results, extra)]


def draw(scale: Scale, results: Results, figure: Figure) -> None:
    """Scores by width."""
    axes = figure.subplots()
    series = {}
    for (way, what), colour in zip(WAYS.items(), (style.ORANGE, style.SKY, style.BLUE), strict=True):
        averages = [results.over(scale, method(bits, way)) for bits in BITS]
        name = "KIVI" if way == "KIVI" else f"SpeCache, {what}"
        series[name] = (colour, [average and average.score for average in averages])
    style.bars(axes, [f"{bits}-bit" for bits in BITS], series)
    style.score_axis(axes)
    if (full := results.over(scale, FULL)) is not None:
        axes.axhline(full.score, color=style.BLACK, linestyle="--", linewidth=1, label="full cache")
    axes.set_title("Score by what is done when the speculative token was wrong")
    style.legend_below(figure, 2)


EXPERIMENT = Experiment(
    "refetch",
    'With `on_miss="refetch"` a step whose speculative token was wrong is run again with the pairs that the right'
    " token asks for. Times are of eager graphs.",
    cells,
    tables,
    draw,
)
