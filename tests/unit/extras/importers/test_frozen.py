"""The packages of a lock whose very files are kept, from each format, and what cannot be kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.extras.importers.frozen import FrozenLock, read_frozen
from imagefactory.lock.conda.file import parse_conda_lock
from imagefactory.lock.pypi.requirements import read_lock
from imagefactory.model import FrozenSpec, SourceLocation
from tests.made.place import Place, make_place
from tests.made.values import hexed

FORGE = "https://conda.anaconda.org/conda-forge"
NAMES = ("cuda-version-12.1-h0_0", "numpy-1.26.4-py311h0_0", "python-3.11.9-h0_0_cpython")
TORCH = "pytorch-2.3.1-cuda121_py311_0"
A, B, FILES = hexed("a"), hexed("b"), "https://f.example.org"


def read(folder: Path, name: str, text: str, **selection: Any) -> FrozenLock:
    (folder / name).write_text(text)
    where = SourceLocation(file="recipes/mine.yaml", line=1, column=1)
    return read_frozen(folder / name, folder, FrozenSpec(file=f"./{name}", where=where, **selection), "3.11")


def problems(lock: FrozenLock) -> dict[str, int]:
    """The line of each problem, by package."""
    return {problem.name: problem.where.line for problem in lock.problems}


# --- files from an index ---


def test_poetry_has_names_and_hashes_without_sizes(tmp_path: Path) -> None:
    text = f"""\
[[package]]
name = "einops"
version = "0.7.0"
groups = ["main"]
files = [
    {{file = "einops-0.7.0-py3-none-any.whl", hash = "sha256:{A}"}},
    {{file = "einops-0.7.0.tar.gz", hash = "sha256:{B}"}},
]

[[package]]
name = "local"
version = "1"
groups = ["main"]
files = []
[package.source]
type = "directory"
url = "../local"

[metadata]
lock-version = "2.1"
python-versions = ">=3.11"
content-hash = "x"
"""
    lock = read(tmp_path, "poetry.lock", text)
    (einops,) = lock.packages
    assert [(wheel.filename, wheel.sha256, wheel.size) for wheel in einops.wheels] == [
        ("einops-0.7.0-py3-none-any.whl", A, None)
    ]
    assert problems(lock) == {"local": 10}
    assert read(tmp_path, "poetry.lock", text, skip=("local",)).problems == []


def test_requirements_need_versions_and_hashes(tmp_path: Path) -> None:
    text = f"""\
--index-url https://index.example.org/simple
einops==0.7.0 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
colorama==0.4.6 ; sys_platform == "win32" --hash=sha256:{A}
bare==1.0
loose>=2 --hash=sha256:{A}
-r more.txt
-e .
--editable ./lib/own_tool/
git+https://git.example.org/some/Thing.git@main#egg=thing[x]
./wheels/built_here-1.0-py3-none-any.whl
code @ git+https://git.example.org/code
"""
    lock = read(tmp_path, "requirements.txt", text)
    assert [(one.name, {wheel.sha256 for wheel in one.wheels}) for one in lock.packages] == [
        ("einops", {A, B})
    ]
    named = {"this-project": 9, "own-tool": 10, "thing": 11, "built-here": 12, "code": 13}
    assert problems(lock) == {"bare": 6, "loose": 7, "": 8, **named}
    assert problems(read(tmp_path, "requirements.txt", text, skip=(*named, "bare", "loose"))) == {"": 8}


def test_what_happens_without_frozen_is_noted() -> None:
    text = f"einops==0.7.0 --hash=sha256:{A}\n"
    for content, count in ((text, 1), ("einops==0.7.0\n", 0)):
        spec = parse_environment_file(content, "requirements.txt", ReadOptions(pythons=("3.11",)))
        assert spec.pip == ["einops==0.7.0"]
        assert sum("--frozen" in note for note in spec.notes) == count


def test_pylock_keeps_wheels_of_an_index_alone(tmp_path: Path) -> None:
    text = f"""\
lock-version = "1.0"
created-by = "pip"
[[packages]]
name = "einops"
version = "0.7.0"
wheels = [{{url = "{FILES}/einops-0.7.0-py3-none-any.whl", size = 7, hashes = {{sha256 = "{A}"}}}}]
[[packages]]
name = "weak"
version = "1.0"
wheels = [{{url = "{FILES}/weak-1.0-py3-none-any.whl", hashes = {{md5 = "{A[:32]}"}}}}]
[[packages]]
name = "mine"
[packages.directory]
path = "."
editable = true
"""
    lock = read(tmp_path, "pylock.toml", text)
    assert [(one.name, one.wheels[0].sha256, one.wheels[0].size) for one in lock.packages] == [
        ("einops", A, 7),
        ("weak", "", None),
    ]
    assert problems(lock) == {"mine": 11}


# --- conda ---


@pytest.fixture
def place(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A project without recipes, on this machine's mirror of conda-forge."""
    place = make_place(capsys, tmp_path, monkeypatch)
    (place.root / "recipes/tiny.yaml").unlink()
    monkeypatch.setenv("IMAGEFACTORY_CHANNELS", f"conda-forge={place.root / 'channel'}")
    return place


def bring(place: Place, name: str, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    (place.root / name).write_text(text)
    words = ("recipe", "import", str(place.root / name), "--family", "mine", "--frozen", "--json")
    code, out, _ = place.call(*words, *options)
    return code, json.loads(out)


def locked(place: Place) -> set[str]:
    """The conda archives of the lock that was made without solving, with their hashes."""
    code, out, err = place.call("lock", "mine", "--json")
    assert code == 0, out + err
    (path,) = (place.root / "lockfiles").glob("mine-*.conda-lock.yml")
    lock = parse_conda_lock(path.read_text(), str(path))
    assert all(package.sha256 == hexed(package.filename) and package.size for package in lock.conda)
    assert place.call("lock", "--check", "mine")[0] == 0
    return {package.filename for package in lock.conda}


def test_a_pixi_lock_that_rattler_wrote(place: Place, tmp_path: Path) -> None:
    import asyncio

    import rattler

    platform = rattler.LockPlatform("linux-64")
    file = rattler.LockFile([platform])
    file.set_channels("gpu", [rattler.LockChannel(f"{FORGE}/")])

    async def records() -> list[Any]:
        channel = rattler.Channel((place.root / "channel").as_uri())
        names = [
            rattler.MatchSpec(one) for one in ("python 3.11.*", "numpy", "pytorch * cuda*", "cuda-version")
        ]
        answer = await rattler.Gateway().query([channel], ["linux-64"], names, recursive=False)
        return [record for some in answer for record in some]

    for record in asyncio.run(records()):
        file.add_conda_package("gpu", platform, record)
    file.to_path(tmp_path / "made.lock")
    text, channel = (tmp_path / "made.lock").read_text(), place.root / "channel"
    text = text.replace(channel.as_uri(), FORGE).replace(str(channel), FORGE)
    code, value = bring(place, "pixi.lock", text, "--environment", "gpu")
    assert (code, value["skipped"], value["frozen"]) == (0, [], True)
    assert (value["choice"]["framework"], value["choice"]["cuda"], value["choice"]["python"]) == (
        "pytorch",
        "12.1",
        "3.11",
    )
    place.offer(("numpy 1.99 py311h0_0", ("python >=3.11,<3.12.0a0",)))
    assert locked(place) == {f"{name}.conda" for name in (*NAMES, TORCH)}


def conda_lock(*, category: str = "main") -> str:
    rows = [
        {
            "name": name.rsplit("-", 2)[0],
            "version": name.rsplit("-", 2)[1],
            "manager": "conda",
            "platform": "linux-64",
            "dependencies": {},
            "url": f"{FORGE}/linux-64/{name}.conda",
            "hash": {"md5": hexed(f"{name}.conda", "md5"), "sha256": hexed(f"{name}.conda")},
            "category": category if name == TORCH else "main",
            "optional": False,
        }
        for name in (*NAMES, TORCH)
    ]
    metadata = {"channels": [{"url": "conda-forge", "used_env_vars": []}], "platforms": ["linux-64"]}
    return str(yaml.safe_dump({"version": 1, "metadata": metadata, "package": rows}))


def test_a_conda_lock_and_its_categories(place: Place) -> None:
    code, value = bring(place, "conda-lock.yml", conda_lock(category="train"), "--group", "train")
    assert (code, value["skipped"]) == (0, [])
    assert "groups: [train]" in value["recipe"]
    assert locked(place) == {f"{name}.conda" for name in (*NAMES, TORCH)}


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_an_explicit_list(place: Place, algorithm: str) -> None:
    names = (*NAMES, TORCH)
    lines = [f"{FORGE}/linux-64/{name}.conda#{hexed(f'{name}.conda', algorithm)}" for name in names]
    code, value = bring(place, "list.txt", "\n".join(["@EXPLICIT", *lines, ""]))
    assert (code, value["skipped"]) == (0, [])
    assert locked(place) == {f"{name}.conda" for name in names}


def test_conda_packages_that_cannot_be_kept(tmp_path: Path) -> None:
    text = f"""\
@EXPLICIT
{FORGE}/linux-64/python-3.11.9-h0_0_cpython.conda
file:///data/channel/linux-64/numpy-1.26.4-py311h0_0.conda#{A}
{FORGE}/osx-64/zlib-1.3-h0_0.conda#{A}
https://conda.anaconda.org/t/to-ken/lab/linux-64/mine-1-0.conda#{A}
"""
    assert problems(read(tmp_path, "list.txt", text)) == {"python": 2, "numpy": 3, "zlib": 4, "mine": 5}


def test_another_file_under_the_same_name_is_refused(place: Place) -> None:
    text = conda_lock().replace(hexed(f"{TORCH}.conda"), A)
    assert bring(place, "conda-lock.yml", text)[0] == 0
    _, out, _ = place.call("lock", "mine", "--json")
    assert json.loads(out)["errors"][0]["code"] == "channel-file-changed"


def test_a_file_that_is_not_a_lock(place: Place) -> None:
    (place.root / "requirements.in").write_text("torch\n")
    code, value = bring(place, "environment.yml", "dependencies: [numpy]\n")
    assert (code, value["errors"][0]["code"]) == (2, "not-a-lock")


def test_a_python_that_no_base_has_comes_from_conda(place: Place) -> None:
    text = f"""\
lock-version = "1.0"
created-by = "pip"
requires-python = "==3.12.*"
[[packages]]
name = "einops"
version = "0.7.0"
wheels = [{{url = "{FILES}/einops-0.7.0-py3-none-any.whl", size = 7, hashes = {{sha256 = "{A}"}}}}]
"""
    code, value = bring(place, "pylock.toml", text, "--framework", "einops")
    assert (code, value["choice"]["python"], value["choice"]["cuda"]) == (0, "3.12", "none")
    assert locked(place) == {"python-3.12.4-h0_0_cpython.conda"}
    (path,) = (place.root / "lockfiles").glob("mine-*.requirements.txt")
    assert [(wheel.filename, wheel.sha256, wheel.size) for wheel in read_lock(path).wheels] == [
        ("einops-0.7.0-py3-none-any.whl", A, 7)
    ]


def test_an_index_that_the_settings_lack_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "https://download.pytorch.org/whl/cu128"

    def row(name: str, version: str, index: str, file: str, digest: str) -> str:
        wheel = f'{{ url = "{FILES}/{file}", hash = "sha256:{digest}", size = 9 }}'
        return (
            f'[[package]]\nname = "{name}"\nversion = "{version}"\nsource = {{ registry = "{index}" }}\n'
            f"wheels = [{wheel}]\n"
        )

    runtime, tag = "nvidia-cuda-runtime-cu12", "py3-none-manylinux_2_28_x86_64"
    text = 'version = 1\nrequires-python = "==3.11.*"\n'
    text += row(
        runtime,
        "12.8.57",
        "https://index.example.org/simple",
        f"{runtime.replace('-', '_')}-12.8.57-{tag}.whl",
        A,
    )
    text += row("torch", "2.7.0+cu128", address, f"torch-2.7.0%2Bcu128-cp311-cp311-{tag[9:]}.whl", B)
    code, value = bring(place, "uv.lock", text)
    assert (code, value["errors"][0]["code"]) == (2, "import-incomplete")
    assert f'pytorch-cu128 = "{address}"' in value["skipped"][0]
    assert value["skipped"][0].startswith("uv.lock:8:")
    assert bring(place, "uv.lock", text, "--partial")[1]["errors"][0]["code"] == "framework-missing"
    monkeypatch.setenv("IMAGEFACTORY_INDEXES", f"pytorch-cu128={address}")
    code, value = bring(place, "uv.lock", text)
    assert (code, value["choice"]["version"], value["choice"]["cuda"]) == (0, "2.7.0", "12.8")
    assert place.call("lock", "mine")[0] == 0
    (path,) = (place.root / "lockfiles").glob("mine-*.requirements.txt")
    lock = read_lock(path)
    assert lock.origins == (("torch", "pytorch-cu128"),)
    assert [(wheel.version, wheel.sha256) for wheel in lock.wheels] == [("12.8.57", A), ("2.7.0+cu128", B)]


def test_a_copied_lock_never_leaves_the_project(place: Place, tmp_path: Path) -> None:
    """A clone may have links where the copy goes: to a directory of the user, or to a file."""
    other, (outside, mine) = tmp_path / "pylock.toml", (tmp_path / "outside", tmp_path / "mine.txt")
    row = (
        f'wheels = [{{url = "{FILES}/einops-0.7.0-py3-none-any.whl", size = 7, hashes = {{sha256 = "{A}"}}}}]'
    )
    other.write_text(
        f'lock-version = "1.0"\ncreated-by = "pip"\n[[packages]]\nname = "einops"\nversion = "0.7.0"\n{row}\n'
    )
    outside.mkdir()
    mine.write_text("mine")
    folder = place.root / "recipes" / "frozen"
    folder.mkdir()
    (folder / "mine").symlink_to(outside)
    words = ("recipe", "import", str(other), "--family", "mine", "--frozen", "--framework", "einops")
    said = place.call(*words)
    assert (said.error_codes, list(outside.iterdir())) == (("link-leaves-project",), [])
    (folder / "mine").unlink()
    (folder / "mine").mkdir()
    (folder / "mine/pylock.toml").symlink_to(mine)
    assert place.call(*words)[0] == 0
    assert (mine.read_text(), (folder / "mine/pylock.toml").is_symlink()) == ("mine", False)
