"""What is asked: the rows of every table, and the studies. `reproduce.py` plays them and prints their tables.

A row has a label, and flags of run.py. A study has a setting, which is flags too, some rows, and seeds. Each
row is played under each seed. Flags that are run.py's defaults are left out: a run is known by its flags.
"""

# ---- rows: what a row is called, and its flags of run.py ---------------------------------------------------

ROWS = {
    "fedssg": "--algo fedssg --form stable",                # for rows in which the forms do not differ
    "fedssg stable": "--algo fedssg --form stable",         # with the paper's alpha
    "fedssg scaled": "--algo fedssg --form scaled",         # the same with kappa 0.25, the default
    "fedssg light": "--algo fedssg --form light",           # scaled, phi = 2, no correction
    "fedssg stateless": "--algo fedssg --form stateless",   # the same with the memory on the server
    "fedssg released": "--algo fedssg --form released",     # the authors' program
    "fedssg main": "--algo fedssg --form main",             # the paper's text
    "fedssg appendix": "--algo fedssg --form appendix",     # the paper's appendix
    "fedssg prox": "--algo fedssg --form main --gate-shape clip",
    "fedssg, memory on the server": "--algo fedssg --form scaled --alignment server",
    "fedssg, no alignment": "--algo fedssg --form stable --alignment none",
    "feddc": "--algo feddc",
    "scaffold": "--algo scaffold",
    "feddyn": "--algo feddyn",
    "fedvra": "--algo fedvra",
    "feddisco": "--algo feddisco",
    "fedprox": "--algo fedprox",
    "fedavg": "--algo fedavg",
    "fedavg, decay 1e-5": "--algo fedavg --weight-decay 1e-05",
    "fedprox, decay 1e-3": "--algo fedprox --weight-decay 0.001"}


def changed(row, changes):
    """The labels of a row with each of the changes, {name: flags}. They join ROWS."""
    found = {f"{row}, {name}": f"{ROWS[row]} {flags}".strip() for name, flags in changes.items()}
    ROWS.update(found)
    return list(found)


def strengths(row, name, values, preset=None):
    """The labels of a row with each strength. `preset` is run.py's own, which needs no flag."""
    return changed(row, {f"{name} {x:g}": f"--{name} {x:g}" if x != preset else "" for x in values})


# The gate phi: a constant, or the share of the rounds so far in which a client came, but at most 1.
PHI = {"phi = 1": "--gate-ratio off --beta 0", "phi = 2": "--gate-ratio off"}
GATES = PHI | {"running clip": "--gate-ratio running --gate-shape clip --beta 0"}
BARE = {"no correction": "--correction none"} | {
    f"{name}, no correction": f"{flags} --correction none" for name, flags in GATES.items()}
PARTS = {"no alignment": "--alignment none", "no memory (phi = 0)": "--gate-scale 0 --beta 0",
         "no gate (phi = 1)": PHI["phi = 1"]}

FORMS = ["fedssg stable", "fedssg released"]
EIGHT = [*FORMS, "feddc", "scaffold", "feddyn", "fedvra", "feddisco", "fedprox", "fedavg"]
ALL_GATES = ["fedssg stable", *changed("fedssg stable", GATES),
             "fedssg released", *changed("fedssg released", GATES), *changed("fedssg", BARE)]
ALL_PARTS = ["fedssg stable", *changed("fedssg stable", PARTS),
             "fedssg released", *changed("fedssg released", PARTS), "fedssg, no correction"]
FIVE = [*FORMS, "fedssg stable, phi = 1", "feddc", "scaffold"]
CLIP, ALPHA_CLIP = "--gate-shape clip", "--alpha 0.05 --gate-shape clip"
READINGS = [            # of Sections 2 and 3, with the paper's tuned alpha for MNIST and Dirichlet 0.3
    "fedssg main", *changed("fedssg main", {"alpha 0.05, clip": ALPHA_CLIP,
                                            "Eq. (6)'s alpha 0.05": "--gate-scale 0.05"}),
    "fedssg appendix", *changed("fedssg appendix", {"clip": CLIP}), *strengths("feddyn", "alpha", [0.05])]
ALPHAS = [*strengths("fedssg stable", "alpha", (0.01, 0.03, 0.05, 0.1, 0.3, 1), 0.05),
          *strengths("fedssg released", "alpha", (0.01, 0.03, 0.05, 0.1, 0.3, 1), 0.05),
          *strengths("feddc", "alpha", (0.003, 0.01, 0.03, 0.1, 0.3), 0.1),
          *strengths("feddyn", "alpha", (0.003, 0.01, 0.03, 0.1), 0.01)]
MANY_ALPHAS = [*strengths("fedssg stable", "alpha", (0.01, 0.2, 0.4, 0.7)),
               *strengths("feddc", "alpha", (0.02, 0.2, 0.7))]
KAPPAS = strengths("fedssg scaled", "kappa", (0.1, 0.15, 0.25, 0.35), 0.25)
# The memory on the clients, on the server, and without alignment: each gate, with and without correction.
BARE_PHI = {name: BARE[name] for name in ("no correction", "phi = 1, no correction")}
BARE_2 = {name: BARE[name] for name in ("phi = 2, no correction",)}
MEMORY = [label for row, last in (("fedssg scaled", ["fedssg light"]),
                                  ("fedssg, memory on the server", ["fedssg stateless"]),
                                  ("fedssg, no alignment", changed("fedssg, no alignment", BARE_2)))
          for label in (row, *changed(row, PHI), *changed(row, BARE_PHI), *last)]

# Of each method the study `tuned` takes one of five strengths, which the tuning seeds choose.
KAPPA, ALPHA = (0.05, 0.1, 0.18, 0.25, 0.35), (0.01, 0.03, 0.1, 0.3, 0.7)
CHOICES = {
    "fedavg": ["fedavg"],                               # has none
    "fedprox": strengths("fedprox, decay 1e-3", "mu", (0.0001, 0.001, 0.01, 0.1, 1), 0.0001),
    "scaffold": strengths("scaffold", "eta-g", (0.5, 0.7, 1, 1.5, 2), 1),
    "feddyn": strengths("feddyn", "alpha", ALPHA, 0.01),
    "feddc": strengths("feddc", "alpha", ALPHA, 0.1),
    "fedvra": strengths("fedvra", "gamma", ALPHA, 0.1),
    "fedssg prox": strengths("fedssg prox", "alpha", ALPHA)}
CHOICES |= {row: strengths(row, "kappa", KAPPA, 0.25) for row in (
    "fedssg scaled", "fedssg scaled, phi = 2", "fedssg light", "fedssg, memory on the server, phi = 2",
    "fedssg stateless")}
# FashionMNIST: eight of the methods, three of the strengths
FEWER = {x: CHOICES[x][1:4] for x in CHOICES if x not in ("fedavg", "fedprox", "feddyn", "fedssg prox")}

# ---- studies -----------------------------------------------------------------------------------------------

FEW_OF_MANY = "--num-clients 500 --participation 0.02 --rounds 600"
MNIST, MANY = "--dataset mnist", f"--dataset mnist {FEW_OF_MANY}"
SPLITS = {"IID": "--partition iid", "DiD1": "", "DiD2": "--dir-alpha 0.6",
          "IID-Dir1": "--dir-alpha 1"}                      # what the paper's appendix calls IID
JPEG = "--dataset cifar10_jpeg.npz --like cifar10"
CONTENTS = {"cifar10_jpeg.npz": "c069ea35"}                 # of the studies' own data file, as run.py has it
TUNING_SEEDS = (100, 101)                                   # to choose by; the others are for tests


def study(title, setting, rows, seeds, *targets, to=None, limit=None, more=None, paper=None, minus="feddc",
          choices=None, tuning=None, traffic=False, last10=False):
    """Runs of each row (a label of ROWS) under each seed: whole, `to` an accuracy, or up to round `limit`.

    seeds    a number n for the seeds 0 to n-1, or a list; `more`: {row: its own seeds}
    targets  accuracies in percent; the table has the rounds to each
    paper    the data set whose numbers in the paper stand beside these runs, which are of another one
    minus    the row with which the others are compared
    choices  {method: rows} among which the runs of this study choose one each
    tuning   the study whose choices are the rows of this one
    traffic  whether the table says what is sent;  last10  the mean of the last ten evaluations
    """
    def listed(seeds):
        return range(seeds) if isinstance(seeds, int) else seeds
    return dict(
        title=title + (f", to {to} %" if to else ""), setting=setting, variants={x: ROWS[x] for x in rows},
        seeds=listed(seeds), more={x: listed(its) for x, its in (more or {}).items()},
        targets=targets or (to,), to=to, limit=limit, paper=paper, minus=minus, choices=choices,
        tuning=tuning, traffic=traffic, last10=last10)


STUDIES = {
    "form": study("Which form? MNIST 15 %, Dir 0.3", MNIST, [*FORMS, "feddc"], 5, 97),
    "form-readings": study("The two printed forms: MNIST 15 %, Dir 0.3", MNIST,
                           [*READINGS, *FORMS, "feddc"], 3, 97),
    "form-500": study("Which form? MNIST, 500 clients, 2 %, Dir 0.3", MANY, FIVE, 5, 95, 97),
    "form-constant": study("Which form? MNIST 15 %, Dir 0.3, constant rate, T 100",
                           f"{MNIST} --rounds 100 --lr-decay 1", FIVE, 5, 97),
    "form-short": study("Which form? MNIST 15 %, Dir 0.3, T 40", f"{MNIST} --rounds 40", FIVE, 5, 97),
    "form-unequal": study("Which form? MNIST 15 %, unequal clients (Dir 0.3 over each class), T 100",
                          f"{MNIST} --rounds 100 --partition dirichlet-class", FIVE, 5, 97),
    "fastest": study("Fastest? MNIST 15 %, Dir 0.3", MNIST, [*EIGHT, "fedssg scaled"], 10, to=97),
    "fastest-fashion": study("Fastest? FashionMNIST 15 %", "--dataset fashionmnist", EIGHT, 5, 80, 85, to=85),
    "end": study("Best at the end? MNIST 15 %", MNIST, EIGHT, 3, 97,
                 more={"fedssg stable": 5, "fedssg released": 5, "feddc": 5}),
    "gate": study("Does the gate matter? MNIST 15 %, Dir 0.3", MNIST, [*ALL_GATES, "feddc"], 10, to=97),
    "gate-end": study("Does the gate matter at the end? MNIST 15 %", MNIST, [
        *FORMS, "fedssg stable, phi = 1", "fedssg stable, phi = 2", "fedssg, phi = 2, no correction",
        "feddc"], 3, 97),
    "gate-500": study("Does the gate matter? MNIST, 500 clients, 2 %, Dir 0.3", MANY,
                      [*ALL_GATES, "feddc"], 10, to=97),
    "parts": study("What do the parts give? MNIST 15 %, Dir 0.3", MNIST, [*ALL_PARTS, "feddc"], 10, to=97),
    "decay": study("Does FedProx lead by its weight decay? MNIST 15 %, Dir 0.3", MNIST,
                   ["fedprox", "fedavg", "fedavg, decay 1e-5"], 3, to=97),
    **{f"epochs-{E}": study(f"Larger E? MNIST 15 %, Dir 0.3, E {E}", f"{MNIST} {flags}",
                            [*FORMS, "feddc", "scaffold", "fedavg"], 5, to=97)
       for E, flags in ((1, "--local-epochs 1"), (5, ""), (10, "--local-epochs 10"))},
    "few": study("Few of many? MNIST, 500 clients, 2 %, Dir 0.3", MANY, [*EIGHT, "fedssg scaled"], 3, 95, 97,
                 more=dict.fromkeys([*FORMS, "feddc", "scaffold", "fedssg scaled"], 5)),
    "few-alpha": study("Few of many, with other alphas? MNIST, 500 clients, 2 %, Dir 0.3", MANY,
                       ["fedssg stable", "feddc", *MANY_ALPHAS], 3, 95, 97),
    **{f"split-{split}-{p}": study(f"MNIST {p} %, {split}", f"{MNIST} {share} {flags}", EIGHT, 3, to=97)
       for p, share in ((15, ""), (10, "--participation 0.1")) for split, flags in SPLITS.items()},
    "alpha": study("Is the order an effect of tuning? MNIST 15 %, Dir 0.3", MNIST,
                   [*ALPHAS, *FORMS, "feddc"], 3, to=97, limit=120,
                   more={"fedssg stable": 6, "fedssg released": 6, "feddc": 6, "feddc, alpha 0.003": 6}),
    "smoke": study("Ten seconds: does it run?", "--dataset synthetic --num-clients 8 --hidden 8 --rounds 3",
                   [*FORMS, "feddc"], 2, 20)}

# CIFAR-10. 150 rounds are an hour and a half of a CPU's core; the paper's numbers to 80 % want more.
for name, kind, flags, limit, more in (
        ("cifar10", "", "", 150, ["fedvra", "fedssg scaled"]), ("cifar10-280", ", 280 rounds", "", 280, []),
        ("cifar10-bf16", ", bf16", "--precision bf16", 100, [])):
    STUDIES[name] = study(
        f"CIFAR-10 10 %, Dir 0.3{kind}, on images that went through JPEG once", f"{JPEG} {flags}",
        ["fedssg stable", "feddc", "scaffold", "feddyn", "fedavg", "fedssg released", *more], 1,
        60, 70, 75, 80, to=80, limit=limit, paper="cifar10")
# In bf16, which the label says, but for one row that was played on a processor without it.
IN_BF16 = [label for row in (
    "fedavg", "scaffold", "feddyn", "feddc", "fedvra", "fedssg stable", "fedssg scaled, phi = 2",
    "fedssg, memory on the server, phi = 2", "fedssg stateless")
    for label in changed(row, {"bf16": "--precision bf16"})]
STUDIES["cifar10-500"] = study(
    "CIFAR-10, 500 clients, 2 %, Dir 0.3, T 1500, 900 rounds, on images that went through JPEG once",
    f"{JPEG} --num-clients 500 --participation 0.02 --eval-every 5",
    [*IN_BF16, "fedssg scaled"], 1, 50, 55, 60, 65, 70, 75,
    limit=900, paper="cifar10", traffic=True, last10=True,
    more={"feddc, bf16": 2})                    # and for the three that lead, once they are known

# kappa: which one, by the tuning seeds; then it and the 0.25 of first trials, beside alpha on the test seeds.
KAPPA_SETTINGS = {          # title, flags, to, tuning seeds, test seeds, how many of these in first trials
    "100": ("100 clients", "", 97, TUNING_SEEDS, 10, 3),
    "500": ("500 clients, 2 %, T 600", FEW_OF_MANY, None, (100,), 7, 3),
    "short": ("T 40, its last round", "--rounds 40", None, TUNING_SEEDS, 10, 2),
    "unequal": ("unequal clients, T 100", "--rounds 100 --partition dirichlet-class", None, TUNING_SEEDS,
                10, 0),
    "E1": ("E 1", "--local-epochs 1", 97, TUNING_SEEDS, 10, 3),
    "E10": ("E 10", "--local-epochs 10", 97, TUNING_SEEDS, 10, 0),
    "rare": ("5 %, T 100: a client comes five times", "--participation 0.05 --rounds 100", None, TUNING_SEEDS,
             10, 0),
    "end": ("100 clients, T 300", "", None, (), 5, 0)}
for name, (title, flags, to, tuning, tests, _) in KAPPA_SETTINGS.items():
    if tuning:
        STUDIES[f"kappa-{name}-tuning"] = study(
            f"Which kappa? MNIST, {title}, tuning seeds", f"{MNIST} {flags}", KAPPAS, tuning, 97, to=to,
            minus="fedssg scaled, kappa 0.25")
    STUDIES[f"kappa-{name}"] = study(
        f"kappa or alpha? MNIST, {title}", f"{MNIST} {flags}",
        ["fedssg scaled", "fedssg scaled, kappa 0.15", "fedssg stable"], tests, 97, to=to,
        minus="fedssg stable", more={"fedssg scaled, kappa 0.15": 10 if name == "100" else 5})

# memory: what the clients' memory adds to control variates and to momentum on the server.
for name, setting, title, seeds, to in (("100", MNIST, "100 clients", 10, 97),
                                        ("500", MANY, "500 clients, 2 %, T 600", 5, None)):
    STUDIES[f"memory-{name}"] = study(
        f"What does the clients' memory add? MNIST, {title}", setting, [*MEMORY, "scaffold", "fedavg"], seeds,
        97, to=to, minus="fedssg scaled")

# tuned: equal budgets. Each method's strength is chosen on the tuning seeds and played on the test seeds.
for name, title, setting, choices, tuning, tests, target, to, limit in (
        ("tuned-100", "MNIST, 100 clients", MNIST, CHOICES, TUNING_SEEDS, 10, 97, 97, 120),
        ("tuned-500", "MNIST, 500 clients", MANY, CHOICES, (100,), 5, 97, None, None),
        ("tuned-fashion", "FashionMNIST, 500 clients", f"--dataset fashionmnist {FEW_OF_MANY}", FEWER, (100,),
         5, 80, None, None)):
    STUDIES[f"{name}-tuning"] = study(
        f"Every method's strength: {title}, tuning seeds", setting, sum(choices.values(), []), tuning, target,
        to=to, limit=limit, choices=choices)
    STUDIES[name] = study(
        f"Every method at its best strength: {title}", setting, [], tests, target, to=to, limit=limit,
        choices=choices, tuning=f"{name}-tuning", minus="fedssg scaled, kappa", traffic=True)

ALL = [name for name in STUDIES if name != "smoke"]
# Accuracies in percent, to which runs.csv notes the rounds of every run.
TARGETS = dict(mnist=(90, 95, 97, 98), fashionmnist=(75, 80, 85), emnist=(85, 90, 93, 94), cifar100=(30, 42),
               cifar10=(50, 55, 60, 65, 70, 75, 80), synthetic=(20, 50, 60, 70, 80, 90))
