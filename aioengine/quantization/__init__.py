"""How linear layers store and multiply their weights: one file for each format."""
