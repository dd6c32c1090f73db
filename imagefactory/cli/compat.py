"""The compat command, which shows the GPUs on which images, releases and packages run."""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    capability_of,
    complete_targets,
    driver_of,
    json_option,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import (
    EXIT_CHECK,
    EXIT_UNKNOWN,
    NothingSelectedError,
    RecipeError,
    UnknownAnswerError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagefactory.actions.inspect import InspectResult
    from imagefactory.gpu.capability import Capability
    from imagefactory.gpu.values import CellClaim, Compatibility
    from imagefactory.matrix.compat import CompatGpu, CompatRow, CoverCandidate
    from imagefactory.model import Target
    from imagefactory.project import Project
    from imagefactory.schedulers.pool import Inventory
    from imagefactory.views.inspect import GpuQuery, ScannedGpuRow


def _complete_families(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from imagefactory.gpu.knowledge import families

    return [name for name in families() if name.startswith(incomplete)]


def _complete_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of families, and in a project also targets."""
    choices = _complete_families(ctx, parameter, incomplete), complete_targets(ctx, parameter, incomplete)
    return [name for names in choices for name in names]


@click.command(cls=Command)
@click.argument(
    "names",
    metavar="[TARGET|FAMILY|PACKAGE==VERSION|IMAGE|FILE|DIR]...",
    nargs=-1,
    shell_complete=_complete_names,
)
@section("GPU and versions")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="NAME",
    help='The GPU: V100, "RTX 5090" or gfx90a. Scans accept several.',
)
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    metavar="X.Y",
    help="The compute capability, instead of a GPU.",
)
@click.option(
    "--driver", default="", metavar="VERSION", help="The Linux driver of that GPU: 535 or 535.54.03."
)
@click.option("--cuda", default="", metavar="X.Y", help="The CUDA version of PACKAGE==VERSION.")
@section("Scans")
@click.option(
    "--scan",
    is_flag=True,
    help="Scan the GPU code of one target, image, wheel, .sif, directory or library.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Show all libraries and capabilities of a scan, all CUDA versions of a release.",
)
@click.option("--offline", is_flag=True, help="Do not look up a package that no table and no cache knows.")
@section("Other questions")
@click.option(
    "--cover",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=(
        "Show the fewest images of each family for these GPUs: a list of {name: V100, driver: "
        '"535.129.03", count: 24}, or capability: "7.0".'
    ),
)
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="NAME",
    shell_complete=_complete_families,
    help="With --cover: only this family (repeatable).",
)
@click.option(
    "--differences", is_flag=True, help="Show where scanned wheels differ from their documentation."
)
@click.option("--sources", is_flag=True, help="Show the sources of the answer. --json always has them.")
@json_option
@click.pass_obj
def compat(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    gpus: tuple[str, ...],
    capabilities: tuple[str, ...],
    driver: str,
    cuda: str,
    scan: bool,
    every: bool,
    offline: bool,
    file: Path | None,
    families: tuple[str, ...],
    differences: bool,
    sources: bool,
    as_json: bool,
) -> None:
    """Show on which GPUs something runs, and why.

    \b
    imagefactory compat pytorch-2.3-cu121              on which GPUs it runs
    imagefactory compat --gpu V100                     what runs on this GPU
    imagefactory compat --gpu V100 --driver 535 'pytorch-*'
    imagefactory compat torch==2.6 --cuda 12.4 --gpu V100
    imagefactory compat ctranslate2==4.6.0 --gpu V100  scan a package of the index
    imagefactory compat ./model.sif --gpu "RTX 5090"   scan a file or an image
    imagefactory compat --cover gpus.yaml              the fewest images for them

    An image, a file or a directory is scanned for GPU code. --scan also scans the image or the packages of
    a target. Any other answer comes from tables of known releases.

    A package that no table knows is looked up on the package index: uv solves it for the newest Python that
    it has wheels for, and the wheels of the solution are scanned as they arrive. Nothing is installed, and
    only the scans are stored. The worst package decides.

    Exit code 9 if nothing runs on the GPU, if a GPU of --cover has no image, or if a part of the scan does
    not run. Exit code 11 if that is not known.
    """
    source_path = names[0] if len(names) == 1 and (scan or _is_place(names[0])) else None
    reject_conflict(
        scan and source_path is None,
        "--scan requires exactly one target, image, file or directory",
        "pass one",
    )
    reject_conflict(
        every and source_path is None and not any("==" in name for name in names),
        "--all requires a scan or releases",
        "add --scan, or write, for example, torch==2.6",
    )
    if source_path is not None:
        others = {"--cuda": cuda, "--cover": file, "--family": families, "--differences": differences}
        others["--sources"] = sources
        for option, value in others.items():
            reject_conflict(value, f"{option} does not apply to a scan", f"remove {option}")
        scan_place = _place_scanner(call, source_path)
        return _scan(call, source_path, gpus, capabilities, driver, scan_place, every=every, as_json=as_json)
    tables = file or families or differences
    package, listed = ("", False) if tables else _package_to_look_up(names, gpus, capabilities, driver, cuda)
    if package and not (listed and offline):

        @functools.cache
        def look_up(host: str) -> InspectResult:
            from imagefactory.actions.inspect import inspect_package

            platform = f"linux/{host or 'amd64'}"
            return inspect_package(call.access, package, platform, call.progress, cuda=cuda, offline=offline)

        try:
            return _scan(call, package, gpus, capabilities, driver, look_up, every=every, as_json=as_json)
        except (NothingSelectedError, UnknownAnswerError) as error:
            if not listed:
                raise
            call.progress.note(f"{error.message}: the answer is from the tables of known releases")
    reject_conflict(
        len(gpus) + len(capabilities) + (file is not None) + differences > 1,
        "these options select different tables",
        "use one of --gpu, --capability, --cover, --differences",
    )
    reject_conflict(
        driver and not (gpus or capabilities),
        "--driver requires --gpu or --capability",
        "add one of them or remove --driver",
    )
    reject_conflict(
        families and file is None,
        "--family requires --cover",
        "add --cover, or pass the families as arguments",
    )
    reject_conflict(
        cuda and not (names and all("==" in name for name in names)),
        "--cuda requires releases as arguments",
        "write, for example, torch==2.6 --cuda 12.4",
    )
    if differences:
        return _differences(names, as_json=as_json)
    if file:
        return _cover(call, file, (*names, *families), sources=sources, as_json=as_json)
    merge = not (every or sources) and any("==" in name for name in names)
    if gpus or capabilities:
        device = _gpu(gpus, capabilities, driver)
        return _parse_single_gpu(
            device, _candidates(call, names, cuda=cuda), sources=sources, merge=merge, as_json=as_json
        )
    candidates = _candidates(call, names, cuda=cuda, every_version=True)
    return _table(candidates, sources=sources, merge=merge, as_json=as_json)


def _package_to_look_up(
    names: tuple[str, ...], gpus: tuple[str, ...], capabilities: tuple[str, ...], driver: str, cuda: str
) -> tuple[str, bool]:
    """Return the one release in the names if it must be looked up, and whether a table answers it too.

    A release is looked up if no table knows whether it runs on the GPU, or if it requires a framework, which
    must run there too. Other releases are empty.
    """
    from imagefactory.gpu.frameworks import required_framework
    from imagefactory.gpu.values import Compatibility
    from imagefactory.matrix.compat import columns, exact_releases, rows

    (name,) = names if len(names) == 1 else ("",)
    if "==" not in name or name.endswith("*"):
        return "", False
    if re.search(r"\]==|[0-9]\.?(?:rc|a|b|dev)[0-9]+$", name):
        return name, False  # with an extra, or before a release: the tables have none
    devices = (_gpu(gpus[:1], capabilities[:1], driver),) if gpus or capabilities else columns()
    table = rows(exact_releases(name, cuda), devices)
    known = any(
        cell.claims and cell.answer is not Compatibility.UNKNOWN for row in table for cell in row.cells
    )
    amd = any(device.capability.processor for device in devices)
    requires = any(required_framework(row.candidate.question.framework) for row in table)
    return (name, known) if not known or (requires and not amd) else ("", False)


def _is_place(name: str) -> bool:
    """Return whether a name is an image, a file or a directory, and not a target, family or release."""
    return (
        any(mark in name for mark in ":/@") or name.endswith((".whl", ".sif", ".so")) or name in (".", "..")
    )


def _table(candidates: list[CoverCandidate], *, sources: bool, merge: bool, as_json: bool) -> None:
    """Print versions x CUDA x capability for families and frameworks, or targets x capability for targets."""
    from imagefactory.gpu.values import rocm_of
    from imagefactory.matrix.compat import check_known, columns, rows
    from imagefactory.views.compat import format_rows, merge_releases

    amd = [bool(rocm_of(candidate.question.cuda)) for candidate in candidates]
    if not any(candidate.name for candidate in candidates):
        check_known([row for maker in sorted(set(amd)) for row in rows(candidates, columns(amd=maker))])
    if as_json:
        gpus = tuple(gpu for maker in sorted(set(amd)) for gpu in columns(amd=maker))
        return _print_rows(rows(candidates, gpus), gpus)
    tables = []
    for maker in sorted(set(amd)):  # NVIDIA's GPUs, then AMD's
        gpus = columns(amd=maker)
        table = rows([candidate for candidate, of in zip(candidates, amd, strict=True) if of == maker], gpus)
        table = merge_releases(table) if merge else table
        capabilities = [gpu.capability for gpu in gpus]
        tables.append(format_rows(table, capabilities, terminal_width(), show_sources=sources))
    return print_result("\n\n".join(tables))


def _parse_single_gpu(
    gpu: CompatGpu, candidates: list[CoverCandidate], *, sources: bool, merge: bool, as_json: bool
) -> None:
    from imagefactory.gpu.values import Compatibility
    from imagefactory.matrix.compat import check_known, for_maker, rows, serves, with_fixes
    from imagefactory.views.compat import format_gpu

    table = rows(for_maker(candidates, gpu), (gpu,))
    check_known(table)
    table = with_fixes(table, gpu)
    unknown = [row.candidate for row in table if row.cells[0].answer is Compatibility.UNKNOWN]
    if as_json:
        _print_rows(table, (gpu,))
    else:
        print_result(format_gpu(gpu, table, terminal_width(), show_sources=sources, merge=merge))
        named = [row.candidate.name for row in table if row.candidate.name and serves(row.cells[0])]
        if named:
            print_next_command("show", named[0])
        elif unknown and unknown[0].name:  # the suite on such a GPU answers it
            print_next_command("verify" if unknown[0].lock == "ok" else "lock", unknown[0].name)
    if not any(serves(row.cells[0]) for row in table):
        raise click.exceptions.Exit(EXIT_UNKNOWN if unknown else EXIT_CHECK)


def _cover(call: CommandContext, file: Path, names: tuple[str, ...], *, sources: bool, as_json: bool) -> None:
    from imagefactory.gpu.values import Compatibility
    from imagefactory.matrix.compat import by_group, check_known, cover, exact_releases, rows
    from imagefactory.schedulers.inventory import read_inventory
    from imagefactory.views.compat import covers_json, format_covers

    gpus = _pool_gpus(read_inventory(file))
    candidates = _candidates(call, names)
    table = rows(candidates, gpus)
    for name in names:
        titles = {candidate.title for candidate in (exact_releases(name) if "==" in name else ())}
        some = [row for row in table if row.candidate.title in titles]
        if some and not any(cell.claims for row in some for cell in row.cells):
            raise UnknownAnswerError(
                "release-unknown",
                f"no table knows {name}, and --cover does not look it up",
                hint=f"query one GPU at a time: imagefactory compat {name} --gpu NAME",
            )
    check_known(table)
    covers = [cover(group, some, gpus) for group, some in by_group(candidates)]
    if as_json:
        print_json(covers_json(covers))
    else:
        print_result(format_covers(covers, terminal_width(), show_sources=sources))
        named = [choice.candidate.name for row in covers for choice in row.images if choice.candidate.name]
        if named:
            print_next_command("build", *named)
    lacking = [[row for cover in covers for row in cover.unserved if row.gpu == gpu] for gpu in gpus]
    lacking = [rows for rows in lacking if len(rows) == len(covers)]
    if lacking:
        unknown = all(any(row.answer is Compatibility.UNKNOWN for row in rows) for rows in lacking)
        raise click.exceptions.Exit(EXIT_UNKNOWN if unknown else EXIT_CHECK)


def _pool_gpus(inventory: Inventory) -> list[CompatGpu]:
    """Return each type of GPU of an inventory, with its count. Raises NothingSelectedError."""
    from imagefactory.gpu.capability import parse_capability
    from imagefactory.gpu.knowledge import native_driver
    from imagefactory.matrix.compat import CompatGpu

    counts = Counter((gpu.name, gpu.capability, gpu.driver, gpu.cuda, gpu.host) for gpu in inventory.known)
    if not counts:
        raise NothingSelectedError(
            "inventory-no-gpu",
            "the inventory has no GPU with a known capability",
            hint="add one: - name: V100",
        )
    return [
        CompatGpu(
            name=name or capability,
            capability=parse_capability(capability),
            driver=driver or (native_driver(cuda) if cuda else ""),
            count=count,
            host=host,
        )
        for (name, capability, driver, cuda, host), count in counts.items()
    ]


def _check_not_cpu(targets: Sequence[Target], names: Sequence[str]) -> None:
    """Raise UsageError for a named target without GPU support."""
    for target in targets:
        if target.name in names and not target.gpu:
            raise UsageError(
                "target-without-gpu", f"{target.name} is for CPUs only", hint=f"remove {target.name}"
            )


def _gpu(names: tuple[str, ...], capabilities: tuple[str, ...], driver: str) -> CompatGpu:
    """Return the requested GPU. Raises UsageError for an invalid option."""
    from imagefactory.gpu.knowledge import find_gpu
    from imagefactory.matrix.compat import CompatGpu

    driver = driver_of(driver)
    for name in names:
        gpu = find_gpu(name)
        _check_no_driver(gpu.capability, driver)
        return CompatGpu(name=gpu.name, capability=gpu.capability, driver=driver, host=gpu.host)
    processor = capability_of(capabilities[0], "write --capability 8.6, or --gpu with a name")
    _check_no_driver(processor, driver)
    return CompatGpu(name=str(processor), capability=processor, driver=driver)


def _check_no_driver(capability: Capability, driver: str) -> None:
    if capability.processor and driver:
        raise UsageError("option-conflict", "--driver does not apply to AMD GPUs", hint="remove --driver")


def _candidates(
    call: CommandContext, names: tuple[str, ...], *, cuda: str = "", every_version: bool = False
) -> list[CoverCandidate]:
    """Return the candidates of targets, families, frameworks and releases (for `cuda`); all without names.

    If no recipe has a framework, its known versions represent it. With `every_version`, these are added to
    the targets. Raises NothingSelectedError for an unknown name.
    """
    from imagefactory.gpu.knowledge import aliases, families
    from imagefactory.matrix.compat import exact_releases, releases, with_releases

    factory = None if names and all("==" in name for name in names) else call.factory_if_any
    targets = factory.targets if factory else ()
    _check_not_cpu(targets, names)
    targets = tuple(target for target in targets if target.gpu)
    if factory and names and (problems := factory.problems_of(names)):
        raise RecipeError(problems)
    if not names:
        if factory:
            factory.note_invalid(factory.invalid)
        return (
            _read_candidates(factory, targets)
            if targets
            else [candidate for name in families().values() for candidate in releases(name)]
        )
    candidates: dict[str, CoverCandidate] = {}
    for name in names:
        if "==" in name:
            candidates |= {candidate.title: candidate for candidate in exact_releases(name, cuda)}
            continue
        framework = families().get(name) or aliases().get(name, (name,))[0]
        framework = framework if framework in families().values() else ""
        family = [  # what is built on others is asked for by its own name
            target
            for target in targets
            if target.family == name
            or (target.source, target.framework, target.on) == ("pypi", framework, "")
        ]
        some = _read_candidates(factory, family or (() if framework else _select(targets, name)))
        if framework and (every_version or not some):
            some = list(with_releases(some, framework))
        candidates |= {candidate.title: candidate for candidate in some}
    return list(candidates.values())


def _read_candidates(factory: Project | None, targets: Sequence[Target]) -> list[CoverCandidate]:
    from imagefactory.actions.find import read_candidates

    return read_candidates(factory, targets)


def _select(targets: Sequence[Target], name: str) -> Sequence[Target]:
    from imagefactory.recipes.expand import select

    try:
        return select(targets, (name,))
    except NothingSelectedError as error:
        selectable = "target, family or framework"
        more = error.hint if targets else "to see the targets of a project, pass its directory: -C DIR"
        if Path(name).exists():
            more = f"to scan the file or directory: imagefactory compat --scan {shlex.quote(name)}"
        raise _unknown_name_error(name, selectable, more, {target.family for target in targets}) from error


def _unknown_name_error(
    name: str, selectable: str, more: str, known: Collection[str] = ()
) -> NothingSelectedError:
    """Return the error for an unknown name. `known` are valid names in addition to the frameworks."""
    from imagefactory.gpu.knowledge import families
    from imagefactory.recipes.yaml_tree import show
    from imagefactory.versions import nearest

    frameworks = sorted({*families(), *families().values()})
    suggestion = nearest(name, [*frameworks, *sorted(known)])
    hint = (
        f"did you mean '{suggestion}'?"
        if suggestion
        else more or f"the frameworks are {', '.join(frameworks)}"
    )
    return NothingSelectedError("target-unknown", f"no {selectable} is named {show(name)}", hint=hint)


def _print_rows(rows: Sequence[CompatRow], gpus: Sequence[CompatGpu]) -> None:
    from imagefactory.views.compat import compat_json

    print_json(compat_json(rows, gpus))


def _differences(names: tuple[str, ...], *, as_json: bool) -> None:
    from imagefactory.gpu.contradictions import find_differences
    from imagefactory.gpu.knowledge import families
    from imagefactory.views.compat import differences_json, format_differences

    frameworks = {families().get(name, name) for name in names}
    for name in sorted(frameworks - {*families().values()}):
        raise _unknown_name_error(name, "framework", "")
    differences = [row for row in find_differences() if not names or row.framework in frameworks]
    if as_json:
        return print_json(differences_json(differences))
    return print_result(format_differences(differences, terminal_width()))


# --- What an image, wheel or library can run on by its GPU code


def _place_scanner(call: CommandContext, name: str) -> Callable[[str], InspectResult]:
    from imagefactory.actions.inspect import inspect_place

    @functools.cache
    def contents() -> InspectResult:
        return inspect_place(call.access, lambda: call.factory, name, call.progress)

    return lambda _: contents()


def _scan(
    call: CommandContext,
    name: str,
    gpus: tuple[str, ...],
    capabilities: tuple[str, ...],
    driver: str,
    look: Callable[[str], InspectResult],
    *,
    every: bool,
    as_json: bool,
) -> None:
    """Predict from the GPU code of an image, file or package on which GPUs it runs. Verdicts have priority.

    `look` returns the contents for the architecture of a GPU's machine, which is empty for any.
    """
    from imagefactory.actions.inspect import cpu_reason, inspected_verdicts, predict_everywhere
    from imagefactory.gpu.contradictions import contradictions
    from imagefactory.gpu.frameworks import cpu_only
    from imagefactory.gpu.values import Compatibility
    from imagefactory.trust.claims import verified_claims
    from imagefactory.views.inspect import (
        RUNS,
        CompatScanGpusDocument,
        GpuQuery,
        Inspection,
        format_inspection,
        inspection_json,
    )

    driver = driver_of(driver)
    queries = [_gpu_option(gpu, driver) for gpu in gpus]
    for text in capabilities:
        capability = capability_of(text, "to pass the name of a GPU, use --gpu")
        queries.append(GpuQuery(title=str(capability), capability=capability, driver=driver))
    if driver and queries and all(query.capability.processor for query in queries):
        raise UsageError("option-conflict", "--driver does not apply to AMD GPUs", hint="remove --driver")
    inspected = look(queries[0].host if queries else "")
    verdicts = inspected_verdicts(call.access, name, inspected.digest, datetime.now(UTC))
    verified = verified_claims(verdicts, driver)
    if queries:
        answers = [_answer(name, query, look(query.host), verified) for query in queries]
        if not as_json:
            print_result("\n".join(line for _, line, _ in answers))
        else:
            print_json(
                CompatScanGpusDocument(
                    format="imagefactory.compat-scan-gpus/1",
                    name=name,
                    source=inspected.how,
                    digest=inspected.digest,
                    gpus=[row for _, _, row in answers],
                )
            )
        wrong = [answer for answer, _, _ in answers if answer not in (*RUNS, Compatibility.CPU)]
        unknown = all(answer is Compatibility.UNKNOWN for answer in wrong)
        if wrong and unknown and not as_json:
            image = name if inspected.digest else "TARGET, after building an image with it"
            write_terminal(2, f"hint: run the suite on such a GPU to know: imagefactory verify {image}")
        raise click.exceptions.Exit(0 if not wrong else EXIT_UNKNOWN if unknown else EXIT_CHECK)
    inspection = Inspection(
        name=name,
        how=inspected.how,
        digest=inspected.digest,
        platform=inspected.platform,
        contents=inspected.contents,
        predictions=predict_everywhere(inspected, driver),
        cpu_only=cpu_reason(inspected) if inspected.package else cpu_only(inspected.contents),
        contradictions=contradictions(inspected.contents),
        verified=verified,
    )
    if as_json:
        return print_json(inspection_json(inspection))
    return print_result(format_inspection(inspection, terminal_width(), every=every))


def _answer(
    name: str, query: GpuQuery, inspected: InspectResult, verified: Mapping[Capability, CellClaim]
) -> tuple[Compatibility, str, ScannedGpuRow]:
    from imagefactory.actions.inspect import fix_inspected, predict_inspected
    from imagefactory.gpu.amd import predict_amd
    from imagefactory.gpu.cells import predict_other_processor
    from imagefactory.views.inspect import (
        PackageAnswerRow,
        ScannedGpuRow,
        format_answer,
        format_parts,
        prediction_json,
    )

    scanned, parts = (
        (predict_amd(inspected.contents, query.target), ())
        if query.target and not inspected.package
        else predict_inspected(inspected, query.capability, query.driver, gpu=query.title)
    )
    prediction = predict_other_processor(scanned, inspected.platform, query.host)
    proof = verified.get(query.capability) if prediction is scanned else None
    row = ScannedGpuRow(
        gpu=query.title,
        requested_driver=query.driver,
        **prediction_json(prediction),
        verified=proof,
        fix="" if proof else fix_inspected(inspected, prediction, query.driver, gpu=query.title),
        packages=[
            PackageAnswerRow(package=part.package, answer=part.answer, reason=part.reason) for part in parts
        ],
    )
    line = format_answer(name, query, prediction, proof)
    line += f"; try {row['fix']}" if row["fix"] else ""
    if inspected.package:
        line = format_parts(line, [(part.package, part.answer, part.reason) for part in parts], inspected.how)
    answer = (proof or prediction).answer
    return answer, line, row


def _gpu_option(gpu: str, driver: str) -> GpuQuery:
    from imagefactory.gpu.knowledge import find_gpu
    from imagefactory.views.inspect import GpuQuery

    if gpu.lower().startswith("gfx"):
        return _processor_option(gpu)
    known = find_gpu(gpu)
    driver = "" if known.capability.processor else driver
    title = f"{known.name} ({known.capability})"
    return GpuQuery(title=title, capability=known.capability, driver=driver, host=known.host)


def _processor_option(gpu: str) -> GpuQuery:
    """Return an AMD processor, with or without features. Raises UsageError for an incomplete name."""
    from imagefactory.gpu.capability import parse_capability, parse_code
    from imagefactory.views.inspect import GpuQuery

    try:
        target = parse_code(gpu.lower()).processor
        return GpuQuery(title=target, capability=parse_capability(target.partition(":")[0]), target=target)
    except ValueError as error:
        raise UsageError(
            "option-invalid",
            f"'{gpu}' is not an AMD processor",
            hint="write --gpu gfx90a or --gpu gfx90a:xnack-",
        ) from error
