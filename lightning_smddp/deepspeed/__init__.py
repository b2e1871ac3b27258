"""What ``strategy="smddp_deepspeed"`` does with DeepSpeed: its start, its configuration, whole states out of it."""
