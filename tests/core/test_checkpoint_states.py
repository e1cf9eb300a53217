"""Training state in files without code: any nesting, real optimizers and schedules, damaged and hostile files."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.checkpoint import load_state, rng_state, save_state, set_rng_state
from twinkle.errors import CheckpointError


def same(a, b):
    """Equal in value, type, order of keys and bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bits(a), _bits(b))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def _bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def round_trip(folder, state):
    save_state(folder, 'state', state)
    return load_state(folder, 'state')


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(shape, generator=generator) * 100
    dtype = draw(st.sampled_from(DTYPES))
    tensor = values.abs().to(torch.uint8).to(dtype) if not dtype.is_floating_point else values.to(dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
nested = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(state=nested)
def test_any_nested_state_round_trips(tmp_path_factory, state):
    """Values, types, key types, key order and bits come back as they were, for any nesting."""
    assert same(state, round_trip(tmp_path_factory.getbasetemp(), state))


@pytest.mark.parametrize(
    'value',
    [
        2**63,
        -(2**63),
        2**20000,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        0.1 + 0.2,
        '\ud800',
        '',
    ],
    ids=lambda value: repr(value)[:24] if not isinstance(value, int) else str(value.bit_length()),
)
def test_awkward_numbers_and_strings_are_exact(tmp_path, value):
    """What JSON has no exact form for comes back all the same."""
    assert same([value, (value,), {'k': value}], round_trip(tmp_path, [value, (value,), {'k': value}]))


def test_one_tensor_in_two_places_stays_one(tmp_path):
    """An object that appears twice is one object again; views of one storage come back with their own values."""
    base = torch.arange(6.0)
    state = round_trip(tmp_path, {'a': base, 'b': base, 'view': base[2:4], 'matrix': base.view(2, 3).t()})
    assert state['a'] is state['b']
    assert torch.equal(state['view'], base[2:4])
    assert torch.equal(state['matrix'], base.view(2, 3).t())
    state['a'][2] = 9
    assert state['view'][0] == 2


def test_conjugated_and_parameter_tensors_are_saved_by_value(tmp_path):
    """Lazy conjugates are resolved; parameters come back as plain tensors without gradients."""
    lazy = torch.tensor([1 + 2j]).conj()
    state = round_trip(tmp_path, [lazy, torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 2])
    assert state[0].tolist() == [1 - 2j]
    assert type(state[1]) is torch.Tensor
    assert not any(tensor.requires_grad for tensor in state)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    """The files may be overwritten in place or deleted while the state is in use."""
    save_state(tmp_path, 'state', torch.arange(1000.0))
    loaded = load_state(tmp_path, 'state')
    with open(tmp_path / 'state.safetensors', 'r+b') as file:
        file.truncate(0)
    assert torch.equal(loaded, torch.arange(1000.0))


def test_numpy_scalars_become_python_numbers(tmp_path):
    """A learning rate from numpy does not stop a run at its first checkpoint."""
    assert same([0.1, 3, True], round_trip(tmp_path, [np.float64(0.1), np.int32(3), np.bool_(True)]))


class Colour:
    """Something that only pickle could keep."""


@pytest.mark.parametrize(
    ('state', 'where', 'kind'),
    [
        ({'optimizer': {'param_groups': [{'lr': Colour()}]}}, "state['optimizer']['param_groups'][0]['lr']", 'Colour'),
        ([1, {2: {3}}], 'state[1][2]', 'set'),
        ({'d': defaultdict(list)}, "state['d']", 'defaultdict'),
        ({Colour: 1}, 'the key', 'type'),
        ([b'x'], 'state[0]', 'bytes'),
        ([np.zeros(2)], 'state[0]', 'numpy.ndarray'),
        ({'m': torch.empty(2, device='meta')}, "state['m']", 'meta'),
        ({'s': torch.eye(2).to_sparse()}, "state['s']", 'sparse'),
        ([lambda: None], 'state[0]', 'function'),
    ],
)
def test_what_cannot_be_saved_is_refused_by_place_and_type(tmp_path, state, where, kind):
    """A value without a form that holds no code is named by its path in the state and its type; nothing is written."""
    with pytest.raises(CheckpointError) as error:
        save_state(tmp_path, 'state', state)
    assert where in str(error.value)
    assert kind in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself_or_is_too_deep_is_refused(tmp_path):
    """Cycles and endless nesting give a named error, not a crash of the interpreter."""
    loop: list = []
    loop.append({'again': loop})
    with pytest.raises(CheckpointError, match='contains itself'):
        save_state(tmp_path, 'state', loop)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match='too deeply'):
        save_state(tmp_path, 'state', deep)


# -- real states -------------------------------------------------------------------------------------------------------


def _trained(make_optimizer, make_scheduler=None, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    _advance(model, optimizer, scheduler, steps, seed=1)
    return model, optimizer, scheduler


def _advance(model, optimizer, scheduler, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


OPTIMIZERS = {
    'AdamW': lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    'Adam capturable': lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    'SGD': lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    'RMSprop': lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    'NAdam': lambda p: torch.optim.NAdam(p, lr=1e-2),
    'Adafactor': lambda p: torch.optim.Adafactor(p, lr=1e-2),
    'Rprop': lambda p: torch.optim.Rprop(p, lr=1e-2),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_goes_on_to_the_bit(tmp_path, name):
    """An optimizer that is loaded from our files takes the same further steps as one that was never saved."""
    model, optimizer, _ = _trained(OPTIMIZERS[name])
    save_state(tmp_path, 'optimizer', optimizer.state_dict())
    other, fresh, _ = _trained(OPTIMIZERS[name], steps=0)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(load_state(tmp_path, 'optimizer'))
    _advance(model, optimizer, None, 3, seed=2)
    _advance(other, fresh, None, 3, seed=2)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


SCHEDULERS = {
    'LambdaLR': lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    'MultiStepLR': lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4, 5]),
    'CosineAnnealingLR': lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    'OneCycleLR': lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 20),
    'CyclicLR': lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-1, cycle_momentum=False),
    'CosineAnnealingWarmRestarts': lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    'SequentialLR': lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize('name', SCHEDULERS)
def test_a_schedule_goes_on_to_the_bit(tmp_path, name):
    """A schedule that is loaded from our files gives the same further learning rates."""
    _, optimizer, scheduler = _trained(OPTIMIZERS['SGD'], SCHEDULERS[name])
    save_state(tmp_path, 'both', (optimizer.state_dict(), scheduler.state_dict()))
    _, fresh, restored = _trained(OPTIMIZERS['SGD'], SCHEDULERS[name], steps=0)
    kept = load_state(tmp_path, 'both')
    assert type(kept[1].get('milestones', Counter())) is Counter
    fresh.load_state_dict(kept[0])
    restored.load_state_dict(kept[1])
    for _ in range(6):
        for one in (optimizer, fresh):
            one.step()
        scheduler.step()
        restored.step()
        assert scheduler.get_last_lr() == restored.get_last_lr()


def test_a_gradient_scaler_round_trips(tmp_path):
    """The loss scale and its growth counter come back."""
    model, optimizer, _ = _trained(OPTIMIZERS['SGD'])
    scaler = torch.amp.GradScaler('cpu', init_scale=8.0, growth_interval=2)
    for _ in range(3):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    fresh = torch.amp.GradScaler('cpu')
    fresh.load_state_dict(round_trip(tmp_path, scaler.state_dict()))
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 16.0


def _draw():
    return random.random(), np.random.rand(), torch.rand(2).tolist(), random.gauss(0, 1), np.random.randn()


def test_random_generators_go_on_where_they_were(tmp_path):
    """Python, numpy and torch draw the same numbers after their states went through the files."""
    random.gauss(0, 1)
    np.random.randn()  # both keep half a pair of normals
    save_state(tmp_path, 'rng', rng_state())
    expected = _draw()
    _draw()
    set_rng_state(load_state(tmp_path, 'rng'))
    assert _draw() == expected


def test_a_broken_random_state_changes_no_generator():
    """What is not such a state is refused, and the generators stay where they were."""
    before = rng_state()
    broken = {**before, 'numpy': {'bit_generator': 'none'}, 'python': (3, tuple(range(625)), None)}
    with pytest.raises(CheckpointError, match='random generators'):
        set_rng_state(broken)
    assert same(rng_state(), before)


# -- broken and hostile files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('file', ['state.json', 'state.safetensors'])
@pytest.mark.parametrize('damage', ['missing', 'truncated', 'empty', 'of another save', 'garbage'])
def test_a_damaged_state_is_refused_by_file(tmp_path, file, damage):
    """A state file that is missing, cut, or not of the same save gives an error that names it."""
    save_state(tmp_path, 'state', {'x': torch.arange(100.0), 'y': [1, 2, 3]})
    path = tmp_path / file
    whole = path.read_bytes()
    if damage == 'missing':
        path.unlink()
    elif damage == 'of another save':
        save_state(tmp_path, 'other', {'x': torch.arange(100.0), 'y': [1, 2, 4]})
        path.write_bytes((tmp_path / file.replace('state', 'other')).read_bytes())
    else:
        path.write_bytes({'truncated': whole[: len(whole) // 2], 'empty': b'', 'garbage': b'\x93' * 500}[damage])
    with pytest.raises(CheckpointError, match=r'state\.(json|safetensors)'):
        load_state(tmp_path, 'state')


@pytest.mark.parametrize(
    'node',
    [{'call': 'os.system'}, {'tensor': '7'}, {'tensor': '0', 'dtype': 'save', 'shape': []}, {}, {'int': 'x'},
     {'tuple': 1}, {'items': [[1]]}, {'items': [[[], 1]]}, {'float': '1'}],
)  # fmt: skip
def test_a_tree_with_unknown_or_broken_nodes_is_refused(tmp_path, node):
    """A JSON tree that is well-formed and means nothing is a broken checkpoint, not a traceback."""
    import hashlib

    from safetensors.torch import save_file

    text = json.dumps({'format_version': 1, 'state': [node]}).encode()
    (tmp_path / 's.json').write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    save_file({'0': torch.ones(4, dtype=torch.uint8)}, tmp_path / 's.safetensors', metadata={'tree_sha256': digest})
    with pytest.raises(CheckpointError, match=r's\.'):
        load_state(tmp_path, 's')
