"""What niwaki draws: one HTML file that stands alone, and the radix tree in it, in a terminal, as data."""
