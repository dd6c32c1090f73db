"""Submit files in every form of every site, as HTCondor reads them: taken without a warning, and matched.

Verdicts are made up and signed by a throwaway key that this researcher trusts; no job is submitted.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.oci.manifests import digest_of
from imagefactory.oci.sif import sif_name
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import SITES, Site
from imagefactory.settings.choices import HTCONDOR
from imagefactory.trust.catalog import LIFE, CatalogImage, Envelopes, sign_catalog
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import VerifiedImage
from tests.made.catalog import make_catalog, make_image
from tests.made.verdicts import HOST, LAB, MADE_UP, SUITE, digest, whole_report
from tests.services.condor import CondorPool

HOUR = timedelta(hours=1)
OWN = tuple(site for site in SITES if site.batch == HTCONDOR)
DRIVERS = {"12.2": "535.54.03", "12.4": "550.54.15", "13.0": "580.65.06"}
FILE = b"what the tests call a .sif"
FLOORS = [("7.0", "12.2"), ("8.0", "12.4")]
# (capability, CUDA of the driver) of verdicts; the machines have 7.0 with 12.2, and 7.5, 8.0, 9.0 with 12.4.
OFFERED: Mapping[str, tuple[Sequence[tuple[str, str]], set[str]]] = {
    "one-1.0-cu121": ([("8.0", "12.4")], {"a100"}),
    "hole-1.0-cu121": ([("7.5", "12.4"), ("8.0", "12.4"), ("9.0", "12.4")], {"full", "a100", "standin"}),
    "floors-1.0-cu121": (FLOORS, {"v100", "a100"}),
    "newer-1.0-cu121": ([("7.0", "12.4"), ("8.0", "13.0")], set()),  # every driver is too old
    "range-1.0-cu121": ([("7.5", "12.4"), ("8.0", "12.4")], {"full", "a100"}),
}
FILED = "filed-1.0-cu121"


def verdicts(subject: VerifiedImage, classes: Sequence[tuple[str, str]], now: datetime) -> Envelopes:
    made = []
    for number, (capability, cuda) in enumerate(classes, start=1):
        device = replace(MADE_UP, capability=capability)
        report = whole_report(
            subject=subject,
            device=device,
            hardware=replace(HOST, driver=DRIVERS[cuda], gpus=(device,)),
            cuda=cuda,
            nonce=hashlib.sha256(f"{subject} {number}".encode()).hexdigest()[:32],
            started=now - 3 * HOUR,
            ended=now - 2 * HOUR,
        )
        made.append((digest(str(number)), sign(report, LAB, now=now - HOUR, days=30).envelope))
    return tuple(made)


def image_of(name: str, classes: Sequence[tuple[str, str]], now: datetime) -> CatalogImage:
    """An image in a registry; `FILED` has a .sif too, which alone is verified."""
    index = digest_of(name.encode())
    subject = VerifiedImage(target=name, index=index, manifest=index, config=digest("c"))
    image = make_image(
        target=name, subject=subject, reference=f"registry.example.org/gpu/tiny@{index}", sifs=()
    )
    if name != FILED:
        return replace(image, envelopes=verdicts(subject, classes, now))
    of_file = VerifiedImage(target=name, index=digest("6"), manifest=digest("6"), config=digest_of(FILE))
    sif = replace(
        make_image().sifs[0],
        sha256=of_file.config,
        size=len(FILE),
        subject=of_file,
        reference=f"registry.example.org/gpu/tiny@{digest('6')}",
        envelopes=verdicts(of_file, classes, now),
    )
    return replace(image, sifs=(sif,), envelopes=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """A researcher's folder, with settings that name a catalog and whom he trusts."""

    pool: CondorPool
    folder: Path

    def submit(self, *arguments: str, place: str = "") -> None:
        self.pool.imagefactory(
            "job",
            "write",
            *arguments,
            "--force",
            "-o",
            "made.sub",
            folder=self.folder,
            XDG_CONFIG_HOME=self.pool.there(self.folder / "config"),
            IMAGEFACTORY_SIF_FOLDER=place,
        )

    def ad(self) -> Mapping[str, str]:
        """The job that condor_submit would make of it, without a warning."""
        done = self.pool.run(["condor_submit", "-dry-run", "-", "made.sub"], folder=self.folder)
        assert "WARNING" not in done.stdout + done.stderr, done
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if re.match(r"[A-Za-z]+=", line))

    def matched(self, *asked_of: str) -> set[str]:
        """The machines with a GPU that the job takes, in HTCondor's own opinion; of the pool, or of ads."""
        ad = self.ad()
        wanted = re.sub(r"\bGPUs(?:Min|Max)[A-Za-z]+", lambda found: ad[found[0]], ad["RequireGPUs"])
        asked = ["condor_status", *asked_of, "-af", "Machine", "-constraint"]
        asked.append(f"countMatches({wanted}, AvailableGPUs) >= 1")
        told = self.pool.run(asked, folder=self.folder).stdout
        return {machine.partition(".")[0] for machine in told.split()}


@pytest.fixture(scope="module")
def desk(pool: CondorPool) -> Desk:
    now = datetime.now(UTC).replace(microsecond=0)
    images = [image_of(name, classes, now) for name, (classes, _) in OFFERED.items()]
    catalog = make_catalog(
        *images, image_of(FILED, FLOORS, now), created=now - HOUR, expires=now - HOUR + LIFE, suites=(SUITE,)
    )
    folder = pool.home / "forms"
    settings = folder / "config/imagefactory"
    settings.mkdir(parents=True)
    files = {
        "catalog": sign_catalog(catalog, LAB),
        "train.sh": b"#!/bin/sh\n",
        "data.csv": b"1\n",
        sif_name(FILED, digest_of(FILE)): FILE,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (settings / "imagefactory.toml").write_text(
        f'catalog = "{pool.there(folder / "catalog")}"\n\n[[trust]]\nname = "lab"\n'
        f'keyid = "{LAB.keyid}"\npublic = "{base64.b64encode(LAB.public).decode()}"\n'
        f"from = {now - timedelta(days=9):%Y-%m-%d}\nuntil = {now + timedelta(days=99):%Y-%m-%d}\n"
    )
    pool.own(folder)
    return Desk(pool=pool, folder=folder)


@pytest.mark.parametrize("name", OFFERED)
def test_images_of_a_registry_match_the_gpus_that_are_proven(desk: Desk, name: str) -> None:
    desk.submit(name)
    assert desk.matched() == OFFERED[name][1]


@pytest.mark.parametrize("name", ["one-1.0-cu121", "floors-1.0-cu121"])
def test_memory_of_gpus_narrows_either_form(desk: Desk, name: str) -> None:
    desk.submit(name, "--gpu-memory", "8GB")
    assert desk.matched() == OFFERED[name][1]
    desk.submit(name, "--gpu-memory", "500GB")
    assert desk.matched() == set()


@pytest.mark.parametrize("name", ["one-1.0-cu121", "floors-1.0-cu121"])
def test_slices_of_gpus_match_where_somebody_asks_for_them_alone(desk: Desk, name: str) -> None:
    ads = [
        f'MyType = "Machine"\nName = "slot1@{machine}"\nMachine = "{machine}"\nAvailableGPUs = {{ GPUs_1 }}\n'
        f"GPUs_1 = [ Capability = 8.0; {model} DriverVersion = 12.4; MaxSupportedVersion = 12040 ]\n"
        for machine, model in (
            ("whole", 'DeviceName = "NVIDIA A100-SXM4-40GB";'),
            ("slice", 'DeviceName = "NVIDIA A100-SXM4-40GB MIG 1g.5gb";'),
            ("nameless", ""),
        )
    ]
    (desk.folder / "ads").write_text("\n".join(ads))
    desk.submit(name)
    assert desk.matched("-ads", "ads") == {"whole", "nameless"}
    desk.submit(name, "--allow-mig")
    assert desk.matched("-ads", "ads") == {"whole", "slice", "nameless"}


@pytest.mark.parametrize(
    ("site", "kind"),
    [pytest.param(site, kind, id=f"{site.name}-{kind}") for site in OWN for kind in site.kinds],
)
def test_condor_submit_takes_every_form_of_every_site(desk: Desk, site: Site, kind: ImageKind) -> None:
    target = "floors-1.0-cu121" if kind is ImageKind.DOCKER else FILED
    place = "osdf:///chtc/staging/images" if kind is ImageKind.OSDF else ""
    arguments = """--lr 0.1 "it's a" '$(Process)'"""
    desk.submit(
        target,
        *("--site", site.name, "--image-format", kind, "--time", "9h"),
        *(
            "--executable",
            "train.sh",
            "--arguments",
            arguments,
            "--input",
            "data.csv",
            "--output-file",
            "model.pt",
        ),
        place=place,
    )
    ad = desk.ad()
    assert ad["Arguments"].strip('"') == "--lr 0.1 it''''s' 'a 0"
    assert ad["ContainerImage"].strip('"').partition("://")[0] in (
        "docker",
        "oras",
        sif_name(FILED, digest_of(FILE)),
    )
    assert ("WantGPULab" in ad) == (site.name == "chtc")
    assert ("JobDurationCategory" in ad) == (site.name == "ospool")
    assert ("HasCHTCStaging" in ad["Requirements"]) == (site.name == "chtc" and kind is ImageKind.OSDF)
    assert desk.matched() == {"v100", "a100"}


def test_a_file_that_machines_share_is_not_sent(desk: Desk) -> None:
    desk.submit(FILED, "--image-format", "sif", place="/shared/images")
    ad = desk.ad()
    assert ad["TransferContainer"] == "false"
    assert "TransferInput" not in ad
    assert ad["ContainerImage"] == f'"/shared/images/{sif_name(FILED, digest_of(FILE))}"'
