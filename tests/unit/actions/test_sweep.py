"""Sweeps from targets to verdicts: made once, left and picked up, each node signed once. The pool is made up,
and so are its GPUs; the keys are thrown away with the test.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions import collect
from imagefactory.actions.collect import (
    PendingNode,
    SignedNode,
    SweepResult,
    VerdictAttacher,
    collect_sweep,
)
from imagefactory.actions.store import collect_sweeps
from imagefactory.actions.sweep import (
    SweepDependencies,
    SweepOptions,
    find_sweeps,
    make_sweep,
    prepare_sweep,
    read_status,
    read_submitted,
    submit_sweep,
)
from imagefactory.actions.sweep_images import choose_container, choose_image_type
from imagefactory.actions.verdicts import (
    ANY,
    find_in,
    local_place,
    nonce_store,
    read_verification_policy,
    registry_of,
)
from imagefactory.actions.verify import CollectOptions
from imagefactory.cli import sweeps
from imagefactory.errors import (
    BuildError,
    NothingSelectedError,
    RegistryError,
    StoreError,
    ToolError,
    UsageError,
)
from imagefactory.model import Outcome
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.layout import LayoutStore
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.schedulers.cells import CellRequest
from imagefactory.schedulers.pool import ImageKind, JobLimits, NodeResult, PoolMachine
from imagefactory.schedulers.sweep_file import CollectedNode, read_collected, read_sweep, write_collected
from imagefactory.settings.choices import HTCONDOR, SettingValue
from imagefactory.settings.load import NONCE_STORE_KEY
from imagefactory.trust import attached
from imagefactory.trust.attached import MAX_REJECTED, SignedStatement, put_statement
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.nonces import NonceStore
from imagefactory.verify.report import VerifiedImage
from tests.made.command import run
from tests.made.errors import fails
from tests.made.factory import NAME
from tests.made.sweep import (
    ABORTED,
    ENDED,
    NOTHING_SEEN,
    STARTED,
    SUBMITTED,
    PoolMadeHere,
    inventory,
    log,
    play,
    pool_gpu,
    suite_report,
)
from tests.made.sweep_site import A100, V100, Site, failed, kept_sif


def words(done: SweepResult) -> dict[str, str]:
    return {one.result.node: str(one.result.outcome) for one in done.nodes}


def played(site: Site) -> Path:
    """The folder of a sweep whose jobs all came back."""
    folder = site.makes().folder
    site.pool.play(folder)
    return folder


def with_setting(site: Site, **settings: str) -> Site:
    values = {name: SettingValue(value=value, origin="a test") for name, value in settings.items()}
    return replace(site, factory=replace(site.factory, settings=replace(site.factory.settings, **values)))


def start(*arguments: str) -> int:
    return run("sweep", "start", "--scheduler", "htcondor", *arguments)


def writes(site: Site) -> int:
    """Requests that brought something for the images, beside claims and catalogs."""
    return sum(
        one.method in ("POST", "PUT", "PATCH") and one.path.startswith("/v2/pytorch/")
        for one in site.registry.log
    )


# --- made ------------------------------------------------------------------------------------------


def test_a_sweep_is_a_folder_that_asks_each_image_once_a_capability(site: Site) -> None:
    made = site.makes()
    sweep = read_sweep(made.folder)
    assert sweep == made.sweep
    assert [node.name for node in sweep.nodes] == [V100, A100]
    (image,) = {node.image for node in sweep.nodes}
    assert image.kind is ImageKind.DOCKER
    assert image.address == f"docker://{site.registry.host}/pytorch@{image.subject.index}"
    assert made.folder == site.factory.layout.path / "sweeps" / sweep.id
    assert len({node.nonce for node in sweep.nodes}) == 2
    for node in sweep.nodes:
        assert nonce_store(site.factory).look(node.nonce).run.subject == image.subject
    dag = (made.folder / "sweep.dag").read_text()
    assert re.findall(r"^JOB (\S+)", dag, re.MULTILINE) == [V100, A100]
    assert f'image="{image.address}"' in dag
    assert read_submitted(made.folder) == ("1.0",)


def test_what_the_settings_add_goes_with_the_sweep(site: Site) -> None:
    with pytest.raises(UsageError, match="accounting_group"):
        site.makes(site="igwn")
    made = with_setting(site, submit_commands="accounting_group = igwn.dev").makes(site="igwn")
    assert read_sweep(made.folder).own == ("accounting_group = igwn.dev",)
    assert "accounting_group = igwn.dev" in (made.folder / "sweep.sub").read_text().splitlines()


def test_what_is_in_the_registry_is_not_sent_again(site: Site) -> None:
    site.makes()
    sent = writes(site)
    assert site.makes().sweep.nodes
    assert writes(site) == sent


def test_a_sweep_comes_back_as_verdicts_that_can_be_relied_on(site: Site) -> None:
    folder = played(site)
    done = site.collects(folder)
    assert words(done) == {V100: "verified", A100: "verified"}
    assert done.faults == ()
    assert done.nodes[0].attached == (str(site.factory.layout.path), f"{site.registry.host}/pytorch")
    place = registry_of(site.factory, "pytorch", site.registry.host)
    subject = done.sweep.nodes[0].image.subject
    judged = find_in(
        site.factory, place, subject, read_verification_policy(site.factory, datetime.now(UTC))
    ).judged
    assert [(one.standing, one.proves) for one in judged] == [(VerdictStatus.GOOD, True)] * 2
    hardware = [one.verdict.report.hardware for one in judged if one.verdict]
    assert {one.kind for one in hardware if one} == {HTCONDOR}
    assert {one.driver for one in hardware if one} == {"550.90.07"}
    assert {dict(one.notes)["driver-told-by"] for one in hardware if one} == {"startd"}
    assert {dict(one.notes)["machine"] for one in hardware if one} == {"gpu.pool.test"}


def test_collecting_again_changes_nothing(site: Site) -> None:
    folder = played(site)
    first = site.collects(folder)
    assert site.collects(folder).nodes == first.nodes == read_collected(folder)


def test_a_kill_between_signing_and_attaching_signs_nothing_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = played(site)
    with monkeypatch.context() as patched:
        patched.setattr(VerdictAttacher, "attach_all", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            site.collects(folder)
    spent = {
        node.nonce: nonce_store(site.factory).look(node.nonce).result for node in read_sweep(folder).nodes
    }
    assert all(spent.values())
    done = site.collects(folder)
    assert [len(one.attached) for one in done.nodes] == [2, 2]
    assert {one.why.partition(" on ")[0] for one in done.nodes} == {"signed"}
    for nonce, result in spent.items():
        assert nonce_store(site.factory).look(nonce).result == result
        assert nonce_store(site.factory).unsettled(nonce) == b""


@pytest.mark.parametrize("step", ["_spend", "settle_all"])
def test_a_kill_while_spending_or_settling_signs_nothing_twice(
    site: Site, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two nodes is not spent yet; or all is attached, and the nonces do not say so."""
    folder = played(site)
    own, calls = getattr(NonceStore, step), iter((True, False) if step == "_spend" else (False,))

    def kill(*args: Any, **more: Any) -> object:
        if not next(calls):
            raise KeyboardInterrupt
        return own(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(NonceStore, step, kill)
        with pytest.raises(KeyboardInterrupt):
            site.collects(folder)
    done = site.collects(folder)
    assert [len(one.attached) for one in done.nodes] == [2, 2]
    (image,) = {node.image.subject for node in read_sweep(folder).nodes}
    place, court = local_place(site.factory, ANY), read_verification_policy(site.factory, datetime.now(UTC))
    judged = find_in(site.factory, place, image, court).judged
    assert sorted(one.verdict.report.nonce for one in judged if one.verdict) == sorted(
        node.nonce for node in read_sweep(folder).nodes
    )
    assert [nonce_store(site.factory).unsettled(node.nonce) for node in read_sweep(folder).nodes] == [
        b"",
        b"",
    ]
    assert [one.name for one in nonce_store(site.factory).folder.iterdir()] == ["spent"]


def test_what_a_registry_did_not_take_is_attached_by_the_next_call(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = played(site)

    def put(place: StoreRepository, statement: SignedStatement) -> str:
        if not isinstance(place.store, LayoutStore):
            raise RegistryError("registry-unreachable", "the registry is down")
        return put_statement(place, statement)

    with monkeypatch.context() as patched:
        patched.setattr(attached, "put_statement", put)
        done = site.collects(folder)
    assert [one.keyid for one in done.nodes] == ["", ""]
    assert len(done.faults) == 2
    assert [len(one.attached) for one in site.collects(folder).nodes] == [2, 2]


def test_a_registry_that_is_down_is_not_asked_for_every_image(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node, *_), asked = read_sweep(site.makes().folder).nodes, []

    def refuse(_: Project, own: VerifiedImage, where: object) -> None:
        asked.append(own.manifest)
        raise RegistryError("registry-unreachable", "it is down")

    monkeypatch.setattr(collect, "places_of", refuse)
    found = NodeResult(node=node.name, outcome=None, reason="", attempts=())
    one = CollectedNode(result=found, target=NAME, capability="8.0", nonce=node.nonce)
    sealed = SignedNode(keyid="", expires=datetime.now(UTC), envelopes=(b"", b""))
    drafts = []
    for number in [*range(9), 0, 0]:
        own = replace(node.image.subject, manifest=f"sha256:{number:064x}")
        drafts.append(
            PendingNode(node=replace(node, image=replace(node.image, subject=own)), one=one, signed=sealed)
        )
    done = VerdictAttacher(site.factory, "", QuietProgress()).attach_all(drafts)
    assert [str(draft.fault) for draft in done] == ["it is down"] * 11
    assert asked == [f"sha256:{number:064x}" for number in range(MAX_REJECTED)]
    assert {draft.one.attached for draft in done} == {()}


def test_without_a_key_a_result_waits_for_one(site: Site) -> None:
    folder = played(site)
    keyless = replace(site.factory, environ={**site.factory.environ, "HOME": "/nowhere"})
    done = collect_sweep(keyless, folder, CollectOptions(), datetime.now(UTC), QuietProgress())
    assert words(done) == {V100: "verified", A100: "verified"}
    assert {one.why for one in done.nodes} == {"unsigned: no key (imagefactory key create NAME)"}
    assert all(one.keyid for one in site.collects(folder).nodes)


# --- outcomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["wrong-numbers", "no-kernel", "driver-too-old", "load-failed"])
def test_what_the_suite_says_against_an_image_is_signed_too(site: Site, word: str) -> None:
    folder = site.makes().folder
    asked = json.loads((folder / "nodes" / A100 / "expectations.json").read_bytes())
    rows = suite_report(asked)["checks"]
    play(folder, A100, report={"checks": [failed(rows[0]["name"], word), *rows[1:]]}, run={"returncode": 1})
    one = site.collects(folder).nodes[1]
    assert one.result.outcome == word
    assert one.keyid


def test_a_job_that_met_no_gpu_cannot_become_a_verdict(site: Site) -> None:
    folder = site.makes().folder
    asked = json.loads((folder / "nodes" / A100 / "expectations.json").read_bytes())
    rows = suite_report(asked)["checks"]
    report = {"device": None, "cuda": "", "checks": [failed(rows[0]["name"], "no-gpu"), *rows[1:]]}
    play(folder, A100, report=report, run={"returncode": 1, **NOTHING_SEEN})
    one = site.collects(folder).nodes[1]
    assert (one.result.outcome, one.keyid, one.attached) == (Outcome.NO_GPU, "", ())
    assert nonce_store(site.factory).look(one.nonce).spent is None


@pytest.mark.parametrize(
    "files", [{}, {"run.json": b""}, {"run.json": b"{}"}, {"run.json": b"\xff\x00" * 999}]
)
def test_garbage_is_the_pools_fault_and_stops_nobody(site: Site, files: dict[str, bytes]) -> None:
    folder = played(site)
    result = folder / "nodes" / V100 / "result"
    for path in result.iterdir():
        path.unlink()
    for name, data in files.items():
        (result / name).write_bytes(data)
    done = site.collects(folder)
    assert words(done)[A100] == "verified"
    assert words(done)[V100] in ("infrastructure", "None")  # DAGMan may try it again
    assert done.nodes[0].keyid == ""


def test_an_edited_question_is_refused(site: Site) -> None:
    folder = played(site)
    path = folder / "nodes" / A100 / "expectations.json"
    path.write_text(path.read_text().replace('"capability": "8.0"', '"capability": ""'))
    one = site.collects(folder).nodes[1]
    assert (one.result.outcome, one.keyid) == (Outcome.NOT_TESTED, "")
    assert "expectations.json" in one.result.reason


@pytest.mark.parametrize("pool", ["", "slurm"])
def test_what_was_not_asked_of_this_pool_is_no_word_of_it(site: Site, pool: str) -> None:
    """A kit may come back as a folder that looks like a sweep, with a job's log that somebody wrote."""
    folder = played(site)
    for path in (site.factory.layout.path / "nonces").glob("*.json"):
        path.write_text(path.read_text().replace('"pool": "htcondor"', f'"pool": "{pool}"'))
    for one in site.collects(folder).nodes:
        assert (one.result.outcome, one.keyid) == (Outcome.NOT_TESTED, "")
        assert f"issued for {pool or 'no pool'}" in one.result.reason


def test_a_result_of_another_node_is_refused(site: Site) -> None:
    folder = played(site)
    stolen = (folder / "nodes" / V100 / "result" / "run.json").read_bytes()
    (folder / "nodes" / A100 / "result" / "run.json").write_bytes(stolen)
    one = site.collects(folder).nodes[1]
    assert one.keyid == ""
    assert one.result.outcome is not Outcome.VERIFIED


def test_what_is_still_at_work_is_left_for_the_next_call(site: Site) -> None:
    folder = site.makes().folder
    play(folder, V100)
    log(folder, A100, SUBMITTED, STARTED)
    done = site.collects(folder)
    assert words(done) == {V100: "verified", A100: "None"}
    assert done.waiting == 1
    status = read_status(folder, site.opens)
    assert (status.ended, status.complete, status.driven) == (1, False, False)
    play(folder, A100)
    assert words(site.collects(folder)) == {V100: "verified", A100: "verified"}


# --- left and picked up ----------------------------------------------------------------------------


def test_a_second_sweep_leaves_out_what_the_first_has_proven(site: Site) -> None:
    first = site.makes().folder
    play(first, V100)
    log(first, A100, SUBMITTED, STARTED)
    site.collects(first)
    second = site.makes().sweep
    assert [node.name for node in second.nodes] == [A100]
    assert [(one.capability, one.rule) for one in second.skipped if one.rule == "verified"] == [
        ("7.0", "verified")
    ]
    assert len(find_sweeps(site.factory.settings)) == 2
    again = site.makes(asked=CellRequest(allow=frozenset({"verified"}))).sweep
    assert [node.name for node in again.nodes] == [V100, A100]


def test_nothing_left_is_an_answer_of_its_own(site: Site) -> None:
    folder = played(site)
    site.collects(folder)
    with fails("nothing-to-verify"):
        site.makes()


def test_a_sweep_that_is_done_is_not_submitted_again(site: Site) -> None:
    folder = site.makes().folder
    submit_sweep(folder, site.opens)  # nothing has come back: it is gone on with
    assert read_submitted(folder) == ("1.0", "2.0")
    site.pool.play(folder)
    for _ in range(2):
        with fails("sweep-finished"):
            submit_sweep(folder, site.opens)
        (folder / "submitted.json").unlink(missing_ok=True)  # also if nobody noted that it was submitted


def test_a_sweep_whose_jobs_were_removed_with_it_can_be_gone_on_with(site: Site) -> None:
    """DAGMan runs no POST script for them, so its rescue DAG has them still to do."""
    folder = site.makes().folder
    for node in (V100, A100):
        log(folder, node, SUBMITTED, STARTED, ABORTED)
    status = read_status(folder, site.opens)
    assert [one.outcome for one in status.results] == [Outcome.NOT_TESTED] * 2
    submit_sweep(folder, site.opens)
    assert read_submitted(folder) == ("1.0", "2.0")
    for node in (V100, A100):  # now a person removed each of them, and DAGMan took that for an answer
        posted = {"job": "12.0", "again": False, "left": False, "why": "", "format": 1, "return": -1002}
        (folder / "nodes" / node / "post.json").write_text(json.dumps(posted))
    with fails("sweep-finished"):
        submit_sweep(folder, site.opens)


def test_a_damaged_nonce_stops_its_own_node_alone(site: Site) -> None:
    folder = played(site)
    (nonce,) = (node.nonce for node in read_sweep(folder).nodes if node.name == V100)
    (nonce_store(site.factory).folder / f"{nonce}.json").write_text("{")
    done = site.collects(folder)
    assert words(done) == {V100: "not-tested", A100: "verified"}
    assert [name for name, _ in done.faults] == [V100]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"limits": JobLimits(idle=timedelta(days=5))}, "sweep-too-long"),
        ({"folder": "my sweep"}, "sweep-folder-invalid"),  # HTCondor cannot name it
        ({"folder": "mine"}, "directory-exists"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(
    site: Site, tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    if "folder" in options:
        options = {"folder": tmp_path / options["folder"]}
    with pytest.raises(UsageError, check=lambda error: error.code == code):
        site.makes(**options)
    assert site.registry.bytes_in == 0
    assert not (tmp_path / "my sweep").exists()


def test_a_first_sweep_makes_the_store_that_collects_it(site: Site, tmp_path: Path) -> None:
    """The image is in the registry only, and the store is a directory that does not exist yet."""
    site = replace(
        site, factory=replace(site.factory, environ={**site.factory.environ, NONCE_STORE_KEY: "k" * 64})
    )
    site.makes()
    site = with_setting(site, store=str(tmp_path / "fresh"))
    made = site.makes(asked=CellRequest(allow=frozenset({"claimed"})))
    assert site.factory.layout.founded()
    site.pool.play(made.folder)
    done = site.collects(made.folder)
    assert words(done) == {V100: "verified", A100: "verified"}
    assert done.faults == ()


def test_old_sweeps_go_with_what_no_image_needs(site: Site) -> None:
    """Except one of which a verdict was signed and not attached."""
    done, waiting, fresh = (site.makes().folder for _ in range(3))
    later = datetime.now(UTC) + timedelta(days=61)
    for folder in (done, waiting):
        site.pool.play(folder)
        nodes = site.collects(folder).nodes
    write_collected(waiting, [replace(node, attached=()) for node in nodes])
    recent = fresh.rename(fresh.with_name(f"{later:%Y%m%d-%H%M%S}-abcd"))
    other = recent.with_name("99999999-999999-abcd")
    other.mkdir()
    kept = {waiting, recent, other}
    assert collect_sweeps(site.factory, later - timedelta(days=2), dry_run=False).bytes == 0
    planned = collect_sweeps(site.factory, later, dry_run=True)
    assert planned.bytes > 0
    assert set(done.parent.iterdir()) == {done, *kept}
    assert collect_sweeps(site.factory, later, dry_run=False).bytes == planned.bytes
    assert set(done.parent.iterdir()) == kept


def test_a_sweep_is_not_made_in_a_directory_of_others(site: Site, tmp_path: Path) -> None:
    site.makes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        with_setting(site, store=str(tmp_path / "mine")).makes()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_machine_without_room_for_the_job_gets_none(site: Site) -> None:
    small = tuple(replace(one, attributes={"Memory": 1024}) for one in site.pool.gpus.machines[:1])
    site.pool.gpus = replace(site.pool.gpus, machines=(*small, *site.pool.gpus.machines[1:]))
    sweep = site.makes().sweep
    assert [node.name for node in sweep.nodes] == [A100]
    (left,) = (one for one in sweep.skipped if one.capability == "7.0")
    assert (left.rule, "of memory" in left.reason) == ("no-match", True)


def test_one_image_that_cannot_be_had_leaves_its_siblings_alone(site: Site) -> None:
    other = next(one for one in site.factory.targets if one.name == "pytorch-2.5-cu124")
    lock = site.factory.lock_folder / f"{NAME}.requirements.txt"
    (site.factory.lock_folder / f"{other.name}.requirements.txt").write_text(lock.read_text())
    options = SweepOptions(level="quick", registry=site.registry.host)
    bench = SweepDependencies(
        clock=lambda: datetime.now(UTC),
        random=os.urandom,
        pools=site.opens,
        queue=False,
        pause=lambda _: None,
    )
    prepared = prepare_sweep(site.factory, (site.target,), site.pool.gpus, options, bench)
    lost = replace(prepared.plan.cells[0].stage, target=other)
    cells = (replace(prepared.plan.cells[0], stage=lost), *prepared.plan.cells)
    made = make_sweep(
        site.factory, replace(prepared, plan=replace(prepared.plan, cells=cells)), bench, QuietProgress()
    )
    assert [node.name for node in made.sweep.nodes] == [V100, A100]
    assert [(name, type(error)) for name, error in made.faults] == [(other.name, BuildError)]
    assert [one.rule for one in made.sweep.skipped if one.target == other.name] == ["failed"]


def test_a_sif_is_verified_as_itself(site: Site) -> None:
    sif = kept_sif(site)
    made = site.makes(image="sif")
    (one,) = {node.image for node in made.sweep.nodes}
    assert (one.kind, one.subject.config, one.sha256) == (ImageKind.SIF, sif.file.digest, sif.file.digest)
    assert Path(one.address) == made.folder / "images" / sif.name
    assert Path(one.address).read_bytes() == b"a file that is no .sif"
    assert "transfer_container" not in (made.folder / "sweep.sub").read_text()
    site.pool.play(made.folder)
    done = site.collects(made.folder)
    assert {node.attached for node in done.nodes} == {(str(site.factory.layout.path),)}
    with pytest.raises(NothingSelectedError):
        site.makes(image="sif")


@pytest.mark.parametrize(
    ("folder", "registry", "asked", "kind"),
    [
        ("", "registry.example.org/gpu", "", ImageKind.DOCKER),  # though the store has a .sif
        ("", "", "", ImageKind.SIF),
        ("/shared/gpu", "registry.example.org/gpu", "", ImageKind.SIF),
        ("osdf:///chtc/gpu", "", "", ImageKind.OSDF),
        ("/shared/gpu", "registry.example.org/gpu", "docker", ImageKind.DOCKER),
    ],
)
def test_settings_choose_what_jobs_pull_and_not_what_was_made(
    site: Site, folder: str, registry: str, asked: str, kind: ImageKind
) -> None:
    kept_sif(site)
    assert choose_image_type(with_setting(site, sif_folder=folder).factory, asked, registry) is kind


@pytest.mark.parametrize("container", ["pyxis", "podman"])
def test_containers_of_slurm_start_images_of_a_registry_alone(site: Site, container: str) -> None:
    project = with_setting(site, container=container, sif_folder="/shared/gpu").factory
    assert choose_image_type(project, "", "registry.example.org/gpu", "slurm") is ImageKind.DOCKER
    assert choose_image_type(project, "", "registry.example.org/gpu", "htcondor") is ImageKind.SIF
    assert choose_container(project, "slurm") == container
    for requested, registry, code in (
        ("sif", "r.example.org", "image-type-unsupported"),
        ("", "", "no-registry-set"),
    ):
        with fails(code):
            choose_image_type(project, requested, registry, "slurm")
    with fails("container-unsupported"):
        choose_image_type(with_setting(site, container="edf").factory, "", "r.example.org", "slurm")


def test_a_sif_may_lie_in_the_registry(site: Site) -> None:
    sif = kept_sif(site)
    made = site.makes(image="oras")
    (one,) = {node.image for node in made.sweep.nodes}
    assert (one.kind, one.subject.config, one.sha256) == (ImageKind.ORAS, sif.file.digest, sif.file.digest)
    assert re.fullmatch(rf"oras://{site.registry.host}/pytorch@sha256:[0-9a-f]{{64}}", one.address)
    assert f'image="{one.address}"' in (made.folder / "sweep.dag").read_text()
    site.pool.play(made.folder)
    done = site.collects(made.folder)
    assert words(done) == {V100: "verified", A100: "verified"}
    places = (str(site.factory.layout.path), f"{site.registry.host}/pytorch")
    assert [node.attached for node in done.nodes] == [places] * 2
    sent = writes(site)
    site.makes(image="oras", asked=CellRequest(allow=frozenset({"verified"})))
    assert writes(site) == sent


def test_a_sif_in_a_folder_of_all_machines_is_written_once_and_not_transferred(
    site: Site, tmp_path: Path
) -> None:
    sif, shared = kept_sif(site), tmp_path / "shared"
    made = with_setting(site, sif_folder=str(shared)).makes()
    (one,) = {node.image for node in made.sweep.nodes}
    assert (one.kind, one.address) == (ImageKind.SIF, str(shared / sif.name))
    assert Path(one.address).read_bytes() == b"a file that is no .sif"
    assert not Path(one.address).samefile(sif.path)
    assert "transfer_container = false" in (made.folder / "sweep.sub").read_text()
    before = Path(one.address).stat().st_mtime_ns
    with_setting(site, sif_folder=str(shared)).makes()
    assert [path.name for path in shared.iterdir()] == [sif.name]
    assert Path(one.address).stat().st_mtime_ns == before


@pytest.mark.parametrize("there", ["a", "a/folder", "a/folder/of/all"])
def test_the_folder_of_all_machines_is_made_as_far_as_it_is_missing(
    site: Site, tmp_path: Path, there: str
) -> None:
    sif, shared = kept_sif(site), tmp_path / "a/folder/of/all"
    (tmp_path / there).mkdir(parents=True)
    with_setting(site, sif_folder=str(shared)).makes()
    assert [path.name for path in shared.iterdir()] == [sif.name]


def test_a_folder_of_all_machines_that_cannot_be_made_is_said(site: Site, tmp_path: Path) -> None:
    kept_sif(site)
    (tmp_path / "file").write_text("")
    with fails("cannot-create-file", f"{tmp_path}/file/shared: not a directory", hint="sif-folder"):
        with_setting(site, sif_folder=str(tmp_path / "file/shared")).makes()


def test_a_sif_of_the_osdf_is_named_and_put_there_by_a_person(site: Site) -> None:
    sif = kept_sif(site)
    made = with_setting(site, sif_folder="osdf:///chtc/staging/me/").makes(site="chtc")
    (one,) = {node.image for node in made.sweep.nodes}
    assert (one.kind, one.address) == (ImageKind.OSDF, f"osdf:///chtc/staging/me/{sif.name}")
    text = (made.folder / "sweep.sub").read_text()
    assert "requirements = $(elsewhere) && $(first) && (HasCHTCStaging == true)" in text
    assert "transfer_container" not in text
    site.pool.play(made.folder)
    assert words(site.collects(made.folder)) == {V100: "verified", A100: "verified"}


def test_a_job_that_ran_another_file_than_the_nodes_is_not_verified(site: Site) -> None:
    kept_sif(site)
    folder = with_setting(site, sif_folder="osdf:///chtc/staging/me").makes().folder
    play(folder, V100, run={"image": f"sha256:{'e' * 64}"})
    play(folder, A100)
    done = site.collects(folder)
    assert words(done) == {V100: "infrastructure", A100: "verified"}
    assert done.nodes[0].keyid == ""


def test_slices_of_gpus_are_asked_for_where_they_count(site: Site) -> None:
    """Beside whole GPUs of the same capability, as rows of their own."""
    slice_of = pool_gpu("8.0", name="NVIDIA Test GPU MIG 1g.5gb", mig=True)
    site.pool.gpus = inventory(slice_of, pool_gpu("7.0"), pool_gpu("8.0"))
    sweep = site.makes(asked=CellRequest(mig=True)).sweep
    parts = {V100: "", A100: "", f"{A100}-1g_5gb": "1g.5gb"}
    assert {node.name: node.part for node in sweep.nodes} == parts
    machines = {one.capability: one.machines for one in sweep.machines}
    assert machines["8.0 1g.5gb"] == ("gpu0.pool.test",)
    assert machines["8.0"] == ("gpu2.pool.test",)
    assert [node.name for node in site.makes().sweep.nodes] == [V100, A100]


# --- the commands ----------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_queued_and_does_nothing(
    site: Site,
    pool: PoolMadeHere,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PoolMadeHere, "run_limit", lambda *_: timedelta(seconds=7))
    asked = (NAME, "--inventory", str(tmp_path / "pool.json"), "--dry-run")
    assert start(*asked) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^{NAME} +7.0 +1 +CUDA 12.0 or newer", said, re.MULTILINE)
    assert re.search(rf"^{NAME} +7.5, 8.6, 8.9, 9.0 +no-match", said, re.MULTILINE)
    assert "2 jobs of 1 image," in said
    assert start(*asked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["capability"] for row in found["queued"]] == ["7.0", "8.0"]
    assert (found["idle_seconds"], found["run_seconds"]) == (86400, 7)  # what a job of this pool gets
    assert pool.submitted == []
    assert find_sweeps(site.factory.settings) == ()


def test_verify_status_collect_and_cancel_take_a_sweep_by_its_id(
    site: Site, pool: PoolMadeHere, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--inventory", str(tmp_path / "pool.json"), "--registry", site.registry.host)
    chosen = ["--framework", "pt", "--version", "2.3", "--cuda", "12.1", "--capability", "8.0"]
    assert start(*chosen, *place) == 0
    (folder,) = find_sweeps(site.factory.settings)
    assert f"imagefactory sweep collect {folder.name}" in capsys.readouterr().out
    assert pool.submitted == [folder]
    assert run("sweep", "list") == 0
    assert "1 not submitted" in capsys.readouterr().out
    assert run("sweep", "collect", folder.name) == 9
    assert "1 of 1 nodes are not done" in capsys.readouterr().err
    pool.play(folder)
    assert run("sweep", "status", folder.name, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["sweeps"]
    assert (told["done"], told["nodes"][0]["outcome"]) == (True, "verified")
    assert told["scheduler"] == "htcondor"
    assert run("sweep", "status", folder.name) == 0
    (head, _, header, row, *_) = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == [folder.name, "htcondor", "done:", "1"]
    assert NAME in head
    assert header.split() == ["TARGET", "CAPABILITY", "STATUS", "ATTEMPT", "MACHINE", "STARTED"]
    assert row.split() == [NAME, "8.0", "verified", "1", "gpu.pool.test"]
    assert run("sweep", "collect", folder.name, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert (row["outcome"], len(row["attached"])) == ("verified", 2)
    for pool.at_work, said in ((True, "canceled; "), (False, "it had no job in the queue; ")):
        assert run("sweep", "cancel", folder.name) == 0
        assert capsys.readouterr().out.startswith(said)
    assert pool.canceled == [folder, folder]
    assert run("sweep", "cancel", "20260101-000000-ffff") == 3


def test_machines_that_failed_jobs_are_named_with_their_history(
    site: Site, pool: PoolMadeHere, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.gpus = inventory(pool_gpu("8.0"), pool_gpu("8.0"))
    made = site.makes()
    (of_capability,) = made.sweep.machines
    bad, good = of_capability.machines
    lines = [f"{bad}\tnode{at}\t1{at}.0\t{1767323045 + at}\tno-gpu: none\n" for at in range(2)]
    (made.folder / "faults").write_text("".join((*lines, f"{good}\tnode1\t19.0\t1767323050\thung\n")))
    assert run("sweep", "status", made.folder.name, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["sweeps"]
    assert {one["machine"]: one["excluded"] for one in told["machines"]} == {bad: True, good: False}
    assert told["machines"][0]["faults"][0] == {
        "node": "node0", "job": "10.0", "at": "2026-01-02T03:04:05Z", "reason": "no-gpu: none"
    }  # fmt: skip
    assert run("sweep", "status", made.folder.name) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [bad, "2", "excluded"] in rows
    assert [good, "1", "used"] in rows


@pytest.mark.parametrize(
    ("outcome", "days", "allow", "chosen", "excluded"),
    [
        ("wrong-numbers", 0, "uncollected", (), True),
        ("no-gpu", 0, "uncollected", (), False),  # no machine ran it: the image may be at fault
        ("wrong-numbers", 8, "uncollected", (), False),
        ("wrong-numbers", 0, "bad-machine", (), False),
        ("wrong-numbers", 0, "uncollected", ("!bad",), False),  # it gets none anyway
        ("wrong-numbers", 0, "uncollected", ("bad",), False),  # it is the only one that may be used
    ],
)
def test_a_machine_that_failed_jobs_gets_none_of_the_next_sweep(
    site: Site,
    pool: PoolMadeHere,
    outcome: str,
    days: int,
    allow: str,
    chosen: tuple[str, ...],
    excluded: bool,
) -> None:
    """`gpu` is what answers: the made-up jobs all run there."""
    both = pool_gpu("7.0"), pool_gpu("8.0")
    machines = (
        PoolMachine(name=f"{name}.pool.test", attributes={}, start="", gpus=both) for name in ("bad", "gpu")
    )
    pool.gpus = replace(pool.gpus, machines=tuple(machines))
    first = site.makes().folder
    at = int(datetime.now(UTC).timestamp()) + 1
    lines = [f"bad.pool.test\t{node}\t1.0\t{at}\tno-gpu: none\n" for node in (V100, A100)]
    (first / "faults").write_text("".join(lines))
    for node in (V100, A100):
        asks = json.loads((first / "nodes" / node / "expectations.json").read_bytes())
        head, *rest = suite_report(asks)["checks"]
        said = {"checks": [failed(head["name"], outcome), *rest]}
        met = {"device": None, "cuda": ""} if outcome == "no-gpu" else {}
        play(first, node, report={**said, **met}, run={"returncode": 1, **(NOTHING_SEEN if met else {})})
    later = datetime.now(UTC) + timedelta(days=days)
    asked = CellRequest(allow=frozenset({"uncollected", allow}), machines=chosen)
    made = replace(site, clock=lambda: later).makes(asked=asked)
    told = [line for line in made.notes if line.startswith("bad.pool.test gets no job: it failed 2")]
    assert len(told) == (1 if excluded else 0)
    for node in (V100, A100):
        job = (made.folder / "nodes" / node / "job.sub").read_text()
        assert ('!member(TARGET.Machine, {"bad.pool.test"})' in job) == excluded
    seen = read_status(made.folder, site.opens, queue=False).machines
    assert [(one.machine, one.excluded) for one in seen] == ([("bad.pool.test", True)] if excluded else [])


def test_what_only_a_bad_machine_could_verify_waits_until_that_is_forgotten(
    site: Site, pool: PoolMadeHere
) -> None:
    """`gpu` verifies both images, with a newer driver than `bad` has."""
    drivers = {"bad": {"driver": "545.23.06", "cuda": "12.3"}, "gpu": {}}
    machines = (
        PoolMachine(
            name=f"{name}.pool.test",
            attributes={},
            start="",
            gpus=(pool_gpu("7.0", **told), pool_gpu("8.0", **told)),
        )
        for name, told in drivers.items()
    )
    pool.gpus = replace(pool.gpus, machines=tuple(machines))
    first = site.makes().folder
    assert {node.first for node in read_sweep(first).nodes} == {"545.23.06"}
    for node in (V100, A100):
        play(first, node)
    site.collects(first)
    assert [cell.only for cell in site.prepares().plan.cells] == [True, True]
    at = int(datetime.now(UTC).timestamp()) + 1
    lines = [f"bad.pool.test\t{node}\t1.0\t{at}\tno-gpu: none\n" for node in (V100, A100)]
    (first / "faults").write_text("".join(lines))
    plan = site.prepares().plan
    assert plan.cells == ()
    assert {(one.capability, one.rule) for one in plan.skipped if one.rule != "no-match"} == {
        ("7.0", "bad-machine"),
        ("8.0", "bad-machine"),
    }
    assert len(site.prepares(asked=CellRequest(allow=frozenset({"bad-machine"}))).plan.cells) == 2
    later = datetime.now(UTC) + timedelta(days=8)
    assert len(replace(site, clock=lambda: later).prepares().plan.cells) == 2


def test_a_recipe_with_faults_keeps_no_other_from_the_pool(
    site: Site, pool: PoolMadeHere, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site.factory.settings.root_path / "recipes/broken.yaml").write_text("family: broken\n")
    place = ("--inventory", str(tmp_path / "pool.json"), "--registry", site.registry.host)
    assert start(NAME, *place) == 0
    assert "broken" in capsys.readouterr().err
    assert pool.submitted == list(find_sweeps(site.factory.settings))


def test_wait_stays_until_all_is_done_and_collects(
    site: Site, pool: PoolMadeHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.at_work, looked = True, []

    def running(folder: Path) -> bool:
        looked.append(folder)
        if len(looked) == 3:
            pool.play(folder)
        return True

    monkeypatch.setattr(pool, "running", running)
    monkeypatch.setattr(sweeps, "find_inventory", lambda *_: pool.gpus)
    assert start(NAME, "--registry", site.registry.host, "--wait") == 0
    assert len(looked) == 3
    assert re.search(
        rf"^{NAME} +8.0 +verified +NVIDIA Test GPU, 550.90.07", capsys.readouterr().out, re.MULTILINE
    )


def test_wait_says_when_nothing_drives_the_sweep_any_more(
    site: Site, pool: PoolMadeHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweeps, "find_inventory", lambda *_: pool.gpus)
    assert start(NAME, "--registry", site.registry.host, "--wait") == 9
    (folder,) = find_sweeps(site.factory.settings)
    assert f"sweep start --scheduler htcondor --dir {folder}" in capsys.readouterr().err
    assert start("--dir", str(folder)) == 0
    assert pool.submitted == [folder, folder]


def test_wait_goes_on_while_what_was_broken_is_tried_again(
    site: Site, pool: PoolMadeHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each node has the word of its last job until DAGMan has submitted the next; the pool may be silent."""
    monkeypatch.setattr(sweeps, "find_inventory", lambda *_: pool.gpus)
    assert start(NAME, "--registry", site.registry.host) == 0
    (folder,) = find_sweeps(site.factory.settings)
    for node in (V100, A100):
        log(folder, node, SUBMITTED, STARTED, ENDED, code=255)
        posted = {"job": "12.0", "again": True, "left": False, "why": "exited", "format": 1, "return": 255}
        (folder / "nodes" / node / "post.json").write_text(json.dumps(posted))
    capsys.readouterr()
    assert run("sweep", "status", folder.name, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["sweeps"]
    assert {node["outcome"] for node in told["nodes"]} == {"infrastructure"}
    looked = []

    def running(folder: Path) -> bool:
        looked.append(folder)
        if len(looked) in (1, 3):
            raise ToolError("pool-unreachable", "the schedd starts again")
        if len(looked) == 5:
            for node in (V100, A100):
                (folder / "nodes" / node / "post.json").unlink()
            pool.play(folder)
        return True

    monkeypatch.setattr(pool, "running", running)
    assert start("--dir", str(folder), "--wait") == 0
    assert len(looked) == 5


def test_wait_ends_where_the_pool_does_not_answer_for_long(
    site: Site, pool: PoolMadeHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def running(folder: Path) -> bool:
        raise ToolError("pool-unreachable", "no schedd")

    monkeypatch.setattr(sweeps, "find_inventory", lambda *_: pool.gpus)
    monkeypatch.setattr(pool, "running", running)
    assert start(NAME, "--registry", site.registry.host, "--wait") == 6
    assert "no schedd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--dry-run",), "--dry-run would change it"),
        (("--run-limit", "1h"), "--run-limit would change it"),
        (("--framework", "pt"), "--framework would change it"),
        (("--capability", "8.0"), "--capability would change it"),
        ((NAME,), "is already a sweep"),
    ],
)
def test_what_would_make_another_sweep_does_not_go_on_with_one(
    site: Site, pool: PoolMadeHere, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site.makes().folder
    assert start("--dir", str(folder), *argv) == 2
    assert said in capsys.readouterr().err
    assert pool.submitted == [folder]


def test_a_schedd_that_takes_nothing_leaves_a_sweep_to_go_on_with(
    site: Site, pool: PoolMadeHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submit(folder: Path) -> str:
        raise ToolError("pool-unreachable", "no schedd", hint="look at it")

    monkeypatch.setattr(sweeps, "find_inventory", lambda *_: pool.gpus)
    with monkeypatch.context() as patched:
        patched.setattr(pool, "submit", submit)
        assert start(NAME, "--registry", site.registry.host) == 6
    (folder,) = find_sweeps(site.factory.settings)
    assert f"imagefactory sweep start --scheduler htcondor --dir {folder}" in capsys.readouterr().err
    assert start("--dir", str(folder)) == 0
    assert pool.submitted == [folder]


def test_a_sweep_that_cannot_be_read_leaves_the_others(
    site: Site, pool: PoolMadeHere, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = site.makes().folder, site.makes().folder
    (first / "sweep.json").write_text("{")
    assert run("sweep", "list") == 2
    said = capsys.readouterr()
    assert second.name in said.out
    assert first.name in said.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "no target is given"),
        ((NAME, "--idle-limit", "soon"), "duration"),
        ((NAME, "--scheduler", "slurm", "--held-limit", "1h"), "--held-limit"),
        ((NAME, "--scheduler", "htcondor", "--nodes", "2"), "--nodes"),
        ((NAME, "--scheduler", "slurm", "--nodes", "1"), "--nodes"),
        ((NAME, "--scheduler", "slurm", "--nodes", "2", "--suite", "quick"), "--suite"),
        ((NAME, "--scheduler", "slurm", "--nodes", "2", "--retries", "0"), "--retries"),
        ((NAME, "--scheduler", "slurm", "--nodes", "2", "--mig"), "--mig"),
        ((NAME, "--ignore-rule", "no-match"), "--ignore-rule no-match"),
        ((NAME, "--framework", "pt"), "--framework"),
        (("--framework", "pt", "--version", "2.3", "--capability", "8.0"), "--cuda"),
        (("--framework", "pt", "--version", "2.3", "--cuda", "12.1"), "--capability"),
    ],
)
def test_options_that_do_not_go_together(
    pool: PoolMadeHere, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sweep", "start", *argv) == 2
    assert said in capsys.readouterr().err
    assert pool.submitted == []
