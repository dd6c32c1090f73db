"""The devices that this process sees, the tensors in them, their memory, and the time of both sides.

Time (`Clock`, pure but for `sleep`): the program's time excludes the cost of emulating. The device's time
runs ahead of it, as kernels are queued; a program that asks for a result waits until the device is there. So
the real loader and the emulated device overlap as on a GPU.

Memory (`Memory`, pure): the bytes in use, their maximum, and when a device is full. Page-locked memory
(`Pinned`) is real: the loader pays for it, and the machine's limit applies.
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
"""Kernels that may be queued on a device before the program waits (CUDA's launch queue)."""


class Clock:
    """Seconds since the start. One device; each of its streams is through with its work at its own time."""

    def __init__(
        self, now: Callable[[], float], sleep: Callable[[float], None], kept: Callable[[], float]
    ) -> None:
        self._now, self._sleep, self._kept = now, sleep, kept
        self._settled = kept()
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
        """The program's time."""
        return self._now() - self._began - self._hidden

    def wall(self) -> float:
        """The machine's time."""
        return self._now() - self._began

    def hide(self, seconds: float) -> None:
        """Takes what emulating cost out of the program's time; a negative amount puts some in."""
        self._hidden += seconds

    def settle(self) -> None:
        """Takes out of the program's time in which it had no core: on a machine of its own it would have one.

        Before the program waits for something, since what it waits for goes on meanwhile.
        """
        kept = self._kept()
        self._hidden += kept - self._settled
        self._settled = kept

    def charge(self, stream: int, seconds: float) -> None:
        """A kernel of so many seconds is queued on a stream. Waits where the queue is full."""
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
        """What comes next on a stream begins no earlier."""
        self.streams[stream] = max(self.streams.get(stream, 0.0), until)

    def wait_until(self, time: float) -> None:
        """The program waits for the device."""
        self.settle()
        left = time - self.host()
        if left > 0:
            before = self._now()
            self._sleep(left)
            self.slept += self._now() - before

    def synchronize(self) -> None:
        self.wait_until(self.through)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The program waits for its loader meanwhile."""
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
        """How long of an idle time of the device the program waited for its loader."""
        found = sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in self._waits)
        self._waits.clear()
        return found


def kept_waiting() -> float:
    """Seconds that the process's first thread was ready to run and had no core; 0 where nobody counts them.

    What else runs on this machine is no part of how long a batch takes: how many cores there are is
    reckoned with where batches meet.
    """
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


ROUND = 512
SEGMENT = 2 << 20
"""What torch's allocator rounds a block to, and what it takes of the device at once."""


class Full(Exception):
    """There is no room: `str` of it is what torch says then."""


class Memory:
    """`total` are the device's bytes, `context` those that CUDA took before the first tensor.

    `peak` is the most that was ever taken, `most` since a program asked for it anew.
    """

    def __init__(self, index: int, total: int, context: int) -> None:
        self.index, self.total, self.context = index, total, context
        self.share = 1.0
        self.taken = self.most = self.reserved = self.most_reserved = self.blocks = 0
        self.peak = 0

    def take(self, size: int) -> int:
        """The bytes that a block of this size takes, now taken. Raises Full."""
        size = -(-size // ROUND) * ROUND
        room = int(self.total * self.share) - self.context - self.taken
        if size > room:
            raise Full(
                f"CUDA out of memory. Tried to allocate {_told(size)}. GPU {self.index} has a total capacity "
                f"of {_told(self.total)} of which {_told(max(0, room))} is free. {_told(self.taken)} is "
                "allocated by PyTorch (emulated: no memory of a GPU was taken)"
            )
        self.taken += size
        self.blocks += 1
        self.most, self.peak = max(self.most, self.taken), max(self.peak, self.taken)
        self.reserved = max(self.reserved, -(-self.taken // SEGMENT) * SEGMENT)
        self.most_reserved = max(self.most_reserved, self.reserved)
        return size

    def give(self, size: int) -> None:
        """Gives back what `take` returned."""
        self.taken -= size
        self.blocks -= 1

    def empty_cache(self) -> None:
        self.reserved = -(-self.taken // SEGMENT) * SEGMENT

    def reset_peak(self) -> None:
        """What torch.cuda.reset_peak_memory_stats does."""
        self.most, self.most_reserved = self.taken, self.reserved


def _told(size: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.2f} {unit}"
    return f"{size} bytes"


class Pinned:
    """Blocks that were locked are used again, as torch's own allocator does. `refused` says why one was not
    locked.
    """

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
        """A copy of a tensor in locked memory."""
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


class Held:
    """A storage of a device. `address` is made up, as an address that no other storage has."""

    __slots__ = ("address", "index", "reference", "size")

    def __init__(self, index: int, size: int, address: int, reference: Any) -> None:
        self.index, self.size, self.address, self.reference = index, size, address, reference


class ThreadContext(threading.local):
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
        self.place = ThreadContext()
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
