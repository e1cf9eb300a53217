"""cookbook/transformers/fsdp2.py under torchrun: trained in one go, and stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from peft import PeftModel

from tests.helpers.launch import torchrun
from tests.helpers.models import tiny_llama_dir
from tests.helpers.tokenizers import tiny_tokenizer

SCRIPT = Path(__file__).parents[2] / 'cookbook' / 'transformers' / 'fsdp2.py'


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    tokenizer = tiny_tokenizer()
    folder = tiny_llama_dir(tmp_path_factory.mktemp('tiny'), vocab=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / 'metrics.jsonl').read_text().splitlines()
    return {row['step']: row['loss'] for row in map(json.loads, lines)}


def run(tiny: str, folder: Path, *arguments: str) -> None:
    common = ['--model', tiny, '--output-dir', str(folder), '--lr', '1e-2', '--save-steps', '2']
    done = torchrun(2, SCRIPT, *common, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize('kind', [[], ['--lora']], ids=['full', 'lora'])
def test_stopped_and_resumed_equals_one_go(tiny, tmp_path, kind):
    """Losses of the resumed run are those of the one that was not stopped, the data order included; the checkpoint is plain files."""
    run(tiny, tmp_path / 'straight', *kind)
    straight = losses(tmp_path / 'straight')
    assert len(straight) >= 5
    run(tiny, tmp_path / 'parts', *kind, '--stop-after', '3')
    first = losses(tmp_path / 'parts')
    assert first == {step: straight[step] for step in (1, 2, 3)}
    run(tiny, tmp_path / 'parts', *kind, '--resume', str(tmp_path / 'parts'))
    assert losses(tmp_path / 'parts') == straight
    last = tmp_path / 'parts' / 'last'
    if kind:
        base = transformers.AutoModelForCausalLM.from_pretrained(tiny)
        assert isinstance(PeftModel.from_pretrained(base, last), PeftModel)
    else:
        transformers.AutoModelForCausalLM.from_pretrained(last)
        run(str(last), tmp_path / 'again', '--stop-after', '1', '--efficient-init')
        assert losses(tmp_path / 'again')[1] < straight[1]
