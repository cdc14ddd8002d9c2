"""How pictures look: one colour for each family of methods, colour-blind safe (Okabe and Ito)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
# Their yellow can't be seen on white; a dark red of Tol's and a grey are apart from the others too.
WINE, GREY = "#882255", "#777777"
COLOURS = (BLACK, BLUE, SKY, ORANGE, GREEN, GREY, WINE, RED, PURPLE)
FAMILIES = {"full": BLACK, "kivi": ORANGE, "specache": BLUE, "kcache": GREEN, "quantized": GREY}

_RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.dpi": 150,
}


@contextmanager
def figure() -> Iterator[Figure]:
    """An empty figure in this style, laid out so that labels don't overlap."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        drawn = Figure(layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn


def bars(axes: Axes, shown: Sequence[tuple[str, float, float, str]], title: str) -> None:
    """A bar a line, top to bottom: its name, score, standard error and method."""
    for place, (_, score, error, method) in enumerate(shown):
        colour = FAMILIES.get(method, RED)
        bar = axes.barh(place, score, 0.8, xerr=error, color=colour, error_kw={"ecolor": "#444444"})
        axes.bar_label(bar, [f"{score:.0f}"], fontsize=7, padding=3)
    axes.set_yticks(range(len(shown)), [name for name, *_ in shown])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("score (%), with device bytes as a share of the full cache's")
    axes.set_title(title)
