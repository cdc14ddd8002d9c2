"""Keeps Dynamo from giving a model up.

Dynamo compiles a function for a limited number of shapes and ways of being called, and runs it uncompiled from then on
(`torch/_dynamo/cache_size.py`). That is slow for other models and wrong for ours: an uncompiled attention reads the
handles of the KV cache as numbers, and the logits are NaN. No backend is asked at that point, so the limit has to be
raised in the compile before.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import FrameType
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._guards import CompileContext

from specache_fx._log import warn_once
from specache_fx.errors import UnsupportedGraphError

logger = logging.getLogger(__name__)

_LIMIT = "recompile_limit"
_ACCUMULATED = "accumulated_recompile_limit"
_MANY = 64  # graphs of one function, of which somebody should know
_raised: dict[int, int] = {}  # the limit that was found, and to what it was raised last
_rewritten = threading.Event()  # whether a graph was: before that, no uncompiled code can meet a handle


def make_room(*, rewrites: bool = False) -> None:
    """Raise Dynamo's recompile limit once compiles have used up half of it. Called for every graph of this backend.

    Until one is rewritten, the limit holds as for any backend: a model that is left alone and counts its tokens in an
    int would else be compiled for each of them, up to the error.

    The other half is for compiles of the same code by other backends, which do not come here. Dynamo compares the limit
    with the number of kept versions. The compile's number, which is known here, is at least that. A limit of the
    region's own, `torch.compile(..., recompile_limit=...)` of torch 2.12 and later, is raised likewise.

    Args:
        rewrites: The graph is rewritten.

    Raises:
        UnsupportedGraphError: At `accumulated_recompile_limit`, Dynamo's stop for a function that is compiled without
            end. So is every later compile of the function, until Dynamo is reset.
    """
    if rewrites:
        _rewritten.set()
    compile_id = CompileContext.current_compile_id()
    if not _rewritten.is_set() or compile_id is None or compile_id.frame_compile_id is None:
        return
    count = compile_id.frame_compile_id + 1
    config: Any = torch._dynamo.config
    accumulated = config.accumulated_recompile_limit
    if count >= accumulated:
        _raise_to(_ACCUMULATED, count + 1)  # just so that the next compile comes here as well
        raise UnsupportedGraphError(
            f"The code of this model has been compiled {count} times, which is as often as Dynamo allows"
            f" (torch._dynamo.config.{_ACCUMULATED}); it would run uncompiled from now on, and take the handles of the"
            " KV cache for numbers. Call torch._dynamo.reset() and begin with the prompt. TORCH_LOGS=recompiles shows"
            " why it is compiled so often."
        )
    if count >= _MANY:
        warn_once(
            logger,
            f"specache: the code of this model has been compiled {count} times, for different models, shapes and ways"
            " of generating. TORCH_LOGS=recompiles shows why. If a module counts its tokens in an int of its own, each"
            " turn compiles anew: set torch._dynamo.config.allow_unspec_int_on_nn_module = True.",
            key="many graphs",
        )
    limit = config.recompile_limit
    if 2 * count <= limit:
        return
    if limit not in _raised.values():  # not ours: the user's, or Dynamo's own
        _raised.clear()
    allowed = next(iter(_raised), limit)
    raised = max(2 * limit, 2 * count)
    region = _region()
    if region is not None:
        region._recompile_limit = raised
        name = "torch.compile(recompile_limit=...)"
    else:
        _raise_to(_LIMIT, raised)
        _raised[allowed] = raised
        name = f"torch._dynamo.config.{_LIMIT}"
    if count >= allowed:
        logger.info(
            "specache: raised %s to %d, %d graphs so far. TORCH_LOGS=recompiles shows why.",
            name,
            raised,
            count,
        )


def _raise_to(name: str, value: int) -> None:
    """Set one of Dynamo's limits for all threads.

    What a thread sets holds for that thread alone (torch 2.12 and later), while compiled versions are shared: another
    thread, with the limit as it was, would give the model up. So the default moves, and what this thread has set only
    where that is lower.
    """
    config: Any = torch._dynamo.config
    entry = config._config[name]
    entry.default = max(entry.default, value)
    if getattr(config, name) < value:
        setattr(config, name, value)


def _region() -> Any | None:
    """The converter of the compile at hand, where its `torch.compile` call has a limit of its own."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, ConvertFrameAssert):
            return owner if getattr(owner, "_recompile_limit", None) is not None else None
        frame = frame.f_back
    return None
