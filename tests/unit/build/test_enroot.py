"""The files of a .sqsh that have the contents of an image's config."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from imagefactory.build.sif import enroot_files
from tests.made.errors import fails


def test_the_command_starts_in_its_directory_after_the_entrypoint(tmp_path: Path) -> None:
    workdir = tmp_path / "a b"
    config = {
        "Env": ["PATH=/usr/bin", "EMPTY=", "WORDS=a 'b' $HOME"],
        "Entrypoint": ["/bin/sh", "-c", 'pwd; printf "%s|" "$0" "$@"', "it's"],
        "Cmd": ["default"],
        "WorkingDir": str(workdir),
        "Volumes": {"/data": {}},
        "Labels": {"a\nexit 3": "b\nexit 3"},
    }
    files = enroot_files(config, "pytorch@sha256:0")
    assert files["etc/environment"].splitlines() == config["Env"]
    assert shlex.split(files["etc/fstab"])[:3] == ["${ENROOT_ROOTFS}/data", "/data", "none"]
    script = tmp_path / "rc"
    script.write_text(files["etc/rc"])
    for words, expected in (([], "default"), (["x y", "z"], "x y|z")):
        done = subprocess.run(["/bin/sh", script, *words], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"{workdir}\nit's|{expected}|"), done.stderr


@pytest.mark.parametrize(
    "config",
    [{"Env": ["A=a\nB=b"]}, {"Env": ["A=${HOME}/x"]}, {"Volumes": {"/a b": {}}}, {"Volumes": {"x": {}}}],
)
def test_what_enroot_would_change_stops(config: dict[str, object]) -> None:
    with fails("enroot-unsupported"):
        enroot_files(config, "pytorch@sha256:0")
