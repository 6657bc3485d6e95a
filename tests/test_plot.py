import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import plot
from guard import UserError


def training_rows(num_steps=100):
    rows = []
    for step in range(num_steps):
        expert = "high" if step % 3 == 0 else "low"
        row = {"step": step, f"loss/{expert}": 1 / (step + 1), "sigma": 0.5, "grad_norm": 0.4, "lr": 1e-4}
        rows.append(row)
        if step % 20 == 0:
            bins = {f"val_loss/sigma {low / 5:.1f}-{(low + 1) / 5:.1f}": low + 1.0 for low in range(5)}
            scores = {"psnr": 20.0, "ssim": 0.8, "point_mm": 9.0, "ceiling/point_mm": 4.0}
            rows.append({"step": step, "val_loss/high": 0.5, "val_loss/low": 0.25} | bins | scores)
    return rows


def grpo_rows():
    numbers = {"reward_std": 0.1, "ratio": 1.0, "clip_fraction": 0.02, "kl": 1e-4, "grad_norm": 1e-3, "loss": 3e-9}
    rows = [{"step": step, "reward": step / 10} | numbers | {"reward/ball": 0.5, "lr": 1e-3} for step in range(10)]
    return [*rows, {"step": 9, "eval/motion": 0.7, "eval/sharpness": 0.5}]


def short_rows(psnr=24.0, num_steps=4):
    """Of a run that logs one line, with the scores' floor and ceiling beside them."""
    bounds = {"floor/psnr": 20.0, "ceiling/psnr": 28.0, "floor/success": 0.0, "ceiling/success": 1.0}
    rows = [{"step": num_steps, "expert": "low", "loss": 9.0, "loss/low": 0.5, "loss/high": 0.75, "grad_norm": 0.2}]
    return [*rows, {"step": num_steps, "psnr": psnr, "success": 0.25, "val_loss/sigma 0.3": 0.5} | bounds]


def write(folder, rows, tail="", **settings):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    if settings:
        text = json.dumps({"settings": settings | {"out_dir": str(folder)}}, ensure_ascii=False)
        (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}


@pytest.fixture
def figures(monkeypatch):
    """The figures saved, in order."""
    saved = []
    savefig = Figure.savefig

    def spy(figure, path, **options):
        saved.append(figure)
        savefig(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", spy)
    return saved


@pytest.fixture
def drawn(figures):
    """drawn(folder) -> {panel title: {line label: y values}} of the figure that draw_curves saved."""

    def drawn(folder):
        path = plot.draw_curves(folder)
        assert path == folder / "curves.png" and Image.open(path).width > 400
        return {
            axes.get_title(): {label: line.get_ydata() for label, line in lines_of(axes).items()}
            for axes in figures.pop().axes
        }

    return drawn


def run_script(*args, **env):
    return subprocess.run([sys.executable, plot.__file__, *map(str, args)], capture_output=True, text=True,
                          timeout=120, env=os.environ | env)


def test_fine_tuning_panels(tmp_path, drawn):
    panels = drawn(write(tmp_path / "run", training_rows()))
    titles = ["training loss", "validation loss", "validation loss by noise level", "gradient norm"]
    assert "" in panels  # lr, on the right of the gradient norm
    assert [title for title in panels if title] == [*titles, "PSNR (dB)", "SSIM", "point error (mm)"]
    assert list(panels["validation loss"]) == ["high 0.5", "low 0.25"]
    assert list(panels["validation loss by noise level"])[0] == "sigma 0.0-0.2 1"
    assert list(panels["point error (mm)"]) == ["point_mm 9", "ceiling, VAE round trip 4"]
    high, low = panels["training loss"].values()
    assert len(high) == 34 and len(low) == 66
    assert np.isclose(low[30], np.mean([1 / (step + 1) for step in (44, 46, 47)]))  # of 66 steps: a mean over three


def test_grpo_panels(tmp_path, drawn):
    panels = drawn(write(tmp_path / "run", grpo_rows()))
    titles = ["training reward", "held-out rewards", "gradient norm", "KL to the reference", "clip fraction"]
    assert [title for title in panels if title] == titles  # no training loss: it is noise
    assert list(panels["KL to the reference"]) == ["kl 0.0001"] and list(panels["gradient norm"]) == ["grad_norm 0.001"]
    assert list(panels["held-out rewards"]) == ["motion 0.7", "sharpness 0.5"]
    assert np.allclose(panels["training reward"]["reward 0.9"], np.arange(10) / 10)


def test_spread_and_drift_of_the_ratio(tmp_path, drawn):
    panels = drawn(write(tmp_path / "run", [{"step": 1, "reward": 0.5, "ratio_std": 0.25, "drift/ratio": 0.125}]))
    assert list(panels["spread (std) of the policy's ratio"]) == ["ratio_std 0.25"]
    assert list(panels["the sampler's ratio off 1, at worst"]) == ["ratio 0.125"]


def test_means_of_both_experts_in_a_short_run(tmp_path, drawn):
    panels = drawn(write(tmp_path / "run", short_rows()))
    assert panels["training loss"] == {"high 0.75": [0.75], "low 0.5": [0.5]}  # not 9, one step's
    single = [{"step": 2, "expert": "single", "loss": 2.0, "loss/single": 1.5, "loss/sigma 0.0-0.2": 4.0}]
    assert drawn(write(tmp_path / "run", single)) == {"training loss": {"single 1.5": [1.5]}}


def test_floor_and_ceiling_of_a_score(tmp_path, figures):
    scores = {"psnr": "PSNR (dB)", "moved_psnr": "PSNR of what moved (dB)", "ssim": "SSIM", "success": "success",
              "point_mm": "point error (mm)", "point_median_mm": "median point error (mm)"}
    for key, title in scores.items():
        row = {"step": 0, key: 0.5, f"floor/{key}": 0.25, f"ceiling/{key}": 0.75, "floor/other": 1.0}
        plot.draw_curves(write(tmp_path / "run", [row, {"step": 5, key: 0.625}]))
        (axes,) = figures.pop().axes
        score, floor, ceiling = axes.lines
        assert axes.get_title() == title and list(score.get_ydata()) == [0.5, 0.625]
        assert list(lines_of(axes)) == [f"{key} 0.625", "floor, frame repeated 0.25", "ceiling, VAE round trip 0.75"]
        assert (floor.get_ydata(), floor.get_linestyle(), floor.get_color()) == ([0.25, 0.25], "--", "gray")
        assert (ceiling.get_ydata(), ceiling.get_linestyle(), ceiling.get_color()) == ([0.75, 0.75], ":", "gray")
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(lines_of(axes))


def test_runs_together(tmp_path, figures, capsys):
    a = write(tmp_path / "a", short_rows(), lr=1e-3, seed=0, num_frames=5)
    b = write(tmp_path / "b", short_rows(25.0, num_steps=2), lr=3e-3, seed=0, num_frames=5)
    path = plot.draw_together(tmp_path / "both.png", [a, b])
    (figure,) = figures
    assert path == tmp_path / "both.png" and Image.open(path).width > 400
    titles = ["training loss: high", "training loss: low", "gradient norm", "PSNR (dB)", "success"]
    assert [axes.get_title() for axes in figure.axes] == titles  # a number each, sigma bins left out
    labels = ["24", "25", "floor, frame repeated 20", "ceiling, VAE round trip 28"]  # the same of both, once
    assert [line.get_label() for line in figure.axes[3].lines] == labels
    legend = [" ".join(text.get_text().split()) for text in figure.legends[0].get_texts()]
    assert legend == capsys.readouterr().out.splitlines() == [
        "lr=0.001 | loss/high 0.75 | loss/low 0.5 | grad_norm 0.2 | psnr 24 | success 0.25",
        "lr=0.003 (ends at step 2, the longest at 4) | loss/high 0.75 | loss/low 0.5 | grad_norm 0.2 | psnr 25 | "
        "success 0.25",
    ]
    colours = [line.get_color() for line in figure.legends[0].get_lines()]
    assert colours == [line.get_color() for line in figure.axes[3].lines[:2]] == ["C0", "C1"]


def test_what_runs_are_called(tmp_path, monkeypatch):
    def labels(*runs):
        for name, settings in runs:
            write(tmp_path / name, [], **settings)
        return plot._labels([name for name, _ in runs])

    monkeypatch.chdir(tmp_path)
    same = dict(lr=1e-3, seed=0, law="flow", resume=True, save_interval=5)
    assert labels(("a", same), ("b", same | dict(resume=False, save_interval=7))) == ["a", "b"]
    assert labels(("a", same), ("b", same | dict(law="cps"))) == ["law=flow", "law=cps"]
    other = dict(lr=1.0, seed=1, law="cps", sde_window=[0, 5], fps=8)
    assert labels(("a", same), ("b", other)) == [
        "lr=0.001, seed=0, law=flow and 2 more", "lr=1.0, seed=1, law=cps and 2 more"
    ]
    assert labels(("a", same), ("b", same), ("c", same | dict(lr=0.5))) == ["a: lr=0.001", "b: lr=0.001", "lr=0.5"]
    assert labels(("a", dict(views="x," * 20 + "left")), ("bare", {})) == ["a", "bare"]  # of one nothing is known
    paths = labels(("a", dict(data="/a/long/way/to/the/folder/of/train.jsonl", fps=8)), ("b", dict(data="色", fps=8)))
    assert paths == ["data=y/to/the/folder/of/train.jsonl", "data=\\u8272"]
    assert labels(("a", dict(fps=8)), ("b", dict(fps=8, fork=1))) == ["fork=not set", "fork=1"]
    (tmp_path / "a" / "config.json").write_text('{"settings"')
    with pytest.raises(SystemExit, match="^error: a/config.json: got no settings in it, want it as the run wrote it"):
        plot._labels(["a", "b"])


def test_broken_lines_are_skipped(tmp_path):
    folder = write(tmp_path / "run", [{"step": 0, "loss": 1.0}], tail='3\n{"loss": 1}\n\n{"step": 1, "lo')
    assert plot.read_metrics(folder) == [{"step": 0, "loss": 1.0}]


def test_resumed_run_replaces_what_it_repeats(tmp_path):
    steps = [0, 1, 2, 3, 2, 3, 4]
    folder = write(tmp_path / "run", [{"step": step, "try": index} for index, step in enumerate(steps)])
    rows = plot.read_metrics(folder)
    assert [(row["step"], row["try"]) for row in rows] == [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6)]


def test_odd_values(tmp_path, drawn):
    values = [1.0, math.nan, math.inf, None, "x", 0.5]
    rows = [{"step": step, "loss/high": value} for step, value in enumerate(values)]
    assert drawn(write(tmp_path / "run", rows))["training loss"]["high 0.5"].tolist() == [1.0, 0.5]
    assert drawn(write(tmp_path / "empty", [])) == {}


def test_the_log_is_strict_json(tmp_path, drawn):
    def refuse(constant):
        raise AssertionError(f"{constant} isn't JSON")

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": Infinity}\n')  # of an earlier version
    log = plot.MetricsLog(tmp_path, start_step=1)
    log.write({"step": 2, "expert": "high", "loss": math.nan, "grad_norm": math.inf, "gib": 1.5})
    log.write({"step": 3, "grad_norm": 0.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 1, "loss": None}, {"step": 2, "expert": "high", "loss": None, "grad_norm": None, "gib": 1.5},
        {"step": 3, "grad_norm": 0.5}
    ]
    assert drawn(tmp_path) == {"gradient norm": {"grad_norm 0.5": [0.5]}}  # and none of numbers that aren't there


def test_command(tmp_path):
    def failed(*args):
        result = run_script(*args)
        assert result.returncode == 1 and result.stderr.count("\n") == 1 and not result.stdout
        return result.stderr

    a = write(tmp_path / "a", short_rows(), lr=1e-3, negative_prompt="色调艳丽")
    b = write(tmp_path / "b", short_rows(num_steps=2), lr=1e-3, negative_prompt="过曝")
    result = run_script(a)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{a}/curves.png\n", "")
    before = (a / "curves.png").read_bytes()
    # a terminal and files of ASCII, as in a job
    result = run_script(a, b, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (result.returncode, result.stderr) == (0, "")
    first, second, path = result.stdout.splitlines()
    assert first.startswith(r"negative_prompt=\u8272\u8c03\u8273\u4e3d | loss/high 0.75")
    assert second.startswith(r"negative_prompt=\u8fc7\u66dd (ends at step 2, the longest at 4) | loss/high 0.75")
    assert path == f"{a}/curves_together.png" and Path(path).is_file() and not (b / "curves.png").exists()
    assert (a / "curves.png").read_bytes() == before
    assert run_script(a, b, f"--out={tmp_path}/x.png").stdout.splitlines()[2:] == [f"{tmp_path}/x.png"]
    assert run_script(b, f"--out={tmp_path}/y.png").stdout == f"{tmp_path}/y.png\n"
    assert (tmp_path / "x.png").is_file() and (tmp_path / "y.png").is_file() and not (b / "curves.png").exists()
    assert failed(tmp_path) == f"error: {tmp_path}: got no metrics.jsonl there, want the out_dir of a run\n"
    assert failed("--oat=x.png", a) == "error: got --oat, want --mean=picture.png or --out=picture.png\n"
    assert failed("--out=", a, b) == "error: got --out, want --mean=picture.png or --out=picture.png\n"
    assert failed(f"--out={tmp_path}/x.png/y.png", a).startswith(f"error: {tmp_path}/x.png/y.png: cannot write there")


def test_files_are_utf_8_by_name(tmp_path):
    write(tmp_path, short_rows(), lr=1e-3)
    code = "import plot; plot.MetricsLog('.', 4).write({'step': 5}); plot.read_metrics('.'); plot._labels(['.', '.'])"
    result = subprocess.run([sys.executable, "-X", "warn_default_encoding", "-c", code], capture_output=True, text=True,
                            timeout=120, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(plot.__file__).parent)})
    assert result.returncode == 0 and "plot.py" not in result.stderr


def test_mean_of_several_runs(tmp_path, capsys):
    for run, last in (("a", 0.6), ("b", 0.8)):
        (tmp_path / run).mkdir()
        rows = [{"step": 0, "eval/ball": 0.3}, {"step": 5, "reward": 1.0}, {"step": 10, "eval/ball": last}]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = plot.draw_mean(tmp_path / "mean.png", [tmp_path / "a", tmp_path / "b"])
    assert path.stat().st_size > 1000
    assert capsys.readouterr().out == "eval/ball: 0.300 +- 0.000 -> 0.700 +- 0.100, 2 runs\n"


def test_a_mean_is_of_runs_that_differ_in_the_seed_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run, settings in (("a", dict(lr=0.1, seed=0)), ("b", dict(lr=0.1, seed=1)), ("c", dict(lr=0.2, seed=2))):
        write(Path(run), [{"step": 1, "eval/ball": 0.5}], **settings | dict(law="flow", resume=run == "a"))
    plot.draw_mean("mean.png", ["a", "b"])
    assert capsys.readouterr().out == "eval/ball: 0.500 +- 0.000 -> 0.500 +- 0.000, 2 runs\n"
    Path("mean.png").unlink()
    with pytest.raises(SystemExit) as refused:
        plot.draw_mean("mean.png", ["a", "b", "c"])
    assert str(refused.value) == (
        "error: got settings that differ in more than the seed (a: lr=0.1; b: lr=0.1; c: lr=0.2), want runs alike but "
        "for the seed: leave some out, or draw them together, without --mean"
    )
    assert not Path("mean.png").exists() and not capsys.readouterr().out


def test_a_mean_is_over_the_same_steps_of_all_runs(tmp_path, capsys):
    for run, steps in (("a", (0, 25, 50, 75, 100)), ("b", (0, 50, 100)), ("c", (1, 2))):
        (tmp_path / run).mkdir()
        rows = [{"step": step, "eval/ball": step / 100} for step in steps]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot.draw_mean(tmp_path / "mean.png", [tmp_path / "a", tmp_path / "b"])
    assert capsys.readouterr().out == "eval/ball: 0.000 +- 0.000 -> 1.000 +- 0.000, 2 runs\n"
    for path, others, words in [
        ("mean.png", "ac", "got no step at which all of them have eval/ball"),
        ("mean.png/mean.png", "ab", "mean.png/mean.png: cannot write"), ("mean.xyz", "ab", "mean.xyz: want .*png"),
    ]:
        with pytest.raises((SystemExit, UserError), match=words):
            plot.draw_mean(tmp_path / path, [tmp_path / run for run in others])


def test_log_drops_what_comes_after_the_step_a_run_resumes_from(tmp_path):
    log = plot.MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    log.write({"step": 2, "val_loss/high": 0.5})
    resumed = plot.MetricsLog(tmp_path, 2)
    assert [row["step"] for row in plot.read_metrics(tmp_path)] == [1, 2]
    assert resumed.holds(2, "val_loss") and not resumed.holds(1, "val_loss") and not resumed.holds(3, "loss")
    plot.MetricsLog(tmp_path)  # a new run begins a new file
    assert not (tmp_path / "metrics.jsonl").read_text()
