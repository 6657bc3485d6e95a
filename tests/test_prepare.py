"""prepare_robocasa.py from recording to cache: what is in it, when it is refused, and that it continues."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

import encoders
import latent_cache
import tiny
from data import join_cells, open_demos, point_cell, rgb_cell
from guard import UserError
from helpers import REPOSITORY, held_by_another, script
from latent_cache import LatentCache, collate
from read_hdf5 import RobotDemos
from recordings import Window

LEFT, RIGHT = VIEWS = ["robot0_agentview_left", "robot0_agentview_right"]
BOX = f"-0.4,-0.4,{tiny.TABLE_HEIGHT - 0.2:.2f},0.4,0.4,{tiny.TABLE_HEIGHT + 0.3:.2f}"
DEPTH = f"data/demo_9/obs/{LEFT}_depth"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A recording of 12 demos, and checkpoints of the three kinds that lack only their transformers' weights."""
    folder = tmp_path_factory.mktemp("world")
    tiny.make_robot_hdf5(folder / "robot.hdf5", num_demos=12)
    tokenizer, text_encoder = tiny.make_text_encoder()
    vae = encoders.AutoencoderDCT(latents_mean=[0.1] * 16, latents_std=[0.5] * 16)
    for kind in ("i2v", "ti2v", "t2v"):
        tiny.make_checkpoint(folder / kind, kind, vae, tokenizer, text_encoder)
    return folder


@pytest.fixture
def prepare(world, tmp_path, monkeypatch):
    """Returns a function that runs the script in this process (with world and a fresh cache) and gives its globals."""

    def run(**settings):
        settings = {"model": world / "i2v", "data": world / "robot.hdf5", "cache_dir": tmp_path / "cache"} | settings
        flags = [f"--{name}={value}" for name, value in settings.items()]
        monkeypatch.setattr(sys, "argv", ["prepare_robocasa.py", *flags])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure() replaces it
        monkeypatch.delenv("RANK", raising=False)
        return runpy.run_path(str(REPOSITORY / "prepare_robocasa.py"), run_name="__main__")

    return run


def contents(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def trainer_settings(config, **changes):
    """What train_i2v_sft.py knows: the shared settings, without the dtypes of the preparation."""
    own = ("force", "inspect", "check_recordings", "encode_batch", "vae_dtype", "text_dtype", "cache_dtype",
           "device")
    return {name: value for name, value in config.items() if name not in own} | changes


def opened(config, kind="i2v"):
    """The cache, compared with the recordings as they are now."""
    return LatentCache(config, kind, open_demos(config))


# ------------------------------------------------------------------------------------------------- what is in the cache


def test_cells_are_encoded_one_by_one_and_laid_out_as_a_grid(world, prepare):
    config = prepare(pointmaps=True, workspace_box=BOX, negative_prompt="blurred")["config"]
    cache = opened(trainer_settings(config))
    demos = RobotDemos(world / "robot.hdf5", VIEWS, pointmaps=True)
    assert [w.key for w in cache.train + cache.val] == [w.key for w in demos.windows(5, 4)]
    assert {w.split for w in cache.train} == {"train"}
    assert [w.demo for w in cache.val] == ["demo_11"]

    vae = encoders.load_vae(config["model"])
    window = cache.train[5]
    sample = cache.sample(window)
    assert sample["latents"].shape == sample["condition"].shape == (16, 2, 8, 8)
    latents, condition = {}, {}
    for modality in ("rgb", "pointmap"):
        for view in VIEWS:
            if modality == "rgb":
                cell = rgb_cell(demos.rgb(window, view, 5), 16, 16)
            else:
                cell = point_cell(*demos.points(window, view, 5), cache.box, 16, 16)[0]
            latents[modality, view] = encoders.encode(vae, cell[None])[0]
            clip = torch.cat([cell[:, :1], torch.zeros(3, 4, 16, 16)], 1)  # the given frame, then mid-grey
            condition[modality, view] = encoders.encode(vae, clip[None])[0]
    assert torch.allclose(sample["latents"], join_cells(latents), atol=1e-5)
    assert torch.allclose(sample["condition"], join_cells(condition), atol=1e-5)
    assert cache.box == [float(number) for number in BOX.split(",")]

    tokenizer, text_encoder = encoders.load_text_encoder(config["model"])
    prompt = demos.prompts[window.demo]
    expected = encoders.encode_text(tokenizer, text_encoder, [prompt, "", "blurred"], 16)
    got = cache.text[[sample["prompt_index"], cache.empty_index, cache.negative_index]]
    assert cache.prompts[sample["prompt_index"]] == prompt
    assert torch.allclose(got, expected, atol=1e-2)  # bfloat16, another batch

    batch = collate([sample, cache.sample(cache.train[6])], cache.text, "cpu")
    assert [tuple(tensor.shape) for tensor in batch] == [(2, 16, 2, 8, 8), (2, 16, 2, 8, 8), (2, 16, 64)]
    assert collate([sample], cache.text, "cpu", given=False)[1] is None


@pytest.mark.parametrize("kind", ["ti2v", "t2v"])
def test_the_other_kinds_are_given_the_first_frame_alone(world, prepare, kind):
    config = prepare(model=world / kind, cache_dtype="bfloat16")["config"]
    cache = opened(trainer_settings(config), kind)
    sample = cache.sample(cache.train[0])
    assert sample["condition"].shape == (16, 1, 4, 8)
    assert sample["condition"].dtype == torch.float32
    assert torch.allclose(sample["condition"][:, 0], sample["latents"][:, 0], atol=0.05)  # its own block in the DCT
    with pytest.raises(UserError, match=f"condition/rgb is stale: kind was {kind}, now i2v"):
        opened(trainer_settings(config))


def test_the_percentile_box_cuts_the_tails(world, prepare):
    box = opened(prepare(pointmaps=True, box_percentile=5)["config"]).box
    demos = RobotDemos(world / "robot.hdf5", VIEWS, pointmaps=True)
    points = [demos.points(Window(d, 0, 5, ""), v, 5) for d in demos.splits if d != "demo_11" for v in VIEWS]
    points = np.concatenate([xyz[valid] for xyz, valid in points])
    assert box == pytest.approx(np.percentile(points, [5, 95], axis=0).ravel(), abs=0.05)


# ---------------------------------------------------------------------------------- continued, shared, refused, rebuilt


def test_an_interrupted_preparation_continues(prepare, tmp_path):
    config = prepare(pointmaps=True)["config"]
    cache = tmp_path / "cache"
    whole = contents(cache)
    done = cache / "rgb/demo_0_00000.safetensors"
    stamp = done.stat().st_mtime_ns
    for name in ("rgb/index.json", "rgb/demo_4_00000.safetensors", "condition/pointmap/demo_7_00000.safetensors"):
        (cache / name).unlink()
    (cache / "rgb/demo_4_00000.safetensors.tmp123").write_bytes(b"half")
    with pytest.raises(UserError, match="rgb is unfinished: run prepare_robocasa.py"):
        opened(config)
    result = prepare(pointmaps=True)
    assert [w.key for w in result["todo"]["rgb"]] == ["demo_4_00000"]
    assert contents(cache) == whole
    assert done.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_stump_is_made_again(prepare, tmp_path, length):
    """A file is done when it is whole, whatever its name says."""
    prepare(pointmaps=True)
    whole = contents(tmp_path / "cache")
    stumps = ("rgb/demo_4_00000", "pointmap/demo_0_00000", "condition/rgb/demo_11_00000", "condition/text/embeddings")
    for name in stumps:
        path = tmp_path / f"cache/{name}.safetensors"
        path.write_bytes(path.read_bytes()[:length])
    result = prepare(pointmaps=True)
    todo = {unit: len(items) for unit, items in result["todo"].items() if unit != "condition/text"}
    assert todo == {"rgb": 1, "condition/rgb": 1, "pointmap": 1, "condition/pointmap": 0}
    assert contents(tmp_path / "cache") == whole


def test_pointmaps_are_added_to_an_rgb_cache(prepare, tmp_path):
    prepare()
    rgb = contents(tmp_path / "cache")
    assert {name.split("/")[0] for name in rgb} == {"rgb", "condition"}
    result = prepare(pointmaps=True)
    assert not result["todo"]["rgb"]
    assert not result["todo"]["condition/text"]
    both = contents(tmp_path / "cache")
    assert {name: both[name] for name in rgb} == rgb
    assert opened(result["config"]).modalities == ["rgb", "pointmap"]


def test_a_stale_cache_is_refused_and_rebuilt(prepare, tmp_path):
    config = prepare()["config"]
    before = contents(tmp_path / "cache")
    with pytest.raises(UserError, match="rgb is stale: cell_height was 16, now 32: prepare in another cache_dir"):
        prepare(cell_height=32)
    with pytest.raises(UserError, match="rgb is stale: cell_height was 16, now 32"):
        opened(trainer_settings(config, cell_height=32))
    with pytest.raises(UserError, match="text is stale: max_text_tokens was 16, now 8"):
        prepare(max_text_tokens=8)
    assert contents(tmp_path / "cache") == before  # a refusal touches nothing

    result = prepare(max_text_tokens=8, force=True)  # only what is stale
    assert [unit for unit in result["stale"] if result["stale"][unit]] == ["condition/text"]
    assert opened(result["config"]).text.shape[1] == 8
    assert contents(tmp_path / "cache/rgb") == {k[4:]: v for k, v in before.items() if k.startswith("rgb/")}
    assert opened(prepare(cell_height=32, max_text_tokens=8, force=True)["config"]).train


def test_another_recording_or_vae_makes_the_cache_stale(world, prepare, tmp_path):
    config = prepare(pointmaps=True)["config"]
    recording = tmp_path / "robot.hdf5"
    shutil.copy(world / "robot.hdf5", recording)
    opened(trainer_settings(config, data=str(recording)))  # a copy elsewhere is the same recording
    with h5py.File(recording, "r+") as file:
        file[DEPTH][0, 0, 0] += 1
    with pytest.raises(UserError, match="rgb is stale: data_content was"):
        opened(trainer_settings(config, data=str(recording)))
    shutil.copytree(world / "i2v/vae", tmp_path / "model/vae")
    shutil.copytree(world / "i2v/text_encoder", tmp_path / "model/text_encoder")
    shutil.copytree(world / "i2v/tokenizer", tmp_path / "model/tokenizer")
    opened(trainer_settings(config, model=str(tmp_path / "model")))  # and so is a copy of the checkpoint
    path = tmp_path / "model/vae/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latents_std": [1.0] * 16}))
    with pytest.raises(UserError, match="rgb is stale: vae was"):
        opened(trainer_settings(config, model=str(tmp_path / "model")))
    with pytest.raises(UserError, match="pointmap is stale: workspace_box was , now 0,0,0,1,1,1"):
        opened(trainer_settings(config, workspace_box="0,0,0,1,1,1"))


def test_what_is_small_is_compared_whole(world, prepare, tmp_path, monkeypatch):
    """Of a large recording only samples are: an edit in place of a camera or of the split would fall between them."""
    monkeypatch.setattr("read_hdf5.content_hash", lambda paths: "the same samples")
    config = prepare(pointmaps=True)["config"]
    recording = tmp_path / "robot.hdf5"
    trainer = trainer_settings(config, data=str(recording))

    def edited(change):
        shutil.copy(world / "robot.hdf5", recording)
        with h5py.File(recording, "r+") as file:
            change(file)
        return recording

    def move(file):  # one camera of one demo by 10 cm
        file[f"data/demo_9/obs/{RIGHT}_extrinsics"][:, 0, 3] += 0.1

    def exchange(file):  # a training demo for the held-out one
        train, valid = file["mask/train"][()], file["mask/valid"][()]
        train[3], valid[0] = valid[0], train[3]
        file["mask/train"].write_direct(train)
        file["mask/valid"].write_direct(valid)

    edited(move)
    opened(trainer | {"pointmaps": False})  # which RGB doesn't see
    with pytest.raises(UserError, match="pointmap is stale: points was .*; cameras was"):
        opened(trainer)
    edited(lambda file: file["data/demo_9"].attrs.modify("ep_meta", '{"lang": "a red ball stays"}'))
    with pytest.raises(UserError, match="condition/text is stale: prompts was .*: prepare in another cache_dir"):
        opened(trainer)
    edited(exchange)
    with pytest.raises(UserError, match="rgb is stale: masks was"):
        opened(trainer)


def test_an_older_cache_is_compared_in_what_it_recorded(world, prepare, tmp_path):
    """And stays as old as it is: what it did not record isn't known of what it holds."""
    config = prepare(pointmaps=True)["config"]
    files = [path for path in (tmp_path / "cache").rglob("fingerprint.json")]
    for path in files:
        recorded = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in recorded.items() if k not in ("prompts", "frames", "points")}))
    before = contents(tmp_path / "cache")
    assert opened(prepare(pointmaps=True)["config"]).train and opened(config).train
    assert len(files) == 5 and contents(tmp_path / "cache") == before


def test_held_out_windows_begin_with_one_of_each_demo(prepare):
    result = prepare(val_split="", val_demos=3, window_stride=1)
    cache = opened(result["config"])
    assert len(cache.val) > 6 and len({window.demo for window in cache.val[:3]}) == 3
    windows = [window for window in result["windows"] if window.split == "val"]
    assert sorted(cache.val) == sorted(windows) and cache.val != windows


def test_a_preparation_looks_at_a_cache_when_nobody_else_changes_it(prepare, tmp_path, monkeypatch):
    """Else it would go on with what another had not finished when it looked."""
    seen = []
    real = latent_cache.check_unit
    monkeypatch.setattr("latent_cache.check_unit", lambda folder, *args: seen.append(
        (folder.parent / ".lock").exists() or (folder.parent.parent / ".lock").exists()) or real(folder, *args))
    prepare()
    assert len(seen) >= 3 and all(seen)


def test_a_cache_that_is_added_to_is_unfinished_meanwhile(prepare, tmp_path, monkeypatch):
    """Killed then, it is not taken for what it was."""
    config = prepare()["config"]
    (tmp_path / "cache/rgb/demo_4_00000.safetensors").unlink()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(encoders, "encode", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
        prepare()
    with pytest.raises(UserError, match="rgb is unfinished: run prepare_robocasa.py"):
        opened(config)
    assert opened(prepare()["config"]).train


def test_a_cache_dir_is_one_preparations(prepare, tmp_path):
    with held_by_another(tmp_path / "cache"):
        with pytest.raises(UserError, match=f"cache_dir={tmp_path}/cache: another run is writing there"):
            prepare()
        assert not contents(tmp_path / "cache")
    prepare()


def test_a_damaged_file_is_named(prepare, tmp_path):
    config = prepare()["config"]
    path = tmp_path / "cache/rgb/demo_0_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    cache = opened(config)
    with pytest.raises(UserError, match="demo_0_00000.safetensors: .*delete it and run prepare_robocasa.py again"):
        cache.sample(cache.train[0])


# ---------------------------------------------------------------------------------------- bad input: nothing is written


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cell_height": 20}, r"cell_height=20: want a multiple of 8 \(16 or 24\)"),
        ({"num_frames": 6}, r"num_frames=6: want 4n\+1 \(5 or 9\)"),
        ({"num_frames": 9}, "no train windows left"),
        ({"views": f"{LEFT},front"}, "views=front: demo_0 of .* has the images"),
        ({"data": "none.hdf5"}, "data=none.hdf5: no such file"),
        ({"data": REPOSITORY}, "a folder, want an HDF5 file"),
        ({"cache_dir": REPOSITORY / "README.md/x"}, "cache_dir=.*README.md/x: cannot write there .Not a directory"),
        ({"vae_dtype": "float16"}, "vae_dtype=float16: want float32 or bfloat16"),
        ({"window_stride": 0}, "window_stride=0: want at least 1"),
        ({"pointmaps": True, "workspace_box": "0,0,0,1,1"}, "workspace_box=0,0,0,1,1: want x0,y0,z0,x1,y1,z1"),
        ({"pointmaps": True, "workspace_box": "5,5,5,6,6,6"}, "holds none of the points, which span"),
        ({"pointmaps": True, "box_percentile": 50.0}, "box_percentile=50.0: want 0 to below 50"),
        ({"inspect": True, "pointmaps": True, "box_percentile": 150.0}, "box_percentile=150.0: want 0 to below 50"),
        ({"cell_height": 2**24, "cell_width": 2**24}, "GB free: choose another disk, or cache_dtype=bfloat16"),
    ],
)
def test_bad_settings(prepare, tmp_path, settings, message):
    with pytest.raises(UserError, match=message) as error:
        prepare(**settings)
    assert "\n" not in str(error.value)
    assert not contents(tmp_path / "cache")


def test_nan_depth_in_the_last_demo_is_found_before_anything_is_written(world, prepare, tmp_path):
    path = tmp_path / "robot.hdf5"
    shutil.copy(world / "robot.hdf5", path)
    with h5py.File(path, "r+") as file:
        file[DEPTH][2, 3, 4] = np.nan
    with pytest.raises(UserError, match="demo_9/robot0_agentview_left_depth: got NaN in frame 2"):
        prepare(data=path, pointmaps=True)
    assert not contents(tmp_path / "cache")


def test_a_full_disk_is_one_line_and_leaves_whole_files(prepare, tmp_path, monkeypatch):
    written, write_bytes = [], Path.write_bytes

    def fill_up(path, content):
        written.append(path)
        if len(written) > 6:
            write_bytes(path, content[:10])
            raise OSError(28, os.strerror(28))
        return write_bytes(path, content)

    full = "cannot write there .No space left on device.: free"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=full):
        patch.setattr(Path, "write_bytes", fill_up)
        prepare()
    files = contents(tmp_path / "cache")
    assert len(files) == 6
    assert all(safetensors.torch.load(file) for name, file in files.items() if name.endswith(".safetensors"))
    assert opened(prepare()["config"]).train  # it continues


def test_a_missing_text_encoder_is_found_before_the_vae(world, prepare, tmp_path, monkeypatch):
    used = []
    for name in ("load_vae", "load_text_encoder"):
        real = getattr(encoders, name)
        monkeypatch.setattr(encoders, name, lambda *args, n=name, real=real: used.append(n) or real(*args))
    shutil.copytree(world / "i2v", tmp_path / "model")
    shutil.rmtree(tmp_path / "model/text_encoder")
    with pytest.raises(UserError, match="can't load its text_encoder"):
        prepare(model=tmp_path / "model")
    assert used == ["load_text_encoder"]
    assert not contents(tmp_path / "cache")

    prepare()
    text = contents(tmp_path / "cache/condition/text")

    # Killed among the windows: the text is there already, and is kept.
    (tmp_path / "cache/condition/text/index.json").unlink()
    (tmp_path / "cache/condition/rgb/demo_4_00000.safetensors").unlink()
    used.clear()
    assert opened(prepare()["config"]).train
    assert used == ["load_vae"]
    assert contents(tmp_path / "cache/condition/text") == text

    # A rebuild that fails leaves what was there.
    before = contents(tmp_path / "cache")
    with pytest.raises(UserError, match="can't load its text_encoder"):
        prepare(model=tmp_path / "model", force=True)
    assert contents(tmp_path / "cache") == before


def test_inspection(world, prepare, tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as leave:
        prepare(inspect=True, model="none")  # looks at recordings alone
    assert not leave.value.code
    assert capsys.readouterr().out.splitlines()[-1].split() == ["verdict", "PASS"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["inspect.png"]
    monkeypatch.chdir(tmp_path)  # without a cache_dir: never into the default one, which is the tiny world's
    with pytest.raises(SystemExit):
        script("prepare_robocasa.py", data=world / "robot.hdf5", inspect=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["inspect_robot.png"]

    path = tmp_path / "robot.hdf5"
    shutil.copy(world / "robot.hdf5", path)
    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            for view in VIEWS:
                demo[f"obs/{view}_depth"][...] *= 1000
    millimetres = shutil.copy(path, tmp_path / "mm.hdf5")
    with pytest.raises(UserError, match="verdict FAIL: depth is in millimetres"):
        prepare(data=path, inspect=True, pointmaps=True)
    with pytest.raises(SystemExit) as leave:
        prepare(data=path, inspect=True)
    assert not leave.value.code
    assert "PASS for RGB alone: depth is in millimetres" in capsys.readouterr().out
    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            for name in [name for name in demo["obs"] if not name.endswith("_image")]:
                del demo[f"obs/{name}"]
    with pytest.raises(SystemExit):
        prepare(data=path, inspect=True)
    assert "PASS for RGB alone" in capsys.readouterr().out

    settings = dict(data=millimetres, pointmaps=True, cache_dir=tmp_path / "other")
    with pytest.raises(UserError, match="depth is in millimetres.*--check_recordings=False prepares it all the same"):
        prepare(**settings)
    assert not contents(tmp_path / "other")
    prepare(**settings | {"pointmaps": False})  # RGB has nothing to do with it
    prepare(**settings, check_recordings=False)
    assert (tmp_path / "other/pointmap/index.json").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("image", lambda x: x[:, ::-1], f"images of {LEFT} and {RIGHT} are upside down: they match the depth then"),
        ("image", lambda x: 0 * x, f"{LEFT} is black or of one colour in 40 of the 40 frames looked at; {RIGHT} is"),
        ("image", lambda x: 0 * x + np.uint8([9, 90, 200]), f"{LEFT} is black or of one colour in 40 of the 40"),
        ("depth", lambda x: x * np.float32(np.nan), ""),
        ("depth", lambda x: (x * 1000).astype(np.uint16), ""),
        ("depth", lambda x: x[:, :20], ""),
        ("depth", lambda x: x[:, ::-1], ""),
        ("intrinsics", lambda x: 0 * x, ""),
        ("extrinsics", lambda x: x[:-1], ""),
    ],
)
def test_rgb_alone_is_checked_with_depth_and_needs_none(world, prepare, tmp_path, name, change, message):
    path = shutil.copy(world / "robot.hdf5", tmp_path / "robot.hdf5")
    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            for view in VIEWS:
                content = change(demo[f"obs/{view}_{name}"][()])
                del demo[f"obs/{view}_{name}"]
                demo[f"obs/{view}_{name}"] = content
    if message:
        with pytest.raises(UserError, match=message):
            prepare(data=path)
        assert not contents(tmp_path / "cache")
        with pytest.raises(UserError, match=f"verdict FAIL: {message}"):
            prepare(data=path, inspect=True)
        prepare(data=path, check_recordings=False)
    else:
        prepare(data=path)
        with pytest.raises(SystemExit) as leave:
            prepare(data=path, inspect=True)
        assert not leave.value.code
        with pytest.raises(UserError):
            prepare(data=path, pointmaps=True)


# -------------------------------------------------------------------------------------------------------- as it is used


def test_two_ranks_write_the_cache_of_one_and_errors_are_one_line(world, prepare, tmp_path):
    prepare(pointmaps=True)
    alone = contents(tmp_path / "cache")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    settings = [f"--model={world / 'i2v'}", f"--data={world / 'robot.hdf5'}", f"--cache_dir={tmp_path / 'two'}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    script = str(REPOSITORY / "prepare_robocasa.py")
    subprocess.run([*torchrun, script, *settings, "--pointmaps=True"], check=True, env=environment, timeout=300)
    assert contents(tmp_path / "two") == alone

    command = [sys.executable, script, *settings, "--views=front"]
    failed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("error: views=front: demo_0")
    assert "Traceback" not in failed.stderr
