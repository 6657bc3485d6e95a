"""What goes wrong is one line, and what is written is whole: errors, the lock of a run's folder, atomic files."""

import fcntl
import io
import json
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


def speak_utf8():
    """Names of files and words are UTF-8, whatever the locale is; no print fails where a terminal can't show a letter.

    Before anything is done: where the locale isn't UTF-8, the process begins anew with Python's UTF-8 mode on.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
def writing(path, name=""):
    """Where the inside can't write to path, a file or folder, that is one line. name: "out_dir=", of its setting."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        full = any(words in str(error) for words in DISK_FULL)
        remedy = "free some space and run again" if full else "choose another folder"
        raise UserError(f"{name}{path}: cannot write there ({reason:.200}): {remedy}") from None


@contextmanager
def whole(path):
    """-> a name beside path for a file or a folder, which gets path's own name when all of it is written.

    What fails leaves nothing behind, and is a UserError where the disk is why. A kill leaves NAME.tmp, until next time.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            yield temporary
            if temporary.is_dir():
                remove_folder(path)
            os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)
            raise


def write_atomic(path, content):
    """bytes -> path, whole or not at all; UserError where the disk is full or read-only."""
    with whole(path) as temporary:
        temporary.write_bytes(content)


_held = []  # open files, locked until they are closed or this process ends


def hold_folder(folder, name="out_dir"):
    """Two runs in one folder would write over each other: the second is refused. name: of the folder's setting."""
    with writing(folder, f"{name}="):
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


# ----------------------------------------------------------------------------- JSON


def parse_json(text, where, wanted):
    """JSON, str or bytes -> the dict in it. UserError, saying where, for what is damaged, no object, or no Unicode."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no letter
        if isinstance(value, dict):
            return value
        reason = "no object"
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
        reason = first_line(error)
    raise UserError(f"{where}: got {text[:40]!r} ({reason}), want {wanted}")


def read_json(path, wanted):
    """The dict in a JSON file, as parse_json reads it."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: want {wanted}") from None
    return parse_json(text, path, wanted)
