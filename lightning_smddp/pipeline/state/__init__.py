"""A whole model's parameters, buffers and optimizer states, and each rank's part of them."""
