"""How processes are laid out: who shares data, who shares a model, who talks to whom. Plain arithmetic, no processes needed."""

from twinkle.device_mesh.mesh import DeviceMesh, default_device_mesh
from twinkle.device_mesh.placement import DeviceGroup, get_device_placement

__all__ = ['DeviceGroup', 'DeviceMesh', 'default_device_mesh', 'get_device_placement']
