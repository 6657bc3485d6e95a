"""Draw a run's metrics.jsonl as curves.png beside it, or several runs in one picture.

python plot.py out/tiny_i2v                                       # one run: out/tiny_i2v/curves.png
python plot.py out/run_a out/run_b [--out=both.png]               # together, named by the settings that differ
python plot.py --mean=seeds.png out/grpo_0 out/grpo_1 out/grpo_2  # held-out numbers of several seeds and their mean
"""

import json
import math
import sys
import textwrap
from functools import reduce
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from guard import UserError, read_json, show_error, speak_utf8, whole, write_atomic, writing

COLOURS = {"high": "tab:red", "low": "tab:blue", "reward": "tab:green", "grad_norm": "tab:purple"}  # of one run
SIGMA_BIN = "val_loss/sigma "
PANELS = {  # the key that calls for a panel, or the beginning of such keys -> its title
    "reward": "training reward",
    "eval/": "held-out rewards",
    "loss/": "training loss",
    "val_loss/": "validation loss",
    SIGMA_BIN: "validation loss by noise level",
    "grad_norm": "gradient norm",
    "psnr": "PSNR (dB)",
    "moved_psnr": "PSNR of what moved (dB)",
    "ssim": "SSIM",
    "point_mm": "point error (mm)",
    "point_median_mm": "median point error (mm)",
    "success": "success",
    "kl": "KL to the reference",
    "clip_fraction": "clip fraction",
    "ratio_std": "spread (std) of the policy's ratio",
    "drift/ratio": "the sampler's ratio off 1, at worst",
}
BOUNDS = {"floor": ("floor, frame repeated", "--"), "ceiling": ("ceiling, VAE round trip", ":")}  # of a score
NOISY = {"reward", "loss", "grad_norm", "kl", "clip_fraction", "ratio_std", "drift"}  # drawn with a running mean
ASIDE = {  # settings of where a run lies and what it keeps: no number depends on them
    "out_dir", "resume", "dry_run", "cache_dir", "keep_in_memory", "save_interval", "keep_last", "sglang_urls",
    "sglang_port", "sglang_devices", "trainer_devices", "lora_sync_dir",
}


class MetricsLog:
    """Appends lines to out_dir/metrics.jsonl; those of steps after the one a run resumes from are dropped first."""

    def __init__(self, out_dir, start_step=0):
        self.path, self.kept = Path(out_dir, "metrics.jsonl"), []
        if self.path.exists() and start_step:
            self.kept = [row for row in read_metrics(out_dir) if row["step"] <= start_step]
        elif self.path.exists():
            self.path.replace(self.path.with_suffix(".jsonl.old"))  # of a run whose checkpoints are gone
        write_atomic(self.path, "".join(map(_as_line, self.kept)).encode())

    def holds(self, step, prefix):
        """Whether the log that a run resumes with has a key with this prefix at a step."""
        return any(row["step"] == step and any(key.startswith(prefix) for key in row) for row in self.kept)

    def write(self, row):
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(_as_line(row))


def _as_line(row):
    """A row as strict JSON, which has no NaN: a number of a skipped step is null."""
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(out_dir):
    """A run's metrics.jsonl -> list of dicts in step order. A line cut short by a kill is skipped.

    Where a resumed run starts again at an earlier step, its lines replace the old ones from that step on.
    """
    rows = []
    for line in Path(out_dir, "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        if rows and row["step"] < rows[-1]["step"]:
            rows = [old for old in rows if old["step"] < row["step"]]
        rows.append(row)
    return rows


def _keys(logs, wanted):
    """The keys of a panel that hold numbers in some log, sorted: wanted, or all that begin with it ("eval/")."""
    keys = sorted({key for rows in logs for row in rows for key in row}) if wanted[-1] in "/ " else [wanted]
    keys = [key for key in keys if key.startswith(wanted) and (wanted == SIGMA_BIN or "/sigma " not in key)]
    return [key for key in keys if any(_series(rows, key).size for rows in logs)]


def _figure(titles):
    """A figure with a panel for each title, in up to three columns -> figure, axes of each."""
    columns = min(3, max(1, len(titles)))
    lines = max(1, math.ceil(len(titles) / columns))
    figure = Figure(figsize=(5 * columns, 3.4 * lines), dpi=110, layout="constrained")
    panels = [figure.add_subplot(lines, columns, n + 1, title=title, xlabel="step") for n, title in enumerate(titles)]
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _save(figure, path):
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    path, kinds = Path(path), figure.canvas.get_supported_filetypes()
    if (kind := path.suffix[1:].lower()) not in kinds:
        raise UserError(f"{path}: want a picture's name with one of .{', .'.join(kinds)}")
    with whole(path) as temporary:
        figure.savefig(temporary, format=kind)
    return path


def draw_curves(out_dir, path=None):
    """Draw out_dir/metrics.jsonl to out_dir/curves.png: a panel for each kind of number it holds; returns the path."""
    rows = read_metrics(out_dir)
    found = {wanted: keys for wanted in PANELS if (keys := _keys([rows], wanted))}
    figure, panels = _figure([PANELS[wanted] for wanted in found])
    for axes, (wanted, keys) in zip(panels, found.items(), strict=True):
        for index, key in enumerate(keys):
            name = key.partition("/")[2] or key
            shade = index / len(keys)  # blue for little noise to red for much, as the experts
            colour = (0.9 * shade, 0.2, 0.9 * (1 - shade)) if wanted == SIGMA_BIN else COLOURS.get(name)
            _line(axes, rows, key, name, color=colour)
            _bounds(axes, rows, key)
        if wanted == "grad_norm" and _keys([rows], "lr"):
            right = axes.twinx()
            right.set_ylabel("lr", color="gray")
            right.plot(*_series(rows, "lr"), color="gray", linewidth=1)
        if wanted == "reward":
            (steps, mean), (_, std) = _series(rows, "reward"), _series(rows, "reward_std")
            if len(mean) == len(std):
                axes.fill_between(steps, mean - std, mean + std, color="tab:green", alpha=0.12, linewidth=0)
    return _save(figure, path or Path(out_dir, "curves.png"))


def _series(rows, key):
    """Steps and finite values of a key."""
    points = [(row["step"], row[key]) for row in rows
              if isinstance(row.get(key), int | float) and math.isfinite(row[key])]
    return np.array(points, dtype=float).reshape(-1, 2).T  # 2 n


def _line(axes, rows, key, label, **style):
    """Plot a key, long noisy ones also as a running mean over a twentieth of their length -> its last value, or ""."""
    steps, values = _series(rows, key)
    if not len(steps):
        return ""
    width = len(steps) // 20 if key.split("/")[0] in NOISY else 0
    if width > 1:
        (raw,) = axes.plot(steps, values, alpha=0.25, linewidth=0.8, **style)
        style = style | {"color": raw.get_color()}
        window = np.ones(width)
        values = np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
    marker = "o" if len(steps) < 30 else None
    axes.plot(steps, values, marker=marker, markersize=3, label=f"{label} {values[-1]:.4g}".strip(), **style)
    if key == "grad_norm" and (values > 0).any():
        axes.set_yscale("log")
    return f"{values[-1]:.4g}"


def _bounds(axes, rows, key):
    """A score's floor and ceiling, where they are logged: it means something only between them."""
    for bound, (words, linestyle) in BOUNDS.items():
        for value in _series(rows, f"{bound}/{key}")[1][-1:]:
            label = f"{words} {value:.4g}"
            if label not in axes.get_legend_handles_labels()[1]:  # that of several runs once
                axes.axhline(value, color="gray", linestyle=linestyle, label=label)


def _what_differs(runs):
    """{setting: last 30 letters of its value, in ASCII} of each run, where they differ; {} without a config.json."""
    settings = []
    for path in (Path(run, "config.json") for run in runs):
        try:
            settings.append(dict(read_json(path, "a run's")["settings"]) if path.exists() else {})
        except (ValueError, KeyError, TypeError):
            sys.exit(f"error: {path}: got no settings in it, want it as the run wrote it: restore it, or remove it")
    known = [found for found in settings if found]
    names = [name for name in dict.fromkeys(name for found in known for name in found) if name not in ASIDE]
    names = [name for name in names if any(found.get(name) != known[0].get(name) for found in known)]
    return [{name: ascii(found.get(name, "not set")).strip("'")[-30:] for name in names if found} for found in settings]


def _labels(runs):
    """What to call each of several runs: by the first three settings that differ, else by its folder."""
    labels = []
    for run, found in zip(runs, _what_differs(runs), strict=True):
        texts = [f"{name}={value}" for name, value in found.items()]
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        labels.append(", ".join(texts[:3]) + more or Path(run).resolve().name)
    return [f"{run}: {label}" if labels.count(label) > 1 else label for run, label in zip(runs, labels, strict=True)]


def draw_together(path, runs):
    """Several runs in one picture, a panel a number and a colour a run; the legend has all last values, printed too."""
    logs, texts = [read_metrics(run) for run in runs], _labels(runs)
    ends = [max((row["step"] for row in rows), default=0) for rows in logs]
    styles = [{"color": f"C{n % 10}", "linestyle": ("-", "--", ":")[n // 10 % 3]} for n in range(len(runs))]
    found = [(wanted, key) for wanted in PANELS if wanted != SIGMA_BIN for key in _keys(logs, wanted)]
    titles = [PANELS[wanted] + (f": {key.removeprefix(wanted)}" if key != wanted else "") for wanted, key in found]
    figure, panels = _figure(titles)
    for n, rows in enumerate(logs):
        texts[n] += f" (ends at step {ends[n]}, the longest at {max(ends)})" if ends[n] < max(ends) else ""
        for axes, (_, key) in zip(panels, found, strict=True):
            if last := _line(axes, rows, key, "", **styles[n]):
                texts[n] += f" | {key}\xa0{last}"
        print(texts[n].replace("\xa0", " "))
    for axes, (_, key) in zip(panels, found, strict=True):
        for rows in logs:
            _bounds(axes, rows, key)
    texts = [textwrap.fill(text.replace("$", "\\$"), int(13 * figure.get_figwidth())) for text in texts]
    figure.set_figheight(figure.get_figheight() + 0.2 * len("\n".join(texts).splitlines()))  # the legend's room
    figure.legend([Line2D([], [], **style) for style in styles], texts, loc="outside upper left", fontsize="small")
    return _save(figure, path)


def draw_mean(path, runs):
    """Held-out numbers of several runs: each run thin, their mean thick, the last mean and spread (std) printed."""
    differ = [{name: value for name, value in found.items() if name != "seed"} for found in _what_differs(runs)]
    got = "; ".join(f"{run}: " + ", ".join(f"{name}={value}" for name, value in list(found.items())[:4])
                    for run, found in zip(runs, differ, strict=True) if found)
    if got:
        sys.exit(f"error: got settings that differ in more than the seed ({got}), want runs alike but for the seed: "
                 "leave some out, or draw them together, without --mean")
    logs = [read_metrics(run) for run in runs]
    keys = [key for key in _keys(logs, "eval/") + _keys(logs, "val_loss/")
            if all(_series(rows, key).size for rows in logs)]
    if not keys:
        sys.exit(f"error: {', '.join(map(str, runs))}: got no held-out number that all of them have")
    figure, panels = _figure(keys)
    for axes, key in zip(panels, keys, strict=True):
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
    return _save(figure, path)


if __name__ == "__main__":
    speak_utf8()
    sys.excepthook = show_error
    options = dict(arg.partition("=")[::2] for arg in sys.argv[1:] if arg.startswith("-"))
    runs = list(dict.fromkeys(arg for arg in sys.argv[1:] if not arg.startswith("-")))
    if not runs or {"-h", "--help"} & set(options):
        sys.exit(__doc__.strip())
    if len(options) > 1 or not {"--mean", "--out"}.issuperset(options) or "" in options.values():
        sys.exit(f"error: got {' '.join(options)}, want --mean=picture.png or --out=picture.png")
    for run in runs:
        if not Path(run, "metrics.jsonl").is_file():
            sys.exit(f"error: {run}: got no metrics.jsonl there, want the out_dir of a run")
    if "--mean" in options:
        print(draw_mean(options["--mean"], runs))
    elif len(runs) > 1:
        print(draw_together(options.get("--out", Path(runs[0], "curves_together.png")), runs))
    else:
        print(draw_curves(runs[0], options.get("--out")))
