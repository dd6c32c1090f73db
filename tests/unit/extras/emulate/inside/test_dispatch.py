"""The arithmetic of torch's operations: counted by hand, and as the literature counts it."""

from __future__ import annotations

import pytest

from imagefactory.extras.emulate.inside.dispatch import flops_of, profile_name


@pytest.mark.parametrize(
    ("name", "ins", "outs", "expected"),
    [
        ("mm", [(2, 3), (3, 5)], [(2, 5)], 2 * 2 * 3 * 5),
        ("addmm", [(5,), (2, 3), (3, 5)], [(2, 5)], 2 * 2 * 3 * 5),
        ("bmm", [(7, 2, 3), (7, 3, 5)], [(7, 2, 5)], 7 * 2 * 2 * 3 * 5),
        ("baddbmm", [(7, 2, 5), (7, 2, 3), (7, 3, 5)], [(7, 2, 5)], 7 * 2 * 2 * 3 * 5),
        ("mv", [(4, 3), (3,)], [(4,)], 2 * 4 * 3),
        ("dot", [(3,), (3,)], [()], 6),
        ("add", [(100,), (100,)], [(100,)], 0),
    ],
)
def test_products(
    name: str, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]], expected: float
) -> None:
    assert flops_of(name, ins, outs) == expected


def test_a_convolution_is_a_product_at_each_of_its_points() -> None:
    """The first of ResNet-50: 118 million multiplications, each with an addition."""
    image, weight, out = (1, 3, 224, 224), (64, 3, 7, 7), (1, 64, 112, 112)
    assert flops_of("convolution", [image, weight], [out]) == 2 * 118_013_952


def test_a_transposed_convolution_is_one_at_each_point_that_goes_in() -> None:
    image, weight, out = (1, 8, 4, 4), (8, 2, 3, 3), (1, 2, 9, 9)
    assert flops_of("convolution", [image, weight], [out], transposed=True) == 2 * 8 * 16 * 2 * 9


def test_a_convolution_of_groups_sees_its_own_channels_alone() -> None:
    assert flops_of("convolution", [(1, 32, 8, 8), (32, 1, 3, 3)], [(1, 32, 8, 8)]) == 2 * 32 * 64 * 9


@pytest.mark.parametrize(("outs", "times"), [(2, 2), (1, 1)])
def test_the_way_back_is_one_for_the_image_and_one_for_the_weight(outs: int, times: int) -> None:
    gradient, image, weight = (1, 64, 112, 112), (1, 3, 224, 224), (64, 3, 7, 7)
    found = flops_of("convolution_backward", [gradient, image, weight], [*[image, weight][-outs:], (64,)])
    assert found == times * 2 * 118_013_952


def test_attention_is_two_products_of_each_query_with_each_key() -> None:
    query, key = (2, 8, 128, 64), (2, 8, 256, 64)
    forward = flops_of("_scaled_dot_product_flash_attention", [query, key, key], [query])
    assert forward == 2 * (2 * 2 * 8 * 128 * 256 * 64)
    back = flops_of("_scaled_dot_product_flash_attention_backward", [query, query, key, key], [query])
    assert back == 2.5 * forward


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("addmm", "product"),
        ("convolution", "convolution"),
        ("cudnn_convolution", "convolution"),
        ("convolution_backward", "backward"),
        ("_scaled_dot_product_flash_attention", "attention"),
        ("_scaled_dot_product_efficient_attention_backward", "attention_backward"),
    ],
)
def test_what_an_operation_is_to_a_profile(name: str, what: str) -> None:
    assert profile_name(name) == what
