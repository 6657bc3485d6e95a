"""The policy's videos by SGLang servers: sampler.Sampler's methods, and the LoRA sync."""

import atexit
import math
import os
import secrets
from functools import partial

import torch

import flow
import fsdp
import model as wan_model
import rollout
import sglang_server
from guard import UserError
from sglang_client import SDE_TYPES, SGLangClient, urls_of


def check_settings(config, wan):
    """UserError, before anything is loaded or started, for what SGLang's rollouts can't do."""
    c, urls = config, urls_of(config)
    if c["sglang_launch"] == bool(urls):
        raise UserError("rollout=sglang: want either sglang_launch=True or sglang_urls=http://host:port,..., got "
                        + ("both" if urls else "neither"))
    for url in urls:
        if not url.startswith(("http://", "https://")) or urls.count(url) > 1:
            raise UserError(f"sglang_urls={url}: want http://host:port, comma-separated, each once")
    sglang_server.check(wan.model, c["sglang_port"], c["sglang_command"], c["sglang_args"])
    if wan.boundary_ratio and not math.isclose(round(1000 * wan.boundary_ratio), 1000 * wan.boundary_ratio):
        raise UserError(f"boundary_ratio={wan.boundary_ratio}: SGLang routes by whole timesteps; want three decimals")
    if not c["lora_rank"]:
        raise UserError("lora_rank=0: the servers are given LoRA adapters; want a lora_rank of 1 or more")
    if c["law"] not in SDE_TYPES:
        raise UserError(f"law={c['law']}: SGLang has {' and '.join(SDE_TYPES)}")
    scales = c["guidance_scale"], c["guidance_scale_2"] or c["guidance_scale"]
    if min(scales) < 1 or (scales[0] == 1) != (scales[1] == 1):
        raise UserError(f"guidance_scale={scales[0]:g}, guidance_scale_2={scales[1]:g}: SGLang has guidance on (both "
                        "more than 1) or off (both 1)")
    if c["max_text_tokens"] != 512:
        raise UserError(f"max_text_tokens={c['max_text_tokens']}: SGLang's servers always use 512")
    if (c["sglang_retries"] + 1) * c["sglang_timeout"] > 1500:
        raise UserError(f"sglang_timeout={c['sglang_timeout']:g} x (1 + sglang_retries) s: want at most 1500 s "
                        "together, the other ranks wait meanwhile")
    if c["lora_sync"] == "disk" and not os.path.isdir(c["lora_sync_dir"]):
        raise UserError(f"lora_sync_dir={c['lora_sync_dir']}: no such folder; want one that the server sees too")
    if c["lora_sync"] == "disk" and c["lora_alpha"] != int(c["lora_alpha"]):
        raise UserError(f"lora_alpha={c['lora_alpha']}: lora_sync=disk wants a whole number")


def record_of(policy, config, sigmas, positions, answers, window):
    """sglang_client.Answers of a batch -> a rollout.Record without rewards, pixels b f 3 h w in 0..1.

    Its Steps have the mean and log-prob of the server's own velocity where that was measured, else None.
    """
    stack = lambda name: torch.stack([getattr(a, name) for a in answers])  # noqa: E731
    condition = stack("condition") if answers[0].condition is not None else None
    latents = stack("latents")  # b k c f h w
    grid, steps = sigmas.tolist(), []
    for i, index in enumerate(window):
        x, following, mean, log_prob = latents[:, i], latents[:, i + 1], None, None
        if answers[0].velocity is not None:
            velocity = torch.stack([a.velocity[index] for a in answers])
            mean, std = rollout.sde_step(config["law"], x, velocity, grid[index], grid[index + 1], grid[1],
                                         config["noise_level"])
            gen_mask = wan_model.generated_mask(policy, x, condition)
            log_prob = rollout.log_prob(config["law"], following, mean, std, gen_mask)
        steps.append(rollout.Step(index, x, following, mean, log_prob))
    negative = answers[0].negative_text
    record = rollout.Record(positions, condition, stack("text"), negative[None] if negative is not None else None,
                            steps, {})
    return record, stack("pixels").float() / 255


class SGLangSampler:
    """sampler.Sampler's methods by servers: those of sglang_urls, or one that this run starts on each node.

    They are found or started here, and each is seen to make a whole video. UserError, on which ranks must agree.
    """

    def __init__(self, config, policy, latent_shape, guidance, device, train_prompts, eval_prompts, phases, stop):
        self.config, self.policy, self.guidance, self.device, self.phases = config, policy, guidance, device, phases
        self.stop, self.prompts, self.logged = stop, train_prompts, {"lora_version": 0}
        self.sigmas = flow.sigma_grid(config["num_steps"], config["shift"])
        self.eval_sigmas = flow.sigma_grid(config["num_eval_steps"], config["shift"])
        run = fsdp.reduce_sum([float(secrets.randbits(50) if fsdp.is_first() else 0)])[0]  # the same on all ranks
        self.client = client = SGLangClient(config, policy, latent_shape, guidance, device.type, f"{int(run):x}",
                                            *fsdp.place())
        self.server = None  # that this rank launched
        atexit.register(self.close)
        check = partial(client.check, prompts=train_prompts, sigmas=self.sigmas)  # of a URL
        for url in client.responsible:
            check(url)
        if config["sglang_launch"]:
            place = os.path.join(config["out_dir"], "sglang", f"node_{os.environ.get('GROUP_RANK', '0')}")
            client.url_file = f"{place}.url"
            if int(os.environ.get("LOCAL_RANK", 0)) == 0:
                client.responsible = [""]
                self.server = sglang_server.LaunchedServer(place, config, check, lambda: self.stop.requested)

    def close(self):
        """Let other runs have the servers, and end the one that was launched."""
        self.client.close()
        if self.server:
            self.server.end()

    def begun(self):
        """A line that tells where the servers are."""
        return f"servers    {', '.join(self.client.current_urls())}: each made a video of {self.prompts.prompts[0]!r}"

    # ------------------------------------------------------------------------- videos

    def roll_out(self, prompts, positions, indices, seeds, window, measured=False):
        """As sampler.Sampler.roll_out. All videos are asked for at once: servers work on some while others are scored.

        measured: with the servers' own velocities in the first batch, from which a Step's mean and log-prob come.
        """
        size = self.config["rollout_batch"]
        with fsdp.all_ranks_agree():  # where an image is gone
            asked = [self.client.submit(prompts, index, seed, self.sigmas, window, measured and n < size)
                     for n, (index, seed) in enumerate(zip(indices, seeds, strict=True))]
        for start in range(0, len(positions), size):
            if self.stop.anywhere():
                for future in asked:  # what hasn't been sent isn't
                    future.cancel()
                return
            yield self._batch(positions[start : start + size], [asked.pop(0) for _ in range(size)], window)

    def _batch(self, positions, asked, window):
        """Apart from roll_out, so that the answers are free while rewards score their videos."""
        with self.phases("roll"), fsdp.all_ranks_agree():
            answers = [future.result() for future in asked]
            record, pixels = record_of(self.policy, self.config, self.sigmas, positions, answers, window)
        self.phases.add("in_server", sum(answer.seconds for answer in answers))
        return record, pixels.to(self.device)

    def generate(self, prompts, indices, seeds):
        """Videos b f 3 h w in 0..1 of prompts by the ODE's num_eval_steps."""
        with fsdp.all_ranks_agree():
            asked = [self.client.submit(prompts, index, seed, self.eval_sigmas)
                     for index, seed in zip(indices, seeds, strict=True)]
            return torch.stack([future.result().pixels for future in asked]).to(self.device) / 255

    # ------------------------------------------------------------------------- the policy's LoRA

    def sync(self, parameters):
        """Give all servers the adapters: gathered on all ranks, sent whole by the rank responsible for a server, what
        the server says compared with what was sent, agreed on by all. Collective."""
        client = self.client
        with self.phases("sync"):
            adapters = wan_model.by_expert(fsdp.gather(parameters, wanted=bool(client.responsible)))
            if self.config["sglang_colocated"] and self.device.type == "cuda":
                torch.cuda.empty_cache()  # what training's peak left reserved is the server's now
                fsdp.barrier()
            with fsdp.all_ranks_agree():
                if self.config["sglang_colocated"]:
                    client.memory("resume")
                client.sync(adapters)
            failed = [float(url in client.down and url in client.responsible) for url in client.urls]
            client.down = {url: client.down.get(url, f"{url} failed at the sync")
                           for url, down in zip(client.urls, fsdp.reduce_max(failed), strict=True) if down}
            self.logged["lora_version"] = client.version

    def release(self):
        """On GPUs that the servers share with the trainer, they give their memory back until the next sync."""
        if self.config["sglang_colocated"]:
            fsdp.barrier()  # every rank has its videos
            with fsdp.all_ranks_agree():
                self.client.memory("release")

    def check_drift(self, drift):
        """Say how far the servers' numbers are from the trainer's; UserError where that can't be rounding.

        drift: "drift/velocity" and "drift/ratio" of each step, "drift/ratio 3", and of all; {} where not measured.
        """
        if not drift:
            return
        each = ", ".join(f"{name.removeprefix('drift/')}: {value:.1e}" for name, value in drift.items() if " " in name)
        fsdp.say(f"drift      server against trainer: {each}")
        if drift["drift/ratio"] > self.config["clip_range"]:
            fsdp.say(f"warning    that is more than clip_range={self.config['clip_range']:g}: likely bf16 rounding of "
                     "other kernels; the log-probs are recomputed here, but its videos are a little off-policy")
        # rounding a pass, which guidance u + s (c - u) multiplies: two bf16 graphs of one full-size model differ by 2 %
        # at s = 1 and by 10 % at s = 5 (random weights)
        scale = max(self.guidance["guidance_scale"], self.guidance["guidance_scale_2"])
        most = 1e-3 if self.policy.dtype == torch.float32 else 0.1 * math.hypot(scale, scale - 1)
        if not drift["drift/velocity"] <= most:
            raise UserError(f"the server's velocity differs from the trainer's by {drift['drift/velocity']:.1e} of its "
                            "size: other weights, another LoRA or another precision (--dtype)")
