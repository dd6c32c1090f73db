"""Dockerfiles as people have them: what is taken of them, and that nothing else goes unsaid."""

# ruff: noqa: E501 -- files of others, and what is told of them, a line a line
from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import RecipeError
from imagefactory.recipes.base_images import read_base_image
from imagefactory.recipes.environments import Reading, parse_wish
from imagefactory.recipes.wish import Wish

FILES = {
    "requirements.txt": "transformers==4.40.0\n-c bounds.txt\n",
    "bounds.txt": "tokenizers<0.20\n",
    "deps/more.txt": "tqdm\n-r base.txt\n",
    "deps/base.txt": "pyyaml\n",
    "environment.yml": "channels: [conda-forge]\ndependencies: [python=3.12, scipy, pip: [einops]]\n",
    "specs.txt": "# ours\nxarray >=2024\n",
    "pyproject.toml": "[project]\nname = 'm'\ndependencies = ['httpx']\noptional-dependencies = {viz = ['bokeh']}\n",
}


def read(text: str, file: str = "Dockerfile", files: Mapping[str, str] = FILES) -> Wish:
    return parse_wish(text, file, Reading(pythons=("3.11", "3.13"), beside=files.get))


def run(*lines: str, base: str = "python:3.11") -> Wish:
    """What is read of a Dockerfile with such lines; what is told of the base image is left out."""
    wish = read("\n".join([f"FROM {base}", *lines]) + "\n")
    wish.left = [line for line in wish.left if "the base image" not in line]
    return wish


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime", "torch 2.3.1, CUDA 12.1"),
        ("docker.io/pytorch/pytorch:2.3.1-cuda12.1-cudnn8-devel@sha256:00", "torch 2.3.1, CUDA 12.1"),
        ("pytorch/pytorch", "torch"),
        ("tensorflow/tensorflow:2.15.0-gpu-jupyter", "tensorflow 2.15.0"),
        ("tensorflow/tensorflow:latest-gpu", "tensorflow"),
        ("nvidia/cuda:12.4.1-cudnn-devel-ubuntu22.04", "CUDA 12.4"),
        ("nvcr.io/nvidia/cuda:11.8.0-base-ubuntu20.04", "CUDA 11.8"),
        ("nvcr.io/nvidia/pytorch:24.05-py3", "torch"),
        ("python:3.11-slim", "Python 3.11"),
        ("docker.io/library/python:3.12.4-slim-bookworm", "Python 3.12"),
        ("public.ecr.aws/docker/library/python:3.10", "Python 3.10"),
        ("continuumio/miniconda3:24.1.2-0", "conda"),
        ("rapidsai/base:24.04-cuda12.0-py3.11", "CUDA 12.0, Python 3.11, conda"),
        ("ubuntu:22.04", ""),
        ("localhost:5000/lab/thing:1-cuda12.1-py3.10", "CUDA 12.1, Python 3.10"),
        ("", ""),
        ("\n:/@", ""),
    ],
)
def test_well_known_images_tell_what_they_hold(image: str, expected: str) -> None:
    assert str(read_base_image(image)) == expected


def test_a_training_image_is_taken_over() -> None:
    wish = read(
        "# syntax=docker/dockerfile:1.4\n"
        'ARG PYTORCH="2.3.1"\nARG CUDA="12.1"\n'
        "FROM pytorch/pytorch:${PYTORCH}-cuda${CUDA}-cudnn8-devel\n"
        'LABEL org.opencontainers.image.source="https://git.example.org/x" maintainer=me\n'
        "ENV OMP_NUM_THREADS=4 \\\n    NAMES='a b'\n"
        "ENV LD_LIBRARY_PATH=/usr/local/cuda/lib64:$LD_LIBRARY_PATH\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends \\\n"
        "    git \\\n    # for video\n\n    ffmpeg=7:5 \\\n  && rm -rf /var/lib/apt/lists/*\n"
        "WORKDIR /workspace\nCOPY requirements.txt .\n"
        "RUN pip install --no-cache-dir -U pip && \\\n    pip3 install -r requirements.txt lightning\n"
        "RUN git clone https://git.example.org/apex && cd apex && pip install .\n"
        "COPY src/ train.py /app/\nEXPOSE 6006\nUSER 1000:1000\n"
        'CMD ["a"]\nENTRYPOINT ["python"]\nCMD ["train.py", "--fast"]\n'
    )
    assert wish.pip == ["torch==2.3.1", "transformers==4.40.0", "lightning"]
    assert (wish.constraints, wish.hints) == (["tokenizers<0.20"], ["cuda12.1"])
    assert wish.environment == {"OMP_NUM_THREADS": "4"}
    assert wish.labels == {"org.opencontainers.image.source": "https://git.example.org/x", "maintainer": "me"}
    parts = wish.parts
    assert parts.debian == ["git", "ffmpeg"]
    assert (parts.workdir, parts.user) == ("/workspace", "1000:1000")
    assert (parts.entrypoint, parts.command) == (("python",), ("train.py", "--fast"))
    assert [line.partition(" (")[0] for line in wish.left] == [
        "Dockerfile:4:6: the base image 'pytorch/pytorch:2.3.1-cuda12.1-cudnn8-devel' was read as torch 2.3.1, CUDA 12.1",
        "Dockerfile:7:5: 'NAMES' is no variable that a recipe may set",
        "Dockerfile:8:5: 'LD_LIBRARY_PATH' is made of what the image below or a shell sets: '/usr/local/cuda/lib64:$LD_LIBRARY_PATH'",
        "Dockerfile:17:5: pip: images are made without them",
        "Dockerfile:19:5: 'git clone https://git.example.org/apex' is not run",
        "Dockerfile:19:70: the project '.' has no pyproject.toml that lies beside this file and is copied",
        "Dockerfile:20:1: COPY src/ train.py to '/app/'",
        "Dockerfile:21:1: EXPOSE '6006'",
    ]


@pytest.mark.parametrize(
    ("lines", "pip"),
    [
        (["RUN pip install torch==2.3.1 'numpy<2'"], ["torch==2.3.1", "numpy<2"]),
        (["RUN python3.11 -m pip install --quiet -U a"], ["a"]),
        (["RUN PIP_NO_CACHE_DIR=1 sudo -H /opt/conda/bin/pip3.11 install a"], ["a"]),
        (["RUN set -ex; uv pip install --system --no-cache a"], ["a"]),
        (['RUN ["pip", "install", "a"]'], ["a"]),
        (['RUN ["/bin/bash", "-c", "pip install a && pip install b"]'], ["a", "b"]),
        (["RUN bash -lc 'pip install a'"], ["a"]),
        (["RUN <<EOF", "set -e", "pip install a \\", "  b", "EOF", "RUN pip install c"], ["a", "b", "c"]),
        (["RUN bash <<'EOF'", "pip install a", "EOF"], ["a"]),
        (["ARG V=1.0", "RUN pip install a==$V b==${W:-2}"], ["a==1.0", "b==2"]),
        (["ENV MORE='a b'", "RUN X=c && pip install $MORE $X"], ["a", "b", "c"]),
        (["RUN conda run -n lab --no-capture-output pip install a"], ["a"]),
        (["RUN pip install a || true"], ["a"]),
        (["COPY deps /deps", "RUN pip install -r /deps/more.txt"], ["tqdm", "pyyaml"]),
        (["WORKDIR /a", "COPY . b/", "RUN cd b/deps && pip install -rmore.txt"], ["tqdm", "pyyaml"]),
        (["COPY deps/*.txt /r/", "RUN pip install --requirement=/r/base.txt"], ["pyyaml"]),
        (["ADD deps/base.txt /r.txt", "RUN pip install -r /r.txt"], ["pyyaml"]),
        (
            [
                "RUN --mount=type=cache,target=/c --mount=type=bind,source=deps/base.txt,target=r.txt \\",
                " pip install -r r.txt",
            ],
            ["pyyaml"],
        ),
        (["WORKDIR /app", "COPY . .", "RUN pip install -e .[viz]"], ["httpx", "bokeh"]),
        (["COPY pyproject.toml /src/", "RUN pip install /src"], ["httpx"]),
    ],
)
def test_pip_s_packages_are_found(lines: list[str], pip: list[str]) -> None:
    assert run(*lines).pip == pip


def test_conda_s_packages_are_found() -> None:
    wish = run(
        "COPY environment.yml specs.txt /tmp/",
        "RUN conda config --add channels bioconda && conda install -n base -y -c conda-forge mamba",
        "RUN mamba env update -n lab -f /tmp/environment.yml && conda clean -afy",
        'SHELL ["conda", "run", "-n", "lab", "/bin/bash", "-c"]',
        "RUN micromamba install -yq -n lab -c pytorch 'pytorch>=2' pytorch-cuda=12.1 --file /tmp/specs.txt",
        base="continuumio/miniconda3",
    )
    assert wish.conda == ["scipy", "xarray >=2024", "pytorch >=2", "pytorch-cuda 12.1.*"]
    assert (wish.pip, wish.python) == (["einops"], "3.12.*")
    assert wish.channels == ["bioconda", "conda-forge", "pytorch"]
    assert [line.partition(" (")[0] for line in wish.left] == [
        "Dockerfile:2:1: COPY environment.yml specs.txt to '/tmp/'",
        "Dockerfile:3:45: mamba: images are made without them",
    ]
    assert [line.partition(": ")[0] for line in wish.notes] == ["Dockerfile:1:6"]


@pytest.mark.parametrize(("options", "expected"), [("", True), ("--override-channels", False)])
def test_conda_asks_its_defaults_beside_the_channels_that_are_named(options: str, expected: bool) -> None:
    wish = run(f"RUN conda install {options} -c pytorch pytorch=2.3", base="debian:12")
    assert (wish.channels, wish.defaults) == (["pytorch"], expected)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "RUN pip install numpy<2",
            "2:5: '<2' without quotes is a file to a shell (write 'numpy<2' in quotes",
        ),
        ("RUN pip install $(cat x)", "2:17: '$(cat x)' holds what only a shell knows"),
        ("RUN pip install -r /gone.txt", "2:20: '/gone.txt' is none of the files that lie beside it"),
        (
            "RUN pip install git+https://git.example.org/x",
            "2:17: 'git+https://git.example.org/x' cannot be taken over",
        ),
        ("RUN pip install --index-url https://i.example.org/whl/cu121 a", "CUDA 12.1 was read from it"),
        ("RUN pip install --user -e some_repo", "2:27: the project 'some_repo' has no pyproject.toml"),
        ("RUN pip install some/repo", "the project 'some/repo' has no pyproject.toml"),
        ("RUN pip install --foo a", "pip's option '--foo' is not read"),
        ("RUN pip uninstall -y a", "'pip uninstall -y a' is not run"),
        ("RUN if x; then pip install a; fi", "'if x; then pip install a; fi' is not run (only a shell knows"),
        ("RUN curl https://x.example.org | bash", "'curl https://x.example.org | bash' is not run"),
        ("RUN echo hi > /etc/motd", "'echo hi > /etc/motd' is not run"),
        ("RUN poetry install", "(import the project's lock or its pyproject.toml: --from FILE)"),
        ("RUN apk add --no-cache git", "'apk add --no-cache git' is not Debian's"),
        ("RUN apt-get purge -y git", "'apt-get purge -y git' is not run"),
        ("RUN <<EOF\n#!/usr/bin/env python\nprint()\nEOF", "is not run"),
        ("COPY <<EOF /etc/x\na\nEOF", "COPY '<<EOF /etc/x' writes a file"),
        ("COPY --from=ghcr.io/x/uv:1 /uv /bin/", "what that image holds is not known"),
        ("ONBUILD RUN pip install a", "ONBUILD 'RUN pip install a'"),
        ("HEALTHCHECK --interval=5s CMD true", "HEALTHCHECK '--interval=5s CMD true'"),
        ("MAINTAINER me", "MAINTAINER 'me'"),
        ("VOLUME /data", "VOLUME '/data'"),
        ("FOO bar", "2:1: 'FOO bar' is not read"),
        ("LABEL Big=1", "the label 'Big' is none that a recipe may set"),
        (
            "LABEL org.opencontainers.image.licenses=no-such",
            "the label 'org.opencontainers.image.licenses' is none",
        ),
        ("LABEL imagefactory.x=1", "the label 'imagefactory.x' is set by the factory"),
        ("ENV PATH=/x:$PATH", "'PATH' is set by the factory"),
        ("ENV HF_TOKEN=hf_abc", "'HF_TOKEN' is a secret by its name"),
        ("CMD echo {x}", "CMD 'echo {x}'"),
        ('SHELL ["powershell"]', "'SHELL [\"powershell\"]' is not read"),
        ("COPY a", "COPY 'a' is not read"),
    ],
)
def test_what_is_not_taken_is_told(line: str, said: str) -> None:
    wish = run(line)
    assert len(wish.left) == 1
    assert said in wish.left[0]
    assert wish.left[0].startswith("Dockerfile:2:")


def test_what_a_condition_sets_is_not_known() -> None:
    wish = run("RUN V=a; [ -f x ] && V=b; pip install $V")
    assert wish.pip == []
    assert [line.partition(" (")[0] for line in wish.left] == [
        "Dockerfile:2:22: 'V=b' is not run",
        "Dockerfile:2:39: '$V' holds what only a shell knows",
    ]


def test_what_tidies_up_is_passed_by() -> None:
    wish = run(
        "RUN apt-get -qq update && apt-get clean && rm -rf /var/lib/apt/lists/* || true",
        "RUN conda init bash && . /opt/conda/etc/profile.d/conda.sh && conda activate x && conda clean -afy",
        "RUN python -m venv /opt/venv && echo done && pip cache purge && ldconfig",
    )
    assert wish.left == []


def test_the_last_stage_and_what_it_stands_on_are_read() -> None:
    wish = read(
        "FROM python:3.12 AS Base\nARG X=1\nENV Y=2\nRUN pip install low==$X.0\n"
        "FROM python:3.11 AS builder\nRUN pip install built && make && apt-get install -y gcc\nCMD x\n"
        "FROM node AS web\nRUN npm ci\nFROM base AS test\nRUN pip install pytest\n"
        "FROM base\nRUN pip install high==$Y.0 none==$X\n"
        "COPY --from=builder /opt/venv /opt/venv\nCOPY --from=web /dist /www\n"
    )
    assert (wish.pip, wish.python) == (["low==1.0", "high==2.0", "built"], "3.12")
    assert (wish.parts.debian, wish.parts.command) == ([], ())
    assert [line.partition(" (")[0] for line in wish.left[1:]] == [
        "Dockerfile:13:28: 'none==$X' holds what only a shell knows",
        "Dockerfile:14:1: the packages of the stage 'builder' were taken, since files are copied from it",
        "Dockerfile:15:1: 'COPY --from=web /dist /www'",
        "Dockerfile:10:6: the stage 'test' is not part of the last one",
    ]


def test_a_framework_above_replaces_the_one_below() -> None:
    wish = run(
        "RUN pip install torch==2.4.0 torchvision", base="pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime"
    )
    assert (wish.pip, wish.hints, wish.below) == (["torch==2.4.0", "torchvision"], [], "12.1")
    wish = run("RUN conda install pytorch=2.4", base="pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime")
    assert (wish.conda, wish.pip) == (["pytorch 2.4.*"], [])


@pytest.mark.parametrize("name", ["x.yml", "x.lock", "x"])
def test_no_file_reads_itself(name: str) -> None:
    text = f"FROM a\n# @EXPLICIT\nCOPY {name} /x/\n" + f"RUN conda env create -f /x/{name}\n" * 100
    with pytest.raises(RecipeError) as raised:
        read(text, files={name: text})
    assert raised.value.message.startswith(f"{name}:")


def test_files_are_read_a_few_times() -> None:
    wish = run("COPY environment.yml /", *["RUN conda env update -f /environment.yml"] * 30)
    assert wish.conda == ["scipy"] * 20
    assert sum("'/environment.yml' is none of the files" in line for line in wish.left) == 10


def test_another_escape_and_other_line_ends() -> None:
    wish = read(
        "# escape=`\r\nFROM python:3.11\r\nRUN pip `\r\n  install a `\r\n  # no\r\n  b\r\nENV X=a\\b\r\n"
    )
    assert wish.pip == ["a", "b"]
    assert any("7:5: 'X' is no variable" in line for line in wish.left)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM x\nRUN pip install 'a\n", "Dockerfile:2:17: a quote (') begins here and does not end"),
        ("FROM x\nENV A='b\n", "Dockerfile:2:7: a quote"),
        ("FROM x\nRUN <<EOF\npip install a\n", "Dockerfile:2:1: a here-document (<<EOF) does not end"),
        ("RUN pip install a\n", "Dockerfile:1:1: 'RUN' stands before FROM"),
        ("", "Dockerfile:1:1: has no FROM"),
        ("# nothing\n", "has no FROM"),
        ("FROM\n", "Dockerfile:1:1: FROM names no image"),
        ("FROM x\n&& y\n", "Dockerfile:2:1: '&& y' begins no instruction"),
        ("FROM x\nRUN a\x00b\n", "Dockerfile:2:6: holds the character '\\x00'"),
        ("FROM x\n" + "RUN pip install a\n" * 20_000, "is larger than 256 kB"),
        (
            "FROM x\nENV A0=" + "a" * 40 + "\n" + "".join(f"ENV A{n + 1}=$A{n}$A{n}\n" for n in range(60)),
            "more than 4096 characters",
        ),
        (
            "".join(f"FROM x AS s{n}\nCOPY --from=s{n - 1} a b\n" for n in range(200)),
            "one stage more than 50",
        ),
        ("FROM x\nRUN " + "(" * 9000, "more than 5000 commands"),
    ],
)
def test_bad_files_are_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        read(text)
    assert said in raised.value.message


@pytest.mark.parametrize("file", ["Dockerfile", "Containerfile", "gpu.Dockerfile", "Dockerfile.train", "any"])
def test_it_is_known_by_its_content(file: str) -> None:
    assert read("# x\n\nARG A=11\nfrom python:3.$A\nrun pip install a\n", file).pip == ["a"]


PIECES = (
    "FROM x AS a\n",
    "RUN ",
    "pip install ",
    "<<EOF\n",
    "EOF\n",
    "COPY --from=a ",
    "ENV A=",
    "$A",
    "\\\n",
    "'",
    '"',
    "&& ",
    " b",
    "\n",
    "[",
    "{",
    "#",
    "conda install -c ",
    "apt-get install ",
)


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_file_is_read_or_refused(pieces: list[str]) -> None:
    try:
        told = read("FROM x\n" + "".join(pieces)).left
    except RecipeError as error:
        told = [error.message]
    for line in told:
        assert line.isascii(), line
        assert line.replace("\n", "").isprintable(), line
