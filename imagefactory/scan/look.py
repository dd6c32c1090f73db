"""What every scan shares: which files may hold GPU code, and one file of a stream looked at as it comes.

GPU code is looked for in files that begin as ELF, as an archive of objects, or as a container of GPU
code; what else files tell is findings.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.scan.fatbin import CodeReader
from imagefactory.scan.findings import (
    NOTE_LIMIT,
    FileFinding,
    holds_note,
    is_text,
    parse_facts,
    parse_note,
    read_name,
    tells_facts,
)

HEAD = 24  # bytes by which a file is told
SMALLEST = 64  # bytes; no container of GPU code is smaller
CHUNK = 1 << 17  # small: what one call cannot take in yet is copied


_STARTS = (b"\x7fELF", b"!<arch>\n", b"!<thin>\n", b"\x50\xed\x55\xba", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")


def is_candidate(head: bytes) -> bool:
    """Whether a file that begins so may hold GPU code. `head` is its first `HEAD` bytes."""
    return head.startswith(_STARTS)


class Look:
    """One file of a stream: fed with its bytes in any portions, then closed."""

    def __init__(self, path: str, size: int) -> None:
        self._named, self._size = read_name(path), size
        self._facts = tells_facts(path, size)
        self._head = bytearray()
        self._reader: CodeReader | None = None
        self._note: bytearray | None = bytearray() if holds_note(path) else None
        self._told: tuple[tuple[str, str, str], ...] = ()
        self._idle = size < SMALLEST or (is_text(path) and not self._facts)

    @property
    def idle(self) -> bool:
        """Whether the rest of the bytes would tell nothing more."""
        return self._idle

    def _seek_note(self, data: bytes | memoryview) -> None:
        if self._note is not None:
            self._note += data
            self._told = parse_note(self._named.path, bytes(self._note))
            self._note = None if self._told else self._note[-NOTE_LIMIT:]

    def feed(self, data: bytes | memoryview) -> None:
        self._seek_note(data)
        if self._reader is not None:
            self._reader.feed(data)
        elif not self._idle:
            self._head += data
            if not self._facts and len(self._head) >= HEAD:
                self._decide()

    def _decide(self) -> None:
        if is_candidate(bytes(self._head[:HEAD])):
            self._reader = CodeReader(self._named.path, self._size)
            self._reader.feed(bytes(self._head))
        self._head.clear()
        self._idle = self._reader is None

    def close(self) -> FileFinding:
        named = self._named
        facts = parse_facts(named.path, self._head.decode("utf-8", "replace")) if self._facts else ()
        facts = (*named.facts, *facts, *self._told)
        library = self._reader.close() if self._reader is not None else None
        return FileFinding(
            path=named.path, library=library, package=named.package, facts=facts, toolkit=named.toolkit
        )


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Turns the operating system's refusal to read `path` into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="choose a file that you can read") from error


@contextmanager
def stopping_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose waiting work is dropped when one fails or the user interrupts."""
    pool = ThreadPoolExecutor(max_workers=max(1, workers))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
