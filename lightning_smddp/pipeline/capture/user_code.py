"""The user's code that runs now: where it is, and whether it decides by a value that it reads, or just uses it."""

from __future__ import annotations

import sys
from types import FrameType

_NO_USERS = ("torch.", "lightning_smddp.", "contextlib")  # files whose code is not the user's
_OURS = ("lightning_smddp.", "contextlib", "torch._tensor", "torch.overrides", "torch.functional", "torch.utils._")


def user_location() -> str:
    """``file:line`` of the innermost code that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch" and not name.startswith(_NO_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def is_in_compiled_code() -> bool:
    """Whether the code that runs now was given to ``torch.compile``, and runs as it is for the moment."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch._dynamo.eval_frame":
            return True
        if name.startswith(("lightning.", "pytorch_lightning.")):
            return False
        frame = frame.f_back
    return False
