"""`python -m autopar`: the same as the `autopar` script."""

from autopar.cli import main

if __name__ == "__main__":
    main()
