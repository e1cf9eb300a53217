"""Fresh environments for built wheels, without installing PyTorch again for each.

An environment is a `venv` of its own. Ours comes from wheels, installed by pip with its resolver and no index. What others have made
is linked from the environment that runs the tests: exactly the distributions that the metadata of the wheels asks for, and what those
ask for, so a dependency that is not declared is not there.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement


def _normal(name: str) -> str:
    return re.sub(r'[-_.]+', '-', name).lower()


def build(folder: Path, out: Path) -> Path:
    """The wheel of a source tree, built from its sdist, so that the sdist is complete, too."""
    before = set(out.glob('*.whl'))
    run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', str(out), str(folder)])
    (wheel,) = set(out.glob('*.whl')) - before
    return wheel


def run(command: list[str], *, cwd: Path | None = None, fails: bool = False, **variables: str) -> str:
    """What a command prints on both channels. Nothing of this checkout, nor pip's settings, is visible to it.

    Raises:
        AssertionError: it fails, or with `fails` it does not.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(('PIP_', 'PYTHON', 'TWINKLE_'))}
    env |= {
        'PIP_NO_INDEX': '1',
        'PIP_DISABLE_PIP_VERSION_CHECK': '1',
        'PIP_CONFIG_FILE': os.devnull,
        'HF_HUB_OFFLINE': '1',
    }
    env |= {'OMP_NUM_THREADS': '1', 'TWINKLE_PROGRESS': '0', 'PYTHONSAFEPATH': '1', **variables}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    printed = done.stderr + done.stdout
    assert (done.returncode != 0) == fails, f'{command} ended with {done.returncode}:\n{printed[-4000:]}'
    return printed


class Environment:
    """A fresh `venv`.

    Args:
        folder: where to make it.
        wheels: where pip finds ours.
    """

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder = folder
        self.wheels = wheels
        venv.create(folder, with_pip=False, symlinks=True)
        self.site = next(folder.glob('lib/python*/site-packages'))
        self.python = folder / 'bin' / 'python'
        self._others = folder / 'others'
        self._others.mkdir()
        (self.site / 'others.pth').write_text(f'{self._others}\n')
        self._linked: set[str] = set()

    def install(self, *names: str) -> None:
        """Install distributions of ours, and what they need."""
        for name in names:
            (wheel,) = self.wheels.glob(f'{name.partition("[")[0].replace("-", "_")}-*.whl')
            (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
            extras = re.findall(r'\w+', name.partition('[')[2])
            self._link(distribution.requires or [], extras)
        self.pip('install', '--quiet', '--find-links', str(self.wheels), *names)
        self.pip('check')

    def pip(self, *arguments: str) -> str:
        """The pip of this process, at work on that environment."""
        return run([sys.executable, '-m', 'pip', '--python', str(self.python), *arguments])

    def script(self, code: str, *, fails: bool = False, **variables: str) -> str:
        """Run Python there, in an empty folder."""
        work = self.folder / 'work'
        work.mkdir(exist_ok=True)
        return run([str(self.python), '-c', code], cwd=work, fails=fails, **variables).strip()

    def program(self, *command: str, fails: bool = False) -> str:
        """Run an installed program there."""
        return run([str(self.folder / 'bin' / command[0]), *command[1:]], cwd=self.folder, fails=fails)

    def link(self, *names: str) -> None:
        """Make distributions of others available, and what they need."""
        self._link(names, ())

    def _link(self, requirements: Iterable[str], extras: Iterable[str]) -> None:
        for need in map(Requirement, requirements):
            if need.marker and not any(need.marker.evaluate({'extra': extra}) for extra in ('', *extras)):
                continue
            name = _normal(need.name)
            if f'{name}{sorted(need.extras)}' in self._linked:
                continue
            self._linked.add(f'{name}{sorted(need.extras)}')
            if name.startswith('twinkle-'):  # ours: pip installs its wheel, and what that needs is linked
                (wheel,) = self.wheels.glob(f'{name.replace("-", "_")}-*.whl')
                (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
            else:
                distribution = importlib.metadata.distribution(name)
                self._link_files(distribution)
            self._link(distribution.requires or [], need.extras)

    def _link_files(self, distribution: importlib.metadata.Distribution) -> None:
        for top in {file.parts[0] for file in distribution.files or []} - {'..', '__pycache__'}:
            target = Path(str(distribution.locate_file(top)))
            if not (self._others / top).exists() and target.exists():
                (self._others / top).symlink_to(target)
