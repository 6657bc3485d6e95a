"""sample.py: what it takes from the weights it is given, what it refuses, pointmaps (test_train.py has its other uses).
"""

import json
import re
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import adapters
import data as robot_data
import model as wan_model
import recordings
import tiny
import validate
import video
from helpers import files_of, refusal, script

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """12 demos, a smaller model than tiny.py's, its cache with pointmaps, and a LoRA trained on it for two steps."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(num_layers=2, num_attention_heads=2, ffn_dim=128).items():
            patch.setitem(tiny.TRANSFORMER, name, value)
        tiny.make_robot_hdf5(folder / "robot.hdf5", num_demos=12)
        parts = (tiny.make_vae(), *tiny.make_text_encoder())
        tiny.make_checkpoint(folder / "i2v", "i2v", *parts)
        tiny.make_checkpoint(folder / "other", "i2v", *parts, seed=1)
        tiny.make_checkpoint(folder / "ti2v", "ti2v", *parts)
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
    """Runs sample.py with the run's config file -> its globals, and {name: value} of the scores that it printed, which
    stand between their floor and ceiling."""

    def run(**settings):
        names, printed = script("sample.py", world / "robot.py", demo="demo_7", out=tmp_path / "x", **settings)
        assert (tmp_path / "x.mp4").stat().st_size > 500 and (tmp_path / "x.png").stat().st_size > 500
        return names, {name: float(value) for name, value in re.findall(r"(\w+) (-?[\d.]+) \(", printed)}

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
    assert {name: scores[name] for name in wanted} == pytest.approx(wanted, rel=1e-3)  # four digits are printed
    still = {name: cell[:, :1].expand_as(cell) for name, cell in truth.items()}
    for bound, cells in (("floor", still), ("ceiling", truth)):  # after the VAE's round trip, which loses little
        bounds = validate.scores(cells, truth, valid, box_of(world))
        names[bound] = names["bounds"][f"{bound}/psnr"]
        assert names[bound] == pytest.approx(bounds["psnr"], rel=0.02) or bound == "ceiling"
    assert names["floor"] + 5 < names["ceiling"]
    base, _ = sample()  # --model and the cache alone
    assert base["box"] == box_of(world) and not torch.allclose(base["latents"], names["latents"], atol=1e-3)


def test_it_tells_whether_the_demo_was_trained_on(world, tmp_path):
    """And puts its scores between their floor and ceiling."""
    common = dict(model=world / "i2v", num_inference_steps=1, data=world / "robot.hdf5", out=tmp_path / "x")
    splits = robot_data.RobotDemos(world / "robot.hdf5", "robot0_agentview_left").splits
    for split, words in (("train", "training"), ("val", "held-out")):
        demo = next(name for name in splits if splits[name] == split)
        names, printed = script("sample.py", **common, demo=demo)
        assert re.search(rf"^{demo} of the {words} demos: psnr [\d.]+ \([\d.]+\.\.[\d.]+\) \| ", printed, re.M)
        assert {"floor/psnr", "ceiling/ssim"} <= names["bounds"].keys()


def test_the_box_is_taken_from_the_settings_then_the_weights_then_the_cache(world, sample, tmp_path):
    assert sample(workspace_box="-1,-1,0,1,1,2", lora=world / "run/lora")[0]["box"] == [-1, -1, 0, 1, 1, 2]
    other = tmp_path / "pointmap/index.json"
    other.parent.mkdir()
    other.write_text(json.dumps({"box": [-2, -2, 0, 2, 2, 2]}))
    checkpoint = world / "run/ckpt/step_000002"
    assert sample(cache_dir=tmp_path, checkpoint=checkpoint)[0]["box"] == box_of(world)
    assert sample(cache_dir=tmp_path, lora=world / "run/lora")[0]["box"] == box_of(world)
    assert sample(cache_dir=tmp_path)[0]["box"] == [-2, -2, 0, 2, 2, 2]  # --model says nothing


def test_without_a_box_the_three_places_are_named(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world / "cache")  # no cache_dir is not the current folder
    for cache_dir in ("", tmp_path):
        line = refusal("sample.py", world / "robot.py", demo="demo_7", cache_dir=cache_dir, out=tmp_path / "no")
        assert all(name in line for name in ("workspace_box", "checkpoint", f"cache_dir={str(cache_dir)!r}"))
    line = refusal("sample.py", world / "robot.py", demo="demo_7", workspace_box="0,0,0,1,1", out=tmp_path / "no")
    assert "workspace_box=0,0,0,1,1: want x0,y0,z0,x1,y1,z1 in metres" in line
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_write_and_what_is_no_video(world, tmp_path):
    (tmp_path / "file").write_text("")
    line = refusal("sample.py", world / "robot.py", demo="demo_7", out=tmp_path / "file/x")
    assert line.startswith(f"error: out={tmp_path}/file/x: ") and line.endswith("): choose another folder")
    huge = dict(guidance_scale=3e38, guidance_scale_2=3e38, num_inference_steps=2)
    line = refusal("sample.py", world / "robot.py", demo="demo_7", out=tmp_path / "x", **huge)
    assert line.startswith("error: got NaN or infinity in a sampled video: want ") and files_of(tmp_path) == ["file"]
    line = refusal("sample.py", world / "robot.py", demo="demo_99", out=tmp_path / "x")
    assert "demo=demo_99: not in " in line and "which has 12 demos: demo_" in line


# ----------------------------------------------------------------------------- what weights belong to

CELLS = dict(views="robot0_agentview_right,robot0_agentview_left", cell_height=24, num_frames=9, max_text_tokens=12,
             text_dtype="float32", negative_prompt="dark")  # all of them others than sample.py's own
SAMPLED = dict(shift=3.0, boundary_ratio=0.8, guidance_scale=2.0, guidance_scale_2=1.5, fps=5)
STEPS = dict(num_inference_steps=2, seed=3)


@pytest.fixture(scope="module")
def images(world):
    """--images=, --prompt= of a demo's first frame, its views in the run's order."""
    demos = robot_data.RobotDemos(world / "robot.hdf5", CELLS["views"])
    window = recordings.Window("demo_7", 0, 1, "val")
    for view in demos.views:
        cell = robot_data.rgb_cell(demos.rgb(window, view, 1), CELLS["cell_height"], 16)  # as training stretches it
        tiny.Image.fromarray(video.to_uint8(cell)[0]).save(world / f"{view}.png")
    return dict(images=",".join(str(world / f"{view}.png") for view in demos.views), prompt=demos.prompts["demo_7"])


@pytest.fixture(scope="module")
def runs(world):
    """out_dirs of two runs with settings of their own: {"lora": folder, "full": folder}."""
    paths = dict(model=world / "i2v", data=world / "robot.hdf5", cache_dir=world / "cache_cells", pad_short=True)
    script("prepare_robocasa.py", **paths, **CELLS)
    quick = dict(max_steps=2, eval_interval=0, num_val_videos=0, num_val_windows=1, val_sigmas=1, warmup_steps=1,
                 batch_size=4, lr=0.05)
    for name, rank in (("lora", 4), ("full", 0)):
        script("train_i2v_sft.py", **paths, **CELLS, **SAMPLED, **quick, out_dir=world / name, lora_rank=rank)
    return {name: world / name for name in ("lora", "full")}


def record_in(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["nanowan"])


def sampled(out, *files, **settings):
    """Latents of a sample, its frames a second, what was printed."""
    names, printed = script("sample.py", *files, **STEPS, **settings, out=out)
    assert names["config"]["fps"] == names["fps"]
    return names["latents"], names["fps"], printed


def test_an_export_says_what_it_belongs_to(world, runs):
    wanted = CELLS | SAMPLED | dict(
        model=str(world / "i2v"), pointmaps=False, cell_width=16, clamp_first_frame=True, experts="both",
        dtype="float32", kind="i2v", num_layers=2, dim=2 * tiny.TRANSFORMER["attention_head_dim"], ffn_dim=128,
        in_channels=36, out_channels=16, box=None)
    for expert, name in (("high", "high_noise"), ("low", "low_noise")):
        record = record_in(runs["lora"] / f"lora/{name}.safetensors")
        content, commit = record.pop("content of model"), record.pop("commit")
        assert record == wanted | {"expert": expert} and re.fullmatch("[0-9a-f]{16}", content)
        assert commit == json.loads((runs["lora"] / "config.json").read_text())["commit"]
    of_model = json.loads((runs["full"] / "model/nanowan.json").read_text())
    assert of_model == wanted | {"content of model": content, "commit": commit}
    assert record_in(world / "run/lora/low_noise.safetensors")["box"] == box_of(world)


def test_images_are_cut_and_not_stretched(world, runs, images, tmp_path):
    """One loader for all given images: turned, on white, scaled to cover a cell, cut to its centre."""
    left, right = (tiny.Image.open(path) for path in images["images"].split(","))
    wide = tiny.Image.new("RGBA", (3 * 16, 24), (255, 0, 0, 0))  # red, but not to be seen
    wide.paste(left, (16, 0))
    wide.save(tmp_path / "wide.png")
    exif = tiny.Image.Exif()
    exif[0x0112] = 3
    right.rotate(180).save(tmp_path / "turned.png", exif=exif)
    names, _ = script("sample.py", **STEPS, lora=runs["lora"] / "lora", prompt="x", out=tmp_path / "x",
                      images=f"{tmp_path}/wide.png, {tmp_path}/turned.png")
    for view, image in (("0", left), ("1", right)):
        wanted = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        torch.testing.assert_close(names["truth"]["rgb", view][:, 0], wanted, atol=1e-5, rtol=0)
    for path, words in [(tmp_path, "a folder"), (tmp_path / "none.png", "which is not there"),
                        (runs["lora"] / "config.json", "cannot identify image file")]:
        line = refusal("sample.py", lora=runs["lora"] / "lora", prompt="x", out=tmp_path / "x",
                       images=f"{path},{tmp_path}/wide.png")
        assert line.startswith("error: images=") and f": got image {path}" in line and words in line


def test_an_adapter_alone_is_enough(world, runs, images, tmp_path):
    out_dir = runs["lora"]
    spelled = sampled(tmp_path / "a", **images, **CELLS, **SAMPLED, model=world / "i2v", lora=out_dir / "lora")
    assert spelled[:1][0].shape == (1, 16, 3, 6, 8) and spelled[1] == 5
    for alone in (dict(lora=out_dir / "lora"), dict(checkpoint=out_dir / "ckpt/step_000002"),
                  dict(run=out_dir / "config.json")):
        latents, fps, printed = sampled(tmp_path / "b", **images, **alone)
        assert torch.equal(latents, spelled[0]) and fps == 5 and "doesn't say" not in printed
    latents, fps, _ = sampled(tmp_path / "b", out_dir / "config.json", demo="demo_7")  # its data too
    torch.testing.assert_close(latents, spelled[0], atol=0.02, rtol=0)  # an image has whole levels

    shutil.copytree(world / "i2v", tmp_path / "elsewhere")  # the same content under another name; free settings
    latents, fps, _ = sampled(tmp_path / "b", **images, lora=out_dir / "lora", model=tmp_path / "elsewhere", fps=7)
    assert torch.equal(latents, spelled[0]) and fps == 7
    guided = sampled(tmp_path / "b", **images, lora=out_dir / "lora", guidance_scale=3.0)[0]
    assert not torch.allclose(guided, spelled[0], atol=1e-3)


def test_a_model_of_full_fine_tuning_alone_is_enough(world, runs, images, tmp_path):
    model = runs["full"] / "model"
    spelled = sampled(tmp_path / "a", **images, **CELLS, **SAMPLED, model=model)
    base = sampled(tmp_path / "a", **images, **CELLS, **SAMPLED, model=world / "i2v")
    for alone in (dict(model=model), dict(run=runs["full"] / "config.json"),
                  dict(checkpoint=runs["full"] / "ckpt/step_000002")):
        latents, fps, _ = sampled(tmp_path / "b", **images, **alone)
        assert torch.equal(latents, spelled[0]) and fps == 5
    assert not torch.allclose(base[0], spelled[0], atol=1e-3)
    assert "cell_width=32: " in refusal("sample.py", **images, model=model, cell_width=32, out=tmp_path / "no")


def test_weights_on_what_they_do_not_belong_to_are_one_line(world, runs, images, tmp_path):
    lora, out = runs["lora"] / "lora", tmp_path / "out"
    config_file = tmp_path / "other.py"
    config_file.write_text("cell_height = 32\n")
    for source in (dict(lora=lora), dict(checkpoint=runs["lora"] / "ckpt/step_000002")):
        name = next(iter(source.values()))
        for change, words in [
            (dict(model=world / "other"), f"model={world}/other: {name} was trained on {world}/i2v, whose content of"),
            (dict(cell_height=16), f"cell_height=16: {name} was trained with 24, want the same"),
            (dict(num_frames=5), f"num_frames=5: {name} was trained with 9, want the same"),
            (dict(shift=5.0), f"shift=5.0: {name} was trained with 3.0, want the same"),
            (dict(pointmaps=True), f"pointmaps=True: {name} was trained with False, want the same"),
            (dict(views="left"), f"views=left: {name} was trained with {CELLS['views']}, want the same"),
            (dict(images=images["images"].split(",")[0]), f"right.png: got 1, want one a view: {CELLS['views']}"),
            (dict(images=images["images"] + ",x.png"), f"x.png: got 3, want one a view: {CELLS['views']}"),
        ]:
            assert words in refusal("sample.py", **images | source | change, out=out / "x"), change
        line = refusal("sample.py", config_file, **images, **source, out=out / "x")
        assert f"cell_height=32: {name} was trained with 24, want the same" in line
    line = refusal("sample.py", **images, lora=lora, model=world / "ti2v", out=out / "x")
    assert f"model={world}/ti2v: {lora} was trained on {world}/i2v, whose kind is i2v, here ti2v: want" in line

    for name, text, words in [("none", None, "No such file"), ("list", "[]", "(no object), want a run's config.json"),
                              ("cut", '{"settings": {', "Expecting"), ("other", '{"settings": {}}', "no settings"),
                              ("typed", '{"settings": {"model": 5}}', "neither lora/ nor model/ is beside it")]:
        path = tmp_path / name / "config.json"
        if text is not None:
            path.parent.mkdir()
            path.write_text(text)
        line = refusal("sample.py", path, **images, out=out / "x")
        assert line.startswith(f"error: {path}: ") and words in line
    path.write_text('{"settings": {"model": "x", "num_inference_steps": "9"}}')
    line = refusal("sample.py", path, **images, lora=lora, out=out / "x")
    assert "num_inference_steps='9': got str, want int" in line
    assert not out.exists()


def test_an_adapter_that_says_nothing_is_used_as_it_is_and_told(world, runs, images, tmp_path):
    for path in (runs["lora"] / "lora").glob("*_noise.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = {key: text for key, text in file.metadata().items() if key != "nanowan"}
        (tmp_path / "lora").mkdir(exist_ok=True)
        safetensors.torch.save_file(safetensors.torch.load_file(path), tmp_path / "lora" / path.name, metadata)
    spelled = dict(model=world / "i2v", lora=tmp_path / "lora") | images | CELLS | SAMPLED
    latents, _, printed = sampled(tmp_path / "a", **spelled)
    assert f"lora       high: {tmp_path}/lora/high_noise.safetensors: doesn't say what it belongs to" in printed
    assert torch.equal(latents, sampled(tmp_path / "a", **images, lora=runs["lora"] / "lora")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.TRANSFORMER, "num_layers", 1)
        tiny.make_checkpoint(tmp_path / "small", "i2v", tiny.make_vae(), *tiny.make_text_encoder())
    line = refusal("sample.py", **spelled | dict(model=tmp_path / "small"), out=tmp_path / "no/x")
    assert f"{tmp_path}/lora/high_noise.safetensors: 16 of 32 tensors are no LoRA of this model's layers" in line
    assert "the first is transformer.blocks.1.attn1.to_k.lora_A.weight: want " in line
    assert not (tmp_path / "no").exists()


def test_adapters_of_any_tool_are_sampled_several_with_weights(world, runs, images, tmp_path):
    lora = runs["lora"] / "lora"
    want = sampled(tmp_path / "a", **images, lora=lora)[0]
    comfyui = ",".join(f"{lora}/comfyui_{expert}_noise.safetensors" for expert in ("high", "low"))
    latents, fps, printed = sampled(tmp_path / "a", **images, lora=comfyui)  # the run's settings are in these too
    assert torch.equal(latents, want) and fps == 5
    for expert in ("high", "low"):
        assert f"lora       {expert}: {lora}/comfyui_{expert}_noise.safetensors: of {world}/i2v; the same" in printed
    latents, _, printed = sampled(tmp_path / "a", **images, lora=f"{lora}:1.5,{lora}:-0.5")
    torch.testing.assert_close(latents, want, atol=1e-4, rtol=1e-4)
    assert f"lora       low: {lora}/low_noise.safetensors x -0.5: of" in printed

    tensors = safetensors.torch.load_file(lora / "comfyui_high_noise.safetensors")
    kohya = {}
    for key, tensor in tensors.items():
        layer, side = re.fullmatch(r"diffusion_model\.(.+?)\.(lora_.*|alpha)", key).groups()
        kohya[f"lora_unet_{layer.replace('.', '_')}.{side}"] = tensor
    safetensors.torch.save_file(kohya, tmp_path / "style.safetensors")
    half = sampled(tmp_path / "a", **images, lora=f"{lora}:0.5")[0]
    spec = f"{tmp_path}/style.safetensors:high:0.5,{lora}/high_noise.safetensors:0.5,{lora}/low_noise.safetensors:0.5"
    assert not torch.allclose(half, want, atol=1e-3)
    same = f"{lora}/high_noise.safetensors,{lora}/low_noise.safetensors:0.5"
    got, want = (sampled(tmp_path / "a", **images, lora=each)[0] for each in (spec, same))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    style = f"{tmp_path}/style.safetensors:both"  # says nothing: the fine-tuned model under it says cells and frames
    latents, fps, _ = sampled(tmp_path / "a", **images, model=runs["full"] / "model", lora=style)
    assert latents.shape == got.shape and fps == 5 and not torch.allclose(latents, got, atol=1e-3)


def test_adapters_are_refused_before_a_transformer_is_loaded(world, runs, images, tmp_path, monkeypatch):
    monkeypatch.setattr(wan_model, "load_transformer", None)
    lora, model = runs["lora"] / "lora", world / "i2v"
    tensors = safetensors.torch.load_file(lora / "comfyui_high_noise.safetensors")
    key = "diffusion_model.blocks.1.cross_attn.v"
    bare = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    nan = torch.full_like(tensors[f"{key}.lora_up.weight"], float("nan"))
    settings = images | CELLS | SAMPLED | dict(model=model, out=tmp_path / "no/x")
    for name, content, words in [
        ("style", tensors, "style.safetensors: doesn't say which expert it is for; want "),
        ("high", bare, "high.safetensors: doesn't say its scale (no alpha); want "),
        ("high", tensors | {f"{key}.lora_up.weight": nan}, "blocks.1.attn2.to_v has NaN or infinity"),
        ("high", tensors | {f"{key}.diff_b": nan},
         f"1 of 49 tensors are no LoRA of this model's layers, the first is {key}.diff_b: want"),
    ]:
        safetensors.torch.save_file(content, tmp_path / f"{name}.safetensors")
        for lora_setting in (tmp_path / f"{name}.safetensors", f"{lora},{tmp_path}/{name}.safetensors"):
            assert words in refusal("sample.py", **settings, lora=lora_setting), words
        start = dict(init_lora=tmp_path / f"{name}.safetensors", lora_rank=4, experts="high", out_dir=tmp_path / "no")
        assert words in refusal("train_i2v_sft.py", **start, model=model, data=world / "robot.hdf5")
    assert not (tmp_path / "no").exists()


def test_training_goes_on_from_an_adapter_of_the_same_base_in_another_size(world, runs, tmp_path):
    start = dict(data=world / "robot.hdf5", init_lora=runs["lora"] / "lora", lora_rank=4, batch_size=4, max_steps=1,
                 warmup_steps=0, cache_dir=world / "cache", eval_interval=0, num_val_videos=0, num_val_windows=1,
                 val_sigmas=1, shift=3.0, out_dir=tmp_path / "out")
    _, printed = script("train_i2v_sft.py", **start, model=world / "i2v")
    views = "views {1},{0} -> {0},{1}".format("robot0_agentview_left", "robot0_agentview_right")
    line = f"of {world}/i2v; {views}, cell_height 24 -> 16, num_frames 9 -> 5\n"
    assert all(f"init_lora  {runs['lora']}/lora/{expert}_noise.safetensors: {line}" in printed
               for expert in ("high", "low"))
    assert "".join(f"lora       {name}: 4 layers\n" for name in ("to_q", "to_k", "to_v", "to_out.0")) in printed
    assert record_in(tmp_path / "out/lora/low_noise.safetensors")["num_frames"] == 5
    line = refusal("train_i2v_sft.py", **start | dict(out_dir=tmp_path / "no"), model=world / "other")
    assert not (tmp_path / "no").exists()
    assert f"model={world}/other: {runs['lora']}/lora was trained on {world}/i2v, whose content of model is " in line


def test_an_adapter_of_reinforcement_learning_alone_is_enough(world, images, tmp_path):
    tiny.make_prompts(tmp_path)
    script("train_grpo.py", model=world / "ti2v", data_jsonl=tmp_path / "train.jsonl", height=24, width=32, shift=3.0,
           eval_data_jsonl=tmp_path / "eval.jsonl", out_dir=tmp_path / "grpo", rewards="smoothness:1.0", fps=5,
           eval_rewards="", prompts_per_iteration=2, group_size=2, rollout_batch=4, num_steps=3, sde_window="(0,2)",
           num_eval_samples=2, num_eval_videos=0, num_eval_steps=1, eval_interval=0, max_iterations=1, lora_rank=4)
    lora, one = tmp_path / "grpo/lora", images | dict(images=images["images"].split(",")[0])
    spelled = sampled(tmp_path / "a", **one, model=world / "ti2v", lora=lora, cell_height=24, cell_width=32, shift=3.0,
                      fps=5, views="any")
    assert spelled[0].shape == (1, 16, 2, 6, 8)
    for alone in (dict(lora=lora), dict(run=tmp_path / "grpo/config.json"),
                  dict(checkpoint=tmp_path / "grpo/ckpt/step_000001")):
        latents, fps, _ = sampled(tmp_path / "b", **one, **alone)
        assert torch.equal(latents, spelled[0]) and fps == 5
    (tmp_path / "b.mp4").unlink()
    for change, words in [(images, "got 2, want one a view: (one view)"), (dict(cell_width=16), "cell_width=16: "),
                          (dict(views=CELLS["views"]), "was trained with one view, want the same")]:
        assert words in refusal("sample.py", **one | dict(lora=lora) | change, out=tmp_path / "b")
    assert not [name for name in files_of(tmp_path) if name == "b.mp4"]
    assert adapters.adapter_files(str(lora))[0].record["kind"] == "ti2v"
