"""Keys and values wherever they are: the pool's size and memory, the tiers below it, a file."""
