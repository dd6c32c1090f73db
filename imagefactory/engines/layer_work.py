"""Makes the layers of a plan in worker processes; a layer is made once and found the next time."""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from imagefactory.engines.conda.layer import lay_package
from imagefactory.engines.layer_plan import LayerInputs, LayerPlan, Part, in_working_order
from imagefactory.engines.pyc import BaseCompiler
from imagefactory.engines.wheel_layer import LaidFile, lay_wheel
from imagefactory.errors import BuildError, StoreError
from imagefactory.files import explain_full_disk, seal, unseal
from imagefactory.model import Mount, RunSpec
from imagefactory.oci.blob_writer import BlobWriter
from imagefactory.oci.layers import CHUNK, END_OF_ARCHIVE, Segment, Sink, codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import canonical_json, hash_key
from imagefactory.oci.model import Layer
from imagefactory.progress import Progress
from imagefactory.runners.unshare import UnshareRunner


def make_layers(
    plans: Sequence[LayerPlan], bench: LayerInputs, workers: int, progress: Progress
) -> list[MadeLayer]:
    """The layers of `plans`, found or made by up to `workers` processes, in the plans' order."""
    layout = Layout(bench.store)
    found = {plan.key: made for plan in plans if (made := _find_layer(layout, plan))}
    missing = [plan for plan in plans if plan.key not in found]
    total = sum(plan.size for plan in missing)
    if not missing:
        return [found[plan.key] for plan in plans]
    if len(missing) == 1 or workers == 1:
        with progress.task("making layers", total=total) as task:
            worker = new_worker(bench, task.advance)
            try:
                found |= {plan.key: make_layer(worker, plan) for plan in missing}
            finally:
                worker.compiler.close()
        return [found[plan.key] for plan in plans]
    # Forked, not spawned: a worker starts at once and shares this process's memory. That is sound only
    # while no other thread runs, so the work is handed out before anything is drawn.
    context = multiprocessing.get_context("fork")
    count = min(workers, len(missing))
    with _reports() as reports:
        pool = ProcessPoolExecutor(
            count, context, initializer=_begin, initargs=(bench, reports.sink, os.getpid())
        )
        try:
            futures: dict[Future[MadeLayer], LayerPlan] = {}
            with _held(signal.SIGINT):  # until a worker leaves it to this process
                for plan in in_working_order(missing):
                    with _explain_killed(plan):
                        futures[pool.submit(_work, plan)] = plan
            with progress.task("making layers", total=total) as task, reports.drained(task.advance):
                found |= _gather(futures)
            return [found[plan.key] for plan in plans]
        except BaseException:
            for worker_process in multiprocessing.active_children():
                # Not SIGTERM: just forked it has this process's handler, and may lose what that raises.
                # What they were writing lies under tmp/ and is collected.
                worker_process.kill()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeLayer:
    layer: Layer
    made: bool


@dataclass(slots=True)
class Worker:
    """What a worker process holds between layers: its compiler and the way to report."""

    bench: LayerInputs
    report: Callable[[int], None]
    compiler: BaseCompiler

    @property
    def layout(self) -> Layout:
        return Layout(self.bench.store)


def make_layer(worker: Worker, plan: LayerPlan) -> MadeLayer:
    """The layer of `plan`, found or made. One process makes it, others wait and find it."""
    layout = worker.layout
    with layout.locked(f"layer-{plan.key}"):
        if found := _find_layer(layout, plan):
            worker.report(plan.size)
            return found
        packer = codec(worker.bench.codec)
        plain = hashlib.sha256()
        with explain_full_disk(layout.path), BlobWriter(layout) as blob:
            make = _shared_segments if plan.shared else _own_segment
            laid = make(worker, plan, blob, plain)
            last = packer.compressor()
            blob.write(last.compress(END_OF_ARCHIVE) + last.flush())
            plain.update(END_OF_ARCHIVE)
            descriptor = blob.commit(packer.media_type)
            layout.keep(laid_path(layout, plan.key), laid)
        layer = Layer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title=plan.title)
        layout.record_layer(plan.key, layer)
        return MadeLayer(layer=layer, made=True)


def _find_layer(layout: Layout, plan: LayerPlan) -> MadeLayer | None:
    known = layout.recall_layer(plan.key)
    if known is None or unseal(laid_path(layout, plan.key)) is None:
        return None
    return MadeLayer(layer=replace(known, title=plan.title), made=False)


def _own_segment(worker: Worker, plan: LayerPlan, blob: BlobWriter, plain: hashlib._Hash) -> bytes:
    (part,) = plan.parts
    _, laid = _lay(worker, part, _Order(sink=blob, plain=plain))
    return format_laid(part.name, laid)


def _shared_segments(worker: Worker, plan: LayerPlan, blob: BlobWriter, plain: hashlib._Hash) -> bytes:
    """Folders first, each once, then the packages' segments; a file of several comes with the first."""
    packer = codec(worker.bench.codec)
    kept: list[_KeptSegment] = []
    files: set[str] = set()
    for part in plan.parts:
        segment = _segment(worker, part, frozenset())
        if doubled := files & set(segment.files):
            segment = replace(_segment(worker, part, frozenset(doubled)), laid=segment.laid)
        files |= set(segment.files)
        kept.append(segment)
    above = Segment(packer, blob, plain, epoch=worker.bench.epoch)
    for folder in sorted({folder for segment in kept for folder in segment.folders}):
        above.folder(folder)
    above.close()
    for segment in kept:
        with segment.path.open("rb") as file:
            while data := file.read(CHUNK):
                blob.write(data)
        for data in packer.decompress(segment.path):
            plain.update(data)
    return b"".join(segment.laid for segment in kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptSegment:
    """A segment on disk, the paths in it (byte code too), and the lines of what its package lays."""

    path: Path
    folders: tuple[str, ...]
    files: tuple[str, ...]
    laid: bytes


def _segment(worker: Worker, part: Part, skip: frozenset[str]) -> _KeptSegment:
    """The tar entries of a small package but those of `skip`, compressed; kept for its neighbours' changes.

    A kept segment is used only while it has the digest it was made with: a cache is nobody's treasure.
    """
    key = hash_key("without", part.key, *sorted(skip)) if skip else part.key
    path = worker.bench.segments / key[:2] / key
    listing = path.with_suffix(".files")
    try:
        digest, paths, laid = (unseal(listing) or b"").split(b"\n", 2)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest().encode() == digest:
                if not skip:
                    worker.report(part.size)
                folders, files = json.loads(paths)
                return _KeptSegment(path=path, folders=tuple(folders), files=tuple(files), laid=laid)
    except (FileNotFoundError, ValueError):
        pass
    with explain_full_disk(path.parent, setting="cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w+b") as file:
                order = _Order(sink=file, plain=hashlib.sha256(), bare=True, skip=skip)
                segment, found = _lay(worker, part, order)
                laid = format_laid(part.name, found)
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
            beside = Path(name + ".files")
            folders, files = tuple(sorted(segment.folders)), tuple(segment.files)
            beside.write_bytes(seal(listing, b"\n".join((digest, canonical_json([folders, files]), laid))))
            beside.replace(listing)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return _KeptSegment(path=path, folders=folders, files=files, laid=laid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Where a segment goes, and how it is made (layers.Segment)."""

    sink: Sink
    plain: hashlib._Hash
    bare: bool = False
    skip: frozenset[str] = frozenset()


def _lay(worker: Worker, part: Part, order: _Order) -> tuple[Segment, tuple[LaidFile, ...]]:
    """Writes one package, reporting its bytes as they are read: `part.size` in all, once."""
    bench, left = worker.bench, 0 if order.skip else part.size

    def report(count: int) -> None:
        nonlocal left
        count = min(count, left)
        left -= count
        worker.report(count)

    segment = Segment(
        codec(bench.codec), order.sink, order.plain, epoch=bench.epoch, bare=order.bare, skip=order.skip
    )
    lay = lay_package if part.linked else partial(lay_wheel, sha256=part.sha256)
    with worker.compiler.wheel() as compiler:
        laid = lay(part.path, bench.place, segment, compiler, report=report)
    segment.close()
    worker.report(left)
    return segment, laid


def format_laid(name: str, laid: tuple[LaidFile, ...]) -> bytes:
    lines = (f"{name}\t{file.content}\t{file.path}\n" for file in laid)
    return "".join(lines).encode("utf-8", "surrogateescape")


def laid_path(layout: Layout, key: str) -> Path:
    return layout.path / "layers" / f"{key}.files"


_worker: Worker | None = None


def _begin(bench: LayerInputs, sink: int, parent: int) -> None:
    """First thing in a worker process: dies with its parent, leaves Ctrl-C to it.

    At its end it waits for its sandbox, which would still be removing folders of the store otherwise.
    """
    global _worker
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _worker = new_worker(bench, partial(_tell, sink))
    multiprocessing.util.Finalize(None, _worker.compiler.close, exitpriority=0)


def new_worker(bench: LayerInputs, report: Callable[[int], None]) -> Worker:
    runner = UnshareRunner(Layout(bench.store))

    def start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        # A fixed hash seed: the order of sets would reach the bytes of .pyc files.
        environment = (*bench.environment, ("PYTHONHASHSEED", "0"))
        shown = bench.place.prefix
        mounts = () if bench.linked is None else (Mount(source=bench.linked, target=shown),)
        spec = RunSpec(argv=argv, environment=environment, read_only=True, mounts=mounts)
        return runner.start(bench.base_folders, spec, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    compiler = BaseCompiler(start, bench.place.python, bench.interpreter)
    return Worker(bench=bench, report=report, compiler=compiler)


def _work(plan: LayerPlan) -> MadeLayer:
    assert _worker is not None
    return make_layer(_worker, plan)


def read_laid(layout: Layout, plans: Iterable[LayerPlan]) -> Iterator[tuple[str, str, str]]:
    for plan in plans:
        yield from read_laid_of(layout, plan.key)


def read_laid_of(layout: Layout, key: str) -> Iterator[tuple[str, str, str]]:
    laid = unseal(laid_path(layout, key))
    if laid is None:
        raise StoreError(f"{laid_path(layout, key)} went or changed meanwhile", hint="run it again")
    for line in laid.decode("utf-8", "surrogateescape").split("\n")[:-1]:
        package, content, path = line.split("\t", 2)
        yield package, content, path


def _gather(futures: dict[Future[MadeLayer], LayerPlan]) -> dict[str, MadeLayer]:
    """All results by the plans' keys; the first failure ends the others."""
    done: dict[str, MadeLayer] = {}
    for future in as_completed(futures):
        plan = futures[future]
        with _explain_killed(plan):
            done[plan.key] = future.result()
    return done


@contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    """The signal arrives after the block, here and in the processes that are forked in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _explain_killed(plan: LayerPlan) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise BuildError(
            f"a worker was killed while it made the layer of {plan.title}",
            hint="often memory: set `workers = 1`, then run the same command again",
        ) from error


def _tell(sink: int, amount: int) -> None:
    # Eight bytes reach a pipe whole (PIPE_BUF) and without a lock that a killed worker could leave held.
    os.write(sink, amount.to_bytes(8, "little"))


_END = (1 << 64) - 1


class _Reports:
    """The pipe on which workers tell how many bytes they have read."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()

    @contextmanager
    def drained(self, advance: Callable[[int], None]) -> Iterator[None]:
        """Hands the reports to `advance` until the block ends; a watcher that fails stops no worker."""

        def drain() -> None:
            watched, ended = True, False
            while not ended:
                data = os.read(self.source, 8 * 4096)
                amounts = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
                ended = _END in amounts
                try:
                    if watched:
                        advance(sum(amount for amount in amounts if amount != _END))
                except Exception:
                    watched = False  # the terminal has gone; the work goes on

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        try:
            yield
        finally:
            _tell(self.sink, _END)
            thread.join()


@contextmanager
def _reports() -> Iterator[_Reports]:
    reports = _Reports()
    try:
        yield reports
    finally:
        os.close(reports.source)
        os.close(reports.sink)
