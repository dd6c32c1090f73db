""".sif files through a registry, and what docker and apptainer send, fetch and run by themselves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.services.factory import Factory

TARGET = "tiny-12.1-cu121"
LOOK = "import idna, sys; print(idna.__version__, sys.prefix)"
SEEN = "3.7 /opt/env\n"


@pytest.fixture(scope="module")
def tiny(tiny_root: Path, small_factory: Factory, registry: str, dockerd: str, apptainer: str) -> Factory:
    extra = {"IMAGEFACTORY_REGISTRY": f"{registry}/publish", "DOCKER_HOST": dockerd}
    return Factory(store=small_factory.store, cache=small_factory.cache, root=tiny_root, extra=extra)


@pytest.fixture(scope="module")
def image(tiny: Factory) -> dict[str, Any]:
    """The assembled image and its push."""
    built = tiny.build(TARGET, "--no-test")
    return {**built["image"], "pushed": pushed(tiny)}


@pytest.fixture(scope="module")
def sif(tiny: Factory, image: dict[str, Any]) -> dict[str, Any]:
    """The push of its .sif, to a repository that has not the image."""
    return pushed(tiny, "--format", "sif")


def pushed(tiny: Factory, *options: str) -> dict[str, Any]:
    (row,) = json.loads(tiny.run("push", "--json", *options, TARGET).stdout)["results"]
    assert isinstance(row, dict)
    return row


def apptainer_runs(apptainer: str, place: str) -> str:
    environ = {**os.environ, "APPTAINER_NOHTTPS": "1"}
    command = [apptainer, "exec", "--containall", place, "python", "-c", LOOK]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pull_sif(tiny: Factory, reference: str, output: Path, *options: str) -> dict[str, Any]:
    arguments = ("--format", "sif", "--json", "-o", str(output), *options)
    value = json.loads(tiny.run("pull", reference, *arguments).stdout)
    assert value["path"] == str(output)
    assert value["sha256"] == f"sha256:{hashlib.sha256(output.read_bytes()).hexdigest()}"
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("runner", ["unshare", "docker", "apptainer"])
def test_every_runner_runs_the_image(tiny: Factory, image: dict[str, Any], runner: str) -> None:
    assert tiny.run("run", "--runner", runner, TARGET, "--", "python", "-c", LOOK).stdout == SEEN
    failed = tiny.run("run", "--runner", runner, TARGET, "--", "sh", "-c", "exit 7", code=None)
    assert failed.returncode == 7


def test_a_module_is_loaded_by_lmod(tiny: Factory, image: dict[str, Any], tmp_path: Path) -> None:
    """Python's wrapper starts it in the image, with its arguments and its exit code."""
    folder = tmp_path / "software"
    wrote = json.loads(
        tiny.run("image", "export", "--json", "-o", str(folder), TARGET, "--format", "module").stdout
    )
    assert wrote["programs"][:1] == ["python"]
    script = f"""
        . /usr/share/lmod/lmod/init/bash
        module use {folder}/modulefiles && module load tiny/12.1-cu121 && cd /
        python -c "$1" 'two words'; python -c 'raise SystemExit(7)' || echo "ended with $?"
        module unload tiny && command -v python
    """
    code = "import idna, sys; print(idna.__version__, sys.prefix, sys.argv[1:])"
    done = subprocess.run(
        ["bash", "-c", script, "bash", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "BASH_ENV": ""},
    )
    said = done.stdout.splitlines()
    assert said[:2] == ["3.7 /opt/env ['two words']", "ended with 7"], done
    assert not said[2].startswith(str(folder))


def containers(dockerd: str, *options: str) -> set[str]:
    command = ["docker", "--host", dockerd, "ps", *options, "--quiet", "--no-trunc"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("script", "states"),
    [("sleep 600", ()), ("trap '' TERM; sleep 600", ()), ("sleep 600", ("--all",))],
    ids=["ends", "does-not-mind", "not-yet-started"],
)
def test_sigterm_ends_what_was_started(
    tiny: Factory, image: dict[str, Any], dockerd: str, script: str, states: tuple[str, ...]
) -> None:
    """Batch systems end jobs so: no container, and no GPU, stays taken. Docker lists what runs, or all."""
    before = containers(dockerd, "--all")
    command = tiny.command("run", "--runner", "docker", TARGET, "--", "sh", "-c", script)
    process = subprocess.Popen(command, env=tiny.environ, stdin=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not containers(dockerd, *states) - before:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM
    assert containers(dockerd, "--all") <= before


def test_apptainer_runs_a_pushed_sif(sif: dict[str, Any], apptainer: str, registry: str) -> None:
    assert sif["tag"].endswith(".sif")
    assert apptainer_runs(apptainer, f"oras://{registry}/{sif['repository']}:{sif['tag']}") == SEEN


def test_the_registrys_own_sif_is_pulled_by_its_image(
    tiny: Factory, image: dict[str, Any], sif: dict[str, Any], tmp_path: Path, apptainer: str
) -> None:
    """docker-registry 2.8 has no referrers API: it is found by the fallback tag."""
    fresh = Factory(store=tmp_path / "store", cache=tiny.cache, root=tiny.root, extra=tiny.extra)
    got = pull_sif(fresh, image["pushed"]["reference"], tmp_path / "a.sif")
    assert got["origin"] == "the registry's own"
    assert sif["tag"] == f"12.1-cu121-{got['sha256'][7:19]}.sif"
    by_tag = pull_sif(fresh, sif["reference"], tmp_path / "b.sif")
    assert by_tag["sha256"] == got["sha256"]
    assert apptainer_runs(apptainer, str(tmp_path / "a.sif")) == SEEN
    assert got["sha256"][7:19] in fresh.run("image", "list").stdout


def test_a_sif_is_made_of_an_image_whose_registry_has_none(
    tiny: Factory, image: dict[str, Any], tmp_path: Path, apptainer: str, registry: str
) -> None:
    elsewhere = pushed(tiny, "--registry", f"{registry}/bare")
    fresh = Factory(store=tmp_path / "store", cache=tiny.cache, root=tiny.root, extra=tiny.extra)
    got = pull_sif(fresh, elsewhere["reference"], tmp_path / "made.sif")
    assert "made here" in got["origin"]
    assert apptainer_runs(apptainer, str(tmp_path / "made.sif")) == SEEN


def test_options_that_do_not_fit_are_told(tiny: Factory) -> None:
    assert "--format sif" in tiny.run("pull", "-o", "x.sif", TARGET, code=2).stderr
    assert "--format sif" in tiny.run("push", "--compression", "small", TARGET, code=2).stderr
