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
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
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
from sglang_server import health, request
from web import ServerError

WRITTEN_FOR = "0.5.23"
LEASE = 20.0  # seconds that a server keeps itself for a run that falls silent; told five times in that time
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
    `responsible`, of one rank of the node. run: what the servers know this run by, the same on all ranks; a server is
    one run's at a time, and its answers say which LoRA it held.
    """

    def __init__(self, config, wan, latent_shape, guidance, device_type, run, rank=0, world_size=1):
        self.config, self.wan, self.latent_shape, self.guidance = config, wan, latent_shape, guidance
        self.device_type, self.urls, self.url_file = device_type, urls_of(config), ""
        self.responsible = self.urls[rank::world_size]
        self.timeout, self.retries = config["sglang_timeout"], config["sglang_retries"]
        self.shapes = linear_shapes(wan.config)
        self.down, self.turn = {}, itertools.count(rank + 1)  # url -> why it isn't asked; round robin
        self.run, self.name = run, f"out_dir={os.path.abspath(config['out_dir'])} on {socket.gethostname()}"
        self.held, self.over = set(), threading.Event()  # the servers that this rank keeps for the run
        self.version, self.latest = 0, (0, {})  # the LoRA that was synced last, which a restarted server gets first
        self.probe, self.untrained = None, {}  # a request, and url -> its answer before any sync
        self.jobs = queue.SimpleQueue()
        for _ in range(config["sglang_concurrency"]):
            threading.Thread(target=self._work, daemon=True).start()  # daemons: a run that ends doesn't wait for them
        threading.Thread(target=self._keep, daemon=True).start()

    def post(self, url, path, body):
        return request(f"{url}{path}", body, self.timeout, self.run)

    # ------------------------------------------------------------------------- whose the servers are

    def tell(self, url, timeout=30, **more):
        """Say that a server is this run's for LEASE `seconds` more, and perhaps which `lora` it holds. UserError: it
        isn't."""
        request(f"{url}/nanowan", dict(run=self.run, name=self.name, seconds=LEASE) | more, timeout)

    def claim(self, url):
        """Make a server this run's, and keep it. UserError where another has it; one that was killed, for a moment."""
        until = time.time() + 1.2 * LEASE
        while True:
            try:
                self.tell(url, lora=None)
                break
            except UserError as error:
                if "answered 409" not in str(error) or time.time() > until:
                    raise UserError(f"{error}: want a server of python sglang_server.py that no other run "
                                    "uses") from None
            time.sleep(1)
        self.held = {url} if self.url_file else self.held | {url}

    def _keep(self):
        while not self.over.wait(LEASE / 5):
            for url in self.held:
                with suppress(UserError):  # who asks it for something is told
                    self.tell(url, timeout=LEASE / 4)

    def close(self):
        """The servers are free for other runs."""
        self.over.set()
        for url in self.held:
            with suppress(UserError):
                self.tell(url, timeout=LEASE / 4, seconds=0)

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

    def ask(self, url, prompt, image, seed, sigmas, window=(), measured=False, lora=None):
        """One rollout from one server, checked -> Answer. lora: version that it is to hold, if not that synced last."""
        held = f"{self.run}:{self.version if lora is None else lora}"
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
        raw = self.post(url, "/rollout/generate", body)
        try:
            (answer,) = msgpack.unpackb(raw)
            if (tag := answer["request_id"].rpartition("/")[0]) != held:
                raise ServerError(f"{url}: was started anew, or another run had it: it made a video by the LoRA {tag}, "
                                  f"want {held}", gone=True)
            return self._checked(url, answer, sigmas, asked, measured)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # not what 0.5.23 answers
            raise UserError(f"{url}: can't read its answer ({error!r:.200}): want sglang {WRITTEN_FOR}") from None

    def _checked(self, url, answer, sigmas, asked, measured):
        """What a server answered, or UserError with what is wrong about it."""
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
        condition = None
        if self.wan.kind == "ti2v":  # blended back after each step: the first latent frame is the given one
            condition = latents[0, :, :1].float()
            if not torch.equal(latents[:, :, :1], latents[:1, :, :1].expand_as(latents[:, :, :1])):
                raise UserError(f"{url}: the given frame changed in the rollout")
        env = answer.get("denoising_env")
        if self.wan.kind == "i2v" and env:
            condition = tensor_in(env, "image_kwargs", "image_latent")[4:].float()  # after the mask's 4 channels
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
        self.version += 1
        self.latest = self.version, adapters
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
        version, adapters = self.latest
        self.tell(url, lora=None)
        for expert, tensors in adapters.items():
            target, layers = wan_model.FOLDERS[expert], len(tensors) // 2  # "transformer" | "transformer_2"
            tensors = {name: tensor.to(self.wan.dtype).contiguous() for name, tensor in tensors.items()}
            if self.config["lora_sync"] == "disk":  # by a file in a fresh folder, which the server must see
                path = os.path.abspath(os.path.join(folder, f"lora_{expert}_{time.time_ns()}"))  # never read twice
                body = dict(lora_nickname=expert, lora_path=path, target=target, lora_alpha=int(alpha),
                            merge_mode="dynamic")
                try:
                    os.mkdir(path)
                    save_file(tensors, os.path.join(path, "lora.safetensors"))
                    self.post(url, "/v1/set_lora", body)
                except (OSError, SafetensorError) as error:
                    raise UserError(f"lora_sync_dir={folder}: {error}: want a folder with room for the LoRA, or "
                                    "lora_sync=tensor") from None
                finally:
                    shutil.rmtree(path, ignore_errors=True)
            else:  # inside the request, to any machine
                payload = base64.b64encode(pickle.dumps(list(tensors.items()), protocol=4)).decode()
                body = dict(serialized_named_tensors=[payload], weight_update_mode="lora_merge",
                            target_modules=[target], lora_alpha=alpha, lora_rank=self.config["lora_rank"])
                message = json.loads(self.post(url, "/update_weights_from_tensor", body))["message"]
                if f"Updated {layers} LoRA layers" not in message or "skipped 0 " not in message:
                    raise UserError(f"{url}: sent a LoRA of {layers} layers, it says: {message}")
        self.tell(url, lora=version)
        nonzero = any(tensor.any() for tensors in adapters.values() for name, tensor in tensors.items()
                      if ".lora_B." in name)
        before = self.untrained.pop(url, None) if nonzero else None  # the first LoRA that can be seen
        if before is not None and torch.equal(self.ask(url, *self.probe, lora=version).latents, before):
            raise UserError(f"{url}: a LoRA was synced and the same rollout didn't change: want it started by "
                            "python sglang_server.py (--lora-merge-mode dynamic)")

    def memory(self, wanted):
        """wanted "release" | "resume": the GPU memory of the servers this rank is responsible for."""
        for place in self.responsible:
            try:
                self._retried(lambda url: self.post(url, f"/{wanted}_memory_occupation", {}), place)
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
        self.claim(url)
        if self.config["sglang_colocated"]:
            self.post(url, "/resume_memory_occupation", {})  # the run before may have left it asleep
        self.post(url, "/v1/unmerge_lora_weights", {})  # of that run
        self.tell(url, lora=0)
        self.untrained[url] = self.ask(url, *self.probe, lora=0).latents
        if self.version:  # started anew in the middle of a run
            self.send(url)
