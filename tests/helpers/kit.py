"""Runs the conformance kit within this process."""

from __future__ import annotations

import os

import pytest

KIT = ['--pyargs', 'twinkle.testing.conformance']
# No settings of this repository: the kit must work from anywhere.
OPTIONS = ['-c', os.devnull, '--rootdir', os.curdir, '-p', 'no:cacheprovider', '-q']


class Outcomes:
    """What became of each rule."""

    def __init__(self):
        self.passed, self.failed, self.skipped = set(), set(), {}

    def pytest_runtest_logreport(self, report):
        rule = report.nodeid.rpartition('::')[2].partition('[')[0].removeprefix('test_')
        if report.failed:
            self.failed.add(rule)
        elif report.skipped:
            self.skipped[rule] = report.longrepr[2]
        elif report.when == 'call':
            self.passed.add(rule)


def run_kit(model: str, *arguments: str) -> Outcomes:
    """Run the kit on a model class."""
    outcomes = Outcomes()
    code = pytest.main([*KIT, *OPTIONS, '--twinkle-model', model, *arguments], plugins=[outcomes])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    assert len(outcomes.passed) > 30
    return outcomes
