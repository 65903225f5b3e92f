"""`python -m coral_lens` is the command `coral`."""

from coral_lens.cli import main

if __name__ == "__main__":
    main()
