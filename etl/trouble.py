"""What a machine or another run can do to a command, each as one sentence."""

DISK_FULL = "No space left on device"
MADE_BY_ANOTHER = (
    "another run made the same table at the same time, and was first; run the same command again "
    "when the other has ended"
)
TROUBLE = {
    DISK_FULL: "the disk is full; free some space and run the same command again: what was "
    "committed is whole, what was not is not there",
    "inline_container": "PyTorch could not write a file to its end, most likely the disk is full; "
    "free some space and run the same command again: the last checkpoint is whole",
    "Java heap space": "Java ran out of memory; give it more with spark.driver.memory, or run "
    "fewer days at once: what was committed is whole",
    "Could not connect to the endpoint URL": "the object store does not answer; run the "
    "same command again when it does: what was committed is whole",
    "DELTA_CONCURRENT": "another run wrote the same table at the same time, and was first; nothing "
    "of this one was written to it: run the same command again when the other has ended",
    "DELTA_METADATA_CHANGED": MADE_BY_ANOTHER,
    "DELTA_PROTOCOL_CHANGED": MADE_BY_ANOTHER,
}


def sentence_of(error: BaseException) -> str | None:
    """The sentence for an error or one of its causes; None where it is not such trouble."""
    cause: BaseException | None = error
    while cause is not None:
        said = f"{cause}"
        found = next((sentence for mark, sentence in TROUBLE.items() if mark in said), None)
        if found:
            return found
        cause = cause.__cause__ or cause.__context__
    return None
