"""transformers installs forward hooks once, with a flag, where a step wants hidden states or routers' logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_smddp import PipelineStrategy
from lightning_smddp.strategies.lightning import AccumulationStrategy
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer
from tests.strategies.pipeline_learners import assert_same

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
}


class Collecting(LightningModule):
    """Counts forward hooks behind each batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            if kind == "llama":
                self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))
            else:
                config = transformers.MixtralConfig(**_SIZES, num_local_experts=2, output_router_logits=True)
                self.model = transformers.MixtralForCausalLM(config)
        self.hooks: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(input_ids=batch, labels=batch, output_hidden_states=True)
        self.log("hidden", sum(hidden.abs().mean() for hidden in out.hidden_states))
        return out.loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.hooks.append(sum(len(module._forward_hooks) for module in self.modules()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        data = torch.randint(16, (16, 6), generator=torch.Generator().manual_seed(0))
        return DataLoader(list(data), batch_size=4)


def fit(kind: str, strategy: Any) -> Any:
    model = Collecting(kind)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(model)
    return model.losses, float(trainer.callback_metrics["hidden"]), model.hooks


def pipelined() -> list[Any]:
    options = grouped(num_microbatches=2, loss_weight="rows", verbose=False)
    return [fit(kind, PipelineStrategy(**options)) for kind in ("llama", "mixtral")]


@pytest.mark.timeout(300)
def test_hooks_are_installed_once() -> None:
    expected = [fit(kind, AccumulationStrategy(2, device=torch.device("cpu"))) for kind in ("llama", "mixtral")]
    for found in run_trainer_ranks(pipelined, 2, timeout=240):
        assert_same(found, expected, 1e-4)
