"""Whole jobs, from a folder or file to results: open, train, pretrain, predict, embed, search, demo."""
