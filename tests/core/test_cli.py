"""The program `twinkle`: what it lists, what it finds broken, the package that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import twinkle.cli
from tests.helpers.fake_dists import LOSS, make_dist
from twinkle.cli import main


def run(*arguments, path=(), env=None):
    """The program in a process of its own, with made-up distributions on its path."""
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(p) for p in path]), **(env or {})}
    return subprocess.run(
        [sys.executable, '-m', 'twinkle.cli', *arguments], capture_output=True, text=True, env=env, check=False
    )


def test_list_shows_every_part_with_its_origin(capsys):
    """Kind, name, target, distribution and version, for one kind or all."""
    assert main(['plugins', 'list', 'losses']) == 0
    out = capsys.readouterr().out
    assert 'cross_entropy' in out
    assert 'twinkle.loss:CrossEntropyLoss' in out
    assert 'twinkle-core 0.1.0' in out
    assert 'AdamW' not in out
    assert main(['plugins', 'list']) == 0
    assert 'torch.optim:AdamW' in capsys.readouterr().out


def test_list_as_json_is_valid(capsys):
    """The output of --json validates against the schema that is shipped."""
    assert main(['plugins', 'list', '--json']) == 0
    listed = json.loads(capsys.readouterr().out)
    schema = json.loads((Path(twinkle.cli.__file__).parent / 'plugins.schema.json').read_text())
    jsonschema.validate(listed, schema)
    assert {'kind': 'losses', 'name': 'mse'} in [{k: p[k] for k in ('kind', 'name')} for p in listed['parts']]


@pytest.mark.parametrize(
    ('name', 'says'), [('cross-entropy', 'labels that are not -100'), ('optimizers:adamw', 'torch.optim:AdamW')]
)
def test_show_tells_where_a_part_comes_from_and_what_it_does(capsys, name, says):
    """Any spelling, or kind:name."""
    assert main(['plugins', 'show', name]) == 0
    assert says in capsys.readouterr().out


def test_show_of_an_unknown_name_suggests(capsys):
    """The error goes to stderr, with the near name, and the status is 1."""
    assert main(['plugins', 'show', 'cross_entrpy']) == 1
    assert 'cross_entropy' in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    """Called with nothing, the program says what it can do."""
    assert main([]) == 2
    assert 'plugins' in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(['--version'])
    assert ended.value.code == 0


def test_doctor_finds_nothing_wrong_here():
    """Everything that is installed for the tests loads; each distribution has its time."""
    done = run('plugins', 'doctor', '--json')
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report['failures'] == report['conflicts'] == []
    times = {d['distribution']: d['seconds'] for d in report['distributions']}
    assert times['twinkle-core'] > 0


def test_doctor_names_broken_plugins_and_conflicts_with_their_fix(tmp_path):
    """A broken import with its cause, a conflict with its fix, exit status 1; good plugins are listed beside them."""
    make_dist(
        tmp_path / 'a',
        'fake-a',
        {'twinkle.losses': {'twin': 'fake_a:Twin'}},
        modules={'fake_a': LOSS.format(name='Twin')},
    )
    make_dist(
        tmp_path / 'b',
        'fake-b',
        {'twinkle.losses': {'twin': 'fake_b:Twin'}},
        modules={'fake_b': LOSS.format(name='Twin')},
    )
    make_dist(
        tmp_path / 'c', 'fake-c', {'twinkle.losses': {'bad': 'fake_c:Bad'}}, version='2.0', modules={'fake_c': '1 / 0'}
    )
    path = [tmp_path / letter for letter in 'abc']
    done = run('plugins', 'doctor', path=path)
    assert done.returncode == 1
    for part in (
        'fake-c 2.0',
        'ZeroDivisionError',
        'pip uninstall fake-c',
        'twin@fake-a or twin@fake-b',
        '2 problem(s)',
        'twinkle-core',
    ):
        assert part in done.stdout, part
    report = json.loads(run('plugins', 'doctor', '--json', path=path).stdout)
    assert [len(report[key]) for key in ('failures', 'conflicts')] == [1, 1]


def test_doctor_survives_a_plugin_that_ends_the_process(tmp_path):
    """Plugins that exit, hang or print on import are named, and everything else is examined all the same."""
    make_dist(
        tmp_path,
        'fake-exit',
        {'twinkle.losses': {'quits': 'fake_exit:X', 'hangs': 'fake_hang:X', 'prints': 'fake_print:Loud'}},
        modules={
            'fake_exit': 'import os, sys; print("last words", file=sys.stderr, flush=True); os._exit(3)',
            'fake_hang': 'import time; time.sleep(600)',
            'fake_print': 'print("noise")\n' + LOSS.format(name='Loud'),
        },
    )
    env = {'TWINKLE_DISABLE_PLUGINS': 'twinkle-hf'}  # it takes its time, too
    done = run('doctor', '--json', '--timeout', '10', path=[tmp_path], env=env)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    problems = {failure['name']: failure['problem'] for failure in report['failures']}
    assert 'exit 3' in problems.pop('quits (fake-exit 1.0)')
    assert 'within 10 s' in problems.pop('hangs (fake-exit 1.0)')
    assert not problems
    assert {'twinkle-core', 'fake-exit'} <= {item['distribution'] for item in report['distributions']}


def test_doctor_examines_hooks(tmp_path):
    """A hook that does not exist (a misspelt one would never be called), and a broken hook module."""
    wrong = 'from twinkle.hookspecs import hookimpl\n@hookimpl\ndef checkpoint_safed(path): pass\n'
    points = {'twinkle.hooks': {'misspelt': 'fake_wrong_hook', 'broken': 'fake_broken_hook'}}
    make_dist(tmp_path, 'fake-hooks', points, modules={'fake_wrong_hook': wrong, 'fake_broken_hook': '1 / 0'})
    report = json.loads(run('doctor', '--json', path=[tmp_path]).stdout)
    problems = {failure['name']: failure['problem'] for failure in report['failures']}
    assert 'checkpoint_safed' in problems['misspelt (fake-hooks 1.0)']
    assert 'ZeroDivisionError' in problems['broken (fake-hooks 1.0)']
    assert len(problems) == 2
    listed = run('plugins', 'list', 'hooks', path=[tmp_path])
    assert 'misspelt' in listed.stdout
    assert listed.returncode == 0


def test_doctor_names_a_distribution_with_unreadable_entry_points(tmp_path):
    """Metadata that is no metadata is named, though PyTorch itself cannot be imported beside it."""
    make_dist(tmp_path, 'fake-garbled', {})
    (tmp_path / 'fake_garbled-1.0.dist-info' / 'entry_points.txt').write_text('[twinkle.losses]\nno equals sign\n')
    done = run('doctor', '--json', path=[tmp_path])
    assert done.returncode == 1
    failures = {failure['name']: failure['problem'] for failure in json.loads(done.stdout)['failures']}
    assert 'cannot be read' in failures['fake-garbled']
    assert 'pip install --force-reinstall fake-garbled' in failures['fake-garbled']


def test_list_loads_no_plugin_and_tells_what_is_known_to_be_wrong(tmp_path):
    """Listing imports nothing, hooks neither; an unmet need and a disabled distribution are shown with the reason."""
    make_dist(
        tmp_path / 'a',
        'fake-old',
        {'twinkle.losses': {'old': 'fake_old:X'}, 'twinkle.hooks': {'old': 'fake_old'}},
        modules={'fake_old': 'raise SystemExit("imported")'},
        requires=['twinkle-core<0.1'],
    )
    make_dist(tmp_path / 'b', 'fake-out', {'twinkle.losses': {'out': 'fake_out:X'}})
    env = {'TWINKLE_DISABLE_PLUGINS': 'fake-out'}
    done = run('plugins', 'list', '--json', path=[tmp_path / 'a', tmp_path / 'b'], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ''
    parts = {(part['kind'], part['name']): part for part in json.loads(done.stdout)['parts']}
    assert parts['losses', 'old']['state'] == parts['hooks', 'old']['state'] == 'failed'
    assert 'twinkle-core<0.1' in parts['losses', 'old']['reason']
    assert parts['losses', 'out']['state'] == 'disabled'
    assert 'failed: it needs' in run('plugins', 'list', 'losses', path=[tmp_path / 'a']).stdout


@pytest.mark.parametrize('command', ['', 'plugins', 'plugins list', 'plugins show', 'plugins doctor', 'plugins new'])
def test_every_command_has_help(command, capsys):
    """`--help` says how a command is called."""
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), '--help'])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f'usage: {"twinkle " + command}'.rstrip())


def test_a_new_package_passes_its_own_tests(tmp_path):
    """What `plugins new` writes is found by name and its tests pass, as written."""
    done = run('plugins', 'new', 'my-losses', '--folder', str(tmp_path), '--json')
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)['folder'])
    assert {'pyproject.toml', 'README.md'} <= {p.name for p in folder.iterdir()}
    # Installed by its metadata and its source on the path: the packaging tests install it for real.
    try:
        import tomllib
    except ImportError:
        pytest.skip('needs tomllib (Python 3.11)')
    points = tomllib.loads((folder / 'pyproject.toml').read_text())['project']['entry-points']
    make_dist(tmp_path / 'site', 'my-losses', points)
    env = {**os.environ, 'PYTHONPATH': f'{tmp_path / "site"}{os.pathsep}{folder / "src"}'}
    tested = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(folder)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert '2 passed' in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.parametrize('name', ['', '../up', 'a/b', '-x', 'a--b', '1st'])
def test_a_new_package_needs_a_possible_name(tmp_path, name, capsys):
    """Names that leave the folder or that pip would refuse write nothing."""
    assert main(['plugins', 'new', '--folder', str(tmp_path / 'here'), '--', name]) == 1
    assert 'no name for a distribution' in capsys.readouterr().err
    assert not (tmp_path / 'here').exists()


@pytest.mark.parametrize('name', ['json', 'class', 'torch', 'twinkle', 'twinkle-hf'])
def test_a_new_package_hides_no_other_module(tmp_path, name, capsys):
    """A name whose module is Python's own, a keyword, or installed already is refused."""
    assert main(['plugins', 'new', name, '--folder', str(tmp_path)]) == 1
    assert 'is taken' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_new_package_never_overwrites(tmp_path, capsys):
    """An existing folder is left as it is."""
    (tmp_path / 'mine').mkdir()
    assert main(['plugins', 'new', 'mine', '--folder', str(tmp_path)]) == 1
    assert 'exists already' in capsys.readouterr().err
    assert list((tmp_path / 'mine').iterdir()) == []


def test_a_plugin_adds_a_command(tmp_path):
    """The hook `add_cli_commands` brings a command of its own."""
    code = (
        'from twinkle.hookspecs import hookimpl\n@hookimpl\ndef add_cli_commands(commands):\n'
        '    parser = commands.add_parser("hello")\n    parser.set_defaults(run=lambda options: print("hello there"))\n'
    )
    make_dist(tmp_path, 'fake-cli', {'twinkle.hooks': {'cli': 'fake_cli'}}, modules={'fake_cli': code})
    done = run('hello', path=[tmp_path])
    assert (done.returncode, done.stdout.strip()) == (0, 'hello there')
