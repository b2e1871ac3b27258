"""Between a LightningModule's steps and the pipeline: what a step shows, keeps and logs, of micro-batches."""
