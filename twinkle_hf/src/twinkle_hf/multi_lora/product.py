"""The product that LoRAs of several tenants make of one batch: each row with the weights of its own tenant.

Shapes: N rows, T tokens, I and O features in and out, R the largest rank in use, G groups of rows of one tenant each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ['Rows', 'lora_product']


@dataclass(frozen=True)
class Rows:
    """Whose the rows of a batch are. Rows of a tenant follow each other.

    Attributes:
        slots: the slot of each group.
        counts: rows of each group.
        ranks: the rank of each group in this layer; 0 where its tenant has no LoRA there.
        index_G: the slots as a tensor.
        scale_G: what each group's product is multiplied with.
    """

    slots: tuple[int, ...]
    counts: tuple[int, ...]
    ranks: tuple[int, ...]
    index_G: Tensor
    scale_G: Tensor

    @property
    def even(self) -> bool:
        """Whether all groups have as many rows, so that a group is one matrix product."""
        return len(set(self.counts)) == 1


def lora_product(output_NTO: Tensor, x_NTI: Tensor, rows: Rows, down: Tensor, up: Tensor, *weights: Tensor) -> Tensor:
    """`output + scale * (x A^T) B^T` for each row with its own tenant's A and B.

    Args:
        down, up: all slots' weights, [M, R, I] and [M, R, O] (B transposed). Those of the groups' slots are read.
        weights: A [r, I] and B [O, r] of each group with a rank above 0, in turn: the leaves that take the gradients. They are views of
            `down` and `up`, of which nothing else is touched.
    """
    result: Tensor = _LoraProduct.apply(output_NTO, x_NTI, rows, down, up, *weights)
    return result


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, rows: Rows, down: Tensor, up: Tensor, *weights: Tensor) -> Tensor:
        width = max(rows.ranks)
        ctx.rows, ctx.width, ctx.stacks = rows, width, (down, up)
        a, b, scale = _selected(rows, width, down, up, x.shape[0])
        groups = a.shape[0]
        x_g = x.to(down.dtype).reshape(groups, -1, x.shape[-1])
        h = torch.bmm(x_g, a.transpose(1, 2)) * scale
        out_g = output.reshape(groups, -1, output.shape[-1])
        result = torch.baddbmm(out_g, h, b) if out_g.dtype == h.dtype else out_g + torch.bmm(h, b).to(out_g.dtype)
        ctx.save_for_backward(x_g, h)
        ctx.shapes, ctx.x_dtype = (x.shape, output.shape), x.dtype
        return result.view(output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Any, ...]:
        x_g, h = ctx.saved_tensors
        rows: Rows = ctx.rows
        down, up = ctx.stacks
        x_shape, _ = ctx.shapes
        # The weights have not changed since forward: a step comes after all backward passes of its window.
        a, b, scale = _selected(rows, ctx.width, down, up, x_shape[0])
        groups = a.shape[0]
        d_out = d_result.to(down.dtype).reshape(groups, -1, d_result.shape[-1])
        d_h = torch.bmm(d_out, b.transpose(1, 2)) * scale
        d_x = torch.bmm(d_h, a).view(x_shape).to(ctx.x_dtype) if ctx.needs_input_grad[1] else None
        d_a = torch.bmm(d_h.transpose(1, 2), x_g)  # [G, R, I]
        d_b = torch.bmm(h.transpose(1, 2), d_out)  # [G, R, O]
        return (d_result, d_x, None, None, None, *_by_tenant(rows, d_a, d_b))


def _selected(rows: Rows, width: int, down: Tensor, up: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and scales of each group, or of each row where groups have unequal numbers of rows."""
    index, scale = rows.index_G, rows.scale_G
    if not rows.even:
        counts = torch.tensor(rows.counts, device=index.device)
        index, scale = index.repeat_interleave(counts), scale.repeat_interleave(counts)
    return down[:, :width][index], up[:, :width][index], scale.view(-1, 1, 1).to(down.dtype)


def _by_tenant(rows: Rows, d_a: Tensor, d_b: Tensor) -> list[Tensor]:
    """Gradients of each group's A and B, of its own rank."""
    found: list[Tensor] = []
    start = 0
    for group, (rank, count) in enumerate(zip(rows.ranks, rows.counts, strict=True)):
        if rows.even:
            own_a, own_b = d_a[group], d_b[group]
        else:
            own_a, own_b = d_a[start : start + count].sum(0), d_b[start : start + count].sum(0)
            start += count
        if rank:
            found += [own_a[:rank], own_b[:rank].t()]
    return found
