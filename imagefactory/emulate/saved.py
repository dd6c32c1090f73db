"""Checkpoints: as large as real ones, and read back to the device that they say, as `map_location` asks.

What is in them was never computed, so they name this module, and no program without it reads one by mistake.
"""

from __future__ import annotations

from typing import Any

from .machine import Machine

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


def install(machine: Machine) -> None:
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
