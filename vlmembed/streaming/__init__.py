"""A run that writes nothing: its rows go to who asked for them."""
