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
_MONTH = "its tag names a month: NVIDIA's release notes say which version it holds"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """`framework` as PyPI has it. `channels` are those that its conda asks, `told` what a person must know.

    `known` is False where the name of the image says nothing of its content.
    """

    framework: str = ""
    version: str = ""
    cuda: str = ""
    python: str = ""
    channels: tuple[str, ...] = ()
    told: str = ""
    known: bool = True

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
    told: str = ""


_PLAIN = _Row()
_FORGE = ("conda-forge",)
# By repository, without the registry of docker and its "library".
_ROWS: Mapping[str, _Row] = {
    "pytorch/pytorch": _Row(
        tag=rf"^{_RELEASE}-{_CUDA}",
        framework="torch",
        told="it brings torchvision and torchaudio too: add those that are needed",
    ),
    "anibali/pytorch": _Row(tag=rf"^{_RELEASE}-{_CUDA}", framework="torch"),
    "tensorflow/tensorflow": _Row(tag=rf"^{_RELEASE}", framework="tensorflow"),
    "huggingface/transformers-pytorch-gpu": _Row(
        framework="torch", told="it brings transformers too: add it"
    ),
    "nvcr.io/nvidia/pytorch": _Row(framework="torch", told=_MONTH),
    "nvcr.io/nvidia/tensorflow": _Row(framework="tensorflow", told=_MONTH),
    "nvcr.io/nvidia/jax": _Row(framework="jax", told=_MONTH),
    "ghcr.io/nvidia/jax": _Row(framework="jax"),
    "nvidia/cuda": _Row(tag=r"^(?P<cuda>[0-9]{2}\.[0-9])"),
    "python": _Row(tag=rf"^{_PYTHON}"),
    "continuumio/miniconda3": _Row(channels=("defaults",)),
    "continuumio/anaconda3": _Row(
        channels=("defaults",),
        told="the packages of Anaconda's distribution are not taken: add those that are needed",
    ),
    "condaforge/miniforge3": _Row(channels=_FORGE),
    "condaforge/mambaforge": _Row(channels=_FORGE),
    "mambaorg/micromamba": _Row(channels=_FORGE),
    "rapidsai/base": _Row(tag=rf"{_CUDA}-py{_PYTHON}", channels=("rapidsai", "conda-forge")),
    "quay.io/jupyter/pytorch-notebook": _Row(
        tag="^cuda(?P<cuda>[0-9]{2})", framework="torch", channels=_FORGE
    ),
    "quay.io/jupyter/tensorflow-notebook": _Row(framework="tensorflow", channels=_FORGE),
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
        return BaseImage(cuda=cuda, python=python, known=False)
    at = re.search(row.tag, tag)
    said = {key: value or "" for key, value in (at.groupdict() if at else {}).items()}
    return BaseImage(
        framework=row.framework,
        version=said.get("version", ""),
        cuda=said.get("cuda", ""),
        python=said.get("python", ""),
        channels=row.channels,
        told=row.told,
    )
