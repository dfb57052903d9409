# SPDX-License-Identifier: Apache-2.0
"""``magi.check`` names an operator that is compiled wrong, at any place of a real model, forward and backward."""

from __future__ import annotations

import _planted
import pytest


CASES = [
    (case, place, way) for case in _planted.MODELS.values() for place in _planted.PLACES for way in _planted.DIRECTIONS
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place", "direction"), CASES)
def test_the_planted_operator_is_named(case: str, place: str, direction: str) -> None:
    text = _planted.blamed(*_planted.planted(case, place), direction)

    assert _planted.names_it(text), text
