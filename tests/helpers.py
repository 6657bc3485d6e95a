"""Starting the scripts in this process and reading what a run left behind, for the tests of whole runs."""

import functools
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import safetensors.torch
import torch

import configurator
import model as wan_model
from guard import UserError

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
TRAINERS = ("train_grpo.py", "train_i2v_sft.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def load(folder, dtype=torch.float32):
    """A checkpoint's experts in this process -> model.Wan."""
    wan = wan_model.describe(str(folder))
    wan.dtype = dtype
    for expert in wan.expert_names:
        wan.experts[expert] = wan_model.load_transformer(wan, expert, "cpu", dtype)
    return wan


def flags(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


@functools.cache
def settings_of(path):
    return configurator._settings(path).keys()


def use_copy(copy):
    """Let all tests, in started processes too, run a copy of a trainer instead of the one with its settings."""
    shared = {len(settings_of(copy) & settings_of(REPOSITORY / name)): name for name in TRAINERS}
    name = shared[max(shared)]
    if max(shared) < len(settings_of(REPOSITORY / name)) / 2:
        raise ValueError(f"want a copy of {' or '.join(TRAINERS)}, got one without most of their settings")
    ENVIRONMENT[f"COPY_OF_{name}"] = os.environ[f"COPY_OF_{name}"] = str(copy.resolve())


def path_of(name):
    """Where a script lies, or the copy of it that `pytest --script=` asks for."""
    return Path(os.environ.get(f"COPY_OF_{name}", REPOSITORY / name))


def kept(name, settings):
    """Settings for a script without those that its copy has deleted."""
    deleted = settings_of(REPOSITORY / name) - settings_of(path_of(name))
    return {key: value for key, value in settings.items() if key not in deleted}


def script(name, *files, **settings):
    """Run a script in this process -> (its globals, what it printed). A test of what a copy has deleted is skipped."""
    if deleted := settings.keys() - kept(name, settings).keys():
        pytest.skip(f"{path_of(name).name} has no setting {', '.join(sorted(deleted))}")
    argv, hook = sys.argv, sys.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    sys.argv = [name, *map(str, files), *flags(settings)]
    try:
        with redirect_stdout(io.StringIO()) as printed:
            return runpy.run_path(str(path_of(name)), run_name="__main__"), printed.getvalue()
    finally:
        sys.argv, sys.excepthook = argv, hook
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def held_by_another(folder):
    """Inside, another process holds a folder; it is killed then: whatever ends a run lets go of it."""
    holder = "import sys, guard as c; c.hold_folder(sys.argv[1]); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holder, folder], cwd=REPOSITORY, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        yield
        other.kill()


def smooth_adamw(monkeypatch):
    """AdamW's first steps move a weight by the sign of its gradient, also where the gradient is nothing but rounding,
    which differs from machine to machine: with an eps of a gradient's size a step is smooth in the gradient."""
    monkeypatch.setattr(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=1e-4))


def refusal(name, *files, **settings):
    """The one line on stderr with which a script refuses to run; a copy is called by its original's name."""
    shown = sys.excepthook
    with pytest.raises((UserError, OSError)) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runpy, "run_path", keep_hook(runpy.run_path, hooks := []))
        script(name, *files, **settings)
    assert sys.excepthook is shown
    with redirect_stderr(io.StringIO()) as printed:
        hooks[0](caught.type, caught.value, caught.tb)
    lines = printed.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].replace(path_of(name).name, name)


def keep_hook(run_path, hooks):
    def run(*args, **kwargs):
        try:
            return run_path(*args, **kwargs)
        finally:
            hooks.append(sys.excepthook)  # what configure() installed

    return run


def tensors_of(out_dir, step):
    """All tensors of a checkpoint of one process."""
    return safetensors.torch.load_file(next(Path(out_dir, f"ckpt/step_{step:06d}").glob("*.safetensors")))


def assert_same_checkpoint(found, wanted):
    assert found.keys() == wanted.keys()
    differing = [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]
    assert not differing


def rows_of(out_dir):
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
