"""The protocol as tests. Run by `pytest --pyargs twinkle.testing.conformance --twinkle-model MODULE:NAME`."""
