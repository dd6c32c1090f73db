"""The way that proves an image on this machine's GPU, in the order in which it is gone:

choose -> run -> report -> sign -> attach -> promote
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import UsageError
from imagefactory.factory import Factory
from imagefactory.model import Outcome
from imagefactory.progress import Progress
from imagefactory.stages.choose import Chosen, check_name, choose_image
from imagefactory.stages.sign import SignedReport, sign_report, signing_key
from imagefactory.stages.verify import Bench, VerifyOptions, check_output, keep_report, verify_image
from imagefactory.verify.model import GpuReport

if TYPE_CHECKING:
    from imagefactory.stages.promote import Promotion


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One verification. `attached` are the places that have the verdict, `promotion` what became of tags."""

    chosen: Chosen
    report: GpuReport
    path: Path
    signed: SignedReport
    attached: tuple[str, ...] = ()
    promotion: Promotion | None = None

    @property
    def verified(self) -> bool:
        return self.report.outcome is Outcome.VERIFIED


def verify_target(
    factory: Factory, name: str, options: VerifyOptions, bench: Bench, progress: Progress
) -> Verified:
    """All of it, for one name. Raises NoGpuError where this machine has no GPU, and fetches nothing then."""
    from imagefactory.stages.candidates import Promoting
    from imagefactory.stages.promote import promote
    from imagefactory.stages.statements import attach_signed
    from imagefactory.stages.verdicts import local_place, place_of

    check_name(factory, name)
    bench.evidence.read()
    key = signing_key(factory)
    if options.promote and key is None:
        raise UsageError(
            "--promote needs a verdict, and no key signs here", hint="imagefactory keys new NAME"
        )
    if options.output:
        check_output(options.output)
    chosen = choose_image(factory, name, options.registry, progress)
    target, where = chosen.definition.target, chosen.where
    report = verify_image(factory, chosen, options, bench, progress)
    path = keep_report(factory, report, options.output)
    signed = sign_report(factory, report, key, bench.clock())
    attached = attach_signed(factory, signed.signed, where, progress) if signed.signed else ()
    moved = None
    if options.promote and signed.signed:
        place = place_of(factory, where) if where else local_place(factory, target.family)
        moved = promote(factory, Promoting(target=target, place=place, now=bench.clock()), progress)
    return Verified(
        chosen=chosen, report=report, path=path, signed=signed, attached=attached, promotion=moved
    )
