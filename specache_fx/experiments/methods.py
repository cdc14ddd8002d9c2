"""The methods that experiments compare, with the papers' settings, and how they are called and coloured."""

from __future__ import annotations

from typing import Any

from specache_fx.eval.bench import Method
from specache_fx.experiments import style

GROUP_SIZE = 64
TOP_K = 64
FULL = Method.of("full")

# Evicting and page-selecting methods of kvpress, each an option "press" away.
PRESSES: dict[str, str] = {
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "tova": "TOVA",
    "streaming": "StreamingLLM",
}


def kivi(bits: int, group_size: int = GROUP_SIZE, **more: Any) -> Method:
    """KIVI as SpeCache §4.1 has it: 128 residual tokens, as much memory as SpeCache takes with its 64 prefetched."""
    return _sorted("kivi", bits=bits, group_size=group_size, **({"residual_length": 128} | more))


def specache(bits: int, group_size: int = GROUP_SIZE, **more: Any) -> Method:
    """SpeCache as its §4.1 has it: 64 residual tokens, 64 prefetched pairs, KIVI's codes, Algorithm 3 to the letter."""
    settings = {"residual_length": 64, "top_k": TOP_K, "quantizer": "kivi", "on_miss": "keep"} | more
    return _sorted("specache", bits=bits, group_size=group_size, **settings)


def kcache(num_values: int, layers: int) -> Method:
    """KCache: the values of `num_values` keys fetched for each query, those of the first `layers` layers whole.

    As in the paper no values stay on the device beside these: no window, and tokens are offloaded by fours.
    """
    return _sorted("kcache", top_k=num_values, resident_layers=layers, residual_length=0, group_size=4)


def press(name: str, **budget: Any) -> Method:
    """A press of kvpress; without a budget it is given the bytes of another method (`Cell.match`)."""
    return _sorted(f"press:{name}", **budget)


def quantized(backend: str, bits: int) -> Method:
    """Transformers' QuantizedCache, with groups and a window as KIVI's."""
    return _sorted("quantized", backend=backend, bits=bits, group_size=GROUP_SIZE, residual_length=128)


def _sorted(name: str, **options: Any) -> Method:
    # Equal methods have to be equal cells, whatever the order in which their options were given.
    return Method(name, tuple(sorted(options.items())))


def label(method: Method) -> str:
    """As tables call it: "SpeCache 1-bit"."""
    options = dict(method.options)
    name, _, variant = method.name.partition(":")
    match name:
        case "full":
            return "full cache"
        case "press":
            return PRESSES.get(variant, variant)
        case "kcache":
            return f"KCache N={options['top_k']} L={options['resident_layers']}"
        case "quantized":
            return f"{options['backend']} {options['bits']}-bit"
        case "offloaded":
            return "offloaded cache"
    return f"{'KIVI' if name == 'kivi' else 'SpeCache'} {options['bits']}-bit"


def look(method: Method) -> tuple[str, str]:
    """Colour and marker of a method's family."""
    name, _, variant = method.name.partition(":")
    if name == "press":
        colours = (style.RED, style.PURPLE, style.SKY, style.WINE)
        place = list(PRESSES).index(variant) if variant in PRESSES else len(colours) - 1
        return colours[place % len(colours)], "v^<>"[place % 4]
    return {
        "full": (style.BLACK, "*"),
        "kivi": (style.ORANGE, "s"),
        "specache": (style.BLUE, "o"),
        "kcache": (style.GREEN, "D"),
        "quantized": (style.GREY, "P"),
    }.get(name, (style.GREY, "X"))
