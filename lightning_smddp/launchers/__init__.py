"""Who started this process, and as which rank: read from the environment and from files, without Lightning."""
