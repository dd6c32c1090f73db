"""Sweeps whose jobs pull their image from a registry, docker:// and oras://, as at a center: with TLS, by
a CA of its own that the machines are told to trust. And what a person reads where a job cannot pull.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from imagefactory.schedulers.htcondor.results import CUT
from imagefactory.schedulers.sweep_file import read_sweep
from imagefactory.settings.choices import SLURM
from tests.engines.pool_ground import PoolGround, make_ground
from tests.engines.pool_sweeps import BAD, SweepRun, node, somebody_else, submit
from tests.services import slurm
from tests.services.authority import Certificate, make_authority
from tests.services.condor import BUNDLE, REGISTRY, CondorPool
from tests.services.registry import RegistryOptions, RegistryServer, registry_server

TRICKS = ("plain", "good", "wrong-numbers", "no-kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Center:
    """The registry of a pool; `stranger` has a CA that the access point trusts and the machines do not, and
    `ending` ends with `stop`.
    """

    ground: PoolGround
    certificate: Certificate
    registry: RegistryServer
    stranger: RegistryServer
    ending: RegistryServer
    stop: ExitStack

    def delete(self, reference: str) -> None:
        """Removes a manifest from the registry, as a person who frees it would."""
        name, _, digest = reference.partition("/")[2].partition("@")
        address = f"https://127.0.0.1:{self.registry.port}/v2/{name}/manifests/{digest}"
        context = ssl.create_default_context(cafile=self.certificate.authority)
        with urllib.request.urlopen(urllib.request.Request(address, method="DELETE"), context=context):
            pass

    def pushes(self, trick: str, ending: str = "") -> int:
        """How often an image, or with `.sif` its file, was pushed to the registry, by its tag."""
        tag = rf"{self.ground.name(trick).removeprefix('tiny-')}-[0-9a-f]{{12}}{ending}"
        put = rf'request\.method=PUT .*request\.uri="?/v2/gpu/tiny/manifests/{tag}"?\s'
        return len(re.findall(put, self.registry.log.read_text()))

    def verdicts(self, reference: str) -> list[dict[str, Any]]:
        """Those that lie with an image in the registry, as somebody sees them whose settings trust nobody."""
        (image,) = json.loads(self.ground.run("verdict", "list", reference, "--json", err=False))["images"]
        found = image["verdicts"]
        assert isinstance(found, list)
        return found


def image_of(sweep: SweepRun) -> str:
    """The address that the sweep's jobs pull."""
    (address,) = {one.image.address for one in read_sweep(sweep.folder).nodes}
    return address


@pytest.fixture(scope="module")
def center(pool: CondorPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Center]:
    folder = tmp_path_factory.mktemp("center")
    known = make_authority(folder / "known", "CA of the center")
    unknown = make_authority(folder / "unknown", "CA of a stranger")
    certificate = known.sign(REGISTRY)
    ground = make_ground(pool, pool.home / "center", TRICKS)
    bundle = pool.home / "center/cas.pem"
    bundle.write_bytes(known.path.read_bytes() + unknown.path.read_bytes())
    with ExitStack() as stack:
        stop = stack.enter_context(ExitStack())

        def serve(name: str, signed: Certificate, until: ExitStack = stack) -> RegistryServer:
            return until.enter_context(registry_server(folder / name, RegistryOptions(certificate=signed)))

        registry = serve("registry", certificate)
        (ground.root / "imagefactory.toml").write_text(
            f'registry = "{registry.host}/gpu"\ncertificates = "{pool.there(bundle)}"\n'
        )
        pool.trust(known.path)
        ground.run("config", "--trust")
        ground.run("key", "create", "throwaway")
        yield Center(
            ground=ground,
            certificate=certificate,
            registry=registry,
            stranger=serve("stranger", unknown.sign(REGISTRY)),
            ending=serve("ending", certificate, stop),
            stop=stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """All at once, as each waits for its machine alone. `gone` and `down` found their GPU busy for so long
    that the registry has changed meanwhile.
    """

    docker: SweepRun
    oras: SweepRun
    distrusted: SweepRun
    gone: SweepRun
    down: SweepRun


@pytest.fixture(scope="module")
def sweeps(center: Center) -> Sweeps:
    stranger, ending = (f"{one.host}/gpu" for one in (center.stranger, center.ending))
    late = ("--capability", "7.0", "--retries", "0")
    with somebody_else(center.ground.pool):
        gone = submit(center.ground, ("good",), *late)
        down = submit(center.ground, ("plain",), *late, "--registry", ending)
        docker = submit(center.ground, ("plain",), "--capability", "8.0", "--capability", "9.0")
        oras = submit(center.ground, ("good", "no-kernel"), "--capability", "9.0", "--image-format", "oras")
        again = ("--capability", "8.0", "--retries", "1")  # by docker:// still, though a .sif is there by now
        distrusted = submit(center.ground, ("good",), *again, "--registry", stranger)
        center.delete(image_of(gone).removeprefix("docker://"))
        center.stop.close()
    return Sweeps(
        docker=docker,
        oras=oras,
        distrusted=distrusted,
        gone=gone,
        down=down,
    )


def test_it_pushes_nowhere_where_it_does_not_know_the_ca(center: Center) -> None:
    """And says which setting is missing."""
    ask = [
        "sweep",
        "start",
        center.ground.name("plain"),
        "--scheduler",
        "htcondor",
        "--registry",
        center.stranger.host,
    ]
    done = center.ground.pool.factory(
        *ask, folder=center.ground.root, code=8, **center.ground.environ, IMAGEFACTORY_CERTIFICATES=BUNDLE
    )
    assert f"set `certificates` (imagefactory.toml) to a file with the CA of {center.stranger.host}" in (
        done.stderr
    )


def test_docker_is_what_jobs_pull_where_nobody_says(center: Center, sweeps: Sweeps) -> None:
    """Two nodes of one image: pushed once, pulled on two machines, by digest."""
    found = sweeps.docker.ends()
    assert {name: row["outcome"] for name, row in found.items()} == {
        node(center.ground, "plain", "8.0"): "no-gpu",
        node(center.ground, "plain", "9.0"): "no-gpu",
    }
    ran = {row["attempts"][-1]["machine"] for row in found.values()}
    assert ran == {"a100.pool.test", "standin.pool.test"}
    assert image_of(sweeps.docker).startswith(f"docker://{center.registry.host}/gpu/tiny@sha256:")
    assert center.pushes("plain") == 1


def test_the_same_by_oras(center: Center, sweeps: Sweeps) -> None:
    """The .sif is a subject of its own: the image's verdicts are none of it."""
    good, wrong = (node(center.ground, trick) for trick in ("good", "no-kernel"))
    found = sweeps.oras.ends()
    assert {name: row["outcome"] for name, row in found.items()} == {
        good: "not-tested",  # all of the suite passed, and the machine has no driver
        wrong: "no-kernel",
    }
    rows = sweeps.oras.collect(code=BAD)
    assert (bool(rows[good]["keyid"]), bool(rows[wrong]["keyid"])) == (False, True)
    assert center.pushes("good", r"\.sif") == 1
    for one in read_sweep(sweeps.oras.folder).nodes:
        reference = one.image.address.removeprefix("oras://")
        assert reference.startswith(f"{center.registry.host}/gpu/tiny@")
        standing = [verdict["status"] for verdict in center.verdicts(reference)]
        assert standing == (["wrong-key"] if one.name == wrong else [])


def test_a_machine_that_does_not_trust_the_registry(center: Center, sweeps: Sweeps) -> None:
    """Tried again as any fault of the pool, and kept; HTCondor cuts off what apptainer said of why."""
    (found,) = sweeps.distrusted.ends().values()
    assert found["outcome"] == "pull-failed", found
    address = image_of(sweeps.distrusted)
    assert found["reason"] == f"a100.pool.test could not pull {address}: {CUT}"
    assert len(found["attempts"]) == 2
    kept = [path.name for path in (sweeps.distrusted.folder / "nodes" / found["node"]).glob("attempt-*")]
    assert sorted(kept) == ["attempt-1", "attempt-2"]
    (row,) = sweeps.distrusted.collect(code=BAD).values()
    assert row["note"].startswith(f"{center.stranger.host} has the image")
    assert row["keyid"] == ""


def test_an_image_that_was_removed_from_the_registry(center: Center, sweeps: Sweeps) -> None:
    (found,) = sweeps.gone.ends().values()
    assert found["outcome"] == "pull-failed", found
    assert found["reason"].startswith(f"v100.pool.test could not pull {image_of(sweeps.gone)}: ")
    (row,) = sweeps.gone.collect(code=BAD).values()
    assert row["note"] == f"{center.registry.host} no longer has this image: a new sweep sends it again"


def test_a_registry_that_is_down(center: Center, sweeps: Sweeps) -> None:
    (found,) = sweeps.down.ends().values()
    assert found["outcome"] == "pull-failed", found
    assert found["reason"].startswith(f"v100.pool.test could not pull {image_of(sweeps.down)}: ")
    (row,) = sweeps.down.collect(code=BAD).values()
    assert re.match(
        rf"not readable from this machine without a password: {center.ending.host}/.*refused", row["note"]
    ), row


def test_jobs_of_slurm_pull_the_same(center: Center, sweeps: Sweeps, cluster: CondorPool) -> None:
    ground = replace(center.ground, environ={**center.ground.environ, **slurm.environ()})
    here = ("--capability", "9.0", "--retries", "0")
    as_sif = submit(ground, ("wrong-numbers",), *here, "--image-format", "oras", to=SLURM)
    strange = submit(ground, ("no-kernel",), *here, "--registry", f"{center.stranger.host}/gpu", to=SLURM)
    for sweep, word in ((as_sif, "wrong-numbers"), (strange, "pull-failed")):
        (found,) = sweep.ends().values()
        assert found["outcome"] == word, found
        (row,) = sweep.collect(code=BAD).values()
        assert bool(row["keyid"]) == (word != "pull-failed")
    assert row["note"].startswith(f"{center.stranger.host} has the image")
