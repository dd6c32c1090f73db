"""Python locks: the file format, staleness, what a lock must hold; and uv against an index of our own."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import LockError, ToolError, UnsolvableError, UsageError
from imagefactory.lock import LockRequest
from imagefactory.lock.content_hash import content_hash
from imagefactory.lock.download import PackageCache
from imagefactory.lock.files import write_lock
from imagefactory.lock.pypi.facts import check_facts, cuda_version
from imagefactory.lock.pypi.index import PackageIndex, find_index
from imagefactory.lock.pypi.requirements import format_lock, parse_lock, read_lock
from imagefactory.lock.pypi.tags import fitting_tags
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Base, Lock, LockedWheel, Target, Where
from imagefactory.progress import Quiet
from imagefactory.settings.choices import Setting
from imagefactory.web import redact
from tests.made.values import make_base, make_lock, make_target
from tests.services.package_index import Index, package_index
from tests.services.package_index import uv_locker as locker


def fetch_all(folder: Path, uv: UvLocker, lock: Lock) -> dict[LockedWheel, Path]:
    def locate(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
        return uv.addresses(replace(lock, wheels=missing))

    return PackageCache(folder, uv._index).fetch(lock.wheels, locate, Quiet())


BASE = make_base()
TARGET = make_target(requirements=("torch==2.3.1", "numpy"), constraints=("numpy<2",))


def wheel(name: str, version: str, tag: str = "py3-none-any", *, size: int = 1000) -> LockedWheel:
    filename = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    digest = hashlib.sha256(filename.encode()).hexdigest()
    return LockedWheel(name=name, version=version, filename=filename, sha256=digest, size=size)


LOCK = make_lock(
    content_hash=content_hash(TARGET, BASE, None),
    wheels=(
        wheel("numpy", "1.26.4", "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64"),
        wheel("nvidia-cuda-runtime-cu12", "12.1.105", "py3-none-manylinux1_x86_64"),
        wheel("torch", "2.3.1", "cp311-cp311-manylinux1_x86_64", size=779_156_414),
    ),
)

# --- the file ------------------------------------------------------------------------------------


def test_the_text_of_a_lock() -> None:
    lines = format_lock(LOCK).splitlines()
    assert lines[:8] == [
        "# imagefactory lock 1",
        "# target: pytorch-2.3-cu121",
        f"# content-hash: {LOCK.content_hash}",
        "# python: 3.11",
        "# platform: manylinux_2_36_x86_64",
        "# solver: uv 0.9.1",
        "# packages: 3",
        "# to make it anew: imagefactory lock pytorch-2.3-cu121",
    ]
    assert lines[-2:] == [
        "# wheel: torch-2.3.1-cp311-cp311-manylinux1_x86_64.whl 779156414",
        f"torch==2.3.1 --hash=sha256:{LOCK.wheels[-1].sha256}",
    ]


def test_round_trip() -> None:
    text = format_lock(LOCK)
    assert parse_lock(text, "x") == LOCK
    assert format_lock(parse_lock(text, "x")) == text


FAULTS: Mapping[str, tuple[Callable[[str], str], int, str]] = {
    "empty": (lambda t: "", 1, "expected '# imagefactory lock ...'"),
    "other format": (
        lambda t: t.replace("lock 1\n", "lock 2\n", 1),
        1,
        "format 2 is not known to this imagefactory",
    ),
    "no target": (lambda t: t.replace("# target: pytorch-2.3-cu121\n", "", 1), 2, "expected '# target: ...'"),
    "target leaves its folder": (
        lambda t: t.replace("# target: pytorch", "# target: ../pytorch", 1),
        2,
        "expected '# target: ...'",
    ),
    "content hash": (lambda t: t.replace("sha256:", "md5:", 1), 3, "expected '# content-hash: ...'"),
    "python": (lambda t: t.replace("# python: 3.11", "# python: 3", 1), 4, "expected '# python: ...'"),
    "platform": (lambda t: t.replace("# platform: many", "# platform: musl", 1), 5, "expected '# platform"),
    "solver": (lambda t: t.replace("uv 0.9.1", "uv\x1b[31m", 1), 6, "expected '# solver: ...'"),
    "remake names another": (
        lambda t: t.replace("anew: imagefactory lock pytorch", "anew: imagefactory lock other"),
        8,
        "another target",
    ),
    "count": (lambda t: t.replace("packages: 3", "packages: 4"), 15, "holds 3 packages"),
    "cut at a package": (lambda t: "\n".join(t.split("\n")[:-3]) + "\n", 13, "holds 2 packages"),
    "cut in a pair": (lambda t: "\n".join(t.split("\n")[:-2]) + "\n", 14, "expected 'name==version"),
    "cut in a line": (lambda t: t[:-9], 14, "cut short"),
    "carriage returns": (lambda t: t.replace("\n", "\r\n"), 1, "expected"),
    "blank line": (lambda t: t.replace("# wheel: torch", "\n# wheel: torch"), 13, "expected '# wheel:"),
    "sdist": (
        lambda t: re.sub(r"torch-2.3.1\S+\.whl", "torch-2.3.1.tar.gz", t),
        13,
        "source distribution; images are made of wheels only",
    ),
    "no size": (lambda t: t.replace(" 779156414", ""), 13, "expected '# wheel: FILE.whl BYTES'"),
    "size nought": (lambda t: t.replace(" 779156414", " 0"), 13, "expected '# wheel:"),
    "path": (lambda t: t.replace("wheel: torch", "wheel: ../torch"), 13, "expected '# wheel:"),
    "short hash": (lambda t: t[:-2] + "\n", 14, "64 hex"),
    "upper-case hash": (lambda t: t[:-66] + t[-66:].upper(), 14, "expected 'name==version"),
    "md5": (lambda t: t[:-72] + t[-72:].replace("sha256", "md5"), 14, "expected 'name==version"),
    "two hashes": (lambda t: t[:-1] + " --hash=sha256:" + "0" * 64 + "\n", 14, "expected 'name==version"),
    "address": (
        lambda t: t.replace("torch==2.3.1 ", "torch @ http://x.invalid/torch.whl "),
        14,
        "expected 'name==version",
    ),
    "option": (lambda t: t.replace("torch==2.3.1 ", "--index-url=http://x.invalid/ "), 14, "expected 'name"),
    "name not normalised": (lambda t: t.replace("torch==", "Torch=="), 14, "expected 'name==version"),
    "other version": (lambda t: t.replace("torch==2.3.1", "torch==2.3.2"), 13, "is not torch 2.3.2"),
    "no version": (lambda t: t.replace("torch==2.3.1", "torch==2.x.!"), 13, "Invalid version"),
    "other name": (lambda t: t.replace("torch==2.3.1", "zorch==2.3.1"), 13, "is not zorch 2.3.1"),
    "not a wheel's name": (
        lambda t: t.replace("cp311-manylinux1_x86_64.whl", "cp311.whl"),
        13,
        "is not a wheel's file name",
    ),
    "other python": (
        lambda t: t.replace("torch-2.3.1-cp311-cp311", "torch-2.3.1-cp312-cp312"),
        13,
        "does not fit Python 3.11",
    ),
    "newer glibc": (
        lambda t: t.replace("cp311-manylinux1_x86_64", "cp311-manylinux_2_39_x86_64"),
        13,
        "does not fit Python 3.11 on manylinux_2_36_x86_64",
    ),
    "other machine": (
        lambda t: t.replace("cp311-manylinux1_x86_64", "cp311-manylinux_2_17_aarch64"),
        13,
        "does not fit",
    ),
    "twice": (lambda t: t + "".join(t.splitlines(keepends=True)[-2:]), 16, "'torch' stands twice"),
    "unsorted": (
        lambda t: t + "".join(t.splitlines(keepends=True)[8:10]),
        16,
        "'numpy' must stand before 'torch'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_malformed_lock_is_refused_by_file_and_line(name: str) -> None:
    spoil, line, what = FAULTS[name]
    text = format_lock(LOCK)
    assert spoil(text) != text
    with pytest.raises(LockError) as caught:
        parse_lock(spoil(text), "lockfiles/x.requirements.txt")
    assert caught.value.message.startswith(f"lockfiles/x.requirements.txt:{line}: ")
    assert what in caught.value.message
    assert caught.value.hint.startswith("imagefactory lock ")
    assert caught.value.exit_code == 5


@given(data=st.data())
def test_a_lock_with_one_character_changed_is_refused_or_reads_as_it_is_written(data: st.DataObject) -> None:
    text = format_lock(LOCK)
    place = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(
        st.sampled_from(["", "\n", " ", "0", "a", "A", "-", "#", "/", "\x00", "é", "\u2028", "=="])
    )
    spoiled = text[:place] + put + text[place + 1 :]
    try:
        lock = parse_lock(spoiled, "x")
    except LockError as error:
        complaint = error.message
    else:
        complaint = ""
        assert format_lock(lock) == spoiled
    assert re.match(r"x:\d+: |$", complaint)


def test_reading_and_writing(tmp_path: Path) -> None:
    path = tmp_path / "lockfiles" / "pytorch-2.3-cu121.requirements.txt"
    with pytest.raises(LockError, match="does not exist") as caught:
        read_lock(path)
    assert caught.value.hint == "imagefactory lock pytorch-2.3-cu121"
    write_lock(path.parent, LOCK)
    write_lock(path.parent, LOCK)
    assert read_lock(path) == LOCK
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_bytes(format_lock(LOCK).encode() + b"\xff")
    with pytest.raises(LockError, match=r":15: is not UTF-8"):
        read_lock(path)


def test_tags_are_those_of_an_installer() -> None:
    best = [str(tag) for tag in fitting_tags("3.11", "manylinux_2_36_x86_64")]
    assert best[0] == "cp311-cp311-manylinux_2_36_x86_64"
    assert best[-1] == "py30-none-any"
    for fits in ("cp38-abi3-manylinux2014_x86_64", "py3-none-manylinux1_x86_64", "cp311-none-any"):
        assert fits in best
    for other in ("cp311-cp311-musllinux_1_2_x86_64", "cp311-cp311t-manylinux_2_17_x86_64", "cp312-abi3-any"):
        assert other not in best


# --- staleness and facts -------------------------------------------------------------------------


def hashed(target: Target, base: Base = BASE) -> str:
    return content_hash(target, base, None)


@pytest.mark.parametrize(
    "changed",
    [
        {"requirements": ("torch==2.3.0", "numpy")},
        {"constraints": ()},
        {"constraints": ("numpy<1.26",)},
        {"python": "3.12"},
        {"platform": "linux/arm64"},
        {"source": "conda"},
    ],
)
def test_what_decides_the_solution_makes_a_lock_stale(changed: dict[str, object]) -> None:
    assert hashed(replace(TARGET, **changed)) != hashed(TARGET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "x", "description": "x", "checks": ("x",), "environment": (("A", "b"),)},
        {"capabilities": ()},
        {"requirements": ("numpy", "torch==2.3.1")},
        {"where": Where(file="x", line=1, column=1)},
    ],
)
def test_what_changes_no_package_does_not(changed: dict[str, object]) -> None:
    assert hashed(replace(TARGET, **changed)) == hashed(TARGET)  # type: ignore[arg-type]


def test_the_base_decides_by_its_glibc_alone() -> None:
    assert hashed(TARGET, replace(BASE, glibc="2.41")) != hashed(TARGET)
    assert hashed(TARGET, replace(BASE, packages=("gcc",))) == hashed(TARGET)


def with_wheels(*wheels: LockedWheel) -> Lock:
    return replace(LOCK, wheels=tuple(sorted(wheels, key=lambda one: one.name)))


TORCH = wheel("torch", "2.3.1")


@pytest.mark.parametrize(
    ("came", "cuda"),
    [
        ((wheel("nvidia-cuda-runtime-cu11", "11.7.99"),), "11.7"),
        ((wheel("nvidia-cuda-runtime-cu12", "12.1.105"),), "12.1"),
        ((wheel("nvidia-cuda-runtime", "13.0.96"),), "13.0"),
        ((wheel("nvidia-cuda-runtime", "13.2.86"), wheel("cuda-toolkit", "13.2.2")), "13.2"),
        ((wheel("cuda-toolkit", "12.6.3"),), "12.6"),
        ((wheel("nvidia-cuda-nvrtc-cu12", "12.1.105"),), None),
    ],
)
def test_the_cuda_version_that_came(came: tuple[LockedWheel, ...], cuda: str | None) -> None:
    assert cuda_version(with_wheels(TORCH, *came)) == cuda


def test_facts_that_agree() -> None:
    check_facts(LOCK, TARGET)
    check_facts(LOCK, replace(TARGET, cuda="12"))
    check_facts(LOCK, replace(TARGET, version="2.3.1"))


@pytest.mark.parametrize(
    ("lock", "changed", "what", "hint"),
    [
        (
            LOCK,
            {"cuda": "12.4"},
            "torch 2.3.1 comes with CUDA 12.1 (nvidia-cuda-runtime-cu12 12.1.105), the recipe asks 12.4",
            'write cuda: ["12.1"] at recipes/pytorch.yaml:7:5',
        ),
        (LOCK, {"cuda": "1"}, "the recipe asks 1", "write cuda"),
        (LOCK, {"version": "2.4"}, "torch 2.3.1 was locked, the recipe asks for 2.4", "recipes/pytorch"),
        (LOCK, {"version": "2.30"}, "the recipe asks for 2.30", "recipes/pytorch"),
        (LOCK, {"framework": "jax"}, "does not hold the framework 'jax'", "imagefactory lock"),
        (with_wheels(TORCH), {}, "would silently compute on the CPU", "nvidia-cuda-runtime"),
        (
            with_wheels(
                TORCH, wheel("nvidia-cuda-runtime-cu12", "12.1.105"), wheel("nvidia-cuda-runtime", "13.0.96")
            ),
            {},
            "more than one CUDA runtime",
            "constrain",
        ),
    ],
)
def test_facts_that_do_not(lock: Lock, changed: dict[str, str], what: str, hint: str) -> None:
    with pytest.raises(LockError) as caught:
        check_facts(lock, replace(TARGET, **changed))  # type: ignore[arg-type]
    assert what in caught.value.message
    assert hint in caught.value.hint


# --- which index ---------------------------------------------------------------------------------

UNSET = Setting(value="", origin="default")


def index_of(tmp_path: Path, environ: dict[str, str], setting: Setting = UNSET) -> PackageIndex:
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin"}
    return find_index(setting, environ=home | environ, prefix=tmp_path / "prefix", etc=tmp_path / "etc")


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_first_that_names_an_index_wins(tmp_path: Path) -> None:
    pip = put(tmp_path / ".config/pip/pip.conf", "[global]\nindex-url = http://pip.invalid/simple\n")
    index = index_of(tmp_path, {})
    assert (index.url, index.origin) == ("http://pip.invalid/simple", str(pip))
    assert dict(index.environment)["UV_DEFAULT_INDEX"] == "http://pip.invalid/simple"

    index = index_of(tmp_path, {"PIP_INDEX_URL": "http://pipenv.invalid/simple"})
    assert index.origin == "$PIP_INDEX_URL"

    uv = put(tmp_path / ".config/uv/uv.toml", '[[index]]\nurl = "http://uv.invalid/simple"\ndefault = true\n')
    index = index_of(tmp_path, {"PIP_INDEX_URL": "http://pipenv.invalid/simple"})
    assert (index.url, index.origin) == ("http://uv.invalid/simple", str(uv))
    assert "UV_DEFAULT_INDEX" not in dict(index.environment)

    index = index_of(tmp_path, {"UV_INDEX_URL": "http://uvenv.invalid/simple"})
    assert index.url == dict(index.environment)["UV_DEFAULT_INDEX"] == "http://uvenv.invalid/simple"

    ours = Setting(value="http://ours.invalid/simple", origin="$IMAGEFACTORY_INDEX")
    index = index_of(tmp_path, {"UV_INDEX_URL": "http://uvenv.invalid/simple"}, ours)
    assert dict(index.environment)["UV_DEFAULT_INDEX"] == index.url == ours.value
    assert "UV_INDEX_URL" not in dict(index.environment)


def test_pips_files_in_pips_order(tmp_path: Path) -> None:
    put(tmp_path / "etc/xdg/pip/pip.conf", "[global]\nindex-url = http://desktop.invalid\n")
    assert index_of(tmp_path, {}).url == "http://desktop.invalid"
    put(tmp_path / "etc/pip.conf", "[global]\nindex-url = http://system.invalid\n")
    assert index_of(tmp_path, {}).url == "http://system.invalid"
    put(tmp_path / ".pip/pip.conf", "[global]\nindex_url = http://old.invalid\n")
    assert index_of(tmp_path, {}).url == "http://old.invalid"
    put(
        tmp_path / "prefix/pip.conf", "[install]\nindex-url = http://site.invalid\n[global]\nindex-url = no\n"
    )
    assert index_of(tmp_path, {}).url == "http://site.invalid"
    named = put(tmp_path / "named.conf", "[global]\nindex-url = http://named.invalid\n")
    assert index_of(tmp_path, {"PIP_CONFIG_FILE": str(named)}).url == "http://named.invalid"
    assert index_of(tmp_path, {"PIP_CONFIG_FILE": "/dev/null"}).url == ""
    named.write_text("index-url\n")
    with pytest.raises(UsageError, match=r"named\.conf"):
        index_of(tmp_path, {"PIP_CONFIG_FILE": str(named)})


def test_what_would_bend_the_solution_does_not_reach_uv(tmp_path: Path) -> None:
    put(
        tmp_path / ".config/pip/pip.conf",
        "[global]\nextra-index-url = http://x.invalid\nfind-links = /opt/wheels\n",
    )
    bends = {
        "UV_EXTRA_INDEX_URL": "http://x.invalid",
        "UV_FIND_LINKS": "/opt",
        "UV_PRERELEASE": "allow",
        "UV_CONSTRAINT": "x",
        "UV_TORCH_BACKEND": "cpu",
        "UV_RESOLUTION": "lowest",
        "PIP_FIND_LINKS": "/opt",
        "PYTHONPATH": "/opt",
        "AWS_SECRET_ACCESS_KEY": "canary",
    }
    needed = {"UV_CACHE_DIR": "/c", "HTTPS_PROXY": "http://p.invalid", "UV_INDEX_OURS_PASSWORD": "s"}
    given_to_uv = dict(index_of(tmp_path, bends | needed).environment)
    assert not bends.keys() & given_to_uv.keys()
    assert needed.items() <= given_to_uv.items()
    assert given_to_uv["UV_PYTHON_DOWNLOADS"] == "never"


def test_certificates_and_proxy_serve_both_uv_and_requests(tmp_path: Path) -> None:
    bundle = put(tmp_path / "ca.pem", "")
    put(tmp_path / ".config/pip/pip.conf", f"[global]\ncert = {bundle}\nproxy = http://proxy.invalid:3128\n")
    index = index_of(tmp_path, {})
    assert index.certificates == dict(index.environment)["SSL_CERT_FILE"] == str(bundle)
    assert index.proxy == dict(index.environment)["HTTPS_PROXY"] == "http://proxy.invalid:3128"
    for name in ("REQUESTS_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"):
        other = put(tmp_path / f"{name}.pem", "")
        if name == "SSL_CERT_FILE":
            (tmp_path / ".config/pip/pip.conf").unlink()
        assert index_of(tmp_path, {name: str(other)}).certificates == str(other)
    with pytest.raises(UsageError, match=r"gone\.pem \(\$PIP_CERT\) does not exist"):
        index_of(tmp_path, {"PIP_CERT": str(tmp_path / "gone.pem")})


def test_messages_hold_no_secrets() -> None:
    text = redact("at https://bob:hunter2@x.invalid/simple/a.whl?token=canary#f (https://tok@y.invalid/)")
    assert text == "at https://x.invalid/simple/a.whl (https://y.invalid/)"


# --- uv and an index -----------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as index:
        index.add("torch", "2.3.1", needs=("numpy", "nvidia-cuda-runtime-cu12==12.1.105"))
        index.add("nvidia-cuda-runtime-cu12", "12.1.105", tag="py3-none-manylinux1_x86_64")
        index.add("numpy", "1.26.3")
        index.add("numpy", "2.0.0")
        yield index


REQUEST = LockRequest(target=TARGET, base=BASE)


def versions(lock: Lock) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in lock.wheels}


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_a_target_is_locked(index: Index, tmp_path: Path, as_json: bool) -> None:
    index.json = as_json
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    assert versions(lock) == {"numpy": "1.26.3", "nvidia-cuda-runtime-cu12": "12.1.105", "torch": "2.3.1"}
    for one in lock.wheels:
        data = (index.folder / one.filename).read_bytes()
        assert (one.size, one.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (lock.target, lock.python, lock.platform) == (TARGET.name, "3.11", "manylinux_2_36_x86_64")
    assert lock.solver == f"uv {uv.require()}"
    assert lock.content_hash == content_hash(TARGET, BASE, None)
    assert parse_lock(format_lock(lock), "x") == lock
    assert locker(index, tmp_path).lock(REQUEST, Quiet()) == lock
    assert "127.0.0.1" not in format_lock(lock)


def test_an_unchanged_lock_asks_nobody(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    index.requests.clear()
    index.add("numpy", "1.26.4")
    assert uv.lock(replace(REQUEST, previous=lock), Quiet()) is lock
    assert index.requests == []
    with pytest.raises(LockError, match=r"the recipe asks 12\.4"):
        uv.lock(replace(REQUEST, previous=lock, target=replace(TARGET, cuda="12.4")), Quiet())


def test_only_what_must_move_moves(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    for name, version in (("numpy", "1.26.4"), ("extra", "1.0"), ("extra", "1.1")):
        index.add(name, version)
    more = replace(TARGET, requirements=(*TARGET.requirements, "extra"))
    stale = uv.lock(replace(REQUEST, previous=lock, target=more), Quiet())
    assert versions(stale) == versions(lock) | {"extra": "1.1"}
    assert stale.content_hash != lock.content_hash
    bound = replace(TARGET, constraints=("numpy!=1.26.3", "numpy<2"))
    assert versions(uv.lock(replace(REQUEST, previous=lock, target=bound), Quiet()))["numpy"] == "1.26.4"


def test_updates(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    wide = replace(TARGET, requirements=("torch==2.3.1", "numpy", "extra"))
    index.add("extra", "1.0")
    lock = uv.lock(replace(REQUEST, target=wide), Quiet())
    index.add("numpy", "1.26.4")
    index.add("extra", "1.1")
    held = replace(REQUEST, target=wide, previous=lock)
    assert versions(uv.lock(replace(held, update=("NumPy",)), Quiet())) == versions(lock) | {
        "numpy": "1.26.4"
    }
    everything = versions(uv.lock(replace(held, update_all=True), Quiet()))
    assert everything == versions(lock) | {"numpy": "1.26.4", "extra": "1.1"}
    with pytest.raises(LockError, match="no package 'nunpy'") as caught:
        uv.lock(replace(held, update=("nunpy",)), Quiet())
    assert caught.value.hint == "did you mean 'numpy'?"
    with pytest.raises(LockError, match="no lock yet"):
        uv.lock(replace(REQUEST, update=("numpy",)), Quiet())


def test_a_previous_files_name_follows_the_target(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    renamed = uv.lock(replace(REQUEST, previous=replace(lock, target="old")), Quiet())
    assert renamed == lock


@pytest.mark.parametrize(
    ("changed", "what", "hint"),
    [
        ({"requirements": ("torch==9.9",)}, "torch==9.9", "change the recipe"),
        ({"requirements": ("torch==2.3.1", "numpy>=2")}, "numpy", "change the recipe"),
        ({"requirements": ("torch==2.3.1", "source-only")}, "source-only", "wheels only"),
        ({"requirements": ("torch==2.3.1", "musl-only")}, "musl-only", "wheel"),
        ({"cuda": "12.4"}, "comes with CUDA 12.1", 'write cuda: ["12.1"]'),
        ({"framework": "numpy", "version": "1.26", "requirements": ("numpy",)}, "no CUDA runtime", "nvidia"),
        ({"platform": "linux/s390x"}, "linux/s390x", "linux/amd64"),
    ],
)
def test_what_cannot_be_locked(
    index: Index, tmp_path: Path, changed: dict[str, object], what: str, hint: str
) -> None:
    index.add("musl-only", "1.0", tag="cp311-cp311-musllinux_1_2_x86_64")
    (index.folder / "source-only-1.0.tar.gz").write_bytes(b"")
    index.publish("source-only", "source-only-1.0.tar.gz")
    with pytest.raises(LockError) as caught:
        locker(index, tmp_path).lock(replace(REQUEST, target=replace(TARGET, **changed)), Quiet())  # type: ignore[arg-type]
    assert what in caught.value.message
    assert TARGET.name in caught.value.message
    assert hint in caught.value.hint
    assert len(caught.value.message) < 900


def test_no_index_is_said_without_its_password(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path, url="http://bob:hunter2@127.0.0.1:9/simple")
    with pytest.raises(LockError) as caught:
        uv.lock(REQUEST, Quiet())
    assert "hunter2" not in caught.value.message + caught.value.hint
    assert "http://127.0.0.1:9/simple ($IMAGEFACTORY_INDEX)" in caught.value.hint


def test_an_index_that_tells_no_hashes_is_hashed_by_uv(index: Index, tmp_path: Path) -> None:
    index.hashes = ""
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    assert {wheel.name: wheel.sha256 for wheel in lock.wheels} == {
        wheel.name: hashlib.sha256((index.folder / wheel.filename).read_bytes()).hexdigest()
        for wheel in lock.wheels
    }
    fetch_all(tmp_path / "cache", uv, lock)
    index.hashes = "sha512"
    with pytest.raises(LockError, match="gives no sha256 for"):
        locker(index, tmp_path).lock(REQUEST, Quiet())


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_an_index_with_a_password_from_lock_to_wheels(index: Index, tmp_path: Path, as_json: bool) -> None:
    index.password, index.json = "p@ss", as_json
    uv = locker(index, tmp_path, url=index.url.replace("://", "://bob:p%40ss@"))
    lock = uv.lock(REQUEST, Quiet())
    assert "p@ss" not in format_lock(lock)
    assert "bob" not in format_lock(lock)
    paths = fetch_all(tmp_path / "cache", uv, lock)
    assert {path.name for path in paths.values()} == {wheel.filename for wheel in lock.wheels}
    index.hidden.update(index.rows["numpy"])  # the projects' pages are asked with the password too
    with pytest.raises(LockError):
        uv.addresses(lock)


def test_a_better_wheel_that_came_later_changes_nothing(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    for tag in ("cp311-cp311-manylinux_2_17_x86_64", "cp311-abi3-manylinux_2_28_x86_64"):
        index.add("numpy", "1.26.3", tag=tag)
    old = next(wheel for wheel in lock.wheels if wheel.name == "numpy")
    assert uv.addresses(lock)[old.filename].endswith("/files/numpy-1.26.3-py3-none-any.whl")
    index.add("extra", "1.0")
    more = replace(TARGET, requirements=(*TARGET.requirements, "extra"))
    assert old in uv.lock(replace(REQUEST, previous=lock, target=more), Quiet()).wheels
    fresh = uv.lock(REQUEST, Quiet())
    best = next(wheel for wheel in fresh.wheels if wheel.name == "numpy")
    assert best.filename == "numpy-1.26.3-cp311-cp311-manylinux_2_17_x86_64.whl"


def test_a_yanked_version_is_still_found(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    index.yanked.update(index.rows["numpy"])
    assert len(uv.addresses(lock)) == 3
    index.add("numpy", "1.26.4")
    assert versions(uv.lock(REQUEST, Quiet()))["numpy"] == "1.26.4"


def test_a_file_that_uv_does_not_list_is_found_by_its_hash(index: Index, tmp_path: Path) -> None:
    """A site whose uv.toml hides new uploads can still build what was locked elsewhere."""
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    hidden = next(wheel for wheel in lock.wheels if wheel.name == "numpy")
    other = replace(hidden, filename="numpy-1.26.3-cp310-cp310-manylinux1_x86_64.whl")
    (index.folder / other.filename).write_bytes(b"another file of the same version, not for this Python")
    index.publish("numpy", other.filename)
    digest = index.hash(other.filename)
    moved = replace(lock, wheels=(replace(other, sha256=digest), *lock.wheels[1:]))
    assert uv.addresses(moved)[other.filename].endswith(f"/files/{other.filename}")


def test_a_file_that_is_gone_or_changed_is_said(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    index.add("numpy", "1.26.3", tag="cp311-cp311-manylinux_2_17_x86_64")
    lock = uv.lock(REQUEST, Quiet())
    gone = next(wheel for wheel in lock.wheels if wheel.name == "numpy")
    index.hidden.add(gone.filename)
    with pytest.raises(LockError, match=f"no longer has {re.escape(gone.filename)}") as caught:
        uv.addresses(lock)
    assert caught.value.hint == "imagefactory lock pytorch-2.3-cu121 --update numpy"
    index.hidden.update(index.rows["numpy"])
    with pytest.raises(LockError, match="no longer has what is locked") as caught:
        uv.addresses(lock)
    assert "--update" in caught.value.hint
    index.hidden.clear()
    index.lies[gone.filename] = "0" * 64
    with pytest.raises(LockError, match="other bytes under the name"):
        uv.addresses(lock)


def test_an_index_of_files(index: Index, tmp_path: Path) -> None:
    for name in index.rows:
        page = put(tmp_path / "site" / "simple" / name / "index.html", index.page(name)[1])
        page.write_text(page.read_text().replace("../../files/", f"{index.folder.as_uri()}/"))
    uv = locker(index, tmp_path, url=(tmp_path / "site/simple").as_uri())
    lock = uv.lock(REQUEST, Quiet())
    fetch_all(tmp_path / "cache", uv, lock)
    assert index.requests == []


def test_uv_toml_beside_or_above_the_work_folder_has_no_say(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "uv.toml", 'index-url = "http://127.0.0.1:9/simple"\nno-index = true\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert len(locker(index, tmp_path).lock(REQUEST, Quiet()).wheels) == 3


def test_without_uv_the_command_that_installs_it_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    with pytest.raises(ToolError) as caught:
        locker(index, tmp_path).lock(REQUEST, Quiet())
    assert caught.value.hint == "pip install 'imagefactory[build]'"


def test_a_lock_is_a_requirements_file(index: Index, tmp_path: Path) -> None:
    """An installer takes its pins and hashes without imagefactory (pip: tests/engines/test_lock_uv.py)."""
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, Quiet())
    path, into = tmp_path / "lock.txt", tmp_path / "got"
    path.write_text(format_lock(lock))
    command = [
        "pip",
        "install",
        "--require-hashes",
        "--no-deps",
        f"--target={into}",
        f"--requirements={path}",
    ]
    command.append(f"--python={sys.executable}")
    done = uv._run(command)
    assert done.returncode == 0, done.stderr
    assert len(list(into.glob("*.dist-info"))) == len(lock.wheels)
    path.write_text(format_lock(lock).replace(lock.wheels[0].sha256, "0" * 64))
    shutil.rmtree(into)
    assert "Hash mismatch" in uv._run(command).stderr


# --- a target on another -------------------------------------------------------------------------

ON = replace(
    TARGET,
    name="mylab-2.3-cu121",
    family="mylab",
    on=TARGET.name,
    requirements=(*TARGET.requirements, "extra"),
)


def test_a_target_on_another_keeps_every_wheel_of_it(index: Index, tmp_path: Path) -> None:
    """Also where the index has newer and better files by now, and no longer offers a locked one."""
    uv = locker(index, tmp_path)
    under = uv.lock(REQUEST, Quiet())
    index.add("numpy", "1.26.4")
    index.add("numpy", "1.26.3", tag="cp311-cp311-manylinux_2_17_x86_64")
    index.yanked.add("numpy-1.26.3-py3-none-any.whl")
    index.add("extra", "1.0", needs=("numpy",))
    lock = uv.lock(LockRequest(target=ON, base=BASE, under=under), Quiet())
    assert versions(lock) == versions(under) | {"extra": "1.0"}
    assert set(under.wheels) < set(lock.wheels)
    assert lock.wheels == tuple(sorted(lock.wheels, key=lambda wheel: wheel.name))
    assert (lock.target, lock.platform) == (ON.name, under.platform)
    assert parse_lock(format_lock(lock), "x") == lock
    again = LockRequest(target=ON, base=BASE, under=under, previous=lock)
    index.requests.clear()
    assert uv.lock(again, Quiet()) is lock
    assert index.requests == []


def test_what_lies_below_decides(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    under = uv.lock(REQUEST, Quiet())
    index.add("extra", "1.0")
    request = LockRequest(target=ON, base=BASE, under=under)
    lock = uv.lock(request, Quiet())
    index.add("numpy", "1.26.4")
    index.add("extra", "1.1")
    moved = uv.lock(replace(REQUEST, previous=under, update=("numpy",)), Quiet())
    above = uv.lock(replace(request, under=moved, previous=lock), Quiet())
    assert versions(above) == versions(lock) | {"numpy": "1.26.4"}
    assert above.content_hash != lock.content_hash
    own = uv.lock(replace(request, previous=lock, update=("extra",)), Quiet())
    assert versions(own) == versions(lock) | {"extra": "1.1"}
    assert versions(uv.lock(replace(request, previous=lock, update_all=True), Quiet())) == versions(own)
    with pytest.raises(LockError, match=r"has 'numpy' from pytorch-2\.3-cu121") as caught:
        uv.lock(replace(request, previous=lock, update=("numpy",)), Quiet())
    assert caught.value.hint == "imagefactory lock pytorch-2.3-cu121 --update numpy"


def test_what_does_not_go_with_what_lies_below(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    under = uv.lock(REQUEST, Quiet())
    index.add("numpy", "1.26.4")
    index.add("extra", "1.0", needs=("numpy>=1.26.4",))
    with pytest.raises(UnsolvableError) as caught:
        uv.lock(LockRequest(target=ON, base=BASE, under=under), Quiet())
    assert "extra" in caught.value.message
    assert "numpy==1.26.3" in caught.value.message
    assert "every package of pytorch-2.3-cu121 stays" in caught.value.hint
    assert "imagefactory lock pytorch-2.3-cu121 --update" in caught.value.hint
    assert "No solution found" in caught.value.tree
