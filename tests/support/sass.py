"""Machine code of compiled kernels: what a warp executes in a loop with products, by class.

A warp's scheduler issues one instruction a cycle at most, so that their number bounds the time of a loop from below.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE)
# The first that fits; what fits nowhere is "other".
_CLASSES = {
    "MMA": "HMMA",
    "loads": "LDG|LDGSTS|LDGDEPBAR|DEPBAR|STG",
    "shared": "LDS|LDSM|STS|STSM|BAR|SHFL|REDUX",
    "conversions": "I2F|F2F|F2I|F2FP|I2FP",
    "floats": r"F(ADD|MUL|FMA|MNMX|SEL|SETP)\w*|MUFU|H(ADD|MUL|FMA|MNMX)2",
    "integers": r"P?LOP3|SHF|PRMT|I\w+|LEA|SEL|VI\w+|BMSK|SGXT|R2P|P2R|U\w+",
}

Instruction = tuple[int, str, str]
"""Address, opcode, operands."""


def instructions(cubin: bytes) -> list[Instruction]:
    """Of all kernels in a file of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True)
    return [(int(at, 16), opcode, rest) for at, opcode, rest in _INSTRUCTION.findall(said.stdout)]


def product_loops(code: list[Instruction]) -> list[list[str]]:
    """Opcodes of each loop with products, from a backward branch's target to the branch; most logic first.

    Codes are unpacked by logic, so that the first is the loop over codes where there is one.
    """
    loops = []
    for at, opcode, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if opcode.startswith("BRA") and target is not None and int(target[1], 16) < at:
            body = [name for where, name, _ in code if int(target[1], 16) <= where <= at]
            if any("MMA" in name for name in body):
                loops.append(body)
    return sorted(loops, key=lambda body: -sum(name.startswith(("LOP3", "SHF")) for name in body))


def by_class(opcodes: list[str]) -> dict[str, int]:
    """How many there are of each class, and "all"."""
    counts = Counter(_class_of(name.split(".", maxsplit=1)[0]) for name in opcodes)
    return {"all": len(opcodes), **{name: counts[name] for name in (*_CLASSES, "other")}}


def _class_of(name: str) -> str:
    return next((each for each, pattern in _CLASSES.items() if re.fullmatch(pattern, name)), "other")


def global_loads(opcodes: list[str]) -> dict[str, int]:
    """Loads from global memory, by bytes a thread."""
    widths = Counter()
    for name in opcodes:
        if re.match(r"LDG(STS)?\.", name):
            bits = re.search(r"\.(?:[US])?(8|16|64|128)\b", name)
            widths[int(bits[1]) // 8 if bits else 4] += 1
    return {str(width): widths[width] for width in sorted(widths)}
