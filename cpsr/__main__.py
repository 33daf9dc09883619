"""`python -m cpsr` is the `cpsr` command."""

from cpsr.cli.main import main

if __name__ == "__main__":
    main()
