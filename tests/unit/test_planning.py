"""What a plan learns of the store: an image is unchanged while it is what its lock and its base give."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory import workflow
from imagefactory.engines import base_image
from imagefactory.engines.assemble import AssembleEngine
from imagefactory.engines.base_image import recall_base
from imagefactory.factory import Factory, read_factory
from imagefactory.gpu.findings import Found
from imagefactory.gpu.model import Package
from imagefactory.gpu.scan_records import RECORDS, LayerScan, format_scan
from imagefactory.lock.base import read_base_lock
from imagefactory.model import Layer, Target
from imagefactory.oci.layout import Layout, reference
from imagefactory.plan import Stage
from imagefactory.planning import read_stages
from imagefactory.settings import load_settings
from tests.unit.test_cli import root  # noqa: F401
from tests.unit.test_layout import add_image

NAME = "pytorch-2.3-cu121"


@pytest.fixture
def factory(root: Path, tmp_path: Path) -> Factory:  # noqa: F811
    environ = {
        **os.environ,
        "IMAGEFACTORY_STORE": str(tmp_path / "store"),
        "IMAGEFACTORY_CACHE": str(tmp_path / "cache"),
    }
    return read_factory(load_settings(directory=root, start=root, environ=environ), environ)


@pytest.fixture
def target(factory: Factory) -> Target:
    return next(one for one in factory.targets if one.name == NAME)


def stage(factory: Factory, target: Target) -> Stage:
    (found,) = read_stages(factory, [target])
    return found


def put_base(factory: Factory, target: Target, content: bytes = b"base") -> None:
    """A base in the store as its committed lock's build leaves it, of other content."""
    layout = factory.layout
    blob = layout.add(content, "application/vnd.oci.image.layer.v1.tar")
    layer = Layer(descriptor=blob, diff_id=blob.digest, title=target.base)
    lock = read_base_lock(factory.base_lock_path(factory.base_of(target)))
    assert lock is not None
    layout.record_layer(base_image._layer_key(lock, factory.settings.codec.value), layer)
    base_image._tag(layout, target.base, layer, lock.source_date_epoch)


def put_image(factory: Factory, target: Target) -> str:
    """An image of the target, recorded as the engine that makes one records it; its digest."""
    layout, definition = factory.layout, workflow.define_target(factory, target)
    wanted = workflow._wanted_base(factory, definition.base, locked=False)
    base = recall_base(layout, wanted)
    assert base is not None
    index = add_image(layout, reference(target), [b"layer"])
    engine = AssembleEngine(layout, layout.path, codec=factory.settings.codec.value, workers=1)
    key = engine._image_key(definition, base)
    layout.record("images", key, {"digest": index.digest, "size": index.size})
    return index.digest


def test_an_empty_store_is_looked_at_and_not_made(factory: Factory, target: Target) -> None:
    found = stage(factory, target)
    assert (found.missing, found.block, found.image) == ("not in the store", "", "")
    assert found.lock is not None
    assert not factory.layout.path.exists()


def test_the_image_of_the_lock_and_the_base_is_unchanged(factory: Factory, target: Target) -> None:
    put_base(factory, target)
    digest = put_image(factory, target)
    found = stage(factory, target)
    assert (found.missing, found.image) == ("", digest)


def test_what_was_scanned_of_the_image_is_the_evidence(factory: Factory, target: Target) -> None:
    put_base(factory, target)
    put_image(factory, target)
    layout = factory.layout
    assert stage(factory, target).evidence.contents is None
    image = layout.image(reference(target))
    assert image is not None
    (layer,) = image.layers
    package = Package(name="torch", version="2.3.1")
    scan = LayerScan(found=(Found(path="torch-2.3.1.dist-info", package=package),))
    layout.record(RECORDS, layout.blob_path(layer.descriptor.digest).name, format_scan(scan))
    contents = stage(factory, target).evidence.contents
    assert contents is not None
    assert contents.packages == (package,)


def test_an_image_of_something_else_under_the_targets_name_is_built_anew(
    factory: Factory, target: Target
) -> None:
    put_base(factory, target)
    add_image(factory.layout, reference(target), [b"another"])
    assert stage(factory, target).missing == "the image in the store is not what assemble makes of the lock"


def test_a_lost_layer_is_built_anew(factory: Factory, target: Target) -> None:
    put_base(factory, target)
    put_image(factory, target)
    layout = factory.layout
    layout.blob_path(layout.add(b"layer", "x").digest).unlink()
    assert stage(factory, target).missing


def test_a_base_that_moved_on_changes_its_images(factory: Factory, target: Target) -> None:
    put_base(factory, target)
    put_image(factory, target)
    path = factory.base_lock_path(factory.base_of(target))
    lock = read_base_lock(path)
    assert lock is not None
    first = replace(lock.packages[0], sha256="0" * 64)
    path.write_text(base_image.format_base_lock(replace(lock, packages=(first, *lock.packages[1:]))))
    assert stage(factory, target).missing == "the image in the store is not what assemble makes of the lock"


def test_a_base_that_was_made_anew_changes_its_images(factory: Factory, target: Target) -> None:
    put_base(factory, target)
    put_image(factory, target)
    put_base(factory, target, b"another")
    assert stage(factory, target).missing


def test_a_light_install_says_that_it_cannot_compare(
    factory: Factory, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_image(factory.layout, reference(target), [b"pulled"])

    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard")

    monkeypatch.setattr(workflow, "find_built", missing)
    found = stage(factory, target)
    assert found.missing == "the image in the store cannot be compared without zstandard"
    assert not found.block


def test_a_base_without_a_lock_blocks(factory: Factory, target: Target) -> None:
    factory.base_lock_path(factory.base_of(target)).unlink()
    found = stage(factory, target)
    assert found.block == f"the lock of base {target.base}: none"
    assert found.hint == f"imagefactory lock base:{target.base}"


def test_a_stale_lock_blocks(factory: Factory, target: Target) -> None:
    stale = replace(target, requirements=(*target.requirements, "six"))
    found = stage(factory, stale)
    assert "is stale" in found.block
    assert found.lock is None
    assert found.hint == f"imagefactory lock {NAME}"


def test_layouts_of_others_are_not_touched(factory: Factory, target: Target) -> None:
    put_base(factory, target)
    before = sorted(factory.layout.path.rglob("*"))
    stage(factory, target)
    assert sorted(Layout(factory.layout.path).path.rglob("*")) == before
