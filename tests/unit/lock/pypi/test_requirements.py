"""Python locks: the file format, staleness, what a lock must hold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import LockError, redact
from imagefactory.lock.changes import content_hash
from imagefactory.lock.files import write_lock
from imagefactory.lock.pypi.facts import check_facts, cuda_version, rocm_builds
from imagefactory.lock.pypi.index import PackageIndex, find_index
from imagefactory.lock.pypi.requirements import fitting_tags, format_lock, parse_lock, read_lock
from imagefactory.model import BaseSpec, Lock, LockedWheel, ReleaseCutoff, SourceLocation, Target
from imagefactory.settings.choices import SettingValue
from tests.made.errors import fails
from tests.made.values import make_base, make_lock, make_target

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


def test_the_text_says_which_index_a_wheel_came_from() -> None:
    """And the content hash counts it, where there is one."""
    wheels = (LOCK.wheels[0], LOCK.wheels[1], wheel("torch", "2.3.1+cu121"))
    lock = replace(LOCK, wheels=wheels, origins=(("torch", "pytorch-cu121"),))
    text = format_lock(lock)
    assert (
        "\n# wheel: torch-2.3.1+cu121-py3-none-any.whl 1000 from pytorch-cu121\ntorch==2.3.1+cu121 " in text
    )
    assert parse_lock(text, "x") == lock
    with fails("lock-malformed", message="x:13: 'https://a/b'") as caught:
        parse_lock(text.replace("from pytorch-cu121", "from https://a/b"), "x")
    published = text.replace("from pytorch-cu121", "from pytorch-cu121 by GitHub pytorch/torch a.yml")
    assert parse_lock(published, "x").publishers == (("torch", "GitHub pytorch/torch a.yml"),)
    for other in (
        "by GitHub",
        "by GitHub a/b c.yml,",
        "by GitHub a/b  c.yml",
        "by GitHub a/b\x1b c",
        "by a b c d",
    ):
        with fails("lock-malformed", message="x:13: "):
            parse_lock(text.replace("from pytorch-cu121", other), "x")
    local = text.replace("from pytorch-cu121", "from ./wheels/torch-2.3.1+cu121-py3-none-any.whl")
    assert parse_lock(local, "x").origins == (("torch", "./wheels/torch-2.3.1+cu121-py3-none-any.whl"),)
    with fails("lock-malformed") as caught:
        parse_lock(local.replace("./wheels/", "./wheels/../"), "x")
    assert caught.value.message.startswith("x:13: './wheels/../")
    with fails("lock-malformed", message="x:13: './wheels/torch-2.3.2"):
        parse_lock(local.replace("./wheels/torch-2.3.1", "./wheels/torch-2.3.2"), "x")
    named = content_hash(replace(TARGET, origins=lock.origins), BASE, None)
    other = content_hash(replace(TARGET, origins=(("torch", "lab"),)), BASE, None)
    assert len({content_hash(TARGET, BASE, None), named, other}) == 3


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
    "empty": (lambda t: "", 1, "'# imagefactory lock ...'"),
    "other format": (
        lambda t: t.replace("lock 1\n", "lock 2\n", 1),
        1,
        "format 2",
    ),
    "no target": (lambda t: t.replace("# target: pytorch-2.3-cu121\n", "", 1), 2, "'# target: ...'"),
    "target leaves its folder": (
        lambda t: t.replace("# target: pytorch", "# target: ../pytorch", 1),
        2,
        "'# target: ...'",
    ),
    "content hash": (lambda t: t.replace("sha256:", "md5:", 1), 3, "'# content-hash: ...'"),
    "python": (lambda t: t.replace("# python: 3.11", "# python: 3", 1), 4, "'# python: ...'"),
    "platform": (lambda t: t.replace("# platform: many", "# platform: musl", 1), 5, "'# platform"),
    "solver": (lambda t: t.replace("uv 0.9.1", "uv\x1b[31m", 1), 6, "'# solver: ...'"),
    "remake names another": (
        lambda t: t.replace("anew: imagefactory lock pytorch", "anew: imagefactory lock other"),
        8,
        "'pytorch-2.3-cu121'",
    ),
    "count": (lambda t: t.replace("packages: 3", "packages: 4"), 15, "found 3"),
    "cut at a package": (lambda t: "\n".join(t.split("\n")[:-3]) + "\n", 13, "found 2"),
    "cut in a pair": (lambda t: "\n".join(t.split("\n")[:-2]) + "\n", 14, "'name==version"),
    "cut in a line": (lambda t: t[:-9], 14, "last line"),
    "carriage returns": (lambda t: t.replace("\n", "\r\n"), 1, "expected"),
    "blank line": (lambda t: t.replace("# wheel: torch", "\n# wheel: torch"), 13, "'# wheel:"),
    "sdist": (
        lambda t: re.sub(r"torch-2.3.1\S+\.whl", "torch-2.3.1.tar.gz", t),
        13,
        "source distribution",
    ),
    "no size": (lambda t: t.replace(" 779156414", ""), 13, "'# wheel: FILE.whl BYTES'"),
    "size nought": (lambda t: t.replace(" 779156414", " 0"), 13, "'# wheel:"),
    "path": (lambda t: t.replace("wheel: torch", "wheel: ../torch"), 13, "'# wheel:"),
    "short hash": (lambda t: t[:-2] + "\n", 14, "64 hex"),
    "upper-case hash": (lambda t: t[:-66] + t[-66:].upper(), 14, "'name==version"),
    "md5": (lambda t: t[:-72] + t[-72:].replace("sha256", "md5"), 14, "'name==version"),
    "two hashes": (lambda t: t[:-1] + " --hash=sha256:" + "0" * 64 + "\n", 14, "'name==version"),
    "address": (
        lambda t: t.replace("torch==2.3.1 ", "torch @ http://x.invalid/torch.whl "),
        14,
        "'name==version",
    ),
    "option": (lambda t: t.replace("torch==2.3.1 ", "--index-url=http://x.invalid/ "), 14, "'name"),
    "name not normalised": (lambda t: t.replace("torch==", "Torch=="), 14, "'name==version"),
    "other version": (lambda t: t.replace("torch==2.3.1", "torch==2.3.2"), 13, "torch 2.3.2"),
    "no version": (lambda t: t.replace("torch==2.3.1", "torch==2.x.!"), 13, "Invalid version"),
    "other name": (lambda t: t.replace("torch==2.3.1", "zorch==2.3.1"), 13, "zorch 2.3.1"),
    "not a wheel's name": (
        lambda t: t.replace("cp311-manylinux1_x86_64.whl", "cp311.whl"),
        13,
        "'torch-2.3.1-cp311-cp311.whl'",
    ),
    "other python": (
        lambda t: t.replace("torch-2.3.1-cp311-cp311", "torch-2.3.1-cp312-cp312"),
        13,
        "Python 3.11",
    ),
    "newer glibc": (
        lambda t: t.replace("cp311-manylinux1_x86_64", "cp311-manylinux_2_39_x86_64"),
        13,
        "manylinux_2_36_x86_64",
    ),
    "other machine": (
        lambda t: t.replace("cp311-manylinux1_x86_64", "cp311-manylinux_2_17_aarch64"),
        13,
        "manylinux_2_17_aarch64",
    ),
    "twice": (lambda t: t + "".join(t.splitlines(keepends=True)[-2:]), 16, "'torch'"),
    "unsorted": (
        lambda t: t + "".join(t.splitlines(keepends=True)[8:10]),
        16,
        "'numpy'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_malformed_lock_is_refused_by_file_and_line(name: str) -> None:
    spoil, line, what = FAULTS[name]
    text = format_lock(LOCK)
    assert spoil(text) != text
    with fails("lock-malformed") as caught:
        parse_lock(spoil(text), "lockfiles/x.requirements.txt")
    assert caught.value.message.startswith(f"lockfiles/x.requirements.txt:{line}: ")
    assert what in caught.value.message
    assert caught.value.hint.startswith("run imagefactory lock ")
    assert caught.value.exit_code == 5


@given(data=st.data())
def test_a_lock_with_one_character_changed_is_refused_or_reads_as_it_is_written(data: st.DataObject) -> None:
    publishers = ((LOCK.wheels[0].name, "GitHub a/b c.yml, Google a@b.example"),)
    text = format_lock(replace(LOCK, publishers=publishers))
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
    with fails("lock-missing") as caught:
        read_lock(path)
    assert str(path) in caught.value.message
    assert caught.value.hint == "run imagefactory lock pytorch-2.3-cu121"
    write_lock(path.parent, LOCK)
    write_lock(path.parent, LOCK)
    assert read_lock(path) == LOCK
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_bytes(format_lock(LOCK).encode() + b"\xff")
    with fails("lock-malformed", message=f"{path}:15: "):
        read_lock(path)


def test_tags_are_those_of_an_installer() -> None:
    old = {str(tag) for tag in fitting_tags("3.7", "manylinux_2_36_x86_64")}
    assert "cp37-cp37m-manylinux1_x86_64" in old
    best = [str(tag) for tag in fitting_tags("3.11", "manylinux_2_36_x86_64")]
    assert best[0] == "cp311-cp311-manylinux_2_36_x86_64"
    assert best[-1] == "py30-none-any"
    for fits in ("cp38-abi3-manylinux2014_x86_64", "py3-none-manylinux1_x86_64", "cp311-none-any"):
        assert fits in best
    for other in ("cp311-cp311-musllinux_1_2_x86_64", "cp311-cp311t-manylinux_2_17_x86_64", "cp312-abi3-any"):
        assert other not in best


# --- staleness and facts -------------------------------------------------------------------------


def hashed(target: Target, base: BaseSpec = BASE) -> str:
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
        {"exclude": ("numpy",)},
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
        {"where": SourceLocation(file="x", line=1, column=1)},
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
    jax, runtime = wheel("jax", "0.4.26"), wheel("nvidia-cuda-runtime-cu12", "12.1.105")
    for plugin in (wheel("jax-cuda12-plugin", "0.4.26"), wheel("jaxlib", "0.4.26+cuda12.cudnn89")):
        check_facts(with_wheels(jax, runtime, plugin), replace(TARGET, framework="jax", version="0.4.26"))


@pytest.mark.parametrize(
    ("lock", "changed", "code", "values", "hint"),
    [
        (
            LOCK,
            {"cuda": "12.4"},
            "cuda-version-mismatch",
            ("torch 2.3.1", "CUDA 12.1", "nvidia-cuda-runtime-cu12 12.1.105", "12.4"),
            'write cuda: ["12.1"] at recipes/pytorch.yaml:7:5',
        ),
        (LOCK, {"cuda": "1"}, "cuda-version-mismatch", ("CUDA 12.1",), "write cuda"),
        (LOCK, {"version": "2.4"}, "framework-version-mismatch", ("torch 2.3.1", "2.4"), "recipes/pytorch"),
        (LOCK, {"version": "2.30"}, "framework-version-mismatch", ("2.30",), "recipes/pytorch"),
        (LOCK, {"framework": "jax"}, "framework-not-locked", ("'jax'",), "imagefactory lock"),
        (
            with_wheels(wheel("jax", "0.4.26"), wheel("nvidia-cuda-runtime-cu12", "12.1.105")),
            {"framework": "jax", "version": "0.4.26"},
            "cuda-plugin-missing",
            ("jax 0.4.26",),
            "extras: [cuda12]",
        ),
        (with_wheels(TORCH), {}, "cuda-missing", ("torch 2.3.1",), "nvidia-cuda-runtime"),
        (
            with_wheels(
                TORCH, wheel("nvidia-cuda-runtime-cu12", "12.1.105"), wheel("nvidia-cuda-runtime", "13.0.96")
            ),
            {},
            "cuda-runtime-conflict",
            ("nvidia-cuda-runtime-cu12 12.1.105", "nvidia-cuda-runtime 13.0.96"),
            "constrain",
        ),
    ],
)
def test_facts_that_do_not(
    lock: Lock, changed: dict[str, str], code: str, values: tuple[str, ...], hint: str
) -> None:
    with fails(code) as caught:
        check_facts(lock, replace(TARGET, **changed))  # type: ignore[arg-type]
    assert all(value in caught.value.message for value in values)
    assert hint in caught.value.hint


# --- which index ---------------------------------------------------------------------------------

UNSET = SettingValue(value="", origin="default")


def index_of(tmp_path: Path, environ: dict[str, str], setting: SettingValue = UNSET) -> PackageIndex:
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

    ours = SettingValue(value="http://ours.invalid/simple", origin="$IMAGEFACTORY_INDEX")
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
    with fails("pip-config-invalid") as caught:
        index_of(tmp_path, {"PIP_CONFIG_FILE": str(named)})
    assert str(named) in caught.value.message


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
    with fails("certificate-file-missing", message="gone.pem ($PIP_CERT)"):
        index_of(tmp_path, {"PIP_CERT": str(tmp_path / "gone.pem")})


def test_messages_hold_no_secrets() -> None:
    text = redact("at https://bob:hunter2@x.invalid/simple/a.whl?token=canary#f (https://tok@y.invalid/)")
    assert text == "at https://x.invalid/simple/a.whl (https://y.invalid/)"


def test_a_target_for_cpus_has_nothing_of_cuda() -> None:
    target = replace(TARGET, cuda="none", capabilities=())
    plain = [wheel for wheel in LOCK.wheels if not wheel.name.startswith("nvidia-")]
    asks_a_driver = replace(plain[0], name="nvidia-ml-py")
    check_facts(replace(LOCK, wheels=(*plain, asks_a_driver)), target)
    with fails("gpu-package-unwanted", message="cuda: [none]"):
        check_facts(LOCK, target)
    plugin = replace(plain[0], name="jax-cuda12-plugin")
    with fails("gpu-package-unwanted", message="jax-cuda12-plugin"):
        check_facts(replace(LOCK, wheels=(*plain, plugin)), target)


@pytest.mark.parametrize(
    ("name", "version", "rocm"),
    [
        ("jax-rocm7-plugin", "0.10.2", "7"),
        ("jax-rocm60-pjrt", "0.5.0", "6.0"),
        ("cupy-rocm-7-0", "14.2.0", "7.0"),
        ("torch", "2.9.1+rocm6.4", "6.4"),
        ("tensorflow-rocm", "2.14.0.600", "6.0"),
        ("onnxruntime-migraphx", "1.27.1", ""),
    ],
)
def test_wheels_say_which_rocm_they_are_built_for(name: str, version: str, rocm: str) -> None:
    wheel = replace(LOCK.wheels[0], name=name, version=version)
    assert rocm_builds(replace(LOCK, wheels=(wheel, replace(wheel, name="numpy", version="2.0")))) == (
        (wheel, rocm),
    )


def test_a_version_of_two_numbers_is_that_of_three() -> None:
    wheels = tuple(replace(wheel, version="2.3") if wheel.name == "torch" else wheel for wheel in LOCK.wheels)
    check_facts(replace(LOCK, wheels=wheels), replace(TARGET, version="2.3.0"))
    with fails("framework-version-mismatch"):
        check_facts(replace(LOCK, wheels=wheels), replace(TARGET, version="2.3.1"))


def test_a_target_for_amd_has_nothing_of_cuda_and_its_own_rocm() -> None:
    target = replace(TARGET, cuda="rocm7", capabilities=("gfx90a",))
    plain = tuple(wheel for wheel in LOCK.wheels if not wheel.name.startswith("nvidia-"))
    with fails("gpu-package-unwanted", message="rocm: [7]") as caught:
        check_facts(LOCK, target)
    with fails("rocm-missing") as caught:
        check_facts(replace(LOCK, wheels=plain), target)
    plugin = replace(plain[0], name="jax-rocm7-plugin", version="0.10.2")
    check_facts(replace(LOCK, wheels=(*plain, plugin)), target)
    for asked in ("rocm7.0", "rocm6.4"):
        with fails("rocm-version-mismatch", message="ROCm 7") as caught:
            check_facts(replace(LOCK, wheels=(*plain, plugin)), replace(target, cuda=asked))
        assert asked.removeprefix("rocm") in caught.value.message
        assert 'write rocm: ["7"] at' in caught.value.hint


def test_a_lock_keeps_its_cutoff_and_no_other_spelling_of_it() -> None:
    cutoff = ReleaseCutoff(time=datetime(2026, 11, 21, 4, 5, 6, tzinfo=UTC), allowed=("numpy", "torch"))
    lock = replace(LOCK, cutoff=cutoff)
    text = format_lock(lock)
    assert "\n# exclude-newer: 2026-11-21T04:05:06Z except numpy, torch\n# wheel: " in text
    assert parse_lock(text, "x") == lock
    for wrong in ("2026-11-21", "7 days", "2026-13-21T04:05:06Z", "2026-11-21T04:05:06Z except Torch"):
        with fails("lock-malformed", message="x:9: "):
            parse_lock(text.replace("2026-11-21T04:05:06Z except numpy, torch", wrong), "x")
