"""What is wrong with a file that is not UTF-8 text, and a command that helps."""

import shlex

UTF_16 = "it is UTF-16; to convert it: {read} | iconv -f UTF-16 -t UTF-8 > NEW_FILE"
FOREIGN_FORMATS = {  # {first bytes: what a file is}
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"PK\3\4": "it is a ZIP archive or a document such as .docx; extract or save its text",
    b"\x1f\x8b": "it is compressed; to decompress it: {read} | gunzip > NEW_FILE",
    b"BZh": "it is compressed; to decompress it: {read} | bunzip2 > NEW_FILE",
    b"\xfd7zXZ": "it is compressed; to decompress it: {read} | unxz > NEW_FILE",
    b"%PDF": "it is a PDF; to extract its text: pdftotext {path}",
}
READERS = {".gz": "gzip -dc", ".zst": "zstd -dc"}  # {suffix: command that prints the content}
MAX_NULS = 100  # in the first 8 kB of a text


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
    if start.count(0) > MAX_NULS:
        return "it is a file of numbers or a program"
    if byte == 0:
        return f"it contains a NUL byte; to remove it: {read} | tr -d '\\0' > NEW_FILE"
    with source.open() as file:
        is_bad = (line.decode(errors="ignore").encode() != line for line in file)
        number = next(number for number, bad in enumerate(is_bad, start=1) if bad)
    # In a different encoding, no valid characters of several bytes precede the first bad byte.
    is_cut, before = error.reason == "unexpected end of data", error.object[: error.start]
    remedy = "it can be WINDOWS-1252: {} | iconv -f WINDOWS-1252 -t UTF-8 > NEW_FILE"
    if is_cut or not before.isascii():
        remedy = "to leave out such bytes: {} | iconv -f UTF-8 -t UTF-8 -c > NEW_FILE"
    return f"line {number:,} has the byte 0x{byte:02x}; {remedy.format(read)}"
