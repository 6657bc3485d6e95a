"""torch.distributed: process group, FSDP2 sharding and its precision plan, checkpoints and resume, EMA.

One process works without torchrun and without any of this: init() then returns world size 1 and nothing is wrapped.
Checkpoints are torch.distributed.checkpoint's, in safetensors files (no pickle): saved on N ranks, loaded on M.
"""

import glob
import json
import math
import os
import re
import shutil
import signal
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from configurator import UserError, release_folders, remove_folder, replace_folder

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes into the output

_attention = []  # the context that orders attention kernels; dropped, it would undo itself

# ----------------------------------------------------------------------------- process group


def order_attention_kernels():
    """cuDNN's attention before PyTorch's own flash kernel, for the whole process.

    Not before cuDNN 9.15.1, where PyTorch leaves it off: it erred on lengths that aren't multiples of 128.
    """
    version = torch.backends.cudnn.version()
    if version and version <= 91500:
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    _attention.append(sdpa_kernel(order, set_priority=True))
    _attention[-1].__enter__()


def init(device="auto"):
    """Join the process group that torchrun describes, if any -> (rank, world_size, torch.device).

    device: "auto" | "cpu" | "cuda". On CUDA attention is set to cuDNN's kernel before PyTorch's own flash kernel for
    the whole process: 1.6 times as fast on an H200, and which of them PyTorch takes by itself differs by version.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device}: want auto, cpu or cuda")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device=cuda: this torch sees no GPU; want device=cpu, or a CUDA build of torch")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        order_attention_kernels()
    device = torch.device(device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on tiny models OpenMP's threads spin longer than they work: 3 to 20 times slower
    if "RANK" not in os.environ:
        return 0, 1, device
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return dist.get_rank(), dist.get_world_size(), device


def is_first():
    """Whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier():
    """All ranks wait for each other."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # on the CPU: it doesn't wait for the GPU's queue


def cleanup():
    """End a run: leave the process group, all ranks together, as one that ends early can take its peers' connections
    with it, and let others write into out_dir."""
    release_folders()
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def reduce_sum(values):
    """Sum of a list of floats over all ranks, on the CPU -> list of floats (float64)."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor.tolist()


def reduce_max(values):
    """Largest of each of a list of floats over all ranks -> list of floats (float64); NaN, which max loses, is inf."""
    tensor = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=math.inf, posinf=math.inf)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


@contextmanager
def all_ranks_agree():
    """A UserError in the body on any rank ends all of them, with the message of the first: nobody is left waiting."""
    message = ""
    try:
        yield
    except UserError as error:
        message = str(error)
    if dist.is_initialized():
        bytes_ = torch.zeros(dist.get_world_size(), 2000, dtype=torch.uint8)
        encoded = torch.frombuffer(bytearray(message.encode()[:2000]) or bytearray(1), dtype=torch.uint8)
        bytes_[dist.get_rank(), : len(encoded)] = encoded
        dist.all_reduce(bytes_)
        messages = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in bytes_.numpy()]
        message = next((m for m in messages if m), "")
        if message and dist.get_rank() > 0:
            raise SystemExit(1)  # rank 0 says it
    if message:
        raise UserError(message)


class Stop:
    """SIGTERM or Ctrl-C asks a run to stop: it finishes what it must, saves and leaves; an evaluation ends at once.

    torchrun passes SIGTERM on to all ranks, but also sends it to the others when one fails.
    """

    def __init__(self):
        self.requested, self.at_once, self.name = False, False, "SIGTERM"
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number=signal.SIGTERM, *_):
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C doesn't wait
        self.requested, self.name = True, signal.Signals(number).name
        if self.at_once:
            if is_first():
                print(f"stopped: {self.name} in an evaluation; the same command resumes", flush=True)
            raise SystemExit(int(dist.is_initialized()))  # torchrun ends the other ranks only where one fails

    def anywhere(self):
        """Whether any rank has been asked. Collective."""
        return bool(reduce_max([float(self.requested)])[0])

    @contextmanager
    def leaves_at_once(self):
        """For an evaluation, on which nothing depends and which may take longer than a scheduler waits."""
        self.at_once = True
        if self.requested:
            self._handle()
        yield
        self.at_once = False


# ----------------------------------------------------------------------------- sharding

ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
LINEAR_OPS = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}


def keep_the_dearest():
    """Contexts of selective checkpointing for one forward of a block: two results are kept, all else is recomputed.

    What self-attention returns (with its backward over half of a step of A14B at 27,000 tokens) and the product of its
    output projection, the first linear after it. Cross-attention's result is as large; A14B redoes it with a fifth of
    that product's work.
    """
    # what is still to come; eager checkpointing asks anew while it recomputes, in the same order
    left = {is_recompute: [ATTENTION_OPS, LINEAR_OPS] for is_recompute in (False, True)}

    def policy(context, op, *args, **kwargs):
        if left[context.is_recompute] and op in left[context.is_recompute][0]:
            del left[context.is_recompute][0]
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def wrap_blocks(transformer, checkpointing, compile_blocks):
    """Activation checkpointing ("none" | "full" | "selective") and torch.compile, one transformer block each.

    The order matters: compile sees the checkpointed block and its partitioner follows the policy; FSDP comes outside.
    """
    for i, block in enumerate(transformer.blocks):
        if checkpointing == "full":
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        elif checkpointing == "selective":
            block = checkpoint_wrapper(block, context_fn=keep_the_dearest, preserve_rng_state=False)
        if compile_blocks:
            block.compile(dynamic=False)  # a few fixed shapes; a dynamic batch would slow all of them
        transformer.blocks[i] = block
    return transformer


def make_mesh(device, dp_replicate):
    """-> a (dp_replicate, dp_shard) device mesh over all ranks, or None in one process. Replicas hold whole copies."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size % dp_replicate:
        raise UserError(f"dp_replicate={dp_replicate}: want a divisor of the {world_size} ranks, e.g. one a node")
    if not dist.is_initialized():
        return None
    shape = (dp_replicate, world_size // dp_replicate)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return mesh if dp_replicate > 1 else mesh["dp_shard"]


def shard(transformer, mesh):
    """FSDP2 with one wrap a block plus the root, each parameter in the dtype it is stored in.

    The default MixedPrecisionPolicy is on purpose: a param_dtype would cast the float32 norms and modulation to bf16.
    Matrix products are bf16 by autocast; trainable parameters are stored, so gradients are reduced, in float32.
    """
    if mesh is not None:
        for block in transformer.blocks:
            fully_shard(block, mesh=mesh)
        # By default the root would stay gathered after a validation forward and miss that EMA swaps its parameters.
        fully_shard(transformer, mesh=mesh, reshard_after_forward=True)
    return transformer


def full_tensor(tensor):
    """The whole of a tensor that may be sharded. Collective: all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors, wanted=None):
    """{name: sharded tensor} -> {name: whole tensor on the CPU} on ranks where it's wanted (rank 0), {} elsewhere.

    Collective: all ranks call it.
    """
    if wanted is None:
        wanted = is_first()
    whole = {}
    for name, tensor in tensors.items():
        tensor = full_tensor(tensor.detach())
        if wanted:
            whole[name] = tensor.to("cpu", copy=True)
    return whole


# ----------------------------------------------------------------------------- EMA


@contextmanager
def swapped_in(parameters, values):
    """Inside, parameters {name: p} have other values {name: tensor, or None for 0}.

    Not between a forward and its backward, which would use what is no longer there.
    """
    with torch.no_grad():
        kept = {name: parameters[name].detach().clone() for name in values}
        for name, value in values.items():
            parameters[name].zero_() if value is None else parameters[name].copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                parameters[name].copy_(value)


class EMA:
    """Moving average of parameters: shadow <- decay shadow + (1 - decay) parameter, in float32, sharded alike."""

    def __init__(self, parameters, decay):
        self.parameters, self.decay = parameters, decay
        self.shadow = {name: p.detach().float().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self):
        for name, parameter in self.parameters.items():
            self.shadow[name].lerp_(parameter.detach().float(), 1 - self.decay)

    def swapped_in(self):
        """Inside, the parameters are the average."""
        return swapped_in(self.parameters, self.shadow)


# ----------------------------------------------------------------------------- checkpoints


def training_tensors(parameters, optimizer, ema, saved=None):
    """Everything a step changes, as one flat {name: tensor}: parameters, AdamW's moments and counts, EMA.

    saved: names that a checkpoint holds; the optimizer state among them is allocated so that it can be loaded into.
    """
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if saved is not None and f"optimizer.{name}.exp_avg" in saved:
            moments = dict(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            count = torch.zeros((), device=parameter.device if optimizer.defaults["fused"] else "cpu")
            optimizer.state[parameter] = dict(step=count, **moments)
        for key, tensor in optimizer.state.get(parameter, {}).items():  # an expert not drawn so far has none
            tensors[f"optimizer.{name}.{key}"] = tensor
    if ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in ema.shadow.items()}
    return tensors


def checkpoints(out_dir):
    """Whole checkpoints of a run, oldest first: [out_dir/ckpt/step_000120, ...]."""
    folder = os.path.join(out_dir, "ckpt")
    names = [name for name in os.listdir(folder) if re.fullmatch(r"step_\d{6,}", name)] if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name.removeprefix("step_")))]


def checkpoint_to_resume(out_dir, resume):
    """-> the last whole checkpoint of out_dir, or None for a new run."""
    found = checkpoints(out_dir)
    if found and not resume:
        raise UserError(f"resume=False: {out_dir} holds {os.path.basename(found[-1])}: choose another out_dir")
    return found[-1] if found else None


def check_same_config(checkpoint, saved, current, may_change):
    """UserError naming the settings in which a checkpoint's config differs from the current one.

    -> those that differ and may, for the user to see: "fps 8 -> 9, num_val_videos 2 -> 0", or "nothing".
    """
    current = json.loads(json.dumps(current))  # as saved: tuples are lists there
    current = {name: value for name, value in current.items() if name in saved or not name.startswith("content of ")}
    changes = {name: f"{name} {saved.get(name)!r} -> {current.get(name)!r}"
               for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)}  # fmt: skip
    refused = ", ".join(change for name, change in changes.items() if name not in may_change)
    if refused:
        raise UserError(f"{checkpoint} was made with another config ({refused}): use another out_dir or the old values")
    return ", ".join(changes.values()) or "nothing"


@contextmanager
def one_line_if_disk_fails(final, temporary):
    """Where a rank cannot write a checkpoint all end with one line, and what was written of it is removed."""
    with all_ranks_agree():
        try:
            yield
        except (OSError, CheckpointException) as error:  # DCP raises one rank's failure on all
            reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(reason, KeyboardInterrupt):
                raise reason from None  # a second Ctrl-C, not the disk
            kept = "the last whole one is kept; free some space and resume"
            raise UserError(f"checkpoint {final}: {reason}: {kept}") from None


def save_checkpoint(out_dir, step, tensors, meta, keep_last):
    """Write out_dir/ckpt/step_NNNNNN: each rank its shards, then meta.json, then one rename. Collective.

    A kill at any moment leaves the previous checkpoint or this one, never a part: the name appears only after every
    rank has written its last byte and all agree that none failed.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = os.path.join(out_dir, "ckpt")
    final = os.path.join(folder, f"step_{step:06d}")
    temporary = os.path.join(folder, f"tmp_{step:06d}")
    with one_line_if_disk_fails(final, temporary):
        if rank == 0:
            for left_by_a_kill in glob.glob(os.path.join(glob.escape(folder), "tmp_*")):
                shutil.rmtree(left_by_a_kill)
            os.makedirs(temporary)
    with one_line_if_disk_fails(final, temporary):
        writer = HuggingFaceStorageWriter(temporary, save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    with one_line_if_disk_fails(final, temporary):
        if rank == 0:
            with open(os.path.join(temporary, "meta.json"), "w") as file:
                sizes = {name: os.path.getsize(os.path.join(temporary, name)) for name in sorted(os.listdir(temporary))
                         if name.endswith(".safetensors")}  # fmt: skip
                json.dump(meta | {"files": sizes}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            replace_folder(temporary, final)
            for old in checkpoints(out_dir)[:-keep_last] if keep_last > 0 else []:
                remove_folder(old)


@contextmanager
def saving(save, out_dir, start_step, step):
    """Where the inside fails, all ranks save what was trained before they stop.

    save: step -> None, collective; start_step: where this run began, which is saved or nothing. Collective.
    """
    try:
        yield
    except (UserError, SystemExit):
        if step > start_step:
            save(step)
            if is_first():
                print(f"saved      {out_dir}/ckpt/step_{step:06d}: the same command resumes", flush=True)
        raise


@contextmanager
def one_line_if_damaged(path):
    """Our own writes leave no half checkpoint, but copies of them may be cut short."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} is damaged ({error}): remove it to go on from the one before") from None


def read_meta(path):
    """What save_checkpoint was given as meta. UserError unless all shards are there: DCP would load what it finds."""
    with one_line_if_damaged(path):
        with open(os.path.join(path, "meta.json")) as file:
            meta = json.load(file)
        for name, size in meta.pop("files", {}).items():
            if (there := os.path.getsize(os.path.join(path, name))) != size:
                raise ValueError(f"{name}: {there} bytes, want {size}")
    return meta


def saved_names(path):
    """Names of the tensors in a checkpoint, from the safetensors headers."""
    with one_line_if_damaged(path):
        return set(HuggingFaceStorageReader(path).read_metadata().state_dict_metadata)


def load_checkpoint(path, tensors):
    """Fill tensors in place from a checkpoint written by any number of ranks. Collective."""
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path), no_dist=not dist.is_initialized())
