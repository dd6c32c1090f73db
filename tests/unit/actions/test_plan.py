"""What a plan learns of the store: an image is unchanged while it is what its lock and its base give."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.plan import PlanLookup, read_stages
from imagefactory.actions.transfer import PushOptions, explain_no_candidate, push_target
from imagefactory.build.base import image as base_image
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import InstalledPackage
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.matrix.plan import CellState, PlanGpu, PlanInput, TargetStatus, make_plan
from imagefactory.model import Target
from imagefactory.oci.candidates import (
    CREATED,
    INPUTS_LABEL,
    PUSHED_TYPE,
    RECORD_MAC,
    REVOCATION_TYPE,
    read_pushed,
    read_records,
)
from imagefactory.oci.graph import StoreRepository, make_artifact, put_artifact, read_manifest
from imagefactory.oci.layout import Layout, LayoutStore, reference
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.scan.findings import FileFinding
from imagefactory.scan.layers import RECORDS, LayerScan, format_scan
from imagefactory.settings.load import NONCE_STORE_KEY
from imagefactory.trust.attached import SignedStatement, attach, read_subject
from imagefactory.trust.judgement import RevocationRequest, sign_revocation
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.kits import program_checksum
from tests.made.command import Call
from tests.made.factory import NAME
from tests.made.layout import add_image
from tests.made.pushed import SHARED_KEY, elsewhere, push, put_base, put_built, verdict_on
from tests.made.registry import RegistryMadeHere
from tests.made.trusted import trust
from tests.made.verdicts import LAB, NOW


def stage(factory: Project, target: Target, registry: str = "") -> TargetStatus:
    (found,) = read_stages(factory, [target], PlanLookup(now=NOW, registry=registry))
    return found


def test_an_empty_store_is_looked_at_and_not_made(factory: Project, target: Target) -> None:
    found = stage(factory, target)
    assert (found.missing, found.block, found.image) == ("not in the store", "", "")
    assert found.lock is not None
    assert not factory.layout.path.exists()


def test_the_image_of_the_lock_and_the_base_is_unchanged(factory: Project, target: Target) -> None:
    put_base(factory, target)
    digest = put_built(factory, target)
    found = stage(factory, target)
    assert (found.missing, found.image) == ("", digest)


def test_what_was_scanned_of_the_image_is_the_evidence(factory: Project, target: Target) -> None:
    put_base(factory, target)
    put_built(factory, target)
    layout = factory.layout
    assert stage(factory, target).evidence.contents is None
    image = layout.image(reference(target))
    assert image is not None
    (layer,) = image.layers
    package = InstalledPackage(name="torch", version="2.3.1")
    scan = LayerScan(findings=(FileFinding(path="torch-2.3.1.dist-info", package=package),))
    layout.record(RECORDS, layout.blob_path(layer.descriptor.digest).name, format_scan(scan))
    contents = stage(factory, target).evidence.contents
    assert contents is not None
    assert contents.packages == (package,)


def test_an_image_of_something_else_under_the_targets_name_is_built_anew(
    factory: Project, target: Target
) -> None:
    put_base(factory, target)
    add_image(factory.layout, reference(target), [b"another"])
    assert stage(factory, target).missing == "the image in the store is not what assemble makes of the lock"


def test_a_lost_layer_is_built_anew(factory: Project, target: Target) -> None:
    put_base(factory, target)
    put_built(factory, target)
    layout = factory.layout
    layout.blob_path(layout.add(b"layer", "x").digest).unlink()
    assert stage(factory, target).missing


def test_a_base_that_moved_on_changes_its_images(factory: Project, target: Target) -> None:
    put_base(factory, target)
    put_built(factory, target)
    path = factory.base_lock_path(factory.base_of(target))
    lock = read_base_lock(path)
    assert lock is not None
    first = replace(lock.packages[0], sha256="0" * 64)
    path.write_text(base_image.format_base_lock(replace(lock, packages=(first, *lock.packages[1:]))))
    assert stage(factory, target).missing == "the image in the store is not what assemble makes of the lock"


def test_a_base_that_was_made_anew_changes_its_images(factory: Project, target: Target) -> None:
    put_base(factory, target)
    put_built(factory, target)
    put_base(factory, target, b"another")
    assert stage(factory, target).missing


def test_a_light_install_says_that_it_cannot_compare(
    factory: Project, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_image(factory.layout, reference(target), [b"pulled"])

    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard")

    monkeypatch.setattr("imagefactory.actions.plan.find_built", missing)
    found = stage(factory, target)
    assert found.missing == "the image in the store cannot be compared without zstandard"
    assert not found.block


def test_a_base_without_a_lock_blocks(factory: Project, target: Target) -> None:
    factory.base_lock_path(factory.base_of(target)).unlink()
    found = stage(factory, target)
    assert found.block == f"the lock of base {target.base}: none"
    assert found.hint == f"run imagefactory lock base:{target.base}"


def test_a_stale_lock_blocks(factory: Project, target: Target) -> None:
    stale = replace(target, requirements=(*target.requirements, "six"))
    found = stage(factory, stale)
    assert "is outdated" in found.block
    assert found.lock is None
    assert found.hint == f"run imagefactory lock {NAME}"


def test_layouts_of_others_are_not_touched(factory: Project, target: Target) -> None:
    put_base(factory, target)
    before = sorted(factory.layout.path.rglob("*"))
    stage(factory, target)
    assert sorted(Layout(factory.layout.path).path.rglob("*")) == before


# --- candidates and verdicts of a registry --------------------------------------------------------


def test_an_empty_store_finds_the_candidate_of_its_lock_in_the_registry(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str, tmp_path: Path
) -> None:
    bare = elsewhere(factory, tmp_path)
    assert stage(bare, target).missing == "not in the store"
    found = stage(bare, target, registry.host)
    assert (found.missing, found.image, found.verdicts) == ("", pushed, ())
    assert found.reference == f"{registry.host}/pytorch@{pushed}"
    assert not bare.layout.path.exists()
    for key in ("", SHARED_KEY.upper()):  # anyone who may push can write a record
        other = replace(bare, environ={**bare.environ, NONCE_STORE_KEY: key})
        assert stage(other, target, registry.host).missing
    assert stage(factory, target, registry.host).image == pushed  # this store knows what it pushed


def test_a_push_with_the_key_makes_an_earlier_one_count_elsewhere(
    factory: Project, target: Target, registry: RegistryMadeHere, tmp_path: Path
) -> None:
    put_base(factory, target)
    index = put_built(factory, target)
    other, place = (
        elsewhere(factory, tmp_path),
        StoreRepository(store=RegistryClient(registry.host), repository="pytorch"),
    )
    push_target(factory, target, PushOptions(now=NOW, registry=registry.host), QuietProgress())
    assert stage(other, target, registry.host).missing
    counts = []
    for _ in range(2):
        push(factory, target, registry)
        assert stage(other, target, registry.host).image == index
        counts.append(len(read_records(place, index)))
    assert counts == [2, 2]


def test_a_record_that_speaks_of_another_image_counts_for_nothing(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str, tmp_path: Path
) -> None:
    """The MAC of a true record is public."""
    put_base(factory, target)
    place = StoreRepository(store=RegistryClient(registry.host), repository="pytorch")
    forged = add_image(factory.layout, reference(target), [b"made by someone else"])
    index = push(factory, target, registry)
    assert index == forged.digest != pushed
    (row,) = read_records(place, pushed)
    for change in ({}, {CREATED: "2027-01-01T00:00:00Z"}):
        put_artifact(place, make_artifact(PUSHED_TYPE, forged, {**row, **change}))
    assert stage(elsewhere(factory, tmp_path), target, registry.host).image == pushed
    assert len(read_records(place, index)) == 3
    assert all(INPUTS_LABEL not in one for one in read_records(place, index, key=SHARED_KEY))


def test_a_registry_without_that_candidate_has_it_built(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str
) -> None:
    path = factory.base_lock_path(factory.base_of(target))
    lock = read_base_lock(path)
    assert pushed
    assert lock is not None
    first = replace(lock.packages[0], sha256="0" * 64)
    path.write_text(base_image.format_base_lock(replace(lock, packages=(first, *lock.packages[1:]))))
    missing = stage(factory, target, registry.host).missing
    place = StoreRepository(store=RegistryClient(registry.host), repository="pytorch")
    assert missing == explain_no_candidate(factory, place)
    assert NONCE_STORE_KEY in missing
    assert NONCE_STORE_KEY not in explain_no_candidate(
        replace(factory, environ={NONCE_STORE_KEY: "k" * 64}), place
    )


def test_an_image_that_is_not_of_the_lock_says_of_none(
    factory: Project, target: Target, registry: RegistryMadeHere
) -> None:
    put_base(factory, target)
    add_image(factory.layout, reference(target), [b"another"])
    index = push(factory, target, registry)
    place = StoreRepository(store=RegistryClient(registry.host), repository="pytorch")
    assert [sorted(row) for row in read_records(place, index)] == [[RECORD_MAC, CREATED]]
    assert stage(factory, target, registry.host).missing


def test_a_candidate_that_was_there_before_says_what_it_is_of_and_grows_no_younger(
    factory: Project, target: Target, registry: RegistryMadeHere
) -> None:
    put_base(factory, target)
    name = reference(target)
    descriptor = add_image(factory.layout, name, [b"layer"])  # nobody knows yet what it was made of
    index = push(factory, target, registry)
    assert stage(factory, target, registry.host).missing
    assert put_built(factory, target) == descriptor.digest == index
    for _ in range(2):
        assert push(factory, target, registry, NOW + timedelta(days=30)) == index
    place = StoreRepository(store=RegistryClient(registry.host), repository="pytorch")
    records = read_records(place, index)
    assert len(records) == 2
    assert read_pushed(records) == NOW
    assert stage(factory, target, registry.host).image == index


def test_a_verdict_there_leaves_nothing_to_do_until_it_expires(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str, tmp_path: Path
) -> None:
    bare = elsewhere(factory, tmp_path)
    verdict_on(factory, StoreRepository(store=RegistryClient(registry.host), repository="pytorch"), pushed)

    def state(now: datetime, driver: str = "") -> CellState:
        found = read_stages(bare, [target], PlanLookup(now=now, registry=registry.host))
        a100 = PlanGpu(capability=Capability(8, 0), driver=driver)
        return make_plan(PlanInput(stages=found, devices=(a100,))).targets[0].state

    assert state(NOW) is CellState.UNCHANGED
    assert state(NOW, "550.54.15") is CellState.UNCHANGED
    assert state(NOW, "535") is CellState.VERIFY
    assert state(NOW + timedelta(days=91)) is CellState.VERIFY


def test_a_plan_asks_the_registry_of_the_settings_beside_the_store(
    call: Call, factory: Project, target: Target, registry: RegistryMadeHere, pushed: str, tmp_path: Path
) -> None:
    toml = factory.settings.root_path / "imagefactory.toml"
    toml.write_text(f'registry = "{registry.host}"\n{toml.read_text()}')
    trust(factory.settings.root_path)
    gpus = tmp_path / "gpus.yaml"
    gpus.write_text('- capability: "8.0"\n')

    def plan(code: int = 0) -> tuple[str, str, str, str]:
        said = call("plan", NAME, "--inventory", str(gpus), "--json", root=factory.settings.root_path)
        assert said.code == code, said
        (row,) = json.loads(said.out)["targets"]
        return row["status"], row["image"], row["reference"], said.err

    assert plan()[:3] == ("verify", pushed, f"{registry.host}/pytorch@{pushed}")
    shelves = registry.shelves.repositories.copy()
    registry.shelves.repositories.clear()
    assert plan()[:3] == ("verify", pushed, "")  # the store has it
    registry.shelves.repositories.update(shelves)
    registry.fault = lambda _: "403"
    state, image, reference, err = plan()
    assert (state, image, reference) == ("verify", pushed, "")
    assert "403" in err


def test_what_the_store_or_the_registry_knows_to_be_revoked_is(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str
) -> None:
    asking = PlanLookup(now=NOW, also=registry.host)
    there = StoreRepository(store=RegistryClient(registry.host), repository="pytorch")
    here = StoreRepository(store=LayoutStore(factory.layout), repository="")
    for place in (there, here):
        verdict_on(factory, place, pushed)
    (found,) = read_stages(factory, [target], asking)
    assert [one.standing for one in found.verdicts] == [VerdictStatus.GOOD]
    subject = replace(read_subject(here, pushed), target=NAME)
    back = sign_revocation(RevocationRequest(subject=subject, why="a bad night"), LAB, NOW)
    manifest = read_manifest(here, subject.manifest).descriptor
    attach(here, SignedStatement(kind=REVOCATION_TYPE, subject=manifest, envelope=back))
    (found,) = read_stages(factory, [target], asking)
    assert [one.standing for one in found.verdicts] == [VerdictStatus.REVOKED]


def test_a_verdict_that_nobody_trusts_changes_nothing(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str
) -> None:
    verdict_on(factory, StoreRepository(store=RegistryClient(registry.host), repository="pytorch"), pushed)
    assert stage(factory, target, registry.host).verdicts[0].proves
    (factory.settings.root_path / "imagefactory.toml").write_text("")
    assert stage(factory, target, registry.host).verdicts == ()


def test_plan_inspect_and_compat_show_what_was_verified_in_the_image_of_the_store(
    call: Call,
    factory: Project,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_base(factory, target)
    layout, index = factory.layout, put_built(factory, target)
    image = layout.image(reference(target))
    assert image is not None
    (layer,) = image.layers
    package = InstalledPackage(name="torch", version="2.3.1")
    scan = LayerScan(findings=(FileFinding(path="torch-2.3.1.dist-info", package=package),))
    layout.record(RECORDS, layout.blob_path(layer.descriptor.digest).name, format_scan(scan))
    verdict_on(factory, StoreRepository(store=LayoutStore(layout), repository=""), index, datetime.now(UTC))
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(layout.path))
    trust(factory.settings.root_path)
    run = functools.partial(call, root=factory.settings.root_path)
    proof = "passed the quick suite on A GPU of the tests, driver 550.54.15"
    said = run("compat", "--scan", NAME)
    assert re.search(rf"^  verified +8.0: yes \(verified\): {proof}", said.out, re.MULTILINE)
    answer = run("compat", "--scan", NAME, "--capability", "8.0")
    assert (answer.code, f"{NAME} on 8.0: yes (verified): {proof}" in answer.out) == (0, True)
    older = run("compat", "--scan", NAME, *["--capability", "8.0", "--driver", "535", "--json"])
    assert older.json()["gpus"][0]["verified"] is None
    (row,) = run("compat", NAME, "--capability", "8.0", "--json").json()["rows"]
    assert row["cells"][0]["claims"][0]["basis"] == "verified"
    table = run("compat", NAME, "--capability", "8.0").out
    assert re.search(rf"yes .*verified  +550.54.15  {proof}", table)
    gpus = factory.settings.root_path / "gpus.yaml"
    gpus.write_text('- capability: "8.0"\n')
    plan = run("plan", NAME, "--inventory", str(gpus))
    assert f"{NAME}  unchanged" in plan.out
    assert "verified to run" in plan.out


def test_the_jobs_of_a_registrys_plan_name_kits_runners_and_candidates(
    call: Call,
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
    pushed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(tmp_path / "empty"))
    monkeypatch.setenv(NONCE_STORE_KEY, SHARED_KEY)
    gpus = tmp_path / "gpus.yaml"
    gpus.write_text('- {name: A100, driver: "535.54.03"}\n- capability: "7.0"\n')
    words = ("plan", NAME, "--inventory", str(gpus), "--registry", registry.host)
    plan = functools.partial(call, *words, root=factory.settings.root_path)
    said = plan("--github")
    *lines, program = said.out.splitlines()
    matrix, targets = (json.loads(line.partition("=")[2])["include"] for line in lines)
    assert program == f"program={program_checksum()}"
    assert [(job["kit"], job["runner"], job["status"]) for job in matrix] == [
        ("sm80-a100-535.54.03", "sm80", "verify"),
        ("sm70", "sm70", "verify"),
    ]
    kits = "8.0/sm80-a100-535.54.03 7.0/sm70"
    assert targets == [{"target": NAME, "status": "verify", "digest": pushed, "gpu": "nvidia", "kits": kits}]
    value = plan("--json").json()
    assert value["targets"][0]["reference"] == f"{registry.host}/pytorch@{pushed}"
    registry.shelves.repositories.clear()
    said = plan("--github")
    (job,) = json.loads(said.out.splitlines()[1].partition("=")[2])["include"]
    assert job == {"target": NAME, "status": "build", "digest": "", "gpu": "nvidia", "kits": kits}
