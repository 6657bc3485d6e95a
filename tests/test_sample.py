"""sample.py with pointmaps: where the box comes from, and a whole HCPT sample (test_train.py has its other uses)."""

import json
import re

import pytest
import torch

import tiny
import validate
from helpers import refusal, script

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """12 demos, a smaller model than tiny.py's, its cache with pointmaps, and a LoRA trained on it for two steps."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(num_layers=2, num_attention_heads=2, ffn_dim=128).items():
            patch.setitem(tiny.TRANSFORMER, name, value)
        tiny.make_robot_hdf5(folder / "robot.hdf5", num_demos=12)
        tiny.make_checkpoint(folder / "i2v", "i2v", tiny.make_vae(), *tiny.make_text_encoder())
    paths = dict(model=folder / "i2v", data=folder / "robot.hdf5", cache_dir=folder / "cache")
    script("prepare_robocasa.py", **paths, pointmaps=True)
    quick = dict(max_steps=2, eval_interval=0, num_val_videos=0, num_val_windows=1, val_sigmas=1, warmup_steps=1)
    script("train_i2v_sft.py", **paths, **quick, pointmaps=True, out_dir=folder / "run", batch_size=4, lora_rank=4,
           lr=0.05)
    settings = paths | dict(pointmaps=True, num_inference_steps=2, guidance_scale=2.0, guidance_scale_2=1.0,
                            window_stride=4)
    lines = [f"{name} = {str(value)!r}" if name in paths else f"{name} = {value!r}" for name, value in settings.items()]
    (folder / "robot.py").write_text("\n".join(lines) + "\n")  # the config file of the run
    return folder


@pytest.fixture
def sample(world, tmp_path):
    """Runs sample.py with the run's config file -> its globals, and {name: value} of the scores that it printed."""

    def run(**settings):
        names, printed = script("sample.py", world / "robot.py", demo="demo_7", out=tmp_path / "x", **settings)
        assert (tmp_path / "x.mp4").stat().st_size > 500 and (tmp_path / "x.png").stat().st_size > 500
        return names, {name: float(value) for name, value in re.findall(r"(\w+) (-?[\d.]+)(?:,|$)", printed, re.M)}

    return run


def box_of(world):
    return json.loads((world / "cache/pointmap/index.json").read_text())["box"]


def test_a_lora_is_sampled_in_the_box_of_the_cache(world, sample):
    names, scores = sample(lora=world / "run/lora")
    assert names["box"] == box_of(world) and not names["workspace_box"]
    assert names["latents"].shape == (1, 16, 2, 8, 8)  # two rows of two views
    assert list(names["cells"]) == [(row, view) for row in ("rgb", "pointmap") for view in names["demos"].views]

    truth, valid = validate.ground_truth(names["demos"], names["window"], names["config"], box_of(world), "cpu")
    wanted = validate.scores(names["cells"], truth, valid, box_of(world))
    assert {"psnr", "ssim", "point_mm", "point_median_mm"} <= wanted.keys()
    assert {name: scores[name] for name in wanted} == pytest.approx(wanted, abs=6e-4)
    base, _ = sample()  # --model and the cache alone
    assert base["box"] == box_of(world) and not torch.allclose(base["latents"], names["latents"], atol=1e-3)


def test_the_box_is_taken_from_the_settings_then_the_checkpoint_then_the_cache(world, sample, tmp_path):
    assert sample(workspace_box="-1,-1,0,1,1,2", lora=world / "run/lora")[0]["box"] == [-1, -1, 0, 1, 1, 2]
    other = tmp_path / "pointmap/index.json"
    other.parent.mkdir()
    other.write_text(json.dumps({"box": [-2, -2, 0, 2, 2, 2]}))
    checkpoint = world / "run/ckpt/step_000002"
    assert sample(cache_dir=tmp_path, checkpoint=checkpoint)[0]["box"] == box_of(world)
    assert sample(cache_dir=tmp_path, lora=world / "run/lora")[0]["box"] == [-2, -2, 0, 2, 2, 2]


def test_without_a_box_the_three_places_are_named(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world / "cache")  # no cache_dir is not the current folder
    for cache_dir in ("", tmp_path):
        line = refusal("sample.py", world / "robot.py", demo="demo_7", cache_dir=cache_dir, out=tmp_path / "no")
        assert all(name in line for name in ("workspace_box", "checkpoint", f"cache_dir={str(cache_dir)!r}"))
    line = refusal("sample.py", world / "robot.py", demo="demo_7", workspace_box="0,0,0,1,1", out=tmp_path / "no")
    assert "workspace_box=0,0,0,1,1: want x0,y0,z0,x1,y1,z1 in metres" in line
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_write_is_found_before_sampling(world, tmp_path):
    (tmp_path / "file").write_text("")
    line = refusal("sample.py", world / "robot.py", demo="demo_7", out=tmp_path / "file/x")
    assert line.startswith(f"error: out={tmp_path}/file/x: ") and "want a folder that can be written" in line
    line = refusal("sample.py", world / "robot.py", demo="demo_99", out=tmp_path / "x")
    assert "demo=demo_99: not in " in line and "which has 12 demos: demo_" in line
