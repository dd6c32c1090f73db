"""Recipes of source conda, and families that are built on targets: what they become, and their faults."""

# ruff: noqa: E501 -- one fault per line reads as a table
from __future__ import annotations

import re
from dataclasses import replace

import pytest

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.gpu import knowledge
from imagefactory.model import BaseSpec, ContainerStart, FilesSpec, SourceLocation, Target
from imagefactory.recipes import values
from imagefactory.recipes.bases import all_bases, parse_bases
from imagefactory.recipes.expand import expand_all, expand_lenient
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.suite import table
from tests.made.diagnostics import reports
from tests.made.values import make_base

FILE = "recipes/torch.yaml"


FORGE = "https://conda.anaconda.org/conda-forge"


CONDA = """\
family: stack
description: PyTorch from conda
source: conda
framework: PyTorch
channels: [pytorch, nvidia/label/cuda-12.1.0, "https://conda.anaconda.org/conda-forge/"]
platform: linux/amd64
base: debian-12
python: "3.12"
virtual: {archspec: x86_64_v2}
capabilities: ["8.0"]
packages: [numpy]
pip: [Einops>=0.7]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    packages: [pytorch-cuda=12.1, "conda-forge::scipy 1.11*"]
    constraints: ["pytorch=*=*cuda*", "mkl <2024.1", "python 3.12.4"]
  - version: "2.7"
    cuda: ["12"]
    channels: [conda-forge]
    channel-priority: disabled
    virtual: {cuda: "12.4", glibc: "2.28"}
    python: "3.13"
    pip: [rich]
"""


PYPI = """\
family: wheels
description: PyTorch from PyPI
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0", "9.0"]
constraints: [scipy<2]
environment: {A: a, B: b}
matrix:
  - version: "2.3"
    cuda: ["12.1"]
  - version: "2.9"
    cuda: ["12.8"]
    base: debian-13
    python: "3.13"
"""


PLAIN = """\
family: plain
description: a package that the smoke test does not know
source: conda
framework: cupy
channels: [conda-forge]
platform: linux/amd64
base: debian-12
python: "3.12"
capabilities: ["8.0"]
matrix:
  - version: "1.0"
    cuda: ["12.4"]
"""


ON_CONDA = """\
family: lab
description: ours
on: stack-2.3-cu121
packages: [Pandas=2.2, "conda-forge::xarray"]
constraints: ["dask * py*"]
pip: [Rich]
"""


ON_BOTH = """\
family: both
description: two below
packages: [pandas]
environment: {B: c}
matrix:
  - on: wheels-2.9-cu128-py313
    packages: ["Polars >= 1"]
    constraints: [pandas<3]
    checks: [import]
  - on: lab-2.3-cu121
    capabilities: ["9.0"]
"""


BASES = """\
bases:
  - {name: debian-12, suite: bookworm, python: "3.11", glibc: "2.36", packages: [python3], public: a.b/c:12}
  - {name: debian-13, suite: trixie, python: "3.13", glibc: "2.41", packages: [python3, gcc], public: a.b/c:13}
  - {name: bare, suite: trixie, glibc: "2.41", packages: [ca-certificates], public: a.b/c:13}
"""


IMAGE = "docker.io/nvidia/cuda@sha256:" + "0a" * 32


def bases() -> tuple[BaseSpec, ...]:
    return parse_bases(BASES, "recipes/bases.yaml")


def expanded(*texts: str) -> dict[str, Target]:
    parsed = [parse_recipe(text, FILE) for text in texts]
    return {target.name: target for target in expand_all(parsed, bases())}


def faults_of(*texts: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(RecipeError) as caught:
        expanded(*texts)
    return caught.value.diagnostics


def edited(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


def test_targets_of_a_conda_recipe() -> None:
    first, second = expanded(CONDA).values()
    assert first == Target(
        name="stack-2.3-cu121",
        family="stack",
        description="PyTorch from conda",
        source="conda",
        framework="pytorch",
        version="2.3",
        cuda="12.1",
        python="3.12",
        base="debian-12",
        platform="linux/amd64",
        capabilities=("8.0",),
        checks=values.default_checks("torch"),
        requirements=("pytorch 2.3.*", "numpy", "pytorch-cuda 12.1.*", "conda-forge::scipy 1.11.*"),
        constraints=("pytorch * *cuda*", "mkl <2024.1", "python ==3.12.4"),
        environment=(),
        where=SourceLocation(file=FILE, line=14, column=5),
        channels=(
            "https://conda.anaconda.org/pytorch",
            "https://conda.anaconda.org/nvidia/label/cuda-12.1.0",
            FORGE,
        ),
        priority="strict",
        virtual=(("__archspec", "x86_64_v2"), ("__cuda", "12.1"), ("__glibc", "2.36")),
        pip=("einops>=0.7",),
    )
    assert second.name == "stack-2.7-cu12-py313"
    assert (second.channels, second.priority) == ((FORGE,), "disabled")
    assert second.virtual == (("__archspec", "x86_64_v2"), ("__cuda", "12.4"), ("__glibc", "2.28"))
    assert second.pip == ("einops>=0.7", "rich")


def test_the_framework_may_come_from_a_later_channel() -> None:
    text = edited(CONDA, '"pytorch=*=*cuda*"', '"conda-forge::pytorch * *cuda*"')
    target = expanded(text)["stack-2.3-cu121"]
    assert target.requirements[0] == "conda-forge::pytorch 2.3.*"
    assert target.constraints[0] == "conda-forge::pytorch * *cuda*"


def test_each_cuda_of_a_row_is_its_own_system() -> None:
    text = edited(CONDA, '["12.1"]', '["11.8", "12.1"]')
    found = {target.name: dict(target.virtual)["__cuda"] for target in expanded(text).values()}
    assert found == {"stack-2.3-cu118": "11.8", "stack-2.3-cu121": "12.1", "stack-2.7-cu12-py313": "12.4"}


def test_a_framework_that_the_smoke_test_does_not_know() -> None:
    (target,) = expanded(PLAIN).values()
    assert target.checks == table.OTHER_CHECKS
    (fault,) = faults_of(PLAIN.replace("matrix:", "checks: [import, compute]\nmatrix:"))
    assert reports([fault], f"{FILE}:10:18 check-unknown 'compute' 'cupy'")
    assert fault.fix == "write checks: [packages, libraries, import, unprivileged]"


def test_the_base_needs_no_python() -> None:
    for target in expanded(edited(CONDA, "base: debian-12", "base: bare")).values():
        assert target.base == "bare"
    assert next(base for base in bases() if base.name == "bare").python == ""
    first, second = expanded(edited(PYPI, "base: debian-12", "base: bare")).values()
    assert (first.conda, second.conda) == (True, False)  # Python itself is conda's then


def test_what_python_an_image_carries_is_open() -> None:
    conda = parse_recipe(edited(CONDA, "base: debian-12", f'base: {IMAGE}\nglibc: "2.31"'), FILE)
    pypi = parse_recipe(edited(PYPI, "base: debian-12", f'base: {IMAGE}\nglibc: "2.31"'), FILE)
    (alone,) = all_bases((), [conda])
    assert (alone.python, alone.python_path) == ("", "/usr/bin/python3")
    for order in ([conda, pypi], [pypi, conda]):
        (both,) = all_bases((), order)
        assert both.python == "3.11"
    other = parse_recipe(edited(PYPI, "base: debian-12", f'base: {IMAGE}\nglibc: "2.35"'), FILE)
    with pytest.raises(RecipeError) as caught:
        all_bases((), [conda, other])
    assert reports(caught.value.diagnostics, "base-described-twice")


def test_the_newest_cuda_is_what_knowledge_says() -> None:
    assert knowledge.newest_cuda() == max(int(wheel.cuda.split(".")[0]) for wheel in knowledge.cuda_wheels())


LABELS = "labels: {org.opencontainers.image.source: https://x.org/lab, team.name: A b}\nmatrix:"


def test_labels_are_the_familys_and_those_of_what_it_is_built_on() -> None:
    below = edited(PYPI, "matrix:", LABELS)
    above = edited(
        ON_BOTH, "matrix:", "labels: {team.name: Ours, org.opencontainers.image.licenses: MIT}\nmatrix:"
    )
    made = expanded(below, CONDA, ON_CONDA, above)
    ours = {"org.opencontainers.image.source": "https://x.org/lab", "team.name": "A b"}
    assert dict(made["wheels-2.3-cu121"].labels) == ours
    licensed = {**ours, "team.name": "Ours", "org.opencontainers.image.licenses": "MIT"}
    assert dict(made["both-2.9-cu128-py313"].labels) == licensed


LABEL_FAULTS = [
    ("imagefactory.lock: x", "8:10 name-reserved imagefactory.lock"),
    (
        "org.opencontainers.image.base.name: x",
        "8:10 name-reserved org.opencontainers.image.base.name",
    ),
    (
        "org.opencontainers.image.licenses: BSD 3",
        "8:45 value-invalid BSD SPDX",
    ),
    ("Team: x", "8:10 value-invalid labels Team"),
    ("team: ' x'", "8:16 value-invalid team"),
    ("team: 'a{{ b }}'", "8:16 value-invalid team"),
    ("team: 1.10", "8:16 quotes-missing team 1.10"),
]


@pytest.mark.parametrize(("written", "expected"), LABEL_FAULTS)
def test_fault_of_a_label(written: str, expected: str) -> None:
    (told,) = faults_of(edited(CONDA, "python:", f"labels: {{{written}}}\npython:"))
    assert reports([told], f"{FILE}:{expected}"), told


CONDA_FAULTS = [
    ("channels: [pytorch,", "channels: [defaults,", "5:12 value-invalid channels 'defaults' conda-forge"),
    ("channels: [pytorch,", "channels: ['https://u:p@x.org/y',", "5:12 value-invalid channels https://...@x.org/y netrc"),
    ("channels: [pytorch,", "channels: [https://x.org/t/abc/y,", "5:12 value-invalid channels https://x.org/t/.../y netrc"),
    ("channels: [pytorch,", "channels: [pytorch/linux-64,", "5:12 value-invalid channels pytorch/linux-64 pytorch"),
    ("channels: [pytorch,", "channels: ['http://x.org/y',", "5:12 value-invalid channels http://x.org/y https://"),
    ("channels: [pytorch,", "channels: [/data/lab,", "5:12 value-invalid channels /data/lab file:///data/channel"),
    ("channels: [pytorch,", "channels: ['a b',", "5:12 value-invalid channels conda-forge"),
    ("[numpy]", "[numpy>=1,<2]", "11:21 value-invalid packages <2"),
    ("channel-priority: disabled", "channel-priority: flexible", "21:23 value-invalid channel-priority flexible strict disabled"),
    ("[numpy]", "['numpy[build=x]']", "11:12 value-invalid packages numpy[build=x]"),
    ("[numpy]", "['numpy >=1|<1']", "11:12 value-invalid packages 1"),
    ("[numpy]", "['numpy >=1.*']", "11:12 value-invalid packages"),
    ("[numpy]", "[__cuda]", "11:12 value-invalid packages __cuda"),
    ("[numpy]", "[pytorch=2.3]", "11:12 framework-listed pytorch packages version"),
    ("[numpy]", "[python]", "11:12 python-listed python"),
    ("[numpy]", "['r::numpy']", "11:12 channel-unknown r::numpy channels nvidia/label/cuda-12.1.0"),
    ('"mkl <2024.1"', "mkl", "17:39 constraint-empty mkl packages"),
    ("pytorch=*=*cuda*", "pytorch=2.3.1=*cuda*", "17:19 framework-listed pytorch constraints"),
    ("[Einops>=0.7]", "[einops=0.7]", "12:7 value-invalid pip einops=0.7"),
    ('cuda: ["12.1"]', 'cuda: ["12.1"]\n    extras: [x]', "16:5 key-not-for-source extras"),
    ("x86_64_v2", "zen3", "9:21 value-invalid archspec zen3 x86_64 x86_64_v2"),
    ("archspec:", "arch:", "9:11 unknown-key arch archspec"),
    ("{archspec: x86_64_v2}", "[x86_64_v2]", "9:10 not-a-mapping"),
    ('{cuda: "12.4", ', "{", "19:12 driver-missing 12 12.4"),
    ('"12.4"', "12.4", "22:21 quotes-missing cuda 12.4"),
    ('"12.4"', '"12"', "22:21 value-invalid cuda 12 12.4"),
    ('"12.4"', '"99.0"', "22:21 driver-unknown 99.0 13"),
    ('"12.4"', '"12.99"', "22:21 value-invalid cuda 12.99"),
    ('"12.4"', '"11.8"', "22:21 driver-mismatch 11.8 12"),
    ('cuda: ["12.1"]', 'cuda: ["99.1"]', "15:12 driver-unknown 99.1 13"),
    ('cuda: ["12.1"]', 'cuda: ["12.99"]', "15:12 driver-unknown 12.99 13"),
    ('"2.28"', '"2.39"', "22:36 glibc-too-new debian-12 2.36 2.39"),
    ('"2.28"', '"99"', "22:36 value-invalid glibc 99"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), CONDA_FAULTS)
def test_fault_of_conda(old: str, new: str, expected: str) -> None:
    told = faults_of(edited(CONDA, old, new))
    assert reports(told, f"{FILE}:{expected}"), told
    for fault in map(str, told):
        assert re.fullmatch(r"recipes/torch\.yaml:\d+:\d+: [ -~]+ \([ -~]+\)", fault), fault


def test_a_channel_is_held_against_those_that_can_be_read_alone() -> None:
    told = faults_of(edited(edited(CONDA, "[numpy]", "['r::numpy']"), "channels: [", "chanels: ["))
    assert not [fault for fault in told if "r::numpy" in str(fault)], told


def test_on_a_conda_target() -> None:
    targets = expanded(CONDA, ON_CONDA)
    below, above = targets["stack-2.3-cu121"], targets["lab-2.3-cu121"]
    assert above == replace(
        below,
        name="lab-2.3-cu121",
        family="lab",
        description="ours",
        requirements=(*below.requirements, "pandas 2.2.*", "conda-forge::xarray"),
        constraints=(*below.constraints, "dask * py*"),
        pip=("einops>=0.7", "rich"),
        where=SourceLocation(file=FILE, line=1, column=1),
        on="stack-2.3-cu121",
    )


def test_rows_on_targets_of_both_sources_and_on_others_that_are_built_so() -> None:
    targets = expanded(ON_BOTH, ON_CONDA, CONDA, PYPI)
    wheels, conda = targets["both-2.9-cu128-py313"], targets["both-2.3-cu121"]
    assert wheels.requirements == ("torch==2.9.*", "pandas", "polars>=1")
    assert wheels.constraints == ("scipy<2", "pandas<3")
    assert wheels.environment == (("A", "a"), ("B", "c"))
    assert (wheels.base, wheels.python, wheels.source) == ("debian-13", "3.13", "pypi")
    assert (wheels.checks, wheels.capabilities) == (("import",), ("8.0", "9.0"))
    assert conda.on == "lab-2.3-cu121"
    assert conda.requirements[-2:] == ("conda-forge::xarray", "pandas")
    assert (conda.checks, conda.capabilities) == (values.default_checks("torch"), ("9.0",))
    assert conda.environment == (("B", "c"),)


ON_FAULTS = [
    (ON_CONDA, "stack-2.3-cu121", "stack-2.4-cu121", "3:5 parent-unknown stack-2.4-cu121 stack-2.3-cu121 stack-2.7-cu12-py313"),
    (ON_CONDA, "stack-2.3-cu121", "zzz-9-cu1", "3:5 parent-unknown zzz-9-cu1 both plain stack wheels"),
    (ON_CONDA, "stack-2.3-cu121", "stack", "3:5 value-invalid on stack pytorch-2.3-cu121"),
    (ON_CONDA, "stack-2.3-cu121", "lab-2.3-cu121", "3:5 parent-cycle lab"),
    (ON_CONDA, "stack-2.3-cu121", "both-2.3-cu121", "3:5 parent-cycle lab both"),
    (ON_CONDA, "Pandas=2.2", '"pandas[all]"', "4:12 value-invalid packages pandas[all] stack-2.3-cu121"),
    (ON_CONDA, "Pandas=2.2", '"pandas ; x"', "4:12 value-invalid packages"),
    (ON_CONDA, "Pandas=2.2", "pytorch", "4:12 framework-listed pytorch packages stack-2.3-cu121"),
    (ON_CONDA, "conda-forge::xarray", "r::xarray", "4:24 channel-unknown r::xarray stack-2.3-cu121 nvidia/label/cuda-12.1.0"),
    (ON_CONDA, "dask * py*", "dask", "5:15 constraint-empty dask"),
    (ON_CONDA, "packages:", 'python: "3.11"\npackages:', "4:1 key-not-with-on python on"),
    (ON_CONDA, "packages:", "source: conda\npackages:", "4:1 key-not-with-on source on"),
    (ON_CONDA, "packages:", "channels: [r]\npackages:", "4:1 key-not-with-on channels on"),
    (ON_CONDA, "packages:", "matrix: []\npackages:", "4:1 key-not-with-on matrix on"),
    (ON_CONDA, "packages:", "onn: x\npackages:", "4:1 unknown-key onn on"),
    (ON_BOTH, "on: lab-2.3-cu121", 'on: lab-2.3-cu121\n    version: "1.0"', "11:5 key-not-with-on version on"),
    (ON_BOTH, "- on: lab-2.3-cu121\n    c", "- c", "10:5 missing-key on"),
    (ON_BOTH, "Polars >= 1", "polars=1", "7:16 value-invalid packages polars=1 wheels-2.9-cu128-py313"),
    (ON_BOTH, "Polars >= 1", "torch", "7:16 framework-listed torch packages wheels-2.9-cu128-py313"),
    (ON_BOTH, "[pandas<3]", "[pandas]", "8:19 value-invalid constraints pandas wheels-2.9-cu128-py313"),
    (ON_BOTH.replace("wheels-2.9-cu128-py313", "plain-1.0-cu124"), "[import]", "[import, compute]", "9:22 check-unknown compute cupy libraries"),
    (ON_BOTH, "    checks:", "    pip: [rich]\n    checks:", "9:11 key-not-for-source pip packages wheels-2.9-cu128-py313"),
    (ON_BOTH, "wheels-2.9-cu128-py313", "lab-2.3-cu121", "10:5 duplicate-target both-2.3-cu121 6 5"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "expected"), ON_FAULTS)
def test_fault_of_what_is_built_on_a_target(text: str, old: str, new: str, expected: str) -> None:
    family = text.partition("\n")[0]
    others = [other for other in (CONDA, PYPI, PLAIN, ON_CONDA, ON_BOTH) if not other.startswith(family)]
    told = faults_of(*others, edited(text, old, new))
    assert reports(told, f"{FILE}:{expected}"), told
    for fault in map(str, told):
        assert re.fullmatch(r"recipes/torch\.yaml:\d+:\d+: [ -~]+ \([ -~]+\)", fault), fault


def test_what_waits_for_a_missing_target_is_not_told_too() -> None:
    (fault,) = faults_of(ON_BOTH, edited(ON_CONDA, "stack-2.3", "stack-2.9"), CONDA, PYPI)
    assert reports(
        [fault], f"{FILE}:3:5 parent-unknown 'stack-2.9-cu121' stack-2.3-cu121 stack-2.7-cu12-py313"
    )


def test_a_chain_longer_than_recursion_would_bear() -> None:
    texts = [CONDA]
    for number in range(300):
        below = f"x{number - 1}-2.3-cu121" if number else "stack-2.3-cu121"
        texts.append(f"family: x{number}\ndescription: d\non: {below}\npackages: [p{number}]\n")
    top = expanded(*reversed(texts))["x299-2.3-cu121"]
    assert len(top.requirements) == 304


RECIPE = """\
family: pytorch
description: PyTorch, small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
  - version: "2.5"
    cuda: ["12.4"]
"""


ABOVE = "family: mine\ndescription: More\non: pytorch-2.3-cu121\n"


def test_its_targets_stand_on_a_base_of_their_own() -> None:
    recipes = [
        parse_recipe(RECIPE + "system: [ffmpeg, python3]\n", "recipes/pytorch.yaml"),
        parse_recipe(ABOVE + "system: [jq]\n", "recipes/mine.yaml"),
    ]
    bases, targets, faults = expand_lenient(recipes, [make_base()], {})
    assert faults == {}
    assert {target.name: target.base for target in targets} == {
        "mine-2.3-cu121": "debian-12-pytorch-mine",
        "pytorch-2.3-cu121": "debian-12-pytorch",
        "pytorch-2.5-cu124": "debian-12-pytorch",
    }
    below = make_base().packages
    assert {base.name: (base.on, base.packages) for base in bases} == {
        "debian-12": ("", below),
        "debian-12-pytorch": ("debian-12", (*below, "ffmpeg")),
        "debian-12-pytorch-mine": ("debian-12-pytorch", (*below, "ffmpeg", "jq")),
    }
    assert str(bases[1].where) == "recipes/pytorch.yaml:14:9"
    assert {(base.glibc, base.python, base.public) for base in bases} == {
        ("2.36", "3.11", "docker.io/library/debian:12-slim")
    }


def test_without_any_it_is_the_base_itself() -> None:
    recipes = [parse_recipe(RECIPE, "recipes/pytorch.yaml"), parse_recipe(ABOVE, "recipes/mine.yaml")]
    bases, targets, _ = expand_lenient(recipes, [make_base()], {})
    assert [base.name for base in bases] == ["debian-12"]
    assert {target.base for target in targets} == {"debian-12"}


def test_a_base_of_that_name_and_an_image_of_a_registry_are_told() -> None:
    recipe = parse_recipe(RECIPE + "system: [ffmpeg]\n", "recipes/pytorch.yaml")
    _, _, faults = expand_lenient([recipe], [make_base(), make_base(name="debian-12-pytorch")], {})
    assert reports(faults["pytorch"][:1], "recipes/pytorch.yaml:14:9 duplicate-base 'debian-12-pytorch'")
    image = f"docker.io/library/python@sha256:{'1' * 64}"
    _, _, faults = expand_lenient([recipe], [make_base(image=image, packages=())], {})
    assert reports(faults["pytorch"][:1], "14:9 base-not-debian debian-12")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("system: ffmpeg", "14:9 not-a-list system"),
        ("system: []", "14:9 empty-list system"),
        ("system: [FFmpeg]", "14:10 value-invalid system FFmpeg"),
        ("system: [ffmpeg=5.1]", "14:10 value-invalid system ffmpeg=5.1"),
        ("system: {cuda: '12.4'}", "14:9 not-a-list system"),
    ],
)
def test_what_cannot_stand_there_is_told(text: str, fault: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"{RECIPE}{text}\n", "recipes/pytorch.yaml")
    (told,) = caught.value.diagnostics
    assert told.location.startswith("recipes/pytorch.yaml:14:")
    assert reports([told], fault), told


FILE_CONFIG = "recipes/pytorch.yaml"


RECIPE_CONFIG = """\
family: pytorch
description: PyTorch, small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
"""


OWN = """\
files:
  /app: [train.py, "src/**/*.py"]
  /usr/local/bin: [start.sh]
workdir: /app
user: "1000:100"
entrypoint: [start.sh]
command: [python, train.py, --lr, "0.1", --lr, "0.1"]
"""


START = ContainerStart(
    entrypoint=("start.sh",),
    command=("python", "train.py", "--lr", "0.1", "--lr", "0.1"),
    workdir="/app",
    user="1000:100",
)


def test_own_files_and_start_of_a_family() -> None:
    (target,) = expand_all([parse_recipe(RECIPE_CONFIG + OWN, FILE_CONFIG)], [make_base()])
    first = RECIPE_CONFIG.count("\n") + 1
    assert target.files == tuple(
        FilesSpec(
            folder=folder,
            pattern=pattern,
            where=SourceLocation(file=FILE_CONFIG, line=first + line, column=column),
        )
        for folder, pattern, line, column in (
            ("/app", "train.py", 1, 10),
            ("/app", "src/**/*.py", 1, 20),
            ("/usr/local/bin", "start.sh", 2, 20),
        )
    )
    assert target.start == START


@pytest.mark.parametrize(
    ("own", "start"),
    [
        ("", START),
        ("command: [bash]\n", replace(START, command=("bash",))),
        ("entrypoint: [sh]\n", replace(START, entrypoint=("sh",), command=())),
    ],
)
def test_what_is_built_on_a_target_starts_as_that_one_where_it_says_nothing(
    own: str, start: ContainerStart
) -> None:
    above = f"family: mine\ndescription: More\non: pytorch-2.3-cu121\nfiles: {{/app: [more.py]}}\n{own}"
    recipes = [parse_recipe(RECIPE_CONFIG + OWN, FILE_CONFIG), parse_recipe(above, "recipes/mine.yaml")]
    targets = expand_all(recipes, [make_base()])
    mine = next(target for target in targets if target.family == "mine")
    assert mine.start == start
    assert [one.pattern for one in mine.files] == ["train.py", "src/**/*.py", "start.sh", "more.py"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("files: {/lib/x: [a]}", "12:9 value-invalid files /lib/x"),
        ("files: {/usr/bin: [a]}", "12:9 value-invalid files /usr/bin"),
        ("files: {/opt/env/lib: [a]}", "12:9 value-invalid files /opt/env/lib"),
        ("files: {app: [a]}", "12:9 value-invalid files app"),
        ("files: {/app: [../a]}", "12:16 value-invalid /app ../a"),
        ("files: {/app: [/etc/passwd]}", "12:16 value-invalid /app /etc/passwd"),
        ("files: {/app: a.py}", "12:15 not-a-list /app"),
        ("files: {/app: []}", "12:15 empty-list /app"),
        ("files: [a.py]", "12:8 not-a-mapping files"),
        ("user: 1000", "12:7 quotes-missing 1000"),
        ("user: bob", "12:7 value-invalid user bob"),
        (
            "command: python train.py",
            "12:10 not-a-list command",
        ),
        ("command: []", "12:10 empty-list command"),
        ('entrypoint: ["{{x}}"]', "12:14 value-invalid entrypoint"),
        ("workdir: app", "12:10 value-invalid workdir app"),
    ],
)
def test_what_cannot_stand_there_is_told_with_its_place(line: str, fault: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"{RECIPE_CONFIG}{line}\n", FILE_CONFIG)
    (told,) = caught.value.diagnostics
    assert told.location.startswith(f"{FILE_CONFIG}:{RECIPE_CONFIG.count(chr(10)) + 1}:")
    assert reports([told], fault), told
