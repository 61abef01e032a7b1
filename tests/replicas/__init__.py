"""Tests of hdet.replicas."""
