"""Fixtures of the rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twinkle import launcher
from twinkle.errors import ConfigError
from twinkle.testing.subject import Subject

if TYPE_CHECKING:
    from twinkle.model.protocol import TwinkleModel

_TIMEOUT = 120.0  # seconds that a rank waits for another; a rule takes less than one


@pytest.fixture(scope='session')
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The backend under test; with several ranks their process group is up."""
    folder = request.config.getoption('--twinkle-folder')
    try:
        found = Subject(
            request.config.getoption('--twinkle-model'),
            Path(folder) if folder else tmp_path_factory.mktemp('conformance'),
        )
    except ConfigError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    if launcher.world_size() > 1:
        from twinkle.runtime import get_runtime, initialize

        if get_runtime() is None:
            initialize(timeout=_TIMEOUT)
    return found


@pytest.fixture(autouse=True)
def declared(request: pytest.FixtureRequest, subject: Subject) -> None:
    """Leave out a rule whose methods the backend declares it cannot carry out; `errors` tests that it refuses them."""
    for marker in request.node.iter_markers('twinkle_needs'):
        for method in marker.args:
            if method in subject.cannot:
                pytest.skip(f'{method}() is declared impossible: {subject.cannot[method]}')


@pytest.fixture
def model(subject: Subject) -> TwinkleModel:
    """A new model without an optimizer."""
    return subject.model()
