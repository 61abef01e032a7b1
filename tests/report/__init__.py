"""Tests of hdet.report."""
