"""Whole numbers and conditions, which are computed after all: labels, masks, lengths, on the host beside the
device.

A program looks at them: it asks how long the longest sentence is, whether each label is one of the classes,
which rows are masked. They are small, so they cost little, and what they cost is hidden as all that emulating
costs. What comes of a floating-point number has no value here."""

from __future__ import annotations

from typing import Any

from .machine import Machine

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
