"""The collect command, which checks and signs what kits and sweeps report."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import Call, collecting, json_option, say, say_json, say_next, terminal_width
from imagefactory.cli.sweeps import as_sweep, collect_jobs
from imagefactory.errors import CheckFailedError
from imagefactory.model import Outcome

if TYPE_CHECKING:
    from imagefactory.stages.kits import CollectedKit


@click.command()
@click.argument(
    "folders",
    metavar="DIR|SWEEP...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
)
@click.option(
    "--registry",
    "place",
    default="",
    metavar="HOST[/PATH]",
    help="Attach the verdicts there too.  [default: where the kit's image lies]",
)
@click.option("--promote", is_flag=True, help="Let the tags follow the verdict.")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder that remembers the kits' nonces; each DIR is a kit then.  [default: in the store]",
)
@json_option
@click.pass_obj
def collect(
    call: Call, /, folders: tuple[Path, ...], place: str, promote: bool, ledger: Path | None, as_json: bool
) -> None:
    """Judge and sign what kits and sweeps brought back.

    \b
    imagefactory verify pytorch-2.3-cu121 --kit DIR      here: writes the kit
    python3 DIR/run.py                                   there: runs it
    imagefactory collect DIR --promote                   here again
    imagefactory collect 20261122-061500-1f3a            a sweep, by its id or folder: what is done of it

    Each kit gives one verdict: its nonce is spent. The verdict goes to the store, where it holds the image,
    and to the registry that the kit names (or --registry), and says that a kit saw the GPU. Each job of a
    sweep is one too; the pool's word on its GPU must agree with the suite's.
    Exit code 0 where all are verified, 9 where one is not.
    """
    from imagefactory.stages.kits import CollectOptions
    from imagefactory.stages.kits import collect as collect_one

    factory, progress = call.sound_factory, call.progress
    options = CollectOptions(ledger=ledger, registry=place, promote=promote)
    results: list[dict[str, object]] = []
    with collecting(factory) as failures:
        for folder in folders:
            with failures.of(str(folder)):
                if ledger is None and (sweep := as_sweep(call, folder)) is not None:
                    results += collect_jobs(call, sweep, options, failures, as_json=as_json)
                    continue
                kit = collect_one(factory, folder, options, datetime.now(UTC), progress)
                results.append(_as_json(folder, kit))
                say(_as_text(kit), unless=as_json)
                if not kit.passed:
                    raise CheckFailedError(
                        "verification-failed",
                        f"{folder}: {kit.report.outcome}: {kit.report.reason}",
                        hint="see the checks above",
                    )
                for _, fault in kit.promotion.faults if kit.promotion else ():
                    failures.add(fault)
        if as_json:
            say_json("collect", {"results": results, "errors": failures.as_json()})
    proven = sorted({str(row["target"]) for row in results})
    show_verdicts = promote or all(row["outcome"] == Outcome.TOGETHER for row in results)
    say_next("verdicts", proven[0]) if show_verdicts else say_next("promote", *proven)


def _as_text(kit: CollectedKit) -> str:
    from imagefactory.views.text import format_fields
    from imagefactory.views.verdicts import format_promotion
    from imagefactory.report.verify import format_gpu_run

    verdict = kit.verdict
    signed = "signed before" if kit.again else "signed"
    fields = [("verdict", f"{signed}, key {verdict.keyid[:12]}, expires {verdict.expires:%Y-%m-%d}")]
    fields += [("attached", place) for place in kit.attached]
    blocks = [f"{format_gpu_run(kit.report, terminal_width())}\n{format_fields(fields, indent='')}"]
    if kit.promotion:
        blocks.append(format_promotion(kit.promotion, terminal_width()))
    return "\n\n".join(blocks)


def _as_json(folder: Path, kit: CollectedKit) -> dict[str, object]:
    from imagefactory.cli.promote import promotion_json
    from imagefactory.serialize import format_time
    from imagefactory.verify.report import format_gpu_report

    return {
        "kit": str(folder),
        "target": kit.report.subject.target,
        "outcome": kit.report.outcome.value,
        "reason": kit.report.reason,
        "report": format_gpu_report(kit.report),
        "keyid": kit.verdict.keyid,
        "expires": format_time(kit.verdict.expires),
        "again": kit.again,
        "attached": list(kit.attached),
        "promotion": promotion_json(kit.promotion) if kit.promotion else None,
    }
