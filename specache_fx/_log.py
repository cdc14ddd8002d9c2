"""Logging helpers: one logger a module, and warnings that are said once."""

from __future__ import annotations

import logging

from specache_fx.resets import on_reset

_said: set[str] = set()


def warn_once(logger: logging.Logger, message: str, *, key: str | None = None) -> None:
    """Log `message` as a warning, the first time it is given in this process.

    Args:
        logger: Where to log it.
        message: The whole text; two messages that differ are two warnings.
        key: What tells two messages apart, where that is not the whole text.
    """
    if (key or message) not in _said:
        _said.add(key or message)
        logger.warning(message)


def forget_warnings() -> None:
    """Let every warning be said again."""
    _said.clear()


on_reset(forget_warnings)
