# python examples/pipeline_cli.py fit --config examples/pipeline_cli.yaml
"""LightningCLI: the pipeline and its options come from the YAML file; this file does not name them."""

from digits import DigitsData
from lightning.pytorch.cli import LightningCLI
from pipeline_mlp import Classifier

if __name__ == "__main__":
    LightningCLI(Classifier, DigitsData, seed_everything_default=0)
