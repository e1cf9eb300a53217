"""Several processes: how weights, rows and sequences are spread over them, and what is brought together again.

`Layout` is what the model asks. One process has the plain one; `build_layout` makes another where the mesh has more.
"""

from __future__ import annotations

from twinkle_hf.parallel.groups import Groups
from twinkle_hf.parallel.layout import Layout, build_layout

__all__ = ['Groups', 'Layout', 'build_layout']
