"""Tensors on disk: files of torch.save, and folders of torch.distributed.checkpoint.

Nothing in a file or folder is executed, which torch.distributed.checkpoint does not ensure.
"""

import io
import os
import pathlib
import pickle
import zipfile
from contextlib import suppress
from warnings import catch_warnings

import torch

from folio.errors import UserError, cause_of, os_error
from folio.files import sync_folder
from folio.memory import is_out_of_memory

# Files

ATTEMPTS = 20  # to read a file that is replaced meanwhile


def read_file(path, mapped=False):
    """Returns the plain data and tensors in a file of torch.save, with tensors on the CPU.

    With mapped=True, tensors are mapped from the file. Raises FileNotFoundError, or UserError if
    the file is damaged.
    """
    for _ in range(ATTEMPTS):
        before, error = _stamp(path), None
        try:
            content = _read_once(path, mapped)
        except UserError as failure:
            error = failure
        if _stamp(path) == before:
            break
        # Another process has replaced it. It is opened several times, so this may be a mixture.
    else:
        raise UserError(f"{path} is replaced again and again while it is read")
    if error:
        raise error
    return content


def _stamp(path):
    """Returns values that change when a file is replaced, or None if there are none."""
    with suppress(OSError):
        stat = os.stat(path)
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
    return None


def _read_once(path, mapped):
    try:
        _check_archive(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise os_error("read", path, error) from error
    except Exception as error:  # a damaged file can raise anything
        if is_out_of_memory(error):
            raise
        reason = "contains more than plain data and tensors; nothing in it was executed"
        if isinstance(error, zipfile.BadZipFile):  # torch's messages suggest executing the file
            reason = cause_of(error)
        raise UserError(f"{path} is damaged or not a checkpoint ({reason})") from error


def _check_archive(file):
    """Raises BadZipFile if the file is damaged: torch.load verifies no checksums."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            is_folder = entry.external_attr & 0x10  # torch would read such an entry as empty
            if is_folder or entry.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile("the archive's directory is damaged")
        if (wrong := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {wrong} is wrong")


# Folders

INDEX = ".metadata"  # the file that says where each part of a tensor is
INDEX_CLASSES = {  # {module: names} in the pickled index
    "torch": {"Size", "float32"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}


class IndexUnpickler(pickle.Unpickler):
    """Reads an index, and refuses to execute anything else."""

    def find_class(self, module, name):
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath  # of the folder when it was written
        if name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which was not executed")
        return super().find_class(module, name)


def write_folder(folder, tensors, world):
    """Writes float32 tensors, sharded or not, to a new folder, and waits until they are on disk.

    Each process writes its shares of sharded tensors. Collective; if a process fails, all raise
    UserError, and an incomplete folder may be left.

    Args:
        tensors: nested dicts of tensors.
    """
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise os_error("write", folder, cause) from error
        if "enforce fail" in str(cause):  # torch hides the system's error behind its own
            raise UserError(f"cannot write {folder}: the disk may be full") from error
        raise cause from error
    sync_folder(folder)
    sync_folder(folder.parent)
    world.together(check_folder, folder)


def read_folder(folder, tensors):
    """Reads tensors that write_folder() wrote into those given, in nested dicts with the same keys.

    Into a sharded tensor, this process's share is read. Does not communicate. Raises UserError.
    """
    import torch.distributed.checkpoint as dcp

    index = check_folder(folder)

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_, **__):  # that of the base class would execute a file's content
            return index

        def read_data(self, plan, planner):  # that of the base class verifies no checksums
            for item in plan.items:
                _check_part(folder, index.storage_data[item.storage_index])
            return super().read_data(plan, planner)

    try:
        # It warns that it does not communicate.
        with catch_warnings(action="ignore", category=UserWarning):
            dcp.load(tensors, storage_reader=Reader(folder), no_dist=True)
    except dcp.CheckpointException as error:
        raise UserError(f"cannot read {folder}: {cause_of(_cause(error))}") from error


def check_folder(folder):
    """Returns the index of a folder, a Metadata. Raises UserError if the folder is incomplete."""
    try:
        with open(folder / INDEX, "rb") as file:
            index = IndexUnpickler(file).load()
        ends = {}
        for part in index.storage_data.values():
            end = part.offset + part.length
            ends[part.relative_path] = max(end, ends.get(part.relative_path, 0))
        for name, end in ends.items():
            if (size := (folder / name).stat().st_size) < end:
                raise ValueError(f"{name} has {size:,} instead of {end:,} bytes")
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename} is missing: the folder belongs to a checkpoint file and must be on "
            "a disk that all processes share"
        ) from error
    except OSError as error:
        raise os_error("read", folder, error) from error
    except Exception as error:  # a damaged index can raise anything
        raise UserError(f"{folder} is damaged ({cause_of(error)})") from error
    return index


def _check_part(folder, part):
    """Raises BadZipFile if a part of a tensor, an archive inside a file, is damaged."""
    with open(folder / part.relative_path, "rb") as file:
        file.seek(part.offset)
        _check_archive(io.BytesIO(file.read(part.length)))


def _cause(error):
    """Returns the cause of a CheckpointException. Raises it if it is Ctrl-C or a lack of memory."""
    cause, _ = next(iter(error.failures.values()))
    if not isinstance(cause, Exception) or is_out_of_memory(cause):
        raise cause
    return cause
