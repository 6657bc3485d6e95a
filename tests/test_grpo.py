"""train_grpo.py as it is started, on models of 0.1 M parameters: a run of two iterations takes a third of a second.

Nearly all runs happen inside this process; one torchrun does on two gloo ranks what one process did before.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

import adapters
import checkpoints
import encoders
import flow
import fsdp
import held_out
import helpers
import model as wan_model
import prompts
import reward
import rollout
import sampler
import tiny
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
    smooth_adamw,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUICK = dict(rewards="first_frame:1.0", eval_rewards="smoothness:1.0", prompts_per_iteration=3, group_size=4,
             rollout_batch=6, decode_batch=12, num_steps=4, num_sde_steps=2, sde_window="(0,3)", num_eval_samples=2,
             num_eval_videos=0, num_eval_steps=2, eval_interval=0, save_interval=0, max_iterations=2, lora_rank=4,
             lora_alpha=8, lr=1e-3, guidance_scale_2=1)
STRAIGHT = QUICK | dict(max_iterations=4, eval_interval=2, save_interval=1, keep_last=0, ema_decay=0.8, kl_beta=0.1,
                        num_inner_epochs=2, num_minibatches=2, lr=1e-2, num_eval_videos=1)
QUICK, STRAIGHT = kept("train_grpo.py", QUICK), kept("train_grpo.py", STRAIGHT)
GUIDED = dict(guidance_scale=3.0, guidance_scale_2=2.0, negative_prompt="dark")


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """train.jsonl, eval.jsonl and random models of one layer: ti2v with one expert, i2v with two."""
    folder = tmp_path_factory.mktemp("grpo")
    tiny.make_prompts(folder)
    parts = (encoders.AutoencoderDCT(), *tiny.make_text_encoder())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(num_layers=1, num_attention_heads=2, ffn_dim=128).items():
            patch.setitem(tiny.TRANSFORMER, name, value)
        for kind in ("ti2v", "i2v", "t2v"):
            tiny.make_checkpoint(folder / kind, kind, *parts)
    return folder


def paths(world, kind="ti2v"):
    return dict(model=str(world / kind), data_jsonl=str(world / "train.jsonl"),
                eval_data_jsonl=str(world / "eval.jsonl"))


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Half a second each; the session's runs draw theirs."""
    monkeypatch.setattr("plot.draw_curves", lambda out_dir: None)


@pytest.fixture
def train(world, tmp_path):
    """Runs the script with QUICK settings into tmp_path/out -> (its globals, what it printed)."""

    def run(kind="ti2v", **settings):
        return script("train_grpo.py", **paths(world, kind) | dict(out_dir=tmp_path / "out") | QUICK | settings)

    return run


@pytest.fixture(scope="session")
def straight(world, tmp_path_factory):
    """out_dir of an uninterrupted run, all checkpoints kept."""
    out_dir = tmp_path_factory.mktemp("straight")
    script("train_grpo.py", **paths(world), **STRAIGHT, out_dir=out_dir)
    return out_dir


def untimed(out_dir):
    return [{name: value for name, value in row.items() if not name.startswith("seconds/")} for row in rows_of(out_dir)]


def train_rows(out_dir):
    return [row for row in untimed(out_dir) if "loss" in row]


def eval_rows(out_dir):
    return [row for row in untimed(out_dir) if "loss" not in row]


def lora_of(out_dir, expert="lora"):
    return safetensors.torch.load_file(Path(out_dir, f"lora/{expert}.safetensors"))


def before_call(monkeypatch, module, name, count, action):
    """action() before the count-th call of module.name, counted from 1."""
    call, calls = getattr(module, name), []

    def counted(*args, **kwargs):
        calls.append(None)
        if len(calls) == count:
            action()
        return call(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def record_calls(monkeypatch, module, name):
    """-> a list of (arguments, result) of each call, filled later."""
    call, calls = getattr(module, name), []

    def recorded(*args, **kwargs):
        result = call(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(module, name, recorded)
    return calls


def record_gradients(monkeypatch):
    """-> a list of the gradients of each optimizer step, {position: gradient or None}, as clipping finds them."""
    call, steps = torch.nn.utils.clip_grad_norm_, []

    def recorded(parameters, max_norm):
        parameters = list(parameters)
        steps.append([p.grad.clone() if p.grad is not None else None for p in parameters])
        return call(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    return steps


def use_reward(monkeypatch, function):
    """Makes a function the reward named "mine"."""
    monkeypatch.setitem(reward.REWARDS, "mine", reward.ready(function))


# ----------------------------------------------------------------------------- one run


def test_a_run_leaves_what_it_promises(world, straight):
    files = files_of(straight)
    assert {"config.json", "metrics.jsonl", "curves.png", "samples/before_0.npy", "samples/step_000004_0.mp4",
            "samples/step_000002_0.png", "lora/lora.safetensors",
            "lora/comfyui_lora.safetensors"} <= set(files)
    assert not [name for name in files if "tmp" in name or name.startswith("model")]
    assert [row["step"] for row in train_rows(straight)] == [1, 2, 3, 4]
    assert [row["step"] for row in eval_rows(straight)] == [0, 2, 4]
    for row in eval_rows(straight):
        assert row.keys() == {"step", "eval/first_frame", "eval/smoothness", "eval_error/first_frame",
                              "eval_error/smoothness"}
        assert row["eval_error/first_frame"] > 0
    assert all(row["reward"] == pytest.approx(row["reward/first_frame"]) for row in train_rows(straight))
    assert "reward/smoothness" not in train_rows(straight)[0]
    # what is exported is the average, which diffusers' layout names without "default"
    state = tensors_of(straight, 4)
    exported = lora_of(straight)
    assert len(exported) == 20
    for name, tensor in exported.items():
        name = name.replace("transformer.", "single.").replace(".weight", ".default.weight")
        assert torch.equal(tensor, state[f"ema.{name}"]) and not torch.equal(tensor, state[f"parameter.{name}"])
    # and the average is that of the parameters after each iteration
    name = "single.blocks.0.attn1.to_q.lora_B.default.weight"
    average = torch.zeros_like(state[f"ema.{name}"]).double()
    for step in range(1, 5):
        average = 0.8 * average + 0.2 * tensors_of(straight, step)[f"parameter.{name}"].double()
    torch.testing.assert_close(state[f"ema.{name}"].double(), average, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind, settings", [
    ("ti2v", {}), ("ti2v", dict(law="cps")), ("ti2v", dict(law="dance", noise_level=0.3)), ("i2v", GUIDED),
    ("i2v", GUIDED), ("t2v", {}), ("ti2v", dict(rollout_batch=1)), ("ti2v", dict(lora_rank=0)),
    ("ti2v", dict(recompute_log_prob=True)), ("ti2v", dict(ratio_norm=True)), ("i2v", dict(checkpointing="selective")),
])
def test_the_first_ratio_is_exactly_1(train, tmp_path, kind, settings):
    """In float32 training scores a step with the very number that the rollout kept."""
    printed = train(kind, **settings | dict(max_iterations=1, clip_range=1e-6, num_sde_steps=3))[1]
    assert "ratio of the first update: 1 +- 0.0e+00 (step 0), 0.0e+00 (step 1), 0.0e+00 (step 2); clip" in printed
    if settings.get("lora_rank") != 0:
        assert "self-check reference against policy: 0.0e+00, want 0" in printed
    (row,) = train_rows(tmp_path / "out")
    assert row["ratio"] == 1.0 and row["clip_fraction"] == 0.0 and row["grad_norm"] > 0
    assert row.get("kl", 0.0) == 0.0


def test_a_drift_beyond_the_clip_range_ends_the_run(world, train, tmp_path, monkeypatch):
    log_prob = rollout.log_prob
    calls = []

    def drifting(*args):
        calls.append(None)
        return log_prob(*args) + 1e-3 * (len(calls) > 4)  # 2 batches x 2 steps are drawn before any is scored

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "log_prob", drifting)
        line = refusal("train_grpo.py", **paths(world), **QUICK | dict(clip_range=5e-4), out_dir=tmp_path / "out")
        assert "ratios differ from 1 by 1.0e-03, more than clip_range=0.0005: set recompute_log_prob=True" in line
        calls.clear()
        train(clip_range=5e-4, recompute_log_prob=True, out_dir=tmp_path / "recomputed", max_iterations=1)
    assert train_rows(tmp_path / "recomputed")[0]["ratio"] == 1.0


def test_recomputed_log_probs_change_nothing_in_float32(train, tmp_path):
    for name, recompute in (("kept", False), ("recomputed", True)):
        names, _ = train(recompute_log_prob=recompute, num_inner_epochs=2, out_dir=tmp_path / name)
    rows = untimed(tmp_path / "recomputed")
    drifts = [row.pop(name) for row in rows for name in list(row) if name.startswith("drift/")]
    assert drifts == [0] * 12  # velocity and ratio of 2 steps and of the worst, in 2 iterations
    assert untimed(tmp_path / "kept") == rows
    kept = {name: value for name, value in names.items() if torch.is_tensor(value) and value.grad_fn is not None}
    assert kept.keys() == {"clipped", "difference", "loss", "moved", "ratio"}
    for tensor in kept.values():  # of graphs that the backward pass has freed: one more alive would double the memory
        with pytest.raises(RuntimeError, match="second time"):
            tensor.sum().backward()
    assert_same_checkpoint(tensors_of(tmp_path / "recomputed", 2), tensors_of(tmp_path / "kept", 2))


def test_what_an_iteration_is_made_of(world, train, tmp_path, monkeypatch):
    """Whole groups of distinct prompts, each video with noise of its own, one window, advantages that sum to zero."""
    samples = record_calls(monkeypatch, sampler, "sample")
    scores = record_calls(monkeypatch, reward, "score")
    advantages = record_calls(monkeypatch, reward, "group_advantages")
    names, printed = train(max_iterations=3, prompts_per_iteration=7, rollout_batch=4)
    assert "7 prompts x 4, flow at noise level 0.7 in 2 steps of (0, 3), 8 tokens a video, 28 videos a rank" in printed
    assert "grid       4 steps, shift 5: 1.000 0.910 0.717 0.024 0.000" in printed
    rollouts = [(args, kept) for args, (_, kept) in samples if kept]
    images = [[entry["image_path"] for entry in args[3]] for args, values in scores if "smoothness" not in values]
    assert len(rollouts) == len(images) == 3 * 7 and len(advantages) == 3
    seen = []
    for iteration in range(3):
        mine = range(7 * iteration, 7 * iteration + 7)
        own = [images[i][0] for i in mine]
        assert all(images[i] == [images[i][0]] * 4 for i in mine)  # rollout_batch = group_size: a batch is a group
        assert len(set(own)) == 7
        seen += own
        window = rollout.draw_window(2, (0, 3), 0, iteration)
        assert all([t.index for t in rollouts[i][1]] == window for i in mine)
        assert train_rows(tmp_path / "out")[iteration]["window"] == window[0]
        (rewards, groups, *_), (values, _) = advantages[iteration]
        assert groups.tolist() == sorted(list(range(7)) * 4)
        assert values.view(7, 4).double().sum(1).abs().max() < 1e-5 and values.abs().max() > 0.5
        rewards = rewards.view(7, 4)
        expected = (rewards - rewards.mean(1, True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
        torch.testing.assert_close(values.view(7, 4), expected.float())
    assert len(set(seen)) == 21  # of 90 lines: one permutation
    noise = torch.cat([args[1] for args, kept in rollouts]).flatten(1)
    drawn = torch.cat([kept[0].next_latents - kept[0].mean for _, kept in rollouts])[:, :, 1:].flatten(1)
    for values in (noise, drawn):
        assert len({tuple(video[:4].tolist()) for video in values}) == 84
    # a video is a function of (seed, iteration, its number): the batch it came in doesn't matter
    samples.clear()
    train(max_iterations=1, prompts_per_iteration=7, rollout_batch=14, out_dir=tmp_path / "batches")
    found = torch.cat([kept[1].next_latents for _, (_, kept) in samples if kept])
    wanted = torch.cat([kept[1].next_latents for _, kept in rollouts[:7]])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_micro_batches_change_nothing(train, tmp_path, monkeypatch):
    smooth_adamw(monkeypatch)
    for size in (2, 12):
        train(rollout_batch=size, kl_beta=0.1, decode_batch=5, out_dir=tmp_path / str(size))
    for found, wanted in zip(train_rows(tmp_path / "2"), train_rows(tmp_path / "12"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-7)
    for name, tensor in lora_of(tmp_path / "2").items():
        torch.testing.assert_close(tensor, lora_of(tmp_path / "12")[name], atol=1e-6, rtol=0)


# ----------------------------------------------------------------------------- the loss


def record_updates(monkeypatch):
    """-> a list of ({name: parameter}, its gradients) before each optimizer step, copies."""
    call, updates = torch.nn.utils.clip_grad_norm_, []

    def recorded(parameters, max_norm):
        parameters = list(parameters)
        updates.append([(p.detach().clone(), p.grad.clone()) for p in parameters])
        return call(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    return updates


def normal_of(names, record, step, law, policy=None):
    """The normal distribution of a step's generated positions under a policy, by the formulas, and the draw."""
    policy, grid, k = policy or names["policy"], names["sigmas"], step.index
    sigma = grid[k].expand(len(step.latents))
    velocity = wan_model.velocity(policy, step.latents, sigma, record.condition, record.text)
    mean, std = rollout.sde_step(law, step.latents, velocity, *grid[[k, k + 1, 1]].tolist(), names["noise_level"])
    return torch.distributions.Normal(mean[:, :, 1:], std), step.next_latents[:, :, 1:]


@pytest.mark.parametrize("law, ratio_norm, kl_beta", [("flow", False, 0.0), ("flow", False, 0.7), ("flow", True, 0.0),
                                                      ("dance", False, 0.0), ("dance", True, 0.7)])
def test_gradients_are_those_of_the_papers_loss(train, monkeypatch, world, law, ratio_norm, kl_beta):
    """Of the second update on a rollout: ratios have left 1, some beyond the clip range, and the KL is above 0."""
    updates = record_updates(monkeypatch)
    clip_range = 3e-3 if ratio_norm else 1e-3
    names, _ = train(max_iterations=1, num_inner_epochs=2, kl_beta=kl_beta, law=law, ratio_norm=ratio_norm, lr=2e-2,
                     clip_range=clip_range, noise_level=0.5, sde_window="(1,3)")
    base = helpers.load(world / "ti2v")
    with torch.no_grad():
        for p, (value, _) in zip(names["parameters"].values(), updates[1], strict=True):
            p.copy_(value)
    values, losses, kls, outside = list(names["parameters"].values()), [], [], []
    for record, step in names["pairs"]:
        advantages = names["advantages"][list(record.positions)]
        now, drawn = normal_of(names, record, step, law)
        with torch.no_grad():
            reference, _ = normal_of(names, record, step, law, base)
        mean = lambda x: x.mean((1, 2, 3, 4))  # noqa: E731
        difference, weight = mean(now.log_prob(drawn)) - step.log_prob, 1.0
        if ratio_norm:  # GRPO-Guard, arXiv 2510.22319
            difference = (difference + mean((now.mean - step.mean[:, :, 1:]) ** 2) / (2 * now.stddev.max() ** 2))
            difference = difference * now.stddev.max()
            weight = 1 / (names["sigmas"][step.index] - names["sigmas"][step.index + 1])
        ratio = difference.exp()
        outside += ((ratio - 1).abs() > clip_range).tolist()
        clipped = torch.where(ratio > 1 + clip_range, 1 + clip_range, ratio)
        clipped = torch.where(ratio < 1 - clip_range, 1 - clip_range, clipped)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        kls.append(mean(torch.distributions.kl_divergence(now, reference)))
        losses.append(-weight * surrogate + kl_beta * kls[-1])
    assert 0.1 < np.mean(outside) < 0.9 and min(kl.min() for kl in kls) > 0
    for found, wanted in zip(updates[1], torch.autograd.grad(torch.stack(losses).mean(), values), strict=True):
        torch.testing.assert_close(found[1], wanted, rtol=2e-3, atol=2e-3 * wanted.abs().max().item())
    row = train_rows(Path(names["out_dir"]))[0]  # means of the first update, where all is 1 and 0, and of the second
    assert row["clip_fraction"] == pytest.approx(np.mean(outside) / 2)
    if kl_beta:
        assert row["kl"] == pytest.approx(torch.stack(kls).mean().item() / 2, rel=1e-3)


def test_a_kl_alone_pulls_back_to_the_reference(train, tmp_path, monkeypatch):
    """Equal rewards and kl_beta: nothing but the KL has a gradient, and training lowers it."""
    settings = dict(rewards="mine", kl_beta=30.0, lr=1e-2, weight_decay=0.0, num_sde_steps=1, sde_window="(1,2)")
    use_reward(monkeypatch, lambda videos, prompts, metadata: 1e3 * reward.smoothness(videos, prompts, metadata))
    train(max_iterations=8, **settings)
    use_reward(monkeypatch, lambda videos, prompts, metadata: torch.ones(len(videos)))
    train(max_iterations=32, **settings)
    kl = [row["kl"] for row in train_rows(tmp_path / "out")]
    assert kl[0] == 0 and kl[8] > 0 and kl[-1] < 0.3 * max(kl), kl


def test_equal_rewards_give_no_gradient_and_such_a_run_goes_on(train, tmp_path, monkeypatch):
    use_reward(monkeypatch, lambda videos, prompts, metadata: torch.ones(len(videos)))
    gradients = record_gradients(monkeypatch)
    train(rewards="mine", weight_decay=0.0)
    assert [(row["zero_std_groups"], row["grad_norm"]) for row in train_rows(tmp_path / "out")] == [(3, 0.0)] * 2
    assert all((g == 0).all() for step in gradients for g in step) and len(gradients) == 2
    printed = train(rewards="mine", weight_decay=0.0, max_iterations=3)[1]  # B is still 0, after two iterations
    assert "iteration 2" in printed and "reference against policy: 0.0e+00, want 0" in printed


def test_one_group_of_equal_rewards_weighs_nothing(world, train, tmp_path, monkeypatch):
    """Its videos' losses have no gradient; those of the others keep theirs."""

    def equal_for_one(videos, texts, metadata):
        values = reward.first_frame(videos, texts, metadata)
        return torch.where(torch.tensor([entry["image_path"] == one for entry in metadata]), 3.0, values)

    lines = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    indices = prompts.group_indices(len(lines), 3, 0, 0)
    one = lines[indices[1]]["metadata"]["image_path"]
    use_reward(monkeypatch, equal_for_one)
    calls = record_calls(monkeypatch, reward, "group_advantages")
    train(rewards="mine", max_iterations=1)
    ((_, (advantages, num_equal)),) = calls
    assert num_equal == 1 == train_rows(tmp_path / "out")[0]["zero_std_groups"]
    assert (advantages[4:8] == 0).all() and (advantages[:4] != 0).all() and (advantages[8:] != 0).all()
    assert train_rows(tmp_path / "out")[0]["grad_norm"] > 0


def test_several_updates_a_rollout_move_the_ratio(train, tmp_path):
    train(num_inner_epochs=2, num_minibatches=2, lr=1e-2, clip_range=1e-4)
    for row in train_rows(tmp_path / "out"):
        assert row["ratio"] != 1.0 and 0 < row["clip_fraction"] < 1
    settings = tensors_of(tmp_path / "out", 2)
    steps = {int(tensor) for name, tensor in settings.items() if name.endswith(".step")}
    assert steps == {2 * 2 * 2}


@pytest.mark.parametrize("change", [
    dict(law="cps"), dict(law="dance", noise_level=0.3), dict(ratio_norm=True), dict(global_std=True),
    dict(kl_beta=0.5), dict(rewards="first_frame:1.0,smoothness:2.5"), dict(noise_level=0.3), dict(ema_decay=0),
    dict(shift=3.0), GUIDED, dict(advantage_clip=0.5), dict(seed=1),
    dict(dtype="bfloat16", vae_dtype="bfloat16", recompute_log_prob=True),
])
def test_each_setting_changes_what_is_learned(straight_two, train, tmp_path, change):
    """They all run two iterations to a loadable adapter, and none is ignored."""
    train(**change)
    found = lora_of(tmp_path / "out")
    assert any(not torch.equal(tensor, straight_two[name]) for name, tensor in found.items())
    assert all(tensor.isfinite().all() for tensor in found.values())
    rows = train_rows(tmp_path / "out")
    if "rewards" in change:
        for row in rows:
            assert row["reward"] == pytest.approx(row["reward/first_frame"] + 2.5 * row["reward/smoothness"])
    assert all(row["grad_norm"] > 0 for row in rows)


def test_warmup_and_the_interval_of_the_average(train, tmp_path):
    train(max_iterations=4, warmup_iterations=4, ema_interval=2, ema_decay=0.6, save_interval=1, keep_last=0)
    assert [row["lr"] for row in train_rows(tmp_path / "out")] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    name = "single.blocks.0.attn1.to_q.lora_B.default.weight"
    states = [tensors_of(tmp_path / "out", step) for step in (1, 2, 3)]
    assert states[0][f"parameter.{name}"].any() and not states[0][f"ema.{name}"].any()
    torch.testing.assert_close(states[1][f"ema.{name}"], 0.4 * states[1][f"parameter.{name}"])
    assert torch.equal(states[2][f"ema.{name}"], states[1][f"ema.{name}"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_held_out_rewards_are_mean_and_standard_error(world, tmp_path, world_size, monkeypatch):
    """Seven videos of the prompts in turn, on any number of ranks; here the ranks come one after another."""
    prompts_file = prompts.Prompts(world / "eval.jsonl", 16, 16)
    value = lambda i: (0.3 * i) % 1  # noqa: E731
    number_of = {flow.seed_of(0, flow.VALIDATION, i): i for i in range(7)}  # a video's noise is its own
    videos_of = lambda file, lines, seeds: torch.stack([  # noqa: E731
        torch.full((5, 3, 16, 16), value(number_of[seed])) for seed in seeds])
    sampler, seen = SimpleNamespace(generate=videos_of), []

    def brightness(videos, texts, metadata):
        seen.extend(zip(videos[:, 0, 0, 0, 0].tolist(), texts, metadata, strict=True))
        return videos.mean((1, 2, 3, 4))

    config = dict(seed=0, num_eval_samples=7, num_eval_videos=0, rollout_batch=2, out_dir=tmp_path)
    sums = []  # of each rank, in the order of the reductions
    monkeypatch.setattr(fsdp, "reduce_sum", lambda values: sums.append(values) or values)
    for rank in range(world_size):
        held_out.score(sampler, {"mine": brightness}, prompts_file, config, 0, rank, world_size)
    monkeypatch.setattr(fsdp, "reduce_sum", lambda values: np.sum(sums, axis=0).tolist())
    means, errors = held_out.score(sampler, {"mine": brightness}, prompts_file, config, 0, 0, world_size)
    values = np.array([value(i) for i in range(7)])
    assert means["mine"] == pytest.approx(values.mean()) and errors["mine"] == pytest.approx(
        values.std(ddof=1) / np.sqrt(7), rel=1e-5)
    for i in range(7):
        matching = [entry for entry in seen if entry[0] == pytest.approx(value(i))]
        assert matching and all(entry[1:] == (prompts_file.prompts[i], prompts_file.metadata[i]) for entry in matching)


@pytest.fixture(scope="session")
def straight_two(world, tmp_path_factory):
    """The adapter of a QUICK run."""
    out_dir = tmp_path_factory.mktemp("two")
    script("train_grpo.py", **paths(world), **QUICK, out_dir=out_dir)
    return lora_of(out_dir)


# ----------------------------------------------------------------------------- experts, full fine-tuning, adapters


@pytest.mark.parametrize("window, experts", [((0, 2), {"high"}), ((2, 4), {"low"}), ((1, 3), {"high", "low"})])
def test_the_experts_of_the_windows_steps_are_trained(train, tmp_path, monkeypatch, window, experts):
    """Grid 1.000 0.910 0.717 0.024: the boundary of 0.9 lies between steps 1 and 2."""
    gradients = record_gradients(monkeypatch)
    names, _ = train("i2v", sde_window=window, max_iterations=1, weight_decay=0.1)
    (step,) = gradients
    with_gradient = {name.split(".")[0] for name, g in zip(names["parameters"], step, strict=True) if g is not None}
    assert with_gradient == experts
    for name, g in zip(names["parameters"], step, strict=True):
        if g is not None and "lora_B" in name:
            assert g.abs().max() > 0
    assert files_of(tmp_path / "out/lora") == ["comfyui_high_noise.safetensors", "comfyui_low_noise.safetensors",
                                               "high_noise.safetensors", "low_noise.safetensors"]
    for expert in ("high", "low"):  # the other one's adapter is still the identity
        B = [tensor for name, tensor in lora_of(tmp_path / "out", f"{expert}_noise").items() if "lora_B" in name]
        assert any(tensor.any() for tensor in B) == (expert in experts)


def test_a_run_of_two_experts_resumes_where_the_next_window_belongs_to_an_untrained_one(train, tmp_path, monkeypatch):
    settings = dict(num_sde_steps=1, sde_window="(1,3)", num_steps=4)
    windows = [rollout.draw_window(1, (1, 3), 0, iteration) for iteration in range(12)]
    change = next(i for i in range(1, 12) if windows[i] != windows[0])
    train("i2v", **settings, max_iterations=change)
    printed = train("i2v", **settings, max_iterations=change + 1)[1]
    assert f"iteration {change}\n" in printed and "reference against policy: 0.0e+00, want 0" in printed


def test_it_starts_from_an_exported_adapter(world, train, straight, tmp_path):
    """Its videos are those of the run that exported it, and diffusers' layout loads into a fresh model."""
    start = dict(init_lora=straight / "lora", max_iterations=1)
    printed = train(**start)[1]
    assert "reference against policy: 0.0e+00, want 0" in printed  # the policy it starts from is the reference
    begin, end = eval_rows(tmp_path / "out")[0], eval_rows(straight)[-1]
    assert begin["eval/first_frame"] == pytest.approx(end["eval/first_frame"], rel=1e-5)
    assert begin["eval/first_frame"] != pytest.approx(eval_rows(straight)[0]["eval/first_frame"], rel=1e-5)
    assert train_rows(tmp_path / "out")[0]["kl"] == 0
    printed = train(**start | dict(max_iterations=2))[1]
    assert "reference against policy: " in printed and ", want more than 0" in printed
    assert train_rows(tmp_path / "out")[1]["kl"] > 0

    wan = wan_model.describe(str(world / "ti2v"))
    tensors, rank, alpha, targets = adapters.read_lora(str(straight / "lora"), wan, "single")
    assert (rank, alpha) == (4, 8)
    transformer = wan_model.load_transformer(wan, "single", "cpu", torch.float32)
    adapters.load_lora(adapters.add_lora(transformer, rank, alpha, targets), tensors)

    refused = paths(world) | QUICK | start | dict(out_dir=tmp_path / "refused")
    for change, words in {
        ("lora_rank", 8): "lora has 4, ",
        ("lora_targets", "to_q"): "lora_targets=to_q: ",
        ("lora_alpha", 4): "lora_alpha=4: ",
        ("lora_rank", 0): "want the lora_rank it was trained with",
        ("init_lora", tmp_path): f"{tmp_path}: no adapter there; want ",
    }.items():
        assert words in refusal("train_grpo.py", **refused | dict([change]))
    assert not (tmp_path / "refused").exists()


def test_full_fine_tuning_with_a_frozen_copy_exports_a_model(world, train, tmp_path):
    full = dict(lora_rank=0, kl_beta=0.5, lr=1e-4)
    names, printed = train("i2v", **full, max_iterations=3, sde_window="(1,3)")
    rows = train_rows(tmp_path / "out")
    assert rows[0]["kl"] == 0 and rows[1]["kl"] > 0 and "adapters off" not in printed
    assert not (tmp_path / "out/lora").exists()
    state = tensors_of(tmp_path / "out", 3)
    for expert, folder in (("high", "transformer"), ("low", "transformer_2")):
        file = f"{folder}/diffusion_pytorch_model.safetensors"
        exported, original = (safetensors.torch.load_file(at / file) for at in (tmp_path / "out/model", world / "i2v"))
        assert exported.keys() == original.keys()
        for name, tensor in exported.items():
            assert torch.equal(tensor, state[f"ema.{expert}.{name}"])
        assert not torch.equal(exported["proj_out.weight"], original["proj_out.weight"])
        frozen = dict(names["frozen"][expert].named_parameters())
        assert all(torch.equal(p, original[name]) for name, p in frozen.items())
    train("i2v", model=tmp_path / "out/model", out_dir=tmp_path / "next")  # and such a model can be trained again
    found, wanted = eval_rows(tmp_path / "next")[0], eval_rows(tmp_path / "out")[-1]
    assert found["eval/first_frame"] == pytest.approx(wanted["eval/first_frame"], rel=1e-5)


def test_reward_rises(train, tmp_path):
    """The first generated frame is to continue the given one; measured on prompts that are not trained on, too."""
    train(max_iterations=25, prompts_per_iteration=6, group_size=8, rollout_batch=48, num_eval_samples=24, lr=5e-2,
          sde_window="(1,3)")
    rewards = [row["reward"] for row in train_rows(tmp_path / "out")]
    before, after = eval_rows(tmp_path / "out")
    assert np.mean(rewards[-5:]) > 0.85 * np.mean(rewards[:5])  # both negative
    gain = after["eval/first_frame"] - before["eval/first_frame"]
    assert gain > 5 * max(row["eval_error/first_frame"] for row in (before, after))
    assert after["eval/first_frame"] > 0.85 * before["eval/first_frame"]


# ----------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("late, words", [
    (lambda videos: torch.full((len(videos),), torch.nan), "reward mine: got nan"),
    (lambda videos: videos[:, 5, 0, 0, 0], "reward mine: IndexError: index 5 is out of bounds for dimension 1"),
])
def test_a_reward_that_fails_later_loses_nothing(world, train, tmp_path, monkeypatch, capfd, late, words):
    out = tmp_path / "out"

    def failing(videos, prompts, metadata):
        return late(videos) if train_rows(out) else torch.ones(len(videos))

    use_reward(monkeypatch, failing)
    settings = QUICK | dict(rewards="mine", out_dir=out, max_iterations=3)
    assert words in refusal("train_grpo.py", **paths(world), **settings)
    assert ("in failing" in capfd.readouterr().err) == ("IndexError" in words)  # the author of an error sees where
    assert [path[-6:] for path in checkpoints.saved_in(out)] == ["000001"] and (out / "lora").is_dir()
    use_reward(monkeypatch, lambda videos, prompts, metadata: torch.ones(len(videos)))
    train(rewards="mine", max_iterations=3)
    assert [row["step"] for row in train_rows(out)] == [1, 2, 3]


@pytest.mark.parametrize("save_interval", [0, 1])
def test_an_image_that_goes_away_loses_nothing_and_a_checkpoint_is_written_once(
    world, train, tmp_path, monkeypatch, save_interval
):
    out, image, saved, save = tmp_path / "out", prompts.Prompts.image, [], checkpoints.save

    def gone(self, index):
        if train_rows(out):
            raise UserError("red.png: can't be read")
        return image(self, index)

    monkeypatch.setattr(prompts.Prompts, "image", gone)
    monkeypatch.setattr(checkpoints, "save", lambda *args: saved.append(args[1]) or save(*args))
    settings = QUICK | dict(out_dir=out, max_iterations=3, save_interval=save_interval)
    assert refusal("train_grpo.py", **paths(world), **settings) == "error: red.png: can't be read"
    assert saved == [1] and [path[-6:] for path in checkpoints.saved_in(out)] == ["000001"]


@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_every_step_has_its_reference_where_the_kl_is_trained(train, kl_beta):
    records = train(kl_beta=kl_beta, max_iterations=1)[0]["records"]
    known = [t.reference_mean is not None for record in records for t in record.steps]
    assert known == ([True] * 4 if kl_beta else [True, False, False, False])  # 2 batches x 2 steps


@pytest.mark.parametrize("step", [0, 1])
def test_a_ratio_that_is_not_a_number_ends_the_run(world, tmp_path, monkeypatch, step):
    log_prob, calls = rollout.log_prob, []

    def broken(*args):
        calls.append(None)
        return log_prob(*args) + (torch.nan if len(calls) == 5 + step else 0)  # 2 batches x 2 steps are drawn before

    monkeypatch.setattr(rollout, "log_prob", broken)
    line = refusal("train_grpo.py", **paths(world), **QUICK, out_dir=tmp_path / "out")
    assert "before any update the trainer's ratios differ from 1 by inf" in line


def test_a_reference_that_is_the_policy_itself_ends_the_run(world, train, monkeypatch):
    """B = 0 hides a switch that does nothing, unless the check moves it first."""
    with monkeypatch.context() as patch:
        patch.setattr(fsdp, "swapped_in", lambda parameters, values: nullcontext())
        with pytest.raises(RuntimeError, match="the reference isn't the policy before training"):
            train(max_iterations=1, ema_decay=0)


def test_it_goes_on_in_other_batches(train, tmp_path):
    """With one minibatch they change rounding alone; with more, minibatches are made of them."""
    train(kl_beta=0.1, out_dir=tmp_path / "whole")
    train(kl_beta=0.1, max_iterations=1)
    train(kl_beta=0.1, rollout_batch=3)
    for row, whole in zip(train_rows(tmp_path / "out"), train_rows(tmp_path / "whole"), strict=True):
        assert [row[name] for name in ("reward", "grad_norm", "kl")] == pytest.approx(
            [whole[name] for name in ("reward", "grad_norm", "kl")], rel=1e-4, abs=1e-12)


KILLED_IN_THE_SECOND_UPDATE = """
import os, runpy, signal, sys, torch
clip, calls = torch.nn.utils.clip_grad_norm_, []
def clip_or_die(*args, **kwargs):
    calls.append(1)
    return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 2 else clip(*args, **kwargs)
torch.nn.utils.clip_grad_norm_ = clip_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_interrupted_anywhere_it_equals_the_uninterrupted_run_bit_for_bit(world, straight, tmp_path, monkeypatch):
    out = tmp_path / "out"
    settings = paths(world) | STRAIGHT | dict(out_dir=out, save_interval=0)

    def steps():
        return [int(path[-6:]) for path in checkpoints.saved_in(out)]

    with monkeypatch.context() as patch:  # in the second iteration's rollout, after one of its two batches
        before_call(patch, reward, "score", 1 + 2 + 1, terminate)
        printed = script("train_grpo.py", **settings)[1]
    assert "stopped: SIGTERM" in printed and "step 001/4" in printed and "step 002/4" not in printed and steps() == [1]
    with monkeypatch.context() as patch:  # in the evaluation after the second: nothing depends on it, it ends at once
        before_call(patch, held_out, "score", 1, terminate)
        with pytest.raises(SystemExit) as ended:
            script("train_grpo.py", **settings)
    assert not ended.value.code and steps() == [1, 2] and [row["step"] for row in eval_rows(out)] == [0]
    with monkeypatch.context() as patch:  # while the third trains: it is finished
        before_call(patch, reward, "group_advantages", 1, terminate)
        printed = script("train_grpo.py", **settings)[1]
    assert printed.index("eval 002/4") < printed.index("step 003/4") < printed.index("stopped: SIGTERM")
    assert steps() == [1, 2, 3]
    # while the fourth trains: its rollout is lost
    command = [sys.executable, "-c", KILLED_IN_THE_SECOND_UPDATE, str(path_of("train_grpo.py")), *flags(settings)]
    assert subprocess.run(command, env=ENVIRONMENT, timeout=240).returncode == -signal.SIGKILL and steps() == [1, 2, 3]
    printed = script("train_grpo.py", **settings)[1]
    assert "step_000003: iteration 3" in printed and ", want more than 0" in printed
    assert untimed(out) == untimed(straight)
    for step in (1, 2, 3, 4):
        assert_same_checkpoint(tensors_of(out, step), tensors_of(straight, step))
    assert files_of(out / "lora") == files_of(straight / "lora") and files_of(out / "samples") == files_of(
        straight / "samples")
    assert_same_checkpoint(lora_of(out), lora_of(straight))
    shutil.rmtree(out / "lora")  # as if killed between the last checkpoint and its export
    printed = script("train_grpo.py", **settings)[1]  # once more: nothing else is left to do
    assert "step 0" not in printed and untimed(out) == untimed(straight)
    assert_same_checkpoint(lora_of(out), lora_of(straight))
    assert "done       4 of 4 iterations; a larger max_iterations goes on" in printed


def test_stopped_before_the_first_iteration_it_starts_anew(train, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        before_call(patch, rollout, "draw_window", 1, terminate)
        train()
    assert [Path(path).name for path in checkpoints.saved_in(tmp_path / "out")] == ["step_000000"]
    train()
    train(out_dir=tmp_path / "straight")
    assert untimed(tmp_path / "out") == untimed(tmp_path / "straight")
    assert_same_checkpoint(tensors_of(tmp_path / "out", 2), tensors_of(tmp_path / "straight", 2))


def test_videos_of_a_raised_number_have_no_before(train, tmp_path):
    train(max_iterations=1)
    train(max_iterations=2, num_eval_videos=1)
    assert (tmp_path / "out/samples/step_000002_0.png").stat().st_size > 500


def test_another_config_is_refused_naming_what_differs(world, straight):
    line = refusal("train_grpo.py", **paths(world) | STRAIGHT | dict(out_dir=straight, shift=2.0, num_eval_samples=3))
    assert "step_000004 was made with another config (shift 5.0 -> 2.0): use another out_dir" in line
    line = refusal("train_grpo.py", **paths(world) | STRAIGHT | dict(out_dir=straight, resume=False))
    assert "resume=False" in line


def test_non_finite_steps_are_skipped_and_several_end_the_run(world, train, tmp_path, monkeypatch):
    """Of the two updates in the second iteration only the first is bad: a NaN in one stored log-prob."""
    first = flow.seeded("cpu", 0, 1, 0, 0)
    batch, k = divmod(torch.randperm(4, generator=first)[0].item(), 2)  # the pair that this iteration begins with
    sample, rollouts = sampler.sample, []

    def not_a_number(*args, **kwargs):
        latents, transitions = sample(*args, **kwargs)
        rollouts.extend(transitions[:1])
        if transitions and len(rollouts) == 3 + batch:  # two batches an iteration
            transitions[k].log_prob[2] = torch.nan
        return latents, transitions

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample", not_a_number)
        names, printed = train(num_minibatches=2, max_iterations=3)
    rows, texts = train_rows(tmp_path / "out"), names["train_prompts"].prompts
    prompt = texts[prompts.group_indices(len(texts), 3, 1, 0)[(6 * batch + 2) // 4]]  # video 2 of that batch
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1]
    assert all(np.isfinite(row["loss"]) for row in rows)  # of the steps that were taken
    assert f"iteration 1: gradient norm nan: skipped on all ranks; not finite: '{prompt}'" in printed
    state = tensors_of(tmp_path / "out", 3)
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert {int(tensor) for name, tensor in state.items() if name.endswith(".step")} == {3 * 2 - 1}
    assert checkpoints.read_meta(tmp_path / "out/ckpt/step_000003")["skipped_steps"] == 1
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: torch.tensor(np.inf))
        line = refusal("train_grpo.py", **paths(world), **QUICK | dict(max_bad_steps=2), out_dir=tmp_path / "bad")
    assert line.startswith("error: iteration 1: 2 non-finite steps in a row of expert single, the last one's in the "
                           "gradient of no single video: resume with a lower lr")


# ----------------------------------------------------------------------------- refusals


def test_bad_input_is_one_line(world, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts to reach a server
    out_dir = tmp_path / "out"
    base = paths(world) | QUICK | dict(out_dir=out_dir)

    def jsonl(name, *lines):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return dict(data_jsonl=tmp_path / name)

    shutil.copytree(world / "images", tmp_path / "images")
    good = (world / "train.jsonl").read_text().splitlines()
    for change, words in [
        (jsonl("image.jsonl", good[0], good[1].replace("train_001", "nowhere"), good[2]), "image.jsonl:2: got image "),
        (jsonl("json.jsonl", good[0], good[1][:-4], good[2]), "json.jsonl:2: got "),
        (jsonl("empty.jsonl", '{"input": " ", "metadata": {"image_path": "a"}}', *good[:2]),
         "empty.jsonl:1: got input ' '"),
        (jsonl("few.jsonl", *good[:2]), "prompts_per_iteration=3: want 1 to 2, all there are"),
        (jsonl("few.jsonl", *good[:2]) | dict(warmup_iterations=3, lr=-1),
         "lr=-1.0: want at least 0; warmup_iterations=3: want at most max_iterations=2, the whole run; "
         "prompts_per_iteration=3: want 1 to 2, all there are"),
        (dict(data_jsonl=tmp_path / "none.jsonl"), "none.jsonl: got "),
        (dict(eval_data_jsonl=tmp_path / "none.jsonl"), "none.jsonl: got "),
        (dict(group_size=1), "group_size=1: want at least 2"),
        (dict(rollout_batch=5), "prompts_per_iteration x group_size = 12 videos: want a multiple of 1 ranks x "),
        (dict(num_minibatches=5), "num_minibatches=5: want at most 4"),
        (dict(sde_window="(0,5)"), "sde_window=(0, 5): want (lo, hi), lo >= 0, hi <= 4, at least num_sde_steps=2"),
        (dict(sde_window="(2,3)"), "sde_window=(2, 3): want "),
        (dict(sde_window="(-1,3)"), "sde_window=(-1, 3): want "),
        (dict(sde_window="(0,4)", law="cps"), "hi <= 3"),
        (dict(noise_level=0), "noise_level=0.0: an SDE wants more than 0"),
        (dict(noise_level=1.5, law="cps"), "noise_level=1.5: an SDE wants more than 0, e.g. 0.7, and cps at most 1"),
        (dict(clip_range=0), "clip_range=0.0: want more than 0"),
        (dict(grad_clip=-1), "grad_clip=-1.0: want more than 0"),
        (dict(advantage_clip=0), "advantage_clip=0.0: want more than 0"),
        (dict(rollout_batch=5), "12 videos: want a multiple of 1 ranks x rollout_batch=5, e.g. rollout_batch=1"),
        (dict(law="euler"), "law=euler: want flow, dance or cps"),
        (dict(law="cps", ratio_norm=True), "ratio_norm=True"),
        (dict(rewards="firstframe:1.0"), "rewards=firstframe:1.0: got 'firstframe' (did you mean first_frame?)"),
        (dict(eval_rewards="beauty"), "eval_rewards=beauty: got 'beauty'"),
        (dict(rewards="http://127.0.0.1:9/score:1.0"), "reward http://127.0.0.1:9/score: "),
        (dict(guidance_scale=3.0), "guidance wants a negative prompt"),
        (paths(world, "i2v") | GUIDED | dict(guidance_scale_2=0), "guidance_scale_2=0: two experts want the low-noise"),
        (dict(model=tmp_path / "none"), "none: no such folder"),
        (dict(height=20), "height=20: want a multiple of 8 (16 or 24)"),
        (dict(num_frames=6), "num_frames=6: want 4n+1 (5 or 9)"),
        (dict(dtype="float16"), "dtype=float16: want float32 or bfloat16"),
        (dict(checkpointing="some"), "checkpointing=some: want none, full or selective"),
        (dict(device="tpu"), "device=tpu: want auto, cpu or cuda"),
        (dict(lora_targets="to_q,to_x"), "lora_targets=to_x: no such linear layer"),
        (dict(ema_decay=1.0), "ema_decay=1.0"), (dict(weight_decay=-1.0), "weight_decay=-1.0: want at least 0"),
        (dict(lora_alpha=-1.0), "lora_alpha=-1.0: want at least 0"), (dict(fps=0), "fps=0: want at least 1"),
        (dict(kl_beta=-0.1), "kl_beta=-0.1: want at least 0"),
        (dict(reward_timeout=400), "reward_timeout=400.0: want at most 375"),
        (dict(dp_replicate=2), "dp_replicate=2: want a divisor of the 1 ranks"),
        (dict(groupsize=8), "--groupsize is not a setting of train_grpo.py; the nearest is group_size"),
        (dict(group_size="eight"), "--group_size='eight': got str, want int"),
    ]:
        if kept("train_grpo.py", change) == change:
            assert words in refusal("train_grpo.py", **base | change), change
        assert not out_dir.exists(), change


@pytest.mark.parametrize("values, words", [
    (lambda n: torch.tensor([1.0] * (n - 1) + [float("nan")]), "reward mine: got nan for "),
    (lambda n: torch.ones(n, 1), "reward mine: got shape (6, 1), want (6,), a number a video"),
    (lambda n: 1.0, "reward mine: got shape (), want (6,), a number a video"),
])
def test_a_bad_reward_is_one_line(world, tmp_path, monkeypatch, values, words):
    use_reward(monkeypatch, lambda videos, texts, metadata: values(len(videos)))
    settings = QUICK | dict(rewards="mine", num_eval_samples=6, out_dir=tmp_path / "out")
    assert words in refusal("train_grpo.py", **paths(world), **settings)


# ----------------------------------------------------------------------------- two ranks


def patchy(videos, texts, metadata):
    """first_frame, but the same for all videos of a ball that goes left or right: groups without a spread."""
    values = reward.first_frame(videos, texts, metadata)
    return torch.where(torch.tensor([entry["direction"] in ("left", "right") for entry in metadata]), 1.0, values)


def worker(file):
    """What each of two ranks does under torchrun: the runs of a JSON file, one process group each."""
    rank, endings = int(os.environ["RANK"]), []
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # a store for each run, not torchrun's one for all
    for run in json.loads(Path(file).read_text()):
        os.environ["MASTER_PORT"] = str(run["port"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("plot.draw_curves", lambda out_dir: None)
            use_reward(patch, patchy)
            smooth_adamw(patch)
            if rank == 1 and run["stop"]:
                before_call(patch, reward, "group_advantages", run["stop"], terminate)  # one rank only
            try:
                ending = script("train_grpo.py", **run["settings"])[1]
            except (UserError, SystemExit) as error:
                ending = "told elsewhere" if getattr(error, "told", False) else f"{type(error).__name__} {error}"
        fsdp.cleanup()
        endings.append(ending)
        Path(f"{file}.endings.{rank}").write_text(json.dumps(endings))


TWO = QUICK | dict(rewards="mine:1.0,smoothness:0.5", rollout_batch=6, prompts_per_iteration=3, num_eval_samples=5,
                   seed=3)
TWO_RANKS = {
    "lora": ("ti2v", TWO | dict(rewards="mine")),
    "experts": ("i2v", TWO | GUIDED | dict(sde_window="(1,3)", kl_beta=0.1, ratio_norm=True)),
    "full": ("ti2v", TWO | dict(lora_rank=0, kl_beta=0.1, lr=1e-4, recompute_log_prob=True, global_std=True)),
}
TWO_RANKS = {name: (kind, kept("train_grpo.py", settings)) for name, (kind, settings) in TWO_RANKS.items()}


def test_two_ranks_compute_what_one_process_does(world, tmp_path, monkeypatch):
    """Rank 0 has the first group and half of the second; one rank's groups may have no spread. SIGTERM to one rank."""
    runs = [dict(stop=0, settings=paths(world, kind) | settings | dict(rollout_batch=2, out_dir=str(tmp_path / name)))
            for name, (kind, settings) in TWO_RANKS.items()]
    stopped = runs[0]["settings"] | dict(out_dir=str(tmp_path / "stopped"))
    runs.append(dict(stop=1, settings=stopped))
    runs.append(dict(stop=0, settings=runs[0]["settings"] | dict(rollout_batch=4, out_dir=str(tmp_path / "refused"))))
    ports = free_ports(len(runs))
    (tmp_path / "runs").write_text(json.dumps([run | dict(port=p) for run, p in zip(runs, ports, strict=True)]))
    together = subprocess.Popen([*TORCHRUN, __file__, tmp_path / "runs"], cwd=tmp_path, env=ENVIRONMENT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    use_reward(monkeypatch, patchy)
    smooth_adamw(monkeypatch)
    advantages = record_calls(monkeypatch, reward, "group_advantages")
    for name, (kind, settings) in TWO_RANKS.items():
        script("train_grpo.py", **paths(world, kind) | settings | dict(out_dir=tmp_path / f"one_{name}"))
    try:
        _, err = together.communicate(timeout=240)
    finally:
        together.terminate()  # torchrun ends ranks that wait for each other, too
    assert together.returncode == 0, err[-4000:]
    endings = [json.loads((tmp_path / f"runs.endings.{rank}").read_text()) for rank in (0, 1)]

    equal = [[values.min() == values.max() for values in args[0].view(3, 4)] for args, _ in advantages[:2]]
    assert any(groups[0] != groups[2] for groups in equal), "want a group without a spread on one rank only"
    for name in TWO_RANKS:
        for found, wanted in zip(untimed(tmp_path / name), untimed(tmp_path / f"one_{name}"), strict=True):
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
        files = [file for file in files_of(tmp_path / name) if file.endswith(".safetensors") and "ckpt" not in file]
        assert files
        for file in files:
            found, wanted = (safetensors.torch.load_file(tmp_path / at / file) for at in (name, f"one_{name}"))
            assert found.keys() == wanted.keys()
            for key in found:
                torch.testing.assert_close(found[key], wanted[key], atol=1e-6, rtol=0)
    assert endings[1][0] == ""  # one rank speaks
    assert "1 +- 0.0e+00" in endings[0][0]

    # SIGTERM to one rank stops both after the iteration; one process goes on from there
    assert "stopped: SIGTERM" in endings[0][3] and [row["step"] for row in train_rows(tmp_path / "stopped")] == [1]
    printed = script("train_grpo.py", **stopped)[1]
    assert "step_000001: iteration 1" in printed
    for key, tensor in lora_of(tmp_path / "stopped").items():
        torch.testing.assert_close(tensor, lora_of(tmp_path / "one_lora")[key], atol=1e-6, rtol=0)
    # found by both ranks, said by one
    assert endings[0][4].startswith("UserError prompts_per_iteration x group_size = 12 videos: want a multiple of 2 ra")
    assert endings[1][4] == "told elsewhere" and not (tmp_path / "refused").exists()


if __name__ == "__main__":
    worker(sys.argv[1])
