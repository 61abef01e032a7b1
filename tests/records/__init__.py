"""Tests of hdet.records."""
