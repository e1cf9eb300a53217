"""The rules of the house: which way imports point, what is public, what each package declares, what the README promises."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

import twinkle
from tests.helpers.workspace import ROOT, Package, imports_of, noxfile_list, packages, sessions

PACKAGES = packages()
CORE = PACKAGES[0]
each_package = pytest.mark.parametrize('package', PACKAGES, ids=lambda package: package.name)

# Core's modules from low to high. A module imports its own layer and those before it.
LAYERS = [
    {'data_format', 'errors', 'hookspecs', 'known_packages', 'launcher', 'logging'},
    {'naming', 'parts', 'plugins', 'registry', 'runtime_parts'},
    {'current', 'device_mesh', 'dispatch', 'hub', 'remote', 'remote_code'},
    {
        'advantage', 'checkpoint', 'loss', 'lr_scheduler', 'metric', 'optimizer', 'patch', 'preprocessor', 'processor', 'reward',
        'template', 'tracker',
    },
    {'dataloader', 'dataset'},
    {'model'},
    {'cli', 'runtime'},
    {'testing'},
]  # fmt: skip
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}
# Arrows up, inside a function: what is only done when it is asked for.
UPWARD = {('registry', 'remote_code')}
NEVER_IN_CORE = {'accelerate', 'mcore_bridge', 'megatron', 'peft', 'ray', 'trl', 'vllm'}


def _part(module: str) -> str:
    """The part of core that a module belongs to: `loss` for `twinkle.loss.base`."""
    return module.split('.')[1] if '.' in module else ''


def _core_imports():
    for path in CORE.modules:
        for found in imports_of(path):
            yield CORE.module_name(path), found


def test_core_imports_no_backend():
    """Neither another package of the workspace, nor what backends stand on; not in functions, and not for typing."""
    others = {package.source.name for package in PACKAGES} - {'twinkle'}
    wrong = [
        f'{module}:{found.line} imports {found.module}'
        for module, found in _core_imports()
        if found.module.split('.')[0] in others | NEVER_IN_CORE
    ]
    assert not wrong


def test_core_imports_transformers_in_functions_of_template_and_processor_only():
    """The extra `text` is needed by what tokenizes, when it does."""
    wrong = [
        f'{module}:{found.line} imports {found.module} ({found.where})'
        for module, found in _core_imports()
        if found.module.split('.')[0] in ('transformers', 'tokenizers')
        and not (found.where != 'top' and _part(module) in ('template', 'processor'))
    ]
    assert not wrong


def test_every_part_of_core_has_a_layer():
    """A new module is given its place in LAYERS."""
    parts = {_part(CORE.module_name(path)) for path in CORE.modules} - {''}
    assert not parts - set(LAYER_OF)


def test_arrows_inside_core_point_down():
    """A part imports its own layer and lower ones. Annotations may name what is above: nothing is imported for them."""
    public = set(twinkle._LAZY)
    wrong = []
    for module, found in _core_imports():
        source, target = _part(module), _part(found.module)
        if found.module.split('.')[0] != 'twinkle' or found.where == 'typing' or target in ('', '__version__'):
            continue
        if target in public - set(LAYER_OF):
            wrong.append(f'{module}:{found.line} takes {target} from twinkle: import it from {twinkle._LAZY[target]}')
        elif found.where == 'function' and (source, target) in UPWARD:
            continue
        elif not source or LAYER_OF[target] > LAYER_OF[source]:
            wrong.append(f'{module}:{found.line} imports {found.module}, which is above it')
    assert not wrong


@each_package
def test_packages_know_core_and_themselves_only(package):
    """No backend imports another, and no plugin a backend."""
    allowed = {'twinkle', package.source.name}
    others = {other.source.name for other in PACKAGES} - allowed
    wrong = [
        f'{package.module_name(path)}:{found.line} imports {found.module}'
        for path in package.modules
        for found in imports_of(path)
        if found.module.split('.')[0] in others
    ]
    assert not wrong


@each_package
def test_what_is_imported_is_declared(package):
    """Each third-party package that a module imports is a dependency, or one of an extra, of its own distribution or of core."""
    needs = {Requirement(need).name for need in package.requirements + CORE.requirements}
    declared = {need.lower().replace('-', '_') for need in needs}
    declared |= {'twinkle', package.source.name, *sys.stdlib_module_names}
    # Brought by something declared that cannot be without it; the kit is imported by pytest.
    declared |= {'_pytest', 'numpy', 'pyarrow', 'pytest', 'tokenizers'}
    wrong = {
        f'{package.module_name(path)}:{found.line} imports {found.module}'
        for path in package.modules
        for found in imports_of(path)
        if found.module.split('.')[0] not in declared
    }
    assert not wrong


def _order(name: str) -> tuple[bool, bool, str]:
    """CONSTANTS, then Classes, then functions."""
    return not name.isupper(), not name[0].isupper(), name


def _public_names(package: Package, path) -> set[str]:
    """What an `__init__` defines or takes from its own modules, without a leading underscore."""
    module, names = package.module_name(path), set()
    body = ast.parse(path.read_text()).body
    for_typing = [inner for block in body if isinstance(block, ast.If) for inner in block.body]
    for node in body + for_typing:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith(f'{module}.'):
            names |= {alias.asname or alias.name for alias in node.names}
    return {name for name in names if not name.startswith('_')}


@each_package
def test_all_lists_the_public_names_in_order(package):
    """Each package's `__all__` is sorted, names what it defines or takes from its own modules, and each of it can be had."""
    for path in package.modules:
        if path.name != '__init__.py' or not _public_names(package, path):
            continue
        name = package.module_name(path)
        module = importlib.import_module(name)
        listed = module.__all__
        assert list(listed) == sorted(listed, key=_order), f'{name}: sort __all__'
        assert len(set(listed)) == len(listed), f'{name}: a name twice in __all__'
        missing = _public_names(package, path) - set(listed)
        assert not missing, f'{name}: add to __all__, or name with an underscore: {sorted(missing)}'
        for public in listed:
            assert getattr(module, public, None) is not None, f'{name}.{public} is in __all__ and not there'


@each_package
def test_a_module_that_says_what_is_public_has_it(package):
    """`__all__` of every module is sorted and names only what is there; every class and function in it is documented."""
    for path in package.modules:
        name = package.module_name(path)
        if name.startswith('twinkle.testing.conformance') or name.endswith('__main__'):
            continue  # collected by pytest, with its own imports
        module = importlib.import_module(name)
        listed = getattr(module, '__all__', [])
        assert list(listed) == sorted(listed, key=_order), f'{name}: sort __all__'
        for public in listed:
            found = getattr(module, public)
            if inspect.isclass(found) or inspect.isfunction(found):
                assert found.__doc__, f'{name}.{public} has no docstring'


@each_package
def test_installed_entry_points_are_those_declared(package):
    """Entry points are metadata: an editable install does not see a change to `pyproject.toml` until it is renewed."""
    renew = f'The installation is stale. Renew it: python -m pip install --no-deps -e {package.path}'
    try:
        dist = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f'{package.name} is not installed. Install it: python -m pip install -e {package.path}')
    installed = {(point.group, point.name, point.value) for point in dist.entry_points}
    assert installed == package.entry_points, renew
    assert dist.version == package.project['version'], renew
    wanted = {Requirement(need).name for need in package.project['dependencies']}
    needs = [Requirement(need) for need in dist.requires or []]
    assert {need.name for need in needs if 'extra' not in str(need.marker)} == wanted, renew


@each_package
def test_every_entry_point_leads_somewhere(package):
    """Each target can be imported; a plugin API is a number."""
    for group, name, target in sorted(package.entry_points):
        if group == 'twinkle.plugin_api':
            assert re.fullmatch(r'v\d+', name)
            assert target == package.source.name
            continue
        point = importlib.metadata.EntryPoint(name, target, group)
        assert point.load() is not None, f'{group}: {name} = {target}'


@each_package
def test_metadata_is_wide_and_complete(package):
    """Ranges with a lower bound, never pins; licence, README, type marker and the Python version stated."""
    for need in map(Requirement, package.requirements):
        operators = {clause.operator for clause in need.specifier}
        assert '>=' in operators, f'{need}: say the oldest version that works'
        assert operators <= {'>=', '<', '!='}, f'{need}: only constraints.txt pins'
        upper = need.name.startswith('twinkle-')
        assert upper or '<' not in operators, f'{need}: an upper bound would hold everybody back'
    project = package.project
    assert project['license'] == 'Apache-2.0'
    assert project['license-files'] == ['LICENSE']
    assert project['requires-python'] == '>=3.10'
    assert (package.folder / project['readme']).read_text().startswith(f'# {package.name}\n')
    assert (package.source / 'py.typed').read_text() == ''
    assert 'Typing :: Typed' in project['classifiers']


def test_versions_agree():
    """The packages are released together; each says so, and asks for a core of its own series."""
    versions = {package.name: package.project['version'] for package in PACKAGES}
    assert set(versions.values()) == {twinkle.__version__}, versions
    for package in PACKAGES[1:]:
        (need,) = (n for n in map(Requirement, package.project['dependencies']) if n.name == 'twinkle-core')
        assert need.specifier.contains(twinkle.__version__)


def test_licences_are_identical():
    """Every package carries the licence of the whole."""
    text = (ROOT / 'LICENSE').read_bytes()
    for package in PACKAGES:
        assert (package.folder / 'LICENSE').read_bytes() == text, package.path


def test_constraints_pin_what_is_asked_for():
    """Each dependency of the packages and each tool of noxfile.py is pinned exactly, to a version that its range allows."""
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith('#')]
    assert [pin.name for pin in pins] == sorted((pin.name for pin in pins), key=str.lower)
    assert all([clause.operator for clause in pin.specifier] == ['=='] for pin in pins)
    version = {pin.name.lower().replace('_', '-'): next(iter(pin.specifier)).version for pin in pins}
    installed = {extra for part in noxfile_list('PACKAGES') for extra in re.findall(r'\w+', part.partition('[')[2])}
    for package in PACKAGES:
        optional = package.project.get('optional-dependencies', {})
        needs = [*package.project['dependencies'], *(n for extra in installed for n in optional.get(extra, []))]
        for need in map(Requirement, needs):
            if need.name.startswith('twinkle-'):
                continue
            pinned = version.get(need.name.lower().replace('_', '-'))
            assert pinned, f'{need.name}, which {package.name} needs, is not pinned in constraints.txt'
            assert need.specifier.contains(pinned), (
                f'constraints.txt has {need.name} {pinned}, {package.name} wants {need}'
            )
    tools = {Requirement(tool).name for tool in [*noxfile_list('TEST_TOOLS'), *noxfile_list('LINT_TOOLS')]}
    assert tools <= set(version)


def test_sessions_and_tools_know_every_package():
    """A new package is installed by nox and checked by mypy, and ruff sorts its imports as the workspace's own."""
    assert {part.partition('[')[0] for part in noxfile_list('PACKAGES')} == {package.path for package in PACKAGES}
    tools = Package(ROOT).pyproject['tool']
    names = {package.source.name for package in PACKAGES}
    assert set(tools['mypy']['packages']) == names
    assert set(tools['mypy']['mypy_path'].split(':')) == {f'{package.path}/src' for package in PACKAGES}
    assert names <= set(tools['ruff']['lint']['isort']['known-first-party'])


def test_strictly_typed_modules_are_there():
    """The registry, plugins and the protocol are among what mypy checks strictly, and each name is a module."""
    (strict,) = (part['module'] for part in Package(ROOT).pyproject['tool']['mypy']['overrides'])
    assert {'twinkle.registry', 'twinkle.plugins', 'twinkle.model.protocol'} <= set(strict)
    modules = {package.module_name(path) for package in PACKAGES for path in package.modules}
    assert set(strict) <= modules


def _files() -> list:
    folders = [ROOT / name for name in ('benchmarks', 'cookbook', 'tests')] + [package.folder for package in PACKAGES]
    files = [path for folder in folders for path in folder.rglob('*.py')]
    return [
        path
        for path in files
        if not any(part.startswith('.') or part == 'build' for part in path.relative_to(ROOT).parts)
    ]


def test_no_file_is_over_500_lines():
    """A file that grows past that usually holds two ideas."""
    long = {
        str(path.relative_to(ROOT)): count for path in _files() if (count := len(path.read_text().splitlines())) > 500
    }
    assert not long


# What runs code that it finds in a file, by module or by the end of a called name.
UNPICKLING_MODULES = {'cloudpickle', 'dill', 'joblib', 'marshal', 'pickle', 'shelve'}
UNPICKLING_CALLS = ('torch.load', 'read_pickle', 'load_state_dict_from_url')


def _unpickling(source: str) -> list[str]:
    """Each place of a module's text that could unpickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split('.')[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ''
            names = [module.split('.')[0], *(f'{module}.{alias.name}' for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.keyword) and node.arg == 'allow_pickle' and ast.unparse(node.value) != 'False':
            names = ['pickle']
        found += [
            f'{node.lineno}: {name}' for name in names if name in UNPICKLING_MODULES or name.endswith(UNPICKLING_CALLS)
        ]
    return found


def test_nothing_is_unpickled():
    """No module of a package, the cookbook or the benchmarks imports a pickling module or calls what unpickles."""
    for harmful in (
        'import pickle',
        'def f():\n    from dill import loads',
        "torch.load('x', weights_only=True)",
        'from torch import load',
        'load = torch.load',
        'np.load(x, allow_pickle=True)',
    ):
        assert _unpickling(harmful), f'the search does not see {harmful!r}'
    wrong = [
        f'{path.relative_to(ROOT)}:{place}'
        for path in _files()
        if 'tests' not in path.relative_to(ROOT).parts
        for place in _unpickling(path.read_text())
    ]
    assert not wrong


# Folders of one machine, and hosts that packages are fetched from: each user has others.
OF_ONE_MACHINE = re.compile(r'(?<![\w.~}])/(?:work|home|root|Users|mnt)/|[A-Z]:\\+Users')
REGISTRY_HOST = re.compile(
    r'pypi\.org|pythonhosted\.org|registry\.npmjs|(?:--|PIP_)(?:extra-)?index[-_]url', re.IGNORECASE
)


def test_no_file_names_a_machine_or_a_registry():
    """Nothing in the repository holds an absolute path of somebody's machine, or the host of a package registry."""
    for said in (f'see {"/"}work/x', f"'{'/'}home/me/models'", f'https://py{"pi"}.org/simple', f'--index{"-"}url x'):
        assert OF_ONE_MACHINE.search(said) or REGISTRY_HOST.search(said), f'the search does not see {said!r}'
    if not (ROOT / '.git').exists() or not shutil.which('git'):
        pytest.skip('not a git checkout: which files belong to the repository is not known')
    listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wrong = []
    for name in filter(None, listed.split('\0')):
        if not (ROOT / name).is_file():
            continue  # deleted, not committed yet
        for number, line in enumerate((ROOT / name).read_text(errors='replace').splitlines(), 1):
            if OF_ONE_MACHINE.search(line) or REGISTRY_HOST.search(line):
                wrong.append(f'{name}:{number}: {line.strip()[:120]}')
    assert not wrong


def test_the_source_runs_on_the_oldest_python():
    """Every file is valid Python 3.10."""
    for path in _files():
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


def test_tests_say_what_they_hold():
    """Every test function begins with a docstring."""
    silent = [
        f'{path.relative_to(ROOT)}:{node.lineno}'
        for path in _files()
        if path.name.startswith('test_')
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith('test_') and ast.get_docstring(node) is None
    ]
    assert not silent


def test_the_readmes_commands_are_noxs_sessions():
    """The two commands stand in the README, .ci/run runs the second, and every session is named there and exists."""
    readme, contributing = (ROOT / 'README.md').read_text(), (ROOT / 'CONTRIBUTING.md').read_text()
    for session in ('demo', 'tests'):
        assert f'\npython -m pip install nox && nox -s {session}\n' in readme
    assert (ROOT / '.ci' / 'run').read_text().endswith('\npython -m pip install nox && nox -s tests\n')
    used = {
        name
        for text in (readme, contributing)
        for group in re.findall(r'nox -s ((?:[a-z_]+ ?)+)', text)
        for name in group.split()
    }
    assert not used - set(sessions())
    for session in sessions():
        assert f'`{session}`' in readme or f'nox -s {session}' in readme, f'README.md does not mention {session}'


def test_the_ci_script_can_be_run():
    """It is executable."""
    assert (ROOT / '.ci' / 'run').stat().st_mode & 0o111
