"""`python -m vexport`, which torchrun needs."""

from vexport.cli import main

if __name__ == "__main__":
    main()
