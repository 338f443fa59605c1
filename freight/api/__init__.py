"""What others speak to the control plane through."""
