"""fp8: what is checked, and the conversion by Accelerate's recipe, against a stand-in for Transformer Engine (no GPU is needed)."""

from __future__ import annotations

import contextlib
import sys
import types

import accelerate.utils.dataclasses
import accelerate.utils.transformer_engine
import pytest
import torch

from tests.helpers import reference
from twinkle.errors import ConfigError, DataError, NotSupportedError
from twinkle.model import TransformersModel
from twinkle_hf import fp8

ROWS = reference.random_rows(4)


@pytest.fixture
def engine(monkeypatch):
    """A `transformer_engine` whose layers are PyTorch's, and which notes when its autocast is on."""
    log: list[tuple[bool, object]] = []

    class Linear(torch.nn.Linear):
        def __init__(self, in_features, out_features, bias=True, params_dtype=None):
            super().__init__(in_features, out_features, bias=bias, dtype=params_dtype)

    class LayerNorm(torch.nn.LayerNorm):
        pass

    @contextlib.contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        log.append((enabled, fp8_recipe))
        yield

    names = ('transformer_engine', 'transformer_engine.pytorch', 'transformer_engine.pytorch.fp8',
             'transformer_engine.common', 'transformer_engine.common.recipe')  # fmt: skip
    modules = {name: types.ModuleType(name) for name in names}
    torch_part, recipe = modules['transformer_engine.pytorch'], modules['transformer_engine.common.recipe']
    torch_part.Linear, torch_part.LayerNorm, torch_part.TransformerLayer = Linear, LayerNorm, Linear
    torch_part.fp8_autocast = fp8_autocast
    modules['transformer_engine.pytorch.fp8'].check_mxfp8_support = lambda: (False, 'a stand-in')
    recipe.Format = types.SimpleNamespace(HYBRID='hybrid', E4M3='e4m3')
    recipe.DelayedScaling = lambda **options: ('delayed', options)
    for name, module in modules.items():
        parent, _, child = name.rpartition('.')
        if parent:
            setattr(modules[parent], child, module)
        monkeypatch.setitem(sys.modules, name, module)
    for place in (accelerate.utils.dataclasses, accelerate.utils.transformer_engine):
        monkeypatch.setattr(place, 'is_transformer_engine_available', lambda: True)
    monkeypatch.setattr('twinkle_hf.precision.check_fp8', lambda device_type: None)
    return types.SimpleNamespace(Linear=Linear, log=log)


def test_layers_are_converted_and_the_head_is_not(tiny_llama, engine):
    """Linear layers become Transformer Engine's with the same weights; the head stays; fp8 is on in training and off in evaluation."""
    plain = TransformersModel(tiny_llama, mixed_precision='bf16')
    model = TransformersModel(tiny_llama, mixed_precision='fp8', fp8_config={'fp8_format': 'E4M3', 'margin': 1})
    assert isinstance(model.model.model.layers[0].mlp.down_proj, engine.Linear)
    assert type(model.model.lm_head) is torch.nn.Linear
    state = plain.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.model.state_dict().items())
    model.set_processor('default', pad_to_multiple_of=8)
    logits = model.forward_only(inputs=ROWS)['logits']
    assert engine.log
    assert not any(enabled for enabled, _ in engine.log)
    plain.set_processor('default', pad_to_multiple_of=8)
    torch.testing.assert_close(logits, plain.forward_only(inputs=ROWS)['logits'])
    engine.log.clear()
    assert model.forward_backward(inputs=ROWS)['loss'] == pytest.approx(plain.forward_backward(inputs=ROWS)['loss'])
    enabled, recipe = engine.log[-1]
    assert enabled
    assert recipe == ('delayed', {'fp8_format': 'e4m3', 'margin': 1})
    assert 'fp8' in model.get_train_configs()


def test_shapes_and_options_are_checked(tiny_llama, engine):
    """A batch that fp8 kernels do not take is refused with the way out; so are unknown options, and options without fp8."""
    model = TransformersModel(tiny_llama, mixed_precision='fp8')
    with pytest.raises(DataError, match=r'multiple of 8 .* pad_to_multiple_of=8'):
        model.forward_backward(
            inputs={'input_ids': torch.ones(1, 7, dtype=torch.long), 'labels': torch.ones(1, 7, dtype=torch.long)}
        )
    with pytest.raises(ConfigError, match='TERecipeKwargs'):
        TransformersModel(tiny_llama, mixed_precision='fp8', fp8_config={'amax': 3})
    with pytest.raises(ConfigError, match="fp8_config is for mixed_precision='fp8'"):
        TransformersModel(tiny_llama, mixed_precision='no', fp8_config={'margin': 1})


@pytest.mark.parametrize(
    ('available', 'capability', 'installed', 'told'),
    [
        (False, (9, 0), True, 'needs an NVIDIA GPU'),
        (True, (8, 0), True, r'8\.9 or later; .* has 8\.0'),
        (True, (9, 0), False, 'pip install .*transformer-engine'),
    ],
)
def test_what_is_missing_is_said(monkeypatch, available, capability, installed, told):
    """No GPU, one without fp8, and no Transformer Engine: each has its own message."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: available)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'a GPU')
    monkeypatch.setattr(fp8, 'find_spec', lambda name: installed or None)
    with pytest.raises(NotSupportedError, match=told):
        fp8.check_fp8('cuda')
