"""What a project's file asks for is kept, or the command stops: the smallest input of each known mistake.

uv solves against an index of our own, and the command line runs as a person runs it. `tests/run projects`
does the same with the files of public projects.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import LockError, UsageError
from tests.made.wheels import make_wheel
from tests.projects.requested import cuda_majors, lock_versions
from tests.services.factory import COMMAND, TINY_RECIPE, Factory, lend, make_root
from tests.services.package_index import Index, package_index

TORCH = ("--framework", "torch=2.6.0", "--cuda", "12.4")


@dataclass(frozen=True)
class Project:
    """A directory that is a git work tree and an imagefactory project, and an index of packages."""

    root: Path
    index: Index
    home: Path

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """The exit code, the JSON document, and all that was said."""
        environ = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "IMAGEFACTORY_INDEX": self.index.url,
            "UV_NO_CACHE": "1",
            "UV_HTTP_RETRIES": "0",
        }
        done = subprocess.run(
            [*COMMAND, "-C", str(self.root), *words, "--json"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        document = json.loads(done.stdout) if done.stdout else {}
        return done.returncode, document, done.stdout + done.stderr

    def new(self, file: str, *options: str) -> tuple[int, dict[str, Any], str]:
        return self.run("recipe", "import", str(self.root / file), "--family", "brought", *options)

    @property
    def recipe(self) -> str:
        path = self.root / "recipes/brought.yaml"
        return path.read_text() if path.exists() else ""

    def lock(self) -> tuple[int, dict[str, str], str]:
        """The exit code, the versions that were locked, and all that was said."""
        code, _, said = self.run("lock", "brought-*")
        (path,) = (self.root / "lockfiles").glob("brought-*.txt") if code == 0 else (None,)
        return code, lock_versions(path.read_text())[1] if path else {}, said

    def locked(self, requirements: str, *options: str) -> tuple[dict[str, str], str]:
        """The versions of a requirements file that imports and locks, and all that was said."""
        self.write("requirements.txt", requirements)
        code, _, said = self.new("requirements.txt", *options)
        assert code == 0, said
        code, versions, more = self.lock()
        assert code == 0, more
        return versions, said + more


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    root = make_root(tmp_path / "project")
    subprocess.run(["git", "init", "--quiet", root], check=True)
    (tmp_path / "home").mkdir()
    with package_index(tmp_path / "index") as index:
        index.json = True  # as PyPI
        for torch, cuda in (
            ("2.1.2", "12.1.105"),
            ("2.2.2", "12.1.105"),
            ("2.5.1", "12.4.127"),
            ("2.6.0", "12.4.127"),
        ):
            index.add("torch", torch, needs=(f"nvidia-cuda-runtime-cu12=={cuda}",))
        index.add("torch", "2.11.0", needs=("nvidia-cuda-runtime==13.0.96",))
        index.add("torchvision", "0.21.0")
        for cuda in ("12.1.105", "12.4.127"):
            index.add("nvidia-cuda-runtime-cu12", cuda, tag="py3-none-manylinux2014_x86_64")
        index.add("nvidia-cuda-runtime", "13.0.96", tag="py3-none-manylinux2014_x86_64")
        for version in ("2.6.0", "2.11.0"):
            index.add("torchaudio", version)
        for version in ("1.26.4", "2.4.6"):
            index.add("numpy", version)
        for version in ("69.5.1", "80.9.0"):
            index.add("setuptools", version)
        index.add("einops", "0.7.0")
        index.add("einops", "0.8.0")
        yield Project(root=root, index=index, home=tmp_path / "home")


def add_sdist(index: Index, name: str, version: str) -> None:
    """A source distribution that no test ever builds."""
    folder = f"{name}-{version}"
    texts = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "setup.py": f"from setuptools import setup\nsetup(name={name!r}, version={version!r})\n",
    }
    with tarfile.open(index.folder / f"{folder}.tar.gz", "w:gz") as archive:
        for path, text in texts.items():
            info = tarfile.TarInfo(f"{folder}/{path}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    index.publish(name.replace("_", "-"), f"{folder}.tar.gz")


# --- 1: the build context ---------------------------------------------------------------------

DOCKERFILE = """\
FROM pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime
COPY . /app/x
RUN pip install -r /app/x/requirements.txt
"""


def test_a_dockerfile_reads_the_file_of_its_build_context(project: Project) -> None:
    project.write("docker/Dockerfile", DOCKERFILE)
    project.write("docker/requirements.txt", "numpy\n")
    project.write("requirements.txt", "einops==0.8.0\n")
    code, _, said = project.new("docker/Dockerfile")
    assert code == 0, said
    assert "einops==0.8.0" in project.recipe
    assert "numpy" not in project.recipe


def test_a_file_of_the_same_name_outside_of_the_build_context_is_never_taken(project: Project) -> None:
    project.write("docker/Dockerfile", DOCKERFILE)
    project.write("docker/requirements.txt", "einops==0.8.0\n")
    code, _, said = project.new("docker/Dockerfile")
    assert (code, project.recipe) == (UsageError.exit_code, ""), said
    assert "requirements.txt" in said


# --- 2 and 9: what is known of a framework's version ------------------------------------------


def test_companions_get_the_version_that_belongs_to_the_framework(project: Project) -> None:
    versions, _ = project.locked("torch\ntorchaudio\n", "--framework", "torch=2.6", "--cuda", "12.4")
    assert (versions["torch"], versions["torchaudio"]) == ("2.6.0", "2.6.0")
    assert cuda_majors(versions) == {"12"}


def test_two_cuda_majors_in_one_lock_stop_it(project: Project) -> None:
    project.index.add("decoder", "1.0", needs=("nvidia-cuda-runtime==13.0.96",))
    project.write("requirements.txt", "torch==2.6.0\ndecoder\n")
    code, _, said = project.new("requirements.txt", *TORCH)
    if code == 0:
        code, _, said = project.lock()
    assert code != 0, said


@pytest.mark.parametrize(("torch", "numpy"), [("2.2.2", "1.26.4"), ("2.6.0", "2.4.6")])
def test_numpy_of_the_series_that_torch_was_built_with(project: Project, torch: str, numpy: str) -> None:
    options = ("--framework", f"torch={torch}", "--cuda", "12.1" if torch == "2.2.2" else "12.4")
    assert project.locked(f"torch=={torch}\nnumpy\n", *options)[0]["numpy"] == numpy


def test_setuptools_beside_a_triton_that_imports_it(project: Project) -> None:
    project.index.add("torch", "2.5.0", needs=("nvidia-cuda-runtime-cu12==12.4.127", "triton==3.1.0"))
    project.index.add("triton", "3.1.0")
    versions, _ = project.locked("torch==2.5.0\n", "--framework", "torch=2.5.0", "--cuda", "12.4")
    assert "setuptools" in versions


# --- 3 and 7: which version is taken ----------------------------------------------------------


def test_a_newer_release_without_a_wheel_is_named(project: Project) -> None:
    project.index.add("rouge-score", "0.0.4")
    add_sdist(project.index, "rouge_score", "0.1.2")
    project.write("requirements.txt", "torch==2.6.0\nrouge-score>=0.0.4\n")
    _, _, said = project.new("requirements.txt", *TORCH)
    code, versions, more = project.lock()
    assert (code, versions.get("rouge-score")) in ((0, "0.0.4"), (LockError.exit_code, None)), more
    assert "rouge-score 0.1.2" in said + more or "rouge-score==0.1.2" in said + more


@pytest.mark.parametrize("first", ["alpha", "omega"])
def test_the_order_of_the_file_decides_what_is_preferred(project: Project, first: str) -> None:
    """Only one of the two can have its newest release: the first of the file, as with uv itself."""
    second = "omega" if first == "alpha" else "alpha"
    for name, shared in (("alpha", "shared<2"), ("omega", "shared>=2")):
        project.index.add(name, "1.0.0")
        project.index.add(name, "1.0.1", needs=(shared,))
    project.index.add("shared", "1.0.0")
    project.index.add("shared", "2.0.0")
    versions, _ = project.locked(f"torch==2.6.0\n{first}\n{second}\n", *TORCH)
    assert (versions[first], versions[second]) == ("1.0.1", "1.0.0")


# --- packages without wheels ------------------------------------------------------------------


def test_all_packages_without_wheels_are_named_at_once(project: Project) -> None:
    add_sdist(project.index, "filterpy", "1.4.5")
    add_sdist(project.index, "acvl_utils", "0.2")
    project.write("requirements.txt", "torch==2.6.0\nfilterpy==1.4.5\nacvl-utils\n")
    code, _, said = project.new("requirements.txt", *TORCH)
    if code == 0:
        code, _, said = project.lock()
    assert code != 0
    assert "filterpy" in said
    assert "acvl-utils" in said
    assert "--build" in said


def test_the_check_for_newer_releases_never_fails_a_lock(project: Project) -> None:
    """s3fs 9.0 is outside of the file's bounds, and its wheel cannot be read."""
    project.index.add("s3fs", "1.0")
    project.index.add("s3fs", "9.0")
    (project.index.folder / "s3fs-9.0-py3-none-any.whl").write_bytes(b"not a wheel")
    versions, _ = project.locked("torch==2.6.0\ns3fs<9\n", *TORCH)
    assert versions["s3fs"] == "1.0"


# --- 5: the project's own package -------------------------------------------------------------

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "own"
version = "1.0"
dependencies = ["torch==2.6.0", "einops"]

[project.optional-dependencies]
train = ["numpy==1.26.4"]
"""


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("requirements.txt", "-e .\n"),
        ("Dockerfile", f"{DOCKERFILE.splitlines()[0]}\nWORKDIR /app\nCOPY . .\nRUN pip install .\n"),
        (
            "Dockerfile",
            f"{DOCKERFILE.splitlines()[0]}\nWORKDIR /app\nCOPY . .\nRUN pip install -e '.[train]'\n",
        ),
    ],
)
def test_the_projects_own_package_is_brought_or_the_command_stops(
    project: Project, file: str, text: str
) -> None:
    project.write("pyproject.toml", PYPROJECT)
    project.write("own/__init__.py", "")
    project.write(file, text)
    code, _, said = project.new(file, *(TORCH if file == "requirements.txt" else ()))
    if code == 0:
        assert "einops" in project.recipe, said
        assert any(line.strip().startswith(("- .", '- "."')) for line in project.recipe.splitlines()) or (
            "files:" in project.recipe
        )
        if "[train]" in text:
            assert "numpy==1.26.4" in project.recipe
    else:
        assert project.recipe == ""
        assert "own" in said or "." in said


def test_a_recipe_that_took_nothing_of_a_project_is_an_error(project: Project) -> None:
    """Its one package comes from an address that cannot be kept."""
    project.write("requirements.txt", "git+https://git.example.org/someone/thing\n")
    code, _, said = project.new("requirements.txt", *TORCH)
    assert (code, project.recipe) == (UsageError.exit_code, ""), said
    assert "git.example.org/someone/thing" in said


# --- 6 and 8: options against the file's own bounds -------------------------------------------


def test_the_framework_of_an_option_is_held_against_the_bounds_of_the_file(project: Project) -> None:
    project.write("requirements.txt", "torch>=2.2,<2.3\neinops\n")
    code, _, said = project.new("requirements.txt", "--framework", "torch=2.1.2", "--cuda", "12.1")
    assert (code, project.recipe) == (UsageError.exit_code, ""), said
    code, _, said = project.new("requirements.txt", "--framework", "torch=2.2.2", "--cuda", "12.1")
    assert code == 0, said


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("requirements.txt", "torch==2.5.1\neinops\n"),
        (
            "pyproject.toml",
            PYPROJECT.replace("dependencies = ", 'requires-python = ">3.12"\ndependencies = '),
        ),
    ],
)
def test_the_target_below_is_held_against_the_bounds_of_the_file(
    project: Project, file: str, text: str
) -> None:
    recipe = TINY_RECIPE.replace("nvidia-cuda-runtime-cu12", "torch").replace("tiny", "lower")
    recipe = recipe.replace('"idna==3.7", "markupsafe==2.1.5"', "").replace(
        'version: "12.1"', 'version: "2.6.0"'
    )
    project.write("recipes/lower.yaml", recipe.replace('"12.1"', '"12.4"').replace("checks:", "# checks:"))
    code, _, said = project.run("lock", "lower-*")
    assert code == 0, said
    project.write(file, text)
    code, _, said = project.new(file, "--extends", "lower-2.6.0-cu124")
    assert (code, project.recipe) == (UsageError.exit_code, ""), said


# --- 10: what a Dockerfile sets ---------------------------------------------------------------


def test_apt_versions_and_variables_of_another_image_are_not_dropped_silently(project: Project) -> None:
    project.write(
        "Dockerfile",
        "FROM pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime\n"
        'ENV TORCH_CUDA_ARCH_LIST="" CUDA_HOME=/usr/local/cuda\n'
        "RUN apt-get update && apt-get install -y ffmpeg=7:5.1.6-0+deb12u1\n"
        "RUN pip install einops==0.8.0\n",
    )
    code, document, said = project.new("Dockerfile")
    if code:  # it stopped, and says why
        assert project.recipe == ""
    else:
        assert "TORCH_CUDA_ARCH_LIST" not in json.dumps(document["recipe"]).split("packages:")[1]
    assert "7:5.1.6-0+deb12u1" in said


def test_a_source_that_is_the_project_itself_keeps_its_dependencies(project: Project) -> None:
    project.write("pyproject.toml", PYPROJECT + '\n[tool.uv.sources]\nown = { path = "." }\n')
    project.write("own/__init__.py", "")
    code, _, said = project.new("pyproject.toml", "--cuda", "12.4")
    assert code == 0, said
    assert "einops" in project.recipe


# --- two wheels with one file, in a real image ------------------------------------------------


def test_two_wheels_with_one_file_build_as_pip_installs_them(base_store: Path, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    (root / "wheels").mkdir()
    for name in ("opencv_a", "opencv_b"):
        make_wheel(root / "wheels", name, {"shared.py": f"origin = {name!r}\n".encode()})
    named = [f"./wheels/{path.name}" for path in sorted((root / "wheels").iterdir())]
    recipe = TINY_RECIPE.replace('"idna==3.7", "markupsafe==2.1.5"', ", ".join(map(json.dumps, named)))
    (root / "recipes/tiny.yaml").write_text(recipe)
    lent = lend(base_store, tmp_path / "lent")
    factory = Factory(store=lent.store, cache=lent.cache, root=root)
    factory.run("lock", "tiny-12.1-cu121")
    done = factory.run("build", "tiny-12.1-cu121")
    assert "shared.py" in done.stdout + done.stderr
