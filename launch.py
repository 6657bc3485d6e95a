"""Where ranks meet: what torchrun's environment says of them, checked, and the process group."""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from guard import UserError, first_line

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
START = "want torchrun, which sets them; for one process unset RANK and WORLD_SIZE"
MEETING = 30  # seconds that ranks may start apart; torchrun is there before its ranks, which may take longer
PATIENCE = timedelta(minutes=30)  # of a collective


def environment():
    """"RANK=0, WORLD_SIZE=2, ..." in a process that torchrun started, else "". UserError where that isn't whole."""
    if "RANK" not in os.environ:
        return ""
    words = ", ".join(f"{name}={os.environ[name]}" if os.environ.get(name) else f"no {name}" for name in NAMES)
    rank, world_size, local_rank, address, port = (os.environ.get(name, "") for name in NAMES)
    numbers = all(text.isdecimal() for text in (rank, world_size, local_rank, port))
    if not (numbers and address and int(local_rank) <= int(rank) < int(world_size) and int(port) < 65536):
        raise UserError(f"the environment has {words}: {START}")
    return words


def join(backend):
    """The process group of torchrun's environment -> the store where its ranks met. UserError where nobody comes."""
    words, until = environment(), time.monotonic() + MEETING
    try:
        while os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            try:  # is rank 0, or torchrun, there? PyTorch's own wait is longer than it is told, with stack traces
                socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)
        left = timedelta(seconds=max(1.0, until - time.monotonic()))
        store, rank, world_size = next(dist.rendezvous("env://", timeout=left))
    except (OSError, RuntimeError) as error:
        raise UserError(f"the environment has {words}, but the ranks don't find each other within {MEETING} s "
                        f"({first_line(error)}): {START}") from None
    store.set_timeout(PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    return store
