"""`python -m freight`: the same as the `freight` command."""

from freight.cli.main import main

if __name__ == "__main__":
    main()
