"""How each kind of model server is started, probed and stopped."""
