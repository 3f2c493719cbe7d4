"""`python -m autopar.cli`: the same as the `autopar` script."""

from autopar.cli.app import main

if __name__ == "__main__":
    main()
