"""Emulate torch operations on tensors of an emulated device: compute shapes, charge time.

torch calls `Dispatch` for each operation below autograd: forward, backward and optimizer. An operation
without such a tensor runs unchanged.

`flops_of` computes the arithmetic from the shapes of inputs and outputs. It is pure. A multiplication and an
addition are two operations. For an operation without a rule, only the bytes that it moves count.

`IntegerValues` computes integers and conditions (labels, masks, lengths) on the host, because programs read
them: the length of the longest sentence, whether each label is a class, which rows are masked. They are
small, and their cost is hidden like all costs of emulation. Results of floating-point operations have no
value.

`handlers` replace operations whose result depends on unknown values: a number is 1 and a condition is false.
So a program can divide by a loss or take its logarithm, and a gradient is finite. A shape that depends on
values is the largest possible one.

`install_attention` chooses the kernel that a GPU would use, because the memory of these kernels differs by
the square of the length.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from .machine import DeviceStorage, Machine

Shape = Sequence[int]


def flops_of(name: str, ins: Sequence[Shape], outs: Sequence[Shape], *, transposed: bool = False) -> float:
    """Return the arithmetic operations of one call.

    `name` is the aten name without its namespace (`addmm`). `ins` and `outs` are tensor shapes. `transposed`
    applies to convolutions.
    """
    if name in MATMULS:
        return _matmul(ins[-2:], outs[0])
    if name.startswith("_scaled_dot_product"):
        return _attention(name, ins)
    if name in CONVOLUTIONS and ins:
        return _convolution(ins[0], ins[1], outs[0], transposed=transposed)
    if name in BACKWARDS:
        gradient, image, weight = ins[0], ins[1], ins[2]
        once = _convolution(image, weight, gradient, transposed=transposed)
        return once * sum(1 for out in outs if len(out) == len(weight))
    return 0.0


def profile_name(name: str) -> str:
    """Return the name of an operation in profiles."""
    if name.startswith("_scaled_dot_product"):
        return "attention_backward" if "backward" in name else "attention"
    return "backward" if name in BACKWARDS else "convolution" if name in CONVOLUTIONS else "product"


MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation"})
CONVOLUTIONS = frozenset({"convolution", "_convolution", "cudnn_convolution"})
BACKWARDS = frozenset({"convolution_backward"})


def _matmul(ins: Sequence[Shape], out: Shape) -> float:
    """Return the operations of `(..., m, k) x (..., k, n)`: k multiplications and additions per result."""
    inner = ins[0][-1] if ins[0] else 1
    return 2.0 * prod(out) * inner


def _convolution(image: Shape, weight: Shape, out: Shape, *, transposed: bool) -> float:
    """Return the operations: a product over kernel and group channels per result (transposed: per input)."""
    points = prod(image if transposed else out)
    return 2.0 * points * prod(weight[1:])


def _attention(name: str, ins: Sequence[Shape]) -> float:
    """Return the operations: two products of query length x key length x width; 2.5 times as many
    backward.
    """
    if "backward" in name:
        _, query, key, value = ins[0], ins[1], ins[2], ins[3]
        return 2.5 * _forward(query, key, value)
    return _forward(ins[0], ins[1], ins[2])


def _forward(query: Shape, key: Shape, value: Shape) -> float:
    *batch, length, width = query
    return 2.0 * prod(batch) * length * key[-2] * (width + value[-1])


LARGEST = 1 << 20
"""The limit of elements of a tensor with a value."""
_NAME = "_emulated_value"
# Operations whose result is random or not initialized.
_UNSURE = (
    "rand",
    "multinomial",
    "bernoulli",
    "empty",
    "dropout",
    "normal",
    "uniform",
    "geometric",
    "poisson",
)


class _Unknown(Exception):
    """A tensor has no value."""


class IntegerValues:
    """The known values of tensors, stored as an attribute of each tensor."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._tensor = machine, machine.torch.Tensor

    def value(self, tensor: Any) -> Any:
        """Return the value of a device tensor as a host tensor, None if it is unknown."""
        return tensor.__dict__.get(_NAME)

    def keep(self, tensor: Any, value: Any) -> None:
        """Store the value of a tensor. `value` is None if it is no longer known."""
        if value is not None and not tensor.dtype.is_floating_point and value.numel() <= LARGEST:
            tensor.__dict__[_NAME] = value
        else:
            tensor.__dict__.pop(_NAME, None)

    def follow(self, func: Any, short: str, args: Any, kwargs: Any, out: Any, *, mutable: bool) -> None:
        """Apply an operation to the values too, if the values of all arguments are known."""
        if not isinstance(out, self._tensor) or out.dtype.is_floating_point or out.dtype.is_complex:
            return
        value = None
        if out.numel() <= LARGEST and not any(word in short for word in _UNSURE):
            value = self.compute(func, args, kwargs)
        if value is not None and tuple(value.shape) == tuple(out.shape):
            self.keep(out, value)
        elif mutable:
            self.keep(out, None)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result on the host, None if an argument has no value."""
        try:
            known = {name: self._known(argument) for name, argument in kwargs.items()}
            return func(*(self._known(argument) for argument in args), **known)
        except (_Unknown, NotImplementedError, RuntimeError, IndexError):
            return None

    def _known(self, argument: Any) -> Any:
        if isinstance(argument, self._tensor):
            if not self._machine.is_meta(argument):
                return argument
            value = self.value(argument)
            if value is None:
                raise _Unknown
            return value
        if isinstance(argument, list | tuple):
            return type(argument)(self._known(item) for item in argument)
        if isinstance(argument, self._machine.torch.device):
            return self._machine.torch.device("cpu")
        return argument


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def plain_value(torch: Any, dtype: Any) -> Any:
    """Return the placeholder value for this type."""
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 1


def handlers(machine: Machine, integers: IntegerValues) -> dict[str, Handler]:
    """Return handlers by aten name. Each takes the operation and its arguments, and returns a result."""
    torch = machine.torch

    def meta(shape: Any, dtype: Any) -> Any:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def scalar(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        value = integers.value(args[0])
        return plain_value(torch, args[0].dtype) if value is None else value.item()

    def equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return integers.compute(func, args, kwargs) is not False

    def known(otherwise: Handler) -> Handler:
        """Return the real result if the values that decide its shape are known."""

        def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            real = integers.compute(func, args, kwargs)
            if real is None:
                return otherwise(func, args, kwargs)
            outputs = [
                meta(output.shape, output.dtype) for output in (real if isinstance(real, tuple) else (real,))
            ]
            for output, value in zip(outputs, real if isinstance(real, tuple) else (real,), strict=True):
                integers.keep(output, value)
            return tuple(outputs) if isinstance(real, tuple) else outputs[0]

        return answer

    def nonzero(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return meta((args[0].numel(), args[0].dim()), torch.int64)

    def masked_select(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        mask = integers.value(args[1])
        count = prod(shape) if mask is None else int(mask.expand(shape).sum())
        return meta((count,), args[0].dtype)

    def index(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        source, indices = args
        if not any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in indices):
            return func(source, [_on_meta(torch, item) for item in indices])
        numbers: list[Any] = []
        for item in indices:
            if item is not None and item.dtype in (torch.bool, torch.uint8):
                mask = item if not machine.is_meta(item) else integers.value(item)
                count = item.numel() if mask is None else int(mask.sum())
                numbers += [meta((count,), torch.int64) for _ in range(max(1, item.dim()))]
                if item.dim() == 0:
                    source = source.unsqueeze(len(numbers) - 1)
            else:
                numbers.append(_on_meta(torch, item))
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
"""Operations that wait for the device, because the program needs the value or the shape."""


def _on_meta(torch: Any, tensor: Any) -> Any:
    """Return an empty meta tensor of the same shape."""
    return (
        tensor
        if tensor is None
        else torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    )


FLASH = (8, 0)
"""The first capability for which torch uses the flash kernel, for half precision and without a mask."""
WIDEST = 256
ROWS = 32
"""The efficient kernel stores its sums in blocks of this number of rows."""


def install_attention(machine: Machine) -> None:
    """Choose the attention kernel as torch does on a GPU."""
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
        needs_gradient = torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        )
        return efficient(query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = attention


def attention_handlers(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return handlers with the shapes of both kernels, which older torch versions lack."""
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
        length = -(-rows // ROWS) * ROWS if args[4] else 0
        seed, offset = (empty(dtype=torch.int64) for _ in range(2))
        return attended(query, value), empty(batch, heads, length, dtype=torch.float32), seed, offset

    return {
        "aten::_scaled_dot_product_flash_attention": flash,
        "aten::_scaled_dot_product_efficient_attention": efficient,
    }


# Operations that accept host tensors, as on a GPU.
MIXED = frozenset(
    {"aten::copy_", "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
)


class OperationInfo:
    """The properties of an operation, computed once."""

    __slots__ = ("composite", "empty", "handler", "mutable", "name", "short", "waits")

    def __init__(self, torch: Any, func: Any, by_name: dict[str, Any]) -> None:
        self.name = str(func._schema.name)
        self.short = self.name.rpartition("::")[2].rstrip("_") or self.name
        self.handler = by_name.get(self.name)
        try:
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            self.composite = has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "Meta")
        except RuntimeError:  # `aten::dim` and the like are no operations
            self.composite = False
        self.mutable = bool(func._schema.is_mutable)
        self.empty = self.short.startswith(("empty", "new_empty"))
        self.waits = self.name in WAITS


class Dispatch:
    """The handler of all operations in torch's dispatch mode."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.torch = machine, machine.torch
        self.tensor = machine.torch.Tensor
        self.known: dict[Any, OperationInfo] = {}
        self.integers = IntegerValues(machine)
        self.by_name = {**handlers(machine, self.integers), **attention_handlers(machine)}
        self.by_name["aten::_to_copy"] = self._to_copy
        self.by_name["aten::copy_"] = self._copy
        self.device = machine.torch.device
        self.meta = machine.torch.device("meta")
        self.mode: Any = None
        self.passing = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = time.thread_time()
        device_tensors = self._device_tensors(args, kwargs)
        if not device_tensors and any(
            isinstance(argument, self.device) and argument.type == "cuda" for argument in args
        ):
            with self.mode:  # `to`, which torch composes of others if no gradient is required
                return func.decompose(*args, **kwargs)
        if device_tensors and (known := self._known(func)).composite and known.handler is None:
            with self.mode:
                return func.decompose(*args, **kwargs)
        device = kwargs.get("device")
        on_device = device is not None and (
            device.type == "cuda" or (device.type == "meta" and self._own(args))
        )
        if not device_tensors and not on_device:
            self.machine.hide(self.passing)
            return func(*args, **kwargs)
        self.machine.place.inside = True
        try:
            return self._emulate(func, args, kwargs, device_tensors)
        finally:
            self.machine.place.inside = False
            if time.monotonic() >= self.machine.tell_at:
                self.machine.tell()
            # Time on a core. The clock excludes all time without one.
            self.machine.hide(time.thread_time() - began + self.passing)

    def _known(self, func: Any) -> OperationInfo:
        known = self.known.get(func)
        if known is None:
            known = self.known[func] = OperationInfo(self.torch, func, self.by_name)
        return known

    def _own(self, args: tuple[Any, ...]) -> bool:
        """Return whether torch creates a tensor of the device `meta` inside an operation.

        A program creates `meta` tensors inside `torch.device("meta")`, or copies tensors there.
        """
        return (
            bool(self.machine.storages)
            and not self.machine.place.on_meta
            and not any(True for _ in self._tensors(args))
        )

    def _device_tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Any, DeviceStorage]]:
        machine = self.machine
        return [
            (tensor, storage)
            for tensor in self._tensors((*args, *kwargs.values()) if kwargs else args)
            if machine.is_meta(tensor) and (storage := machine.find(tensor)) is not None
        ]

    def _tensors(self, values: Any) -> Iterator[Any]:
        for value in values:
            if isinstance(value, self.tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from self._tensors(value)

    def _emulate(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device_tensors: list[tuple[Any, DeviceStorage]],
    ) -> Any:
        machine = self.machine
        known = self._known(func)
        if known.name.startswith("c10d::"):
            moved = sum(_bytes(tensor) for tensor, _ in device_tensors)
            began = time.thread_time()
            with machine.apart():
                machine.ranks.collective(known.short, device_tensors[0][1].index, moved)
                out = machine.ranks.answer(func, args, kwargs)
            machine.hide(began - time.thread_time())  # its own part is hidden below
            return out
        device = kwargs.get("device")
        index = device_tensors[0][1].index if device_tensors else machine.current
        if device is not None and device.type == "cuda":
            index = machine.current if device.index is None else device.index
        if known.waits:
            machine.host_reads[known.short] += 1
            machine.clocks[index].synchronize()
        if known.handler is not None and known.name in ("aten::_to_copy", "aten::copy_"):
            return known.handler(func, args, kwargs)
        original = None
        if known.handler is not None:
            out = known.handler(func, args, kwargs)
        else:
            original = kwargs
            if device is not None:
                kwargs = {**kwargs, "device": self.meta if device.type == "cuda" else device}
            kwargs.pop("pin_memory", None)
            if device_tensors:
                self._reject_mixed(known, args)
            out = self._call(func, known, args, kwargs)
        self._charge(known, args, device_tensors, out, index)
        if original is not None:
            self.integers.follow(func, known.short, args, original, out, mutable=known.mutable)
        return out

    def _call(self, func: Any, known: OperationInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if known.mutable:  # it changes only values
                return args[0] if func._schema.returns else None
            raise NotImplementedError(
                f"cannot emulate {known.name}: torch {self.torch.__version__} cannot compute its output "
                "shapes without values; use an operation whose output shape does not depend on values"
            ) from error

    def _reject_mixed(self, known: OperationInfo, args: tuple[Any, ...]) -> None:
        """Reject host tensors as a GPU does, except scalars."""
        if known.name in MIXED:
            return
        for tensor in self._tensors(args):
            if tensor.dim() and not self.machine.is_meta(tensor) and tensor.layout is self.torch.strided:
                if known.short in HOST_ARGUMENTS:
                    return
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:{self.machine.current} and cpu! (when checking arguments of {known.short})"
                )

    def _charge(
        self,
        known: OperationInfo,
        args: tuple[Any, ...],
        device_tensors: list[tuple[Any, DeviceStorage]],
        out: Any,
        index: int,
    ) -> None:
        machine = self.machine
        outs = [
            tensor
            for tensor in self._tensors(out if isinstance(out, list | tuple) else (out,))
            if machine.is_meta(tensor)
        ]
        fresh = [tensor for tensor in outs if machine.adopt(tensor, index)]
        if known.empty or not (fresh or known.mutable or known.waits):
            return
        moved = sum({id(tensor): _bytes(tensor) for tensor, _ in device_tensors}.values())
        moved += sum(_bytes(tensor) for tensor in (outs if known.mutable else fresh))
        shapes = [tuple(tensor.shape) for tensor, _ in device_tensors]
        convolution = known.short in CONVOLUTIONS or known.short in BACKWARDS
        flops = flops_of(
            known.short,
            shapes,
            [tuple(tensor.shape) for tensor in outs],
            transposed=convolution and any(tensor is True for tensor in args),
        )
        if not flops:
            machine.move(index, moved)
            return
        kind = self._kind(device_tensors[0][0].dtype, convolution=convolution)
        machine.work(index, profile_name(known.short), kind, flops, moved)

    def _kind(self, dtype: Any, *, convolution: bool) -> str:
        torch = self.torch
        if dtype is torch.float16:
            return "fp16"
        if dtype is torch.bfloat16:
            return "bf16"
        if dtype is torch.float64:
            return "fp64"
        if self.machine.profile.capability < (8, 0):
            return "fp32"
        if convolution:
            return "tf32" if torch._C._get_cudnn_allow_tf32() else "fp32"
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"

    # --- copies --------------------------------------------------------------------------------------

    def _to_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        machine, source = self.machine, args[0]
        storage, device = machine.find(source), kwargs.get("device")
        if device is not None and device.type == "cpu":
            machine.host_reads["copies to the host"] += 1
            host_copy = self._on_host(source, kwargs.get("dtype") or source.dtype)
            index = storage.index if storage else machine.current
            machine.transfer(index, "down-pageable", _bytes(host_copy), wait=True)
            return host_copy
        kwargs = {
            key: value for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking")
        } | {"device": self.meta}
        out = func(*args, **kwargs)
        index = storage.index if storage else machine.current
        if device is not None and device.type == "cuda":
            index = machine.current if device.index is None else device.index
        machine.adopt(out, index)
        value = source if storage is None else self.integers.value(source)
        if value is not None and not out.dtype.is_floating_point:
            self.integers.keep(out, value.detach().to(out.dtype, copy=True))
        if storage is None:
            self._up(index, source)
        else:
            machine.move(index, _bytes(source) + _bytes(out))
        return out

    def _copy(self, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        machine, (into, source) = self.machine, args[:2]
        there, here = machine.find(into), machine.find(source)
        if there is not None:
            value = source if here is None else self.integers.value(source)
            current = self.integers.value(into)
            if current is not None and value is not None:
                current.copy_(value)
            else:
                self.integers.keep(
                    into,
                    None if value is None else value.detach().expand(into.shape).to(into.dtype, copy=True),
                )
        if there is not None and here is not None:
            machine.move(there.index, _bytes(into) + _bytes(source))
        elif there is not None:
            self._up(there.index, source)
        elif here is not None:
            machine.host_reads["copies to the host"] += 1
            into.copy_(self._on_host(source, into.dtype))
            way = "down-pinned" if into.is_pinned() else "down-pageable"
            machine.transfer(here.index, way, _bytes(source), wait=True)
        return into

    def _up(self, index: int, source: Any) -> None:
        pinned = source.is_pinned()
        way = "up-pinned" if pinned else "up-pageable"
        self.machine.transfer(index, way, _bytes(source), wait=not pinned)

    def _on_host(self, source: Any, dtype: Any) -> Any:
        value = self.integers.value(source)
        if value is not None:
            return value.to(dtype, copy=True)
        return self.torch.full(tuple(source.shape), plain_value(self.torch, dtype), dtype=dtype, device="cpu")


# Operations with an argument that is read on the host: lengths, sizes.
HOST_ARGUMENTS = frozenset({"_pack_padded_sequence", "_cudnn_rnn", "_ctc_loss", "_embedding_bag"})


def make_mode(machine: Machine) -> Any:
    """Return torch's dispatch mode for this process. The caller enters it."""
    base = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    dispatch = Dispatch(machine)

    def call(_self: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch.run(func, args, kwargs or {})

    # Nothing is compiled here, and torch's compiler takes seconds to import.
    skip = classmethod(lambda _kind: False)
    mode = type("Emulated", (base,), {"__torch_dispatch__": call, "_should_skip_dynamo": skip})()
    mode.dispatch, dispatch.mode = dispatch, mode
    return mode


def _bytes(tensor: Any) -> int:
    """Return the bytes that are read or written: at most the storage of an expanded tensor."""
    count = int(tensor.numel()) * int(tensor.element_size())
    if 0 in tensor.stride():
        return min(count, int(tensor.untyped_storage().nbytes()))
    return count
