"""The emulated devices of this process: their tensors, their memory, and the time of host and device.

`Clock` is pure except for `sleep`. The program's time excludes the cost of emulation. The device's time is
ahead of it, because kernels are queued. A program that needs a result waits until the device has computed it.
So the real loader and the emulated device overlap, as on a GPU.

`Memory` is pure: the bytes in use, their maximum, and whether the device is full. Page-locked memory
(`Pinned`) is real: the loader takes time for it, and the machine limits it.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .roofline import Profile, copying, seconds

QUEUE = 1024
"""The limit of queued kernels on a device. A program that queues more waits (CUDA's launch queue)."""


class Clock:
    """The time of the program and of one device, in seconds since the start."""

    def __init__(
        self, now: Callable[[], float], sleep: Callable[[float], None], core_wait: Callable[[], float]
    ) -> None:
        self._now, self._sleep, self._core_wait = now, sleep, core_wait
        self._settled = core_wait()
        self._began = now()
        self._hidden = 0.0
        self._queue: deque[float] = deque()
        self._waits: list[tuple[float, float]] = []
        self._loading: float | None = None
        self.slept = 0.0
        self.streams: dict[int, float] = {}
        self.through = 0.0
        self.busy = 0.0
        self.idle = 0.0
        self.stalled = 0.0

    def host(self) -> float:
        """Return the time of the program."""
        return self._now() - self._began - self._hidden

    def wall(self) -> float:
        """Return the time of the machine."""
        return self._now() - self._began

    def hide(self, seconds: float) -> None:
        """Subtract the cost of emulation from the program's time. A negative amount adds time."""
        self._hidden += seconds

    def settle(self) -> None:
        """Subtract the time without a core, because the program would have a core without emulation.

        Call this before the program waits, because the awaited work continues in that time.
        """
        core_wait = self._core_wait()
        self._hidden += core_wait - self._settled
        self._settled = core_wait

    def charge(self, stream: int, seconds: float) -> None:
        """Queue a kernel of this duration on a stream. Wait if the queue is full."""
        self._queue.append(self.through)
        if len(self._queue) > QUEUE:
            self.wait_until(self._queue.popleft())
        begins = max(self.host(), self.streams.get(stream, 0.0))
        if begins > self.through:
            self.idle += begins - self.through
            self.stalled += self._loaded(self.through, begins)
        ends = begins + seconds
        self.busy += max(0.0, ends - max(begins, self.through))
        self.streams[stream] = ends
        self.through = max(self.through, ends)

    def hold(self, stream: int, until: float) -> None:
        """Delay the next operation on a stream until this time."""
        self.streams[stream] = max(self.streams.get(stream, 0.0), until)

    def wait_until(self, time: float) -> None:
        """Wait until the device reaches this time."""
        self.settle()
        remaining = time - self.host()
        if remaining > 0:
            before = self._now()
            self._sleep(remaining)
            self.slept += self._now() - before

    def synchronize(self) -> None:
        self.wait_until(self.through)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Record the time inside the context as waiting for the loader."""
        if self._loading is not None:  # a loader within a loader
            yield
            return
        self._loading = self.host()
        try:
            yield
        finally:
            self._waits.append((self._loading, self.host()))
            self._loading = None

    def _loaded(self, since: float, until: float) -> float:
        """Return how long the program waited for its loader within an idle period of the device."""
        total = sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in self._waits)
        self._waits.clear()
        return total


def core_wait_seconds() -> float:
    """Return the seconds in which the first thread was ready but had no core, 0 if the kernel does not count
    them.

    Other programs on this machine must not affect the time of a batch. `Pipeline` accounts for the number of
    cores.
    """
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


ROUND = 512
SEGMENT = 2 << 20
"""Block rounding and segment size of torch's allocator, in bytes."""


class Full(Exception):
    """Device memory is full. The text is the message of torch."""


class Memory:
    """The memory of a device in bytes. `total` is its size, `context` what CUDA uses before the first tensor.

    `peak` is the maximum of the run, `most` the maximum since the program reset it.
    """

    def __init__(self, index: int, total: int, context: int) -> None:
        self.index, self.total, self.context = index, total, context
        self.share = 1.0
        self.allocated = self.most = self.reserved = self.most_reserved = self.blocks = 0
        self.peak = 0

    def take(self, size: int) -> int:
        """Allocate a block, and return its rounded size. Raises Full."""
        size = -(-size // ROUND) * ROUND
        room = int(self.total * self.share) - self.context - self.allocated
        if size > room:
            total, free, allocated = (
                _size_text(number) for number in (self.total, max(0, room), self.allocated)
            )
            raise Full(
                f"CUDA out of memory. Tried to allocate {_size_text(size)}. GPU {self.index} has a total "
                f"capacity of {total} of which {free} is free. {allocated} is allocated by PyTorch "
                "(emulated: no memory of a GPU was taken)"
            )
        self.allocated += size
        self.blocks += 1
        self.most, self.peak = max(self.most, self.allocated), max(self.peak, self.allocated)
        self.reserved = max(self.reserved, -(-self.allocated // SEGMENT) * SEGMENT)
        self.most_reserved = max(self.most_reserved, self.reserved)
        return size

    def give(self, size: int) -> None:
        """Free a block of a size that `take` returned."""
        self.allocated -= size
        self.blocks -= 1

    def empty_cache(self) -> None:
        self.reserved = -(-self.allocated // SEGMENT) * SEGMENT

    def reset_peak(self) -> None:
        """Reset the maxima, as torch.cuda.reset_peak_memory_stats does."""
        self.most, self.most_reserved = self.allocated, self.reserved


def _size_text(size: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.2f} {unit}"
    return f"{size} bytes"


class Pinned:
    """Page-locked blocks, reused like in torch's allocator. `refused` is why locking failed."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.total = self.most = 0
        self.refused = ""
        self._free: dict[int, list[mmap.mmap]] = {}
        self._used: dict[int, Any] = {}
        self._lock = ctypes.CDLL(None, use_errno=True).mlock
        self._lock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._storage = torch._C.TensorBase.untyped_storage

    def pin(self, tensor: Any) -> Any:
        """Return a copy of a tensor in page-locked memory."""
        torch = self.torch
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        if self.is_pinned(tensor) or not tensor.numel():
            return tensor
        count = tensor.numel() * tensor.element_size()
        block, holder = self._take(count)
        pinned = (
            torch.frombuffer(holder, dtype=torch.uint8, count=count).view(tensor.dtype).view(tensor.shape)
        )
        pinned.copy_(tensor.detach())
        key = self._storage(pinned)._cdata
        self._used[key] = weakref.ref(self._storage(pinned), lambda _: self._give(key, block))
        return pinned.requires_grad_(tensor.requires_grad)

    def is_pinned(self, tensor: Any) -> bool:
        return bool(self._used) and tensor.device.type == "cpu" and self._storage(tensor)._cdata in self._used

    def _take(self, count: int) -> tuple[mmap.mmap, Any]:
        size = 1 << max(12, (count - 1).bit_length())
        if self._free.get(size):
            block = self._free[size].pop()
        else:
            block = mmap.mmap(-1, size)
            self.total += size
            self.most = max(self.most, self.total)
            self._lock_pages(block, size)
        return block, (ctypes.c_char * size).from_buffer(block)

    def _lock_pages(self, block: mmap.mmap, size: int) -> None:
        first = ctypes.c_char.from_buffer(block)
        if self._lock(ctypes.addressof(first), size) and not self.refused:
            self.refused = f"{size >> 10} KiB: {os.strerror(ctypes.get_errno())}"

    def _give(self, key: int, block: mmap.mmap) -> None:
        self._used.pop(key, None)
        self._free.setdefault(len(block), []).append(block)


PAGE = 2 << 20
FIRST_ADDRESS = 0x7F0000000000


class DeviceStorage:
    """A storage on a device. `address` is a made-up unique address."""

    __slots__ = ("address", "index", "reference", "size")

    def __init__(self, index: int, size: int, address: int, reference: Any) -> None:
        self.index, self.size, self.address, self.reference = index, size, address, reference


class ThreadContext(threading.local):
    """The state of a thread: `inside` the emulation, or in a region with torch's device `meta`."""

    inside = False
    on_meta = False


class Machine:
    """The devices of a process: `count` with one profile. Storages are keyed by torch's address."""

    def __init__(self, torch: Any, profile: Profile, count: int) -> None:
        self.torch, self.profile, self.count = torch, profile, count
        self.clocks = [Clock(time.perf_counter, time.sleep, core_wait_seconds) for _ in range(count)]
        self.memories = [Memory(index, profile.memory, profile.context) for index in range(count)]
        self.current = 0
        self.streams = [0] * count
        self.storages: dict[int, DeviceStorage] = {}
        self.host_reads: Counter[str] = Counter()
        self.operations = 0
        self.copied = 0
        self.out_of_memory = False
        self.mode: Any = None
        self.ranks: Any = None
        self.tell: Callable[[], None] = lambda: None
        self.tell_at = 0.0
        self.entered = self.ended = False
        self.place = ThreadContext()
        self._context = importlib.import_module("torch.utils._device").DeviceContext
        self._address = FIRST_ADDRESS
        base = torch._C.TensorBase
        self.is_meta = base.is_meta.__get__
        self._storage = base.untyped_storage

    @property
    def clock(self) -> Clock:
        return self.clocks[self.current]

    def find(self, tensor: Any) -> DeviceStorage | None:
        """Return the storage of a tensor. None for tensors on the host or on torch's device `meta`."""
        if not self.is_meta(tensor):
            return None
        try:
            return self.storages.get(self._storage(tensor)._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return None

    def seen(self, tensor: Any) -> DeviceStorage | None:
        """Return the storage that a program sees.

        In code of torch that computes a shape, a tensor is on `meta`.
        """
        return None if self.place.inside else self.find(tensor)

    def adopt(self, tensor: Any, index: int) -> bool:
        """Move a tensor to the device `index`. Return whether its storage is new there.

        Raises OutOfMemoryError of torch.
        """
        try:
            storage = self._storage(tensor)
        except (NotImplementedError, RuntimeError):
            return False
        key, size = storage._cdata, storage.nbytes()
        known = self.storages.get(key)
        if known is not None and known.size >= size:
            return False
        memory = self.memories[index]
        try:
            allocation = memory.take(size - known.size if known else size)
        except Full as full:
            self.out_of_memory = True
            raise self.torch.cuda.OutOfMemoryError(str(full)) from None
        if known is not None:  # it was resized
            known.size += allocation
            return False
        reference = weakref.ref(storage, lambda _: self._release(key))
        self.storages[key] = DeviceStorage(index, allocation, self._address, reference)
        self._address += -(-max(allocation, 1) // PAGE) * PAGE
        return True

    def _release(self, key: int) -> None:
        storage = self.storages.pop(key, None)
        if storage is not None:
            self.memories[storage.index].give(storage.size)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude the time inside the context from the program's time."""
        began = self._own_time()
        try:
            yield
        finally:
            self.hide(self._own_time() - began)

    def _own_time(self) -> float:
        """Return the machine's time, without sleeping and waiting for a core."""
        return time.perf_counter() - self.slept() - core_wait_seconds()

    def default_device(self) -> Any:
        """Return the device of `with torch.device(...)` or torch.set_default_device, or None."""
        stack_item, length = self.torch._C._get_function_stack_at, self.torch._C._len_torch_function_stack()
        modes = (stack_item(index) for index in reversed(range(length)))
        return next((mode.device for mode in modes if isinstance(mode, self._context)), None)

    def enter(self) -> None:
        """Send this thread's operations to `mode` from now on."""
        self.mode.__enter__()
        self.entered = True

    def leave(self) -> None:
        """Leave `mode`, at the end or in a process that computes only on the host."""
        if self.entered:
            self.entered = False
            self.mode.__exit__(None, None, None)

    def work(self, index: int, operation: str, kind: str, flops: float, moved: float) -> None:
        """Charge a kernel to the current stream of a device. `operation`: see `roofline.seconds`."""
        self.operations += 1
        self.hide(-self.profile.launch)
        self.clocks[index].charge(self.streams[index], seconds(self.profile, operation, kind, flops, moved))

    def move(self, index: int, moved: int) -> None:
        """Charge a kernel that only moves bytes."""
        self.work(index, "product", "fp32", 0.0, moved)

    def transfer(self, index: int, way: str, moved: int, *, wait: bool) -> None:
        """Charge a copy between host and device. `way` is a value for `roofline.copying`.

        With `wait`, the program waits for the end of the copy.
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
        """Subtract the cost of emulation from the time of all clocks."""
        for clock in self.clocks:
            clock.hide(amount)
