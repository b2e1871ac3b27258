"""One real run of a step, recorded as a graph of modules and operations."""
