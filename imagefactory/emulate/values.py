"""Operations whose result depends on values. Nobody computes those, so something plausible stands for each.

Of what whole.py does not know, a number is 1 and a condition is false: such a loss can be divided by and has
a logarithm, such a gradient is finite, such a choice of two is one of them. Where a shape depends on values
it is the largest that it could be."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from .machine import Machine
from .whole import Whole

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def plain_value(torch: Any, dtype: Any) -> Any:
    """What a value of this type is said to be."""
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 1


def handlers(machine: Machine, whole: Whole) -> dict[str, Handler]:
    """By aten's name. Each is given the operation and its arguments, and returns what stands for it."""
    torch = machine.torch

    def meta(shape: Any, dtype: Any) -> Any:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def scalar(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        value = whole.value(args[0])
        return plain_value(torch, args[0].dtype) if value is None else value.item()

    def equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return whole.compute(func, args, kwargs) is not False

    def known(otherwise: Handler) -> Handler:
        """The result itself, where the values that decide its shape are known."""

        def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            real = whole.compute(func, args, kwargs)
            if real is None:
                return otherwise(func, args, kwargs)
            made = [meta(one.shape, one.dtype) for one in (real if isinstance(real, tuple) else (real,))]
            for one, value in zip(made, real if isinstance(real, tuple) else (real,), strict=True):
                whole.keep(one, value)
            return tuple(made) if isinstance(real, tuple) else made[0]

        return answer

    def nonzero(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return meta((args[0].numel(), args[0].dim()), torch.int64)

    def masked_select(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        mask = whole.value(args[1])
        count = prod(shape) if mask is None else int(mask.expand(shape).sum())
        return meta((count,), args[0].dtype)

    def index(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        source, wanted = args
        if not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in wanted):
            return func(source, [_on_meta(torch, one) for one in wanted])
        numbers: list[Any] = []
        for one in wanted:
            if one is not None and one.dtype in (torch.bool, torch.uint8):
                mask = one if not machine.is_meta(one) else whole.value(one)
                count = one.numel() if mask is None else int(mask.sum())
                numbers += [meta((count,), torch.int64) for _ in range(max(1, one.dim()))]
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
        "aten::nonzero": known(nonzero),
        "aten::masked_select": known(masked_select),
        "aten::index": known(index),
        "aten::_unique2": known(unique),
        "aten::unique_dim": known(unique_dim),
        "aten::unique_consecutive": known(unique),
        "aten::bincount": known(bincount),
        "aten::repeat_interleave": known(repeat_interleave),
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
