"""The strategies: one module for each package that Lightning is published as."""
