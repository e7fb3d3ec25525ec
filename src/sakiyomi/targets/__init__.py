"""Targets: the models whose text is wanted."""
