"""The files of a corpus."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A file of documents.

    text_key: the field or column with the text.
    label: its name in messages; None: the path.
    """

    path: Path
    text_key: str = "text"
    label: str | None = None

    @property
    def name(self):
        return self.label or str(self.path)

    def local_path(self):
        """Returns the path of the file."""
        return self.path
