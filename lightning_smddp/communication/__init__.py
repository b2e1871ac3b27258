"""Gradient communication: torch.distributed groups and tensors only, no Lightning."""
