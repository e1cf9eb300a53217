"""Side-by-side measurements: `python -m benchmarks [NAME ...]`. Every figure is also a JSON line."""
