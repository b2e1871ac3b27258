"""Sharded data parallelism: what each rank keeps and computes of what all ranks have together."""
