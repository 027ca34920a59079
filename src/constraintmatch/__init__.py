"""Images and a few same-or-different answers in, a clustering model out."""
