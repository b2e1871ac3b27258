"""Which strategy to take: what a rank of each holds, predicted from one batch. See docs/sharding.md."""
