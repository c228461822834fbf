"""The texts of a dataset and their division into training and validation split."""

from dataclasses import dataclass, replace

from folio.tokenizers import END_OF_TEXT

TRAIN_SHARE = 0.9


@dataclass(frozen=True)
class Corpus:
    """Documents, which are texts, where they came from, and a sha256 of their content."""

    documents: list
    source: str
    sha256: str

    @property
    def characters(self):
        return sum(map(len, self.documents))

    def cut_at_end_of_text(self):
        """Returns the Corpus whose documents also end at each END_OF_TEXT."""
        parts = [part for text in self.documents for part in text.split(END_OF_TEXT)]
        return replace(self, documents=parts)

    def split(self):
        """Returns the documents of the training split, and those of the validation split.

        The first 90% of the characters are the training split, so a document may be cut.
        """
        train, val, left = [], [], int(TRAIN_SHARE * self.characters)
        for text in self.documents:
            if len(text) <= left and not val:
                train.append(text)
                left -= len(text)
                continue
            if left:
                train.append(text[:left])
            val.append(text[left:])
            left = 0
        return train, val
