"""Tests of hdet.weights."""
