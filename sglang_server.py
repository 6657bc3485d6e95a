"""Start SGLang's diffusion server for rollouts of train_grpo.py.

    make sglang                                                   # its own environment, .venv-sglang: minutes, 11 GB
    make serve MODEL=Wan-AI/Wan2.2-TI2V-5B-Diffusers              # = python sglang_server.py --model=... in that folder
    python sglang_server.py --model=out/my_ti2v/model --devices=1 --port=30000 --args="--tp-size 1"

train_grpo.py --rollout=sglang --sglang_urls=http://127.0.0.1:30000 then asks it for rollouts; with --sglang_launch=True
it starts one by itself with the same function, restarts it when it dies, and ends it with the run.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import encoders
import model as wan_model
import web
from configurator import check_values, configure
from guard import UserError, write_atomic
from web import ServerError

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")
CONFIGURATIONS = {  # (kind, experts) -> the released model whose configuration sglang uses for it
    ("ti2v", 1): "Wan2.2-TI2V-5B-Diffusers",
    ("i2v", 2): "Wan2.2-I2V-A14B-Diffusers",
    ("t2v", 2): "Wan2.2-T2V-A14B-Diffusers",
    ("t2v", 1): "Wan2.1-T2V-1.3B-Diffusers",
}

PORT_TAKEN = "address already in use|port .* unavailable"  # in sglang's log
TORCHRUN = "TORCHELASTIC|TORCH_NCCL|(MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME)$"  # sets
WORKER_GONE = "restart the server"  # in the answer of a server that can't work any more

model = ""  # diffusers folder or hub id
port = 30000  # of HTTP, on 127.0.0.1; port + 1, + 10 and + 20 are used inside the server
devices = ""  # CUDA_VISIBLE_DEVICES; "": as they are
dtype = "bfloat16"  # "float32" | "bfloat16": of the transformer
shift = 5.0  # of the noise levels; the trainer's
command = ".venv-sglang/bin/sglang serve"  # what starts the server
args = ""  # more arguments for it, e.g. "--tp-size 2 --num-gpus 2"; "--host ..." opens it to everyone who reaches it


def free_port(port):
    """The first of port, port + 50, port + 100, ... whose ports are all free."""
    for first in range(port, min(port + 2000, 65000), 50):
        try:
            for offset in (0, 1, 10, 20):
                socket.create_server(("127.0.0.1", first + offset)).close()  # free, too, where a server just left
            return first
        except OSError:
            continue
    raise UserError(f"port={port}: no free ones from there to {port + 2000}")


def check(model, port, command, args):
    """UserError for a model that SGLang's servers don't know, and for a port or words that can't start one."""
    if model.startswith("random:"):
        raise UserError(f"model={model}: SGLang's servers want a diffusers folder or hub id")
    if (name := encoders.vae_config(model)["_class_name"]) != "AutoencoderKLWan":
        raise UserError(f"model={model}: its VAE is {name}, SGLang's servers know AutoencoderKLWan only")
    if not 1 <= port <= 65000:
        raise UserError(f"port={port}: want 1 to 65000")
    try:
        shlex.split(args)
        program = shlex.split(command)
    except ValueError as error:
        raise UserError(f"command={command!r}, args={args!r}: {error}: want words as a shell takes them") from None
    if not program:
        raise UserError("command is empty: want what starts SGLang, as in .venv-sglang/bin/sglang serve")


def start(model, port, devices, dtype, shift, command, args, **popen):
    """Start a server process in a session of its own -> (subprocess.Popen, what the server calls its launcher).

    It isn't ready yet. Raises UserError.
    """
    launcher = f"{os.getpid()}-{time.time_ns()}"
    wan, program = wan_model.describe(model), shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if not re.match(TORCHRUN, name)}
    environment |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "nanowan_shim", "NANOWAN_LAUNCHER": launcher,
                    "PYTHONPATH": f"{SHIM}:{environment.get('PYTHONPATH', '')}".rstrip(":")}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    # Dynamic LoRA: merged into bf16 weights, what is below half a bf16 step of a weight would be rounded away.
    flags = (f"--model-type diffusion --model-path {shlex.quote(model)} --host 127.0.0.1 --port {port} "
             f"--master-port {port + 10} --scheduler-port {port + 20} --strict-ports --sleep-on-idle --warmup-mode off "
             f"--dit-precision {precision} --flow-shift {shift} --lora-merge-mode dynamic "
             f"--model-id {CONFIGURATIONS[wan.kind, len(wan.expert_names)]}")
    try:
        return subprocess.Popen([*program, *shlex.split(flags), *shlex.split(args)], env=environment,
                                stdin=subprocess.DEVNULL, start_new_session=True, **popen), launcher
    except OSError as error:
        raise UserError(f"{program[0]}: {error.strerror}: want SGLang's environment, which `make sglang` "
                        "makes") from None


def end(process):
    """End a server with all processes it started: ten seconds to leave, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def request(url, body=None, timeout=30, run=""):
    """GET, or POST of JSON of a run -> the answer's bytes. ServerError where it may pass by itself, else UserError."""
    data = None if body is None else json.dumps(body).encode()
    code, _, said = web.request(url, data, {"Content-Type": "application/json", "run": run}, timeout)
    if code < 300:
        return said
    reason = f"{url} answered {code}: {said[:400].decode(errors='replace')}"
    if code < 500:
        raise UserError(reason)
    raise ServerError(reason, gone=WORKER_GONE in reason)


def health(url):
    """-> "up"; "dead": its HTTP process answers that the worker behind it is gone; "away": nobody answers."""
    try:
        request(f"{url}/health", timeout=5)
        return "up"
    except UserError as error:
        return "dead" if WORKER_GONE in str(error) else "away"


def started_by(launcher, url):
    """Whether the server there is the one that `start` started."""
    try:
        return request(f"{url}/nanowan").decode() == launcher
    except ValueError:  # another kind of server
        return False


class LaunchedServer:
    """A server that belongs to this run: started, waited for, restarted at most sglang_retries times, ended with it.

    config: train_grpo.py's settings. place: path of its .log, and of a .url that tells the other ranks of the node
    where it is: nothing while it isn't up, or "error ..." once it is given up. The URL is written when `ready(url)` has
    returned, which checks the server and gives it the latest LoRA: nobody gets a rollout of a policy that it doesn't
    hold yet. `stopping()`: whether the run was asked to stop.
    """

    def __init__(self, place, config, ready, stopping):
        self.log_path, self.url_file, self.ready, self.stopping = f"{place}.log", Path(f"{place}.url"), ready, stopping
        self.config, self.restarts, self.port = config, config["sglang_retries"], config["sglang_port"]
        self.ending = threading.Event()
        write_atomic(self.url_file, b"")
        open(self.log_path, "wb").close()
        self._start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self, attempts=3):
        """At the first free ports, or further up where somebody takes one of them while the server loads."""
        config, self.port = self.config, free_port(self.port)
        with open(self.log_path, "ab") as log:
            self.log_start = log.tell()  # after what a server before it said
            self.process, launcher = start(config["model"], self.port, config["sglang_devices"], config["dtype"],
                                           config["shift"], config["sglang_command"], config["sglang_args"],
                                           stdout=log, stderr=log)
        self.url, until = f"http://127.0.0.1:{self.port}", time.time() + config["sglang_timeout"]
        try:
            while (state := health(self.url)) != "up":
                if self.process.poll() is not None or state == "dead":
                    raise UserError(f"the SGLang server ended (code {self.process.poll()}): {self.tail()}")
                if time.time() > until:
                    raise UserError(f"SGLang's server isn't up after sglang_timeout={config['sglang_timeout']:g} s: "
                                    + self.tail())
                if self.ending.wait(0.5) or self.stopping():
                    raise UserError("stopped while the SGLang server was starting")
            if not started_by(launcher, self.url):
                raise UserError(f"port {self.port} unavailable: another server answers there, or sglang_command "
                                "keeps NANOWAN_LAUNCHER from its server")
            self.ready(self.url)
        except BaseException as error:
            end(self.process)
            if attempts == 1 or not re.search(PORT_TAKEN, str(error), re.IGNORECASE):
                raise
            self.port += 50
            return self._start(attempts - 1)
        write_atomic(self.url_file, self.url.encode())

    def tail(self):
        """The end of the log, for an error's one line."""
        with open(self.log_path, "rb") as log:
            log.seek(max(self.log_start, os.path.getsize(self.log_path) - 2_000_000))
            text = re.sub(r"\x1b\[[0-9;]*m", "", log.read().decode(errors="replace"))  # colours
        answered = r'"[A-Z]+ \S+ HTTP/[\d.]+" \d'
        lines = [line for line in text.splitlines() if line.strip() and not re.search(answered, line)]
        telling = [line for line in lines if re.search(r"Error\b|ERROR", line)] or lines or ["nothing"]
        return f"{telling[-1].strip()[-300:]} (the rest is in {self.log_path})"

    def _watch(self):
        while not self.ending.wait(1.0):
            if self.process.poll() is None and health(self.url) != "dead":
                continue
            write_atomic(self.url_file, b"")
            code = self.process.poll()
            cause = "its worker" if code is None else f"code {code}"
            end(self.process)  # what it left running
            try:
                if self.restarts == 0:
                    raise UserError(f"the SGLang server died once more than sglang_retries allows: {self.tail()}")
                self.restarts -= 1
                print(f"SGLang server died ({cause}): {self.tail()}; restarting it", file=sys.stderr, flush=True)
                self.port += 50  # another URL, so that nobody takes it for the one before
                self._start()
            except Exception as error:
                write_atomic(self.url_file, f"error {error}".encode())
                return

    def end(self):
        self.ending.set()
        end(self.process)


def main():
    if not model:
        raise UserError("model is empty: want --model=, a diffusers folder or hub id")
    check_values(dict(dtype=dtype), one_of=dict(dtype=("float32", "bfloat16")))
    check(model, port, command, args)
    if free_port(port) != port:
        raise UserError(f"port={port}: in use, or one of {port + 1}, {port + 10}, {port + 20}: want another")
    process, _ = start(model, port, devices, dtype, shift, command, args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = 0
    end(process)
    sys.exit(code if code >= 0 else 128 - code)  # as a shell tells of a signal


if __name__ == "__main__":
    configure(globals())
    main()
