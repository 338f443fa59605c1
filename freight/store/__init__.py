"""What is kept on disk: the only SQL, and the files beside it."""
