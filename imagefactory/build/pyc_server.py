"""Byte-compiles .py files with the Python it runs in: for inside a base image, standard library only.

Protocol on stdin and stdout, lengths as 4 bytes big-endian. For each wheel the caller sends b"W", then any
number of b"F" path-length path source-length source, then b"E". Each F is answered by length and .pyc, length
0 when the source is not valid Python. A new child compiles each wheel: what a long-lived interpreter has
interned before changes which constants of a .pyc are shared, and so its bytes.
"""

import importlib.util
import os
import sys
from importlib import _bootstrap_external


def read(count: int) -> bytes:
    parts = []
    while count:
        data = os.read(0, min(count, 1 << 20))
        if not data:
            os._exit(0)
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def read_block() -> bytes:
    return read(int.from_bytes(read(4), "big"))


def write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def compile_source(path: str, source: bytes) -> bytes:
    try:
        code = _bootstrap_external.SourceFileLoader("<wheel>", path).source_to_code(source, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError, SystemError):
        return b""
    return bytes(_bootstrap_external._code_to_hash_pyc(code, importlib.util.source_hash(source), False))  # type: ignore[attr-defined]


def serve_wheel() -> None:
    while read(1) == b"F":
        path = read_block().decode("utf-8", "surrogateescape")
        pyc = compile_source(path, read_block())
        write(len(pyc).to_bytes(4, "big") + pyc)


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    write(sys.implementation.cache_tag.encode().ljust(16))
    while read(1) == b"W":
        child = os.fork()
        if child == 0:
            serve_wheel()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            sys.exit(f"compiler of a wheel ended with status {status}")


main()
