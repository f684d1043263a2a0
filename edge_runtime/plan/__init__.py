"""What fits and how fast it will be, from shapes alone: no weights, no torch."""
