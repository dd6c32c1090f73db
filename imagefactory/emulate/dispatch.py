"""Every operation of torch on a tensor of such a device: its shapes are worked out, its time is charged.

torch calls what is here for each operation, below autograd: forward, backward and optimizer alike. What no
device takes part in goes on as it is."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

from . import attention
from .machine import Held, Machine
from .operations import BACKWARDS, CONVOLUTIONS, flops_of, what_of
from .values import WAITS, handlers, plain_value
from .whole import Whole

# What may have tensors of the host among its arguments, as on a GPU.
MIXED = frozenset(
    {"aten::copy_", "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
)


class Known:
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
        self.known: dict[Any, Known] = {}
        self.whole = Whole(machine)
        self.by_name = {**handlers(machine, self.whole), **attention.handlers(machine)}
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

    def _known(self, func: Any) -> Known:
        known = self.known.get(func)
        if known is None:
            known = self.known[func] = Known(self.torch, func, self.by_name)
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

    def _call(self, func: Any, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if known.mutable:  # it changes values alone
                return args[0] if func._schema.returns else None
            raise NotImplementedError(
                f"{known.name}: torch {self.torch.__version__} cannot say its shapes without its values, so "
                "it cannot be emulated"
            ) from error

    def _refuse_mixed(self, known: Known, args: tuple[Any, ...]) -> None:
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
        self, known: Known, args: tuple[Any, ...], held: list[tuple[Any, Held]], out: Any, index: int
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
