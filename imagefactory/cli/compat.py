"""The compat command, which shows what runs on which GPU from local data only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    capability_of,
    complete_targets,
    driver_of,
    json_option,
    reject_conflict,
    say,
    say_json,
    say_next,
    terminal_width,
)
from imagefactory.errors import EXIT_CHECK, NothingSelectedError, UsageError

if TYPE_CHECKING:
    from imagefactory.gpu.capability import Capability
    from imagefactory.matrix.compat import CompatGpu, CompatRow, CoverCandidate
    from imagefactory.model import Target


def _complete_families(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from imagefactory.gpu.knowledge import families

    return [name for name in families() if name.startswith(incomplete)]


def _complete_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete families anywhere, and targets in a project."""
    choices = _complete_families(ctx, parameter, incomplete), complete_targets(ctx, parameter, incomplete)
    return [name for names in choices for name in names]


@click.command()
@click.argument(
    "names", metavar="[TARGET|FAMILY|PACKAGE==VERSION]...", nargs=-1, shell_complete=_complete_names
)
@click.option("--gpu", metavar="NAME", help='A GPU: V100, "RTX 5090", H100-SXM5-80GB.')
@click.option("--capability", metavar="X.Y", help="A compute capability in its place.")
@click.option("--cuda", default="", metavar="X.Y", help="Of PACKAGE==VERSION the build for this CUDA.")
@click.option("--driver", default="", metavar="VERSION", help="Its driver for Linux: 535 or 535.54.03.")
@click.option(
    "--cover",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="GPUS.YAML",
    help="The fewest images of each family that serve these GPUs: a list of "
    '{name: V100, driver: "535.129.03", count: 24}, or capability: "7.0".',
)
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="NAME",
    shell_complete=_complete_families,
    help="With --cover: of this family alone.",
)
@click.option("--differences", is_flag=True, help="Where the scanned wheels are not what is documented.")
@json_option
@click.pass_obj
def compat(
    call: Call,
    /,
    *,
    names: tuple[str, ...],
    gpu: str | None,
    capability: str | None,
    cuda: str,
    driver: str,
    file: Path | None,
    families: tuple[str, ...],
    differences: bool,
    as_json: bool,
) -> None:
    """Say what runs on which GPU: documented, predicted or verified.

    \b
      imagefactory compat --gpu V100                   which targets run there, and why not the others
      imagefactory compat --gpu V100 --driver 535 'pytorch-*'
      imagefactory compat pytorch                      its versions x CUDA x capability, recipes or not
      imagefactory compat torch==2.6 --cuda 12.4 --gpu V100 --driver 550    one release, recipe or not
      imagefactory compat --cover gpus.yaml            the fewest images for these GPUs
      imagefactory compat --differences                what is documented against what was found

    Nothing is fetched or scanned: scans of framework wheels are kept in the tables (`inspect` scans). Exit
    code 9 when nothing runs on the GPU asked about, or nothing serves one of --cover.

    --cover prefers machine code to PTX, what was verified, then what a scan found, and the newer. What some
    calls fail in, and PTX that is only documented, serves where nothing better does.
    """
    by_gpu = gpu is not None or capability is not None
    reject_conflict(
        (gpu is not None) + (capability is not None) + (file is not None) + differences > 1,
        "these options select different tables",
        "use one of --gpu, --capability, --cover, --differences",
    )
    reject_conflict(
        driver and not by_gpu, "--driver requires --gpu or --capability", "add one of them or remove --driver"
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
        return _cover(call, file, (*names, *families), as_json=as_json)
    if by_gpu:
        device = _gpu(gpu, capability, driver)
        return _one_gpu(device, _candidates(call, names, cuda=cuda), as_json=as_json)
    return _table(_candidates(call, names, cuda=cuda, every_version=True), as_json=as_json)


def _table(candidates: list[CoverCandidate], *, as_json: bool) -> None:
    """Print versions x CUDA x capability for families and frameworks, or targets x capability."""
    from imagefactory.gpu.builds import rocm_of
    from imagefactory.matrix.compat import columns, rows
    from imagefactory.views.compat import format_rows

    amd = [bool(rocm_of(candidate.question.cuda)) for candidate in candidates]
    if as_json:
        gpus = tuple(gpu for maker in sorted(set(amd)) for gpu in columns(amd=maker))
        return _say_rows(rows(candidates, gpus), gpus)
    tables = []
    for maker in sorted(set(amd)):  # NVIDIA's GPUs, then AMD's
        gpus = columns(amd=maker)
        table = rows([candidate for candidate, of in zip(candidates, amd, strict=True) if of == maker], gpus)
        tables.append(format_rows(table, [gpu.capability for gpu in gpus], terminal_width()))
    return say("\n\n".join(tables))


def _one_gpu(gpu: CompatGpu, candidates: list[CoverCandidate], *, as_json: bool) -> None:
    from imagefactory.matrix.compat import rows, serves
    from imagefactory.views.compat import format_gpu

    table = rows(candidates, (gpu,))
    if as_json:
        _say_rows(table, (gpu,))
    else:
        say(format_gpu(gpu, table, terminal_width()))
        named = [row.candidate.name for row in table if row.candidate.name and serves(row.cells[0])]
        if named:
            say_next("show", named[0])
    if not any(serves(row.cells[0]) for row in table):
        raise click.exceptions.Exit(EXIT_CHECK)


def _cover(call: Call, file: Path, names: tuple[str, ...], *, as_json: bool) -> None:
    from imagefactory.matrix.compat import CompatGpu, by_group, cover
    from imagefactory.matrix.gpus import read_gpus
    from imagefactory.views.compat import cover_json, format_covers

    gpus = [
        CompatGpu(
            name=row.own_name or str(row.capability),
            capability=row.capability,
            driver=row.driver,
            count=row.count,
            host=row.host,
        )
        for row in read_gpus(file)
    ]
    covers = [cover(group, some, gpus) for group, some in by_group(_candidates(call, names))]
    if as_json:
        say_json("cover", {"covers": [cover_json(row) for row in covers]})
    else:
        say(format_covers(covers, terminal_width()))
        named = [choice.candidate.name for row in covers for choice in row.images if choice.candidate.name]
        if named:
            say_next("build", *named)
    if any(all(gpu in [row.gpu for row in cover.unserved] for cover in covers) for gpu in gpus):
        raise click.exceptions.Exit(EXIT_CHECK)


def _refuse_cpu(targets: Sequence[Target], names: Sequence[str]) -> None:
    """Raises UsageError for a named target without a GPU."""
    for target in targets:
        if target.name in names and not target.gpu:
            raise UsageError(
                "target-without-gpu", f"{target.name} is for CPUs only", hint=f"remove {target.name}"
            )


def _gpu(name: str | None, capability: str | None, driver: str) -> CompatGpu:
    """Return the requested GPU. Raises UsageError for an invalid option."""
    from imagefactory.gpu.knowledge import find_gpu
    from imagefactory.matrix.compat import CompatGpu

    driver = driver_of(driver)
    if name is not None:
        gpu = find_gpu(name)
        _refuse_driver(gpu.capability, driver)
        return CompatGpu(name=gpu.name, capability=gpu.capability, driver=driver, host=gpu.host)
    processor = capability_of(capability or "", "write --capability 8.6, or --gpu with a name")
    _refuse_driver(processor, driver)
    return CompatGpu(name=str(processor), capability=processor, driver=driver)


def _refuse_driver(capability: Capability, driver: str) -> None:
    if capability.processor and driver:
        raise UsageError("option-conflict", "--driver does not apply to AMD GPUs", hint="remove --driver")


def _candidates(
    call: Call, names: tuple[str, ...], *, cuda: str = "", every_version: bool = False
) -> list[CoverCandidate]:
    """Return the candidates of targets, families, frameworks and releases (for `cuda`); by default all.

    If no recipe has a framework, its known versions represent it; with `every_version` they are added to the
    targets. Raises NothingSelectedError for an unknown name.
    """
    from imagefactory.gpu.knowledge import families
    from imagefactory.matrix.compat import exact_releases, releases, with_releases
    from imagefactory.stages.compat import read_candidates

    factory = None if names and all("==" in name for name in names) else call.factory_if_any
    targets = factory.targets if factory else ()
    _refuse_cpu(targets, names)
    targets = tuple(target for target in targets if target.gpu)
    if not names:
        return (
            read_candidates(factory, targets)
            if targets
            else [candidate for name in families().values() for candidate in releases(name)]
        )
    candidates: dict[str, CoverCandidate] = {}
    for name in names:
        if "==" in name:
            candidates |= {candidate.title: candidate for candidate in exact_releases(name, cuda)}
            continue
        framework = families().get(name, name if name in families().values() else "")
        family = [  # what is built on others is asked for by its own name
            target
            for target in targets
            if target.family == name
            or (target.source, target.framework, target.on) == ("pypi", framework, "")
        ]
        some = read_candidates(factory, family or (() if framework else _select(targets, name)))
        if framework and (every_version or not some):
            some = list(with_releases(some, framework))
        candidates |= {candidate.title: candidate for candidate in some}
    return list(candidates.values())


def _select(targets: Sequence[Target], name: str) -> Sequence[Target]:
    from imagefactory.recipes.expand import select

    try:
        return select(targets, (name,))
    except NothingSelectedError as error:
        what = "target, family or framework"
        more = error.hint if targets else "for targets name a factory: -C DIR"
        raise _unknown(name, what, more, {target.family for target in targets}) from error


def _unknown(name: str, what: str, more: str, known: Collection[str] = ()) -> NothingSelectedError:
    """Return the error for an unknown name; `known` are valid names besides the frameworks."""
    from imagefactory.gpu.knowledge import families
    from imagefactory.recipes.yaml_tree import show
    from imagefactory.versions import nearest

    frameworks = sorted({*families(), *families().values()})
    near = nearest(name, [*frameworks, *sorted(known)])
    hint = f"did you mean '{near}'?" if near else more or f"the frameworks are {', '.join(frameworks)}"
    return NothingSelectedError("target-unknown", f"no {what} is named {show(name)}", hint=hint)


def _say_rows(rows: Sequence[CompatRow], gpus: Sequence[CompatGpu]) -> None:
    from imagefactory.views.compat import gpu_json, row_json

    say_json("compat", {"gpus": [gpu_json(gpu) for gpu in gpus], "rows": [row_json(row) for row in rows]})


def _differences(names: tuple[str, ...], *, as_json: bool) -> None:
    from imagefactory.gpu.compared import find_differences
    from imagefactory.gpu.knowledge import families
    from imagefactory.views.compat import difference_json, format_differences

    frameworks = {families().get(name, name) for name in names}
    for name in sorted(frameworks - {*families().values()}):
        raise _unknown(name, "framework", "")
    differences = [row for row in find_differences() if not names or row.framework in frameworks]
    if as_json:
        return say_json("differences", {"differences": [difference_json(row) for row in differences]})
    return say(format_differences(differences, terminal_width()))
