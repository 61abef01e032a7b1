"""The `hdet` command."""
