# python examples/cli.py fit --config examples/cli.yaml
"""LightningCLI: the strategy and its options come from the YAML file; this file does not name them."""

from digits import Digits, DigitsData
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(Digits, DigitsData, seed_everything_default=0)
