"""`python -m tokenmill`: the command line, by the interpreter of one's choice."""

from tokenmill.cli.main import main

if __name__ == "__main__":
    main()
