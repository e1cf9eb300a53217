"""Addresses of models and data: paths first, schemes by registry, hubs through fakes of their libraries. No network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import twinkle
from twinkle.errors import ConfigError, MissingPackageError, SourceError
from twinkle.hub import Source, cache_folder, fetch, is_offline, resolve_dataset, resolve_model, split_address


class FakeLibrary(ModuleType):
    """Stands in for huggingface_hub or modelscope: remembers each call, and brings a folder or raises."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.folder = folder
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def _bring(self, what: str, repository: str, options: dict[str, Any]) -> str:
        self.calls.append((what, repository, options))
        if self.error is not None:
            raise self.error
        return str(self.folder)

    def snapshot_download(self, repository: str, *, local_files_only: bool = False, **options: Any) -> str:
        return self._bring('snapshot', repository, {'local_files_only': local_files_only, **options})

    def dataset_snapshot_download(self, repository: str, **options: Any) -> str:
        return self._bring('dataset', repository, options)

    @property
    def call(self) -> tuple[str, str, dict[str, Any]]:
        """The only call."""
        (call,) = self.calls
        return call


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Online, with the default hub, in an empty folder."""
    for name in ('HF_HUB_OFFLINE', 'TWINKLE_DEFAULT_HUB'):
        monkeypatch.delenv(name, raising=False)
    here = tmp_path / 'here'
    here.mkdir()
    monkeypatch.chdir(here)


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLibrary:
    """huggingface_hub, but for the network."""
    library = FakeLibrary('huggingface_hub', tmp_path)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', library)
    return library


@pytest.fixture
def ms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLibrary:
    """modelscope, but for the network."""
    library = FakeLibrary('modelscope', tmp_path)
    monkeypatch.setitem(sys.modules, 'modelscope', library)
    return library


class Shelf(Source):
    """A source of models only, which brings what a test puts into `found`."""

    kinds = ('model',)
    found = Path()

    def fetch(self, rest, *, kind='model', revision=None, allow_patterns=None):
        return self.found


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('address', 'parts'),
    [
        ('hf://org/name', ('hf', 'org/name', None)),
        ('hf://org/name@v1.0', ('hf', 'org/name', 'v1.0')),
        ('hf://org/name@refs/pr/3', ('hf', 'org/name', 'refs/pr/3')),
        ('hf://org/name/', ('hf', 'org/name', None)),
        ('smollm2://135m-instruct', ('smollm2', '135m-instruct', None)),
        ('org/name', None),
        ('/some/path', None),
        ('hf://', None),
        ('://x', None),
        ('hf://org/name@', None),
        ('', None),
    ],
)
def test_an_address_is_scheme_rest_and_revision(address, parts):
    """`scheme://rest@revision`; anything else has no parts."""
    assert split_address(address) == parts


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_none(text):
    """Splitting never raises, and what it gives can be put together again."""
    parts = split_address(text)
    if parts is not None:
        scheme, rest, revision = parts
        assert text.startswith(f'{scheme}://')
        assert rest in text
        assert revision is None or text.endswith(f'@{revision}')


# -- local paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('resolve', [resolve_model, resolve_dataset])
def test_a_local_path_goes_before_any_hub(resolve, hf, tmp_path):
    """A folder that looks like `org/name` is taken, and no hub is asked."""
    Path('org/name').mkdir(parents=True)
    assert resolve('org/name') == 'org/name'
    assert resolve(Path('org/name')) == 'org/name'
    assert resolve(str(tmp_path)) == str(tmp_path)
    assert hf.calls == []


def test_the_home_folder_is_understood(monkeypatch, tmp_path):
    """`~/model` is a path in the user's home."""
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'model').mkdir()
    assert resolve_model('~/model') == str(tmp_path / 'model')


def test_a_local_path_has_no_revision(tmp_path):
    """A revision that could not be kept is refused, not dropped."""
    with pytest.raises(ConfigError, match=r"revision='v1'.*local path"):
        resolve_model(str(tmp_path), revision='v1')


@pytest.mark.parametrize(
    'name',
    ['missing', './missing/model', '/missing/model', '../up/model', 'data/train.jsonl', 'a/b/c', 'a' * 5000, '', ' '],
)
def test_a_missing_path_says_where_it_was_looked_for(name, hf):
    """No hub is asked for what can only be a path; the error gives the full path, the forms an id may have and the schemes."""
    with pytest.raises(SourceError, match='no such file or folder') as caught:
        resolve_model(name)
    message = str(caught.value)
    assert str(Path(name).absolute()) in message
    assert 'org/name' in message
    assert 'hf://' in message
    assert hf.calls == []


def test_a_path_object_is_never_a_name_at_a_hub(hf):
    """`Path('org/name')` can only be local."""
    with pytest.raises(SourceError, match='no such file or folder'):
        resolve_model(Path('org/name'))
    assert hf.calls == []


# -- the default hub ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['org/name', 'Qwen/Qwen2.5-0.5B', 'meta-llama/Llama-3.1-8B', 'org/model.v2'])
def test_a_bare_name_goes_to_hugging_face(name, hf, tmp_path):
    """`org/name`, dots in it or not, is looked up at the default hub."""
    assert resolve_model(name) == str(tmp_path)
    assert hf.call[:2] == ('snapshot', name)


def test_a_bare_name_may_carry_its_revision(hf):
    """`org/name@commit` reaches the hub as a name and a revision."""
    resolve_model('org/name@abc123')
    assert hf.call[1] == 'org/name'
    assert hf.call[2]['revision'] == 'abc123'


def test_the_default_hub_can_be_chosen(monkeypatch, hf, ms):
    """`TWINKLE_DEFAULT_HUB` is the scheme of bare names; an address with a scheme keeps its own."""
    monkeypatch.setenv('TWINKLE_DEFAULT_HUB', 'ms')
    resolve_model('org/name')
    assert [call[1] for call in ms.calls] == ['org/name']
    resolve_model('hf://org/other')
    assert [call[1] for call in hf.calls] == ['org/other']


def test_a_default_hub_that_does_not_exist_is_named(monkeypatch):
    """The error says which variable chose it, and the schemes there are."""
    monkeypatch.setenv('TWINKLE_DEFAULT_HUB', 'nosuch')
    with pytest.raises(SourceError, match=r'TWINKLE_DEFAULT_HUB=nosuch.*unknown scheme.*hf://'):
        resolve_model('org/name')


def test_a_bare_name_that_is_not_found_may_be_a_path_with_a_slip(hf):
    """The error names both places that were looked at, and keeps the hub's reason."""
    hf.error = ValueError('Repository Not Found')
    with pytest.raises(SourceError, match=r'output/last.*no such file or folder.*Repository Not Found') as caught:
        resolve_model('output/last')
    assert str(Path('output/last').absolute()) in str(caught.value)
    assert isinstance(caught.value.__cause__.__cause__, ValueError)


# -- schemes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('ask', [fetch, resolve_model, resolve_dataset])
def test_an_unknown_scheme_lists_the_known_ones(ask):
    """The message holds the scheme and all that are registered."""
    with pytest.raises(SourceError, match=r'unknown scheme .nosuch.*hf://.*ms://'):
        ask('nosuch://org/name')


def test_fetch_wants_a_whole_address():
    """Without a scheme the error says how an address looks."""
    with pytest.raises(SourceError, match=r"'org/name' is no address.*scheme://"):
        fetch('org/name')


def test_a_registered_source_is_reached_by_its_scheme(tmp_path):
    """Any package may bring a scheme; folders and revision errors are checked for it."""
    with twinkle.sources.temporary('shelf', Shelf):
        Shelf.found = tmp_path
        assert fetch('shelf://x') == tmp_path
        assert resolve_model('shelf://x') == str(tmp_path)
        Shelf.found = tmp_path / 'gone'
        with pytest.raises(SourceError, match=r'Shelf returned .*gone'):
            fetch('shelf://x')
        with pytest.raises(SourceError, match=r'brings models, no datasets'):
            resolve_dataset('shelf://x')


def test_two_revisions_must_agree(hf):
    """One in the address and one as an argument: equal is fine, different is refused."""
    fetch('hf://org/name@v1', revision='v1')
    with pytest.raises(SourceError, match=r"'v1'.*revision='v2'"):
        fetch('hf://org/name@v1', revision='v2')


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def test_hugging_face_gets_kind_revision_and_patterns(hf, tmp_path):
    """What was asked for arrives at snapshot_download unchanged."""
    patterns = ['*.json']
    assert fetch('hf://org/name', kind='dataset', revision='main', allow_patterns=patterns) == tmp_path
    what, repository, options = hf.call
    assert (what, repository) == ('snapshot', 'org/name')
    assert options['repo_type'] == 'dataset'
    assert options['revision'] == 'main'
    assert options['allow_patterns'] == patterns
    assert options['ignore_patterns'] is None
    assert options['local_files_only'] is False


def test_pickled_weights_are_not_fetched_unless_asked_for(hf):
    """A model comes without formats that are never loaded; named patterns and data sets come as they are."""
    fetch('hf://org/name')
    assert {'*.bin', '*.pt'} <= set(hf.calls[-1][2]['ignore_patterns'])
    fetch('hf://org/name', allow_patterns=['*'])
    assert hf.calls[-1][2]['ignore_patterns'] is None
    fetch('hf://org/name', kind='dataset')
    assert hf.calls[-1][2]['ignore_patterns'] is None


@pytest.mark.parametrize('value', ['1', 'true', 'ON', 'YES'])
def test_offline_is_honoured(value, monkeypatch, hf):
    """With HF_HUB_OFFLINE only the cache is looked at, and the error says so."""
    monkeypatch.setenv('HF_HUB_OFFLINE', value)
    assert is_offline()
    fetch('hf://org/name')
    assert hf.call[2]['local_files_only'] is True
    hf.error = FileNotFoundError('Cannot find an appropriate cached snapshot folder.')
    with pytest.raises(SourceError, match=r'hf://org/name@v1 is not in the local cache, and HF_HUB_OFFLINE is set'):
        fetch('hf://org/name@v1')


@pytest.mark.parametrize('value', ['', '0', 'no'])
def test_not_every_value_means_offline(value, monkeypatch):
    """`HF_HUB_OFFLINE=0` is online."""
    monkeypatch.setenv('HF_HUB_OFFLINE', value)
    assert not is_offline()


def test_the_real_library_asks_no_network_when_offline(monkeypatch, tmp_path):
    """The installed huggingface_hub, offline with an empty cache: a SourceError, and no connection was tried."""
    constants = pytest.importorskip('huggingface_hub.constants')
    import socket

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError('a connection was tried')

    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'empty'))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    with pytest.raises(SourceError, match='not in the local cache'):
        resolve_model('hf://nobody-at-all/no-such-model')


def test_a_failed_download_is_a_source_error(hf):
    """The hub's own error is chained, and the message says what to check."""
    hf.error = RuntimeError('401 Client Error.')
    with pytest.raises(
        SourceError, match=r'hf://org/name@v1 cannot be fetched: 401 Client Error\. Check the name'
    ) as caught:
        fetch('hf://org/name', revision='v1')
    assert caught.value.__cause__ is hf.error


def test_an_interrupt_is_not_swallowed(hf):
    """Ctrl-C during a download stays Ctrl-C."""
    hf.error = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        fetch('hf://org/name')


# -- ModelScope --------------------------------------------------------------------------------------------------------


def test_modelscope_brings_models_and_data_sets(ms, tmp_path):
    """Each kind through its own function, revision and patterns kept."""
    assert fetch('ms://org/name', revision='v2', allow_patterns=['*.json']) == tmp_path
    assert resolve_dataset('ms://org/data') == str(tmp_path)
    (what, repository, options), (what_data, data, options_data) = ms.calls
    assert (what, repository, options['revision'], options['allow_patterns']) == (
        'snapshot',
        'org/name',
        'v2',
        ['*.json'],
    )
    assert (what_data, data, options_data['revision']) == ('dataset', 'org/data', None)


def test_modelscope_stays_offline_for_data_sets_too(monkeypatch, ms):
    """Where its function for data sets cannot be kept off the network, the one that can is taken."""
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    fetch('ms://org/name')
    resolve_dataset('ms://org/data')
    assert [call[0] for call in ms.calls] == ['snapshot', 'snapshot']
    assert all(call[2]['local_files_only'] for call in ms.calls)
    assert ms.calls[1][2]['repo_type'] == 'dataset'


def test_an_older_modelscope_keeps_its_function_for_data_sets(monkeypatch, ms):
    """Its function for data sets takes `local_files_only`, and the one for models takes no data sets."""
    seen = []

    def older(repository: str, *, local_files_only: bool = False, **options: Any) -> str:
        seen.append((repository, local_files_only))
        return str(ms.folder)

    monkeypatch.setattr(ms, 'dataset_snapshot_download', older)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    resolve_dataset('ms://org/data')
    assert seen == [('org/data', True)]
    assert ms.calls == []


# -- missing packages, wrong names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('address', 'module', 'extra'), [('hf://a/b', 'huggingface_hub', 'hf'), ('ms://a/b', 'modelscope', 'ms')]
)
def test_a_missing_library_gives_its_pip_line(address, module, extra, monkeypatch):
    """It is asked for only when its scheme is used; the message ends with what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"{module}: pip install 'twinkle-core\[{extra}\]'$"):
        fetch(address)


def test_a_bare_name_without_the_library_still_says_where_it_looked(monkeypatch):
    """A path with a slip in it must not be answered with an installation line only."""
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(MissingPackageError, match=r'output/last.*no such file or folder.*pip install'):
        resolve_model('output/last')


def test_a_broken_library_says_what_it_lacks(monkeypatch, tmp_path):
    """An import that fails inside the library names the true culprit."""
    (tmp_path / 'modelscope.py').write_text('import no_such_dependency\n')
    monkeypatch.delitem(sys.modules, 'modelscope', raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingPackageError, match=r'no_such_dependency.*pip install'):
        fetch('ms://org/name')


@pytest.mark.parametrize(
    'rest',
    [
        '../../etc/passwd',
        'org/../..',
        'org/..',
        './x',
        'org/name/sub',
        'org/na me',
        '.hidden/x',
        'org/a..b',
        'ö/ü',
        '~/x',
    ],
)
@pytest.mark.parametrize('scheme', ['hf', 'ms'])
def test_a_name_cannot_leave_the_hubs_cache(scheme, rest, hf, ms):
    """Only `org/name` or `name` reaches the library."""
    with pytest.raises(SourceError, match='not a repository'):
        fetch(f'{scheme}://{rest}')
    assert hf.calls == ms.calls == []


@pytest.mark.parametrize('revision', ['../../../x', '/etc/passwd', 'a/../../b', 'a b', '..', ''])
@pytest.mark.parametrize('scheme', ['hf', 'ms'])
def test_a_revision_cannot_leave_the_hubs_cache(scheme, revision, hf, ms):
    """Hubs keep references in files named by revision, so those are checked, too."""
    with pytest.raises(SourceError, match='no revision'):
        fetch(f'{scheme}://org/name', revision=revision)
    assert hf.calls == ms.calls == []


# -- the cache folder --------------------------------------------------------------------------------------------------


def test_the_cache_is_where_the_user_wants_it(monkeypatch, tmp_path):
    """TWINKLE_CACHE, else XDG_CACHE_HOME; made if need be; a relative one becomes absolute."""
    monkeypatch.setenv('TWINKLE_CACHE', str(tmp_path / 'mine' / 'deep'))
    assert cache_folder() == tmp_path / 'mine' / 'deep'
    assert (tmp_path / 'mine' / 'deep').is_dir()
    monkeypatch.setenv('TWINKLE_CACHE', 'relative')
    assert cache_folder() == Path.cwd() / 'relative'
    monkeypatch.delenv('TWINKLE_CACHE')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    assert cache_folder() == tmp_path / 'xdg' / 'twinkle'


@pytest.mark.parametrize(('platform', 'place'), [('linux', '.cache'), ('darwin', 'Library/Caches'), ('win32', 'local')])
def test_each_platform_has_its_own_cache(platform, place, monkeypatch, tmp_path):
    """Without variables it is the platform's; XDG_CACHE_HOME counts only if absolute."""
    monkeypatch.delenv('TWINKLE_CACHE', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', 'relative')
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('LOCALAPPDATA', str(tmp_path / 'local'))
    monkeypatch.setattr('twinkle.hub.addresses.sys.platform', platform)
    assert cache_folder() == tmp_path / place / 'twinkle'


def test_a_cache_that_cannot_be_made_names_the_variable(monkeypatch, tmp_path):
    """A file in the way: the error gives the path and the way out."""
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('TWINKLE_CACHE', os.path.join(tmp_path, 'file', 'cache'))
    with pytest.raises(SourceError, match=r'cannot be made.*set TWINKLE_CACHE'):
        cache_folder()
