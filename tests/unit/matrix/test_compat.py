"""Tables of cells: what they hold, how they read, and that a cover is the smallest there is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory import __version__, errors
from imagefactory.actions import inspect
from imagefactory.actions.find import read_candidates
from imagefactory.actions.locked import require_lock
from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability, parse_capability, parse_code
from imagefactory.gpu.cells import CellEvidence, answer_cell
from imagefactory.gpu.contradictions import CapabilityDifference
from imagefactory.gpu.drivers import read_driver
from imagefactory.gpu.knowledge import find_gpu
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.knowledge.toolkits import forward_names
from imagefactory.gpu.values import (
    Cell,
    CellQuery,
    ClaimBasis,
    Compatibility,
    GpuLibrary,
    InstalledPackage,
    ModuleCount,
    ScanResult,
    rocm_of,
)
from imagefactory.matrix.compat import (
    ANY,
    RUNS,
    CompatGpu,
    CoverCandidate,
    by_group,
    columns,
    cover,
    exact_releases,
    fewest,
    newest_first,
    releases,
    rows,
    with_releases,
)
from imagefactory.matrix.plan import PlanGpu, PlanInput, TargetStatus, make_plan
from imagefactory.matrix.rows import RowsQuery, parse_rows, rule_rows
from imagefactory.oci.layout import Layout
from imagefactory.project import load_project
from imagefactory.scan.findings import FileFinding
from imagefactory.scan.layers import LayerScan, format_scan
from imagefactory.settings.load import load_settings
from imagefactory.views.compat import (
    LEGEND,
    LETTERS,
    cell_code,
    format_covers,
    format_differences,
    format_gpu,
    format_rows,
)
from imagefactory.views.text import Footnotes
from tests.made.command import Call
from tests.made.errors import fails
from tests.made.layout import add_image

ROOT = Path(__file__).parents[3]


def gpu(capability: str, name: str = "", driver: str = "") -> CompatGpu:
    return CompatGpu(name=name or capability, capability=parse_capability(capability), driver=driver)


@pytest.mark.parametrize(
    ("text", "cuda", "cudas"),
    [
        ("torch==2.6", "", ["12.6", "12.4", "11.8", "rocm6.2.4", "rocm6.1"]),
        ("torch==2.7.1+rocm6.3", "", ["rocm6.3"]),
        ("torch==2.6.0", "12.4", ["12.4"]),
        ("Torch==2.6.0+cu118", "", ["11.8"]),
        ("torch==2.99", "", [""]),
        ("no-such-package==1", "12.4", ["12.4"]),
        ("warp-lang==1.8", "", ["12.8"]),
        ("numba==0.55", "12.6", ["12.6"]),
        ("xgboost==1.6.2", "", ["11.0"]),  # its code is documented, and not for which CUDA it is released
        ("vllm==0.14.0", "", [""]),  # a build for Jetson alone is documented
    ],
)
def test_a_release_is_asked_for_with_the_cudas_that_it_is_known_for(
    text: str, cuda: str, cudas: list[str]
) -> None:
    assert [one.question.cuda for one in exact_releases(text, cuda)] == cudas


def test_each_shipped_target_has_an_answer_on_every_gpu_newer_than_pascal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is built here, so the answer is that of its lock. `plan` and the site answer the same."""
    environ = {"IMAGEFACTORY_STORE": str(tmp_path / "store"), "IMAGEFACTORY_CACHE": str(tmp_path / "cache")}
    project = load_project(load_settings(directory=ROOT, start=ROOT, environ=environ), environ)
    targets = [target for target in project.targets if target.gpu and not rocm_of(target.cuda)]
    arm64 = [CompatGpu(name=str(one), capability=one, host="arm64") for one in knowledge.capabilities()]
    gpus = [one for one in (*columns(), *arm64) if one.capability > Capability(6, 2)]
    table = rows(read_candidates(project, targets), gpus)
    unknown = [
        (row.candidate.name, one.title)
        for row in table
        for one, cell in zip(gpus, row.cells, strict=True)
        if cell.answer is Compatibility.UNKNOWN
    ]
    assert unknown == []

    stages = tuple(TargetStatus(target=one, lock=require_lock(project, one)) for one in targets)
    devices = tuple(PlanGpu(capability=one.capability, host=one.host) for one in gpus)
    plan = make_plan(PlanInput(stages=stages, devices=devices))
    for row, planned in zip(table, plan.targets, strict=True):
        for cell, other in zip(row.cells, planned.cells, strict=True):
            claims = {*cell.claims, *cell.warnings}
            assert other.ruling.claim in claims, (row.candidate.name, other.device)
            assert not (cell.answer is Compatibility.NO and not other.ruling.skipped)


@pytest.mark.parametrize(
    ("text", "cuda", "code"),
    [
        ("torch==", "", "release-invalid"),
        ("torch==2.*", "", "release-invalid"),
        ("torch==2.6+cu124", "12.6", "option-conflict"),
    ],
)
def test_what_names_no_release_is_refused(text: str, cuda: str, code: str) -> None:
    with fails(code):
        exact_releases(text, cuda)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> NoReturn:
        raise errors.UnreachableError("index-unreachable", "the index does not answer")

    monkeypatch.setattr(inspect, "uv_locker", refuse)


@pytest.mark.usefixtures("no_index")
def test_one_release_is_answered_recipe_or_not(call: Call) -> None:
    said = call("torch==2.6", "--cuda", "12.4", "--gpu", "V100", "--driver", "550")
    assert (said.code, said.out.count("torch 2.6.0, CUDA 12.4  yes")) == (0, 1)
    assert call("torch==2.6", "--cuda", "12.4", "--gpu", "RTX 5090").code == errors.EXIT_CHECK
    unknown = call("torch==2.99", "--gpu", "V100")
    assert (unknown.code, unknown.error_codes) == (errors.EXIT_UNKNOWN, ("release-unknown",))
    assert call("pytorch", "--cuda", "12.4").code == errors.EXIT_USAGE


@pytest.mark.usefixtures("no_index")
@pytest.mark.parametrize("options", [(), ("--gpu", "V100"), ("--json",), ("--cover", "gpus.yaml")])
def test_an_unknown_release_is_neither_yes_nor_no(
    call: Call, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpus.yaml").write_text("- {name: V100}\n")
    said = call("torch==9.9", *options)
    assert (said.code, said.error_codes) == (errors.EXIT_UNKNOWN, ("release-unknown",))
    assert call("torch==9.9", "torch==2.6").code == 0


@pytest.mark.parametrize(
    ("text", "cuda", "framework", "version", "requested"),
    [
        ("pytorch==2.7", "12.8", "torch", "2.7.1", "2.7"),
        ("pytorch==2.7.0", "12.8", "torch", "2.7.0", ""),
        ("tf==2.15", "12", "tensorflow", "2.15.1", "2.15"),
        ("tensorflow-gpu==2.10.1", "11.2", "tensorflow", "2.10.1", ""),
        ("onnxruntime==1.23", "12", "onnxruntime-gpu", "1.23.2", "1.23"),
        ("jaxlib==0.4.30", "12", "jax", "0.4.30", ""),
        ("cupy==13.3.0", "11.8", "cupy-cuda11x", "13.3.0", ""),
        ("cupy==13.3.0", "12", "cupy-cuda12x", "13.3.0", ""),
        ("cupy==7", "10.1", "cupy", "7", ""),
    ],
)
def test_a_release_is_found_by_the_names_and_versions_that_people_write(
    text: str, cuda: str, framework: str, version: str, requested: str
) -> None:
    (release,) = exact_releases(text, cuda)
    assert (release.question.framework, release.question.version, release.requested) == (
        framework,
        version,
        requested,
    )


def test_the_newest_patch_is_part_of_the_answer(call: Call) -> None:
    answer = call("pytorch==2.7", "--gpu", "RTX 5070 Ti", "--json")
    rows = json.loads(answer.out)["rows"]
    assert {(row["version"], row["requested"]) for row in rows} == {("2.7.1", "2.7")}
    assert answer.code == 0
    assert "2.7.1" in call("pytorch==2.7", "--gpu", "RTX 5070 Ti").out
    assert call("tf", "--gpu", "V100", "--json").code == 0


@pytest.mark.parametrize("part", range(4))
def test_plan_and_compat_give_the_same_answer(part: int) -> None:
    """Every row of the tables on every known GPU, each with one of four drivers."""
    driver = ("", "470.256.02", "535-open", "580.178.04-open")[part]
    gpus = {(gpu.capability, gpu.host): gpu for gpu in knowledge.gpus()}
    read = read_driver(driver) if driver else ""
    versions = {
        (row["framework"], row["version"], cuda)
        for row in read_table("releases")["release"]
        for cuda in [*row["cuda"], *row.get("experimental", ())]
    }
    versions |= {(row.package, row.version, row.cuda) for row in knowledge.cuda_wheels()}
    text = "framework,version,cuda,capability,driver\n" + "".join(
        f"{framework},{version},{cuda},{gpu.capability},{driver}\n"
        for framework, version, cuda in sorted(versions)[part::4]
        for gpu in gpus.values()
    )
    listed = tuple(
        PlanGpu(capability=gpu.capability, name=gpu.name, driver=read, host=gpu.host) for gpu in gpus.values()
    )
    planned: list[Cell] = []

    def answer(question: CellQuery, evidence: CellEvidence) -> Cell:
        planned.append(answer_cell(question, evidence))
        return planned[-1]

    rule_rows(RowsQuery(rows=parse_rows(text, "all.csv"), devices=listed, answer=answer))
    assert len(planned) >= len(versions) // 4 * len(gpus)
    for cell in planned:
        question = cell.question
        (release,) = exact_releases(f"{question.framework}=={question.version}", question.cuda)
        device = CompatGpu(
            name="", capability=question.capability, driver=question.driver, host=question.host
        )
        assert rows((release,), (device,))[0].cells == (cell,)


@pytest.mark.parametrize(("gpu", "rocm"), [("MI250X", True), ("V100", False)])
def test_a_gpu_is_answered_by_the_builds_for_its_maker(call: Call, gpu: str, rocm: bool) -> None:
    answer = call("torch==2.5.1", "--gpu", gpu, "--json")
    cudas = [row["cuda"] for row in json.loads(answer.out)["rows"]]
    assert (answer.code, {cuda.startswith("rocm") for cuda in cudas}) == (0, {rocm})
    explicit = call("torch==2.5.1+rocm6.2", "--gpu", gpu)
    assert explicit.code == (0 if rocm else errors.EXIT_CHECK)
    assert call("tensorflow==2.18", "--gpu", "MI250X").code == errors.EXIT_CHECK  # no ROCm build is known


@pytest.mark.parametrize(
    ("text", "name", "driver", "fix"),
    [
        ("torch==2.7+cu126", "RTX 5070 Ti", "", "cu128 of the same release"),
        ("torch==2.5.1+cu124", "RTX 5090", "", "torch 2.7 or newer"),
        ("torch==2.15+cu132", "V100", "", "torch 2.14"),
        ("tensorflow==2.16.1", "V100", "", "tensorflow 2.16.2"),
        ("torch==2.5.1+rocm6.2", "gfx1151", "", "torch 2.10 or newer"),
        ("torch==2.5.1+cu124", "MI250X", "", "rocm6.2 of the same release"),
        ("torch==2.11+cu126", "Jetson Thor", "", "cu130 of the same release"),
        ("torch==2.7+cu128", "RTX 5090", "550", "driver 570 or newer"),
        ("torch==2.4+cu124", "RTX 5090", "550", "driver 570 or newer and torch 2.7 or newer"),
        ("torch==2.4+cu124", "V100", "590", "driver 580 or older"),
        ("torch==2.4+cu124", "P100", "580-open", "driver 580 with the proprietary kernel modules"),
        ("torch==2.4+cu124", "RTX 2080", "470", "driver 525 or newer"),
    ],
)
def test_a_no_names_what_would_work(call: Call, text: str, name: str, driver: str, fix: str) -> None:
    options = ("--driver", driver) if driver else ()
    answer = call(text, "--gpu", name, *options, "--json")
    (row,) = json.loads(answer.out)["rows"]
    assert (answer.code, row["cells"][0]["answer"], row["fix"]) == (errors.EXIT_CHECK, "no", fix)
    assert fix in call(text, "--gpu", name, *options).out.replace("\n", " ")


def test_plan_and_compat_name_the_same_fix(call: Call, tmp_path: Path) -> None:
    assert isinstance(call, partial)
    rows = tmp_path / "rows.csv"
    for framework, version, cuda, capability in (
        ("torch", "2.7", "12.8", "7.0"),
        ("torch", "2.3", "12.1", "12.0"),
        ("tensorflow", "2.3", "10.1", "8.6"),
    ):
        rows.write_text(f"framework,version,cuda,capability\n{framework},{version},{cuda},{capability}\n")
        planned = json.loads(call.func("plan", "--tuples", str(rows), "--json").out)["rows"]
        said = call(f"{framework}=={version}", "--cuda", cuda, "--capability", capability, "--json")
        fixes = [row["fix"] for row in json.loads(said.out)["rows"]]
        assert [row["fix"] for row in planned] == fixes
        assert all(fixes)


def test_forward_compatibility_is_named_on_data_center_gpus(call: Call) -> None:
    (row,) = json.loads(call("torch==2.6+cu124", "--gpu", "V100", "--driver", "470", "--json").out)["rows"]
    assert "cuda-compat-12-4" in row["fix"]
    assert {find_gpu(name).name for name in forward_names()} == forward_names()


def test_an_unknown_answer_names_the_next_step(call: Call) -> None:
    answer = call("tensorflow==2.18", "tensorflow==2.19", "--cuda", "12.5", "--gpu", "GH200", "--json")
    fixes = [row["fix"] for row in json.loads(answer.out)["rows"]]
    assert answer.code == errors.EXIT_UNKNOWN
    assert any("imagefactory compat tensorflow==2.18.1" in fix for fix in fixes)


def test_releases_with_the_same_answers_share_a_row(call: Call) -> None:
    few, every = call("cupy==13.4").out, call("cupy==13.4", "--all").out
    assert "11.2 to 11.7" in few
    assert len(every.splitlines()) - len(few.splitlines()) > 10
    assert "12.0 to 12.9" in call("cupy==13.4", "--gpu", "V100").out


def test_a_cover_does_not_look_up_a_package(call: Call, tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.yaml"
    gpus.write_text("- name: V100\n")
    for names in (["vllm==0.13.0"], ["vllm==0.13.0", "torch==2.5"]):
        answer = call("--cover", str(gpus), *names)
        assert (answer.code, answer.error_codes) == (errors.EXIT_UNKNOWN, ("release-unknown",))
        assert "--gpu" in answer.err


def contents_of(source: str, version: str, *codes: str, cuda: str = "12.1") -> ScanResult:
    """PyTorch with one library, which has code for these targets."""
    modules = ModuleCount(codes=tuple(sorted(map(parse_code, codes))), count=9)
    return ScanResult(
        source=source,
        libraries=(GpuLibrary(path="torch/lib/libtorch_cuda.so", size=1, modules=(modules,)),),
        packages=(InstalledPackage(name="torch", version=version),),
        facts=(("torch", "cuda", cuda),),
    )


def candidate(name: str, version: str, *codes: str, cuda: str = "12.1") -> CoverCandidate:
    """A target whose image was scanned."""
    contents = contents_of(f"{name}'s image", version, *codes, cuda=cuda)
    question = CellQuery(framework="torch", version=version, cuda=cuda, capability=ANY)
    return CoverCandidate(
        name=name, group="pytorch", question=question, evidence=CellEvidence(contents=contents)
    )


GRADES = st.tuples(st.integers(0, 1), st.integers(0, 1))
GRADED = st.lists(st.dictionaries(st.integers(0, 7), GRADES, max_size=5), max_size=7)


@given(GRADED)
def test_no_better_cover_exists(graded: list[dict[int, tuple[int, int]]]) -> None:
    """Of all choices: the fewest, then the least grades, then the first, which is the newest."""

    def grades(some: tuple[int, ...]) -> tuple[int, int]:
        best = [min(graded[i][element] for i in some if element in graded[i]) for element in wanted]
        return sum(one for one, _ in best), sum(one for _, one in best)

    wanted = frozenset[int]().union(*graded)
    choices = [some for size in range(len(graded) + 1) for some in combinations(range(len(graded)), size)]
    covers = [some for some in choices if frozenset[int]().union(*(graded[i] for i in some)) == wanted]
    assert fewest(graded) == min(covers, key=lambda some: (len(some), grades(some), some))


def test_a_cover_where_the_greedy_choice_needs_one_more() -> None:
    """The largest set first (six of eight) would need three."""
    sets = [{1, 2, 3, 5, 6, 7}, {1, 2, 3, 4}, {5, 6, 7, 8}]
    assert fewest([dict.fromkeys(one, (0, 0)) for one in sets]) == (1, 2)


def test_many_gpus_and_images_are_covered_at_once() -> None:
    sets = [frozenset((index * 7 + step) % 60 for step in range(15)) for index in range(40)]
    found = fewest([dict.fromkeys(one, (index % 2, 0)) for index, one in enumerate(sets)])
    assert frozenset[int]().union(*(sets[index] for index in found)) == frozenset(range(60))
    assert len(found) == 5  # 60 in steps of 15, of sets that begin at multiples of 7


def test_the_newest_framework_wins_among_equals() -> None:
    some = [candidate("old", "2.3", "sm_70", "sm_80"), candidate("new", "2.9", "sm_70", "sm_80")]
    found = cover("pytorch", some, [gpu("7.0"), gpu("8.6")])
    assert [one.candidate.name for one in found.images] == ["new"]
    assert [str(one.capability) for one, _ in found.images[0].serves] == ["7.0", "8.6"]


def test_one_old_image_beats_two() -> None:
    some = [
        candidate("volta", "2.3", "sm_70", "sm_80"),
        candidate("ampere", "2.9", "sm_80"),
        candidate("hopper", "2.15", "sm_90"),
    ]
    found = cover("pytorch", some, [gpu("7.0"), gpu("8.0"), gpu("9.0")])
    assert [one.candidate.name for one in found.images] == ["hopper", "volta"]
    assert found.unserved == ()


def test_machine_code_beats_ptx_and_then_the_newest_wins() -> None:
    """All are one image for both GPUs."""
    some = [
        candidate("through-ptx", "2.9", "sm_80", "compute_80/8.1"),
        candidate("newer", "2.5", "sm_80", "sm_90"),
        candidate("older", "2.3", "sm_80", "sm_90"),
    ]
    (found,) = cover("pytorch", some, [gpu("8.0"), gpu("9.0")]).images
    assert found.candidate.name == "newer"
    (found,) = cover("pytorch", some[:1], [gpu("8.0"), gpu("9.0")]).images
    assert found.candidate.name == "through-ptx"


def documented(name: str, version: str, cuda: str) -> CoverCandidate:
    """Of conda's pytorch channel: what its build scripts list is known, and nothing was scanned."""
    question = CellQuery(framework="pytorch::pytorch", version=version, cuda=cuda, capability=ANY)
    return CoverCandidate(name=name, group="pytorch", question=question)


def test_ptx_that_is_only_documented_serves_where_nothing_better_does() -> None:
    """CUDA 11.7's list ends in PTX, which would run on every newer GPU: one image is not better than two."""
    old, new = documented("old", "1.13", "11.7"), candidate("new", "2.9", "sm_120")
    asked = [gpu("7.0"), gpu("12.0")]
    assert [cell.answer for cell in rows([old], asked)[0].cells] == [Compatibility.YES, Compatibility.PTX]
    both = cover("pytorch", [old, new], asked)
    assert [(one.candidate.name, len(one.serves)) for one in both.images] == [("new", 1), ("old", 1)]
    (alone,) = cover("pytorch", [old], asked).images
    assert len(alone.serves) == 2


def test_triton_speaks_against_an_image_as_any_other_rule_does() -> None:
    new = faulty("new", "2.7", "sm_60", packages=(("triton", "3.3.1"),))
    found = cover("pytorch", [candidate("old", "1.13", "sm_60"), new], [gpu("6.1")])
    assert [one.candidate.name for one in found.images] == ["old"]
    alone = cover("pytorch", [new], [gpu("6.1")])
    assert "! Triton 3.3.1 needs capability 7.0" in format_covers([alone])


def test_a_cover_says_the_oldest_driver_unless_one_was_asked_about() -> None:
    some = [candidate("one", "2.3", "sm_80")]
    assert ", driver 525 or newer" in format_covers([cover("pytorch", some, [gpu("8.0")])])
    assert "or newer" not in format_covers([cover("pytorch", some, [gpu("8.0", driver="535")])])


def test_a_gpu_that_nothing_serves_is_said_with_what_comes_nearest() -> None:
    found = cover("pytorch", [candidate("one", "2.3", "sm_80")], [gpu("8.0"), gpu("6.1", "GTX 1080 Ti")])
    assert [one.gpu.name for one in found.unserved] == ["GTX 1080 Ti"]
    text = format_covers([found])
    assert "1 image for 1 of 2 types of GPU" in text
    assert "GTX 1080 Ti" in text
    assert "has no code for 6.1" in text


def faulty(name: str, version: str, *codes: str, packages: tuple[tuple[str, str], ...]) -> CoverCandidate:
    """The same with packages of which faults are known."""
    made = candidate(name, version, *codes)
    contents = made.evidence.contents
    assert contents is not None
    more = tuple(InstalledPackage(name=package, version=number) for package, number in packages)
    held = replace(contents, packages=(*contents.packages, *more))
    return replace(made, evidence=CellEvidence(contents=held))


def test_what_fails_in_some_calls_serves_where_nothing_else_does() -> None:
    """cuDNN 9.11 and newer has no code for Volta: two images are better than convolutions that fail."""
    new = faulty("new", "2.9", "sm_70", "sm_80", packages=(("nvidia-cudnn-cu12", "9.20.0"),))
    old = candidate("old", "2.3", "sm_70")
    both = cover("pytorch", [new, old], [gpu("8.0"), gpu("7.0")])
    assert [(one.candidate.name, len(one.serves)) for one in both.images] == [("new", 1), ("old", 1)]
    assert "!" not in format_covers([both])
    alone = cover("pytorch", [new], [gpu("8.0"), gpu("7.0")])
    assert [(one.candidate.name, len(one.serves)) for one in alone.images] == [("new", 2)]
    assert "! cuDNN 9.20.0 has no code" in format_covers([alone])


def test_what_may_compute_wrongly_serves_before_ptx_that_is_only_documented() -> None:
    """cuBLAS 12.8 to 13.1 on 10.0, of which frameworks warn: a B200 is not sent to images of CUDA 11."""
    warned = faulty("new", "2.9", "sm_80", "sm_100", packages=(("nvidia-cublas-cu12", "12.8.4.1"),))
    asked = CellQuery(framework="conda-forge::pytorch", version="2.7", cuda="12.6", capability=ANY)
    paged = CoverCandidate(name="paged", group="pytorch", question=asked)
    assert rows([paged], [gpu("10.0")])[0].cells[0].answer is Compatibility.PTX
    found = cover("pytorch", [paged, warned], [gpu("10.0")])
    assert [one.candidate.name for one in found.images] == ["new"]
    assert "! cuBLAS 12.8.4.1" in format_covers([found])
    assert format_gpu(gpu("10.0"), rows([warned], [gpu("10.0")])).splitlines()[0].endswith("1 of 1 run on it")


def test_what_is_slow_serves() -> None:
    slow = faulty("slow", "2.9.1", "sm_80", packages=(("nvidia-cudnn-cu12", "9.10.2.21"),))
    old = candidate("old", "2.3", "sm_80")
    assert cover("pytorch", [old, slow], [gpu("8.0")]).images[0].candidate.name == "slow"
    table = rows([slow], [gpu("8.0")])
    assert cell_code(table[0].cells[0]) == "Yp!"
    assert "yes !1" in format_gpu(gpu("8.0"), table)
    assert "conv3d in bfloat16 goes around cuDNN 9.10.2.21" in format_gpu(gpu("8.0"), table)


def test_a_fault_of_what_does_not_run_is_not_told() -> None:
    (row,) = rows([faulty("one", "2.9.1", "sm_80", packages=(("nvidia-cudnn-cu12", "9.20"),))], [gpu("7.0")])
    assert row.cells[0].warnings
    assert cell_code(row.cells[0]) == "-p"
    assert "Warnings" not in format_gpu(gpu("7.0"), [row])


@pytest.mark.parametrize(
    ("driver", "rules"),
    [("", []), ("525.60.13", ["run-time-ptx"]), ("530.30.02", []), ("450.80.02", [])],
)
def test_a_driver_older_than_the_cuda_of_what_compiles_at_run_time_is_told(
    driver: str, rules: list[str]
) -> None:
    asked = replace(gpu("8.0"), driver=driver)
    (row,) = rows([candidate("one", "2.3", "sm_80")], [asked])
    assert [claim.rule for claim in row.cells[0].warnings] == rules
    assert ("Warnings" in format_gpu(asked, [row])) == bool(rules)


def test_the_driver_of_a_gpu_counts() -> None:
    some = [candidate("one", "2.3", "sm_80", "sm_90")]
    assert cover("pytorch", some, [gpu("8.0", driver="535")]).unserved == ()
    (old,) = cover("pytorch", some, [gpu("8.0", driver="470")]).unserved
    assert old.claim is not None
    assert old.claim.rule == "driver-floor"


def test_nothing_covers_nothing() -> None:
    assert cover("pytorch", [], [gpu("8.0")]).unserved[0].candidate is None
    assert cover("pytorch", [candidate("one", "2.3", "sm_80")], []).images == ()


def test_the_newest_stands_first_by_number() -> None:
    some = [candidate("a", "2.3"), candidate("b", "2.15"), candidate("c", "2.15", cuda="13.2")]
    assert [one.name for one in newest_first(some)] == ["c", "b", "a"]


def test_versions_without_a_recipe_stand_beside_those_with_one() -> None:
    made = candidate("pytorch-2.3-cu121", "2.3")
    found = with_releases([made], "torch")
    same = [one for one in found if (one.question.version, one.question.cuda) == ("2.3", "12.1")]
    assert same == [made]
    assert {one.question.version for one in found} >= {"1.13", "2.3", "2.11", "2.14"}
    assert len(found) == len(releases("torch"))


def test_groups_keep_their_order() -> None:
    some = [candidate("a", "2.3"), candidate("b", "2.9")]
    assert by_group(some) == (("pytorch", tuple(some)),)


def test_columns_are_cards() -> None:
    shown = [one.title for one in columns()]
    assert "compute capability 7.0" in shown
    assert "compute capability 8.7" not in shown  # Jetson Orin
    assert shown == sorted(shown, key=lambda text: tuple(map(int, text.split()[-1].split("."))))


def test_a_source_has_one_number() -> None:
    sources = Footnotes()
    assert sources.mark(["a", "b", "a"]) == " [1][2]"
    assert sources.mark(["b", ""]) == " [2]"
    assert sources.lines() == ["[1] a", "[2] b"]


def test_every_answer_and_basis_has_a_letter_of_its_own() -> None:
    assert set(LETTERS) == set(Compatibility) - {Compatibility.CPU}  # an answer about packages, not cells
    assert len(set(LETTERS.values())) == len(LETTERS)
    assert len({basis.value[0] for basis in ClaimBasis}) == len(ClaimBasis)
    assert all(basis.value in " ".join(LEGEND) for basis in ClaimBasis)


def test_a_table_of_one_gpu() -> None:
    some = [candidate("fits", "2.3", "sm_70"), candidate("too-new", "2.4", "sm_80")]
    asked = gpu("7.0", "V100")
    table = rows(some, [asked])
    text = format_gpu(asked, table, show_sources=True)
    assert "[1]" not in format_gpu(asked, table)
    lines = text.splitlines()
    assert lines[0] == "V100, compute capability 7.0: 1 of 2 run on it"
    fits = next(line for line in lines if line.startswith("fits"))
    assert "yes" in fits
    assert "predicted" in fits
    assert "525" in fits
    not_fit = next(line for line in lines if line.startswith("too-new"))
    assert "has no code for 7.0" in not_fit
    assert "documented: yes" in not_fit  # what a page says is not swallowed
    assert "[1] scan of fits's image" in text


def test_a_table_of_versions() -> None:
    gpus = [gpu("7.0"), gpu("8.0"), gpu("10.0")]
    table = rows([candidate("one", "2.3", "sm_80", "compute_80/8.1")], gpus)
    assert [cell_code(cell) for cell in table[0].cells] == ["-p", "Yp", "Pp"]
    text = format_rows(table, [one.capability for one in gpus])
    assert "one     torch 2.3  12.1  -p   Yp   Pp" in text
    assert all(line in text for line in LEGEND)


def test_neighbours_that_are_alike_are_one_column_and_blank_versions_one_line() -> None:
    gpus = [gpu("7.0"), gpu("7.5"), gpu("8.0")]
    blank = replace(releases("torch")[-1], question=replace(releases("torch")[-1].question, version="0.4"))
    table = rows([candidate("one", "2.3", "sm_70"), blank], gpus)
    text = format_rows(table, [one.capability for one in gpus])
    assert text.splitlines()[0].split() == ["TARGET", "VERSION", "CUDA", "7.0-7.5", "8.0"]
    assert f"unknown: {blank.title}" in text
    assert "(no recipe)" not in text
    one = format_gpu(gpu("7.0"), rows([blank], [gpu("7.0")]))
    assert one.splitlines()[0].endswith("0 of 1 run on it, 1 unknown")
    assert f"unknown: {blank.title}" in one


@pytest.mark.parametrize("width", [80, 100, 120])
def test_reasons_are_folded_to_the_terminal(width: int) -> None:
    table = rows([candidate("too-new-by-far", "2.4", *(f"sm_{n}" for n in (80, 86, 90)))], [gpu("7.0")])
    whole, text = format_gpu(gpu("7.0"), table), format_gpu(gpu("7.0"), table, width)
    assert max(map(len, whole.splitlines())) > 140
    body = text.partition("\nSources")[0]
    assert max(map(len, body.splitlines())) <= width
    assert sorted(body.split()) == sorted(whole.partition("\nSources")[0].split())


def test_a_capability_that_no_gpu_has_is_said() -> None:
    table = rows([candidate("one", "2.3", "sm_90")], [gpu("9.9")])
    assert "no GPU of capability 9.9 is known" in format_gpu(gpu("9.9"), table)


def test_differences_name_both_sources() -> None:
    difference = CapabilityDifference(
        framework="torch",
        version="2.12.1",
        cuda="13.0",
        capabilities=(parse_capability("7.5"),),
        documented=Compatibility.YES,
        found=Compatibility.PARTLY,
        reason="all but linear algebra",
        wheels=("torch.whl",),
        documented_source="a page",
        scanned_source="measured",
    )
    text = format_differences([difference])
    assert "torch 2.12.1" in text
    assert "[1] a page" in text
    assert "[2] scan of torch.whl (measured)" in text
    assert format_differences([]) == "no difference is known"


@pytest.fixture
def call(call: Call) -> Call:
    return partial(call, "compat")


def test_what_runs_on_a_gpu(call: Call) -> None:
    assert "Sources" not in call("--gpu", "RTX 5090", "pytorch-*").out
    code, out, _ = call("--gpu", "RTX 5090", "pytorch-*", "--sources")
    assert code == errors.EXIT_OK
    assert out.startswith("RTX 5090, compute capability 12.0: ")
    assert "pytorch-2.9-cu128" in out
    assert "Sources" in out


def test_json_holds_every_claim_with_its_source(call: Call) -> None:
    code, out, _ = call("--capability", "7.0", "--driver", "535", "--json")
    assert code == errors.EXIT_OK
    value = json.loads(out)
    assert value["format"] == "imagefactory.compat/1"
    assert value["gpus"] == [{"gpu": "7.0", "capability": "7.0", "driver": "535", "count": 1}]
    found = {row["target"]: row["cells"][0] for row in value["rows"]}
    assert found["pytorch-2.3-cu121"]["answer"] in [one.value for one in RUNS]
    assert found["pytorch-2.15-cu132"]["answer"] == "no"
    for cell in found.values():
        assert (cell["capability"], cell["driver"]) == ("7.0", "535")
        for claim in cell["claims"]:
            assert claim["source"]
            assert claim["basis"] in ("documented", "predicted")  # nothing was verified


def test_the_turing_hole_is_found(call: Call) -> None:
    """PyTorch documents Turing for 2.11 to 2.15; its linear algebra has no code there."""
    code, out, _ = call("--differences", "pytorch", "--json")
    assert code == errors.EXIT_OK
    found = [
        one
        for one in json.loads(out)["differences"]
        if one["capabilities"] == ["7.5"] and one["cuda"].startswith("13.")
    ]
    assert {one["version"] for one in found} >= {"2.12.1", "2.15.0"}
    assert all("linear algebra" in one["reason"] for one in found)


def test_nothing_runs_on_it(call: Call) -> None:
    code, out, _ = call("--capability", "3.0", "pytorch-2.15-*")
    assert code == errors.EXIT_CHECK
    assert "0 of 3 run on it" in out


def test_a_family_with_versions_that_no_recipe_makes(call: Call) -> None:
    code, out, _ = call("pytorch")
    assert code == errors.EXIT_OK
    assert "(no recipe)" in out
    assert "pytorch-2.3-cu121" in out
    assert "torch 2.14" in out


def test_an_image_that_was_scanned_speaks_for_its_target(call: Call, tmp_path: Path) -> None:
    """What is kept of its layers outweighs the scanned wheels, as long as it holds what is locked."""
    layout = Layout(tmp_path / "store")

    def scanned(*codes: str, version: str) -> dict[str, Any]:
        (library,) = contents_of("an image", version, *codes).libraries
        found = (
            FileFinding(path=library.path, library=library),
            FileFinding(
                path="torch.dist-info/METADATA", package=InstalledPackage(name="torch", version=version)
            ),
        )
        layers = add_image(layout, "pytorch:2.3-cu121", [version.encode(), " ".join(codes).encode()])
        image = layout.load("", layers)
        for scan, layer in zip(
            (LayerScan(findings=found), LayerScan(findings=())), image.layers, strict=True
        ):
            layout.record("scans", layer.descriptor.digest.removeprefix("sha256:"), format_scan(scan))
        _, out, _ = call("--capability", "7.0", "pytorch-2.3-cu121", "--json")
        claim = json.loads(out)["rows"][0]["cells"][0]["claims"][0]
        assert isinstance(claim, dict)
        return claim

    held = scanned("sm_80", version="2.3.1")
    assert (held["answer"], held["basis"], held["rule"]) == ("no", "predicted", "no-code")
    assert held["source"] == "scan of the image pytorch:2.3-cu121 in the store"
    other = scanned("sm_80", version="2.2.0")  # of an older recipe
    assert other["answer"] == "yes"
    assert "torch-2.3.1" in other["source"]


def test_a_target_without_a_current_lock_is_said(call: Call, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("recipes", "lockfiles"):
        shutil.copytree(ROOT / name, root / name)
    (root / "lockfiles" / "pytorch-2.3-cu121.requirements.txt").unlink()
    code, out, _ = call("--gpu", "V100", "pytorch-2.[35]-*", root=root)
    assert code == errors.EXIT_OK
    assert out.rstrip().endswith("since no lock is current: pytorch-2.3-cu121 (none)")
    assert "2 of 2 run on it" in out


def test_what_is_known_without_recipes(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imagefactory.toml").touch()
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("--gpu", "V100", root=None)
    assert code == errors.EXIT_OK
    assert "torch 2.3, CUDA 12.1" in out


def test_in_an_empty_folder_the_recipes_that_come_along_are_asked(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call("--gpu", "V100", root=None)
    assert code == errors.EXIT_OK
    assert "\npytorch-2.3-cu121 " in out
    assert f"the recipes of imagefactory {__version__}" in err


def test_the_fewest_images(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text("- name: V100\n  driver: 535\n  count: 4\n- RTX 5090\n- A100\n- capability: 7.5\n")
    code, out, _ = call("--cover", str(file), "--family", "pytorch")
    assert code == errors.EXIT_OK
    assert "4 x V100, compute capability 7.0, driver 535" in out
    assert "    1 x compute capability 7.5 " in out
    code, out, _ = call("--cover", str(file), "--family", "pytorch", "--json")
    (found,) = json.loads(out)["covers"]
    assert found["family"] == "pytorch"
    served = [one["gpu"] for image in found["images"] for one in image["gpus"]]
    assert sorted(served) == ["7.5", "A100", "RTX 5090", "V100"]


def test_a_gpu_that_no_image_serves(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text("- capability: 3.0\n")
    code, out, _ = call("--cover", str(file), "--family", "pytorch")
    assert code == errors.EXIT_CHECK
    assert "none for" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--gpu", "V100", "--capability", "7.0"), errors.EXIT_USAGE, "different tables"),
        (("--driver", "535"), errors.EXIT_USAGE, "--driver"),
        (("--family", "pytorch"), errors.EXIT_USAGE, "--family"),
        (("--gpu", "V100", "--driver", "new"), errors.EXIT_USAGE, "write 535 or 535.54.03"),
        (("--capability", "8"), errors.EXIT_USAGE, "not a compute capability"),
        (("--gpu", "RTX 5O90"), errors.EXIT_USAGE, "RTX 5090"),
        (("pytorhc",), errors.EXIT_NOTHING_SELECTED, "did you mean 'pytorch'?"),
        (("pytorch-2.3-cu12",), errors.EXIT_NOTHING_SELECTED, "pytorch-2.3-cu121"),
        (("--cover", "/nowhere.yaml"), errors.EXIT_USAGE, "nowhere.yaml"),
        (("--gpu", ""), errors.EXIT_USAGE, "unknown GPU"),
        (("--capability", ""), errors.EXIT_USAGE, "not a compute capability"),
        (("--differences", "pytorhc"), errors.EXIT_NOTHING_SELECTED, "did you mean 'pytorch'?"),
        (("--differences", "pytorch-2.3-cu121"), errors.EXIT_NOTHING_SELECTED, "no framework"),
    ],
)
def test_what_cannot_be_asked(call: Call, arguments: tuple[str, ...], code: int, said: str) -> None:
    ended, out, err = call(*arguments)
    assert (ended, out) == (code, "")
    assert said in err


@pytest.mark.parametrize(
    ("words", "found"),
    [("compat pytorch", "plain,pytorch\n"), ("plan --ignore-rule no", "plain,no-code\n")],
)
def test_the_shell_completes_families_and_rules(tmp_path: Path, words: str, found: str) -> None:
    typed = f"imagefactory {words}"
    asked = {"_IMAGEFACTORY_COMPLETE": "bash_complete", "COMP_WORDS": typed}
    environ = {**asked, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-m", "imagefactory"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert found in done.stdout
