"""Hyperparameters: what users name, how they are read and written."""
