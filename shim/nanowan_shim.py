"""What SGLang's diffusion server lacks for rollouts of Wan; written for sglang 0.5.23.

sglang imports this module in each of its processes when SGLANG_EXTERNAL_MODEL_PACKAGE=nanowan_shim and this folder is
on PYTHONPATH (its documented hook; `python sglang_server.py` sets both). It runs in the server's own environment and
imports nothing of nanoWan. On another version each patch that no longer fits says so in the server's log.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.nn.functional as F
from nanowan_lease import Lease
from torch import Tensor

WRITTEN_FOR = "0.5.23"
LAUNCHER = os.environ.get("NANOWAN_LAUNCHER", "")  # process that started this server, and when
LEASE = Lease()


def add_cpu_operations():
    """The two fused operations of Wan's adaptive layer norms that sglang's CPU path calls and PyPI's wheel lacks."""
    if hasattr(torch.ops.sgl_kernel, "fused_norm_scale_shift_cpu"):
        return

    def normed(x, weight, bias, scale, shift, eps):
        weight, bias = (None if p is None else p.float() for p in (weight, bias))
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps) * (1 + scale.float()) + shift.float()

    @torch.library.custom_op("sgl_kernel::fused_norm_scale_shift_cpu", mutates_args=())
    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, norm_type: str,
             eps: float) -> Tensor:  # norm_type: "layer" in Wan
        return normed(x, weight, bias, scale, shift, eps).to(x.dtype)

    @torch.library.custom_op("sgl_kernel::fused_scale_residual_norm_scale_shift_cpu", mutates_args=())
    def residual_norm(residual: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
                      scale: Tensor, shift: Tensor, norm_type: str, eps: float) -> tuple[Tensor, Tensor]:
        summed = residual.float() + (x.float() if gate is None else x.float() * gate.float())
        return normed(summed, weight, bias, scale, shift, eps).to(x.dtype), summed.to(x.dtype)


def keep_image_size():
    """TI2V videos get the size of the given image where that is possible, instead of always 704 x 1280 pixels."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages import input_validation

    best_output_size = input_validation._best_output_size

    def image_size(width, height, multiple_w, multiple_h, area):
        if width % multiple_w == 0 and height % multiple_h == 0:
            return width, height
        return best_output_size(width, height, multiple_w, multiple_h, area)

    input_validation._best_output_size = image_size


def return_image_latents():
    """I2V: the mask and condition latents (20 channels) join image_kwargs in the answer, so that they can be replayed.

    They're the `condition` of a 36-channel input; for TI2V the first latent frame of the trajectory is the condition.
    """
    from sglang.multimodal_gen.runtime.pipelines_core.stages import denoising

    init_rollout_env = denoising.init_rollout_env_if_enabled

    def init_with_image_latents(*, batch, image_kwargs, **kwargs):
        if batch.image_latent is not None:
            image_kwargs = {**image_kwargs, "image_latent": batch.image_latent}
        init_rollout_env(batch=batch, image_kwargs=image_kwargs, **kwargs)

    denoising.init_rollout_env_if_enabled = init_with_image_latents


def keep_timesteps():
    """TI2V's timesteps stay float32; sglang rounds them to bf16 with the latents, 874.3 to 876, another noise level."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages import denoising

    expand = denoising.expand_wan_ti2v_timestep

    def expand_in_float32(batch, t_device, target_dtype, seq_len, mask, *args):
        return expand(batch, t_device, torch.float32, seq_len, None if mask is None else mask.float(), *args)

    denoising.expand_wan_ti2v_timestep = expand_in_float32


def answer_with_bytes():
    """Videos travel as 8-bit numbers, as a file would hold them: 59 MB instead of 235 MB for 49 x 480 x 832.

    Each answer's request_id begins with the run that has the server and the LoRA that it holds.
    """
    from sglang.multimodal_gen.runtime.entrypoints.post_training import rollout_api

    build_response = rollout_api._build_response

    def build_with_bytes(request_id, prompt, seed, rollout, result):
        if result.output.is_floating_point():
            result.output = (result.output.clamp(0, 1) * 255).round().to(torch.uint8)
        return build_response(f"{LEASE.tag()}/{request_id}", prompt, seed, rollout, result)

    rollout_api._build_response = build_with_bytes


def serve_one_run():
    """/nanowan says who started this server and is told who has it; meanwhile others' POSTs are refused."""
    from fastapi import Response
    from sglang.multimodal_gen.runtime import launch_server

    create_app = launch_server.create_app

    def create_app_of_one_run(*args, **kwargs):
        app = create_app(*args, **kwargs)

        @app.middleware("http")
        async def check(request, call_next):
            is_post, is_ours = request.method == "POST", request.url.path == "/nanowan"
            refusal = ""
            if is_post:
                refusal = LEASE.told(await request.json()) if is_ours else LEASE.refusal(request.headers.get("run", ""))
            if refusal or is_ours:
                return Response(refusal or LAUNCHER, 409 if refusal else 200)
            return await call_next(request)

        return app

    launch_server.create_app = create_app_of_one_run


def keep_adapters_on_device():
    """LoRA tensors that arrive over HTTP move to the GPU once, instead of again in every forward."""
    from sglang.multimodal_gen.runtime.layers.lora.linear import BaseLayerWithLoRA

    set_lora_weights = BaseLayerWithLoRA.set_lora_weights

    def set_on_device(self, A, B, *args, **kwargs):
        device = self.base_layer.weight.device
        set_lora_weights(self, A.to(device), B.to(device), *args, **kwargs)

    BaseLayerWithLoRA.set_lora_weights = set_on_device


def end_with_launcher():
    """A server that a run started ends when that run is gone, however it went."""

    def watch():
        while os.path.exists(f"/proc/{LAUNCHER.partition('-')[0]}"):
            time.sleep(2)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    if LAUNCHER:
        threading.Thread(target=watch, daemon=True).start()


for patch in (add_cpu_operations, keep_image_size, return_image_latents, keep_timesteps, answer_with_bytes,
              serve_one_run, keep_adapters_on_device, end_with_launcher):
    try:
        patch()
    except (ImportError, AttributeError) as error:
        import sglang

        print(f"nanowan_shim: sglang {sglang.__version__} (written for {WRITTEN_FOR}): couldn't {patch.__name__}: "
              f"{error}", file=sys.stderr, flush=True)
