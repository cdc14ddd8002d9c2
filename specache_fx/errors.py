"""The errors that a user can meet. Each message names the thing, the reason and the remedy."""

from __future__ import annotations


class SpecacheError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SpecacheError, ValueError):
    """An option is unknown, has a value outside its range, or contradicts another."""


class UnsupportedGraphError(SpecacheError):
    """An attention can't be rewritten: the message has the node, its source line, the reason and the remedy."""


class CacheHandleError(SpecacheError):
    """The past KV is no cache that this package returned, or was changed in a way that can't be followed."""


class SavedCacheError(SpecacheError):
    """A saved cache is damaged, is not there, can't be written, or is another model's."""


class PassInvariantError(SpecacheError):
    """A pass left a graph that breaks one of the pipeline's invariants: a defect of this package."""


class KernelUnavailableError(SpecacheError):
    """A kernel was asked for by name and can't run here."""


class HostMemoryError(SpecacheError, MemoryError):
    """The host tier could not get the bytes that it asked for. The session is gone; the model is usable."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop; its class where there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
