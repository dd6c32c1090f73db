"""Dockerfiles as people have them: what is taken of them, and that nothing else goes unsaid."""

# ruff: noqa: E501 -- files of others, and what is told of them, a line a line
from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import RecipeError, UsageError
from imagefactory.extras.importers.container import read_base_image
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.extras.importers.spec import EnvironmentSpec
from tests.made.diagnostics import reports

FILES = {
    "requirements.txt": "transformers==4.40.0\n-c bounds.txt\n",
    "bounds.txt": "tokenizers<0.20\n",
    "deps/more.txt": "tqdm\n-r base.txt\n",
    "deps/base.txt": "pyyaml\n",
    "environment.yml": "channels: [conda-forge]\ndependencies: [python=3.12, scipy, pip: [einops]]\n",
    "specs.txt": "# ours\nxarray >=2024\n",
    "pyproject.toml": "[project]\nname = 'm'\ndependencies = ['httpx']\noptional-dependencies = {viz = ['bokeh']}\n",
}


def read(text: str, file: str = "Dockerfile", files: Mapping[str, str] = FILES) -> EnvironmentSpec:
    return parse_environment_file(text, file, ReadOptions(pythons=("3.11", "3.13"), beside=files.get))


def run(*lines: str, base: str = "python:3.11") -> EnvironmentSpec:
    """What is read of a Dockerfile with such lines; what is told of the base image is left out."""
    spec = read("\n".join([f"FROM {base}", *lines]) + "\n")
    spec.lost = [line for line in spec.lost if "the base image '" not in line]
    spec.notes = [line for line in spec.notes if "the base image '" not in line]
    return spec


def places(messages: list[str]) -> list[str]:
    """Line and column of what is told."""
    return [":".join(line.split(":")[1:3]) for line in messages]


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
    spec = read(
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
    brought = ["torch==2.3.1", "torchvision", "torchaudio"]
    assert spec.pip == [*brought, "transformers==4.40.0", "lightning"]
    assert (spec.constraints, spec.hints) == (["tokenizers<0.20"], ["cuda12.1"])
    assert spec.environment == {"OMP_NUM_THREADS": "4"}
    assert spec.labels == {"org.opencontainers.image.source": "https://git.example.org/x", "maintainer": "me"}
    parts = spec.parts
    assert list(parts.debian) == ["git", "ffmpeg"]
    assert (parts.workdir, parts.user) == ("/workspace", "1000:1000")
    assert (parts.entrypoint, parts.command) == (("python",), ("train.py", "--fast"))
    assert [line.partition(" (")[0] for line in spec.lost] == [
        "Dockerfile:7:5: 'NAMES' is not a variable that a recipe may set",
        "Dockerfile:9:23: the version of ffmpeg=7:5",
        "Dockerfile:19:70: 'git+https://git.example.org/apex' may be other code tomorrow: it names no commit",
        "Dockerfile:20:1: COPY src to '/app'",
        "Dockerfile:20:1: COPY train.py to '/app'",
    ]
    assert places(spec.notes) == ["4:6", "8:5", "17:5", "19:70", "21:1", "4:6"]


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
    spec = run(
        "COPY environment.yml specs.txt /tmp/",
        "RUN conda config --add channels bioconda && conda install -n base -y -c conda-forge mamba",
        "RUN mamba env update -n lab -f /tmp/environment.yml && conda clean -afy",
        'SHELL ["conda", "run", "-n", "lab", "/bin/bash", "-c"]',
        "RUN micromamba install -yq -n lab -c pytorch 'pytorch>=2' pytorch-cuda=12.1 --file /tmp/specs.txt",
        base="continuumio/miniconda3",
    )
    assert spec.conda == ["scipy", "xarray >=2024", "pytorch >=2", "pytorch-cuda 12.1.*"]
    assert (spec.pip, spec.python) == (["einops"], "3.12.*")
    assert spec.channels == ["bioconda", "conda-forge", "pytorch"]
    assert [line for line in spec.lost if "defaults" not in line] == []
    assert "3:45" in places(spec.notes)  # mamba itself


@pytest.mark.parametrize(("options", "expected"), [("", True), ("--override-channels", False)])
def test_conda_asks_its_defaults_beside_the_channels_that_are_named(options: str, expected: bool) -> None:
    spec = run(f"RUN conda install {options} -c pytorch pytorch=2.3", base="debian:12")
    assert (spec.channels, spec.defaults) == (["pytorch"], expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "RUN pip install numpy<2",
            "2:17: numpy<2 without quotes: a shell takes '<2' for files",
        ),
        ("RUN pip install $(cat x)", "2:17: '$(cat x)' has a value that is known only to a shell"),
        ("RUN pip install -r /gone.txt", "2:20: '/gone.txt' is none of the files that are copied"),
        (
            "RUN pip install git+https://git.example.org/x",
            "2:17: 'git+https://git.example.org/x' may be other code tomorrow",
        ),
        ("RUN pip install --index-url https://i.example.org/mine a", "https://i.example.org/mine"),
        ("RUN pip install --user -e some_repo", "2:27: the project 'some_repo': its pyproject.toml is none"),
        ("RUN pip install some/repo", "the project 'some/repo': its pyproject.toml is none"),
        ("RUN pip install --foo a", "pip's option '--foo' is not read"),
        ("RUN if x; then pip install a; fi", "'if x; then pip install a; fi' is not run (only a shell knows"),
        ("RUN curl https://x.example.org | bash", "'curl https://x.example.org | bash' is not run"),
        ("RUN echo hi > /etc/motd", "'echo hi > /etc/motd' is not run"),
        ("RUN poetry install", "2:5: 'poetry install': pyproject.toml is none of the files that are copied"),
        ("RUN apk add --no-cache git", "'apk add --no-cache git' is not Debian's"),
        ("RUN apt-get purge -y git", "'apt-get purge -y git' is not run"),
        ("RUN <<EOF\n#!/usr/bin/env python\nprint()\nEOF", "is not run"),
        ("COPY <<EOF /etc/x\na\nEOF", "COPY '<<EOF /etc/x' writes a file"),
        ("COPY --from=ghcr.io/x/tool:1 /tool /bin/", "the content of that image is unknown"),
        ("ONBUILD RUN pip install a", "ONBUILD 'RUN pip install a'"),
        ("STOPSIGNAL SIGINT", "STOPSIGNAL 'SIGINT'"),
        ("FOO bar", "2:1: 'FOO bar' is not read"),
        ("ENV PATH=/x:$PATH", "'/x' in PATH"),
        ("ENV NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_DRIVER_CAPABILITIES='all' is set by imagefactory"),
        ("ENV TORCH_CUDA_ARCH_LIST=Quantum", "TORCH_CUDA_ARCH_LIST='Quantum'"),
        ("ENV XLA_FLAGS=--xla_gpu_cuda_data_dir=/usr/local/cuda", "names a directory of the base image"),
        ("RUN apt-get install -y git=1:2.30-1", "2:5: the version of git=1:2.30-1"),
        ("RUN apt-get install -y cuda-toolkit-12-1", "apt-get install cuda-toolkit-12-1"),
        (
            "RUN uv pip install --exclude-newer 2024-01-01 a",
            "--exclude-newer '2024-01-01' decides on versions",
        ),
        ("RUN uv sync", "2:5: 'uv sync': pyproject.toml is none of the files that are copied"),
        ("RUN pipenv install --system", "its Pipfile is not read"),
        ("ADD a.tar.gz /", "ADD unpacks 'a.tar.gz'"),
        ("ADD https://x.example.org/a /a", "comes from an address"),
        ("COPY ../a /a", "is outside of the build context"),
        ("ENV HF_TOKEN=hf_abc", "'HF_TOKEN' is a secret by its name"),
        ("CMD echo {x}", "CMD 'echo {x}'"),
        ('SHELL ["powershell"]', "'SHELL [\"powershell\"]' is not read"),
        ("COPY a", "COPY 'a' is not read"),
    ],
)
def test_what_is_not_taken_is_told(line: str, expected: str) -> None:
    spec = run(line)
    assert len(spec.lost) == 1
    assert expected in spec.lost[0]
    assert spec.lost[0].startswith("Dockerfile:2:")


@pytest.mark.parametrize(
    "line",
    [
        "HEALTHCHECK --interval=5s CMD true",
        "MAINTAINER me",
        "VOLUME /data",
        "EXPOSE 80",
        "LABEL Big=1",
        "LABEL org.opencontainers.image.licenses=no-such",
        "LABEL imagefactory.x=1",
        "ENV CUDA_HOME=/usr/local/cuda",
        "ENV LD_LIBRARY_PATH=/usr/local/cuda/lib64:/usr/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH}",
        "ENV PATH=/opt/conda/bin:/root/.local/bin:/app/.venv/bin:$PATH",
        "ENV CUDA_VERSION=12.1.0",
        "ENV NVIDIA_VISIBLE_DEVICES=all",
        'ENV TORCH_CUDA_ARCH_LIST=""',
        "ENV HF_TOKEN=",
        "ENV VIRTUAL_ENV=/opt/venv",
        "COPY --from=ghcr.io/x/uv:1 /uv /uvx /bin/",
        "RUN pip install -U pip setuptools",
        "RUN curl -LsSf https://astral.sh/uv/install.sh | sh",
        "RUN wget https://x.example.org/Miniconda3-latest-Linux-x86_64.sh",
        "RUN apt-get install -y python3-pip python3.11-venv",
        "RUN apt-get install -y libcudnn8",
        "RUN useradd -m -u 1000 me",
        "RUN pip install sentencepiece>=0.1.96",
    ],
)
def test_what_no_image_lacks_is_noted(line: str) -> None:
    spec = run(line)
    assert (spec.lost, spec.environment) == ([], {})
    assert len(spec.notes) == 1


def test_your_own_part_of_a_path_is_kept() -> None:
    spec = run(
        "ENV PYTHONPATH=/app:$PYTHONPATH LD_LIBRARY_PATH=/usr/local/cuda/lib64:/app/lib CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )
    assert spec.environment == {
        "PYTHONPATH": "/app",
        "LD_LIBRARY_PATH": "/app/lib",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert spec.lost == []


def test_capabilities_and_indexes_of_variables_are_read() -> None:
    spec = run(
        'ENV TORCH_CUDA_ARCH_LIST="9.0a Ampere;8.6+PTX"',
        "ENV PIP_EXTRA_INDEX_URL=https://i.example.org/whl/cu121 UV_PYTHON=3.12",
    )
    assert (spec.parts.capabilities, spec.hints, spec.python) == (("8.0", "8.6", "9.0"), ["/cu121"], "3.12")
    assert spec.environment == {}


def test_a_bound_without_quotes_is_told_of_its_own_package() -> None:
    spec = run("RUN pip install a sentencepiece>=0.1.96 b torch>=2,<3")
    assert spec.pip == ["a", "sentencepiece", "b", "torch"]
    assert places(spec.notes) == ["2:19"]
    assert "'>=0.1.96'" in spec.notes[0]
    assert places(spec.lost) == ["2:43"]
    assert run("RUN pip install a > log.txt 2>&1").lost == []


def test_what_was_installed_for_a_while_is_gone() -> None:
    spec = run("RUN apt-get install -y git gcc libgl1 && apt-get purge -y --auto-remove git gcc")
    assert (list(spec.parts.debian), spec.lost) == (["libgl1"], [])


def test_a_user_is_named_by_its_number() -> None:
    spec = run("ARG ID=1000", "RUN useradd --create-home --uid $ID -s /bin/bash me", "USER me:users")
    assert (spec.parts.user, spec.lost) == ("1000", [])


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "lines",
    [
        [f"RUN git clone https://git.example.org/x/ops && cd ops && git checkout {COMMIT} && pip install ."],
        ["RUN git clone --depth 1 https://git.example.org/x/ops.git /src/ops", "RUN pip install -e /src/ops"],
        [
            "WORKDIR /a",
            "RUN git clone https://git.example.org/x/ops",
            "RUN cd ops && python setup.py install",
        ],
        ["RUN git clone -b v1 https://git.example.org/x/ops /o && pip install /o/sub[gpu]"],
    ],
)
def test_a_clone_that_is_installed_is_one_request(lines: list[str]) -> None:
    spec = run(*lines)
    messages = [*spec.lost, *spec.pip]
    assert len(spec.lost) <= 1
    assert not any("is not run" in line for line in messages)
    assert len(spec.notes) == 1


def test_a_directory_that_is_made_is_missed_unless_something_else_makes_it() -> None:
    lines = ("RUN mkdir -p /app /data/out /tmp/x && mkdir ~/.cache", "WORKDIR /app/src")
    spec = run(*lines)
    assert [line.partition(" (")[0] for line in spec.lost] == ["Dockerfile:2:19: the directory '/data/out'"]


@pytest.mark.parametrize(
    "line",
    [
        "RUN echo 'conda activate x' >> ~/.bashrc",
        "RUN ln -sf /usr/bin/python3.11 /usr/bin/python && ln -s /usr/bin/pip3 /usr/bin/pip",
        "RUN add-apt-repository ppa:deadsnakes/ppa && apt-key del 7fa2af80",
        "RUN git config --global --add safe.directory '*'",
        "RUN echo 'deb x' > /etc/apt/sources.list.d/x.list",
    ],
)
def test_what_sets_up_the_base_image_is_passed_by(line: str) -> None:
    assert run(line).lost == []


def test_variables_in_paths_are_filled_in() -> None:
    spec = run("ENV DIR=/app/venv", 'ENV PATH="$DIR/bin:${PATH}" PYTHONPATH="${PYTHONPATH}:${DIR}/x"')
    assert (spec.lost, spec.environment) == ([], {"DIR": "/app/venv"})


def test_what_is_uninstalled_is_not_asked_for() -> None:
    spec = run(
        "RUN pip install a b && pip uninstall -y a torch", base="pytorch/pytorch:2.3.1-cuda12.1-cudnn8-devel"
    )
    assert (spec.pip, spec.lost) == (["b"], [])


def test_an_extra_that_only_a_shell_knows_is_a_loss() -> None:
    spec = run("COPY . .", "RUN uv sync --extra $WHICH")
    assert (spec.pip, len(spec.lost)) == (["httpx"], 2)  # and the copied files


def test_a_child_stage_has_the_arguments_of_its_parent() -> None:
    text = "ARG V=1\nFROM python:3.11 AS base\nARG V\nARG W=2\nFROM base\nRUN pip install a==$V b==$W\n"
    assert read(text).pip == ["a==1", "b==2"]


@pytest.mark.parametrize(
    ("base", "line", "number"),
    [
        ("python:3.11", "RUN useradd -m me", "1000"),
        ("ubuntu:24.04", "RUN adduser --disabled-password --gecos '' me", "1001"),
        ("python:3.11", "RUN useradd -r me", ""),
    ],
)
def test_a_user_without_a_number_gets_the_next(base: str, line: str, number: str) -> None:
    spec = run(line, "USER me", base=base)
    assert spec.parts.user == number
    assert bool(spec.lost) == (not number)


@pytest.mark.parametrize(
    ("base", "line", "python"),
    [
        ("nvidia/cuda:12.1.0-devel-ubuntu22.04", "RUN apt-get install -y python3 python3-pip", "3.10"),
        ("nvidia/cuda:12.1.0-devel-ubuntu22.04", "RUN apt-get install -y git", ""),
        ("nvidia/cuda:12.1.0-devel-ubuntu22.04", "RUN apt-get install -y python3.11-dev python3-pip", "3.11"),
        ("nvidia/cuda:12.1.0-devel-ubuntu22.04", "RUN uv venv --python 3.12 /venv", "3.12"),
        ("nvidia/cuda:12.1.0-devel-ubuntu22.04", "RUN uv pip install --python=python3.12 a", "3.12"),
        ("ubuntu:20.04", "RUN apt-get install -y python3", "3.8"),
        ("debian:bookworm-slim", "RUN apt-get install -y python3", "3.11"),
    ],
)
def test_the_python_that_it_installs_counts(base: str, line: str, python: str) -> None:
    assert run(line, base=base).python == python


@pytest.mark.parametrize(
    ("lines", "pip"),
    [
        (["WORKDIR /app", "COPY . .", "RUN uv sync --frozen --extra viz"], ["httpx", "bokeh"]),
        (["WORKDIR /app", "COPY . .", "RUN uv --quiet sync --no-dev"], ["httpx"]),
        (
            [
                "RUN --mount=type=bind,source=pyproject.toml,target=pyproject.toml uv sync --no-install-project",
                "COPY . /",
                "RUN uv sync",
            ],
            ["httpx"],
        ),
        (["COPY . /app", "RUN cd /app && poetry install --no-root -E viz --only main"], ["httpx", "bokeh"]),
        (["COPY . /app", "RUN uv sync --project /app --extra=viz"], ["httpx", "bokeh"]),
        (["COPY . .", "RUN pdm install --prod -G viz"], ["httpx", "bokeh"]),
        (["COPY . .", "RUN uv pip install --system -r pyproject.toml --extra viz"], ["httpx", "bokeh"]),
        (["COPY . .", "RUN uv add a 'b<2'"], ["a", "b<2"]),
    ],
)
def test_projects_are_followed_to_their_files(lines: list[str], pip: list[str]) -> None:
    assert run(*lines).pip == pip


def test_what_a_condition_sets_is_not_known() -> None:
    spec = run("RUN V=a; [ -f x ] && V=b; pip install $V")
    assert spec.pip == []
    assert [line.partition(" (")[0] for line in spec.lost] == [
        "Dockerfile:2:22: 'V=b' is not run",
        "Dockerfile:2:39: '$V' has a value that is known only to a shell",
    ]


def test_what_tidies_up_is_passed_by() -> None:
    spec = run(
        "RUN apt-get -qq update && apt-get clean && rm -rf /var/lib/apt/lists/* || true",
        "RUN conda init bash && . /opt/conda/etc/profile.d/conda.sh && conda activate x && conda clean -afy",
        "RUN python -m venv /opt/venv && echo done && pip cache purge && ldconfig",
    )
    assert spec.lost == []


def test_the_last_stage_and_what_it_stands_on_are_read() -> None:
    spec = read(
        "FROM python:3.12 AS Base\nARG X=1\nENV Y=2\nRUN pip install low==$X.0\n"
        "FROM python:3.11 AS builder\nRUN pip install built && make && apt-get install -y gcc\nCMD x\n"
        "FROM node AS web\nRUN npm ci\nFROM base AS test\nRUN pip install pytest\n"
        "FROM base\nRUN pip install high==$Y.0 none==$X\n"
        "COPY --from=builder /opt/venv /opt/venv\nCOPY --from=web /dist /www\n"
    )
    assert (spec.pip, spec.python) == (["low==1.0", "high==2.0", "none==1", "built"], "3.12")
    assert (spec.parts.debian, spec.parts.command) == ({}, ())
    assert [line.partition(" (")[0] for line in spec.lost] == [
        "Dockerfile:6:26: 'make' is not run",
        "Dockerfile:15:1: COPY --from=web '/dist'",
    ]
    assert places(spec.notes) == ["1:6", "14:1", "9:5", "10:6"]


def test_a_framework_above_replaces_the_one_below() -> None:
    spec = run(
        "RUN pip install torch==2.4.0 torchvision", base="pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime"
    )
    assert (spec.pip, spec.hints, spec.below) == (["torch==2.4.0", "torchvision"], [], "12.1")
    spec = run("RUN conda install pytorch=2.4", base="pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime")
    assert (spec.conda, spec.pip) == (["pytorch 2.4.*"], [])


@pytest.mark.parametrize("name", ["x.yml", "x.lock", "x"])
def test_no_file_reads_itself(name: str) -> None:
    text = f"FROM a\n# @EXPLICIT\nCOPY {name} /x/\n" + f"RUN conda env create -f /x/{name}\n" * 100
    with pytest.raises(RecipeError) as raised:
        read(text, files={name: text})
    assert raised.value.diagnostics[0].location.startswith(f"{name}:")


def test_files_are_read_a_few_times() -> None:
    spec = run("COPY environment.yml /", *["RUN conda env update -f /environment.yml"] * 30)
    assert spec.conda == ["scipy"] * 20
    assert sum("'/environment.yml' is none of the files" in line for line in spec.lost) == 10


def test_another_escape_and_other_line_ends() -> None:
    spec = read(
        "# escape=`\r\nFROM python:3.11\r\nRUN pip `\r\n  install a `\r\n  # no\r\n  b\r\nENV X=a\\b\r\n"
    )
    assert spec.pip == ["a", "b"]
    assert any("7:5: 'X' is not a variable" in line for line in spec.lost)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM x\nRUN pip install 'a\n", "Dockerfile:2:17 quote-unclosed"),
        ("FROM x\nENV A='b\n", "Dockerfile:2:7 quote-unclosed"),
        ("FROM x\nRUN <<EOF\npip install a\n", "Dockerfile:2:1 heredoc-unclosed"),
        ("RUN pip install a\n", "Dockerfile:1:1 text-before-base RUN"),
        ("", "Dockerfile:1:1 no-base-image"),
        ("# nothing\n", "1:1 no-base-image"),
        ("FROM\n", "Dockerfile:1:1 no-base-image"),
        ("FROM x:1@sha256:" + "1" * 64 + " # pinned\n", "Dockerfile:1:1 from-invalid"),
        ("FROM x AS y # named\n", "Dockerfile:1:1 from-invalid"),
        ("FROM x as\n", "Dockerfile:1:1 from-invalid"),
        ("FROM x\n&& y\n", "Dockerfile:2:1 line-invalid"),
        ("FROM x\nRUN a\x00b\n", "Dockerfile:2:6 hidden-character \\x00"),
        ("FROM x\n" + "RUN pip install a\n" * 20_000, "1:1 file-too-large 256"),
        (
            "FROM x\nENV A0=" + "a" * 40 + "\n" + "".join(f"ENV A{n + 1}=$A{n}$A{n}\n" for n in range(60)),
            "word-too-long 4096",
        ),
        (
            "".join(f"FROM x AS s{n}\nCOPY --from=s{n - 1} a b\n" for n in range(200)),
            "too-many-stages 50",
        ),
        ("FROM x\nRUN " + "(" * 9000, "too-many-commands 5000"),
    ],
)
def test_bad_files_are_refused_in_words(text: str, expected: str) -> None:
    with pytest.raises(RecipeError) as raised:
        read(text)
    assert reports(raised.value.diagnostics, expected), raised.value


@pytest.mark.parametrize("file", ["Dockerfile", "Containerfile", "gpu.Dockerfile", "Dockerfile.train", "any"])
def test_it_is_known_by_its_content(file: str) -> None:
    assert read("# x\n\nARG A=11\nfrom python:3.$A\nrun pip install a\n", file).pip == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        "from setuptools import setup, find_packages\nsetup()\n",
        "# ours\nfrom setuptools import (\n    setup,\n)\n",
        "from . import x\n",
        "arg = 1\n",
    ],
)
@pytest.mark.parametrize("file", ["setup", "notes"])
def test_a_python_file_is_not_a_dockerfile(text: str, file: str) -> None:
    with pytest.raises(RecipeError) as raised:
        read(text, file)
    assert raised.value.diagnostics[0].code not in ("line-invalid", "text-before-base", "no-base-image")


def test_a_setup_py_is_read_as_one() -> None:
    text = "from setuptools import setup\nsetup(name='x', install_requires=['a'])\n"
    assert read(text, "setup.py", files={"setup.py": text}).pip == ["a"]


@pytest.mark.parametrize(
    "first",
    [
        "FROM python:3.11",
        "from --platform=linux/amd64 python:3.11 as base",
        "ARG A\nFROM python:3.11",
        "ARG A='x y'\r\nFROM python:3.11",
        "FROM \\\n  python:3.11",
    ],
)
def test_a_dockerfile_of_any_name_is_known(first: str) -> None:
    assert read(f"{first}\nRUN pip install a\n", "image").pip == ["a"]


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
        messages = read("FROM x\n" + "".join(pieces)).lost
    except RecipeError as error:
        messages = [error.message]
    for line in messages:
        assert line.isascii(), line
        assert line.replace("\n", "").isprintable(), line


def test_build_arguments_that_a_person_gives_count_before_the_files_own() -> None:
    text = (
        "ARG PY=3.11\nFROM golang AS go\nARG GO=1\nFROM python:${PY}\nARG V=1.0\nARG W\n"
        "RUN pip install a==$V b==$W\n"
    )

    def build(**values: str) -> EnvironmentSpec:
        return parse_environment_file(text, "Dockerfile", ReadOptions(pythons=("3.11",), build_args=values))

    spec = build(PY="3.12", V="2.0", W="3", GO="2")
    assert (spec.python, spec.pip, spec.lost) == ("3.12", ["a==2.0", "b==3"], [])
    with pytest.raises(UsageError) as raised:
        build(VV="2.0")
    assert raised.value.code == "build-argument-unknown"
    assert "'VV'" in raised.value.message
