"""A hub on loopback, for tests that fetch models."""
