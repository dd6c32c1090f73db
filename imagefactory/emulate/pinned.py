"""Page-locked memory, real: the loader pays for it as it would, and the machine's limit holds."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any


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
