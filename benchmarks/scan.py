"""How long a scan for GPU code takes: against reading the same files, and against unpacking the same bytes.

Every measurement is made by a fresh process, which also tells its peak of memory. Sides take turns.

    read, cold      the pages of the wheel's files are dropped from the page cache, then read whole
    files, cold     they are dropped, then every shared library is scanned
    scan, cold      they are dropped, then the folder is scanned, its small files and their names too
    ..., warm       the pages are there
    inflate         every member of the wheel is inflated and the bytes are dropped
    wheel           they are scanned as they come
    unpack zstd     a layer's tar is unpacked and the bytes are dropped, the same with gzip
    layer zstd      it is scanned as it comes
    unsquash        a .sif is unpacked by unsquashfs
    sif             it is unpacked, then scanned

Against inflating the same bytes, a scan may take GOAL times as long.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from imagefactory.oci.inflate import plain_layer
from imagefactory.oci.layers import codec
from imagefactory.progress import QuietProgress
from imagefactory.scan.fatbin import scan_file
from imagefactory.scan.files import scan_directory, scan_wheel
from imagefactory.scan.findings import CHUNK, stopping_pool
from imagefactory.scan.layers import scan_layer, unpacked_sif
from imagefactory.scan.zip import member_bytes, members_of

MODES = ("read", "files", "scan", "inflate", "wheel")
LAYER_MODES = ("unpack", "layer")
SIF_MODES = ("unsquash", "sif")
GOAL = 1.3
CODECS = ("zstd", "gzip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    seconds: float
    megabytes: float


# --- in a process of its own ---------------------------------------------------------------------


def read_all(paths: list[Path]) -> None:
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def scan_files(paths: list[Path]) -> None:
    for path in paths:
        if re.search(r"\.so(\.|$)", path.name):
            scan_file(path, path.name)


def inflate_all(wheel: Path, workers: int) -> None:
    def inflate(member: zipfile.ZipInfo) -> None:
        for _ in member_bytes(wheel, member):
            pass

    members = sorted(members_of(wheel), key=lambda one: -one.compress_size)
    with stopping_pool(workers) as pool:
        list(pool.map(inflate, members))


def packed_bytes(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            yield data


def media_type(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    kind = "+zstd" if head == b"\x28\xb5\x2f\xfd" else "+gzip" if head[:2] == b"\x1f\x8b" else ""
    return f"application/vnd.oci.image.layer.v1.tar{kind}"


def plain_bytes(path: Path) -> Iterator[bytes]:
    return plain_layer(media_type(path), packed_bytes(path))


def unpack(path: Path) -> None:
    for _ in plain_bytes(path):
        pass


def unsquash(path: Path, folder: Path, workers: int) -> None:
    with unpacked_sif(path, folder, QuietProgress()) as root:
        if workers:
            scan_directory(root, QuietProgress(), workers=workers)


def do(mode: str, path: Path, workers: int, folder: Path) -> None:
    """Does one thing and prints how long it took and the most memory that this process had."""
    listed = files_of(path)
    work: dict[str, Callable[[], object]] = {
        "read": lambda: read_all(listed),
        "files": lambda: scan_files(listed),
        "scan": lambda: scan_directory(path, QuietProgress(), workers=workers),
        "inflate": lambda: inflate_all(path, workers),
        "wheel": lambda: scan_wheel(path, QuietProgress(), workers=workers),
        "unpack": lambda: unpack(path),
        "layer": lambda: scan_layer(plain_bytes(path)),
        "unsquash": lambda: unsquash(path, folder, 0),
        "sif": lambda: unsquash(path, folder, workers),
    }
    start = time.perf_counter()
    work[mode]()
    seconds = time.perf_counter() - start
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps([seconds, int(found[1]) / 1000 if found else 0.0]))


# --- the sides in turns --------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def forget(folder: Path) -> None:
    """Drops the files' pages, which must be on the disk for that."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(mode: str, path: Path, workers: int, folder: Path = Path()) -> Measured:
    command = [sys.executable, __file__, "--do", mode, "--workers", str(workers), "--folder", str(folder)]
    command.append(str(path))
    seconds, megabytes = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return Measured(seconds=seconds, megabytes=megabytes)


def middle(trials: list[Measured]) -> Measured:
    return Measured(
        seconds=statistics.median(one.seconds for one in trials),
        megabytes=max(one.megabytes for one in trials),
    )


def compare(wheel: Path, folder: Path, trials: int, workers: int) -> list[tuple[str, float, Measured]]:
    """Rows of (what, GB, measured), all over the same wheel."""
    unpacked = folder / wheel.stem
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    size = sum(path.stat().st_size for path in files_of(unpacked)) / 1e9
    seen: dict[str, list[Measured]] = {}
    try:
        for _ in range(trials):
            for mode in ("read", "files", "scan"):
                forget(unpacked)
                seen.setdefault(f"{mode}, cold", []).append(measure(mode, unpacked, workers))
            measure("read", unpacked, workers)
            for mode in ("read", "files", "scan"):
                seen.setdefault(f"{mode}, warm", []).append(measure(mode, unpacked, workers))
            for mode in ("inflate", "wheel"):
                seen.setdefault(mode, []).append(measure(mode, wheel, workers))
    finally:
        shutil.rmtree(unpacked)
    return [(what, size, middle(found)) for what, found in seen.items()]


def pack(blob: Path, name: str, folder: Path) -> tuple[Path, float]:
    """The tar in `blob` packed anew, as `<hex of its sha256>.<codec>`, and its GB."""
    half, digest, size = folder / f"half.{name}", hashlib.sha256(), 0
    compressor = codec(name).compressor()
    with half.open("wb") as file:
        for data in plain_bytes(blob):
            digest.update(data)
            size += len(data)
            file.write(compressor.compress(data))
        file.write(compressor.flush())
    return half.rename(folder / f"{digest.hexdigest()}.{name}"), size / 1e9


def compare_layer(blob: Path, folder: Path, trials: int) -> list[tuple[str, float, Measured]]:
    """Rows of (what, GB, measured), all over the same tar, packed both ways, for one worker."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        packed = {name: pack(blob, name, Path(scratch)) for name in CODECS}
        seen: dict[tuple[str, float], list[Measured]] = {}
        for _ in range(trials):
            for name, (path, size) in packed.items():
                for mode in LAYER_MODES:
                    seen.setdefault((f"{mode} {name}", size), []).append(measure(mode, path, 1))
    return [(what, size, middle(found)) for (what, size), found in seen.items()]


def compare_sif(sif: Path, folder: Path, trials: int, workers: int) -> list[tuple[str, float, Measured]]:
    """Rows of (what, GB, measured), over one .sif."""
    seen: dict[str, list[Measured]] = {}
    for _ in range(trials):
        for mode in SIF_MODES:
            seen.setdefault(mode, []).append(measure(mode, sif, workers, folder))
    return [(what, sif.stat().st_size / 1e9, middle(found)) for what, found in seen.items()]


def compare_times(what: str, ratio: float) -> None:
    print(f"  {what} {ratio:.2f}, goal at most {GOAL}: {'met' if ratio <= GOAL else 'MISSED'}", flush=True)


def show(title: str, rows: list[tuple[str, float, Measured]]) -> dict[str, float]:
    """Prints the rows; gives the seconds by what was done."""
    print(title)
    for what, size, found in rows:
        rate = found.seconds / size
        print(f"  {what:12} {found.seconds:7.2f} s {rate:7.3f} s/GB {found.megabytes:6.0f} MB")
    return {what: found.seconds for what, _, found in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument(
        "--layer", action="append", type=Path, default=[], help="the blob of a layer, from a store"
    )
    parser.add_argument("--sif", action="append", type=Path, default=[], help="a .sif")
    parser.add_argument(
        "--folder", type=Path, default=Path(".benchmark"), help="scratch, on the disk in question"
    )
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--do", choices=(*MODES, *LAYER_MODES, *SIF_MODES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        do(options.do, options.wheels[0], options.workers, options.folder)
        return
    if not (options.wheels or options.layer or options.sif):
        parser.error("give a wheel, the blob of a layer (--layer) or a .sif (--sif)")
    for wheel in options.wheels:
        rows = compare(wheel, options.folder, options.trials, options.workers)
        title = f"{wheel.name}: {rows[0][1]:.2f} GB unpacked, workers {options.workers}"
        taken = show(title, rows)
        compare_times("wheel : inflate", taken["wheel"] / taken["inflate"])
        print(f"  scan : read, cold {taken['scan, cold'] / taken['read, cold']:.2f}", flush=True)
    for blob in options.layer:
        rows = compare_layer(blob, options.folder, options.trials)
        taken = show(f"layer {blob.name[:12]}: {rows[0][1]:.2f} GB unpacked", rows)
        for name in CODECS:
            for mode in LAYER_MODES[1:]:
                ratio = taken[f"{mode} {name}"] / taken[f"unpack {name}"]
                compare_times(f"{mode} : unpack, {name}", ratio)
    for sif in options.sif:
        rows = compare_sif(sif, options.folder, options.trials, options.workers)
        taken = show(f"{sif.name}: workers {options.workers}", rows)
        compare_times("sif : unsquash", taken["sif"] / taken["unsquash"])


if __name__ == "__main__":
    main()
