"""``lightning-smddp doctor``: what this machine and this job look like to the package, and what is wrong with them."""
