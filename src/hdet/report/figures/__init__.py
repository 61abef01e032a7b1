"""The plots of a report, one module for each part of the page."""
