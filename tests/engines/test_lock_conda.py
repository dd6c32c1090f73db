"""Locks from real records of conda-forge, pytorch and nvidia ($FACTORY_TEST_CHANNELS).

The records are a trimmed copy: what solves here solves with the channels, though with other picks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from imagefactory.errors import UnsolvableError
from imagefactory.extras.importers.draft import DraftRequest, draft
from imagefactory.extras.importers.environments import ReadOptions, parse_environment_file
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.facts import cuda_version
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.conda.solver import CondaSolver, first_question, name_of, run
from imagefactory.lock.files import format_lock_files, read_lock, write_lock
from imagefactory.model import Lock, Target
from imagefactory.progress import QuietProgress
from imagefactory.recipes.edit import check_draft
from imagefactory.recipes.read import read_bases
from imagefactory.recipes.values import CHANNEL_ROOT, channel_address
from tests.made.errors import fails
from tests.made.lock_checker import Record, check_lock, moved, read_records
from tests.made.solving import BASE, no_pip, pins
from tests.made.solving import target as tiny
from tests.services.channels import ChannelServer, Fault, channel_server, real_folder

ROOT = Path(__file__).parents[2]
FORGE = ("conda-forge",)
PYTORCH = ("pytorch", "nvidia", "conda-forge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A recipe's row: framework and version, CUDA, Python, requirements, channels."""

    framework: str
    version: str
    cuda: str
    python: str
    requirements: tuple[str, ...]
    channels: tuple[str, ...] = FORGE

    @property
    def target(self) -> Target:
        return tiny(
            *self.requirements,
            name=f"{self.framework}-{self.version}-cu{self.cuda.replace('.', '')}",
            framework=self.framework,
            version=self.version,
            cuda=self.cuda,
            python=self.python,
            channels=tuple(channel_address(channel) for channel in self.channels),
            virtual=(("__archspec", "x86_64"), ("__cuda", self.cuda), ("__glibc", "2.36")),
        )

    def __str__(self) -> str:
        return f"{self.channels[0]} {self.framework} {self.version} cu{self.cuda}"


def pytorch_row(version: str, cuda: str, python: str) -> Row:
    wanted = (f"pytorch {version}.*", f"pytorch-cuda {cuda}.*")
    return Row(
        framework="pytorch", version=version, cuda=cuda, python=python, requirements=wanted, channels=PYTORCH
    )


def forge_row(framework: str, version: str, cuda: str, python: str) -> Row:
    wanted = (f"{framework} {version}.* *cuda*", f"cuda-version {cuda}.*")
    return Row(framework=framework, version=version, cuda=cuda, python=python, requirements=wanted)


ROWS = (
    pytorch_row("1.13", "11.7", "3.10"),
    pytorch_row("2.1", "12.1", "3.11"),
    pytorch_row("2.3", "12.1", "3.11"),
    pytorch_row("2.5", "12.1", "3.11"),
    pytorch_row("2.5", "12.4", "3.12"),
    forge_row("pytorch", "2.3", "12.9", "3.12"),
    forge_row("pytorch", "2.4", "12.6", "3.12"),
    forge_row("pytorch", "2.6", "12.6", "3.12"),
    forge_row("pytorch", "2.7", "12.8", "3.13"),
    forge_row("pytorch", "2.10", "12.9", "3.11"),
    forge_row("tensorflow", "2.12", "11.8", "3.10"),
    forge_row("tensorflow", "2.16", "12.9", "3.11"),
    forge_row("tensorflow", "2.17", "12.9", "3.10"),
    forge_row("tensorflow", "2.18", "12.6", "3.11"),
    forge_row("jaxlib", "0.4.31", "12.9", "3.12"),
    forge_row("jaxlib", "0.5", "12.6", "3.10"),
    forge_row("jaxlib", "0.7", "12.9", "3.11"),
)
MAIN = pytorch_row("2.3", "12.1", "3.11").target

PROJECTS = (
    # CHTC/templates-GPUs, containers/pixi: MNIST on HTCondor's GPUs
    Row(
        framework="pytorch-gpu",
        version="2",
        cuda="12.9",
        python="3.13",
        requirements=("pytorch-gpu >=2.9.1,<3", "torchvision >=0.24.1,<0.25", "cuda-version 12.9.*"),
    ),
    # matthewfeickert/nvidia-gpu-ml-library-test, environment gpu-jax
    Row(
        framework="jaxlib",
        version="0.7",
        cuda="12.9",
        python="3.13",
        requirements=("jaxlib * *cuda*", "jax >=0.7.0,<0.8", "cuda-version 12.9.*", "time >=1.9,<2"),
    ),
    # 1235467/diff-svc: singing voices, with a compiler's tools beside PyTorch
    Row(
        framework="pytorch-gpu",
        version="2",
        cuda="12.9",
        python="3.14",
        requirements=(
            "pytorch-gpu",
            "torchaudio >=2.10.0,<3",
            "cmake >=4.2.3,<5",
            "make >=4.4.1,<5",
            "setuptools >=70.0.0,<72",
        ),
    ),
)


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """Address -> record of all three channels, as they are on the disk."""
    return read_records(real_folder(), [channel_address(name) for name in PYTORCH])


@pytest.fixture(scope="module")
def locker(real_channels: ChannelServer, tmp_path_factory: pytest.TempPathFactory) -> CondaLocker:
    channels = find_channels(f"{CHANNEL_ROOT}={real_channels.url}", {}, "")
    return CondaLocker(channels, tmp_path_factory.mktemp("cache"), no_pip)


@pytest.fixture(scope="module")
def main(locker: CondaLocker) -> Lock:
    return lock(locker, MAIN)


def lock(locker: CondaLocker, target: Target, previous: Lock | None = None, *update: str) -> Lock:
    return locker.lock(
        LockRequest(target=target, base=BASE, previous=previous, update=update), QuietProgress()
    )


def faults(found: Lock, target: Target, records: Mapping[str, Record]) -> list[str]:
    """What the independent checker says, with the records of the target's channels alone."""
    own = {url: row for url, row in records.items() if url.rsplit("/", 2)[0] in target.channels}
    return check_lock(found, target, own)


# --- what must solve -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*ROWS, *PROJECTS], ids=str)
def test_it_locks_and_holds(
    row: Row, locker: CondaLocker, records: dict[str, Record], tmp_path: Path
) -> None:
    target = row.target
    found = lock(locker, target)
    assert faults(found, target, records) == []
    assert cuda_version(found) == row.cuda
    assert len(found.conda) > 50
    assert {package.url.rsplit("/", 2)[0] for package in found.conda} <= set(target.channels)
    assert all(package.size and package.sha256 and package.md5 for package in found.conda)
    write_lock(tmp_path, found)
    assert read_lock(tmp_path, target) == found
    assert lock(locker, target) == found


@pytest.mark.parametrize("name", ["pytorch-conda-2.3-cu121", "jax-conda-0.4.31-cu12"])
def test_a_lock_that_is_imported_locks_to_its_own_packages(name: str, locker: CondaLocker) -> None:
    """The draft of a conda-lock file keeps versions, channels and the builds that are variants."""
    path = ROOT / "lockfiles" / f"{name}.conda-lock.yml"
    spec = parse_environment_file(path.read_text(), path.name, ReadOptions(pythons=("3.11",)))
    bases = read_bases(ROOT / "recipes")
    made = draft(spec, DraftRequest(family="lab"), bases)
    (target,) = check_draft(made.text, "lab", [], bases)
    before = {Path(row["url"]).name for row in yaml.safe_load(path.read_text())["package"]}
    assert {one.filename for one in lock(locker, target).conda} == before


PROJECTS_FILES = {
    # facebookresearch/dinov2 conda.yaml, vwxyzjn/cleanrl, as far as the records have their packages
    "channels: [defaults, pytorch, nvidia, conda-forge]\ndependencies: [python=3.11, "
    "'pytorch::pytorch=2.3.1', 'pytorch::pytorch-cuda=12.1', 'pytorch::torchvision=0.18.1', pip]\n": (
        "pytorch",
        "2.3.1",
        "py3.11_cuda12.1_cudnn8.9.2_0",
    ),
    # RosettaCommons/RFdiffusion env/SE3nv.yml with newer packages: channels without conda's defaults
    "channels: [defaults, pytorch, nvidia]\ndependencies: [python=3.11, pytorch=2.3, torchvision, "
    "pytorch-cuda=12.1, numpy]\n": ("pytorch", "2.3.1", "py3.11_cuda12.1_cudnn8.9.2_0"),
}


@pytest.mark.parametrize(("text", "expected"), PROJECTS_FILES.items())
def test_an_environment_keeps_its_framework_s_channel(
    text: str, expected: tuple[str, str, str], locker: CondaLocker
) -> None:
    bases = read_bases(ROOT / "recipes")
    spec = parse_environment_file(text, "environment.yml", ReadOptions(pythons=("3.11",)))
    (target,) = check_draft(draft(spec, DraftRequest(family="lab"), bases).text, "lab", [], bases)
    assert expected in {(one.name, one.version, one.build) for one in lock(locker, target).conda}


def test_a_label_of_nvidia_solves_and_is_refused_for_its_missing_hashes(locker: CondaLocker) -> None:
    """pytorch 2.2 with CUDA 11.8: what it needs is in NVIDIA's label alone, which gives md5 and no sha256."""
    channels = ("pytorch", "nvidia/label/cuda-11.8.0", "conda-forge")
    target = replace(pytorch_row("2.2", "11.8", "3.11"), channels=channels).target
    solver = CondaSolver(target, locker._channels, locker._channels.gateway(locker._cache))
    found = {name_of(record): record for record in run(solver.solve(first_question(target)))}
    assert str(found["pytorch"].build) == "py3.11_cuda11.8_cudnn8.7.0_0"
    assert str(found["cuda-cudart"].version) == "11.8.89"
    with fails(
        "hash-not-published", message=("nvidia/label/cuda-11.8.0", "cuda-cudart-11.8.89"), hint="sha256"
    ):
        lock(locker, target)


def test_conda_forge_first_or_without_priority(locker: CondaLocker, records: dict[str, Record]) -> None:
    row = replace(forge_row("pytorch", "2.7", "12.6", "3.12"), channels=("conda-forge", "pytorch", "nvidia"))
    for target in (row.target, replace(row.target, priority="disabled")):
        found = lock(locker, target)
        assert faults(found, target, records) == []


def test_this_machines_driver_is_not_asked(
    main: Lock, real_channels: ChannelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CUDA": "99", "GLIBC": "2.0", "ARCHSPEC": "zen4"}.items():
        monkeypatch.setenv(f"CONDA_OVERRIDE_{name}", value)
    channels = find_channels(f"{CHANNEL_ROOT}={real_channels.url}", {}, "")
    assert lock(CondaLocker(channels, tmp_path, no_pip), MAIN) == main


# --- what moves ----------------------------------------------------------------------------------


def test_an_update_of_real_packages(locker: CondaLocker, records: dict[str, Record]) -> None:
    """From a lock with an older numpy, jinja2 and OpenSSL, each moves alone."""
    old = ("numpy 1.24.*", "jinja2 3.1.5", "openssl <3.5")
    before = lock(locker, replace(MAIN, requirements=(*MAIN.requirements, *old)))
    loose = replace(MAIN, requirements=(*MAIN.requirements, "numpy", "jinja2", "openssl"))
    kept = lock(locker, loose, before)
    assert moved(before.conda, kept.conda) == {}
    for name in ("numpy", "jinja2", "openssl"):
        after = lock(locker, loose, kept, name)
        assert set(moved(kept.conda, after.conda)) == {name}
        assert faults(after, loose, records) == []


def test_python_stays_when_everything_else_may_move(main: Lock, locker: CondaLocker) -> None:
    request = LockRequest(target=MAIN, base=BASE, previous=main, update_all=True)
    assert locker.lock(request, QuietProgress()) == main
    for name in ("python", "libblas", "mkl", "cuda-cudart"):
        after = lock(locker, MAIN, main, name)
        assert set(moved(main.conda, after.conda)) <= {name}


def test_a_target_on_another_keeps_its_files(
    main: Lock, locker: CondaLocker, records: dict[str, Record]
) -> None:
    wanted = (*MAIN.requirements, "scikit-learn", "pandas <3")
    target = replace(MAIN, name="more-2.3-cu121", on=MAIN.name, requirements=wanted)
    found = locker.lock(LockRequest(target=target, base=BASE, under=main), QuietProgress())
    assert set(main.conda) < set(found.conda)
    assert {"scikit-learn", "pandas"} <= set(pins(found))
    assert faults(found, target, records) == []


# --- what must not solve -------------------------------------------------------------------------


def why(locker: CondaLocker, target: Target) -> UnsolvableError:
    with pytest.raises(UnsolvableError) as caught:
        lock(locker, target)
    assert "127.0.0.1" not in caught.value.message + caught.value.tree
    return caught.value


def test_pytorch_gpu_without_a_driver(locker: CondaLocker) -> None:
    row = Row(
        framework="pytorch-gpu",
        version="2.6",
        cuda="12.6",
        python="3.12",
        requirements=("pytorch-gpu 2.6.*", "cuda-version 12.6.*"),
    )
    assert lock(locker, row.target).conda
    without = replace(row.target, virtual=(("__archspec", "x86_64"), ("__glibc", "2.36")))
    error = why(locker, without)
    assert error.code == "virtual-package-missing"
    assert all(value in error.message for value in ("CUDA 12 ", "525.60.13", "__cuda", "none"))
    assert 'write `virtual: {cuda: "12.0"}`' in error.hint
    error = why(locker, replace(row.target, virtual=(("__cuda", "11.8"), ("__glibc", "2.36"))))
    assert error.code == "virtual-package-missing"
    assert error.message.endswith("11.8")
    error = why(locker, replace(row.target, virtual=(("__cuda", "12.6"), ("__glibc", "2.12"))))
    assert error.code == "virtual-package-missing"
    assert all(value in error.message for value in ("glibc 2.28", "__glibc", "2.12"))


@pytest.mark.parametrize(
    ("changed", "code", "value", "hint"),
    [
        ({"python": "3.13"}, "python-not-available", "`pytorch 2.3.*`", "3.8, 3.9, 3.10, 3.11"),
        ({"requirements": ("pytorch 2.3.*", "numppy")}, "package-not-in-channel", "'numppy'", "'numpy'"),
        (
            {"requirements": ("pytorch 2.6.*", "pytorch-cuda 12.1.*")},
            "channel-priority-conflict",
            "pytorch 2.6.0",
            "channel-priority: disabled",
        ),
        ({"requirements": ("pytorch 2.99.*",)}, "package-version-not-found", "2.5.1", "change"),
        (
            {"requirements": (*MAIN.requirements, "networkx >=3.6", "numpy 1.24.*")},
            "requirements-conflict",
            "`networkx >=3.6` and `numpy 1.24.*`",
            "networkx 3.4.2 ",
        ),
    ],
)
def test_why_not(locker: CondaLocker, changed: dict[str, str], code: str, value: str, hint: str) -> None:
    error = why(locker, replace(MAIN, **changed))  # type: ignore[arg-type]
    assert error.code == code
    assert value in error.message
    assert hint in error.hint
    assert len(error.message.splitlines()) < 15


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "values"),
    [
        (Fault(status=401), "channel-access-denied", ("https://conda.anaconda.org/nvidia ", "401")),
        (Fault(status=404), "channel-not-found", ("https://conda.anaconda.org/nvidia ", "404")),
        (Fault(status=503), "channel-unreachable", ("https://conda.anaconda.org/nvidia ", "503")),
        (Fault(cut="connection"), "channel-unreachable", ("end of file",)),
        (Fault(cut="file"), "channel-unreachable", ("zstd stream",)),
    ],
)
def test_a_faulty_channel_is_told_and_the_next_run_is_whole(
    main: Lock, tmp_path: Path, fault: Fault, code: str, values: tuple[str, ...]
) -> None:
    with channel_server(real_folder()) as server:
        channels = replace(find_channels(f"{CHANNEL_ROOT}={server.url}", {}, ""), retries=1)
        server.fail(r"/nvidia/(linux-64|noarch)/repodata\.json", fault)
        with fails(code) as caught:
            lock(CondaLocker(channels, tmp_path, no_pip), MAIN)
        assert all(value in caught.value.message for value in values)
        assert caught.value.exit_code == 5
        assert not isinstance(caught.value, UnsolvableError)
        server.mend()
        assert lock(CondaLocker(channels, tmp_path, no_pip), MAIN) == main


def test_a_server_that_goes_down_in_the_middle(main: Lock, tmp_path: Path) -> None:
    with channel_server(real_folder()) as server:
        channels = replace(find_channels(f"{CHANNEL_ROOT}={server.url}", {}, ""), retries=1)
        server.ends_after = 20
        with fails("channel-unreachable", message="connection closed"):
            lock(CondaLocker(channels, tmp_path, no_pip), MAIN)
        server.mend()
        assert lock(CondaLocker(channels, tmp_path, no_pip), MAIN) == main


def test_faults_that_pass_are_borne(main: Lock, tmp_path: Path) -> None:
    with channel_server(real_folder()) as server:
        server.fail("nvidia/linux-64/repodata.json", Fault(status=503, times=1))
        server.fail("pytorch/linux-64/repodata.json.zst", Fault(cut="connection", times=1))
        server.fail("conda-forge/noarch/repodata.json.zst", Fault(drop=True, times=1))
        channels = find_channels(f"{CHANNEL_ROOT}={server.url}", {}, "")
        assert lock(CondaLocker(channels, tmp_path, no_pip), MAIN) == main


FAILING = """
import sys
from pathlib import Path
from imagefactory.errors import LockError
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock import LockRequest
from imagefactory.progress import QuietProgress
from tests.made.solving import BASE, no_pip, target
setting, cache = sys.argv[1:]
request = LockRequest(target=target(), base=BASE)
try:
    CondaLocker(find_channels(setting, {}, ""), Path(cache), no_pip).lock(request, QuietProgress())
except LockError as error:
    print(error.code)
    sys.exit(error.exit_code)
"""


def test_a_process_that_fails_ends_with_its_exit_code(real_channels: ChannelServer, tmp_path: Path) -> None:
    """rattler's threads may still want the interpreter when it ends; that must not kill the process."""
    setting = f"{CHANNEL_ROOT}={real_channels.url}/nothing"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(10):
        command = [sys.executable, "-c", FAILING, setting, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        assert (done.returncode, done.stderr) == (5, "")
        assert done.stdout == "channel-not-found\n"


def test_the_files_of_the_main_lock(main: Lock) -> None:
    texts = format_lock_files(main)
    assert set(texts) == {"conda-lock.yml"}
    assert "127.0.0.1" not in texts["conda-lock.yml"]
    assert pins(main)["pytorch"] == "2.3.1"
    assert main.conda[0].url.startswith("https://conda.anaconda.org/")


# --- what is far behind --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "told"),
    [
        # The first channel that has the name has an old one alone.
        (replace(pytorch_row("2.3", "12.1", "3.11"), requirements=("pytorch 2.3.*", "pillow")), "pillow"),
        # It goes with a framework that the recipe pins on purpose.
        (replace(ROWS[0], requirements=("pytorch 1.13.*", "pytorch-cuda 11.7.*", "torchvision")), ""),
    ],
    ids=["another channel", "the framework"],
)
def test_what_the_recipe_names_and_is_far_behind_is_told_with_the_reason(
    locker: CondaLocker, row: Row, told: str
) -> None:
    found = lock(locker, row.target)
    behind = locker.behind(LockRequest(target=row.target, base=BASE), found, QuietProgress())
    assert [one.name for one in behind] == [told] * bool(told)
    for one in behind:
        assert one.named
        assert "strict channel priority" in one.reason
        assert one.accept.startswith(f"{told}<")
