"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re

from specache_fx.errors import ConfigError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """Read a size such as "40GiB", "512 MB" or "1073741824" as bytes.

    Raises:
        ConfigError: If it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(
            f"{text!r} is not a size: give bytes, or a number with a unit, such as 40GiB or 512MB."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(num_bytes: float) -> str:
    """Bytes with a binary unit, three digits or more: "16.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
