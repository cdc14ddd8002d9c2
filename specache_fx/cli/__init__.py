"""The command line, `specache-fx`, and what serves it alone: memory plans, the demo, the origin of numbers."""

from specache_fx.cli.commands import app as app
