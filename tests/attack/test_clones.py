"""A stranger's clone: what its settings say and where its links lead touches nothing outside of it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory import cli
from imagefactory.oci.layout import Layout
from imagefactory.settings.sources import REASONS
from tests.made.families import make_root
from tests.made.filled_store import fill
from tests.made.trusted import trust

COMMANDS = (
    ("list",),
    ("show", "one-12.1-cu121"),
    ("lock", "one-12.1-cu121", "--check"),
    ("render", "one-12.1-cu121"),
    ("render", "--check"),
    ("run", "a:1", "--", "true"),
    ("image", "list"),
    ("image", "prune"),
    ("image", "prune", "--cache"),
    ("image", "check", "--fix"),
    ("image", "remove", "a:1"),
    ("push", "one-12.1-cu121"),
    ("pull", "one-12.1-cu121"),
    ("site", "publish", "one-12.1-cu121"),
    ("verdict", "list", "one-12.1-cu121"),
    ("key", "list"),
    ("key", "trust", "--user", "x.pub"),
    ("search",),
    ("compat", "one-12.1-cu121", "--capability", "8.0"),
    ("config",),
    ("doctor", "--for", "submit"),
)
LINKS = (
    *("store", "store/blobs", "store/blobs/sha256", "store/layers", "store/images", "store/referrers"),
    *("store/unpacked", "store/unpacked/.locks", "store/unpacked/.sums", "store/tmp", "store/run"),
    *("store/locks", "store/locks/store", "store/locks/index", "store/locks/index.json", "store/index.json"),
    *("store/oci-layout", "store/scans", "store/journal", "store/bases", "store/sweeps", "store/nights"),
    *("cache", "cache/wheels", "cache/conda", "cache/debs", "cache/segments", "cache/conda-pkgs"),
    *("cache/lock", "cache/catalogs", "lockfiles", "lockfiles/bases", "definitions"),
    *("definitions/one-12.1-cu121", "definitions/one-12.1-cu121/files", "definitions/one-12.1-cu121/wheels"),
    *("definitions/one-12.1-cu121/Dockerfile", "lockfiles/one-12.1-cu121.requirements.txt"),
    *("lockfiles/one-12.1-cu121.unsolvable", "wheels", "recipes/one.yaml", "recipes/bases.yaml"),
)
VALUES = {
    "mirrors": '[mirrors]\n"docker.io" = "{host}/x"\n',
    "indexes": '[indexes]\nx = "http://{host}/x"\n',
    "channels": '[channels]\n"conda-forge" = "{neighbour}"\n',
    "policy": "[policy]\nexpires-days = 366\n",
    "trust": '[[trust]]\nname = "evil"\nkeyid = "00"\n',
    "store": 'store = "store"\n',
    "cache": 'cache = "cache"\n',
    "solver": 'solver = "{root}/evil"\n',
    "engine": 'engine = "docker"\n',
    "runner": 'runner = "apptainer"\n',
    "codec": 'codec = "gzip"\n',
    "site": 'site = "chtc"\n',
}
HOST = "127.0.0.1:9"
NAMES = ("id_ed25519", "0" * 64, "store", "index", "one-12.1-cu121.requirements.txt", f".{'0' * 64}.x.part")


def setting(name: str, root: Path) -> str:
    form = VALUES.get(name, f'{name} = "{{neighbour}}/{NAMES[0]}"\n')
    return form.format(host=HOST, neighbour=root.parent / "neighbour", root=root)


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_mode, status.st_uid, data)
    return found


def fill_neighbour(folder: Path) -> None:
    for below in (folder, folder / "sha256", folder / ("1" * 64), folder / ".ssh"):
        below.mkdir(mode=0o755)
        for name in NAMES:
            (below / name).write_bytes(b"untouched")
            (below / name).chmod(0o600)


@contextmanager
def clone() -> Iterator[Path]:
    """A clone with a store and a cache of its own, beside a folder that must stay as it is."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        neighbour, root = Path(folder, "neighbour"), Path(folder, "clone")
        fill_neighbour(neighbour)
        make_root(root)
        fill(Layout(root / "store"))
        (root / "cache").mkdir()
        (root / "evil").write_text(f"#!/bin/sh\ntouch {folder}/ran\n")
        (root / "evil").chmod(0o755)
        before = state(neighbour)
        yield root
        assert state(neighbour) == before
        assert not Path(folder, "ran").exists()


def link(root: Path, name: str, target: str) -> None:
    """Put a link to the neighbour at `name`, unless a link is above it already."""
    path = root / name
    if not path.parent.resolve().is_relative_to(root):
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(root.parent / "neighbour" / target)


def call(root: Path, home: Path, words: tuple[str, ...], **more: str) -> None:
    """The command line in the clone, as a user without settings of his own."""
    given = {name: os.environ[name] for name in ("PATH",)} | {"HOME": str(home), "TERM": "dumb", **more}
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - given.keys():
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        patch.chdir(root)
        try:
            cli.main(list(words))
        except SystemExit as ended:
            assert ended.code != 1, words


@given(st.data())
def test_nothing_that_a_clone_sets_reaches_out_of_it(data: st.DataObject) -> None:
    with clone() as root:
        names = data.draw(st.lists(st.sampled_from(sorted(REASONS)), unique=True, max_size=6))
        tables = [name for name in names if name in ("mirrors", "indexes", "channels", "policy", "trust")]
        text = "".join(setting(name, root) for name in [*(set(names) - set(tables)), *tables])
        (root / "imagefactory.toml").write_text(text)
        for name in data.draw(st.lists(st.sampled_from(LINKS), max_size=4)):
            link(root, name, data.draw(st.sampled_from(("", "sha256", NAMES[0]))))
        for words in data.draw(st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=3)):
            call(root, root.parent / "home", words)


@given(st.data())
def test_links_in_a_store_that_the_user_named_lead_nowhere(data: st.DataObject) -> None:
    """The user trusts the folder, or names its store and cache: links in these are still not followed."""
    with clone() as root:
        home, more = root.parent / "home", {}
        if data.draw(st.booleans()):
            (root / "imagefactory.toml").write_text('store = "store"\ncache = "cache"\n')
            trust(root, {"HOME": str(home)})
        else:
            more = {"IMAGEFACTORY_STORE": str(root / "store"), "IMAGEFACTORY_CACHE": str(root / "cache")}
        inside = [name for name in LINKS if "/" in name]
        for name in data.draw(st.lists(st.sampled_from(inside), min_size=1, max_size=3)):
            link(root, name, data.draw(st.sampled_from(("", "sha256", NAMES[0]))))
        for words in data.draw(st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=3)):
            call(root, home, words, **more)
