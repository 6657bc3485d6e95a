"""train_i2v_sft.py, sample.py and bench.py as they are started, on a small tiny world.

Most runs happen inside this process (a start costs seconds of imports); the real launches are one torchrun on two gloo
ranks, a single process that gets a SIGTERM from outside, and two that are refused.
"""

import io
import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import checkpoints
import data as robot_data
import flow
import fsdp
import latent_cache
import model as wan_model
import tiny
import video
from guard import UserError
from helpers import (
    ENVIRONMENT,
    TORCHRUN,
    assert_same_checkpoint,
    files_of,
    flags,
    free_ports,
    kept,
    path_of,
    refusal,
    rows_of,
    script,
    tensors_of,
)
from recordings import Window

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHORT = dict(batch_size=8, lr=1e-3, max_steps=6, log_interval=1, eval_interval=3, save_interval=3, warmup_steps=2,
             ema_decay=0.8,
             text_dropout=0.3, num_inference_steps=2, num_val_videos=1, num_val_windows=2, val_sigmas=2)
SHORT = kept("train_i2v_sft.py", SHORT)
SHORTEST = SHORT | dict(max_steps=2, eval_interval=0, num_val_videos=0, num_val_windows=1, val_sigmas=1, ema_decay=0)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """24 demos, of which 22 windows to train on, smaller models than tiny.py's, and the caches of all kinds."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(num_layers=2, num_attention_heads=2, ffn_dim=128).items():
            patch.setitem(tiny.TRANSFORMER, name, value)
        tiny.make_robot_hdf5(folder / "robot.hdf5", num_demos=24)
        parts = (tiny.make_vae(), *tiny.make_text_encoder())
        for kind in ("i2v", "ti2v", "t2v"):
            tiny.make_checkpoint(folder / kind, kind, *parts)
    for kind in ("i2v", "ti2v", "t2v"):
        script("prepare_robocasa.py", **paths(folder, kind), pointmaps=kind == "i2v")
    return folder


def paths(world, kind="i2v"):
    return dict(model=world / kind, data=world / "robot.hdf5", cache_dir=world / f"cache_{kind}")


@pytest.fixture
def train(world, tmp_path):
    """Runs the training script with SHORT settings into tmp_path/out."""

    def run(*files, kind="i2v", **settings):
        settings = paths(world, kind) | dict(out_dir=tmp_path / "out") | SHORT | settings
        return script("train_i2v_sft.py", *files, **settings)

    return run


@pytest.fixture(scope="session")
def straight(world, tmp_path_factory):
    """out_dir of an uninterrupted run of one process, full fine-tuning with EMA, all checkpoints kept."""
    out_dir = tmp_path_factory.mktemp("straight")
    script("train_i2v_sft.py", **paths(world), **SHORT | dict(save_interval=1, keep_last=0), out_dir=out_dir)
    return out_dir


@pytest.fixture(scope="session")
def straight_lora(world, tmp_path_factory):
    """The same with LoRA."""
    out_dir = tmp_path_factory.mktemp("straight_lora")
    script("train_i2v_sft.py", **paths(world), **SHORT | dict(lora_rank=4, lora_alpha=8, lr=0.05), out_dir=out_dir)
    return out_dir


# ----------------------------------------------------------------------------- what a run left behind


def metrics_of(out_dir):
    """metrics.jsonl without the two numbers that are times."""
    return [{name: value for name, value in row.items() if name not in ("ms", "load_ms")} for row in rows_of(out_dir)]


def assert_same_rows(found, wanted, tolerance):
    """The lines of two runs' training steps: the same steps and experts, the numbers to a relative tolerance."""
    for key in ("step", "expert"):
        assert [row[key] for row in found] == [row[key] for row in wanted]
    for key in ("loss", "sigma", "grad_norm", "lr"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in wanted], rel=tolerance, abs=0), key


def train_rows(out_dir):
    return [row for row in metrics_of(out_dir) if "loss" in row]


def eval_rows(out_dir):
    return [row for row in metrics_of(out_dir) if "loss" not in row]


def stop_at(monkeypatch, step, sent=signal.SIGTERM):
    """SIGTERM to this process in the middle of a step, counted from 1."""
    draw = flow.draw_expert

    def draw_and_signal(experts, boundary_ratio, shift, seed, at):
        if at + 1 == step:
            os.kill(os.getpid(), sent)
        return draw(experts, boundary_ratio, shift, seed, at)

    monkeypatch.setattr(flow, "draw_expert", draw_and_signal)


# ----------------------------------------------------------------------------- one run


def test_a_run_leaves_what_it_promises(world, straight):
    files = files_of(straight)
    assert {"config.json", "metrics.jsonl", "curves.png", "samples/step_000000.png", "samples/step_000003.mp4",
            "samples/step_000006.png", "model/model_index.json", "model/transformer_2/config.json",
            "model/vae/config.json"} <= set(files)
    assert not [name for name in files if "tmp" in name or name.startswith("lora")]
    rows, evaluations = train_rows(straight), eval_rows(straight)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert [row["lr"] for row in rows[:3]] == pytest.approx([5e-4, 1e-3, 1e-3])  # warmup_steps=2, then a cosine
    assert rows[5]["lr"] == pytest.approx(1e-5 + 0.99e-3 * 0.5 * (1 + np.cos(np.pi * 3 / 4)))
    assert {row["expert"] for row in rows} == {"high", "low"}
    assert all((row["sigma"] >= 0.9) == (row["expert"] == "high") for row in rows)
    for row in evaluations:
        sigmas = [value for name, value in row.items() if "sigma" in name]
        assert len(sigmas) == 4  # val_sigmas=2 of each expert
        assert np.mean([row["val_loss/high"], row["val_loss/low"]]) == pytest.approx(np.mean(sigmas))
    assert evaluations[2]["psnr"] > 5 and evaluations[2]["psnr"] != evaluations[0]["psnr"]  # a video at step 0 too
    for name in ("psnr", "moved_psnr", "ssim"):
        assert len({(row[f"floor/{name}"], row[f"ceiling/{name}"]) for row in evaluations}) == 1
        assert 0 < evaluations[0][f"floor/{name}"] < evaluations[0][f"ceiling/{name}"]
    assert evaluations[2]["val_loss/high"] < evaluations[0]["val_loss/high"]
    meta = checkpoints.read_meta(straight / "ckpt/step_000006")
    assert meta["step"] == 6 and meta["global_batch"] == 8 and meta["skipped_steps"] == 0
    settings = json.loads((straight / "config.json").read_text())["settings"]
    assert settings.items() <= meta["config"].items() and settings["ema_decay"] == 0.8
    # what is exported is the average, float32
    exported = safetensors.torch.load_file(straight / "model/transformer_2/diffusion_pytorch_model.safetensors")
    state = tensors_of(straight, 6)
    assert_same_checkpoint({f"ema.low.{name}": tensor for name, tensor in exported.items()},
                           {name: tensor for name, tensor in state.items() if name.startswith("ema.low.")})
    # and the average is that of the parameters after each step
    name = "high.proj_out.weight"
    original = safetensors.torch.load_file(world / "i2v/transformer/diffusion_pytorch_model.safetensors")
    average = original["proj_out.weight"].double()
    for step in range(1, 7):
        average = 0.8 * average + 0.2 * tensors_of(straight, step)[f"parameter.{name}"].double()
    torch.testing.assert_close(state[f"ema.{name}"].double(), average, rtol=1e-5, atol=1e-7)


def test_interrupted_at_every_step_equals_uninterrupted_bit_for_bit(train, straight, tmp_path, monkeypatch):
    experts = [row["expert"] for row in train_rows(straight)]
    assert len(set(experts[:2])) == 1, "the first interruptions are to come before one expert was drawn"
    for step in range(1, 7):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            printed = train()[1]
        assert f"step {step:04d}/6" in printed and "stopped: SIGTERM" in printed
        assert (f"resumed    {tmp_path}/out/ckpt/step_{step - 1:06d}: step {step - 1}, " in printed) == (step > 1)
        assert checkpoints.saved_in(tmp_path / "out")[-1].endswith(f"step_{step:06d}")
        assert_same_checkpoint(tensors_of(tmp_path / "out", step), tensors_of(straight, step))
    assert not (tmp_path / "out/model").exists()
    assert [row["step"] for row in eval_rows(tmp_path / "out")] == [0, 3]  # that of step 3 came after the resumption
    train()
    assert metrics_of(tmp_path / "out") == metrics_of(straight)
    assert files_of(tmp_path / "out/model") == files_of(straight / "model")
    for expert in ("transformer", "transformer_2"):
        file = f"model/{expert}/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "out" / file).read_bytes() == (straight / file).read_bytes()
    assert len(os.listdir(tmp_path / "out/ckpt")) == 2  # keep_last


@pytest.mark.parametrize("moment", ["a shard is written", "all is there but the name"])
def test_after_kill_minus_9_while_saving_the_last_whole_checkpoint_serves(train, straight, tmp_path, moment):
    child = os.fork()
    if child == 0:
        try:
            module, name = {"a shard is written": (os, "fsync"), "all is there but the name": (os, "replace")}[moment]
            call = getattr(module, name)

            def kill(*args):
                if (tmp_path / "out/ckpt/step_000003").exists() and (tmp_path / "out/ckpt/tmp_000006").exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args)

            setattr(module, name, kill)
            train()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert sorted(os.listdir(tmp_path / "out/ckpt")) == ["step_000003", "tmp_000006"]
    assert [row["step"] for row in train_rows(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    printed = train()[1]
    assert f"resumed    {tmp_path}/out/ckpt/step_000003: step 3, lr 1.000e-03 before, " in printed
    assert sorted(os.listdir(tmp_path / "out/ckpt")) == ["step_000003", "step_000006"]
    assert_same_checkpoint(tensors_of(tmp_path / "out", 6), tensors_of(straight, 6))
    assert metrics_of(tmp_path / "out") == metrics_of(straight)


def test_a_full_disk_while_saving_is_one_line_and_the_last_checkpoint_serves(
    world, train, straight, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        train(num_val_videos=0, eval_interval=0)
    settings = paths(world) | SHORT | dict(out_dir=tmp_path / "out", num_val_videos=0, eval_interval=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # a checkpoint has 5 MB
    try:
        line = refusal("train_i2v_sft.py", **settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert line.startswith(f"error: checkpoint {tmp_path}/out/ckpt/step_000006: [Errno 27] File too large: the last")
    assert os.listdir(tmp_path / "out/ckpt") == ["step_000003"] and not (tmp_path / "out/model").exists()
    script("train_i2v_sft.py", **settings)
    assert_same_checkpoint(tensors_of(tmp_path / "out", 6), tensors_of(straight, 6))


# ----------------------------------------------------------------------------- batches, draws, bad numbers


def test_gradient_accumulation_and_reading_again_change_nothing(train, straight, tmp_path):
    quick = dict(num_val_videos=0, eval_interval=0)
    train(batch_size=2, grad_accum=4, out_dir=tmp_path / "accumulated", **quick)
    train(keep_in_memory=False, out_dir=tmp_path / "read_again", **quick)
    for name, tolerance in (("accumulated", 1e-5), ("read_again", 0)):
        assert_same_rows(train_rows(tmp_path / name), train_rows(straight), tolerance)


def test_what_the_loss_is_given(world, train, monkeypatch, tmp_path):
    """Clips of the batch in order, their prompts or the empty one, sigmas in the expert's range, fresh noise."""
    calls, error = [], wan_model.flow_matching_loss
    monkeypatch.setattr(wan_model, "flow_matching_loss", lambda wan, *args: calls.append(args) or error(wan, *args))
    for dropout in (0, 1):
        calls.clear()
        names = train(**SHORTEST | dict(text_dropout=dropout, out_dir=tmp_path / str(dropout)))[0]
        cache, rows = names["cache"], train_rows(tmp_path / str(dropout))
        assert cache.prompts[cache.empty_index] == "" and len(calls) > 2  # two steps, and validation behind them
        for step in (0, 1):
            latents, noise, sigma, condition, text = calls[step]
            batch = latent_cache.batch_indices(len(cache.train), 8, step, 0)
            samples = [cache.sample(cache.train[index]) for index in batch]
            torch.testing.assert_close(latents, torch.stack([sample["latents"] for sample in samples]))
            torch.testing.assert_close(condition, torch.stack([sample["condition"] for sample in samples]))
            rows_of_text = [cache.empty_index if dropout else sample["prompt_index"] for sample in samples]
            assert torch.equal(text, cache.text[rows_of_text])
            assert ((sigma >= 0.9) == (rows[step]["expert"] == "high")).all() and len(sigma.unique()) == 8
            assert noise.mean().abs() < 0.02 and noise.std() == pytest.approx(1, abs=0.02)
            assert len({tuple(sample.flatten()[:2].tolist()) for sample in noise}) == 8
        assert not torch.equal(calls[0][1], calls[1][1])


@pytest.mark.parametrize("position", [0, 3])
def test_noise_levels_follow_the_shifted_uniform_distribution(position):
    """The expert's draw and then the sample's: together u is uniform, for the first sample of a batch too."""
    levels = {"high": [], "low": []}
    for step in range(3000):
        expert = flow.draw_expert(("high", "low"), 0.9, 5.0, 0, step)
        sigma = flow.draw_sigma(expert, 0.9, 5.0, flow.seeded("cpu", 0, step, position))
        levels[expert].append(flow.unshift_sigma(sigma.double().item(), 5.0))
    share = len(levels["high"]) / 3000
    assert abs(share - flow.expert_share("high", 0.9, 5.0)) < 3 * (0.357 * 0.643 / 3000) ** 0.5
    both = np.sort(levels["high"] + levels["low"])
    assert np.abs(both - (np.arange(3000) + 0.5) / 3000).max() < 1.63 / 3000**0.5  # Kolmogorov-Smirnov, 1 %


def test_a_non_finite_step_is_skipped_and_several_end_the_run(world, train, tmp_path):
    shutil.copytree(world / "cache_i2v", tmp_path / "cache")
    cache = train(**SHORTEST | dict(max_steps=1, warmup_steps=0, out_dir=tmp_path / "first"))[0]["cache"]
    key = cache.train[5].key
    file = tmp_path / f"cache/rgb/{key}.safetensors"
    cells = safetensors.torch.load_file(file)
    cells["robot0_agentview_left"][3, 1, 2, 2] = float("nan")
    safetensors.torch.save_file(cells, file)
    poison = dict(cache_dir=tmp_path / "cache", keep_in_memory=False, save_interval=1, keep_last=0, num_val_videos=0)
    batches = [latent_cache.batch_indices(22, 4, step, 0) for step in range(8)]
    bad = [step for step, batch in enumerate(batches) if 5 in batch]
    assert bad and len(bad) < 5  # max_bad_steps
    _, printed = train(**poison, batch_size=4, max_steps=8, eval_interval=0)
    rows = train_rows(tmp_path / "out")
    assert [row["step"] - 1 for row in rows if row["loss"] is None] == bad
    meta = checkpoints.read_meta(tmp_path / "out/ckpt/step_000008")
    assert rows[-1]["skipped_steps"] == meta["skipped_steps"] == len(bad)
    for step in bad:
        assert f"step {step + 1}: gradient norm nan: skipped on all ranks; not finite: {key}\n" in printed
        if step:
            assert_same_checkpoint(tensors_of(tmp_path / "out", step + 1), tensors_of(tmp_path / "out", step))
    assert all(tensor.isfinite().all() for tensor in tensors_of(tmp_path / "out", 8).values())

    settings = paths(world) | SHORT | poison | dict(batch_size=22, max_bad_steps=2, eval_interval=0)
    line = refusal("train_i2v_sft.py", **settings, out_dir=tmp_path / "bad")
    assert line.startswith(f"error: step 2: 2 non-finite steps in a row of expert high, the last one's in {key}: ")
    assert len(train_rows(tmp_path / "bad")) == 1


def test_a_file_that_cannot_be_read_later_loses_nothing(world, train, tmp_path):
    shutil.copytree(world / "cache_i2v", tmp_path / "cache")
    settings = SHORT | dict(cache_dir=tmp_path / "cache", keep_in_memory=False, save_interval=0, eval_interval=0,
                            batch_size=4, num_val_videos=0)
    cache = train(**settings | dict(max_steps=1, warmup_steps=0, out_dir=tmp_path / "first"))[0]["cache"]
    batches = [latent_cache.batch_indices(len(cache.train), 4, step, 0) for step in range(6)]
    step, clip = next((step, i) for step in (3, 4) for i in batches[step] if not any(i in b for b in batches[:step]))
    path = tmp_path / f"cache/rgb/{cache.train[clip].key}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    line = refusal("train_i2v_sft.py", **paths(world) | settings, out_dir=tmp_path / "out")
    assert path.name in line and line.endswith("delete it and run prepare_robocasa.py again")
    assert [path[-6:] for path in checkpoints.saved_in(tmp_path / "out")] == [f"{step:06d}"]
    path.write_bytes(whole)
    train(**settings)
    train(**settings, out_dir=tmp_path / "uninterrupted")
    assert_same_checkpoint(tensors_of(tmp_path / "out", 6), tensors_of(tmp_path / "uninterrupted", 6))


# ----------------------------------------------------------------------------- methods and kinds


def test_only_the_expert_that_is_asked_for_is_trained(world, train, tmp_path):
    train(**SHORTEST | dict(experts="high", num_val_videos=1))
    assert [row["expert"] for row in train_rows(tmp_path / "out")] == ["high", "high"]
    assert "val_loss/low" not in eval_rows(tmp_path / "out")[0] and "psnr" in eval_rows(tmp_path / "out")[0]
    for folder, is_same in (("transformer", False), ("transformer_2", True)):
        name = f"{folder}/diffusion_pytorch_model.safetensors"
        before, after = (safetensors.torch.load_file(at / name) for at in (world / "i2v", tmp_path / "out/model"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before) == is_same
    train(**SHORTEST | dict(experts="low", lora_rank=2, out_dir=tmp_path / "low"))
    assert {row["expert"] for row in train_rows(tmp_path / "low")} == {"low"}
    assert files_of(tmp_path / "low/lora") == ["comfyui_low_noise.safetensors", "low_noise.safetensors"]


@pytest.mark.parametrize("kind, given", [("ti2v", True), ("t2v", True), ("t2v", False)])
def test_the_other_kinds_train(train, tmp_path, kind, given):
    names, _ = train(kind=kind, max_steps=20, lr=3e-3, clamp_first_frame=given, eval_interval=20, log_interval=20)
    first, last = eval_rows(tmp_path / "out")
    experts = ("single",) if kind == "ti2v" else ("high", "low")
    for expert in experts:
        assert last[f"val_loss/{expert}"] < 0.97 * first[f"val_loss/{expert}"]
    assert names["wan"].kind == kind and set(names["wan"].experts) == set(experts)
    assert np.isfinite(last["psnr"])


def test_pointmaps_low_precision_and_checkpointing(train, tmp_path):
    """HCPT with LoRA in bf16: the grid is twice as high, points are scored in mm, recomputation changes nothing."""
    for checkpointing in ("none", "selective"):
        names, printed = train(pointmaps=True, dtype="bfloat16", lora_rank=4, checkpointing=checkpointing, ema_decay=0,
                               max_steps=4, eval_interval=0, out_dir=tmp_path / checkpointing)
        assert "latents (16, 2, 8, 8), 32 tokens a clip" in printed
        assert {p.dtype for p in names["parameters"].values()} == {torch.float32}
        assert {p.dtype for p in names["wan"].experts["low"].parameters()} == {torch.float32, torch.bfloat16}
        row = eval_rows(tmp_path / checkpointing)[-1]
        assert row["point_mm"] > row["point_median_mm"] > row["ceiling/point_median_mm"] > 0
        assert len(checkpoints.read_meta(tmp_path / checkpointing / "ckpt/step_000004")["box"]) == 6
    assert_same_checkpoint(tensors_of(tmp_path / "none", 4), tensors_of(tmp_path / "selective", 4))


def test_lora_run_exports_adapters_and_another_starts_from_them(world, train, straight_lora, tmp_path):
    names = ["comfyui_high_noise", "comfyui_low_noise", "high_noise", "low_noise"]
    assert files_of(straight_lora / "lora") == [f"{name}.safetensors" for name in names]
    assert not (straight_lora / "model").exists()
    state = tensors_of(straight_lora, 6)
    exported = safetensors.torch.load_file(straight_lora / "lora/low_noise.safetensors")
    assert len(exported) == 2 * 8 * 2
    for name, tensor in exported.items():
        name = name.replace("transformer.", "ema.low.").replace(".weight", ".default.weight")
        assert torch.equal(tensor, state[name])
    settings = SHORTEST | dict(lora_rank=4, lora_alpha=8, num_val_windows=2, val_sigmas=2, eval_interval=2)
    train(**settings | dict(init_lora=straight_lora / "lora"))
    begin, end = eval_rows(tmp_path / "out")[0], eval_rows(straight_lora)[-1]
    for name in ("val_loss/high", "val_loss/low"):
        assert begin[name] == pytest.approx(end[name], rel=1e-6)
        assert begin[name] != pytest.approx(eval_rows(straight_lora)[0][name], rel=1e-4)

    refused = paths(world) | settings | dict(init_lora=straight_lora / "lora", out_dir=tmp_path / "refused")
    for change, words in {
        ("lora_rank", 8): "lora has 4, to_k,to_out.0,to_q,to_v on 16 layers: want the same",
        ("lora_targets", "to_q"): "lora_targets=to_q: ",
        ("lora_alpha", 4): "lora_alpha=4: ",
        ("lora_rank", 0): "want the lora_rank it was trained with",
        ("init_lora", tmp_path): f"{tmp_path}: no adapter there; want ",
    }.items():
        assert words in refusal("train_i2v_sft.py", **refused | dict([change]))
    assert not (tmp_path / "refused").exists()


# ----------------------------------------------------------------------------- sample.py, bench.py, dry runs


def test_sample_makes_the_same_video_from_model_lora_and_checkpoint(world, straight, straight_lora, tmp_path):
    common = dict(data=world / "robot.hdf5", demo="demo_23", num_inference_steps=3, guidance_scale=2.0,
                  guidance_scale_2=1.0, seed=4)

    def sample(name, **settings):
        names, printed = script("sample.py", **common | dict(model=world / "i2v", out=tmp_path / name) | settings)
        assert (tmp_path / f"{name}.mp4").stat().st_size > 500 and (tmp_path / f"{name}.png").stat().st_size > 500
        assert "psnr" in printed and f"wrote {tmp_path}/{name}.mp4" in printed
        assert names["latents"].shape == (1, 16, 2, 4, 8)
        return names["latents"]

    base = sample("base")
    model = sample("model", model=straight / "model")
    checkpoint = sample("checkpoint", checkpoint=straight / "ckpt/step_000006")
    assert torch.equal(model, checkpoint) and not torch.allclose(model, base, atol=1e-3)
    earlier = sample("earlier", checkpoint=straight / "ckpt/step_000002")
    assert not torch.allclose(earlier, checkpoint, atol=1e-4)
    lora = sample("lora", lora=straight_lora / "lora")
    checkpoint = sample("lora_checkpoint", checkpoint=straight_lora / "ckpt/step_000006")
    assert torch.equal(lora, checkpoint) and not torch.allclose(lora, base, atol=1e-3)


def test_sample_takes_images_too(world, tmp_path):
    demos = robot_data.RobotDemos(world / "robot.hdf5", "robot0_agentview_left,robot0_agentview_right")
    window = Window("demo_23", 0, 5, "val")
    for view in demos.views:
        cell = robot_data.rgb_cell(demos.rgb(window, view, 1), 16, 16)  # as training resizes it
        tiny.Image.fromarray(video.to_uint8(cell)[0]).save(tmp_path / f"{view}.png")
    common = dict(model=world / "i2v", num_inference_steps=2)
    images = ",".join(str(tmp_path / f"{view}.png") for view in demos.views)
    prompt = demos.prompts["demo_23"]
    ours, _ = script("sample.py", **common, images=images, prompt=prompt, out=tmp_path / "a")
    wanted, _ = script("sample.py", **common, data=world / "robot.hdf5", demo="demo_23", out=tmp_path / "b")
    torch.testing.assert_close(ours["latents"], wanted["latents"], atol=0.02, rtol=0)  # an image has whole levels


def test_sample_refuses_in_one_line(world, straight, tmp_path):
    base = dict(model=world / "i2v", data=world / "robot.hdf5", demo="demo_23", out=tmp_path / "no")
    checkpoint = straight / "ckpt/step_000006"
    for change, words in [
        (dict(lora="x", checkpoint="y"), "lora and checkpoint: want one of them"),
        (dict(checkpoint=straight), "no meta.json there; want a run's ckpt/step_NNNNNN"),
        (dict(lora=tmp_path), "no adapter there; want PATH, PATH:WEIGHT or PATH:high:WEIGHT"),
        (dict(demo="demo_99"), "demo=demo_99: not in "),
        (dict(start=9), "start=9: demo_23 has "),
        (dict(demo=""), "want either images (one a view) or a demo of data"),
        (dict(demo="", images="nowhere.png", prompt="x"), "images=nowhere.png: got 1, want one a view: robot0"),
        (dict(demo="", images="nowhere.png,b", prompt="x"), "images=nowhere.png,b: got image nowhere.png, which"),
        (dict(pointmaps=True), "pointmaps=True: want a demo, and workspace_box or a lora, model or checkpoint"),
        (dict(cell_width=20), "cell_width=20: want a multiple of 8 (16 or 24)"),
        (dict(num_frames=6), "num_frames=6: want 4n+1 (5 or 9)"),
        (dict(dtype="float16"), "dtype=float16: want float32 or bfloat16"),
        (dict(num_inference_steps=0), "num_inference_steps=0: want at least 1"),
        (dict(model=world / "ti2v", checkpoint=checkpoint), "ti2v: "),
        (dict(model=tmp_path / "none"), "none: no such folder"),
        (dict(out=f"{tmp_path}/new/"), f"out={tmp_path}/new/: want a name without suffix"),
    ]:
        assert words in refusal("sample.py", **base | change)
    assert not list(tmp_path.iterdir())


def test_files_cut_short_are_one_line(world, straight_lora, tmp_path):
    """Of a model and of adapters: what an interrupted download or copy leaves."""
    shutil.copytree(world / "i2v", tmp_path / "model")
    shutil.copytree(straight_lora / "lora", tmp_path / "lora")
    base = paths(world) | SHORT | dict(out_dir=tmp_path / "out", lora_rank=4, lora_alpha=8)
    demo = dict(model=world / "i2v", data=world / "robot.hdf5", demo="demo_23", out=tmp_path / "sample")
    adapter = tmp_path / "lora/low_noise.safetensors"
    os.truncate(adapter, 1000)
    for line in (refusal("train_i2v_sft.py", **base | dict(init_lora=tmp_path / "lora")),
                 refusal("sample.py", **demo | dict(lora=tmp_path / "lora"))):
        assert f"{adapter}: can't read its adapter (SafetensorError(" in line
    base |= dict(model=tmp_path / "model")
    weights = tmp_path / "model/transformer_2/diffusion_pytorch_model.safetensors"
    os.truncate(weights, 1000)
    assert f"model={tmp_path}/model: can't load its transformer_2: want " in refusal("train_i2v_sft.py", **base)
    weights.unlink()
    assert f"model={tmp_path}/model: can't load its transformer_2: want " in refusal("train_i2v_sft.py", **base)


def test_a_finished_run_exports_what_a_kill_kept_it_from(world, straight_lora, tmp_path):
    shutil.copytree(straight_lora, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/lora")  # killed between the checkpoint and the export
    settings = paths(world) | SHORT | dict(lora_rank=4, lora_alpha=8, lr=0.05, out_dir=tmp_path / "out")
    printed = script("train_i2v_sft.py", **settings)[1]
    assert "done       6 of 6 steps" in printed and f"exported   {tmp_path}/out/lora" in printed
    assert files_of(tmp_path / "out/lora") == files_of(straight_lora / "lora")


def test_bench_prints_the_table_and_computes_what_the_baseline_computes():
    size = dict(model="random:t2v-1.3b:1", cell_height=16, cell_width=16, num_views=1, num_frames=5, lora_rank=2)
    names, printed = script("bench.py", **size, baseline=True, compile_blocks=False, dtype="float32", warmup=1, steps=1)
    steps = [line.split(", ")[0].split() for line in printed.splitlines() if " step " in line and "loss" in line]
    steps = {(words[0], words[2]): words[-1] for words in steps}
    assert len(steps) == 4
    assert steps["baseline", "0"] == steps["nanowan", "0"] and steps["baseline", "1"] == steps["nanowan", "1"]
    assert "2 tokens, batch 1 a GPU, LoRA rank 2, 1 x CPU" in printed
    assert sum(" s\n" in line + "\n" and "checkpointing" in line for line in printed.splitlines()) == 2
    assert names["flops"] == pytest.approx(4 * 2 * (6 * 1536**2 + 2 * 1536 * 8960) + 4 * 512 * 2 * 1536**2
                                           + 6 * 2 * (2 + 512) * 2 * 1536)
    for change, words in [
        (dict(cell_height=20), "cell_height=20: want a multiple of 16"),
        (dict(model="random:a"), "random:a: want random: and one of i2v-a14b"),
        (dict(dtype="half"), "dtype=half: want float32 or bfloat16"),
        (dict(checkpointing="selectve"), "checkpointing=selectve: want none, full or selective"),
        (dict(steps=0), "steps=0: want at least 1"),
        (dict(batch_size=0), "batch_size=0: want at least 1"),
        (dict(dp_replicate=2), "dp_replicate=2: want a divisor of the 1 ranks"),
    ]:
        assert words in refusal("bench.py", **size | change)


def dry_run(name="train_i2v_sft.py", *files, **settings):
    """What a dry run prints: it ends with exit code 0 before anything is written."""
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        argv = sys.argv
        sys.argv = [name, *map(str, files), *flags(settings | dict(dry_run=True))]
        try:
            runpy.run_path(str(path_of(name)), run_name="__main__")
        finally:
            sys.argv = argv
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert ended.value.code == 0
    return printed.getvalue()


def test_dry_run_prints_the_costs_and_writes_nothing(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = files_of(world)
    printed = dry_run(**paths(world), **SHORT, out_dir=tmp_path / "out")
    assert "i2v, 2 x 156,416 parameters, boundary 0.9 (timestep 900), shift 5\n" in printed
    assert "experts    high 35.7% of the steps, low 64.3% of the steps; trained: both\n" in printed
    assert "latents (16, 2, 4, 8), 16 tokens a clip\n" in printed
    assert "data       22 training windows of 5 frames, 2 held out, 2.8 steps of 8 clips an epoch\n" in printed
    short = paths(world) | SHORT | dict(num_frames=81, dry_run=True)  # too short, all of them: the costs come first
    ended = subprocess.run([sys.executable, path_of("train_i2v_sft.py"), *flags(short)], capture_output=True, text=True,
                           cwd=tmp_path, env=ENVIRONMENT)
    assert "memory     about " in ended.stdout and ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    # the robot grid of A14B: FACTS of the model, and 4 x linears + 3 x 2 x attention for LoRA
    size = dict(cell_height=432, cell_width=384, num_frames=81, pad_short=True, batch_size=1, lora_rank=16)
    settings = paths(world) | dict(model="random:i2v-a14b", dtype="bfloat16", checkpointing="selective")
    printed = dry_run(**settings, **size, max_text_tokens=512, out_dir=tmp_path / "out")
    assert "2 x 14,288,901,184 parameters" in printed and "latents (16, 21, 54, 96), 27,216 tokens a clip" in printed
    linear = 2 * 40 * (27216 * (6 * 5120**2 + 2 * 5120 * 13824) + 512 * 2 * 5120**2)
    attention = 2 * 40 * 27216 * (27216 + 512) * 2 * 5120
    assert f"cost       {(2 * linear + 3 * attention) / 1e12:,.2f} TFLOP" in printed
    weights = float(printed.split("GiB a GPU: weights ")[1].split(",")[0])
    assert weights == pytest.approx(2 * 14.289e9 * 2 / 2**30, abs=0.1)  # two experts in bf16
    assert files_of(world) == before and not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------- refusals


def test_bad_input_is_one_line_and_nothing_is_written(world, tmp_path):
    out_dir = tmp_path / "out"
    base = paths(world) | SHORT | dict(out_dir=out_dir)
    for folder in ("without", "typo"):
        (tmp_path / folder).mkdir()
    shutil.copytree(world / "i2v", tmp_path / "without", dirs_exist_ok=True, ignore=lambda *_: ["transformer_2"])
    (tmp_path / "typo/typo.py").write_text("lr = 1e-3\nmax_stepz = 3\n")
    for change, words in [
        (dict(model=tmp_path / "without"), "without: can't load its transformer_2: "),
        (dict(model=tmp_path / "none"), "none: no such folder"),
        (dict(batch_sizes=3), "--batch_sizes is not a setting of train_i2v_sft.py; the nearest is batch_size"),
        (dict(batch_size="many"), "--batch_size='many': got str, want int"),
        (dict(batch_size=23), "batch_size=23 on 1 ranks: more than the 22 training windows"),
        (dict(max_text_tokens=8), "condition/text is stale: max_text_tokens was 16, now 8: prepare in another"),
        (dict(cache_dir=tmp_path / "none"), "none/rgb is missing: run prepare_robocasa.py"),
        (dict(data=tmp_path / "none.hdf5"), "none.hdf5: no such file"),
        (dict(init_lora=tmp_path / "none", lora_rank=4), "none: no adapter there; want PATH, "),
        (dict(views="robot0_agentview_left,front"), "views=front: demo_0 of "),
        (dict(cell_height=20), "cell_height=20: want a multiple of 8 (16 or 24)"),
        (dict(num_frames=6), "num_frames=6: want 4n+1 (5 or 9)"),
        (dict(num_frames=13), "num_frames=13: no train windows left, the longest train demo has 8 frames"),
        (dict(window_stride=0), "window_stride=0: want at least 1"),
        (dict(experts="hi"), "experts=hi: "),
        (dict(**paths(world, "ti2v"), experts="high"), "ti2v has single; want both"),
        (dict(dtype="float16"), "dtype=float16: want float32 or bfloat16"),
        (dict(checkpointing="some"), "checkpointing=some: want none, full or selective"),
        (dict(device="tpu"), "device=tpu: want auto, cpu or cuda"),
        (dict(lora_rank=4, lora_targets="to_q,to_x"), "lora_targets=to_x: no such linear layer"),
        (dict(dp_replicate=2), "dp_replicate=2: want a divisor of the 1 ranks"),
        (dict(boundary_ratio=1.5), "boundary_ratio=1.5: two experts want one between 0 and 1"),
        (dict(seed=-1), "seed=-1: want at least 0"),
        (dict(fps=0, beta2=1, text_dropout=1.5, dtype="half", warmup_steps=7), "fps=0: want at least 1; "
         "text_dropout=1.5: want at most 1; beta2=1.0: want below 1; dtype=half: want float32 or bfloat16; "
         "warmup_steps=7: want at most max_steps=6, the whole run"),
        (dict(ema_decay=1.0), "ema_decay=1.0"), (dict(beta2=1.0), "beta2=1.0"), (dict(grad_clip=0.0), "grad_clip=0.0"),
        (dict(weight_decay=-1.0), "weight_decay=-1.0: want at least 0"), (dict(fps=0), "fps=0: want at least 1"),
        (dict(peak_tflops=0.0), "peak_tflops=0.0: want at least 1"),
        (dict(guidance_scale=3.5, guidance_scale_2=0.0), "guidance_scale_2=0: two experts want the low-noise expert's"),
    ]:
        if kept("train_i2v_sft.py", change) == change:
            assert words in refusal("train_i2v_sft.py", **base | change), change
        assert not out_dir.exists()
    assert "typo.py:2: max_stepz is not a setting of train_i2v_sft.py; the nearest is max_steps" in refusal(
        "train_i2v_sft.py", tmp_path / "typo/typo.py", **base)
    (tmp_path / "file").write_text("")
    assert "cannot write there" in refusal("train_i2v_sft.py", **base | dict(out_dir=tmp_path / "file/out"))


def test_another_config_is_refused_naming_what_differs(world, straight, tmp_path):
    before = files_of(straight)
    base = paths(world) | SHORT | dict(out_dir=straight)
    line = refusal("train_i2v_sft.py", **base | dict(seed=1, shift=3.0, lr=2e-3, num_val_windows=1))
    assert "step_000006 was made with another config (seed 0 -> 1, shift 5.0 -> 3.0): use another out_dir" in line
    line = refusal("train_i2v_sft.py", **base | dict(max_steps=5, warmup_steps=0))
    assert f"{straight} holds step_000006, past this run's end at 5: want a later end" in line
    line = refusal("train_i2v_sft.py", **base | dict(batch_size=4))
    assert "step_000006 was trained with 8 clips a step, now 4: keep ranks x batch_size x grad_accum" in line
    line = refusal("train_i2v_sft.py", **base | dict(resume=False))
    assert line == f"error: resume=False: {straight} holds step_000006: choose another out_dir"
    other = {name: shutil.copytree(world / "i2v", tmp_path / name) for name in ("copy", "other")}
    weights = other["other"] / "transformer_2/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"1234")  # at the same path later, other weights
    meta = straight / "ckpt/step_000006/meta.json"
    shutil.copytree(straight, tmp_path / "older")
    record = json.loads(meta.read_text())
    record["config"] = {name: value for name, value in record["config"].items() if "content of" not in name}
    (tmp_path / "older/ckpt/step_000006/meta.json").write_text(json.dumps(record))  # of a run before contents were kept
    assert "done       6 of 6" in script("train_i2v_sft.py", **base | dict(out_dir=tmp_path / "older"))[1]
    line = refusal("train_i2v_sft.py", **base | dict(model=other["copy"]))
    assert f"another config (model '{world}/i2v' -> '{tmp_path}/copy'): " in line
    line = refusal("train_i2v_sft.py", **base | dict(model=other["other"]))
    assert "another config (content of model '" in line and f", model '{world}/i2v' -> '{tmp_path}/other'): " in line
    assert files_of(straight) == before


def test_a_copy_with_other_settings_resumes_the_run(world, straight, tmp_path, monkeypatch):
    lines = path_of("train_i2v_sft.py").read_text().splitlines(keepends=True)
    lines = ["mine = 0.5\n" if line.startswith("peak_tflops = ") else line for line in lines]  # one more, one less
    (tmp_path / "train_fork.py").write_text("".join(lines))
    monkeypatch.setenv("COPY_OF_train_i2v_sft.py", str(tmp_path / "train_fork.py"))
    shutil.copytree(straight, tmp_path / "out")
    base = paths(world) | SHORT | dict(out_dir=tmp_path / "out")
    _, printed = script("train_i2v_sft.py", **base)
    assert "step_000006: step 6, " in printed and ", peak_tflops 989.0 -> no longer a setting, " in printed
    line = refusal("train_i2v_sft.py", **base | dict(mine=0.7))
    assert line.endswith(f"another config (mine 0.5 -> 0.7): use another out_dir, where model={tmp_path}/out/model "
                         "(written at the run's end) starts from what was learnt, or the old values")


def test_a_diverged_run_goes_on_with_a_lower_lr_from_a_checkpoint_that_is_whole(world, straight, tmp_path):
    base = paths(world) | SHORT | dict(out_dir=tmp_path / "out", max_steps=7, num_val_videos=0)
    shutil.copytree(straight, tmp_path / "out")
    empty = tmp_path / "out/ckpt/step_000009"
    empty.mkdir()  # as a copy that was broken off leaves it
    _, printed = script("train_i2v_sft.py", **base | dict(lr=5e-4, min_lr=2e-5, grad_clip=0.5))
    assert f"warning    {empty} has no meta.json: stepped over\n" in printed and "step_000006: step 6, " in printed
    assert "changed    grad_clip 1.0 -> 0.5, keep_last 0 -> 2, lr 0.001 -> 0.0005, max_steps 6 -> 7, min_lr " in printed
    checkpoint = tmp_path / "out/ckpt/step_000007"
    file = next(checkpoint.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(file)
    name = next(name for name in tensors if name.startswith("parameter."))
    tensors[name].view(-1)[3] = float("nan")
    safetensors.torch.save_file(tensors, file, metadata=safetensors.safe_open(file, "pt").metadata())
    line = refusal("train_i2v_sft.py", **base | dict(max_steps=8))
    assert line == f"error: checkpoint {checkpoint}: got NaN or infinity in {name}: go on from one before"


def test_a_damaged_checkpoint_is_one_line(world, straight, tmp_path):
    base = paths(world) | SHORT | dict(out_dir=tmp_path / "out", max_steps=7)
    shutil.copytree(straight, tmp_path / "out")
    checkpoint = tmp_path / "out/ckpt/step_000006"
    for path in checkpoint.glob("*.safetensors"):
        os.truncate(path, 100)
    line = refusal("train_i2v_sft.py", **base)
    assert f"checkpoint {checkpoint} is damaged (" in line and line.endswith("remove it to go on from the one before")


def test_a_full_disk_anywhere_is_one_line(train, world, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("plot.MetricsLog.write", full)
    line = refusal("train_i2v_sft.py", **paths(world), **SHORTEST, out_dir=tmp_path / "out")
    assert line == "error: [Errno 28] No space left on device: 'metrics.jsonl'"


# ----------------------------------------------------------------------------- real launches


def worker(file):
    """What each of two ranks does under torchrun: the runs of a JSON file, one process group each; rank 0 tells."""
    rank, endings = int(os.environ["RANK"]), []
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # a store for each run, not torchrun's one for all
    draw, write = flow.draw_expert, checkpoints.HuggingFaceStorageWriter.write_data
    for i, run in enumerate(json.loads(Path(file).read_text())):
        os.environ["MASTER_PORT"] = str(run["port"])

        def draw_and_log(experts, boundary_ratio, shift, seed, step, i=i, run=run):
            expert = draw(experts, boundary_ratio, shift, seed, step)
            with open(f"{file}.{i}.{rank}", "a") as log:
                log.write(f"{step} {expert}\n")
            if rank == 1 and step + 1 == run["stop"]:
                os.kill(os.getpid(), signal.SIGTERM)  # one rank only
            return expert

        def die_or_write(writer, *args, run=run):
            if rank == 1 and str(writer.path).endswith(f"tmp_{run.get('dies', 0):06d}"):
                os.kill(os.getpid(), signal.SIGKILL)
            return write(writer, *args)

        flow.draw_expert, checkpoints.HuggingFaceStorageWriter.write_data = draw_and_log, die_or_write
        try:
            ending = script("train_i2v_sft.py", **run["settings"])[1]
        except (UserError, SystemExit) as error:
            ending = "told elsewhere" if getattr(error, "told", False) else f"{type(error).__name__} {error}"
        fsdp.cleanup()
        endings.append(ending)
        Path(f"{file}.endings.{rank}").write_text(json.dumps(endings))


def test_real_launches(world, straight, straight_lora, tmp_path, monkeypatch):
    """torchrun with four runs on two ranks, a process that gets a SIGTERM, two refused ones, and a rank that dies."""
    text = {name: str(value) for name, value in paths(world).items()} | SHORT
    lora = text | dict(lora_rank=4, lora_alpha=8, lr=0.05, batch_size=4)
    resumed = tmp_path / "one_then_two"
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        script("train_i2v_sft.py", **lora | dict(batch_size=8, out_dir=str(resumed)))
    runs = [
        dict(stop=0, settings=text | dict(batch_size=4, out_dir=str(tmp_path / "two"))),
        dict(stop=4, settings=lora | dict(out_dir=str(tmp_path / "two_then_one"))),
        dict(stop=0, settings=lora | dict(out_dir=str(resumed))),
        dict(stop=0, settings=text | dict(batch_size=12, out_dir=str(tmp_path / "refused"))),
    ]
    (tmp_path / "runs").write_text(json.dumps([run | dict(port=p) for run, p in zip(runs, free_ports(4), strict=True)]))
    (tmp_path / "config.py").write_text("".join(f"{name} = {value!r}\n" for name, value in text.items()))

    def start(command, settings):
        return subprocess.Popen([*command, *flags(settings)], cwd=tmp_path, env=ENVIRONMENT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    single = [sys.executable, str(path_of("train_i2v_sft.py")), "config.py"]
    together = start([*TORCHRUN, __file__, tmp_path / "runs"], {})
    stopped = start(single, dict(out_dir=tmp_path / "stopped", max_steps=100_000, save_interval=0, eval_interval=0))
    while "step 0003" not in (line := stopped.stdout.readline()) and line:
        pass
    stopped.send_signal(signal.SIGTERM)
    wrong = start(single, dict(batch_sizes=3))
    out, err = stopped.communicate(timeout=120)
    assert stopped.returncode == 0 and "stopped: SIGTERM; the same command resumes" in out, err
    last = checkpoints.saved_in(tmp_path / "stopped")
    assert len(last) == 1 and checkpoints.read_meta(last[0])["step"] >= 3
    rows = train_rows(tmp_path / "stopped")
    assert [row["step"] for row in rows] == list(range(1, checkpoints.read_meta(last[0])["step"] + 1))
    out, err = wrong.communicate(timeout=120)
    assert wrong.returncode == 1 and out == ""
    assert err == f"error: --batch_sizes is not a setting of {Path(single[1]).name}; the nearest is batch_size\n"

    out, err = together.communicate(timeout=240)
    assert together.returncode == 0, err[-4000:]
    refused = start([*TORCHRUN, str(path_of("train_i2v_sft.py")), "config.py"], dict(batch_size=12))
    dies = text | dict(batch_size=4, out_dir=str(tmp_path / "dies"))
    dies = dict(stop=0, dies=6, port=free_ports(1)[0], settings=dies)
    (tmp_path / "dies.json").write_text(json.dumps([dies]))
    dead = start([*TORCHRUN, __file__, tmp_path / "dies.json"], {})
    endings = [json.loads((tmp_path / f"runs.endings.{rank}").read_text()) for rank in (0, 1)]

    # two ranks with half the batch each compute what one process does, EMA and its evaluations included
    assert_same_rows(train_rows(tmp_path / "two"), train_rows(straight), 1e-5)
    for found, wanted in zip(eval_rows(tmp_path / "two"), eval_rows(straight), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    shards = sorted(name for name in files_of(tmp_path / "two") if "step_000006/shard" in name)
    assert len(shards) == 2
    for expert in ("transformer", "transformer_2"):
        file = f"model/{expert}/diffusion_pytorch_model.safetensors"
        found, wanted = (safetensors.torch.load_file(folder / file) for folder in (tmp_path / "two", straight))
        assert found.keys() == wanted.keys()
        assert max((found[name] - wanted[name]).abs().max() for name in wanted) < 1e-4
    logs = [(tmp_path / f"runs.0.{rank}").read_text().split() for rank in (0, 1)]
    assert logs[0] == logs[1] and logs[0][1::2] == [row["expert"] for row in train_rows(straight)]
    assert endings[1][0] == ""  # one rank speaks

    # SIGTERM to one rank stops both after the step; one process goes on from there
    assert "stopped: SIGTERM" in endings[0][1]
    assert [row["step"] for row in train_rows(tmp_path / "two_then_one")] == [1, 2, 3, 4]
    printed = script("train_i2v_sft.py", **lora | dict(batch_size=8, out_dir=str(tmp_path / "two_then_one")))[1]
    assert "step_000004: step 4" in printed
    assert "step_000002: step 2" in endings[0][2]
    for folder in (tmp_path / "two_then_one", resumed):
        assert_same_rows(train_rows(folder), train_rows(straight_lora), 1e-4)
        for expert in ("high", "low"):
            found, wanted = (safetensors.torch.load_file(at / f"lora/{expert}_noise.safetensors")
                             for at in (folder, straight_lora))
            assert max((found[name] - wanted[name]).norm() / wanted[name].norm() for name in wanted) < 1e-2

    # more clips than windows, found by both ranks, said by one
    message = "batch_size=12 on 2 ranks: more than the 22 training windows; "
    assert endings[0][3].startswith(f"UserError {message}") and endings[1][3] == "told elsewhere"
    assert not (tmp_path / "refused").exists()
    started = time.time()
    out, err = refused.communicate(timeout=120)
    assert refused.returncode == 1 and "data       " not in out and time.time() - started < 60  # the costs alone
    line = f"[rank0]: error: {message}lower batch_size, use fewer ranks or a smaller window_stride"  # torch's prefix
    assert [line for line in err.splitlines() if "error: " in line and "[rank" in line] == [line]

    # rank 1 was killed while it wrote its shard of step 6; torchrun sent rank 0 a SIGTERM, which published nothing
    out, err = dead.communicate(timeout=120)
    assert dead.returncode == 1 and "Signal 9 (SIGKILL)" in err and time.time() - started < 60
    assert sorted(os.listdir(tmp_path / "dies/ckpt")) == ["step_000003", "tmp_000006"]
    assert [row["step"] for row in train_rows(tmp_path / "dies")] == [1, 2, 3, 4, 5, 6]


if __name__ == "__main__":
    worker(sys.argv[1])
