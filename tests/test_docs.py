"""README.md and docs/*.md: every command is parsed by its script, what is named is there, the examples run."""

import ast
import functools
import re
import shlex
import subprocess
import sys
import threading

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from safetensors.torch import load_file

import configurator
import flow
import reward
import tiny
import video
from guard import UserError
from helpers import REPOSITORY, script

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
YOURS = {"train_mine.py", "read_mine.py"}  # files that a reader makes
OTHERS = {"key", "help", "script", "lora_merge_mode", "nproc_per_node"}  # no settings of ours
# A block is run by bash itself with these in the place of all programs: they write down how they were called.
STUBS = r"""
set -eu; PATH=; SLURM_JOB_NODELIST=; SLURM_JOB_ID=7
say() { local call; printf -v call '%s\x1f' "$@"; printf '%s\n' "$call" >>"$CALLS"; }
python() { say python "$@"; }; torchrun() { say torchrun "$@"; }; make() { say make "$@"; }
srun() { "$@"; }; curl() { :; }; sleep() { :; }; scontrol() { echo node; }; head() { read -r line; echo "$line"; }
"""


def blocks(page, *languages):
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [block for language, block in fences if language in languages]


def text_of(page):
    """Its prose, without blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def spans(page):
    """What stands `between backticks` in its prose."""
    return re.findall(r"`([^`\n]+)`", text_of(page))


def calls(block, folder):
    """The programs that a block of shell commands starts -> a list of arguments each."""
    found = folder / "calls"
    found.write_text("")
    run = subprocess.run(["bash", "-c", STUBS + block + "\nwait"], env={"CALLS": str(found)}, cwd=folder,
                         text=True, capture_output=True, timeout=60)
    assert run.returncode == 0 and not run.stderr, f"{block}\n{run.stderr}"
    return [line.split("\x1f")[:-1] for line in found.read_text().splitlines()]


@functools.cache
def head_of(name):
    """A script's code above its call of configure(), and that call: compiled."""
    for n, node in enumerate(body := ast.parse((REPOSITORY / name).read_text()).body):
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "configure":
                return compile(ast.Module(body[:n], []), name, "exec"), compile(ast.Expression(call), name, "eval")
    raise AssertionError(f"{name} has no settings")


def parse(name, args):
    """The settings with which a script would run. Only its head is executed, imports and settings, and configure()."""
    above, call = head_of(name)
    namespace = {"__file__": str(REPOSITORY / name), "__name__": name}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        patch.setattr(sys, "argv", [name, *args])
        patch.setattr(sys, "excepthook", sys.excepthook)
        exec(above, namespace)
        if "take_clips" in namespace:
            namespace["take_clips"]()
        if "artifacts" in namespace:  # what isn't given comes from runs, which aren't there
            patch.setattr(namespace["artifacts"], "recorded", lambda config: {})
        return eval(call, namespace)


def check(call):
    """UserError or AssertionError for a command of this project that wouldn't be understood."""
    program, *args = call
    if program == "make":
        targets = re.findall(r"^([\w/.-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
        assert args and args[0] in targets, call
        return
    if args[:2] == ["-m", "pytest"]:
        assert all((REPOSITORY / arg).exists() for arg in args[2:] if not arg.startswith("-")), call
        return
    if program == "torchrun":  # its own options are all --name=value
        args = args[next(i for i, arg in enumerate(args) if not arg.startswith("--")) :]
    name, *args = args
    if name == "plot.py":  # no settings
        options = {arg.partition("=")[0] for arg in args if arg.startswith("-")}
        assert options <= set(re.findall(r"--\w+", (REPOSITORY / name).read_text().split('"""')[1])), call
    else:
        parse(name, args)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page, tmp_path):
    for block in blocks(page, "", "bash"):
        for call in calls(block, tmp_path):
            check(call)
    for span in spans(page):
        if re.match(r"(python|torchrun|make) [\w.-]", span):
            check(shlex.split(span))


def test_commands_are_found(tmp_path):
    block = """export A=1 B=2  # a comment
    C="config/tiny_i2v.py --seed=3"; for i in 4 5; do python train_i2v_sft.py $C --out_dir=out/$i & done
    torchrun --nproc_per_node=2 bench.py \\
        --steps=3 && srun make tiny"""
    found = sorted(calls(block, tmp_path))
    assert found[:2] == [["make", "tiny"],
                         ["python", "train_i2v_sft.py", "config/tiny_i2v.py", "--seed=3", "--out_dir=out/4"]]
    assert found[3] == ["torchrun", "--nproc_per_node=2", "bench.py", "--steps=3"] and len(found) == 4
    assert parse(found[1][1], found[1][2:])["out_dir"] == "out/4"
    for page in PAGES[1:]:
        assert any(calls(block, tmp_path) for block in blocks(page, "", "bash")), page
    for mistake in (["python", "train_i2v_sft.py", "--max_step=3"], ["python", "train_grpo.py", "config/tiny_grop.py"],
                    ["torchrun", "--nproc_per_node=2", "bench.py", "--steps=three"]):
        with pytest.raises(UserError):
            check(mistake)
    for mistake in (["make", "tinny"], ["python", "plot.py", "--means=a.png", "out/a"]):
        with pytest.raises(AssertionError):
            check(mistake)
    with pytest.raises(AssertionError, match="unbound variable"):
        calls("python sample.py $C", tmp_path)


@functools.cache
def names_in():
    """{module or class: what it defines or imports}, of all files of this project."""
    found = {}
    for path in REPOSITORY.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            inside = found.setdefault(getattr(node, "name", path.stem), set())
            for each in ast.walk(node):
                inside.update(alias.asname or alias.name for alias in getattr(each, "names", []) if alias != "_"
                              and isinstance(each, (ast.Import, ast.ImportFrom)))
                if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                    inside.add(each.name)
                elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    inside.add(each.id)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_is_there(page):
    whole = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)\)", whole):
        assert link.startswith("https://") or (page.parent / link).is_file(), link
    for name in set(re.findall(r"(?<![\w/])[\w/]+\.(?:py|md)\b", whole)) - YOURS:
        assert any((folder / name).is_file() for folder in (REPOSITORY, REPOSITORY / "config", page.parent)), name
    settings = {key for path in REPOSITORY.glob("*.py") for key in configurator._settings(path)}
    for span in spans(page):
        if found := re.match(r"--([a-z_-]+)", span) or re.match(r"([a-z_0-9]+)=", span):
            assert found[1].replace("-", "_") in settings | OTHERS, span
    in_code = "\n".join([*spans(page), *blocks(page, "text")])
    for owner, name in re.findall(r"(?<![\w./])([A-Za-z_]\w*)\.([A-Za-z_]\w*)", in_code):
        if owner in names_in() and name not in ("py", "json", "jsonl", "md"):
            assert name in names_in()[owner], f"{owner}.{name}"


def test_readme_is_short():
    text = PAGES[0].read_bytes()
    assert len(text) <= 12_000 and len(text.splitlines()) <= 180


# ----------------------------------------------------------------------------- the examples


def example(page, word):
    found, = (block for block in blocks(REPOSITORY / "docs" / page, "python") if word in block)
    return found


def test_diffusers_example(tmp_path, monkeypatch):
    for name, value in dict(num_layers=1, num_attention_heads=2, ffn_dim=64).items():
        monkeypatch.setitem(tiny.TRANSFORMER, name, value)
    tiny.make_robot_hdf5(tmp_path / "robot.hdf5", num_demos=24)
    tiny.make_checkpoint(tmp_path / "i2v", "i2v", tiny.make_vae(), *tiny.make_text_encoder())
    data = dict(model=tmp_path / "i2v", data=tmp_path / "robot.hdf5", cache_dir=tmp_path / "cache")
    script("prepare_robocasa.py", **data)
    script("train_i2v_sft.py", **data, out_dir=tmp_path / "run", lora_rank=2, max_steps=6, batch_size=4, fps=5,
           num_val_videos=0, num_val_windows=1, val_sigmas=1, eval_interval=0, num_inference_steps=3, warmup_steps=0,
           guidance_scale=3.0, guidance_scale_2=2.0)
    for name, colour in (("left", (200, 40, 40)), ("right", (40, 40, 200))):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{name}.png")

    code = example("finetune.md", "load_lora_weights")
    for printed, here in (("out/robocasa_rgb", "run"), ("left.png", "left.png"), ("right.png", "right.png"),
                          ("out/sample_diffusers.mp4", "sample.mp4")):
        assert f'"{printed}' in code
        code = code.replace(f'"{printed}', f'"{tmp_path}/{here}')
    asked, pipeline = {}, WanImageToVideoPipeline.__call__
    monkeypatch.setattr(WanImageToVideoPipeline, "__call__", lambda *args, **options: (
        asked.update(options, image=args[1], prompt=args[2], negative_prompt=args[3]) or pipeline(*args, **options)))
    exec(code.replace('"cuda"', '"cpu"'), namespace := {})
    assert (asked["guidance_scale"], asked["guidance_scale_2"]) == (3, 2) and asked["max_sequence_length"] == 16
    frames, fps = video.read_mp4(tmp_path / "sample.mp4")
    assert namespace["frames"].shape == (5, 16, 32, 3) and len(frames) == 5 and fps == 5
    assert asked["image"].getpixel((3, 3)) == (200, 40, 40) and asked["image"].getpixel((30, 3)) == (40, 40, 200)
    assert torch.equal(namespace["pipe"].scheduler.sigmas, flow.sigma_grid(3, 5.0))
    for name, transformer in (("high", namespace["pipe"].transformer), ("low", namespace["pipe"].transformer_2)):
        exported = load_file(tmp_path / f"run/lora/{name}_noise.safetensors")
        loaded = {re.sub(r"\.default_\d", "", key): p for key, p in transformer.named_parameters() if ".lora_" in key}
        assert len(exported) == len(loaded) == 16
        for key, p in loaded.items():
            assert p.any() and torch.equal(p, exported[f"transformer.{key}"].bfloat16()), key


def test_http_reward_example(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    code = example("grpo.md", "HTTPServer")
    assert code.endswith('HTTPServer(("127.0.0.1", 8731), Reward).serve_forever()\n')
    exec(code.replace("8731", "0").replace(".serve_forever()", "").replace("HTTPServer((", "server = HTTPServer(("),
         namespace := {})
    namespace["Reward"].log_message = lambda *_: None
    thread = threading.Thread(target=(server := namespace["server"]).serve_forever, kwargs=dict(poll_interval=0.01))
    thread.start()
    try:
        rewards = reward.load_rewards(f"http://127.0.0.1:{server.server_port}/score:1.0", {"reward_timeout": 5.0})
        videos = torch.tensor([0.2, 0.6]).view(2, 1, 1, 1, 1).expand(2, 3, 3, 4, 4)
        (scores,) = reward.score(rewards, videos, ["a", "b"], [{}, {}]).values()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert torch.allclose(scores, torch.tensor([0.2, 0.6]), atol=1e-6)


def test_own_reward_example(monkeypatch):
    exec(example("fork.md", "REWARDS"), namespace := {})
    monkeypatch.setitem(reward.REWARDS, "bright", namespace["REWARDS"]["bright"])
    rewards = reward.load_rewards("bright:1.0", {"darkest": namespace["darkest"]})
    videos = torch.tensor([0.1, 0.6]).view(2, 1, 1, 1, 1).expand(2, 3, 3, 4, 4)
    assert torch.allclose(reward.score(rewards, videos, ["a", "b"], [{}, {}])["bright"], torch.tensor([-0.1, 0.0]))
