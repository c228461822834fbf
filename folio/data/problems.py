"""What is wrong with a file that is not UTF-8 text, and a command that helps."""

import re
import shlex

UTF_16 = "it is UTF-16; to convert it: {read} | iconv -f UTF-16 -t UTF-8 > {new}"
FOREIGN_FORMATS = {  # {first bytes: what a file is}
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"PK\3\4": "it is a ZIP archive or a document such as .docx; extract or save its text",
    b"\x1f\x8b": "it is compressed; to decompress it: gunzip {path}",
    b"%PDF": "it is a PDF; to extract its text: pdftotext {path}",
}
READERS = {".gz": "gzip -dc", ".zst": "zstd -dc"}  # {suffix: command that prints the content}
MAX_NULS = 100  # in the first 8 kB of a text
FOREIGN_BYTE, FOREIGN_CHARACTER = r"[\udc80-\udcff]", r"[^\0-\x7f\udc80-\udcff]"


def explain_bytes(source, error):
    """Returns what the file of a Source is that is not UTF-8 text, and what helps.

    error: the UnicodeDecodeError of reading it. A byte 0 stands for a NUL character.
    """
    path = source.path
    suffix = path.suffix.lower()
    text_path = path.with_suffix("") if suffix in READERS else path
    return _explain(source, error).format(
        path=shlex.quote(str(path)),
        read=f"{READERS.get(suffix, 'cat')} {shlex.quote(str(path))}",
        new=shlex.quote(str(text_path.with_name(f"{text_path.stem}-new{text_path.suffix}"))),
    )


def _explain(source, error):
    """Returns the explanation as a template.

    {path}: the file. {read}: a command that prints its content. {new}: a path for the new file.
    """
    with source.open() as file:
        start = file.read(2**13)
    for signature, explanation in FOREIGN_FORMATS.items():
        if start.startswith(signature):
            return explanation
    if start.count(0) > MAX_NULS:
        return "it is a file of numbers or a program"
    if error.object[error.start] == 0:
        return "it contains a NUL byte; to remove it: {read} | tr -d '\\0' > {new}"
    return _explain_encoding(source, error)


def _explain_encoding(source, error):
    """Returns which bytes of a file are not UTF-8, and a template of the command that helps.

    In a damaged text, characters of several bytes outnumber the bad bytes. In a text of another
    encoding, hardly any bytes form such characters.
    """
    place, bad_bytes, characters, offset = None, 0, 0, 0
    with source.open() as file:
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8", "surrogateescape")
            if (bad := re.findall(FOREIGN_BYTE, text)) and not place:
                before = offset + len(text.partition(bad[0])[0].encode())
                place = f"byte {before + 1:,}, in line {number:,}"
            bad_bytes += len(bad)
            characters += len(re.findall(FOREIGN_CHARACTER, text))
            offset += len(line)
    leave_out = "to leave it out: {read} | iconv -f UTF-8 -t UTF-8 -c > {new}"
    if error.reason == "unexpected end of data" and characters + bad_bytes > 1:
        return f"it ends within a character, {place}; {leave_out}"
    if characters > bad_bytes:
        return f"bad bytes: {bad_bytes:,}, the first is {place}; {leave_out}"
    convert = "{read} | iconv -f WINDOWS-1252 -t UTF-8 > {new}"
    byte = error.object[error.start]
    return f"{place}, is 0x{byte:02x}; its encoding can be WINDOWS-1252: {convert}"
