"""Where workers run: getting them a place, starting them, and proving that they are gone."""
