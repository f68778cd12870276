"""Reads a submission's bytes into a table. They come from code nobody has read: nothing is unpacked or run."""

from __future__ import annotations

import io

import pandas as pd

from text_agents.autoresearch.metrics import SubmissionError

MAX_COLUMNS = 2000
# Only plain text is a submission: an archive is refused, never unpacked (a 10 kB one can hold 10 GB).
ARCHIVES = {b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "a gzip archive", b"BZh": "a bzip2 archive",
            b"\xfd7zXZ": "an xz archive", b"7z\xbc\xaf": "a 7z archive", b"\x28\xb5\x2f\xfd": "a zstd archive",
            b"PAR1": "a parquet file", b"\x80\x04": "a pickle", b"\x80\x05": "a pickle"}  # fmt: skip


def read_submission(data: bytes, max_rows: int) -> pd.DataFrame:
    """The table in `data`. Raises SubmissionError for archives, binary data, too many rows or columns, ragged rows."""
    for magic, what in ARCHIVES.items():
        if data.startswith(magic):
            raise SubmissionError(f"submission.csv is {what}, expected plain text")
    if not data.strip():
        raise SubmissionError("submission.csv is empty")
    if b"\0" in data:
        raise SubmissionError("submission.csv holds binary data, expected plain text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SubmissionError("submission.csv is not UTF-8 text") from error
    header = text[: text.find("\n")] if "\n" in text else text
    if header.count(",") >= MAX_COLUMNS:
        raise SubmissionError(f"submission.csv has more than {MAX_COLUMNS} columns")
    if text.count("\n") > max_rows + 1:
        raise SubmissionError(f"submission.csv has more than {max_rows} rows")
    try:
        table = pd.read_csv(io.StringIO(text), index_col=False)
    except Exception as error:  # pandas' parser raises many kinds; all mean that the file is no table
        raise SubmissionError(f"submission.csv cannot be read as a table: {' '.join(str(error).split())}") from error
    if not len(table):
        raise SubmissionError("submission.csv has a header and no rows")
    return table
