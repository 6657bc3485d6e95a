"""What is asked of SGLang diffusion servers over HTTP and what they answer; who of them is there.

Written for sglang 0.5.23 with shim/nanowan_shim.py (sglang_server.py starts it so). Per video one request; the answer
holds the latents of the window's steps, the text embeddings and the given frame's latents, so that the trainer encodes
nothing and decodes nothing. Its log-probabilities average over given positions too: the trainer computes its own.
"""

import base64
import io
import itertools
import json
import os
import pickle
import queue
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import msgpack
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save_file

import model as wan_model
from adapters import check_layers, linear_shapes
from guard import UserError
from sglang_server import ServerError, health, request

WRITTEN_FOR = "0.5.23"
SDE_TYPES = {"flow": "sde", "cps": "cps"}  # our law -> sglang's rollout_sde_type


@dataclass
class Answer:
    """One video as a server made it, on the CPU."""

    latents: torch.Tensor  # of the asked steps: k c f h w
    pixels: torch.Tensor  # f 3 h w, uint8
    condition: torch.Tensor | None  # c f|1 h w, as model.velocity wants it
    text: torch.Tensor | None  # n d
    negative_text: torch.Tensor | None  # n d; None at guidance 1
    velocity: torch.Tensor | None  # with guidance, of all steps: k c f h w; only where drift is measured
    seconds: float  # in the server


@lru_cache(maxsize=64)  # a group shares its image
def png_url(prompts, index):
    """The given image of a prompt at the run's size, as a data URL: it travels inside the request. "" without one."""
    if not prompts.needs_image:
        return ""
    pixels = ((prompts.image(index) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def tensor_in(node, *path):
    """The tensor at a path of an answer, or None: {"__tensor__": True, "data": safetensors bytes with key "t"}."""
    for key in path:
        node = (node or {}).get(key)
    return load(node["data"])["t"] if node else None


def urls_of(config):
    """The servers that the user started."""
    return [url.strip().rstrip("/") for url in config["sglang_urls"].split(",") if url.strip()]


class SGLangClient:
    """A rank's view of the servers: requests in flight, retries, checks of every answer, and the LoRA sync.

    config: train_grpo.py's settings. Of sglang_urls, which the user started, each rank asks all in turn, and is
    `responsible` for syncing a share. Or sglang_server.LaunchedServer says in a `url_file` where this node's is: "" in
    `responsible`, of one rank of the node.
    """

    def __init__(self, config, wan, latent_shape, guidance, device_type, rank=0, world_size=1):
        self.config, self.wan, self.latent_shape, self.guidance = config, wan, latent_shape, guidance
        self.device_type, self.urls, self.url_file = device_type, urls_of(config), ""
        self.responsible = self.urls[rank::world_size]
        self.timeout, self.retries = config["sglang_timeout"], config["sglang_retries"]
        self.shapes = linear_shapes(wan.config)
        self.down, self.turn = {}, itertools.count(rank + 1)  # url -> why it isn't asked; round robin
        self.latest = None  # what was synced last, which a restarted server gets first
        self.probe, self.untrained = None, {}  # a request, and url -> its answer before any sync
        self.processes = {}  # url -> which process answered since the last sync
        self.jobs = queue.SimpleQueue()
        for _ in range(config["sglang_concurrency"]):
            threading.Thread(target=self._work, daemon=True).start()  # daemons: a run that ends doesn't wait for them

    # ------------------------------------------------------------------------- rollouts

    def submit(self, prompts, index, seed, sigmas, window=(), measured=False):
        """Ask for one video of a prompt -> concurrent.futures.Future of an Answer.

        window: its stochastic steps, all others are ODE steps; measured: with the server's velocities.
        """
        future = Future()
        job = prompts.prompts[index], png_url(prompts, index), seed, sigmas, list(window), measured
        self.jobs.put((future, job))
        return future

    def _work(self):
        while True:
            future, job = self.jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._retried(lambda url, job=job: self.ask(url, *job)))
                except ServerError as error:
                    future.set_exception(UserError(f"no rollout after {self.retries + 1} attempts, the last: {error}: "
                                                   "is the server started with this run's --dtype?"))
                except BaseException as error:
                    future.set_exception(error)
            del future  # its answer is large

    def _retried(self, action, place=""):
        """action(url) at a server, or at the next one, again after failures -> what it returns. ServerError: the last.

        One that is gone comes back without the LoRA: of the user's another is asked until the next sync; a launched one
        is given the LoRA and published under another URL.
        """
        failures = 0
        while True:
            url = place or self._next_url()
            try:
                return action(url)
            except ServerError as error:
                if error.gone and (not self.url_file or health(url) != "up"):
                    self.down[url] = str(error)
                failures += bool(self.url_file) or not error.gone
                if failures > self.retries or (place and error.gone):
                    raise
            time.sleep(1)

    def current_urls(self):
        """Where the servers are now: none while a launched one isn't up. UserError once it has been given up."""
        if not self.url_file:
            return self.urls
        with open(self.url_file, encoding="utf-8") as file:
            text = file.read()
        if text.startswith("error "):
            raise UserError(text.removeprefix("error "))
        return [text] if text else []

    def _next_url(self):
        until = time.time() + self.timeout
        while not (urls := [url for url in self.current_urls() if url not in self.down]):
            if not self.url_file or time.time() > until:
                raise UserError("no SGLang server left: " + ("; ".join(self.down.values()) or "it didn't come back"))
            time.sleep(1)
        return urls[next(self.turn) % len(urls)]

    def ask(self, url, prompt, image, seed, sigmas, window=(), measured=False):
        """One rollout from one server, checked -> Answer."""
        num_steps, asked = len(sigmas) - 1, [*window, window[-1] + 1] if window else [len(sigmas) - 1]
        scales = [self.guidance["guidance_scale"], self.guidance["guidance_scale_2"]]
        body = dict(
            prompt=prompt, negative_prompt=self.config["negative_prompt"] if scales[0] != 1 else None, seed=seed,
            generator_device=self.device_type, num_inference_steps=num_steps, guidance_scale=scales[0],
            image_path=[image] if image else None, rollout=True,
            rollout_sde_type=SDE_TYPES[self.config["law"]], rollout_noise_level=self.config["noise_level"],
            rollout_sde_step_indices=list(window), rollout_return_step_indices=asked,
            rollout_return_dit_trajectory=True, rollout_return_denoising_env=bool(window), rollout_debug_mode=measured,
            suppress_logs=True, **{name: self.config[name] for name in ("height", "width", "num_frames")},
            extra_sampling_params={"guidance_scale_2": scales[1], "boundary_ratio": self.wan.boundary_ratio}
            if len(self.wan.expert_names) == 2 else None)
        raw = request(f"{url}/rollout/generate", body, self.timeout)
        try:
            (answer,) = msgpack.unpackb(raw)
            return self._checked(url, answer, sigmas, asked, measured)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # not what 0.5.23 answers
            raise UserError(f"{url}: can't read its answer ({error!r:.200}): want sglang {WRITTEN_FOR}") from None

    def _checked(self, url, answer, sigmas, asked, measured):
        """What a server answered, or UserError with what is wrong about it."""
        process = answer["request_id"].rpartition("/")[0]
        if process != self.processes.setdefault(url, process):
            raise ServerError(f"{url}: was started anew, without the LoRA", gone=True)
        latents = tensor_in(answer, "dit_trajectory", "latents")
        want = (len(asked), *self.latent_shape)
        got = None if latents is None else tuple(latents.shape)
        if got != want:
            raise UserError(f"{url}: got latents of {got}, want {want}: is it started with this model and with "
                            "nanoWan's shim (python sglang_server.py)?")
        grid = tensor_in(answer, "dit_trajectory", "sigmas")
        if grid.shape != sigmas.shape or (grid - sigmas).abs().max() > 1e-5:
            raise UserError(f"{url}: its noise levels are {[round(s, 4) for s in grid.tolist()]}, want "
                            f"{[round(s, 4) for s in sigmas.tolist()]}: start it with this run's --shift")
        pixels = tensor_in(answer, "generated_output")  # 3 f h w
        height, width, num_frames = (self.config[name] for name in ("height", "width", "num_frames"))
        if tuple(pixels.shape) != (3, num_frames, height, width):
            raise UserError(f"{url}: got a video of {tuple(pixels.shape)}, want {(3, num_frames, height, width)}")
        if pixels.dtype != torch.uint8:
            pixels = (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8)
        condition = None
        if self.wan.kind == "ti2v":  # blended back after each step: the first latent frame is the given one
            condition = latents[0, :, :1].float()
            if not torch.equal(latents[:, :, :1], latents[:1, :, :1].expand_as(latents[:, :, :1])):
                raise UserError(f"{url}: the given frame changed in the rollout")
        env = answer.get("denoising_env")
        if self.wan.kind == "i2v" and env:
            image_latent = tensor_in(env, "image_kwargs", "image_latent")  # mask 4 | condition 16
            if image_latent is None:
                raise UserError(f"{url}: no image_latent in its answer: want nanoWan's shim (python sglang_server.py)")
            condition = image_latent[4:].float()
        negative = tensor_in(env, "neg_cond_kwargs", "encoder_hidden_states")
        if env and (negative is not None) != (self.guidance["guidance_scale"] != 1):
            raise UserError(f"{url}: guidance was {'on' if negative is not None else 'off'}, want the opposite")
        velocity = tensor_in(answer, "rollout_debug_tensors", "rollout_model_outputs")
        if measured and velocity is None:
            raise UserError(f"{url}: asked for its velocities, got none: want sglang {WRITTEN_FOR}")
        return Answer(latents.float(), pixels.transpose(0, 1), condition,
                      tensor_in(env, "pos_cond_kwargs", "encoder_hidden_states"), negative,
                      velocity.float() if velocity is not None else None, answer["inference_time_s"] or 0)

    # ------------------------------------------------------------------------- LoRA, memory, checks

    def sync(self, adapters):
        """Give the servers this rank is responsible for the whole LoRA of each expert; it replaces the last one.

        adapters: {"high": {"blocks.0.attn1.to_q.lora_A.weight": tensor}, ...}: the names that the server wants; sent in
        the policy's dtype. A server of the user's that goes on failing is left alone until the next sync.
        """
        for tensors in adapters.values():
            check_layers(tensors, self.shapes)
        self.latest = adapters
        for place in self.responsible:
            try:
                self._retried(self.send, place)
                self.down.pop(place, None)
            except ServerError as error:
                if not place:
                    raise UserError(f"no LoRA sync after {self.retries + 1} attempts, the last: {error}") from None
                self.down[place] = str(error)

    def send(self, url):
        """The latest LoRA to one server, and what it says it did compared with what was sent."""
        alpha, folder = self.config["lora_alpha"] or float(self.config["lora_rank"]), self.config["lora_sync_dir"]
        for expert, tensors in self.latest.items():
            target, layers = wan_model.FOLDERS[expert], len(tensors) // 2  # "transformer" | "transformer_2"
            tensors = {name: tensor.to(self.wan.dtype).contiguous() for name, tensor in tensors.items()}
            if self.config["lora_sync"] == "disk":  # by a file in a fresh folder, which the server must see
                path = os.path.abspath(os.path.join(folder, f"lora_{expert}_{time.time_ns()}"))  # never read twice
                body = dict(lora_nickname=expert, lora_path=path, target=target, lora_alpha=int(alpha),
                            merge_mode="dynamic")
                try:
                    os.mkdir(path)
                    save_file(tensors, os.path.join(path, "lora.safetensors"))
                    request(f"{url}/v1/set_lora", body, self.timeout)
                except (OSError, SafetensorError) as error:
                    raise UserError(f"lora_sync_dir={folder}: {error}: want a folder with room for the LoRA, or "
                                    "lora_sync=tensor") from None
                finally:
                    shutil.rmtree(path, ignore_errors=True)
            else:  # inside the request, to any machine
                payload = base64.b64encode(pickle.dumps(list(tensors.items()), protocol=4)).decode()
                body = dict(serialized_named_tensors=[payload], weight_update_mode="lora_merge",
                            target_modules=[target], lora_alpha=alpha, lora_rank=self.config["lora_rank"])
                message = json.loads(request(f"{url}/update_weights_from_tensor", body, self.timeout))["message"]
                if f"Updated {layers} LoRA layers" not in message or "skipped 0 " not in message:
                    raise UserError(f"{url}: sent a LoRA of {layers} layers, it says: {message}")
        nonzero = any(tensor.any() for tensors in self.latest.values() for name, tensor in tensors.items()
                      if ".lora_B." in name)
        before = self.untrained.pop(url, None) if nonzero else None  # the first LoRA that can be seen
        if before is not None and torch.equal(self.ask(url, *self.probe).latents, before):
            raise UserError(f"{url}: a LoRA was synced and the same rollout didn't change: want it started by "
                            "python sglang_server.py (--lora-merge-mode dynamic)")

    def memory(self, wanted):
        """wanted "release" | "resume": the GPU memory of the servers this rank is responsible for."""
        for place in self.responsible:
            try:
                self._retried(lambda url: request(f"{url}/{wanted}_memory_occupation", {}, self.timeout), place)
            except ServerError as error:
                raise UserError(f"sglang_colocated=True: couldn't {wanted} memory: {error}") from None

    def check(self, url, prompts, sigmas):
        """The server is there, with this model and this version's answers: a whole rollout. UserError, one line."""
        try:
            info = json.loads(request(f"{url}/server_info"))
            served, ours = info["model_path"], self.wan.model
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{url}: no SGLang server there ({error}): start one with python sglang_server.py, or set "
                            "sglang_launch=True") from None
        if info.get("version") != WRITTEN_FOR:
            print(f"{url} runs sglang {info.get('version')}; this client was written for {WRITTEN_FOR}", flush=True)
        here = os.path.isdir(served) and os.path.isdir(ours)  # else on another machine, or a hub id
        name = os.path.realpath if here else os.path.basename
        if name(served.rstrip("/")) != name(ours.rstrip("/")):
            raise UserError(f"{url}: serves {served}, want {ours}: start it with this run's --model")
        self.probe = prompts.prompts[0], png_url(prompts, 0), 0, sigmas
        if self.config["sglang_colocated"]:
            request(f"{url}/resume_memory_occupation", {}, self.timeout)  # the run before may have left it asleep
        request(f"{url}/v1/unmerge_lora_weights", {}, self.timeout)  # of that run
        self.untrained[url] = self.ask(url, *self.probe).latents
        if self.latest:  # started anew in the middle of a run
            self.send(url)
