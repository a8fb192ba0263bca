"""Checks of the figures.     python -m pytest -q experiments/test_figures.py"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures      # noqa: E402
import records      # noqa: E402
import studies      # noqa: E402


@pytest.fixture(autouse=True)
def close_figures():
    yield
    from matplotlib import pyplot
    pyplot.close("all")


FEDAVG, FEDDC = "--dataset mnist --algo fedavg", "--dataset mnist --algo feddc"
FEDSSG = "--dataset mnist --algo fedssg --form stable"


def run_folder(root, flags=FEDAVG, accs=(50, 60, 70), seed=0, **more):
    """A folder as run.py leaves it, with the accuracies of its first rounds."""
    folder = root / f"{len(list(root.iterdir()))}"
    folder.mkdir()
    settings = records.resolve(flags) | dict(seed=seed, split="0") | more
    (folder / "config.json").write_text(json.dumps(dict(settings=settings, device="cpu", torch="2")))
    (folder / "summary.json").write_text(json.dumps(dict(target_acc=97.0)))
    lines = [f"{t},{acc},0.5" for t, acc in enumerate(accs, 1)]
    (folder / "log.csv").write_text("\n".join(["round,test_acc,seconds", *lines]))
    return folder


def measure(root, runs):
    """A results folder that has the runs, {flags: {seed: accuracies}}."""
    (root / "runs").mkdir()
    for flags, seeds in runs.items():
        for seed, accs in seeds.items():
            row, curve, _, _ = records.row_of(run_folder(root / "runs", flags, accs, seed), (60,))
            records.keep(root / "results", row, curve)
    return root / "results"


@pytest.fixture
def mine(monkeypatch):
    """A study `mine` of rows that stop at 60 %."""
    def make(rows, seeds=2, name="mine", **more):
        study = studies.study("Mine", "--dataset mnist", rows, seeds, to=60, **more)
        monkeypatch.setitem(studies.STUDIES, name, study)
    return make


def runs_of(*folders):
    return figures.runs_of_folders(folders), "", 60.0


def labels_of(*folders):
    return list(figures.runs_of_folders(folders))


def stopped(*words):
    with pytest.raises(SystemExit) as end:
        figures.main([str(word) for word in words])
    return end.value.code


# ---- labels of run folders ---------------------------------------------------------------------------------

def test_label_names_the_settings_that_differ_by_name_and_whole_value(tmp_path):
    one = run_folder(tmp_path, f"{FEDAVG} --num-clients 50 --participation 0.2")
    other = run_folder(tmp_path, f"{FEDAVG} --num-clients 20 --participation 0.5")
    assert labels_of(one, other) == ["fedavg, num-clients 50, participation 0.2",
                                     "fedavg, num-clients 20, participation 0.5"]


def test_label_leaves_out_what_all_runs_share(tmp_path):
    runs = [run_folder(tmp_path, f"{flags} --lr 0.2") for flags in (FEDSSG, FEDDC)]
    assert labels_of(*runs) == ["fedssg stable", "feddc"]


def test_label_names_a_form(tmp_path):
    runs = [run_folder(tmp_path, f"--dataset mnist --algo fedssg --form {form}")
            for form in ("stable", "scaled", "released")]
    assert labels_of(*runs) == ["fedssg stable", "fedssg scaled", "fedssg released"]


def test_label_names_a_setting_that_differs_between_methods(tmp_path):
    runs = run_folder(tmp_path, f"{FEDDC} --lr 0.2"), run_folder(tmp_path)
    assert labels_of(*runs) == ["feddc, lr 0.2", "fedavg"]


def test_label_names_hyper_parameters_that_differ_within_a_method(tmp_path):
    runs = [run_folder(tmp_path, flags) for flags in (FEDDC, f"{FEDDC} --alpha 0.2", FEDAVG)]
    assert labels_of(*runs) == ["feddc", "feddc, alpha 0.2", "fedavg"]


def test_label_names_a_weight_decay_that_is_not_the_methods_own(tmp_path):
    runs = [run_folder(tmp_path, flags) for flags in (
        FEDAVG, "--dataset mnist --algo fedprox", f"{FEDAVG} --weight-decay 1e-5")]
    assert labels_of(*runs) == ["fedavg", "fedprox", "fedavg, weight-decay 1e-05"]


def test_label_tells_data_files_of_one_name_apart_by_their_contents(tmp_path):
    own = "--dataset own.npz --like mnist --algo fedavg"
    runs = [run_folder(tmp_path, own, contents=digest) for digest in ("0a", "0b")]
    assert labels_of(*runs) == ["fedavg, contents 0a", "fedavg, contents 0b"]


def test_label_of_two_rows_is_an_error(capsys):
    default = "--dataset mnist --algo fedssg"
    with pytest.raises(SystemExit):         # a form that is given, and the same by default
        figures.labels_of([(default, ""), (f"{default} --form scaled", "")])
    assert "two rows have the label 'fedssg scaled'" in capsys.readouterr().err


def test_lines_of_one_method_look_different():
    looks = figures.styles([f"fedssg {k}" for k in range(9)] + ["fedavg", "fedprox"]).values()
    assert len({json.dumps(look) for look in looks}) == 11


def test_a_users_own_method_has_no_methods_colour():
    assert figures.styles(["mine"])["mine"]["color"] not in figures.COLOURS.values()


# ---- no run is left out without a word ---------------------------------------------------------------------

def test_a_run_without_an_evaluation_is_named(tmp_path, capsys):
    folders = [run_folder(tmp_path), run_folder(tmp_path, accs=[""], seed=1)]
    assert list(figures.runs_of_folders(folders)["fedavg"]) == ["0"]
    assert f"{folders[1]}: left out, it has no evaluation" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [(3, 2), (2, 3)])
def test_a_run_that_is_there_twice_is_named_and_the_longer_one_drawn(lengths, tmp_path, capsys):
    folders = [run_folder(tmp_path, accs=(50, 60, 70)[:n]) for n in lengths]
    runs = figures.runs_of_folders(folders)
    assert runs["fedavg"]["0"]["curve"] == {1: 50.0, 2: 60.0, 3: 70.0}
    assert f"{folders[1]}: the same run twice" in capsys.readouterr().err


def test_seeds_that_stopped_earlier_are_counted_in_the_legend(tmp_path):
    seeds = (50, 60), (50, 62, 70), (40,)
    runs = runs_of(*[run_folder(tmp_path, accs=accs, seed=seed) for seed, accs in enumerate(seeds)])
    line, = figures.curves(*runs).axes[0].lines
    assert line.get_label() == "fedavg, 1 of 3 seeds"
    assert list(line.get_ydata()) == [50, 62, 70]


def test_curves_draw_the_mean_and_a_run_of_one_round(tmp_path):
    folders = [run_folder(tmp_path, accs=accs, seed=seed) for seed, accs in enumerate([(50, 60), (60, 80)])]
    folders.append(run_folder(tmp_path, FEDDC, (10,)))
    lines = {line.get_label(): line for line in figures.curves(*runs_of(*folders)).axes[0].lines}
    assert list(lines["fedavg, 2 seeds"].get_ydata()) == [55, 70]
    assert lines["feddc, seed 0"].get_marker() == "."           # a line of one point would not be seen


def test_targets_show_who_did_not_get_there(tmp_path):
    seeds = (50, 60, 70), (50, 55), (60,)
    folders = [run_folder(tmp_path, accs=accs, seed=seed) for seed, accs in enumerate(seeds)]
    folders.append(run_folder(tmp_path, FEDDC, (10, 20)))
    ax = figures.targets(*runs_of(*folders)).axes[0]
    marks = {(line.get_marker(), y): sorted(line.get_xdata()) for line in ax.lines for y in line.get_ydata()}
    assert marks == {(">", 0): [2], ("o", 1): [1, 2], (">", 1): [2]}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["feddc, 1 seed", "fedavg, 3 seeds"]
    assert [text.get_text() for text in ax.texts] == ["1.5"]


# ---- studies, by their names -------------------------------------------------------------------------------

def test_a_study_has_its_labels_its_title_and_its_target(tmp_path, mine):
    mine(["fedssg stable, phi = 1", "feddc"], seeds=1)
    phi_1 = f"--dataset mnist {studies.ROWS['fedssg stable, phi = 1']}"
    results = measure(tmp_path, {phi_1: {0: (50, 60)}, FEDDC: {0: (60,)}, FEDAVG: {0: (60,)}})
    runs, title, target = figures.read(["mine"], results, None)
    assert title == "Mine, to 60 %" and target == 60
    assert {label: its[0]["curve"] for label, its in runs.items()} == {
        "fedssg stable, phi = 1": {1: 50, 2: 60}, "feddc": {1: 60}}
    assert figures.read(["mine"], results, 55.0)[2] == 55


def test_what_is_not_measured_of_a_study_is_named(tmp_path, mine, capsys):
    mine(["fedavg", "feddc", "scaffold"])
    results = measure(tmp_path, {FEDAVG: {0: (60,), 1: (60,)}, FEDDC: {0: (60,), 1: (50,)}})
    runs = figures.runs_of_study("mine", results)
    assert {label: list(its) for label, its in runs.items()} == {"fedavg": [0, 1], "feddc": [0]}
    assert capsys.readouterr().err.splitlines() == [
        "figures.py: feddc: 1 of 2 seeds measured", "figures.py: scaffold: 0 of 2 seeds measured, left out"]


def alphas(results):
    return figures.alpha(*figures.read(["mine"], results, None)).axes[0].lines


def test_alpha_draws_a_mean_only_where_all_seeds_got_there(tmp_path, mine):
    mine(["feddc", "feddc, alpha 0.3", "fedavg", "feddyn"], limit=3)
    lines = alphas(measure(tmp_path, {
        FEDDC: {0: (60,), 1: (50, 50, 60)}, f"{FEDDC} --alpha 0.3": {0: (60,), 1: (50, 50, 50)},
        FEDAVG: {0: (60,)}, "--dataset mnist --algo feddyn": {0: (60,)}}))
    assert list(lines[0].get_xdata()) == [0.1, 0.3]
    assert lines[0].get_ydata()[0] == 2 and math.isnan(lines[0].get_ydata()[1])
    marks = {(line.get_marker(), *line.get_xdata()[:1]): list(line.get_ydata()) for line in lines[1:]}
    assert marks["o", 0.1] == [1, 3] and marks["o", 0.3] == [1] and marks["^", 0.3] == [3]


def test_alpha_joins_the_seeds_of_the_default_and_keeps_a_variant_apart(tmp_path, mine):
    mine(["fedssg stable, alpha 0.05", "fedssg stable", "fedssg stable, alpha 0.1", "fedssg stable, phi = 1"],
         seeds=1, more={"fedssg stable": 2})
    phi_1 = f"--dataset mnist {studies.ROWS['fedssg stable, phi = 1']}"
    lines = alphas(measure(tmp_path, {FEDSSG: {0: (60,), 1: (50, 60)}, f"{FEDSSG} --alpha 0.1": {0: (60,)},
                                      phi_1: {0: (60,)}}))
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["fedssg stable"]
    assert list(lines[0].get_xdata()) == [0.05, 0.1] and list(lines[0].get_ydata()) == [1.5, 1]


def test_tuned_draws_the_chosen_strength_on_the_test_seeds_by_rounds_and_traffic(tmp_path, mine, capsys):
    choices = {x: studies.CHOICES[x][:2] for x in ("feddc", "feddyn")} | {"fedavg": ["fedavg"]}
    mine(sum(choices.values(), []), (100,), "mine-tuning", choices=choices)
    mine([], 2, choices=choices, tuning="mine-tuning", limit=3)
    feddc = [f"--dataset mnist {studies.ROWS[label]}" for label in choices["feddc"]]
    results = measure(tmp_path, {
        feddc[0]: {100: (50, 50, 60)}, feddc[1]: {100: (60,), 0: (50, 60), 1: (50, 60)},
        FEDAVG: {100: (60,), 0: (50, 50, 60), 1: (50, 50, 50)}})
    lines = figures.tuned(*figures.read(["mine"], results, None)).axes[0].lines
    points = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in lines}
    assert points == {"feddc, alpha 0.03": (8, 2), "fedavg, 1 of 2 seeds": (6, 3)}
    assert capsys.readouterr().err == "figures.py: feddyn: left out, not tuned yet\n"


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
    runs = runs_of(run_folder(tmp_path, accs=accs))
    for ax in getattr(figures, draw)(*runs).axes:
        assert len(labelled(ax.xaxis)) >= 2
        assert ax.get_ylabel() == "" or len(labelled(ax.yaxis)) >= 2        # or it lists the methods


def test_axes_fit_the_data(tmp_path):
    runs = runs_of(run_folder(tmp_path, accs=(10, 20, 30)), run_folder(tmp_path, FEDDC, (10, 20, 40)))
    low, high = figures.curves(*runs).axes[0].get_ylim()
    assert 0 < low < 10 and 40 < high < 50


# ---- what the pages show, from results/ --------------------------------------------------------------------

RESULTS = figures.HERE / "results"


@pytest.mark.parametrize("picture", sorted(path.name for path in RESULTS.glob("*.png")))
def test_head_has_a_command_that_draws_the_picture_of_the_pages(picture, tmp_path):
    commands = re.findall(rf"figures\.py (.+) --out {re.escape(picture)}\b", figures.__doc__)
    assert len(commands) == 1
    figures.main([*commands[0].split(), "--out", str(tmp_path / picture)])
    assert (tmp_path / picture).stat().st_size > 10_000


def test_results_mnist_has_eight_methods_and_ten_seeds_each():
    rows = studies.STUDIES["fastest"]["variants"]
    left, right = figures.both(*figures.read(["fastest"], RESULTS, None)).axes
    assert {label.get_text() for label in right.get_yticklabels()} == {f"{row}, 10 seeds" for row in rows}
    assert len(left.get_legend().get_texts()) == len(rows) == 10    # of FedSSG there are three forms


# ---- bad input, and terminals ------------------------------------------------------------------------------

@pytest.mark.parametrize("what, out, says", [
    ("curves end-of-it", "x.png", "end-of-it: neither a study nor a run folder"),
    ("curves form one", "x.png", "form: neither a study nor a run folder"),
    ("curves", "x.png", "name run folders"), ("mnist more", "x.png", "no more words"),
    ("curves one", "x.xyz", "--out"), ("curves one", "no/x.png", "--out"),
    ("targets one --target 96", "x.png", "no run reached 96 %"),
    ("alpha one", "x.png", "no two alphas"),
    ("scatter --results own --dataset mnist", "x.png", "is there and would be drawn"),
    ("scatter --results own", "x.png", "its columns are not client,"),
    ("tuned --results own", "x.png", "`reproduce.py tuned-100` plays it"),
    ("curves broken", "x.png", "not a run folder of this version (KeyError: 'hyper')")])
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
    """`python -OO` in a locale that knows ASCII only; folders may have any name."""
    ascii_only = dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    folders = [run_folder(tmp_path, f"--dataset {name}.npz --like mnist --algo fedavg") for name in "ßα"]

    def call(*words):
        command = [sys.executable, "-OO", figures.__file__, *map(str, words)]
        done = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, text=True)
        return done.returncode, done.stderr
    out = "--out", tmp_path / "x.png"
    assert call("--help") == (0, "")
    assert call("curves", *folders, *out) == (0, "")
    code, message = call("curves", "größe", *out)
    assert code == 2 and message.startswith("reproduce.py: gr") and message.isascii()
