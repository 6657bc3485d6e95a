"""sglang_client.py, sglang_server.py, shim/ and train_grpo.py --rollout=sglang.

Tests marked `sglang` run a REAL server on the CPU (`make sglang` installs it; without it they are skipped); the others
talk to a small HTTP server that answers as one would, or wrongly.
"""

import base64
import io
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import adapters as adapters_room
import encoders
import flow
import model as wan_model
import prompts
import rollout
import sampler
import sglang_client
import sglang_sampler
import sglang_server
import tiny
from guard import UserError
from helpers import (
    ENVIRONMENT,
    REPOSITORY,
    flags,
    free_ports,
    held_by_another,
    load,
    path_of,
    refusal,
    rows_of,
    script,
    smooth_adamw,
)

sys.path.append(str(REPOSITORY / "shim"))
from nanowan_lease import Lease  # noqa: E402

SGLANG = REPOSITORY / ".venv-sglang/bin/sglang"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZE = dict(height=64, width=96, num_frames=9)
QUICK = SIZE | dict(max_text_tokens=512, rewards="smoothness:1.0", eval_rewards="", prompts_per_iteration=2,
                    group_size=2, rollout_batch=2, num_steps=5, num_eval_steps=3, num_eval_samples=2, num_eval_videos=0,
                    max_iterations=3, eval_interval=0, save_interval=0, lora_rank=4, lora_alpha=8, lr=1e-2,
                    negative_prompt="dark", guidance_scale=3.0, guidance_scale_2=2.0)


def real(test):
    """A test of a real server."""
    reason = "no .venv-sglang: make sglang installs it"
    return pytest.mark.sglang(pytest.mark.skipif(not SGLANG.exists(), reason=reason)(test))


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr("plot.draw_curves", lambda out_dir: None)


@pytest.fixture(autouse=True)
def clients(monkeypatch):
    """Those of a test, which let the servers go at its end, as a run does however it ends."""
    made, init = [], sglang_client.SGLangClient.__init__
    monkeypatch.setattr(sglang_client.SGLangClient, "__init__",
                        lambda self, *args: made.append(self) or init(self, *args))
    yield made
    for client in made:
        client.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Prompts, and random ti2v and i2v models of two layers with the convolutional VAEs that the server knows."""
    folder = tmp_path_factory.mktemp("sglang")
    tiny.make_prompts(folder)
    tokenizer, text_encoder = tiny.make_text_encoder()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(num_layers=2, num_attention_heads=2, ffn_dim=128).items():
            patch.setitem(tiny.TRANSFORMER, name, value)
        for kind in ("ti2v", "i2v"):
            tiny.make_checkpoint(folder / kind, kind, tiny.make_conv_vae(kind), tokenizer, text_encoder, seed=1)
    return folder


def paths(world, kind="ti2v"):
    return dict(model=str(world / kind), data_jsonl=str(world / "train.jsonl"),
                eval_data_jsonl=str(world / "eval.jsonl"))


def make_client(
    world, kind="ti2v", guidance_scale=1.0, guidance_scale_2=1.0, law="flow", urls=(), rank=0, world_size=1, run="a",
    **more,
):
    """A client and the training prompts; more: its settings."""
    wan = wan_model.describe(str(world / kind))
    shape = (48, 3, 4, 6) if kind == "ti2v" else (16, 3, 8, 12)
    guidance = dict(guidance_scale=guidance_scale, guidance_scale_2=guidance_scale_2)
    config = SIZE | dict(law=law, noise_level=0.7, num_steps=4, shift=5.0, negative_prompt="dark", lora_rank=4,
                         lora_alpha=8.0, lora_sync="tensor", lora_sync_dir="", sglang_urls=",".join(urls),
                         sglang_concurrency=4, sglang_timeout=60.0, sglang_retries=2, sglang_colocated=False,
                         out_dir=f"out_{run}") | more
    client = sglang_client.SGLangClient(config, wan, shape, guidance, "cpu", run, rank, world_size)
    for url in client.urls:
        client.tell(url, lora=0)  # as check() does
    return client, prompts.Prompts(world / "train.jsonl", SIZE["height"], SIZE["width"])


def random_adapters(wan, seed, scale=0.3):
    """{"high": {"blocks.0.attn1.to_q.lora_A.weight": tensor}} of rank 4 for all attention and feed-forward linears."""
    generator = torch.Generator().manual_seed(seed)
    adapters = {}
    for expert in wan.expert_names:
        adapters[expert] = {}
        for name, (rows, columns) in adapters_room.linear_shapes(wan.config).items():
            if name.startswith("blocks."):
                for side, size in (("A", (4, columns)), ("B", (rows, 4))):
                    tensor = scale * torch.randn(size, generator=generator)
                    adapters[expert][f"{name}.lora_{side}.weight"] = tensor
    return adapters


# ----------------------------------------------------------------------------- what is sent


def test_adapters_that_a_server_would_take_wrongly_are_refused(world):
    wan = wan_model.describe(str(world / "ti2v"))
    shapes = adapters_room.linear_shapes(wan.config)
    whole = random_adapters(wan, 0)["single"]
    assert len(whole) == 2 * 2 * 10 and shapes["blocks.1.ffn.net.0.proj"] == (128, 64)
    adapters_room.check_layers(whole, shapes)
    a, b = "blocks.1.attn2.to_k.lora_A.weight", "blocks.1.attn2.to_k.lora_B.weight"
    for change, words in [
        ({"blocks.2.attn1.to_q.lora_A.weight": torch.zeros(4, 64)}, "no linear layer blocks.2.attn1.to_q in the model"),
        ({a: torch.zeros(4, 60)}, r"blocks.1.attn2.to_k has A \(4, 60\) and B \(64, 4\), want \(r, 64\) and \(64, r\)"),
        ({b: torch.zeros(1, 4)}, r"blocks.1.attn2.to_k has A \(4, 64\) and B \(1, 4\)"),  # it would broadcast
        ({b: torch.full((64, 4), torch.nan)}, "blocks.1.attn2.to_k has NaN"),
        ({"condition_embedder.time_proj.lora_A.weight": torch.zeros(4, 64)}, "SGLang adapts no embedder such as cond"),
    ]:
        with pytest.raises(UserError, match=words):
            adapters_room.check_layers(whole | change, shapes)
    for name, side in ((a, "A"), (b, "B")):
        with pytest.raises(UserError, match=f"blocks.1.attn2.to_k has no lora_{side}"):
            adapters_room.check_layers({n: t for n, t in whole.items() if n != name}, shapes)


def test_the_given_image_travels_in_the_request_at_the_runs_size(world):
    lines = prompts.Prompts(world / "train.jsonl", 64, 96)
    url = sglang_client.png_url(lines, 3)
    image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
    assert torch.equal(pixels, lines.image(3))
    assert sglang_client.png_url(prompts.Prompts(world / "train.jsonl", 64, 96, needs_image=False), 3) == ""


class FakeServer(BaseHTTPRequestHandler):
    """Answers as a server of the ti2v model does, changed by `server.change`; `server.broken` answers come first."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(200, json.dumps(self.server.info).encode())

    def do_POST(self):
        body, lease = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server.lease
        refusal = lease.told(body) if self.path == "/nanowan" else lease.refusal(self.headers["run"])
        if refusal or self.path == "/nanowan":  # as in shim/nanowan_shim.py
            return self.answer(409 if refusal else 200, refusal.encode())
        self.server.bodies.append((self.path, body))
        if self.server.broken:
            code = self.server.broken.pop(0)
            if code is None:  # its process dies
                self.server.shutdown_request(self.request)
                return
            self.answer(code, b'{"detail": "no luck"}')
        elif self.path in ("/v1/unmerge_lora_weights", "/v1/set_lora") or "memory" in self.path:
            self.answer(200, b"{}")
        elif self.path == "/update_weights_from_tensor":
            self.answer(200, json.dumps({"success": True, "message": self.server.message}).encode())
        else:
            self.answer(200, msgpack.packb([self.rollout(body)]))

    def rollout(self, body):
        generator = torch.Generator().manual_seed(body["seed"])
        latents = torch.randn(len(body["rollout_return_step_indices"]), 48, 3, 4, 6, generator=generator)
        latents[:, :, 0] = 1.0
        sigmas = flow.sigma_grid(body["num_inference_steps"], 5.0)
        text, guided = torch.ones(512, 64), body["negative_prompt"] is not None
        made = dict(
            request_id=f"{self.server.lease.tag()}/{len(self.server.bodies)}",
            generated_output=torch.full((3, 9, 64, 96), 51, dtype=torch.uint8),
            dit_trajectory=dict(latents=latents, sigmas=sigmas),
            denoising_env=dict(image_kwargs={}, pos_cond_kwargs=dict(encoder_hidden_states=text),
                               neg_cond_kwargs=dict(encoder_hidden_states=-text) if guided else None),
            rollout_debug_tensors=None, inference_time_s=0.5)
        return self.packed(self.server.change(made) or made)

    def packed(self, node):
        if isinstance(node, torch.Tensor):
            data = safetensors.torch.save({"t": node.contiguous()})
            return {"__tensor__": True, "data": data, "shape": list(node.shape), "dtype": str(node.dtype)}
        return {key: self.packed(value) for key, value in node.items()} if isinstance(node, dict) else node

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fakes(world):
    """Two fake servers of the ti2v model."""
    servers = []
    for _ in range(2):
        server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
        server.bodies, server.broken, server.change, server.message = [], [], lambda made: None, ""
        server.lease = Lease()
        server.info = {"version": "0.5.23", "model_path": str(world / "ti2v")}
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_is_asked_and_what_comes_back(world, fakes):
    client, lines = make_client(world, guidance_scale=3.0, guidance_scale_2=3.0, urls=[fakes[0].url])
    sigmas = flow.sigma_grid(4, 5.0)
    asked = [client.submit(lines, 5, flow.seed_of(0, 1, n), sigmas, window=[1, 2]) for n in range(6)]
    answers = [future.result() for future in asked]
    record, pixels = sglang_sampler.record_of(client.wan, client.config, sigmas, range(6, 12), answers, [1, 2])
    bodies = sorted((body for _, body in fakes[0].bodies), key=lambda body: body["seed"])
    assert [body["seed"] for body in bodies] == sorted(flow.seed_of(0, 1, n) for n in range(6))
    for body in bodies:
        assert body["prompt"] == lines.prompts[5] and body["image_path"] == [sglang_client.png_url(lines, 5)]
        assert body["rollout_sde_step_indices"] == [1, 2] and body["rollout_return_step_indices"] == [1, 2, 3]
        assert not body["rollout_debug_mode"] and body["negative_prompt"] == "dark" and body["guidance_scale"] == 3
    assert record.positions == range(6, 12) and pixels.shape == (6, 9, 3, 64, 96)
    assert pixels.unique().tolist() == [pytest.approx(0.2)]
    assert answers[0].pixels.dtype == torch.uint8  # until they're wanted
    assert sum(answer.seconds for answer in answers) == 3.0
    assert [t.index for t in record.steps] == [1, 2] and record.steps[0].log_prob is None
    for n in range(6):  # in the order of the videos, whichever answer came first
        drawn = torch.randn(3, 48, 3, 4, 6, generator=torch.Generator().manual_seed(flow.seed_of(0, 1, n)))
        for t, k in zip(record.steps, (0, 1), strict=True):
            assert torch.equal(t.latents[n, :, 1:], drawn[k, :, 1:])
            assert torch.equal(t.next_latents[n, :, 1:], drawn[k + 1, :, 1:])
    assert record.condition.shape == (6, 48, 1, 4, 6) and record.condition.unique().tolist() == [1]
    assert record.text.shape == (6, 512, 64) and record.negative_text.unique().tolist() == [-1]


def changed(*path, to):
    """A change of a fake answer: the tensor at `path` becomes to(tensor)."""

    def change(made):
        *parents, last = path
        for key in parents:
            made = made[key]
        made[last] = to(made[last])

    return change


@pytest.mark.parametrize(("change", "words"), [
    (changed("dit_trajectory", "latents", to=lambda x: x[:, :, :2]),
     r"got latents of \(2, 48, 2, 4, 6\), want \(2, 48, 3, 4, 6\)"),
    (changed("dit_trajectory", "sigmas", to=lambda x: x**2), "^http[^ ]*: its noise levels are .*: start it with"),
    (changed("generated_output", to=lambda x: x[:, :8]), r"got a video of \(3, 8, 64, 96\), want \(3, 9, 64, 96\)"),
    (changed("dit_trajectory", "latents", to=lambda x: x + torch.arange(2.0).view(2, 1, 1, 1, 1)),
     "the given frame changed in the rollout"),
    (changed("denoising_env", "neg_cond_kwargs", to=lambda x: {"encoder_hidden_states": torch.zeros(512, 64)}),
     "guidance was on, want the opposite"),
    (lambda made: {"nothing": 1}, "can't read its answer .*: want sglang 0.5.23"),
    (lambda made: made | {"dit_trajectory": {}}, "got latents of None"),
    (lambda made: made | {"dit_trajectory": {"latents": made["dit_trajectory"]["latents"]}},
     "can't read its answer .*: want sglang 0.5.23"),
])
def test_answers_to_another_question_are_refused(world, fakes, change, words):
    client, lines = make_client(world, urls=[fakes[0].url])
    fakes[0].change = change
    with pytest.raises(UserError, match=words):
        sigmas = flow.sigma_grid(4, 5.0)
        client.submit(lines, 0, 0, sigmas, window=[1]).result()


def test_failures_are_retried_elsewhere_and_bounded(world, fakes):
    sigmas, urls = flow.sigma_grid(4, 5.0), [server.url for server in fakes]
    client, lines = make_client(world, urls=urls, sglang_concurrency=1)
    fakes[0].broken = [500]  # says so and lives on
    fakes[1].broken = [500]
    [client.submit(lines, 0, n, sigmas).result() for n in range(2)]
    assert not client.down and sum(len(server.bodies) for server in fakes) == 4
    fakes[0].broken = [None] * 9  # gone: it isn't asked again before the next sync
    [client.submit(lines, 0, n, sigmas).result() for n in range(4)]
    assert list(client.down) == [urls[0]] and len(fakes[0].broken) == 8
    fakes[1].broken = [None] * 9
    with pytest.raises(UserError, match="no SGLang server left: http.*; http"):
        client.submit(lines, 0, 0, sigmas).result()

    client, _ = make_client(world, urls=urls, sglang_retries=0, sglang_concurrency=1)
    fakes[0].broken, fakes[1].broken = [None], []
    [client.submit(lines, 0, n, sigmas).result() for n in range(2)]  # asking the next one is no retry
    fakes[1].lease = Lease()  # it came back by itself, without the LoRA
    words = "no SGLang server left: .*; .* was started anew, .* by the LoRA :None, want a:0"
    with pytest.raises(UserError, match=words):
        client.submit(lines, 0, 0, sigmas).result()
    client, _ = make_client(world, urls=urls[:1], sglang_retries=2)
    fakes[0].broken = [503] * 3
    with pytest.raises(UserError, match="no rollout after 3 attempts, the last: .* answered 503: .*no luck"):
        client.submit(lines, 0, 0, sigmas).result()
    fakes[0].broken = [400] * 3  # our request is wrong: asking again is no use
    with pytest.raises(UserError, match="answered 400"):
        client.submit(lines, 0, 0, sigmas).result()
    assert len(fakes[0].broken) == 2


def test_sync_counts_what_was_applied_and_leaves_failed_servers_out(world, fakes, tmp_path):
    urls = [server.url for server in fakes]
    client, lines = make_client(world, urls=urls)
    adapters = random_adapters(client.wan, 0)
    for server in fakes:
        server.message = "Updated 20 LoRA layers in transformer from IPC tensors (skipped 0 unknown layers)."
    client.wan.dtype = torch.bfloat16
    client.sync(adapters)
    for server in fakes:
        path, body = server.bodies[-1]
        (payload,) = body.pop("serialized_named_tensors")
        assert path == "/update_weights_from_tensor" and body == dict(
            weight_update_mode="lora_merge", target_modules=["transformer"], lora_alpha=8.0, lora_rank=4
        )
        sent = dict(pickle.loads(base64.b64decode(payload)))  # what we wrote ourselves
        assert sent.keys() == adapters["single"].keys()
        assert all(torch.equal(tensor, adapters["single"][name].bfloat16()) for name, tensor in sent.items())
    fakes[1].broken = [None] * 9
    client.sync(adapters)
    assert list(client.down) == urls[1:]
    fakes[1].broken = []
    client.sync(adapters)  # it's back, and has the LoRA again
    assert not client.down
    for said in (
        "Updated 19 LoRA layers (skipped 1 unknown layers).",
        "Updated 20 LoRA layers (skipped 2",
    ):
        fakes[0].message = said
        with pytest.raises(UserError, match="sent a LoRA of 20 layers, it says: Updated"):
            client.sync(adapters)


def test_a_server_is_one_runs_at_a_time(world, fakes, monkeypatch):
    """Another is refused by name; what a killed run leaves passes by itself, and it is never served again unnoticed."""
    monkeypatch.setattr(sglang_client, "LEASE", 1.0)
    url, sigmas = fakes[0].url, flow.sigma_grid(4, 5.0)
    first, lines = make_client(world)
    first.check(url, lines, sigmas)
    second, _ = make_client(world, run="b")
    name = re.escape(f"out_dir={os.path.abspath('out_a')} on {socket.gethostname()} since ")
    with pytest.raises(UserError, match=f"{url}/nanowan answered 409: in use by {name}.*: want a server of python sg"):
        second.check(url, lines, sigmas)  # the first kept it for longer than a lease
    with pytest.raises(UserError, match="answered 409: in use by out_dir=.*out_a"):
        sglang_server.request(f"{url}/v1/set_lora", {})  # somebody's, of no run
    assert [path for path, _ in fakes[0].bodies] == ["/v1/unmerge_lora_weights", "/rollout/generate"]

    first.over.set()  # killed: it says nothing any more
    second.check(url, lines, sigmas)
    assert fakes[0].lease.tag() == "b:0"
    first.urls = second.urls = [url]
    with pytest.raises(UserError, match="answered 409: in use by out_dir=.*out_b"):
        first.submit(lines, 0, 0, sigmas).result()
    second.submit(lines, 0, 0, sigmas).result()
    second.close()
    first.close()  # which isn't its any more: it takes it from nobody
    third, _ = make_client(world, run="c")
    started = time.time()
    third.check(url, lines, sigmas)
    assert time.time() - started < 0.5 and fakes[0].lease.tag() == "c:0"


@pytest.mark.parametrize("how", ["tensor", "disk"])
def test_each_answer_is_of_the_lora_that_was_synced_last(world, fakes, tmp_path, how):
    urls, sigmas = [server.url for server in fakes], flow.sigma_grid(4, 5.0)
    settings = dict(lora_sync=how, lora_sync_dir=str(tmp_path), sglang_retries=0, sglang_concurrency=1)
    ranks = [make_client(world, urls=urls, rank=rank, world_size=2, **settings)[0] for rank in (0, 1)]
    _, lines = make_client(world)
    for server in fakes:
        server.message = "Updated 20 LoRA layers in transformer from IPC tensors (skipped 0 unknown layers)."
    for seed in (1, 2):
        for client in ranks:
            client.sync(random_adapters(client.wan, seed) if seed == 1 or client is ranks[0] else {})
    assert [server.lease.tag() for server in fakes] == ["a:2", "a:2"]
    fakes[1].lease.lora = 1  # the last sync passed it by
    client = ranks[0]
    for n in range(4):
        client.submit(lines, 0, n, sigmas).result()
    assert client.down.keys() == {urls[1]} and "it made a video by the LoRA a:1, want a:2" in client.down[urls[1]]
    fakes[0].broken = [400]
    with pytest.raises(UserError, match="answered 400"):
        client.sync(random_adapters(client.wan, 3))
    assert fakes[0].lease.tag() == "a:None"  # a sync that failed half way is no version


def test_memory_is_released_by_the_responsible_rank(world, fakes):
    urls = [server.url for server in fakes]
    client, _ = make_client(world, urls=urls, rank=1, world_size=2, sglang_retries=0)
    client.memory("release")
    client.memory("resume")
    assert not fakes[0].bodies
    assert fakes[1].bodies == [("/release_memory_occupation", {}), ("/resume_memory_occupation", {})]
    fakes[1].broken = [500]  # as on a CPU
    with pytest.raises(UserError, match="sglang_colocated=True: couldn't release memory: .* answered 500"):
        client.memory("release")


@pytest.mark.parametrize("colocated", [False, True])
def test_a_server_left_asleep_is_woken(world, fakes, colocated):
    client, lines = make_client(world, urls=[fakes[0].url], sglang_colocated=colocated)
    client.check(fakes[0].url, lines, flow.sigma_grid(4, 5.0))
    paths = [path for path, _ in fakes[0].bodies]
    woken = ["/resume_memory_occupation"] if colocated else []
    assert paths == [*woken, "/v1/unmerge_lora_weights", "/rollout/generate"]


def test_a_sync_that_changes_nothing_is_noticed(world, fakes):
    client, lines = make_client(world, urls=[fakes[0].url])
    client.check(fakes[0].url, lines, flow.sigma_grid(4, 5.0))
    fakes[0].message = "Updated 20 LoRA layers in transformer from IPC tensors (skipped 0 unknown layers)."
    untouched = {"single": {name: 0 * tensor if "lora_B" in name else tensor
                            for name, tensor in random_adapters(client.wan, 0)["single"].items()}}
    client.sync(untouched)  # B = 0 is to change nothing
    with pytest.raises(UserError, match="a LoRA was synced and the same rollout didn't change"):
        client.sync(random_adapters(client.wan, 0))


def test_bad_settings_are_one_line_before_anything_starts(world, fakes, tmp_path):
    tiny.make_checkpoint(world / "dct", "ti2v", encoders.AutoencoderDCT(), *tiny.make_text_encoder())
    base = paths(world) | QUICK | dict(rollout="sglang", out_dir=tmp_path / "out")
    here = dict(sglang_urls=fakes[0].url)
    (other,) = free_ports(1)
    fakes[1].info = {"version": "0.5.23", "model_path": "/models/other"}
    for change, words in [
        (dict(), "want either sglang_launch=True or sglang_urls=http://host:port,..., got neither"),
        (here | dict(sglang_launch=True), "sglang_urls=http://host:port,..., got both"),
        (here | dict(lora_sync_dir="/nowhere"), "lora_sync_dir=/nowhere: no such folder"),
        (dict(sglang_urls="127.0.0.1:30000"), "sglang_urls=127.0.0.1:30000: want http://host:port"),
        (dict(sglang_urls="http://a:1,http://b:1, http://a:1/"), "sglang_urls=http://a:1: want http://host:port"),
        (here | dict(model=world / "i2v", boundary_ratio=0.8755), "boundary_ratio=0.8755: SGLang routes by whole"),
        (here | dict(model="random:ti2v-5b:2"), "model=random:ti2v-5b:2: SGLang's servers want a diffusers folder"),
        (here | dict(model=world / "dct"), f"model={world}/dct: its VAE is AutoencoderDCT, SGLang's servers know"),
        (here | dict(lora_rank=0), "lora_rank=0: the servers are given LoRA adapters"),
        (here | dict(law="dance"), "law=dance: SGLang has flow and cps"),
        (here | dict(guidance_scale=1), "guidance_scale=1, guidance_scale_2=2: SGLang has guidance on"),
        (here | dict(max_text_tokens=16), "max_text_tokens=16: SGLang's servers always use 512"),
        (here | dict(lora_sync="mail"), "lora_sync=mail: want tensor or disk"),
        (here | dict(rollout="remote"), "rollout=remote: want local or sglang"),
        (here | dict(sglang_args="--x 'y"), "No closing quotation: want words as a shell takes them"),
        (here | dict(sglang_command=" "), "command is empty: want what starts SGLang"),
        (here | dict(sglang_port=-7), "port=-7: want 1 to 65000"),
        (here | dict(lora_alpha=8.5), "lora_alpha=8.5: lora_sync=disk wants a whole number"),
        (dict(sglang_urls=f"http://127.0.0.1:{other}"), f"http://127.0.0.1:{other}: no SGLang server there"),
        (dict(sglang_urls=fakes[1].url), f"{fakes[1].url}: serves /models/other, want {world}/ti2v: start it with"),
        (dict(sglang_launch=True, sglang_command="/nowhere/sglang serve"), "/nowhere/sglang: No such file"),
        (dict(sglang_launch=True, sglang_command="false"), "the SGLang server ended (code 1): nothing (the rest"),
        (dict(sglang_launch=True, sglang_command='sh -c "sleep 60"', sglang_timeout=2), "up after sglang_timeout=2 s"),
    ]:
        assert words in refusal("train_grpo.py", **base | change)
    fakes[0].broken = [500]
    assert f"{fakes[0].url}/v1/unmerge_lora_weights answered 500" in refusal("train_grpo.py", **base | here)
    fakes[1].info = ["another service"]  # on this port
    assert f"{fakes[1].url}: no SGLang server there" in refusal("train_grpo.py", **base, sglang_urls=fakes[1].url)
    assert not (tmp_path / "out/config.json").exists() and not (tmp_path / "out/ckpt").exists()
    assert "model is empty" in subprocess.run([sys.executable, REPOSITORY / "sglang_server.py"], env=ENVIRONMENT,
                                              capture_output=True, text=True, timeout=120).stderr


def test_a_job_submitted_twice_leaves_the_first_ones_servers_alone(world, fakes, tmp_path):
    out, servers = tmp_path / "out", tmp_path / "out/sglang"
    servers.mkdir(parents=True)
    (servers / "node_0.url").write_text(fakes[0].url)  # what the first's ranks read
    with held_by_another(out):
        for where in (dict(sglang_launch=True, sglang_command="false"), dict(sglang_urls=fakes[0].url)):
            line = refusal("train_grpo.py", **paths(world) | QUICK | dict(rollout="sglang", out_dir=out) | where)
            assert f"out_dir={out}: another run is writing there" in line
    assert (servers / "node_0.url").read_text() == fakes[0].url and not fakes[0].bodies
    assert [path.name for path in servers.iterdir()] == ["node_0.url"]


LOSES_ITS_PORT = """
import http.server, os, sys, time
tries = len(open("server.log").readlines())
if tries == 0:
    sys.exit("ERROR: [Errno 98] error while attempting to bind on address: address already in use")
open("nanowan", "w").write(os.environ["NANOWAN_LAUNCHER"] if tries > 1 else "another's")  # who answers there
print("started", file=sys.stderr, flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.SimpleHTTPRequestHandler.log_message = lambda *args: None
http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_a_port_that_is_taken_while_the_server_loads_costs_nothing(world, tmp_path, monkeypatch):
    """It comes up at the next one, without using up a restart; not for ever. Its own is who was started by it, not
    whoever answers at its port."""
    monkeypatch.chdir(tmp_path)
    Path("health").write_text("")
    Path("fake.py").write_text(LOSES_ITS_PORT)

    def launch(program):
        config = dict(model=str(world / "ti2v"), dtype="float32", shift=5.0, sglang_timeout=60.0, sglang_retries=0,
                      sglang_port=29000, sglang_devices="", sglang_command=f"{sys.executable} {program}",
                      sglang_args="")
        return sglang_server.LaunchedServer("server", config, seen.append, lambda: False)

    seen = []
    server = launch("fake.py")
    try:
        assert seen == [server.url] == [Path("server.url").read_text()]
        assert int(server.url.rpartition(":")[2]) >= 29100 and server.restarts == 0
    finally:
        server.end()
    Path("never.py").write_text("import sys; sys.exit('Address already in use')")
    with pytest.raises(UserError, match=r"the SGLang server ended \(code 1\): Address already in use"):
        launch("never.py")
    assert Path("server.log").read_text().count("Address already in use") == 3


def test_a_dead_servers_log_is_quoted_without_colours_and_requests(tmp_path):
    log = tmp_path / "node_0.log"
    server = sglang_server.LaunchedServer.__new__(sglang_server.LaunchedServer)
    server.log_path, server.log_start = str(log), 0
    answered = '[2026-12-01 04:06:42] \033[32mINFO\033[0m:     127.0.0.1:60742 - "\033[1mGET /health HTTP/1.1" 200 OK'
    log.write_text(f"\033[93m[12-01] loading\033[0;0m\n{answered}\n\n")
    assert server.tail() == f"[12-01] loading (the rest is in {log})"
    log.write_text(f"\033[31mValueError: no such tensor\033[0m\nlast words\n{answered}\n")
    assert server.tail() == f"ValueError: no such tensor (the rest is in {log})"
    with open(log, "a") as file:  # a server that is asked for its health each second and then killed
        server.log_start = log.stat().st_size  # another one since
        file.write("0 errors so far\nOutOfMemoryError: boom\nKilled\n" + f"{answered}\n" * 600)
    assert server.tail() == f"OutOfMemoryError: boom (the rest is in {log})"
    server.log_start = log.stat().st_size
    assert server.tail() == f"nothing (the rest is in {log})"


def test_ports_in_use_are_passed_over():
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as taken:
        assert sglang_server.free_port(taken.server_port - 10) >= taken.server_port + 40  # its port + 10 is taken
        with socket.create_connection(taken.server_address), taken.socket.accept()[0]:
            pass
    assert sglang_server.free_port(taken.server_port) == taken.server_port  # a connection of it may still be closing


def test_what_the_shim_cannot_patch_it_says(tmp_path):
    """Another version: modules that aren't there, or lack the name."""
    package = tmp_path / "sglang/multimodal_gen/runtime/pipelines_core/stages"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:4]):
        (folder / "__init__.py").write_text("")
    (tmp_path / "sglang/__init__.py").write_text("__version__ = '9.9'")
    (package / "input_validation.py").write_text("")
    said = subprocess.run([sys.executable, "-c", "import nanowan_shim"], capture_output=True, text=True, timeout=120,
                          env=ENVIRONMENT | {"PYTHONPATH": f"{REPOSITORY / 'shim'}:{tmp_path}"})
    assert said.returncode == 0, said.stderr
    lines = said.stderr.splitlines()
    assert all(line.startswith("nanowan_shim: sglang 9.9 (written for 0.5.23): couldn't ") for line in lines)
    assert [line.split("couldn't ")[1].split(":")[0] for line in lines] == [
        "keep_image_size",
        "return_image_latents",
        "keep_timesteps",
        "answer_with_bytes",
        "serve_one_run",
        "keep_adapters_on_device",
    ]


# ----------------------------------------------------------------------------- a real server


EXPANDED = """
import torch
from sglang.multimodal_gen.runtime.pipelines_core.stages import denoising
mask = torch.ones(1, 2, 4, 4, dtype=torch.bfloat16)  # 1 f h w
mask[:, 0] = 0
batch = type("Req", (), dict(raw_latent_shape=(1, 48, 2, 4, 4), latents=None))
print("is", denoising.expand_wan_ti2v_timestep(batch, torch.tensor(874.3), torch.bfloat16, 8, mask, (1, 2, 2)).tolist())
"""


@real
@pytest.mark.parametrize(("shim", "timestep"), [("", 876.0), ("import nanowan_shim", 874.3)])
def test_timesteps_are_not_rounded_to_bf16(shim, timestep):
    """sglang alone does; when it no longer does, the patch can go."""
    said = subprocess.run([SGLANG.with_name("python"), "-c", shim + EXPANDED], capture_output=True, text=True,
                          timeout=300, env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY / "shim")})
    assert said.returncode == 0, said.stderr
    timesteps = json.loads(said.stdout.split("is ")[-1])
    assert timesteps[0] == pytest.approx([0.0] * 4 + [timestep] * 4, rel=1e-7)


@pytest.fixture(scope="session")
def serve(world, tmp_path_factory):
    """serve(kind) -> URL of a server of that model, started once a session."""
    started, folder = {}, tmp_path_factory.mktemp("servers")

    def start(kind, number=0):
        if (kind, number) not in started:
            port = sglang_server.free_port(30000 + 50 * len(started))
            with open(folder / f"{kind}_{number}.log", "wb") as log:
                process, _ = sglang_server.start(str(world / kind), port, "", "float32", 5.0, f"{SGLANG} serve", "",
                                                 stdout=log, stderr=log)
            url, until = f"http://127.0.0.1:{port}", time.time() + 240
            started[kind, number] = url, process
            while sglang_server.health(url) != "up":
                assert process.poll() is None and time.time() < until, (folder / f"{kind}_{number}.log").read_text()
                time.sleep(0.5)
        return started[kind, number][0]

    yield start
    for _, process in started.values():
        sglang_server.end(process)


def local_world(world, kind):
    """The same model in this process -> Wan with its experts, VAE, embeddings of a prompt."""
    wan = load(world / kind)
    vae = encoders.load_vae(wan.model, "cpu")
    tokenizer, text_encoder = encoders.load_text_encoder(wan.model, "cpu", dtype=torch.float32)
    return wan, vae, lambda prompts: encoders.encode_text(tokenizer, text_encoder, prompts, 512)


def put_lora(wan, adapters):
    """The adapters of random_adapters on a local model: merged into its weights, in float64."""
    for expert, tensors in adapters.items():
        for name in {name.rsplit(".lora_", 1)[0] for name in tensors}:
            a, b = (tensors[f"{name}.lora_{side}.weight"].double() for side in "AB")
            weight = wan.experts[expert].get_submodule(name).weight
            weight.data = (weight.double() + 2.0 * b @ a).float()  # alpha 8 / rank 4


@pytest.mark.parametrize(("kind", "scale", "law"), [
    ("ti2v", 1.0, "flow"), ("ti2v", 5.0, "flow"), ("ti2v", 5.0, "cps"), ("i2v", 4.0, "flow"), ("i2v", 1.0, "flow"),
])
@real
def test_a_server_rolls_out_what_this_process_does(world, serve, kind, scale, law):
    """Noise, condition, text, every step's velocity and log-prob, latents and pixels, at a shared seed."""
    url, window = serve(kind), [1, 2] if kind == "i2v" else [0, 1, 2]
    scale_2 = scale - 1 if scale > 1 else 1.0  # the low expert's
    scales = dict(guidance_scale=scale, guidance_scale_2=scale_2 if kind == "i2v" else scale)
    client, lines = make_client(world, kind, **scales, law=law, urls=[url])
    client.check(url, lines, flow.sigma_grid(4, 5.0))
    sigmas = flow.sigma_grid(4, 5.0)  # i2v: high at 1 and 0.94, low from 0.83 on: the window crosses the boundary
    seeds = [flow.seed_of(7, n) for n in range(2)]
    asked = [client.submit(lines, n, seed, sigmas, window, measured=True) for n, seed in enumerate(seeds)]
    answers = [future.result() for future in asked]
    record, pixels = sglang_sampler.record_of(client.wan, client.config, sigmas, range(2), answers, window)

    wan, vae, encode = local_world(world, kind)
    text = encode([lines.prompts[0], lines.prompts[1], "dark"])
    images = torch.stack([lines.image(n) for n in range(2)])
    condition = torch.cat([encoders.encode_condition(vae, image[None], SIZE["num_frames"], kind) for image in images])
    assert torch.allclose(record.condition, condition, atol=1e-4)
    assert torch.allclose(record.text, text[:2], atol=1e-5)
    if scale > 1:
        assert torch.allclose(record.negative_text, text[2:], atol=1e-5)

    gen_mask = wan_model.generated_mask(wan, record.steps[0].latents, record.condition)
    grid = sigmas.tolist()
    for t in record.steps:  # the replay, which training does
        v = sampler.guided_velocity(wan, t.latents, sigmas[t.index].expand(2), record.condition, record.text,
                                    record.negative_text, **scales)
        mean, std = rollout.sde_step(law, t.latents, v, grid[t.index], grid[t.index + 1], grid[1], 0.7)
        assert ((mean - t.mean) * gen_mask).abs().max() < 1e-5
        log_density = rollout.log_prob(law, t.next_latents, mean, std, gen_mask)
        assert torch.allclose(log_density, t.log_prob, atol=1e-5)
        drawn = (t.next_latents - t.mean)[:, :, 1:] / std
        assert 0.8 < drawn.std() < 1.2 and (v * gen_mask).std() > 0.1

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noise = torch.stack([torch.randn(client.latent_shape, generator=g) for g in generators])
    latents, transitions = sampler.sample(wan, noise, condition, text[:2], text[2:], sigmas, **scales, law=law,
                                          noise_level=0.7, window=window, generators=generators)
    for ours, theirs in zip(transitions, record.steps, strict=True):
        assert ((ours.latents - theirs.latents) * gen_mask).abs().max() < 1e-3  # ours is clamped when it is used
    wanted = ((encoders.decode(vae, latents) + 1) / 2).transpose(1, 2)
    assert (pixels - wanted).abs().max() < 1 / 255 and wanted.std() > 0.02


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
@pytest.mark.parametrize("how", ["tensor", "disk"])
@real
def test_a_synced_lora_replaces_the_last_one_and_equals_ours(world, serve, tmp_path, kind, how):
    url = serve(kind)
    client, lines = make_client(world, kind, guidance_scale=2.0, guidance_scale_2=2.0, urls=[url], lora_sync=how,
                                lora_sync_dir=str(tmp_path))
    sigmas = flow.sigma_grid(4, 5.0)

    def latents():
        return client.submit(lines, 0, 3, sigmas).result().latents[0]

    zero = {expert: {name: 0 * t if "lora_B" in name else t for name, t in tensors.items()}
            for expert, tensors in random_adapters(client.wan, 1).items()}
    client.check(url, lines, flow.sigma_grid(4, 5.0))
    base, made = latents(), {}
    for seed in (1, 2):
        client.sync(random_adapters(client.wan, seed))
        made[seed] = latents()
    assert (made[1] - base).abs().max() > 0.05 and (made[2] - made[1]).abs().max() > 0.05
    client.sync(random_adapters(client.wan, 1))
    assert torch.equal(latents(), made[1])  # replaced, not added
    wan, vae, encode = local_world(world, kind)
    put_lora(wan, random_adapters(wan, 1))
    condition = encoders.encode_condition(vae, lines.image(0)[None], SIZE["num_frames"], kind)
    text = encode([lines.prompts[0], "dark"])
    noise = torch.randn(client.latent_shape, generator=torch.Generator().manual_seed(3))[None]
    ours, _ = sampler.sample(wan, noise, condition, text[:1], text[1:], sigmas, 2.0, 2.0)
    assert (ours[0] - made[1]).abs().max() < 2e-3 < 0.02 * (base - made[1]).abs().max()
    client.sync(zero)
    assert torch.equal(latents(), base)
    assert not list(tmp_path.iterdir())  # nothing is left behind


def train(world, out_dir, kind="ti2v", **settings):
    """A run of three iterations -> (what it printed, its LoRA as vectors of A and B, rows of the log)."""
    _, printed = script("train_grpo.py", **paths(world, kind) | QUICK | dict(out_dir=out_dir) | settings)
    return printed, *results(out_dir, kind)


def results(out_dir, kind="ti2v"):
    files = ["lora"] if kind == "ti2v" else ["high_noise", "low_noise"]
    tensors = {}
    for name in files:
        for key, tensor in safetensors.torch.load_file(Path(out_dir, f"lora/{name}.safetensors")).items():
            tensors[f"{name}.{key}"] = tensor
    lora = {
        side: torch.cat([tensors[key].flatten() for key in sorted(tensors) if side in key]) for side in ("_A", "_B")
    }
    return lora, [row for row in rows_of(out_dir) if "loss" in row]


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
@real
def test_three_iterations_by_a_server_equal_three_in_process(world, serve, tmp_path, kind, monkeypatch):
    """Rewards to 1e-5; adapters to 0.3 % of their size."""
    smooth_adamw(monkeypatch)
    _, local, local_rows = train(world, tmp_path / "local", kind)
    server = dict(rollout="sglang", sglang_urls=serve(kind))
    printed, lora, rows = train(world, tmp_path / "tensor", kind, **server, lora_sync="tensor")
    assert [row["reward"] for row in rows] == pytest.approx([row["reward"] for row in local_rows], abs=1e-5)
    assert len({row["reward"] for row in rows}) == 3
    for side in ("_A", "_B"):
        assert (lora[side] - local[side]).norm() < 0.003 * local[side].norm()
    assert "self-check ratio of the first update: 1 +- 0.0e+00" in printed
    for row in rows[:2]:  # B = 0, then a LoRA that the server got
        velocity = [value for name, value in row.items() if "drift/velocity " in name]  # of each step
        assert len(velocity) == 2 and 0 < max(velocity) == row["drift/velocity"] < 1e-5
        assert max(value for name, value in row.items() if "drift/ratio" in name) < 1e-5
    assert {"seconds/sync", "seconds/roll", "seconds/in_server", "seconds/train"} <= rows[2].keys()
    assert [row["lora_version"] for row in rows] == [2, 3, 4]  # the first was for the evaluation
    assert not any("drift" in name for name in rows[2])

    _, disk, disk_rows = train(world, tmp_path / "disk", kind, **server, lora_sync="disk")
    assert [row["reward"] for row in disk_rows] == [row["reward"] for row in rows]
    assert all(torch.equal(disk[side], lora[side]) for side in disk)


@real
def test_a_model_that_is_not_the_servers_is_noticed(world, serve, tmp_path, monkeypatch):
    """The same name and shapes, other weights: found by the first comparison of velocities."""
    load_transformer = wan_model.load_transformer

    def load_another(*args, **kwargs):
        transformer = load_transformer(*args, **kwargs)
        transformer.proj_out.weight.data *= 1.01
        return transformer

    monkeypatch.setattr(wan_model, "load_transformer", load_another)
    line = refusal("train_grpo.py", **paths(world) | QUICK | dict(
        rollout="sglang", sglang_urls=serve("ti2v"), out_dir=tmp_path / "out"))
    assert re.search("the server's velocity differs from the trainer's by (1.0e-02|9.9e-03) of its size", line)
    assert not (tmp_path / "out/ckpt").exists()  # nothing was trained that could be lost


@real
def test_a_launched_server_that_is_killed_comes_back_with_the_lora(world, serve, tmp_path, monkeypatch):
    """SIGKILL in the middle of the second rollout, in the third to its worker alone: the same weights to the bit."""
    _, whole, rows = train(world, tmp_path / "whole", rollout="sglang", sglang_urls=serve("ti2v"))
    servers, asked, ask = [], [], sglang_client.SGLangClient.ask
    watch = sglang_server.LaunchedServer._watch
    monkeypatch.setattr(sglang_server.LaunchedServer, "_watch", lambda self: servers.append(self) or watch(self))

    def ask_and_kill(self, url, prompt, image, seed, *rest, **more):
        asked.append(seed)
        if seed == flow.seed_of(0, 1, 2) and asked.count(seed) == 1:
            os.killpg(servers[0].process.pid, signal.SIGKILL)
        if seed == flow.seed_of(0, 2, 1) and asked.count(seed) == 1:
            group = subprocess.run(["ps", "-o", "pid=,args=", "-g", str(servers[0].process.pid)], capture_output=True,
                                   text=True).stdout.splitlines()
            (worker,) = [int(line.split()[0]) for line in group if "::scheduler" in line]
            os.kill(worker, signal.SIGKILL)
        return ask(self, url, prompt, image, seed, *rest, **more)

    monkeypatch.setattr(sglang_client.SGLangClient, "ask", ask_and_kill)
    printed, lora, killed_rows = train(world, tmp_path / "killed", rollout="sglang", sglang_launch=True,
                                       sglang_command=f"{SGLANG} serve", sglang_port=31000)
    assert asked.count(flow.seed_of(0, 1, 2)) == 2 and servers[0].restarts == 0
    assert asked.count(flow.seed_of(0, 2, 1)) >= 2
    assert [row["reward"] for row in killed_rows] == [row["reward"] for row in rows]
    assert all(torch.equal(lora[side], whole[side]) for side in lora)
    assert servers[0].process.poll() is not None  # ended with the run


@real
def test_a_server_split_over_two_processes_does_the_same(world, serve, tmp_path, monkeypatch):
    """Tensor parallelism: --tp-size 2."""
    smooth_adamw(monkeypatch)
    _, whole, rows = train(world, tmp_path / "one", rollout="sglang", sglang_urls=serve("ti2v"), max_iterations=2)
    _, lora, split_rows = train(world, tmp_path / "two", rollout="sglang", sglang_launch=True, sglang_port=32000,
                                sglang_command=f"{SGLANG} serve", sglang_args="--tp-size 2 --num-gpus 2",
                                max_iterations=2)
    assert [row["reward"] for row in split_rows] == pytest.approx([row["reward"] for row in rows], abs=1e-5)
    assert max(value for name, value in split_rows[1].items() if "drift/velocity" in name) < 1e-5
    for side in ("_A", "_B"):
        assert (lora[side] - whole[side]).norm() < 0.003 * whole[side].norm()


@real
def test_four_ranks_share_two_servers_as_one_process_does(world, serve, tmp_path):
    urls = f"{serve('ti2v')},{serve('ti2v', 1)}"
    settings = paths(world) | QUICK | dict(group_size=4, rollout="sglang", sglang_urls=urls, max_iterations=2)
    script("train_grpo.py", **settings, out_dir=tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    ended = subprocess.run([*command, path_of("train_grpo.py"), *flags(settings | dict(out_dir=tmp_path / "four"))],
                           env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (one, one_rows), (four, four_rows) = results(tmp_path / "one"), results(tmp_path / "four")
    assert [row["reward"] for row in four_rows] == pytest.approx([row["reward"] for row in one_rows], abs=1e-5)
    for side in ("_A", "_B"):
        assert (four[side] - one[side]).norm() < 0.003 * one[side].norm()
