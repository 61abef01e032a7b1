"""Tests of hdet.knobs."""
