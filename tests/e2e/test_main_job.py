"""The main job: `imagefactory build pytorch-2.3-cu121`, from PyPI's real wheels to an image that works."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.e2e.training import assert_emulated, assert_two
from tests.services.factory import Factory

MAIN = "pytorch-2.3-cu121"


@pytest.fixture(scope="module")
def built(factory: Factory) -> dict[str, object]:
    return factory.build(MAIN)


def blobs(factory: Factory) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (factory.store / "blobs" / "sha256").iterdir()}


def test_the_image_is_built_tried_and_not_called_proven(built: dict[str, object]) -> None:
    assert built["fresh"] is True
    assert built["gpu"] == "not-tested"
    smoke = built["smoke"]
    assert isinstance(smoke, dict)
    assert smoke["passed"] is True
    states = {check["name"]: check["state"] for check in smoke["checks"]}
    assert states == dict.fromkeys(
        ("packages", "libraries", "import", "cuda-version", "compute", "compiler", "unprivileged"), "passed"
    )


def test_python_inside_it_has_torch_with_its_cuda(built: dict[str, object], factory: Factory) -> None:
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    done = factory.run("run", MAIN, "--", "python", "-c", code)
    assert done.stdout == "2.3.1+cu121 12.1\n"


def test_the_commands_exit_code_is_the_commands(built: dict[str, object], factory: Factory) -> None:
    assert factory.run("run", MAIN, "--", "sh", "-c", "exit 37", code=None).returncode == 37
    assert factory.run("run", MAIN, "--", "no-such-command", code=None).returncode == 127


def test_it_sees_a_gpu_that_is_not_there(built: dict[str, object], factory: Factory, tmp_path: Path) -> None:
    assert_emulated(factory, MAIN, tmp_path)
    assert_two(factory, MAIN, tmp_path)


def test_a_person_reads_where_it_is_and_what_is_not_proven(
    built: dict[str, object], factory: Factory
) -> None:
    done = factory.run("build", MAIN)
    image = built["image"]
    assert isinstance(image, dict)
    assert image["digest"] in done.stdout
    assert str(factory.store) in done.stdout
    assert "not-tested" in done.stdout
    assert "nothing changed" in done.stdout
    assert "kept from an earlier run" in done.stdout


def test_what_it_runs_on_is_read_from_its_own_code(built: dict[str, object], factory: Factory) -> None:
    said = json.loads(factory.run("inspect", "--json", MAIN).stdout)
    image = built["image"]
    assert isinstance(image, dict)
    assert said["digest"] == image["digest"]
    (library,) = [one for one in said["libraries"] if one["path"].endswith("/libtorch_cuda.so")]
    targets = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
    assert {"count": 332, "codes": targets} in library["modules"]
    answers = {one["capability"]: one["answer"] for one in said["predictions"]}
    assert {answers[one] for one in ("6.1", "7.0", "8.9", "9.0")} == {"yes"}
    assert {answers[one] for one in ("3.7", "10.0", "12.0")} == {"no"}
    said_no = factory.run("inspect", MAIN, "--gpu", "RTX 5090", code=9).stdout
    assert "no (predicted): libtorch_cuda.so has no code for 12.0" in said_no


def test_the_plan_leaves_it_out(built: dict[str, object], factory: Factory) -> None:
    (planned,) = json.loads(factory.run("plan", "--json", MAIN).stdout)["targets"]
    image = built["image"]
    assert isinstance(image, dict)
    assert (planned["state"], planned["image"]) == ("unchanged", image["digest"])
    assert factory.run("plan", "--github", MAIN).stdout == 'matrix={"include":[]}\n'


def test_what_passed_is_pushed_and_docker_runs_it(
    built: dict[str, object], factory: Factory, registry: str, dockerd: str
) -> None:
    """The journey of the README, with the image that people want: docker takes every one of its layers."""
    pushed = factory.build(MAIN, "--push", "--registry", f"{registry}/main")["pushed"]
    docker = ("docker", "--host", dockerd)
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    reference = pushed["reference"].replace(f":{pushed['tag']}@", "@")
    command = [*docker, "run", "--rm", reference, "python", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    subprocess.run([*docker, "image", "rm", "--force", reference], capture_output=True, check=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2.3.1+cu121 12.1\n"


def test_nothing_changed_writes_nothing(built: dict[str, object], factory: Factory) -> None:
    before = blobs(factory)
    again = factory.build(MAIN)
    assert again["fresh"] is False
    assert again["image"] == built["image"]
    assert blobs(factory) == before


def test_another_folder_other_workers_and_locale_give_the_same_digest(
    built: dict[str, object], factory: Factory, scratch: Path
) -> None:
    """Wheels and debs are shared; base, segments and layers are made anew."""
    cache = scratch / "another" / "cache"
    cache.mkdir(parents=True)
    for name in ("wheels", "debs"):
        (cache / name).symlink_to(factory.cache / name)
    extra = {
        "IMAGEFACTORY_WORKERS": "1",
        "TZ": "Pacific/Auckland",
        "LANG": "tr_TR.UTF-8",
        "PYTHONHASHSEED": "7",
    }
    other = Factory(store=scratch / "another" / "a store", cache=cache, extra=extra)
    try:
        assert other.build(MAIN, "--no-smoke")["image"] == built["image"]
        assert len(list((cache / "segments").iterdir())) > 0
    finally:
        shutil.rmtree(scratch / "another")  # gigabytes


def test_a_second_target_writes_only_what_differs(built: dict[str, object], factory: Factory) -> None:
    """pytorch 2.1 and 2.3 both bring CUDA 12.1's libraries."""
    before = blobs(factory)
    other = factory.build("pytorch-2.1-cu121", "--no-smoke")
    assert not isinstance(built["image"], str)
    written = sum(size for name, size in blobs(factory).items() if name not in before)
    packages = {
        name: {p["name"]: p for p in json.loads(factory.run("show", "--json", name).stdout)["packages"]}
        for name in (MAIN, "pytorch-2.1-cu121")
    }
    mine, theirs = packages[MAIN], packages["pytorch-2.1-cu121"]
    differing = {name for name in theirs if mine.get(name, {}).get("sha256") != theirs[name]["sha256"]}
    first = {layer["digest"] for layer in built["image"]["layers"]}  # type: ignore[index,call-overload]
    new = [layer for layer in other["image"]["layers"] if layer["digest"] not in first]
    # What a layer of a differing package weighs, compressed: the wheel's own size is the yardstick.
    wheels = sum(theirs[name]["size"] for name in differing)
    assert sum(layer["size"] for layer in new) <= written
    assert written <= 1.05 * wheels, (written, wheels, sorted(differing))
    factory.run("store", "list")


def test_an_export_of_gigabytes_has_every_blob_in_full(
    built: dict[str, object], factory: Factory, scratch: Path
) -> None:
    """Other tools read small ones in tests/engines/test_archive.py; skopeo would unpack it first."""
    path = scratch / "main.tar"
    try:
        factory.run("export", MAIN, "--format", "oci-archive", "-o", str(path))
        with tarfile.open(path) as archive:
            sizes = {Path(member.name).name: member.size for member in archive if member.isfile()}
    finally:
        path.unlink(missing_ok=True)
    image = built["image"]
    assert isinstance(image, dict)
    assert sizes.keys() > {image["config"].removeprefix("sha256:")}
    for layer in image["layers"]:
        assert sizes[layer["digest"].removeprefix("sha256:")] == layer["size"]
