"""Where packages lie that PyPI does not have: by the releases that are asked for."""

from __future__ import annotations

import pytest

from imagefactory.gpu import knowledge


@pytest.mark.parametrize(
    ("package", "bounds", "tag", "name"),
    [
        ("cuml-cu11", "", "", "nvidia"),
        ("cuml-cu12", "==25.6.*", "", "nvidia"),
        ("cuml-cu12", "<25", "", "nvidia"),
        ("cuml-cu12", "~=25.6.0", "", "nvidia"),
        ("cuml-cu12", "", "", None),
        ("cuml-cu12", "==26.2.*", "", None),
        ("cudf-cu12", ">=24,<26", "", None),
        ("tensorrt", "", "", "nvidia"),
        ("tensorrt", "==8.6.0", "", None),
        ("nvidia-dali-cuda110", "<1.30", "", None),
        ("torch", "==2.1.2", "", None),
        ("torch", "==2.1.2", "cu118", "pytorch-cu118"),
        ("dgl", "==2.4.0", "", ""),
        ("dgl", "==2.1.0", "", None),
        ("numpy", "", "cu118", None),
    ],
)
def test_a_package_is_elsewhere_where_pypi_has_none_of_its_releases(
    package: str, bounds: str, tag: str, name: str | None
) -> None:
    row = knowledge.external_indexes(package, bounds, tag)
    assert (row.with_tag(tag)[0] if row else None) == name


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("https://pypi.nvidia.com", True),
        ("https://pypi.nvidia.com/simple/", True),
        ("https://download.pytorch.org/whl/cu118", True),
        ("https://download.pytorch.org/whl/cu118/torch_stable.html", False),
        ("https://index.example.org/simple", False),
    ],
)
def test_the_addresses_of_the_table(address: str, known: bool) -> None:
    assert knowledge.is_known_index(address) == known
