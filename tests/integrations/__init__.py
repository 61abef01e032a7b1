"""Tests of hdet.integrations, against the real packages."""
