"""Assemble an image from packages as they arrive: layers, byte code, and one owner for each path.

Each layer is built as soon as its packages have arrived, while others are fetched and the base is installed.
Wheels become layers directly. Conda packages are first linked into a staging prefix (conda/prefix.py).
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from imagefactory.build.base.image import BuiltBase, PendingBase
from imagefactory.build.conda.prefix import (
    LinkedPrefix,
    LinkPlan,
    PathClaim,
    extracted_directory,
    lay_changes,
    record_name,
    remove_from_extracted,
    run_scripts,
    staging_directory,
)
from imagefactory.build.definition import (
    HOME,
    Rank,
    forward_links,
    group_packages,
    pyvenv_cfg,
    rank_wheels,
    venv_links,
)
from imagefactory.build.layer_lock import inherited, lay_own_files, linker, own_title, write_image
from imagefactory.build.layer_plan import (
    LayerInputs,
    LayerPackage,
    LayerPlan,
    conda_part,
    conda_python,
    plan_layers,
    wheel_part,
)
from imagefactory.build.layers import (
    LayerResult,
    PackageSupply,
    build_layers,
    format_segment_record,
    new_compiler,
    read_segment_record,
    read_segment_record_of,
    segment_record_path,
)
from imagefactory.build.protocol import BuildInputs
from imagefactory.build.wheel_layer import InstalledFile, InstallPrefix, PackageMismatchError
from imagefactory.errors import BuildError
from imagefactory.fs import check_checksum, explain_full_disk, remove_inside
from imagefactory.gpu.capability import architecture
from imagefactory.lock.download import PendingDownloads
from imagefactory.model import (
    BuildSpec,
    LockedCondaPackage,
    LockedPackage,
    LockedWheel,
    Mount,
    RunSpec,
)
from imagefactory.oci.layers import END_OF_ARCHIVE, TarSegment, codec
from imagefactory.oci.layout import BlobWriter, Layout
from imagefactory.oci.manifests import (
    Descriptor,
    OciLayer,
    hash_key,
)
from imagefactory.progress import Progress
from imagefactory.runtime.unshare import UnshareRunner

# If two wheels have different files at one path, one file wins. pip overwrites files of earlier wheels, in
# the order of names. Here the packages that a recipe names come first, because a person chose those.
# `definition.py` has the ranks, by which the other engines run pip in parts.


T = TypeVar("T")
HISTORY = "conda-meta/history"


def describe_claims(claims: Iterable[PathClaim]) -> Iterator[str]:
    """Yield a line for each pair of conda packages with different content at one path."""
    paths: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        if not claim.same:
            paths.setdefault((claim.kept, claim.lost), []).append(claim.path)
    for (winner, lost), files in sorted(paths.items()):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield f"{winner} and {lost} both bring {min(files)}{more}, not the same: that of {winner} is kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOwners:
    """The package that owns each path. `owners` maps paths to (package, content hash).

    `lost` maps (package that keeps, package that loses) to the paths. Wheels are named by their files.
    """

    owners: Mapping[str, tuple[str, str]]
    lost: Mapping[tuple[str, str], frozenset[str]]

    def excluded(self, package: str) -> frozenset[str]:
        """Return the paths of a package that another package owns."""
        return frozenset(
            path for (_, loser), paths in self.lost.items() if loser == package for path in paths
        )

    def image_files(self) -> Iterator[tuple[str, str, str]]:
        """Yield (package, content hash, path) of all files in the image."""
        for path, (package, content) in self.owners.items():
            yield package, content, path


def settle_claims(laid: Iterable[tuple[str, str, str]], ranks: Mapping[str, Rank]) -> PathOwners:
    """Decide which package owns the file at each path.

    `laid` yields (package, content hash, path). Several packages may have the same file
    (`nvidia/__init__.py` is in nine). If contents differ, the wheel with the lowest rank keeps the path.
    Files without a rank (the environment's own files, conda packages) conflict. Raises BuildError with both
    packages for such a conflict, and for a path that is a file of one and a directory of another.
    """
    owners: dict[str, tuple[str, str]] = {}
    rivals: dict[str, list[tuple[str, str]]] = {}
    for package, content, path in laid:
        other = owners.setdefault(path, (package, content))
        if other == (package, content):
            continue
        claimed = rivals.setdefault(path, [other])
        claimed.append((package, content))
        if other[1] == content:
            continue
        if package not in ranks or other[0] not in ranks:
            raise BuildError(
                "file-conflict",
                f"/{path} is in {other[0]} and in {package} with different content",
                hint="remove one of the two packages from the recipe, or choose another version",
            )
        owners[path] = min(other, (package, content), key=lambda claim: ranks[claim[0]])
    lost: dict[tuple[str, str], set[str]] = {}
    for path, claimed in rivals.items():
        keeper, winning = owners[path]
        for package, content in claimed:
            if content != winning:
                lost.setdefault((keeper, package), set()).add(path)
    _check_directories(owners)
    return PathOwners(owners=owners, lost={pair: frozenset(paths) for pair, paths in lost.items()})


def _check_directories(owners: Mapping[str, tuple[str, str]]) -> None:
    for path, (package, _) in owners.items():
        above = path.rpartition("/")[0]
        while above:
            if above in owners:
                raise BuildError(
                    "file-conflict",
                    f"/{above} is a file in {owners[above][0]} and a directory in {package}",
                    hint="remove one of the two packages from the recipe, or choose another version",
                )
            above = above.rpartition("/")[0]


def describe_path_conflicts(settled: PathOwners, ranks: Mapping[str, Rank]) -> Iterator[str]:
    """Yield a line for each pair of wheels with different content at one path."""
    for (keeper, loser), paths in sorted(settled.lost.items()):
        (_, unnamed, name), (_, other_unnamed, other) = ranks[keeper], ranks[loser]
        files = f"{min(paths)}" + (f" and {len(paths) - 1} more files" if len(paths) > 1 else "")
        reason = "" if unnamed else ", which the recipe names,"
        how = f"exclude: [{other}] in the recipe" if other_unnamed else f"a recipe that does not name {other}"
        yield (
            f"{name} and {other} both bring /{files}, not the same: those of {name}{reason} are kept "
            f"({how} leaves the other out)"
        )


def own_files(definition: BuildSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the environment's own files, which no package may replace."""
    for path, _ in forward_links(definition.base, definition.lock):
        yield "the environment", "", path.lstrip("/")
    if definition.lock.conda:
        yield "the environment", "", f"{definition.prefix}/{HISTORY}".lstrip("/")
        return
    yield "the environment", "", f"{definition.prefix}/pyvenv.cfg".lstrip("/")
    for path, _ in venv_links(definition):
        yield "the environment", "", path.lstrip("/")


class Assembly:
    """Builds images into `layout` with `workers` threads. `cache` has small segments."""

    def __init__(self, layout: Layout, cache: Path, *, codec: str, workers: int) -> None:
        self.layout, self.cache, self.codec, self.workers = layout, cache, codec, workers

    def build(
        self, definition: BuildSpec, inputs: BuildInputs, progress: Progress
    ) -> tuple[Descriptor, BuiltBase]:
        """Return the index of the image, and its base. Raises BuildError or StoreError."""
        try:
            return self._assemble(definition, inputs, progress)
        except PackageMismatchError as error:  # a cached file of an earlier build has changed
            progress.note(f"  {error.message}; it is fetched or unpacked again")
            return self._assemble(definition, inputs, progress)

    def _forget(self, name: str, files: Mapping[LockedPackage, Path]) -> None:
        """Remove the wheel or unpacked archive of a PackageMismatchError from the cache."""
        for package, path in files.items():
            if isinstance(package, LockedWheel):
                if path.name == name and path.is_relative_to(self.cache):  # never the project's own files
                    remove_inside(self.cache, path)
            elif record_name(package) == name:
                remove_from_extracted(self.cache, package)

    def _assemble(
        self, definition: BuildSpec, inputs: BuildInputs, progress: Progress
    ) -> tuple[Descriptor, BuiltBase]:
        with inputs.packages() as arrivals:
            try:
                return self._lay(definition, inputs, arrivals, progress)
            except PackageMismatchError as error:
                self._forget(error.name, arrivals.paths)
                raise

    def _lay(
        self, definition: BuildSpec, inputs: BuildInputs, arrivals: PendingDownloads, progress: Progress
    ) -> tuple[Descriptor, BuiltBase]:
        groups = group_packages(definition)
        with self._linked(definition, groups, inputs, arrivals, progress) as prefix:
            coming = inputs.base()
            bench = self._bench(definition, coming, prefix)

            def part_of(package: LockedPackage) -> LayerPackage:
                if isinstance(package, LockedWheel):
                    return wheel_part(package, arrivals.paths[package], bench)
                assert prefix is not None
                return conda_part(package, prefix, bench)

            parts = [{package: part_of(package) for package in group} for group in groups]
            supply = PackageSupply(
                package=arrivals.wait,
                base=lambda: coming.get().folders,
                stop=arrivals.stop,
                unpacked=inputs.unpacked,
            )
            plans = plan_layers(parts)
            results = build_layers(plans, bench, supply, progress, workers=self.workers)
            arrivals.wait_for_all()
            base = coming.get()
            ranks = rank_wheels(definition)
            laid = chain(own_files(definition), read_segment_record(self.layout, plans))
            if (settled := settle_claims(laid, ranks)).lost:
                for line in describe_path_conflicts(settled, ranks):
                    progress.note(f"  {line}")
                parts = [
                    {package: part.without(settled.excluded(part.name)) for package, part in group.items()}
                    for group in parts
                ]
                plans = plan_layers(parts)
                results = build_layers(plans, bench, supply, progress, workers=self.workers)
            if prefix and prefix.scripts:
                results.append(self._run_scripts(prefix, plans, settled, bench, base, progress))
            if title := own_title(definition):
                layer, _ = self._layer(title, base.epoch, partial(lay_own_files, definition))
                results.append(LayerResult(layer=layer, made=True))
        written = sum(layer.layer.descriptor.size for layer in results if layer.made)
        progress.note(
            f"  {sum(layer.made for layer in results)} of {len(results)} layers made, {written:,} bytes"
        )
        every = (*base.image.layers, self._skeleton(definition, base), *(layer.layer for layer in results))
        return write_image(self.layout, definition, base, every), base

    @contextmanager
    def _linked(
        self,
        definition: BuildSpec,
        groups: Sequence[Sequence[LockedPackage]],
        inputs: BuildInputs,
        arrivals: PendingDownloads,
        progress: Progress,
    ) -> Iterator[LinkedPrefix | None]:
        """Yield the target's linked conda packages, None for a target without conda packages."""
        if not definition.lock.conda:
            yield None
            return
        inputs.base().get()
        files = arrivals.wait_for_all()  # the owner of a shared path is known once all are complete
        staging = LinkPlan(
            archives={package: files[package] for package in definition.lock.conda},
            groups=[
                [package for package in group if isinstance(package, LockedCondaPackage)] for group in groups
            ],
            shown=definition.prefix,
            scratch=self.layout.tmp,
            cache=extracted_directory(self.cache),
        )
        with staging_directory(staging, progress) as prefix:
            for line in describe_claims(prefix.claims):
                progress.note(f"  {line}")
            yield prefix

    def _run_scripts(
        self,
        prefix: LinkedPrefix,
        plans: Sequence[LayerPlan],
        settled: PathOwners,
        bench: LayerInputs,
        base: BuiltBase,
        progress: Progress,
    ) -> LayerResult:
        """Return the layer of changes by post-link scripts, which run in the base unless it is recorded.

        It is the last layer. Scripts must not change files of wheels, because other engines run scripts
        first.
        """
        names = ", ".join(script.name for script in prefix.scripts)
        linked = [part.key for plan in plans for part in plan.parts if part.linked]
        inputs = (codec(bench.codec).identity, base.image.manifest, bench.compiler)
        key = hash_key("scripts", *inputs, str(bench.environment), *linked)
        of_wheels = {part.name for plan in plans for part in plan.parts if not part.linked}
        rows = [row for row in settled.image_files() if row[0] in of_wheels]
        known = self.layout.recall_layer(key)
        if known is not None and check_checksum(segment_record_path(self.layout, key)) is not None:
            settle_claims(chain(rows, read_segment_record_of(self.layout, key)), {})
            return LayerResult(layer=known, made=False)
        progress.note(f"  running the post-link scripts of {names} in the base")
        runner = UnshareRunner(self.layout)

        def start(argv: tuple[str, ...], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            mount = Mount(source=prefix.folder, target=prefix.shown, writable=True, scratch=True)
            variables = {**dict(bench.environment), **environment}
            spec = RunSpec(
                argv=argv,
                environment=tuple(variables.items()),
                workdir=prefix.shown,
                read_only=True,
                mounts=(mount,),
            )
            return runner.start(
                base.folders,
                spec,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                processor=bench.processor,
            )

        with explain_full_disk(self.layout.path):
            changes = run_scripts(prefix, start)

        def lay(segment: TarSegment) -> tuple[InstalledFile, ...]:
            with closing(new_compiler(bench, base.folders)) as compiler, compiler.wheel():
                return lay_changes(prefix.folder, changes, bench.place, segment, compiler)

        title = f"post-link scripts: {names}"
        layer, laid = self._layer(title, bench.epoch, lay)
        self.layout.keep(segment_record_path(self.layout, key), format_segment_record(title, laid))
        settle_claims(chain(rows, read_segment_record_of(self.layout, key)), {})
        self.layout.record_layer(key, layer)
        return LayerResult(layer=layer, made=True)

    def _bench(self, definition: BuildSpec, base: PendingBase, prefix: LinkedPrefix | None) -> LayerInputs:
        conda = prefix is not None
        return LayerInputs(
            store=self.layout.path,
            segments=self.cache / "segments",
            codec=self.codec,
            place=InstallPrefix(prefix=definition.prefix, python=definition.target.python, venv=not conda),
            epoch=base.epoch,
            compiler=conda_python(definition.lock) if conda else base.identity,
            interpreter=definition.python_path,
            environment=inherited(base.environment),
            linked=prefix.folder if prefix else None,
            linker=linker() if conda else "",
            processor=architecture(definition.target.platform),
        )

    def _skeleton(self, definition: BuildSpec, base: BuiltBase) -> OciLayer:
        """Return the layer of the environment's own few files, below the packages."""

        def lay(segment: TarSegment) -> None:
            segment.folder(definition.site_packages.lstrip("/"))
            segment.folder(f"{definition.prefix}/bin".lstrip("/"))
            segment.folder(HOME.lstrip("/"), 0o1777)
            if definition.lock.conda:
                # Conda tools recognize an environment by this file.
                segment.file(f"{definition.prefix}/{HISTORY}".lstrip("/"), [], size=0, executable=False)
            else:
                text = pyvenv_cfg(definition).encode()
                segment.file(
                    f"{definition.prefix}/pyvenv.cfg".lstrip("/"), [text], size=len(text), executable=False
                )
                for path, target in venv_links(definition):
                    segment.link(path.lstrip("/"), target)
            for path, target in forward_links(definition.base, definition.lock):
                segment.folder(path.rpartition("/")[0].lstrip("/"))
                segment.link(path.lstrip("/"), target)

        return self._layer("environment", base.epoch, lay)[0]

    def _layer(self, title: str, epoch: int, lay: Callable[[TarSegment], T]) -> tuple[OciLayer, T]:
        """Write a layer. Return the layer and the result of `lay`."""
        packer, plain = codec(self.codec), hashlib.sha256()
        with explain_full_disk(self.layout.path), BlobWriter(self.layout) as blob:
            segment = TarSegment(packer, blob, plain, epoch=epoch)
            result = lay(segment)
            segment.raw(END_OF_ARCHIVE)
            segment.close()
            descriptor = blob.commit(packer.media_type)
        return OciLayer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title=title), result
