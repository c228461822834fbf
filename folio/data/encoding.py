"""What is wrong with a file that is not UTF-8 text, and what helps."""

import itertools
import re
import shlex
from collections import Counter

import charset_normalizer  # which requests needs, too

FOREIGN_FORMATS = {  # {first bytes: what a file is}
    b"PK\3\4": "it is a ZIP archive or a document such as .docx; extract or save its text",
    b"\x1f\x8b": "it is compressed; to decompress it: {read} | gunzip > NEW_FILE",
    b"BZh": "it is compressed; to decompress it: {read} | bunzip2 > NEW_FILE",
    b"\xfd7zXZ": "it is compressed; to decompress it: {read} | unxz > NEW_FILE",
    b"%PDF": "it is a PDF; to extract its text: pdftotext {path}",
}
READERS = {".gz": "gzip -dc", ".zst": "zstd -dc"}  # {suffix: command that prints the content}
MAX_NULS = 100  # in the first 8 kB of a text
UTF_8_SHARE = 3 / 4  # of the bytes that are not ASCII; by chance, half of Big5's can be UTF-8
PREFERRED = "cp1252"  # of encodings that read a text alike; that of Western European languages
SAMPLE_BYTES = 2**16  # about as many show the encoding of a text


def explain_encoding(source, error):
    """Returns what the file of a Source is that is not UTF-8 text, and what helps.

    `error` is the UnicodeDecodeError of reading it.
    """
    path, byte = shlex.quote(str(source.path)), error.object[error.start]
    read = f"{READERS.get(source.path.suffix.lower(), 'cat')} {path}"
    with source.open() as file:
        start = file.read(2**13)
    for signature, explanation in FOREIGN_FORMATS.items():
        if start.startswith(signature):
            return explanation.format(path=path, read=read)
    if start.count(0) > (0 if byte else MAX_NULS):
        hint = "if it is UTF-16, use --encoding=utf-16-le or utf-16-be"
        return f"it does not look like text, but like a file of numbers or a program; {hint}"
    if byte == 0:
        return f"it contains a NUL byte; to remove it: {read} | tr -d '\\0' > NEW_FILE"
    with source.open() as file:
        for number, line in enumerate(file, start=1):
            before = re.split("[\udc80-\udcff]", line.decode(errors="surrogateescape"))[0]
            if before.encode() != line:
                place = f"line {number:,} has the byte 0x{byte:02x}"
                break
        position = max(0, len(before.encode()) - SAMPLE_BYTES // 2)
        sample = (line[position:] + b"".join(file.readlines(SAMPLE_BYTES)))[:SAMPLE_BYTES]
    num_ascii = len(sample.decode("ascii", errors="ignore"))
    num_valid = len(sample.decode(errors="ignore").encode())
    if num_valid - num_ascii > UTF_8_SHARE * (len(sample) - num_ascii):
        return f"{place}; to leave out such bytes: {read} | iconv -f UTF-8 -t UTF-8 -c > NEW_FILE"
    found = [f"{name} ({words})" for name, words in find_encodings(sample).items()]
    if not found:
        return f"{place}, and it does not look like text in another encoding"
    return f"{place}; choose the encoding with --encoding=NAME: {', '.join(found[:3])}"


def find_encodings(raw):
    """Returns {encoding: words of a text as it reads them}, the best first.

    Words that are not ASCII come first if few of the encodings read them in the same way.
    """
    encodings: dict[tuple[str, ...], str] = {}
    utf_16 = ["utf_16", "utf_16_be", "utf_16_le"]  # which every short text can be
    for match in charset_normalizer.from_bytes(raw, cp_exclusion=utf_16):
        words = dict.fromkeys(word for word in str(match).split() if not word.isascii())
        # Encodings that read this part alike can differ in the rest of the text.
        is_preferred = PREFERRED in match.could_be_from_charset
        encodings.setdefault(tuple(words), PREFERRED if is_preferred else match.encoding)
    counts = Counter(itertools.chain.from_iterable(encodings))  # of encodings that read a word
    found = {}
    for own_words, encoding in encodings.items():
        found[encoding] = " ".join(sorted(own_words, key=lambda word: counts[word]))[:30]
    return found
