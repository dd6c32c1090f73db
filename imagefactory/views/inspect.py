"""The GPUs and drivers that can run an image, wheel or library, as text and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypedDict

from imagefactory.gpu.amd import amd_targets, is_amd, is_object, lacks_runtime, target_order
from imagefactory.gpu.capability import Capability, GpuCode
from imagefactory.gpu.frameworks import LibraryRole, cuda_of, find_framework, find_package, role_of
from imagefactory.gpu.predict import INTEGRATED, forward_libraries
from imagefactory.gpu.values import (
    CellClaim,
    ClaimBasis,
    Compatibility,
    GpuLibrary,
    LibrarySupport,
    ModuleCount,
    Prediction,
    ScanResult,
    SupportLevel,
)
from imagefactory.views.text import fold, format_fields, format_matrix

RUNS = (Compatibility.YES, Compatibility.PTX)
ANSWERS = {
    Compatibility.YES: "yes",
    Compatibility.PTX: "PTX",
    Compatibility.PARTLY: "part",
    Compatibility.NO: "no",
    Compatibility.UNKNOWN: "?",
    Compatibility.CPU: "cpu",
}
LEGEND = "N machine code   P PTX, compiled by the driver   12/397 modules   - none"
NAME_WIDTH = 44
_ROLES = (LibraryRole.GATES, LibraryRole.ON_DEMAND, LibraryRole.OTHER, LibraryRole.REPORT)
# Package or file of CUDA's libraries, and their usual names.
_VERSIONED = (("cuBLAS", "cublas"), ("cuDNN", "cudnn"), ("NCCL", "nccl"), ("TensorRT", "tensorrt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The facts about one image, wheel or directory. `how` is a line with the source of its contents.

    `predictions` are for all known capabilities, the oldest first. `contradictions` are differences between
    documentation and scan. `verified` are the verdicts on this image. `platform` is its architecture.
    """

    name: str
    how: str
    digest: str
    contents: ScanResult
    predictions: tuple[Prediction, ...]
    cpu_only: str = ""
    contradictions: tuple[str, ...] = ()
    verified: Mapping[Capability, CellClaim] = field(default_factory=dict)
    platform: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuQuery:
    """The GPU of a query. `title` is its display name, `driver` is empty if unknown.

    `host` is the architecture of its processor, empty for any. `target` is the target ID of an AMD GPU with
    features (`gfx90a:xnack-`).
    """

    title: str
    capability: Capability
    driver: str = ""
    host: str = ""
    target: str = ""


def format_answer(
    name: str, query: GpuQuery, prediction: Prediction, verified: CellClaim | None = None
) -> str:
    """Return one line: the answer, its basis, and the reason. Verdicts have priority."""
    on = f"{query.title}, driver {query.driver}" if query.driver else query.title
    if verified:
        answer = f"{name} on {on}: {_source_note(verified)} ({verified.source})"
        return f"{answer}; predicted: {prediction.answer}, {prediction.reason}"
    line = f"{name} on {on}: {prediction.answer} (predicted): {prediction.reason}"
    if prediction.answer in (*RUNS, Compatibility.PARTLY) and prediction.driver and not query.driver:
        line += f"; driver {prediction.driver} or newer"
    warnings = () if prediction.answer is Compatibility.NO else prediction.warnings
    return "; ".join([line, *(f"warning: {warning}" for warning in warnings)])


def format_parts(line: str, parts: Sequence[tuple[str, Compatibility, str]], how: str) -> str:
    """Return the answer about a package, then a line for each of its parts, and the source."""
    rows = [(package, f"{answer}: {reason}") for package, answer, reason in parts if len(parts) > 1]
    return f"{line}\n{format_fields([*rows, ('from', how)])}"


def _source_note(claim: CellClaim) -> str:
    word = "verified" if claim.answer is Compatibility.YES else f"verified, {claim.rule}"
    return f"{claim.answer} ({word}): {claim.reason}"


def format_inspection(inspection: Inspection, width: int | None = None, *, every: bool = False) -> str:
    """Return the type, the GPUs that can run it, and a table of libraries x capabilities.

    Without `every`, integrated GPUs, GPUs older than its code, and libraries that do not affect the answer
    are omitted.
    """
    parts = [f"{inspection.name}\n{format_fields(_fields(inspection), width=width)}"]
    nvidia = [
        pair for pair in ordered_libraries(inspection.contents) if pair[0].modules and not is_amd(pair[0])
    ]
    if nvidia:
        parts.append(_format_cuda(inspection, nvidia, width, every=every))
    amd = [pair for pair in ordered_libraries(inspection.contents) if is_amd(pair[0])]
    if amd:
        parts.append(_format_amd(amd, width))
    if not nvidia and not amd:
        parts.append("no GPU code was found")
    return "\n\n".join(parts)


def _fields(inspection: Inspection) -> list[tuple[str, str]]:
    contents = inspection.contents
    framework = find_framework(contents)
    fields = [("from", inspection.how)]
    if inspection.digest:
        fields.append(("digest", inspection.digest))
    if inspection.platform:
        fields.append(("for", f"linux/{inspection.platform}"))
    if framework is not None:
        package = find_package(contents, framework)
        named = f"{package.name} {package.version}" if package else framework.name
        fields.append(("framework", f"{named} ({package.build})" if package and package.build else named))
    versions = [f"{name} {version}" for name, version in library_versions(contents)]
    cuda = cuda_of(contents)
    if cuda or versions:
        fields.append(("CUDA", ", ".join([cuda or "version not known", *versions])))
    if lacks_runtime(contents):
        fields.append(("ROCm", "its own libraries are not in it, and must be where it runs"))
    verified = [
        f"{capability}: {_source_note(claim)}" for capability, claim in sorted(inspection.verified.items())
    ]
    fields += [("verified" if i == 0 else "", line) for i, line in enumerate(verified)]
    if inspection.cpu_only:
        fields.append(("CPU only", inspection.cpu_only))
    elif contents.libraries:
        fields += [("predicted" if i == 0 else "", line) for i, line in enumerate(_predicted(inspection))]
        fields += [("driver" if i == 0 else "", line) for i, line in enumerate(_drivers(inspection))]
    fields += [("forward" if i == 0 else "", line) for i, line in enumerate(forward_libraries(contents))]
    # GPUs that cannot run it need no warning.
    usable = [
        prediction for prediction in inspection.predictions if prediction.answer is not Compatibility.NO
    ]
    warnings = dict.fromkeys(warning for prediction in usable for warning in prediction.warnings)
    fields += [("warning", _warned(usable, warning)) for warning in warnings]
    fields += [("contradiction", line) for line in inspection.contradictions]
    fields += [
        ("damaged", f"{library.path}: {library.damage}") for library in contents.libraries if library.damage
    ]
    fields += [
        ("not read", f"{library.path}: {library.unread}") for library in contents.libraries if library.unread
    ]
    if framework is not None and framework.runtime and not inspection.cpu_only:
        fields.append(("not seen", f"what {framework.runtime} compiles while it runs"))
    return fields


def _predicted(inspection: Inspection) -> list[str]:
    """Return a line for each answer and reason. Reasons that differ only in the capability are merged."""
    lines = []
    for answer in (
        Compatibility.YES,
        Compatibility.PTX,
        Compatibility.PARTLY,
        Compatibility.NO,
        Compatibility.UNKNOWN,
    ):
        some = [prediction for prediction in inspection.predictions if prediction.answer is answer]
        if answer in RUNS:
            groups = [some] if some else []
        else:
            some.sort(key=_reason)
            groups = [list(group) for _, group in groupby(some, key=_reason)]
        for group in sorted(groups, key=lambda prediction: prediction[0].capability):
            capabilities = _capabilities(group)
            lines.append(f"{answer} on {capabilities}" + ("" if answer in RUNS else f": {_reason(group[0])}"))
    return lines


def _reason(prediction: Prediction) -> str:
    """Return the reason without the capability, which is printed before it."""
    capability_pattern = re.escape(str(prediction.capability))
    return re.sub(rf"\b(on|for) {capability_pattern}(?![.\d])", r"\1 it", prediction.reason)


def _drivers(inspection: Inspection) -> list[str]:
    """Return the oldest driver of most capabilities, then that of other capabilities."""
    known: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in inspection.predictions:
        if prediction.answer in (*RUNS, Compatibility.PARTLY) and (
            prediction.driver or prediction.driver_reason
        ):
            known.setdefault((prediction.driver, prediction.driver_reason), []).append(prediction)
    ordered = sorted(known.items(), key=lambda item: -len(item[1]))
    lines = []
    for (driver, reason), some in ordered:
        text = f"{driver} or newer: {reason}" if driver else f"not known: {reason}"
        lines.append(text if len(ordered) == 1 else f"{text} (on {_capabilities(some)})")
    return lines


def _warned(predictions: Sequence[Prediction], warning: str) -> str:
    some = [prediction for prediction in predictions if warning in prediction.warnings]
    return warning if len(some) == len(predictions) else f"on {_capabilities(some)}: {warning}"


def _capabilities(predictions: Sequence[Prediction]) -> str:
    return " ".join(str(prediction.capability) for prediction in predictions)


def library_versions(contents: ScanResult) -> tuple[tuple[str, str], ...]:
    """Return the name and version of CUDA libraries, from packages or else from file names."""

    def stem(file: str) -> str:
        stem = file.partition(".so.")[0].removeprefix("lib").partition("-")[0]
        return "tensorrt" if stem == "nvinfer" else stem

    versions = []
    for name, word in _VERSIONED:
        known = [
            package.version
            for package in contents.packages
            if package.name.removeprefix("nvidia-").removeprefix("lib").partition("-")[0] == word
        ]
        files = [file.partition(".so.")[2] for file in contents.toolkit if word == stem(file)]
        candidates = known or files
        if candidates:
            versions.append((name, max(candidates, key=len)))
    return tuple(versions)


def ordered_libraries(contents: ScanResult) -> list[tuple[GpuLibrary, LibraryRole]]:
    """Return libraries with their role, those that decide the answer first."""
    framework = find_framework(contents)
    roles = [(library, role_of(library.path, framework)[0]) for library in contents.libraries]
    return sorted(roles, key=lambda pair: (_ROLES.index(pair[1]), pair[0].path))


def _format_cuda(
    inspection: Inspection,
    libraries: Sequence[tuple[GpuLibrary, LibraryRole]],
    width: int | None,
    *,
    every: bool,
) -> str:
    columns = [
        prediction
        for prediction in inspection.predictions
        if not prediction.capability.processor and (every or prediction.capability not in INTEGRATED)
    ]
    displayed = [pair for pair in libraries if every or pair[1] is not LibraryRole.REPORT] or list(libraries)
    paths = {library.path for library, _ in displayed}
    if not every:
        while columns and not any(_reaches(columns[0], path) for path in paths):
            columns = columns[1:]
    if not columns:
        return f"{len(displayed)} libraries with GPU code, none of it for a known GPU"
    names = _short_names(displayed)
    supports = [{row.path: row for row in column.libraries} for column in columns]
    header = ("LIBRARY", "", *(str(prediction.capability) for prediction in columns))
    rows = [
        (
            name,
            str(role) if role in (LibraryRole.GATES, LibraryRole.ON_DEMAND) else "",
            *(_cell(support.get(library.path)) for support in supports),
        )
        for name, (library, role) in zip(names, displayed, strict=True)
    ]
    if inspection.contents.libraries and not inspection.cpu_only:
        rows.append(("predicted", "", *(ANSWERS[prediction.answer] for prediction in columns)))
    lines = [format_matrix(header, rows, width, keep=2), *fold([LEGEND], width)]
    hidden = len(libraries) - len(displayed)
    if hidden:
        some = "1 library" if hidden == 1 else f"{hidden} libraries"
        note = f"{some} of CUDA select their own code and are not shown; --all shows them"
        lines += fold([note], width)
    return "\n".join(lines)


def _cell(library: LibrarySupport | None) -> str:
    if library is None:
        return "?"
    if library.reach is SupportLevel.PARTIAL:
        return f"{library.native + library.ptx}/{library.native + library.ptx + library.without}"
    return {SupportLevel.NATIVE: "N", SupportLevel.PTX: "P", SupportLevel.NONE: "-"}[library.reach]


def _reaches(column: Prediction, path: str) -> bool:
    return any(
        library.path == path and library.reach is not SupportLevel.NONE for library in column.libraries
    )


def _short_names(libraries: Sequence[tuple[GpuLibrary, LibraryRole]]) -> list[str]:
    """Return short names: file names of framework and CUDA libraries, paths of others and of duplicates."""
    known = [library.path.rpartition("/")[2] for library, _ in libraries]
    return [
        _tail(library.path) if role is LibraryRole.OTHER or known.count(name) > 1 else name
        for name, (library, role) in zip(known, libraries, strict=True)
    ]


def _tail(path: str) -> str:
    tail = re.sub(r"^.*(?:site|dist)-packages/", "", path)
    return tail if len(tail) <= NAME_WIDTH else f".../{tail.rpartition('/')[2]}"


def _format_amd(libraries: Sequence[tuple[GpuLibrary, LibraryRole]], width: int | None) -> str:
    """Return a table of libraries x AMD processors. Files for one GPU are counted."""
    displayed = [library for library in libraries if not is_object(library[0])]
    objects = [library for library, _ in libraries if is_object(library)]
    parts = [_amd_table(displayed, width)] if displayed else []
    if objects:
        count = f"{len(objects)} code object{'s' * (len(objects) != 1)}"
        parts.append(f"{count}, a file for one GPU each: {', '.join(_processors(objects))}")
    return "\n".join(parts)


def _amd_table(libraries: Sequence[tuple[GpuLibrary, LibraryRole]], width: int | None) -> str:
    processors = _processors([library for library, _ in libraries])
    rows = []
    for name, (library, _) in zip(_short_names(libraries), libraries, strict=True):
        total = sum(modules.count for modules in library.modules)
        cells = []
        for processor in processors:
            count = sum(
                modules.count
                for modules in library.modules
                if any(_processor(code.processor) == processor for code in modules.codes)
            )
            cells.append("N" if count == total else f"{count}/{total}" if count else "-")
        rows.append((name, *cells))
    legend = (
        "N code in all modules, 12/397 in so many, - none; AMD code runs only on the processors that it names"
    )
    return "\n".join([format_matrix(("LIBRARY", *processors), rows, width, keep=1), *fold([legend], width)])


def _codes(library: GpuLibrary) -> list[GpuCode]:
    return [code for modules in library.modules for code in modules.codes if code.processor]


def _processors(libraries: Sequence[GpuLibrary]) -> list[str]:
    names = {_processor(code.processor) for library in libraries for code in _codes(library)}
    return sorted(names, key=target_order)


def _processor(text: str) -> str:
    return text.partition(":")[0]


# --- JSON


class LibraryPredictionRow(TypedDict):
    """The modules of a library by the code that they have for a capability."""

    path: str
    support: SupportLevel
    native: int
    ptx: int
    unsupported: int
    isa: str
    """The newest PTX that the driver must compile; empty for none."""
    required: bool
    """Whether the framework must load the library."""


class PredictionRow(TypedDict):
    capability: str
    basis: Literal["predicted"]
    answer: Compatibility
    reason: str
    driver: str
    """The oldest driver for Linux; empty if unknown."""
    driver_reason: str
    warnings: Sequence[str]
    libraries: list[LibraryPredictionRow]


class VerifiedRow(TypedDict):
    capability: str
    basis: ClaimBasis
    answer: Compatibility
    rule: str
    reason: str
    source: str
    driver: str


class ScannedLibraryRow(TypedDict):
    path: str
    size: int
    role: LibraryRole
    compressions: Sequence[str]
    damage: str
    """What is wrong with its GPU code; empty for nothing."""
    unread: str
    """Its entries of unknown types; empty for none."""
    modules: Sequence[ModuleCount]


class ScannedPackageRow(TypedDict):
    name: str
    version: str
    build: str
    """Of a conda package; empty for others."""


class FactRow(TypedDict):
    framework: str
    key: str
    value: str


class CompatScanDocument(TypedDict):
    """The GPU code in an image, wheel, package or directory, and where it runs."""

    format: Literal["imagefactory.compat-scan/1"]
    name: str
    source: str
    """What was scanned."""
    digest: str
    architecture: str
    framework: str
    framework_version: str
    cuda: str
    versions: dict[str, str]
    cpu_only: str
    contradictions: Sequence[str]
    libraries: list[ScannedLibraryRow]
    amd_targets: Sequence[str]
    predictions: list[PredictionRow]
    verified: list[VerifiedRow]
    packages: list[ScannedPackageRow]
    facts: list[FactRow]
    toolkit: Sequence[str]


class PackageAnswerRow(TypedDict):
    """The answer of one package that has GPU code, such as torch 2.7.1."""

    package: str
    answer: Compatibility
    reason: str


class ScannedGpuRow(PredictionRow):
    gpu: str
    requested_driver: str
    verified: CellClaim | None
    fix: str
    """What may work instead of a package of the index; empty if unknown."""
    packages: list[PackageAnswerRow]
    """Of a package of the index and of what it pins, the worst first; empty for others."""


class CompatScanGpusDocument(TypedDict):
    """Whether an image, wheel, package or directory runs on the requested GPUs."""

    format: Literal["imagefactory.compat-scan-gpus/1"]
    name: str
    source: str
    """What was scanned."""
    digest: str
    gpus: list[ScannedGpuRow]


def inspection_json(inspection: Inspection) -> CompatScanDocument:
    contents = inspection.contents
    framework = find_framework(contents)
    package = find_package(contents, framework) if framework else None
    return CompatScanDocument(
        format="imagefactory.compat-scan/1",
        name=inspection.name,
        source=inspection.how,
        digest=inspection.digest,
        architecture=inspection.platform,
        framework=framework.name if framework else "",
        framework_version=package.version if package else "",
        cuda=cuda_of(contents),
        versions=dict(library_versions(contents)),
        cpu_only=inspection.cpu_only,
        contradictions=inspection.contradictions,
        libraries=[
            ScannedLibraryRow(
                path=library.path,
                size=library.size,
                role=role,
                compressions=library.compressions,
                damage=library.damage,
                unread=library.unread,
                modules=library.modules,
            )
            for library, role in ordered_libraries(contents)
        ],
        amd_targets=amd_targets(contents),
        predictions=[prediction_json(prediction) for prediction in inspection.predictions],
        verified=[
            VerifiedRow(
                capability=str(capability),
                basis=claim.basis,
                answer=claim.answer,
                rule=claim.rule,
                reason=claim.reason,
                source=claim.source,
                driver=claim.driver,
            )
            for capability, claim in inspection.verified.items()
        ],
        packages=[
            ScannedPackageRow(name=package.name, version=package.version, build=package.build)
            for package in contents.packages
        ],
        facts=[FactRow(framework=name, key=key, value=value) for name, key, value in contents.facts],
        toolkit=contents.toolkit,
    )


def prediction_json(prediction: Prediction) -> PredictionRow:
    return PredictionRow(
        capability=str(prediction.capability),
        basis="predicted",
        answer=prediction.answer,
        reason=prediction.reason,
        driver=prediction.driver,
        driver_reason=prediction.driver_reason,
        warnings=prediction.warnings,
        libraries=[
            LibraryPredictionRow(
                path=library.path,
                support=library.reach,
                native=library.native,
                ptx=library.ptx,
                unsupported=library.without,
                isa=library.isa,
                required=library.gates,
            )
            for library in prediction.libraries
        ],
    )
