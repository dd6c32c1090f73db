"""A factory on the access point of the tests' pool: small targets whose images differ in what runs in them.

Every image has this machine's Python. `stand-in` images also have the tests' libcuda, each with another lie
compiled in; it answers as the device that the machine `standin` of the pool (9.0) says it has. Some images
have a Python that is none: it spoils what the suite has written. What comes out of all of them is signed by
no key that anybody's settings trust.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagefactory.actions.definition import define_target
from imagefactory.actions.locked import locked_target
from imagefactory.build.assemble import AssembleEngine
from imagefactory.build.base import image as base_image
from imagefactory.build.base.image import BuiltBase, write_index
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.files import write_lock
from imagefactory.model import LockedWheel, Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    OciLayer,
    canonical_json,
    format_descriptor,
)
from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from tests.made.values import make_lock
from tests.services import libcuda
from tests.services.condor import CondorPool
from tests.services.sandbox import PYTHON, entry, host_files

TREE = Path(__file__).parents[2]
TORCH = TREE / "tests/services/torch_over_tcp"
"""torch without GPUs, for `over_nodes`: what it sums goes over TCP."""
LIBRARY = "usr/lib/x86_64-linux-gnu/libcuda.so.1"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"

# Of the standard library, what no suite loads: every .sif would carry it.
UNUSED = re.compile(r"/(config-|ensurepip|idlelib|lib2to3|tkinter|turtledemo|unittest|distutils|pydoc_data)")

# It runs what it is told to, then does its worst to the result, which lies in the folder that it stands in.
SPOILS = """\
#!/bin/sh
{python} "$@"
code=$?
{spoil}
exit $code
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trick:
    """What is special in an image: the words its libcuda was compiled with, and what spoils its result."""

    lies: str | None = None
    spoil: str = ""
    family: str = "tiny"


TRICKS: Mapping[str, Trick] = {
    "plain": Trick(),
    "good": Trick(lies="capability=9.0"),
    "wrong-numbers": Trick(lies="capability=9.0 kernel=wrong"),
    "no-kernel": Trick(lies="capability=9.0 fail=cuModuleLoadDataEx:209"),
    "driver-too-old": Trick(lies="capability=9.0 fail=cuInit:804"),
    "load-failed": Trick(lies="capability=9.0 fail=cuLaunchKernel:700"),
    "another-gpu": Trick(lies="capability=8.6"),
    "hang": Trick(lies="capability=9.0 hang=cuInit"),
    "garbage": Trick(lies="capability=9.0", spoil="echo '{{{' >result/run.json"),
    "empty": Trick(lies="capability=9.0", spoil=": >result/run.json; : >result/report.json"),
    "nodes": Trick(lies="capability=9.0", family="pair"),
}
TINY = tuple(name for name, trick in TRICKS.items() if trick.family == "tiny")
VERSIONS = {name: f"1.{number}" for number, name in enumerate(TRICKS)}

RECIPE = f"""\
family: tiny
description: Images for tests of a pool
source: pypi
framework: idna
platform: linux/amd64
base: debian-12
python: "{sys.version_info[0]}.{sys.version_info[1]}"
capabilities: ["9.0"]
checks: [packages]
matrix:
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGround:
    """The factory as the tests see it; `root` and `store` lie in the ordinary user's home."""

    pool: CondorPool
    factory: Project
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.factory.settings.root_path

    def name(self, trick: str) -> str:
        return f"{TRICKS[trick].family}-{VERSIONS[trick]}-cu121"

    def run(self, *arguments: str, code: int | None = 0, folder: Path | None = None, err: bool = True) -> str:
        """What the command says as the ordinary user in `folder`, else in the factory."""
        done = self.pool.factory(*arguments, folder=folder or self.root, code=code, **self.environ)
        return done.stdout + (done.stderr if err else "")


def make_ground(
    pool: CondorPool, place: Path | None = None, tricks: Iterable[str] = TINY, copies: int = 0
) -> PoolGround:
    """A factory of these tricks in the ordinary user's home, locked, with their images in its store.

    With `place` all of it lies there, and commands take that folder for the home: no settings and keys of
    another file of tests are theirs. `copies` are as many more targets that are plain.
    """
    home = place or pool.home
    root, store = home / "factory", home / "store"
    versions = {VERSIONS[name]: name for name in tricks}
    versions |= {f"2.{number}": "plain" for number in range(copies)}
    (root / "recipes").mkdir(parents=True)
    (root / "imagefactory.toml").write_text("")
    for family, framework in (("tiny", "idna"), ("pair", "torch")):
        rows = "".join(
            f'  - version: "{version}"\n    cuda: ["12.1"]\n'
            for version, name in versions.items()
            if TRICKS[name].family == family
        )
        text = RECIPE.replace("family: tiny", f"family: {family}").replace("idna", framework)
        if rows:
            (root / f"recipes/{family}.yaml").write_text(text + rows)
    shutil.copy(TREE / "recipes/bases.yaml", root / "recipes")
    shutil.copytree(TREE / "lockfiles/bases", root / "lockfiles/bases")
    environ = {"HOME": str(home), "IMAGEFACTORY_STORE": str(store)}
    factory = load_project(load_settings(directory=root, start=root, environ=environ), environ)
    common = factory.layout.add(_pack(_common()), LAYER_TYPE)
    base = put_base(factory, common)
    for target in factory.targets:
        lock(factory, target)
        put_image(factory, target, (base, special(factory, TRICKS[versions[target.version]])))
    pool.own(place or root, store)
    there = {"HOME": pool.there(home), "IMAGEFACTORY_STORE": pool.there(store)}
    return PoolGround(pool=pool, factory=factory, environ=there)


def lock(factory: Project, target: Target) -> None:
    wheels = tuple(
        LockedWheel(
            name=name,
            version=version,
            filename=f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
            sha256="0" * 64,
            size=1,
        )
        for name, version in sorted(
            ((target.framework, target.version), ("nvidia-cuda-runtime-cu12", "12.1.105"))
        )
    )
    made = make_lock(
        target=target.name,
        content_hash=locked_target(factory, target).content_hash,
        python=target.python,
        wheels=wheels,
    )
    write_lock(factory.lock_folder, made)


def put_base(factory: Project, layer: Descriptor) -> BuiltBase:
    """A base that is remembered as the locked one; its content is this machine's Python."""
    (base,) = (one for one in factory.bases if one.name == factory.targets[0].base)
    lock = read_base_lock(factory.base_lock_path(base))
    assert lock is not None
    made = OciLayer(descriptor=layer, diff_id=layer.digest, title=base.name)
    factory.layout.record_layer(base_image._layer_key(lock, factory.settings.codec.value, None), made)
    epoch = lock.source_date_epoch
    image = base_image._tag(factory.layout, base, (made,), epoch)
    return BuiltBase(image=image, folders=(), identity=base_image.base_key(lock), epoch=epoch, published=True)


def special(factory: Project, trick: Trick) -> Descriptor:
    return factory.layout.add(_pack(_special(trick)), LAYER_TYPE)


def put_image(factory: Project, target: Target, parts: tuple[BuiltBase, Descriptor]) -> None:
    """An image of the base and one layer, remembered as what the target's lock gives."""
    layout, (base, own) = factory.layout, parts
    definition = define_target(factory, target)
    layers = (*(layer.descriptor for layer in base.image.layers), own)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin"], "Labels": dict(definition.labels)},
        "rootfs": {"diff_ids": [layer.digest for layer in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer) for layer in layers],
    }
    index = write_index(layout, manifest, "linux/amd64")
    layout.tag(reference(target), index)
    engine = AssembleEngine(
        layout, factory.settings.cache_path, codec=factory.settings.codec.value, workers=1
    )
    row = {"digest": index.digest, "size": index.size}
    layout.record("images", engine.image_key(definition, base), row)


Members = Iterator[tuple[tarfile.TarInfo, bytes]]


def _pack(members: Members) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def _common() -> Members:
    for folder in ("usr", "usr/bin", "opt", "opt/env", "opt/env/bin", "etc", "tmp", "var", "var/tmp"):
        yield entry(folder, mode=0o755, kind=tarfile.DIRTYPE), b""
    for name in ("bin", "lib", "lib64"):
        yield entry(name, mode=0o777, kind=tarfile.SYMTYPE, link=f"usr/{name}"), b""
    for info, path in host_files():
        if not UNUSED.search(info.name):
            yield info, path.read_bytes()


def _special(trick: Trick) -> Members:
    if trick.spoil:
        text = SPOILS.format(python=PYTHON, spoil=trick.spoil)
        yield entry("opt/env/bin/python", mode=0o755), text.encode()
    else:
        yield entry("opt/env/bin/python", mode=0o777, kind=tarfile.SYMTYPE, link=PYTHON), b""
    if trick.family == "pair":
        for path in sorted(TORCH.glob("**/*.py")):
            yield (
                entry(f"usr/lib/python3/dist-packages/{path.relative_to(TORCH)}", mode=0o644),
                path.read_bytes(),
            )
    if trick.lies is not None:
        yield entry(LIBRARY, mode=0o755), libcuda.compile_libcuda(trick.lies)
