"""The process groups of a mesh, as this rank sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from twinkle.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle import DeviceMesh

__all__ = ['Groups']


class Groups:
    """This rank's peers along each dimension of a mesh.

    Attributes:
        data: ranks that read other rows than this one.
        replicas: ranks whose gradients add up to this one's: those that see other rows, or other parts of the same rows.
        sequence: ranks that hold other parts of this one's sequences (ulysses).
        tensor: ranks that hold other parts of this one's layers (tp).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        if mesh.world_size > 1 and not dist.is_initialized():
            raise StateError(
                f'The mesh has {mesh.world_size} processes ({mesh.describe()}), and their process group is not started: call '
                'twinkle.initialize(global_device_mesh=...) first.'
            )
        self.data = self._group('data')
        self.sequence = self._group('ulysses')
        self.tensor = self._group('tp')
        self.replicas = self._of(_replicas(mesh))

    @property
    def replica_count(self) -> int:
        """How many ranks' gradients add up."""
        return self.mesh.fsdp_size * self.mesh.dp_size

    @property
    def sequence_size(self) -> int:
        """How many ranks split a sequence."""
        return self.mesh.ulysses_size

    @property
    def sequence_rank(self) -> int:
        """Which part of its sequences this rank holds."""
        return self.mesh.coordinates()['ulysses']

    def sum(self, value: Tensor, group: Any) -> Tensor:
        """`value` summed over a group; itself where there is none."""
        if group is None:
            return value
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    def torch_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        """A torch `DeviceMesh` of all ranks whose last dimensions are the given ones.

        Ranks are numbered fsdp, dp here, from outer to inner, and torch wants replicas outside of shards.
        """
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh

        ranks = torch.arange(self.mesh.world_size).view(self.mesh.fsdp_size, self.mesh.dp_size)
        return TorchMesh(self.mesh.device_type, ranks.t().reshape(shape), mesh_dim_names=names)

    def _group(self, dim: str) -> Any:
        return self._of(self.mesh.groups(dim))

    def _of(self, groups: list[list[int]]) -> Any:
        """This rank's group among groups of all ranks; None where each has one rank. Every rank makes all of them, in one order."""
        if len(groups[0]) == 1:
            return None
        if len(groups) == 1:
            return dist.group.WORLD
        own = None
        for ranks in groups:
            made = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own = made
        return own


def _replicas(mesh: DeviceMesh) -> list[list[int]]:
    """Ranks with the same place along every dimension but fsdp and dp."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        found.setdefault((place['pp'], place['cp'], place['tp']), []).append(rank)
    return list(found.values())
