"""guard.py: what is written is whole or one line says why not, JSON of others, an ASCII terminal and locale."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import adapters
import configurator
import guard
import held_out
import latent_cache
import model as wan_model
import plot
import tiny
import video
from guard import UserError
from helpers import ENVIRONMENT, REPOSITORY, files_of

FULL = "cannot write there (No space left on device): free some space and run again"
FRAMES = np.zeros((3, 16, 16, 3), np.uint8)
BEFORE_AND_NOW = dict(iteration=0, i=0, frames=FRAMES, given=FRAMES[:1], prompt="é")
WRITERS = {  # file -> how it is written
    "a.mp4": lambda path: video.write_mp4(path, FRAMES, 8),
    "a.png": lambda path: video.contact_sheet(path, [("a", FRAMES)]),
    "curves.png": lambda path: plot.draw_curves(path.parent),
    "config.json": lambda path: configurator.save_config(path.parent, {"lr": 1.0}),
    "a.safetensors": lambda path: latent_cache.write_tensors(path, {"x": torch.zeros(4)}),
    "a.json": lambda path: latent_cache.write_json(path, {"é": 1}),
    "samples/before_0.npy": lambda path: held_out.write_before_and_after(
        dict(out_dir=path.parents[1], fps=8), **BEFORE_AND_NOW),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(tmp_path, name):
    """The file that is written, beside the one that is replaced, leads to the device that is always full."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    plot.MetricsLog(tmp_path).write({"step": 1, "loss": 1.0})
    path.write_bytes(b"before")
    path.with_name(f"{path.name}.tmp").symlink_to("/dev/full")
    before = {*files_of(tmp_path), ".lock"}
    with pytest.raises(UserError) as error:
        WRITERS[name](path)
    line = str(error.value)
    assert line.startswith(f"{path}: cannot write there (") and "No space left on device" in line and "\n" not in line
    assert line.endswith("): free some space and run again")
    assert {*files_of(tmp_path), ".lock"} == before - {f"{name}.tmp"} and path.read_bytes() == b"before"
    guard.release_folders()
    WRITERS[name](path)  # and where there is room again
    assert path.read_bytes() != b"before" and not [*tmp_path.rglob("*.tmp")]


def test_a_log_on_a_full_disk(tmp_path):
    log = plot.MetricsLog(tmp_path)
    log.path.unlink()
    log.path.symlink_to("/dev/full")
    with pytest.raises(UserError) as error:
        log.write({"step": 1})
    assert str(error.value) == f"{log.path}: {FULL}"


@pytest.mark.parametrize("kind", [lambda: OSError(28, os.strerror(28)), lambda: OSError(122, os.strerror(122)),
                                  lambda: SafetensorError("I/O error: No space left on device (os error 28)")])
def test_an_export_on_a_full_disk_leaves_the_one_before(checkpoints, tmp_path, monkeypatch, kind):
    def export(rank):
        tensors = {"high.blocks.0.attn1.to_q.lora_A.weight": torch.zeros(rank, 64),
                   "high.blocks.0.attn1.to_q.lora_B.weight": torch.zeros(64, rank)}
        wan_model.export(tmp_path, wan_model.describe(checkpoints["i2v"]), tensors, rank, 1.0, "to_q", {})

    def fill_up(*_, **__):
        raise kind()

    wan = wan_model.describe(checkpoints["i2v"])
    for folder, again, library in (
        ("lora", lambda: export(3), adapters),
        ("model", lambda: wan_model.export(tmp_path, wan, {"high.x": torch.zeros(2)}, 0, 0, "", {}), wan_model),
    ):
        again() if folder == "model" else export(2)
        before = {name: (tmp_path / name).read_bytes() for name in files_of(tmp_path)}
        with monkeypatch.context() as patch, pytest.raises(UserError) as error:
            patch.setattr(library, "save_file" if folder == "lora" else "save_torch_state_dict", fill_up)
            again()
        assert str(error.value).startswith(f"{tmp_path}/{folder}: cannot write there (")
        assert str(error.value).endswith("): free some space and run again")
        assert {name: (tmp_path / name).read_bytes() for name in files_of(tmp_path)} == before


def test_a_folder_that_takes_no_files(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^.*/file/x.mp4: cannot write there \(.*\): choose another folder$"):
        video.write_mp4(tmp_path / "file/x.mp4", FRAMES, 8)
    (tmp_path / "x.mp4/kept").mkdir(parents=True)  # a file never takes the place of a folder
    with pytest.raises(UserError, match=r"^.*/x.mp4: cannot write there \(Is a directory\): choose another folder$"):
        video.write_mp4(tmp_path / "x.mp4", FRAMES, 8)
    assert files_of(tmp_path) == ["file"] and (tmp_path / "x.mp4/kept").is_dir()
    with pytest.raises(ZeroDivisionError), guard.whole(tmp_path / "other") as temporary:  # not the disk
        (temporary / "a").mkdir(parents=True)
        _ = 1 / 0
    assert not [*tmp_path.glob("other*")]


@pytest.mark.parametrize("text, reason", [
    ("[" * 2000, "recursion"), ('{"a": ' * 2000 + "1" + "}" * 2000, "recursion"), ('{"a": 1', "Expecting"),
    ("[1]", "no object"), ("", "Expecting value"), ('{"a": "\\ud83d"}', "surrogates not allowed"),
    (b'{"a": "\xff"}', "can't decode byte 0xff"), (b"\x80\x05PK", "can't decode"), ("9" * 5000, "integer string"),
])
def test_json_that_is_none(tmp_path, text, reason):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "a.json").write_bytes(content)
    for read in (lambda: guard.read_json(tmp_path / "a.json", "a thing"),
                 lambda: guard.parse_json(text, tmp_path / "a.json", "a thing")):
        with pytest.raises(UserError) as error:
            read()
        line = str(error.value)
        assert line.startswith(f"{tmp_path}/a.json: got ") and reason in line and line.endswith("), want a thing")
        assert "\n" not in line and len(line) < 400
    with pytest.raises(UserError, match="none.json: No such file or directory: want a thing"):
        guard.read_json(tmp_path / "none.json", "a thing")


def test_json_of_other_tools(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"é": ["红", 1.5]}, ensure_ascii=False).encode())
    assert guard.read_json(tmp_path / "a.json", "") == {"é": ["红", 1.5]}
    latent_cache.write_json(tmp_path / "b.json", {"é": 1})
    assert (tmp_path / "b.json").read_bytes() == '{"é": 1}\n'.encode()


ASCII = ENVIRONMENT | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0")


def test_an_ascii_terminal_and_locale(tmp_path):
    """Files with names, settings and contents that aren't ASCII, and bars, where nothing but ASCII can be shown."""
    (tmp_path / "schön.py").write_text('prompt = "红 é"\n', encoding="utf-8")
    (tmp_path / "script.py").write_text("""
from pathlib import Path
from tqdm import tqdm
from configurator import configure
prompt, folder = "", ""
prompt = ""
folder = ""
config = configure(globals())
Path(folder).mkdir()
Path(folder, "ü").write_text(prompt)
print(prompt, folder)
for _ in tqdm(range(3), desc=prompt):
    pass
raise OSError(28, "No space left on device", folder)
""")
    command = [sys.executable, "script.py", "schön.py", "--folder=ordner ä"]
    run = subprocess.run(command, cwd=tmp_path, env=ASCII, capture_output=True, timeout=60)
    assert run.stdout.decode("ascii") == "\\u7ea2 \\xe9 ordner \\xe4\n"
    assert "\\u7ea2 \\xe9: 100%" in run.stderr.decode("ascii")
    assert run.stderr.decode().splitlines()[-1].startswith("error: [Errno 28] No space left on device: 'ordner \\xe4'")
    assert (tmp_path / "ordner ä/ü").read_bytes() == "红 é".encode()
    run = subprocess.run([*command[:3], b"--folder=\xe4"], cwd=tmp_path, env=ASCII, capture_output=True, timeout=60)
    assert run.returncode == 1 and run.stderr.count(b"\n") == 1
    assert run.stderr.decode("ascii").startswith("error: --folder='\\udce4': got what is no letter in UTF-8, want text")
    for own in (["-E"], ["-X", "utf8=0"]):  # it can't be begun anew: no loop
        run = subprocess.run([sys.executable, *own, "-c", "import guard; guard.speak_utf8(); print('\\xe9')"],
                             cwd=REPOSITORY, env=ASCII, capture_output=True, timeout=60)
        assert run.returncode == 0 and run.stdout in (b"\\xe9\n", "é\n".encode())


def test_a_cache_prepared_in_an_ascii_locale_is_whole(tmp_path):
    tiny.make_robot_hdf5(tmp_path / "robôt.hdf5", num_demos=12)
    tiny.make_checkpoint(tmp_path / "modèle", "i2v", tiny.make_vae(), *tiny.make_text_encoder())
    command = [sys.executable, REPOSITORY / "prepare_robocasa.py", "--model=modèle", "--data=robôt.hdf5",
               "--cache_dir=cäche", "--negative_prompt=色调", "--device=cpu"]
    for kept in (0, 12):
        run = subprocess.run(command, cwd=tmp_path, env=ASCII, capture_output=True, timeout=120)
        assert run.returncode == 0, run.stderr
        assert f"{12 - kept} windows encoded, {kept} kept" in run.stdout.decode("ascii")
    assert "色调" in (tmp_path / "cäche/condition/text/fingerprint.json").read_text(encoding="utf-8")
    assert "色调" in guard.read_json(Path(tmp_path, "cäche/condition/text/index.json"), "")["prompts"]
