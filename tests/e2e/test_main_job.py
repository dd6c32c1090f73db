"""The main job: `imagefactory build pytorch-2.3-cu121`, from PyPI's real wheels to an image that works.

Its PyTorch stands for all by day: the GPU suite is rehearsed in it, and what exports models is built on it.
Where only the way is tried an image of a few MB takes it by day, and this one as well by night.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import pairs, rehearsal
from tests.e2e.numbers import (
    assert_nodes,
    assert_numbers,
    assert_portable,
    assert_profile,
    assert_several,
)
from tests.e2e.portable_page import follow_page, own_root
from tests.e2e.training import assert_emulated, assert_two
from tests.services.factory import TINY_RECIPE, Factory, copy_store
from tests.services.tier import many

pytestmark = pytest.mark.timeout(2400)  # Gigabytes are built, and networks trained on what CPU there is.

MAIN, TINY = "pytorch-2.3-cu121", "tiny-12.1-cu121"
# The suite exports where a lock holds ONNX Runtime for GPUs, whose provider finds no cuDNN 9 here.
EXPORTING = "exporting-2.3-cu121"
EXPORTING_RECIPE = """\
family: exporting
description: PyTorch of the main job with what exports models
packages: [onnx, "onnxruntime-gpu==1.26.*"]
checks: [packages, import, unprivileged]
matrix:
  - on: pytorch-2.3-cu121
"""


@pytest.fixture(scope="module")
def built(factory: Factory) -> dict[str, Any]:
    return factory.build(MAIN)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target that is built, a program that says `said` in it, and another target that shares packages."""

    factory: Factory
    target: str
    built: dict[str, Any]
    code: str
    said: str
    other: str
    grown: float
    """A layer's bytes to one of its wheel's, at most: there is byte code in it as well."""


@pytest.fixture(scope="module", params=many((TINY,), (TINY, MAIN)))
def case(
    request: pytest.FixtureRequest, factory: Factory, tiny_root: Path, small_store: Path, scratch: Path
) -> Case:
    if request.param == MAIN:
        return Case(
            factory=factory,
            target=MAIN,
            built=request.getfixturevalue("built"),
            code="import torch; print(torch.__version__, torch.version.cuda)",
            said="2.3.1+cu121 12.1\n",
            other="pytorch-2.1-cu121",  # both bring CUDA 12.1's libraries
            grown=1.05,
        )
    root = Path(shutil.copytree(tiny_root, scratch / "tiny"))
    other = TINY_RECIPE.replace("family: tiny", "family: other").replace("idna==3.7", "idna==3.6")
    (root / "recipes" / "other.yaml").write_text(other)
    store = copy_store(small_store, scratch / "tiny-store")
    tiny = Factory(store=store, cache=factory.cache, root=root)
    tiny.run("lock", "other-12.1-cu121")
    return Case(
        factory=tiny,
        target=TINY,
        built=tiny.build(TINY),
        code="import idna, markupsafe; print(idna.__version__, markupsafe.__version__)",
        said="3.7 2.1.5\n",
        other="other-12.1-cu121",
        grown=3,
    )


def blobs(factory: Factory) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (factory.store / "blobs" / "sha256").iterdir()}


def test_the_image_is_built_tried_and_not_called_proven(built: dict[str, Any]) -> None:
    assert built["fresh"] is True
    assert built["gpu"] == "not-tested"
    smoke = built["smoke"]
    assert smoke["passed"] is True
    states = {check["name"]: check["state"] for check in smoke["checks"]}
    assert states == dict.fromkeys(
        ("packages", "libraries", "import", "cuda-version", "compute", "compiler", "unprivileged"), "passed"
    )


def test_python_inside_it_has_torch_with_its_cuda(built: dict[str, Any], factory: Factory) -> None:
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    done = factory.run("run", MAIN, "--", "python", "-c", code)
    assert done.stdout == "2.3.1+cu121 12.1\n"


def test_the_commands_exit_code_is_the_commands(built: dict[str, Any], factory: Factory) -> None:
    assert factory.run("run", MAIN, "--", "sh", "-c", "exit 37", code=None).returncode == 37
    assert factory.run("run", MAIN, "--", "no-such-command", code=None).returncode == 127


def test_it_sees_a_gpu_that_is_not_there(built: dict[str, Any], factory: Factory, tmp_path: Path) -> None:
    assert_emulated(factory, MAIN, tmp_path)
    assert_two(factory, MAIN, tmp_path)


def test_its_pytorch_computes_and_trains_as_it_should(
    built: dict[str, Any], factory: Factory, tmp_path: Path
) -> None:
    rehearsal.prepare(factory, MAIN, tmp_path)
    assert_numbers(factory, MAIN, "torch", tmp_path)
    assert_profile(factory, MAIN, tmp_path)
    assert_several(factory, MAIN, tmp_path)
    assert_nodes(factory, MAIN, tmp_path)
    pairs.compare(factory, MAIN, tmp_path)


def test_what_stands_on_it_exports_models_that_compute_the_same(
    built: dict[str, Any], factory: Factory, tmp_path: Path
) -> None:
    """The page on it is followed with this target's name in place of the committed one's."""
    own = own_root(factory, tmp_path)
    (own.root / "recipes/exporting.yaml").write_text(EXPORTING_RECIPE)
    own.run("lock", EXPORTING)
    own.build(EXPORTING)
    rehearsal.prepare(own, EXPORTING, tmp_path)
    assert_portable(own, EXPORTING, tmp_path)
    follow_page(own, EXPORTING)


def test_a_person_reads_where_it_is_and_what_is_not_proven(built: dict[str, Any], factory: Factory) -> None:
    done = factory.run("build", MAIN)
    image = built["image"]
    assert image["digest"] in done.stdout
    assert str(factory.store) in done.stdout
    assert "not-tested" in done.stdout
    assert "nothing changed" in done.stdout
    assert "kept from an earlier run" in done.stdout


def test_what_it_runs_on_is_read_from_its_own_code(built: dict[str, Any], factory: Factory) -> None:
    said = json.loads(factory.run("compat", "--scan", "--json", MAIN).stdout)
    image = built["image"]
    assert said["digest"] == image["digest"]
    (library,) = [one for one in said["libraries"] if one["path"].endswith("/libtorch_cuda.so")]
    targets = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
    assert {"count": 332, "codes": targets} in library["modules"]
    answers = {one["capability"]: one["answer"] for one in said["predictions"]}
    assert {answers[one] for one in ("6.1", "7.0", "8.9", "9.0")} == {"yes"}
    assert {answers[one] for one in ("3.7", "10.0", "12.0")} == {"no"}
    said_no = factory.run("compat", "--scan", MAIN, "--gpu", "RTX 5090", code=9).stdout
    assert "no (predicted): libtorch_cuda.so has no code for 12.0" in said_no


def test_the_plan_leaves_it_out(built: dict[str, Any], factory: Factory) -> None:
    (planned,) = json.loads(factory.run("plan", "--json", MAIN).stdout)["targets"]
    image = built["image"]
    assert (planned["status"], planned["image"]) == ("unchanged", image["digest"])
    assert factory.run("plan", "--github", MAIN).stdout == 'matrix={"include":[]}\n'


def test_nothing_changed_writes_nothing(built: dict[str, Any], factory: Factory) -> None:
    before = blobs(factory)
    again = factory.build(MAIN)
    assert again["fresh"] is False
    assert again["image"] == built["image"]
    assert blobs(factory) == before


def test_what_passed_is_pushed_and_docker_runs_it(case: Case, registry: str, dockerd: str) -> None:
    """The journey of the README; by night docker takes every layer of the image that people want."""
    pushed = case.factory.build(case.target, "--push", "--registry", f"{registry}/main")["pushed"]
    docker = ("docker", "--host", dockerd)
    reference = pushed["reference"].replace(f":{pushed['tag']}@", "@")
    command = [*docker, "run", "--rm", reference, "python", "-c", case.code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    subprocess.run([*docker, "image", "rm", "--force", reference], capture_output=True, check=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == case.said


def test_another_folder_other_workers_and_locale_give_the_same_digest(
    case: Case, small_store: Path, scratch: Path
) -> None:
    """Wheels and debs are shared; segments and layers are made anew, and by night the base."""
    cache, store = scratch / "another" / "cache", scratch / "another" / "a store"
    cache.mkdir(parents=True)
    for name in ("wheels", "debs"):
        (cache / name).symlink_to(case.factory.cache / name)
    extra = {
        "IMAGEFACTORY_WORKERS": "1",
        "TZ": "Pacific/Auckland",
        "LANG": "tr_TR.UTF-8",
        "PYTHONHASHSEED": "7",
    }
    other = replace(case.factory, store=store, cache=cache, extra=extra)
    try:
        if case.target == TINY:
            copy_store(small_store, store)
        assert other.build(case.target, "--no-test")["image"] == case.built["image"]
        assert len(list((cache / "segments").iterdir())) > 0
    finally:
        shutil.rmtree(scratch / "another")  # gigabytes


def test_a_second_target_writes_only_what_differs(case: Case) -> None:
    before = blobs(case.factory)
    other = case.factory.build(case.other, "--no-test")
    written = sum(size for name, size in blobs(case.factory).items() if name not in before)
    mine, theirs = (
        {p["name"]: p for p in json.loads(case.factory.run("show", "--json", name).stdout)["packages"]}
        for name in (case.target, case.other)
    )
    differing = {name for name in theirs if mine.get(name, {}).get("sha256") != theirs[name]["sha256"]}
    first = {layer["digest"] for layer in case.built["image"]["layers"]}
    new = [layer for layer in other["image"]["layers"] if layer["digest"] not in first]
    # What a layer of a differing package weighs, compressed: the wheel's own size is the yardstick.
    wheels = sum(theirs[name]["size"] for name in differing)
    assert new
    assert sum(layer["size"] for layer in new) <= written
    assert written <= case.grown * wheels < sum(package["size"] for package in theirs.values())
    case.factory.run("image", "list")


def test_an_export_has_every_blob_in_full(case: Case, scratch: Path) -> None:
    """Other tools read small ones in tests/engines/test_archive.py; skopeo would unpack it first."""
    path = scratch / "exported.tar"
    try:
        case.factory.run("image", "export", case.target, "--format", "oci-archive", "-o", str(path))
        with tarfile.open(path) as archive:
            sizes = {Path(member.name).name: member.size for member in archive if member.isfile()}
    finally:
        path.unlink(missing_ok=True)
    image = case.built["image"]
    assert sizes.keys() > {image["config"].removeprefix("sha256:")}
    for layer in image["layers"]:
        assert sizes[layer["digest"].removeprefix("sha256:")] == layer["size"]
