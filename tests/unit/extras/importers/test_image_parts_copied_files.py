"""COPY as `files:` of a recipe: the same files at the same places, or a loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.actions.definition import find_own_files as find_in_project
from imagefactory.extras.importers.build_context import open_context
from imagefactory.extras.importers.environments import ReadOptions, read_environment_file
from imagefactory.extras.importers.image_parts import find_own_files
from imagefactory.extras.importers.spec import EnvironmentSpec
from imagefactory.model import FilesSpec, SourceLocation

NAMES = (
    *(
        "train.py",
        "README.md",
        "src/net.py",
        "src/data/set.csv",
        "src/__pycache__/net.pyc",
        "docker/start.sh",
    ),
    *(".git/HEAD", ".env", "recipes/bases.yaml", "big/model.bin", "big/notes.txt", "a b.txt"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def read(root: Path, *lines: str, project: Path | None = None, ignore: str = "") -> EnvironmentSpec:
    (root / ".dockerignore").write_text(ignore)
    (root / "Dockerfile").write_text("\n".join(["FROM python:3.11", *lines]) + "\n")
    reading = ReadOptions(pythons=("3.11",), root=project or root, reserved=("recipes",))
    return read_environment_file(root / "Dockerfile", reading)


def inside(root: Path, spec: EnvironmentSpec) -> dict[str, str]:
    """What an image of the recipe has: paths inside, and the files of the project that lie there."""
    where = SourceLocation(file="r.yaml", line=1, column=1)
    expected = [FilesSpec(folder=item, pattern=pattern, where=where) for item, pattern in spec.parts.files]
    return {file.path: str(file.source.relative_to(root)) for file in find_in_project(root, expected)}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["COPY train.py /app/"], {"/app/train.py": "train.py"}),
        (["COPY train.py /app/train.py"], {"/app/train.py": "train.py"}),
        (["WORKDIR /app", "COPY train.py ."], {"/app/train.py": "train.py"}),
        (["WORKDIR /app", "COPY ./train.py ./"], {"/app/train.py": "train.py"}),
        (
            ["COPY src /app/src"],
            {"/app/src/net.py": "src/net.py", "/app/src/data/set.csv": "src/data/set.csv"},
        ),
        (["COPY src/ /app/"], {"/app/net.py": "src/net.py", "/app/data/set.csv": "src/data/set.csv"}),
        (["COPY src/net.py /app/"], {"/app/net.py": "src/net.py"}),
        (["COPY src/*.py /app/"], {"/app/net.py": "src/net.py"}),
        (["COPY docker/start.sh /"], {"/start.sh": "docker/start.sh"}),
        (["COPY docker/start.sh /start.sh"], {"/start.sh": "docker/start.sh"}),
        (["ADD /src/net.py /usr/local/bin/"], {"/usr/local/bin/net.py": "src/net.py"}),
        (["COPY train.py src/net.py /app/"], {"/app/train.py": "train.py", "/app/net.py": "src/net.py"}),
        (['COPY ["train.py", "/app/"]'], {"/app/train.py": "train.py"}),
    ],
)
def test_the_files_lie_where_copy_puts_them(root: Path, lines: list[str], expected: dict[str, str]) -> None:
    spec = read(root, *lines)
    assert (inside(root, spec), spec.lost) == (expected, [])


def test_the_whole_context_is_copied_without_what_is_imagefactory_s(root: Path) -> None:
    (root / "a b.txt").unlink()
    spec = read(root, "COPY . /app", ignore="**/*.bin\n")
    assert spec.lost == []
    assert inside(root, spec) == {
        f"/app/{name}": name
        for name in (
            *(
                "Dockerfile",
                "README.md",
                "big/notes.txt",
                "docker/start.sh",
                "src/data/set.csv",
                "src/net.py",
            ),
            "train.py",
        )
    }
    assert any(".env" in line and ".git" not in line for line in spec.notes)


def test_hidden_files_are_named_unless_they_may_hold_secrets(root: Path) -> None:
    for name in ("src/.models.json", "src/.streamlit/config.toml", "src/.env.local", "src/.gitignore"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    spec = read(root, "COPY src /app")
    assert {path for path in inside(root, spec) if "/." in path} == {
        "/app/.models.json",
        "/app/.streamlit/config.toml",
    }
    assert [".env.local" in line for line in spec.notes].count(True) == 1
    assert spec.lost == []


def test_what_is_excluded_but_for_an_exception_is_copied(root: Path) -> None:
    spec = read(root, "COPY . /app", ignore="*\n!src/net.py\n")
    assert (inside(root, spec), spec.lost) == ({"/app/src/net.py": "src/net.py"}, [])


def test_files_of_a_stage_are_those_that_it_copied(root: Path) -> None:
    spec = read(
        root,
        "WORKDIR /app",
        "COPY src ./src",
        "RUN pip install a",
        "FROM python:3.11",
        "COPY --from=0 /app /app",
        "COPY --from=0 /usr/local/lib/python3.11/site-packages /usr/local/lib/python3.11/site-packages",
    )
    assert spec.pip == ["a"]
    assert sorted(inside(root, spec)) == ["/app/src/data/set.csv", "/app/src/net.py"]
    assert spec.lost == []


@pytest.mark.parametrize(
    "line",
    [
        "COPY train.py /app/other.py",
        "COPY train.py /usr/bin/",
        "COPY none.py /app/",
        "COPY 'a b.txt' /app/",
        "COPY . /app",  # holds 'a b.txt', which has to be named
        "COPY . /etc",
        "COPY link /app/link",
        "COPY folder /app/folder",
    ],
)
def test_what_a_recipe_cannot_say_is_a_loss(root: Path, line: str) -> None:
    (root / "link").symlink_to("/etc/passwd")
    (root / "folder").mkdir()
    (root / "folder/in").symlink_to(root / "src")
    spec = read(root, line)
    assert spec.lost
    inside(root, spec)  # and what is written can be found


def test_more_copies_than_are_read_are_losses(root: Path) -> None:
    spec = read(root, *["COPY none /app/"] * 300)
    assert len(spec.lost) == 300
    assert sum("more copies" in line for line in spec.lost) > 50


def test_a_script_must_be_executable_in_the_project(root: Path) -> None:
    lines = ("COPY docker/start.sh /", "RUN chmod +x /start.sh")
    (messages,) = read(root, *lines).lost
    assert f"chmod +x {root}/docker/start.sh" in messages
    (root / "docker/start.sh").chmod(0o755)
    assert read(root, *lines).lost == []


def test_a_context_outside_of_the_project_is_a_loss(root: Path, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    spec = read(root, "COPY train.py /app/", project=tmp_path / "lab")
    assert (len(spec.lost), spec.parts.files) == (1, [])
    assert f"imagefactory init {root}" in spec.lost[0]


def test_a_context_below_the_project_s_root_keeps_its_places(root: Path) -> None:
    context = open_context(root / "src", selection=root / "src", project=root)
    assert find_own_files(context, ".", "/app").entries == [("/app", "src/./*")]
    assert find_own_files(context, "data", "/app/src/data").entries == [("/app", "src/data")]
    assert find_own_files(context, "data", "/x").entries == [("/x", "src/data/./*")]
    assert find_own_files(context, "net.py", "/app/net.py").entries == [("/app", "src/./net.py")]
