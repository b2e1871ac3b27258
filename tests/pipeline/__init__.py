# torch imports this with the first dispatch mode or optimizer, and it sets an environment variable for good:
# a leak if that happens within a test.
import torch._dynamo  # noqa: F401
