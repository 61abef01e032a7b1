"""Tests: one file per room of the library, plus the reference they are measured against."""
