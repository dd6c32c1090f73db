"""tables: the command line, with verdicts in a store and a registry in this process, and collected sweeps.

The GPU is made up and so is what the host saw of it; the keys are thrown away with the test.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions.verdicts import attach_signed, local_place
from imagefactory.errors import NothingSelectedError
from imagefactory.extras.site.tables import HEADER, TableData, TableRequest, read_cataloged, survey
from imagefactory.matrix.combos import ComboState
from imagefactory.model import Outcome
from imagefactory.schedulers.inventory import write_inventory
from imagefactory.schedulers.pool import (
    ImageKind,
    Inventory,
    NodeResult,
    PoolGpu,
    PoolImage,
    PoolMachine,
    SkippedCell,
    SweepNode,
    SweepSpec,
)
from imagefactory.schedulers.sweep_file import CollectedNode, write_collected, write_sweep_file
from imagefactory.settings.choices import SettingValue
from imagefactory.settings.load import load_settings
from imagefactory.trust.attached import read_subject
from imagefactory.trust.catalog import CatalogImage, sign_catalog
from imagefactory.trust.policy import TrustedKey
from imagefactory.verify.report import VerifiedImage
from tests.made.catalog import make_catalog, make_image, signed
from tests.made.command import json_of
from tests.made.signing import QUIET, Bench
from tests.made.sweep_site import Site
from tests.made.verdicts import LAB, LAB_TRUSTED, NOW, whole_report

TARGET = "one-12.1-cu121"


def tables(bench: Bench, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """The rows of the target, by capability."""
    said = bench.call("report", TARGET, *arguments, "--format", "json", code=code)
    return {row["capability"]: row for row in json_of(said, "report")["combos"]}


def collected(folder: Path, subject: VerifiedImage, outcome: Outcome) -> None:
    """What `sweep collect` writes: one node of the target on 9.0, and one cell that was left out."""
    image = PoolImage(kind=ImageKind.SIF, address="/images/one.sif", subject=subject, size=1, unpacked=1)
    node = SweepNode(
        name="one-sm90",
        target=TARGET,
        capability="9.0",
        image=image,
        nonce="0" * 32,
        cuda="",
        memory=1,
        disk=1,
        timeout=60,
        python="/usr/bin/python3",
    )
    skipped = SkippedCell(
        target=TARGET, capability="12.0", rule="no-match", reason="no GPU of the pool has it"
    )
    made = datetime(2026, 11, 22, tzinfo=UTC)
    sweep = SweepSpec(
        id=folder.name, created=made, level="full", site="generic", nodes=(node,), skipped=(skipped,)
    )
    result = NodeResult(node=node.name, outcome=outcome, reason="held: 34, asked for too little memory")
    folder.mkdir(parents=True)
    write_sweep_file(folder, sweep)
    write_collected(folder, [CollectedNode(result=result, target=TARGET, capability="9.0", nonce=node.nonce)])


def sign_here(bench: Bench, content: bytes) -> VerifiedImage:
    """An image in the store that is verified for 8.0."""
    digest = bench.build(content).root.descriptor.digest
    place = local_place(bench.factory, "one")
    signed = bench.sign(place, digest)
    attach_signed(bench.factory, signed, None, QUIET)
    return read_subject(place, digest)


def test_what_is_proven_in_the_store_is_valid(bench: Bench, tmp_path: Path) -> None:
    sign_here(bench, b"a")
    out = tmp_path / "out.csv"
    said = bench.call("report", "--output", str(out), "--format", "csv")
    assert out.read_text() == f"{HEADER}\nnvidia-cuda-runtime-cu12,8.0,12.1,12.1,\n"
    assert str(out) in said.out
    row = tables(bench)["8.0"]
    assert (row["status"], row["basis"], row["driver"]) == ("valid", "verified", "550.54.15")
    assert bench.call("report", "--format", "csv").out == out.read_text()


@pytest.mark.parametrize("kind", ["svg", "badge", "csv", "markdown", "json"])
def test_a_format_is_one_document(bench: Bench, tmp_path: Path, kind: str) -> None:
    sign_here(bench, b"a")
    printed = bench.call("report", TARGET, "--format", kind).out
    bench.call("report", TARGET, "--format", kind, "-o", str(tmp_path / "out"))
    assert [line for line in printed.splitlines() if "created" not in line] == [
        line for line in (tmp_path / "out").read_text().splitlines() if "created" not in line
    ]
    for options in (("--force",), ("--json",)):
        said = bench.call("report", TARGET, "--format", kind, *options, code=2)
        assert said.error_codes == ("option-conflict",)
    said = bench.call("report", TARGET, "--format", kind, "-o", str(tmp_path), code=2)
    assert said.error_codes == ("cannot-write-file",)


def test_a_tag_alone_proves_nothing(bench: Bench) -> None:
    bench.push(b"a", 1)
    assert {row["status"] for row in tables(bench).values()} <= {"not-tested", "ruled-out"}


def test_verdicts_of_the_registry_count_where_it_is_asked(bench: Bench) -> None:
    bench.verify(bench.push(b"a", 1))
    assert tables(bench, "--registry", bench.registry.host)["8.0"]["status"] == "valid"


@pytest.mark.parametrize("named", [True, False])
def test_the_registry_of_the_settings_is_asked_as_one_that_is_named(site: Site, named: bool) -> None:
    """The image of the present lock, which decides what is predicted of it, may lie there alone."""
    image = site.makes().sweep.nodes[0].image.subject.index
    place = "" if named else site.registry.host
    setting = SettingValue(value=place, origin="default")
    factory = replace(site.factory, settings=replace(site.factory.settings, registry=setting))
    asked = TableRequest(now=datetime.now(UTC), registry=site.registry.host if named else "")
    ((one,),) = survey(factory, [site.target], asked, QUIET)[1:]
    assert one.stage.reference == f"{site.registry.host}/pytorch@{image}"


def test_what_sweeps_told_stands_beside_it(bench: Bench) -> None:
    subject = sign_here(bench, b"a")
    collected(bench.folder / "store" / "sweeps" / "20261122-000000-aaaa", subject, Outcome.HELD)
    rows = tables(bench)
    assert rows["8.0"]["status"] == "valid"
    assert (rows["9.0"]["status"], rows["9.0"]["cause"], rows["9.0"]["basis"]) == (
        "undecided",
        "held",
        "reported",
    )
    assert "too little memory" in rows["9.0"]["reason"]
    assert (rows["12.0"]["status"], rows["12.0"]["cause"]) == ("undecided", "no-match")


def test_a_sweep_of_another_image_says_nothing(bench: Bench, tmp_path: Path) -> None:
    sign_here(bench, b"a")
    other = VerifiedImage(
        target=TARGET, **dict.fromkeys(("index", "manifest", "config"), "sha256:" + "f" * 64)
    )
    folder = tmp_path / "elsewhere"
    collected(folder, other, Outcome.NO_KERNEL)
    assert tables(bench, "--sweep", str(folder))["9.0"]["status"] == "not-tested"
    assert bench.call("report", "--sweep", str(tmp_path), "--format", "csv", code=2).error_codes == (
        "sweep-not-found",
    )


@pytest.mark.parametrize(("file", "text"), [("sweep.json", "{"), ("collected.json", '{"format": 9}')])
def test_a_malformed_sweep_of_the_store_is_told_and_stops_nothing(
    bench: Bench,
    file: str,
    text: str,
) -> None:
    subject = sign_here(bench, b"a")
    sweeps = bench.folder / "store" / "sweeps"
    for name in ("20261122-000000-aaaa", "20261122-000000-bbbb"):
        collected(sweeps / name, subject, Outcome.HELD)
    broken = sweeps / "20261122-000000-aaaa"
    (broken / file).write_text(text)
    said = bench.call("report", "--output", str(bench.folder / "out"), "--format", "csv")
    assert "skipped a sweep of the store" in said.out
    assert str(broken / file) in said.out
    assert "skipped" in bench.call("report", "--format", "markdown").out
    told = json_of(bench.call("report", "--format", "json"), "report")
    assert [str(broken / file) in note for note in told["notes"]] == [True]
    assert tables(bench)["9.0"]["cause"] == "held"  # as the other one says
    assert str(broken) in bench.call("report", "--sweep", str(broken), "--format", "csv", code=2).err


def test_without_trust_nothing_is_valid(bench: Bench) -> None:
    sign_here(bench, b"a")
    (bench.folder / "root" / "imagefactory.toml").write_text("")
    assert tables(bench, "--capability", "8.0")["8.0"]["status"] == "not-tested"
    said = bench.call("report", "--output", str(bench.folder / "out"), "--format", "csv")
    assert "No key is trusted here" in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--capability", "x"), "'x'"), (("nothing-*",), "nothing-*")],
)
def test_bad_arguments_are_told(bench: Bench, arguments: tuple[str, ...], said: str) -> None:
    done = bench.call("report", *arguments, "--format", "csv", code=3 if "nothing" in said else 2)
    assert said in done.err
    assert (done.error_codes == ("option-invalid",)) == ("--capability" in arguments)


def test_columns_can_be_asked_for(bench: Bench, tmp_path: Path) -> None:
    assert "12.1" in tables(bench, "--capability", "12.1")
    gpu = PoolGpu(
        id="GPU-1", uuid="", name="G", capability="10.3", memory=0, driver="", cuda="", mig=False, free=True
    )
    machine = PoolMachine(name="m", attributes={}, start="", gpus=(gpu,))
    inventory = Inventory(pool="p", taken=datetime(2026, 11, 22, tzinfo=UTC), machines=(machine,))
    write_inventory(tmp_path / "pool.json", inventory)
    assert "10.3" in tables(bench, "--inventory", str(tmp_path / "pool.json"))


# --- outside of a factory ------------------------------------------------------------------------


def cataloged(tmp_path: Path, *names: str, image: CatalogImage) -> TableData:
    """The tables of a signed catalog in a file, by a person who trusts its key and has no factory."""
    config = tmp_path / "config" / "imagefactory"
    config.mkdir(parents=True)
    path = tmp_path / "catalog.json"
    path.write_bytes(sign_catalog(make_catalog(image), LAB))
    row = format_key_row(LAB_TRUSTED)
    (config / "imagefactory.toml").write_text(f'catalog = "{path}"\n{row}')
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path), "XDG_CONFIG_DIRS": "/none"}
    settings = load_settings(directory=None, start=tmp_path, environ=environ)
    return read_cataloged(settings, environ, names, TableRequest(now=NOW))


def format_key_row(key: TrustedKey) -> str:
    public = base64.b64encode(key.public).decode()
    since, until = key.since.date().isoformat(), key.until.date().isoformat()
    return (
        f'[[trust]]\nname = "{key.name}"\nkeyid = "{key.keyid}"\npublic = "{public}"\n'
        f"from = {since}\nuntil = {until}\n"
    )


def test_a_catalog_is_enough(tmp_path: Path) -> None:
    image = make_image(envelopes=(signed(whole_report(), "8"),), required=("8.0", "9.0"))
    made = cataloged(tmp_path, "pytorch-2.*", image=image)
    rows = {str(one.capability): one for one in made.combos}
    assert (rows["8.0"].status, rows["8.0"].version, rows["8.0"].framework) == (
        ComboState.VALID,
        "2.3",
        "pytorch",
    )
    assert rows["9.0"].status is not ComboState.VALID


def test_a_catalog_lacks_a_name(tmp_path: Path) -> None:
    with pytest.raises(NothingSelectedError, match="pytorch-9"):
        cataloged(tmp_path, "pytorch-9", image=make_image())
