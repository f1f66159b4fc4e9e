"""The choice between the forms of a projection."""

from __future__ import annotations

import pytest

from crucible.kernels.cuda import geometry

H200 = 132


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "form"),
    [  # the fastest on an H200, where it is so by 10 % or more
        (1152, 768, 1, "small8"),
        (1152, 768, 256, "small32"),
        (1152, 768, 512, "big64"),
        (1152, 768, 1024, "big128"),
        (768, 768, 256, "small32"),
        (768, 768, 1024, "big64"),
        (4096, 768, 64, "small32"),
        (4096, 768, 128, "big64"),
        (4096, 768, 512, "big128"),
        (768, 2048, 512, "small32"),
        (768, 2048, 1024, "big64"),
        (50304, 768, 32, "small32"),
        (50304, 768, 64, "big64"),
        (50304, 768, 128, "big128"),
    ],
)
def test_the_fastest_form_is_chosen(outputs: int, inputs: int, rows: int, form: str) -> None:
    assert geometry.cheapest(outputs // 16, inputs, rows, H200) == form


def test_every_choice_can_be_launched() -> None:
    for inputs in (16, 64, 8192, 40_448):
        for rows in (1, 9, 100, 5000):
            for tiles in (1, 3144, 20_000):
                form = geometry.cheapest(tiles, inputs, rows, 1)
                assert geometry.launch(form, tiles, inputs, rows, 1).shared <= geometry.MAX_SHARED


def test_many_inputs_leave_linear_big() -> None:
    assert geometry.cheapest(4, 50_000, 1, H200) == "big64"
    with pytest.raises(ValueError, match="cannot take 50000 inputs"):
        geometry.launch("small8", 4, 50_000, 1, H200)
