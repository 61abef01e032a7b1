"""Where replicas live, and how they exchange tensors. The only package that communicates."""
