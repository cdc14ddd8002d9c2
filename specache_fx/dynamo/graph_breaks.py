"""Breaks of Dynamo's graphs: where they are, why, and what they cost the attention behind them.

Dynamo compiles the code before a break and the code behind it apart. Where it can't go on behind a break, in a loop for
one, the rest of the frame or the whole of it runs uncompiled, and what it calls is compiled by itself. No backend gets
an attention that stands in such a frame.
"""

from __future__ import annotations

import dis
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import Unsupported, UserError
from torch.fx import GraphModule

from specache_fx.calls.this_thread import here
from specache_fx.capture.graph.left_alone import BREAKS, LEAVE
from specache_fx.capture.positions.lanes import NO_LOGITS, NO_TOKENS
from specache_fx.capture.program import Decoding, Program
from specache_fx.errors import UnsupportedGraphError
from specache_fx.resets import on_reset

_RESUMED = re.compile(r"torch_dynamo_resume_in_.*_at_(\d+)$")
_PLACE = re.compile(r"(.+?):(\d+): ")
_REST_RUNS_UNCOMPILED = "step_unsupported"  # Dynamo's reason for a graph behind which it doesn't go on
_LIMIT = "recompile limit exceeded"  # Dynamo's words
_ATTENTIONS = {"scaled_dot_product_attention", "flex_attention"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}
_APPENDS = {
    "cat", "concat", "concatenate", "index_copy_", "index_copy", "index_put_", "scatter_", "copy_", "STORE_SUBSCR",
    "STORE_SLICE",
}  # fmt: skip
Place = tuple[str, int]
"""File and line."""


@dataclass(frozen=True)
class Break:
    """A break.

    Attributes:
        source: The model's line, "file:line: code"; "" where it is not known.
        reason: Dynamo's.
    """

    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source or 'A line that Dynamo does not name'} breaks the graph ({self.reason})"

    @property
    def remedy(self) -> str:
        """What to do about it, or else."""
        return f"{self.cure} {LEAVE}."

    @property
    def cure(self) -> str:
        """What to do about it."""
        if "Tensor.item()" in self.reason:
            return (
                "Python needs the number of a tensor there. Take that out of the compiled code. If it is the position"
                " of a write, use buffer.index_copy_(dim, positions, tokens), or pass the position as an int."
            )
        return "Take that out of the compiled code."


class Around(NamedTuple):
    """Where a graph was broken off.

    Attributes:
        found: The break before it, else the one around it, else the one behind it. One around it counts where its
            frame attends or keeps a cache. None of a graph that is whole.
        caller: The break of the innermost frame that calls it.
        uncompiled: What to say of the rest of its frame, where that runs uncompiled and attends.
    """

    found: Break | None = None
    caller: Break | None = None
    uncompiled: str | None = None


@dataclass(frozen=True)
class _Uncompiled:
    """A frame that runs uncompiled, or the rest of one.

    Attributes:
        found: Why.
        message: What to say of it.
        attends: Whether it attends by itself, not in what it calls.
        keeps: Whether it appends to a tensor or writes into one, as a cache is kept.
    """

    found: Break
    message: str
    attends: bool
    keeps: bool


_breaks: dict[Place, Break] = {}  # by the line that the code behind goes on at, and by the code's first line
_frames: dict[Place, _Uncompiled] = {}  # by the first line of the code
_attentions: set[Place] = set()  # that were rewritten


for _each in (_breaks, _frames, _attentions):
    on_reset(_each.clear)


def note(code: CodeType, line: int, error: Exception) -> None:
    """Note a break.

    Args:
        code: The traced frame's.
        line: The line that breaks, or calls what does.
        error: Dynamo's.
    """
    _breaks[code.co_filename, line] = _breaks[_first_line(code)] = _break(error)


def around(gm: GraphModule) -> Around:
    """Where a graph that is compiled now was broken off."""
    if (traced := here.frame) is None:
        return Around()
    code: CodeType = traced.f_code
    resumed = _RESUMED.match(code.co_name)
    before = _breaks.get((code.co_filename, int(resumed[1]))) if resumed else None
    callers = list(_callers())
    before = before or next((each.found for each in callers if each.attends or each.keeps), None)
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    ended = _breaks.get(_first_line(code)) if reason is not None and reason.graph_break else None
    message = None
    if ended is not None and reason.reason == _REST_RUNS_UNCOMPILED:
        message = _uncompiled(traced, ended, reason.user_stack[0].lineno)
    return Around(before or ended, callers[0].found if callers else None, message)


def _callers() -> Iterator[_Uncompiled]:
    """The frames around that run uncompiled, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (found := _frames.get(_first_line(frame.f_code))) is not None:
            yield found
        frame = frame.f_back


def named(program: Program, piece: Around) -> Program:
    """The findings on a graph, with the break that its refusals suspect, and the one that leaves it one lane."""
    remedy = None if piece.found is None else f"{piece.found}. {piece.found.remedy}"
    refusals = tuple(
        replace(each, remedy=remedy) if remedy and each.remedy == BREAKS else each
        for each in program.refusals
    )
    return replace(program, refusals=refusals, decoding=_named_lane(program, piece))


def _named_lane(program: Program, piece: Around) -> Decoding | None:
    """The findings on a step, with a break as the first reason for one lane, where it lacks tokens or logits."""
    decoding, found = program.decoding, piece.found or piece.caller
    if decoding is None or decoding.single_lane is None or found is None:
        return decoding
    if program.token is None:
        lacks, needs = "takes no token ids", "have the whole take token ids"
    elif decoding.logits is None:
        lacks, needs = "returns no logits", "have the whole return logits"
    else:
        return decoding
    # A caller's break may be another matter: the call may be whole, and lack them by itself.
    needed = "" if piece.found is not None else f", and {needs}"
    reason = f"{found}, and this piece {lacks}. {found.cure.rstrip('.')}{needed}"
    if decoding.single_lane not in (NO_TOKENS, NO_LOGITS):
        reason = f"{reason}. Besides, {decoding.single_lane}"
    return replace(decoding, single_lane=reason)


def note_rewritten(program: Program) -> None:
    """Note the lines of attention that is rewritten."""
    found = (_PLACE.match(site.source) for site in program.sites)
    _attentions.update((each[1], int(each[2])) if each else ("", 0) for each in found)


def has_rewritten() -> bool:
    """Whether an attention was rewritten: before that there are no handles."""
    return bool(_attentions)


def given_up(frame: Any, error: Exception) -> str | None:
    """What to say of a frame that Dynamo skips; None for one without attention over a cache.

    Args:
        frame: What Dynamo has of it: `f_code` and `f_globals`.
        error: Dynamo's.

    Raises:
        UnsupportedGraphError: If Dynamo compiles the frame's code no more.
    """
    if not isinstance(error, (Unsupported, UserError)) and not torch._dynamo.config.suppress_errors:
        return None  # the caller gets the error
    if _attentions and _LIMIT in str(error):
        code: CodeType = frame.f_code
        raise UnsupportedGraphError(
            f"The code of this model, `{code.co_qualname}`, has been compiled as often as Dynamo allows"
            " (torch._dynamo.config.accumulated_recompile_limit, or torch.compile(recompile_limit=...)). It would run"
            " uncompiled from now on, without specache. Call torch._dynamo.reset() and begin with the prompt."
            " TORCH_LOGS=recompiles shows why it is compiled so often. If a module counts its tokens in an int of its"
            " own, each turn compiles anew: set torch._dynamo.config.allow_unspec_int_on_nn_module = True."
        ) from error
    return _uncompiled(frame, _break(error))


def _uncompiled(traced: Any, found: Break, line: int = 0) -> str | None:
    """What to say of a frame that runs uncompiled from a line on.

    Attention may stand in one such frame, and what it caches be kept by another: one that it is called by, or calls.
    """
    code: CodeType = traced.f_code
    rest = _from(code, line)
    names = _names(rest, traced.f_globals)
    attends = bool(names & _ATTENTIONS) or ("softmax" in names and bool(names & _PRODUCTS))
    lines = set(map(_line_of, rest))
    was = any(file == code.co_filename and each in lines for file, each in _attentions)
    before = " Attention in it was rewritten before, and no longer is." if was else ""
    message = (
        f"`{code.co_qualname}` ({code.co_filename}:{line or code.co_firstlineno}) runs uncompiled from now on, its"
        f" attention too. {found}.{before} {found.remedy}"
    )
    here = _frames[_first_line(code)] = _Uncompiled(found, message, attends, bool(names & _APPENDS))
    running = [here, *_callers()]
    if was:
        return message
    attending = next((each.message for each in running if each.attends), None)
    return attending if any(each.keeps for each in running) else None


def _from(code: CodeType, line: int) -> list[dis.Instruction]:
    """The instructions from a line on, or from the start of the loop around it."""
    found = list(dis.get_instructions(code))
    start = next((i for i, each in enumerate(found) if (_line_of(each) or 0) >= line), 0)
    jumps = (each.argval for each in found[start:] if each.opname.startswith("JUMP_BACKWARD"))
    first = min([found[start].offset, *jumps])
    return [each for each in found if each.offset >= first]


def _line_of(instruction: dis.Instruction) -> int | None:
    return None if instruction.positions is None else instruction.positions.lineno


def _names(instructions: Iterable[dis.Instruction], variables: Mapping[str, Any]) -> set[str]:
    """What instructions do, and the names that they use: of functions in global variables their own."""
    used = {name for each in instructions for name in (each.opname, each.argrepr, str(each.argval))}
    values = (variables[name] for name in used & variables.keys())
    return used | {str(getattr(value, "__name__", "")) for value in values}


def _first_line(code: CodeType) -> Place:
    return code.co_filename, code.co_firstlineno


def _break(error: Exception) -> Break:
    stack = getattr(error, "real_stack", None)
    lines = [line.strip() for line in str(getattr(error, "msg", None) or error).splitlines()]
    texts = [line.removeprefix("Explanation:").strip().rstrip(".") for line in lines if line][:2]
    return Break(_shown(stack[-1]) if stack else "", ": ".join(line for line in texts if line))


def _shown(place: traceback.FrameSummary) -> str:
    code = place.line or linecache.getline(place.filename, place.lineno or 0).strip()
    return f"{place.filename}:{place.lineno}: {code}"
