"""The stages, one function each, in the order the data goes:

    recipes -> targets -> lock -> definition -> base, wheels -> image -> smoke test

Nothing here chooses or draws: the rooms decide, the command line prints.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.engines import ENGINES
from imagefactory.errors import (
    BuildError,
    DownloadError,
    LockError,
    NothingSelectedError,
    StaleError,
    UnsolvableError,
    UsageError,
)
from imagefactory.model import (
    Base,
    Completed,
    Definition,
    Image,
    Lock,
    LockedConda,
    LockedPackage,
    LockedWheel,
    Outcome,
    Report,
    RunSpec,
    Sif,
    Target,
)
from imagefactory.oci.layout import Layout, reference, used, used_by_nobody
from imagefactory.progress import Progress
from imagefactory.recipes import BASES_FILE, all_bases, expand_all, read_bases, read_recipes
from imagefactory.settings import SOLVERS, Settings
from imagefactory.verify.runners import OWN_RUNNER, RUNNERS

if TYPE_CHECKING:
    from imagefactory.engines.base_image import BaseImage
    from imagefactory.engines.protocol import Engine
    from imagefactory.engines.site import BuildSecrets
    from imagefactory.lock import Locker
    from imagefactory.lock.base import DebianMirror
    from imagefactory.lock.channels import Channels
    from imagefactory.lock.files import Unsolvable
    from imagefactory.lock.index import PackageIndex
    from imagefactory.lock.pypi import UvLocker
    from imagefactory.verify.runners.protocol import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """The recipes of a root, expanded, and the settings and environment of this call."""

    settings: Settings
    environ: Mapping[str, str]
    bases: tuple[Base, ...]
    targets: tuple[Target, ...]

    def base_of(self, target: Target) -> Base:
        return next(base for base in self.bases if base.name == target.base)

    def target_below(self, target: Target) -> Target | None:
        """The target that this one is built on."""
        return next((one for one in self.targets if one.name == target.on), None)

    @property
    def lock_folder(self) -> Path:
        return self.settings.root_path / "lockfiles"

    def base_lock_path(self, base: Base) -> Path:
        return self.lock_folder / "bases" / f"{base.name}.lock"

    def definition_folder(self, target: Target) -> Path:
        return self.settings.root_path / "definitions" / target.name

    @property
    def layout(self) -> Layout:
        return Layout(self.settings.store_path)


def recipes_folder(settings: Settings) -> Path:
    """The folder of recipes. Raises UsageError where the root is no factory."""
    folder = settings.root_path / "recipes"
    if not (folder / BASES_FILE).exists():
        raise UsageError(
            f"{settings.root_path} is no factory: it has no recipes/{BASES_FILE}",
            hint="go to one, or name it: imagefactory -C DIR ...",
        )
    return folder


def read_factory(settings: Settings, environ: Mapping[str, str]) -> Factory:
    """All recipes and bases below the root. Raises RecipeError with every fault of every file."""
    folder = recipes_folder(settings)
    recipes = read_recipes(folder)
    bases = all_bases(read_bases(folder), recipes)
    targets = expand_all(recipes, bases)
    return Factory(settings=settings, environ=environ, bases=bases, targets=targets)


# --- locks ---------------------------------------------------------------------------------------


def read_target_lock(factory: Factory, target: Target) -> Lock | None:
    """The committed lock of a target, or None. Raises LockError when it is malformed."""
    from imagefactory.lock.files import read_lock

    return read_lock(factory.lock_folder, target)


def require_lock(factory: Factory, target: Target) -> Lock:
    """The committed lock.

    Raises LockError when there is none or it does not hold the framework and CUDA that the target
    names, StaleError when the recipe has moved on or the lock of the target that it is built on has.
    """
    from imagefactory.lock.files import check_facts, lock_path

    lock, hint = read_target_lock(factory, target), f"imagefactory lock {target.name}"
    wanted = wanted_hash(factory, target)
    if lock is not None and lock.content_hash == wanted:
        check_facts(lock, target)
        return lock
    if why := read_why(factory, target):
        raise LockError(f"{target.name} is unsolvable: {why.reason}", hint=why.hint or f"{hint} --explain")
    if lock is None:
        path = lock_path(factory.lock_folder, target)
        raise LockError(f"{target.name} has no lock ({path})", hint=hint)
    what = f"the recipe or the lock of {target.on} has" if target.on else "the recipe has"
    raise StaleError(f"the lock of {target.name} is stale: {what} changed since", hint=hint)


def wanted_hash(factory: Factory, target: Target) -> str:
    """The content hash that the target's lock must have. Raises LockError as `lock_below` does."""
    from imagefactory.lock.files import content_hash

    return content_hash(target, factory.base_of(target), lock_below(factory, target))


def lock_below(factory: Factory, target: Target) -> Lock | None:
    """The lock of the target that this one is built on, as `require_lock` gives it; None for no target."""
    below = factory.target_below(target)
    return require_lock(factory, below) if below else None


def locks_below(factory: Factory, target: Target) -> tuple[Lock, ...]:
    """The locks of all targets that this one is built on, the lowest first."""
    below = factory.target_below(target)
    return (*locks_below(factory, below), require_lock(factory, below)) if below else ()


def lock_state(factory: Factory, target: Target) -> str:
    """`ok`, `stale`, `none`, `malformed`, or `unsolvable` where that is what locking said, for tables."""
    try:
        lock = read_target_lock(factory, target)
    except LockError:
        return "malformed"
    try:
        if lock is not None and lock.content_hash == wanted_hash(factory, target):
            return "ok" if _holds(lock, target, lock_below(factory, target)) else "malformed"
        if read_why(factory, target) is not None:
            return Outcome.UNSOLVABLE.value
    except (LockError, StaleError):
        pass  # of the target below, which has a row of its own
    return "none" if lock is None else "stale"


def _holds(lock: Lock, target: Target, under: Lock | None) -> bool:
    """Whether a lock of the right content hash is what locking writes, and not changed since."""
    from imagefactory.lock.files import check_facts, check_kept

    try:
        check_facts(lock, target)
        check_kept(lock, under)
    except LockError:
        return False
    return True


def read_why(factory: Factory, target: Target) -> Unsolvable | None:
    """Why the target has no solution, as it was found when it was last locked; None where that is not known.

    What was found for another recipe does not count, nor does a record that is malformed: locking makes
    it anew. Raises LockError as `lock_below` does.
    """
    from imagefactory.lock.files import read_unsolvable

    try:
        why = read_unsolvable(factory.lock_folder, target)
    except LockError:
        return None
    return why if why is not None and why.content_hash == wanted_hash(factory, target) else None


def base_state(factory: Factory, base: Base) -> str:
    """The same words for a base's lock. A base that is pulled is locked by its digest."""
    from imagefactory.lock.base import base_content_hash, read_base_lock

    if base.image:
        return "ok"
    try:
        lock = read_base_lock(factory.base_lock_path(base))
    except LockError:
        return "malformed"
    if lock is None:
        return "none"
    return "ok" if lock.content_hash == base_content_hash(base) else "stale"


def orphans(factory: Factory) -> tuple[Path, ...]:
    """Locks and definitions of targets and bases that no recipe makes any more."""
    from imagefactory.lock.files import CONDA, UNSOLVABLE, WHEELS, lock_names

    root, folder = factory.settings.root_path, factory.lock_folder
    names = {target.name for target in factory.targets}
    files = {f"{name}.{UNSOLVABLE}" for name in names}
    for target in factory.targets:
        files.update(lock_names(target.name, conda=target.source == "conda"))
    bases = {base.name for base in factory.bases if not base.image}
    kinds = (CONDA, WHEELS, UNSOLVABLE)
    left = [p for kind in kinds for p in folder.glob(f"*.{kind}") if p.name not in files]
    left += [p for p in (folder / "bases").glob("*.lock") if p.stem not in bases]
    left += [p for p in (root / "definitions").glob("*") if p.is_dir() and p.name not in names]
    return tuple(sorted(left))


def holding(factory: Factory, targets: Sequence[Target], packages: Sequence[str]) -> tuple[Target, ...]:
    """The targets whose locks hold all of `packages`, and not from a target that they are built on.

    Raises NothingSelectedError when none does.
    """
    from packaging.utils import canonicalize_name

    wanted = {canonicalize_name(package) for package in packages}

    def names(target: Target | None) -> set[str]:
        lock = read_target_lock(factory, target) if target else None
        return {canonicalize_name(package.name) for package in lock.packages} if lock else set()

    chosen = tuple(t for t in targets if wanted <= names(t) - names(factory.target_below(t)))
    if not chosen:
        raise NothingSelectedError(f"no lock holds {' and '.join(packages)}", hint="imagefactory show TARGET")
    return chosen


def below_first(factory: Factory, targets: Sequence[Target]) -> tuple[Target, ...]:
    """`targets` in an order in which each can be locked: after the one that it is built on."""

    def depth(target: Target) -> int:
        below = factory.target_below(target)
        return 1 + depth(below) if below else 0

    return tuple(sorted(targets, key=depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class Relock:
    """What `lock` did: `before` and `after` are the same object when nothing was solved."""

    target: Target
    before: Lock | None
    after: Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """`update` names packages that may move, `update_all` lets every one move.

    `note` is written into the lock, None keeps the one that is there as long as the lock stays as it is.
    """

    update: tuple[str, ...] = ()
    update_all: bool = False
    note: str | None = None


def lock_target(factory: Factory, target: Target, options: LockOptions, progress: Progress) -> Relock:
    """Solves the target's lock if anything that decides it has changed, and writes it.

    Where there is no solution that is kept beside the locks. Raises UnsolvableError, LockError for a target
    below that has no lock, and what the solver's adapter raises.
    """
    from imagefactory.lock import LockRequest, files

    _check_note(target, options.note)
    folder, base, under = factory.lock_folder, factory.base_of(target), lock_below(factory, target)
    try:
        before = read_target_lock(factory, target)
    except LockError as error:
        progress.note(f"{error.message}: locking {target.name} anew")
        before = files.read_remains(folder, target)
    wanted = files.content_hash(target, base, under)
    current = before is not None and before.content_hash == wanted
    if before is not None and current:
        try:
            files.check_facts(before, target)
            files.check_kept(before, under)
        except LockError as error:  # no lock is written so: somebody changed it
            progress.note(f"{error.message}: locking {target.name} anew")
            before, current = replace(before, content_hash=files.NOBODYS), False
    if before is not None and current and not options.update and not options.update_all:
        solved = replace(before, target=target.name)
    else:
        request = LockRequest(
            target=target,
            base=base,
            previous=before,
            update=options.update,
            update_all=options.update_all,
            under=under,
        )
        try:
            solved = _target_locker(factory, target).lock(request, progress)
        except UnsolvableError as error:
            if not current:
                why = files.Unsolvable(
                    target=target.name,
                    content_hash=wanted,
                    reason=error.message.removeprefix(f"{target.name}: "),
                    hint=error.hint,
                    tree=error.tree,
                )
                try:
                    files.write_unsolvable(folder, why)
                except LockError as unwritten:  # what was found is worth more than its record
                    progress.note(unwritten.message)
            raise
    after = _noted(before, solved, options.note, progress)
    if before is None or files.format_lock_files(after) != files.format_lock_files(before):
        files.write_lock(folder, after)
    else:
        after = before
        files.remove_unsolvable(folder, target.name)
    return Relock(target=target, before=before, after=after)


def _noted(before: Lock | None, after: Lock, note: str | None, progress: Progress) -> Lock:
    """`after` with the note it shall have: what was said of other packages is not said of these."""
    if note is None:
        old = before.note if before else ""
        same = before is None or [p.sha256 for p in before.packages] == [p.sha256 for p in after.packages]
        if same or not old:
            return replace(after, note=old)
        progress.note(f"{after.target}: its note '{old}' was of the lock before: --note says it of this one")
        return replace(after, note="")
    return replace(after, note=note.strip())


def _check_note(target: Target, note: str | None) -> None:
    if note and target.source != "conda":
        raise UsageError(
            f"{target.name}: a lock of wheels alone keeps no note",
            hint=f"write it as a comment into the recipe ({target.where})",
        )
    if note and (len(note) > 300 or not note.isprintable()):
        raise UsageError("a note is one line of at most 300 characters", hint='--note "tried on an A100"')


def lock_base(factory: Factory, base: Base, progress: Progress, *, update: bool) -> bool:
    """Solves a base's lock when there is none, when it is stale, or on `update`; True when it changed.

    A base that is pulled has no lock but its digest, which only its recipe changes.
    """
    from imagefactory.lock import base as bases

    if base.image:
        return False
    path = factory.base_lock_path(base)
    try:
        before = bases.read_base_lock(path)
    except LockError as error:
        progress.note(f"{error.message}: locking {base.name} anew")
        before = None
    if before is not None and before.content_hash == bases.base_content_hash(base) and not update:
        return False
    after = bases.lock_base(base, before, _mirror(factory), progress, update=update)
    if after == before:
        return False
    bases.write_base_lock(path, after)
    return True


# --- definitions ---------------------------------------------------------------------------------


def define_target(factory: Factory, target: Target) -> Definition:
    from imagefactory.render.define import define

    lock, under = require_lock(factory, target), locks_below(factory, target)
    return define(target, factory.base_of(target), lock, under)


def render_target(factory: Factory, target: Target) -> dict[str, str]:
    """The texts of definitions/<target>/, by file name."""
    from imagefactory.render.folders import render

    return render(define_target(factory, target))


# --- images --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """`locked`: stop when a locked package of the base is gone. `smoke`: try the image at the end.

    `runner` is what tries it, empty for the engine's own.
    """

    engine: str = "assemble"
    runner: str = ""
    locked: bool = False
    smoke: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One build: `fresh` is false when the store already held the image; `seconds` by stage.

    `published_base` is false when the base was made of newer packages than the locked ones, so that
    the digest is not the published one.
    """

    target: Target
    image: Image | Sif
    fresh: bool
    published_base: bool
    report: Report | None
    seconds: tuple[tuple[str, float], ...]


def build_target(factory: Factory, target: Target, options: BuildOptions, progress: Progress) -> Built:
    """From the committed lock to an image in the store that was started and tried."""
    from imagefactory.verify.smoke import Trial, smoke

    layout = factory.layout
    engine = _engine(factory, options.engine)
    runner_name = options.runner or OWN_RUNNER[options.engine]
    if options.smoke and options.engine == "apptainer" != runner_name:
        raise UsageError(f"{runner_name} starts no .sif files", hint="--runner apptainer, or --no-smoke")
    runner = _runner(factory, runner_name, target.name, progress)
    definition = define_target(factory, target)
    clock = _Clock()
    with layout.in_use(progress), used(_cache_lock(factory), progress):
        engine.require()
        if options.smoke:
            runner.require()
        base = _base(factory, definition.base, progress, locked=options.locked)
        clock.lap("base")
        image = engine.find(definition, base)
        fresh = image is None
        if image is None:

            def packages() -> dict[LockedPackage, Path]:
                with progress.stage(f"{target.name}: fetch {len(definition.lock.packages)} packages"):
                    fetched = _packages(factory, definition.lock, progress)
                clock.lap("fetch")
                return fetched

            image = engine.build(definition, base, packages, progress)
        else:
            engine.tag(definition, image)
        clock.lap("assemble")
        report = None
        if options.smoke:
            if runner_name == "unshare" and isinstance(image, Image):
                unpack_image(factory, image, progress)
                clock.lap("unpack")
            trial = Trial(image=image, definition=definition, nonce=secrets.token_hex(16), runner=runner_name)
            with progress.stage(f"{target.name}: smoke test on the CPU, inside the image, by {runner_name}"):
                report = smoke(trial, runner, layout.path / "checks", progress)
            clock.lap("smoke")
    return Built(
        target=target,
        image=image,
        fresh=fresh,
        published_base=base.published,
        report=report,
        seconds=clock.laps(),
    )


def find_image(factory: Factory, target: Target) -> Image | None:
    """The image the target's tag points to in the store, or None."""
    return factory.layout.image(reference(target))


def collect_cache(factory: Factory, progress: Progress, *, dry_run: bool) -> int:
    """Removes from the cache what no committed lock names, all segments and what lies there unpacked.

    Gives the bytes freed. Waits for running builds, as `store gc` does.
    """
    from imagefactory.engines.conda_prefix import remove_extracted
    from imagefactory.lock.base import read_base_lock

    locks = [lock for target in factory.targets if (lock := read_target_lock(factory, target))]
    bases = [found for base in factory.bases if (found := read_base_lock(factory.base_lock_path(base)))]
    needed = {package.sha256 for lock in locks for package in lock.packages}
    # Also the newer packages that a base was made of when the mirror no longer had the locked ones.
    folder = factory.settings.store_path / "bases"
    bases += [found for path in sorted(folder.glob("*.lock")) if (found := read_base_lock(path))]
    needed |= {package.sha256 for found in bases for package in found.packages}
    cache, freed = factory.settings.cache_path, 0
    with used_by_nobody(_cache_lock(factory), progress):
        kinds = ("wheels", "conda", "debs", "segments")
        for path in [p for kind in kinds for p in (cache / kind).rglob("*")]:
            if path.is_file() and path.parent.name not in needed and not path.name.startswith("."):
                freed += path.stat().st_size
                if not dry_run:
                    path.unlink(missing_ok=True)
        freed += remove_extracted(cache, dry_run=dry_run)
    return freed


def _cache_lock(factory: Factory) -> Path:
    """Several stores may share a cache, so it has a lock of its own."""
    return factory.settings.cache_path / "lock"


def _engine(factory: Factory, name: str) -> Engine:
    from imagefactory.engines.assemble import AssembleEngine

    settings = factory.settings
    makers: dict[str, Callable[[], Engine]] = {
        "assemble": lambda: AssembleEngine(
            factory.layout, settings.cache_path, codec=settings.codec.value, workers=settings.worker_count
        ),
        "docker": lambda: _docker_engine(factory),
        "apptainer": lambda: _apptainer_engine(factory),
    }
    assert tuple(makers) == ENGINES
    return makers[name]()


def _docker_engine(factory: Factory) -> Engine:
    from imagefactory.engines.docker import DockerEngine
    from imagefactory.engines.docker_daemon import DockerDaemon

    return DockerEngine(
        factory.layout,
        DockerDaemon(factory.environ),
        codec=factory.settings.codec.value,
        secrets=lambda channels: _build_secrets(factory, channels),
    )


def _apptainer_engine(factory: Factory) -> Engine:
    from imagefactory.engines.apptainer import ApptainerEngine
    from imagefactory.engines.apptainer_command import ApptainerCommand

    return ApptainerEngine(
        factory.layout,
        ApptainerCommand(factory.environ),
        secrets=lambda channels: _build_secrets(factory, channels),
    )


def _build_secrets(factory: Factory, channels: tuple[str, ...]) -> BuildSecrets:
    """What a build in a container gets to know of this machine; `channels` are those that it asks."""
    from imagefactory.engines.site import find_secrets

    site = conda_channels(factory).site(channels) if channels else None
    return find_secrets(package_index(factory), factory.environ, site)


def _runner(factory: Factory, name: str, target: str, progress: Progress) -> Runner:
    """The runner called `name`; `target` is what a .sif that has to be made is named after."""
    from imagefactory.engines.apptainer_command import ApptainerCommand
    from imagefactory.engines.docker_daemon import DockerDaemon
    from imagefactory.verify.runners.apptainer import ApptainerRunner
    from imagefactory.verify.runners.docker import DockerRunner
    from imagefactory.verify.runners.unshare import UnshareRunner

    layout, environ = factory.layout, factory.environ
    makers: dict[str, Callable[[], Runner]] = {
        "unshare": lambda: UnshareRunner(layout, progress=progress),
        "docker": lambda: DockerRunner(layout, DockerDaemon(environ), progress=progress),
        "apptainer": lambda: ApptainerRunner(
            ApptainerCommand(environ),
            lambda image: ensure_sif(factory, image, target, progress, compression="fast"),
        ),
    }
    assert tuple(makers) == RUNNERS
    return makers[name]()


def run_target(factory: Factory, target: Target, spec: RunSpec, runner: str, progress: Progress) -> Completed:
    """Runs a command in what was built of a target.

    That is its image, or the .sif that apptainer built where there is no image or the setting `engine` is
    apptainer. `runner` is empty for the setting, or for what fits. Raises BuildError when nothing is built.
    """
    wanted, settings = runner or factory.settings.runner.value, factory.settings
    made: Image | Sif | None = find_image(factory, target)
    if made is None or (settings.engine.value == "apptainer" and wanted in ("", "apptainer")):
        made = find_sif(factory, target) or made
    if made is None:
        raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
    name = wanted or (OWN_RUNNER[settings.engine.value] if isinstance(made, Image) else "apptainer")
    chosen = _runner(factory, name, target.name, progress)
    chosen.require()
    with factory.layout.in_use(progress):
        if name == "unshare" and isinstance(made, Image):
            unpack_image(factory, made, progress)
        elif name == "apptainer" and isinstance(made, Image):
            made = ensure_sif(factory, made, target.name, progress, compression="fast")
        elif name == "docker" and isinstance(made, Image):
            from imagefactory.engines.docker_daemon import DockerDaemon, run_name

            # Here, where no collection can take what the daemon is still loading.
            DockerDaemon(factory.environ).ensure(factory.layout, made, run_name(made), progress)
    return chosen.run(made, spec)


def unpack_image(factory: Factory, image: Image, progress: Progress) -> None:
    """Unpacks what is missing of `image`, layer by layer, shared between images."""
    from imagefactory.oci.unpack import Unpacked

    layout = factory.layout
    workers = factory.settings.worker_count
    Unpacked(layout.path / "unpacked").unpack(image.layers, layout.blob_path, progress, workers=workers)


def _packages(factory: Factory, lock: Lock, progress: Progress) -> dict[LockedPackage, Path]:
    """The files of a lock: conda's archives from their channels, wheels from the package index."""
    try:
        return _fetched(factory, lock, progress)
    except DownloadError as error:  # the cache does not know whose lock a file is of
        raise DownloadError(error.message, hint=error.hint.replace("TARGET", lock.target)) from error


def _fetched(factory: Factory, lock: Lock, progress: Progress) -> dict[LockedPackage, Path]:
    from imagefactory.packages import PackageCache

    folder = factory.settings.cache_path
    fetched: list[tuple[LockedPackage, Path]] = []
    if lock.conda:
        channels = conda_channels(factory)

        def ask(missing: tuple[LockedConda, ...]) -> dict[str, str]:
            return {package.filename: channels.address(package.url) for package in missing}

        archives = PackageCache(folder, channels).fetch(lock.conda, ask, progress)
        fetched += archives.items()
    if lock.wheels:
        index = package_index(factory)

        def look_up(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
            return _locker(index).addresses(replace(lock, wheels=missing, conda=()))

        wheels = PackageCache(folder, index).fetch(lock.wheels, look_up, progress)
        fetched += wheels.items()
    return dict(fetched)


def _base(factory: Factory, base: Base, progress: Progress, *, locked: bool) -> BaseImage:
    from imagefactory.engines.base_image import BaseWanted, ensure_base
    from imagefactory.lock.base import read_base_lock

    if base.image:
        return _pulled_base(factory, base, progress)
    path = factory.base_lock_path(base)
    lock = read_base_lock(path)
    if lock is None:
        raise LockError(f"base {base.name} has no lock ({path})", hint=f"imagefactory lock base:{base.name}")
    wanted = BaseWanted(
        base=base,
        lock=lock,
        codec=factory.settings.codec.value,
        mirror=lambda: _mirror(factory),
        environ=factory.environ,
        locked=locked,
    )
    return ensure_base(factory.layout, wanted, progress)


def _pulled_base(factory: Factory, base: Base, progress: Progress) -> BaseImage:
    from imagefactory.engines.pulled_base import PullWanted, ensure_pulled_base
    from imagefactory.publish import open_registry

    wanted = PullWanted(
        base=base,
        mirrors=factory.settings.mirror_map,
        open_registry=lambda host: open_registry(factory, host),
    )
    return ensure_pulled_base(factory.layout, wanted, progress)


def package_index(factory: Factory) -> PackageIndex:
    from imagefactory.lock.index import find_index, trusting

    found = find_index(factory.settings.index, environ=factory.environ, prefix=Path(sys.prefix))
    return trusting(found, factory.settings.certificates_path)


def _locker(index: PackageIndex) -> UvLocker:
    from imagefactory.lock.pypi import UvLocker

    return UvLocker(index, python=Path(sys.executable))


def _target_locker(factory: Factory, target: Target) -> Locker:
    """What solves the target's packages, and knows where they are."""
    index = package_index(factory)
    if target.source != "conda":
        return _locker(index)
    channels, records = conda_channels(factory), factory.settings.cache_path / "channels"
    if (solver := factory.settings.solver.value) == SOLVERS[0]:
        from imagefactory.lock.conda import CondaLocker

        return CondaLocker(channels, records, lambda: _locker(index))
    from imagefactory.lock.conda_lock_tool import CondaLockLocker, find_tool

    tool = find_tool(solver, factory.environ)
    return CondaLockLocker(tool, channels, records, lambda: _locker(index))


def conda_channels(factory: Factory) -> Channels:
    """How this machine reaches conda's channels."""
    from imagefactory.lock.channels import find_channels

    certificates = package_index(factory).certificates
    return find_channels(factory.settings.channels.value, factory.environ, certificates)


def _mirror(factory: Factory) -> DebianMirror:
    from imagefactory.lock.base import find_mirror

    settings = factory.settings
    debs = settings.cache_path / "debs"
    found = find_mirror(settings.debian_mirror.value, debs, factory.environ, etc_apt=Path("/etc/apt"))
    return replace(found, certificates=settings.certificates.value)


class _Clock:
    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps.append((name, round(now - self._last, 3)))
        self._last = now

    def laps(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._laps)


# --- .sif files ----------------------------------------------------------------------------------


def find_sif(factory: Factory, target: Target) -> Sif | None:
    """The .sif that apptainer built from the target's definition, or None."""
    from imagefactory.oci.sif import find_sif as find
    from imagefactory.oci.sif import sif_reference

    return find(factory.layout, sif_reference(target))


def ensure_sif(factory: Factory, image: Image, target: str, progress: Progress, *, compression: str) -> Sif:
    """The kept .sif of an image of the store, made if need be. The caller holds the layout's `in_use`."""
    from imagefactory.engines.apptainer import SifMaker
    from imagefactory.engines.apptainer_command import ApptainerCommand

    return SifMaker(factory.layout, ApptainerCommand(factory.environ)).make(
        image, target, compression, progress
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SifExport:
    """`compression` is empty for that of the .sif at hand, else `fast`; `output` is None for its own name."""

    compression: str = ""
    output: Path | None = None


def export_sif(factory: Factory, target: Target, options: SifExport, progress: Progress) -> tuple[Sif, Path]:
    """Writes the target's .sif, of its image or as apptainer built it, beside and renamed; gives where.

    Raises BuildError when there is neither, UsageError for a compression that a built one has not.
    """
    from imagefactory.oci.sif import copy_sif

    with factory.layout.in_use(progress):
        image = find_image(factory, target)
        sif = find_sif(factory, target) if image is None else None
        if image is not None:
            compression = options.compression or "fast"
            sif = ensure_sif(factory, image, target.name, progress, compression=compression)
        if sif is None:
            raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
        if options.compression not in ("", sif.compression):
            raise UsageError(
                f"the .sif that apptainer built of {target.name} is compressed '{sif.compression}'",
                hint=f"leave it out, or `imagefactory build {target.name} --engine assemble` first",
            )
        output = options.output or Path(sif.name)
        copy_sif(sif, output, progress)
    return sif, output
