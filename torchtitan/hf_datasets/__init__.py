"""Datasets that are known by name; see ``text_datasets``."""
