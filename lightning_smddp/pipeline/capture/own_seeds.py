"""Seeds of ours: what a generator of torch draws behind one is chance to a step. Behind any other, the step seeded it.

A step that seeds a generator (``torch.Generator().manual_seed(batch_idx)``, for the same noise in each epoch) draws the
same numbers for each of its micro-batches. So does one process that accumulates over them.
"""

from __future__ import annotations

import torch

# A seed of 64 bits: the mark above, 32 bits of a number below. So whoever has a generator can see who has seeded it
# last.
_COUNT = 1 << 32  # of our seeds; torch's generator on the CPU knows no more
_MARK = 0x2F6B51C3  # the bits above, unlike those of users' seeds


def own_seed(number: int) -> int:
    """A seed of ours, another one for each 32 bits of ``number``."""
    return _MARK * _COUNT + number % _COUNT


def seed_torch(number: int) -> None:
    """``torch.manual_seed``, for seeds that count for a moment.

    Where CUDA is not in use that function keeps the caller's stack, as text, for when it will be: within a Trainer that
    takes 2 ms a call, and there is one for each node of a reference run (CPU, torch 2.13).
    """
    torch.default_generator.manual_seed(own_seed(number))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(own_seed(number))
