"""One target by three engines: the same packages, the same files of them, the same smoke test passed.

Each image is started by its own engine's runner, and the same small program (lister.py) looks around inside.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.seen import BYTE_CODE, RUNNERS, Seen, see
from tests.services.factory import lend, make_root
from tests.services.tier import many

pytestmark = pytest.mark.timeout(2400)  # Two engines install gigabytes before the first test.

SMALL = "small-12.1-cu121"
TARGETS = many((SMALL,), (SMALL, "onnxruntime-1.18-cu118", "pytorch-2.3-cu121"))
# Shared libraries beside Python, console scripts, a .pth file, and libraries of CUDA to be found.
SMALL_RECIPE = """\
family: small
description: Packages that are installed in different ways, for a comparison of engines
source: pypi
framework: nvidia-cuda-runtime-cu12
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
checks: [packages, libraries, unprivileged]
packages: ["numpy==1.26.4", "coloredlogs==15.0.1", "nvidia-cuda-nvrtc-cu12==12.1.105"]
system: [jq]
files: {/app: [recipes, start.sh]}
workdir: /app
entrypoint: [/app/start.sh]
command: [pwd]
matrix:
  - version: "12.1"
    cuda: ["12.1"]
"""


def without_apptainers_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Apptainer appends the folder of the host's GPU libraries (`--nv`), whether or not there is one."""
    path = environment.get("LD_LIBRARY_PATH", "")
    kept = [folder for folder in path.split(":") if folder and folder != "/.singularity.d/libs"]
    return {**environment, "LD_LIBRARY_PATH": ":".join(kept)}


@pytest.fixture(scope="module", params=TARGETS)
def seen(
    request: pytest.FixtureRequest, scratch: Path, dockerd: str, apptainer: str
) -> Iterator[dict[str, Seen]]:
    """By engine, in a store of the target's own, which is freed before the next: some 20 GB."""
    target = request.param
    folder = scratch / f"three-{target}"
    store: Path = request.getfixturevalue("small_store" if target == SMALL else "base_store")
    mine = replace(lend(store, folder), extra={"DOCKER_HOST": dockerd})
    if target == SMALL:
        bases_of = request.getfixturevalue("tiny_root")
        mine = replace(mine, root=make_root(folder / "root", bases_of, small=SMALL_RECIPE))
        start = folder / "root" / "start.sh"
        start.write_text('#!/bin/sh\nexec "$@"\n')
        start.chmod(0o755)
        mine.run("lock", target)
        mine.run("render", target)
    found = {}
    try:
        for engine in RUNNERS:
            found[engine] = see(mine, target, engine)
            assert found[engine].built["fresh"]
            if target == SMALL:
                assert found[engine].inside["own"], "what only this target has is compared below"
                own = replace(mine, extra={**mine.extra, "IMAGEFACTORY_ENGINE": engine})
                assert own.run("run", "--runner", RUNNERS[engine], target).stdout == "/app\n"
        yield found
    finally:
        shutil.rmtree(folder)
        prune = ["docker", "--host", dockerd, "system", "prune", "--all", "--force"]
        subprocess.run(prune, capture_output=True)


def test_each_passes_the_same_smoke_test(seen: dict[str, Seen]) -> None:
    states = {}
    for engine, one in seen.items():
        smoke = one.built["smoke"]
        assert smoke["passed"] is True, (engine, smoke)
        states[engine] = {check["name"]: check["state"] for check in smoke["checks"]}
    assert states["docker"] == states["apptainer"] == states["assemble"]
    assert set(states["assemble"].values()) <= {"passed", "not-applicable"}


def test_they_hold_the_same_packages_and_environment(seen: dict[str, Seen]) -> None:
    for name in ("packages", "debian", "prefix", "python", "environment", "path", "console_scripts"):
        values = {engine: one.inside[name] for engine, one in seen.items()}
        if name == "environment":
            values = {engine: without_apptainers_own(value) for engine, value in values.items()}
        assert values["docker"] == values["apptainer"] == values["assemble"], name
    normal = {name.lower().replace("_", "-").replace(".", "-") for name in seen["docker"].inside["packages"]}
    assert normal == seen["assemble"].locked


def test_debians_packages_lie_above_a_base_that_is_shared(seen: dict[str, Seen]) -> None:
    if not seen["assemble"].inside["own"]:  # of the small target alone
        return
    assert {engine: one.inside["jq"] for engine, one in seen.items()} == dict.fromkeys(RUNNERS, "jq-1.6")


def test_they_hold_the_same_own_files(seen: dict[str, Seen]) -> None:
    own = seen["assemble"].inside["own"]
    if not own:  # of the small target alone
        return
    assert {path: mode for path, (*_, mode) in own.items()} == {
        "/app/start.sh": "0o100755",
        "/app/recipes/bases.yaml": "0o100644",
        "/app/recipes/small.yaml": "0o100644",
    }
    assert seen["docker"].inside["own"] == seen["apptainer"].inside["own"] == own


@pytest.mark.parametrize("engine", ["docker", "apptainer"])
def test_they_hold_the_same_files(seen: dict[str, Seen], engine: str) -> None:
    ours, theirs = seen["assemble"].files(), seen[engine].files()
    assert len(ours) > 1000
    assert sorted(theirs.keys() - ours.keys()) == []
    assert sorted(ours.keys() - theirs.keys()) == []
    differing = {path: (ours[path], theirs[path]) for path in ours if ours[path] != theirs[path]}
    assert differing == {}


def test_everybody_can_read_every_file(seen: dict[str, Seen]) -> None:
    assert {engine: one.inside["unreadable"] for engine, one in seen.items()} == {e: [] for e in RUNNERS}


def test_nobody_has_less_byte_code_than_the_embedded_engine(seen: dict[str, Seen]) -> None:
    """No one can write it later. pip's compileall also compiles packages' own tests, which nobody imports."""
    compiled = {
        engine: {path for path in one.inside["files"] if path.endswith(BYTE_CODE)}
        for engine, one in seen.items()
    }
    assert len(compiled["assemble"]) > 100
    assert compiled["docker"] == compiled["apptainer"] >= compiled["assemble"]
