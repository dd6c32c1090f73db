"""The embedded engine: same lock, same digest, whatever the folder; only what differs is written."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from imagefactory.build import layer_plan, layers
from imagefactory.build.assemble import AssembleEngine
from imagefactory.build.assembly import describe_path_conflicts, settle_claims
from imagefactory.build.base.image import BuiltBase, PendingBase, _tag, as_pending_base
from imagefactory.build.base.look import base_key
from imagefactory.build.definition import define, rank_wheels
from imagefactory.build.layer_lock import image_of, lock_layers
from imagefactory.build.layer_plan import (
    BUCKETS,
    MORE_OWN_LAYERS,
    MOST_OWN_LAYERS,
    OWN_LAYER_BYTES,
    LayerInputs,
    LayerPlan,
    wheel_part,
)
from imagefactory.build.layers import BaseCompiler
from imagefactory.build.protocol import BuildInputs
from imagefactory.build.wheel_layer import InstallPrefix
from imagefactory.errors import BuildError, DownloadError
from imagefactory.lock.download import PendingDownloads
from imagefactory.lock.layers import format_layer_lock, parse_layer_lock, wrong_entries
from imagefactory.model import BaseLock, BuildSpec, LockedWheel
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, OciLayer
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import LineProgress, ProgressTask, QuietProgress
from tests.made.compiled import compile_here
from tests.made.errors import fails
from tests.made.supplies import supplies
from tests.made.values import make_base, make_lock, make_target
from tests.made.wheels import locked, make_wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
BASE = make_base(python=PYTHON)


def bench(tmp_path: Path) -> LayerInputs:
    return LayerInputs(
        store=tmp_path / "store",
        segments=tmp_path / "segments",
        codec="zstd",
        place=InstallPrefix(prefix="/opt/env", python=PYTHON),
        epoch=1,
        compiler="p",
    )


def plan_layers(*groups: Mapping[LockedWheel, Path] | LayerInputs) -> tuple[LayerPlan, ...]:
    """The plan of groups of wheels; the last argument is the bench."""
    *wheels, bench = groups
    assert isinstance(bench, LayerInputs)
    return layer_plan.plan_layers(
        [{w: wheel_part(w, path, bench) for w, path in group.items()} for group in wheels]  # type: ignore[union-attr]
    )


def wheel_of(name: str, size: int) -> LockedWheel:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return LockedWheel(
        name=name, version="1", filename=f"{name}-1-py3-none-any.whl", sha256=digest, size=size
    )


# --- planning ------------------------------------------------------------------------------------


def test_large_wheels_get_a_layer_each_and_small_ones_share(tmp_path: Path) -> None:
    wheels = {wheel_of(f"s{n}", 100): Path(f"/s{n}") for n in range(40)}
    wheels |= {
        wheel_of("big", OWN_LAYER_BYTES): Path("/big"),
        wheel_of("b2", OWN_LAYER_BYTES - 1): Path("/b2"),
    }
    plans = plan_layers(wheels, bench(tmp_path))
    own, shared = [p for p in plans if not p.shared], [p for p in plans if p.shared]
    assert [plan.title for plan in own] == ["big 1"]
    assert 1 < len(shared) <= BUCKETS
    placed = sorted(part.path.name for plan in plans for part in plan.parts)
    assert placed == sorted(path.name for path in wheels.values())


def test_the_plan_does_not_depend_on_the_order_of_wheels(tmp_path: Path) -> None:
    wheels = {wheel_of(f"w{n}", 100 + n * 1_000_000): Path(f"/w{n}") for n in range(30)}
    backwards = dict(reversed(wheels.items()))
    assert plan_layers(wheels, bench(tmp_path)) == plan_layers(backwards, bench(tmp_path))


def test_a_changed_small_wheel_changes_one_bucket(tmp_path: Path) -> None:
    wheels = {wheel_of(f"s{n}", 100): Path(f"/s{n}") for n in range(40)}
    changed = {(wheel_of("other", 100) if w.name == "s7" else w): p for w, p in wheels.items()}
    changed = {w: p for w, p in changed.items() if w.name != "other"} | {
        LockedWheel(name="s7", version="2", filename="s7-2-py3-none-any.whl", sha256="0" * 64, size=1): Path(
            "/7"
        )
    }
    before = {plan.key for plan in plan_layers(wheels, bench(tmp_path))}
    after = {plan.key for plan in plan_layers(changed, bench(tmp_path))}
    assert len(before - after) == len(after - before) == 1


def test_very_many_large_wheels_stay_below_what_engines_take(tmp_path: Path) -> None:
    wheels = {wheel_of(f"w{n:03}", OWN_LAYER_BYTES + n): Path(f"/w{n}") for n in range(200)}
    plans = plan_layers(wheels, bench(tmp_path))
    assert len(plans) <= MOST_OWN_LAYERS + BUCKETS
    assert "w199 1" in {plan.title for plan in plans}


def test_what_is_added_changes_no_layer_below(tmp_path: Path) -> None:
    """The first groups of a plan are planned as if they were all: those layers are the target's below."""
    below = {wheel_of(f"w{n:03}", n * 500_000): Path(f"/w{n}") for n in range(80)}
    more = {wheel_of(f"m{n:03}", n * 500_000): Path(f"/m{n}") for n in range(80)}
    top = {wheel_of(f"t{n:03}", 10): Path(f"/t{n}") for n in range(9)}
    bench_ = bench(tmp_path)
    whole = plan_layers(below, more, top, bench_)
    for groups in ((below,), (below, more)):
        alone = plan_layers(*groups, bench_)
        assert whole[: len(alone)] == alone
    second = plan_layers(below, more, bench_)[len(plan_layers(below, bench_)) :]
    assert sum(not plan.shared for plan in second) == MORE_OWN_LAYERS


@pytest.mark.parametrize("field", ["codec", "epoch", "compiler", "place"])
def test_all_that_decides_the_bytes_is_in_the_key(tmp_path: Path, field: str) -> None:
    others = {
        "codec": "gzip",
        "epoch": 2,
        "compiler": "q",
        "place": InstallPrefix(prefix="/opt/other", python=PYTHON),
    }
    wheels = {wheel_of("a", 1): Path("/a")}
    one, other = bench(tmp_path), replace(bench(tmp_path), **{field: others[field]})  # type: ignore[arg-type]
    assert plan_layers(wheels, one)[0].key != plan_layers(wheels, other)[0].key


# --- building ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def compile_with_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_here(monkeypatch, PYTHON)


def definition(wheels: Mapping[LockedWheel, Path], label: str = "x") -> BuildSpec:
    target = make_target(name="demo-1.0-cu12", framework="demo", version="1.0", cuda="12", python=PYTHON)
    lock = make_lock(target=target.name, python=PYTHON, wheels=tuple(wheels))
    environment, labels = (("PATH", "/opt/env/bin"),), (("imagefactory.target", label),)
    return BuildSpec(
        target=target, base=BASE, lock=lock, prefix="/opt/env", environment=environment, labels=labels
    )


def base_layer(layout: Layout) -> BuiltBase:
    blob = layout.add(bytes(1024), "application/vnd.oci.image.layer.v1.tar")
    layer = OciLayer(descriptor=blob, diff_id=blob.digest, title="debian-12")
    image = Image(
        name="base:debian-12", digest=blob.digest, manifest=blob.digest, config=blob.digest, size=1024,
        layers=(layer,), environment=(),
    )  # fmt: skip
    return BuiltBase(image=image, folders=(layout.path,), identity="p", epoch=1, published=True)


def wheels_in(folder: Path, changed: str = "") -> dict[LockedWheel, Path]:
    folder.mkdir(exist_ok=True)
    made = {}
    for number in range(12):
        name = f"pkg{number}"
        text = f"NAME = {name!r} {'# changed' if name == changed else ''}\n".encode()
        path = make_wheel(folder, name, {f"{name}/__init__.py": text, "shared/__init__.py": b""})
        made[locked(path)] = path
    return made


def build(store: Path, wheels: Mapping[LockedWheel, Path], label: str = "x") -> Image:
    layout = Layout(store)
    engine = AssembleEngine(layout, store.parent / "cache", codec="zstd", workers=1)
    wanted, base = definition(wheels, label), base_layer(layout)
    found = engine.find(wanted, base)  # as every build begins
    return found or engine.build(wanted, supplies(base, lambda: wheels), QuietProgress())


def test_an_image_is_known_by_its_layers_before_they_are_made(tmp_path: Path) -> None:
    layout, wheels = Layout(tmp_path / "store"), wheels_in(tmp_path / "w")
    blob = layout.add(bytes(1024), codec("zstd").media_type)
    below = OciLayer(descriptor=blob, diff_id=blob.digest, title=BASE.name)
    lock = BaseLock(
        base=BASE.name, suite="bookworm", content_hash=f"sha256:{'0' * 64}", source_date_epoch=77, packages=()
    )
    base = BuiltBase(
        image=_tag(layout, BASE, (below,), 77),
        folders=(layout.path,),
        identity=base_key(lock),
        epoch=77,
        published=True,
    )
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=1)
    wanted = definition(wheels)
    image = engine.build(wanted, supplies(base, lambda: wheels), QuietProgress())
    written = format_layer_lock(lock_layers(wanted, (lock,), image, engine.toolchain(wanted)))
    known = parse_layer_lock(written, "f")
    assert wrong_entries(known, image.layers, "f") == ()
    assert replace(image_of(known, wanted, (lock,)), layers=image.layers) == image
    assert image_of(known, definition(wheels, "y"), (lock,)).digest != image.digest


def test_two_folders_give_one_digest(tmp_path: Path) -> None:
    one = build(tmp_path / "one" / "store", wheels_in(tmp_path / "w1"))
    backwards = dict(reversed(wheels_in(tmp_path / "w2").items()))
    # The lock's order is the lock's; only the order in which the files are handed over differs.
    wheels = {
        w: backwards[w] for w in sorted(backwards, key=lambda w: [*wheels_in(tmp_path / "w3")].index(w))
    }
    old = os.umask(0o077)
    try:
        other = build(tmp_path / "a much longer folder" / "store", wheels)
    finally:
        os.umask(old)
    assert (one.digest, one.manifest, one.config) == (other.digest, other.manifest, other.config)


def test_nothing_changed_writes_nothing(tmp_path: Path) -> None:
    wheels = wheels_in(tmp_path / "w")
    first = build(tmp_path / "store", wheels)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / "blobs" / "sha256").iterdir()}
    assert build(tmp_path / "store", wheels) == first
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "store" / "blobs" / "sha256").iterdir()}


def test_one_changed_package_makes_one_new_layer(tmp_path: Path) -> None:
    first = build(tmp_path / "store", wheels_in(tmp_path / "w1"))
    second = build(tmp_path / "store", wheels_in(tmp_path / "w2", changed="pkg3"))
    old = {layer.descriptor.digest for layer in first.layers}
    assert len([layer for layer in second.layers if layer.descriptor.digest not in old]) == 1


def test_another_label_shares_all_layers(tmp_path: Path) -> None:
    wheels = wheels_in(tmp_path / "w")
    first, second = build(tmp_path / "store", wheels), build(tmp_path / "store", wheels, label="y")
    assert first.layers == second.layers
    assert first.digest != second.digest


def test_a_damaged_blob_is_made_again(tmp_path: Path) -> None:
    wheels = wheels_in(tmp_path / "w")
    image = build(tmp_path / "store", wheels)
    layout = Layout(tmp_path / "store")
    layout.blob_path(image.layers[-1].descriptor.digest).unlink()
    for record in (tmp_path / "store" / "images").iterdir():
        record.unlink()
    assert build(tmp_path / "store", wheels) == image


def test_the_config_is_what_engines_read(tmp_path: Path) -> None:
    image = build(tmp_path / "store", wheels_in(tmp_path / "w"))
    config = json.loads(Layout(tmp_path / "store").blob_path(image.config).read_bytes())
    assert config["architecture"] == "amd64"
    assert config["os"] == "linux"
    assert config["created"] == "1970-01-01T00:00:01Z"
    assert config["config"]["Env"] == ["PATH=/opt/env/bin"]
    assert len(config["rootfs"]["diff_ids"]) == len(config["history"]) == len(image.layers)
    manifest = json.loads(Layout(tmp_path / "store").blob_path(image.manifest).read_bytes())
    assert manifest["annotations"]["imagefactory.target"] == "x"
    assert manifest["annotations"]["org.opencontainers.image.base.digest"].startswith("sha256:")


@pytest.mark.parametrize("workers", [1, 2])
def test_another_file_under_a_wheels_name_is_never_built_in(tmp_path: Path, workers: int) -> None:
    """It is a sound wheel of the same size; the one that is fetched in its place is as locked, or none is."""
    (tmp_path / "cache").mkdir()
    wheels, fetched = wheels_in(tmp_path / "cache/w"), wheels_in(tmp_path / "fetched")
    first = build(tmp_path / "first" / "store", wheels)
    changed = next(path for path in wheels.values() if path.name.startswith("pkg3-"))
    size = changed.stat().st_size
    texts = (f"NAME = 'evil{number}'\n".encode() for number in range(1000))
    made_others = (
        make_wheel(tmp_path, "pkg3", {"pkg3/__init__.py": text, "shared/__init__.py": b""}) for text in texts
    )
    other = next(path for path in made_others if path.stat().st_size == size)
    changed.write_bytes(other.read_bytes())
    layout, told = Layout(tmp_path / "store"), io.StringIO()
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=workers)

    def packages() -> Mapping[LockedWheel, Path]:
        if not changed.exists():
            changed.write_bytes((tmp_path / "fetched" / changed.name).read_bytes())
        return wheels

    assert wheels.keys() == fetched.keys()
    made = engine.build(definition(wheels), supplies(base_layer(layout), packages), LineProgress(told))
    assert made.digest == first.digest
    assert f"{changed.name} has sha256 {locked(other).sha256}, locked is " in told.getvalue()


def test_a_wheel_that_stays_another_one_leaves_nothing_behind(tmp_path: Path) -> None:
    wheels = wheels_in(tmp_path / "w")
    bad = next(iter(wheels.values()))

    class Bad(dict[LockedWheel, Path]):
        def __call__(self) -> Bad:
            bad.write_bytes(b"not that wheel")
            return self

    layout = Layout(tmp_path / "store")
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=1)
    with pytest.raises(BuildError, match=bad.name):
        engine.build(definition(wheels), supplies(base_layer(layout), Bad(wheels)), QuietProgress())
    layout = Layout(tmp_path / "store")
    assert layout.tags() == {}
    assert list(layout.tmp.iterdir()) == []
    assert [path for path in (tmp_path / "cache").rglob("*") if path.suffix == ".part"] == []


def test_blobs_that_rotted_are_made_again(tmp_path: Path) -> None:
    """A small blob with other bytes of the same size, and a manifest that is gone."""
    wheels = wheels_in(tmp_path / "w")
    image = build(tmp_path / "store", wheels)
    layout = Layout(tmp_path / "store")
    config = layout.blob_path(image.config)
    config.write_bytes(b"x" * config.stat().st_size)
    layout.blob_path(image.manifest).unlink()
    assert build(tmp_path / "store", wheels) == image


def test_a_kept_segment_that_rotted_is_made_again(tmp_path: Path) -> None:
    first = build(tmp_path / "one" / "store", wheels_in(tmp_path / "w"))
    segments = [
        p for p in (tmp_path / "one" / "cache" / "segments").rglob("*") if p.is_file() and not p.suffix
    ]
    assert len(segments) > 12  # twelve wheels, and those once more that share a file with a neighbour
    for number, segment in enumerate(segments):
        segment.write_bytes(b"" if number % 2 else segment.read_bytes()[:-5])
    (tmp_path / "one" / "other").mkdir()
    layout = Layout(tmp_path / "one" / "other" / "store")
    engine = AssembleEngine(layout, tmp_path / "one" / "cache", codec="zstd", workers=1)
    wheels = wheels_in(tmp_path / "w")
    assert (
        engine.build(definition(wheels), supplies(base_layer(layout), lambda: wheels), QuietProgress()).digest
        == first.digest
    )


def test_no_path_stands_in_a_layer_twice(tmp_path: Path) -> None:
    """docker's image store refuses such a layer; every wheel here has the folder and file `shared`."""
    image = build(tmp_path / "one" / "store", wheels_in(tmp_path / "w"))
    layout, site = Layout(tmp_path / "one" / "store"), "opt/env/lib/python3.11/site-packages"
    everywhere: list[str] = []
    for layer in image.layers[1:]:
        data = b"".join(codec("zstd").decompress(layout.blob_path(layer.descriptor.digest)))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            entries = tar.getmembers()
        names = [entry.name for entry in entries]
        assert len(names) == len(set(names)), layer.title
        for entry in entries:  # a folder before what lies in it
            above = entry.name.rpartition("/")[0]
            assert not above or above in names[: names.index(entry.name)]
        everywhere += names
    assert f"{site}/shared/__init__.py" in everywhere
    assert {f"{site}/pkg{n}/__init__.py" for n in range(12)} <= set(everywhere)


def test_the_digest_does_not_depend_on_what_the_store_held_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer found under a bucket's key may have been a wheel's own; its title must not come along."""
    wheels = dict(list(wheels_in(tmp_path / "w").items())[:1])
    fresh = build(tmp_path / "fresh" / "store", wheels)
    monkeypatch.setattr(layer_plan, "OWN_LAYER_BYTES", 1)
    build(tmp_path / "used" / "store", wheels, label="y")
    monkeypatch.setattr(layer_plan, "OWN_LAYER_BYTES", OWN_LAYER_BYTES)
    assert build(tmp_path / "used" / "store", wheels).digest == fresh.digest


@pytest.mark.parametrize("own_layers", [False, True])
def test_of_two_wheels_with_one_file_one_is_kept_whatever_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, own_layers: bool
) -> None:
    """The file, its byte code too, is in one layer alone; the others are made as without the two."""
    if own_layers:
        monkeypatch.setattr(layer_plan, "OWN_LAYER_BYTES", 1)
    wheels, site = wheels_in(tmp_path / "w"), "opt/env/lib/python" + PYTHON + "/site-packages"
    plain = build(tmp_path / "plain" / "store", wheels)
    for name in ("cv", "cv-headless"):  # the first by name is kept, as pip does
        files = {"cv2/__init__.py": f"NAME = {name!r}\n".encode(), "cv2/same.py": b"x = 1\n"}
        path = make_wheel(tmp_path / "w", name.replace("-", "_"), {**files, f"only_{name[2:4]}.py": b""})
        wheels[locked(path)] = path
    told: list[str] = []

    class Watcher(QuietProgress):
        def note(self, text: str) -> None:
            told.append(text)

    layout = Layout(tmp_path / "store")
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=2)
    wanted = definition(wheels)
    image = engine.build(wanted, supplies(base_layer(layout), lambda: wheels), Watcher())
    found: dict[str, list[bytes]] = {}
    for layer in image.layers[1:]:
        data = b"".join(codec("zstd").decompress(layout.blob_path(layer.descriptor.digest)))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for entry in tar.getmembers():
                if entry.isreg() and (file := tar.extractfile(entry)):
                    found.setdefault(entry.name, []).append(file.read())
    assert found[f"{site}/cv2/__init__.py"] == [b"NAME = 'cv'\n"]
    tag = "cpython-" + PYTHON.replace(".", "")
    assert len(found[f"{site}/cv2/__pycache__/__init__.{tag}.pyc"]) == 1
    assert set(found[f"{site}/cv2/same.py"]) == {b"x = 1\n"}
    assert f"{site}/cv_headless-1.0.dist-info/RECORD" in found
    (line,) = [line for line in told if "cv2/__init__.py" in line]
    assert "exclude: [cv-headless]" in line
    if own_layers:
        assert {one.diff_id for one in plain.layers} <= {one.diff_id for one in image.layers}
    again = build(tmp_path / "again" / "store", dict(reversed(wheels.items())))
    assert again.digest == image.digest
    assert build(tmp_path / "store", wheels).digest == image.digest


def test_a_wheel_cannot_replace_the_environments_own_files(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    for number, path in enumerate(("pyvenv.cfg", "lib64/x", "bin/python")):
        wheel = make_wheel(tmp_path / "w", f"evil{number}", {f"evil{number}-1.0.data/data/{path}": b"x"})
        with fails("file-conflict", "the environment"):
            build(tmp_path / f"store{number}", {locked(wheel): wheel})


def build_in_parallel(tmp_path: Path, progress: QuietProgress) -> Image:
    layout, wheels = Layout(tmp_path / "store"), wheels_in(tmp_path / "w")
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=2)
    return engine.build(definition(wheels), supplies(base_layer(layout), lambda: wheels), progress)


def test_workers_make_the_same_image(tmp_path: Path) -> None:
    one = build(tmp_path / "alone" / "store", wheels_in(tmp_path / "w"))
    assert build_in_parallel(tmp_path, QuietProgress()).digest == one.digest


def test_nothing_a_worker_started_outlives_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes keep folders in the store, and remove them at their end."""
    ended = tmp_path / "ended"
    ended.mkdir()
    # Slow to end, as a sandbox may be; the file says that it has.
    around = 'touch "$0/$$.began"; "$@"; sleep 0.5; mv "$0/$$.began" "$0/$$.ended"'

    def new_compiler(bench: LayerInputs, base: tuple[Path, ...]) -> BaseCompiler:
        def start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
            argv = ("sh", "-c", around, str(ended), sys.executable, *argv[1:])
            return subprocess.Popen(argv, stdin=-1, stdout=-1)

        return BaseCompiler(start, PYTHON)

    monkeypatch.setattr(layers, "new_compiler", new_compiler)
    build_in_parallel(tmp_path, QuietProgress())
    assert {path.suffix for path in ended.iterdir()} == {".ended"}


def test_a_watcher_that_fails_stops_no_worker(tmp_path: Path) -> None:
    class Gone(QuietProgress):
        @contextmanager
        def task(self, title: str, *, total: int = 0, unit: str = "bytes") -> Iterator[ProgressTask]:
            class Broken:
                def advance(self, amount: int) -> None:
                    raise BrokenPipeError

                def expect(self, total: int) -> None:
                    raise BrokenPipeError

            yield Broken()

    assert build_in_parallel(tmp_path, Gone()).layers


def test_a_failure_ends_what_waits_and_is_what_is_said(tmp_path: Path) -> None:
    """All wait: some for packages that will not come, the others for the base, which fails."""
    layout, wheels = Layout(tmp_path / "store"), wheels_in(tmp_path / "w")
    arrivals, before = PendingDownloads(wheels.items()), set(threading.enumerate())
    for wheel in list(wheels)[::2]:
        arrivals.tell(wheel)

    @contextmanager
    def packages() -> Iterator[PendingDownloads]:
        yield arrivals

    def fail() -> BuiltBase:
        arrivals.fail(DownloadError("test-problem", "no such wheel"))
        raise BuildError("test-problem", "no base")

    coming = replace(as_pending_base(base_layer(layout)), make=fail, built=None)
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=1)
    told = BuildInputs(base=lambda: coming, packages=packages, unpacked=None)
    with pytest.raises(BuildError, match="no base"):
        engine.build(definition(wheels), told, QuietProgress())
    assert arrivals.stop.is_set()
    assert set(threading.enumerate()) <= before


def test_an_interrupt_before_the_base_is_begun_leaves_nothing_waiting_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, wait = threading.Event(), layers.BuildWorkers._await_base

    def told(work: layers.BuildWorkers) -> None:
        waiting.set()
        wait(work)

    def interrupted(plans: Sequence[LayerPlan]) -> Iterator[LayerPlan]:
        yield from plans
        assert waiting.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(layers.BuildWorkers, "_await_base", told)
    monkeypatch.setattr(layers, "in_build_order", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        build_in_parallel(tmp_path, QuietProgress())
    assert set(threading.enumerate()) <= before


def test_layers_are_made_while_the_base_is_and_the_packages_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here could go on if it waited for more than it needs."""
    monkeypatch.setattr(layer_plan, "OWN_LAYER_BYTES", 1)
    layout, wheels = Layout(tmp_path / "store"), wheels_in(tmp_path / "w")
    bare = make_wheel(tmp_path / "w", "bare", {"bare/data": b"no code"})
    wheels[locked(bare)] = bare
    arrivals, fetching, laid = PendingDownloads(wheels.items()), threading.Event(), threading.Event()
    arrivals.tell(locked(bare))

    @contextmanager
    def packages() -> Iterator[PendingDownloads]:
        fetching.set()
        yield arrivals

    def begin() -> PendingBase:
        assert fetching.is_set(), "the base's packages were fetched alone"
        return replace(as_pending_base(base_layer(layout)), make=make, built=None)

    class Telling(UnpackedLayers):
        def unpack(self, layers: Sequence[OciLayer], *rest: Any, **more: Any) -> tuple[Path, ...]:
            laid.set()
            return super().unpack(layers, *rest, **more)

    def make() -> BuiltBase:
        assert laid.wait(60), "the layer that needs no base was not made before it"
        for wheel in wheels:
            if wheel != locked(bare):
                arrivals.tell(wheel)
        return base_layer(layout)

    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=1)
    told = BuildInputs(base=begin, packages=packages, unpacked=Telling(tmp_path / "unpacked"))
    made = engine.build(definition(wheels), told, QuietProgress())
    assert made.digest == build(tmp_path / "other" / "store", wheels).digest


def test_a_layer_laid_out_while_it_is_made_is_what_unpacking_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, layout = wheels_in(tmp_path / "w"), Layout(tmp_path / "store")
    files = {
        "tool-1.0.data/scripts/tool": b"#!python",
        "tool.py": b"",
        "tool/data": Random(1).randbytes(9999),
    }
    program = make_wheel(tmp_path / "w", "tool", files)
    wheels[locked(program)] = program
    monkeypatch.setattr(layer_plan, "OWN_LAYER_BYTES", program.stat().st_size)
    unpacked, again = UnpackedLayers(tmp_path / "unpacked"), UnpackedLayers(tmp_path / "again")
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=2)
    image = engine.build(
        definition(wheels), supplies(base_layer(layout), lambda: wheels, unpacked), QuietProgress()
    )
    layers = image.layers[2:]  # without base and environment
    again.unpack(layers, layout.blob_path, QuietProgress())
    assert {"tool", "bucket"} <= {layer.title.partition(" ")[0] for layer in layers}
    for layer in layers:
        one, other = (seen(each.path(layer.diff_id)) for each in (unpacked, again))
        assert one == other
        assert one
    assert unpacked.check_all(QuietProgress(), mend=False) == ()
    assert sorted(p.name for p in unpacked.folder.iterdir()) == sorted(p.name for p in again.folder.iterdir())


def seen(folder: Path) -> list[tuple[object, ...]]:
    """Path, kind and mode, time and content of all that lies there."""
    return [
        (str(path.relative_to(folder)), path.lstat().st_mode, path.lstat().st_mtime_ns,
         path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bar_counts_only_the_layers_that_are_made(tmp_path: Path, workers: int) -> None:
    counted: list[list[int]] = []

    class Counting(QuietProgress):
        @contextmanager
        def task(self, title: str, *, total: int = 0, unit: str = "bytes") -> Iterator[ProgressTask]:
            row = [total, 0]
            counted.append(row)

            class Count:
                def advance(self, amount: int) -> None:
                    row[1] += amount

                def expect(self, total: int) -> None:
                    row[0] = total

            yield Count()

    layout, wheels = Layout(tmp_path / "store"), wheels_in(tmp_path / "w")
    engine = AssembleEngine(layout, tmp_path / "cache", codec="zstd", workers=workers)
    first = engine.build(definition(wheels), supplies(base_layer(layout), lambda: wheels), Counting())
    assert [done for _, done in counted] == [total for total, _ in counted]
    whole = counted[-1][0]
    assert whole == sum(path.stat().st_size for path in wheels.values())
    lost = sorted((layout.path / "layers").glob("*.files"))[0]
    lost.unlink()
    (layout.path / "images").rename(layout.path / "no-images")
    counted.clear()
    again = engine.build(definition(wheels), supplies(base_layer(layout), lambda: wheels), Counting())
    assert again.digest == first.digest
    assert 0 < counted[-1][0] < whole
    assert counted[-1][0] == counted[-1][1]


A, B, C = "a-1-py3-none-any.whl", "b-1-py3-none-any.whl", "c-1-py3-none-any.whl"


RANKS = {A: (0, True, "a"), B: (0, False, "b"), C: (0, True, "c")}


def wheel(name: str) -> LockedWheel:
    return LockedWheel(
        name=name, version="1", filename=f"{name}-1-py3-none-any.whl", sha256=name * 64, size=1
    )


def test_the_same_file_of_several_is_no_conflict() -> None:
    settled = settle_claims(
        [(A, "sha256=x", "s/nvidia/__init__.py"), (B, "sha256=x", "s/nvidia/__init__.py")], RANKS
    )
    assert settled.lost == {}
    assert list(settled.image_files()) == [(A, "sha256=x", "s/nvidia/__init__.py")]


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A), (B, C, A)])
def test_the_named_package_is_kept_else_the_first_name(order: tuple[str, ...]) -> None:
    three = settle_claims([(each, f"sha256={each}", "s/same.py") for each in order], RANKS)
    assert three.owners == {"s/same.py": (B, f"sha256={B}")}
    assert three.lost == {(B, A): {"s/same.py"}, (B, C): {"s/same.py"}}
    assert three.excluded(A) == three.excluded(C) == {"s/same.py"}
    assert three.excluded(B) == frozenset()
    two = settle_claims([(each, f"sha256={each}", "s/same.py") for each in order if each != B], RANKS)
    assert two.lost == {(A, C): {"s/same.py"}}


def test_who_brings_the_kept_content_too_loses_nothing() -> None:
    rows = [(A, "sha256=x", "s/f"), (B, "sha256=y", "s/f"), (C, "sha256=y", "s/f")]
    assert settle_claims(rows, RANKS).lost == {(B, A): {"s/f"}}


def test_each_pair_is_told_with_the_number_of_files() -> None:
    rows = [(each, f"sha256={each}", path) for each in (A, B) for path in ("s/f", "s/g", "s/h")]
    (line,) = describe_path_conflicts(settle_claims(rows, RANKS), RANKS)
    assert line.startswith("b and a both bring /s/f and 2 more files")
    assert "exclude: [a]" in line


def test_what_the_recipe_names_itself_cannot_be_excluded_as_advice() -> None:
    ranks = {A: (0, False, "a"), B: (0, False, "b")}
    rows = [(each, f"sha256={each}", "s/f") for each in (A, B)]
    (line,) = describe_path_conflicts(settle_claims(rows, ranks), ranks)
    assert "exclude" not in line


@pytest.mark.parametrize("package", ["the environment", "tinytool-1.0-py_0"])
def test_what_is_no_wheel_gives_way_to_none(package: str) -> None:
    with fails("file-conflict", "/s/f"):
        settle_claims([(package, "", "s/f"), (A, "sha256=x", "s/f")], RANKS)


def test_a_file_of_one_and_a_folder_of_another_are_rejected() -> None:
    with fails("file-conflict", r"/s/x .* a.* b"):
        settle_claims([(A, "sha256=x", "s/x"), (B, "sha256=y", "s/x/deep/file")], RANKS)


def test_what_is_built_upon_stays_as_it_is() -> None:
    """Its wheels come first whatever the recipe above names; theirs are ranked by its own recipe."""
    a, b, c, d = map(wheel, "abcd")
    alone = make_target(framework="a", requirements=("d", "b<2"))
    target = replace(alone, on="lower-1.0-cu121")
    below = make_lock(target="lower-1.0-cu121", wheels=(a, b))
    lock = make_lock(target=target.name, wheels=(a, b, c, d))
    definition = replace(
        define(alone, make_base(), lock),
        target=target,
        under=(below,),
        named_below=(frozenset({"a"}),),
    )
    ranks = rank_wheels(definition)
    assert sorted(ranks, key=lambda name: ranks[name]) == [one.filename for one in (a, b, d, c)]
