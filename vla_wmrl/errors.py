"""The one exception for mistakes of the user."""


class UserError(Exception):
    """A mistake of the caller that one line explains: what is wrong and what to do. The command line exits with code 2."""
