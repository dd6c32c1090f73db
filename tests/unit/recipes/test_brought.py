"""Files as people bring them, through the command: what `recipe import` takes, what it says, where it stops.

Every text is written for these tests; `shape` names the public file that writes so,
or says that none was looked up.
"""

# ruff: noqa: E501 -- files of others, a line a line
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.cli import main
from imagefactory.errors import RecipeError, UsageError
from imagefactory.extras.importers.draft import DraftRequest, draft
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.recipes.read import read_bases

FOLDER = Path(__file__).parents[3] / "recipes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`said` must stand in what the command says, `unsaid` must not; `code` is its exit code.

    `beside` are names and texts of files in the same folder.
    """

    shape: str
    file: str
    text: str
    asked: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    code: int = 0
    beside: tuple[tuple[str, str], ...] = ()


ENVIRONMENTS = (
    Case(
        shape="rapidsai/cuml conda/environments/all_cuda-133_arch-x86_64.yaml",
        file="environment.yml",
        text="channels: [rapidsai, conda-forge]\ndependencies:\n- cuda-version=12.9\n"
        "- cudf==26.10.*,>=0.0.0a0\n- pytorch>=2.7.0=cuda12*\n- python=3.12\n",
        asked=("--framework", "pytorch=2.7"),
        said=('"cudf 26.10.*,>=0.0.0a0"', "pytorch * cuda12*", 'cuda: ["12.9"]'),
        unsaid=("cannot be taken over",),
    ),
    Case(
        shape="quotes and a star behind ==, as an issue reported them without a file",
        file="environment.yml",
        text="channels: [pytorch, conda-forge]\ndependencies:\n- python='3.10'\n- pytorch=1.12.1\n"
        "- conda-forge::cudatoolkit==11.3.*\n",
        said=('python: "3.10"', 'cuda: ["11.3"]', "note: environment.yml:5:3: "),
        unsaid=("cannot be taken over",),
    ),
    Case(
        shape="conda/conda-lock docs/src_environment_yml.md",
        file="environment.yml",
        text="channels: [conda-forge]\ndependencies:\n- python=3.11  # [linux]\n- pytorch=2.5  # [not win]\n"
        "- libomp  # [osx or win]\n- cuda-version=12.6  # [linux64]\n- numpy  # [fast]\n",
        said=("'libomp' is not for linux-64", "note: environment.yml:7:3: the line is taken", "- numpy"),
        unsaid=("- libomp",),
    ),
    Case(
        shape='pip\'s manual, "Requirements File Format": files beside and above, projects, git, wheels, options',
        file="requirements.txt",
        text="--extra-index-url https://wheels.example.org/whl/cu121\n--pre\ntorch==2.3.1\n-r req/base.txt\n"
        "./pkg\n-e git+https://git.example.org/lab/tools.git@0123abc#egg=tools\n"
        "./wheels/lab_utils-1.0-py3-none-any.whl\nflash-attn==2.5.8 --no-build-isolation\n"
        "https://wheels.example.org/cu121/torchvision-0.18.1%2Bcu121-cp311-cp311-linux_x86_64.whl\n",
        beside=(
            ("req/base.txt", "-c ../bounds.txt\nscipy\n"),
            ("bounds.txt", "numpy<2\n-r more.txt\n"),
            ("more.txt", "pandas<3\n"),
            ("pkg/pyproject.toml", "[tool.ruff]\nline-length = 90\n"),
        ),
        said=(
            "CUDA 12.1 is read from it",
            "the option '--pre' is not taken over (write a bound",
            '- scipy - "./wheels/lab_utils-1.0-py3-none-any.whl" - flash-attn==2.5.8 - torchvision==0.18.1 constraints: - numpy<2 - pandas<3',
            "requirements.txt:5:1: the project './pkg' has no pyproject.toml",
            "requirements.txt:6:1: 'git+https://git.example.org/lab/tools.git@0123abc' has a shortened commit",
            "the option '--no-build-isolation'",
        ),
        unsaid=("- lab-utils", "- tools"),
    ),
    Case(
        shape="reyessanchezo/evGrandPrix-Simulator extras/environment_cross.py",
        file="environment.yml",
        text="channels: [conda-forge]\ndependencies: [python=3.11, 'pytorch[version=2.5]']\n",
        said=(
            "environment.yml:2:29: 'pytorch[version=2.5]' cannot be taken over",
            "error: environment.yml",
        ),
        code=2,
    ),
    Case(
        shape="three = and a v, as an issue reported them without a file",
        file="requirements.txt",
        text="torch===2.9.0\nxformers==v0.6.0\n",
        said=("- xformers==0.6.0", 'version: "2.9.0"'),
        unsaid=("cannot be taken over",),
    ),
    Case(
        shape="hevra01/readout_guidance env.yaml",
        file="env.yaml",
        text="channels: [pytorch, defaults]\ndependencies:\n- python=3.11\n- pip:\n"
        "  - torch==2.2.1+cu118\n  - fvcore==0.1.5.post20221221\n",
        said=(
            "env.yaml requires torch 2.2.1 for CUDA 11.8, but PyPI has it only for CUDA 12.1",
            "use the build on PyPI: --cuda 12.1; or ",
            "--source conda --framework pytorch=2.2.1 --cuda 11.8",
            'pytorch-cu118 = "',
        ),
        unsaid=("fvcore==0.1.5.post20221221' cannot",),
        code=2,
    ),
    Case(
        shape="the same, where the person obeys: PyPI's",
        file="requirements.txt",
        text="torch==2.2.1+cu118\nnvidia-cublas-cu11==11.11.3.6\neinops\n",
        asked=("--cuda", "12.1"),
        said=(
            'version: "2.2.1"',
            'cuda: ["12.1"]',
            "nvidia-cublas-cu11==11.11.3.6 is a library of another CUDA",
        ),
        unsaid=('- "nvidia', "- nvidia"),
    ),
    Case(
        shape="the same, where the person obeys: conda's",
        file="requirements.txt",
        text="torch==2.2.1+cu118\ntorchvision==0.17.1+cu118\neinops\n",
        asked=("--source", "conda", "--framework", "pytorch=2.2.1", "--cuda", "11.8"),
        said=(
            "source: conda",
            "framework: pytorch",
            "torchvision ==0.17.1",
            "pip: - einops",
            'cuda: ["11.8"]',
        ),
    ),
    Case(
        shape="2986002971/Compass CosyVoice/requirements.txt",
        file="requirements.txt",
        text="--extra-index-url https://wheels.example.org/whl/cu118\ntorch==2.0.1\nonnxruntime-gpu==1.16.0\n",
        said=("requires torch 2.0.1 for CUDA 11.8, but PyPI has it only for CUDA 11.7",),
        code=2,
    ),
    Case(
        shape="a target that has the build, in the shape of hevra01/readout_guidance env.yaml",
        file="requirements.txt",
        text="torch>=2.9,<3\n--extra-index-url https://wheels.example.org/whl/cu128\n",
        said=("does not set the version of torch", "--framework torch=VERSION --cuda 12.8"),
        code=2,
    ),
    Case(
        shape="Tobi2K/Moral-LLMs requirements.txt",
        file="requirements.txt",
        text="torch\ntransformers\n",
        said=("the version and the CUDA version of torch",),
        code=2,
    ),
    Case(
        shape="iamvigneshwars/NoStripesNet environment.yml",
        file="environment.yml",
        text="channels: [pytorch, conda-forge]\ndependencies: [python=3.12, 'pytorch>=2.5', pytorch-cuda=12.4]\n",
        said=("the version of pytorch", "--framework pytorch=VERSION --cuda 12.4"),
        code=2,
    ),
    Case(
        shape="whl/cpu, as CCRI-POPROX/poprox-recommender has an index for it",
        file="requirements.txt",
        text="--index-url https://wheels.example.org/whl/cpu\ntorch==2.3.1+cpu\n",
        said=("requires torch 2.3.1 without CUDA", "--cuda 12.1"),
        code=2,
    ),
    Case(
        shape="an index of PyTorch's builds for ROCm",
        file="requirements.txt",
        text="--extra-index-url https://wheels.example.org/whl/rocm6.4\ntorch==2.9.1\n",
        said=("requires torch for ROCm 6.4", "docs/platforms.md"),
        code=2,
    ),
    Case(
        shape="JAX with its plugin for ROCm",
        file="requirements.txt",
        text="jax[rocm7-local]==0.10.2\nflax\n",
        said=("requires jax for ROCm 7", "--cuda VERSION"),
        code=2,
    ),
    Case(
        shape="ACFHarbinger/Image-Toolkit env/conda.yml",
        file="conda.yml",
        text="channels:\n- defaults\n- https://conda.anaconda.org/nvidia\ndependencies:\n- python=3.11\n"
        "- pytorch=2.5\n- cuda-version=12.6\n",
        asked=("--framework", "torch"),
        said=(
            "note: conda.yml:2:3: ",
            "channels: [nvidia, conda-forge]",
            "framework: pytorch",
        ),
    ),
    Case(
        shape="NicholasCorrado/GePPO environment.yml",
        file="environment.yml",
        text="channels: [http://conda.anaconda.org/gurobi, defaults]\ndependencies: [pytorch=2.5, cuda-version=12.6]\n",
        said=("channels: [gurobi, conda-forge]",),
    ),
    Case(
        shape="IdahoLabUnsupported/gnn-network-anomaly-detection explicit_env.yml",
        file="environment.yml",
        text="channels: [nvidia, pytorch]\ndependencies:\n- conda-forge/linux-64::python==3.10.14=hd12c33a_0_cpython\n"
        "- pytorch/linux-64::pytorch==2.3.1=py3.10_cuda12.1_cudnn8.9.2_0\n- nvidia/noarch::cuda-version==12.5=3\n",
        said=('python: "3.10"', "nvidia::cuda-version ==12.5 3", 'cuda: ["12.1"]'),
        unsaid=("cannot be taken over",),
    ),
    Case(
        shape="files that name others beside them, written without a file at hand",
        file="gpu.txt",
        text="-r base.txt\n-c bounds.txt\n-r ../secret.txt\n-r base.txt\n--requirement=sub/more.txt\n",
        beside=(
            ("base.txt", "torch\nnumpy\n"),
            ("bounds.txt", "torch==2.3.1\nnumpy<2\n"),
            ("sub/more.txt", "-r deep.txt\n"),
            ("sub/deep.txt", "einops\n-r ../base.txt\n"),
        ),
        said=(
            'version: "2.3.1"',
            "packages: - numpy - einops constraints: - numpy<2",
            "'../secret.txt' is not there, or outside of the git work tree",
        ),
    ),
    Case(
        shape="pip's part of an environment, with a file beside it",
        file="environment.yml",
        text="dependencies:\n- python=3.11\n- pip:\n  - -r requirements.txt\n",
        beside=(("requirements.txt", "torch==2.5.1\n"),),
        said=("framework: torch", 'cuda: ["12.4"]'),
    ),
    Case(
        shape="conda list --export of conda's own documentation",
        file="package-list.txt",
        text="# This file may be used to create an environment using:\n"
        "# $ conda create --name <env> --file <this file>\n# platform: linux-64\n"
        "python=3.11.9=hb806964_0_cpython\npytorch=2.5.1=cuda126_py311h1_300\neinops=0.8.0=pypi_0\n",
        said=("framework: pytorch", 'cuda: ["12.6"]', "pip: - einops==0.8.0"),
    ),
)
PROJECTS = (
    Case(
        shape="2986002971/Compass CosyVoice/pixi.toml",
        file="pixi.toml",
        text='[project]\nname = "x"\nchannels = ["nvidia", "conda-forge", "pytorch"]\nplatforms = ["linux-64"]\n'
        '[tasks]\nrun = "python a.py"\n[dependencies]\npython = "3.11.*"\n'
        'pytorch = {version = "2.5.*", channel = "pytorch"}\npytorch-cuda = "12.4.*"\nffmpeg = "*"\n'
        '[pypi-dependencies]\neinops = ">=0.8"\nttsfrd = { path = "a.whl" }\n'
        '[target.osx-arm64.dependencies]\nlibomp = "*"\n[target.linux.dependencies]\nlibnuma = "*"\n'
        '[activation.env]\nOMP_NUM_THREADS = "4"\n',
        said=(
            "pixi.toml:14:1: 'a.whl' is a wheel of no index",
            "channels: [nvidia, conda-forge, pytorch]",
            'version: "2.5"',
            "- ffmpeg",
            "- libnuma",
            "- einops>=0.8",
            'OMP_NUM_THREADS: "4"',
        ),
        unsaid=("libomp",),
    ),
    Case(
        shape="218OSCAR/adaptive_compliance_policy pixi.toml",
        file="pixi.toml",
        text='[workspace]\nchannels = ["conda-forge"]\nplatforms = ["linux-64"]\n[dependencies]\npython = "3.11.*"\n'
        '[feature.train]\nchannels = ["nvidia"]\n[feature.train.dependencies]\npytorch-gpu = "2.7.*"\n'
        'cuda-version = "12.6.*"\n[environments]\ntrain = ["train"]\ndeploy = { features = ["deploy"] }\n',
        asked=("--environment", "train"),
        said=("framework: pytorch-gpu", "channels: [nvidia, conda-forge]", 'cuda: ["12.6"]'),
    ),
    Case(
        shape="218OSCAR/adaptive_compliance_policy pixi.toml, no environment said",
        file="pixi.toml",
        text='[workspace]\nchannels = ["conda-forge"]\n[dependencies]\npython = "3.11.*"\n'
        '[environments]\ntrain = ["train"]\n',
        said=(
            "the default environment was taken (--environment train takes another)",
            "error: pixi.toml",
        ),
        code=2,
    ),
    Case(
        shape="CCRI-POPROX/poprox-recommender pyproject.toml",
        file="pyproject.toml",
        text='[project]\nname = "x"\nrequires-python = ">=3.11"\ndependencies = [\n  "torch~=2.9.0",\n'
        '  "y @ git+https://git.example.org/y",\n  "pywin32; sys_platform == \'win32\'",\n]\n'
        '[project.optional-dependencies]\nlint = ["ruff"]\n[dependency-groups]\ntest = ["pytest"]\n'
        '[tool.uv.sources]\ntorch = [{ index = "pt", marker = "sys_platform == \'linux\'" }]\n'
        '[[tool.uv.index]]\nname = "pt"\nurl = "https://wheels.example.org/whl/cu128"\n',
        said=(
            "pyproject.toml:6:4: 'git+https://git.example.org/y' may be other code tomorrow",
            "does not set the version of torch",
        ),
        code=2,
    ),
    Case(
        shape="ardaaras99/transformer-from-scratch pyproject.toml",
        file="pyproject.toml",
        text='[tool.poetry]\nname = "x"\n[tool.poetry.dependencies]\npython = "^3.11"\ntorch = "2.5.1"\n'
        'datasets = "^2.15.0"\nzero = "^0.3"\nmore = {version = "~1.2", extras = ["a"]}\nboth = "^1.0 || ^2.0"\n'
        'near = {path = "../near"}\nfast = {version = "^1", optional = true}\n'
        '[tool.poetry.group.dev.dependencies]\nblack = "^23.11.0"\n',
        said=(
            'version: "2.5.1"',
            "datasets<3,>=2.15.0",
            "zero<0.4,>=0.3",
            '"more[a]<1.3,>=1.2"',
            "'both' '^1.0 || ^2.0' cannot be taken over",
            "the project '../near' has no pyproject.toml",
            "optional, not taken: dev (--group NAME)",
        ),
    ),
    Case(
        shape="bounds on Python that no terminal should see, written without a file at hand",
        file="pyproject.toml",
        text='[project]\nrequires-python = ">=3.11\\u001b[2J"\ndependencies = ["torch==2.5.1"]\n',
        said=("pyproject.toml:1:1: '>=3.11\\x1b[2J' is not a valid Python version", 'python: "3.11"'),
        unsaid=("\x1b",),
    ),
    Case(
        shape="FSadrieh/BERTchen pyproject.toml",
        file="pyproject.toml",
        text="[tool.ruff]\nline-length = 100\n",
        said=("lists no packages",),
        code=2,
    ),
)
LOCKS = (
    Case(
        shape="CCRI-POPROX/poprox-recommender uv.lock",
        file="uv.lock",
        text='version = 1\nrevision = 3\nrequires-python = ">=3.11"\n'
        '[[package]]\nname = "own"\nversion = "0.1"\nsource = { virtual = "." }\ndependencies = [\n'
        '  { name = "torch", version = "2.9.1", marker = "sys_platform == \'darwin\'" },\n'
        '  { name = "torch", version = "2.9.1+cu128", marker = "sys_platform != \'darwin\'" },\n'
        '  { name = "jinja2", extra = ["i18n"] },\n  { name = "near" },\n]\n'
        '[package.dev-dependencies]\ndev = [{ name = "pytest" }]\n'
        '[[package]]\nname = "torch"\nversion = "2.9.1"\nsource = { registry = "https://index.example.org/simple" }\n'
        '[[package]]\nname = "torch"\nversion = "2.9.1+cu128"\n'
        'source = { registry = "https://wheels.example.org/whl/cu128" }\n'
        'dependencies = [{ name = "sympy" }, { name = "colorama", marker = "sys_platform == \'win32\'" }]\n'
        '[[package]]\nname = "jinja2"\nversion = "3.1.4"\nsource = { registry = "https://index.example.org/simple" }\n'
        '[package.optional-dependencies]\ni18n = [{ name = "babel" }]\n'
        '[[package]]\nname = "near"\nversion = "1"\nsource = { git = "https://git.example.org/near" }\n'
        + "".join(
            f'[[package]]\nname = "{name}"\nversion = "1.0"\nsource = {{ registry = "https://index.example.org/simple" }}\n'
            for name in ("babel", "sympy", "colorama", "pytest")
        ),
        said=(
            "optional, not taken: dev (--group NAME)",
            "uv.lock:31:1: 'git+https://git.example.org/near' may be other code tomorrow",
            'version: "2.9.1"',
            'cuda: ["12.8"]',
            "packages: - babel==1.0 - jinja2==3.1.4 - sympy==1.0",
        ),
        unsaid=(
            "colorama",
            "pytest==",
        ),
    ),
    Case(
        shape="ardaaras99/transformer-from-scratch poetry.lock",
        file="poetry.lock",
        text='[[package]]\nname = "colorama"\nversion = "0.4.6"\noptional = false\n'
        '[[package]]\nname = "click"\nversion = "8.1.7"\noptional = false\n[package.dependencies]\n'
        'colorama = {version = "*", markers = "platform_system == \\"Windows\\""}\n'
        '[[package]]\nname = "torch"\nversion = "2.5.1"\noptional = false\n[package.dependencies]\nsympy = "*"\n'
        '[[package]]\nname = "sympy"\nversion = "1.12"\noptional = false\n'
        '[[package]]\nname = "extra"\nversion = "1"\noptional = true\n'
        '[metadata]\nlock-version = "2.0"\npython-versions = "^3.11"\n',
        said=(
            "'colorama' 0.4.6 is not for Python 3.11",
            "packages: - click==8.1.7 - sympy==1.12",
            'cuda: ["12.4"]',
        ),
    ),
    Case(
        shape="groups and markers as Poetry 2 writes them, without a file at hand",
        file="poetry.lock",
        text='[[package]]\nname = "torch"\nversion = "2.5.1+cu118"\noptional = false\ngroups = ["main"]\n'
        '[package.source]\ntype = "legacy"\nurl = "https://wheels.example.org/whl/cu118"\n'
        '[[package]]\nname = "pytest"\nversion = "8"\noptional = false\ngroups = ["dev"]\n'
        '[[package]]\nname = "pywin32"\nversion = "306"\noptional = false\ngroups = ["main"]\n'
        'markers = "sys_platform == \'win32\'"\n[metadata]\npython-versions = ">=3.11,<4.0"\n',
        said=("requires torch 2.5.1 for CUDA 11.8",),
        code=2,
    ),
    Case(
        shape="conda/rattler crates/rattler_lock, its lock of version 7 with conda-path",
        file="pixi.lock",
        text="version: 7\nplatforms:\n- name: linux-64-gpu\n  subdir: linux-64\n  virtual-packages: ['__cuda=12']\n"
        "- name: win-64\nenvironments:\n  default:\n    channels:\n    - url: https://conda.anaconda.org/conda-forge/\n"
        "    packages:\n      linux-64-gpu:\n"
        "      - conda: https://conda.anaconda.org/conda-forge/linux-64/python-3.12.7-hc5c86c4_0_cpython.conda\n"
        "      - conda: https://conda.anaconda.org/conda-forge/linux-64/pytorch-2.5.1-cuda126_py312h1_300.conda\n"
        "      - conda_source: 'own[ac2e8eb3] @ ../own'\n"
        "      - pypi: https://index.example.org/einops-0.8.0-py3-none-any.whl\n"
        "      win-64: []\npackages:\n- pypi: https://index.example.org/einops-0.8.0-py3-none-any.whl\n"
        "  name: einops\n  version: 0.8.0\n",
        said=("'own[ac2e8eb3] @ ../own' is made from sources", "- einops==0.8.0", 'cuda: ["12.6"]'),
    ),
    Case(
        shape="FSadrieh/BERTchen conda-lock.yml",
        file="conda-lock.yml",
        text="version: 1\nmetadata:\n  channels:\n  - {url: conda-forge}\n  - {url: defaults}\n  platforms: [linux-64]\npackage:\n"
        "- {name: pytorch, version: 2.3.1, manager: conda, platform: linux-64, url: 'https://conda.anaconda.org/"
        "pytorch/linux-64/pytorch-2.3.1-py3.11_cuda12.1_cudnn8.9.2_0.tar.bz2'}\n"
        "- {name: rich, version: 13.7.1, manager: pip, platform: linux-64, url: 'https://index.example.org/noarch/a.whl'}\n",
        said=(
            "packages come from pytorch too, which the heading does not name",
            "channels: [conda-forge, pytorch]",
        ),
        unsaid=("noarch",),
    ),
    Case(
        shape="a build for the CPU in a lock, as conda/conda-lock issues tell of them",
        file="conda-lock.yml",
        text="version: 1\nmetadata:\n  channels: [{url: conda-forge}]\npackage:\n"
        "- {name: pytorch, version: 2.3.1, manager: conda, platform: linux-64, url: 'https://conda.anaconda.org/"
        "conda-forge/linux-64/pytorch-2.3.1-cpu_generic_py311h1_0.conda'}\n",
        said=("requires pytorch 2.3.1 without CUDA",),
        code=2,
    ),
    Case(
        shape="IdahoLabUnsupported/gnn-network-anomaly-detection explicit.txt",
        file="explicit.txt",
        text="# $ conda create --name <env> --file <this file>\n# platform: linux-64\n@EXPLICIT\n"
        "https://conda.anaconda.org/conda-forge/noarch/tzdata-2024b-hc8b5060_0.tar.bz2#0a1b\n"
        "https://conda.anaconda.org/pytorch/linux-64/pytorch-2.3.1-py3.10_cuda12.1_cudnn8.9.2_0.tar.bz2\n"
        "https://conda.anaconda.org/conda-forge/linux-64/python-3.10.14-hd12c33a_0_cpython.conda#0a1b\n"
        "# pip einops @ https://index.example.org/einops-0.8.0-py3-none-any.whl#sha256=00\n",
        said=("channels: [conda-forge, pytorch]", 'python: "3.10"', 'cuda: ["12.1"]', "- einops==0.8.0"),
    ),
    Case(
        shape="the same for another platform",
        file="explicit.txt",
        text="@EXPLICIT\nhttps://conda.anaconda.org/conda-forge/osx-arm64/pytorch-2.3.1-cpu_0.conda\n",
        said=("has packages for osx-arm64", "linux-64"),
        code=2,
    ),
)


CONTAINERS = (
    Case(
        shape="a PyTorch image of Docker Hub with requirements beside, as its page shows",
        file="Dockerfile",
        text='FROM pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime\nLABEL maintainer="It\'s me"\n'
        "RUN apt-get update && apt-get install -y ffmpeg && rm -rf /var/lib/apt/lists/*\n"
        "COPY requirements.txt .\nRUN pip install -r requirements.txt\nENV OMP_NUM_THREADS=4\n"
        'COPY train.py /app/\nCMD ["python", "/app/train.py"]\n',
        beside=(("requirements.txt", "transformers==4.40.0\n"),),
        said=(
            "Dockerfile:1:6: the base image 'pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime' was read as torch 2.3.1, CUDA 12.1",
            "system: - ffmpeg ",
            "Dockerfile:7:1: COPY train.py to '/app' is not in the build context",
            'command: ["python", "/app/train.py"]',
            "maintainer: 'It''s me'",
            'OMP_NUM_THREADS: "4"',
            "packages: - torchvision - torchaudio - transformers==4.40.0",
            'version: "2.3.1"',
            'cuda: ["12.1"]',
        ),
        unsaid=("COPY requirements.txt",),
    ),
    Case(
        shape="a TensorFlow image of Docker Hub: its tag says no CUDA, PyPI does",
        file="Dockerfile",
        text="FROM tensorflow/tensorflow:2.15.0-gpu\nRUN python3 -m pip install 'pandas>=2,<3'\n",
        said=(
            "framework: tensorflow",
            'version: "2.15.0" cuda: ["12.2"] extras: [and-cuda]',
            '- "pandas<3,>=2"',
        ),
    ),
    Case(
        shape="jax on nvidia/cuda: the wheel's CUDA counts",
        file="gpu.Dockerfile",
        text="FROM nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04\nARG JAX=0.4.30\n"
        'RUN apt-get install -y python3.11\nRUN pip install -U "jax[cuda12]==${JAX}" flax\n',
        said=(
            "CUDA 11.8 of the base image: jax 0.4.30 brings CUDA 12 itself",
            'python: "3.11"',
            'version: "0.4.30" cuda: ["12"] extras: [cuda12]',
        ),
    ),
    Case(
        shape="conda with an environment beside, as micromamba-docker's documentation has it",
        file="Dockerfile",
        text="FROM mambaorg/micromamba:1.5.8\nCOPY --chown=$MAMBA_USER:$MAMBA_USER env.yaml /tmp/env.yaml\n"
        "RUN micromamba install -y -n base -f /tmp/env.yaml && micromamba clean --all --yes\n",
        beside=(
            (
                "env.yaml",
                "channels: [conda-forge]\ndependencies: [python=3.11, pytorch=2.5, cuda-version=12.6]\n",
            ),
        ),
        said=("source: conda", "channels: [conda-forge]", 'version: "2.5"', 'cuda: ["12.6"]'),
        unsaid=("COPY env.yaml",),
    ),
    Case(
        shape="a framework without CUDA, from its own index",
        file="Dockerfile",
        text="FROM python:3.11\nRUN pip install torch==2.3.1 --index-url https://wheels.example.org/whl/cpu\n",
        said=("Dockerfile requires torch 2.3.1 without CUDA",),
        code=2,
    ),
    Case(
        shape="an image whose tag names a month: the person says the rest",
        file="Dockerfile",
        text="FROM nvcr.io/nvidia/pytorch:24.05-py3\nRUN pip install einops\n",
        said=("it contains NVIDIA's build of the framework", "does not set the version"),
        code=2,
    ),
    Case(
        shape="the same, where the person obeys",
        file="Dockerfile",
        text="FROM nvcr.io/nvidia/pytorch:24.05-py3\nRUN pip install einops\n",
        asked=("--framework", "torch=2.3", "--cuda", "12.1"),
        said=("- einops", 'version: "2.3"'),
    ),
    Case(
        shape='apptainer\'s user guide, "Definition Files"',
        file="train.def",
        text="Bootstrap: docker\nFrom: pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime\n%post\n    pip install einops\n"
        '%environment\n    export LC_ALL=C\n%runscript\n    exec python "$@"\n',
        said=(
            "- einops",
            'LC_ALL: "C"',
            'entrypoint: ["/bin/sh", "-c", "exec python \\"$@\\"", "runscript"]',
        ),
    ),
    Case(
        shape="on a target",
        file="Dockerfile",
        text="FROM pytorch/pytorch:2.3.1-cuda12.1-cudnn8-runtime\nRUN pip install einops\n",
        asked=("--extends", "pytorch-2.3-cu121"),
        said=("on: pytorch-2.3-cu121", "pytorch-2.3-cu121 brings torch 2.3", "- einops"),
    ),
    Case(
        shape="a quote without its end",
        file="Dockerfile",
        text="FROM python:3.11\nRUN pip install 'torch==2.3.1\n",
        said=("error: Dockerfile:2:17: a quote (') ",),
        code=2,
    ),
    Case(
        shape="--environment says nothing of a Dockerfile",
        file="Dockerfile",
        text="FROM python:3.11\n",
        asked=("--environment", "gpu"),
        said=("has no environments to choose from",),
        code=2,
    ),
)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("case", [*ENVIRONMENTS, *PROJECTS, *LOCKS, *CONTAINERS], ids=lambda case: case.shape)
def test_what_people_bring(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name in ("bases.yaml", "pytorch.yaml", "pytorch-conda.yaml"):
        (recipes / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "imagefactory.toml").touch()
    source = tmp_path / case.file
    for name, text in ((case.file, case.text), *case.beside):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "-C",
                str(tmp_path),
                "recipe",
                "import",
                str(source),
                "--family",
                "lab",
                "--dry-run",
                "--partial",
                *case.asked,
            ]
        )
    heard = capsys.readouterr()
    told = " ".join(f"{heard.out} {heard.err}".split())
    assert int(ended.value.code or 0) == case.code, told
    for text in case.said:
        assert text in told
    for text in case.unsaid:
        assert text not in told


@given(
    case=st.sampled_from([*PROJECTS, *LOCKS, *CONTAINERS]),
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 12), st.text(max_size=6)),
        min_size=1,
        max_size=4,
    ),
)
def test_near_valid_files_make_drafts_or_errors(case: Case, edits: list[tuple[float, int, str]]) -> None:
    """Whatever stands in them, what is told is plain text."""
    text = case.text
    for position, length, piece in edits:
        at = int(position * len(text))
        text = text[:at] + piece + text[at + length :]
    try:
        spec = parse_environment_file(text, case.file, ReadOptions(pythons=("3.11", "3.13")))
        told = draft(spec, DraftRequest(family="lab"), read_bases(FOLDER)).messages
    except (RecipeError, UsageError) as error:
        told = (error.message,)
    for line in told:
        assert line.isascii(), line
        assert line.replace("\n", "").isprintable(), line
