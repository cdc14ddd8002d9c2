"""The experiments that are tables of methods on tasks: each a title, lines, and columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

from specache_bench.experiments import papers, style
from specache_bench.experiments.base import (
    FULL,
    PRESSES,
    Average,
    Experiment,
    Line,
    Results,
    Scale,
    kcache,
    kivi,
    label,
    press,
    quantized,
    specache,
    stat,
)
from specache_bench.experiments.style import DASH
from specache_bench.records import Method
from specache_fx.runtime.quant import QUANTIZERS
from specache_fx.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS = (2, 1)
BOTH: tuple[tuple[str, Callable[..., Method]], ...] = (("KIVI", kivi), ("SpeCache", specache))


def _fetched(average: Average) -> str:
    moved, steps = average.stat("prefetched_bytes"), average.stat("steps")
    return format_size(moved / steps) if steps and moved else DASH


def _ms(average: Average) -> str:
    return f"{average.decode_ms:.1f}"


def coded(bits: int, quantizer: str, make: Callable[..., Method]) -> Method:
    """KIVI or SpeCache over a quantiser; KIVI's codes are not named: for jobs equal to those of others."""
    named: dict[str, Any] = {} if quantizer == "kivi" else {"quantizer": quantizer}
    return make(bits, **named)


def _table1(scale: Scale) -> list[Line]:
    found = [Line(("16", "-", "full cache"), FULL, extra=papers.TABLE1[16, 0, False])]
    for bits, group_size in product(BITS, (32, 64)):
        for name, make in BOTH:
            paper = papers.TABLE1[bits, group_size, name == "SpeCache"]
            found.append(Line((str(bits), str(group_size), name), make(bits, group_size), extra=paper))
    return found


TABLE1 = Experiment(
    "table1",
    "SpeCache Table 1: bits and group sizes, KIVI against SpeCache.",
    "KIVI keeps the low-bit copy alone, with 128 residual tokens; SpeCache keeps 64 and prefetches 64 pairs, so that"
    " both take the same device memory.",
    "Bits and group size, KIVI and SpeCache",
    ("bits", "group", "method"),
    _table1,
    extra=("Mistral-7B: KV size", "LongBench", "LLaMA-3-8B: KV size", "LongBench"),
    notes=(papers.RULER, papers.LLAMA31),
)


def _table2(scale: Scale) -> list[Line]:
    found = [Line(("full cache", ""), FULL)]
    of_transformers = (("quanto", 4), ("quanto", 2), ("hqq", 4), ("hqq", 2), ("hqq", 1))
    found += [Line((label(quantized(*one)), "transformers"), quantized(*one)) for one in of_transformers]
    for bits in BITS:
        like = specache(bits)
        found += [Line((label(kivi(bits)), ""), kivi(bits)), Line((label(like), ""), like)]
        if bits == 1 or not scale.quick:
            at = f"at {label(like)}'s bytes"
            found += [Line((name, at), press(key), like) for key, name in PRESSES.items()]
    return found


TABLE2 = Experiment(
    "table2",
    "SpeCache Table 2: methods at equal memory.",
    "Each press of kvpress is given as many tokens as fit into SpeCache's device bytes on the same prompts, or a token"
    " more. QuantizedCache is transformers' own, with groups of 64: it quantises the whole prompt, and keeps a"
    " window of 128 for what comes after.",
    "Methods at equal memory",
    ("method", ""),
    _table2,
    notes=(papers.TABLE2,),
)

LOOKAHEADS = {
    "token": "speculative token, a step ahead",
    "query": "output token's own scores, a step late",
    "none": "none: select, fetch, attend",
    "kivi": "nothing is fetched (KIVI)",
}


def _table4(scale: Scale) -> list[Line]:
    """Compiled for speed, and nothing counted on the way; a quick run doesn't spend its time compiling."""
    more: dict[str, Any] = {"track_hit_rates": False, "lowering": "eager" if scale.quick else "inductor"}
    lines = []
    for bits in BITS:
        paper = {"token": papers.TABLE4[bits, True], "none": papers.TABLE4[bits, False]}
        for way, text in LOOKAHEADS.items():
            method = kivi(bits, **more) if way == "kivi" else specache(bits, lookahead=way, **more)
            lines.append(Line((str(bits), text), method, extra=(_ms, *paper.get(way, (DASH, DASH)))))
    return lines


TABLE4 = Experiment(
    "table4",
    "SpeCache Table 4: speculative prefetch or not, accuracy and step time.",
    "What chooses the pairs of a step. Times are medians of a decode step of 8 prompts at once; on a CPU the host and"
    " the device share one memory, so that fetching costs little.",
    "When pairs are fetched, g = 64, Inductor",
    ("bits", "prefetch"),
    _table4,
    extra=("ms a step", "paper: LongBench", "paper: ms a step"),
    notes=(papers.LATENCY,),
)

FORMULAS = (("original (eq. 2)", "kivi-original"), ("improved (eq. 3)", "kivi"))


def _table5(scale: Scale) -> list[Line]:
    found = [
        Line(
            (text, name),
            coded(1, quantizer, make),
            extra=papers.TABLE5[quantizer == "kivi", name == "SpeCache"],
        )
        for text, quantizer in FORMULAS
        for name, make in BOTH
    ]
    return [*found, Line(("-", "full cache"), FULL, extra=("44.3", "37.0", "51.4"))]


TABLE5 = Experiment(
    "table5",
    "SpeCache Table 5: the original 1-bit formula and the improved one.",
    "At 1 bit KIVI's formula keeps only a group's smallest and largest value; the improved one keeps the midpoints of"
    " the two halves.",
    "1-bit formulas, g = 64",
    ("formula", "method"),
    _table5,
    extra=("paper: Qasper", "2WikiMQA", "RB-P"),
)


def prefetching(k: int) -> Method:
    """K = 0 is KIVI with the same window, so that k alone differs."""
    return specache(1, 32, top_k=k) if k else kivi(1, 32, residual_length=64)


def _figure5(scale: Scale) -> list[Line]:
    def moved(average: Average) -> str:
        return DASH if average.stat("prefetched_bytes") is None else _fetched(average).replace(DASH, "0 B")

    numbers = (0, 16, 64) if scale.quick else (0, 4, 8, 16, 32, 64, 128, 256)
    lines = [Line((f"k = {k}",), prefetching(k), extra=(stat("topk_hit_rate"), moved)) for k in numbers]
    return [Line(("full cache",), FULL, extra=("-", "-")), *lines]


FIGURE5 = Experiment(
    "figure5",
    "SpeCache Figure 5: how many pairs are prefetched (k).",
    "1-bit SpeCache with groups of 32 by the number of pairs that are prefetched. The paper finds k = 16 far above the"
    " low-bit copy alone (k = 0), and more with larger k.",
    "Pairs prefetched, 1 bit, g = 32",
    ("k",),
    _figure5,
    extra=("top-k prefetched", "fetched a step"),
)


def _kcache(scale: Scale) -> list[Line]:
    shapes = product((32, 128), (0, 1)) if scale.quick else product((32, 64, 128), (0, 1, 2, 3))
    lines = [Line((str(n), str(l)), kcache(n, l), extra=papers.KCACHE[n, l]) for n, l in shapes]
    return [Line(("full cache", "-"), FULL, extra=papers.KCACHE[0, 0]), *lines]


KCACHE = Experiment(
    "kcache",
    "KCache Table 2: values fetched (N), layers kept whole (L).",
    "Keys stay on the device at 16 bits; of the values, those of the N largest weights of the exact softmax are fetched"
    " in the same step, and the weights are not made to add up to 1 again. The first L layers stay whole.",
    "KCache, N values fetched, L layers whole",
    ("N", "L"),
    _kcache,
    extra=("LLaMA2-7B: BBH", "GSM8K", "TriviaQA", "LLaMA3-8B: BBH", "GSM8K", "TriviaQA"),
)


_COMPARED = ("kivi", "nuq", "rotated", "zipcache")


def _quantizers(scale: Scale) -> list[Line]:
    """Table 5 has KIVI's original formula, the real models have TurboQuant's."""
    lines = [Line(("16", "full cache"), FULL, extra=("16.00", "-", "-"))]
    for bits in BITS:
        for name in (name for name in _COMPARED if bits in QUANTIZERS[name].valid_bits):
            extra = (stat("bits_per_value"), coded(bits, name, kivi), stat("topk_hit_rate"))
            lines.append(Line((str(bits), name), coded(bits, name, specache), extra=extra))
    return lines


QUANTIZERS_TABLE = Experiment(
    "quantizers",
    "SpeCache over each quantiser, with real bits for each value.",
    "The low-bit copy made by each quantiser, with SpeCache and alone (128 residual tokens). Real bits a value count"
    " scales, zeros and tables, mean of keys and values.",
    "SpeCache over each quantiser, g = 64",
    ("bits", "quantiser"),
    _quantizers,
    extra=("real bits a value", "copy alone", "top-k prefetched"),
    notes=(papers.KVQUANT,),
)


def _pareto(scale: Scale) -> list[Line]:
    few = scale.quick
    ours = {
        "full cache": [FULL],
        "SpeCache": [specache(bits) for bits in ((1, 2) if few else (1, 2, 4))],
        "SpeCache, refetch": [specache(bits, on_miss="refetch") for bits in (() if few else (1, 2, 4))],
        "KIVI": [kivi(bits) for bits in ((1, 2) if few else (1, 2, 4, 8))],
        "KCache, N = 128": [kcache(128, layers) for layers in ((0,) if few else (0, 1, 2))],
        "quanto": [quantized("quanto", bits) for bits in (2, 4)],
        "hqq": [quantized("hqq", bits) for bits in ((2,) if few else (1, 2, 4, 8))],
    }
    lines = [Line((name, label(method)), method) for name, methods in ours.items() for method in methods]
    for key, name in PRESSES.items():
        for like in (specache(bits) for bits in ((1,) if few else (1, 2, 4))):
            lines.append(Line((name, f"{name} at {label(like)}'s bytes"), press(key), like))
    return lines


def _draw_pareto(results: Results, figure: Figure) -> None:
    """A line a family; device bytes on a logarithmic axis."""
    axes, families = figure.subplots(), dict[str, list[Average]]()
    for line in _pareto(results.scale):
        if (average := results.over(line.method, line.match)) is not None:
            families.setdefault(line.labels[0], []).append(average)
    for number, (name, averages) in enumerate(families.items()):
        averages.sort(key=lambda average: average.ratio)
        colour = style.COLOURS[number % len(style.COLOURS)]
        axes.errorbar(
            [average.ratio for average in averages],
            [average.score for average in averages],
            [average.error for average in averages],
            color=colour,
            marker="*osDPXv^<>d"[number],
            linestyle="--" if number >= len(style.COLOURS) else "-",
            elinewidth=0.7,
            label=name,
        )
    least = 0.9 * min((averages[0].ratio for averages in families.values()), default=0.1)
    axes.set_xscale("log")
    axes.set_xlim(least, 1.1)
    shown = [tick for tick in (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0) if tick >= least]
    axes.set_xticks(shown, [f"{tick:g}x" for tick in shown])
    axes.minorticks_off()
    axes.set_xlabel("KV bytes on the device, as a share of the full cache's")
    style.score_axis(axes)
    axes.set_title("Accuracy against device bytes")
    style.legend_below(figure, 4)


PARETO = Experiment(
    "pareto",
    "Accuracy against device bytes, for every method.",
    "Every method at several sizes; up and to the left is better. Bytes are counted on the tensors at the end of"
    " generation, residual windows and prefetched pairs included.",
    "Accuracy and device bytes",
    ("family", "method"),
    _pareto,
    by_size=True,
    draw=_draw_pareto,
)

WAYS = {"KIVI": "nothing is fetched", "keep": "keep (the paper)", "refetch": "refetch"}


def _refetch(scale: Scale) -> list[Line]:
    def twice(average: Average) -> str:
        steps, again = average.stat("steps"), average.stat("refetched_steps")
        return DASH if not steps or again is None else f"{again / steps:.2f}"

    rates = (stat("exact_hit_rate"), stat("topk_hit_rate"), stat("attention_hit_rate", ".3f"))
    lines = [Line(("16", "full cache"), FULL, extra=("-",) * 6)]
    for bits in BITS:
        # `specache` keeps unless told otherwise; its jobs are those of the other experiments.
        methods = (kivi(bits), specache(bits), specache(bits, on_miss="refetch"))
        for text, method in zip(WAYS.values(), methods, strict=True):
            lines.append(Line((str(bits), text), method, extra=(*rates, twice, _fetched, _ms)))
    return lines


REFETCH = Experiment(
    "refetch",
    "When the speculative token was wrong: keep its pairs, or refetch.",
    'With `on_miss="refetch"` a step whose speculative token was wrong is run again with the pairs that the right'
    " token asks for. Times are of eager graphs.",
    "When the speculative token was wrong",
    ("bits", "then"),
    _refetch,
    extra=(
        "token right",
        "top-k prefetched",
        "attention mass",
        "steps run twice",
        "fetched a step",
        "ms a step",
    ),
)
