"""Tests of hdet.lr_search."""
