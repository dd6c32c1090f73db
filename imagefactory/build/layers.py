"""Build the layers of a plan in threads, each as its packages arrive. A built layer is reused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from imagefactory.build.conda.prefix import lay_package
from imagefactory.build.layer_plan import LayerInputs, LayerPackage, LayerPlan, in_build_order
from imagefactory.build.wheel_layer import InstalledFile, lay_wheel, with_byte_code
from imagefactory.errors import BuildError, StoreError
from imagefactory.fs import add_checksum, check_checksum, explain_full_disk
from imagefactory.model import Mount, RunSpec
from imagefactory.oci.layers import CHUNK, END_OF_ARCHIVE, ByteSink, TarSegment, codec
from imagefactory.oci.layout import BlobWriter, Layout
from imagefactory.oci.manifests import OciLayer, canonical_json, hash_key
from imagefactory.oci.tree import LayerTree
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import QUIET, Progress, ProgressTask
from imagefactory.runtime.unshare import UnshareRunner
from imagefactory.serialize import printable_line
from imagefactory.trees import printable

_LONGEST_COMPLAINT = 2000
SERVER = Path(__file__).with_name("pyc_server.py")
OTHER_BASE = "choose another base with a standard CPython"
LARGEST = 256 << 20  # bytes of a .pyc; a source may have 64 MiB


class BaseCompiler:
    """A compiler that uses the Python of a base image, through `pyc_server.py` running in it.

    `start` starts a command inside the unpacked base with pipes on its three streams, at the first source.
    No output of a base reaches the terminal. `interpreter` is the absolute path of that Python, empty for
    Debian's. Raises BuildError if the base's Python is not `python` (`3.11`) or stops answering.
    """

    def __init__(
        self,
        start: Callable[[tuple[str, ...]], subprocess.Popen[bytes]],
        python: str,
        interpreter: str = "",
    ) -> None:
        self._start, self._python = start, python
        self._interpreter = interpreter or f"/usr/bin/python{python}"
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: _StderrTail | None = None

    @contextmanager
    def wheel(self) -> Iterator[BaseCompiler]:
        """Yield this compiler for all sources of one wheel."""
        process = self._running()
        self._write(process, b"W")
        try:
            yield self
        except BaseException:
            self.close()  # the server is in the middle of a wheel: the next one starts another
            raise
        self._write(process, b"E")

    def compile(self, path: str, source: bytes) -> bytes | None:
        process = self._running()
        name = path.encode("utf-8", "surrogateescape")
        header = len(name).to_bytes(4, "big") + name + len(source).to_bytes(4, "big")
        self._write(process, b"F" + header + source)
        size = int.from_bytes(self._read(process, 4), "big")
        if size > LARGEST:
            raise BuildError(
                "bytecode-failed",
                f"the base's Python wrote {size} bytes of bytecode for {path}, more than {LARGEST}",
                hint=OTHER_BASE,
            )
        return self._read(process, size) or None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                _pipe(process.stdin).close()
            _pipe(process.stdout).close()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = self._start((self._interpreter, "-s", "-S", "-P", "-c", SERVER.read_text()))
            if self._process.stderr is not None:
                self._complaints = _StderrTail(self._process.stderr)
            try:
                tag = printable(self._read(self._process, 16).decode(errors="replace").strip())
            except BuildError:
                complaint = self._complaints.text() if self._complaints else ""
                raise BuildError(
                    "base-python-fails",
                    f"{self._interpreter} does not run in the base{complaint}",
                    hint="choose another base, for example with a newer glibc",
                ) from None
            expected = "cpython-" + self._python.replace(".", "")
            if tag != expected:
                raise BuildError(
                    "base-python-mismatch",
                    f"{self._interpreter} of the base is {tag}, expected {expected}",
                    hint=OTHER_BASE,
                )
        return self._process

    def _write(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        try:
            pipe = _pipe(process.stdin)
            pipe.write(data)
            pipe.flush()
        except BrokenPipeError:
            raise _exited_error(process) from None

    def _read(self, process: subprocess.Popen[bytes], count: int) -> bytes:
        data = _pipe(process.stdout).read(count)
        if len(data) != count:
            raise _exited_error(process)
        return data


class _StderrTail:
    """The last bytes that a process writes to stderr."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept, self._thread = b"", threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._kept = (self._kept + data)[-_LONGEST_COMPLAINT:]

    def text(self) -> str:
        """Return the last line of an ended process, after a colon; empty without a line."""
        self._thread.join(timeout=10)
        lines = self._kept.decode("utf-8", "replace").split("\n")
        last = next((line for line in map(printable_line, reversed(lines)) if line), "")
        return f": {last}" if last else ""


class CompilerPool:
    """Compilers for threads. Each serves one package at a time, and only packages with sources.

    `ready` returns when `make` can create a new one.
    """

    def __init__(self, ready: Callable[[], None], make: Callable[[], BaseCompiler]) -> None:
        self._ready, self._make = ready, make
        self._idle: list[BaseCompiler] = []

    @contextmanager
    def package(self) -> Iterator[LazyCompiler]:
        """Yield a compiler for all sources of one package."""
        with ExitStack() as lending:
            yield LazyCompiler(lambda: lending.enter_context(self._lent()))

    @contextmanager
    def _lent(self) -> Iterator[BaseCompiler]:
        self._ready()
        try:
            compiler = self._idle.pop()
        except IndexError:
            compiler = self._make()
        try:
            with compiler.wheel():
                yield compiler
        finally:
            self._idle.append(compiler)

    def close(self) -> None:
        """End all compilers."""
        while self._idle:
            self._idle.pop().close()


@dataclass(slots=True)
class LazyCompiler:
    """A compiler that is requested from `lend` at the first source."""

    lend: Callable[[], BaseCompiler]
    lent: BaseCompiler | None = None

    def compile(self, path: str, source: bytes) -> bytes | None:
        self.lent = self.lent or self.lend()
        return self.lent.compile(path, source)


KILLED = 128 + signal.SIGKILL
"""The sandbox's exit code for a killed command: by a limit of a run, or for lack of memory."""


def _exited_error(process: subprocess.Popen[bytes]) -> BuildError:
    with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its pipes and still runs
        process.wait(timeout=10)
    problem = "the base's Python ended while it compiled .py files"
    if process.returncode != KILLED:
        return BuildError("bytecode-failed", problem, hint=OTHER_BASE)
    return BuildError(
        "bytecode-failed",
        f"{problem}: it was killed, by a limit of runs or for lack of memory",
        hint="use a machine with more memory, or raise the limit that imagefactory doctor shows",
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSupply:
    """The inputs that may still arrive while layers are built.

    `package` returns when the wheel at that path is complete; threads wait for it until `stop` ends the
    work. `base` builds the base in the caller's thread, and returns its unpacked directories. `unpacked`
    also gets each layer as files, None for no such copy.
    """

    package: Callable[[Path], None]
    base: Callable[[], tuple[Path, ...]]
    stop: threading.Event
    unpacked: UnpackedLayers | None


def build_layers(
    plans: Sequence[LayerPlan],
    bench: LayerInputs,
    supply: PackageSupply,
    progress: Progress,
    *,
    workers: int,
) -> list[LayerResult]:
    """Return the layers of `plans` in their order, found or built by up to `workers` threads at once.

    Threads are sufficient: inflating, hashing, packing and writing release the interpreter's lock, and
    another process compiles byte code.
    """
    layout = Layout(bench.store)
    results = {plan.key: layer for plan in plans if (layer := _find_layer(layout, plan))}
    missing = [plan for plan in plans if plan.key not in results]
    if not missing:
        return [results[plan.key] for plan in plans]
    with progress.task("making layers", total=sum(plan.size for plan in missing)) as task:
        work = BuildWorkers(bench, supply, task, workers)
        # A thread for each layer: most of them wait for packages or the base, without a slot.
        pool = ThreadPoolExecutor(len(missing))
        try:
            futures = {pool.submit(work.make_layer, plan): plan.key for plan in in_build_order(missing)}
            work.base.set_result(supply.base())
            for future in as_completed(futures):
                if not isinstance(future.exception(), _CancelledError):  # the error that stopped it says why
                    results[futures[future]] = future.result()
            work.compilers.close()  # compilers end with the threads that started them
        except BaseException:
            supply.stop.set()
            if not work.base.done():
                work.base.set_exception(_CancelledError())
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            work.compilers.close()
    return [results[plan.key] for plan in plans]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    layer: OciLayer
    made: bool


class _CancelledError(Exception):
    """Another layer failed, or the user interrupted."""


class BuildWorkers:
    """The shared state of a build's threads: `slots` for threads that work at once, base, compilers."""

    def __init__(self, bench: LayerInputs, supply: PackageSupply, task: ProgressTask, workers: int) -> None:
        self.bench, self.supply, self.layout = bench, supply, Layout(bench.store)
        self.slots = threading.Semaphore(workers)
        self.base: Future[tuple[Path, ...]] = Future()
        self.compilers = CompilerPool(self._await_base, lambda: new_compiler(bench, self.base.result()))
        self._task: ProgressTask | None = task

    def report(self, count: int) -> None:
        """Report bytes that were read of packages. A failing progress display does not stop the work."""
        if self.supply.stop.is_set():
            raise _CancelledError
        try:
            if self._task and count:
                self._task.advance(count)
        except Exception:
            self._task = None  # the terminal is gone

    def _await_base(self) -> None:
        self.slots.release()  # another thread works while this one waits
        try:
            self.base.result()
        finally:
            self.slots.acquire()

    def make_layer(self, plan: LayerPlan) -> LayerResult:
        """Return the layer of `plan`, found or built. One process builds it; others wait and then find it."""
        for part in plan.parts:
            if not part.linked:
                self.supply.package(part.path)
        with self.layout.locked(f"layer-{plan.key}"), self.slots:
            stored = _find_layer(self.layout, plan)
            if stored:
                self.report(plan.size)
            result = stored or self._make(plan)
            if self.supply.unpacked:  # existing ones stay
                self.supply.unpacked.unpack([result.layer], self.layout.blob_path, QUIET, workers=1)
            return result

    def _make(self, plan: LayerPlan) -> LayerResult:
        packer, plain = codec(self.bench.codec), hashlib.sha256()

        def diff_id() -> str:
            return f"sha256:{plain.hexdigest()}"

        with ExitStack() as opened:
            opened.enter_context(explain_full_disk(self.layout.path))
            blob = opened.enter_context(BlobWriter(self.layout))
            if plan.shared:
                laid = _shared_segments(self, plan, blob, plain)
            else:
                unpacked = self.supply.unpacked
                tree = opened.enter_context(unpacked.writing(diff_id)) if unpacked else None
                (part,) = plan.parts
                _, files = _lay(self, part, blob, plain, tree=tree)
                laid = format_segment_record(part.name, files)
            last = packer.compressor()
            blob.write(last.compress(END_OF_ARCHIVE) + last.flush())
            plain.update(END_OF_ARCHIVE)
            descriptor = blob.commit(packer.media_type)
            self.layout.keep(segment_record_path(self.layout, plan.key), laid)
        layer = OciLayer(descriptor=descriptor, diff_id=diff_id(), title=plan.title)
        self.layout.record_layer(plan.key, layer)
        return LayerResult(layer=layer, made=True)


def _find_layer(layout: Layout, plan: LayerPlan) -> LayerResult | None:
    known = layout.recall_layer(plan.key)
    if known is None or check_checksum(segment_record_path(layout, plan.key)) is None:
        return None
    return LayerResult(layer=replace(known, title=plan.title), made=False)


def _shared_segments(work: BuildWorkers, plan: LayerPlan, blob: BlobWriter, plain: hashlib._Hash) -> bytes:
    """Write directories once, then the packages' segments. A file of several packages is in the first."""
    packer = codec(work.bench.codec)
    segments: list[_CachedSegment] = []
    files: set[str] = set()
    for part in plan.parts:
        segment = _segment(work, part, frozenset())
        if doubled := files & set(segment.files):
            segment = replace(_segment(work, part, frozenset(doubled)), laid=segment.laid)
        files |= set(segment.files)
        segments.append(segment)
    above = TarSegment(packer, blob, plain, epoch=work.bench.epoch)
    for directory in sorted({directory for segment in segments for directory in segment.folders}):
        above.folder(directory)
    above.close()
    for segment in segments:
        with segment.path.open("rb") as file:
            while data := file.read(CHUNK):
                blob.write(data)
        for data in packer.decompress(segment.path):
            plain.update(data)
    return b"".join(segment.laid for segment in segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedSegment:
    """A segment on disk, the paths in it (byte code too), and the record of its package's files."""

    path: Path
    folders: tuple[str, ...]
    files: tuple[str, ...]
    laid: bytes


def _segment(work: BuildWorkers, part: LayerPackage, skip: frozenset[str]) -> _CachedSegment:
    """Return the compressed tar entries of a small package except `skip`, cached for other layers.

    A cached segment is used only if it has its recorded digest, because anyone may have changed the cache.
    """
    key = hash_key("without", part.key, *sorted(skip)) if skip else part.key
    path = work.bench.segments / key[:2] / key
    listing = path.with_suffix(".files")
    try:
        digest, paths, laid = (check_checksum(listing) or b"").split(b"\n", 2)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest().encode() == digest:
                if not skip:
                    work.report(part.size)
                directories, files = json.loads(paths)
                return _CachedSegment(path=path, folders=tuple(directories), files=tuple(files), laid=laid)
    except (FileNotFoundError, ValueError):
        pass
    with explain_full_disk(path.parent, setting="cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w+b") as file:
                segment, installed = _lay(work, part, file, hashlib.sha256(), bare=True, skip=skip)
                laid = format_segment_record(part.name, installed)
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
            beside = Path(name + ".files")
            directories, files = tuple(sorted(segment.folders)), tuple(segment.files)
            beside.write_bytes(
                add_checksum(listing, b"\n".join((digest, canonical_json([directories, files]), laid)))
            )
            beside.replace(listing)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return _CachedSegment(path=path, folders=directories, files=files, laid=laid)


def _lay(
    work: BuildWorkers,
    part: LayerPackage,
    sink: ByteSink,
    plain: hashlib._Hash,
    *,
    bare: bool = False,
    skip: frozenset[str] = frozenset(),
    tree: LayerTree | None = None,
) -> tuple[TarSegment, tuple[InstalledFile, ...]]:
    """Write one package, and report its bytes as they are read: `part.size` in all, once."""
    bench, remaining = work.bench, 0 if skip else part.size

    def report(count: int) -> None:
        nonlocal remaining
        count = min(count, remaining)
        remaining -= count
        work.report(count)

    segment = TarSegment(
        codec(bench.codec),
        sink,
        plain,
        epoch=bench.epoch,
        bare=bare,
        skip=skip | with_byte_code(part.left_out, bench.place.python),
        tree=tree,
    )
    lay = lay_package if part.linked else partial(lay_wheel, sha256=part.sha256)
    with work.compilers.package() as compiler:
        laid = lay(part.path, bench.place, segment, compiler, report=report)
    segment.close()
    work.report(remaining)
    return segment, laid


def format_segment_record(name: str, laid: tuple[InstalledFile, ...]) -> bytes:
    lines = (f"{name}\t{file.content}\t{file.path}\n" for file in laid)
    return "".join(lines).encode("utf-8", "surrogateescape")


def segment_record_path(layout: Layout, key: str) -> Path:
    return layout.path / "layers" / f"{key}.files"


def new_compiler(bench: LayerInputs, base: tuple[Path, ...]) -> BaseCompiler:
    """Return a compiler with the interpreter in the base's unpacked directories."""
    runner = UnshareRunner(Layout(bench.store))

    def start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        # A fixed hash seed: the order of sets would reach the bytes of .pyc files.
        environment = (*bench.environment, ("PYTHONHASHSEED", "0"))
        prefix = bench.place.prefix
        mounts = () if bench.linked is None else (Mount(source=bench.linked, target=prefix, bind=True),)
        spec = RunSpec(argv=argv, environment=environment, read_only=True, mounts=mounts)
        pipe = subprocess.PIPE
        return runner.start(base, spec, stdin=pipe, stdout=pipe, stderr=pipe, processor=bench.processor)

    return BaseCompiler(start, bench.place.python, bench.interpreter)


def read_segment_record(layout: Layout, plans: Iterable[LayerPlan]) -> Iterator[tuple[str, str, str]]:
    for plan in plans:
        yield from read_segment_record_of(layout, plan.key)


def read_segment_record_of(layout: Layout, key: str) -> Iterator[tuple[str, str, str]]:
    laid = check_checksum(segment_record_path(layout, key))
    if laid is None:
        raise StoreError(
            "store-changed",
            f"{segment_record_path(layout, key)} was removed or changed during the build",
            hint="run the same command again",
        )
    for line in laid.decode("utf-8", "surrogateescape").split("\n")[:-1]:
        package, content, path = line.split("\t", 2)
        yield package, content, path
