"""What builds and pushes leave in a store and in a registry."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from imagefactory.actions import build
from imagefactory.actions import definition as define
from imagefactory.actions.transfer import PushOptions, push_target
from imagefactory.build.assemble import AssembleEngine
from imagefactory.build.base import image
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.model import Target
from imagefactory.oci.candidates import VERDICT_TYPE
from imagefactory.oci.graph import StoreRepository, read_manifest
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import OciLayer
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.settings.load import NONCE_STORE_KEY
from imagefactory.trust.attached import SignedStatement, attach, read_subject
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.policy import TrustGrant, add_key
from imagefactory.trust.verdict import sign
from imagefactory.verify.suite_files import suite_digest
from tests.made.factory import NAME
from tests.made.layout import add_image
from tests.made.registry import RegistryMadeHere
from tests.made.trusted import write_settings
from tests.made.verdicts import LAB, NOW, whole_report

SHARED_KEY = "a long random text of 64 hex digits"


def put_base(factory: Project, target: Target, content: bytes = b"base") -> None:
    """A base in the store as its committed lock's build leaves it, of other content."""
    layout = factory.layout
    blob = layout.add(content, "application/vnd.oci.image.layer.v1.tar")
    layer = OciLayer(descriptor=blob, diff_id=blob.digest, title=target.base)
    base = factory.base_of(target)
    lock = read_base_lock(factory.base_lock_path(base))
    assert lock is not None
    layout.record_layer(image._layer_key(lock, factory.settings.codec.value, None), layer)
    image._tag(layout, base, (layer,), lock.source_date_epoch)


def put_built(
    factory: Project, target: Target, layer: bytes = b"layer", *, record: bool = True, **labels: str
) -> str:
    """An image of the target, recorded as the engine that makes one records it; its digest."""
    layout, definition = factory.layout, define.define_target(factory, target)
    base = build.base_request(factory, definition.base).stored(layout)
    assert base is not None
    index = add_image(layout, reference(target), [layer], **labels)
    engine = AssembleEngine(layout, layout.path, codec=factory.settings.codec.value, workers=1)
    key = engine.image_key(definition, base)
    if record:
        layout.record("images", key, {"digest": index.digest, "size": index.size})
    return index.digest


def push(factory: Project, target: Target, registry: RegistryMadeHere, now: datetime = NOW) -> str:
    options = PushOptions(now=now, registry=registry.host)
    return push_target(with_nonce_key(factory), target, options, QuietProgress()).reference.digest


def with_nonce_key(factory: Project) -> Project:
    """With the key that the machines of a center share."""
    return replace(factory, environ={**factory.environ, NONCE_STORE_KEY: SHARED_KEY})


def elsewhere(factory: Project, folder: Path) -> Project:
    """The same recipes on a machine whose store is empty."""
    store = replace(factory.settings.store, value=str(folder / "empty"))
    return with_nonce_key(replace(factory, settings=replace(factory.settings, store=store)))


def verdict_on(factory: Project, place: StoreRepository, index: str, now: datetime = NOW) -> None:
    """A verdict of a made-up GPU beside an image, by a key that this factory is told to trust."""
    subject = replace(read_subject(place, index), target=NAME)
    report = whole_report(subject=subject, suite=suite_digest(), ended=now, started=now)
    signed = sign(report, LAB, now=now, days=90)
    manifest = read_manifest(place, subject.manifest).descriptor
    attach(place, SignedStatement(kind=VERDICT_TYPE, subject=manifest, envelope=signed.envelope))
    public = PublicKey(name="lab", raw=LAB.public)
    grant = TrustGrant(key=public, since=now.date(), until=now.date() + timedelta(days=365))
    write_settings(factory.settings.root_path, add_key("", grant, "imagefactory.toml"), factory.environ)
