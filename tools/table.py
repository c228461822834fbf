"""Tables in Markdown."""

from folio.cli.process import printable

MAX_WIDTH = 100  # characters of a line


def format_table(rows):
    """Returns the lines of a Markdown table. The first row is the header, the first column text.

    Columns without values are left out. Those beyond MAX_WIDTH follow in further tables, which
    repeat the first column.
    """
    first, *others = zip(*rows, strict=True)
    rows = list(zip(first, *(column for column in others if any(column[1:])), strict=True))
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]
    count = len(widths)  # of the columns that fit
    while count > 2 and sum(widths[:count]) + 3 * count >= MAX_WIDTH:
        count -= 1
    if count < len(widths):
        rest = [[row[0], *row[count:]] for row in rows]
        return [*format_table([row[:count] for row in rows]), "", *format_table(rest)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
