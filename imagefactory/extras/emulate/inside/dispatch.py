"""Every operation of torch on a tensor of an emulated device: its shapes are computed, its time is charged.

torch calls `Dispatch` for each operation, below autograd: forward, backward and optimizer alike. An operation
without such a tensor runs unchanged.

Arithmetic (`flops_of`): from the shapes of inputs and outputs, pure. A multiplication and an addition are two
operations. An operation without a rule counts only the bytes that it moves.

Whole numbers and conditions (`Whole`) are computed: labels, masks, lengths, on the host next to the device.
A program reads them: how long the longest sentence is, whether each label is a class, which rows are masked.
They are small, and their cost is hidden like every cost of emulating. Results of floating-point numbers have
no value.

Operations whose result depends on values that `Whole` does not know (`handlers`): a number is 1 and a
condition is false. So a loss can be divided by and has a logarithm, and a gradient is finite. A shape that
depends on values is the largest possible.

Attention (`install_attention`): which kernel a GPU would take, because their memory differs by the square of
the length.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from .machine import Held, Machine

Shape = Sequence[int]


def flops_of(name: str, ins: Sequence[Shape], outs: Sequence[Shape], *, transposed: bool = False) -> float:
    """Operations of one call. `name` is aten's without its namespace (`addmm`), `ins` and `outs` the
    tensors'.

    `transposed` is of convolutions.
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


def what_of(name: str) -> str:
    """What such an operation is to a profile."""
    if name.startswith("_scaled_dot_product"):
        return "attention_backward" if "backward" in name else "attention"
    return "backward" if name in BACKWARDS else "convolution" if name in CONVOLUTIONS else "product"


MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation"})
CONVOLUTIONS = frozenset({"convolution", "_convolution", "cudnn_convolution"})
BACKWARDS = frozenset({"convolution_backward"})


def _matmul(ins: Sequence[Shape], out: Shape) -> float:
    """`(..., m, k) x (..., k, n)`: each of the results is k multiplications and additions."""
    inner = ins[0][-1] if ins[0] else 1
    return 2.0 * prod(out) * inner


def _convolution(image: Shape, weight: Shape, out: Shape, *, transposed: bool) -> float:
    """Each result is a product over the kernel and the channels of its group; transposed, each of what goes
    in.
    """
    points = prod(image if transposed else out)
    return 2.0 * points * prod(weight[1:])


def _attention(name: str, ins: Sequence[Shape]) -> float:
    """Two products of query length x key length x width; two and a half times that on the way back."""
    if "backward" in name:
        _, query, key, value = ins[0], ins[1], ins[2], ins[3]
        return 2.5 * _forward(query, key, value)
    return _forward(ins[0], ins[1], ins[2])


def _forward(query: Shape, key: Shape, value: Shape) -> float:
    *batch, length, width = query
    return 2.0 * prod(batch) * length * key[-2] * (width + value[-1])


LARGEST = 1 << 20
"""Numbers of a tensor, beyond which it has no value."""
_NAME = "_emulated_value"
# What is another number each time, or none yet.
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
    """A tensor without a value."""


class Whole:
    """The values of a machine's tensors; each hangs on its tensor."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._tensor = machine, machine.torch.Tensor

    def value(self, tensor: Any) -> Any:
        """What a tensor of a device holds, as one of the host; None where that is not known."""
        return tensor.__dict__.get(_NAME)

    def keep(self, tensor: Any, value: Any) -> None:
        """`value` is None for a tensor of which nothing is known any more."""
        if value is not None and not tensor.dtype.is_floating_point and value.numel() <= LARGEST:
            tensor.__dict__[_NAME] = value
        else:
            tensor.__dict__.pop(_NAME, None)

    def follow(self, func: Any, short: str, args: Any, kwargs: Any, out: Any, *, mutable: bool) -> None:
        """Does on the values what was done on the tensors, where all of them are known."""
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
        """The result on the host; None where an argument has no value."""
        try:
            known = {name: self._known(one) for name, one in kwargs.items()}
            return func(*(self._known(one) for one in args), **known)
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
            return type(argument)(self._known(one) for one in argument)
        if isinstance(argument, self._machine.torch.device):
            return self._machine.torch.device("cpu")
        return argument


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


FLASH = (8, 0)
"""The capability from which torch takes the flash kernel, for half precision and without a mask."""
WIDEST = 256
ROWS = 32
"""The efficient kernel keeps its sums in blocks of so many rows."""


def install_attention(machine: Machine) -> None:
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


def attention_handlers(machine: Machine) -> dict[str, Callable[..., Any]]:
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


# What may have tensors of the host among its arguments, as on a GPU.
MIXED = frozenset(
    {"aten::copy_", "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
)


class OperationInfo:
    """What there is to know of an operation, looked up once."""

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
    """What the mode of torch calls."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.torch = machine, machine.torch
        self.tensor = machine.torch.Tensor
        self.known: dict[Any, OperationInfo] = {}
        self.whole = Whole(machine)
        self.by_name = {**handlers(machine, self.whole), **attention_handlers(machine)}
        self.by_name["aten::_to_copy"] = self._to_copy
        self.by_name["aten::copy_"] = self._copy
        self.device = machine.torch.device
        self.meta = machine.torch.device("meta")
        self.mode: Any = None
        self.passing = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = time.thread_time()
        held = self._held(args, kwargs)
        if not held and any(isinstance(one, self.device) and one.type == "cuda" for one in args):
            with self.mode:  # `to`, which torch makes of others, where nobody asks for a gradient
                return func.decompose(*args, **kwargs)
        if held and (known := self._known(func)).composite and known.handler is None:
            with self.mode:
                return func.decompose(*args, **kwargs)
        device = kwargs.get("device")
        wanted = device is not None and (device.type == "cuda" or (device.type == "meta" and self._own(args)))
        if not held and not wanted:
            self.machine.hide(self.passing)
            return func(*args, **kwargs)
        self.machine.place.inside = True
        try:
            return self._emulate(func, args, kwargs, held)
        finally:
            self.machine.place.inside = False
            if time.monotonic() >= self.machine.tell_at:
                self.machine.tell()
            # Of a core: in what time it waited for one, the clock leaves out as a whole.
            self.machine.hide(time.thread_time() - began + self.passing)

    def _known(self, func: Any) -> OperationInfo:
        known = self.known.get(func)
        if known is None:
            known = self.known[func] = OperationInfo(self.torch, func, self.by_name)
        return known

    def _own(self, args: tuple[Any, ...]) -> bool:
        """Whether it is torch itself that makes a tensor like one of a device, in the middle of an operation.

        What a program makes on the device `meta` it makes within `torch.device("meta")`, or copies there.
        """
        return (
            bool(self.machine.held)
            and not self.machine.place.on_meta
            and not any(True for _ in self._tensors(args))
        )

    def _held(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Held]]:
        machine = self.machine
        return [
            (tensor, held)
            for tensor in self._tensors((*args, *kwargs.values()) if kwargs else args)
            if machine.is_meta(tensor) and (held := machine.find(tensor)) is not None
        ]

    def _tensors(self, values: Any) -> Iterator[Any]:
        for value in values:
            if isinstance(value, self.tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from self._tensors(value)

    def _emulate(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], held: list[tuple[Any, Held]]
    ) -> Any:
        machine = self.machine
        known = self._known(func)
        if known.name.startswith("c10d::"):
            moved = sum(_bytes(one) for one, _ in held)
            began = time.thread_time()
            with machine.apart():
                machine.ranks.collective(known.short, held[0][1].index, moved)
                out = machine.ranks.answer(func, args, kwargs)
            machine.hide(began - time.thread_time())  # its own part is hidden below
            return out
        device = kwargs.get("device")
        index = held[0][1].index if held else machine.current
        if device is not None and device.type == "cuda":
            index = machine.current if device.index is None else device.index
        if known.waits:
            machine.asked[known.short] += 1
            machine.clocks[index].synchronize()
        if known.handler is not None and known.name in ("aten::_to_copy", "aten::copy_"):
            return known.handler(func, args, kwargs)
        whole = None
        if known.handler is not None:
            out = known.handler(func, args, kwargs)
        else:
            whole = kwargs
            if device is not None:
                kwargs = {**kwargs, "device": self.meta if device.type == "cuda" else device}
            kwargs.pop("pin_memory", None)
            if held:
                self._refuse_mixed(known, args)
            out = self._call(func, known, args, kwargs)
        self._charge(known, args, held, out, index)
        if whole is not None:
            self.whole.follow(func, known.short, args, whole, out, mutable=known.mutable)
        return out

    def _call(self, func: Any, known: OperationInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if known.mutable:  # it changes values alone
                return args[0] if func._schema.returns else None
            raise NotImplementedError(
                f"{known.name}: torch {self.torch.__version__} cannot say its shapes without its values, so "
                "it cannot be emulated"
            ) from error

    def _refuse_mixed(self, known: OperationInfo, args: tuple[Any, ...]) -> None:
        """As a GPU does: what it computes with must lie in it, but for single numbers."""
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
        self, known: OperationInfo, args: tuple[Any, ...], held: list[tuple[Any, Held]], out: Any, index: int
    ) -> None:
        machine = self.machine
        outs = [
            one
            for one in self._tensors(out if isinstance(out, list | tuple) else (out,))
            if machine.is_meta(one)
        ]
        fresh = [one for one in outs if machine.adopt(one, index)]
        if known.empty or not (fresh or known.mutable or known.waits):
            return
        moved = sum({id(one): _bytes(one) for one, _ in held}.values())
        moved += sum(_bytes(one) for one in (outs if known.mutable else fresh))
        shapes = [tuple(one.shape) for one, _ in held]
        convolution = known.short in CONVOLUTIONS or known.short in BACKWARDS
        flops = flops_of(
            known.short,
            shapes,
            [tuple(one.shape) for one in outs],
            transposed=convolution and any(one is True for one in args),
        )
        if not flops:
            machine.move(index, moved)
            return
        kind = self._kind(held[0][0].dtype, convolution=convolution)
        machine.work(index, what_of(known.short), kind, flops, moved)

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
        held, device = machine.find(source), kwargs.get("device")
        if device is not None and device.type == "cpu":
            machine.asked["copies to the host"] += 1
            made = self._on_host(source, kwargs.get("dtype") or source.dtype)
            index = held.index if held else machine.current
            machine.transfer(index, "down-pageable", _bytes(made), wait=True)
            return made
        kwargs = {
            key: value for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking")
        } | {"device": self.meta}
        out = func(*args, **kwargs)
        index = held.index if held else machine.current
        if device is not None and device.type == "cuda":
            index = machine.current if device.index is None else device.index
        machine.adopt(out, index)
        value = source if held is None else self.whole.value(source)
        if value is not None and not out.dtype.is_floating_point:
            self.whole.keep(out, value.detach().to(out.dtype, copy=True))
        if held is None:
            self._up(index, source)
        else:
            machine.move(index, _bytes(source) + _bytes(out))
        return out

    def _copy(self, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        machine, (into, source) = self.machine, args[:2]
        there, here = machine.find(into), machine.find(source)
        if there is not None:
            value = source if here is None else self.whole.value(source)
            own = self.whole.value(into)
            if own is not None and value is not None:
                own.copy_(value)
            else:
                self.whole.keep(
                    into,
                    None if value is None else value.detach().expand(into.shape).to(into.dtype, copy=True),
                )
        if there is not None and here is not None:
            machine.move(there.index, _bytes(into) + _bytes(source))
        elif there is not None:
            self._up(there.index, source)
        elif here is not None:
            machine.asked["copies to the host"] += 1
            into.copy_(self._on_host(source, into.dtype))
            way = "down-pinned" if into.is_pinned() else "down-pageable"
            machine.transfer(here.index, way, _bytes(source), wait=True)
        return into

    def _up(self, index: int, source: Any) -> None:
        pinned = source.is_pinned()
        way = "up-pinned" if pinned else "up-pageable"
        self.machine.transfer(index, way, _bytes(source), wait=not pinned)

    def _on_host(self, source: Any, dtype: Any) -> Any:
        value = self.whole.value(source)
        if value is not None:
            return value.to(dtype, copy=True)
        return self.torch.full(tuple(source.shape), plain_value(self.torch, dtype), dtype=dtype, device="cpu")


# Operations with an argument that is read on the host: lengths, sizes.
HOST_ARGUMENTS = frozenset({"_pack_padded_sequence", "_cudnn_rnn", "_ctc_loss", "_embedding_bag"})


def make_mode(machine: Machine) -> Any:
    """The mode of torch for this process, not yet entered."""
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
    """What of a tensor is read or written: no more than lies there, where it is expanded."""
    count = int(tensor.numel()) * int(tensor.element_size())
    if 0 in tensor.stride():
        return min(count, int(tensor.untyped_storage().nbytes()))
    return count
