# python examples/fabric_digits.py
"""The same digits in a loop of your own: ``Fabric(strategy="smddp")``, and a torchmetrics metric over all ranks."""

import torch
import torch.nn.functional as F
from digits import Digits, DigitsData
from lightning.fabric import Fabric
from torchmetrics.classification import MulticlassAccuracy


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="smddp")
    fabric.launch()
    fabric.seed_everything(0)
    net = Digits().net
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=3e-3))
    data = DigitsData()
    train, val = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())
    for epoch in range(2):
        train.sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in train:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
    accuracy = MulticlassAccuracy(10, average="micro")  # adds up over all ranks in compute()
    with torch.no_grad():
        for images, labels in val:
            accuracy.update(model(images), labels)
    fabric.print(f"validation accuracy {accuracy.compute():.3f}")
    report = fabric.strategy.communication_report  # on every rank: all of them answer
    fabric.print(report)


if __name__ == "__main__":
    main()
