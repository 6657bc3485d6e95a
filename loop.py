"""What the training loops share: optimizer steps that all ranks take or skip, the seconds of an iteration's phases."""

import math
import time
from contextlib import contextmanager

import torch

import fsdp
from guard import UserError


def due(interval, step, last):
    """Whether something done every `interval` steps (0: only at the end) comes after a step."""
    return step == last or (interval > 0 and step % interval == 0)


class OptimizerSteps:
    """Optimizer steps that all ranks take, or all skip: where a loss or the gradient isn't finite on any of them.

    .skipped counts those of the run; after max_bad_steps in a row of an expert the run ends with a UserError.
    """

    def __init__(self, optimizer, parameters, grad_clip, max_bad_steps, skipped=0):
        self.optimizer, self.parameters, self.grad_clip = optimizer, list(parameters.values()), grad_clip
        self.max_bad_steps, self.skipped, self.in_a_row = max_bad_steps, skipped, {}  # of each expert

    def step(self, loss, experts, where, blame):
        """Clip the gradients, step, clear them -> (gradient norm, the same on all ranks; was the step taken?).

        loss: this rank's, a float; experts: names of those that the step trains; where: "step 12", for a message;
        blame: () -> what isn't finite. Collective.
        """
        grad_norm = fsdp.full_tensor(torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)).item()
        taken = math.isfinite(fsdp.reduce_sum([loss + grad_norm])[0])
        if taken:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += not taken
        self.in_a_row |= {expert: 0 if taken else self.in_a_row.get(expert, 0) + 1 for expert in experts}
        if not taken:
            culprit = blame()
            fsdp.say(f"warning    {where}: gradient norm {grad_norm:.3g}: skipped on all ranks; not finite: {culprit}")
            with fsdp.all_ranks_agree():
                expert = max(experts, key=self.in_a_row.get)
                if self.in_a_row[expert] >= self.max_bad_steps:
                    raise UserError(f"{where}: {self.in_a_row[expert]} non-finite steps in a row of expert {expert}, "
                                    f"the last one's in {culprit}: resume with a lower lr, or look at these")
        return grad_norm, taken


class Phases:
    """Seconds and peak GiB of the parts of an iteration: `with phases("roll"):` adds to phases.spent["roll"]."""

    def __init__(self, device):
        self.device, self.spent = device, {}

    def begin(self):
        """A new iteration: what was spent before, and the memory's peak of loading or an evaluation, is forgotten."""
        self.spent = {}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def add(self, name, seconds, peak=0.0):
        before = self.spent.get(name, (0.0, 0.0))
        self.spent[name] = before[0] + seconds, max(before[1], peak)

    def _now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # with the GPU's queue empty
        return time.perf_counter()

    @contextmanager
    def __call__(self, name):
        started = self._now()
        yield
        self.add(name, self._now() - started)
        if self.device.type == "cuda":
            self.add(name, 0.0, torch.cuda.max_memory_allocated() / 2**30)
            torch.cuda.reset_peak_memory_stats()

    def row(self):
        """{"seconds/roll": 8.1, "gib/roll": 18.6, ...} for the log."""
        return ({f"seconds/{name}": seconds for name, (seconds, _) in self.spent.items()}
                | {f"gib/{name}": peak for name, (_, peak) in self.spent.items() if peak})

    def line(self):
        """"roll 8.1 s train 3.2 s | roll 18.6 train 31.3 GiB"."""
        line = " ".join(f"{name} {seconds:.1f} s" for name, (seconds, _) in self.spent.items())
        if self.device.type == "cuda":
            line += " | " + " ".join(f"{name} {peak:.1f}" for name, (_, peak) in self.spent.items()) + " GiB"
        return line
