"""What the conda locker moves, keeps and says, on records made for each question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import UnsolvableError
from imagefactory.lock import LockRequest
from imagefactory.lock.changes import content_hash
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.explain import shortened
from imagefactory.lock.conda.facts import check_facts
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.conda.solver import virtual_packages
from imagefactory.model import Lock, ReleaseCutoff, Target
from imagefactory.progress import QuietProgress
from imagefactory.recipes.values import CHANNEL_ROOT
from tests.made.errors import fails
from tests.made.solving import BASE, SYSTEM, no_pip, pins, target
from tests.services.channels import record, write_channel

RUNTIME = (
    record("python", "3.11.8"),
    record("python", "3.11.9"),
    record("python", "3.12.3"),
    record("cuda-cudart", "12.1.105"),
    record("tiny", "1.0", "python >=3.11,<3.12.0a0", "cuda-cudart 12.1.*", build="cuda12.1_py311"),
)


class Site:
    """Channels in a folder, and a locker for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0

    def write(self, *records: Mapping[str, Any], channel: str = "conda-forge") -> None:
        write_channel(self.folder / channel, *records)

    @property
    def locker(self) -> CondaLocker:
        """A new one each time: one locker reads a channel once."""
        pairs = [f"{path.name}={path}" for path in self.folder.iterdir()]
        return CondaLocker(find_channels(",".join(pairs), {}, ""), self.folder.parent / "cache", no_pip)

    def lock(self, asked: Target, previous: Lock | None = None, *update: str, **more: Any) -> Lock:
        request = LockRequest(target=asked, base=BASE, previous=previous, update=update, **more)
        return self.locker.lock(request, QuietProgress())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "channels").mkdir()
    return Site(tmp_path / "channels")


# --- a lock --------------------------------------------------------------------------------------


def test_a_lock_says_what_was_solved_and_with_what(site: Site) -> None:
    site.write(*RUNTIME)
    lock = site.lock(target())
    assert pins(lock) == {"cuda-cudart": "12.1.105", "python": "3.11.9", "tiny": "1.0"}
    tiny = lock.conda[-1]
    assert tiny.url == f"{CHANNEL_ROOT}/conda-forge/linux-64/tiny-1.0-cuda12.1_py311.conda"
    assert (tiny.build, tiny.subdir, tiny.size) == ("cuda12.1_py311", "linux-64", 1000)
    assert tiny.depends == ("cuda-cudart 12.1.*", "python >=3.11,<3.12.0a0")
    assert lock.channels == (f"{CHANNEL_ROOT}/conda-forge",)
    assert (lock.virtual, lock.platform, lock.wheels) == (SYSTEM, "manylinux_2_36_x86_64", ())
    assert lock.content_hash == content_hash(target(), BASE, None)
    assert lock.solver.startswith("py-rattler 0.")
    assert site.lock(target()) == lock


def test_unchanged_solves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write(*RUNTIME)
    lock = site.lock(target())

    def asked(*_: object) -> None:
        raise AssertionError("solved")

    monkeypatch.setattr(CondaLocker, "_solve", asked)
    assert site.lock(target(), lock) == lock


def test_addresses_are_asked_at_the_mirror(site: Site) -> None:
    site.write(*RUNTIME)
    lock = site.lock(target())
    folder = (site.folder / "conda-forge/linux-64").as_uri()
    assert site.locker.addresses(lock)["python-3.11.9-0.conda"] == f"{folder}/python-3.11.9-0.conda"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("CUDA", "virtual-package-missing"),
        ("GLIBC", "requirements-conflict"),
        ("ARCHSPEC", "requirements-conflict"),
    ],
)
def test_this_machine_is_not_asked(site: Site, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> None:
    site.write(*RUNTIME, record("needs", "1", f"__{name.lower()} >=90"))
    monkeypatch.setenv(f"CONDA_OVERRIDE_{name}", "99.9")
    with fails(code) as caught:
        site.lock(target("tiny", "needs"))
    assert f"__{name.lower()}" in caught.value.message


def test_virtual_packages_are_the_targets_and_linux() -> None:
    assert virtual_packages(SYSTEM) == (
        ("__archspec", "1", "x86_64"),
        ("__cuda", "12.1", "0"),
        ("__glibc", "2.36", "0"),
        ("__linux", "0", "0"),
        ("__unix", "0", "0"),
    )


def test_a_record_without_a_hash_is_refused_by_name(site: Site) -> None:
    site.write(*RUNTIME, record("legacy", "1", sha256=None), record("older", "1", sha256=None))
    with fails(
        "hash-not-published",
        message=("https://conda.anaconda.org/conda-forge", "legacy-1-0.conda, older-1-0.conda"),
    ):
        site.lock(target("tiny", "legacy", "older"))


def test_a_size_that_the_record_lacks_is_asked(site: Site) -> None:
    site.write(*RUNTIME, record("unsized", "1", size=None))
    (site.folder / "conda-forge/linux-64/unsized-1-0.conda").write_bytes(b"12345")
    assert {one.name: one.size for one in site.lock(target("tiny", "unsized")).conda}["unsized"] == 5


def test_a_channel_of_one_package(site: Site) -> None:
    site.write(*RUNTIME, record("extra", "2"))
    site.write(record("extra", "1"), channel="lab")
    channels = (f"{CHANNEL_ROOT}/conda-forge", f"{CHANNEL_ROOT}/lab")
    lock = site.lock(target("tiny", "lab::extra", channels=channels))
    assert {one.name: one.url for one in lock.conda}[
        "extra"
    ] == f"{CHANNEL_ROOT}/lab/linux-64/extra-1-0.conda"


def test_addresses_that_are_written_in_other_ways(tmp_path: Path) -> None:
    """Blanks, and a host in capitals: the lock keeps what the recipe says."""
    (tmp_path / "my channels").mkdir()
    site = Site(tmp_path / "my channels")
    site.write(*RUNTIME)
    site.write(record("extra", "1"), channel="lab")
    channels = ("https://Conda.Example:443/conda-forge", f"{CHANNEL_ROOT}/lab")
    setting = f"https://Conda.Example:443={site.folder},lab={site.folder}/lab"
    locker = CondaLocker(find_channels(setting, {}, ""), tmp_path / "cache", no_pip)
    request = LockRequest(target=target("tiny", "extra", channels=channels), base=BASE)
    urls = {one.name: one.url for one in locker.lock(request, QuietProgress()).conda}
    assert urls["python"] == "https://Conda.Example:443/conda-forge/linux-64/python-3.11.9-0.conda"
    assert urls["extra"] == f"{CHANNEL_ROOT}/lab/linux-64/extra-1-0.conda"


def test_a_lock_must_hold_what_the_target_names(site: Site) -> None:
    site.write(*RUNTIME, record("tiny", "1.1", "python", build="cpu_py311"))
    with fails("cpu-build-locked", message="cpu_py311"):
        site.lock(target())


# --- what moves ----------------------------------------------------------------------------------

BEFORE = (*RUNTIME, record("lib", "1.0"), record("lib", "1.1"), record("tool", "1.0", "lib >=1", "helper"))
LATER = (*BEFORE, record("helper", "1"), record("helper", "2"), record("lib", "1.2"))


def test_what_is_added_leaves_the_rest_alone(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    lock = site.lock(target("tiny", "tool"))
    site.write(*LATER, record("more", "1", "lib"))
    after = site.lock(target("tiny", "tool", "more"), lock)
    assert pins(after) == {**pins(lock), "more": "1"}


def test_an_update_moves_the_package_alone(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    lock = site.lock(target("tiny", "tool"))
    site.write(*LATER)
    assert pins(site.lock(target("tiny", "tool"), lock, "helper")) == {**pins(lock), "helper": "2"}
    assert pins(site.lock(target("tiny", "tool"), lock, "HELPER")) == {**pins(lock), "helper": "2"}
    everything = site.lock(target("tiny", "tool"), lock, update_all=True)
    assert pins(everything) == {**pins(lock), "helper": "2", "lib": "1.2"}


def test_an_update_moves_what_it_must_and_no_further(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    lock = site.lock(target("tiny", "tool"))
    site.write(
        *LATER,
        record("lib", "1.3"),
        record("tool", "2.0", "lib >=1.2,<1.3", "helper", "brand-new"),
        record("brand-new", "1"),
    )
    after = site.lock(target("tiny", "tool"), lock, "tool")
    assert pins(after) == {**pins(lock), "tool": "2.0", "lib": "1.2", "brand-new": "1"}


def test_an_update_does_not_move_what_stands_on_it(site: Site) -> None:
    """`lib` 2 would need another `tool`; the newest that `tool` lives with is what that option means."""
    site.write(*RUNTIME, record("lib", "1.0"), record("tool", "1.0", "lib >=1,<2"))
    lock = site.lock(target("tiny", "tool"))
    site.write(
        *RUNTIME,
        *(record("lib", version) for version in ("1.0", "1.5", "2.0")),
        record("tool", "1.0", "lib >=1,<2"),
        record("tool", "0.9", "lib"),
        record("tool", "1.1", "lib >=2"),
    )
    assert pins(site.lock(target("tiny", "tool"), lock, "lib")) == {**pins(lock), "lib": "1.5"}


def test_where_nothing_else_is_newer_what_stands_on_it_goes_along_but_not_back(site: Site) -> None:
    site.write(*RUNTIME, record("lib", "1.0"), record("tool", "1.0", "lib ==1.0"))
    lock = site.lock(target("tiny", "tool"))
    old = (*RUNTIME, record("lib", "1.0"), record("lib", "2.0"), record("tool", "1.0", "lib ==1.0"))
    site.write(*old, record("tool", "0.9", "lib"))
    assert site.lock(target("tiny", "tool"), lock, "lib").conda == lock.conda
    site.write(*old, record("tool", "1.1", "lib >=2"))
    assert pins(site.lock(target("tiny", "tool"), lock, "lib")) == {**pins(lock), "lib": "2.0", "tool": "1.1"}


def test_a_newer_build_is_newer(site: Site) -> None:
    site.write(*RUNTIME, record("lib", "1.0", build="h1_0"))
    lock = site.lock(target("tiny", "lib"))
    later = (record("lib", "1.0", build="h1_0"), record("lib", "1.0", build="h2_1", build_number=1))
    site.write(*RUNTIME, *later, record("lib", "3", track_features="testing"))
    after = site.lock(target("tiny", "lib"), lock, "lib")
    assert {one.name: one.build for one in after.conda}["lib"] == "h2_1"


def test_what_a_changed_recipe_moves_is_the_least(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    lock = site.lock(target("tiny", "tool"))
    site.write(*LATER)
    after = site.lock(target("tiny", "tool", "lib <1.1"), lock)
    assert pins(after) == {**pins(lock), "lib": "1.0"}
    assert pins(site.lock(target("tiny", "tool"), after)) == pins(after)
    assert pins(site.lock(target("tiny"), lock)) == {
        name: pins(lock)[name] for name in ("cuda-cudart", "python", "tiny")
    }


def test_a_locked_package_that_is_gone(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    lock = site.lock(target("tiny", "tool"))
    left = [row for row in LATER if (row["name"], row["version"]) != ("lib", "1.1")]
    site.write(*left)
    with fails("locked-file-gone", message="lib-1.1-0.conda") as caught:
        site.lock(target("tiny", "tool"), lock, "helper")
    assert caught.value.hint == "run imagefactory lock tiny-1-cu121 --upgrade-package lib"
    assert pins(site.lock(target("tiny", "tool"), lock, "lib")) == {**pins(lock), "lib": "1.2"}
    changed = site.lock(target("tiny", "tool", "helper >1"), lock)  # it has to move all the same
    assert pins(changed) == {**pins(lock), "lib": "1.2", "helper": "2"}


def test_other_bytes_under_a_locked_name_are_not_that_package(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    lock = site.lock(target("tiny", "tool"))
    site.write(*LATER[:-3], record("helper", "1", sha256="0" * 64), record("helper", "2"))
    with fails("locked-file-gone", message="helper-1-0.conda"):
        site.lock(target("tiny", "tool"), lock, "lib")


def test_names_that_cannot_be_updated(site: Site) -> None:
    site.write(*RUNTIME)
    lock = site.lock(target())
    with fails("update-package-unknown", message="'pyhton'") as caught:
        site.lock(target(), lock, "pyhton")
    assert caught.value.hint == "did you mean 'python'?"
    with fails("update-package-unknown"):
        site.lock(target(), None, "python")


def test_an_update_of_one_and_of_all_is_one_of_all(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    lock = site.lock(target("tiny", "tool"))
    site.write(*LATER)
    everything = site.lock(target("tiny", "tool"), lock, "helper", update_all=True)
    assert pins(everything) == {**pins(lock), "helper": "2", "lib": "1.2"}


def test_a_package_is_named_as_pypi_spells_it(site: Site) -> None:
    site.write(*RUNTIME, record("typing_extensions", "1"))
    lock = site.lock(target("tiny", "typing_extensions"))
    site.write(*RUNTIME, record("typing_extensions", "1"), record("typing_extensions", "2"))
    after = site.lock(target("tiny", "typing_extensions"), lock, "Typing-Extensions")
    assert pins(after) == {**pins(lock), "typing_extensions": "2"}


def test_needs_that_are_written_in_other_ways(site: Site) -> None:
    """Without a blank and in capitals they are needs all the same, and move with an update."""
    before = (*RUNTIME, record("lib", "1"), record("tool", "1", "Lib>=1"))
    site.write(*before)
    lock = site.lock(target("tiny", "tool"))
    assert lock.conda[-1].depends == ("lib >=1",)
    site.write(*before, record("lib", "2"), record("tool", "2", "Lib>=2"))
    after = site.lock(target("tiny", "tool"), lock, "tool")
    assert pins(after) == {**pins(lock), "lib": "2", "tool": "2"}


def test_a_copy_of_a_channel_that_names_the_first_one_is_told(site: Site) -> None:
    """Indexes of anaconda.org say where their packages are, and so does a copy under another address."""
    site.write(*RUNTIME)
    for path in site.folder.glob("conda-forge/*/repodata.json"):
        data = json.loads(path.read_text())
        data["info"]["base_url"] = f"{CHANNEL_ROOT}/conda-forge/{path.parent.name}/"
        path.write_text(json.dumps(data))
    assert site.lock(target()).conda[-1].url.startswith(f"{CHANNEL_ROOT}/conda-forge/linux-64/")
    copy = (site.folder / "conda-forge").as_uri()
    with fails(
        "channel-address-mismatch", message=(copy, f"{CHANNEL_ROOT}/conda-forge/linux-64"), hint="'channels'"
    ):
        site.lock(target(channels=(copy,)))


# --- on a locked target --------------------------------------------------------------------------


def test_what_is_below_stays_file_by_file(site: Site) -> None:
    site.write(*BEFORE, record("helper", "1"))
    under = site.lock(target("tiny", "tool"))
    site.write(*LATER, record("more", "1", "lib"))
    asked = target("tiny", "tool", "more", name="more-1-cu121", on="tiny-1-cu121")
    lock = site.lock(asked, under=under)
    assert pins(lock) == {**pins(under), "more": "1"}
    assert set(under.conda) < set(lock.conda)
    assert lock.content_hash == content_hash(asked, BASE, under)
    again = site.lock(asked, lock, update_all=True, under=under)
    assert set(under.conda) < set(again.conda)
    with fails("package-from-parent") as caught:
        site.lock(asked, lock, "lib", under=under)
    assert "imagefactory lock tiny-1-cu121 --upgrade-package lib" in caught.value.hint


def test_what_is_below_stays_when_its_channel_says_something_else_of_it(site: Site) -> None:
    """Channels mend needs of packages that are there, and the package stays what it is."""
    site.write(*RUNTIME, record("lib", "1", "python"))
    under = site.lock(target("tiny", "lib"))
    site.write(*RUNTIME, record("lib", "1", "python <4"), record("more", "1"))
    asked = target("tiny", "lib", "more", name="more-1-cu121", on="tiny-1-cu121")
    assert set(under.conda) < set(site.lock(asked, under=under).conda)


def test_what_does_not_go_with_what_is_below(site: Site) -> None:
    site.write(
        *BEFORE,
        record("helper", "1"),
        record("more", "1", "lib >=1.2"),
        record("lib", "1.2"),
        build_of_lib := record("more", "0.1", "lib >=1.2"),
    )
    assert build_of_lib["version"] == "0.1"
    under = site.lock(target("tiny", "tool", "lib 1.1.*"))
    asked = target("tiny", "tool", "more", name="more-1-cu121", on="tiny-1-cu121")
    with fails("requirements-conflict", message="`more` and what tiny-1-cu121 has (lib ==1.1 0)"):
        site.lock(asked, under=under)


def test_what_is_below_is_gone(site: Site) -> None:
    site.write(*RUNTIME, record("lib", "1"))
    under = site.lock(target("tiny", "lib"))
    site.write(*RUNTIME, record("lib", "2"))
    with fails("locked-file-gone") as caught:
        site.lock(target("tiny", "lib", on="tiny-1-cu121", name="more-1-cu121"), under=under)
    assert caught.value.hint == "run imagefactory lock tiny-1-cu121 --upgrade-package lib"


# --- why not -------------------------------------------------------------------------------------


def why(site: Site, *requirements: str, **more: Any) -> UnsolvableError:
    with pytest.raises(UnsolvableError) as caught:
        site.lock(target(*requirements, **more))
    assert caught.value.tree
    assert caught.value.message.startswith("tiny-1-cu121: ")
    assert caught.value.exit_code == 5
    return caught.value


def test_a_package_that_nobody_has(site: Site) -> None:
    site.write(*RUNTIME, record("numpy", "1"), record("pytorch", "2"))
    error = why(site, "tiny", "numppy")
    assert error.code == "package-not-in-channel"
    assert "'numppy'" in error.message
    assert "'numpy'" in error.hint
    error = why(site, "tiny", "torch", "zzzzzz")
    assert error.code == "package-not-in-channel"
    assert "'torch' and 'zzzzzz'" in error.message
    assert "'pytorch'" in error.hint
    assert "'zzzzzz'" in error.hint
    assert "recipes/tiny.yaml:7:3" in why(site, "tiny", "zzzzzz").hint


@pytest.mark.parametrize(("name", "alike"), [("xformers", "transformers"), ("biopython", "ipython")])
def test_another_program_with_a_name_that_is_alike_is_not_proposed(site: Site, name: str, alike: str) -> None:
    site.write(*RUNTIME, record(alike, "1"))
    hint = why(site, "tiny", name).hint
    assert f"'{alike}'" not in hint
    assert f"'{name}'" in hint


def test_a_version_or_build_that_nobody_has(site: Site) -> None:
    builds = [record("numpy", "1.26", build=f"{kind}_py311h1234567_0") for kind in ("cuda", "cpu")]
    site.write(*RUNTIME, *builds, record("numpy", "2.0"))
    for text, versions in (("numpy 1.99.*", "1.26"), ("numpy >=7", "2.0, 1.26")):
        error = why(site, "tiny", text)
        assert error.code == "package-version-not-found"
        assert f"`{text}`" in error.message
        assert error.message.endswith(f"; it has {versions}")
    error = why(site, "tiny", "numpy 1.26.* *rocm*")
    assert error.code == "package-build-not-found"
    assert "`numpy 1.26.* *rocm*`" in error.message
    assert error.message.endswith("cpu, cuda")


@pytest.mark.parametrize(
    ("depends", "system", "values", "hint"),
    [
        (
            "__cuda >=12.4",
            SYSTEM,
            ("CUDA 12.4", "550.54.14", "__cuda", "12.1"),
            'cuda: "12.4"',
        ),
        ("__cuda", SYSTEM[:1], ("NVIDIA driver", "__cuda", "none"), 'cuda: "12.1"'),
        (
            "__glibc >=2.38,<3",
            SYSTEM,
            ("glibc 2.38", "__glibc", "2.36"),
            'glibc: "2.38"',
        ),
        (
            "__archspec 1 x86_64_v3",
            SYSTEM,
            ("x86_64_v3", "__archspec", "x86_64"),
            'archspec: "x86_64_v3"',
        ),
    ],
)
def test_a_machine_that_is_not_enough(
    site: Site, depends: str, system: tuple[tuple[str, str], ...], values: tuple[str, ...], hint: str
) -> None:
    site.write(*RUNTIME, record("fast", "1", depends), record("wants", "2", "fast"))
    error = why(site, "tiny", "wants", virtual=system)
    assert error.code == "virtual-package-missing"
    assert all(value in error.message for value in ("fast 1", *values))
    assert f"write `virtual: {{{hint}}}` at recipes/tiny.yaml:7:3" in error.hint


def test_a_driver_that_only_a_constraint_asks_for(site: Site) -> None:
    site.write(*RUNTIME, record("cuda-version", "12.8", constrains=["__cuda >=12"]))
    error = why(site, "tiny", "cuda-version 12.8.*", virtual=(("__cuda", "11.8"), ("__glibc", "2.36")))
    assert error.code == "virtual-package-missing"
    assert all(value in error.message for value in ("cuda-version 12.8", "CUDA 12 ", "525.60.13"))
    assert 'cuda: "12.0"' in error.hint


def test_a_version_that_channel_priority_hides(site: Site) -> None:
    site.write(*RUNTIME, record("numpy", "2.0"), record("lib", "2"))
    site.write(record("numpy", "1.26"), record("lib", "1"), channel="lab")
    channels = (f"{CHANNEL_ROOT}/lab", f"{CHANNEL_ROOT}/conda-forge")
    error = why(site, "tiny", "numpy >=2", channels=channels)
    assert error.code == "channel-priority-conflict"
    assert all(value in error.message for value in ("numpy 2.0", "conda-forge", "lab"))
    assert error.hint == "write `conda-forge::numpy >=2` at recipes/tiny.yaml:7:3"
    assert pins(site.lock(target("tiny", "conda-forge::numpy >=2", channels=channels)))["numpy"] == "2.0"
    assert (
        pins(site.lock(target("tiny", "numpy >=2", channels=channels, priority="disabled")))["numpy"] == "2.0"
    )
    error = why(site, "numpy >=2", channels=channels, framework="numpy")
    assert error.hint == "write constraints: ['conda-forge::numpy'] at recipes/tiny.yaml:7:3"
    site.write(*RUNTIME, record("wants", "1", "lib >=2"), record("lib", "2"))
    error = why(site, "tiny", "wants", channels=channels)
    assert error.code == "channel-priority-conflict"
    assert all(value in error.message for value in ("lib 2", "conda-forge", "lab"))


def test_a_python_that_it_is_not_built_for(site: Site) -> None:
    site.write(*RUNTIME, record("new", "1", "python >=3.12,<3.13.0a0"))
    error = why(site, "new")
    assert error.code == "python-not-available"
    assert "`new`" in error.message
    assert "Python 3.11" in error.message
    assert error.hint.startswith('write `python: "3.12"` at recipes/tiny.yaml:7:3')
    assert "`python 3.9.*`" in why(site, "new", python="3.9").message


def test_wishes_that_contradict_each_other(site: Site) -> None:
    site.write(
        *RUNTIME,
        *(record("numpy", version) for version in ("1.26", "2.0")),
        record("old", "1", "numpy <2"),
        record("aside", "1"),
    )
    error = why(site, "tiny", "aside", "old", "numpy >=2")
    first, *rest = error.message.splitlines()
    assert error.code == "requirements-conflict"
    assert first.startswith("tiny-1-cu121: `numpy >=2` and `old` ")
    assert any("numpy" in line for line in rest)
    assert not any("aside" in line for line in rest)
    assert "numpy 1.26 " in error.hint
    assert "`numpy >=2` at recipes/tiny.yaml:7:3" in error.hint
    error = why(site, "tiny", "old", constraints=("numpy >=2",))
    assert error.code == "requirements-conflict"
    assert error.message.startswith("tiny-1-cu121: `old` and `numpy >=2` ")


def test_a_package_whose_own_needs_nobody_has(site: Site) -> None:
    site.write(*RUNTIME, record("broken", "1", "nowhere >=1"))
    error = why(site, "tiny", "broken")
    assert error.code == "requirements-conflict"
    assert error.message.startswith("tiny-1-cu121: `broken` ")
    assert "nowhere >=1" in error.message


def test_the_account_names_true_addresses(site: Site) -> None:
    site.write(*RUNTIME, record("lib", "2"), record("wants", "1", "lib >=2"))
    site.write(record("lib", "1"), channel="lab")
    error = why(site, "tiny", "wants", channels=(f"{CHANNEL_ROOT}/lab", f"{CHANNEL_ROOT}/conda-forge"))
    assert str(site.folder) not in error.message + error.tree


def test_a_framework_that_alone_has_no_solution(site: Site) -> None:
    """It is the last that is left out to find the fewest wishes, and all of them then."""
    site.write(*RUNTIME, record("tiny", "2", "python", "__cuda >=12"), record("aside", "1"))
    error = why(site, "tiny 2.*", "aside", virtual=(("__archspec", "x86_64"), ("__glibc", "2.36")))
    assert error.code == "virtual-package-missing"
    assert "tiny 2 " in error.message
    assert "CUDA 12" in error.message
    site.write(*RUNTIME, record("tiny", "2", "python", "nowhere"))
    error = why(site, "tiny 2.*")
    assert error.code == "requirements-conflict"
    assert error.message.startswith("tiny-1-cu121: `tiny 2.*` ")


def test_a_long_account_is_shortened() -> None:
    tree = "\n".join(f"├─ line {number}" for number in range(40))
    short = shortened(tree).splitlines()
    assert (len(short), short[-1]) == (13, "... and 28 more lines")
    assert shortened("a\n├─ same\n└─ same\nb") == "a\n├─ same\nb"


def test_a_spec_that_is_none_is_told(site: Site) -> None:
    site.write(*RUNTIME)
    with fails("match-spec-invalid", message="'tiny >=1,,'"):
        site.lock(target("tiny >=1,,"))


def test_records_made_here_are_read_as_written(site: Site) -> None:
    site.write(*RUNTIME)
    data = json.loads((site.folder / "conda-forge/linux-64/repodata.json").read_text())
    assert len(data["packages.conda"]) == len(RUNTIME)


# --- releases after a cutoff ---------------------------------------------------------------------

OLD, YOUNG = 1_700_000_000_000, 1_760_000_000_000
CUTOFF = ReleaseCutoff(time=datetime(2025, 1, 1, tzinfo=UTC))
TWO_LIBS = (
    record("lib", "1.0", "python >=3.11,<3.12.0a0"),
    record("lib", "2.0", "python >=3.11,<3.12.0a0", timestamp=YOUNG),
)


def test_a_record_after_the_cutoff_is_not_locked_but_by_name(site: Site) -> None:
    site.write(*RUNTIME, *TWO_LIBS)
    asked = target("tiny", "lib")
    assert pins(site.lock(asked))["lib"] == "2.0"
    lock = site.lock(asked, cutoff=CUTOFF)
    assert (pins(lock)["lib"], lock.cutoff) == ("1.0", CUTOFF)
    allowed = replace(CUTOFF, allowed=("lib",))
    assert pins(site.lock(asked, cutoff=allowed))["lib"] == "2.0"
    assert pins(site.lock(asked, lock, "lib", cutoff=CUTOFF))["lib"] == "1.0"
    assert pins(site.lock(asked, lock, "lib", cutoff=allowed))["lib"] == "2.0"


def test_the_day_of_the_index_counts_before_the_day_of_the_build(site: Site) -> None:
    late = record("lib", "2.0", "python >=3.11,<3.12.0a0", indexed_timestamp=YOUNG)
    site.write(*RUNTIME, TWO_LIBS[0], late)
    assert pins(site.lock(target("tiny", "lib"), cutoff=CUTOFF))["lib"] == "1.0"


def test_a_locked_package_after_the_cutoff_goes_and_its_age_is_known(site: Site) -> None:
    site.write(*RUNTIME, *TWO_LIBS)
    asked = target("tiny", "lib")
    before = site.lock(asked)
    after = site.lock(asked, before, cutoff=CUTOFF)
    assert (pins(before)["lib"], pins(after)["lib"]) == ("2.0", "1.0")
    young = [package for package in before.conda if package.name == "lib"]
    assert site.locker.uploads(young, before, asked) == {
        "lib-2.0-0.conda": datetime.fromtimestamp(YOUNG / 1000, UTC)
    }


def test_packages_of_the_parent_stay_at_any_age(site: Site) -> None:
    site.write(*RUNTIME, *TWO_LIBS, record("more", "1"))
    below = site.lock(target("tiny", "lib"))
    lock = site.lock(target("tiny", "lib", "more", on="tiny-1-cu121"), under=below, cutoff=CUTOFF)
    assert (pins(lock)["lib"], pins(lock)["more"]) == ("2.0", "1")


def test_a_channel_without_times_is_an_error_for_what_is_asked_by_name(site: Site) -> None:
    site.write(*RUNTIME, record("bare", "1", timestamp=None), *TWO_LIBS)
    with fails("upload-time-missing"):
        site.lock(target("tiny", "bare"), cutoff=CUTOFF)
    assert pins(site.lock(target("tiny", "bare"), cutoff=replace(CUTOFF, allowed=("bare",))))["bare"] == "1"


def test_strict_priority_counts_only_channels_with_old_releases(site: Site) -> None:
    site.write(*RUNTIME)
    site.write(record("lib", "9.0", "python >=3.11,<3.12.0a0", timestamp=YOUNG), channel="lab")
    site.write(*RUNTIME, *TWO_LIBS)
    asked = target("tiny", "lib", channels=(f"{CHANNEL_ROOT}/lab", f"{CHANNEL_ROOT}/conda-forge"))
    assert pins(site.lock(asked))["lib"] == "9.0"
    assert pins(site.lock(asked, cutoff=CUTOFF))["lib"] == "1.0"


# --- CEP 46 and CEP 48 ---------------------------------------------------------------------------

FOR_GPUS = (
    record("kernels", "1", "__cuda_arch >=9.0", build="sm90"),
    record("kernels", "1", "__cuda_arch >=8.0,<9.0", build="sm80"),
)


def test_the_lowest_capability_chooses_a_build(site: Site) -> None:
    site.write(*RUNTIME, *FOR_GPUS)

    def build(*capabilities: str) -> str:
        lock = site.lock(target("tiny", "kernels", capabilities=capabilities))
        return next(package.build for package in lock.conda if package.name == "kernels")

    assert (build("9.0", "12.0"), build("8.0", "9.0"), build("8.6")) == ("sm90", "sm80", "sm80")


def test_a_capability_that_no_build_supports(site: Site) -> None:
    site.write(*RUNTIME, *FOR_GPUS)
    error = why(site, "tiny", "kernels", capabilities=("7.5",))
    assert error.code == "virtual-package-missing"
    assert "__cuda_arch" in error.message
    assert '["8.0"]' in error.hint


def test_a_lock_for_other_capabilities_is_outdated(site: Site) -> None:
    site.write(*RUNTIME, *FOR_GPUS)
    lock = site.lock(target("tiny", "kernels", capabilities=("9.0",)))
    assert "__cuda_arch" not in dict(lock.virtual)
    check_facts(lock, target("tiny", "kernels", capabilities=("9.0", "10.0")))
    with fails("lock-recipe-mismatch"):
        check_facts(lock, target("tiny", "kernels", capabilities=("8.0", "9.0")))


def test_a_capability_of_a_hostile_lock_is_read_in_no_time(site: Site) -> None:
    """With a pattern that tries all divisions of the digits, this would not end."""
    site.write(*RUNTIME, *FOR_GPUS)
    asked = target("tiny", "kernels", capabilities=("9.0",))
    lock = site.lock(asked)
    hostile = tuple(replace(one, depends=(f"__cuda_arch >={'1' * 5000}x",)) for one in lock.conda)
    check_facts(replace(lock, conda=hostile), asked)


def test_a_channel_of_repodata_v3_alone_is_named(site: Site) -> None:
    site.write()
    folder = site.folder / "conda-forge" / "noarch"
    document = json.loads((folder / "repodata.json").read_text())
    for more in ({"repodata_version": 3}, {"v3": {"whl": {"tiny-1-py3_none_any_0": {}}}}):
        (folder / "repodata.json").write_text(json.dumps(document | more))
        with fails("repodata-unsupported"):
            site.lock(target("tiny"))


def test_a_conditional_dependency_is_named(site: Site) -> None:
    site.write(*RUNTIME)
    path = site.folder / "conda-forge" / "linux-64" / "repodata.json"
    document = json.loads(path.read_text())
    row = record("newer", "1", 'python[when="__linux"]')
    path.write_text(json.dumps(document | {"v3": {"conda": {"newer-1-0": row}}}))
    with fails("repodata-unsupported", message="newer-1-0"):
        site.lock(target("tiny", "newer"))
