"""Tests: the tree of the package mirrored, `contracts` over several packages, and the reference."""
