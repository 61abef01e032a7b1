"""Tests of hdet.scheduler."""
