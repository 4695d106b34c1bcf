"""Outputs on object stores: a local run, and its mirror there. `mirror.open_mirror` has both."""
