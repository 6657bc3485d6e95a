"""Draw a run's metrics.jsonl as curves.png beside it.

python plot.py out/tiny_i2v [out/another_run ...]
python plot.py --mean=seeds.png out/grpo_0 out/grpo_1 out/grpo_2    # held-out numbers of several seeds in one picture
"""

import json
import math
import sys
from functools import reduce
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COLOURS = {"high": "tab:red", "low": "tab:blue"}  # the two experts, in every panel
SIGMA_BIN = "val_loss/sigma "


class MetricsLog:
    """Appends lines to out_dir/metrics.jsonl; those of steps after the one a run resumes from are dropped first."""

    def __init__(self, out_dir, start_step=0):
        self.path = Path(out_dir, "metrics.jsonl")
        kept = [row for row in read_metrics(self.path) if row["step"] <= start_step] if self.path.exists() else []
        self.kept = kept if start_step else []
        if self.path.exists() and not start_step:
            self.path.replace(self.path.with_suffix(".jsonl.old"))  # of a run whose checkpoints are gone
        partial = self.path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(map(_as_line, self.kept)))
        partial.replace(self.path)

    def holds(self, step, prefix):
        """Whether the log that a run resumes with has a key with this prefix at a step."""
        return any(row["step"] == step and any(key.startswith(prefix) for key in row) for row in self.kept)

    def write(self, row):
        with open(self.path, "a") as file:
            file.write(_as_line(row))


def _as_line(row):
    """A row as strict JSON, which has no NaN: a number of a skipped step is null."""
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path):
    """metrics.jsonl -> list of dicts in step order.

    A line cut short by a kill is skipped. Where a resumed run starts again at an earlier step, its lines replace the
    old ones from that step on.
    """
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        if rows and row["step"] < rows[-1]["step"]:
            rows = [old for old in rows if old["step"] < row["step"]]
        rows.append(row)
    return rows


def draw_curves(out_dir):
    """Draw out_dir/metrics.jsonl to out_dir/curves.png: a panel for each kind of number it holds; returns the path."""
    rows = read_metrics(Path(out_dir, "metrics.jsonl"))
    keys = list(dict.fromkeys(key for row in rows for key in row))
    panels = [(title, draw) for title, wants, draw in PANELS if any(key.startswith(wants) for key in keys)]
    columns = min(3, max(1, len(panels)))
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(5 * columns, 3.4 * lines), dpi=110, layout="constrained")
    for index, (title, draw) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1, title=title, xlabel="step")
        axes.grid(alpha=0.3)
        draw(axes, rows, keys)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    path = Path(out_dir, "curves.png")
    figure.savefig(path)
    return path


def _series(rows, key, expert=None):
    """Steps and finite values of a key, of one expert's lines if given."""
    points = [(row["step"], row[key]) for row in rows if key in row and expert in (None, row.get("expert"))]
    points = [(step, value) for step, value in points if isinstance(value, int | float) and math.isfinite(value)]
    return np.array(points, dtype=float).reshape(-1, 2).T  # 2 n


def _line(axes, rows, key, label=None, expert=None, smooth=True, **style):
    """Plot a key, named with its last value; long series also as a running mean over a twentieth of their length."""
    steps, values = _series(rows, key, expert)
    if not len(steps):
        return
    width = len(steps) // 20 if smooth else 0
    if width > 1:
        (raw,) = axes.plot(steps, values, alpha=0.25, linewidth=0.8, **style)
        style = style | {"color": raw.get_color()}
        window = np.ones(width)
        values = np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
    marker = "o" if len(steps) < 30 else None
    axes.plot(steps, values, marker=marker, markersize=3, label=f"{label or key} {values[-1]:.4g}", **style)


def _training_loss(axes, rows, keys):
    experts = list(dict.fromkeys(row.get("expert") for row in rows if "loss" in row))
    for expert in experts:
        _line(axes, rows, "loss", label=expert or "loss", expert=expert, color=COLOURS.get(expert))


def _validation_loss(axes, rows, keys):
    for key in [key for key in keys if key.startswith("val_loss") and not key.startswith(SIGMA_BIN)]:
        name = key.removeprefix("val_loss/")
        _line(axes, rows, key, label=name, smooth=False, color=COLOURS.get(name))


def _sigma_bins(axes, rows, keys):
    bins = sorted(key for key in keys if key.startswith(SIGMA_BIN))
    for index, key in enumerate(bins):
        _line(axes, rows, key, key.removeprefix("val_loss/"), smooth=False, color=_shade(index / len(bins)))


def _shade(fraction):
    return (0.9 * fraction, 0.2, 0.9 * (1 - fraction))  # blue for little noise to red for much, as the experts


def _gradient(axes, rows, keys):
    _line(axes, rows, "grad_norm", color="tab:purple")
    if any((row.get("grad_norm") or 0) > 0 for row in rows):
        axes.set_yscale("log")
    if "lr" in keys:
        right = axes.twinx()
        right.set_ylabel("lr", color="gray")
        right.plot(*_series(rows, "lr"), color="gray", linewidth=1)


def _points(axes, rows, keys):
    _line(axes, rows, "point_mm", smooth=False, color="tab:green")
    _line(axes, rows, "point_floor_mm", "VAE round trip", smooth=False, color="gray", linestyle="--")


def _reward(axes, rows, keys):
    _line(axes, rows, "reward", color="tab:green")
    paired = [row for row in rows if "reward_std" in row and "reward" in row]
    (steps, mean), (_, std) = _series(paired, "reward"), _series(paired, "reward_std")
    if len(mean) == len(std):
        axes.fill_between(steps, mean - std, mean + std, color="tab:green", alpha=0.12, linewidth=0)


def _held_out(axes, rows, keys):
    for key in [key for key in keys if key.startswith("eval/")]:
        _line(axes, rows, key, label=key.removeprefix("eval/"), smooth=False)


def _one(key, smooth=True):
    return lambda axes, rows, keys: _line(axes, rows, key, smooth=smooth)


PANELS = (  # title, prefixes of the keys that call for it, how to draw it
    ("training reward", ("reward",), _reward),
    ("held-out rewards", ("eval/",), _held_out),
    ("training loss", ("loss",), _training_loss),
    ("validation loss", ("val_loss",), _validation_loss),
    ("validation loss by noise level", (SIGMA_BIN,), _sigma_bins),
    ("gradient norm", ("grad_norm",), _gradient),
    ("PSNR (dB)", ("psnr",), _one("psnr", smooth=False)),
    ("SSIM", ("ssim",), _one("ssim", smooth=False)),
    ("point error (mm)", ("point_mm",), _points),
    ("KL to the reference", ("kl",), _one("kl")),
    ("clip fraction", ("clip_fraction",), _one("clip_fraction")),
)


def draw_mean(path, runs, prefixes=("eval/", "val_loss/")):
    """Held-out numbers of several runs: each run thin, their mean thick, the last mean and spread (std) printed."""
    logs = [read_metrics(Path(run, "metrics.jsonl")) for run in runs]
    keys = list(dict.fromkeys(key for row in logs[0] for key in row if key.startswith(prefixes)))
    keys = [key for key in keys if not key.startswith(SIGMA_BIN) and all(_series(rows, key).size for rows in logs)]
    if not keys:
        sys.exit(f"error: {', '.join(map(str, runs))}: got no held-out number that all of them have")
    figure = Figure(figsize=(5 * len(keys), 3.4), dpi=110, layout="constrained")
    for index, key in enumerate(keys):
        axes = figure.add_subplot(1, len(keys), index + 1, title=key, xlabel="step")
        axes.grid(alpha=0.3)
        series = [_series(rows, key) for rows in logs]
        for steps, values in series:
            axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1)
        shared = reduce(np.intersect1d, [steps for steps, _ in series])
        if not len(shared):
            sys.exit(f"error: {', '.join(map(str, runs))}: got no step at which all of them have {key}")
        together = np.stack([values[np.searchsorted(steps, shared)] for steps, values in series])
        axes.plot(shared, together.mean(0), color="tab:blue", linewidth=2.5, marker="o", markersize=3)
        first, last = (f"{ends.mean():.3f} +- {ends.std():.3f}" for ends in (together[:, 0], together[:, -1]))
        print(f"{key}: {first} -> {last}, {len(runs)} runs")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: {error}: want a picture in a folder that is there, as in out/mean.png")
    return path


if __name__ == "__main__":
    options = [arg for arg in sys.argv[1:] if arg.startswith("-")]
    runs = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    if not runs or any(not option.startswith("--mean=") for option in options):
        sys.exit(__doc__.strip())
    for run in runs:
        if not Path(run, "metrics.jsonl").is_file():
            sys.exit(f"error: {run}: got no metrics.jsonl there, want the out_dir of a run")
    if options:
        print(draw_mean(options[-1].removeprefix("--mean="), runs))
    else:
        for run in runs:
            print(draw_curves(run))
