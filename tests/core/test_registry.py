"""Names and parts: spelling, qualification, registration at run time, what is refused and how."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fake_dists import LOSS, make_dist
from twinkle.errors import (
    AlreadyRegisteredError,
    AmbiguousNameError,
    ConfigError,
    InvalidPartError,
    MissingPackageError,
    PluginLoadError,
    UnknownNameError,
)
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.parts import fold
from twinkle.registry import Registry, executors, losses, models, optimizers, registries


class Focal(Loss):
    """A loss of this test."""

    def __call__(self, inputs, outputs, **kwargs):
        raise AssertionError('not called')


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install made-up distributions, each in a folder of its own; they are gone after the test."""
    before = set(sys.modules)

    def do(name, entry_points, **options):
        folder = make_dist(
            tmp_path / f'{name}-{options.get("version", "1.0")}-{len(list(tmp_path.iterdir()))}',
            name,
            entry_points,
            **options,
        )
        monkeypatch.syspath_prepend(str(folder))
        losses.refresh()

    yield do
    for module in set(sys.modules) - before:
        if module.startswith('fake_'):
            del sys.modules[module]
    monkeypatch.undo()
    losses.refresh()


@pytest.mark.parametrize(
    'spelling', ['cross_entropy', 'CrossEntropyLoss', 'cross-entropy', 'CROSS_ENTROPY', 'crossentropy', 'default']
)
def test_a_part_is_found_by_key_or_class_name_in_any_spelling(spelling):
    """Case, `_` and `-` make no difference; a class's name works where no key matches."""
    assert losses.resolve(spelling) is CrossEntropyLoss


@pytest.mark.parametrize('kind', sorted(registries))
def test_every_built_in_can_be_loaded(kind):
    """Each entry that is installed leads to a part of its kind."""
    registry = registries[kind]
    for entry in registry.entries():
        assert registry.resolve(f'{entry.name}@{entry.distribution}') is not None


def test_only_core_declares_an_unqualified_default():
    """Backends qualify their defaults."""
    for registry in registries.values():
        owners = {entry.distribution for entry in registry.entries() if fold(entry.name) == 'default'}
        assert owners <= {'twinkle-core'}


names = st.text('abcXYZ_-019', min_size=1, max_size=10).filter(lambda name: fold(name) != '')


@given(name=names, data=st.data())
def test_any_spelling_of_a_registered_name_finds_it(name, data):
    """However `_`, `-` and case are put into a name, it means the same part."""
    registry = Registry('made_up', functions=True)

    def part():
        return None

    registry.register(name, part)
    letters = [data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in fold(name)]
    separators = [data.draw(st.sampled_from(['', '_', '-'])) for _ in letters]
    spelling = ''.join(letter + separator for letter, separator in zip(letters, separators, strict=True))
    assert registry.resolve(spelling) is part


@given(st.lists(names, min_size=2, max_size=8, unique_by=fold))
def test_no_two_distinct_names_are_confused(several):
    """Names that differ by more than case, `_` and `-` lead to their own parts."""
    registry = Registry('made_up', functions=True)
    parts = {}
    for name in several:
        parts[name] = lambda: None
        registry.register(name, parts[name])
    assert all(registry.resolve(name) is part for name, part in parts.items())


def test_a_qualified_name_is_preferred_for_its_backend():
    """`megatron.default` comes before `default` when that backend asks, and for nobody else."""
    with losses.temporary('megatron.default', Focal):
        assert losses.resolve('default', backend='megatron') is Focal
        assert losses.resolve('default') is CrossEntropyLoss
        assert losses.resolve('default', backend='transformers') is CrossEntropyLoss
        assert losses.resolve('cross_entropy', backend='megatron') is CrossEntropyLoss


def test_import_paths_classes_instances_and_functions_are_parts():
    """`package.module:Name`, a class, an instance, a function where the kind allows it."""
    instance = Focal()
    assert losses.resolve('twinkle.loss:MSELoss').__name__ == 'MSELoss'
    assert losses.resolve(Focal) is Focal
    assert losses.resolve(instance) is instance
    assert losses.resolve(fold) is fold
    assert optimizers.resolve('adamw') is torch.optim.AdamW
    with pytest.raises(InvalidPartError, match='optimizers'):
        optimizers.resolve(fold)
    with pytest.raises(PluginLoadError, match='NoSuch'):
        losses.resolve('twinkle.loss:NoSuch')


def test_an_unknown_name_suggests_lists_and_imports_nothing():
    """CASES 20: a misspelt name is a LookupError and a ValueError that suggests the right one; nothing is imported for it."""
    code = (
        'import sys\nfrom twinkle.registry import losses\nfrom twinkle.errors import UnknownNameError\n'
        'try: losses.resolve("cross_entrpy")\n'
        'except UnknownNameError as error:\n'
        '    assert isinstance(error, LookupError) and isinstance(error, ValueError)\n'
        '    assert "cross_entropy" in str(error) and "mse" in str(error), error\n'
        'else: raise AssertionError\n'
        'assert "torch" not in sys.modules and "twinkle.loss" not in sys.modules'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize(
    ('registry', 'name', 'package'),
    [
        (models, 'MegatronModel', 'twinkle-megatron'),
        (executors, 'ray', 'twinkle-ray'),
        (models, 'megatron_model', 'twinkle-megatron'),
    ],
)
def test_a_part_of_a_package_that_is_not_installed_gives_its_pip_line(registry, name, package):
    """Known-but-missing packages are named; nothing else is used instead."""
    with pytest.raises(MissingPackageError, match=f'pip install {package}'):
        registry.resolve(name)


def test_importing_a_missing_backends_model_gives_its_pip_line():
    """`from twinkle.model import MegatronModel` without the package says how to get it; another name is an ImportError."""
    with pytest.raises(ImportError, match='pip install twinkle-megatron'):
        from twinkle.model import MegatronModel  # noqa: F401
    with pytest.raises(ImportError, match='NoSuchModel'):
        from twinkle.model import NoSuchModel  # noqa: F401


def test_registration_refuses_to_shadow_and_leaves_no_trace():
    """A taken name, a part of another kind, a bad name: refused, and the registry is what it was."""
    before = losses.names()
    with pytest.raises(AlreadyRegisteredError, match='override=True'):
        losses.register('Cross-Entropy', Focal)
    with pytest.raises(InvalidPartError):
        losses.register('my_focal', 3)
    with pytest.raises(InvalidPartError, match='__call__'):
        losses.register('abstract', Loss)
    with pytest.raises(ConfigError):
        losses.register('_-', Focal)
    assert losses.names() == before
    assert losses.resolve('cross_entropy') is CrossEntropyLoss


def test_register_unregister_override_and_decorate():
    """A registered part is found and gone again; with override it stands before the installed one."""
    losses.register('my_focal', Focal)
    assert losses.resolve('my_focal') is Focal
    assert losses.is_registered('my_focal')
    losses.unregister('my_focal')
    assert not losses.is_registered('my_focal')
    losses.register('cross_entropy', Focal, override=True)
    assert losses.resolve('cross_entropy') is Focal
    losses.unregister('cross_entropy')
    assert losses.resolve('cross_entropy') is CrossEntropyLoss
    with pytest.raises(UnknownNameError, match='not registered at run time'):
        losses.unregister('cross_entropy')

    @losses.register('decorated')
    class Decorated(Focal):
        pass

    assert losses.resolve('decorated') is Decorated
    losses.unregister('decorated')


def test_temporary_registrations_nest_and_end_with_exceptions():
    """What was shadowed is back, in the order of nesting, also after an exception."""
    other = type('Other', (Focal,), {})
    with losses.temporary('cross_entropy', Focal):
        with pytest.raises(RuntimeError, match='inside'), losses.temporary('cross_entropy', other):
            assert losses.resolve('cross_entropy') is other
            raise RuntimeError('inside')
        assert losses.resolve('cross_entropy') is Focal
    assert losses.resolve('cross_entropy') is CrossEntropyLoss


def test_build_passes_options_and_names_those_it_does_not_take():
    """Options go to a class; a wrong one, or any for an instance, is refused with what is possible."""
    assert losses.build('chunked_cross_entropy', chunk_size=7).chunk_size == 7
    with pytest.raises(ConfigError, match='chunk_size'):
        losses.build('chunked_cross_entropy', chunks=7)
    with pytest.raises(ConfigError, match='built already'):
        losses.build(Focal(), gamma=2)


def test_two_distributions_with_one_name_are_ambiguous_when_asked(install):
    """CASES 15: both are named with the fix; `name@distribution` settles it; other names are not affected."""
    for letter in 'ab':
        install(
            f'fake-{letter}',
            {'twinkle.losses': {'twin_loss': f'fake_{letter}_mod:Twin', f'own_{letter}': f'fake_{letter}_mod:Twin'}},
            modules={f'fake_{letter}_mod': LOSS.format(name='Twin')},
        )
    for spelling in ('twin_loss', 'TwinLoss', 'twin-loss'):
        with pytest.raises(AmbiguousNameError, match=r'fake-a .*fake-b .*twin_loss@fake-a or twin_loss@fake-b'):
            losses.resolve(spelling)
    assert losses.resolve('twin_loss@fake-b').__module__ == 'fake_b_mod'
    assert losses.resolve('own_a').__module__ == 'fake_a_mod'
    assert losses.resolve('cross_entropy') is CrossEntropyLoss


def test_keys_that_fold_together_are_ambiguous_in_every_spelling(install):
    """`my_loss` of one distribution and `MyLoss` of another are the same name."""
    install('fake-a', {'twinkle.losses': {'my_loss': 'fake_a2:One'}}, modules={'fake_a2': LOSS.format(name='One')})
    install('fake-b', {'twinkle.losses': {'MyLoss': 'fake_b2:Two'}}, modules={'fake_b2': LOSS.format(name='Two')})
    for spelling in ('my_loss', 'MyLoss', 'my-loss'):
        with pytest.raises(AmbiguousNameError):
            losses.resolve(spelling)


def test_an_identical_duplicate_is_one_entry(install):
    """CASES 15: the same distribution seen twice (an editable install) is no conflict."""
    for _ in range(2):
        install(
            'fake-same', {'twinkle.losses': {'same': 'fake_same:Same'}}, modules={'fake_same': LOSS.format(name='Same')}
        )
    assert losses.resolve('same').__name__ == 'Same'
    assert losses.names().count('same') == 1


def test_a_broken_plugin_breaks_its_own_names_only(install):
    """CASES 16: the good one works; the broken one raises with its cause, distribution and version."""
    install(
        'fake-good', {'twinkle.losses': {'good': 'fake_good:Good'}}, modules={'fake_good': LOSS.format(name='Good')}
    )
    install(
        'fake-broken', {'twinkle.losses': {'broken': 'fake_broken:X'}}, version='3.1', modules={'fake_broken': '1 / 0'}
    )
    assert losses.resolve('good').__name__ == 'Good'
    with pytest.raises(PluginLoadError, match=r'fake-broken 3\.1.*ZeroDivisionError') as caught:
        losses.resolve('broken')
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert losses.find('broken').state == 'failed'
    assert 'broken' in losses.names()


def test_a_part_of_the_wrong_kind_is_refused_with_its_owner(install):
    """An entry that leads to no loss is refused, naming the distribution."""
    install(
        'fake-wrong', {'twinkle.losses': {'wrong': 'fake_wrong:Thing'}}, modules={'fake_wrong': 'class Thing: pass'}
    )
    with pytest.raises(InvalidPartError, match='fake-wrong'):
        losses.resolve('wrong')


@pytest.mark.parametrize(
    ('needs', 'says'),
    [(['twinkle-core>=99'], r'>=99'), (['twinkle-core<0.1'], r'<0\.1'), (['twinkle-core>=0.1'], None)],
)
def test_an_unmet_need_of_core_is_the_reason_of_failure(install, needs, says):
    """A plugin whose `Requires-Dist: twinkle-core` is unmet fails with that reason, not with an import error."""
    install(
        'fake-need',
        {'twinkle.losses': {'needy': 'fake_need:Needy'}},
        modules={'fake_need': LOSS.format(name='Needy')},
        requires=needs,
    )
    if says is None:
        assert losses.resolve('needy').__name__ == 'Needy'
    else:
        with pytest.raises(PluginLoadError, match=says):
            losses.resolve('needy')


@pytest.mark.parametrize(('api', 'works'), [('v1', True), ('v2', False), ('v0', False)])
def test_a_plugin_may_say_which_plugin_api_it_was_written_for(install, api, works):
    """Another plugin API than core's is the reason of failure."""
    points = {'twinkle.losses': {'apiloss': 'fake_api:Api'}, 'twinkle.plugin_api': {api: 'fake_api'}}
    install('fake-api', points, modules={'fake_api': LOSS.format(name='Api')})
    if works:
        assert losses.resolve('apiloss').__name__ == 'Api'
    else:
        with pytest.raises(PluginLoadError, match=f'plugin API {api[1:]}'):
            losses.resolve('apiloss')


def test_allow_and_deny_lists_keep_distributions_out(install, monkeypatch):
    """TWINKLE_PLUGINS admits only what it lists (and twinkle's own); TWINKLE_DISABLE_PLUGINS keeps out; an unmatched name warns."""
    install(
        'fake-some', {'twinkle.losses': {'someloss': 'fake_some:Some'}}, modules={'fake_some': LOSS.format(name='Some')}
    )
    monkeypatch.setenv('TWINKLE_DISABLE_PLUGINS', 'Fake_Some')
    losses.refresh()
    with pytest.raises(PluginLoadError, match='disabled'):
        losses.resolve('someloss')
    assert 'someloss' not in losses.names()
    monkeypatch.delenv('TWINKLE_DISABLE_PLUGINS')
    monkeypatch.setenv('TWINKLE_PLUGINS', '')
    losses.refresh()
    with pytest.raises(PluginLoadError, match='disabled'):
        losses.resolve('someloss')
    assert losses.resolve('cross_entropy') is CrossEntropyLoss
    monkeypatch.setenv('TWINKLE_PLUGINS', 'fake-some, no-such')
    losses.refresh()
    with pytest.warns(UserWarning, match='no-such'):
        assert losses.resolve('someloss').__name__ == 'Some'


def test_a_disabled_twin_does_not_make_a_name_ambiguous(install, monkeypatch):
    """Keeping one of two conflicting distributions out settles the conflict."""
    for letter in 'ab':
        install(
            f'fake-{letter}',
            {'twinkle.losses': {'twin2': f'fake_{letter}3:Twin'}},
            modules={f'fake_{letter}3': LOSS.format(name='Twin')},
        )
    monkeypatch.setenv('TWINKLE_DISABLE_PLUGINS', 'fake-a')
    losses.refresh()
    assert losses.resolve('twin2').__module__ == 'fake_b3'


def test_sixteen_threads_get_one_import(install):
    """Asked by many threads at once, a plugin's module runs once and all get the same part."""
    code = (
        LOSS.format(name='Slow')
        + '\nimport builtins, time\nbuiltins.fake_imports = getattr(builtins, "fake_imports", 0) + 1\ntime.sleep(0.2)\n'
    )
    install('fake-slow', {'twinkle.losses': {'slow': 'fake_slow:Slow'}}, modules={'fake_slow': code})
    import builtins

    builtins.fake_imports = 0
    barrier, got = threading.Barrier(16), []

    def ask():
        barrier.wait()
        got.append(losses.resolve('slow'))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 16
    assert len(set(got)) == 1
    assert builtins.fake_imports == 1
    del builtins.fake_imports


def test_a_module_may_resolve_other_parts_while_it_is_imported(install):
    """Import re-entrancy: a plugin's module may use the registry as it is being imported by it."""
    code = 'from twinkle.registry import losses\nBase = losses.resolve("cross_entropy")\nclass Derived(Base): pass\n'
    install('fake-reenter', {'twinkle.losses': {'derived': 'fake_reenter:Derived'}}, modules={'fake_reenter': code})
    assert issubclass(losses.resolve('derived'), CrossEntropyLoss)
