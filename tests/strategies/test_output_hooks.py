"""transformers installs forward hooks once, with a flag, where a step wants hidden states or routers' logits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.strategies.pipeline_learners import Bench, Matrix, Net

SIZES = {
    **{"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False},
}


class Collecting(Net):
    """Counts forward hooks behind each batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            if kind == "llama":
                self.net = LlamaForCausalLM(LlamaConfig(**SIZES))
            else:
                self.net = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.net(input_ids=batch, labels=batch, output_hidden_states=True)
        self.log("hidden", sum(hidden.abs().mean() for hidden in out.hidden_states))
        return out.loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(sum(len(module._forward_hooks) for module in self.modules()))

    def train_dataloader(self) -> Any:
        data = torch.randint(16, (16, 6), generator=torch.Generator().manual_seed(0))
        return DataLoader(list(data), batch_size=4)  # type: ignore[arg-type]


def collecting(bench: Bench, kind: str) -> Any:
    return bench.fit(Collecting(kind), {"num_microbatches": 2, "loss_weight": "rows"}, max_epochs=1)


TWO = Matrix([functools.partial(collecting, kind=kind) for kind in ("llama", "mixtral")], timeout=240.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", TWO.cases, ids=["llama", "mixtral"])
def test_hooks_are_installed_once(case: Any) -> None:
    TWO.compare(case, tolerance=1e-4)
