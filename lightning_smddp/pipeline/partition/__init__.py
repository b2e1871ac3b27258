"""Where a step is cut into stages, how a batch is cut into micro-batches, and whether both are right."""
