"""Tests of hdet.cli."""
