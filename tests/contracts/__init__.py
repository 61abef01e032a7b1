"""What hdet promises across versions: frozen runs, saved states and record files."""
