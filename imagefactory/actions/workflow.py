"""From a name to a verdict, signed and attached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.project import Factory
from imagefactory.progress import Progress
from imagefactory.actions.images import Promoting
from imagefactory.actions.resolve import Chosen, check_name, choose_image
from imagefactory.actions.promote import Promotion, promote
from imagefactory.stages.sign import SignedReport, sign_report, signing_key
from imagefactory.stages.statements import attach_signed
from imagefactory.actions.verdicts import local_place, place_of
from imagefactory.actions.verify import VerifyBench, VerifyOptions, check_output, keep_report, verify_image
from imagefactory.verdicts.statement import PASSES
from imagefactory.verify.model import GpuReport


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
    def passed(self) -> bool:
        return self.report.outcome in PASSES


def prove_image(
    factory: Factory, name: str, options: VerifyOptions, bench: VerifyBench, progress: Progress
) -> Verified:
    """From a name to a verdict. Raises NoGpuError where this machine has no GPU; nothing is fetched then."""
    check_name(factory, name)
    bench.evidence.read()
    key = signing_key(factory, bench.clock())
    if options.promote and key is None:
        raise UsageError(
            "promote-key-missing",
            "--promote needs a signed verdict, and there is no signing key",
            hint="create one: imagefactory keys new NAME",
        )
    if options.output:
        check_output(options.output)
    chosen = choose_image(factory, name, options.registry, progress)
    report = verify_image(factory, chosen, options, bench, progress)
    path = keep_report(factory, report, options.output)
    made = sign_report(factory, report, key, bench.clock())
    done = Verified(chosen=chosen, report=report, path=path, signed=made)
    if made.signed is None:
        return done
    target, where = chosen.definition.target, chosen.where
    done = replace(done, attached=attach_signed(factory, made.signed, where, progress))
    if not options.promote:
        return done
    place = place_of(factory, where) if where else local_place(factory, target.family)
    wanted = Promoting(target=target, place=place, now=bench.clock())
    return replace(done, promotion=promote(factory, wanted, progress))
