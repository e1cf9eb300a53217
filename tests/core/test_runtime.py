"""initialize and the run: one process, and two under torchrun."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import twinkle
from tests.helpers.trackers import Memory
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, hookspecs
from twinkle.errors import ConfigError, MeshError, MissingPackageError, StateError, UnknownNameError
from twinkle.plugins import get_hooks
from twinkle.runtime import (
    Executor,
    LocalExecutor,
    default_device_mesh,
    get_runtime,
    initialize,
    seed_everything,
    shutdown,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_run_left() -> Iterator[None]:
    """Each test starts and ends without a run."""
    shutdown()
    yield
    shutdown()
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hooks() -> Iterator[list[Any]]:
    """What plugins are told."""
    told: list[Any] = []

    class Observer:
        @hookspecs.hookimpl
        def run_failed(self, error: BaseException, output_dir: str | None) -> None:
            told.append((error, output_dir))

        @hookspecs.hookimpl
        def metrics_logged(self, metrics: Mapping[str, float], step: int) -> None:
            told.append((dict(metrics), step))

    observer = Observer()
    get_hooks().register(observer)
    yield told
    get_hooks().unregister(observer)


class Cluster(Executor):
    """A remote executor that starts nothing, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, mesh: DeviceMesh, groups: Sequence[DeviceGroup], options: Mapping[str, Any]) -> None:
        self.told.append((mesh, tuple(groups), dict(options)))

    def create(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return None

    def shutdown(self) -> None:
        self.told.append('shutdown')


# -- one process ------------------------------------------------------------------------------------------------------------


def test_a_script_without_torchrun_is_one_process() -> None:
    """No process group, a mesh of one, the executor `local`; it ends with shutdown, which may be called twice."""
    runtime = twinkle.initialize()
    assert (runtime.mode, runtime.device_mesh.world_size, runtime.seed, runtime.output_dir) == ('local', 1, None, None)
    assert isinstance(runtime.executor, LocalExecutor)
    assert not torch.distributed.is_initialized()
    assert get_runtime() is runtime
    assert default_device_mesh() is runtime.device_mesh
    runtime.shutdown()
    runtime.shutdown()
    assert get_runtime() is None


def test_a_second_initialize_is_refused() -> None:
    """Until the first run has ended; afterwards another may start."""
    with initialize(), pytest.raises(StateError, match=r'called already.*shutdown'):
        initialize()
    with initialize() as runtime:
        assert get_runtime() is runtime


def test_an_old_run_does_not_end_a_new_one() -> None:
    """shutdown() of a run that is over leaves the present one alone."""
    old = initialize()
    old.shutdown()
    new = initialize()
    old.shutdown()
    assert get_runtime() is new


def test_an_unknown_mode_says_which_package_brings_it() -> None:
    """`ray` has a pip line while its package is missing; a typing error gets the near name."""
    if not twinkle.executors.is_registered('ray'):
        with pytest.raises(MissingPackageError, match='pip install twinkle-ray'):
            initialize('ray')
    with pytest.raises(UnknownNameError, match=r"Unknown name 'locl'.*Did you mean 'local'"):
        initialize('locl')
    assert get_runtime() is None


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'num_gpus': 2}, "no option 'num_gpus'"),
        ({'timeout': 0}, 'timeout=0 must be a number of seconds above 0'),
        ({'timeout': math.nan}, 'timeout=nan'),
        ({'timeout': '5'}, "timeout='5'"),
        ({'timeout': timedelta(0)}, 'timeout='),
        ({'timeout': 1e300}, 'timeout=1e'),
        ({'seed': -1}, 'seed=-1 must be an integer'),
        ({'seed': 1.5}, r'seed=1\.5'),
        ({'seed': True}, 'seed=True'),
        ({'global_device_mesh': 2}, 'global_device_mesh=2 must be a DeviceMesh'),
        ({'groups': ['train']}, 'must be a list of DeviceGroup'),
        ({'groups': [DeviceGroup('a', 1), DeviceGroup('a', 2)]}, "names 'a' more than once"),
        ({'trackers': [Memory()]}, 'output_dir'),
        ({'trackers': 'wandb'}, r"must be a list: \['wandb'\]"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    """A ConfigError with the value and the way out; nothing has been started."""
    with pytest.raises(ConfigError, match=message):
        initialize(**arguments)
    assert get_runtime() is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file in its place is a ConfigError."""
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigError, match=r'output_dir=.*cannot be made a folder'):
        initialize(output_dir=tmp_path / 'file')


def test_a_mesh_of_another_size_is_refused() -> None:
    """The mesh says 4, one process runs: MeshError with both and the sizes."""
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2, device_type='cpu')
    with pytest.raises(MeshError, match=r'for 4 process.*fsdp 2, dp 2.* and 1 are running'):
        initialize(global_device_mesh=mesh)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
def test_a_device_that_is_not_there_is_refused() -> None:
    """device_type='cuda' on a machine without one is a MeshError, and the run has not started."""
    mesh = DeviceMesh.from_sizes(device_type='cuda')
    with pytest.raises(MeshError, match=r"device_type='cuda', this process needs device 0 .* 0 can be seen here"):
        initialize(global_device_mesh=mesh)
    assert get_runtime() is None


def test_the_device_follows_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process with LOCAL_RANK=3 takes device 3; where only two can be seen, both numbers are in the error."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    monkeypatch.setattr(torch.cuda, 'set_device', taken.append)
    monkeypatch.setenv('LOCAL_RANK', '3')
    with initialize(global_device_mesh=DeviceMesh.from_sizes(device_type='cuda')) as runtime:
        assert (runtime.device, taken) == ('cuda:3', [3])
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    with pytest.raises(MeshError, match=r'needs device 3 \(LOCAL_RANK\), and 2 can be seen here'):
        initialize()


@pytest.mark.parametrize(('name', 'value'), [('WORLD_SIZE', '0'), ('WORLD_SIZE', 'two'), ('RANK', '-1')])
def test_a_wrong_launcher_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The variable and its value are in the error."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f'{name}={value!r}'):
        initialize(timeout=1)


def test_a_world_without_a_meeting_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE alone is not torchrun: the error says how to launch."""
    for name in ('MASTER_ADDR', 'MASTER_PORT', 'RANK'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(ConfigError, match=r'WORLD_SIZE=2 .*torchrun --nproc-per-node 2'):
        initialize(global_device_mesh=DeviceMesh.from_sizes(dp_size=2, device_type='cpu'))
    assert get_runtime() is None


def _numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def test_a_seed_makes_runs_repeat() -> None:
    """Python, NumPy and PyTorch give the same numbers after the same seed, and others after another."""
    drawn = []
    for seed in (3, 3, 4):
        with initialize(seed=seed) as runtime:
            assert runtime.seed == seed
            drawn.append(_numbers())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


def test_no_seed_leaves_random_numbers_alone() -> None:
    """A run without a seed continues the streams as they are."""
    seed_everything(5)
    expected = _numbers()
    seed_everything(5)
    with initialize():
        assert _numbers() == expected


def test_full_determinism_is_switched_on() -> None:
    """PyTorch then refuses algorithms that are not deterministic; without a seed it is 0."""
    with initialize(full_determinism=True) as runtime:
        assert torch.are_deterministic_algorithms_enabled()
        assert runtime.seed == 0
        drawn = _numbers()
    seed_everything(0)
    assert _numbers() == drawn


# -- the run's folder -------------------------------------------------------------------------------------------------------


def _lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()]


def test_numbers_go_to_the_log_the_trackers_and_the_hooks(tmp_path: Path, hooks: list[Any]) -> None:
    """One line per step; trackers are started with the configuration, and finished once."""
    tracker, folder = Memory(), tmp_path / 'a' / 'run'
    with initialize(output_dir=folder, trackers=[tracker], config={'lr': 0.1}) as runtime:
        runtime.log({'loss': 2.0, 'tokens': 7}, step=1)
        runtime.log({'loss': torch.tensor(1.5), 'lr': np.float32(0.5), 'step': 9.0}, step=2)
    expected = [({'loss': 2.0, 'tokens': 7}, 1), ({'loss': 1.5, 'lr': 0.5, 'step': 9.0}, 2)]
    assert _lines(folder) == [{'step': 1, 'loss': 2.0, 'tokens': 7}, {'step': 2, 'loss': 1.5, 'lr': 0.5}]
    assert tracker.calls == [['start', 'run', {'lr': 0.1}], *(['log', *call] for call in expected), ['finish']]
    assert hooks == expected
    runtime.shutdown()
    assert tracker.calls[-1:] == [['finish']]
    assert tracker.calls.count(['finish']) == 1


def test_a_resumed_run_goes_on_in_the_same_log(tmp_path: Path) -> None:
    """Lines are added; those of the first run stay."""
    for step in (1, 2):
        with initialize(output_dir=tmp_path) as runtime:
            runtime.log({'loss': 1.0}, step)
    assert [line['step'] for line in _lines(tmp_path)] == [1, 2]


def test_a_diverged_run_leaves_valid_json(tmp_path: Path) -> None:
    """NaN and infinity are null: strict readers take every line."""
    with initialize(output_dir=tmp_path) as runtime:
        runtime.log({'loss': math.nan, 'grad_norm': math.inf, 'lr': 0.1}, step=1)
    assert _lines(tmp_path) == [{'step': 1, 'loss': None, 'grad_norm': None, 'lr': 0.1}]
    assert 'NaN' not in (tmp_path / 'metrics.jsonl').read_text()


@pytest.mark.parametrize('value', ['1.0', None, True, [1.0], torch.ones(2)])
def test_what_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    """Metrics are numbers, never strings; nothing is written then."""
    with initialize(output_dir=tmp_path) as runtime:
        with pytest.raises(ConfigError, match=r'log\(\): loss='):
            runtime.log({'loss': value}, step=1)
        with pytest.raises(ConfigError, match='step='):
            runtime.log({'loss': 1.0}, step=-1)
    assert not (tmp_path / 'metrics.jsonl').exists()


def test_other_ranks_log_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hooks: list[Any]) -> None:
    """Trackers are neither started nor called, and no line is written; the run is then a worker's."""
    monkeypatch.setenv('RANK', '1')
    tracker = Memory()
    with initialize(Cluster, output_dir=tmp_path, trackers=[tracker]) as runtime:
        runtime.log({'loss': 1.0}, step=1)
    assert (tracker.calls, hooks, list(tmp_path.iterdir())) == ([], [], [])


def test_a_failing_tracker_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported by name; the others, and the run's own log, have everything."""
    others = [Memory('log'), Memory('finish'), Memory()]
    with initialize(output_dir=tmp_path, trackers=others) as runtime:
        runtime.log({'loss': 1.0}, step=1)
    assert [record.getMessage() for record in caplog.records] == [
        'Memory failed to log step 1; the run goes on.',
        'Memory failed to finish; what it had not sent yet may be missing.',
    ]
    assert all(tracker.calls[-1] == ['finish'] for tracker in others)
    assert len(_lines(tmp_path)) == 1


def test_a_tracker_that_cannot_start_stops_the_start(tmp_path: Path) -> None:
    """Its error is raised; those that had started are finished, the executor is let go, and another run may start."""
    first, second, cluster = Memory(), Memory('start'), Cluster()
    with pytest.raises(OSError, match='start failed'):
        initialize(cluster, output_dir=tmp_path, trackers=[first, second])
    assert first.calls[-1] == ['finish']
    assert second.calls == [['start', tmp_path.name, {}]]
    assert cluster.told[-1] == 'shutdown'
    assert get_runtime() is None


def test_trackers_are_parts(tmp_path: Path) -> None:
    """They are found by name in their registry, and an unknown one is named."""
    with twinkle.trackers.temporary('memory', Memory), initialize(output_dir=tmp_path, trackers=['memory']):
        pass
    with pytest.raises(UnknownNameError, match="Unknown name 'memry' in trackers"):
        initialize(output_dir=tmp_path, trackers=['memry'])


# -- how a run ends ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_reported_to_plugins(tmp_path: Path, hooks: list[Any]) -> None:
    """The error and the folder go to `run_failed`; the error is raised as it is, and everything is let go."""
    tracker, failure = Memory(), ValueError('bad batch')
    with pytest.raises(ValueError, match='bad batch') as raised, initialize(output_dir=tmp_path, trackers=[tracker]):
        raise failure
    assert raised.value is failure
    assert hooks == [(failure, str(tmp_path))]
    assert tracker.calls[-1] == ['finish']
    assert get_runtime() is None


@pytest.mark.parametrize(
    ('ending', 'is_failure'),
    [(SystemExit(0), False), (SystemExit(), False), (SystemExit(2), True), (KeyboardInterrupt(), True)],
)
def test_a_planned_exit_is_no_failure(hooks: list[Any], ending: BaseException, is_failure: bool) -> None:
    """sys.exit(0) ends a run; an exit code or Ctrl-C is a failure."""
    with pytest.raises(type(ending)), initialize():
        raise ending
    assert bool(hooks) is is_failure
    assert get_runtime() is None


def test_a_second_failure_does_not_hide_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """An executor that fails to shut down is reported; the run's own error is raised."""

    class Broken(Cluster):
        def shutdown(self) -> None:
            raise OSError('no connection')

    with pytest.raises(ValueError, match='bad batch'), initialize(Broken):
        raise ValueError('bad batch')
    assert 'Ending the run after ValueError failed as well.' in caplog.text
    with pytest.raises(OSError, match='no connection'), initialize(Broken):
        pass
    assert get_runtime() is None


def test_a_run_without_a_with_ends_with_the_process(tmp_path: Path) -> None:
    """Trackers are finished at exit."""
    code = (
        'import sys, twinkle; from tests.helpers.trackers import Memory\n'
        'class Loud(Memory):\n'
        '    def finish(self):\n'
        "        print('finished')\n"
        'twinkle.initialize(output_dir=sys.argv[1], trackers=[Loud()])\n'
    )
    done = subprocess.run([sys.executable, '-c', code, tmp_path], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == 'finished\n'


# -- executors --------------------------------------------------------------------------------------------------------------


def test_an_executor_gets_groups_options_and_a_mesh_of_all_their_ranks() -> None:
    """It is not asked how many processes run here: its workers are elsewhere. It is shut down at the end."""
    cluster, groups = Cluster(), [DeviceGroup('train', 4), DeviceGroup('sample', [4, 5])]
    with initialize(cluster, groups, address='auto') as runtime:
        assert runtime.mode == 'Cluster'
        assert runtime.device_mesh == DeviceMesh.from_sizes(dp_size=6, device_type='cpu')
        assert cluster.told == [(runtime.device_mesh, tuple(groups), {'address': 'auto'})]
        assert get_device_placement().splitlines()[1:3] == ['rank  dp  data   group', '   0   0     0   train']
    assert cluster.told[-1] == 'shutdown'


def test_groups_of_several_device_types_need_a_mesh() -> None:
    """No default mesh is guessed for them; one that is given is taken."""
    groups = [DeviceGroup('train', 2, 'cuda'), DeviceGroup('sample', [2], 'cpu')]
    with pytest.raises(MeshError, match=r'several device types \(cpu, cuda\): pass global_device_mesh'):
        initialize(Cluster, groups)
    mesh = DeviceMesh.from_sizes(dp_size=2, device_type='cuda')
    with initialize(Cluster, groups, mesh) as runtime:
        assert runtime.device_mesh is mesh


def test_initialize_loads_no_torch_for_a_plain_run() -> None:
    """With a mesh that names its device, a run of one process costs no import of PyTorch."""
    code = (
        'import sys, twinkle\n'
        "with twinkle.initialize(global_device_mesh=twinkle.DeviceMesh.from_sizes(device_type='cpu')): pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True)
    assert done.stdout == 'False\n'


# -- two processes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of one launch of two processes, and what each of them saw."""
    folder = tmp_path_factory.mktemp('two_ranks')
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    script = [str(ROOT / 'tests' / 'helpers' / 'runtime_ranks.py'), str(folder)]
    done = subprocess.run([*launcher, *script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, [json.loads((folder / f'rank{rank}.json').read_text()) for rank in (0, 1)]


def test_two_processes_refuse_a_mesh_of_three(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """On every rank, at once, before they meet; the default mesh has both."""
    for seen in two_ranks[1]:
        assert 'The mesh is for 3 process(es) (dp 3 on cpu), and 2 are running' in seen['mismatch']
        assert not seen['met_after_mismatch']
        assert seen['default_mesh_before'] == 2


def test_two_processes_meet_and_part(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """Gloo on CPUs, the world of both, the same random numbers, the runtime's mesh by default; afterwards no group is left."""
    runs = [seen['run'] for seen in two_ranks[1]]
    for run in runs:
        assert (run['backend'], run['world'], run['sum'], run['device']) == ('gloo', 2, 1.0, 'cpu')
        assert run['default_mesh'] == "DeviceMesh.from_sizes(world_size=2, tp_size=2, device_type='cpu')"
        assert run['over'] == [False, True]
    assert runs[0]['numbers'] == runs[1]['numbers']


def test_two_processes_write_one_log(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """Rank 0's numbers, and its tracker alone."""
    folder, ranks = two_ranks
    assert _lines(folder / 'run') == [{'step': 1, 'loss': 1.0}]
    assert ranks[0]['run']['tracker'] == [['start', 'run', {}], ['log', {'loss': 1.0}, 1], ['finish']]
    assert ranks[1]['run']['tracker'] == []


def test_a_failure_on_one_rank_is_that_ranks(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """The rank that fails tells its plugins and raises its own error; both leave the group of their second run."""
    zero, one = two_ranks[1]
    assert (zero['failures'], one['failures']) == ([], ["ValueError('rank 1 only')"])
    assert ('raised' in zero, one['raised']) == (False, 'rank 1 only')
    for seen in (zero, one):
        assert seen['second_world'] == 2
        assert seen['left_after_failure']


def test_a_group_that_the_program_started_stays(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """initialize uses it and does not end it."""
    assert all(seen['kept'] for seen in two_ranks[1])


def test_a_stuck_collective_raises_after_the_timeout(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """timeout=2 ends the wait for a rank that never comes."""
    zero = two_ranks[1][0]
    assert 'stuck' in zero
    assert zero['waited'] < 30
