"""Tests of hdet.tensors."""
