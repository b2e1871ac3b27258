"""Which strategy to take: memory and time of each, predicted from one traced batch. See docs/sharding.md."""
