"""What of a mesh `TransformersModel` takes: said here, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from twinkle import DeviceMesh

__all__ = ['STRATEGIES', 'check_mesh']

STRATEGIES = ('accelerate', 'native_fsdp')

_OTHER_BACKEND = {'pp_size': 'pipeline', 'vpp_size': 'virtual pipeline', 'etp_size': 'expert tensor'}


def check_mesh(mesh: DeviceMesh, strategy: str) -> None:
    """Refuse what cannot be done, before anything is loaded.

    Raises:
        ConfigError: an unknown strategy.
        MeshError: a mesh that this backend does not take.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f'strategy={strategy!r} must be one of {", ".join(map(repr, STRATEGIES))}.')
    for size, what in _OTHER_BACKEND.items():
        if getattr(mesh, size) > 1:
            raise MeshError(
                f'{size}={getattr(mesh, size)}: TransformersModel has no {what} parallelism. '
                'MegatronModel has: pip install twinkle-megatron'
            )
    if mesh.cp_size > 1:
        raise MeshError(
            f'cp_size={mesh.cp_size}: TransformersModel has no ring attention, since Transformers hands attention to kernels of many '
            'kinds, which do not return what a ring needs. Use ulysses_size, which splits sequences for any of them, or MegatronModel.'
        )
    if mesh.sequence_parallel and mesh.ulysses_size == 1 and mesh.tp_size == 1:
        raise MeshError('sequence_parallel=True splits activations among ranks: set ulysses_size or tp_size above 1.')
    if mesh.sequence_parallel and mesh.tp_size > 1:
        raise MeshError(
            f'sequence_parallel=True with tp_size={mesh.tp_size}: Transformers keeps activations whole between tensor-parallel layers. '
            'Use ulysses_size to split sequences, or MegatronModel.'
        )
    if mesh.ulysses_size > 1 and mesh.tp_size > 1:
        raise MeshError(
            f'ulysses_size={mesh.ulysses_size} and tp_size={mesh.tp_size} both split attention heads, and TransformersModel takes one of '
            'them at a time. MegatronModel takes cp_size with tp_size.'
        )
    if strategy == 'accelerate' and (mesh.tp_size > 1 or mesh.ep_size > 1):
        raise MeshError(
            f"tp_size={mesh.tp_size}, ep_size={mesh.ep_size} need strategy='native_fsdp': Accelerate has data parallelism only here."
        )
