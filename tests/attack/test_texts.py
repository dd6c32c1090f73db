"""Texts that somebody else wrote: whatever they say, they are read or refused with words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import ImagefactoryError
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.lock.conda.file import parse_conda_lock
from imagefactory.lock.debian.archive import parse_deb822_sources, parse_sources_list
from imagefactory.lock.debian.lock import parse_base_lock
from imagefactory.lock.pypi.requirements import parse_lock
from imagefactory.recipes.bases import parse_bases
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.policy import TrustGrant, add_key, parse_trust
from tests.made.mutants import changed_text
from tests.made.verdicts import LAB

ROOT = Path(__file__).parents[2]
ENVIRONMENT = """\
name: mine
channels: [conda-forge, nodefaults]
dependencies:
  - python=3.11
  - pytorch=2.3.*=*cuda12*
  - numpy>=1.26,<2
  - pip
  - pip: [transformers==4.40.0, "einops>=0.7"]
"""
DOCKERFILE = """\
ARG V="2.3.1"
FROM pytorch/pytorch:${V}-cuda12.1-cudnn8-devel AS base
ENV A=1 B="$A$A"
COPY requirements.txt .
RUN apt-get update && apt-get install -y \\
    # for video
    ffmpeg || true
RUN pip install -r requirements.txt 'einops>=0.7' $(cat more)
RUN <<EOF
if [ -f x ]; then conda install -c conda-forge scipy; fi
EOF
FROM base
COPY --from=base /a /b
CMD ["python"]
"""
DEFINITION = """\
Bootstrap: docker
From: python:{{ v }}
%arguments
    v=3.11
%post
    pip install torch==2.3.1 "numpy<2"
    cat > /x <<END
hello
END
%environment
    export A=b
%runscript
    exec python "$@"
"""
REQUIREMENTS = """\
-i https://index.example.org/simple --trusted-host x
-r more.txt
-e .[train]
torch[opt] >= 2.0, <3 ; python_version >= "3.8"  # why
lab @ git+https://git.example.org/lab@v1#subdirectory=py
numpy @ file:///croot/numpy_1/work/numpy-1.26-py3-none-any.whl
"""
SETUP = """\
import os, sys
here = os.path.dirname(__file__)
with open(os.path.join(here, "r.txt")) as f:
    needs = [one.strip() for one in f]
V = "2.1"
needs += [f"torch=={V}", "x==%s" % V]
extras = {"a": needs, "b": ["c"]}
extras["all"] = sum(extras.values(), [])
setup(install_requires=needs, extras_require=extras, python_requires=">=3.9")
"""
PYPROJECT = """\
[build-system]
requires = ["x"]
[project]
name = "lab"
dependencies = ["torch>=2", "near", "y; extra == 'a'"]
optional-dependencies = {a = ["lab[b]"], b = ["c"]}
[dependency-groups]
dev = ["d", {include-group = "dev"}]
[tool.uv.sources]
near = [{path = "near", marker = "sys_platform == 'linux'"}, {workspace = true}]
"""
GRANT = TrustGrant(key=PublicKey(name="lab", raw=LAB.public), since=date(2026, 1, 1), until=date(2027, 1, 1))
SOURCES = "deb [signed-by=/usr/share/keyrings/a.gpg] https://deb.example.org/debian bookworm main contrib\n"
DEB822 = "Types: deb deb-src\nURIs: https://deb.example.org/debian\nSuites: bookworm\nComponents: main\n"


def texts(pattern: str) -> list[str]:
    found = sorted(ROOT.glob(pattern), key=lambda path: path.stat().st_size)
    assert found, pattern
    return [path.read_text(encoding="utf-8") for path in found[:2]]


NEAR = ReadOptions(pythons=("3.11",), beside=lambda _: "numpy\n", place=".", extras=("a",))
READ: dict[str, tuple[Callable[[str], object], list[str]]] = {
    "recipe": (lambda text: parse_recipe(text, "a.yaml"), texts("recipes/pytorch*.yaml")),
    "bases": (lambda text: parse_bases(text, "bases.yaml"), texts("recipes/bases.yaml")),
    "environment": (
        lambda text: parse_environment_file(text, "environment.yml", ReadOptions(pythons=("3.11",))),
        [ENVIRONMENT],
    ),
    "Dockerfile": (
        lambda text: parse_environment_file(
            text, "Dockerfile", ReadOptions(pythons=("3.11",), beside=lambda _: "numpy\n")
        ),
        [DOCKERFILE],
    ),
    "definition": (
        lambda text: parse_environment_file(text, "a.def", ReadOptions(pythons=("3.11",))),
        [DEFINITION],
    ),
    "requirements": (
        lambda text: parse_environment_file(text, "requirements.txt", replace(NEAR, extras=())),
        [REQUIREMENTS],
    ),
    "setup.py": (lambda text: parse_environment_file(text, "setup.py", NEAR), [SETUP]),
    "pyproject.toml": (lambda text: parse_environment_file(text, "pyproject.toml", NEAR), [PYPROJECT]),
    "lock": (lambda text: parse_lock(text, "a.requirements.txt"), texts("lockfiles/*.requirements.txt")),
    "conda lock": (lambda text: parse_conda_lock(text, "a.yml"), texts("lockfiles/*.conda-lock.yml")[:1]),
    "base lock": (lambda text: parse_base_lock(text, "a.lock"), texts("lockfiles/bases/*.lock")),
    "trust": (
        lambda text: parse_trust(text, "trust.yaml"),
        [add_key("", GRANT, "x") + "[policy]\nexpires-days = 30\n"],
    ),
    "apt": (parse_sources_list, [SOURCES]),
    "apt, deb822": (parse_deb822_sources, [DEB822]),
}


@pytest.mark.parametrize("kind", READ)
def test_what_nobody_changed_is_read(kind: str) -> None:
    read, samples = READ[kind]
    for text in samples:
        read(text)


@pytest.mark.parametrize("kind", READ)
@given(data=st.data())
def test_a_text_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    read, samples = READ[kind]
    text = data.draw(changed_text(data.draw(st.sampled_from(samples))))
    try:
        read(text)
    except ImagefactoryError as error:
        assert error.message
        assert "Traceback" not in error.message
