"""The embedded engine: an OCI image from a lock, in this process. No daemon, no root, no Dockerfile.

The digest is a function of lock, recipe, base and the codec's version alone. `plan_layers` decides
which wheels share a layer; worker processes make layers; layers are kept by what went into them, so
another image with the same package writes nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import installer

from imagefactory import __version__
from imagefactory.engines.base_image import BaseImage, format_time, write_index
from imagefactory.engines.protocol import Packages
from imagefactory.engines.pyc import BaseCompiler
from imagefactory.engines.wheel_layer import LaidFile, Place, lay_wheel
from imagefactory.errors import BuildError, StoreError
from imagefactory.model import Definition, Descriptor, Image, Layer, LockedWheel, RunSpec, Sif
from imagefactory.oci.layers import CHUNK, END_OF_ARCHIVE, LAYERS_VERSION, Segment, Sink, codec
from imagefactory.oci.layout import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    TITLE,
    BlobWriter,
    Layout,
    canonical_json,
    explain_full_disk,
    format_descriptor,
    reference,
)
from imagefactory.progress import Progress
from imagefactory.render.define import pyvenv_cfg, venv_links

OWN_LAYER_BYTES = 8_000_000
"""A wheel of this size or more gets a layer to itself; smaller ones are not worth one."""
MOST_OWN_LAYERS = 48
"""Docker stops at 127 layers, overlay mounts get slow long before."""
BUCKETS = 8
"""The other wheels share so many layers, by hash of name: one changed package makes one bucket anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every layer of one build has in common; all of it goes into each layer's key.

    `interpreter` is the base's Python and `environment` what it needs to start; `base_python` names both.
    """

    store: Path
    segments: Path
    codec: str
    place: Place
    epoch: int
    base_folders: tuple[Path, ...]
    base_python: str
    interpreter: str = ""
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One wheel on disk on its way into a layer; `key` is the hash of all that decides its segment."""

    key: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer to make or to find: the wheels in it, in order. `shared` layers are buckets."""

    key: str
    title: str
    parts: tuple[Part, ...]
    shared: bool

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def plan_layers(wheels: Mapping[LockedWheel, Path], bench: Bench) -> tuple[LayerPlan, ...]:
    """Which wheel goes into which layer. Pure but for the codec's version; same wheels, same plan."""
    large = {w.name for w in wheels if w.size >= OWN_LAYER_BYTES}
    if len(large) > MOST_OWN_LAYERS:
        by_size = sorted(wheels, key=lambda w: (-w.size, w.name))
        large = {w.name for w in by_size[:MOST_OWN_LAYERS]}
    own = [w for w in wheels if w.name in large]
    buckets: dict[int, list[LockedWheel]] = {}
    for wheel in wheels:
        if wheel.name not in large:
            number = hashlib.sha256(wheel.name.encode()).digest()[0] % BUCKETS
            buckets.setdefault(number, []).append(wheel)

    def plan(title: str, chosen: Iterable[LockedWheel], *, shared: bool) -> LayerPlan:
        parts = tuple(
            Part(key=_segment_key(w, bench), path=wheels[w], size=w.size)
            for w in sorted(chosen, key=lambda w: w.name)
        )
        key = _hash("bucket" if shared else "layer", *(part.key for part in parts))
        return LayerPlan(key=key, title=title, parts=parts, shared=shared)

    return (
        *(plan(f"{w.name} {w.version}", [w], shared=False) for w in sorted(own, key=lambda w: w.name)),
        *(plan(f"bucket {n}", chosen, shared=True) for n, chosen in sorted(buckets.items())),
    )


def in_working_order(plans: Iterable[LayerPlan]) -> list[LayerPlan]:
    """Buckets first, then the largest: the last layers made are small, so no worker waits long for another.

    A bucket's bytes say little of its work: its packages are Python, whose byte code is made.
    """
    return sorted(plans, key=lambda plan: (not plan.shared, -plan.size, plan.key))


def _hash(*parts: str) -> str:
    return hashlib.sha256(canonical_json([LAYERS_VERSION, *parts])).hexdigest()


def _segment_key(wheel: LockedWheel, bench: Bench) -> str:
    return _hash(
        "wheel",
        wheel.filename,
        wheel.sha256,
        codec(bench.codec).identity,
        f"installer {installer.__version__}",
        bench.place.prefix,
        bench.place.python,
        bench.base_python,
        str(bench.epoch),
    )


# --- making layers, in worker processes ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeLayer:
    layer: Layer
    made: bool


@dataclass(slots=True)
class _Worker:
    """What a worker process holds between layers: its compiler and the way to report."""

    bench: Bench
    report: Callable[[int], None]
    compiler: BaseCompiler

    @property
    def layout(self) -> Layout:
        return Layout(self.bench.store)


def make_layer(worker: _Worker, plan: LayerPlan) -> MadeLayer:
    """The layer of `plan`, found or made. One process makes it, others wait and find it."""
    layout = worker.layout
    with layout.locked(f"layer-{plan.key}"):
        known = layout.recall_layer(plan.key)
        if known is not None and _laid_path(layout, plan.key).exists():
            worker.report(plan.size)
            return MadeLayer(layer=replace(known, title=plan.title), made=False)
        packer = codec(worker.bench.codec)
        plain = hashlib.sha256()
        with explain_full_disk(layout.path), BlobWriter(layout) as blob:
            make = _shared_segments if plan.shared else _own_segment
            laid = make(worker, plan, blob, plain)
            last = packer.compressor()
            blob.write(last.compress(END_OF_ARCHIVE) + last.flush())
            plain.update(END_OF_ARCHIVE)
            descriptor = blob.commit(packer.media_type)
            layout.write_file(_laid_path(layout, plan.key), laid)
        layer = Layer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title=plan.title)
        layout.record_layer(plan.key, layer)
        return MadeLayer(layer=layer, made=True)


def _own_segment(worker: _Worker, plan: LayerPlan, blob: BlobWriter, plain: hashlib._Hash) -> bytes:
    (part,) = plan.parts
    _, laid = _lay(worker, part, _Order(sink=blob, plain=plain))
    return _format_laid(part, laid)


def _shared_segments(worker: _Worker, plan: LayerPlan, blob: BlobWriter, plain: hashlib._Hash) -> bytes:
    """Folders first, each once, then the wheels' segments; a file of several wheels comes with the first."""
    packer = codec(worker.bench.codec)
    kept: list[_Kept] = []
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
class _Kept:
    """A segment on disk, the paths in it (byte code too), and the lines of what its wheel lays."""

    path: Path
    folders: tuple[str, ...]
    files: tuple[str, ...]
    laid: bytes


def _segment(worker: _Worker, part: Part, skip: frozenset[str]) -> _Kept:
    """The compressed tar entries of a small wheel, without files of `skip`, kept for its neighbours' changes.

    A kept segment is used only while it has the digest it was made with: a cache is nobody's treasure.
    """
    key = _hash("without", part.key, *sorted(skip)) if skip else part.key
    path = worker.bench.segments / key[:2] / key
    listing = path.with_suffix(".files")
    try:
        digest, paths, laid = listing.read_bytes().split(b"\n", 2)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest().encode() == digest:
                if not skip:
                    worker.report(part.size)
                folders, files = json.loads(paths)
                return _Kept(path=path, folders=tuple(folders), files=tuple(files), laid=laid)
    except (FileNotFoundError, ValueError):
        pass
    with explain_full_disk(path.parent, setting="cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w+b") as file:
                order = _Order(sink=file, plain=hashlib.sha256(), bare=True, skip=skip)
                segment, found = _lay(worker, part, order)
                laid = _format_laid(part, found)
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
            beside = Path(name + ".files")
            folders, files = tuple(sorted(segment.folders)), tuple(segment.files)
            beside.write_bytes(b"\n".join((digest, canonical_json([folders, files]), laid)))
            beside.replace(listing)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return _Kept(path=path, folders=folders, files=files, laid=laid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Where a segment goes, and how it is made (layers.Segment)."""

    sink: Sink
    plain: hashlib._Hash
    bare: bool = False
    skip: frozenset[str] = frozenset()


def _lay(worker: _Worker, part: Part, order: _Order) -> tuple[Segment, tuple[LaidFile, ...]]:
    """Writes one wheel, reporting its bytes as they are read: `part.size` in all, once."""
    bench, left = worker.bench, 0 if order.skip else part.size

    def report(count: int) -> None:
        nonlocal left
        count = min(count, left)
        left -= count
        worker.report(count)

    segment = Segment(
        codec(bench.codec), order.sink, order.plain, epoch=bench.epoch, bare=order.bare, skip=order.skip
    )
    with worker.compiler.wheel() as compiler:
        laid = lay_wheel(part.path, bench.place, segment, compiler, report=report)
    segment.close()
    worker.report(left)
    return segment, laid


def _format_laid(part: Part, laid: tuple[LaidFile, ...]) -> bytes:
    lines = (f"{part.path.name}\t{file.content}\t{file.path}\n" for file in laid)
    return "".join(lines).encode("utf-8", "surrogateescape")


def _laid_path(layout: Layout, key: str) -> Path:
    return layout.path / "layers" / f"{key}.files"


_worker: _Worker | None = None


def _begin(bench: Bench, sink: int, parent: int) -> None:
    """First thing in a worker process: dies with its parent, leaves Ctrl-C to it."""
    global _worker
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _worker = new_worker(bench, partial(_tell, sink))


def new_worker(bench: Bench, report: Callable[[int], None]) -> _Worker:
    from imagefactory.verify.runners.unshare import UnshareRunner

    runner = UnshareRunner(Layout(bench.store))

    def start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        # A fixed hash seed: the order of sets would reach the bytes of .pyc files.
        environment = (*bench.environment, ("PYTHONHASHSEED", "0"))
        spec = RunSpec(argv=argv, environment=environment, read_only=True)
        return runner.start(bench.base_folders, spec, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    compiler = BaseCompiler(start, bench.place.python, bench.interpreter)
    return _Worker(bench=bench, report=report, compiler=compiler)


def _work(plan: LayerPlan) -> MadeLayer:
    assert _worker is not None
    return make_layer(_worker, plan)


# --- the engine ----------------------------------------------------------------------------------


class AssembleEngine:
    """Builds images into `layout` with `workers` processes; small segments are kept below `cache`."""

    def __init__(self, layout: Layout, cache: Path, *, codec: str, workers: int) -> None:
        self.layout, self.cache, self.codec, self.workers = layout, cache, codec, workers

    def find(self, definition: Definition, base: BaseImage) -> Image | None:
        """The image of exactly this definition on this base, if the store holds it whole."""
        record = self.layout.recall("images", self._image_key(definition, base))
        try:
            digest, size = str(record["digest"]), int(record["size"])  # type: ignore[index]
            descriptor = Descriptor(media_type=INDEX_TYPE, digest=digest, size=size)
            return self.layout.load(reference(definition.target), descriptor)
        except (KeyError, TypeError, ValueError, StoreError):
            return None  # what is missing or damaged is made again

    def build(
        self,
        definition: Definition,
        base: BaseImage,
        packages: Packages,
        progress: Progress,
    ) -> Image:
        """The image of `definition` in the layout, tagged. Raises BuildError or StoreError.

        The caller holds the layout's `in_use`.
        """
        found = self.find(definition, base)
        if found is None:
            bench = self._bench(definition, base)
            wheels = {w: path for w, path in packages().items() if isinstance(w, LockedWheel)}
            plans = plan_layers(wheels, bench)
            with progress.stage(f"{definition.target.name}: assemble"):
                made = self._make(plans, bench, progress)
                check_conflicts(chain(own_files(definition), _read_laid(self.layout, plans)))
                written = sum(layer.layer.descriptor.size for layer in made if layer.made)
                progress.note(
                    f"  {sum(layer.made for layer in made)} of {len(made)} layers made, {written:,} bytes"
                )
                found = self._write(definition, base, [layer.layer for layer in made])
        self.tag(definition, found)
        return found

    def tag(self, definition: Definition, made: Image | Sif) -> None:
        """Points the target's tag at `made`."""
        size = self.layout.blob_path(made.digest).stat().st_size
        descriptor = Descriptor(media_type=INDEX_TYPE, digest=made.digest, size=size)
        self.layout.tag(reference(definition.target), descriptor)

    def require(self) -> str:
        """The engine's version. Raises ToolError when this machine cannot run commands in a base."""
        from imagefactory.verify.runners.unshare import UnshareRunner

        UnshareRunner(self.layout).require()
        return __version__

    def _bench(self, definition: Definition, base: BaseImage) -> Bench:
        return Bench(
            store=self.layout.path,
            segments=self.cache / "segments",
            codec=self.codec,
            place=Place(prefix=definition.prefix, python=definition.target.python),
            epoch=base.epoch,
            base_folders=base.folders,
            base_python=base.identity,
            interpreter=definition.base.python_path,
            environment=inherited(base.image.environment),
        )

    def _make(self, plans: Sequence[LayerPlan], bench: Bench, progress: Progress) -> list[MadeLayer]:
        total = sum(plan.size for plan in plans)
        missing = [plan for plan in plans if self.layout.recall_layer(plan.key) is None]
        if len(missing) <= 1 or self.workers == 1:
            with progress.task("making layers", total=total) as task:
                worker = new_worker(bench, task.advance)
                try:
                    return [make_layer(worker, plan) for plan in plans]
                finally:
                    worker.compiler.close()
        # Forked, not spawned: a worker starts at once and shares this process's memory. That is sound only
        # while no other thread runs, so the work is handed out before anything is drawn.
        context = multiprocessing.get_context("fork")
        count = min(self.workers, len(missing))
        with _reports() as reports:
            pool = ProcessPoolExecutor(
                count, context, initializer=_begin, initargs=(bench, reports.sink, os.getpid())
            )
            try:
                futures: dict[Future[MadeLayer], LayerPlan] = {}
                for plan in in_working_order(plans):
                    with _explain_killed(plan):
                        futures[pool.submit(_work, plan)] = plan
                with progress.task("making layers", total=total) as task, reports.drained(task.advance):
                    return _gather(futures, plans)
            except BaseException:
                for worker_process in multiprocessing.active_children():
                    worker_process.terminate()  # what they were writing lies under tmp/ and is collected
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, definition: Definition, base: BaseImage, layers: Sequence[Layer]) -> Image:
        skeleton = self._skeleton(definition, base)
        every = (*base.image.layers, skeleton, *layers)
        config = format_config(definition, base, every)
        config_descriptor = self.layout.add(canonical_json(config), CONFIG_TYPE)
        annotations = {**dict(definition.labels), "org.opencontainers.image.base.digest": base.image.manifest}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": format_descriptor(config_descriptor),
            "layers": [
                {**format_descriptor(layer.descriptor), "annotations": {TITLE: layer.title}}
                for layer in every
            ],
            "annotations": annotations,
        }
        descriptor = write_index(self.layout, manifest, definition.target.platform)
        key = self._image_key(definition, base)
        self.layout.record("images", key, {"digest": descriptor.digest, "size": descriptor.size})
        return self.layout.load(reference(definition.target), descriptor)

    def _skeleton(self, definition: Definition, base: BaseImage) -> Layer:
        """The environment's own few files: the layer below the packages."""
        packer, plain = codec(self.codec), hashlib.sha256()
        with explain_full_disk(self.layout.path), BlobWriter(self.layout) as blob:
            segment = Segment(packer, blob, plain, epoch=base.epoch)
            segment.folder(definition.site_packages.lstrip("/"))
            segment.folder(f"{definition.prefix}/bin".lstrip("/"))
            text = pyvenv_cfg(definition).encode()
            segment.file(
                f"{definition.prefix}/pyvenv.cfg".lstrip("/"), [text], size=len(text), executable=False
            )
            for path, target in venv_links(definition):
                segment.link(path.lstrip("/"), target)
            segment.raw(END_OF_ARCHIVE)
            segment.close()
            descriptor = blob.commit(packer.media_type)
        return Layer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title="environment")

    def _image_key(self, definition: Definition, base: BaseImage) -> str:
        return _hash(
            "image",
            codec(self.codec).identity,
            *(layer.descriptor.digest for layer in base.image.layers),
            base.image.manifest,
            base.identity,
            str(base.epoch),
            definition.target.platform,
            definition.prefix,
            definition.target.python,
            canonical_json([definition.environment, definition.labels]).decode(),
            *(f"{w.filename} {w.sha256}" for w in definition.lock.wheels),
        )


def format_config(definition: Definition, base: BaseImage, layers: Sequence[Layer]) -> dict[str, object]:
    """The OCI image config. Its one clock is the base's.

    Of a pulled base's config its variables stay, below ours; its user, entry point, labels and the like
    do not: who pulls the image gets root and a Python, whatever it stands on.
    """
    created = format_time(base.epoch)
    os_name, architecture = definition.target.platform.split("/")
    return {
        "created": created,
        "architecture": architecture,
        "os": os_name,
        "config": {
            "Env": [f"{name}={value}" for name, value in merge_environment(definition, base)],
            "Cmd": ["python"],
            "WorkingDir": "/",
            "Labels": dict(definition.labels),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": f"imagefactory: {layer.title}"} for layer in layers],
    }


def inherited(environment: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """A base's variables that hold for what stands on it: not PATH, nor Python's own.

    PYTHONPATH and its like would lead the environment's Python to packages that nobody locked.
    """
    return tuple(
        (name, value)
        for name, value in environment
        if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
        and name != "PATH"
        and not re.fullmatch("PYTHON[A-Z0-9]+", name)
    )


def merge_environment(definition: Definition, base: BaseImage) -> tuple[tuple[str, str], ...]:
    """The definition's variables, then those of the base that it does not set.

    The base's folders come last in PATH, so what it adds (/usr/local/cuda/bin) is found.
    """
    ours = dict(definition.environment)
    theirs = dict(base.image.environment)
    folders = [*ours.get("PATH", "").split(":"), *theirs.get("PATH", "").split(":")]
    ours["PATH"] = ":".join(dict.fromkeys(folder for folder in folders if folder.startswith("/")))
    return (*ours.items(), *((n, v) for n, v in inherited(base.image.environment) if n not in ours))


def check_conflicts(laid: Iterable[tuple[str, str, str]]) -> None:
    """Refuses images whose wheels claim one path with different bytes.

    `laid` gives (wheel, content hash, path). The same file in several wheels is fine (`nvidia/__init__.py`
    stands in nine). Raises BuildError naming both wheels.
    """
    owners: dict[str, tuple[str, str]] = {}
    for wheel, content, path in laid:
        other = owners.setdefault(path, (wheel, content))
        if other[1] != content:
            raise BuildError(
                f"/{path} stands in {other[0]} and in {wheel} with different content",
                hint="constrain one of the two packages in the recipe to a version without it",
            )
    for path, (wheel, _) in owners.items():
        above = path.rpartition("/")[0]
        while above:
            if above in owners:
                raise BuildError(
                    f"/{above} is a file in {owners[above][0]} and a folder in {wheel}",
                    hint="constrain one of the two packages in the recipe to a version without it",
                )
            above = above.rpartition("/")[0]


def own_files(definition: Definition) -> Iterator[tuple[str, str, str]]:
    """What the environment itself consists of, which no wheel may lay anew."""
    yield "the environment", "", f"{definition.prefix}/pyvenv.cfg".lstrip("/")
    for path, _ in venv_links(definition):
        yield "the environment", "", path.lstrip("/")


def _read_laid(layout: Layout, plans: Iterable[LayerPlan]) -> Iterator[tuple[str, str, str]]:
    for plan in plans:
        text = _laid_path(layout, plan.key).read_bytes().decode("utf-8", "surrogateescape")
        for line in text.split("\n")[:-1]:
            wheel, content, path = line.split("\t", 2)
            yield wheel, content, path


def _gather(futures: dict[Future[MadeLayer], LayerPlan], plans: Sequence[LayerPlan]) -> list[MadeLayer]:
    """All results in the plans' order; the first failure ends the others."""
    done: dict[str, MadeLayer] = {}
    for future in as_completed(futures):
        plan = futures[future]
        with _explain_killed(plan):
            done[plan.key] = future.result()
    return [done[plan.key] for plan in plans]


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
