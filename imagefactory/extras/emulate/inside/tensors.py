"""Tensors of emulated devices: their attributes, and how they are created, copied, saved and printed.

Checkpoints have the size of real ones, and are loaded to the device in `map_location`. Their numbers were
never computed. So they refer to this module, and a program without the emulation cannot load them by mistake.
"""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Callable
from typing import Any

from .machine import Machine, Pinned

_STATE: dict[str, Any] = {}


def load(tensor: Any, index: int, grad: bool) -> Any:
    """Restore a device tensor from its host copy. Checkpoints refer to this function."""
    location = _STATE["location"]
    if isinstance(location, dict):
        location = location.get(f"cuda:{index}", f"cuda:{index}")
    elif callable(location):
        location = "cpu"
    moved = tensor.to(f"cuda:{index}" if location is None else location)
    return moved.requires_grad_() if grad else moved


def install_saved(machine: Machine) -> None:
    """Make torch.load restore device tensors."""
    torch = machine.torch
    plain = torch.load
    _STATE["location"] = None
    if hasattr(torch.serialization, "add_safe_globals"):
        torch.serialization.add_safe_globals([load])
    else:
        torch._weights_only_unpickler._get_allowed_globals()[f"{__name__}.load"] = load

    def read(*args: Any, **kwargs: Any) -> Any:
        location = kwargs.pop("map_location", args[1] if len(args) > 1 else None)
        there = isinstance(location, str | torch.device) and torch.device(location).type == "cuda"
        _STATE["location"] = "cpu" if there else location
        try:
            value = plain(args[0], "cpu" if there else location, *args[2:], **kwargs)
        finally:
            _STATE["location"] = None
        return _moved(torch, value, location) if there else value

    torch.load = read


def _moved(torch: Any, value: Any, device: Any) -> Any:
    """Return a loaded value with all its tensors moved to a device, including those saved on the host."""
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
        return type(value)(_moved(torch, item, device) for item in value)
    return value


def install(machine: Machine, pinned: Pinned) -> None:
    """Patch torch.Tensor and the functions that create tensors."""
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
        storage = machine.seen(tensor)
        return device_of(tensor) if storage is None else devices[storage.index]

    def put_data(tensor: Any, new: Any) -> None:
        if is_meta(tensor) == is_meta(new):
            set_data(tensor, new)
            return
        # torch cannot replace data by that of another device type, but it can swap whole tensors.
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
    numpy, typed, represent, copied, reduced = (
        base.numpy,
        base.type,
        kind.__repr__,
        kind.__deepcopy__,
        kind.__reduce_ex__,
    )
    new_tensor = base.new_tensor

    def on(device: Any) -> Any:
        """Return the device with its index. Without an index, torch would query the driver."""
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
        storage = machine.seen(tensor)
        if storage is not None and not force:
            raise TypeError(
                f"can't convert cuda:{storage.index} device type tensor to numpy. Use Tensor.cpu() to copy "
                "the tensor to host memory first."
            )
        return numpy(tensor, force=force) if storage is None else numpy(tensor.detach().cpu())

    def as_type(tensor: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        storage = machine.seen(tensor)
        if dtype is None and storage is not None:
            return "torch.cuda." + typed(torch.empty(0, dtype=tensor.dtype)).removeprefix("torch.")
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            target = torch.empty(0).type(dtype.replace(".cuda", "")).dtype
            return move(tensor, "cuda", target)
        if storage is not None and isinstance(dtype, torch.dtype):
            return move(tensor, dtype)
        return typed(tensor, dtype, non_blocking, **kwargs)

    def show(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        storage = machine.seen(tensor)
        if storage is None:
            return represent(tensor, *args, **kwargs)
        return f"tensor(..., device='cuda:{storage.index}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

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
            clone = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                clone = type(tensor)(clone, tensor.requires_grad)
            else:
                clone.requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                clone.grad = deep(tensor.grad, memo)
        memo[id(tensor)] = clone
        return clone

    def reduce(tensor: Any, protocol: Any) -> Any:
        """Pickle a tensor as its host copy, for files and other processes."""
        storage = machine.seen(tensor)
        if storage is None or type(tensor) is not torch.Tensor:
            return reduced(tensor, protocol)
        return load, (tensor.detach().cpu(), storage.index, tensor.requires_grad)

    def fresh(tensor: Any, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        storage = machine.seen(tensor)
        if storage is None and device is None:
            return new_tensor(tensor, data, dtype=dtype, **kwargs)
        return torch.tensor(data, dtype=dtype or tensor.dtype, device=device or tensor.device, **kwargs)

    def storage_or(otherwise: Callable[[Any], Any], answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def ask(tensor: Any) -> Any:
            storage = machine.seen(tensor)
            return otherwise(tensor) if storage is None else answer(storage)

        return ask

    kind.to, kind.cuda, kind.numpy, kind.type, kind.__repr__ = move, to_cuda, as_numpy, as_type, show
    kind.__deepcopy__, kind.__reduce_ex__, kind.new_tensor = deep, reduce, fresh
    kind.tolist = lambda tensor: tolist(tensor if machine.seen(tensor) is None else tensor.cpu())
    kind.data_ptr = storage_or(data_ptr, lambda storage: storage.address)
    kind.get_device = storage_or(get_device, lambda storage: storage.index)
    kind.record_stream = lambda tensor, stream: None
    kind.pin_memory = lambda tensor, device=None: pinned.pin(tensor)
    kind.is_pinned = lambda tensor, device=None: pinned.is_pinned(tensor)


def _factories(machine: Machine) -> None:
    """Patch the factories that would query a driver: create on the host, then move."""
    torch = machine.torch

    def moved(make: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None:  # set by torch.set_default_device or a region
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

        return create

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
        """A generator of a device. It has a seed but draws no numbers."""

        def __new__(cls, device: Any = "cpu") -> Any:
            generator = (
                host.__new__(cls, device="cpu")
                if torch.device(device).type == "cuda"
                else host.__new__(cls, device)
            )
            generator._on = torch.device(device)
            return generator

        @property
        def device(self) -> Any:
            return self._on

    torch.Generator = Generator
    copyreg.pickle(Generator, lambda item: (Generator, (item.device,)))


def _storages(machine: Machine) -> None:
    """Patch storages, which programs compare to see whether tensors share memory."""
    torch = machine.torch
    kind, base = torch.UntypedStorage, torch._C.StorageBase
    address, device = base.data_ptr, kind.device

    def where(storage: Any) -> Any:
        record = None if machine.place.inside else machine.storages.get(storage._cdata)
        return address(storage) if record is None else record.address

    def on(storage: Any) -> Any:
        record = None if machine.place.inside else machine.storages.get(storage._cdata)
        return device.__get__(storage) if record is None else torch.device("cuda", record.index)

    kind.data_ptr, kind.device = where, property(on)


def _compatible(machine: Machine, otherwise: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Keep the parameter objects of a module when it moves, as torch does between host and GPU."""

    def ask(input: Any, from_: Any) -> bool:  # torch's own names, which its compiler compares
        if machine.seen(input) is not None or machine.seen(from_) is not None:
            return True
        return otherwise(input, from_)

    return ask
