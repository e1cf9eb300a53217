"""Plugin code from a folder or a hub: opting in, pinning, names of its own, nothing left behind after a failure."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_dists import LOSS
from twinkle.errors import ConfigError, InvalidPartError, PluginLoadError, SourceError, UntrustedCodeError
from twinkle.hub import Source
from twinkle.registry import losses, patches, sources, templates

TRUSTED = {'trust_remote_code': True}


def write(folder: Path, **files: str) -> str:
    """A folder of plugin code; returns its address."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f'{name}.py').write_text(text)
    return str(folder)


def touching(marker: Path) -> str:
    """Code that leaves a mark when it runs."""
    return f'from pathlib import Path\nPath({str(marker)!r}).write_text("ran")\n' + LOSS.format(name='Marked')


@pytest.fixture(autouse=True)
def _no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('TWINKLE_TRUST_REMOTE_CODE', raising=False)


class FakeHub(Source):
    """A hub of two commits, each a folder; it remembers what it was asked for."""

    root = Path()
    asked: list[tuple[str, Any, Any]] = []

    def fetch(self, rest, *, kind='model', revision=None, allow_patterns=None):
        self.asked.append((rest, revision, allow_patterns))
        return self.root / (revision or 'main')


@pytest.fixture
def hub(tmp_path):
    """The fake hub under the scheme fake://."""
    FakeHub.root, FakeHub.asked = tmp_path, []
    with sources.temporary('fake', FakeHub):
        yield FakeHub


def test_a_folder_is_a_part_after_opting_in(tmp_path):
    """A folder with one loss is that loss, by argument, and `:Name` names one of several."""
    one = write(tmp_path / 'one', __init__=LOSS.format(name='First'))
    two = write(tmp_path / 'two', __init__=LOSS.format(name='First') + LOSS.format(name='Second'))
    assert losses.resolve(one, **TRUSTED).__name__ == 'First'
    assert losses.resolve(Path(one), **TRUSTED).__name__ == 'First'
    assert losses.resolve(f'{two}:Second', **TRUSTED).__name__ == 'Second'
    with pytest.raises(InvalidPartError, match=r'First, Second.*:First'):
        losses.resolve(two, **TRUSTED)
    with pytest.raises(PluginLoadError, match=r'Third.*First, Second'):
        losses.resolve(f'{two}:Third', **TRUSTED)


def test_a_file_and_relative_addresses_work(tmp_path, monkeypatch):
    """`./file.py`, `./folder`, `plugin.py` in a folder."""
    write(tmp_path / 'code', plugin=LOSS.format(name='Plain'))
    write(tmp_path, focal=LOSS.format(name='Focal'))
    monkeypatch.chdir(tmp_path)
    assert losses.resolve('./focal.py', **TRUSTED).__name__ == 'Focal'
    assert losses.resolve('./focal.py:Focal', **TRUSTED) is losses.resolve('./focal.py', **TRUSTED)
    assert losses.resolve('./code', **TRUSTED).__name__ == 'Plain'
    assert losses.name_of('./code') == './code'


def test_functions_count_where_the_kind_allows_them(tmp_path):
    """A patch may be a function of a folder."""
    address = write(tmp_path / 'p', __init__='def freeze(model):\n    return None\n')
    assert patches.resolve(address, **TRUSTED).__name__ == 'freeze'
    with pytest.raises(InvalidPartError, match='one part of templates'):
        templates.resolve(address, **TRUSTED)


@pytest.mark.parametrize('how', ['./code', 'fake://org/repo'])
def test_without_opting_in_nothing_is_fetched_or_run(tmp_path, monkeypatch, hub, how):
    """CASES 17 for code: the error shows both ways to opt in and the risk; the code has left no mark."""
    marker = tmp_path / 'marker'
    write(tmp_path / 'code', __init__=touching(marker))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UntrustedCodeError, match=r'all your rights.*trust_remote_code=True.*TWINKLE_TRUST_REMOTE_CODE=1'
    ) as caught:
        losses.resolve(how)
    assert isinstance(caught.value, PermissionError)
    assert not marker.exists()
    assert hub.asked == []


@pytest.mark.parametrize('value', ['0', '', 'no', 'false'])
def test_the_variable_opts_in_only_when_it_is_set_to_yes(tmp_path, monkeypatch, value):
    """TWINKLE_TRUST_REMOTE_CODE=1 opts in; 0, no, false and the empty value do not."""
    address = write(tmp_path / 'code', __init__=LOSS.format(name='ByVariable'))
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', value)
    with pytest.raises(UntrustedCodeError):
        losses.resolve(address)
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', '1')
    assert losses.resolve(address).__name__ == 'ByVariable'


def test_a_pinned_revision_is_what_is_loaded(tmp_path, hub, caplog):
    """`revision=` or `@commit`; two commits live side by side; an unpinned one is reported."""
    write(tmp_path / 'aaa', __init__=LOSS.format(name='Old'))
    write(tmp_path / 'bbb', __init__=LOSS.format(name='New'))
    write(tmp_path / 'main', __init__=LOSS.format(name='Newest'))
    old = losses.resolve('fake://org/repo', revision='aaa', **TRUSTED)
    new = losses.resolve('fake://org/repo@bbb:New', **TRUSTED)
    assert (old.__name__, new.__name__) == ('Old', 'New')
    assert old.__module__ != new.__module__
    assert [revision for _, revision, _ in hub.asked] == ['aaa', 'bbb']
    assert '*.py' in hub.asked[0][2]
    assert not caplog.records
    assert losses.resolve('fake://org/repo', **TRUSTED).__name__ == 'Newest'
    assert 'not pinned' in caplog.text


def test_two_folders_with_like_named_files_live_side_by_side(tmp_path):
    """Each has its own `helper`, found by relative import; module names are unique and stable."""
    parts = []
    for value in (1, 2):
        code = LOSS.format(name='Same') + 'from .helper import VALUE\nSame.value = VALUE\n'
        address = write(tmp_path / str(value) / 'same', __init__=code, helper=f'VALUE = {value}\n')
        parts.append(losses.resolve(address, **TRUSTED))
        assert losses.resolve(address, **TRUSTED) is parts[-1]
    assert [part.value for part in parts] == [1, 2]
    assert len({part.__module__ for part in parts}) == 2
    assert 'helper' not in sys.modules


def test_changed_code_is_loaded_anew(tmp_path):
    """After an edit the folder is another module; what was loaded before is untouched."""
    first = losses.resolve(write(tmp_path / 'c', __init__=LOSS.format(name='Before')), **TRUSTED)
    second = losses.resolve(write(tmp_path / 'c', __init__=LOSS.format(name='Afterwards')), **TRUSTED)
    assert (first.__name__, second.__name__) == ('Before', 'Afterwards')


@pytest.mark.parametrize('end', ['1 / 0', 'raise SystemExit(3)', 'import no_such_module_here', 'def broken('])
def test_a_failure_leaves_no_trace(tmp_path, end):
    """`sys.path`, `sys.modules` and the environment are as before, though the code had changed them; the cause is chained."""
    code = (
        'import sys\nfrom . import helper\nsys.path.insert(0, __path__[0])\nimport loose_helper_of_test\n' + end
        if end != 'def broken('
        else end
    )
    address = write(tmp_path / 'bad', __init__=code, helper='', loose_helper_of_test='')
    path, modules, environ = list(sys.path), set(sys.modules), dict(os.environ)
    with pytest.raises(PluginLoadError, match='Nothing of it was kept') as caught:
        losses.resolve(address, **TRUSTED)
    assert caught.value.__cause__ is not None
    assert sys.path == path
    assert set(sys.modules) == modules
    assert dict(os.environ) == environ
    write(tmp_path / 'bad', __init__=LOSS.format(name='Repaired'))
    assert losses.resolve(address, **TRUSTED).__name__ == 'Repaired'


def test_what_cannot_be_code_is_refused(tmp_path):
    """No such folder, no Python in it, another file, a revision of a folder."""
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'x.txt').write_text('')
    with pytest.raises(SourceError, match='no such file or folder'):
        losses.resolve(str(tmp_path / 'absent'))
    with pytest.raises(SourceError, match=r'neither __init__\.py nor plugin\.py'):
        losses.resolve(str(tmp_path / 'empty'), **TRUSTED)
    with pytest.raises(SourceError, match='no Python file'):
        losses.resolve(str(tmp_path / 'x.txt'), **TRUSTED)
    with pytest.raises(ConfigError, match='no revisions'):
        losses.resolve(str(tmp_path / 'empty'), revision='abc', **TRUSTED)
    losses.resolve('cross_entropy')  # what is cached is refused all the same
    with pytest.raises(ConfigError, match='revision'):
        losses.resolve('cross_entropy', revision='abc')


def test_build_takes_the_opt_in_and_passes_options_on(tmp_path):
    """`trust_remote_code` opts in and is not an option of the class, unless the class takes it."""
    code = LOSS.format(name='Scaled') + '    def __init__(self, scale=1.0):\n        self.scale = scale\n'
    address = write(tmp_path / 'code', __init__=code)
    assert losses.build(address, scale=3.0, trust_remote_code=True).scale == 3.0
    with pytest.raises(UntrustedCodeError):
        losses.build(address, scale=3.0)


def test_many_threads_import_it_once(tmp_path):
    """16 threads that ask at once get one class, from one run of the module."""
    count = tmp_path / 'count'
    code = (
        f'import time\nwith open({str(count)!r}, "a") as file:\n    file.write("x")\ntime.sleep(0.2)\n'
        + LOSS.format(name='Slow')
    )
    address = write(tmp_path / 'slow', __init__=code)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(losses.resolve(address, **TRUSTED))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert count.read_text() == 'x'


def _class_of(part):
    return type(part).__name__, losses.resolve('from_folder').__name__


@pytest.mark.parametrize('method', ['spawn', 'fork'])
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_workers_find_what_the_parent_has_opted_in_to(tmp_path, method):
    """An object of such a class reaches a worker by pickle, and a registration under a name is seen there."""
    part = losses.resolve(write(tmp_path / 'code', __init__=LOSS.format(name='Travels')), **TRUSTED)
    with losses.temporary('from_folder', part), multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_class_of, (part(),)) == ('Travels', 'Travels')


def test_a_worker_refuses_code_that_has_changed_since(tmp_path):
    """What the parent trusted is what a worker runs."""
    address = write(tmp_path / 'code', __init__=LOSS.format(name='Trusted'))
    module = losses.resolve(address, **TRUSTED).__module__
    marker = tmp_path / 'marker'
    write(tmp_path / 'code', __init__=touching(marker))
    done = subprocess.run([sys.executable, '-c', f'import {module}'], capture_output=True, text=True, check=False)
    assert 'has changed' in done.stderr
    assert not marker.exists()
