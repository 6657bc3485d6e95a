"""Rollouts from SGLang diffusion servers over HTTP, and the policy's LoRA to them.

Written for sglang 0.5.23 with shim/nanowan_shim.py (sglang_server.py starts it so). Per video one request; the answer
holds the latents of the window's steps, the text embeddings and the given frame's latents, so that the trainer encodes
nothing and decodes nothing. Its log-probabilities average over given positions too: the trainer computes its own.
"""

import atexit
import base64
import http.client
import io
import json
import math
import os
import pickle
import queue
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import msgpack
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save_file

import model as wan_model
import rollout
import sglang_server
from guard import UserError

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


def urls_of(settings):
    """The servers that the user started."""
    return [url.strip().rstrip("/") for url in settings["sglang_urls"].split(",") if url.strip()]


def check_settings(settings, wan):
    """UserError, before anything is loaded or started, for what SGLang's rollouts can't do."""
    if settings["sglang_launch"] == bool(settings["sglang_urls"]):
        raise UserError("rollout=sglang: want either sglang_launch=True or sglang_urls=http://host:port,..., got "
                        + ("both" if settings["sglang_launch"] else "neither"))
    urls = urls_of(settings)
    for url in urls:
        if not url.startswith(("http://", "https://")) or urls.count(url) > 1:
            raise UserError(f"sglang_urls={url}: want http://host:port, comma-separated, each once")
    sglang_server.check_model(wan.model)
    sglang_server.check_start(settings["sglang_port"], settings["sglang_command"], settings["sglang_args"])
    if wan.boundary_ratio and not math.isclose(round(1000 * wan.boundary_ratio), 1000 * wan.boundary_ratio):
        raise UserError(f"boundary_ratio={wan.boundary_ratio}: SGLang routes by whole timesteps; want three decimals")
    if not settings["lora_rank"]:
        raise UserError("lora_rank=0: the servers are given LoRA adapters; want a lora_rank of 1 or more")
    if settings["law"] not in SDE_TYPES:
        raise UserError(f"law={settings['law']}: SGLang has {' and '.join(SDE_TYPES)}")
    scales = settings["guidance_scale"], settings["guidance_scale_2"] or settings["guidance_scale"]
    if min(scales) < 1 or (scales[0] == 1) != (scales[1] == 1):
        raise UserError(f"guidance_scale={scales[0]:g}, guidance_scale_2={scales[1]:g}: SGLang has guidance on (both "
                        "more than 1) or off (both 1)")
    if settings["max_text_tokens"] != 512:
        raise UserError(f"max_text_tokens={settings['max_text_tokens']}: SGLang's servers always use 512")
    if (settings["sglang_retries"] + 1) * settings["sglang_timeout"] > 1500:
        raise UserError(f"sglang_timeout={settings['sglang_timeout']:g} x (1 + sglang_retries) s: want at most 1500 s "
                        "together, the other ranks wait meanwhile")
    if settings["lora_sync"] == "disk" and not os.path.isdir(settings["lora_sync_dir"]):
        raise UserError(f"lora_sync_dir={settings['lora_sync_dir']}: no such folder; want one that the server sees too")
    if settings["lora_sync"] == "disk" and settings["lora_alpha"] != int(settings["lora_alpha"]):
        raise UserError(f"lora_alpha={settings['lora_alpha']}: lora_sync=disk wants a whole number")


def connect(settings, wan, latent_shape, guidance, sigmas, device, rank, world_size, prompts, stopping):
    """Find or start the servers and see each make a whole video -> this rank's SGLangClient. UserError, one line.

    stopping: () -> whether the run was asked to stop. The caller's ranks agree on the outcome (fsdp.all_ranks_agree).
    """
    example = prompts.prompts[0], png_url(prompts, 0)
    urls = urls_of(settings)
    sampling = {name: settings[name] for name in ("law", "noise_level", "height", "width", "num_frames")}
    client = SGLangClient(wan, latent_shape, sampling | {"sigmas": sigmas}, guidance, settings["negative_prompt"],
                          device.type, urls, responsible=urls[rank::world_size], rank=rank,
                          concurrency=settings["sglang_concurrency"], timeout=settings["sglang_timeout"],
                          retries=settings["sglang_retries"], colocated=settings["sglang_colocated"])
    for url in client.responsible:
        client.check(url, *example)
    if settings["sglang_launch"]:
        folder, node = os.path.join(settings["out_dir"], "sglang"), os.environ.get("GROUP_RANK", "0")
        client.url_file = os.path.join(folder, f"node_{node}.url")
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise UserError(f"out_dir={settings['out_dir']}: {error}: want a folder that can be written") from None
            client.responsible = True
            server = sglang_server.LaunchedServer(
                os.path.join(folder, f"node_{node}.log"), client.url_file, client.timeout, client.retries,
                lambda url: client.check(url, *example), stopping, settings["sglang_port"], model=settings["model"],
                devices=settings["sglang_devices"], dtype=settings["dtype"], shift=settings["shift"],
                command=settings["sglang_command"], args=settings["sglang_args"])
            client.close = server.end
            atexit.register(server.end)
    return client


def check_drift(drift, wan, guidance, clip_range):
    """Lines that tell how far the servers' numbers are from the trainer's, and then UserError if it can't be rounding.

    drift: "drift/velocity" and "drift/ratio" of each step, "drift/ratio 3", and of all (rollout.drift).
    """
    each = ", ".join(f"{name.removeprefix('drift/')}: {value:.1e}" for name, value in drift.items() if " " in name)
    yield f"drift      server against trainer: {each}"
    if drift["drift/ratio"] > clip_range:
        yield (f"warning    that is more than clip_range={clip_range:g}: likely bf16 rounding of other kernels; the "
               "log-probs are recomputed here, but its videos are a little off-policy")
    # rounding a pass, which guidance u + s (c - u) multiplies: two bf16 graphs of one full-size model differ by 2 % at
    # s = 1 and by 10 % at s = 5 (random weights)
    scale = max(guidance["guidance_scale"], guidance["guidance_scale_2"])
    most = 1e-3 if wan.dtype == torch.float32 else 0.1 * math.hypot(scale, scale - 1)
    if not drift["drift/velocity"] <= most:
        raise UserError(f"the server's velocity differs from the trainer's by {drift['drift/velocity']:.1e} of its "
                        "size: other weights, another LoRA or another precision (--dtype)")


class ServerError(Exception):
    """A request that may succeed with another server, or again; `gone`: this server's process isn't there any more."""

    def __init__(self, reason, gone):
        super().__init__(reason)
        self.gone = gone


def post(url, body, timeout):
    """POST JSON -> the answer's bytes. ServerError where it may pass by itself, UserError where it won't."""
    data = json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with sglang_server.HTTP.open(request, timeout=timeout) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        reason = f"{url} answered {error.code}: {sglang_server.body_of(error)[:300].decode(errors='replace')}"
        if error.code < 500:
            raise UserError(reason) from None
        raise ServerError(reason, gone="restart the server" in reason) from None  # its worker is
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        raise ServerError(f"{url}: {cause or type(error).__name__}", gone=not isinstance(cause, TimeoutError)) from None


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


def linear_shapes(config):
    """{"blocks.0.attn1.to_q": (out, in)} of a transformer's linear layers, from its config alone."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config(config)
    return {name: tuple(module.weight.shape) for name, module in transformer.named_modules()
            if isinstance(module, torch.nn.Linear)}


def check_adapters(tensors, shapes):
    """UserError unless each layer's lora_A (r, in) and lora_B (out, r) are there, fit it, and are finite.

    The server would skip an unknown name, drop an A without its B, and break at a wrong shape.
    """
    layers = {name.rsplit(".lora_", 1)[0] for name in tensors}
    if unknown := sorted(layers - shapes.keys()):
        raise UserError(f"LoRA for the server: no linear layer {unknown[0]} in the model")
    if embedders := sorted(layer for layer in layers if "embedder" in layer):
        raise UserError(f"LoRA for the server: SGLang adapts no embedder such as {embedders[0]}: leave it out of "
                        "lora_targets")
    for layer in sorted(layers):
        a, b = (tensors.get(f"{layer}.lora_{side}.weight") for side in "AB")
        if a is None or b is None:
            raise UserError(f"LoRA for the server: {layer} has no lora_{'A' if a is None else 'B'}")
        rows, columns = shapes[layer]
        if a.ndim != 2 or a.shape[1] != columns or tuple(b.shape) != (rows, len(a)):
            raise UserError(f"LoRA for the server: {layer} has A {tuple(a.shape)} and B {tuple(b.shape)}, "
                            f"want (r, {columns}) and ({rows}, r)")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise UserError(f"LoRA for the server: {layer} has NaN or infinity")


class SGLangClient:
    """A rank's view of the servers: requests in flight, retries, checks of every answer, and the LoRA sync.

    urls: servers that the user started; each rank asks all of them in turn, and is `responsible` for syncing a share.
    Or url_file, where sglang_server.LaunchedServer says where this node's is; one rank of the node is responsible.
    """

    def __init__(self, wan, latent_shape, sampling, guidance, negative_prompt, device_type, urls=(), url_file="",
                 responsible=None, rank=0, concurrency=4, timeout=300.0, retries=2, colocated=False):
        self.wan, self.latent_shape, self.sampling, self.guidance = wan, latent_shape, sampling, guidance
        self.negative_prompt, self.device_type = negative_prompt, device_type
        self.urls, self.url_file, self.timeout, self.retries = list(urls), url_file, timeout, retries
        self.responsible = responsible  # list of urls, or True for the launched one
        self.colocated = colocated  # on the trainer's GPUs: asleep while it trains
        self.shapes = linear_shapes(wan.config)
        self.down, self.turn, self.lock = {}, rank, threading.Lock()  # url -> why it isn't asked; round robin
        self.latest, self.version = None, 0  # what was synced last, which a restarted server gets first; syncs so far
        self.probe, self.untrained = None, {}  # a request, and url -> its answer before any sync
        self.processes = {}  # url -> which process answered since the last sync
        self.close = lambda: None  # ends a launched server
        self.jobs = queue.SimpleQueue()
        for _ in range(concurrency):
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

    def cancel(self, futures):
        """Those that haven't been sent aren't; answers to the others are dropped."""
        for future in futures:
            future.cancel()

    def _work(self):
        while True:
            future, job = self.jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._retried(job))
                except BaseException as error:
                    future.set_exception(error)
            del future  # its answer is large

    def _retried(self, job):
        failures = 0
        while True:
            url = self._next_url()
            try:
                return self.ask(url, *job)
            except ServerError as error:
                self._after_failure(url, error)
                failures += bool(self.url_file) or not error.gone  # of the user's servers the next one is asked
                if failures > self.retries:
                    raise UserError(f"no rollout after {failures} attempts, the last: {error}: is the server started "
                                    "with this run's --dtype?") from None

    def current_urls(self):
        """Where the servers are now: none while a launched one isn't up. UserError once it has been given up."""
        if not self.url_file:
            return self.urls
        with open(self.url_file) as file:
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
        with self.lock:
            self.turn += 1
            return urls[self.turn % len(urls)]

    def _after_failure(self, url, error):
        """A server of the user's that is gone would come back without the LoRA: it isn't asked until the next sync.

        A launched one is restarted, given the LoRA and published under another URL: wait until that has begun.
        """
        if error.gone and not self.url_file:
            self.down[url] = str(error)
            return
        until = time.time() + self.timeout
        while error.gone and self.current_urls() == [url] and time.time() < until:
            time.sleep(0.5)
        time.sleep(1)

    def ask(self, url, prompt, image, seed, sigmas, window=(), measured=False):
        """One rollout from one server, checked -> Answer."""
        num_steps, asked = len(sigmas) - 1, [*window, window[-1] + 1] if window else [len(sigmas) - 1]
        scales = [self.guidance["guidance_scale"], self.guidance["guidance_scale_2"]]
        body = dict(
            prompt=prompt, negative_prompt=self.negative_prompt if scales[0] != 1 else None, seed=seed,
            generator_device=self.device_type, num_inference_steps=num_steps, guidance_scale=scales[0],
            image_path=[image] if image else None, rollout=True,
            rollout_sde_type=SDE_TYPES[self.sampling["law"]], rollout_noise_level=self.sampling["noise_level"],
            rollout_sde_step_indices=list(window), rollout_return_step_indices=asked,
            rollout_return_dit_trajectory=True, rollout_return_denoising_env=bool(window), rollout_debug_mode=measured,
            suppress_logs=True, **{name: self.sampling[name] for name in ("height", "width", "num_frames")},
            extra_sampling_params={"guidance_scale_2": scales[1], "boundary_ratio": self.wan.boundary_ratio}
            if len(self.wan.expert_names) == 2 else None)
        raw = post(f"{url}/rollout/generate", body, self.timeout)
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
        if latents is None or tuple(latents.shape) != want:
            got = None if latents is None else tuple(latents.shape)
            raise UserError(f"{url}: got latents of {got}, want {want}: is it started with this model and with "
                            "nanoWan's shim (python sglang_server.py)?")
        grid = tensor_in(answer, "dit_trajectory", "sigmas")
        if grid.shape != sigmas.shape or (grid - sigmas).abs().max() > 1e-5:
            raise UserError(f"{url}: its noise levels are {[round(s, 4) for s in grid.tolist()]}, want "
                            f"{[round(s, 4) for s in sigmas.tolist()]}: start it with this run's --shift")
        pixels = tensor_in(answer, "generated_output")  # 3 f h w
        height, width, num_frames = (self.sampling[name] for name in ("height", "width", "num_frames"))
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
        velocity = tensor_in(answer, "rollout_debug_tensors", "rollout_model_outputs") if measured else None
        if measured and velocity is None:
            raise UserError(f"{url}: asked for its velocities, got none: want sglang {WRITTEN_FOR}")
        return Answer(latents.float(), pixels.transpose(0, 1), condition,
                      tensor_in(env, "pos_cond_kwargs", "encoder_hidden_states"), negative,
                      velocity.float() if velocity is not None else None, answer["inference_time_s"] or 0)

    def collect(self, videos, futures, window, sigmas):
        """The answers of some videos -> a rollout.Record without rewards, its pixels b f 3 h w, seconds in the server.

        Transitions have the mean and log-prob of the server's own velocity where it was measured, else None.
        UserError where a video couldn't be had.
        """
        answers = [future.result() for future in futures]
        stack = lambda name: torch.stack([getattr(a, name) for a in answers])  # noqa: E731
        condition = stack("condition") if answers[0].condition is not None else None
        latents = stack("latents")  # b k c f h w
        grid, transitions = sigmas.tolist(), []
        for i, step in enumerate(window):
            x, following, mean, log_density = latents[:, i], latents[:, i + 1], None, None
            if answers[0].velocity is not None:
                velocity = torch.stack([a.velocity[step] for a in answers])
                law, noise_level = self.sampling["law"], self.sampling["noise_level"]
                mean, std = rollout.transition(law, x, velocity, grid[step], grid[step + 1], grid[1], noise_level)
                gen_mask = wan_model.generated_mask(self.wan, x, condition)
                log_density = rollout.log_prob(law, following, mean, std, gen_mask)
            transitions.append(rollout.Transition(step, x, following, mean, log_density))
        negative = answers[0].negative_text
        record = rollout.Record(videos, condition, stack("text"), negative[None] if negative is not None else None,
                                transitions, {})
        return record, stack("pixels").float() / 255, sum(a.seconds for a in answers)

    # ------------------------------------------------------------------------- LoRA, memory, checks

    def sync(self, adapters, rank, alpha, dtype, how, folder):
        """Give the servers this rank is responsible for the whole LoRA of each expert; it replaces the last one.

        adapters: {"high": {"blocks.0.attn1.to_q.lora_A.weight": tensor}, ...}: the names that the server wants too, and
        model.FOLDERS names its target module; dtype: in which they are sent, that of the server's transformer.
        how "tensor": inside the request, to any machine; "disk": by a file in a fresh folder under `folder`, which the
        server must see. A server of the user's that fails is left alone until the next sync.
        """
        for tensors in adapters.values():
            check_adapters(tensors, self.shapes)
        self.latest = adapters, rank, alpha, dtype, how, folder
        self._at_each(self.send)

    def synced(self):
        """On all ranks, once all servers have been given the LoRA."""
        self.version += 1
        self.processes.clear()

    def _at_each(self, action):
        """action(url) for the servers this rank is responsible for: again after a failure, a launched one waited for.

        A server of the user's that goes on failing is left alone until the next sync.
        """
        for place in [None] if self.responsible is True else self.responsible:
            for attempt in range(self.retries + 1):
                url = place or self._next_url()
                try:
                    action(url)
                    self.down.pop(url, None)
                    break
                except ServerError as error:
                    if place and (error.gone or attempt == self.retries):
                        self.down[url] = str(error)
                        break
                    if attempt == self.retries:
                        raise UserError(f"{attempt + 1} attempts failed, the last: {error}") from None
                    self._after_failure(url, error)

    def send(self, url):
        """The latest LoRA to one server, and what it says it did compared with what was sent."""
        adapters, rank, alpha, dtype, how, folder = self.latest
        for expert, tensors in adapters.items():
            target, layers = wan_model.FOLDERS[expert], len(tensors) // 2  # "transformer" | "transformer_2"
            tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
            if how == "disk":
                path = os.path.abspath(os.path.join(folder, f"lora_{expert}_{time.time_ns()}"))  # never read twice
                body = dict(lora_nickname=expert, lora_path=path, target=target, lora_alpha=int(alpha),
                            merge_mode="dynamic")
                try:
                    os.mkdir(path)
                    save_file(tensors, os.path.join(path, "lora.safetensors"))
                    post(f"{url}/v1/set_lora", body, self.timeout)
                except (OSError, SafetensorError) as error:
                    raise UserError(f"lora_sync_dir={folder}: {error}: want a folder with room for the LoRA, or "
                                    "lora_sync=tensor") from None
                finally:
                    shutil.rmtree(path, ignore_errors=True)
            else:
                payload = base64.b64encode(pickle.dumps(list(tensors.items()), protocol=4)).decode()
                body = dict(serialized_named_tensors=[payload], weight_update_mode="lora_merge",
                            target_modules=[target], lora_alpha=alpha, lora_rank=rank)
                message = json.loads(post(f"{url}/update_weights_from_tensor", body, self.timeout))["message"]
                if f"Updated {layers} LoRA layers" not in message or "skipped 0 " not in message:
                    raise UserError(f"{url}: sent a LoRA of {layers} layers, it says: {message}")
        nonzero = any(tensor.any() for tensors in adapters.values() for name, tensor in tensors.items()
                      if ".lora_B." in name)
        before = self.untrained.pop(url, None) if nonzero else None  # the first LoRA that can be seen
        if before is not None and torch.equal(self.ask(url, *self.probe).latents, before):
            raise UserError(f"{url}: a LoRA was synced and the same rollout didn't change: want it started by "
                            "python sglang_server.py (--lora-merge-mode dynamic)")

    def memory(self, wanted):
        """wanted "release" | "resume": the GPU memory of the servers this rank is responsible for."""
        self._at_each(lambda url: post(f"{url}/{wanted}_memory_occupation", {}, self.timeout))
        if self.down:
            raise UserError(f"sglang_colocated=True: couldn't {wanted} memory: {'; '.join(self.down.values())}")

    def check(self, url, prompt, image):
        """The server is there, with this model and this version's answers: a whole rollout. UserError, one line."""
        try:
            with sglang_server.HTTP.open(f"{url}/server_info", timeout=30) as answer:
                info = json.load(answer)
            served, ours = info["model_path"], self.wan.model
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{url}: no SGLang server there ({getattr(error, 'reason', error)}): start one with "
                            "python sglang_server.py, or set sglang_launch=True") from None
        if info.get("version") != WRITTEN_FOR:
            print(f"{url} runs sglang {info.get('version')}; this client was written for {WRITTEN_FOR}", flush=True)
        here = os.path.isdir(served) and os.path.isdir(ours)  # else on another machine, or a hub id
        if (os.path.realpath(served) != os.path.realpath(ours) if here else
                os.path.basename(served.rstrip("/")) != os.path.basename(ours.rstrip("/"))):
            raise UserError(f"{url}: serves {served}, want {ours}: start it with this run's --model")
        self.probe = prompt, image, 0, self.sampling["sigmas"]
        try:
            if self.colocated:
                post(f"{url}/resume_memory_occupation", {}, self.timeout)  # the run before may have left it asleep
            post(f"{url}/v1/unmerge_lora_weights", {}, self.timeout)  # of that run
            self.untrained[url] = self.ask(url, *self.probe).latents
            if self.latest:  # started anew in the middle of a run
                self.send(url)
        except ServerError as error:
            raise UserError(str(error)) from None
