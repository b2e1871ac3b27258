"""The cells of ``nn.LSTM`` and ``nn.GRU`` that torch calls on CUDA alone: hand-written kernels there, operators here.

Shapes: gates (rows, 4 or 3 times hidden), states (rows, hidden); a workspace is what the backward pass needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

Maybe = Tensor | None


def lstm(input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Maybe = None, hidden_bias: Maybe = None):
    """Of ``_thnn_fused_lstm_cell``: the new state, the new cell, a workspace."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_backward(grad_hy: Maybe, grad_cy: Maybe, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool):
    """Gradients of the gates, of the cell before, and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    out = cy.tanh()
    by_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    by_cy = by_hy * o * (1 - out * out)
    if grad_cy is not None:
        by_cy = by_cy + grad_cy
    parts = [
        by_cy * g * i * (1 - i),
        by_cy * cx * f * (1 - f),
        by_cy * i * (1 - g * g),
        by_hy * out * o * (1 - o),
    ]
    gates = torch.cat(parts, 1)
    return gates, by_cy * f, gates.sum(0) if has_bias else None


def gru(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Maybe = None, hidden_bias: Maybe = None):
    """Of ``_thnn_fused_gru_cell``: the new state, a workspace."""
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, inew), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool):
    """Gradients of both gates, of the state before, and of both biases."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    by_n = grad_hy * (1 - z) * (1 - n * n)
    by_z = grad_hy * (hx - n) * z * (1 - z)
    by_r = by_n * hn * r * (1 - r)
    input_gates, hidden_gates = torch.cat([by_r, by_z, by_n], 1), torch.cat([by_r, by_z, by_n * r], 1)
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, grad_hy * z, *biases


def install() -> torch.library.Library:
    """Register them for CUDA tensors, for as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_thnn_fused_lstm_cell", lstm, "CUDA")
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward, "CUDA")
    library.impl("_thnn_fused_gru_cell", gru, "CUDA")
    library.impl("_thnn_fused_gru_cell_backward", gru_backward, "CUDA")
    return library
