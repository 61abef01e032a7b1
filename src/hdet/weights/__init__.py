"""The only writer of weights, buffers and optimizer state."""
