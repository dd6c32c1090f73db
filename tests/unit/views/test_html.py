"""The pages of a report: what stands in them, of whom, and that no stranger's text becomes markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from imagefactory.extras.site.action import PublicLogEntry, ReportContents, read_acts
from imagefactory.extras.site.images import ReportLayer, ReportPackage
from imagefactory.extras.site.matrix import (
    STATUSES,
    check_names,
    effects_on,
    file_name,
    latency_chart,
    matrix_gpus,
    matrix_rows,
    runs_of,
    status_of,
)
from imagefactory.extras.site.pages import MAX_ACTS, format_badge, format_picture, make_site
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.lock.changes import VersionChange
from imagefactory.matrix.combos import REPORTED, ComboCell, ComboState
from imagefactory.model import CheckState, Outcome
from imagefactory.trust.audit import AuditEntry, append_audit, read_audit
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.views.charts import ChartMeasure, column_chart, format_number, row_chart
from tests.made.catalog import make_image
from tests.made.report import catalog_report, many_images, with_contents
from tests.made.verdicts import LAB

COUNT = 12
HOSTILE = (
    "</td></style></script><script>alert(1)</script><img src=x onerror=a(2)>\"' &amp; {{ 7 * 7 }} {% raw %}"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportContents:
    return with_contents(catalog_report(tmp_path_factory.mktemp("report"), many_images(COUNT)), packages=5)


@pytest.fixture(scope="module")
def site(report: ReportContents) -> dict[str, str]:
    return dict(make_site(report))


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def addresses(self) -> Iterator[str]:
        for _, attributes in self.tags:
            for name in ("href", "src", "action", "data", "xlink:href", "srcset"):
                if attributes.get(name):
                    yield str(attributes[name])


def combo(state: ComboState, cause: str = "", basis: str = "verified") -> ComboCell:
    return ComboCell(
        target="t",
        framework="pytorch",
        version="2.3",
        cuda="12.1",
        capability=parse_capability("8.0"),
        status=state,
        cause=cause,
        basis=basis,
        reason="because",
        source="somebody",
    )


def claim(answer: Compatibility, basis: ClaimBasis = ClaimBasis.PREDICTED) -> CellClaim:
    return CellClaim(basis=basis, answer=answer, rule="code", reason="sm_80", source="a scan")


# --- words ---------------------------------------------------------------------------------------


def test_every_outcome_has_a_word_of_its_own_and_no_two_look_alike() -> None:
    assert {str(outcome) for outcome in Outcome} <= set(STATUSES)
    for part in ("code", "symbol", "says"):
        assert len({getattr(word, part) for word in STATUSES.values()}) == len(STATUSES)


@pytest.mark.parametrize(
    ("found", "known", "word"),
    [
        (combo(ComboState.VALID), None, "verified"),
        (combo(ComboState.FAILED, "wrong-numbers"), claim(Compatibility.YES), "wrong-numbers"),
        (combo(ComboState.UNDECIDED, "held", REPORTED), claim(Compatibility.YES), "held"),
        (combo(ComboState.RULED_OUT, "no-code", "predicted"), claim(Compatibility.NO), "predicted-no"),
        (combo(ComboState.RULED_OUT, "not-documented", "documented"), None, "documented-no"),
        (combo(ComboState.RULED_OUT, "unsolvable", "documented"), None, "unsolvable"),
        (combo(ComboState.NOT_TESTED, "not-tested", ""), claim(Compatibility.PTX), "predicted"),
        (combo(ComboState.NOT_TESTED, "not-tested", ""), claim(Compatibility.PARTLY), "predicted-partly"),
        (
            combo(ComboState.NOT_TESTED, "not-tested", ""),
            claim(Compatibility.YES, ClaimBasis.DOCUMENTED),
            "documented",
        ),
        (combo(ComboState.NOT_TESTED, "not-tested", ""), claim(Compatibility.UNKNOWN), "not-tested"),
        (combo(ComboState.NOT_TESTED, "not-tested", ""), None, "not-tested"),
    ],
)
def test_what_nobody_ran_is_never_shown_as_run(found: ComboCell, known: CellClaim | None, word: str) -> None:
    said = status_of(found, known)
    assert said.word == word
    assert (said.kind in ("good", "bad", "open")) == (
        found.basis in ("verified", "reported") or word == "unsolvable"
    )


# --- pages ---------------------------------------------------------------------------------------


def test_there_is_a_page_for_each_image_and_gpu(report: ReportContents, site: dict[str, str]) -> None:
    images = {f"images/{image.target}.{kind}" for image in report.images for kind in ("html", "svg")}
    gpus = {f"gpus/{capability}.html" for capability in report.capabilities}
    assert set(site) == {"index.html", "style.css", "matrix.svg"} | images | gpus


def test_every_link_leads_to_a_page_of_the_site_and_none_out_of_it(site: dict[str, str]) -> None:
    for name, text in site.items():
        if name.endswith(".html"):
            for address in Page(text).addresses():
                if address.startswith("#") or address == "data:,":
                    continue
                there = (Path("/site") / name).parent / address
                assert str(Path(*there.parts[:2], *_straight(there))).removeprefix("/site/") in site, address
        assert not re.search(r"(url\(|@import|https?:)(?!//www\.w3\.org/2000/svg)", text), name


def _straight(path: Path) -> list[str]:
    found: list[str] = []
    for part in path.parts[2:]:
        found = found[:-1] if part == ".." else [*found, part]
    return found


def test_the_matrix_says_each_word_in_letters(report: ReportContents, site: dict[str, str]) -> None:
    cells = re.findall(r"<td class=([a-z]+)>([a-z-]+)", site["index.html"])
    assert len(cells) == COUNT * len(report.capabilities)
    assert all(STATUSES[word].code == code for code, word in cells)
    verified = sum(one.status is ComboState.VALID for image in report.images for one in image.combos)
    assert sum(word == "verified" for _, word in cells) == verified > 0
    assert f'<b>verified</b> <span class="c">{verified}</span>' in site["index.html"]


def test_a_page_of_an_image_tells_all_of_it(report: ReportContents, site: dict[str, str]) -> None:
    image = next(one for one in report.images if one.target == "pytorch-2.0-cu121")
    said = Page(site[f"images/{image.target}.html"]).text
    assert image.image is not None
    for part in (
        *(image.image.subject.index, image.image.subject.manifest, "docker pull registry.example.org"),
        *("package-3", "1.2.3", "numpy 1.26.4 -> 2.0.1", "new 1.0 (new)", "the lock before 2026-11-20"),
        *("passed the full suite", "container_image = docker://", "float32-error", "mlp-pytorch-gpu-p95-ms"),
        *("Made V100", "550.54.15", "libtorch_cuda.so has code for 7.0", "lab", "good", "3 of them new"),
    ):
        assert part in said, part


def test_a_failure_stands_beside_what_was_predicted(report: ReportContents, site: dict[str, str]) -> None:
    image = next(one for one in report.images if any(cell.status is ComboState.FAILED for cell in one.combos))
    said = Page(site[f"images/{image.target}.html"]).text
    assert "Contradicts the prediction: predicted to run, and it did not" in said
    assert "matmul is off by 0.3" in said


def test_a_page_of_a_gpu_names_images_by_what_is_known(report: ReportContents, site: dict[str, str]) -> None:
    text = site["gpus/8.0.html"]
    headings = re.findall(r"<h2 id=\"(\w+)\">", text)
    assert headings[0] == "good"
    assert headings[-1] == "effects"
    good = text[text.index('id="good"') : text.index('id="hope"')]
    names = {
        image.target
        for image in report.images
        for one in image.combos
        if str(one.capability) == "8.0" and one.status is ComboState.VALID
    }
    assert set(re.findall(r'images/([^"]+)\.html', good)) == names


def test_what_was_revoked_or_expired_is_told_as_such(report: ReportContents) -> None:
    image = next(one for one in report.images if one.history)
    subject, judged = image.history[0]
    taken = replace(judged, standing=VerdictStatus.REVOKED, why="taken back: it was the wrong machine")
    changed = replace(report, images=(replace(image, history=((subject, taken),)),))
    said = Page(dict(make_site(changed))[f"images/{image.target}.html"]).text
    assert "taken back: it was the wrong machine" in said
    assert runs_of(changed.images[0]) == ()


def test_an_image_that_nobody_built_is_told_as_such(report: ReportContents) -> None:
    image = replace(
        report.images[0],
        offer=None,
        history=(),
        layers=(),
        block="not in the store",
        commands=("imagefactory build t",),
    )
    said = Page(dict(make_site(replace(report, images=(image,))))[f"images/{image.target}.html"]).text
    assert "There is no image of it here: not in the store" in said
    assert "Not tested: no verdict" in said
    assert "imagefactory build t" in said


# --- strangers' text -----------------------------------------------------------------------------


def test_no_strangers_text_becomes_markup(report: ReportContents, site: dict[str, str]) -> None:
    """Names, reasons and verdicts' fields come from others; so do names of files."""
    plain = report.images[0]
    subject, judged = plain.history[0]
    assert judged.verdict is not None
    said = judged.verdict.report
    assert said.device is not None
    verdict = replace(
        judged.verdict,
        keyid=HOSTILE,
        report=replace(
            said,
            reason=HOSTILE,
            contradictions=(HOSTILE,),
            device=replace(said.device, name=HOSTILE),
            checks=tuple(
                replace(check, name=HOSTILE + check.name, detail=HOSTILE, numbers=((HOSTILE, 1.0),))
                for check in said.checks
            ),
        ),
    )
    assert plain.offer is not None
    image = replace(
        plain,
        **dict.fromkeys(("target", "family", "framework", "version", "cuda", "python", "platform"), HOSTILE),
        description=HOSTILE,
        block=HOSTILE,
        since=HOSTILE,
        predicted={
            one: replace(claim, reason=HOSTILE, source=HOSTILE) for one, claim in plain.predicted.items()
        },
        combos=tuple(
            replace(one, reason=HOSTILE, source=HOSTILE, driver=HOSTILE, target=HOSTILE)
            for one in plain.combos
        ),
        history=((subject, replace(judged, verdict=verdict, why=HOSTILE)),),
        moves=(VersionChange(name=HOSTILE, before=HOSTILE, after=HOSTILE),),
        layers=(ReportLayer(title=HOSTILE, digest=HOSTILE, size=1),),
        packages=(ReportPackage(name=HOSTILE, version=HOSTILE, build=HOSTILE),),
        commands=(HOSTILE,),
        submit=replace(plain.submit, text=HOSTILE, why=HOSTILE),
    )
    made = dict(make_site(replace(report, place=HOSTILE, notes=(HOSTILE,), images=(image, plain))))
    name = file_name(HOSTILE)
    assert re.fullmatch(r"image-[0-9a-f]{16}", name)
    assert f"images/{name}.html" in made
    for path, text in made.items():
        if path.endswith(".svg"):
            tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
            assert tags <= {"svg", "title", "style", "rect", "path", "g", "text"}
        elif path.endswith(".html"):
            page = Page(text)
            kinds = {tag for tag, _ in page.tags}
            assert not kinds & {"img", "iframe", "object", "embed", "base"}, path
            scripts = [attributes for tag, attributes in page.tags if tag == "script"]
            assert len(scripts) == (0 if path.startswith("gpus/") else 1), path
            assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
            assert "{{ 7 * 7 }}" in page.text, path
    assert file_name("..") != ".."
    assert "/" not in file_name("a/../../b")


def test_the_log_is_a_page_and_lines_without_users_machines_and_paths(
    report: ReportContents, tmp_path: Path
) -> None:
    assert "log.html" not in dict(make_site(report))
    append_audit(
        tmp_path,
        [
            AuditEntry(action="trust", what="lab", where="/home/ann/lab/imagefactory.toml", key="0" * 64),
            AuditEntry(action="publish", what="catalog", where="out/catalog.json", key=LAB.keyid),
            AuditEntry(action="publish", what="catalog", where="example.org/gpu/catalog:current"),
            AuditEntry(action="promote", what="2.3 -> removed", where="example.org/gpu/one", why=HOSTILE),
        ],
        report.made,
    )
    acts = read_acts(tmp_path, report.keys)
    assert [act.where for act in acts] == [
        *("", ""),
        *("example.org/gpu/catalog:current", "example.org/gpu/one"),
    ]
    assert [act.key for act in acts] == ["0" * 16, LAB.name, "", ""]
    made = dict(make_site(replace(report, acts=acts)))
    lines = [json.loads(line) for line in made["log.jsonl"].splitlines()]
    assert [line["action"] for line in lines] == ["trust", "publish", "publish", "promote"]
    page = Page(made["log.html"])
    assert not {tag for tag, _ in page.tags} & {"img", "script"}
    assert "{{ 7 * 7 }}" in page.text
    assert all(set(line) == {"time", "action", "what", "where", "key", "why"} for line in lines)
    assert {"user", "host"} <= set(next(read_audit(tmp_path)))
    assert not re.search("/home|out/", made["log.jsonl"] + page.text)
    test_every_link_leads_to_a_page_of_the_site_and_none_out_of_it(made)


def test_the_page_of_the_log_has_the_newest(report: ReportContents) -> None:
    acts = tuple(
        PublicLogEntry(time=str(number), action="sign", what="", where="", key="", why="")
        for number in range(MAX_ACTS + 5)
    )
    made = dict(make_site(replace(report, acts=acts)))
    times = re.findall("<tr><td>([0-9]+)</td>", made["log.html"])
    assert times == [str(number) for number in range(MAX_ACTS + 4, 4, -1)]
    assert len(made["log.jsonl"].splitlines()) == len(acts)


# --- numbers -------------------------------------------------------------------------------------


def test_bars_grow_with_what_they_measure() -> None:
    chart = row_chart(
        "x", [ChartMeasure(label="a", value=1.0), ChartMeasure(label="b", value=4.0, upper=8.0)]
    )
    first, second = chart.bars
    assert second.width == pytest.approx(4 * first.width, rel=0.02)
    assert second.reach == pytest.approx(2 * second.width, rel=0.02)
    assert chart.says == "x: a 1 s; b 4 s"
    assert chart.height >= second.y + second.height
    high = column_chart("x", [ChartMeasure(label="a", value=0.0), ChartMeasure(label="b", value=2.0)])
    assert [bar.y + bar.height for bar in high.bars] == [60.0, 60.0]
    assert row_chart("x", []).bars == ()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (2.0, "2"),
        (1234567.0, "1,234,567"),
        (1.23456e-7, "1.235e-07"),
        (0.5, "0.5"),
        (float("inf"), "-"),
    ],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert format_number(number) == text


def test_latencies_are_drawn_with_their_95th_percentile(report: ReportContents) -> None:
    run = runs_of(report.images[0])[0]
    chart = latency_chart(run)
    assert chart is not None
    assert {bar.measure.label for bar in chart.bars} >= {"mlp-pytorch-gpu", "mlp-onnxruntime"}
    assert all(bar.reach > bar.width for bar in chart.bars if bar.width > 1)
    assert check_names([run])[0] == "driver"


def test_the_same_check_across_versions_is_of_one_framework_and_gpu_in_their_order(
    report: ReportContents,
) -> None:
    rows = [(image, runs_of(image)) for image in reversed(report.images)]
    effects = effects_on(rows, "8.0")
    assert {(one.framework, one.gpu) for one in effects} == {("jax", "Made A100")}
    (jax,) = effects
    names = [image.target for image, _ in jax.runs]
    assert names == sorted(names)
    assert len(names) > 1
    chart = next(one for one in jax.charts if one.title.startswith("matmul, up to "))
    assert [bar.measure.label for bar in chart.bars] == names
    found = [run.by_name["matmul"] for _, run in jax.runs]
    assert [bar.measure.value for bar in chart.bars] == [check.seconds for check in found]
    assert [bar.measure.bad for bar in chart.bars] == [check.state is CheckState.FAILED for check in found]


# --- pictures ------------------------------------------------------------------------------------


def test_a_badge_says_where_it_is_verified_and_nothing_else(report: ReportContents) -> None:
    image = next(one for one in report.images if one.target == "pytorch-2.0-cu121")
    where = ", ".join(one.capability.sm for one in image.combos if one.status is ComboState.VALID)
    assert f"<title>pytorch-2.0-cu121: verified on {where}</title>" in format_badge(image)
    untested = replace(image, combos=(combo(ComboState.NOT_TESTED, "not-tested", "predicted"),))
    assert ": not tested</title>" in format_badge(untested)
    foretold = replace(image, combos=(combo(ComboState.RULED_OUT, "no-code", "predicted"),))
    assert ": not tested</title>" in format_badge(foretold)
    failed = replace(image, combos=(combo(ComboState.FAILED, "wrong-numbers"),))
    assert ": wrong-numbers on sm_80</title>" in format_badge(failed)


def test_the_picture_has_a_symbol_for_each_cell(report: ReportContents) -> None:
    root = ElementTree.fromstring(format_picture(matrix_rows(report), matrix_gpus(report)))
    texts = [element.text for element in root.iter() if element.get("class") == "y"]
    words = [word for row in matrix_rows(report) for word in row.words]
    assert texts[: len(words)] == [word.symbol for word in words]
    assert root.get("aria-label", "").startswith(f"{COUNT} images on")


def test_an_image_for_cpus_stands_in_the_matrix_and_on_no_gpus_page(tmp_path: Path) -> None:
    cpu = make_image(target="jax-0.10.2-cpu", family="jax", framework="jax", cuda="none", required=())
    cpu = replace(cpu, predicted=(), envelopes=(), sifs=())
    report = catalog_report(tmp_path, (*many_images(2), cpu))
    site = dict(make_site(report))
    page = Page(site["images/jax-0.10.2-cpu.html"])
    assert "It is for CPUs alone: no GPU is asked for" in page.text
    assert "On each GPU" not in page.text
    assert "request_gpus" not in page.text
    assert page.text.count("request_cpus") == 1
    row = next(line for line in site["index.html"].splitlines() if "jax-0.10.2-cpu" in line)
    assert row.count("<td>no GPU") == len(report.capabilities)
    assert not [name for name, text in site.items() if name.startswith("gpus/") and "jax-0.10.2-cpu" in text]
    assert "jax-0.10.2-cpu" not in site["matrix.svg"]
    assert ": for CPUs</title>" in site["images/jax-0.10.2-cpu.svg"]


def test_an_image_for_amd_is_predicted_on_processors(tmp_path: Path) -> None:
    claim = CellClaim(
        basis=ClaimBasis.PREDICTED, answer=Compatibility.YES, rule="code", reason="it has code", source="scan"
    )
    amd = make_image(target="jax-0.10.2-rocm7", family="jax", framework="jax", cuda="rocm7", runtime="")
    amd = replace(amd, predicted=(("gfx90a", claim),), required=("gfx90a",), envelopes=(), sifs=(), driver="")
    report = catalog_report(tmp_path, (*many_images(2), amd))
    assert str(report.capabilities[-1]) == "gfx90a"
    site = dict(make_site(report))
    page = Page(site["images/jax-0.10.2-rocm7.html"])
    assert "ROCm 7" in page.text
    assert "gfx90a MI250X" in page.text
    assert "request_gpus" not in page.text
    assert "MI210" in site["gpus/gfx90a.html"]
