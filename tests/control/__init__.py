"""Tests of hdet.control."""
