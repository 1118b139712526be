"""The tables of smollm2-ifeval: the base, each run's policy and one text on IFEval, IFBench and the test split."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import keep
from .experiments import INSTRUCTIONS
from .text import interval, number, table

NOT_MEASURED = "Nothing is measured yet: `python benchmarks/instructions.py RUN` measures it."
#: IFEval's average, as the models' cards state it.
PUBLISHED = (("SmolLM2-135M-Instruct, published", 29.9), ("SmolLM2-360M-Instruct, published", 41.0))
BENCHMARK_HEADS = (
    "policy", "IFEval, average", "prompts, strict", "instructions, strict", "by the other verifiers",
    "IFBench, prompts, strict", "relevance", "errors in 100 words", "words", "repetition",
)  # fmt: skip
#: Label of the runs of smollm2-ifeval-sft.
WITH_SFT = "PPO, edited answers"
Figures = Mapping[str, Any]


def page() -> str:
    """All kept figures: both benchmarks, the recipe's test split, and pairs of answers drawn at random."""
    document = keep.load(INSTRUCTIONS)
    if not document:
        return NOT_MEASURED
    parts = [benchmarks_table(document), sampled_table(document), runs_table(document), pairs_page(document)]
    return "\n\n".join(part for part in parts if part)


def short_table() -> str:
    """The base, SFT and PPO after it, and all seeds of PPO without SFT in one row, for the README."""
    document = keep.load(INSTRUCTIONS)
    evaluated = _evaluated(document)
    seeds = [run for run in evaluated if run["policy"] == "PPO"]
    if not seeds:
        return NOT_MEASURED
    scores = {(policy["policy"], policy.get("seed")): policy for policy in document["policies"]}
    rows = [["base", *_short_cells(seeds[0]["sft"], scores["base", None]), ""]]
    for run in _runs_with_sft(evaluated):
        for name, own, verdict in ((run["start"], run["sft"], ""), (run["policy"], run["ppo"], _short_verdict(run))):
            rows.append([name, *_short_cells(own, scores[name, run["seed"]]), verdict])
    cells_by_seed = [_short_cells(run["ppo"], scores["PPO", run["seed"]], intervals=False) for run in seeds]
    name = f"PPO without SFT, seeds {', '.join(str(run['seed']) for run in seeds)}"
    verdicts = ", ".join(dict.fromkeys(_short_verdict(run) for run in seeds))
    rows.append([name, *(", ".join(cells) for cells in zip(*cells_by_seed, strict=True)), verdicts])
    return table(["%", "all instructions followed", "IFEval", "IFBench", "text that repeats", "verdict"], rows)


def _runs_with_sft(runs: Sequence[Figures]) -> list[Figures]:
    return [run for run in runs if run["policy"] == WITH_SFT]


def _short_verdict(run: Figures) -> str:
    return f"*{run['verdict'].partition(' (')[0]}*"


def _short_cells(own: Figures, scores: Figures, *, intervals: bool = True) -> list[str]:
    """A policy's figures in percent: on the recipe's own test prompts, and on both benchmarks."""
    followed, repetition = (
        _hundred(own[name]) if intervals else f"{100 * own[name]['value']:.1f}" for name in ("judge", "repetition")
    )
    ifbench = scores.get("IFBench")
    ifbench_share = f"{100 * ifbench['prompt_strict']['share']:.1f}" if ifbench else "–"
    return [followed, f"{100 * scores['IFEval']['average']:.1f}", ifbench_share, repetition]


def _evaluated(document: Figures) -> list[Figures]:
    """The runs with an evaluation, which an interrupted run lacks."""
    return [run for run in document.get("runs", []) if "ppo" in run]


def short_pair() -> str:
    """The seed and prompts behind `short_table`, and the answers to one prompt, for the README."""
    document = keep.load(INSTRUCTIONS)
    if not _evaluated(document):
        return NOT_MEASURED
    evaluated, base = _evaluated(document), document["policies"][0]
    runs = _first_runs([*_runs_with_sft(evaluated), *(run for run in evaluated if run["policy"] == "PPO")])
    prompt, answers = _compared_pairs(runs)[0]
    note = (
        f"Seed {runs[0]['seed']}, {runs[0]['ppo']['judge']['n']} own test prompts with 95% intervals, "
        f"{base['IFEval']['prompts']} prompts of IFEval. The first of ten own test prompts drawn at random:"
    )
    names = ("base", runs[0]["start"], runs[0]["policy"])
    shown = sorted((names.index(name), text) for name, text in answers if name in names)
    examples = [f"*{_sentence_case(names[place])}:* {_start(text)}" for place, text in shown]
    return "\n\n".join([note, f"> {_start(prompt)}", *examples])


def _first_runs(runs: Sequence[Figures]) -> list[Figures]:
    """The first run of each label, in the order of the labels."""
    first: dict[str, Figures] = {}
    for run in runs:
        first.setdefault(run["policy"], run)
    return list(first.values())


def _hundred(share: Figures) -> str:
    return interval({"value": 100 * share["value"], "ci95": [100 * end for end in share["ci95"]]}, 1)


def _start(text: str, words: int = 30) -> str:
    """The first words of a text, as inline code."""
    parts = text.replace("`", "'").split()
    return f"`{' '.join(parts[:words])}`" + (" …" if len(parts) > words else "")


def benchmarks_table(document: Figures) -> str:
    """Scores on both benchmarks, a row for each policy."""
    rows = [[name, f"{score:.1f}", *[""] * 8] for name, score in PUBLISHED]
    rows += [_row(policy) for policy in document["policies"]]
    figures = document["policies"][0]
    note = (
        f"Percent, with 95% intervals; greedy, at most 320 tokens; {figures['IFEval']['prompts']} prompts of IFEval"
        f"{_ifbench_prompts(figures)}. Average: prompts and instructions, strict and loose. "
        "The last four columns are of the answers to IFEval: cosine of prompt and answer by all-MiniLM-L6-v2, errors "
        "of grammar and spelling by harper, words, and the share of 4-grams that the answer has already had. "
        f"Scored on {document['machine']}, {document['cores']} cores."
    )
    words = ["python benchmarks/instructions.py", *["RUN"] * len(document["runs"])]
    if second := figures["IFEval"].get("second"):
        words += ["--verifiers", second["verifiers"]]
    command = " ".join(words)
    return f"{table(BENCHMARK_HEADS, rows)}\n\n{note}\n\nMade by `{command}`."


def sampled_table(document: Figures) -> str:
    """Scores of answers that were sampled, a table for each temperature; empty if none was."""
    policies = [policy for policy in document["policies"] if "sampled" in policy]
    parts = []
    for temperature in sorted({policy["sampled"]["temperature"] for policy in policies}):
        rows = [
            [_name(policy), f"{100 * policy['IFEval']['average']:.1f}", *_row(policy["sampled"])[1:]]
            for policy in policies
            if policy["sampled"]["temperature"] == temperature
        ]
        heads = ["policy", "IFEval, greedy", f"IFEval at {temperature:g}", *BENCHMARK_HEADS[2:]]
        command = f"python benchmarks/instructions.py {'RUN ' * (len(rows) - 1)}--temperature {temperature:g}"
        parts.append(f"Sampled at temperature {temperature:g}:\n\n{table(heads, rows)}\n\nMade by `{command}`.")
    return "\n\n".join(parts)


def _ifbench_prompts(figures: Figures) -> str:
    return (
        f" and {figures['IFBench']['prompts_scored']} of IFBench" if "IFBench" in figures else ", IFBench not measured"
    )


def runs_table(document: Figures) -> str:
    """Each run's own figures on the recipe's test split; empty without an evaluated run."""
    runs = _evaluated(document)
    if not runs:
        return ""
    names = {"judge": "all instructions followed", "loose": "loose", "reward": "reward", "kl": "KL, nats",
             "length": "tokens", "eos_rate": "ended by itself", "repetition": "repetition"}  # fmt: skip
    digits = {key: 1 if key == "length" else 2 for key in names}

    def row(name: str, policy: Figures, verdict: str = "") -> list[str]:
        return [name, *(interval(policy[key], digits[key]) if key in policy else "" for key in names), verdict]

    rows = []
    for run in runs:
        rows.append(row(f"{run['start']}, seed {run['seed']}", run["sft"]))
        rows.append(row(f"{run['policy']}, seed {run['seed']}", run["ppo"], run["verdict"]))
    rows.append(row("one text", document.get("one_text_on_test_split", {})))
    seconds = ", ".join(number(run["seconds"] / 60, 0) for run in runs)
    note = (
        f"On {runs[0]['ppo']['judge']['n']} prompts of the recipe's test split. PPO's updates took {seconds} minutes."
    )
    commands = "\n".join(f"- {run['policy']}, seed {run['seed']}: `{run['command']}`" for run in document["runs"])
    return f"{table(['policy', *names.values(), 'verdict'], rows)}\n\n{note}\n\nMade by\n\n{commands}"


def pairs_page(document: Figures) -> str:
    """Prompts drawn at random, with unedited answers; empty without a run."""
    pairs = _compared_pairs(_first_runs([run for run in document["runs"] if run["pairs"]]))
    parts = [f"{len(pairs)} own test prompts drawn at random, with the answers as they are:"] if pairs else []
    for index, (prompt, answers) in enumerate(pairs, 1):
        parts.append(f"**{index}.**\n\n{_quoted(prompt)}")
        parts += [f"*{_sentence_case(name)}:*\n\n{_quoted(text)}" for name, text in answers]
    return "\n\n".join(parts)


def _compared_pairs(runs: Sequence[Figures]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The prompts of the first run's pairs, each with (name, text) of its start and of each policy that answered it."""
    compared = []
    for pair in runs[0]["pairs"] if runs else []:
        answers: dict[str, str] = {}
        for run in runs:
            for other in run["pairs"]:
                if other["prompt"] == pair["prompt"]:
                    answers.setdefault(run["start"], other["start"])
                    answers[run["policy"]] = other["ppo"]
        compared.append((pair["prompt"], list(answers.items())))
    return compared


def _sentence_case(name: str) -> str:
    return name[:1].upper() + name[1:]


def _quoted(text: str) -> str:
    """A text in a code block, whose fence is longer than any fence in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text.strip() or '(empty)'}\n{fence}"


def _row(policy: Figures) -> list[str]:
    scores, ifbench = policy["IFEval"], policy.get("IFBench")
    second = scores.get("second")
    return [
        _name(policy),
        f"**{100 * scores['average']:.1f}**",
        _percent(scores["prompt_strict"]),
        _percent(scores["instruction_strict"]),
        f"{100 * second['average']:.1f}" if second else "",
        _percent(ifbench["prompt_strict"]) if ifbench else "",
        f"{scores['relevance']:.2f}" if "relevance" in scores else "",
        f"{-scores['grammar']:.1f}" if "grammar" in scores else "",
        f"{scores['words']:.0f}",
        number(-scores["repetition"], 2),
    ]


def _name(policy: Figures) -> str:
    return f"{policy['policy']}, seed {policy['seed']}" if "seed" in policy else policy["policy"]


def _percent(accuracy: Figures) -> str:
    low, high = (100 * end for end in accuracy["interval"])
    return f"{100 * accuracy['share']:.1f} ({low:.1f} to {high:.1f})"
