"""Offers of a catalog: how old it is what can be relied on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from imagefactory.trust.offers import verdict_ages_of, verify_offer
from imagefactory.trust.policy import AcceptancePolicy, TrustRules
from tests.made.catalog import make_catalog, make_image
from tests.made.verdicts import LAB_TRUSTED, NOW, TRUST


def test_the_oldest_proof_of_any_form_and_how_many_lapse_soon() -> None:
    """The made catalog has an image and a .sif of it, each verified now and for 30 days."""
    catalog = make_catalog()
    later = NOW + timedelta(days=20)
    for now, expiring in ((NOW, 0), (later, 2), (NOW + timedelta(days=31), 0)):
        offer = verify_offer(replace(catalog, expires=now), make_image(), TRUST, now)
        ages = verdict_ages_of([offer], now)
        assert ages.expiring == expiring
        assert ages.oldest == (NOW if now <= later else None)


def test_what_nobody_trusts_has_no_age() -> None:
    nobody = TrustRules(keys=(), policy=AcceptancePolicy())
    assert LAB_TRUSTED not in nobody.keys
    offer = verify_offer(make_catalog(), make_image(), nobody, NOW)
    assert verdict_ages_of([offer], NOW).oldest is None
