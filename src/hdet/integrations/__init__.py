"""Adapters for trainers and trackers: one module for each. `import hdet` imports none of them."""
