"""uv.lock and poetry.lock: extras, groups, sources, and what is reached by the markers that hold."""

# ruff: noqa: E501 -- files of others, a line a line
from __future__ import annotations

import pytest

from imagefactory.errors import RecipeError
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.extras.importers.spec import EnvironmentSpec

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = 'source = { registry = "https://index.example.org/simple" }\n'


def package(name: str, version: str = "1.0", source: str = INDEX, more: str = "") -> str:
    return f'[[package]]\nname = "{name}"\nversion = "{version}"\n{source}{more}'


UV = (
    'version = 1\nrequires-python = ">=3.11"\n'
    + package(
        "lab",
        source='source = { editable = "." }\n',
        more='dependencies = [{ name = "core" }, { name = "ops" }, { name = "torch", version = "2.5.1", '
        'source = { registry = "https://index.example.org/simple" }, marker = "extra != \'extra-3-lab-cu\'" }, '
        '{ name = "torch", version = "2.5.1", source = { registry = "https://w.example.org/whl/cu124" }, '
        "marker = \"extra == 'extra-3-lab-cu'\" }]\n"
        '[package.optional-dependencies]\ncu = [{ name = "triton" }]\n'
        '[package.dev-dependencies]\ndev = [{ name = "pytest" }]\n',
    )
    + package(
        "core",
        source='source = { editable = "packages/core" }\n',
        more='dependencies = [{ name = "einops" }]\n',
    )
    + package("unused", source='source = { virtual = "packages/unused" }\n')
    + package(
        "ops",
        source=f'source = {{ git = "https://git.example.org/ops?rev=main&subdirectory=py#{COMMIT}" }}\n',
    )
    + package("torch", "2.5.1")
    + package("torch", "2.5.1", 'source = { registry = "https://w.example.org/whl/cu124" }\n')
    + package("triton")
    + package("pytest")
    + package("einops")
)


def read(
    text: str, file: str, *, extras: tuple[str, ...] = (), groups: tuple[str, ...] = (), **beside: str
) -> EnvironmentSpec:
    files = {name.replace("_toml", ".toml"): item for name, item in beside.items()}
    reading = ReadOptions(pythons=("3.11",), beside=files.get, place=".", extras=extras, groups=groups)
    return parse_environment_file(text, file, reading)


def test_a_workspace_of_uv() -> None:
    spec = read(UV, "uv.lock")
    assert spec.pip == ["einops==1.0", "torch==2.5.1"]
    assert spec.sources == [
        "./packages/core",
        ".",
        f"git+https://git.example.org/ops@{COMMIT}#subdirectory=py",
    ]
    assert (spec.lost, spec.indexes) == ([], [])
    assert sum("optional" in note for note in spec.notes) == 1


def test_extras_that_exclude_each_other_choose_the_index() -> None:
    spec = read(UV, "uv.lock", extras=("cu",), groups=("dev",))
    assert spec.pip == ["einops==1.0", "pytest==1.0", "torch==2.5.1", "triton==1.0"]
    assert spec.indexes == ["https://w.example.org/whl/cu124"]


def test_what_another_index_has_is_lost() -> None:
    """Of the index that most come from, a note; a page of links has no hashes."""
    odd = "".join(
        package(name, "1.0", f'source = {{ registry = "{address}" }}\n')
        for name, address in (
            ("ops", "https://w.example.org/simple"),
            ("ops2", "https://w.example.org/simple"),
            ("scatter", "https://w.example.org/pages/repo.html"),
            ("folder", "wheels"),
            ("mirrored", "https://pypi.example.org/simple"),
        )
    )
    own = 'source = { virtual = "." }\n'
    names = ("einops", "ops", "ops2", "scatter", "folder", "mirrored", "a", "b")
    needs = "dependencies = [" + ", ".join(f'{{ name = "{name}" }}' for name in names) + "]\n"
    text = 'version = 1\nrequires-python = ">=3.11"\n' + package("lab", "0", own + needs)
    spec = read(text + odd + "".join(map(package, ("einops", "a", "b"))), "uv.lock")
    kinds = sorted(("./wheels/" in item, "`index`" in item) for item in spec.lost)
    assert kinds == [
        (False, True),
        (True, False),
        (True, False),
    ]
    assert sum("https://index.example.org/simple" in note for note in spec.notes) == 1


@pytest.mark.parametrize(("extras", "groups"), [(("gpu",), ()), ((), ("cu",))])
def test_an_unknown_one_stops(extras: tuple[str, ...], groups: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        read(UV, "uv.lock", extras=extras, groups=groups)
    code = "extra-unknown" if extras else "group-unknown"
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].fix) == (
        code,
        "--extra cu or --group dev",
    )


def test_a_project_that_is_no_package() -> None:
    text = "version = 1\n" + package(
        "lab", source='source = { virtual = "." }\n', more='dependencies = [{ name = "a" }]\n'
    )
    spec = read(text + package("a"), "uv.lock")
    assert (spec.pip, spec.sources, spec.lost) == (["a==1.0"], [], [])
    assert any("files:" in note for note in spec.notes)


POETRY = (
    package("torch", "2.5.1", "", 'optional = false\ngroups = ["main"]\n')
    + package(
        "near",
        "0.1",
        'optional = false\ngroups = ["main"]\n',
        '[package.source]\ntype = "directory"\nurl = "libs/near"\n',
    )
    + package(
        "ops",
        "0.1",
        'optional = false\ngroups = ["main"]\n',
        '[package.source]\ntype = "git"\nurl = "https://git.example.org/ops.git"\nreference = "main"\n'
        f'resolved_reference = "{COMMIT}"\n',
    )
    + package("wandb", "0.17", 'optional = true\ngroups = ["main"]\nmarkers = "extra == \\"log\\""\n')
    + package("click", "8.0", 'optional = false\ngroups = ["dev", "main"]\n')
    + package("pytest", "8.0", 'optional = false\ngroups = ["dev"]\n')
    + '[extras]\nlog = ["wandb"]\n[metadata]\nlock-version = "2.1"\npython-versions = "^3.11"\n'
)


def test_a_lock_of_poetry() -> None:
    spec = read(POETRY, "poetry.lock")
    assert spec.pip == ["torch==2.5.1", "click==8.0"]
    assert spec.sources == ["./libs/near", f"git+https://git.example.org/ops.git@{COMMIT}"]
    assert spec.lost == []
    chosen = read(POETRY, "poetry.lock", extras=("log",), groups=("dev",))
    assert chosen.pip == ["torch==2.5.1", "wandb==0.17", "click==8.0", "pytest==8.0"]
    with pytest.raises(RecipeError) as caught:
        read(POETRY, "poetry.lock", extras=("dev",))
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.fix) == ("extra-unknown", "--extra log or --group dev")


def test_what_an_extra_of_a_dependency_brings_is_kept() -> None:
    """Poetry names it optional where it is asked for, and it is no package of an extra of the project."""
    text = (
        package(
            "uvicorn",
            "0.35",
            "optional = false\n",
            '[package.dependencies]\nhttptools = {version = "*", optional = true, markers = "extra == \\"standard\\""}\n',
        )
        + package("httptools", "0.6", "optional = false\n")
        + '[metadata]\npython-versions = "^3.11"\n'
    )
    groups = text.replace("optional = false\n", 'optional = false\ngroups = ["main"]\n')
    for lock in (text, groups):
        assert read(lock, "poetry.lock").pip == ["uvicorn==0.35", "httptools==0.6"]
    project = "[tool.poetry.dependencies]\nuvicorn = {extras = ['standard'], version = '*'}\n"
    assert read(text, "poetry.lock", pyproject_toml=project).pip == ["uvicorn==0.35", "httptools==0.6"]
    bare = "[tool.poetry.dependencies]\nuvicorn = '*'\n"
    assert read(text, "poetry.lock", pyproject_toml=bare).pip == ["uvicorn==0.35"]


def test_two_versions_of_one_name_are_not_chosen_between() -> None:
    text = package("torch", "2.7.1+cpu", "optional = false\n") + package(
        "torch", "2.7.1+cu126", "optional = false\n"
    )
    spec = read(text + '[metadata]\npython-versions = "^3.11"\n', "poetry.lock")
    assert (spec.pip, len(spec.lost)) == ([], 1)


def test_a_lock_without_groups_takes_what_the_project_beside_it_needs() -> None:
    """As Poetry 1.5 to 1.8 wrote them: what is for development stands among the others."""
    text = (
        package("torch", "2.5.1", "optional = false\n", '[package.dependencies]\nsympy = "*"\n')
        + package("sympy", "1.12", "optional = false\n")
        + package("pytest", "8.0", "optional = false\n")
        + '[metadata]\nlock-version = "2.0"\npython-versions = "^3.11"\n'
    )
    project = (
        "[build-system]\nrequires = []\n[tool.poetry]\nname = 'lab'\n[tool.poetry.dependencies]\npython = '^3.11'\n"
        "torch = '^2.5'\n[tool.poetry.group.dev.dependencies]\npytest = '*'\n"
    )
    spec = read(text, "poetry.lock", pyproject_toml=project)
    assert (spec.pip, spec.sources) == (["torch==2.5.1", "sympy==1.12"], ["."])
    assert read(text, "poetry.lock").pip == ["torch==2.5.1", "sympy==1.12", "pytest==8.0"]


PYLOCK = """\
lock-version = "1.0"
environments = ["sys_platform == 'linux'", "sys_platform == 'darwin'"]
requires-python = ">=3.11"
extras = ["viz"]
dependency-groups = ["dev", "base"]
default-groups = ["base"]
created-by = "uv"

[[packages]]
name = "numpy"
version = "1.26.4"
index = "https://index.example.org/simple"

[[packages]]
name = "torch"
version = "2.5.1+cu124"
index = "https://download.pytorch.org/whl/cu124"

[[packages]]
name = "colorama"
version = "0.4.6"
marker = "sys_platform == 'win32'"

[[packages]]
name = "bokeh"
version = "3.4.0"
marker = "'viz' in extras and python_version >= '3.11'"

[[packages]]
name = "pytest"
version = "8.0.0"
marker = "'dev' in dependency_groups"

[[packages]]
name = "rich"
version = "13.7.1"
marker = "'base' in dependency_groups and 'dev' not in dependency_groups"

[[packages]]
name = "ops"
vcs = { type = "git", url = "https://git.example.org/ops", commit-id = "0123456789abcdef0123456789abcdef01234567" }

[[packages]]
name = "lab"
directory = { path = "lab", editable = true }

[[packages]]
name = "own"
archive = { url = "https://files.example.org/own-1.0.tar.gz" }

[[packages]]
name = "nothing"
"""


def test_a_pylock() -> None:
    spec = read(PYLOCK, "pylock.toml")
    assert spec.pip == ["numpy==1.26.4", "torch==2.5.1", "rich==13.7.1"]
    assert (spec.python, spec.locked) == (">=3.11", True)
    assert spec.sources == [f"git+https://git.example.org/ops@{COMMIT}", "./lab"]
    assert [item.split(":")[1] for item in spec.lost] == ["47", "51"]  # own, nothing
    assert "cu124" in " ".join(spec.hints)
    more = read(PYLOCK, "pylock.lab.toml", extras=("viz",), groups=("dev",))
    assert more.pip == ["numpy==1.26.4", "torch==2.5.1", "bokeh==3.4.0", "pytest==8.0.0"]


@pytest.mark.parametrize(
    ("old", "new", "line", "code"),
    [
        ('"1.0"', '"2.0"', 1, "format-unsupported"),
        (
            "sys_platform == 'linux'\", \"sys_platform == 'darwin'",
            "sys_platform == 'win32'",
            2,
            "platform-missing",
        ),
        (
            'name = "pytest"',
            'name = "numpy"\nversion = "1"\n[[packages]]\nname = "pytest"',
            29,
            "duplicate-package",
        ),
    ],
)
def test_a_pylock_that_is_for_others_is_refused(old: str, new: str, line: int, code: str) -> None:
    with pytest.raises(RecipeError) as raised:
        read(PYLOCK.replace(old, new, 1), "pylock.toml")
    (fault,) = raised.value.diagnostics
    assert fault.location.startswith(f"pylock.toml:{line}:")
    assert fault.code == code


def test_an_extra_that_a_pylock_does_not_have_is_refused() -> None:
    with pytest.raises(RecipeError) as raised:
        read(PYLOCK, "pylock.toml", extras=("none",))
    assert raised.value.diagnostics[0].code == "extra-unknown"


def test_a_default_group_of_pdm_is_taken() -> None:
    text = (
        'lock-version = "1.0"\ndependency-groups = ["default", "license"]\ndefault-groups = ["default"]\n'
        '[[packages]]\nname = "numpy"\nversion = "2.0.0"\nrequires-python = ">=3.9"\n'
        'marker = "\\"default\\" in dependency_groups"\nwheels = []\n'
        '[[packages]]\nname = "pip-licenses"\nversion = "5.0.0"\n'
        'marker = "python_version >= \\"3.10\\" and \\"license\\" in dependency_groups"\n'
    )
    assert read(text, "pylock.toml").pip == ["numpy==2.0.0"]
    assert read(text, "pylock.toml", groups=("license",)).pip == ["numpy==2.0.0", "pip-licenses==5.0.0"]
