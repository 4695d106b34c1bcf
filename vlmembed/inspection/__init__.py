"""An output read back, finished or not: what is in it, where it came from, which rows failed and why."""
