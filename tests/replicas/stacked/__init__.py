"""Tests of hdet.replicas.stacked."""
