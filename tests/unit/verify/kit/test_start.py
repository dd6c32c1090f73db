"""Commands that a kit starts: what is said of those that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.verify.kit.program import Stop
from imagefactory.verify.kit.start import (
    Kit,
    apptainer_argv,
    choose_runner,
    fabric_options,
    nodes_environment,
    run_or_stop,
)


@pytest.mark.parametrize(
    ("said", "login"),
    [
        ("Error response from daemon: denied", True),
        ("FATAL: ... GET https://ghcr.io/token: UNAUTHORIZED: authentication required", True),
        ("unexpected status code 403", True),
        ("no space left on device", False),
        ("manifest unknown", False),
        ("dial tcp 127.0.0.1:4010: connection refused", False),
    ],
)
def test_a_pull_that_a_registry_refuses_says_how_to_be_let_in(said: str, login: bool) -> None:
    with pytest.raises(Stop) as caught:
        run_or_stop(["sh", "-c", 'echo first; echo "$1" >&2; exit 1', "sh", said], {"PATH": "/usr/bin:/bin"})
    told = str(caught.value)
    assert said in told
    assert ("docker login" in told) == login


def kit_of(level: str) -> Kit:
    words: list[object] = ["" for _ in Kit._fields]
    kit = Kit(*words)  # type: ignore[arg-type]
    return kit._replace(level=level, argv=("python",), sif=False)


def test_only_on_several_nodes_an_image_has_the_network_and_its_devices(tmp_path: Path) -> None:
    def argv(level: str) -> list[str]:
        return apptainer_argv(kit_of(level), "apptainer", "x.sif", tmp_path, 1000)

    assert "--net" in argv("several")
    assert "--net" not in argv("nodes")
    assert "--containall" in argv("nodes")
    for name in ("infiniband", "cxi0", "cxi_x", "null"):
        (tmp_path / name).touch()
    paths = [str(tmp_path / name) for name in ("cxi0", "infiniband")]
    environ = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "hsn0", "IMAGEFACTORY_MEETING": "{}", "HOME": "/"}
    inside = {"APPTAINERENV_NCCL_SOCKET_IFNAME": "hsn0", "APPTAINERENV_IMAGEFACTORY_MEETING": "{}"}
    assert nodes_environment(environ) == inside
    assert fabric_options(str(tmp_path)) == ["--bind", paths[0], "--bind", paths[1]]


@pytest.mark.parametrize("name", ["docker", "podman", "pyxis", ""])
def test_only_apptainer_runs_images_on_several_nodes(name: str) -> None:
    with pytest.raises(Stop) as caught:
        choose_runner(name, kit_of("nodes"), {"PATH": "/nowhere"}, keep=False)
    assert "several nodes" in str(caught.value)
