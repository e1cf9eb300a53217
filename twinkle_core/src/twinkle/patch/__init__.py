"""Patches change a module: `Patch` is the base class, `apply_patch` applies one by name."""

from twinkle.patch.base import Patch, apply_patch

__all__ = ['Patch', 'apply_patch']
