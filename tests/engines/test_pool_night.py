"""Whole nights of one factory on both real pools, as cron starts them: what is broken, busy or killed hides
nothing, and holds nothing up.

In both pools the GPU of capability 9.0 is made up, and this factory alone believes who signs here. Another's
job holds the only one of 7.0, the machine of 7.5 has a full disk, those of 8.0 have no driver.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.oci.manifests import MANIFEST_TYPE
from imagefactory.settings.choices import HTCONDOR, SLURM
from tests.engines.pool_ground import PoolGround, make_ground
from tests.engines.pool_sweeps import somebody_else, wait_for
from tests.services import slurm
from tests.services.authority import make_authority
from tests.services.condor import REGISTRY, CondorPool
from tests.services.registry import RegistryOptions, RegistryServer, registry_server

TRICKS = ("plain", "good", "wrong-numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nights:
    """A factory with a registry; `authority` is the CA of that."""

    ground: PoolGround
    registry: RegistryServer
    authority: Path

    def night(self, pool: str, *options: str) -> dict[str, Any]:
        """A whole night, of which something is broken."""
        told = self.ground.run("night", "--json", "--pool", pool, *options, code=9, err=False)
        found = json.loads(told)
        assert isinstance(found, dict)
        return found

    def log(self) -> str:
        return sorted((self.ground.factory.settings.store_path / "nights").glob("*/log.txt"))[-1].read_text()

    def rows(self, found: dict[str, Any], kind: str) -> dict[tuple[str, str], str]:
        """What is told of the tricks, by their name and the GPU: a row of several names of each."""
        tricks = {self.ground.name(trick): trick for trick in TRICKS}
        return {
            (tricks[name], row["on"]): row["why"]
            for row in found[kind]
            for name in row["what"].split(", ")
            if name in tricks
        }

    def asked(self, path: str) -> Any:
        context = ssl.create_default_context(cafile=str(self.authority))
        address = f"https://127.0.0.1:{self.registry.port}/v2/gpu/{path}"
        request = urllib.request.Request(address, headers={"Accept": MANIFEST_TYPE})
        with urllib.request.urlopen(request, context=context) as answer:
            return json.load(answer)

    def catalogue(self) -> str:
        """The one that researchers read, by its content."""
        return str(self.asked("catalogue/manifests/current")["layers"])


@pytest.fixture(scope="module")
def nights(cluster: CondorPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    folder = tmp_path_factory.mktemp("nights")
    known = make_authority(folder / "known", "CA of the nights")
    home = cluster.home / "nights"
    ground = make_ground(cluster, home, TRICKS)
    ground = replace(ground, environ={**ground.environ, **slurm.environ()})
    bundle = home / "ca.pem"
    bundle.write_bytes(known.path.read_bytes())
    cluster.trust(known.path)
    with registry_server(folder / "registry", RegistryOptions(certificate=known.sign(REGISTRY))) as registry:
        text = f'registry = "{registry.host}/gpu"\ncertificates = "{cluster.there(bundle)}"\n'
        (ground.root / "imagefactory.toml").write_text(text)
        ground.run("settings", "--trust")
        ground.run("keys", "new", "nights")
        ground.run("keys", "trust", "nights")
        ground.run("push", *(ground.name(trick) for trick in TRICKS[1:]))
        with somebody_else(cluster):
            holds = ["sbatch", "--gres=gpu:v100:1", "--mem=100M", "--time=300", "--wrap=sleep 18000"]
            cluster.run(holds, folder=home, **slurm.environ())
            yield Nights(ground=ground, registry=registry, authority=known.path)
            cluster.run(["scancel", "--me"], folder=home, **slurm.environ())
            slurm.wait_for_jobs(cluster, home)


def test_a_night_that_was_killed_is_gone_on_with_on_slurm(nights: Nights) -> None:
    """Killed while it waits for the GPU that another has: what the others have answered is collected next."""
    ground = nights.ground
    script = f"echo $$ >pid && exec imagefactory night --pool {SLURM}"
    path = {"PATH": f"{slurm.BIN}:/opt/imagefactory/builds/bin:{ground.environ['PATH']}"}
    killed = ground.pool.start(["sh", "-c", script], folder=ground.root, **{**ground.environ, **path})

    def left() -> set[str]:
        sweeps = json.loads(ground.run("status", "--json", err=False))["sweeps"]
        nodes = [node for sweep in sweeps for node in sweep["nodes"] if node["outcome"] is None]
        return {node["node"].rpartition("-")[2] for node in nodes} if sweeps else {"none"}

    wait_for("all but the busy GPU's", lambda: left() == {"sm70"})
    ground.pool.run(["sh", "-c", "kill -9 $(cat pid)"], folder=ground.root)
    killed.communicate(timeout=60)

    found = nights.night(SLURM, "--wait-limit", "1s")
    assert set(nights.rows(found, "proven")) == {("good", "9.0")}
    broken = nights.rows(found, "broken")
    assert "smoke test did not pass" in broken["plain", ""]
    assert broken["wrong-numbers", "9.0"].startswith("wrong-numbers: ")
    assert {on for (trick, on), why in broken.items() if trick == "good" and why.startswith("no-gpu: ")} == {
        "8.0"
    }, found["broken"]
    assert ("good", "7.0, 8.0") in nights.rows(found, "due")
    assert sum("still on the pool: the next night collects" in note for note in found["notes"]) == 1
    assert "1.1-cu121" in nights.asked("tiny/tags/list")["tags"]


def test_the_next_night_on_the_other_pool_asks_for_what_is_not_known(nights: Nights) -> None:
    before = nights.catalogue()
    found = nights.night(HTCONDOR, "--wait-limit", "1s")
    assert nights.rows(found, "proven") == {}
    (told,) = re.findall(r'"sweep": "([0-9a-f-]+)"', nights.log())[-1:]
    (sweep,) = json.loads(nights.ground.run("status", told, "--json", err=False))["sweeps"]
    wanted = {
        f"{name}-sm{on}" for name in ("tiny-1_1-cu121", "tiny-1_2-cu121") for on in (75, 80)
    }  # 7.0 is in hand
    assert {node["node"] for node in sweep["nodes"]} == wanted
    assert nights.catalogue() != before
    nights.ground.run("report", "--html", "site")
    assert "due" in (nights.ground.root / "site/night.html").read_text()
