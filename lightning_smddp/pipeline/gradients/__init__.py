"""What is done with a stage's gradients before the optimizer steps."""
