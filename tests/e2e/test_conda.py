"""Conda environments by the command line: a small real channel, from the recipe to images that run.

The channel (tests/services/channel_made.py) is served on 127.0.0.1 in the place of
https://conda.anaconda.org/made; what comes from PyPI on top comes from the machine's package index.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.seen import RUNNERS, Seen, see
from tests.services.channel_made import MadeChannel, make_channel
from tests.services.channels import ChannelOptions, ChannelServer, Fault, channel_server
from tests.services.factory import Factory, copy_store, make_root
from tests.services.tier import many

TRUE = "https://conda.anaconda.org/made"
TARGET = "tinytorch-1.0-cu121"
ABOVE = "mylab-1.0-cu121"
RECIPE = f"""\
family: tinytorch
description: A framework of the tests, and packages that are hard to install
source: conda
framework: tinytorch
channels: [made]
platform: linux/amd64
base: debian-12
python: "3.{sys.version_info.minor}"
capabilities: ["8.0"]
checks: [packages, libraries, import, unprivileged]
packages: ["tinytool <1.1", click, tinyprefix, scripted, claims-a, claims-b, oddpaths]
pip: ["idna==3.7"]
matrix:
  - version: "1.0"
    cuda: ["12.1"]
"""
# By day apptainer's is compared in tests/engines/test_render_conda.py alone.
ENGINES = many(("assemble", "docker"), tuple(RUNNERS))
LIBRARY = "import idna, numpy, tinytorch; print(tinytorch.library(), tinytorch.cuda, idna.__version__)"


@pytest.fixture(scope="module")
def channel(scratch: Path) -> MadeChannel:
    return make_channel(scratch / "channels" / "made")


@pytest.fixture(scope="module")
def server(channel: MadeChannel) -> Iterator[ChannelServer]:
    with channel_server(channel.folder.parent) as server:
        yield server


@pytest.fixture(scope="module")
def lab(scratch: Path, base_store: Path, factory: Factory, server: ChannelServer) -> Factory:
    """A factory of one conda target, locked."""
    root = make_root(scratch / "conda", tinytorch=RECIPE)
    extra = {"IMAGEFACTORY_CHANNELS": f"made={server.url}/made"}
    copy_store(base_store, scratch / "conda-base")  # for `fresh`
    store = copy_store(base_store, scratch / "conda-store")
    here = Factory(store=store, cache=factory.cache, root=root, extra=extra)
    here.run("lock", TARGET)
    return here


def fresh(lab: Factory, name: str) -> Factory:
    """The same root with an empty cache but for .debs, and a store that holds the base alone."""
    folder = lab.store.with_name(name)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cache").mkdir(parents=True)
    (folder / "cache" / "debs").symlink_to(lab.cache / "debs")
    store = copy_store(lab.store.with_name("conda-base"), folder / "store")
    return replace(lab, store=store, cache=folder / "cache")


def conda_lock(root: Path, target: str = TARGET) -> Path:
    return root / "lockfiles" / f"{target}.conda-lock.yml"


def locked(root: Path, target: str = TARGET) -> dict[str, dict[str, Any]]:
    """Name -> row of a lock, read as YAML."""
    rows = yaml.safe_load(conda_lock(root, target).read_text())["package"]
    return {row["name"]: row for row in rows}


def layers(built: dict[str, Any]) -> list[tuple[str, str]]:
    return [(layer["digest"], layer["diff_id"]) for layer in built["image"]["layers"]]


# --- the lock ------------------------------------------------------------------------------------


def test_the_lock_holds_the_cuda_build_under_true_addresses(lab: Factory, server: ChannelServer) -> None:
    rows = locked(lab.root)
    assert "cuda12.1" in rows["tinytorch"]["url"]
    assert {row["url"].rpartition("/")[0] for row in rows.values()} == {f"{TRUE}/linux-64", f"{TRUE}/noarch"}
    assert all(re.fullmatch(r"[0-9a-f]{64}", row["hash"]["sha256"]) for row in rows.values())
    pip = (lab.root / "lockfiles" / f"{TARGET}.requirements.txt").read_text()
    assert re.findall(r"^([a-z-]+)==", pip, re.MULTILINE) == ["idna"]
    assert "127.0.0.1" not in conda_lock(lab.root).read_text() + pip


def test_conda_lock_reads_it_and_renders_it(lab: Factory) -> None:
    from conda_lock.conda_lock import render_lockfile_for_platform
    from conda_lock.lockfile import parse_conda_lock_file

    parsed = parse_conda_lock_file(conda_lock(lab.root))
    explicit = render_lockfile_for_platform(
        lockfile=parsed,
        include_dev_dependencies=False,
        extras=None,
        kind="explicit",
        platform="linux-64",
        suppress_warning_for_pip_and_explicit=True,
    )
    urls = {line.partition("#")[0] for line in explicit if line.startswith("https://")}
    assert urls == {row["url"] for row in locked(lab.root).values()}


def test_nothing_changed_asks_no_channel(lab: Factory, server: ChannelServer) -> None:
    before = conda_lock(lab.root).read_bytes()
    server.asked.clear()
    lab.run("lock", TARGET)
    lab.run("lock", "--check")
    assert server.asked == []
    assert conda_lock(lab.root).read_bytes() == before
    (row,) = json.loads(lab.run("list", "--json").stdout)["targets"]
    assert row["lock"] == "ok"


def test_a_person_sees_what_is_locked(lab: Factory) -> None:
    shown = json.loads(lab.run("show", "--json", TARGET).stdout)
    names = {package["name"] for package in shown["packages"]}
    assert {"tinytorch", "numpy", "python", "cuda-cudart", "idna"} <= names
    assert "tinytorch" in lab.run("show", TARGET).stdout


def test_a_target_without_a_solution_says_why(lab: Factory, scratch: Path) -> None:
    text = RECIPE.replace('["tinytool <1.1"', '["tinytool >=3"')
    here = replace(lab, root=make_root(scratch / "conda-unsolvable", tinytorch=text))
    failed = here.run("lock", TARGET, code=5)
    assert "tinytool" in failed.stderr
    (row,) = json.loads(here.run("list", "--json").stdout)["targets"]
    assert row["lock"] == "unsolvable"
    assert "unsolvable" in here.run("list").stdout
    assert "tinytool" in here.run("lock", TARGET, "--explain", code=5).stdout


def test_a_pip_requirement_that_contradicts_conda(lab: Factory, scratch: Path) -> None:
    text = RECIPE.replace('["idna==3.7"]', '["numpy>=2"]')
    here = replace(lab, root=make_root(scratch / "conda-contradicts", tinytorch=text))
    failed = here.run("lock", TARGET, code=5)
    assert all(value in failed.stderr for value in ("'numpy>=2'", "numpy 1.26.4"))
    assert "'numpy >=2' in `packages`" in failed.stderr


def test_a_channel_that_is_down(lab: Factory, scratch: Path, server: ChannelServer) -> None:
    here = replace(
        lab, root=make_root(scratch / "conda-down", tinytorch=RECIPE), cache=scratch / "down-cache"
    )
    server.fail("repodata", Fault(status=503))
    try:
        failed = here.run("lock", TARGET, code=5)
    finally:
        server.mend()
    assert TRUE in failed.stderr
    assert list((here.root / "lockfiles").glob("tinytorch*")) == []
    here.run("lock", TARGET)


# --- images --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(lab: Factory) -> dict[str, Any]:
    return lab.build(TARGET)


def test_assemble_builds_it_without_conda(lab: Factory, built: dict[str, Any]) -> None:
    assert built["smoke"]["passed"] is True
    states = {check["name"]: check["state"] for check in built["smoke"]["checks"]}
    assert states == dict.fromkeys(("packages", "libraries", "import", "unprivileged"), "passed")
    assert lab.run("run", TARGET, "--", "python", "-c", LIBRARY).stdout == "1.0 cuda12.1 12.1 3.7\n"
    assert lab.run("run", TARGET, "--", "tinytool").stdout == "tinytool 1.0\n"
    assert lab.run("run", TARGET, "--", "tinyprefix").stdout == "/opt/env/share\n"
    assert lab.run("run", TARGET, "--", "cat", "/opt/env/etc/scripted.txt").stdout == "42\n"
    assert lab.run("run", TARGET, "--", "sh", "-c", "command -v python").stdout == "/opt/env/bin/python\n"


def test_wheels_stand_on_condas_python_where_the_base_has_none(
    lab: Factory, scratch: Path, server: ChannelServer
) -> None:
    recipe = f"""\
family: tiny
description: Wheels alone
source: pypi
framework: idna
platform: linux/amd64
base: debian-12
python: "3.{sys.version_info.minor}"
checks: [packages, libraries, import, unprivileged]
constraints: [markupsafe<3]
packages: [markupsafe]
matrix:
  - version: "3.7"
    cuda: [none]
"""
    root = make_root(scratch / "conda-python", tiny=recipe)
    bases = root / "recipes/bases.yaml"
    bases.write_text(bases.read_text().replace('    python: "3.11"\n', ""))
    here = replace(lab, root=root, extra={"IMAGEFACTORY_CHANNELS": f"conda-forge={server.url}/made"})
    python = f"3.{sys.version_info.minor}"
    said = here.run("lock", "tiny-3.7-cpu").stderr
    assert f"tiny-3.7-cpu: Python {python} comes from conda-forge, as debian-12 has none" in said
    rows = locked(root, "tiny-3.7-cpu")
    assert rows["python"]["version"].startswith(python)
    assert rows["python"]["url"].startswith("https://conda.anaconda.org/conda-forge/")
    assert here.build("tiny-3.7-cpu")["smoke"]["passed"] is True
    code = "import sys, idna, markupsafe; print(sys.prefix, idna.__version__, markupsafe.__version__[0])"
    assert here.run("run", "tiny-3.7-cpu", "--", "python", "-c", code).stdout == "/opt/env 3.7 2\n"


def test_the_same_lock_gives_the_same_digest(lab: Factory, built: dict[str, Any]) -> None:
    again = fresh(lab, "conda-again").build(TARGET, "--no-test")
    assert again["fresh"] is True
    assert again["image"]["digest"] == built["image"]["digest"]


def test_nothing_changed_writes_nothing(lab: Factory, built: dict[str, Any]) -> None:
    again = lab.build(TARGET)
    assert again["fresh"] is False
    assert again["image"] == built["image"]


@pytest.fixture(scope="module")
def seen(lab: Factory, dockerd: str, apptainer: str, built: dict[str, Any]) -> dict[str, Seen]:
    """What each engine made, by engine."""
    mine = replace(lab, extra={**lab.extra, "DOCKER_HOST": dockerd})
    mine.run("render", TARGET)
    try:
        return {engine: see(mine, TARGET, engine) for engine in ENGINES}
    finally:
        lab.run("build", "--no-test", TARGET, code=None)


def test_all_engines_install_the_same(seen: dict[str, Seen]) -> None:
    ours = seen["assemble"]
    mine = ours.files()
    assert {"conda-meta/history", "etc/scripted.txt", "bin/tinytool"} <= mine.keys()
    for engine in ENGINES[1:]:
        other = seen[engine]
        assert other.built["smoke"]["passed"] is True
        for name in ("packages", "debian", "prefix", "python", "path"):
            assert other.inside[name] == ours.inside[name], (engine, name)
        assert other.inside["environment"]["CONDA_PREFIX"] == "/opt/env"
        theirs = other.files()
        assert sorted(theirs.keys() ^ mine.keys()) == [], engine
        differing = {path: (mine[path], theirs[path]) for path in mine if theirs[path] != mine[path]}
        assert differing == {}, engine
        assert other.inside["unreadable"] == []


def test_the_committed_definition_is_current(lab: Factory, seen: dict[str, Seen]) -> None:
    lab.run("render", "--check", TARGET)
    folder = lab.root / "definitions" / TARGET
    assert {"Dockerfile", "apptainer.def", "explicit.txt", "install.py", "rattler.txt"} <= {
        path.name for path in folder.iterdir()
    }
    assert "127.0.0.1" not in "".join(path.read_text() for path in folder.iterdir())


def test_an_update_moves_that_package_and_one_layer(
    lab: Factory, built: dict[str, Any], scratch: Path
) -> None:
    root = scratch / "conda-update"
    shutil.copytree(lab.root, root)
    here, before = replace(lab, root=root), locked(lab.root)
    recipe = root / "recipes" / "tinytorch.yaml"
    recipe.write_text(RECIPE.replace("tinytool <1.1", "tinytool"))
    here.run("lock", TARGET)  # the recipe allows more, and nothing must move
    assert locked(root) == before
    here.run("lock", TARGET, "--upgrade-package", "tinytool")
    after = locked(root)
    assert {name for name in after if after[name] != before.get(name)} == {"tinytool"}
    assert after["tinytool"]["version"] == "1.1"
    moved = here.build(TARGET)
    old, new = layers(built), layers(moved)
    assert len(new) == len(old)
    # The package's bucket, and no other: what the scripts write is the same again.
    assert sum(one != other for one, other in zip(old, new, strict=True)) == 1
    assert here.run("run", TARGET, "--", "tinytool").stdout == "tinytool 1.1\n"
    lab.build(TARGET, "--no-test")


# --- what goes wrong -----------------------------------------------------------------------------


# The other two by their definitions: tests/engines/test_render_conda.py.
@pytest.mark.parametrize("engine", many(["assemble"], list(RUNNERS)))
def test_a_changed_hash_is_refused(
    lab: Factory, seen: dict[str, Seen], dockerd: str, scratch: Path, engine: str
) -> None:
    root = scratch / f"conda-tampered-{engine}"
    shutil.copytree(lab.root, root)
    extra = {**lab.extra, "DOCKER_HOST": dockerd}
    here = replace(fresh(lab, "conda-tampered"), root=root, extra=extra)
    path, digest = conda_lock(root), locked(root)["tinytorch"]["hash"]["sha256"]
    path.write_text(path.read_text().replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1")))
    failed = here.run("build", "--engine", engine, TARGET, code=7)
    assert "tinytorch-1.0" in failed.stderr
    assert "sha256" in failed.stderr
    assert "not built" in here.run("run", TARGET, "--", "true", code=7).stderr


@pytest.mark.parametrize(
    "fault",
    [Fault(cut="file"), Fault(cut="connection"), Fault(status=404)],
    ids=["truncated", "torn", "gone"],
)
def test_a_package_that_does_not_come_whole(
    lab: Factory, built: dict[str, Any], server: ChannelServer, fault: Fault
) -> None:
    here = fresh(lab, "conda-truncated")
    server.fail(r"tinytorch-1\.0", fault)
    try:
        failed = here.run("build", TARGET, "--no-test", code=7)
    finally:
        server.mend()
    assert "tinytorch-1.0" in failed.stderr
    if fault.status == 404:
        assert f"imagefactory lock {TARGET} --upgrade-package tinytorch" in failed.stderr
    assert here.build(TARGET, "--no-test")["image"]["digest"] == built["image"]["digest"]


def test_a_channel_that_goes_down_in_the_middle(
    lab: Factory, built: dict[str, Any], server: ChannelServer
) -> None:
    """What came before is kept: the next build fetches the rest alone."""
    here = fresh(lab, "conda-middle")
    server.ends_after = 4
    try:
        here.run("build", TARGET, "--no-test", code=7)
    finally:
        server.mend()
    server.asked.clear()
    assert here.build(TARGET, "--no-test")["image"]["digest"] == built["image"]["digest"]
    fetched = {path for path in server.asked if path.endswith((".conda", ".tar.bz2"))}
    assert 0 < len(fetched) < len(locked(lab.root))


# --- where packages come from --------------------------------------------------------------------


def test_a_channel_in_a_local_folder(
    lab: Factory, built: dict[str, Any], channel: MadeChannel, server: ChannelServer, scratch: Path
) -> None:
    """The setting says where, the recipe and the lock do not know."""
    root = make_root(scratch / "conda-folder", tinytorch=RECIPE)
    (root / "imagefactory.toml").write_text(f'[channels]\nmade = "{channel.folder}"\n')
    here = replace(fresh(lab, "conda-folder-store"), root=root, extra={})
    here.run("config", "--trust")
    server.asked.clear()
    here.run("lock", TARGET)
    assert locked(root) == locked(lab.root)
    assert here.build(TARGET, "--no-test")["image"]["digest"] == built["image"]["digest"]
    assert server.asked == []


def test_a_channel_by_its_own_address(lab: Factory, channel: MadeChannel, scratch: Path) -> None:
    """A folder may also be the channel itself: then its address stands in the lock."""
    text = RECIPE.replace("[made]", f'["{channel.address}"]')
    here = replace(lab, root=make_root(scratch / "conda-address", tinytorch=text), extra={})
    here.run("lock", TARGET)
    assert locked(here.root)["tinytorch"]["url"].startswith(f"{channel.address}/linux-64/")


@pytest.mark.parametrize("kind", ["netrc", "token", "bearer"])
def test_a_private_channel(
    lab: Factory, built: dict[str, Any], channel: MadeChannel, scratch: Path, kind: str
) -> None:
    secret = "hunter2canary"
    options = {
        "netrc": ChannelOptions(users={"bob": secret}),
        "token": ChannelOptions(token=secret),
        "bearer": ChannelOptions(bearer=secret),
    }[kind]
    home = scratch / f"home-{kind}"
    home.mkdir()
    root = make_root(scratch / f"conda-private-{kind}", tinytorch=RECIPE)
    with channel_server(channel.folder.parent, options) as private:
        extra = {"IMAGEFACTORY_CHANNELS": f"made={private.url}/made"}
        here = replace(fresh(lab, "conda-private-store"), root=root, extra=extra)
        refused = here.run("lock", TARGET, code=5)
        assert "401" in refused.stderr
        if kind == "netrc":
            (home / ".netrc").write_text(f"machine 127.0.0.1 login bob password {secret}\n")
            (home / ".netrc").chmod(0o600)
            extra["NETRC"] = str(home / ".netrc")
        else:
            name = "CondaToken" if kind == "token" else "BearerToken"
            (home / "credentials.json").write_text(json.dumps({"127.0.0.1": {name: secret}}))
            extra["RATTLER_AUTH_FILE"] = str(home / "credentials.json")
        here = replace(here, extra=extra)
        done = [here.run("lock", TARGET), here.run("build", TARGET, "--no-test", "--json")]
    assert locked(root) == locked(lab.root)
    assert json.loads(done[1].stdout)["results"][0]["image"]["digest"] == built["image"]["digest"]
    told = "".join(one.stdout + one.stderr for one in [refused, *done])
    assert secret not in told
    for path in (p for p in root.rglob("*") if p.is_file()):
        assert secret not in path.read_text(), path


# --- a target on another, and environments that come in ------------------------------------------


def test_a_target_on_a_conda_target(lab: Factory, scratch: Path) -> None:
    root = make_root(scratch / "conda-on", tinytorch=RECIPE.replace(", oddpaths", ""))
    here = replace(lab, root=root)
    here.run("lock", TARGET)
    built = here.build(TARGET, "--no-test")
    requirements = root / "requirements.txt"
    requirements.write_text("markupsafe==2.1.5\nnumpy\n")
    here.run("recipe", "import", str(requirements), "--family", "mylab", "--extends", TARGET)
    recipe = root / "recipes" / "mylab.yaml"
    assert "\npackages: []\n" in recipe.read_text()
    recipe.write_text(recipe.read_text().replace("\npackages: []\n", "\npackages: [oddpaths]\n"))
    here.run("lock", ABOVE)
    under, over = locked(root), locked(root, ABOVE)
    assert {name: row["url"] for name, row in under.items()}.items() <= {
        name: row["url"] for name, row in over.items()
    }.items()
    assert over.keys() - under.keys() == {"oddpaths"}
    pip = (root / "lockfiles" / f"{ABOVE}.requirements.txt").read_text()
    assert re.findall(r"^([a-z-]+)==", pip, re.MULTILINE) == ["idna", "markupsafe"]
    above = here.build(ABOVE)
    assert above["smoke"]["passed"] is True
    shared, scripts = layers(built)[:-1], layers(built)[-1]
    assert layers(above)[: len(shared)] == shared
    assert len(layers(above)) > len(shared) + 1
    assert layers(above)[-1] == scripts  # what scripts change comes last, and these are the same scripts
    code = "import markupsafe, tinytorch; print(markupsafe.__version__, tinytorch.library())"
    assert here.run("run", ABOVE, "--", "python", "-c", code).stdout == "2.1.5 1.0 cuda12.1\n"
    lab.build(TARGET, "--no-test")  # under the same name in the same store


def test_an_environment_comes_in(lab: Factory, scratch: Path) -> None:
    root = make_root(scratch / "conda-import")
    here = replace(lab, root=root)
    environment = root / "environment.yml"
    environment.write_text(
        f"name: course\nchannels: [made, nodefaults]\ndependencies:\n  - python=3.{sys.version_info.minor}\n"
        "  - tinytorch=1.0\n  - tinytool<1.1\n  - cuda-version=12.1\n  - pip:\n      - idna==3.7\n"
    )
    told = here.run(
        "recipe", "import", str(environment), "--family", "course", "--framework", "tinytorch", code=None
    )
    assert told.returncode == 0, told.stderr
    (row,) = json.loads(here.run("list", "--json").stdout)["targets"]
    here.run("lock", row["target"])
    rows = locked(root, row["target"])
    assert {"tinytorch", "tinytool", "python"} <= rows.keys()
    assert rows["tinytool"]["version"] == "1.0"
    assert "idna==3.7" in (root / "lockfiles" / f"{row['target']}.requirements.txt").read_text()


def test_a_pixi_lock_becomes_an_image_of_its_files(
    lab: Factory, built: dict[str, Any], scratch: Path
) -> None:
    """The image has the layers of the image whose lock pixi's was written from: the same files."""
    root = make_root(scratch / "conda-pixi")
    here = replace(lab, root=root)
    pixi = root / "pixi.lock"
    pixi.write_text(lab.run("lock", TARGET, "--render", "pixi").stdout)
    options = ("--family", "course", "--framework", "tinytorch", "--frozen")
    here.run("recipe", "import", str(pixi), *options)
    (row,) = json.loads(here.run("list", "--json").stdout)["targets"]
    here.run("lock", row["target"])
    assert {one["hash"]["sha256"] for one in locked(root, row["target"]).values()} == {
        one["hash"]["sha256"] for one in locked(lab.root).values()
    }
    assert here.run("lock", "--check", row["target"]).returncode == 0
    digests = {layer["diff_id"] for layer in here.build(row["target"])["image"]["layers"]}
    assert digests > {layer["diff_id"] for layer in built["image"]["layers"][:-1]}
