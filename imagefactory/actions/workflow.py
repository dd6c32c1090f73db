"""From a name to a verdict, signed and attached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.actions.build import BuildOptions, BuildResult, build_image, check_build
from imagefactory.actions.definition import define_target
from imagefactory.actions.images import PromotionRequest
from imagefactory.actions.promote import PromotionResult, promote
from imagefactory.actions.resolve import ResolvedImage, check_name, resolve_image
from imagefactory.actions.transfer import PushOptions, PushResult, push_target
from imagefactory.actions.verdicts import (
    SignedReport,
    attach_signed,
    local_place,
    place_of,
    sign_report,
    signing_key,
)
from imagefactory.actions.verify import (
    VerifyDependencies,
    VerifyOptions,
    check_output,
    verify_image,
    write_unsigned_report,
)
from imagefactory.errors import UsageError
from imagefactory.model import Target
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.trust.verdict import PASSES
from imagefactory.verify.report import GpuReport


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """One verification. `attached` are the places that have the verdict, `promotion` what became of tags."""

    chosen: ResolvedImage
    report: GpuReport
    path: Path
    signed: SignedReport
    attached: tuple[str, ...] = ()
    promotion: PromotionResult | None = None

    @property
    def passed(self) -> bool:
        return self.report.outcome in PASSES


def verify_and_attach(
    factory: Project, name: str, options: VerifyOptions, bench: VerifyDependencies, progress: Progress
) -> VerifyResult:
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
    chosen = resolve_image(factory, name, options.registry, progress)
    report = verify_image(factory, chosen, options, bench, progress)
    path = write_unsigned_report(factory, report, options.output)
    made = sign_report(factory, report, key, bench.clock())
    done = VerifyResult(chosen=chosen, report=report, path=path, signed=made)
    if made.signed is None:
        return done
    target, where = chosen.definition.target, chosen.where
    done = replace(done, attached=attach_signed(factory, made.signed, where, progress))
    if not options.promote:
        return done
    place = place_of(factory, where) if where else local_place(factory, target.family)
    wanted = PromotionRequest(target=target, place=place, now=bench.clock())
    return replace(done, promotion=promote(factory, wanted, progress))


# --- From a lock to an image that was tried, and into a registry


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeOptions:
    """`push` is None for an image that stays here; `built` hears of it before it is sent anywhere."""

    build: BuildOptions
    push: PushOptions | None
    built: Callable[[BuildResult], None]


def make_image(
    factory: Project, target: Target, making: MakeOptions, progress: Progress
) -> PushResult | None:
    """From the lock that `imagefactory lock` wrote to an image that was tried; what passed is pushed."""
    check_build(making.build)
    definition = define_target(factory, target)
    built = build_image(factory, definition, making.build, progress)
    making.built(built)
    if making.push is None or not built.passed:
        return None
    return push_target(factory, target, replace(making.push, made=built.image), progress)
