"""Output of a program whose terminal has closed: it is dropped without an error."""

import errno
import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager

OUTPUTS = (1, 2)
"""Descriptors of standard output and standard error."""


def leave_closed_terminal() -> None:
    """Redirect outputs whose terminal has closed to the null device."""
    for number in filter(_is_closed, OUTPUTS):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _is_closed(number: int) -> bool:
    try:
        termios.tcgetattr(number)
    except termios.error as error:
        # A file or a pipe says ENOTTY
        return error.args[0] == errno.EIO
    return False


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """Suppress the error of a closed terminal in the block, and drop what is written from then on."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # The handler of SIGHUP may have left it meanwhile: that is no other error
        leave_closed_terminal()
