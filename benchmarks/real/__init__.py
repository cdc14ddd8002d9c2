"""How near each option comes to the full cache on trained models: `python -m benchmarks.real`. See `__main__`."""
