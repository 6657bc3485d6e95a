"""torch.distributed: process group, errors that end all ranks, FSDP2 sharding and its precision plan, EMA.

One process works without torchrun and without any of this: init() then returns world size 1 and nothing is wrapped.
"""

import math
import os
import signal
import threading
import warnings
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import launch
from guard import Diverged, UserError, release_folders

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes into the output

_store = []  # where ranks leave word for each other
_attention = []  # the context that orders attention kernels; dropped, it would undo itself

# ----------------------------------------------------------------------------- process group


def order_attention_kernels():
    """cuDNN's attention before PyTorch's own flash kernel, for the whole process: 1.6 times as fast on an H200.

    Which of them PyTorch takes by itself differs by version. Not before cuDNN 9.15.1, where PyTorch leaves it off: it
    erred on lengths that aren't multiples of 128.
    """
    version = torch.backends.cudnn.version()
    if version and version <= 91500:
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    _attention.append(sdpa_kernel(order, set_priority=True))
    _attention[-1].__enter__()


def init(device="auto"):
    """Join the process group that torchrun describes, if any: "auto" | "cpu" | "cuda" -> (rank, world_size, device)."""
    launched = not dist.is_initialized() and launch.environment()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device}: want auto, cpu or cuda")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device=cuda: this torch sees no GPU; want device=cpu, or a CUDA build of torch")
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise UserError(f"LOCAL_RANK={local_rank}: there are {num_gpus} GPUs here; want a process for each at most")
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(device)
        order_attention_kernels()
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on tiny models OpenMP's threads spin longer than they work: 3 to 20 times slower
    device = torch.device(device)
    if launched:
        _store[:] = [launch.join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")]
    return *place(), device


def place():
    """-> (rank, world_size) of this process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first():
    """Whether this process is rank 0, or the only one."""
    return place()[0] == 0


def say(line):
    """Print a line, once for all ranks."""
    if is_first():
        print(line, flush=True)


def share_out(num_items, rank, world_size):
    """Round-robin: the items of a rank, and weights that are 0 for the repeats that make all ranks' numbers equal."""
    positions = range(rank, math.ceil(num_items / world_size) * world_size, world_size)
    return [position % num_items for position in positions], [float(position < num_items) for position in positions]


def barrier():
    """All ranks wait for each other."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # on the CPU: it doesn't wait for the GPU's queue


def cleanup():
    """End a run, all ranks together, as one that ends early can take its peers' connections with it."""
    release_folders()
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()
        _store.clear()


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
    kind, message = UserError, ""
    try:
        yield
    except UserError as error:
        kind, message = type(error), str(error)
    if dist.is_initialized():
        text = f"{kind.__name__} {message}" if message else "\0"
        encoded = torch.frombuffer(bytearray(text.encode()[:2000]), dtype=torch.uint8)
        bytes_ = torch.zeros(dist.get_world_size(), 2000, dtype=torch.uint8)  # as text: nothing is unpickled
        bytes_[dist.get_rank(), : len(encoded)] = encoded
        dist.all_reduce(bytes_)
        messages = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in bytes_.numpy()]
        name, _, message = next((m for m in messages if m), "").partition(" ")
        kind = Diverged if name == "Diverged" else UserError
    if message:
        error = kind(message)
        error.told = not is_first()  # rank 0 says it
        raise error


class Stopped(SystemExit):
    """A run that was asked to stop leaves; whoever catches a SystemExit of others lets this one pass."""


class Stop:
    """SIGTERM or Ctrl-C asks a run to stop: it finishes what it must, saves and leaves; an evaluation ends at once.

    torchrun passes SIGTERM on to all ranks, but also sends it to the others when one fails.
    """

    def __init__(self):
        self.requested, self.at_once, self.name = False, False, "SIGTERM"  # the name of the first that came
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number, *_):
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C doesn't wait
        if not self.requested:
            self.requested, self.name = True, "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        self._leave()

    def _leave(self):
        if self.at_once:
            self.at_once = False  # a second signal is no second leave
            say(f"stopped: {self.name} in an evaluation; the same command resumes")
            with suppress(RuntimeError):  # the store is gone with rank 0
                for store in _store:
                    store.set("stopped", self.name)  # the other ranks follow
            raise Stopped(0)

    def _left(self):
        try:
            return bool(_store) and _store[0].check(["stopped"])
        except RuntimeError:  # as above
            return False

    def _follow(self, over):
        """Beside an evaluation: leave, as if asked to, when another rank has left."""
        while not over.wait(0.5):
            if self._left():
                os.kill(os.getpid(), signal.SIGTERM)
                if not over.wait(10):
                    os._exit(0)  # it waits for the other one in a collective of the GPU, where no signal comes through

    def anywhere(self):
        """Whether any rank has been asked. Collective."""
        return bool(reduce_max([float(self.requested)])[0])

    @contextmanager
    def leaves_at_once(self):
        """For an evaluation, which may take longer than a scheduler waits. All ranks leave, also where one is asked."""
        self.at_once, over = True, threading.Event()
        if self.requested:
            self._leave()
        follower = threading.Thread(target=self._follow, args=(over,), daemon=True)
        if _store:
            follower.start()
        try:
            yield
        except RuntimeError:  # of a collective in which the other one is missing
            if self._left():
                self._leave()
            raise
        finally:
            self.at_once = False
            over.set()
            if _store:
                follower.join()


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
    # to come; eager checkpointing asks anew while it recomputes, in the same order
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
    world_size = place()[1]
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


def load_sharded(experts, load, mesh, checkpointing="none", compile_blocks=False):
    """{expert: its transformer, wrapped and sharded}; load: expert -> transformer. Collective."""
    sharded = {}
    for expert in experts:
        with all_ranks_agree():
            transformer = load(expert=expert)
        sharded[expert] = shard(wrap_blocks(transformer, checkpointing, compile_blocks), mesh)
    return sharded


def full_tensor(tensor):
    """The whole of a tensor that may be sharded. Collective: all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors, wanted=None):
    """{name: sharded tensor} -> {name: whole on the CPU} where it's wanted (rank 0), {} on other ranks. Collective."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = full_tensor(tensor.detach())
        if is_first() if wanted is None else wanted:
            whole[name] = tensor.to("cpu", copy=True)
    return whole


# ----------------------------------------------------------------------------- EMA


@contextmanager
def swapped_in(parameters, values):
    """Inside, parameters {name: p} have other values {name: tensor, or one number for all}.

    Not between a forward and its backward, which would use what is no longer there.
    """
    kept = {name: parameters[name].detach().clone() for name in values}
    for name, value in values.items():
        parameters[name].detach().copy_(value) if torch.is_tensor(value) else parameters[name].detach().fill_(value)
    try:
        yield
    finally:
        for name, value in kept.items():
            parameters[name].detach().copy_(value)


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
