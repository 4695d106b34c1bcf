"""Attention inside the segments of a pack: what can compute it, the metadata it needs, the layer that asks for it."""
