import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import plot


def training_rows(num_steps=100):
    rows = []
    for step in range(num_steps):
        expert = "high" if step % 3 == 0 else "low"
        row = {"step": step, "expert": expert, "loss": 1 / (step + 1), "sigma": 0.5, "grad_norm": 0.4, "lr": 1e-4}
        rows.append(row)
        if step % 20 == 0:
            bins = {f"val_loss/sigma {low / 5:.1f}-{(low + 1) / 5:.1f}": low + 1.0 for low in range(5)}
            scores = {"psnr": 20.0, "ssim": 0.8, "point_mm": 9.0, "point_floor_mm": 4.0}
            rows.append({"step": step, "val_loss/high": 0.5, "val_loss/low": 0.25} | bins | scores)
    return rows


def grpo_rows():
    numbers = {"reward_std": 0.1, "kl": 1e-4, "clip_fraction": 0.02}
    rows = [{"step": step, "reward": step / 10} | numbers for step in range(10)]
    return [*rows, {"step": 9, "eval/motion": 0.7, "eval/sharpness": 0.5}]


def write(folder, rows, tail=""):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """drawn(folder) -> {panel title: {line label: y values}} of the figure that draw_curves saved."""
    figures = []
    savefig = Figure.savefig

    def spy(figure, path):
        figures.append(figure)
        savefig(figure, path)

    monkeypatch.setattr(Figure, "savefig", spy)

    def drawn(folder):
        path = plot.draw_curves(folder)
        assert path == folder / "curves.png" and Image.open(path).width > 400
        return {
            axes.get_title(): {line.get_label(): line.get_ydata() for line in axes.lines if line.get_label()[0] != "_"}
            for axes in figures.pop().axes
        }

    return drawn


def test_fine_tuning_panels(tmp_path, drawn):
    panels = drawn(write(tmp_path / "run", training_rows()))
    titles = ["training loss", "validation loss", "validation loss by noise level", "gradient norm"]
    assert [title for title in panels if title] == [*titles, "PSNR (dB)", "SSIM", "point error (mm)"]
    assert list(panels["validation loss"]) == ["high 0.5", "low 0.25"]
    assert list(panels["validation loss by noise level"])[0] == "sigma 0.0-0.2 1"
    assert list(panels["point error (mm)"]) == ["point_mm 9", "VAE round trip 4"]
    high, low = panels["training loss"].values()
    assert len(high) == 34 and len(low) == 66
    assert np.isclose(low[30], np.mean([1 / (step + 1) for step in (44, 46, 47)]))  # of 66 steps: a mean over three


def test_grpo_panels(tmp_path, drawn):
    panels = drawn(write(tmp_path / "run", grpo_rows()))
    assert list(panels) == ["training reward", "held-out rewards", "KL to the reference", "clip fraction"]
    assert list(panels["held-out rewards"]) == ["motion 0.7", "sharpness 0.5"]
    assert np.allclose(panels["training reward"]["reward 0.9"], np.arange(10) / 10)


def test_broken_lines_are_skipped(tmp_path):
    folder = write(tmp_path / "run", [{"step": 0, "loss": 1.0}], tail='3\n{"loss": 1}\n\n{"step": 1, "lo')
    assert plot.read_metrics(folder / "metrics.jsonl") == [{"step": 0, "loss": 1.0}]


def test_resumed_run_replaces_what_it_repeats(tmp_path):
    steps = [0, 1, 2, 3, 2, 3, 4]
    folder = write(tmp_path / "run", [{"step": step, "try": index} for index, step in enumerate(steps)])
    rows = plot.read_metrics(folder / "metrics.jsonl")
    assert [(row["step"], row["try"]) for row in rows] == [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6)]


def test_odd_values(tmp_path, drawn):
    values = [1.0, math.nan, math.inf, None, "x", 0.5]
    rows = [{"step": step, "expert": "high", "loss": value} for step, value in enumerate(values)]
    assert drawn(write(tmp_path / "run", rows))["training loss"]["high 0.5"].tolist() == [1.0, 0.5]
    assert drawn(write(tmp_path / "empty", [])) == {}


def test_the_log_is_strict_json(tmp_path, drawn):
    def refuse(constant):
        raise AssertionError(f"{constant} isn't JSON")

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": Infinity}\n')  # of an earlier version
    log = plot.MetricsLog(tmp_path, start_step=1)
    log.write({"step": 2, "expert": "high", "loss": math.nan, "grad_norm": math.inf, "gib": 1.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 1, "loss": None}, {"step": 2, "expert": "high", "loss": None, "grad_norm": None, "gib": 1.5}
    ]
    assert "gradient norm" in drawn(tmp_path)


def test_command(tmp_path):
    runs = [write(tmp_path / "a", training_rows(3)), write(tmp_path / "b", grpo_rows())]
    script = Path(plot.__file__)
    result = subprocess.run([sys.executable, script, *runs], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [str(run / "curves.png") for run in runs]
    assert all((run / "curves.png").is_file() for run in runs)
    result = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr == f"error: {tmp_path}: got no metrics.jsonl there, want the out_dir of a run\n"


def test_mean_of_several_runs(tmp_path, capsys):
    for run, last in (("a", 0.6), ("b", 0.8)):
        (tmp_path / run).mkdir()
        rows = [{"step": 0, "eval/ball": 0.3}, {"step": 5, "reward": 1.0}, {"step": 10, "eval/ball": last}]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = plot.draw_mean(tmp_path / "mean.png", [tmp_path / "a", tmp_path / "b"])
    assert path.stat().st_size > 1000
    assert capsys.readouterr().out == "eval/ball: 0.300 +- 0.000 -> 0.700 +- 0.100, 2 runs\n"


def test_a_mean_is_over_the_same_steps_of_all_runs(tmp_path, capsys):
    for run, steps in (("a", (0, 25, 50, 75, 100)), ("b", (0, 50, 100)), ("c", (1, 2))):
        (tmp_path / run).mkdir()
        rows = [{"step": step, "eval/ball": step / 100} for step in steps]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot.draw_mean(tmp_path / "mean.png", [tmp_path / "a", tmp_path / "b"])
    assert capsys.readouterr().out == "eval/ball: 0.000 +- 0.000 -> 1.000 +- 0.000, 2 runs\n"
    for path, others, words in [
        ("mean.png", "ac", "got no step at which all of them have eval/ball"),
        ("nowhere/mean.png", "ab", "nowhere/mean.png: "), ("mean.xyz", "ab", "mean.xyz: "),
    ]:
        with pytest.raises(SystemExit, match=words):
            plot.draw_mean(tmp_path / path, [tmp_path / run for run in others])


def test_log_drops_what_comes_after_the_step_a_run_resumes_from(tmp_path):
    log = plot.MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    log.write({"step": 2, "val_loss/high": 0.5})
    resumed = plot.MetricsLog(tmp_path, 2)
    assert [row["step"] for row in plot.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert resumed.holds(2, "val_loss") and not resumed.holds(1, "val_loss") and not resumed.holds(3, "loss")
    plot.MetricsLog(tmp_path)  # a new run begins a new file
    assert not (tmp_path / "metrics.jsonl").read_text()
