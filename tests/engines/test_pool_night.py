"""Whole nights of one factory on both real pools, as cron starts them: what is broken, busy or killed hides nothing.

In both pools the GPU of capability 9.0 is made up, and this factory alone believes who signs here. Another's
job holds the only one of 7.0, the machine of 7.5 has a full disk, those of 8.0 have no driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.settings.choices import SLURM
from tests.engines.pool_ground import PoolGround, make_ground
from tests.engines.pool_sweeps import somebody_else
from tests.services import slurm
from tests.services.authority import make_authority
from tests.services.condor import REGISTRY, CondorPool
from tests.services.registry import RegistryOptions, RegistryServer, registry_server

TRICKS = ("plain", "good", "wrong-numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nights:
    ground: PoolGround
    registry: RegistryServer

    def night(self, pool: str, *options: str, code: int) -> dict[str, Any]:
        told = self.ground.run("night", "--json", "--pool", pool, *options, code=None, err=False)
        found = json.loads(told)
        assert found["exit_code"] == code, f"{told}\n{self.log()}"
        assert isinstance(found, dict)
        return found

    def log(self) -> str:
        return sorted(self.nights.glob("*/log.txt"))[-1].read_text()[-20000:]

    @property
    def nights(self) -> Path:
        return self.ground.factory.settings.store_path / "nights"

    def rows(self, found: dict[str, Any], kind: str) -> set[tuple[str, str]]:
        tricks = {self.ground.name(trick): trick for trick in TRICKS}
        return {(tricks.get(row["what"], row["what"]), row["on"]) for row in found[kind]}


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
    options = RegistryOptions(certificate=known.sign(REGISTRY))
    with registry_server(folder / "registry", options) as registry:
        text = f'registry = "{registry.host}/gpu"\ncertificates = "{cluster.there(bundle)}"\n'
        (ground.root / "imagefactory.toml").write_text(text)
        ground.run("keys", "new", "nights")
        ground.run("keys", "trust", "nights")
        with somebody_else(cluster):
            cluster.run(
                ["sbatch", "--gres=gpu:v100:1", "--mem=100M", "--time=60", "--wrap=sleep 3600"],
                folder=home,
                **slurm.environ(),
            )
            yield Nights(ground=ground, registry=registry)
            cluster.run(["scancel", "--me"], folder=home, **slurm.environ())
            slurm.wait_for_jobs(cluster, home)


def test_a_night_on_slurm(nights: Nights) -> None:
    found = nights.night(SLURM, "--wait-limit", "20s", code=9)
    print(json.dumps(found, indent=1))
    print(nights.log())
    assert 0
