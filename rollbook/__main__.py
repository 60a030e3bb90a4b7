"""Entry point of the `rollbook` command; importing the package has already claimed the root."""

import sys


def main() -> int:
    """Run the command line; the exit code is 2 for refused input, 1 for a failed run."""
    from rollbook.cli import run  # after the guard in rollbook/__init__

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
