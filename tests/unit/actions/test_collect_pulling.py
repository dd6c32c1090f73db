"""What a person reads where a machine could not pull an image: from the job's log, and from the registry."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from imagefactory.actions.collect import AnonymousPullCheck
from imagefactory.errors import RegistryError
from imagefactory.model import Outcome
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    canonical_json,
    digest_of,
    format_descriptor,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.project import Project
from imagefactory.schedulers.htcondor.results import (
    CUT,
    NodeFiles,
    PostScriptResult,
    classify,
    parse_attempts,
)
from imagefactory.schedulers.pool import ImageKind, JobLimits, SweepNode
from imagefactory.trust.attached import MAX_REJECTED
from tests.made.pool import aborted, executing, failed_start, held, node, submitted, terminated
from tests.made.registry import RegistryMadeHere, Ways, registry_made_here

IMAGE = f"docker://registry.example.org/gpu/tiny@sha256:{'d' * 64}"
FILE = IMAGE.replace("docker", "oras")
CA = (
    'pinging container registry registry.example.org: Get "https://registry.example.org/v2/": tls: failed to '
    "verify certificate: x509: certificate signed by unknown authority"
)
MACHINE = "gpu01.example.org"


def said(address: str, why: str) -> str:
    """Apptainer 1.4's last line where it cannot have an image."""
    return f"FATAL:   Unable to handle {address} uri: failed to get checksum for {address}: {why}"


def words(log: str, err: str = "") -> tuple[Outcome | None, str]:
    now = datetime.now(UTC)
    found = parse_attempts((submitted() + log).encode(), now, lambda naive: naive.replace(tzinfo=UTC))
    posted = PostScriptResult(job="12.0", again=True, left=False, why="")
    return classify(found, NodeFiles(broken=True, err=err, posted=posted), JobLimits())


@pytest.mark.parametrize("address", [IMAGE, FILE])
def test_htcondor_cuts_the_reason_off(address: str) -> None:
    cut = said(address, CA)[:255]
    assert CA[:3] not in cut
    assert words(executing() + failed_start(cut) + aborted()) == (
        Outcome.PULL_FAILED,
        f"{MACHINE} could not pull {address}: {CUT}",
    )


def test_what_it_did_not_cut_is_the_reason() -> None:
    short = "docker://a.io/x@sha256:ef"
    assert words(executing() + failed_start(said(short, "manifest unknown")) + aborted()) == (
        Outcome.PULL_FAILED,
        f"{MACHINE} could not pull {short}: manifest unknown",
    )
    other = f"FATAL:   Unable to handle {IMAGE} uri: while building SIF from layers: no space left on device"
    assert words(executing() + failed_start(other) + aborted())[1].endswith(
        ": while building SIF from layers: no space left on device"
    )
    assert words(executing() + held(45, f"Singularity test failed:{said(short, 'denied')}") + aborted()) == (
        Outcome.PULL_FAILED,
        f"held (45): {MACHINE} could not pull {short}: denied",
    )


def test_a_pool_that_does_not_try_images_before_tells_it_whole() -> None:
    """SINGULARITY_RUN_TEST_BEFORE_JOB = False: the job itself ends with 255, and its stderr comes back."""
    assert words(executing() + terminated(255), said(IMAGE, CA)) == (
        Outcome.PULL_FAILED,
        f"{MACHINE} could not pull {IMAGE}: {CA}",
    )
    outcome, reason = words(executing() + terminated(255), "FATAL: stat /opt/env: no such file or directory")
    assert outcome is Outcome.INFRASTRUCTURE
    assert "exit code 255: FATAL: stat /opt/env" in reason


# --- the registry, asked ---------------------------------------------------------------------------


def put(host: str) -> str:
    """A manifest in `gpu/tiny`; its digest."""
    registry, config = RegistryClient(host), b"{}"
    one = Descriptor(media_type=CONFIG_TYPE, digest=digest_of(config), size=len(config))
    registry.write("gpu/tiny", one, lambda offset: iter((config[offset:],)))
    parts = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": format_descriptor(one), "layers": []}
    return registry.put_manifest("gpu/tiny", canonical_json(parts), MANIFEST_TYPE).digest


def of(host: str, digest: str, kind: ImageKind = ImageKind.DOCKER) -> SweepNode:
    one = node()
    return replace(one, image=replace(one.image, kind=kind, address=f"{kind}://{host}/gpu/tiny@{digest}"))


@pytest.mark.parametrize("kind", [ImageKind.DOCKER, ImageKind.ORAS])
def test_what_is_there_is_the_machines_own_fault(
    factory: Project,
    registry: RegistryMadeHere,
    kind: ImageKind,
) -> None:
    mine = of(registry.host, put(registry.host), kind)
    told = AnonymousPullCheck(factory).explain(mine)
    assert told.startswith(f"{registry.host} has the image")
    assert f"`apptainer pull {mine.image.address}`" in told


def test_what_is_gone_is_told(factory: Project, registry: RegistryMadeHere) -> None:
    told = AnonymousPullCheck(factory).explain(of(registry.host, f"sha256:{'d' * 64}"))
    assert told == f"{registry.host} no longer has this image: a new sweep sends it again"


def test_it_asks_as_a_job_would_without_a_password(factory: Project) -> None:
    with registry_made_here(Ways(auth="basic")) as made:
        told = AnonymousPullCheck(factory).explain(of(made.host, f"sha256:{'d' * 64}"))
    assert re.match(r"not readable from this machine without a password: .* 401 ", told), told


def test_each_is_asked_once_and_a_registry_that_refuses_not_for_all(
    factory: Project,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def refuse(_: RegistryClient, repository: str, wanted: str) -> None:
        asked.append(wanted)
        raise RegistryError("registry-unreachable", "it is down")

    monkeypatch.setattr(RegistryClient, "manifest", refuse)
    asker = AnonymousPullCheck(factory)
    digests = [f"sha256:{number:064x}" for number in range(9)]
    told = {asker.explain(of("127.0.0.1:1", digest)) for digest in [*digests, *digests]}
    assert told == {"not readable from this machine without a password: it is down"}
    assert asked == digests[:MAX_REJECTED]


def test_a_file_has_no_registry(factory: Project) -> None:
    one = node()
    file = replace(one, image=replace(one.image, kind=ImageKind.SIF, address="/shared/tiny.sif"))
    assert AnonymousPullCheck(factory).explain(file) == ""
