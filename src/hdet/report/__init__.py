"""One HTML page that shows what a run did."""
