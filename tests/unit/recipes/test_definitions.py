"""Definition files of apptainer as people have them: what is taken, and that nothing else goes unsaid."""

# ruff: noqa: E501 -- what is told, a line a line
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import RecipeError
from imagefactory.recipes.environments import Reading, parse_wish
from imagefactory.recipes.wish import Wish

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


def read(text: str, file: str = "train.def") -> Wish:
    return parse_wish(text, file, Reading(pythons=("3.11", "3.13"), beside=FILES.get))


def places(told: list[str]) -> list[str]:
    """Line and column of what is told."""
    return [":".join(line.split(":")[1:3]) for line in told]


def test_a_definition_is_taken_over() -> None:
    wish = read(TRAIN.replace("%notasection", "echo hello"))
    torch = ["torch==2.3.1", "torchvision", "torchaudio"]
    assert wish.pip == [*torch, "transformers", "librosa==0.10.1", "soundfile"]
    assert (wish.conda, wish.hints) == (["scipy"], ["cuda12.1"])
    assert wish.environment == {"LC_ALL": "C", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"}
    assert wish.labels == {"org.opencontainers.image.source": "https://git.example.org/x"}
    parts = wish.parts
    assert list(parts.debian) == ["git", "libsndfile1"]
    assert parts.entrypoint == ("/bin/sh", "-c", 'cd /opt; exec python "$@"', "runscript")
    assert [line.partition(" (")[0] for line in wish.left] == [
        "train.def:16:1: COPY env to '/env'",
        "train.def:17:1: COPY src to '/opt/src'",
        "train.def:26:5: 'cat > /opt/hello.sh <<EOF' is not run",
        "train.def:34:12: '/opt/bin' in PATH",
        "train.def:35:5: 'if true; then export X=1; fi' is not run",
        "train.def:42:1: %startscript is not taken",
        "train.def:48:1: %setup is not taken",
        "train.def:51:1: %appinstall is not taken",
    ]
    assert places(wish.notes) == ["2:7", "8:1", "11:1", "45:1", "2:7"]


def test_the_last_stage_counts_and_what_it_copies_from() -> None:
    wish = read(
        "Bootstrap: docker\nFrom: python:3.12\nStage: build\n%post\n  pip install built\n  make\n"
        "Bootstrap: docker\nFrom: golang\nStage: go\n%post\n  go build\n"
        "Bootstrap: docker\nFrom: node\nStage: web\n"
        "Bootstrap: docker\nFrom: python:3.11\nStage: final\n"
        "%files from build\n  /opt/venv /opt/venv\n%files from go\n  /bin/x\n%post\n  pip install torch==2.3.1\n"
    )
    assert (wish.pip, wish.python) == (["built", "torch==2.3.1"], "3.11")
    assert places(wish.left) == ["6:3", "20:1"]  # make, and the files of go
    assert places(wish.notes) == ["16:7", "18:1", "11:3", "12:12"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Bootstrap: yum\nMirrorURL: http://x\n", "1:12: Bootstrap 'yum' is not taken"),
        ("BootStrap: localimage\nFrom: a.sif\n", "1:12: Bootstrap 'localimage' 'a.sif' is not taken"),
        ("Bootstrap: docker\nFrom: x:{{ tag }}\n", "2:7: the base image 'x:{{ tag }}' is not known"),
        ("Bootstrap: docker\nFrom: nobody/knows:1\n", "what it holds is not known"),
    ],
)
def test_what_it_starts_from_is_told(text: str, said: str) -> None:
    (line,) = read(text).left
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("%post\n  pip install a\n", "train.def:1:1: '%post' stands before Bootstrap"),
        ("From: x\n", "train.def:1:1: 'From' stands before Bootstrap"),
        ("", "train.def:1:1: has no Bootstrap"),
        ("Bootstrap: docker\nwhat is this\n", "train.def:2:1: 'what is this' is no line of a header"),
        ("Bootstrap: docker\nFrom: x\n%post\n  pip install 'a\n", "train.def:4:15: a quote (') begins here"),
        ("Bootstrap: docker\n%post\n  cat <<X\na\n", "train.def:3:3: a here-document (<<X) does not end"),
        ("Bootstrap: docker\n" * 60, "one stage more than 50"),
        ("Bootstrap: docker\n\x07", "train.def:2:1: holds the character '\\x07'"),
    ],
)
def test_bad_files_are_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        read(text)
    assert said in raised.value.message


def test_it_is_known_by_its_content() -> None:
    assert read(
        "# ours\nbootstrap: docker\nfrom: python:3.11\n%post\npip install a\n", "Singularity"
    ).pip == ["a"]


@given(st.text(max_size=8), st.integers(0, len(TRAIN)), st.integers(0, 40))
def test_any_file_is_read_or_refused(piece: str, at: int, length: int) -> None:
    try:
        told = read(TRAIN[:at] + piece + TRAIN[at + length :]).left
    except RecipeError as error:
        told = [error.message]
    for line in told:
        assert line.isascii(), line
        assert line.replace("\n", "").isprintable(), line
