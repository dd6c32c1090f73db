"""Operations whose result depends on values. Nobody computes those, so something plausible stands for each.

A number is 1 and a condition is false: such a loss can be divided by and has a logarithm, such a gradient is
finite, such a choice of two is one of them. Where a shape depends on values it is the largest that it could
be."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from .machine import Machine

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def plain_value(torch: Any, dtype: Any) -> Any:
    """What a value of this type is said to be."""
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 1


def handlers(machine: Machine) -> dict[str, Handler]:
    """By aten's name. Each is given the operation and its arguments, and returns what stands for it."""
    torch = machine.torch

    def meta(shape: Any, dtype: Any) -> Any:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def scalar(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return plain_value(torch, args[0].dtype)

    def equal(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
        return True

    def nonzero(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return meta((args[0].numel(), args[0].dim()), torch.int64)

    def masked_select(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return meta((prod(shape),), args[0].dtype)

    def index(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        source, wanted = args
        if not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in wanted):
            return func(source, [_on_meta(torch, one) for one in wanted])
        numbers: list[Any] = []
        for one in wanted:
            if one is not None and one.dtype in (torch.bool, torch.uint8):
                numbers += [meta((one.numel(),), torch.int64) for _ in range(max(1, one.dim()))]
                if one.dim() == 0:
                    source = source.unsqueeze(len(numbers) - 1)
            else:
                numbers.append(_on_meta(torch, one))
        return func(source, numbers)

    def unique(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        count = args[0].numel()
        return (
            meta((count,), args[0].dtype),
            meta(args[0].shape, torch.int64),
            meta((count,), torch.int64),
        )

    def unique_dim(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        count = args[0].shape[args[1]]
        return meta(args[0].shape, args[0].dtype), meta((count,), torch.int64), meta((count,), torch.int64)

    def bincount(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        weighted = len(args) > 1 and args[1] is not None
        return meta((max(least, 2),), torch.float64 if weighted else torch.int64)

    def repeat_interleave(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return meta((kwargs.get("output_size") or args[0].numel(),), torch.int64)

    def nms(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return meta((args[0].shape[0],), torch.int64)

    def bag_backward(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return meta((args[5], args[0].shape[1]), args[0].dtype)

    return {
        "aten::_embedding_bag_dense_backward": bag_backward,
        "aten::_local_scalar_dense": scalar,
        "aten::item": scalar,
        "aten::equal": equal,
        "aten::nonzero": nonzero,
        "aten::masked_select": masked_select,
        "aten::index": index,
        "aten::_unique2": unique,
        "aten::unique_dim": unique_dim,
        "aten::unique_consecutive": unique,
        "aten::bincount": bincount,
        "aten::repeat_interleave": repeat_interleave,
        "torchvision::nms": nms,
    }


WAITS = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero", "aten::masked_select"),
        *(
            "aten::_unique2",
            "aten::unique_dim",
            "aten::unique_consecutive",
            "aten::bincount",
            "torchvision::nms",
        ),
    }
)
"""Whoever asks for one of these waits for the device, since the program must know the value or the shape."""


def _on_meta(torch: Any, tensor: Any) -> Any:
    """A tensor's shape alone."""
    return (
        tensor
        if tensor is None
        else torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    )
