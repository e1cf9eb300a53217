"""Options of `TransformersModel` that are part of its interface and not offered yet: said here, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinkle.errors import ConfigError, MeshError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinkle import DeviceMesh

__all__ = ['STRATEGIES', 'check_options']

STRATEGIES = ('accelerate', 'native_fsdp')

_OTHER_BACKEND = {'pp_size': 'pipeline', 'vpp_size': 'virtual pipeline', 'etp_size': 'expert tensor'}


def check_options(
    mesh: DeviceMesh,
    strategy: str,
    ddp_config: Mapping[str, Any] | None,
    fsdp_config: Mapping[str, Any] | None,
    memory_efficient_init: bool,
) -> None:
    """Refuse what cannot be done, before anything is loaded.

    Raises:
        ConfigError: an unknown strategy.
        MeshError: a mesh that this backend does not take.
        NotSupportedError: an option that this version does not carry out.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f'strategy={strategy!r} must be one of {", ".join(map(repr, STRATEGIES))}.')
    for size, what in _OTHER_BACKEND.items():
        if (getattr(mesh, size) or 1) > 1:
            raise MeshError(
                f'{size}={getattr(mesh, size)}: TransformersModel has no {what} parallelism. '
                'MegatronModel has: pip install twinkle-megatron'
            )
    if mesh.world_size > 1:
        raise NotSupportedError(
            f'TransformersModel trains in one process in this version; the mesh has {mesh.world_size} ({mesh}). Run the script '
            'without torchrun, on a mesh of one.'
        )
    later = {
        'ddp_config': ddp_config is not None,
        'fsdp_config': fsdp_config is not None,
        'memory_efficient_init': memory_efficient_init,
    }
    given = [name for name, is_given in later.items() if is_given]
    if given:
        raise NotSupportedError(
            f'{", ".join(given)}: only of use with several processes, which this version does not train with.'
        )
