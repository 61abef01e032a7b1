"""N replicas of a model on one device."""
