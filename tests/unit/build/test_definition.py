"""What rendered files say of a base that is pulled by digest."""

from __future__ import annotations

import io

import pytest
from dockerfile_parse import DockerfileParser

from imagefactory.build.definition import define, pyvenv_cfg, venv_links
from imagefactory.build.render import render_apptainer, render_dockerfile
from imagefactory.errors import RecipeError
from imagefactory.model import BuildSpec
from tests.made.diagnostics import reports
from tests.made.rendered import instructions
from tests.made.values import make_base, make_lock, make_target

DIGEST = "sha256:" + "0a" * 32
PLACE = f"docker.io/nvidia/cuda@{DIGEST}"


def pulled(**changes: object) -> BuildSpec:
    base = make_base(
        suite="", packages=(), image=f"docker.io/nvidia/cuda:12@{DIGEST}", public=PLACE, **changes
    )
    return define(make_target(), base, make_lock())


def test_the_dockerfile_stands_on_the_digest_and_installs_nothing() -> None:
    text = render_dockerfile(pulled())
    assert f"\nARG BASE={PLACE}\n" in text
    assert "apt-get" not in text
    assert "dpkg" not in text
    assert '"$(uname -m)" = x86_64' in text
    assert text.index("import ensurepip, venv") < text.index("FROM base AS build")
    assert "ensurepip" not in render_dockerfile(define(make_target(), make_base(), make_lock()))


def test_the_dockerfile_takes_back_what_the_base_says_of_itself() -> None:
    parser = DockerfileParser(fileobj=io.BytesIO(render_dockerfile(pulled()).encode()))
    parsed = [
        (row["instruction"], row["value"]) for row in parser.structure if row["instruction"] != "COMMENT"
    ]
    wanted = [(made.keyword, made.value) for made in instructions(pulled())]
    assert [keyword for keyword, _ in parsed] == [keyword for keyword, _ in wanted]
    assert parsed[2:5] == [("USER", "0"), ("WORKDIR", "/"), ("ENTRYPOINT", "[]")]
    keyword, value = parsed[5]
    assert (keyword, value) == wanted[5]
    assert value.startswith("PATH=/opt/env/bin:")
    assert value.endswith(":${PATH} PYTHONHOME= PYTHONPATH=")
    assert "PATH=" not in parsed[6][1]  # set again, it would lose the base's folders


def test_the_definition_file_keeps_the_bases_folders() -> None:
    text = render_apptainer(pulled())
    assert f"\nFrom: {PLACE}\n" in text
    environment = text.partition("%environment\n")[2].partition("%labels")[0]
    lines = [line.strip() for line in environment.splitlines()]
    assert lines.index('base_path="$PATH"') < lines.index('export PATH="$PATH:$base_path"')
    assert {"export PYTHONHOME=", "export PYTHONPATH="} < set(lines)
    assert "apt-get" not in text


def test_the_environment_leads_to_the_bases_interpreter() -> None:
    definition = pulled(interpreter="/usr/local/bin/python3.11")
    assert pyvenv_cfg(definition).splitlines()[::3] == [
        "home = /usr/local/bin",
        "executable = /usr/local/bin/python3.11",
    ]
    assert dict(venv_links(definition))["/opt/env/bin/python"] == "/usr/local/bin/python3.11"
    labels = dict(definition.labels)
    assert labels["org.opencontainers.image.base.name"] == f"docker.io/nvidia/cuda:12@{DIGEST}"


@pytest.mark.parametrize("interpreter", ["/opt/env/bin/python3.11", "/opt/env", "/python3.11"])
def test_an_interpreter_where_the_environment_goes_is_refused(interpreter: str) -> None:
    with pytest.raises(RecipeError) as caught:
        pulled(interpreter=interpreter)
    assert reports(caught.value.diagnostics, f"interpreter-not-allowed {interpreter}")


def test_an_image_for_cpus_knows_of_no_gpu() -> None:
    target = make_target(name="pytorch-2.3-cpu", cuda="none", capabilities=())
    made = define(target, make_base(), make_lock(target="pytorch-2.3-cpu"))
    environment = dict(made.environment)
    assert environment["PATH"] == "/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert not [name for name in environment if name.startswith(("NVIDIA_", "LD_", "TORCH_CUDA"))]
    assert dict(made.labels)["imagefactory.cuda"] == "none"
    for text in (render_dockerfile(made), render_apptainer(made)):
        assert "nvidia" not in text.lower()
        assert "torch 2.3.1 for CPUs and Python 3.11" in text


def test_an_image_for_amd_knows_of_no_nvidia() -> None:
    target = make_target(name="pytorch-2.9-rocm64", cuda="rocm6.4", capabilities=("gfx90a", "gfx942"))
    made = define(target, make_base(), make_lock(target="pytorch-2.9-rocm64"))
    environment = dict(made.environment)
    assert not [name for name in environment if name.startswith(("NVIDIA_", "LD_", "TORCH_CUDA"))]
    assert environment["PYTORCH_ROCM_ARCH"] == "gfx90a;gfx942"
    assert dict(made.labels)["imagefactory.cuda"] == "rocm6.4"
    for text in (render_dockerfile(made), render_apptainer(made)):
        assert "nvidia" not in text.lower()
        assert "torch 2.3.1 for ROCm 6.4 and Python 3.11" in text
