"""The memory of one device, in bytes: what is taken, the most that was, and when it is out. Pure."""

from __future__ import annotations

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
