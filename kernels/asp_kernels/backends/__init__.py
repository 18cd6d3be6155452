"""One file per backend; `reference` is right by definition."""
