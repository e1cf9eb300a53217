"""TransformersModel keeps the rules of the conformance kit."""

from __future__ import annotations

from tests.helpers.kit import run_kit


def test_transformers_model_passes_the_conformance_kit(tmp_path, monkeypatch):
    """Every rule but those about several ranks; nothing is declared impossible."""
    monkeypatch.chdir(tmp_path)
    outcomes = run_kit('twinkle.model:TransformersModel')
    assert outcomes.failed == set()
    assert set(outcomes.skipped.values()) == {'Skipped: one process: run with --twinkle-ranks 2'}
