"""Errors that are shown to the user as one sentence, without a traceback.

The sentence names the cause and the fix. Known failures of the machine, of a service or of a
concurrent run are recognized by a substring of the original error.
"""

import os


class UserError(Exception):
    """Invalid input: a retry fails again. Commands print the message and exit with 2."""

    exit_code = 2


class TemporaryError(Exception):
    """A failure of the machine, of a service or of a concurrent run: a retry may succeed.

    Commands print the message and exit with 75 (EX_TEMPFAIL of sysexits.h).
    """

    exit_code = os.EX_TEMPFAIL


def error_from_exit_code(exit_code: int, message: str) -> BaseException:
    """The exception to raise when a command run as a subprocess has failed.

    A process that a signal killed (negative exit code) may succeed on a retry. Any exit code other
    than those of UserError and TemporaryError ends the calling command with exit code 1.
    """
    if exit_code == UserError.exit_code:
        return UserError(message)
    if exit_code == TemporaryError.exit_code or exit_code < 0:
        return TemporaryError(message)
    return SystemExit(message)


CONCURRENT_WRITE = (
    "another run wrote the same table at the same time and committed first; this run wrote "
    "nothing to it: repeat the command when the other run has ended"
)
CONCURRENT_CREATE = (
    "another run created the same table at the same time; repeat the command when the other run "
    "has ended"
)
DISK_FULL = (
    "the disk is full; free some space and repeat the command: committed data is complete, "
    "uncommitted data is not visible"
)
STORE_UNREACHABLE = (
    "the object store does not answer; repeat the command when it does: committed data is complete"
)
# Spark, delta-rs, fsspec and torch raise many exception classes: match their texts instead.
KNOWN_FAILURES = {
    "No space left on device": DISK_FULL,
    "inline_container": "PyTorch could not finish writing a file, most likely because the disk is "
    "full; free some space and repeat the command: the last checkpoint is complete",
    "Java heap space": "Java ran out of memory; raise spark.driver.memory (GEMLINE_SPARK_MEMORY), "
    "or run fewer days at once: committed data is complete",
    "Could not connect to the endpoint URL": STORE_UNREACHABLE,
    "error sending request for url": STORE_UNREACHABLE,
    "Unable to locate credentials": "the object store needs credentials; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or repeat the command when the machine's role can be read",
    "DELTA_CONCURRENT": CONCURRENT_WRITE,
    "DELTA_METADATA_CHANGED": CONCURRENT_CREATE,
    "DELTA_PROTOCOL_CHANGED": CONCURRENT_CREATE,
}


def known_temporary_error(error: BaseException) -> TemporaryError | None:
    """The known failure behind an error or one of its causes; None for an unknown error."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        for substring, message in KNOWN_FAILURES.items():
            if substring in text:
                return TemporaryError(message)
        cause = cause.__cause__ or cause.__context__
    return None
