"""Rendered files of conda targets: what they install, in which order, and what they are told of a site."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.build import conda_install, folders
from imagefactory.build.definition import define, forward_links
from imagefactory.build.folders import check_definitions, render, write_definitions
from imagefactory.build.render import render_apptainer, render_dockerfile
from imagefactory.build.steps import copies, explicit_lists, steps
from imagefactory.errors import RecipeError
from imagefactory.lock.files import lock_digest
from imagefactory.model import BaseSpec, BuildSpec, Lock, LockedCondaPackage, LockedWheel, OwnFile, Target
from tests.made.diagnostics import reports
from tests.made.errors import fails
from tests.made.rendered import (
    HOSTILE_TEXT,
    NAMES,
    SECTIONS,
    body,
    instructions,
    may_stand,
    parsed,
    section_names,
)
from tests.made.values import hexed, make_base, make_conda, make_lock, make_target

ROOT = Path(__file__).parents[3]
CHANNELS = ("https://conda.anaconda.org/pytorch", "https://conda.anaconda.org/conda-forge")
SYSTEM = (("__archspec", "x86_64"), ("__cuda", "12.1"), ("__glibc", "2.36"))


def package(
    name: str, version: str = "1.0", *, build: str = "h1_0", depends: tuple[str, ...] = ()
) -> LockedCondaPackage:
    return make_conda(f"{name} {version} {build}", *depends)


PYTORCH = package("pytorch", "2.3.1", build="py3.11_cuda12.1_cudnn8.9.2_0", depends=("python >=3.11", "mkl"))
PACKAGES = (package("mkl"), package("python", "3.11.9"), PYTORCH)
WHEEL = LockedWheel(name="idna", version="3.7", filename="idna-3.7-py3-none-any.whl", sha256="2" * 64, size=9)


def conda_target(**changes: object) -> Target:
    fields: dict[str, object] = {
        "name": "pytorch-conda-2.3-cu121",
        "family": "pytorch-conda",
        "source": "conda",
        "framework": "pytorch",
        "requirements": ("pytorch 2.3.*",),
        "channels": CHANNELS,
        "virtual": SYSTEM,
    }
    return make_target(**{**fields, **changes})


def conda_lock(*packages: LockedCondaPackage, wheels: tuple[LockedWheel, ...] = (), target: str = "") -> Lock:
    return make_lock(
        target=target or "pytorch-conda-2.3-cu121",
        solver="py-rattler 0.28.0" + (", uv 0.9.1" if wheels else ""),
        conda=packages or PACKAGES,
        wheels=wheels,
        channels=CHANNELS,
        virtual=SYSTEM,
    )


@pytest.fixture
def definition() -> BuildSpec:
    return define(conda_target(), make_base(), conda_lock())


@pytest.fixture
def mixed() -> BuildSpec:
    return define(conda_target(pip=("idna",)), make_base(), conda_lock(wheels=(WHEEL,)))


def on_top(*more: LockedCondaPackage, wheels: tuple[LockedWheel, ...] = ()) -> BuildSpec:
    """A target built on another, with `more` packages and `wheels` above it."""
    below = conda_lock(target="pytorch-conda-2.3-cu121")
    lock = conda_lock(
        *sorted((*PACKAGES, *more), key=lambda p: p.name), wheels=wheels, target="mine-2.3-cu121"
    )
    target = conda_target(name="mine-2.3-cu121", family="mine", on=below.target)
    return define(target, make_base(), lock, (below,))


# --- define ----------------------------------------------------------------------------------------


def test_environment_and_labels(definition: BuildSpec) -> None:
    environment, labels = dict(definition.environment), dict(definition.labels)
    assert environment["CONDA_PREFIX"] == "/opt/env"
    assert "VIRTUAL_ENV" not in environment
    assert labels["org.opencontainers.image.version"] == "2.3.1"
    assert labels["imagefactory.framework"] == "pytorch"
    assert labels["imagefactory.channels"] == " ".join(CHANNELS)
    assert labels["imagefactory.lock"] == lock_digest(definition.lock)
    assert "imagefactory.on" not in labels
    assert dict(on_top().labels)["imagefactory.on"] == "pytorch-conda-2.3-cu121"


def test_a_package_with_a_libcuda_for_older_drivers_is_found_by_nvidias_hook() -> None:
    more = package("cuda-compat-impl", "575.57.08")
    made = define(conda_target(), make_base(), conda_lock(*PACKAGES, more))
    assert "NVIDIA_REQUIRE_CUDA" not in dict(made.environment)
    link = "ln -s /opt/env/cuda-compat /usr/local/cuda/compat"
    for text in (render_dockerfile(made), render_apptainer(made)):
        assert "mkdir -p /usr/local/cuda" in text
        assert link in text
    plain = define(conda_target(), make_base(), conda_lock())
    assert link not in render_dockerfile(plain)
    assert dict(plain.environment)["NVIDIA_REQUIRE_CUDA"] == "cuda>=12.0"
    pulled = make_base(suite="", packages=(), image=f"x.org/y@sha256:{'0' * 64}")
    with pytest.raises(RecipeError) as caught:
        define(conda_target(), pulled, conda_lock(*PACKAGES, more))
    assert reports(caught.value.diagnostics, "forward-compat-base")


def test_debians_cuda_compat_and_own_files_are_found_too(tmp_path: Path) -> None:
    def variables(base: BaseSpec, *paths: str) -> dict[str, str]:
        files = [
            OwnFile(path=path, source=tmp_path, sha256="1" * 64, size=1, executable=False) for path in paths
        ]
        return dict(define(make_target(), base, make_lock(), files=tuple(files)).environment)

    debian = make_base(packages=("cuda-compat-12-9", "tini"))
    assert forward_links(debian, make_lock()) == (("/usr/local/cuda/compat", "/usr/local/cuda-12.9/compat"),)
    assert "NVIDIA_REQUIRE_CUDA" not in variables(debian)
    own = variables(make_base(), "/usr/local/cuda/compat/libcuda.so.575.57.08")
    assert "NVIDIA_REQUIRE_CUDA" not in own
    assert "NVIDIA_REQUIRE_CUDA" in variables(make_base(), "/opt/libcuda.so.575.57.08")


def test_the_bases_python_is_another_or_none() -> None:
    target, lock = conda_target(python="3.12"), replace(conda_lock(), python="3.12")
    assert "/usr/bin/python3.11 -m venv /opt/pip" in render_dockerfile(define(target, make_base(), lock))
    without = make_base(suite="", python="", packages=(), image=f"x.org/y@sha256:{'0' * 64}")
    text = render_dockerfile(define(target, without, lock))
    assert "python3 -m venv /opt/pip" in text
    assert "/usr/bin/python" not in text
    assert "compileall" in text
    assert "/opt/env/lib/python3.12" in text
    with pytest.raises(RecipeError) as caught:
        define(replace(target, source="pypi"), make_base(), replace(lock, conda=()))
    assert reports(caught.value.diagnostics, "python-mismatch 3.12")


@pytest.mark.parametrize(
    ("target", "lock", "under"),
    [
        (conda_target(source="pypi", channels=()), conda_lock(), ()),
        (conda_target(), make_lock(target="pytorch-conda-2.3-cu121"), ()),
        (conda_target(), conda_lock(package("python")), ()),  # no framework
        (conda_target(on="other-1.0-cu121"), conda_lock(), ()),
        (conda_target(), conda_lock(), (conda_lock(),)),
        (conda_target(on="pytorch-conda-2.3-cu121"), conda_lock(), (conda_lock(package("gone"), *PACKAGES),)),
    ],
)
def test_what_does_not_fit_is_refused(target: Target, lock: Lock, under: tuple[Lock, ...]) -> None:
    with fails("lock-mismatch"):
        define(target, make_base(), lock, under)


def test_a_package_moved_below_is_named() -> None:
    below = conda_lock(replace(PACKAGES[0], version="2.0"), *PACKAGES[1:])
    with fails("lock-mismatch", r"mkl .*pytorch-conda-2\.3-cu121") as caught:
        define(conda_target(on=below.target), make_base(), conda_lock(), (below,))
    assert caught.value.hint == "run imagefactory lock pytorch-conda-2.3-cu121"


# --- the files -------------------------------------------------------------------------------------


def test_folder_holds_all_that_it_installs(definition: BuildSpec, mixed: BuildSpec) -> None:
    files = render(definition)
    assert list(files) == [
        "Dockerfile", "apptainer.def", "conda-lock.yml", "explicit.txt", "install.py", "rattler.txt",
    ]  # fmt: skip
    assert files["install.py"] == Path(conda_install.__file__).read_text()
    assert files["explicit.txt"].splitlines()[1:] == [
        "@EXPLICIT",
        *(f"{p.url}#sha256:{p.sha256}" for p in PACKAGES),
    ]
    assert set(render(mixed)) - set(files) == {"requirements.txt"}
    for made in (definition, mixed):
        assert {name for name, _ in copies(made)} <= set(render(made))


def test_what_a_lock_does_not_need_any_more_goes(tmp_path: Path, mixed: BuildSpec) -> None:
    definition = define(conda_target(), make_base(), conda_lock())
    write_definitions(tmp_path, render(mixed))
    write_definitions(tmp_path, {**render(mixed), "explicit-2.txt": ""})
    (tmp_path / "notes.txt").write_text("somebody's own")
    write_definitions(tmp_path, render(definition))
    (fault,) = check_definitions(tmp_path, render(definition))
    assert fault.endswith("notes.txt: no recipe makes it")


def test_the_linkers_requirements_are_those_of_this_project() -> None:
    """Made anew with requirements/build.txt: its block of py-rattler, without the comment."""
    pins = (ROOT / "requirements" / "build.txt").read_text()
    found = re.search(r"^py-rattler==\S+ \\\n(?:    --hash=\S+ \\\n)*    --hash=\S+\n", pins, re.MULTILINE)
    assert found
    assert (Path(folders.__file__).parent / "rattler.txt").read_text() == found[0]


def test_the_dockerfile_is_what_the_model_says(definition: BuildSpec, mixed: BuildSpec) -> None:
    for made in (definition, mixed, on_top(package("numba")), on_top(wheels=(WHEEL,))):
        assert parsed(render_dockerfile(made)) == instructions(made)
        assert section_names(render_apptainer(made)) == SECTIONS


def test_shell_parts_are_shell(mixed: BuildSpec) -> None:
    scripts = [body(render_apptainer(mixed), name) for name in ("post", "environment", "runscript")]
    runs = [each.value for each in instructions(mixed) if each.keyword == "RUN"]
    assert len(runs) == 8
    for script in (*scripts, *runs):
        done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_both_files_run_the_same_commands(mixed: BuildSpec) -> None:
    post = " ".join(body(render_apptainer(mixed), "post").replace("\\\n", " ").split())
    for each in instructions(mixed):
        if each.keyword == "RUN":
            for command in each.value.removeprefix("set -eu; ").split("; "):
                assert command in post


def test_each_step_sees_the_secrets_that_it_needs(mixed: BuildSpec) -> None:
    assert [step.secrets for step in steps(mixed) if step.built] == [
        ("pip.conf", "ca.pem"),
        ("channels.json", "ca.pem"),
        (),
        ("pip.conf", "ca.pem"),
        (),
    ]
    (link,) = [each for each in instructions(mixed) if "--channels" in each.value]
    assert link.flags == (
        "--mount=type=secret,id=channels.json,target=/mnt/channels.json",
        "--mount=type=secret,id=ca.pem,target=/mnt/ca.pem",
    )
    assert link.value.endswith(
        "/opt/pip/bin/python /opt/install/install.py --explicit /opt/install/explicit.txt "
        "--channels /mnt/channels.json --prefix /opt/env > /opt/install/linked.json"
    )
    (scripts,) = [each for each in instructions(mixed) if "--run-scripts" in each.value]
    assert scripts.flags == ()  # what a package brings runs where no password lies


def test_a_target_built_on_another_installs_its_packages_first() -> None:
    made = on_top(package("aaa", depends=("python",)))
    lists = explicit_lists(made)
    assert list(lists) == ["explicit-1.txt", "explicit-2.txt"]
    assert (
        lists["explicit-1.txt"]
        == explicit_lists(define(conda_target(), make_base(), conda_lock()))["explicit.txt"]
    )
    assert [line for line in lists["explicit-2.txt"].splitlines() if "://" in line] == [
        f"{CHANNELS[1]}/linux-64/aaa-1.0-h1_0.conda#sha256:{hexed('aaa-1.0-h1_0.conda')}"
    ]
    text = render_dockerfile(made)
    assert "--explicit /opt/install/explicit-1.txt /opt/install/explicit-2.txt" in text
    assert "\n# Built on pytorch-conda-2.3-cu121: " in text
    assert {"explicit-1.txt", "explicit-2.txt"} < set(render(made))
    # With wheels alone on top there is nothing to keep apart.
    assert list(explicit_lists(on_top(wheels=(WHEEL,)))) == ["explicit.txt"]


def test_wheels_on_a_target_of_wheels() -> None:
    below = make_lock()
    lock = replace(below, target="mine-2.3-cu121", wheels=(*below.wheels, replace(WHEEL, name="zipp")))
    target = make_target(name="mine-2.3-cu121", family="mine", on=below.target)
    made = define(target, make_base(), lock, (below,))
    assert set(render(made)) == {"Dockerfile", "apptainer.def", "requirements.txt"}
    assert "Built on pytorch-2.3-cu121" in render_apptainer(made)
    assert parsed(render_dockerfile(made)) == instructions(made)


@given(
    environment=st.lists(st.tuples(NAMES, HOSTILE_TEXT), max_size=2),
    channel=HOSTILE_TEXT,
    description=HOSTILE_TEXT,
)
def test_values_come_through_whole(
    environment: list[tuple[str, str]], channel: str, description: str
) -> None:
    made = define(conda_target(), make_base(), conda_lock())
    labels = (*made.labels, ("imagefactory.channels", channel))
    target = replace(made.target, description=description)
    made = replace(made, target=target, labels=labels, environment=(*made.environment, *environment))
    if all(map(may_stand, [description, channel, *(value for _, value in environment)])):
        assert parsed(render_dockerfile(made)) == instructions(made)


BASES = [make_base(), make_base(suite="", packages=(), image=f"x.org/y@sha256:{'0' * 64}")]


@pytest.mark.parametrize("base", BASES)
def test_a_base_without_a_fit_python_is_refused_before_anything_is_built(base: BaseSpec) -> None:
    text = render_dockerfile(define(conda_target(), base, conda_lock()))
    (check,) = [
        line for line in text.split("\n\n") if "import sys, ensurepip, venv" in line and "RUN" in line
    ]
    assert text.index(check) < text.index("FROM base AS build")
    assert "sys.version_info < (3, 10)" in check
