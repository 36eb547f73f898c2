"""Faults of the machine, of a service or of another run, by a mark in the text of the error."""

from etl.errors import TemporaryError

WRITTEN_BY_ANOTHER_RUN = (
    "another run wrote the same table at the same time, and was first; nothing of this one was "
    "written to it: run the same command again when the other has ended"
)
CREATED_BY_ANOTHER_RUN = (
    "another run created the same table at the same time, and was first; run the same command "
    "again when the other has ended"
)
DISK_FULL = (
    "the disk is full; free some space and run the same command again: what was committed is "
    "complete, what was not is not there"
)
STORE_UNREACHABLE = (
    "the object store does not answer; run the same command again when it does: what was "
    "committed is complete"
)
# Spark, delta-rs, fsspec and torch raise errors of many classes; their texts have these in common.
KNOWN_FAILURES = {
    "No space left on device": DISK_FULL,
    "inline_container": "PyTorch could not write a file to its end, most likely the disk is full; "
    "free some space and run the same command again: the last checkpoint is complete",
    "Java heap space": "Java ran out of memory; give it more with spark.driver.memory, or run "
    "fewer days at once: what was committed is complete",
    "Could not connect to the endpoint URL": STORE_UNREACHABLE,
    "error sending request for url": STORE_UNREACHABLE,
    "DELTA_CONCURRENT": WRITTEN_BY_ANOTHER_RUN,
    "DELTA_METADATA_CHANGED": CREATED_BY_ANOTHER_RUN,
    "DELTA_PROTOCOL_CHANGED": CREATED_BY_ANOTHER_RUN,
}


def temporary_error(error: BaseException) -> TemporaryError | None:
    """The known failure that an error or one of its causes is; None where it is none."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        for mark, message in KNOWN_FAILURES.items():
            if mark in text:
                return TemporaryError(message)
        cause = cause.__cause__ or cause.__context__
    return None
