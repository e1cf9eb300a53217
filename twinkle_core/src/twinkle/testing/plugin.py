"""The pytest plugin of the conformance kit. It is loaded in every pytest run, so it imports nothing of weight."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

__all__: list[str] = []

_RULES = Path(__file__).with_name('conformance')

pytest.register_assert_rewrite('twinkle.testing.conformance')


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup('twinkle', 'conformance of a Twinkle backend')
    group.addoption(
        '--twinkle-model',
        metavar='MODULE:NAME',
        help='the model class to test with: pytest --pyargs twinkle.testing.conformance --twinkle-model my_pkg:MyModel',
    )
    group.addoption(
        '--twinkle-ranks', type=int, default=1, metavar='N', help='run the kit on N processes (torch.distributed.run)'
    )
    group.addoption('--twinkle-folder', metavar='FOLDER', help='where the kit writes; by default a temporary folder')


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        'markers', 'twinkle_needs(*methods): a conformance rule that calls these methods of the model'
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With --twinkle-ranks, start the same command on every rank, and be one of them no longer."""
    ranks = config.getoption('--twinkle-ranks')
    if ranks < 1:
        raise pytest.UsageError(f'--twinkle-ranks={ranks} must be at least 1.')
    if ranks == 1 or 'RANK' in os.environ:
        return None
    with tempfile.TemporaryDirectory(prefix='twinkle-ranks-') as scratch:
        return _launch(config, ranks, Path(scratch))


def _launch(config: pytest.Config, ranks: int, scratch: Path) -> int:
    quiet = ','.join(f'{rank}:3' for rank in range(1, ranks))  # both streams of the others go to files
    launcher = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(ranks)]
    launcher += ['--redirects', quiet, '--log-dir', str(scratch / 'logs'), '-m', 'pytest']
    folder = config.getoption('--twinkle-folder') or str(scratch / 'files')
    # The cache, and the numbered folders of tmp_path, are for one process at a time.
    ours = ['-p', 'no:cacheprovider', '--twinkle-folder', folder]
    arguments = [str(argument) for argument in config.invocation_params.args]
    done = subprocess.run(
        [sys.executable, *launcher, *arguments, *ours],
        cwd=config.invocation_params.dir,
        env={'OMP_NUM_THREADS': '1', **os.environ},
        check=False,
    )
    if done.returncode != 0:
        for log in sorted(scratch.glob('logs/**/std*.log')):
            print(f'\n--- {log.parent.name}: {log.name} ---\n{log.read_text(errors="replace")[-8000:]}')
    return done.returncode


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """The kit's rules are tests whatever `python_files` says."""
    if file_path.parent != _RULES or file_path.suffix != '.py' or file_path.name.startswith(('_', 'conftest')):
        return None
    module: pytest.Module = pytest.Module.from_parent(parent, path=file_path)
    return module


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One line instead of an error per rule, where no model was given."""
    if not config.getoption('--twinkle-model') and any(item.path.parent == _RULES for item in items):
        raise pytest.UsageError(
            'the conformance kit needs the model to test: --twinkle-model MODULE:NAME, for example '
            '--twinkle-model my_pkg:MyModel'
        )


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ranks end together: the launcher stops the others as soon as one has left with an error, be its report written or not."""
    distributed = sys.modules.get('torch.distributed')
    if config.getoption('--twinkle-ranks') > 1 and distributed is not None and distributed.is_initialized():
        distributed.barrier()
