"""Whose the server is: one training run's at a time, and which version of its LoRA it holds. Standard library only."""

import time


class Lease:
    """A run has the server while it goes on saying so. lora: the version that it says was synced, None in between."""

    def __init__(self):
        self.run, self.lora, self.holder, self.until = "", None, "", 0.0

    def tag(self):
        """What every answer tells: of which run and LoRA it is."""
        return f"{self.run}:{self.lora}"

    def refusal(self, run):
        """Why a request is refused, in words, or "". run: "" for nobody's. A holder that fell silent has lost it."""
        if self.run and run != self.run and time.monotonic() < self.until:
            return f"in use by {self.holder}"
        if run != self.run:
            self.run, self.lora = "", None
        return ""

    def told(self, said):
        """{"run", "name", "seconds", perhaps "lora"} -> why not, or "": the run has the server for so many seconds.

        Only with a "lora" it may be one that didn't have it before.
        """
        refusal = self.refusal(said["run"])
        if "lora" in said and not refusal:
            if not self.run:
                name = "".join(c for c in str(said["name"])[:300] if c.isprintable())
                self.run, self.holder = said["run"], f"{name} since {time.strftime('%d %b %H:%M:%S')}"
            self.lora = said["lora"]
        if said["run"] == self.run:
            self.until = time.monotonic() + said["seconds"]
        return refusal
