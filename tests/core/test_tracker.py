"""The interface of trackers, and the plain log that every run with a folder has."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkle
from tests.helpers.trackers import Memory
from twinkle.errors import InvalidPartError, StateError
from twinkle.tracker import MetricsLog, Tracker


def test_a_tracker_implements_all_three_methods() -> None:
    """The base cannot be made, and the registry lists what a subclass leaves out."""

    class Half(Tracker):
        def start(self, run_dir: Path, config: object) -> None:
            return None

    with pytest.raises(TypeError, match='abstract'):
        Tracker()  # type: ignore[abstract]
    with pytest.raises(InvalidPartError, match='does not implement finish, log'):
        twinkle.trackers.resolve(Half)
    with pytest.raises(InvalidPartError, match='no part of trackers'):
        twinkle.trackers.resolve(dict)
    assert twinkle.trackers.resolve(Memory) is Memory


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**9),
            st.dictionaries(st.text(), st.floats() | st.integers(-(2**63), 2**63)),
        ),
        max_size=5,
    )
)
def test_every_line_is_strict_json(
    tmp_path_factory: pytest.TempPathFactory, logged: list[tuple[int, dict[str, float]]]
) -> None:
    """Any names and numbers are read back by a parser that knows no NaN; what is not finite is null, and `step` is the step."""

    def refuse(name: str) -> None:
        raise AssertionError(f'{name} is no JSON')

    folder = tmp_path_factory.mktemp('log')
    log = MetricsLog()
    log.start(folder, {})
    for step, metrics in logged:
        log.log(metrics, step)
    log.finish()
    path = folder / 'metrics.jsonl'
    text = path.read_text(encoding='utf-8') if logged else ''
    lines = [json.loads(line, parse_constant=refuse) for line in text.split('\n')[:-1]]
    assert lines == [
        {**{name: value if math.isfinite(value) else None for name, value in metrics.items()}, 'step': step}
        for step, metrics in logged
    ]
    assert all(next(iter(line)) == 'step' for line in lines)


def test_lines_are_there_before_the_run_ends(tmp_path: Path) -> None:
    """Whatever kills a run, what it logged can be read; a log that has not started, or is over, says so."""
    log = MetricsLog()
    with pytest.raises(StateError, match='start'):
        log.log({'loss': 1.0}, 1)
    log.start(tmp_path, {})
    log.log({'loss': 1.0}, 1)
    assert (tmp_path / 'metrics.jsonl').read_text() == '{"step": 1, "loss": 1.0}\n'
    log.finish()
    with pytest.raises(StateError, match='start'):
        log.log({'loss': 1.0}, 2)
