"""Every Python example in the READMEs and in `docs/` runs as it is written, in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.workspace import ROOT, packages

_FENCE = re.compile(r'^```python(?P<flags>[^\n]*)\n(?P<code>.*?)^```', re.MULTILINE | re.DOTALL)


def _pages() -> list[Path]:
    return [
        ROOT / 'README.md',
        *sorted((ROOT / 'docs').glob('*.md')),
        *(package.folder / 'README.md' for package in packages()),
    ]


def _examples() -> list[tuple[str, str]]:
    found = []
    for page in _pages():
        for match in _FENCE.finditer(page.read_text()):
            if 'notest' not in match['flags']:
                line = page.read_text()[: match.start()].count('\n') + 1
                found.append((f'{page.relative_to(ROOT)}:{line}', match['code']))
    return found


@pytest.mark.parametrize(('where', 'code'), _examples(), ids=lambda value: '' if '\n' in value else value)
def test_example_runs(tmp_path, where, code):
    """The example exits without an error."""
    shutil.copytree(ROOT / 'cookbook' / 'data', tmp_path / 'cookbook' / 'data')
    data = tmp_path / 'cookbook' / 'data' / 'self_cognition.jsonl'
    data.write_text(''.join(data.read_text().splitlines(keepends=True)[:24]))  # three batches show that it runs
    (tmp_path / 'example.py').write_text(code)
    env = {**os.environ, 'TWINKLE_PROGRESS': '0', 'OMP_NUM_THREADS': '2'}
    done = subprocess.run(
        [sys.executable, 'example.py'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, f'{where}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}'


def test_links_between_pages_lead_somewhere():
    """Every relative link in the README and the docs is to a file that exists."""
    for page in [*_pages(), ROOT / 'CONTRIBUTING.md']:
        for target in re.findall(r'\]\(([^)#:]+)\)', page.read_text()):
            assert (page.parent / target).exists(), f'{page.relative_to(ROOT)} links to {target}'
