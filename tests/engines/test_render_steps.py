"""Both rendered files are really built, on a Debian base made here, from an index on this machine.

Needs root, mmdebstrap with a Debian mirror, and podman (its builder runs in a chroot: no daemon, no
cgroups). apptainer itself is not needed: its %post runs in a chroot as apptainer would run it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import io
import json
import re
import shutil
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.definition import define, pyvenv_cfg, venv_links
from imagefactory.build.folders import render, write_definitions
from imagefactory.build.render import render_apptainer
from imagefactory.build.steps import SITE
from imagefactory.lock.pypi.requirements import format_lock
from imagefactory.model import BuildSpec, LockedWheel, SourceLocation
from tests.made.values import make_base, make_lock, make_target
from tests.services.children import stdout_of

WHERE = SourceLocation(file="recipes/tiny.yaml", line=1, column=1)
WHEELS = {
    "tiny": {
        "tiny/__init__.py": "import other\n\n\ndef main():\n    print('tiny runs')\n",
        "tiny/template.py": "{{ this is no Python }}\n",
        "tiny-1.0.3.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    },
    "other": {"other.py": "VALUE = 7\n"},
}


def make_wheel(name: str, version: str, files: dict[str, str]) -> bytes:
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        for path, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(text)}\n")
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join([*rows, f"{info}/RECORD,,\n"]))
    return buffer.getvalue()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="steps-"))  # short: podman takes 50 characters at most
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def made(scratch: Path) -> Iterator[tuple[BuildSpec, str]]:
    """The definition of a target of two small packages, and the address of an index that has them."""
    simple = scratch / "index" / "simple"
    wheels = []
    for name, files in sorted(WHEELS.items()):
        data = make_wheel(name, "1.0.3", files)
        file = f"{name}-1.0.3-py3-none-any.whl"
        (simple / name).mkdir(parents=True)
        (simple / name / file).write_bytes(data)
        (simple / name / "index.html").write_text(f'<a href="{file}">{file}</a>')
        sha256 = hashlib.sha256(data).hexdigest()
        wheels.append(LockedWheel(name=name, version="1.0.3", filename=file, sha256=sha256, size=len(data)))
    target = make_target(
        name="tiny-1.0-cu121",
        family="tiny",
        description="Two small packages",
        framework="tiny",
        version="1.0",
        checks=(),
        requirements=("tiny==1.0.*",),
        environment=(("TINY_WORDS", 'it\'s $HOME, "really" \\ so'),),
        where=WHERE,
    )
    base = make_base(packages=("python3", "python3-venv", "tini"), where=WHERE)
    lock = make_lock(target=target.name, wheels=tuple(wheels))
    handler = functools.partial(QuietHandler, directory=str(scratch / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield define(target, base, lock), f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.fixture(scope="module")
def root(made: tuple[BuildSpec, str], debian_tar: Path, scratch: Path) -> Path:
    """The base after %post, as apptainer would leave it."""
    definition, index = made
    root = scratch / "root"
    root.mkdir()
    run("tar", "--extract", "--file", str(debian_tar), "--directory", str(root))

    # As `apptainer build --bind FOLDER:/mnt` shows it.
    (root / SITE.lstrip("/") / "pip.conf").write_text(pip_conf(index))

    # The wrong Python and a wrong hash are refused, before anything is built on them.
    wrong_python = replace(definition.base, python="3.13")
    other = replace(definition, base=wrong_python, target=replace(definition.target, python="3.13"))
    refused = in_root(root, section(other, "post"))
    assert refused.returncode == 1
    assert "this lock is for Python 3.13, but the base has no /usr/bin/python3.13" in refused.stderr
    text = format_lock(definition.lock)
    wrong = re.sub(r"(--hash=sha256:)[0-9a-f]{4}", r"\1beef", text)
    (root / "opt/requirements.txt").write_text(wrong)
    refused = in_root(root, section(definition, "post"))
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    shutil.rmtree(root / "opt")
    (root / "opt").mkdir()

    (root / "opt/requirements.txt").write_text(text)
    done = in_root(root, section(definition, "post"))
    assert done.returncode == 0, done.stdout + done.stderr
    (root / SITE.lstrip("/") / "pip.conf").unlink()
    return root


def run(*command: str) -> str:
    return stdout_of(command)


def pip_conf(index: str) -> str:
    return f"[global]\nindex-url = {index}\n"


def section(definition: BuildSpec, name: str) -> str:
    """The text of a section."""
    text = render_apptainer(definition)
    lines = text.partition(f"\n%{name}\n")[2].splitlines()
    end = next((n for n, line in enumerate(lines) if line.startswith("%")), len(lines))
    return "\n".join(lines[:end]) + "\n"


def in_root(root: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as root of `root`, with /dev and /proc, in mounts that end with it."""
    (root / "script").write_text(script)
    mounts = f"mount --bind /dev {root}/dev; mount -t proc proc {root}/proc"
    inner = f'set -e; {mounts}; exec chroot {root} /bin/sh -e /script "$@"'
    return subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", inner, "sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )


def tree(folder: Path) -> dict[str, tuple[str, int, str]]:
    """Path -> kind, mode and content (what a link points to, the sha256 of a file)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode & 0o7777
        if path.is_symlink():
            found[name] = ("link", 0, str(path.readlink()))
        elif path.is_dir():
            found[name] = ("folder", mode, "")
        else:
            found[name] = ("file", mode, hashlib.sha256(path.read_bytes()).hexdigest())
    return found


def test_definition_leaves_the_environment_and_nothing_else(made: tuple[BuildSpec, str], root: Path) -> None:
    definition, _ = made
    assert sorted(path.name for path in (root / "opt").iterdir()) == ["env"]
    assert list((root / "tmp").iterdir()) == []
    env = root / "opt/env"
    assert (env / "pyvenv.cfg").read_text() == pyvenv_cfg(definition)
    for path, to in venv_links(definition):
        assert str((root / path.removeprefix("/")).readlink()) == to
    assert (env / "bin/tiny").read_text().startswith("#!/opt/env/bin/python\n")
    assert sorted(path.name for path in (env / "bin").iterdir()) == [
        "python",
        "python3",
        "python3.11",
        "tiny",
    ]
    site = env / "lib/python3.11/site-packages"
    names = {path.relative_to(site).as_posix() for path in site.rglob("*.py*")}
    assert names == {
        "other.py", "__pycache__/other.cpython-311.pyc",
        "tiny/__init__.py", "tiny/__pycache__/__init__.cpython-311.pyc", "tiny/template.py",
    }  # fmt: skip
    for path in site.rglob("*.pyc"):
        assert int.from_bytes(path.read_bytes()[4:8], "little") == 0b01  # PEP 552: unchecked hash
    assert all(mode in (0o644, 0o755) for kind, mode, _ in tree(env).values() if kind != "link")


def test_definition_runs(made: tuple[BuildSpec, str], root: Path) -> None:
    definition, _ = made
    runscript = section(definition, "environment") + section(definition, "runscript")
    show = "import os; print(os.environ['TINY_WORDS'])"
    assert in_root(root, runscript, "python", "-c", show).stdout == 'it\'s $HOME, "really" \\ so\n'
    assert in_root(root, runscript, "tiny").stdout == "tiny runs\n"
    assert in_root(root, runscript).stdout == ""  # python, with nothing to read
    assert (root / "home/user").stat().st_mode & 0o7777 == 0o1777


def test_dockerfile_gives_the_same_environment(
    made: tuple[BuildSpec, str], debian_tar: Path, root: Path, scratch: Path
) -> None:
    definition, index = made
    podman = ("podman", "--root", f"{scratch}/p", "--runroot", f"{scratch}/r", "--storage-driver", "vfs")
    run(*podman, "import", str(debian_tar), "localhost/base:1")
    write_definitions(scratch / "definition", render(definition))
    (scratch / "pip.conf").write_text(pip_conf(index))
    build = (*podman, "build", "--isolation", "chroot", "--network", "host", "--layers=false",
        "--build-arg", "BASE=localhost/base:1", "--tag", "tiny")  # fmt: skip
    run(*build, "--secret", f"id=pip.conf,src={scratch}/pip.conf", str(scratch / "definition"))
    (image,) = json.loads(run(*podman, "image", "inspect", "tiny"))
    assert image["Config"]["Env"] == [f"{name}={value}" for name, value in definition.environment]
    assert dict(definition.labels).items() <= image["Labels"].items()
    assert image["Config"]["Cmd"] == ["python"]
    assert image["Config"]["Entrypoint"] == ["/usr/bin/tini", "-s", "--"]
    assert index not in json.dumps(image)  # what the build was told about this site stays out of the image
    folder = Path(run(*podman, "image", "mount", "tiny").strip())
    assert list((folder / "mnt").iterdir()) == []
    assert sorted(path.name for path in (folder / "opt").iterdir()) == ["env"]
    assert tree(folder / "opt/env") == tree(root / "opt/env")
    run(*podman, "image", "umount", "tiny")
