"""Checkpoints on disk: folders that are published whole, found, verified and rotated."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import content, hidden, names, write
from twinkle.checkpoint import (
    TrainerState,
    checkpoint_path,
    commit_checkpoint,
    find_checkpoint,
    latest_checkpoint,
    load_state,
    read_trainer_state,
    save_state,
    write_trainer_state,
)
from twinkle.checkpoint.manifest import MANIFEST
from twinkle.checkpoint.names import new_sibling
from twinkle.errors import CheckpointError, ConfigError, NameNotAllowedError

# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'name',
    ['', '.', '..', '../x', 'a/b', '/etc', 'a\\b', 'C:x', '.hidden', 'latest', 'LATEST', 'a\0b', 'a\nb', 'con',
     'NUL.txt',
     'a.', 'a ', ' a', 'x' * 200, 'a*', 'a?', '\ud800', None, 3, Path('a')],
)  # fmt: skip
def test_names_that_leave_the_folder_or_mean_something_else_are_refused(tmp_path, name):
    """A name is one plain folder inside output_dir on every system; nothing is created for another."""
    with pytest.raises(NameNotAllowedError, match='Checkpoint name'):
        checkpoint_path(tmp_path, name)
    with pytest.raises(NameNotAllowedError), commit_checkpoint(tmp_path / 'out', name):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    'name', ['last', 'checkpoint-10', 'best model', 'ep=1,loss=0.5', 'v1.0', 'größe', '模型', 'x.tmp~a~1~2~00000000']
)
def test_ordinary_names_are_taken(tmp_path, name):
    """Spaces inside, punctuation that every system takes, and other scripts are fine."""
    write(tmp_path, name)
    assert find_checkpoint(tmp_path) == tmp_path / name


# -- committing and finding --------------------------------------------------------------------------------------------


def test_a_checkpoint_appears_whole_and_latest_names_it(tmp_path):
    """Inside the context nothing is visible; after it the folder, its manifest and `latest` are there."""
    with commit_checkpoint(tmp_path / 'out', 'a') as folder:
        (folder / 'f').write_text('1')
        seen = names(tmp_path / 'out')
    assert (seen, folder.parent) == ([], tmp_path / 'out')
    assert names(tmp_path / 'out') == ['a', 'latest']
    assert hidden(tmp_path / 'out') == []
    assert (tmp_path / 'out' / 'latest').read_text() == 'a\n'
    assert latest_checkpoint(tmp_path / 'out') == tmp_path / 'out' / 'a'
    assert find_checkpoint(tmp_path / 'out') == find_checkpoint(tmp_path / 'out' / 'a') == tmp_path / 'out' / 'a'


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_the_older_checkpoint(tmp_path, error):
    """The half-written folder is gone, the older checkpoint intact and still `latest`."""
    write(tmp_path, 'a', 'old')
    for name in ('a', 'b'):
        with pytest.raises(error):
            write_half(tmp_path, name, error)
    assert names(tmp_path) == ['a', 'latest']
    assert hidden(tmp_path) == []
    assert content(find_checkpoint(tmp_path)) == 'old'


def write_half(output_dir, name, error):
    with commit_checkpoint(output_dir, name) as folder:
        (folder / 'f').write_text('half')
        raise error


def test_an_empty_checkpoint_and_links_are_refused(tmp_path):
    """Nothing written is an error, and so is a link, which another tool could move under our feet."""
    with pytest.raises(CheckpointError, match='Nothing was written'), commit_checkpoint(tmp_path, 'a'):
        pass
    with pytest.raises(CheckpointError, match='link'), commit_checkpoint(tmp_path, 'a') as folder:
        (folder / 'f').symlink_to('/etc/passwd')
    assert names(tmp_path) == []


@pytest.mark.parametrize('at', ['aside', 'place', 'latest'])
@pytest.mark.parametrize('set_latest', [True, False])
def test_an_error_between_the_renames_is_undone(tmp_path, monkeypatch, at, set_latest):
    """Whichever rename fails, the old checkpoint is back in its place and `latest` as it was."""
    write(tmp_path, 'a', 'old')
    write(tmp_path, 'b')
    rename, replace, calls = os.rename, os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == {'aside': 1, 'place': 2}.get(at):
            raise OSError('no')
        return rename(source, target)

    def failing_replace(source, target):
        if at == 'latest':
            raise OSError('no')
        return replace(source, target)

    monkeypatch.setattr(os, 'rename', failing)
    monkeypatch.setattr(os, 'replace', failing_replace)
    if at == 'latest' and not set_latest:
        write(tmp_path, 'a', 'new', set_latest=False)
    else:
        with pytest.raises(OSError, match='no'):
            write(tmp_path, 'a', 'new', set_latest=set_latest)
        assert content(tmp_path / 'a') == 'old'
    assert latest_checkpoint(tmp_path) == tmp_path / 'b'
    assert hidden(tmp_path) == []


def test_saving_an_existing_name_replaces_it(tmp_path):
    """The new folder takes the name; nothing of the old one is left, not even its extra files."""
    old = write(tmp_path, 'a', 'old')
    (old / 'more').write_text('')
    assert content(write(tmp_path, 'a', 'new')) == 'new'
    assert not (old / 'more').exists()
    assert hidden(tmp_path) == []


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    """A folder without our manifest, or a file, is refused before anything is written; an empty folder is taken."""
    (tmp_path / 'src').mkdir()
    (tmp_path / 'src' / 'precious.py').write_text('1')
    (tmp_path / 'file').write_text('1')
    for name in ('src', 'file'):
        with pytest.raises(CheckpointError, match='not a checkpoint of Twinkle'):
            write(tmp_path, name)
    assert (tmp_path / 'src' / 'precious.py').exists()
    (tmp_path / 'empty').mkdir()
    assert content(write(tmp_path, 'empty')) == 'x'


def test_set_latest_false_leaves_latest(tmp_path):
    """A side checkpoint does not become what a run resumes from."""
    write(tmp_path, 'a')
    write(tmp_path, 'best', set_latest=False)
    assert latest_checkpoint(tmp_path) == tmp_path / 'a'
    assert find_checkpoint(tmp_path / 'best') == tmp_path / 'best'


@pytest.mark.parametrize(
    ('damage', 'says'),
    [
        (lambda f: (f / 'sub' / 'weights.txt').unlink(), r'sub/weights\.txt is missing'),
        (lambda f: (f / 'sub' / 'weights.txt').write_text(''), r'sub/weights\.txt has 0 bytes and was saved with 1'),
        (lambda f: (f / 'sub' / 'weights.txt').write_text('y'), r'the content of sub/weights\.txt has changed'),
        (lambda f: (f / MANIFEST).write_text('{"format_version": 1'), f'{MANIFEST} cannot be read'),
        (lambda f: (f / MANIFEST).write_text('{"format_version": 1}'), 'not a manifest'),
        (lambda f: (f / MANIFEST).write_text('[]'), 'not a manifest'),
        (lambda f: (f / MANIFEST).unlink(), f'{MANIFEST} is missing'),
    ],
)
def test_a_broken_checkpoint_is_refused_by_file(tmp_path, damage, says):
    """What is missing, cut or changed is named; with checksums off, only changed content goes unseen."""
    folder = write(tmp_path, 'a')
    damage(folder)
    with pytest.raises(CheckpointError, match=says):
        find_checkpoint(tmp_path)
    if 'content' in says:
        assert find_checkpoint(tmp_path, checksums=False) == folder


def test_files_that_were_added_later_do_not_break_a_checkpoint(tmp_path):
    """Notes beside the weights are somebody's own."""
    (write(tmp_path, 'a') / 'notes.md').write_text('good')
    assert find_checkpoint(tmp_path) == tmp_path / 'a'


def test_a_hostile_manifest_cannot_point_outside(tmp_path):
    """Paths in a manifest stay inside the checkpoint."""
    folder = write(tmp_path, 'a')
    for path in ('../b/x', '/etc/passwd', 'a\\..\\b', 'C:x'):
        files = {path: {'size': 1, 'crc32': '0'}}
        (folder / MANIFEST).write_text(json.dumps({'format_version': 1, 'name': 'a', 'sequence': 1, 'files': files}))
        with pytest.raises(CheckpointError, match='not a path inside'):
            find_checkpoint(tmp_path)


@pytest.mark.parametrize('text', ['../b', '/etc', '', 'a/b', '\ud7ff\n..'])
def test_a_hostile_latest_cannot_point_outside(tmp_path, text):
    """`latest` names a folder beside itself, or is refused."""
    write(tmp_path, 'a')
    (tmp_path / 'latest').write_text(text, encoding='utf-8')
    with pytest.raises(CheckpointError, match='latest does not name a checkpoint'):
        find_checkpoint(tmp_path)


def test_a_missing_checkpoint_lists_those_that_are_there(tmp_path):
    """A wrong path, a vanished latest and an empty folder each say what there is instead."""
    write(tmp_path, 'a')
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*c\. In .* there are \['a'\]"):
        find_checkpoint(tmp_path / 'c')
    (tmp_path / 'latest').write_text('b')
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*b\. .*\['a'\]"):
        find_checkpoint(tmp_path)
    (tmp_path / 'latest').unlink()
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint.*\['a'\]"):
        find_checkpoint(tmp_path)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(CheckpointError, match='not a complete checkpoint'):
        find_checkpoint(tmp_path / 'empty')


def test_weights_of_other_tools_are_found_on_request(tmp_path):
    """A folder of Transformers or PEFT is taken with require_manifest=False, also with DeepSpeed's `latest` in it."""
    (tmp_path / 'config.json').write_text('{}')
    (tmp_path / 'latest').write_text('global_step10')
    assert find_checkpoint(tmp_path, require_manifest=False) == tmp_path
    with pytest.raises(CheckpointError, match='global_step10'):
        find_checkpoint(tmp_path)
    ours = write(tmp_path / 'out', 'a')
    assert find_checkpoint(tmp_path / 'out', require_manifest=False) == ours
    (ours / 'sub' / 'weights.txt').write_text('')
    with pytest.raises(CheckpointError, match='broken'):
        find_checkpoint(ours, require_manifest=False)


def _orphan(folder, role, monkeypatch):
    """A sibling path that a process left which is dead now."""
    from twinkle.checkpoint import names as names_module

    with monkeypatch.context() as patch:
        patch.setattr(names_module, '_started', lambda pid: 1)
        return new_sibling(folder, role)


def test_an_interrupted_swap_is_found_and_repaired(tmp_path, monkeypatch):
    """Killed between the two renames, the old checkpoint is loaded from where it is, and the next save puts it back."""
    write(tmp_path, 'a', 'old')
    os.rename(tmp_path / 'a', _orphan(tmp_path / 'a', 'old', monkeypatch))
    for path in (tmp_path, tmp_path / 'a'):
        assert content(find_checkpoint(path)) == 'old'
    write(tmp_path, 'b')
    assert content(tmp_path / 'a') == 'old'
    assert hidden(tmp_path) == []


def test_of_several_moved_aside_the_newest_is_taken(tmp_path, monkeypatch):
    """With more than one interrupted swap, the order of saves decides."""
    out = tmp_path / 'out'
    shutil.copytree(write(out, 'a', 'first'), tmp_path / 'copy')
    os.rename(write(out, 'a', 'second'), _orphan(out / 'a', 'old', monkeypatch))
    os.rename(tmp_path / 'copy', _orphan(out / 'a', 'old', monkeypatch))
    assert len(hidden(out)) == 2
    assert content(find_checkpoint(out / 'a')) == 'second'
    write(out, 'b')
    assert content(out / 'a') == 'second'
    assert hidden(out) == []


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path, monkeypatch):
    """The next save removes what dead processes left, and nothing of a live process, another host, or anybody else."""
    tmp_path.joinpath('x').mkdir()
    dead = [_orphan(tmp_path / 'x', role, monkeypatch) for role in ('tmp', 'trash', 'old')]
    live = [new_sibling(tmp_path / 'x', 'tmp')]
    elsewhere = [path.with_name(path.name.replace('~', '~other-', 1)) for path in dead[:1]]
    foreign = [tmp_path / '.x.tmp', tmp_path / '.x.old~1', tmp_path / '.cache']
    for path in (*dead, *live, *elsewhere, *foreign):
        path.mkdir()
        (path / 'f').write_text('1')
    write(tmp_path, 'b')
    assert not any(path.exists() for path in dead)
    assert all((path / 'f').exists() for path in (*live, *elsewhere, *foreign))


def test_a_folder_that_is_locked_by_its_writer_stays(tmp_path, monkeypatch):
    """A writer that this process cannot see (another container, same host name) is known by its lock."""
    from twinkle.checkpoint.files import hold

    orphan = _orphan(tmp_path / 'x', 'tmp', monkeypatch)
    orphan.mkdir()
    with hold(orphan):
        write(tmp_path, 'b')
        assert orphan.exists()
    write(tmp_path, 'b')
    assert not orphan.exists()


# -- rotation ----------------------------------------------------------------------------------------------------------


def test_keep_last_keeps_the_newest(tmp_path):
    """The order is that of saving, not of names or clocks; saving a name again makes it the newest."""
    for name in ('c', 'b', 'a'):
        write(tmp_path, name)
    write(tmp_path, 'c')
    os.utime(tmp_path / 'a', (0, 0))
    write(tmp_path, 'd', keep_last=3)
    assert names(tmp_path) == ['a', 'c', 'd', 'latest']
    write(tmp_path, 'e', keep_last=1)
    assert names(tmp_path) == ['e', 'latest']
    assert hidden(tmp_path) == []


def test_keep_last_spares_what_latest_names_and_what_is_not_ours(tmp_path):
    """Rotation deletes only complete checkpoints that were saved here by that name, never the one of `latest`."""
    write(tmp_path, 'latest one')
    write(tmp_path, 'old')
    write(tmp_path, 'broken')
    (tmp_path / 'broken' / 'sub' / 'weights.txt').write_text('')
    os.rename(tmp_path / 'old', tmp_path / 'renamed by hand')
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'latest').write_text('latest one\n')
    for name in ('x', 'y'):
        write(tmp_path, name, keep_last=1, set_latest=False)
    assert names(tmp_path) == ['broken', 'latest', 'latest one', 'mine', 'renamed by hand', 'y']


@pytest.mark.parametrize('keep_last', [0, -1, 1.5, True, '2'])
def test_keep_last_must_be_a_positive_integer(tmp_path, keep_last):
    """A value that would delete everything, or means nothing, is refused before anything is written."""
    with pytest.raises(ConfigError, match='keep_last'):
        write(tmp_path, 'a', keep_last=keep_last)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_is_reported_and_the_save_stands(tmp_path, monkeypatch, caplog):
    """An old checkpoint that resists deletion does not end the run: the new one is in place."""
    write(tmp_path, 'a')

    def refuse(path, *args, **kwargs):
        raise PermissionError(f'no: {path}')

    monkeypatch.setattr(shutil, 'rmtree', refuse)
    with caplog.at_level('WARNING', logger='twinkle'):
        write(tmp_path, 'b', keep_last=1)
    assert 'could not be deleted' in caplog.text
    assert names(tmp_path) == ['b', 'latest']


# -- trainer state -----------------------------------------------------------------------------------------------------


def test_trainer_state_round_trips(tmp_path):
    """The numbers of the loop and what else JSON takes come back."""
    state = TrainerState(
        cur_step=7, consumed_train_samples=56, gradient_accumulation_steps=4, adapter_name='sft', extra={'a': [1, None]}
    )
    write_trainer_state(tmp_path, state)
    assert read_trainer_state(tmp_path) == state
    assert json.loads((tmp_path / 'trainer_state.json').read_text())['format_version'] == 1


@pytest.mark.parametrize(
    'keywords',
    [
        {'cur_step': -1},
        {'cur_step': 1.0},
        {'cur_step': True},
        {'gradient_accumulation_steps': 0},
        {'adapter_name': None},
    ],
)
def test_trainer_state_refuses_impossible_values(keywords):
    """A wrong type or range is named."""
    with pytest.raises(CheckpointError, match=next(iter(keywords))):
        TrainerState(**keywords)


@pytest.mark.parametrize('extra', [{'a': (1, 2)}, {1: 2}, {'a': math.nan}, {'a': object()}])
def test_trainer_state_refuses_what_json_would_change(tmp_path, extra):
    """What would come back as something else is not written."""
    with pytest.raises(CheckpointError, match='extra'):
        write_trainer_state(tmp_path, TrainerState(extra=extra))


@pytest.mark.parametrize(
    ('content', 'says'),
    [
        ('{"global_step": 5, "epoch": 1.0}', 'another tool'),
        ('[]', 'another tool'),
        ('{"format_version": 1}', "missing.*'cur_step'"),
        ('{"form', 'cannot be read'),
        (None, 'missing'),
    ],
)
def test_a_foreign_or_broken_trainer_state_is_refused(tmp_path, content, says):
    """Another trainer's file of the same name, a cut one and none at all are told apart."""
    if content is not None:
        (tmp_path / 'trainer_state.json').write_text(content)
    with pytest.raises(CheckpointError, match=says):
        read_trainer_state(tmp_path)


# -- hostile and newer files ------------------------------------------------------------------------------------------


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize('how', ['pickle', 'torch'])
@pytest.mark.parametrize('file', ['training_state.safetensors', 'training_state.json', 'trainer_state.json', MANIFEST])
def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(tmp_path, how, file):
    """Whichever of our files is replaced by a malicious pickle, it is refused and nothing in it runs."""
    with commit_checkpoint(tmp_path, 'last') as folder:
        save_state(folder, 'training_state', {'x': torch.ones(2)})
        write_trainer_state(folder, TrainerState())
    target, trap = tmp_path / 'last' / file, tmp_path / 'executed'
    if how == 'pickle':
        target.write_bytes(pickle.dumps(Bomb(str(trap))))
    else:
        torch.save({'state': Bomb(str(trap))}, target)
    with pytest.raises(CheckpointError, match=file.partition('.')[0]):
        find_checkpoint(tmp_path)
    if file != MANIFEST:
        with pytest.raises(CheckpointError, match=r'safetensors|json'):
            (read_trainer_state(tmp_path / 'last'), load_state(tmp_path / 'last', 'training_state'))
    assert not trap.exists()


def test_a_newer_format_is_refused_by_its_number(tmp_path):
    """Files of a later Twinkle are refused with both numbers and the way out."""
    write(tmp_path, 'a')
    for file, read in ((MANIFEST, find_checkpoint), ('trainer_state.json', read_trainer_state)):
        write_trainer_state(tmp_path / 'a', TrainerState())
        path = tmp_path / 'a' / file
        path.write_text(json.dumps({**json.loads(path.read_text()), 'format_version': 2}))
        with pytest.raises(CheckpointError, match=r'format_version 2.*up to 1.*Upgrade'):
            read(tmp_path / 'a')
        write(tmp_path, 'a')
