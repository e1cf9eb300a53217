"""Sizes of a mesh: filled in where left out, and refused where they do not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from twinkle.errors import MeshError

__all__ = ['DEVICE_TYPES', 'DIMS', 'EXPERT_DIMS', 'check_device_type', 'check_sizes', 'fill_sizes', 'written']

DIMS = ('fsdp', 'pp', 'dp', 'cp', 'tp')
"""Dimensions that ranks are numbered along, from outer to inner."""
EXPERT_DIMS = ('ep_fsdp', 'ep', 'etp')
"""Dimensions that the ranks of one pipeline stage are numbered along for experts, from outer to inner."""
DEVICE_TYPES = ('cpu', 'cuda', 'npu')


def fill_sizes(given: Mapping[str, int | None]) -> dict[str, int]:
    """Every size. What is left out is 1, except `dp`, which takes what `world` leaves, `world`, and `ep_fsdp`.

    Raises:
        MeshError: sizes that are no positive integers, or a world that the others do not divide.
    """
    for name, size in given.items():
        if size is not None:
            _check_positive(name, size)
    sizes = {name: 1 if size is None else size for name, size in given.items()}
    rest = [dim for dim in DIMS if dim != 'dp']
    others = math.prod(sizes[dim] for dim in rest)
    if given['world'] is None:
        sizes['world'] = others * sizes['dp']
    elif given['dp'] is None:
        if sizes['world'] % others:
            raise MeshError(f'world_size={sizes["world"]} is not divisible by {written(sizes, rest)} = {others}.')
        sizes['dp'] = sizes['world'] // others
    if given['ep_fsdp'] is None:
        stage = max(sizes['world'] // sizes['pp'], 1)
        sizes['ep_fsdp'] = max(stage // (sizes['ep'] * sizes['etp']), 1)
    return sizes


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Refuse sizes that do not make a mesh.

    Raises:
        MeshError: with the sizes.
    """
    for name, size in sizes.items():
        _check_positive(name, size)
    product = math.prod(sizes[dim] for dim in DIMS)
    if product != sizes['world']:
        raise MeshError(
            f'{written(sizes, DIMS)} = {product}, and world_size={sizes["world"]}: they must be equal. '
            'DeviceMesh.from_sizes() fills in dp_size or world_size, whichever is left out.'
        )
    data = sizes['fsdp'] * sizes['dp']
    if data % sizes['ulysses']:
        raise MeshError(
            f'ulysses_size={sizes["ulysses"]} must divide the ranks that it is taken from: {written(sizes, ("fsdp", "dp"))} = {data}.'
        )
    stage = sizes['world'] // sizes['pp']
    if stage % (sizes['ep'] * sizes['etp']):
        raise MeshError(
            f'{written(sizes, ("ep", "etp"))} = {sizes["ep"] * sizes["etp"]} must divide the {stage} rank(s) of a pipeline stage '
            f'({written(sizes, ("world", "pp"))}).'
        )
    experts = math.prod(sizes[dim] for dim in EXPERT_DIMS)
    if experts != stage:
        raise MeshError(
            f'{written(sizes, EXPERT_DIMS)} = {experts}, and a pipeline stage has {stage} rank(s) ({written(sizes, ("world", "pp"))}): '
            'they must be equal. DeviceMesh.from_sizes() fills in ep_fsdp_size.'
        )
    if sizes['vpp'] > 1 and sizes['pp'] == 1:
        raise MeshError(
            f'vpp_size={sizes["vpp"]} divides the stages of a pipeline, and pp_size=1 is none. Set pp_size.'
        )


def check_device_type(device_type: object) -> None:
    """Refuse a device type that nobody has.

    Raises:
        MeshError: with the types that there are.
    """
    if device_type not in DEVICE_TYPES:
        raise MeshError(f'device_type={device_type!r} must be one of {", ".join(map(repr, DEVICE_TYPES))}.')


def written(sizes: Mapping[str, int], names: Iterable[str]) -> str:
    """Some sizes as a product: `dp_size=2 x tp_size=4`."""
    return ' x '.join(f'{name}_size={sizes[name]}' for name in names)


def _check_positive(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MeshError(f'{name}_size={size!r} must be an integer of at least 1.')
