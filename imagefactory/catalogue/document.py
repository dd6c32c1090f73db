"""A catalogue as bytes: written, signed, and read again by people who have no factory.

    Catalogue -> format_catalogue() -> sign_catalogue() -> envelope
    envelope + Trust + now -> open_catalogue() -> Catalogue

One DSSE envelope with everything in it, the verdicts' own envelopes too. The parser takes exactly what the
formatter gives. A catalogue is believed for LIFE, so whoever holds back a newer one, or a revocation in it,
does so for that long at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from imagefactory.catalogue.model import Catalogue, CataloguedImage, CataloguedSif, Envelopes
from imagefactory.errors import StatementError, UsageError
from imagefactory.gpu.model import Answer, Basis, Claim
from imagefactory.oci.store import parse_reference
from imagefactory.verdicts.envelope import EnvelopeForm, format_json, parse_json, seal
from imagefactory.verdicts.judgement import open_signed, out_of_period
from imagefactory.verdicts.keys import SigningKey
from imagefactory.verdicts.model import Standing
from imagefactory.verdicts.statement import SKEW
from imagefactory.verdicts.trust import Trust
from imagefactory.verify.model import Subject
from imagefactory.verify.report import (
    CAPABILITY,
    DIGEST,
    NAME,
    fault,
    fields,
    format_time,
    line,
    parse_time,
    word,
)

T = TypeVar("T")

FORMAT = 1
CATALOGUE_TYPE = "application/vnd.imagefactory.catalogue+json"
LARGEST = 96 << 20
FORM = EnvelopeForm(payload_type=CATALOGUE_TYPE, largest=LARGEST)
LIFE = timedelta(days=30)
MOST_IMAGES, MOST_OTHERS = 5000, 1000

# `2.3.1`, `0.4.26.dev1+cu12`, `3.11`; of CUDA `12.1` or `12`; of drivers `530.30.02` or `525`.
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
_NUMBERS = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){0,3}")
_FRAMEWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9]+(?:/[a-z0-9]+)?")
_RULE = re.compile(r"[a-z0-9][a-z0-9:._-]{0,127}")


# --- signing -------------------------------------------------------------------------------------


def sign_catalogue(catalogue: Catalogue, key: SigningKey) -> bytes:
    """The envelope of a catalogue. Raises StatementError for one that nobody would read."""
    payload = format_catalogue(catalogue)
    parse_catalogue(payload, "the catalogue to sign", key.keyid)
    envelope = seal(payload, key, FORM)
    if len(envelope) > LARGEST:
        raise StatementError(
            f"the catalogue has {len(envelope)} bytes, more than {LARGEST}",
            hint="make one of fewer targets: imagefactory catalogue TARGET...",
        )
    return envelope


def open_catalogue(data: bytes, trust: Trust, now: datetime, where: str = "the catalogue") -> Catalogue:
    """What a trusted key signed, where it still holds. `where` is what messages begin with.

    Raises StatementError with the word that says why not: unsigned, edited, wrong-key, key-retired, expired,
    not-yet, malformed.
    """
    opened = open_signed(data, trust, FORM)
    if opened.envelope is None or opened.key is None or opened.standing is not Standing.GOOD:
        raise _refused(where, opened.standing, opened.why)
    try:
        catalogue = parse_catalogue(opened.envelope.payload, "the catalogue", opened.key.keyid)
    except StatementError as error:
        raise _refused(where, Standing.MALFORMED, error.message) from error
    late = out_of_period(opened.key, catalogue.made)
    if late:
        raise _refused(where, *late)
    if catalogue.made - now > SKEW:
        raise _refused(where, Standing.NOT_YET, f"made at {format_time(catalogue.made)}, still to come")
    if now >= catalogue.expires:
        raise _refused(where, Standing.EXPIRED, f"it held until {format_time(catalogue.expires)}")
    return catalogue


_MEND = {
    Standing.WRONG_KEY: "trust the key of whoever made it: imagefactory keys trust --user FILE.pub, or its "
    "[[trust]] row in your imagefactory.toml",
    Standing.KEY_RETIRED: "its owner signs with another key now: ask for that",
    Standing.EXPIRED: "whoever runs the factory makes a new one: imagefactory catalogue",
    Standing.NOT_YET: "set this machine's clock",
    Standing.MALFORMED: "is it a catalogue? then use the version that wrote it, or a newer one",
}


def _refused(where: str, standing: Standing, why: str) -> StatementError:
    hint = _MEND.get(standing, "get it anew from whoever runs the factory, and see who changed it")
    return StatementError(f"{where} is refused: {standing}, {why}", hint=hint)


# --- writing -------------------------------------------------------------------------------------


def format_catalogue(catalogue: Catalogue) -> bytes:
    """The payload's bytes; `keyid` is not part of them. Times are whole seconds."""
    return format_json(
        {
            "format": FORMAT,
            "made": format_time(catalogue.made),
            "expires": format_time(catalogue.expires),
            "suites": list(catalogue.suites),
            "images": [_format_image(image) for image in catalogue.images],
        }
    )


def _format_image(image: CataloguedImage) -> dict[str, Any]:
    return {
        "target": image.target,
        "family": image.family,
        "framework": image.framework,
        "version": image.version,
        "cuda": image.cuda,
        "python": image.python,
        "platform": image.platform,
        "reference": image.reference,
        "subject": _format_subject(image.subject),
        "size": image.size,
        "unpacked": image.unpacked,
        "runtime": image.runtime,
        "minor_compat": image.minor_compat,
        "driver": image.driver,
        "required": list(image.required),
        "predicted": [
            {"capability": capability, **_format_claim(claim)} for capability, claim in image.predicted
        ],
        "sifs": [
            {
                "sha256": sif.sha256,
                "size": sif.size,
                "reference": sif.reference,
                "subject": _format_subject(sif.subject),
                "envelopes": _format_envelopes(sif.envelopes),
                "revocations": _format_envelopes(sif.revocations),
            }
            for sif in image.sifs
        ],
        "envelopes": _format_envelopes(image.envelopes),
        "revocations": _format_envelopes(image.revocations),
    }


def _format_subject(subject: Subject) -> dict[str, str]:
    """Without the target, which stands above."""
    return {"index": subject.index, "manifest": subject.manifest, "config": subject.config}


def _format_claim(claim: Claim) -> dict[str, str]:
    return {
        "basis": claim.basis.value,
        "answer": claim.answer.value,
        "rule": claim.rule,
        "reason": claim.reason,
        "source": claim.source,
        "driver": claim.driver,
    }


def _format_envelopes(envelopes: Envelopes) -> dict[str, object]:
    """As JSON within JSON, which packs better than text: envelopes have one spelling."""
    return {digest: parse_json(data, digest) for digest, data in envelopes}


# --- reading it again ------------------------------------------------------------------------------


def parse_catalogue(payload: bytes, where: str, keyid: str) -> Catalogue:
    """The catalogue of a payload. Raises StatementError for what `format_catalogue` does not write."""
    row = fields(parse_json(payload, where, LARGEST), where, "format made expires suites images")
    if row["format"] != FORMAT or isinstance(row["format"], bool):
        raise fault(f"{where}: format", f"this version reads {FORMAT}")
    catalogue = Catalogue(
        made=parse_time(row["made"], f"{where}: made"),
        expires=parse_time(row["expires"], f"{where}: expires"),
        suites=_list(row["suites"], f"{where}: suites", lambda one, at: word(one, at, DIGEST)),
        images=_list(row["images"], f"{where}: images", _parse_image, MOST_IMAGES),
        keyid=keyid,
    )
    if not timedelta(0) < catalogue.expires - catalogue.made <= LIFE:
        raise fault(f"{where}: expires", f"that is not within {LIFE.days} days after it was made")
    names = [image.target for image in catalogue.images]
    if len(set(names)) != len(names):
        raise fault(f"{where}: images", "a target stands there twice")
    return catalogue


def _parse_image(value: object, where: str) -> CataloguedImage:
    row = fields(
        value,
        where,
        "target family framework version cuda python platform reference subject size unpacked runtime "
        "minor_compat driver required predicted sifs envelopes revocations",
    )
    target = word(row["target"], f"{where}: target", NAME)
    at = f"{where} ({target})"
    subject = _parse_subject(row["subject"], f"{at}: subject", target)
    if not isinstance(row["minor_compat"], bool):
        raise fault(f"{at}: minor_compat", "that is neither true nor false")
    return CataloguedImage(
        target=target,
        family=word(row["family"], f"{at}: family", NAME),
        framework=word(row["framework"], f"{at}: framework", _FRAMEWORK),
        version=word(row["version"], f"{at}: version", _VERSION),
        cuda=word(row["cuda"], f"{at}: cuda", _NUMBERS),
        python=word(row["python"], f"{at}: python", _NUMBERS),
        platform=word(row["platform"], f"{at}: platform", _PLATFORM),
        reference=_reference(row["reference"], f"{at}: reference", subject),
        subject=subject,
        size=_count(row["size"], f"{at}: size"),
        unpacked=_count(row["unpacked"], f"{at}: unpacked"),
        runtime=word(row["runtime"], f"{at}: runtime", _NUMBERS, empty=True),
        minor_compat=row["minor_compat"],
        driver=word(row["driver"], f"{at}: driver", _NUMBERS, empty=True),
        required=_list(row["required"], f"{at}: required", lambda one, there: word(one, there, CAPABILITY)),
        predicted=_list(row["predicted"], f"{at}: predicted", _parse_claim),
        sifs=_list(row["sifs"], f"{at}: sifs", lambda one, there: _parse_sif(one, there, target)),
        envelopes=_parse_envelopes(row["envelopes"], f"{at}: envelopes"),
        revocations=_parse_envelopes(row["revocations"], f"{at}: revocations"),
    )


def _parse_sif(value: object, where: str, target: str) -> CataloguedSif:
    row = fields(value, where, "sha256 size reference subject envelopes revocations")
    subject = _parse_subject(row["subject"], f"{where}: subject", target)
    sha256 = word(row["sha256"], f"{where}: sha256", DIGEST)
    if sha256 != subject.config:
        raise fault(f"{where}: sha256", "that is not the file of its subject")
    return CataloguedSif(
        sha256=sha256,
        size=_count(row["size"], f"{where}: size"),
        reference=_reference(row["reference"], f"{where}: reference", subject),
        subject=subject,
        envelopes=_parse_envelopes(row["envelopes"], f"{where}: envelopes"),
        revocations=_parse_envelopes(row["revocations"], f"{where}: revocations"),
    )


def _parse_subject(value: object, where: str, target: str) -> Subject:
    row = fields(value, where, "index manifest config")
    digests = {name: word(row[name], f"{where}.{name}", DIGEST) for name in ("index", "manifest", "config")}
    return Subject(target=target, **digests)


def _parse_claim(value: object, where: str) -> tuple[str, Claim]:
    row = fields(value, where, "capability basis answer rule reason source driver")
    known = {"basis": tuple(Basis), "answer": tuple(Answer)}
    for name, words in known.items():
        if row[name] not in words:
            raise fault(f"{where}.{name}", f"that is none of {', '.join(words)}")
    if row["basis"] == Basis.VERIFIED:
        raise fault(f"{where}.basis", "a catalogue verifies nothing: verdicts do")
    claim = Claim(
        basis=Basis(row["basis"]),
        answer=Answer(row["answer"]),
        rule=word(row["rule"], f"{where}.rule", _RULE),
        reason=line(row["reason"], f"{where}.reason"),
        source=line(row["source"], f"{where}.source"),
        driver=word(row["driver"], f"{where}.driver", _NUMBERS, empty=True),
    )
    return word(row["capability"], f"{where}.capability", CAPABILITY), claim


def _parse_envelopes(value: object, where: str) -> Envelopes:
    if not isinstance(value, dict) or len(value) > MOST_OTHERS:
        raise fault(where, f"that is no object of at most {MOST_OTHERS} envelopes")
    return tuple((word(digest, where, DIGEST), format_json(one)) for digest, one in value.items())


def _reference(value: object, where: str, subject: Subject) -> str:
    """HOST/NAME@sha256:..., the digest that of the subject; it reaches submit files."""
    if value == "":
        return ""
    try:
        found = parse_reference(value) if isinstance(value, str) else None
    except UsageError:
        found = None
    if found is None or found.tag or found.digest != subject.index:
        raise fault(where, "that is no HOST/NAME@sha256:... of its subject")
    return str(found)


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise fault(where, "that is no count of bytes")
    return value


def _list(
    value: object, where: str, parse: Callable[[object, str], T], most: int = MOST_OTHERS
) -> tuple[T, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise fault(where, f"that is no list of at most {most}")
    return tuple(parse(item, f"{where}[{number}]") for number, item in enumerate(value))
