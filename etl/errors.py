"""Errors that are one sentence to the user: it names the thing and the fix."""

import os


class UserError(Exception):
    """Bad input: the same command fails again. It prints the message alone and exits with 2."""

    exit_code = 2


class TemporaryError(Exception):
    """A fault of the machine, of a service or of another run: the same command may succeed later.

    The command prints the message alone and exits with 75 (EX_TEMPFAIL of sysexits.h).
    """

    exit_code = os.EX_TEMPFAIL


def error_of_exit_code(exit_code: int, message: str) -> BaseException:
    """The error to raise where a command that was run as a process has failed.

    A process that was killed may succeed later; any other failure than a refused input or a
    temporary fault ends this command with exit code 1.
    """
    if exit_code == UserError.exit_code:
        return UserError(message)
    if exit_code == TemporaryError.exit_code or exit_code < 0:
        return TemporaryError(message)
    return SystemExit(message)
