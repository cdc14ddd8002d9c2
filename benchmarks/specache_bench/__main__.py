"""`python -m specache_bench` is `specache-bench`."""

from specache_bench.cli import app

app()
