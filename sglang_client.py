"""What is asked of SGLang diffusion servers over HTTP and what they answer; who of them is there.

Written for sglang 0.5.23 with shim/nanowan_shim.py (sglang_server.py starts it so). Per video one request; the answer
holds the latents of the window's steps, the text embeddings and the given frame's latents, so that the trainer encodes
nothing and decodes nothing. Its log-probabilities average over given positions too: the trainer computes its own.
"""

import base64
import http.client
import io
import json
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
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save_file

import model as wan_model
import sglang_server
from adapters import check_layers, linear_shapes
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
        self.latest = None  # what was synced last, which a restarted server gets first
        self.probe, self.untrained = None, {}  # a request, and url -> its answer before any sync
        self.processes = {}  # url -> which process answered since the last sync
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

    # ------------------------------------------------------------------------- LoRA, memory, checks

    def sync(self, adapters, rank, alpha, dtype, how, folder):
        """Give the servers this rank is responsible for the whole LoRA of each expert; it replaces the last one.

        adapters: {"high": {"blocks.0.attn1.to_q.lora_A.weight": tensor}, ...}: the names that the server wants too, and
        model.FOLDERS names its target module; dtype: in which they are sent, that of the server's transformer.
        how "tensor": inside the request, to any machine; "disk": by a file in a fresh folder under `folder`, which the
        server must see. A server of the user's that fails is left alone until the next sync.
        """
        for tensors in adapters.values():
            check_layers(tensors, self.shapes)
        self.latest = adapters, rank, alpha, dtype, how, folder
        self._at_each(self.send)

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
