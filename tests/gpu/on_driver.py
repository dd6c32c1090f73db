"""What is asked of the driver itself, in a process of its own: SUITE QUESTION [FILE ..]. Prints JSON.

- `latencies`: milliseconds by what was timed, p50 and p95 of many.
- `loads`: of each FILE what the driver answers for its containers of GPU code, `{code: count}`; 0: it loads.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import runpy
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A container of GPU code (a fatbin): magic, version, size of its header, size of what follows.
FATBIN = struct.pack("<I", 0xBA55ED50)
HEAD = struct.Struct("<IHHQ")
ROUNDS = 200


def containers(path: Path) -> Iterator[bytes]:
    """The GPU code of a library, container by container; PTX and cubins are one each."""
    if path.suffix in (".ptx", ".cubin"):
        yield path.read_bytes() + b"\0"
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        at = view.find(FATBIN)
        while at >= 0:
            _, version, header, size = HEAD.unpack_from(view, at)
            fits = version == 1 and header == HEAD.size and at + header + size <= len(view)
            if fits:
                yield view[at : at + header + size]
            at = view.find(FATBIN, at + (header + size if fits else 4))


def loads(driver: Any, module: Any, files: list[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    with driver.context(driver.device(0)):
        for name in files:
            codes: Counter[str] = Counter()
            for code in containers(Path(name)):
                handle = ctypes.c_void_p()
                try:
                    driver.call("cuModuleLoadDataEx", ctypes.byref(handle), code, 0, None, None)
                except module.DriverError as error:
                    codes[str(error.code)] += 1
                else:
                    driver.call("cuModuleUnload", handle)
                    codes["0"] += 1
            found[name] = dict(codes)
    return found


def latencies(driver: Any, kernels: Any) -> dict[str, dict[str, float]]:
    device, found = driver.device(0), {}

    def note(name: str, rounds: int, run: Callable[[], object]) -> None:
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            run()
            took.append((time.perf_counter() - began) * 1000)
        took.sort()
        found[name] = {"p50": took[len(took) // 2], "p95": took[len(took) * 95 // 100]}

    vectors = kernels.make_vectors("latencies", 1024)
    large = bytes(64 << 20)
    with driver.context(device):
        note("compile PTX", 5, lambda: driver.module(kernels.PTX.add).__enter__())
        with driver.memory(4096) as one, driver.memory(4096) as other, driver.memory(8192) as out:
            driver.write(one, vectors.left.tobytes())
            driver.write(other, vectors.right.tobytes())
            pointers = tuple(ctypes.c_uint64(address) for address in (one, other, out))
            arguments = (*pointers, ctypes.c_uint32(1024))
            with driver.module(kernels.PTX.add) as made:
                note("launch and wait", ROUNDS, lambda: driver.launch(made, kernels.ENTRY, 8, arguments))
            note("4 KiB up", ROUNDS, lambda: driver.write(one, vectors.left.tobytes()))
            note("4 KiB down", ROUNDS, lambda: driver.read(one, 4096))
        with driver.memory(len(large)) as place:
            note("64 MiB up", 5, lambda: driver.write(place, large))
            note("64 MiB down", 5, lambda: driver.read(place, len(large)))

    def take() -> None:
        with driver.memory(1 << 20):
            pass

    with driver.context(device):
        note("1 MiB taken and given back", ROUNDS, take)
    return found


def main(suite: str, question: str, *files: str) -> int:
    loaded = runpy.run_path(str(Path(suite) / "smoke.py"))
    loaded["load_suite"](suite)
    module, kernels = (
        importlib.import_module(f"{loaded['PACKAGE']}.gpu.{name}") for name in ("driver", "kernels")
    )
    driver = module.Driver()
    driver.call("cuInit", 0)
    print(
        json.dumps(latencies(driver, kernels) if question == "latencies" else loads(driver, module, [*files]))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
