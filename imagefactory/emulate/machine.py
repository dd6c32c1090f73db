"""What devices this process sees, and what lies in them."""

from __future__ import annotations

import importlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .clock import Clock, kept_waiting
from .memory import Full, Memory
from .roofline import Profile, copying, seconds

PAGE = 2 << 20
FIRST_ADDRESS = 0x7F0000000000


class Held:
    """A storage of a device. `address` is made up, as an address that no other storage has."""

    __slots__ = ("address", "index", "reference", "size")

    def __init__(self, index: int, size: int, address: int, reference: Any) -> None:
        self.index, self.size, self.address, self.reference = index, size, address, reference


class Place(threading.local):
    """Where a thread is: `inside` of what is here, or in a region of torch's own device `meta`."""

    inside = False
    on_meta = False


class Machine:
    """The devices of a process: `count` of one profile. A storage is known by the address of torch's own
    record.
    """

    def __init__(self, torch: Any, profile: Profile, count: int) -> None:
        self.torch, self.profile, self.count = torch, profile, count
        self.clocks = [Clock(time.perf_counter, time.sleep, kept_waiting) for _ in range(count)]
        self.memories = [Memory(index, profile.memory, profile.context) for index in range(count)]
        self.current = 0
        self.streams = [0] * count
        self.held: dict[int, Held] = {}
        self.asked: Counter[str] = Counter()
        self.operations = 0
        self.copied = 0
        self.out_of_memory = False
        self.mode: Any = None
        self.ranks: Any = None
        self.tell: Callable[[], None] = lambda: None
        self.tell_at = 0.0
        self.entered = self.ended = False
        self.place = Place()
        self._context = importlib.import_module("torch.utils._device").DeviceContext
        self._address = FIRST_ADDRESS
        base = torch._C.TensorBase
        self.is_meta = base.is_meta.__get__
        self._storage = base.untyped_storage

    @property
    def clock(self) -> Clock:
        return self.clocks[self.current]

    def find(self, tensor: Any) -> Held | None:
        """Where a tensor lies; None for one of the host, or of torch's own device `meta`."""
        if not self.is_meta(tensor):
            return None
        try:
            return self.held.get(self._storage(tensor)._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return None

    def seen(self, tensor: Any) -> Held | None:
        """What a program is told. torch itself, working out a shape, is told of the device `meta`."""
        return None if self.place.inside else self.find(tensor)

    def adopt(self, tensor: Any, index: int) -> bool:
        """A tensor of the device `index` from now on; whether its storage is new there.

        Raises torch's own OutOfMemoryError.
        """
        try:
            storage = self._storage(tensor)
        except (NotImplementedError, RuntimeError):
            return False
        key, size = storage._cdata, storage.nbytes()
        known = self.held.get(key)
        if known is not None and known.size >= size:
            return False
        memory = self.memories[index]
        try:
            taken = memory.take(size - known.size if known else size)
        except Full as full:
            self.out_of_memory = True
            raise self.torch.cuda.OutOfMemoryError(str(full)) from None
        if known is not None:  # it was resized
            known.size += taken
            return False
        reference = weakref.ref(storage, lambda _: self._release(key))
        self.held[key] = Held(index, taken, self._address, reference)
        self._address += -(-max(taken, 1) // PAGE) * PAGE
        return True

    def _release(self, key: int) -> None:
        held = self.held.pop(key, None)
        if held is not None:
            self.memories[held.index].give(held.size)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What happens within is emulating, and none of the program's time."""
        began = self._own_time()
        try:
            yield
        finally:
            self.hide(self._own_time() - began)

    def _own_time(self) -> float:
        """The machine's time, without what this thread slept or had no core."""
        return time.perf_counter() - self.slept() - kept_waiting()

    def default_device(self) -> Any:
        """The device of `with torch.device(...)` or torch.set_default_device; None without one."""
        at, length = self.torch._C._get_function_stack_at, self.torch._C._len_torch_function_stack()
        modes = (at(place) for place in reversed(range(length)))
        return next((mode.device for mode in modes if isinstance(mode, self._context)), None)

    def enter(self) -> None:
        """From here on this thread's operations come to `mode`."""
        self.mode.__enter__()
        self.entered = True

    def leave(self) -> None:
        """The end of it, or the start of a process that computes on the host alone."""
        if self.entered:
            self.entered = False
            self.mode.__exit__(None, None, None)

    def work(self, index: int, what: str, kind: str, flops: float, moved: float) -> None:
        """One kernel on the current stream of a device. `what` is as `roofline.seconds` takes it."""
        self.operations += 1
        self.hide(-self.profile.launch)
        self.clocks[index].charge(self.streams[index], seconds(self.profile, what, kind, flops, moved))

    def move(self, index: int, moved: int) -> None:
        """A kernel that computes nothing."""
        self.work(index, "product", "fp32", 0.0, moved)

    def transfer(self, index: int, way: str, moved: int, *, wait: bool) -> None:
        """A copy between host and device, `way` as in `roofline.copying`.

        With `wait` the program goes on when it is done.
        """
        clock = self.clocks[index]
        self.copied += moved
        self.hide(-self.profile.launch)
        clock.charge(self.streams[index], copying(self.profile, way, moved))
        if wait:
            clock.wait_until(clock.streams[self.streams[index]])

    def slept(self) -> float:
        return sum(clock.slept for clock in self.clocks)

    def hide(self, amount: float) -> None:
        """What emulating cost: no program of a GPU would have spent it."""
        for clock in self.clocks:
            clock.hide(amount)
