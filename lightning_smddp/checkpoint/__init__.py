"""Checkpoint files of which a valid one always exists: written whole or not at all, verified before they are read."""
