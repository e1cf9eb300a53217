"""What is built and installed, for real: wheels, and fresh environments with one, several, conflicting and broken distributions."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.environments import Environment, build, run
from tests.helpers.fake_dists import LOSS
from tests.helpers.models import tiny_llama_dir
from tests.helpers.workspace import packages

pytestmark = pytest.mark.packaging

PACKAGES = packages()
FOCAL = 'twinkle-example-focal-loss'

TRAIN = """
from twinkle.model import TransformersModel
from peft import LoraConfig

model = TransformersModel(model_id={model!r}, mixed_precision='no')
model.add_adapter_to_model('sft', LoraConfig(r=2, target_modules='all-linear'))
model.set_loss({loss!r})
model.set_optimizer('default', lr=1e-2)
row = dict(input_ids=[1, 2, 3, 4], labels=[2, 3, 4, -100])
first, last = [(model.forward_backward(inputs=[row])['loss'], model.clip_grad_and_step())[0] for _ in range(5)][::4]
assert 0 < last < first, (first, last)
print(model.get_train_configs())
print(model.save('last', output_dir='output'))
"""


@pytest.fixture(scope='module')
def wheels(tmp_path_factory) -> Path:
    """A folder with a wheel of every package of the workspace."""
    out = tmp_path_factory.mktemp('wheels')
    for package in PACKAGES:
        build(package.folder, out)
    return out


@pytest.fixture(scope='module')
def strangers(wheels, tmp_path_factory) -> Path:
    """Adds wheels of distributions that conflict with the example plugin, or are broken."""
    _write(
        tmp_path_factory.mktemp('other'),
        'other-focal',
        {'focal': 'other_focal:FocalLoss'},
        LOSS.format(name='FocalLoss'),
    )
    code = 'import a_package_that_nobody_has\n'
    _write(
        tmp_path_factory.mktemp('broken'),
        'broken-losses',
        {'broken': 'broken_losses:BrokenLoss'},
        code,
        version='3.2.1',
    )
    for folder in ('other0', 'broken0'):
        build(tmp_path_factory.getbasetemp() / folder, wheels)
    return wheels


def _write(folder: Path, name: str, points: dict[str, str], code: str, version: str = '1.0') -> None:
    """A source tree of a plugin with one module."""
    module = name.replace('-', '_')
    (folder / f'{module}.py').write_text(code)
    lines = '\n'.join(f'{key} = "{target}"' for key, target in points.items())
    (folder / 'pyproject.toml').write_text(f"""
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = ["twinkle-core>=0.1"]

[project.entry-points."twinkle.losses"]
{lines}

[tool.hatch.build.targets.wheel]
include = ["{module}.py"]
""")


@pytest.fixture
def environment(wheels, tmp_path) -> Environment:
    """An empty environment."""
    return Environment(tmp_path / 'env', wheels)


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> str:
    """A tiny model's folder."""
    return tiny_llama_dir(tmp_path_factory.mktemp('llama'))


def _losses(environment: Environment) -> dict[str, dict[str, str]]:
    """The losses that are listed there, by name."""
    listed = environment.script(
        'import sys, twinkle.cli; sys.exit(twinkle.cli.main(["plugins", "list", "losses", "--json"]))'
    )
    return {part['name']: part for part in json.loads(listed)['parts']}


@pytest.mark.parametrize('package', PACKAGES, ids=lambda package: package.name)
def test_a_wheel_holds_the_package_and_nothing_else(wheels, package):
    """Every file of the source, the licence and the metadata; no tests, nothing of the workspace."""
    (path,) = wheels.glob(f'{package.name.replace("-", "_")}-*.whl')
    assert path.name.endswith('-py3-none-any.whl')
    with zipfile.ZipFile(path) as wheel:
        held = set(wheel.namelist())
        info = f'{package.name.replace("-", "_")}-{package.project["version"]}.dist-info'
        assert wheel.read(f'{info}/licenses/LICENSE') == (package.folder / 'LICENSE').read_bytes()
    source = {
        file.relative_to(package.source.parent).as_posix()
        for file in package.source.rglob('*')
        if file.is_file() and '__pycache__' not in file.parts and not any(part.startswith('.') for part in file.parts)
    }
    assert {name for name in held if not name.startswith(info)} == source
    assert f'{package.source.name}/py.typed' in held
    assert not [name for name in held if {'tests', 'test'} & set(name.split('/'))]


@pytest.mark.parametrize('package', PACKAGES, ids=lambda package: package.name)
def test_a_wheels_metadata_is_what_its_project_says(wheels, package):
    """Name, version, licence, README, wide ranges and entry points."""
    (path,) = wheels.glob(f'{package.name.replace("-", "_")}-*.whl')
    (distribution,) = importlib.metadata.distributions(path=[str(path)])
    metadata = distribution.metadata
    assert metadata['Name'] == package.name
    assert distribution.version == package.project['version']
    assert metadata['License-Expression'] == 'Apache-2.0'
    assert metadata['License-File'] == 'LICENSE'
    assert metadata['Requires-Python'] == '>=3.10'
    assert metadata['Summary'] == package.project['description']
    assert str(metadata.get_payload()).startswith(f'# {package.name}')
    assert {(point.group, point.name, point.value) for point in distribution.entry_points} == package.entry_points
    needs = [Requirement(need) for need in distribution.requires or []]
    assert len(needs) == len(package.requirements)
    assert {clause.operator for need in needs for clause in need.specifier} <= {'>=', '<', '!='}


def test_core_alone(environment):
    """Core imports without a backend, lists what it has, and says what to install for what it has not."""
    environment.install('twinkle-core')
    for absent in ('transformers', 'peft', 'accelerate', 'twinkle_hf'):
        assert environment.script(f'import importlib.util; print(importlib.util.find_spec({absent!r}))') == 'None'
    where = environment.script('import sys, twinkle; print(twinkle.__file__, "torch" in sys.modules)')
    assert where.startswith(str(environment.site))
    assert where.endswith('False')

    listed = json.loads(environment.program('twinkle', 'plugins', 'list', '--json'))['parts']
    assert {part['distribution'] for part in listed} == {'twinkle-core'}
    assert {'losses', 'optimizers', 'templates', 'sources'} <= {part['kind'] for part in listed}
    assert 'Nothing is wrong.' in environment.program('twinkle', 'doctor')

    error = environment.script('from twinkle.model import TransformersModel', fails=True)
    assert 'pip install twinkle-hf' in error
    error = environment.script('from twinkle.model import MegatronModel', fails=True)
    assert 'pip install twinkle-megatron' in error
    error = environment.script("from twinkle.template import Template; Template('x').tokenizer", fails=True)
    assert "pip install 'twinkle-core[text]'" in error


def test_core_alone_holds_the_conformance_kit(environment):
    """A backend's author needs core and pytest: the toy backend passes, from the wheel."""
    environment.link('pytest')
    environment.install('twinkle-core')
    kit = ['-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--pyargs', 'twinkle.testing.conformance']
    printed = run(
        [str(environment.python), *kit, '--twinkle-model', 'twinkle.testing:ToyModel'], cwd=environment.folder
    )
    assert ' passed' in printed
    assert 'failed' not in printed


def test_core_and_the_transformers_backend_train(environment, model):
    """With `twinkle-hf` the class is there, trains, and saves what plain PEFT loads."""
    environment.install('twinkle-hf')
    printed = environment.script(TRAIN.format(model=model, loss='default'))
    assert 'CrossEntropyLoss' in printed
    folder = printed.splitlines()[-1]
    environment.script(f"""
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({model!r}), {folder!r})
assert any('lora_B' in name and p.abs().sum() > 0 for name, p in model.named_parameters())
""")
    error = environment.script(TRAIN.format(model=model, loss='focal'), fails=True)
    assert 'UnknownNameError' in error


def test_an_installed_plugin_is_found_by_name(environment, model):
    """The example plugin's loss trains by its name, and is gone after uninstalling."""
    environment.install('twinkle-hf', FOCAL)
    assert 'FocalLoss' in environment.script(TRAIN.format(model=model, loss='focal'))
    assert _losses(environment)['focal']['distribution'] == FOCAL
    shown = environment.program('twinkle', 'plugins', 'show', 'focal')
    for said in (FOCAL, '0.1.0', 'twinkle_example_focal_loss:FocalLoss', 'loaded'):
        assert said in shown
    environment.pip('uninstall', '--yes', FOCAL)
    assert 'focal' not in _losses(environment)
    assert 'focal' in environment.program('twinkle', 'plugins', 'show', 'focal', fails=True)
    error = environment.script("from twinkle import losses; losses.resolve('focal')", fails=True)
    assert "Unknown name 'focal' in losses" in error


def test_two_distributions_that_claim_a_name(environment, strangers):
    """The name is ambiguous when it is asked for, never before; `name@distribution` settles it, and so does uninstalling one."""
    environment.install(FOCAL, 'other-focal')
    ask = 'from twinkle import losses; print(losses.resolve({!r}).__module__)'
    error = environment.script(ask.format('focal'), fails=True)
    for said in ('AmbiguousNameError', f'{FOCAL} 0.1.0', 'other-focal 1.0', 'focal@other-focal', f'focal@{FOCAL}'):
        assert said in error
    assert environment.script(ask.format('focal@other-focal')) == 'other_focal'
    assert environment.script(ask.format(f'focal@{FOCAL}')) == 'twinkle_example_focal_loss'
    assert environment.script(ask.format('mse')) == 'twinkle.loss.mse'
    assert (
        environment.script(ask.format('focal'), TWINKLE_DISABLE_PLUGINS='other-focal') == 'twinkle_example_focal_loss'
    )
    assert environment.script(ask.format('focal'), TWINKLE_PLUGINS='other-focal') == 'other_focal'
    assert 'focal@other-focal' in environment.program('twinkle', 'doctor', fails=True)
    environment.pip('uninstall', '--yes', FOCAL)
    assert environment.script(ask.format('focal')) == 'other_focal'


def test_a_broken_distribution_breaks_its_own_names_only(environment, strangers):
    """Its name raises with the cause, the distribution and the way out; all others work; uninstalled, nothing is wrong."""
    environment.install(FOCAL, 'broken-losses')
    error = environment.script("from twinkle import losses; losses.resolve('broken')", fails=True)
    for said in (
        'PluginLoadError',
        'broken-losses 3.2.1',
        'ModuleNotFoundError',
        'a_package_that_nobody_has',
        'pip uninstall',
    ):
        assert said in error
    assert environment.script("from twinkle import losses; print(losses.resolve('focal').__name__)") == 'FocalLoss'
    report = environment.program('twinkle', 'doctor', fails=True)
    assert 'broken-losses 3.2.1' in report
    assert '1 problem(s)' in report
    environment.pip('uninstall', '--yes', 'broken-losses')
    assert 'Nothing is wrong.' in environment.program('twinkle', 'doctor')


def test_an_identical_duplicate_is_no_conflict(environment, wheels, tmp_path):
    """The same distribution twice on the path, as an editable install and a wheel can be, is one."""
    environment.install(FOCAL)
    environment.pip(
        'install',
        '--quiet',
        '--no-deps',
        '--target',
        str(tmp_path / 'again'),
        *map(str, wheels.glob('*focal_loss*.whl')),
    )
    where = environment.script(
        "from twinkle import losses; print(losses.resolve('focal').__name__)", PYTHONPATH=str(tmp_path / 'again')
    )
    assert where == 'FocalLoss'


def test_a_new_plugin_is_built_installed_and_tested(environment, tmp_path):
    """What `twinkle plugins new` writes becomes a wheel, is found by name, and passes its own tests there."""
    environment.link('pytest')
    environment.install('twinkle-core')
    environment.program('twinkle', 'plugins', 'new', 'my-losses', '--folder', str(tmp_path))
    wheel = build(tmp_path / 'my-losses', tmp_path)
    environment.pip('install', '--quiet', '--no-deps', str(wheel))
    part = next(part for name, part in _losses(environment).items() if part['distribution'] == 'my-losses')
    assert part['version'] == '0.1.0'
    tests = [
        str(environment.python),
        '-m',
        'pytest',
        '-q',
        '-p',
        'no:cacheprovider',
        str(tmp_path / 'my-losses' / 'tests'),
    ]
    assert 'passed' in run(tests, cwd=tmp_path)


def test_a_users_type_checker_sees_the_types(environment, tmp_path):
    """mypy reads the installed packages' annotations: a wrong argument is an error, right use is none."""
    environment.install('twinkle-core')
    (tmp_path / 'mypy.ini').write_text(
        '[mypy]\nstrict = True\n[mypy-torch.*,numpy.*,datasets.*,transformers.*,tqdm.*,pytest.*]\nfollow_imports = skip\n'
    )
    right = 'from twinkle import DeviceMesh, losses\nmesh: DeviceMesh = DeviceMesh.from_sizes(dp_size=2)\nnames: list[str] = losses.names()\n'
    (tmp_path / 'right.py').write_text(right)
    (tmp_path / 'wrong.py').write_text(right + "size: str = mesh.dp_size\nmesh.get_slice('ten')\n")
    options = ['--config-file', str(tmp_path / 'mypy.ini'), '--cache-dir', str(tmp_path / 'cache')]
    check = ['-m', 'mypy', *options, '--python-executable', str(environment.python)]
    run([sys.executable, *check, str(tmp_path / 'right.py')], cwd=tmp_path)
    printed = run([sys.executable, *check, str(tmp_path / 'wrong.py')], cwd=tmp_path, fails=True)
    assert 'Found 2 errors' in printed
