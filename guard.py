"""What goes wrong is one line, and what is written is whole: errors, the lock of a run's folder, atomic files."""

import errno
import fcntl
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

DISK_FULL = ("No space left on device", "Disk quota exceeded")  # the system's words, whoever raises them
PEER_GONE = (  # in a collective, or at the store where ranks meet: gloo's, NCCL's and the store's words
    "Connection closed by peer", "onnection reset by peer", "Broken pipe", "Socket closed", "Socket Timeout",
    "failed to recv", "pair closure", "Timed out waiting", "wait timeout", "remote process exited")
GPU_FULL = ("CUDA out of memory", "ALLOC_FAILED")  # the allocator's words; cuBLAS's and cuDNN's


class UserError(ValueError):
    """A mistake of the user's: shown as one line with exit code 1, never as a traceback."""


class Diverged(UserError):
    """Training went wrong so far that what it has now isn't worth saving."""


def first_line(error):
    """What an error says, for a line about it."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextmanager
def user_errors(model, part):
    """Turn the many ways in which a folder or hub id can lack a part into one line."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"model={model}: can't load its {part}: want a diffusers folder (`python tiny.py` builds one) "
                        f"or a hub id ({first_line(error)})") from error


def show_error(kind, error, trace):
    if any(full in str(error) for full in GPU_FULL):
        reason = " ".join(str(error).split())[:160]
        print(f"error: the GPU's memory is full ({reason}): want more GPUs, a smaller batch, checkpointing=full or "
              "compile_blocks=True", file=sys.stderr)
    elif getattr(error, "told", False):
        pass  # by another rank
    elif issubclass(kind, UserError) or any(full in str(error) for full in DISK_FULL):
        print("error:", " ".join(str(error).split()), file=sys.stderr)
    elif issubclass(kind, RuntimeError) and any(gone in str(error) for gone in PEER_GONE):
        print("error: another rank ended, or hangs: its message says why", file=sys.stderr)
    elif issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# ----------------------------------------------------------------------------- folders and files


@contextmanager
def writing(folder, name):
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}={folder}: cannot write there ({error.strerror}), choose another folder") from error


_held = []  # open files, locked until they are closed or this process ends


def hold_folder(folder, name="out_dir"):
    """Two runs in one folder would write over each other: the second is refused. name: of the folder's setting."""
    with writing(folder, name):
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder, ".lock"), "a")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"{name}={folder}: another run is writing there: end it, or choose another folder; if there "
                        "is none, remove its .lock") from None
    except OSError:
        pass  # a file system without locks
    _held.append(file)


def release_folders():
    """Let other processes write there again."""
    while _held:
        _held.pop().close()


def remove_folder(path):
    """Remove a folder that others know by its name: the name goes first, so that none is ever seen half empty."""
    if os.path.isdir(path):
        doomed = os.path.join(os.path.dirname(path), f"tmp_removed_{os.path.basename(path)}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def replace_folder(temporary, final):
    """Give a finished folder its name; one that has the name already is moved out of the way first."""
    remove_folder(final)
    os.replace(temporary, final)


def write_atomic(path, content):
    """bytes -> path, whole or not at all; UserError where the disk is full or read-only."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space and run again: it continues" if full else "choose another folder"
        raise UserError(f"{path}: cannot write ({error.strerror}): {remedy}") from None
