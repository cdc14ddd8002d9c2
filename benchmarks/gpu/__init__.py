"""What a GPU shows in one run of nine minutes: `python -m benchmarks.gpu`. See `__main__`."""
