"""Tests of hdet.signals."""
