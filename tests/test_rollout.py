import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline

import encoders
import model as wan_model
import rollout

SIZE = dict(height=16, width=32, num_frames=9)  # latents 16 3 4 8
PROMPT, NEGATIVE = "a red ball moves left", "blue"


def load(folder, dtype=torch.float32):
    wan = wan_model.describe(folder)
    wan.dtype = dtype
    for expert in wan.expert_names:
        wan.experts[expert] = wan_model.load_transformer(wan, expert, "cpu", dtype)
    return wan


def record(experts):
    """Record what each transformer is called with: a list of (expert, input, timestep, text, output), filled later."""
    calls = []

    def hook(name):
        def keep(module, args, kwargs, output):
            names = ("hidden_states", "timestep", "encoder_hidden_states")
            given = [*args, *(kwargs[key] for key in names if key in kwargs)]
            calls.append((name, *(tensor.clone() for tensor in given), output[0].clone()))

        return keep

    for name, transformer in experts.items():
        transformer.register_forward_hook(hook(name), with_kwargs=True)
    return calls


def closed_form(u, shift):
    return shift * np.float64(u) / (1 + (shift - 1) * np.float64(u))


# ----------------------------------------------------------------------------- whole samples, against diffusers


@pytest.mark.parametrize("kind, pipeline_class", [
    ("i2v", WanImageToVideoPipeline), ("ti2v", WanImageToVideoPipeline), ("t2v", WanPipeline), ("ti2v", WanPipeline),
])  # fmt: skip
def test_sampling_equals_the_pipeline(checkpoints, kind, pipeline_class):
    """Eight guided steps: the same experts see the same input, timestep and text, and give the same latents."""
    gives_frame = pipeline_class is WanImageToVideoPipeline
    num_experts = 1 if kind == "ti2v" else 2
    pipeline = pipeline_class.from_pretrained(
        checkpoints[kind], scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0), text_encoder=None
    )
    pipeline.set_progress_bar_config(disable=True)
    names = ("high", "low") if num_experts == 2 else ("single",)
    theirs = record(dict(zip(names, (pipeline.transformer, pipeline.transformer_2), strict=False)))
    tokenizer, text_encoder = encoders.load_text_encoder(checkpoints[kind], dtype=torch.float32)
    text, negative = encoders.encode_text(tokenizer, text_encoder, [PROMPT, NEGATIVE], 16)[:, None].expand(2, 2, -1, -1)

    noise = rollout.randn((2, 16, 3, 4, 8), 5)
    frame = torch.rand(1, 3, 16, 32, generator=rollout.seeded("cpu", 6))  # 0..1, as the pipeline takes it
    trajectory = []
    expected = pipeline(
        **SIZE, **(dict(image=frame) if gives_frame else {}), latents=noise,
        prompt_embeds=text, negative_prompt_embeds=negative, num_inference_steps=8, output_type="latent",
        guidance_scale=3.5, **(dict(guidance_scale_2=2.0) if num_experts == 2 else {}),
        callback_on_step_end=lambda pipe, i, t, values: trajectory.append(values["latents"]) or values,
    ).frames  # fmt: skip

    wan = load(checkpoints[kind])
    ours = record(wan.experts)
    condition = None
    if gives_frame:
        condition = encoders.encode_condition(encoders.load_vae(checkpoints[kind]), 2 * frame - 1, 9, kind)
        condition = condition.expand(2, -1, -1, -1, -1)
    sigmas = rollout.sigma_grid(8, 5.0)
    latents, _ = rollout.sample(wan, noise, condition, text, negative, sigmas, 3.5, 2.0)

    assert [call[0] for call in ours] == [call[0] for call in theirs] and len(ours) == 16
    assert len({call[0] for call in ours}) == num_experts
    for (_, *got), (_, *want) in zip(ours, theirs, strict=True):
        for name, a, b in zip(("input", "timestep", "text", "velocity"), got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype, name
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)

    # step by step, from the pipeline's own latents
    for i, before in enumerate([noise, *trajectory[:-1]]):
        sigma = sigmas[i].expand(2)
        v = rollout.guided_velocity(wan, before, sigma, condition, text, negative, 3.5, 2.0)
        torch.testing.assert_close(before + (sigmas[i + 1] - sigmas[i]) * v, trajectory[i], atol=1e-5, rtol=1e-5)

    # and the comparison isn't of two constants
    assert (latents - noise).abs().mean() > 0.1 and (theirs[0][4] - theirs[1][4]).abs().max() > 1e-3


def test_layout_of_the_inputs(checkpoints):
    """FACTS of Wan 2.2, written out: 36 channels for i2v; replaced frame and timesteps a token for ti2v."""
    noise, sigma = rollout.randn((1, 16, 3, 4, 6), 0), torch.tensor([0.95])
    text = rollout.randn((1, 16, 64), 1)
    calls = {}
    for kind, frames in (("i2v", 3), ("ti2v", 1), ("t2v", 1)):
        wan = load(checkpoints[kind])
        recorded = record(wan.experts)
        wan_model.velocity(wan, noise, sigma, condition := rollout.randn((1, 16, frames, 4, 6), 2), text)
        calls[kind] = (*recorded[0], condition)

    expert, hidden, timestep, _, _, condition = calls["i2v"]
    assert expert == "high" and torch.equal(timestep, torch.tensor([950.0])) and hidden.shape == (1, 36, 3, 4, 6)
    assert torch.equal(hidden[:, :16], noise) and torch.equal(hidden[:, 20:], condition)
    assert (hidden[:, 16:20, 0] == 1).all() and (hidden[:, 16:20, 1:] == 0).all()

    _, hidden, timestep, _, _, condition = calls["ti2v"]
    assert torch.equal(hidden[:, :, :1], condition) and torch.equal(hidden[:, :, 1:], noise[:, :, 1:])
    assert torch.equal(timestep, torch.tensor([[0.0] * 6 + [950.0] * 12]))  # 2 x 3 tokens a latent frame

    _, hidden, timestep, _, _, condition = calls["t2v"]
    assert torch.equal(hidden[:, :, :1], condition) and torch.equal(hidden[:, :, 1:], noise[:, :, 1:])
    assert torch.equal(timestep, torch.tensor([950.0]))


@pytest.mark.parametrize("kind", ["i2v", "ti2v", "t2v"])
def test_the_given_frame_never_changes(checkpoints, kind):
    wan = load(checkpoints[kind])
    noise, text = rollout.randn((1, 16, 3, 4, 6), 0), rollout.randn((2, 1, 16, 64), 1)
    condition = rollout.randn((1, 16, 3 if kind == "i2v" else 1, 4, 6), 2)
    recorded = record(wan.experts)
    latents, _ = rollout.sample(wan, noise, condition, *text, rollout.sigma_grid(4, 5.0), 2.0, 2.0)
    given = [hidden[:, 20:] if kind == "i2v" else hidden[:, :, :1] for _, hidden, *_ in recorded]
    assert len(given) == 8 and all(torch.equal(seen, condition) for seen in given)
    if kind != "i2v":  # an i2v model generates its first latent frame too
        assert torch.equal(latents[:, :, :1], condition)
        assert (latents[:, :, 1:] - noise[:, :, 1:]).abs().min() > 0


def test_euler_is_exact_on_a_straight_flow():
    """velocity = (x - x0) / sigma is the flow to one x0: any grid ends there. Guidance scales what differs by text."""
    x0, noise = torch.full((1, 2, 2, 2, 2), 0.3), rollout.randn((1, 2, 2, 2, 2), 0)
    expert = lambda x, timestep, text, return_dict: ((x - x0) / (timestep / 1000) + text.mean(),)  # noqa: E731
    wan = wan_model.Wan("", "t2v", ("high", "low"), 0.9, {}, experts={"high": expert, "low": expert})
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    sampled, _ = rollout.sample(wan, noise, None, zero, zero, rollout.sigma_grid(7, 3.0), 1.0, 1.0)
    torch.testing.assert_close(sampled, x0, atol=1e-6, rtol=0)
    for sigma, scale in ((0.95, 4.0), (0.85, 3.0)):  # of the high expert, of the low one
        sigma = torch.tensor([sigma])
        v = rollout.guided_velocity(wan, noise, sigma, None, one, 2 * one, 4.0, 3.0)
        torch.testing.assert_close(v, (noise - x0) / sigma + 2 - scale)


# ----------------------------------------------------------------------------- sigmas


@pytest.mark.parametrize("shift", [1.0, 2.5, 3.0, 5.0, 8.0, 12.0])
def test_grid_is_the_schedulers(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for num_steps in (1, 2, 4, 8, 10, 40, 50):
        scheduler.set_timesteps(num_steps)
        sigmas = rollout.sigma_grid(num_steps, shift)
        assert sigmas.dtype == torch.float32 and torch.equal(sigmas, scheduler.sigmas)


def test_grid_ends_low():
    sigmas = rollout.sigma_grid(10, 5.0)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and len(sigmas) == 11
    assert abs(sigmas[-2] - 0.0244) < 5e-5  # not 0.357, that of linspace(1, 1 / n, n)


def test_shift_and_its_inverse():
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    for shift in (1.0, 3.0, 5.0):
        np.testing.assert_allclose(rollout.shift_sigma(u, shift), closed_form(u, shift), rtol=1e-14)
        np.testing.assert_allclose(rollout.unshift_sigma(rollout.shift_sigma(u, shift), shift), u, atol=1e-14)


def test_routing_is_by_timestep_in_float32():
    assert torch.tensor(899.0).bfloat16() >= 900  # the trap
    for timestep, expert in ((1000, "high"), (901, "high"), (900, "high"), (899, "low"), (899.99, "low"), (0, "low")):
        assert wan_model.route(0.9, torch.tensor([timestep / 1000] * 2)) == expert
    assert [wan_model.route(0.875, torch.tensor([sigma])) for sigma in (0.876, 0.874)] == ["high", "low"]
    assert wan_model.route(None, torch.tensor([0.1, 0.99])) == "single"
    with pytest.raises(ValueError, match="boundary 0.9"):
        wan_model.route(0.9, torch.tensor([0.95, 0.5]))

    called = []

    def expert(name):
        return lambda x, timestep, text, return_dict: called.append((name, x.dtype, timestep)) or (x,)

    wan = wan_model.Wan("", "t2v", ("high", "low"), 0.9, {}, torch.bfloat16, {n: expert(n) for n in ("high", "low")})
    wan_model.velocity(wan, torch.zeros(1, 2, 1, 2, 2), torch.tensor([0.899]), None, torch.zeros(1, 1, 1))
    (name, dtype, timestep), = called  # fmt: skip
    assert name == "low" and dtype == torch.bfloat16 and timestep.dtype == torch.float32
    assert abs(timestep.item() - 899) < 1e-4


# ----------------------------------------------------------------------------- training draws


@pytest.mark.parametrize("boundary, shift, high", [(0.9, 5.0, 0.357), (0.9, 3.0, 0.25), (0.875, 5.0, 0.417)])
def test_share_of_the_experts(boundary, shift, high):
    share = rollout.expert_share("high", boundary, shift)
    u = (np.arange(100_000) + 0.5) / 100_000
    assert abs(share - high) < 5e-4 and abs(share - (closed_form(u, shift) >= boundary).mean()) < 2e-5
    assert rollout.expert_share("low", boundary, shift) == pytest.approx(1 - share)
    assert rollout.expert_share("single", None, shift) == 1


@pytest.mark.parametrize("boundary, shift, high", [(0.9, 5.0, 5 / 14), (0.9, 3.0, 1 / 4), (0.875, 5.0, 5 / 12)])
def test_experts_are_drawn_by_share(boundary, shift, high):
    both = ("high", "low")
    draws = [rollout.draw_expert(both, boundary, shift, 0, step) for step in range(2000)]
    error = np.mean([name == "high" for name in draws]) - high
    assert abs(error) < 3 * np.sqrt(high * (1 - high) / 2000)
    torch.manual_seed(1)  # nothing but (seed, step) counts, on any rank, in any order
    again = {step: rollout.draw_expert(both, boundary, shift, 0, step) for step in reversed(range(0, 2000, 7))}
    assert all(draws[step] == name for step, name in again.items())
    other = [rollout.draw_expert(both, boundary, shift, 1, step) for step in range(2000)]
    agreement = high**2 + (1 - high) ** 2
    assert abs(np.mean(np.array(draws) == np.array(other)) - agreement) < 0.04
    for alone in (("high",), ("low",), ("single",)):
        assert rollout.draw_expert(alone, boundary, shift, 0, 3) == alone[0]


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("boundary, shift", [(0.9, 5.0), (0.875, 3.0)])
def test_the_mixture_over_experts_is_the_shifted_distribution(boundary, shift, position):
    """An expert a step, then a sigma in its range: the same quantiles as shift_sigma(u) of a uniform u.

    Position 0 in the batch too: its generator must not be the one that drew the step's expert.
    """
    sigmas, num_draws = [], 3000
    for step in range(num_draws):
        expert = rollout.draw_expert(("high", "low"), boundary, shift, 0, step)
        sigma = rollout.draw_sigma(expert, boundary, shift, rollout.seeded("cpu", 0, step, position))
        assert sigma.dtype == torch.float32 and wan_model.route(boundary, sigma[None]) == expert
        sigmas.append(sigma.item())
    sigmas = np.sort(sigmas)
    u = sigmas / (shift - (shift - 1) * sigmas)  # uniform, if all is well
    distance = np.abs(u - (np.arange(num_draws) + 0.5) / num_draws).max()
    assert distance < 1.95 / np.sqrt(num_draws)  # Kolmogorov-Smirnov, p = 0.001
    quantiles = np.arange(0.1, 1, 0.1)
    np.testing.assert_allclose(np.quantile(sigmas, quantiles), closed_form(quantiles, shift), atol=0.04)


@pytest.mark.parametrize("boundary", [0.9, 0.875, 0.502, 0.506, 0.511, 1 / 3, 0.8999])
def test_sigmas_keep_to_their_experts_range(monkeypatch, boundary):
    """At both ends of the uniform draw, after rounding to float32, the router agrees."""
    for u in (0.0, 1 - 2**-53):
        monkeypatch.setattr(torch, "rand", lambda *size, u=u, **options: torch.tensor(u, dtype=torch.float64))
        for expert in ("high", "low"):
            sigma = rollout.draw_sigma(expert, boundary, 5.0, None)
            assert wan_model.route(boundary, sigma[None]) == expert and 0 <= sigma <= 1
            edge = {("high", 0.0): boundary, ("low", 0.0): 0.0}.get((expert, u), 1.0 if expert == "high" else boundary)
            assert abs(sigma - edge) < 2e-6
        assert abs(rollout.draw_sigma("single", None, 5.0, None) - u) < 1e-6


def test_bins_are_mid_points_of_equal_probability():
    u = (np.arange(1_000_000) + 0.5) / 1_000_000
    sigmas = closed_form(u, 5.0)
    for expert, boundary, mine in (("high", 0.9, sigmas >= 0.9), ("low", 0.9, sigmas < 0.9), ("single", None, u >= 0)):
        bins = rollout.bin_sigmas(expert, boundary, 5.0, 4)
        assert bins.dtype == torch.float32 and wan_model.route(boundary, bins) == expert
        mine = sigmas[mine]
        np.testing.assert_allclose(bins, np.quantile(mine, [0.875, 0.625, 0.375, 0.125]), atol=1e-5)
    np.testing.assert_allclose(rollout.bin_sigmas("single", None, 1.0, 2), [0.75, 0.25])


def test_seeded_draws():
    keys = [(0,), (0, 0), (0, 0, 0), (0, 1), (1, 0), (1,), (0, 1, 0), (2**31, 5), (5, 2**31), (1, 2, 3, 4, 5)]
    draws = [rollout.randn((4,), *key) for key in keys]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(keys)
    assert all(torch.equal(rollout.randn((4,), *key), draw) for key, draw in zip(keys, draws, strict=True))
    many = rollout.randn((100_000,), 3, 4)
    assert many.dtype == torch.float32 and abs(many.mean()) < 0.015 and abs(many.std() - 1) < 0.01
