"""What the name of a well-known image tells: Python, CUDA, a framework. No registry is asked.

Sources are the images' own pages: their tags name versions by the patterns below. What else an image holds
its name does not tell, and nobody guesses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_RELEASE = r"(?P<version>[0-9]+\.[0-9]+(\.[0-9]+)?)"
_CUDA = r"cuda-?(?P<cuda>[0-9]{2}\.[0-9])"
_PYTHON = r"(?P<python>3\.[0-9]{1,2})"
_NVIDIA = "it holds NVIDIA's own build of the framework, and more, which no index has"
# The Python that a distribution calls python3. Sources: packages.ubuntu.com, packages.debian.org.
_PYTHONS = {
    **{"18.04": "3.6", "20.04": "3.8", "22.04": "3.10", "24.04": "3.12", "bionic": "3.6", "focal": "3.8"},
    **{
        "jammy": "3.10",
        "noble": "3.12",
        "buster": "3.7",
        "bullseye": "3.9",
        "bookworm": "3.11",
        "trixie": "3.13",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """`framework` as PyPI has it, `packages` are others that it brings, `channels` those that its
    conda asks.

    `lost` is what it holds and no recipe can keep. `known` is False where the name of the image says nothing
    of its content. `system_python` is the one that its distribution calls python3.
    """

    framework: str = ""
    version: str = ""
    cuda: str = ""
    python: str = ""
    channels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    lost: str = ""
    known: bool = True
    system_python: str = ""

    def __str__(self) -> str:
        words = (
            f"{self.framework} {self.version}".strip(),
            f"CUDA {self.cuda}" if self.cuda else "",
            f"Python {self.python}" if self.python else "",
            "conda" if self.channels else "",
        )
        return ", ".join(filter(None, words))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """`tag` is searched for in the tag, by names of BaseImage's fields."""

    tag: str = "$"
    framework: str = ""
    channels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    lost: str = ""


_PLAIN = _Row()
_FORGE = ("conda-forge",)
_JUPYTER = "it holds JupyterLab and the packages of a notebook server"
# By repository, without the registry of docker and its "library".
_ROWS: Mapping[str, _Row] = {
    "pytorch/pytorch": _Row(
        tag=rf"^{_RELEASE}-{_CUDA}",
        framework="torch",
        packages=("torchvision", "torchaudio"),
    ),
    "anibali/pytorch": _Row(tag=rf"^{_RELEASE}-{_CUDA}", framework="torch"),
    "tensorflow/tensorflow": _Row(tag=rf"^{_RELEASE}", framework="tensorflow"),
    "huggingface/transformers-pytorch-gpu": _Row(framework="torch", packages=("transformers",)),
    "nvcr.io/nvidia/pytorch": _Row(framework="torch", lost=_NVIDIA),
    "nvcr.io/nvidia/tensorflow": _Row(framework="tensorflow", lost=_NVIDIA),
    "nvcr.io/nvidia/jax": _Row(framework="jax", lost=_NVIDIA),
    "ghcr.io/nvidia/jax": _Row(framework="jax"),
    "nvidia/cuda": _Row(tag=r"^(?P<cuda>[0-9]{2}\.[0-9])"),
    "python": _Row(tag=rf"^{_PYTHON}"),
    "continuumio/miniconda3": _Row(channels=("defaults",)),
    "continuumio/anaconda3": _Row(
        channels=("defaults",),
        lost="it holds the packages of Anaconda's distribution",
    ),
    "condaforge/miniforge3": _Row(channels=_FORGE),
    "condaforge/mambaforge": _Row(channels=_FORGE),
    "mambaorg/micromamba": _Row(channels=_FORGE),
    "rapidsai/base": _Row(
        tag=rf"{_CUDA}-py{_PYTHON}", channels=("rapidsai", "conda-forge"), lost="it holds RAPIDS"
    ),
    "quay.io/jupyter/pytorch-notebook": _Row(
        tag="^cuda(?P<cuda>[0-9]{2})", framework="torch", channels=_FORGE, lost=_JUPYTER
    ),
    "quay.io/jupyter/tensorflow-notebook": _Row(framework="tensorflow", channels=_FORGE, lost=_JUPYTER),
    "runpod/pytorch": _Row(
        tag=rf"^{_RELEASE}-py{_PYTHON}-{_CUDA}", framework="torch", packages=("torchvision", "torchaudio")
    ),
    "ghcr.io/astral-sh/uv": _Row(tag=rf"python{_PYTHON}"),
    **dict.fromkeys(("ubuntu", "debian", "buildpack-deps", "scratch"), _PLAIN),
}


def read_base_image(name: str) -> BaseImage:
    """What is known of an image by its name."""
    plain = re.sub(r"^[a-z-]+://|@sha256:[0-9a-f]*$", "", name)
    plain = re.sub(r"^(index\.|registry-1\.)?docker\.io/|^public\.ecr\.aws/docker/(?=library/)", "", plain)
    repository, tag = re.fullmatch(r"(.*?)(?::([^:/]*))?", plain, re.DOTALL).groups("")  # type: ignore[union-attr]
    repository = repository.removeprefix("library/")
    if repository == "nvcr.io/nvidia/cuda":
        repository = "nvidia/cuda"
    row = _ROWS.get(repository)
    if row is None:
        found = {
            key: re.search(pattern, tag)
            for key, pattern in (("cuda", _CUDA), ("python", f"py(thon)?-?{_PYTHON}"))
        }
        cuda, python = (one[key] if (one := found[key]) else "" for key in ("cuda", "python"))
        return BaseImage(cuda=cuda, python=python, known=False, system_python=_system_python(repository, tag))
    at = re.search(row.tag, tag)
    said = {key: value or "" for key, value in (at.groupdict() if at else {}).items()}
    return BaseImage(
        framework=row.framework,
        version=said.get("version", ""),
        cuda=said.get("cuda", ""),
        python=said.get("python", ""),
        channels=row.channels,
        packages=row.packages,
        lost=row.lost,
        system_python=_system_python(repository, tag),
    )


def _system_python(repository: str, tag: str) -> str:
    release = "^([0-9]{2}\\.[0-9]{2})" if repository == "ubuntu" else "ubuntu-?([0-9]{2}\\.[0-9]{2})"
    found = re.search(release, tag) or re.search(rf"(?:^|-)({'|'.join(_PYTHONS)})(?:-|$)", tag)
    return _PYTHONS.get(found[1], "") if found else ""
