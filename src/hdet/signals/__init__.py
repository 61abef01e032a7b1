"""What replicas are compared by."""
