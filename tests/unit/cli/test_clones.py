"""A clone, in which a user calls commands: each setting that would act outside of it stops them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from imagefactory import cli
from imagefactory.errors import EXIT_BUG, EXIT_OK, EXIT_USAGE
from imagefactory.oci.layout import Layout
from tests.made.command import Said
from tests.made.families import make_root
from tests.made.filled_store import fill
from tests.made.registry import RegistryMadeHere, registry_made_here

TARGET = "one-12.1-cu121"
NOBODY = 65534


class Clone:
    """A clone beside the folder of its user, and what must not happen there."""

    def __init__(self, folder: Path, host: str) -> None:
        self.root, self.home, self.host = folder / "clone", folder / "home", host
        self.secret = self.home / ".ssh/id_ed25519"
        self.secret.parent.mkdir(parents=True)
        self.secret.write_text("a key")
        (self.home / ".docker").mkdir()
        auths = {"auths": {host: {"auth": "dXNlcjpodW50ZXIy"}}}
        (self.home / ".docker/config.json").write_text(json.dumps(auths))
        make_root(self.root)
        self.trace = folder / "ran"
        (self.root / "evil").write_text(f"#!/bin/sh\ntouch {self.trace}\necho evil 1.0\n")
        (self.root / "evil").chmod(0o755)
        fill(Layout(self.root / "store"))
        (self.root / "cache").mkdir()

    def set(self, text: str) -> None:
        (self.root / "imagefactory.toml").write_text(text)

    def run(self, *words: str, **more: str) -> Said:
        given = {"HOME": str(self.home), "PATH": os.environ["PATH"], **more}
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in set(os.environ) - given.keys():
                patch.delenv(name)
            for name, value in given.items():
                patch.setenv(name, value)
            patch.chdir(self.root)
            with pytest.raises(SystemExit) as ended:
                cli.main(list(words))
        assert self.secret.read_text() == "a key"
        assert not self.trace.exists()
        assert isinstance(ended.value.code, int)
        assert ended.value.code != EXIT_BUG, err.getvalue()
        return Said(ended.value.code, out.getvalue(), err.getvalue())


@pytest.fixture
def registry() -> Iterator[RegistryMadeHere]:
    with registry_made_here() as made:
        yield made


@pytest.fixture
def clone(tmp_path: Path, registry: RegistryMadeHere) -> Clone:
    return Clone(tmp_path, registry.host)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('solver = "{root}/evil"\n', ("lock", TARGET)),
        ('store = "store"\n', ("image", "prune")),
        ('cache = "cache"\n', ("image", "prune", "--cache")),
        ('plain-http = "{host}"\nregistry = "{host}/x"\n', ("push", TARGET)),
        ('registry = "{host}/x"\n', ("pull", TARGET)),
        ('[mirrors]\n"registry.example" = "{host}/x"\n', ("pull", "registry.example/a:1")),
        ('certificates = "ca.pem"\n', ("pull", "{host}/a:1")),
        ('index = "http://{host}/simple"\n', ("lock", TARGET)),
        ('[indexes]\nlab = "http://{host}/simple"\n', ("lock", TARGET)),
        ('debian-mirror = "http://{host}/debian"\n', ("lock", "base:debian-12")),
        ('[channels]\n"conda-forge" = "http://{host}/x"\n', ("lock", TARGET)),
        ('catalog = "{host}/x"\n', ("search",)),
        (
            'signing-key = "./evil"\n',
            (
                "site",
                "publish",
            ),
        ),
        ('[[trust]]\nname = "evil"\n', ("verdict", "list", TARGET)),
        ("[policy]\nexpires-days = 366\n", ("verdict", "list", TARGET)),
    ],
)
def test_what_would_act_outside_stops_the_command(
    clone: Clone, registry: RegistryMadeHere, text: str, words: tuple[str, ...]
) -> None:
    clone.set(text.format(host=clone.host, root=clone.root))
    before = registry.count.copy()
    stopped = clone.run(*(word.format(host=clone.host) for word in words))
    assert stopped.code == EXIT_USAGE
    assert f"{clone.root}/imagefactory.toml:1" in stopped.err
    assert "config --trust" in stopped.err
    assert registry.count == before
    shown = json.loads(clone.run("config", "--json").out)
    assert shown["untrusted"]
    clone.run("doctor", "--for", "job")
    assert registry.count == before


@pytest.mark.parametrize("name", ["store/blobs", "store/blobs/sha256", "store/tmp", "store/unpacked"])
@pytest.mark.parametrize("trusted", [True, False])
def test_a_store_of_links_loses_nothing_elsewhere(clone: Clone, name: str, trusted: bool) -> None:
    """Also where the user trusted the folder, or named the store."""
    path = clone.root / name
    if path.exists():
        path.rename(clone.root / "before")
    path.symlink_to(clone.secret.parent)
    more = {}
    if trusted:
        clone.set('store = "store"\n')
        assert clone.run("config", "--trust").code == EXIT_OK
    else:
        more = {"IMAGEFACTORY_STORE": str(clone.root / "store")}
    for words in (("prune",), ("check", "--fix"), ("remove", "a:1")):
        clone.run("image", *words, **more)
    assert list(clone.secret.parent.iterdir()) == [clone.secret]


@pytest.mark.parametrize("name", ["wheels", "conda", "debs", "segments", "conda-pkgs"])
def test_a_cache_of_links_loses_nothing_elsewhere(clone: Clone, name: str) -> None:
    (clone.root / "cache" / name).symlink_to(clone.secret.parent)
    given = {"IMAGEFACTORY_CACHE": str(clone.root / "cache"), "IMAGEFACTORY_STORE": str(clone.root / "store")}
    clone.run("image", "prune", "--cache", **given)
    assert list(clone.secret.parent.iterdir()) == [clone.secret]


@pytest.mark.skipif(os.geteuid() != 0, reason="calls the program as another user")
@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_file_that_a_stranger_left_above_is_not_obeyed(user: int) -> None:
    """As in /tmp: for root as for an ordinary user, by the owner of the link and not of what it leads to."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder)
        shared.chmod(0o1777)
        (shared / "mine").mkdir()
        (shared / "imagefactory.toml").symlink_to("/etc/passwd")
        os.chown(shared / "imagefactory.toml", 4711, 4711, follow_symlinks=False)
        stopped = subprocess.run(
            [sys.executable, "-m", "imagefactory", "list"],
            cwd=shared / "mine",
            env={"HOME": folder, "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=120,
            user=user,
            group=user,
            check=False,
        )
    assert stopped.returncode == EXIT_USAGE, stopped.stderr
    assert f"{shared}/imagefactory.toml" in stopped.stderr
