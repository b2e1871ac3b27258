"""Stages of all kinds of steps compute what the whole step computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.pipeline.example_modules import EXAMPLES, children, example, leaf_modules, step_of
from tests.pipeline.stage_emulation import assert_transparent, assert_transparent_apart, each_cut, in_stages


@pytest.mark.parametrize("is_small", [children, leaf_modules])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_cut_is_exact(name: str, is_small: Callable[[str], bool]) -> None:
    assert_transparent(example(name), step_of, is_small, each_cut)


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [pytest.param(children, marks=pytest.mark.exhaustive), leaf_modules])
@pytest.mark.parametrize("name", EXAMPLES)
def test_four_stages(name: str, is_small: Callable[[str], bool]) -> None:
    assert_transparent(example(name), step_of, is_small, in_stages(4))


@pytest.mark.parametrize("name", EXAMPLES)
def test_stages_need_no_parameters_but_their_own(name: str) -> None:
    assert_transparent_apart(example(name), step_of, children, 2)
