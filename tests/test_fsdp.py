"""fsdp.py on two real gloo ranks against one process, its checkpoints, and what a kill or a full disk leaves of them.

The two ranks are started once (a start costs seconds of imports); what they find is stored in files and asserted here.
"""

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn.attention import SDPBackend

import adapters
import checkpoints
import flow
import fsdp
import guard
import launch
import model as wan_model
import tiny
from guard import UserError
from helpers import free_ports

REPOSITORY = Path(__file__).parents[1]
RANK, ALPHA, TARGETS = 4, 8.0, "to_q,to_k,to_v,to_out.0,ffn.net.0.proj"
CASES = [("lora", torch.float32), ("full", torch.float32), ("lora", torch.bfloat16)]
FLOAT32_MODULES = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def small_wan(method, dtype=torch.float32):
    """Two unsharded tiny experts; LoRA with B drawn at random, so that A has a gradient too."""
    small = tiny.TRANSFORMER | dict(num_attention_heads=2, attention_head_dim=32, num_layers=2, ffn_dim=128)
    config = dict(wan_model.WanTransformer3DModel(in_channels=36, **small).config)
    wan = wan_model.Wan("tiny", "i2v", ("high", "low"), 0.9, config, dtype)
    for seed, expert in enumerate(wan.expert_names):
        torch.manual_seed(seed)
        transformer = wan_model.WanTransformer3DModel(in_channels=36, **small).requires_grad_(False)
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.1)
        for name, parameter in transformer.named_parameters():
            if not any(part in name.split(".") for part in FLOAT32_MODULES):
                parameter.data = parameter.data.to(dtype)
        if method == "lora":
            adapters.add_lora(transformer, RANK, ALPHA, TARGETS)
            for name, parameter in transformer.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        else:
            transformer.requires_grad_(True)
        wan.experts[expert] = transformer
    return wan


def shard(wan, mesh, checkpointing="none"):
    for expert, transformer in wan.experts.items():
        fsdp.wrap_blocks(transformer, checkpointing, compile_blocks=False)
        wan.experts[expert] = fsdp.shard(transformer, mesh)
    return wan


def losses(wan, expert, samples):
    """Loss of each of the samples, which are numbers: every sample has its own latents, text, noise and sigma."""
    shape = (16, 2, 4, 4)
    latents, condition, noise = (torch.stack([flow.randn(shape, i, part) for i in samples]) for part in range(3))
    text = torch.stack([flow.randn((5, 64), i, 3) for i in samples])
    sigma = torch.stack([flow.draw_sigma(expert, 0.9, 5.0, flow.seeded("cpu", i, 4)) for i in samples])
    return wan_model.flow_matching_loss(wan, latents, noise, sigma, condition, text)


def gradients(wan, expert, samples, world_size=1):
    """-> (mean loss over all ranks' samples, {name: whole gradient}) of one backward pass."""
    loss = losses(wan, expert, samples).mean()
    loss.backward()
    parameters = wan_model.trainable_parameters(wan)
    found = fsdp.gather({name: p.grad for name, p in parameters.items() if p.grad is not None})
    for parameter in parameters.values():
        parameter.grad = None
    return fsdp.reduce_sum([loss.item()])[0] / world_size, found


def train(wan, steps, samples, world_size=1):
    """A few steps of the high expert alone, with EMA -> (parameters, optimizer, ema)."""
    parameters = wan_model.trainable_parameters(wan)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    ema = fsdp.EMA(parameters, 0.9)
    for _ in range(steps):
        losses(wan, "high", samples).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    return parameters, optimizer, ema


def training_tensors(parameters, optimizer, ema, saved=None):
    return checkpoints.training_tensors(parameters, optimizer, {"ema": ema.shadow}, saved)


def message_of(function):
    """How a rank ends: (name of the exception, its text); "told": another rank says it."""
    try:
        function()
    except (UserError, SystemExit) as error:
        return type(error).__name__ + (" told" if getattr(error, "told", False) else ""), str(error)
    return "nothing", ""


def two_ranks(folder):
    """Everything that two ranks do; rank 0 stores {name: result} in folder/results.pt."""
    rank, world_size, device = fsdp.init("cpu")
    samples, results = {0: [0, 1], 1: [2, 3]}[rank], {"ranks": world_size}
    mesh = fsdp.make_mesh(device, 1)

    for method, dtype in CASES:
        for checkpointing in ("none", "full", "selective"):
            wan = shard(small_wan(method, dtype), mesh, checkpointing)
            name = f"{method} {dtype} {checkpointing}"
            results[name] = gradients(wan, "low", samples, world_size)
            results[f"{name} dtypes"] = {n: p.dtype for n, p in wan.experts["low"].named_parameters()}
    replicas = shard(small_wan("full"), fsdp.make_mesh(device, 2))
    results["replicas"] = gradients(replicas, "low", samples, world_size)
    results["bad replicas"] = message_of(lambda: fsdp.make_mesh(device, 3))

    # EMA while the root's parameters may still be gathered from a forward pass
    wan = shard(small_wan("full"), mesh)
    *_, ema = train(wan, 2, samples)
    with torch.no_grad():
        results["ema"] = [fsdp.reduce_sum(losses(wan, "high", samples).tolist())]
        with ema.swapped_in():
            results["ema"] += [fsdp.reduce_sum(losses(wan, "high", samples).tolist())]
        results["ema"] += [fsdp.reduce_sum(losses(wan, "high", samples).tolist())]

    # checkpoints: one made by two ranks, and one made by one process
    for method in ("lora", "full"):
        wan = shard(small_wan(method), mesh)
        state = training_tensors(*train(wan, 3, samples))
        checkpoints.save(f"{folder}/two_{method}", 3, state, dict(step=3), keep_last=2)
        results[f"saved {method}"] = fsdp.gather(state)
        wan = shard(small_wan(method), mesh)
        parameters = wan_model.trainable_parameters(wan)
        optimizer, ema = torch.optim.AdamW(parameters.values(), lr=1e-2), fsdp.EMA(parameters, 0.9)
        path = checkpoints.to_resume(f"{folder}/one_{method}", True)
        state = training_tensors(parameters, optimizer, ema, checkpoints.saved_names(path))
        checkpoints.load(path, state)
        results[f"loaded {method}"] = fsdp.gather(training_tensors(parameters, optimizer, ema))

    # a mistake or a full disk on rank 1 only
    def agree(*guilty):
        with fsdp.all_ranks_agree():
            if rank in guilty:
                raise UserError(f"rank {rank}: got é")

    write = checkpoints.HuggingFaceStorageWriter.write_data

    def no_space(writer, *args):
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(writer, *args)

    checkpoints.HuggingFaceStorageWriter.write_data = no_space
    endings = [message_of(lambda: agree(1)), message_of(lambda: agree(0, 1)), message_of(agree),
               message_of(lambda: checkpoints.save(f"{folder}/two_full", 4, state, {}, 1))]
    everyone = [None, None]
    dist.all_gather_object(everyone, endings)
    results["endings"] = everyone
    results["gathered elsewhere"] = [None, None]
    dist.all_gather_object(results["gathered elsewhere"], len(fsdp.gather({"x": torch.ones(1)})))
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    fsdp.cleanup()


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """(folder, what two_ranks stored); folder/one_<method> holds checkpoints of this process."""
    folder = tmp_path_factory.mktemp("two_ranks")
    for method in ("lora", "full"):
        state = training_tensors(*train(small_wan(method), 2, [0, 1, 2, 3]))
        checkpoints.save(folder / f"one_{method}", 2, state, dict(step=2), keep_last=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*torchrun, __file__, folder], env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return folder, torch.load(folder / "results.pt", weights_only=False)


# ---------------------------------------------------------------------------------------------------- two gloo ranks


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("method, dtype", CASES)
def test_two_ranks_have_the_loss_and_every_gradient_of_one_process(together, method, dtype, checkpointing):
    loss, found = together[1][f"{method} {dtype} {checkpointing}"]
    wanted_loss, wanted = gradients(small_wan(method, dtype), "low", [0, 1, 2, 3])
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert loss == pytest.approx(wanted_loss, rel=tolerance)
    assert found.keys() == wanted.keys()
    assert len(found) == (2 * 9 * 2 if method == "lora" else len(list(small_wan("full").experts["low"].parameters())))
    for name, gradient in wanted.items():
        assert name.startswith("low.") and gradient.abs().max() > 0
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).norm() < tolerance * gradient.norm() + 1e-7, name
    halves = [gradients(small_wan(method, dtype), "low", half)[1] for half in ([0, 1], [2, 3])]
    assert all((halves[0][name] - halves[1][name]).norm() > 0.05 * wanted[name].norm() for name in wanted)


def test_replicas_have_them_too_and_their_number_divides_the_ranks(together):
    loss, found = together[1]["replicas"]
    wanted_loss, wanted = gradients(small_wan("full"), "low", [0, 1, 2, 3])
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    kind, text = together[1]["bad replicas"]
    assert kind == "UserError" and text.startswith("dp_replicate=3: want a divisor of the 2 ranks")


def test_sharding_leaves_the_precision_plan_alone(together):
    dtypes = together[1][f"lora {torch.bfloat16} none dtypes"]
    for name, dtype in dtypes.items():
        fp32 = "lora_" in name or any(part in name.split(".") for part in FLOAT32_MODULES)
        assert dtype == (torch.float32 if fp32 else torch.bfloat16), name
    assert {torch.float32, torch.bfloat16} == set(dtypes.values())


def test_ema_swaps_under_sharding(together):
    before, inside, after = together[1]["ema"]
    assert after == before
    wan = small_wan("full")
    *_, ema = train(wan, 2, [0, 1, 2, 3])
    with torch.no_grad():
        now = losses(wan, "high", [0, 1, 2, 3])  # rank 0 had the first two, rank 1 the others
        with ema.swapped_in():
            averaged = losses(wan, "high", [0, 1, 2, 3])
    assert before == pytest.approx((now[:2] + now[2:]).tolist(), rel=1e-4)
    assert inside == pytest.approx((averaged[:2] + averaged[2:]).tolist(), rel=1e-4)
    assert abs(inside[0] - before[0]) > 1e-3 * before[0]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_the_other_way(together, method):
    folder, results = together
    wan = small_wan(method)
    parameters = wan_model.trainable_parameters(wan)
    optimizer, ema = torch.optim.AdamW(parameters.values(), lr=1e-2), fsdp.EMA(parameters, 0.9)
    path = checkpoints.to_resume(folder / f"two_{method}", True)
    assert path == str(folder / f"two_{method}/ckpt/step_000003") and checkpoints.read_meta(path) == dict(step=3)
    assert sorted(os.listdir(path)) == ["meta.json"] + [
        f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2)
    ]
    checkpoints.load(path, training_tensors(parameters, optimizer, ema, checkpoints.saved_names(path)))
    compare_state(training_tensors(parameters, optimizer, ema), results[f"saved {method}"], steps=3)

    state = training_tensors(*train(small_wan(method), 2, [0, 1, 2, 3]))
    compare_state(results[f"loaded {method}"], state, steps=2)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_checkpoint_without_one_of_its_shards_is_refused(together, tmp_path, rank):
    """DCP would load the other rank's rows and leave the rest as they were."""
    copy = shutil.copytree(together[0] / "two_full/ckpt/step_000003", tmp_path / "step_000003")
    assert checkpoints.read_meta(copy) == dict(step=3)
    shard = copy / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    os.truncate(shard, size := shard.stat().st_size - 4)
    line = rf"checkpoint {copy} is damaged \({shard.name}: {size} bytes, want {size + 4}\): remove it to go on from"
    with pytest.raises(UserError, match=line):
        checkpoints.read_meta(copy)
    shard.unlink()
    with pytest.raises(UserError, match=rf"checkpoint {copy} is damaged \(.*{shard.name}.*\): remove it"):
        checkpoints.read_meta(copy)


def compare_state(found, wanted, steps):
    """Identical tensors, among them EMA and the optimizer's of the high expert; the low one was not drawn."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    kinds = {name.split(".")[0] for name in found}
    assert kinds == {"parameter", "optimizer", "ema"}
    optimizer = [name for name in found if name.startswith("optimizer.")]
    assert optimizer and all(name.startswith("optimizer.high.") for name in optimizer)
    assert {found[name].item() for name in optimizer if name.endswith(".step")} == {steps}
    assert all(found[name].abs().max() > 0 for name in optimizer if name.endswith(".exp_avg_sq"))
    moved = [name for name in found if name.startswith("parameter.high.") and "norm" not in name]
    assert all(not torch.equal(found[name], found[name.replace("parameter.", "ema.", 1)]) for name in moved)


def test_a_mistake_on_one_rank_ends_both_with_its_message(together):
    rank_0, rank_1 = together[1]["endings"]
    assert rank_0[0] == ("UserError", "rank 1: got é")
    assert rank_0[1] == ("UserError", "rank 0: got é")
    assert rank_0[2] == rank_1[2] == ("nothing", "")
    assert rank_1[0] == ("UserError told", "rank 1: got é") and rank_1[1] == ("UserError told", "rank 0: got é")
    kind, text = rank_0[3]
    assert kind == "UserError" and "step_000004: [Errno 28] No space left on device: the last" in text
    assert rank_1[3] == ("UserError told", text)
    assert os.listdir(together[0] / "two_full/ckpt") == ["step_000003"]
    assert together[1]["gathered elsewhere"] == [1, 0]


# ------------------------------------------------------------------------------------------------------- one process


def test_one_process_needs_no_process_group():
    assert fsdp.init("cpu") == (0, 1, torch.device("cpu"))
    assert fsdp.make_mesh(torch.device("cpu"), 1) is None
    with pytest.raises(UserError, match="dp_replicate=2: want a divisor of the 1 ranks"):
        fsdp.make_mesh(torch.device("cpu"), 2)
    assert fsdp.reduce_sum([1.5, 2.0]) == [1.5, 2.0]
    fsdp.barrier()
    with pytest.raises(UserError, match="got x"), fsdp.all_ranks_agree():
        raise UserError("got x")
    with pytest.raises(UserError, match="device=tpu: want auto, cpu or cuda"):
        fsdp.init("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device=cuda: this torch sees no GPU"):
            fsdp.init("cuda")


def test_ema_is_its_formula_and_leaves_no_trace():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    ema = fsdp.EMA({"x": parameter}, decay=0.75)
    wanted = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for value in ([3.0, -1.0], [0.5, 8.0], [2.0, 2.0]):
        parameter.data = torch.tensor(value)
        ema.update()
        wanted = 0.75 * wanted + 0.25 * torch.tensor(value, dtype=torch.float64)
    torch.testing.assert_close(ema.shadow["x"].double(), wanted)
    with pytest.raises(KeyError), ema.swapped_in():
        assert torch.equal(parameter, ema.shadow["x"])
        raise KeyError
    assert torch.equal(parameter.data, torch.tensor([2.0, 2.0]))
    assert not torch.equal(ema.shadow["x"], parameter)


def test_self_attention_and_its_projection_are_kept_and_all_else_recomputed():
    def run_in_backward(checkpointing):
        """How many attentions and linears the backward of two blocks runs."""
        wan = shard(small_wan("full"), None, checkpointing)
        counts = {"attention": 0, "linear": 0}

        class Counter(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                counts["attention"] += op in fsdp.ATTENTION_OPS
                counts["linear"] += op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
                return op(*args, **(kwargs or {}))

        loss = losses(wan, "low", [0]).mean()
        with Counter():
            loss.backward()
        return counts

    nothing, everything, some = (run_in_backward(name) for name in ("none", "full", "selective"))
    assert nothing["attention"] == 0 and everything["attention"] == 2 * 2  # two blocks, self- and cross-attention
    assert some["attention"] == 2  # cross-attention's
    assert some["linear"] == everything["linear"] - 2  # attn1.to_out of each block
    assert everything["linear"] > nothing["linear"] + 2 * 8


@pytest.mark.parametrize("method, dtype", [("lora", torch.bfloat16), ("full", torch.float32)])
def test_a_compiled_block_keeps_the_same(method, dtype):
    def op_of(node):
        """What a node runs: an attention that will be run again is wrapped with the state of the random generator."""
        return next((x for x in node.args[:2] if isinstance(x, torch._ops.OpOverload)), node.target)

    def graphs(checkpointing):
        """-> forward's and backward's ops, the nodes that backward is handed beside inputs, loss and gradients."""
        ops, handed = {"forward": [], "backward": []}, []

        def compiler(part, graph, _):
            ops[part] += map(op_of, graph.graph.nodes)
            if part == "forward":
                handed.extend(graph.graph.output_node().args[0][1:])
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        wan = small_wan(method, dtype)
        transformer = wan.experts["low"]
        del transformer.blocks[1:]
        fsdp.wrap_blocks(transformer, checkpointing, compile_blocks=False)
        backend = aot_autograd(fw_compiler=partial(compiler, "forward"), bw_compiler=partial(compiler, "backward"),
                               partition_fn=min_cut_rematerialization_partition,  # inductor's
                               decompositions=select_decomp_table())
        transformer.blocks[0].compile(dynamic=False, backend=backend)
        return *ops.values(), handed, *gradients(wan, "low", [0])

    def count(ops, wanted):
        return sum(op in wanted for op in ops)

    plain_forward, plain_backward, _, plain_loss, plain_gradients = graphs("none")
    _, full_backward, _, _, _ = graphs("full")
    forward, backward, handed, loss, found = graphs("selective")
    assert count(forward, fsdp.ATTENTION_OPS) == count(plain_forward, fsdp.ATTENTION_OPS) == 2
    again = [count(ops, fsdp.ATTENTION_OPS) for ops in (plain_backward, full_backward, backward)]
    assert again == [0, 2, 1]
    assert count(backward, fsdp.LINEAR_OPS) == count(full_backward, fsdp.LINEAR_OPS) - 1
    assert sum(node.target in fsdp.LINEAR_OPS for node in handed) == 1
    results = [node for node in handed if node.op == "call_function" and node.target not in fsdp.LINEAR_OPS]
    assert [op_of(node.args[0]) in fsdp.ATTENTION_OPS for node in results].count(True) >= 2  # with its log-sum-exp
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert loss == pytest.approx(plain_loss, rel=tolerance)
    for name, gradient in plain_gradients.items():
        assert (found[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


# ------------------------------------------------------------------------------------------------------- checkpoints


def state_of(value):
    return {"x": torch.full((1000,), float(value)), "count": torch.tensor(float(value))}


def saved_value(out_dir):
    """What the last whole checkpoint holds."""
    state = state_of(0)
    checkpoints.load(checkpoints.to_resume(out_dir, True), state)
    assert (state["x"] == state["count"]).all()
    return state["count"].item()


def test_keep_last_and_the_order_of_checkpoints(tmp_path):
    assert checkpoints.to_resume(tmp_path, True) is None
    assert checkpoints.to_resume(tmp_path, False) is None
    for step in (1, 999_999, 1_000_000, 1_000_001):
        checkpoints.save(tmp_path, step, state_of(step), dict(step=step), keep_last=2)
    names = [os.path.basename(path) for path in checkpoints.saved_in(tmp_path)]
    assert names == ["step_1000000", "step_1000001"] and len(os.listdir(tmp_path / "ckpt")) == 2
    assert saved_value(tmp_path) == 1_000_001
    for step in (1_000_002, 1_000_003):
        checkpoints.save(tmp_path, step, state_of(step), dict(step=step), keep_last=0)  # all
    assert len(checkpoints.saved_in(tmp_path)) == 4
    with pytest.raises(UserError, match="resume=False: .* holds step_1000003"):
        checkpoints.to_resume(tmp_path, False)


def check_same_config(current, saved=None, checkpoint="out/a/ckpt/step_000001"):
    saved = saved or {"lr": 1e-3, "seed": 0, "fps": 8, "window": [0, 5], "lora_rank": 4}
    defaults = {"lr": 1.0, "new": (1, 2), "mine": False}
    return checkpoints.check_same_config(checkpoint, saved, current, {"fps"}, defaults)


def test_settings_that_differ_are_named_with_the_way_on():
    same = {"lr": 1e-3, "seed": 0, "fps": 8, "window": (0, 5), "lora_rank": 4}
    assert check_same_config(same) == "nothing"
    assert check_same_config(same | {"fps": 9}) == "fps 8 -> 9"
    with pytest.raises(UserError) as caught:
        check_same_config(same | {"lr": 2e-3, "fps": 9, "window": (0, 6)})
    assert str(caught.value) == (
        "out/a/ckpt/step_000001 was made with another config (lr 0.001 -> 0.002, window [0, 5] -> [0, 6]): use another "
        "out_dir, where init_lora=out/a/lora starts from what was learnt, or the old values")
    with pytest.raises(UserError, match=r"out_dir, where model=out/a/model \(written at the run's end\) starts from"):
        check_same_config({"lora_rank": 0, "lr": 2}, {"lora_rank": 0, "lr": 1})


def test_a_run_is_resumed_by_a_script_with_other_settings():
    """One that is new at its default is no difference; one that is gone is told, and no more."""
    same = {"lr": 1e-3, "seed": 0, "fps": 8, "window": (0, 5), "lora_rank": 4}
    assert check_same_config(same | {"new": (1, 2), "mine": False, "content of mine": "abc"}) == "nothing"
    with pytest.raises(UserError, match=r"config \(mine False -> True, new \[1, 2\] -> \[1, 3\]\): use"):
        check_same_config(same | {"new": (1, 3), "mine": True})
    del same["seed"]
    assert check_same_config(same | {"fps": 9}) == "fps 8 -> 9, seed 0 -> no longer a setting"
    with pytest.raises(UserError, match=r"config \(lr 0.001 -> 1.0\): use"):  # its default now
        check_same_config(same | {"lr": 1.0})


def test_a_further_average_is_saved_and_resumed(tmp_path):
    def state(values, saved=None):
        parameter = torch.nn.Parameter(torch.full((3,), values[0]))
        averages = {name: {"x": torch.full((3,), x)} for name, x in zip(("ema", "slow"), values[1:], strict=False)}
        return checkpoints.training_tensors({"x": parameter}, torch.optim.AdamW([parameter]), averages, saved)

    checkpoints.save(tmp_path, 1, state([1.0, 2.0, 3.0]), {}, keep_last=0)
    assert checkpoints.saved_names(path := checkpoints.to_resume(tmp_path, True)) == {"parameter.x", "ema.x", "slow.x"}
    checkpoints.load(path, found := state([0.0, 0.0, 0.0]))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "parameter.x": [1.0] * 3, "ema.x": [2.0] * 3, "slow.x": [3.0] * 3}
    with pytest.raises(UserError, match="the checkpoint has no average 'slow', as this script has: start in another"):
        state([0.0, 0.0, 0.0], {"parameter.x", "ema.x", "slower.x"})
    assert state([0.0], {"parameter.x", "ema.x"}).keys() == {"parameter.x"}


def test_restored_counts_of_steps_lie_where_the_optimizer_wants_them():
    """Fused AdamW on a GPU reads them there, else they are on the CPU; the meta device stands for the GPU."""
    for fused, device in ((True, "meta"), (False, "cpu")):
        parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
        optimizer = torch.optim.AdamW([parameter], fused=fused)
        state = checkpoints.training_tensors({"x": parameter}, optimizer, saved={"optimizer.x.exp_avg"})
        assert sorted(state) == ["optimizer.x.exp_avg", "optimizer.x.exp_avg_sq", "optimizer.x.step", "parameter.x"]
        assert state["optimizer.x.step"].device.type == device and state["optimizer.x.step"].dtype == torch.float32
        assert optimizer.state[parameter]["step"] is state["optimizer.x.step"]


MOMENTS = {
    "nothing is written": (dcp, "save"),
    "a shard is written": (os, "fsync"),
    "all shards are written": (json, "dump"),
    "all is there but the name": (os, "replace"),
    "it has its name, the old one is there": (checkpoints, "saved_in"),
    "the old one is being deleted": (shutil, "rmtree"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_minus_9_in_a_save_leaves_a_whole_checkpoint(tmp_path, moment):
    """A forked child is killed as it calls a function; what is there afterwards is whole, and serves."""
    checkpoints.save(tmp_path, 1, state_of(1), dict(step=1), keep_last=1)
    child = os.fork()
    if child == 0:
        try:
            module, name = MOMENTS[moment]
            original = getattr(module, name)

            def killed(*args, **kwargs):
                if name != "rmtree" or "step_000001" in args[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            setattr(module, name, killed)
            checkpoints.save(tmp_path, 2, state_of(2), dict(step=2), keep_last=1)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    last = 2 if "old one" in moment else 1
    assert saved_value(tmp_path) == last
    assert checkpoints.read_meta(checkpoints.saved_in(tmp_path)[-1]) == dict(step=last)
    assert any((tmp_path / "ckpt").glob("tmp_*")) == (last == 1)
    checkpoints.save(tmp_path, 3, state_of(3), dict(step=3), keep_last=1)
    assert saved_value(tmp_path) == 3
    assert os.listdir(tmp_path / "ckpt") == ["step_000003"]  # what the kill left is gone


def test_a_disk_that_refuses_writes_is_one_line_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, 1, state_of(1), dict(step=1), keep_last=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a real refusal by the system, in the middle of a file
    try:
        with pytest.raises(UserError) as caught:
            checkpoints.save(tmp_path, 2, {"x": torch.ones(100_000)}, dict(step=2), keep_last=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"checkpoint {tmp_path}/ckpt/step_000002: [Errno 27] File too large: the last")
    assert os.listdir(tmp_path / "ckpt") == ["step_000001"] and saved_value(tmp_path) == 1

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for module, name in ((dcp, "save"), (json, "dump"), (os, "makedirs"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(UserError, match="No space left on device: the last whole one is kept"):
                checkpoints.save(tmp_path, 2, state_of(2), dict(step=2), keep_last=1)
        assert os.listdir(tmp_path / "ckpt") == ["step_000001"] and saved_value(tmp_path) == 1


def test_cudnn_attention_comes_first_and_stays_first():
    fsdp.order_attention_kernels()
    gc.collect()
    try:
        assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)[0] == SDPBackend.CUDNN_ATTENTION
    finally:
        fsdp._attention.pop().__exit__(None, None, None)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    new, final = tmp_path / "new", tmp_path / "final"
    for folder, content in ((new, "new"), (final, "old")):
        folder.mkdir()
        (folder / "file").write_text(content)
    seen = []
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: (seen.append(final.exists()), rmtree(*a, **k)))
    guard.replace_folder(new, final)
    assert (final / "file").read_text() == "new" and sorted(p.name for p in tmp_path.iterdir()) == ["final"]
    assert seen[-1] is False  # it is not removed under its own name



@pytest.fixture
def stop():
    """fsdp.Stop, whose handlers are gone afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield fsdp.Stop()
    for number, handler in handlers.items():
        signal.signal(number, handler)


ONE_IS_STOPPED = """
import os, signal, sys, time, fsdp, configurator
sys.argv[1:] = []
configurator.configure(globals())
rank, _, _ = fsdp.init("cpu")
stop = fsdp.Stop()
with stop.leaves_at_once():
    fsdp.barrier()
    if rank == WHO:
        os.kill(os.getpid(), signal.SIGTERM)
    OTHER
"""


@pytest.mark.parametrize("who, other", [(0, "fsdp.barrier()"), (1, "fsdp.barrier()"), (1, "time.sleep(60)")])
def test_one_rank_that_is_stopped_in_an_evaluation_takes_the_others_along(tmp_path, who, other):
    """Whether they wait for it or work on; nothing failed, so that torchrun says nothing either."""
    (tmp_path / "script.py").write_text(ONE_IS_STOPPED.replace("WHO", str(who)).replace("OTHER", other))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*torchrun, tmp_path / "script.py"], env=environment, capture_output=True, text=True,
                         timeout=50)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "stopped: SIGTERM in an evaluation; the same command resumes\n"


@pytest.mark.parametrize("change, words", [
    (dict(WORLD_SIZE="", LOCAL_RANK="", MASTER_ADDR="", MASTER_PORT=""),
     "the environment has RANK=0, no WORLD_SIZE, no LOCAL_RANK, no MASTER_ADDR, no MASTER_PORT: want torchrun, which"),
    (dict(MASTER_ADDR="", MASTER_PORT=""), "RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, no MASTER_ADDR, no MASTER_PORT: want"),
    (dict(LOCAL_RANK=""), "no LOCAL_RANK, MASTER_ADDR=127.0.0.1"),
    (dict(RANK="2"), "RANK=2, WORLD_SIZE=2"),
    (dict(RANK="first"), "RANK=first, WORLD_SIZE=2"),
    (dict(MASTER_PORT="70000"), "MASTER_PORT=70000: want torchrun"),
    (dict(), "RANK=0, WORLD_SIZE=2, .* don't find each other within 1 s .*1/2 clients joined.*: want torchrun"),
    (dict(RANK="1"), "RANK=1, WORLD_SIZE=2, .* don't find each other within 1 s .*refused.*: want torchrun"),
    (dict(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="x"), "don't find each other within 1 s .*refused"),
])
def test_what_another_launch_left_in_the_environment_is_one_line(monkeypatch, change, words):
    (port,) = free_ports(1)
    usual = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for name, value in (usual | change).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "MEETING", 1)
    started = time.time()
    with pytest.raises(UserError, match=words) as caught:
        fsdp.init("cpu")
    assert time.time() - started < 5 and "\n" not in str(caught.value)


STOPS = [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]


@pytest.mark.parametrize("number, name", STOPS)
def test_a_stop_in_an_evaluation_says_so_and_leaves_at_once(capsys, stop, number, name):
    with pytest.raises(SystemExit) as ended, stop.leaves_at_once():
        os.kill(os.getpid(), number)
    assert ended.value.code == 0 and stop.requested and stop.name == name
    assert capsys.readouterr().out == f"stopped: {name} in an evaluation; the same command resumes\n"


@pytest.mark.parametrize("number, name", STOPS)
def test_a_stop_before_an_evaluation_is_called_what_it_was(capsys, stop, number, name):
    """The first that came, though a scheduler or torchrun sends a SIGTERM after it."""
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested and stop.name == name and capsys.readouterr().out == ""
    with pytest.raises(SystemExit), stop.leaves_at_once():
        pass
    assert capsys.readouterr().out == f"stopped: {name} in an evaluation; the same command resumes\n"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_in_a_save_is_not_the_disks_fault(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise checkpoints.CheckpointException("save", {0: (KeyboardInterrupt(), None)})

    monkeypatch.setattr(checkpoints.dcp, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(str(tmp_path), 1, {"x": torch.zeros(2)}, {}, 1)
    assert checkpoints.saved_in(str(tmp_path)) == [] and not list((tmp_path / "ckpt").iterdir())


if __name__ == "__main__":
    two_ranks(sys.argv[1])
