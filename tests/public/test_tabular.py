"""Tables: attention over features, embeddings of categories, ordered boosting-like networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.public.cases import MARKS, WHOLE, Built, Case, check, table

tabnet = pytest.importorskip("pytorch_tabnet.tab_network")
tab_transformer = pytest.importorskip("tab_transformer_pytorch")
rtdl = pytest.importorskip("rtdl_revisiting_models")
tabm = pytest.importorskip("tabm")
rechub = pytest.importorskip("torch_rechub.models.ranking")
rechub_features = pytest.importorskip("torch_rechub.basic.features")
tensordict = pytest.importorskip("tensordict")

pytestmark = MARKS


def rows_of(count: int = 32) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Categories, numbers, target."""
    generator = torch.Generator().manual_seed(0)
    categories = torch.randint(0, 4, (count, 3), generator=generator)
    numbers = torch.randn(count, 5, generator=generator)
    target = numbers[:, :2].sum(1) + categories[:, 0] / 2
    return list(zip(categories, numbers, target, strict=True))


class Tabular(Built):
    rate = 0.01

    def loss(self, batch: Any) -> Tensor:
        categories, numbers, target = batch
        return F.mse_loss(self.model(categories, numbers)[:, 0], target)

    def data(self) -> Any:
        return rows_of()


class FtTransformer(Tabular):
    def build(self) -> Any:
        return tab_transformer.FTTransformer(
            categories=(4, 4, 4),
            num_continuous=5,
            dim=16,
            depth=3,
            heads=2,
            dim_head=8,
            attn_dropout=0.0,
            ff_dropout=0.0,
        )


class RtdlResNet(Tabular):
    def build(self) -> Any:
        return rtdl.ResNet(
            d_in=5, d_out=1, n_blocks=3, d_block=16, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0
        )

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.model(batch[1])[:, 0], batch[2])


class TabM(Tabular):
    """An ensemble in one model: its members' predictions come as a dimension."""

    def build(self) -> Any:
        return tabm.TabM.make(
            n_num_features=5, cat_cardinalities=[4, 4, 4], d_out=1, k=4, n_blocks=3, d_block=16, dropout=0.0
        )

    def loss(self, batch: Any) -> Tensor:
        categories, numbers, target = batch
        out = self.model(numbers, categories)[..., 0]
        return F.mse_loss(out.flatten(), target.repeat_interleave(out.shape[1]))


class DeepFm(Tabular):
    """A recommender of torch-rechub: it takes its features by name, each embedding is called for itself."""

    def build(self) -> Any:
        dense = [rechub_features.DenseFeature(f"dense{i}") for i in range(2)]
        sparse = [rechub_features.SparseFeature(f"sparse{i}", vocab_size=4, embed_dim=4) for i in range(3)]
        mlp = {"dims": [16, 8], "dropout": 0.0, "activation": "relu"}
        return rechub.DeepFM(deep_features=dense, fm_features=sparse, mlp_params=mlp)

    def loss(self, batch: Any) -> Tensor:
        categories, numbers, target = batch
        named = {f"sparse{i}": categories[:, i] for i in range(3)} | {f"dense{i}": numbers[:, i] for i in range(2)}
        return F.binary_cross_entropy(self.model(named), (target > 0).float())


class TabNet(Tabular):
    """Ghost batch norm, masks, a sparsity that is part of the loss."""

    rate = 1e-4

    def build(self) -> Any:
        return tabnet.TabNet(
            8, 1, n_d=8, n_a=8, n_steps=2, cat_idxs=[0, 1, 2], cat_dims=[4, 4, 4], cat_emb_dim=[2, 2, 2],
            virtual_batch_size=4, group_attention_matrix=torch.eye(8),
        )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        categories, numbers, target = batch
        out, sparsity = self.model(torch.cat([categories.float(), numbers], 1))
        return F.mse_loss(out[:, 0], target) - 1e-3 * sparsity


class Named(RtdlResNet):
    """Batches with names."""

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.model(batch["numbers"])[:, 0], batch["target"])

    def data(self) -> Any:
        return [{"numbers": numbers, "target": target} for _, numbers, target in rows_of()]


class OfTensorDict(Named):
    """The batch is a TensorDict, as torchrl's collate functions make them."""

    @staticmethod
    def collate(rows: Any) -> Any:
        return tensordict.TensorDict(default_collate(rows), batch_size=[len(rows)])


@table(
    Case(FtTransformer),
    Case(RtdlResNet, WHOLE),
    Case(TabM),
    Case(DeepFm, WHOLE),
    Case(TabNet, {**WHOLE, "split": ["model.tabnet.encoder.feat_transformers.0"]}),  # an autograd.Function ends a stage
    Case(OfTensorDict, WHOLE),
)
def test_tabular(case: Case) -> None:
    check(case)
