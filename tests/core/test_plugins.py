"""Discovery: read once, robust against what is broken, and quick however much is installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.fake_dists import LOSS, make_dist
from twinkle import PLUGIN_API
from twinkle.errors import (
    AlreadyRegisteredError,
    AmbiguousNameError,
    MissingPartError,
    PluginLoadError,
    UnknownNameError,
)
from twinkle.loss import CrossEntropyLoss, Loss, MSELoss
from twinkle.plugins import OLDEST_PLUGIN_API, plugin_cache
from twinkle.registry import Registry, losses, lr_schedulers, models, optimizers, sources


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install made-up distributions, each in a folder of its own, first on the path; they are gone after the test."""
    before = set(sys.modules)

    def do(name, points, module=None, code=None, **options):
        folder = tmp_path / f'{len(list(tmp_path.iterdir()))}-{name}'
        make_dist(folder, name, {'twinkle.losses': points}, modules={module: code} if module else None, **options)
        monkeypatch.syspath_prepend(str(folder))
        plugin_cache.refresh()
        return folder

    yield do
    for module in set(sys.modules) - before:
        if module.startswith('fake_'):
            del sys.modules[module]
    monkeypatch.undo()
    plugin_cache.refresh()


@pytest.fixture
def fresh(monkeypatch):
    """Metadata is read anew after the test."""
    yield monkeypatch
    monkeypatch.undo()
    plugin_cache.refresh()


class Mine(Loss):
    """A loss of this test."""

    def __call__(self, inputs, outputs, **kwargs):
        raise AssertionError('not called')


def test_metadata_is_read_once_until_refresh(fresh):
    """Any number of questions costs one reading; `refresh()` reads again."""
    count = []
    real = importlib.metadata.distributions
    fresh.setattr(importlib.metadata, 'distributions', lambda: count.append(1) or real())
    plugin_cache.refresh()
    for _ in range(3):
        losses.resolve('mse')
        optimizers.names()
    assert len(count) == 1
    losses.refresh()
    losses.names()
    assert len(count) == 2


def test_threads_read_metadata_once(fresh):
    """16 threads at once: one reading."""
    count = []
    real = importlib.metadata.distributions

    def slow():
        count.append(1)
        time.sleep(0.1)
        return real()

    fresh.setattr(importlib.metadata, 'distributions', slow)
    plugin_cache.refresh()
    threads = [threading.Thread(target=losses.names) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1


def test_a_new_installation_is_seen_after_refresh(install):
    """What pip installs while a process runs is found after `refresh()`, and gone again after removal."""
    folder = install('fake-later', {'later': 'fake_later:Later'}, 'fake_later', LOSS.format(name='Later'))
    assert losses.resolve('later').__name__ == 'Later'
    make_dist(folder, 'fake-even', {'twinkle.losses': {'even_later': 'fake_later:Later'}})
    losses.refresh()
    assert losses.is_registered('even_later')
    for path in (folder / 'fake_even-1.0.dist-info').iterdir():
        path.unlink()
    losses.refresh()
    assert not losses.is_registered('even_later')


@pytest.mark.parametrize(
    'content',
    [b'[twinkle.losses]\nno equals sign\n', b'[twinkle.losses]\nx = \xff\xfe:Y\n', b'twinkle. = before any section'],
)
def test_unreadable_metadata_hides_only_its_own_distribution(install, caplog, content):
    """Entry points that are garbled are reported by the distribution's name; all others are found."""
    folder = install('fake-garbled', {})
    (folder / 'fake_garbled-1.0.dist-info' / 'entry_points.txt').write_bytes(content)
    losses.refresh()
    assert losses.resolve('cross_entropy') is CrossEntropyLoss
    if content.startswith(b'['):
        assert 'fake-garbled' in caplog.text
        assert 'fake-garbled' in plugin_cache.broken()


def test_a_distribution_without_metadata_still_has_a_name(install):
    """METADATA is missing: the parts work, and the listing does too."""
    folder = install('fake-bare', {'bare': 'fake_bare:Bare'}, 'fake_bare', LOSS.format(name='Bare'))
    (folder / 'fake_bare-1.0.dist-info' / 'METADATA').unlink()
    losses.refresh()
    entry = losses.find('bare')
    assert (entry.distribution, entry.version) == ('fake-bare', '')
    assert losses.resolve('bare@fake-bare').__name__ == 'Bare'


def test_the_first_of_two_versions_on_the_path_counts(install):
    """As in Python's own imports: an older version further down the path adds no names."""
    install('fake-twice', {'gone': 'fake_twice:Old'}, version='1.0')
    install('Fake_Twice', {'kept': 'fake_twice:New'}, version='2.0')
    assert losses.find('kept').version == '2.0'
    assert not losses.is_registered('gone')


def test_versions_are_read_only_when_asked(install, fresh):
    """Names, and finding one, read no METADATA file."""
    install('fake-unread', {'unread': 'fake_unread:Unread'})
    fresh.setattr(importlib.metadata.PathDistribution, 'metadata', property(lambda self: pytest.fail('was read')))
    assert 'unread' in losses.names()
    entry = losses.find('unread')
    assert entry.distribution == 'fake-unread'
    with pytest.raises(pytest.fail.Exception):
        entry.version


@pytest.mark.parametrize(
    ('apis', 'works'), [(['v1'], True), (['v0', 'v1'], True), (['v2', 'v3'], False), (['nonsense'], False)]
)
def test_a_plugin_made_for_several_apis_works_if_one_is_offered(install, apis, works):
    """The names in `twinkle.plugin_api` are alternatives; the state is `failed` before anything is loaded if none fits."""
    assert OLDEST_PLUGIN_API <= PLUGIN_API == 1
    folder = install('fake-apis', {'apis': 'fake_apis:Apis'}, 'fake_apis', LOSS.format(name='Apis'))
    make_dist(
        folder,
        'fake-apis',
        {'twinkle.losses': {'apis': 'fake_apis:Apis'}, 'twinkle.plugin_api': dict.fromkeys(apis, 'fake_apis')},
    )
    losses.refresh()
    entry = losses.find('apis')
    assert entry.state == ('unloaded' if works else 'failed')
    assert 'fake_apis' not in sys.modules
    if works:
        assert losses.resolve('apis').__name__ == 'Apis'
    else:
        assert 'plugin API' in entry.reason
        with pytest.raises(PluginLoadError, match='plugin API'):
            losses.resolve('apis')


@pytest.mark.parametrize(
    'code', ['raise SystemExit(3)', 'def broken(', 'import no_such_module_of_test', 'raise ValueError']
)
def test_a_module_that_fails_in_any_way_is_one_kind_of_error(install, code):
    """Exits, syntax errors, missing modules: `PluginLoadError` with the cause chained, and a second try may succeed."""
    folder = install('fake-fails', {'fails': 'fake_fails:Fixed'}, 'fake_fails', code)
    with pytest.raises(PluginLoadError, match='fake-fails') as caught:
        losses.resolve('fails')
    assert caught.value.__cause__ is not None
    assert losses.find('fails').reason
    (folder / 'fake_fails.py').write_text(LOSS.format(name='Fixed') + '# another size\n')
    losses.refresh()
    assert losses.resolve('fails').__name__ == 'Fixed'
    assert losses.find('fails').state == 'loaded'


def test_keys_of_one_distribution_that_fold_together_are_told_apart_by_spelling(install):
    """Its own spelling means each; any other is ambiguous, and says how to write it."""
    code = LOSS.format(name='One') + LOSS.format(name='Two')
    install('fake-folds', {'ab_c': 'fake_folds:One', 'a_bc': 'fake_folds:Two'}, 'fake_folds', code)
    assert losses.resolve('ab_c').__name__ == 'One'
    assert losses.resolve('a_bc').__name__ == 'Two'
    assert losses.resolve('a_bc@fake-folds').__name__ == 'Two'
    with pytest.raises(AmbiguousNameError, match="'a_bc' or 'ab_c'"):
        losses.resolve('abc')


def test_a_key_comes_before_a_class_name(install):
    """A class's name means it only where no key of any distribution does; classes of one name are ambiguous."""
    code = LOSS.format(name='Mse') + LOSS.format(name='Shared')
    install('fake-class', {'thing': 'fake_class:Mse', 'other': 'fake_class:Shared'}, 'fake_class', code)
    assert losses.resolve('Mse') is MSELoss
    assert losses.resolve('Shared').__module__ == 'fake_class'
    install('fake-class2', {'third': 'fake_class2:Shared'}, 'fake_class2', LOSS.format(name='Shared'))
    with pytest.raises(AmbiguousNameError, match='third@fake-class2'):
        losses.resolve('Shared')


def test_the_same_class_under_two_names_is_no_conflict(install):
    """A distribution may give somebody else's class a name of its own; asking by the class's name finds that class."""
    install('fake-alias', {'my_mse': 'twinkle.loss:MSELoss'})
    assert losses.resolve('MSELoss') is losses.resolve('my_mse') is MSELoss


def test_an_unknown_distribution_behind_a_name_says_who_has_it():
    """`name@dist` never falls back to another distribution."""
    with pytest.raises(UnknownNameError, match='twinkle-core'):
        losses.resolve('mse@fake-nobody')
    assert losses.resolve('mse@Twinkle_Core') is MSELoss


def test_name_at_distribution_reaches_what_a_registration_shadows():
    """After an override the installed part is still there under its full name."""
    with losses.temporary('mse', Mine):
        assert losses.resolve('mse') is Mine
        assert losses.resolve('mse@twinkle-core') is MSELoss
        assert losses.resolve('MSELoss') is MSELoss


def test_a_registration_does_not_shadow_a_class_name_unasked():
    """A name that means an installed class is taken, unless it is that class."""
    with pytest.raises(AlreadyRegisteredError, match='MSELoss'):
        losses.register('mse-loss', Mine)
    losses.register('MSELoss', MSELoss)
    losses.unregister('MSELoss')
    with losses.temporary('mse-loss', Mine):
        assert losses.resolve('MSELoss') is Mine


def test_a_part_found_before_a_registration_never_hides_it():
    """While one thread resolves a name and another registers it anew, what is found afterwards is the registration."""
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            losses.resolve('mse')

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with losses.temporary('mse', Mine):
            assert losses.resolve('mse') is Mine
        assert losses.resolve('mse') is MSELoss
    stop.set()
    for thread in threads:
        thread.join()


def test_a_backend_may_accept_qualified_names_only():
    """`qualified_only` finds `<backend>.<name>`, by key or class name, and says what it accepts."""
    with optimizers.temporary('mega.default', optimizers.resolve('sgd')):
        assert optimizers.resolve('default', backend='mega', qualified_only=True) is optimizers.resolve('sgd')
        assert optimizers.resolve('mega.default', backend='mega', qualified_only=True) is optimizers.resolve('sgd')
        with pytest.raises(UnknownNameError, match=r'made for mega.*There are: mega\.default\.'):
            optimizers.resolve('adamw', backend='mega', qualified_only=True)


@pytest.mark.parametrize('name', ['', '_', '--', '@twinkle-core', '@'])
def test_a_name_of_nothing_means_nothing(name):
    """Names without a letter or digit find no part, not even one without a class name."""
    with pytest.raises(UnknownNameError):
        losses.resolve(name)


def test_a_missing_source_gives_its_pip_line_through_the_hub(fresh):
    """`smollm2://...` without its package is answered with what to install; a wrong scheme with the known ones."""
    from twinkle.errors import SourceError
    from twinkle.hub import fetch

    real = importlib.metadata.distributions
    fresh.setattr(
        importlib.metadata, 'distributions', lambda: (d for d in real() if 'smollm2' not in (d.metadata['Name'] or ''))
    )
    plugin_cache.refresh()
    assert 'smollm2' not in sources.names()
    with pytest.raises(MissingPartError, match='pip install twinkle-smollm2'):
        fetch('smollm2://135m-instruct')
    with pytest.raises(SourceError, match='hf://'):
        fetch('nosuch://x')


def test_an_import_is_spelt_as_the_class_is():
    """`from twinkle.model import transformersmodel` is no import, unlike a name in a registry."""
    import twinkle.model

    assert models.find('transformersmodel').class_name == 'TransformersModel'
    for name in ('transformersmodel', 'transformers_model', 'Transformersmodel'):
        with pytest.raises(AttributeError):
            getattr(twinkle.model, name)


def test_kinds_without_a_base_class_are_checked_by_their_methods():
    """What is missing is listed; a schedule is no optimizer, nor the other way round."""
    from torch import nn

    from twinkle.errors import InvalidPartError

    with pytest.raises(InvalidPartError, match='zero_grad'):
        optimizers.resolve(lr_schedulers.resolve('constant'))
    with pytest.raises(InvalidPartError, match='get_last_lr'):
        lr_schedulers.resolve(optimizers.resolve('adamw'))
    with pytest.raises(InvalidPartError, match=r'subclass or instance of twinkle\.loss'):
        losses.resolve(nn.CrossEntropyLoss)


def test_a_thousand_distributions_are_discovered_in_half_a_second(tmp_path):
    """In a fresh process, with nothing else counted; all of them are there."""
    for number in range(1000):
        info = tmp_path / f'fake_{number}-1.0.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: fake-{number}\nVersion: 1.0\n')
        (info / 'entry_points.txt').write_text(f'[twinkle.losses]\nloss_{number} = fake_{number}:Loss\n')
    code = (
        f'import sys, time\nsys.path.insert(0, {str(tmp_path)!r})\nfrom twinkle.registry import losses\n'
        'start = time.process_time()\nassert "loss_999" in losses.names()\nlosses.find("loss_500")\n'
        'print(time.process_time() - start)'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5


def test_a_cached_resolve_takes_microseconds():
    """The best of many: below 5 microseconds."""
    losses.resolve('cross_entropy')
    best = float('inf')
    for _ in range(20):
        start = time.process_time()
        for _ in range(1000):
            losses.resolve('cross_entropy')
        best = min(best, (time.process_time() - start) / 1000)
    assert best < 5e-6


def test_registries_of_their_own_do_not_know_each_other():
    """Two registries of one kind share what is installed, not what is registered."""
    one, two = Registry('made_up_kind', functions=True), Registry('made_up_kind', functions=True)
    one.register('f', len)
    assert one.is_registered('f')
    assert not two.is_registered('f')
    one.unregister('f')
