"""Pipeline parallelism of a step function: splitting it, and running its stages. Never imports Lightning."""
