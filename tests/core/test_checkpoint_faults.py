"""Saves that are killed, run out of disk, or meet each other: an older checkpoint, or the new one, is always whole."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import killed_saver
from twinkle.checkpoint import commit_checkpoint, find_checkpoint, latest_checkpoint, load_state, read_trainer_state
from twinkle.errors import CheckpointError

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='these tests fork and kill')

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, **options):
    """A Python process in the repository's root, with one thread."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, text=True, **options)


def step_of(checkpoint):
    """The step that a checkpoint says, in each of its files."""
    state = load_state(checkpoint, 'training_state')
    step = read_trainer_state(checkpoint).cur_step
    assert state['step'] == step
    assert torch.equal(state['moments'][0], torch.full((64, 64), float(step)))
    return step


def hidden(output_dir):
    """What saves have left beside the lock."""
    return [
        path.name for path in Path(output_dir).iterdir() if path.name.startswith('.') and path.name != '.twinkle.lock'
    ]


def test_a_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL at every call that touches the disk, and again while the wreck is being repaired: what is found is whole
    and as new as it can be, no older checkpoint is damaged, and the next save leaves no trace of the wreck."""
    process = python(ROOT / 'tests' / 'helpers' / 'killed_saver.py', tmp_path, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    cases = [json.loads(line) for line in output.splitlines()]
    assert {scenario for scenario, *_ in cases} == set(killed_saver.SCENARIOS)
    assert {call for _, _, call, _ in cases} >= {
        'rename',
        'replace',
        'fsync',
        'open',
        'mkdir',
        'save_file',
        'unlink',
        None,
    }
    steps = {}
    for scenario, n, died_at, folder in cases:
        found = find_checkpoint(folder)
        steps.setdefault(Path(folder).name.rpartition('-')[0], []).append(step_of(found))
        if died_at is None:
            assert step_of(found) == 2, (scenario, n)
        killed_saver.save(Path(folder), 'c', 3)
        assert step_of(find_checkpoint(folder)) == 3
        assert hidden(folder) == [], (scenario, n, died_at)
        for kept in Path(folder).iterdir():
            if kept.is_dir():
                assert step_of(find_checkpoint(kept)) in (1, 2, 3)
    for scenario in killed_saver.SCENARIOS:
        assert steps[scenario] == sorted(steps[scenario]), 'once the new checkpoint is in place it stays'
        assert set(steps[scenario]) == {1, 2}


SAVE_FOR_EVER = """
import itertools, sys
from pathlib import Path
from tests.helpers.killed_saver import save
for step in itertools.count(int(sys.argv[2])):
    save(Path(sys.argv[1]), 'a', step)
    print(step, flush=True)
"""


def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL after random times: the checkpoint is the last one that was reported, or the one after it."""
    rng, step = random.Random(0), 1
    for _ in range(6):
        process = python('-c', SAVE_FOR_EVER, tmp_path, step, stdout=subprocess.PIPE)
        step = int(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate(timeout=60)
        reported = int(rest.split()[-1]) if rest.strip() else step
        found = step_of(find_checkpoint(tmp_path))
        assert found in (reported, reported + 1)
        step = found + 1
    killed_saver.save(tmp_path, 'a', step)
    assert hidden(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB of its own."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    mounted = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'size=1m', 'none', folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f'a small tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}')
    yield folder
    subprocess.run(['umount', folder], check=True)


def _save_big(out, name):
    """Save 200 kB more than usual; what went wrong, or None."""
    try:
        with commit_checkpoint(out, name) as folder:
            killed_saver.write(folder, 2)
            (folder / 'weights.bin').write_bytes(os.urandom(200_000))
    except (OSError, CheckpointError) as error:
        return str(error)
    return None


@pytest.mark.parametrize('name', ['a', 'b'])
def test_a_full_disk_leaves_the_older_checkpoint(small_disk, name):
    """Whatever room there was, a save that does not fit raises and leaves nothing; the older one is `latest`."""
    out, ballast = small_disk / 'out', small_disk / 'ballast'
    killed_saver.save(out, 'a', 1)
    refused = 0
    for free in range(0, 400_000, 12_288):
        ballast.write_bytes(b'')
        room = os.statvfs(small_disk)
        ballast.write_bytes(bytes(max(0, room.f_bavail * room.f_bsize - free)))
        problem = _save_big(out, name)
        if problem is None:
            break
        refused += 1
        assert 'No space left' in problem
        assert step_of(find_checkpoint(out)) == 1
        assert latest_checkpoint(out).name == 'a'
        assert hidden(out) == []
    assert refused > 10
    assert step_of(find_checkpoint(out)) == 2


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from tests.helpers.killed_saver import save
out = Path(sys.argv[1])
save(out, 'a', 1)
for limit in (0, 100, 5_000, 16_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for name in ('a', 'b'):
        try:
            save(out, name, 2)
        except Exception as error:
            print(type(error).__name__, error)
"""


def test_a_file_that_cannot_grow_leaves_the_older_checkpoint(tmp_path):
    """Under a limit on file sizes (a quota behaves so) each save raises, and the older checkpoint is as it was."""
    process = python('-c', FILE_LIMIT, tmp_path, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    lines = output.splitlines()
    assert len(lines) == 8, output
    assert all('File too large' in line or 'os error 27' in line for line in lines), output
    assert step_of(find_checkpoint(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != '.twinkle.lock') == ['a', 'latest']


SAVE_MANY = """
import sys
from pathlib import Path
from tests.helpers.killed_saver import save
out, who = Path(sys.argv[1]), sys.argv[2]
for step in range(1, 21):
    save(out, 'shared', step)
    save(out, f'{who}-{step}', step, keep_last=3)
"""


def test_two_processes_may_save_into_one_folder(tmp_path):
    """Two savers of the same and of different names disturb neither each other nor what is found afterwards."""
    processes = [python('-c', SAVE_MANY, tmp_path, who, stderr=subprocess.PIPE) for who in ('x', 'y')]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert step_of(find_checkpoint(tmp_path)) == 20
    assert hidden(tmp_path) == []
    kept = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(kept) == 3
    for path in kept:
        step_of(find_checkpoint(path))


AT_EXIT = """
import sys, time
from pathlib import Path
from twinkle.checkpoint import save_async
from tests.helpers.killed_saver import write
def slow(folder):
    time.sleep(0.3)
    write(folder, 5)
def fail(folder):
    raise ValueError('disk on fire')
save_async(slow, Path(sys.argv[1]), 'a')
save_async(fail, Path(sys.argv[1], 'other'), 'b')
"""


def test_a_script_that_ends_waits_for_its_background_saves(tmp_path):
    """The interpreter waits until a background save is in place, and an error that nobody asked for is told."""
    process = python('-c', AT_EXIT, tmp_path, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert step_of(find_checkpoint(tmp_path)) == 5
    assert 'b failed: ValueError' in errors
    assert 'disk on fire' in errors
