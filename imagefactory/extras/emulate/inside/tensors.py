"""What a tensor of an emulated device says of itself, and how it is made, copied, saved and printed.

Checkpoints are as large as real ones, and are read back to the device that `map_location` names. Their
numbers were never computed, so they name this module: a program without it cannot read one by mistake.
"""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Callable
from typing import Any

from .machine import Machine, Pinned

_STATE: dict[str, Any] = {}


def load(tensor: Any, index: int, grad: bool) -> Any:
    """A tensor that was on a device, from its copy on the host; what a checkpoint calls."""
    asked = _STATE["asked"]
    if isinstance(asked, dict):
        asked = asked.get(f"cuda:{index}", f"cuda:{index}")
    elif callable(asked):
        asked = "cpu"
    moved = tensor.to(f"cuda:{index}" if asked is None else asked)
    return moved.requires_grad_() if grad else moved


def install_saved(machine: Machine) -> None:
    """Makes torch.load read them."""
    torch = machine.torch
    plain = torch.load
    _STATE["asked"] = None
    if hasattr(torch.serialization, "add_safe_globals"):
        torch.serialization.add_safe_globals([load])
    else:
        torch._weights_only_unpickler._get_allowed_globals()[f"{__name__}.load"] = load

    def read(*args: Any, **kwargs: Any) -> Any:
        where = kwargs.pop("map_location", args[1] if len(args) > 1 else None)
        there = isinstance(where, str | torch.device) and torch.device(where).type == "cuda"
        _STATE["asked"] = "cpu" if there else where
        try:
            found = plain(args[0], "cpu" if there else where, *args[2:], **kwargs)
        finally:
            _STATE["asked"] = None
        return _moved(torch, found, where) if there else found

    torch.load = read


def _moved(torch: Any, value: Any, device: Any) -> Any:
    """All of it on a device: what was saved on the host too."""
    if isinstance(value, torch.nn.Module):
        return value.to(device)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.data.to(device), value.requires_grad)
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(torch, value[key], device)
        return value
    if type(value) in (list, tuple):
        return type(value)(_moved(torch, one, device) for one in value)
    return value


def install(machine: Machine, pinned: Pinned) -> None:
    """Puts it into torch.Tensor and into what makes tensors."""
    torch = machine.torch
    _properties(machine)
    install_saved(machine)
    _methods(machine, pinned)
    _factories(machine)
    _storages(machine)
    torch._has_compatible_shallow_copy_type = _compatible(machine, torch._has_compatible_shallow_copy_type)


def _properties(machine: Machine) -> None:
    torch, base = machine.torch, machine.torch._C.TensorBase
    devices = [torch.device("cuda", index) for index in range(machine.count)]
    device_of, data_of, set_data = base.device.__get__, base.data.__get__, base.data.__set__
    is_cuda, is_meta = base.is_cuda.__get__, machine.is_meta

    def device(tensor: Any) -> Any:
        held = machine.seen(tensor)
        return device_of(tensor) if held is None else devices[held.index]

    def put_data(tensor: Any, new: Any) -> None:
        if is_meta(tensor) == is_meta(new):
            set_data(tensor, new)
            return
        # torch exchanges no bytes between devices of such different kinds, but whole tensors it does.
        gradient = tensor.grad
        fresh = new.detach()
        fresh.requires_grad_(tensor.requires_grad)
        torch._C._swap_tensor_impl(tensor, fresh)
        if gradient is not None:
            tensor.grad = gradient.to(tensor.device)

    torch.Tensor.device = property(device)
    torch.Tensor.is_cuda = property(lambda tensor: is_cuda(tensor) or machine.seen(tensor) is not None)
    torch.Tensor.is_meta = property(lambda tensor: is_meta(tensor) and machine.seen(tensor) is None)
    torch.Tensor.data = property(lambda tensor: data_of(tensor), put_data)


def _methods(machine: Machine, pinned: Pinned) -> None:
    torch, base = machine.torch, machine.torch._C.TensorBase
    kind = torch.Tensor
    to, tolist, data_ptr, get_device = base.to, base.tolist, base.data_ptr, base.get_device
    numpy, typed, shown, copied, reduced = (
        base.numpy,
        base.type,
        kind.__repr__,
        kind.__deepcopy__,
        kind.__reduce_ex__,
    )
    new_tensor = base.new_tensor

    def on(device: Any) -> Any:
        """With a number: torch would ask the driver for the current one."""
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, int):
            device = torch.device("cuda", device)
        if isinstance(device, torch.device) and device.type == "cuda":
            index = machine.current if device.index is None else device.index
            if index >= machine.count:
                raise RuntimeError("CUDA error: invalid device ordinal")
            return torch.device("cuda", index)
        return device

    def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            other, args = args[0], args[1:]
            kwargs = {**dict(zip(("non_blocking", "copy"), args, strict=False)), **kwargs}
            return to(tensor, device=on(other.device), dtype=other.dtype, **kwargs)
        if args and isinstance(args[0], str | int | torch.device) and not isinstance(args[0], bool):
            args = (on(args[0]), *args[1:])
        if "other" in kwargs:
            other = kwargs.pop("other")
            return to(tensor, device=on(other.device), dtype=other.dtype, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = on(kwargs["device"])
        return to(tensor, *args, **kwargs)

    def to_cuda(
        tensor: Any,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> Any:
        device = on("cuda" if device is None else device)
        return to(tensor, device=device, non_blocking=non_blocking, memory_format=memory_format)

    def as_numpy(tensor: Any, *, force: bool = False) -> Any:
        held = machine.seen(tensor)
        if held is not None and not force:
            raise TypeError(
                f"can't convert cuda:{held.index} device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return numpy(tensor, force=force) if held is None else numpy(tensor.detach().cpu())

    def as_type(tensor: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        held = machine.seen(tensor)
        if dtype is None and held is not None:
            return "torch.cuda." + typed(torch.empty(0, dtype=tensor.dtype)).removeprefix("torch.")
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            wanted = torch.empty(0).type(dtype.replace(".cuda", "")).dtype
            return move(tensor, "cuda", wanted)
        if held is not None and isinstance(dtype, torch.dtype):
            return move(tensor, dtype)
        return typed(tensor, dtype, non_blocking, **kwargs)

    def show(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        held = machine.seen(tensor)
        if held is None:
            return shown(tensor, *args, **kwargs)
        return f"tensor(..., device='cuda:{held.index}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def deep(tensor: Any, memo: Any) -> Any:
        if machine.seen(tensor) is None:
            return copied(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol at the moment"
            )
        with torch.no_grad():
            made = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                made = type(tensor)(made, tensor.requires_grad)
            else:
                made.requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                made.grad = deep(tensor.grad, memo)
        memo[id(tensor)] = made
        return made

    def reduce(tensor: Any, protocol: Any) -> Any:
        """On disk, and in another process, its bytes are those of a copy on the host."""
        held = machine.seen(tensor)
        if held is None or type(tensor) is not torch.Tensor:
            return reduced(tensor, protocol)
        return load, (tensor.detach().cpu(), held.index, tensor.requires_grad)

    def fresh(tensor: Any, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        held = machine.seen(tensor)
        if held is None and device is None:
            return new_tensor(tensor, data, dtype=dtype, **kwargs)
        return torch.tensor(data, dtype=dtype or tensor.dtype, device=device or tensor.device, **kwargs)

    def held_or(otherwise: Callable[[Any], Any], answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def ask(tensor: Any) -> Any:
            held = machine.seen(tensor)
            return otherwise(tensor) if held is None else answer(held)

        return ask

    kind.to, kind.cuda, kind.numpy, kind.type, kind.__repr__ = move, to_cuda, as_numpy, as_type, show
    kind.__deepcopy__, kind.__reduce_ex__, kind.new_tensor = deep, reduce, fresh
    kind.tolist = lambda tensor: tolist(tensor if machine.seen(tensor) is None else tensor.cpu())
    kind.data_ptr = held_or(data_ptr, lambda held: held.address)
    kind.get_device = held_or(get_device, lambda held: held.index)
    kind.record_stream = lambda tensor, stream: None
    kind.pin_memory = lambda tensor, device=None: pinned.pin(tensor)
    kind.is_pinned = lambda tensor, device=None: pinned.is_pinned(tensor)


def _factories(machine: Machine) -> None:
    """Those that make a tensor on the host and move it, where torch itself would ask a driver."""
    torch = machine.torch

    def moved(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None:  # as set by torch.set_default_device, or by a region
                device = machine.default_device()
            device = torch.device("cuda", device) if isinstance(device, int) else device
            if device is None or torch.device(device).type != "cuda":
                return make(*args, **kwargs) if device is None else make(*args, device=device, **kwargs)
            grad = kwargs.pop("requires_grad", False)
            if args and isinstance(args[0], torch.Tensor) and make is not tensor:
                out = args[0].to(device, kwargs.get("dtype") or args[0].dtype)
            else:
                out = make(*args, device="cpu", **kwargs).to(device)
            return out.requires_grad_() if grad else out

        return made

    tensor = torch.tensor
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, moved(getattr(torch, name)))

    context = importlib.import_module("torch.utils._device").DeviceContext
    called = context.__torch_function__

    def within(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, machine.place.on_meta = machine.place.on_meta, self.device.type == "meta"
        try:
            return called(self, func, types, args, kwargs)
        finally:
            machine.place.on_meta = before

    context.__torch_function__ = within
    host = torch.Generator

    class Generator(host):  # type: ignore[misc,valid-type]  # torch is not here
        """A generator of a device: nothing is drawn from it, but it has a seed."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = (
                host.__new__(cls, device="cpu")
                if torch.device(device).type == "cuda"
                else host.__new__(cls, device)
            )
            made._on = torch.device(device)
            return made

        @property
        def device(self) -> Any:
            return self._on

    torch.Generator = Generator
    copyreg.pickle(Generator, lambda one: (Generator, (one.device,)))


def _storages(machine: Machine) -> None:
    """Who looks whether tensors share their bytes asks storages."""
    torch = machine.torch
    kind, base = torch.UntypedStorage, torch._C.StorageBase
    address, device = base.data_ptr, kind.device

    def where(storage: Any) -> Any:
        held = None if machine.place.inside else machine.held.get(storage._cdata)
        return address(storage) if held is None else held.address

    def on(storage: Any) -> Any:
        held = None if machine.place.inside else machine.held.get(storage._cdata)
        return device.__get__(storage) if held is None else torch.device("cuda", held.index)

    kind.data_ptr, kind.device = where, property(on)


def _compatible(machine: Machine, otherwise: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """As between the host and a GPU: a module's parameters stay the same objects when they move."""

    def ask(input: Any, from_: Any) -> bool:  # torch's own names, which its compiler compares
        if machine.seen(input) is not None or machine.seen(from_) is not None:
            return True
        return otherwise(input, from_)

    return ask
