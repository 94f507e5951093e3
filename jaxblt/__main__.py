"""`python -m jaxblt COMMAND`, as `jaxblt COMMAND` where the package's script is not on the path."""

from jaxblt.cli.main import console

if __name__ == "__main__":
    console()
