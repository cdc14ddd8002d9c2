"""`quiet`: a terminal for the progress bar alone."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from transformers.utils import logging as transformers_logging

from specache_fx.report.progress import muted

_CHATTY = ("transformers", "torchao", "torch", "huggingface_hub")


@contextlib.contextmanager
def quiet(threads: int | None = None) -> Iterator[None]:
    """Keep other packages' notices, and compile messages, out of the progress bar.

    Errors, and this package's own warnings, are shown.

    Args:
        threads: CPU threads meanwhile; torch's choice by default.
    """
    with contextlib.ExitStack() as stack:
        for logger in map(logging.getLogger, _CHATTY):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if transformers_logging.is_progress_bar_enabled():
            stack.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads or torch.get_num_threads())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(muted())
        for module in _CHATTY:
            warnings.filterwarnings("ignore", module=module)
        yield
