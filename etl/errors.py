"""What went wrong on the user's side: one sentence that names the thing and the fix."""


class UserError(Exception):
    """Bad input. The command prints the message alone and exits with code 2."""
