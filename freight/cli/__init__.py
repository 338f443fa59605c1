"""The command line: one module for each group of commands, imported only when it is used."""
