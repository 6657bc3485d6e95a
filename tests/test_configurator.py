import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import configurator
from configurator import check_values, save_config
from guard import UserError, release_folders
from helpers import held_by_another

ROOT = Path(__file__).parent.parent
SCRIPT = '''"""Trains nothing, é.

    python script.py --lr=1e-3
"""

from configurator import configure
from guard import UserError

# optimiser
lr = 1e-4  # peak learning rate, é
steps = 10  # optimizer steps
prompt = "push"  # é: what to do
force = False
betas = (0.9, 0.95)  # Adam
_private = 1
config = configure(globals(), also=("sibling.py",))
later = 5
'''
SIBLING = "boundary = 0.9\nsteps = 3\nconfig = configure(globals())\nhidden = 1\n"
DEFAULTS = {"lr": 1e-4, "steps": 10, "prompt": "push", "force": False, "betas": (0.9, 0.95)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*args, file_a=..., file_b=...) -> the script's config; a file's text is written to NAME.py first."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "sibling.py").write_text(SIBLING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure installs its own: put it back afterwards

    def run(*args, **files):
        for name, text in files.items():
            Path(f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["script.py", *args])
        script = runpy.run_path("script.py")
        assert {key: script[key] for key in script["config"]} == script["config"]  # the globals were set too
        return script["config"]

    return run


def launch(folder, *args, source=SCRIPT, **env):
    """The script in a process of its own."""
    (folder / "script.py").write_text(source, encoding="utf-8")
    (folder / "sibling.py").write_text(SIBLING)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | env
    command = [sys.executable, "script.py", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, encoding="utf-8", timeout=60)


def same(config, **changed):
    """Equal in values and in types."""
    want = DEFAULTS | changed
    return config == want and all(type(config[key]) is type(want[key]) for key in want)


def test_defaults(run):
    assert same(run())


@pytest.mark.parametrize(
    ("args", "changed"),
    [
        (["--lr=3e-4", "--steps=20"], {"lr": 3e-4, "steps": 20}),
        (["--lr", "-1", "--steps", "-2"], {"lr": -1.0, "steps": -2}),
        (["--lr=1"], {"lr": 1.0}),
        (["--steps=1", "--steps=2"], {"steps": 2}),
        (["--prompt=a=b"], {"prompt": "a=b"}),
        (["--prompt=3"], {"prompt": "3"}),
        (["--prompt="], {"prompt": ""}),
        (["--prompt=--x"], {"prompt": "--x"}),
        (["--force=True"], {"force": True}),
        (["--force", "true"], {"force": True}),
        (["--betas=(0, 1)"], {"betas": (0.0, 1.0)}),
        (["--betas=0.5,1"], {"betas": (0.5, 1.0)}),
        (["--betas=0.5,"], {"betas": (0.5,)}),
        (["--steps=432 * 2"], {"steps": 864}),
    ],
)
def test_command_line(run, args, changed):
    assert same(run(*args), **changed)


def test_hyphens_stand_for_underscores(tmp_path):
    source = SCRIPT.replace("steps = 10", "num_steps = 10") + "print(config['num_steps'], config['prompt'])\n"
    assert launch(tmp_path, "--num-steps=4", "--prompt=a-b", source=source).stdout == "4 a-b\n"


def test_files_in_order_then_the_command_line(run):
    first = '"""A recipe."""\nlr = 1\nsteps = 432 * 2  # a product\nprompt = "a" "b"\n'
    second = "steps = -7\nbetas = (1, 0.5)\nforce = True\n"
    changed = {"lr": 1.0, "steps": -7, "prompt": "ab", "betas": (1.0, 0.5), "force": True}
    assert same(run("a.py", "b.py", a=first, b=second), **changed)
    assert same(run("--prompt=c", "a.py", "b.py"), **changed | {"prompt": "c"})


def test_file_may_hold_a_siblings_settings(run):
    assert same(run("a.py", a="boundary = None\nsteps = 4\n"), steps=4)
    with pytest.raises(UserError, match="a.py:1: hidden is not a setting"):  # it stands below the sibling's configure()
        run("a.py", a="hidden = 1\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stesp=3"], "--stesp is not a setting of script.py; the nearest is steps"),
        (["--boundary=1"], "--boundary is not a setting of script.py but of sibling.py: put it in a config file"),
        (["--later=1"], "--later is not a setting of script.py"),
        (["--_private=1"], "--_private is not a setting of script.py"),
        (["--steps=1.5"], "--steps=1.5: got float, want int like 10"),
        (["--steps=x"], "--steps='x': got str, want int like 10"),
        (["--steps="], "--steps='': got str, want int like 10"),
        (["--steps=True"], "--steps=True: got bool, want int like 10"),
        (["--lr=fast"], "--lr='fast': got str, want float like 0.0001"),
        (["--lr=1/0"], "--lr='1/0': got str, want float like 0.0001"),
        (["--force=1"], "--force=1: got int, want bool (True or False)"),
        (["--betas=1"], "--betas=1: got int, want tuple like (0.9, 0.95)"),
        (["--betas=1,'x'"], "--betas[1]='x': got str, want float like 0.9"),
        (["--force"], "--force: got no value, want --force=VALUE"),
        (["--force", "--lr=1"], "--force: got no value, want --force=VALUE"),
        (["lr=1"], "lr=1: want a config file (config/NAME.py) or --key=value"),
        (["-x"], "-x: want a config file (config/NAME.py) or --key=value"),
        (["none.py"], "none.py: cannot read the config file (No such file or directory)"),
    ],
)
def test_bad_command_line(run, args, message):
    with pytest.raises(UserError, match=re.escape(message)):
        run(*args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 1\nbondary = 1", "a.py:2: bondary is not a setting of script.py; the nearest is boundary"),
        ("\nsteps = 1.0", "a.py:2: steps=1.0: got float, want int like 10"),
        ("steps = '1'", "a.py:1: steps='1': got str, want int like 10"),
        ("prompt = 3", "a.py:1: prompt=3: got int, want str like 'push'"),
        ("force = 1", "a.py:1: force=1: got int, want bool (True or False)"),
        ("lr = None", "a.py:1: lr=None: got NoneType, want float"),
        ("steps = lr", "a.py:1: steps=lr: want a plain literal value"),
        ("steps = int(3)", "a.py:1: steps=int(3): want a plain literal value"),
        ("steps = 1 // 0", "a.py:1: steps=1 // 0: want a plain literal value"),
        ("import os", "a.py:1: got 'import os', want only lines like key = value"),
        ("lr, steps = 1, 2", "a.py:1: got 'lr, steps = (1, 2)', want only lines like key = value"),
        ("lr = 1\nsteps = = 3", "a.py:2: invalid syntax, want lines like key = value"),
    ],
)
def test_bad_file(run, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        run("a.py", a=text)


def test_file_is_never_executed(run, tmp_path):
    with pytest.raises(UserError):
        run("a.py", a="prompt = open('made', 'w').name\n")
    assert not (tmp_path / "made").exists()


def test_binary_file(run, tmp_path):
    (tmp_path / "a.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="a.py: not a text file"):
        run("a.py")


def test_user_error_is_one_line_without_a_traceback(tmp_path):
    result = launch(tmp_path, "--stesp=3")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: --stesp is not a setting of script.py; the nearest is steps\n"
    result = launch(tmp_path, source=SCRIPT + "raise UserError('two\\n  lines')\n")  # later in the script, too
    assert (result.returncode, result.stderr) == (1, "error: two lines\n")


def test_other_errors_keep_their_traceback(tmp_path):
    result = launch(tmp_path, source=SCRIPT + "1 / 0\n")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize("said", [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
])
def test_a_full_gpu_is_one_line(tmp_path, said):
    source = SCRIPT + f"raise RuntimeError({said!r})\n"
    done = launch(tmp_path, source=source)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the GPU's memory is full ({said}): want more GPUs, a smaller batch")
    assert done.stderr.count("\n") == 1


def test_a_rank_whose_neighbour_ended_says_no_more_than_that(tmp_path):
    said = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4660"
    done = launch(tmp_path, source=SCRIPT + f"raise RuntimeError({said!r})\n")
    assert (done.returncode, done.stderr) == (1, "error: another rank ended: its message says why\n")


def test_interrupt_is_one_line(tmp_path):
    result = launch(tmp_path, source=SCRIPT + "raise KeyboardInterrupt\n")
    assert result.returncode in (-signal.SIGINT, 130)
    assert result.stderr == "interrupted\n"


def test_help(tmp_path):
    result = launch(tmp_path, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Trains nothing, é.\n\npython script.py --lr=1e-3\n")
    lines = ["  --lr=0.0001          peak learning rate, é", "  --prompt='push'      é: what to do", "  --force=False"]
    assert set(lines) <= set(result.stdout.splitlines())
    assert "_private" not in result.stdout and "later" not in result.stdout
    assert launch(tmp_path, "--help", RANK="1").stdout == ""


def test_only_rank_0_speaks(run, monkeypatch, capsys):
    naps = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", naps.append)
    with pytest.raises(SystemExit) as stop:
        run("--stesp=3")
    assert stop.value.code == 1 and naps and capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError):
        run("--stesp=3")


def test_what_is_given_and_what_a_script_knows_better(run, tmp_path, monkeypatch):
    """A .json argument is the setting `run`'s value; defaults come after files and flags, in the setting's type."""
    run("a.py", "--lr=1", a="steps = 3\nboundary = 0.5")
    assert configurator.given == {"lr", "steps"}
    run()
    assert configurator.given == set()
    source = SCRIPT.replace('also=("sibling.py",)', 'run="prompt", defaults=lambda config: better | dict(no_setting=1)')
    (tmp_path / "script.py").write_text(source.replace("_private = 1", "better = dict(lr=2, steps=5, force=True)"))
    config = run("a.py", "x/config.json", a="steps = 3")
    assert config == DEFAULTS | dict(prompt="x/config.json", lr=2.0, steps=3, force=True)
    assert type(config["lr"]) is float
    (tmp_path / "script.py").write_text(source.replace("_private = 1", "better = dict(lr='2')"))
    with pytest.raises(UserError, match="lr='2': got str, want float like 0.0001"):
        run()


def test_save_config(tmp_path):
    save_config(tmp_path / "a" / "b", DEFAULTS)
    record = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert record["settings"] == DEFAULTS | {"betas": [0.9, 0.95]}
    assert record["versions"]["torch"].startswith("2.") and record["versions"]["diffusers"].startswith("0.")
    assert record["python"] == sys.version.split()[0]
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"])
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [".lock", "config.json"]


def test_an_out_dir_is_one_runs(tmp_path):
    with held_by_another(tmp_path):
        with pytest.raises(UserError, match=f"out_dir={tmp_path}: another run is writing there"):
            save_config(tmp_path, DEFAULTS)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    save_config(tmp_path, DEFAULTS)
    save_config(tmp_path, DEFAULTS)  # this process may come again
    release_folders()
    with held_by_another(tmp_path):
        pass


def test_save_config_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="out_dir=.*file.*: cannot write there"):
        save_config(tmp_path / "file" / "run", DEFAULTS)


def test_values_out_of_range_are_named_with_what_is_wanted():
    config = dict(steps=3, lr=0.0, law="flow")
    check_values(config, at_least=dict(steps=3, lr=0), one_of=dict(law=("flow", "cps")))
    for change, words in [(dict(steps=2), "steps=2: want at least 3"), (dict(lr=-0.1), "lr=-0.1: want at least 0"),
                          (dict(law="ode"), "law=ode: want flow, cps or dance")]:
        with pytest.raises(UserError, match=words):
            check_values(config | change, at_least=dict(steps=3, lr=0), one_of=dict(law=("flow", "cps", "dance")))
