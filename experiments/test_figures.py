"""Checks of the figures.     python -m pytest -q experiments/test_figures.py"""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures      # noqa: E402


@pytest.fixture(autouse=True)
def close_figures():
    yield
    from matplotlib import pyplot
    pyplot.close("all")


SETTINGS = dict(dataset="mnist", num_clients=100, participation=0.15, partition="dirichlet", dir_alpha=0.3,
                rounds=300, lr=0.1, weight_decay=1e-3)


def run_folder(root, accs=(50, 60, 70), algo="fedavg", seed=0, hyper=None, **settings):
    """A folder as run.py leaves it, with the accuracies of its first rounds."""
    folder = root / f"{len(list(root.iterdir()))}"
    folder.mkdir()
    whole = SETTINGS | settings | dict(algo=algo, seed=seed, hyper=hyper or {}, split=f"s{seed}")
    (folder / "config.json").write_text(json.dumps(dict(settings=whole)))
    lines = [f"{t},{acc},0.5" for t, acc in enumerate(accs, 1)]
    (folder / "log.csv").write_text("\n".join(["round,test_acc,seconds", *lines]))
    return folder


def results_folder(root, setting, rows, rounds=3):
    """A results folder with one setting: {(method, variant, hyper): {seed: accuracies}}."""
    (root / "curves").mkdir(parents=True, exist_ok=True)
    columns = {f"{method} {variant}".strip() + f" seed {seed}": accs
               for (method, variant, _), seeds in rows.items() for seed, accs in seeds.items()}
    with open(root / "curves" / f"{setting}.csv", "w", newline="", encoding="utf-8") as file:
        lines = [[t, *(accs[t - 1] if t <= len(accs) else "" for accs in columns.values())]
                 for t in range(1, rounds + 1)]
        csv.writer(file).writerows([["round", *columns], *lines])
    with open(root / "runs.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["setting", "method", "variant", "hyper"], *[
            [setting, *row] for row in rows]])
    return root


def arguments(*what, **more):
    usual = dict(figure="", only=None, rows=None, target=60.0)
    usual |= dict(what=[str(x) for x in what], results=figures.HERE / "results")
    return SimpleNamespace(**usual | more)


def labels_of(*folders):
    return list(figures.lines_of_runs(folders))


def stopped(*words):
    with pytest.raises(SystemExit) as end:
        figures.main([str(word) for word in words])
    return end.value.code


# ---- labels ------------------------------------------------------------------------------------------------

def test_label_names_the_settings_that_differ_by_name_and_whole_value(tmp_path):
    one = run_folder(tmp_path, num_clients=50, participation=0.2)
    other = run_folder(tmp_path, num_clients=20, participation=0.5)
    assert labels_of(one, other) == ["fedavg num_clients=50 participation=0.2",
                                     "fedavg num_clients=20 participation=0.5"]


def test_label_of_a_lone_run_is_its_method(tmp_path):
    assert labels_of(run_folder(tmp_path, algo="fedssg", form="stable")) == ["fedssg stable"]


def test_label_names_a_setting_that_differs_between_methods(tmp_path):
    one, other = run_folder(tmp_path, algo="feddc", lr=0.2), run_folder(tmp_path)
    assert labels_of(one, other) == ["feddc lr=0.2", "fedavg lr=0.1"]


def test_label_names_hyper_parameters_that_differ_within_a_method(tmp_path):
    runs = [run_folder(tmp_path, algo="feddc", hyper={"alpha": a}) for a in (0.1, 0.2)]
    runs.append(run_folder(tmp_path, algo="feddyn", hyper={"alpha": 0.01}))
    assert labels_of(*runs) == ["feddc alpha=0.1", "feddc alpha=0.2", "feddyn"]


def test_label_names_a_weight_decay_that_is_not_the_methods_own(tmp_path):
    runs = [run_folder(tmp_path), run_folder(tmp_path, algo="fedprox", weight_decay=1e-5),
            run_folder(tmp_path, weight_decay=1e-5)]
    assert labels_of(*runs) == ["fedavg", "fedprox", "fedavg weight_decay=1e-05"]


def test_label_tells_data_files_of_one_name_apart_by_their_contents(tmp_path):
    runs = [run_folder(tmp_path, dataset="own.npz", contents=digest) for digest in ("0a", "0b")]
    assert labels_of(*runs) == ["fedavg contents=0a", "fedavg contents=0b"]


def test_label_of_two_rows_is_an_error(tmp_path, capsys):
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves" / "x.csv").write_text("round,feddc seed 0,feddc seed 0\n1,50,60\n")
    assert stopped("curves", "x", "--results", tmp_path, "--out", tmp_path / "x.png") == 2
    assert "two columns 'feddc seed 0'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        figures.add({"feddc": 1}, "feddc", 2)


def test_lines_of_one_method_look_different():
    looks = figures.styles([f"fedssg {k}" for k in range(9)] + ["fedavg", "fedprox"]).values()
    assert len({json.dumps(look) for look in looks}) == 11


def test_a_users_own_method_has_no_methods_colour():
    assert figures.styles(["mine"])["mine"]["color"] not in figures.COLOURS.values()


# ---- no run is left out without a word ---------------------------------------------------------------------

def test_a_run_without_an_evaluation_is_named(tmp_path, capsys):
    runs = [run_folder(tmp_path), run_folder(tmp_path, accs=[""], seed=1)]
    assert list(figures.lines_of_runs(runs)["fedavg"]) == ["0"]
    assert f"{runs[1]}: left out, it has no evaluation" in capsys.readouterr().err


def test_a_run_that_is_there_twice_is_named_and_the_longer_one_drawn(tmp_path, capsys):
    runs = [run_folder(tmp_path, accs) for accs in ((50, 60, 70), (50, 60))]
    assert figures.lines_of_runs(runs) == {"fedavg": {"0": {1: 50.0, 2: 60.0, 3: 70.0}}}
    assert f"{runs[1]}: the same run twice" in capsys.readouterr().err


def test_seeds_that_stopped_earlier_are_counted_in_the_legend(tmp_path):
    seeds = (50, 60), (50, 62, 70), (40,)
    runs = [run_folder(tmp_path, accs, seed=seed) for seed, accs in enumerate(seeds)]
    line, = figures.curves(arguments(*runs)).axes[0].lines
    assert line.get_label() == "fedavg, 1 of 3 seeds"
    assert list(line.get_ydata()) == [50, 62, 70]


def test_curves_draw_the_mean_and_a_run_of_one_round(tmp_path):
    runs = [run_folder(tmp_path, accs, seed=seed) for seed, accs in enumerate([(50, 60), (60, 80)])]
    runs.append(run_folder(tmp_path, (10,), algo="feddc"))
    lines = {line.get_label(): line for line in figures.curves(arguments(*runs)).axes[0].lines}
    assert list(lines["fedavg, 2 seeds"].get_ydata()) == [55, 70]
    assert lines["feddc, seed 0"].get_marker() == "."           # a line of one point would not be seen


def test_targets_show_who_did_not_get_there(tmp_path):
    seeds = (50, 60, 70), (50, 55), (60,)
    runs = [run_folder(tmp_path, accs, seed=seed) for seed, accs in enumerate(seeds)]
    runs.append(run_folder(tmp_path, (10, 20), algo="feddc"))
    ax = figures.targets(arguments(*runs)).axes[0]
    marks = {(line.get_marker(), y): sorted(line.get_xdata()) for line in ax.lines for y in line.get_ydata()}
    assert marks == {(">", 0): [2], ("o", 1): [1, 2], (">", 1): [2]}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["feddc, 1 seed", "fedavg, 3 seeds"]
    assert [text.get_text() for text in ax.texts] == ["1.5"]


def test_a_row_that_is_not_there_is_refused_with_those_that_are(tmp_path, capsys):
    folder = run_folder(tmp_path)
    assert stopped("curves", folder, "--only", "fedxyz", "--out", tmp_path / "x.png") == 2
    assert "no row 'fedxyz'; there are: fedavg" in capsys.readouterr().err


# ---- axes --------------------------------------------------------------------------------------------------

def labelled(axis):
    """The different labels of the ticks in view."""
    low, high = sorted(axis.get_view_interval())
    axis.figure.canvas.draw()
    return {text for place, text in zip(axis.get_ticklocs(), (x.get_text() for x in axis.get_ticklabels()))
            if low <= place <= high and text}


@pytest.mark.parametrize("values", [
    [81, 97], [210, 240], [1, 1000], [24, 24], [1], [99, 101], [3, 3.01], [1e-4, 1], [0.05], [1e5, 1.01e5]])
def test_axis_has_two_labelled_ticks(values):
    figure, (ax,) = figures.canvas(8, 3)
    ax.plot(values, values, "o")
    figures.log_ticks(ax.xaxis)
    assert 2 <= len(labelled(ax.xaxis)) <= 12
    assert len(labelled(ax.yaxis)) >= 2         # linear


@pytest.mark.parametrize("accs", [(61,), (60, 60, 60), (10, 60), [59] * 200 + [60]])
@pytest.mark.parametrize("draw", ["curves", "targets", "both"])
def test_axes_of_a_figure_have_two_labelled_ticks(draw, accs, tmp_path):
    run = run_folder(tmp_path, accs)
    for ax in getattr(figures, draw)(arguments(run)).axes:
        assert len(labelled(ax.xaxis)) >= 2
        assert ax.get_ylabel() == "" or len(labelled(ax.yaxis)) >= 2        # or it lists the methods


def test_axes_fit_the_data(tmp_path):
    runs = [run_folder(tmp_path, (10, 20, 30)), run_folder(tmp_path, (10, 20, 40), lr=0.2)]
    low, high = figures.curves(arguments(*runs)).axes[0].get_ylim()
    assert 0 < low < 10 and 40 < high < 50


# ---- what the pages show, from results/ --------------------------------------------------------------------

def test_results_give_the_figures_of_the_pages(tmp_path):
    for name in ("mnist", "gates", "alpha", "scatter"):
        figures.main([name, "--out", str(tmp_path / f"{name}.png")])
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_results_mnist_has_eight_methods_and_ten_seeds_each():
    rows = figures.ROWS["mnist"]
    left, right = figures.both(arguments(figures.MNIST, rows=rows, target=97.0)).axes
    assert {label.get_text() for label in right.get_yticklabels()} == {f"{row}, 10 seeds" for row in rows}
    assert len(left.get_legend().get_texts()) == len(rows) == 9     # of FedSSG there are two forms


def alphas(tmp_path, rows):
    return figures.alpha(arguments("x", results=results_folder(tmp_path, "x", rows))).axes[0].lines


def test_alpha_draws_a_mean_only_where_all_seeds_got_there(tmp_path):
    lines = alphas(tmp_path, {("feddc", "", "alpha=0.1"): {0: (60,), 1: (50, 50, 60)},
                              ("feddc", "alpha=0.2", "alpha=0.2"): {0: (60,), 1: (50, 50, 50)},
                              ("fedavg", "", ""): {0: (60,)}, ("feddyn", "", "alpha=0.01"): {0: (60,)}})
    assert list(lines[0].get_xdata()) == [0.1, 0.2]
    assert lines[0].get_ydata()[0] == 2 and math.isnan(lines[0].get_ydata()[1])
    marks = {(line.get_marker(), *line.get_xdata()[:1]): list(line.get_ydata()) for line in lines[1:]}
    assert marks["o", 0.1] == [1, 3] and marks["o", 0.2] == [1] and marks["^", 0.2] == [3]


def test_alpha_keeps_a_variant_apart(tmp_path):
    rows = {("fedssg", f"stable alpha={a}{more}", f"alpha={a}"): {0: (60,)} for a, more in (
        (0.1, ""), (0.2, ""), (0.3, " gate_ratio=off"), (0.4, " gate_ratio=off"))}
    labels = [line.get_label() for line in alphas(tmp_path, rows) if not line.get_label().startswith("_")]
    assert labels == ["fedssg stable", "fedssg stable gate_ratio=off"]


def by_value(values):
    """{alpha: {seed: {round: accuracy}}} of {alpha: {seed: accuracies}}."""
    return {a: {str(seed): dict(enumerate(accs, 1)) for seed, accs in seeds.items()}
            for a, seeds in values.items()}


def test_tuned_chooses_by_rounds_where_runs_stop_at_the_target():
    its = by_value({0.03: {100: (50, 60)}, 0.1: {100: (60,), 101: (50, 50, 50, 60)},
                    0.3: {100: (50, 60), 101: (50, 60)}, 0.2: {100: (60,)}})           # 0.2 is not tried
    assert figures.chosen(its, "alpha", 60, T=300) == 0.03
    its[0.03]["101"] = {1: 10.0}                                                        # not there
    assert figures.chosen(its, "alpha", 60, T=300) == 0.3
    its[0.3]["0"] = {1: 10.0}                                                           # a test seed
    assert figures.chosen(its, "alpha", 60, T=300) == 0.3
    del its[0.1]
    assert figures.chosen(its, "alpha", 60, T=300) is None


def test_tuned_chooses_by_the_end_of_whole_runs_then_by_rounds():
    its = by_value({a: {100: [50] * t + [end] * (100 - t)} for a, t, end in (
        (0.03, 1, 70), (0.1, 20, 71), (0.3, 10, 70.98), (0.7, 2, 70.96))})
    assert figures.chosen(its, "alpha", 60, T=100) == 0.3


def test_tuned_draws_the_chosen_value_on_the_test_seeds(tmp_path, capsys):
    rows = {}
    for a, accs in (0.1, (60,)), (0.01, (50, 60)), (0.03, (50, 50, 60)):
        rows["feddc", f"alpha={a}", f"alpha={a}"] = {100: accs}
        rows["feddyn", f"alpha={a}", f"alpha={a}"] = {100: accs}
    rows["feddc", "alpha=0.1", "alpha=0.1"] |= {0: (50, 60), 1: (50, 60)}
    rows["fedavg", "", ""] = {0: (50, 50, 60), 1: (50, 50, 50)}
    args = arguments("x-T300", results=results_folder(tmp_path, "x-T300", rows))
    lines = figures.tuned(args).axes[0].lines
    points = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in lines}
    assert points == {"feddc alpha=0.1": (8, 2), "fedavg, 1 of 2 seeds": (6, 3)}
    assert "feddyn alpha=0.1: left out, no run of the test seeds yet" in capsys.readouterr().err


@pytest.mark.parametrize("label, sizes", [
    ("fedavg", 2), ("feddyn alpha=0.1", 2), ("fedvra", 2), ("feddc", 4), ("scaffold", 4),
    ("fedssg scaled", 4),
    ("fedssg scaled gate_ratio=off correction=none", 2), ("fedssg scaled alignment=server", 4),
    ("fedssg main gate_shape=clip", 2), ("feddisco", 2)])
def test_tuned_traffic(label, sizes):
    assert figures.sent(label) == sizes


# ---- bad input, and terminals ------------------------------------------------------------------------------

@pytest.mark.parametrize("what, out, says", [
    ("curves end", "x.png", "end: neither a run folder nor a setting"),
    ("curves", "x.png", "name run folders"), ("mnist more", "x.png", "no more words"),
    ("curves one", "x.xyz", "--out"), ("curves one", "no/x.png", "--out"),
    ("targets one --target 96", "x.png", "no run reached 96 %"), ("alpha few", "x.png", "few"),
    ("scatter --results own --dataset mnist", "x.png", "is there and would be drawn"),
    ("scatter --results own", "x.png", "has no column round"), ("tuned --results own", "x.png", "runs.csv"),
    ("curves broken", "x.png", "not a run folder (KeyError: 'hyper')")])
def test_bad_input_is_one_line_and_no_picture(what, out, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path).rename("one")
    run_folder(tmp_path).rename("broken")
    config = json.loads(Path("broken/config.json").read_text())
    del config["settings"]["hyper"]
    Path("broken/config.json").write_text(json.dumps(config))
    Path("own").mkdir()
    Path("own/scatter.csv").write_text("client,method\n0,fedavg\n")
    assert stopped(*what.split(), "--out", out) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1 and not Path(out).exists()


def test_missing_matplotlib_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert stopped("curves", run_folder(tmp_path), "--out", tmp_path / "x.png") == 2
    assert "matplotlib" in capsys.readouterr().err


def test_ascii_terminal_without_docstrings(tmp_path):
    """`python -OO` in a locale that knows ASCII only; the tables are UTF-8 nevertheless."""
    ascii_only = dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    results_folder(tmp_path, "x", {("größe", "α=1", ""): {0: (50, 60)}})

    def call(*words):
        command = [sys.executable, "-OO", figures.__file__, *map(str, words)]
        done = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, text=True)
        return done.returncode, done.stderr
    out = "--out", tmp_path / "x.png", "--results", tmp_path
    assert call("--help") == (0, "")
    assert call("curves", "x", *out) == (0, "")
    code, message = call("curves", "x", "--only", "fedavg", *out)
    assert code == 2 and message.endswith(r"there are: gr\xf6\xdfe \u03b1=1" "\n")
