"""`python -m constraintmatch`."""

from constraintmatch.cli import main

if __name__ == "__main__":
    main()
