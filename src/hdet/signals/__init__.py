"""Signals that replicas are compared by: training losses, probe scores, and their exchange."""
