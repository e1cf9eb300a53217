"""An optimizer's state by the names of its parameters, so that it fits however they are grouped, sharded or numbered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.errors import CheckpointError

if TYPE_CHECKING:
    from torch.nn import Parameter

__all__ = ['arranged', 'check_optimizer', 'load_named_state', 'named_state', 'parameter_names']


def parameter_names(optimizer: Any, named: Iterable[tuple[str, Parameter]]) -> list[list[str]]:
    """The names of the optimizer's parameters, by group; one that is none of `named` is called by its number."""
    names = {id(parameter): name for name, parameter in named}
    numbers = iter(range(10**9))
    return [
        [names.get(id(parameter), f'#{number}') for parameter, number in zip(group['params'], numbers, strict=False)]
        for group in optimizer.param_groups
    ]


def named_state(optimizer: Any, names: list[list[str]]) -> dict[str, Any]:
    """`groups`, each with its `names` and options, and `state` by name."""
    state = optimizer.state_dict()
    by_index = {
        index: name
        for group, group_names in zip(state['param_groups'], names, strict=True)
        for index, name in zip(group['params'], group_names, strict=True)
    }
    groups = [
        {**{key: value for key, value in group.items() if key not in ('params', 'param_names')}, 'names': group_names}
        for group, group_names in zip(state['param_groups'], names, strict=True)
    ]
    return {'groups': groups, 'state': {by_index[index]: value for index, value in state['state'].items()}}


def check_optimizer(kept: Mapping[str, Any], names: list[list[str]], folder: Path) -> None:
    """Raise unless a kept state is of the same parameters.

    Raises:
        CheckpointError: names that are here and not there, or there and not here.
    """
    here = {name for group in names for name in group}
    there = {name for group in kept['groups'] for name in group['names']}
    if here != there:
        raise CheckpointError(
            f'{folder}: the optimizer was saved with {len(there)} parameters and this one has {len(here)}; saved and not here: '
            f'{sorted(there - here)[:3]}, here and not saved: {sorted(here - there)[:3]}. It belongs to another model, adapter or '
            'optimizer; pass resume_only_model=True to take the weights alone.'
        )


def arranged(scheduler_state: Mapping[str, Any], names: list[list[str]], kept: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's state for these groups: what it keeps per group is taken from the group that the first parameter was in."""
    place = {name: index for index, group in enumerate(kept['groups']) for name in group['names']}
    order = [place[group[0]] for group in names if group]
    saved = len(kept['groups'])
    if order == list(range(saved)):
        return dict(scheduler_state)
    return {
        key: [value[index] for index in order] if isinstance(value, list) and len(value) == saved else value
        for key, value in scheduler_state.items()
    }


def load_named_state(optimizer: Any, names: list[list[str]], kept: Mapping[str, Any]) -> None:
    """Put a kept state into an optimizer whose groups may be others: each takes the options of its first parameter's group."""
    options = {name: group for group in kept['groups'] for name in group['names']}
    state = optimizer.state_dict()
    groups = []
    for group, group_names in zip(state['param_groups'], names, strict=True):
        saved = {key: value for key, value in options[group_names[0]].items() if key != 'names'} if group_names else {}
        extra = {key: group[key] for key in ('param_names',) if key in group}
        groups.append({**saved, **extra, 'params': group['params']})
    by_name = {
        name: index
        for group, group_names in zip(state['param_groups'], names, strict=True)
        for index, name in zip(group['params'], group_names, strict=True)
    }
    optimizer.load_state_dict(
        {'param_groups': groups, 'state': {by_name[name]: value for name, value in kept['state'].items()}}
    )
