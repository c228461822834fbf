"""Tables in Markdown."""

from folio.cli.process import printable


def format_table(rows):
    """Returns the lines of a Markdown table. The first row is the header, the first column text."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
