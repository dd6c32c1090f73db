"""Projects: their extras and groups, the files that say what they need, and their own code."""

# ruff: noqa: E501 -- files of others, a line a line
from __future__ import annotations

from collections.abc import Mapping

import pytest

from imagefactory.errors import RecipeError
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.extras.importers.spec import EnvironmentSpec
from tests.made.diagnostics import reports

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PEP = """\
[build-system]
requires = ["setuptools"]
[project]
name = "My.Lab"
dependencies = ["torch==2.5.1"]
[project.optional-dependencies]
train = ["lightning"]
vision = ["timm"]
all = ["my-lab[train,vision]", "my_lab"]
[dependency-groups]
test = ["pytest", {include-group = "lint"}]
lint = ["ruff"]
[tool.uv]
dev-dependencies = ["ipython"]
"""
POETRY = """\
[build-system]
requires = ["poetry-core"]
[tool.poetry]
name = "lab"
[tool.poetry.dependencies]
python = "^3.11"
torch = "2.5.1"
wandb = {version = "^0.17", optional = true}
near = {path = "libs/near", develop = true}
tool = {git = "https://git.example.org/tool.git", rev = "REV"}
moved = {git = "https://git.example.org/moved.git", branch = "main"}
windows = {version = "1", markers = "sys_platform == 'win32'"}
[tool.poetry.extras]
log = ["wandb"]
[tool.poetry.group.dev.dependencies]
black = "^24"
""".replace("REV", COMMIT)


def read(
    files: Mapping[str, str],
    file: str = "pyproject.toml",
    *,
    extras: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    place: str | None = ".",
) -> EnvironmentSpec:
    reading = ReadOptions(
        pythons=("3.11", "3.13"), beside=files.get, place=place, extras=extras, groups=groups
    )
    return parse_environment_file(files[file], file, reading)


# --- extras and groups ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extras", "groups", "selection"),
    [
        ((), (), []),
        (("train",), (), ["lightning"]),
        (("all",), (), ["lightning", "timm"]),
        (("Train", "vision"), (), ["lightning", "timm"]),
        ((), ("test",), ["pytest", "ruff"]),
        ((), ("dev",), ["ipython"]),
    ],
)
def test_extras_and_groups(extras: tuple[str, ...], groups: tuple[str, ...], selection: list[str]) -> None:
    spec = read({"pyproject.toml": PEP}, extras=extras, groups=groups)
    assert spec.pip == ["torch==2.5.1", *selection]
    assert spec.lost == []


def test_what_is_optional_is_one_note() -> None:
    spec = read({"pyproject.toml": PEP}, extras=("all",), groups=("lint",))
    (note,) = [line for line in spec.notes if "optional" in line]
    assert note.endswith("optional, not taken: test, dev (--group NAME)")
    (note,) = [line for line in read({"pyproject.toml": PEP}).notes if "optional" in line]
    assert note.endswith("train, vision, all (--extra NAME); test, lint, dev (--group NAME)")


@pytest.mark.parametrize(
    ("file", "text", "result"),
    [
        (
            "pyproject.toml",
            '[project]\nname = "x"\ndependencies = []\n[project.optional-dependencies]\n'
            'model_worker = ["peft", "torch>=2 ; python_version > \'3\'"]\nweb = ["gradio"]\n"a b" = ["torch"]\n',
            ("extra", "model_worker", "torch>=2 is in the extra model_worker: --extra model_worker"),
        ),
        (
            "pyproject.toml",
            '[project]\nname = "x"\ndependencies = []\n[dependency-groups]\ngpu = ["jax[cuda12]"]\nall = []\n',
            ("group", "gpu", "jax[cuda12] is in the group gpu: --group gpu"),
        ),
        (
            "pyproject.toml",
            '[tool.poetry]\nname = "x"\n[tool.poetry.dependencies]\npython = "^3.10"\n'
            'torch = {version = "^2", optional = true}\n[tool.poetry.extras]\ndeep = ["torch"]\n',
            ("extra", "deep", "torch is in the extra deep: --extra deep"),
        ),
        (
            "setup.py",
            'from setuptools import setup\nsetup(name="x", extras_require={"torch": ["torch==2.6.0"]})\n',
            ("extra", "torch", "torch==2.6.0 is in the extra torch: --extra torch"),
        ),
    ],
)
def test_an_extra_or_group_with_a_framework_is_named(
    file: str, text: str, result: tuple[str, str, str]
) -> None:
    spec = read({file: text}, file=file)
    kind, name, messages = result
    assert spec.frameworks == [(kind, name)]
    (note,) = [line for line in spec.notes if "optional" in line]
    assert messages in note
    assert read({file: text}, file=file, **{f"{kind}s": (name,)}).frameworks == []


def test_a_framework_that_the_project_requires_itself_is_not_looked_for() -> None:
    text = '[project]\nname = "x"\ndependencies = ["torch"]\n[dependency-groups]\ngpu = ["torch>=2"]\n'
    assert read({"pyproject.toml": text}).frameworks == []


@pytest.mark.parametrize(("extras", "groups"), [(("tarin",), ()), ((), ("train",))])
def test_an_unknown_one_stops_and_names_those_there_are(
    extras: tuple[str, ...], groups: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as caught:
        read({"pyproject.toml": PEP}, extras=extras, groups=groups)
    assert caught.value.diagnostics[0].code == ("extra-unknown" if extras else "group-unknown")
    for there in ("--extra train", "--extra all", "--group test", "--group dev"):
        assert there in caught.value.message


@pytest.mark.parametrize("file", ["requirements.txt", "environment.yml", "Dockerfile", "pixi.lock"])
def test_other_files_have_none(file: str) -> None:
    text = {
        "environment.yml": "dependencies: [a]\n",
        "Dockerfile": "FROM x\n",
        "pixi.lock": "environments: {}\n",
    }
    with pytest.raises(RecipeError) as caught:
        read({file: text.get(file, "a\n")}, file, extras=("train",))
    assert reports(caught.value.diagnostics, "option-not-applicable --extra")


def test_poetry() -> None:
    near = {"libs/near/pyproject.toml": "[project]\nname = 'near'\ndependencies = ['einops']\n"}
    spec = read({"pyproject.toml": POETRY, **near})
    assert spec.pip == ["torch==2.5.1", "einops"]
    assert spec.sources == ["./libs/near", f"git+https://git.example.org/tool.git@{COMMIT}", "."]
    assert [line.partition(": ")[0] for line in spec.lost] == ["pyproject.toml:11:1"]
    chosen = read({"pyproject.toml": POETRY, **near}, extras=("log",), groups=("dev",))
    assert chosen.pip == ["torch==2.5.1", "einops", "wandb<0.18,>=0.17", "black<25,>=24"]


def test_an_extra_chooses_where_a_package_comes_from() -> None:
    text = (
        "[build-system]\n[project]\nname = 'lab'\n[project.optional-dependencies]\ncpu = ['torch']\ncuda = ['torch']\n"
        "[[tool.poetry.source]]\nname = 'c'\nurl = 'https://w.example.org/whl/cpu'\npriority = 'explicit'\n"
        "[[tool.poetry.source]]\nname = 'g'\nurl = 'https://w.example.org/whl/cu126'\npriority = 'explicit'\n"
        "[tool.poetry.dependencies]\ntorch = [{markers = \"extra == 'cpu'\", source = 'c'}, {markers = \"extra == 'cuda'\", source = 'g'}]\n"
    )
    assert read({"pyproject.toml": text}, extras=("cuda",)).indexes == ["https://w.example.org/whl/cu126"]
    assert read({"pyproject.toml": text}, extras=("cpu",)).indexes == ["https://w.example.org/whl/cpu"]


def test_overrides_and_constraints_of_uv() -> None:
    text = (
        "[project]\nname = 'lab'\n[tool.uv]\nconstraint-dependencies = ['numpy<2', \"x<1; sys_platform == 'win32'\"]\n"
        "override-dependencies = ['av>=15', \"gone; sys_platform == 'never'\", \"of-extra==1; extra == 'vllm'\"]\n"
    )
    spec = read({"pyproject.toml": text})
    assert spec.constraints == ["numpy<2", "av>=15"]
    (lost,) = spec.lost
    assert "exclude: [gone]" in lost


def test_indexes_of_uv() -> None:
    text = "[project]\nname = 'lab'\n[tool.uv]\nprerelease = 'allow'\nfind-links = ['https://w.example.org/wheels']\nextra-index-url = ['https://w.example.org/whl/cu121']\n"
    spec = read({"pyproject.toml": text})
    assert spec.indexes == ["https://w.example.org/whl/cu121", "https://w.example.org/wheels"]
    assert len(spec.lost) == 2


@pytest.mark.parametrize("more", ["", "explicit = true\n[tool.uv.sources]\nops = {index = 'w'}\n"])
def test_a_flat_index_of_uv_is_a_page(more: str) -> None:
    text = (
        "[project]\nname = 'lab'\ndependencies = ['ops']\n"
        f"[[tool.uv.index]]\nname = 'w'\nurl = 'https://w.example.org/wheels'\nformat = 'flat'\n{more}"
    )
    (lost,) = read({"pyproject.toml": text}).lost
    assert "./wheels/" in lost


# --- dependencies that another file says ---------------------------------------------------------

DYNAMIC = "[build-system]\nrequires = []\n[project]\nname = 'lab'\ndynamic = ['dependencies', 'optional-dependencies']\n"


@pytest.mark.parametrize(
    ("more", "files"),
    [
        ("[tool.setuptools.dynamic]\ndependencies = {file = ['r.txt']}\noptional-dependencies = {x = {file = ['x.txt']}}\n", {}),
        ("[tool.setuptools.dynamic]\ndependencies = {file = 'r.txt'}\noptional-dependencies.x = {file = 'x.txt'}\n", {}),
        ("[tool.hatch.metadata.hooks.requirements_txt]\nfiles = ['r.txt']\noptional-dependencies = {x = ['x.txt']}\n", {}),
        ("", {"setup.py": "setup(install_requires=open('r.txt').readlines(), extras_require={'x': ['wandb']})"}),
        ("", {"setup.cfg": "[options]\ninstall_requires = file: r.txt\n[options.extras_require]\nx = wandb\n"}),
    ],
)  # fmt: skip
def test_dynamic_dependencies(more: str, files: dict[str, str]) -> None:
    beside = {"r.txt": "torch==2.5.1\n", "x.txt": "wandb\n", **files}
    spec = read({"pyproject.toml": DYNAMIC + more, **beside}, extras=("x",))
    assert spec.pip == ["torch==2.5.1", "wandb"]
    assert (spec.lost, spec.sources) == ([], ["."])


def test_what_a_build_computes_is_in_its_wheel_or_lost() -> None:
    """A recipe that builds the project has what its wheel names; one that cannot build it has not."""
    inside, outside = read({"pyproject.toml": DYNAMIC}), read({"pyproject.toml": DYNAMIC}, place=None)
    assert (inside.sources, inside.lost) == (["."], [])
    assert any("computed" in line for line in inside.notes)
    assert (outside.sources, len(outside.lost)) == ([], 2)


@pytest.mark.parametrize("file", ["setup.py", "setup.cfg", "pyproject.toml"])
def test_a_project_of_setup_files_alone(file: str) -> None:
    files = {
        "pyproject.toml": "[build-system]\nrequires = ['setuptools']\n[tool.black]\nline-length = 90\n",
        "setup.py": "from setuptools import setup\nsetup(name='lab', install_requires=['torch==2.5.1'])\n",
        "setup.cfg": "[metadata]\nname = lab\n[options]\npython_requires = >=3.12\n[options.extras_require]\nx = a\n",
    }
    spec = read(files, file, extras=("x",))
    assert (spec.pip, spec.sources, spec.lost) == (["torch==2.5.1", "a"], ["."], [])
    assert (spec.python, spec.file) == (">=3.12", file)


def test_a_script_without_a_call_of_setup_is_refused() -> None:
    for file in ("setup.py", "train.py", "tox.cfg"):
        with pytest.raises(RecipeError):
            read({file: "import torch\n"}, file)


# --- the project's own code ----------------------------------------------------------------------


def test_settings_of_setuptools_are_of_a_package() -> None:
    text = "[project]\nname = 'lab'\n[tool.setuptools.packages.find]\nwhere = ['src']\n"
    assert read({"pyproject.toml": text}).sources == ["."]


def test_scripts_without_packaging_are_told_of_files() -> None:
    spec = read({"pyproject.toml": "[project]\nname = 'lab'\ndependencies = ['torch']\n"})
    assert (spec.sources, spec.lost) == ([], [])
    assert any("files:" in line for line in spec.notes)


@pytest.mark.parametrize(
    "text",
    [
        "[tool.uv]\npackage = false\n",
        "[tool.poetry]\npackage-mode = false\n[tool.poetry.dependencies]\na = '1'\n",
    ],
)
def test_a_project_that_says_so_is_no_package(text: str) -> None:
    head = "[build-system]\nrequires = []\n"
    project = "" if "poetry" in text else "[project]\nname = 'lab'\n"
    assert read({"pyproject.toml": head + project + text}).sources == []


def test_code_outside_of_the_imagefactory_project_is_lost() -> None:
    spec = read({"pyproject.toml": PEP}, place=None)
    assert (spec.pip, spec.sources, len(spec.lost)) == (["torch==2.5.1"], [], 1)
    assert "imagefactory init" in spec.lost[0]


def test_the_folder_is_written_from_the_root_on() -> None:
    assert read({"pyproject.toml": PEP}, place="libs/lab").sources == ["./libs/lab"]


WORKSPACE = """\
[build-system]
requires = []
[project]
name = "lab"
dependencies = ["core[fast]", "ops", "torch", "lost"]
[tool.uv.workspace]
members = ["packages/*"]
[tool.uv.sources]
core = {workspace = true}
lost = {workspace = true}
ops = {git = "https://git.example.org/ops", rev = "REV", subdirectory = "py"}
torch = [{index = "pt", marker = "sys_platform == 'linux'"}, {path = "mac.whl", marker = "sys_platform == 'darwin'"}]
[[tool.uv.index]]
name = "pt"
url = "https://wheels.example.org/whl/cu128"
explicit = true
""".replace("REV", COMMIT)


def test_workspaces_and_other_origins() -> None:
    files = {
        "pyproject.toml": WORKSPACE,
        "packages/core/pyproject.toml": "[project]\nname = 'core'\ndependencies = ['einops', 'lab']\n"
        "[project.optional-dependencies]\nfast = ['numba']\n[tool.uv.sources]\nlab = {workspace = true}\n",
    }
    spec = read(files)
    assert spec.pip == ["einops", "numba", "torch"]
    assert spec.sources == [
        "./packages/core",
        f"git+https://git.example.org/ops@{COMMIT}#subdirectory=py",
        ".",
    ]
    assert [line.partition(" (")[0] for line in spec.lost if "'lost'" not in line] == []
    assert "/cu128" in spec.hints


def test_projects_that_need_each_other_are_read_once() -> None:
    files = {
        "pyproject.toml": "[build-system]\n[project]\nname = 'a'\ndependencies = ['b']\n[tool.uv.sources]\nb = {path = 'b'}\n",
        "b/pyproject.toml": "[project]\nname = 'b'\ndependencies = ['a', 'x']\n[tool.uv.sources]\na = {path = '..'}\n",
    }
    spec = read(files)
    assert spec.pip == ["x"]
    assert set(spec.sources) == {".", "./b"}


def test_a_pixi_project_installs_itself() -> None:
    text = (
        "[workspace]\nchannels = ['conda-forge']\nplatforms = ['linux-64']\n[dependencies]\npytorch = '2.5.*'\n"
        "[pypi-dependencies]\nlab = {path = '.', editable = true}\n"
    )
    files = {"pixi.toml": text, "pyproject.toml": PEP}
    spec = read(files, "pixi.toml")
    assert (spec.conda, spec.pip, spec.sources) == (["pytorch 2.5.*"], ["torch==2.5.1"], ["."])


# --- two projects of the shapes that people have -------------------------------------------------


def test_a_src_layout_with_a_console_script() -> None:
    """`pip install -e .[train]` of a requirements file and pyproject.toml bring the same."""
    files = {
        "pyproject.toml": '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "speech"\nversion = "0.1"\nrequires-python = ">=3.10"\n'
        'dependencies = ["torch==2.5.1", "torchaudio"]\n[project.optional-dependencies]\ntrain = ["wandb"]\n'
        '[project.scripts]\nspeech-train = "speech.train:main"\n',
        "requirements.txt": "-e .[train]\n",
    }
    direct = read(files, extras=("train",))
    listed = read(files, "requirements.txt")
    assert direct.pip == listed.pip == ["torch==2.5.1", "torchaudio", "wandb"]
    assert direct.sources == listed.sources == ["."]
    assert direct.lost == listed.lost == []
    assert direct.python == listed.python == ">=3.10"


def test_flat_scripts_with_requirements() -> None:
    """Nothing says that the scripts are a package, so nothing is built."""
    spec = read(
        {"requirements.txt": "torch==2.5.1\nnumpy<2\ntqdm\n", "train.py": "import torch\n"},
        "requirements.txt",
    )
    assert (spec.pip, spec.sources, spec.lost) == (["torch==2.5.1", "numpy<2", "tqdm"], [], [])
