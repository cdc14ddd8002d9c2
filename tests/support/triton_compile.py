"""Compile Triton kernels of the package for GPUs, without one: `python triton_compile.py [usual|llama|forms|others]`.

Run as a process of its own, where Triton doesn't interpret. Launches are caught and their kernels compiled down to
machine code for the given targets: what types, shared memory and registers can't do is found here, and speed is not.
A line of JSON a kernel and config says what it takes. `llama` is Llama-3.1-8B's shape, every config.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from support.decode_case import CaseShape, DecodeCase
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.kernels import KERNELS
from specache_fx.runtime.kernels.triton.kernel import TritonKernel
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.quant import on_gpu
from specache_fx.runtime.select import triton_topk
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.steps.triton_steps import TritonSteps
from specache_fx.runtime.transfer import KernelTransfer

CPU = torch.device("cpu")
TARGETS = tuple(int(word) for word in sys.argv[1:] if word.isdigit()) or (80, 90)
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
LLAMA = CaseShape(
    batch=1,
    num_kv_heads=8,
    num_kv_groups=4,
    key_dim=128,
    value_dim=128,
    group_size=64,
    groups=2,
    top_k=64,
    dtype=torch.bfloat16,
)


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


def compile_launch(
    kernel: triton.JITFunction[Any], arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    """What a launch with these arguments would compile."""
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(at,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(at,)] = [["tt.divisibility", 16]]
    for capability in TARGETS:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found = {
            "kernel": kernel.__name__,
            "sm": capability,
            "bits": arguments.get("BITS"),
            "centred": arguments.get("CENTRED"),
            "block": arguments.get("BLOCK_N"),
            "options": {name: value for name, value in options.items() if name != "num_ctas"},
            "shared": compiled.metadata.shared,
            # Loads that the compiler starts an iteration ahead.
            "async_copies": len(re.findall("ttg.async_copy_global_to_local", compiled.asm["ttgir"])),
        }
        cubin = compiled.asm["cubin"]
        found |= resources(cubin) | loops(cubin, compiled.metadata.num_warps, arguments)
        print(json.dumps(found), flush=True)  # noqa: T201


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of what did not fit into them; nothing where the wheel has no cuobjdump."""
    if not CUOBJDUMP.exists():
        return {}
    said = dumped(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local}


def loops(cubin: bytes, warps: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of kernels that read codes: the loop over them, and loads of the loop over 16-bit rows by bytes a thread.

    `for_64_tokens` is what four warps execute for 64 tokens, divided by four.
    """
    if "BLOCK_N" not in arguments or not arguments["HAS_CODES"] or not CUOBJDUMP.exists():
        return {}
    found = product_loops(instructions(cubin))
    if not found:  # of float32: written out
        return {}
    codes, *rows = found
    counts = by_class(codes)
    parts = arguments["PARTS"]
    return {
        "loop": counts,
        "for_64_tokens": counts["all"] * warps * 64 / (arguments["BLOCK_N"] * parts) / 4,
        "code_loads": global_loads(codes),
        "row_loads": [global_loads(body) for body in rows],
    }


def dumped(cubin: bytes, option: str) -> str:
    """What cuobjdump says of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True)
    return said.stdout + said.stderr


def instructions(cubin: bytes) -> list[Instruction]:
    """Of all kernels in a file of machine code."""
    said = dumped(cubin, "-sass")
    return [(int(at, 16), opcode, rest) for at, opcode, rest in _INSTRUCTION.findall(said)]


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


def catch_launches(most: int | None) -> None:
    """Compile instead of launching; of what is tuned `most` configs that fit, the largest first, or every one."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        options = {name: given.pop(name) for name in list(given) if name not in self.arg_names}
        compile_launch(self, given, options)

    def run_tuned(self: Any, *args: Any, **kwargs: Any) -> None:
        named = {name: value for name, value in kwargs.items() if name in self.arg_names}
        for config in self.early_config_prune(self.configs, named, **kwargs)[:most]:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    triton.runtime.JITFunction.run = run
    triton.runtime.Autotuner.run = run_tuned


def usual() -> None:
    """The kernels of a decode step with the default options at the shape of Llama-3.1-8B, without masks; a config."""
    shape = replace(LLAMA, bits=2, quantizer="turboquant", forms=frozenset())
    _whole_step(shape, reads_masks=False)
    _copy_and_select(128, torch.bfloat16)


def llama() -> None:
    """A decode step's kernels as Llama-3.1-8B needs them, in both forms of codes, with masks and without."""
    for bits, quantizer, forms in ((2, "turboquant", ()), (1, "turboquant", ("mask",)), (2, "kivi", ())):
        shape = replace(LLAMA, bits=bits, quantizer=quantizer, forms=frozenset(forms))
        TritonKernel().attention(DecodeCase(shape).inputs(CPU))
        for reads_masks in (False, True):
            _whole_step(shape, reads_masks)
    _copy_and_select(128, torch.bfloat16)


def _whole_step(shape: CaseShape, reads_masks: bool) -> None:
    """The launches of `TritonSteps`, which read lengths from the device's memory."""
    config = SpecacheConfig(bits=shape.bits, quantizer=shape.quantizer, lookahead="token")
    heads, dim = shape.num_kv_heads, shape.key_dim
    session = Session(config, (LayerShape(heads, dim, dim),), shape.dtype, CPU)
    session.kernel = KERNELS["triton"]
    pair = torch.randn(1, heads, 200, dim, dtype=shape.dtype)
    mask = torch.ones(1, 1, 202, dtype=torch.bool)
    mask[..., : 3 * ("mask" in shape.forms)] = False
    session.store(0, pair, pair, mask[..., :200])
    session.advance(200, decoded=False)
    assert isinstance(session.steps, TritonSteps)
    query = torch.randn(2, 1, heads * shape.num_kv_groups, 1, dim, dtype=shape.dtype)
    own = torch.randn(2, 1, heads, 1, dim, dtype=shape.dtype)
    seen = {0: mask[:, None, 0].expand(2, 1, -1)} if reads_masks else {}
    with DecodeStep(session, fused_layers=(0,), seen=seen, shares=torch.full((1,), 0.8)).running():
        session.steps.launch(0, query, own, own, 0.088)
    session.close()


def forms() -> None:
    """Decode attention in the other forms that differ in code."""
    small = replace(LLAMA, num_kv_heads=2)
    every = frozenset(("mask", "visible", "bias", "softcap", "sinks"))
    half = {"dtype": torch.float16}
    shapes = (
        replace(small, bits=1, quantizer="kivi", **half),
        replace(small, bits=4, num_kv_groups=40, key_dim=192, value_dim=256),
        replace(small, top_k=2048),
        CaseShape(num_kv_groups=3, key_dim=20, value_dim=80, group_size=8, forms=every, **half),
        CaseShape(num_kv_groups=3, key_dim=80, value_dim=80, bits=8),
    )
    for shape in shapes:
        TritonKernel().attention(DecodeCase(shape).inputs(CPU))


def others() -> None:
    """Packing; selection and gathering of other forms."""
    x = torch.randn(1, 2, 128, 128)
    for bits, dtype in ((2, torch.bfloat16), (1, torch.float16), (8, torch.float32)):
        on_gpu.pack_keys(x.to(dtype), None, bits, 64)
        on_gpu.pack_values(x.to(dtype), bits, 64)
    _copy_and_select(9, torch.bfloat16)


def _copy_and_select(dim: int, dtype: torch.dtype) -> None:
    host = HostCache(1, [(2, dim, dim)], dtype)
    host.append(0, *(torch.zeros(1, 2, 100, dim, dtype=dtype) for _ in range(2)))
    KernelTransfer(host, 64, CPU).copy(0)
    staged = torch.zeros(1, 2, 64, dtype=torch.int32)
    triton_topk.count_overlap(torch.rand(1, 2, 5000), 64, staged, torch.zeros(1, 4, dtype=torch.float64))


if __name__ == "__main__":
    catch_launches(1 if "usual" in sys.argv else None)
    for part in (usual, llama, forms, others):
        if part.__name__ in sys.argv or not any(word.isalpha() for word in sys.argv[1:]):
            part()
