import ast
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
config = configure(globals(), also="boundary")
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


def test_files_are_shared_with_every_script_that_has_the_setting(run, tmp_path, monkeypatch):
    """Copies among them; other files beside the script are left alone, and none is read without need."""
    (tmp_path / "copy_of_sibling.py").write_text("boundary = 0.9\nmine = 1\n1 / 0\nconfig = configure(globals())\n")
    (tmp_path / "other.py").write_text("theirs = 0.9\nconfig = configure(globals())\n")
    (tmp_path / "room.py").write_text("boundary = 0.9\ntheirs = 1\n")  # no script
    (tmp_path / "half_written.py").write_text("boundary = 0.9\nconfig = configure(")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert same(run("a.py", a="mine = 3\nboundary = 0.5\nsteps = 4\n"), steps=4)
    with pytest.raises(UserError, match="a.py:1: theirs is not a setting of script.py"):
        run("a.py", a="theirs = 1\n")
    with pytest.raises(UserError, match="a.py:1: mime is not a setting of script.py; the nearest is mine"):
        run("a.py", a="mime = 1\n")
    with pytest.raises(UserError, match="--mine is not a setting of script.py but of copy_of_sibling.py: put it in"):
        run("--mine=1")
    monkeypatch.setattr(configurator, "_siblings", None)
    assert same(run("a.py", "--lr=1", a="steps = 4\n"), steps=4, lr=1.0)


def test_what_was_given_is_known_apart_from_the_defaults(run):
    run("b.py", "--lr=1e-4", a="steps = 10\n", b="base = 'a.py'\nboundary = 0.5\n")
    assert configurator.given == {"lr", "steps"} and configurator.defaults == DEFAULTS
    run("--steps=3")
    assert configurator.given == {"steps"} and configurator.defaults == DEFAULTS


def test_a_file_is_laid_over_its_bases(run, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/low.py").write_text("steps = 1\nlr = 1\nprompt = 'low'\nboundary = 3\n")
    (tmp_path / "recipes/middle.py").write_text('"""Over low."""\nbase = "low.py"\nsteps = 2\nlr = 2\n')
    top = "# a comment\nbase = 'recipes/middle.py, second.py'\nbetas = (1, 1)\n"
    wanted = dict(steps=2, lr=3.0, prompt="low", betas=(1.0, 1.0))
    assert same(run("top.py", top=top, second="lr = 3\n"), **wanted)
    assert same(run("top.py", "third.py", "--lr=5", third="steps = 4\nlr = 4\n"), **wanted | dict(steps=4, lr=5.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = 'none.py'", "a.py:1: base=none.py: none.py is not there, want a path relative to this file"),
        ("base = 'b.py,'", "a.py:1: base=b.py,: . is not there, want a path relative to this file"),
        ("base = 'a.py'", "a.py:1: base=a.py: a.py is based on this file, want one that isn't"),
        ("base = 'c.py'", "c.py:1: base=a.py: a.py is based on this file, want one that isn't"),
        ("lr = 1\nbase = 'b.py'", """a.py:2: got "base = 'b.py'", want base = "NAME.py" above all settings"""),
        ("boundary = 1\nbase = 'b.py'", """a.py:2: got "base = 'b.py'", want base = "NAME.py" above all settings"""),
        ("base = 'b.py'\nbase = 'b.py'", """a.py:2: got "base = 'b.py'", want base = "NAME.py" above all settings"""),
        ("base = 3", """a.py:1: got 'base = 3', want base = "NAME.py" above all settings"""),
        ("base = f('b.py')", """want base = "NAME.py" above all settings"""),
        ("base = 'd.py'", "d.py:2: stesp is not a setting of script.py; the nearest is steps"),
    ],
)
def test_a_base_that_cannot_be_one(run, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        run("a.py", a=text, b="steps = 1\n", c="base = 'a.py'\n", d="lr = 1\nstesp = 1\n")


def resolved(script, *files):
    """What a script of this repository makes of config files, by its own assignments alone."""
    namespace = {"__file__": str(ROOT / script)}
    for node in ast.parse((ROOT / script).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name == "config":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sys, "argv", [script, *(str(ROOT / "config" / file) for file in files)])
                    patch.setattr(sys, "excepthook", sys.excepthook)
                    also = [ast.literal_eval(keyword.value) for keyword in node.value.keywords]
                    return configurator.configure(namespace, *also)
            namespace[name] = ast.literal_eval(node.value)


def differences(script, first, second):
    first, second = resolved(script, *first), resolved(script, *second)
    return {name: second[name] for name in first if first[name] != second[name]}


def test_smoke_recipes_are_overlays():
    quick = dict(max_steps=4, warmup_steps=0, seed=1, eval_interval=0, num_val_windows=1, val_sigmas=1,
                 num_val_videos=1, save_interval=2)
    recipe = ["robocasa_i2v.py"]
    found = differences("train_i2v_sft.py", recipe, [*recipe, "smoke.py"])
    assert found == quick | dict(out_dir="out/smoke")
    found = differences("train_i2v_sft.py", recipe, ["robocasa_i2v_smoke_rgb.py"])
    assert found == quick | dict(out_dir="out/robocasa_i2v_smoke_rgb", pointmaps=False, lora_rank=16, beta2=0.99,
                                 keep_in_memory=True)
    found = differences("train_i2v_sft.py", ["robocasa_i2v_smoke_rgb.py"], ["robocasa_i2v_smoke_hcpt.py"])
    assert found == dict(out_dir="out/robocasa_i2v_smoke_hcpt", pointmaps=True)

    quick = dict(max_iterations=2, ema_interval=1, eval_interval=2, num_eval_samples=4, num_eval_videos=2,
                 num_eval_steps=20, save_interval=1)
    recipe = ["wan22_ti2v_grpo.py"]
    assert differences("train_grpo.py", recipe, [*recipe, "smoke_grpo.py"]) == quick | dict(out_dir="out/smoke_grpo")
    found = differences("train_grpo.py", recipe, ["wan22_ti2v_grpo_smoke.py"])
    assert found == quick | dict(out_dir="out/wan22_ti2v_grpo_smoke")


def test_recipes_for_other_models_keep_their_own_sizes():
    config = resolved("train_i2v_sft.py", "wan22_ti2v_sft.py")
    assert [config[name] for name in ("model", "cell_height", "pointmaps", "batch_size", "guidance_scale_2", "beta2",
                                      "cache_dir", "lora_rank", "views")] == [
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers", 448, False, 2, 5.0, 0.999, "out/cache_robocasa_ti2v", 64,
        "robot0_agentview_left,robot0_agentview_right"]
    assert resolved("prepare_robocasa.py", "wan22_ti2v_sft.py")["encode_batch"] == 1
    config = resolved("train_grpo.py", "wan22_i2v_grpo.py")
    assert [config[name] for name in ("model", "height", "width", "num_frames", "group_size", "sde_window",
                                      "guidance_scale_2", "lora_alpha", "num_minibatches", "eval_rewards")] == [
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers", 480, 480, 5, 16, (1, 2), 3.5, 128.0, 2, "smoothness:1.0,first_frame:1.0"]


def test_every_recipe_suits_a_trainer():
    for file in sorted((ROOT / "config").glob("*.py")):
        assert resolved("train_grpo.py" if "grpo" in file.name else "train_i2v_sft.py", file)


def test_home_is_expanded(run, tmp_path, monkeypatch):
    """In flags, files, defaults and lists; not where a tilde is but a letter."""
    monkeypatch.setenv("HOME", "/home/me")
    for text, wanted in {"~": "/home/me", "~/a": "/home/me/a", "~/a:1.0, ~/b:0.5": "/home/me/a:1.0, /home/me/b:0.5",
                         "about ~5 cm, or ~/2": "about ~5 cm, or ~/2", "a,~/b": "a,/home/me/b",
                         "~nobody-1/a": "~nobody-1/a", "a~/b": "a~/b", "~ 5 cm": "~ 5 cm"}.items():
        assert run(f"--prompt={text}")["prompt"] == run("a.py", a=f"prompt = {text!r}\n")["prompt"] == wanted
    (tmp_path / "home").mkdir()
    (tmp_path / "home/low.py").write_text("steps = 1\n")
    (tmp_path / "script.py").write_text(SCRIPT.replace('"push"', '"~/out"'), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run("a.py", a="base = '~/low.py'\n") == DEFAULTS | dict(steps=1, prompt=f"{tmp_path}/home/out")
    assert configurator.defaults["prompt"] == f"{tmp_path}/home/out"


@pytest.mark.parametrize("text", ["a\\ud83d", "\\0", "\\udce4.png"])
def test_what_is_no_text_is_refused(run, text):
    with pytest.raises(UserError, match=r"^a.py:1: prompt='.*': got what is no letter in UTF-8, want text$"):
        run("a.py", a=f'prompt = "{text}"\n')


def test_a_refused_default_is_called_one(run):
    config = run("--steps=20")
    with pytest.raises(UserError) as caught:
        check_values(config, at_least=dict(lr=1, steps=30), one_of=dict(prompt=("pull", "lift")),
                     mistakes=["lr=0.0001: want another", "prompt: want one"])
    assert str(caught.value) == (
        "lr=0.0001 (the default, --lr= changes it): want at least 1; steps=20: want at least 30; "
        "prompt=push (the default, --prompt= changes it): want pull or lift; "
        "lr=0.0001 (the default, --lr= changes it): want another; prompt: want one")


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


@pytest.mark.parametrize("said", [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4660",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:4660: Connection reset by peer",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:446] writev [127.0.0.1]:4660: Broken pipe",
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Application timeout caused pair closure",
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
    "failed to recv, got 0 bytes",
])
def test_a_rank_whose_neighbour_ended_says_no_more_than_that(tmp_path, said):
    done = launch(tmp_path, source=SCRIPT + f"raise RuntimeError({said!r})\n")
    assert (done.returncode, done.stderr) == (1, "error: another rank ended, or hangs: its message says why\n")


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
    """An argument that is no config file is the value of the setting `others`; what a script knows better comes after
    files and flags, in the setting's type."""
    run("a.py", "--lr=1", a="steps = 3\nboundary = 0.5")
    assert configurator.given == {"lr", "steps"}
    run()
    assert configurator.given == set()
    source = SCRIPT.replace('also="boundary"', 'others="prompt", recorded=lambda config: better | dict(no_setting=1)')
    (tmp_path / "script.py").write_text(source.replace("_private = 1", "better = dict(lr=2, steps=5, force=True)"))
    assert run("x,y", "--lr=1", "z")["prompt"] == "x,y,z"
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
    config = dict(steps=3, lr=0.0, law="flow", clip=1.0, decay=0.5)
    bounds = dict(at_least=dict(steps=3, lr=0), more_than=dict(clip=0), below=dict(decay=1), at_most=dict(steps=4))
    laws = dict(law=("flow", "cps", "dance"))
    check_values(config, **bounds, one_of=laws)
    wrong = dict(steps=2, lr=-0.1, clip=0.0, decay=1.0, law="ode")
    words = ["steps=2: want at least 3", "lr=-0.1: want at least 0", "clip=0.0: want more than 0",
             "decay=1.0: want below 1", "law=ode: want flow, cps or dance"]
    for (name, value), line in zip(wrong.items(), words, strict=True):
        with pytest.raises(UserError) as caught:
            check_values(config | {name: value}, **bounds, one_of=laws)
        assert str(caught.value) == line
    with pytest.raises(UserError, match="^steps=5: want at most 4$"):
        check_values(config | dict(steps=5), **bounds, one_of=laws)
    with pytest.raises(UserError) as caught:  # all of them at once
        check_values(wrong, **bounds, one_of=laws, mistakes=["a: want b"])
    assert str(caught.value) == "; ".join([*words, "a: want b"])
    with pytest.raises(UserError, match="^a: want b$"):
        check_values(config, **bounds, one_of=laws, mistakes=["a: want b"])


def test_a_setting_that_a_fork_has_deleted_is_not_asked_for():
    check_values({}, at_least=dict(steps=3), more_than=dict(clip=0), one_of=dict(law=("flow", "cps")))
    with pytest.raises(UserError, match="^steps=2: want at least 3$"):
        check_values(dict(steps=2), at_least=dict(steps=3, lr=0), one_of=dict(law=("flow", "cps")))
