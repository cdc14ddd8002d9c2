"""`quiet`: a terminal for the progress bar alone."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from transformers.utils import logging as transformers_logging

from specache_fx.progress import muted

_CHATTY = ("transformers", "torchao", "torch", "huggingface_hub")


@contextlib.contextmanager
def quiet(threads: int | None = None) -> Iterator[None]:
    """Keep other packages' notices, and compile messages, out of the progress bar.

    Errors, and this package's own warnings, are shown.

    Args:
        threads: CPU threads meanwhile; torch's choice by default.
    """
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels, num_threads = [logger.level for logger in loggers], torch.get_num_threads()
    bars = transformers_logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads or num_threads)
    try:
        with warnings.catch_warnings(), muted():
            for module in _CHATTY:
                warnings.filterwarnings("ignore", module=module)
            yield
    finally:
        torch.set_num_threads(num_threads)
        if bars:
            transformers_logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
