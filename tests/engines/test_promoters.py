"""Promoters at once on a registry without the referrers API: what its lists lose, and that it comes back.

Six machines, each with a store and a journal of its own, attach a verdict to the same image at one moment.
The list that docker-registry 2.8 has in the place of the API is read, changed and written by each of them.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.promote import PromotionRequest, promote
from imagefactory.actions.verdicts import writing
from imagefactory.errors import RegistryError
from imagefactory.http import RetryPolicy
from imagefactory.oci.candidates import candidate_tag
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from imagefactory.trust.attached import AttachJournal, SignedStatement, attach, read_subject, repair_referrers
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.policy import TrustGrant, add_key
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import VerifiedImage
from imagefactory.verify.suite_files import suite_digest
from tests.made.store_contract import image_index, image_manifest
from tests.made.trusted import write_settings
from tests.made.verdicts import HOST, LAB, MADE_UP, whole_report
from tests.services.registry import RegistryOptions as ServedOptions
from tests.services.registry import registry_server
from tests.services.tier import many

ROUNDS, PROMOTERS = many(15, 50), 6
PROMOTING_ROUNDS = 2
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "12.0")
ROOT = Path(__file__).parents[2]
QUIET = QuietProgress()
STUCK = 300
"""Seconds after which a promoter that waits for one that failed gives up."""
# docker-registry rewrites its files in place: who reads at that moment gets a 500, also several in a row,
# and for long where other jobs starve it: about a minute is borne.
STUBBORN = RetryPolicy(attempts=300, first_wait=0.01, longest_wait=0.3, read=STUCK)
VERDICT_TYPE = "application/vnd.imagefactory.verdict.v1+json"
RECIPE = f"""\
family: one
description: For tests of promotion
source: pypi
framework: nvidia-cuda-runtime-cu12
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: [{", ".join(f'"{one}"' for one in CAPABILITIES)}]
checks: [packages]
matrix:
  - version: "12.1"
    cuda: ["12.1"]
"""


@dataclass(frozen=True)
class Machine:
    """One of the promoters: its store, and the capability of its GPU, which is made up."""

    factory: Project
    capability: str
    registry: RegistryClient

    @property
    def journal(self) -> AttachJournal:
        return AttachJournal(self.factory.layout.path)

    def statement(self, subject: VerifiedImage, place: StoreRepository, now: datetime) -> SignedStatement:
        gpu = replace(MADE_UP, capability=self.capability)
        report = whole_report(
            subject=subject,
            suite=suite_digest(),
            nonce=(subject.manifest[7:30] + self.capability.replace(".", "")).ljust(32, "0"),
            started=now - timedelta(minutes=2),
            ended=now - timedelta(minutes=1),
            device=gpu,
            hardware=replace(HOST, gpus=(gpu,)),
        )
        there = place.store.manifest(place.repository, subject.manifest)
        assert there is not None
        signed = sign(report, LAB, now=now, days=90)
        return SignedStatement(
            kind=VERDICT_TYPE, subject=there[0], envelope=signed.envelope, until=signed.verdict.expires
        )


@pytest.fixture
def memory_registry(tmp_path: Path) -> Iterator[str]:
    """docker-registry with its storage in memory: its requests wait for each other, not for a disk."""
    with registry_server(tmp_path / "registry", ServedOptions(size=256 * 2**20)) as server:
        yield server.host


@pytest.fixture
def machines(memory_registry: str, tmp_path: Path) -> list[Machine]:
    root = tmp_path / "root"
    (root / "recipes").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "bases.yaml", root / "recipes")
    (root / "recipes" / "one.yaml").write_text(RECIPE)
    today = datetime.now(UTC).date()
    grant = TrustGrant(
        key=PublicKey(name="lab", raw=LAB.public),
        since=today - timedelta(days=1),
        until=today + timedelta(days=9),
    )
    write_settings(root, add_key("", grant, "imagefactory.toml"), {"HOME": str(tmp_path)})
    found = []
    for capability in CAPABILITIES:
        environ = {"IMAGEFACTORY_STORE": str(tmp_path / capability), "HOME": str(tmp_path)}
        settings = load_settings(directory=root, start=root, environ=environ)
        client = RegistryClient(memory_registry, RegistryOptions(retry_policy=STUBBORN))
        found.append(Machine(load_project(settings, environ), capability, client))
    return found


def put_image(place: StoreRepository, machine: Machine, content: str) -> str:
    """An image under its candidate's tag; gives the index's digest."""
    data = image_manifest(place.store, place.repository, content.encode())
    manifest = place.store.put_manifest(place.repository, data, MANIFEST_TYPE)
    index = place.store.put_manifest(place.repository, image_index(manifest), INDEX_TYPE)
    tag = candidate_tag(machine.factory.targets[0], index.digest)
    place.store.put_manifest(place.repository, image_index(manifest), INDEX_TYPE, tag)
    return index.digest


def test_nothing_stays_lost(machines: list[Machine]) -> None:
    lost = told = 0
    for number in range(ROUNDS):
        repository = f"promoters/{number}/one"
        place = StoreRepository(store=machines[0].registry, repository=repository)
        image, now = put_image(place, machines[0], f"round {number}"), datetime.now(UTC)
        subject = replace(read_subject(place, image), target="one-12.1-cu121")
        statements = {one.capability: one.statement(subject, place, now) for one in machines}
        start = threading.Barrier(PROMOTERS)

        def go(machine: Machine) -> bool:
            mine = StoreRepository(store=machine.registry, repository=repository)  # noqa: B023
            with writing(machine.factory, mine, QUIET) as journal:
                start.wait(STUCK)  # noqa: B023
                try:
                    attach(mine, statements[machine.capability], journal)  # noqa: B023
                except RegistryError as error:
                    assert "keep overwriting" in error.message  # noqa: PT017
                    return False
            if number < PROMOTING_ROUNDS:  # noqa: B023
                _promote(machine, mine)
            return True

        with ThreadPoolExecutor(PROMOTERS) as pool:
            told += list(pool.map(go, machines)).count(False)
        wanted = {one.artifact.manifest.descriptor.digest for one in statements.values()}
        listed = {one.digest for one in place.store.referrers(repository, subject.manifest)}
        assert listed <= wanted
        lost += len(wanted - listed)
        for machine in machines:
            mine = StoreRepository(store=machine.registry, repository=repository)
            done = repair_referrers(mine, machine.journal, (), now)
            assert len(done.repaired) + done.listed == 1
            assert done.damaged == 0
        assert {one.digest for one in place.store.referrers(repository, subject.manifest)} == wanted
        if number < PROMOTING_ROUNDS:
            promote(machines[0].factory, _promoting(machines[0], place), QUIET)
            names = ("12.1-cu121", *(f"12.1-cu121-sm{one.replace('.', '')}" for one in CAPABILITIES))
            there = {name: place.store.manifest(repository, name) for name in names}
            assert {name: found and found[0].digest for name, found in there.items()} == dict.fromkeys(
                names, image
            )
    print(f"{ROUNDS * PROMOTERS} attached at once, {lost} lost by the lists until reconcile, {told} told so")


def _promoting(machine: Machine, place: StoreRepository) -> PromotionRequest:
    return PromotionRequest(target=machine.factory.targets[0], place=place, now=datetime.now(UTC))


def _promote(machine: Machine, place: StoreRepository) -> None:
    try:
        promote(machine.factory, _promoting(machine, place), QUIET)
    except RegistryError as error:
        assert error.code == "tags-contended"  # noqa: PT017
