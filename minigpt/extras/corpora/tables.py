"""Documents in tables: CSV, TSV and Parquet, a document per row."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from minigpt.data.readers import Field, TextChunk, content_suffix, read_lines, row_chunk
from minigpt.extras.packages import import_extra
from minigpt.utils.errors import UserError

_ARROW_TEXT = re.compile(
    r"(dictionary<values=)?(large_)?string(_view)?(, indices=u?int\d+, ordered=[01]>)?"
)


def read_csv(file: Path, field: Field) -> Iterator[TextChunk | None]:
    """Read the column `field` of a .csv or .tsv file."""
    csv.field_size_limit((1 << 31) - 1)  # characters of a cell
    dialect = "excel-tab" if content_suffix(file) == ".tsv" else "excel"
    rows = csv.DictReader((f"{line}\n" for line in read_lines(file)), dialect=dialect, strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():
                raise csv.Error(f"it has not {len(rows.fieldnames or [])} cells, as the header")
            yield row_chunk(row, field, f"{file}, line {rows.line_num:,}", "column")
    except csv.Error as error:
        raise UserError(
            f"{file}, near line {rows.line_num:,}: {error}; put cells with a delimiter, a quote "
            "or a line break in "
            "quotes; as .txt the file is one text"
        ) from error


def read_parquet(file: Path, field: Field) -> Iterator[TextChunk | None]:
    """Read the column `field` of a .parquet file."""
    parquet = import_extra("pyarrow.parquet", ".parquet", "data")
    arrow = import_extra("pyarrow", ".parquet", "data")
    with open(file, "rb") as raw:
        try:
            table = parquet.ParquetFile(raw)
            columns = [
                column.name
                for column in table.schema_arrow
                if _ARROW_TEXT.fullmatch(str(column.type))
            ]
            read = None if callable(field) else [field]
            if read:
                row_chunk(dict.fromkeys(columns, ""), field, str(file), "column")
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=read):
                if read:  # a column is read faster than rows
                    rows = [{field: text} for text in batch.column(0).to_pylist()]
                else:
                    rows = batch.to_pylist()
                for row in rows:
                    number += 1
                    yield row_chunk(row, field, f"{file}, row {number:,}", "column")
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} is not a complete Parquet file ({error})") from error
