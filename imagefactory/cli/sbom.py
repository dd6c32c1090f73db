"""imagefactory sbom."""

from __future__ import annotations

from pathlib import Path

import click

from imagefactory.cli.output import Call, complete_targets, json_option, say, say_json, write
from imagefactory.errors import UsageError


@click.command()
@click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["cyclonedx", "spdx"]),
    default="cyclonedx",
    show_default=True,
    help="CycloneDX 1.6 or SPDX 2.3, both as JSON.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: stdout.")
@json_option
@click.pass_obj
def sbom(call: Call, name: str, kind: str, output: Path | None, as_json: bool) -> None:
    """Write the bill of materials: every package, its hash and licence.

    \b
      imagefactory sbom pytorch-2.3-cu121                    a target: what its locks name
      imagefactory sbom pytorch:2.3-cu121                    an image of the store, or its digest
      imagefactory sbom registry.example.org/pytorch:2.3     an image of a registry

    Licences are what packages say of themselves: of a target those in the cache, else its image in the store.
    What is not known is NOASSERTION. The same input gives the same bytes.
    """
    from imagefactory.files import replace_text
    from imagefactory.lock.bill.cyclonedx import format_cyclonedx
    from imagefactory.lock.bill.spdx import format_spdx
    from imagefactory.report.sbom import format_bill
    from imagefactory.stages.sbom import bill_of

    if as_json and not output:
        raise UsageError("the bill itself is JSON", hint="leave --json out, or write the bill with --output")
    bill = bill_of(call.access, lambda: call.factory_if_any, name, call.progress)
    text = (format_cyclonedx if kind == "cyclonedx" else format_spdx)(bill)
    if output is None:
        return write(1, text.rstrip("\n"))
    replace_text(output, text)
    if as_json:
        unknown = [one.purl.to_string() for one in bill.components if not one.licences]
        return say_json(
            "sbom",
            {
                "name": bill.name,
                "path": str(output),
                "kind": kind,
                "digest": bill.digest,
                "packages": len(bill.components),
                "without_licence": unknown,
            },
        )
    return say(format_bill(bill, str(output)))
