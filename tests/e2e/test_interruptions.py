"""Killed at any moment and run again; two at once; collection beside a build; a full disk; bad wheels."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.services.children import LIMIT, child, kill_group, wait_for
from tests.services.factory import Factory, copy_store
from tests.services.tier import NIGHTLY, many

TARGET = "tiny-12.1-cu121"
LONG = 600.0
"""Seconds after which a build that makes a base is given up, on a loaded machine."""


@pytest.fixture(scope="module")
def tiny(tiny_root: Path, small_store: Path, small_factory: Factory, scratch: Path) -> Factory:
    store = copy_store(small_store, scratch / "tiny-store")
    return Factory(store=store, cache=small_factory.cache, root=tiny_root)


@pytest.fixture(scope="module")
def wanted(tiny: Factory) -> str:
    """The digest that every build of the tiny target must give."""
    return digest(tiny)


def digest(factory: Factory) -> str:
    built = factory.build(TARGET, "--no-test")
    image = built["image"]
    assert isinstance(image, dict)
    return str(image["digest"])


def fresh(tiny: Factory, scratch: Path, name: str, small_store: Path | None = None) -> Factory:
    """An empty cache but for .debs; a store that is empty, or holds the base already; a TMPDIR of its own."""
    folder = scratch / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cache").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "cache" / "debs").symlink_to(tiny.cache / "debs")
    if small_store is not None:
        copy_store(small_store, folder / "store")
    extra = {"TMPDIR": str(folder / "tmp")}
    return replace(tiny, store=folder / "store", cache=folder / "cache", extra=extra)


def check_store(factory: Factory) -> None:
    """All is what it says, every tag whole, and nothing half-done after a collection."""
    factory.run("image", "check")
    factory.run("image", "prune")
    factory.run("image", "check")
    assert list((factory.store / "tmp").iterdir()) == []
    factory.run("image", "list")


# --- moments -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Where a build stands still: before the first event of sys.audit in whose arguments `pattern` is found.

    No machine is too fast or too slow for that. `meets`: files below TMPDIR that others make meanwhile.
    """

    name: str
    event: str
    pattern: str
    meets: str = ""


READING = Moment("the recipes are read", "open", "*/recipes/tiny.yaml r *")
# mmdebstrap comes no further than to its tar, which nobody reads.
INSTALLING = Moment(
    "mmdebstrap's dpkg installs packages",
    "open",
    "*/.base.tar.* w *",
    meets="imagefactory-base-*/tree/mmdebstrap.*/var/lib/dpkg/info/*.list",
)
SEGMENT = Moment("a thread has made a segment", "os.rename", "*.part */segments/*")
RECORDED = Moment("the image is recorded", "os.rename", "* */images/*.json *")
MOMENTS = (
    READING,
    Moment("the store is founded", "os.rename", "* */store/oci-layout *"),
    Moment("the lock of the base is read", "open", "*/bases/debian-12.lock r *"),
    Moment("a wheel has come", "os.rename", "*.whl.part *"),
    INSTALLING,
    # Every night: it costs another base. A layer's blob comes into the store by the same way.
    *many((), (Moment("the base's blob is whole", "os.rename", "*/tmp/blob-* */blobs/sha256/*"),)),
    Moment("the base is being unpacked", "open", "python3.11 None *"),
    Moment("the base gets its tag", "os.rename", "* */index.json *"),
    SEGMENT,
    Moment("a layer's blob is whole", "os.rename", "*/tmp/blob-* */blobs/sha256/*"),
    Moment("a layer is recorded", "os.rename", "* */layers/*.json *"),
    RECORDED,
    Moment("the image gets its tag", "os.rename", "* */index.json *"),
)
"""In the order in which a build comes to them; packages come while the base is installed."""

_STOPS = """
import fnmatch, os, runpy, sys, time
here, event, pattern = sys.argv[1:4]
def stop(found, arguments):
    if found == event and fnmatch.fnmatchcase(" ".join(map(str, arguments)), pattern):
        try:
            os.close(os.open(here, os.O_CREAT | os.O_EXCL))
        except FileExistsError:  # an earlier one, or another thread's
            return
        while not os.path.exists(here + ".go-on"):
            time.sleep(0.02)
sys.addaudithook(stop)
sys.argv[:] = ["imagefactory", *sys.argv[4:]]
runpy.run_module("imagefactory", run_name="__main__")
"""


@contextmanager
def stopped(factory: Factory, moment: Moment, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A build of the tiny target that stands still at `moment`; `go_on` lets it."""
    tmp = Path(factory.extra["TMPDIR"])
    for old in tmp.glob("here*"):
        old.unlink()
    build = factory.command("build", "--no-test", *options, TARGET)
    assert build[:3] == [sys.executable, "-m", "imagefactory"]
    argv = [sys.executable, "-c", _STOPS, str(tmp / "here"), moment.event, moment.pattern, *build[3:]]
    with (tmp / "stderr").open("w+") as said, child(argv, stderr=said, **piped(factory)) as process:

        def there() -> bool:
            if process.poll() is not None:
                said.seek(0)
                pytest.fail(f"the build ended with {process.returncode} before {moment.name}:\n{said.read()}")
            return (tmp / "here").exists() and (not moment.meets or any(tmp.glob(moment.meets)))

        wait_for(there, moment.name, limit=LONG)
        yield process


def piped(factory: Factory) -> dict[str, Any]:
    return {"env": factory.environ, "stdout": subprocess.PIPE, "text": True, "limit": LONG + LIMIT}


def go_on(factory: Factory) -> None:
    Path(factory.extra["TMPDIR"], "here.go-on").touch()


def test_killed_at_any_moment_and_run_again(tiny: Factory, wanted: str, scratch: Path) -> None:
    """kill -9 at each moment, each on what the kills before it left."""
    store = fresh(tiny, scratch, "killed")
    for moment in MOMENTS:
        with stopped(store, moment) as process:
            kill_group(process)
            assert process.wait(timeout=LIMIT) == -signal.SIGKILL, moment.name
    assert digest(store) == wanted
    check_store(store)


@pytest.mark.parametrize(
    ("moment", "program"),
    [(INSTALLING, "mmdebstrap"), (SEGMENT, "/runtime/sandbox ")],
    ids=["base", "layers"],
)
def test_no_process_outlives_a_killed_build(
    tiny: Factory, scratch: Path, wanted: str, small_store: Path, moment: Moment, program: str
) -> None:
    store = fresh(tiny, scratch, f"orphans-{moment.event}", None if moment is INSTALLING else small_store)
    folder = str(scratch / f"orphans-{moment.event}")
    with stopped(store, moment) as process, contextlib.ExitStack() as opened:
        below = {}
        for pid in stemming_from(process.pid):
            with contextlib.suppress(OSError):  # it ended meanwhile
                words = Path(f"/proc/{pid}/cmdline").read_text()
                below[os.pidfd_open(pid)] = f"{pid}: {words}".replace("\0", " ")
        opened.callback(lambda: [os.close(handle) for handle in below])
        assert any(program in words for words in below.values()), below
        process.kill()  # the parent alone: all others must notice
        process.wait(timeout=LIMIT)
        try:
            wait_for(lambda: len(select.select(below, [], [], 0)[0]) == len(below), f"all end: {below}")
            wait_for(lambda: not naming(folder), "nothing works in the build's folders")
        finally:
            for handle in below:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            for pid in naming(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    if NIGHTLY or moment is not INSTALLING:  # which the series of kills ends well as well
        assert digest(store) == wanted


def stemming_from(pid: int) -> list[int]:
    """The processes below `pid`, whichever of its threads started them."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for started in map(int, path.read_text().split()):
                found += [started, *stemming_from(started)]
    return found


def naming(text: str) -> list[int]:
    """The processes with `text` in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


# --- two at once ---------------------------------------------------------------------------------


# By night both want a base as well; by day tests/unit/engines/base/test_image.py has two that do.
@pytest.mark.parametrize(
    "has_base", many((True,), (False, True)), ids=lambda has: "layers" if has else "base"
)
def test_two_builds_at_once_into_one_store(
    tiny: Factory, wanted: str, scratch: Path, small_store: Path, has_base: bool
) -> None:
    store = fresh(tiny, scratch, "two", small_store if has_base else None)
    command = store.command("build", "--json", "--no-test", TARGET)
    options = {"stderr": subprocess.PIPE, **piped(store)}
    with child(command, **options) as one, child(command, **options) as other:
        for process in (one, other):
            out, errors = process.communicate(timeout=LONG)
            assert process.returncode == 0, errors
            assert json.loads(out)["results"][0]["image"]["digest"] == wanted
    check_store(store)


@pytest.mark.parametrize("moment", [READING, SEGMENT, RECORDED], ids=["reading", "layers", "untagged"])
def test_collection_beside_a_running_build_takes_nothing_it_needs(
    tiny: Factory, wanted: str, scratch: Path, small_store: Path, moment: Moment
) -> None:
    """It waits for a build that uses the store, and ends before one that does not yet."""
    store = fresh(tiny, scratch, "beside", small_store)
    gc = store.command("image", "prune")
    with (
        stopped(store, moment, "--json") as build,
        child(gc, env=store.environ, stderr=subprocess.PIPE, text=True) as collection,
    ):
        if moment is READING:
            assert collection.wait(timeout=LIMIT) == 0
        else:
            assert collection.stderr.readline() == "waiting for running builds to end ...\n"
        store.run("image", "list")
        go_on(store)
        out, _ = build.communicate(timeout=LIMIT)
        assert build.returncode == 0, out
        assert collection.wait(timeout=LIMIT) == 0
    assert json.loads(out)["results"][0]["image"]["digest"] == wanted
    check_store(store)


# --- what comes is wrong, the disk is full -------------------------------------------------------


def test_a_wheel_that_is_not_the_locked_one_is_refused(
    tiny: Factory, scratch: Path, small_store: Path
) -> None:
    """The lock says another hash: the file that comes is refused by name, and nothing is built."""
    root = scratch / "tampered-root"
    shutil.copytree(tiny.root, root)
    path = root / "lockfiles" / f"{TARGET}.requirements.txt"
    text = path.read_text()
    line = next(line for line in text.splitlines() if line.startswith("idna=="))
    path.write_text(text.replace(line, line[:-8] + "00000000"))
    tampered = replace(fresh(tiny, scratch, "tampered", small_store), root=root)
    done = tampered.run("build", "--no-test", TARGET, code=None)
    assert done.returncode in (5, 7)
    assert "idna" in done.stderr
    assert "hint: " in done.stderr


def test_a_damaged_wheel_in_the_cache_is_named_and_fetched_anew(
    tiny: Factory, wanted: str, scratch: Path, small_store: Path
) -> None:
    store = fresh(tiny, scratch, "damaged", small_store)
    digest(store)
    (wheel,) = (store.cache / "wheels").rglob("MarkupSafe*.whl")
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 0xFF
    wheel.write_bytes(data)
    shutil.rmtree(store.store)
    copy_store(small_store, store.store)
    shutil.rmtree(store.cache / "segments")
    done = store.run("build", "--no-test", "--json", TARGET)
    assert f"{wheel.name} has sha256" in done.stderr
    (built,) = json.loads(done.stdout)["results"]
    assert built["image"]["digest"] == wanted


@pytest.fixture(params=many(("layers",), ("base", "layers")))
def small_disk(request: pytest.FixtureRequest, small_store: Path, scratch: Path) -> Iterator[Path]:
    """A file system with room for less than a base, or one with the base and no room for layers."""
    folder = scratch / "small-disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(folder)], check=True)
    size = 60 << 20
    if request.param == "layers":
        subprocess.run(["cp", "--archive", small_store, folder / "store"], check=True)
        size = shutil.disk_usage(folder).used + (256 << 10)
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def test_a_full_disk_is_said_and_nothing_is_lost(tiny: Factory, wanted: str, small_disk: Path) -> None:
    store = replace(tiny, store=small_disk / "store")
    done = store.run("build", "--no-test", TARGET, code=7)
    assert "no space left" in done.stderr
    assert str(small_disk) in done.stderr
    subprocess.run(["mount", "-o", "remount,size=2g", str(small_disk)], check=True)
    assert digest(store) == wanted
    check_store(store)


def test_a_missing_and_a_stale_lock_stop_before_any_work(tiny: Factory, scratch: Path) -> None:
    root = scratch / "stale-root"
    shutil.copytree(tiny.root, root)
    stale = replace(tiny, root=root)
    recipe = root / "recipes" / "tiny.yaml"
    recipe.write_text(recipe.read_text().replace("idna==3.7", "idna==3.6"))
    done = stale.run("build", TARGET, code=4)
    assert f"imagefactory lock {TARGET}" in done.stderr
    stale.run("lock", "--check", TARGET, code=4)
    (root / "lockfiles" / f"{TARGET}.requirements.txt").unlink()
    assert "has no lock" in stale.run("build", TARGET, code=5).stderr
    relocked = stale.run("lock", TARGET)
    assert "locked 3 packages" in relocked.stdout
    path = root / "lockfiles" / f"{TARGET}.requirements.txt"
    good = path.read_text()
    path.write_text("<<<<<<< ours\n" + good)
    assert f"imagefactory lock {TARGET}" in stale.run("build", TARGET, code=5).stderr
    stale.run("lock", TARGET)
    assert path.read_text() == good


def test_one_failed_target_does_not_stop_its_siblings(tiny: Factory, wanted: str, scratch: Path) -> None:
    root = scratch / "siblings-root"
    shutil.copytree(tiny.root, root)
    recipe = root / "recipes" / "tiny.yaml"
    recipe.write_text(recipe.read_text() + '  - version: "12.4"\n    cuda: ["12.4"]\n')
    both = replace(tiny, root=root)
    done = both.run("build", "--json", "--no-test", "tiny-12.4-cu124", TARGET, code=5)
    result = json.loads(done.stdout)
    assert [built["image"]["digest"] for built in result["results"]] == [wanted]
    assert [error["target"] for error in result["errors"]] == ["tiny-12.4-cu124"]
