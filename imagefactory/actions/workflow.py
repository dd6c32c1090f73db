"""From a name to a verdict, signed and attached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.actions.build import BuildOptions, Built, build_image, check_build
from imagefactory.actions.definition import define_target
from imagefactory.actions.images import Promoting
from imagefactory.actions.promote import Promotion, promote
from imagefactory.actions.resolve import Chosen, check_name, choose_image
from imagefactory.actions.transfer import Pushed, PushOptions, push_target
from imagefactory.actions.verdicts import (
    SignedReport,
    attach_signed,
    local_place,
    place_of,
    sign_report,
    signing_key,
)
from imagefactory.actions.verify import VerifyBench, VerifyOptions, check_output, keep_report, verify_image
from imagefactory.errors import UsageError
from imagefactory.model import Target
from imagefactory.progress import Progress
from imagefactory.project import Factory
from imagefactory.trust.verdict import PASSES
from imagefactory.verify.report import GpuReport


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


# --- From a lock to an image that was tried, and into a registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """`push` is None for an image that stays here; `built` hears of it before it is sent anywhere."""

    build: BuildOptions
    push: PushOptions | None
    built: Callable[[Built], None]


def make_image(factory: Factory, target: Target, making: Making, progress: Progress) -> Pushed | None:
    """From the lock that `imagefactory lock` wrote to an image that was tried; what passed is pushed."""
    check_build(making.build)
    definition = define_target(factory, target)
    built = build_image(factory, definition, making.build, progress)
    making.built(built)
    if making.push is None or not built.passed:
        return None
    return push_target(factory, target, replace(making.push, made=built.image), progress)
