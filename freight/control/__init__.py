"""The control plane: the only part that acts on jobs, workers and files."""
