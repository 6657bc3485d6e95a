import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline

import encoders
import flow
import model as wan_model
import rollout
import sampler
from helpers import load

SIZE = dict(height=16, width=32, num_frames=9)  # latents 16 3 4 8
PROMPT, NEGATIVE = "a red ball moves left", "blue"


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
])
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

    noise = flow.randn((2, 16, 3, 4, 8), 5)
    frame = torch.rand(1, 3, 16, 32, generator=flow.seeded("cpu", 6))  # 0..1, as the pipeline takes it
    trajectory = []
    expected = pipeline(
        **SIZE, **(dict(image=frame) if gives_frame else {}), latents=noise,
        prompt_embeds=text, negative_prompt_embeds=negative, num_inference_steps=8, output_type="latent",
        guidance_scale=3.5, **(dict(guidance_scale_2=2.0) if num_experts == 2 else {}),
        callback_on_step_end=lambda pipe, i, t, values: trajectory.append(values["latents"]) or values,
    ).frames

    wan = load(checkpoints[kind])
    ours = record(wan.experts)
    condition = None
    if gives_frame:
        condition = encoders.encode_condition(encoders.load_vae(checkpoints[kind]), 2 * frame - 1, 9, kind)
        condition = condition.expand(2, -1, -1, -1, -1)
    sigmas = flow.sigma_grid(8, 5.0)
    latents, _ = sampler.sample(wan, noise, condition, text, negative, sigmas, 3.5, 2.0)

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
        v = sampler.guided_velocity(wan, before, sigma, condition, text, negative, 3.5, 2.0)
        torch.testing.assert_close(before + (sigmas[i + 1] - sigmas[i]) * v, trajectory[i], atol=1e-5, rtol=1e-5)

    # and the comparison isn't of two constants
    assert (latents - noise).abs().mean() > 0.1 and (theirs[0][4] - theirs[1][4]).abs().max() > 1e-3


def test_layout_of_the_inputs(checkpoints):
    """FACTS of Wan 2.2, written out: 36 channels for i2v; replaced frame and timesteps a token for ti2v."""
    noise, sigma = flow.randn((1, 16, 3, 4, 6), 0), torch.tensor([0.95])
    text = flow.randn((1, 16, 64), 1)
    calls = {}
    for kind, frames in (("i2v", 3), ("ti2v", 1), ("t2v", 1)):
        wan = load(checkpoints[kind])
        recorded = record(wan.experts)
        wan_model.velocity(wan, noise, sigma, condition := flow.randn((1, 16, frames, 4, 6), 2), text)
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
    noise, text = flow.randn((1, 16, 3, 4, 6), 0), flow.randn((2, 1, 16, 64), 1)
    condition = flow.randn((1, 16, 3 if kind == "i2v" else 1, 4, 6), 2)
    recorded = record(wan.experts)
    latents, _ = sampler.sample(wan, noise, condition, *text, flow.sigma_grid(4, 5.0), 2.0, 2.0)
    given = [hidden[:, 20:] if kind == "i2v" else hidden[:, :, :1] for _, hidden, *_ in recorded]
    assert len(given) == 8 and all(torch.equal(seen, condition) for seen in given)
    if kind != "i2v":  # an i2v model generates its first latent frame too
        assert torch.equal(latents[:, :, :1], condition)
        assert (latents[:, :, 1:] - noise[:, :, 1:]).abs().min() > 0


def test_euler_is_exact_on_a_straight_flow():
    """velocity = (x - x0) / sigma is the flow to one x0: any grid ends there. Guidance scales what differs by text."""
    x0, noise = torch.full((1, 2, 2, 2, 2), 0.3), flow.randn((1, 2, 2, 2, 2), 0)
    expert = lambda x, timestep, text, return_dict: ((x - x0) / (timestep / 1000) + text.mean(),)  # noqa: E731
    wan = wan_model.Wan("", "t2v", ("high", "low"), 0.9, {}, experts={"high": expert, "low": expert})
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    sampled, _ = sampler.sample(wan, noise, None, zero, zero, flow.sigma_grid(7, 3.0), 1.0, 1.0)
    torch.testing.assert_close(sampled, x0, atol=1e-6, rtol=0)
    for sigma, scale in ((0.95, 4.0), (0.85, 3.0)):  # of the high expert, of the low one
        sigma = torch.tensor([sigma])
        v = sampler.guided_velocity(wan, noise, sigma, None, one, 2 * one, 4.0, 3.0)
        torch.testing.assert_close(v, (noise - x0) / sigma + 2 - scale)


# ----------------------------------------------------------------------------- sigmas


@pytest.mark.parametrize("shift", [1.0, 2.5, 3.0, 5.0, 8.0, 12.0])
def test_grid_is_the_schedulers(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for num_steps in (1, 2, 4, 8, 10, 40, 50):
        scheduler.set_timesteps(num_steps)
        sigmas = flow.sigma_grid(num_steps, shift)
        assert sigmas.dtype == torch.float32 and torch.equal(sigmas, scheduler.sigmas)


def test_grid_ends_low():
    sigmas = flow.sigma_grid(10, 5.0)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and len(sigmas) == 11
    assert abs(sigmas[-2] - 0.0244) < 5e-5  # not 0.357, that of linspace(1, 1 / n, n)


def test_shift_and_its_inverse():
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    for shift in (1.0, 3.0, 5.0):
        np.testing.assert_allclose(flow.shift_sigma(u, shift), closed_form(u, shift), rtol=1e-14)
        np.testing.assert_allclose(flow.unshift_sigma(flow.shift_sigma(u, shift), shift), u, atol=1e-14)


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
    (name, dtype, timestep), = called
    assert name == "low" and dtype == torch.bfloat16 and timestep.dtype == torch.float32
    assert abs(timestep.item() - 899) < 1e-4


# ----------------------------------------------------------------------------- training draws


@pytest.mark.parametrize("boundary, shift, high", [(0.9, 5.0, 0.357), (0.9, 3.0, 0.25), (0.875, 5.0, 0.417)])
def test_share_of_the_experts(boundary, shift, high):
    share = flow.expert_share("high", boundary, shift)
    u = (np.arange(100_000) + 0.5) / 100_000
    assert abs(share - high) < 5e-4 and abs(share - (closed_form(u, shift) >= boundary).mean()) < 2e-5
    assert flow.expert_share("low", boundary, shift) == pytest.approx(1 - share)
    assert flow.expert_share("single", None, shift) == 1


@pytest.mark.parametrize("boundary, shift, high", [(0.9, 5.0, 5 / 14), (0.9, 3.0, 1 / 4), (0.875, 5.0, 5 / 12)])
def test_experts_are_drawn_by_share(boundary, shift, high):
    both = ("high", "low")
    draws = [flow.draw_expert(both, boundary, shift, 0, step) for step in range(2000)]
    error = np.mean([name == "high" for name in draws]) - high
    assert abs(error) < 3 * np.sqrt(high * (1 - high) / 2000)
    torch.manual_seed(1)  # nothing but (seed, step) counts, on any rank, in any order
    again = {step: flow.draw_expert(both, boundary, shift, 0, step) for step in reversed(range(0, 2000, 7))}
    assert all(draws[step] == name for step, name in again.items())
    other = [flow.draw_expert(both, boundary, shift, 1, step) for step in range(2000)]
    agreement = high**2 + (1 - high) ** 2
    assert abs(np.mean(np.array(draws) == np.array(other)) - agreement) < 0.04
    for alone in (("high",), ("low",), ("single",)):
        assert flow.draw_expert(alone, boundary, shift, 0, 3) == alone[0]


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("boundary, shift", [(0.9, 5.0), (0.875, 3.0)])
def test_the_mixture_over_experts_is_the_shifted_distribution(boundary, shift, position):
    """An expert a step, then a sigma in its range: the same quantiles as shift_sigma(u) of a uniform u.

    Position 0 in the batch too: its generator must not be the one that drew the step's expert.
    """
    sigmas, num_draws = [], 3000
    for step in range(num_draws):
        expert = flow.draw_expert(("high", "low"), boundary, shift, 0, step)
        sigma = flow.draw_sigma(expert, boundary, shift, flow.seeded("cpu", 0, step, position))
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
            sigma = flow.draw_sigma(expert, boundary, 5.0, None)
            assert wan_model.route(boundary, sigma[None]) == expert and 0 <= sigma <= 1
            edge = {("high", 0.0): boundary, ("low", 0.0): 0.0}.get((expert, u), 1.0 if expert == "high" else boundary)
            assert abs(sigma - edge) < 2e-6
        assert abs(flow.draw_sigma("single", None, 5.0, None) - u) < 1e-6


def test_bins_are_mid_points_of_equal_probability():
    u = (np.arange(1_000_000) + 0.5) / 1_000_000
    sigmas = closed_form(u, 5.0)
    for expert, boundary, mine in (("high", 0.9, sigmas >= 0.9), ("low", 0.9, sigmas < 0.9), ("single", None, u >= 0)):
        bins = flow.bin_sigmas(expert, boundary, 5.0, 4)
        assert bins.dtype == torch.float32 and wan_model.route(boundary, bins) == expert
        mine = sigmas[mine]
        np.testing.assert_allclose(bins, np.quantile(mine, [0.875, 0.625, 0.375, 0.125]), atol=1e-5)
    np.testing.assert_allclose(flow.bin_sigmas("single", None, 1.0, 2), [0.75, 0.25])


def test_seeded_draws():
    keys = [(0,), (0, 0), (0, 0, 0), (0, 1), (1, 0), (1,), (0, 1, 0), (2**31, 5), (5, 2**31), (1, 2, 3, 4, 5)]
    draws = [flow.randn((4,), *key) for key in keys]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(keys)
    assert all(torch.equal(flow.randn((4,), *key), draw) for key, draw in zip(keys, draws, strict=True))
    many = flow.randn((100_000,), 3, 4)
    assert many.dtype == torch.float32 and abs(many.mean()) < 0.015 and abs(many.std() - 1) < 0.01


# ----------------------------------------------------------------------------- stochastic steps


def paper_step(law, x, v, sigma, sigma_next, sigma_1, noise_level):
    """Mean and std as each paper writes them, float64, dt < 0."""
    dt = sigma_next - sigma
    if law == "flow":  # Flow-GRPO eq. 9: drift v + g^2 / (2 sigma) (x + (1 - sigma) v)
        g = noise_level * np.sqrt(sigma / (1 - (sigma_1 if sigma == 1 else sigma)))
        return x + (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt, g * np.sqrt(abs(dt))
    if law == "dance":  # DanceGRPO eq. 8: drift v - eps^2 / 2 score, where score = -noise / sigma
        score = -(x + (1 - sigma) * v) / sigma
        return x + (v - noise_level**2 / 2 * score) * dt, noise_level * np.sqrt(abs(dt))
    x0, noise = x - sigma * v, x + (1 - sigma) * v  # Flow-CPS: noise kept with a cosine, fresh noise with a sine
    angle = noise_level * np.pi / 2
    return (1 - sigma_next) * x0 + sigma_next * np.cos(angle) * noise, sigma_next * np.sin(angle)


@pytest.mark.parametrize("law", rollout.LAWS)
def test_each_law_is_its_papers_formula(law):
    x, v = flow.randn((2, 3, 4, 2, 2, 2), 0).double()
    for shift in (1.0, 5.0):
        grid = flow.sigma_grid(10, shift).double().tolist()
        for k in range(10):
            for noise_level in (0.2, 0.7, 1.0):
                at = law, x, v, grid[k], grid[k + 1], grid[1], noise_level
                mean, std = rollout.sde_step(*at)
                expected, expected_std = paper_step(law, x.numpy(), v.numpy(), *at[3:])
                np.testing.assert_allclose(mean, expected, rtol=1e-12, atol=1e-12)
                assert std == pytest.approx(expected_std, rel=1e-12, abs=0)
                single, _ = rollout.sde_step(law, x.float(), v.float(), *at[3:])
                assert single.dtype == torch.float32
                torch.testing.assert_close(single.double(), mean, rtol=1e-4, atol=1e-5)
            mean, std = rollout.sde_step(law, x, v, grid[k], grid[k + 1], grid[1], 0.0)  # no noise: the ODE
            torch.testing.assert_close(mean, x + v * (grid[k + 1] - grid[k]), rtol=1e-12, atol=1e-12)
            assert std == 0


def test_flow_is_finite_at_sigma_1():
    x, v = flow.randn((2, 1, 2, 2, 2, 2), 0).double()
    mean, std = rollout.sde_step("flow", x, v, 1.0, 0.9, 0.9, 0.7)
    assert std == pytest.approx(0.7 * np.sqrt(1 / 0.1) * np.sqrt(0.1))
    torch.testing.assert_close(mean, x * (1 - 0.49 / 0.1 * 0.1 / 2) - 0.1 * v)


@pytest.mark.parametrize("law", rollout.LAWS)
@pytest.mark.parametrize("frames_given", [0, 1])
def test_log_prob_is_the_normal_density_of_what_is_generated(law, frames_given):
    sample, mean = flow.randn((2, 3, 4, 3, 2, 2), 1)
    gen_mask = torch.ones(3, 1, 3, 2, 2)
    gen_mask[:, :, :frames_given] = 0
    std = 0.3
    density = torch.distributions.Normal(mean.double(), std).log_prob(sample.double())
    if law == "cps":  # without the variance
        density = -((sample.double() - mean.double()) ** 2)
    expected = density[:, :, frames_given:].flatten(1).mean(1)
    found = rollout.log_prob(law, sample, mean, std, gen_mask)
    assert found.shape == (3,) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    poisoned = sample.clone()
    poisoned[:, :, :1] += 1e9
    unchanged = torch.equal(rollout.log_prob(law, poisoned, mean, std, gen_mask), found)
    assert unchanged == bool(frames_given)


@pytest.mark.parametrize("law", rollout.LAWS)
def test_drift_is_told_of_the_worst_sample(law):
    """Velocities that differ by a tenth and by a fifth of their size, at generated positions; ratios by definition."""
    generator = torch.Generator().manual_seed(0)
    x, v, error = torch.randn(3, 2, 4, 3, 2, 2, generator=generator, dtype=torch.float64)  # each b c f h w
    gen_mask = torch.ones(2, 1, 3, 2, 2, dtype=torch.float64)
    gen_mask[:, :, 0] = 0
    rms = lambda values: wan_model.masked_mean(values.square(), gen_mask).sqrt().view(2, 1, 1, 1, 1)  # noqa: E731
    error *= torch.tensor([0.1, 0.2]).view(2, 1, 1, 1, 1) * rms(v) / rms(error)
    error[:, :, 0] = 9.0  # at a given position
    sigmas, k = flow.sigma_grid(6, 5.0), 2
    grid = sigmas.tolist()
    mean, std = rollout.sde_step(law, x, v, grid[k], grid[k + 1], grid[1], 0.7)
    ours, _ = rollout.sde_step(law, x, v + error, grid[k], grid[k + 1], grid[1], 0.7)
    following = mean + std
    theirs, densities = (rollout.log_prob(law, following, m, std, gen_mask) for m in (mean, ours))
    stored = rollout.Step(k, x, following, mean, theirs)
    distribution = rollout.Distribution(ours, std, densities, gen_mask)
    velocity, ratio = rollout.sampler_error(law, stored, distribution, sigmas, 0.7)
    assert velocity == pytest.approx(0.2, rel=1e-6)
    assert ratio == pytest.approx((densities - theirs).exp().sub(1).abs().max().item()) and ratio > 1e-3
    same = distribution._replace(mean=mean, log_prob=theirs)
    assert rollout.sampler_error(law, stored, same, sigmas, 0.7) == (0.0, 0.0)
    unknown = distribution._replace(mean=ours * np.nan, log_prob=densities * np.nan)
    assert all(np.isnan(rollout.sampler_error(law, stored, unknown, sigmas, 0.7)))


def test_the_window_is_a_function_of_seed_and_iteration():
    for num_steps, low, high in ((1, 0, 1), (1, 1, 3), (2, 0, 5), (3, 2, 5), (2, 1, 20)):
        windows = [rollout.draw_window(num_steps, (low, high), 0, iteration) for iteration in range(300)]
        assert all(window == list(range(window[0], window[0] + num_steps)) for window in windows)
        assert {window[0] for window in windows} == set(range(low, high - num_steps + 1))
        torch.manual_seed(3)  # no other state counts
        assert [rollout.draw_window(num_steps, (low, high), 0, i) for i in reversed(range(300))] == windows[::-1]
    starts = np.array([rollout.draw_window(2, (0, 5), 1, iteration)[0] for iteration in range(4000)])
    counts = np.bincount(starts, minlength=4)
    assert ((counts - 1000) ** 2 / 1000).sum() < 16.3  # chi squared of 3 degrees of freedom, p = 0.001
    assert (starts[:300] != [rollout.draw_window(2, (0, 5), 2, iteration)[0] for iteration in range(300)]).any()


def exact_velocity(x, sigma, mean, std):
    """E[noise - x0 | x] where x0 ~ N(mean, std^2)."""
    rest = (x - (1 - sigma) * mean) / ((1 - sigma) ** 2 * std**2 + sigma**2)
    return sigma * rest - mean - (1 - sigma) * std**2 * rest


def end_of(law, noise_level, wrong=None, num_steps=1000, num_samples=40_000, mean=0.8, std=0.5):
    """Samples from the exact velocity; wrong: -1 flips the drift's correction, 0 leaves it out."""
    generator = flow.seeded("cpu", 5)
    x = torch.randn(num_samples, generator=generator)
    grid = flow.sigma_grid(num_steps, 1.0).tolist()
    for k in range(num_steps):
        v = exact_velocity(x, grid[k], mean, std)
        following, scale = rollout.sde_step(law, x, v, grid[k], grid[k + 1], grid[1], noise_level)
        if wrong is not None:
            ode = x + v * (grid[k + 1] - grid[k])
            following = ode + wrong * (following - ode)
        x = following + scale * torch.randn(num_samples, generator=generator)
    return x


@pytest.mark.parametrize("law, noise_level", [("flow", 0.7), ("flow", 1.0), ("dance", 0.3), ("dance", 0.7)])
def test_marginals_of_the_sde_are_the_odes(law, noise_level):
    """x0 ~ N(0.8, 0.5^2): mean and variance within the sampling error of 40,000; a wrong drift is far outside it."""

    def errors(x):  # in standard errors
        return abs(x.mean() - 0.8) / (0.5 / 200), abs(x.var() / 0.25 - 1) / np.sqrt(2 / 40_000)

    assert max(errors(end_of(law, 0.0))) < 3.5  # the ODE
    assert max(errors(end_of(law, noise_level))) < 3.5
    assert max(errors(end_of(law, noise_level, wrong=-1))) > 20
    assert max(errors(end_of(law, noise_level, wrong=0))) > 10


def test_cps_keeps_the_noise_level_of_the_grid():
    """For one x0 each step ends at N((1 - sigma) x0, sigma^2) exactly, however few steps and however much noise.

    That is all it promises: where x0 spreads, its samples spread less than the ODE's (a guess of x0 is its mean).
    """
    for noise_level in (0.3, 0.7, 1.0):
        generator = flow.seeded("cpu", 6)
        x = torch.randn(100_000, generator=generator)
        grid = flow.sigma_grid(6, 3.0).tolist()
        for sigma, following in zip(grid[:-2], grid[1:-1], strict=True):
            v = exact_velocity(x, sigma, 0.8, 0.0)
            mean, std = rollout.sde_step("cps", x, v, sigma, following, grid[1], noise_level)
            x = mean + std * torch.randn(100_000, generator=generator)
            assert abs(x.mean() - (1 - following) * 0.8) < 4 * following / np.sqrt(100_000)
            assert abs(x.var() / following**2 - 1) < 4 * np.sqrt(2 / 100_000)


# ----------------------------------------------------------------------------- rollouts


@pytest.mark.parametrize("kind", ["i2v", "ti2v", "t2v"])
def test_guidance_is_that_of_its_paper(checkpoints, kind):
    wan = load(checkpoints[kind])
    noise, text = flow.randn((2, 16, 3, 4, 6), 0), flow.randn((2, 2, 16, 64), 1)
    condition = {"i2v": flow.randn((2, 16, 3, 4, 6), 2), "ti2v": flow.randn((2, 16, 1, 4, 6), 2)}.get(kind)
    calls = record(wan.experts)
    for sigma in (0.95, 0.5):
        at = wan, noise, torch.tensor([sigma] * 2), condition, *text, 4.0, 3.0
        guided = sampler.guided_velocity(*at)
        assert len(calls) == 2
        conditional, unconditional = (wan_model.velocity(wan, *at[1:4], x) for x in text)
        scale = 4.0 if sigma > 0.9 or kind == "ti2v" else 3.0
        torch.testing.assert_close(guided, scale * conditional + (1 - scale) * unconditional, atol=1e-5, rtol=1e-5)
        assert (guided - conditional).abs().mean() > 1e-2
        calls.clear()


@pytest.mark.parametrize("law", rollout.LAWS)
@pytest.mark.parametrize("kind", ["i2v", "ti2v"])
def test_a_rollout_is_stochastic_in_its_window_only(checkpoints, kind, law):
    wan = load(checkpoints[kind])
    noise, text = flow.randn((2, 16, 3, 4, 6), 0), flow.randn((2, 2, 16, 64), 1)
    condition = flow.randn((2, 16, 3 if kind == "i2v" else 1, 4, 6), 2)
    sigmas, window, guidance = flow.sigma_grid(6, 5.0), [2, 3], (2.0, 1.5)
    grid, first = sigmas.tolist(), 0 if kind == "i2v" else 1  # the first generated latent frame

    def run(**changed):
        settings = dict(law=law, noise_level=0.7, window=window) | changed
        settings["generators"] = [flow.seeded("cpu", 9, n) for n in range(2)]
        return sampler.sample(wan, noise, condition, *text, sigmas, *guidance, **settings)

    calls = record(wan.experts)
    latents, transitions = run()
    seen = [call[1][:, :16] for call in calls[::2]] + [latents]  # what each step starts from, and the end
    velocities = [u[4] + scale * (c[4] - u[4]) for c, u, scale in zip(calls[::2], calls[1::2], [
        guidance[1] if call[0] == "low" else guidance[0] for call in calls[::2]], strict=True)]
    assert [t.index for t in transitions] == window and len(calls) == 12
    drawn = [flow.seeded("cpu", 9, n) for n in range(2)]
    gen_mask = wan_model.generated_mask(wan, latents, condition)
    for k in range(6):
        if k not in window:
            following = seen[k] + velocities[k] * (grid[k + 1] - grid[k])
            torch.testing.assert_close(seen[k + 1][:, :, first:], following[:, :, first:], atol=1e-5, rtol=1e-5)
            continue
        t = transitions[window.index(k)]
        torch.testing.assert_close(t.latents[:, :, first:], seen[k][:, :, first:], atol=0, rtol=0)
        torch.testing.assert_close(t.next_latents, seen[k + 1], atol=0, rtol=0)
        mean, std = rollout.sde_step(law, t.latents, velocities[k], grid[k], grid[k + 1], grid[1], 0.7)
        noises = torch.stack([torch.randn(16, 3, 4, 6, generator=generator) for generator in drawn])
        torch.testing.assert_close(
            t.next_latents[:, :, first:], (mean + std * noises)[:, :, first:], atol=1e-5, rtol=1e-5
        )
        v = sampler.guided_velocity(wan, t.latents, sigmas[k].expand(2), condition, *text, *guidance)  # as in training
        mean, std = rollout.sde_step(law, t.latents, v, grid[k], grid[k + 1], grid[1], 0.7)
        assert torch.equal(mean, t.mean)
        assert torch.equal(rollout.log_prob(law, t.next_latents, mean, std, gen_mask), t.log_prob)
        if kind == "ti2v":
            assert torch.equal(t.next_latents[:, :, :1], condition)
    if kind == "ti2v":
        assert torch.equal(latents[:, :, :1], condition)
    assert torch.equal(run()[0], latents)
    without, none = run(window=[])
    assert not none and torch.equal(without, sampler.sample(wan, noise, condition, *text, sigmas, *guidance)[0])
    assert (without - latents)[:, :, first:].abs().mean() > 1e-2
