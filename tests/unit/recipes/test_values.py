"""Match specs: which are taken, the one spelling of each, and that the solver reads the same."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from rattler import MatchSpec

from imagefactory.errors import RecipeError
from imagefactory.recipes import edit, values
from imagefactory.recipes.bases import BASES_FILE, parse_bases
from imagefactory.recipes.read import read_bases
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.recipes.values import CondaSpec, channel_address, channel_name, parse_spec
from tests.made.errors import fails
from tests.made.schema import FOLDER, schema, schema_accepts

SPELLINGS = [
    ("numpy", "numpy"),
    ("NumPy", "numpy"),
    ("numpy *", "numpy"),
    ("numpy=*", "numpy"),
    ("jaxlib * *", "jaxlib"),
    ("numpy<2", "numpy <2"),
    ("numpy >= 1, <2", "numpy <2,>=1"),
    ("numpy=1.26", "numpy 1.26.*"),
    ("numpy =1.26", "numpy 1.26.*"),
    ("numpy=1.26.*", "numpy 1.26.*"),
    ("numpy 1.26*", "numpy 1.26.*"),
    ("numpy=1.26,!=1.26.2", "numpy !=1.26.2,1.26.*"),
    ("numpy 1.26.*,>=1.26.2 py*", "numpy 1.26.*,>=1.26.2 py*"),
    ("numpy 1.26.4", "numpy ==1.26.4"),
    ("numpy==1.26.4", "numpy ==1.26.4"),
    ("numpy=1.26.4=py311_0", "numpy ==1.26.4 py311_0"),
    ("numpy==1.26.4=py311_0", "numpy ==1.26.4 py311_0"),
    ("numpy ==1.26.4 py311_0", "numpy ==1.26.4 py311_0"),
    ("numpy=1.26.*=py311*", "numpy 1.26.* py311*"),
    ("jaxlib=*=*cuda12*", "jaxlib * *cuda12*"),
    ("cuda-version 12.6.*", "cuda-version 12.6.*"),
    ("pytorch-cuda=12.1", "pytorch-cuda 12.1.*"),
    ("a ~=1.2", "a ~=1.2"),
    ("a !=1.26.*", "a !=1.26.*"),
    ("tzdata 2024A", "tzdata ==2024a"),
    ("openssl=1.1.1w", "openssl 1.1.1w.*"),
    ("a 1!2.0", "a ==1!2.0"),
    ("a 1.0_1", "a ==1.0_1"),
    ("a ==1.0+cu.121", "a ==1.0+cu.121"),
    ("_libgcc_mutex 0.1 conda_forge", "_libgcc_mutex ==0.1 conda_forge"),
    ("conda-forge::numpy<2", "conda-forge::numpy <2"),
    ("https://conda.anaconda.org/conda-forge::numpy", "conda-forge::numpy"),
    ("nvidia/label/cuda-12.1.0::cuda-nvcc", "nvidia/label/cuda-12.1.0::cuda-nvcc"),
    ("https://conda.example.org:8080/lab::a=1", "https://conda.example.org:8080/lab::a 1.*"),
    ("file:///srv/lab::a", "file:///srv/lab::a"),
]


REFUSED = [
    "",
    " ",
    "numpy ",
    " numpy",
    "numpy  <2",
    "numpy\n",
    "a b c d",
    "__cuda",
    "-a",
    "a|b",
    "a >=1|<2",
    "a[build=x]",
    "a >=1.*",
    "a ==1.*",
    "a ~=1.2.*",
    "a 1..2",
    "a 1.",
    "a =",
    "a==",
    "a=1=",
    "a=1.2=^py.*$",
    "a=*=cuda**",
    "a ^1.*$",
    "a >",
    "a (>=1)",
    "a >=1,,<2",
    "a <2,",
    "defaults::a",
    "local::a",
    "::a",
    "../x::a",
    "http://x/y::a",
    "https://10.0.0.1/x::a",
    "https://x:443/y::a",
    "https://u:p@x/y::a",
    "https://x/t/abc/y::a",
    "conda-forge/linux-64::a",
    "file://srv::a",
    "a; b",
    "a @ https://x",
    "$(id)",
    "a\u0661",
]


@pytest.mark.parametrize(("written", "kept"), SPELLINGS)
def test_one_spelling_that_the_solver_reads_as_what_was_written(written: str, kept: str) -> None:
    assert str(parse_spec(written)) == kept
    assert str(parse_spec(kept)) == kept
    ours, theirs = MatchSpec(kept), MatchSpec(written)
    assert ours.name
    assert theirs.name
    assert (ours.name.normalized, str(ours.channel)) == (theirs.name.normalized, str(theirs.channel))
    assert {*str(ours.version or "*").split(",")} == {*str(theirs.version or "*").split(",")}
    assert (ours.build or "*") == (theirs.build or "*")


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a supported match spec"):
        parse_spec(text)


def test_taken_apart() -> None:
    assert parse_spec("nvidia/label/cuda-12.1.0::Cuda-NVCC >=12,<13 h*_0") == CondaSpec(
        name="cuda-nvcc",
        version="<13,>=12",
        build="h*_0",
        channel="https://conda.anaconda.org/nvidia/label/cuda-12.1.0",
    )


def test_channels() -> None:
    assert channel_address("conda-forge") == "https://conda.anaconda.org/conda-forge"
    assert channel_address("https://conda.example.org/lab/") == "https://conda.example.org/lab"
    assert channel_address("file:///srv/lab/") == "file:///srv/lab"
    assert channel_name("https://conda.anaconda.org/nvidia/label/x") == "nvidia/label/x"
    assert channel_name("https://conda.example.org/lab") == "https://conda.example.org/lab"


@given(text=st.from_regex(values.SPEC, fullmatch=True))
def test_whatever_the_rule_allows_the_solver_reads(text: str) -> None:
    kept = str(parse_spec(text))
    assert str(parse_spec(kept)) == kept
    spec, read = parse_spec(kept), MatchSpec(kept)
    assert read.name
    assert read.name.normalized == spec.name
    assert (read.build or "") == spec.build
    assert (read.channel.base_url.rstrip("/") if read.channel else "") == spec.channel


FILES = sorted(path for path in FOLDER.glob("*.yaml"))


RECIPE = """\
family: pytorch
description: small
source: pypi
framework: torch
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
packages: [numpy]
environment: {A: b}
matrix:
  - version: "2.3"
    cuda: ["12.1"]
"""


IMAGE = "docker.io/nvidia/cuda:12@sha256:" + "0a" * 32


OWN_BASE = RECIPE.replace(
    "base: debian-12", f'base: {IMAGE}\nglibc: "2.36"\ninterpreter: /usr/local/bin/python3.11'
)


BASES = f"""\
bases:
  - name: cuda-devel
    image: {IMAGE}
    python: "3.11"
    glibc: "2.36"
    interpreter: /usr/bin/python3.11
"""


def parser_accepts(text: str) -> bool:
    parse = parse_bases if text.startswith("bases:") else parse_recipe
    try:
        parse(text, "recipes/x.yaml")
    except RecipeError:
        return False
    return True


ENUMS = {
    "source": values.SOURCES,
    "platform": values.PLATFORMS,
    "check": values.SMOKE_CHECKS,
    "waived": values.WAIVABLE,
    "channel-priority": values.PRIORITIES,
    "archspec": values.ARCHSPECS,
}


@pytest.mark.parametrize("name", ["recipe.schema.json", "bases.schema.json"])
def test_the_schema_is_sound_and_says_the_parsers_rules(name: str) -> None:
    Draft202012Validator.check_schema(schema(name))
    for rule, written in schema(name)["$defs"].items():
        if rule in ("row", "pulled-row"):
            continue
        allowed = values.RULES.get(rule) or values.RULES[rule.replace("-", " ")]
        if "enum" in written:
            assert written["enum"] == list(ENUMS[rule])
        else:
            assert (written["pattern"], written["maxLength"]) == (f"^(?:{allowed.pattern})$", allowed.limit)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_trees_files_are_valid_and_name_their_schema(path: Path) -> None:
    name = "bases.schema.json" if path.name == BASES_FILE else "recipe.schema.json"
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# yaml-language-server: $schema={name}\n")
    assert schema_accepts(text, name)


def test_a_scaffold_is_valid() -> None:
    for source in ("pypi", "conda"):
        assert schema_accepts(edit.scaffold("jax", read_bases(FOLDER), source=source).text)


def test_named_indexes_of_a_family_and_of_a_row_are_accepted_by_both() -> None:
    text = (
        RECIPE.replace("{A: b}", "{A: b}\nindex: {torch: lab-1, numpy: lab}") + "    index: {torch: cu121}\n"
    )
    assert schema_accepts(text)
    assert parser_accepts(text)


def test_exclude_of_a_family_and_of_a_row_is_accepted_by_both() -> None:
    text = RECIPE.replace("{A: b}", "{A: b}\nexclude: [opencv-python]") + "    exclude: [PyYAML]\n"
    assert schema_accepts(text)
    assert parser_accepts(text)
    for bad in ("opencv-python<4", "./wheels/a-1-py3-none-any.whl", "a[b]", ""):
        text = RECIPE.replace("{A: b}", f"{{A: b}}\nexclude: [{bad!r}]")
        assert not schema_accepts(text)
        assert not parser_accepts(text)


def test_the_sample_is_accepted_by_both() -> None:
    assert schema_accepts(RECIPE)
    assert parser_accepts(RECIPE)


def test_images_by_digest_are_accepted_by_both() -> None:
    assert schema_accepts(OWN_BASE)
    assert parser_accepts(OWN_BASE)
    assert schema_accepts(BASES, "bases.schema.json")
    assert parser_accepts(BASES)
    row = '"2.3"\n    base: ' + IMAGE + '\n    glibc: "2.31"'
    assert schema_accepts(RECIPE.replace('"2.3"', row))
    assert parser_accepts(RECIPE.replace('"2.3"', row))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@sha256:" + "0a" * 32, ""),
        ("@sha256:" + "0a" * 32, "@sha256:" + "0A" * 32),
        ("0a" * 32, "0a" * 31),
        ("docker.io/nvidia/", ""),
        ("docker.io/nvidia/", "nvidia/"),
        ("docker.io/nvidia/", "docker.io/"),
        ("docker.io/nvidia/", "https://docker.io/nvidia/"),
        ("docker.io/nvidia/", "user:password@docker.io/nvidia/"),
        ("docker.io/nvidia/", "docker.io/Nvidia/"),
        ("docker.io/nvidia/", "--privileged.example/nvidia/"),
        ("docker.io/nvidia/", "registry.-example.org/nvidia/"),
        ("docker.io/nvidia/", "-v:5000/nvidia/"),
        ("docker.io/nvidia/", "docker.io/../"),
        ("glibc", "glbc"),
        ('glibc: "2.36"\n', ""),
        ("interpreter: /", "interpreter: "),
        ("interpreter: /usr", "interpreter: /.."),
        (IMAGE, "debian-12"),
    ],
)
def test_faults_of_images_are_refused_by_both(old: str, new: str) -> None:
    recipe, bases = OWN_BASE.replace(old, new, 1), BASES.replace(old, new, 1)
    assert recipe != OWN_BASE
    assert not parser_accepts(recipe)
    assert not schema_accepts(recipe)
    if "\n" not in old:
        assert bases != BASES
        assert not parser_accepts(bases)
        assert not schema_accepts(bases, "bases.schema.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("packages", "pakages"),
        ("    cuda", "    cudda"),
        ("framework: torch\n", ""),
        ('capabilities: ["8.0"]', "capabilities: []"),
        ('"2.3"', "2.3"),
        ('"2.3"', '">=2.3"'),
        ('["12.1"]', "[12.1]"),
        ('["12.1"]', "[]"),
        ('["12.1"]', '["12.1", "12.1"]'),
        ('"3.11"', "3.11"),
        ("[numpy]", "numpy"),
        ("[numpy]", '["numpy @ https://x/y.whl"]'),
        ("[numpy]", '["numpy; os_name"]'),
        ("[numpy]", '["-r x"]'),
        ("[numpy]", "[numpy]\nconstraints: [numpy]"),
        ("[numpy]", "[numpy]\nchecks: [gpu-burn]"),
        ("family: pytorch", "family: no"),
        ("family: pytorch", "family: PyTorch"),
        ("family: pytorch", f"family: {'a' * 41}"),
        ("small", '"{{7*7}}"'),
        ("small", '"small "'),
        ("small", '"a\\nRUN id"'),
        ("small", ""),
        ("base: debian-12", 'base: debian-12\nglibc: "2.36"'),
        ("base: debian-12", "base: debian-12\ninterpreter: /usr/bin/python3.11"),
        ('"2.3"', '"2.3"\n    glibc: "2.36"'),
        ("source: pypi", "source: conda"),
        ("source: pypi", "source: pip"),
        ("source: pypi", "source: pypi\nchannels: [conda-forge]"),
        ("source: pypi", "source: pypi\nvirtual: {}"),
        ("source: pypi", "source: pypi\npip: [numpy]"),
        ("source: pypi", "source: pypi\non: pytorch-2.3-cu121"),
        ("[numpy]", '["numpy 1.26.*"]'),
        ("[numpy]", '["numpy=1.26"]'),
        ("linux/amd64", "linux/riscv64"),
        ("{A: b}", "{a: b}"),
        ("{A: b}", "{A: 1}"),
        ("{A: b}", "{A: $x}"),
        ("{A: b}", "{PATH: x}"),
        ("{A: b}", "{NVIDIA_X: x}"),
        ("{A: b}", "[A]"),
        ("{A: b}", "{A: b}\nindex: {torch: https://x}"),
        ("{A: b}", "{A: b}\nindex: {'torch<2': lab}"),
        ("{A: b}", "{A: b}\nindex: lab"),
    ],
)
def test_faults_are_refused_by_both(old: str, new: str) -> None:
    text = RECIPE.replace(old, new, 1)
    assert text != RECIPE
    assert not parser_accepts(text)
    assert not schema_accepts(text)


CONDA = """\
family: pytorch
description: small
source: conda
framework: pytorch
channels: [pytorch, nvidia/label/cuda-12.1.0, https://conda.example.org/lab, file:///srv/channel]
channel-priority: disabled
virtual: {glibc: "2.28", archspec: x86_64_v3}
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
packages: [numpy, "scipy=1.11", "pytorch::pandas >=2, <3", "jaxlib=*=*cuda12*"]
constraints: ["mkl 2024.*"]
pip: ["einops>=0.7"]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    virtual: {cuda: "12.4"}
    channels: [pytorch, conda-forge]
    channel-priority: strict
    pip: [rich]
"""


ON = """\
family: lab
description: small
on: pytorch-2.3-cu121
packages: [numpy, "scipy 1.11.*", "pandas[x]>=2"]
pip: [rich]
capabilities: ["8.0"]
environment: {A: b}
"""


ON_ROWS = """\
family: lab
description: small
packages: [numpy]
matrix:
  - on: pytorch-2.3-cu121
  - on: pytorch-2.5-cu124-py313
    constraints: ["numpy<2"]
"""


@pytest.mark.parametrize("text", [CONDA, ON, ON_ROWS])
def test_conda_and_what_is_built_on_targets_is_accepted_by_both(text: str) -> None:
    assert schema_accepts(text)
    assert parser_accepts(text)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (CONDA, "channels: [pytorch", "chanels: [pytorch"),
        (CONDA, "[pytorch, conda-forge]", "[]"),
        (CONDA, "[pytorch, conda-forge]", "[defaults]"),
        (CONDA, "[pytorch, conda-forge]", "[local]"),
        (CONDA, "[pytorch, conda-forge]", "[../x]"),
        (CONDA, "[pytorch, conda-forge]", "[http://x/y]"),
        (CONDA, "[pytorch, conda-forge]", "['https://u:p@x/y']"),
        (CONDA, "[pytorch, conda-forge]", "[https://x/t/abc/y]"),
        (CONDA, "[pytorch, conda-forge]", "[conda-forge/linux-64]"),
        (CONDA, "priority: disabled", "priority: flexible"),
        (CONDA, "x86_64_v3", "zen3"),
        (CONDA, "x86_64_v3", "x86_64_v9"),
        (CONDA, '{cuda: "12.4"}', "{cuda: 12.4}"),
        (CONDA, '{cuda: "12.4"}', '{cuda: "12"}'),
        (CONDA, '{cuda: "12.4"}', '{cuda: "12.99"}'),
        (CONDA, '{cuda: "12.4"}', '{cudda: "12.4"}'),
        (CONDA, '{cuda: "12.4"}', '["12.4"]'),
        (CONDA, "[numpy,", '["numpy[build=x]",'),
        (CONDA, "[numpy,", '["numpy|scipy",'),
        (CONDA, "[numpy,", '["numpy >=1.*",'),
        (CONDA, "[numpy,", '["numpy ==1.*",'),
        (CONDA, "[numpy,", '["numpy  <2",'),
        (CONDA, "[numpy,", "[__cuda,"),
        (CONDA, '["mkl 2024.*"]', '["mkl=="]'),
        (CONDA, "[rich]", '["rich=13"]'),
        (CONDA, "[rich]", "[{a: b}]"),
        (CONDA, '["12.1"]', '["12.1"]\n    extras: [x]'),
        (CONDA, '["12.1"]', '["12.1"]\n    on: pytorch-2.3-cu121'),
        (CONDA, '["12.1"]', '["12.1"]\n    source: conda'),
        (ON, "pytorch-2.3-cu121", "pytorch"),
        (ON, "pytorch-2.3-cu121", "../pytorch-2.3-cu121"),
        (ON, "pytorch-2.3-cu121", "Pytorch-2.3-cu121"),
        (ON, "on: pytorch-2.3-cu121\n", ""),
        (ON, "[numpy,", '["numpy; x",'),
        (ON, "packages:", 'python: "3.11"\npackages:'),
        (ON, "packages:", "source: conda\npackages:"),
        (ON, "packages:", "channels: [conda-forge]\npackages:"),
        (ON, "packages:", "matrix: [{on: pytorch-2.3-cu121}]\npackages:"),
        (ON_ROWS, "pytorch-2.3-cu121", 'pytorch-2.3-cu121\n    version: "2.3"'),
        (ON_ROWS, "pytorch-2.3-cu121", 'pytorch-2.3-cu121\n    cuda: ["12.1"]'),
        (ON_ROWS, "- on: pytorch-2.3-cu121", "- packages: [numpy]"),
        (ON_ROWS, "packages: [numpy]", "base: debian-12"),
        (ON_ROWS, "description: small\n", ""),
    ],
)
def test_faults_of_these_are_refused_by_both(text: str, old: str, new: str) -> None:
    changed = text.replace(old, new, 1)
    assert changed != text
    assert not parser_accepts(changed)
    assert not schema_accepts(changed)


NOW = datetime(2026, 11, 28, 10, 30, 15, 250, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("7 days", "2026-11-21T10:30:15Z"),
        ("1 week except Torch, my_lab", "2026-11-21T10:30:15Z except my-lab, torch"),
        ("12 hours", "2026-11-27T22:30:15Z"),
        ("0 days", "None"),
        ("2026-11-01", "2026-11-01T23:59:59Z"),
        ("2026-11-01T01:02:03Z except numpy", "2026-11-01T01:02:03Z except numpy"),
    ],
)
def test_the_cutoff_of_an_age_a_date_and_a_time(text: str, stored: str) -> None:
    cutoff = values.parse_cutoff(text, NOW)
    assert str(cutoff) == stored
    assert values.parse_stored_cutoff(stored) == cutoff


@pytest.mark.parametrize(
    "text", ["soon", "7", "7 days except", "2026-13-01", "20261101", "1 year", "-1 days"]
)
def test_what_is_no_cutoff_is_refused(text: str) -> None:
    with fails("cutoff-invalid"):
        values.parse_cutoff(text, NOW)


def test_the_longest_cooldown_applies_with_all_exceptions() -> None:
    cooldown = values.longest_cooldown(["3 days except numpy", "", "1 week except torch"])
    assert (cooldown.age, cooldown.allowed) == (timedelta(days=7), ("numpy", "torch"))


def test_a_cooldown_of_a_family_and_of_a_row_is_accepted_by_both() -> None:
    text = RECIPE.replace("{A: b}", "{A: b}\ncooldown: 7 days") + "    cooldown: 2 weeks except torch\n"
    assert schema_accepts(text)
    assert parser_accepts(text)
    wrong = text.replace("7 days", "a week")
    assert not schema_accepts(wrong)
    assert not parser_accepts(wrong)
