"""Killed at any moment and run again; two at once; collection beside a build; a full disk; bad wheels."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conftest import Factory, copy_store

TARGET = "tiny-12.1-cu121"


@pytest.fixture(scope="module")
def tiny(tiny_root: Path, base_store: Path, factory: Factory, scratch: Path) -> Factory:
    store = copy_store(base_store, scratch / "tiny-store")
    return Factory(store=store, cache=factory.cache, root=tiny_root)


@pytest.fixture(scope="module")
def wanted(tiny: Factory) -> str:
    """The digest that every build of the tiny target must give."""
    return digest(tiny)


def digest(factory: Factory) -> str:
    built = factory.build(TARGET, "--no-smoke")
    image = built["image"]
    assert isinstance(image, dict)
    return str(image["digest"])


def fresh(tiny: Factory, scratch: Path, name: str, base_store: Path | None = None) -> Factory:
    """An empty cache but for .debs; a store that is empty, or holds the base already."""
    folder = scratch / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cache").mkdir(parents=True)
    (folder / "cache" / "debs").symlink_to(tiny.cache / "debs")
    if base_store is not None:
        copy_store(base_store, folder / "store")
    return replace(tiny, store=folder / "store", cache=folder / "cache")


def check_store(factory: Factory) -> None:
    """Every blob under its own digest, every tag whole, and nothing half-done after a collection."""
    import hashlib

    factory.run("store", "gc")
    for path in (factory.store / "blobs" / "sha256").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    assert list((factory.store / "tmp").iterdir()) == []
    factory.run("store", "list")


def kill_tree(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_at_any_moment_and_run_again(tiny: Factory, wanted: str, scratch: Path) -> None:
    """kill -9 after growing times, from the first look at the recipes to the last tag."""
    seeded = random.Random(20261121)
    store = fresh(tiny, scratch, "killed")
    delay, kills = 0.3, 0
    while True:
        process = subprocess.Popen(
            store.command("build", "--no-smoke", TARGET),
            env=store.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            kills += 1
            delay *= 1.3 + seeded.random() / 2
            continue
        assert process.returncode == 0, errors
        break
    assert kills >= 4
    assert digest(store) == wanted
    check_store(store)


@pytest.mark.parametrize("seconds", [1.5, 6])
def test_no_process_outlives_a_killed_build(
    tiny: Factory, scratch: Path, wanted: str, seconds: float
) -> None:
    """After 1.5 s apt or mmdebstrap is at work, some seconds later mmdebstrap or the workers."""
    store = fresh(tiny, scratch, f"orphans-{seconds}")
    process = subprocess.Popen(store.command("build", "--no-smoke", TARGET), env=store.environ, stderr=-3)
    time.sleep(seconds)
    process.kill()  # the parent alone: all others must notice
    process.wait()
    deadline = time.monotonic() + 120
    while left := _processes_naming(str(store.store)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert digest(store) == wanted


def _processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in words:
                found.append(f"{entry.name}: {words[:200]!r}")
    return found


def test_two_builds_at_once_into_one_store(tiny: Factory, wanted: str, scratch: Path) -> None:
    store = fresh(tiny, scratch, "two")
    command = store.command("build", "--json", "--no-smoke", TARGET)
    both = [subprocess.Popen(command, env=store.environ, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    for process in both:
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert json.loads(out)["results"][0]["image"]["digest"] == wanted
    check_store(store)


def test_collection_beside_a_running_build_takes_nothing_it_needs(
    tiny: Factory, wanted: str, scratch: Path, base_store: Path
) -> None:
    store = fresh(tiny, scratch, "beside", base_store)
    process = subprocess.Popen(
        store.command("build", "--json", "--no-smoke", TARGET),
        env=store.environ,
        stdout=-1,
        stderr=-1,
        text=True,
    )
    collections = 0
    while process.poll() is None:
        store.run("store", "gc")
        store.run("store", "list")
        collections += 1
        time.sleep(0.3)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert json.loads(out)["results"][0]["image"]["digest"] == wanted
    assert collections
    check_store(store)


def test_a_wheel_that_is_not_the_locked_one_is_refused(
    tiny: Factory, scratch: Path, base_store: Path
) -> None:
    """The lock says another hash: the file that comes is refused by name, and nothing is built."""
    root = scratch / "tampered-root"
    shutil.copytree(tiny.root, root)
    path = root / "lockfiles" / f"{TARGET}.requirements.txt"
    text = path.read_text()
    line = next(line for line in text.splitlines() if line.startswith("idna=="))
    path.write_text(text.replace(line, line[:-8] + "00000000"))
    tampered = replace(fresh(tiny, scratch, "tampered", base_store), root=root)
    done = tampered.run("build", "--no-smoke", TARGET, code=None)
    assert done.returncode in (5, 7)
    assert "idna" in done.stderr
    assert "what to do" in done.stderr


def test_a_damaged_wheel_in_the_cache_is_named(
    tiny: Factory, wanted: str, scratch: Path, base_store: Path
) -> None:
    store = fresh(tiny, scratch, "damaged", base_store)
    digest(store)
    (wheel,) = (store.cache / "wheels").rglob("MarkupSafe*.whl")
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 0xFF
    wheel.write_bytes(data)
    shutil.rmtree(store.store)
    copy_store(base_store, store.store)
    shutil.rmtree(store.cache / "segments")
    done = store.run("build", "--no-smoke", TARGET, code=7)
    assert wheel.name in done.stderr
    assert "what to do" in done.stderr
    wheel.unlink()
    assert digest(store) == wanted


@pytest.fixture
def small_disk(scratch: Path) -> Path:
    """A file system with room for less than a base."""
    folder = scratch / "small-disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_and_nothing_is_lost(tiny: Factory, wanted: str, small_disk: Path) -> None:
    store = replace(tiny, store=small_disk / "store")
    done = store.run("build", "--no-smoke", TARGET, code=7)
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
    done = both.run("build", "--json", "--no-smoke", "tiny-12.4-cu124", TARGET, code=5)
    result = json.loads(done.stdout)
    assert [built["image"]["digest"] for built in result["results"]] == [wanted]
    assert [error["target"] for error in result["errors"]] == ["tiny-12.4-cu124"]
