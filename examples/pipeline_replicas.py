# python examples/pipeline_replicas.py
"""Two pipelines of two ranks each: four CPU ranks, two replicas, with the strategy's options in Python."""

import lightning as L
from digits import DigitsData
from pipeline_mlp import Classifier

from lightning_smddp import CommunicationOptions, PartitionOptions, PipelineStrategy


def main() -> None:
    L.seed_everything(0)
    strategy = PipelineStrategy(
        pipeline_parallel_size=2,  # 4 ranks / 2 = 2 replicas, which average their gradients
        schedule="interleaved_1f1b",
        num_microbatches=4,
        partition=PartitionOptions(stages_per_rank=2, placement="cluster"),  # a pipeline on neighbouring ranks
        communication=CommunicationOptions(collective_timeout=60),
    )
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=2)
    trainer.fit(Classifier(), DigitsData(batch_size=64))  # of each replica: the global batch is 128
    report = strategy.communication_report  # of the replicas' gradients; on every rank: all of them answer
    trainer.print(f"validation accuracy {trainer.callback_metrics['val_accuracy']:.3f}")
    trainer.print(report)


if __name__ == "__main__":
    main()
