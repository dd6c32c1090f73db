"""Attention: which kernel a GPU would take, since their memory differs by the square of the length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .machine import Machine

FLASH = (8, 0)
"""The capability from which torch takes the flash kernel, for half precision and without a mask."""
WIDEST = 256
ROWS = 32
"""The efficient kernel keeps its sums in blocks of so many rows."""


def install(machine: Machine) -> None:
    """In place of torch's choice, which knows of no GPU here."""
    torch = machine.torch
    plain = torch.nn.functional.scaled_dot_product_attention
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        width = query.shape[-1]
        if (
            machine.find(query) is None
            or query.dim() != 4
            or not width == key.shape[-1] == value.shape[-1] <= WIDEST
            or key.shape[:2] != query.shape[:2]
        ):
            rest = {"enable_gqa": True} if enable_gqa else {}
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **rest)
        half = query.dtype in (torch.float16, torch.bfloat16)
        if attn_mask is None and half and machine.profile.capability >= FLASH:
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0.0)
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        kept = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        return efficient(query, key, value, attn_mask, kept, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = attention


def handlers(machine: Machine) -> dict[str, Callable[..., Any]]:
    """The shapes of both kernels, which older versions of torch do not tell."""
    torch = machine.torch

    def empty(*shape: int, dtype: Any) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    def attended(query: Any, value: Any) -> Any:
        batch, heads, rows, _ = query.shape
        return empty(batch, rows, heads, value.shape[-1], dtype=query.dtype).transpose(1, 2)

    def flash(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        query, key, value = args[:3]
        batch, heads, rows, _ = query.shape
        sums = empty(batch, heads, rows, dtype=torch.float32)
        seed, offset = (empty(dtype=torch.int64) for _ in range(2))
        nothing = empty(0, dtype=query.dtype)
        return attended(query, value), sums, None, None, rows, key.shape[2], seed, offset, nothing

    def efficient(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        query, _, value = args[:3]
        batch, heads, rows, _ = query.shape
        kept = -(-rows // ROWS) * ROWS if args[4] else 0
        seed, offset = (empty(dtype=torch.int64) for _ in range(2))
        return attended(query, value), empty(batch, heads, kept, dtype=torch.float32), seed, offset

    return {
        "aten::_scaled_dot_product_flash_attention": flash,
        "aten::_scaled_dot_product_efficient_attention": efficient,
    }
