"""Files from anywhere: read where they are whole and plain data, refused where they are not."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict

STORAGES = ("Float", "Half", "BFloat16", "Double", "Long", "Int")
STAND_INS = {  # for all that the pickle in an archive may name, while it is checked
    "collections OrderedDict": lambda: OrderedDict(),  # and no arguments
    "torch._utils _rebuild_tensor_v2": lambda *_: None,
} | {f"torch {name}Storage": None for name in STORAGES}
# How pickle's protocols 1 to 5 spell numbers, strings, dicts, lists, tuples and calls.
_PLAIN = """
PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
GLOBAL REDUCE BUILD BINPERSID
"""


class PlainUnpickler(pickle._Unpickler):
    """Reads plain data from a pickle's bytes; refuses what could run code, or only fill memory.

    `stand_ins` maps names ("torch._utils _rebuild_tensor_v2") to what is called in their place.
    Keys of dicts are strings and ints. In Python, as the unpickler in C lets a file of a few bytes
    claim gigabytes.
    """

    dispatch = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in _PLAIN.split()
    }

    def __init__(self, content, stand_ins=None):
        super().__init__(io.BytesIO(content))
        self.stand_ins = stand_ins or {}

    def load(self):
        try:
            return super().load()
        except KeyError as error:
            raise pickle.UnpicklingError("it is more than plain data, or damaged") from error

    def find_class(self, module, name):
        if (key := f"{module} {name}") not in self.stand_ins:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}")
        return self.stand_ins[key]

    def persistent_load(self, _):
        return None

    def _set_items(self, keys, set_them):
        if not {type(key) for key in keys} <= {str, int}:  # hashing others may crash, or never end
            raise pickle.UnpicklingError("it has keys that are no plain data")
        set_them(self)

    def load_setitem(self):
        self._set_items(self.stack[-2:-1], pickle._Unpickler.load_setitem)

    def load_setitems(self):
        self._set_items(self.stack[::2], pickle._Unpickler.load_setitems)

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def check_archive(file):
    """Raise where what torch.save wrote is damaged, or is more than plain data and tensors.

    torch.load checks no checksums and no sizes. A file in which it would find another archive than
    zipfile does is refused.
    """
    size = os.fstat(file.fileno()).st_size
    if file.read(4) != b"PK\3\4":
        raise ValueError("it is no archive of torch's")
    file.seek(max(0, size - 98))  # the records at the end: one of 56 bytes, one of 20, one of 22
    end = file.read()
    if end[56:60] == b"PK\6\7" and int.from_bytes(end[64:72], "little") != size - 98:
        raise ValueError("its directory is elsewhere")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        folders = any(entry.is_dir() or entry.external_attr & 0x10 for entry in entries)
        if packed or folders or archive.comment or sum(e.file_size for e in entries) > size:
            raise ValueError("its directory is wrong")
        if (wrong := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {wrong} is wrong")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                PlainUnpickler(archive.read(entry), STAND_INS).load()
