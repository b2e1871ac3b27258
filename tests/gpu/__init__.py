"""What is promised on GPUs, each item against one of them. `make gpu` runs it and writes a page of results.

Every test runs on simulated devices (part of `make test`) and on GPUs where there are as many: one body for both.
"""
