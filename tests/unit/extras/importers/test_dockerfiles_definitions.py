"""Definition files of apptainer as people have them: what is taken, and that nothing else goes unsaid."""

# ruff: noqa: E501 -- what is told, a line a line
from __future__ import annotations

import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from imagefactory.errors import RecipeError, UsageError
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.extras.importers.spec import EnvironmentSpec
from tests.made.diagnostics import reports

FILES = {"requirements.txt": "transformers\n", "env/environment.yml": "dependencies: [scipy]\n"}
TRAIN = """\
Bootstrap: docker
From: pytorch/pytorch:{{ version }}-cuda12.1-cudnn8-runtime   # ours

%arguments
    version="2.3.1"

%labels
    Author someone@example.org
    org.opencontainers.image.source https://git.example.org/x

%help
    Training.

%files
    requirements.txt /opt/requirements.txt
    env
    src /opt/src

%post -c /bin/bash
    export DEBIAN_FRONTEND=noninteractive
    apt-get update && apt-get install -y --no-install-recommends git libsndfile1
    pip install --no-cache-dir -r /opt/requirements.txt
    pip install librosa==0.10.1 \\
        soundfile
    conda env update -f env/environment.yml
    cat > /opt/hello.sh <<EOF
%notasection
EOF

%environment
    export LC_ALL=C OMP_NUM_THREADS=4
    NCCL_DEBUG=INFO
    export NCCL_DEBUG
    export PATH=/opt/bin:$PATH
    if true; then export X=1; fi

%runscript
    # comes first
    cd /opt
    exec python "$@"

%startscript
    sleep 1

%test
    python -c "import torch"

%setup
    touch /x

%appinstall foo
    echo
"""


def read(text: str, file: str = "train.def") -> EnvironmentSpec:
    return parse_environment_file(text, file, ReadOptions(pythons=("3.11", "3.13"), beside=FILES.get))


def places(messages: list[str]) -> list[str]:
    """Line and column of what is told."""
    return [":".join(line.split(":")[1:3]) for line in messages]


def test_a_definition_is_taken_over() -> None:
    spec = read(TRAIN.replace("%notasection", "echo hello"))
    torch = ["torch==2.3.1", "torchvision", "torchaudio"]
    assert spec.pip == [*torch, "transformers", "librosa==0.10.1", "soundfile"]
    assert (spec.conda, spec.hints) == (["scipy"], ["cuda12.1"])
    assert spec.environment == {"LC_ALL": "C", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"}
    assert spec.labels == {"org.opencontainers.image.source": "https://git.example.org/x"}
    parts = spec.parts
    assert list(parts.debian) == ["git", "libsndfile1"]
    assert parts.entrypoint == ("/bin/sh", "-c", 'cd /opt; exec python "$@"', "runscript")
    assert [line.partition(" (")[0] for line in spec.lost] == [
        "train.def:16:1: COPY env to '/env'",
        "train.def:17:1: COPY src to '/opt/src'",
        "train.def:26:5: 'cat > /opt/hello.sh <<EOF' is not run",
        "train.def:34:12: '/opt/bin' in PATH",
        "train.def:35:5: 'if true; then export X=1; fi' is not run",
        "train.def:42:1: %startscript is not taken",
        "train.def:48:1: %setup is not taken",
        "train.def:51:1: %appinstall is not taken",
    ]
    assert places(spec.notes) == ["2:7", "8:1", "11:1", "45:1", "2:7"]


def test_the_last_stage_counts_and_what_it_copies_from() -> None:
    spec = read(
        "Bootstrap: docker\nFrom: python:3.12\nStage: build\n%post\n  pip install built\n  make\n"
        "Bootstrap: docker\nFrom: golang\nStage: go\n%post\n  go build\n"
        "Bootstrap: docker\nFrom: node\nStage: web\n"
        "Bootstrap: docker\nFrom: python:3.11\nStage: final\n"
        "%files from build\n  /opt/venv /opt/venv\n%files from go\n  /bin/x\n%post\n  pip install torch==2.3.1\n"
    )
    assert (spec.pip, spec.python) == (["built", "torch==2.3.1"], "3.11")
    assert places(spec.lost) == ["6:3", "20:1"]  # make, and the files of go
    assert places(spec.notes) == ["16:7", "18:1", "11:3", "12:12"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bootstrap: yum\nMirrorURL: http://x\n", "1:12: Bootstrap 'yum' is not taken"),
        ("BootStrap: localimage\nFrom: a.sif\n", "1:12: Bootstrap 'localimage' 'a.sif' is not taken"),
        ("Bootstrap: docker\nFrom: nobody/knows:1\n", "its content is unknown"),
    ],
)
def test_what_it_starts_from_is_told(text: str, expected: str) -> None:
    (line,) = read(text).lost
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%post\n  pip install a\n", "train.def:1:1 text-before-base %post"),
        ("From: x\n", "train.def:1:1 text-before-base From"),
        ("", "train.def:1:1 no-base-image"),
        ("Bootstrap: docker\nwhat is this\n", "train.def:2:1 line-invalid"),
        ("Bootstrap: docker\nFrom: x\n%post\n  pip install 'a\n", "train.def:4:15 quote-unclosed"),
        ("Bootstrap: docker\n%post\n  cat <<X\na\n", "train.def:3:3 heredoc-unclosed"),
        ("Bootstrap: docker\n" * 60, "too-many-stages 50"),
        ("Bootstrap: docker\n\x07", "train.def:2:1 hidden-character \\x07"),
    ],
)
def test_bad_files_are_refused_in_words(text: str, expected: str) -> None:
    with pytest.raises(RecipeError) as raised:
        read(text)
    assert reports(raised.value.diagnostics, expected), raised.value


ARGUMENTS = """\
Bootstrap: docker
From: python:{{ PY }}
# {{ NOBODY }}

%arguments
    PY="3.11"
    VER=2.1.2
    PKG=torch-scatter=={{ VER }}
    ALL={{PKG}} {{ PKG }}-x

%post
    pip install {{ PKG }} {{ EXTRA }}  # and not {{ THIS }}
"""


def given(text: str, **values: str) -> EnvironmentSpec:
    return parse_environment_file(text, "t.def", ReadOptions(pythons=("3.11",), build_args=values))


def test_build_arguments_are_filled_in_also_within_others() -> None:
    spec = given(ARGUMENTS, EXTRA="einops==0.8.0")
    assert (spec.pip, spec.python, spec.lost) == (["torch-scatter==2.1.2", "einops==0.8.0"], "3.11", [])
    assert given(ARGUMENTS, EXTRA="a", VER="2.1.3", PY="3.12").pip[0] == "torch-scatter==2.1.3"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ARGUMENTS, "t.def:12:27 build-argument-missing EXTRA"),
        ("Bootstrap: docker\nFrom: x:{{ tag }}\n", "t.def:2:9 build-argument-missing tag"),
        (
            "Bootstrap: docker\nFrom: x\n%arguments\nA={{ B }}\nB={{ A }}\n%post\n a {{ A }}\n",
            "t.def:7:4 build-argument-recursive",
        ),
        (
            "Bootstrap: docker\nFrom: x\n%arguments\nA={{ B }}\n%post\n a {{ A }}\n",
            "t.def:6:4 build-argument-missing B",
        ),
        # of a stage that comes later, as apptainer has it
        (
            "Bootstrap: docker\nFrom: x:{{ V }}\nBootstrap: docker\nFrom: y\n%arguments\nV=1\n",
            "t.def:2:9 build-argument-missing V",
        ),
        (
            "Bootstrap: docker\nFrom: x\n%arguments\n"
            + "".join(f"A{n}={{{{ A{n + 1} }}}}{{{{ A{n + 1} }}}}\n" for n in range(40))
            + "A40=\n%post\n a {{ A0 }}\n",
            "t.def:46:4 build-argument-recursive",
        ),
        (
            "Bootstrap: docker\nFrom: x\n%arguments\nA=" + 500 * "a" + "\n%post\n" + 9 * "{{A}}",
            "t.def:6:41 variables-too-long",
        ),
    ],
)
def test_a_build_argument_without_a_value_is_refused_by_name(text: str, line: str) -> None:
    with pytest.raises(RecipeError) as raised:
        given(text)
    assert reports(raised.value.diagnostics, line), raised.value


def test_a_stage_has_the_arguments_of_those_before_and_a_given_one_is_used() -> None:
    text = "Bootstrap: docker\nFrom: a\n%arguments\nV=3.11\nBootstrap: docker\nFrom: python:{{ V }}\n"
    assert given(text).python == "3.11"
    with pytest.raises(UsageError) as raised:
        given(text, W="1")
    assert raised.value.code == "build-argument-unknown"
    assert "'W'" in raised.value.message


def test_a_line_of_arguments_that_sets_none_is_told() -> None:
    assert places(given("Bootstrap: docker\nFrom: python:3.11\n%arguments\n  A\n").notes) == ["2:7", "4:1"]


@pytest.mark.parametrize("line", ["%hello world", "  %{option}", "%"])
def test_a_section_that_apptainer_does_not_know_is_refused_also_in_a_script(line: str) -> None:
    text = f"Bootstrap: docker\nFrom: x\n%post\n  cat << EOF > /usage\n{line}\nEOF\n  pip install pandas\n"
    with pytest.raises(RecipeError) as raised:
        given(text)
    assert reports(raised.value.diagnostics, "t.def:5:1 line-invalid")


@pytest.mark.parametrize(
    ("line", "lost"),
    [("From: nvidia/cuda:${CUDA_VERSION}-devel-ubuntu22.04", ["2:7"]), ("From: python:3.11   # $HOME", [])],
)
def test_a_variable_of_a_shell_in_the_header_is_no_build_argument(line: str, lost: list[str]) -> None:
    assert places(given(f"Bootstrap: docker\n{line}\n%post #test\n  pip install a\n").lost) == lost


def test_a_section_may_stand_behind_blanks_as_apptainer_reads_it() -> None:
    assert given("Bootstrap: docker\nFrom: python:3.11\n  %post\n  pip install a\n").pip == ["a"]


def test_it_is_known_by_its_content() -> None:
    assert read(
        "# ours\nbootstrap: docker\nfrom: python:3.11\n%post\npip install a\n", "Singularity"
    ).pip == ["a"]


@given_any(st.text(max_size=8), st.integers(0, len(TRAIN)), st.integers(0, 40))
def test_any_file_is_read_or_refused(piece: str, at: int, length: int) -> None:
    try:
        messages = read(TRAIN[:at] + piece + TRAIN[at + length :]).lost
    except RecipeError as error:
        messages = [error.message]
    for line in messages:
        assert line.isascii(), line
        assert line.replace("\n", "").isprintable(), line
