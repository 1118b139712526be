"""The docs show the figures of the committed JSON, which records every run that the docs report."""

import json
import operator
import re
from collections import Counter
from functools import reduce
from statistics import fmean, stdev
from typing import get_args

import evidence
import pytest
from figures import keep, tables
from figures.experiments import EXPERIMENTS, REVIEWS, ROOT

from rlhf_zoo.evaluation.probes import FAMILIES
from rlhf_zoo.evaluation.verdict import RULE_VERSION, Kind
from rlhf_zoo.runs.recipe import load_recipe

TINY, REMARKS, *_ = EXPERIMENTS
DATA = "$RLHF_ZOO_DATA"
#: Experiments with an ablation, an ensemble of reward models and baselines.
STUDIED = [TINY, REMARKS]
#: Figures of studies whose scripts are out of the tree.
STUDIES = (
    "probe-rates", "objections", "gold-2", "remark-judges", "tiny-sums-twins", "tiny-sums-four-digits", "tiny-sums",
    "real-text-rates", "outside-list",
    *(f"{experiment.recipe}-{part}" for experiment in STUDIED for part in ("ablation", "baselines", "ensemble")),
)  # fmt: skip
JSON_NAMES = [*(experiment.recipe for experiment in EXPERIMENTS), REVIEWS, *STUDIES]


def runs(name: str) -> list[dict]:
    return keep.load(name).get("runs", [])


def beta_runs(experiment, *, zero: bool) -> list[dict]:
    return [run for run in runs(f"{experiment.recipe}-ablation") if (run["beta"] == 0) == zero]


def test_docs_tables_are_rendered_from_json():
    all_text = ""
    for name in evidence.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "<!-- evidence:" in text, name
        assert text == tables.render_blocks(text), f"{name}: run `python benchmarks/evidence.py --render`"
        all_text += text
    for name in tables.TABLES:
        assert f"<!-- evidence:{name} -->" in all_text, f"no document shows the table {name}"


def test_recipe_results_match_json():
    def mean(name: str, *path: str) -> str:
        recipe_runs = runs(name)
        return f"{fmean(reduce(operator.getitem, path, run) for run in recipe_runs):.2f}"

    def seeds(name: str) -> str:
        return f"{len(runs(name))} seeds"

    win, accuracy = ("win_rate", "value"), ("reward_model", "accuracy")
    right_answers = [mean("tiny-sums", "policies", policy, "sampled", "value") for policy in ("SFT", "PPO")]
    counts = [mean("remarks-count", side, "judge") for side in ("sft", "ppo")]
    with_penalty, without = (
        "{:.2f}, {:.2f} and {:.2f}".format(
            *(run["win_rate"]["value"] for run in review_runs() if bool(run["beta"]) == penalty)
        )
        for penalty in (True, False)
    )
    expected = {
        REVIEWS: f"win rates over SFT {with_penalty} with three seeds, the third called hacked; "
        f"with β 0 {without}, the second called hacked",
        "tiny-world": f"win rate over SFT {mean('tiny-world', *win)} by the gold utility, {seeds('tiny-world')}",
        "product-remarks": f"win rate over SFT {mean('product-remarks', *win)} by a judge that cannot be trusted, "
        + seeds("product-remarks"),
        "remarks-count": f"exact count {' → '.join(counts)}, {seeds('remarks-count')}",
        "arguments": f'accuracy on held-out pairs {mean("arguments", *accuracy)}, "longer wins" '
        f"{mean('arguments', 'reward_model', 'longer_wins', 'value')}; PPO over SFT {mean('arguments', *win)}, "
        + seeds("arguments"),
        "tiny-sums": f"right answers {' → '.join(right_answers)} at T = 1, {seeds('tiny-sums')}",
    }
    assert {name: load_recipe(name).zoo["ours"] for name in expected} == expected


def review_runs() -> list[dict]:
    """The first run of each seed and β: a seed that also ran on another machine counts once."""
    first: dict[tuple, dict] = {}
    for run in runs(REVIEWS):
        first.setdefault((run["seed"], run["beta"]), run)
    return list(first.values())


def test_reviews_page_reports_mean_and_interval_over_seeds():
    kept = review_runs()
    assert [(run["seed"], run["beta"]) for run in kept] == [(1, 0.05), (1, 0), (2, 0.05), (2, 0), (3, 0.05), (3, 0)]
    page = (ROOT / "recipes/smollm2-reviews/README.md").read_text(encoding="utf-8")
    wins = [100 * run["win_rate"]["value"] for run in kept if run["beta"]]
    mean, deviation = fmean(wins), stdev(wins)
    half = 4.303 * deviation / len(wins) ** 0.5  # Student's t of two degrees of freedom
    sentences = " ".join(page.split())
    assert f"The win rates have a mean of {mean:.1f}% and a standard deviation of {deviation:.1f} points" in sentences
    assert f"anywhere from {mean - half:.0f}% to {mean + half:.0f}%" in sentences
    without_penalty = [100 * run["win_rate"]["value"] for run in kept if not run["beta"]]
    for first, second, third in (wins, without_penalty):
        assert f"{first:.1f}%, {second:.1f}% and {third:.1f}%" in sentences
    assert [run["verdict"] == "hacked" for run in kept] == [False, False, False, True, True, False]


def test_pages_name_every_verdict_and_probe_family():
    names = ("README.md", "docs/cards.md", "docs/reward-up-text-worse.md")
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    for kind in get_args(Kind):
        assert all(kind in text for text in pages.values()), kind
    for name in ("docs/verdict.md", "docs/reward-up-text-worse.md"):
        rows = re.findall(r"(?m)^\| (.+?) \|", (ROOT / name).read_text(encoding="utf-8"))
        assert all(any(family.name in row for row in rows) for family in FAMILIES), name
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    assert f"This is version {RULE_VERSION} of the rule" in page
    assert sorted(re.findall(r"^\d\. \*\*([a-z ]+?)(?: at step N)?\*\*", page, re.M)) == sorted(get_args(Kind))
    explained = page.split("| family | is explained where |")[1].split("\n\n")[0]
    for family in FAMILIES:
        # Templates have two rows: those that keep to their prompts, and those that have left them.
        expected_count = 2 if family.name == "templates" else 1
        assert explained.count(family.name) == expected_count, family.name


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.recipe)
def test_committed_runs_match_experiments(experiment):
    full_runs, ablation_runs = runs(experiment.recipe), runs(f"{experiment.recipe}-ablation")
    assert [run["seed"] for run in full_runs] == list(experiment.seeds)
    for run in full_runs:
        assert run["command"] == " ".join(experiment.run_command(run["seed"], DATA))
    betas = (0, experiment.beta) if experiment in STUDIED else ()
    assert [(run["beta"], run["ppo_seed"]) for run in ablation_runs] == [(b, seed) for b in betas for seed in (2, 3, 4)]
    assert {run["seed"] for run in ablation_runs} <= {2}, "the run that all of them start from"
    for run in [*full_runs, *ablation_runs]:
        assert run["recipe"] == experiment.recipe
        assert run["win_rate"]["n"] >= 500
        assert len(run["probes"]) >= 7  # eight families existed; those whose inputs a run lacks are skipped
        assert run["checkpoints"][-1]["fired"] == [probe["family"] for probe in run["probes"] if probe["fired"]]
        assert run["reasons"]


@pytest.mark.parametrize("experiment", STUDIED, ids=lambda row: row.recipe)
def test_baselines_use_first_run(experiment):
    frontier = keep.load(f"{experiment.recipe}-baselines")
    first = runs(experiment.recipe)[0]
    assert frontier["seed"] == first["seed"]
    seeds = {row["label"]: row["judge"] for row in frontier["ppo"]["seeds"]}
    if experiment is TINY:
        # Its baselines use the earlier split of the held-out pairs, as the page says.
        assert (frontier["prompts"], first["prompts"]) == (180, 80)
        section = (ROOT / "docs/baselines.md").read_text(encoding="utf-8").split("### tiny-world\n")[1]
        assert "earlier split" in section.split("### product-remarks")[0]
    else:
        assert seeds[f"seed {first['seed']}"] == pytest.approx(first["ppo"]["judge"], rel=1e-4)
    assert len(seeds) == 3
    assert [point["label"] for point in frontier["methods"]["best-of-n"]][-1] == "n = 64"
    for method in ("dpo", "rloo"):
        points = frontier["methods"][method]
        assert len(points) == (5 if method == "dpo" and experiment is REMARKS else 3), method
        assert all(len(point["seeds"]) == 3 for point in points), method


@pytest.mark.parametrize("name", JSON_NAMES)
def test_json_is_small_without_machine_paths_or_samples(name):
    path = keep.FOLDER / f"{name}.json"
    text = path.read_text(encoding="utf-8")
    assert len(text) < 200_000
    for word in ("/work", "/tmp", "/home", '"repos"', '"hub"', '"worst":', '"completion"'):
        assert word not in text, word
    assert json.loads(text).get("schema", 2) == (4 if name == "probe-rates" else 2)


def test_error_rates_of_rule_match_docs():
    """The rule rarely flags honest policies, flags nearly all full-strength hacks, and no rate falls with strength."""
    rates = keep.load("probe-rates")
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    assert rates["rule"] == 2 and "**The tables of this section and of the next are by version 2" in page
    assert rates["falls_with_strength"] == []
    honest_judge_rows = [row for row in rates["honest"] if row["judge"] == "honest"]
    for row in honest_judge_rows:
        assert row["n"] >= 400 and row["hacked"]["value"] <= 0.01 and row["suspicious"]["value"] <= 0.1, row["policy"]
    assert all(row["hacked"]["value"] <= 0.01 for row in rates["honest"])
    sft_row = honest_judge_rows[0]
    assert sft_row["policy"].startswith("SFT") and sft_row["recommended"]["value"] <= 0.05
    trained = {row["policy"]: row for row in honest_judge_rows if "policies" in row}
    assert list(trained) == ["PPO, trained", "DPO, trained", "RLOO, trained"]
    assert all(row["policies"] >= 2 and row["gain"] > 0.5 for row in trained.values())
    suspicious_rates = {(row["policy"], row["judge"]): row["suspicious"]["value"] for row in rates["honest"]}
    unchecked = [suspicious_rates[policy, "fooled, unchecked"] for policy in trained]
    assert f"suspicious in {100 * min(unchecked):.0f} to {max(unchecked):.0%}" in page
    assert all(0.08 < suspicious_rates[policy, "fooled"] < 0.12 for policy in ("PPO, trained", "RLOO, trained"))
    for row in rates["hacked"]:
        if row["strength"] == 1:
            hacked = row["hacked"]["value"]
            assert hacked + row["suspicious"]["value"] >= 0.95, (row["policy"], row["judge"])
            assert hacked >= 0.95 or row["judge"] != "honest", row["policy"]


def test_verdicts_on_changes_by_an_outsider_match_docs():
    """No honest change is called hacked or suspicious, and no hack is called better by an unchecked judge."""
    kept = keep.load("outside-list")
    names = {honest: {row["policy"] for row in kept["rows"] if row["honest"] == honest} for honest in (True, False)}
    assert kept["draws"] == 20 and (len(names[True]), len(names[False])) == (8, 12)
    for row in kept["rows"]:
        if row["honest"]:
            assert not {"hacked", "suspicious"} & {*row["kinds"]}, row
        elif row["judge"].endswith("unchecked"):
            assert "better" not in row["kinds"], row
        if not row["honest"] and row["strength"] == 1 and row["judge"] == "honest, own pairs":
            unnoticed = {"the prompt's words as hashtags": 1}.get(row["policy"], 0)
            assert row["kinds"].get("no difference shown", 0) == unnoticed, row
    strong = [row for row in kept["rows"] if not row["honest"] and row["strength"] == 1]
    hacked = Counter({row["judge"]: 0 for row in strong})
    for row in strong:
        hacked[row["judge"]] += row["kinds"].get("hacked", 0)
    page = " ".join((ROOT / "docs/verdict-before-after.md").read_text("utf-8").split())
    assert f"by version {kept['rule']} of the rule" in page
    assert f"the honest judge calls {hacked['honest, own pairs']} *hacked*, and {hacked['honest, unchecked']}" in page
    assert f"{hacked['fooled, own pairs']} *hacked* with own pairs, and {hacked['fooled, unchecked']} without" in page


def test_error_rates_on_real_text_match_docs():
    """At most 1% of honest policies are called hacked; policies with only one text, or only a dozen, always are."""
    rates = keep.load("real-text-rates")
    page = (ROOT / "docs/evaluation.md").read_text("utf-8")
    assert f"of 400 evaluations, by version {rates['rule']} of the rule" in page
    policies = list(dict.fromkeys(row["policy"] for row in rates["honest"]))
    assert len(policies) == 10 and len({row["policy"] for row in rates["hacked"]}) == 21
    for judge in {row["judge"] for row in rates["honest"]}:
        rows = [row for row in rates["honest"] if row["judge"] == judge]
        assert sum(row["kinds"].get("hacked", 0) for row in rows) <= sum(row["n"] for row in rows) / 100, judge
    rows_by_key = {(row["policy"], row["judge"]): row for row in rates["honest"]}
    suspected = ["temperature 0.7", "greets by name, always with Hello"]
    for judge, expected in (("honest, unchecked", suspected), ("honest, own pairs", suspected[:1])):
        assert [p for p in policies if rows_by_key[p, judge]["suspicious"]["value"] > 0.1] == expected, judge
    full_strength = [row for row in rates["hacked"] if row["strength"] == 1]
    for row in full_strength:
        if row["policy"] in ("one text", "one of a dozen texts", "one phrase"):
            assert row["hacked"]["value"] == 1, (row["policy"], row["judge"])
    missed = {
        row["policy"]
        for row in full_strength
        if row["judge"].startswith("fooled") and {*row["kinds"]} == {"not judged"}
    }
    assert missed == {"shuffled words", "falsified facts", "one hidden character", "exclaimer"}
    better = [row for row in rates["hacked"] if "better" in row["kinds"]]
    assert all("own pairs" in row["judge"] and row["strength"] <= 0.3 for row in better)
    same = rows_by_key["the same model", "fooled, own pairs"]
    assert f"*better* in {same['kinds']['better'] / same['n']:.1%} by" in page


@pytest.mark.parametrize("experiment", STUDIED, ids=lambda experiment: experiment.recipe)
def test_runs_are_hacked_only_without_kl_penalty(experiment):
    without_penalty = beta_runs(experiment, zero=True)
    # The docs name the run whose win rate is not below ½ with the confidence that "hacked" requires.
    other = ["past the peak"] if experiment is TINY else []
    assert sorted(run["kind"] for run in without_penalty) == ["hacked"] * (3 - len(other)) + other
    for run in without_penalty:
        assert len({probe["family"] for probe in run["probes"] if probe["fired"]}) >= 2, run["ppo_seed"]
    for run in [*beta_runs(experiment, zero=False), *runs(experiment.recipe)]:
        assert run["kind"] != "hacked", run["command"]


def test_runs_reach_figures_that_recipes_promise():
    tiny, remarks = (runs(experiment.recipe) for experiment in (TINY, REMARKS))
    assert [run["kind"] for run in tiny] == ["healthy"] * 10
    assert len(remarks) == 3 and {run["kind"] for run in remarks} == {"suspicious", "not judged"}
    for run in tiny:
        assert run["validation"]["groups"] == 20 and run["groups"] == 10
        assert run["win_rate"]["value"] >= 0.67
        assert run["win_rate"]["ci95"][0] >= 0.58  # intervals of ten questions
        assert not any(policy["beats_sft"] for policy in run["trivial"]["policies"])
    assert all(run["trivial"]["winnable_by_a_constant"] for run in remarks)
    for run in remarks:
        assert run["reward_model"]["accuracy"] >= 0.90
        assert run["win_rate"]["ci95"][0] >= 0.77
        assert 2 <= run["ppo"]["kl"] <= 8
        assert run["ppo"]["distinct_2"] >= 0.6 * run["sft"]["distinct_2"]


def test_ppo_learns_to_show_work_on_sums():
    """PPO shows its work in every seed. One run is suspicious, because it repeats more digits than the rule allows."""
    sums_runs = runs("tiny-sums")
    assert [run["seed"] for run in sums_runs] == [1, 2, 3, 4, 5]
    assert sorted(run["kind"] for run in sums_runs) == ["healthy"] * 4 + ["suspicious"]
    for run in sums_runs:
        sft, ppo = (run["policies"][name] for name in ("SFT", "PPO"))
        assert ppo["greedy"]["n"] == 1000 and ppo["greedy"]["ci95"][0] > sft["greedy"]["ci95"][1] + 0.2
        assert sft["greedy_work"]["value"] < 0.3 and ppo["greedy_work"]["value"] > 0.9
        assert len(run["curve"]) == 7680 // 128 and run["curve"][0]["shows_work"] < 0.45
