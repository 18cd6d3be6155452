"""Where samples come from: one file per source, the same objects with and without a network."""
