"""The one exception for mistakes of the user, and the two helpers that raise and word it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class UserError(Exception):
    """A mistake of the caller, in one line: what is wrong and what to do. The command line exits with code 2."""


def require(ok: bool, line: str) -> None:
    """Raise UserError(line) unless `ok`."""
    if not ok:
        raise UserError(line)


def nearest(name: str, options: Sequence[str]) -> str:
    """The end of an error line: " (did you mean X?)", or the whole list where no option is near."""
    close = get_close_matches(str(name), list(options), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(map(str, options))})"
