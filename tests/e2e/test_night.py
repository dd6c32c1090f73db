"""`imagefactory site nightly` as cron starts it, against a real registry; this machine has no GPU.

Night after night on one store: all is built, a target breaks and is mended, a night is killed.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagefactory.oci.candidates import CANDIDATE
from imagefactory.oci.registry.client import RegistryClient
from tests.services.factory import Factory, copy_store

TARGET = "tiny-12.1-cu121"
LONG = 600.0


class Ground:
    """A factory that publishes to a registry, and its nights."""

    def __init__(self, factory: Factory, place: str, mail: Path) -> None:
        self.factory, self.place, self.mail = factory, place, mail
        self.nights = factory.store / "nights"

    def night(self, *options: str, code: int = 0) -> dict[str, Any]:
        self.mail.unlink(missing_ok=True)
        done = self.factory.run(
            "site", "nightly", "--json", "--mail", f"cat > {self.mail}", *options, code=None
        )
        log = sorted(self.nights.glob("*/log.txt"))
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{log[-1].read_text()[-20000:]}"
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def log(self) -> str:
        return sorted(self.nights.glob("*/log.txt"))[-1].read_text()

    def made(self) -> str:
        """When the catalog that researchers read was signed."""
        host, _, path = self.place.partition("/")
        found = RegistryClient(host).manifest(f"{path}/catalog", "current")
        assert found is not None
        return found[0].digest


@pytest.fixture(scope="module")
def ground(
    tiny_root: Path, small_store: Path, small_factory: Factory, registry: str, scratch: Path
) -> Ground:
    store = copy_store(small_store, scratch / "night-store")
    root = scratch / "night-root"
    shutil.copytree(tiny_root, root)
    place = f"{registry}/nights"
    extra = {"XDG_CONFIG_HOME": str(scratch / "night-keys"), "IMAGEFACTORY_REGISTRY": place}
    own = Factory(store=store, cache=small_factory.cache, root=root, extra=extra)
    own.run("key", "create", "lab")
    own.run("key", "trust", "lab")
    return Ground(own, place, scratch / "mail")


def test_a_night_builds_pushes_and_publishes_and_says_so(ground: Ground) -> None:
    first = ground.night()
    assert [row["what"] for row in first["built"]] == [TARGET]
    assert (first["broken"], first["verified"]) == ([], [])
    assert "nothing is verified" in first["notes"][0]
    host, _, path = ground.place.partition("/")
    tags = [tag for tag in RegistryClient(host).tags(f"{path}/tiny") if not tag.startswith("sha256-")]
    assert [bool(CANDIDATE.fullmatch(tag)) for tag in tags] == [True]
    said = ground.mail.read_text()
    assert f"built\n  {TARGET}\n" in said
    assert all(len(line) <= 80 for line in said.splitlines() if not line.startswith("log: "))
    calls = [line.split()[2:4] for line in ground.log().splitlines() if line.startswith("$ ")]
    steps = [" ".join(word for word in words if not word.startswith("-")) for words in calls]
    assert steps == ["build", "image promote", "verdict sync", "site publish", "image prune"]


def test_a_broken_target_hides_nothing_and_is_told_once(ground: Ground) -> None:
    broken = ground.factory.root / "recipes" / "other.yaml"
    text = (ground.factory.root / "recipes" / "tiny.yaml").read_text()
    broken.write_text(text.replace("family: tiny", "family: other"))
    before = ground.made()
    second = ground.night(code=5)  # its lock is missing
    (row,) = second["broken"]
    assert (row["what"], row["exit_code"]) == ("other-12.1-cu121", 5)
    assert second["built"] == []
    assert ground.made() != before
    assert "other-12.1-cu121" in ground.mail.read_text()

    ground.night(code=5)
    assert not ground.mail.exists()  # nothing new

    broken.unlink()
    last = ground.night("--html", str(ground.factory.root / "site"))
    assert last["broken"] == []
    assert "0 broken" in ground.mail.read_text()  # it is mended
    site = ground.factory.root / "site"
    assert "0 broken" in (site / "night.html").read_text()
    assert 'href="night.html"' in (site / "index.html").read_text()


def test_a_night_that_was_killed_is_run_again_and_tells_of_both(ground: Ground) -> None:
    lock = ground.factory.root / "recipes" / "tiny.yaml"
    lock.write_text(lock.read_text().replace("description: The", "description: Once more, the"))
    ground.factory.run("lock", TARGET)
    known = set(ground.nights.iterdir())
    night = subprocess.Popen(
        ground.factory.command("site", "nightly"),
        env=ground.factory.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(
        "the plan",
        lambda: any((one / "before.json").exists() for one in set(ground.nights.iterdir()) - known),
    )
    (error,) = json.loads(ground.factory.run("site", "nightly", "--json", code=2).stdout)["errors"]
    assert error["code"] == "night-in-progress"
    night.send_signal(signal.SIGKILL)
    night.wait(LONG)
    again = ground.night()
    assert [row["what"] for row in again["built"]] == [TARGET]


def wait_for(what: str, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < until, f"{what}: not within {LONG:.0f} s"
        time.sleep(0.05)
