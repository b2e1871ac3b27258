"""Actions as torch spells them."""

from __future__ import annotations

import pytest

from lightning_smddp.planner.schedules import parse_action


@pytest.mark.parametrize("text", ["", "2X0", "2SEND_F0", "-1F0", "2F0 0B3"])
def test_no_actions(text: str) -> None:
    with pytest.raises(ValueError, match="is no action: expected .* like '2F0'"):
        parse_action(text)
